"""The sampling parameters of one request, and their checks."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Self

import numpy as np

from mrv1.errors import RequestError
from mrv1.errors import short as short
from mrv1.options import documented
from mrv1.sampler.grammar import Grammar, GrammarSource

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
"""A seed is a signed 64-bit integer, the key of the request's noise."""

TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-5, 1e5
"""Below, float32 logits divided by the temperature overflow; above, they all become equal."""

TOP_K_MAX = 2**31 - 1
"""The largest int32, as the device stores top_k; larger than any vocabulary."""

REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 1e-5, 2.0
"""The range (0, 2], without penalties so small that float32 logits divided by them overflow."""

N_MAX = 1 << 14
"""Every output is a request of its own: one caller must leave host memory for other callers.
vLLM's default limit."""

LOGIT_BIAS_MAX = 100.0
"""Largest magnitude of a bias: more than the logits of a model differ by."""

NUM_UNKNOWN_SHOWN = 8
"""Most unknown names in an error message: the search for a similar name takes time for each."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_real(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, float) and math.isfinite(value)


def _is_list_of_tokens(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_token, value))


def _plain(value: object, depth: int = 0) -> object:
    """Return numbers and texts as Python's own, ``depth`` levels of lists as tuples.

    Other values are unchanged. A text of a class of the caller's might not be known to a rank.
    """
    if value is None or type(value) in (bool, int, float, str):  # most values
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:  # a Fraction beyond the largest float
            return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        value = value.tolist()
    if depth and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple([_plain(item, depth - 1) for item in value])
    if depth and isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value


@documented
@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class SamplingParams:
    """How one request is sampled and when it ends. The names are vLLM's.

    A number may be numpy's, and a list any sequence or a numpy array of ids: they are stored as
    Python numbers and tuples. None stands for an empty list or dict, except that None as
    ``allowed_token_ids`` allows all tokens.

    A value that is assigned later (``params.seed = 7``) is checked in the same way, and a refused
    value changes nothing. A request keeps the values that it was added with: it has a copy.

    Raises:
        RequestError: an unknown name, or a value out of range; the message names the field.
    """

    temperature: float = 1.0
    """Divides the logits before the draw, from 1e-5 to 1e5. 0 is greedy: always the most likely
    token, exactly the argmax, ties to the lowest id."""
    top_k: int = 0
    """Keep the k most likely tokens, and tokens tied with the k-th; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Above 0 and at most 1: keep the most likely tokens until their probabilities add up to this,
    and tokens tied with the last of them. Applied after temperature, min_p and top_k; 1 keeps
    all."""
    min_p: float = 0.0
    """From 0 to 1: the least probability of a token that is kept, as a share of the likeliest
    token's; 0 keeps all."""
    repetition_penalty: float = 1.0
    """From 1e-5 to 2; the logit of a token that is in the prompt or the output is divided by this
    if positive, and multiplied by this if negative; 1 changes nothing."""
    frequency_penalty: float = 0.0
    """From -2 to 2; subtracted from a token's logit for each time the token is in the output."""
    presence_penalty: float = 0.0
    """From -2 to 2; subtracted once from the logit of each token that is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Token id -> number from -100 to 100 that is added to the token's logit."""
    allowed_token_ids: Sequence[int] | None = None
    """Draw only these token ids. Default: all."""
    seed: int | None = None
    """Seed of the request's random draws, a signed 64-bit integer. None, or -1 as in vLLM: derived
    from the engine's seed and the number of requests added before it."""
    n: int = 1
    """Number of outputs, 1 to 16,384; each has random draws of its own, also with a ``seed``."""
    max_tokens: int | None = 16
    """Generate at most this many tokens, at least 1; None: until the context is full."""
    min_tokens: int = 0
    """Generate at least this many tokens. Until then stop tokens are never drawn, nor the model's
    end-of-sequence tokens even with ``ignore_eos``, and no stop text or sequence ends the
    request."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence tokens."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the request, in addition to the model's end-of-sequence tokens."""
    stop_token_sequences: Sequence[Sequence[int]] = ()
    """Token sequences. The request ends as soon as its output ends with one of the sequences; the
    output text is cut before the sequence. Not in vLLM."""
    stop: Sequence[str] = ()
    """One stop text, or several. The request ends as soon as its output contains one of them; the
    output text is cut before the stop text. Of several that one token completes, the one that ends
    first counts, and of those that end at one place, the first in the list."""
    include_stop_str_in_output: bool = False
    """Keep the stop text, stop sequence, stop token or end-of-sequence token at the end of the
    output's text. A special token is text only without ``skip_special_tokens``."""
    detokenize: bool = True
    """Turn output tokens into text. Without, the text of outputs is empty, ``stop`` is refused,
    and reported log-probabilities lack ``decoded_token``."""
    skip_special_tokens: bool = True
    """Leave special tokens, such as an end-of-turn token, out of the output's text."""
    spaces_between_special_tokens: bool = True
    """Where the output's text has special tokens one after the other, keep the space that some
    tokenizers write between them."""
    bad_words: Sequence[str] = ()
    """Texts that the output must not contain. Each text is tokenized without and with a space
    before it, after its leading whitespace is removed (a text of whitespace alone: as given). The
    last token of a tokenization is never drawn where the output ends with the other tokens."""
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    """Token sequences that the output must not contain, in addition to ``bad_words``."""
    bad_words_match_prompt: bool = False
    """Let a bad word begin in the prompt, not only in the output."""
    logprobs: int | None = None
    """Report the log-probabilities of the token drawn and of this many most likely tokens, at each
    output position; -1 reports the whole vocabulary. Default: no report."""
    logprob_token_ids: Sequence[int] = ()
    """Report the log-probabilities of the token drawn and of these tokens, at each position."""
    prompt_logprobs: int | None = None
    """Like ``logprobs``, for the prompt's tokens."""
    structured_output: Grammar | None = None
    """``Grammar`` that the output must follow; ``mrv1.integrations.llguidance`` makes one from a
    JSON schema, a regular expression or EBNF."""
    structured_outputs: GrammarSource | None = None
    """``StructuredOutputsParams``: a JSON schema, regular expression, list of choices or EBNF that
    the output must follow. ``LLM`` compiles it for its tokenizer when the request is added."""

    def __new__(cls, /, *args: object, **params: object) -> Self:
        """Refuse unknown names, for which ``__init__`` would raise a ``TypeError``."""
        unknown = params.keys() - cls.__dataclass_fields__
        if unknown:
            raise RequestError(_unknown_message(sorted(unknown)))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Convert the fields to Python numbers and tuples, and check them."""
        for option in fields(self):
            value = getattr(self, option.name)
            if value is None and option.default == ():
                value = ()
            elif value is None and option.default is MISSING:
                value = {}
            elif option.name == "stop" and isinstance(value, str):
                value = (value,)
            object.__setattr__(self, option.name, _plain(value, depth=2))
        if _is_int(self.top_k) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if _is_int(self.seed) and self.seed == -1:
            object.__setattr__(self, "seed", None)
        self._validate_numbers()
        self._validate_tokens()
        self._validate_texts_and_flags()

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - of any field
        """Set a field to a value that is converted and checked like an argument."""
        if hasattr(self, _LAST_FIELD):  # else in ``__init__``, which checks all fields at its end
            value = getattr(replace(self, **{name: value}), name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse: every field has a value."""
        raise RequestError(f"{name}: expected a value, got its deletion")

    def __copy__(self) -> Self:
        """Return a copy without checking the values again."""
        copied = object.__new__(type(self))
        for name in self.__dataclass_fields__:
            object.__setattr__(copied, name, getattr(self, name))
        if self.logit_bias:  # the only value that can be changed in place
            object.__setattr__(copied, "logit_bias", _plain(self.logit_bias, depth=1))
        return copied

    def clone(self) -> Self:
        """Return a copy; a change of one of the two does not change the other."""
        return replace(self)

    def _validate_numbers(self) -> None:
        temperature = self.temperature
        if not _is_real(temperature) or (
            temperature != 0 and not TEMPERATURE_MIN <= temperature <= TEMPERATURE_MAX
        ):
            raise RequestError(
                f"temperature: expected 0 or a number from {TEMPERATURE_MIN} to "
                f"{TEMPERATURE_MAX:g}, got {short(temperature)}"
            )
        if not _is_int(self.top_k) or not 0 <= self.top_k <= TOP_K_MAX:
            raise RequestError(
                f"top_k: expected an integer from 1 to {TOP_K_MAX}, or 0 or -1 for all, got "
                f"{short(self.top_k)}"
            )
        if not _is_real(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestError(f"top_p: expected a number in (0, 1], got {short(self.top_p)}")
        for name, least, most in (
            ("min_p", 0, 1),
            ("repetition_penalty", REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX),
            ("frequency_penalty", -2, 2),
            ("presence_penalty", -2, 2),
        ):
            value = getattr(self, name)
            if not _is_real(value) or not least <= value <= most:
                raise RequestError(
                    f"{name}: expected a number from {least:g} to {most:g}, got {short(value)}"
                )
        if self.seed is not None and not (
            _is_int(self.seed) and SEED_MIN <= self.seed <= SEED_MAX
        ):
            raise RequestError(
                "seed: expected an integer from -2^63 to 2^63 - 1, or None, got "
                f"{short(self.seed)}"
            )
        if not _is_int(self.n) or not 1 <= self.n <= N_MAX:
            raise RequestError(f"n: expected an integer from 1 to {N_MAX}, got {short(self.n)}")
        for name, least, expected in (
            ("max_tokens", 1, "an integer >= 1 or None"),
            ("min_tokens", 0, "an integer >= 0"),
            ("logprobs", -1, "an integer >= 0, -1 for the whole vocabulary, or None"),
            ("prompt_logprobs", -1, "an integer >= 0, -1 for the whole vocabulary, or None"),
        ):
            value = getattr(self, name)
            is_absent = value is None and name != "min_tokens"
            if not is_absent and not (_is_int(value) and value >= least):
                raise RequestError(f"{name}: expected {expected}, got {short(value)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens: expected at most max_tokens, {short(self.max_tokens)}, "
                f"got {short(self.min_tokens)}"
            )

    def _validate_tokens(self) -> None:
        for name in ("stop_token_ids", "logprob_token_ids"):
            if not _is_list_of_tokens(getattr(self, name)):
                raise RequestError(
                    f"{name}: expected a list of token ids >= 0, got {short(getattr(self, name))}"
                )
        allowed = self.allowed_token_ids
        if allowed is not None and not (_is_list_of_tokens(allowed) and allowed):
            raise RequestError(
                "allowed_token_ids: expected a list of token ids >= 0 that is not empty, or None, "
                f"got {short(allowed)}"
            )
        for name in ("stop_token_sequences", "bad_words_token_ids"):
            sequences: object = getattr(self, name)
            if not isinstance(sequences, tuple) or not all(
                _is_list_of_tokens(sequence) and sequence for sequence in sequences
            ):
                raise RequestError(
                    f"{name}: expected lists of token ids >= 0 that are not empty, got "
                    f"{short(sequences)}"
                )
        self.check_logit_bias()

    def check_logit_bias(self) -> None:
        """Check the dict, which can be changed in place after all fields were checked.

        Raises:
            RequestError: it is not a dict, or has an entry out of range.
        """
        bias: object = self.logit_bias
        if not isinstance(bias, Mapping) or not all(
            _is_token(token) and _is_real(value) and abs(value) <= LOGIT_BIAS_MAX
            for token, value in bias.items()
        ):
            raise RequestError(
                f"logit_bias: expected a dict of token ids >= 0 and numbers from "
                f"{-LOGIT_BIAS_MAX:g} to {LOGIT_BIAS_MAX:g}, got {short(bias)}"
            )

    def _validate_texts_and_flags(self) -> None:
        for name in ("stop", "bad_words"):
            texts: object = getattr(self, name)
            if not isinstance(texts, tuple) or not all(
                isinstance(text, str) and text for text in texts
            ):
                raise RequestError(
                    f"{name}: expected texts that are not empty, got {short(texts)}"
                )
        if not isinstance(self.structured_output, Grammar | None):
            raise RequestError(
                "structured_output: expected a Grammar (mrv1.integrations.llguidance) or None, "
                f"got {short(self.structured_output)}"
            )
        if self.structured_outputs is not None and not isinstance(
            self.structured_outputs, GrammarSource
        ):
            raise RequestError(
                "structured_outputs: expected StructuredOutputsParams or None, got "
                f"{short(self.structured_outputs)}"
            )
        if self.structured_output is not None and self.structured_outputs is not None:
            raise RequestError(
                "structured_outputs: expected None with structured_output, got "
                f"{short(self.structured_outputs)}"
            )
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "bad_words_match_prompt",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}: expected a bool, got {short(getattr(self, name))}")
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop: expected none with detokenize=False, got {short(self.stop)}"
            )

    @property
    def bans_words(self) -> bool:
        """Whether the request has bad words, as texts or as token ids."""
        return bool(self.bad_words or self.bad_words_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax of its logits."""
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether min_p, top_k or top_p removes tokens from a draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalizes(self) -> bool:
        """Whether a repetition, frequency or presence penalty changes logits."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )

    @property
    def edits_logits(self) -> bool:
        """Whether the request edits logits before the temperature divides them."""
        return (
            self.penalizes
            or self.bans_words
            or bool(self.logit_bias)
            or self.allowed_token_ids is not None
            or self.min_tokens > 0
            or self.structured_output is not None
        )

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of output tokens are reported."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    def masks(self, num_output_tokens: int) -> tuple[str, ...]:
        """Return the fields that exclude tokens from the draw after that many output tokens."""
        names = ("allowed_token_ids", "bad_words", "bad_words_token_ids", "structured_output")
        masks = [name for name in names if getattr(self, name)]
        if num_output_tokens < self.min_tokens:
            masks.append("min_tokens")
        return tuple(masks)


def num_likeliest(logprobs: int | None, vocab_size: int) -> int:
    """Return how many of the likeliest tokens ``logprobs`` or ``prompt_logprobs`` asks for."""
    return vocab_size if logprobs == -1 else logprobs or 0


_LAST_FIELD = fields(SamplingParams)[-1].name
"""The field that ``__init__`` sets last."""


def _unknown_message(names: list[str]) -> str:
    known = [field.name for field in fields(SamplingParams)]
    hints = []
    for name in names[:NUM_UNKNOWN_SHOWN]:
        close = difflib.get_close_matches(name, known, n=1)
        hints.append(short(name) + (f" (did you mean {close[0]!r}?)" if close else ""))
    more = ", ..." if len(names) > NUM_UNKNOWN_SHOWN else ""
    return f"sampling_params: expected one of {', '.join(known)}; got {', '.join(hints)}{more}"
