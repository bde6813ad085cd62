"""Measure whole engines with a quantized shape: mrv1, vLLM, and vLLM in full precision, in turns.

python -m benchmarks.quantized_engines OUTPUT.json [--shape llama3-8b] [--quantization fp8]
    [--batches 1,32,256] [--engines mrv1,vllm,vllm-plain] [--repeats 5]

All engines read one ``config.json`` that says how weights are stored, and make up codes and
scales; ``vllm-plain`` reads one that says nothing. They generate greedily from the same random
prompts, end-of-sequence tokens ignored. All start at the same time and stay on the GPU; one waits
while another runs. Needs a GPU and, but for ``mrv1`` alone, vLLM.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np

from benchmarks.engines.checkpoint import BenchQuantization, write_config
from benchmarks.engines.core_run import measure_core
from benchmarks.measure.child import ChildError, Send, run_in_child
from benchmarks.measure.floor import copy_bandwidth, step_kv_bytes, step_weight_bytes
from benchmarks.measure.options import parse_script, script_parser, write_result
from benchmarks.measure.shapes import SHAPES, shape_config
from benchmarks.peers.vllm_engine import Job, Prompts, measure_engine
from mrv1.device import resolve_device
from mrv1.kernels.cache.formats import PageFormat
from mrv1.models import ModelConfig
from mrv1.provenance import version_of
from mrv1.runner.kv_cache import CacheSpec

ENGINES = ("mrv1", "vllm", "vllm-plain")
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
MAX_NUM_BATCHED_TOKENS = 8192
BLOCK = 16
SPARE = 1.05
"""Blocks of a cache, for each that a batch needs."""


def floor_bytes(config: ModelConfig, batch: int) -> tuple[int, float]:
    """Return the bytes of weights and of caches that a decode step reads."""
    dtype = config.torch_dtype
    spec = CacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=BLOCK,
        head_dim=config.head_dim,
        page_format=PageFormat.plain(dtype),
    )
    kv_bytes = step_kv_bytes(
        spec, config.layer_windows, batch=batch,
        prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS,
    )  # fmt: skip
    return step_weight_bytes(config, dtype, 1, batch=batch), kv_bytes


def cache_bytes(config: ModelConfig, batch: int) -> int:
    """Return the bytes of a cache with room for all tokens of a batch."""
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    tokens = batch * (PROMPT_TOKENS + OUTPUT_TOKENS + BLOCK)
    return int(SPARE * token * tokens * config.torch_dtype.itemsize) + 2**28


def prompts(config: ModelConfig, batch: int, run: int) -> Prompts:
    """Return the prompts of a run, the same for all engines."""
    generator = np.random.default_rng([batch, run])
    drawn: Prompts = generator.integers(config.vocab_size, size=(batch, PROMPT_TOKENS)).tolist()
    return drawn


def job(
    engine: str, folder: str, config: ModelConfig, batches: list[int], repeats: int, device: str
) -> Job:
    """Return what the process of an engine does."""
    options: dict[str, Any] = {
        "model": folder,
        "load_format": "dummy",
        "dtype": str(config.torch_dtype).removeprefix("torch."),
        "max_model_len": PROMPT_TOKENS + OUTPUT_TOKENS,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": cache_bytes(config, max(batches)),
    }
    if engine == "mrv1":
        options |= {"device": device, "block_size": BLOCK}
    else:
        options |= {
            "gpu_memory_utilization": 0.25,  # of an engine that starts; its cache is given
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "stream_interval": OUTPUT_TOKENS,
        }
    runs = [prompts(config, batch, run) for batch in batches for run in range(repeats + 1)]
    return Job(
        engine=options, on_cpu=device == "cpu", probes=runs[0][:1], near_tie=0.0, runs=runs,
        output_tokens=OUTPUT_TOKENS,
    )  # fmt: skip


def measured(engine: str, of: Job, send: Send) -> None:
    """Send an engine's start in seconds, its first token and the times of its runs."""
    (measure_core if engine == "mrv1" else measure_engine)(of, send)


def measure_in_turns(
    jobs: dict[str, Job], batches: list[int], repeats: int
) -> tuple[dict[str, float], dict[int, dict[str, list[dict[str, Any]]]], dict[str, str]]:
    """Return the seconds of starts, for each batch the runs of each engine, and errors."""
    errors: dict[str, str] = {}
    with ExitStack() as ending:
        running = {
            name: ending.enter_context(closing(run_in_child(measured, name, of)))
            for name, of in jobs.items()
        }

        def ask(name: str) -> Any:  # noqa: ANN401 - what the process sends
            try:
                return next(running[name])
            except ChildError as error:
                errors[name] = str(error)
                sys.stdout.write("\n".join((*error.log, f"{name}: failed: {error}", "")))
                return None

        with ThreadPoolExecutor(len(jobs)) as pool:
            starts = dict(zip(running, pool.map(ask, running), strict=True))
        sys.stdout.write(f"started in {starts}\n")
        for name in jobs:
            if name not in errors:
                ask(name)  # the first token
        times: dict[int, dict[str, list[dict[str, Any]]]] = {}
        for batch in batches:
            times[batch] = {name: [] for name in jobs}
            for _ in range(repeats + 1):
                for name in jobs:
                    if name not in errors and (time := ask(name)) is not None:
                        times[batch][name].append(time)
        for name in jobs:
            if name not in errors:
                next(running[name], None)
    return starts, times, errors


def row(
    config: ModelConfig, bandwidth: float | None, engine: str, batch: int, runs: list[Any]
) -> dict[str, Any]:
    """Return the figures of an engine and a batch, from its runs but the first."""
    whole_s = statistics.median(run["whole_s"] for run in runs[1:])
    prefill_s = statistics.median(max(run["first_s"]) for run in runs[1:])
    step_s = (whole_s - prefill_s) / (OUTPUT_TOKENS - 1)
    weight_bytes, kv_bytes = floor_bytes(config, batch)
    return {
        "engine": engine,
        "batch": batch,
        "tokens_per_s": batch * OUTPUT_TOKENS / whole_s,
        "prefill_ms": prefill_s * 1e3,
        "decode_step_ms": step_s * 1e3,
        "weight_bytes": weight_bytes,
        "kv_bytes": kv_bytes,
        "share_of_floor": (weight_bytes + kv_bytes) / bandwidth / step_s if bandwidth else None,
        "samples_s": [run["whole_s"] for run in runs[1:]],
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = script_parser(__doc__, repeats=5)
    parser.add_argument("--shape", default="llama3-8b", choices=sorted(SHAPES))
    parser.add_argument("--quantization", default="fp8", choices=get_args(BenchQuantization))
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--device", default="cuda")
    return parse_script(parser, arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure the engines, and write the result."""
    options = parse(arguments)
    device = resolve_device(options.device)
    bandwidth = copy_bandwidth(device)
    batches = [int(each) for each in options.batches.split(",")]
    names = options.engines.split(",")
    if unknown := [name for name in names if name not in ENGINES]:
        raise SystemExit(f"--engines: expected some of {', '.join(ENGINES)}, got {unknown}")
    longest = PROMPT_TOKENS + OUTPUT_TOKENS
    plain = shape_config(options.shape)
    plain = replace(plain, max_model_len=max(plain.max_model_len, longest))
    with TemporaryDirectory(prefix="mrv1-bench-") as folder:
        configs, jobs = {}, {}
        for name in names:
            own = Path(folder, name)
            own.mkdir()
            kind = None if name == "vllm-plain" else options.quantization
            write_config(own, plain, plain.torch_dtype, kind)
            configs[name] = ModelConfig.from_pretrained(own)
            jobs[name] = job(name, str(own), plain, batches, options.repeats, device.type)
        starts, times, errors = measure_in_turns(jobs, batches, options.repeats)
    rows = [
        row(configs[name], bandwidth, name, batch, runs)
        for batch, of in times.items()
        for name, runs in of.items()
        if len(runs) > options.repeats
    ]
    for each in rows:
        sys.stdout.write(
            f"{each['engine']} {each['batch']}: {each['tokens_per_s']:,.0f} tokens/s, "
            f"{each['decode_step_ms']:.2f} ms a step, "
            f"{each['share_of_floor'] or 0:.0%} of the floor\n"
        )
    conditions = {
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "sampling": "greedy, end-of-sequence ignored, token ids in and out",
        "prompts": "random token ids, the same for all engines, others for every run",
        "weights": "made up as codes, by each engine",
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "order": "in turns, run by run; all engines are on the GPU",
        "other_options": "each engine's defaults",
        "warm_up_runs": 1,
    }
    write_result(
        options, device, "quantized engines", shape=options.shape,
        quantization=options.quantization, peers={"vllm": version_of("vllm")},
        copy_bandwidth=bandwidth, starts_s=starts, errors=errors, conditions=conditions,
        results=rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
