"""Drafts change how many steps an output takes, and nothing in it."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import LLM, AsyncLLM, ConfigError, EngineConfig, SamplingParams
from mrv1.config import MAX_DRAFTS, SpeculativeConfig
from mrv1.engine import drafter, speculation
from mrv1.engine.core import EngineCore
from mrv1.engine.drafter import FIRST_REST, Drafter, NgramIndex
from mrv1.engine.request import Request
from mrv1.engine.speculation import Speculation
from mrv1.kernels.registry import select_ops
from mrv1.kernels.step.contracts import MAX_SAMPLED_TOKENS
from mrv1.models import load_model
from mrv1.runner.step import StepOutput, TokenLogprobs
from tests.engine.scheduler_model import (
    KnownSpeculation,
    make_request,
    make_runner,
    make_scheduler,
)
from tests.engine.test_overlap import VOCAB, drained, make_core, run
from tests.models.families import tiny_checkpoint

NGRAM = {"method": "ngram", "num_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
NUM_SAMPLES = 300
TOKENS = st.integers(3, VOCAB - 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model in float64, where no near tie can flip with the length of a query."""
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3")
    ops = select_ops("reference")
    return path, load_model(path, device="cpu", dtype=torch.float64, ops=ops, progress=False)


def finish(core: EngineCore) -> int:
    """Step until all requests have ended; return the number of steps."""
    steps = 0
    while core.has_unfinished_requests:
        core.step()
        steps += 1
    return steps


# --- the index -----------------------------------------------------------------------------------


def continuation_of(tokens: list[int], least: int, most: int, count: int) -> tuple[int, ...]:
    """Look for the last tokens from the end on; repeat the tokens after the place found."""
    for length in range(most, least - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if length <= len(tokens) and tokens[end - length : end] == tokens[-length:]:
                return tuple(itertools.islice(itertools.cycle(tokens[end:]), count))
    return ()


@given(
    parts=st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=12),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    count=st.integers(1, MAX_DRAFTS),
)
def test_the_index_finds_the_last_occurrence_of_the_longest_sequence(parts, lengths, count):
    index, tokens = NgramIndex(*lengths), []
    for part in parts:
        index.extend(part)
        tokens += part
        assert index.token_ids == tokens
        assert index.continuation(count) == continuation_of(tokens, *lengths, count)


def test_a_step_has_drafts_only_if_enough_of_them_will_be_accepted(monkeypatch):
    """One request of four promises 2 drafts at first, which is enough; one of eight is not."""
    drafts = Speculation(SpeculativeConfig.of(NGRAM))
    repeats = make_request("a", (5, 6, 7, 5, 6), max_tokens=9)
    others = [make_request(str(n), (n, n + 1), max_tokens=9) for n in range(8, 15)]
    assert drafts.propose([repeats, *others[:3]], [9] * 4) == {0: (7, 5, 6, 7)}
    assert drafts.propose([repeats, *others[:3]], [2] * 4) == {0: (7, 5)}
    assert drafts.propose([repeats, *others[:3]], [0] * 4) == {}
    assert drafts.propose([repeats, *others], [9] * 8) == {}
    for module in (drafter, speculation):
        monkeypatch.setattr(module, "MIN_GAIN", 0.0)
    assert drafts.propose([repeats, *others], [9] * 8) == {0: (7, 5, 6, 7)}


def test_a_request_whose_drafts_are_wrong_rests_longer_and_longer():
    drafter = Drafter(SpeculativeConfig.of(NGRAM), (5, 6, 5, 6))
    output: list[int] = []

    def rests(num_tokens: int) -> list[int]:
        """Reject all drafts; return how many tokens pass without drafts at a time."""
        drafted = []
        for token in itertools.islice(itertools.cycle((5, 6)), num_tokens):
            if drafter.propose(output, 4):
                drafted.append(len(output))
                drafter.note(0, len(output))
            output.append(token)
        return [end - start for start, end in itertools.pairwise(drafted) if end > start + 1]

    assert rests(240) == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST]
    for _ in range(9):  # accepted drafts shorten the rest again
        drafter.note(4, len(output))
    assert rests(400)[0] == FIRST_REST


# --- whole engines -------------------------------------------------------------------------------


@st.composite
def schedules(draw) -> list[tuple[int, list[int], SamplingParams, int | None]]:
    """Draw requests as ``tests.engine.test_overlap`` does, with every edit of the logits."""
    shared = draw(st.lists(TOKENS, max_size=40))
    requests = []
    for index in range(draw(st.integers(1, 5))):
        prefix = shared if draw(st.booleans()) else []
        max_tokens = draw(st.integers(1, 24))
        params = SamplingParams(
            temperature=draw(st.sampled_from([0, 1.5])),
            seed=index,
            max_tokens=max_tokens,
            min_tokens=min(draw(st.sampled_from([0, 0, 6])), max_tokens),
            stop_token_ids=draw(st.lists(TOKENS, max_size=8)),
            stop_token_sequences=draw(st.lists(st.tuples(TOKENS, TOKENS), max_size=2)),
            top_k=draw(st.sampled_from([0, 0, 5])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
            presence_penalty=draw(st.sampled_from([0.0, 0.7])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
            bad_words_token_ids=draw(st.lists(st.tuples(TOKENS, TOKENS), max_size=3)),
            logit_bias=draw(st.dictionaries(TOKENS, st.sampled_from([-9.0, 3.0]), max_size=3)),
            logprobs=draw(st.sampled_from([None, None, 2])),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        )
        aborted = draw(st.none() | st.none() | st.integers(0, 20))
        joins = draw(st.integers(0, 12))
        tail = draw(st.lists(TOKENS, min_size=1, max_size=20))
        requests.append((joins, [*prefix, *tail], params, aborted and joins + aborted))
    return requests


def logprobs_of(request: Request) -> list[float]:
    return [value for each in request.output_logprobs for value in each.logprobs[0].tolist()]


@settings(max_examples=max(settings.default.max_examples // 4, 4))  # each makes two engines
@given(
    schedule=schedules(),
    caching=st.booleans(),
    blocks=st.sampled_from([9, 12, 30]),
    policy=st.sampled_from([None, None, "ratio=0.5,window=16,sink=16"]),
    host_stops=st.booleans(),
)
def test_drafts_change_no_output(model, schedule, caching, blocks, policy, host_stops):
    """Drafts of which some are right; 9 blocks force preemption.

    ``host_stops``: requests have more stop tokens than the device knows.
    """
    if host_stops:
        for _, _, params, _ in schedule:
            if not params.min_tokens:
                params.stop_token_ids = [*range(3, 3 + 17), *params.stop_token_ids]
    options = {"num_kv_blocks": blocks, "enable_prefix_caching": caching, "head_policy": policy}
    core = make_core(model, **options)
    plain = run(core, schedule)
    drained(core)
    core = make_core(model, **options, speculative=NGRAM)
    known = KnownSpeculation({request.req_id: request.output_token_ids for request in plain})
    core.scheduler._speculation = known
    drafted = run(core, schedule)
    drained(core)
    for request, other, (_, _, _, aborted) in zip(plain, drafted, schedule, strict=True):
        assert request.error is None
        assert other.error is None
        assert other.num_tokens <= other.max_total_tokens
        if aborted is None:
            assert other.output_token_ids == request.output_token_ids
            assert other.finish_reason == request.finish_reason
            assert other.stop_reason == request.stop_reason
            assert logprobs_of(other) == pytest.approx(logprobs_of(request), abs=1e-9)
            assert other.num_prompt_logprobs == request.num_prompt_logprobs
        else:  # the abort comes some tokens earlier or later; until then tokens are equal
            shorter = min(len(request.output_token_ids), len(other.output_token_ids))
            assert other.output_token_ids[:shorter] == request.output_token_ids[:shorter]


def test_steps_with_logprobs_may_go_without_drafts():
    """As on a GPU, where such a step leaves the CUDA graphs; later steps have drafts again."""
    for allowed in (True, False):
        scheduler = make_scheduler(
            speculation=KnownSpeculation(), drafts_beside_logprobs=allowed, max_steps_in_flight=1
        )
        scheduler.add(make_request("a", (5, 6), max_tokens=30, ignore_eos=True))
        scheduler.add(make_request("b", (7,), max_tokens=9, ignore_eos=True, logprobs=0))
        runner, has_drafts = make_runner(scheduler), {True: False, False: False}
        while scheduler.has_unfinished_requests:
            plan = scheduler.schedule()
            has_drafts["b" in plan.req_ids] |= bool(plan.draft_token_ids)
            runner.execute(plan)
            output = runner.result()
            scheduler.update(replace(output, logprobs=logprobs_for(output)))
        assert has_drafts == {True: allowed, False: True}


def logprobs_for(output: StepOutput) -> dict[int, TokenLogprobs]:
    """Return log-probabilities of the tokens of every row."""
    zeros = [np.zeros((len(tokens), 1)) for tokens in output.token_ids]
    return {
        row: TokenLogprobs(token_ids=each.astype(np.int64), logprobs=each, ranks=each)
        for row, each in enumerate(zeros)
    }


class RightDrafts(KnownSpeculation):
    """Proposes the tokens that each request draws next."""

    def propose(self, requests, room):
        drafts = {}
        for row, (request, most) in enumerate(zip(requests, room, strict=True)):
            known = len(request.output_token_ids)
            found = self.outputs[request.req_id][known : known + min(most, 4)]
            if found:
                drafts[row] = tuple(found)
        return drafts


def test_no_token_follows_a_stop_that_only_the_host_knows(model):
    """The device accepts drafts after it; they become neither output nor cached blocks."""
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=24, ignore_eos=True, logprobs=0)
    core = make_core(model)
    free = core.add_request("a", [*range(5, 25)], params)
    finish(core)
    output = free.output_token_ids
    at = next(n for n in range(3, 24) if n % 5 == 2 and output.index(output[n]) == n)
    others = [token for token in range(3, VOCAB) if token not in output][:16]
    core = make_core(model, speculative=NGRAM)
    core.scheduler._speculation = RightDrafts({"a": output, "b": output})
    params = params.clone()
    params.stop_token_ids = [*others, output[at]]
    for name in "ab":  # the second has a prefix hit
        request = core.add_request(name, [*range(5, 25)], params)
        finish(core)
        assert request.output_token_ids == output[: at + 1]
        assert (request.finish_reason, request.stop_reason) == ("stop", output[at])
        assert logprobs_of(request) == pytest.approx(logprobs_of(free)[: at + 1], abs=1e-9)
    metrics = core.metrics()
    assert metrics["prefix_hit_tokens"] > 0
    assert metrics["num_generated_tokens"] == 2 * (at + 1)
    drained(core)


def test_no_token_follows_a_stop_string():
    """A step gives five tokens; the string ends in the second of them."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    with LLM("tiny", device="cpu", num_kv_blocks=64, speculative=NGRAM) as llm:
        drafts = llm.engine.scheduler._speculation = RightDrafts({"0": []})
        free = llm.generate("ROMEO:", params)[0].outputs[0]
        texts = [llm.get_tokenizer().decode(list(free.token_ids[:n])) for n in (7, 8)]
        params = params.clone()
        params.stop = [texts[1][len(texts[0]) - 3 :]]
        assert texts[1].count(params.stop[0]) == 1
        drafts.outputs = {"1": list(free.token_ids)}
        before = llm.metrics()["num_generated_tokens"]
        output = llm.generate("ROMEO:", params)[0].outputs[0]
        assert llm.metrics()["num_generated_tokens"] - before == 8
    assert drafts.num_accepted > 0
    assert output.token_ids == free.token_ids[:8]
    assert output.text + params.stop[0] == texts[1]
    assert (output.finish_reason, output.stop_reason) == ("stop", params.stop[0])
    assert len(output.logprobs) == 8


def test_a_stop_string_goes_before_a_stop_token_of_the_same_step():
    """A step gives five tokens; the string ends in the second of them, the fourth is a stop."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM("tiny", device="cpu", num_kv_blocks=64, speculative=NGRAM) as llm:
        drafts = llm.engine.scheduler._speculation = RightDrafts({"0": []})
        free = llm.generate("ROMEO:", params)[0].outputs[0]
        texts = [llm.get_tokenizer().decode(list(free.token_ids[:n])) for n in (7, 8)]
        params = params.clone()
        params.stop = [texts[1][len(texts[0]) - 3 :]]
        params.stop_token_sequences = [free.token_ids[8:11]]
        drafts.outputs = {"1": list(free.token_ids)}
        output = llm.generate("ROMEO:", params)[0].outputs[0]
    assert output.token_ids == free.token_ids[:8]
    assert (output.finish_reason, output.stop_reason) == ("stop", params.stop[0])


@pytest.mark.parametrize("ends", ["error", "stop token", "stop string"])
def test_drafts_accepted_before_nan_are_delivered(ends, monkeypatch):
    """The third row of five has NaN: the request fails, unless a token before it is its last."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    with LLM("tiny", device="cpu", num_kv_blocks=64, speculative=NGRAM) as llm:
        drafts = llm.engine.scheduler._speculation = RightDrafts({"0": []})
        free = llm.generate("ROMEO:", params)[0].outputs[0]
        drafts.outputs = {"1": list(free.token_ids)}
        params = params.clone()
        if ends == "stop token":  # the last of those that only the host knows
            others = [t for t in range(3, 60) if t not in free.token_ids][:16]
            assert free.token_ids[2] not in free.token_ids[:2]
            params.stop_token_ids = [*others, free.token_ids[2]]
        elif ends == "stop string":
            params.stop = [llm.get_tokenizer().decode(list(free.token_ids[:3]))]
        model = llm.engine.runner.model
        compute = model.compute_logits

        def broken(hidden):
            logits = compute(hidden)
            if len(hidden) == 5:
                logits[2] = torch.nan
            return logits

        monkeypatch.setattr(model, "compute_logits", broken)
        llm.add_request("ROMEO:", params, request_id="1")
        while llm.has_unfinished_requests():
            outputs = llm.step()
        (output,) = outputs[0].outputs
        drained(llm.engine)
    assert output.token_ids == free.token_ids[:3]
    found, expected = (
        [each[token].logprob for each, token in zip(o.logprobs, o.token_ids, strict=False)]
        for o in (output, free)
    )
    assert found == pytest.approx(expected[:3], abs=1e-4)
    if ends == "error":
        assert "NaN" in str(output.error)
        assert output.finish_reason == "error"
    else:
        assert output.error is None
        assert output.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_ngrams_save_steps_where_an_output_repeats(model, temperature):
    """A bias makes outputs repeat."""

    def requests(core: EngineCore) -> list[Request]:
        bias = {7: 40.0, 8: 38.0}
        params = SamplingParams(
            temperature=temperature, seed=1, max_tokens=60, ignore_eos=True, logit_bias=bias
        )
        return [core.add_request(name, [5, 6, 7, 8], params) for name in "ab"]

    core = make_core(model)
    expected = requests(core)
    steps = finish(core)
    core = make_core(model, speculative=NGRAM)
    found = requests(core)
    fewer = finish(core)
    assert [r.output_token_ids for r in found] == [r.output_token_ids for r in expected]
    assert fewer < 0.8 * steps
    metrics = core.metrics()
    assert 0 < metrics["num_accepted_tokens"] <= metrics["num_draft_tokens"]
    assert metrics["num_accepted_tokens"] == sum(r.num_accepted_tokens for r in found)
    assert metrics["num_draft_tokens"] == sum(r.num_draft_tokens for r in found)
    assert metrics["num_generated_tokens"] == 120
    assert all(request.drafter is None for request in found), "nothing is kept of ended requests"
    drained(core)


def test_without_a_repetition_two_steps_are_in_flight(model):
    """No sequence of 5 tokens comes twice: steps are launched as without drafts."""
    in_flight = []
    for options in ({}, {"speculative": {"method": "ngram"}}):
        core = make_core(model, **options)
        params = SamplingParams(temperature=1.0, seed=4, max_tokens=40, ignore_eos=True)
        core.add_request("a", [*range(5, 15)], params)
        counts = []
        while core.has_unfinished_requests:
            core.step()
            counts.append(core.scheduler.num_steps_in_flight)
        in_flight.append(counts)
    assert in_flight[0] == in_flight[1]
    assert 1 in in_flight[1]  # besides the step whose result ``step`` has just read


def test_a_grammar_goes_without_drafts(model):
    """Beside a request with a grammar no request has drafts; afterwards they have again."""

    class Anything:
        """A grammar that allows every token, and ends after ten."""

        def __init__(self) -> None:
            self.num_tokens = 0

        def matcher(self) -> Anything:
            return Anything()

        def fill_bitmask(self, bitmask: np.ndarray) -> None:
            bitmask.fill(-1)

        def accept(self, token: int) -> bool:
            self.num_tokens += 1
            return True

        def is_finished(self) -> bool:
            return self.num_tokens == 10

    def outputs(**options: object) -> tuple[list[list[int]], int]:
        core = make_core(model, **options)
        bias = {7: 40.0, 8: 40.0}
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logit_bias=bias)
        requests = [
            core.add_request("a", [5, 6], params),
            core.add_request("b", [5, 6], SamplingParams(structured_output=Anything())),
        ]
        while not requests[1].finished:
            core.step()
        assert core.metrics()["num_drafts"] == 0
        finish(core)
        return [request.output_token_ids for request in requests], core.metrics()["num_drafts"]

    plain, _ = outputs()
    drafted, num_drafts = outputs(speculative=NGRAM)
    assert drafted == plain
    assert num_drafts > 0


def test_sampled_tokens_have_the_models_distribution(model):
    """Chi-square of tokens drawn behind drafts against tokens that other seeds draw alone."""

    def sampled(first_seed: int, likely: list[int]) -> np.ndarray:
        """Return the tokens ``[requests, 4]``; ``likely``: the drafts of every request."""
        options = {"speculative": NGRAM} if likely else {}
        core = make_core(
            model, max_num_seqs=64, max_num_batched_tokens=640, num_kv_blocks=256, **options
        )
        if likely:
            drafts = {str(n): likely for n in range(NUM_SAMPLES)}
            core.scheduler._speculation = KnownSpeculation(drafts)
        requests = []
        for n in range(NUM_SAMPLES):
            params = SamplingParams(
                temperature=0.8, top_k=6, seed=first_seed + n, max_tokens=4, ignore_eos=True
            )
            requests.append(core.add_request(str(n), [5, 6, 7], params))
        finish(core)
        return np.array([request.output_token_ids for request in requests])

    alone = sampled(0, [])
    drafted = sampled(NUM_SAMPLES, [int(np.bincount(column).argmax()) for column in alone.T])
    assert not np.array_equal(alone, drafted)
    for column in range(1, 4):
        counts = np.array([np.bincount(of[:, column], minlength=VOCAB) for of in (alone, drafted)])
        is_rare = counts.sum(axis=0) < 20
        counts = np.column_stack([counts[:, ~is_rare], counts[:, is_rare].sum(axis=1)])
        expected = counts.sum(axis=0) / 2
        chi_square = ((counts - expected) ** 2 / expected.clip(min=1)).sum()
        freedom = counts.shape[1] - 1
        assert freedom >= 3
        assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # 1 in 3,000 or less by chance


# --- LLM, AsyncLLM -------------------------------------------------------------------------------


@pytest.mark.gpu
def test_llm_gives_the_same_with_drafts(monkeypatch):
    """Text, log-probabilities and stop strings that end within a step's tokens."""
    for module in (drafter, speculation):
        monkeypatch.setattr(module, "MIN_GAIN", 0.0)
    prompts = ["the cat sat on the mat. the cat sat on", "ROMEO:"]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=1, max_tokens=24, logprobs=2, n=2),
        SamplingParams(temperature=0, max_tokens=48, stop=["be", " m"], min_tokens=3),
        SamplingParams(temperature=0, max_tokens=48, stop=["e"], logprobs=0),
    ]
    outputs = []
    for option in (None, NGRAM):
        with LLM(
            "tiny", deterministic=True, max_num_seqs=8, num_kv_blocks=256, speculative=option
        ) as llm:
            outputs.append(
                [each for one in params for each in llm.generate(prompts, one, use_tqdm=False)]
            )
            metrics = llm.metrics()
            assert metrics["num_generated_tokens"] == sum(
                len(each.token_ids) for output in outputs[-1] for each in output.outputs
            )
    assert metrics["num_accepted_tokens"] > 20
    assert metrics["num_accepted_tokens"] == sum(
        output.metrics.num_accepted_tokens for output in outputs[1]
    )
    for plain, drafted in zip(*outputs, strict=True):
        for one, other in zip(plain.outputs, drafted.outputs, strict=True):
            for name in ("token_ids", "text", "finish_reason", "stop_reason"):
                assert getattr(other, name) == getattr(one, name), name
            assert (one.logprobs is None) == (other.logprobs is None)
            for expected, found in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert found.keys() == expected.keys()
                for token, value in expected.items():
                    assert found[token].logprob == pytest.approx(value.logprob, abs=1e-4)


def test_async_llm_takes_drafts():
    params = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
    with LLM("tiny", device="cpu", num_kv_blocks=64) as llm:
        expected = llm.generate("ROMEO:", params)[0].outputs[0]

    async def main() -> None:
        async with AsyncLLM("tiny", device="cpu", num_kv_blocks=64, speculative=NGRAM) as llm:
            sizes = [0]
            async for output in llm.generate("ROMEO:", params):
                sizes.append(len(output.outputs[0].token_ids))
            assert output.outputs[0].token_ids == expected.token_ids
            assert output.outputs[0].text == expected.text
            assert max(np.diff(sizes)) > 1
            assert llm.metrics()["num_accepted_tokens"] > 0

    asyncio.run(main())


# --- mistakes ------------------------------------------------------------------------------------


def test_a_step_can_verify_the_drafts_of_the_configuration():
    assert MAX_DRAFTS == MAX_SAMPLED_TOKENS - 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "ngram",
            r"speculative: expected a mapping such as \{\"method\": \"ngram\"\}, got 'ngram'",
        ),
        ({}, "speculative: expected the keys method, num_tokens, .*, got no method"),
        (
            {"method": "eagle"},
            r"speculative: method: expected one of \('ngram', 'mtp', 'ernie_mtp', 'eagle3'\), got "
            "'eagle'",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3},
            "speculative: expected the keys method, num_tokens, .*got 'num_speculative_tokens'",
        ),
        ({"num_tokens": 8}, "num_tokens: expected an integer from 1 to 7, got 8"),
        ({"num_tokens": None}, "num_tokens: expected an integer from 1 to 7, got None"),
        ({"num_tokens": True}, "num_tokens: expected an integer from 1 to 7, got True"),
        ({"prompt_lookup_max": 33}, "prompt_lookup_max: expected an integer from 1 to 32, got 33"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min: expected an integer from 1 to 32, got 0"),
        (
            {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
            r"prompt_lookup_min: expected at most prompt_lookup_max \(3\), got 4",
        ),
    ],
)
def test_mistakes_are_config_errors(given, message):
    if isinstance(given, dict) and given and "method" not in given:
        given = {"method": "ngram", **given}
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="tiny", speculative=given)


def test_drafts_that_fit_no_step_are_refused():
    speculative = {"method": "ngram", "num_tokens": 4}
    EngineConfig(model="tiny", speculative=speculative, max_num_batched_tokens=5)
    with pytest.raises(
        ConfigError, match=r"num_tokens: expected fewer than max_num_batched_tokens \(4\), got 4"
    ):
        EngineConfig(model="tiny", speculative=speculative, max_num_batched_tokens=4)


@pytest.mark.parametrize(
    ("given", "lengths"),
    [({}, (5, 5)), ({"prompt_lookup_max": 3}, (3, 3)), ({"prompt_lookup_min": 2}, (2, 2))],
)
def test_lookup_lengths_have_vllms_defaults(given, lengths):
    assert SpeculativeConfig.of({"method": "ngram", **given}).lookup_lengths == lengths


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8_e4m3", "kv_scale": "quarter"}, "kv_scale, speculative: expected"),
        ({"attention_backend": "flashinfer"}, "speculative: expected attention_backend='triton'"),
    ],
)
def test_options_that_do_not_go_together_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="tiny", speculative=NGRAM, **options)


def test_processors_and_drafts_are_refused_together():
    processor = SimpleNamespace(add_request=print, apply=print)
    with pytest.raises(ConfigError, match="speculative: expected no logits_processors"):
        LLM("tiny", device="cpu", speculative=NGRAM, logits_processors=[processor])
