"""Measure AsyncLLM beside LLM on the same requests, in one process, in turns.

python -m benchmarks.async_llm OUTPUT.json [--model M] [--batches 1,32,256] [--repeats 3]

LLM generates all prompts in one call; AsyncLLM has one task for each request, which reads every
output it is given. Generation is greedy, end-of-sequence tokens ignored, without prefix caching.
Without --model, both read one random checkpoint of the Qwen3-0.6B shape, which has no tokenizer;
with "smollm2" or "tiny", outputs have text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines.checkpoint import write_checkpoint
from benchmarks.measure.shapes import QWEN3_0_6B
from mrv1 import LLM, AsyncLLM, SamplingParams
from mrv1.device import resolve_device
from mrv1.provenance import provenance

PROMPT_TOKENS = 128
SHARE_OF_MEMORY = 0.4
"""Of the GPU, for each of the two engines."""

Prompts = list[list[int]]


def run_llm(llm: LLM, prompts: Prompts, params: SamplingParams) -> tuple[float, float]:
    """Return the seconds that LLM takes, and 1, its outputs per request."""
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    check([len(output.outputs[0].token_ids) for output in outputs], params)
    return seconds, 1.0


async def run_async(
    llm: AsyncLLM, prompts: Prompts, params: SamplingParams
) -> tuple[float, float]:
    """Return the seconds that AsyncLLM takes, and its outputs per request."""

    async def read(prompt: list[int]) -> tuple[int, int]:
        num_outputs = num_tokens = 0
        async for output in llm.generate(prompt, params):
            num_outputs += 1
            num_tokens = len(output.outputs[0].token_ids)
        return num_outputs, num_tokens

    begin = time.perf_counter()
    counts = await asyncio.gather(*map(read, prompts))
    seconds = time.perf_counter() - begin
    check([num_tokens for _, num_tokens in counts], params)
    return seconds, statistics.fmean(num_outputs for num_outputs, _ in counts)


def check(num_tokens: list[int], params: SamplingParams) -> None:
    """Raise unless every request has all its tokens."""
    if set(num_tokens) != {params.max_tokens}:
        raise RuntimeError(f"expected {params.max_tokens} tokens each, got {set(num_tokens)}")


async def measure(model: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each batch: medians of runs in turns, after one run that warms up."""
    batches = [int(batch) for batch in arguments.batches.split(",")]
    params = SamplingParams(temperature=0, max_tokens=arguments.output_tokens, ignore_eos=True)
    options: dict[str, Any] = {
        "max_model_len": PROMPT_TOKENS + arguments.output_tokens,
        "max_num_seqs": max(batches),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": SHARE_OF_MEMORY,
        "device": arguments.device,
    }
    rows = []
    with LLM(model, **options) as llm:
        print(llm.describe())
        async with AsyncLLM(model, **options) as async_llm:
            vocab_size = llm.engine.runner.model_config.vocab_size
            for batch in batches:
                samples: dict[str, list[tuple[float, float]]] = {"LLM": [], "AsyncLLM": []}
                for run in range(arguments.repeats + 1):
                    generator = np.random.default_rng([batch, run])
                    ids = generator.integers(vocab_size, size=(batch, PROMPT_TOKENS)).tolist()
                    samples["LLM"].append(run_llm(llm, ids, params))
                    samples["AsyncLLM"].append(await run_async(async_llm, ids, params))
                rows.append(summary(batch, arguments.output_tokens, samples))
    return rows


def summary(
    batch: int, output_tokens: int, samples: dict[str, list[tuple[float, float]]]
) -> dict[str, Any]:
    """Return the row of a batch."""
    seconds = {name: [each[0] for each in runs[1:]] for name, runs in samples.items()}
    tokens_per_s = {
        name: batch * output_tokens / statistics.median(own) for name, own in seconds.items()
    }
    return {
        "batch": batch,
        "tokens_per_s": tokens_per_s,
        "async_over_llm": tokens_per_s["AsyncLLM"] / tokens_per_s["LLM"],
        "outputs_per_request": statistics.median(each[1] for each in samples["AsyncLLM"][1:]),
        "samples_s": seconds,
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    if arguments.model:
        rows = asyncio.run(measure(arguments.model, arguments))
    else:
        with tempfile.TemporaryDirectory() as checkpoint:
            device = resolve_device(arguments.device)
            write_checkpoint(
                Path(checkpoint), QWEN3_0_6B, device=device, dtype=torch.bfloat16, seed=0
            )
            rows = asyncio.run(measure(checkpoint, arguments))
    result = {
        "op": "async llm",
        "schema": 1,
        "shape": arguments.model or "qwen3-0.6b",
        "weights": "checkpoint" if arguments.model else "random",
        **provenance(resolve_device(arguments.device), arguments.commit),
        "conditions": {
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": arguments.output_tokens,
            "sampling": "greedy, end-of-sequence ignored",
            "value": "all generated tokens / median time, prefill included; LLM and AsyncLLM in "
            "turns in one process",
            "repeats": arguments.repeats,
            "warm_up_runs": 1,
            "clocks": "as found, not locked",
        },
        "results": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    for row in rows:
        print(row["batch"], row["tokens_per_s"], f"{row['async_over_llm']:.3f}x")


if __name__ == "__main__":
    main()
