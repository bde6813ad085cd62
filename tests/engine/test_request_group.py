"""Several outputs of one request, and stop sequences, as the caller sees them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mrv1 import LLM, RequestError, SamplingParams, StepError
from mrv1.engine.request import Status
from mrv1.runner import AsyncOutput
from mrv1.runner.step import RowFailure

PROMPT = "ROMEO: What light through yonder window breaks? It is the east, and I"
SAYS = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, n=3)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", device="cpu", num_kv_blocks=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def said(llm) -> tuple:
    return llm.generate(PROMPT, SAYS)[0].outputs


def test_outputs_come_in_order_and_as_if_alone(llm, said):
    assert [output.index for output in said] == [0, 1, 2]
    assert [len(output.token_ids) for output in said] == [12] * 3
    (alone,) = llm.generate(PROMPT, replace(SAYS, n=1))[0].outputs
    assert said[0] == alone
    batch = llm.generate([PROMPT, "JULIET:"], [SAYS, GREEDY], use_tqdm=False)
    assert [len(output.outputs) for output in batch] == [3, 1]
    assert batch[0].outputs == said
    assert not llm.shared._groups


def test_a_prompt_is_prefilled_once(llm):
    before = llm.metrics()
    llm.generate(PROMPT + " say", SAYS)
    after = llm.metrics()
    assert after["num_finished_requests"] - before["num_finished_requests"] == 3
    assert after["prefix_hit_tokens"] - before["prefix_hit_tokens"] >= 2 * 16


def test_each_part_of_a_stream_has_all_outputs(llm, said):
    parts = list(llm.stream(PROMPT, SAYS))
    assert parts[-1].outputs == said
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    for part in parts:
        assert [output.index for output in part.outputs] == [0, 1, 2]
        for output, final in zip(part.outputs, said, strict=True):
            assert final.text.startswith(output.text)
            assert final.token_ids[: len(output.token_ids)] == output.token_ids


def test_outputs_may_end_at_different_times(llm, said):
    stop = said[1].token_ids[4]
    params = replace(SAYS, stop_token_ids=[stop])
    expected = [
        output.token_ids[: output.token_ids.index(stop) + 1]
        if stop in output.token_ids
        else output.token_ids
        for output in said
    ]
    parts = list(llm.stream(PROMPT, params))
    assert [output.token_ids for output in parts[-1].outputs] == expected
    assert parts[-1].outputs[1].stop_reason == stop
    ends = [next(i for i, p in enumerate(parts) if p.outputs[k].finish_reason) for k in range(3)]
    for k, end in enumerate(ends):  # an output that has ended stays as it is
        assert {part.outputs[k] for part in parts[end:]} == {parts[-1].outputs[k]}


def test_abort_ends_all_outputs_and_delivers_them_once(llm):
    request_id = llm.add_request(PROMPT, replace(SAYS, max_tokens=100), request_id="mine")
    for _ in range(4):
        (output,) = llm.step() or [None]
    assert [bool(o.token_ids) for o in output.outputs] == [True, *[False] * 2] or all(
        o.token_ids for o in output.outputs
    )
    llm.abort(request_id)
    llm.abort(request_id)
    (output,) = llm.step()
    assert [o.finish_reason for o in output.outputs] == ["abort"] * 3
    assert output.finished
    assert output.error is None
    assert not llm.has_unfinished_requests()
    pool = llm.engine.scheduler.pools[0]
    assert pool.num_free == pool.num_blocks


def test_leaving_a_stream_aborts_all_outputs(llm):
    stream = llm.stream(PROMPT, SAYS)
    next(stream)
    stream.close()
    assert not llm.has_unfinished_requests()
    assert llm.step() == []


def test_an_output_that_fails_leaves_the_other_outputs(llm, said, monkeypatch):
    collect = AsyncOutput._collect

    def failing(self):
        output = collect(self)
        row = next((r for r, i in enumerate(output.req_ids) if i[1:] == (1,)), None)
        if row is None:
            return output
        tokens = [() if r == row else t for r, t in enumerate(output.token_ids)]
        return replace(output, token_ids=tuple(tokens), errors={row: RowFailure.NAN})

    monkeypatch.setattr(AsyncOutput, "_collect", failing)
    before = llm.metrics()["num_nan_rows"]
    (output,) = llm.generate(PROMPT, SAYS)
    assert output.error is None
    assert [o.finish_reason for o in output.outputs] == ["length", "error", "length"]
    assert isinstance(output.outputs[1].error, RequestError)
    assert (output.outputs[0], output.outputs[2]) == (said[0], said[2])
    assert llm.metrics()["num_nan_rows"] == before + 1


def test_a_caller_may_use_any_request_id_together_with_several_outputs(llm, said):
    names = ["0#1", "0", "1#2", "('1', 1)"]
    for name in names:
        llm.add_request("JULIET:", GREEDY, request_id=name)
    outputs = llm.generate([PROMPT] * 2, SAYS)  # with request ids that the engine chooses
    assert [output.outputs for output in outputs] == [said] * 2
    finished = {}
    while llm.has_unfinished_requests():
        finished |= {output.request_id: output for output in llm.step() if output.finished}
    assert sorted(finished) == sorted(names)
    (alone,) = llm.generate("JULIET:", GREEDY)
    assert all(output.outputs == alone.outputs for output in finished.values())


def test_a_request_id_is_in_use_until_the_last_of_several_outputs_has_ended(llm, said):
    """The first output ends before the others, which still have this request id."""
    llm.add_request(PROMPT, SAYS, request_id="r")
    group = llm.shared._groups["r"]
    while group.requests[0].status is not Status.RUNNING:
        llm.step()
    llm.engine.abort("r")
    in_use = "request_id: expected an id that no unfinished request has, got 'r'"
    with pytest.raises(RequestError, match=in_use):
        llm.add_request(PROMPT, GREEDY, request_id="r")
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert outputs[-1].outputs[1:] == said[1:]


def test_a_request_fails_when_all_its_outputs_fail(llm, monkeypatch):
    execute = llm.engine.runner.execute

    def failing(plan):
        if len(plan.req_ids) == 3:
            raise StepError("boom", step_id=plan.step_id, req_ids=plan.req_ids)
        return execute(plan)

    monkeypatch.setattr(llm.engine.runner, "execute", failing)
    outputs = llm.generate([PROMPT], SAYS, use_tqdm=False)
    assert isinstance(outputs[0].error, StepError)
    assert [o.finish_reason for o in outputs[0].outputs] == ["error"] * 3
    with pytest.raises(StepError, match="boom"):
        llm.generate(PROMPT, SAYS)


# --- stop sequences ------------------------------------------------------------------------------


@pytest.mark.parametrize("include", [False, True])
def test_the_text_ends_before_a_stop_sequence(llm, include):
    whole = llm.generate("ROMEO:", GREEDY)[0].outputs[0]
    sequence = whole.token_ids[10:13]
    first = next(i for i in range(len(whole.token_ids)) if whole.token_ids[i : i + 3] == sequence)
    params = replace(
        GREEDY, stop_token_sequences=[[1, 2], sequence], include_stop_str_in_output=include
    )
    parts = [part.outputs[0] for part in llm.stream("ROMEO:", params)]
    assert parts[-1].token_ids == whole.token_ids[: first + 3]
    assert (parts[-1].finish_reason, parts[-1].stop_reason) == ("stop", sequence)
    decode = llm._tokenizer.decode
    assert parts[-1].text == decode(whole.token_ids[: first + (3 if include else 0)])
    assert all(parts[-1].text.startswith(part.text) for part in parts)


def test_a_stop_sequence_that_ends_with_eos_is_the_stop_reason_and_not_text(llm, monkeypatch):
    whole = llm.generate("ROMEO:", GREEDY)[0].outputs[0].token_ids
    end = next(i for i, token in enumerate(whole) if i > 4 and token not in whole[:i])
    monkeypatch.setattr(llm.engine.scheduler, "_eos_token_ids", (whole[end],))
    sequence = whole[end - 1 : end + 1]
    for params, reason, num_text in (
        (replace(GREEDY, ignore_eos=False), None, end),
        (replace(GREEDY, ignore_eos=False, stop_token_sequences=[sequence]), sequence, end - 1),
    ):
        output = llm.generate("ROMEO:", params)[0].outputs[0]
        assert (output.finish_reason, output.stop_reason) == ("stop", reason)
        assert output.token_ids == whole[: end + 1]
        assert output.text == llm._tokenizer.decode(whole[:num_text])


def test_a_stop_sequence_that_begins_in_the_prompt_or_ends_before_min_tokens_is_ignored(llm):
    whole = llm.generate("ROMEO:", GREEDY)[0]
    tokens = whole.outputs[0].token_ids
    across = [whole.prompt_token_ids[-1], tokens[0]]
    early = tokens[2:4]
    places = [i for i in range(len(tokens)) if tokens[i : i + 2] == early]
    params = replace(GREEDY, stop_token_sequences=[across, early], min_tokens=places[0] + 3)
    (output,) = llm.generate("ROMEO:", params)[0].outputs
    end = places[1] + 2 if len(places) > 1 else len(tokens)
    assert output.token_ids == tokens[:end]


def test_min_tokens_beyond_the_context_is_refused(llm):
    room = llm.engine.runner.max_model_len - 2
    params = SamplingParams(max_tokens=None, min_tokens=room + 1)
    with pytest.raises(RequestError, match=rf"min_tokens: expected at most {room} after a pro"):
        llm.generate([5, 6], params)


def test_requests_of_an_interrupted_generate_are_not_delivered(llm, said, monkeypatch):
    def interrupted(self, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AsyncOutput, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, SAYS)
    while llm.has_unfinished_requests():
        assert llm.step() == []
    assert llm.generate(PROMPT, SAYS)[0].outputs == said
