"""hidden[i] += features.rows[source[i]][first_column : first_column + hidden_size] (DeepStack).

Source: Meng et al., "DeepStack" (arXiv 2406.04334), as Qwen3-VL uses it.
"""

from __future__ import annotations

import torch

from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.layers.contracts import FeatureRows, check_features, feature_arguments


@triton.jit(do_not_specialize=["num_tokens"])
def _add_features_kernel(
    hidden_ptr,  # [num_tokens, hidden_size], contiguous, updated
    feature_rows_ptr,  # the first column to add, of [any, any], unit last stride
    stride_feature_rows,
    feature_source_ptr,  # [any] int32
    num_sources_ptr,  # [1] int32
    num_tokens, hidden_size,
    TILE_TOKENS: tl.constexpr,
    TILE_HIDDEN: tl.constexpr,  # power of two >= hidden_size
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (cdiv(num_tokens, TILE_TOKENS),): one program adds whole rows."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)[:, None]
    has_source = (token < num_tokens) & (token < tl.load(num_sources_ptr))
    source = tl.load(feature_source_ptr + token, mask=has_source, other=-1).to(tl.int64)
    col = tl.arange(0, TILE_HIDDEN)[None, :]
    mask = (source >= 0) & (col < hidden_size)
    added = tl.load(feature_rows_ptr + source * stride_feature_rows + col, mask=mask, other=0.0)
    hidden_ptr += token * hidden_size + col
    hidden = tl.load(hidden_ptr, mask=mask, other=0.0)
    total = hidden.to(tl.float32) + added.to(tl.float32)
    tl.store(hidden_ptr, total.to(hidden.dtype), mask=mask)


def add_features(hidden: torch.Tensor, features: FeatureRows, first_column: int) -> None:
    """Add columns of ``features.rows`` to the hidden states of the tokens that have features.

    Args:
        hidden: [tokens, hidden] float32 | float16 | bfloat16, contiguous, *written* for tokens
            with a row of features.
        features: the rows of the batch's tokens, of hidden's dtype.
        first_column: the first of the hidden columns of ``features.rows`` that are added.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: float32 inside, rounded once. Tier A.
    Stream: one launch on the current stream, no synchronisation, CUDA-graph safe.
    """
    check_tensor("hidden", hidden, shape=(None, None), dtype=FLOAT_DTYPES, contiguous=True)
    check_launchable("hidden", hidden)
    check_features(features, hidden, first_column)
    if len(hidden) == 0:
        return
    _, stride, source, num_sources = feature_arguments(features)
    tile_tokens = triton.next_power_of_2(len(hidden)) if INTERPRET else 1
    _add_features_kernel[(triton.cdiv(len(hidden), tile_tokens),)](
        hidden, features.rows[:, first_column:], stride, source, num_sources,
        len(hidden), hidden.shape[1],
        TILE_TOKENS=tile_tokens, TILE_HIDDEN=triton.next_power_of_2(hidden.shape[1]), num_warps=4,
        **overlap_options(hidden.device),
    )  # fmt: skip
