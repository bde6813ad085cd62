"""Arguments that a launcher passes for one tensor."""

from __future__ import annotations

import torch


def with_strides(
    x: torch.Tensor | None, num_dims: int = 2
) -> tuple[torch.Tensor | int | None, ...]:
    """Return ``x`` and its first ``num_dims`` strides; for None, None and zeros."""
    return (None, *[0] * num_dims) if x is None else (x, *x.stride()[:num_dims])
