"""Progress bars: on stderr because stdout is for results, and only on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, ProgressColumn


def progress_bar(
    *columns: str | ProgressColumn, visible: bool = True, transient: bool = True
) -> Progress:
    """Return a progress bar that is shown where stderr is a terminal.

    Args:
        columns: columns of the bar; none = rich's default columns.
        visible: False = show no bar, not even on a terminal.
        transient: whether the bar is erased when it ends.
    """
    console = Console(stderr=True)
    return Progress(
        *columns,
        console=console,
        disable=not (visible and console.is_terminal),
        transient=transient,
    )
