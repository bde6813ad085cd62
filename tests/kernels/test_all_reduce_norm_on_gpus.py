"""The sum over ranks on several GPUs, one process each."""

from __future__ import annotations

import pytest

from tests.process_ranks import run_ranks

TIMEOUT_SECONDS = 150


@pytest.mark.timeout(TIMEOUT_SECONDS + 30)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(2, marks=pytest.mark.multi_gpu(2)),
        pytest.param(4, marks=pytest.mark.multi_gpu(4)),
    ],
)
def test_gpus_sum_as_torch_does(size):
    run_ranks("tests.kernels.sums_on_gpus", size, TIMEOUT_SECONDS)
