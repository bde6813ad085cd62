"""A plan becomes the rows of a step and its upload, on the host; nothing is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mrv1.runner.device_step import NEXT_UPLOAD, DeviceStep
from mrv1.runner.logprobs import LogprobRequests
from mrv1.runner.rows import DeviceRows, StepShape
from mrv1.runner.staging import Sent, StepUpload
from mrv1.runner.step import SlotRequest, StepOutput, StepPlan
from mrv1.runner.visible_ranges import VisibleRanges


class StepPreparation:
    """Checks plans, mirrors the slots and chooses graphs, on the thread of the runner."""

    def __init__(self, step: DeviceStep) -> None:
        self._step = step
        vocab_size = step.model.config.vocab_size
        self.logprobs = LogprobRequests(step.config.max_num_seqs, vocab_size)
        self.ranges = VisibleRanges(step.device)
        self._next_upload_word = step.slots.first_word(NEXT_UPLOAD, 0)
        self._steady_rows: DeviceRows | None = None
        """Rows of the last step, if it was a captured decode: a steady step reuses them."""
        self._sent: list[DeviceRows | None] = [None] * step.outputs.num_slots
        """By ring slot: the rows of its upload, if the upload has no requests or blocks to add."""

    def forget_rows(self) -> None:
        """Let the next step choose its rows anew: graphs are captured again."""
        self._steady_rows = None

    def prepare(self, plan: StepPlan, *, samples: bool) -> tuple[DeviceRows, Sent | None]:
        """Check the plan and write the step's upload; ValueError: it contradicts the slots.

        ``samples``: sampling may follow at once. Returns rows and upload; None = a graph runs and
        knows its place.
        """
        state = self._step.state
        state.leave(plan)
        upload = StepUpload()
        try:
            self._stage(plan, upload)
        except BaseException:
            state.refuse(plan)
            raise
        try:
            state.advance_on_host(plan)
            return self._send(plan, upload, samples)
        except BaseException:
            state.drop(plan)
            raise

    def on_output(self, plan: StepPlan, rows: DeviceRows) -> Callable[[StepOutput], None] | None:
        """Return what to call with the result of a step that was prepared last; None = nothing."""
        state = self._step.state
        if self._step.drafts is not None:
            return state.expect_drafts(plan)
        return state.take_drafts if rows.shape.has_drafts else None

    def _stage(self, plan: StepPlan, upload: StepUpload) -> None:
        """Check the plan; add its changes of the slots to the upload."""
        step = self._step
        self._check_drafts(plan)
        if plan.staged_features:
            step.features.stage(plan)
        step.state.stage(plan, upload)
        if plan.continues is None:
            step.features.enter(plan)
            self.ranges.enter(plan)
        for request in plan.entering:
            self._enter(request, upload)
        # Last, as only a plan that nothing refuses may have its blocks counted.
        step.block_tables.stage(
            plan, step.state.num_computed_tokens_np, step.kv_cache.num_blocks, upload
        )

    def _check_drafts(self, plan: StepPlan) -> None:
        """Check that drafts are where the step finds them: the host's, or a draft head's."""
        drafts = self._step.drafts
        if drafts is not None and plan.draft_token_ids:
            raise ValueError("draft_token_ids: expected none with a draft head, got some")
        allowed = (0,) if drafts is None else (0, drafts.num_drafts)
        if plan.num_device_drafts not in allowed:
            raise ValueError(
                f"num_device_drafts: expected {' or '.join(map(str, allowed))}, got "
                f"{plan.num_device_drafts}"
            )

    def _enter(self, request: SlotRequest, upload: StepUpload) -> None:
        """Check a request's tokens; add what its sampling needs to the upload."""
        step, params = self._step, request.sampling_params
        token_ids, vocab_size = np.asarray(request.token_ids), step.model.config.vocab_size
        if not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
            raise ValueError(
                f"token_ids of {request.req_id!r}: expected ids in [0, {vocab_size}), got "
                f"{token_ids.min()} to {token_ids.max()}"
            )
        self.logprobs.enter(request)
        step.processors.add_request(request.slot, params, request.token_ids)
        fields = step.sampler.enter(
            params,
            request.seed,
            child=request.child,
            banned_token_sequences=request.banned_token_sequences,
        )
        for name, values in fields.items():
            first = step.slots.first_word(name, request.slot, values.nbytes // 4)
            upload.write(first, values)

    def _send(
        self, plan: StepPlan, upload: StepUpload, samples: bool
    ) -> tuple[DeviceRows, Sent | None]:
        """Send the upload of a step; arguments and result as in ``prepare``."""
        step, staging = self._step, self._step.staging
        slot, continues = step.outputs.acquire(), plan.continues is not None
        rows = self._steady_rows if samples and continues else None
        if rows is not None and self._sent[slot] is rows and not plan.new_block_ids:
            return rows, None  # the ring slot has the same upload already, word for word
        upload.put(self._next_upload_word, ((slot + 1) % step.outputs.num_slots,))
        if rows is None or not staging.fits(upload):
            rows = self._rows(plan, upload, samples)
            is_steady = samples and rows.is_captured and rows.shape.query_len == 1
            self._steady_rows = rows if is_steady else None
        num_sources = 0
        if step.features.has_items:
            num_before = step.state.num_before(plan)
            num_sources = step.features.put_sources(plan, num_before, rows, upload)
        sent = staging.send(
            slot,
            upload,
            rows.idx_mapping,
            rows.query_lens,
            drafts=rows.draft_token_ids,
            is_captured=rows.is_captured,
            num_sources=num_sources,
        )
        self._sent[slot] = rows if continues and not plan.new_block_ids else None
        return rows, None if rows.is_captured else sent

    def _rows(self, plan: StepPlan, upload: StepUpload, samples: bool) -> DeviceRows:
        """Return the step's rows, padded to the shape of a graph if one has room for them."""
        step, num_before = self._step, self._step.state.num_before(plan)
        masked = None
        if self.ranges.has_requests:
            masked = self.ranges.masked_rows(plan, num_before)
        visual = step.state.visual_rows(plan, num_before)  # a step of decodes has no experts of it
        prefilled = masked if visual is None else visual if masked is None else masked | visual
        shape = StepShape.of(
            plan.num_scheduled_tokens,
            prefilled=prefilled,
            has_drafts=any(plan.draft_token_ids) or plan.num_device_drafts > 0,
            samples=samples
            and not step.processors
            and not self.logprobs.any(plan.slots, num_before),
        )
        uses_adapters = step.state.use_adapters(plan)
        most = step.config.max_draft_tokens
        if shape.has_drafts and most:  # no other length, which would be compiled first
            if plan.num_device_drafts or self._may_pad_drafts(plan, masked, 1 + most):
                shape = StepShape.decode(shape.num_rows, most, samples=shape.samples)
            else:
                shape = replace(shape, query_len=None)
        if uses_adapters:
            shape = replace(shape, has_adapters=True)
        captured = None  # a graph has no ranges of keys
        if masked is None and step.staging.fits(upload):
            captured = step.graphs.fit(shape)
        slots = step.processors.without_refused(plan.slots)
        return DeviceRows.of(plan, slots, shape, captured, prefilled, is_masked=masked is not None)

    def _may_pad_drafts(
        self, plan: StepPlan, masked: npt.NDArray[np.bool_] | None, query_len: int
    ) -> bool:
        """Whether each row's query may begin earlier, so that all have ``query_len`` tokens.

        Not if a streaming head may have lost the added tokens' keys, nor with features.
        """
        step, query_lens = self._step, plan.num_scheduled_tokens
        return (
            masked is None
            and not step.features.has_items
            and step.config.attention_backend == "triton"
            and step.state.all_rows_end
            and int(query_lens.max()) <= query_len
            and (
                int(query_lens.min()) == query_len
                or all(group.keeps.is_full for group in step.head_groups.groups)
            )
        )
