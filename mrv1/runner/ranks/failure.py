"""What a rank says of its failure, and how a failed collective is told from other errors."""

from __future__ import annotations

from dataclasses import dataclass

from mrv1.kernels._base.peers import PeerError
from mrv1.runner.model_runner import is_caused_by


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """What a rank sends to rank 0 before it ends."""

    kind: str
    message: str
    is_of_peer: bool
    """Whether another rank is the cause."""

    @classmethod
    def of(cls, error: BaseException) -> RankFailure:
        """Return the report of an error."""
        kind, message = type(error).__name__, str(error) or repr(error)
        return cls(kind=kind, message=message, is_of_peer=is_caused_by(error, PeerError))
