"""What launchers pass of a tensor."""

from __future__ import annotations

import torch


def with_strides(
    x: torch.Tensor | None, num_dims: int = 2
) -> tuple[torch.Tensor | int | None, ...]:
    """Return ``x`` and the strides of its first dimensions; zeros beside None."""
    return (None, *[0] * num_dims) if x is None else (x, *x.stride()[:num_dims])
