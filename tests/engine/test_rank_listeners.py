"""Each rank has a KV listener of its own, which is told of the heads that the rank has."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from mrv1 import LLM, CapacityError, ConfigError, ModelRunner, SamplingParams, StepError
from mrv1.runner import EachRank, KVListener, KVReady
from mrv1.runner.ranks import parallel_runner
from tests.models.families import tiny_checkpoint
from tests.thread_ranks import ThreadRanks

PROMPTS = [[5, 9, 23, 41, 77] * 8, [11, 30]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

Written = dict[tuple[str, int, int, int], torch.Tensor]
"""By request, layer, position and KV head: the key."""

HEARD: dict[int, list[KVReady]] = defaultdict(list)
"""By rank: all that its listener was told."""
WRITTEN: dict[int, Written] = defaultdict(dict)
FAILING: set[int] = set()
"""Ranks whose listener raises in the second layer, once."""


def listen(rank: int, ready: KVReady) -> None:
    """Keep the keys of one layer."""
    HEARD[rank].append(ready)
    if rank in FAILING and ready.layer == 1:
        FAILING.remove(rank)
        raise KeyError("nobody listens")
    pages = ready.cache.k
    for tokens in ready.tokens:
        (blocks,) = tokens.block_ids
        first = tokens.start // 16
        for position in range(tokens.start, tokens.stop):
            block = blocks[position // 16 - first]
            for index, head in enumerate(ready.heads):
                at = tokens.req_id, ready.layer, position, head
                WRITTEN[rank][at] = pages[block, index, position % 16].clone()


def listener_of(rank: int) -> KVListener:
    return partial(listen, rank)


def fails_on_rank_1(rank: int) -> KVListener:
    if rank == 1:
        raise KeyError("no place")
    return print


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Iterator[dict[int, LLM]]:
    path: Path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3", num_attention_heads=8)
    options = {"dtype": "float64", "num_kv_blocks": 40, "max_num_seqs": 4, "max_model_len": 128}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_runner, "Ranks", ThreadRanks)
        made = {
            size: LLM(
                str(path), device="cpu", tensor_parallel_size=size, max_num_batched_tokens=24,
                use_tqdm_on_load=False, **options,
            )
            for size in (1, 2, 4)
        }  # fmt: skip
    yield made
    for llm in made.values():
        llm.close()


@pytest.fixture(autouse=True)
def forgotten(engines) -> Iterator[None]:
    yield
    for llm in engines.values():
        llm.set_kv_listener(None)
    for of_ranks in (HEARD, WRITTEN):
        of_ranks.clear()
    FAILING.clear()


@pytest.mark.parametrize("size", [2, 4])  # of 2 KV heads: with 4 ranks, two have the same one
def test_ranks_hear_the_keys_of_their_heads(engines, size):
    written, tokens = {}, {}
    for each in (1, size):
        llm = engines[each]
        llm.set_kv_listener(EachRank(listener_of))
        ids = [
            llm.add_request(prompt, GREEDY, request_id=f"{i}") for i, prompt in enumerate(PROMPTS)
        ]
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        tokens[each] = [
            [o.outputs[0].token_ids for o in outputs if o.request_id == i] for i in ids
        ]
        written[each] = dict(WRITTEN)
        WRITTEN.clear()
    assert tokens[size] == tokens[1]
    assert sorted(written[size]) == list(range(size))
    whole = written[1][0]
    heads_of = {2: [{0}, {1}], 4: [{0}, {0}, {1}, {1}]}[size]
    for rank, heads in enumerate(heads_of):
        own = written[size][rank]
        assert own.keys() == {at for at in whole if at[3] in heads}
        for at, key in own.items():
            torch.testing.assert_close(key, whole[at], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_listener_that_raises_on_one_rank_fails_its_steps_requests_alone(engines, rank):
    llm = engines[2]
    expected = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY)]
    llm.set_kv_listener(EachRank(listener_of))
    FAILING.add(rank)
    outputs = llm.generate(PROMPTS, GREEDY)
    failed = [each for each in outputs if each.error is not None]
    assert failed
    where = f"rank {rank}: " if rank else ""
    for output in failed:
        assert isinstance(output.error, StepError)
        assert not output.error.device_lost
        pattern = rf"step \d+ \(\d requests?\): {where}KV listener, layer 1: KeyError\('nobody "
        assert re.match(pattern, str(output.error))
    for _ in range(2):
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [each.outputs[0].token_ids for each in outputs] == expected
    assert {ready.plan.step_id for ready in HEARD[0]} == {r.plan.step_id for r in HEARD[1]}


@pytest.mark.parametrize(
    ("listener", "message"),
    [
        (
            print,
            r"listener: expected None or EachRank\(make\) with several ranks, .* got <built-in",
        ),
        (EachRank(lambda rank: print), "listener: expected an EachRank that can be pickled, got"),
        (EachRank(fails_on_rank_1), r"rank 1: listener: .* to return a listener, got KeyError"),
    ],
)
def test_a_listener_that_a_rank_cannot_have_is_refused(engines, listener, message):
    llm = engines[2]
    llm.set_kv_listener(EachRank(listener_of))
    with pytest.raises(ConfigError, match=message):
        llm.set_kv_listener(listener)
    llm.generate(PROMPTS, GREEDY)
    assert len(HEARD[0]) == len(HEARD[1]) > 0


@pytest.mark.parametrize("size", [1, 2])
def test_nobody_listens_if_the_graphs_of_a_rank_do_not_fit(tmp_path, monkeypatch, size):
    def capture_again(runner: ModelRunner) -> None:
        if runner.model.parallel.rank == size - 1:
            raise CapacityError("CUDA graphs: no room")

    monkeypatch.setattr(ModelRunner, "_capture_again", capture_again)
    monkeypatch.setattr(parallel_runner, "Ranks", ThreadRanks)
    tiny_checkpoint(tmp_path, "llama")
    with LLM(str(tmp_path), device="cpu", tensor_parallel_size=size, num_kv_blocks=40) as llm:
        for _ in range(2):
            with pytest.raises(CapacityError, match="CUDA graphs: no room"):
                llm.set_kv_listener(EachRank(listener_of))
            llm.generate(PROMPTS, GREEDY)
    assert not HEARD
