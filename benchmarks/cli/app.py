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
from benchmarks.cli.kernels import Output
from benchmarks.engines.generate import GenerateBench, run_generate
from benchmarks.engines.runner import RunnerBench, run_runner
from benchmarks.measure.shapes import SHAPES
from mrv1.cli.console import say, second_interrupt_ends, show_table
from mrv1.cli.help import Command, Group
from mrv1.cli.options import MODEL_HELP, FieldsOf, command
from mrv1.cli.results import check_target, write_result
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

DEFAULT_SHAPE = "qwen3-0.6b"
CPU_SHAPE = "tiny-random"
ON_CPU = {"batches": (1, 4), "waiting": (0, 100)}

Shape = Annotated[
    str | None,
    typer.Option(
        help=f"Model shape to run with random weights: {', '.join(SHAPES)}. "
        f"Default without --model: {DEFAULT_SHAPE} (bench runner on a CPU: tiny-random)."
    ),
]
NAMES = {"batches": "batch"}
HELP = {
    "model": f"Model to run instead of --shape. {MODEL_HELP}",
    "prompt_tokens": "Tokens of each prompt.",
    "enable_prefix_caching": "Reuse cached blocks of equal prefixes; random prompts have none.",
    "commit": "Commit to record in the result. Default: from git.",
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
    if shape is None and "model" not in options:
        shape = DEFAULT_SHAPE
    bench = GenerateBench(shape=shape, **options)
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
    if shape is None and "model" not in options:
        shape = DEFAULT_SHAPE if on_gpu else CPU_SHAPE
    bench = RunnerBench(shape=shape, **({} if on_gpu else ON_CPU) | options)
    check_target("--output", output)
    result = run_runner(bench, say)
    write_result(result, output)
    show_table(_step_table(result))
    show_table(_host_table(result))
    if on_gpu:
        show_table(_trace_table(result))
    else:
        say("on a CPU a launch is the computation itself: no trace, and times mean nothing")


def _generate_table(result: dict[str, Any]) -> Table:
    conditions = result["conditions"]
    table = Table(
        title=_title(result),
        caption=f"{conditions['prompt_tokens']} prompt + {conditions['output_tokens']} output "
        f"tokens, {conditions['sampling']}; medians of {conditions['repeats']} runs; "
        f"{_engine(result)}; engine started in {result['start']['seconds']:.1f} s",
    )
    for heading in (
        "batch", "tokens/s", "ms/decode step", "host ms", "GPU ms", "floor ms", "share",
        "prefill ms",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for entry in result["results"]:
        table.add_row(
            str(entry["batch"]),
            f"{entry['tokens_per_s']:,.1f}",
            f"{entry['decode_step_ms']:.2f}",
            _optional(entry["host_ms"], "{:.3f}"),
            _optional(entry["gpu_ms"], "{:.2f}"),
            _optional(entry["floor_ms"], "{:.2f}"),
            _optional(entry["share_of_floor"], "{:.0%}"),
            f"{entry['prefill_ms']:.1f}",
        )
    return table


def _step_table(result: dict[str, Any]) -> Table:
    conditions = result["conditions"]
    table = Table(
        title=_title(result),
        caption=f"{conditions['prompt_tokens']} prompt tokens, then {conditions['steps']} steady "
        f"decode steps, medians; {_engine(result)}; deterministic, logprobs: ms/step with them "
        "over the default's",
    )
    for heading in ("batch", "ms/step", "p20", "p80", "GPU ms", "deterministic", "logprobs"):
        table.add_column(heading, justify="right")
    for entry in result["results"]:
        table.add_row(
            str(entry["batch"]),
            f"{entry['step_ms']:.3f}",
            f"{entry['step_p20_ms']:.3f}",
            f"{entry['step_p80_ms']:.3f}",
            _optional(entry["gpu_ms"], "{:.3f}"),
            _optional(entry["deterministic_over_default"], "{:.2f}x"),
            _optional(entry["logprobs_over_default"], "{:.2f}x"),
        )
    return table


def _trace_table(result: dict[str, Any]) -> Table:
    table = Table(
        title="a step in the profiler's trace",
        caption="idle: share of the time without GPU work; between: its part between launches; "
        "then counts per step: graphs, kernels outside graphs, copies, waits for an event, others",
    )
    for heading in (
        "batch", "us", "idle", "between", "graphs", "kernels", "HtoD", "DtoH",
        "event", "other",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for entry in result["results"]:
        trace = entry["trace"]
        table.add_row(
            str(entry["batch"]),
            f"{trace['step_us']:,.0f}",
            f"{trace['idle_share']:.1%}",
            f"{trace['idle_between_launches_share']:.1%}",
            *(
                f"{trace[name]:.2f}"
                for name in (
                    "graph_launches", "kernel_launches",
                    "host_to_device_copies", "device_to_host_copies", "event_waits", "other_waits",
                )
            ),
        )  # fmt: skip
    return table


def _host_table(result: dict[str, Any]) -> Table:
    table = Table(title="host us per step", caption="medians, without waits for the device")
    for heading in (
        "batch", "waiting", "total", "mean", "quietest", "schedule", "execute", "read", "update",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for entry in [*(entry | {"waiting": None} for entry in result["results"]), *result["waiting"]]:
        host = entry["host"]
        table.add_row(
            str(entry["batch"]),
            _optional(entry["waiting"], "{:,}"),
            *(
                f"{host[name]:.1f}"
                for name in (
                    "total_us", "mean_total_us", "quietest_us", "schedule_us", "execute_us",
                    "read_us", "update_us",
                )
            ),
        )  # fmt: skip
    return table


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
        for name, usual in (("deterministic", False), ("overlap", True), ("cuda_graphs", True))
        if conditions[name] != usual
    )
    return (
        f"KV cache {conditions['kv_cache_dtype']}, attention by "
        f"{conditions['attention_backend']}{unusual}"
    )


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
