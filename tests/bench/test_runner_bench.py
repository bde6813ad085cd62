"""The runner benchmark: its figures of a trace, its clock, its steady batches, its result."""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engines import runner
from benchmarks.engines.engine import start_engine
from benchmarks.engines.first_requests import KINDS
from benchmarks.engines.runner import RunnerBench, queued, run_runner, steady, step_times
from benchmarks.measure import host_clock
from benchmarks.measure.host_clock import host_times
from benchmarks.measure.trace import STEPS_RANGE, Event, StepTrace, summarize, trace_steps
from mrv1.engine import EngineCore
from mrv1.engine.scheduler import Scheduler
from mrv1.errors import CapacityError, ConfigError, StepError
from mrv1.models import DecoderModel
from mrv1.runner import AsyncOutput, ModelRunner
from tests.engine.scheduler_model import num_free_slots

CPU = torch.device("cpu")
SMALL = {
    "shape": "tiny-random",
    "batches": (1, 3),
    "prompt_tokens": 4,
    "steps": 3,
    "waiting": (0, 5),
    "device": "cpu",
}
KEYS = {
    "op", "schema", "shape", "weights", "dtype", "path", "device", "driver", "versions", "commit",
    "date", "conditions", "results", "waiting", "first_requests",
}  # fmt: skip
ENTRY_KEYS = {
    "batch", "step_ms", "step_p20_ms", "step_p80_ms", "gpu_ms", "staging_waits", "host", "trace",
    "deterministic_step_ms", "deterministic_over_default", "rank_invariant_step_ms",
    "rank_invariant_over_default", "logprobs_step_ms", "logprobs_over_default", "samples_ms",
}  # fmt: skip
HOST_KEYS = {
    "total_us", "mean_total_us", "quietest_us", "schedule_us", "execute_us", "read_us",
    "update_us",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _few_warm_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "WARM_STEPS", 1)
    monkeypatch.setattr(runner, "HOST_WINDOWS", 3)
    monkeypatch.setattr("benchmarks.engines.first_requests.TOKENS", 2)


# --- the trace -----------------------------------------------------------------------------------

COMPUTE, COPY = 7, 13


def _event(category: str, name: str, ts: float, dur: float, **args: int) -> Event:
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}


def _call(name: str, ts: float, correlation: int) -> Event:
    category = "cuda_runtime" if name.startswith("cuda") else "cuda_driver"
    return _event(category, name, ts, 1, correlation=correlation)


def _work(category: str, ts: float, dur: float, launch: int) -> Event:
    return _event(category, category, ts, dur, correlation=launch, stream=COMPUTE)


def _copy(name: str, ts: float, dur: float, launch: int, stream: int) -> Event:
    return _event("gpu_memcpy", f"Memcpy {name}", ts, dur, correlation=launch, stream=stream)


TRACE = [
    {"ph": "M", "name": "process_name"},
    _event("user_annotation", STEPS_RANGE, 100, 100),
    _event("user_annotation", "another", 0, 500),
    # before the steps: its kernel runs during the steps but is not counted
    _call("cudaLaunchKernel", 90, 1),
    _work("kernel", 110, 50, 1),
    # the first step: a copy, a graph of two kernels that overlap and one after a gap of 2
    _call("cudaMemcpyAsync", 101, 2),
    _call("cudaGraphLaunch", 103, 3),
    _copy("HtoD (Pinned -> Device)", 1000, 3, 2, COMPUTE),
    _work("kernel", 1004, 10, 3),
    _work("kernel", 1010, 6, 3),
    _work("kernel", 1018, 2, 3),
    # the first step's output is copied on the other stream, while no kernel runs
    _call("cudaMemcpyAsync", 110, 4),
    _copy("DtoH (Device -> Pinned)", 1020, 9, 4, COPY),
    _call("cudaEventSynchronize", 120, 5),
    _call("cudaEventQuery", 121, 6),
    # the second step: a fill, then single kernels without a graph, then two waits for the device
    _call("cudaMemsetAsync", 130, 7),
    _call("cuLaunchKernelEx", 131, 8),
    _call("cudaLaunchKernel", 132, 9),
    _work("gpu_memset", 1030, 1, 7),
    _work("kernel", 1031, 4, 8),
    _work("kernel", 1040, 10, 9),
    _call("cudaStreamSynchronize", 140, 10),
    _call("cudaDeviceSynchronize", 141, 11),
    # after the steps
    _call("cudaDeviceSynchronize", 201, 12),
]


def test_a_trace_is_counted_step_by_step():
    trace = summarize(TRACE, 2)
    # From 1000 to 1050 the GPU works for 3, 12 (1004 to 1016), 2, 5 (1030 to 1035) and 10.
    assert trace.step_us == 50 / 2
    assert trace.busy_us == (3 + 12 + 2 + 5 + 10) / 2
    assert trace.idle_share == pytest.approx(18 / 50)
    # Idle: 1003 to 1004, 1020 to 1030, 1035 to 1040. The gap of 2 (1016) is inside the graph.
    assert trace.idle_between_launches_share == pytest.approx(16 / 50)
    assert (trace.graph_launches, trace.kernel_launches) == (0.5, 1)
    assert (trace.host_to_device_copies, trace.device_to_host_copies) == (0.5, 0.5)
    assert (trace.event_waits, trace.other_waits) == (0.5, 1)


def test_the_order_of_a_traces_events_does_not_matter():
    assert summarize(reversed(TRACE), 2) == summarize(TRACE, 2)


def test_events_with_hip_names_are_counted_too():
    renamed = json.loads(json.dumps(TRACE).replace('"cuda', '"hip').replace("hip_", "cuda_"))
    assert any(event["name"] == "hipGraphLaunch" for event in renamed)
    assert summarize(renamed, 2) == summarize(TRACE, 2)


def test_a_trace_without_steps_or_kernels_is_refused():
    with pytest.raises(ValueError, match=f"expected one range {STEPS_RANGE}, got 0"):
        summarize(TRACE[2:], 2)
    with pytest.raises(ValueError, match="expected kernels launched in the steps, got none"):
        summarize([e for e in TRACE if e.get("cat") != "kernel"], 2)


@pytest.mark.filterwarnings("ignore")  # the profiler warns on a machine without a GPU
def test_the_profiler_sees_the_range():
    ran = []
    with pytest.raises(ValueError, match="expected kernels launched in the steps, got none"):
        trace_steps(lambda: ran.append(0), 3, 2)
    assert len(ran) == 5


# --- an engine -----------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["overlap", "one by one"])
def bench(request: pytest.FixtureRequest) -> RunnerBench:
    return RunnerBench(**SMALL, overlap=request.param)


@pytest.fixture
def core(bench: RunnerBench) -> Iterator[EngineCore]:
    engine, _ = start_engine(bench, CPU, max_model_len=bench.prompt_tokens + bench.output_tokens)
    yield engine
    engine.runner.close()


def test_a_steady_batch_decodes_and_leaves_no_request(core: EngineCore, bench: RunnerBench):
    for batch in (3, 1):
        with steady(core, bench, batch):
            for _ in range(bench.steps):
                changed = core.step()
                assert len(changed) == len(core.scheduler.running) == batch
                assert all(len(request.output_token_ids) > 1 for request in changed)
        assert not core.scheduler.has_unfinished_requests
        assert core.scheduler.num_steps_in_flight == 0
        assert num_free_slots(core.scheduler) == 3
        assert core.scheduler.pools[0].num_free == core.scheduler.pools[0].num_blocks


def test_a_long_prefill_leaves_tokens_for_the_steps():
    """With 6 tokens a step, the first request decodes while the other prompts are computed."""
    bench = RunnerBench(**SMALL | {"batches": (4,), "waiting": ()}, max_num_batched_tokens=6)
    assert len(run_runner(bench)["results"][0]["samples_ms"]) == 3


def test_a_batch_that_shrinks_is_refused(core: EngineCore, bench: RunnerBench):
    def step_until_the_end() -> None:
        with steady(core, bench, 2):
            for _ in range(bench.output_tokens):
                core.step()

    with pytest.raises(CapacityError, match="expected 2 requests to decode together for 3 steps"):
        step_until_the_end()


def test_preemption_is_refused(core: EngineCore, bench: RunnerBench):
    with (
        pytest.raises(CapacityError, match="got 1 preemptions and 2 at the end"),
        steady(core, bench, 2),
    ):
        core.scheduler.num_preemptions += 1


def test_a_failed_step_ends_the_measurement(
    core: EngineCore, bench: RunnerBench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(core.runner.model, "forward", lambda *_: 1 / 0)
    with pytest.raises(StepError, match="division by zero"), steady(core, bench, 2):
        pass
    assert not core.scheduler.has_unfinished_requests


def test_queued_requests_wait_and_end_with_the_measurement(core: EngineCore, bench: RunnerBench):
    with steady(core, bench, 3), queued(core, bench, 7):
        assert len(core.scheduler.waiting) == 7
        assert len(core.step()) == 3
        assert len(core.scheduler.waiting) == 7
    assert not core.scheduler.has_unfinished_requests
    assert core.metrics()["num_finished_requests"] == 3 + 7


def test_a_step_is_timed_from_end_to_end(
    core: EngineCore, bench: RunnerBench, monkeypatch: pytest.MonkeyPatch
):
    clock = (float(i * i) for i in itertools.count())  # differences 1, 3, 5
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with steady(core, bench, 1):
        assert step_times(core, 3) == [1e3, 3e3, 5e3]


# --- the host's clock ----------------------------------------------------------------------------


class Clock:
    """A clock that moves only when a slowed call runs."""

    def __init__(self) -> None:
        self.us = 0

    def perf_counter(self) -> float:
        return self.us * 1e-6

    def slowed(self, us: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, which now takes ``us`` microseconds of this clock."""

        def run(*args: object) -> Any:
            self.us += us
            return call(*args)

        return run


def test_host_time_is_split_and_waits_are_left_out(
    core: EngineCore, bench: RunnerBench, monkeypatch: pytest.MonkeyPatch
):
    clock = Clock()
    polls: dict[int, int] = {}
    take, taken = AsyncOutput.take, set()

    def ready(output: AsyncOutput) -> bool:
        """Return True from the third call on, counted per step."""
        clock.us += 500_000
        polls[output.step_id] = polls.get(output.step_id, 0) + 1
        return polls[output.step_id] >= 3

    def slow_take(output: AsyncOutput, timeout: float | None = None) -> object:
        if output.step_id in polls and output.step_id not in taken:  # not the ring's second take
            clock.us += 1_000
            taken.add(output.step_id)
        return take(output, timeout)

    with steady(core, bench, 2):
        monkeypatch.setattr(host_clock, "time", clock)
        monkeypatch.setattr(Scheduler, "schedule", clock.slowed(1, Scheduler.schedule))
        monkeypatch.setattr(ModelRunner, "execute", clock.slowed(10, ModelRunner.execute))
        monkeypatch.setattr(Scheduler, "update", clock.slowed(10_000, Scheduler.update))
        monkeypatch.setattr(AsyncOutput, "ready", ready)
        monkeypatch.setattr(AsyncOutput, "take", slow_take)
        times = host_times(core, 3)
        monkeypatch.undo()
    assert times.schedule_us == pytest.approx(1)
    assert times.execute_us == pytest.approx(10)
    assert times.read_us == pytest.approx(1_000)
    assert times.update_us == pytest.approx(10_000)
    assert times.total_us == pytest.approx(11_011)
    assert times.mean_total_us == pytest.approx(11_011)


def test_the_quietest_window_is_reported(
    core: EngineCore, bench: RunnerBench, monkeypatch: pytest.MonkeyPatch
):
    """Steps that are not timed, then windows of 3: two slow, one fast with a pause in it."""
    clock, places, allowed = Clock(), [], os.sched_getaffinity(0)
    steps = iter([0] * core.config.steps_in_flight + [8, 9, 8] + [5, 900, 4] + [8, 8, 7])
    step = EngineCore.step

    def timed(core: EngineCore) -> object:
        clock.us += next(steps)
        places.append(os.sched_getaffinity(0))
        return step(core)

    with steady(core, bench, 2):
        monkeypatch.setattr(host_clock, "time", clock)
        monkeypatch.setattr(EngineCore, "step", timed)
        times = host_times(core, 3, 3)
        monkeypatch.undo()
    assert times.quietest_us == pytest.approx(5)
    assert times.total_us == pytest.approx(8)
    assert times.mean_total_us == pytest.approx((25 + 909 + 23) / 9)
    cpus = [{cpu} for cpu in sorted(allowed)] * 3
    assert places[-9:] == [place for place in cpus[:3] for _ in range(3)]
    assert os.sched_getaffinity(0) == allowed


def test_the_engine_is_left_as_it_was(core: EngineCore, bench: RunnerBench):
    before = [set(vars(part)) for part in (core, core.scheduler, core.runner)]
    with steady(core, bench, 1):
        host_times(core, 2)
    assert [set(vars(part)) for part in (core, core.scheduler, core.runner)] == before


# --- whole runs ----------------------------------------------------------------------------------


def test_result_has_the_schema_and_survives_json(monkeypatch: pytest.MonkeyPatch):
    built = []
    monkeypatch.setattr(
        runner,
        "start_engine",
        lambda bench, *args, **kwargs: (
            built.append((bench.deterministic, bench.rank_invariant)),
            start_engine(bench, *args, **kwargs),
        )[1],
    )
    said: list[str] = []
    result: dict[str, Any] = run_runner(RunnerBench(**SMALL), said.append)
    assert json.loads(json.dumps(result)) == result
    assert result.keys() == KEYS
    assert (result["op"], result["path"], result["dtype"]) == ("runner", "reference", "float32")
    assert result["conditions"]["steps"] == 3
    assert result["conditions"]["host_windows"] == 3
    assert result["conditions"]["overlap"] is True
    assert [entry["batch"] for entry in result["results"]] == [1, 3]
    for entry in result["results"]:
        assert entry.keys() == ENTRY_KEYS
        assert entry["host"].keys() == HOST_KEYS
        assert len(entry["samples_ms"]) == 3
        assert entry["step_ms"] == sorted(entry["samples_ms"])[1]
        assert entry["gpu_ms"] is entry["trace"] is None
        for name in ("deterministic", "rank_invariant", "logprobs"):
            assert entry[f"{name}_over_default"] == pytest.approx(
                entry[f"{name}_step_ms"] / entry["step_ms"]
            )
    assert [(e["batch"], e["waiting"]) for e in result["waiting"]] == [(3, 0), (3, 5)]
    assert all(entry["host"].keys() == HOST_KEYS for entry in result["waiting"])
    assert [entry["kind"] for entry in result["first_requests"]] == [*KINDS]
    for entry in result["first_requests"]:
        assert entry.keys() == {"kind", "first_ms", "second_ms", "compilations"}
        assert min(entry["first_ms"], entry["second_ms"]) > 0
        assert entry["compilations"] == 0
    assert built == [(True, False), (True, True), (False, False)]
    # messages: batches of two other engines, the start line, first requests, batches twice, queues
    assert len(said) == 2 * 2 + 1 + 1 + 2 * 2 + 2


@pytest.mark.parametrize("options", [{"compare_deterministic": False}, {"deterministic": True}])
def test_without_comparison_there_is_no_other_time(options: dict[str, bool]):
    small = SMALL | {"waiting": (), "logprobs": None}
    result: dict[str, Any] = run_runner(RunnerBench(**small, **options))
    for entry in result["results"]:
        assert entry["deterministic_step_ms"] is entry["deterministic_over_default"] is None
        assert entry["rank_invariant_step_ms"] is entry["rank_invariant_over_default"] is None
        assert entry["logprobs_step_ms"] is entry["logprobs_over_default"] is None
    assert result["waiting"] == []


def test_the_engine_is_closed_when_a_step_fails(monkeypatch: pytest.MonkeyPatch):
    closed = []
    close = ModelRunner.close
    monkeypatch.setattr(ModelRunner, "close", lambda self: (closed.append(self), close(self)))
    monkeypatch.setattr(DecoderModel, "forward", lambda *_: 1 / 0)
    with pytest.raises(StepError, match="division by zero"):
        run_runner(RunnerBench(**SMALL))
    assert len(closed) == 1


def test_the_profiler_runs_after_all_timing(monkeypatch: pytest.MonkeyPatch):
    """The profiler slows all later steps. The GPU is faked here."""
    done = []
    trace = StepTrace(**dict.fromkeys((field.name for field in fields(StepTrace)), 0))

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (done.append(name), call(*args))[1]

    monkeypatch.setattr(runner, "trace_steps", noting("trace", lambda *_: trace))
    monkeypatch.setattr(runner, "step_times", noting("steps", runner.step_times))
    monkeypatch.setattr(runner, "host_times", noting("host", runner.host_times))
    monkeypatch.setattr(runner, "resolve_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(
        runner, "start_engine", lambda bench, _, **rest: start_engine(bench, CPU, **rest)
    )
    monkeypatch.setattr(runner, "provenance", lambda *_: {})
    result: dict[str, Any] = run_runner(RunnerBench(**SMALL))
    of_batches = ["steps", "host", "steps"] * 2
    assert done == [*["steps"] * 4, *of_batches, *["host"] * 2, *["trace"] * 2]
    assert [entry["trace"] for entry in result["results"]] == [asdict(trace)] * 2


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_on_a_gpu_a_step_is_one_graph_and_no_copy():
    result: dict[str, Any] = run_runner(RunnerBench(**SMALL | {"device": "cuda", "steps": 20}))
    assert result["path"] == "triton"
    for entry in result["results"]:
        trace = entry["trace"]
        assert trace["num_steps"] == 20
        assert trace["graph_launches"] == 1
        assert trace["host_to_device_copies"] == trace["device_to_host_copies"] == 0
        assert trace["kernel_launches"] == trace["other_waits"] == 0
        assert trace["event_waits"] <= 1
        assert 0 < trace["idle_between_launches_share"] <= trace["idle_share"] < 1
        # Both are means, so the bound also holds on a GPU that other programs use meanwhile; the
        # GPU runs one step at a time, and one step may have begun before the first sample.
        assert 0 < entry["gpu_ms"] <= statistics.fmean(entry["samples_ms"]) * 1.5


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 1}, "steps: expected >= 2, got 1"),
        ({"waiting": (5, 5)}, r"waiting: expected different numbers >= 0, got \[5, 5\]"),
        ({"waiting": (-1,)}, r"waiting: expected different numbers >= 0, got \[-1\]"),
        ({"batches": (0,)}, r"batch: expected different sizes >= 1, got \[0\]"),
        ({"prompt_tokens": 0}, "prompt_tokens: expected >= 1, got 0"),
        ({"shape": None}, "shape, model: expected one of the two, got None and None"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        RunnerBench(**SMALL | options)
