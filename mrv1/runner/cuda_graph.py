"""Steps as CUDA graphs: a few shapes, padded up to; decodes, and steps with prompts in them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

import torch

from mrv1.progress import progress_bar
from mrv1.runner.input_batch import InputBatch
from mrv1.runner.rows import StepShape

Forwarded = tuple[InputBatch, torch.Tensor]
"""A step's rows, and the hidden states behind its last layer."""

SMALL_DECODE = 32
"""Rows of one token that a step with prompts has room for if it has no more than these."""


def decode_sizes(max_num_reqs: int) -> list[int]:
    """Return the rows of captured decodes: 1, 2, 4, 8, every 8th to 64, every 32nd beyond."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_reqs, 32)]
    return [*(size for size in sizes if size < max_num_reqs), max_num_reqs]


def prompt_sizes(max_num_tokens: int) -> list[int]:
    """Return the prompt tokens of captured steps: powers of two from 16, and half-way from 256."""
    powers = [1 << bit for bit in range(4, max_num_tokens.bit_length() + 1)]
    sizes = sorted([*powers, *(size * 3 // 2 for size in powers if size >= 256)])
    return [*(size for size in sizes if size < max_num_tokens), max_num_tokens]


class StepGraphs:
    """Captured steps. All share one pool of memory, as only one runs at a time.

    What a graph reads and writes stays where it was at capture: the runner's state, caches,
    weights, the fetched upload and the ring of outputs. A step of decodes is padded to one of
    ``decode_sizes``; there is a graph of the whole step, and one that ends before the logits. A
    step with prompts has room for none, a few or all of the rows of one token (they come first),
    and behind them for one of ``prompt_sizes`` in prompt tokens.

    Args:
        max_num_reqs: most rows of a step.
        max_num_tokens: most tokens of a step.
        max_query_len: most tokens of a row.
    """

    def __init__(self, max_num_reqs: int, max_num_tokens: int, max_query_len: int) -> None:
        self._max_num_reqs = max_num_reqs
        self._max_query_len = max_query_len
        self._decode_sizes = decode_sizes(max_num_reqs)
        self._prompt_sizes = prompt_sizes(max_num_tokens)
        self._decodes_beside = sorted({0, min(SMALL_DECODE, max_num_reqs), max_num_reqs})
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Forwarded | None]] = {}

    @property
    def shapes(self) -> list[StepShape]:
        """Every shape that is captured, the largest of each kind first."""
        prompts = [
            self._with_prompts(decodes, tokens)
            for tokens in reversed(self._prompt_sizes)
            for decodes in reversed(self._decodes_beside)
        ]
        decodes = [
            StepShape.decode(size, samples=samples)
            for samples in (True, False)
            for size in reversed(self._decode_sizes)
        ]
        return [*prompts, *decodes]

    @property
    def largest(self) -> list[StepShape]:
        """The shapes of which one takes most memory: the others share it."""
        return [
            self._with_prompts(self._decodes_beside[-1], self._prompt_sizes[-1]),
            StepShape.decode(self._decode_sizes[-1]),
        ]

    def _with_prompts(self, num_decodes: int, num_prompt_tokens: int) -> StepShape:
        return StepShape(
            num_rows=num_decodes + min(num_prompt_tokens, self._max_num_reqs),
            num_tokens=num_decodes + num_prompt_tokens,
            max_query_len=min(num_prompt_tokens, self._max_query_len),
            query_len=None,
            num_decodes=num_decodes,
        )

    def capture(
        self,
        shapes: Iterable[StepShape],
        run: Callable[[StepShape], Forwarded | None],
        *,
        progress: bool,
    ) -> None:
        """Capture steps, the largest first, so that the others fit into its memory.

        Args:
            shapes: of ``self.shapes``.
            run: launches a step of padding of that shape and returns what ``replay`` is to
                return; it is called twice for each, first to compile, then to capture.
            progress: show a progress bar.
        """
        # cuBLAS keeps a workspace for each stream, and all captures run on one: these graphs
        # must not use what belongs to another pool. torch names its release only privately.
        torch._C._cuda_clearCublasWorkspaces()
        pool = torch.cuda.graph_pool_handle()
        shapes = list(shapes)
        with progress_bar(visible=progress) as bar:
            task = bar.add_task("capture CUDA graphs", total=len(shapes))
            for shape in shapes:
                run(shape)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    forwarded = run(shape)
                self._graphs[shape] = graph, forwarded
                bar.advance(task)

    def fit(self, shape: StepShape) -> StepShape | None:
        """Return the captured shape that a step is padded to; None if there is none."""
        if shape.has_drafts or not self._graphs:
            return None
        if shape.query_len == 1:
            size = _least(self._decode_sizes, shape.num_rows)
            return None if size is None else StepShape.decode(size, samples=shape.samples)
        if not shape.samples:
            return None
        num_decodes = _least(self._decodes_beside, shape.num_decodes)
        num_prompt_tokens = _least(self._prompt_sizes, shape.num_tokens - shape.num_decodes)
        if num_decodes is None or num_prompt_tokens is None:
            return None
        return self._with_prompts(num_decodes, num_prompt_tokens)

    def replay(self, shape: StepShape) -> Forwarded | None:
        """Launch the step of a captured shape on the current stream.

        Returns:
            What the sampling takes, if the graph does not do it: valid until another graph runs.
        """
        graph, forwarded = self._graphs[shape]
        graph.replay()
        return forwarded


def _least(sizes: list[int], size: int) -> int | None:
    """Return the least of some sizes in order that is no less than one."""
    at = bisect_left(sizes, size)
    return sizes[at] if at < len(sizes) else None
