"""Rotary position embedding, in place on queries and keys.

Pair ``i`` of a head at position ``p`` turns by an angle of ``p`` and ``i``. Row ``p`` of a table
holds the cosines of all pairs, then their sines::

    (a, b) -> (a cos - b sin, b cos + a sin)

The pair is (x[i], x[i + rotary_dim / 2]) in GPT-NeoX order and (x[2i], x[2i + 1]) interleaved;
elements past ``rotary_dim`` stay. Source: Su et al., "RoFormer" (2021), section 3.4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import (
    FLOAT_DTYPES,
    check_launchable,
    check_rotary_dim,
    check_tensor,
)
from mrv1.kernels._base.triton import INTERPRET, tl, triton


class Heads(NamedTuple):
    """Queries or keys, [tokens, num_heads, head_dim]."""

    ptr: tl.tensor  # unit last stride, updated
    stride_token: tl.tensor
    stride_head: tl.tensor
    num_heads: tl.tensor


class Turn(NamedTuple):
    """The tokens of a program, and the angle by which each of their pairs turns."""

    token: tl.tensor  # [TILE_TOKENS, 1, 1] int64
    is_token: tl.tensor  # [TILE_TOKENS, 1, 1]
    cos: tl.tensor  # [TILE_TOKENS, 1, TILE_PAIRS] float32
    sin: tl.tensor
    num_pairs: tl.tensor


@triton.jit
def _rotate(heads, turn, INTERLEAVED: tl.constexpr, TILE_HEADS: tl.constexpr):
    """Turn every pair of TILE_TOKENS tokens in all heads."""
    token, is_token, cos, sin, num_pairs = turn
    TILE_TOKENS: tl.constexpr = cos.shape[0]
    TILE_PAIRS: tl.constexpr = cos.shape[2]
    head = tl.arange(0, TILE_HEADS)[None, :, None]
    in_head = is_token & (head < heads.num_heads)
    row_ptr = heads.ptr + token * heads.stride_token + head * heads.stride_head
    pair = tl.arange(0, TILE_PAIRS)[None, None, :]
    if INTERLEAVED:  # one contiguous load, then even and odd elements apart
        col = tl.arange(0, 2 * TILE_PAIRS)[None, None, :]
        in_pairs = in_head & (col < 2 * num_pairs)
        x = tl.load(row_ptr + col, mask=in_pairs, other=0.0)
        a, b = tl.split(tl.reshape(x, [TILE_TOKENS, TILE_HEADS, TILE_PAIRS, 2]))
        a, b = a.to(tl.float32), b.to(tl.float32)
        turned = tl.join(a * cos - b * sin, b * cos + a * sin)
        turned = tl.reshape(turned, [TILE_TOKENS, TILE_HEADS, 2 * TILE_PAIRS])
        tl.store(row_ptr + col, turned.to(x.dtype), mask=in_pairs)
    else:
        in_pairs = in_head & (pair < num_pairs)
        first_ptr, second_ptr = row_ptr + pair, row_ptr + num_pairs + pair
        first = tl.load(first_ptr, mask=in_pairs, other=0.0)
        a = first.to(tl.float32)
        b = tl.load(second_ptr, mask=in_pairs, other=0.0).to(tl.float32)
        tl.store(first_ptr, (a * cos - b * sin).to(first.dtype), mask=in_pairs)
        tl.store(second_ptr, (b * cos + a * sin).to(first.dtype), mask=in_pairs)


@triton.jit(do_not_specialize=["num_tokens"])
def _apply_rope_kernel(
    q_ptr, stride_q_token,  # [num_tokens, num_q_heads, head_dim], unit last stride, updated
    stride_q_head,
    k_ptr, stride_k_token,  # [num_tokens, num_kv_heads, head_dim], unit last stride, updated
    stride_k_head,
    cos_sin_ptr,  # [max_positions, 2 * num_pairs] float32: cosines, then sines
    positions_ptr,  # [num_tokens] int64
    num_tokens, num_q_heads, num_kv_heads, num_pairs,
    INTERLEAVED: tl.constexpr, TILE_TOKENS: tl.constexpr,
    TILE_Q_HEADS: tl.constexpr,  # power of two >= num_q_heads
    TILE_KV_HEADS: tl.constexpr,  # power of two >= num_kv_heads
    TILE_PAIRS: tl.constexpr,  # power of two >= num_pairs
):  # fmt: skip
    """Grid (cdiv(num_tokens, TILE_TOKENS),): one program turns all heads of TILE_TOKENS tokens."""
    token = tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)[:, None, None]
    is_token = token < num_tokens
    pair = tl.arange(0, TILE_PAIRS)[None, None, :]
    has_angle = is_token & (pair < num_pairs)
    position = tl.load(positions_ptr + token, mask=is_token, other=0)
    angle_ptr = cos_sin_ptr + position * (2 * num_pairs) + pair
    cos = tl.load(angle_ptr, mask=has_angle, other=0.0)
    sin = tl.load(angle_ptr + num_pairs, mask=has_angle, other=0.0)
    turn = Turn(token, is_token, cos, sin, num_pairs)
    queries = Heads(q_ptr, stride_q_token, stride_q_head, num_q_heads)
    _rotate(queries, turn, INTERLEAVED, TILE_Q_HEADS)
    keys = Heads(k_ptr, stride_k_token, stride_k_head, num_kv_heads)
    _rotate(keys, turn, INTERLEAVED, TILE_KV_HEADS)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How the rotation is cut into programs."""

    tile_tokens: int  # tokens of one program
    num_warps: int

    @classmethod
    @lru_cache(maxsize=256)
    def default_for(cls, num_q_heads: int, rotary_dim: int) -> RopeConfig:
        """Return the configuration for a GPU: one token per program, for parallel small decodes.

        A thread should turn eight pairs: in a 16-bit dtype one 16-byte load of each half.
        """
        pairs = triton.next_power_of_2(num_q_heads) * triton.next_power_of_2(rotary_dim // 2)
        return cls(tile_tokens=1, num_warps=min(max(pairs // 256, 1), 16))

    @classmethod
    def for_interpreter(cls, num_tokens: int, num_q_heads: int, rotary_dim: int) -> RopeConfig:
        """Return one program for everything, up to 2^18 pairs."""
        pairs = triton.next_power_of_2(num_q_heads) * triton.next_power_of_2(rotary_dim // 2)
        tile_tokens = min(triton.next_power_of_2(num_tokens), max(1, 2**18 // pairs))
        return cls(tile_tokens, num_warps=1)


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Turn ``q`` and ``k`` in place by the angles of their positions.

    Args:
        q: [tokens, q_heads, head_dim] float32 | float16 | bfloat16, unit last stride (a view of a
            fused projection will do), *written*.
        k: [tokens, kv_heads, head_dim], q's dtype, unit last stride, *written*.
        cos_sin: [max_positions, rotary_dim] float32, contiguous: rotary_dim / 2 cosines, then the
            sines; rotary_dim is even and at most head_dim.
        positions: [tokens] int64, contiguous, in [0, max_positions): not checked on the device.
        interleaved: pairs are neighbours (2i, 2i + 1), not halves (i, i + rotary_dim / 2).

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: float32 inside, rounded once. Tier B.
    Stream: current stream, no synchronisation, CUDA-graph safe.
    """
    _check(q, k, cos_sin, positions)
    num_tokens, num_q_heads, _ = q.shape
    num_kv_heads, rotary_dim = k.shape[1], cos_sin.shape[1]
    if num_tokens == 0:
        return
    if INTERPRET:
        config = RopeConfig.for_interpreter(num_tokens, num_q_heads, rotary_dim)
    else:
        config = RopeConfig.default_for(num_q_heads, rotary_dim)
    _apply_rope_kernel[(triton.cdiv(num_tokens, config.tile_tokens),)](
        *with_strides(q), *with_strides(k), cos_sin, positions,
        num_tokens, num_q_heads, num_kv_heads, rotary_dim // 2,
        INTERLEAVED=interleaved, TILE_TOKENS=config.tile_tokens,
        TILE_Q_HEADS=triton.next_power_of_2(num_q_heads),
        TILE_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        TILE_PAIRS=triton.next_power_of_2(rotary_dim // 2), num_warps=config.num_warps,
    )  # fmt: skip


def _check(
    q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
) -> None:
    check_tensor("q", q, shape=(None, None, None), dtype=FLOAT_DTYPES, unit_last_stride=True)
    check_launchable("q", q)
    num_tokens, num_q_heads, head_dim = q.shape
    check = partial(check_tensor, device=q.device)
    check("k", k, shape=(num_tokens, None, head_dim), dtype=q.dtype, unit_last_stride=True)
    if num_q_heads == 0 or k.shape[1] == 0:
        raise ValueError(f"q, k: expected at least one head, got {num_q_heads} and {k.shape[1]}")
    check("cos_sin", cos_sin, shape=(None, None), dtype=torch.float32, contiguous=True)
    check_rotary_dim("cos_sin", cos_sin, head_dim)
    check("positions", positions, shape=(num_tokens,), dtype=torch.int64, contiguous=True)
