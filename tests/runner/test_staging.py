"""Staging: a step's changes arrive where they belong, fetched or copied."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.device import kernel_path
from mrv1.kernels.registry import select_ops
from mrv1.runner.staging import FETCHED_WORDS, Staged, Staging, StepUpload

MAX_REQS, MAX_SEGMENTS, NUM_SLOTS = 5, 4, 3
WORDS = 300


def send(
    staging: Staging, slot: int, upload: StepUpload, idx_mapping: list[int], query_lens: list[int]
) -> Staged:
    """Send an upload and fetch it, as a step does first."""
    sent = staging.send(
        slot, upload, np.array(idx_mapping, np.int32), np.array(query_lens, np.int32)
    )
    device = staging.fetched.device
    if sent.long_words is None:
        ring_slot = torch.tensor([slot], dtype=torch.int32, device=device)
        select_ops(kernel_path(device)).fetch_upload(staging.uploads, ring_slot, staging.fetched)
    return staging.staged(sent, len(idx_mapping))


@pytest.mark.gpu
@given(data=st.data(), seed=st.integers(0, 99))
def test_changes_arrive_in_the_state_and_nowhere_else(device, data, seed):
    """Disjoint runs of words and fills; also uploads too large for a graph."""
    staging = Staging(MAX_REQS, MAX_SEGMENTS, NUM_SLOTS, device)
    ops = select_ops(kernel_path(device))
    rng = np.random.default_rng(seed)
    state = torch.zeros(WORDS, dtype=torch.int32, device=device)
    expected = np.zeros(WORDS, dtype=np.int32)
    for step in range(data.draw(st.integers(1, 2 * NUM_SLOTS))):
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
        staged = send(staging, step % NUM_SLOTS, upload, [0], [1])
        ops.scatter_segments(state, staged.words, staged.segments, staged.num_segments)
        if device.type == "cuda":
            torch.cuda.synchronize()  # before the slot is written again
    np.testing.assert_array_equal(state.cpu().numpy(), expected)


@pytest.mark.gpu
def test_a_graph_finds_the_drafts_of_each_row_at_one_place(device):
    staging = Staging(MAX_REQS, MAX_SEGMENTS, NUM_SLOTS, device, captured_drafts=(4, 3))
    ops = select_ops(kernel_path(device))
    view = staging.static_view(4, has_drafts=True)
    for slot, drafts in enumerate((((1, 2, 3), (), (5,)), ((), (9, 8)), ((), (), (), (4,)))):
        upload = StepUpload()
        upload.put(0, [7] * (1 + slot))
        rows = np.full(4, -1, np.int32)
        sent = staging.send(slot, upload, rows, None, drafts=drafts, is_captured=True)
        assert sent.long_words is None
        ring_slot = torch.tensor([slot], dtype=torch.int32, device=device)
        ops.fetch_upload(staging.uploads, ring_slot, staging.fetched)
        counts, token_ids = view.num_draft_tokens.tolist(), view.draft_token_ids.tolist()
        for count, row, expected in zip(counts, token_ids, drafts, strict=False):
            assert tuple(row) == expected + (-1,) * (3 - count)
        assert view.num_segments.item() == 1


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=MAX_REQS), slot=st.integers(0, 2))
def test_staged_rows_have_their_slots_and_query_starts(lengths, slot):
    staging = Staging(MAX_REQS, MAX_SEGMENTS, NUM_SLOTS, torch.device("cpu"))
    idx_mapping = [3, -1, 0, 2, 1][: len(lengths)]
    staged = send(staging, slot, StepUpload(), idx_mapping, lengths)
    assert staged.idx_mapping.tolist() == idx_mapping
    starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    assert staged.query_start_loc.tolist() == starts
    assert (staged.ring_slot.tolist(), staged.num_segments.tolist()) == ([slot], [0])


def test_an_upload_says_how_many_tokens_have_a_source():
    """Also a long one; the next upload in the slot has none unless it says so."""
    staging = Staging(MAX_REQS, MAX_SEGMENTS, NUM_SLOTS, torch.device("cpu"), max_sources=9)
    long = StepUpload()
    long.write(0, np.arange(2 * FETCHED_WORDS, dtype=np.int32))
    rows, lengths = np.array([0], np.int32), np.array([5], np.int32)
    for upload, num_sources in ((StepUpload(), 3), (StepUpload(), 0), (long, 4), (long, 0)):
        sent = staging.send(0, upload, rows, lengths, num_sources=num_sources)
        if sent.long_words is None:
            staging.fetched[:] = staging.uploads[0]
        assert staging.staged(sent, 1).num_sources.tolist() == [num_sources]


def test_an_upload_that_fits_has_room_for_sources_too():
    staging = Staging(MAX_REQS, MAX_SEGMENTS, NUM_SLOTS, torch.device("cpu"), max_sources=9)
    full = StepUpload()
    for start in range(MAX_SEGMENTS - 1):
        full.fill(start, 1)
    full.write(0, np.arange(FETCHED_WORDS, dtype=np.int32))
    assert staging.fits(full)
    full.write(0, np.arange(9, dtype=np.int32))
    rows, lengths = np.array([0], np.int32), np.array([5], np.int32)
    assert staging.send(0, full, rows, lengths, num_sources=9).long_words is None
    assert len(staging.static_view(1).segments) == full.num_segments


def test_an_upload_has_room_for_a_request_of_any_length_beside_all_else():
    staging = Staging(MAX_REQS, MAX_SEGMENTS, NUM_SLOTS, torch.device("cpu"), request_words=999)
    upload = StepUpload()
    upload.write(0, np.arange(FETCHED_WORDS, dtype=np.int32))
    upload.write(FETCHED_WORDS, np.arange(999, dtype=np.int32))
    assert staging.fits(upload)
    staged = send(staging, 0, upload, [0], [1])
    assert staged.words is staging.fetched
    _, (_, src, length) = staged.segments.tolist()
    assert staged.words[src : src + length].tolist() == [*range(999)]


def test_a_graph_reads_padding_before_the_first_step():
    staging = Staging(MAX_REQS, MAX_SEGMENTS, NUM_SLOTS, torch.device("cpu"))
    for slot in range(NUM_SLOTS):
        staging.fetched.fill_(5)
        num_words = int(staging.uploads[slot, 0])
        staging.fetched[:num_words] = staging.uploads[slot, :num_words]
        view = staging.static_view(MAX_REQS)
        assert view.idx_mapping.tolist() == [-1] * MAX_REQS
        assert view.query_start_loc.tolist() == [0] * (MAX_REQS + 1)
        assert view.num_segments.tolist() == [0]


def test_a_graph_reads_only_uploads_that_fit():
    staging = Staging(MAX_REQS, MAX_SEGMENTS, NUM_SLOTS, torch.device("cpu"))
    view = staging.static_view(2)
    small, many, long = StepUpload(), StepUpload(), StepUpload()
    small.write(7, np.array([5], dtype=np.int64))
    for start in range(MAX_SEGMENTS + 1):
        many.fill(start, 1)
    long.write(0, np.arange(2 * FETCHED_WORDS, dtype=np.int32))
    assert [staging.fits(upload) for upload in (small, many, long)] == [True, False, False]
    send(staging, 0, small, [0, -1], [1, 0])
    assert view.idx_mapping.tolist() == [0, -1]
    assert view.num_segments.tolist() == [1]
    (dst, src, length), *_ = view.segments.tolist()
    assert (dst, length, view.words[src : src + 2].tolist()) == (7, 2, [5, 0])
    for _ in range(2):  # a slot may have a long upload again
        staged = send(staging, 1, long, [1, 0], [1, 1])
        ((dst, src, length),) = staged.segments.tolist()
        assert torch.equal(staged.words[src : src + length], torch.arange(2 * FETCHED_WORDS).int())
        assert view.idx_mapping.tolist() == [0, -1], "a graph's upload was overwritten"
