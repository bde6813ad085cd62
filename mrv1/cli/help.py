"""Help that cannot be written ends the command as other output does: with a one-line error."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from mrv1.cli.console import writing_stdout


class Command(TyperCommand):
    """A command whose help reports a failed write."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's own types
        """Write the help to stdout."""
        with writing_stdout():
            super().format_help(ctx, formatter)


class Group(TyperGroup):
    """A group of commands whose help reports a failed write."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's own types
        """Write the help to stdout."""
        with writing_stdout():
            super().format_help(ctx, formatter)
