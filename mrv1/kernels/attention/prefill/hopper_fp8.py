"""The part of ``hopper`` for caches of e4m3 codes: a group of warps widens them, once a tile.

For scales of any granularity. A program has one group more than ``warp_groups`` tells::

    producer, 1 warp       copies codes of K and V: one bulk copy (TMA) a page
    converter, 4 warps     reads scales, widens codes to fp16
    consumers              as there, on fp16 keys and values

fp16 holds every code exactly, and a bf16 query divided by a power of two. Scales stay out of the
products: a key's K scale multiplies its scores, and its V scale is part of its weights, because
the logarithm of the V scale is added to the scores::

    score[i, k]  = factor[k] * (q[i] . K[k]) + bias[k]    factor = softmax_scale * unit * K scale
    weight[i, k] = 2^(score[i, k] - shift[i])             bias = log2(V scale)
    out[i]       = sum_k weight[i, k] V[k] / sum_k weight[i, k] inverse[k]
                                                          inverse = 1 / V scale

A key without a page has the bias -inf and the inverse 0, hence no weight. Instructions seem to
limit the kernel, not bandwidth: on an H200 five versions took longer the more a tile had.
"""

from __future__ import annotations

from mrv1.kernels._base.gluon import aggregate, fence_async_shared, gl, gluon, mbarrier
from mrv1.kernels.attention.prefill import warp_groups as wg
from mrv1.kernels.attention.prefill.warp_groups import PRODUCER_REGISTERS, VECTOR
from mrv1.kernels.cache.kv_scales import KVScales

TILE = (128, 2)
"""Keys of a tile, and tiles of fp16 keys and values in shared memory: 2 * (32 + 32) KiB, and 32
KiB of queries."""
SLOTS = gl.constexpr(3)  # tiles of codes in shared memory, of K and V in turns: 3 * 16 KiB
COLUMN_STAGES = gl.constexpr(3)
"""Tiles of factors, biases and inverses. When the keys of a tile are free, its columns are still
read, but not the columns of the tile before."""
WIDE_CONSUMER_REGISTERS = gl.constexpr(208)
CONVERTER_REGISTERS = gl.constexpr(56)
"""With a producer and two consumers 512 in all, a multiprocessor's 65,536."""
CLEARED_ROWS = gl.constexpr(32)
"""Rows of values that are cleared at a time, so that they fit the converter's registers."""
LIFT = gl.constexpr(14)
"""Weights are at most 2^14, so that fp16 holds weights down to 2^-38 of the largest."""
QUERY_EXPONENT = gl.constexpr(14)
"""A program's largest bf16 query element becomes an fp16 number in [2^14, 2^15)."""
WIDE_LAYOUT = gl.constexpr(wg.box_layout(64, 2, 2))
COLUMN_LAYOUT = gl.constexpr(gl.SharedLinearLayout([[1], [8], [2], [4], [16], [32], [64]]))
"""A thread has keys 2 i and 2 i + 1 of every 8 scores; here two such pairs are 16 bytes."""
SIZE_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@aggregate
class Scales:
    """Where the scales of one head's keys and values are."""

    k_ptr: gl.tensor
    v_ptr: gl.tensor
    base: gl.tensor  # elements
    block_stride: gl.tensor
    tokens_per_scale: gl.tensor

    @gluon.jit
    def load(self, block, tile, BLOCK_SIZE: gl.constexpr):
        """Return the K and V scale of each key of a tile, 0 and 1 where ``block`` is -1."""
        TILE_TOKENS: gl.constexpr = block.shape[0]
        token = (tile * TILE_TOKENS + gl.arange(0, TILE_TOKENS, layout=VECTOR)) % BLOCK_SIZE
        at = self.base + block.to(gl.int64) * self.block_stride + token // self.tokens_per_scale
        k_scale = gl.load(self.k_ptr + at, mask=block >= 0, other=0.0)
        v_scale = gl.load(self.v_ptr + at, mask=block >= 0, other=1.0)
        return k_scale, v_scale


@aggregate
class ScaledKeys:
    """How products of fp16 queries and codes become weights, which are at most 2^LIFT."""

    factors: gl.shared_memory_descriptor  # [COLUMN_STAGES, TILE_TOKENS], as the next two
    biases: gl.shared_memory_descriptor
    inverses: gl.shared_memory_descriptor

    @gluon.jit
    def no_weights(self, TILE_TOKENS: gl.constexpr):
        """Return the total of no weights, of whole rows."""
        ROWS: gl.constexpr = gl.SliceLayout(1, wg.product_layout(TILE_TOKENS))
        return gl.zeros([64], gl.float32, ROWS)

    @gluon.jit
    def weigh(
        self, scores, top, total, at, tile, visible_keys, at_right, at_left, MASKED: gl.constexpr
    ):
        """Return (weights, top, total, rescale); a row sees ``visible_keys`` of the tile."""
        KEYS: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        columns = at % COLUMN_STAGES
        factor = gl.expand_dims(self.factors.index(columns).load(KEYS), 0)
        bias = gl.expand_dims(self.biases.index(columns).load(KEYS), 0)
        scores = gl.fma(scores, factor.broadcast_to(scores.shape), bias.broadcast_to(scores.shape))
        if MASKED:
            key = gl.arange(0, scores.shape[1], layout=KEYS)
            scores = gl.where(key[None, :] < visible_keys[:, None], scores, float("-inf"))
        new_top = gl.maximum(top, gl.max(scores, 1))
        shift = gl.where(new_top == float("-inf"), 0.0, new_top) - LIFT  # -inf - -inf is NaN
        rescale = gl.exp2(top - LIFT - shift)
        weights = gl.exp2(scores - shift[:, None])
        inverse = self.inverses.index(columns).load(KEYS)
        total = total * rescale + gl.sum(weights * inverse[None, :], 1)
        return weights, new_top, total, rescale


@gluon.jit
def _produce(k_desc, v_desc, codes, pages, end_tile, num_tiles):
    """Copy the codes of the last ``num_tiles`` tiles: K, K V, K V, ..., V, as they are needed."""
    TILE_TOKENS: gl.constexpr = codes.tiles.shape[1]
    at = 0
    for step in range(num_tiles + 1):
        tile = end_tile - 1 - step
        if step < num_tiles:
            codes.copy(wg.Boxes(k_desc, None), pages.rows(tile, TILE_TOKENS), at)
            at += 1
        if step > 0:
            codes.copy(wg.Boxes(v_desc, None), pages.rows(tile + 1, TILE_TOKENS), at)
            at += 1


@gluon.jit
def _widened(codes):
    """Return the values of e4m3 codes in fp16, which represents them exactly."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r", [codes], dtype=gl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _query_exponent(sizes):
    """Return the biased exponent of the program's largest finite query element (bf16).

    Divided by that power of two, elements that underflow in fp16 are at most 2^-39 of the largest.
    """
    first = gl.max(sizes.index(0).load(VECTOR), 0)
    largest = gl.maximum(first, gl.max(sizes.index(1).load(VECTOR), 0))
    return gl.maximum(largest, 1e-30).to(gl.int32, bitcast=True) >> 23


@gluon.jit
def _load_blocks(pages, tile, end_position, TILE_TOKENS: gl.constexpr):
    """Return the block of each key of a tile, -1 where it has no page or no row sees it."""
    position = tile * TILE_TOKENS + gl.arange(0, TILE_TOKENS, layout=VECTOR)
    seen = (position >= 0) & (position < end_position)
    return gl.load(pages.table_row_ptr + position // pages.BLOCK_SIZE, mask=seen, other=-1)


@gluon.jit
def _convert(
    codes, buffers, columns, sizes, sized, pages, scales, end_position, end_tile, num_tiles,
    scale, IS_DIVIDED: gl.constexpr,
):  # fmt: skip
    """Widen the last ``num_tiles`` tiles in the order of the copies; write the keys' columns."""
    TILE_TOKENS: gl.constexpr = codes.tiles.shape[1]
    LAYOUT: gl.constexpr = wg.rows_layout(codes.tiles.shape[2])
    # Blocks are looked up two tiles ahead and scales one, so that no tile waits for them.
    block = _load_blocks(pages, end_tile - 1, end_position, TILE_TOKENS)
    next_block = _load_blocks(pages, end_tile - 2, end_position, TILE_TOKENS)
    k_scale, v_scale = scales.load(block, end_tile - 1, pages.BLOCK_SIZE)
    if IS_DIVIDED:  # the queries are bf16, divided by a power of two
        mbarrier.wait(sized.index(0), 0)
        scale *= ((_query_exponent(sizes) - QUERY_EXPONENT) << 23).to(gl.float32, bitcast=True)
    at = 0
    for step in range(num_tiles + 1):
        tile = end_tile - 1 - step
        if step < num_tiles:
            factor = k_scale * scale
            bias = gl.where(block >= 0, gl.log2(v_scale), float("-inf"))
            inverse = gl.where(block >= 0, 1.0 / v_scale, 0.0)
            block = next_block
            next_block = _load_blocks(pages, tile - 2, end_position, TILE_TOKENS)
            k_scale, v_scale = scales.load(block, tile - 1, pages.BLOCK_SIZE)
            codes.wait_filled(at)
            buffers.keys.wait_free(step)
            buffers.keys.tile(step).store(_widened(codes.tile(at).load(LAYOUT)))
            columns.factors.index(step % COLUMN_STAGES).store(factor)
            columns.biases.index(step % COLUMN_STAGES).store(bias)
            columns.inverses.index(step % COLUMN_STAGES).store(inverse)
            fence_async_shared()
            buffers.keys.fill(step)
            codes.release(at)
            at += 1
        if step > 0:
            num_live = end_position - (tile + 1) * TILE_TOKENS
            codes.wait_filled(at)
            buffers.values.wait_free(step - 1)
            buffers.values.tile(step - 1).store(_widened(codes.tile(at).load(LAYOUT)))
            if num_live < TILE_TOKENS:
                for first in gl.static_range(0, TILE_TOKENS, CLEARED_ROWS):
                    part = buffers.values.tile(step - 1).slice(first, CLEARED_ROWS)
                    wg.clear_rows(part, first, num_live)
            fence_async_shared()
            buffers.values.fill(step - 1)
            codes.release(at)
            at += 1


@gluon.jit
def _consume(
    PART: gl.constexpr, buffers, columns, sizes, sized, q, outputs, tile, end_tile, num_tiles
):  # fmt: skip
    """Attend from 64 of the program's rows to the ``num_tiles`` tiles before ``end_tile``."""
    TILE_TOKENS: gl.constexpr = buffers.keys.tiles.shape[1]
    rows = q.load(tile, PART, buffers.queries.tiles.shape[2])
    if rows.dtype == gl.bfloat16:
        wide = rows.to(gl.float32)
        size = gl.abs(wide)
        largest = gl.max(gl.max(gl.where(size < float("inf"), size, 0.0), 1), 0)
        sizes.index(PART).store(gl.full([1], largest, gl.float32, VECTOR))
        mbarrier.arrive(sized.index(0), count=1)
        mbarrier.wait(sized.index(0), 0)
        exponent = 254 + QUERY_EXPONENT - _query_exponent(sizes)
        rows = (wide * (exponent << 23).to(gl.float32, bitcast=True)).to(gl.float16)
    buffers.queries.tile(PART).store(rows)
    fence_async_shared()

    num_inner = (tile.context_len + tile.first_query + 1) // TILE_TOKENS - (end_tile - num_tiles)
    num_masked = gl.minimum(gl.maximum(num_tiles - num_inner, 1), num_tiles)
    value, lse, _ = wg.Consumer(PART, buffers, columns, None).attend(
        tile, 0, end_tile - 1, num_masked, num_tiles, num_tiles, None, gl.to_tensor(0), None, LIFT
    )
    outputs.store(value, lse, tile, PART, buffers.queries.tile(PART))


@gluon.jit
def attend(
    k_desc, v_desc, q, outputs, tile, pages, scales, end_position, end_tile, num_tiles, scale,
    STAGES: gl.constexpr, TILE_TOKENS: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Run the groups of warps of a program."""
    queries = wg.make_channel(gl.float16, WIDE_LAYOUT, 2, 64, DIM, 0)
    keys = wg.make_channel(gl.float16, WIDE_LAYOUT, STAGES, TILE_TOKENS, DIM, 2)
    values = wg.make_channel(gl.float16, WIDE_LAYOUT, STAGES, TILE_TOKENS, DIM, 2)
    buffers = wg.Buffers(queries, keys, values, None)
    CODES_LAYOUT: gl.constexpr = k_desc.layout
    codes = wg.make_channel(gl.uint8, CODES_LAYOUT, SLOTS, TILE_TOKENS, DIM, 1)
    COLUMNS: gl.constexpr = [COLUMN_STAGES, TILE_TOKENS]
    columns = ScaledKeys(
        gl.allocate_shared_memory(gl.float32, COLUMNS, COLUMN_LAYOUT),
        gl.allocate_shared_memory(gl.float32, COLUMNS, COLUMN_LAYOUT),
        gl.allocate_shared_memory(gl.float32, COLUMNS, COLUMN_LAYOUT),
    )
    sizes = gl.allocate_shared_memory(gl.float32, [2, 1], SIZE_LAYOUT)
    sized = wg.make_barriers(1, 2)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (0, buffers, columns, sizes, sized, q, outputs, tile, end_tile, num_tiles)),
        (_consume, (1, buffers, columns, sizes, sized, q, outputs, tile, end_tile, num_tiles)),
        (_convert, (
            codes, buffers, columns, sizes, sized, pages, scales, end_position, end_tile,
            num_tiles, scale, q.ptr.dtype.element_ty == gl.bfloat16,
        )),
        (_produce, (k_desc, v_desc, codes, pages, end_tile, num_tiles)),
    ], [4, 4, 1], [WIDE_CONSUMER_REGISTERS, CONVERTER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def scale_arguments(scales: KVScales | None, block_size: int) -> tuple[object, ...]:
    """Return the kernel's arguments for the scales of a cache, if it has any."""
    if scales is None:
        return None, None, None, None, 0
    per_block = max(scales.page_format.scales_per_block(block_size), 1)
    addresses = (scales.base, scales.block_stride)
    return scales.k_scale, scales.v_scale, *addresses, block_size // per_block
