"""The linear layer of few tokens, with all of a program's weights in registers.

Each warp multiplies its part of every row by the same part of every token, and the warps' sums are
added at the end, so no operand passes through shared memory. The tensor cores expect other inputs
from a thread than the 16 bytes of a row that it loads, but any order works if weights and tokens
share it. Only products *in order* take the inputs as ``linear_tiles`` does, 16 after 16: threads
then exchange halves, and every warp has a chain of products of its own.

The loads of all weights start before the previous kernel has ended; then come all tokens' loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.prefetch import prefetch_arguments, prefetch_part
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.layers.lanes import (
    as_operand,
    lane_rows,
    load_lanes,
    sum_in_order,
    sum_of_warps,
)
from mrv1.kernels.layers.linear_call import LinearCall, Results, Rows, store_results
from mrv1.kernels.layers.linear_splits import empty_sums
from mrv1.kernels.layers.sum_order import CHAIN_IN, NUM_PROGRAMS, SPLIT_ROWS, SumOrder

MOST_WEIGHTS = 48 * 1024
"""Most 16-bit weights of a program: 3/8 of a multiprocessor's registers, as for the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterConfig:
    """How weights are cut into programs."""

    tile_tokens: int  # tokens of one program
    tile_rows: int
    """Rows of weights that are multiplied at once; if gated, half of them gates and half ups."""
    row_tiles: int  # tiles of ``tile_rows`` rows of one program
    splits: int  # programs that share a tile's inputs
    num_warps: int  # 4 or 8: they share a program's inputs
    token_tiles: int = 1  # tiles of tokens that one program multiplies, one after the other
    next_start: int = 1
    """When the next kernel's programs may start: together with these (0), when the previous kernel
    is done (1), with the first results (2). Loads of programs that start early delay x."""
    chain_in: int = 0
    """Consecutive inputs of a warp, a chain of a deterministic sum; 0 = inputs in any order."""
    in_tree: bool = True
    """Whether the warps' sums are added as a tree, neighbours first, or from first to last."""

    @classmethod
    @lru_cache(maxsize=1024)
    def default_for(
        cls, num_tokens: int, num_in: int, num_rows: int, *, is_gated: bool, is_normed: bool
    ) -> RegisterConfig | None:
        """Return the configuration for a GPU; None for too many weights or too many tokens.

        Measured on an H200 in bfloat16 with the layers of Qwen3-0.6B in a graph, with attention.

        - 128 programs for 132 multiprocessors, each with all its multiprocessor's registers: with
          192 programs gate and up take 1.3 us more. Few rows are split along the inputs: a program
          has 32 rows of a quarter of the inputs, not 16 rows of a half (0.3 us slower) or 64 rows
          of an eighth (2 to 5 us slower); but with 17 to 32 tokens and long rows, 16 rows of a
          half (0.4 us faster).
        - 33 to 64 tokens are two tiles: at 64 tokens a layer's products take 3.4 us less than by
          the library, but products of whole rows (not split, not gated) 2.4 us more.
        - The next kernel should start when the previous kernel is done; after products of whole
          rows, with the first results (0.3 to 0.7 us faster); after long splits, which a layer's
          last product has, at once (0.9 us faster at 16 tokens).
        - A prefetch during a product of whole rows saves 0.6 to 0.9 us; during a split product
          nothing, as there is no room for the weights that follow.
        """
        if num_tokens > 64 or (num_tokens > 32 and not is_gated and not is_normed):
            return None
        is_small, is_large = num_tokens <= 16, num_tokens > 32
        row_tiles = triton.cdiv(num_rows, 16 * NUM_PROGRAMS)
        splits = 1
        if row_tiles == 1 and not is_gated:
            splits = max(1, min(8, NUM_PROGRAMS * 32 // num_rows, num_in // 256))
        tile_rows = 16
        if not is_gated and (splits > 1 or row_tiles == 2):
            tile_rows, row_tiles = 32, 1
        split_in = triton.cdiv(num_in, splits)
        if row_tiles * tile_rows * split_in > MOST_WEIGHTS:
            return None
        is_long = splits > 1 and split_in > 512
        if is_long and splits >= 4 and not is_small and not is_large:
            tile_rows, splits = 16, splits // 2
        return cls(
            tile_tokens=16 if is_small else 32,
            tile_rows=tile_rows,
            row_tiles=row_tiles,
            splits=splits,
            num_warps=4 if is_small and splits > 1 and not is_long else 8,
            token_tiles=2 if is_large else 1,
            next_start=0 if is_long else 1 if is_gated or splits > 1 else 2,
        )

    @classmethod
    @lru_cache(maxsize=1024)
    def in_order_for(
        cls, num_tokens: int, num_in: int, num_rows: int, order: SumOrder, *, is_gated: bool
    ) -> RegisterConfig | None:
        """Return the configuration of a deterministic call of up to 64 tokens; None = none fits.

        A warp has a chain of at most 256 inputs, and a program one leaf of several chains, or
        leaves of one. The next kernel starts at once after splits of up to 16 tokens (H200,
        Qwen3-0.6B, one token: 0.5 us a layer faster) and after long ones, else as for products in
        any order.
        """
        is_long, is_small = order.chain_in > CHAIN_IN, num_tokens <= 16
        chains = order.chains if order.is_chained else order.leaves
        num_warps = 4 if is_long or chains <= 4 else 8
        splits = order.leaves if order.is_chained else triton.cdiv(chains, num_warps)
        has_leaf = order.is_chained and splits > 1
        row_tiles = triton.cdiv(num_rows, 16 * NUM_PROGRAMS)
        most_weights = MOST_WEIGHTS // (2 if num_warps == 4 else 1)
        if num_tokens > 64 or order.chain_in > 256 or (is_gated and splits > 1):
            return None
        if not order.is_chained and order.leaves < num_warps:
            return None
        if 16 * row_tiles * num_warps * order.chain_in > most_weights:
            return None
        is_wide = has_leaf or (row_tiles == 2 and not is_gated and not is_long)
        at_once = splits > 1 and (is_small or (has_leaf and num_warps == 8))
        return cls(
            tile_tokens=16 if is_small or is_long else 32,
            tile_rows=SPLIT_ROWS if is_wide else 16,
            row_tiles=1 if is_wide else row_tiles,
            splits=splits,
            num_warps=num_warps,
            token_tiles=2 if num_tokens > (16 if is_long else 32) else 1,
            next_start=0 if at_once else 1 if splits > 1 or is_gated else 2,
            chain_in=order.chain_in,
            in_tree=order.leaves > 1 and not has_leaf,
        )

    @classmethod
    def for_interpreter(cls, num_tokens: int, num_rows: int) -> RegisterConfig | None:
        """Return few large programs, for up to 64 tokens."""
        if num_tokens > 64:
            return None
        return cls(
            tile_tokens=max(8, triton.next_power_of_2(num_tokens) // 2),
            tile_rows=min(1024, max(16, triton.next_power_of_2(num_rows) // 2)),
            row_tiles=2,
            splits=2,
            num_warps=4,
            token_tiles=2,
        )


@triton.jit(do_not_specialize=["num_tokens", "num_out", "prefetch_bytes", "prefetch_warp_bytes"])
def _linear_registers_kernel(
    out_ptr, stride_out_token,  # [num_tokens, num_out], unit last stride; may be the residual
    sums_ptr,  # [SPLITS, num_tokens, num_out] float32: written instead of out; None = one split
    residual_ptr, stride_residual_token,  # [num_tokens, num_out], unit last stride, or None
    x_ptr, stride_x_token,  # [num_tokens, IN], unit last stride
    weight_ptr,  # [num_out, IN]; with GATED [2 * num_out, IN], gates then ups
    bias_ptr,  # [num_out] or [2 * num_out], or None
    prefetch_ptr,  # see prefetch_part; or None
    prefetch_bytes, prefetch_warp_bytes, num_tokens, num_out,
    IN: tl.constexpr,
    GATED: tl.constexpr,  # a kind of gate, 0 = none
    TILE_TOKENS: tl.constexpr, TOKEN_TILES: tl.constexpr, TILE_ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr, SPLITS: tl.constexpr,
    WARPS: tl.constexpr,  # 4 or 8: warps of a program
    NEXT_START: tl.constexpr,  # 0, 1 or 2
    CHAIN_IN: tl.constexpr,  # inputs of a warp, which are in order; 0 = in any order
    IN_TREE: tl.constexpr,  # whether warps are added as a tree, or from the first to the last
    OVERLAP: tl.constexpr,  # see dependent_launch
    lora=None, LORA: tl.constexpr = None,  # adapters: LoraPointers, LoraConstants; None = none
):  # fmt: skip
    """Grid (token tiles * splits * row tiles,); token tiles vary fastest and share weights."""
    IN_ORDER: tl.constexpr = CHAIN_IN > 0
    WARP_IN: tl.constexpr = CHAIN_IN if IN_ORDER else 32
    STEP: tl.constexpr = 32 if IN_ORDER else WARPS * 32
    NUM_STEPS: tl.constexpr = (
        (CHAIN_IN + 31) // 32 if IN_ORDER else (IN + SPLITS * STEP - 1) // (SPLITS * STEP)
    )
    LINE_IN: tl.constexpr = CHAIN_IN if IN_ORDER else NUM_STEPS * 32  # of all steps, in a line
    SPLIT_IN: tl.constexpr = WARPS * LINE_IN
    END: tl.constexpr = None if IN % (SPLITS * SPLIT_IN) == 0 else IN
    TILE_OUT: tl.constexpr = TILE_ROWS // 2 if GATED else TILE_ROWS
    let_next_start(OVERLAP and NEXT_START == 0)
    num_token_tiles = tl.cdiv(num_tokens, TOKEN_TILES * TILE_TOKENS)
    token_tile = tl.program_id(0) % num_token_tiles
    split = (tl.program_id(0) // num_token_tiles) % SPLITS
    first_token = token_tile.to(tl.int64) * (TOKEN_TILES * TILE_TOKENS)
    first_out = tl.program_id(0) // (num_token_tiles * SPLITS)
    first_out = first_out.to(tl.int64) * (ROW_TILES * TILE_OUT)
    first_in = split * SPLIT_IN

    tile_row = lane_rows(TILE_ROWS, WARPS)
    weights = ()
    for tile in tl.static_range(ROW_TILES):
        row = first_out + tile * TILE_OUT + tile_row % TILE_OUT
        is_row = row < num_out
        row += tl.where(tile_row < TILE_OUT, 0, num_out)  # the second half of a gated tile is ups
        rows = Rows(weight_ptr + row * IN, is_row)
        for step in tl.static_range(NUM_STEPS):
            lines = load_lanes(
                rows, first_in + step * STEP, END, TILE_ROWS, WARPS, WARP_IN, LINE_IN - step * 32
            )
            weights += (lines,)  # type: ignore[assignment]
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP and NEXT_START == 1)

    results = Results(
        out_ptr, stride_out_token, sums_ptr, residual_ptr, stride_residual_token, bias_ptr, lora
    )
    for token_step in tl.static_range(TOKEN_TILES):
        token = first_token + lane_rows(TILE_TOKENS, WARPS)
        is_token = token < num_tokens
        tokens = Rows(x_ptr + token * stride_x_token, is_token)
        xs = ()
        for step in tl.static_range(NUM_STEPS):
            lines = load_lanes(
                tokens,
                first_in + step * STEP,
                END,
                TILE_TOKENS,
                WARPS,
                WARP_IN,
                LINE_IN - step * 32,
            )
            xs += (lines,)  # type: ignore[assignment]
        if prefetch_ptr is not None and token_step == 0:
            prefetch_part(prefetch_ptr, prefetch_bytes, prefetch_warp_bytes, WARPS)
        if first_token >= num_tokens:  # keeps products from being moved among the loads
            return
        token = first_token + tl.arange(0, TILE_TOKENS)[None, :]
        is_token = token < num_tokens
        for tile in tl.static_range(ROW_TILES):
            y = tl.zeros([WARPS, TILE_ROWS, TILE_TOKENS], tl.float32)
            for step in tl.static_range(NUM_STEPS):
                lines = weights[tile * NUM_STEPS + step]
                weight = as_operand(lines, TILE_ROWS, WARPS, IN_ORDER)
                x = as_operand(xs[step], TILE_TOKENS, WARPS, IN_ORDER)
                y = tl.dot(weight, tl.permute(x, (0, 2, 1)), y)
            if IN_TREE:
                y = sum_of_warps(y, WARPS, TILE_ROWS, TILE_TOKENS)
            else:
                y = sum_in_order(y, WARPS, TILE_ROWS, TILE_TOKENS)
            let_next_start(OVERLAP and NEXT_START == 2 and tile == 0)
            col = first_out + tile * TILE_OUT + tl.arange(0, TILE_OUT)[:, None]
            is_out = col < num_out
            inside = is_out & is_token
            store_results(
                results, y, split, token, is_token, col, is_out, inside, num_tokens, num_out,
                GATED, LORA,
            )  # fmt: skip
        first_token += TILE_TOKENS


def multiply_in_registers(call: LinearCall, config: RegisterConfig) -> torch.Tensor | None:
    """Compute ``call.out``, or return the sums of its splits, as ``add_splits`` takes them."""
    splits = 1 if call.is_gated else config.splits
    sums = empty_sums(call, splits)
    program_out = config.row_tiles * config.tile_rows // (2 if call.is_gated else 1)
    token_tiles = triton.cdiv(call.num_tokens, config.token_tiles * config.tile_tokens)
    num_programs = token_tiles * splits * triton.cdiv(call.num_out, program_out)
    wanted = call.prefetch if splits == 1 else None
    _linear_registers_kernel[(num_programs,)](
        *with_strides(call.out, 1), sums, *with_strides(call.residual, 1),
        *with_strides(call.x, 1), call.weight, call.bias,
        num_tokens=call.num_tokens, num_out=call.num_out, IN=call.num_in, GATED=call.gate,
        TILE_TOKENS=config.tile_tokens, TOKEN_TILES=config.token_tiles, TILE_ROWS=config.tile_rows,
        ROW_TILES=config.row_tiles, SPLITS=splits, WARPS=config.num_warps,
        NEXT_START=config.next_start, CHAIN_IN=config.chain_in, IN_TREE=config.in_tree,
        num_warps=config.num_warps,
        **prefetch_arguments(wanted, call.x.device, num_programs * config.num_warps),
        **overlap_options(call.x.device),
        **call.lora_arguments(
            config.tile_tokens * config.tile_rows // (2 if call.is_gated else 1), config.num_warps
        ),
    )  # fmt: skip
    return sums
