"""vLLM's own models with the weights that mrv1 makes up: both engines have one model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM's Python files: make full-vllm", allow_module_level=True)

import torch
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader

from mrv1 import LLM, ConfigError
from mrv1.headwise import FULL, HeadPolicy
from mrv1.integrations.vllm import plugin
from mrv1.integrations.vllm.made_up_weights import LOAD_FORMAT, MadeUpWeights
from mrv1.kernels.registry import select_ops
from mrv1.models import checkpoint_tensors, load_model
from mrv1.models.architectures import ARCHITECTURES
from tests.integrations.vllm.serving import Engine, own_tokens
from tests.integrations.vllm.test_head_wise import new_config
from tests.models.families import EXPERTS, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore")


def config_alone(folder: Path, family: str, **settings: object) -> None:
    """Write a ``config.json`` and nothing else."""
    names = [name for name, each in ARCHITECTURES.items() if each.model_type == family]
    tiny_config(family, **settings, architectures=names).save_pretrained(folder)


@pytest.mark.parametrize("family", ["llama", *EXPERTS])
def test_every_tensor_of_a_checkpoint_is_made_up_as_mrv1_does(tmp_path, family):
    config_alone(tmp_path, family)
    plugin.register()
    loader = get_model_loader(LoadConfig(load_format=LOAD_FORMAT))
    assert type(loader) is MadeUpWeights
    found: dict[str, torch.Tensor] = {}
    model = SimpleNamespace(
        parameters=lambda: iter([torch.zeros(1)]), load_weights=lambda each: found.update(each)
    )
    loader.load_weights(model, SimpleNamespace(model=str(tmp_path), dtype=torch.bfloat16))
    own = load_model(
        tmp_path, device="cpu", dtype=torch.bfloat16, ops=select_ops("reference"),
        load_format="dummy",
    )  # fmt: skip
    expected = checkpoint_tensors(own.config, own.weights)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_a_model_of_vllm_has_the_tokens_of_mrv1(tmp_path):
    config_alone(tmp_path, "llama")
    config = new_config(tmp_path, HeadPolicy(((FULL, FULL),) * 2))
    config.load_config.load_format = LOAD_FORMAT
    engine, prompt = Engine(config), [*range(5, 30)]
    engine.add("r", prompt, max_tokens=12)
    engine.finish()
    engine.close()
    options = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 40}
    with LLM(str(tmp_path), load_format="dummy", **options) as llm:
        assert engine.tokens("r") == own_tokens(llm, prompt, max_tokens=12)


def test_weights_that_are_kept_in_another_way_are_refused(tmp_path):
    """Gemma's norms are stored as w and kept as 1 + w: made-up norms would be others."""
    names = [name for name, each in ARCHITECTURES.items() if each.model_type == "gemma2"]
    tiny_config("gemma2", architectures=names).save_pretrained(tmp_path)
    loader = get_model_loader(LoadConfig(load_format=LOAD_FORMAT))
    model = SimpleNamespace(
        parameters=lambda: iter([torch.zeros(1)]), load_weights=lambda each: dict(each)
    )
    with pytest.raises(ConfigError, match="made-up tensors: expected a model that is kept as it"):
        loader.load_weights(model, SimpleNamespace(model=str(tmp_path), dtype=torch.float32))
