"""Sends the requests of a workload to an engine on time, and notes when their tokens come."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from benchmarks.engines.workload import Conversation


class Progress(NamedTuple):
    """What a step has brought a request."""

    request: int
    token_ids: Sequence[int]
    """Its new tokens."""
    is_finished: bool


class ServedEngine(Protocol):
    """An engine as the client sees it: token ids in and out, step by step."""

    start_s: float
    """Seconds of the start, without imports."""

    def configure(self, sampling: dict[str, Any], *, stream_outputs: bool) -> None:
        """Set the sampling parameters of the next requests, and when their tokens come.

        Args:
            sampling: arguments of the engine's ``SamplingParams``.
            stream_outputs: give each token when it is drawn; else all with the finished output.
        """

    def add(self, request: int, prompt: Sequence[int], output_len: int) -> None:
        """Queue a request for ``output_len`` tokens."""

    def step(self) -> list[Progress]:
        """Run or await a step; return the requests that it has changed."""

    @property
    def is_busy(self) -> bool:
        """Whether a request is unfinished."""

    def first_tokens(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return for each prompt ``[token id, lead]`` of its first token.

        The lead is that of the best token's log-probability over the second best one's.
        """

    def close(self) -> None:
        """Give the device's memory back."""


@dataclass(slots=True)
class Served:
    """A request of a run. Times are in seconds from the start of the run."""

    arrival_s: float
    """When it was due, which may be before the engine could take it."""
    input_len: int
    output_len: int
    token_s: list[float] = field(default_factory=list)
    """When each token came."""


def serve(engine: ServedEngine, conversations: Sequence[Conversation]) -> list[Served]:
    """Send every turn when it is due, and run steps until all answers have ended.

    Arrivals are looked for between steps, as one step of the engine runs at a time.

    Returns:
        The requests, in the order in which they were sent.

    Raises:
        RuntimeError: an answer ended with another number of tokens than was asked for.
    """
    due = [(conversation.arrival_s, index, 0) for index, conversation in enumerate(conversations)]
    heapq.heapify(due)
    histories: list[list[int]] = [[] for _ in conversations]
    served: list[Served] = []
    places: list[tuple[int, int]] = []
    """Conversation and turn of each request."""
    num_tokens: list[int] = []
    start = time.perf_counter()
    while due or engine.is_busy:
        now = time.perf_counter() - start
        while due and due[0][0] <= now:
            arrival, index, number = heapq.heappop(due)
            turn, history = conversations[index].turns[number], histories[index]
            history += turn.tokens
            engine.add(len(served), history, turn.output_len)
            served.append(Served(arrival, len(history), turn.output_len))
            places.append((index, number))
            num_tokens.append(0)
        if not engine.is_busy:
            time.sleep(due[0][0] - now)
            continue
        changed = engine.step()
        now = time.perf_counter() - start
        for request, token_ids, is_finished in changed:
            own, (index, number) = served[request], places[request]
            own.token_s += [now] * len(token_ids)
            num_tokens[request] += len(token_ids)
            histories[index] += token_ids
            if not is_finished:
                continue
            if num_tokens[request] != own.output_len:
                raise RuntimeError(
                    f"output tokens: expected {own.output_len} of request {request}, got "
                    f"{num_tokens[request]}"
                )
            if number + 1 < len(conversations[index].turns):
                heapq.heappush(due, (now, index, number + 1))
    return served
