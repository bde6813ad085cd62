"""vLLM's Triton attention over a paged cache, to measure beside mrv1's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def triton_attention() -> tuple[Callable[..., Any], Any]:
    """Return vLLM's ``unified_attention`` and its ``KVQuantMode``.

    Raises:
        ImportError: vLLM is not installed, or too old to have them.
    """
    # Not a dependency of mrv1, so there is nothing to check its types against.
    from vllm.v1.attention.ops.triton_unified_attention import (  # type: ignore[import-not-found]
        unified_attention,
    )
    from vllm.v1.kv_cache_interface import KVQuantMode  # type: ignore[import-not-found]

    function: Callable[..., Any] = unified_attention
    return function, KVQuantMode
