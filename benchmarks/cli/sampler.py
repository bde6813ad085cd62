"""``mrv1 bench sampler``: from logits to tokens."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from rich.table import Table

from benchmarks.cli.kernels import HELP
from benchmarks.cli.shared import Output, counts, words
from benchmarks.kernels.sampler import SamplerBench, run_sampler
from benchmarks.report.columns import COLUMNS, console
from benchmarks.report.rows import variant_rows
from mrv1.cli.console import check_target, say, show_table, write_result
from mrv1.cli.options import FieldsOf, command


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
    return console(
        COLUMNS["sample_tokens"],
        variant_rows(result),
        f"sampler, vocabulary {conditions['vocab_size']}, {result['device']['name']}, "
        f"{result['path']} path",
        f"normal logits; medians of {conditions['repeats']} samples; reads: time over the "
        "time of one read of the logits; of copy bandwidth: for the bytes a case must move; "
        "ratio = time over mrv1's time",
    )
