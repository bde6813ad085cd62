"""Steps as CUDA graphs of a few shapes, which steps are padded to: decodes, and with prompts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import torch

from mrv1.progress import progress_bar
from mrv1.runner.input_batch import SampledRows
from mrv1.runner.rows import StepShape, Tail

Forwarded = tuple[SampledRows, torch.Tensor]
"""A step's rows, and the hidden states of its tokens after the last layer."""

SMALL_DECODE = 32
"""A graph with prompts has room for 0, this many or ``max_num_reqs`` rows of one token."""


def decode_sizes(max_num_reqs: int) -> list[int]:
    """Return the rows of captured decodes: 1, 2, 4, multiples of 8 up to 64, of 32 beyond."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_reqs, 32)]
    return [*(size for size in sizes if size < max_num_reqs), max_num_reqs]


def prompt_sizes(max_num_tokens: int) -> list[int]:
    """Return the prompt tokens of captured steps: 16, 32, 64, 128, 256, 384, 512, 768, ..."""
    powers = [1 << bit for bit in range(4, max_num_tokens.bit_length() + 1)]
    sizes = sorted([*powers, *(size * 3 // 2 for size in powers if size >= 256)])
    return [*(size for size in sizes if size < max_num_tokens), max_num_tokens]


class StepGraphs:
    """Captured steps. All graphs share one pool of memory, because only one runs at a time.

    What a graph reads or writes stays where it was at capture. A decode step is padded to one of
    ``decode_sizes``. Each size has a graph of the whole step, one that ends before the logits with
    a graph for each ``Tail`` that may follow, and with drafts one in which rows have up to
    ``max_drafts``. A graph with prompts has room for 0, ``SMALL_DECODE`` or all rows of one token,
    which come first, and then for one of ``prompt_sizes`` prompt tokens. It ends before the
    logits, as its launch takes little of its time: any sampling may follow. ``max_query_len`` is
    the most tokens of a row. With ``has_adapters`` each has a twin with adapters, for steps in
    which some request has one. Without ``draws`` no graph draws: custom processors are no part of
    a graph.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_num_tokens: int,
        max_query_len: int,
        max_drafts: int = 0,
        *,
        has_adapters: bool = False,
        draws: bool = True,
    ) -> None:
        self._max_drafts = max_drafts if draws else 0
        self._draws = draws
        self._has_adapters = has_adapters
        self._max_num_reqs = max_num_reqs
        self._max_query_len = max_query_len
        self._decode_sizes = decode_sizes(max_num_reqs)
        self.prompt_sizes = tuple(prompt_sizes(max_num_tokens))
        """Prompt tokens of the graphs with prompts, in rising order."""
        self._decodes_beside = sorted({0, min(SMALL_DECODE, max_num_reqs), max_num_reqs})
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Forwarded | None]] = {}
        self._tails: dict[tuple[StepShape, Tail], torch.cuda.CUDAGraph] = {}
        self._numbers: dict[StepShape | tuple[StepShape, Tail], int] = {}
        self._numbered: list[tuple[torch.cuda.CUDAGraph, Forwarded | None]] = []
        """Every graph, in the order of capture, which is that of all ranks."""

    @property
    def shapes(self) -> list[StepShape]:
        """Every shape that is captured, the largest of each kind first."""
        prompts = [
            self._with_prompts(decodes, tokens)
            for tokens in reversed(self.prompt_sizes)
            for decodes in reversed(self._decodes_beside)
        ]
        decodes = [
            StepShape.decode(size, samples=samples)
            for samples in (True, False)[not self._draws :]
            for size in reversed(self._decode_sizes)
        ]
        return self._twins([*prompts, *self._of_drafts, *decodes])

    @property
    def largest(self) -> list[StepShape]:
        """The largest shape of each kind: the memory of their graphs is enough for all graphs."""
        plain = [
            self._with_prompts(self._decodes_beside[-1], self.prompt_sizes[-1]),
            *([StepShape.decode(self._decode_sizes[-1])] if self._draws else []),
            StepShape.decode(self._decode_sizes[-1], samples=False),
            *self._of_drafts[:1],
        ]
        return self._twins(plain)

    def _twins(self, plain: list[StepShape]) -> list[StepShape]:
        """Return shapes, each after its twin with adapters, which needs more memory."""
        if not self._has_adapters:
            return plain
        return [
            replace(shape, has_adapters=has_adapters)
            for shape in plain
            for has_adapters in (True, False)
        ]

    @property
    def _of_drafts(self) -> list[StepShape]:
        if not self._max_drafts:
            return []
        sizes = reversed(self._decode_sizes)
        return [StepShape.decode(size, self._max_drafts) for size in sizes]

    def _with_prompts(self, num_decodes: int, num_prompt_tokens: int) -> StepShape:
        return StepShape(
            num_rows=num_decodes + min(num_prompt_tokens, self._max_num_reqs),
            num_tokens=num_decodes + num_prompt_tokens,
            max_query_len=min(num_prompt_tokens, self._max_query_len),
            query_len=None,
            num_decodes=num_decodes,
            samples=False,
        )

    def capture(
        self,
        shapes: Iterable[StepShape],
        run: Callable[[StepShape], Forwarded | None],
        sample: Callable[[Forwarded, Tail], None],
        tails: Callable[[StepShape], Sequence[Tail]],
        *,
        progress: bool,
    ) -> None:
        """Capture a graph of each shape, the largest first: the others fit into its memory.

        ``run`` launches a step of padding of a shape and returns what ``replay`` is to return;
        ``sample`` launches the sampling after a step of ``run`` that does not sample. Each is
        called twice, first to compile, then to capture. ``tails`` are what ``sample`` captures.
        """
        # cuBLAS keeps a workspace for each stream, and all captures run on one stream. These
        # graphs must not use a workspace in the memory pool of other graphs: free it first.
        # Torch has only a private call to free a workspace.
        torch._C._cuda_clearCublasWorkspaces()
        # Requests that come in meanwhile pin their features in other threads: with the default
        # mode, CUDA would refuse those calls and end the capture.
        captured = partial(
            torch.cuda.graph,
            pool=torch.cuda.graph_pool_handle(),
            capture_error_mode="thread_local",
        )
        shapes = list(shapes)
        with progress_bar(visible=progress) as bar:
            task = bar.add_task("capture CUDA graphs", total=len(shapes))
            for shape in shapes:
                forwarded = run(shape)
                if forwarded is not None:  # a capture leaves no values that could be sampled
                    for tail in tails(shape):
                        sample(forwarded, tail)
                graph = torch.cuda.CUDAGraph()
                with captured(graph):
                    forwarded = run(shape)
                self._graphs[shape] = graph, forwarded
                if forwarded is not None:
                    for tail in tails(shape):
                        self._tails[shape, tail] = graph = torch.cuda.CUDAGraph()
                        with captured(graph):
                            sample(forwarded, tail)
                bar.advance(task)
        self._numbers = dict(zip((*self._graphs, *self._tails), count()))
        self._numbered = [*self._graphs.values(), *((tail, None) for tail in self._tails.values())]

    def __bool__(self) -> bool:
        """Whether any graph is captured."""
        return bool(self._graphs)

    def clear(self) -> None:
        """Drop every graph, whoever still refers to one."""
        for graph, _ in self._numbered:
            graph.reset()
        self._tails.clear()
        self._graphs.clear()
        self._numbers.clear()
        self._numbered.clear()

    def fit(self, shape: StepShape) -> StepShape | None:
        """Return the captured shape that a step is padded to; None if no graph fits."""
        if not self._graphs:
            return None
        plain = self._fit_plain(shape)
        if plain is None or not shape.has_adapters:
            return plain
        return replace(plain, has_adapters=True)

    def _fit_plain(self, shape: StepShape) -> StepShape | None:
        """Return the shape that a step is padded to, without adapters; None if none fits."""
        if shape.has_drafts or shape.query_len == 1:
            size = _least(self._decode_sizes, shape.num_rows)
            num_drafts = self._max_drafts if shape.has_drafts else 0
            is_captured = shape.query_len == 1 + num_drafts and (shape.samples or not num_drafts)
            if size is None or not is_captured:
                return None
            return StepShape.decode(size, num_drafts, samples=shape.samples)
        num_decodes = _least(self._decodes_beside, shape.num_decodes)
        num_prompt_tokens = _least(self.prompt_sizes, shape.num_tokens - shape.num_decodes)
        if num_decodes is None or num_prompt_tokens is None:
            return None
        return self._with_prompts(num_decodes, num_prompt_tokens)

    def replay(self, shape: StepShape) -> Forwarded | None:
        """Launch the graph of a captured shape on the current stream.

        Returns what ``sample`` needs, unless the graph samples, until a graph but its tail runs.
        """
        graph, forwarded = self._graphs[shape]
        graph.replay()
        return forwarded

    def number(self, shape: StepShape, tail: Tail | None = None) -> int:
        """Return the number of the graph of ``replay`` or ``replay_tail``, alike on every rank."""
        return self._numbers[shape if tail is None else (shape, tail)]

    def shape_of(self, number: int) -> StepShape:
        """Return the shape of the graph of a number of ``replay``."""
        return [*self._graphs][number]

    def replay_number(self, number: int) -> Forwarded | None:
        """Launch the graph of a number; returns as ``replay``, and None for a tail."""
        graph, forwarded = self._numbered[number]
        graph.replay()
        return forwarded

    def fit_tail(self, shape: StepShape, least: Tail) -> Tail | None:
        """Return the captured sampling after ``shape`` that does all of ``least``; None = none."""
        for tail in (least, least._replace(masks=True)):  # a row without a mask may draw any token
            if (shape, tail) in self._tails:
                return tail
        return None

    def replay_tail(self, shape: StepShape, tail: Tail) -> None:
        """Launch the sampling after ``replay`` of a shape that does not sample."""
        self._tails[shape, tail].replay()


def _least(sizes: Sequence[int], size: int) -> int | None:
    """Return the least of the sorted ``sizes`` that is at least ``size``; None if none is."""
    at = bisect_left(sizes, size)
    return sizes[at] if at < len(sizes) else None
