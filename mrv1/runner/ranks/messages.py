"""What rank 0 and the other ranks tell each other by their connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mrv1.config import EngineConfig
from mrv1.errors import CapacityError, ConfigError
from mrv1.headwise import HeadPolicy
from mrv1.kernels._base.peers import PeerError
from mrv1.models import ModelConfig
from mrv1.runner.model_runner import is_caused_by

CALL_SECONDS = 600.0
"""Longest call between steps, such as one that pins memory for the weights of a large model."""

REFUSALS = {each.__name__: each for each in (CapacityError, ConfigError)}
"""Errors of a call that has changed nothing on its rank; any other ends all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """What a rank is told first."""

    rank: int
    config: EngineConfig
    """With the checkpoint's directory."""
    model_config: ModelConfig
    """Of the whole model. To read it takes transformers, which takes seconds to import."""
    head_policy: HeadPolicy | None
    has_peers: bool
    """Whether the ranks share memory of their GPUs."""
    has_processors: bool
    """Whether rank 0 has custom logits processors, and draws."""
    port: int
    """Rank 0's store."""
    memory: int
    """File descriptor of the host memory that all ranks share."""
    num_threads: int
    timeout: float
    """Seconds; see ``processes.TIMEOUT_SECONDS``."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of a method of ``RankControl``, or of one in ``OF_MEMORY``."""

    name: str
    args: tuple[object, ...]
    waits: bool = True
    """Whether rank 0 waits for the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a call, or the kind and the message of the error by which a rank refused."""

    value: Any = None
    refusal: tuple[str, str] | None = None

    def result(self, rank: int) -> Any:  # noqa: ANN401 - of any call
        """Return the result, or raise the error."""
        if self.refusal is None:
            return self.value
        kind, message = self.refusal
        raise REFUSALS[kind](message if rank == 0 else f"rank {rank}: {message}")


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
