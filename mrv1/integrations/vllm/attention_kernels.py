"""The kernels of attention in vLLM, compiled before a request needs them.

vLLM's warm-up prefills prompts of two tokens. Longer prompts have other kernels, and the compiler
would take seconds of the first requests. So every kernel that a batch may need is launched at the
start. A child process compiles them (``AttentionKernels``) from the loading of the weights on,
when vLLM compiles the rest of the model.

Nothing here imports vLLM: the child needs none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from mrv1.device import DeviceInfo, kernel_path
from mrv1.integrations.vllm.attention_pages import Pages, pages_of
from mrv1.kernels import DecodePlan, HeadRole, PrefillSplits
from mrv1.kernels.attention.prefill.choice import choose_launch, prefills_of_each
from mrv1.kernels.registry import select_ops
from mrv1.runner.compile_ahead import (
    AheadCompiler,
    compile_from_stdin,
    digest_of,
    start_compiling,
    wait_or_warn,
)
from mrv1.runner.stand_in_device import stand_in_gpu

if TYPE_CHECKING:
    from mrv1.kernels._base.recording import KernelRecorder

NO_BLOCK = NO_SLOT = -1

MAX_QUERY_LEN = 8
"""Most queries per row of ``paged_decode_attention``."""


class Batches(NamedTuple):
    """What bounds the batches of an engine."""

    max_model_len: int
    max_num_reqs: int
    max_num_tokens: int
    row_width: int
    """Columns of the block table."""
    decode_query_len: int
    """Tokens of a row that verifies as many drafts as there may be; 1 = rows have no drafts."""
    dtype: torch.dtype
    """Of queries."""


def decode_rows(
    num_reqs: int,
    num_tokens: int,
    max_query_len: int,
    query_start_loc: npt.NDArray[np.int32],
    decode_query_len: int,
) -> tuple[int, int]:
    """Return how many leading rows are decoded, and the queries of each.

    Args:
        num_reqs: rows, padding included.
        num_tokens: tokens, padding included.
        max_query_len: of any row.
        query_start_loc: ``[num_reqs + 1]``, on the host; only rows of padding are empty, and they
            come last.
        decode_query_len: see ``Batches``. Rows of other lengths are prompts, or have fewer drafts.
    """
    if max_query_len == 1 and num_tokens == num_reqs:
        return num_reqs, 1
    if num_tokens == num_reqs * max_query_len and max_query_len == decode_query_len:
        full, rest = divmod(int(query_start_loc[-1]), max_query_len)
        uniform = np.minimum(np.arange(num_reqs + 1), full) * max_query_len
        if rest == 0 and np.array_equal(query_start_loc, uniform):
            return num_reqs, max_query_len
    longer = query_start_loc[1:] != np.arange(1, num_reqs + 1)
    return (int(longer.argmax()) if longer.any() else num_reqs), 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """What decides on the kernels of an attention layer, beside its batches."""

    num_heads: int
    head_size: int
    role: HeadRole
    """What all heads see."""
    is_fp8: bool
    softmax_scale: float
    logits_soft_cap: float
    """0 = none."""

    def pages(self, kv_cache: torch.Tensor) -> Pages:
        """Return the pages of the layer's cache."""
        return pages_of(kv_cache, self.head_size, self.role, is_fp8=self.is_fp8)


class BoundLayer(NamedTuple):
    """A layer with its tensors. Launches of padding neither read nor write its cache."""

    layer: AttentionLayer
    kv_cache: torch.Tensor
    sinks: torch.Tensor | None
    """[num_heads], its logit sinks; None = it has none."""


def launch_write(bound: BoundLayer, batches: Batches) -> None:
    """Launch the kernel that writes to a layer's cache, whatever the number of tokens."""
    layer, kv_cache, _ = bound
    pages, device = layer.pages(kv_cache), kv_cache.device
    shape = 1, pages.layout.num_kv_heads, layer.head_size
    padding = torch.full((1, 1), NO_SLOT, dtype=torch.int64, device=device)
    key = torch.zeros(shape, dtype=batches.dtype, device=device)
    select_ops(kernel_path(device)).kv_cache_write(
        key, key, pages.k, pages.v, padding, pages.layout, scales=pages.scales
    )


def launch_every_prefill(bound: BoundLayer, batches: Batches) -> None:
    """Launch each kernel of a layer that may prefill a batch, on queries that see no keys."""
    layer, kv_cache, sinks = bound
    pages, device, dtype = layer.pages(kv_cache), kv_cache.device, batches.dtype
    ops = select_ops(kernel_path(device))
    choice = partial(
        choose_launch, pages.layout, pages.layout, dtype, layer.is_fp8, layer.num_heads
    )
    for lengths in prefills_of_each(
        choice,
        shortest=2,
        max_query_len=batches.max_model_len,
        max_reqs=batches.max_num_reqs,
        max_tokens=batches.max_num_tokens,
    ):
        num_reqs, num_tokens = len(lengths), sum(lengths)
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        no_blocks = torch.full((num_reqs, batches.row_width), NO_BLOCK, dtype=torch.int32)
        q = torch.zeros(num_tokens, layer.num_heads, layer.head_size, dtype=dtype, device=device)
        ops.paged_prefill_attention(
            q,
            pages.k,
            pages.v,
            block_table=no_blocks.to(device),
            query_start_loc=starts.to(device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
            layout=pages.layout,
            softmax_scale=layer.softmax_scale,
            max_query_len=max(lengths),
            logits_soft_cap=layer.logits_soft_cap,
            sinks=sinks,
            scales=pages.scales,
            splits=PrefillSplits.allocate(
                num_tokens=num_tokens,
                num_reqs=num_reqs,
                max_query_len=max(lengths),
                layout=pages.layout,
                num_q_heads=layer.num_heads,
                dtype=dtype,
                is_fp8=layer.is_fp8,
            ),
        )


def launch_every_decode(bound: BoundLayer, batches: Batches) -> None:
    """Launch each kernel of a layer that may decode, on rows of padding."""
    layer, kv_cache, sinks = bound
    pages, device, dtype = layer.pages(kv_cache), kv_cache.device, batches.dtype
    ops = select_ops(kernel_path(device))
    most, width = batches.max_num_reqs, batches.row_width
    no_blocks = torch.full((most, width), NO_BLOCK, dtype=torch.int32, device=device)
    no_keys = torch.zeros(most, dtype=torch.int32, device=device)
    for query_len in dict.fromkeys((1, batches.decode_query_len)):
        q = torch.zeros(
            most * query_len, layer.num_heads, layer.head_size, dtype=dtype, device=device
        )
        out = torch.empty_like(q)
        for num_reqs in range(1, most + 1):
            plan = DecodePlan.allocate(
                max_reqs=num_reqs,
                max_keys=width * pages.layout.block_size,
                layout=pages.layout,
                num_q_heads=layer.num_heads,
                dtype=dtype,
                query_len=query_len,
                is_fp8=layer.is_fp8,
            )
            ops.plan_decode_attention(no_keys[:num_reqs], pages.layout, plan)
            ops.paged_decode_attention(
                q[: num_reqs * query_len],
                pages.k,
                pages.v,
                block_table=no_blocks[:num_reqs],
                seq_lens=no_keys[:num_reqs],
                layout=pages.layout,
                softmax_scale=layer.softmax_scale,
                query_len=query_len,
                logits_soft_cap=layer.logits_soft_cap,
                sinks=sinks,
                plan=plan,
                out=out[: num_reqs * query_len],
                scales=pages.scales,
            )


class _Memory(NamedTuple):
    """What a tensor has beside its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Memory:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernels:
    """All that decides which kernels a start launches for some layers."""

    child: ClassVar[str] = __name__

    layers: tuple[tuple[AttentionLayer, _Memory, _Memory | None], ...]
    """Different ones, each with its cache and its sinks."""
    batches: Batches
    gpu: DeviceInfo

    @classmethod
    def of(cls, layers: Sequence[BoundLayer], batches: Batches, gpu: DeviceInfo) -> Self:
        """Return the kernels of layers, each with a cache of any number of blocks and sinks."""
        forms = (
            (layer, _Memory.of(kv_cache[:2]), None if sinks is None else _Memory.of(sinks))
            for layer, kv_cache, sinks in layers
        )
        return cls(layers=tuple(dict.fromkeys(forms)), batches=batches, gpu=gpu)

    @property
    def digest(self) -> str:
        """Name of the kernels in Triton's cache."""
        return digest_of(self.gpu, self.layers, self.batches)

    def record(self) -> KernelRecorder:
        """Return the kernels; this process cannot use a GPU afterwards."""
        with stand_in_gpu(self.gpu) as (recorder, device):
            for layer, kv_cache, sinks in self.layers:
                empty_sinks = None if sinks is None else sinks.empty(device)
                bound = BoundLayer(layer, kv_cache.empty(device), empty_sinks)
                launch_write(bound, self.batches)
                launch_every_prefill(bound, self.batches)
                launch_every_decode(bound, self.batches)
        return recorder


def main() -> None:
    """Compile the kernels that come as a pickle on stdin; report progress on stdout."""
    compile_from_stdin(AttentionKernels.record)


class Compilation:
    """A child process that compiles kernels, unless Triton's cache has them."""

    def __init__(self, kernels: AttentionKernels, num_processes: int | None) -> None:
        """Begin.

        Args:
            kernels: the kernels.
            num_processes: most processes that compile at the same time; None = one for every core.
        """
        self._child: AheadCompiler | None = start_compiling(kernels, num_processes)

    def finish(self) -> None:
        """Wait until all kernels are compiled, or warn why they are not; again: do nothing."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            wait_or_warn(child, lambda done, total: None)
        finally:
            child.stop()
