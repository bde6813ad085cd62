"""Progress bars: on stderr because stdout is for results, and only on a terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from rich.console import Console
from rich.progress import Progress, ProgressColumn


class Bar(Protocol):
    """The part of ``tqdm.tqdm`` that mrv1 calls."""

    def update(self, n: int, /) -> object:
        """Count ``n`` more items as done."""

    def close(self) -> object:
        """End the bar."""


UseTqdm = bool | Callable[..., Bar]
"""Whether a bar is shown, or the class (any function of ``total`` and ``desc``) that makes it."""


def progress_bar(
    *columns: str | ProgressColumn, visible: bool = True, transient: bool = True
) -> Progress:
    """Return a bar, shown if ``visible`` on a terminal; ``transient``: erased when it ends."""
    console = Console(stderr=True)
    return Progress(
        *columns,
        console=console,
        disable=not (visible and console.is_terminal),
        transient=transient,
    )


@contextmanager
def counting_items(
    use_tqdm: UseTqdm, description: str, total: int, *, visible: bool = True
) -> Iterator[Callable[[int], object]]:
    """Show how many items are done inside; yield the function that counts more of them.

    ``use_tqdm`` True is a bar of ``progress_bar``, shown if ``visible``, but only in the main
    thread: a terminal has room for one. A class is its bar, in every thread and wherever stderr
    goes.
    """
    if callable(use_tqdm):
        bar = use_tqdm(total=total, desc=description)
        try:
            yield bar.update
        finally:
            bar.close()
        return
    in_main_thread = threading.current_thread() is threading.main_thread()
    with progress_bar(visible=use_tqdm and visible and in_main_thread) as progress:
        yield partial(progress.advance, progress.add_task(description, total=total))
