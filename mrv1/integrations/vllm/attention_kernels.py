"""The kernels of attention in vLLM, compiled before a request needs them; imports no vLLM.

vLLM's warm-up prefills prompts of two tokens; kernels of longer ones would be compiled for seconds
in the first requests. So all are launched at the start, compiled by a child process meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from mrv1.device import DeviceInfo
from mrv1.integrations.vllm.attention_layer import (
    AttentionLayer,
    BoundLayer,
    DecodeRows,
    PrefillRows,
)
from mrv1.kernels.attention.prefill.choice import choose_launch, prefills_of_each
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
    decode_query_len: int
    """Tokens of a row that verifies as many drafts as there may be; 1 = rows have no drafts."""
    dtype: torch.dtype


def decode_rows(
    num_reqs: int,
    num_tokens: int,
    max_query_len: int,
    query_start_loc: npt.NDArray[np.int32],
    decode_query_len: int,
) -> tuple[int, int]:
    """Return how many leading rows are decoded, and the queries of each.

    Rows, tokens and ``query_start_loc [num_reqs + 1]``, which is on the host, include padding:
    only its rows are empty, and they come last. Rows of other lengths than 1 and
    ``decode_query_len`` (see ``Batches``) are prompts, or have fewer drafts.
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


def launch_write(bound: BoundLayer, batches: Batches) -> None:
    """Launch the kernel that writes to a layer's cache, whatever the number of tokens."""
    layer, device = bound.layer, bound.kv_cache.device
    padding = torch.full((1,), NO_SLOT, dtype=torch.int64, device=device)
    shape = 1, bound.pages.layout.num_kv_heads, layer.head_size
    key = torch.zeros(shape, dtype=batches.dtype, device=device)
    bound.write(padding, key, key)


def launch_every_prefill(bound: BoundLayer, batches: Batches) -> None:
    """Launch each kernel of a layer that may prefill a batch, on queries that see no keys."""
    layer, layout = bound.layer, bound.pages.layout
    device, dtype = bound.kv_cache.device, batches.dtype
    prefills = bound.prefills(dtype)
    choice = partial(choose_launch, prefills, prefills)
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
        rows = PrefillRows(
            first_token=0,
            end_token=num_tokens,
            block_table=no_blocks.to(device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
            query_start_loc=starts.to(device),
            max_query_len=max(lengths),
            splits={id(layout): bound.allocate_splits(num_reqs, num_tokens, max(lengths), dtype)},
        )
        bound.prefill(rows, q, torch.empty_like(q))


def launch_every_decode(bound: BoundLayer, batches: Batches) -> None:
    """Launch each kernel of a layer that may decode, on rows of padding."""
    layer, device, dtype = bound.layer, bound.kv_cache.device, batches.dtype
    most, width = batches.max_num_reqs, batches.row_width
    no_blocks = torch.full((most, width), NO_BLOCK, dtype=torch.int32, device=device)
    no_keys = torch.zeros(most, dtype=torch.int32, device=device)
    for query_len in dict.fromkeys((1, batches.decode_query_len)):
        q = torch.zeros(
            most * query_len, layer.num_heads, layer.head_size, dtype=dtype, device=device
        )
        out = torch.empty_like(q)
        for num_reqs in range(1, most + 1):
            rows = DecodeRows(
                num_tokens=num_reqs * query_len,
                query_len=query_len,
                block_table=no_blocks[:num_reqs],
                seq_lens=no_keys[:num_reqs],
                plans={
                    id(bound.pages.layout): bound.allocate_plan(num_reqs, query_len, width, dtype)
                },
            )
            bound.plan(rows)
            bound.decode(rows, q[: rows.num_tokens], out[: rows.num_tokens])


def launch_all(bound: BoundLayer, batches: Batches) -> None:
    """Launch every kernel of a layer; neither reads nor writes its cache."""
    launch_write(bound, batches)
    launch_every_prefill(bound, batches)
    launch_every_decode(bound, batches)


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
            (
                each.layer,
                _Memory.of(each.kv_cache[:2]),
                None if each.sinks is None else _Memory.of(each.sinks),
            )
            for each in layers
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
                launch_all(bound, self.batches)
        return recorder


def main() -> None:
    """Compile the kernels that come as a pickle on stdin; report progress on stdout."""
    compile_from_stdin(AttentionKernels.record)


class Compilation:
    """A child process that compiles kernels, unless Triton's cache has them."""

    def __init__(self, kernels: AttentionKernels, num_processes: int | None) -> None:
        """Begin; ``num_processes`` is as in ``start_compiling``."""
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
