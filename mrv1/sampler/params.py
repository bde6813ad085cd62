"""What a user may ask of the sampler for one request."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Never

from mrv1.errors import RequestError

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
"""A request's seed is the 64-bit key of its noise."""

TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-5, 1e5
"""Outside, float32 logits divided by it overflow or all become equal."""

TOP_K_MAX = 2**31 - 1
"""Held as int32; more than any vocabulary."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_word(word: object) -> bool:
    return (
        isinstance(word, list | tuple)
        and len(word) > 0
        and all(_is_int(token) and token >= 0 for token in word)
    )


def _is_real(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, float) and math.isfinite(value)


@dataclass(frozen=True, slots=True, init=False)
class SamplingParams:
    """How one request is sampled and when it ends. The names are vLLM's.

    Attributes:
        temperature: 0, or from 1e-5 to 1e5; 0 is greedy: exactly the argmax, ties to the lowest
            id.
        top_k: keep the k highest logits (ties with the last one stay); 0 or -1 keeps all.
        top_p: in (0, 1]; keep the most likely tokens up to this probability, after temperature
            and top_k (ties with the last one stay).
        seed: 64-bit integer; None derives one from the engine's seed and the order of admission.
        max_tokens: tokens to generate, >= 1; None = as many as the context holds.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        stop_token_ids: further tokens that end the request.
        stop: a text, or several, that ends the request where its output first holds it.
        include_stop_str_in_output: keep that text at the end of the output, which is cut in front
            of it otherwise.
        bad_words: texts that the output is not to hold, each as it begins a text and as it stands
            behind a space: the last token of such a tokenization is never drawn where the output
            ends with the others.
        bad_words_token_ids: further token sequences of that kind.
        bad_words_match_prompt: whether tokens of the prompt count towards a word's beginning.

    Raises:
        RequestError: an unknown name, or a value out of range; the message names the field.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    max_tokens: int | None
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    bad_words: tuple[str, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    bad_words_match_prompt: bool

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        max_tokens: int | None = 16,
        ignore_eos: bool = False,
        stop_token_ids: tuple[int, ...] | list[int] = (),
        stop: str | tuple[str, ...] | list[str] | None = None,
        include_stop_str_in_output: bool = False,
        bad_words: tuple[str, ...] | list[str] = (),
        bad_words_token_ids: Sequence[Sequence[int]] = (),
        bad_words_match_prompt: bool = False,
        **unknown: Never,
    ) -> None:
        """Check and store; see the class for the fields."""
        if unknown:
            raise RequestError(_unknown_message(sorted(unknown)))
        values = {
            "temperature": temperature,
            "top_k": 0 if top_k == -1 else top_k,
            "top_p": top_p,
            "seed": seed,
            "max_tokens": max_tokens,
            "ignore_eos": ignore_eos,
            "stop_token_ids": stop_token_ids,
            "stop": (stop,) if isinstance(stop, str) else () if stop is None else stop,
            "include_stop_str_in_output": include_stop_str_in_output,
            "bad_words": bad_words,
            "bad_words_token_ids": bad_words_token_ids,
            "bad_words_match_prompt": bad_words_match_prompt,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._validate()
        object.__setattr__(self, "stop_token_ids", tuple(stop_token_ids))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "bad_words", tuple(bad_words))
        object.__setattr__(self, "bad_words_token_ids", tuple(map(tuple, bad_words_token_ids)))

    def _validate(self) -> None:
        temperature = self.temperature
        if not _is_real(temperature) or (
            temperature != 0 and not TEMPERATURE_MIN <= temperature <= TEMPERATURE_MAX
        ):
            raise RequestError(
                f"temperature: expected 0 or a number from {TEMPERATURE_MIN} to "
                f"{TEMPERATURE_MAX:g}, got {_short(temperature)}"
            )
        if not _is_int(self.top_k) or not 0 <= self.top_k <= TOP_K_MAX:
            raise RequestError(
                f"top_k: expected an integer >= 1, or 0 or -1 for all, got {self.top_k!r}"
            )
        if not _is_real(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestError(f"top_p: expected a number in (0, 1], got {self.top_p!r}")
        if self.seed is not None and not (
            _is_int(self.seed) and SEED_MIN <= self.seed <= SEED_MAX
        ):
            raise RequestError(f"seed: expected a 64-bit integer or None, got {self.seed!r}")
        if self.max_tokens is not None and not (_is_int(self.max_tokens) and self.max_tokens >= 1):
            raise RequestError(
                f"max_tokens: expected an integer >= 1 or None, got {self.max_tokens!r}"
            )
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos: expected a bool, got {self.ignore_eos!r}")
        stops: object = self.stop_token_ids
        if not isinstance(stops, list | tuple) or not all(_is_int(t) and t >= 0 for t in stops):
            raise RequestError(f"stop_token_ids: expected a list of token ids >= 0, got {stops!r}")
        for name in ("stop", "bad_words"):
            texts: object = getattr(self, name)
            if not isinstance(texts, list | tuple) or not all(
                isinstance(text, str) and text for text in texts
            ):
                raise RequestError(
                    f"{name}: expected texts that are not empty, got {_short(texts)}"
                )
        words: object = self.bad_words_token_ids
        if not isinstance(words, list | tuple) or not all(map(_is_word, words)):
            raise RequestError(
                "bad_words_token_ids: expected lists of token ids >= 0 that are not empty, got "
                f"{_short(words)}"
            )
        for name in ("include_stop_str_in_output", "bad_words_match_prompt"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}: expected a bool, got {getattr(self, name)!r}")

    @property
    def bans_words(self) -> bool:
        """Whether there is anything that the output is not to hold."""
        return bool(self.bad_words or self.bad_words_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether the request takes the argmax."""
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether top_k or top_p removes tokens from a draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)


def _short(value: object) -> str:
    """Return the repr of ``value``, cut where nobody reads on."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _unknown_message(names: list[str]) -> str:
    known = [field.name for field in fields(SamplingParams)]
    hints = []
    for name in names:
        close = difflib.get_close_matches(name, known, n=1)
        hints.append(f"{name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
    return f"sampling parameter: expected one of {', '.join(known)}; got {', '.join(hints)}"
