"""Rope tables equal the tables of transformers' own rotary embedding modules."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig
from transformers.models.ernie4_5 import modeling_ernie4_5 as ernie4_5
from transformers.models.granite import modeling_granite as granite
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.ministral import modeling_ministral as ministral
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from transformers.models.seed_oss import modeling_seed_oss as seed_oss
from transformers.models.smollm3 import modeling_smollm3 as smollm3

from mrv1.errors import ConfigError
from mrv1.models import ModelConfig, RopeConfig
from mrv1.models.rope import attention_factor, cos_sin_table, inverse_frequencies
from tests.models.families import FAMILIES, ROPES, tiny_config
from tests.models.vision_families import tiny_vision_config

MAX_POSITIONS = 4096


def llama_config(parameters: dict[str, Any], head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(parameters),
    )


def rope_config(parameters: dict[str, Any], head_dim: int = 64) -> RopeConfig:
    """Parse ``parameters`` as transformers completes them, as loading a checkpoint does."""
    return RopeConfig.from_parameters(
        llama_config(parameters, head_dim).rope_parameters,
        rotary_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
    )


def check_table(parameters: dict[str, Any], head_dim: int) -> None:
    oracle = LlamaRotaryEmbedding(llama_config(parameters, head_dim))
    rope = rope_config(parameters, head_dim)
    torch.testing.assert_close(inverse_frequencies(rope), oracle.inv_freq, rtol=3e-7, atol=0)
    assert attention_factor(rope) == pytest.approx(oracle.attention_scaling, rel=1e-12)
    cos, sin = oracle(torch.zeros(1), torch.arange(MAX_POSITIONS)[None])
    half = head_dim // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1)
    table = cos_sin_table(rope, MAX_POSITIONS, "cpu")
    assert table.dtype == torch.float32
    # An angle of 4,095 that is off in its last place moves cos and sin by up to 5e-4.
    torch.testing.assert_close(table, expected, rtol=0, atol=5e-4)


@st.composite
def rope_parameters(draw: st.DrawFn) -> dict[str, Any]:
    rope_type = draw(st.sampled_from(sorted(ROPES)))
    parameters = {"rope_type": rope_type, "rope_theta": draw(st.sampled_from([1e4, 5e5, 1e6]))}
    if rope_type != "default":
        parameters["factor"] = draw(st.floats(1.0, 64.0))
    if rope_type in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = draw(st.integers(32, MAX_POSITIONS - 1))
    if rope_type == "llama3":
        parameters["low_freq_factor"] = draw(st.floats(0.5, 2.0))
        parameters["high_freq_factor"] = draw(st.floats(2.5, 8.0))
    if rope_type == "yarn":
        optional = {
            "attention_factor": st.floats(0.5, 2.0),
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.5, 4.0),
            "mscale": st.floats(0.0, 2.0),
            "mscale_all_dim": st.floats(0.0, 2.0),
            "truncate": st.booleans(),
        }
        parameters |= draw(st.fixed_dictionaries({}, optional=optional))
    return parameters


@given(parameters=rope_parameters(), head_dim=st.sampled_from([16, 32, 80, 128]))
def test_table_equals_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    check_table(parameters, head_dim)


@pytest.mark.parametrize("rope", ROPES)
def test_table_of_each_type_equals_transformers(rope: str) -> None:
    check_table(ROPES[rope], 64)


@pytest.mark.parametrize(
    "settings",
    [
        {"factor": 1.0},  # nothing to extend: attention factor 1
        {"mscale": 0.7, "mscale_all_dim": 1.2},
        {"mscale": 0.0, "mscale_all_dim": 1.0},  # 0 = not set
        {"mscale": 0.7},  # mscale has no effect without mscale_all_dim
        {"beta_fast": 0, "beta_slow": 0},  # 0 = not set
        {"attention_factor": 1.3},
        {"truncate": False},
        {"truncate": False, "beta_fast": 2, "beta_slow": 2},  # the ramp is a step
        {"original_max_position_embeddings": 6},  # and here at its lower end
    ],
)
def test_yarn_settings_equal_transformers(settings: dict[str, Any]) -> None:
    check_table(ROPES["yarn"] | settings, 64)


def test_rope_types_have_different_frequencies() -> None:
    tables = [inverse_frequencies(rope_config(parameters)) for parameters in ROPES.values()]
    for index, table in enumerate(tables):
        assert not any(torch.equal(table, other) for other in tables[index + 1 :])


def test_llama3_rope_stretches_only_long_wavelengths() -> None:
    """Llama 3.1: wavelengths under 2,048 stay, over 8,192 stretch by 8, between them by less."""
    rope = RopeConfig(
        rope_type="llama3",
        theta=500000.0,
        rotary_dim=128,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    for pair, frequency in enumerate(inverse_frequencies(rope).tolist()):
        plain = 500000.0 ** (-2 * pair / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 2048:
            assert frequency == pytest.approx(plain, rel=1e-5)
        elif wavelength > 8192:
            assert frequency == pytest.approx(plain / 8, rel=1e-5)
        else:
            assert plain / 8 < frequency < plain


def test_the_yarn_factor_defaults_to_the_ratio_of_the_two_contexts() -> None:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": None,
        "original_max_position_embeddings": 1024,
    }
    rope = RopeConfig.from_parameters(
        parameters, rotary_dim=64, max_position_embeddings=MAX_POSITIONS
    )
    assert rope.factor == 4.0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "dynamic"}, "rope_type: expected one of .*'yarn'.*, got 'dynamic'"),
        ({"rope_type": "linear"}, "rope_parameters.factor: expected a number > 0, got None"),
        (
            {"rope_type": "linear", "factor": "2"},
            "rope_parameters.factor: expected a number > 0, got '2'",
        ),
        (
            {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64},
            "low_freq_factor: .* got None; rope_parameters.high_freq_factor: .* got None",
        ),
        (
            ROPES["yarn"] | {"beta_fast": -1},
            "rope_parameters.beta_fast: expected a number > 0, got -1",
        ),
        (
            ROPES["yarn"] | {"truncate": "no"},
            "rope_parameters.truncate: expected true or false, got 'no'",
        ),
        ({"rope_theta": True}, "rope_parameters.rope_theta: expected a number > 0, got True"),
        (
            {"partial_rotary_factor": 0.5},
            "rope_parameters.partial_rotary_factor: expected 1.0, got 0.5",
        ),
    ],
)
def test_wrong_rope_parameters_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeConfig.from_parameters(
            {"rope_theta": 10000.0} | parameters, rotary_dim=64, max_position_embeddings=128
        )


def test_an_odd_rotary_dim_is_refused() -> None:
    with pytest.raises(ConfigError, match="rotary_dim: expected an even number, got 33"):
        RopeConfig.from_parameters(ROPES["default"], rotary_dim=33, max_position_embeddings=128)


# --- every spelling of a config.json -----------------------------------------------------------

ROTARY = {
    "llama": llama.LlamaRotaryEmbedding,
    "mistral": mistral.MistralRotaryEmbedding,
    "qwen2": qwen2.Qwen2RotaryEmbedding,
    "qwen3": qwen3.Qwen3RotaryEmbedding,
    "ernie4_5": ernie4_5.Ernie4_5RotaryEmbedding,
    "smollm3": smollm3.SmolLM3RotaryEmbedding,
    "seed_oss": seed_oss.SeedOssRotaryEmbedding,
    "ministral": ministral.MinistralRotaryEmbedding,
    "granite": granite.GraniteRotaryEmbedding,
    "qwen2_vl": qwen2_vl.Qwen2VLRotaryEmbedding,
    "qwen2_5_vl": qwen2_5_vl.Qwen2_5_VLRotaryEmbedding,
    "qwen3_vl": qwen3_vl.Qwen3VLTextRotaryEmbedding,
}
"""The module of transformers whose frequencies a family's model has."""


@st.composite
def spellings(draw: st.DrawFn) -> tuple[dict[str, Any], bool]:
    """Draw the rope settings of a config.json, and whether mrv1 has to take them."""
    settings = draw(rope_parameters())
    rope_type, theta = settings.pop("rope_type"), settings.pop("rope_theta")
    original = settings.pop("original_max_position_embeddings", None)
    beside: dict[str, Any] = {}
    places = {"inside": [settings], "beside": [beside], "both": [settings, beside], "absent": []}
    for place in places[draw(st.sampled_from([*places]))]:
        place["rope_theta"] = theta
        theta = 20000.0  # the other place's
    if original is not None:
        for place in places[draw(st.sampled_from([*places]))]:
            place["original_max_position_embeddings"] = original
            original += 100
    must = True
    if draw(st.integers(0, 9)) == 0 and "factor" in settings:
        del settings["factor"]
        must = False
    if draw(st.integers(0, 3)) == 0:
        share = draw(st.sampled_from([1.0, 0.5]))
        draw(st.sampled_from([settings, beside]))["partial_rotary_factor"] = share
        must = must and share == 1.0
    if draw(st.integers(0, 9)) == 0:
        rope_type, must = draw(st.sampled_from(["dynamic", "longrope", "su", None])), False
    settings[draw(st.sampled_from(["rope_type", "type"]))] = rope_type
    if draw(st.integers(0, 9)) == 0:
        layer_types = draw(st.sampled_from([["full_attention"], ["full_attention", "global"]]))
        settings, must = {name: dict(settings) for name in layer_types}, False
    return {draw(st.sampled_from(["rope_parameters", "rope_scaling"])): settings, **beside}, must


@pytest.mark.parametrize("family", ROTARY)
@given(spelling=spellings())
@example(
    spelling=(
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            "original_max_position_embeddings": 64,
        },
        True,
    )
)
@example(
    spelling=(
        {
            "rope_scaling": {
                "type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            "rope_theta": 5e5,
            "original_max_position_embeddings": 64,
        },
        True,
    )
)  # fmt: skip
def test_every_spelling_of_a_rope_is_read_as_transformers_reads_it(
    directory_of: Callable[[str], Path], family: str, spelling: tuple[dict[str, Any], bool]
) -> None:
    """Frequencies and attention factor are those of its model, or the settings are refused."""
    settings, must = copy.deepcopy(spelling)
    directory = directory_of(family)
    raw = json.loads((directory / "template.json").read_text())
    text = raw.get("text_config", raw)
    section = (text.pop("rope_parameters") or {}).get("mrope_section")
    if section is not None:
        container = settings.get("rope_parameters") or settings["rope_scaling"]
        container["mrope_section"] = section
    text |= settings
    (directory / "config.json").write_text(json.dumps(raw))
    try:
        hf = AutoConfig.from_pretrained(directory)
        oracle = ROTARY[family](hf.get_text_config())
    except Exception:  # of any type: transformers itself cannot run such a model
        must, oracle = False, None
    try:
        rope = ModelConfig.from_pretrained(directory).rope
    except ConfigError as error:
        assert not must, error  # noqa: PT017 - whichever it is
        assert "rope" in str(error) or "partial_rotary_factor" in str(error)  # noqa: PT017
        return
    assert oracle is not None
    torch.testing.assert_close(inverse_frequencies(rope), oracle.inv_freq, rtol=3e-7, atol=0)
    assert attention_factor(rope) == pytest.approx(oracle.attention_scaling, rel=1e-12)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family to a directory with its configuration."""

    @lru_cache
    def directory(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        is_text = family in FAMILIES
        config = tiny_config(family) if is_text else tiny_vision_config(family)
        config.save_pretrained(path)
        (path / "config.json").rename(path / "template.json")
        return path

    return directory


def test_numbers_that_are_not_finite_are_refused() -> None:
    for value in (math.inf, math.nan, 10**400):
        parameters = ROPES["yarn"] | {"factor": value}
        with pytest.raises(ConfigError, match=r"rope_parameters\.factor: expected a number > 0"):
            RopeConfig.from_parameters(parameters, rotary_dim=64, max_position_embeddings=256)
