"""Sum over ranks through peers' memory, with the residual add and the norm that follow it.

    out        = round(residual + (sum of the partials of all ranks + bias))
    normed_out = rms_norm(out, norm_weight)                            (if normed_out is given)

Each rank stores what another needs into that rank's memory, and waits for what it needs itself to
appear in its own: a remote store takes one way over the link, a remote load two. There are no
flags. A word that has not arrived is 0, and no word that is sent is: it is sent with all bits
inverted, and the one pattern that would be 0 then, a NaN, is sent as another NaN.

    one shot   every rank sends its partial to all others, and adds up all of them
    two shots  tiles of rows have owners: every rank sends its partial to the owner, which adds up
               all of them and the residual, and sends the result to all others

Words arrive in a ring of three slots, which a program uses in turn, one for each of its tiles,
over all calls. In turn n it sends its words, clears the slot of turn n - 1, and waits for the
words of turn n. So no rank sends too early into a slot: one that has finished turn n + 1 sends the
words of turn n + 2 into the slot of turn n - 1. It has received words of turn n + 1 from every
other rank, or from the owner, who had them, and each rank sent these after it had cleared that
slot, in turn n. No call needs a barrier. Programs count their turns on the device, each for
itself: calls of any sizes follow each other, in CUDA graphs and outside.

Two things that cost time on two H200: a prefetch of the next product's weights during the wait (2
to 9 us a layer of an 8B model, whose products load early themselves), and sending a program's next
tile before it waits for the last one (16 of 220 us at [4096, 8192], which the link limits).

Sources: NCCL's protocol LL, for data that is its own flag; TensorRT-LLM's Lamport-style
all-reduce, for a value that means "not yet" instead of flags.
"""

from __future__ import annotations

from functools import partial as bind

import torch

from mrv1.device import device_info
from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.peers import PeerBuffer
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.layers.contracts import (
    RING_ROWS,
    RING_SLOTS,
    AllReduceAlgorithm,
    AllReduceBuffers,
)
from mrv1.kernels.layers.linear_splits import sum_of_splits
from mrv1.kernels.layers.norm import inverse_rms
from mrv1.kernels.layers.rms_norm import RmsNormConfig

POLLS = tl.constexpr(1 if INTERPRET else 2**12)
"""Polls before a look at the abort word: milliseconds. A look has to take less time than the wait
before it: else the rank that looks is late for the next sum, the other one looks there, and so on.
After a failure each wait takes as long, and a long prompt has thousands of them.
"""
LANES = tl.constexpr(512)
"""At least the threads of a program, each with another lane."""
MOST_REGISTERS = 64
"""Of a thread, with which two programs of 16 warps fit a multiprocessor."""
LIMITED: tuple[tuple[int, int] | None, ...] = ((9, 0),)
"""Compute capabilities for which the limit is known to pay."""
ONE_SHOT_BYTES = 512 * 2**10
"""Largest sum of more than two ranks in one shot. Two ranks send as much in one shot as in two."""


@triton.jit
def _encoded(x, WORD: tl.constexpr):
    """Return the words that are sent for x: never 0."""
    nan: tl.constexpr = (1 << (WORD.primitive_bitwidth - 1)) - 1
    bits = x.to(WORD, bitcast=True)
    return ~tl.where(bits == -1, nan, bits)


@triton.jit
def _send(
    received_ptrs, offset, words, in_tile, owner,
    RANK: tl.constexpr, SIZE: tl.constexpr, TO_OWNER: tl.constexpr,
):  # fmt: skip
    """Store words into the memory of all other ranks, or of the owner alone."""
    for step in tl.static_range(1, SIZE):
        if (not TO_OWNER) or owner == (RANK + step) % SIZE:
            tl.store(received_ptrs[(RANK + step) % SIZE] + offset, words, mask=in_tile)


@triton.jit
def _has_failed(abort_ptr):
    """Return whether a rank has failed.

    One thread reads: the word is in the host's memory, and 256 programs of 16 warps that all read
    it would read 4,096 times over PCIe.
    """
    lane = tl.arange(0, LANES)
    return tl.max(tl.load(abort_ptr + lane * 0, mask=lane == 0, other=0, volatile=True)) != 0


@triton.jit
def _received(ptrs, in_tile, abort_ptr, DTYPE: tl.constexpr):
    """Wait until all words of a tile have arrived, or a rank has failed; return their values."""
    words = tl.load(ptrs, mask=in_tile, other=-1, volatile=True)
    missing = tl.max((words == 0).to(tl.int32))
    polls = 0
    while missing != 0:
        words = tl.load(ptrs, mask=in_tile, other=-1, volatile=True)
        missing = tl.max((words == 0).to(tl.int32))
        polls += 1
        if polls % POLLS == 0:
            missing = tl.where(_has_failed(abort_ptr), 0, missing)
    return (~words).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _sum_of(
    own,  # this rank's partial, float32
    slot_ptrs,  # the tile of rank 0's words in this slot of one's own memory
    stride_source, in_tile, abort_ptr,
    DTYPE: tl.constexpr, FIRST: tl.constexpr,
    COUNT: tl.constexpr,  # a power of two
    RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return the sum of the partials of ranks FIRST to FIRST + COUNT - 1, a tree of pairs."""
    if COUNT > 1:
        left = _sum_of(
            *(own, slot_ptrs, stride_source, in_tile, abort_ptr, DTYPE),
            *(FIRST, COUNT // 2, RANK, SIZE),
        )
        if FIRST + COUNT // 2 < SIZE:
            right = _sum_of(
                *(own, slot_ptrs, stride_source, in_tile, abort_ptr, DTYPE),
                *(FIRST + COUNT // 2, COUNT // 2, RANK, SIZE),
            )
            total = left + right
        else:
            total = left
    elif FIRST == RANK:
        total = own
    else:
        total = _received(slot_ptrs + FIRST * stride_source, in_tile, abort_ptr, DTYPE)
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _all_reduce_norm_kernel(
    out_ptr, stride_out_token,  # [num_tokens, hidden], unit last stride; may be residual
    normed_ptr, stride_normed_token,  # [num_tokens, hidden], unit last stride; or None
    received_ptrs,  # tuple: each rank's [RING_SLOTS, SIZE, RING_ROWS, hidden] words, contiguous
    turn_ptr,  # [RING_ROWS] int32, one's own: the slot of each program's next turn
    partial_ptr, stride_partial_split,  # [SPLITS, num_tokens, hidden], unit last stride
    stride_partial_token,
    residual_ptr, stride_residual_token,  # [num_tokens, hidden], unit last stride; or None
    bias_ptr,  # [hidden]; or None
    weight_ptr,  # [hidden]; or None
    abort_ptr,  # [1] int32, in host memory
    num_tokens, hidden, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, RING_SLOTS: tl.constexpr, RING_ROWS: tl.constexpr,
    TREE_SIZE: tl.constexpr,  # power of two >= SIZE
    SPLITS: tl.constexpr, TWO_SHOT: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_DIM: tl.constexpr,  # power of two >= hidden
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (programs,): program p sums the tiles p, p + programs, ... of TILE_ROWS rows."""
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    own_ptr = received_ptrs[RANK]
    WORD: tl.constexpr = own_ptr.dtype.element_ty
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    # What travels: splits do not, unless float32 does.
    PARTIAL: tl.constexpr = OUT if WORD.primitive_bitwidth == 16 else tl.float32
    tile_row = tl.arange(0, TILE_ROWS)[:, None]
    col = tl.arange(0, TILE_DIM)[None, :]
    stride_source = RING_ROWS * hidden
    stride_slot = SIZE * stride_source
    in_ring = (program * TILE_ROWS + tile_row) * hidden + col
    num_tiles = tl.cdiv(num_tokens, TILE_ROWS)
    turn = tl.load(turn_ptr + program)
    for tile in range(program, num_tiles, num_programs):
        row = tile * TILE_ROWS + tile_row.to(tl.int64)
        in_tile = (row < num_tokens) & (col < hidden)
        at_turn = turn * stride_slot + in_ring
        owner = tile % SIZE
        partial_ptrs = partial_ptr + row * stride_partial_token + col
        partial = sum_of_splits(partial_ptrs, in_tile, stride_partial_split, SPLITS).to(PARTIAL)
        words = _encoded(partial, WORD)
        _send(
            *(received_ptrs, RANK * stride_source + at_turn, words, in_tile),
            *(owner, RANK, SIZE, TWO_SHOT),
        )
        if residual_ptr is not None:  # loaded before the wait; a result that comes has it already
            residual = tl.load(
                residual_ptr + row * stride_residual_token + col,
                mask=in_tile & ((not TWO_SHOT) or owner == RANK),
                other=0.0,
            )
        if normed_ptr is not None:
            weight = tl.load(weight_ptr + col, mask=col < hidden, other=0.0)
        cleared = own_ptr + (turn + RING_SLOTS - 1) % RING_SLOTS * stride_slot + in_ring
        for step in tl.static_range(1, SIZE):
            source = (RANK + step) % SIZE
            tl.store(cleared + source * stride_source, tl.zeros_like(words), mask=col < hidden)

        slot_ptrs = own_ptr + at_turn
        if TWO_SHOT and owner != RANK:
            total = _received(slot_ptrs + owner * stride_source, in_tile, abort_ptr, PARTIAL)
        else:
            total = _sum_of(
                *(partial.to(tl.float32), slot_ptrs, stride_source, in_tile, abort_ptr, PARTIAL),
                *(0, TREE_SIZE, RANK, SIZE),
            )
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + col, mask=col < hidden, other=0.0)
                total += bias.to(tl.float32)
            if residual_ptr is not None:
                total = residual.to(tl.float32) + total
        rounded = total.to(OUT)
        if TWO_SHOT and owner == RANK:
            result = _encoded(rounded.to(PARTIAL), WORD)
            _send(
                *(received_ptrs, RANK * stride_source + at_turn, result, in_tile),
                *(owner, RANK, SIZE, False),
            )
        tl.store(out_ptr + row * stride_out_token + col, rounded, mask=in_tile)
        if normed_ptr is not None:
            x = rounded.to(tl.float32)
            scale = inverse_rms(x, hidden, eps)
            normed = (x * scale[:, None]).to(OUT).to(tl.float32) * weight.to(tl.float32)
            tl.store(normed_ptr + row * stride_normed_token + col, normed.to(OUT), mask=in_tile)
        turn = (turn + 1) % RING_SLOTS
        if tile + num_programs < num_tiles:
            # All threads' clearing comes before the next words, as it does between two launches.
            tl.debug_barrier()
            tl.atomic_xchg(turn_ptr + program, turn, sem="acq_rel", scope="sys")
            tl.debug_barrier()
    tl.store(turn_ptr + program, turn)


def all_reduce_norm(
    partial: torch.Tensor,
    buffers: AllReduceBuffers,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    normed_out: torch.Tensor | None = None,
    algorithm: AllReduceAlgorithm | None = None,
) -> torch.Tensor:
    """Return ``residual + bias`` plus the sum of the ranks' ``partial``; norm the result.

    All ranks call this in the same order, with tensors of the same shapes and dtypes.

    Args:
        partial: [tokens, hidden] float32 | float16 | bfloat16, unit last stride: this rank's part
            of the sum. Or [splits, tokens, hidden] float32, contiguous: the parts of this rank's
            part, as ``linear(keep_splits=True)`` returns them.
        buffers: of all ranks and for ``hidden``. One stream at a time uses them. What travels has
            their width: partial's dtype, or, for splits, the result's dtype or float32.
        bias: [hidden], the result's dtype, contiguous: added once, to the sum.
        residual: [tokens, hidden], the result's dtype, unit last stride; the same on every rank.
        out: [tokens, hidden], partial's dtype or, if that is float32, any; unit last stride,
            *written* and returned; may be ``residual`` or ``partial``. None = new, in the dtype of
            ``residual``, or else of ``partial``. Splits need one of both.
        norm_weight: [hidden], the result's dtype, contiguous; only with ``normed_out``.
        eps: added to the mean square.
        normed_out: [tokens, hidden], the result's dtype, unit last stride, *written* with the RMS
            norm of each row of the result.
        algorithm: "one_shot" or "two_shot", see the module; None = by size. Alike on all ranks.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: partials are added in float32, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), then the
        bias and the residual; the result is rounded once. The norm has the bits of ``rms_norm``.
        The same bits on every rank, for any number of tokens and either algorithm.
    Stream: current stream, CUDA-graph safe; the device waits for the other ranks, the host does
        not. Once ``buffers.abort`` is set, the device waits no more: the result is undefined.
    """
    if algorithm not in (None, "one_shot", "two_shot"):
        raise ValueError(f"algorithm: expected None, 'one_shot' or 'two_shot', got {algorithm!r}")
    dtype = _check(partial, buffers, bias, residual, out, norm_weight, normed_out)
    if out is None:
        out = torch.empty(partial.shape[-2:], dtype=dtype, device=partial.device)
    num_tokens, hidden = partial.shape[-2:]
    if num_tokens == 0:
        return out
    received, size = buffers.received, buffers.received.size
    tile_dim = triton.next_power_of_2(hidden)
    if INTERPRET:
        config = RmsNormConfig.for_interpreter(RING_ROWS, hidden)
    else:
        config = RmsNormConfig.default_for(hidden)
    tile_rows = min(config.tile_rows, RING_ROWS)
    num_programs = min(triton.cdiv(num_tokens, tile_rows), RING_ROWS // tile_rows)
    if algorithm is None:
        algorithm = algorithm_for(size, num_tokens * hidden * received.own.itemsize)
    _all_reduce_norm_kernel[(num_programs,)](
        *with_strides(out, 1), *with_strides(normed_out, 1), received.parts, buffers.turn,
        partial, partial.stride(0), partial.stride(-2), *with_strides(residual, 1),
        bias, norm_weight, buffers.abort, num_tokens, hidden, eps,
        RANK=received.rank, SIZE=size, RING_SLOTS=RING_SLOTS, RING_ROWS=RING_ROWS,
        TREE_SIZE=triton.next_power_of_2(size),
        SPLITS=partial.shape[0] if partial.dim() == 3 else 1,
        TWO_SHOT=algorithm == "two_shot" and size > 1, TILE_ROWS=tile_rows, TILE_DIM=tile_dim,
        num_warps=config.num_warps, **register_options(received),
        **overlap_options(partial.device),
    )  # fmt: skip
    return out


def register_options(received: PeerBuffer) -> dict[str, int]:
    """Return the limit of a thread's registers with which two programs fit a multiprocessor.

    On two H200 [256, 8192] takes 16.9 us with it, and 18.1 without, where a third of the programs
    starts late. Sums of more ranks, and of float32, have more registers: they would be spilled.
    """
    is_small = received.size == 2 and received.own.itemsize == 2
    is_limited = is_small and device_info(received.own.device).capability in LIMITED
    return {"maxnreg": MOST_REGISTERS} if is_limited else {}


def algorithm_for(size: int, num_bytes: int) -> AllReduceAlgorithm:
    """Return the faster algorithm for a sum of ``num_bytes`` over ``size`` ranks."""
    return "two_shot" if size > 2 and num_bytes > ONE_SHOT_BYTES else "one_shot"


def _check(
    partial: torch.Tensor,
    buffers: AllReduceBuffers,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    normed_out: torch.Tensor | None,
) -> torch.dtype:
    """Raise unless the arguments are as ``all_reduce_norm`` says; return the result's dtype."""
    check_tensor("partial", partial, dtype=FLOAT_DTYPES, unit_last_stride=True)
    check_launchable("partial", partial)
    dtype = next((each.dtype for each in (out, residual) if each is not None), partial.dtype)
    buffers.check_partial(partial, dtype)
    if partial.dtype not in (dtype, torch.float32):
        raise TypeError(f"partial: expected dtype {dtype} or torch.float32, got {partial.dtype}")
    check = bind(check_tensor, dtype=dtype, device=partial.device)
    if bias is not None:
        check("bias", bias, shape=partial.shape[-1:], contiguous=True)
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None:
            check(name, tensor, shape=partial.shape[-2:], unit_last_stride=True)
    if (norm_weight is None) != (normed_out is None):
        alone = "normed_out" if norm_weight is None else "norm_weight"
        raise ValueError(f"norm_weight, normed_out: expected both or neither, got {alone}")
    if normed_out is not None:
        check("norm_weight", norm_weight, shape=partial.shape[-1:], contiguous=True)
        check("normed_out", normed_out, shape=partial.shape[-2:], unit_last_stride=True)
    return dtype
