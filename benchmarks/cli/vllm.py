"""``mrv1 bench vllm``: vLLM alone, with mrv1's attention backend or worker, and mrv1 alone."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.cli.shared import HELP as SHARED
from benchmarks.cli.shared import Output, Shape, cells, chosen_shape, counts, words
from benchmarks.engines.vllm import MODES, VLLMBench, run_vllm
from benchmarks.report.columns import COLUMNS, console
from benchmarks.report.rows import cell_rows, mode_rows
from mrv1.cli.console import FAILURE, INTERRUPTED, check_target, say, show_table, write_result
from mrv1.cli.options import FieldsOf, command

HELP = SHARED | {
    "modes": f"What to measure, comma-separated: {', '.join(MODES)}. backend: vLLM with mrv1's "
    "attention; worker: with mrv1's runner and models; -fp8: with an fp8 KV cache; mrv1, "
    "mrv1-deterministic and mrv1-rank-invariant: its own engine, without vLLM. The first one that "
    "starts is what the others are compared with.",
    "cells": "BATCHxPROMPT pairs, such as 1x128,32x8192: concurrent requests, and the tokens of "
    "each prompt.",
}


def _sizes(text: str) -> tuple[int, ...]:
    return counts("vllm_graph_sizes", text) if text else ()


@command
def vllm(
    options: Annotated[
        dict[str, Any],
        FieldsOf(
            cls=VLLMBench,
            help=HELP,
            parsers={"modes": words, "cells": cells, "vllm_graph_sizes": _sizes},
        ),
    ],
    shape: Shape = None,
    output: Output = None,
) -> None:
    """Measure vLLM alone, with mrv1's attention backend, with mrv1's worker, and mrv1 alone.

    Each runs in processes of its own, on the same checkpoint and the same requests. Before the
    times, its first tokens are compared with those of the first mode. Needs vLLM, but for mrv1's
    own engine; on a CPU vLLM runs with the worker only.
    """
    bench = VLLMBench(shape=chosen_shape(shape, options), **options)
    check_target("--output", output)
    result = run_vllm(bench, say)
    write_result(result, output)
    show_table(_modes_table(result))
    show_table(_cells_table(result))
    if result["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if result["reference"] is None:
        say("error: no mode could be measured")
        raise typer.Exit(FAILURE)


def _modes_table(result: dict[str, Any]) -> Table:
    return console(
        COLUMNS["vllm modes"],
        mode_rows(result),
        f"{result['shape']} ({result['weights']} weights, {result['dtype']}) on "
        f"{result['device']['name']}, vLLM {result['peers']['vllm'] or 'not installed'}",
        f"first tokens are compared with those of {result['reference']}; near tie: "
        "rounding can swap the two best tokens",
    )


def _cells_table(result: dict[str, Any]) -> Table:
    conditions = result["conditions"]
    return console(
        COLUMNS["vllm"],
        [*cell_rows(result)],
        "requests x prompt tokens",
        f"{conditions['output_tokens']} output tokens, greedy; medians of "
        f"{conditions['repeats'] * conditions['rounds']} runs"
        f"{', the modes in turns' if conditions['in_turns'] else ''}; first token: median of the "
        "requests; share: memory floor / ms per token; speedup: times as fast as "
        f"{result['reference']}, by tokens/s and by ms per token",
    )
