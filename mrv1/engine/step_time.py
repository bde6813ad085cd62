"""How long a step takes: a model of bytes and operations, calibrated on the device at start."""

from __future__ import annotations

import logging
import math
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from mrv1.errors import ConfigError
from mrv1.models.weights import checkpoint_tensors
from mrv1.runner import ModelRunner, SlotRequest, StepPlan
from mrv1.runner.step import Int64Array
from mrv1.sampler import SamplingParams

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float64]
Tokens = Any
"""A number of tokens, or for several rows an array of them."""
Row = tuple[int, int]
"""A row of a step: tokens computed before it, and tokens computed after it."""

NO_LIMIT = 1 << 31
"""Keys that a query of a full head may see: more than a context can have."""

MOST_ERROR = 0.5
"""Largest error of a calibration that is used: predicted over measured time, minus one, as root
of the mean square."""

REPEATS = 3
"""Times that each step of the calibration runs; the shortest time counts."""

LEAST_MODEL_LEN = 64
"""Least ``max_model_len`` with which contexts differ enough for a calibration."""

MOST_ROWS, MOST_CONTEXT, MOST_CHUNK, FARTHEST = 64, 2048, 2048, 8192
"""Limits of the calibration's steps: rows, their context, tokens of a chunk, tokens before it."""


class StepLoad(NamedTuple):
    """What a step reads and computes, besides the weights."""

    num_rows: int = 0
    num_tokens: int = 0
    kv_bytes: int = 0
    """Bytes of the keys and values that rows see; those of a chunk count once."""
    attention_flops: int = 0

    def plus(self, other: StepLoad) -> StepLoad:
        """Return the load of both together."""
        return StepLoad(*map(operator.add, self, other))


class HeadKind(NamedTuple):
    """KV heads of all layers that see equally many keys."""

    limit: int
    """Most keys that a query sees."""
    key_bytes: int
    """Bytes of a token's key and value, and of their scales, over these heads."""
    pair_flops: int
    """Operations for a query token and a key, over the query heads of these heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The bytes and operations of a model's steps."""

    weight_bytes: int
    """Weights that every step reads once: all but an embedding that is not also the head."""
    token_flops: int
    """Operations of a token in the layers' products. Those of the head belong to a row's cost."""
    heads: tuple[HeadKind, ...]

    @classmethod
    def of(cls, runner: ModelRunner) -> Self:
        """Return the bytes and operations of a runner's steps."""
        model, spec = runner.model, runner.spec
        tensors = checkpoint_tensors(model.config, model.weights)
        embedding = tensors.pop("model.embed_tokens.weight")
        layers = [each for name, each in tensors.items() if name.startswith("model.layers.")]
        weight_bytes = sum(each.nbytes for each in tensors.values())
        if model.config.tie_word_embeddings:
            weight_bytes += embedding.nbytes
        reads_all = runner.head_groups.visits_masked
        limits = Counter(
            NO_LIMIT if seen.is_full or reads_all else seen.window + seen.sink
            for layer in runner.head_policy.heads
            for seen in layer
        )
        queries = model.config.num_q_heads // spec.num_kv_heads
        return cls(
            weight_bytes=weight_bytes,
            token_flops=2 * sum(each.numel() for each in layers if each.ndim == 2),
            heads=tuple(
                HeadKind(
                    limit=limit,
                    key_bytes=2 * count * spec.page_bytes // spec.block_size,
                    pair_flops=4 * count * queries * spec.head_dim,
                )
                for limit, count in limits.items()
            ),
        )

    def of_row(self, start: int, end: int) -> StepLoad:
        """Return the load of a row that computes the tokens ``[start, end)`` of a request."""
        return StepLoad(1, end - start, *self._attention(start, end, min))

    def of_rows(self, starts: Int64Array, ends: Int64Array) -> StepLoad:
        """Return the load of rows, ``[rows]`` each, as ``of_row`` returns that of one."""
        kv_bytes, flops = self._attention(starts, ends, np.minimum)
        return StepLoad(
            len(ends), int((ends - starts).sum()), int(kv_bytes.sum()), int(flops.sum())
        )

    def _attention(
        self, starts: Tokens, ends: Tokens, least: Callable[[Tokens, int], Tokens]
    ) -> tuple[Tokens, Tokens]:
        """Return bytes and operations of rows; ``least`` is the minimum for their type."""
        kv_bytes = flops = 0
        for limit, key_bytes, pair_flops in self.heads:
            before, seen = least(starts, limit), least(ends, limit)
            # The query at position p sees min(p + 1, limit) keys.
            pairs = (seen * (seen + 1) - before * (before + 1)) // 2
            pairs += (ends - seen - starts + before) * limit
            kv_bytes = kv_bytes + key_bytes * seen
            flops = flops + pair_flops * pairs
        return kv_bytes, flops


class StepCosts(NamedTuple):
    """Seconds of each part of a step."""

    step: float
    row: float
    byte: float
    product_flop: float
    attention_flop: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicts the time of a step.

    The layers' products take the time of their operations or of reading the weights, whichever is
    longer. The times of everything else add up.
    """

    work: StepWork
    costs: StepCosts

    def seconds(self, load: StepLoad) -> float:
        """Return the predicted time of a step."""
        work, costs = self.work, self.costs
        return (
            costs.step
            + costs.row * load.num_rows
            + max(
                costs.byte * work.weight_bytes,
                costs.product_flop * work.token_flops * load.num_tokens,
            )
            + costs.byte * load.kv_bytes
            + costs.attention_flop * load.attention_flops
        )

    def error(self, loads: Sequence[StepLoad], seconds: Sequence[float]) -> float:
        """Return the relative error of predictions: the root of its mean square."""
        squares = [
            (self.seconds(load) / each - 1) ** 2 for load, each in zip(loads, seconds, strict=True)
        ]
        return math.sqrt(sum(squares) / len(squares))

    def describe(self) -> str:
        """Return the costs in one line."""
        costs = self.costs

        def rate(cost: float, unit: str) -> str:
            return f"{1e-12 / cost:.3g} {unit}/s" if cost else f"no time for {unit}"

        return (
            f"{costs.step * 1e3:.3g} ms a step, {costs.row * 1e6:.3g} us a row, "
            f"{rate(costs.byte, 'TB')}, {rate(costs.product_flop, 'TFLOP')} in products, "
            f"{rate(costs.attention_flop, 'TFLOP')} in attention"
        )


def fit(work: StepWork, loads: Sequence[StepLoad], seconds: Sequence[float]) -> StepTime:
    """Return the model with the least relative error in measured steps; no cost is negative.

    Which steps read weights for longer than they multiply is found by trying: those of at most
    some number of tokens do.
    """
    rows, tokens, kv_bytes, flops = np.array(loads, dtype=np.float64).T
    measured = np.array(seconds)
    models = []
    for most_tokens in (0, *sorted({load.num_tokens for load in loads})):
        reads = tokens <= most_tokens
        columns = (
            np.ones_like(rows),
            rows,
            kv_bytes + work.weight_bytes * reads,
            work.token_flops * tokens * ~reads,
            flops,
        )
        models.append(StepTime(work, StepCosts(*_least_squares(columns, measured))))
    return min(models, key=lambda model: model.error(loads, seconds))


def _least_squares(columns: Sequence[FloatArray], measured: FloatArray) -> list[float]:
    """Return a factor >= 0 for each column, with the least relative error of their sum."""
    matrix = np.stack(columns, axis=1) / measured[:, None]
    sizes = np.linalg.norm(matrix, axis=0)
    used = [column for column, size in enumerate(sizes) if size]
    factors = np.zeros(len(sizes))
    while used:
        found = np.linalg.lstsq(matrix[:, used] / sizes[used], np.ones(len(matrix)))[0]
        if found.min() >= 0:
            factors[used] = found / sizes[used]
            break
        del used[int(found.argmin())]
    return factors.tolist()


# --- chunks that fit -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepTarget:
    """The time that a step with decodes shall take at most."""

    time: StepTime
    seconds: float


class StepRoom:
    """The time that a step with decodes has left for chunks of prompts.

    Args:
        target: the time that the step shall take at most.
        starts: ``[rows]``, for each row of one token the tokens computed before the step.
    """

    def __init__(self, target: StepTarget, starts: Int64Array) -> None:
        self._time, self._seconds = target.time, target.seconds
        self.load = self._time.work.of_rows(starts, starts + 1)
        """Load of the rows that the step has so far."""
        self._has_chunk = False

    @property
    def is_full(self) -> bool:
        """Whether not even a chunk of one token fits."""
        return self._has_chunk and not self._fits(0, 1)

    def fit(self, start: int, count: int, least: int) -> int:
        """Return how many of the ``count`` tokens after ``start`` the next chunk may have.

        The first chunk of the step has at least ``least`` tokens, whatever their time, so that
        the oldest prompt always makes progress.
        """
        if self._fits(start, count):
            return count
        fitting = bisect_right(range(1, count), 0, key=lambda n: not self._fits(start, n))
        return fitting if self._has_chunk else max(fitting, min(least, count))

    def take(self, start: int, count: int) -> None:
        """Add a chunk to the step."""
        self.load = self.load.plus(self._time.work.of_row(start, start + count))
        self._has_chunk = True

    def _fits(self, start: int, count: int) -> bool:
        load = self.load.plus(self._time.work.of_row(start, start + count))
        return self._time.seconds(load) <= self._seconds


class TokenRoom:
    """The prompt tokens that a step with decodes may still have; used as ``StepRoom`` is.

    Args:
        num_tokens: most tokens of all chunks together.
    """

    def __init__(self, num_tokens: int) -> None:
        self.load = num_tokens
        """Tokens that are left; below 0 if the first chunk had to have more."""
        self._has_chunk = False

    @property
    def is_full(self) -> bool:
        """Whether not even a chunk of one token fits."""
        return self._has_chunk and self.load <= 0

    def fit(self, start: int, count: int, least: int) -> int:
        """Return how many of the ``count`` tokens after ``start`` the next chunk may have.

        The first chunk of the step has at least ``least`` tokens.
        """
        del start
        fitting = min(count, max(self.load, 0))
        return fitting if self._has_chunk else max(fitting, min(least, count))

    def take(self, start: int, count: int) -> None:
        """Add a chunk to the step."""
        del start
        self.load -= count
        self._has_chunk = True


# --- calibration ---------------------------------------------------------------------------------


def calibrate(runner: ModelRunner) -> StepTime:
    """Return the model of a runner's steps: measure a few, before the first request.

    Raises:
        ConfigError: contexts are too short, or bytes and operations do not explain the times.
    """
    if runner.max_model_len < LEAST_MODEL_LEN:
        raise ConfigError(
            f"target_inter_token_ms: expected max_model_len >= {LEAST_MODEL_LEN}, for the "
            f"calibration, got {runner.max_model_len}"
        )
    work, steps = StepWork.of(runner), calibration_steps(runner)
    seconds = [math.inf] * len(steps)
    for repeat in range(REPEATS):
        times = iter(runner.time_steps(_plans(runner, steps, epoch=repeat * len(steps))))
        for index in range(len(steps)):
            next(times)  # of the step in which the requests enter
            seconds[index] = min(seconds[index], next(times))
    loads = [work.of_rows(*np.array(rows, dtype=np.int64).T) for rows in steps]
    model = fit(work, loads, seconds)
    error = model.error(loads, seconds)
    logger.info("step time: %s; error %.0f%%", model.describe(), error * 100)
    if error > MOST_ERROR:
        raise ConfigError(
            "target_inter_token_ms: expected steps whose time follows from bytes and operations "
            f"within {MOST_ERROR:.0%}, got an error of {error:.0%} in the calibration"
        )
    return model


def calibration_steps(runner: ModelRunner) -> list[list[Row]]:
    """Return the rows of the steps to measure, which differ in each part of a step's time."""
    config, longest = runner.config, runner.max_model_len - 1
    budget = config.max_num_batched_tokens
    num_rows = max(min(config.max_num_seqs, budget // 2, MOST_ROWS), 1)
    near, far = 16, min(longest - 1, MOST_CONTEXT)
    most = max(min(budget - num_rows, longest - near, MOST_CHUNK), 1)

    def decodes(count: int, context: int) -> list[Row]:
        return [(context, context + 1)] * count

    def chunk(start: int, count: int) -> list[Row]:
        return [(start, start + count)]

    steps = [
        decodes(1, near),
        decodes(num_rows, near),
        decodes(-(-num_rows // 2), far),
        decodes(num_rows, far),
        chunk(near, -(-most // 16)),
        chunk(near, -(-most // 4)),
        chunk(near, most),
        chunk(min(longest - most, FARTHEST), most),
    ]
    if min(config.max_num_seqs, budget) > 1:
        steps.append([*decodes(-(-num_rows // 2), far), *chunk(near, -(-most // 4))])
    return steps


def _plans(runner: ModelRunner, steps: Sequence[Sequence[Row]], epoch: int) -> Iterator[StepPlan]:
    """Yield two plans for each step: its requests enter and compute a token, then it runs.

    What comes before that token is in the cache by the plan's word only: nobody reads the result.
    """
    size, groups = runner.config.block_size, runner.head_groups.groups
    for index, rows in enumerate(steps):
        entering, blocks = [], {}
        first_block = 0
        for slot, (start, end) in enumerate(rows):
            entering.append(
                SlotRequest(
                    req_id=str(slot),
                    slot=slot,
                    epoch=epoch + index,
                    token_ids=np.zeros(end, dtype=np.int32),
                    prompt_len=end,
                    sampling_params=SamplingParams(),
                    seed=0,
                    num_computed_tokens=start - 1,
                    max_total_tokens=end + 1,
                )
            )
            num_blocks = -(-end // size)
            per_group = []
            for group, pool in zip(groups, runner.kv_cache.num_blocks, strict=True):
                ids = [(first_block + block) % pool for block in range(num_blocks)]
                for block in group.keeps.freed_blocks(start - 1, size):
                    ids[block] = -1
                per_group.append(tuple(ids))
            blocks[slot] = tuple(per_group)
            first_block += num_blocks
        slots = np.arange(len(rows), dtype=np.int32)
        for is_measured in (False, True):
            counts = [end - start if is_measured else 1 for start, end in rows]
            yield StepPlan(
                step_id=2 * (epoch + index) + is_measured,
                new=() if is_measured else tuple(entering),
                req_ids=tuple([request.req_id for request in entering]),
                slots=slots,
                epochs=np.full(len(rows), epoch + index, dtype=np.int32),
                num_scheduled_tokens=np.array(counts, dtype=np.int32),
                new_block_ids={} if is_measured else blocks,
            )
