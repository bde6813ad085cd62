"""Measure an engine's decode step with adapters (LoRA) beside the step without, in turns.

python -m benchmarks.lora_engine OUTPUT.json [--shape S] [--batches 1,32] [--adapters 32]

Two engines share one model of random weights: ``plain`` was made without ``enable_lora``; the
other one has slots for all adapters, and runs ``none``, requests without an adapter, ``one``,
which all requests have, and ``each``, another one for each request. Adapters have random values
for every linear module of every layer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.engines.sample import Sample, run_once
from benchmarks.measure.options import parse_script, script_parser, write_result
from benchmarks.measure.shapes import shape_config
from mrv1.config import EngineConfig
from mrv1.device import resolve_device
from mrv1.engine import EngineCore, LoRARequest
from mrv1.engine.adapters import LoadedAdapter
from mrv1.models import DecoderModel, ModelConfig, random_model
from mrv1.models.lora import AdapterPair, StoredAdapter
from mrv1.models.lora.adapter import PLACES
from mrv1.models.weights import part_rows
from mrv1.sampler import SamplingParams

VARIANTS = ("plain", "none", "one", "each")
PROMPT_TOKENS = 128


def random_adapter(config: ModelConfig, rank: int, model: DecoderModel) -> StoredAdapter:
    """Return an adapter of all linear modules of all layers, on the model's device."""

    def normal(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, dtype=model.dtype, device=model.device)
        return values.mul_(shape[-1] ** -0.5)

    parts = {}
    for layer in range(config.num_layers):
        sizes = part_rows(config, layer)
        for module, (field, part) in PLACES.items():
            rows, num_in = sizes[field]
            parts[f"model.layers.{layer}.{module}"] = AdapterPair(
                a=normal(rank, num_in), b=normal(rows[part], rank), scaling=1.0
            )
    return StoredAdapter(name="random", parts=parts)


def engines(arguments: argparse.Namespace, device: torch.device) -> dict[str, EngineCore]:
    """Return an engine without adapters, and one with as many as are asked for."""
    batches = [int(batch) for batch in arguments.batches.split(",")]
    model = random_model(shape_config(arguments.shape), "auto", device, seed=0)
    length = PROMPT_TOKENS + arguments.output_tokens
    options: dict[str, Any] = {
        "model": arguments.shape,
        "device": str(device),
        "max_model_len": length,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": max(batches) * PROMPT_TOKENS,
        "num_kv_blocks": max(batches) * -(-length // 16),
        "enable_prefix_caching": False,
    }
    plain = EngineCore(EngineConfig(**options), model=model)
    lora = {"enable_lora": True, "max_loras": arguments.adapters, "max_lora_rank": arguments.rank}
    adapted = EngineCore(EngineConfig(**options, **lora), model=model)
    stored = random_adapter(model.config, arguments.rank, model)
    for number in range(1, arguments.adapters + 1):
        loaded = LoadedAdapter(request_of(number), stored, b"benchmark %d" % number)
        adapted.adapters.add(loaded)
    return {"plain": plain, "adapted": adapted}


def request_of(number: int) -> LoRARequest:
    """Return the request of a loaded adapter, 1 and so on."""
    return LoRARequest(f"adapter-{number}", number)


def adapters_of(variant: str, batch: int, adapters: int) -> list[LoRARequest | None]:
    """Return the adapter of each request."""
    if variant == "each":
        return [request_of(1 + index % adapters) for index in range(batch)]
    return [request_of(1) if variant == "one" else None] * batch


def measure(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each batch and variant: medians of runs in turns, after one run."""
    cores = engines(arguments, device)
    params = SamplingParams(temperature=0, max_tokens=arguments.output_tokens, ignore_eos=True)
    rows = []
    try:
        for batch in map(int, arguments.batches.split(",")):
            samples: dict[str, list[Sample]] = {variant: [] for variant in VARIANTS}
            for run in range(arguments.repeats + 1):
                generator = np.random.default_rng([batch, run])
                vocab_size = cores["plain"].runner.model_config.vocab_size
                prompts = generator.integers(vocab_size, size=(batch, PROMPT_TOKENS)).tolist()
                for variant, own in samples.items():
                    core = cores["plain" if variant == "plain" else "adapted"]
                    used = adapters_of(variant, batch, arguments.adapters)
                    own.append(run_once(core, prompts, params, used))
            rows += summary(batch, samples)
            for row in rows[-len(VARIANTS) :]:
                sys.stdout.write(
                    f"{row['variant']} {row['batch']}: {row['decode_step_ms']:.3f} ms a step, "
                    f"{row['share_of_plain_speed']:.1%} of the plain speed\n"
                )
                sys.stdout.flush()
    finally:
        for core in cores.values():
            core.runner.close()
    return rows


def summary(batch: int, samples: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """Return the rows of a batch; the first run of each variant does not count."""

    def median(variant: str, field: str) -> float:
        return float(statistics.median(getattr(each, field) for each in samples[variant][1:]))

    plain = median("plain", "decode_step_ms")
    return [
        {
            "batch": batch,
            "variant": variant,
            "decode_step_ms": median(variant, "decode_step_ms"),
            "gpu_ms": median(variant, "gpu_ms"),
            "prefill_ms": median(variant, "prefill_ms"),
            "tokens_per_s": median(variant, "tokens_per_s"),
            "share_of_plain_speed": plain / median(variant, "decode_step_ms"),
            "num_graph_steps": own[-1].num_graph_steps,
            "num_steps": own[-1].num_steps,
            "samples_ms": [each.decode_step_ms for each in own[1:]],
        }
        for variant, own in samples.items()
    ]


def adapter_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a script's options, of an engine's requests with adapters."""
    parser = script_parser(description, repeats=3)
    parser.add_argument("--shape", default="llama3-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=128)
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    return parse_script(adapter_parser(__doc__), arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every variant, and write the result."""
    options = parse(arguments)
    device = resolve_device(options.device)
    torch.manual_seed(0)
    conditions = {
        "adapters": options.adapters,
        "rank": options.rank,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": options.output_tokens,
        "sampling": "greedy, end-of-sequence ignored",
        "value": "median of a run's decode steps, median of the runs; variants in turns",
        "warm_up_runs": 1,
    }
    write_result(
        options, device, "lora engine", shape=options.shape, weights="random",
        conditions=conditions, results=measure(options, device),
    )  # fmt: skip


if __name__ == "__main__":
    main()
