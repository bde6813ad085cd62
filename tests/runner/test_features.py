"""Features and ranges in plans written by hand: a foreign scheduler needs nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv1 import StepError
from mrv1.multimodal import MultimodalItem
from mrv1.runner import StagedFeatures
from mrv1.runner.features import _runs
from tests.runner.test_model_runner import checkpoint, enter, make_plan, make_runner  # noqa: F401

PROMPT = [5, 9, *[7] * 4, 8, 6]


@pytest.fixture
def runner(checkpoint):  # noqa: F811
    return make_runner(checkpoint, mm_cache_memory_bytes=10 * 64 * 4)


def item_of(runner, seed: int = 0, size: int = 4, **fields: object) -> MultimodalItem:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(size, runner.model_config.hidden_size, generator=generator)
    return runner.prepared(MultimodalItem(**({"features": rows, "start": 2} | fields)))


def staged(item: MultimodalItem, *rows: int) -> StagedFeatures:
    return StagedFeatures(item=item, rows=np.array(rows, dtype=np.int32))


def hidden_inputs(runner, plan) -> torch.Tensor:
    """Return the hidden states that a step's first layer gets."""
    seen = []
    ops = runner.model._ops
    original = ops.embed_tokens

    def spied(*args: object, **kwargs: object) -> object:
        hidden, angles = original(*args, **kwargs)
        seen.append(hidden.clone())
        return hidden, angles

    ops.embed_tokens = spied
    try:
        runner.execute(plan).result()
    finally:
        ops.embed_tokens = original
    return seen[0]


@pytest.mark.parametrize("rows", [(2, 3, 4, 5), (9, 0, 7, 8), (3, 1, 2, 0)])
def test_the_rows_of_a_chunk_replace_embeddings_in_the_order_of_the_batch(runner, rows):
    """Prefill rows follow decode rows on the device; items lie anywhere in the buffer."""
    item, embed = item_of(runner), runner.model.weights.embed
    plan = make_plan(
        0,
        {"a": (0, 4, (0,)), "b": (2, 1, (1,))},
        new=(enter("a", 0, PROMPT, multimodal=(item,)), enter("b", 2, PROMPT)),
        staged_features=(staged(item, *rows),),
    )
    want = torch.stack([embed[5], embed[5], embed[9], *item.tensor[:2]])
    assert torch.equal(hidden_inputs(runner, plan), want)
    plan = make_plan(1, {"b": (2, 6, ()), "a": (0, 1, ())})
    want = torch.stack([item.tensor[2], *embed[PROMPT[1:7]]])
    assert torch.equal(hidden_inputs(runner, plan), want)
    plan = make_plan(2, {"b": (2, 1, ()), "a": (0, 3, ())})
    want = torch.stack([embed[6], item.tensor[3], *embed[PROMPT[6:]]])
    assert torch.equal(hidden_inputs(runner, plan), want)
    assert runner.features._items == {}, "all tokens of the item are computed"


def test_an_item_that_is_not_staged_fails_the_step(runner):
    item, other = item_of(runner), item_of(runner, seed=1, size=7)
    new = (enter("a", 0, PROMPT, multimodal=(item,)),)
    with pytest.raises(
        StepError, match=r"staged_features: expected the item \(image at token 2\)"
    ):
        runner.execute(make_plan(0, {"a": (0, 8, (0,))}, new=new))
    new = (enter("b", 1, PROMPT, multimodal=(item,)),)
    plan = make_plan(1, {"b": (1, 3, (1,))}, new=new, staged_features=(staged(item, 0, 1, 2, 3),))
    runner.execute(plan).result()
    takes_rows = make_plan(2, {"b": (1, 1, ())}, staged_features=(staged(other, *range(7)),))
    with pytest.raises(StepError, match="or its rows given to another item since"):
        runner.execute(takes_rows)


@pytest.mark.parametrize("rows", [(0, 1, 2), (0, 1, 2, 10), (-1, 0, 1, 2), (0, 1, 1, 2)])
def test_wrong_rows_are_named(runner, rows):
    item = item_of(runner)
    new = (enter("a", 0, PROMPT, multimodal=(item,)),)
    plan = make_plan(0, {"a": (0, 8, (0,))}, new=new, staged_features=(staged(item, *rows),))
    with pytest.raises(StepError, match=r"expected 4 different rows in \[0, 10\), got \["):
        runner.execute(plan)


def test_a_chunk_that_ends_before_a_key_that_it_sees_fails_the_step(runner):
    ranges = np.array([[0, 1], [0, 2], *[[0, 6]] * 4, [0, 7], [0, 8]], dtype=np.int32)
    new = (enter("a", 0, PROMPT, attn_mask_offsets=ranges),)
    with pytest.raises(StepError, match="expected a chunk up to token 6, which its tokens see"):
        runner.execute(make_plan(0, {"a": (0, 4, (0,))}, new=new))


def test_runs_of_rows():
    rows = np.array([4, 5, 6, 1, 2, 9], dtype=np.int32)
    assert [*_runs(rows)] == [(4, 0, 3), (1, 3, 5), (9, 5, 6)]
    assert [*_runs(rows[:1])] == [(4, 0, 1)]
