"""The embedded model's training: its data, its recall trials, the function that is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from training.corpus import CHECKPOINT_DIR, encode, load_split, split_speeches
from training.evaluate import recall_accuracy
from training.model import TinyModel
from training.recall import (
    NUM_DISTRACTORS,
    RECALLED,
    REPEATED,
    TEXT,
    RecallVocabulary,
    recall_row,
    recall_trial,
    repeat_row,
)

TOKENIZER = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
VOCABULARY = RecallVocabulary.from_tokenizer(TOKENIZER)
HELD_OUT = encode(TOKENIZER, load_split()[1]).ids
SEEDS = st.integers(0, 2**32 - 1)


# --- corpus ---


def test_the_split_loses_no_text_and_has_no_overlap() -> None:
    train, held_out = load_split()
    assert train.endswith("\n\n")
    assert "".join(split_speeches(train)) == train
    assert 0.09 < len(held_out) / len(train + held_out) < 0.11


@pytest.mark.parametrize("merge_dropout", [0.0, 0.2])
def test_encoding_keeps_the_text(merge_dropout: float) -> None:
    text = load_split()[1][:20_000]
    encoded = encode(TOKENIZER, text, merge_dropout=merge_dropout)
    assert TOKENIZER.decode(encoded.ids.tolist()) == text
    whole = TOKENIZER.encode(text).ids
    assert (encoded.ids.tolist() == whole) == (merge_dropout == 0.0)
    speeches = np.split(encoded.ids, encoded.speech_starts[1:])
    assert [TOKENIZER.decode(ids.tolist()) for ids in speeches] == split_speeches(text)


# --- rows ---


@given(seed=SEEDS, num_lines=st.integers(1, 60), text_loss=st.booleans())
def test_every_recalled_value_was_stated_before(
    seed: int, num_lines: int, text_loss: bool
) -> None:
    rng = np.random.default_rng(seed)
    tokens, targets = recall_row(
        rng, VOCABULARY, HELD_OUT[:512], num_lines, max_distance=512, text_loss=text_loss
    )
    assert tokens.shape == targets.shape == (512,)
    assert (TEXT in targets) == text_loss
    facts = {}
    for at in np.flatnonzero(tokens == VOCABULARY.remember):
        key, value = tokens[at + 2 : at + 4]
        assert key not in facts
        facts[key] = (at + 3, value)
    answers = np.flatnonzero(targets == RECALLED)
    assert len(facts) + len(answers) == num_lines
    for at in answers:
        assert tokens[at - 3] == VOCABULARY.recall
        stated_at, value = facts[tokens[at - 1]]
        assert stated_at < at
        assert tokens[at] == value


@given(seed=SEEDS, max_period=st.integers(9, 200))
def test_every_repeated_token_can_be_copied(seed: int, max_period: int) -> None:
    tokens, targets = repeat_row(np.random.default_rng(seed), 2048, 400, max_period=max_period)
    for at in np.flatnonzero(targets == REPEATED):
        pair = tokens[at - 1 : at + 1]
        earlier = np.lib.stride_tricks.sliding_window_view(tokens[:at], 2)
        assert (earlier == pair).all(axis=1).any()


@given(seed=SEEDS, distance=st.integers(60, 1900))
def test_trial_asks_at_exactly_its_distance(seed: int, distance: int) -> None:
    trial = recall_trial(np.random.default_rng(seed), VOCABULARY, HELD_OUT[:2048], distance)
    context = trial.tokens[: trial.question_end + 1]
    (recall_at,) = np.flatnonzero(context == VOCABULARY.recall)
    facts = np.flatnonzero(context == VOCABULARY.remember)
    assert recall_at == trial.question_end - 2
    assert len(facts) == 1 + NUM_DISTRACTORS
    keys, values = context[facts + 2], context[facts + 3]
    assert (keys[0], values[0]) == (context[-1], trial.answer)
    assert len({*keys, *values}) == 2 * len(facts)
    assert trial.question_end + 1 - (facts[0] + 3) == distance


def test_accuracy_counts_right_answers() -> None:
    def first_stated_value(tokens: torch.Tensor) -> torch.Tensor:
        """Answer every question with the first fact's value: always right in a trial."""
        first = (tokens == VOCABULARY.remember).int().argmax(dim=1)
        answers = tokens[torch.arange(len(tokens)), first + 3]
        right = torch.nn.functional.one_hot(answers, 2048)
        right[0] = -right[0]  # wrong for the first trial of each batch
        return right[:, None].expand(-1, tokens.shape[1], -1)

    accuracy = recall_accuracy(
        first_stated_value,
        VOCABULARY,
        HELD_OUT,
        distance=100,
        num_trials=10,
        num_tokens=256,
        rows=5,
        seed=0,
        device=torch.device("cpu"),
    )
    assert accuracy == 0.8


# --- model ---


@torch.inference_mode()
def test_the_trained_function_is_qwen3() -> None:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    theirs = Qwen3ForCausalLM(config).eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)  # norm weights differ from 1 too
    ours = TinyModel(config, dropout=0.5).eval()
    state = theirs.state_dict()
    del state["lm_head.weight"]
    ours.load_state_dict(state)
    ids = torch.randint(64, (2, 100))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
