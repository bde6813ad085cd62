"""Grammars by xgrammar: JSON schemas, regular expressions, EBNF."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mrv1.errors import ConfigError, RequestError
from mrv1.sampler.params import short

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class XGrammar:
    """Compiles grammars for one tokenizer; compiled grammars are cached.

    Args:
        tokenizer: the model's tokenizer, of transformers.
        vocab_size: vocabulary size of the model, which may be larger than the tokenizer's.
        stop_token_ids: tokens that may end a complete output; None = the tokenizer's.

    Raises:
        ConfigError: xgrammar is not installed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        *,
        stop_token_ids: list[int] | None = None,
    ) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise ConfigError(
                "XGrammar: expected the package xgrammar to be installed, "
                f"got {error}; pip install 'mrv1[structured]'"
            ) from error
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=stop_token_ids
        )
        self._new_matcher = xgrammar.GrammarMatcher
        self._compiler = xgrammar.GrammarCompiler(info)

    def json_schema(self, schema: str, *, any_whitespace: bool = True) -> XGrammarGrammar:
        """Return the grammar of JSON texts that a schema allows, by default with any whitespace.

        Raises:
            RequestError: xgrammar cannot compile the schema.
        """
        compile_schema = partial(self._compiler.compile_json_schema, any_whitespace=any_whitespace)
        return self._compiled("json_schema", compile_schema, schema)

    def regex(self, pattern: str) -> XGrammarGrammar:
        """Return the grammar of texts that a regular expression matches as a whole.

        Raises:
            RequestError: xgrammar cannot compile the pattern.
        """
        return self._compiled("regex", self._compiler.compile_regex, pattern)

    def ebnf(self, grammar: str) -> XGrammarGrammar:
        """Return the grammar of rules in xgrammar's EBNF, which start at the rule ``root``.

        Raises:
            RequestError: xgrammar cannot compile the rules.
        """
        return self._compiled("ebnf", self._compiler.compile_grammar, grammar)

    def _compiled(self, name: str, compile_text: Any, text: str) -> XGrammarGrammar:  # noqa: ANN401
        try:
            return XGrammarGrammar(self._new_matcher, compile_text(text))
        except (RuntimeError, ValueError) as error:
            raise RequestError(f"{name}: expected text xgrammar compiles, got {error}") from error


class XGrammarGrammar:
    """A compiled grammar, for any number of requests."""

    def __init__(self, new_matcher: Any, compiled: Any) -> None:  # noqa: ANN401 - xgrammar's
        self._new_matcher, self._compiled = new_matcher, compiled

    def matcher(self) -> XGrammarMatcher:
        """Return a matcher that follows a new output."""
        return XGrammarMatcher(self._new_matcher(self._compiled))


class XGrammarMatcher:
    """Follows one output."""

    def __init__(self, matcher: Any) -> None:  # noqa: ANN401 - xgrammar's GrammarMatcher
        self._matcher = matcher

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32]) -> None:
        """Set the bits of tokens that may come next, ``[ceil(vocab / 32)]``."""
        self._matcher.fill_next_token_bitmask(bitmask[None])

    def accept(self, token_id: int) -> bool:
        """Advance by a token; return False if the grammar does not allow the token."""
        return bool(self._matcher.accept_token(token_id))

    def is_finished(self) -> bool:
        """Whether a stop token has ended the output."""
        return bool(self._matcher.is_terminated())


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output, by one of the fields below; names and meaning are vLLM's.

    It is the value of ``SamplingParams.structured_outputs``, needs the package xgrammar
    (``pip install 'mrv1[structured]'``), and is compiled once for a tokenizer.

    Raises:
        RequestError: not exactly one field is given, or it has a value of another type.
    """

    json: str | Mapping[str, Any] | None = field(default=None, hash=False)
    """A JSON schema, as text or as a dict."""
    regex: str | None = None
    """A regular expression that matches the output as a whole."""
    choice: Sequence[str] | None = None
    """Texts, one of which is the output."""
    grammar: str | None = None
    """Rules in xgrammar's EBNF, which start at the rule ``root``."""
    json_object: bool | None = None
    """True: any JSON object."""

    def __post_init__(self) -> None:
        """Check the fields, and store the choices as a tuple."""
        given = [each.name for each in fields(self) if getattr(self, each.name) is not None]
        if len(given) != 1:
            names = ", ".join(each.name for each in fields(self))
            raise RequestError(
                f"structured_outputs: expected exactly one of {names}; got "
                f"{', '.join(given) or 'none'}"
            )
        (name,) = given
        value: object = getattr(self, name)
        if name == "choice":
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            value = tuple(value) if is_list else value  # type: ignore[arg-type]
            object.__setattr__(self, "choice", value)
        expected, is_valid = {
            "json": ("a JSON schema as text or dict", isinstance(value, str | Mapping)),
            "regex": ("text", isinstance(value, str)),
            "choice": (
                "texts that are not empty",
                isinstance(value, tuple)
                and bool(value)
                and all(isinstance(text, str) and text for text in value),
            ),
            "grammar": ("text", isinstance(value, str)),
            "json_object": ("True", value is True),
        }[name]
        if not is_valid:
            raise RequestError(
                f"structured_outputs.{name}: expected {expected}, got {short(value)}"
            )

    def compiled(
        self,
        tokenizer: Any,  # noqa: ANN401 - one of many classes of transformers
        vocab_size: int,
        stop_token_ids: list[int] | None,
    ) -> XGrammarGrammar:
        """Return the grammar for a model; see ``mrv1.sampler.GrammarSource``.

        Raises:
            RequestError: xgrammar is not installed, or cannot compile the text.
        """
        try:
            compiler = _compiler(tokenizer, vocab_size, stop_token_ids)
            if self.regex is not None:
                return compiler.regex(self.regex)
            if self.choice is not None:
                # EBNF writes a text as JSON does: in quotes, with the same escapes.
                texts = [json_module.dumps(text, ensure_ascii=False) for text in self.choice]
                return compiler.ebnf(f"root ::= {' | '.join(texts)}")
            if self.grammar is not None:
                return compiler.ebnf(self.grammar)
            if self.json is not None:
                text = self.json
                return compiler.json_schema(
                    text if isinstance(text, str) else json_module.dumps(text)
                )
            return compiler.json_schema('{"type": "object"}')
        except (ConfigError, RequestError, TypeError, ValueError) as error:
            raise RequestError(f"structured_outputs: {error}") from error


_COMPILERS: WeakKeyDictionary[Any, dict[tuple[int, ...], XGrammar]] = WeakKeyDictionary()
"""Tokenizer -> vocabulary size and stop tokens -> their compiler."""


def _compiler(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop_token_ids: list[int] | None
) -> XGrammar:
    key = (vocab_size, *(stop_token_ids or ()))
    compilers = _COMPILERS.setdefault(tokenizer, {})
    if key not in compilers:
        compilers[key] = XGrammar(tokenizer, vocab_size, stop_token_ids=stop_token_ids)
    return compilers[key]
