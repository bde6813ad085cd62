"""Score the compression methods of kvpress on exported samples.

python benchmarks/peers/kvpress_recall.py FOLDER --press NAME --share 0.5 ...   no part of mrv1

It runs in an environment of its own (kvpress 0.5.5, transformers < 5.3) on what
``benchmarks.recall_rivals`` has written to FOLDER: ``model``, a checkpoint, and ``samples.json``.
The context is prefilled under the press, as kvpress's pipeline does it; then the question and the
right reply are read in one pass. One JSON line is printed for each press and share.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache

READ_TOKENS = 16
"""Tokens of question and reply in one pass: kvpress masks a key by one that points away from the
queries of all of them, which it may not find for many."""

DUO_STREAMING = 128 + 256  # sink and window that kvpress gives to streaming heads

PRESSES: dict[str, Callable[[float], Any]] = {
    "StreamingLLM": lambda ratio: kvpress.StreamingLLMPress(ratio, n_sink=4),
    "SnapKV": lambda ratio: kvpress.SnapKVPress(ratio),
    "ExpectedAttention": lambda ratio: kvpress.ExpectedAttentionPress(ratio),
    "AdaKV + SnapKV": lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
    "AdaKV + ExpectedAttention": lambda ratio: kvpress.AdaKVPress(
        kvpress.ExpectedAttentionPress(ratio, epsilon=1e-2)
    ),
    "KVzip": lambda ratio: kvpress.KVzipPress(ratio),
    "DuoAttention": lambda ratio: kvpress.DuoAttentionPress(ratio, on_the_fly_scoring=True),
}
"""Press by name, for the share of entries to remove: of DuoAttention the share of heads."""
FREES = ("StreamingLLM", "SnapKV", "ExpectedAttention")
"""Presses that shorten the cache; the others mask positions and keep their bytes."""


@torch.inference_mode()
def share_of_answers(model: Any, sample: dict[str, Any], press: Any) -> tuple[float, float]:  # noqa: ANN401
    """Return the share of right answers, and of the context's cache that is left."""
    ids = torch.tensor([sample["ids"]], device=model.device)
    context = sample["context"]
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    cache = DynamicCache()
    if press is None:
        model.model(input_ids=ids[:, :context], past_key_values=cache)
    else:
        with press(model):
            model.model(input_ids=ids[:, :context], past_key_values=cache)
    left = cache.layers[0].keys.shape[2] / context
    best: list[int] = []  # the likeliest token after each
    for start in range(context, ids.shape[1], READ_TOKENS):
        part = ids[:, start : start + READ_TOKENS]
        positions = torch.arange(start, start + part.shape[1], device=model.device)[None]
        logits = model(input_ids=part, past_key_values=cache, position_ids=positions).logits[0]
        best += logits.argmax(-1).tolist()
    right = [
        all(best[at - 1 - context] == sample["ids"][at] for at in range(*span))
        for span in sample["spans"]
    ]
    return sum(right) / len(right), left


def main() -> None:
    """Print a line for each press and share."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--press", nargs="+", choices=[*PRESSES, "none"], required=True)
    parser.add_argument("--share", type=float, nargs="+", default=[0.5, 0.25, 0.125])
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(
        options.folder / "model",
        dtype=dtype,
        attn_implementation="sdpa",
        trust_remote_code=False,
    ).to(device)
    model.eval()
    samples = json.loads((options.folder / "samples.json").read_text())
    for name in options.press:
        for share in options.share if name != "none" else [1.0]:
            ratio = 1 - share
            if name == "DuoAttention":
                ratio /= 1 - DUO_STREAMING / (sum(s["context"] for s in samples) / len(samples))
            if not 0 <= ratio < 1:
                continue  # streaming heads alone need more than the share
            start = time.perf_counter()
            scores: dict[str, list[float]] = defaultdict(list)
            left = []
            press = None if name == "none" else PRESSES[name](ratio)
            for sample in samples:
                score, share_left = share_of_answers(model, sample, press)
                scores[sample["task"]].append(score)
                left.append(share_left)
            line = {
                "method": name,
                "share": share,
                "share_of_bytes": round(sum(left) / len(left), 4) if name in FREES else 1.0,
                "scores": scores,
                "seconds": round(time.perf_counter() - start, 1),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
