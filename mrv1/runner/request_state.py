"""The request in each slot: its progress as the host knows it, and its state on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrv1.config import MAX_DRAFTS
from mrv1.kernels.step.contracts import MROPE_SPAN_WORDS, RUNNING, RequestSlots
from mrv1.models.vision import VisionConfig
from mrv1.multimodal.mrope import mrope_positions
from mrv1.runner.slot_state import Field, SlotState
from mrv1.runner.staging import StepUpload
from mrv1.runner.step import Int32Array, RequestId, SlotRequest, StepOutput, StepPlan
from mrv1.sampler import History

FREE = -1
"""Epoch of a slot without a request."""

MAX_STOP_TOKENS = 16
"""Most stop tokens of a request that the device looks for, the model's own included."""


@dataclass(slots=True)
class _SampledStep:
    """The step launched last, if every row of it samples: a plan may continue it."""

    step_id: int
    index: npt.NDArray[np.intp]
    """[rows] slots, of the dtype that numpy indexes by fastest."""
    req_ids: tuple[RequestId, ...]
    rows: tuple[bytes, bytes, bytes]
    """Slots, epochs and token counts of a plan that continues it; bytes compare fastest."""


class RequestState:
    """Token history, lengths and stop conditions of every slot, and the host's mirror of lengths.

    The numpy mirrors (``_np``) count all tokens of launched steps, as if no request stopped, and
    as if all drafts were accepted that are on the device alone: until a result tells how many.
    """

    @staticmethod
    def fields(
        max_model_len: int,
        *,
        max_stop_seqs_num: int,
        stop_seqs_max_len: int,
        max_mrope_spans: int = 0,
        has_adapters: bool = False,
    ) -> Mapping[str, Field]:
        """Return the fields that a slot has on the device."""
        mrope = {
            "mrope_spans": Field(width=max_mrope_spans * MROPE_SPAN_WORDS),
            "num_mrope_spans": Field(),
        }
        return {
            "token_ids": Field(width=max_model_len),  # prompt, then output
            "num_tokens": Field(),  # prompt and output so far
            "num_computed_tokens": Field(),  # tokens whose K and V are in the cache
            "prompt_len": Field(),
            "max_total_tokens": Field(),  # length at which the request stops
            "stop_token_ids": Field(width=MAX_STOP_TOKENS),  # -1 = none
            "late_token_ids": Field(width=MAX_STOP_TOKENS),  # not drawn before min_total_tokens
            "stop_sequences": Field(width=max_stop_seqs_num * stop_seqs_max_len),
            "stop_sequence_lens": Field(width=max_stop_seqs_num),
            "num_stop_sequences": Field(),  # stop sequences of the request: the first rows
            "min_total_tokens": Field(),  # length before which no stop sequence ends the request
            "stopped": Field(),  # a stop code of mrv1.kernels.post_update
            **(mrope if max_mrope_spans else {}),
            **({"adapter_slot": Field()} if has_adapters else {}),  # -1 = none
        }

    def __init__(
        self,
        slots: SlotState,
        max_num_reqs: int,
        max_model_len: int,
        vision: VisionConfig | None = None,
    ) -> None:
        self._slots = slots
        self._vision = vision
        """Settings of a model with M-RoPE; None = a token has one position."""
        self.max_model_len = max_model_len
        lens = slots["stop_sequence_lens"]
        stop_sequences = slots["stop_sequences"].unflatten(1, (lens.shape[1], -1))
        self._stop_sequences_shape = stop_sequences.shape[1:]
        shaped = {"stop_sequences": stop_sequences}
        if vision is not None:
            spans = slots["mrope_spans"]
            shaped["mrope_spans"] = spans.unflatten(1, (-1, MROPE_SPAN_WORDS))
        names = {each.name for each in dataclasses.fields(RequestSlots)} & slots.names
        self.slots = RequestSlots(**{name: slots[name] for name in names} | shaped)
        self.num_tokens_np = np.zeros(max_num_reqs, dtype=np.int32)
        self.num_computed_tokens_np = np.zeros(max_num_reqs, dtype=np.int32)
        self._uses_adapter_np = np.zeros(max_num_reqs, dtype=np.bool_)
        self._visual_ids = () if vision is None else vision.expert_token_ids
        self._visual_end_np = np.zeros(max_num_reqs, dtype=np.int32)
        """The end of each request's prompt tokens with experts for images; 0 = it has none."""
        self._epochs_np = np.full(max_num_reqs, FREE, dtype=np.int32)
        self._held_np = self._epochs_np
        """The epochs before the requests of the last plan entered."""
        self._req_ids: list[RequestId | None] = [None] * max_num_reqs
        """The request that each slot has, or had last."""
        self._is_drafting_np = np.zeros(max_num_reqs, dtype=np.bool_)
        self._known_np = np.zeros(max_num_reqs, dtype=np.int32)
        """Tokens of which the host has a result, or that it has sent."""
        self._pending_np = np.zeros(max_num_reqs, dtype=np.int32)
        """With a draft head: most tokens that the steps in flight append."""
        self._most_np = np.zeros(max_num_reqs, dtype=np.int32)
        """Most tokens of each request."""
        self.all_rows_end = False
        """Whether each row of the step launched last ends with its last known token or draft."""
        self._samples = np.zeros(0, dtype=np.bool_)
        """[rows] whether the last plan's row reaches its newest token."""
        self._sampled: _SampledStep | None = None
        """None = some row of the step launched last does not sample."""

    def history(self) -> History:
        """Return the fields of the slots that the sampler reads."""
        return History(
            token_ids=self.slots.token_ids,
            num_tokens=self.slots.num_tokens,
            prompt_len=self.slots.prompt_len,
            min_total_tokens=self.slots.min_total_tokens,
            late_token_ids=self._slots["late_token_ids"],
        )

    def leave(self, plan: StepPlan) -> None:
        """Free the slots that the plan gives up, even if it is refused later.

        ValueError: the plan has no row, its arrays are no arrays, or there is no such slot.
        """
        self._check_form(plan)
        if plan.continues is not None:
            return
        leaving = (*plan.preempted, *plan.finished)
        self._check_slots(leaving)
        for slot in leaving:
            self._epochs_np[slot] = FREE
        self._held_np = self._epochs_np.copy()

    def refuse(self, plan: StepPlan) -> None:
        """Free the slots again that requests took in ``stage``: no device knows of them."""
        if plan.continues is None:
            self._epochs_np = self._held_np

    def drop(self, plan: StepPlan) -> None:
        """Free a failed step's slots, whose mirrors may be wrong: requests have to enter again."""
        self._epochs_np[plan.slots] = FREE
        self._sampled = None

    def free_all(self) -> None:
        """Free every slot, whatever its request."""
        self._epochs_np.fill(FREE)
        self._sampled = None

    def stage(self, plan: StepPlan, upload: StepUpload) -> None:
        """Bring the mirrors to the start of the step, after ``leave``; upload its new requests.

        ValueError: the plan contradicts the slots or does not continue the step that it claims.
        """
        if plan.continues is not None:
            self._check_continues(plan)
            return
        self._sampled = None
        if plan.slots.min() < 0 or plan.slots.max() >= len(self._epochs_np):
            self._check_slots(plan.slots.tolist())
        for request in plan.entering:
            self._check_entering(request)
            self._epochs_np[request.slot] = request.epoch
            self._req_ids[request.slot] = request.req_id
            self._is_drafting_np[request.slot] = False
            self._uses_adapter_np[request.slot] = request.adapter_slot >= 0
            if self._visual_ids:
                self._visual_end_np[request.slot] = self._visual_end(request)
            self._known_np[request.slot] = len(request.token_ids)
            self._pending_np[request.slot] = 0
            self._most_np[request.slot] = request.max_total_tokens
            self.num_tokens_np[request.slot] = len(request.token_ids)
            self.num_computed_tokens_np[request.slot] = request.num_computed_tokens
            self._stage_entering(request, upload)
        for slot, adapter_slot in plan.adapter_slots.items():
            upload.put(self._slots.first_word("adapter_slot", slot), [adapter_slot])
        held = self._epochs_np[plan.slots]
        if not np.array_equal(held, plan.epochs) or (held == FREE).any():
            raise ValueError(
                f"plan: expected epochs {held} of slots {plan.slots} ({FREE} = free), "
                f"got {plan.epochs}"
            )
        self._check_rows(plan)
        own = tuple(map(self._req_ids.__getitem__, plan.slots.tolist()))
        if plan.req_ids != own:
            raise ValueError(
                f"req_ids: expected {own}, which have the slots {plan.slots}, got {plan.req_ids}"
            )

    def _check_form(self, plan: StepPlan) -> None:
        """Check that the rows of a plan are arrays, and that there is a row."""
        slots, epochs, counts = plan.slots, plan.epochs, plan.num_scheduled_tokens
        if not type(slots) is type(epochs) is type(counts) is np.ndarray:
            names = [type(each).__name__ for each in (slots, epochs, counts)]
            raise ValueError(
                f"slots, epochs, num_scheduled_tokens: expected arrays, got {', '.join(names)}"
            )
        if not plan.req_ids or len(plan.req_ids) != len(slots):
            raise ValueError(
                "plan: expected a row for at least one request, and one slot a row, got "
                f"{len(plan.req_ids)} req_ids and {len(slots)} slots"
            )

    def _check_continues(self, plan: StepPlan) -> None:
        """Check that the plan computes the tokens that the step before samples, and no more."""
        last = self._sampled
        if last is None or plan.continues != last.step_id:
            expected = "None, as there is no last step whose rows all sample"
            if last is not None:
                expected = f"None or the last step, {last.step_id}"
            raise ValueError(f"continues: expected {expected}, got {plan.continues}")
        changes = (plan.new, plan.resumed, plan.preempted, plan.finished, plan.adapter_slots)
        if any(changes) or plan.draft_token_ids:
            raise ValueError(
                f"continues: expected None in a plan where a request enters, leaves, drafts or "
                f"gets another adapter slot, got {plan.continues}"
            )
        slots, epochs, counts = plan.slots, plan.epochs, plan.num_scheduled_tokens
        if plan.req_ids != last.req_ids:
            raise ValueError(
                f"continues: expected the requests of step {last.step_id}, {last.req_ids}, got "
                f"{plan.req_ids}"
            )
        if (slots.tobytes(), epochs.tobytes(), counts.tobytes()) != last.rows:
            raise ValueError(
                f"continues: expected the rows of step {last.step_id}, a token each, got slots "
                f"{slots}, epochs {epochs}, num_scheduled_tokens {counts}"
            )

    def _stage_entering(self, request: SlotRequest, upload: StepUpload) -> None:
        first_word = self._slots.first_word
        upload.write(
            first_word("token_ids", request.slot), np.asarray(request.token_ids, dtype=np.int32)
        )
        for name, words in (
            ("num_tokens", [len(request.token_ids)]),
            ("num_computed_tokens", [request.num_computed_tokens]),
            ("prompt_len", [request.prompt_len]),
            ("max_total_tokens", [request.max_total_tokens]),
            ("stop_token_ids", _padded(request.stop_token_ids)),
            ("num_stop_sequences", [len(request.stop_token_sequences)]),
            ("min_total_tokens", [request.min_total_tokens]),
            ("stopped", [RUNNING]),
        ):
            upload.put(first_word(name, request.slot), words)
        if self.slots.adapter_slot is not None:
            upload.put(first_word("adapter_slot", request.slot), [request.adapter_slot])
        if self._vision is not None:
            spans = mrope_positions(request.multimodal, request.prompt_len, self._vision).spans
            upload.put(first_word("num_mrope_spans", request.slot), [len(spans)])
            if len(spans):
                upload.write(first_word("mrope_spans", request.slot), spans.reshape(-1))
        if request.min_total_tokens > request.prompt_len:
            upload.put(first_word("late_token_ids", request.slot), _padded(_late_tokens(request)))
        if request.stop_token_sequences:
            width = self._stop_sequences_shape[1]
            lens = [len(sequence) for sequence in request.stop_token_sequences]
            sequences = np.zeros((len(lens), width), dtype=np.int32)
            for row, sequence in zip(sequences, request.stop_token_sequences, strict=True):
                row[: len(sequence)] = sequence
            upload.write(first_word("stop_sequences", request.slot), sequences.reshape(-1))
            upload.put(first_word("stop_sequence_lens", request.slot), lens)

    def _check_slots(self, slots: Sequence[int]) -> None:
        outside = [slot for slot in slots if not 0 <= slot < len(self._epochs_np)]
        if outside:
            raise ValueError(
                f"slots: expected 0 to {len(self._epochs_np) - 1}, got {list(map(int, outside))}"
            )

    def _check_entering(self, request: SlotRequest) -> None:
        self._check_slots((request.slot,))
        name, num_tokens = f"of {request.req_id!r}", len(request.token_ids)
        for field, least, count, most in (
            ("token_ids", 1, num_tokens, self.max_model_len),
            ("prompt_len", 1, request.prompt_len, num_tokens),
            ("max_total_tokens", num_tokens + 1, request.max_total_tokens, self.max_model_len),
            ("num_computed_tokens", 0, request.num_computed_tokens, num_tokens - 1),
            ("stop_token_ids", 0, len(request.stop_token_ids), MAX_STOP_TOKENS),
            ("late_token_ids", 0, len(_late_tokens(request)), MAX_STOP_TOKENS),
        ):
            if not least <= count <= most:
                raise ValueError(f"{field} {name}: expected {least} to {most} tokens, got {count}")
        max_num, max_len = self._stop_sequences_shape
        lens = [len(sequence) for sequence in request.stop_token_sequences]
        if len(lens) > max_num or any(not 1 <= length <= max_len for length in lens):
            raise ValueError(
                f"stop_token_sequences {name}: expected at most {max_num} of 1 to {max_len} "
                f"tokens, got {len(lens)} of {lens}"
            )
        if request.adapter_slot >= 0 and self.slots.adapter_slot is None:
            raise ValueError(
                f"adapter_slot {name}: expected -1 without enable_lora, got {request.adapter_slot}"
            )
        spans = self.slots.mrope_spans
        if spans is not None and len(request.multimodal) >= spans.shape[1]:  # one for the output
            raise ValueError(
                f"multimodal {name}: expected at most {spans.shape[1] - 1} items (max_mm_items), "
                f"got {len(request.multimodal)}"
            )
        if self._epochs_np[request.slot] != FREE:
            raise ValueError(
                f"plan: expected slot {request.slot} free for {request.req_id!r}, got it in use"
            )

    def _check_rows(self, plan: StepPlan) -> None:
        """Check that each slot has one row, with tokens that are known and not computed yet."""
        slots, counts = plan.slots, plan.num_scheduled_tokens
        if len(counts) != len(slots):
            raise ValueError(
                f"num_scheduled_tokens: expected one entry a row ({len(slots)}), got {len(counts)}"
            )
        if len(set(slots.tolist())) != len(slots):
            raise ValueError(f"slots: expected one row per slot, got {slots}")
        left = self.num_tokens_np[slots] - self.num_computed_tokens_np[slots]
        if plan.draft_token_ids:
            self._check_drafts(plan, left)
            left = left + np.array([len(drafts) for drafts in plan.draft_token_ids])
        if plan.num_device_drafts and (left != 1).any():
            raise ValueError(
                "num_device_drafts: expected rows with one known token to compute, got "
                f"{left} in slots {slots}"
            )
        left = left + plan.num_device_drafts
        if self._is_drafting_np[slots].any():
            raise ValueError(
                "slots: expected none whose drafts are being verified, got "
                f"{slots[self._is_drafting_np[slots]]}: take that step's result first"
            )
        if ((counts < 1) | (counts > left)).any():
            raise ValueError(f"num_scheduled_tokens: expected 1 to {left}, got {counts}")

    def _check_drafts(self, plan: StepPlan, left: Int32Array) -> None:
        """Check that drafts follow known tokens that are all computed in the step."""
        if len(plan.draft_token_ids) != len(plan.slots):
            raise ValueError(
                f"draft_token_ids: expected one entry a row ({len(plan.slots)}), "
                f"got {len(plan.draft_token_ids)}"
            )
        for row, drafts in enumerate(plan.draft_token_ids):
            expected = int(left[row]) + len(drafts)
            slot = plan.slots[row]
            if len(drafts) > MAX_DRAFTS or (drafts and plan.num_scheduled_tokens[row] != expected):
                raise ValueError(
                    f"draft_token_ids of {plan.req_ids[row]!r}: expected at most {MAX_DRAFTS} "
                    f"after all known tokens ({expected} tokens scheduled), got {len(drafts)} "
                    f"({plan.num_scheduled_tokens[row]} tokens scheduled)"
                )
            if drafts and self.num_tokens_np[slot] + len(drafts) > self.max_model_len:
                raise ValueError(
                    f"draft_token_ids of {plan.req_ids[row]!r}: expected to end within "
                    f"{self.max_model_len} tokens, got {len(drafts)} drafts after "
                    f"{self.num_tokens_np[slot]} tokens"
                )

    def take_drafts(self, output: StepOutput) -> None:
        """Advance the mirrors of rows with drafts by the tokens that were accepted."""
        for slot, epoch, tokens in zip(
            output.slots.tolist(), output.epochs.tolist(), output.token_ids, strict=True
        ):
            if self._epochs_np[slot] == epoch and self._is_drafting_np[slot]:
                self.num_tokens_np[slot] += len(tokens)
                self.num_computed_tokens_np[slot] = self.num_tokens_np[slot] - 1
                self._is_drafting_np[slot] = False

    def _visual_end(self, request: SlotRequest) -> int:
        prompt = np.asarray(request.token_ids[: request.prompt_len])
        (places,) = np.isin(prompt, self._visual_ids).nonzero()
        return int(places[-1]) + 1 if len(places) else 0

    def visual_rows(self, plan: StepPlan, num_before: Int32Array) -> npt.NDArray[np.bool_] | None:
        """Return which rows may have tokens with experts for images; None = no row has any."""
        if not self._visual_ids:
            return None
        rows: npt.NDArray[np.bool_] = num_before < self._visual_end_np[plan.slots]
        return rows if rows.any() else None

    def use_adapters(self, plan: StepPlan) -> bool:
        """Return whether some request of the plan has an adapter."""
        return bool(self._uses_adapter_np[plan.slots].any())

    def expect_drafts(self, plan: StepPlan) -> Callable[[StepOutput], None]:
        """Count what a step may append at most; return what to call with its result.

        Called after ``advance_on_host`` for each step where a draft head makes drafts.
        """
        samples, self._sampled = self._samples, None  # no plan continues such a step
        most = samples * np.int32(1 + plan.num_device_drafts)
        self._pending_np[plan.slots] += most

        def land(output: StepOutput) -> None:
            lives = samples & (self._epochs_np[output.slots] == output.epochs)
            slots = output.slots[lives]
            counts = np.array([*map(len, output.token_ids)], dtype=np.int32)
            self._known_np[slots] += counts[lives]
            self._pending_np[slots] -= most[lives]
            bound = self._known_np[slots] + self._pending_np[slots]
            self.num_tokens_np[slots] = np.minimum(bound, self._most_np[slots])
            self.num_computed_tokens_np[slots] = self.num_tokens_np[slots] - 1

        return land

    def num_before(self, plan: StepPlan) -> Int32Array:
        """Return the tokens of each row computed before the step, which the mirrors count."""
        return self.num_computed_tokens_np[plan.slots] - plan.num_scheduled_tokens

    def advance_on_host(self, plan: StepPlan) -> None:
        """Bring the mirrors to the end of the step: rows that reach their newest token sample."""
        last = self._sampled
        if last is not None:  # the plan continues the last step
            computed = self.num_tokens_np[last.index]  # every token counted so far
            self.num_computed_tokens_np[last.index] = computed
            self.num_tokens_np[last.index] = computed + 1
            last.step_id = plan.step_id
            return
        index = plan.slots.astype(np.intp)
        computed = self.num_computed_tokens_np[index] + plan.num_scheduled_tokens
        self.num_computed_tokens_np[index] = computed
        samples = computed >= self.num_tokens_np[index]
        self._samples = samples
        self.all_rows_end = bool(samples.all())
        if plan.draft_token_ids:  # the result tells how many are accepted
            drafts = np.array([len(drafts) > 0 for drafts in plan.draft_token_ids])
            self._is_drafting_np[index] = drafts
            samples &= ~drafts
        self.num_tokens_np[index] = np.where(samples, computed + 1, self.num_tokens_np[index])
        if samples.all() and not plan.num_device_drafts:
            ones = np.ones(len(index), dtype=np.int32)
            rows = (plan.slots.tobytes(), plan.epochs.tobytes(), ones.tobytes())
            self._sampled = _SampledStep(plan.step_id, index, plan.req_ids, rows)


def _late_tokens(request: SlotRequest) -> tuple[int, ...]:
    late = request.late_token_ids
    return request.stop_token_ids if late is None else late


def _padded(token_ids: Sequence[int]) -> list[int]:
    return [*token_ids, *[-1] * (MAX_STOP_TOKENS - len(token_ids))]
