"""The engine's KV listener: the tokens it hears of, their keys and values, and its errors.

The oracle of the keys and values is transformers' own cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.kv_offload import HostCopies, main
from mrv1 import LLM, SamplingParams, StepError
from mrv1.runner import KVReady, RequestId
from tests.engine.test_llm import random_prompts
from tests.models.families import CACHE, tiny_checkpoint

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LLMMaker = Callable[..., LLM]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3")
    return path


@pytest.fixture
def make_llm(checkpoint: Path) -> LLMMaker:
    def make(**options: object) -> LLM:
        settings = {"device": "cpu", "dtype": "float64", "num_kv_blocks": 32}
        return LLM(str(checkpoint), **settings | options)

    return make


def expected_kv(model: PreTrainedModel, tokens: list[int]) -> list[tuple[torch.Tensor, ...]]:
    """Return the layers' keys and values ``[kv_heads, tokens, head_dim]``."""
    with torch.no_grad():
        cache = getattr(model(torch.tensor([tokens]), use_cache=True), CACHE)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


@pytest.mark.parametrize("num_blocks", [32, 6])
def test_copies_of_full_blocks_equal_transformers_keys_and_values(
    checkpoint, make_llm, num_blocks
):
    """In chunks, with prefix hits and, with 6 blocks, after preemptions."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    shared, *tails = random_prompts((36, 5, 21))
    heard: dict[RequestId, list[tuple[int, int, int]]] = {}
    with make_llm(num_kv_blocks=num_blocks, max_num_batched_tokens=24) as llm:
        copies = HostCopies(model.config.num_hidden_layers, BLOCK_SIZE)

        def listen(ready: KVReady) -> None:
            copies(ready)
            assert ready.event is None
            if ready.layer == 0:
                for each in ready.tokens:
                    if each.start == 0:
                        heard[each.req_id] = []
                    heard[each.req_id].append((each.start, each.stop, each.num_cached))

        llm.set_kv_listener(listen)
        outputs = [
            *llm.generate([shared], GREEDY),
            *llm.generate([shared + tail for tail in tails], GREEDY),
        ]
        assert (llm.metrics()["num_preemptions"] > 0) is (num_blocks == 6)
        llm.set_kv_listener(None)
        llm.generate(shared, GREEDY)
        assert len(heard) == 3
    assert len(copies.copies) == 3
    for output, spans, layers in zip(outputs, heard.values(), copies.copies.values(), strict=True):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        starts = [start for start, _, _ in spans]
        assert starts == [0, *(stop for _, stop, _ in spans[:-1])]  # no gap, nothing twice
        assert spans[-1][1] == len(tokens)
        for want, blocks in zip(expected_kv(model, tokens), layers, strict=True):
            assert sum(len(each.pages[0]) for each in blocks) == len(tokens) // BLOCK_SIZE
            for first, pages in blocks:
                for page, x in zip(pages, want, strict=True):
                    got = page.transpose(0, 1).flatten(1, 2)
                    begin = first * BLOCK_SIZE
                    part = x[:, begin : begin + got.shape[1]]
                    torch.testing.assert_close(got, part, rtol=0, atol=1e-5)  # rope
    if num_blocks == 32:
        assert [spans[0][2] for spans in heard.values()] == [0, 32, 32]  # two cached blocks


def test_a_listener_that_raises_fails_its_steps_requests_alone(make_llm):
    prompts = random_prompts((9, 30, 12))
    with make_llm(max_num_seqs=2) as llm:
        expected = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY)]
        calls = []

        def raises_once(ready: KVReady) -> None:
            calls.append(ready.plan.step_id)
            if len(calls) == 6:  # the second layer of the third step
                raise KeyError("nobody listens")

        llm.set_kv_listener(raises_once)
        first, second, third = llm.generate(prompts, GREEDY)
        for failed in (first, second):
            assert isinstance(failed.error, StepError)
            assert re.fullmatch(
                r"step \d+ \(2 requests\): KV listener, layer 1: KeyError\('nobody listens'\)",
                str(failed.error),
            )
            assert failed.outputs[0].finish_reason == "error"
        assert third.error is None
        assert list(third.outputs[0].token_ids) == expected[2]
        again = llm.generate(prompts, GREEDY)
        assert [list(each.outputs[0].token_ids) for each in again] == expected
        assert len(set(calls)) > 3


def test_the_cost_of_copies_is_measured(tmp_path, capsys):
    output = tmp_path / "offload.json"
    sizes = ("--prompt-tokens", "40", "--output-tokens", "2", "--num-requests", "2")
    main(["--shape", "tiny-random", "--device", "cpu", "--repeats", "1", *sizes,
          "--output", str(output)])  # fmt: skip
    result = json.loads(output.read_text("utf-8"))
    assert result == json.loads(capsys.readouterr().out)
    assert result["results"].keys() == {"none", "empty", "copies"}
    for entry in result["results"].values():
        assert entry["seconds"] * 1e3 >= entry["first_token_ms"] > 0
