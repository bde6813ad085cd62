"""mrv1 and vLLM serve the same workload: throughput, first token, between tokens, goodput."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.client import Served
from benchmarks.engines.driver import (
    INTERRUPTED,
    FirstTokens,
    Machine,
    Say,
    compared,
    header,
    prepared,
    process,
)
from benchmarks.engines.serving_run import ServingJob, WorkloadRuns, measure_serving
from benchmarks.engines.workload import Conversation, Workload
from benchmarks.measure.options import CheckpointBench
from mrv1.errors import ConfigError
from mrv1.models import ModelConfig
from mrv1.provenance import version_of

SCHEMA = 2
"""Version of the result's layout; raised when a field changes its meaning or goes."""

ENGINES: dict[str, dict[str, Any]] = {
    "mrv1": {},
    "mrv1-fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "vllm": {"skip_tokenizer_init": True, "disable_log_stats": True},
}
"""Engine -> its own options; vLLM's cache has the dtype of its weights."""
LIMITS = ("ttft", "tpot", "e2el")
"""Times of a request that ``goodput`` may limit, by vLLM's names."""

NUM_PROBES, MOST_PROBE_TOKENS = 32, 1024
"""Prompts whose first tokens are compared, and the tokens of the longest of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBench(Workload):
    """Options: the workload, the engines that serve it, and what counts as good.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    engines: tuple[str, ...] = ("mrv1",)
    """Some of ``ENGINES``, each in a process of its own, in the order of measurement."""
    goodput: tuple[tuple[str, float], ...] = ()
    """Limits in milliseconds that a request must meet to count as good: ``ttft`` (first token),
    ``tpot`` (mean time between its tokens), ``e2el`` (last token)."""
    stream_outputs: bool = True
    """Take each token when it is drawn. If off, engines give finished outputs only, as
    ``LLM.generate`` does: the least work, and no times of tokens."""
    temperature: float = 0.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = -1
    repeats: int = 3
    """Counted runs."""
    warm_up: bool = True
    """Whether a run that is not counted comes first."""
    max_num_seqs: int = 256
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0

    def __post_init__(self) -> None:
        """Check the fields that the engines do not check."""
        self.check_checkpoint()
        self.check_workload()
        if self.peak_share is not None and not self.warm_up:
            raise ConfigError("peak_share: expected warm_up, whose run finds the peak, got none")
        unknown = [name for name in self.engines if name not in ENGINES]
        if unknown or not self.engines or len({*self.engines}) < len(self.engines):
            raise ConfigError(
                f"engines: expected different ones of {', '.join(ENGINES)}, "
                f"got {', '.join(self.engines) or 'none'}"
            )
        for name, limit in self.goodput:
            if name not in LIMITS or not (0 < limit < math.inf):
                raise ConfigError(
                    f"goodput: expected {', '.join(LIMITS)} with milliseconds > 0, "
                    f"got {name}:{limit}"
                )
        names = {name for name, _ in self.goodput}
        if len(names) < len(self.goodput):
            raise ConfigError("goodput: expected one limit of each kind, got two")
        if not self.stream_outputs and names & {"ttft", "tpot"}:
            raise ConfigError(
                "goodput: expected e2el alone without stream_outputs, because the times of tokens "
                f"are not known, got {', '.join(sorted(names))}"
            )
        self.check_least(repeats=1, max_num_seqs=1, long_prefill_token_threshold=0)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters, under names that both engines have."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    def engine_options(self, conversations: Sequence[Conversation]) -> dict[str, Any]:
        """Return the options that both engines get."""
        return {
            "max_model_len": max(each.num_tokens for each in conversations),
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": self.enable_prefix_caching,
            "long_prefill_token_threshold": self.long_prefill_token_threshold,
            **self.engine_model(),
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes,
            "seed": self.seed,
        }


@dataclass(slots=True, kw_only=True)
class Measured:
    """What is known of an engine; it may have failed at any point."""

    start_s: float | None = None
    first_tokens: FirstTokens | None = None
    agreement: dict[str, int] | None = None
    """First tokens against those of the first engine; None of that engine itself."""
    request_rate: float | None = None
    """Conversations that arrived per second; None if all came at once."""
    figures: dict[str, Any] | None = None
    """Medians over the runs; None if the engine did not finish them."""
    runs: list[dict[str, Any]] | None = None
    error: str | None = None


def run_serving(bench: ServingBench, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure every engine in a process of its own and return the result, ready for JSON.

    For arguments and errors see ``run_workloads``.
    """
    *_, (result,) = run_workloads([bench], say)
    return result


def run_workloads(
    benches: Sequence[ServingBench], say: Say = lambda _: None
) -> Iterator[list[dict[str, Any]]]:
    """Measure several workloads; each engine starts once, and serves them one after the other.

    An engine that fails is recorded with its reason; the others are measured all the same. Ctrl-C
    ends the measurement: the results have what was measured until then.

    Args:
        benches: the workloads; only options of ``Workload`` and of the requests may differ.
        say: receives messages about the progress, one line each.

    Yields:
        After each engine a result for each workload, ready for JSON. Engines that were not
        measured by then are interrupted in it: an hour's figures need not wait for the last one.

    Raises:
        ConfigError: vLLM is asked for and not installed, or an option or the checkpoint is wrong.
        ChildError: the device is not there, or the checkpoint could not be written.
    """
    bench = _shared(benches)
    version = version_of("vllm")
    names = [*dict.fromkeys(name for each in benches for name in each.engines)]
    if "vllm" in names and version is None:
        raise ConfigError(
            "engines: expected the package vllm to be installed for vllm, got none; "
            "pip install -e '.[vllm]'"
        )

    def planned(config: ModelConfig) -> tuple[list[list[Conversation]], dict[str, Any]]:
        """Return the conversations of each workload, and the options of the engines."""
        found = [each.conversations(0, config.vocab_size) for each in benches]
        return found, bench.engine_options([each for some in found for each in some])

    def longest(config: ModelConfig) -> int:
        return int(planned(config)[1]["max_model_len"])

    with prepared(bench, longest) as (checkpoint, config, machine):
        conversations, options = planned(config)
        measured: list[dict[str, Measured]] = [{} for _ in benches]
        for name in names:
            own = [index for index, each in enumerate(benches) if name in each.engines]
            firsts = [_first_begun(measured[index].values()) for index in own]
            job = _job(
                [benches[index] for index in own],
                name, checkpoint, config.vocab_size, machine, options, firsts,
            )  # fmt: skip
            found = _measure([benches[index] for index in own], job, firsts, machine, say)
            for index, of_engine in zip(own, found, strict=True):
                measured[index][name] = of_engine
            yield [
                _result(each, of_each, machine, version, _conditions(each, sent, options))
                for each, of_each, sent in zip(benches, measured, conversations, strict=True)
            ]
            if found[-1].error == INTERRUPTED:
                return


def _result(
    bench: ServingBench,
    measured: Mapping[str, Measured],
    machine: Machine,
    version: str | None,
    conditions: dict[str, Any],
) -> dict[str, Any]:
    """Return the result of a workload; ``measured`` may lack some of its engines."""
    engines = {name: measured.get(name, Measured(error=INTERRUPTED)) for name in bench.engines}
    return {
        **header("serving", SCHEMA, bench, machine),
        "peers": {"vllm": version} if "vllm" in engines else {},
        "conditions": conditions,
        "interrupted": any(engine.error == INTERRUPTED for engine in engines.values()),
        "results": {name: asdict(engine) for name, engine in engines.items()},
        "over_vllm": {
            name: _ratios(engine.figures, engines["vllm"].figures)
            for name, engine in engines.items()
            if name != "vllm" and "vllm" in engines
        },
    }


def _first_begun(measured: Iterable[Measured]) -> Measured | None:
    """Return the first engine that began to serve a workload: its rate is known."""
    return next((each for each in measured if each.runs is not None), None)


def _shared(benches: Sequence[ServingBench]) -> ServingBench:
    """Return the first workload; raise ``ConfigError`` if others need another engine."""
    own = {field.name for field in fields(Workload)} - {f.name for f in fields(CheckpointBench)}
    own |= {
        "engines", "goodput", "stream_outputs", "temperature", "top_p", "top_k", "repeats",
        "warm_up",
    }  # fmt: skip
    for field in fields(ServingBench):
        values = {getattr(bench, field.name) for bench in benches}
        if field.name not in own and len(values) > 1:
            raise ConfigError(
                f"{field.name}: expected one value for all workloads, got "
                f"{sorted(map(str, values))}"
            )
    return benches[0]


def _job(
    benches: Sequence[ServingBench],
    engine: str,
    checkpoint: Path,
    vocab_size: int,
    machine: Machine,
    options: Mapping[str, Any],
    firsts: Sequence[Measured | None],
) -> ServingJob:
    """Return the job of an engine; arrivals have the rates of the ``firsts``, measured before."""
    bench, own = benches[0], ENGINES[engine]
    if engine != "vllm":
        own = own | {"device": bench.device}
    generator = np.random.default_rng([bench.seed, 4])
    lengths = np.linspace(1, min(options["max_model_len"] - 1, MOST_PROBE_TOKENS), NUM_PROBES)
    runs = []
    for each, first in zip(benches, firsts, strict=True):
        workload = each
        if each.peak_share is not None and first is not None and first.request_rate is not None:
            workload = replace(each, request_rate=first.request_rate, peak_share=None)
        runs.append(
            WorkloadRuns(
                workload=workload,
                sampling=each.sampling(),
                stream_outputs=each.stream_outputs,
                warm_up=each.warm_up,
                repeats=each.repeats,
            )
        )
    return ServingJob(
        engine=engine,
        options={
            "model": str(checkpoint),
            "dtype": machine.dtype_name,
            **options,
            **own,
        },
        on_cpu=machine.on_cpu,
        probes=[generator.integers(vocab_size, size=int(each)).tolist() for each in lengths],
        workloads=runs,
        vocab_size=vocab_size,
    )


def _measure(
    benches: Sequence[ServingBench],
    job: ServingJob,
    firsts: Sequence[Measured | None],
    machine: Machine,
    say: Say,
) -> list[Measured]:
    """Return what an engine's process finished; first tokens are compared with the ``firsts``."""
    found, name = [Measured() for _ in benches], job.engine
    with (
        suppress(KeyboardInterrupt),
        process(name, measure_serving, job, lambda error: _end(found, error), say) as events,
    ):
        start_s, first_tokens = next(events), next(events)
        say(f"{name}: started in {start_s:.1f} s")
        beside = None if firsts[0] is None else firsts[0].first_tokens
        if benches[0].load_format == "dummy":  # each engine's own model
            beside = None
        agreed = compared(name, beside, first_tokens, machine.near_tie(ENGINES[name]), say)
        for measured in found:
            measured.start_s, measured.first_tokens = start_s, first_tokens
            measured.agreement = agreed
        for number, (bench, measured) in enumerate(zip(benches, found, strict=True), start=1):
            rate = next(events)
            measured.request_rate = rate if math.isfinite(rate) else None
            measured.runs = []
            for _ in range(bench.repeats):
                run = figures(next(events), bench.goodput, streams=bench.stream_outputs)
                measured.runs.append(run)
                say(
                    f"{name}, workload {number} of {len(benches)}, run {len(measured.runs)} of "
                    f"{bench.repeats}: {run['output_throughput']:,.0f} output tokens/s"
                )
            measured.figures = medians(measured.runs)
        next(events, None)  # the process has ended
    return found


def _end(found: Sequence[Measured], error: str) -> None:
    """Note why the workloads without figures have none; the last one has the error in any case."""
    for measured in found:
        if measured.figures is None or measured is found[-1]:
            measured.error = error


def _conditions(
    bench: ServingBench, conversations: Sequence[Conversation], options: Mapping[str, Any]
) -> dict[str, Any]:
    names = (
        "num_conversations", "num_turns", "prefix_len", "input_len", "input_sigma", "input_max",
        "output_len", "output_sigma", "output_max", "stream_outputs", "repeats", "peak_share",
    )  # fmt: skip
    turns = [turn for each in conversations for turn in each.turns]
    return {
        **{name: getattr(bench, name) for name in names},
        "lengths": "lognormal" if bench.lengths is None else bench.lengths.name,
        "request_rate": bench.request_rate if math.isfinite(bench.request_rate) else "inf",
        "new_input_tokens": sum(len(turn.tokens) for turn in turns),
        "output_tokens": sum(turn.output_len for turn in turns),
        "goodput": dict(bench.goodput),
        "sampling": bench.sampling(),
        "prompts": "random token ids, the same for all engines, others for every run",
        **options,
        "other_options": "each engine's defaults",
        "warm_up_runs": int(bench.warm_up),
        "clocks": "as found, not locked",
    }


def arrivals(result: Mapping[str, Any]) -> str:
    """Return in words when the conversations of a result arrived."""
    rates = {engine["request_rate"] for engine in result["results"].values()} - {None}
    return f"{min(rates):.3g} a second" if rates else "all at once"


# --- arithmetic ----------------------------------------------------------------------------------


def figures(
    served: Sequence[Served], goodput: Sequence[tuple[str, float]], *, streams: bool
) -> dict[str, Any]:
    """Return the figures of one run.

    Args:
        served: all requests, with the times of their tokens.
        goodput: limits in milliseconds that a good request meets.
        streams: whether the times of tokens that are not the last are known.
    """
    duration = max(each.token_s[-1] for each in served)
    times = {"e2el": np.array([each.token_s[-1] - each.arrival_s for each in served])}
    gaps = None
    if streams:
        times["ttft"] = np.array([each.token_s[0] - each.arrival_s for each in served])
        times["tpot"] = np.array(
            [(each.token_s[-1] - each.token_s[0]) / max(each.output_len - 1, 1) for each in served]
        )
        gaps = np.concatenate([np.diff(each.token_s) for each in served])
    is_good = np.ones(len(served), dtype=np.bool_)
    for name, limit in goodput:
        is_good &= times[name] * 1e3 <= limit
    num_output = sum(each.output_len for each in served)
    num_input = sum(each.input_len for each in served)
    longer = np.array([each.output_len > 1 for each in served])
    return {
        "duration_s": duration,
        "request_throughput": len(served) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "request_goodput": float(is_good.sum()) / duration if goodput else None,
        "ttft_ms": _spread(times.get("ttft")),
        "itl_ms": _spread(gaps),
        "tpot_ms": _spread(times["tpot"][longer] if streams else None),
        "e2el_ms": _spread(times["e2el"]),
    }


def _spread(seconds: np.ndarray[Any, np.dtype[np.float64]] | None) -> dict[str, Any] | None:
    """Return mean, median, 99th and all percentiles in milliseconds; None = there is no value."""
    if seconds is None or not len(seconds):
        return None
    percentiles = (np.percentile(seconds, range(101)) * 1e3).tolist()
    return {
        "mean": float(seconds.mean()) * 1e3,
        "median": percentiles[50],
        "p99": percentiles[99],
        "percentiles": percentiles,
    }


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure over the runs."""
    found: dict[str, Any] = {}
    for name, value in runs[0].items():
        values = [run[name] for run in runs]
        if value is None:
            found[name] = None
        elif isinstance(value, dict):
            found[name] = {
                key: np.median([each[key] for each in values], axis=0).tolist() for key in value
            }
        else:
            found[name] = statistics.median(values)
    return found


def _ratios(
    ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None
) -> dict[str, float] | None:
    """Return our figures over vLLM's: throughputs above 1 and times below 1 are better."""
    if ours is None or theirs is None:
        return None
    ratios = {
        name: ours[name] / theirs[name]
        for name in ("output_throughput", "total_token_throughput", "request_goodput")
        if theirs[name]
    }
    for name in ("ttft_ms", "itl_ms"):
        if theirs[name] is not None:
            ratios |= {
                f"{name}_{key}": ours[name][key] / theirs[name][key] for key in ("median", "p99")
            }
    return ratios
