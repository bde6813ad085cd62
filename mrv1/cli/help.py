"""Help that cannot be written ends the command as other output does: with a one-line error."""

from __future__ import annotations

import re
from textwrap import shorten
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from mrv1.cli.console import writing_stdout

BRIEF = 46
"""Most letters of an option's help where others are hidden."""


class Command(TyperCommand):
    """A command whose help reports a failed write, and is short if some options are hidden."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's own types
        """Write the help to stdout; beside hidden options, a line or two for each other one."""
        if any(getattr(each, "hidden", False) for each in self.params):
            self.help = (self.help or "").partition("\n\n")[0]
            for each in self.params:
                text = getattr(each, "help", None) or ""
                sentence = re.split(r"[.;] ", text)[0].rstrip(".")
                vars(each)["help"] = shorten(sentence, BRIEF, placeholder="...")
                vars(each)["show_default"] = False
        with writing_stdout():
            super().format_help(ctx, formatter)


def show_all(ctx: typer.Context, wanted: bool) -> None:
    """Show a command's help with its hidden options, and exit; for ``--help-all``."""
    if wanted:
        for each in ctx.command.params:
            vars(each)["hidden"] = False
        with writing_stdout():
            ctx.get_help()
        raise typer.Exit


class Group(TyperGroup):
    """A group of commands whose help reports a failed write."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's own types
        """Write the help to stdout."""
        with writing_stdout():
            super().format_help(ctx, formatter)
