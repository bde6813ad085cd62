"""Draft heads over a paged cache draft what their plain forward pass on transformers does."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrv1 import ConfigError
from mrv1.kernels.registry import select_ops
from mrv1.models import load_model
from mrv1.models.drafts import head_config, load_head
from tests.models.draft_heads import write_eagle3, write_mtp, write_target
from tests.models.driver import PagedDriver, Request

BLOCK_SIZE = 16
NUM_DRAFTS = 4


def load(path, method, head_path):
    """Return the target and its head, in float64."""
    ops = select_ops("reference")
    target = load_model(path, device="cpu", dtype=torch.float64, ops=ops, progress=False)
    config = head_config(method, head_path, target.config)
    return target, load_head(config, head_path, target, ops)


def chunked_drafts(target, head, token_ids, chunk):
    """Return the drafts after ``token_ids``, computed in chunks over paged caches."""
    known = len(token_ids) - 1
    models = PagedDriver(target, block_size=BLOCK_SIZE, num_blocks=4)
    heads = PagedDriver(head, block_size=BLOCK_SIZE, num_blocks=5, seed=1)
    request, own = Request(token_ids), Request(token_ids[1:])
    while request.num_computed < known:
        count = min(chunk, known - request.num_computed)
        batch = models.batch([request], [count])
        shape = batch.num_tokens, target.config.hidden_size
        sums = {i: torch.empty(shape, dtype=torch.float64) for i in head.head.sums}
        hidden = target.forward(batch, models.caches, sums=sums)
        features = torch.cat([sums[i] for i in head.head.sums], dim=1) if sums else hidden
        batch = heads.batch([own], [count])
        output, following = head.predict(batch, head.read(features), heads.caches[0])
        request.num_computed += count
        own.num_computed += count
    found, last = [], count - 1
    for _ in range(NUM_DRAFTS):
        found += head.draft(output[last : last + 1]).tolist()
        own.token_ids.append(found[-1])
        batch = heads.batch([own], [1])
        hidden = torch.nn.functional.pad(following[last : last + 1], (0, 0, 0, 1))
        output, following = head.predict(batch, hidden, heads.caches[0])
        own.num_computed += 1
        last = 0
    return found


def tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 160, (count,), generator=generator).tolist()


def check(target_path, method, head_path, plain, target):
    for count, chunk in ((2, 9), (38, 40), (38, 7)):
        token_ids = tokens(count, seed=count)
        features = plain.features(target, token_ids[:-1])
        expected = plain.drafts(token_ids, features, NUM_DRAFTS)
        assert chunked_drafts(*load(target_path, method, head_path), token_ids, chunk) == expected


OPTIONS = {
    "plain": {"norm_before_residual": False},
    "before residual": {"eagle_aux_hidden_state_layer_ids": [1, 0]},
    "norm before fc": {"norm_before_fc": True, "has_embedding": True},
    "norm of each": {"fc_norm": True, "norm_output": True, "norm_before_residual": False},
    "whole vocabulary": {"draft_vocab_size": 160},
    "default layers": {"eagle_aux_hidden_state_layer_ids": None},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_eagle3_drafts_as_its_plain_forward(name, tmp_path):
    """Every option, over targets and layers of both families in turn."""
    options = dict(OPTIONS[name])
    target_family = ("llama", "qwen3")[list(OPTIONS).index(name) % 2]
    is_default = name == "default layers"
    layers = 7 if is_default else 2
    target = write_target(tmp_path / "target", target_family, num_hidden_layers=layers)
    family = "qwen3" if name in ("norm of each", "plain") else "llama"
    bias = {"attention_bias": True} if name == "before residual" else {}
    layer = {"num_attention_heads": 2, **bias}
    head = write_eagle3(tmp_path / "head", target, family, layer, **options)
    head.sums = [2, 3, 4] if is_default else head.sums
    check(tmp_path / "target", "eagle3", tmp_path / "head", head, target)


def test_mtp_drafts_as_its_plain_forward(tmp_path):
    target = write_target(tmp_path, "ernie4_5_moe")
    head = write_mtp(tmp_path, target)
    check(tmp_path, "mtp", tmp_path, head, target)


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory):
    path = tmp_path_factory.mktemp("heads")
    target = write_target(path / "target", "llama")
    write_eagle3(path / "head", target)
    return path


@pytest.fixture
def changed(eagle3, tmp_path):
    """Write the head with other settings, and return how to load it."""
    raw = json.loads((eagle3 / "head" / "config.json").read_text())
    tensors = load_file(eagle3 / "head" / "model.safetensors")

    def loaded(settings, layer, weights):
        own = (
            raw | settings | {"transformer_layer_config": raw["transformer_layer_config"] | layer}
        )
        own = {name: value for name, value in own.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(own))
        stored = {n: t for n, t in (tensors | weights).items() if t is not None}
        save_file(stored, tmp_path / "model.safetensors")
        return load(eagle3 / "target", "eagle3", tmp_path)

    return loaded


@pytest.mark.parametrize(
    ("settings", "layer", "message"),
    [
        ({"speculators_model_type": "peagle"}, {}, "speculators_model_type: expected 'eagle3', g"),
        ({"norm_before_residual": ...}, {}, "norm_before_residual: expected true or false, got N"),
        ({"norm_output": 1}, {}, "norm_output: expected true or false, got 1"),
        (
            {"norm_before_fc": True, "fc_norm": True},
            {},
            "norm_before_fc, fc_norm: expected not both",
        ),
        ({"draft_vocab_size": 161}, {}, "draft_vocab_size: expected 1 to 160, the target's vocab"),
        ({"target_hidden_size": 32}, {}, "target_hidden_size: expected 64, the target's hidden_"),
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 3]},
            {},
            "eagle_aux_hidden_state_layer_ids: expected different layers, 0 to 2, got [0, 3]",
        ),
        ({}, {"model_type": "mistral"}, "expected model_type to be one of llama, qwen3, got 'mis"),
        ({}, {"num_hidden_layers": 2}, "num_hidden_layers: expected 1, got 2"),
        ({}, {"num_key_value_heads": 4}, "num_key_value_heads: expected 2, the target's, got 4"),
        ({}, {"head_dim": 16}, "head_dim: expected 32, the target's, got 16"),
        ({}, {"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
    ],
)
def test_settings_that_do_not_fit_are_named(changed, settings, layer, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        changed(settings, layer, {})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"norm.weight": None}, "norm.weight: missing"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(2)}, "up_proj.weight: surplus, the head has"),
        ({"fc.weight": torch.zeros(64, 64)}, "fc.weight: expected shape [64, 192], got [64, 64]"),
        ({"d2t": torch.zeros(48)}, "d2t: expected dtype I64, I32, got F32"),
        ({"d2t": torch.full((48,), 113)}, "d2t: expected tokens from 0 to 159, got 113 to 160"),
        ({"d2t": None}, "d2t: missing"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changed, weights, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        changed({}, {}, weights)


def test_an_mtp_block_that_is_not_there_is_named(tmp_path):
    write_target(tmp_path, "ernie4_5_moe")
    with pytest.raises(ConfigError, match=r"model.mtp_emb_norm.0.weight: missing"):
        load(tmp_path, "mtp", tmp_path)
