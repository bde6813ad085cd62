"""Staging: a step's changes arrive where they belong, and no buffer is rewritten too early."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.device import kernel_path
from mrv1.kernels.ops import select_ops
from mrv1.runner.staging import STATIC_WORDS, Staged, Staging, StepUpload

MAX_REQS, MAX_SEGMENTS, DEPTH = 5, 4, 3
WORDS = 300


def send(staging: Staging, upload: StepUpload, rows: int = 1, padded: int = 1) -> Staged:
    words = staging.send(
        upload,
        np.arange(rows, dtype=np.int32),
        np.ones(rows, dtype=np.int32),
        ring_slot=0,
        num_padded_rows=padded,
    )
    return staging.staged(words, upload, padded)


@pytest.mark.gpu
@given(data=st.data(), seed=st.integers(0, 99))
def test_changes_arrive_in_the_state_and_nowhere_else(device, data, seed):
    """Runs of words, or fills, cut out of the state without overlap; more than graphs take too."""
    staging = Staging(MAX_REQS, MAX_SEGMENTS, DEPTH, device)
    ops = select_ops(kernel_path(device))
    rng = np.random.default_rng(seed)
    state = torch.zeros(WORDS, dtype=torch.int32, device=device)
    expected = np.zeros(WORDS, dtype=np.int32)
    for _ in range(data.draw(st.integers(1, 2 * DEPTH))):
        cuts = sorted(data.draw(st.sets(st.integers(0, WORDS), max_size=12)))
        upload = StepUpload()
        for start, end in zip(cuts[::2], cuts[1::2], strict=False):
            if data.draw(st.booleans()):
                values = rng.integers(-(2**31), 2**31, end - start).astype(np.int32)
                upload.write(start, values)
                expected[start:end] = values
            else:
                upload.fill(start, end - start)
                expected[start:end] = -1
        staged = send(staging, upload)
        ops.scatter_segments(state, staged.words, staged.segments, staged.num_segments)
    np.testing.assert_array_equal(state.cpu().numpy(), expected)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=MAX_REQS), extra=st.integers(0, 3))
def test_rows_are_padded(lengths, extra):
    padded = min(len(lengths) + extra, MAX_REQS)
    staging = Staging(MAX_REQS, MAX_SEGMENTS, DEPTH, torch.device("cpu"))
    slots = np.arange(len(lengths), dtype=np.int32)[::-1]
    upload = StepUpload()
    words = staging.send(
        upload, slots, np.array(lengths, dtype=np.int32), 2, num_padded_rows=padded
    )
    staged = staging.staged(words, upload, padded)
    padding = padded - len(lengths)
    assert staged.idx_mapping.tolist() == [*slots.tolist(), *[-1] * padding]
    starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    assert staged.query_start_loc.tolist() == [*starts, *[starts[-1]] * padding]
    assert (staged.ring_slot.tolist(), staged.num_segments.tolist()) == ([2], [0])


def test_until_a_step_comes_a_graph_finds_padding():
    staging = Staging(MAX_REQS, MAX_SEGMENTS, DEPTH, torch.device("cpu"))
    view = staging.static_view(MAX_REQS)
    assert view.idx_mapping.tolist() == [-1] * MAX_REQS
    assert view.num_segments.tolist() == [0]


def test_a_graph_finds_what_fits_and_nothing_else():
    staging = Staging(MAX_REQS, MAX_SEGMENTS, DEPTH, torch.device("cpu"))
    view = staging.static_view(2)
    small, many, long = StepUpload(), StepUpload(), StepUpload()
    small.write(7, np.array([5], dtype=np.int64))
    for start in range(MAX_SEGMENTS + 1):
        many.fill(start, 1)
    long.write(0, np.zeros(STATIC_WORDS, dtype=np.int32))
    assert staging.fits_static(small)
    send(staging, small, rows=1, padded=2)
    assert view.idx_mapping.tolist() == [0, -1]
    assert view.num_segments.tolist() == [1]
    (dst, src, length), *_ = view.segments.tolist()
    assert (dst, length, view.words[src : src + 2].tolist()) == (7, 2, [5, 0])
    for upload in (many, long):
        assert not staging.fits_static(upload)
        staged = send(staging, upload, rows=2, padded=2)
        assert staged.num_segments.tolist() == [upload.num_segments]
        assert view.idx_mapping.tolist() == [0, -1], "a graph's upload was overwritten"


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_a_buffer_waits_for_its_last_copy():
    """With the stream held up, the ring's first buffer is not refilled before it has been read."""
    device = torch.device("cuda")
    staging = Staging(MAX_REQS, MAX_SEGMENTS, DEPTH, device)
    torch.cuda._sleep(200_000_000)  # about 0.1 s before the first copy can run
    arrived = []
    for number in range(2 * DEPTH):
        upload = StepUpload()
        upload.write(0, np.full(1000, number, dtype=np.int32))
        staged = send(staging, upload)
        arrived.append(staged.words.clone())
    assert staging.num_waits >= 1
    for number, words in enumerate(arrived):
        start = int(staged.segments[0, 1])
        assert (words[start : start + 1000] == number).all()
