"""Draws from shards of logits on several GPUs, one process each."""

from __future__ import annotations

import pytest

from tests.process_ranks import run_ranks

TIMEOUT_SECONDS = 180
"""Each rank compiles kernels for several sizes of the vocabulary."""


@pytest.mark.timeout(TIMEOUT_SECONDS + 30)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(2, marks=pytest.mark.multi_gpu(2)),
        pytest.param(4, marks=pytest.mark.multi_gpu(4)),
    ],
)
def test_gpus_draw_as_one_does(size):
    run_ranks("tests.kernels.draws_on_gpus", size, TIMEOUT_SECONDS)
