"""vLLM's sampling parameters as mrv1's, one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from mrv1.errors import RequestError, short
from mrv1.runner.request_state import MAX_STOP_TOKENS
from mrv1.sampler import GrammarMatcher, SamplingParams

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams as VllmParams

MAX_BAD_WORDS, MAX_BAD_WORD_BYTES = 16, 30
"""Most bad words of a request, and most bytes of each in UTF-8."""

BAD_WORD_TOKENS = 32
"""Most tokens of a bad word: none has more tokens than bytes, but for a space in front."""

MAX_EOS_TOKENS = 4
"""Most end-of-sequence tokens of a model; stop tokens of ``min_tokens`` have what room remains."""

MAX_LOGIT_BIAS = 1024
"""Most tokens of a request that may have a logit bias."""

TRANSLATED = frozenset(
    {
        "temperature", "top_k", "top_p", "min_p", "seed", "min_tokens",
        "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logit_bias", "allowed_token_ids", "bad_words", "_bad_words_token_ids",
        "logprobs", "prompt_logprobs", "logprob_token_ids", "structured_outputs",
        "_all_stop_token_ids",
    }
)  # fmt: skip
"""Parameters that mrv1's sampler takes."""

OF_VLLM = frozenset(
    {
        "n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "repetition_detection",
        "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "flat_logprobs", "output_kind", "stream_interval",
        "output_text_buffer_length", "skip_clone", "skip_reading_prefix_cache", "extra_args",
        "routed_experts_prompt_start", "_eos_token_id", "watermarking", "_watermarking_skipped",
    }
)  # fmt: skip
"""Parameters that vLLM's scheduler and front end serve, or of an option refused at start."""


class SchedulerGrammar:
    """Marks a request whose token masks come from vLLM's scheduler, step by step."""

    def matcher(self) -> GrammarMatcher:
        """Refuse: the scheduler follows the output."""
        raise RequestError("structured_outputs: expected masks of vLLM's scheduler, got no step")


_GRAMMAR = SchedulerGrammar()


def sampling_params_of(given: VllmParams) -> SamplingParams:
    """Return mrv1's parameters, without stops, which vLLM decides; may raise RequestError."""
    _check_names(given)
    ids = given.logprob_token_ids or ()
    return SamplingParams(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=given.repetition_penalty,
        logit_bias=given.logit_bias or {},
        allowed_token_ids=given.allowed_token_ids,
        seed=given.seed,
        max_tokens=None,
        min_tokens=given.min_tokens,
        bad_words_token_ids=given.bad_words_token_ids or (),
        # With ids vLLM reports these tokens alone, and ``logprobs`` is their number.
        logprobs=None if ids else given.logprobs,
        logprob_token_ids=ids,
        prompt_logprobs=given.prompt_logprobs,
        structured_output=None if given.structured_outputs is None else _GRAMMAR,
        detokenize=False,
    )


def check_request(given: VllmParams) -> None:
    """Raise RequestError, naming the parameter, unless the worker can serve such a request.

    The request is not tokenized yet: limits of bad words and end-of-sequence tokens always hold.
    """
    sampling_params_of(given)
    words = given.bad_words or []
    longest = max((len(word.encode()) for word in words), default=0)
    if len(words) > MAX_BAD_WORDS or longest > MAX_BAD_WORD_BYTES:
        raise RequestError(
            f"bad_words: expected at most {MAX_BAD_WORDS} of {MAX_BAD_WORD_BYTES} bytes in UTF-8, "
            f"got {len(words)}, the longest of {longest} bytes"
        )
    num_bias = len(given.logit_bias or {})
    if num_bias > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias: expected at most {MAX_LOGIT_BIAS} tokens, got {num_bias}")
    num_stops, most = len(given.stop_token_ids or ()), MAX_STOP_TOKENS - MAX_EOS_TOKENS
    if given.min_tokens and num_stops > most:
        raise RequestError(
            f"stop_token_ids: expected at most {most} with min_tokens, got {num_stops}"
        )


def _check_names(given: VllmParams) -> None:
    """Refuse parameters that mrv1 does not know, unless they have their default value."""
    fields = cast("Any", type(given)).__struct_fields__
    unknown = [name for name in fields if name not in TRANSLATED | OF_VLLM]
    default = type(given)()
    for name in unknown:
        value = getattr(given, name)
        if value != getattr(default, name):
            raise RequestError(
                f"{name}: expected {getattr(default, name)!r}, which mrv1's worker supports, "
                f"got {short(value)}"
            )
