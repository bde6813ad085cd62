"""Progress bars: on stderr, as stdout is for results, and on a terminal alone."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, ProgressColumn


def progress_bar(
    *columns: str | ProgressColumn, visible: bool = True, transient: bool = True
) -> Progress:
    """Return a progress bar that is shown where stderr is a terminal.

    Args:
        columns: of the bar; none = rich's own.
        visible: False shows nothing anywhere.
        transient: whether the bar is erased at its end.
    """
    console = Console(stderr=True)
    return Progress(
        *columns,
        console=console,
        disable=not (visible and console.is_terminal),
        transient=transient,
    )
