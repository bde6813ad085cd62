"""Tables of head policies: memory, serving, and what the model still recalls."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.report.files import ResultFile, optional, table, versions, with_conditions

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
    body = [
        [
            entry["variant"],
            f"{entry['kv_cache']['allocated_bytes'] / 2**30:.1f}",
            f"{sum(entry['request_bytes']) / 2**30:.2f}",
            f"{entry['predicted_requests']}",
            f"{entry['requests']}",
            optional(entry["ratio"], "{:.2f}x"),
            f"{entry['longest_context']:,}",
        ]
        for entry in file.result["results"]
    ]
    head = ["cache", "GiB", "GiB a request", "predicted", "requests", "ratio", "longest context"]
    served = f"requests of {file.result['conditions']['context']:,} tokens"
    return with_conditions(table(head, body, num_texts=1), file, *_policy(file, served))


def headwise_table(file: ResultFile) -> str:
    """Return a row for each cache; ratios to the first row, above 1 is better."""
    body = []
    for entry in file.result["results"]:
        crowded = entry.get("crowded_tokens_per_s")  # absent from older files
        body.append(
            [
                entry["variant"],
                f"{entry['tokens_per_s']:,.0f} ({entry['throughput_ratio']:.2f}x)",
                "-" if crowded is None else f"{crowded:,.0f} ({entry['crowded_ratio']:.2f}x)",
                f"{entry['first_token_ms']:,.0f} ({entry['first_token_speedup']:.2f}x)"
                + _saving(entry.get("first_token_saving")),
                f"{entry['between_tokens_ms']:.2f} ({entry['between_tokens_speedup']:.2f}x)"
                + _saving(entry.get("between_tokens_saving")),
                f"{entry['num_preemptions']:.0f}",
            ]
        )
    head = ["cache", "tokens/s", "while some wait", "first token, ms", "between tokens, ms"]
    conditions = file.result["conditions"]
    served = (
        f"{conditions['num_requests']} requests of {conditions['prompt_tokens']:,} + "
        f"{conditions['output_tokens']:,} tokens"
        + (", prompts found cached" if conditions["planted"] else "")
    )
    text = table([*head, "preempted"], body, num_texts=1)
    return with_conditions(text, file, *_policy(file, served))


def _saving(saving: dict[str, float] | None) -> str:
    """Return the 95% interval of the time saved; nothing for one run, or an older file."""
    return "" if saving is None else f", {saving['low']:.1%} to {saving['high']:.1%} less"


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
    body = []
    for cache in dict.fromkeys(entry["kv_cache_dtype"] for entry in results):
        for kind, name in RECALL_KINDS.items():
            entries = [e for e in results if (e["kv_cache_dtype"], e["kind"]) == (cache, kind)]
            for budget in dict.fromkeys(entry["budget"] for entry in entries):
                chosen = [entry for entry in entries if entry["budget"] == budget]
                recalls = [entry["recall_accuracy"] for entry in chosen]
                text = statistics.fmean(entry["text_nats"] for entry in chosen)
                recall = f"{statistics.fmean(recalls):.1%}"
                if len(chosen) > 1:
                    recall += f" ({min(recalls):.0%} to {max(recalls):.0%})"
                body.append(
                    [
                        name,
                        conditions["dtype"] if cache == "auto" else "FP8",
                        f"{len(chosen[0]['full_heads'])} of {len(full['full_heads'])}",
                        recall,
                        f"{text:.4f}",
                        f"{text / full['text_nats'] - 1:+.2%}",
                    ]
                )
    head = ["heads", "cache", "full", "recall", "nats per token", "against all full"]
    return with_conditions(
        table(head, body, num_texts=2),
        file,
        f"embedded model; streaming heads see a window of {conditions['window']} tokens and "
        f"{conditions['sink']} sinks",
        f"recall of {results[0]['num_answers']} facts, {conditions['distance']:,} tokens back",
        f"reference path on a CPU, {versions(result)}",
    )
