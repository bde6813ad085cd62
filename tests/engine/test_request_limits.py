"""Limits of the configuration on a request: a request beyond a limit is refused, and alone."""

from __future__ import annotations

import pytest

from mrv1 import ConfigError, EngineConfig, RequestError, SamplingParams
from mrv1.engine.request_limits import check_params
from tests.engine.scheduler_model import EOS, make_request, make_scheduler

VOCAB = 100
AT_LIMITS = {
    "logit_bias": dict.fromkeys(range(3), 1.0),
    "stop_token_sequences": [[1, 2, 3, 4]] * 2,
    "logprobs": 7,
    "prompt_logprobs": 7,
    "logprob_token_ids": [99] * 7,
    "allowed_token_ids": list(range(100)),
    "stop_token_ids": [99] * 50,
    "bad_words_token_ids": [[99, 0]],
}


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig(
        model="tiny", max_logit_bias=3, max_stop_seqs_num=2, stop_seqs_max_len=4, max_logprobs=7
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [5, 100]}, r"stop_token_ids: expected ids in \[0, 100\), got \[100\]"),
        ({"stop_token_sequences": [[1, 200]]}, r"stop_token_sequences: .* got \[200\]"),
        ({"logit_bias": {100: 1.0, 5: 1.0}}, r"logit_bias: expected ids .* got \[100\]"),
        (
            {"allowed_token_ids": range(200)[95:]},
            r"allowed_token_ids: .* got \[100, 101, 102, 103, 104, 105, 106, 107, \.\.\.\]",
        ),
        ({"logprob_token_ids": [100]}, r"logprob_token_ids: expected ids .* got \[100\]"),
        (
            {"bad_words_token_ids": [[5], [5, 100]]},
            r"^bad_words_token_ids: expected ids in \[0, 100\), got \[100\]",
        ),
        (
            {"stop_token_ids": [10**5000]},
            r"^stop_token_ids: expected ids .* got \[int of too many digits to print\]",
        ),
        ({"logprobs": 10**5000}, "^logprobs: expected at most 7 tokens, got int of too many dig"),
        (
            {"logit_bias": dict.fromkeys(range(4), 1.0)},
            "logit_bias: expected at most 3 tokens, got 4; raise max_logit_bias",
        ),
        (
            {"stop_token_sequences": [[1]] * 3},
            "expected at most 2 sequences, got 3; raise max_stop_seqs_num or "
            "MRV1_MAX_STOP_SEQS_NUM",
        ),
        (
            {"stop_token_sequences": [[1], [1] * 5]},
            "expected at most 4 tokens each, got 5; raise stop_seqs_max_len or "
            "MRV1_STOP_SEQS_MAX_LEN",
        ),
        ({"logprobs": 8}, "^logprobs: expected at most 7 tokens, got 8; raise max_logprobs"),
        ({"prompt_logprobs": 8}, "^prompt_logprobs: expected at most 7 tokens, got 8; raise max"),
        ({"logprob_token_ids": [1] * 8}, "logprob_token_ids: expected at most 7 tokens, got 8"),
    ],
)
def test_a_parameter_beyond_a_limit_is_refused_and_named(config, params, message):
    with pytest.raises(RequestError, match=message):
        check_params(SamplingParams(**params), config, VOCAB)


def test_parameters_at_the_limits_are_accepted(config):
    check_params(SamplingParams(**AT_LIMITS), config, VOCAB)
    with pytest.raises(
        RequestError, match=r"^logprobs: expected at most 5, the vocabulary size, got 7"
    ):
        check_params(SamplingParams(logprobs=7), config, 5)


def test_min_tokens_with_more_stop_tokens_than_the_device_masks_is_refused():
    scheduler = make_scheduler()
    many = list(range(1, 17))
    for ignore_eos in (False, True):
        params = {"stop_token_ids": many, "min_tokens": 1, "ignore_eos": ignore_eos}
        with pytest.raises(RequestError, match=r"stop_token_ids: expected at most 16 .* got 17"):
            scheduler.add(make_request("r", (1, 2), **params))
    assert not scheduler.has_unfinished_requests
    scheduler.add(make_request("a", (1, 2), stop_token_ids=many))
    fewer = many[:15]
    scheduler.add(make_request("b", (1, 2), stop_token_ids=fewer, min_tokens=1, ignore_eos=True))
    scheduler.add(make_request("c", (1, 2), stop_token_ids=[*fewer, EOS], min_tokens=1))
    a, b, c = scheduler.schedule().new
    assert [len(each.stop_token_ids) for each in (a, b, c)] == [16, 15, 16]
    assert [len(each.late_token_ids) for each in (a, b, c)] == [16, 16, 16]
    assert b.late_token_ids == (*fewer, EOS)
    assert (a.min_total_tokens, b.min_total_tokens) == (2, 3)


def test_limits_come_from_the_environment(monkeypatch):
    config = EngineConfig(model="tiny")
    assert (config.max_stop_seqs_num, config.stop_seqs_max_len) == (5, 8)
    assert (config.max_logit_bias, config.max_logprobs) == (300, 20)
    assert config.logprobs_mode == "raw_logprobs"
    monkeypatch.setenv("MRV1_MAX_STOP_SEQS_NUM", "3")
    monkeypatch.setenv("MRV1_STOP_SEQS_MAX_LEN", "20")
    config = EngineConfig(model="tiny")
    assert (config.max_stop_seqs_num, config.stop_seqs_max_len) == (3, 20)
    assert EngineConfig(model="tiny", max_stop_seqs_num=9).max_stop_seqs_num == 9
    monkeypatch.setenv("MRV1_STOP_SEQS_MAX_LEN", "0")
    with pytest.raises(ConfigError, match="MRV1_STOP_SEQS_MAX_LEN: expected an integer >= 1, got"):
        EngineConfig(model="tiny")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_stop_seqs_num", 0, "max_stop_seqs_num: expected an integer >= 1"),
        ("stop_seqs_max_len", 1.0, "stop_seqs_max_len: expected an integer >= 1"),
        ("max_logit_bias", -1, "max_logit_bias: expected an integer >= 1"),
        ("max_logprobs", 2**40, "max_logprobs: expected an integer >= 1 that fits int32"),
        ("logprobs_mode", "raw", r"logprobs_mode: expected one of .*'processed_logprobs'.*'raw'"),
    ],
)
def test_a_bad_limit_is_refused_and_named(name, value, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="tiny", **{name: value})
