"""Measure mrv1 and vLLM on one random checkpoint and the same requests, in turns.

python -m benchmarks.beside_vllm OUTPUT.json [--batches 1,32,256] [--repeats 20] [--commit C]

Both engines read one checkpoint of the Qwen3-0.6B shape and generate greedily from the same
random prompts, end-of-sequence tokens ignored, without prefix caching; each engine keeps its own
defaults otherwise, but for its share of the memory. Each is in a process of its own, both are on
the GPU, and one waits while the other runs: what the machine does meanwhile meets both. Needs a
GPU and vLLM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.driver import header, prepared
from benchmarks.measure.child import Send, run_in_child
from benchmarks.measure.options import CheckpointBench
from benchmarks.measure.shapes import QWEN3_0_6B

ENGINES = ("vllm", "mrv1")
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 256
MAX_NUM_BATCHED_TOKENS = 8192
MEMORY_SHARE = 0.4
"""Of the GPU, for each engine."""


def measure(engine: str, checkpoint: str, batches: list[int], repeats: int, send: Send) -> None:
    """Send one engine's start time, then the seconds of each run, when they are asked for."""
    options = {
        "max_model_len": PROMPT_TOKENS + OUTPUT_TOKENS,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": MEMORY_SHARE,
    }
    begin = time.perf_counter()
    if engine == "vllm":
        from vllm import LLM, SamplingParams

        llm = LLM(checkpoint, skip_tokenizer_init=True, dtype="bfloat16", seed=0, **options)
        params = SamplingParams(
            temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
        )
    else:
        from mrv1 import LLM, SamplingParams

        llm = LLM(checkpoint, **options)
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    send(time.perf_counter() - begin)
    for batch in batches:
        for run in range(repeats + 1):
            generator = np.random.default_rng([batch, run])
            ids = generator.integers(QWEN3_0_6B.vocab_size, size=(batch, PROMPT_TOKENS)).tolist()
            prompts = [{"prompt_token_ids": prompt} for prompt in ids]
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            if num_tokens != batch * OUTPUT_TOKENS:
                raise RuntimeError(f"{engine}: expected {batch * OUTPUT_TOKENS}, got {num_tokens}")
            send(seconds)
    if engine == "vllm":
        llm.llm_engine.engine_core.shutdown()  # this process waits for that of the engine


def in_turns(
    engines: Mapping[str, Iterator[float]], num_runs: int, num_tokens: int
) -> dict[str, list[float]]:
    """Return the seconds of each engine's runs, which take turns, but for the first, a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(num_runs):
        for name, engine in engines.items():
            seconds[name].append(next(engine))
        said = (f"{name} {num_tokens / seconds[name][-1]:,.0f}" for name in engines)
        print("tokens/s:", ", ".join(said), flush=True)
    return {name: runs[1:] for name, runs in seconds.items()}


def main() -> None:
    """Measure both engines and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    bench = CheckpointBench(dtype="bfloat16", device="cuda", commit=arguments.commit)
    with (
        prepared(bench, lambda _: PROMPT_TOKENS + OUTPUT_TOKENS) as (checkpoint, _, machine),
        ExitStack() as ending,
    ):
        own = (str(checkpoint), batches, arguments.repeats)
        engines = {
            name: ending.enter_context(closing(run_in_child(measure, name, *own)))
            for name in ENGINES
        }
        start_s = {name: next(engine) for name, engine in engines.items()}
        samples = {
            batch: in_turns(engines, arguments.repeats + 1, batch * OUTPUT_TOKENS)
            for batch in batches
        }
        for engine in engines.values():
            next(engine, None)  # to its end
    rows = []
    for batch, samples_s in samples.items():
        row: dict[str, Any] = {"batch": batch, "tokens_per_s": {}, "samples_s": samples_s}
        for name, seconds in samples_s.items():
            row["tokens_per_s"][name] = batch * OUTPUT_TOKENS / statistics.median(seconds)
        row["mrv1_over_vllm"] = row["tokens_per_s"]["mrv1"] / row["tokens_per_s"]["vllm"]
        rows.append(row)
    result = {
        **header("beside vllm", 1, bench, machine),
        "weights": "random, one checkpoint for both",
        "peers": {"vllm": metadata.version("vllm")},
        "start_s": start_s,
        "conditions": {
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "sampling": "greedy, end-of-sequence ignored, token ids in and out",
            "prompts": "random token ids, the same for both, others for every run",
            "max_model_len": PROMPT_TOKENS + OUTPUT_TOKENS,
            "max_num_seqs": max(batches),
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": MEMORY_SHARE,
            "order": "in turns, run by run; both engines are on the GPU",
            "other_options": "each engine's defaults",
            "value": "all generated tokens / median time of generate(), prefill included",
            "repeats": arguments.repeats,
            "warm_up_runs": 1,
            "clocks": "as found, not locked",
        },
        "results": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    for row in rows:
        print(row["batch"], row["tokens_per_s"], f"{row['mrv1_over_vllm']:.2f}x")


if __name__ == "__main__":
    main()
