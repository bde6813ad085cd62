"""Bring a step's upload to the device: one row of a ring of buffers in pinned host memory.

    n = uploads[slot, 0];  staged[:n] = uploads[slot, :n]

A kernel reads the host memory, as a part of the step's CUDA graph: a copy would have to be
launched, and waited for, between graphs.
"""

from __future__ import annotations

import torch

from mrv1.kernels._base.checks import check_launchable, check_reachable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton

TILE_WORDS = 2048
"""The first tile, enough for a decode step of hundreds of rows, is loaded before the number of
words that count is known: one trip to the host instead of two. One program has that number among
them: on an H200 each further warp that loads this word waits a trip for the warp before it (four
programs of 512 words, whose 16 warps did: 18.5 us; this one: 2.8)."""


@triton.jit
def _load_afresh(ptr, mask, IS_AMD: tl.constexpr):
    """Load from memory itself: the host writes between launches, so caches may be out of date.

    Triton drops ``volatile`` for AMD and, before 3.9, ".cv" for NVIDIA, both without a word; what
    3.9 makes of both together for NVIDIA cannot be assembled.
    """
    if IS_AMD:
        value = tl.load(ptr, mask=mask, other=0, cache_modifier=".cv")
    else:
        value = tl.load(ptr, mask=mask, other=0, volatile=True)
    return value


@triton.jit
def _fetch_upload_kernel(
    staged_ptr,  # [at least row_words] int32
    uploads_ptr,  # [num_uploads, row_words] int32, may be host memory
    slot_ptr,  # [1] int32, index in the ring of uploads
    row_words,
    TILE_WORDS: tl.constexpr, IS_AMD: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (1,)."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    row_ptr = uploads_ptr + tl.load(slot_ptr).to(tl.int64) * row_words
    word = tl.arange(0, TILE_WORDS)
    value = _load_afresh(row_ptr + word, word < row_words, IS_AMD)
    num_words = tl.sum(tl.where(word == 0, value, 0), axis=0)
    tl.store(staged_ptr + word, value, mask=word < num_words)
    for late in range(TILE_WORDS, num_words, TILE_WORDS):
        word = late + tl.arange(0, TILE_WORDS)
        value = _load_afresh(row_ptr + word, word < num_words, IS_AMD)
        tl.store(staged_ptr + word, value, mask=word < num_words)


def fetch_upload(uploads: torch.Tensor, slot: torch.Tensor, staged: torch.Tensor) -> None:
    """Copy the words of ``uploads[slot]`` that count to the front of ``staged``.

    Args:
        uploads: [num_uploads, words] int32, contiguous, on ``staged``'s device or in pinned host
            memory: the ring of uploads. The first word of an upload is the number of words that
            count, the first included, at most ``words``. The host must not write an upload that a
            launch is reading.
        slot: [1] int32: index of the upload to copy, not a request's slot. The device reads the
            index, so that a captured graph copies another upload each time; not checked.
        staged: [at least words] int32, contiguous, *written* in its first words, as many as count.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: words are moved, never converted; exact (tier A).
    Stream: one launch on the current stream, no synchronisation, CUDA-graph safe.
    """
    check_tensor("staged", staged, shape=(None,), dtype=torch.int32, contiguous=True)
    check_launchable("staged", staged)
    check_tensor("uploads", uploads, shape=(None, None), dtype=torch.int32, contiguous=True)
    check_tensor(
        "slot", slot, shape=(1,), dtype=torch.int32, device=staged.device, contiguous=True
    )
    check_reachable("uploads", uploads, staged.device)
    if not 1 <= uploads.shape[1] <= staged.shape[0]:
        raise ValueError(
            f"uploads: expected 1 to {staged.shape[0]} words a row, the length of staged, got "
            f"{uploads.shape[1]}"
        )
    row_words = uploads.shape[1]
    tile_words = triton.next_power_of_2(row_words) if INTERPRET else TILE_WORDS
    _fetch_upload_kernel[(1,)](
        *(staged, uploads, slot, row_words),
        TILE_WORDS=tile_words,
        IS_AMD=torch.version.hip is not None,
        num_warps=4,
        **overlap_options(staged.device),
    )
