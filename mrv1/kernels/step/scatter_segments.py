"""Apply a step's changes to the device's state: copy runs of words to their places.

For each of the first ``num_segments`` rows (dst, src, length) of ``segments``::

    state[dst : dst + length] = staged[src : src + length]      -1 in every word if src < 0

All per-request state is in one flat buffer, so a step's changes take one upload and one launch;
the grid depends on shapes alone, so one CUDA graph serves every step. (These segments are runs of
words, not the segments of decode attention.)
"""

from __future__ import annotations

from functools import partial

import torch

from mrv1.kernels._base.checks import check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton

MAX_PROGRAMS = 1 if INTERPRET else 512
"""Programs of a launch, at most. On an H200, 512 segments of one word take 1.6 us in 512 programs
and 2.8 us in 128; no segments take 0.9 and 0.8 us."""

WORDS_IN_FLIGHT = 1024
"""Of a program. More take a third less time for a prompt of thousands of
words, but slow down every short segment."""


@triton.jit(
    # the alignment of a step's data in its buffer must not compile another kernel
    do_not_specialize_on_alignment=["staged_ptr", "segments_ptr", "num_segments_ptr"]
)
def _scatter_segments_kernel(
    state_ptr,  # [words] int32
    staged_ptr,  # [staged words] int32
    segments_ptr,  # [max_segments, 3] int32: dst, src (< 0 = fill), length
    num_segments_ptr,  # [1] int32
    OVERLAP: tl.constexpr,  # see dependent_launch
    TILE_WORDS: tl.constexpr,
):
    """Grid (at most max_segments,): program i of n takes segments i, i + n, i + 2 n, ..."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    num_segments = tl.load(num_segments_ptr)
    for segment in range(tl.program_id(0), num_segments, tl.num_programs(0)):
        segment_ptr = segments_ptr + segment * 3
        dst = tl.load(segment_ptr).to(tl.int64)
        src = tl.load(segment_ptr + 1).to(tl.int64)
        length = tl.load(segment_ptr + 2).to(tl.int64)
        for first in range(0, length, TILE_WORDS):
            word = first + tl.arange(0, TILE_WORDS)
            in_segment = word < length
            value = tl.load(staged_ptr + src + word, mask=in_segment & (src >= 0), other=-1)
            tl.store(state_ptr + dst + word, value, mask=in_segment)


def scatter_segments(
    state: torch.Tensor, staged: torch.Tensor, segments: torch.Tensor, num_segments: torch.Tensor
) -> None:
    """Copy runs of ``staged`` into ``state``, or fill runs of it with -1.

    Args:
        state: [words] int32, contiguous, *written* in the segments and nowhere else.
        staged: [staged words] int32, contiguous; does not overlap ``state``.
        segments: [max_segments, 3] int32, contiguous, may be a view of ``staged``. Each row is
            (dst, src, length): first word in ``state``, first word in ``staged`` or < 0 to fill,
            and number of words (<= 0: nothing). Destinations must not overlap. Not checked.
        num_segments: [1] int32, at most max_segments: number of leading rows to apply.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: words are moved, never converted; exact (tier A).
    Stream: one launch on the current stream, no synchronisation, CUDA-graph safe for any segments.
    """
    check_tensor("state", state, shape=(None,), dtype=torch.int32, contiguous=True)
    check_launchable("state", state)
    check = partial(check_tensor, dtype=torch.int32, device=state.device, contiguous=True)
    check("staged", staged, shape=(None,))
    check("segments", segments, shape=(None, 3))
    check("num_segments", num_segments, shape=(1,))
    max_segments = segments.shape[0]
    if max_segments == 0:
        return
    _scatter_segments_kernel[(min(max_segments, MAX_PROGRAMS),)](
        *(state, staged, segments, num_segments),
        TILE_WORDS=WORDS_IN_FLIGHT,
        num_warps=4,
        **overlap_options(state.device),
    )
