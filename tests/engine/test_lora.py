"""Requests with LoRA adapters, against models whose weights have the adapter's products added."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from mrv1 import LLM, AsyncLLM, LoRARequest, RequestError, SamplingParams
from mrv1.engine.request import Request
from mrv1.models import Checkpoint
from mrv1.models.lora import StoredAdapter
from tests.models.adapters import merge, write_tiny
from tests.models.families import save_checkpoint, tiny_checkpoint, tiny_config

OPTIONS = {"device": "cpu", "dtype": "float64", "num_kv_blocks": 64, "max_model_len": 128,
           "max_num_seqs": 8}  # fmt: skip
PROMPTS = [[(7 * i + shift) % 160 for i in range(20)] for shift in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TARGETS = {"a": ("q_proj", "v_proj", "down_proj"), "b": ("k_proj", "o_proj", "gate_proj"),
           "c": ("up_proj",)}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("base")
    save_checkpoint(path, tiny_config("qwen2", dtype="float64"))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        name: write_tiny(tmp_path_factory.mktemp(name), *targets, rank=index + 2, seed=index)
        for index, (name, targets) in enumerate(TARGETS.items())
    }


@pytest.fixture(scope="module")
def requests(folders) -> dict[str, LoRARequest]:
    return {name: LoRARequest(name, n, path) for n, (name, path) in enumerate(folders.items(), 1)}


def tokens(llm: LLM, prompts: list[list[int]], lora_request: object = None) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=lora_request)
    assert all(output.error is None for output in outputs), outputs
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(base, folders, tmp_path_factory) -> dict[str | None, list[list[int]]]:
    """Tokens of each prompt by the model alone, and by each adapter's merged weights."""
    found: dict[str | None, list[list[int]]] = {}
    for name in (None, *folders):
        path = base
        if name is not None:
            path = merge(base, folders[name], tmp_path_factory.mktemp("merged"))
        with LLM(str(path), **OPTIONS) as llm:
            found[name] = tokens(llm, PROMPTS)
    assert len({str(each) for each in found.values()}) == 4, "adapters change what is drawn"
    return found


@pytest.fixture
def llm(base):
    with LLM(str(base), enable_lora=True, max_loras=2, **OPTIONS) as llm:
        yield llm


def test_one_batch_has_every_adapter(llm, requests, expected):
    """More adapters than slots; the same prompts, whose blocks are cached for each alone."""
    names = [None, "a", "b", "c"]
    prompts = [prompt for prompt in PROMPTS for _ in names]
    asked = [name and requests[name] for _ in PROMPTS for name in names]
    for _ in range(2):  # the second time with cached prefixes
        found = tokens(llm, prompts, asked)
        for row, output in enumerate(found):
            assert output == expected[names[row % 4]][row // 4]
    assert llm.list_loras() == {1, 2, 3}
    assert tokens(llm, PROMPTS) == expected[None]
    assert "room for 2 LoRA adapters of rank 16" in llm.describe()


def test_adapters_come_and_go_while_requests_run(llm, requests, expected):
    assert llm.add_lora(requests["a"])
    assert not llm.add_lora(requests["a"])
    ids = [llm.add_request(p, GREEDY, lora_request=LoRARequest("a", 1)) for p in PROMPTS]
    llm.step()
    assert llm.remove_lora(1)  # its requests go on
    assert not llm.remove_lora(1)
    assert llm.add_lora(requests["b"])
    assert llm.pin_lora(2)
    found = {}
    while llm.has_unfinished_requests():
        found |= {o.request_id: o.outputs[0].token_ids for o in llm.step() if o.finished}
    assert [found[each] for each in ids] == expected["a"]
    assert tokens(llm, PROMPTS, requests["b"]) == expected["b"]
    assert tokens(llm, PROMPTS, requests["c"]) == expected["c"]
    with pytest.raises(RequestError, match="expected the number of a loaded adapter, got 1"):
        llm.pin_lora(1)


def test_requests_made_before_their_adapter_is_added_share_it(base, requests):
    """As those of an event loop: each has read the folder, or found what is then removed."""
    params = SamplingParams(n=2, max_tokens=2)
    with LLM(str(base), enable_lora=True, max_loras=1, **OPTIONS) as llm:
        core = llm.engine

        def make(name: str) -> Request:
            return core.maker.make(name, PROMPTS[0], params, lora_request=requests["a"])

        made = [make(name) for name in "xy"]
        for request in made:
            core.queue(request)
        family = [each for request in made for each in (request, *request.followers)]
        adapter = core.adapters.get(1)
        assert {(each.adapter, each.cache_key) for each in family} == {(adapter, adapter.key)}
        made.append(make("z"))
        assert llm.remove_lora(1)
        core.queue(made[-1])
        assert made[-1].adapter is adapter
        assert llm.list_loras() == set()
        while core.has_unfinished_requests:
            core.step()
        assert [each.error for each in made] == [None] * 3


def test_a_wrong_adapter_fails_alone(llm, requests, expected, tmp_path):
    tiny_checkpoint(tmp_path / "other", "llama")
    write_tiny(tmp_path / "wide", "q_proj", rank=17)
    wrong = [LoRARequest("x", 9, tmp_path / "none"), LoRARequest("y", 8, tmp_path / "wide"), "a"]
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=[requests["a"], *wrong])
    assert outputs[0].outputs[0].token_ids == expected["a"][0]
    for output, message in zip(
        outputs[1:],
        ("expected a folder with adapter_config", "rank of at most 16", "None or a LoRARequest"),
        strict=True,
    ):
        assert message in str(output.error)
    with pytest.raises(RequestError, match="lora_request: expected one, or 4 for 4 prompts"):
        llm.generate(PROMPTS, GREEDY, lora_request=[None])
    assert llm.list_loras() == {1}
    assert tokens(llm, PROMPTS) == expected[None]


def test_an_adapter_that_cannot_be_written_fails_alone(llm, requests, expected, monkeypatch):
    runner = llm.engine.runner
    load = runner.load_adapter

    def load_or_fail(slot: int, adapter: StoredAdapter) -> None:
        if adapter.name == "b":
            raise torch.OutOfMemoryError("no memory")
        load(slot, adapter)

    adapters = [requests["a"], requests["b"], None, requests["b"]]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "load_adapter", load_or_fail)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=adapters)
    for output, name, row in zip(outputs, ("a", "b", None, "b"), range(4), strict=True):
        if name == "b":
            assert isinstance(output.error, RequestError)
            assert "lora_request: OutOfMemoryError('no memory')" in str(output.error)
        else:
            assert output.outputs[0].token_ids == expected[name][row]
    assert tokens(llm, PROMPTS, requests["b"]) == expected["b"]


def test_adapters_survive_sleep_and_new_weights(llm, requests, expected, base, folders):
    for level in (1, 2):
        assert tokens(llm, PROMPTS[:1], requests["a"]) == expected["a"][:1]
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(dict(Checkpoint.open(base).tensors()))
    assert tokens(llm, PROMPTS, requests["a"]) == expected["a"]
    assert tokens(llm, PROMPTS) == expected[None]


def test_preemption_gives_the_slot_back(base, requests, expected):
    """So few blocks that requests preempt each other, with one slot for two adapters."""
    options = OPTIONS | {"num_kv_blocks": 5}
    with LLM(str(base), enable_lora=True, max_loras=1, **options) as llm:
        asked = [requests["a"], requests["b"], requests["a"], None]
        found = tokens(llm, PROMPTS, asked)
    names = ["a", "b", "a", None]
    assert found == [expected[name][row] for row, name in enumerate(names)]


def test_an_engine_without_adapters_refuses_them(base, requests):
    with LLM(str(base), **OPTIONS) as llm:
        with pytest.raises(RequestError, match="expected enable_lora=True with it, got False"):
            llm.add_lora(requests["a"])
        assert "LoRA" not in llm.describe()


def test_tasks_of_an_event_loop(base, requests, expected):
    async def run() -> None:
        async with AsyncLLM(str(base), enable_lora=True, **OPTIONS) as llm:
            assert await llm.add_lora(requests["b"])
            assert await llm.list_loras() == {2}

            async def one(row: int, name: str | None) -> None:
                asked = name and requests[name]
                async for output in llm.generate(PROMPTS[row], GREEDY, lora_request=asked):
                    last = output
                assert last.outputs[0].token_ids == expected[name][row]

            await asyncio.gather(*(one(row, name) for row in (0, 1) for name in expected))
            with pytest.raises(RequestError, match="fewer pinned"):
                await llm.pin_lora(2)  # the only slot
            assert await llm.remove_lora(2)

    asyncio.run(run())


@pytest.mark.full
def test_ranks_have_their_parts(base, requests, expected):
    options = OPTIONS | {"tensor_parallel_size": 2, "dtype": "float32"}
    with LLM(str(base), enable_lora=True, max_loras=2, **options) as llm:
        names = ["a", "b", None, "c"]
        found = tokens(llm, PROMPTS, [name and requests[name] for name in names])
    assert found == [expected[name][row] for row, name in enumerate(names)]
