"""Provenance of a result: the machine, the versions and the source it was measured with."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

import mrv1
from mrv1.device import device_info, driver_version

UNKNOWN = "unknown"


def git_commit() -> str:
    """Return mrv1's commit, ``-dirty`` if files differ, or ``"unknown"`` outside its checkout."""
    root = Path(mrv1.__file__).resolve().parents[1]
    if git(root, "rev-parse", "--show-toplevel") != str(root):
        return UNKNOWN
    commit = git(root, "rev-parse", "HEAD")
    if commit is None:
        return UNKNOWN
    return commit + ("-dirty" if git(root, "status", "--porcelain", "-uno") else "")


def git(root: Path, *arguments: str) -> str | None:
    """Return what a git command prints in a folder, or None if it fails or git is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def provenance(device: torch.device, commit: str | None) -> dict[str, object]:
    """Return a result's device, and the commit of its source; None asks git."""
    info = device_info(device)
    return {
        "device": {
            "name": info.name,
            "type": device.type,
            "capability": info.capability and ".".join(map(str, info.capability)),
            "num_sms": info.num_sms,
            "total_memory_bytes": info.total_memory_bytes,
        },
        "driver": (driver_version() or UNKNOWN) if device.type == "cuda" else None,
        "versions": {
            "mrv1": mrv1.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "triton": version_of("triton"),
        },
        "commit": commit or git_commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }
