"""Models with experts through vLLM's engine give the tokens of mrv1's own engine."""

from __future__ import annotations

import random
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM's Python files: make full-vllm", allow_module_level=True)

import torch
import vllm
from vllm.platforms import current_platform

from mrv1 import ConfigError
from mrv1.config import checkpoint_dir
from mrv1.integrations.vllm.options import engine_config
from tests.integrations.vllm.serving import Engine, new_config, new_llm, own_tokens
from tests.models.families import EXPERTS, random_model, save_checkpoint, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def _platform():
    """Let vLLM's threads choose a device, as they do on a GPU; it knows no platform here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(current_platform), "set_device", classmethod(lambda *_: None), raising=False
        )
        yield


def checkpoint(folder: Path, family: str, *, seed: int = 0) -> str:
    """Write a tiny random checkpoint with a tokenizer, which vLLM wants; return its folder."""
    save_checkpoint(folder, tiny_config(family), seed=seed)
    for file in checkpoint_dir("tiny").glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


def check_tokens(engine: Engine, llm, *, num_requests: int = 8) -> None:
    """Check requests that share a prefix, arrive in the midst of others, and are preempted."""
    rng = random.Random(5)
    shared = [rng.randrange(160) for _ in range(40)]
    requests: dict[str, list[int]] = {}
    while len(requests) < num_requests or engine.engine.has_unfinished_requests():
        if len(requests) < num_requests and rng.random() < 0.5:
            own = [rng.randrange(160) for _ in range(rng.randint(1, 50))]
            name = f"{len(engine.outputs)}-{len(requests)}"
            requests[name] = shared + own if rng.random() < 0.5 else own
            engine.add(name, requests[name], max_tokens=20)
        engine.step()
    engine.finish()
    for name, prompt in requests.items():
        assert engine.tokens(name) == own_tokens(llm, prompt, max_tokens=20)


@pytest.mark.parametrize("family", EXPERTS)
def test_every_family(tmp_path, family):
    model = checkpoint(tmp_path, family)
    with new_llm(model) as llm:
        engine = Engine(new_config(model=model, asynchronous=True, num_blocks=13))
        try:
            check_tokens(engine, llm)
            assert engine.num_preempted
            assert engine.num_cached_tokens
        finally:
            engine.close()


def test_an_fp8_cache_with_a_scale_for_each_token(tmp_path):
    model = checkpoint(tmp_path, "ernie4_5_moe")
    with new_llm(model, kv_cache_dtype="fp8_e4m3") as llm:
        engine = Engine(new_config(model=model, cache_dtype="fp8_per_token_head"))
        try:
            engine.add("fp8", [*range(60)], max_tokens=20)
            engine.finish()
            assert engine.tokens("fp8") == own_tokens(llm, [*range(60)], max_tokens=20)
        finally:
            engine.close()


def test_weights_sleep_and_are_reloaded_under_both_kinds_of_names(tmp_path):
    """One tensor for each expert, as on disk, and a layer's experts fused, as in memory."""
    model = checkpoint(tmp_path / "a", "qwen3_moe")
    other = checkpoint(tmp_path / "b", "qwen3_moe", seed=5)
    engine = Engine(new_config(model=model))
    call = engine.engine.collective_rpc
    fused = random_model(tiny_config("qwen3_moe"), seed=5).state_dict()
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    try:
        with new_llm(model) as llm, new_llm(other) as llm_of_other:
            engine.engine.sleep(1)
            engine.engine.wake_up()
            check_tokens(engine, llm, num_requests=2)
            for arguments, expected in (
                ({"weights_path": other}, llm_of_other),
                ({}, llm),
                ({"weights_iterator": list(fused.items())}, llm_of_other),
            ):
                call("reload_weights", kwargs=arguments)
                engine.core.reset_prefix_cache()
                check_tokens(engine, expected, num_requests=2)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("ernie4_5_moe", 2),
        ("qwen3_moe", 4),  # of 2 KV heads: pairs of ranks have the same one
    ],
)
def test_several_ranks(tmp_path, family, ranks):
    model = checkpoint(tmp_path, family)
    with new_llm(model) as llm:
        engine = Engine(new_config(model=model, asynchronous=True, num_blocks=13, ranks=ranks))
        try:
            check_tokens(engine, llm)
            assert engine.num_preempted
        finally:
            engine.close()


def test_batch_invariant_ranks_are_deterministic(tmp_path, monkeypatch):
    model = checkpoint(tmp_path, "ernie4_5_moe")
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    with new_llm(model, deterministic=True) as llm:
        engine = Engine(new_config(model=model, ranks=2))
        try:
            assert engine.on_ranks(lambda worker: worker._runner.model.deterministic) == [True] * 2
            check_tokens(engine, llm, num_requests=3)
        finally:
            engine.close()


def test_whole_experts_on_a_rank_are_refused():
    config = new_config(ranks=2)
    config.parallel_config.enable_expert_parallel = True
    with pytest.raises(ConfigError, match="enable_expert_parallel: expected False"):
        engine_config(config, torch.device("cpu"))
