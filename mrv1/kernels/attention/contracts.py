"""Argument checks of the attention ops, without triton, shared by launchers and oracles.

A check raises TypeError for a wrong type or dtype, else ValueError.
``decode.plan`` and ``prefill.choice`` check decode plans and the buffers of shared prefill tiles.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from mrv1.kernels._base.checks import FLOAT_DTYPES, check_tensor
from mrv1.kernels.cache.contracts import MAX_HEAD_DIM, check_caches
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales

MAX_KV_SPLITS = 256


def check_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: KVLayout,
    dtypes: tuple[torch.dtype, ...],
    *,
    softmax_scale: float,
    logits_soft_cap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    scales: KVScales | None,
    visited: torch.Tensor | None,
) -> torch.Tensor:
    """Return the block table as one row per request; raise if the arguments do not fit together.

    A softmax scale that is not positive and finite would not keep the order of the scores.
    """
    check_tensor("q", q, shape=(None, None, layout.head_dim), dtype=dtypes, unit_last_stride=True)
    check = partial(check_tensor, device=q.device)
    if q.shape[1] == 0 or q.shape[1] % layout.num_kv_heads:
        raise ValueError(
            f"q: expected a multiple of {layout.num_kv_heads} KV heads, got {q.shape[1]} heads"
        )
    check_caches(k_cache, v_cache, layout, q, scales)
    int32 = torch.int32
    check("seq_lens", seq_lens, shape=(None,), dtype=int32, contiguous=True)
    check("block_table", block_table, shape=(None, None), dtype=int32, unit_last_stride=True)
    if out is not None:
        check("out", out, shape=tuple(q.shape), dtype=q.dtype, unit_last_stride=True)
    if lse is not None:
        check("lse", lse, shape=tuple(q.shape[:2]), dtype=_lse_dtype(q))
    if not 0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale: expected > 0 and finite, got {softmax_scale}")
    if not 0 <= logits_soft_cap < math.inf:
        raise ValueError(
            f"logits_soft_cap: expected >= 0 (0 = none) and finite, got {logits_soft_cap}"
        )
    if sinks is not None:
        check("sinks", sinks, shape=(q.shape[1],), dtype=FLOAT_DTYPES, contiguous=True)
    table = layout.table_rows(block_table, seq_lens.shape[0])
    if visited is not None:
        shape = table.shape[0], layout.num_kv_heads, table.shape[1]
        check("visited", visited, shape=shape, dtype=torch.uint8, contiguous=True)
    return table


def _lse_dtype(out: torch.Tensor) -> torch.dtype:
    """Return the dtype of the log-sum-exps of a result like ``out``."""
    return torch.float64 if out.dtype == torch.float64 else torch.float32


def check_attn_mask_offsets(attn_mask_offsets: torch.Tensor | None, q: torch.Tensor) -> None:
    """Raise unless ``attn_mask_offsets`` has a range of keys for every row of ``q``."""
    if attn_mask_offsets is not None:
        check_tensor(
            "attn_mask_offsets", attn_mask_offsets, shape=(q.shape[0], 2), dtype=torch.int32,
            device=q.device, contiguous=True,
        )  # fmt: skip


def check_query_len(q: torch.Tensor, query_len: int, num_reqs: int) -> None:
    """Raise unless ``q`` has ``query_len`` (1 to 8, as the kernel packs them) rows a request."""
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
    """Raise unless ``query_start_loc`` has the form of ``num_reqs`` ragged chunks of queries."""
    check_tensor(
        "query_start_loc", query_start_loc, shape=(num_reqs + 1,), dtype=torch.int32,
        device=device, contiguous=True,
    )  # fmt: skip
    if max_query_len < 0:
        raise ValueError(f"max_query_len: expected >= 0, got {max_query_len}")


def check_num_kv_splits(num_kv_splits: int | None) -> None:
    """Raise unless ``num_kv_splits`` is None (the launcher chooses) or 1 to 256."""
    if num_kv_splits is not None and not 1 <= num_kv_splits <= MAX_KV_SPLITS:
        raise ValueError(
            f"num_kv_splits: expected None or 1 to {MAX_KV_SPLITS}, got {num_kv_splits}"
        )


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
    """Raise unless the arguments of ``merge_states`` fit together."""
    check_tensor("out_a", out_a, shape=(None, None, None), dtype=dtypes, unit_last_stride=True)
    if not 1 <= out_a.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(
            f"out_a: expected a last size of 1 to {MAX_HEAD_DIM}, got {out_a.shape[2]}"
        )
    check = partial(check_tensor, device=out_a.device)
    for name, state in (("out_b", out_b), ("out", out)):
        if state is not None:
            shape = tuple(out_a.shape)
            check(name, state, shape=shape, dtype=out_a.dtype, unit_last_stride=True)
    for name, sums in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if sums is not None:
            check(name, sums, shape=tuple(out_a.shape[:2]), dtype=_lse_dtype(out_a))
