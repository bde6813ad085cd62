"""Types of the layers' arguments, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from mrv1.kernels._base.checks import check_tensor
from mrv1.kernels._base.peers import PeerBuffer, PeerMemory

Activation = Literal["silu_and_mul", "gelu_tanh_and_mul"]
"""The activations that ``linear`` can apply."""
GATES: dict[Activation | None, int] = {None: 0, "silu_and_mul": 1, "gelu_tanh_and_mul": 2}
"""What kernels call an activation of gates."""

AllReduceAlgorithm = Literal["one_shot", "two_shot"]
"""How ``all_reduce_norm`` sums."""

RING_SLOTS = 3
"""Turns of a program of ``all_reduce_norm`` whose words have places of their own."""
RING_ROWS = 256
"""Rows of a slot: as many are under way at once. 256 programs of 16 warps run at the same time on
an H100 or H200."""

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What travels, by the bytes of an element."""


def check_norm_weight(name: str, weight: torch.Tensor, x: torch.Tensor) -> None:
    """Raise unless ``weight`` may be that of a norm over the last dimension of ``x``."""
    dtypes = tuple(dict.fromkeys((x.dtype, torch.float32)))
    check_tensor(name, weight, shape=x.shape[-1:], dtype=dtypes, device=x.device, contiguous=True)


@dataclass(frozen=True, slots=True)
class AllReduceBuffers:
    """The memory through which ranks send each other what ``all_reduce_norm`` adds up.

    All calls with the same buffers follow each other on every rank, on one stream at a time.
    """

    received: PeerBuffer
    """[slots, ranks, rows, hidden] words that have arrived at a rank, by the rank that sent them;
    0 = not yet."""
    turn: torch.Tensor
    """[rows] int32, this rank's: the slot of the next call, counted by each program for itself."""
    abort: torch.Tensor
    """``PeerMemory.abort``."""

    @classmethod
    def allocate(cls, peers: PeerMemory, hidden: int, dtype: torch.dtype) -> AllReduceBuffers:
        """Allocate buffers for partials of ``dtype``; all ranks call this at the same point."""
        shape = (RING_SLOTS, peers.size, RING_ROWS, hidden)
        received = peers.allocate(shape, _WORDS[dtype.itemsize])
        turn = torch.zeros(RING_ROWS, dtype=torch.int32, device=received.own.device)
        return cls(received, turn, peers.abort)

    def check_partial(self, partial: torch.Tensor, dtype: torch.dtype) -> None:
        """Raise unless these buffers can sum ``partial`` to a result of ``dtype``."""
        own = self.received.own
        hidden, itemsize = own.shape[-1], own.itemsize
        has_splits = partial.dim() == 3 and partial.dtype == torch.float32
        if not (has_splits or partial.dim() == 2) or partial.shape[-1] != hidden:
            raise ValueError(
                f"partial: expected shape [tokens, {hidden}], as its buffers have, or float32 "
                f"[splits, tokens, {hidden}], got {partial.dtype} {list(partial.shape)}"
            )
        if partial.itemsize != itemsize and not (has_splits and dtype.itemsize == itemsize):
            raise TypeError(
                f"partial: expected a dtype of {itemsize} bytes, as its buffers have, "
                f"got {partial.dtype}"
            )
        if has_splits and not (partial.shape[0] and partial.is_contiguous()):
            raise ValueError(
                f"partial: expected contiguous splits, got shape {list(partial.shape)} with "
                f"strides {partial.stride()}"
            )
        if partial.device != own.device:
            raise ValueError(f"partial: expected device {own.device}, got {partial.device}")


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Rows that replace embeddings, such as an image's; ``add_features`` adds further columns."""

    rows: torch.Tensor
    """[any, at least hidden], embedding's dtype, contiguous: the first hidden replace its row."""
    source: torch.Tensor
    """[any] int32, contiguous: for each of the first tokens of the batch its row of ``rows``; -1 =
    the embedding of its id. Rows are not checked."""
    num_sources: torch.Tensor
    """[1] int32: how many of the first tokens have an entry in ``source``; later tokens have the
    embeddings of their ids. At most the length of ``source``; on the device, so not checked."""


def check_features(
    features: FeatureRows | None, embed: torch.Tensor, first_column: int = 0
) -> None:
    """Raise unless ``features``, from ``first_column`` on, fit rows of ``embed``, or are None."""
    if features is None:
        return
    check = partial(check_tensor, dtype=torch.int32, device=embed.device, contiguous=True)
    check("features.rows", features.rows, shape=(None, None), dtype=embed.dtype)
    if not 0 <= first_column <= features.rows.shape[1] - embed.shape[1]:
        raise ValueError(
            f"features.rows: expected {embed.shape[1]} columns from {first_column} on, "
            f"got {features.rows.shape[1]} columns"
        )
    check("features.source", features.source, shape=(None,))
    check("features.num_sources", features.num_sources, shape=(1,))


def feature_arguments(
    features: FeatureRows | None,
) -> tuple[torch.Tensor | None, int, torch.Tensor | None, torch.Tensor | None]:
    """Return rows, their stride, source and num_sources as a kernel takes them."""
    if features is None:
        return None, 0, None, None
    return features.rows, features.rows.stride(0), features.source, features.num_sources
