"""The rows of a step on the host: their shape, and the place of a plan's rows on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from mrv1.runner.step import Int32Array, StepPlan

BoolArray = npt.NDArray[np.bool_]

MAX_DECODE_QUERY_LEN = 8
"""Longest query per row that the decode kernel takes."""


class Tail(NamedTuple):
    """Parts of sampling besides the draw in a graph after the layers; reports precede edits."""

    masks: bool
    """Whether rows may have masks of the tokens that they may draw."""
    logprobs: bool
    """Whether rows may ask for log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The sizes of a step that the host knows and that launches depend on."""

    num_rows: int
    """Rows, padding included."""
    num_tokens: int
    """Tokens, padding included."""
    max_query_len: int
    query_len: int | None
    """Tokens of every row if the decode kernel takes all: 1, or with drafts 1 to 8; else None."""
    num_decodes: int
    """Leading rows of one token each."""
    has_drafts: bool = False
    samples: bool = True
    """Whether the graph draws too: without log-probabilities, masks, custom processors."""
    has_adapters: bool = False
    """Whether some request may have an adapter (LoRA)."""

    @classmethod
    def of(
        cls,
        query_lens: Int32Array,
        *,
        has_drafts: bool = False,
        samples: bool = True,
        prefilled: BoolArray | None = None,
    ) -> Self:
        """Return the shape of a step with ``query_lens[i]`` tokens in row i, in any order.

        ``samples``: a graph may draw too; ``prefilled`` (None = none): rows that the decode kernel
        does not take even with one token, for their ranges of keys or their experts.
        """
        longest = int(query_lens.max())
        is_decode = _is_decode(query_lens, prefilled)
        if longest == 1 and not has_drafts and prefilled is None:
            return cls.decode(len(query_lens), samples=samples)
        # Short prompts of one length are prefilled, as prompts of different lengths are.
        uniform = prefilled is None and (
            longest == 1
            or (has_drafts and longest == int(query_lens.min()) <= MAX_DECODE_QUERY_LEN)
        )
        return cls(
            num_rows=len(query_lens),
            num_tokens=int(query_lens.sum()),
            max_query_len=longest,
            query_len=longest if uniform else None,
            num_decodes=int(is_decode.sum()),
            has_drafts=has_drafts,
            samples=samples,
        )

    @classmethod
    @lru_cache(maxsize=1024)  # needed in every step
    def decode(cls, num_rows: int, num_drafts: int = 0, *, samples: bool = True) -> Self:
        """Return the shape of a decode step: in each row a last known token, and drafts."""
        return cls(
            num_rows=num_rows,
            num_tokens=num_rows * (1 + num_drafts),
            max_query_len=1 + num_drafts,
            query_len=1 + num_drafts,
            num_decodes=0 if num_drafts else num_rows,
            has_drafts=num_drafts > 0,
            samples=samples,
        )

    def places_of(self, shape: StepShape) -> Int32Array:
        """Return the places of ``shape``'s rows in this one; padding follows each kind of row."""
        rows = np.arange(shape.num_rows, dtype=np.int32)
        if self.query_len is None:
            rows[shape.num_decodes :] += self.num_decodes - shape.num_decodes
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """The rows of a step in device order: first the rows of one token, then the other rows."""

    shape: StepShape
    """The step's shape, padding included."""
    is_captured: bool
    """Whether a graph runs the step; else it is launched kernel by kernel."""
    idx_mapping: Int32Array
    """[rows], slots; -1 = padding, or a request that was refused."""
    query_lens: Int32Array | None
    """[rows]; None = one token each."""
    draft_token_ids: Sequence[Sequence[int]]
    """Drafts of each row; () = no row has any."""
    places: Int32Array | None
    """[rows of the plan], the device row of each; None = the first rows, in order."""
    is_masked: bool = False
    """Whether some token of the step sees other keys than all up to its own."""

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        slots: Int32Array,
        shape: StepShape,
        captured: StepShape | None,
        prefilled: BoolArray | None = None,
        *,
        is_masked: bool = False,
    ) -> Self:
        """Return the rows of a plan in device order.

        ``slots`` are of the plan's rows, -1 = refused; ``captured`` is the shape of the graph that
        runs the step, at least ``shape``, None = none; ``prefilled`` is as in ``StepShape.of``.
        """
        query_lens, drafts = plan.num_scheduled_tokens, plan.draft_token_ids
        on_device = captured or shape
        places = on_device.places_of(shape)
        if on_device.query_len is None:
            order = np.argsort(~_is_decode(query_lens, prefilled), kind="stable")
            places[order] = places.copy()
            drafts = tuple(drafts[row] for row in order) if shape.has_drafts else ()
        idx_mapping = np.full(on_device.num_rows, -1, dtype=np.int32)
        idx_mapping[places] = slots
        is_decode, padded_lens = on_device.query_len == 1, None
        if not is_decode:
            padded_lens = np.zeros(on_device.num_rows, dtype=np.int32)
            padded_lens[: on_device.num_decodes] = 1
            padded_lens[places] = query_lens
        return cls(
            shape=on_device,
            is_captured=captured is not None,
            idx_mapping=idx_mapping,
            query_lens=padded_lens,
            draft_token_ids=drafts if shape.has_drafts else (),
            places=None if is_decode else places,
            is_masked=is_masked,
        )

    def place(self, row: int) -> int:
        """Return the device row of a row of the plan."""
        return row if self.places is None else int(self.places[row])

    @property
    def first_tokens(self) -> Int32Array:
        """[rows of the plan], the place in the batch of each row's first token."""
        if self.query_lens is None or self.places is None:
            return np.arange(len(self.idx_mapping), dtype=np.int32)
        return (np.cumsum(self.query_lens) - self.query_lens)[self.places].astype(np.int32)

    def placed(self, values: Int32Array) -> Int32Array:
        """Return values of the plan's rows in device order; the step must have no padding."""
        if self.places is None:
            return values
        placed = np.empty_like(values)
        placed[self.places] = values
        return placed


def _is_decode(query_lens: Int32Array, prefilled: BoolArray | None) -> BoolArray:
    """Return which rows the decode kernel takes, if not all rows are prefilled."""
    is_decode: BoolArray = query_lens == 1
    return is_decode if prefilled is None else is_decode & ~prefilled
