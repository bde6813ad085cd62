"""The flat buffer of slots: its fields do not overlap and lie at the words they report."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import CapacityError
from mrv1.runner.slot_state import Field, SlotState

CPU = torch.device("cpu")
DTYPES = (torch.int32, torch.int64, torch.float32)

fields = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(
        Field,
        width=st.none() | st.integers(1, 9),
        dtype=st.sampled_from(DTYPES),
        is_shared=st.booleans(),
    ),
    min_size=1,
)


@given(fields=fields, num_slots=st.integers(1, 7), data=st.data())
def test_a_row_of_a_field_occupies_exactly_its_own_words(fields, num_slots, data):
    slots = SlotState(num_slots, fields, CPU)
    name = data.draw(st.sampled_from(sorted(fields)))
    slot = data.draw(st.integers(0, 0 if fields[name].is_shared else num_slots - 1))
    first = slots.first_word(name, slot)
    slots.buffer[first : first + fields[name].row_words] = -1
    for other, field in fields.items():
        view = slots[other]
        num_rows = 1 if field.is_shared else num_slots
        assert view.shape == ((num_rows,) if field.width is None else (num_rows, field.width))
        assert view.dtype == field.dtype
        assert view.data_ptr() % 16 == slots.buffer.data_ptr() % 16
        words = view.contiguous().view(torch.int32).view(num_rows, -1)
        expected = torch.zeros_like(words)
        if other == name:
            expected[slot] = -1
        assert torch.equal(words, expected)


def test_more_words_than_an_int32_can_count_are_refused():
    with pytest.raises(CapacityError, match="lower max_num_seqs or max_model_len"):
        SlotState(1 << 16, {"token_ids": Field(width=1 << 15)}, torch.device("meta"))
