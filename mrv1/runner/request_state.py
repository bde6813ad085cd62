"""Per-request state on the device, one slot (row) per running request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mrv1.runner.step import HostArrays, StepPlan

FREE = -1
"""Epoch of a slot that no request holds."""


class RequestState:
    """Token history and lengths of every slot, and the host's mirror of the lengths.

    A request owns its slot from admission to finish and never moves; a step's batch is an index
    into these rows. Device tensors are read and written on the runner's stream only; the numpy
    mirrors (``_np``) are what the host knows without asking the device.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, device: torch.device) -> None:
        def counts() -> torch.Tensor:
            return torch.zeros(max_num_reqs, dtype=torch.int32, device=device)

        self.max_model_len = max_model_len
        self.token_ids = torch.zeros(max_num_reqs, max_model_len, dtype=torch.int32, device=device)
        """[max_num_reqs, max_model_len] int32: prompt, then output."""
        self.num_tokens = counts()
        """[max_num_reqs] int32: prompt and output tokens so far."""
        self.num_computed_tokens = counts()
        """[max_num_reqs] int32: tokens whose K and V are in the cache."""
        self.prompt_len = counts()
        """[max_num_reqs] int32."""
        self.num_tokens_np = np.zeros(max_num_reqs, dtype=np.int32)
        self.num_computed_tokens_np = np.zeros(max_num_reqs, dtype=np.int32)
        self._epochs_np = np.full(max_num_reqs, FREE, dtype=np.int32)

    def stage(self, plan: StepPlan) -> HostArrays:
        """Bring the mirrors to the start of the step; return what the device needs for it.

        Raises:
            ValueError: the plan contradicts what the slots hold.
        """
        self._check_slots((*plan.preempted, *plan.finished, *plan.slots))
        for slot in (*plan.preempted, *plan.finished):
            self._epochs_np[slot] = FREE
        entering = plan.entering
        for request in entering:
            self._check_slots((request.slot,))
            if not 1 <= len(request.token_ids) <= self.max_model_len:
                raise ValueError(
                    f"token_ids of {request.req_id!r}: expected 1 to {self.max_model_len} tokens, "
                    f"got {len(request.token_ids)}"
                )
            if self._epochs_np[request.slot] != FREE:
                raise ValueError(
                    f"plan: expected slot {request.slot} free, {request.req_id!r} got it"
                )
            self._epochs_np[request.slot] = request.epoch
            self.num_tokens_np[request.slot] = len(request.token_ids)
            self.num_computed_tokens_np[request.slot] = 0
        held = self._epochs_np[plan.slots]
        if not np.array_equal(held, plan.epochs) or (held == FREE).any():
            raise ValueError(
                f"plan: expected epochs {held} of slots {plan.slots} ({FREE} = free), "
                f"got {plan.epochs}"
            )
        self._check_rows(plan)
        lengths = [len(request.token_ids) for request in entering]
        starts = [request.slot * self.max_model_len for request in entering]
        history = [np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
        return {
            "entering_slots": np.array([r.slot for r in entering], dtype=np.int64),
            "entering_num_tokens": np.array(lengths, dtype=np.int32),
            "entering_prompt_len": np.array([r.prompt_len for r in entering], dtype=np.int32),
            "history_indices": np.concatenate([*history, np.empty(0, dtype=np.int64)]),
            "history_token_ids": np.concatenate(
                [*(r.token_ids for r in entering), np.empty(0, dtype=np.int32)], dtype=np.int32
            ),
        }

    def _check_slots(self, slots: Sequence[int]) -> None:
        outside = [slot for slot in slots if not 0 <= slot < len(self._epochs_np)]
        if outside:
            raise ValueError(
                f"slots: expected 0 to {len(self._epochs_np) - 1}, got {list(map(int, outside))}"
            )

    def _check_rows(self, plan: StepPlan) -> None:
        """Check that each slot has one row, with tokens that are known and not computed yet."""
        if len(np.unique(plan.slots)) != len(plan.slots):
            raise ValueError(f"slots: expected one row per slot, got {plan.slots}")
        left = self.num_tokens_np[plan.slots] - self.num_computed_tokens_np[plan.slots]
        counts = plan.num_scheduled_tokens
        if ((counts < 1) | (counts > left)).any():
            raise ValueError(f"num_scheduled_tokens: expected 1 to {left}, got {counts}")

    def apply(self, staged: Mapping[str, torch.Tensor]) -> None:
        """Write what ``stage`` returned, now on the device, into the slots that were taken."""
        slots = staged["entering_slots"]
        if not slots.numel():
            return
        self.num_tokens.index_copy_(0, slots, staged["entering_num_tokens"])
        self.prompt_len.index_copy_(0, slots, staged["entering_prompt_len"])
        self.num_computed_tokens.index_fill_(0, slots, 0)
        self.token_ids.view(-1).index_copy_(
            0, staged["history_indices"], staged["history_token_ids"]
        )

    def output_positions(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the tokens each of ``slots`` (``[n]`` int64) has generated, ``[n]`` int64."""
        return (self.num_tokens[slots] - self.prompt_len[slots]).long()

    def advance(self, slots: torch.Tensor, num_scheduled_tokens: torch.Tensor) -> None:
        """Count ``[rows]`` int32 more tokens of ``slots`` (``[rows]`` int64) as computed."""
        self.num_computed_tokens.index_add_(0, slots, num_scheduled_tokens)

    def append(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Append one sampled token (``[n]`` int64) to each of ``slots`` (``[n]`` int64)."""
        lengths = self.num_tokens[slots]
        self.token_ids.index_put_((slots, lengths.long()), token_ids.int())
        self.num_tokens.index_add_(0, slots, torch.ones_like(lengths))

    def advance_on_host(self, plan: StepPlan, sampled_rows: list[int]) -> None:
        """Bring the mirrors to the end of the step."""
        self.num_computed_tokens_np[plan.slots] += plan.num_scheduled_tokens
        self.num_tokens_np[plan.slots[sampled_rows]] += 1
