"""The linear layer of many tokens for Hopper (sm_90), by warp groups, with deterministic sums.

A program stays, and takes every so-many-th tile of 128 tokens and 128 rows of weights::

    producer, 1 warp       bulk copies (TMA) of the next steps' tokens and weights
    consumer 0, 4 warps    tokens 0 to 63 of the tile, by all of its rows
    consumer 1, 4 warps    tokens 64 to 127

While a consumer adds up leaves or stores a tile, the other one multiplies, and the producer copies
ahead, over the ends of leaves and tiles. The bits are those of ``linear_tiles``: chains of wgmma
in the order of the inputs, added as ``SumOrder`` tells.

Gluon, not Triton: Triton's pipeline empties at the end of every leaf, and with one loop over all
steps it waits for each product.
"""

from __future__ import annotations

import torch

from mrv1.device import device_info
from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.arithmetic import cdiv
from mrv1.kernels._base.dependent_launch import overlap_options
from mrv1.kernels._base.gluon import (
    TensorDescriptor,
    aggregate,
    copy_box,
    fence_async_shared,
    gl,
    gluon,
    let_next_start,
    mbarrier,
    wait_for_previous,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from mrv1.kernels.layers.linear_call import LinearCall
from mrv1.kernels.layers.linear_splits import empty_sums
from mrv1.kernels.layers.silu import silu
from mrv1.kernels.layers.sum_order import SumOrder

TILE_TOKENS = gl.constexpr(128)
TILE_ROWS = gl.constexpr(128)
STEP_IN = gl.constexpr(64)
"""Inputs of a step: 128 bytes, the widest swizzle of a copy."""
PROGRAM_LEAVES = 4
"""Most leaves of a program: two or three sums in registers, and one parked in shared memory."""
CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)
_silu = gluon.jit(silu.fn)


@aggregate
class Tiles:
    """The tiles of a launch; those of tokens vary fastest, and share weights."""

    count: gl.tensor  # of all splits
    of_tokens: gl.tensor
    num_out: gl.tensor
    OUT: gl.constexpr  # results of a row of a tile
    SPLITS: gl.constexpr

    @gluon.jit
    def first_token(self, tile):
        """Return a tile's first token."""
        return tile % self.of_tokens * TILE_TOKENS

    @gluon.jit
    def split(self, tile):
        """Return a tile's split."""
        return tile // self.of_tokens % self.SPLITS

    @gluon.jit
    def first_out(self, tile):
        """Return a tile's first result."""
        return tile // (self.of_tokens * self.SPLITS) * self.OUT


@aggregate
class Steps:
    """Steps in shared memory, each in its turn: the ``at``-th one is in stage ``at % STAGES``."""

    tokens: gl.shared_memory_descriptor  # [STAGES, TILE_TOKENS, STEP_IN]
    weights: gl.shared_memory_descriptor  # [STAGES, TILE_ROWS, STEP_IN]
    parked: gl.shared_memory_descriptor  # [2, 64, TILE_ROWS] float32: a consumer's sum; or None
    filled: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.jit
    def release(self, at):
        """Say that a consumer has multiplied a step."""
        mbarrier.arrive(self.free.index(at % self.tokens.shape[0]), count=1)

    @gluon.jit
    def copy(self, x_desc, weight_desc, first_token, first_row, second_row, first_in, at):
        """Begin to copy a step, once its stage is free; of gated weights in two halves."""
        STAGES: gl.constexpr = self.tokens.shape[0]
        BOX_ROWS: gl.constexpr = weight_desc.block_shape[0]
        stage = at % STAGES
        filled = self.filled.index(stage)
        mbarrier.wait(self.free.index(stage), ((at // STAGES) & 1) ^ 1)
        mbarrier.expect(filled, 2 * (TILE_TOKENS + TILE_ROWS) * STEP_IN)
        copy_box(x_desc, [first_token, first_in], filled, self.tokens.index(stage))
        if BOX_ROWS == TILE_ROWS:
            copy_box(weight_desc, [first_row, first_in], filled, self.weights.index(stage))
        else:
            gates = self.weights.index(stage).slice(0, BOX_ROWS, dim=0)
            ups = self.weights.index(stage).slice(BOX_ROWS, BOX_ROWS, dim=0)
            copy_box(weight_desc, [first_row, first_in], filled, gates)
            copy_box(weight_desc, [second_row, first_in], filled, ups)

    @gluon.jit
    def chain(self, GROUP: gl.constexpr, first, COUNT: gl.constexpr):
        """Return [64, TILE_ROWS], one chain of products over COUNT steps from ``first`` on."""
        STAGES: gl.constexpr = self.tokens.shape[0]
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_ROWS, 16]
        )
        y = gl.zeros([64, TILE_ROWS], gl.float32, LAYOUT)
        for step in range(COUNT):
            at = first + step
            stage = at % STAGES
            mbarrier.wait(self.filled.index(stage), (at // STAGES) & 1)
            x = self.tokens.index(stage).slice(GROUP * 64, 64, dim=0)
            y = warpgroup_mma(x, self.weights.index(stage).permute((1, 0)), y, is_async=True)
            y = warpgroup_mma_wait(1, deps=(y,))
            if step > 0:  # its product has ended
                self.release(at - 1)
        y = warpgroup_mma_wait(0, deps=(y,))
        self.release(first + COUNT - 1)
        return y

    @gluon.jit
    def leaf(self, GROUP: gl.constexpr, first, CHAINS: gl.constexpr, COUNT: gl.constexpr):
        """Return the sum of a leaf's chains, from the first to the last."""
        y = self.chain(GROUP, first, COUNT)
        for index in range(1, CHAINS):
            y += self.chain(GROUP, first + index * COUNT, COUNT)
        return y

    @gluon.jit
    def tree(
        self, GROUP: gl.constexpr, first, LEAVES: gl.constexpr, CHAINS: gl.constexpr,
        COUNT: gl.constexpr,
    ):  # fmt: skip
        """Return the sum of up to 4 leaves, neighbours first."""
        y = self.leaf(GROUP, first, CHAINS, COUNT)
        if LEAVES > 1:
            y += self.leaf(GROUP, first + CHAINS * COUNT, CHAINS, COUNT)
        if LEAVES > 2:
            memory = self.parked.index(GROUP)
            memory.store(y)
            y = self.tree(GROUP, first + 2 * CHAINS * COUNT, LEAVES - 2, CHAINS, COUNT)
            y = memory.load(y.type.layout) + y
        return y


@aggregate
class Results:
    """Where results go, and what is added to them; see the kernel's arguments."""

    out_ptr: gl.tensor
    stride_out_token: gl.tensor
    sums_ptr: gl.tensor
    residual_ptr: gl.tensor
    stride_residual_token: gl.tensor
    bias_ptr: gl.tensor
    num_tokens: gl.tensor

    @gluon.jit
    def store(self, y, first_token, split, first_out, num_out, OUT: gl.constexpr):
        """Store the results of 64 tokens."""
        WIDTH: gl.constexpr = y.shape[1]
        STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // OUT, OUT // 8], [4, 1], [1, 0])
        token = first_token + gl.arange(0, 64, gl.SliceLayout(1, STORED))[:, None].to(gl.int64)
        col = first_out + gl.arange(0, OUT, gl.SliceLayout(0, STORED))[None, :]
        inside = (token < self.num_tokens) & (col < num_out)
        if self.sums_ptr is not None:
            sums_ptr = self.sums_ptr + (split * self.num_tokens + token) * num_out + col
            gl.store(sums_ptr, gl.convert_layout(y, STORED), mask=inside)
        else:
            if WIDTH > OUT:  # gates, then ups
                y, up = gl.split(gl.permute(gl.reshape(y, [64, 2, OUT]), (0, 2, 1)))
                up = gl.convert_layout(up, STORED)
                if self.bias_ptr is not None:
                    up_bias = gl.load(self.bias_ptr + num_out + col, mask=col < num_out, other=0.0)
                    up += up_bias.to(gl.float32)
            y = gl.convert_layout(y, STORED)
            if self.bias_ptr is not None:
                bias = gl.load(self.bias_ptr + col, mask=col < num_out, other=0.0)
                y += bias.to(gl.float32)
            if WIDTH > OUT:
                y = _silu(y) * up
            if self.residual_ptr is not None:
                residual_ptr = self.residual_ptr + token * self.stride_residual_token + col
                y += gl.load(residual_ptr, mask=inside, other=0.0).to(gl.float32)
            out_ptr = self.out_ptr + token * self.stride_out_token + col
            gl.store(out_ptr, y.to(self.out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _produce(x_desc, weight_desc, steps, tiles, COUNT: gl.constexpr, OVERLAP: gl.constexpr):
    """Copy the COUNT steps of each tile in turn."""
    if OVERLAP:
        wait_for_previous()
        let_next_start()
    at = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        first_token, first_out = tiles.first_token(tile), tiles.first_out(tile)
        first_step = tiles.split(tile) * COUNT
        for step in range(COUNT):
            steps.copy(
                x_desc, weight_desc, first_token, first_out, tiles.num_out + first_out,
                (first_step + step) * STEP_IN, at,
            )  # fmt: skip
            at += 1


@gluon.jit
def _consume(
    GROUP: gl.constexpr, results, steps, tiles, LEAVES: gl.constexpr, CHAINS: gl.constexpr,
    COUNT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Multiply 64 tokens of each tile, and store the results."""
    if OVERLAP:
        wait_for_previous()
        let_next_start()
    at = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        y = steps.tree(GROUP, at, LEAVES, CHAINS, COUNT)
        at += LEAVES * CHAINS * COUNT
        results.store(
            y, tiles.first_token(tile) + GROUP * 64, tiles.split(tile), tiles.first_out(tile),
            tiles.num_out, tiles.OUT,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tokens", "num_tiles", "num_token_tiles"])
def _linear_groups_kernel(
    out_ptr, stride_out_token,  # [num_tokens, num_out], unit last stride; may be the residual
    sums_ptr,  # [SPLITS, num_tokens, num_out] float32: written instead of out; None = one split
    residual_ptr, stride_residual_token,  # [num_tokens, num_out], unit last stride, or None
    bias_ptr,  # [num_out] or [2 * num_out], or None
    x_desc,  # [num_tokens, inputs] in boxes [TILE_TOKENS, STEP_IN]
    weight_desc,  # [num_out, inputs] in boxes [TILE_ROWS, STEP_IN]; gated: gates, ups, half of it
    num_tokens, num_out,
    num_tiles,  # of all splits
    num_token_tiles,
    SPLITS: gl.constexpr,
    LEAVES: gl.constexpr,  # of a split
    CHAINS: gl.constexpr,  # of a leaf
    CHAIN_STEPS: gl.constexpr,
    OVERLAP: gl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid: any number of programs; one a multiprocessor runs at a time."""
    dtype: gl.constexpr = x_desc.dtype
    PARKS: gl.constexpr = LEAVES > 2
    STAGES: gl.constexpr = 4 if PARKS else 5
    tokens = gl.allocate_shared_memory(dtype, [STAGES, TILE_TOKENS, STEP_IN], x_desc.layout)
    weights = gl.allocate_shared_memory(dtype, [STAGES, TILE_ROWS, STEP_IN], weight_desc.layout)
    parked = None
    if PARKS:
        PARKED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0])
        parked = gl.allocate_shared_memory(gl.float32, [2, 64, TILE_ROWS], PARKED)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    steps = Steps(tokens, weights, parked, filled, free)
    tiles = Tiles(num_tiles, num_token_tiles, num_out, weight_desc.block_shape[0], SPLITS)
    results = Results(
        out_ptr, stride_out_token, sums_ptr, residual_ptr, stride_residual_token, bias_ptr,
        num_tokens,
    )  # fmt: skip
    gl.warp_specialize([
        (_consume, (0, results, steps, tiles, LEAVES, CHAINS, CHAIN_STEPS, OVERLAP)),
        (_consume, (1, results, steps, tiles, LEAVES, CHAINS, CHAIN_STEPS, OVERLAP)),
        (_produce, (x_desc, weight_desc, steps, tiles, LEAVES * CHAINS * CHAIN_STEPS, OVERLAP)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def can_copy(call: LinearCall) -> bool:
    """Say whether steps of a deterministic call can be copied: whole, and from aligned rows."""
    order = call.order
    if order is None or order.chain_in % STEP_IN.value or order.leaf_in % order.chain_in:
        return False
    starts = call.x.data_ptr() | call.weight.data_ptr() | call.x.stride(0) * call.x.element_size()
    return order.leaves * order.leaf_in == call.num_in and starts % 16 == 0


def choose_splits(order: SumOrder, num_tiles: int, num_programs: int) -> int:
    """Return the splits that take ``num_programs`` programs the shortest time for all tiles.

    A split costs the time for its sums, as much as about a 24th of a tile (H200, 4,096 inputs).
    """
    allowed = [splits for splits in order.splits if order.leaves // splits <= PROGRAM_LEAVES]
    rounds = {splits: cdiv(num_tiles * splits, num_programs) / splits for splits in allowed}
    return min(allowed, key=lambda splits: rounds[splits] + splits * num_tiles / num_programs / 24)


def describe(
    x: torch.Tensor, weight: torch.Tensor, *, is_gated: bool
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return tokens and weights in the boxes of a step."""
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    rows = TILE_ROWS.value // (2 if is_gated else 1)
    return (
        TensorDescriptor.from_tensor(x, [TILE_TOKENS.value, STEP_IN.value], layout),
        TensorDescriptor.from_tensor(weight, [rows, STEP_IN.value], layout),
    )


def multiply_by_groups(call: LinearCall) -> torch.Tensor | None:
    """Compute ``call.out``, or return the sums of its splits, as ``add_splits`` takes them."""
    order = call.order or SumOrder.of(call.num_in, call.weight.shape[0], None)
    num_programs = device_info(call.x.device).num_sms
    token_tiles = cdiv(call.num_tokens, TILE_TOKENS.value)
    num_tiles = token_tiles * cdiv(call.weight.shape[0], TILE_ROWS.value)
    splits = 1 if call.is_gated else choose_splits(order, num_tiles, num_programs)
    sums = empty_sums(call, splits)
    _linear_groups_kernel[(min(num_tiles * splits, num_programs),)](
        *with_strides(call.out, 1), sums, *with_strides(call.residual, 1), call.bias,
        *describe(call.x, call.weight, is_gated=call.is_gated),
        call.num_tokens, call.num_out, num_tiles * splits, token_tiles,
        SPLITS=splits, LEAVES=order.leaves // splits, CHAINS=order.chains,
        CHAIN_STEPS=order.chain_in // STEP_IN.value, num_warps=4,
        **overlap_options(call.x.device, worthwhile=False),
    )  # fmt: skip
    return sums
