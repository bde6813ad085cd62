"""Fetching an upload: the counted words of the slot in a device tensor, against slices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.step.fetch_upload import TILE_WORDS
from tests.kernels.elementwise import tiles

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

UNTOUCHED = -7


def uploads_of(lengths: list[int], row_words: int, device, *, pinned: bool) -> torch.Tensor:
    """Return rows whose first word is the count of words; all other words are distinct."""
    words = np.arange(len(lengths) * row_words, dtype=np.int32).reshape(len(lengths), row_words)
    words[:, 0] = lengths
    uploads = torch.from_numpy(words)
    if device.type == "cpu":
        return uploads
    return uploads.pin_memory() if pinned else uploads.to(device)


def fetched(ops, uploads, slot: int, num_staged: int, device) -> list[int]:
    staged = torch.full((num_staged,), UNTOUCHED, dtype=torch.int32, device=device)
    ops.fetch_upload(uploads, torch.tensor([slot], dtype=torch.int32, device=device), staged)
    return staged.tolist()


@given(
    row_words=st.sampled_from([1, 3, 64, 2047, 2049, 5000]), spare=st.integers(0, 3),
    pinned=st.booleans(), as_on_gpu=st.booleans(), data=st.data(),
)  # fmt: skip
def test_exactly_the_counted_words_are_fetched(device, row_words, spare, pinned, as_on_gpu, data):
    lengths = data.draw(st.lists(st.integers(1, row_words), min_size=1, max_size=4))
    slot = data.draw(st.integers(0, len(lengths) - 1))
    uploads = uploads_of(lengths, row_words, device, pinned=pinned)
    expected = uploads[slot, : lengths[slot]].tolist()
    expected += [UNTOUCHED] * (row_words + spare - lengths[slot])
    with tiles("fetch_upload", as_on_gpu=as_on_gpu):
        assert fetched(kernels, uploads, slot, row_words + spare, device) == expected
    assert fetched(reference, uploads, slot, row_words + spare, device) == expected


def test_an_upload_of_several_rounds_of_loads_is_fetched(device):
    num_words = 3 * TILE_WORDS + 5
    uploads = uploads_of([num_words, num_words], num_words, device, pinned=True)
    with tiles("fetch_upload", as_on_gpu=True):
        assert fetched(kernels, uploads, 1, num_words, device) == uploads[1].tolist()


WORDS = torch.zeros(6, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"uploads": WORDS}, ValueError, r"uploads: expected shape \[any, any\], got \[6\]"),
        ({"uploads": WORDS.view(2, 3).long()}, TypeError, r"uploads: expected dtype torch\.int32"),
        ({"uploads": WORDS.view(2, 3).T}, ValueError, r"uploads: expected a contiguous tensor"),
        ({"uploads": WORDS.view(1, 6)[:, :0]}, ValueError, r"uploads: expected 1 to 4 words a r"),
        ({"uploads": WORDS.view(1, 6)}, ValueError, r"uploads: expected 1 to 4 words .* got 6"),
        ({"slot": WORDS}, ValueError, r"slot: expected shape \[1\], got \[6\]"),
        ({"slot": WORDS[:1].float()}, TypeError, r"slot: expected dtype torch\.int32"),
        ({"staged": WORDS[::2]}, ValueError, r"staged: expected a contiguous tensor"),
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    arguments = {"uploads": WORDS.view(2, 3), "slot": WORDS[:1], "staged": WORDS[:4]} | change
    on_device = {
        name: torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=device
        ).copy_(value)
        for name, value in arguments.items()
    }
    with pytest.raises(error, match=message):
        kernels.fetch_upload(**on_device)


def test_host_memory_must_be_pinned(device):
    if device.type == "cpu":
        pytest.skip("all memory is the host's")
    staged = WORDS.to(device)
    with pytest.raises(ValueError, match=r"uploads: expected a tensor on cuda:0 or in pinned"):
        kernels.fetch_upload(WORDS.view(1, 6), staged[:1], staged)
