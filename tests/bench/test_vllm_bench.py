"""The benchmark of vLLM's modes: its arithmetic, its result, its failures; vLLM itself is faked.

``tests/integrations/vllm/test_bench.py`` runs it with vLLM.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engines import driver, vllm
from benchmarks.engines.checkpoint import write_checkpoint, write_config
from benchmarks.engines.core_run import measure_core
from benchmarks.engines.driver import Machine, agreement
from benchmarks.engines.vllm import VLLMBench, cell_figures, run_vllm
from benchmarks.kernels.attention_case import Cell
from benchmarks.measure.child import ChildError, run_in_child
from benchmarks.measure.floor import step_weight_bytes
from benchmarks.measure.shapes import shape_config
from benchmarks.peers import vllm_engine
from benchmarks.peers.vllm_engine import Job
from mrv1.config import EngineConfig
from mrv1.errors import ConfigError
from mrv1.models import Checkpoint, ModelConfig, random_weights
from mrv1.models.weights import checkpoint_tensors
from mrv1.runner.ranks import parallel_runner
from tests.thread_ranks import ThreadRanks

TINY = shape_config("tiny-random")
BANDWIDTH = 1e9
SMALL: dict[str, Any] = {
    "shape": "tiny-random", "cells": (Cell(1, 8), Cell(4, 100)), "output_tokens": 5, "repeats": 2,
}  # fmt: skip


# --- the checkpoint ------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_a_checkpoint_has_the_shape_and_the_random_weights(tmp_path: Path, architecture: str):
    config = replace(
        TINY, architecture=architecture,
        qk_norm="head" if architecture.startswith("Qwen3") else "none",
        tie_word_embeddings=architecture.startswith("Qwen3"),
    )  # fmt: skip
    write_checkpoint(tmp_path, config, device="cpu", dtype=torch.bfloat16, seed=3)
    assert ModelConfig.from_pretrained(tmp_path) == replace(config, torch_dtype=torch.bfloat16)
    weights = random_weights(config, device="cpu", dtype=torch.bfloat16, seed=3)
    expected = checkpoint_tensors(config, weights)
    found = dict(Checkpoint.at(tmp_path).tensors())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


# --- the process ---------------------------------------------------------------------------------


def two_numbers(number: int, send) -> None:
    sys.stdout.write("not sent")
    send(number)
    send([number + 1])


def no_reason(send) -> None:
    sys.stdout.write("(EngineCore pid=7) ERROR core.py:9 ValueError: too few blocks\n")
    sys.stderr.write("(EngineCore pid=7) KeyError: 'block_size'\n")
    raise RuntimeError("Engine core initialization failed. See root cause above.\n and more")


def killed(send) -> None:
    send("begun")
    os.kill(os.getpid(), 9)


def waits(folder: Path, send) -> None:
    send("begun")
    send((folder / "asked").exists())


def endless(send) -> None:
    send(os.getpid())
    while True:
        pass


@pytest.mark.slow
def test_a_function_runs_in_a_process_of_its_own(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
):
    assert list(run_in_child(two_numbers, 6)) == [6, [7]]
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ChildError, match=r"^KeyError: 'block_size'$") as caught:
        list(run_in_child(no_reason))
    assert "too few blocks" in "".join(caught.value.log)
    events = run_in_child(killed)
    assert next(events) == "begun"
    with pytest.raises(ChildError, match=r"^the process ended with exit code -9$"):
        next(events)
    events = run_in_child(waits, tmp_path)
    assert next(events) == "begun"
    time.sleep(0.1)  # in which it would go on
    (tmp_path / "asked").touch()
    assert [*events] == [True]
    events = run_in_child(endless)
    pid = next(events)
    events.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# --- mrv1's engine -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_mrv1s_engine_sends_what_vllms_sends(tmp_path: Path, size: int, monkeypatch):
    monkeypatch.setattr(parallel_runner, "Ranks", ThreadRanks)
    write_config(tmp_path, TINY, torch.float32)
    prompts = [[1, 2, 3], [4, 5]]
    job = Job(
        engine={
            "model": str(tmp_path), "load_format": "dummy", "tensor_parallel_size": size,
            "device": "cpu", "max_model_len": 64, "num_kv_blocks": 8, "max_num_seqs": 2,
            "enable_prefix_caching": False,
        },
        on_cpu=True, probes=prompts, near_tie=0.1, runs=[prompts, prompts], output_tokens=5,
    )  # fmt: skip
    sent: list[Any] = []
    measure_core(job, sent.append)
    start_s, first_tokens, *runs = sent
    assert start_s > 0
    assert [len(each) for each in first_tokens] == [2, 2]
    assert [len(run["first_s"]) for run in runs] == [2, 2]
    assert all(0 < max(run["first_s"]) < run["whole_s"] for run in runs)


# --- vLLM's engine, under a fake clock -----------------------------------------------------------


class FakeEngine:
    """Computes the prompts one after the other in 2 s each, then a token of all in 0.5 s."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock = clock
        self.waiting: list[tuple[str, Any]] = []
        self.running: dict[str, tuple[Any, list[int]]] = {}

    def add_request(
        self,
        name: str,
        prompt: dict[str, list[int]],
        params: SimpleNamespace,
        lora_request: object = None,
    ) -> None:
        given = params.temperature, params.ignore_eos, params.detokenize, params.output_kind
        assert given == (0, True, False, 1)
        self.waiting.append((name, params))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Any]:
        """A first token leaves at once, as with vLLM's ``stream_interval``, others at the end."""
        if self.waiting:
            name, params = self.waiting.pop(0)
            self.clock.now += 2
            self.running[name] = params, [7]
            moved = [name]
        else:
            self.clock.now += 0.5
            for _, tokens in self.running.values():
                tokens.append(7)
            moved = [
                name for name, (params, tokens) in self.running.items()
                if len(tokens) == params.max_tokens
            ]  # fmt: skip
        values = {7: -0.5, 9: -0.75, 3: -4.0}
        logprobs = [{token: SimpleNamespace(logprob=v) for token, v in values.items()}]
        outputs = []
        for name in moved:
            params, tokens = self.running[name]
            new = tokens[1:] or tokens
            if len(tokens) == params.max_tokens:
                self.running.pop(name)
            output = SimpleNamespace(token_ids=[*new], logprobs=logprobs)
            outputs.append(SimpleNamespace(request_id=name, outputs=[output]))
        return outputs


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    clock = SimpleNamespace(now=0.0)
    names = SimpleNamespace(
        RequestOutputKind=SimpleNamespace(DELTA=1), SamplingParams=SimpleNamespace
    )
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", names)
    monkeypatch.setattr(vllm_engine.time, "perf_counter", lambda: clock.now)
    return FakeEngine(clock)


def test_times_of_a_run_equal_the_closed_form(engine: FakeEngine):
    prompts = [[1, 2], [3], [4]]
    run = vllm_engine.time_run(engine, prompts, 5)
    assert run == {"first_s": [2, 4, 6], "whole_s": 6 + 4 * 0.5}
    figures = cell_figures([run, run | {"whole_s": 80.0}, run], batch=3, output_tokens=5)
    assert figures["tokens_per_s"] == 15 / 8
    assert (figures["ttft_ms"], figures["prefill_ms"], figures["tpot_ms"]) == (4000, 6000, 500)
    assert [sample["whole_s"] for sample in figures["samples"]] == [8, 80, 8]


def test_first_tokens_come_with_their_lead(engine: FakeEngine):
    assert vllm_engine.first_tokens(engine, [[1], [2, 3]]) == [[7, 0.25], [7, 0.25]]


def test_an_engine_that_stops_early_is_no_measurement(engine: FakeEngine):
    engine.step, step = lambda: [shortened(one) for one in step()], engine.step

    def shortened(output: Any) -> Any:
        output.outputs[0].token_ids = output.outputs[0].token_ids[:3]
        return output

    with pytest.raises(RuntimeError, match=r"expected \(1, 4\) of each request, got \{\(1, 3\)\}"):
        vllm_engine.time_run(engine, [[1]], 5)


def test_agreement_counts_near_ties_apart():
    expected = [[1, 0.3], [2, 0.3], [3, 0.1], [4, 0.1]]
    found = [[1, 9.0], [7, 9.0], [3, 9.0], [7, 9.0]]
    assert agreement(expected, found, 0.2) == {"equal": 2, "near_ties": 1, "different": 1}


# --- the whole benchmark -------------------------------------------------------------------------


UNCOUNTED = {"first_s": [70.0], "whole_s": 80.0}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fake the processes: per mode what is sent, where an exception ends it; and the jobs."""
    runs = [UNCOUNTED, {"first_s": [0.5], "whole_s": 0.9}, {"first_s": [0.1], "whole_s": 0.5}]
    equal_runs = [UNCOUNTED, *[{"first_s": [0.2], "whole_s": 0.6}] * 2]
    fake: dict[str, Any] = {
        "vllm": [30.0, [[5, 0.3]], *runs, *runs],
        "backend": [ChildError("ValueError: no CUSTOM", ["line 1", "line 2"])],
        "backend-fp8": [31.0, [[6, 0.3]], *runs, ChildError("out of memory", [])],
        "worker": [20.0, [[6, 0.3]], *equal_runs, *runs],
        "mrv1": [10.0, [[5, 0.3]], *equal_runs, *runs],
        "jobs": {},
        "order": [],
    }

    def run(function: Any, *arguments: Any) -> Iterator[Any]:
        if function is driver.prepare:
            yield Machine(
                on_cpu=False, dtype=torch.bfloat16, bandwidth=BANDWIDTH,
                provenance={"device": {"name": "H999"}},
            )  # fmt: skip
            return
        (job,) = arguments
        options = {name: job.engine[name] for name in all_options if name in job.engine}
        is_ours = function is vllm.measure_core
        names = [name for name in vllm.MODES if name.startswith("mrv1") == is_ours]
        (mode,) = [name for name in names if vllm.MODES[name] == options]
        fake["jobs"][mode] = job
        fake["order"].append(mode)
        for event in fake[mode]:
            if isinstance(event, ChildError | KeyboardInterrupt):
                raise event
            yield event

    all_options = {name for options in vllm.MODES.values() for name in options}
    monkeypatch.setattr(driver, "run_in_child", run)
    monkeypatch.setattr(vllm, "version_of", lambda name: {"vllm": "0.26.0"}[name])
    return fake


def test_result_has_every_mode_and_survives_json(processes: dict[str, Any]):
    said: list[str] = []
    result = run_vllm(VLLMBench(**SMALL), said.append)
    assert json.loads(json.dumps(result)) == result
    assert (result["op"], result["reference"]) == ("vllm", "vllm")
    assert result["peers"] == {"vllm": "0.26.0"}
    modes = result["modes"]
    assert list(modes) == ["vllm", "backend", "backend-fp8", "worker"]
    assert modes["backend"]["error"] == "ValueError: no CUSTOM"
    assert modes["backend-fp8"]["error"] == "out of memory"
    assert {"backend | line 1", "backend: failed: ValueError: no CUSTOM"} <= {*said}
    # A lead of 0.3 is a near tie of fp8 caches, and none of bfloat16.
    assert modes["vllm"]["agreement"] is None
    assert modes["backend-fp8"]["agreement"] == {"equal": 0, "near_ties": 1, "different": 0}
    assert modes["worker"]["agreement"] == {"equal": 0, "near_ties": 0, "different": 1}
    told = said.index("worker: first tokens: 0 of 1 equal, 0 at near ties, 1 different")
    assert told < next(i for i, line in enumerate(said) if line.startswith("worker, 1x8"))
    first, second = (entry["modes"] for entry in result["results"])
    assert list(first) == ["vllm", "backend-fp8", "worker"]
    assert list(second) == ["vllm", "worker"]


def test_ratios_and_floors_equal_the_closed_form(processes: dict[str, Any]):
    result = run_vllm(VLLMBench(**SMALL))
    entry, long = result["results"]
    alone, worker = entry["modes"]["vllm"], entry["modes"]["worker"]
    assert alone["tokens_per_s"] == pytest.approx(5 / 0.7)
    assert alone["tpot_ms"] == pytest.approx((0.7 - 0.3) / 4 * 1e3)
    assert (alone["speedup"], alone["tpot_speedup"]) == (1, 1)
    assert worker["speedup"] == pytest.approx(0.7 / 0.6)
    assert worker["tpot_speedup"] == pytest.approx(1)
    weights = step_weight_bytes(TINY, torch.bfloat16)
    layers, heads, dim = 2, 2, 32
    for found, vector_bytes in ((alone, 2 * dim), (entry["modes"]["backend-fp8"], dim + 4)):
        visible = 8 + (1 + 2 + 3 + 4) / 4
        assert found["kv_bytes"] == 2 * layers * heads * vector_bytes * visible
        assert found["floor_ms"] == (weights + found["kv_bytes"]) / BANDWIDTH * 1e3
        assert found["share_of_floor"] == found["floor_ms"] / found["tpot_ms"]
    assert long["modes"]["vllm"]["kv_bytes"] == 4 * 2 * 8 * 32 * (100 + 2.5)


def test_every_mode_gets_the_same_requests_and_options(processes: dict[str, Any]):
    run_vllm(VLLMBench(**SMALL, seed=1))
    jobs = processes["jobs"]
    reference = jobs["vllm"]
    assert [len(prompts) for prompts in reference.runs] == [1, 1, 1, 4, 4, 4]
    assert {len(prompt) for prompt in reference.runs[3]} == {100}
    assert reference.runs[0] != reference.runs[1]
    assert sorted({len(probe) for probe in reference.probes})[-1] == 100
    for name, job in jobs.items():
        assert (job.runs, job.probes) == (reference.runs, reference.probes)
        assert job.engine == reference.engine | vllm.MODES[name]
    assert reference.engine["max_model_len"] == 105
    assert reference.engine["max_num_seqs"] == 4
    assert reference.engine["stream_interval"] == reference.output_tokens == 5


def test_mrv1_gets_its_own_options_and_vllm_those_of_vllm(processes: dict[str, Any]):
    options = {"modes": ("vllm", "mrv1"), "tensor_parallel_size": 2, "load_format": "dummy"}
    result = run_vllm(VLLMBench(**SMALL | options))
    both, of_vllm = (processes["jobs"][name].engine for name in ("mrv1", "vllm"))
    assert (both.pop("device"), both["tensor_parallel_size"], both["load_format"]) == (
        "auto", 2, "dummy",
    )  # fmt: skip
    assert of_vllm == both | {
        "skip_tokenizer_init": True, "disable_log_stats": True, "stream_interval": 5,
        "load_format": "mrv1_dummy",
    }  # fmt: skip
    EngineConfig(**both)
    assert (result["op"], result["schema"], result["weights"]) == ("ranks", 1, "dummy")
    assert result["modes"]["mrv1"]["agreement"]  # of the same model
    assert result["conditions"]["made_up_weights"] == "the same for every mode"
    half = replace(TINY, num_q_heads=2, num_kv_heads=1, intermediate_size=48)
    figures = result["results"][0]["modes"]["mrv1"]
    # Of 320 tokens in groups of 128 the first rank has two groups.
    head = 256 * TINY.hidden_size * 2
    whole = TINY.vocab_size * TINY.hidden_size * 2
    assert figures["weight_bytes"] == step_weight_bytes(half, torch.bfloat16) - whole + head
    assert figures["kv_bytes"] == 2 * 2 * 1 * 64 * (8 + 2.5)


def test_vllm_may_capture_few_sizes(processes: dict[str, Any]):
    few = run_vllm(VLLMBench(**SMALL | {"modes": ("vllm", "mrv1")}, vllm_graph_sizes=(1, 8)))
    jobs = processes["jobs"]
    assert jobs["vllm"].engine["cudagraph_capture_sizes"] == [1, 8]
    assert "cudagraph_capture_sizes" not in jobs["mrv1"].engine
    assert few["conditions"]["vllm_graph_sizes"] == [1, 8]


def test_processes_may_start_together(processes: dict[str, Any]):
    barrier = threading.Barrier(2, timeout=10)

    class Process:
        def __init__(self, events: list[Any]) -> None:
            self.events = events

        def __iter__(self) -> Iterator[Any]:
            barrier.wait()
            yield from self.events

    for name in ("vllm", "worker"):
        processes[name] = Process(processes[name])
    options = {"modes": ("vllm", "worker"), "in_turns": True}
    result = run_vllm(VLLMBench(**SMALL | options, start_together=True))
    assert result["modes"]["vllm"]["agreement"] is None
    assert result["modes"]["worker"]["agreement"] == {"equal": 0, "near_ties": 0, "different": 1}
    assert [[*entry["modes"]] for entry in result["results"]] == [["vllm", "worker"]] * 2


def test_figures_are_medians_over_the_runs_of_all_processes(processes: dict[str, Any]):
    starts = iter([30.0, 10.0, 9.0])
    seconds = iter([0.9, 0.5, 0.2, 0.3, 0.4, 0.8])

    class Vllm:  # each process has other times
        def __iter__(self) -> Iterator[Any]:
            yield next(starts)
            yield [[5, 0.3]]
            for _ in range(2):
                yield UNCOUNTED
                yield {"first_s": [0.1], "whole_s": next(seconds)}

    processes["vllm"] = Vllm()
    runs = [UNCOUNTED, {"first_s": [0.1], "whole_s": 0.5}] * 2
    processes["worker"] = processes["backend-fp8"] = [20.0, [[6, 0.3]], *runs]
    result = run_vllm(VLLMBench(**SMALL | {"rounds": 3, "repeats": 1}))
    assert result["conditions"]["rounds"] == 3
    assert processes["order"] == [
        "vllm", "backend", "backend-fp8", "worker",  # backend fails, and is not started again
        "worker", "backend-fp8", "vllm",
        "vllm", "backend-fp8", "worker",
    ]  # fmt: skip
    modes = result["modes"]
    assert (modes["vllm"]["start_s"], modes["vllm"]["later_starts_s"]) == (30.0, [10.0, 9.0])
    assert (modes["backend"]["start_s"], modes["backend"]["later_starts_s"]) == (None, [])
    first, second = (entry["modes"]["vllm"] for entry in result["results"])
    assert [each["whole_s"] for each in first["samples"]] == [0.9, 0.2, 0.4]
    assert [each["whole_s"] for each in second["samples"]] == [0.5, 0.3, 0.8]
    assert first["tokens_per_s"] == pytest.approx(5 / 0.4)
    assert second["tokens_per_s"] == pytest.approx(20 / 0.5)


def test_ctrl_c_in_a_later_round_keeps_the_earlier_ones(processes: dict[str, Any]):
    class Worker:
        def __init__(self) -> None:
            self.times = 0

        def __iter__(self) -> Iterator[Any]:
            self.times += 1
            yield 20.0
            yield [[6, 0.3]]
            yield from [UNCOUNTED, {"first_s": [0.2], "whole_s": 0.6}, UNCOUNTED]
            yield KeyboardInterrupt() if self.times == 2 else {"first_s": [0.2], "whole_s": 0.8}

    processes["vllm"] = [30.0, [[5, 0.3]], *[UNCOUNTED, {"first_s": [0.1], "whole_s": 0.5}] * 2]
    processes["worker"] = Worker()
    options = {"rounds": 2, "repeats": 1, "modes": ("vllm", "worker")}
    result = run_vllm(VLLMBench(**SMALL | options))
    assert processes["order"] == ["vllm", "worker", "worker"]
    assert result["interrupted"] is True
    errors = {name: mode["error"] for name, mode in result["modes"].items()}
    assert errors == {"vllm": None, "worker": "interrupted"}
    counts = [len(entry["modes"]["worker"]["samples"]) for entry in result["results"]]
    assert counts == [2, 1]
    assert [*result["results"][1]["modes"]] == ["vllm", "worker"]


def test_processes_that_are_alive_together_take_turns(processes: dict[str, Any]):
    turns: list[tuple[str, str]] = []

    class Process:
        def __init__(self, name: str, events: list[Any]) -> None:
            self.name, self.events = name, events

        def __iter__(self) -> Iterator[Any]:
            for event in self.events:
                kind = "run" if isinstance(event, dict) else "start"
                turns.append((self.name, kind))
                yield event
            turns.append((self.name, "end"))

    for name in ("vllm", "worker", "backend-fp8"):
        processes[name] = Process(name, processes[name])
    modes = ("vllm", "backend", "backend-fp8", "worker")
    result = run_vllm(VLLMBench(**SMALL, modes=modes, in_turns=True))
    assert result["conditions"]["in_turns"] is True
    starts = [(name, "start") for name in ("vllm", "backend-fp8", "worker") for _ in range(2)]
    assert turns[:6] == starts
    forwards = ["vllm", "backend-fp8", "worker"]
    of_first_cell = [*forwards[::-1], *forwards, *forwards[::-1]]
    assert [name for name, _ in turns[6:15]] == of_first_cell
    rest = [("vllm", "run"), ("backend-fp8", "start"), ("worker", "run")]  # its error
    assert turns[15:18] == rest
    assert [name for name, _ in turns[18:]] == [
        "worker", "vllm", "vllm", "worker", "worker", "vllm",
    ]  # fmt: skip
    assert turns[-2:] == [("worker", "end"), ("vllm", "end")]
    alone = run_vllm(VLLMBench(**SMALL, modes=modes))
    assert alone["results"] == result["results"]
    assert alone["modes"] == result["modes"]


def test_ctrl_c_interrupts_all_that_are_alive(processes: dict[str, Any]):
    processes["backend-fp8"][-1] = KeyboardInterrupt()
    result = run_vllm(VLLMBench(**SMALL, in_turns=True))
    assert result["interrupted"] is True
    errors = {name: mode["error"] for name, mode in result["modes"].items()}
    assert errors == {
        "vllm": "interrupted", "backend": "ValueError: no CUSTOM", "backend-fp8": "interrupted",
        "worker": "interrupted",
    }  # fmt: skip
    first, second = (entry["modes"] for entry in result["results"])
    assert [len(first[name]["samples"]) for name in first] == [2, 2, 2]
    assert second == {}


def test_table_and_file_have_the_same_figures(
    run_bench, processes: dict[str, Any], tmp_path: Path
):
    target = tmp_path / "result.json"
    result = run_bench(
        "vllm", "--shape", "tiny-random", "--cells", "1x8,4x100", "--output-tokens", "5",
        "--repeats", "2", "--output", target,
    )  # fmt: skip
    assert result.exit_code == 0
    written = json.loads(target.read_text("utf-8"))
    assert [(entry["batch"], entry["prompt_tokens"]) for entry in written["results"]] == [
        (1, 8), (4, 100),
    ]  # fmt: skip
    rows = [line.split() for line in result.stdout.splitlines()]
    figures = written["results"][0]["modes"]["worker"]
    (row,) = [row for row in rows if row[1:4] == ["1", "x", "8"] and "worker" in row]
    shown = [word for word in row if word != "│"]
    rates = [5 / sample["whole_s"] for sample in figures["samples"]]
    assert shown == [
        "1", "x", "8", "worker", f"{figures['tokens_per_s']:,.0f}",
        f"{min(rates):,.0f}", "to", f"{max(rates):,.0f}", f"{figures['speedup']:.2f}x",
        f"{figures['tpot_speedup']:.2f}x", f"{figures['ttft_ms']:,.1f}",
        f"{figures['tpot_ms']:.3f}", f"{figures['share_of_floor']:.0%}",
    ]  # fmt: skip
    assert "failed: ValueError: no CUSTOM" in result.stdout
    assert "0 of 1 equal, 0 at near ties, 1 different" in result.stdout


def test_ctrl_c_keeps_what_was_measured(run_bench, processes: dict[str, Any], tmp_path: Path):
    processes["backend-fp8"][-1] = KeyboardInterrupt()
    target = tmp_path / "result.json"
    result = run_bench(
        "vllm", "--shape", "tiny-random", "--cells", "1x8,4x100", "--output-tokens", "5",
        "--repeats", "2", "--output", target,
    )  # fmt: skip
    assert result.exit_code == 130
    written = json.loads(target.read_text("utf-8"))
    assert written["interrupted"] is True
    errors = {name: mode["error"] for name, mode in written["modes"].items()}
    assert errors == {
        "vllm": None, "backend": "ValueError: no CUSTOM", "backend-fp8": "interrupted",
        "worker": "interrupted",
    }  # fmt: skip
    assert [[*entry["modes"]] for entry in written["results"]] == [
        ["vllm", "backend-fp8"], ["vllm"],
    ]  # fmt: skip


def test_no_mode_at_all_is_a_failure(run_bench, processes: dict[str, Any]):
    result = run_bench("vllm", "--shape", "tiny-random", "--modes", "backend")
    assert result.exit_code == 1
    assert "failed: ValueError: no CUSTOM" in result.stdout
    assert result.stderr.splitlines()[-1] == "error: no mode could be measured"


def test_without_vllm_one_line_says_what_to_install(run_bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm, "version_of", lambda _: None)
    result = run_bench("vllm")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: vllm: expected the package vllm to be installed, got none; "
        "pip install -e '.[vllm]'\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modes": ("vllm", "other")}, r"modes: expected some of vllm, .*, got \['other'\]"),
        ({"modes": ()}, "modes: expected different ones"),
        ({"cells": (Cell(1, 8), Cell(1, 8))}, "cells: expected different ones"),
        ({"cells": (Cell(4, 100, 8),)}, "cells: expected BATCHxPROMPT"),
        ({"shape": None}, "shape, model: expected one of the two"),
        ({"output_tokens": 1}, "output_tokens: expected >= 2, got 1"),
        ({"rounds": 0}, "rounds: expected >= 1, got 0"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: expected >= 1, got 0"),
        ({"vllm_graph_sizes": (8, 0)}, r"vllm_graph_sizes: expected counts >= 1, got \[8, 0\]"),
        ({"start_together": True}, "start_together: expected in_turns with it"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        VLLMBench(**SMALL | options)
