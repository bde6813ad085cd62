"""``mrv1 bench``: its subcommands. The subcommands that run a whole engine are here."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.cli import headwise as bench_headwise
from benchmarks.cli import kernels as bench_kernels
from benchmarks.cli import report as bench_report
from benchmarks.cli import sampler as bench_sampler
from benchmarks.cli import serving as bench_serving
from benchmarks.cli import vllm as bench_vllm
from benchmarks.cli.shared import DEFAULT_SHAPE, Output, Shape, chosen_shape
from benchmarks.cli.shared import HELP as SHARED
from benchmarks.engines.generate import GenerateBench, run_generate
from benchmarks.engines.runner import RunnerBench, run_runner
from benchmarks.engines.timeline import FloorBench, run_floor
from benchmarks.report.columns import COLUMNS, console
from benchmarks.report.rows import host_rows, layer_rows
from mrv1.cli.console import (
    Command,
    Group,
    check_target,
    say,
    second_interrupt_ends,
    show_table,
    write_result,
)
from mrv1.cli.options import FieldsOf, command
from mrv1.device import resolve_device

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    help="Measure kernels, steps and engines on this machine.",
)

app.command("attention", cls=Command)(bench_kernels.attention)
app.command("kv-write", cls=Command)(bench_kernels.kv_write)
app.command("sampler", cls=Command)(bench_sampler.sampler)
app.command("capacity", cls=Command)(bench_headwise.capacity)
app.command("headwise", cls=Command)(bench_headwise.headwise)
app.command("serving", cls=Command)(bench_serving.serving)
app.command("vllm", cls=Command)(bench_vllm.vllm)
app.command("report", cls=Command)(bench_report.report)

CPU_SHAPE = "tiny-random"
ON_CPU = {"batches": (1, 4), "waiting": (0, 100)}

NAMES = {"batches": "batch"}
HELP = SHARED | {
    "prompt_tokens": "Tokens of each prompt.",
    "enable_prefix_caching": "Reuse cached blocks of equal prefixes; random prompts have none.",
}


@app.callback()
def main(context: typer.Context) -> None:
    """Let a second Ctrl-C end every benchmark at once."""
    context.with_resource(second_interrupt_ends())


@app.command("generate", cls=Command)
@command
def generate(
    options: Annotated[dict[str, Any], FieldsOf(cls=GenerateBench, names=NAMES, help=HELP)],
    shape: Shape = None,
    output: Output = None,
) -> None:
    """Measure whole-engine generation: tokens/s and the time of a decode step."""
    bench = GenerateBench(shape=chosen_shape(shape, options), **options)
    check_target("--output", output)
    result = run_generate(bench, say)
    write_result(result, output)
    show_table(_generate_table(result))


@app.command("runner", cls=Command)
@command
def runner(
    options: Annotated[dict[str, Any], FieldsOf(cls=RunnerBench, names=NAMES, help=HELP)],
    shape: Shape = None,
    output: Output = None,
) -> None:
    """Measure a steady decode step: host time, launches, copies, waits, idle time of the GPU.

    In a steady step the same requests decode as in the step before it. On a CPU the defaults are
    small: shape tiny-random, batches of 1 and 4, 0 and 100 waiting requests.
    """
    on_gpu = resolve_device(options["device"]).type == "cuda"
    shape = chosen_shape(shape, options, DEFAULT_SHAPE if on_gpu else CPU_SHAPE)
    bench = RunnerBench(shape=shape, **({} if on_gpu else ON_CPU) | options)
    check_target("--output", output)
    result = run_runner(bench, say)
    write_result(result, output)
    for table in _runner_tables(result):
        show_table(table)
    if not on_gpu:
        say("on a CPU a launch is the computation itself: no trace, and times mean nothing")


@app.command("floor", cls=Command)
@command
def floor(
    options: Annotated[dict[str, Any], FieldsOf(cls=FloorBench, names=NAMES, help=HELP)],
    shape: Shape = None,
    output: Output = None,
) -> None:
    """Record decode steps: each phase's bytes, time and share of the floor, and one layer."""
    bench = FloorBench(shape=chosen_shape(shape, options), **options)
    check_target("--output", output)
    result = run_floor(bench, say)
    write_result(result, output)
    for each in result["results"]:
        title = f"batch {each['batch']}: {each['step_us']:.0f} us a step"
        show_table(console(COLUMNS["floor"], each["phases"], title, _engine(result)))
        show_table(console(COLUMNS["floor layer"], layer_rows(each["layer"]), "one layer", ""))


def _generate_table(result: dict[str, Any]) -> Table:
    conditions = result["conditions"]
    return console(
        COLUMNS["generate"],
        result["results"],
        _title(result),
        f"{conditions['prompt_tokens']} prompt + {conditions['output_tokens']} output "
        f"tokens, {conditions['sampling']}; medians of {conditions['repeats']} runs; "
        f"{_engine(result)}; engine started in {result['start']['seconds']:.1f} s",
    )


def _runner_tables(result: dict[str, Any]) -> list[Table]:
    """Return the tables of steps, of the host's times, and on a GPU of the profiler's trace."""
    conditions, rows = result["conditions"], result["results"]
    batch, *columns = COLUMNS["runner"]
    traced = [each for each in columns if each.key.startswith("trace.")]
    steps = console(
        [batch, *(each for each in columns if each not in traced)],
        rows,
        _title(result),
        f"{conditions['prompt_tokens']} prompt tokens, then {conditions['steps']} steady decode "
        f"steps, medians; {_engine(result)}; deterministic, rank-invariant, log-probabilities: ms "
        "per step with them over the default's",
    )
    hosts = console(
        COLUMNS["runner host"],
        host_rows(result),
        "host us per step",
        "medians, without waits for the device",
    )
    if rows[0]["trace"] is None:
        return [steps, hosts]
    trace = console(
        [batch, *traced],
        rows,
        "a step in the profiler's trace",
        "idle: share of the time without GPU work; between: its part between launches; then "
        "counts per step: copies, graphs, kernels outside graphs, waits for an event, others",
    )
    return [steps, hosts, trace]


def _title(result: dict[str, Any]) -> str:
    return (
        f"{result['shape']} ({result['weights']} weights, {result['dtype']}) on "
        f"{result['device']['name']}, {result['path']} path"
    )


def _engine(result: dict[str, Any]) -> str:
    """Return the engine's conditions for a caption; options off their defaults are named."""
    conditions = result["conditions"]
    unusual = "".join(
        f", {name}={conditions[name]}"
        for name, usual in (
            ("deterministic", False),
            ("rank_invariant", False),
            ("overlap", True),
            ("cuda_graphs", True),
        )
        if conditions.get(name, usual) != usual
    )
    return (
        f"KV cache {conditions['kv_cache_dtype']}, attention by "
        f"{conditions['attention_backend']}{unusual}"
    )
