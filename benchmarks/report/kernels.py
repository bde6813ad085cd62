"""Tables of single kernels: attention, KV cache write, sampler, products."""

from __future__ import annotations

from typing import Any

from benchmarks.report.columns import TEXT, Column, column, markdown, shown, table
from benchmarks.report.files import OURS, ResultFile, optional, versions, with_conditions
from benchmarks.report.rows import own_rows, query_heads


def kernel_table(file: ResultFile) -> str:
    """Return our time in microseconds, and each other variant's time over ours."""
    result, others = file.result, _others(file.result)
    rows = own_rows(result, OURS)
    if "tokens" in rows[0]:
        kind, keys = "kv_cache_write", ["tokens", "median_us", "share_of_copy_bandwidth"]
    else:
        is_prefill = result["mode"] == "prefill"
        speed = "flops_per_s" if is_prefill else "share_of_copy_bandwidth"
        kind, keys = "attention", ["cell", "median_us", speed, "plan_us"]
    columns = shown([*(column(kind, key) for key in keys), *others], rows, on_page=True)
    means = {"peer_time_over_ours": result["geometric_mean_over_ours"]}
    blank = [""] * (len(columns) - len(others) - 1)
    body = [[each.cell(row) for each in columns] for row in rows]
    body.append(["geometric mean", *blank, *(each.cell(means) for each in others)])
    if worst := result.get("worst_over_ours"):
        least = {"peer_time_over_ours": worst}
        body.append(["worst", *blank, *(each.cell(least) for each in others)])
    conditions = result["conditions"]
    order = conditions.get("slot_order", "tokens")
    roles = conditions.get("head_roles", "uniform")
    return with_conditions(
        table([each.head for each in columns], body, [False] * len(columns)),
        file,
        f"{result['dtype']}, cache {result['kv_dtype']}, "
        f"{'' if order == 'tokens' else f'{order} in random order, '}{result['path']} path on "
        f"one {file.device}",
        f"{query_heads(conditions)}, {conditions['num_kv_heads']} KV heads of "
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
    keys = (
        "rows", "std", "params", "median_us", "target_us", "reads", "share_of_copy_bandwidth"
    )  # fmt: skip
    columns = [*(column("sample_tokens", key) for key in keys), *_others(result)]
    conditions = result["conditions"]
    return with_conditions(
        markdown(columns, own_rows(result, OURS)),
        file,
        f"{conditions['vocab_size']:,} ids, {result['dtype']} logits, temperature "
        f"{conditions['temperature']}, {result['path']} path on one {file.device}",
        f"copy bandwidth {optional(result['copy_bandwidth_bytes_per_s'], '{:.3g}')} bytes/s",
        versions(result),
    )


def _others(result: dict[str, Any]) -> list[Column]:
    """Return a column for each variant but ours, in the order of their first cells."""
    names = dict.fromkeys(name for row in result["results"] for name in row["variants"])
    return [
        Column(f"peer_time_over_ours.{name}", name, "{:.2f}x") for name in names if name != OURS
    ]


SUMS = {
    "mrv1": "mrv1, with residual and norm",
    "nccl": "NCCL",
    "symm_one_shot": "symmetric memory, one shot",
    "symm_two_shot": "two shots",
}
"""The variants of a sum over ranks that the table shows."""


def all_reduce_table(file: ResultFile) -> str:
    """Return the microseconds of a sum over ranks, and of its peers, which only sum."""
    rows = [
        {"size": f"[{entry['tokens']:,}, {entry['hidden']:,}]", **entry["us"]}
        for entry in file.result["results"]
    ]
    conditions = file.result["conditions"]
    return with_conditions(
        markdown(
            [Column("size", "size", TEXT), *(Column(key, SUMS[key], "{:.1f}") for key in SUMS)],
            rows,
        ),
        file,
        f"microseconds of a sum over {conditions['gpus']} GPUs, {file.result['dtype']}, "
        f"{file.device}",
        f"medians of {conditions['repeats']} samples, {conditions['timer']}; {conditions['data']}",
        versions(file.result),
        f"clocks {conditions['clocks']}",
    )


def products_table(file: ResultFile) -> str:
    """Return the library's TFLOP/s for each product and number of tokens; and our tiles' time."""
    products: dict[str, dict[str, Any]] = {}
    for entry in file.result["results"]:
        name = f"{entry['shape']} {entry['product']}, {entry['in']:,} x {entry['out']:,}"
        rate, ratio = entry["flops_per_s"] * 1e-12, entry["tiles_over_library"]
        row = products.setdefault(name, {"product": name})
        row[f"{entry['tokens']:,}"] = f"{rate:.0f} ({ratio:.2f}x)"
    counts = dict.fromkeys(f"{entry['tokens']:,}" for entry in file.result["results"])
    columns = [
        Column("product", "product, inputs x outputs", TEXT),
        *(Column(count, count, "{}") for count in counts),
    ]
    conditions = file.result["conditions"]
    return with_conditions(
        markdown(columns, [*products.values()]),
        file,
        "TFLOP/s of cuBLAS by tokens of a step; in brackets the time of mrv1's tiles over that of "
        f"cuBLAS (above 1, cuBLAS is faster); {file.result['dtype']}, one {file.device}",
        f"medians of {conditions['repeats']} samples, {conditions['timer']}",
        *filter(None, [conditions.get("script"), conditions.get("weights")]),
        versions(file.result),
        f"clocks {conditions['clocks']}",
    )


EXPERTS = (
    Column("shape", "shape", TEXT),
    Column("tokens", "tokens", "{:,}"),
    Column("active expected", "active experts (expected)", "{:.1f} ({:.1f})"),
    Column("products", "products, us", "{:,.1f}"),
    Column("share", "share of the copy bandwidth", "{:.0%}"),
    Column("layer", "layer, us", "{:,.1f}"),
    Column("vllm", "vLLM: products and sum, us", "{:,.1f}"),
)
"""Columns of a layer's experts."""


def experts_table(file: ResultFile) -> str:
    """Return the microseconds of a layer's experts, and of vLLM's kernel for them."""
    conditions = file.result["conditions"]
    rows = [
        {
            "shape": entry["shape"],
            "tokens": entry["tokens"],
            "active": entry["active_experts"],
            "expected": entry["expected_experts"],
            "products": entry["us"]["products"],
            "share": entry["share_of_copy_bandwidth"].get("products"),
            "layer": entry["us"]["layer"],
            "vllm": entry["us"].get("vllm products and sum"),
        }
        for entry in file.result["results"]
    ]
    return with_conditions(
        markdown(EXPERTS, rows),
        file,
        "both products of a layer's experts, their routes given; the layer: with routing, sum, "
        f"residual and norm; {file.result['dtype']}, of gpt-oss-20b codes, one {file.device}",
        f"medians of {conditions['repeats']} samples, {conditions['timer']}; {conditions['data']}",
        f"vLLM {file.result['vllm'] or 'not installed'}",
        versions(file.result),
        f"clocks {conditions['clocks']}",
    )


def quantized_table(file: ResultFile) -> str:
    """Return the microseconds of a layer's products, by the weights' codes and the tokens."""
    kinds: dict[str, dict[str, Any]] = {}
    counts: list[str] = []
    errors = []
    for entry in file.result["results"]:
        if "error" in entry:
            errors.append(f"{entry['contender']} did not run")
            continue
        row = kinds.setdefault(entry["contender"], {"weights": entry["contender"]})
        counts += [f"{entry['tokens']:,}"]
        row[counts[-1]] = f"{entry['us']:,.1f} ({entry['share_of_copy_bandwidth']:.0%})"
    columns = [
        Column("weights", "weights", TEXT),
        *(Column(count, count, "{}") for count in dict.fromkeys(counts)),
    ]
    conditions = file.result["conditions"]
    return with_conditions(
        markdown(columns, [*kinds.values()]),
        file,
        "microseconds of the four products of an 8B layer, by tokens; in brackets the share of "
        f"the copy bandwidth that their codes and scales come to; {file.result['dtype']}, one "
        f"{file.device}",
        f"medians of {conditions['repeats']} samples, {conditions['timer']}; {conditions['data']}",
        *errors,
        versions(file.result),
        f"clocks {conditions['clocks']}",
    )
