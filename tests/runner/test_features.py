"""Features and ranges in plans written by hand: a foreign scheduler needs nothing else."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from mrv1 import CapacityError, StepError
from mrv1.multimodal import MultimodalItem
from mrv1.runner import StagedFeatures, StepPlan
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
    return StagedFeatures(item=item, rows=tuple([range(row, row + 1) for row in rows]))


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


def test_an_item_that_is_staged_again_elsewhere_leaves_its_former_rows(runner):
    item, other, third = (item_of(runner, seed=seed) for seed in range(3))

    def run(step: int, own: MultimodalItem, *stagings: StagedFeatures) -> None:
        new = (enter("a", 0, PROMPT, epoch=step, multimodal=(own,)),)
        leaving = (0,) if step else ()
        rows = {"a": (0, 8, (0,))}
        plan = make_plan(
            step, rows, epoch=step, new=new, finished=leaving, staged_features=stagings
        )
        runner.execute(plan).result()

    run(0, item, staged(item, 0, 1, 2, 3))
    run(1, item, staged(item, 5, 6, 7, 8))
    run(2, other, staged(other, 0, 1, 2, 3))
    run(3, item)  # still in the rows from 5 on
    with pytest.raises(StepError, match="or its rows given to another item since"):
        run(4, item, staged(third, 8, 9, 4, 3))
    run(5, third)
    assert sorted(runner.features._stagings.values()) == sorted(runner.features._staged)


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (range(3),),
        (range(3), range(10, 11)),
        (range(7, 11),),
        (range(-1, 3),),
        (range(2), range(1, 3)),
        (range(1, 4), range(1, 2)),
        (range(0, 8, 2),),
        (range(4, 0, -1),),
        (range(4), range(5, 5)),
    ],
)
def test_wrong_rows_are_named(runner, rows):
    item = item_of(runner)
    new = (enter("a", 0, PROMPT, multimodal=(item,)),)
    own = StagedFeatures(item=item, rows=rows)
    plan = make_plan(0, {"a": (0, 8, (0,))}, new=new, staged_features=(own,))
    with pytest.raises(StepError, match=r"expected 4 different rows in \[0, 10\), got \["):
        runner.execute(plan)


def test_a_chunk_that_ends_before_a_key_that_it_sees_fails_the_step(runner):
    ranges = np.array([[0, 1], [0, 2], *[[0, 6]] * 4, [0, 7], [0, 8]], dtype=np.int32)
    new = (enter("a", 0, PROMPT, attn_mask_offsets=ranges),)
    with pytest.raises(StepError, match="expected a chunk up to token 6, which its tokens see"):
        runner.execute(make_plan(0, {"a": (0, 4, (0,))}, new=new))


def test_features_are_copied_before_the_rest_of_the_step_is_prepared(runner, monkeypatch):
    """So that a GPU copies while the host prepares; a CPU has copied when the call returns."""
    item, other = item_of(runner), item_of(runner, seed=1, size=3, start=6)
    new = (enter("a", 0, [*PROMPT, 3], multimodal=(item, other)),)
    runs = StagedFeatures(item=item, rows=(range(6, 9), range(1)))
    tail = StagedFeatures(item=other, rows=(range(2, 5),))
    plan = make_plan(0, {"a": (0, 9, (0,))}, new=new, staged_features=(runs, tail))
    seen = []

    def spied(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def spy(*args: object, **kwargs: object) -> object:
            rows = runner.features.rows
            is_copied = torch.equal(rows[[6, 7, 8, 0]], item.tensor)
            seen.append((name, is_copied and torch.equal(rows[2:5], other.tensor)))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, spy)

    for owner, name in (
        (runner.features, "stage"),
        (runner.state, "stage"),
        (runner._step.staging, "send"),
        (runner._step, "forward"),
    ):
        spied(owner, name)
    runner.execute(plan).result()
    assert seen == [("stage", False), ("stage", True), ("send", True), ("forward", True)]


def test_an_item_whose_copy_fails_is_not_staged(runner):
    """Its rows have the features of no item, and the step may be given again."""
    former, item = item_of(runner), item_of(runner, seed=1)

    def run(step: int, own: MultimodalItem, *stagings: StagedFeatures) -> None:
        new = (enter("a", 0, PROMPT, epoch=step, multimodal=(own,)),)
        leaving = (0,) if step else ()
        rows = {"a": (0, 8, (0,))}
        plan = make_plan(
            step, rows, epoch=step, new=new, finished=leaving, staged_features=stagings
        )
        runner.execute(plan).result()

    run(0, former, staged(former, 0, 1, 2, 3))
    broken = copy.copy(item)
    object.__setattr__(broken, "features", item.tensor[:, :-1])
    with pytest.raises(StepError, match="size"):
        run(1, broken, staged(broken, 0, 1, 2, 3))
    for each in (former, item):
        with pytest.raises(StepError, match=r"expected the item .* staged before its first chunk"):
            run(2 if each is former else 3, each)
    run(4, item, staged(item, 0, 1, 2, 3))


# --- memory --------------------------------------------------------------------------------------


def item_plan(runner) -> StepPlan:
    item = item_of(runner)
    new = (enter("a", 0, PROMPT, multimodal=(item,)),)
    return make_plan(0, {"a": (0, 8, (0,))}, new=new, staged_features=(staged(item, 2, 3, 4, 5),))


def test_a_model_of_text_allocates_the_buffer_with_its_first_item(checkpoint, runner):  # noqa: F811
    assert runner.kv_report()["feature_bytes"] == 10 * 64 * 4, "as configured, from the start"
    want = runner.execute(item_plan(runner)).result().token_ids
    late = make_runner(checkpoint)
    text = enter("b", 1, PROMPT)
    late.execute(make_plan(0, {"b": (1, 4, (1,))}, new=(text,))).result()
    assert late.kv_report()["feature_bytes"] == 0
    waiting = late.execute(make_plan(1, {"b": (1, 4, ())}))
    assert late.execute(item_plan(late)).result().token_ids == want
    assert late.kv_report()["feature_bytes"] == 8192 * 64 * 4
    assert len(waiting.result().token_ids) == 1, "the result of the step in flight is not lost"


@pytest.mark.parametrize("stage", ["allocate", "capture"])
def test_a_buffer_without_room_fails_its_step_alone(checkpoint, monkeypatch, stage):  # noqa: F811
    runner, captures = make_runner(checkpoint), []
    owner = runner.features if stage == "allocate" else runner._step
    original = getattr(owner, stage)

    def failing(**options: object) -> None:
        captures.append(options)
        if len(captures) == 1:
            raise CapacityError("no room") if stage == "allocate" else torch.OutOfMemoryError()
        original(**options)

    monkeypatch.setattr(owner, stage, failing)
    message = "no room" if stage == "allocate" else "CUDA graphs: expected room on cpu, got less"
    with pytest.raises(StepError, match=message):
        runner.execute(item_plan(runner))
    assert runner.kv_report()["feature_bytes"] == 0
    assert stage == "allocate" or len(captures) == 2, "graphs without the buffer"
    assert runner.execute(item_plan(runner)).result().token_ids
