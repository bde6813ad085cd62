"""One KV cache write to measure: its shape, its bytes, random inputs, and the right cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.measure.options import CacheCase
from mrv1.kernels import KVLayout, KVScales, reference

SlotOrder = Literal["tokens", "blocks"]
"""Unit in random order: every slot (``tokens``), as no step writes them; or only the blocks, each
filled token by token, as in a prefill."""

SLOT_BYTES = 8
EPS = 1e-6
BYTE_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Size of an element -> integer type: bytes are compared, and NaN is a pattern like others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCase(CacheCase):
    """One layer's write of ``num_tokens`` tokens, from a fused qkv."""

    num_tokens: int
    slot_order: SlotOrder

    @property
    def bytes_moved(self) -> int:
        """Bytes of K and V read, K, V and their scales stored, and slots read, each once.

        A scale per quarter counts as if the quarters were written as a whole.
        """
        head_bytes = self.head_dim * self.dtype.itemsize
        token_bytes = 2 * self.num_kv_heads * (head_bytes + self.vector_bytes) + SLOT_BYTES
        return round(self.num_tokens * token_bytes)

    @property
    def fused_bytes_moved(self) -> int:
        """``bytes_moved``, plus q read and written and each token's row of angles read."""
        q_bytes = 2 * self.num_q_heads * self.head_dim * self.dtype.itemsize
        angle_bytes = self.head_dim * torch.float32.itemsize
        return self.bytes_moved + self.num_tokens * (q_bytes + angle_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteData:
    """Rotated buffer sets of inputs, each written into its own slots of one cache."""

    case: WriteCase
    qkv: list[torch.Tensor]
    """[tokens, q_heads + 2 * kv_heads, head_dim]."""
    slots: list[torch.Tensor]
    """[1, tokens] int64, over the whole cache in the case's order."""
    cos_sin: torch.Tensor
    """[tokens, head_dim] float32, a row per token: rope rotates the whole head."""
    q_norm: torch.Tensor
    """[head_dim]."""
    k_norm: torch.Tensor
    k_cache: torch.Tensor
    """[blocks, kv_heads, block_size, head_dim], NaN where nothing was written; or codes."""
    v_cache: torch.Tensor
    scales: KVScales | None
    """Scales of codes, NaN where nothing was written; else None."""
    layout: KVLayout

    @property
    def queries(self) -> list[torch.Tensor]:
        """Views [tokens, q_heads, head_dim]."""
        return [qkv[:, : self.case.num_q_heads] for qkv in self.qkv]

    @property
    def keys(self) -> list[torch.Tensor]:
        """Views [tokens, kv_heads, head_dim]."""
        return [qkv[:, self.case.num_q_heads : -self.case.num_kv_heads] for qkv in self.qkv]

    @property
    def values(self) -> list[torch.Tensor]:
        """Views [tokens, kv_heads, head_dim]."""
        return [qkv[:, -self.case.num_kv_heads :] for qkv in self.qkv]

    @property
    def sets(self) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Keys, values and slots of each launch."""
        return zip(self.keys, self.values, self.slots, strict=True)

    def clear(self) -> None:
        """Fill the caches and scales with NaN."""
        scales = () if self.scales is None else (self.scales.k_scale, self.scales.v_scale)
        for buffer in (self.k_cache, self.v_cache, *scales):
            buffer.fill_(torch.nan if buffer.is_floating_point() else 0)


def make_write_data(
    case: WriteCase, num_sets: int, device: torch.device, seed: int = 0
) -> WriteData:
    """Return random inputs and a cache with a slot for each of their tokens."""
    generator = torch.Generator(device).manual_seed(seed)
    num_tokens, num_kv_heads, dim = case.num_tokens, case.num_kv_heads, case.head_dim
    num_heads = case.num_q_heads + 2 * num_kv_heads

    def normal(*shape: int) -> torch.Tensor:
        empty = torch.empty(shape, dtype=case.dtype, device=device)
        return empty.normal_(generator=generator)

    num_blocks = -(-num_tokens * num_sets // case.block_size)
    in_order = num_blocks if case.slot_order == "blocks" else num_blocks * case.block_size
    order = torch.randperm(in_order, generator=generator, device=device)
    if case.slot_order == "blocks":
        offsets = torch.arange(case.block_size, device=device)
        order = (order[:, None] * case.block_size + offsets).flatten()
    stored = case.page_format.stored_dim(dim)
    shape = (num_blocks, num_kv_heads, case.block_size, stored)
    k_cache, v_cache = (
        torch.empty(shape, dtype=case.cache_dtype, device=device) for _ in range(2)
    )
    scales = None
    if case.has_scales:
        per_block = case.page_format.scales_per_block(case.block_size)
        sizes = (num_blocks, num_kv_heads, per_block)
        make = KVScales.per_token if case.kv_scale == "token" else KVScales.per_quarter
        empty = torch.empty(2, *sizes, device=device)
        scales = make(empty[0], empty[1], case.page_format)
    angles = torch.rand((num_tokens, dim // 2), generator=generator, device=device) * torch.pi
    data = WriteData(
        case=case,
        qkv=[normal(num_tokens, num_heads, dim) for _ in range(num_sets)],
        slots=[order[None, i * num_tokens : (i + 1) * num_tokens] for i in range(num_sets)],
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1),
        q_norm=normal(dim),
        k_norm=normal(dim),
        k_cache=k_cache,
        v_cache=v_cache,
        scales=scales,
        layout=KVLayout.hnd(num_kv_heads, case.block_size, dim, device=device),
    )
    data.clear()
    return data


def wrong_elements(data: WriteData, keys: list[torch.Tensor] | None = None) -> int:
    """Return how many elements of caches and scales differ from the exact result, bit for bit.

    Args:
        data: buffers and cache after the writes.
        keys: the written keys, if not ``data.keys``.
    """
    scales = data.scales
    k_scale, v_scale = (None, None) if scales is None else (scales.k_scale, scales.v_scale)
    wrong_in_k = _wrong(data, data.k_cache, k_scale, keys or data.keys)
    return wrong_in_k + _wrong(data, data.v_cache, v_scale, data.values)


def _wrong(
    data: WriteData,
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    inputs: list[torch.Tensor],
) -> int:
    bits = cache.view(BYTE_DTYPE[cache.dtype.itemsize])
    empty = torch.nan if cache.is_floating_point() else 0
    nan = torch.full((1,), empty, dtype=cache.dtype, device=cache.device)
    expected = nan.view(bits.dtype).expand_as(bits).clone()
    expected_scale = None if scale is None else torch.full_like(scale, torch.nan)
    for rows, slots in zip(inputs, data.slots, strict=True):
        blocks, tokens = slots[0] // data.case.block_size, slots[0] % data.case.block_size
        if expected_scale is None:
            expected[blocks, :, tokens] = rows.contiguous().view(bits.dtype)
        else:
            row_scale = data.case.page_format.scale(rows)
            expected_scale[blocks, :, tokens] = row_scale
            codes = data.case.page_format.encode(rows, row_scale)
            expected[blocks, :, tokens] = codes
    wrong = int((bits != expected).sum())
    if scale is not None and expected_scale is not None:
        wrong += int((scale.view(torch.int32) != expected_scale.view(torch.int32)).sum())
    return wrong


def wrong_quarters(data: WriteData) -> int:
    """Return how many elements differ from the oracle's, bit for bit, after one write of each set.

    A scale per quarter and the codes beside it depend on the order of the writes.
    """
    if data.scales is None:
        raise ValueError("data: expected a cache with scales, got none")
    buffers = [data.k_cache, data.v_cache, data.scales.k_scale, data.scales.v_scale]
    got = [buffer.view(BYTE_DTYPE[buffer.itemsize]).clone() for buffer in buffers]
    data.clear()
    for key, value, slots in data.sets:
        reference.kv_cache_write(
            key, value, data.k_cache, data.v_cache, slots, data.layout, scales=data.scales
        )
    return sum(
        int((bits != buffer.view(bits.dtype)).sum())
        for bits, buffer in zip(got, buffers, strict=True)
    )
