"""Sampling features end to end, against transformers' model and rules in plain Python."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mrv1 import LLM, LogitsContext, SamplingParams
from mrv1.errors import ConfigError, RequestError, StepError
from mrv1.runner import AsyncOutput
from mrv1.runner.async_output import OutputRing
from mrv1.runner.device_step import DeviceStep, MaskBuffer
from tests.engine.scheduler_model import num_free_slots
from tests.models.families import tiny_checkpoint
from tests.sampler.rules import edited

NUM_TOKENS = 20
PROMPTS = ([5, 9, 23, 41, 77], [11] * 20, [7, 8, 9, 7, 8, 9, 7])
VOCAB = 160
EOS = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def model(checkpoint) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)


@dataclass(frozen=True)
class Drawn:
    """A token, the model's logits for it, and the edited logits that it was drawn from."""

    token: int
    raw: torch.Tensor
    edited: torch.Tensor


def next_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([list(ids)], device=model.device)).logits[0]


_FOUND: dict[str, list[Drawn]] = {}
"""What ``greedy`` has returned, by its arguments: most tests ask for the same tokens."""


def greedy(model: PreTrainedModel, prompt: Sequence[int], params: SamplingParams) -> list[Drawn]:
    key = f"{id(model)} {[*prompt]} {params}"
    if key not in _FOUND:
        _FOUND[key] = [*_greedy(model, prompt, params)]
    return _FOUND[key]


def _greedy(
    model: PreTrainedModel, prompt: Sequence[int], params: SamplingParams
) -> Iterator[Drawn]:
    output: list[int] = []
    while len(output) < params.max_tokens and not (
        len(output) > params.min_tokens and output[-1] in params.stop_token_ids
    ):
        raw = next_logits(model, [*prompt, *output])[-1]
        logits = edited(raw, prompt, output, params, (*params.stop_token_ids, EOS))
        output.append(int(logits.argmax()))
        yield Drawn(output[-1], raw, logits)


def asked(**options: object) -> SamplingParams:
    options = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | options
    return SamplingParams(**options)


FEATURES = {
    "repetition": {"repetition_penalty": 1.7},
    "repeating": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": -1.1},
    "penalties": {
        "repetition_penalty": 1.3, "frequency_penalty": -0.4, "presence_penalty": 1.5
    },
    "bias": {"logit_bias": {3: 4.0, 17: -100.0, 80: 2.5, 81: 100.0, 82: 99.5}},
    "allowed": {"allowed_token_ids": [2, 31, 32, 33, 64, 95, 96, 127, 159]},
    "one": {"allowed_token_ids": [159]},
    "everything": {
        "allowed_token_ids": list(range(0, VOCAB, 3)), "bad_words_token_ids": [[3], [6, 9], [12]],
        "logit_bias": {0: -1.0, 9: 1.0, 15: 2.0}, "repetition_penalty": 1.2,
        "frequency_penalty": 0.2, "presence_penalty": 0.1, "min_tokens": 7,
        "stop_token_ids": [15, 18],
    },
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_tokens_equal_the_rules_applied_to_transformers_logits(checkpoint, model, feature):
    """Batched with requests that use no feature and all of them, in few slots and in many."""
    params = [asked(**FEATURES[feature]), asked(), asked(**FEATURES["everything"])]
    expected = [
        [drawn.token for drawn in greedy(model, prompt, own)]
        for prompt, own in zip(PROMPTS, params, strict=True)
    ]
    free = [drawn.token for drawn in greedy(model, PROMPTS[0], asked())]
    assert expected[0] != free
    for max_num_seqs, overlap in ((1, True), (2, False), (8, True)):
        with LLM(
            str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32, overlap=overlap,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=9,
        ) as llm:  # fmt: skip
            outputs = llm.generate([list(prompt) for prompt in PROMPTS], params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_penalties_survive_preemption_and_prefix_hits(checkpoint, model):
    """The pool is too small: preempted requests are computed, and their tokens counted, again."""
    params = asked(repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=40)
    prompts = [[*range(1, 33), first] for first in (40, 41, 42, 43)]
    expected = [[drawn.token for drawn in greedy(model, prompt, params)] for prompt in prompts]
    with LLM(
        str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=13, max_num_seqs=4
    ) as llm:
        first = llm.generate(prompts[:1], params)  # now its blocks are cached
        outputs = llm.generate(prompts, params)
        metrics = llm.metrics()
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert first[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert metrics["num_preemptions"] > 0
    assert metrics["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 9])
def test_no_stop_token_ends_a_request_before_min_tokens(checkpoint, model, min_tokens):
    free = [drawn.token for drawn in greedy(model, PROMPTS[0], asked())]
    stop = free[1]
    params = asked(stop_token_ids=[stop], min_tokens=min_tokens)
    expected = [drawn.token for drawn in greedy(model, PROMPTS[0], params)]
    assert min_tokens > 1 or expected[-1] == stop
    with LLM(str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32) as llm:
        (output,) = llm.generate([list(PROMPTS[0])], params)
    assert list(output.outputs[0].token_ids) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_eos_is_masked_until_min_tokens_even_with_ignore_eos(checkpoint, overlap):
    """EOS is the likeliest token: with ignore_eos it comes from token 5 on and ends nothing."""
    with LLM(
        str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32, overlap=overlap
    ) as llm:
        assert llm.engine.runner.model_config.eos_token_ids == (EOS,)
        options = {"logit_bias": {EOS: 100.0}, "min_tokens": 5}
        params = [asked(**options), asked(**options, ignore_eos=False), asked(**options, seed=3)]
        ignored, heeded, beside = llm.generate([list(PROMPTS[0])] * 3, params)
    tokens = list(ignored.outputs[0].token_ids)
    assert EOS not in tokens[:5]
    assert tokens[5:] == [EOS] * (NUM_TOKENS - 5)
    assert list(heeded.outputs[0].token_ids) == tokens[:6]
    assert list(beside.outputs[0].token_ids) == tokens


@lru_cache
def _sequences(free: tuple[int, ...]) -> dict[str, list[list[int]]]:
    return {
        "two": [list(free[4:6])],
        "token": [[VOCAB - 1, VOCAB - 1], [free[7]]],
        "eight": [list(free[2:10])],
    }


@pytest.mark.parametrize("name", ["two", "token", "eight"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_sequence_ends_the_output(checkpoint, model, name, overlap):
    free = [drawn.token for drawn in greedy(model, PROMPTS[0], asked())]
    sequences = _sequences(tuple(free))[name]
    end = min(
        end
        for sequence in sequences
        for end in range(len(sequence), len(free) + 1)
        if free[end - len(sequence) : end] == sequence
    )
    with LLM(
        str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32, overlap=overlap
    ) as llm:
        prompts = [
            list(PROMPTS[0]),
            [*PROMPTS[0], *sequences[-1]],
        ]  # a prompt's tokens never count
        params = [asked(stop_token_sequences=sequences), asked(stop_token_sequences=sequences)]
        first, second = llm.generate(prompts, params)
    assert list(first.outputs[0].token_ids) == free[:end]
    assert first.outputs[0].finish_reason == "stop"
    assert len(second.outputs[0].token_ids) > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_equal_a_log_softmax(checkpoint, model, mode, overlap):
    features = FEATURES["everything"] | {"logit_bias": {9: 1.0}, "allowed_token_ids": None}
    params = [
        asked(logprobs=4, logprob_token_ids=[1, 99], **features),
        asked(),
        asked(logprobs=0),
    ]
    with LLM(
        str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32, logprobs_mode=mode,
        max_num_batched_tokens=9, overlap=overlap,
    ) as llm:  # fmt: skip
        outputs = llm.generate([list(prompt) for prompt in PROMPTS], params)
    assert outputs[1].outputs[0].logprobs is None
    for index in (0, 2):
        output = outputs[index].outputs[0]
        drawn = greedy(model, PROMPTS[index], params[index])
        assert list(output.token_ids) == [each.token for each in drawn]
        assert len(output.logprobs) == len(drawn)
        for found, each in zip(output.logprobs, drawn, strict=True):
            logits = each.raw if mode == "raw_logprobs" else each.edited
            expected = logits.log_softmax(0)
            top = expected.argsort(descending=True, stable=True)[: params[index].logprobs]
            ids = {each.token, *top.tolist(), *params[index].logprob_token_ids}
            assert set(found) == ids
            for token in ids:
                assert found[token].logprob == pytest.approx(float(expected[token]), abs=1e-5)
                assert found[token].rank == 1 + int((logits > logits[token]).sum())


@pytest.mark.parametrize("chunk", [3, 64])
def test_prompt_logprobs_equal_a_log_softmax(checkpoint, model, chunk):
    """The prompt is computed in chunks, beside another request, and with its prefix cached."""
    prompt = [*range(3, 40)]
    params = asked(prompt_logprobs=2, max_tokens=3)
    with LLM(
        str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32,
        max_num_batched_tokens=chunk,
    ) as llm:  # fmt: skip
        llm.generate([prompt], asked(max_tokens=1))  # now the prompt is cached
        found, other = llm.generate([prompt, list(PROMPTS[0])], [params, asked()])
    assert other.prompt_logprobs is None
    assert len(found.prompt_logprobs) == len(prompt)
    assert found.prompt_logprobs[0] is None
    expected = next_logits(model, prompt).log_softmax(-1)
    for position in range(1, len(prompt)):
        row, own = expected[position - 1], found.prompt_logprobs[position]
        ids = {prompt[position], *row.argsort(descending=True, stable=True)[:2].tolist()}
        assert set(own) == ids
        for token in ids:
            assert own[token].logprob == pytest.approx(float(row[token]), abs=1e-5)
            assert own[token].rank == 1 + int((row > row[token]).sum())


def test_outputs_of_one_request_differ_and_repeat_with_the_seed(checkpoint):
    params = asked(temperature=1.0, seed=5, n=3)
    with LLM(str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=64) as llm:
        (three,) = llm.generate([list(PROMPTS[0])], params)
        (one,) = llm.generate([list(PROMPTS[0])], asked(temperature=1.0, seed=5))
        beside, _ = llm.generate([list(PROMPTS[0]), list(PROMPTS[1])], [params, asked()])
    tokens = [tuple(output.token_ids) for output in three.outputs]
    assert [output.index for output in three.outputs] == [0, 1, 2]
    assert len(set(tokens)) == 3
    assert tokens[0] == tuple(one.outputs[0].token_ids)
    assert tokens == [tuple(output.token_ids) for output in beside.outputs]


def test_a_row_with_every_token_masked_fails_alone_and_names_the_masks(checkpoint):
    params = [
        asked(allowed_token_ids=[3, 4], bad_words_token_ids=[[3], [4]]),
        asked(),
    ]
    with LLM(str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32) as llm:
        failed, fine = llm.generate([list(PROMPTS[0]), list(PROMPTS[1])], params)
    assert "allowed_token_ids" in str(failed.error)
    assert "bad_words" in str(failed.error)
    assert failed.outputs[0].finish_reason == "error"
    assert len(fine.outputs[0].token_ids) == NUM_TOKENS


def test_a_reused_slot_keeps_no_state_of_its_former_request(checkpoint, model):
    """One slot: requests with all features and with none take turns."""
    everything = asked(**FEATURES["everything"], logprobs=2)
    params = [everything, asked(), everything, asked(repetition_penalty=1.7), asked()]
    prompts = [list(PROMPTS[index % 3]) for index in range(len(params))]
    expected = [
        [drawn.token for drawn in greedy(model, prompt, own)]
        for prompt, own in zip(prompts, params, strict=True)
    ]
    with LLM(
        str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32, max_num_seqs=1
    ) as llm:
        outputs = llm.generate(prompts, params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


# --- grammars and processors of users, which may fail --------------------------------------------

WORD = (9, 23, 41)


@dataclass
class Word:
    """A grammar that allows only ``WORD``, and its matcher; ``fault`` names a method to fail."""

    fault: str = ""
    at: int = 0

    def matcher(self) -> Word:
        if self.fault == "matcher":
            raise ValueError("at matcher")
        return Word(self.fault)

    def fill_bitmask(self, bitmask) -> None:
        if self.fault == "fill_bitmask":
            raise ValueError("at fill_bitmask")
        bitmask[WORD[self.at] // 32] = 1 << WORD[self.at] % 32

    def accept(self, token_id: int) -> bool:
        if self.fault == "accept":
            raise ValueError("at accept")
        self.at += 1
        return self.fault != "refuse" or self.at < 2

    def is_finished(self) -> bool:
        if self.fault == "is_finished":
            raise ValueError("at is_finished")
        return self.at == len(WORD)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("fault", "said", "num_tokens"),
    [
        ("matcher", "structured_output: ValueError('at matcher')", 0),
        ("fill_bitmask", "structured_output: ValueError('at fill_bitmask')", 0),
        ("accept", "structured_output: ValueError('at accept')", 0),
        ("refuse", "structured_output: token 23, which its bitmask allowed, was not accepted", 1),
        ("is_finished", "structured_output: ValueError('at is_finished')", 1),
    ],
)
def test_a_grammar_that_fails_ends_its_request_alone(
    checkpoint, model, overlap, fault, said, num_tokens
):
    params = [asked(structured_output=Word(fault)), asked(), asked(structured_output=Word())]
    with LLM(
        str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32, overlap=overlap
    ) as llm:
        bad, free, good = llm.generate([list(prompt) for prompt in PROMPTS], params)
        held = llm.kv_report()["held_blocks"]
    assert said in str(bad.error)
    assert isinstance(bad.error.__cause__, ValueError) == (fault != "refuse")
    assert sum(len(output.token_ids) for output in bad.outputs) == num_tokens
    expected = [drawn.token for drawn in greedy(model, PROMPTS[1], params[1])]
    assert list(free.outputs[0].token_ids) == expected
    assert good.error is None
    assert good.outputs[0].token_ids == WORD
    assert good.outputs[0].finish_reason == "stop"
    assert held == [0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fails", ["take", "put", "sample"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_gpu_that_fails_while_a_step_awaits_its_masks_ends_every_request(
    checkpoint, monkeypatch, overlap, fails, at
):
    """From the first or third result, upload of masks or launch on, every driver call fails."""
    owner = {"take": AsyncOutput, "put": MaskBuffer, "sample": DeviceStep}[fails]
    method, calls = getattr(owner, fails), itertools.count(1)

    def failing(*arguments, **options):
        if next(calls) < at:
            return method(*arguments, **options)
        error = torch.AcceleratorError("an illegal memory access")
        if fails != "take":
            raise error
        return StepError(str(error), step_id=arguments[0].step_id, device_lost=True)

    def refused(self) -> None:
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(owner, fails, failing)
    monkeypatch.setattr(OutputRing, "give_up", refused)
    with LLM(
        str(checkpoint), device="cpu", num_kv_blocks=32, overlap=overlap, max_num_seqs=2
    ) as llm:
        for params in (asked(structured_output=Word()), asked(), asked()):
            llm.add_request([5, 6, 7], params)
        ended = {}
        for _ in range(20):
            if not llm.has_unfinished_requests():
                break
            ended |= {output.request_id: output for output in llm.step() if output.finished}
        scheduler = llm.engine.scheduler
        assert not scheduler.has_unfinished_requests
        assert llm.kv_report()["held_blocks"] == [0]
        assert scheduler.pools[0].num_free == 32
        assert (num_free_slots(scheduler), scheduler.num_steps_in_flight) == (2, 0)
        assert sorted(ended) == ["0", "1", "2"]
        for output in ended.values():
            assert isinstance(output.error, StepError)
            assert "an illegal memory access" in str(output.error)
        with pytest.raises(StepError, match="the GPU failed and serves this process no more"):
            llm.generate([5, 6, 7], asked())


def test_the_last_token_of_a_grammar_is_text():
    with LLM("tiny", device="cpu", num_kv_blocks=32) as llm:
        (output,) = llm.generate("A", asked(structured_output=Word()))
        assert output.outputs[0].text == llm._tokenizer.decode(WORD)


class Returns:
    """A processor that returns ``edit`` of the logits."""

    def __init__(self, edit) -> None:
        self.edit = edit

    def add_request(self, slot: int, params: SamplingParams, token_ids) -> None:
        pass

    def apply(self, logits: torch.Tensor, context: LogitsContext) -> object:
        return self.edit(logits)


@pytest.mark.parametrize(
    ("edit", "got"),
    [
        (lambda logits: logits[:, :100], r"got torch\.float64 \[1, 100\] on cpu"),
        (lambda logits: logits.float(), r"got torch\.float32 \[1, 160\] on cpu"),
        (lambda logits: None, "got None"),
    ],
    ids=["shape", "dtype", "none"],
)
def test_the_result_of_a_custom_processor_is_checked(checkpoint, edit, got):
    options = {"device": "cpu", "dtype": "float64", "num_kv_blocks": 32}
    with LLM(str(checkpoint), **options, logits_processors=[Returns(edit)]) as llm:
        (output,) = llm.generate([list(PROMPTS[0])], [asked()])
    wanted = r"expected Returns\.apply to return torch\.float64 \[1, 160\] on cpu, "
    assert re.search(f"logits_processors: {wanted}{got}", str(output.error))
    with pytest.raises(ConfigError, match="logits_processors: expected objects with add_request"):
        LLM(str(checkpoint), **options, logits_processors=[object()])


def test_a_custom_processor_that_masks_everything_is_named(checkpoint):
    processor = Returns(lambda logits: torch.full_like(logits, -torch.inf))
    with LLM(
        str(checkpoint), device="cpu", num_kv_blocks=32, logits_processors=[processor]
    ) as llm:
        (output,) = llm.generate([list(PROMPTS[0])], [asked()])
    assert "every token is masked, by logits_processors" in str(output.error)


class OnlyBehind:
    """A processor: requests with a top_k of 77 draw the token before, plus 1."""

    def __init__(self) -> None:
        self.slots: dict[int, bool] = {}
        self.prompts: list[list[int]] = []

    def add_request(self, slot: int, params: SamplingParams, token_ids) -> None:
        self.slots[slot] = params.top_k == 77
        self.prompts.append(token_ids.tolist())

    def apply(self, logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
        history = context.history
        for row, slot in enumerate(context.idx_mapping.tolist()):
            if slot >= 0 and self.slots[slot]:
                before = history.token_ids[slot, history.num_tokens[slot] - 1]
                logits[row] = -torch.inf
                logits[row, (before + 1) % logits.shape[1]] = 0
        return logits


@pytest.mark.parametrize("overlap", [False, True])
def test_a_custom_processor_changes_its_rows_and_no_others(checkpoint, model, overlap):
    processor = OnlyBehind()
    params = [asked(), asked(top_k=77), asked(repetition_penalty=1.3)]
    with LLM(
        str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32, overlap=overlap,
        max_num_seqs=2, max_num_batched_tokens=9, logits_processors=[processor],
    ) as llm:  # fmt: skip
        outputs = llm.generate([list(prompt) for prompt in PROMPTS], params)
    assert processor.prompts == [list(prompt) for prompt in PROMPTS]
    for index in (0, 2):
        drawn = [drawn.token for drawn in greedy(model, PROMPTS[index], params[index])]
        assert list(outputs[index].outputs[0].token_ids) == drawn
    first = PROMPTS[1][-1]
    expected = [(first + 1 + step) % VOCAB for step in range(NUM_TOKENS)]
    assert list(outputs[1].outputs[0].token_ids) == expected


class Picky(OnlyBehind):
    """The same, but it raises for requests with a top_k of 13 and keeps no slot for them."""

    def add_request(self, slot: int, params: SamplingParams, token_ids) -> None:
        self.slots.pop(slot, None)
        if params.top_k == 13:
            raise KeyError("unlucky")
        super().add_request(slot, params, token_ids)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_num_seqs", [2, 8])
def test_a_request_that_a_custom_processor_refuses_fails_alone(
    checkpoint, model, overlap, max_num_seqs
):
    """Among other requests, in the same steps and reused slots, and for each of two outputs."""
    params = [asked(), asked(top_k=13), asked(top_k=77), asked(n=2, top_k=13), asked()]
    prompts = [list(PROMPTS[index % 3]) for index in range(len(params))]
    with LLM(
        str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32, overlap=overlap,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=9, logits_processors=[Picky()],
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params)
        held = llm.kv_report()["held_blocks"]
    for index in (1, 3):
        for completion in outputs[index].outputs:
            assert "logits_processors: Picky.add_request: KeyError('unlucky')" in str(
                completion.error
            )
            assert isinstance(completion.error, RequestError)
            assert isinstance(completion.error.__cause__, KeyError)
            assert (completion.token_ids, completion.finish_reason) == ((), "error")
    for index in (0, 4):
        drawn = [drawn.token for drawn in greedy(model, prompts[index], params[index])]
        assert list(outputs[index].outputs[0].token_ids) == drawn
    first = prompts[2][-1]
    expected = [(first + 1 + step) % VOCAB for step in range(NUM_TOKENS)]
    assert list(outputs[2].outputs[0].token_ids) == expected
    assert held == [0]


def test_a_custom_processor_that_raises_for_a_step_is_named(checkpoint):
    def broken(logits: torch.Tensor) -> torch.Tensor:
        raise KeyError("lost")

    with LLM(
        str(checkpoint), device="cpu", num_kv_blocks=32, logits_processors=[Returns(broken)]
    ) as llm:
        (output,) = llm.generate([list(PROMPTS[0])], [asked()])
    assert "logits_processors: Returns.apply: KeyError('lost')" in str(output.error)
    cause = output.error.__cause__
    assert isinstance(cause.__cause__, KeyError)
