"""``mrv1 calibrate``: which KV heads of a model may stream."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.table import Table

from mrv1.bench import require_matplotlib
from mrv1.bench.provenance import provenance
from mrv1.calibration import CalibrateOptions, Calibration, calibrate, plot_ranking
from mrv1.cli.bench_kernels import check_target, write_result
from mrv1.cli.console import counting_bar, one_line_errors, say, show_table
from mrv1.config import DtypeName, KVCacheDtypeName
from mrv1.device import resolve_device
from mrv1.errors import ConfigError
from mrv1.headwise.calibrate import Method

LOW_RECALL = 0.5
"""Below it the model itself does not find the facts, and no head can be seen to."""


def calibrate_command(
    model: Annotated[str, typer.Option(help="Checkpoint directory, or 'tiny'.")],
    output: Annotated[
        Path,
        typer.Option(dir_okay=False, help="JSON file for the policy, as --head-policy takes it."),
    ],
    data: Annotated[
        str,
        typer.Option(
            help="UTF-8 text to predict, with facts to recall scattered over it; or 'synthetic': "
            "random words, recall alone."
        ),
    ] = "synthetic",
    budget: Annotated[float, typer.Option(help="Share of the heads that stay full.")] = 0.25,
    window: Annotated[int, typer.Option(help="Tokens that the other heads see.")] = 256,
    sink: Annotated[int, typer.Option(help="Leading tokens that they see as well.")] = 64,
    method: Annotated[
        str,
        typer.Option(
            help="greedy: heads come to stream in rounds, each tried beside those before; single: "
            "each alone, faster, blind to heads that stand in for each other."
        ),
    ] = "greedy",
    num_prompts: Annotated[int, typer.Option(help="Prompts that a loss is measured on.")] = 2,
    num_tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 2048,
    num_facts: Annotated[int, typer.Option(help="Facts, and questions, of each.")] = 32,
    plot: Annotated[
        bool, typer.Option(help="Draw the losses, layers by heads, to a PNG beside --output.")
    ] = True,
    report: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="JSON file: every head's loss, and what was measured."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16, bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Cache the policy is for: auto (the dtype) or fp8_e4m3.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
) -> None:
    """Find the KV heads that need the whole context; the others may stream.

    A streaming head sees --sink leading tokens and the last --window. Heads are ranked by what the
    model loses when they stream, at answers that stand further back than that and, with a text,
    over the text.
    """
    with one_line_errors():
        options = CalibrateOptions(
            model=model,
            data=data,
            budget=budget,
            window=window,
            sink=sink,
            method=cast("Method", method),
            num_prompts=num_prompts,
            num_tokens=num_tokens,
            num_facts=num_facts,
            seed=seed,
            dtype=cast("DtypeName", dtype),
            device=device,
            kv_cache_dtype=cast("KVCacheDtypeName", kv_cache_dtype),
        )
        picture = output.with_suffix(".png")
        check_target("--output", output)
        check_target("--report", report)
        if plot:
            require_matplotlib()
            if picture == output:
                raise ConfigError(f"--output: expected a file other than a .png, got {output}")
        found = _calibrate(options)
        found.policy.save(output)
        say(f"policy written to {output}")
        if plot:
            plot_ranking(found.ranking, found.policy, picture, _title(options))
            say(f"plotted to {picture}")
        write_result(calibration_result(options, found), report)
    if found.full.accuracy < LOW_RECALL:
        say(
            f"warning: with all heads full the model recalls {found.full.accuracy:.0%} of the "
            "facts: what a head is for hardly shows"
        )
    show_table(_table(options, found))


def calibration_result(options: CalibrateOptions, found: Calibration) -> dict[str, Any]:
    """Return everything that was measured, as JSON."""
    settings = dataclasses.asdict(options) | {"data": str(options.data)}
    return {
        "bench": "calibrate",
        **provenance(resolve_device(options.device), None),
        "options": settings,
        "order": [
            {"layer": layer, "head": head, "loss": loss}
            for (layer, head), loss in zip(found.ranking.order, found.ranking.losses, strict=True)
        ],
        "full": dataclasses.asdict(found.full),
        "calibrated": dataclasses.asdict(found.calibrated),
    }


def _calibrate(options: CalibrateOptions) -> Calibration:
    """Calibrate under a progress bar, which begins where that of the weights has ended."""
    progress = counting_bar(transient=False)
    task = progress.add_task("calibrate")

    def show(done: int, total: int) -> None:
        progress.start()
        progress.update(task, completed=done, total=total)

    try:
        return calibrate(options, show)
    finally:
        if progress.live.is_started:
            progress.stop()


def _title(options: CalibrateOptions) -> str:
    name = Path(options.model).name
    return f"{name}, window {options.window} + sink {options.sink}, {options.method}"


def _table(options: CalibrateOptions, found: Calibration) -> Table:
    policy = found.policy
    share = policy.num_tokens_held(options.num_tokens) / (
        options.num_tokens * policy.num_layers * policy.num_kv_heads
    )
    table = Table(
        title=f"{_title(options)}: {policy.full_share:.0%} of the heads full",
        caption=f"{found.full.num_answers} facts that the ranking has not seen; a request of "
        f"{options.num_tokens:,} tokens needs {share:.0%} of the uniform KV cache",
    )
    for heading in ("heads", "recall", "nats/answer", "nats/token of text"):
        table.add_column(heading, justify="left" if heading == "heads" else "right")
    for name, losses in (("all full", found.full), ("policy", found.calibrated)):
        text = "-" if losses.text is None else f"{losses.text:.4f}"
        table.add_row(name, f"{losses.accuracy:.1%}", f"{losses.recall:.4f}", text)
    return table
