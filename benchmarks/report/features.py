"""Tables of what a feature costs or gains: starts, sleep, listeners, images, drafts, AsyncLLM."""

from __future__ import annotations

from benchmarks.report.engines import requests
from benchmarks.report.files import ResultFile, optional, table, versions, with_conditions

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
SLEEP_CALLS = {
    "sleep_s": "`sleep`",
    "wake_weights_s": '`wake_up(["weights"])`',
    "update_weights_s": "`update_weights` from the host",
    "update_weights_on_device_s": "`update_weights` on the GPU",
    "wake_up_s": "`wake_up`",
}


def start_parts_table(file: ResultFile) -> str:
    """Return a row for each start: its seconds, and those of its parts."""
    results = file.result["results"]
    parts = [name for name in results["empty"]["parts"] if name != "weights"]  # they are random
    body = [
        [
            text,
            f"{results[name]['seconds']:.1f}",
            *(optional(results[name].get("parts", {}).get(part), "{:.1f}") for part in parts),
        ]
        for name, text in STARTS.items()
    ]
    return with_conditions(
        table(["start", "seconds", *parts], body, num_texts=1),
        file,
        f"{file.result['shape']} shape, random weights, default options, each in a process of "
        f"its own, without imports and the CUDA context, one {file.device}",
        versions(file.result),
    )


def features_table(file: ResultFile) -> str:
    """Return what features cost a prompt of as many rows, and text that has none."""
    result = file.result
    body = [
        [
            text,
            f"{entry['first_token_ms']:.2f} ({entry['first_token_over_text']:.3f}x)",
            "-"
            if not entry["gpu_ms"]
            else f"{entry['gpu_ms']:.2f} ({entry['gpu_over_text']:.3f}x)",
            f"{entry['num_graph_steps']} of {entry['num_steps']}",
        ]
        for text, entry in ((text, result["prefill"][name]) for name, text in ROWS.items())
    ]
    conditions = result["conditions"]
    ratios = ", ".join(
        f"{entry['with_over_without']:.3f}x at batch {entry['batch']}" for entry in result["text"]
    )
    head = [f"{conditions['rows']:,} tokens", "first token, ms", "GPU, ms", "graph steps"]
    return with_conditions(
        table(head, body, num_texts=1),
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
    body = [
        [
            text,
            *(optional(entry.get(call), "{:.3f}") for call in SLEEP_CALLS),
            "-" if "freed_bytes" not in entry else f"{entry['freed_bytes'] / 1e9:.1f}",
        ]
        for text, entry in zip(SLEEPS, result["results"], strict=True)
    ]
    conditions = result["conditions"]
    return with_conditions(
        table(["seconds", *SLEEP_CALLS.values(), "freed, GB"], body, num_texts=1),
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
    result, names = file.result, ("seconds", "first_token_ms")
    none, conditions = result["results"]["none"], result["conditions"]
    body = [
        [text, *(f"{entry[name]:.3g} ({entry[name] / none[name]:.2f}x)" for name in names)]
        for text, entry in ((text, result["results"][key]) for key, text in LISTENERS.items())
    ]
    return with_conditions(
        table(["KV listener", "seconds", "first token, ms"], body, num_texts=1),
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
    body = [
        [
            entry["text"],
            f"{entry['batch']}",
            f"{entry['tokens_per_s']['plain']:,.0f}",
            f"{entry['tokens_per_s']['ngram']:,.0f}",
            f"{entry['ngram_over_plain']:.2f}x",
            f"{entry['num_steps']['ngram']} for {entry['num_steps']['plain']}",
            optional(entry["accepted_share"], "{:.0%}"),
        ]
        for entry in result["results"]
    ]
    head = ["text", "batch", "plain, tokens/s", "n-gram drafts, tokens/s", "ratio", "steps"]
    return with_conditions(
        table([*head, "drafts accepted"], body, num_texts=1),
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
    body = [
        [
            f"{entry['batch']}",
            *(f"{entry['tokens_per_s'][name]:,.0f}" for name in ("LLM", "AsyncLLM")),
            f"{entry['async_over_llm']:.3f}x",
        ]
        for entry in result["results"]
    ]
    return with_conditions(
        table(["requests", "LLM, tokens/s", "AsyncLLM, tokens/s", "AsyncLLM over LLM"], body),
        file,
        f"{result['shape']} shape, {result['weights']} weights, one {file.device}",
        requests(conditions),
        versions(result),
        f"clocks {conditions['clocks']}",
    )
