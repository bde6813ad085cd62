"""Bad words, from a user's text to tokens: against transformers' model with the same bans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mrv1 import LLM, ConfigError, EngineConfig, RequestError, SamplingParams
from mrv1.engine.core import EngineCore
from mrv1.sampler.bad_words import banned_token_sequences
from tests.models.families import tiny_checkpoint

PROMPTS = ([5, 9, 23, 41, 77], [11] * 20, [7, 8, 9])
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def model(checkpoint) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)


@pytest.fixture(scope="module")
def free(model) -> list[list[int]]:
    """Return the greedy tokens of ``PROMPTS``, where nothing is banned."""
    return [greedy_by_hand(model, list(p), [], match_prompt=False) for p in PROMPTS]


def greedy_by_hand(
    model, prompt: list[int], banned, *, match_prompt: bool, num_tokens: int = NUM_TOKENS
) -> list[int]:
    """Return transformers' greedy tokens, without any that would complete a banned sequence."""
    output: list[int] = []
    for _ in range(num_tokens):
        with torch.no_grad():
            ids = torch.tensor([prompt + output], device=model.device)
            logits = model(ids).logits[0, -1]
        seen = prompt + output if match_prompt else output
        for *prefix, last in banned:
            if not prefix or seen[-len(prefix) :] == prefix:
                logits[last] = -torch.inf
        output.append(int(logits.argmax()))
    return output


def words_of(output: list[int]) -> list[list[int]]:
    """Return sequences of 1, 2 and 3 tokens of the output, an absent one and a doubled token."""
    return [[output[3]], output[5:7], output[9:12], [150, 151, 152], [output[0], output[0]]]


@pytest.mark.parametrize("match_prompt", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_equal_greedy_decoding_with_the_same_bans(
    checkpoint, model, free, overlap, match_prompt
):
    """Requests that ban five, no and two sequences, in one batch and in reused slots."""
    banned = [words_of(free[0]), [], [free[2][:1], [*PROMPTS[2][-2:], free[2][1]]]]
    expected = [
        greedy_by_hand(model, list(p), words, match_prompt=match_prompt)
        for p, words in zip(PROMPTS, banned, strict=True)
    ]
    params = [
        SamplingParams(
            temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, bad_words_token_ids=words,
            bad_words_match_prompt=match_prompt,
        )
        for words in banned
    ]  # fmt: skip
    for max_num_seqs in (1, 2, 8):
        with LLM(
            str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32, overlap=overlap,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=9,
        ) as llm:  # fmt: skip
            outputs = llm.generate([list(p) for p in PROMPTS], params)
        assert [list(o.outputs[0].token_ids) for o in outputs] == expected
    assert expected[0] != free[0]


def test_a_word_of_text_is_banned_with_and_without_a_space():
    params = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, bad_words=["not", "I", "not"]
    )
    with LLM("tiny", device="cpu", num_kv_blocks=32) as llm:
        free = llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=40))[0].outputs[0]
        req_id = llm.add_request("ROMEO:", params)
        banned = llm.engine.scheduler.get(req_id).banned_token_sequences
        while llm.has_unfinished_requests():
            (output,) = llm.step()
        encode = llm._tokenizer.encode_word
        assert set(banned) == {tuple(encode(t)) for t in ("not", " not", "I", " I")}
        assert len(banned) == len(set(banned))
        tokens = output.outputs[0].token_ids
        for sequence in banned:
            places = range(len(tokens) - len(sequence) + 1)
            assert not any(tokens[i : i + len(sequence)] == sequence for i in places)
        assert "not" in free.text
        with pytest.raises(
            RequestError, match="bad_words: expected Unicode text, got a lone surr"
        ):
            llm.generate("ROMEO:", SamplingParams(bad_words=["\ud800"]))
        assert tokens != free.token_ids


@pytest.mark.parametrize("space", ["", " ", "  ", "\n", "\t ", "\u3000"])
def test_leading_whitespace_of_a_word_makes_no_difference(space):
    params = SamplingParams(bad_words=[f"{space}king", f"{space}my lord "])
    banned = banned_token_sequences(params, lambda t: list(map(ord, t)), max_words=2, max_len=9)
    texts = {"".join(map(chr, sequence)) for sequence in banned}
    assert texts == {"king", " king", "my lord ", " my lord "}


def test_a_word_of_whitespace_alone_is_banned_unchanged():
    with LLM("tiny", device="cpu", num_kv_blocks=32) as llm:
        encode = llm._tokenizer.encode_word
    for word in (" ", "\n", "\t", "\n\n", " \n"):
        params = SamplingParams(bad_words=[word])
        (banned,) = banned_token_sequences(params, encode, max_words=1, max_len=8)
        assert banned == tuple(encode(word))


def test_a_request_beyond_a_limit_fails_alone(checkpoint):
    core = EngineCore(
        EngineConfig(
            model=str(checkpoint), device="cpu", num_kv_blocks=16, max_num_seqs=2,
            max_bad_words_num=2, bad_words_max_len=3,
        ),
        progress=False,
    )  # fmt: skip
    for words, message in (
        (
            [[1], [2], [3]],
            "^bad_words_token_ids: expected at most 2 words, got 3; raise max_bad_words_num or "
            "MRV1_MAX_BAD_WORDS_NUM$",
        ),
        (
            [[1, 2, 3, 4]],
            "^bad_words_token_ids: expected at most 3 tokens a word, got 4; raise "
            "bad_words_max_len or MRV1_BAD_WORDS_MAX_LEN$",
        ),
        ([[5, 10_000]], r"^bad_words_token_ids: expected ids in \[0, \d+\), got \[10000\]$"),
    ):
        with pytest.raises(RequestError, match=message):
            core.add_request("x", [5], SamplingParams(bad_words_token_ids=words))
    with pytest.raises(RequestError, match="bad_words: expected bad_words_token_ids, as there is"):
        core.add_request("x", [5], SamplingParams(bad_words=["a"]))
    assert not core.has_unfinished_requests
    core.add_request("x", [5], SamplingParams(max_tokens=2, bad_words_token_ids=[[1], [2, 3, 4]]))
    while core.has_unfinished_requests:
        core.step()
    core.runner.close()


def test_a_word_of_too_many_tokens_is_named():
    params = SamplingParams(bad_words=["ab", "abc"])
    with pytest.raises(
        RequestError,
        match=r"^bad_words: 'abc': expected at most 3 tokens a word, got 4; raise "
        r"bad_words_max_len or MRV1_BAD_WORDS_MAX_LEN$",
    ):
        banned_token_sequences(params, lambda text: list(map(ord, text)), max_words=9, max_len=3)
    with pytest.raises(
        RequestError, match=r"^bad_words: 'ab': expected at least one token, got none$"
    ):
        banned_token_sequences(params, lambda _: [], max_words=9, max_len=3)
    with pytest.raises(RequestError, match=r"^bad_words: 'a{50,60}\.\.\.: expected at most 3 tok"):
        banned_token_sequences(
            SamplingParams(bad_words=["a" * 1000]), lambda t: [1] * len(t), max_words=9, max_len=3
        )


def test_the_word_limit_counts_both_fields_and_the_error_names_them():
    for fields, name in (
        ({"bad_words": ["a", "b"]}, "bad_words"),
        ({"bad_words_token_ids": [[1], [2]]}, "bad_words_token_ids"),
        ({"bad_words": ["a"], "bad_words_token_ids": [[1]]}, "bad_words and bad_words_token_ids"),
    ):
        with pytest.raises(RequestError, match=f"^{name}: expected at most 1 words, got 2; raise"):
            banned_token_sequences(SamplingParams(**fields), lambda _: [1], max_words=1, max_len=3)


def test_limits_come_from_the_environment_and_a_misspelled_variable_is_named(monkeypatch):
    monkeypatch.setenv("MRV1_MAX_BAD_WORDS_NUM", "3")
    monkeypatch.setenv("MRV1_BAD_WORDS_MAX_LEN", "20")
    config = EngineConfig(model="tiny")
    assert (config.max_bad_words_num, config.bad_words_max_len) == (3, 20)
    assert EngineConfig(model="tiny", max_bad_words_num=5).max_bad_words_num == 5
    monkeypatch.setenv("MRV1_MAX_BAD_WORDS_NUM", "many")
    with pytest.raises(ConfigError, match="MRV1_MAX_BAD_WORDS_NUM: expected an integer >= 1, got"):
        EngineConfig(model="tiny")
    monkeypatch.setenv("MRV1_MAX_BAD_WORDS_NUM", "3")
    monkeypatch.setenv("MRV1_BAD_WORD_MAX_LEN", "3")
    with pytest.raises(
        ConfigError, match=r"MRV1_BAD_WORD_MAX_LEN: .*mean MRV1_BAD_WORDS_MAX_LEN\?"
    ):
        EngineConfig(model="tiny")
