"""What an output may look like, as the engine asks for it; see ``mrv1.integrations.xgrammar``."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


@runtime_checkable
class Grammar(Protocol):
    """What outputs may look like: ``SamplingParams.structured_output``."""

    def matcher(self) -> GrammarMatcher:
        """Return what follows a new output."""
        ...


@runtime_checkable
class GrammarMatcher(Protocol):
    """Follows one output through a grammar, on the host."""

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32]) -> None:
        """Say what may come next: bit i of word w set = token 32 w + i, ``[ceil(vocab / 32)]``."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False if the grammar does not allow it."""
        ...

    def is_finished(self) -> bool:
        """Whether the output is complete and nothing may follow: it ends the request."""
        ...
