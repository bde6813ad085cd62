"""Launches of paged decode attention that are compiled ahead of time."""

from __future__ import annotations

from dataclasses import replace

import torch

from mrv1.kernels._base.triton import triton
from mrv1.kernels.attention.decode.attention import (
    MIN_PART_DIM,
    _paged_decode_attention_kernel,
    merge_tile,
)
from mrv1.kernels.attention.decode.plan import DecodeAttentionConfig, padded_rows
from mrv1.kernels.attention.decode.plan_kernel import (
    REQS_PER_PROGRAM,
    _plan_decode_kernel,
    pieces_per_program,
    plan_warps,
)
from mrv1.kernels.attention.online_softmax import dot_precision
from mrv1.kernels.attention.prefill.choice import PrefillAttentionConfig
from mrv1.testing.aot import AotCase, Target, pointer
from tests.compile.cases_attention import (
    BLOCK_SIZE,
    FP8_SHAPES,
    INT4_SHAPES,
    NO_FP8,
    NUM_KV_HEADS,
    SHAPES,
    STREAMING_SHAPES,
    _caches,
    _config_dtype,
    _device,
    _fp8,
    _fp8_name,
    _int4,
    _is_int4,
    _name,
    _softmax,
)

FEW, SOME, MANY = 8, 32 * NUM_KV_HEADS, 512 * NUM_KV_HEADS
"""Segments of 1, 32 and 512 requests, which have their own launch choices."""


def cases(target: Target) -> list[AotCase]:
    full = [(dtype, dim, False) for dtype, dim in SHAPES]
    streaming = [(dtype, dim, True) for dtype, dim in STREAMING_SHAPES]
    return [
        *(_decode(target, dtype, dim, ring) for dtype, dim, ring in full + streaming),
        _decode(target, torch.bfloat16, 128, False, splits=False, early=False),
        _decode(target, torch.bfloat16, 128, False, segments=SOME),
        _decode(target, torch.bfloat16, 128, False, group=8, query_len=8),
        _decode(
            target, torch.bfloat16, 128, False, group=4, query_len=4, in_rounds=True, early=False
        ),
        _decode(target, torch.bfloat16, 256, True, group=8, query_len=4),
        _decode(target, torch.bfloat16, 128, False, deterministic=True),
        _decode(target, torch.bfloat16, 256, True, deterministic=True),
        *_fp8_cases(target),
        *_group_cases(target),
        *(_plan(target, *shape) for shape in ((16, 8, 1), (256, 8, 2), (1024, 64, 8))),
        _decode(target, torch.bfloat16, 128, False, segments=MANY, fp8=_fp8(target, "token")),
        _decode(target, torch.bfloat16, 128, False, segments=MANY, fp8=_fp8(target, "head")),
        _decode(target, torch.bfloat16, 256, True, fp8=_fp8(target, "token")),
        *(
            _decode(target, torch.bfloat16, 128, True, fp8=fp8, soft_cap=cap, sinks=sinks)
            for fp8 in (NO_FP8, _fp8(target, "token"))
            for cap, sinks in ((True, False), (False, True), (True, True))
        ),
        _decode(target, torch.bfloat16, 64, True, group=8, sinks=True),
        _decode(target, torch.bfloat16, 256, False, soft_cap=True),
        _decode(target, torch.bfloat16, 128, False, deterministic=True, soft_cap=True, sinks=True),
        _decode(target, torch.bfloat16, 128, True, visits_masked=True),
    ]


def _group_cases(target: Target) -> list[AotCase]:
    """Return every group of query heads on the measured GPU; 2 is among the other cases."""
    if target.name != "sm_90":
        return []
    groups = [group for group in range(1, 17) if group != 2]
    return [
        *(_decode(target, torch.bfloat16, 128, False, group=g, segments=SOME) for g in groups),
        *(_decode(target, torch.bfloat16, 96, False, group=g, segments=SOME) for g in (5, 7)),
        *(
            _decode(target, torch.bfloat16, 256, False, group=g, segments=SOME)
            for g in (5, 13, 15)
        ),
        *(
            _decode(target, torch.bfloat16, 128, False, group=g, segments=SOME, fp8=fp8)
            for fp8 in (_fp8(target, "token"),)
            for g in (5, 7, 13)
        ),
    ]


def _fp8_cases(target: Target) -> list[AotCase]:
    found = []
    for scales in ("token", "head"):
        fp8 = _fp8(target, scales)
        found += [_decode(target, dtype, dim, False, fp8=fp8) for dtype, dim in FP8_SHAPES]
        found += [
            _decode(target, torch.bfloat16, 128, True, fp8=fp8),
            _decode(target, torch.bfloat16, 128, True, group=8, query_len=8, fp8=fp8),
        ]
    quarter = _fp8(target, "quarter")
    found += [_decode(target, torch.bfloat16, dim, False, fp8=quarter) for dim in (128, 256)]
    int4 = _int4(target)
    found += [_decode(target, dtype, dim, False, fp8=int4) for dtype, dim in INT4_SHAPES]
    found += [
        _decode(target, torch.bfloat16, 128, False, group=4, segments=MANY, fp8=int4),
        _decode(target, torch.bfloat16, 128, True, fp8=int4),
        _decode(target, torch.bfloat16, 128, True, group=8, query_len=8, fp8=int4),
    ]
    return found


def _decode(
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    streaming: bool,
    *,
    group: int = 2,
    query_len: int = 1,
    segments: int = FEW,
    in_rounds: bool = False,
    splits: bool = True,
    early: bool = True,
    deterministic: bool = False,
    visits_masked: bool = False,
    fp8: dict[str, object] = NO_FP8,
    soft_cap: bool = False,
    sinks: bool = False,
) -> AotCase:
    row = group * NUM_KV_HEADS * head_dim
    float32, int32, int64 = map(pointer, (torch.float32, torch.int32, torch.int64))
    rows = query_len * group
    config = DecodeAttentionConfig.default_for(
        head_dim,
        _config_dtype(dtype, fp8),
        padded_rows(rows),
        segments,
        streaming,
        _device(target),
    )
    if deterministic:
        steps = PrefillAttentionConfig.default_for(head_dim, dtype, target.capability, streaming)
        most = config.max_registers if streaming else None
        config = replace(config, tile_tokens=steps.tile_tokens, max_registers=most)
    caches = _caches(dtype, fp8)
    tile_dim = triton.next_power_of_2(head_dim)
    if fp8 is not NO_FP8:
        caches = (pointer(torch.int16), pointer(torch.int16), *caches[2:])
        tile_dim = max(tile_dim, MIN_PART_DIM * (4 if _is_int4(fp8) else 2))
    return AotCase(
        name=_name(
            "decode",
            dtype,
            head_dim,
            f"rows{rows}",
            f"segments{segments}",
            *(["masked" if visits_masked else "ring"] if streaming else []),
            *(["rounds"] if in_rounds else []),
            *([] if splits else ["whole"]),
            *(["deterministic"] if deterministic else []),
            *_fp8_name(fp8),
            *(["soft_cap"] if soft_cap else []),
            *(["sinks"] if sinks else []),
        ),
        kernel=_paged_decode_attention_kernel,
        args=(
            *(pointer(dtype), row, head_dim),
            *(float32, group * NUM_KV_HEADS, 1),
            *((float32, float32, int32) if splits else (None, None, None)),
            None,
            *(int32, int32),
            *(pointer(dtype), 2 * row, head_dim),
            *caches,
            *(int32, 512, 512),
            *(int64, int64, head_dim, head_dim**-0.5),
            *_softmax(soft_cap, sinks),
        ),
        constexprs={
            "NUM_KV_HEADS": NUM_KV_HEADS,
            "QUERY_LEN": query_len,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": BLOCK_SIZE,
            "HAS_WINDOW": streaming,
            "VISITS_MASKED": visits_masked,
            "HAS_RING": streaming and not visits_masked,
            "IN_ROUNDS": in_rounds,
            "TILE_ROWS": padded_rows(rows),
            "TILE_TOKENS": config.tile_tokens,
            "TILE_DIM": tile_dim,
            "PRECISION": dot_precision(dtype),
            "OVERLAP": target.has_dependent_launch,
            **fp8,
            **merge_tile(rows, tile_dim, deterministic),
            **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
            "EARLY": early and target.has_dependent_launch,
            "DETERMINISTIC": deterministic,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # Parked over the loop, so that one more program fits an SM; 16 rows of codes load one of
        # these values again, two of 920 instructions of the loop.
        parked_bytes=32 if fp8 is not NO_FP8 and rows > 8 else 16,
        programs_per_sm=config.programs_per_sm if target.name == "sm_90" else 0,
    )


def _plan(target: Target, num_reqs: int, num_kv_heads: int, num_kinds: int) -> AotCase:
    int32 = pointer(torch.int32)
    return AotCase(
        name=_name("plan_decode", torch.int32, num_reqs, num_kv_heads, num_kinds),
        kernel=_plan_decode_kernel,
        args=(*(int32,) * 4, num_reqs, int32, num_kinds, *(int32,) * 4, 1568, 528, 1056),
        constexprs={
            "NUM_KV_HEADS": num_kv_heads,
            "QUERY_LEN": 1,
            "TILE_TOKENS": 64,
            "HAS_WINDOW": num_kinds > 1,
            "NUM_SPLITS": 0,
            "PIECE_TILES": 0,
            "MIN_TILES": 1,
            "LONG_TILES": 32,
            "ALL_REQS": num_reqs,
            "ALL_KINDS": num_kinds,
            "TILE_REQS": REQS_PER_PROGRAM,
            "TILE_HEADS": num_kv_heads,
            "TILE_PIECES": pieces_per_program(num_kv_heads),
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=plan_warps(num_reqs * num_kinds),
        parked_bytes=32,  # one launch a step
    )
