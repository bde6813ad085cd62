"""Hardware or integer conversion of e4m3 by GPU, and the reason."""

from __future__ import annotations

import pytest
import torch

from mrv1.device import DeviceInfo, choose_fp8_path, fp8_path
from mrv1.errors import UnsupportedDeviceError


def _gpu(capability: tuple[int, int] | None) -> DeviceInfo:
    return DeviceInfo(
        device=torch.device("cuda", 0),
        name="Some GPU",
        capability=capability,
        num_sms=1,
        total_memory_bytes=1,
    )


@pytest.mark.parametrize(
    ("capability", "path", "reason"),
    [
        ((8, 0), "integer", "Some GPU has no e4m3"),
        ((8, 6), "integer", "Some GPU has no e4m3"),
        ((8, 9), "hardware", "converts e4m3"),
        ((9, 0), "hardware", "converts e4m3"),
        ((12, 0), "hardware", "converts e4m3"),
    ],
)
def test_fp8_path_by_capability(capability, path, reason):
    choice = choose_fp8_path(_gpu(capability))
    assert choice.path == path
    assert reason in choice.reason


def test_amd_converts_fp8_in_integer_arithmetic():
    choice = choose_fp8_path(_gpu((9, 4)), is_amd=True)
    assert choice.path == "integer"
    assert "AMD" in choice.reason


def test_the_fp8_conversion_on_a_cpu_counts_as_hardware():
    assert fp8_path(torch.device("cpu")).path == "hardware"


def test_old_gpus_are_refused_and_named():
    with pytest.raises(UnsupportedDeviceError, match=r"Some GPU has compute capability 7\.5; an"):
        choose_fp8_path(_gpu((7, 5)))
