"""RequestState: its mirrors and uploads against plain counts, and the plans that it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import StepPlan
from mrv1.config import MAX_DRAFTS
from mrv1.kernels.step.contracts import MAX_DRAFT_TOKENS, MAX_SAMPLED_TOKENS, RUNNING
from mrv1.runner.request_state import RequestState
from mrv1.runner.slot_state import SlotState
from mrv1.runner.staging import StepUpload
from tests.runner.host_state import AppliedUpload, entering, plan_of

NUM_SLOTS, MAX_LEN = 5, 40


def test_the_limits_of_drafts_agree():
    assert MAX_DRAFTS == MAX_DRAFT_TOKENS == MAX_SAMPLED_TOKENS - 1


def make_state(
    max_stop_seqs_num: int = 5, stop_seqs_max_len: int = 8
) -> tuple[RequestState, AppliedUpload]:
    fields = RequestState.fields(
        MAX_LEN, max_stop_seqs_num=max_stop_seqs_num, stop_seqs_max_len=stop_seqs_max_len
    )
    slots = SlotState(NUM_SLOTS, fields, torch.device("cpu"))
    return RequestState(slots, NUM_SLOTS, MAX_LEN), AppliedUpload(slots.buffer)


stop_sequences = st.lists(
    st.lists(st.integers(0, 99), min_size=1, max_size=8).map(tuple), max_size=5
).map(tuple)


def staged_sequences(state: RequestState, slot: int) -> list[tuple[int, ...]]:
    lens = state.slots.stop_sequence_lens[slot, : state.slots.num_stop_sequences[slot]].tolist()
    return [tuple(state.slots.stop_sequences[slot, i, :n].tolist()) for i, n in enumerate(lens)]


def take(state: RequestState, upload: AppliedUpload, plan: StepPlan) -> None:
    state.leave(plan)
    state.stage(plan, upload)
    state.advance_on_host(plan)


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@given(data=st.data())
def test_mirrors_count_the_tokens_of_all_launched_steps(data):
    """Requests enter with a computed prefix, run in chunks, decode, leave and enter again."""
    state, upload = make_state()
    lengths: dict[int, list[int]] = {}  # slot -> [known and pending tokens, computed tokens]
    epochs = [-1] * NUM_SLOTS
    plan, sampled = None, False
    for step_id in range(data.draw(st.integers(1, 12))):
        may_continue = plan is not None and all(
            lengths[slot][0] - lengths[slot][1] == 1 for slot in plan.slots.tolist()
        )
        if may_continue and data.draw(st.booleans()):
            plan = plan_of(
                plan.slots.copy(),
                step_id=step_id,
                continues=data.draw(st.sampled_from([None, plan.step_id])) if sampled else None,
                epochs=plan.epochs.copy(),
            )
        else:
            gone = data.draw(st.sets(st.sampled_from(sorted(lengths)))) if lengths else set()
            for slot in gone:
                del lengths[slot]
            new = []
            for slot in data.draw(st.sets(st.integers(0, NUM_SLOTS - 1))) - lengths.keys():
                num_tokens = data.draw(st.integers(1, 20))
                num_computed = data.draw(st.integers(0, num_tokens - 1))
                epochs[slot] += 1
                lengths[slot] = [num_tokens, num_computed]
                new.append(
                    entering(
                        slot, num_tokens, epoch=epochs[slot], num_computed_tokens=num_computed,
                        stop_token_sequences=data.draw(stop_sequences),
                        min_total_tokens=data.draw(st.integers(0, 40)),
                    )
                )  # fmt: skip
            if not lengths:
                return
            rows = data.draw(st.permutations(sorted(lengths)))
            counts = [data.draw(st.integers(1, lengths[s][0] - lengths[s][1])) for s in rows]
            away = sorted(gone)
            cut = data.draw(st.integers(0, len(away)))
            plan = plan_of(
                rows,
                step_id=step_id,
                epochs=int32(*(epochs[slot] for slot in rows)),
                num_scheduled_tokens=int32(*counts),
                new=tuple(new[::2]),
                resumed=tuple(new[1::2]),
                preempted=tuple(away[:cut]),
                finished=tuple(away[cut:]),
            )
        state.leave(plan)
        state.stage(plan, upload)
        for request in plan.entering:
            slot, num_tokens = request.slot, len(request.token_ids)
            assert state.slots.token_ids[slot, :num_tokens].tolist() == request.token_ids.tolist()
            assert state.slots.num_tokens[slot] == state.num_tokens_np[slot] == num_tokens
            assert state.slots.num_computed_tokens[slot] == request.num_computed_tokens
            assert state.slots.prompt_len[slot] == num_tokens
            assert state.slots.max_total_tokens[slot] == request.max_total_tokens
            assert state.slots.stop_token_ids[slot].tolist() == [-1] * 16
            assert staged_sequences(state, slot) == list(request.stop_token_sequences)
            assert state.slots.min_total_tokens[slot] == request.min_total_tokens
            assert state.slots.stopped[slot] == RUNNING
        state.advance_on_host(plan)
        sampled = True
        for slot, count in zip(
            plan.slots.tolist(), plan.num_scheduled_tokens.tolist(), strict=True
        ):
            lengths[slot][1] += count
            samples = lengths[slot][1] == lengths[slot][0]
            lengths[slot][0] += samples
            sampled &= samples
        for slot, (num_tokens, num_computed) in lengths.items():
            mirrors = (state.num_tokens_np[slot], state.num_computed_tokens_np[slot])
            assert mirrors == (num_tokens, num_computed)


@pytest.mark.parametrize(
    ("late", "held"), [(None, [7, 8]), ((), []), ((8, 9, 2), [8, 9, 2])], ids=str
)
def test_late_token_ids_default_to_the_stop_token_ids(late, held):
    state, upload = make_state()
    request = entering(
        1, 4, epoch=0, stop_token_ids=(7, 8), min_total_tokens=9, late_token_ids=late
    )
    take(state, upload, plan_of([1], num_scheduled_tokens=int32(4), new=(request,)))
    assert state.history().late_token_ids[1].tolist() == held + [-1] * (16 - len(held))
    assert state.slots.stop_token_ids[1].tolist() == [7, 8] + [-1] * 14
    many = entering(2, 4, epoch=0, late_token_ids=tuple(range(17)))
    with pytest.raises(ValueError, match=r"late_token_ids .*: expected 0 to 16 tokens, got 17"):
        state.stage(plan_of([2], num_scheduled_tokens=int32(4), new=(many,)), upload)


def test_the_sampler_reads_the_same_slots():
    state, _ = make_state()
    history = state.history()
    for name in ("token_ids", "num_tokens", "prompt_len", "min_total_tokens"):
        assert getattr(history, name) is getattr(state.slots, name)
    assert history.late_token_ids is state._slots["late_token_ids"]


@pytest.mark.parametrize("sequences", [((1,),) * 6, ((1,) * 9,), ((),)])
def test_more_stop_sequences_than_a_slot_holds_are_refused(sequences):
    state, upload = make_state()
    plan = plan_of([0], new=(entering(0, stop_token_sequences=sequences),))
    with pytest.raises(
        ValueError, match="stop_token_sequences of 'r0': expected at most 5 of 1 to 8 tokens, got"
    ):
        take(state, upload, plan)


def test_a_slot_holds_as_many_stop_sequences_as_configured():
    state, upload = make_state(max_stop_seqs_num=2, stop_seqs_max_len=3)
    sequences = ((7, 8, 9), (5,))
    take(state, upload, plan_of([1], new=(entering(1, stop_token_sequences=sequences),)))
    assert state.slots.stop_sequences.shape == (NUM_SLOTS, 2, 3)
    assert staged_sequences(state, 1) == list(sequences)


def steady() -> tuple[RequestState, AppliedUpload, StepPlan]:
    """Return a state after steps 0 to 3, a token for two rows each, and the plan of step 3."""
    state, upload = make_state()
    take(state, upload, plan_of([0, 3], new=(entering(0), entering(3))))
    for step_id in (1, 2, 3):
        plan = plan_of([0, 3], step_id=step_id, continues=step_id - 1)
        take(state, upload, plan)
    return state, upload, plan


WRONG = [
    ({"num_scheduled_tokens": int32(1, 2)}, "num_scheduled_tokens: expected 1 to"),
    ({"num_scheduled_tokens": int32(0, 1)}, "num_scheduled_tokens: expected 1 to"),
    ({"num_scheduled_tokens": int32(1)}, r"expected one entry a row \(2\), got 1"),
    ({"preempted": (3,)}, r"expected epochs \[ 0 -1\]"),
    ({"finished": (0,)}, r"expected epochs \[-1  0\]"),
    ({"epochs": int32(0, 1)}, r"expected epochs \[0 0\]"),
    ({"slots": int32(0, 0)}, "expected one row per slot"),
    ({"new": (entering(3),)}, "expected slot 3 free for 'r3', got it in use"),
    ({"resumed": (entering(3),)}, "expected slot 3 free for 'r3', got it in use"),
    ({"new": (entering(3, epoch=1),)}, "expected slot 3 free for 'r3', got it in use"),
    ({"resumed": (entering(3, epoch=7),)}, "expected slot 3 free for 'r3', got it in use"),
    ({"draft_token_ids": ((5,), ())}, "draft_token_ids of 'r0': .* after all known"),
    ({"req_ids": ("r3", "r0")}, r"expected .*\('r0', 'r3'\).*, got \('r3', 'r0'\)"),
    ({"req_ids": ("r0", ("r3", 1))}, r"expected .*\('r0', 'r3'\).*, got \('r0', \('r3', 1\)\)"),
]
MALFORMED = [
    ({"req_ids": ()}, "plan: expected a row for at least one request, .* got 0 req_ids and 2 slo"),
    ({"req_ids": ("r0",)}, "plan: expected .* got 1 req_ids and 2 slots"),
    (
        {"req_ids": (), "slots": int32(), "epochs": int32(), "num_scheduled_tokens": int32()},
        "plan: expected a row for at least one request, .* got 0 req_ids and 0 slots",
    ),
    ({"slots": [0, 3]}, "num_scheduled_tokens: expected arrays, got list, ndarray, ndarray"),
    ({"epochs": (0, 0)}, "num_scheduled_tokens: expected arrays, got ndarray, tuple, ndarray"),
    ({"num_scheduled_tokens": [1, 1]}, "expected arrays, got ndarray, ndarray, list"),
]


@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize(("wrong", "message"), MALFORMED)
def test_a_plan_without_rows_or_arrays_is_refused(wrong, message, claims):
    state, upload, plan = steady()
    plan = replace(plan, step_id=4, continues=3 if claims else None)
    with pytest.raises(ValueError, match=message):
        take(state, upload, replace(plan, **wrong))
    take(state, upload, plan)


def test_a_slot_that_a_refused_plan_gives_up_is_free():
    """The next plan does not name it again, whatever was wrong."""
    state, upload, plan = steady()
    wrong = replace(plan, step_id=4, continues=None, finished=(3,))
    with pytest.raises(ValueError, match=r"expected epochs \[ 0 -1\]"):
        take(state, upload, wrong)
    take(
        state, upload, plan_of([0, 3], step_id=5, epochs=int32(0, 1), new=(entering(3, epoch=1),))
    )


@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_plan_that_contradicts_the_slots_is_refused_with_or_without_continues(
    wrong, message, claims
):
    state, upload, plan = steady()
    plan = replace(plan, step_id=4, continues=3 if claims else None, **wrong)
    with pytest.raises(ValueError, match="continues: expected" if claims else message):
        take(state, upload, plan)


@pytest.mark.parametrize("continues", [2, 4, 5])
def test_continues_must_name_the_step_launched_last(continues):
    state, upload, plan = steady()
    plan = replace(plan, step_id=4, continues=continues)
    with pytest.raises(ValueError, match=rf"expected None or the last step, 3, got {continues}"):
        take(state, upload, plan)
    take(state, upload, replace(plan, continues=3))


def test_only_a_step_whose_rows_all_sample_can_be_continued():
    state, upload = make_state()
    for plan in (
        plan_of([1], continues=0),
        plan_of([1], num_scheduled_tokens=int32(3), new=(entering(1, 5),)),
        plan_of([1], step_id=1, continues=0),
        plan_of([1], step_id=1),
        plan_of([1], step_id=2, num_scheduled_tokens=int32(3), draft_token_ids=((7, 8),)),
        plan_of([1], step_id=3, continues=2),
    ):
        if plan.continues is None:
            take(state, upload, plan)
            continue
        with pytest.raises(ValueError, match="expected None, as there is no last step whose rows"):
            take(state, upload, plan)


def test_a_refused_plan_cannot_be_continued():
    state, upload, plan = steady()
    wrong = replace(plan, step_id=4, continues=None, num_scheduled_tokens=int32(1, 2))
    with pytest.raises(ValueError, match="num_scheduled_tokens: expected 1 to"):
        take(state, upload, wrong)
    with pytest.raises(ValueError, match="expected None, as there is no last step"):
        take(state, upload, replace(plan, step_id=5, continues=4))
    take(state, upload, replace(plan, step_id=5, continues=None))
    take(state, upload, replace(plan, step_id=6, continues=5))


def test_a_step_that_continues_another_uploads_nothing():
    state, _, plan = steady()
    upload = StepUpload()
    take(state, upload, replace(plan, step_id=4, continues=3, slots=np.copy(plan.slots)))
    assert upload.num_words == 0
