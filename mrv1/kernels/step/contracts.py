"""Stop codes, limits and shared argument checks of the ops around a model's forward pass."""

from __future__ import annotations

import torch

from mrv1.kernels._base.checks import check_tensor

RUNNING = 0
"""Stop code of a slot that may be scheduled."""
STOP_TOKEN = 1
"""Stop code: the newest token is one of the request's stop tokens."""
LENGTH = 2
"""Stop code: the request has max_total_tokens tokens."""
FAILED = 3
"""Stop code: the sampler had no token to give."""
STOP_SEQUENCE = 4
"""Stop code: the newest tokens are one of the request's stop sequences."""

MAX_DRAFT_TOKENS = 7
"""Drafts a row may have in one step."""
MAX_SAMPLED_TOKENS = 8
"""Tokens a row may append in one step: its drafts, all accepted, and one more."""


def check_queries(
    query_start_loc: torch.Tensor | None,
    query_len: int | None,
    num_rows: int,
    device: torch.device,
) -> None:
    """Raise unless the rows' query lengths are given, in one of the two ways.

    Raises:
        TypeError, ValueError: neither is given, or one is not as it should be.
    """
    if query_len is None and query_start_loc is None:
        raise ValueError("query_start_loc: expected a tensor where query_len is None, got None")
    if query_len is not None and query_len < 1:
        raise ValueError(f"query_len: expected None or at least 1, got {query_len}")
    if query_start_loc is not None:
        check_tensor(
            "query_start_loc",
            query_start_loc,
            shape=(num_rows + 1,),
            dtype=torch.int32,
            device=device,
            contiguous=True,
        )
