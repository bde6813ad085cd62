"""A policy: what each KV head of each layer sees, from wherever it comes.

Sources: the ratio and its rounding are FastDeploy's (pull request 7718); pattern files are those
that DuoAttention (arXiv:2410.10819) publishes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from mrv1.errors import ConfigError
from mrv1.kernels.kv_layout import HeadRole

VERSION = 1
"""Of the JSON form."""


class Visible(NamedTuple):
    """What a KV head sees of a context."""

    window: int = -1
    """Tokens up to and including the current one; -1 = all."""
    sink: int = 0
    """Leading tokens that stay visible beside a window."""

    @property
    def is_full(self) -> bool:
        """Whether it sees everything."""
        return self.window < 0

    def sink_blocks(self, block_size: int) -> int:
        """Return the leading blocks that it always sees."""
        return -(-self.sink // block_size)

    def num_blocks(self, block_size: int, query_len: int = 1) -> int:
        """Return the blocks that a request needs of a streaming head at most, at any length.

        Args:
            block_size: tokens of a block.
            query_len: most tokens of a step: the first of them looks a window back.

        Raises:
            ValueError: the head sees everything: that has no bound.
        """
        if self.is_full:
            raise ValueError("num_blocks: expected a streaming head, got a full one")
        live = -(-(self.window + query_len - 2) // block_size) + 1
        return self.sink_blocks(block_size) + live

    def first_live(
        self, num_tokens: npt.NDArray[np.int64] | int, block_size: int
    ) -> npt.NDArray[np.int64]:
        """Return the first logical block behind the sink's that a streaming head still sees.

        The next token, at position ``num_tokens``, sees window - 1 tokens before it.
        """
        oldest = (num_tokens - (self.window - 1)) // block_size
        return np.maximum(oldest, self.sink_blocks(block_size))

    def freed_blocks(self, num_tokens: int, block_size: int) -> range:
        """Return the logical blocks that nobody sees any more behind ``num_tokens`` tokens."""
        first = self.sink_blocks(block_size)
        end = first if self.is_full else int(self.first_live(num_tokens, block_size))
        return range(first, end)


FULL = Visible()
"""A head that sees everything."""


@dataclass(frozen=True, slots=True)
class HeadPolicy:
    """What each KV head sees; it alone decides about kernels, tables, memory and reports.

    Attributes:
        heads: ``[layers][kv_heads]``.

    Raises:
        ConfigError: no layer or head, layers of different numbers of heads, a window or a sink
            that cannot be.
    """

    heads: tuple[tuple[Visible, ...], ...]

    def __post_init__(self) -> None:
        """Check."""
        widths = {len(layer) for layer in self.heads}
        if len(widths) != 1 or widths == {0}:
            raise ConfigError(
                f"head policy: expected layers of one number of KV heads, got {sorted(widths)}"
            )
        for index, layer in enumerate(self.heads):
            for head, seen in enumerate(layer):
                is_wrong = seen.sink != 0 if seen.is_full else seen.window < 1 or seen.sink < 0
                if is_wrong or seen.window < -1:
                    raise ConfigError(
                        f"head policy, layer {index}, head {head}: expected window >= 1 and sink "
                        f">= 0, or -1 and 0 for all, got {seen.window} and {seen.sink}"
                    )

    # --- sources --------------------------------------------------------------------------

    @classmethod
    def full(cls, num_layers: int, num_kv_heads: int) -> Self:
        """Return the policy of heads that see everything."""
        return cls(((FULL,) * num_kv_heads,) * num_layers)

    @classmethod
    def of_layer_windows(cls, layer_windows: Sequence[int], num_kv_heads: int) -> Self:
        """Return the policy of a model whose layers have windows of their own, -1 = none."""
        return cls(tuple((Visible(window),) * num_kv_heads for window in layer_windows))

    @classmethod
    def of_ratio(
        cls,
        num_layers: int,
        num_kv_heads: int,
        streaming_ratio: float,
        *,
        window: int,
        sink: int = 0,
        full_layers_every: int | None = None,
    ) -> Self:
        """Return the policy in which a share of the heads of each layer streams.

        Args:
            num_layers: of the model.
            num_kv_heads: of each layer, all ranks together.
            streaming_ratio: in [0, 1]. The leading heads stream: none at 0, all at 1, else as
                many as the ratio rounds to (half to even), at least one.
            window: tokens that they see, the current one among them.
            sink: leading tokens that they see too.
            full_layers_every: layers i, from 0 on, with (i + 1) % full_layers_every == 0 have full
                heads alone; None = no layer.

        Raises:
            ConfigError: an argument is out of its range.
        """
        if not 0 <= streaming_ratio <= 1:
            raise ConfigError(f"streaming_ratio: expected 0 to 1, got {streaming_ratio}")
        if full_layers_every is not None and full_layers_every < 2:
            raise ConfigError(
                f"full_layers_every: expected at least 2 or None, got {full_layers_every}"
            )
        if streaming_ratio in (0, 1):
            num_streaming = int(streaming_ratio) * num_kv_heads
        else:
            num_streaming = max(1, min(num_kv_heads, round(num_kv_heads * streaming_ratio)))
        streaming = (Visible(window, sink),) * num_streaming
        mixed = streaming + (FULL,) * (num_kv_heads - num_streaming)
        only_full = (FULL,) * num_kv_heads
        return cls(
            tuple(
                only_full
                if full_layers_every is not None and (layer + 1) % full_layers_every == 0
                else mixed
                for layer in range(num_layers)
            )
        )

    @classmethod
    def of_config(
        cls, config: Mapping[str, Any], num_layers: int, num_kv_heads: int
    ) -> Self | None:
        """Return the policy that a checkpoint's ``config.json`` asks for; None = it does not.

        The fields are FastDeploy's: ``head_wise_swa_ratio`` is the share of streaming heads,
        ``window_size`` and ``sink_size`` what they see, ``window_attn_skip_freq`` the period of
        full layers or a 0 (full) or 1 for each layer.

        Raises:
            ConfigError: a field is missing or out of its range.
        """
        if config.get("head_wise_swa_ratio") is None:
            return None
        window, every = config.get("window_size"), config.get("window_attn_skip_freq")
        if not isinstance(window, int):
            raise ConfigError(
                f"window_size: expected an integer beside head_wise_swa_ratio, got {window!r}"
            )
        policy = cls.of_ratio(
            num_layers,
            num_kv_heads,
            config["head_wise_swa_ratio"],
            window=window,
            sink=config.get("sink_size") or 0,
            full_layers_every=every if isinstance(every, int) else None,
        )
        if not isinstance(every, list | tuple):
            return policy
        if len(every) != num_layers or not set(every) <= {0, 1}:
            raise ConfigError(
                f"window_attn_skip_freq: expected a 0 or 1 for each of {num_layers} layers, got "
                f"{list(every)}"
            )
        only_full = (FULL,) * num_kv_heads
        return cls(
            tuple(
                layer if streams else only_full
                for layer, streams in zip(policy.heads, every, strict=True)
            )
        )

    @classmethod
    def of_duo_attention(cls, folder: str | Path, *, sparsity: float = 0.5) -> Self:
        """Return the policy of a pattern that DuoAttention has trained.

        Args:
            folder: holds ``full_attention_heads.tsv``, ``[layers, kv_heads]`` weights, and
                ``config.json`` with ``sink_size`` and ``recent_size``.
            sparsity: share of heads that stream, those of the least weights; of equal ones the
                first.

        Raises:
            ConfigError: a file is missing or not as described, or the sparsity is not in [0, 1].
        """
        if not 0 <= sparsity <= 1:
            raise ConfigError(f"sparsity: expected 0 to 1, got {sparsity}")
        folder = Path(folder)
        try:
            weights = np.loadtxt(
                folder / "full_attention_heads.tsv", delimiter="\t", ndmin=2, dtype=float
            )
            config = json.loads((folder / "config.json").read_text("utf-8"))
            seen = Visible(int(config["recent_size"]), int(config["sink_size"]))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"DuoAttention pattern {folder}: {error!r}") from error
        order = np.argsort(weights.clip(0, 1), axis=None, kind="stable")
        streams = np.zeros(weights.size, dtype=np.bool_)
        streams[order[: round(sparsity * weights.size)]] = True
        rows = streams.reshape(weights.shape).tolist()
        return cls(tuple(tuple(seen if each else FULL for each in row) for row in rows))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the policy of a JSON file that ``save`` wrote.

        Raises:
            ConfigError: the file cannot be read, or is none.
        """
        try:
            content = json.loads(Path(path).read_text("utf-8"))
            if content["version"] != VERSION:
                raise ConfigError(
                    f"head policy {path}: expected version {VERSION}, got {content['version']}"
                )
            return cls(tuple(tuple(Visible(*seen) for seen in row) for row in content["heads"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"head policy {path}: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write the policy as JSON: ``heads`` is ``[layers][kv_heads]`` of ``[window, sink]``."""
        rows = [json.dumps([list(seen) for seen in layer]) for layer in self.heads]
        body = ",\n  ".join(rows)
        text = f'{{\n "version": {VERSION},\n "heads": [\n  {body}\n ]\n}}\n'
        Path(path).write_text(text, encoding="utf-8")

    def within(self, layer_windows: Sequence[int]) -> HeadPolicy:
        """Return the policy for a model whose layers have windows of their own, -1 = none.

        Full heads see what their layer sees.

        Raises:
            ConfigError: another number of layers, or streaming heads in a layer with a window.
        """
        if len(layer_windows) != self.num_layers:
            raise ConfigError(
                f"head_policy: expected {len(layer_windows)} layers, as the model has, got "
                f"{self.num_layers}"
            )
        layers = []
        for index, (window, layer) in enumerate(zip(layer_windows, self.heads, strict=True)):
            if window >= 0 and not all(seen.is_full for seen in layer):
                raise ConfigError(
                    f"head_policy: expected full heads in layer {index}, which has a window of "
                    f"its own ({window}), got {list(layer)}"
                )
            layers.append(tuple(Visible(window) if seen.is_full else seen for seen in layer))
        return HeadPolicy(tuple(layers))

    # --- what it says ---------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.heads)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of each layer."""
        return len(self.heads[0])

    @property
    def groups(self) -> tuple[Visible, ...]:
        """What heads see, each once: the full ones first, then as they come up."""
        seen = dict.fromkeys(each for layer in self.heads for each in layer)
        return tuple(sorted(seen, key=lambda each: not each.is_full))

    @property
    def full_share(self) -> float:
        """Share of the heads that see everything."""
        full = sum(each.is_full for layer in self.heads for each in layer)
        return full / (self.num_layers * self.num_kv_heads)

    def slice(self, rank: int, size: int) -> HeadPolicy:
        """Return the policy of one of ``size`` tensor-parallel ranks, by global head index.

        Heads are dealt out in order; where there are fewer than ranks, each has several ranks.

        Raises:
            ConfigError: heads and ranks do not divide each other, or there is no such rank.
        """
        heads = self.num_kv_heads
        if not 0 <= rank < size:
            raise ConfigError(f"rank: expected 0 to {size - 1}, got {rank}")
        if max(heads, size) % min(heads, size):
            raise ConfigError(
                f"tensor parallelism: expected {heads} KV heads and ranks to divide each other, "
                f"got {size} ranks"
            )
        own = max(heads // size, 1)
        first = rank * heads // size
        return HeadPolicy(tuple(layer[first : first + own] for layer in self.heads))

    def roles(self, layer: int) -> tuple[HeadRole, ...]:
        """Return a layer's heads as kernels take them, in one group and without rings."""
        return tuple(HeadRole(window=seen.window, sink=seen.sink) for seen in self.heads[layer])

    def num_tokens_held(self, num_tokens: int) -> int:
        """Return how many (token, head) pairs of a context are visible to its next token.

        Summed over layers and heads; times the bytes of a token and head, what a request's keys
        and values must take at least.
        """
        total = 0
        for layer in self.heads:
            for seen in layer:
                held = num_tokens if seen.is_full else seen.sink + seen.window - 1
                total += min(held, num_tokens)
        return total
