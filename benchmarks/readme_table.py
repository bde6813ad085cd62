"""Write the measured figures into README.md and results/README.md from the results files.

python benchmarks/readme_table.py           rewrite the tables
python benchmarks/readme_table.py --check   exit 1 if a table differs from the files
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
README = REPO / "README.md"
RESULTS = REPO / "benchmarks" / "results"
RESULTS_PAGE = RESULTS / "README.md"
BEGIN, END = "<!-- results:generate -->", "<!-- /results:generate -->"
RECALL_KINDS = {
    "full": "all",
    "greedy": "calibrated",
    "single": "calibrated, each head alone",
    "leading heads stream": "leading heads stream",
    "random": "random, 5 seeds",
}
"""Kind of a policy -> its name in the table."""
PAGE_HEAD = """# Measured results

Written by `benchmarks/readme_table.py` from the JSON files of this folder: not edited by hand.
[benchmarks/README.md](../README.md) is the manual: commands, conditions, every field.
[docs/performance.md](../../docs/performance.md) says how to read the figures. In a table of
kernels, the column of another variant is that variant's time over ours: above 1, mrv1 is
faster."""
OTHER_FILES = {
    "attempts-h200.json": "every optimization that was tried, its expected and its measured gain, "
    "and the profile",
    "before-after-h200.json": "two commits on one machine, before and after a refactor: kernels "
    "and decode steps within 1%, first tokens of 32 and 256 requests 10% and 13% earlier",
    "accuracy-h200.json": "errors of 638f36c and 4ebca58 against float64: prefill's log-sum-exp "
    "with large scores (1.7e-4 before, 2.8e-5 after in 16 bits; 6.3e-4 and 5.8e-5 in float32), "
    "float32 `linear` over torch's (3.8 times before, 1.5 times after at most, root mean square)",
    "deterministic-step-h200.json": "a decode step's kernels with and without "
    "`deterministic=True`: 1.04, 1.00 and 1.14 times as long at batch 1, 32 and 256",
    "smollm2-h200.json": "SmolLM2's log-probabilities against float32 transformers, by dtype and "
    "cache",
    "sanitize-h200.json": "compute-sanitizer's findings, op by op",
    "tiny_model.json": "how the embedded model was trained",
}
"""Results without a table of their own."""
OURS = "mrv1"
ENGINE_DEFAULTS = {"deterministic": False, "overlap": True, "cuda_graphs": True}
NONE_YET = "Nothing has been measured yet."


def load_results(folder: Path = RESULTS, pattern: str = "generate*.json") -> list[dict[str, Any]]:
    """Return the results of ``mrv1 bench generate`` in a folder, by file name."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob(pattern))]


def generate_table(results: list[dict[str, Any]]) -> str:
    """Return the Markdown for all results: a table each, its conditions below."""
    return "\n\n".join(_one(result) for result in results) or NONE_YET


def _one(result: dict[str, Any]) -> str:
    has_host = "host_ms" in result["results"][0]  # absent from files older than the figure
    head = ["batch", "tokens/s", "ms per decode step", "floor, ms", "share of floor"]
    rows = []
    for entry in result["results"]:
        cells = [
            f"{entry['batch']}",
            f"{entry['tokens_per_s']:,.0f}",
            f"{entry['decode_step_ms']:.2f}",
            _optional(entry["floor_ms"], "{:.2f}"),
            _optional(entry["share_of_floor"], "{:.0%}"),
            f"{entry['prefill_ms']:.1f}",
        ]
        if has_host:
            cells.insert(3, _optional(entry["host_ms"], "{:.3f}"))
        rows.append(cells)
    if has_host:
        head.insert(3, "of it host, ms")
    return "\n".join([*_markdown([*head, "prefill, ms"], rows), "", _conditions(result)])


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [lines[0], f"|{'---:|' * len(head)}", *lines[1:]]


def _conditions(result: dict[str, Any]) -> str:
    conditions, versions = result["conditions"], result["versions"]
    bandwidth = result.get("copy_bandwidth_bytes_per_s")
    chosen = ""  # options off their defaults; files older than an option lack it
    if conditions.get("kv_cache_dtype", "auto") != "auto":
        chosen += f"KV {conditions['kv_cache_dtype']} with a scale per {conditions['kv_scale']}, "
    if conditions.get("attention_backend", "triton") != "triton":
        chosen += f"attention by {conditions['attention_backend']}, "
    chosen += "".join(
        f"{name}={conditions[name]}, "
        for name, usual in ENGINE_DEFAULTS.items()
        if conditions.get(name, usual) != usual
    )
    parts = [
        f"{result['shape']} shape, {result['weights']} weights, {result['dtype']}, {chosen}"
        f"{result['path']} path on one {result['device']['name']}",
        _measured(conditions),
        f"torch {versions['torch']}, triton {versions['triton']}",
        f"clocks {conditions['clocks']}",
    ]
    if bandwidth is not None:
        parts.append(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    if "start" in result:
        start = result["start"]
        parts.append(
            f"engine started in {start['seconds']:.1f} s"
            + (f", Triton's cache {start['triton_cache']}" if start["triton_cache"] else "")
        )
    return f"{'; '.join(parts)} (commit {result['commit'][:12]}, {result['date']})."


def _measured(conditions: dict[str, Any]) -> str:
    if "steps" in conditions:
        return f"{conditions['prompt_tokens']} prompt tokens, then {conditions['steps']} steps"
    return (
        f"{conditions['prompt_tokens']} prompt + {conditions['output_tokens']} output tokens, "
        f"{conditions['sampling']}; medians of {conditions['repeats']} runs after a warm-up"
    )


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def runner_tables(folder: Path = RESULTS) -> str:
    """Return the Markdown for the results of ``mrv1 bench runner``, by file name."""
    paths = sorted(folder.glob("runner*.json"))
    return "\n\n".join(_runner_table(json.loads(p.read_text("utf-8"))) for p in paths) or NONE_YET


def _runner_table(result: dict[str, Any]) -> str:
    """Return the table of steps and their traces, then the table of host times."""
    steps = []
    for entry in result["results"]:
        trace = entry["trace"] or {}
        steps.append(
            [
                f"{entry['batch']}",
                f"{entry['step_ms']:.3f}",
                _optional(entry["deterministic_over_default"], "{:.2f}x"),
                *(
                    _optional(trace.get(name), form)
                    for name, form in (
                        ("idle_share", "{:.1%}"),
                        ("idle_between_launches_share", "{:.1%}"),
                        ("host_to_device_copies", "{:.2g}"),
                        ("graph_launches", "{:.2g}"),
                        ("kernel_launches", "{:.2g}"),
                        ("event_waits", "{:.2g}"),
                        ("other_waits", "{:.2g}"),
                    )
                ),
            ]
        )
    names = ("total_us", "quietest_us", "schedule_us", "execute_us", "read_us", "update_us")
    hosts = [
        [f"{entry['batch']}", waiting, *(f"{entry['host'][name]:,.0f}" for name in names)]
        for waiting, entry in [
            *(("none", entry) for entry in result["results"]),
            *((f"{entry['waiting']:,}", entry) for entry in result["waiting"]),
        ]
    ]
    step_head = ["batch", "ms per step", "deterministic", "GPU idle", "between launches"]
    step_head += ["copies up", "graphs", "other kernels", "event waits", "other waits"]
    host_head = [
        "batch",
        "waiting",
        "host, us",
        "quietest",
        "schedule",
        "execute",
        "read",
        "update",
    ]
    return "\n".join(
        [
            *_markdown(step_head, steps), "",
            *_markdown(host_head, hosts), "",
            _conditions(result),
        ]
    )  # fmt: skip


def kernel_tables(folder: Path = RESULTS) -> str:
    """Return the Markdown for the kernels' results: a table for each file, by its name."""
    paths = [*folder.glob("attention-*.json"), *folder.glob("kv-write-*.json")]
    return (
        "\n\n".join(
            _kernel_table(path.stem, json.loads(path.read_text("utf-8"))) for path in sorted(paths)
        )
        or NONE_YET
    )


def _kernel_table(name: str, result: dict[str, Any]) -> str:
    """Return our time in microseconds, and each other variant's time over ours."""
    rows = result["results"]
    others = list(dict.fromkeys(n for row in rows for n in row["variants"] if n != OURS))
    head = ["tokens" if "tokens" in rows[0] else "batch x context", "us", "of copy bandwidth"]
    if rows[0].get("query_len", 1) > 1:
        head[-1] = "TFLOP/s"
    has_plan = "plan_us" in rows[0]
    body = []
    for row in rows:
        ours = row["variants"][OURS]
        share = _optional(ours["share_of_copy_bandwidth"], "{:.0%}")
        if head[-1] == "TFLOP/s":
            share = _optional(ours["flops_per_s"] and ours["flops_per_s"] / 1e12, "{:.0f}")
        cell = f"{row['tokens']:,}" if "tokens" in row else _cell(row)
        plan = [f"{row['plan_us']:.1f}"] if has_plan else []
        ratios = [_optional(row["peer_time_over_ours"].get(o), "{:.2f}x") for o in others]
        median = f"{ours['median_us']:,.1f}"
        body.append([cell, median, share, *plan, *ratios])
    means = [_optional(result["geometric_mean_over_ours"].get(o), "{:.2f}x") for o in others]
    body.append(["geometric mean", "", "", *[""] * has_plan, *means])
    head += ["plan, us"] * has_plan
    versions = result["versions"] | {n: v for n, v in result["peers"].items() if v[0].isdigit()}
    order = result.get("conditions", {}).get("slot_order", "tokens")
    conditions = [
        f"`{name}.json`: {result['dtype']}, cache {result['kv_dtype']}, "
        f"{'' if order == 'tokens' else f'{order} in random order, '}{result['path']} path on "
        f"one {result['device']['name']}",
        f"copy bandwidth {_optional(result['copy_bandwidth_bytes_per_s'], '{:.3g}')} bytes/s",
        ", ".join(f"{n} {v}" for n, v in versions.items() if isinstance(v, str)),
        f"commit {result['commit'][:12]}, {result['date']}",
    ]
    return "\n".join([*_markdown([*head, *others], body), "", "; ".join(conditions) + "."])


def _cell(row: dict[str, Any]) -> str:
    """Return a cell of attention: batch x context, or batch x queries of context."""
    context = f"{row['shortest']} to {row['context']}" if row.get("shortest") else row["context"]
    is_end = 1 < row.get("query_len", 1) < row["context"]
    return (
        f"{row['batch']} x {row['query_len']} of {context}"
        if is_end
        else f"{row['batch']} x {context}"
    )


def sampler_tables(folder: Path = RESULTS) -> str:
    """Return the Markdown for the results of ``mrv1 bench sampler``, by file name."""
    paths = sorted(folder.glob("sampler*.json"))
    return "\n\n".join(_sampler_table(json.loads(p.read_text("utf-8"))) for p in paths) or NONE_YET


def _sampler_table(result: dict[str, Any]) -> str:
    """Return our time in microseconds and reads of the logits, and the others' time over ours."""
    rows = result["results"]
    others = list(dict.fromkeys(n for row in rows for n in row["variants"] if n != OURS))
    has_targets = "target_us" in rows[0]  # absent from files older than cases that edit
    head = ["rows", "std of logits", "parameters", "us", "reads", *others]
    if has_targets:
        head[2:5] = ["case", "us", "target, us", "reads", "of copy bandwidth"]
    body = []
    for row in rows:
        ours = row["variants"][OURS]
        share = ours["share_of_copy_bandwidth"]
        cells = [f"{row['rows']}", f"{row['std']}", row["params"], f"{ours['median_us']:,.1f}"]
        if has_targets:
            cells += [
                _optional(row["target_us"], "{:,.1f}"),
                _optional(ours["reads"], "{:.1f}"),
                _optional(share, "{:.0%}"),
            ]
        else:  # in reads of the logits
            cells.append(_optional(share and 1 / share, "{:.1f}"))
        cells += (_optional(row["peer_time_over_ours"].get(o), "{:.2f}x") for o in others)
        body.append(cells)
    conditions, versions = result["conditions"], result["versions"] | result["peers"]
    parts = [
        f"{conditions['vocab_size']:,} ids, {result['dtype']} logits, temperature "
        f"{conditions['temperature']}, {result['path']} path on one {result['device']['name']}",
        f"copy bandwidth {_optional(result['copy_bandwidth_bytes_per_s'], '{:.3g}')} bytes/s",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"commit {result['commit'][:12]}, {result['date']}",
    ]
    return "\n".join([*_markdown(head, body), "", "; ".join(parts) + "."])


def headwise_tables(folder: Path = RESULTS) -> str:
    """Return the Markdown for ``mrv1 bench capacity`` and ``headwise``, by file name."""
    paths = [*sorted(folder.glob("capacity*.json")), *sorted(folder.glob("headwise*.json"))]
    tables = [_headwise_table(path.stem, json.loads(path.read_text("utf-8"))) for path in paths]
    return "\n\n".join(tables) or NONE_YET


def _headwise_table(name: str, result: dict[str, Any]) -> str:
    """Return a row for each cache; ratios to the first row, above 1 is better."""
    conditions = result["conditions"]
    if result["op"] == "capacity":
        head = ["GiB", "GiB a request", "predicted", "requests", "ratio", "longest context"]
        served = f"requests of {conditions['context']:,} tokens"
    else:
        head = [
            "tokens/s",
            "while some wait",
            "first token, ms",
            "between tokens, ms",
            "preempted",
        ]
        served = (
            f"{conditions['num_requests']} requests of {conditions['prompt_tokens']:,} + "
            f"{conditions['output_tokens']:,} tokens"
            + (", prompts found cached" if conditions["planted"] else "")
        )
    lines = [f"| cache | {' | '.join(head)} |", f"|---|{'---:|' * len(head)}"]
    for entry in result["results"]:
        if result["op"] == "capacity":
            cells = [
                f"{entry['kv_cache']['allocated_bytes'] / 2**30:.1f}",
                f"{sum(entry['request_bytes']) / 2**30:.2f}",
                f"{entry['predicted_requests']}",
                f"{entry['requests']}",
                "-" if entry["ratio"] is None else f"{entry['ratio']:.2f}x",
                f"{entry['longest_context']:,}",
            ]
        else:
            crowded = entry.get("crowded_tokens_per_s")  # absent from older files
            cells = [
                f"{entry['tokens_per_s']:,.0f} ({entry['throughput_ratio']:.2f}x)",
                "-" if crowded is None else f"{crowded:,.0f} ({entry['crowded_ratio']:.2f}x)",
                f"{entry['first_token_ms']:,.0f} ({entry['first_token_speedup']:.2f}x)",
                f"{entry['between_tokens_ms']:.2f} ({entry['between_tokens_speedup']:.2f}x)",
                f"{entry['num_preemptions']:.0f}",
            ]
        lines.append(f"| {entry['variant']} | {' | '.join(cells)} |")
    window, sink = next(([w, s] for w, s in conditions["roles"] if w >= 0), (None, None))
    streaming = "" if window is None else f", the others see {window:,} tokens and {sink} in front"
    memory = conditions["kv_cache_memory_bytes"]
    return "\n".join(
        [
            *lines,
            "",
            f"`{name}.json`: {result['shape']} shape, {served}; {conditions['full_share']:.0%} of "
            f"the heads full{streaming}; KV cache "
            f"{'as the GPU allows' if memory is None else f'of {memory / 1e9:g} GB'}, at most "
            f"{conditions['max_num_seqs']} requests and {conditions['max_num_batched_tokens']:,} "
            f"tokens a step; {result['dtype']}, one {result['device']['name']}, torch "
            f"{result['versions']['torch']} (commit {result['commit'][:12]}, {result['date']}).",
        ]
    )


def recall_tables(folder: Path = RESULTS) -> str:
    """Return the Markdown for the results of ``benchmarks.recall``, by file name."""
    paths = sorted(folder.glob("recall*.json"))
    return "\n\n".join(recall_table(json.loads(p.read_text("utf-8"))) for p in paths) or NONE_YET


def recall_table(result: dict[str, Any]) -> str:
    """Return a result of ``benchmarks.recall``; random policies show mean and range."""
    results, conditions = result["results"], result["conditions"]
    full = next(entry for entry in results if entry["kind"] == "full")
    lines = [
        "| heads | full | cache | recall | nats per token | against all full |",
        "|---|---:|---|---:|---:|---:|",
    ]
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
                cells = [
                    name,
                    f"{len(chosen[0]['full_heads'])} of {len(full['full_heads'])}",
                    conditions["dtype"] if cache == "auto" else "FP8",
                    recall,
                    f"{text:.4f}",
                    f"{text / full['text_nats'] - 1:+.2%}",
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            *lines,
            "",
            f"Embedded model; streaming heads see a window of {conditions['window']} tokens and "
            f"{conditions['sink']} sinks; recall of {results[0]['num_answers']} facts, "
            f"{conditions['distance']:,} tokens back; reference path on a CPU, torch "
            f"{result['versions']['torch']} (commit {result['commit'][:12]}, {result['date']}).",
        ]
    )


def with_table(readme: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """Return a README's text with the table between the markers replaced.

    Raises:
        ValueError: the two markers do not occur once each, in order.
    """
    before, found_begin, rest = readme.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end or begin in rest or end in after:
        raise ValueError(f"README.md: expected {begin} and then {end}, each once")
    return f"{before}{begin}\n{table}\n{end}{after}"


def summary_table(folder: Path = RESULTS) -> str:
    """Return the Markdown for README.md: both shapes in one table, the conditions below."""
    results = [*load_results(folder), *load_results(folder, "llama3-8b-generate*.json")]
    if not results:
        return NONE_YET
    body = [
        [
            result["shape"],
            f"{entry['batch']}",
            f"{entry['tokens_per_s']:,.0f}",
            f"{entry['decode_step_ms']:.2f}",
            _optional(entry["floor_ms"], "{:.2f}"),
            _optional(entry["share_of_floor"], "{:.0%}"),
        ]
        for result in results
        for entry in result["results"]
    ]
    head = [
        "shape",
        "batch",
        "tokens/s",
        "ms per decode step",
        "memory floor, ms",
        "share of floor",
    ]
    conditions = results[0]["conditions"]
    sources = "; ".join(
        f"{result['shape']}: {_runs(result)}, commit {result['commit'][:7]}, {result['date']}"
        for result in results
    )
    return "\n".join(
        [
            *_markdown(head, body),
            "",
            f"Random weights, {results[0]['dtype']}, one {results[0]['device']['name']}; "
            f"{conditions['prompt_tokens']} prompt + {conditions['output_tokens']} output tokens, "
            f"{conditions['sampling']}; medians after a warm-up ({sources}).",
        ]
    )


def _runs(result: dict[str, Any]) -> str:
    repeats = result["conditions"]["repeats"]
    return "1 run" if repeats == 1 else f"{repeats} runs"


def vllm_table(folder: Path = RESULTS) -> str:
    """Return the Markdown for the results of ``benchmarks.beside_vllm``, by file name."""
    paths = sorted(folder.glob("beside-vllm*.json"))
    return "\n\n".join(_vllm_table(json.loads(p.read_text("utf-8"))) for p in paths) or NONE_YET


def _vllm_table(result: dict[str, Any]) -> str:
    conditions, versions = result["conditions"], result["versions"]
    body = [
        [
            f"{entry['batch']}",
            *(f"{entry['tokens_per_s'][name]:,.0f}" for name in (OURS, "vllm")),
            f"{entry['mrv1_over_vllm']:.2f}x",
        ]
        for entry in result["results"]
    ]
    return "\n".join(
        [
            *_markdown(["batch", "mrv1, tokens/s", "vLLM, tokens/s", "mrv1 over vLLM"], body),
            "",
            f"{result['shape']} shape, one random checkpoint for both, {result['dtype']}, one "
            f"{result['device']['name']}; {_measured(conditions)}; "
            f"vLLM {result['peers']['vllm']}, torch {versions['torch']}, "
            f"triton {versions['triton']}; clocks {conditions['clocks']} "
            f"(commit {result['commit'][:12]}, {result['date']}).",
        ]
    )


def results_page(folder: Path = RESULTS) -> str:
    """Return ``results/README.md``: every table, section by section."""
    sections = {
        "mrv1 beside vLLM": vllm_table(folder),
        "Whole-engine generation": generate_table(load_results(folder)),
        "Whole-engine generation, other conditions": generate_table(
            load_results(folder, "*-generate-*.json")
        ),
        "A decode step": runner_tables(folder),
        "Attention and KV cache write": kernel_tables(folder),
        "Sampler": sampler_tables(folder),
        "Head policies": headwise_tables(folder),
        "Recall under head policies": recall_tables(folder),
    }
    others = [f"- `{name}`: {text}" for name, text in OTHER_FILES.items()]
    blocks = [PAGE_HEAD, *(f"## {title}\n\n{table}" for title, table in sections.items())]
    return "\n\n".join([*blocks, "## Other files\n\n" + "\n".join(others)]) + "\n"


def main(arguments: list[str]) -> int:
    """Rewrite both READMEs, or with ``--check`` return 1 if one of them would change."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    readme = README.read_text("utf-8")
    wanted = {
        README: with_table(readme, summary_table()),
        RESULTS_PAGE: results_page(),
    }
    is_current = True
    for path, text in wanted.items():
        is_current &= path.exists() and path.read_text("utf-8") == text
        if not arguments:
            path.write_text(text, encoding="utf-8")
    return int(bool(arguments) and not is_current)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
