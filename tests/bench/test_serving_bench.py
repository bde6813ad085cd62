"""The benchmark of serving: its workload, its client under a fake clock, its figures, its result.

vLLM's engine is faked.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import serving_rows
from benchmarks.engines import client, driver, serving, serving_run
from benchmarks.engines.client import Progress, Served, serve
from benchmarks.engines.driver import Machine
from benchmarks.engines.serving import (
    ServingBench,
    arrivals,
    figures,
    medians,
    run_serving,
    run_workloads,
)
from benchmarks.engines.serving_run import CoreServed, ServingJob, WorkloadRuns, measure_serving
from benchmarks.engines.workload import Conversation, Turn
from benchmarks.measure.child import ChildError
from benchmarks.peers import vllm_serving
from benchmarks.peers.vllm_serving import VLLMServed
from benchmarks.report.charts import serving_chart
from benchmarks.report.draw import plot
from benchmarks.report.files import ResultFile
from mrv1 import LLM, SamplingParams
from mrv1.errors import ConfigError

SMALL: dict[str, Any] = {
    "shape": None, "model": "tiny", "device": "cpu", "num_conversations": 2, "num_turns": 2,
    "prefix_len": 9, "input_len": 6, "input_max": 12, "output_len": 4, "output_max": 6,
    "repeats": 2, "max_num_seqs": 4, "kv_cache_memory_bytes": 20_000_000,
}  # fmt: skip


# --- the workload --------------------------------------------------------------------------------


def test_lengths_are_lognormal_with_the_median_and_the_bound():
    bench = ServingBench(num_conversations=4000, input_len=500, input_max=2000, output_sigma=0)
    pairs = np.array(bench.turn_lengths())
    logs = np.log(pairs[:, 0])
    assert np.median(pairs[:, 0]) == pytest.approx(500, rel=0.05)
    below = logs[logs < math.log(500)]
    assert np.sqrt(((below - math.log(500)) ** 2).mean()) == pytest.approx(1, rel=0.05)
    assert pairs[:, 0].max() == 2000
    assert {*pairs[:, 1].tolist()} == {200}


def test_arrivals_are_a_poisson_process_or_all_at_once():
    bench = ServingBench(num_conversations=2000, input_sigma=0, input_len=1, request_rate=4.0)
    arrivals = [each.arrival_s for each in bench.conversations(0, 50)]
    gaps = np.diff(arrivals)
    assert arrivals == sorted(arrivals)
    assert gaps.mean() == pytest.approx(0.25, rel=0.1)
    assert gaps.std() == pytest.approx(0.25, rel=0.1)  # exponential
    at_once = replace(bench, request_rate=math.inf)
    assert {each.arrival_s for each in at_once.conversations(0, 50)} == {0}


def test_conversations_share_the_system_prompt_of_their_run():
    bench = ServingBench(num_conversations=5, num_turns=3, prefix_len=20)
    runs = [bench.conversations(run, 1000) for run in (0, 0, 1)]
    assert runs[0] == runs[1]
    prefixes = [{each.turns[0].tokens[:20] for each in run} for run in runs]
    assert [len(prefix) for prefix in prefixes] == [1, 1, 1]
    assert prefixes[0] != prefixes[2]
    shapes = [
        [(len(turn.tokens), turn.output_len) for each in run for turn in each.turns]
        for run in runs
    ]
    assert shapes[0] == shapes[2]
    lengths = bench.turn_lengths()
    for index, (got, (input_len, output_len)) in enumerate(zip(shapes[0], lengths, strict=True)):
        assert got == (input_len + (0 if index % 3 else 20), output_len)


def test_recorded_lengths_are_taken_in_order(tmp_path: Path):
    path = tmp_path / "lengths.jsonl"
    pairs = [(3, 4), (5, 6), (7, 8), (9, 9)]
    path.write_text(
        "".join(json.dumps({"input_len": a, "output_len": b}) + "\n" for a, b in pairs)
    )
    bench = ServingBench(num_conversations=2, num_turns=2, lengths=path)
    assert bench.turn_lengths() == pairs
    first, second = bench.conversations(0, 10)
    assert [len(turn.tokens) for turn in (*first.turns, *second.turns)] == [3, 5, 7, 9]
    with pytest.raises(ConfigError, match=r"lengths: expected 6 lines in .*, got 4"):
        replace(bench, num_conversations=3).turn_lengths()
    for line in ("no", "[]", '{"input_len": 0, "output_len": 1}', '{"input_len": 1}'):
        path.write_text(line + "\n" * 4)
        with pytest.raises(ConfigError, match=r'lengths: expected {"input_len": N, .* in line 1'):
            bench.turn_lengths()
    with pytest.raises(ConfigError, match="lengths: cannot read"):
        replace(bench, lengths=tmp_path / "none").turn_lengths()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_rate": 0.0}, "request_rate: expected a number > 0, or inf, got 0.0"),
        ({"request_rate": math.nan}, "request_rate: expected a number > 0"),
        ({"num_turns": 0}, "num_turns: expected >= 1, got 0"),
        ({"prefix_len": -1}, "prefix_len: expected >= 0, got -1"),
        ({"input_sigma": -1.0}, "input_sigma: expected >= 0, got -1.0"),
        ({"output_sigma": math.inf}, "output_sigma: expected a finite number, got inf"),
        ({"input_len": 9000}, r"input_len: expected at most input_max \(8000\), got 9000"),
        ({"output_len": 30, "output_max": 20}, r"output_len: expected at most output_max \(20\)"),
        ({"output_max": 0}, "output_max: expected >= 1, got 0"),
        ({"engines": ()}, "engines: expected different ones of mrv1, mrv1-fp8, vllm, got none"),
        ({"engines": ("mrv1", "x")}, "engines: expected different ones of .*, got mrv1, x"),
        ({"goodput": (("itl", 3.0),)}, "goodput: expected ttft, tpot, e2el .*, got itl:3.0"),
        ({"goodput": (("ttft", 0.0),)}, "goodput: expected .* milliseconds > 0, got ttft:0.0"),
        ({"goodput": (("ttft", 1.0), ("ttft", 2.0))}, "goodput: expected one limit of each kind"),
        ({"goodput": (("tpot", 1.0),), "stream_outputs": False}, "goodput: expected e2el alone"),
        ({"peak_share": 0.0}, "peak_share: expected a number > 0, got 0.0"),
        ({"peak_share": math.nan}, "peak_share: expected a number > 0, got nan"),
        ({"peak_share": 0.5, "request_rate": 2.0}, "request_rate, peak_share: expected one of"),
        ({"peak_share": 0.5, "warm_up": False}, "peak_share: expected warm_up, whose run finds"),
        ({"model": "x"}, "shape, model: expected one of the two"),
        ({"repeats": 0}, "repeats: expected >= 1, got 0"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ServingBench(**options)


# --- the client, under a fake clock --------------------------------------------------------------


class FakeEngine:
    """One request at a time: a step of 1 s computes the prompt or a token."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock = clock
        self.queue: list[list[int]] = []
        self.prompts: list[list[int]] = []

    def add(self, request: int, prompt: Sequence[int], output_len: int) -> None:
        self.prompts.append([*prompt])
        self.queue.append([request, output_len])

    def step(self) -> list[Progress]:
        self.clock.now += 1
        request, left = self.queue[0]
        self.queue[0][1] -= 1
        if left == 1:
            self.queue.pop(0)
        return [Progress(request, [100 * request + left], left == 1)]

    @property
    def is_busy(self) -> bool:
        return bool(self.queue)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=50.0)

    def sleep(seconds: float) -> None:
        assert seconds > 0
        clock.now += max(seconds, 1e-6)  # real time goes on, however short the sleep

    fake = SimpleNamespace(perf_counter=lambda: clock.now, sleep=sleep)
    monkeypatch.setattr(client, "time", fake)
    return clock


def test_turns_follow_each_other_and_times_count_from_the_arrival(clock: SimpleNamespace):
    engine = FakeEngine(clock)
    conversations = [
        Conversation(
            arrival_s=0.5,
            turns=(Turn(tokens=(1, 2), output_len=2), Turn(tokens=(3,), output_len=1)),
        ),
        Conversation(arrival_s=1.0, turns=(Turn(tokens=(4,), output_len=1),)),
        Conversation(arrival_s=9.0, turns=(Turn(tokens=(5,), output_len=2),)),
    ]
    served = serve(engine, conversations)
    # The second one is due in the first one's step, and runs before its second turn.
    assert engine.prompts == [[1, 2], [4], [1, 2, 2, 1, 3], [5]]
    assert served == [
        Served(0.5, 2, 2, [1.5, 2.5]),
        Served(1.0, 1, 1, [3.5]),
        Served(2.5, 5, 1, [4.5]),
        Served(9.0, 1, 2, [10.0, 11.0]),
    ]
    assert conversations[0].num_tokens == 6


def test_an_answer_of_another_length_is_no_measurement(clock: SimpleNamespace):
    engine = FakeEngine(clock)
    engine.step, step = lambda: [step()[0]._replace(is_finished=True)], engine.step
    turns = (Turn(tokens=(1,), output_len=2),)
    with pytest.raises(RuntimeError, match="output tokens: expected 2 of request 0, got 1"):
        serve(engine, [Conversation(arrival_s=0.0, turns=turns)])


# --- figures -------------------------------------------------------------------------------------


def test_figures_equal_the_closed_form():
    served = [Served(0.0, 10, 3, [1.0, 1.5, 3.0]), Served(1.0, 20, 1, [4.0])]
    found = figures(served, (("ttft", 2000.0), ("e2el", 3000.0)), streams=True)
    assert found["duration_s"] == 4
    assert found["request_throughput"] == 2 / 4
    assert found["output_throughput"] == 4 / 4
    assert found["total_token_throughput"] == 34 / 4
    assert found["request_goodput"] == 1 / 4
    assert (found["ttft_ms"]["mean"], found["ttft_ms"]["median"]) == (2000, 2000)
    assert found["ttft_ms"]["p99"] == pytest.approx(1000 + 0.99 * 2000)
    assert (found["itl_ms"]["median"], found["itl_ms"]["mean"]) == (1000, 1000)
    assert found["tpot_ms"]["median"] == 1000, "a request of one token has none"
    assert found["e2el_ms"]["mean"] == 3000
    assert [len(found[name]["percentiles"]) for name in ("ttft_ms", "itl_ms")] == [101, 101]
    ends = figures(served, (("e2el", 2999.0),), streams=False)
    assert ends["ttft_ms"] is ends["itl_ms"] is ends["tpot_ms"] is None
    assert ends["e2el_ms"] == found["e2el_ms"]
    assert ends["request_goodput"] == 0
    assert figures(served, (), streams=True)["request_goodput"] is None
    runs = [figures([Served(0.0, 1, 2, [1.0, 1.0 + gap])], (), streams=True) for gap in (4, 1, 2)]
    middle = medians(runs)
    assert (middle["duration_s"], middle["itl_ms"]["p99"]) == (3, 2000)
    assert middle["itl_ms"]["percentiles"] == [2000] * 101
    assert middle["request_goodput"] is None


# --- engines -------------------------------------------------------------------------------------


def test_the_first_tokens_are_those_of_generate():
    prompts = [[5], [7, 8, 9] * 7]
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    options = {"model": "tiny", "device": "cpu", "num_kv_blocks": 32}
    engine = CoreServed(options)
    engine.configure(sampling, stream_outputs=True)
    found = engine.first_tokens(prompts)
    turns = [Turn(tokens=tuple(prompt), output_len=5) for prompt in prompts]
    served = serve(engine, [Conversation(arrival_s=0.0, turns=(turn,)) for turn in turns])
    engine.close()
    assert [len(each.token_s) for each in served] == [5, 5]
    with LLM("tiny", device="cpu", num_kv_blocks=32) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
        for (token, lead), output in zip(found, llm.generate(prompts, params), strict=True):
            (position,) = output.outputs[0].logprobs
            best, second = sorted((each.logprob for each in position.values()), reverse=True)[:2]
            assert (token, lead) == (output.outputs[0].token_ids[0], best - second)


@pytest.mark.parametrize("streams", [True, False])
def test_vllms_engine_gets_the_request_and_gives_its_tokens(
    monkeypatch: pytest.MonkeyPatch, streams: bool
):
    added, options = [], {}
    outputs = [SimpleNamespace(token_ids=[4, 5])]
    engine = SimpleNamespace(
        add_request=lambda *request: added.append(request),
        has_unfinished_requests=lambda: bool(added),
        step=lambda: [SimpleNamespace(request_id="3", outputs=outputs, finished=True)],
        engine_core=SimpleNamespace(shutdown=added.clear),
    )

    def start(given: dict[str, Any], *, on_cpu: bool) -> tuple[Any, float]:
        options.update(given, on_cpu=on_cpu)
        return engine, 30.0

    kinds = SimpleNamespace(DELTA="delta", FINAL_ONLY="final")
    names = SimpleNamespace(RequestOutputKind=kinds, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", names)
    monkeypatch.setattr(vllm_serving, "start_engine", start)
    made = VLLMServed({"model": "m"}, on_cpu=False)
    made.configure({"top_k": 5}, stream_outputs=streams)
    assert (options, made.start_s) == ({"model": "m", "on_cpu": False}, 30)
    made.add(3, [1, 2], 7)
    ((name, prompt, params),) = added
    assert (name, prompt) == ("3", {"prompt_token_ids": [1, 2]})
    assert vars(params) == {
        "top_k": 5, "max_tokens": 7, "ignore_eos": True, "detokenize": False,
        "output_kind": "delta" if streams else "final",
    }  # fmt: skip
    assert made.is_busy
    assert made.step() == [Progress(3, [4, 5], is_finished=True)]
    made.close()
    assert not made.is_busy


# --- the whole benchmark -------------------------------------------------------------------------


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run mrv1's part in this process; vLLM's is faked: twice as slow, or an error."""
    fake: dict[str, Any] = {"error": None, "interrupts": None, "jobs": {}}

    def run(function: Any, *arguments: Any) -> Iterator[Any]:
        if function is driver.prepare:
            yield Machine(
                on_cpu=True, dtype=torch.float32, bandwidth=None,
                provenance={"device": {"name": "CPU"}, "commit": "c"},
            )  # fmt: skip
            return
        (job,) = arguments
        fake["jobs"][job.engine] = job
        if job.engine == "vllm":
            if fake["error"] is not None:
                raise fake["error"]
            start_s, first_tokens, *events = fake["events"]
            yield from (start_s, [[token, 9.0] for token, _ in first_tokens])
            for event in events:
                if event is fake["interrupts"]:
                    raise KeyboardInterrupt
                yield event if isinstance(event, float) else [_slower(each) for each in event]
            return
        fake["events"] = []
        measure_serving(job, fake["events"].append)
        yield from fake["events"]

    monkeypatch.setattr(serving, "NUM_PROBES", 2)
    monkeypatch.setattr(driver, "run_in_child", run)
    monkeypatch.setattr(serving, "version_of", lambda name: {"vllm": "0.26.0"}[name])
    return fake


def _slower(served: Served) -> Served:
    times = [2 * each for each in served.token_s]
    return replace(served, arrival_s=2 * served.arrival_s, token_s=times)


def test_the_result_has_both_engines_and_survives_json(processes: dict[str, Any], tmp_path: Path):
    said: list[str] = []
    bench = ServingBench(**SMALL, engines=("mrv1", "vllm"), goodput=(("ttft", 1e6),))
    result = run_serving(bench, said.append)
    assert json.loads(json.dumps(result)) == result
    ours, theirs = (result["results"][name] for name in ("mrv1", "vllm"))
    assert (ours["agreement"], len(ours["runs"])) == (None, 2)
    assert theirs["agreement"] == {"equal": 2, "near_ties": 0, "different": 0}
    ratios = result["over_vllm"]["mrv1"]
    assert set(ratios) == {
        "output_throughput", "total_token_throughput", "request_goodput", "ttft_ms_median",
        "ttft_ms_p99", "itl_ms_median", "itl_ms_p99",
    }  # fmt: skip
    assert ratios["output_throughput"] == pytest.approx(2)
    assert ratios["itl_ms_p99"] == pytest.approx(0.5)
    conditions = result["conditions"]
    lengths = bench.turn_lengths()
    assert conditions["output_tokens"] == sum(output for _, output in lengths)
    assert conditions["new_input_tokens"] == sum(size for size, _ in lengths) + 2 * 9
    assert conditions["request_rate"] == "inf"
    assert conditions["enable_prefix_caching"] is True
    jobs = processes["jobs"]
    assert jobs["mrv1"].workloads == jobs["vllm"].workloads
    same = {"model", "dtype", *bench.engine_options(bench.conversations(0, 10))}
    assert all(jobs["mrv1"].options[name] == jobs["vllm"].options[name] for name in same)
    plot(serving_chart(ResultFile("x.json", result)), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[1:4] == b"PNG"


def test_one_start_serves_workloads_that_share_no_prefix(processes: dict[str, Any]):
    """The second workload arrives at half the rate at which mrv1 serves it at once."""
    engines = ("mrv1", "vllm")
    benches = [
        ServingBench(**SMALL, engines=engines, warm_up=False),
        ServingBench(
            **SMALL | {"num_turns": 1, "repeats": 1, "prefix_len": 0},
            engines=engines, peak_share=0.5, temperature=0.5,
        ),
        ServingBench(**SMALL | {"repeats": 1}, engines=("mrv1",)),
    ]  # fmt: skip
    *_, (first, second, third) = run_workloads(benches)
    assert [len(result["results"]["mrv1"]["runs"]) for result in (first, second, third)] == [
        2,
        1,
        1,
    ]
    assert [*third["results"]] == ["mrv1"]
    rates = {name: engine["request_rate"] for name, engine in second["results"].items()}
    assert rates["mrv1"] == rates["vllm"] > 0
    assert first["results"]["mrv1"]["request_rate"] is None
    assert (arrivals(first), arrivals(second)) == ("all at once", f"{rates['mrv1']:.3g} a second")
    _, theirs = processes["jobs"]["vllm"].workloads
    assert (theirs.workload.request_rate, theirs.workload.peak_share) == (rates["mrv1"], None)
    assert [runs.sampling["temperature"] for runs in processes["jobs"]["mrv1"].workloads] == [
        0.0, 0.5, 0.0,
    ]  # fmt: skip
    assert first["conditions"]["max_model_len"] == second["conditions"]["max_model_len"]
    # Two counted runs; then one that is not counted; and in the last workload again.
    runs = [event for event in processes["events"][2:] if not isinstance(event, float)]
    assert len(runs) == 4


def test_the_rate_is_a_share_of_what_the_first_engine_serves_at_once(clock, monkeypatch):
    sent, run_of = [], {}

    class Engine(FakeEngine):
        start_s = 1.0

        def __init__(self, options: dict[str, Any]) -> None:
            super().__init__(clock)

        def configure(self, sampling: dict[str, Any], *, stream_outputs: bool) -> None:
            pass

        def first_tokens(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
            return []

        def close(self) -> None:
            run_of.update(prompts=self.prompts)

    monkeypatch.setattr(serving_run, "CoreServed", Engine)
    bench = ServingBench(
        num_conversations=4, input_len=3, input_sigma=0, output_len=2, output_sigma=0,
        peak_share=0.25, repeats=1,
    )  # fmt: skip
    runs = WorkloadRuns(workload=bench, sampling={}, stream_outputs=True, warm_up=True, repeats=1)
    job = ServingJob(
        engine="mrv1", options={}, on_cpu=True, probes=(), workloads=[runs, runs], vocab_size=10**9
    )
    measure_serving(job, sent.append)
    # Four requests of two steps of a second each take 8 s at once.
    assert [each for each in sent if isinstance(each, float)] == [1.0, 0.25 * 4 / 8, 0.25 * 4 / 8]
    assert len({tuple(prompt) for prompt in run_of["prompts"]}) == 4 * 4, "no two runs are alike"


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupt_keeps_what_was_measured(processes: dict[str, Any], interrupted: int):
    engines = ("mrv1", "vllm", "mrv1-fp8")
    shared = SMALL | {"repeats": 1, "num_turns": 1}
    benches = [ServingBench(**shared, engines=engines, warm_up=False) for _ in range(2)]

    def run(function: Any, *arguments: Any) -> Iterator[Any]:
        for event in faked(function, *arguments):
            if getattr(arguments[0], "engine", None) == "mrv1":
                processes["interrupts"] = processes["events"][3 + 2 * interrupted]
            yield event

    faked = driver.run_in_child
    driver.run_in_child, said = run, []
    try:
        *_, results = run_workloads(benches, said.append)
    finally:
        driver.run_in_child = faked
    assert [[*result["results"]] for result in results] == [["mrv1", "vllm", "mrv1-fp8"]] * 2
    errors = [result["results"]["vllm"]["error"] for result in results]
    assert errors == [None if interrupted else "interrupted", "interrupted"]
    assert results[0]["results"]["mrv1-fp8"]["error"] == "interrupted"
    assert [result["over_vllm"]["mrv1"] is None for result in results] == [
        not interrupted, True,
    ]  # fmt: skip
    assert said[-1] == "vllm: interrupted"
    assert [result["interrupted"] for result in results] == [True, True]


def test_results_after_each_engine_lack_the_later_ones(processes: dict[str, Any]):
    engines = ("mrv1", "vllm")
    bench = ServingBench(**SMALL | {"repeats": 1}, engines=engines, warm_up=False)
    (first,), (last,) = run_workloads([bench])
    assert [first["interrupted"], last["interrupted"]] == [True, False]
    assert first["results"]["mrv1"] == last["results"]["mrv1"]
    assert first["results"]["vllm"]["error"] == "interrupted"
    assert first["over_vllm"]["mrv1"] is None
    assert last["over_vllm"]["mrv1"] is not None


def test_workloads_of_one_start_share_the_engines_options():
    benches = [ServingBench(**SMALL), ServingBench(**SMALL | {"max_num_seqs": 3})]
    with pytest.raises(ConfigError, match=r"max_num_seqs: expected one value .*\['3', '4'\]"):
        next(run_workloads(benches))


def test_an_engine_that_fails_is_recorded_with_its_reason(processes: dict[str, Any]):
    processes["error"] = ChildError("ValueError: no room", ["line 1"])
    said: list[str] = []
    engines = ("vllm", "mrv1")
    result = run_serving(
        ServingBench(**SMALL | {"repeats": 1}, engines=engines, stream_outputs=False), said.append
    )
    assert result["results"]["vllm"]["error"] == "ValueError: no room"
    assert result["results"]["mrv1"]["figures"]["itl_ms"] is None
    assert result["over_vllm"] == {"mrv1": None}
    assert {"vllm | line 1", "vllm: failed: ValueError: no room"} <= {*said}


def test_an_engine_that_fails_at_its_start_sets_no_rate(processes: dict[str, Any]):
    """The next one measures its own peak; the third one takes that rate."""
    processes["error"] = ChildError("ValueError: no room", [])
    bench = ServingBench(
        **SMALL | {"repeats": 1, "num_turns": 1}, engines=("vllm", "mrv1", "mrv1-fp8"),
        peak_share=0.5,
    )  # fmt: skip
    engines = run_serving(bench)["results"]
    assert engines["vllm"]["request_rate"] is None
    assert engines["mrv1"]["request_rate"] == engines["mrv1-fp8"]["request_rate"] > 0


def test_fp8_engines_have_an_fp8_cache_and_first_tokens_may_differ_more(
    processes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    leads: list[float] = []

    def found(expected: Any, first_tokens: Any, near_tie: float) -> dict[str, int]:
        leads.append(near_tie)
        return {"equal": 0, "near_ties": 0, "different": 0}

    monkeypatch.setattr(driver, "agreement", found)
    engines = ("mrv1", "mrv1-fp8", "vllm")
    run_serving(ServingBench(**SMALL | {"repeats": 1}, engines=engines))
    options = {name: job.options.get("kv_cache_dtype") for name, job in processes["jobs"].items()}
    assert options == {"mrv1": None, "mrv1-fp8": "fp8_e4m3", "vllm": None}
    assert leads[0] > leads[1]


def test_ctrl_c_keeps_the_file_and_has_its_exit_code(
    run_bench, processes, monkeypatch, tmp_path: Path
):
    faked = driver.run_in_child

    def run(function: Any, *arguments: Any) -> Iterator[Any]:
        for event in faked(function, *arguments):
            if isinstance(event, list) and function is measure_serving:
                raise KeyboardInterrupt
            yield event

    monkeypatch.setattr(driver, "run_in_child", run)
    target = tmp_path / "result.json"
    result = run_bench(
        "serving", "--model", "tiny", "--device", "cpu", "--num-conversations", "2",
        "--input-len", "5", "--input-max", "9", "--output-len", "3", "--output-max", "5",
        "--max-num-seqs", "2", "--kv-cache-memory-bytes", "20000000", "--output", target,
    )  # fmt: skip
    assert result.exit_code == 130, result.stderr
    assert json.loads(target.read_text("utf-8"))["interrupted"] is True


def test_table_and_file_have_the_same_figures(
    run_bench, processes: dict[str, Any], tmp_path: Path
):
    target, picture = tmp_path / "result.json", tmp_path / "plot.png"
    result = run_bench(
        "serving", "--model", "tiny", "--device", "cpu", "--num-conversations", "2",
        "--input-len", "5", "--input-max", "9", "--output-len", "3", "--output-max", "5",
        "--request-rate", "200", "--goodput", "ttft:100000,tpot:100000", "--repeats", "1",
        "--engines", "mrv1,vllm", "--max-num-seqs", "2", "--kv-cache-memory-bytes", "20000000",
        "--output", target, "--plot", picture,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    found = json.loads(target.read_text("utf-8"))["results"]["mrv1"]["figures"]
    rows = [
        [word for word in line.split() if word not in "│/"] for line in result.stdout.splitlines()
    ]
    (row,) = [row for row in rows if row[:1] == ["mrv1"]]
    assert row == [
        "mrv1", f"{found['output_throughput']:,.0f}", f"{found['total_token_throughput']:,.0f}",
        f"{found['request_throughput']:,.2f}", f"{found['request_goodput']:,.2f}",
        *(
            f"{found[name][key]:,.1f}"
            for name in ("ttft_ms", "itl_ms", "e2el_ms")
            for key in ("median", "p99")
        ),
        "-",
    ]  # fmt: skip
    assert "mrv1 over vLLM, output_throughput: 2.00x" in result.stderr
    assert picture.exists()


def test_no_engine_at_all_is_a_failure(run_bench, processes: dict[str, Any]):
    processes["error"] = ChildError("no GPU", [])
    result = run_bench("serving", "--engines", "vllm", "--shape", "tiny-random")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "error: no engine could be measured"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engines", "vllm"), "engines: expected the package vllm to be installed for vllm"),
        (
            ("--goodput", "ttft"),
            "goodput: expected NAME:MILLISECONDS such as ttft:500, got 'ttft'",
        ),
        (("--request-rate", "-1"), "request_rate: expected a number > 0, or inf, got -1.0"),
    ],
)
def test_a_wrong_argument_is_one_line(run_bench, monkeypatch, arguments, message):
    monkeypatch.setattr(serving, "version_of", lambda _: None)
    result = run_bench("serving", "--shape", "tiny-random", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert len(result.stderr.splitlines()) == 1


# --- the rows of the report ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", serving_rows.ROWS)
def test_the_rows_of_a_shape_are_workloads_of_one_start(tmp_path: Path, shape: str):
    options = serving_rows.parse([str(tmp_path), shape, "--repeats", "2"])
    benches = serving_rows.workloads(options)
    assert [*benches] == [*serving_rows.ROWS[shape]]
    serving._shared([*benches.values()])
    assert benches["many"].engines == ("vllm", "mrv1", "mrv1-fp8")
    assert benches["rate"].engines == ("vllm", "mrv1")
    assert benches["rate"].peak_share == 0.7
    some = serving_rows.parse([str(tmp_path), shape, "--rows", "turns,many", "--engines", "mrv1"])
    assert [*serving_rows.workloads(some)] == ["turns", "many"]


@pytest.mark.parametrize(("error", "code"), [(None, 0), ("no room", 1), ("interrupted", 130)])
def test_each_row_has_its_file_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str | None, code: int
):
    """Where no engine was measured, an older file stays as it was."""

    def run(benches: Sequence[ServingBench], say: Any) -> Iterator[list[dict[str, Any]]]:
        yield [
            {
                "row": [bench.num_turns, bench.temperature],
                "results": {
                    "mrv1": {"figures": {}, "error": None},
                    "vllm": {"figures": None, "error": error},
                }
                if bench.num_turns == 1 or error is None
                else {"mrv1": {"figures": None, "error": error}},
                "interrupted": error == "interrupted",
                "over_vllm": {},
            }
            for bench in benches
        ]
        assert len([*tmp_path.glob("*.json")]) == 4, "not written before the next engine"

    monkeypatch.setattr(serving_rows, "run_workloads", run)
    old = tmp_path / "serving-qwen3-0.6b-turns-x.json"
    old.write_text('{"row": "old"}')
    assert serving_rows.main([str(tmp_path), "qwen3-0.6b", "--suffix", "x"]) == code
    found = {path.stem: json.loads(path.read_text())["row"] for path in tmp_path.glob("*.json")}
    assert found == {
        "serving-qwen3-0.6b-many-x": [1, 0.0],
        "serving-qwen3-0.6b-many-sampled-x": [1, 0.8],
        "serving-qwen3-0.6b-rate-x": [1, 0.0],
        "serving-qwen3-0.6b-turns-x": "old" if error else [8, 0.0],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}", "qwen3-0.6b", "--rows", "many,x"], "--rows: expected some of many, many-"),
        (["{folder}/none", "qwen3-0.6b"], "folder: expected an existing directory"),
    ],
)
def test_a_wrong_row_or_folder_is_found_before_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    with pytest.raises(SystemExit):
        serving_rows.parse([each.format(folder=tmp_path) for each in arguments])
    assert message in capsys.readouterr().err
