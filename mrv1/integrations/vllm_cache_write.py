"""vLLM's Triton KV cache writes, to measure beside mrv1's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def triton_cache_writes() -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """Return vLLM's write, its write with a scale per (token, head), and its ``KVQuantMode``.

    Raises:
        ImportError: vLLM is not installed, or too old to have them.
    """
    # Not a dependency of mrv1, so there is nothing to check its types against.
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (  # type: ignore[import-not-found]
        triton_reshape_and_cache_flash,
        triton_reshape_and_cache_flash_per_token_head_quant,
    )
    from vllm.v1.kv_cache_interface import KVQuantMode  # type: ignore[import-not-found]

    return (
        triton_reshape_and_cache_flash,
        triton_reshape_and_cache_flash_per_token_head_quant,
        KVQuantMode,
    )
