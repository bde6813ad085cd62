"""``mrv1 bench serving``: requests as users send them, with mrv1 and vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.cli.shared import HELP as SHARED
from benchmarks.cli.shared import Output, Shape, chosen_shape, words
from benchmarks.engines.serving import ENGINES, ServingBench, arrivals, run_serving
from benchmarks.report.charts import serving_chart
from benchmarks.report.columns import COLUMNS, console
from benchmarks.report.draw import plot as write_plot
from benchmarks.report.files import ResultFile
from benchmarks.report.rows import serving_rows
from mrv1.calibration.plot import require_matplotlib
from mrv1.cli.console import FAILURE, INTERRUPTED, check_target, say, show_table, write_result
from mrv1.cli.options import FieldsOf, command
from mrv1.errors import ConfigError

HELP = SHARED | {
    "engines": f"What to measure, comma-separated: {', '.join(ENGINES)}. mrv1-fp8: with an fp8 KV "
    "cache.",
    "peak_share": "Let conversations arrive at this share of the first engine's peak: of what it "
    "serves per second when all arrive at once.",
    "goodput": "Limits in milliseconds that a good request meets, such as ttft:500,tpot:50: first "
    "token (ttft), mean time between its tokens (tpot), last token (e2el).",
    "lengths": 'File of recorded lengths to use instead, a line {"input_len": N, "output_len": N} '
    "for each request; the turns of a conversation follow each other.",
    "top_p": "Draw from the likeliest tokens with this probability together.",
    "top_k": "Draw from this many likeliest tokens; -1 = from all.",
}


def _limits(text: str) -> tuple[tuple[str, float], ...]:
    """Return the limits of ``--goodput``.

    Raises:
        ConfigError: a part is not NAME:MILLISECONDS.
    """
    limits = []
    for word in words(text):
        name, _, number = word.partition(":")
        try:
            limits.append((name, float(number)))
        except ValueError as error:
            raise ConfigError(
                f"goodput: expected NAME:MILLISECONDS such as ttft:500, got {word!r}"
            ) from error
    return tuple(limits)


@command
def serving(
    options: Annotated[
        dict[str, Any],
        FieldsOf(
            cls=ServingBench,
            help=HELP,
            parsers={"engines": words, "goodput": _limits, "lengths": Path},
        ),
    ],
    shape: Shape = None,
    output: Output = None,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="PNG file: distributions of the times of tokens."),
    ] = None,
) -> None:
    """Serve requests of different lengths, at a rate or all at once, in conversations or alone.

    Each engine runs in a process of its own, on the same checkpoint and the same requests. Before
    the times, the first tokens of the engines are compared.
    """
    bench = ServingBench(shape=chosen_shape(shape, options), **options)
    check_target("--output", output)
    check_target("--plot", plot)
    if plot is not None:
        require_matplotlib()
    result = run_serving(bench, say)
    write_result(result, output)
    if plot is not None:
        write_plot(serving_chart(ResultFile(plot.name, result)), plot)
        say(f"plotted to {plot}")
    show_table(_table(result))
    for engine, ratios in result["over_vllm"].items():
        for name, ratio in (ratios or {}).items():
            say(f"{engine} over vLLM, {name}: {ratio:.2f}x")
    if result["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if not any(measured["figures"] for measured in result["results"].values()):
        say("error: no engine could be measured")
        raise typer.Exit(FAILURE)


def _table(result: dict[str, Any]) -> Table:
    conditions = result["conditions"]
    return console(
        COLUMNS["serving"],
        serving_rows(result),
        f"{result['shape']} ({result['weights']} weights, {result['dtype']}) on "
        f"{result['device']['name']}: {conditions['num_conversations']} conversations of "
        f"{conditions['num_turns']} turns, {arrivals(result)}",
        f"{conditions['new_input_tokens']:,} input + {conditions['output_tokens']:,} "
        f"output tokens, at most {conditions['max_num_seqs']} requests at a time; medians of "
        f"{conditions['repeats']} runs; times: median / 99th percentile; good requests: within "
        "the limits of --goodput",
    )
