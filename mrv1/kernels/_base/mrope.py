"""Which of a token's three positions (time, height, width) turns each pair under M-RoPE."""

from __future__ import annotations

from mrv1.kernels._base.triton import tl, triton


@triton.jit
def load_mrope_positions(
    position_ptr,  # the tokens' positions in time
    stride_axis, pair, mask,
    SECTION: tl.constexpr,  # pairs of time, height and width
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Return the position that turns each pair; see ``mrope_axes`` of ``_base/checks.py``."""
    time = tl.load(position_ptr, mask=mask, other=0)
    height = tl.load(position_ptr + stride_axis, mask=mask, other=0)
    width = tl.load(position_ptr + 2 * stride_axis, mask=mask, other=0)
    if INTERLEAVED:
        is_height = (pair % 3 == 1) & (pair < 3 * SECTION[1])
        is_width = (pair % 3 == 2) & (pair < 3 * SECTION[2])
    else:
        is_height = (pair >= SECTION[0]) & (pair < SECTION[0] + SECTION[1])
        is_width = pair >= SECTION[0] + SECTION[1]
    return tl.where(is_height, height, tl.where(is_width, width, time))
