"""``mrv1 bench sampler``: from logits to tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from mrv1.bench.peers.sampler import SAMPLER_PEERS
from mrv1.bench.sampler import SamplerBench, run_sampler
from mrv1.bench.sampler_cases import CASES, TARGET_VOCAB_SIZE
from mrv1.cli.bench_kernels import check_target, write_result
from mrv1.cli.console import one_line_errors, say, show_table
from mrv1.errors import ConfigError


def sampler(
    rows: Annotated[str, typer.Option(help="Rows of a launch, comma-separated.")] = "1,32,256",
    vocab_size: Annotated[int, typer.Option(help="Token ids.")] = TARGET_VOCAB_SIZE,
    cases: Annotated[str, typer.Option(help="What to measure, comma-separated.")] = ",".join(
        CASES
    ),
    peers: Annotated[
        str, typer.Option(help="Others to measure beside, comma-separated; '' = none.")
    ] = ",".join(SAMPLER_PEERS),
    repeats: Annotated[int, typer.Option(help="Samples of each variant.")] = 30,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSON file for the result.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the data.")] = 0,
    commit: Annotated[
        str | None, typer.Option(help="Commit to record; unset: what git says.")
    ] = None,
) -> None:
    """Measure the sampler from float32 logits to tokens and log-probabilities, against a read."""
    with one_line_errors():
        parts = [part.strip() for part in rows.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise ConfigError(f"rows: expected counts such as 1,256, got {rows!r}")
        bench = SamplerBench(
            rows=tuple(map(int, parts)),
            vocab_size=vocab_size,
            cases=tuple(case.strip() for case in cases.split(",") if case.strip()),
            peers=tuple(peer.strip() for peer in peers.split(",") if peer.strip()),
            repeats=repeats,
            device=device,
            seed=seed,
            commit=commit,
        )
        check_target("--output", output)
        result: dict[str, Any] = run_sampler(bench, say)
        write_result(result, output)
    for name, version in result["peers"].items():
        say(f"peer {name}: {version}")
    show_table(_table(result))


def _table(result: dict[str, Any]) -> Table:
    conditions = result["conditions"]
    table = Table(
        title=f"sampler, vocabulary {conditions['vocab_size']}, {result['device']['name']}, "
        f"{result['path']} path",
        caption=f"normal logits; medians of {conditions['repeats']} samples; reads: of the logits "
        "once; share: of the copy bandwidth, by the bytes a case must move; ratio = its time over "
        "mrv1's",
    )
    headings = ("rows", "std", "case", "sampler", "median us", "target us", "reads", "share")
    for heading in (*headings, "ratio"):
        table.add_column(heading, justify="right")
    for entry in result["results"]:
        for name, variant in entry["variants"].items():
            share, reads = variant["share_of_copy_bandwidth"], variant["reads"]
            target, ratio = entry["target_us"], entry["peer_time_over_ours"]
            table.add_row(
                str(entry["rows"]),
                str(entry["std"]),
                entry["params"],
                name,
                f"{variant['median_us']:.1f}",
                "-" if target is None or name in ratio else f"{target:.1f}",
                "-" if reads is None else f"{reads:.1f}",
                "-" if share is None else f"{share:.0%}",
                f"{ratio[name]:.2f}" if name in ratio else "-",
            )
    return table
