"""What the sampler knows of its slots on the host."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import SamplingParams
from mrv1.kernels.ops import select_ops
from mrv1.sampler import Sampler

NUM_SLOTS = 4


@given(
    entering=st.lists(
        st.tuples(
            st.integers(0, NUM_SLOTS - 1), st.sampled_from([0, 5]), st.sampled_from([1, 0.5])
        )
    ),
    slots=st.sets(st.integers(0, NUM_SLOTS - 1), min_size=1),
)
def test_a_step_is_filtered_if_the_last_request_of_a_slot_in_it_is(entering, slots):
    fields = {
        name: torch.zeros(NUM_SLOTS if width is None else (NUM_SLOTS, width), dtype=dtype)
        for name, (dtype, width) in Sampler.fields(3, 5).items()
    }
    sampler = Sampler(NUM_SLOTS, fields, select_ops("reference"))
    filters = dict.fromkeys(range(NUM_SLOTS), False)
    for slot, top_k, top_p in entering:
        sampler.enter(slot, SamplingParams(top_k=top_k, top_p=top_p), seed=0)
        filters[slot] = top_k > 0 or top_p < 1
    expected = any(filters[slot] for slot in slots)
    assert sampler.any_filters(np.array(sorted(slots), dtype=np.int32)) is expected
