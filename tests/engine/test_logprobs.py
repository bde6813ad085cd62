"""Log-probabilities from a step's arrays to the caller's output, and rows that fail."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from mrv1 import RequestError
from mrv1.config import checkpoint_dir
from mrv1.engine.outputs import Logprob
from mrv1.engine.request_group import RequestGroup
from mrv1.engine.tokenizer import Tokenizer
from mrv1.runner import StepOutput, StepPlan
from mrv1.runner.logprobs import PackedPosition, _packed_dtype
from mrv1.runner.step import RowFailure, TokenLogprobs
from tests.engine.scheduler_model import (
    BLOCK_SIZE,
    make_request,
    make_runner,
    make_scheduler,
    output_of,
    prompt_of,
)

NO_TOKENIZER = Tokenizer(None)


def logprobs_of(*positions: dict[int, tuple[float, int]]) -> TokenLogprobs:
    """Return a step's arrays for positions that are given as ``{token: (logprob, rank)}``."""

    def column(of) -> np.ndarray:
        return np.array([[of(*item) for item in position.items()] for position in positions])

    return TokenLogprobs(
        token_ids=column(lambda token, _: token),
        logprobs=column(lambda _, value: np.float32(value[0])),
        ranks=column(lambda _, value: value[1]),
    )


def prompt_logprobs(plan: StepPlan, row: int, start: int, prompt_len: int) -> TokenLogprobs:
    """Return a row's prompt logprobs as the device gives them: token ``p`` at position ``p``."""
    end = min(start + int(plan.num_scheduled_tokens[row]), prompt_len - 1)
    return logprobs_of(*({p: (-float(p), p + 1)} for p in range(start + 1, end + 1)))


def test_each_token_has_the_logprobs_that_the_device_reported():
    scheduler = make_scheduler(max_steps_in_flight=1)
    asks = make_request("a", (1, 2), max_tokens=2, logprobs=1, ignore_eos=True)
    other = make_request("b", (1, 2), max_tokens=2, ignore_eos=True)
    for request in (asks, other):
        scheduler.add(request)
    first = {5: (-2.5, 3), 9: (-0.5, 1)}
    scheduler.update(output_of(scheduler.schedule(), (5,), (6,), logprobs={0: logprobs_of(first)}))
    group = RequestGroup(asks, NO_TOKENIZER)
    told = {
        5: Logprob(logprob=-2.5, rank=3, decoded_token=None),
        9: Logprob(logprob=-0.5, rank=1, decoded_token=None),
    }
    assert group.output().outputs[0].logprobs == (told,)
    # the drawn token is also the likeliest one: it is reported once
    twice = TokenLogprobs(
        token_ids=np.array([[7, 7]]), logprobs=np.array([[-0.5, -0.5]]), ranks=np.array([[1, 1]])
    )
    scheduler.update(output_of(scheduler.schedule(), (7,), (8,), logprobs={0: twice}))
    (output,) = group.output().outputs
    assert output.logprobs == (told, {7: Logprob(logprob=-0.5, rank=1, decoded_token=None)})
    assert output.token_ids == (5, 7)
    assert RequestGroup(other, NO_TOKENIZER).output().outputs[0].logprobs is None
    assert group.output() == group.output()


def test_logprobs_have_the_text_of_each_token():
    tokenizer = Tokenizer(checkpoint_dir("tiny"))
    scheduler = make_scheduler(max_steps_in_flight=1)
    request = make_request("a", (1, 2), max_tokens=1, logprob_token_ids=[6], ignore_eos=True)
    scheduler.add(request)
    found = logprobs_of({50: (-1.0, 1), 6: (-9.0, 40)})
    scheduler.update(output_of(scheduler.schedule(), (50,), logprobs={0: found}))
    (position,) = RequestGroup(request, tokenizer).output().outputs[0].logprobs
    assert {token: told.decoded_token for token, told in position.items()} == {
        token: tokenizer._tokenizer.decode([token]) for token in (50, 6)
    }


@pytest.mark.parametrize(
    ("params", "given", "message"),
    [
        ({"logprobs": 0}, {}, "'a': logprobs: expected 1 positions of step 0, got 0"),
        ({"logprob_token_ids": [3]}, {}, "'a': logprobs: expected 1 positions of step 0, got 0"),
        (
            {"logprobs": 0},
            {"logprobs": {0: logprobs_of({5: (-1, 1)}, {5: (-1, 1)})}},
            "'a': logprobs: expected 1 positions of step 0, got 2",
        ),
        ({"prompt_logprobs": 0}, {}, "'a': prompt_logprobs: expected 1 positions of step 0, got"),
    ],
)
def test_a_row_without_its_requested_logprobs_fails_alone(params, given, message):
    scheduler = make_scheduler()
    asks = make_request("a", (1, 2), max_tokens=9, ignore_eos=True, **params)
    other = make_request("b", (1, 2), max_tokens=9, ignore_eos=True)
    for request in (asks, other):
        scheduler.add(request)
    scheduler.update(output_of(scheduler.schedule(), (5,), (6,), **given))
    assert (asks.finish_reason, other.finish_reason) == ("error", None)
    with pytest.raises(RequestError, match=message):
        raise asks.error
    assert (asks.output_token_ids, other.output_token_ids) == ([], [6])


@pytest.mark.parametrize("budget", [1, 3, 32])
@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 9])
def test_prompt_logprobs_come_in_chunks_and_skip_the_prefix_cache(num_prompt_tokens, budget):
    scheduler = make_scheduler(
        enable_prefix_caching=True, max_steps_in_flight=1, max_num_batched_tokens=budget
    )
    prompt = prompt_of(num_prompt_tokens)
    runner = make_runner(scheduler)
    for req_id in "ab":  # b could find a's prompt in the cache, but must not
        request = make_request(req_id, prompt, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
        scheduler.add(request)
        group = RequestGroup(request, NO_TOKENIZER)
        start = 0
        while scheduler.has_unfinished_requests:
            is_known = start >= num_prompt_tokens - 1
            assert (group.output().prompt_logprobs is not None) == is_known
            plan = scheduler.schedule()
            runner.execute(plan)
            output = runner.result()
            given = {0: prompt_logprobs(plan, 0, start, num_prompt_tokens)} if not is_known else {}
            start += int(plan.num_scheduled_tokens[0])
            scheduler.update(with_prompt_logprobs(output, given))
        assert request.error is None
        first, *others = group.output().prompt_logprobs
        assert first is None
        assert others == [
            {p: Logprob(logprob=-float(p), rank=p + 1, decoded_token=None)}
            for p in range(1, num_prompt_tokens)
        ]
    assert scheduler.admission.prefix_hit_tokens == 0


def with_prompt_logprobs(output: StepOutput, given: dict[int, TokenLogprobs]) -> StepOutput:
    return StepOutput(
        step_id=output.step_id,
        req_ids=output.req_ids,
        slots=output.slots,
        epochs=output.epochs,
        token_ids=output.token_ids,
        errors=output.errors,
        prompt_logprobs=given,
    )


def test_logprobs_of_a_prompt_computed_again_are_reported_once():
    """The request is preempted within its prompt, after two chunks that were reported."""
    prompt_len = 3 * BLOCK_SIZE
    scheduler = make_scheduler(
        enable_prefix_caching=True, max_steps_in_flight=1, max_num_batched_tokens=BLOCK_SIZE
    )
    request = make_request(
        "a", prompt_of(prompt_len), max_tokens=1, prompt_logprobs=0, ignore_eos=True
    )
    scheduler.add(request)
    starts = [0, BLOCK_SIZE, 0, BLOCK_SIZE, 2 * BLOCK_SIZE]
    for step, start in enumerate(starts):
        if step == 2:
            scheduler._preempt(request)
        plan = scheduler.schedule()
        given = {0: prompt_logprobs(plan, 0, start, prompt_len)}
        tokens = (5,) if step == len(starts) - 1 else ()
        scheduler.update(output_of(plan, tokens, prompt_logprobs=given))
    assert request.error is None
    told = RequestGroup(request, NO_TOKENIZER).output().prompt_logprobs
    assert [list(position) for position in told[1:]] == [[p] for p in range(1, prompt_len)]


def test_prompt_logprobs_come_with_the_first_of_several_outputs():
    scheduler = make_scheduler(max_steps_in_flight=1)
    request = make_request("a", (1, 2), max_tokens=1, n=2, prompt_logprobs=0, ignore_eos=True)
    scheduler.add(request)
    plan = scheduler.schedule()
    assert [r.sampling_params.prompt_logprobs for r in plan.new] == [0, None]
    given = {0: prompt_logprobs(plan, 0, 0, 2)}
    scheduler.update(output_of(plan, (5,), (6,), prompt_logprobs=given))
    output = RequestGroup(request, NO_TOKENIZER).output()
    assert [completion.token_ids for completion in output.outputs] == [(5,), (6,)]
    assert [list(position or ()) for position in output.prompt_logprobs] == [[], [1]]
    assert output.finished


# --- rows that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "'a': every token is masked$"),
        ({"min_tokens": 1}, "'a': every token is masked, by min_tokens$"),
        (
            {"allowed_token_ids": [3], "bad_words_token_ids": [[3]], "logit_bias": {3: -100}},
            "'a': every token is masked, by allowed_token_ids, bad_words_token_ids$",
        ),
    ],
)
def test_a_masked_row_names_the_parameters_that_mask_it(params, message):
    scheduler = make_scheduler()
    request = make_request("a", (1, 2), max_tokens=9, **params)
    scheduler.add(request)
    scheduler.update(output_of(scheduler.schedule(), (), errors={0: RowFailure.MASKED}))
    with pytest.raises(RequestError, match=message):
        raise request.error
    assert scheduler.num_nan_rows == 0


def test_nan_rows_are_counted_unless_their_request_has_ended():
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(make_request(name, (1, 2), max_tokens=9, ignore_eos=True))
    requests = list(scheduler.unfinished)
    plan = scheduler.schedule()
    scheduler.abort("b")
    errors = {0: RowFailure.NAN, 1: RowFailure.NAN}
    scheduler.update(output_of(plan, (), (), (7,), errors=errors))
    assert [r.finish_reason for r in requests] == ["error", "abort", None]
    assert str(requests[0].error) == "request 'a': its logits hold NaN or +inf"
    assert scheduler.num_nan_rows == 1


def test_a_packed_position_reads_like_arrays_and_is_pickled():
    dtype = _packed_dtype(3, np.dtype(np.float32))
    element = np.zeros(1, dtype)
    element["token_ids"], element["logprobs"], element["ranks"] = [7, 8, 9], [-1, -2, -3], 4
    packed = PackedPosition(element.tobytes(), dtype)
    for each in (packed, pickle.loads(pickle.dumps(packed)), *packed.one_by_one(1)):
        assert len(each) == 1
        assert each.token_ids.tolist() == [[7, 8, 9]]
        assert each.logprobs.tolist() == [[-1, -2, -3]]
        assert each.ranks.tolist() == [[4, 4, 4]]
    assert len(packed.after(1)) == 0
