"""Paged prefill attention for Hopper (sm_90): one tile of queries a program, or shared by several.

``attention`` launches this kernel where ``choice.KERNELS`` allows: for full heads with causal
masks, of 16-bit caches of contiguous pages of 64, 80, 96, 128 or 256 dimensions; with
``hopper_fp8``, of e4m3 codes of 128. ``warp_groups`` tells how a program works. Where there are
few tiles, several programs share the keys of each; the last one to finish merges their partial
results if they are few, else ``merge`` does.
"""

from __future__ import annotations

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.gluon import fence_async_shared, gl, gluon, let_next_start, thread_barrier
from mrv1.kernels._base.launches import launch_kernel
from mrv1.kernels.attention.prefill import hopper_fp8
from mrv1.kernels.attention.prefill import warp_groups as wg
from mrv1.kernels.attention.prefill.call import PrefillCall
from mrv1.kernels.attention.prefill.choice import (
    PROGRAMS_PER_SM,
    WARP_GROUP_TILES,
    PrefillSplits,
    merges_layer,
)
from mrv1.kernels.attention.prefill.merge import merge_splits
from mrv1.kernels.attention.prefill.warp_groups import (
    CONSUMER_REGISTERS,
    LN_2,
    LOG2_E,
    PRODUCER_REGISTERS,
    ROWS,
    VECTOR,
)
from mrv1.kernels.cache.kv_scales import KVScales

SCAN_BLOCKS = gl.constexpr(1024)
MERGED_ROWS = gl.constexpr(16)  # rows that are merged at a time, so that they fit registers
WIDE_VECTOR = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def _produce(k_boxes, v_boxes, buffers, pages, first_place, num_tiles):
    """Copy the pages of ``num_tiles`` tiles, from the last to the one at ``first_place``."""
    for step in range(num_tiles):
        tile = wg.tile_at(first_place + num_tiles - 1 - step, pages.window)
        rows = pages.rows(tile, buffers.keys.tiles.shape[1])
        buffers.keys.copy(k_boxes, rows, step)
        buffers.values.copy(v_boxes, rows, step)


@gluon.jit
def _consume(
    PART: gl.constexpr, buffers, q, outputs, tile, pages, first_place, num_tiles, softmax, split
):  # fmt: skip
    """Attend from 64 of the program's rows to ``num_tiles`` tiles from ``first_place`` on."""
    TILE_TOKENS: gl.constexpr = buffers.keys.tiles.shape[1]
    FIRST: gl.constexpr = buffers.keys.tiles.shape[2]
    buffers.queries.tile(PART).store(q.load(tile, PART, FIRST))
    if buffers.queries.rests is not None:
        REST: gl.constexpr = buffers.queries.rests.shape[2]
        buffers.queries.rest(PART).store(q.load(tile, PART, REST, FIRST))
    fence_async_shared()
    # A page that is missing among those that every row sees makes all tiles masked ones.
    first_column = wg.tile_at(first_place, pages.window) * TILE_TOKENS // pages.BLOCK_SIZE
    has_gaps = pages.have_gaps(first_column, SCAN_BLOCKS, WIDE_VECTOR)
    last_place = first_place + num_tiles - 1
    num_masked, first_left = wg.masked_steps(
        tile, pages.window, last_place + 1, num_tiles, has_gaps, TILE_TOKENS
    )
    last_tile = wg.tile_at(last_place, pages.window)
    num_live = tile.context_len + tile.end_query - last_tile * TILE_TOKENS
    scores = wg.PlainKeys(pages, softmax, has_gaps)
    logit_sinks = softmax.logit_sinks(tile, PART, TILE_TOKENS)
    if logit_sinks is not None:  # the first of the programs that share a tile counts it
        logit_sinks = gl.where(split == 0, logit_sinks, float("-inf"))
    value, lse, _ = wg.Consumer(PART, buffers, scores, pages.window).attend(
        tile, 0, last_place, num_masked, first_left, num_tiles, num_live, gl.to_tensor(0),
        logit_sinks,
    )  # fmt: skip
    outputs.store(value, lse, tile, PART, None)


@gluon.jit
def _note_states(counts_ptr, num_kv_heads, splits, tile):
    """Write how many partial results the tile's queries have, for ``merge``."""
    query = tile.first_query + gl.arange(0, ROWS, layout=VECTOR)
    place = (tile.query_start + query).to(gl.int64) * num_kv_heads + tile.head
    count = gl.full([ROWS], 0, gl.int32, VECTOR) + splits
    gl.store(counts_ptr + place, count, mask=query < tile.end_query)


@gluon.jit
def _merge_tile(outputs, num_tokens, splits, tile, DIM: gl.constexpr):
    """Weigh the states of a tile by their log-sum-exp, in order, and write its rows."""
    PARTS: gl.constexpr = wg.part_dims(DIM)
    for part in gl.static_range(len(PARTS)):
        _merge_part(outputs, num_tokens, splits, tile, DIM, PARTS[part], part * PARTS[0])


@gluon.jit
def _merge_part(
    outputs, num_tokens, splits, tile, DIM: gl.constexpr, COLUMNS: gl.constexpr,
    FIRST_DIM: gl.constexpr,
):  # fmt: skip
    """Do so for some columns of the rows."""
    LAYOUT: gl.constexpr = wg.rows_layout(COLUMNS)
    VECTOR_OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    dim = FIRST_DIM + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    for first_row in range(0, ROWS, MERGED_ROWS):
        places = tile.places(first_row, MERGED_ROWS, VECTOR_OF_ROWS)
        token, q_head, exists = places
        top = gl.full([MERGED_ROWS], float("-inf"), gl.float32, VECTOR_OF_ROWS)
        total = gl.zeros([MERGED_ROWS], gl.float32, VECTOR_OF_ROWS)
        acc = gl.zeros([MERGED_ROWS, COLUMNS], gl.float32, LAYOUT)
        for split in range(splits):
            state = (split * num_tokens + token) * outputs.num_q_heads + q_head
            part_lse_ptr = outputs.states_lse_ptr + state
            part_lse = gl.load(part_lse_ptr, mask=exists, other=float("-inf")) * LOG2_E
            offset = state[:, None] * DIM + dim[None, :]
            part = gl.load(outputs.states_ptr + offset, mask=exists[:, None], other=0.0)
            new_top = gl.maximum(top, part_lse)
            shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is NaN
            weight = gl.exp2(part_lse - shift)
            rescale = gl.exp2(top - shift)
            acc = acc * rescale[:, None] + weight[:, None] * part
            total = total * rescale + weight
            top = new_top
        seen = total != 0.0
        total = gl.where(seen, total, 1.0)
        outputs.out.store(acc / total[:, None], places, FIRST_DIM)
        lse = gl.where(seen, (top + gl.log2(total)) * LN_2, float("-inf"))
        outputs.lse.store_vector(lse, places)


@gluon.jit(
    do_not_specialize=[
        "num_splits", "num_programs", "num_tokens", "num_reqs", "num_heads", "tokens_per_scale"
    ],
    # Behind decode rows they begin anywhere.
    do_not_specialize_on_alignment=["block_table_ptr", "query_start_loc_ptr", "seq_lens_ptr"],
)  # fmt: skip
def _prefill_hopper_kernel(
    out_ptr, stride_out_token, stride_out_head,  # [num_tokens, q_heads, DIM], unit last stride
    lse_ptr, stride_lse_token, stride_lse_head,  # [num_tokens, q_heads] fp32, or None
    states_ptr,  # [num_splits, num_tokens, q_heads, DIM] fp32, or None: one program a tile
    states_lse_ptr,  # [num_splits, num_tokens, q_heads] fp32
    arrivals_ptr,  # [tiles * kv_heads] int32, 0 before and after a launch
    counts_ptr,  # [num_tokens, kv_heads] int32, *written*, or None: ``merge`` does not follow
    num_splits,  # programs of a tile, at most
    num_programs,  # of all that share tiles
    num_tokens,
    q_ptr, stride_q_token, stride_q_head,  # [num_tokens, q_heads, DIM], unit last stride
    k_desc, k_rest_desc, v_desc, v_rest_desc,  # of one layer: see ``describe``
    k_scale_ptr, v_scale_ptr,  # float32, flat, or None: a 16-bit cache
    scale_base_ptr, scale_block_stride_ptr,  # [kv_heads] int64, elements
    tokens_per_scale,  # of a block
    num_kv_heads,
    block_table_ptr, stride_table_row,  # [num_reqs, row_width] int32, unit last stride
    query_start_loc_ptr,  # [num_reqs + 1] int32
    seq_lens_ptr, num_reqs,  # [num_reqs] int32
    heads_ptr, num_heads,  # [num_heads] int32, KV heads of the launch, or None: all
    head_base_ptr, block_stride_ptr,  # [kv_heads] int64, elements
    table_offset_ptr,  # [kv_heads] int32
    window_ptr, sink_ptr,  # the same, or None: no head has a window
    ring_blocks_ptr,  # the same, or None: no head has a ring
    softmax_scale,
    soft_cap,  # float32, or None
    sinks_ptr,  # [q_heads], or None
    DIM: gl.constexpr, GROUP: gl.constexpr,  # query heads per KV head
    BLOCK_SIZE: gl.constexpr, TILE_TOKENS: gl.constexpr,  # keys of a tile
    STAGES: gl.constexpr,  # tiles of K and of V in shared memory
    MIN_TILES: gl.constexpr,  # of a program that shares a tile
):  # fmt: skip
    """Grid (tiles * num_heads, and num_programs - num_heads more where programs share tiles)."""
    TILE_QUERIES: gl.constexpr = ROWS // GROUP
    pairs = gl.num_programs(0)
    pair = gl.program_id(0)
    split = gl.to_tensor(0)
    if counts_ptr is not None:
        let_next_start()  # the merge
    if states_ptr is not None:
        pairs -= num_programs - num_heads
        tiles = wg.count_tiles(query_start_loc_ptr, num_reqs, TILE_QUERIES)
        num_splits = gl.minimum(num_splits, num_programs // (tiles * num_heads))
        num_splits = gl.maximum(num_splits, 1)
        if pair >= pairs:
            split = 1 + (pair - pairs) // (tiles * num_heads)
            pair = (pair - pairs) % (tiles * num_heads)
            tile_of_batch = pair // num_heads
        else:
            tile_of_batch = pairs // num_heads - 1 - pair // num_heads
        head = pair % num_heads
        if split >= num_splits:
            return
    else:
        # Head by head, so that the head's K and V stay in L2; the last tiles have the most keys.
        num_tiles = pairs // num_heads
        head = pair // num_tiles
        tile_of_batch = num_tiles - 1 - pair % num_tiles
    if heads_ptr is not None:
        head = gl.load(heads_ptr + head)
    req = wg.find_request(query_start_loc_ptr, tile_of_batch, num_reqs, GROUP)
    query_start = gl.load(query_start_loc_ptr + req)
    query_len = gl.load(query_start_loc_ptr + req + 1) - query_start
    first_query = (tile_of_batch - (query_start // TILE_QUERIES + req)) * TILE_QUERIES
    if first_query >= query_len:
        return
    end_query = gl.minimum(first_query + TILE_QUERIES, query_len)
    context_len = gl.load(seq_lens_ptr + req) - query_len
    # A padding row has queries and no keys: one tile, in which it sees none.
    end_position = gl.maximum(context_len + end_query, 0)
    end_place = gl.maximum(gl.cdiv(end_position, TILE_TOKENS), 1)
    window = None
    if window_ptr is not None:
        window = wg.find_window(
            window_ptr, sink_ptr, ring_blocks_ptr, head, context_len + first_query, end_position,
            BLOCK_SIZE, TILE_TOKENS,
        )  # fmt: skip
        end_place -= window.gap
    first_place = gl.to_tensor(0)
    splits = 1
    if states_ptr is not None:
        share = gl.maximum(gl.cdiv(end_place, num_splits), MIN_TILES)
        splits = gl.maximum(gl.cdiv(end_place, share), 1)
        if split >= splits:
            return
        first_place = split * share
        end_place = gl.minimum(first_place + share, end_place)
    num_tiles = end_place - first_place
    end_tile = end_place
    if window_ptr is not None:
        end_tile = wg.tile_at(end_place - 1, window) + 1
    last_column = gl.maximum(gl.cdiv(end_position, BLOCK_SIZE) - 1, 0)
    last_column = gl.minimum(last_column, gl.cdiv(end_tile * TILE_TOKENS, BLOCK_SIZE) - 1)
    pages = wg.Pages(
        block_table_ptr + req.to(gl.int64) * stride_table_row + gl.load(table_offset_ptr + head),
        last_column, (gl.load(head_base_ptr + head) // DIM).to(gl.int32),
        (gl.load(block_stride_ptr + head) // DIM).to(gl.int32), window, BLOCK_SIZE,
    )  # fmt: skip
    tile = wg.QueryTile(query_start, first_query, end_query, context_len, head, 0, GROUP, 1)

    q = wg.Matrix(q_ptr, stride_q_token, stride_q_head)
    out = wg.Matrix(out_ptr, stride_out_token, stride_out_head)
    lse = wg.Matrix(lse_ptr, stride_lse_token, stride_lse_head)
    num_q_heads = num_kv_heads * GROUP
    if counts_ptr is not None:  # noqa: SIM102
        if split == 0:
            _note_states(counts_ptr, num_kv_heads, splits, tile)
    first_state = gl.to_tensor(-1).to(gl.int64)
    if states_ptr is not None:  # noqa: SIM102
        if splits > 1:
            first_state = split.to(gl.int64) * num_tokens * num_q_heads
    outputs = wg.Outputs(out, lse, states_ptr, states_lse_ptr, first_state, num_q_heads)
    softmax = wg.make_softmax(softmax_scale, soft_cap, sinks_ptr)
    if k_scale_ptr is None:
        dtype: gl.constexpr = k_desc.dtype
        LAYOUT: gl.constexpr = k_desc.layout
        queries = wg.make_channel(dtype, LAYOUT, 2, 64, DIM, 0)
        keys = wg.make_channel(dtype, LAYOUT, STAGES, TILE_TOKENS, DIM, 2)
        values = wg.make_channel(dtype, LAYOUT, STAGES, TILE_TOKENS, DIM, 2)
        buffers = wg.Buffers(queries, keys, values, wg.make_barriers(1, 2))
        k_boxes = wg.Boxes(k_desc, k_rest_desc)
        v_boxes = wg.Boxes(v_desc, v_rest_desc)
        fence_async_shared()
        gl.warp_specialize([
            (_consume, (
                0, buffers, q, outputs, tile, pages, first_place, num_tiles, softmax, split
            )),
            (_consume, (
                1, buffers, q, outputs, tile, pages, first_place, num_tiles, softmax, split
            )),
            (_produce, (k_boxes, v_boxes, buffers, pages, first_place, num_tiles)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        scales = hopper_fp8.Scales(
            k_scale_ptr, v_scale_ptr, gl.load(scale_base_ptr + head),
            gl.load(scale_block_stride_ptr + head), tokens_per_scale,
        )  # fmt: skip
        hopper_fp8.attend(
            k_desc, v_desc, q, outputs, tile, pages, scales, end_position, end_place, num_tiles,
            softmax.scale, STAGES, TILE_TOKENS, DIM,
        )  # fmt: skip
    if states_ptr is not None and counts_ptr is None:  # noqa: SIM102
        if splits > 1:
            arrival_ptr = arrivals_ptr + tile_of_batch * num_kv_heads + head
            thread_barrier()
            arrived = gl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu")
            if arrived == splits - 1:
                gl.store(arrival_ptr, 0)
                _merge_tile(outputs, num_tokens, splits, tile, DIM)


MIN_SHARED_TILES = 2  # tiles of a program that shares a query tile's keys with others, at least
MIN_SHARED_CODES = 4  # the same, of codes


def launch(call: PrefillCall, splits: PrefillSplits | None, scales: KVScales | None) -> None:
    """Launch the kernel; programs share tiles if there are ``splits``."""
    num_programs, num_heads = call.num_pairs, call.heads[1]
    parts: tuple[object, ...] = (None, None, None, None, 0, 0)
    counts = None  # the last program merges, whichever layer the splits were made for
    if splits is not None and merges_layer(call.layout) and not call.full_only:
        counts = splits.counts
    if splits is not None:  # whose programs are smaller: two of them fit a multiprocessor
        num_sharing = max(splits.num_programs // PROGRAMS_PER_SM, num_heads)
        if call.has_window and len(call.layout.full_heads):
            # Beside long contexts of full heads, the programs of streaming heads end at once.
            num_sharing = num_sharing * num_heads // len(call.layout.full_heads)
        num_programs += num_sharing - num_heads
        buffers = splits.states, splits.states_lse, splits.arrivals, counts
        parts = (*buffers, splits.num_splits, num_sharing)
    tile = WARP_GROUP_TILES[call.layout.head_dim] if scales is None else hopper_fp8.TILE
    launch_kernel(
        _prefill_hopper_kernel, (num_programs,),
        *call.outputs(), *parts, call.q.shape[0], *with_strides(call.q),
        *call.caches(wg.describe), *hopper_fp8.scale_arguments(scales, call.layout.block_size),
        call.layout.num_kv_heads, *call.batch(), **call.constexprs(tile),
        MIN_TILES=MIN_SHARED_TILES if scales is None else MIN_SHARED_CODES, num_warps=4,
    )  # fmt: skip
    if splits is not None and counts is not None:
        merge_splits(call, splits)
