"""The drafts of a step: whether they promise enough, and how many were accepted."""

from __future__ import annotations

from collections.abc import Sequence

from mrv1.config import SpeculativeConfig
from mrv1.engine.drafter import MIN_GAIN, Drafter
from mrv1.engine.request import Request
from mrv1.engine.running_batch import BoolArray, LaunchedStep
from mrv1.runner.step import StepOutput


class Speculation:
    """The drafts of all requests, and how many were accepted."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self.num_drafts = 0  # rows with drafts, each of one request in one step
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def propose(
        self, requests: Sequence[Request], room: Sequence[int]
    ) -> dict[int, tuple[int, ...]]:
        """Return drafts by row, up to ``room``; none if too few to be worth it would pass."""
        drafts, gain = {}, 0.0
        for row, (request, most) in enumerate(zip(requests, room, strict=True)):
            if most <= 0:
                continue
            drafter = request.drafter
            if drafter is None:
                drafter = request.drafter = Drafter(self._config, request.prompt_token_ids)
            found = drafter.propose(request.output_token_ids, min(most, self._config.num_tokens))
            if found:
                drafts[row] = found
                gain += min(drafter.gain, len(found))
        return drafts if gain >= MIN_GAIN * len(requests) else {}

    def note(self, step: LaunchedStep, output: StepOutput, succeeded: BoolArray | None) -> None:
        """Count accepted drafts of a step whose tokens are appended; as ``RunningBatch.land``."""
        if not (step.draft_token_ids or step.num_device_drafts):
            return
        for row, request in enumerate(step.rows.requests):
            num_drawn = len(output.token_ids[row])
            if not num_drawn or not (succeeded is None or succeeded[row]):
                continue
            num_drafts = step.num_drafts(row)
            if step.num_device_drafts:  # of a head: as many in each row as there was room for
                room = request.max_total_tokens - 1 - (request.num_tokens - num_drawn)
                num_drafts = min(num_drafts, room)
            if num_drafts <= 0:
                continue
            self.num_drafts += 1
            self.num_draft_tokens += num_drafts
            self.num_accepted_tokens += num_drawn - 1
            request.num_draft_tokens += num_drafts
            request.num_accepted_tokens += num_drawn - 1
            if request.drafter is not None:
                request.drafter.note(num_drawn - 1, len(request.output_token_ids))
