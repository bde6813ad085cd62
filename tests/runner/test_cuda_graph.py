"""The graph that runs a step, the places of the step's rows in it, and its harmless padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engines.headwise import HeadwiseBench, plant_prefix
from mrv1 import ModelRunner, SamplingParams, StepPlan
from mrv1.runner import cuda_graph
from mrv1.runner.cuda_graph import Forwarded, StepGraphs, decode_sizes, prompt_sizes
from mrv1.runner.device_step import DeviceStep, tails_of
from mrv1.runner.rows import DeviceRows, StepShape, Tail
from tests.models.families import tiny_checkpoint
from tests.runner.test_model_runner import enter, make_plan, make_runner
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


def test_each_graph_has_a_twin_with_adapters_if_requests_may_have_some():
    plain = StepGraphs(MAX_REQS, MAX_TOKENS, MAX_QUERY_LEN, 3)
    graphs = captured(StepGraphs(MAX_REQS, MAX_TOKENS, MAX_QUERY_LEN, 3, has_adapters=True))
    assert not any(shape.has_adapters for shape in plain.shapes)
    for names in ("shapes", "largest"):
        twins, own = getattr(graphs, names), getattr(plain, names)
        assert twins[1::2] == own
        assert twins[::2] == [replace(shape, has_adapters=True) for shape in own]
    for shape in plain.shapes:
        assert graphs.fit(shape) == shape
        twin = replace(shape, has_adapters=True)
        assert graphs.fit(twin) == twin


def test_no_graph_draws_where_custom_processors_do():
    plain = StepGraphs(MAX_REQS, MAX_TOKENS, MAX_QUERY_LEN, 3)
    graphs = captured(StepGraphs(MAX_REQS, MAX_TOKENS, MAX_QUERY_LEN, 3, draws=False))
    assert graphs.shapes == [shape for shape in plain.shapes if not shape.samples]
    assert set(graphs.largest) <= set(graphs.shapes)
    assert graphs.fit(StepShape.decode(3, samples=False)) == StepShape.decode(4, samples=False)
    assert graphs.fit(StepShape.decode(3, 3, samples=False)) is None


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
    assert graph in graphs.shapes
    assert graph.samples == (samples and not prompts)
    assert graph.max_query_len >= shape.max_query_len
    rows = graph.places_of(shape)
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


def test_a_row_of_one_token_may_be_prefilled():
    graphs = captured(StepGraphs(MAX_REQS, MAX_TOKENS, MAX_QUERY_LEN))
    query_lens, prefilled = np.array([1, 1, 1], dtype=np.int32), np.array([False, True, False])
    shape = StepShape.of(query_lens, prefilled=prefilled)
    assert (shape.num_decodes, shape.query_len) == (2, None)
    graph = graphs.fit(shape)
    assert (graph.query_len, graph.samples) == (None, False)
    assert graph.places_of(shape).tolist() == [0, 1, graph.num_decodes]
    plan = make_plan(0, {"a": (0, 1, ()), "b": (1, 1, ()), "c": (2, 1, ())})
    rows = DeviceRows.of(plan, plan.slots, shape, graph, prefilled)
    assert rows.idx_mapping[[rows.place(0), rows.place(1), rows.place(2)]].tolist() == [0, 1, 2]
    assert rows.place(1) == graph.num_decodes
    assert not rows.is_masked


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


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 4), (9, 16)])
def test_steps_with_drafts_have_graphs_of_their_own(num_rows, size):
    graphs = captured(StepGraphs(MAX_REQS, MAX_TOKENS, MAX_QUERY_LEN, max_drafts=3))
    shape = StepShape.decode(num_rows, 3)
    graph = graphs.fit(shape)
    assert graph == StepShape.decode(size, 3)
    assert graph in graphs.shapes
    assert graph.places_of(shape).tolist() == list(range(num_rows))
    assert graphs.fit(StepShape.decode(num_rows, 2)) is None
    assert graphs.fit(replace(shape, samples=False)) is None
    assert StepShape.decode(MAX_REQS, 3) in graphs.largest


def test_other_threads_may_use_the_gpu_during_a_capture(monkeypatch):
    """The first item has graphs captured again, while other requests pin their features."""
    modes = []

    @contextmanager
    def graph(_: object, *, pool: object, capture_error_mode: str = "global") -> Iterator[None]:
        modes.append(capture_error_mode)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    tail = Tail(masks=False, logprobs=False)
    StepGraphs(1, 16, 16).capture(
        [StepShape.decode(1, samples=False)],
        lambda _: (object(), torch.zeros(0)),  # type: ignore[arg-type, return-value]
        lambda *_: None,
        lambda _: [tail],
        progress=False,
    )
    assert modes == ["thread_local"] * 2  # the layers and the sampling


class LaunchedGraphs(StepGraphs):
    """Graphs on a CPU: a replay launches the ops that a graph would have captured."""

    def __init__(self, runner: ModelRunner) -> None:
        config = runner.config
        super().__init__(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            runner.max_model_len,
            config.max_draft_tokens,
            has_adapters=config.enable_lora,
        )
        captured(self)
        self.runner = runner
        step = runner._step
        layers = [shape for shape in self.shapes if not shape.samples]
        tails = partial(tails_of, step.config, has_processors=bool(step.processors))
        self._tails = {(shape, tail): None for shape in layers for tail in tails(shape)}
        most = config.max_num_seqs + config.max_num_batched_tokens
        step._hidden = step._hidden.new_empty(most, step._hidden.shape[1])
        self.replayed: list[StepShape] = []
        self.replayed_tails: list[Tail] = []

    def replay(self, shape: StepShape) -> Forwarded | None:
        self.replayed.append(shape)
        with torch.inference_mode():
            self.forwarded = self.runner._step.run_padding(shape)
        return self.forwarded

    def replay_tail(self, shape: StepShape, tail: Tail) -> None:
        assert (shape, tail) in self._tails
        self.replayed_tails.append(tail)
        self.runner._step.run_tail(self.forwarded, tail)


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
            core.runner._step.graphs = LaunchedGraphs(core.runner)
        requests = add_many(core, 2, max_tokens=20, seed=1)
        core.step()
        requests += add_many(core, 50, max_tokens=20, features=True)
        steps = 1 + run(core)
        requests += add_many(core, 3, max_tokens=20, seed=2, logprobs=True)
        steps += run(core)
        outputs.append(tokens(requests))
        if padded:
            graphs = core.runner._step.graphs
            replayed, tails = graphs.replayed, graphs.replayed_tails
            whole = [shape for shape in replayed if shape.samples]
            assert len(replayed) == steps
            # Log-probabilities beside a prompt are computed kernel by kernel, after its graph.
            assert len(whole) + len(tails) == core.metrics()["num_graph_steps"] < steps
            assert {*tails} == {Tail(masks=False, logprobs=asks) for asks in (False, True)}
            with_prompts = [shape for shape in replayed if shape.query_len is None]
            assert {shape.num_decodes for shape in with_prompts} == {0, 4, 40}
            assert len(with_prompts) < len(replayed)
        core.runner.close()
    assert outputs[0] == outputs[1]


class EvenTokens:
    """A grammar, and its own matcher, that allows every token with an even id."""

    def matcher(self) -> EvenTokens:
        return self

    def fill_bitmask(self, bitmask: np.ndarray) -> None:
        bitmask[:] = 0x55555555

    def accept(self, token_id: int) -> bool:
        return token_id % 2 == 0

    def is_finished(self) -> bool:
        return False


SAMPLED = {
    "plain": {"logprobs": 3},
    "greedy": {"temperature": 0, "logprobs": 5, "prompt_logprobs": 3},
    "none": {},
    "edited": {"logprobs": 2, "presence_penalty": 1.5, "logit_bias": {7: 3.0, 9: -3.0}},
    "grammar": {"structured_output": EvenTokens()},
    "both": {"structured_output": EvenTokens(), "logprobs": 0},
    "ids": {"logprob_token_ids": [3, 4], "logprobs": 1},
}
"""Sampling parameters of requests, by name."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("names", "tail"),
    [
        (("plain", "none", "greedy"), Tail(masks=False, logprobs=True)),
        (("plain", "edited"), Tail(masks=True, logprobs=True)),
        (("none", "grammar"), Tail(masks=True, logprobs=False)),
        (("both", "plain", "grammar", "edited", "none"), Tail(masks=True, logprobs=True)),
        (("ids", "ids"), None),
    ],
)
def test_captured_sampling_equals_that_of_a_step_without_graphs(checkpoint, device, names, tail):
    """Tokens, log-probabilities and ranks are the same; raw values are those before the edits."""
    found = []
    for is_captured in (False, True):
        on_gpu = device.type == "cuda"
        core = make_core(
            checkpoint, device=device.type, dtype="float32" if on_gpu else "float64",
            cuda_graphs=is_captured, deterministic=on_gpu,
        )  # fmt: skip
        if is_captured and not on_gpu:
            core.runner._step.graphs = LaunchedGraphs(core.runner)
        requests = [
            core.add_request(
                str(i),
                [5, 6, 7 + i],
                SamplingParams(
                    **{"seed": i, "max_tokens": 5 + i, "ignore_eos": True} | SAMPLED[n]
                ),
            )
            for i, n in enumerate(names)
        ]
        num_steps = run(core)
        logprobs = [[*r.prompt_logprobs, *r.output_logprobs] for r in requests]
        found.append((tokens(requests), logprobs))
        if is_captured:
            num_graph_steps = core.metrics()["num_graph_steps"]
            assert (num_graph_steps == 0) == (tail is None)
            assert tail is None or num_graph_steps >= num_steps - 2
        if is_captured and not on_gpu:
            assert tail in {None, *core.runner._step.graphs.replayed_tails}
        core.runner.close()
    (tokens_before, before), (tokens_after, after) = found
    assert tokens_before == tokens_after
    for request_before, request_after in zip(before, after, strict=True):
        for one, other in zip(request_before, request_after, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.ranks.tolist() == other.ranks.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


def test_a_later_capture_applies_no_mask_of_an_older_step(checkpoint, monkeypatch):
    """The older step's mask is for a row that the smaller shapes do not have."""
    captured_tails = []

    def capture(graphs, shapes, run, sample, tails, *, progress):
        for shape in shapes:
            if shape.query_len == 1 and not shape.samples:
                forwarded = run(shape)
                for tail in tails(shape):
                    sample(forwarded, tail)  # the oracle refuses a row out of range
                    captured_tails.append((shape.num_rows, tail))

    monkeypatch.setattr(DeviceStep, "is_capturable", True)
    monkeypatch.setattr(StepGraphs, "capture", capture)
    runner = make_runner(checkpoint, device="cpu")
    new = enter("a", 0, [5, 6]), enter("b", 1, [7, 8])
    runner.forward(make_plan(0, {"a": (0, 2, (0,)), "b": (1, 2, (1,))}, new=new))
    masks = np.full((1, runner.sampler.limits.mask_words), 1, dtype=np.int32)
    runner.sample(masks, [1]).result()
    captured_tails.clear()
    runner._sleep.capture_again()
    assert (1, Tail(masks=True, logprobs=False)) in captured_tails
    runner.close()


def test_a_graph_runs_the_step_after_a_prefix_hit_of_any_length():
    """The step uploads the tokens and the block ids of the whole prompt."""
    bench = HeadwiseBench(
        shape="tiny-random", device="cpu", context=80_000, streaming_ratio=0.5, max_num_seqs=1,
        max_num_batched_tokens=64, kv_cache_memory_bytes=100 << 20, planted=True,
        prompt_tokens=79_000,
    )  # fmt: skip
    prompt = [5, 6, 7, 8] * (bench.prompt_tokens // 4)
    model = bench.new_model(torch.device("cpu"))
    with bench.engine("recycled", model, enable_prefix_caching=True) as core:
        core.runner._step.graphs = LaunchedGraphs(core.runner)
        plant_prefix(core, prompt)
        core.add_request("a", prompt, SamplingParams(max_tokens=4))
        plan = core.scheduler.schedule()
        assert plan.num_scheduled_tokens.tolist() == [8]
        rows, staged = core.runner._prepare(plan, samples=True)
    assert rows.is_captured
    assert staged is None, "a graph finds the upload at its place"


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
        runner._step.graphs = LaunchedGraphs(runner)
        sent = []
        send, execute = runner._step.staging.send, runner.execute
        monkeypatch.setattr(
            runner._step.staging,
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


def test_a_capture_samples_no_values_of_the_captured_run(monkeypatch):
    """Nothing has written them: rows that sample would be read at any index."""

    class Capture:
        is_on = False

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> None:
            Capture.is_on = True

        def __exit__(self, *_: object) -> None:
            Capture.is_on = False

    for name in ("CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, Capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    graphs, tail = StepGraphs(4, 32, 32), Tail(masks=False, logprobs=False)
    sampled = []

    def run(shape: StepShape) -> Any:
        return None if shape.samples else (shape, Capture.is_on)

    def sample(forwarded: Any, tail: Tail) -> None:
        shape, is_captured = forwarded
        assert is_captured == Capture.is_on
        sampled.append((shape, is_captured))

    graphs.capture(graphs.shapes, run, sample, lambda shape: [tail], progress=False)
    layers = [shape for shape in graphs.shapes if not shape.samples]
    assert sampled == [(shape, is_on) for shape in layers for is_on in (False, True)]
    assert all(graphs.fit_tail(shape, tail) == tail for shape in layers)
