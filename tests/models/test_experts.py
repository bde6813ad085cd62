"""Families with experts: what config.json says of them, their tensors, and their logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrv1 import LLM, ConfigError, SamplingParams
from mrv1.kernels import Routing
from mrv1.kernels.registry import select_ops
from mrv1.models import (
    ModelConfig,
    ParallelContext,
    checkpoint_tensors,
    expert_layer,
    load_model,
)
from tests.models.driver import PagedDriver, blocks_needed
from tests.models.families import (
    EXPERTS,
    expected_logits,
    random_model,
    save_checkpoint,
    tiny_config,
)
from tests.models.quantizing_cache import fp8_logits
from tests.thread_ranks import on_ranks

PROMPT = [(7 * i) % 160 for i in range(40)]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "ernie4_5_moe": [
        {},
        {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "num_hidden_layers": 4},
        {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_num_shared_experts": 1},
    ],
    "qwen3_moe": [{}, {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []}],
    "mixtral": [{}],
    "olmoe": [{}, {"norm_topk_prob": True}],
    "gpt_oss": [{}],
    "glm4_moe": [
        {},
        {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "use_qk_norm": False},
    ],
}
CASES = [
    pytest.param(family, settings, id=f"{family}-{index}")
    for family, several in SETTINGS.items()
    for index, settings in enumerate(several)
]


def logits(
    path: Path,
    chunk: int | None,
    parallel: ParallelContext | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    model = load_model(
        path, device="cpu", dtype=dtype, ops=select_ops("reference"), progress=False,
        parallel=parallel,
    )  # fmt: skip
    driver = PagedDriver(model, block_size=16, num_blocks=blocks_needed([PROMPT], 16))
    return driver.logits([PROMPT], chunk)[0]


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_logits_equal_those_of_transformers(tmp_path, family, settings):
    """Token by token, in chunks and at once; routing is in float32 on both sides."""
    model = save_checkpoint(tmp_path, tiny_config(family, **settings))
    expected = expected_logits(model.double(), PROMPT)
    for chunk in (1, 24, None):
        torch.testing.assert_close(logits(tmp_path, chunk), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", EXPERTS)
def test_bfloat16_logits_err_no_more_than_those_of_transformers(tmp_path, family):
    """Against float64; a rounded score may choose another expert, on either side.

    So the errors of the middle tokens are compared, on which such a choice has no effect.
    """
    model = save_checkpoint(tmp_path, tiny_config(family))
    exact = expected_logits(model.double(), PROMPT)
    theirs = expected_logits(model.bfloat16(), PROMPT).double()
    ours = [logits(tmp_path, chunk, dtype=torch.bfloat16).double() for chunk in (1, 24, None)]
    errors = [(each - exact).abs().mean(1).median() for each in (theirs, *ours)]
    assert max(errors[1:]) <= 1.5 * errors[0] + 1e-3


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", EXPERTS)
def test_logits_of_ranks_equal_those_of_one(tmp_path, family, size):
    save_checkpoint(tmp_path, tiny_config(family))
    expected = logits(tmp_path, 24)
    for found in on_ranks(size, lambda parallel: logits(tmp_path, 24, parallel)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", EXPERTS)
def test_chosen_experts_equal_those_of_transformers(tmp_path, monkeypatch, family):
    """The ids that transformers' routers return, sorted, layer by layer and token by token."""
    model = save_checkpoint(tmp_path, tiny_config(family)).double()
    chosen: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith((".mlp.gate", ".block_sparse_moe.gate", ".mlp.router")):
            module.register_forward_hook(lambda *args: chosen.append(args[-1][2]))
    expected_logits(model, PROMPT)
    ops, found = select_ops("reference"), []

    def route(*args, **kwargs):
        ids, weights = routed(*args, **kwargs)
        found.append(ids[: len(PROMPT)])
        return ids, weights

    routed = ops.route_experts
    monkeypatch.setattr(ops, "route_experts", route)
    own = load_model(tmp_path, device="cpu", dtype=torch.float64, ops=ops, progress=False)
    routing = own.config.experts.routing
    blocks = blocks_needed([PROMPT], 16)
    PagedDriver(own, block_size=16, num_blocks=blocks).logits([PROMPT], None)
    assert len(found) == len(chosen) == sum(own.config.experts.layers)
    for ours, theirs in zip(found, chosen, strict=True):
        assert torch.equal(
            ours[:, : routing.top_k].long().sort(1).values, theirs.view(40, -1).sort(1).values
        )


@pytest.mark.parametrize("family", EXPERTS)
def test_greedy_tokens_equal_those_of_transformers(tmp_path, family):
    model = save_checkpoint(tmp_path, tiny_config(family)).double()
    ids = list(PROMPT)
    for _ in range(64):
        ids.append(int(expected_logits(model, ids)[-1].argmax()))
    with LLM(tmp_path, dtype="float64", device="cpu", num_kv_blocks=64, block_size=16) as llm:
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, params)
    assert list(output.outputs[0].token_ids) == ids[len(PROMPT) :]


def test_deterministic_bits_of_many_tokens_are_those_of_few(tmp_path, monkeypatch):
    """The products of leaves of many tokens are too large to be kept at the same time."""
    save_checkpoint(tmp_path, tiny_config("ernie4_5_moe"))
    found = []
    for least in (expert_layer.LEAF_BYTES, 1):
        monkeypatch.setattr(expert_layer, "LEAF_BYTES", least)
        model = load_model(
            tmp_path, device="cpu", dtype=torch.float32, ops=select_ops("reference"),
            progress=False, deterministic=True, rank_invariant=True,
        )  # fmt: skip
        driver = PagedDriver(model, block_size=16, num_blocks=blocks_needed([PROMPT], 16))
        found.append(driver.logits([PROMPT], None)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("granularity", ["token", "quarter", "head"])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family == "qwen3_moe" else pytest.mark.full)
        for family in EXPERTS
    ],
)
def test_logits_over_an_fp8_cache_are_those_of_transformers(tmp_path, family, granularity):
    """transformers' cache quantizes alike; a code may turn by the last bit of a rope."""
    config = tiny_config(family)
    model = save_checkpoint(tmp_path, config).double()
    own = load_model(
        tmp_path, device="cpu", dtype=torch.float64, ops=select_ops("reference"), progress=False
    )
    scales, quarter = None, 4 if granularity == "quarter" else None
    if granularity == "head":
        scales = torch.full((config.num_hidden_layers, 2, 2), 0.03)
    for chunk in (None, 5):
        expected = fp8_logits(model, PROMPT, scales, quarter, chunk)
        driver = PagedDriver(
            own, block_size=16, num_blocks=8, granularity=granularity, head_scales=scales
        )
        error = (driver.logits([PROMPT], chunk)[0] - expected).abs()
        assert error.mean() <= 1e-3 * expected.std(), chunk


# --- configurations ----------------------------------------------------------------------------


def test_what_ernie_says_of_its_experts():
    settings = {"num_hidden_layers": 6, "moe_layer_interval": 2, "moe_layer_end_index": 4}
    config = ModelConfig.from_hf(tiny_config("ernie4_5_moe", **settings))
    assert config.experts is not None
    assert config.experts.layers == (False, True, False, True, False, False)
    assert config.experts.intermediate_size == 48
    assert config.experts.routing == Routing(
        num_experts=8, top_k=3, num_shared=2, renormalizes=True, least_sum=1e-12
    )


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok: expected 1 to 8"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts: expected 1 to 1024, got 0"),
        ("ernie4_5_moe", {"moe_k": 9}, "moe_k: expected 1 to 8, as many as the experts"),
        ("glm4_moe", {"n_group": 3}, "n_group: expected a divisor of 8 experts, got 3"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func: expected None or 'softmax'"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func: expected None or 'sigmoid'"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method: expected None or 'noaux_tc'"),
        ("qwen3_moe", {"topk_method": "noaux_tc"}, "topk_method: expected None or 'greedy'"),
        ("qwen3_moe", {"n_shared_experts": 2}, "n_shared_experts: expected None or 0, as the"),
        ("mixtral", {"routed_scaling_factor": 2.5}, "routed_scaling_factor: expected None or 1"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: expected None"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size: expected >= 1"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "layers with experts: .* got integer modulo"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "layers with experts: .* got integer modulo"),
    ],
)
def test_settings_that_cannot_run_are_named(family, settings, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(tiny_config(family, **settings))


def test_settings_that_say_what_the_family_does_anyway():
    """DeepSeek's names for GLM's router, which some configurations carry along."""
    settings = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    config = ModelConfig.from_hf(tiny_config("glm4_moe", **settings))
    assert config.experts == ModelConfig.from_hf(tiny_config("glm4_moe")).experts


def test_ranks_divide_each_expert():
    config = ModelConfig.from_hf(tiny_config("qwen3_moe", moe_intermediate_size=50))
    context = ParallelContext(size=4, all_reduce=torch.clone, all_gather=torch.clone)
    with pytest.raises(ConfigError, match="expected a divisor of 50 rows of each expert, got 4"):
        context.shard(config)
    with pytest.raises(ConfigError, match="expected a multiple of 8 as the width of an expert"):
        replace(context, size=2).shard(config, deterministic=True, rank_invariant=True)
    part = replace(context, size=2).shard(config).experts
    assert part is not None
    assert part.intermediate_size == 25


# --- checkpoints -------------------------------------------------------------------------------


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    model = load_model(
        path, device="cpu", dtype=torch.float32, ops=select_ops("reference"), progress=False
    )
    return checkpoint_tensors(model.config, model.weights)


@pytest.mark.parametrize("family", EXPERTS)
def test_weights_take_the_checkpoints_memory(tmp_path, family):
    save_checkpoint(tmp_path, tiny_config(family))
    stored = load_file(tmp_path / "model.safetensors")
    weights = weights_of(tmp_path)
    storages = {t.data_ptr(): t for t in map(torch.Tensor.untyped_storage, weights.values())}
    assert sum(t.nbytes() for t in storages.values()) == sum(t.nbytes for t in stored.values())
    for name, tensor in weights.items():
        assert torch.equal(tensor, stored[name]), name


@pytest.mark.parametrize("family", EXPERTS)
def test_fused_names_give_the_same_weights(tmp_path, family):
    """transformers fuses a layer's experts in memory; some write such a state to disk."""
    config = tiny_config(family)
    model = save_checkpoint(tmp_path / "single", config)
    fused = tmp_path / "fused"
    fused.mkdir()
    config.save_pretrained(fused)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    save_file(state, fused / "model.safetensors", metadata={"format": "pt"})
    config_json = (tmp_path / "single" / "config.json").read_text()
    (fused / "config.json").write_text(config_json)
    singles, fuseds = weights_of(tmp_path / "single"), weights_of(fused)
    assert singles.keys() == fuseds.keys()
    for name, tensor in singles.items():
        assert torch.equal(tensor, fuseds[name]), name


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ("drop", ["model.layers.1.mlp.experts.3.up_proj.weight: missing"]),
        ("more", ["model.layers.1.mlp.experts.8.up_proj.weight: surplus"]),
        ("bias", ["e_score_correction_bias: expected shape [1, 8], got [1, 7]"]),
        ("twice", ["model.layers.1.mlp.experts.0.gate_proj.weight: stored twice"]),
        ("shape", ["model.layers.1.mlp.experts.gate_up_proj: expected shape [8, 96, 64], got"]),
    ],
)
def test_tensors_that_do_not_match_are_named(tmp_path, change, messages):
    save_checkpoint(tmp_path, tiny_config("ernie4_5_moe"))
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    up = "model.layers.1.mlp.experts.3.up_proj.weight"
    if change == "drop":
        del state[up]
    if change == "more":
        state[up.replace(".3.", ".8.")] = state[up].clone()
    if change == "bias":
        name = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
        state[name] = torch.zeros(1, 7)
    if change in ("twice", "shape"):
        shape = (8, 96, 64) if change == "twice" else (8, 90, 64)
        state["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(shape)
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as error:
        weights_of(tmp_path)
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("ernie4_5_moe", "model.mtp_block.0.mlp.down_proj.weight"),
        ("ernie4_5_moe", "model.mtp_linear_proj.0.weight"),
        ("glm4_moe", "model.layers.2.eh_proj.weight"),
        ("glm4_moe", "model.layers.2.mlp.experts.0.up_proj.weight"),
    ],
)
def test_a_layer_that_predicts_further_tokens_is_not_loaded(tmp_path, family, name):
    """Published checkpoints have one; transformers leaves it out, too."""
    save_checkpoint(tmp_path, tiny_config(family))
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    save_file(state | {name: torch.zeros(3, 5)}, file, metadata={"format": "pt"})
    assert weights_of(tmp_path).keys() == state.keys()
    with LLM(tmp_path, device="cpu", num_kv_blocks=8, block_size=16) as llm:
        llm.update_weights(state | {name: torch.zeros(3, 5)})


def test_other_families_have_no_such_layer(tmp_path):
    save_checkpoint(tmp_path, tiny_config("qwen3_moe"))
    file, name = tmp_path / "model.safetensors", "model.layers.2.mlp.down_proj.weight"
    state = load_file(file)
    save_file(state | {name: torch.zeros(3, 5)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"{name}: surplus"):
        weights_of(tmp_path)


@pytest.mark.parametrize(
    ("values", "got"), [(torch.zeros(4, 200, 64), r"\[4, 200, 64\]"), ([1.0], "list")]
)
def test_new_fused_weights_have_the_shape_of_all_experts(tmp_path, values, got):
    """Slices of a tensor that is too large would have the right shapes."""
    save_checkpoint(tmp_path, tiny_config("mixtral"))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    message = rf"{name}: expected a tensor of shape \[4, 192, 64\], got {got}"
    with LLM(tmp_path, device="cpu", num_kv_blocks=8, block_size=16) as llm:  # noqa: SIM117
        with pytest.raises(ConfigError, match=message):
            llm.update_weights({name: values}, partial=True)


@pytest.mark.parametrize("size", [1, 2])
def test_new_weights_under_the_names_of_a_model_in_memory(tmp_path, size):
    save_checkpoint(tmp_path, tiny_config("mixtral"))
    new = random_model(tiny_config("mixtral"), seed=5)
    with LLM(
        str(tmp_path), dtype="float64", device="cpu", num_kv_blocks=64, block_size=16,
        tensor_parallel_size=size,
    ) as llm:  # fmt: skip
        llm.update_weights(new.state_dict())
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, params)
    ids = list(PROMPT)
    for _ in range(8):
        ids.append(int(expected_logits(new.double(), ids)[-1].argmax()))
    assert list(output.outputs[0].token_ids) == ids[len(PROMPT) :]
