"""vLLM's Triton mask of top-k and top-p, for benchmarks."""

from __future__ import annotations

import torch


def masked(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
) -> torch.Tensor:
    """Return scaled logits with what top-k, then top-p removes set to -inf, by vLLM 0.26's kernel.

    Args:
        logits: ``[rows, vocab]`` float32, left as they are.
        temperature: ``[rows]`` float32, above 0.
        top_k: ``[rows]`` int32; None = all.
        top_p: ``[rows]`` float32; None = all.
    """
    from vllm.v1.sample.ops.topk_topp_triton import (  # type: ignore[import-not-found]
        apply_top_k_top_p_triton,
    )

    kept: torch.Tensor = apply_top_k_top_p_triton(logits / temperature[:, None], top_k, top_p)
    return kept
