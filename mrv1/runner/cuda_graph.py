"""Decode steps as CUDA graphs: one for each size of batch, padded up to the next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.progress import Progress


def decode_buckets(max_num_reqs: int) -> list[int]:
    """Return the batch sizes that are captured: 1, 2, 4, 8, every 8th to 64, every 32nd beyond."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_reqs, 32)]
    return [*(size for size in sizes if size < max_num_reqs), max_num_reqs]


class DecodeGraphs:
    """Captured decode steps. All share one pool of memory, as only one runs at a time.

    What a graph reads and writes stays where it was at capture: the runner's state, caches,
    weights, the static upload and the ring of outputs.
    """

    def __init__(self, buckets: Sequence[int]) -> None:
        self.buckets = sorted(buckets)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._kept: dict[int, object] = {}

    def capture(self, run: Callable[[int], object], *, progress: bool) -> None:
        """Capture every bucket, the largest first, so that the others fit into its memory.

        Args:
            run: launches a decode step of so many rows, all of them padding; it is called twice
                for each bucket, first to compile, then to capture.
            progress: show a progress bar.
        """
        # cuBLAS keeps a workspace for each stream, and all captures run on one: these graphs
        # must not use what belongs to another pool. torch names its release only privately.
        torch._C._cuda_clearCublasWorkspaces()
        pool = torch.cuda.graph_pool_handle()
        console = Console(stderr=True)
        with Progress(console=console, disable=not progress, transient=True) as bar:
            task = bar.add_task("capture CUDA graphs", total=len(self.buckets))
            for size in reversed(self.buckets):
                run(size)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._kept[size] = run(size)  # a graph does not keep what it was captured on
                self._graphs[size] = graph
                bar.advance(task)

    def bucket(self, num_rows: int) -> int | None:
        """Return the smallest captured size of at least so many rows; None if there is none."""
        at = bisect_left(self.buckets, num_rows)
        return self.buckets[at] if at < len(self.buckets) else None

    def replay(self, bucket: int) -> None:
        """Launch the step of a captured size on the current stream."""
        self._graphs[bucket].replay()
