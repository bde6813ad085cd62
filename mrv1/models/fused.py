"""Tensors of a checkpoint under other names than a decoder's, or several of them in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""A layer's projections of queries, keys and values, in this order."""
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
"""An MLP's first projections."""

Pieces = dict[str, tuple[int | slice, ...]]
"""By usual name, where a tensor is in a stored one; () = it is all of that."""


@dataclass(frozen=True, slots=True)
class Fused:
    """A stored tensor that is several of a decoder's."""

    shape: tuple[int, ...]
    pieces: Pieces


@dataclass(frozen=True, slots=True)
class OtherNames:
    """Names that tensors may have in place of those that ``checkpoint_tensors`` gives them."""

    fused: dict[str, Fused] = field(default_factory=dict)
    """By stored name."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Usual names by stored ones."""
    turned: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By stored name, a shape by which its last two dimensions are in the other order."""

    def pieces(self, name: str) -> Pieces:
        """Return the usual names of a stored tensor, and where each one is in it."""
        fused = self.fused.get(name)
        return {self.renamed.get(name, name): ()} if fused is None else fused.pieces


def fused_names(
    num_layers: int,
    hidden_size: int,
    fused: Mapping[str, Mapping[str, int]],
    renamed: Mapping[str, str],
) -> OtherNames:
    """Return the names of linear layers whose rows follow each other in one tensor, and of others.

    ``fused`` has, by the fused layer's name, its parts' names and numbers of rows, in order;
    ``renamed`` usual names of a layer's modules, by a checkpoint's.
    """
    names = OtherNames()
    for layer in (f"model.layers.{index}" for index in range(num_layers)):
        for kind, columns in (("weight", (hidden_size,)), ("bias", ())):
            for name, usual in renamed.items():
                names.renamed[f"{layer}.{name}.{kind}"] = f"{layer}.{usual}.{kind}"
            for name, parts in fused.items():
                pieces, first = Pieces(), 0
                for part, num_rows in parts.items():
                    pieces[f"{layer}.{part}.{kind}"] = (slice(first, first + num_rows),)
                    first += num_rows
                names.fused[f"{layer}.{name}.{kind}"] = Fused((first, *columns), pieces)
    return names
