"""Argument checks shared by the paged ops' launchers and their oracles."""

from __future__ import annotations

import torch

from mrv1.kernels._checks import check_tensor
from mrv1.kernels.kv_layout import ALIGNMENT_BYTES, KVLayout
from mrv1.kernels.kv_scales import KVScales

MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 256
MAX_KV_SPLITS = 256
FP8_DTYPES = (torch.float8_e4m3fn, torch.uint8)
"""What a cache with scales may be: e4m3 codes, or a view of their bytes."""

PAGE_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.uint8,
)
"""What a cache may hold where its pages are moved and not read."""


def check_head_dim(layout: KVLayout) -> None:
    """Raise unless the kernels have tiles for the layout's head dimension.

    Raises:
        ValueError: not a multiple of 16 from 16 to 256.
    """
    dim = layout.head_dim
    if dim % MIN_HEAD_DIM or not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
        raise ValueError(f"layout.head_dim: expected a multiple of 16 from 16 to 256, got {dim}")


def _check_caches(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: KVLayout,
    like: torch.Tensor,
    scales: KVScales | None,
) -> None:
    if scales is None and getattr(k_cache, "dtype", None) == torch.float8_e4m3fn:
        raise TypeError(f"scales: expected KVScales for a {k_cache.dtype} k_cache, got None")
    dtype = (like.dtype,) if scales is None else FP8_DTYPES
    check_tensor("k_cache", k_cache, dtype=dtype, device=like.device, contiguous=True)
    check_tensor("v_cache", v_cache, dtype=dtype, device=like.device, contiguous=True)
    if v_cache.numel() != k_cache.numel():
        raise ValueError(
            f"v_cache: expected {k_cache.numel()} elements like k_cache, got {v_cache.numel()}"
        )
    if layout.head_base.device != like.device:
        raise ValueError(f"layout: expected device {like.device}, got {layout.head_base.device}")
    if scales is not None:
        _check_scales(scales, layout, like.device)


def _check_scales(scales: KVScales, layout: KVLayout, device: torch.device) -> None:
    if not isinstance(scales, KVScales):
        raise TypeError(f"scales: expected KVScales or None, got {type(scales).__name__}")
    if layout.address_unit % ALIGNMENT_BYTES:
        raise ValueError(
            f"layout: expected bases and strides that are multiples of {ALIGNMENT_BYTES} "
            f"elements for an fp8 cache, got a multiple of {layout.address_unit}"
        )
    heads = layout.num_kv_heads
    shape: tuple[int | None, ...] = (None,)  # flat
    if scales.granularity == "head":
        shape = (heads,)
    elif scales.k_scale.dim() > 1:
        shape = (None, heads, layout.block_size)
    check_tensor(
        "scales.k_scale",
        scales.k_scale,
        shape=shape,
        dtype=torch.float32,
        device=device,
        contiguous=True,
    )
    check_tensor(
        "scales.v_scale",
        scales.v_scale,
        shape=tuple(scales.k_scale.shape),
        dtype=torch.float32,
        device=device,
        contiguous=True,
    )
    for name, column in (
        ("scales.base", scales.base),
        ("scales.block_stride", scales.block_stride),
    ):
        check_tensor(
            name, column, shape=(heads,), dtype=torch.int64, device=device, contiguous=True
        )


def check_cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: KVLayout,
    dtypes: tuple[torch.dtype, ...],
    scales: KVScales | None,
) -> None:
    """Raise unless the arguments of ``kv_cache_write`` fit together.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, device or stride.
    """
    check_tensor(
        "key",
        key,
        shape=(None, layout.num_kv_heads, layout.head_dim),
        dtype=dtypes,
        unit_last_stride=True,
    )
    check_tensor(
        "value",
        value,
        shape=tuple(key.shape),
        dtype=key.dtype,
        device=key.device,
        unit_last_stride=True,
    )
    _check_caches(k_cache, v_cache, layout, key, scales)
    check_tensor(
        "slot_mapping",
        slot_mapping,
        shape=(layout.num_groups, key.shape[0]),
        dtype=torch.int64,
        device=key.device,
    )


def check_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: KVLayout,
    dtypes: tuple[torch.dtype, ...],
    *,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    scales: KVScales | None,
) -> torch.Tensor:
    """Return the block table as one row per request, or raise where arguments do not fit together.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, device or stride, or an indivisible number of query heads.
    """
    check_tensor("q", q, shape=(None, None, layout.head_dim), dtype=dtypes, unit_last_stride=True)
    if q.shape[1] == 0 or q.shape[1] % layout.num_kv_heads:
        raise ValueError(
            f"q: expected a multiple of {layout.num_kv_heads} KV heads, got {q.shape[1]} heads"
        )
    _check_caches(k_cache, v_cache, layout, q, scales)
    check_tensor(
        "seq_lens", seq_lens, shape=(None,), dtype=torch.int32, device=q.device, contiguous=True
    )
    check_tensor(
        "block_table",
        block_table,
        shape=(None, None),
        dtype=torch.int32,
        device=q.device,
        unit_last_stride=True,
    )
    if out is not None:
        check_tensor(
            "out",
            out,
            shape=tuple(q.shape),
            dtype=q.dtype,
            device=q.device,
            unit_last_stride=True,
        )
    if lse is not None:
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        check_tensor("lse", lse, shape=tuple(q.shape[:2]), dtype=lse_dtype, device=q.device)
    return layout.table_rows(block_table, seq_lens.shape[0])


def check_query_len(q: torch.Tensor, query_len: int, num_reqs: int) -> None:
    """Raise unless ``q`` holds ``query_len`` (1 to 8) rows of every request.

    Raises:
        ValueError: another number of rows, or a query length the kernel does not pack.
    """
    if not 1 <= query_len <= 8:
        raise ValueError(f"query_len: expected 1 to 8, got {query_len}")
    if q.shape[0] != num_reqs * query_len:
        raise ValueError(
            f"q: expected {num_reqs} requests x {query_len} = {num_reqs * query_len} rows, "
            f"got {q.shape[0]}"
        )


def check_query_start_loc(
    query_start_loc: torch.Tensor, num_reqs: int, max_query_len: int, device: torch.device
) -> None:
    """Raise unless ``query_start_loc`` bounds ``num_reqs`` ragged rows.

    Raises:
        TypeError: not int32.
        ValueError: another shape, device or stride, or a negative ``max_query_len``.
    """
    check_tensor(
        "query_start_loc",
        query_start_loc,
        shape=(num_reqs + 1,),
        dtype=torch.int32,
        device=device,
        contiguous=True,
    )
    if max_query_len < 0:
        raise ValueError(f"max_query_len: expected >= 0, got {max_query_len}")


def check_num_kv_splits(num_kv_splits: int | None) -> None:
    """Raise unless ``num_kv_splits`` is None (the launcher chooses) or 1 to 256.

    Raises:
        ValueError: out of range.
    """
    if num_kv_splits is not None and not 1 <= num_kv_splits <= MAX_KV_SPLITS:
        raise ValueError(
            f"num_kv_splits: expected None or 1 to {MAX_KV_SPLITS}, got {num_kv_splits}"
        )


def check_copy_pages(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    src_block_ids: torch.Tensor,
    dst_block_ids: torch.Tensor,
    layout: KVLayout,
    group: int | None,
    dtypes: tuple[torch.dtype, ...],
    scales: KVScales | None,
) -> None:
    """Raise unless the arguments of ``copy_pages`` fit together.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, device or stride, a group the layout lacks, or none where it has
            several.
    """
    check_tensor("k_cache", k_cache, dtype=dtypes)
    _check_caches(k_cache, v_cache, layout, k_cache, scales)
    for name, ids in (("src_block_ids", src_block_ids), ("dst_block_ids", dst_block_ids)):
        check_tensor(
            name,
            ids,
            shape=(None,) if ids is src_block_ids else tuple(src_block_ids.shape),
            dtype=(torch.int32, torch.int64),
            device=k_cache.device,
            contiguous=True,
        )
    if group is None and layout.num_groups > 1:
        raise ValueError(f"group: expected one of {layout.num_groups} groups, got None")
    if group is not None and not 0 <= group < layout.num_groups:
        raise ValueError(f"group: expected None or 0 to {layout.num_groups - 1}, got {group}")


def check_merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    *,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Raise unless the arguments of ``merge_states`` fit together.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, device or stride.
    """
    check_tensor("out_a", out_a, shape=(None, None, None), dtype=dtypes, unit_last_stride=True)
    if not 1 <= out_a.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(
            f"out_a: expected a last size of 1 to {MAX_HEAD_DIM}, got {out_a.shape[2]}"
        )
    for name, state in (("out_b", out_b), ("out", out)):
        if state is not None:
            check_tensor(
                name,
                state,
                shape=tuple(out_a.shape),
                dtype=out_a.dtype,
                device=out_a.device,
                unit_last_stride=True,
            )
    lse_dtype = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    for name, sums in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if sums is not None:
            check_tensor(
                name, sums, shape=tuple(out_a.shape[:2]), dtype=lse_dtype, device=out_a.device
            )
