"""Recall prompts, read back line by line."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mrv1 import ConfigError
from mrv1.headwise import RecallLines, recall_prompt

WORDS = np.arange(100, 180)
FILLER = 7
REMEMBER, RECALL, END = (1, 2, 3), (4, 3), (5,)


def read(pattern: tuple[int, ...], tokens: list[int]) -> list[tuple[int, int, int]]:
    """Return (position of the key, key, value) of each line that begins like ``pattern``."""
    text = "".join(chr(token) for token in tokens)
    start = "".join(map(chr, pattern))
    ends = [match.end() for match in re.finditer(re.escape(start), text)]
    for end in ends:
        assert tuple(tokens[end + 2 : end + 2 + len(END)]) == END
    return [(end, tokens[end], tokens[end + 1]) for end in ends]


@given(
    num_facts=st.integers(1, 40),
    num_tokens=st.integers(20, 900),
    first=st.integers(0, 40),
    distance=st.integers(1, 300),
    exact=st.booleans(),
    swap=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_every_fact_is_asked_for_at_the_given_distance(
    num_facts, num_tokens, first, distance, exact, swap, seed
):
    remember, recall = (RECALL, REMEMBER) if swap else (REMEMBER, RECALL)
    lines = RecallLines(remember=remember, recall=recall, end=END, words=WORDS)
    room = min(distance, num_tokens - first - distance)
    if not exact:
        room = (num_tokens - first - distance) // 2
    assume(room > num_facts * 6)
    prompt = recall_prompt(
        np.random.default_rng(seed),
        lines,
        np.full(num_tokens, FILLER),
        num_facts=num_facts,
        first=first,
        distance=distance,
        exact=exact,
    )
    tokens = prompt.tokens.tolist()
    facts, questions = read(remember, tokens), read(recall, tokens)
    assert len(tokens) == num_tokens
    assert len(facts) == len(questions) == num_facts
    value_of = {key: (where + 1, value) for where, key, value in facts}
    assert len(value_of) == num_facts
    assert min(where for where, _, _ in facts) - len(remember) >= first
    assert sorted(prompt.answers) == [where + 1 for where, _, _ in questions]
    for where, key, value in questions:
        said_at, said = value_of[key]
        assert value == said
        gap = where + 1 - said_at
        assert gap == distance if exact else gap >= distance
    words = [token for token in tokens if token in WORDS]
    assert len(set(words)) == 2 * num_facts  # no value is a key, no word comes twice
    filler = [token == FILLER for token in tokens]
    assert prompt.is_filler.tolist() == filler


def test_prompts_follow_from_the_seed():
    lines = RecallLines(remember=REMEMBER, recall=RECALL, end=END, words=WORDS)

    def tokens(seed: int) -> list[int]:
        prompt = recall_prompt(
            np.random.default_rng(seed), lines, np.full(200, FILLER),
            num_facts=5, first=0, distance=50,
        )  # fmt: skip
        return prompt.tokens.tolist()

    assert tokens(1) == tokens(1) != tokens(2)


def test_facts_that_do_not_fit_are_an_error():
    lines = RecallLines(remember=REMEMBER, recall=RECALL, end=END, words=WORDS[:8])
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="num_facts: expected at most 4, got 5"):
        recall_prompt(rng, lines, np.full(900, FILLER), num_facts=5, first=0, distance=9)
    for exact in (False, True):
        with pytest.raises(ConfigError, match="num_tokens: expected room for 4 facts of 6 tokens"):
            recall_prompt(
                rng, lines, np.full(60, FILLER), num_facts=4, first=3, distance=20, exact=exact
            )
