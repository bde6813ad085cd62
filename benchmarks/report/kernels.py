"""Tables of single kernels: attention, KV cache write, sampler."""

from __future__ import annotations

from typing import Any

from benchmarks.report.files import OURS, ResultFile, optional, table, versions, with_conditions
from benchmarks.report.plot import cell_label


def kernel_table(file: ResultFile) -> str:
    """Return our time in microseconds, and each other variant's time over ours."""
    result = file.result
    rows, others = result["results"], _others(result)
    is_prefill = result.get("mode") == "prefill"
    has_plan = "plan_us" in rows[0]
    body = []
    for row in rows:
        ours = row["variants"][OURS]
        speed = optional(ours["share_of_copy_bandwidth"], "{:.0%}")
        if is_prefill:
            speed = optional(ours["flops_per_s"] and ours["flops_per_s"] / 1e12, "{:.0f}")
        body.append(
            [
                f"{row['tokens']:,}" if "tokens" in row else cell_label(row),
                f"{ours['median_us']:,.1f}",
                speed,
                *([optional(row["plan_us"], "{:.1f}")] if has_plan else []),
                *_ratios(row, others),
            ]
        )
    means = [optional(result["geometric_mean_over_ours"].get(o), "{:.2f}x") for o in others]
    body.append(["geometric mean", "", "", *[""] * has_plan, *means])
    head = ["tokens" if "tokens" in rows[0] else "batch x context", "us"]
    head += ["TFLOP/s" if is_prefill else "of copy bandwidth", *["plan, us"] * has_plan]
    conditions = result["conditions"]
    order = conditions.get("slot_order", "tokens")
    roles = conditions.get("head_roles", "uniform")
    return with_conditions(
        table([*head, *others], body),
        file,
        f"{result['dtype']}, cache {result['kv_dtype']}, "
        f"{'' if order == 'tokens' else f'{order} in random order, '}{result['path']} path on "
        f"one {file.device}",
        f"{conditions['num_q_heads']} query heads, {conditions['num_kv_heads']} KV heads of "
        f"{conditions['head_dim']}, blocks of {conditions['block_size']}",
        ""
        if roles == "uniform"
        else f"{roles['full_heads']:.0%} of the heads full, the others see {roles['window']:,} "
        f"tokens and {roles['sink']} in front",
        f"soft cap {conditions['soft_cap']:g}" if conditions.get("soft_cap") else "",
        "logit sinks" if conditions.get("logit_sinks") else "",
        f"copy bandwidth {optional(result['copy_bandwidth_bytes_per_s'], '{:.3g}')} bytes/s",
        versions(result),
    )


def sampler_table(file: ResultFile) -> str:
    """Return our time in microseconds and reads of the logits, and the others' time over ours."""
    result = file.result
    others = _others(result)
    has_targets = "target_us" in result["results"][0]  # absent from files older than edits
    head = ["rows", "std of logits", "parameters", "us", "reads"]
    if has_targets:
        head[2:5] = ["case", "us", "target, us", "reads", "of copy bandwidth"]
    body = []
    for row in result["results"]:
        ours = row["variants"][OURS]
        share = ours["share_of_copy_bandwidth"]
        cells = [f"{row['rows']}", f"{row['std']}", row["params"], f"{ours['median_us']:,.1f}"]
        if has_targets:
            cells += [
                optional(row["target_us"], "{:,.1f}"),
                optional(ours["reads"], "{:.1f}"),
                optional(share, "{:.0%}"),
            ]
        else:  # in reads of the logits
            cells.append(optional(share and 1 / share, "{:.1f}"))
        body.append([*cells, *_ratios(row, others)])
    conditions = result["conditions"]
    return with_conditions(
        table([*head, *others], body),
        file,
        f"{conditions['vocab_size']:,} ids, {result['dtype']} logits, temperature "
        f"{conditions['temperature']}, {result['path']} path on one {file.device}",
        f"copy bandwidth {optional(result['copy_bandwidth_bytes_per_s'], '{:.3g}')} bytes/s",
        versions(result),
    )


def _others(result: dict[str, Any]) -> list[str]:
    """Return the variants but ours, in the order of their first cells."""
    names = (name for row in result["results"] for name in row["variants"])
    return [name for name in dict.fromkeys(names) if name != OURS]


def _ratios(row: dict[str, Any], others: list[str]) -> list[str]:
    return [optional(row["peer_time_over_ours"].get(other), "{:.2f}x") for other in others]


def products_table(file: ResultFile) -> str:
    """Return the library's TFLOP/s for each product and number of tokens; and our tiles' time."""
    products: dict[str, dict[int, str]] = {}
    for entry in file.result["results"]:
        name = f"{entry['shape']} {entry['product']}, {entry['in']:,} x {entry['out']:,}"
        rate, ratio = entry["flops_per_s"] * 1e-12, entry["tiles_over_library"]
        products.setdefault(name, {})[entry["tokens"]] = f"{rate:.0f} ({ratio:.2f}x)"
    counts = list(dict.fromkeys(entry["tokens"] for entry in file.result["results"]))
    rows = [
        [name, *(cells.get(count, "-") for count in counts)] for name, cells in products.items()
    ]
    conditions = file.result["conditions"]
    return with_conditions(
        table(["product, inputs x outputs", *(f"{count:,}" for count in counts)], rows, 1),
        file,
        "TFLOP/s of cuBLAS by tokens of a step; in brackets the time of mrv1's tiles over that of "
        f"cuBLAS (above 1, cuBLAS is faster); {file.result['dtype']}, one {file.device}",
        f"medians of {conditions['repeats']} samples, {conditions['timer']}",
        *filter(None, [conditions.get("script"), conditions.get("weights")]),
        versions(file.result),
        f"clocks {conditions['clocks']}",
    )
