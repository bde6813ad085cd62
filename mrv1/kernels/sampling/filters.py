"""The filters of a draw: their names and tensors, and what they keep, in plain torch.

They keep a token if, in this order::

    min_p   probability >= min_p times the largest
    top_k   logit >= the k-th largest: ties with the k-th stay
    top_p   mass of strictly likelier tokens < top_p, renormalised after min_p and top_k

The kernel (``draw``) finds the kept tokens without a sort.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypedDict

import torch


class Filters(TypedDict, total=False):
    """The filters of ``sample_tokens`` by keyword: [rows], contiguous; None = off in all rows."""

    top_k: torch.Tensor | None
    """int32 >= 0: tokens to keep; ties with the last stay; 0 = all."""
    top_p: torch.Tensor | None
    """float32 in (0, 1]: mass to keep; 1 = all."""
    min_p: torch.Tensor | None
    """float32 in [0, 1]: least probability to keep, as a share of the largest; 0 = all."""


class Filter(NamedTuple):
    """How a slot stores a filter."""

    dtype: torch.dtype
    off: float
    """The value that keeps all tokens."""


FILTERS = {
    "top_k": Filter(torch.int32, 0),
    "top_p": Filter(torch.float32, 1),
    "min_p": Filter(torch.float32, 0),
}
"""By field of ``Filters``."""


def kept_tokens(
    scaled: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what the ``Filters`` keep of [rows, vocab] float64, not NaN: [rows, vocab] bool."""
    kept = scaled > -torch.inf
    if min_p is not None:
        kept &= scaled >= scaled.amax(1, keepdim=True) + min_p.double().log()[:, None]
    ranked, order = scaled.masked_fill(~kept, -torch.inf).sort(dim=1, descending=True)
    if top_k is not None:
        last = torch.where(top_k > 0, top_k, scaled.shape[1]).clamp(max=scaled.shape[1])
        kth = ranked.gather(1, last.long()[:, None] - 1)
        ranked = ranked.masked_fill(ranked < kth, -torch.inf)
    if top_p is not None:
        # ``before`` is the mass of strictly likelier tokens at the first of several equal values.
        probs = ranked.softmax(1)
        before = probs.cumsum(1) - probs
        is_first = torch.ones_like(ranked, dtype=torch.bool)
        is_first[:, 1:] = ranked[:, 1:] < ranked[:, :-1]
        enough = is_first & (before >= top_p.double()[:, None]) & (top_p < 1)[:, None]
        enough[:, 0] = False
        ranked = ranked.masked_fill(enough.cummax(1).values, -torch.inf)
    return torch.zeros_like(kept).scatter(1, order, ranked > -torch.inf)


def only_top_p(filters: Mapping[str, torch.Tensor], vocab_size: int) -> torch.Tensor:
    """Return in which rows top_p is on, and is the only filter that is: [rows] bool."""
    rows = filters["top_p"] < 1
    for name in filters.keys() - {"top_p"}:
        is_off = filters[name] == FILTERS[name].off
        rows &= is_off | (filters[name] >= vocab_size) if name == "top_k" else is_off
    return rows
