"""Types of the layers' arguments, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from mrv1.kernels._base.checks import check_tensor

Activation = Literal["silu_and_mul"]
"""The activations that ``linear`` can apply."""


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Rows that replace embeddings, such as an image's; ``add_features`` adds further columns."""

    rows: torch.Tensor
    """[any, at least hidden], embedding's dtype, contiguous: the first hidden replace its row."""
    source: torch.Tensor
    """[any] int32, contiguous: for each of the first tokens of the batch its row of ``rows``; -1 =
    the embedding of its id. Rows are not checked."""
    num_sources: torch.Tensor
    """[1] int32: how many of the first tokens have an entry in ``source``; later tokens have the
    embeddings of their ids. At most the length of ``source``; on the device, so not checked."""


def check_features(
    features: FeatureRows | None, embed: torch.Tensor, first_column: int = 0
) -> None:
    """Raise unless ``features``, from ``first_column`` on, fit rows of ``embed``, or are None."""
    if features is None:
        return
    check = partial(check_tensor, dtype=torch.int32, device=embed.device, contiguous=True)
    check("features.rows", features.rows, shape=(None, None), dtype=embed.dtype)
    if not 0 <= first_column <= features.rows.shape[1] - embed.shape[1]:
        raise ValueError(
            f"features.rows: expected {embed.shape[1]} columns from {first_column} on, "
            f"got {features.rows.shape[1]} columns"
        )
    check("features.source", features.source, shape=(None,))
    check("features.num_sources", features.num_sources, shape=(1,))


def feature_arguments(
    features: FeatureRows | None,
) -> tuple[torch.Tensor | None, int, torch.Tensor | None, torch.Tensor | None]:
    """Return rows, their stride, source and num_sources as a kernel takes them."""
    if features is None:
        return None, 0, None, None
    return features.rows, features.rows.stride(0), features.source, features.num_sources
