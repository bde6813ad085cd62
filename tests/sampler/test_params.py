"""SamplingParams: accepted values, and the message of each refusal."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from fractions import Fraction

import numpy as np
import pytest

from mrv1 import RequestError, SamplingParams, StructuredOutputsParams


def test_defaults_equal_the_defaults_of_vllm():
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


LOOP: list[object] = []
LOOP.append(LOOP)


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
        ("temperature", Fraction(10**400), "0 or a number from 1e-05"),
        ("temperature", np.bool_(True), "0 or a number from 1e-05"),
        ("top_k", 2**31, "an integer from 1 to 2147483647, or 0 or -1 for all, got 2147483648"),
        ("top_k", -2, "an integer from 1 to 2147483647"),
        ("top_k", 1.5, "an integer from 1 to 2147483647"),
        ("top_k", -1.0, "an integer from 1 to 2147483647"),
        ("top_k", np.array([1.5, 2.5]), "an integer from 1 to 2147483647"),
        ("top_p", 0.0, r"a number in \(0, 1\]"),
        ("top_p", 1.01, r"a number in \(0, 1\]"),
        ("min_p", -0.1, "a number from 0 to 1"),
        ("min_p", 1.1, "a number from 0 to 1"),
        ("min_p", float("nan"), "a number from 0 to 1"),
        ("repetition_penalty", 0.0, "a number from 1e-05 to 2"),
        ("repetition_penalty", 2.1, "a number from 1e-05 to 2"),
        ("frequency_penalty", -2.1, "a number from -2 to 2"),
        ("frequency_penalty", "1", "a number from -2 to 2"),
        ("presence_penalty", 2.1, "a number from -2 to 2"),
        ("presence_penalty", True, "a number from -2 to 2"),
        ("logit_bias", {3: 100.1}, "a dict of token ids >= 0 and numbers from -100 to 100"),
        ("logit_bias", {3: float("nan")}, "a dict of token ids"),
        ("logit_bias", {3: float("-inf")}, "a dict of token ids"),
        ("logit_bias", {-1: 1.0}, "a dict of token ids"),
        ("logit_bias", {"3": 1.0}, "a dict of token ids"),
        ("logit_bias", [3], "a dict of token ids"),
        ("allowed_token_ids", [], "a list of token ids >= 0 that is not empty, or None"),
        ("allowed_token_ids", [-1], "a list of token ids >= 0 that is not empty"),
        ("allowed_token_ids", 3, "a list of token ids >= 0 that is not empty"),
        ("n", 0, "an integer from 1 to 16384, got 0"),
        ("n", 16_385, "an integer from 1 to 16384, got 16385"),
        ("n", None, "an integer from 1 to 16384, got None"),
        ("n", True, "an integer from 1 to 16384, got True"),
        ("min_tokens", -1, "an integer >= 0, got -1"),
        ("min_tokens", 17, "at most max_tokens, 16, got 17"),
        ("stop_token_sequences", [[]], "lists of token ids >= 0 that are not empty"),
        ("stop_token_sequences", [3], "lists of token ids >= 0"),
        ("stop_token_sequences", [[True]], "lists of token ids >= 0"),
        ("logprobs", -2, "an integer >= 0, -1 for the whole vocabulary, or None, got -2"),
        ("logprobs", -1.0, "an integer >= 0, -1 for the whole vocabulary, or None, got -1.0"),
        ("logprobs", 1.0, "an integer >= 0, -1 for the whole vocabulary, or None"),
        ("logprob_token_ids", [-1], "a list of token ids >= 0"),
        ("prompt_logprobs", -2, "an integer >= 0, -1 for the whole vocabulary, or None"),
        ("seed", 2**63, r"an integer from -2\^63 to 2\^63 - 1, or None, got 9223372036854775808"),
        ("seed", "7", r"an integer from -2\^63 to 2\^63 - 1, or None"),
        ("seed", np.bool_(True), r"an integer from -2\^63 to 2\^63 - 1, or None"),
        ("max_tokens", 0, "an integer >= 1"),
        ("max_tokens", -5, "an integer >= 1"),
        ("max_tokens", 2.0, "an integer >= 1"),
        ("ignore_eos", 1, "a bool"),
        ("stop_token_ids", [-1], "a list of token ids"),
        ("stop_token_ids", "12", "a list of token ids"),
        ("stop_token_ids", 3, "a list of token ids"),
        ("stop_token_ids", b"12", "a list of token ids"),
        ("stop_token_ids", {1: 2}, "a list of token ids"),
        ("stop_token_ids", [np.bool_(True)], "a list of token ids"),
        ("stop_token_ids", np.array([1.0]), "a list of token ids"),
        ("stop_token_ids", np.array([True]), "a list of token ids"),
        ("stop_token_ids", np.array([[1]]), "a list of token ids"),
        ("stop_token_sequences", np.array([[[1]]]), "lists of token ids"),
        ("stop_token_sequences", LOOP, "lists of token ids"),
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


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SamplingParams)])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        pytest.param(-(10**5000), "int of too many digits to print", id="int"),
        pytest.param([[-(10**5000)]], "tuple of too many digits to print", id="lists"),
        pytest.param({-1: "x" * 1000}, "{-1: 'xxx", id="dict"),
    ],
)
def test_a_refusal_shows_only_the_beginning_of_a_large_value(field, value, shown):
    with pytest.raises(RequestError, match=f"^{field}: expected .*, got {shown}") as refusal:
        SamplingParams(**{field: value})
    assert len(str(refusal.value)) < 200


def test_a_refusal_says_that_a_value_has_too_many_levels_to_print():
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(RequestError, match="tuple of too many levels to print"):
        SamplingParams(seed=nested)


def test_a_refusal_shows_two_large_values():
    with pytest.raises(RequestError, match="min_tokens: expected at most max_tokens, int of too "):
        SamplingParams(max_tokens=10**5000, min_tokens=10**5001)


def test_an_unknown_parameter_is_refused_with_a_suggestion():
    with pytest.raises(RequestError) as refusal:
        SamplingParams(temprature=1.0)
    assert str(refusal.value) == (  # without the 29 names that it was not meant to be
        "sampling_params: expected names of its fields; got 'temprature' (did you mean "
        "'temperature'?)"
    )
    with pytest.raises(RequestError, match=r"expected one of temperature, .*; got 'melts', 'temp"):
        SamplingParams(temprature=1.0, melts=2)
    with pytest.raises(RequestError, match=r"got 'xxx.*\.\.\.$") as refusal:
        SamplingParams(**{"x" * 10_000: 1})
    assert len(str(refusal.value)) < 1000


def test_top_k_minus_one_keeps_all_tokens():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_params_copy_the_callers_containers():
    """Later changes to the caller's own lists do not change the parameters."""
    own = {
        "logit_bias": {3: 1.5},
        "allowed_token_ids": [3, 4],
        "stop_token_sequences": [[1, 2], [3]],
        "logprob_token_ids": [5],
    }
    params = SamplingParams(**own)
    same = SamplingParams(
        logit_bias={3: 1.5},
        allowed_token_ids=(3, 4),
        stop_token_sequences=((1, 2), (3,)),
        logprob_token_ids=(5,),
    )
    own["logit_bias"][4] = 2.0
    own["allowed_token_ids"].append(5)
    own["stop_token_sequences"][1].append(9)
    assert params == same
    assert hash(params) == hash(same)
    assert dataclasses.replace(params, n=1) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert params != dataclasses.replace(params, logit_bias={3: 1.0})


def test_none_is_an_empty_list():
    nothing = {
        "logit_bias": None, "stop_token_ids": None, "stop_token_sequences": None, "stop": None,
        "bad_words": None, "bad_words_token_ids": None, "logprob_token_ids": None,
    }  # fmt: skip
    assert SamplingParams(**nothing) == SamplingParams()
    assert SamplingParams().stop_token_sequences == ()
    assert SamplingParams(**json.loads('{"stop_token_ids": null}')).stop_token_ids == ()


def parts_of(value: object) -> list[object]:
    """Return a value and all values inside it, at any depth."""
    if not isinstance(value, tuple | dict):
        return [value]
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    return [value, *(part for item in inner for part in parts_of(item))]


@pytest.mark.parametrize("integer", [np.int64, np.uint8, np.int32])
@pytest.mark.parametrize("real", [np.float32, np.float64, np.float16, Fraction])
def test_numpy_numbers_become_python_numbers(integer, real):
    ids = np.array([3, 4], dtype=integer)
    pairs = np.array([[1, 2], [3, 4]], dtype=integer)
    params = SamplingParams(
        temperature=real(0.5), top_p=real(0.25), min_p=real(0), repetition_penalty=real(1),
        top_k=integer(5), seed=integer(6), n=integer(2), max_tokens=integer(9),
        min_tokens=integer(1), logprobs=integer(2), prompt_logprobs=integer(3),
        ignore_eos=np.bool_(True), include_stop_str_in_output=np.bool_(False),
        logit_bias={integer(3): real(1.5)}, stop_token_ids=ids, allowed_token_ids=list(ids),
        logprob_token_ids=range(3, 5), stop_token_sequences=pairs,
        bad_words_token_ids=[pairs[0], list(pairs[1]), range(2)],
    )  # fmt: skip
    assert params == SamplingParams(
        temperature=0.5, top_p=0.25, min_p=0.0, repetition_penalty=1.0, top_k=5, seed=6, n=2,
        max_tokens=9, min_tokens=1, logprobs=2, prompt_logprobs=3, ignore_eos=True,
        logit_bias={3: 1.5}, stop_token_ids=[3, 4], allowed_token_ids=(3, 4),
        logprob_token_ids=[3, 4], stop_token_sequences=[[1, 2], [3, 4]],
        bad_words_token_ids=[[1, 2], [3, 4], [0, 1]],
    )  # fmt: skip
    values = [getattr(params, field.name) for field in dataclasses.fields(params)]
    kinds = {type(part) for value in values for part in parts_of(value)}
    assert kinds <= {int, float, bool, type(None), tuple, dict}
    assert json.loads(json.dumps(params.logit_bias)) == {"3": 1.5}
    hash(params)


def test_top_k_minus_one_of_numpy_keeps_all_tokens():
    assert SamplingParams(top_k=np.int64(-1)) == SamplingParams()


def test_params_report_their_penalties_logprobs_and_masks():
    nothing = SamplingParams()
    assert not nothing.penalizes
    assert not nothing.wants_logprobs
    assert nothing.masks(0) == ()
    for name, value in (
        ("repetition_penalty", 1.1),
        ("frequency_penalty", -0.1),
        ("presence_penalty", 0.1),
    ):
        assert SamplingParams(**{name: value}).penalizes
    assert SamplingParams(logprobs=0).wants_logprobs
    assert SamplingParams(logprob_token_ids=[1]).wants_logprobs
    assert not SamplingParams(prompt_logprobs=3).wants_logprobs
    masks = SamplingParams(allowed_token_ids=[1], bad_words_token_ids=[[1]], min_tokens=2)
    assert masks.masks(1) == ("allowed_token_ids", "bad_words_token_ids", "min_tokens")
    assert masks.masks(2) == ("allowed_token_ids", "bad_words_token_ids")


def test_params_are_values():
    params = SamplingParams(temperature=0.5, stop_token_ids=[3, 4])
    assert params.stop_token_ids == (3, 4)
    assert SamplingParams(stop="a").stop == SamplingParams(stop=["a"]).stop == ("a",)
    assert dataclasses.replace(params, temperature=0.0).temperature == 0


def test_an_assigned_value_is_converted_and_checked_like_an_argument():
    params = SamplingParams(min_tokens=2, max_tokens=4)
    params.top_k = -1
    params.stop_token_ids = np.array([3, 4])
    params.stop = "a"
    assert params == SamplingParams(min_tokens=2, max_tokens=4, stop_token_ids=[3, 4], stop=["a"])
    assert hash(params) == hash(params.clone())
    for name, value, message in (
        ("temperature", -1, "temperature: expected 0 or a number"),
        ("max_tokens", 1, "min_tokens: expected at most max_tokens, 1, got 2"),
        ("detokenize", False, r"stop: expected none with detokenize=False, got \('a',\)"),
        ("max_token", 1, "did you mean 'max_tokens'"),
    ):
        before = params.clone()
        with pytest.raises(RequestError, match=message):
            setattr(params, name, value)
        assert params == before
    with pytest.raises(RequestError, match="seed: expected a value, got its deletion"):
        del params.seed


@pytest.mark.parametrize("minus_one", [-1, np.int64(-1)])
def test_a_seed_of_minus_one_is_none_as_in_vllm(minus_one):
    params = SamplingParams(seed=minus_one)
    assert params.seed is None
    assert params == SamplingParams()
    params.seed = 7
    params.seed = minus_one
    assert params.seed is None
    assert SamplingParams(seed=-2).seed == -2


@pytest.mark.parametrize(
    "copied",
    [SamplingParams.clone, copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))],
)
def test_a_copy_is_equal_checked_and_independent(copied):
    params = SamplingParams(temperature=0.5, seed=3, stop=["a"], logit_bias={3: 1.0})
    other = copied(params)
    assert other == params
    assert other is not params
    other.seed = 4
    assert (params.seed, other.seed) == (3, 4)
    with pytest.raises(RequestError, match="top_p: expected a number in"):
        other.top_p = 2


def test_a_clone_has_a_dict_of_its_own():
    params = SamplingParams(logit_bias={3: 1.0})
    params.clone().logit_bias[3] = 2.0
    assert params.logit_bias == {3: 1.0}


@pytest.mark.parametrize(
    "name", ["detokenize", "skip_special_tokens", "spaces_between_special_tokens"]
)
def test_the_text_flags_default_to_true_and_take_bools_only(name):
    assert getattr(SamplingParams(), name) is True
    assert getattr(SamplingParams(**{name: np.bool_(False)}), name) is False
    with pytest.raises(RequestError, match=f"{name}: expected a bool, got 0"):
        SamplingParams(**{name: 0})


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="stop: expected none with detokenize=False"):
        SamplingParams(stop="a", detokenize=False)
    assert SamplingParams(stop_token_ids=[3], detokenize=False).stop_token_ids == (3,)


def test_structured_outputs_take_their_class_alone():
    with pytest.raises(RequestError, match="structured_outputs: expected StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})
    form = StructuredOutputsParams(choice=["a", "b"])
    params = SamplingParams(structured_outputs=form)
    assert params.structured_outputs is form
    assert params == SamplingParams(structured_outputs=StructuredOutputsParams(choice=("a", "b")))
    hash(params)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object; got none"),
        ({"json": "{}", "regex": "a"}, "exactly one of .*; got json, regex"),
        ({"json": 3}, "json: expected a JSON schema as text or dict, got 3"),
        ({"regex": ["a"]}, r"regex: expected text, got \['a'\]"),
        ({"choice": "yes"}, "choice: expected texts that are not empty, got 'yes'"),
        ({"choice": []}, r"choice: expected texts that are not empty, got \(\)"),
        ({"choice": ["a", ""]}, "choice: expected texts that are not empty"),
        ({"choice": 7}, "choice: expected texts that are not empty, got 7"),
        ({"grammar": b"root"}, "grammar: expected text, got b'root'"),
        ({"json": {"a": {1, 2}}}, "json: expected a JSON schema, got Object of type set"),
        ({"json_object": False}, "json_object: expected True, got False"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace: expected True or"),
        ({"whitespace_pattern": " "}, "exactly one of .*; got none"),
        (
            {"json": {}, "whitespace_pattern": 3},
            "whitespace_pattern: expected text or None, got 3",
        ),
        (
            {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "whitespace_pattern: expected None with disable_any_whitespace, got ' '",
        ),
    ],
)
def test_structured_outputs_are_checked_and_named(given, message):
    with pytest.raises(RequestError, match=rf"^structured_outputs[.:] ?(expected )?{message}"):
        StructuredOutputsParams(**given)
