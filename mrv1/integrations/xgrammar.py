"""Grammars by xgrammar: JSON schemas, regular expressions, EBNF."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mrv1.errors import ConfigError, RequestError

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
