"""Head policies: which tokens each KV head of each layer sees, and the forms a policy comes in.

Sources: FastDeploy's pull request 7718 for the ratio and its rounding; DuoAttention
(arXiv:2410.10819) for pattern files; Alibaba's RTP-LLM (``cuda_headwise_impl/headwise.py``) for
RTPurbo's field.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from mrv1.environment import INT32_MAX
from mrv1.errors import ConfigError
from mrv1.kernels.cache.kv_layout import HeadRole
from mrv1.options import Range, integers

logger = logging.getLogger(__name__)

VERSION = 1  # version of the JSON form
KEYS = ("version", "heads")  # keys of the JSON form, an object that holds lists
DUO_ATTENTION_TABLE = "full_attention_heads.tsv"  # weights; sizes are in ``config.json``
FIELDS = FASTDEPLOY_FIELD, RTPURBO_FIELD = "head_wise_swa_ratio", "headwise_config"
"""The fields of ``config.json`` that say that a checkpoint has a policy."""
RTPURBO_SIZES = {"sink_token_num": 4, "swa_token_num": 8192, "seqlen_threshold": 16_384}
"""Sizes in ``headwise_config``, with the values that RTP-LLM takes where one is missing."""


class Visible(NamedTuple):
    """The part of a context that a KV head sees: a window and a sink."""

    window: int = -1
    """Tokens up to and including the current one, 1 to 2^31 - 1; -1 = all."""
    sink: int = 0
    """Leading tokens that stay visible in addition to the window, 0 to 2^31 - 1."""

    @property
    def is_full(self) -> bool:
        """Whether the head sees everything."""
        return self.window < 0

    def sink_blocks(self, block_size: int) -> int:
        """Return the number of leading blocks that the head always sees."""
        return -(-self.sink // block_size)

    def num_blocks(self, block_size: int, query_len: int = 1) -> int:
        """Return the most blocks that a streaming head needs; a ValueError if the head is full.

        They hold ``query_len`` tokens, the most of a step, and the window of the first.
        """
        if self.is_full:
            raise ValueError("num_blocks: expected a streaming head, got a full one")
        live = -(-(self.window + query_len - 2) // block_size) + 1
        return self.sink_blocks(block_size) + live

    def first_live(
        self, num_tokens: npt.NDArray[np.int64] | int, block_size: int
    ) -> npt.NDArray[np.int64]:
        """Return the first logical block after the sink that the token at ``num_tokens`` sees."""
        oldest = (num_tokens - (self.window - 1)) // block_size
        return np.maximum(oldest, self.sink_blocks(block_size))

    def freed_blocks(self, num_tokens: int, block_size: int) -> range:
        """Return the logical blocks that the head no longer sees after ``num_tokens`` tokens."""
        first = self.sink_blocks(block_size)
        end = first if self.is_full else int(self.first_live(num_tokens, block_size))
        return range(first, end)


FULL = Visible()  # a full head sees all tokens


def _expect(is_right: bool, name: str, expected: str, got: object) -> None:
    """Raise a ``ConfigError`` unless ``is_right``; 500 characters of ``got`` are shown."""
    if not is_right:
        raise ConfigError(f"{name}: expected {expected}, got {got!r:.500}")


@cache
def _count(least: int) -> Range:
    """Return the range of the integers from ``least`` on that fit int32."""
    return integers(least, INT32_MAX)


def is_share(value: object) -> bool:
    """Return whether ``value`` is a real number from 0 to 1 (a bool and NaN are not)."""
    return not isinstance(value, bool) and isinstance(value, Real) and value <= 1 and not value < 0


_SHARE = Range("a number from 0 to 1", is_share)
_FLAG = integers(0, 1)


def _check(name: str, value: object, within: Range) -> None:
    """Raise a ``ConfigError`` unless a value is in a range."""
    _expect(within.holds(value), name, within.expected, value)


def _is_visible(seen: object) -> bool:
    """Return whether ``seen`` is a ``Visible`` with a valid window and sink."""
    if not isinstance(seen, Visible):
        return False
    are_counts = _count(-1).holds(seen.window) and _count(0).holds(seen.sink)
    return are_counts and (seen.window > 0 or seen == FULL)


def check_streaming(seen: object) -> None:
    """Raise unless ``seen`` is what a streaming head sees: full ones would free nothing."""
    is_streaming = _is_visible(seen) and seen != FULL
    _expect(is_streaming, "streaming", "a Visible with window >= 1 and sink >= 0", seen)


def _rtpurbo_query_heads(config: Mapping[str, Any], num_layers: int, num_kv_heads: int) -> int:
    """Return the query heads of a layer; ConfigError: the checkpoint is for another model."""
    text: Any = config if "num_attention_heads" in config else config.get("text_config")
    if not isinstance(text, Mapping):
        text = {}
    for name, expected in (
        ("num_hidden_layers", num_layers),
        ("num_key_value_heads", num_kv_heads),
    ):
        got = text.get(name)
        _expect(got in (None, expected), name, f"{expected}, as the model has", got)
    number = text.get("num_attention_heads")
    is_multiple = _count(1).holds(number) and number % num_kv_heads == 0
    of_heads = f"a multiple of {num_kv_heads} KV heads beside {RTPURBO_FIELD}"
    _expect(is_multiple, "num_attention_heads", of_heads, number)
    return int(number)


def _check_rtpurbo(fields: Any, num_layers: int, num_q_heads: int) -> None:  # noqa: ANN401
    """Raise unless ``fields`` is the ``headwise_config`` of a model with so many query heads."""
    _expect(isinstance(fields, Mapping), RTPURBO_FIELD, "an object", fields)
    layers = [f"{layer}" for layer in range(num_layers)]
    unknown = [key for key in fields if key not in layers and key not in RTPURBO_SIZES]
    known = f"no keys but 0 to {num_layers - 1}, for the layers, and {[*RTPURBO_SIZES]}"
    _expect(not unknown, RTPURBO_FIELD, known, unknown)
    for name, default in RTPURBO_SIZES.items():
        size = fields.get(name, default)
        within = integers(0, INT32_MAX - 1)  # a window has one token more
        _check(f"{RTPURBO_FIELD}, {name}", size, within)
    for layer in layers:
        heads = fields.get(layer)
        is_list = isinstance(heads, list | tuple) and len(heads) == num_q_heads
        is_list = is_list and all(map(_FLAG.holds, heads))
        expected = f"a 0 or 1 for each of {num_q_heads} query heads"
        _expect(is_list, f"{RTPURBO_FIELD}, layer {layer}", expected, heads)


def _check_heads(name: str, heads: Any) -> None:  # noqa: ANN401 - it may be anything
    """Raise unless ``heads`` is ``[layers][kv_heads]`` of valid ``Visible``."""
    is_table = isinstance(heads, tuple) and all(isinstance(layer, tuple) for layer in heads)
    _expect(is_table, name, "a tuple of layers, each a tuple of KV heads", heads)
    widths = {len(layer) for layer in heads}
    is_even = len(widths) == 1 and widths != {0}
    _expect(is_even, name, "one number of KV heads >= 1 in all layers", sorted(widths))
    for layer, row in enumerate(heads):
        for head, seen in enumerate(row):
            _expect(
                _is_visible(seen),
                f"{name}, layer {layer}, head {head}",
                f"a Visible ([window, sink] in JSON) of integers, window 1 to {INT32_MAX} and "
                f"sink 0 to {INT32_MAX}, or -1 and 0 for all",
                tuple(seen) if isinstance(seen, Visible) else seen,
            )


@dataclass(frozen=True, slots=True)
class HeadPolicy:
    """Which tokens each KV head sees: all that kernels, tables, memory and reports know of it.

    Attributes:
        heads: ``[layers][kv_heads]``.

    Raises:
        ConfigError: ``heads`` is not a tuple of tuples, there is no layer or head, layers differ
            in their number of heads, or a window or a sink is not an integer in its range.
    """

    heads: tuple[tuple[Visible, ...], ...]

    def __post_init__(self) -> None:
        _check_heads("head policy", self.heads)

    # --- sources --------------------------------------------------------------------------

    @classmethod
    def full(cls, num_layers: int, num_kv_heads: int) -> Self:
        """Return the policy in which every head is full."""
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
            num_layers: layers of the model.
            num_kv_heads: KV heads of each layer, all ranks together.
            streaming_ratio: share of the heads that stream, in [0, 1], rounded to a number of
                heads (half to even); at least one, unless it is 0. The leading heads stream.
            window: tokens that streaming heads see, with the current token, 1 to 2^31 - 1.
            sink: leading tokens that streaming heads see too, 0 to 2^31 - 1.
            full_layers_every: at least 2; layers i, counted from 0, with
                (i + 1) % full_layers_every == 0 have only full heads; None = no such layer.

        Raises:
            ConfigError: an argument has a wrong type or is out of its range.
        """
        _check("num_layers", num_layers, _count(1))
        _check("num_kv_heads", num_kv_heads, _count(1))
        _check("streaming_ratio", streaming_ratio, _SHARE)
        _check("window", window, _count(1))
        _check("sink", sink, _count(0))
        _expect(
            full_layers_every is None or _count(2).holds(full_layers_every),
            "full_layers_every",
            f"None or an integer from 2 to {INT32_MAX}",
            full_layers_every,
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
        """Return the policy in a checkpoint's ``config.json``; None = there is no policy in it.

        FastDeploy's fields: ``head_wise_swa_ratio``, the share of streaming heads (0: all are
        full, whatever the others say); ``window_size`` and ``sink_size``, the tokens that they
        see; and ``window_attn_skip_freq``, the period of full layers, or a list of 0 (full) or 1
        for each layer. A period of 1, the default of FastDeploy's proposal (community pull request
        1364), means that no layer is full: its append attention gives every layer the window.

        RTPurbo's field is ``headwise_config``, see ``of_rtpurbo``. Fields that only
        ``text_config`` has count, too.

        Raises:
            ConfigError: a field is missing, has a wrong type or is out of its range, or both forms
                are there.
        """
        text = config.get("text_config")
        if isinstance(text, Mapping) and config.keys().isdisjoint(FIELDS):
            config = {**config, **text}
        ratio, rtpurbo = config.get(FASTDEPLOY_FIELD), config.get(RTPURBO_FIELD)
        if rtpurbo is not None:
            _expect(ratio is None, RTPURBO_FIELD, f"no {FASTDEPLOY_FIELD} beside it", ratio)
            return cls.of_rtpurbo(config, num_layers, num_kv_heads)
        if ratio is None:
            return None
        _check(FASTDEPLOY_FIELD, ratio, _SHARE)
        if ratio == 0:
            return cls.full(num_layers, num_kv_heads)
        window: Any = config.get("window_size")
        sink: Any = 0 if config.get("sink_size") is None else config["sink_size"]
        every: Any = config.get("window_attn_skip_freq")
        _check("window_size", window, _count(1))
        _check("sink_size", sink, _count(0))
        is_listed = (
            isinstance(every, list | tuple)
            and len(every) == num_layers
            and all(map(_FLAG.holds, every))
        )
        _expect(
            every is None or _count(1).holds(every) or is_listed,
            "window_attn_skip_freq",
            f"an integer from 1 to {INT32_MAX}, or a 0 or 1 for each of {num_layers} layers",
            every,
        )
        policy = cls.of_ratio(
            num_layers,
            num_kv_heads,
            ratio,
            window=window,
            sink=sink,
            full_layers_every=None if is_listed or every == 1 else every,
        )
        if not is_listed:
            return policy
        only_full = (FULL,) * num_kv_heads
        return cls(
            tuple(
                layer if streams else only_full
                for layer, streams in zip(policy.heads, every, strict=True)
            )
        )

    @classmethod
    def of_rtpurbo(cls, config: Mapping[str, Any], num_layers: int, num_kv_heads: int) -> Self:
        """Return the policy of an RTPurbo checkpoint, whose ``headwise_config`` RTP-LLM reads.

        For each layer, by its number, it has a list with a 1 (retrieval) or 0 for each query head;
        a KV head is full if any of its query heads is. The others see the current token,
        ``swa_token_num`` before it and the first ``sink_token_num``. RTP-LLM leaves all heads full
        in prompts below ``seqlen_threshold`` tokens, and in decodes of any length. Here heads
        stream throughout; a warning says so where the threshold is more than the window.
        ``config`` is a ``config.json``, with ``num_attention_heads`` beside the field.

        Raises:
            ConfigError: a list or a size is wrong, a key is unknown, or the checkpoint has other
                numbers of layers or heads.
        """
        num_q_heads = _rtpurbo_query_heads(config, num_layers, num_kv_heads)
        fields: Any = config[RTPURBO_FIELD]
        _check_rtpurbo(fields, num_layers, num_q_heads)
        sizes = {name: fields.get(name, default) for name, default in RTPURBO_SIZES.items()}
        seen = Visible(sizes["swa_token_num"] + 1, sizes["sink_token_num"])
        group = num_q_heads // num_kv_heads
        policy = cls(
            tuple(
                tuple(
                    FULL if any(fields[f"{layer}"][first : first + group]) else seen
                    for first in range(0, num_q_heads, group)
                )
                for layer in range(num_layers)
            )
        )
        if sizes["seqlen_threshold"] > seen.window and seen in policy.groups:
            logger.warning(
                "%s: seqlen_threshold=%d is not followed: in shorter contexts, too, heads that "
                "stream see %d tokens and a sink of %d",
                RTPURBO_FIELD, sizes["seqlen_threshold"], *seen,
            )  # fmt: skip
        return policy

    @classmethod
    def of_duo_attention(cls, folder: str | Path, *, sparsity: float = 0.5) -> Self:
        """Return the policy of a pattern that DuoAttention has trained.

        Args:
            folder: holds ``full_attention_heads.tsv``, ``[layers, kv_heads]`` finite weights, and
                ``config.json`` with the integers ``sink_size`` and ``recent_size``, 1 or more;
                its other fields are about the training, and are not read.
            sparsity: share of heads that stream: the heads with the least weights; of heads with
                equal weights the first.

        Raises:
            ConfigError: a file is missing or not as described, or the sparsity is not in [0, 1].
        """
        _check("sparsity", sparsity, _SHARE)
        folder = Path(folder)
        table, sizes = folder / DUO_ATTENTION_TABLE, folder / "config.json"
        try:
            weights = np.loadtxt(table, delimiter="\t", ndmin=2, dtype=float)
            config = json.loads(sizes.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"DuoAttention pattern {folder}: expected readable files, got {error}"
            ) from error
        finite = np.isfinite(weights)
        _expect(
            weights.size > 0 and bool(finite.all()),
            str(table),
            "[layers, kv_heads] finite weights",
            weights[~finite].tolist(),
        )
        is_object = isinstance(config, dict)
        _expect(is_object, str(sizes), "an object with sink_size and recent_size", config)
        seen = Visible(config.get("recent_size"), config.get("sink_size"))
        _check(f"{sizes}, recent_size", seen.window, _count(1))
        _check(f"{sizes}, sink_size", seen.sink, _count(0))
        order = np.argsort(weights.clip(0, 1), axis=None, kind="stable")
        streams = np.zeros(weights.size, dtype=np.bool_)
        streams[order[: round(sparsity * weights.size)]] = True
        rows = streams.reshape(weights.shape).tolist()
        return cls(tuple(tuple(seen if each else FULL for each in row) for row in rows))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the policy of a JSON file that ``save`` wrote.

        Raises:
            ConfigError: the file cannot be read, is not a policy, or has keys that ``save`` does
                not write.
        """
        name = f"head policy {path}"
        try:
            content = json.loads(Path(path).read_text("utf-8"))
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(f"{name}: expected a readable JSON file, got {error}") from error
        is_ranking = isinstance(content, dict) and not {"ranking", "num_kv_heads"}.isdisjoint(
            content
        )
        budgeted = "a policy; of a ranking take ranking=FILE,budget=0.5"
        _expect(not is_ranking, name, budgeted, "a ranking")
        is_ours = isinstance(content, dict) and content.get("version") == VERSION
        _expect(is_ours, name, f"an object of version {VERSION}", content)
        unknown = [key for key in content if key not in KEYS]
        _expect(not unknown, name, f"no keys but {list(KEYS)}", unknown)
        rows = content.get("heads")
        is_table = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
        _expect(is_table, f"{name}, heads", "[layers][kv_heads] of [window, sink]", rows)
        heads = tuple(
            tuple(
                Visible(*seen) if isinstance(seen, list) and len(seen) == 2 else seen
                for seen in row
            )
            for row in rows
        )
        _check_heads(name, heads)  # here, so that an error names the file
        return cls(heads)

    def save(self, path: str | Path) -> None:
        """Write the policy as JSON: ``heads`` is ``[layers][kv_heads]`` of ``[window, sink]``."""
        rows = [json.dumps([list(seen) for seen in layer]) for layer in self.heads]
        body = ",\n  ".join(rows)
        text = f'{{\n "version": {VERSION},\n "heads": [\n  {body}\n ]\n}}\n'
        Path(path).write_text(text, encoding="utf-8")

    def within(self, layer_windows: Sequence[int]) -> HeadPolicy:
        """Return the policy for a model whose layers have windows of their own, -1 = none.

        Full heads get the window of their layer; in a policy that is this one, they have it.

        Raises:
            ConfigError: another number of layers, or a layer with a window has heads with another.
        """
        if len(layer_windows) != self.num_layers:
            raise ConfigError(
                f"head_policy: expected {len(layer_windows)} layers, as the model has, got "
                f"{self.num_layers}"
            )
        layers = []
        for index, (window, layer) in enumerate(zip(layer_windows, self.heads, strict=True)):
            if window >= 0 and not {*layer} <= {FULL, Visible(window)}:
                raise ConfigError(
                    f"head_policy: expected full heads in layer {index}, which has a window of "
                    f"its own ({window}), got {list(layer)}"
                )
            layers.append(tuple(Visible(window) if seen.is_full else seen for seen in layer))
        return HeadPolicy(tuple(layers))

    # --- contents -------------------------------------------------------------------------

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
        """Each pair of window and sink once: full heads first, then in order of appearance."""
        seen = dict.fromkeys(each for layer in self.heads for each in layer)
        return tuple(sorted(seen, key=lambda each: not each.is_full))

    @property
    def full_share(self) -> float:
        """Share of the heads that see everything."""
        full = sum(each.is_full for layer in self.heads for each in layer)
        return full / (self.num_layers * self.num_kv_heads)

    def slice(self, rank: int, size: int) -> HeadPolicy:
        """Return the part of this policy that one of ``size`` tensor-parallel ranks needs.

        Heads are divided in order; with fewer heads than ranks, several ranks have the same head.

        Raises:
            ConfigError: there is no such rank, or neither heads nor ranks are a multiple of the
                other.
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
        """Return a layer's heads in the form that kernels take: in one group and without rings."""
        return tuple(HeadRole(window=seen.window, sink=seen.sink) for seen in self.heads[layer])

    def num_tokens_held(self, num_tokens: int) -> int:
        """Return how many (token, head) pairs the next token sees: the least K and V to keep."""
        total = 0
        for layer in self.heads:
            for seen in layer:
                held = num_tokens if seen.is_full else seen.sink + seen.window - 1
                total += min(held, num_tokens)
        return total

    def cache_share(self, num_tokens: int) -> float:
        """Return ``num_tokens_held`` as a share of all tokens in all heads."""
        all_heads = self.num_layers * self.num_kv_heads
        return self.num_tokens_held(num_tokens) / (num_tokens * all_heads)
