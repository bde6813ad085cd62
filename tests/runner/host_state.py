"""Helpers for tests of the runner's host state: an upload that is applied at once, and plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mrv1 import SamplingParams, StepPlan
from mrv1.runner import SlotRequest


class AppliedUpload:
    """Has the methods of ``StepUpload`` and changes a state's words at once, as a step would."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.words = buffer.numpy()

    def put(self, dst: int, words: Sequence[int]) -> None:
        self.words[dst : dst + len(words)] = words

    def write(self, dst: int, values: np.ndarray) -> None:
        self.put(dst, values.view(np.int32).tolist())

    def fill(self, dst: int, length: int) -> None:
        self.words[dst : dst + length] = -1


def entering(slot: int, num_tokens: int = 1, **fields: object) -> SlotRequest:
    return SlotRequest(
        **(
            {
                "req_id": f"r{slot}", "slot": slot, "epoch": 0, "seed": 0,
                "token_ids": np.arange(3, 3 + num_tokens, dtype=np.int32),
                "prompt_len": num_tokens, "sampling_params": SamplingParams(),
                "max_total_tokens": num_tokens + 1,
            }
            | fields
        )
    )  # fmt: skip


def plan_of(slots: Sequence[int] | np.ndarray, **fields: object) -> StepPlan:
    slots = slots if isinstance(slots, np.ndarray) else np.array(slots, dtype=np.int32)
    return StepPlan(
        **(
            {
                "step_id": 0,
                "req_ids": tuple(f"r{slot}" for slot in slots),
                "slots": slots,
                "epochs": np.zeros(len(slots), dtype=np.int32),
                "num_scheduled_tokens": np.ones(len(slots), dtype=np.int32),
                "new_block_ids": {},
            }
            | fields
        )
    )
