"""``mrv1 bench attention`` and ``mrv1 bench kv-write``: one kernel at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich.table import Table

from mrv1.bench import (
    PEERS,
    AttentionBench,
    Cell,
    KVWriteBench,
    plot_attention,
    require_matplotlib,
    run_attention,
    run_kv_write,
)
from mrv1.bench.kv_write_data import SlotOrder
from mrv1.bench.options import KVDtype
from mrv1.bench.peers.kv_write import WRITE_PEERS
from mrv1.cli.console import one_line_errors, say, show_table
from mrv1.errors import ConfigError

Output = Annotated[Path | None, typer.Option(dir_okay=False, help="JSON file for the result.")]
Dtype = Annotated[str, typer.Option(help="float32, float16 or bfloat16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
BlockSize = Annotated[int, typer.Option(help="Tokens per KV block.")]
KVHeads = Annotated[int, typer.Option(help="KV heads.")]
HeadDim = Annotated[int, typer.Option(help="Elements of a head.")]
QHeads = Annotated[int, typer.Option(help="Query heads.")]
Repeats = Annotated[int, typer.Option(help="Samples of each variant.")]
Seed = Annotated[int, typer.Option(help="Of the data.")]
Commit = Annotated[str | None, typer.Option(help="Commit to record; unset: what git says.")]


def attention(
    mode: Annotated[str, typer.Option(help="decode or prefill.")] = "decode",
    query_len: Annotated[
        int | None,
        typer.Option(help="Last tokens of each request that a prefill computes; unset: all."),
    ] = None,
    cells: Annotated[
        str, typer.Option(help="BATCHxCONTEXT,...; unset: the mode's own grid.")
    ] = "",
    dtype: Dtype = "bfloat16",
    kv_dtype: Annotated[
        str, typer.Option(help="auto = like q, or fp8_e4m3 with a scale per token and head.")
    ] = "auto",
    q_heads: QHeads = 32,
    kv_heads: KVHeads = 8,
    head_dim: HeadDim = 128,
    block_size: BlockSize = 16,
    full_heads: Annotated[
        float, typer.Option(help="Share of the KV heads that see everything.")
    ] = 1.0,
    window: Annotated[int, typer.Option(help="Tokens that the other heads see.")] = 256,
    sink: Annotated[int, typer.Option(help="Leading tokens that they see as well.")] = 64,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Measure our deterministic decode as well.")
    ] = False,
    peers: Annotated[
        str, typer.Option(help="Others to measure beside, comma-separated; '' = none.")
    ] = ",".join(PEERS),
    repeats: Repeats = 50,
    output: Output = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="PNG file: bandwidth share over bytes.")
    ] = None,
    device: Device = "auto",
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Measure paged attention over a grid of batch and context, against the copy bandwidth."""
    with one_line_errors():
        bench = AttentionBench(
            mode=cast("Literal['decode', 'prefill']", mode),
            query_len=query_len,
            cells=tuple(Cell.parse(cell) for cell in cells.split(",") if cells),
            dtype=dtype,
            kv_dtype=cast("KVDtype", kv_dtype),
            num_q_heads=q_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            full_heads=full_heads,
            window=window,
            sink=sink,
            deterministic=deterministic,
            peers=tuple(peer.strip() for peer in peers.split(",") if peers),
            repeats=repeats,
            device=device,
            seed=seed,
            commit=commit,
        )
        check_target("--output", output)
        check_target("--plot", plot)
        if plot is not None:
            require_matplotlib()
        result: dict[str, Any] = run_attention(bench, say)
        write_result(result, output)
        if plot is not None:
            plot_attention(result, plot)
            say(f"plotted to {plot}")
    for name, version in result["peers"].items():
        say(f"peer {name}: {version}")
    for name, why, where in _failures(result):
        say(f"peer {name} {where}: {why}")
    for name, mean in result["geometric_mean_over_ours"].items():
        say(f"{name}: {mean:.2f} times our time, geometric mean over its cells")
    show_table(_attention_table(result))


def kv_write(
    tokens: Annotated[
        str, typer.Option(help="Tokens of a write, comma-separated.")
    ] = "1,32,256,2048,16384",
    dtype: Dtype = "bfloat16",
    kv_dtype: Annotated[
        str, typer.Option(help="auto = like qkv, or fp8_e4m3 with a scale per token and head.")
    ] = "auto",
    q_heads: QHeads = 32,
    kv_heads: KVHeads = 8,
    head_dim: HeadDim = 128,
    block_size: BlockSize = 16,
    slot_order: Annotated[
        str, typer.Option(help="What is in random order: tokens, or blocks, as in a prefill.")
    ] = "tokens",
    peers: Annotated[
        str, typer.Option(help="Others to measure beside, comma-separated; '' = none.")
    ] = ",".join(WRITE_PEERS),
    repeats: Repeats = 50,
    output: Output = None,
    device: Device = "auto",
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Measure the KV cache write from a fused qkv, against the copy bandwidth."""
    with one_line_errors():
        bench = KVWriteBench(
            tokens=_counts(tokens),
            dtype=dtype,
            kv_dtype=cast("KVDtype", kv_dtype),
            num_q_heads=q_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            slot_order=cast("SlotOrder", slot_order),
            peers=tuple(peer.strip() for peer in peers.split(",") if peers),
            repeats=repeats,
            device=device,
            seed=seed,
            commit=commit,
        )
        check_target("--output", output)
        result: dict[str, Any] = run_kv_write(bench, say)
        write_result(result, output)
    for name, version in result["peers"].items():
        say(f"peer {name}: {version}")
    for name, why, where in _failures(result, "{tokens} tokens"):
        say(f"peer {name} {where}: {why}")
    show_table(_kv_write_table(result))


def _counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"tokens: expected counts such as 1,256, got {text!r}")
    return tuple(int(part) for part in parts)


def check_target(option: str, path: Path | None) -> None:
    """Raise ``ConfigError`` if the file's directory is not there: before measuring, not after."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{option}: expected an existing directory, got {path.parent}")


def write_result(result: dict[str, Any], output: Path | None) -> None:
    """Write the result as JSON where the user wants it, if anywhere."""
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        say(f"written to {output}")


def _failures(
    result: dict[str, Any], entry_name: str = "{batch} x {context}"
) -> list[tuple[str, str, str]]:
    """Return (peer, reason, where), the cells of one reason together."""
    cells: dict[tuple[str, str], list[str]] = {}
    for entry in result["results"]:
        for failure in entry["failed_peers"].items():
            cells.setdefault(failure, []).append(entry_name.format(**entry))

    def where(names: list[str]) -> str:
        return "everywhere" if len(names) == len(result["results"]) else f"at {', '.join(names)}"

    return [(name, why, where(names)) for (name, why), names in cells.items()]


def _attention_table(result: dict[str, Any]) -> Table:
    conditions = result["conditions"]
    prefill = result["mode"] == "prefill"
    table = Table(
        title=f"{result['mode']} attention, {result['dtype']}, KV cache {result['kv_dtype']}, "
        f"{_where(result)}",
        caption=f"{conditions['num_q_heads']} query heads, {conditions['num_kv_heads']} KV heads "
        f"of {conditions['head_dim']}, blocks of {conditions['block_size']}; medians of "
        f"{conditions['repeats']} samples; ratio = its time over mrv1's",
    )
    last = "TFLOP/s" if prefill else "share"
    for heading in ("batch x context", "kernel", "median us", "MB moved", last, "ratio", "error"):
        name = heading == "kernel"
        table.add_column(heading, justify="left" if name else "right", no_wrap=name)
    for entry in result["results"]:
        table.add_section()
        cell = f"{entry['batch']} x {entry['context']}"
        if prefill and entry["query_len"] < entry["context"]:
            cell = f"{entry['batch']} x {entry['query_len']} of {entry['context']}"
        for number, (name, variant) in enumerate(entry["variants"].items()):
            ratio = entry["peer_time_over_ours"].get(name)
            table.add_row(
                "" if number else cell,
                name,
                f"{variant['median_us']:.1f}",
                f"{variant['bytes_moved'] / 1e6:.2f}",
                _rate(variant, prefill=prefill),
                "-" if ratio is None else f"{ratio:.2f}",
                f"{variant['relative_error']:.1e}",
            )
    return table


def _rate(variant: dict[str, Any], *, prefill: bool) -> str:
    """Return what limits the mode: TFLOP/s of a prefill, bandwidth share of a decode."""
    if prefill:
        flops = variant["flops_per_s"]
        return "-" if flops is None else f"{flops / 1e12:.0f}"
    share = variant["share_of_copy_bandwidth"]
    return "-" if share is None else f"{share:.0%}"


def _kv_write_table(result: dict[str, Any]) -> Table:
    conditions = result["conditions"]
    table = Table(
        title=f"KV cache write, {result['dtype']}, KV cache {result['kv_dtype']}, "
        f"{_where(result)}",
        caption=f"{conditions['num_kv_heads']} KV heads of {conditions['head_dim']}, blocks of "
        f"{conditions['block_size']}; medians of {conditions['repeats']} samples; ratio = its "
        f"time over mrv1's; checked: {conditions['check']}",
    )
    for heading in ("tokens", "kernel", "median us", "p20", "p80", "MB moved", "share", "ratio"):
        name = heading == "kernel"
        table.add_column(heading, justify="left" if name else "right", no_wrap=name)
    for entry in result["results"]:
        table.add_section()
        for number, (name, variant) in enumerate(entry["variants"].items()):
            ratio = entry["peer_time_over_ours"].get(name)
            table.add_row(
                "" if number else str(entry["tokens"]),
                name,
                f"{variant['median_us']:.2f}",
                f"{variant['p20_us']:.2f}",
                f"{variant['p80_us']:.2f}",
                f"{variant['bytes_moved'] / 1e6:.3f}",
                _rate(variant, prefill=False),
                "-" if ratio is None else f"{ratio:.2f}",
            )
    return table


def _where(result: dict[str, Any]) -> str:
    bandwidth = result["copy_bandwidth_bytes_per_s"]
    copies = "" if bandwidth is None else f", copies {bandwidth / 1e12:.2f} TB/s"
    return f"{result['device']['name']}, {result['path']} path{copies}"
