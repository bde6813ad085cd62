"""Ranges of keys under head policies, windows, rings, bf16 and fp8, against dense masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from mrv1 import EngineConfig, HeadPolicy, SamplingParams
from mrv1.device import kernel_path
from mrv1.engine import EngineCore
from mrv1.engine.request import Request
from mrv1.headwise import FULL, Visible
from mrv1.kernels.registry import select_ops
from mrv1.models import load_model
from mrv1.multimodal import whole_spans
from tests.calibration.test_losses import masked_logits
from tests.models.families import tiny_checkpoint
from tests.multimodal.test_vision_models import VOCAB, by_token
from tests.multimodal.test_vision_models import full_precision as full_precision  # the fixture

pytestmark = pytest.mark.gpu

NUM_TOKENS = 3
FULL_POLICY = HeadPolicy.full(2, 2)
STREAMING = HeadPolicy(((FULL, Visible(9, 3)), (Visible(24), Visible(9, 3))))
"""The tiny model has two layers of two KV heads."""

Ranges = list[tuple[int, int]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3")
    return str(path)


@pytest.fixture(scope="module")
def oracle_of(directory) -> Callable[[torch.dtype], Any]:
    """Return a function from a dtype to transformers' model."""
    models = {
        dtype: AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation="eager"
        )
        for dtype in (torch.float64, torch.bfloat16)
    }
    return models.__getitem__


@pytest.fixture(scope="module")
def model_of(directory, device) -> Callable[[torch.dtype], Any]:
    """Return a function from a dtype to mrv1's model, which all engines share."""
    ops = select_ops(kernel_path(device))
    models = {
        dtype: load_model(directory, device=device, dtype=dtype, ops=ops, progress=False)
        for dtype in (torch.float32, torch.bfloat16)
    }
    return models.__getitem__


Each = list[tuple[list[int], Ranges | None]]
"""Prompts, and the keys that their tokens see; None = causal."""


def make_core(model: Any, policy: HeadPolicy, **options: Any) -> EngineCore:
    config = {
        "model": "tiny", "device": str(model.device), "num_kv_blocks": 24, "max_model_len": 128,
        "max_num_seqs": 3, "max_logprobs": -1, "cuda_graphs": False,
    }  # fmt: skip
    return EngineCore(
        EngineConfig(**(config | options)), model=model, head_policy=policy, progress=False
    )


def run(core: EngineCore, each: Each, prompt_logprobs: int | None = VOCAB) -> list[Request]:
    """Return the requests, which run together."""
    params = SamplingParams(
        temperature=0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        prompt_logprobs=prompt_logprobs,
        logprobs=VOCAB,
    )
    requests = [
        core.add_request(str(index), prompt, params, attn_mask_offsets=ranges)
        for index, (prompt, ranges) in enumerate(each)
    ]
    while core.has_unfinished_requests:
        core.step()
    assert [request.error for request in requests] == [None] * len(each)
    return requests


def tokens_of(request: Request) -> list[int]:
    """Return all tokens that the model has seen."""
    return [*request.prompt_token_ids, *request.output_token_ids[:-1]]


def logprobs_of(request: Request) -> torch.Tensor:
    """Return the log-probabilities after each of these tokens, ``[tokens, vocab]``."""
    return by_token([*request.prompt_logprobs, *request.output_logprobs])


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], Ranges | None]:
    """Return a prompt with random ranges, an image's, or none."""
    num_tokens = draw(st.integers(1, 60))
    prompt = [3 + 7 * token % 150 for token in range(num_tokens)]
    kind = draw(st.sampled_from(["random", "image", "causal"]))
    if kind == "causal":
        return prompt, None
    if kind == "image":
        start = draw(st.integers(0, num_tokens - 1))
        end = draw(st.integers(start + 1, num_tokens))
        return prompt, [
            (0, end if start <= token < end else token + 1) for token in range(num_tokens)
        ]
    ends = [min(token + draw(st.integers(1, 6)), num_tokens) for token in range(num_tokens)]
    return prompt, [(draw(st.integers(0, token)), end) for token, end in enumerate(ends)]


SEEN = st.one_of(
    st.just(FULL), st.builds(Visible, window=st.integers(1, 40), sink=st.integers(0, 20))
)
POLICIES = st.tuples(*[st.tuples(SEEN, SEEN)] * 2).map(HeadPolicy)
IMAGE = ([*range(3, 60)], [(0, 40 if 20 <= token < 40 else token + 1) for token in range(57)])


def test_prompts_with_ranges_are_found_in_the_prefix_cache(model_of):
    core = make_core(model_of(torch.float32), STREAMING)
    run(core, [IMAGE], prompt_logprobs=None)
    (again,) = run(core, [IMAGE], prompt_logprobs=None)
    assert again.num_cached_tokens == 48, "so that the property below has hits"


def test_other_ranges_over_the_same_tokens_are_no_prefix_hit(oracle_of, model_of):
    """The first token with a range of its own is the same in both: only the range differs."""
    prompt, ranges = IMAGE
    others = [(low + 7 * (20 <= token < 40), high) for token, (low, high) in enumerate(ranges)]
    core = make_core(model_of(torch.float32), FULL_POLICY)
    run(core, [IMAGE], prompt_logprobs=None)
    (other,) = run(core, [(prompt, others)], prompt_logprobs=None)
    assert other.num_cached_tokens == 16, "the block before all ranges"
    want = masked_logits(oracle_of(torch.float64), FULL_POLICY, tokens_of(other), others)
    torch.testing.assert_close(
        logprobs_of(other), want.log_softmax(-1).float()[-NUM_TOKENS:], rtol=0, atol=1e-4
    )
    (again,) = run(core, [(prompt, others)], prompt_logprobs=None)
    assert again.num_cached_tokens == 48


@given(
    policy=st.one_of(st.just(FULL_POLICY), POLICIES),
    each=st.lists(prompts(), min_size=1, max_size=2),
    budget=st.sampled_from([1, 5, 16, 33, 128]),
    recycling=st.booleans(),
)
@settings(max_examples=max(settings.default.max_examples // 2, 1))  # each makes an engine
@example(policy=STREAMING, each=[IMAGE, (IMAGE[0], None)], budget=20, recycling=True)
def test_ranges_equal_dense_masks(oracle_of, model_of, policy, each, budget, recycling):
    """Windows with and without sinks, their rings, chunks cut anywhere, and prefix hits."""
    longest = [whole_spans(torch.tensor(ranges).numpy()) for _, ranges in each if ranges]
    longest = max((end - start for spans in longest for start, end in spans), default=1)
    core = make_core(
        model_of(torch.float32),
        policy,
        max_num_batched_tokens=max(budget, longest),
        window_recycling=recycling,
    )
    first, again = run(core, each), run(core, each, prompt_logprobs=None)
    for request, repeated, (_, ranges) in zip(first, again, each, strict=True):
        want = masked_logits(oracle_of(torch.float64), policy, tokens_of(request), ranges or ())
        want = want.log_softmax(-1).float()
        torch.testing.assert_close(logprobs_of(request), want, rtol=0, atol=1e-4)
        own = want[-NUM_TOKENS:]
        torch.testing.assert_close(logprobs_of(repeated), own, rtol=0, atol=1e-4)


def fp8(tensor: torch.Tensor) -> torch.Tensor:
    """Return K or V as an fp8 cache with a scale per token and head keeps it."""
    scale = (tensor.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return (tensor / scale).float().to(torch.float8_e4m3fn).to(tensor.dtype) * scale


@pytest.mark.parametrize("policy", [FULL_POLICY, STREAMING], ids=["full", "streaming"])
def test_ranges_in_an_fp8_cache_equal_dense_masks_over_rounded_keys(
    oracle_of, model_of, monkeypatch, policy
):
    eager = modeling_qwen3.eager_attention_forward

    def rounded(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return eager(module, query, fp8(key), fp8(value), *args, **kwargs)

    options = {"kv_cache_dtype": "fp8_e4m3", "max_num_batched_tokens": 20}
    (request,) = run(make_core(model_of(torch.float32), policy, **options), [IMAGE])
    got, tokens = logprobs_of(request), tokens_of(request)
    exact = masked_logits(oracle_of(torch.float64), policy, tokens, IMAGE[1]).log_softmax(-1)
    monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", rounded)
    want = masked_logits(oracle_of(torch.float64), policy, tokens, IMAGE[1]).log_softmax(-1)
    assert (want - exact).abs().max() > 0.1, "rounding matters"
    # A key that float32 rounds to the other side of a tie differs by 1/16.
    error = (got.double() - want).abs()
    assert error.mean() < 1e-3
    assert error.max() < (want - exact).abs().max() / 4


@pytest.mark.parametrize("policy", [FULL_POLICY, STREAMING], ids=["full", "streaming"])
def test_ranges_in_bfloat16_are_as_exact_as_those_of_transformers(oracle_of, model_of, policy):
    core = make_core(model_of(torch.bfloat16), policy, max_num_batched_tokens=20)
    (request,) = run(core, [IMAGE])
    got, tokens = logprobs_of(request), tokens_of(request)
    exact, peer, causal = (
        masked_logits(oracle_of(dtype), policy, tokens, ranges).double().log_softmax(-1)
        for dtype, ranges in (
            (torch.float64, IMAGE[1]),
            (torch.bfloat16, IMAGE[1]),
            (torch.float64, ()),
        )
    )
    error, error_of_peer = ((each.double() - exact).abs().mean() for each in (got, peer))
    assert error < 1.5 * error_of_peer
    assert error < (causal - exact).abs()[20:].mean() / 4, "the ranges matter more than rounding"
