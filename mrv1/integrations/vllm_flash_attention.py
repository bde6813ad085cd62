"""FlashAttention-3 as vLLM ships it, to measure beside mrv1's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def flash_attention() -> Callable[..., Any]:
    """Return vLLM's ``flash_attn_varlen_func``.

    Raises:
        ImportError: vLLM is not installed, or not with FlashAttention.
    """
    # Not a dependency of mrv1, so there is nothing to check its types against.
    from vllm.vllm_flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    function: Callable[..., Any] = flash_attn_varlen_func
    return function
