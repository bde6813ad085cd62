"""Slots of adapters in vLLM's worker, whose requests are idle while vLLM schedules others."""

from __future__ import annotations

from typing import cast

import pytest

from mrv1 import ConfigError, EngineConfig, LoRARequest
from mrv1.engine.adapters import LoadedAdapter
from mrv1.integrations.vllm.adapters import WorkerAdapters
from mrv1.models.lora import StoredAdapter
from mrv1.runner import ModelRunner


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> WorkerAdapters:
    """Return those of a worker with two slots; requests ask for names."""
    config = EngineConfig(model="none", enable_lora=True, max_loras=2)
    worker = WorkerAdapters(config, cast(ModelRunner, None))
    known: dict[str, LoadedAdapter] = {}

    def adapter_of(name: str) -> LoadedAdapter:
        request = LoRARequest(name, 1 + len(known))
        stored = StoredAdapter(name=name, parts={})
        return known.setdefault(name, LoadedAdapter(request, stored, name.encode()))

    monkeypatch.setattr(worker, "_adapter_of", adapter_of)
    return worker


def test_only_the_requests_of_one_slot_lose_it(adapters: WorkerAdapters) -> None:
    entered = [adapters.enter(each, each[0], {"a1", "a2", "b1"}) for each in ("a1", "a2", "b1")]
    assert entered == [0, 0, 1]
    assert adapters.enter("c1", "c", {"a2", "c1"}) == 1  # a2 runs: a's slot is in use
    assert adapters.restore({"a1", "a2", "c1"}) == {}
    with pytest.raises(ConfigError, match="at most max_loras adapters in a step"):
        adapters.restore({"b1", "a1", "c1"})
    adapters.leave("b1")
    assert adapters.restore({"b1", "c1"}) == {}  # another request of this name
    with pytest.raises(ConfigError, match="at most max_loras adapters in a step"):
        adapters.enter("e1", "e", {"a1", "c1", "e1"})


def test_a_request_that_is_scheduled_again_gets_a_slot_back(adapters: WorkerAdapters) -> None:
    for each in ("a1", "a2", "b1"):
        adapters.enter(each, each[0], {"a1", "a2", "b1"})
    assert adapters.enter("c1", "c", {"b1", "c1"}) == 0  # neither a1 nor a2 runs
    assert adapters.restore(["a2", "a1", "c1"]) == {"a2": 1, "a1": 1}  # b1 does not run
    assert adapters.restore(["a2", "a1", "c1"]) == {}
    assert adapters.restore(["b1", "c1"]) == {"b1": 1}
    loads = dict(adapters._slots.take_loads())
    assert {slot: each.request.lora_name for slot, each in loads.items()} == {0: "c", 1: "b"}
    assert adapters.restore(["a1"]) == {"a1": 0}


def test_a_pinned_adapter_keeps_its_slot(
    adapters: WorkerAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters.enter("a1", "a", {"a1", "b1"})
    adapters.enter("b1", "b", {"a1", "b1"})
    monkeypatch.setattr(adapters._loaded, "get", lambda _: adapters._adapter_of("a"))
    adapters.pin(1)
    assert adapters.enter("c1", "c", {"c1"}) == 1
    assert adapters.restore({"a1", "c1"}) == {}
