"""Measure n-gram speculation beside plain decoding on the same requests, in one process, in turns.

python -m benchmarks.speculation OUTPUT.json [--shape S] [--batches 1,8] [--edit-every 32]

The weights are random, but the head is a permutation of the embeddings, and the layers change
little: each token has one successor, so that the model's output is known. Layers and head take as
long as any other weights. Two texts:

- repeat: the prompt contains the text that the model will write, with one token in --edit-every
  replaced, as where a model summarizes, quotes or edits its prompt;
- random: no sequence of tokens comes twice, so that nothing can be gained.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines.sample import Sample, run_once
from benchmarks.measure.shapes import shape_config
from mrv1.config import EngineConfig
from mrv1.device import kernel_path, resolve_device, resolve_dtype
from mrv1.engine import EngineCore
from mrv1.engine.reports import Metrics
from mrv1.kernels.registry import select_ops
from mrv1.models import DecoderModel, random_weights
from mrv1.provenance import provenance
from mrv1.sampler import SamplingParams

BESIDE = 256
"""Random tokens of a prompt beside the text."""

LAYER_SCALE = 0.1
"""Of the layers' outputs, against embeddings with a standard deviation of 1."""

TEXTS = ("repeat", "random")


def successor_model(
    shape: str, device: torch.device, seed: int = 0
) -> tuple[DecoderModel, list[int]]:
    """Return a model of a shape, and the successor of each token."""
    config = replace(shape_config(shape), tie_word_embeddings=False)
    dtype = resolve_dtype("auto", config.torch_dtype, device)
    weights = random_weights(config, device=device, dtype=dtype, seed=seed)
    weights.embed.mul_(config.hidden_size**0.5)
    for layer in weights.layers:
        layer.o.plain.mul_(LAYER_SCALE)
        layer.down.plain.mul_(LAYER_SCALE)
    order = np.random.default_rng(seed).permutation(config.vocab_size)  # one cycle of all tokens
    successor = np.empty_like(order)
    successor[order] = np.roll(order, -1)
    weights.lm_head.plain[torch.from_numpy(successor).to(device)] = weights.embed
    model = DecoderModel(config, weights, select_ops(kernel_path(device)))
    return model, successor.tolist()


def text_after(successor: list[int], token: int, count: int) -> list[int]:
    """Return the ``count`` tokens that the model writes after a token."""
    text = [token]
    for _ in range(count):
        text.append(successor[text[-1]])
    return text[1:]


def prompts_of(
    text: str, batch: int, run: int, successor: list[int], arguments: argparse.Namespace
) -> list[list[int]]:
    """Return prompts of one length, which begin differently."""
    generator = np.random.default_rng([TEXTS.index(text), batch, run])
    prompts = []
    for _ in range(batch):
        beside = generator.integers(len(successor), size=BESIDE).tolist()
        known = generator.integers(len(successor), size=arguments.output_tokens)
        if text == "repeat":
            edits = np.arange(arguments.output_tokens) % arguments.edit_every == 0
            written = text_after(successor, beside[-1], arguments.output_tokens)
            known = np.where(edits, known, written)
        prompts.append([*beside[: BESIDE // 2], *known.tolist(), *beside[BESIDE // 2 :]])
    return prompts


def measure(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each batch and text: medians of runs in turns, after one run."""
    batches = [int(batch) for batch in arguments.batches.split(",")]
    length = BESIDE + 2 * arguments.output_tokens
    model, successor = successor_model(arguments.shape, device)
    speculative = {"method": "ngram", "num_tokens": arguments.num_tokens}
    cores = {}
    for name, option in (("plain", None), ("ngram", speculative)):
        config = EngineConfig(
            model=arguments.shape,
            device=str(device),
            max_model_len=length,
            max_num_seqs=max(batches),
            max_num_batched_tokens=min(2048, max(batches) * length),
            num_kv_blocks=max(batches) * -(-length // 16),
            enable_prefix_caching=False,
            speculative=option,
        )
        cores[name] = EngineCore(config, model=model)
        print(cores[name].runner.describe(), flush=True)
    params = SamplingParams(temperature=0, max_tokens=arguments.output_tokens, ignore_eos=True)
    for core in cores.values():
        check(core, prompts_of("repeat", 1, 0, successor, arguments)[0], successor, params)
    rows = []
    for batch in batches:
        for text in TEXTS:
            samples: dict[str, list[Sample]] = {name: [] for name in cores}
            before = cores["ngram"].metrics()
            for run in range(arguments.repeats + 1):
                prompts = prompts_of(text, batch, run, successor, arguments)
                for name, core in cores.items():
                    samples[name].append(run_once(core, prompts, params))
            rows.append(summary(batch, text, samples, before, cores["ngram"].metrics()))
            print(json.dumps(rows[-1]), flush=True)
    for core in cores.values():
        core.runner.close()
    return rows


def check(
    core: EngineCore, prompt: list[int], successor: list[int], params: SamplingParams
) -> None:
    """Raise unless the model writes the text that it is known to write."""
    request = core.add_request("check", prompt, params)
    while core.has_unfinished_requests:
        core.step()
    if request.output_token_ids != text_after(successor, prompt[-1], params.max_tokens):
        raise RuntimeError(f"expected the successors of {prompt[-1]}, got other tokens")


def summary(
    batch: int, text: str, samples: dict[str, list[Sample]], before: Metrics, after: Metrics
) -> dict[str, Any]:
    """Return the row of a batch and a text."""
    tokens_per_s = {
        name: [sample.tokens_per_s for sample in own[1:]] for name, own in samples.items()
    }
    medians = {name: statistics.median(own) for name, own in tokens_per_s.items()}
    num_drafts = after["num_drafts"] - before["num_drafts"]
    num_tokens = after["num_draft_tokens"] - before["num_draft_tokens"]
    num_accepted = after["num_accepted_tokens"] - before["num_accepted_tokens"]
    return {
        "batch": batch,
        "text": text,
        "tokens_per_s": medians,
        "ngram_over_plain": medians["ngram"] / medians["plain"],
        "num_steps": {name: own[-1].num_steps for name, own in samples.items()},
        "num_graph_steps": {name: own[-1].num_graph_steps for name, own in samples.items()},
        **{
            field: {
                name: statistics.median(getattr(sample, field) for sample in own[1:])
                for name, own in samples.items()
            }
            for field in ("decode_step_ms", "host_ms", "gpu_ms", "prefill_ms")
        },
        "num_drafts": num_drafts,
        "num_draft_tokens": num_tokens,
        "accepted_share": num_accepted / num_tokens if num_tokens else None,
        "samples_tokens_per_s": tokens_per_s,
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--edit-every", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    result = {
        "op": "speculation",
        "schema": 1,
        "shape": arguments.shape,
        "weights": "random, with a permutation of the embeddings as the head",
        **provenance(device, arguments.commit),
        "conditions": {
            "prompt_tokens": BESIDE + arguments.output_tokens,
            "output_tokens": arguments.output_tokens,
            "edit_every": arguments.edit_every,
            "num_tokens": arguments.num_tokens,
            "sampling": "greedy, end-of-sequence ignored",
            "value": "all generated tokens / time, prefill included; both engines in turns",
            "repeats": arguments.repeats,
            "warm_up_runs": 1,
            "clocks": "as found, not locked",
        },
        "results": measure(arguments, device),
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    for row in result["results"]:
        print(row["batch"], row["text"], f"{row['ngram_over_plain']:.2f}x", row["tokens_per_s"])


if __name__ == "__main__":
    main()
