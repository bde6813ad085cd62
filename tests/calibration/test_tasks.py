"""Tasks of recall: what a sample contains, how it is scored, and its form for calibration."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import ConfigError
from mrv1.calibration import TASKS, TaskPrompts, TaskSample
from mrv1.calibration.tasks import COMMON_COUNT, RARE_COUNT
from mrv1.models import Checkpoint

PROMPTS = TaskPrompts(Checkpoint.open("tiny").tokenizer())
TASK = st.sampled_from(sorted(TASKS))


def drawn(task: str, seed: int, num_tokens: int = 700) -> TaskSample:
    return PROMPTS.sample(task, np.random.default_rng(seed), num_tokens)


@given(task=TASK, seed=st.integers(0, 2**32), num_tokens=st.integers(500, 900))
def test_a_sample_fills_its_tokens_and_equal_seeds_give_equal_samples(task, seed, num_tokens):
    sample = drawn(task, seed, num_tokens)
    assert sample == drawn(task, seed, num_tokens)
    assert sample != drawn(task, seed + 1, num_tokens)
    length = len(PROMPTS.ids(sample.message, sample.reply_start + sample.reply))
    assert num_tokens - 90 <= length <= num_tokens


@given(task=TASK, seed=st.integers(0, 2**32))
def test_the_right_reply_scores_one_and_none_is_in_the_question(task, seed):
    sample = drawn(task, seed)
    assert sample.score(sample.reply) == 1
    assert sample.score("") == sample.score("".join(sample.answers) + "0") == 0
    for answer in sample.answers:
        assert sample.score(f"I see: {answer.upper()}!") == 1 / len(sample.answers)
        assert answer in re.findall(r"\w+", sample.message)
    question = sample.message.rpartition("\n\n")[2] + sample.reply_start
    assert not {*re.findall(r"\w+", question)} & {*sample.answers}


@given(seed=st.integers(0, 2**32))
def test_the_answers_follow_from_the_text(seed):
    """An independent reader of the text finds the answers."""
    sample = drawn("passkey", seed)
    assert {*re.findall(r"pass key is (\d+)", sample.message)} == {*sample.answers}

    sample = drawn("multikey", seed)
    pairs = re.findall(r"special number for (\w+) is (\d+)\.", sample.message)
    (asked,) = re.findall(r"number for (\w+) in the text\?", sample.message)
    assert len(pairs) == 4
    assert dict(pairs)[asked] == sample.answers[0]

    sample = drawn("multivalue", seed)
    assert tuple(re.findall(r"number for \w+ is (\d+)\.", sample.message)) == sample.answers

    sample = drawn("variables", seed)
    values = dict(re.findall(r"VAR (\w+) = (\w+)\.", sample.message))
    for name, before in re.findall(r"VAR (\w+) = VAR (\w+)\.", sample.message):
        values[name] = values[before]
    (asked,) = re.findall(r"with the value (\d+) in the text", sample.message)
    assert {name for name, value in values.items() if value == asked} == {*sample.answers}

    sample = drawn("common", seed)
    words = re.findall(r"The word is (\w+)\.", sample.message)
    counts = {word: words.count(word) for word in words}
    assert [word for word, count in counts.items() if count == COMMON_COUNT] == [*sample.answers]
    assert sorted(counts.values())[:-1] == [RARE_COUNT] * 8


@given(task=TASK, seed=st.integers(0, 2**32))
def test_calibration_asks_for_the_tokens_of_the_right_reply(task, seed):
    sample = drawn(task, seed)
    prompt = PROMPTS.recall_prompt(sample, 700)
    assert prompt.tokens.shape == prompt.is_filler.shape == (700,)
    assert not prompt.is_filler.any()
    asked = PROMPTS.prompt(sample)
    assert prompt.tokens[: prompt.answers[0]].tolist() == asked
    assert PROMPTS.tokenizer.decode(prompt.tokens[prompt.answers]).strip() == sample.reply.strip()


@given(task=TASK, seed=st.integers(0, 2**32))
def test_spans_are_the_answers_and_the_context_ends_before_the_question(task, seed):
    sample = drawn(task, seed)
    whole = PROMPTS.ids(sample.message, sample.reply_start + sample.reply)
    found = [
        PROMPTS.tokenizer.decode(whole[s.start : s.stop]) for s in PROMPTS.answer_spans(sample)
    ]
    assert [text.strip() for text in found] == [*sample.answers]
    length = PROMPTS.context_length(sample)
    text, _, question = sample.message.rpartition("\n\n")
    assert text in PROMPTS.tokenizer.decode(whole[:length])
    assert question in PROMPTS.tokenizer.decode(whole[length:])


def test_prompts_take_the_tasks_in_turn():
    rng = np.random.default_rng(0)
    prompts = PROMPTS.recall_prompts(rng, 6, 600)
    assert [len(prompt.tokens) for prompt in prompts] == [600] * 6
    texts = [PROMPTS.tokenizer.decode(prompt.tokens) for prompt in prompts]
    assert ["pass key" in text for text in texts] == [True, False, False, False, False, True]


def test_wrong_names_and_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"task: expected one of .*'passkey'.* got 'needle'"):
        drawn("needle", 0)
    with pytest.raises(
        ConfigError, match=r"num_tokens: expected at least \d+ for 'common', got 9"
    ):
        drawn("common", 0, 9)
    with pytest.raises(ConfigError, match="num_prompts: expected at least 5, one for each task"):
        PROMPTS.recall_prompts(np.random.default_rng(0), 4, 600)
