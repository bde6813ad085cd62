"""The linear layer of some tokens, in tiles: weights are the left operand of the tensor cores.

The left operand needs 64 rows; the right operand, the tokens, may be as narrow as 16. Weights with
few rows are also split along the inputs, so that enough programs load them; the splits' sums go to
a float32 buffer, and a second kernel adds them in order.

A deterministic sum (``SumOrder``) is a tree of leaves, of which a program has a subtree: splits
and tiles of tokens and rows change no bit. A leaf of several chains has a step for each. In
float32, where every step is a chain, the bits follow from ``tile_in`` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.layers.linear_call import LinearCall, Rows
from mrv1.kernels.layers.linear_splits import empty_sums
from mrv1.kernels.layers.lora_values import adapter_values
from mrv1.kernels.layers.silu import gated
from mrv1.kernels.layers.sum_order import CHAIN_IN, SumOrder

LARGE = 2**23
"""Weights, by their number, from which the tiles of few tokens are those of large weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """How weights and tokens are cut into programs, and a program's inputs into steps."""

    tile_tokens: int  # tokens of one program
    tile_rows: int
    """Rows of weights of one program: one result per token each, or half gates and half ups."""
    tile_in: int  # inputs of one step
    splits: int  # programs that share a tile's inputs
    early_steps: int  # steps whose weights are loaded before the previous kernel has ended
    num_warps: int
    num_stages: int  # depth of the pipeline of the other steps
    next_starts_at_once: bool = True
    """Whether the next kernel's programs may start together with these, or only when the previous
    kernel is done: with many tokens, early loads of the next kernel delay x."""
    chain_steps: bool = False
    """Whether every step is a chain of products, as it always is in float32."""

    @classmethod
    @lru_cache(maxsize=1024)
    def default_for(
        cls,
        num_tokens: int,
        num_in: int,
        num_rows: int,
        dtype: torch.dtype,
        *,
        is_gated: bool,
        is_normed: bool,
        from_shared_memory: bool,
    ) -> TileConfig:
        """Return the configuration for a GPU, for products in any order.

        Measured on an H200 in bfloat16, mostly with the chained products of a Qwen3-0.6B layer.

        - Splits make about 256 programs of 64 rows: at most eight splits, of at least 256 inputs.
          At 16 tokens, 2048 -> 1024 takes 2.9 us in eight splits and 3.6 us in two. Gates and ups
          have enough rows unsplit. Other weights with many rows are split if the result is normed:
          the kernel that adds up replaces the norm's kernel.
        - From 17 tokens on the next kernel should start late (24.3 us at 32 tokens instead of
          25.2); up to 16 tokens, at once (18.7 us instead of 19.1).
        - Long rows, and weights for more than two programs per multiprocessor, go through a deep
          pipeline of short steps.
        - Up to 32 tokens large weights take steps of 128 inputs, fewer at a time, and are split
          wherever that makes up to 256 programs, although a launch more adds them up: 32 tokens
          of 7168 -> 4096 take 18.7 us in four splits, 28.3 unsplit. Gates and ups of 17 tokens on
          take tiles of 128 rows, for which the tokens' inputs are read half as often: 4096 -> 2 x
          7168 takes 31.3 us (64 rows: 33.1; steps of 64: 39.1; the library and silu: 31.5).
        - With more than 64 tokens gates and ups need larger tiles: 14.8 us at 256 instead of 18.3.
        """
        widest = max(16, triton.next_power_of_2(num_in))
        row_tiles = triton.cdiv(num_rows, 64)
        splits = 1
        is_large = num_in * num_rows >= LARGE
        if not is_gated and (is_normed or row_tiles < 64 or (is_large and row_tiles <= 128)):
            wanted = min(8, 256 // row_tiles, num_in // 256)
            splits = 1 << max(0, wanted.bit_length() - 1)
        tile_tokens = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
        common: dict[str, Any] = {
            "tile_rows": 64,
            "splits": splits,
            "num_warps": 4,
            "next_starts_at_once": num_tokens <= 16,
        }
        if dtype.itemsize == 4 or not from_shared_memory:
            # In float32 the inputs of one step are added in one chain (``_add_product``). On an
            # H200, steps of 32 inputs in three stages are no slower than steps of 64 in two
            # (1024 -> 4096: 51 us instead of 61), and the error is smaller.
            is_float32 = dtype.itemsize == 4
            return cls(
                tile_tokens=16 if is_float32 else min(tile_tokens, 32),
                tile_in=min(widest, 32 if is_float32 else 128),
                early_steps=1,
                num_stages=3 if is_float32 else 2,
                **common,
            )
        if num_tokens > 64:
            large = {"tile_rows": 128, "num_warps": 8} if is_gated else {}
            return cls(
                tile_tokens=64,
                tile_in=min(widest, 64 if is_gated else 128),
                early_steps=0,
                num_stages=4 if is_gated else 3,
                **(common | large),
            )
        if is_large and num_tokens <= 32:
            wide = {"tile_rows": 128, "num_warps": 8} if is_gated and num_tokens > 16 else {}
            return cls(
                tile_tokens=tile_tokens,
                tile_in=128,
                early_steps=2,
                num_stages=3,
                **(common | wide),
            )
        if num_in >= 4096 or row_tiles > 256:
            return cls(
                tile_tokens=tile_tokens,
                tile_in=min(widest, 64),
                early_steps=1,
                num_stages=5,
                **common,
            )
        return cls(
            tile_tokens=tile_tokens,
            tile_in=min(widest, 128),
            early_steps=2 if splits == 1 else 4 if tile_tokens == 16 else 3,
            num_stages=4,
            **common,
        )

    @classmethod
    @lru_cache(maxsize=1024)
    def in_order_for(
        cls,
        num_tokens: int,
        num_rows: int,
        order: SumOrder,
        dtype: torch.dtype,
        *,
        is_gated: bool,
        from_shared_memory: bool,
    ) -> TileConfig:
        """Return the configuration of a deterministic call for a GPU.

        H200, bfloat16, layers of Llama-3-8B, whole and of one of two ranks:

        - Up to 64 tokens splits make up to 256 programs, also where a launch more has to add
          them up: 16 tokens of 7168 -> 4096 take 19.3 us in four splits, 20.7 in two. Up to 16
          tokens steps of 128 inputs are faster than steps of 64 (gates and ups 60 us, not 66);
          up to 32, tiles of 128 rows as in ``default_for``; then, a deep pipeline of short steps.
        - More tokens are ``linear_groups``'s, but for leaves that it cannot copy.
        """
        row_tiles, leaf_in = triton.cdiv(num_rows, 64), order.leaf_in
        is_large = num_tokens > 64
        tile_tokens = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
        programs = row_tiles // 2 * triton.cdiv(num_tokens, 64) if is_large else row_tiles
        wanted = 1 if is_gated else max(1, 256 // max(programs, 1))
        splits = max(each for each in order.splits if each <= wanted)
        common: dict[str, Any] = {
            "tile_rows": 64,
            "splits": splits,
            "num_warps": 4,
            "next_starts_at_once": num_tokens <= 16,
            "chain_steps": order.is_chained,
        }
        widest = max(16, triton.next_power_of_2(leaf_in))
        if dtype.itemsize == 4 or not from_shared_memory:
            is_float32 = dtype.itemsize == 4
            return cls(
                tile_tokens=16 if is_float32 else min(tile_tokens, 32),
                tile_in=min(widest, 32 if is_float32 else CHAIN_IN),
                early_steps=1,
                num_stages=3 if is_float32 else 2,
                **common,
            )
        if is_large:
            large = {"tile_rows": 128, "num_warps": 8}
            if order.is_chained and not is_gated:
                large = {}
            return cls(
                tile_tokens=64,
                tile_in=CHAIN_IN if order.is_chained else min(widest, 64),
                early_steps=0,
                num_stages=(2 if is_gated else 3) if order.is_chained else 4,
                **(common | large),
            )
        is_deep = tile_tokens > 32 and leaf_in >= 1024 and not order.is_chained
        wide: dict[str, Any] = {}
        if is_gated and tile_tokens == 32 and not order.is_chained:
            wide = {"tile_rows": 128, "num_warps": 8}
        return cls(
            tile_tokens=tile_tokens,
            tile_in=min(widest, CHAIN_IN // 2 if is_deep else CHAIN_IN),
            early_steps=1 if is_deep else 2 if splits == 1 or leaf_in > 512 else 3,
            num_stages=5 if is_deep else 4 if tile_tokens == 16 and not order.is_chained else 3,
            **(common | wide),
        )

    @classmethod
    def for_interpreter(cls, num_tokens: int, part_in: int, num_rows: int) -> TileConfig:
        """Return few large programs, for leaves (or all inputs) of ``part_in`` inputs."""
        return cls(
            tile_tokens=min(256, max(16, triton.next_power_of_2(num_tokens))),
            tile_rows=min(1024, max(2, triton.next_power_of_2(num_rows))),
            tile_in=min(1024, max(16, triton.next_power_of_2(triton.cdiv(part_in, 4)))),
            splits=1,
            early_steps=1,
            num_warps=1,
            num_stages=1,
        )


@triton.jit
def _load_step(rows, first, end, TILE_IN: tl.constexpr):
    """Return [rows, TILE_IN] from column ``first`` on; end None = no column is past the end."""
    col = first + tl.arange(0, TILE_IN)[None, :]
    mask = rows.is_row & (col < end) if end is not None else rows.is_row
    return tl.load(rows.ptr + col, mask=mask, other=0.0)


@triton.jit
def _load_early(rows, first, end, STEPS: tl.constexpr, TILE_IN: tl.constexpr):
    """Return STEPS steps; the loads of all steps start before the program waits for any."""
    steps = ()
    for step in tl.static_range(STEPS):
        step_x = _load_step(rows, first + step * TILE_IN, end, TILE_IN)
        steps += (step_x,)  # type: ignore[assignment]
    return steps


@triton.jit
def _add_product(y, excess, weight, x, CHAIN_STEPS: tl.constexpr):
    """Return ``y + weight @ x.T`` in float32, of [rows, TILE_IN] and [tokens, TILE_IN].

    The error of a float32 chain of additions grows with its length. So each step has a chain of
    its own, and the steps' sum is compensated (Kahan): ``excess`` is what the last rounding has
    added to y, returned with it; without it sums of 4,096 inputs err twice as much. Without
    ``tl.fma`` the compiler would put ``y`` at the head of the chain (it drops a product with 1.0).
    """
    if x.dtype == tl.float32:
        term = tl.dot(weight, tl.trans(x), input_precision="ieee") - excess
        total = y + term
        excess = (total - y) - term
        excess = tl.where(tl.abs(excess) < float("inf"), excess, 0.0)  # of an infinite sum
        y = total
    elif CHAIN_STEPS:
        product = tl.dot(weight, tl.trans(x))
        y = tl.fma(product, tl.full(product.shape, 1.0, tl.float32), y)
    else:
        y = tl.dot(weight, tl.trans(x), y)
    return y, excess


class _Early(NamedTuple):
    """Steps of a part's inputs whose loads have started."""

    weights: tuple[Any, ...]
    xs: tuple[Any, ...]


@triton.jit
def _sum_part(
    rows, tokens, early, first, PART_IN: tl.constexpr, END: tl.constexpr,
    EARLY_STEPS: tl.constexpr, TILE_IN: tl.constexpr, NUM_STAGES: tl.constexpr,
    CHAIN_STEPS: tl.constexpr,
):  # fmt: skip
    """Return [rows, tokens], summed over the PART_IN inputs from ``first`` on.

    END None = PART_IN is a multiple of TILE_IN, and no input is past the end.
    """
    NUM_STEPS: tl.constexpr = (PART_IN + TILE_IN - 1) // TILE_IN
    y = tl.zeros([rows.is_row.shape[0], tokens.is_row.shape[0]], tl.float32)
    is_float32: tl.constexpr = rows.ptr.dtype.element_ty == tl.float32
    excess = tl.zeros(y.shape if is_float32 else [1, 1], tl.float32)
    end = tl.minimum(first + PART_IN, END) if END is not None else None
    for step in tl.static_range(EARLY_STEPS):
        y, excess = _add_product(y, excess, early.weights[step], early.xs[step], CHAIN_STEPS)
    for late in tl.range(EARLY_STEPS, NUM_STEPS, num_stages=NUM_STAGES):
        col = first + late * TILE_IN
        x = _load_step(tokens, col, end, TILE_IN)
        weight = _load_step(rows, col, end, TILE_IN)
        y, excess = _add_product(y, excess, weight, x, CHAIN_STEPS)
    return y


@triton.jit
def _sum_parts(
    rows, tokens, early, first, PARTS: tl.constexpr, PART_IN: tl.constexpr, END: tl.constexpr,
    EARLY_STEPS: tl.constexpr, TILE_IN: tl.constexpr, NUM_STAGES: tl.constexpr,
    CHAIN_STEPS: tl.constexpr,
):  # fmt: skip
    """Return [rows, tokens], the sum of PARTS parts: of two halves, the first a power of two.

    The first EARLY_STEPS steps are loaded already.
    """
    if PARTS == 1:
        y = _sum_part(
            rows, tokens, early, first, PART_IN, END, EARLY_STEPS, TILE_IN, NUM_STAGES, CHAIN_STEPS
        )
    else:
        HALF: tl.constexpr = triton.next_power_of_2(PARTS) // 2
        y = _sum_parts(
            rows, tokens, early, first, HALF, PART_IN, END, EARLY_STEPS, TILE_IN, NUM_STAGES,
            CHAIN_STEPS,
        )  # fmt: skip
        y += _sum_parts(
            rows, tokens, early, first + HALF * PART_IN, PARTS - HALF, PART_IN, END, 0, TILE_IN,
            NUM_STAGES, CHAIN_STEPS,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["num_tokens", "num_out"])
def _linear_tile_kernel(
    out_ptr, stride_out_token,  # [num_tokens, num_out], unit last stride; may be the residual
    sums_ptr,  # [SPLITS, num_tokens, num_out] float32: written instead of out; None = one split
    residual_ptr, stride_residual_token,  # [num_tokens, num_out], unit last stride, or None
    x_ptr, stride_x_token,  # [num_tokens, IN], unit last stride
    weight_ptr,  # [num_out, IN]; with GATED [2 * num_out, IN], gates then ups
    bias_ptr,  # [num_out] or [2 * num_out], or None
    num_tokens, num_out,
    IN: tl.constexpr,
    GATED: tl.constexpr,  # a kind of gate, 0 = none
    TILE_TOKENS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_IN: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,  # of a split: leaves, or 1
    PART_IN: tl.constexpr,  # inputs of a part; those of the last ones may be past the end
    EARLY_STEPS: tl.constexpr,  # at most those of a part
    NUM_STAGES: tl.constexpr, NEXT_AT_ONCE: tl.constexpr, CHAIN_STEPS: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
    lora=None, LORA: tl.constexpr = None,  # adapters: LoraPointers, LoraConstants; None = none
):  # fmt: skip
    """Grid (token tiles * splits * row tiles,); token tiles vary fastest to share weights."""
    IS_EXACT: tl.constexpr = PART_IN % TILE_IN == 0 and SPLITS * PARTS * PART_IN == IN
    END: tl.constexpr = None if IS_EXACT else IN
    TILE_OUT: tl.constexpr = TILE_ROWS // 2 if GATED else TILE_ROWS
    let_next_start(OVERLAP and NEXT_AT_ONCE)
    num_token_tiles = tl.cdiv(num_tokens, TILE_TOKENS)
    token_tile = tl.program_id(0) % num_token_tiles
    split = (tl.program_id(0) // num_token_tiles) % SPLITS
    first_token = token_tile.to(tl.int64) * TILE_TOKENS
    first_out = (tl.program_id(0) // (num_token_tiles * SPLITS)).to(tl.int64) * TILE_OUT
    first_in = split * (PARTS * PART_IN)
    first_end = tl.minimum(first_in + PART_IN, END) if END is not None else None

    tile_row = tl.arange(0, TILE_ROWS)[:, None]
    row = first_out + tile_row % TILE_OUT
    is_row = row < num_out
    row += tl.where(tile_row < TILE_OUT, 0, num_out)  # the second half of a gated tile is ups
    rows = Rows(weight_ptr + row * IN, is_row)
    weights = _load_early(rows, first_in, first_end, EARLY_STEPS, TILE_IN)
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP and not NEXT_AT_ONCE)

    token = first_token + tl.arange(0, TILE_TOKENS)[:, None]
    is_token = token < num_tokens
    tokens = Rows(x_ptr + token * stride_x_token, is_token)
    early = _Early(weights, _load_early(tokens, first_in, first_end, EARLY_STEPS, TILE_IN))
    y = _sum_parts(
        rows, tokens, early, first_in, PARTS, PART_IN, END, EARLY_STEPS, TILE_IN, NUM_STAGES,
        CHAIN_STEPS,
    )  # fmt: skip
    y = tl.trans(y)
    col = first_out + tl.arange(0, TILE_OUT)[None, :]
    inside = (col < num_out) & is_token
    if sums_ptr is not None:
        sums_ptr += (split * num_tokens + token) * num_out + col
        tl.store(sums_ptr, y, mask=inside)
    else:
        if GATED:
            halves = tl.permute(tl.reshape(y, [TILE_TOKENS, 2, TILE_OUT]), (0, 2, 1))
            y, up_y = tl.split(halves)
            if lora is not None:
                up_y += adapter_values(lora, token, is_token, LORA.ROWS // 2 + col, LORA)
            if bias_ptr is not None:
                up_bias = tl.load(bias_ptr + num_out + col, mask=col < num_out, other=0.0)
                up_y += up_bias.to(tl.float32)
        if lora is not None:
            y += adapter_values(lora, token, is_token, col, LORA)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + col, mask=col < num_out, other=0.0).to(tl.float32)
        if GATED:
            y = gated(y, up_y, GATED)
        if residual_ptr is not None:
            residual_ptr += token * stride_residual_token + col
            y += tl.load(residual_ptr, mask=inside, other=0.0).to(tl.float32)
        out_ptr += token * stride_out_token + col
        tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=inside)


def multiply_tiles(call: LinearCall, config: TileConfig) -> torch.Tensor | None:
    """Compute ``call.out``, or return the sums of its splits, as ``add_splits`` takes them."""
    if call.order is not None:
        parts, part_in = call.order.leaves // config.splits, call.order.leaf_in
    else:
        steps = triton.cdiv(call.num_in, config.tile_in * config.splits)
        parts, part_in = 1, steps * config.tile_in
    early_steps = min(config.early_steps, triton.cdiv(part_in, config.tile_in))
    sums = empty_sums(call, config.splits)
    row_tiles = triton.cdiv(call.num_out, config.tile_rows // (2 if call.is_gated else 1))
    token_tiles = triton.cdiv(call.num_tokens, config.tile_tokens)
    _linear_tile_kernel[(token_tiles * config.splits * row_tiles,)](
        *with_strides(call.out, 1), sums, *with_strides(call.residual, 1),
        *with_strides(call.x, 1), call.weight, call.bias, call.num_tokens, call.num_out,
        IN=call.num_in, GATED=call.gate, TILE_TOKENS=config.tile_tokens,
        TILE_ROWS=config.tile_rows, TILE_IN=config.tile_in, SPLITS=config.splits, PARTS=parts,
        PART_IN=part_in, EARLY_STEPS=early_steps, NUM_STAGES=config.num_stages,
        NEXT_AT_ONCE=config.next_starts_at_once, CHAIN_STEPS=config.chain_steps,
        num_warps=config.num_warps, **overlap_options(call.x.device),
        **call.lora_arguments(
            config.tile_tokens * config.tile_rows // (2 if call.is_gated else 1), config.num_warps
        ),
    )  # fmt: skip
    return sums
