"""``mrv1 bench attention`` and ``mrv1 bench kv-write``: one kernel at a time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.cli.shared import HELP as SHARED
from benchmarks.cli.shared import Output, cells, counts, words
from benchmarks.kernels.attention import run_attention
from benchmarks.kernels.attention_options import AttentionBench
from benchmarks.kernels.kv_write import KVWriteBench, run_kv_write
from benchmarks.report.charts import attention_chart
from benchmarks.report.columns import column, console
from benchmarks.report.draw import plot as write_plot
from benchmarks.report.files import ResultFile
from benchmarks.report.rows import query_heads, variant_rows
from mrv1.calibration.plot import require_matplotlib
from mrv1.cli.console import check_target, say, show_table, write_result
from mrv1.cli.options import FieldsOf, command

NAMES = {"num_q_heads": "q-heads", "num_kv_heads": "kv-heads"}
HELP = SHARED | {
    "dtype": "Dtype of the inputs: float32, float16 or bfloat16.",
    "kv_dtype": "Cache dtype: auto (that of the inputs), fp8_e4m3 or int4, with a scale per token "
    "and head; for fp8_e4m3 one variant has a scale per quarter of a block and head.",
    "num_q_heads": "Query heads.",
    "num_kv_heads": "KV heads.",
    "head_dim": "Elements per head.",
    "peers": "Other implementations to measure too, comma-separated; '' for none.",
    "repeats": "Timed samples of each implementation.",
    "seed": "Seed of the random data.",
}


def _groups(text: str) -> tuple[int, ...]:
    """Return the groups that a text has between commas."""
    return counts("groups", text) if text else ()


@command
def attention(
    options: Annotated[
        dict[str, Any],
        FieldsOf(
            cls=AttentionBench,
            names=NAMES,
            help=HELP
            | {
                "groups": "Query heads per KV head, comma-separated, each measured on every cell "
                "instead of --q-heads; the cells are then 6 to 32 requests of 4,000 tokens by "
                "default.",
                "cells": "BATCHxCONTEXT pairs, such as 1x8192,8x4096; 4x16384+60x2048 adds 60 "
                "decodes to a prefill. Default: a grid.",
                "query_len": "Tokens a prefill computes, the last of each request. Default: all.",
            },
            parsers={"cells": cells, "groups": _groups, "peers": words},
        ),
    ],
    output: Output = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="PNG file: copy-bandwidth share per cell.")
    ] = None,
) -> None:
    """Measure paged attention over a grid of batches and contexts, against the copy bandwidth.

    The copy bandwidth is measured first: bytes read and written by a copy of 1 GiB on the GPU.
    """
    bench = AttentionBench(**options)
    check_target("--output", output)
    check_target("--plot", plot)
    if plot is not None:
        require_matplotlib()
    result: dict[str, Any] = run_attention(bench, say)
    write_result(result, output)
    if plot is not None:
        write_plot(attention_chart(ResultFile(plot.name, result)), plot)
        say(f"plotted to {plot}")
    for name, version in result["peers"].items():
        say(f"peer {name}: {version}")
    for name, why, where in _failures(result):
        say(f"peer {name} {where}: {why}")
    for name, mean in result["geometric_mean_over_ours"].items():
        worst = result["worst_over_ours"][name]
        say(
            f"{name}: {mean:.2f} times our time, geometric mean over the cells that it ran; "
            f"{worst:.2f} in our worst cell"
        )
    show_table(_attention_table(result))


@command
def kv_write(
    options: Annotated[
        dict[str, Any],
        FieldsOf(
            cls=KVWriteBench,
            names=NAMES,
            help=HELP
            | {
                "tokens": "Tokens per write, comma-separated.",
                "slot_order": "Random order of tokens, or of blocks, each filled in order.",
            },
            parsers={"tokens": partial(counts, "tokens"), "peers": words},
        ),
    ],
    output: Output = None,
) -> None:
    """Measure the KV cache write from a fused qkv, against the copy bandwidth."""
    bench = KVWriteBench(**options)
    check_target("--output", output)
    result: dict[str, Any] = run_kv_write(bench, say)
    write_result(result, output)
    for name, version in result["peers"].items():
        say(f"peer {name}: {version}")
    for name, why, where in _failures(result, "{tokens} tokens"):
        say(f"peer {name} {where}: {why}")
    show_table(_kv_write_table(result))


def _failures(
    result: dict[str, Any], entry_name: str = "{batch} x {context}"
) -> list[tuple[str, str, str]]:
    """Return (peer, reason, where) of the failures; cells with one reason share an entry."""
    cells: dict[tuple[str, str], list[str]] = {}
    for entry in result["results"]:
        for failure in entry["failed_peers"].items():
            cells.setdefault(failure, []).append(entry_name.format(**entry))

    def where(names: list[str]) -> str:
        return "everywhere" if len(names) == len(result["results"]) else f"at {', '.join(names)}"

    return [(name, why, where(names)) for (name, why), names in cells.items()]


def _attention_table(result: dict[str, Any]) -> Table:
    conditions = result["conditions"]
    speed = "flops_per_s" if result["mode"] == "prefill" else "share_of_copy_bandwidth"
    keys = ("cell", "kernel", "median_us", "bytes_moved", speed, "ratio", "relative_error")
    return console(
        [column("attention", key) for key in keys],
        variant_rows(result),
        f"{result['mode']} attention, {result['dtype']}, KV cache {result['kv_dtype']}, "
        f"{_where(result)}",
        f"{query_heads(conditions)}, {conditions['num_kv_heads']} KV heads "
        f"of {conditions['head_dim']}, blocks of {conditions['block_size']}; medians of "
        f"{conditions['repeats']} samples; ratio = time over mrv1's time",
        section="batch x context",
    )


def _kv_write_table(result: dict[str, Any]) -> Table:
    conditions = result["conditions"]
    keys = (
        "tokens", "kernel", "median_us", "p20_us", "p80_us", "bytes_moved",
        "share_of_copy_bandwidth", "ratio",
    )  # fmt: skip
    return console(
        [column("kv_cache_write", key) for key in keys],
        variant_rows(result),
        f"KV cache write, {result['dtype']}, KV cache {result['kv_dtype']}, {_where(result)}",
        f"{conditions['num_kv_heads']} KV heads of {conditions['head_dim']}, blocks of "
        f"{conditions['block_size']}; medians of {conditions['repeats']} samples; ratio = "
        f"time over mrv1's time; checked: {conditions['check']}",
        section="tokens",
    )


def _where(result: dict[str, Any]) -> str:
    bandwidth = result["copy_bandwidth_bytes_per_s"]
    copies = "" if bandwidth is None else f", copies {bandwidth / 1e12:.2f} TB/s"
    return f"{result['device']['name']}, {result['path']} path{copies}"
