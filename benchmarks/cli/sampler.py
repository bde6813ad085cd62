"""``mrv1 bench sampler``: from logits to tokens."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from rich.table import Table

from benchmarks.cli.kernels import HELP, Output
from benchmarks.kernels.sampler import SamplerBench, run_sampler
from mrv1.cli.console import say, show_table
from mrv1.cli.options import FieldsOf, command, counts, words
from mrv1.cli.results import check_target, write_result


@command
def sampler(
    options: Annotated[
        dict[str, Any],
        FieldsOf(
            cls=SamplerBench,
            without=("stds",),
            help=HELP
            | {
                "rows": "Rows per launch, comma-separated.",
                "vocab_size": "Size of the vocabulary.",
                "cases": "Cases to measure, comma-separated.",
            },
            parsers={"rows": partial(counts, "rows"), "cases": words, "peers": words},
        ),
    ],
    output: Output = None,
) -> None:
    """Measure the sampler (edits, draws, log-probabilities) against reading its logits once."""
    bench = SamplerBench(**options)
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
        caption=f"normal logits; medians of {conditions['repeats']} samples; reads: time over the "
        "time of one read of the logits; share: of the copy bandwidth, for the bytes a case must "
        "move; ratio = time over mrv1's time",
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
