"""Tables of what a feature costs or gains: starts, sleep, listeners, images, drafts, AsyncLLM."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.report.columns import COLUMNS, Column, column, markdown
from benchmarks.report.engines import requests
from benchmarks.report.files import ResultFile, versions, with_conditions

STARTS = {
    "empty": "with an empty Triton cache",
    "filled": "with what the first start has left",
    "compile": "`mrv1 compile`, into an empty cache",
    "compiled": "after it",
}
ROWS = {
    "text": "as text",
    "gpu": "features on the GPU",
    "pinned": "features in pinned host memory",
}
"""Variants of a prompt in a file of ``benchmarks.multimodal``."""
LISTENERS = {
    "none": "none",
    "empty": "does nothing",
    "copies": "copies each full block to host memory",
}
"""Variants in a file of ``benchmarks.kv_offload``."""
SLEEPS = ("level 1, the first time", "level 1 again", "level 2", "new weights on the GPU")
"""What a file of ``benchmarks.sleep`` measures, in this order."""


def start_parts_table(file: ResultFile) -> str:
    """Return a row for each start: its seconds, and those of its parts."""
    results = file.result["results"]
    parts = [name for name in results["empty"]["parts"] if name != "weights"]  # they are random
    columns = [
        Column("start", "start"),
        Column("seconds", "seconds", "{:.1f}"),
        *(Column(f"parts.{part}", part, "{:.1f}") for part in parts),
    ]
    rows = [results[name] | {"start": text} for name, text in STARTS.items()]
    return with_conditions(
        markdown(columns, rows),
        file,
        f"{file.result['shape']} shape, random weights, default options, each in a process of "
        f"its own, without imports and the CUDA context, one {file.device}",
        versions(file.result),
    )


def features_table(file: ResultFile) -> str:
    """Return what features cost a prompt of as many rows, and text that has none."""
    result = file.result
    rows = [result["prefill"][name] | {"variant": text} for name, text in ROWS.items()]
    conditions = result["conditions"]
    ratios = ", ".join(
        f"{entry['with_over_without']:.3f}x at batch {entry['batch']}" for entry in result["text"]
    )
    variant = replace(column("multimodal", "variant"), head=f"{conditions['rows']:,} tokens")
    columns = [variant if each.key == variant.key else each for each in COLUMNS["multimodal"]]
    return with_conditions(
        markdown(columns, rows),
        file,
        f"{result['shape']} shape, random weights, {result['dtype']}, one {file.device}",
        f"tokens/s of text with a buffer for features over without: {ratios} "
        f"({conditions['prompt_tokens']} + {conditions['output_tokens']} tokens; geometric means "
        "of two pairs of engines, each kind built first once)",
        f"medians of {conditions['repeats']} runs after a warm-up",
        versions(result),
        f"clocks {conditions['clocks']}",
    )


def sleep_table(file: ResultFile) -> str:
    """Return the seconds of each call, and the bytes that sleep frees."""
    result = file.result
    rows = [entry | {"call": text} for text, entry in zip(SLEEPS, result["results"], strict=True)]
    conditions = result["conditions"]
    return with_conditions(
        markdown(COLUMNS["sleep"], rows),
        file,
        f"{result['shape']} shape, {result['weights']} weights of "
        f"{result['weight_bytes'] / 1e9:.1f} GB, KV cache of {result['kv_cache_bytes'] / 1e9:.1f} "
        f"GB, one {file.device}",
        f"level 2: weights {conditions['level_2_weights']}",
        versions(result),
        f"clocks {conditions['clocks']}",
    )


def kv_offload_table(file: ResultFile) -> str:
    """Return what a KV listener costs, over serving without one."""
    result, conditions = file.result, file.result["conditions"]
    none = result["results"]["none"]
    rows = [
        entry
        | {
            "listener": text,
            "seconds_over_none": entry["seconds"] / none["seconds"],
            "first_token_over_none": entry["first_token_ms"] / none["first_token_ms"],
        }
        for entry, text in ((result["results"][key], text) for key, text in LISTENERS.items())
    ]
    return with_conditions(
        markdown(COLUMNS["kv_offload"], rows),
        file,
        f"{result['shape']} shape, random weights, one {file.device}",
        f"{conditions['num_requests']} requests of {conditions['prompt_tokens']:,} + "
        f"{conditions['output_tokens']} tokens",
        f"medians of {conditions['repeats']} runs in turns",
        versions(result),
    )


def speculation_table(file: ResultFile) -> str:
    """Return throughput with and without drafts, by batch and text."""
    result, conditions = file.result, file.result["conditions"]
    return with_conditions(
        markdown(COLUMNS["speculation"], result["results"]),
        file,
        f"{result['shape']} shape, random weights, one {file.device}",
        f"{conditions['num_tokens']} drafts; in the text `repeat` one token of "
        f"{conditions['edit_every']} is new",
        requests(conditions),
        versions(result),
        f"clocks {conditions['clocks']}",
    )


def async_table(file: ResultFile) -> str:
    """Return the throughputs of LLM and AsyncLLM, and their ratio."""
    result, conditions = file.result, file.result["conditions"]
    return with_conditions(
        markdown(COLUMNS["async llm"], result["results"]),
        file,
        f"{result['shape']} shape, {result['weights']} weights, one {file.device}",
        requests(conditions),
        versions(result),
        f"clocks {conditions['clocks']}",
    )
