"""The model's first op: look up the tokens' rows of the embedding and of rope's table.

hidden[i] = scale * embed[input_ids[i]], or a row of features, perhaps times scale;
angles[i] = cos_sin[positions[i]].
"""

from __future__ import annotations

from functools import partial

import torch

from mrv1.kernels._base.checks import (
    FLOAT_DTYPES,
    check_launchable,
    check_mrope_section,
    check_tensor,
)
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.mrope import load_mrope_positions
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.layers.contracts import FeatureRows, check_features, feature_arguments


@triton.jit(do_not_specialize=["num_tokens", "stride_positions_axis", "first_id", "num_ids"])
def _embed_tokens_kernel(
    hidden_ptr,  # [num_tokens, hidden_size], contiguous
    angles_ptr,  # [num_tokens, rotary_dim] float32, contiguous
    input_ids_ptr,  # [num_tokens] int64
    positions_ptr, stride_positions_axis,  # [num_tokens] int64, or [3, num_tokens] with M-RoPE
    embed_ptr,  # [vocab_size, hidden_size], contiguous
    cos_sin_ptr,  # [max_positions, rotary_dim] float32, contiguous
    feature_rows_ptr,  # [any, at least hidden_size], unit last stride, or None
    stride_feature_rows,
    feature_source_ptr,  # [any] int32, or None
    num_sources_ptr,  # [1] int32, or None
    first_id,  # of the first row of embed, or None
    num_ids,  # rows of embed
    scale,  # of embeddings, or None
    num_tokens, hidden_size, rotary_dim,
    TILE_TOKENS: tl.constexpr,
    TILE_HIDDEN: tl.constexpr,  # power of two >= hidden_size
    TILE_ROTARY: tl.constexpr,  # power of two >= rotary_dim
    SECTION: tl.constexpr, MROPE_INTERLEAVED: tl.constexpr,  # of M-RoPE; None = one position
    SCALES_FEATURES: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (cdiv(num_tokens, TILE_TOKENS),): one program moves whole rows."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)[:, None]
    is_token = token < num_tokens
    token_id = tl.load(input_ids_ptr + token, mask=is_token, other=0)
    angle_col = tl.arange(0, TILE_ROTARY)[None, :]
    if SECTION is None:
        position = tl.load(positions_ptr + token, mask=is_token, other=0)
    else:
        position = load_mrope_positions(
            positions_ptr + token, stride_positions_axis,
            angle_col % (SECTION[0] + SECTION[1] + SECTION[2]), is_token, SECTION,
            MROPE_INTERLEAVED,
        )  # fmt: skip
    col = tl.arange(0, TILE_HIDDEN)[None, :]
    mask = is_token & (col < hidden_size)
    is_here, nothing = is_token, 0.0
    if first_id is not None:
        token_id -= first_id
        is_here = is_token & (token_id >= 0) & (token_id < num_ids)
        nothing = tl.full([], 0.0, tl.float32) * -1.0  # Triton takes a literal -0.0 for 0.0
    row_ptr = embed_ptr + token_id * hidden_size
    if feature_rows_ptr is not None:
        has_source = is_token & (token < tl.load(num_sources_ptr))
        source = tl.load(feature_source_ptr + token, mask=has_source, other=-1).to(tl.int64)
        is_feature = is_here & (source >= 0)
        feature_ptr = feature_rows_ptr + source * stride_feature_rows + col
        feature = tl.load(feature_ptr, mask=mask & is_feature, other=0.0)
        row = tl.load(row_ptr + col, mask=mask & is_here & (source < 0), other=nothing)
        if SCALES_FEATURES:
            row = tl.where(is_feature, feature, row)
        if scale is not None:
            row = (row.to(tl.float32) * scale).to(row.dtype)
        if not SCALES_FEATURES:
            row = tl.where(is_feature, feature, row)
    else:
        row = tl.load(row_ptr + col, mask=mask & is_here, other=nothing)
        if scale is not None:
            row = (row.to(tl.float32) * scale).to(row.dtype)
    angle_mask = is_token & (angle_col < rotary_dim)
    angles = tl.load(cos_sin_ptr + position * rotary_dim + angle_col, mask=angle_mask)
    tl.store(hidden_ptr + token * hidden_size + col, row, mask=mask)
    tl.store(angles_ptr + token * rotary_dim + angle_col, angles, mask=angle_mask)


def embed_tokens(
    input_ids: torch.Tensor,
    embed: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    mrope_section: tuple[int, int, int] | None = None,
    mrope_interleaved: bool = False,
    features: FeatureRows | None = None,
    first_id: int | None = None,
    scale: float | None = None,
    scales_features: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of ``embed`` at ``input_ids`` and the rows of ``cos_sin`` at ``positions``.

    Args:
        input_ids: [tokens] int64, contiguous, in [0, vocab); not checked. With ``first_id``, any.
        embed: [vocab, hidden] float32 | float16 | bfloat16, contiguous.
        positions: [tokens] int64, contiguous, in [0, max_positions); not checked. With
            ``mrope_section`` [3, tokens], unit last stride.
        cos_sin: [max_positions, rotary_dim] float32, contiguous: cosines, then sines.
        mrope_section: M-RoPE's numbers of pairs, as in ``Rope``; None = one position per token.
        mrope_interleaved: as in ``Rope``.
        features: rows that replace some tokens' rows of ``embed``; None = none do.
        first_id: id of the first row of ``embed``, a rank's part of the vocabulary. A token of
            another part gets a row of -0.0, which changes no sum. None = ``embed`` has all ids.
        scale: positive factor of the rows of ``embed``; None = 1.
        scales_features: whether it is also that of features.

    Returns:
        ([tokens, hidden] of embed's dtype, [tokens, rotary_dim] float32), both allocated here.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: elements are moved, never converted; exact (tier A). A product with ``scale``, which
        is taken in float32, is rounded once.
    Stream: one launch on the current stream, no synchronisation, CUDA-graph safe.
    """
    check_tensor("embed", embed, shape=(None, None), dtype=FLOAT_DTYPES, contiguous=True)
    check_launchable("embed", embed)
    device = embed.device
    check = partial(check_tensor, device=device, contiguous=True)
    check("input_ids", input_ids, shape=(None,), dtype=torch.int64)
    check("cos_sin", cos_sin, shape=(None, None), dtype=torch.float32)
    if mrope_section is None:
        check("positions", positions, shape=input_ids.shape, dtype=torch.int64)
    else:
        check = partial(check_tensor, device=device, unit_last_stride=True)
        check("positions", positions, shape=(3, *input_ids.shape), dtype=torch.int64)
        check_mrope_section("mrope_section", mrope_section, cos_sin.shape[1] // 2)
    check_features(features, embed)
    hidden = embed.new_empty(input_ids.shape[0], embed.shape[1])
    angles = cos_sin.new_empty(input_ids.shape[0], cos_sin.shape[1])
    if len(input_ids) == 0:
        return hidden, angles
    tile_tokens = triton.next_power_of_2(len(input_ids)) if INTERPRET else 1
    _embed_tokens_kernel[(triton.cdiv(len(input_ids), tile_tokens),)](
        hidden, angles, input_ids, positions, positions.stride(0), embed, cos_sin,
        *feature_arguments(features), first_id, embed.shape[0], scale,
        len(input_ids), embed.shape[1], cos_sin.shape[1],
        TILE_TOKENS=tile_tokens, TILE_HIDDEN=triton.next_power_of_2(embed.shape[1]),
        TILE_ROTARY=triton.next_power_of_2(cos_sin.shape[1]), SECTION=mrope_section,
        MROPE_INTERLEAVED=mrope_interleaved, SCALES_FEATURES=scales_features,
        num_warps=4, **overlap_options(device),
    )  # fmt: skip
    return hidden, angles
