"""A ranking of heads by the loss when they stream, which gives a policy for every budget."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mrv1.environment import INT32_MAX
from mrv1.errors import ConfigError
from mrv1.headwise.policy import FULL, HeadPolicy, Visible, check_streaming, is_share
from mrv1.options import integers

Head = tuple[int, int]  # layer and KV head
BLOCK_SIZE = 16  # tokens of a block in which ``policy_of_cache`` counts, the engine's default

SHIPPED = files("mrv1.headwise") / "rankings"  # ``NAME.json``, by the model's name in mrv1
RANKING_KEYS = {"version", "num_layers", "num_kv_heads", "window", "sink", "heads"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRanking:
    """Heads ranked by the loss when they stream: one ranking gives a policy for every budget.

    Attributes:
        num_layers, num_kv_heads: shape of the model.
        streaming: window and sink that the heads streamed with.
        order: the head that streams first comes first. Heads that are not in ``order`` stay full.
        losses: for each head in ``order``, the rise of the loss, in nats, when it alone joined the
            heads that streamed before its round.
    """

    num_layers: int
    num_kv_heads: int
    streaming: Visible
    order: tuple[Head, ...]
    losses: tuple[float, ...]

    def policy(self, budget: float, streaming: Visible | None = None) -> HeadPolicy:
        """Return the policy that keeps the last heads of the order full.

        Args:
            budget: share of the ranked heads that stay full, in [0, 1], rounded to a number of
                heads (half to even); at least one, unless it is 0.
            streaming: window and sink of the other ranked heads; None = as they were ranked.

        Raises:
            ConfigError: the budget is not in [0, 1], or ``streaming`` is no window and sink.
        """
        return self._keeping(num_full_heads(len(self.order), budget), self._seen(streaming))

    def policy_of_cache(
        self, share: float, num_tokens: int, streaming: Visible | None = None
    ) -> HeadPolicy:
        """Return the policy with the most full heads whose cache is at most a share of all full.

        The cache of a request of ``num_tokens`` is counted in whole blocks of ``BLOCK_SIZE``
        tokens, as ``LLM.kv_report`` counts it.

        Args:
            share: share of the bytes when all heads are full, in (0, 1].
            num_tokens: length of the request, at least 1.
            streaming: window and sink of the other ranked heads; None = as they were ranked.

        Raises:
            ConfigError: the share or the length is out of its range, ``streaming`` is no window
                and sink, or the cache is larger with every ranked head streaming.
        """
        if not is_share(share) or share == 0:
            raise ConfigError(f"budget: expected more than 0, at most 1, got {share!r}")
        if not integers(1, INT32_MAX).holds(num_tokens):
            raise ConfigError(
                f"context: expected at least 1 token, at most {INT32_MAX}, got {num_tokens!r}"
            )
        seen = self._seen(streaming)
        full_blocks = -(-num_tokens // BLOCK_SIZE)
        blocks = min(seen.num_blocks(BLOCK_SIZE), full_blocks)
        num_heads = self.num_layers * self.num_kv_heads
        most = share * num_heads * full_blocks
        unranked = num_heads - len(self.order)
        least = unranked * full_blocks + len(self.order) * blocks
        if least > most:
            raise ConfigError(
                f"budget: expected at least {least / num_heads / full_blocks:.4f} of the cache of "
                f"{num_tokens} tokens, what window {seen.window} and sink {seen.sink} keep, "
                f"got {share}"
            )
        gain = full_blocks - blocks
        num_full = int((most - least) // gain) if gain else len(self.order)
        return self._keeping(min(num_full, len(self.order)), seen)

    def _seen(self, streaming: Visible | None) -> Visible:
        """Return what streaming heads see; ConfigError: all tokens, or no window and sink."""
        seen = self.streaming if streaming is None else streaming
        check_streaming(seen)
        return seen

    def _keeping(self, num_full: int, streaming: Visible) -> HeadPolicy:
        streams = self.order[: len(self.order) - num_full]
        return streaming_policy(self.num_layers, self.num_kv_heads, streams, streaming)

    def loss_map(self) -> npt.NDArray[np.float64]:
        """Return ``[layers, kv_heads]``, each head's loss; NaN = the head was not ranked."""
        losses = np.full((self.num_layers, self.num_kv_heads), np.nan)
        for head, loss in zip(self.order, self.losses, strict=True):
            losses[head] = loss
        return losses

    def to_json(self) -> dict[str, Any]:
        """Return what ``load`` reads: ``heads`` is ``[layer, head, loss]`` in the order."""
        pairs = zip(self.order, self.losses, strict=True)
        return {
            "version": 1,
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "window": self.streaming.window,
            "sink": self.streaming.sink,
            "heads": [[layer, head, round(loss, 6)] for (layer, head), loss in pairs],
        }

    @classmethod
    def load(cls, source: str | Path) -> Self:
        """Return a ranking that ships with mrv1, by its model's name, or that a file contains.

        The file is a report of ``mrv1 calibrate``, or its part ``ranking``. A file that exists
        has precedence over a name.

        Raises:
            ConfigError: the file cannot be read or has no ranking.
        """
        name = f"ranking {str(source)!r}"
        try:
            is_name = re.fullmatch(r"\w+", str(source)) and not Path(source).is_file()
            file = SHIPPED / f"{source}.json" if is_name else Path(source)
            content = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{name}: expected a readable JSON file, or the name of a model whose ranking "
                f"ships, got {error}"
            ) from error
        if isinstance(content, dict):
            content = content.get("ranking", content)
        if not isinstance(content, dict) or set(content) != RANKING_KEYS:
            keys = sorted(content) if isinstance(content, dict) else type(content).__name__
            raise ConfigError(f"{name}: expected the keys {sorted(RANKING_KEYS)}, got {keys}")
        sizes = [content[key] for key in ("version", "num_layers", "num_kv_heads", "window")]
        if not all(map(integers(1, INT32_MAX).holds, sizes)) or sizes[0] != 1:
            raise ConfigError(
                f"{name}: expected version 1 and num_layers, num_kv_heads, window >= 1, got "
                f"{sizes}"
            )
        _, layers, kv_heads, window = sizes
        if not integers(0, INT32_MAX).holds(content["sink"]):
            raise ConfigError(f"{name}: expected sink >= 0, got {content['sink']!r}")
        rows = content["heads"] if isinstance(content["heads"], list) else [content["heads"]]
        wrong = [row for row in rows if not _is_ranked(row, layers, kv_heads)]
        order = tuple((row[0], row[1]) for row in rows if not wrong)
        if wrong or not order or len({*order}) < len(order):
            raise ConfigError(
                f"{name}: expected heads, [layer, head, loss], each once, of {layers} layers of "
                f"{kv_heads} KV heads, got {wrong[:1] or order!r:.200}"
            )
        return cls(
            num_layers=layers,
            num_kv_heads=kv_heads,
            streaming=Visible(window, content["sink"]),
            order=order,
            losses=tuple(float(row[2]) for row in rows),
        )


def _is_ranked(row: object, num_layers: int, num_kv_heads: int) -> bool:
    """Return whether ``row`` is a layer, a head and a finite loss."""
    if not isinstance(row, list) or len(row) != 3:
        return False
    layer, head, loss = row
    is_layer, is_head = (integers(0, most - 1).holds for most in (num_layers, num_kv_heads))
    is_loss = type(loss) in (int, float) and isfinite(loss)
    return is_loss and is_layer(layer) and is_head(head)


def num_full_heads(num_heads: int, budget: float) -> int:
    """Return how many of ``num_heads`` stay full, as in :meth:`HeadRanking.policy`, errors too."""
    if not is_share(budget):
        raise ConfigError(f"budget: expected 0 to 1, got {budget!r}")
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
