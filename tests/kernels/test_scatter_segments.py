"""Segment scatter: the whole state, against a loop over words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from tests.kernels.elementwise import tiles

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

Segment = tuple[int, int, int]
FILL = -1


def _state(num_words: int) -> torch.Tensor:
    return torch.arange(num_words, dtype=torch.int32) + 1_000_000


def _staged(num_words: int) -> torch.Tensor:
    """Return words that differ from the state's, some of them negative."""
    return torch.arange(num_words, dtype=torch.int32) * 37 - 50_000


def _by_hand(state: torch.Tensor, staged: torch.Tensor, segments: list[Segment]) -> list[int]:
    words, source = state.tolist(), staged.tolist()
    for dst, src, length in segments:
        for i in range(length):
            words[dst + i] = -1 if src < 0 else source[src + i]
    return words


def _run(ops, state, staged, segments: list[Segment], spare: int, device="cpu") -> list[int]:
    """Apply ``segments``; ``spare`` more rows, not counted, would overwrite the state."""
    state, staged = state.to(device), staged.to(device)
    rows = [*segments, *[(0, 0, 5)] * spare]
    array = torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 3)
    num_segments = torch.tensor([len(segments)], dtype=torch.int32, device=device)
    ops.scatter_segments(state, staged, array, num_segments)
    return state.tolist()


@st.composite
def _segments(draw, num_words: int, num_staged: int) -> list[Segment]:
    """Segments in any order whose destinations do not overlap, but may touch."""
    segments, word = [], 0
    for gap, length in draw(
        st.lists(st.tuples(st.integers(0, 9), st.sampled_from([-3, 0, 1, 1, 2, 7, 63, 64, 200])))
    ):
        dst, word = word + gap, word + gap + max(length, 0)
        if word > num_words:
            break
        src = draw(
            st.one_of(
                st.sampled_from([FILL, -2, -(2**31)]), st.integers(0, num_staged - max(length, 0))
            )
        )
        segments.append((dst, src, length))
    return draw(st.permutations(segments))


# --- oracle ------------------------------------------------------------------------------------


@given(segments=_segments(1000, 300), spare=st.integers(0, 3))
def test_the_oracle_equals_a_plain_loop(segments, spare):
    state, staged = _state(1000), _staged(300)
    got = _run(reference, state, staged, segments, spare)
    assert got == _by_hand(state, staged, segments)


# --- properties --------------------------------------------------------------------------------


@given(segments=_segments(1000, 300), spare=st.integers(0, 3), as_on_gpu=st.booleans())
def test_every_word_equals_a_plain_loop(device, segments, spare, as_on_gpu):
    state, staged = _state(1000), _staged(300)
    with tiles("scatter_segments", as_on_gpu=as_on_gpu):
        got = _run(kernels, state, staged, segments, spare, device)
    assert got == _by_hand(state, staged, segments)


@given(segments=_segments(500, 300), offset=st.integers(0, 5))
def test_segments_may_lie_in_the_staged_buffer(device, segments, offset):
    """One upload holds the count, the segments and the data, wherever they begin."""
    state, data = _state(500), _staged(300)
    num_words = 3 * len(segments)
    head = [len(segments), *(word for segment in segments for word in segment)]
    upload = torch.cat([data, torch.full((offset,), 9), torch.tensor(head)]).int().to(device)
    count = upload[300 + offset :][:1]
    array = upload[301 + offset :][:num_words].view(-1, 3)
    got = state.to(device)
    kernels.scatter_segments(got, upload, array, count)
    assert got.tolist() == _by_hand(state, data, segments)


# --- edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1023, 1024, 1025, 4096, 4097, 9000])
def test_a_prompt_takes_several_tiles(device, length):
    state, staged = _state(10_000), _staged(9500)
    segments = [(500, 17, length), (3, FILL, 400)]
    for as_on_gpu in (False, True):
        with tiles("scatter_segments", as_on_gpu=as_on_gpu):
            got = _run(kernels, state, staged, segments, 0, device)
        assert got == _by_hand(state, staged, segments)


def test_more_segments_than_programs(device):
    state, staged = _state(1300), _staged(1000)
    segments = [(2 * i + 1, FILL if i % 5 == 0 else 999 - i, 1) for i in range(600)]
    with tiles("scatter_segments", as_on_gpu=True):
        got = _run(kernels, state, staged, segments, 50, device)
    assert got == _by_hand(state, staged, segments)


@pytest.mark.parametrize("spare", [0, 1, 200])
def test_no_segments(device, spare):
    state = _state(10)
    assert _run(kernels, state, _staged(10), [], spare, device) == state.tolist()


@pytest.mark.parametrize("length", [0, -1, -(2**31)])
def test_a_segment_of_length_zero_or_less_writes_nothing(device, length):
    state = _state(10)
    segments = [(0, 0, length), (5, FILL, length)]
    assert _run(kernels, state, _staged(10), segments, 0, device) == state.tolist()


# --- errors ------------------------------------------------------------------------------------

WORDS = torch.zeros(6, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"state": WORDS.long()}, TypeError, r"state: expected dtype torch\.int32, got torch\.i"),
        ({"state": WORDS.view(2, 3)}, ValueError, r"state: expected shape \[any\], got \[2, 3\]"),
        ({"state": WORDS[::2]}, ValueError, r"state: expected a contiguous tensor"),
        ({"staged": WORDS.float()}, TypeError, r"staged: expected dtype torch\.int32"),
        ({"segments": WORDS}, ValueError, r"segments: expected shape \[any, 3\], got \[6\]"),
        ({"segments": WORDS.view(3, 2)}, ValueError, r"segments: expected shape \[any, 3\]"),
        ({"segments": WORDS.view(3, 2).T}, ValueError, r"segments: expected a contiguous tensor"),
        ({"num_segments": WORDS}, ValueError, r"num_segments: expected shape \[1\], got \[6\]"),
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    arguments = {
        "state": WORDS.clone(),
        "staged": WORDS.clone(),
        "segments": WORDS.view(2, 3),
        "num_segments": WORDS[:1],
    } | change
    on_device = {}
    for name, value in arguments.items():
        storage = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=device
        )
        on_device[name] = storage.copy_(value)
    with pytest.raises(error, match=message):
        kernels.scatter_segments(**on_device)
