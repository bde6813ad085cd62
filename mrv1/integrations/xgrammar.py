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
    """Compiles grammars for one tokenizer; compiled ones are kept.

    Args:
        tokenizer: of transformers, as the model's.
        vocab_size: of the model, which may be larger than the tokenizer's.
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
        """Return the grammar of JSON texts that a schema allows, with whitespace as it likes.

        Raises:
            RequestError: xgrammar cannot compile it.
        """
        compile_schema = partial(self._compiler.compile_json_schema, any_whitespace=any_whitespace)
        return self._compiled("json_schema", compile_schema, schema)

    def regex(self, pattern: str) -> XGrammarGrammar:
        """Return the grammar of texts that a regular expression matches as a whole.

        Raises:
            RequestError: xgrammar cannot compile it.
        """
        return self._compiled("regex", self._compiler.compile_regex, pattern)

    def ebnf(self, grammar: str) -> XGrammarGrammar:
        """Return the grammar of a text in xgrammar's EBNF, whose first rule is ``root``.

        Raises:
            RequestError: xgrammar cannot compile it.
        """
        return self._compiled("ebnf", self._compiler.compile_grammar, grammar)

    def _compiled(self, name: str, compile_text: Any, text: str) -> XGrammarGrammar:  # noqa: ANN401
        try:
            return XGrammarGrammar(self._new_matcher, compile_text(text))
        except (RuntimeError, ValueError) as error:
            raise RequestError(f"{name}: expected what xgrammar compiles, got {error}") from error


class XGrammarGrammar:
    """A compiled grammar, for any number of requests."""

    def __init__(self, new_matcher: Any, compiled: Any) -> None:  # noqa: ANN401 - xgrammar's
        self._new_matcher, self._compiled = new_matcher, compiled

    def matcher(self) -> XGrammarMatcher:
        """Return what follows a new output."""
        return XGrammarMatcher(self._new_matcher(self._compiled))


class XGrammarMatcher:
    """Follows one output."""

    def __init__(self, matcher: Any) -> None:  # noqa: ANN401 - xgrammar's GrammarMatcher
        self._matcher = matcher

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32]) -> None:
        """Say what may come next, ``[ceil(vocab / 32)]``."""
        self._matcher.fill_next_token_bitmask(bitmask[None])

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False if the grammar does not allow it."""
        return bool(self._matcher.accept_token(token_id))

    def is_finished(self) -> bool:
        """Whether a stop token has ended the output."""
        return bool(self._matcher.is_terminated())
