"""Structured output: the protocols that the engine calls; see ``mrv1.integrations.llguidance``."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


@runtime_checkable
class Grammar(Protocol):
    """The form that outputs must follow: ``SamplingParams.structured_output``."""

    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the start of a new output."""


@runtime_checkable
class GrammarSource(Protocol):
    """A grammar as text, for any tokenizer: ``SamplingParams.structured_outputs``."""

    def compiled(
        self,
        tokenizer: Any,  # noqa: ANN401 - one of many classes of transformers
        vocab_size: int,
        stop_token_ids: list[int] | None,
    ) -> Grammar:
        """Return the grammar for a model, whose vocabulary may be larger than the tokenizer's.

        ``stop_token_ids`` may end a complete output; None = the tokenizer's. RequestError: the
        text is no grammar, or a package that compiles it is missing.
        """


@runtime_checkable
class GrammarMatcher(Protocol):
    """Follows one output through a grammar, on the host."""

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32]) -> None:
        """Set bit i of word w where token 32 w + i may come next; ``[ceil(vocab / 32)]``."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token; return False if the grammar does not allow the token."""

    def is_finished(self) -> bool:
        """Return whether the output is complete and no token may follow: the request ends."""
