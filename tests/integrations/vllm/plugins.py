"""Plug-ins of vLLM as an installation of mrv1 has them, and a platform for machines without a GPU.

vLLM finds plug-ins by the metadata of installed packages, in each of its processes anew.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from vllm.platforms.cpu import CpuPlatform

METADATA = "Metadata-Version: 2.1\nName: mrv1-tests\nVersion: 0\n"


class Platform(CpuPlatform):
    """vLLM's platform for CPUs, without the settings that its own CPU kernels need."""

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        """Keep asynchronous scheduling, block size and executor as on a GPU."""


def platform() -> str:
    return f"{__name__}.Platform"


def write_plugins(folder: Path, *, on_cpu: bool) -> None:
    """Write the metadata of a package; with ``folder`` in its path vLLM finds the plug-ins."""
    groups = []
    if not [each for each in entry_points(group="vllm.general_plugins") if each.name == "mrv1"]:
        groups.append("[vllm.general_plugins]\nmrv1 = mrv1.integrations.vllm.plugin:register\n")
    if on_cpu:
        groups.append(f"[vllm.platform_plugins]\ncpu = {__name__}:platform\n")
    package = folder / "mrv1_tests-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(METADATA)
    (package / "entry_points.txt").write_text("\n".join(groups))
