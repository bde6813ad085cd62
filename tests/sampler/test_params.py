"""SamplingParams: what is accepted, and what each refusal says."""

from __future__ import annotations

import dataclasses

import pytest

from mrv1 import RequestError, SamplingParams


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (
        1.0,
        1.0,
        16,
        None,
    )
    assert params.top_k == 0
    assert not params.ignore_eos
    assert params.stop_token_ids == ()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", -0.1, "0 or a number from 1e-05 to 100000, got -0.1"),
        ("temperature", 1e-6, "0 or a number from 1e-05"),
        ("temperature", 1e39, "0 or a number from 1e-05"),
        ("temperature", 10**400, "0 or a number from 1e-05"),
        ("temperature", float("nan"), "0 or a number from 1e-05"),
        ("temperature", float("inf"), "0 or a number from 1e-05"),
        ("temperature", "hot", "0 or a number from 1e-05"),
        ("temperature", True, "0 or a number from 1e-05"),
        ("top_k", 2**31, "an integer >= 1"),
        ("top_k", -2, "an integer >= 1"),
        ("top_k", 1.5, "an integer >= 1"),
        ("top_p", 0.0, r"a number in \(0, 1\]"),
        ("top_p", 1.01, r"a number in \(0, 1\]"),
        ("seed", 2**63, "a 64-bit integer"),
        ("seed", "7", "a 64-bit integer"),
        ("max_tokens", 0, "an integer >= 1"),
        ("max_tokens", -5, "an integer >= 1"),
        ("max_tokens", 2.0, "an integer >= 1"),
        ("ignore_eos", 1, "a bool"),
        ("stop_token_ids", [-1], "a list of token ids"),
        ("stop_token_ids", "12", "a list of token ids"),
        ("stop_token_ids", 3, "a list of token ids"),
        ("stop", "", "texts that are not empty"),
        ("stop", ["a", ""], "texts that are not empty"),
        ("stop", [3], "texts that are not empty"),
        ("stop", 3, "texts that are not empty"),
        ("include_stop_str_in_output", 1, "a bool"),
        ("bad_words", "word", "texts that are not empty"),
        ("bad_words", [""], "texts that are not empty"),
        ("bad_words_token_ids", [[]], "lists of token ids >= 0 that are not empty"),
        ("bad_words_token_ids", [[1, -1]], "lists of token ids >= 0"),
        ("bad_words_token_ids", [3], "lists of token ids >= 0"),
        ("bad_words_token_ids", 3, "lists of token ids >= 0"),
        ("bad_words_match_prompt", "yes", "a bool"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value, expected):
    with pytest.raises(RequestError, match=f"{field}: expected {expected}"):
        SamplingParams(**{field: value})


def test_an_unknown_parameter_is_refused_with_a_suggestion():
    with pytest.raises(RequestError, match=r"'temprature' \(did you mean 'temperature'\?\)"):
        SamplingParams(temprature=1.0)


def test_top_k_minus_one_keeps_all():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_params_are_values():
    params = SamplingParams(temperature=0.5, stop_token_ids=[3, 4])
    assert params.stop_token_ids == (3, 4)
    assert SamplingParams(stop="a").stop == SamplingParams(stop=["a"]).stop == ("a",)
    assert dataclasses.replace(params, temperature=0.0).greedy
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("params", "filters"),
    [
        (SamplingParams(), False),
        (SamplingParams(top_k=5), True),
        (SamplingParams(top_p=0.9), True),
        (SamplingParams(top_p=0.9, temperature=0), False),
    ],
)
def test_filters_only_where_a_draw_is_filtered(params, filters):
    assert params.filters is filters
