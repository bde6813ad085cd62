"""The embedded checkpoint: its size, its tokenizer, its recall and its loss on text.

Measured with transformers alone, on recall prompts that are built here from text, so no error in
mrv1 or in the code that trained the weights can make these tests pass.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "mrv1" / "models" / "tiny"
CORPUS = ROOT / "training" / "data" / "tinyshakespeare.txt"
RESULTS = ROOT / "benchmarks" / "results" / "tiny_model.json"
MAX_BYTES = 12_000_000
RECALL_BAR = 0.95  # at RECALL_DISTANCE
RECALL_DISTANCE = 1024  # tokens from the fact's value to the answer
# Uniform guessing costs log(2048) = 7.6 nats a token; the whole held-out text is in RESULTS.
MAX_TEXT_LOSS = 4.1
WORDS = ["crown", "soldier", "womb", "pride", "widow", "golden", "measure", "noise", "prisoner"]
WORDS += [
    "letters",
    "ladies",
    "steel",
    "knees",
    "glory",
    "clouds",
    "victory",
    "citizens",
    "chance",
]
SPECIAL_TOKEN = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def held_out_text() -> str:
    text = CORPUS.read_text(encoding="utf-8")
    return text[text.index("\n\n", len(text) * 9 // 10) + 2 :]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(RESULTS.read_text())
    return loaded


# --- files ---


def test_the_checkpoint_is_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= MAX_BYTES


def test_the_model_has_several_layers_and_grouped_heads() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["num_hidden_layers"] >= 4
    assert config["num_key_value_heads"] >= 4
    assert config["num_attention_heads"] > config["num_key_value_heads"]
    assert 1000 <= config["vocab_size"] <= 4000
    assert config["max_position_embeddings"] >= 2048


def test_weights_are_finite_bfloat16(model: PreTrainedModel) -> None:
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert set(tensors) == set(model.state_dict()) - {"lm_head.weight"}  # tied


# --- tokenizer ---


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@example(text=" leading, trailing \n\n\t tabs\r\n ")
@example(text="\u00e9 e\u0301 \u65e5\u672c \U0001f642 1234")  # composed and decomposed alike
@example(text="ROMEO:\nO, she doth teach the torches to burn bright!\n\nJULIET:\n'Tis")
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokenizer_is_the_same_in_transformers(tokenizer: Tokenizer, held_out_text: str) -> None:
    theirs = AutoTokenizer.from_pretrained(CHECKPOINT)
    text = held_out_text[:3000] + " \u00fcber 123\n"
    ids = tokenizer.encode(text).ids
    assert theirs(text).input_ids == ids
    assert theirs.decode(ids) == text
    assert theirs.eos_token == theirs.convert_ids_to_tokens(theirs.eos_token_id) == SPECIAL_TOKEN


def test_each_digit_is_one_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("1597").tokens == ["1", "5", "9", "7"]


def test_tokenizer_and_model_share_the_vocabulary(
    tokenizer: Tokenizer, model: PreTrainedModel
) -> None:
    assert tokenizer.get_vocab_size() == model.config.vocab_size
    assert tokenizer.token_to_id(SPECIAL_TOKEN) == model.config.eos_token_id
    assert model.generation_config.eos_token_id == model.config.eos_token_id


# --- recall and loss on text ---


def _recall_prompt(
    tokenizer: Tokenizer, text: str, rng: random.Random
) -> tuple[torch.Tensor, int]:
    """Return a prompt that asks for its first fact after eight others, and the answer."""

    def encode(line: str) -> list[int]:
        return tokenizer.encode(line).ids

    filler = encode(text[rng.randrange(len(text) - 12_000) :][:12_000])
    words = rng.sample(WORDS, 18)
    facts = [
        encode(f"\nREMEMBER: {key} {value}.\n")
        for key, value in zip(words[::2], words[1::2], strict=True)
    ]
    question = encode(f"\nRECALL: {words[0]}")
    (answer,) = encode(f" {words[1]}")
    fact_end = facts[0].index(answer)
    length = RECALL_DISTANCE - (len(facts[0]) - fact_end - 1) - len(question) - 1
    between: list[int] = []
    for fact in facts[1:]:
        between += filler[100 + len(between) :][:90] + fact
    between += filler[100 + len(between) :][: length - len(between)]
    prompt = filler[:50] + facts[0] + between + question
    assert len(prompt) - (50 + fact_end) == RECALL_DISTANCE
    return torch.tensor(prompt), answer


@pytest.mark.parametrize("num_prompts", [10, pytest.param(20, marks=pytest.mark.full)])
@torch.inference_mode()
def test_the_model_recalls_a_fact_from_1024_tokens_back(
    model: PreTrainedModel, tokenizer: Tokenizer, held_out_text: str, num_prompts: int
) -> None:
    rng = random.Random(0)
    prompts, answers = zip(
        *(_recall_prompt(tokenizer, held_out_text, rng) for _ in range(num_prompts)), strict=True
    )
    logits = model(torch.stack(prompts), use_cache=False, logits_to_keep=1).logits[:, -1]
    correct = logits.argmax(dim=-1) == torch.tensor(answers)
    assert correct.float().mean() >= 0.9


@torch.inference_mode()
def test_the_model_predicts_held_out_text(
    model: PreTrainedModel, tokenizer: Tokenizer, held_out_text: str
) -> None:
    window = torch.tensor(tokenizer.encode(held_out_text).ids[:8192]).view(4, 2048)
    logits = model(window, use_cache=False).logits[:, :-1]
    loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    assert loss <= MAX_TEXT_LOSS


# --- the results file ---


def test_results_reach_the_required_recall_and_loss(results: dict[str, Any]) -> None:
    recall = results["recall"]
    assert recall["trials_per_distance"] >= 1000
    assert recall["accuracy"][str(RECALL_DISTANCE)] >= RECALL_BAR
    assert results["validation"]["loss_nats_per_token"] <= MAX_TEXT_LOSS


def test_results_name_their_conditions(results: dict[str, Any]) -> None:
    assert isinstance(results["seed"], int)
    assert all(results["environment"][key] for key in ("device", "torch", "transformers"))
    assert results["num_parameters"] > 4_000_000
    assert results["selected_step"] in [entry["step"] for entry in results["curve"]]
