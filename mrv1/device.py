"""The facts about a device; no other module calls ``torch.cuda.get_*``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from mrv1.environment import FP_FUSION as FP_FUSION
from mrv1.environment import INTERPRET as INTERPRET
from mrv1.errors import ConfigError, UnsupportedDeviceError

KernelPath = Literal["triton", "interpreter", "reference"]

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
"""The files in which Linux reports memory, of the machine and of this process' container."""
OWN_CGROUP = Path("/proc/self/cgroup")
CPUS = Path("/sys/devices/system/cpu")
MIN_CAPABILITY = (8, 0)
"""Oldest NVIDIA compute capability the Triton kernels are compiled and checked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """The facts that mrv1 needs about one device."""

    device: torch.device
    """The device itself."""
    name: str
    """Marketing name, or ``"cpu"``."""
    capability: tuple[int, int] | None
    """CUDA compute capability; None on a CPU."""
    num_sms: int
    """Streaming multiprocessors; 0 on a CPU."""
    total_memory_bytes: int
    """Device memory in bytes; 0 on a CPU."""


_stand_ins: list[DeviceInfo] = []
"""The GPU that this process is to describe instead of its own, if there is one."""


def stand_in(info: DeviceInfo) -> None:
    """From now on describe ``info`` as the only GPU of this process, which has none to use."""
    _stand_ins[:] = [info]
    device_info.cache_clear()


@lru_cache(maxsize=16)
def device_info(device: torch.device) -> DeviceInfo:
    """Return the facts about ``device`` (cached: they do not change while a process lives)."""
    if _stand_ins and device.type == "cuda":
        return _stand_ins[0]
    if device.type == "cpu":
        return DeviceInfo(
            device=device, name="cpu", capability=None, num_sms=0, total_memory_bytes=0
        )
    props = torch.cuda.get_device_properties(device)
    return DeviceInfo(
        device=device,
        name=props.name,
        capability=(props.major, props.minor),
        num_sms=props.multi_processor_count,
        total_memory_bytes=props.total_memory,
    )


def resolve_device(device: str | torch.device, option: str = "device") -> torch.device:
    """Turn ``"auto" | "cpu" | "cuda" | "cuda:N"`` into a usable ``torch.device`` with its index.

    ``option`` is its name in an error. ConfigError: the name is not one of these.
    UnsupportedDeviceError: there is no such GPU, it is older than sm_80, or the process interprets
    Triton kernels and so cannot launch on a GPU.
    """
    resolved = None
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and not INTERPRET else "cpu"
    with suppress(RuntimeError, TypeError):
        resolved = torch.device(device)
        if resolved.type == "cpu":
            return torch.device("cpu")
    if resolved is None or resolved.type != "cuda":
        raise ConfigError(f"{option}: expected 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if INTERPRET:
        raise UnsupportedDeviceError(
            f"{option}: {device} was asked for, but TRITON_INTERPRET=1 makes this process run "
            f"kernels in the CPU interpreter; unset it, or use {option}='cpu'"
        )
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else len(_stand_ins)
    index = resolved.index or 0
    if index >= num_devices:
        raise UnsupportedDeviceError(
            f"{option}: {device} was asked for, but torch sees {num_devices} GPUs; use "
            f"{option}='cpu'"
        )
    resolved = torch.device("cuda", index)
    info = device_info(resolved)
    if torch.version.hip is None and info.capability and info.capability < MIN_CAPABILITY:
        raise UnsupportedDeviceError(
            f"{option}: {info.name} has compute capability {info.capability[0]}."
            f"{info.capability[1]}; the kernels need 8.0 (Ampere) or newer: choose such a GPU, or "
            f"{option}='cpu'"
        )
    return resolved


def rank_devices(device: str, size: int) -> list[torch.device]:
    """Return the device of each of ``size`` ranks: the CPU for all, or GPU r for rank r.

    ConfigError: ``device`` is not 'auto', 'cpu' or 'cuda', or fewer GPUs are visible.
    UnsupportedDeviceError: as ``resolve_device``.
    """
    first = resolve_device(device)
    if first.type == "cpu":
        return [first] * size
    if first.index:
        raise ConfigError(
            f"device: expected 'cuda' with tensor_parallel_size={size}, whose ranks are on the "
            f"first {size} visible GPUs, got {device!r}; choose others with CUDA_VISIBLE_DEVICES"
        )
    num_gpus = torch.cuda.device_count()
    if num_gpus < size:
        raise ConfigError(
            f"tensor_parallel_size: expected at most {num_gpus} ranks, one for each visible GPU, "
            f"got {size}"
        )
    return [resolve_device(f"cuda:{rank}") for rank in range(size)]


def reach_each_other(devices: Sequence[torch.device]) -> bool:
    """Return whether each of these GPUs of ranks reads and writes the memory of all (peer access).

    UnsupportedDeviceError: they are AMD's, where Triton drops ``volatile`` from loads, so that a
    kernel that waits for a word may find the old one in a cache for ever.
    """
    if torch.version.hip is not None:
        raise UnsupportedDeviceError(
            f"tensor_parallel_size: expected 1 on AMD GPUs, got {len(devices)}: no kernel can "
            "wait there for what another GPU writes"
        )
    return all(
        torch.cuda.can_device_access_peer(one, other)
        for one in devices
        for other in devices
        if one != other
    )


def resolve_dtype(name: str, checkpoint_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype that ``name`` means here; ConfigError: float64 on a GPU."""
    if name == "auto":
        return checkpoint_dtype if device.type == "cuda" else torch.float32
    if name == "float64" and device.type == "cuda":
        raise ConfigError("dtype: float64 runs on the CPU reference path only, got device cuda")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def kernel_path(device: torch.device) -> KernelPath:
    """Return the path on ``device``: compiled Triton, Triton's interpreter, or plain torch."""
    if device.type == "cuda":
        return "triton"
    return "interpreter" if INTERPRET else "reference"


ConversionPath = Literal["hardware", "integer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """How a device converts codes of a KV cache, and why; all paths give the same values."""

    path: ConversionPath
    reason: str


def fp8_path(device: torch.device) -> Conversion:
    """Return how kernels convert e4m3; UnsupportedDeviceError: the GPU is older than sm_80."""
    if device.type == "cpu":
        return Conversion(path="hardware", reason="the interpreter's conversion is exact")
    return choose_fp8_path(device_info(device), is_amd=torch.version.hip is not None)


def choose_fp8_path(info: DeviceInfo, *, is_amd: bool = False) -> Conversion:
    """Return how a GPU converts e4m3; UnsupportedDeviceError: it is older than sm_80."""
    if is_amd:
        return Conversion(path="integer", reason=f"{info.name}: AMD's own e4m3 has another format")
    if _check_ampere(info, "an fp8 KV cache") < (8, 9):
        return Conversion(path="integer", reason=f"{info.name} has no e4m3 (8.9 and newer have)")
    return Conversion(path="hardware", reason=f"{info.name} converts e4m3")


def nibble_path(device: torch.device) -> Conversion:
    """Return how kernels convert 4-bit codes; UnsupportedDeviceError: a GPU older than sm_80."""
    if device.type == "cpu":
        return Conversion(path="hardware", reason="the interpreter's arithmetic is exact")
    return choose_nibble_path(device_info(device), is_amd=torch.version.hip is not None)


def choose_nibble_path(info: DeviceInfo, *, is_amd: bool = False) -> Conversion:
    """Return how a GPU converts 4-bit codes; UnsupportedDeviceError: it is older than sm_80."""
    if is_amd:
        return Conversion(path="integer", reason=f"{info.name} may flush subnormal fp16 to 0")
    _check_ampere(info, "a 4-bit KV cache")
    return Conversion(path="hardware", reason=f"{info.name} multiplies subnormal fp16 exactly")


def _check_ampere(info: DeviceInfo, cache: str) -> tuple[int, int]:
    """Return a GPU's compute capability; UnsupportedDeviceError: it is older than sm_80."""
    capability = info.capability or (0, 0)
    if capability < MIN_CAPABILITY:
        raise UnsupportedDeviceError(
            f"{info.name} has compute capability {capability[0]}.{capability[1]}; {cache} needs "
            "8.0 (Ampere) or newer: choose such a GPU, or kv_cache_dtype='auto' (a cache without "
            "scales)"
        )
    return capability


def has_dependent_launch(device: torch.device) -> bool:
    """Return whether ``device`` has dependent launches (CUDA, sm_90 and newer)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return (device_info(device).capability or (0, 0)) >= (9, 0)


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return (free, total) bytes of a CUDA device, as the driver sees them."""
    if _stand_ins:
        return _stand_ins[0].total_memory_bytes, _stand_ins[0].total_memory_bytes
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def host_memory_bytes() -> int:
    """Return the bytes of host memory that this process may take, within a container's limit."""
    try:
        lines = MEMINFO.read_text("ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    left = _container_bytes()
    return available * 1024 if left is None else min(available * 1024, left)


def _container_bytes() -> int | None:
    """Return the bytes that the limit of a container (cgroup v2) leaves; None = no limit."""
    try:
        limit = (CGROUP / "memory.max").read_text("ascii").strip()
        used = int((CGROUP / "memory.current").read_text("ascii"))
        stat = (CGROUP / "memory.stat").read_text("ascii").splitlines()
    except OSError:  # the process is in no container, or in one of version 1
        return None
    if limit == "max":
        return None
    counts = dict(line.split() for line in stat)
    cached = int(counts["active_file"]) + int(counts["inactive_file"])  # freed when needed
    return max(int(limit) - used + cached, 0)


def core_counts() -> set[int]:
    """Return the processors that this process may run on, and the cores that these belong to."""
    usable = os.sched_getaffinity(0)
    files = [CPUS / f"cpu{each}/topology/thread_siblings_list" for each in usable]
    try:
        return {len(usable), len({file.read_text("ascii") for file in files})}
    except OSError:
        return {len(usable)}


def cpu_quota() -> int | None:
    """Return the cores' worth of time that a container (cgroup v2) allows; None = no limit."""
    try:
        own = OWN_CGROUP.read_text("ascii").partition("0::/")[2].partition("\n")[0]
    except OSError:
        own = ""
    quotas = []
    for folder in (CGROUP / own, *(CGROUP / own).parents):
        try:
            allowed, period = (folder / "cpu.max").read_text("ascii").split()
        except (OSError, ValueError):
            continue
        if allowed != "max":
            quotas.append(max(int(allowed) // int(period), 1))
    return min(quotas, default=None)


def visible_gpus() -> tuple[DeviceInfo, ...]:
    """Return the facts about every GPU torch sees, supported or not; empty without one."""
    if not torch.cuda.is_available():
        return ()
    return tuple(device_info(torch.device("cuda", i)) for i in range(torch.cuda.device_count()))


def driver_version() -> str | None:
    """Return the version of the NVIDIA kernel driver, or None if it cannot be read."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text("utf-8")
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else None
