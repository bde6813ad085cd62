"""The first request of each kind against the second: what a caller waits for at first use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mrv1.engine import EngineCore
from mrv1.errors import Mrv1Error
from mrv1.sampler import SamplingParams

TOKENS = 8
"""Tokens that each request generates."""


class AnyToken:
    """A grammar, and its own matcher, that allows every token."""

    def matcher(self) -> AnyToken:
        """Return the matcher."""
        return self

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32]) -> None:
        """Set all bits."""
        bitmask.fill(-1)

    def accept(self, token_id: int) -> bool:
        """Return True."""
        return True

    def is_finished(self) -> bool:
        """Return False."""
        return False


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {},
    "top-k, top-p, min-p": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "bias, allowed tokens": {"logit_bias": {5: 1.0}, "allowed_token_ids": [*range(4, 20)]},
    "bad words": {"bad_words_token_ids": [[5, 6]], "min_tokens": 2},
    "stop sequences": {"stop_token_sequences": [[5, 6, 7]]},
    "logprobs": {"logprobs": 5},
    "logprobs of edited logits": {"logprobs": 5, "presence_penalty": 0.5},
    "logprobs by id": {"logprob_token_ids": [5, 6]},
    "prompt logprobs": {"prompt_logprobs": 5},
    "grammar": {"structured_output": AnyToken()},
    "grammar with logprobs": {"structured_output": AnyToken(), "logprobs": 5},
}
"""The sampling parameters of a request of each kind, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRequest:
    """Times of the first two requests of one kind, which run alone, one after the other."""

    kind: str
    first_ms: float
    second_ms: float
    compilations: int
    """Kernels that were compiled or loaded while the two requests ran."""


def first_requests(core: EngineCore, prompt_of: Callable[[int], list[int]]) -> list[FirstRequest]:
    """Run two requests of each kind in an engine that has run none yet.

    Args:
        core: the engine.
        prompt_of: returns a new prompt for each number, all of one length.

    Raises:
        Mrv1Error: the error of a request that failed.
    """
    results, number = [], 0
    for kind, options in KINDS.items():
        before, times_ms = core.runner.num_compilations, []
        for _ in range(2):
            times_ms.append(_time_ms(core, prompt_of(number), options))
            number += 1
        first = FirstRequest(
            kind=kind,
            first_ms=times_ms[0],
            second_ms=times_ms[1],
            compilations=core.runner.num_compilations - before,
        )
        results.append(first)
    return results


def _time_ms(core: EngineCore, prompt: list[int], options: dict[str, Any]) -> float:
    params = SamplingParams(**{"seed": 1, "max_tokens": TOKENS, "ignore_eos": True} | options)
    start = time.perf_counter()
    request = core.add_request("first", prompt, params)
    while core.scheduler.has_unfinished_requests:
        core.step()
    elapsed = time.perf_counter() - start
    error: Mrv1Error | None = request.error
    if error is not None:
        raise error
    return elapsed * 1e3
