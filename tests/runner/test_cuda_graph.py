"""The graph that runs a step, the places of the step's rows in it, and its harmless padding."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import SamplingParams, StepPlan
from mrv1.engine.core import EngineCore
from mrv1.runner import cuda_graph
from mrv1.runner.cuda_graph import Forwarded, StepGraphs, decode_sizes, prompt_sizes
from mrv1.runner.rows import StepShape
from tests.models.families import tiny_checkpoint
from tests.runner.test_on_gpu import add_many, make_core, run, tokens

MAX_REQS, MAX_TOKENS, MAX_QUERY_LEN = 40, 700, 500


@pytest.mark.parametrize("most", [1, 2, 5, 16, 40, 64, 100, 256, 1000])
def test_graph_sizes_rise_to_the_maximum_of_a_step(most):
    for sizes in (decode_sizes(most), prompt_sizes(most)):
        assert sizes == sorted(set(sizes))
        assert sizes[0] >= 1
        assert sizes[-1] == most
    padding = [after / before for before, after in pairwise(sizes)]
    assert max(padding, default=1) <= 2


def captured(graphs: StepGraphs) -> StepGraphs:
    graphs._graphs = dict.fromkeys(graphs.shapes)
    return graphs


@given(
    num_decodes=st.integers(0, MAX_REQS),
    prompts=st.lists(st.integers(2, 90), max_size=12),
    samples=st.booleans(),
)
def test_a_step_fits_its_graph_with_separate_rows_for_decodes_and_prompts(
    num_decodes, prompts, samples
):
    query_lens = np.array([1] * num_decodes + prompts, dtype=np.int32)
    if not 0 < len(query_lens) <= MAX_REQS or query_lens.sum() > MAX_TOKENS:
        return
    graphs = captured(StepGraphs(MAX_REQS, MAX_TOKENS, MAX_QUERY_LEN))
    shape = StepShape.of(query_lens, samples=samples)
    graph = graphs.fit(shape)
    if prompts and not samples:
        assert graph is None
        return
    assert graph in graphs.shapes
    assert graph.samples == samples
    assert graph.max_query_len >= shape.max_query_len
    rows = graph.rows_of(shape)
    assert (rows[:num_decodes] == np.arange(num_decodes)).all()
    assert num_decodes <= graph.num_decodes
    if prompts:
        first = graph.num_decodes
        assert (rows[num_decodes:] == first + np.arange(len(prompts))).all()
        assert rows.max() < graph.num_rows
        assert graph.num_decodes + sum(prompts) <= graph.num_tokens
        assert graph.query_len is None
    else:
        assert (graph.query_len, graph.num_tokens) == (1, graph.num_rows)


def test_steps_that_no_graph_covers_get_none():
    graphs = StepGraphs(MAX_REQS, MAX_TOKENS, MAX_QUERY_LEN)
    decode = StepShape.decode(3)
    assert graphs.fit(decode) is None, "no graph has been captured"
    captured(graphs)
    assert graphs.fit(decode) == StepShape.decode(4)
    assert set(graphs.largest) <= set(graphs.shapes)
    too_many = StepShape.of(np.array([MAX_TOKENS + 1], dtype=np.int32))
    assert graphs.fit(too_many) is None
    assert graphs.fit(StepShape.decode(MAX_REQS + 1)) is None
    drafts = StepShape.of(np.array([3, 3], dtype=np.int32), has_drafts=True)
    assert graphs.fit(drafts) is None


class LaunchedGraphs(StepGraphs):
    """Graphs on a CPU: a replay launches the ops that a graph would have captured."""

    def __init__(self, core: EngineCore) -> None:
        config = core.config
        super().__init__(config.max_num_seqs, config.max_num_batched_tokens, core.max_model_len)
        captured(self)
        self.runner = core.runner
        self.replayed: list[StepShape] = []

    def replay(self, shape: StepShape) -> Forwarded | None:
        self.replayed.append(shape)
        with torch.inference_mode():
            return self.runner._step.run_padding(shape)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3", eos_token_id=2)
    return path


@pytest.mark.parametrize("overlap", [False, True])
def test_padding_changes_no_token(checkpoint, overlap, monkeypatch):
    """Chunked prompts with decodes, prompts alone and decodes alone, each in a larger graph."""
    monkeypatch.setattr(cuda_graph, "SMALL_DECODE", 4)
    outputs = []
    for padded in (False, True):
        core = make_core(
            checkpoint, device="cpu", dtype="float64", max_num_seqs=40, overlap=overlap,
            num_kv_blocks=250, max_num_batched_tokens=100,
        )  # fmt: skip
        if padded:
            core.runner._graphs = LaunchedGraphs(core)
        requests = add_many(core, 2, max_tokens=20, seed=1)
        core.step()
        requests += add_many(core, 50, max_tokens=20, features=True)
        steps = 1 + run(core)
        requests += add_many(core, 3, max_tokens=20, seed=2, logprobs=True)
        steps += run(core)
        outputs.append(tokens(requests))
        if padded:
            replayed = core.runner._graphs.replayed
            whole = [shape for shape in replayed if shape.samples]
            assert len(whole) == core.metrics()["num_graph_steps"] < len(replayed) < steps
            with_prompts = [shape for shape in whole if shape.query_len is None]
            assert {shape.num_decodes for shape in with_prompts} == {0, 4, 40}
            assert len(with_prompts) < len(whole)
        core.runner.close()
    assert outputs[0] == outputs[1]


def copied(plan: StepPlan) -> StepPlan:
    arrays = ("slots", "epochs", "num_scheduled_tokens")
    return replace(plan, **{name: np.copy(getattr(plan, name)) for name in arrays})


def test_a_step_that_continues_another_uploads_new_blocks_only(checkpoint, monkeypatch):
    """Once each slot of the upload ring has the rows, only steps with new blocks upload.

    The plan's ``continues`` decides, not the identity of its arrays: without ``continues`` each
    step uploads.
    """
    outputs, num_sent = [], []
    for changed in (lambda plan: plan, copied, lambda plan: replace(plan, continues=None)):
        core = make_core(checkpoint, device="cpu", dtype="float64", max_num_seqs=4)
        runner = core.runner
        runner._graphs = LaunchedGraphs(core)
        sent = []
        send, execute = runner._staging.send, runner.execute
        monkeypatch.setattr(
            runner._staging,
            "send",
            lambda *a, send=send, sent=sent, **k: sent.append(a) or send(*a, **k),
        )
        monkeypatch.setattr(
            runner,
            "execute",
            lambda plan, execute=execute, changed=changed: execute(changed(plan)),
        )
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        requests = [core.add_request(str(i), [5, 6, 7 + i], params) for i in range(3)]
        steps = run(core)
        outputs.append(tokens(requests))
        num_sent.append(len(sent))
        num_growing = -(-63 // core.config.block_size)
        most = 2 * runner._outputs.num_slots * num_growing
        runner.close()
    assert num_sent[0] == num_sent[1] <= most < steps
    assert num_sent[2] >= 60
    assert outputs[0] == outputs[1] == outputs[2]
