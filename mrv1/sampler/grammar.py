"""Structured output: the protocols that the engine calls; see ``mrv1.integrations.xgrammar``."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


@runtime_checkable
class Grammar(Protocol):
    """The form that outputs must follow: ``SamplingParams.structured_output``."""

    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the start of a new output."""
        ...


@runtime_checkable
class GrammarMatcher(Protocol):
    """Follows one output through a grammar, on the host."""

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32]) -> None:
        """Set bit i of word w where token 32 w + i may come next; ``[ceil(vocab / 32)]``."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by a token; return False if the grammar does not allow the token."""
        ...

    def is_finished(self) -> bool:
        """Return whether the output is complete and no token may follow: the request ends."""
        ...
