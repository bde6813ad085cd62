"""Tables of head policies: memory, serving, and what the model still recalls."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.report.columns import COLUMNS, markdown
from benchmarks.report.files import ResultFile, versions, with_conditions
from benchmarks.report.rows import capacity_rows, headwise_rows

RECALL_KINDS = {
    "full": "all",
    "greedy": "calibrated",
    "single": "calibrated, each head alone",
    "leading heads stream": "leading heads stream",
    "random": "random, 5 seeds",
}
"""Kind of a policy -> its name in the table."""


def capacity_table(file: ResultFile) -> str:
    """Return a row for each cache: the requests that fit, and their ratio to the first row."""
    served = f"requests of {file.result['conditions']['context']:,} tokens"
    text = markdown(COLUMNS["capacity"], capacity_rows(file.result))
    return with_conditions(text, file, *_policy(file, served))


def headwise_table(file: ResultFile) -> str:
    """Return a row for each cache; ratios to the first row, above 1 is better."""
    conditions = file.result["conditions"]
    served = (
        f"{conditions['num_requests']} requests of {conditions['prompt_tokens']:,} + "
        f"{conditions['output_tokens']:,} tokens"
        + (", prompts found cached" if conditions["planted"] else "")
    )
    text = markdown(COLUMNS["headwise"], headwise_rows(file.result))
    return with_conditions(text, file, *_policy(file, served))


def _policy(file: ResultFile, served: str) -> list[str]:
    result, conditions = file.result, file.result["conditions"]
    window, sink = next(([w, s] for w, s in conditions["roles"] if w >= 0), (None, None))
    streaming = "" if window is None else f", the others see {window:,} tokens and {sink} in front"
    memory = conditions["kv_cache_memory_bytes"]
    return [
        f"{result['shape']} shape, {served}",
        f"{conditions['full_share']:.0%} of the heads full{streaming}",
        f"KV cache {'as the GPU allows' if memory is None else f'of {memory / 1e9:g} GB'}, at "
        f"most {conditions['max_num_seqs']} requests and "
        f"{conditions['max_num_batched_tokens']:,} tokens a step",
        f"{result['dtype']}, one {file.device}, {versions(result)}",
    ]


def recall_table(file: ResultFile) -> str:
    """Return a row for each policy of ``benchmarks.recall``; random ones show mean and range."""
    result, conditions = file.result, file.result["conditions"]
    results: list[dict[str, Any]] = result["results"]
    full = next(entry for entry in results if entry["kind"] == "full")
    rows = []
    for cache in dict.fromkeys(entry["kv_cache_dtype"] for entry in results):
        for kind, name in RECALL_KINDS.items():
            entries = [e for e in results if (e["kv_cache_dtype"], e["kind"]) == (cache, kind)]
            for budget in dict.fromkeys(entry["budget"] for entry in entries):
                chosen = [entry for entry in entries if entry["budget"] == budget]
                recalls = [entry["recall_accuracy"] for entry in chosen]
                nats = statistics.fmean(entry["text_nats"] for entry in chosen)
                recall = f"{statistics.fmean(recalls):.1%}"
                if len(chosen) > 1:
                    recall += f" ({min(recalls):.0%} to {max(recalls):.0%})"
                rows.append(
                    {
                        "heads": name,
                        "cache": conditions["dtype"] if cache == "auto" else "FP8",
                        "num_full": len(chosen[0]["full_heads"]),
                        "num_heads": len(full["full_heads"]),
                        "recall": recall,
                        "nats": nats,
                        "loss": nats / full["text_nats"] - 1,
                    }
                )
    return with_conditions(
        markdown(COLUMNS["recall"], rows),
        file,
        f"embedded model; streaming heads see a window of {conditions['window']} tokens and "
        f"{conditions['sink']} sinks",
        f"recall of {results[0]['num_answers']} facts, {conditions['distance']:,} tokens back",
        f"reference path on a CPU, {versions(result)}",
    )
