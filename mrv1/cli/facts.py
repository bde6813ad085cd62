"""The facts that ``mrv1 doctor`` reports, as plain data."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from mrv1 import __version__
from mrv1.config import EMBEDDED_MODEL, checkpoint_dir
from mrv1.device import (
    MIN_CAPABILITY,
    DeviceInfo,
    KernelPath,
    device_info,
    driver_version,
    fp8_path,
    kernel_path,
    nibble_path,
    resolve_device,
    visible_gpus,
)
from mrv1.environment import VARIABLES, environment, name_errors
from mrv1.errors import ConfigError, UnsupportedDeviceError
from mrv1.headwise import policy_source
from mrv1.kernels.attention.prefill.choice import WARP_GROUP_CAPABILITY
from mrv1.kernels.layers import quantized
from mrv1.models.checkpoint import SINGLE_FILE
from mrv1.provenance import version_of
from mrv1.runner.attention_backends import import_flashinfer
from mrv1.runner.cpu_threads import describe_threads
from mrv1.runner.report import PATHS

TRITON_SUPPORTED = ((3, 6), (3, 10))
"""First version that works; first unsupported version, which changes float fusion by default."""
TORCH_MIN = (2, 11)
PACKAGES = ("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors")

_PARTS = ("attention", "KV write", "token gather", "norm, rope, activation", "sampling")
_IMPLEMENTATION: dict[KernelPath, str] = {
    "triton": "Triton, compiled",
    "interpreter": "Triton, interpreted on the CPU (slow: for tests and learning)",
    "reference": "torch reference",
}


class Facts(TypedDict):
    """Everything ``mrv1 doctor`` says."""

    versions: dict[str, str | None]
    flashinfer: str
    """FlashInfer's version, or the reason why it cannot be used, in words."""
    gpus: list[dict[str, Any]]
    """Index, name, capability, memory_bytes and num_sms of each."""
    driver: str | None
    cuda: str | None
    """CUDA (or, as ``hip ...``, ROCm) version torch was built for; None for a CPU build."""
    device: str | None
    """The device that ``device="auto"`` selects; None if mrv1 refuses it."""
    path: str
    """Kernel path on that device, in words."""
    used_for: dict[str, str]
    """Part of a step -> its implementation."""
    cpu_threads: str
    """How many threads of torch a model on the CPU gets, in words."""
    embedded_model: dict[str, Any]
    """Of the checkpoint in the package: present, path and weights_bytes."""
    environment: dict[str, str]
    warnings: list[str]


def collect() -> Facts:
    """Look at this process, its GPUs and the installed packages."""
    versions: dict[str, str | None] = {"mrv1": __version__, "python": platform.python_version()}
    versions |= {name: version_of(name) for name in PACKAGES}
    gpus = visible_gpus()
    flashinfer, flashinfer_warnings = find_flashinfer()
    warnings = version_warnings(versions) + flashinfer_warnings + gpu_warnings(gpus)
    warnings += variable_warnings()
    device, path, parts = None, "none", dict[str, str]()
    try:
        resolved = resolve_device("auto")
    except UnsupportedDeviceError as error:
        warnings.append(str(error))
    else:
        device, path = str(resolved), PATHS[kernel_path(resolved)]
        parts = used_for(kernel_path(resolved)) | prefill_use(resolved) | codes_use(resolved)
        parts |= quantized_use(resolved)
    embedded = _embedded_model()
    if not embedded["present"]:
        warnings.append(f"the embedded model is incomplete: no weights in {embedded['path']}")
    return Facts(
        versions=versions,
        flashinfer=flashinfer,
        gpus=[
            {
                "index": index,
                "name": info.name,
                "capability": ".".join(map(str, info.capability or ())),
                "memory_bytes": info.total_memory_bytes,
                "num_sms": info.num_sms,
            }
            for index, info in enumerate(gpus)
        ],
        driver=driver_version(),
        cuda=f"hip {torch.version.hip}" if torch.version.hip else torch.version.cuda,
        device=device,
        path=path,
        used_for=parts,
        cpu_threads=describe_threads(),
        embedded_model=embedded,
        environment=environment(),
        warnings=warnings,
    )


def used_for(path: KernelPath) -> dict[str, str]:
    """Return the implementation of each part of a step on ``path``."""
    products = _IMPLEMENTATION[path]
    if path == "triton":
        products += "; torch (cuBLAS) where tokens are many"
    return dict.fromkeys(_PARTS, _IMPLEMENTATION[path]) | {"matrix products": products}


def prefill_use(device: torch.device) -> dict[str, str]:
    """Return which kernels prefill attention has on a GPU."""
    if kernel_path(device) != "triton":
        return {}
    if device_info(device).capability == WARP_GROUP_CAPABILITY:
        return {"prefill attention": "Gluon (warp groups) and Triton"}
    needed = "{}.{}".format(*WARP_GROUP_CAPABILITY)
    return {"prefill attention": f"Triton: Gluon's warp groups need compute capability {needed}"}


def codes_use(device: torch.device) -> dict[str, str]:
    """Return how ``device`` converts the codes of fp8 and of 4-bit KV caches."""
    names = {"FP8 conversion": fp8_path, "4-bit KV codes": nibble_path}
    if kernel_path(device) == "reference":
        return dict.fromkeys(names, _IMPLEMENTATION["reference"])
    found = {}
    for name, choose_path in names.items():
        choice = choose_path(device)
        how = "integer arithmetic" if choice.path == "integer" else "hardware"
        found[name] = f"{how}: {choice.reason}"
    return found


def quantized_use(device: torch.device) -> dict[str, str]:
    """Return how products read quantized weights on ``device``."""
    how = quantized.quantized_path(device)
    if quantized.quantizes_tokens(device, torch.bfloat16, "token"):
        how += (
            f"; more than {quantized.MOST_PLAIN_TOKENS} tokens are quantized to e4m3 too where a "
            'checkpoint in bfloat16 quantizes inputs, and with quantization="fp8"'
        )
    if device.type != "cpu":
        how += f"; experts {quantized.EXPERTS_PATH}"
    return {"quantized weights": how}


def _embedded_model() -> dict[str, Any]:
    path = checkpoint_dir(EMBEDDED_MODEL)
    weights = path / SINGLE_FILE
    present = weights.is_file()
    size = weights.stat().st_size if present else 0
    return {"present": present, "path": str(path), "weights_bytes": size}


def _release(version: str) -> tuple[int, int]:
    """Return major and minor of a version such as ``2.13.0+cu130``."""
    numbers = re.findall(r"\d+", version)
    return int(numbers[0]), int(numbers[1])


def version_warnings(versions: Mapping[str, str | None]) -> list[str]:
    """Return a warning for each package that is missing or has an unsupported version."""
    warnings = [f"{name} is not installed" for name, version in versions.items() if not version]
    torch_version, triton_version = versions["torch"], versions["triton"]
    if torch_version and _release(torch_version) < TORCH_MIN:
        warnings.append(f"torch {torch_version} is not supported: expected >= 2.11")
    first, after = TRITON_SUPPORTED
    if triton_version and not first <= _release(triton_version) < after:
        warnings.append(f"triton {triton_version} is not supported: expected >= 3.6, < 3.10")
    return warnings


def find_flashinfer() -> tuple[str, list[str]]:
    """Return the state of FlashInfer, and the error with which ``LLM`` refuses a broken one."""
    version = version_of("flashinfer-python")
    try:
        import_flashinfer()
    except ConfigError as error:
        if version is None:
            return "not installed", []
        return f"{version}, cannot be imported", [str(error)]
    return version or "unknown version", []


def variable_warnings() -> list[str]:
    """Return the errors that ``LLM`` would raise for the ``MRV1_*`` variables of this process."""
    errors = name_errors()
    for name, read in VARIABLES.items():
        try:
            value = read()
            if name == "MRV1_HEAD_POLICY" and value is not None:
                policy_source(value)
        except ConfigError as error:
            errors.append(str(error))
    return errors


def gpu_warnings(gpus: tuple[DeviceInfo, ...]) -> list[str]:
    """Return a warning for each GPU that cannot run the kernels."""
    if torch.version.hip:
        return ["ROCm: the kernels are compiled for AMD GPUs in tests, but were never run on one"]
    return [
        f"GPU {index}, {gpu.name}, has compute capability {gpu.capability[0]}.{gpu.capability[1]}:"
        " the kernels need 8.0 (Ampere) or newer"
        for index, gpu in enumerate(gpus)
        if gpu.capability and gpu.capability < MIN_CAPABILITY
    ]
