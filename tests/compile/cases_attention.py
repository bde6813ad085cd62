"""Launches of KV cache writes and prefill attention that are compiled ahead of time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from mrv1.device import DeviceInfo, choose_fp8_path, choose_nibble_path
from mrv1.kernels._base.triton import triton
from mrv1.kernels.attention.online_softmax import dot_precision
from mrv1.kernels.attention.prefill.attention import (
    MIN_SPLIT_STEPS,
    _paged_prefill_attention_kernel,
)
from mrv1.kernels.attention.prefill.choice import (
    SHORT_WINDOW,
    WARP_GROUP_TILES,
    PrefillAttentionConfig,
    consumers_for,
    short_window_tile,
)
from mrv1.kernels.attention.prefill.merge import MERGED_VECTORS, _merge_splits_kernel
from mrv1.kernels.cache.formats import FP8, INT4, ScaleGranularity
from mrv1.kernels.cache.kv_cache_write import KVCacheWriteConfig, _kv_cache_write_kernel
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.testing.aot import AotCase, Target, pointer

if TYPE_CHECKING:
    from mrv1.kernels._base.gluon import TensorDescriptor

SHAPES = (
    *((torch.bfloat16, head_dim) for head_dim in (64, 80, 128, 256)),
    *((torch.float32, head_dim) for head_dim in (64, 80, 128, 256)),
    (torch.float16, 128),  # bfloat16's code except for the conversion
)
STREAMING_SHAPES = ((torch.bfloat16, 128), (torch.float32, 128))
FP8_SHAPES = (
    *((torch.bfloat16, head_dim) for head_dim in (64, 80, 128, 256)),
    (torch.float16, 128),
    (torch.float32, 128),
)
"""Dtype of q, key and value, and head_dim, for a cache of e4m3 codes."""
MERGES = (
    *((torch.bfloat16, 128, splits) for splits in (4, 8, 16)),
    *((torch.bfloat16, dim, 16) for dim in (80, 256)),
    (torch.float16, 128, 16),
)
"""Dtype, head_dim, and partial results of a query."""
INT4_SHAPES = (
    *((torch.bfloat16, head_dim) for head_dim in (64, 96, 128, 256)),
    (torch.float16, 128),
    (torch.float32, 128),
)
"""The same for a cache of 4-bit codes."""
NO_FP8: dict[str, object] = {"CODEC": None, "SCALES_PER_BLOCK": 0}
OTHER_DIMS = [dim for dim in WARP_GROUP_TILES if dim != 128]
"""Head dimensions of the kernels of warp groups, most of whose cases have 128."""
NUM_KV_HEADS = 8
BLOCK_SIZE = 16


def cases(target: Target) -> list[AotCase]:
    full = [(dtype, dim, False) for dtype, dim in SHAPES]
    streaming = [(dtype, dim, True) for dtype, dim in STREAMING_SHAPES]
    return [
        *(_write(dtype, dim) for dtype, dim, _ in full),
        *(
            _prefill(target, dtype, dim, ring, max_query_len)
            for dtype, dim, ring in full + streaming
            for max_query_len in (1, 4096)
        ),
        *(
            _prefill(target, torch.bfloat16, 128, ring, 4096, offsets=True)
            for ring in (False, True)
        ),
        _prefill(target, torch.bfloat16, 128, True, 4096, ring=False),
        *(_prefill(target, torch.bfloat16, dim, False, 4096, folds=True) for dim in (128, 256)),
        *(
            _prefill(target, dtype, 128, ring, max_query_len, splits=True)
            for dtype in (torch.bfloat16, torch.float32)
            for ring in (False, True)
            for max_query_len in (9, 4096)
        ),
        *_fp8_cases(target),
        *(_warp_group_cases(target) if target.capability == (9, 0) else ()),
        *(
            _prefill(target, torch.bfloat16, 128, True, 4096, fp8=fp8, soft_cap=cap, sinks=sinks)
            for fp8 in (NO_FP8, _fp8(target, "token"))
            for cap, sinks in ((True, False), (False, True), (True, True))
        ),
        _prefill(target, torch.bfloat16, 64, True, 4096, ring=False, sinks=True),
        *(
            _prefill(target, torch.bfloat16, dim, False, 4096, soft_cap=True, **options)
            for dim, options in ((128, {}), (256, {}), (128, {"splits": True}))
        ),
        *(
            _prefill(target, torch.bfloat16, 128, False, 4096, soft_cap=True, sinks=True, **option)
            for option in ({"offsets": True}, {"folds": True})
        ),
        _prefill(target, torch.bfloat16, 128, True, 4096, ring=False, visits_masked=True),
        *(
            _prefill(
                target, torch.bfloat16, 128, True, 4096, splits=True, some_heads=True, fp8=fp8
            )
            for fp8 in (NO_FP8, _fp8(target, "token"))
        ),
    ]


def _merge(target: Target, dtype: torch.dtype, head_dim: int, splits: int) -> AotCase:
    rows, floats, lengths = pointer(dtype), pointer(torch.float32), pointer(torch.int32)
    return AotCase(
        name=f"prefill-merge-{str(dtype).removeprefix('torch.')}-{head_dim}-splits{splits}",
        kernel=_merge_splits_kernel,
        args=(rows, 4096, 128, floats, 32, 1, floats, floats, lengths, splits, lengths, 1000, 8),
        constexprs={
            "NUM_Q_HEADS": 4 * NUM_KV_HEADS, "GROUP": 4, "HEAD_DIM": head_dim,
            "TILE_VECTORS": MERGED_VECTORS, "TILE_DIM": triton.next_power_of_2(head_dim),
            "TILE_SPLITS": splits, "OVERLAP": target.has_dependent_launch,
        },
        num_warps=4,
    )  # fmt: skip


def _fp8_cases(target: Target) -> list[AotCase]:
    found = []
    for scales in ("token", "head"):
        for dtype, dim in FP8_SHAPES:
            found.append(_write(dtype, dim, _fp8(target, scales)))
            found += (
                _prefill(target, dtype, dim, False, max_query_len, fp8=_fp8(target, scales))
                for max_query_len in (1, 4096)
            )
        found += (
            _prefill(
                target, torch.bfloat16, 128, True, 4096, fp8=_fp8(target, scales), splits=splits
            )
            for splits in (False, True)
        )
    quarter = _fp8(target, "quarter")
    found += (
        _prefill(target, torch.bfloat16, dim, False, 4096, fp8=quarter) for dim in (128, 256)
    )
    for dtype, dim in INT4_SHAPES:
        found.append(_write(dtype, dim, _int4(target)))
        found += (
            _prefill(target, dtype, dim, False, max_query_len, fp8=_int4(target))
            for max_query_len in (1, 4096)
        )
    found.append(_prefill(target, torch.bfloat16, 128, True, 4096, fp8=_int4(target)))
    return found


def _fp8(target: Target, granularity: ScaleGranularity) -> dict[str, object]:
    """Return the constexprs of an fp8 cache, with the target's conversion path."""
    path = choose_fp8_path(_device(target), is_amd=target.backend == "hip").path
    scales = FP8.per(granularity).scales_per_block(BLOCK_SIZE)
    return {"CODEC": FP8.tag(path), "SCALES_PER_BLOCK": scales}


def _int4(target: Target) -> dict[str, object]:
    """Return the constexprs of a 4-bit cache, with the target's conversion path."""
    path = choose_nibble_path(_device(target), is_amd=target.backend == "hip").path
    return {"CODEC": INT4.tag(path), "SCALES_PER_BLOCK": BLOCK_SIZE}


def _is_int4(codes: dict[str, object]) -> bool:
    return str(codes["CODEC"]).startswith(INT4.name)


def _device(target: Target) -> DeviceInfo:
    return DeviceInfo(
        device=torch.device("cuda"),
        name=target.name,
        capability=target.capability,
        num_sms=132,
        total_memory_bytes=0,
    )


def _fp8_name(fp8: dict[str, object]) -> list[str]:
    if _is_int4(fp8):
        return ["int4"]
    return [] if fp8 is NO_FP8 else ["fp8", f"scales{fp8['SCALES_PER_BLOCK']}"]


def _caches(dtype: torch.dtype, fp8: dict[str, object]) -> tuple[object, ...]:
    """Return K and V cache, scales and their addresses."""
    if fp8 is NO_FP8:
        return pointer(dtype), pointer(dtype), None, None, None, None
    codes, scale, int64 = map(pointer, (torch.uint8, torch.float32, torch.int64))
    return codes, codes, scale, scale, int64, int64


def _config_dtype(dtype: torch.dtype, fp8: dict[str, object]) -> torch.dtype:
    if fp8 is NO_FP8 or dtype == torch.float32:
        return dtype
    return INT4.dtype if _is_int4(fp8) else torch.float8_e4m3fn


def _name(op: str, dtype: torch.dtype, *details: object) -> str:
    return "-".join([op, str(dtype).removeprefix("torch."), *map(str, details)])


def _write(dtype: torch.dtype, head_dim: int, fp8: dict[str, object] = NO_FP8) -> AotCase:
    config = KVCacheWriteConfig.default_for(head_dim, dtype, fp8=fp8 is not NO_FP8)
    data, int32, int64 = pointer(dtype), pointer(torch.int32), pointer(torch.int64)
    qkv_row = 4 * NUM_KV_HEADS * head_dim
    return AotCase(
        name=_name("kv_cache_write", dtype, head_dim, *_fp8_name(fp8)),
        kernel=_kv_cache_write_kernel,
        args=(
            *_caches(dtype, fp8),
            *(data, qkv_row, head_dim),
            *(data, qkv_row, head_dim),
            *(int64, 33, 1),
            *(int32, int64, int64, head_dim),
            33 * NUM_KV_HEADS,
        ),
        constexprs={
            "NUM_KV_HEADS": NUM_KV_HEADS,
            "HEAD_DIM": head_dim,
            "GROUPS": head_dim == 256,
            "BLOCK_SIZE": BLOCK_SIZE,
            "TILE_ROWS": config.tile_rows,
            **fp8,
        },
        num_warps=config.num_warps,
    )


def _pages(dtype: torch.dtype, fp8: dict[str, object]) -> tuple[object, ...]:
    """Return K cache, V cache, their scales, block table and its row stride."""
    return *_caches(dtype, fp8), pointer(torch.int32), 512


def _roles(head_dim: int) -> tuple[object, ...]:
    """Return the layout's tensors, its token stride, and softmax_scale."""
    int32, int64 = pointer(torch.int32), pointer(torch.int64)
    return int64, int64, int32, int32, int32, int32, head_dim, head_dim**-0.5


def _softmax(soft_cap: bool, sinks: bool) -> tuple[object, ...]:
    """Return the soft cap and the logit sinks."""
    return 50.0 if soft_cap else None, pointer(torch.float32) if sinks else None


def _prefill(
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    streaming: bool,
    max_query_len: int,
    *,
    fp8: dict[str, object] = NO_FP8,
    offsets: bool = False,
    ring: bool = True,
    splits: bool = False,
    folds: bool = False,
    soft_cap: bool = False,
    sinks: bool = False,
    visits_masked: bool = False,
    some_heads: bool = False,
) -> AotCase:
    group = 2
    config = PrefillAttentionConfig.default_for(
        head_dim, _config_dtype(dtype, fp8), target.capability, streaming, offsets
    )
    config = config.fit_rows(group, max_query_len)
    if folds:
        config = config.with_folds(group, target.capability)
    parks = splits or folds or (streaming and (soft_cap or sinks)) or _is_int4(fp8)
    row = group * NUM_KV_HEADS * head_dim
    int32, float32 = pointer(torch.int32), pointer(torch.float32)
    return AotCase(
        name=_name(
            "prefill",
            dtype,
            head_dim,
            f"q{max_query_len}",
            *(["ring" if ring else "window"] if streaming else []),
            *(["masked"] if visits_masked else []),
            *(["some_heads"] if some_heads else []),
            *(["offsets"] if offsets else []),
            *(["splits"] if splits else []),
            *(["deterministic"] if folds else []),
            *_fp8_name(fp8),
            *(["soft_cap"] if soft_cap else []),
            *(["sinks"] if sinks else []),
        ),
        kernel=_paged_prefill_attention_kernel,
        args=(
            *(pointer(dtype), row, head_dim),
            *(float32, group * NUM_KV_HEADS, 1),
            *((float32, float32, int32) if splits else (None,) * 3),
            *(6, 264, 512),
            None,
            *(pointer(dtype), 2 * row, head_dim),
            *_pages(dtype, fp8),
            512,
            *(int32, int32, int32 if offsets else None, 33, NUM_KV_HEADS),
            *((int32, 5) if some_heads else (None, NUM_KV_HEADS)),
            *_roles(head_dim),
            *_softmax(soft_cap, sinks),
        ),
        constexprs={
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": BLOCK_SIZE,
            "HAS_WINDOW": streaming,
            "VISITS_MASKED": visits_masked,
            "HAS_RING": streaming and ring,
            "TILE_QUERIES": config.tile_rows // group,
            "TILE_ROWS": config.tile_rows,
            "TILE_TOKENS": config.tile_tokens,
            "TILE_DIM": triton.next_power_of_2(head_dim),
            "PRECISION": dot_precision(dtype),
            "MIN_STEPS": MIN_SPLIT_STEPS,
            "FOLDS": folds,
            **fp8,
            **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # A window's scalars are parked so that two programs fit an SM: an eighth faster.
        # With splits, folds, 4-bit codes, or a soft cap or sinks of heads with a window, the
        # tile's index is parked over the loop.
        parked_bytes=64 if streaming and config.max_registers else 16 * parks,
    )


def _warp_group_cases(target: Target) -> list[AotCase]:
    """Prefill by warp groups, which only sm_90 has: all block sizes, tiles, merges, a queue.

    Of e4m3 codes, scales of every granularity take the same code.
    """
    from mrv1.kernels.attention.prefill import hopper, hopper_fp8, hopper_queue

    def case(
        dtype: torch.dtype, block_size: int, head_dim: int = 128, *, group: int = 4,
        splits: bool = False, merged: bool = False, some_heads: bool = False, fp8: bool = False,
        masks: str = "",
    ) -> AotCase:  # fmt: skip
        rows, lengths, scratch = pointer(dtype), pointer(torch.int32), pointer(torch.float32)
        pages = _page_boxes(torch.float8_e4m3fn if fp8 else dtype, block_size, head_dim)
        address = pointer(torch.int64)
        shared: tuple[object, ...] = (None, None, None, None, 0, 0)
        if splits:
            shared = (scratch, scratch, lengths, lengths if merged else None, 16, 200)
        tile = _tile(head_dim)
        if fp8:
            tile["TILE_TOKENS"], tile["STAGES"] = hopper_fp8.TILE
        parked_bytes = 24 if splits and head_dim > 128 else 0  # over the loops
        if "window" in masks or "ring" in masks:  # numbers of a window, for masked steps
            parked_bytes = {64: 8, 96: 8, 128: 56, 256: 176}[head_dim]
        return AotCase(
            name=_warp_group_name(
                "prefill-hopper" + "-fp8" * fp8, dtype, block_size, head_dim, group
            )
            + "-some_heads" * some_heads
            + "-splits" * splits
            + "-merged" * merged
            + _masks_name(masks),
            kernel=hopper._prefill_hopper_kernel,
            args=(
                rows, 4096, 128, scratch if splits else None, 32, 1, *shared, 1000,
                rows, 4096, 128, *pages, *pages,
                *((scratch, scratch, address, address, 1) if fp8 else (None, None, None, None, 0)),
                NUM_KV_HEADS, lengths, 512, lengths, lengths, 8,
                *((lengths, 3) if some_heads else (None, NUM_KV_HEADS)),
                address, address, lengths, *_mask_arguments(masks),
            ),
            constexprs={
                **tile, "GROUP": group, "BLOCK_SIZE": block_size,
                "MIN_TILES": hopper.MIN_SHARED_CODES if fp8 else hopper.MIN_SHARED_TILES,
            },
            # The loop over tiles of codes does not need some addresses.
            parked_bytes=96 if fp8 else parked_bytes,
        )  # fmt: skip

    def queue_case(
        dtype: torch.dtype, block_size: int, head_dim: int = 128, *, group: int = 4,
        some_heads: bool = False, masks: str = "", tile: tuple[int, int] | None = None,
    ) -> AotCase:  # fmt: skip
        pages, lengths = _page_boxes(dtype, block_size, head_dim), pointer(torch.int32)
        q = torch.empty(64, group * NUM_KV_HEADS, head_dim, dtype=dtype)
        has_window = "window" in masks or "ring" in masks
        layout = KVLayout.hnd(1, block_size, head_dim, window=128 if has_window else -1)
        consumers = consumers_for(layout)
        queries = hopper_queue.describe_queries(q, group, consumers)
        return AotCase(
            name=_warp_group_name("prefill-queue", dtype, block_size, head_dim, group)
            + "-some_heads" * some_heads
            + _masks_name(masks)
            + (f"-keys{tile[0]}" if tile else ""),
            kernel=hopper_queue._prefill_queue_kernel,
            args=(
                pointer(dtype), 4096, 128, pointer(torch.float32), 32, 1, lengths,
                *queries, *pages, *pages,
                lengths, 512, lengths, lengths, 8,
                *((lengths, 3) if some_heads else (None, NUM_KV_HEADS)),
                pointer(torch.int64), pointer(torch.int64), lengths, *_mask_arguments(masks),
            ),
            constexprs={
                **_tile(head_dim, tile), "GROUP": group, "BLOCK_SIZE": block_size,
                "CONSUMERS": consumers,
            },
            # By the scheduler, outside all loops over keys; with three consumers it has fewer
            # registers. With 256 dimensions, numbers of a window are also read in the loops, some
            # for a step.
            parked_bytes=112 if consumers > 2
            else 120 if head_dim > 128 and masks not in ("", "cap")
            else 40,
        )  # fmt: skip

    queue = [queue_case(torch.bfloat16, 16), queue_case(torch.bfloat16, 128)]
    queue.append(queue_case(torch.float16, 16))
    queue.append(queue_case(torch.bfloat16, 16, some_heads=True))
    queue += [queue_case(torch.bfloat16, 16, head_dim) for head_dim in OTHER_DIMS]
    queue.append(queue_case(torch.bfloat16, 16, group=7))
    sizes = [case(torch.bfloat16, block_size) for block_size in (16, 32, 64, 128)]
    sizes += [
        case(torch.bfloat16, 16, head_dim, splits=splits)
        for head_dim in OTHER_DIMS
        for splits in (False, True)
    ]
    shared = [case(dtype, 16, splits=True) for dtype in (torch.bfloat16, torch.float16)]
    shared.append(case(torch.bfloat16, 16, group=7, splits=True))
    shared += [
        case(torch.bfloat16, 16, head_dim, splits=True, merged=True) for head_dim in (96, 128, 256)
    ]
    shared += [
        case(torch.bfloat16, 16, splits=True, merged=True, masks=masks)
        for masks in ("sinks", "window", "ring sinks")
    ]
    shared += [
        case(torch.bfloat16, 16, splits=splits, some_heads=True) for splits in (False, True)
    ]
    masked = [
        make(torch.bfloat16, 16, head_dim, masks=masks)
        for make in (queue_case, partial(case, splits=True))
        for head_dim in WARP_GROUP_TILES
        if head_dim != 80  # of two parts, like 96
        for masks in ("window", "ring sinks", "cap", "window cap sinks")
    ]
    short = KVLayout.hnd(1, 16, 128, window=SHORT_WINDOW)
    masked += [
        queue_case(
            torch.bfloat16, 16, head_dim, masks="window",
            tile=short_window_tile(replace(short, head_dim=head_dim)),
        )
        for head_dim in (64, 128)
    ]  # fmt: skip
    codes = [case(torch.bfloat16, block_size, fp8=True) for block_size in (16, 128)]
    codes += [case(dtype, 16, splits=True, fp8=True) for dtype in (torch.bfloat16, torch.float16)]
    codes.append(case(torch.bfloat16, 16, splits=True, some_heads=True, fp8=True))
    merges = [_merge(target, dtype, dim, splits) for dtype, dim, splits in MERGES]
    return [*sizes, *shared, *queue, *masked, *codes, *merges]


def _mask_arguments(masks: str) -> tuple[object, ...]:
    """Return windows, sinks, rings, softmax_scale, soft cap and logit sinks of some masks."""
    lengths = pointer(torch.int32)
    windows = (lengths, lengths) if "window" in masks or "ring" in masks else (None, None)
    return (
        *windows, lengths if "ring" in masks else None, 0.1,
        *_softmax("cap" in masks.split(), "sinks" in masks.split()),
    )  # fmt: skip


def _masks_name(masks: str) -> str:
    return "".join(f"-{word}" for word in masks.split())


def _page_boxes(
    dtype: torch.dtype, block_size: int, head_dim: int
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    from mrv1.kernels.attention.prefill.warp_groups import describe

    return describe(torch.empty(4 * block_size, head_dim, dtype=dtype), block_size, head_dim)


def _tile(head_dim: int, tile: tuple[int, int] | None = None) -> dict[str, int]:
    tile_tokens, stages = tile or WARP_GROUP_TILES[head_dim]
    return {"DIM": head_dim, "TILE_TOKENS": tile_tokens, "STAGES": stages}


def _warp_group_name(
    kernel: str, dtype: torch.dtype, block_size: int, head_dim: int, group: int
) -> str:
    name = f"{kernel}-{str(dtype).removeprefix('torch.')}-{block_size}"
    return name + f"-dim{head_dim}" * (head_dim != 128) + f"-group{group}" * (group != 4)
