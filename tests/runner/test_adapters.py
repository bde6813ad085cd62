"""Requests with adapters (LoRA) in a runner: tokens are those of a model with one merged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mrv1 import ModelRunner, SamplingParams, StepError
from tests.models.families import save_checkpoint, tiny_config
from tests.models.lora import Adapter, merge, random_adapter
from tests.runner.test_cuda_graph import LaunchedGraphs
from tests.runner.test_model_runner import enter, make_plan, make_runner

PROMPTS = {"a": [5, 9, 23, 41, 77], "b": [11] * 20, "c": [3, 1, 4]}
SLOTS = {"a": 1, "b": -1, "c": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_checkpoint(path, tiny_config("llama", tie_word_embeddings=False))
    return path


def runner_of(checkpoint: Path, **options: object) -> ModelRunner:
    return make_runner(checkpoint, device="cpu", dtype="float64", **options)


def adapters_of(runner: ModelRunner) -> dict[int, Adapter]:
    return {slot: random_adapter(runner.model_config, slot) for slot in (0, 1)}


def run(runner: ModelRunner, names: str, slots: dict[str, int], **options: object) -> dict:
    """Run requests in chunks beside each other; return their tokens and prompts' logprobs."""
    params = SamplingParams(**({"temperature": 0} | options))
    place = {name: index for index, name in enumerate(PROMPTS)}
    new = tuple(
        enter(name, place[name], PROMPTS[name], adapter_slot=slots[name], sampling_params=params)
        for name in names
    )
    left = {name: len(PROMPTS[name]) for name in names}
    found = {name: ([], []) for name in names}
    for step in range(8):
        rows = {}
        for name in names:
            count = min(left[name], 13) or 1
            left[name] -= min(left[name], 13)
            first = 2 * place[name]
            blocks = (first, first + 1) if step == 0 else ()
            rows[name] = (place[name], count, blocks)
        output = runner.execute(make_plan(step, rows, new=new if step == 0 else ())).result()
        for row, name in enumerate(output.req_ids):
            found[name][0].extend(output.token_ids[row])
            if row in output.prompt_logprobs:
                found[name][1].append(output.prompt_logprobs[row].logprobs)
    return {name: (tokens, np.concatenate(parts or [[]])) for name, (tokens, parts) in
            found.items()}  # fmt: skip


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("asks", [{}, {"prompt_logprobs": 1, "logprobs": 1}])
def test_each_request_equals_a_runner_whose_model_has_its_adapter_merged(checkpoint, graphs, asks):
    runner = runner_of(checkpoint, enable_lora=True, max_loras=2, max_lora_rank=4)
    adapters = adapters_of(runner)
    for slot, adapter in adapters.items():
        runner.model.lora.load(slot, adapter)
    if graphs:
        runner._step.graphs = LaunchedGraphs(runner)
    found = run(runner, "abc", SLOTS, **asks)
    if graphs:
        shapes = runner._step.graphs.replayed
        assert shapes
        assert all(shape.has_adapters for shape in shapes)
    for name, slot in SLOTS.items():
        alone = runner_of(checkpoint)
        if slot >= 0:
            merge(alone.model, adapters[slot])
        tokens, logprobs = run(alone, name, dict.fromkeys(PROMPTS, -1), **asks)[name]
        assert found[name][0] == tokens
        np.testing.assert_allclose(found[name][1], logprobs, rtol=0, atol=1e-9)
        alone.close()
    runner.close()


def test_a_step_in_which_no_request_has_an_adapter_runs_without(checkpoint, monkeypatch):
    """The graph of a model without adapters runs, and no op for adapters is called."""
    runner = runner_of(checkpoint, enable_lora=True, max_loras=2, max_lora_rank=4)
    runner._step.graphs = LaunchedGraphs(runner)
    calls = []
    monkeypatch.setattr(runner.model._ops, "linear", _counting(runner.model._ops.linear, calls))
    run(runner, "ab", {"a": -1, "b": -1})
    assert calls
    assert all(adapters is None for adapters in calls)
    assert not any(shape.has_adapters for shape in runner._step.graphs.replayed)
    runner.close()


def _counting(linear, calls: list):
    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(kwargs.get("adapters"))
        return linear(*args, **kwargs)

    return counted


def test_a_slot_has_no_adapter_of_the_request_before(checkpoint):
    runner = runner_of(checkpoint, enable_lora=True, max_loras=2, max_lora_rank=4)
    runner.model.lora.load(1, adapters_of(runner)[1])
    run(runner, "a", {"a": 1})
    again = enter("d", 0, PROMPTS["a"], epoch=1)
    plan = make_plan(8, {"d": (0, 5, (0,))}, epoch=1, new=(again,), finished=(0,))
    tokens = runner.execute(plan).result().token_ids
    plain = runner_of(checkpoint)
    assert tokens[0][0] == run(plain, "a", {"a": -1})["a"][0][0]
    runner.close()
    plain.close()


def test_a_request_goes_on_with_its_adapter_in_another_slot(checkpoint):
    runner = runner_of(checkpoint, enable_lora=True, max_loras=2, max_lora_rank=4)
    adapters = adapters_of(runner)
    runner.model.lora.load(1, adapters[1])
    expected = run(runner, "a", {"a": 1})["a"][0]
    again = enter("d", 0, PROMPTS["a"], epoch=1, adapter_slot=1)
    plan = make_plan(8, {"d": (0, 5, (0,))}, epoch=1, new=(again,), finished=(0,))
    tokens = [*runner.execute(plan).result().token_ids[0]]
    for slot in (0, 1):
        runner.model.lora.load(slot, adapters[1 - slot])
    for step in range(9, 13):
        plan = make_plan(step, {"d": (0, 1, ())}, epoch=1)
        moved = replace(plan, adapter_slots={0: 0} if step == 9 else {})
        tokens += runner.execute(moved).result().token_ids[0]
    assert tokens == expected[:5]
    runner.close()


def test_an_adapter_without_the_option_is_refused(checkpoint):
    runner = runner_of(checkpoint)
    new = (enter("a", 0, PROMPTS["a"], adapter_slot=0),)
    with pytest.raises(StepError, match="adapter_slot of 'a': expected -1 without enable_lora"):
        runner.execute(make_plan(0, {"a": (0, 5, (0,))}, new=new))
    runner.close()
