"""Measure vLLM's decode step with adapters (LoRA) beside its step without, in turns.

python -m benchmarks.lora_vllm OUTPUT.json [--shape S] [--batches 1,32] [--adapters 32]

vLLM's share beside that of ``benchmarks.lora_engine``, with the same variants: two engines of
vLLM with dummy weights, each in a process of its own, one made without ``enable_lora``. Adapters
have random values for every linear module of every layer. Needs vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.engines.checkpoint import write_config
from benchmarks.lora_engine import PROMPT_TOKENS, VARIANTS, adapter_parser
from benchmarks.measure.child import run_in_child
from benchmarks.measure.options import parse_script, write_result
from benchmarks.measure.shapes import shape_config
from benchmarks.peers.vllm_lora import AdaptedJob, AdaptedRun, measure_adapted
from mrv1.device import resolve_device
from mrv1.models import ModelConfig
from mrv1.models.lora.adapter import PLACES
from mrv1.models.weights import part_rows
from mrv1.provenance import version_of


def adapters_of(variant: str, batch: int, adapters: int) -> list[int]:
    """Return the number of each request's adapter; empty = none has one."""
    if variant == "each":
        return [1 + index % adapters for index in range(batch)]
    return [1] * batch if variant == "one" else []


def prompts_of(config: ModelConfig, batch: int, run: int) -> list[list[int]]:
    """Return the random prompts of one run of a batch, the same for every variant."""
    generator = np.random.default_rng([batch, run])
    prompts: list[list[int]] = generator.integers(
        config.vocab_size, size=(batch, PROMPT_TOKENS)
    ).tolist()
    return prompts


def write_adapters(
    folder: Path, config: ModelConfig, rank: int, count: int, dtype: torch.dtype
) -> None:
    """Write ``count`` adapters of all linear modules, ``1``, ``2`` and so on, as PEFT does.

    All have the values of one file, which is linked: each is a slot of its own all the same.
    """
    tensors = {}
    for layer in range(config.num_layers):
        sizes = part_rows(config, layer)
        for module, (field, part) in PLACES.items():
            rows, num_in = sizes[field]
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, num_in, dtype=dtype)
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows[part], rank, dtype=dtype)
    for tensor in tensors.values():
        tensor.mul_(tensor.shape[1] ** -0.5)
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [module.rpartition(".")[2] for module in PLACES],
        "bias": "none",
    }
    for number in range(1, count + 1):
        own = folder / str(number)
        own.mkdir()
        (own / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        if number == 1:
            save_file(tensors, own / "adapter_model.safetensors")
        else:
            os.link(folder / "1" / "adapter_model.safetensors", own / "adapter_model.safetensors")


def jobs(options: argparse.Namespace, folder: Path, *, on_cpu: bool) -> dict[str, AdaptedJob]:
    """Return what the processes of both engines measure; writes their files to ``folder``.

    The order of runs is that of ``measure``: batches, runs, variants.
    """
    config = shape_config(options.shape)
    dtype = config.torch_dtype
    write_config(folder, config, dtype)
    write_adapters(folder, config, options.rank, options.adapters, dtype)
    batches = [int(batch) for batch in options.batches.split(",")]
    engine = {
        "model": str(folder),
        "load_format": "dummy",
        "dtype": str(dtype).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "max_model_len": PROMPT_TOKENS + options.output_tokens,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": max(2048, max(batches) * PROMPT_TOKENS),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "stream_interval": options.output_tokens,
    }
    lora = {
        "enable_lora": True,
        "max_loras": options.adapters,
        "max_lora_rank": options.rank,
    }
    runs: dict[str, list[AdaptedRun]] = {"plain": [], "adapted": []}
    for batch in batches:
        for run in range(options.repeats + 1):
            for variant in VARIANTS:
                own = AdaptedRun(
                    prompts=prompts_of(config, batch, run),
                    adapters=adapters_of(variant, batch, options.adapters),
                )
                runs["plain" if variant == "plain" else "adapted"].append(own)
    return {
        name: AdaptedJob(
            engine=engine | (lora if name == "adapted" else {}),
            on_cpu=on_cpu,
            folder=str(folder),
            runs=own,
            output_tokens=options.output_tokens,
        )
        for name, own in runs.items()
    }


def measure(options: argparse.Namespace, *, on_cpu: bool) -> list[dict[str, Any]]:
    """Return a row for each batch and variant: medians of runs in turns, after one run."""
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mrv1-bench-")))
        engines: dict[str, Generator[Any]] = {
            name: stack.enter_context(closing(run_in_child(measure_adapted, job)))
            for name, job in jobs(options, folder, on_cpu=on_cpu).items()
        }
        with ThreadPoolExecutor(len(engines)) as pool:
            for name, start_s in zip(engines, pool.map(next, engines.values()), strict=True):
                sys.stdout.write(f"{name}: started in {start_s:.1f} s\n")
        for batch in map(int, options.batches.split(",")):
            samples: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
            for _ in range(options.repeats + 1):
                for variant, own in samples.items():
                    own.append(next(engines["plain" if variant == "plain" else "adapted"]))
            rows += summary(batch, options.output_tokens, samples)
            for row in rows[-len(VARIANTS) :]:
                sys.stdout.write(
                    f"{row['variant']} {row['batch']}: {row['decode_step_ms']:.3f} ms a step, "
                    f"{row['share_of_plain_speed']:.1%} of the plain speed\n"
                )
                sys.stdout.flush()
    return rows


def summary(
    batch: int, output_tokens: int, samples: dict[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the rows of a batch; the first run of each variant does not count.

    A step is the time after the last first token, over the tokens that each request has then.
    """
    steps = {
        variant: [
            (each["whole_s"] - max(each["first_s"])) / (output_tokens - 1) * 1e3
            for each in own[1:]
        ]
        for variant, own in samples.items()
    }
    plain = statistics.median(steps["plain"])
    return [
        {
            "batch": batch,
            "variant": variant,
            "decode_step_ms": statistics.median(own),
            "share_of_plain_speed": plain / statistics.median(own),
            "samples_ms": own,
        }
        for variant, own in steps.items()
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = adapter_parser(__doc__)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=4_000_000_000)
    return parse_script(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every variant, and write the result."""
    options = parse(arguments)
    device = resolve_device(options.device)
    results = measure(options, on_cpu=device.type == "cpu")
    conditions = {
        "adapters": options.adapters,
        "rank": options.rank,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": options.output_tokens,
        "sampling": "greedy, end-of-sequence ignored, token ids in and out",
        "value": "time after the first tokens / steps, median of the runs; variants in turns",
        "other_options": "vLLM's defaults",
        "warm_up_runs": 1,
    }
    write_result(
        options, device, "lora vllm", shape=options.shape, weights="dummy",
        peers={"vllm": version_of("vllm")}, conditions=conditions, results=results,
    )  # fmt: skip


if __name__ == "__main__":
    main()
