"""LoRA adapters on the host: slots of the device, names and numbers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mrv1 import EngineConfig, LoRARequest, RequestError
from mrv1.engine.adapters import Adapters, AdapterSlots
from mrv1.models import ModelConfig
from tests.engine.scheduler_model import (
    ADAPTERS,
    drain,
    make_request,
    make_runner,
    make_scheduler,
    prompt_of,
)
from tests.models.adapters import write_tiny
from tests.models.families import tiny_checkpoint


def test_a_request_without_an_adapter_needs_no_slot():
    slots = AdapterSlots(0)
    assert (slots.find(None), slots.enter(-1, None), slots.leave(-1)) == (-1, -1, -1)
    assert slots.find(ADAPTERS[0]) is None


def test_an_adapter_keeps_its_slot_until_another_one_needs_it():
    a, b, c, _ = ADAPTERS
    slots = AdapterSlots(2)
    for slot, each in ((0, a), (1, b), (0, a)):  # ``a`` twice
        assert slots.find(each) == slot
        slots.enter(slot, each)
    assert slots.take_loads() == [(0, a), (1, b)]
    assert slots.find(c) is None
    slots.leave(0)
    assert slots.find(c) is None
    slots.leave(0)
    slots.leave(1)
    assert slots.find(a) == 0  # still there
    slots.leave(slots.enter(0, a))
    assert slots.take_loads() == []
    assert slots.find(c) == 1  # ``b`` was used longest ago
    slots.leave(slots.enter(1, c))
    assert slots.take_loads() == [(1, c)]


def test_a_slot_that_changes_twice_before_a_step_is_written_once():
    a, b, *_ = ADAPTERS
    slots = AdapterSlots(1)
    slots.leave(slots.enter(0, a))
    slots.leave(slots.enter(0, b))
    assert slots.take_loads() == [(0, b)]


def test_a_pinned_adapter_keeps_its_slot():
    a, b, c, _ = ADAPTERS
    slots = AdapterSlots(2)
    slots.pin(a)
    with pytest.raises(RequestError, match=r"fewer pinned adapters than max_loras \(2\), got 2"):
        slots.pin(b)
    slots.leave(slots.enter(0, a))
    slots.leave(slots.enter(1, b))
    assert slots.find(c) == 1
    slots.drop(a)
    assert slots.find(c) == 0  # empty now


def test_a_dropped_adapter_stays_while_requests_have_it():
    a, b, *_ = ADAPTERS
    slots = AdapterSlots(1)
    slots.enter(0, a)
    slots.drop(a)
    assert slots.find(b) is None
    slots.leave(0)
    assert slots.find(b) == 0


def test_what_the_device_has_lost_is_written_again():
    slots = AdapterSlots(1)
    slots.leave(slots.enter(0, ADAPTERS[0]))
    slots.reset()
    assert slots.take_loads() == []
    slots.leave(slots.enter(slots.find(ADAPTERS[0]), ADAPTERS[0]))
    assert slots.take_loads() == [(0, ADAPTERS[0])]


def test_most_adapters_of_running_requests():
    """Six adapters' requests and two slots: later ones wait, in order, and all end."""
    scheduler = make_scheduler(max_loras=2, max_num_seqs=8, max_num_batched_tokens=64)
    runner = make_runner(scheduler)
    for index, adapter in enumerate([*ADAPTERS, None, *ADAPTERS[:2]]):
        request = make_request(str(index), prompt_of(4), adapter=adapter, max_tokens=3)
        scheduler.add(request)
        runner.adapters_of[request.req_id] = adapter
        runner.cache_keys[request.req_id] = request.cache_key
    first = scheduler.schedule()
    assert first.req_ids == ("0", "1")  # the third has to wait, and those behind it
    assert [each.adapter_slot for each in first.new] == [0, 1]
    runner.execute(first)
    scheduler.update(runner.result())
    plans = drain(scheduler, runner)
    assert not scheduler.has_unfinished_requests
    assert max(len({runner.adapters_of[r] for r in plan.req_ids} - {None}) for plan in plans) == 2


def test_equal_prompts_of_two_adapters_share_no_blocks():
    prompt = prompt_of(13)
    for other, hit in ((ADAPTERS[0], 12), (ADAPTERS[1], 0), (None, 0)):
        scheduler = make_scheduler(max_loras=2, enable_prefix_caching=True)
        runner = make_runner(scheduler)
        for name, adapter in (("one", ADAPTERS[0]), ("two", other)):
            request = make_request(name, prompt, adapter=adapter, max_tokens=2)
            scheduler.add(request)
            runner.adapters_of[name], runner.cache_keys[name] = adapter, request.cache_key
            drain(scheduler, runner)
        assert request.num_cached_tokens == hit


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("", 1, "x"), "lora_request: lora_name: expected a name, got ''"),
        ((3, 1, "x"), "lora_name: expected a name, got 3"),
        (("a", 0, "x"), "lora_int_id: expected an integer from 1 to 2147483647, got 0"),
        (("a", True, "x"), "lora_int_id: expected an integer from 1"),
        (("a", 1, None), "lora_path: expected a folder, got None"),
    ],
)
def test_wrong_fields_of_a_request(fields, message):
    with pytest.raises(RequestError, match=message):
        LoRARequest(*fields)


# --- names, numbers and folders ---------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(path, "llama")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("adapter"), "q_proj", "down_proj")


def adapters(base: Path, **options: object) -> Adapters:
    config = EngineConfig(model=str(base), **{"enable_lora": True} | options)
    model = SimpleNamespace(
        whole_config=ModelConfig.from_pretrained(base), device=torch.device("cpu")
    )
    return Adapters(config, SimpleNamespace(model=model))


def test_an_adapter_is_read_once_and_known_by_name_and_number(base, folder):
    loaded = adapters(base)
    asked = LoRARequest("a", 3, folder)
    first = loaded.prepared(asked)
    assert loaded.ids == set()  # ``prepared`` changes nothing
    assert loaded.add(first)
    assert not loaded.add(loaded.prepared(asked))
    assert loaded.ids == {3}
    for again in (asked, LoRARequest("a", 3), LoRARequest("a", 3, str(folder), "llama")):
        assert loaded.prepared(again) is first
    assert loaded.get(3) is first
    assert loaded.remove(3) is first
    assert loaded.remove(3) is None
    with pytest.raises(RequestError, match="expected the number of a loaded adapter, got 3"):
        loaded.get(3)
    assert loaded.prepared(asked).key != first.key  # the folder may have changed


@pytest.mark.parametrize(
    "other", [("a", 4), ("b", 3), ("a", 3, "elsewhere")], ids=["name", "number", "folder"]
)
def test_two_adapters_of_one_name(base, folder, other):
    loaded = adapters(base)
    loaded.add(loaded.prepared(LoRARequest("a", 3, folder)))
    with pytest.raises(RequestError, match="a name and a number that no other adapter has"):
        loaded.prepared(LoRARequest(*other))
    assert loaded.ids == {3}


def test_an_adapter_that_another_thread_has_added_meanwhile(base, folder):
    loaded = adapters(base)
    mine, other = (loaded.prepared(LoRARequest("a", 1, folder)) for _ in range(2))
    clash = loaded.prepared(LoRARequest("a", 2, folder))
    assert loaded.add(other)
    assert not loaded.add(mine)
    assert loaded.get(1) is other
    with pytest.raises(RequestError, match="that no other adapter has"):
        loaded.add(clash)


def test_what_is_no_adapter_of_the_model(base, folder, tmp_path):
    with pytest.raises(RequestError, match="expected enable_lora=True with it, got False"):
        adapters(base, enable_lora=False).prepared(LoRARequest("a", 1, folder))
    loaded = adapters(base, max_lora_rank=2)
    for asked, message in (
        ("a", "expected None or a LoRARequest, got 'a'"),
        (LoRARequest("a", 1), "lora_path: expected a folder, as no adapter has the number 1 yet"),
        (LoRARequest("a", 1, tmp_path), "adapter 'a' .*: expected a folder with adapter_config"),
        (LoRARequest("a", 1, folder), "rank of at most 2 .max_lora_rank., got 4; raise max_lora"),
    ):
        with pytest.raises(RequestError, match=message):
            loaded.prepared(asked)
    assert loaded.ids == set()
