"""The first product of adapters (LoRA): ``scaling * A @ x`` of each token's own adapter.

A tile of 16 tokens has as many programs for each 16 ranks and part of the inputs, one for each
token that may be the first in the tile with its adapter: that program multiplies all the tile's
tokens with this adapter, and the others end. So A is read once a tile, however many adapters there
are, nothing is sorted, and the host knows no number. A is asked for before the previous kernel has
ended. The sums of the parts of the inputs are added up by whoever reads them. There is one order
of additions for any number of tokens.

Source: Chen et al., "Punica: Multi-Tenant LoRA Serving" (2023), for products of different adapters
in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.layers.lanes import sum_of_warps
from mrv1.kernels.layers.lora import Adapters

TILE_TOKENS = 16
"""Tokens of a tile, the least that the tensor cores multiply at once."""
TILE_RANKS = 16
"""Most ranks of a program."""
MOST_SPLITS = 8
"""Most parts of the inputs."""
LEAST_IN = 512
"""Least inputs of a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkConfig:
    """How A is cut into programs."""

    tile_tokens: int
    tile_ranks: int
    tile_in: int
    """Inputs that a program multiplies at once: all loads start before it waits for any."""
    steps: int  # tiles of inputs that a program multiplies, one after the other
    splits: int  # parts of the inputs, each of ``steps * tile_in``; a power of two, up to 16
    num_warps: int  # they share a tile's inputs

    @classmethod
    @lru_cache(maxsize=64)
    def default_for(cls, num_in: int, max_rank: int, dtype: torch.dtype) -> ShrinkConfig:
        """Return the configuration for a GPU, one for any number of tokens.

        On an H100 the products of an 8B layer with an adapter of rank 16 take 210 us at 32 tokens,
        and 320 us where a program has 8 ranks and all inputs.
        """
        split_in = max(LEAST_IN, triton.next_power_of_2(triton.cdiv(num_in, MOST_SPLITS)))
        splits = triton.next_power_of_2(triton.cdiv(num_in, split_in))
        tile_in = min(split_in, 2048 if dtype.itemsize == 2 else 256)
        return cls(
            tile_tokens=TILE_TOKENS,
            tile_ranks=min(TILE_RANKS, max(8, triton.next_power_of_2(max_rank))),
            tile_in=tile_in,
            steps=split_in // tile_in,
            splits=splits,
            num_warps=4 if tile_in <= 1024 else 8,
        )

    @classmethod
    def for_interpreter(cls, num_in: int, max_rank: int) -> ShrinkConfig:
        """Return few large programs."""
        return cls(
            tile_tokens=4,
            tile_ranks=max(8, triton.next_power_of_2(max_rank)),
            tile_in=max(64, triton.next_power_of_2(num_in) // 4),
            steps=2,
            splits=2,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_adapters_kernel(
    out_ptr,  # [num_tokens, PARTS * MAX_RANK, SPLITS] float32, contiguous
    x_ptr, stride_x_token,  # [num_tokens, IN], unit last stride
    a_ptr,  # [slots, PARTS * MAX_RANK, IN]
    scaling_ptr,  # [slots, PARTS] float32
    ranks_ptr,  # [slots, PARTS] int32
    slots_ptr,  # [num_tokens] int32, -1 = no adapter
    num_tokens,
    IN: tl.constexpr, PARTS: tl.constexpr, MAX_RANK: tl.constexpr, TILE_TOKENS: tl.constexpr,
    TILE_RANKS: tl.constexpr, TILE_IN: tl.constexpr, STEPS: tl.constexpr, SPLITS: tl.constexpr,
    WARPS: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (PARTS * rank tiles * SPLITS, TILE_TOKENS, token tiles): ranks of one adapter."""
    RANK_TILES: tl.constexpr = (MAX_RANK + TILE_RANKS - 1) // TILE_RANKS
    WARP_IN: tl.constexpr = TILE_IN // WARPS
    let_next_start(OVERLAP)
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    part, first_rank = tile // RANK_TILES, (tile % RANK_TILES) * TILE_RANKS
    leader = tl.program_id(1)
    lane = tl.arange(0, TILE_TOKENS)
    token = tl.program_id(2).to(tl.int64) * TILE_TOKENS + lane
    is_token = token < num_tokens
    slot = tl.load(slots_ptr + token, mask=is_token, other=-1)
    is_leader = (lane == leader) & is_token
    if tl.max(is_leader.to(tl.int32)) == 0:
        return
    own = tl.sum(tl.where(lane == leader, slot, 0)).to(tl.int64)
    is_own = (slot == own) & is_token
    if tl.max((is_own & (lane < leader)).to(tl.int32)) == 1:  # another program has the adapter
        return
    rank = 0
    scaling = 0.0
    if own >= 0:
        rank = tl.load(ranks_ptr + own * PARTS + part)
        scaling = tl.load(scaling_ptr + own * PARTS + part).to(tl.float32)
    index = first_rank + tl.arange(0, TILE_RANKS)
    warp_col = tl.arange(0, WARPS)[:, None, None] * WARP_IN + tl.arange(0, WARP_IN)[None, None, :]
    first = split * (STEPS * TILE_IN)
    a_rows = a_ptr + (own * (PARTS * MAX_RANK) + part * MAX_RANK + index[None, :, None]) * IN
    x_rows = x_ptr + token[None, :, None] * stride_x_token
    is_rank, is_x = (index < rank)[None, :, None], is_own[None, :, None]
    if first_rank >= rank:
        is_x = is_x & (lane < 0)[None, :, None]
    a = tl.load(a_rows + (first + warp_col), mask=is_rank & (first + warp_col < IN), other=0.0)
    wait_for_previous(OVERLAP)

    y = tl.zeros([WARPS, TILE_TOKENS, TILE_RANKS], tl.float32)
    x = tl.load(x_rows + (first + warp_col), mask=is_x & (first + warp_col < IN), other=0.0)
    y = tl.dot(x, tl.permute(a, (0, 2, 1)), y, input_precision="ieee")
    for step in tl.range(1, STEPS, num_stages=1):
        col = first + step * TILE_IN + warp_col
        a = tl.load(a_rows + col, mask=is_rank & (col < IN), other=0.0)
        x = tl.load(x_rows + col, mask=is_x & (col < IN), other=0.0)
        y = tl.dot(x, tl.permute(a, (0, 2, 1)), y, input_precision="ieee")
    sums = sum_of_warps(y, WARPS, TILE_TOKENS, TILE_RANKS) * scaling
    row = token[:, None] * (PARTS * MAX_RANK) + part * MAX_RANK + index[None, :]
    is_stored = is_own[:, None] & (index < MAX_RANK)[None, :]
    tl.store(out_ptr + row * SPLITS + split, sums, mask=is_stored)


def shrink_adapters(
    x: torch.Tensor, adapters: Adapters, *, keep_splits: bool = False
) -> torch.Tensor:
    """Return ``scaling * A @ x`` for each token, with A of the adapter that it uses.

    Args:
        x: ``[tokens, in]`` float32 | float16 | bfloat16, unit last stride.
        adapters: the adapters of a weight with ``in`` inputs, and the slot of each token. Slots,
            ranks, scalings and A are read before earlier launches have ended: none that may still
            run may write them.
        keep_splits: whether the caller adds up the sums of parts of the inputs, neighbours first,
            as ``add_adapters`` does.

    Returns:
        ``[tokens, parts * max_rank]`` float32; 0 for ranks that a token's adapter does not have,
        and for tokens without one. With ``keep_splits`` ``[tokens, parts * max_rank, splits]``;
        splits are a power of two and follow from ``in`` and dtype alone.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: products are summed in float32, in one order for any tokens beside them: a token has
        the same bits alone and among others. Sums are multiplied by ``scaling``, and not rounded
        further. Tier B.
    Stream: one launch on the current stream, without ``keep_splits`` a few more that add up; no
        synchronisation, CUDA-graph safe.
    """
    check_tensor("x", x, shape=(None, None), dtype=FLOAT_DTYPES, unit_last_stride=True)
    check_launchable("x", x)
    adapters.check(x, sum(adapters.matrices.part_rows))
    matrices, (num_tokens, num_in) = adapters.matrices, x.shape
    if INTERPRET:
        config = ShrinkConfig.for_interpreter(num_in, matrices.max_rank)
    else:
        config = ShrinkConfig.default_for(num_in, matrices.max_rank, x.dtype)
    shape = (num_tokens, matrices.a.shape[1], config.splits)
    out = x.new_empty(shape, dtype=torch.float32)
    if num_tokens:
        _launch(out, x, adapters, config)
    if keep_splits:
        return out
    while out.shape[2] > 1:
        out = out[..., 0::2] + out[..., 1::2]
    return out[..., 0]


def _launch(out: torch.Tensor, x: torch.Tensor, adapters: Adapters, config: ShrinkConfig) -> None:
    matrices, (num_tokens, num_in) = adapters.matrices, x.shape
    parts = len(matrices.part_rows)
    token_tiles = triton.cdiv(num_tokens, config.tile_tokens)
    rank_tiles = triton.cdiv(matrices.max_rank, config.tile_ranks)
    grid = (parts * rank_tiles * config.splits, config.tile_tokens, token_tiles)
    _shrink_adapters_kernel[grid](
        out, *with_strides(x, 1), matrices.a, matrices.scaling, matrices.ranks, adapters.slots,
        num_tokens=num_tokens, IN=num_in, PARTS=parts, MAX_RANK=matrices.max_rank,
        TILE_TOKENS=config.tile_tokens, TILE_RANKS=config.tile_ranks, TILE_IN=config.tile_in,
        STEPS=config.steps, SPLITS=config.splits, WARPS=config.num_warps,
        num_warps=config.num_warps, **overlap_options(x.device),
    )  # fmt: skip
