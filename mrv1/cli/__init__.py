"""The ``mrv1`` command, whose subcommands import torch and so are imported when they run."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main

from mrv1 import __version__
from mrv1.cli.console import Command, Group, show

COMMANDS = {
    "generate": ("generate.generate", "Continue a prompt, or every prompt of a JSONL file."),
    "chat": (
        "chat.chat",
        "Talk with a model. /help lists the commands; Ctrl-C stops an answer, Ctrl-D ends.",
    ),
    "calibrate": (
        "calibrate.calibrate_command",
        "Find the KV heads that need the whole context; the others may stream.",
    ),
    "policy": ("policy.app", "Show, make and compare head policies."),
    "compile": (
        "compile.compile_command",
        "Compile the kernels of a model ahead of its first start, for a container image.",
    ),
    "doctor": (
        "doctor.doctor",
        "Show versions, GPUs and the implementation of each part of a step; warn of problems.",
    ),
    "bench": ("bench.app", "Measure kernels, steps and engines on this machine (in a checkout)."),
}
"""Command -> its function or its group in ``mrv1.cli``, and the first line of its help."""

SERVE = (
    "mrv1 has no server; with vLLM installed: vllm serve MODEL --worker-cls "
    "mrv1.integrations.vllm.Worker --logits-processors mrv1.integrations.vllm:RequestCheck"
)


class LazyGroup(Group):
    """The group of all commands; it imports the module of the command that runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401 - a private class of typer
        """Return the command that ``args`` name, with its options, and the other arguments."""
        if args[0] == "serve":
            ctx.fail(SERVE)
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else _loaded(name), rest


def _loaded(name: str) -> Any:  # noqa: ANN401 - a private class of typer
    module, _, attribute = COMMANDS[name][0].partition(".")
    found = getattr(import_module(f"{__name__}.{module}"), attribute)
    if not isinstance(found, typer.Typer):
        command, found = found, typer.Typer(add_completion=False)
        found.command(name, cls=Command)(command)
    return typer.main.get_command(found)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="A Triton-first GPU model runner for LLM inference.",
)


def _not_loaded() -> None:
    """Stand in for a command whose module is not imported: the help shows its name and line."""


for _name, (_, _help) in COMMANDS.items():
    app.command(_name, help=_help)(_not_loaded)


def _print_version(wanted: bool) -> None:
    if wanted:
        show(f"mrv1 {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show version."),
    ] = False,
) -> None:
    """Hold the one option that all commands share: ``--version``."""
