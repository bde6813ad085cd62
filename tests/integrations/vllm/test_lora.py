"""vLLM's LoRA requests in mrv1's worker, against models with the adapter's products merged."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM's Python files: make full-vllm", allow_module_level=True)

from vllm.lora.request import LoRARequest

from mrv1 import LLM, ConfigError, RequestError, SamplingParams
from mrv1.integrations.vllm.options import engine_config
from tests.integrations.vllm.serving import MAX_MODEL_LEN, Engine, new_config
from tests.models.adapters import merge, write_tiny
from tests.models.families import save_checkpoint, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore")

TARGETS = {"a": ("q_proj", "down_proj"), "b": ("o_proj", "gate_proj"), "c": ("up_proj",)}
PROMPTS = [[(7 * i + shift) % 160 for i in range(20)] for shift in range(3)]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("base")
    save_checkpoint(path, tiny_config("qwen2", dtype="float64"))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        name: write_tiny(tmp_path_factory.mktemp(name), *targets, seed=seed)
        for seed, (name, targets) in enumerate(TARGETS.items())
    }


@pytest.fixture(scope="module")
def expected(base, folders, tmp_path_factory) -> dict[str | None, list[list[int]]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = {}
    for name in (None, *folders):
        path = base if name is None else merge(base, folders[name], tmp_path_factory.mktemp("m"))
        with LLM(
            str(path), device="cpu", dtype="float64", num_kv_blocks=64, max_model_len=MAX_MODEL_LEN
        ) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found[name] = [list(output.outputs[0].token_ids) for output in outputs]
    return found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_batch_has_the_adapters_of_its_requests(base, folders, expected, asynchronous):
    """More adapters than ``max_loras``: vLLM's scheduler lets the others wait."""
    config = new_config(model=str(base), max_loras=2, asynchronous=asynchronous)
    requests = {n: LoRARequest(n, i, str(path)) for i, (n, path) in enumerate(folders.items(), 1)}
    engine = Engine(config)
    try:
        assert engine.engine.collective_rpc("add_lora", args=(requests["a"],)) == [True]
        assert engine.engine.collective_rpc("list_loras") == [{1}]
        for row, prompt in enumerate(PROMPTS):
            for name in expected:
                engine.add(
                    f"{row} {name}", prompt, max_tokens=NUM_TOKENS, lora_request=requests.get(name)
                )
        engine.finish()
        for name, rows in expected.items():
            for row, tokens in enumerate(rows):
                assert list(engine.outputs[f"{row} {name}"].outputs[0].token_ids) == tokens
        assert engine.engine.collective_rpc("list_loras") == [{1, 2, 3}]
        assert engine.engine.collective_rpc("pin_lora", args=(2,)) == [True]
        assert engine.engine.collective_rpc("remove_lora", args=(2,)) == [True]
        assert engine.engine.collective_rpc("remove_lora", args=(2,)) == [False]
        with pytest.raises(RequestError, match="expected a folder with adapter_config"):
            engine.engine.collective_rpc("add_lora", args=(LoRARequest("x", 9, "none"),))
        engine.add("after", PROMPTS[0], max_tokens=NUM_TOKENS)
        engine.finish()
        assert list(engine.outputs["after"].outputs[0].token_ids) == expected[None][0]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("option", "value"),
    [("target_modules", ["q_proj"]), ("enable_tower_connector_lora", True),
     ("default_mm_loras", {"image": "x"}), ("lora_dtype", "other")],
)  # fmt: skip
def test_options_of_adapters_that_are_refused(base, option, value):
    config = new_config(model=str(base), max_loras=2)
    object.__setattr__(config.lora_config, option, value)
    with pytest.raises(ConfigError, match=f"{option}: expected"):
        engine_config(config, "cpu")
