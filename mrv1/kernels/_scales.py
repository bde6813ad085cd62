"""What the launchers of the paged ops pass to their kernels about an fp8 cache's scales."""

from __future__ import annotations

import torch

from mrv1.device import fp8_path
from mrv1.kernels.kv_scales import KVScales


def cache_arguments(
    k_cache: torch.Tensor, v_cache: torch.Tensor, scales: KVScales | None
) -> tuple[torch.Tensor | None, ...]:
    """Return K and V cache (codes as uint8), K and V scales, scale bases and block strides."""
    if scales is None:
        return k_cache, v_cache, None, None, None, None
    return (
        k_cache.view(torch.uint8),
        v_cache.view(torch.uint8),
        scales.k_scale,
        scales.v_scale,
        scales.base,
        scales.block_stride,
    )


def fp8_constexprs(scales: KVScales | None, device: torch.device) -> dict[str, object]:
    """Return the constexprs that choose the conversion and the scales' address.

    Raises:
        UnsupportedDeviceError: the device has no path for fp8.
    """
    if scales is None:
        return {"FP8_PATH": None, "TOKEN_SCALES": False}
    return {
        "FP8_PATH": fp8_path(device).path,
        "TOKEN_SCALES": scales.granularity == "token",
    }


def product_dtype(q: torch.Tensor, scales: KVScales | None) -> torch.dtype:
    """Return the dtype launch choices go by: the cache's, or float32 where products are."""
    if scales is None or q.dtype == torch.float32:
        return q.dtype
    return torch.float8_e4m3fn
