"""The limits that the model, the configuration and the KV cache set for a request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from numbers import Integral
from typing import cast

from mrv1.config import EngineConfig
from mrv1.device import host_memory_bytes
from mrv1.engine.feature_pool import FeaturePool
from mrv1.engine.head_pools import HeadPools
from mrv1.engine.request import Request
from mrv1.environment import INT32_MAX
from mrv1.errors import RequestError, short
from mrv1.options import check_fields
from mrv1.runner.request_state import MAX_STOP_TOKENS
from mrv1.sampler import SamplingParams
from mrv1.sampler.params import num_likeliest

NUM_SHOWN = 8  # most wrong token ids that a message lists
FAIRNESS_ID_LEN = 256  # most characters of a fairness id
LOGPROB_BYTES, STEP_LOGPROB_BYTES = 256, 128  # in a result, and in its step
FEW_LOGPROBS = 1024
"""Most log-probabilities per position whose memory is not checked: outputs are mostly shorter than
they may be, and the check would refuse requests that fit."""


def check_params(params: SamplingParams, config: EngineConfig, vocab_size: int) -> None:
    """Raise a RequestError, naming the field and the option of its limit, unless supported."""
    if params.structured_outputs is not None:
        raise RequestError(
            "structured_outputs: expected None, because only LLM compiles it: give the compiled "
            f"grammar as structured_output; got {short(params.structured_outputs)}"
        )
    check_fields(params, RequestError, only="logit_bias")  # a dict, which a caller can change
    for name, token_ids in _token_ids(params):
        if token_ids and max(token_ids) >= vocab_size:
            outside = [token for token in token_ids if token >= vocab_size]
            more = ", ..." if len(outside) > NUM_SHOWN else ""
            raise RequestError(
                f"{name}: expected ids in [0, {vocab_size}), got "
                f"[{', '.join(map(short, outside[:NUM_SHOWN]))}{more}]"
            )
    longest = max(map(len, params.stop_token_sequences), default=0)
    most_logprobs = config.logprobs_limit(vocab_size)
    for name, unit, got, limit, how in (
        ("logit_bias", "tokens", len(params.logit_bias), config.max_logit_bias, "max_logit_bias"),
        (
            "stop_token_sequences",
            "sequences",
            len(params.stop_token_sequences),
            config.max_stop_seqs_num,
            "max_stop_seqs_num or MRV1_MAX_STOP_SEQS_NUM",
        ),
        (
            "stop_token_sequences",
            "tokens each",
            longest,
            config.stop_seqs_max_len,
            "stop_seqs_max_len or MRV1_STOP_SEQS_MAX_LEN",
        ),
        *(
            (name, "tokens", count, most_logprobs, "max_logprobs")
            for name, count in (
                ("logprobs", params.logprobs or 0),
                ("prompt_logprobs", params.prompt_logprobs or 0),
                ("logprob_token_ids", len(params.logprob_token_ids)),
            )
        ),
    ):
        if got > limit:
            raise RequestError(
                f"{name}: expected at most {limit} {unit}, got {short(got)}; raise {how}"
            )
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) == -1 and most_logprobs < vocab_size:
            raise RequestError(
                f"{name}: expected at most {most_logprobs} tokens, got -1, the {vocab_size} of "
                "the vocabulary; raise max_logprobs (-1: no limit)"
            )
        if (getattr(params, name) or 0) > vocab_size:
            raise RequestError(
                f"{name}: expected at most {vocab_size}, the vocabulary size, "
                f"got {getattr(params, name)}"
            )


def check_order(priority: object, fairness_id: object, config: EngineConfig) -> None:
    """Raise a RequestError unless the policy knows the request's priority and fairness id."""
    is_integer = isinstance(priority, Integral) and not isinstance(priority, bool)
    if not is_integer or abs(int(cast("int", priority))) > INT32_MAX:
        raise RequestError(
            f"priority: expected an integer in [-{INT32_MAX}, {INT32_MAX}], got {short(priority)}"
        )
    if not isinstance(fairness_id, str) or len(fairness_id) > FAIRNESS_ID_LEN:
        raise RequestError(
            f"fairness_id: expected a string of at most {FAIRNESS_ID_LEN} characters, got "
            f"{short(fairness_id)}"
        )
    for name, value, usual in (("priority", priority, 0), ("fairness_id", fairness_id, "")):
        if value != usual and config.scheduling_policy != "priority":
            raise RequestError(
                f"{name}: expected {usual!r} with scheduling_policy={config.scheduling_policy!r}, "
                f"got {short(value)}; choose scheduling_policy='priority'"
            )


def check_logprob_memory(
    request: Request, others: Iterable[Request], config: EngineConfig, vocab_size: int
) -> None:
    """Raise a RequestError unless the host has memory for a new request's log-probabilities.

    Only fields that ask for more than ``FEW_LOGPROBS`` at each position count. The memory of
    ``others``, the unfinished requests, counts as if none of it were allocated yet.
    """
    family = (request, *request.followers)
    for_outputs, for_prompts, in_step = _logprob_bytes(family, config, vocab_size)
    needed = for_outputs + for_prompts + in_step
    if needed == 0:
        return
    available = max(host_memory_bytes() - sum(_logprob_bytes(others, config, vocab_size)), 0)
    if needed > available:
        name = "logprobs" if for_outputs >= for_prompts else "prompt_logprobs"
        raise RequestError(
            f"{name}: expected at most {available / 2**30:.1f} GiB of log-probabilities, the "
            f"host memory that is left, got up to {needed / 2**30:.1f} GiB, of which "
            f"{in_step / 2**30:.1f} GiB in one step; ask for fewer of them or lower max_tokens"
        )


def _logprob_bytes(
    requests: Iterable[Request], config: EngineConfig, vocab_size: int
) -> tuple[int, int, int]:
    """Return the bytes that log-probabilities need: of outputs, of prompts, and in a step."""
    for_outputs = for_prompts = in_step = 0
    for request in requests:
        params, num_prompt = request.params, len(request.prompt_token_ids)
        per_output = num_likeliest(params.logprobs, vocab_size) + len(params.logprob_token_ids)
        per_token = num_likeliest(params.prompt_logprobs, vocab_size)
        if per_output > FEW_LOGPROBS:
            for_outputs += (request.max_total_tokens - num_prompt) * per_output * LOGPROB_BYTES
            in_step += per_output * STEP_LOGPROB_BYTES
        if per_token > FEW_LOGPROBS:
            for_prompts += (num_prompt - 1) * per_token * LOGPROB_BYTES
            num_tokens = min(num_prompt - 1, config.max_num_batched_tokens)
            in_step += num_tokens * per_token * STEP_LOGPROB_BYTES
    return for_outputs, for_prompts, in_step


def check_fits(
    request: Request, pools: HeadPools, features: FeaturePool, max_num_batched_tokens: int
) -> None:
    """Raise a RequestError unless pools, features and steps suffice to compute a request."""
    lacking = pools.lacking(request.max_total_tokens, max_num_batched_tokens)
    if lacking is not None:
        group, needed = lacking
        num_blocks, seen = pools[group].num_blocks, pools.keeps[group]
        if seen.is_full:
            raise RequestError(
                f"prompt and max_tokens: expected at most {num_blocks * pools.block_size} tokens "
                f"(num_kv_blocks = {num_blocks}, {pools.block_size} tokens each), got up to "
                f"{request.max_total_tokens}; raise num_kv_blocks or lower max_tokens"
            )
        raise RequestError(
            f"prompt and max_tokens: expected to need at most {num_blocks} blocks of heads with "
            f"a window of {seen.window} tokens, got {needed} for {request.max_total_tokens} "
            f"tokens, up to {max_num_batched_tokens} in one step; raise num_kv_blocks or lower "
            "max_num_batched_tokens"
        )
    previous_end = 0
    for start, end in request.unsplittable:
        if not previous_end <= start < end <= len(request.prompt_token_ids):
            raise RequestError(
                "unsplittable: expected ascending spans [start, end) within the prompt's "
                f"{len(request.prompt_token_ids)} tokens, got {list(request.unsplittable)}"
            )
        if end - start > max_num_batched_tokens:
            raise RequestError(
                f"unsplittable: expected spans of at most {max_num_batched_tokens} tokens"
                f" (max_num_batched_tokens), got {end - start} from {start} to {end}; raise "
                "max_num_batched_tokens"
            )
        previous_end = end
    if request.multimodal:
        _check_features_fit(request, features)
    if request.params.min_tokens and len(request.late_token_ids) > MAX_STOP_TOKENS:
        raise RequestError(
            f"stop_token_ids: expected at most {MAX_STOP_TOKENS} with min_tokens, including the "
            f"model's end-of-sequence tokens, got {len(request.late_token_ids)}"
        )


def _check_features_fit(request: Request, features: FeaturePool) -> None:
    """Raise a RequestError unless the buffer holds each item, and all of an unsplittable span."""
    parts = [(item.name, [item]) for item in request.multimodal] + [
        (f"tokens {start} to {end}, which must be in one step", request.items_in(start, end))
        for start, end in request.unsplittable
    ]
    for name, items in parts:
        sizes = {item.content_hash: item.num_tokens for item in items}
        if sum(sizes.values()) > features.num_rows:
            raise RequestError(
                f"multimodal item ({name}): features: expected at most {features.num_rows} rows "
                f"(mm_cache_memory_bytes), got {sum(sizes.values())}; raise mm_cache_memory_bytes"
            )


def _token_ids(params: SamplingParams) -> Iterator[tuple[str, Collection[int]]]:
    yield "stop_token_ids", params.stop_token_ids
    yield "stop_token_sequences", tuple(chain.from_iterable(params.stop_token_sequences))
    yield "logit_bias", params.logit_bias
    yield "allowed_token_ids", params.allowed_token_ids or ()
    yield "logprob_token_ids", params.logprob_token_ids
    yield "bad_words_token_ids", tuple(chain.from_iterable(params.bad_words_token_ids))
