"""Generation over an fp8 KV cache: tokens against transformers over a rounded cache."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from mrv1 import LLM, HeadPolicy, ModelRunner, SamplingParams
from mrv1.config import checkpoint_dir
from mrv1.headwise import FULL, Visible
from mrv1.kernels import reference
from mrv1.runner import AsyncOutput, RequestId, StepPlan
from tests.engine.test_head_policy import head_masks
from tests.engine.test_llm import random_prompts
from tests.models.families import CACHE, tiny_checkpoint
from tests.models.quantizing_cache import QuantizingCache
from tests.models.test_fp8_cache import HEAD_SCALES, add_tensors, scale_tensors
from tests.models.test_tiny_checkpoint import CORPUS, _recall_prompt

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A tiny model with static scales in its checkpoint."""
    path = tmp_path_factory.mktemp("qwen3")
    model = tiny_checkpoint(path, "qwen3")
    add_tensors(path, scale_tensors(0))
    return path, model


def greedy_over_a_rounded_cache(
    model: PreTrainedModel,
    prompt: list[int],
    head_scales: torch.Tensor | None,
    num_tokens: int,
    quarter: int | None = None,
) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        **{CACHE: QuantizingCache(head_scales, quarter)},
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_scale", ["token", "head"])
def test_greedy_tokens_equal_transformers_over_a_rounded_cache(checkpoint, device, kv_scale):
    path, model = checkpoint
    scales = HEAD_SCALES if kv_scale == "head" else None
    prompts = random_prompts((1, 15, 16, 17, 70))
    model.to(device)
    expected = [greedy_over_a_rounded_cache(model, prompt, scales, 16) for prompt in prompts]
    for chunk, block_size in ((7, 32), (64, 16)):
        with LLM(
            str(path),
            dtype="float32",
            kv_cache_dtype="fp8_e4m3",
            kv_scale=kv_scale,
            block_size=block_size,
            max_num_batched_tokens=chunk,
            max_num_seqs=8,
            num_kv_blocks=64,
        ) as llm:
            reference.calls.clear()
            outputs = llm.generate(prompts, GREEDY)
            assert bool(reference.calls) == (llm.engine.runner.path == "reference")
        assert [list(o.outputs[0].token_ids) for o in outputs] == expected, (chunk, block_size)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
def test_greedy_tokens_with_quarter_scales_equal_transformers(checkpoint, device, block_size):
    """Whole prompts, then token by token: the order in which transformers fills its cache."""
    path, model = checkpoint
    prompts = random_prompts((1, 15, 16, 17, 70))
    model.to(device)
    expected = [
        greedy_over_a_rounded_cache(model, prompt, None, 16, quarter=block_size // 4)
        for prompt in prompts
    ]
    with LLM(
        str(path),
        dtype="float32",
        kv_cache_dtype="fp8_e4m3",
        kv_scale="quarter",
        block_size=block_size,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        num_kv_blocks=64,
    ) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected


class ChunkRecorder:
    """Notes how many tokens each step computed of each request, since its last admission."""

    def __init__(self, runner: ModelRunner) -> None:
        self.chunks: dict[RequestId, list[list[int]]] = {}
        self._execute, runner.execute = runner.execute, self._recorded  # type: ignore[method-assign]

    def _recorded(self, plan: StepPlan) -> AsyncOutput:
        for request in plan.entering:
            self.chunks.setdefault(request.req_id, []).append([])
        for req_id, count in zip(plan.req_ids, plan.num_scheduled_tokens.tolist(), strict=True):
            self.chunks[req_id][-1].append(count)
        return self._execute(plan)


@torch.no_grad()
def tokens_over_quarters(
    model: PreTrainedModel, policy: HeadPolicy, tokens: list[int], admissions: list[list[int]]
) -> dict[int, int]:
    """Return transformers' likeliest token after each chunk of new tokens, by its position.

    Its cache is filled by the chunks in which the engine has filled its own, anew after each
    admission; ``tokens`` are the prompt's and the engine's.
    """
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    found: dict[int, int] = {}
    for chunks in admissions:
        cache, done = QuantizingCache(quarter=4), 0
        for count in chunks:
            end = done + count

            def masked(layer: int, first: int = done, end: int = end) -> Callable[..., Any]:
                mask = head_masks(policy, layer, group, end)[:, :, first:]
                return lambda _module, args, kwargs: (args, kwargs | {"attention_mask": mask})

            handles = [
                layer.self_attn.register_forward_pre_hook(masked(index), with_kwargs=True)
                for index, layer in enumerate(model.model.layers)
            ]
            ids = torch.tensor([tokens[done:end]])
            logits = model(ids, **{CACHE: cache}).logits[0, -1]
            for handle in handles:
                handle.remove()
            found.setdefault(end, int(logits.argmax()))
            done = end
    return found


@pytest.mark.parametrize(
    ("chunk", "num_blocks", "streams"), [(7, 64, False), (24, 7, False), (24, 7, True)]
)
def test_quarter_scales_with_chunks_preemption_and_policies(
    checkpoint, chunk, num_blocks, streams
):
    """The bytes depend on the chunks, so the oracle fills its cache in the engine's chunks."""
    path, model = checkpoint
    config = model.config
    policy = HeadPolicy.full(config.num_hidden_layers, config.num_key_value_heads)
    if streams:
        policy = HeadPolicy(((FULL, Visible(20, 5)), (Visible(9), FULL)))
    exact = copy.deepcopy(model).to("cpu", torch.float64)
    exact.set_attn_implementation("eager")
    prompts = random_prompts((40, 38, 18))
    with LLM(
        str(path), device="cpu", dtype="float64", kv_cache_dtype="fp8_e4m3", kv_scale="quarter",
        max_num_batched_tokens=chunk, num_kv_blocks=num_blocks, head_policy=policy,
        overlap=False,  # else a preempted request may have sampled a token that is dropped
    ) as llm:  # fmt: skip
        recorder = ChunkRecorder(llm.engine.runner)
        outputs = llm.generate(prompts, GREEDY)
        assert (llm.metrics()["num_preemptions"] > 0) is (num_blocks == 7)
    for output, admissions in zip(outputs, recorder.chunks.values(), strict=True):
        prompt, answer = output.prompt_token_ids, list(output.outputs[0].token_ids)
        found = tokens_over_quarters(exact, policy, [*prompt, *answer], admissions)
        assert [found[len(prompt) + index] for index in range(len(answer))] == answer


def test_the_embedded_model_recalls_a_fact_over_an_fp8_cache():
    """It recalls a fact from 1024 tokens back, through rounded K and V of every layer."""
    tokenizer = Tokenizer.from_file(str(checkpoint_dir("tiny") / "tokenizer.json"))
    text = CORPUS.read_text(encoding="utf-8")
    source = random.Random(0)
    tasks = [_recall_prompt(tokenizer, text[len(text) * 9 // 10 :], source) for _ in range(6)]
    with LLM(
        "tiny", device="cpu", kv_cache_dtype="fp8_e4m3", block_size=64, num_kv_blocks=120
    ) as llm:
        outputs = llm.generate(
            [prompt.tolist() for prompt, _ in tasks],
            SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        )
    answers = [output.outputs[0].token_ids[0] for output in outputs]
    assert answers == [answer for _, answer in tasks]
