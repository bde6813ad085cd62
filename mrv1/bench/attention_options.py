"""What ``mrv1 bench attention`` measures: the options and the grids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrv1.bench.attention_case import AttentionCase, Cell
from mrv1.bench.options import CacheBench
from mrv1.bench.peers.attention import PEERS
from mrv1.errors import ConfigError

DECODE_CELLS = tuple(
    Cell(*pair)
    for pair in (
        (1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768), (32, 2048), (32, 8192),
        (64, 8192), (128, 1024), (128, 4096), (256, 512), (256, 1024), (256, 4096),
    )
)  # fmt: skip
PREFILL_CELLS = (Cell(1, 8192), Cell(8, 2048))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBench(CacheBench):
    """What to measure: one attention kernel over a paged cache of random keys and values.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    mode: Literal["decode", "prefill"] = "decode"
    """One query per request, or ``query_len``, causal."""
    query_len: int | None = None
    """Tokens of each request that a prefill computes, its last ones; None = all."""
    cells: tuple[Cell, ...] = ()
    """Empty = ``DECODE_CELLS`` or ``PREFILL_CELLS``."""
    full_heads: float = 1.0
    """Share of the KV heads that see everything, 0 to 1."""
    window: int = 256
    """Tokens that the other heads see, the current one included."""
    sink: int = 64
    """Leading tokens that they see as well."""
    deterministic: bool = False
    """Measure a decode whose rows do not depend on their batch as well."""
    peers: tuple[str, ...] = tuple(PEERS)

    def __post_init__(self) -> None:
        """Check what the kernels will not, or not by the option's name."""
        if self.mode not in ("decode", "prefill"):
            raise ConfigError(f"mode: expected decode or prefill, got {self.mode!r}")
        CacheBench.__post_init__(self)
        self.check_least(window=1, sink=0)
        if self.query_len is not None:
            if self.mode != "prefill":
                raise ConfigError(f"query_len: expected mode prefill, got {self.mode}")
            shortest = min(cell.context for cell in self.chosen_cells)
            if not 2 <= self.query_len <= shortest:
                raise ConfigError(
                    f"query_len: expected 2 to {shortest}, the shortest context, "
                    f"got {self.query_len}"
                )
        if self.deterministic and self.mode != "decode":
            raise ConfigError(f"deterministic: expected mode decode, got {self.mode}")
        if len(set(self.cells)) < len(self.cells):
            raise ConfigError(f"cells: expected different ones, got {[*map(str, self.cells)]}")
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_q_heads: expected a multiple of {self.num_kv_heads}, got {self.num_q_heads}"
            )
        full = self.full_heads * self.num_kv_heads
        if full != round(full) or not 0 <= full <= self.num_kv_heads:
            raise ConfigError(
                f"full_heads: expected a share of {self.num_kv_heads} heads in whole heads, "
                f"got {self.full_heads}"
            )

    @property
    def chosen_cells(self) -> tuple[Cell, ...]:
        """``cells``, or the mode's own."""
        return self.cells or (DECODE_CELLS if self.mode == "decode" else PREFILL_CELLS)

    def cases(self) -> list[AttentionCase]:
        """Return the cells with everything that belongs to their shape."""
        return [
            AttentionCase(
                cell=cell,
                query_len=1 if self.mode == "decode" else self.query_len or cell.context,
                num_full_heads=round(self.full_heads * self.num_kv_heads),
                window=self.window,
                sink=self.sink,
                **self.shape,
            )
            for cell in self.chosen_cells
        ]
