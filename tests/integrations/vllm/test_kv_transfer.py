"""vLLM's KV connectors under the worker: what one engine stores, another loads."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM's Python files: make full-vllm", allow_module_level=True)

import torch
from vllm.config import KVTransferConfig

from mrv1 import ConfigError
from mrv1.integrations.vllm.kv_transfer import connector_view
from mrv1.integrations.vllm.options import engine_config
from mrv1.integrations.vllm.versions import interface
from tests.integrations.vllm import connectors
from tests.integrations.vllm.serving import Engine, new_config, new_llm, own_tokens

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = [(7 * i * i) % 200 for i in range(40)]
"""It fits one step of 48 tokens; its first 32 tokens are whole blocks."""


@pytest.fixture(scope="module")
def llm():
    with new_llm() as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_stored():
    connectors.STORE.clear()
    connectors.CALLS.clear()


def connected(*, asynchronous: bool = False, **options: Any) -> Engine:
    """Return an engine with a connector; ``options`` are those of ``KVTransferConfig``."""
    config = new_config(asynchronous=asynchronous)
    config.kv_transfer_config = KVTransferConfig(kv_role="kv_both", **options)
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    return Engine(config)


def in_memory(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "MemoryConnector",
        "kv_connector_module_path": connectors.__name__,
        "kv_connector_extra_config": extra,
    }


def serve(options: dict[str, Any], *names: str, asynchronous: bool = False) -> dict[str, Any]:
    """Run one request after another in a new engine; return their outputs and tokens computed."""
    engine, found = connected(asynchronous=asynchronous, **options), {}
    counts: list[int] = []
    execute = engine.worker.execute_model

    def counted(output: Any) -> Any:
        counts.append(output.total_num_scheduled_tokens)
        return execute(output)

    engine.worker.execute_model = counted
    for name in names:
        engine.add(name, PROMPT, max_tokens=10)
        engine.finish()
        found[name] = engine.tokens(name), sum(counts)
        counts.clear()
    engine.step()  # the last transfers end in a step without tokens
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == 63
    engine.close()
    return found


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_vllms_example_connector_stores_in_one_engine_and_loads_in_another(
    llm, tmp_path: Path, asynchronous: bool
):
    options = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    expected = own_tokens(llm, PROMPT, max_tokens=10)
    assert serve(options, "first", asynchronous=asynchronous)["first"][0] == expected
    assert [*tmp_path.rglob("*.safetensors")]
    tokens, num_computed = serve(options, "second", asynchronous=asynchronous)["second"]
    assert tokens == expected
    assert num_computed <= 8 + 10


@pytest.mark.parametrize("is_async", [False, True])
def test_loads_and_sends_that_outlast_a_step(llm, is_async: bool):
    """A request that awaits its load is not scheduled; blocks are freed when they are sent."""
    expected = own_tokens(llm, PROMPT, max_tokens=10)
    assert serve(in_memory(is_async=is_async), "first")["first"] == (expected, 40 + 9)
    for stored in connectors.STORE.values():
        assert stored.isfinite().all()
    assert serve(in_memory(is_async=is_async), "second")["second"] == (expected, 8 + 9)
    # Other keys and values give other tokens, so those above were the loaded ones.
    connectors.STORE |= {key: -stored for key, stored in connectors.STORE.items()}
    assert serve(in_memory(is_async=is_async), "third")["third"][0] != expected


def test_a_step_loads_before_its_layers_and_saves_each_after_its_write(llm):
    engine = connected(**in_memory())
    num_layers = engine.worker._runner.spec.num_layers
    engine.add("r", PROMPT, max_tokens=3)
    engine.finish()
    layers = [str(layer) for layer in range(num_layers)]
    step = ["load", *(f"wait {layer}" for layer in layers),
            *(f"save {layer}" for layer in layers), "saved", "finished"]  # fmt: skip
    if interface().resolves_kv_layout:  # vLLM 0.33 starts loads that no request awaits last
        step = [*step[1:-2], "load", *step[-2:]]
    assert connectors.CALLS[: 3 * len(step)] == step * 3
    engine.close()


def test_a_request_whose_load_failed_fails_alone(llm):
    serve(in_memory(), "first")
    engine = connected(**in_memory(fails=True))
    other = [3, 4, 5]
    engine.add("other", other, max_tokens=12)
    engine.step()
    engine.add("bad", PROMPT, max_tokens=12)
    engine.finish()
    assert engine.outputs["bad"].outputs[0].finish_reason == "error"
    assert engine.tokens("other") == own_tokens(llm, other, max_tokens=12)
    with pytest.raises(ConfigError, match="sleep: expected no KV connector"):
        engine.worker.sleep()
    assert engine.worker.get_kv_connector_handshake_metadata() is None
    engine.close()


def test_connectors_index_the_elements_that_kernels_wrote():
    with new_llm() as llm:
        (cache, *_) = llm.engine.runner.kv_cache.layers
        view = connector_view(cache)
        cache.k.copy_(torch.arange(cache.k.numel()).view(cache.k.shape))
        cache.v.copy_(-cache.k)
        block, offset = torch.tensor([5, 9]), torch.tensor([3, 15])
        found = view[block, :, offset]  # as vLLM's example connector does
        k, v = cache.k[block, :, offset], cache.v[block, :, offset]
        assert torch.equal(found, torch.stack([k, v], 1))
        view[block, :, offset] = 7
        assert (cache.v[block, :, offset] == 7).all()
        assert (cache.v == 7).sum() == found.numel() // 2


@pytest.mark.parametrize(
    ("options", "cache", "message"),
    [
        ({"kv_connector": "NixlConnector"}, {}, "kv_connector: expected one of"),
        (in_memory() | {"kv_load_failure_policy": "recompute"}, {}, "kv_load_failure_policy: exp"),
        (in_memory(), {"cache_dtype": "fp8_per_token_head"}, "kv_cache_dtype: expected 'auto' w"),
    ],
)
def test_what_connectors_cannot_do_is_refused_by_name(options: dict, cache: dict, message: str):
    config = new_config(**cache)
    config.kv_transfer_config = KVTransferConfig(kv_role="kv_both", **options)
    with pytest.raises(ConfigError, match=message):
        engine_config(config, torch.device("cpu"))
