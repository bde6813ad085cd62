"""Which heads may stream: those without which a model loses least.

A head alone tells little where others can stand in for it, so heads come to stream in rounds: in
each, every head that is still full is tried alone, beside those that stream already, and those
whose loss is least stream from then on. One round of all heads is the plain ranking by single
losses.

Nothing here runs a model: whoever calls brings a loss of a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from mrv1.errors import ConfigError
from mrv1.headwise.policy import FULL, HeadPolicy, Visible

Head = tuple[int, int]
"""Layer and KV head."""

Loss = Callable[[HeadPolicy], float]

Method = Literal["greedy", "single"]
"""``greedy``: in rounds; ``single``: in one."""

METHODS: tuple[Method, ...] = get_args(Method)

ROUND_SHARE = 0.25
"""Of the heads that are still full, those that a greedy round lets stream: ``n`` heads take about
``4 * n`` losses instead of the ``n * n / 2`` of one head a round."""

MOST_EXCESS = 2e-3
"""Nats a head: if a round's heads lose that much more together than one by one, some stand in for
each other, and the round is halved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRanking:
    """Heads by what they lose when they stream.

    Attributes:
        num_layers: of the model.
        num_kv_heads: of each layer.
        order: the first streams first. Heads that are not in it stay full.
        losses: of each head in ``order``, what the loss rose by when it came to stream, beside
            those that streamed before its round.
    """

    num_layers: int
    num_kv_heads: int
    order: tuple[Head, ...]
    losses: tuple[float, ...]

    def policy(self, budget: float, streaming: Visible) -> HeadPolicy:
        """Return the policy that keeps the last heads of the order full.

        Args:
            budget: share of the ranked heads that stay full, in [0, 1]: none at 0, else as many
                as it rounds to (half to even), at least one.
            streaming: what the others see.

        Raises:
            ConfigError: the budget is not in [0, 1].
        """
        num_full = num_full_heads(len(self.order), budget)
        streams = self.order[: len(self.order) - num_full]
        return streaming_policy(self.num_layers, self.num_kv_heads, streams, streaming)

    def loss_map(self) -> npt.NDArray[np.float64]:
        """Return ``[layers, kv_heads]``, each head's loss; NaN where it was not ranked."""
        losses = np.full((self.num_layers, self.num_kv_heads), np.nan)
        for head, loss in zip(self.order, self.losses, strict=True):
            losses[head] = loss
        return losses


def num_full_heads(num_heads: int, budget: float) -> int:
    """Return how many of ``num_heads`` stay full; see :meth:`HeadRanking.policy`.

    Raises:
        ConfigError: the budget is not in [0, 1].
    """
    if not 0 <= budget <= 1:
        raise ConfigError(f"budget: expected 0 to 1, got {budget}")
    return max(round(budget * num_heads), 1) if budget else 0


def streaming_policy(
    num_layers: int, num_kv_heads: int, heads: Collection[Head], streaming: Visible
) -> HeadPolicy:
    """Return the policy in which ``heads`` stream and the others are full."""
    return HeadPolicy(
        tuple(
            tuple(streaming if (layer, head) in heads else FULL for head in range(num_kv_heads))
            for layer in range(num_layers)
        )
    )


def rankable_heads(layer_windows: Sequence[int], num_kv_heads: int) -> list[Head]:
    """Return the heads that could stream: not those of layers with a window of their own.

    Raises:
        ConfigError: there is none.
    """
    heads = [
        (layer, head)
        for layer, window in enumerate(layer_windows)
        for head in range(num_kv_heads)
        if window < 0
    ]
    if not heads:
        raise ConfigError("calibration: expected a layer without a window of its own, got none")
    return heads


def round_size(num_heads: int, method: Method) -> int:
    """Return how many of the heads that are still full come to stream in a round, at most.

    Raises:
        ConfigError: there is no such method.
    """
    if method not in METHODS:
        raise ConfigError(f"method: expected one of {METHODS}, got {method!r}")
    return num_heads if method == "single" else max(int(num_heads * ROUND_SHARE), 1)


def num_losses(num_heads: int, method: Method) -> int:
    """Return how many losses it takes to rank heads, if no round is halved."""
    total = 1
    while num_heads > 0:
        size = round_size(num_heads, method)
        total += num_heads
        num_heads -= size
        total += size > 1 and num_heads > 0
    return total


def rank_heads(
    num_layers: int,
    num_kv_heads: int,
    heads: Sequence[Head],
    streaming: Visible,
    loss: Loss,
    *,
    method: Method = "greedy",
    on_round: Callable[[int], None] = lambda num_left: None,
) -> HeadRanking:
    """Rank heads by what they lose when they stream.

    Args:
        num_layers: of the model.
        num_kv_heads: of each layer.
        heads: which to rank; of equal losses the first streams first.
        streaming: what a streaming head sees.
        loss: of a policy, in nats; called ``num_losses`` times, and more where rounds are halved.
        method: how many rounds.
        on_round: is told before each round how many heads are still full.

    Raises:
        ConfigError: there is no such method, or a loss is not a finite number.
    """

    def loss_of(streams: Sequence[Head]) -> float:
        value = loss(streaming_policy(num_layers, num_kv_heads, streams, streaming))
        if not isfinite(value):
            raise ConfigError(f"calibration: expected a finite loss, got {value}; try float32")
        return value

    order: list[Head] = []
    losses: list[float] = []
    left = list(heads)
    base = loss_of(order)
    while left:
        on_round(len(left))
        found = {head: loss_of([*order, head]) for head in left}
        left.sort(key=found.__getitem__)
        size = round_size(len(left), method)
        together = 0.0
        while 1 < size < len(left):
            together = loss_of([*order, *left[:size]])
            one_by_one = sum(found[head] - base for head in left[:size])
            if together - base - one_by_one <= MOST_EXCESS * size:
                break
            size //= 2
        order += left[:size]
        losses += [found[head] - base for head in left[:size]]
        base = found[left[0]] if size == 1 else together
        left = left[size:]
    return HeadRanking(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        order=tuple(order),
        losses=tuple(losses),
    )
