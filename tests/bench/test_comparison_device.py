"""Benchmarks of kernels need a GPU unless the CPU is asked for by name."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.kv_write import KVWriteBench, run_kv_write
from mrv1 import UnsupportedDeviceError
from mrv1.device import INTERPRET


@pytest.mark.skipif(torch.cuda.is_available() or INTERPRET, reason="not run: there are kernels")
def test_without_a_gpu_the_reference_is_not_measured_as_mrv1():
    with pytest.raises(UnsupportedDeviceError, match="--device cpu runs the torch reference"):
        run_kv_write(KVWriteBench())
