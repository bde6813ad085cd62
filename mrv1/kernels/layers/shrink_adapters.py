"""The first product of adapters (LoRA): ``scaling * A @ x`` of each token's own adapter.

A tile of 16 tokens has as many programs for each 8 ranks, one for each token that may be the first
in the tile with its adapter: that program multiplies all the tile's tokens with this adapter, and
the others end. So A is read once a tile, however many adapters there are, nothing is sorted, and
the host knows no number. There is one order of additions for any number of tokens.

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
from mrv1.kernels.layers.lora import Adapters

TILE_TOKENS = 16
"""Tokens of a tile, the least that the tensor cores multiply at once."""
TILE_RANKS = 8
"""Ranks of a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkConfig:
    """How a program reads its inputs."""

    tile_tokens: int
    tile_ranks: int
    tile_in: int
    """Inputs of one step: a chain of additions of its own."""
    num_warps: int
    num_stages: int
    """Depth of the pipeline of steps."""

    @classmethod
    @lru_cache(maxsize=64)
    def default_for(cls, num_in: int, dtype: torch.dtype) -> ShrinkConfig:
        """Return the configuration for a GPU, one for any number of tokens; not measured yet."""
        widest = 512 // dtype.itemsize
        return cls(
            tile_tokens=TILE_TOKENS,
            tile_ranks=TILE_RANKS,
            tile_in=min(max(16, triton.next_power_of_2(num_in)), widest),
            num_warps=4,
            num_stages=4,
        )

    @classmethod
    def for_interpreter(cls, num_in: int, max_rank: int) -> ShrinkConfig:
        """Return few large programs."""
        return cls(
            tile_tokens=4,
            tile_ranks=max(8, triton.next_power_of_2(max_rank)),
            tile_in=max(16, triton.next_power_of_2(num_in) // 2),
            num_warps=1,
            num_stages=1,
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_adapters_kernel(
    out_ptr,  # [num_tokens, PARTS * MAX_RANK] float32, contiguous
    x_ptr,  # [num_tokens, IN], unit last stride
    stride_x_token,
    a_ptr,  # [slots, PARTS * MAX_RANK, IN]
    scaling_ptr,  # [slots, PARTS] float32
    ranks_ptr,  # [slots, PARTS] int32
    slots_ptr,  # [num_tokens] int32, -1 = no adapter
    num_tokens,
    IN: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_RANKS: tl.constexpr,
    TILE_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):
    """Grid (PARTS * rank tiles, TILE_TOKENS, token tiles): TILE_RANKS ranks of one adapter."""
    RANK_TILES: tl.constexpr = (MAX_RANK + TILE_RANKS - 1) // TILE_RANKS
    let_next_start(OVERLAP)
    part = tl.program_id(0) // RANK_TILES
    first_rank = (tl.program_id(0) % RANK_TILES) * TILE_RANKS
    leader = tl.program_id(1)
    lane = tl.arange(0, TILE_TOKENS)
    token = tl.program_id(2).to(tl.int64) * TILE_TOKENS + lane
    wait_for_previous(OVERLAP)

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
    if own >= 0:
        rank = tl.load(ranks_ptr + own * PARTS + part)
    index = first_rank + tl.arange(0, TILE_RANKS)
    y = tl.zeros([TILE_TOKENS, TILE_RANKS], tl.float32)
    if first_rank < rank:
        a_rows = a_ptr + (own * (PARTS * MAX_RANK) + part * MAX_RANK + index[:, None]) * IN
        x_rows = x_ptr + token[:, None] * stride_x_token
        is_rank = index[:, None] < rank
        for first in tl.range(0, IN, TILE_IN, num_stages=NUM_STAGES):
            col = first + tl.arange(0, TILE_IN)[None, :]
            a = tl.load(a_rows + col, mask=is_rank & (col < IN), other=0.0)
            x = tl.load(x_rows + col, mask=is_own[:, None] & (col < IN), other=0.0)
            y += tl.dot(x, tl.trans(a), input_precision="ieee")
        y *= tl.load(scaling_ptr + own * PARTS + part)
    out_ptr += token[:, None] * (PARTS * MAX_RANK) + part * MAX_RANK + index[None, :]
    tl.store(out_ptr, y, mask=is_own[:, None] & (index[None, :] < MAX_RANK))


def shrink_adapters(x: torch.Tensor, adapters: Adapters) -> torch.Tensor:
    """Return ``scaling * A @ x`` for each token, with A of the adapter that it uses.

    Args:
        x: ``[tokens, in]`` float32 | float16 | bfloat16, unit last stride.
        adapters: the adapters of a weight with ``in`` inputs, and the slot of each token.

    Returns:
        ``[tokens, parts * max_rank]`` float32; 0 for ranks that a token's adapter does not have,
        and for tokens without one.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: products are summed in float32, in one order for any tokens beside them: a token has
        the same bits alone and among others. The sum is multiplied by ``scaling``, and not rounded
        further. Tier B.
    Stream: one launch on the current stream, no synchronisation, CUDA-graph safe.
    """
    check_tensor("x", x, shape=(None, None), dtype=FLOAT_DTYPES, unit_last_stride=True)
    check_launchable("x", x)
    adapters.check(x, sum(adapters.matrices.part_rows))
    matrices, (num_tokens, num_in) = adapters.matrices, x.shape
    out = x.new_empty((num_tokens, matrices.a.shape[1]), dtype=torch.float32)
    if num_tokens == 0:
        return out
    if INTERPRET:
        config = ShrinkConfig.for_interpreter(num_in, matrices.max_rank)
    else:
        config = ShrinkConfig.default_for(num_in, x.dtype)
    parts = len(matrices.part_rows)
    token_tiles = triton.cdiv(num_tokens, config.tile_tokens)
    rank_tiles = triton.cdiv(matrices.max_rank, config.tile_ranks)
    _shrink_adapters_kernel[(parts * rank_tiles, config.tile_tokens, token_tiles)](
        out,
        *with_strides(x, 1),
        *(matrices.a, matrices.scaling, matrices.ranks, adapters.slots),
        num_tokens=num_tokens,
        IN=num_in,
        PARTS=parts,
        MAX_RANK=matrices.max_rank,
        TILE_TOKENS=config.tile_tokens,
        TILE_RANKS=config.tile_ranks,
        TILE_IN=config.tile_in,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        **overlap_options(x.device),
    )
    return out
