"""Measure the cost of features: to text without any, and to a prompt that consists of them.

python -m benchmarks.multimodal OUTPUT.json [--shape qwen3-0.6b] [--batches 1,32,256] [--rows 4096]

Two engines share the model's random weights: one takes items, one has no buffer for features. Both
generate the same text in turns. The engine that is built first in a process has other memory than
the second one, and may be slower or faster for that alone. So the pair is built twice, each time
in a new process, with another engine first.

In a third process an engine prefills the same prompt as text, with features on the GPU and with
features in pinned host memory. The features are the embeddings of the prompt, so that all three
must draw the same token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure.child import Send, run_in_child
from benchmarks.measure.shapes import shape_config
from mrv1.config import EngineConfig
from mrv1.device import resolve_device
from mrv1.engine import EngineCore
from mrv1.models import random_model
from mrv1.models.decoder import DecoderModel
from mrv1.multimodal import MultimodalItem
from mrv1.provenance import provenance
from mrv1.sampler import SamplingParams

PROMPT_TOKENS = 128
"""Of each request of text."""

ENGINES = {"with_features": True, "without_features": False}
"""Whether an engine takes items."""


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Return the result, ready for JSON."""
    device = resolve_device(options.device)
    orders = {}
    for first in ENGINES:
        (orders[f"{first}_first"],) = run_in_child(_measure_text, options, first)
    ((dtype, prefill),) = run_in_child(_measure_prefill, options)
    return {
        "op": "multimodal",
        "schema": 3,
        "shape": options.shape,
        "weights": "random",
        "dtype": dtype,
        **provenance(device, options.commit),
        "conditions": {
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": options.output_tokens,
            "rows": options.rows,
            "sampling": "greedy, end-of-sequence ignored",
            "repeats": options.repeats,
            "warm_up_runs": 1,
            "clocks": "as found, not locked",
        },
        "text": [
            {
                "batch": batch,
                "with_over_without": statistics.geometric_mean(
                    rows[index]["with_over_without"] for rows in orders.values()
                ),
                "orders": {name: rows[index] for name, rows in orders.items()},
            }
            for index, batch in enumerate(_batches(options))
        ],
        "prefill": prefill,
    }


def _batches(options: argparse.Namespace) -> list[int]:
    return [int(batch) for batch in options.batches.split(",")]


def _engine(
    options: argparse.Namespace, model: DecoderModel, *, takes_features: bool
) -> EngineCore:
    """Return an engine that has room for every batch of text, and for the prompt of features."""
    row_bytes = model.config.feature_size * model.dtype.itemsize
    max_num_seqs = max(_batches(options))
    text_blocks = max_num_seqs * -(-(PROMPT_TOKENS + options.output_tokens) // 16)
    config = EngineConfig(
        model=options.shape,
        device=str(model.device),
        max_model_len=max(PROMPT_TOKENS + options.output_tokens, options.rows + 1),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=options.rows,
        num_kv_blocks=max(text_blocks, -(-(options.rows + 1) // 16)),
        enable_prefix_caching=False,
        mm_cache_memory_bytes=2 * options.rows * row_bytes if takes_features else 0,
    )
    return EngineCore(config, model=model, progress=False)


def _model(options: argparse.Namespace) -> DecoderModel:
    return random_model(
        shape_config(options.shape), "auto", resolve_device(options.device), seed=0
    )


def _measure_text(options: argparse.Namespace, first: str, send: Send) -> None:
    """Send a row for each batch, measured with the engine ``first`` built before the other."""
    model = _model(options)
    engines: dict[str, EngineCore] = {}
    try:
        for name in sorted(ENGINES, key=lambda name: name != first):
            engines[name] = _engine(options, model, takes_features=ENGINES[name])
        send([_text(engines, batch, options) for batch in _batches(options)])
    finally:
        for core in engines.values():
            core.runner.close()


def _measure_prefill(options: argparse.Namespace, send: Send) -> None:
    """Send the dtype and, for each variant of the prompt, its times."""
    model = _model(options)
    core = _engine(options, model, takes_features=True)
    try:
        send((str(model.dtype).removeprefix("torch."), _prefill(core, options)))
    finally:
        core.runner.close()


def _text(
    engines: dict[str, EngineCore], batch: int, options: argparse.Namespace
) -> dict[str, object]:
    """Return tokens per second of a batch of text in both engines, measured in turns."""
    params = SamplingParams(temperature=0, max_tokens=options.output_tokens, ignore_eos=True)
    vocab_size = shape_config(options.shape).vocab_size
    samples: dict[str, list[float]] = {name: [] for name in engines}
    for run in range(options.repeats + 1):
        generator = np.random.default_rng([batch, run])
        prompts = generator.integers(vocab_size, size=(batch, PROMPT_TOKENS)).tolist()
        outputs = {}
        for name, core in engines.items():
            start = time.perf_counter()
            outputs[name] = _generate(core, prompts, params, [()] * batch)
            samples[name].append(time.perf_counter() - start)
        _check_equal(outputs)
    medians = {name: statistics.median(own[1:]) for name, own in samples.items()}
    tokens_per_s = {name: batch * options.output_tokens / own for name, own in medians.items()}
    return {
        "tokens_per_s": tokens_per_s,
        "with_over_without": tokens_per_s["with_features"] / tokens_per_s["without_features"],
        "samples_s": {name: own[1:] for name, own in samples.items()},
    }


def _prefill(core: EngineCore, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the time to the first token after a prompt of text, and of features from a place."""
    prompt = np.random.default_rng(1).integers(
        shape_config(options.shape).vocab_size, size=options.rows
    )
    embed = core.runner.model.weights.embed
    rows = embed[torch.from_numpy(prompt).to(embed.device)]
    on_gpu = embed.device.type == "cuda"
    places: dict[str, torch.Tensor | None] = {
        "text": None,
        "gpu": rows,
        "pinned": rows.cpu().pin_memory() if on_gpu else rows.clone(),
    }
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in places}
    for run in range(options.repeats + 1):
        outputs = {}
        for name, features in places.items():
            items = []
            if features is not None:  # each item is copied: its key is new
                items = [MultimodalItem(features=features, start=0, cache_key=f"{name} {run}")]
            before, start = core.metrics(), time.perf_counter()
            outputs[name] = _generate(core, [prompt.tolist()], params, [items])
            seconds, after = time.perf_counter() - start, core.metrics()
            runs[name].append(
                {
                    "first_token_ms": seconds * 1e3,
                    "gpu_ms": (after["gpu_seconds"] - before["gpu_seconds"]) * 1e3,
                    "num_steps": after["num_steps"] - before["num_steps"],
                    "num_graph_steps": after["num_graph_steps"] - before["num_graph_steps"],
                }
            )
        _check_equal(outputs)
    medians: dict[str, dict[str, Any]] = {
        name: {field: statistics.median(run[field] for run in own[1:]) for field in own[0]}
        for name, own in runs.items()
    }
    for name, own in medians.items():
        own["first_token_over_text"] = own["first_token_ms"] / medians["text"]["first_token_ms"]
        own["gpu_over_text"] = own["gpu_ms"] / medians["text"]["gpu_ms"] if on_gpu else None
        own["samples"] = runs[name][1:]
    return medians


def _generate(
    core: EngineCore,
    prompts: list[list[int]],
    params: SamplingParams,
    items: list[Any],
) -> list[tuple[int, ...]]:
    """Return the output of each prompt."""
    requests = [
        core.add_request(str(index), prompt, params, multimodal=own)
        for index, (prompt, own) in enumerate(zip(prompts, items, strict=True))
    ]
    while core.has_unfinished_requests:
        core.step()
    for request in requests:
        if request.error is not None:
            raise request.error
    return [tuple(request.output_token_ids) for request in requests]


def _check_equal(outputs: dict[str, list[tuple[int, ...]]]) -> None:
    """Raise unless all variants have drawn the same tokens."""
    (first, want), *others = outputs.items()
    for name, got in others:
        if got != want:
            raise RuntimeError(f"{name}: expected the tokens of {first}, got others")


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the result and print its ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = measure(options)
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in result["text"]:
        print(f"text, batch {row['batch']}: {row['with_over_without']:.4f}x tokens/s")
    for name, row in result["prefill"].items():
        print(
            f"{name}: {row['first_token_ms']:.2f} ms ({row['first_token_over_text']:.3f}x), GPU "
            f"{row['gpu_ms']:.2f} ms, {row['num_graph_steps']:g} of {row['num_steps']:g} graphs"
        )


if __name__ == "__main__":
    main()
