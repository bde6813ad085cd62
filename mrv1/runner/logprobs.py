"""Log-probabilities of a step, from the logits to numpy arrays, for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from mrv1.kernels.ops import Ops
from mrv1.runner.step import Int32Array, SlotRequest, TokenLogprobs
from mrv1.sampler import SamplingParams


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one row of a plan asks for."""

    row: int
    """Of the plan."""
    num_top: int
    """Likeliest tokens."""
    token_ids: tuple[int, ...] = ()
    """Tokens by id."""
    edits: bool = False
    """Whether its logits are edited before a token is drawn."""


class LogprobRequests:
    """What the request in each slot asks for, on the host."""

    def __init__(self, max_num_reqs: int) -> None:
        self._params: list[SamplingParams | None] = [None] * max_num_reqs
        self._asks_np = np.zeros(max_num_reqs, dtype=np.bool_)
        self._prompt_end_np = np.zeros(max_num_reqs, dtype=np.int64)
        """Tokens of a prompt whose successor is of the prompt too and is to be reported."""

    def enter(self, request: SlotRequest) -> None:
        """Note what the request that takes a slot asks for."""
        slot, params = request.slot, request.sampling_params
        self._params[slot] = params
        self._asks_np[slot] = params.wants_logprobs
        asks_prompt = params.prompt_logprobs is not None
        self._prompt_end_np[slot] = request.prompt_len - 1 if asks_prompt else 0

    def any(self, slots: Int32Array, num_before: Int32Array) -> bool:
        """Whether a step of these rows reports anything; ``num_before`` as in ``of_prompts``."""
        asks = self._asks_np[slots] | (num_before < self._prompt_end_np[slots])
        return bool(asks.any())

    def of_outputs(self, slots: Int32Array) -> list[Wanted]:
        """Return what is wanted of the tokens that a step draws."""
        found = []
        for row in self._asks_np[slots].nonzero()[0].tolist():
            params = self._params[slots[row]]
            if params is not None:
                ids, edits = params.logprob_token_ids, params.edits_logits
                found.append(Wanted(row, params.logprobs or 0, ids, edits))
        return found

    def of_prompts(
        self, slots: Int32Array, num_before: Int32Array, query_lens: Int32Array
    ) -> list[tuple[Wanted, int]]:
        """Return what is wanted of a step's prompts, and of how many of a row's leading tokens.

        Args:
            slots: ``[rows]``.
            num_before: ``[rows]`` tokens that were computed before the step.
            query_lens: ``[rows]`` tokens of the step.
        """
        counts = np.minimum(self._prompt_end_np[slots] - num_before, query_lens)
        found = []
        for row in (counts > 0).nonzero()[0].tolist():
            params = self._params[slots[row]]
            if params is not None:
                found.append((Wanted(row, params.prompt_logprobs or 0), int(counts[row])))
        return found


class LogprobReport:
    """Log-probabilities of some rows of a plan on their way to the host.

    They are copied to pinned memory on the current stream; ``read`` is for when that is over.

    Args:
        wanted: of each row that asks, for as many positions.
        num_top: likeliest tokens that were looked for.
        token_ids: ``[rows that ask * positions, ids]`` int64: the token that is there, those asked
            for by id, the likeliest.
        logprobs: likewise, float32.
        ranks: likewise, int64.
    """

    def __init__(
        self,
        wanted: Sequence[Wanted],
        num_top: int,
        token_ids: torch.Tensor,
        logprobs: torch.Tensor,
        ranks: torch.Tensor,
    ) -> None:
        self._wanted, self._num_top = wanted, num_top
        self._num_positions = len(token_ids) // len(wanted)
        self._token_ids, self._logprobs = _to_host(token_ids), _to_host(logprobs)
        self._ranks = _to_host(ranks)

    @classmethod
    def of(
        cls,
        wanted: Sequence[Wanted],
        chunks: Iterable[tuple[torch.Tensor, torch.Tensor]],
        ops: Ops,
    ) -> Self:
        """Compute what is wanted.

        Args:
            wanted: of each row that asks.
            chunks: of ``[rows that ask * positions]``, all rows in one chunk if they are several:
                logits ``[any, vocab]``, and the token that is there, ``[any]`` int64, negative =
                none.
            ops: for the device of both.
        """
        most, asked = max(each.num_top for each in wanted), _asked_ids(wanted)
        parts = []
        for logits, drawn in chunks:
            num_top = min(most, logits.shape[1])
            ids = asked.to(logits.device, non_blocking=True)
            ids = ids.repeat_interleave(len(drawn) // len(wanted), dim=0)
            parts.append(_of_chunk(logits, torch.cat([drawn[:, None], ids], dim=1), num_top, ops))
        token_ids, logprobs, ranks = map(torch.cat, zip(*parts, strict=True))
        return cls(wanted, num_top, token_ids, logprobs, ranks)

    def read(self, num_positions: Sequence[int] | None = None) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities by row of the plan.

        Args:
            num_positions: by row of the plan, how many of its positions count; None = all.
        """
        found = {}
        for index, wanted in enumerate(self._wanted):
            count = self._num_positions if num_positions is None else num_positions[wanted.row]
            if count <= 0:
                continue
            first = index * self._num_positions
            rows = slice(first, first + count)
            behind = self._token_ids.shape[1] - self._num_top
            columns = [
                0,
                *range(behind, behind + min(wanted.num_top, self._num_top)),
                *range(1, 1 + len(wanted.token_ids)),
            ]
            found[wanted.row] = TokenLogprobs(
                token_ids=self._token_ids.numpy()[rows, columns],
                logprobs=self._logprobs.numpy()[rows, columns],
                ranks=self._ranks.numpy()[rows, columns],
            )
        return found


def _of_chunk(
    logits: torch.Tensor, by_id: torch.Tensor, num_top: int, ops: Ops
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, log-probabilities and ranks, ``[rows, ids + num_top]`` each."""
    logprobs, ranks, top, top_logprobs = ops.top_logprobs(logits, by_id, num_top)
    top_logits = logits.gather(1, top)
    is_greater = top_logits[:, :, None] < top_logits[:, None, :]
    return (
        torch.cat([by_id, top], dim=1),
        torch.cat([logprobs, top_logprobs], dim=1),
        torch.cat([ranks, 1 + is_greater.sum(dim=2)], dim=1),
    )


def _asked_ids(wanted: Sequence[Wanted]) -> torch.Tensor:
    """Return ``[rows, most]`` ids, -1 = none."""
    most = max(len(each.token_ids) for each in wanted)
    ids = np.full((len(wanted), most), -1, dtype=np.int64)
    for row, each in zip(ids, wanted, strict=True):
        row[: len(each.token_ids)] = each.token_ids
    return torch.from_numpy(ids)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
