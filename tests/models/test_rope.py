"""Rope tables equal the tables of transformers' own rotary embedding modules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mrv1.errors import ConfigError
from mrv1.models import RopeConfig
from mrv1.models.rope import attention_factor, cos_sin_table, inverse_frequencies
from tests.models.families import ROPES

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
