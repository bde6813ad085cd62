"""Measure what head policies of the embedded model cost: recall at a distance, and text loss.

python -m benchmarks.recall OUTPUT.json [--commit C]   half an hour on a CPU core; a PNG beside it

Policies with equally many full heads are compared: calibrated policies, random policies, and the
policy in which the leading heads of each layer stream; with a cache of the model's dtype and with
an FP8 cache. Calibration sees the corpus's training text and its own prompts; the figures are
measured on the held-out tenth, with other facts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report.policies import RECALL_KINDS
from mrv1.calibration import (
    CalibrateOptions,
    Calibration,
    PolicyModel,
    Texts,
    calibrate,
    load_texts,
    measure,
)
from mrv1.config import KVCacheDtypeName
from mrv1.device import kernel_path
from mrv1.headwise import HeadPolicy, HeadRanking
from mrv1.headwise.calibrate import Method
from mrv1.kernels.registry import select_ops
from mrv1.models import Checkpoint, DecoderModel, load_model
from mrv1.provenance import provenance
from training.corpus import load_split
from training.evaluate import text_loss

WINDOW, SINK = 64, 16
"""Far less than the distance, over which only full heads see."""
DISTANCE = 1024
NUM_TOKENS = 2048
NUM_PROMPTS, NUM_FACTS = 22, 24
"""528 answers: the standard error of a share of 99% is 0.4%."""
BUDGETS = (0.5, 0.25)
SMALLER_BUDGETS = (1 / 16, 0.0)
"""Budgets of calibrated policies alone: one full head, and none."""
NUM_RANDOM = 5
METHODS: tuple[Method, ...] = ("greedy", "single")
CACHES: tuple[KVCacheDtypeName, ...] = ("auto", "fp8_e4m3")
MEASURING_SEED = 1
"""Seed of the measured prompts; the seed of calibration is 0."""

DEVICE = torch.device("cpu")


def say(line: str) -> None:
    """Print one line to stderr."""
    print(line, file=sys.stderr, flush=True)


def calibrated(method: Method, train: Path) -> tuple[Calibration, float]:
    """Return a calibration on the training text, and its seconds."""
    options = CalibrateOptions(
        model="tiny", data=train, window=WINDOW, sink=SINK, method=method, device="cpu"
    )
    start = time.perf_counter()
    return calibrate(options), time.perf_counter() - start


def policies(rankings: dict[Method, HeadRanking]) -> list[dict[str, Any]]:
    """Return the policies to compare: kind, budget, seed of a random one, and the policy."""
    ranking = next(iter(rankings.values()))
    shape = ranking.num_layers, ranking.num_kv_heads
    streaming = CalibrateOptions(model="tiny", window=WINDOW, sink=SINK).streaming
    found: list[dict[str, Any]] = [
        {"kind": "full", "budget": 1.0, "policy": HeadPolicy.full(*shape)}
    ]
    for budget in (*BUDGETS, *SMALLER_BUDGETS):
        for method, each in rankings.items():
            found.append(
                {"kind": method, "budget": budget, "policy": each.policy(budget, streaming)}
            )
    for budget in BUDGETS:
        leading = HeadPolicy.of_ratio(*shape, 1 - budget, window=WINDOW, sink=SINK)
        found.append({"kind": "leading heads stream", "budget": budget, "policy": leading})
        for seed in range(NUM_RANDOM):
            order = np.random.default_rng(seed).permutation(len(ranking.order))
            shuffled = dataclasses.replace(
                ranking, order=tuple(ranking.order[index] for index in order)
            )
            policy = shuffled.policy(budget, streaming)
            found.append({"kind": "random", "budget": budget, "seed": seed, "policy": policy})
    return found


def measured(
    decoder: DecoderModel, texts: Texts, entries: list[dict[str, Any]], cache: KVCacheDtypeName
) -> list[dict[str, Any]]:
    """Return the entries with their recall and text loss; equal policies are measured once."""
    model = PolicyModel(decoder, NUM_TOKENS, kv_cache_dtype=cache)
    prompts = texts.prompts(
        np.random.default_rng([MEASURING_SEED, DISTANCE]),
        NUM_PROMPTS,
        num_tokens=NUM_TOKENS,
        num_facts=NUM_FACTS,
        sink=SINK,
        distance=DISTANCE,
        exact=True,
    )
    known: dict[HeadPolicy, dict[str, Any]] = {}
    results = []
    for entry in entries:
        policy = entry["policy"]
        if policy not in known:

            def logits_of(tokens: torch.Tensor, policy: HeadPolicy = policy) -> torch.Tensor:
                rows = [model.hidden(row.numpy(), policy) for row in tokens]
                return torch.stack([decoder.compute_logits(row) for row in rows])

            recall = measure(model, prompts, policy, with_text=False)
            known[policy] = {
                "recall_accuracy": recall.accuracy,
                "recall_nats": recall.recall,
                "num_answers": recall.num_answers,
                "text_nats": text_loss(logits_of, texts.ids, NUM_TOKENS, 1, DEVICE),
            }
        results.append(
            {
                **{name: value for name, value in entry.items() if name != "policy"},
                "kv_cache_dtype": cache,
                "full_heads": [
                    [layer, head]
                    for layer, heads in enumerate(policy.heads)
                    for head, seen in enumerate(heads)
                    if seen.is_full
                ],
                **known[policy],
            }
        )
        say(json.dumps(results[-1]))
    return results


def run(commit: str | None = None) -> dict[str, Any]:
    """Calibrate and measure."""
    with tempfile.TemporaryDirectory() as folder:
        train, heldout = Path(folder) / "train.txt", Path(folder) / "heldout.txt"
        for path, text in zip((train, heldout), load_split(), strict=True):
            path.write_text(text, encoding="utf-8")
        found = {method: calibrated(method, train) for method in METHODS}
        texts = load_texts(Checkpoint.open("tiny"), heldout, NUM_TOKENS)
    rankings = {method: calibration.ranking for method, (calibration, _) in found.items()}
    decoder = load_model(
        "tiny", device=DEVICE, dtype=torch.float32, ops=select_ops(kernel_path(DEVICE))
    )
    entries = policies(rankings)
    return {
        "bench": "recall",
        **provenance(DEVICE, commit),
        "conditions": {
            "model": "tiny",
            "dtype": "float32",
            "window": WINDOW,
            "sink": SINK,
            "distance": DISTANCE,
            "num_tokens": NUM_TOKENS,
            "facts_per_prompt": NUM_FACTS,
            "text": "training/data/tinyshakespeare.txt: last tenth; calibrated on the others",
            "num_threads": torch.get_num_threads(),
        },
        "calibration": {
            method: {
                "seconds": round(seconds, 1),
                "order": [
                    {"layer": layer, "head": head, "loss": loss}
                    for (layer, head), loss in zip(
                        calibration.ranking.order, calibration.ranking.losses, strict=True
                    )
                ],
            }
            for method, (calibration, seconds) in found.items()
        },
        "results": [
            result for cache in CACHES for result in measured(decoder, texts, entries, cache)
        ],
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Write a PNG: recall over the share of full heads, and the rise of the text loss."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    conditions, results = result["conditions"], result["results"]
    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    recall, text = figure.subplots(1, 2)
    full = next(entry for entry in results if entry["kind"] == "full")["text_nats"]
    styles = {"greedy": "o-", "random": "x", "leading heads stream": "s"}
    for cache, color in zip(CACHES, ("C0", "C1"), strict=True):
        for kind, style in styles.items():
            chosen = [entry for entry in results if entry["kv_cache_dtype"] == cache]
            kinds = (kind, "full") if kind == "greedy" else (kind,)
            points = sorted(
                (entry["budget"], entry["recall_accuracy"], entry["text_nats"] / full - 1)
                for entry in chosen
                if entry["kind"] in kinds
            )
            budgets, accuracies, rises = zip(*points, strict=True)
            cache_name = conditions["dtype"] if cache == "auto" else "FP8"
            look = {
                "color": color,
                "alpha": 0.7,
                "label": f"{RECALL_KINDS[kind]}, {cache_name} cache",
            }
            recall.plot(budgets, accuracies, style, **look)
            text.plot(budgets, [100 * rise for rise in rises], style, **look)
    recall.set_ylabel(f"recall at {conditions['distance']:,} tokens")
    text.set_ylabel("rise of the held-out text loss, %")
    for axes in (recall, text):
        axes.set_xlabel("share of full heads")
        axes.grid(visible=True, alpha=0.3)
    recall.legend(fontsize="x-small")
    figure.suptitle(
        f"embedded model, streaming heads see window {conditions['window']} + "
        f"sink {conditions['sink']}",
        fontsize="medium",
    )
    figure.savefig(path, format="png", dpi=150)


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write the JSON file and the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", help="commit of the source; default: ask git")
    options = parser.parse_args(arguments)
    result = run(options.commit)
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    plot(result, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
