"""Rank heads by the loss of the model when they stream, which the caller's function returns.

The loss of a single streaming head says little where other heads can stand in for it, so heads
start to stream in rounds: each tries every head that is still full, one at a time, together with
those that stream already, and the heads with the least loss stream from then on. One round of all
heads is the plain ranking by single losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Literal, get_args

from mrv1.errors import ConfigError
from mrv1.headwise.policy import HeadPolicy, Visible, check_streaming
from mrv1.headwise.ranking import Head, HeadRanking, streaming_policy

Loss = Callable[[HeadPolicy], float]
Method = Literal["greedy", "single"]  # ``greedy``: several rounds; ``single``: one round
METHODS: tuple[Method, ...] = get_args(Method)
ROUND_SHARE = 0.25
"""Share of the heads still full that start to stream in a greedy round: ``n`` heads take about
``4 * n`` losses, instead of ``n * n / 2`` with one head per round."""

MOST_EXCESS = 2e-3
"""Nats per head: if the loss of a round's heads together exceeds the sum of their single losses by
more than this, some heads stand in for each other, and the round is halved."""


def rankable_heads(layer_windows: Sequence[int], num_kv_heads: int) -> list[Head]:
    """Return all heads of layers without a window; a ConfigError if there is no such layer."""
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
    """Return the most heads that start to stream in a round; ConfigError: no such method."""
    if method not in METHODS:
        raise ConfigError(f"method: expected one of {METHODS}, got {method!r}")
    return num_heads if method == "single" else max(int(num_heads * ROUND_SHARE), 1)


def num_losses(num_heads: int, method: Method) -> int:
    """Return the number of losses that ranking ``num_heads`` takes if no round is halved."""
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
    """Rank heads of a model by the loss when they stream; of equal losses the first head first.

    ``loss`` returns a policy's loss in nats; it is called ``num_losses`` times, more if rounds are
    halved. ``on_round`` gets the number of heads that are still full before each round.

    Raises:
        ConfigError: there is no such method, ``streaming`` is no window and sink, or a loss is not
            a finite number.
    """
    check_streaming(streaming)

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
        streaming=streaming,
        order=tuple(order),
        losses=tuple(losses),
    )
