"""Tensors of a checkpoint that are several of a layer's: fused ones, by their parts' names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""A layer's projections of queries, keys and values, in this order."""
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
"""An MLP's first projections."""


class OtherNames(Protocol):
    """Names that tensors may have in place of those that ``checkpoint_tensors`` gives them."""

    def stored(self, name: str) -> str:
        """Return the usual name of a tensor that is not fused."""
        ...

    def pieces(self, name: str) -> Mapping[str, tuple[int | slice, ...]] | None:
        """Return a fused tensor's pieces: each one's name, and where it is; None = not fused."""
        ...

    def fused_shape(self, name: str, hidden_size: int) -> tuple[int, ...]:
        """Return the shape of a fused tensor."""
        ...

    def is_turned(self, name: str, shape: tuple[int, ...], hidden_size: int) -> bool:
        """Return whether the last two dimensions of a tensor are in the other order."""
        ...


_OF_LAYER = re.compile(r"(model\.layers\.\d+)\.([\w.]+)\.(weight|bias)")


class FusedNames:
    """Linear layers whose rows follow each other in one tensor of a checkpoint.

    Args:
        fused: by the fused layer's name, its parts' names and numbers of rows, in order.
        renamed: usual names of a layer's modules, by a checkpoint's.
    """

    def __init__(self, fused: Mapping[str, Mapping[str, int]], renamed: Mapping[str, str]) -> None:
        self._fused, self._renamed = fused, renamed

    def stored(self, name: str) -> str:
        """Return the usual name of a tensor that is not fused."""
        found = _OF_LAYER.fullmatch(name)
        if found is None or found[2] not in self._renamed:
            return name
        return f"{found[1]}.{self._renamed[found[2]]}.{found[3]}"

    def pieces(self, name: str) -> Mapping[str, tuple[int | slice, ...]] | None:
        """Return a fused tensor's pieces: each one's name, and where it is; None = not fused."""
        found = _OF_LAYER.fullmatch(name)
        if found is None or found[2] not in self._fused:
            return None
        pieces: dict[str, tuple[int | slice, ...]] = {}
        first = 0
        for part, num_rows in self._fused[found[2]].items():
            pieces[f"{found[1]}.{part}.{found[3]}"] = (slice(first, first + num_rows),)
            first += num_rows
        return pieces

    def fused_shape(self, name: str, hidden_size: int) -> tuple[int, ...]:
        """Return the shape of a fused tensor."""
        found = _OF_LAYER.fullmatch(name)
        if found is None:
            raise ValueError(f"name: expected that of a fused tensor, got {name!r}")
        num_rows = sum(self._fused[found[2]].values())
        return (num_rows,) if found[3] == "bias" else (num_rows, hidden_size)

    def is_turned(self, name: str, shape: tuple[int, ...], hidden_size: int) -> bool:
        """Return whether the last two dimensions are in the other order: they never are."""
        return False
