"""Argument checks of the launchers: every message is ``name: expected ..., got ...``."""

from __future__ import annotations

from functools import partial

import torch

from mrv1.device import INTERPRET
from mrv1.errors import UnsupportedDeviceError

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Floating-point dtypes that a kernel accepts unless its docstring names others."""


def check_tensor(
    name: str,
    tensor: object,
    *,
    shape: tuple[int | None, ...] | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
    contiguous: bool = False,
    unit_last_stride: bool = False,
) -> None:
    """Raise unless ``tensor`` is as described; ``None`` in ``shape`` accepts any size.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape, device or stride.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if dtype is not None:
        allowed = dtype if isinstance(dtype, tuple) else (dtype,)
        if tensor.dtype not in allowed:
            expected = " or ".join(str(d) for d in allowed)
            raise TypeError(f"{name}: expected dtype {expected}, got {tensor.dtype}")
    if shape is not None and not _matches(tensor.shape, shape):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{expected}], got {list(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    if unit_last_stride and tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected unit last stride, got strides {tensor.stride()}")


def _matches(got: torch.Size, want: tuple[int | None, ...]) -> bool:
    return len(got) == len(want) and all(
        w is None or w == g for w, g in zip(want, got, strict=True)
    )


def check_vectors(
    name: str,
    bundle: object,
    fields: tuple[str, ...],
    size: int,
    device: torch.device,
    dtype: torch.dtype = torch.int32,
) -> None:
    """Raise unless each named field of a bundle has ``size`` elements, contiguous."""
    for field in fields:
        tensor = getattr(bundle, field)
        check_tensor(
            f"{name}.{field}", tensor, shape=(size,), dtype=dtype, device=device, contiguous=True
        )


def check_rotary_dim(name: str, cos_sin: torch.Tensor, head_dim: int) -> int:
    """Return the last size of a table of cosines and sines; raise if it is no rotary dimension."""
    rotary_dim = cos_sin.shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"{name}: expected an even rotary_dim in [2, {head_dim}] as its last size, "
            f"got {rotary_dim}"
        )
    return rotary_dim


def check_mrope_section(name: str, section: tuple[int, ...], num_pairs: int) -> None:
    """Raise unless ``section`` gives three axes their shares of ``num_pairs`` pairs."""
    if len(section) != 3 or min(section) < 0 or sum(section) != num_pairs:
        raise ValueError(
            f"{name}: expected three sizes >= 0 with sum {num_pairs}, got {tuple(section)}"
        )


def mrope_axes(section: tuple[int, int, int], *, interleaved: bool) -> torch.Tensor:
    """Return [pairs] int64: the axis (0 time, 1 height, 2 width) whose position turns a pair.

    Three consecutive sections (Qwen2-VL), or interleaved: pair i has the axis i % 3 while i is
    less than three times the axis's size, after that the axis 0 (Qwen3-VL).
    """
    sizes = torch.tensor(section)
    if not interleaved:
        return torch.arange(3).repeat_interleave(sizes)
    pair = torch.arange(sum(section))
    axis = pair % 3
    return torch.where(pair < 3 * sizes[axis], axis, 0)


def check_launchable(name: str, tensor: torch.Tensor) -> None:
    """Raise unless a Triton kernel can run on ``tensor``'s device in this process."""
    if tensor.device.type == "cpu" and not INTERPRET:
        raise UnsupportedDeviceError(
            f"{name}: expected a GPU tensor, got one on the CPU; set TRITON_INTERPRET=1 before "
            "the process starts to interpret the kernels, or call mrv1.kernels.reference"
        )
    if tensor.device.type == "cuda" and INTERPRET:
        raise UnsupportedDeviceError(
            f"{name}: expected a CPU tensor because TRITON_INTERPRET=1, got one on {tensor.device}"
        )


def check_reachable(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise unless kernels on ``device`` can read and write ``tensor`` where it is."""
    if tensor.device != device and not tensor.is_pinned():
        raise ValueError(
            f"{name}: expected a tensor on {device} or in pinned host memory, got one on "
            f"{tensor.device}" + (", not pinned" if tensor.device.type == "cpu" else "")
        )


def check_drafts(
    logits: torch.Tensor, ahead: torch.Tensor | None, draft_token_ids: torch.Tensor | None
) -> None:
    """Raise unless ``ahead``, each row's count of drafts, and the drafts fit, or both are None."""
    if ahead is None and draft_token_ids is None:
        return
    if ahead is None or draft_token_ids is None:
        raise ValueError("ahead, draft_token_ids: expected both or neither, got one")
    num_rows = logits.shape[0]
    check = partial(check_tensor, dtype=torch.int32, device=logits.device)
    check("ahead", ahead, shape=(num_rows,), dtype=(torch.int32, torch.int64), contiguous=True)
    check("draft_token_ids", draft_token_ids, shape=(None, None), unit_last_stride=True)
    num_reqs = draft_token_ids.shape[0]
    if num_rows and (num_reqs == 0 or num_rows % num_reqs):
        raise ValueError(
            f"draft_token_ids: expected a number of rows that divides the {num_rows} rows of "
            f"logits, got {num_reqs}"
        )
