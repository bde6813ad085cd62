"""What a model and a configuration allow a request to ask for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain

from mrv1.config import EngineConfig
from mrv1.environment import MAX_STOP_SEQS_VARIABLE, STOP_SEQS_LEN_VARIABLE
from mrv1.errors import RequestError
from mrv1.sampler import SamplingParams
from mrv1.sampler.params import short

NUM_SHOWN = 8
"""Wrong ids that a message lists."""


def check_params(params: SamplingParams, config: EngineConfig, vocab_size: int) -> None:
    """Raise unless the engine can do what is asked.

    Raises:
        RequestError: a token is not of the vocabulary, or there is more of something than the
            configuration has room for; the message names the field, and how to raise a limit.
    """
    for name, token_ids in _token_ids(params):
        if token_ids and max(token_ids) >= vocab_size:
            outside = [token for token in token_ids if token >= vocab_size]
            more = ", ..." if len(outside) > NUM_SHOWN else ""
            raise RequestError(
                f"{name}: expected ids in [0, {vocab_size}), got "
                f"[{', '.join(map(short, outside[:NUM_SHOWN]))}{more}]"
            )
    longest = max(map(len, params.stop_token_sequences), default=0)
    for name, unit, got, limit, how in (
        ("logit_bias", "tokens", len(params.logit_bias), config.max_logit_bias, "max_logit_bias"),
        (
            "stop_token_sequences",
            "sequences",
            len(params.stop_token_sequences),
            config.max_stop_seqs_num,
            f"max_stop_seqs_num or {MAX_STOP_SEQS_VARIABLE}",
        ),
        (
            "stop_token_sequences",
            "tokens each",
            longest,
            config.stop_seqs_max_len,
            f"stop_seqs_max_len or {STOP_SEQS_LEN_VARIABLE}",
        ),
        ("logprobs", "tokens", params.logprobs or 0, config.max_logprobs, "max_logprobs"),
        (
            "prompt_logprobs",
            "tokens",
            params.prompt_logprobs or 0,
            config.max_logprobs,
            "max_logprobs",
        ),
        (
            "logprob_token_ids",
            "tokens",
            len(params.logprob_token_ids),
            config.max_logprobs,
            "max_logprobs",
        ),
    ):
        if got > limit:
            raise RequestError(
                f"{name}: expected at most {limit} {unit}, got {short(got)}; raise {how}"
            )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise RequestError(
                f"{name}: expected at most {vocab_size}, the vocabulary, "
                f"got {getattr(params, name)}"
            )


def _token_ids(params: SamplingParams) -> Iterator[tuple[str, Collection[int]]]:
    yield "stop_token_ids", params.stop_token_ids
    yield "stop_token_sequences", tuple(chain.from_iterable(params.stop_token_sequences))
    yield "logit_bias", params.logit_bias
    yield "allowed_token_ids", params.allowed_token_ids or ()
    yield "logprob_token_ids", params.logprob_token_ids
    yield "bad_words_token_ids", tuple(chain.from_iterable(params.bad_words_token_ids))
