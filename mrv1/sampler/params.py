"""The sampling parameters of one request, and their checks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Annotated, Any, Self

import numpy as np

from mrv1.errors import RequestError, short
from mrv1.from_vllm import PARAMS, translated
from mrv1.options import Range, check_fields, documented, instances, integers, is_number, numbers
from mrv1.sampler.grammar import Grammar, GrammarSource

OF_CHECKPOINT = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of ``generation_config.json`` that set defaults of fields of ``SamplingParams``."""

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")
"""A token id as a JSON key. Each id has one spelling, so that no two keys name the same token, and
few enough digits for ``int`` (sys.get_int_max_str_digits)."""

NUM_UNKNOWN_SHOWN = 8
"""Most unknown names in an error message: the search for a similar name takes time for each."""


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_list_of_tokens(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_token, value))


def _is_some_tokens(value: object) -> bool:
    return _is_list_of_tokens(value) and value != ()


def _is_list_of_lists(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_some_tokens, value))


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_token(token) and is_number(bias) and abs(bias) <= 100 for token, bias in value.items()
    )


def _token(key: object) -> object:
    """Return a key of ``logit_bias``, as an integer if it is a text; RequestError: of no id."""
    if not isinstance(key, str):
        return key
    if _TOKEN_ID.fullmatch(key) is None:
        raise RequestError(f"logit_bias: expected token ids >= 0 as keys, got {short(key)}")
    return int(key)


_Flag = Annotated[bool, instances(bool, "a bool")]
_Tokens = Annotated[Sequence[int], Range("a list of token ids >= 0", _is_list_of_tokens)]
_TokenLists = Annotated[
    Sequence[Sequence[int]], Range("lists of token ids >= 0 that are not empty", _is_list_of_lists)
]
_Texts = Annotated[Sequence[str], Range("texts that are not empty", _is_list_of_texts)]
_Logprobs = Annotated[
    int, integers(-1, expected="an integer >= 0, -1 for the whole vocabulary, or None")
]


def _plain(value: object, depth: int = 0) -> object:
    """Return plain numbers, texts (a rank may lack their class) and ``depth`` levels of tuples."""
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


class _NamesOfVLLM(type):
    """Takes those of vLLM's names that change nothing here, too, and refuses unknown ones."""

    def __call__(cls, /, *args: Any, **params: Any) -> Any:  # noqa: ANN401 - of any field
        known = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        if not params.keys() <= set(known):
            params = translated(params, PARAMS, "a field of SamplingParams", RequestError)
            unknown = params.keys() - known
            if unknown:
                raise RequestError(_unknown_message(sorted(unknown)))
        return super().__call__(*args, **params)


@documented
@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class SamplingParams(metaclass=_NamesOfVLLM):
    """How one request is sampled and when it ends. The names are vLLM's.

    A number may be numpy's, and a list any sequence or a numpy array of ids: they are stored as
    Python numbers and tuples. None stands for an empty list or dict, except that None as
    ``allowed_token_ids`` allows all tokens.

    A value that is assigned later (``params.seed = 7``) is checked in the same way, and a refused
    value changes nothing. A request keeps the values that it was added with: it has a copy.

    Raises:
        RequestError: an unknown name, or a value out of range; the message names the field.
    """

    temperature: Annotated[
        float,
        # Below, float32 logits divided by the temperature overflow; above, they all become equal.
        numbers(1e-5, 1e5, "0 or a number from 1e-05 to 100000", also=(0,)),
    ] = 1.0
    """Divides the logits before the draw, from 1e-5 to 1e5. 0 is greedy: always the most likely
    token, exactly the argmax, ties to the lowest id."""
    top_k: Annotated[
        int, integers(0, 2**31 - 1, f"an integer from 1 to {2**31 - 1}, or 0 or -1 for all")
    ] = 0
    """Keep the k most likely tokens, and tokens tied with the k-th; 0 or -1 keeps all."""
    top_p: Annotated[float, numbers(0, 1, "a number in (0, 1]", above=True)] = 1.0
    """Above 0 and at most 1: keep the most likely tokens until their probabilities add up to this,
    and tokens tied with the last of them. Applied after temperature, min_p and top_k; 1 keeps
    all."""
    min_p: Annotated[float, numbers(0, 1)] = 0.0
    """From 0 to 1: the least probability of a token that is kept, as a share of the likeliest
    token's; 0 keeps all."""
    # Logits divided by less overflow float32.
    repetition_penalty: Annotated[float, numbers(1e-5, 2)] = 1.0
    """From 1e-5 to 2; the logit of a token that is in the prompt or the output is divided by this
    if positive, and multiplied by this if negative; 1 changes nothing."""
    frequency_penalty: Annotated[float, numbers(-2, 2)] = 0.0
    """From -2 to 2; subtracted from a token's logit for each time the token is in the output."""
    presence_penalty: Annotated[float, numbers(-2, 2)] = 0.0
    """From -2 to 2; subtracted once from the logit of each token that is in the output."""
    logit_bias: Annotated[
        Mapping[int, float],
        Range("a dict of token ids >= 0 and numbers from -100 to 100", _is_bias),
    ] = field(default_factory=dict, hash=False)
    """Token id -> number from -100 to 100 that is added to the token's logit."""
    allowed_token_ids: Annotated[
        Sequence[int] | None,
        Range("a list of token ids >= 0 that is not empty, or None", _is_some_tokens),
    ] = None
    """Draw only these token ids. Default: all."""
    seed: Annotated[
        int | None, integers(-(2**63), 2**63 - 1, "an integer from -2^63 to 2^63 - 1, or None")
    ] = None
    """Seed of the request's random draws, a signed 64-bit integer. None, or -1 as in vLLM: derived
    from the engine's seed and the number of requests added before it."""
    # Every output is a request of its own: one caller must leave host memory for other callers.
    # vLLM's default limit.
    n: Annotated[int, integers(1, 1 << 14)] = 1
    """Number of outputs, 1 to 16,384; each has random draws of its own, also with a ``seed``."""
    max_tokens: Annotated[int | None, integers(1, expected="an integer >= 1 or None")] = 16
    """Generate at most this many tokens, at least 1; None: until the context is full."""
    min_tokens: Annotated[int, integers(0)] = 0
    """Generate at least this many tokens. Until then stop tokens are never drawn, nor the model's
    end-of-sequence tokens even with ``ignore_eos``, and no stop text or sequence ends the
    request."""
    ignore_eos: _Flag = False
    """Continue after the model's end-of-sequence tokens."""
    stop_token_ids: _Tokens = ()
    """Token ids that end the request, in addition to the model's end-of-sequence tokens."""
    stop_token_sequences: _TokenLists = ()
    """Token sequences. The request ends as soon as its output ends with one of the sequences; the
    output text is cut before the sequence. Not in vLLM."""
    stop: _Texts = ()
    """One stop text, or several. The request ends as soon as its output contains one of them; the
    output text is cut before the stop text. Of several that one token completes, the one that ends
    first counts, and of those that end at one place, the first in the list."""
    include_stop_str_in_output: _Flag = False
    """Keep the stop text, stop sequence, stop token or end-of-sequence token at the end of the
    output's text. A special token is text only without ``skip_special_tokens``."""
    detokenize: _Flag = True
    """Turn output tokens into text. Without, the text of outputs is empty, ``stop`` is refused,
    and reported log-probabilities lack ``decoded_token``."""
    skip_special_tokens: _Flag = True
    """Leave special tokens, such as an end-of-turn token, out of the output's text."""
    spaces_between_special_tokens: _Flag = True
    """Where the output's text has special tokens one after the other, keep the space that some
    tokenizers write between them."""
    bad_words: _Texts = ()
    """Texts that the output must not contain. Each text is tokenized without and with a space
    before it, after its leading whitespace is removed (a text of whitespace alone: as given). The
    last token of a tokenization is never drawn where the output ends with the other tokens."""
    bad_words_token_ids: _TokenLists = ()
    """Token sequences that the output must not contain, in addition to ``bad_words``."""
    bad_words_match_prompt: _Flag = False
    """Let a bad word begin in the prompt, not only in the output."""
    logprobs: _Logprobs | None = None
    """Report the log-probabilities of the token drawn and of this many most likely tokens, at each
    output position; -1 reports the whole vocabulary, which needs ``max_logprobs=-1`` of ``LLM``.
    Default: no report."""
    logprob_token_ids: _Tokens = ()
    """Report the log-probabilities of the token drawn and of these tokens, at each position."""
    prompt_logprobs: _Logprobs | None = None
    """Like ``logprobs``, for the prompt's tokens; -1 needs ``max_logprobs=-1`` too."""
    structured_output: Annotated[
        Grammar | None, instances(Grammar, "a Grammar (mrv1.integrations.llguidance) or None")
    ] = None
    """``Grammar`` that the output must follow; ``mrv1.integrations.llguidance`` makes one from a
    JSON schema, a regular expression or EBNF."""
    structured_outputs: Annotated[
        GrammarSource | None, instances(GrammarSource, "StructuredOutputsParams or None")
    ] = None
    """``StructuredOutputsParams``: a JSON schema, regular expression, list of choices or EBNF that
    the output must follow. ``LLM`` compiles it for its tokenizer when the request is added."""

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
        for name, none in (("top_k", 0), ("seed", None)):
            value = getattr(self, name)
            if type(value) is int and value == -1:
                object.__setattr__(self, name, none)
        check_fields(self, RequestError)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens: expected at most max_tokens, {short(self.max_tokens)}, "
                f"got {short(self.min_tokens)}"
            )
        if self.structured_output is not None and self.structured_outputs is not None:
            raise RequestError(
                "structured_outputs: expected None with structured_output, got "
                f"{short(self.structured_outputs)}"
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop: expected none with detokenize=False, got {short(self.stop)}"
            )

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

    @classmethod
    def from_optional(cls, /, **params: Any) -> Self:  # noqa: ANN401 - of any field
        """Return parameters in which None stands for a field that is not given, as in vLLM.

        As there, ``max_tokens=None`` is given: until the context is full; and the token ids of
        ``logit_bias`` may be decimal texts, as the keys of JSON are.
        """
        bias = params.get("logit_bias")
        if isinstance(bias, Mapping):
            params["logit_bias"] = {_token(key): value for key, value in bias.items()}
        optional = {each.name for each in fields(cls)} - {"max_tokens"}
        return cls(**{k: v for k, v in params.items() if v is not None or k not in optional})

    def clone(self) -> Self:
        """Return a copy; a change of one of the two does not change the other."""
        return replace(self)

    @property
    def bans_words(self) -> bool:
        """Whether the request has bad words, as texts or as token ids."""
        return bool(self.bad_words or self.bad_words_token_ids)

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
    close = [difflib.get_close_matches(name, known, n=1) for name in names[:NUM_UNKNOWN_SHOWN]]
    hints = [f" (did you mean {each[0]!r}?)" if each else "" for each in close]
    got = ", ".join(f"{short(name)}{hint}" for name, hint in zip(names, hints, strict=False))
    more = ", ..." if len(names) > NUM_UNKNOWN_SHOWN else ""
    expected = "names of its fields" if all(close) else f"one of {', '.join(known)}"
    return f"sampling_params: expected {expected}; got {got}{more}"
