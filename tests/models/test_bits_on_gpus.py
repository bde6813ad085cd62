"""Rank-invariant logits of several GPUs, one process each, are the bits of one."""

from __future__ import annotations

import pytest

from tests.process_ranks import run_ranks

TIMEOUT_SECONDS = 300


@pytest.mark.timeout(TIMEOUT_SECONDS + 30)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(2, marks=pytest.mark.multi_gpu(2)),
        pytest.param(4, marks=pytest.mark.multi_gpu(4)),
    ],
)
def test_gpus_have_the_bits_of_one(size):
    run_ranks("tests.models.bits_on_gpus", size, TIMEOUT_SECONDS)
