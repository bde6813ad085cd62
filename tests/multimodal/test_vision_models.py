"""Prompts with images and videos through the engine, against transformers' own models.

The features are transformers' too: those that its vision encoder hands to its text model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mrv1.config import EngineConfig
from mrv1.device import kernel_path
from mrv1.engine.core import EngineCore
from mrv1.engine.request import Request
from mrv1.errors import RequestError, StepError
from mrv1.kernels import reference
from mrv1.kernels.registry import select_ops
from mrv1.models import Checkpoint, DecoderModel, load_model
from mrv1.multimodal import MultimodalItem
from mrv1.runner.step import SlotRequest, StagedFeatures, StepPlan, TokenLogprobs
from mrv1.sampler import SamplingParams
from tests.engine.scheduler_model import KnownSpeculation
from tests.models.families import CACHE
from tests.models.vision_families import (
    FEATURE_FAMILIES,
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_START,
)
from tests.runner.test_model_runner import enter, make_plan

TOLERANCE = 1e-4
VOCAB = 160
PATCH_SIZE = 3 * 2 * 4 * 4
"""Values of a patch: colours, frames, rows, columns."""


@dataclass
class Visual:
    """An image, or a video of so many steps in time."""

    grid: tuple[int, int, int]
    is_video: bool = False
    seconds: float = 1.0


@dataclass
class Prompt:
    """A prompt for both sides."""

    token_ids: list[int] = field(default_factory=list)
    items: list[MultimodalItem] = field(default_factory=list)
    inputs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of transformers' model."""


@torch.no_grad()
def make_prompt(family: str, oracle: Any, parts: list[int | Visual], *, seed: int = 0) -> Prompt:
    """Return a prompt of random text (number of tokens) and random images and videos."""
    generator = torch.Generator().manual_seed(seed)
    prompt = Prompt()
    types: list[int] = []
    pixels: dict[str, list[torch.Tensor]] = {"image": [], "video": []}
    grids: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}
    seconds: list[float] = []

    def text(*token_ids: int) -> None:
        prompt.token_ids += token_ids
        types.extend([0] * len(token_ids))

    for part in parts:
        if isinstance(part, int):
            text(*torch.randint(3, IMAGE, (part,), generator=generator).tolist())
            continue
        modality = "video" if part.is_video else "image"
        grid, size = part.grid, PATCH_SIZE
        if family == "ernie4_5_vl_moe":
            # A patch has one frame; a feature of a video has two.
            grid, size = ((1 + part.is_video) * grid[0], *grid[1:]), PATCH_SIZE // 2
        patches = torch.randn(int(np.prod(grid)), size, generator=generator).to(oracle.dtype)
        pixels[modality].append(patches)
        grids[modality].append(grid)
        if part.is_video:
            seconds.append(part.seconds)
        features = encode(oracle, modality, patches, grid)
        frames, token = part.grid[0], VIDEO if part.is_video else IMAGE
        apart = family.startswith("qwen3_vl") and part.is_video
        for rows in features.chunk(frames) if apart else [features]:
            if apart:
                text(7)  # stands for the time
            text(VISION_START)
            prompt.items.append(
                MultimodalItem(
                    features=rows,
                    start=len(prompt.token_ids),
                    modality=modality,
                    grid_thw=(1, *grid[1:]) if apart else grid,
                    second_per_grid=part.seconds
                    if part.is_video and family == "qwen2_5_vl"
                    else None,
                )
            )
            prompt.token_ids += [token] * len(rows)
            types.extend([2 if part.is_video else 1] * len(rows))
            text(VISION_END)
    prompt.inputs["mm_token_type_ids"] = torch.tensor([types])
    prompt.inputs |= types_for_experts(family, prompt.token_ids)
    for modality, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if pixels[modality]:
            prompt.inputs[name] = torch.cat(pixels[modality])
            prompt.inputs[f"{modality}_grid_thw"] = torch.tensor(grids[modality])
    if seconds and family == "qwen2_5_vl":
        prompt.inputs["second_per_grid_ts"] = seconds
    return prompt


def types_for_experts(family: str, token_ids: list[int]) -> dict[str, torch.Tensor]:
    """Return what ERNIE's processor says to its experts: visual are also tokens around images."""
    if family != "ernie4_5_vl_moe":
        return {}
    is_visual = [int(token >= IMAGE) for token in token_ids]
    return {"moe_mm_token_type_ids": torch.tensor([is_visual])}


def encode(
    oracle: Any, modality: str, patches: torch.Tensor, grid: tuple[int, int, int]
) -> torch.Tensor:
    """Return the features of an image or a video, as transformers' encoder computes them."""
    if hasattr(oracle.model, "resampler_model"):
        get = getattr(oracle.model, f"get_{modality}_features")
        return get(patches, torch.tensor([grid])).pooler_output[0]
    encoded = oracle.model.visual(patches, grid_thw=torch.tensor([grid]))
    deep = getattr(encoded, "deepstack_features", None) or []
    return torch.cat([encoded.pooler_output, *deep], dim=1)


@torch.no_grad()
def expected(
    oracle: Any, prompt: Prompt, num_tokens: int
) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Return transformers' log-probabilities of the prompt, and of its greedy output tokens."""
    ids = torch.tensor([prompt.token_ids])
    out = oracle(ids, use_cache=True, **prompt.inputs)
    in_prompt = out.logits[0].log_softmax(-1)
    tokens, rows = [], []
    logits = out.logits[0, -1]
    for _ in range(num_tokens):
        rows.append(logits.log_softmax(-1))
        tokens.append(int(logits.argmax()))
        cache = {CACHE: getattr(out, CACHE)}
        out = oracle(torch.tensor([[tokens[-1]]]), use_cache=True, **cache)
        logits = out.logits[0, -1]
    oracle.model.rope_deltas = None
    return in_prompt, tokens, torch.stack(rows)


MIXTURE: list[list[int | Visual]] = [
    [21],
    [3, Visual((1, 4, 6)), 5],
    [Visual((1, 6, 4)), 2, Visual((1, 4, 4)), 9],
    # Whole seconds: transformers before 5.18 rounds others down. test_mrope.py has fractions.
    [4, Visual((3, 4, 4), is_video=True, seconds=2.0), 6],
    [2, Visual((1, 4, 4)), 3, Visual((5, 2, 2), is_video=True, seconds=3.0)],
]
"""Text alone, one image, two images, a video between text, an image and a video at the end."""


@dataclass
class Case:
    """A family's model, prompts, and transformers' answers to them."""

    path: Path
    oracle: Any
    prompts: list[Prompt]
    answers: list[tuple[torch.Tensor, list[int], torch.Tensor]]
    models: dict[torch.device, DecoderModel] = field(default_factory=dict)

    def engine(self, device: torch.device, **options: Any) -> EngineCore:
        """Return an engine; all engines of a device share the weights."""
        if device not in self.models:
            ops = select_ops(kernel_path(device))
            self.models[device] = load_model(
                self.path, device=device, dtype=torch.float32, ops=ops, progress=False
            )
        config = {
            "model": str(self.path),
            "device": str(device),
            "dtype": "float32",
            "num_kv_blocks": 64,
            "max_num_seqs": 5,
            "max_num_batched_tokens": 64,
            "max_model_len": 256,
            "max_logprobs": -1,
            "mm_cache_memory_bytes": 1 << 20,
            "cuda_graphs": False,
        }
        return EngineCore(
            EngineConfig(**(config | options)), model=self.models[device], progress=False
        )


NUM_TOKENS = 6


@pytest.fixture(scope="module")
def case_of(checkpoints):
    """Return a function from a family to its case, computed once."""
    made: dict[str, Case] = {}

    def case(family: str) -> Case:
        if family not in made:
            path, oracle = checkpoints(family).path, checkpoints(family).oracle
            prompts = [make_prompt(family, oracle, p, seed=s) for s, p in enumerate(MIXTURE)]
            answers = [expected(oracle, prompt, NUM_TOKENS) for prompt in prompts]
            made[family] = Case(path, oracle, prompts, answers)
        return made[family]

    return case


def generate(
    engine: EngineCore,
    prompts: list[Prompt],
    num_tokens: int,
    *,
    prompt_logprobs: int | None = None,
    round: int = 0,
) -> list[Request]:
    """Return the requests of all prompts, which run together."""
    params = SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        prompt_logprobs=prompt_logprobs,
        logprobs=VOCAB,
    )
    requests = [
        engine.add_request(f"{round}-{index}", prompt.token_ids, params, multimodal=prompt.items)
        for index, prompt in enumerate(prompts)
    ]
    while engine.has_unfinished_requests:
        engine.step()
    return requests


def by_token(parts: list[TokenLogprobs]) -> torch.Tensor:
    """Return log-probabilities ``[positions, vocab]`` in the order of token ids."""
    ids = torch.from_numpy(np.concatenate([part.token_ids for part in parts])).long()
    values = torch.from_numpy(np.concatenate([part.logprobs for part in parts]))
    return torch.full((len(ids), VOCAB), torch.nan, dtype=values.dtype).scatter_(1, ids, values)


def check(
    request: Request, answer: tuple[torch.Tensor, list[int], torch.Tensor], *, of_prompt: bool
) -> None:
    """Compare a request with transformers' log-probabilities and greedy tokens."""
    in_prompt, tokens, in_output = answer
    assert request.error is None
    assert list(request.output_token_ids) == tokens
    got = by_token(request.output_logprobs)
    torch.testing.assert_close(got, in_output, rtol=0, atol=TOLERANCE)
    if of_prompt:
        got = by_token(request.prompt_logprobs)
        torch.testing.assert_close(got, in_prompt[:-1], rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module", autouse=True)
def full_precision() -> Iterator[None]:
    """Keep TF32 out of float32 matrix products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FEATURE_FAMILIES)
@pytest.mark.parametrize("chunk", [9, 64])
def test_logits_and_greedy_tokens_equal_transformers(case_of, device, family, chunk):
    """In one batch, two steps in flight; 9 tokens a step cut every item."""
    case = case_of(family)
    engine = case.engine(device, max_num_batched_tokens=chunk)
    requests = generate(engine, case.prompts, NUM_TOKENS, prompt_logprobs=VOCAB)
    for request, answer in zip(requests, case.answers, strict=True):
        check(request, answer, of_prompt=True)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FEATURE_FAMILIES)
def test_drafts_have_positions_of_their_own(case_of, device, family):
    """Drafts after images and videos, where a token's positions are not its place."""
    case = case_of(family)
    engine = case.engine(device, speculative={"method": "ngram"})
    answers = {f"0-{index}": tokens for index, (_, tokens, _) in enumerate(case.answers)}
    engine.scheduler._speculation = KnownSpeculation(answers)
    requests = generate(engine, case.prompts, NUM_TOKENS)
    assert engine.scheduler._speculation.num_accepted > 0
    for request, answer in zip(requests, case.answers, strict=True):
        check(request, answer, of_prompt=False)


FULL_POOL = {
    "family": "qwen3_vl",
    "chunk": 33,
    "overlap": True,
    "num_kv_blocks": 5,
    "rounds": [[3, 4], [4, 3, 1]],
}


@pytest.mark.gpu
@given(
    family=st.sampled_from(FEATURE_FAMILIES),
    chunk=st.integers(5, 40),
    overlap=st.booleans(),
    num_kv_blocks=st.sampled_from([4, 5, 9, 64]),
    rounds=st.lists(
        st.lists(st.integers(0, len(MIXTURE) - 1), min_size=1, max_size=3), min_size=1, max_size=2
    ),
)
@settings(max_examples=settings.default.max_examples // 4)  # each makes an engine
@example(**FULL_POOL)
def test_chunks_preemption_and_prefix_hits_change_nothing(
    case_of, device, family, chunk, overlap, num_kv_blocks, rounds
):
    """Rounds of prompts, later ones with prefix hits inside and after items."""
    case = case_of(family)
    engine = case.engine(
        device, max_num_batched_tokens=chunk, overlap=overlap, num_kv_blocks=num_kv_blocks
    )
    for number, order in enumerate(rounds):
        prompts = [case.prompts[index] for index in order]
        requests = generate(engine, prompts, NUM_TOKENS, round=number)
        for request, index in zip(requests, order, strict=True):
            check(request, case.answers[index], of_prompt=False)


def test_the_property_covers_preemption_and_hits(case_of):
    """Its example preempts requests with items, and finds blocks with parts of items cached."""
    case = case_of("qwen3_vl")
    engine = case.engine(torch.device("cpu"), max_num_batched_tokens=33, num_kv_blocks=5)
    for number, order in enumerate(FULL_POOL["rounds"]):
        generate(engine, [case.prompts[index] for index in order], NUM_TOKENS, round=number)
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.admission.prefix_hit_tokens > 0


@pytest.mark.gpu
@pytest.mark.parametrize("family", FEATURE_FAMILIES)
def test_drafts_after_items_have_the_positions_of_the_tokens_that_they_become(
    case_of, device, family
):
    """Right and wrong drafts after a video, beside a prompt whose tokens see later ones."""
    case = case_of(family)
    runner = case.engine(device, max_model_len=512).runner
    prompt, (_, tokens, in_output) = case.prompts[3], case.answers[3]
    items = [runner.prepared(item) for item in prompt.items]
    staged, at = [], 0
    for item in items:
        staged.append(StagedFeatures(item=item, rows=(range(at, at + item.num_tokens),)))
        at += item.num_tokens
    params = SamplingParams(temperature=0, ignore_eos=True, logprobs=VOCAB)
    own = enter("a", 0, prompt.token_ids, sampling_params=params, multimodal=tuple(items))
    blocks = tuple(range(-(-(len(prompt.token_ids) + NUM_TOKENS) // 16)))
    count = len(prompt.token_ids)
    plans = [make_plan(0, {"a": (0, count, blocks)}, new=(own,), staged_features=tuple(staged))]
    seen = np.array([[0, 9]] * 9, dtype=np.int32)
    masked = enter("b", 1, [*range(3, 12)], attn_mask_offsets=seen)
    drafts = [tokens[1], tokens[2], (tokens[3] + 1) % VOCAB]
    plans.append(
        make_plan(
            1,
            {"a": (0, 4, ()), "b": (1, 9, (63,))},
            new=(masked,),
            draft_token_ids=(tuple(drafts), ()),
        )
    )
    drafts = [tokens[4], (tokens[5] + 1) % VOCAB]
    plans.append(make_plan(2, {"a": (0, 3, ())}, draft_token_ids=(tuple(drafts),)))
    outputs = [runner.execute(plan).result() for plan in plans]
    assert [output.token_ids[0] for output in outputs] == [
        tuple(tokens[:1]), tuple(tokens[1:4]), tuple(tokens[4:6]),
    ]  # fmt: skip
    got = by_token([output.logprobs[0] for output in outputs])
    torch.testing.assert_close(got, in_output, rtol=0, atol=TOLERANCE)
    alone = case.engine(device, max_model_len=512).runner
    plan = make_plan(0, {"b": (1, 9, (63,))}, new=(masked,))
    assert alone.execute(plan).result().token_ids[0] == outputs[1].token_ids[1]


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.parametrize("family", FEATURE_FAMILIES)
def test_every_chunk_size_and_long_outputs_equal_transformers(case_of, device, family):
    """Chunks cut items at every place; 64 tokens of output, with and without overlap."""
    case = case_of(family)
    answers = [expected(case.oracle, prompt, 64) for prompt in case.prompts]
    for chunk in range(5, 50):
        engine = case.engine(device, max_num_batched_tokens=chunk, overlap=chunk % 2 == 0)
        requests = generate(engine, case.prompts, 64 if chunk < 10 else 2)
        for request, (in_prompt, tokens, in_output) in zip(requests, answers, strict=True):
            count = len(request.output_token_ids)
            check(request, (in_prompt, tokens[:count], in_output[:count]), of_prompt=False)


@pytest.mark.interp
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "ernie4_5_vl_moe"])
def test_interpreted_kernels_equal_transformers(case_of, device, family):
    """Interleaved axes, DeepStack, and an item cut into two chunks, through kernels alone.

    Of ERNIE, alternating axes and two sets of experts.
    """
    case = case_of(family)
    reference.calls.clear()
    engine = case.engine(device, max_num_batched_tokens=8)
    prompts = [case.prompts[1], case.prompts[0]]
    requests = generate(engine, prompts, 2)
    assert bool(reference.calls) == (kernel_path(device) == "reference")
    for request, index in zip(requests, (1, 0), strict=True):
        in_prompt, tokens, in_output = case.answers[index]
        check(request, (in_prompt, tokens[:2], in_output[:2]), of_prompt=False)


@pytest.mark.parametrize("family", FEATURE_FAMILIES)
def test_weights_are_updated_under_either_name(case_of, family):
    """Names of transformers' model and of the files; the vision encoder's are left out."""
    case = case_of(family)
    engine = case.engine(torch.device("cpu"))
    state = case.oracle.state_dict()
    stored = dict(Checkpoint.at(case.path).tensors())
    assert {name for name in stored if "visual." in name or "vision_model." in name}
    assert {name for name in state if name.startswith("model.language_model.")}
    for tensors in (state, stored):
        engine.update_weights({"lm_head.weight": torch.zeros(VOCAB, 64)}, partial=True)
        engine.update_weights(tensors)
        (request,) = generate(engine, case.prompts[:1], NUM_TOKENS)
        check(request, case.answers[0], of_prompt=False)


# --- limits ------------------------------------------------------------------------------------


def video(seconds: float, *, frames: int = 3) -> MultimodalItem:
    return MultimodalItem(
        features=np.zeros((frames, 64), np.float32),
        start=1,
        modality="video",
        grid_thw=(frames, 2, 2),
        second_per_grid=seconds,
    )


def test_positions_end_before_the_rope_table(case_of):
    """3 positions a second: frames of 50 s reach 1 + 300, and the output may reach 511."""
    engine = case_of("qwen2_5_vl").engine(torch.device("cpu"), max_model_len=512)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
    prompt = [3, VIDEO, VIDEO, VIDEO]
    request = engine.add_request("a", prompt, params, multimodal=[video(50.0)])
    last = 1 + 300  # of the prompt
    assert request.max_total_tokens == len(prompt) + (512 - 1 - last)
    with pytest.raises(
        RequestError, match="positions below 511, with one left to generate, got 511"
    ):
        engine.add_request("b", prompt, params, multimodal=[video(85.0)])
    engine.abort("a")


def test_too_many_items_are_refused(case_of):
    engine = case_of("qwen2_5_vl").engine(torch.device("cpu"), max_mm_items=2)
    items = [
        MultimodalItem(features=np.zeros((1, 64), np.float32), start=start, grid_thw=(1, 2, 2))
        for start in (0, 2, 4)
    ]
    with pytest.raises(RequestError, match=r"expected at most 2 items \(max_mm_items\), got 3"):
        engine.add_request("a", [IMAGE, 3] * 3, SamplingParams(), multimodal=items)
    request = SlotRequest(
        req_id="a",
        slot=0,
        epoch=0,
        token_ids=np.full(6, IMAGE, np.int32),
        prompt_len=6,
        sampling_params=SamplingParams(),
        seed=0,
        max_total_tokens=8,
        multimodal=tuple(items),
    )
    plan = StepPlan(
        step_id=0,
        new=(request,),
        req_ids=("a",),
        slots=np.zeros(1, np.int32),
        epochs=np.zeros(1, np.int32),
        num_scheduled_tokens=np.array([6], np.int32),
        new_block_ids={0: ((0,),)},
    )
    with pytest.raises(StepError, match=r"multimodal of 'a': expected at most 2 items"):
        engine.runner.execute(plan)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([3, IMAGE, 4], r"image at token 1\): start: .* at 1 to 2, got token 4 at 2"),
        (
            [3, VIDEO, IMAGE, 4],
            r"placeholders \(token 150\) .*, got token 151 at 1; .* sanitize_control_tokens=False",
        ),
        ([3, *[IMAGE] * 3, 4], "item for every placeholder, got none for token 150 at 3"),
        ([VIDEO, *[IMAGE] * 2], "item for every placeholder, got none for token 151 at 0"),
    ],
)
def test_items_and_placeholders_are_counted(case_of, prompt, message):
    engine = case_of("qwen2_vl").engine(torch.device("cpu"))
    features = np.zeros((2, 64), np.float32)
    item = MultimodalItem(features=features, start=1, grid_thw=(1, 4, 2))
    with pytest.raises(RequestError, match=message):
        engine.add_request("a", prompt, SamplingParams(), multimodal=[item])
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize("family", FEATURE_FAMILIES)
def test_placeholders_of_a_prompt_without_items_are_plain_tokens(case_of, family):
    """As in transformers: their own embeddings, and positions of text."""
    case = case_of(family)
    prompt = Prompt([3, VISION_START, IMAGE, IMAGE, VISION_END, 5, VIDEO, 7, IMAGE])
    prompt.inputs |= types_for_experts(family, prompt.token_ids)
    (request,) = generate(
        case.engine(torch.device("cpu")), [prompt], NUM_TOKENS, prompt_logprobs=VOCAB
    )
    check(request, expected(case.oracle, prompt, NUM_TOKENS), of_prompt=True)


def test_a_model_with_a_vision_encoder_has_the_buffer_from_the_start(case_of):
    engine = case_of("qwen3_vl").engine(torch.device("cpu"), mm_cache_memory_bytes=None)
    assert engine.kv_report()["feature_bytes"] == 8192 * 192 * 4


def test_qwen3_features_have_columns_for_early_layers(case_of):
    engine = case_of("qwen3_vl").engine(torch.device("cpu"))
    item = MultimodalItem(features=np.zeros((1, 64), np.float32), start=0, grid_thw=(1, 2, 2))
    with pytest.raises(RequestError, match=r"features: expected \[n, 192\]"):
        engine.add_request("a", [IMAGE, 3], SamplingParams(), multimodal=[item])
