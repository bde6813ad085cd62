"""The state of requests on the device: fields with a row per slot, in one flat buffer."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch

from mrv1.errors import CapacityError

ALIGNMENT_WORDS = 4
"""Every field starts at a multiple of 16 bytes."""

MAX_WORDS = 2**31 - 1
"""The kernel that writes the buffer counts its words in int32."""

_WORD_BYTES = torch.int32.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of the slots."""

    width: int | None = None
    """Elements of a slot's row; None = a single element, and the view has no second axis."""
    dtype: torch.dtype = torch.int32
    """A dtype of 4 or 8 bytes."""
    is_shared: bool = False
    """Whether all slots share one row, that of slot 0."""

    @property
    def row_words(self) -> int:
        """int32 words of one slot's row."""
        return (1 if self.width is None else self.width) * self.dtype.itemsize // _WORD_BYTES


def field_starts(num_slots: int, fields: Mapping[str, Field]) -> tuple[dict[str, int], int]:
    """Return where each field starts in the buffer of ``SlotState``, and the buffer's words.

    CapacityError: an int32 cannot count the words.
    """
    starts: dict[str, int] = {}
    num_words = 0
    for name, field in fields.items():
        starts[name] = num_words
        words = (1 if field.is_shared else num_slots) * field.row_words
        num_words += -(-words // ALIGNMENT_WORDS) * ALIGNMENT_WORDS
    if num_words > MAX_WORDS:
        raise CapacityError(
            f"request state: expected at most {MAX_WORDS} words for {num_slots} slots, got "
            f"{num_words}; lower max_num_seqs or max_model_len, or whichever is large of "
            "max_num_batched_tokens, max_bad_words_num, bad_words_max_len, max_stop_seqs_num, "
            "stop_seqs_max_len, max_logit_bias and max_mm_items"
        )
    return starts, num_words


class SlotState:
    """Views of one int32 buffer, so that a single kernel applies all changes of a step.

    It starts as zeros, and only the runner's stream uses it. CapacityError: too many words for
    int32.
    """

    def __init__(self, num_slots: int, fields: Mapping[str, Field], device: torch.device) -> None:
        self._fields = dict(fields)
        self._starts, num_words = field_starts(num_slots, fields)
        self.buffer = torch.zeros(num_words, dtype=torch.int32, device=device)
        """[words] int32."""
        self._views = {name: self._view(name, num_slots) for name in fields}

    def _view(self, name: str, num_slots: int) -> torch.Tensor:
        field, start = self._fields[name], self._starts[name]
        num_slots = 1 if field.is_shared else num_slots
        words = self.buffer[start : start + num_slots * field.row_words]
        shape = (num_slots,) if field.width is None else (num_slots, field.width)
        return words.view(field.dtype).view(shape)

    @property
    def names(self) -> Set[str]:
        """Names of the fields."""
        return self._fields.keys()

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a field, ``[num_slots]`` or ``[num_slots, width]``; a shared one has one slot."""
        return self._views[name]

    def first_word(self, name: str, slot: int, num_words: int = 1) -> int:
        """Return the index in ``buffer`` of a slot's row of a field; ValueError if too short."""
        row_words = self._fields[name].row_words
        if num_words > row_words:
            raise ValueError(
                f"{name} in slot {slot}: expected at most {row_words} words, got {num_words}"
            )
        return self._starts[name] + slot * row_words
