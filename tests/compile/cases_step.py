"""Launches of a step's head and tail (fetch to gather, post-update), compiled ahead of time."""

from __future__ import annotations

import torch

from mrv1.kernels._base.triton import triton
from mrv1.kernels.layers.add_features import _add_features_kernel
from mrv1.kernels.layers.embed_tokens import _embed_tokens_kernel
from mrv1.kernels.step.fetch_upload import TILE_WORDS, _fetch_upload_kernel
from mrv1.kernels.step.gather_tokens import GatherTokensConfig, _gather_tokens_kernel
from mrv1.kernels.step.post_update import PostUpdateConfig, _post_update_kernel
from mrv1.kernels.step.scatter_segments import WORDS_IN_FLIGHT, _scatter_segments_kernel
from mrv1.testing.aot import AotCase, Target, pointer

INT32, INT64 = torch.int32, torch.int64


def cases(target: Target) -> list[AotCase]:
    overlap = target.backend == "cuda" and isinstance(target.arch, int) and target.arch >= 90
    return [
        _fetch_upload(target, overlap),
        _embed_tokens(torch.bfloat16, 1024, overlap),
        _embed_tokens(torch.float32, 8192, overlap),
        _embed_tokens(torch.bfloat16, 2048, overlap, mrope_section=(16, 24, 24)),
        _embed_tokens(torch.bfloat16, 4096, overlap, features=True),
        _embed_tokens(torch.float32, 8192, overlap, features=True),
        _embed_tokens(torch.bfloat16, 8192, overlap, first_id=64128),
        _embed_tokens(torch.bfloat16, 4096, overlap, scale=64.0),
        _embed_tokens(torch.bfloat16, 4096, overlap, features=True, scale=54.5, all_scaled=True),
        _add_features(torch.bfloat16, 2560, overlap),
        _add_features(torch.float32, 8192, overlap),
        _scatter_segments(overlap),
        _gather_tokens("ragged", overlap),
        _gather_tokens("uniform", overlap, uniform=True),
        _gather_tokens("ragged-adapters", overlap, adapters=True),
        _gather_tokens("drafts-mrope", overlap, drafts=True, mrope=True),
        _gather_tokens("uniform-drafts-mrope", overlap, uniform=True, drafts=True, mrope=True),
        *(_post_update(num_columns, overlap) for num_columns in (1, 4, 8)),
        _post_update(1, overlap, uniform=True),
    ]


def _fetch_upload(target: Target, overlap: bool) -> AotCase:
    return AotCase(
        name="fetch_upload",
        kernel=_fetch_upload_kernel,
        args=(pointer(INT32), pointer(INT32), pointer(INT32), 66_000),
        constexprs={
            "OVERLAP": overlap,
            "TILE_WORDS": TILE_WORDS,
            "IS_AMD": target.backend == "hip",
        },
        num_warps=4,
    )


def _embed_tokens(
    dtype: torch.dtype,
    hidden_size: int,
    overlap: bool,
    *,
    mrope_section: tuple[int, int, int] | None = None,
    features: bool = False,
    first_id: int | None = None,
    scale: float | None = None,
    all_scaled: bool = False,
) -> AotCase:
    int32 = pointer(INT32)
    table, float32, int64 = pointer(dtype), pointer(torch.float32), pointer(INT64)
    return AotCase(
        name=f"embed_tokens-{hidden_size}-{str(dtype).removeprefix('torch.')}"
        + ("-features" if features else "")
        + ("" if first_id is None else "-part")
        + ("" if scale is None else "-scaled"),
        kernel=_embed_tokens_kernel,
        args=(
            *(table, float32, int64, int64, 64, table, float32),
            *((table, hidden_size, int32, int32) if features else (None, 0, None, None)),
            *(first_id, 64128, scale, 33, hidden_size, 128),
        ),
        constexprs={
            "TILE_TOKENS": 1,
            "TILE_HIDDEN": hidden_size,
            "TILE_ROTARY": 128,
            "SECTION": mrope_section,
            "MROPE_INTERLEAVED": False,
            "SCALES_FEATURES": all_scaled,
            "OVERLAP": overlap,
        },
        num_warps=4,
    )


def _add_features(dtype: torch.dtype, hidden_size: int, overlap: bool) -> AotCase:
    table, int32 = pointer(dtype), pointer(INT32)
    return AotCase(
        name=f"add_features-{hidden_size}-{str(dtype).removeprefix('torch.')}",
        kernel=_add_features_kernel,
        args=(table, table, 4 * hidden_size, int32, int32, 33, hidden_size),
        constexprs={
            "TILE_TOKENS": 1,
            "TILE_HIDDEN": triton.next_power_of_2(hidden_size),
            "OVERLAP": overlap,
        },
        num_warps=4,
    )


def _scatter_segments(overlap: bool) -> AotCase:
    return AotCase(
        name="scatter_segments",
        kernel=_scatter_segments_kernel,
        args=(pointer(INT32), pointer(INT32), pointer(INT32), pointer(INT32)),
        constexprs={"OVERLAP": overlap, "TILE_WORDS": WORDS_IN_FLIGHT},
        num_warps=4,
    )


def _gather_tokens(
    name: str, overlap: bool, *, uniform: bool = False, drafts: bool = False, mrope: bool = False,
    adapters: bool = False,
) -> AotCase:  # fmt: skip
    config = GatherTokensConfig.default_for()
    int32, int64 = pointer(INT32), pointer(INT64)
    draft_arguments = (int32, 7, int32) if drafts else (None, 0, None)
    mrope_arguments = (int32, 256 * 7, int32) if mrope else (None, 0, None)
    return AotCase(
        name=f"gather_tokens-{name}",
        kernel=_gather_tokens_kernel,
        args=(
            *(int64, int64, 8192, int64, 8192, int32, int64, int32, 2560),
            *(int32, None if uniform else int32, 2),
            *(int32, 40_960, int32, int32, int32),
            *draft_arguments,
            *mrope_arguments,
            *(int32, 2560, int32, int32, int32),
            *(33, 257, 6, 40_960),
        ),
        constexprs={
            "BLOCK_SIZE": 16,
            "OVERLAP": overlap,
            "TILE_TOKENS": config.tile_tokens,
            "TILE_ROWS": config.tile_rows,
            "TILE_COLUMNS": config.tile_columns,
        }
        | ({"adapter_slots_ptr": int32, "adapter_slot_ptr": int32} if adapters else {}),
        num_warps=config.num_warps,
    )


def _post_update(num_columns: int, overlap: bool, *, uniform: bool = False) -> AotCase:
    config = PostUpdateConfig.default_for(num_columns)
    int32, int64 = pointer(INT32), pointer(INT64)
    return AotCase(
        name=f"post_update-{num_columns}{'-uniform' if uniform else ''}",
        kernel=_post_update_kernel,
        args=(
            *(int64, num_columns, int32, int32, 256 * num_columns, 256),
            *(int32, 40_960, int32, int32, int32),
            *(int32, None if uniform else int32, int64, int32 if num_columns > 1 else None),
            *(int64, num_columns, int32, int32, 16),
            *(int32, 40, int32, 5, int32, int32, int32, 33, 1, num_columns),
        ),
        constexprs={
            "MAX_STOP_TOKENS": 16,
            "MAX_SEQUENCES": 5,
            "MAX_LEN": 8,
            "OVERLAP": overlap,
            "TILE_ROWS": config.tile_rows,
            "TILE_COLUMNS": triton.next_power_of_2(num_columns),
        },
        num_warps=config.num_warps,
        parked_bytes=8,  # parked over the loop, with drafts on sm_80: one launch per step
    )
