"""``mrv1 calibrate``: which KV heads of a model may stream."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from mrv1.calibration import CalibrateOptions, Calibration, calibrate, plot_ranking
from mrv1.calibration.plot import require_matplotlib
from mrv1.cli.console import (
    check_target,
    counting_bar,
    counting_lines,
    say,
    second_interrupt_ends,
    show_table,
    write_result,
)
from mrv1.cli.options import MODEL_HELP, FieldsOf, command
from mrv1.device import resolve_device
from mrv1.errors import ConfigError
from mrv1.provenance import provenance

LOW_RECALL = 0.5
"""Below this recall the full model does not find the facts, so no head can show its share."""


@command
@second_interrupt_ends()
def calibrate_command(
    settings: Annotated[
        dict[str, Any], FieldsOf(cls=CalibrateOptions, help={"model": MODEL_HELP})
    ],
    output: Annotated[
        Path, typer.Option(dir_okay=False, help="JSON file for the policy, read by --head-policy.")
    ],
    plot: Annotated[
        bool, typer.Option(help="Plot the losses, layers by heads, to a PNG beside --output.")
    ] = True,
    report: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="JSON file: the ranking, of which `mrv1 policy make` cuts a policy for any "
            "budget, and all measurements.",
        ),
    ] = None,
) -> None:
    """Find the KV heads that need the whole context; the others may stream.

    A streaming head sees the first --sink tokens and the last --window tokens. Heads are ranked by
    how much the model's loss rises when they stream. The loss counts answers to questions about
    facts outside the window and, if --data is a text file, the text too.
    """
    options = CalibrateOptions(**settings)
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
            "facts: too few to show what a head is for"
        )
    show_table(_table(options, found))


def calibration_result(options: CalibrateOptions, found: Calibration) -> dict[str, Any]:
    """Return everything that was measured, as JSON."""
    settings = dataclasses.asdict(options) | {"data": str(options.data)}
    return {
        "bench": "calibrate",
        **provenance(resolve_device(options.device), None),
        "options": settings,
        "ranking": found.ranking.to_json(),
        "full": dataclasses.asdict(found.full),
        "calibrated": dataclasses.asdict(found.calibrated),
    }


def _calibrate(options: CalibrateOptions) -> Calibration:
    """Calibrate under a progress bar, which starts after that of the weights, or with lines."""
    progress = counting_bar(transient=False)
    if progress.disable:
        return calibrate(options, counting_lines("calibrate", "passes of a prompt"))
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
    share = policy.cache_share(options.num_tokens)
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
