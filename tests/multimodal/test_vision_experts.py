"""Vision-language families with experts, in float64 and with unusual settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrv1.config import EngineConfig
from mrv1.engine.core import EngineCore
from mrv1.errors import ConfigError, RequestError
from mrv1.models import DecoderModel, ModelConfig, ParallelContext
from mrv1.multimodal import MultimodalItem, VisionEncoder
from mrv1.sampler import SamplingParams
from tests.models.families import CACHE
from tests.models.quantizing_cache import QuantizingCache
from tests.models.vision_families import (
    IMAGE,
    IMAGE_START,
    VIDEO,
    random_vision_model,
    tiny_vision_config,
)
from tests.multimodal.test_vision_models import (
    VOCAB,
    Prompt,
    Visual,
    by_token,
    check,
    expected,
    generate,
    make_prompt,
    types_for_experts,
)
from tests.runner.test_model_runner import enter, make_plan

PARTS: list[int | Visual] = [
    3, Visual((1, 4, 6)), 5, Visual((2, 4, 4), is_video=True), 4, Visual((1, 6, 2)), 2,
]  # fmt: skip
ODD: dict[str, list[dict[str, Any]]] = {
    "qwen3_vl_moe": [
        {},
        {
            "attention_bias": True, "head_dim": 48, "num_key_value_heads": 1, "num_experts": 5,
            "num_experts_per_tok": 3, "decoder_sparse_step": 2, "mlp_only_layers": [],
            "rms_norm_eps": 1e-2, "moe_intermediate_size": 40,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 500.0, "mrope_section": [10, 7, 7],
                "mrope_interleaved": True,
            },
        },
    ],
    "ernie4_5_vl_moe": [
        {},
        {
            "head_dim": 32, "num_key_value_heads": 1, "moe_num_experts": 5, "moe_k": 2,
            "moe_num_shared_experts": 0, "moe_norm_min": 0.9, "moe_intermediate_size": [24, 40],
            "mlp_layer_types": ["sparse", "dense", "sparse"], "rms_norm_eps": 1e-2,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 500.0, "mrope_section": [5, 5, 6],
            },
        },
    ],
}  # fmt: skip
CASES = pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param(family, settings, id=f"{family}-{index}")
        for family, several in ODD.items()
        for index, settings in enumerate(several)
    ],
)


def checkpoint(path: Path, family: str, settings: dict[str, Any]) -> tuple[Any, Prompt]:
    """Write a checkpoint; return transformers' model in float64, and a prompt."""
    oracle = random_vision_model(tiny_vision_config(family, **settings))
    oracle.save_pretrained(path)
    oracle = oracle.double()
    return oracle, make_prompt(family, oracle, PARTS)


def engine(path: Path, **options: Any) -> EngineCore:
    """Return an engine in float64."""
    config = {
        "model": str(path), "device": "cpu", "dtype": "float64", "num_kv_blocks": 64,
        "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 256,
        "max_logprobs": -1, "mm_cache_memory_bytes": 1 << 20,
    }  # fmt: skip
    return EngineCore(EngineConfig(**(config | options)), progress=False)


@CASES
def test_logits_and_tokens_equal_those_of_transformers(tmp_path, family, settings):
    """At once, and in chunks after a prefix that is cached."""
    oracle, prompt = checkpoint(tmp_path, family, settings)
    count = 24 if settings else 64
    in_prompt, tokens, in_output = expected(oracle, prompt, count)
    core = engine(tmp_path)
    (request,) = generate(core, [prompt], count, prompt_logprobs=VOCAB)
    check(request, (in_prompt, tokens, in_output), of_prompt=True)
    core = engine(tmp_path, max_num_batched_tokens=7)
    for round in range(2):
        (request,) = generate(core, [prompt], 8, round=round)
        check(request, (in_prompt, tokens[:8], in_output[:8]), of_prompt=False)
    assert core.scheduler.admission.prefix_hit_tokens >= 32


@CASES
@torch.no_grad()
def test_logits_over_an_fp8_cache_are_those_of_transformers(tmp_path, family, settings):
    """transformers' cache quantizes alike; a code may turn by the last bit of a rope."""
    oracle, prompt = checkpoint(tmp_path, family, settings)
    ids = torch.tensor([prompt.token_ids])
    theirs = oracle(ids, **{CACHE: QuantizingCache()}, **prompt.inputs).logits[0].log_softmax(-1)
    core = engine(tmp_path, kv_cache_dtype="fp8_e4m3", max_num_batched_tokens=9)
    (request,) = generate(core, [prompt], 1, prompt_logprobs=VOCAB)
    error = (by_token(request.prompt_logprobs) - theirs[:-1]).abs()
    assert error.mean() <= 1e-3 * theirs.std()


# --- fused experts -----------------------------------------------------------------------------


def turned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with an expert's inputs first, as Qwen publishes them."""
    return {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in state.items()
    }


def test_fused_experts_load_with_inputs_first_or_last(tmp_path):
    oracle, prompt = checkpoint(tmp_path / "own", "qwen3_vl_moe", {})
    answer = expected(oracle, prompt, 8)
    published = tmp_path / "published"
    published.mkdir()
    state = turned(load_file(tmp_path / "own" / "model.safetensors"))
    save_file(state, published / "model.safetensors", metadata={"format": "pt"})
    (published / "config.json").write_text((tmp_path / "own" / "config.json").read_text())
    core = engine(published)
    check(generate(core, [prompt], 8)[0], answer, of_prompt=False)
    for tensors in (oracle.state_dict(), state):
        core.update_weights({"lm_head.weight": torch.zeros(VOCAB, 64)}, partial=True)
        core.update_weights(tensors)
        check(generate(core, [prompt], 8)[0], answer, of_prompt=False)


def test_fused_experts_of_another_shape_are_refused(tmp_path):
    checkpoint(tmp_path, "qwen3_vl_moe", {})
    file, name = tmp_path / "model.safetensors", "language_model.layers.0.mlp.experts.down_proj"
    state = load_file(file)
    state[f"model.{name}"] = torch.zeros(8, 48, 60)
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"down_proj: expected shape \[8, 64, 48\], got"):
        engine(tmp_path)


def test_a_router_that_does_not_renormalize_is_refused(tmp_path):
    checkpoint(tmp_path, "qwen3_vl_moe", {})
    content = json.loads((tmp_path / "config.json").read_text())
    content["text_config"]["norm_topk_prob"] = False
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="norm_topk_prob: expected None or True, as the family"):
        engine(tmp_path)


# --- experts of images -------------------------------------------------------------------------


def test_bits_do_not_depend_on_chunks_if_deterministic(tmp_path):
    """Experts of text and of images are in one sum of leaves."""
    _, prompt = checkpoint(tmp_path, "ernie4_5_vl_moe", {})
    found = []
    for chunk in (64, 30):
        options = {"dtype": "float32", "deterministic": True, "max_num_batched_tokens": chunk}
        (request,) = generate(engine(tmp_path, **options), [prompt], 4, prompt_logprobs=VOCAB)
        parts = request.prompt_logprobs + request.output_logprobs
        found.append(by_token(parts))
    assert torch.equal(*found)


def test_tokens_of_prompts_alone_have_experts_for_images(tmp_path):
    """Output tokens are text whatever their ids are, also when they are computed again."""
    oracle, _ = checkpoint(tmp_path, "ernie4_5_vl_moe", {})
    prompt = Prompt([3, IMAGE, 5])
    prompt.inputs |= types_for_experts("ernie4_5_vl_moe", prompt.token_ids)
    core, tokens = engine(tmp_path), [IMAGE_START, IMAGE, VIDEO, 7]
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, logprobs=VOCAB,
        logit_bias=dict.fromkeys(tokens, 100.0),
    )  # fmt: skip
    request = core.add_request("a", prompt.token_ids, params)
    while core.has_unfinished_requests:
        core.step()
    output = list(request.output_token_ids)
    assert set(output) <= {IMAGE_START, IMAGE, VIDEO, 7}
    with torch.no_grad():
        types = torch.cat([prompt.inputs["moe_mm_token_type_ids"], torch.zeros(1, 4).int()], 1)
        ids = torch.tensor([prompt.token_ids + output])
        logits = oracle(ids, moe_mm_token_type_ids=types).logits[0]
    theirs = logits[2:-1].log_softmax(-1)
    torch.testing.assert_close(by_token(request.output_logprobs), theirs, rtol=0, atol=1e-4)


def test_visual_tokens_are_found_in_a_query_that_begins_earlier(tmp_path):
    """Beside a row of drafts, a short prompt has as many tokens, and the first are of no use."""
    oracle, _ = checkpoint(tmp_path, "ernie4_5_vl_moe", {})
    own = enter("a", 0, [3, 5, 7])
    short = enter(
        "b", 1, [4, 6, IMAGE_START], sampling_params=SamplingParams(temperature=0, logprobs=VOCAB)
    )
    drafts = {"draft_token_ids": ((9, 8, 7), ())}
    steps = {"a": (0, 4, ()), "b": (1, 3, (1,))}
    options = {"speculative": {"method": "ngram", "num_tokens": 3}, "max_model_len": 512}
    runner = engine(tmp_path, **options).runner
    runner.execute(make_plan(0, {"a": (0, 3, (0,))}, new=(own,))).result()
    output = runner.execute(make_plan(1, steps, new=(short,), **drafts)).result()
    types = types_for_experts("ernie4_5_vl_moe", short.token_ids.tolist())
    with torch.no_grad():
        theirs = oracle(torch.tensor([short.token_ids.tolist()]), **types).logits[0, -1:]
    got = by_token([output.logprobs[1]])
    torch.testing.assert_close(got, theirs.log_softmax(-1), rtol=0, atol=1e-4)


def check_beside_a_decode(
    core: EngineCore, oracle: Any, token_ids: list[int], tolerance: float
) -> None:
    """Compare two tokens' log-probabilities with transformers', while another request decodes."""
    other = core.add_request("other", [3, 5], SamplingParams(max_tokens=9, ignore_eos=True))
    core.step()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=VOCAB)
    request = core.add_request("a", token_ids, params)
    while core.has_unfinished_requests:
        core.step()
    assert other.error is request.error is None
    types = types_for_experts("ernie4_5_vl_moe", token_ids)["moe_mm_token_type_ids"]
    ids = torch.tensor([token_ids + list(request.output_token_ids[:1])])
    with torch.no_grad():
        types = torch.cat([types, torch.zeros(1, 1).int()], 1)
        logits = oracle(ids, moe_mm_token_type_ids=types).logits[0, -2:]
    got = by_token(request.output_logprobs).double()
    torch.testing.assert_close(got, logits.log_softmax(-1), rtol=0, atol=tolerance)


LAST_TOKENS = ([IMAGE], [3, 5, 4, IMAGE], [IMAGE, 5, 4, IMAGE_START])


@pytest.mark.parametrize("token_ids", LAST_TOKENS)
def test_a_last_token_alone_has_experts_for_images(tmp_path, monkeypatch, token_ids):
    """Beside a decode: such a step is no step of decodes, which have experts of text alone."""
    oracle, _ = checkpoint(tmp_path, "ernie4_5_vl_moe", {})
    core = engine(tmp_path, max_num_batched_tokens=4)
    model, steps = core.runner.model, []

    def forward(batch, *args, **options):
        steps.append((batch.num_tokens, batch.query_len, batch.is_visual is not None))
        return DecoderModel.forward(model, batch, *args, **options)

    monkeypatch.setattr(model, "forward", forward)
    check_beside_a_decode(core, oracle, token_ids, 1e-4)
    prompts = [(2, None, True)] + [(4, None, True)] * (len(token_ids) > 1) + [(2, None, True)]
    assert [step for step in steps if step[2]] == prompts
    assert {step for step in steps if not step[2]} == {(1, 1, False), (2, 1, False)}


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_graphs_have_the_experts_of_each_step(tmp_path):
    """Those of decodes text alone, those with prompts both sets."""
    oracle, _ = checkpoint(tmp_path, "ernie4_5_vl_moe", {})
    options = {"device": "cuda", "dtype": "float32", "max_num_batched_tokens": 4}
    core = engine(tmp_path, **options)
    before = core.runner.num_compilations
    try:
        for token_ids in LAST_TOKENS:
            check_beside_a_decode(core, oracle, token_ids, 1e-3)
        assert core.runner.num_compilations == before
    finally:
        core.runner.close()


def test_the_encoder_of_published_files_is_left_out(tmp_path):
    """Their names do not begin with the model's, as those of transformers do."""
    _, prompt = checkpoint(tmp_path, "ernie4_5_vl_moe", {})
    (expected,) = generate(engine(tmp_path), [prompt], 2)
    file = tmp_path / "model.safetensors"
    state = {
        name.removeprefix("model.") if name.startswith("model.vision_model.") else name: tensor
        for name, tensor in load_file(file).items()
    }
    assert any(name.startswith("vision_model.") for name in state)
    save_file(state, file, metadata={"format": "pt"})
    (request,) = generate(engine(tmp_path), [prompt], 2)
    assert request.output_token_ids == expected.output_token_ids


def test_ranks_divide_experts_of_both_kinds():
    config = ModelConfig.from_hf(tiny_vision_config("ernie4_5_vl_moe"))
    context = ParallelContext(size=2, all_reduce=torch.clone, all_gather=torch.clone)
    assert config.experts is not None
    assert config.experts.widths == (48, 16)
    assert context.shard(config).experts.widths == (24, 8)
    config = ModelConfig.from_hf(
        tiny_vision_config("ernie4_5_vl_moe", moe_intermediate_size=[48, 12])
    )
    with pytest.raises(ConfigError, match=r"expected a multiple of 8 as the width .*, got 12"):
        context.shard(config, deterministic=True, rank_invariant=True)
    config = replace(config, experts=replace(config.experts, visual_size=15))
    with pytest.raises(ConfigError, match="expected a divisor of 15 rows of each expert, got 2"):
        context.shard(config)


def test_features_of_ernie_come_from_outside(tmp_path):
    checkpoint(tmp_path, "ernie4_5_vl_moe", {})
    with pytest.raises(ConfigError, match="a family whose encoder mrv1 has, got Ernie4_5_VLMoe"):
        VisionEncoder(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"moe_intermediate_size": [48]}, r"intermediate_size: expected two widths, got \[48\]"),
        ({"moe_intermediate_size": [48, 0]}, "moe_intermediate_size: expected >= 1, got 0"),
        ({"use_bias": True}, "mlp_bias: expected none with experts"),
        ({"moe_k": 9}, "moe_k: expected 1 to 8"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
            "mrope_section: expected as many pairs of height as of width, got 4 and 2",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [3, 3, 3]}},
            r"mrope_section: expected three integers >= 0 with sum 8, got \[3, 3, 3\]",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0,
                                 "mrope_section": [3, 3, 2]}},
            "rope_type: expected 'default' with this M-RoPE, got 'linear'",
        ),
    ],
)  # fmt: skip
def test_settings_of_ernie_that_cannot_run_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(tiny_vision_config("ernie4_5_vl_moe", **settings))


def test_frames_of_a_video_are_those_of_whole_features(tmp_path):
    checkpoint(tmp_path, "ernie4_5_vl_moe", {})
    item = MultimodalItem(
        features=torch.zeros(1, 64), start=1, modality="video", grid_thw=(3, 2, 2)
    )
    message = r"grid_thw: expected frames that are a multiple of 2 \(temporal_merge_size\), got"
    with pytest.raises(RequestError, match=message):
        engine(tmp_path).add_request("a", [3, VIDEO], SamplingParams(), multimodal=[item])
