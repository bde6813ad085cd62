"""Ranks sleep, wake up and take new weights together: on all of them, or on none."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mrv1 import LLM, AsyncLLM, CapacityError, ConfigError, ModelRunner, SamplingParams
from mrv1.runner.ranks import control, parallel_runner
from mrv1.runner.ranks.shared_memory import SharedMemory
from mrv1.runner.sleep import SleepMode
from tests.models.families import random_model, tiny_checkpoint, tiny_config
from tests.thread_ranks import ThreadRanks

PROMPTS = [[5, 9, 23, 41, 77] * 8, [11, 30]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
VOCAB = 163
"""Tokens that no number of ranks divides."""
SIZES = [2, pytest.param(4, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)]
"""Numbers of ranks; 4 and 8 are more than the KV heads."""

Weights = dict[str, torch.Tensor]


def settings_of(*, tied: bool = False) -> dict[str, object]:
    return HEADS | {"vocab_size": VOCAB, "tie_word_embeddings": tied}


def make_llm(path: Path, size: int, **options: object) -> LLM:
    settings = {"dtype": "float64", "num_kv_blocks": 40, "max_num_seqs": 4, "max_model_len": 128}
    return LLM(
        str(path), device="cpu", tensor_parallel_size=size, use_tqdm_on_load=False,
        **(settings | options),
    )  # fmt: skip


def new_weights(seed: int, *, tied: bool = False) -> Weights:
    return random_model(tiny_config("qwen3", **settings_of(tied=tied)), seed=seed).state_dict()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[[bool], Path]:
    """Return a function that returns a checkpoint, with a tied head or one of its own."""
    made: dict[bool, Path] = {}
    for tied in (False, True):
        made[tied] = tmp_path_factory.mktemp("qwen3")
        tiny_checkpoint(made[tied], "qwen3", **settings_of(tied=tied))
    return made.__getitem__


@pytest.fixture
def on_threads(monkeypatch) -> None:
    monkeypatch.setattr(parallel_runner, "Ranks", ThreadRanks)


@pytest.fixture(scope="module")
def engines(checkpoint) -> Iterator[tuple[LLM, LLM]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_runner, "Ranks", ThreadRanks)
        one, several = (make_llm(checkpoint(False), size) for size in (1, 2))
    with one, several:
        yield one, several


@pytest.fixture
def pair(engines) -> Iterator[tuple[LLM, LLM]]:
    """Return the module's engine of one rank and that of two, awake and with their own weights."""
    yield engines
    for engine in engines:
        engine.wake_up()
        engine.update_weights(new_weights(0))


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [output.outputs[0].token_ids for output in outputs]


def runners(llm: LLM) -> list[ModelRunner]:
    own = llm.engine.runner
    return [own, *own._ranks.runners.values()]


def held_bytes(llm: LLM) -> list[tuple[int, int]]:
    """Return the bytes of memory behind the weights and the cache of each rank."""

    def of(runner: ModelRunner) -> tuple[int, int]:
        weights = runner.model.weights
        tensors = [weights.embed, *(layer.qkv.plain for layer in weights.layers)]
        return (
            sum(each.untyped_storage().nbytes() for each in tensors),
            runner.kv_cache.allocated_bytes,
        )

    return [of(runner) for runner in runners(llm)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_ranks_with_new_weights_give_the_tokens_of_one(
    checkpoint, on_threads, monkeypatch, size, tied
):
    """All at once, one by one, in another dtype, and in pieces that part a tensor's rows."""
    monkeypatch.setattr(control, "SHARED_BYTES", 4096)
    path, old = checkpoint(tied), []
    with make_llm(path, 1) as one, make_llm(path, size) as several:
        updates = [
            (new_weights(1, tied=tied), False),
            (new_weights(2, tied=tied).items(), False),
            *(({name: t.half()}, True) for name, t in new_weights(3, tied=tied).items()),
        ]
        for index, (update, partial) in enumerate(updates):
            update = list(update.items()) if isinstance(update, dict) else list(update)
            for llm in (one, several):
                llm.update_weights(iter(update), partial=partial)
            if index < 2 or index % 8 == 0:
                assert tokens(several) == tokens(one)
                old.append(tokens(one))
    assert old[0] != old[1]


BAD = {
    "unknown": {"no.such.weight": torch.ones(1)},
    "shape": {"model.norm.weight": torch.ones(3)},
    "dtype": {"model.norm.weight": torch.ones(64, dtype=torch.int32)},
    "no tensor": {"model.norm.weight": None},
}


@pytest.mark.parametrize("bad", BAD)
def test_one_bad_tensor_changes_no_weight_on_any_rank(pair, bad):
    _, several = pair
    before = tokens(several)
    with pytest.raises(ConfigError, match="no weight was changed"):
        several.update_weights(new_weights(1) | BAD[bad])
    assert tokens(several) == before


def test_an_update_of_no_weight_changes_nothing_on_any_rank(pair):
    """Tensors that a checkpoint may have and no model needs."""
    for engine in pair:
        before = tokens(engine)
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        engine.update_weights({name: torch.ones(8)}, partial=True)
        assert tokens(engine) == before


@pytest.mark.parametrize(
    ("error", "raised"), [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(), RuntimeError)]
)
@pytest.mark.parametrize("name", ["share", "pieces_of"])
def test_an_update_that_is_cut_short_ends_the_ranks(
    checkpoint, on_threads, monkeypatch, name, error, raised
):
    """Rank 0 is interrupted, or cannot send, before or between the pieces."""

    def fail(*args: object) -> None:
        raise error

    with make_llm(checkpoint(False), 2) as llm:
        monkeypatch.setattr(llm.engine.runner._ranks if name == "share" else control, name, fail)
        with pytest.raises(raised):
            llm.update_weights(new_weights(1))
        with pytest.raises(RuntimeError, match="make a new engine"):
            llm.sleep()


@pytest.mark.parametrize("level", [1, 2])
def test_ranks_sleep_and_wake_together(pair, level):
    one, several = pair
    before, report, held = tokens(several), several.kv_report(), held_bytes(several)
    assert before == tokens(one)
    several.sleep(level)
    assert several.is_sleeping()
    assert several.kv_report()["allocated_bytes"] == 0
    expected = [(0 if level == 2 else weights, 0) for weights, _ in held]
    assert held_bytes(several) == expected
    with pytest.raises(RuntimeError, match="weights and kv_cache: expected to be awake"):
        several.generate(PROMPTS, GREEDY)
    several.wake_up(["weights"])
    with pytest.raises(RuntimeError, match="kv_cache: expected to be awake"):
        several.generate(PROMPTS, GREEDY)
    if level == 2:
        several.update_weights(new_weights(0))
        one.update_weights(new_weights(0))
    several.wake_up()
    several.wake_up()
    assert (several.kv_report(), held_bytes(several)) == (report, held)
    assert tokens(several) == tokens(one)


def test_a_rank_without_room_wakes_no_rank(pair, monkeypatch):
    """Rank 1 has no room: rank 0 frees what it has allocated already."""
    _, several = pair
    before = tokens(several)
    several.sleep(2)
    asleep = held_bytes(several)
    full = runners(several)[1].memory

    for name in ("allocate", "capture_awake"):
        call = getattr(SleepMode, name)

        def without_room(self: SleepMode, *args: object, call: Callable[..., None] = call) -> None:
            if self is full:
                raise CapacityError("wake_up: expected room for 1 bytes on cpu, got less")
            call(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(SleepMode, name, without_room)
            with pytest.raises(CapacityError, match="rank 1: wake_up: expected room for 1 bytes"):
                several.wake_up()
        assert several.is_sleeping()
        assert held_bytes(several) == asleep
    several.wake_up()
    several.update_weights(new_weights(0))
    assert tokens(several) == before


def test_a_host_without_room_puts_no_rank_to_sleep(pair, monkeypatch):
    _, several = pair
    before, held = tokens(several), held_bytes(several)
    full = runners(several)[1].memory

    def without_room(self: SleepMode, level: int) -> None:
        if self is full:
            raise CapacityError("sleep: expected pinned host memory for 1 bytes, got less")

    with monkeypatch.context() as patch:
        patch.setattr(SleepMode, "copy_weights", without_room)
        with pytest.raises(CapacityError, match="rank 1: sleep: expected pinned host memory"):
            several.sleep()
    assert not several.is_sleeping()
    assert held_bytes(several) == held
    assert tokens(several) == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.sleep(3), "level: expected 1 or 2, got 3"),
        (lambda llm: llm.wake_up(["weight"]), "tags: expected None or a list of"),
        (lambda llm: llm.update_weights({}), "named_tensors: expected at least one tensor"),
    ],
)
def test_a_wrong_argument_reaches_no_rank(pair, monkeypatch, call, message):
    _, several = pair
    with monkeypatch.context() as patch:
        patch.setattr(several.engine.runner._ranks, "ask", None)
        with pytest.raises(ConfigError, match=message):
            call(several)
    assert not several.is_sleeping()


def test_an_async_engine_has_ranks(checkpoint, on_threads):
    """Its calls between steps, too."""

    async def generated(llm: AsyncLLM) -> list[tuple[int, ...]]:
        async def last(index: int) -> tuple[int, ...]:
            async for output in llm.generate(PROMPTS[index], GREEDY, f"{index}"):
                tokens = output.outputs[0].token_ids
            return tokens

        return list(await asyncio.gather(*map(last, range(len(PROMPTS)))))

    async def main() -> list[list[tuple[int, ...]]]:
        llm = AsyncLLM(
            str(checkpoint(False)), device="cpu", dtype="float64", tensor_parallel_size=2,
            num_kv_blocks=40, max_num_seqs=4, max_model_len=128, use_tqdm_on_load=False,
        )  # fmt: skip
        async with llm:
            found = [await generated(llm)]
            await llm.sleep(2)
            await llm.wake_up()
            await llm.update_weights(new_weights(1))
            await llm.update_weights(new_weights(0))
            return [*found, await generated(llm)]

    with make_llm(checkpoint(False), 1) as one:
        expected = tokens(one)
    assert asyncio.run(main()) == [expected, expected]


def test_reports_are_of_all_ranks(checkpoint, on_threads):
    """With a policy, ranks have unlike shares of the head groups."""
    options = {"head_policy": "ratio=0.5,window=32,sink=16", "kv_cache_dtype": "fp8_e4m3"}
    with (
        make_llm(checkpoint(False), 1, **options) as one,
        make_llm(checkpoint(False), 2, **options) as several,
    ):
        assert several.kv_report() == one.kv_report()
        assert several.describe() == f"{one.describe()}, 2 ranks over threads"
        several.sleep()
        one.sleep()
        assert several.kv_report() == one.kv_report()


def test_shared_memory_has_no_name_and_is_seen_by_who_has_its_file():
    shared = SharedMemory.new(100)
    other = SharedMemory(os.dup(shared.fd))
    assert not shared.bytes.any()
    shared.bytes[3] = 7
    assert other.bytes.tolist() == [0, 0, 0, 7, *[0] * 96]
    for each in (shared, other, shared):
        each.close()
    assert shared.fd == -1


def test_a_host_without_room_for_shared_memory_says_so(pair, monkeypatch):
    """And changes no weight."""
    _, several = pair
    before, files = tokens(several), len(os.listdir("/proc/self/fd"))

    def without_room(*args: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", without_room)
        with pytest.raises(OSError, match="no room"):
            several.update_weights(new_weights(1))
    assert len(os.listdir("/proc/self/fd")) == files
    assert tokens(several) == before


@pytest.mark.full
def test_processes_sleep_take_weights_and_end_with_a_rank(checkpoint):
    with make_llm(checkpoint(False), 1) as one:
        one.update_weights(new_weights(1))
        expected = tokens(one)
    with make_llm(checkpoint(False), 2) as llm:
        llm.sleep(2)
        llm.wake_up()
        llm.update_weights(new_weights(1))
        assert tokens(llm) == expected
        (member,) = llm.engine.runner._ranks._members
        os.kill(member.process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"rank 1: its process was ended by SIGKILL; make"):
            llm.sleep()
        with pytest.raises(RuntimeError, match=r"SIGKILL; make a new engine"):
            llm.generate(PROMPTS, GREEDY)
