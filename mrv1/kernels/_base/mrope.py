"""Which of a token's three positions (time, height, width) turns each pair under M-RoPE."""

from __future__ import annotations

from mrv1.kernels._base.triton import tl, triton


@triton.jit
def load_mrope_positions(
    position_ptr,  # the tokens' positions in time
    stride_axis, pair, mask,
    TIME_PAIRS: tl.constexpr, HEIGHT_PAIRS: tl.constexpr, WIDTH_PAIRS: tl.constexpr,
    MROPE_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Return the position that turns each pair; see ``mrope_axes`` of ``_base/checks.py``."""
    time = tl.load(position_ptr, mask=mask, other=0)
    height = tl.load(position_ptr + stride_axis, mask=mask, other=0)
    width = tl.load(position_ptr + 2 * stride_axis, mask=mask, other=0)
    if MROPE_INTERLEAVED:
        is_height = (pair % 3 == 1) & (pair < 3 * HEIGHT_PAIRS)
        is_width = (pair % 3 == 2) & (pair < 3 * WIDTH_PAIRS)
    else:
        is_height = (pair >= TIME_PAIRS) & (pair < TIME_PAIRS + HEIGHT_PAIRS)
        is_width = pair >= TIME_PAIRS + HEIGHT_PAIRS
    return tl.where(is_height, height, tl.where(is_width, width, time))
