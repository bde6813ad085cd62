"""Log-probabilities of a step, from the logits to numpy arrays, for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from mrv1.kernels.registry import Ops
from mrv1.runner.logits import LogitsRows
from mrv1.runner.rows import DeviceRows
from mrv1.runner.step import Int32Array, SlotRequest, StepPlan, TokenLogprobs
from mrv1.sampler import SamplingParams
from mrv1.sampler.params import num_likeliest

_Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

LOGITS_CHUNK = 256
"""Rows of logits that may exist at the same time, even if fewer requests run."""

FILTER_CHUNK = 16
"""Rows filtered or sorted at the same time, at up to ``FILTER_BYTES`` per logit."""

FILTER_BYTES = 128
"""Bytes of device memory, including the scratch memory that a sort may need."""

MAX_STORED = 32
"""Most of the likeliest tokens that a row gets in a CUDA graph."""

MAX_SEARCHED = 1024
"""Most likeliest tokens, or tokens by id, that a row gets from ``top_logprobs``, whose time grows
with their number; for more, such as the whole vocabulary, the row is sorted."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The log-probabilities that one row of a plan asks for."""

    row: int
    """Row of the plan."""
    num_top: int
    token_ids: tuple[int, ...] = ()
    """Tokens asked for by id."""
    edits: bool = False
    """Whether the row's logits are edited before a token is drawn."""
    device_row: int = 0

    @property
    def is_sorted(self) -> bool:
        """Whether the row is sorted."""
        return max(self.num_top, len(self.token_ids)) > MAX_SEARCHED


class WantedRows(list[Wanted]):
    """The rows of a step that ask, with what steps of the same rows would compute again."""

    @cached_property
    def num_top(self) -> int:
        """Most of the likeliest tokens that a row asks for."""
        return max((each.num_top for each in self), default=0)

    @cached_property
    def has_token_ids(self) -> bool:
        """Whether a row asks for tokens by id."""
        return any(each.token_ids for each in self)

    @cached_property
    def edits(self) -> bool:
        """Whether the logits of a row are edited before a token is drawn."""
        return any(each.edits for each in self)

    @cached_property
    def by_num_top(self) -> list[tuple[int, list[int], npt.NDArray[np.int64]]]:
        """For each number of likeliest tokens: who asks for it, by plan row and device row."""
        groups: dict[int, list[Wanted]] = {}
        for each in self:
            groups.setdefault(each.num_top, []).append(each)
        return [
            (num_top, [each.row for each in own], np.array([each.device_row for each in own]))
            for num_top, own in groups.items()
        ]


class PromptPart(NamedTuple):
    """Tokens of a prompt, each followed by a prompt token whose log-probability is reported."""

    wanted: Wanted
    tokens: slice
    """Their places among the tokens of the step."""
    slot: int
    following: slice
    """The places of the tokens that follow, in the slot's history."""


def rows_of(
    wanted: Sequence[Wanted], num_columns: int, device: torch.device
) -> slice | torch.Tensor:
    """Return the rows, ``num_columns`` each, that ``wanted`` needs; a slice if first."""
    rows = [each.device_row for each in wanted]
    if rows == list(range(len(rows))):  # a copy would be a large part of the logits
        return slice(len(rows) * num_columns)
    first = torch.tensor(rows)[:, None] * num_columns
    return (first + torch.arange(num_columns)).flatten().to(device, non_blocking=True)


class LogprobRequests:
    """The log-probabilities that the request in each slot asks for, on the host."""

    def __init__(self, max_num_reqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._params: list[SamplingParams | None] = [None] * max_num_reqs
        self._last: tuple[DeviceRows | None, WantedRows] = None, WantedRows()
        """The rows of the step sampled last, which a steady step has too, and what they ask."""
        self._asks_np = np.zeros(max_num_reqs, dtype=np.bool_)
        self._prompt_end_np = np.zeros(max_num_reqs, dtype=np.int64)
        """Per slot, the leading tokens that are followed by a prompt token to report."""

    def enter(self, request: SlotRequest) -> None:
        """Record which log-probabilities the request that enters a slot asks for."""
        slot, params = request.slot, request.sampling_params
        self._params[slot] = params
        self._asks_np[slot] = params.wants_logprobs
        asks_prompt = params.prompt_logprobs is not None
        self._prompt_end_np[slot] = request.prompt_len - 1 if asks_prompt else 0

    def any(self, slots: Int32Array, num_before: Int32Array) -> bool:
        """Whether a step of these rows reports anything; ``num_before`` as in ``of_prompts``."""
        asks = self._asks_np[slots] | (num_before < self._prompt_end_np[slots])
        return bool(asks.any())

    def of_outputs(self, plan: StepPlan, rows: DeviceRows) -> WantedRows:
        """Return the log-probabilities to report for the tokens of a step, in device order."""
        if rows is self._last[0]:
            return self._last[1]
        found = []
        for row in self._asks_np[plan.slots].nonzero()[0].tolist():
            params = self._params[plan.slots[row]]
            if params is not None:
                num_top = num_likeliest(params.logprobs, self._vocab_size)
                ids, edits = params.logprob_token_ids, params.edits_logits
                found.append(Wanted(row, num_top, ids, edits, rows.place(row)))
        self._last = rows, WantedRows(sorted(found, key=attrgetter("device_row")))
        return self._last[1]

    def of_prompts(
        self, plan: StepPlan, rows: DeviceRows, num_before: Int32Array
    ) -> list[PromptPart]:
        """Return a step's prompt tokens to report; ``num_before [rows]`` were computed before."""
        slots = plan.slots
        counts = np.minimum(self._prompt_end_np[slots] - num_before, plan.num_scheduled_tokens)
        asking = (counts > 0).nonzero()[0].tolist()
        if not asking:
            return []
        found, firsts = [], rows.first_tokens
        for row in asking:
            params, slot, count = self._params[slots[row]], int(slots[row]), int(counts[row])
            first, following = int(firsts[row]), int(num_before[row]) + 1
            if params is not None:
                found.append(
                    PromptPart(
                        Wanted(row, num_likeliest(params.prompt_logprobs, self._vocab_size)),
                        slice(first, first + count),
                        slot,
                        slice(following, following + count),
                    )
                )
        return found


def reports_of(
    wanted: Sequence[Wanted],
    drawn: torch.Tensor,
    logits_of: Callable[[slice | torch.Tensor], LogitsRows],
    ops: Ops,
    *,
    chunk_rows: int,
) -> list[LogprobReport]:
    """Return the log-probabilities of rows that are searched, and of rows that are sorted.

    Arguments as in ``LogprobReport.of``. Sorted rows are in the report of the others too, with few
    values that later reports replace: to leave them out would copy the others' logits.
    """
    to_sort = [index for index, each in enumerate(wanted) if each.is_sorted]
    if not to_sort:
        return [LogprobReport.of(wanted, drawn, logits_of, ops, chunk_rows=chunk_rows)]
    reports = []
    if len(to_sort) < len(wanted):
        few = [Wanted(each.row, 0) if each.is_sorted else each for each in wanted]
        reports.append(LogprobReport.of(few, drawn, logits_of, ops, chunk_rows=chunk_rows))
    num_positions = len(drawn) // len(wanted)
    places = torch.tensor(to_sort)[:, None] * num_positions + torch.arange(num_positions)
    places = places.to(drawn.device, non_blocking=True)
    size = max(FILTER_CHUNK // num_positions, 1)
    for start in range(0, len(to_sort), size):
        part = places[start : start + size].flatten()

        def logits_at(chunk: slice, part: torch.Tensor = part) -> LogitsRows:
            return logits_of(part[chunk])

        reports.append(
            LogprobReport.of(
                [wanted[index] for index in to_sort[start : start + size]],
                drawn[part],
                logits_at,
                ops,
                chunk_rows=FILTER_CHUNK,
            )
        )
    return reports


class LogprobReport:
    """Log-probabilities of some rows of a plan, copied to pinned memory on the current stream.

    Args:
        wanted: the rows that ask, all for the same number of positions.
        num_top: number of likeliest tokens that were computed.
        chunks: consecutive parts of ``[rows that ask * positions]``, on the host: token ids (the
            token at the position, those asked for by id, the likeliest), their log-probabilities
            and their ranks, each ``[any, ids]``; read after the copies.
    """

    def __init__(self, wanted: Sequence[Wanted], num_top: int, chunks: Sequence[_Chunk]) -> None:
        self._wanted, self._num_top, self._chunks = wanted, num_top, chunks

    @classmethod
    def of(
        cls,
        wanted: Sequence[Wanted],
        drawn: torch.Tensor,
        logits_of: Callable[[slice], LogitsRows],
        ops: Ops,
        *,
        chunk_rows: int,
    ) -> Self:
        """Return the log-probabilities, computed with one chunk at a time on the device.

        All of ``wanted`` are sorted, or none; ``drawn [rows that ask * positions]`` int64,
        negative = none; ``logits_of`` returns those of up to ``chunk_rows`` positions.
        """
        asked = _asked_ids(wanted).to(drawn.device, non_blocking=True)
        asked = asked.repeat_interleave(len(drawn) // len(wanted), dim=0)
        by_id = torch.cat([drawn[:, None], asked], dim=1)
        most = max(each.num_top for each in wanted)
        of_chunk = _of_sorted_chunk if wanted[0].is_sorted else partial(_of_chunk, ops)
        parts = [slice(start, start + chunk_rows) for start in range(0, len(drawn), chunk_rows)]
        chunks = [of_chunk(logits_of(part), by_id[part], most) for part in parts]
        return cls(wanted, chunks[0][0].shape[1] - by_id.shape[1], chunks)

    def read(self, num_positions: Sequence[int] | None = None) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities by row of the plan, of all or ``num_positions`` of each."""
        found = {}
        arrays = zip(*self._chunks, strict=True)
        token_ids, logprobs, ranks = (torch.cat(of_chunks).numpy() for of_chunks in arrays)
        all_positions = len(token_ids) // len(self._wanted)
        for index, wanted in enumerate(self._wanted):
            count = all_positions if num_positions is None else num_positions[wanted.row]
            if count <= 0:
                continue
            first = index * all_positions
            rows = slice(first, first + count)
            first_top = token_ids.shape[1] - self._num_top
            columns = [
                0,
                *range(first_top, first_top + min(wanted.num_top, self._num_top)),
                *range(1, 1 + len(wanted.token_ids)),
            ]
            found[wanted.row] = TokenLogprobs(
                token_ids=token_ids[rows, columns],
                logprobs=logprobs[rows, columns],
                ranks=ranks[rows, columns],
            )
        return found


class LogprobRing:
    """Log-probabilities of every row of a captured step, on their way to the host.

    A graph stores them at one place; ``send`` copies them to the step's slot of a pinned ring.
    They have up to ``max_top`` or ``MAX_STORED`` likeliest tokens, in ``dtype`` or float32.
    """

    def __init__(
        self,
        max_rows: int,
        max_top: int,
        num_slots: int,
        device: torch.device,
        *,
        dtype: torch.dtype,
    ) -> None:
        self.num_top = min(max_top, MAX_STORED)
        """Number of the likeliest tokens that a row has room for."""
        real = torch.promote_types(dtype, torch.float32)
        top = self.num_top
        self._parts = (
            (torch.int64, 1), (torch.int64, 1), (torch.int64, top), (real, 1), (real, top),
            (real, top),
        )  # fmt: skip
        self._row_bytes = sum(dtype.itemsize * width for dtype, width in self._parts)
        size = -(-max_rows * self._row_bytes // 8) * 8  # each slot starts at an int64
        self._stored = torch.empty(size, dtype=torch.uint8, device=device)
        on_gpu = device.type == "cuda"
        self._host = torch.empty((num_slots, size), dtype=torch.uint8, pin_memory=on_gpu)

    def store(
        self,
        logits: LogitsRows,
        drawn: torch.Tensor,
        idx_mapping: torch.Tensor,
        num_top: torch.Tensor,
        ops: Ops,
    ) -> None:
        """Store the log-probabilities of every row of ``logits``.

        ``drawn [rows]`` int64, negative = none; ``idx_mapping [rows]`` int32 slots, -1 = padding;
        ``num_top [slots]`` int32, the likeliest tokens that each request asks for.
        """
        asked = drawn[:, None]
        logprobs, ranks, top, top_logprobs = ops.top_logprobs(
            logits.values,
            asked,
            self.num_top,
            idx_mapping=idx_mapping,
            row_num_top=num_top,
            **logits.of_ranks,
        )
        top_logits = logits.of_tokens(top.clamp(min=0))
        tensors = (asked, ranks, top, logprobs, top_logprobs, top_logits)
        parts = [
            tensor.to(dtype).view(torch.uint8).flatten()
            for tensor, (dtype, _) in zip(tensors, self._parts, strict=True)
        ]
        torch.cat(parts, out=self._stored[: len(drawn) * self._row_bytes])

    def has(self, wanted: WantedRows) -> bool:
        """Whether ``store`` stores all that these rows ask for."""
        return not wanted.has_token_ids and wanted.num_top <= self.num_top

    def send(self, slot: int, num_rows: int, wanted: WantedRows) -> StoredLogprobs:
        """Copy what the step of ``num_rows`` (padded) stored for ``wanted`` to its ring slot."""
        size = num_rows * self._row_bytes
        host = self._host[slot, :size].copy_(self._stored[:size], non_blocking=True)
        sizes = [dtype.itemsize * width * num_rows for dtype, width in self._parts]
        parts = [
            part.view(dtype).view(num_rows, width)
            for part, (dtype, width) in zip(host.split(sizes), self._parts, strict=True)
        ]
        return StoredLogprobs(wanted, parts)


class StoredLogprobs:
    """Log-probabilities that a graph has stored for ``wanted``; ``read`` them after the copy.

    ``parts`` are ``[rows, any]``, pinned: drawn token and rank, likeliest tokens,
    log-probabilities of both, logits of the likeliest.
    """

    def __init__(self, wanted: WantedRows, parts: Sequence[torch.Tensor]) -> None:
        self._wanted, self._parts = wanted, parts

    def read(self, num_positions: Sequence[int] | None = None) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities by row of the plan, as ``LogprobReport.read`` does."""
        found: dict[int, TokenLogprobs] = {}
        for num_top, rows, places in self._wanted.by_num_top:
            parts = (part.numpy()[places] for part in self._parts)
            drawn, rank, top, logprob, *of_top = parts
            top, top_logprobs, logits = (part[:, :num_top] for part in (top, *of_top))
            # Of equal logits, all have the rank of the first.
            firsts = np.zeros_like(top)
            is_lower = logits[:, 1:] != logits[:, :-1]
            np.multiply(np.arange(1, num_top), is_lower, out=firsts[:, 1:])
            packed = np.empty(len(rows), _packed_dtype(1 + num_top, logprob.dtype))
            for name, first, others in (
                ("token_ids", drawn, top),
                ("logprobs", logprob, top_logprobs),
                ("ranks", rank, 1 + np.maximum.accumulate(firsts, axis=1)),
            ):
                packed[name][:, 0, :1] = first
                packed[name][:, 0, 1:] = others
            data, dtype = packed.tobytes(), packed.dtype
            for index, row in enumerate(rows):
                if num_positions is None or num_positions[row] > 0:
                    start = index * dtype.itemsize
                    # A copy: the other rows' values must not live as long as this request.
                    found[row] = PackedPosition(data[start : start + dtype.itemsize], dtype)
        return found


@lru_cache(maxsize=256)
def _packed_dtype(num_ids: int, real: np.dtype[np.floating]) -> np.dtype[np.void]:
    """Return the dtype of a row's position: three arrays ``[1, num_ids]``."""
    kinds = {"token_ids": np.dtype(np.int64), "logprobs": real, "ranks": np.dtype(np.int64)}
    return np.dtype([(name, kind, (1, num_ids)) for name, kind in kinds.items()])


class PackedPosition(TokenLogprobs):
    """One position of one request as bytes: a step makes one for each row, few are read.

    Arrays take several times as long to make. ``data`` is an element of ``dtype``: ``token_ids``,
    ``logprobs`` and ``ranks``.
    """

    __slots__ = ("_data", "_dtype")
    _data: bytes
    _dtype: np.dtype[np.void]

    def __init__(self, data: bytes, dtype: np.dtype[np.void]) -> None:
        object.__setattr__(self, "_data", data)  # the class is frozen
        object.__setattr__(self, "_dtype", dtype)

    def __len__(self) -> int:
        return 1

    def __reduce__(self) -> tuple[object, ...]:
        return PackedPosition, (self._data, self._dtype)

    @property
    def token_ids(self) -> npt.NDArray[np.integer]:
        """As in ``TokenLogprobs``, read-only."""
        return self._array("token_ids")

    @property
    def logprobs(self) -> npt.NDArray[np.floating]:
        """As in ``TokenLogprobs``, read-only."""
        return self._array("logprobs")

    @property
    def ranks(self) -> npt.NDArray[np.integer]:
        """As in ``TokenLogprobs``, read-only."""
        return self._array("ranks")

    def _array(self, name: str) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = np.frombuffer(self._data, self._dtype)[0][name]
        return array


def _of_chunk(ops: Ops, logits: LogitsRows, by_id: torch.Tensor, num_top: int) -> _Chunk:
    """Return token ids, log-probabilities and ranks, ``[rows, ids + num_top]`` each."""
    num_top, logits = min(num_top, logits.vocab_size), logits.for_ids(by_id.shape[1])
    logprobs, ranks, top, top_logprobs = ops.top_logprobs(
        logits.values, by_id, num_top, **logits.of_ranks
    )
    falling = -logits.of_tokens(top)
    num_greater = torch.searchsorted(falling, falling)  # the likeliest tokens come in order
    return (
        _to_host(torch.cat([by_id, top], dim=1)),
        _to_host(torch.cat([logprobs, top_logprobs], dim=1)),
        _to_host(torch.cat([ranks, 1 + num_greater], dim=1)),
    )


def _of_sorted_chunk(rows: LogitsRows, by_id: torch.Tensor, num_top: int) -> _Chunk:
    """Return what ``_of_chunk`` returns, from a sort of each row."""
    logits = rows.whole()
    dtype = torch.promote_types(logits.dtype, torch.float32)
    falling, order = logits.sort(dim=1, descending=True, stable=True)
    rising, top = falling.neg_(), order[:, :num_top]
    num_greater = torch.searchsorted(rising, rising[:, :num_top].contiguous())
    logprobs = logits.log_softmax(dim=1, dtype=dtype)
    is_none = by_id < 0
    asked = by_id.clamp(min=0)
    ranks = 1 + torch.searchsorted(rising, -logits.gather(1, asked))
    of_asked = logprobs.gather(1, asked).masked_fill(is_none, -torch.inf)
    return (
        _to_host(torch.cat([by_id, top], dim=1)),
        _to_host(torch.cat([of_asked, logprobs.gather(1, top)], dim=1)),
        _to_host(torch.cat([ranks.masked_fill(is_none, 0), 1 + num_greater], dim=1)),
    )


def _asked_ids(wanted: Sequence[Wanted]) -> torch.Tensor:
    """Return the token ids that each row asks for, ``[rows, most ids]``, -1 = none."""
    most = max(len(each.token_ids) for each in wanted)
    ids = np.full((len(wanted), most), -1, dtype=np.int64)
    for row, each in zip(ids, wanted, strict=True):
        row[: len(each.token_ids)] = each.token_ids
    return torch.from_numpy(ids)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
