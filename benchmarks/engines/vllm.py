"""vLLM alone, with mrv1's attention, with its worker, and mrv1 alone: the same requests."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines.core_run import measure_core
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
from benchmarks.kernels.attention_case import Cell
from benchmarks.measure.floor import rank_config, step_kv_bytes, step_weight_bytes
from benchmarks.measure.options import CheckpointBench
from benchmarks.peers.vllm_engine import Job, measure_engine
from mrv1.errors import ConfigError
from mrv1.integrations.vllm.options import REQUEST_CHECK
from mrv1.kernels.cache.formats import FP8, PageFormat
from mrv1.models import ModelConfig
from mrv1.provenance import version_of
from mrv1.runner.kv_cache import CacheSpec

SCHEMA = 2
"""Version of the result's layout; raised when a field changes its meaning or goes. Times to first
tokens of 1 are those of another run, in which requests end with them."""
RANKS_SCHEMA = 1
"""The same of results of several GPUs."""

WORKER = {
    "worker_cls": "mrv1.integrations.vllm.Worker",
    "logits_processors": [REQUEST_CHECK],
}
MADE_UP = "mrv1_dummy"
"""How vLLM's own models get the weights that mrv1 makes up: mrv1's plug-in registers it."""
OURS = "mrv1"
"""How the modes that are not vLLM begin: mrv1's own engine."""
MODES: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm-fp8": {"kv_cache_dtype": "fp8"},
    "backend": {"attention_backend": "CUSTOM"},
    "backend-fp8": {"attention_backend": "CUSTOM", "kv_cache_dtype": "fp8_per_token_head"},
    "worker": WORKER,
    "worker-fp8": WORKER | {"kv_cache_dtype": "fp8_per_token_head"},
    OURS: {},
    f"{OURS}-deterministic": {"deterministic": True},
    f"{OURS}-rank-invariant": {"deterministic": True, "rank_invariant": True},
}
"""Mode -> the engine's options that differ from its defaults."""

NUM_PROBES = 32
"""Prompts whose first tokens are compared."""
MOST_PROBE_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMBench(CheckpointBench):
    """Options: all requests of a cell are added at once and generate greedily.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    modes: tuple[str, ...] = ("vllm", "backend", "backend-fp8", "worker")
    """Keys of ``MODES``, in the order of measurement; the first that runs is the reference."""
    cells: tuple[Cell, ...] = (Cell(1, 128), Cell(32, 128), Cell(256, 128))
    """Concurrent requests and the tokens of their prompts; measured in one engine."""
    output_tokens: int = 256
    """Tokens to generate per request, >= 2; end-of-sequence tokens do not end a request."""
    repeats: int = 3
    """Counted runs per cell and process, after one uncounted run."""
    rounds: int = 1
    """Processes of each mode: in the order of ``modes``, then in the opposite one, and so on.
    Times of the host differ from process to process."""
    in_turns: bool = False
    """Start the processes of a round one after the other, but let their runs take turns, so that
    all modes run on the same host at about the same time: what others do on it changes within
    minutes. All engines are in the device's memory, each with ``gpu_memory_utilization``."""
    start_together: bool = False
    """With ``in_turns``: start the processes of a round at the same time. Starts take longer then;
    give ``kv_cache_memory_bytes``, as an engine that measures its memory sees the others'."""
    vllm_graph_sizes: tuple[int, ...] = ()
    """Tokens of the steps that vLLM captures as CUDA graphs, for a shorter start; empty = its
    default, about 50 sizes. Give the batches of the cells, and the tokens of their prompts."""

    def __post_init__(self) -> None:
        """Check the fields that vLLM does not check."""
        self.check_checkpoint()
        for name, values in (("modes", self.modes), ("cells", self.cells)):
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name}: expected different ones, got {[*map(str, values)]}")
        unknown = [name for name in self.modes if name not in MODES]
        if unknown:
            raise ConfigError(f"modes: expected some of {', '.join(MODES)}, got {unknown}")
        if any(cell.shortest for cell in self.cells):
            raise ConfigError("cells: expected BATCHxPROMPT such as 32x128, got mixed lengths")
        self.check_least(output_tokens=2, repeats=1, rounds=1)
        if any(size < 1 for size in self.vllm_graph_sizes):
            raise ConfigError(
                f"vllm_graph_sizes: expected counts >= 1, got {[*self.vllm_graph_sizes]}"
            )
        if self.start_together and not self.in_turns:
            raise ConfigError("start_together: expected in_turns with it, got neither")

    def prompts(self, cell: Cell, run: int, vocab_size: int) -> list[list[int]]:
        """Return the random prompts of one run of a cell."""
        generator = np.random.default_rng([self.seed, cell.batch, cell.context, run])
        shape = (cell.batch, cell.context)
        prompts: list[list[int]] = generator.integers(vocab_size, size=shape).tolist()
        return prompts

    def probes(self, vocab_size: int) -> list[list[int]]:
        """Return prompts of different lengths, up to that of the longest prompt or 1,024."""
        longest = min(max(cell.context for cell in self.cells), MOST_PROBE_TOKENS)
        generator = np.random.default_rng([self.seed])
        lengths = np.linspace(1, longest, NUM_PROBES).astype(int)
        return [generator.integers(vocab_size, size=length).tolist() for length in lengths]

    def order(self) -> list[tuple[str, ...]]:
        """Return for each round the modes in the order in which their processes start."""
        return [self.modes[:: -1 if index % 2 else 1] for index in range(self.rounds)]

    def engine_options(self) -> dict[str, Any]:
        """Return the options that all modes have."""
        longest = max(cell.context for cell in self.cells) + self.output_tokens
        return {
            **self.engine_model(),
            "max_model_len": longest,
            "max_num_seqs": max(cell.batch for cell in self.cells),
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes,
            "seed": self.seed,
        }

    def vllm_options(self) -> dict[str, Any]:
        """Return the options that all modes give to vLLM alone."""
        return {
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "stream_interval": self.output_tokens,
        }


def run_vllm(bench: VLLMBench, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure every mode in processes of its own and return the result, ready for JSON.

    A mode that fails is recorded with its reason, and not started again; the others are measured
    all the same. Ctrl-C ends the measurement: the result has what was measured until then. The
    result's ``op`` is ``ranks`` with several GPUs, else ``vllm``.

    Args:
        bench: the options.
        say: receives messages about the progress, one line each.

    Raises:
        ConfigError: vLLM is not installed, or an option or the checkpoint is wrong.
        ChildError: the device is not there, or the checkpoint could not be written.
    """
    version = version_of("vllm")
    if version is None and not all(name.startswith(OURS) for name in bench.modes):
        raise ConfigError(
            "vllm: expected the package vllm to be installed, got none; pip install -e '.[vllm]'"
        )
    longest = bench.engine_options()["max_model_len"]
    with prepared(bench, lambda _: longest) as (checkpoint, config, machine):
        modes = {name: Mode(samples=[[] for _ in bench.cells]) for name in bench.modes}
        jobs = {name: _job(bench, name, config, checkpoint, machine) for name in bench.modes}
        with suppress(KeyboardInterrupt):
            for names in bench.order():
                _measure_round(bench, names, jobs, modes, say)
        for mode in modes.values():
            if not mode.starts_s and mode.error is None:
                mode.error = INTERRUPTED
    is_dummy = bench.load_format == "dummy"
    op, schema = ("vllm", SCHEMA) if bench.tensor_parallel_size == 1 else ("ranks", RANKS_SCHEMA)
    return {
        **header(op, schema, bench, machine),
        "peers": {"vllm": version},
        "copy_bandwidth_bytes_per_s": machine.bandwidth,
        "conditions": {
            "output_tokens": bench.output_tokens,
            "sampling": "greedy, end-of-sequence ignored, token ids in and out",
            "prompts": "random token ids, the same for every mode, others for every run",
            **({"made_up_weights": "the same for every mode"} if is_dummy else {}),
            **bench.engine_options(),
            "stream_interval": bench.output_tokens,
            "vllm_graph_sizes": [*bench.vllm_graph_sizes] or "vLLM's default",
            "other_options": "each engine's defaults",
            "repeats": bench.repeats,
            "rounds": bench.rounds,
            "in_turns": bench.in_turns,
            "start_together": bench.start_together,
            "warm_up_runs": 1,
            "clocks": "as found, not locked",
        },
        "reference": reference(modes),
        "interrupted": any(mode.error == INTERRUPTED for mode in modes.values()),
        "modes": {
            name: {
                "options": MODES[name],
                "start_s": mode.starts_s[0] if mode.starts_s else None,
                "later_starts_s": mode.starts_s[1:],
                "first_tokens": mode.first_tokens,
                "agreement": mode.agreement,
                "error": mode.error,
            }
            for name, mode in modes.items()
        },
        "results": [
            {
                "batch": cell.batch,
                "prompt_tokens": cell.context,
                "modes": _cell_entry(bench, index, modes, config, machine),
            }
            for index, cell in enumerate(bench.cells)
        ],
    }


@dataclass(slots=True, kw_only=True)
class Mode:
    """What is known of a mode; it may have failed at any point."""

    starts_s: list[float] = field(default_factory=list)
    """Of each process."""
    first_tokens: FirstTokens | None = None
    """Of the first process."""
    agreement: dict[str, int] | None = None
    """None in the mode that the others are compared with."""
    samples: list[list[Mapping[str, Any]]]
    """For each cell the runs of all processes."""
    error: str | None = None


def _job(
    bench: VLLMBench, mode: str, config: ModelConfig, checkpoint: Path, machine: Machine
) -> Job:
    options = {"model": str(checkpoint), "dtype": machine.dtype_name, **bench.engine_options()}
    is_ours = mode.startswith(OURS)
    options |= {"device": bench.device} if is_ours else bench.vllm_options()
    if bench.load_format == "dummy" and not is_ours and "worker_cls" not in MODES[mode]:
        options |= {"load_format": MADE_UP}  # vLLM's model, with the same weights
    if bench.vllm_graph_sizes and not is_ours:
        options |= {"cudagraph_capture_sizes": [*bench.vllm_graph_sizes]}
    runs = range(bench.repeats + 1)
    return Job(
        engine=options | MODES[mode],
        on_cpu=machine.on_cpu,
        probes=bench.probes(config.vocab_size),
        near_tie=machine.near_tie(MODES[mode]),
        runs=[bench.prompts(cell, run, config.vocab_size) for cell in bench.cells for run in runs],
        output_tokens=bench.output_tokens,
    )


def _measure_round(
    bench: VLLMBench,
    names: Sequence[str],
    jobs: Mapping[str, Job],
    modes: Mapping[str, Mode],
    say: Say,
) -> None:
    """Run a process of each mode that has not failed: one after the other, or all in turns.

    Raises:
        KeyboardInterrupt: Ctrl-C; what was measured until then is in ``modes``.
    """
    with ExitStack() as stack:
        processes = [
            stack.enter_context(closing(_measure(bench, name, jobs[name], modes, say)))
            for name in names
            if modes[name].error is None
        ]
        if bench.start_together:
            with ThreadPoolExecutor(len(bench.modes)) as pool:
                started = [*pool.map(lambda each: next(each, False), processes)]
            processes = [*compress(processes, started)]
            for name in names:
                _compare(bench, name, jobs[name], modes, say)
        if bench.in_turns:
            while processes:
                processes = [each for each in processes if next(each, False)][::-1]
        else:
            for _ in chain(*processes):
                pass


def _measure(
    bench: VLLMBench, name: str, job: Job, modes: Mapping[str, Mode], say: Say
) -> Generator[bool]:
    """Add what a process of a mode measures; yield True after its start, and after each run."""
    mode = modes[name]

    def end(error: str) -> None:
        mode.error = error

    measure = measure_core if name.startswith(OURS) else measure_engine
    with process(name, measure, job, end, say) as events:
        mode.starts_s.append(next(events))
        say(f"{name}: started in {mode.starts_s[-1]:.1f} s")
        first_tokens = next(events)
        if mode.first_tokens is None:
            mode.first_tokens = first_tokens
            if not bench.start_together:
                _compare(bench, name, job, modes, say)
        yield True
        for cell, samples in zip(bench.cells, mode.samples, strict=True):
            next(events)  # not counted
            yield True
            for _ in range(bench.repeats):
                samples.append(next(events))
                yield True
            figures = cell_figures(samples[-bench.repeats :], cell.batch, bench.output_tokens)
            say(f"{name}, {cell}: {figures['tokens_per_s']:,.1f} tokens/s")
        for unexpected in events:  # none: the process ends
            raise RuntimeError(f"events: expected no more, got {unexpected}")


def _compare(bench: VLLMBench, name: str, job: Job, modes: Mapping[str, Mode], say: Say) -> None:
    """Compare a mode's first tokens with the reference's."""
    base, found = reference(modes), modes[name].first_tokens
    if base in (None, name) or found is None:
        return
    expected = modes[str(base)].first_tokens
    modes[name].agreement = compared(name, expected, found, job.near_tie, say)


# --- arithmetic ----------------------------------------------------------------------------------


def cell_figures(
    samples: Sequence[Mapping[str, Any]], batch: int, output_tokens: int
) -> dict[str, Any]:
    """Return the medians over runs of a cell, and the runs."""
    whole_s = statistics.median(sample["whole_s"] for sample in samples)
    prefill_s = statistics.median(max(sample["first_s"]) for sample in samples)
    first_s = statistics.median(statistics.median(sample["first_s"]) for sample in samples)
    return {
        "tokens_per_s": batch * output_tokens / whole_s,
        "ttft_ms": first_s * 1e3,
        "prefill_ms": prefill_s * 1e3,
        "tpot_ms": (whole_s - prefill_s) / (output_tokens - 1) * 1e3,
        "samples": [
            {"prefill_s": max(sample["first_s"]), "whole_s": sample["whole_s"]}
            for sample in samples
        ],
    }


def reference(modes: Mapping[str, Mode]) -> str | None:
    """Return the first mode that has started: the others are compared with it."""
    return next((name for name, mode in modes.items() if mode.first_tokens is not None), None)


def cache_spec(mode: str, config: ModelConfig, dtype: torch.dtype) -> CacheSpec:
    """Return the shapes and dtypes of a mode's KV cache."""
    kind = MODES[mode].get("kv_cache_dtype", "auto")
    return CacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=16,
        head_dim=config.head_dim,
        page_format=PageFormat.plain(dtype) if kind == "auto" else FP8,
    )


def _cell_entry(
    bench: VLLMBench, index: int, modes: Mapping[str, Mode], config: ModelConfig, machine: Machine
) -> dict[str, dict[str, Any]]:
    """Return the figures of the modes that finished a cell, with the floor and the ratios.

    Ratios say how many times as fast as the reference a mode is: None where that has no figures.
    """
    cell, dtype = bench.cells[index], machine.dtype
    figures = {
        name: cell_figures(mode.samples[index], cell.batch, bench.output_tokens)
        for name, mode in modes.items()
        if mode.samples[index]
    }
    base = figures.get(reference(modes) or "")
    own = rank_config(config, bench.tensor_parallel_size)
    weight_bytes = step_weight_bytes(own, dtype, bench.tensor_parallel_size, batch=cell.batch)
    entries = {}
    for name, found in figures.items():
        kv_bytes = step_kv_bytes(
            cache_spec(name, own, dtype), config.layer_windows,
            batch=cell.batch, prompt_tokens=cell.context, output_tokens=bench.output_tokens,
        )  # fmt: skip
        floor_ms = machine.bandwidth and (weight_bytes + kv_bytes) / machine.bandwidth * 1e3
        entries[name] = {
            **found,
            "weight_bytes": weight_bytes,
            "kv_bytes": kv_bytes,
            "floor_ms": floor_ms,
            "share_of_floor": floor_ms and floor_ms / found["tpot_ms"],
            "speedup": base and found["tokens_per_s"] / base["tokens_per_s"],
            "tpot_speedup": base and base["tpot_ms"] / found["tpot_ms"],
        }
    return entries
