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
        if step.num_device_drafts:
            self._note_head(step, output, succeeded)
            return
        for row, drafts in enumerate(step.draft_token_ids):
            if not drafts or not (succeeded is None or succeeded[row]):
                continue
            request, num_accepted = step.rows.requests[row], len(output.token_ids[row]) - 1
            self.num_drafts += 1
            self.num_draft_tokens += len(drafts)
            self.num_accepted_tokens += num_accepted
            request.num_draft_tokens += len(drafts)
            request.num_accepted_tokens += num_accepted
            if request.drafter is not None:
                request.drafter.note(num_accepted, len(request.output_token_ids))

    def _note_head(
        self, step: LaunchedStep, output: StepOutput, succeeded: BoolArray | None
    ) -> None:
        """Count a head's drafts: as many in each row as there was room for."""
        for row, request in enumerate(step.rows.requests):
            drawn = len(output.token_ids[row])
            if not drawn or not (succeeded is None or succeeded[row]):
                continue
            room = request.max_total_tokens - 1 - (request.num_tokens - drawn)
            num_drafts = min(step.num_device_drafts, room)
            if num_drafts > 0:
                self.num_drafts += 1
                self.num_draft_tokens += num_drafts
                self.num_accepted_tokens += drawn - 1
                request.num_draft_tokens += num_drafts
                request.num_accepted_tokens += drawn - 1
