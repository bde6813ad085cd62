"""FlashAttention-3 as vLLM ships it, to measure beside mrv1's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def flash_attention() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return vLLM's ``flash_attn_varlen_func`` and the ``get_scheduler_metadata`` before it.

    Raises:
        ImportError: vLLM is not installed, or not with FlashAttention.
    """
    # Not a dependency of mrv1, so there is nothing to check its types against.
    from vllm.vllm_flash_attn import (  # type: ignore[import-not-found]
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    return flash_attn_varlen_func, get_scheduler_metadata
