"""Which keys each prompt token sees, where that is not all keys up to its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from mrv1.errors import RequestError
from mrv1.multimodal.item import MultimodalItem
from mrv1.multimodal.reading import check_unmasked, plain_tensor, reading

Ranges = npt.NDArray[np.int32]  # [tokens, 2]: keys at positions [lo, hi) of the request


def causal_ranges(start: int, end: int) -> Ranges:
    """Return the ranges of tokens ``[start, end)`` that see all keys up to their own."""
    ranges = np.zeros((end - start, 2), dtype=np.int32)
    ranges[:, 1] = np.arange(start + 1, end + 1)
    return ranges


def visible_ranges(
    items: Sequence[MultimodalItem], attn_mask_offsets: object, num_prompt_tokens: int
) -> Ranges | None:
    """Return the range of keys that each prompt token sees; None = all tokens are causal.

    A bidirectional item's tokens see all of it. ``attn_mask_offsets``: the caller's own ranges,
    ``[prompt tokens, 2]`` integers; None = none. RequestError: they are not as described, or come
    with a bidirectional item.
    """
    both_ways = [item for item in items if item.bidirectional]
    if attn_mask_offsets is None and not both_ways:
        return None
    causal = causal_ranges(0, num_prompt_tokens)
    if attn_mask_offsets is None:
        for item in both_ways:
            causal[item.start : item.end, 1] = item.end
        return causal
    if both_ways:
        raise RequestError(
            f"attn_mask_offsets: expected None with a bidirectional item ({both_ways[0].name}), "
            "whose ranges follow from its place; got both"
        )
    ranges = _checked(attn_mask_offsets, num_prompt_tokens)
    return None if np.array_equal(ranges, causal) else ranges


def _checked(given: object, num_prompt_tokens: int) -> Ranges:
    with reading("attn_mask_offsets", "pairs [lo, hi)"):
        if isinstance(given, torch.Tensor):
            given = plain_tensor("attn_mask_offsets", given).cpu()
            # numpy has no bfloat16: let the check below refuse every float.
            given = (given.float() if given.is_floating_point() else given).numpy()
        check_unmasked("attn_mask_offsets", given)
        ranges = np.asarray(given)
    if ranges.dtype.kind not in "iu" or ranges.shape != (num_prompt_tokens, 2):
        raise RequestError(
            f"attn_mask_offsets: expected integers [{num_prompt_tokens}, 2], a range [lo, hi) for "
            f"each prompt token, got {ranges.dtype} {list(ranges.shape)}"
        )
    low, high = ranges[:, 0], ranges[:, 1]
    (wrong,) = ((low < 0) | (low >= high) | (high > num_prompt_tokens)).nonzero()
    if len(wrong):
        token = int(wrong[0])
        raise RequestError(
            f"attn_mask_offsets: expected 0 <= lo < hi <= {num_prompt_tokens}, got "
            f"[{low[token]}, {high[token]}) for token {token}"
        )
    return ranges.astype(np.int32)


def whole_spans(ranges: Ranges) -> tuple[tuple[int, int], ...]:
    """Return the spans of tokens that must be computed in one step, as they see later keys."""
    reach = np.maximum.accumulate(ranges[:, 1])
    cuts = (reach <= np.arange(1, len(reach) + 1)).nonzero()[0] + 1
    spans = pairwise([0, *cuts.tolist()])
    return tuple((start, end) for start, end in spans if end - start > 1)
