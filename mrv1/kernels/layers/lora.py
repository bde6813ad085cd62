"""Low-rank adapters (LoRA) of one weight: types of arguments, and their checks.

The adapter of a token adds ``scaling * B @ (A @ x)`` to the product of the weight with x. A and B
of every loaded adapter lie in tensors with an entry for each *adapter slot*, and each token says
which slot it uses. A weight may hold several *parts*, such as the projections of queries, keys and
values, each with an A, a rank and a scaling of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from mrv1.kernels._base.checks import check_tensor

MOST_PARTS = 3
"""Most parts of a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraMatrices:
    """A and B of every adapter slot for one weight ``[out, in]``; all tensors are contiguous.

    Nothing is read of a slot that no token uses, nor of ranks beyond an adapter's own.
    """

    a: torch.Tensor
    """[slots, parts * max_rank, in], the weight's dtype: each part has max_rank rows."""
    b: torch.Tensor
    """[slots, max_rank, out], the weight's dtype: B transposed."""
    scaling: torch.Tensor
    """[slots, parts] float32, or of float64 matrices float64."""
    ranks: torch.Tensor
    """[slots, parts] int32, 0 to max_rank; 0 = the adapter leaves this part as it is."""
    part_rows: tuple[int, ...]
    """Rows of the weight in each part, 1 to 3 parts, which follow each other."""

    @property
    def max_rank(self) -> int:
        """Rows of A for each part."""
        return self.b.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(each.nbytes for each in (self.a, self.b, self.scaling, self.ranks))

    @property
    def part_starts(self) -> tuple[int, ...]:
        """First row of each part."""
        return tuple(sum(self.part_rows[:part]) for part in range(len(self.part_rows)))

    @classmethod
    def empty(
        cls,
        slots: int,
        max_rank: int,
        num_in: int,
        part_rows: tuple[int, ...],
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> LoraMatrices:
        """Return slots without an adapter; A and B are not initialised."""
        new, parts = partial(torch.empty, device=device), len(part_rows)
        wide = torch.promote_types(dtype, torch.float32)
        return cls(
            a=new(slots, parts * max_rank, num_in, dtype=dtype),
            b=new(slots, max_rank, sum(part_rows), dtype=dtype),
            scaling=new(slots, parts, dtype=wide).zero_(),
            ranks=new(slots, parts, dtype=torch.int32).zero_(),
            part_rows=part_rows,
        )

    def check(self, x: torch.Tensor, num_out: int) -> None:
        """Raise unless these are adapters of a weight ``[num_out, in of x]`` of x's dtype."""
        parts, num_slots = len(self.part_rows), self.a.shape[0]
        if not 1 <= parts <= MOST_PARTS or sum(self.part_rows) != num_out:
            raise ValueError(
                f"adapters.part_rows: expected 1 to {MOST_PARTS} parts with {num_out} rows "
                f"together, got {self.part_rows}"
            )
        check = partial(check_tensor, device=x.device, contiguous=True)
        check("adapters.b", self.b, shape=(num_slots, None, num_out), dtype=x.dtype)
        shape = (num_slots, parts * self.max_rank, x.shape[1])
        check("adapters.a", self.a, shape=shape, dtype=x.dtype)
        wide = torch.promote_types(x.dtype, torch.float32)
        check("adapters.scaling", self.scaling, shape=(num_slots, parts), dtype=wide)
        check("adapters.ranks", self.ranks, shape=(num_slots, parts), dtype=torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters of one weight, and which of them each token uses."""

    matrices: LoraMatrices
    slots: torch.Tensor
    """[tokens] int32, contiguous: the token's adapter slot; -1 = none. Slots are not checked."""

    def check(self, x: torch.Tensor, num_out: int) -> None:
        """Raise unless these are adapters of x's tokens, of a weight with ``num_out`` rows."""
        self.matrices.check(x, num_out)
        check_tensor(
            "adapters.slots", self.slots, shape=(x.shape[0],), dtype=torch.int32,
            device=x.device, contiguous=True,
        )  # fmt: skip
