"""Measure a draft head beside plain decoding, with the acceptance of a trained head, in turns.

python -m benchmarks.draft_heads OUTPUT.json [--shape S] [--batches 1,8] [--acceptance 0.7]

The model is that of ``benchmarks.speculation``: random weights, but each token has one successor.
An EAGLE-3 head of random weights drafts, which takes as long as a trained one. What a step
verifies is then replaced, on the device: by the model's own next tokens, up to a draft that is
wrong. Whether a draft is right follows from its request and position, with the probability of
``--acceptance`` each, so that 3 drafts at 0.7 give 2.53 tokens a step. Nothing else is changed,
and the tokens are checked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.engines.checkpoint import raw_config
from benchmarks.engines.sample import Sample, run_once
from benchmarks.measure.options import parse_script, script_parser, write_result
from benchmarks.speculation import check, successor_model
from mrv1.config import EngineConfig
from mrv1.device import resolve_device
from mrv1.engine import EngineCore
from mrv1.models import DecoderModel, ModelConfig
from mrv1.runner.draft_layer import DraftLayer
from mrv1.runner.staging import Staged
from mrv1.sampler import SamplingParams

PROMPT_TOKENS, DRAFT_VOCAB = 128, 32_000
TABLE = 1 << 16
"""Positions after which acceptance repeats."""


def write_head(
    folder: Path, target: ModelConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Write an EAGLE-3 head of random weights for a target, in speculators' format."""
    hidden, width = target.hidden_size, target.intermediate_size
    q_size, kv_size = (n * target.head_dim for n in (target.num_q_heads, target.num_kv_heads))
    vocab = min(DRAFT_VOCAB, target.vocab_size)
    shapes = {
        "fc": (hidden, 3 * hidden),
        "layers.0.self_attn.q_proj": (q_size, 2 * hidden),
        "layers.0.self_attn.k_proj": (kv_size, 2 * hidden),
        "layers.0.self_attn.v_proj": (kv_size, 2 * hidden),
        "layers.0.self_attn.o_proj": (hidden, q_size),
        "layers.0.mlp.gate_proj": (width, hidden),
        "layers.0.mlp.up_proj": (width, hidden),
        "layers.0.mlp.down_proj": (hidden, width),
        "lm_head": (vocab, hidden),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    tensors = {
        f"{name}.weight": torch.randn(shape, dtype=dtype, device=device)
        .mul_(shape[1] ** -0.5)
        .cpu()
        for name, shape in shapes.items()
    }
    for name in (*(f"layers.0.{norm}" for norm in norms), "norm"):
        tensors[f"{name}.weight"] = torch.ones(hidden, dtype=dtype)
    tensors["d2t"] = torch.zeros(vocab, dtype=torch.int64)
    save_file(tensors, folder / "model.safetensors")
    last = target.num_layers
    layer = replace(target.with_layers([0]), architecture="LlamaForCausalLM", qk_norm="none")
    settings = {
        "speculators_model_type": "eagle3",
        "norm_before_residual": False,
        "draft_vocab_size": vocab,
        "eagle_aux_hidden_state_layer_ids": [0, last // 2, last],
        "transformer_layer_config": raw_config(layer, dtype),
    }
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")


def accepted(acceptance: float, num_drafts: int) -> torch.Tensor:
    """Return for each position how many drafts in a row are right, ``[TABLE]`` int64."""
    draws = np.random.default_rng(0).random((TABLE, num_drafts)) < acceptance
    return torch.from_numpy(np.cumprod(draws, axis=1).sum(axis=1))


@contextmanager
def known_drafts(successor: torch.Tensor, counts: torch.Tensor) -> Iterator[None]:
    """Let steps of engines that are made inside verify the model's own next tokens.

    ``counts``: as ``accepted`` returns it; the draft after these is another token.
    """
    of_head: Callable[[DraftLayer, Staged], Staged] = DraftLayer.verified

    def verified(layer: DraftLayer, staged: Staged) -> Staged:
        staged = of_head(layer, staged)
        slots = layer.slots
        slot = staged.idx_mapping.clamp(min=0)
        known = slots.num_tokens.index_select(0, slot).long()
        token = slots.token_ids[slot.long(), (known - 1).clamp(min=0)].long()
        right = counts[(known * 31 + slot * 257) % TABLE]
        drafts = []
        for index in range(layer.num_drafts):
            token = successor[token]
            drafts.append(torch.where(right == index, (token + 1) % len(successor), token))
        return replace(staged, draft_token_ids=torch.stack(drafts, dim=1).int())

    DraftLayer.verified = verified  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DraftLayer.verified = of_head  # type: ignore[method-assign, assignment]


def engines(
    options: argparse.Namespace, device: torch.device, model: DecoderModel
) -> dict[str, EngineCore]:
    """Return an engine without drafts and one with a head, of one model."""
    batches = [int(batch) for batch in options.batches.split(",")]
    length = PROMPT_TOKENS + options.output_tokens
    cores = {}
    with TemporaryDirectory(prefix="mrv1-bench-") as folder:
        write_head(Path(folder), model.config, model.dtype, device)
        head = {"method": "eagle3", "model": folder, "num_tokens": options.num_tokens}
        for name, speculative in (("plain", None), ("head", head)):
            config = EngineConfig(
                model=options.shape,
                device=str(device),
                max_model_len=length,
                max_num_seqs=max(batches),
                max_num_batched_tokens=max(batches) * PROMPT_TOKENS,
                num_kv_blocks=max(batches) * (1 + -(-length // 16)),
                enable_prefix_caching=False,
                speculative=speculative,
            )
            cores[name] = EngineCore(config, model=model)
    return cores


def measure(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each batch: medians of runs in turns, after one run."""
    model, successor = successor_model(options.shape, device)
    counts = accepted(options.acceptance, options.num_tokens).to(device)
    with known_drafts(torch.tensor(successor, device=device), counts):
        cores = engines(options, device, model)
        try:
            return [
                measure_batch(options, batch, cores, successor)
                for batch in map(int, options.batches.split(","))
            ]
        finally:
            for core in cores.values():
                core.runner.close()


def measure_batch(
    options: argparse.Namespace, batch: int, cores: dict[str, EngineCore], successor: list[int]
) -> dict[str, Any]:
    """Return the row of a batch, whose tokens are checked before."""
    params = SamplingParams(temperature=0, max_tokens=options.output_tokens, ignore_eos=True)
    for core in cores.values():
        check(core, [*range(3, 3 + PROMPT_TOKENS)], successor, params)
    samples: dict[str, list[Sample]] = {name: [] for name in cores}
    before = cores["head"].metrics()
    for run in range(options.repeats + 1):
        generator = np.random.default_rng([batch, run])
        prompts = generator.integers(len(successor), size=(batch, PROMPT_TOKENS)).tolist()
        for name, core in cores.items():
            samples[name].append(run_once(core, prompts, params))
    after = cores["head"].metrics()
    num_accepted = after["num_accepted_tokens"] - before["num_accepted_tokens"]
    row = summary(batch, samples) | {
        "accepted_share": num_accepted / (after["num_draft_tokens"] - before["num_draft_tokens"])
    }
    sys.stdout.write(f"{json.dumps(row)}\n")
    sys.stdout.flush()
    return row


def summary(batch: int, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Return the row of a batch; tokens per second are those after each request's first."""
    speeds = {
        name: statistics.median(
            (each.num_tokens - batch) / (each.wall_s - each.prefill_ms / 1e3) for each in own[1:]
        )
        for name, own in samples.items()
    }
    return {
        "batch": batch,
        "decode_tokens_per_s": speeds,
        "head_over_plain": speeds["head"] / speeds["plain"],
        "num_steps": {name: own[-1].num_steps for name, own in samples.items()},
        "num_graph_steps": {name: own[-1].num_graph_steps for name, own in samples.items()},
        **{
            field: {
                name: statistics.median(getattr(each, field) for each in own[1:])
                for name, own in samples.items()
            }
            for field in ("decode_step_ms", "host_ms", "gpu_ms", "prefill_ms")
        },
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = script_parser(__doc__, repeats=3)
    parser.add_argument("--shape", default="llama3-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--num-tokens", type=int, default=3)
    parser.add_argument("--acceptance", type=float, default=0.7)
    return parse_script(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result."""
    options = parse(arguments)
    device = resolve_device(options.device)
    torch.manual_seed(0)
    conditions = {
        "method": "eagle3",
        "num_tokens": options.num_tokens,
        "acceptance": options.acceptance,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": options.output_tokens,
        "sampling": "greedy, end-of-sequence ignored",
        "value": "tokens after each request's first / their time; both engines in turns",
        "warm_up_runs": 1,
    }
    write_result(
        options, device, "draft heads", shape=options.shape,
        weights="random, with a permutation of the embeddings as the head; EAGLE-3 random",
        conditions=conditions, results=measure(options, device),
    )  # fmt: skip


if __name__ == "__main__":
    main()
