"""Staging: what goes up comes out, in one copy, and no buffer is rewritten too early."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mrv1.runner.staging import RING_DEPTH, Staging

arrays = st.dictionaries(
    st.sampled_from("abcdef"),
    hnp.arrays(
        st.sampled_from([np.int32, np.int64, np.float32]),
        hnp.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=40),
        elements=st.integers(-1000, 1000),
    ),
    max_size=6,
)


@pytest.mark.gpu
@given(uploads=st.lists(arrays, min_size=1, max_size=5))
def test_every_array_arrives_with_its_shape_and_dtype(device, uploads):
    staging = Staging(device, capacity_bytes=64)  # small, so that the ring has to grow
    arrived = [staging.upload(upload) for upload in uploads]
    for sent, got in zip(uploads, arrived, strict=True):
        assert set(got) == set(sent)
        for name, array in sent.items():
            assert got[name].device.type == device.type
            np.testing.assert_array_equal(got[name].cpu().numpy(), array, strict=True)


def test_a_later_upload_does_not_reach_an_earlier_tensor():
    staging = Staging(torch.device("cpu"))
    first = staging.upload({"x": np.array([1, 2], dtype=np.int32)})["x"]
    for _ in range(2 * RING_DEPTH):
        staging.upload({"x": np.array([9, 9], dtype=np.int32)})
    assert first.tolist() == [1, 2]


def test_a_strided_array_arrives_in_its_order():
    staging = Staging(torch.device("cpu"))
    array = np.arange(12, dtype=np.int64).reshape(3, 4).T
    assert staging.upload({"x": array})["x"].tolist() == array.tolist()


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_a_buffer_waits_for_its_last_copy():
    """With the stream held up, the ring's first buffer is not refilled before it has been read."""
    device = torch.device("cuda")
    staging = Staging(device)
    torch.cuda._sleep(200_000_000)  # about 0.1 s before the first copy can run
    arrived = [
        staging.upload({"x": np.full(1000, i, dtype=np.int32)})["x"] for i in range(2 * RING_DEPTH)
    ]
    assert staging.num_waits >= 1
    for i, tensor in enumerate(arrived):
        assert (tensor == i).all()
