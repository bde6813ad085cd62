"""The options and the grids of ``mrv1 bench attention``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from benchmarks.kernels.attention_case import AttentionCase, Cell
from benchmarks.measure.options import CacheBench
from benchmarks.peers.attention import PEERS
from mrv1.errors import ConfigError

DECODE_CELLS = tuple(
    Cell(*pair)
    for pair in (
        (1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768), (32, 2048), (32, 8192),
        (64, 8192), (128, 1024), (128, 4096), (256, 512), (256, 1024), (256, 4096),
    )
)  # fmt: skip
GROUP_CELLS = tuple(Cell(batch, 4000) for batch in (6, 12, 16, 20, 24, 32))
"""With 8 KV heads 48 to 256 segments, from a share of the multiprocessors to twice as many."""
PREFILL_CELLS = (Cell(1, 8192), Cell(8, 2048))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBench(CacheBench):
    """Options: one attention kernel is measured over a paged cache of random keys and values.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    mode: Literal["decode", "prefill"] = "decode"
    """``decode``: one query per request; ``prefill``: ``query_len`` queries, causal."""
    query_len: int | None = None
    """Tokens that a prefill computes, the last of each request; None = all."""
    cells: tuple[Cell, ...] = ()
    """Empty = ``DECODE_CELLS``, ``GROUP_CELLS`` or ``PREFILL_CELLS``."""
    groups: tuple[int, ...] = ()
    """Query heads per KV head, each measured on every cell; empty = those of ``num_q_heads``."""
    full_heads: float = 1.0
    """Share of the KV heads that are full (see everything), 0 to 1."""
    window: int = 256
    """Last tokens that a streaming head sees, the current one included."""
    sink: int = 64
    """First tokens, which a streaming head always sees."""
    soft_cap: float = 0.0
    """Soft cap of the logits; 0 = none."""
    sinks: bool = False
    """Give each query head a logit sink."""
    deterministic: bool = False
    """Also measure decode attention that computes each row independently of its batch."""
    peers: tuple[str, ...] = tuple(PEERS)

    def __post_init__(self) -> None:
        """Check the fields that kernels do not check, or not under the option's name."""
        if self.mode not in ("decode", "prefill"):
            raise ConfigError(f"mode: expected decode or prefill, got {self.mode!r}")
        CacheBench.__post_init__(self)
        self.check_least(window=1, sink=0)
        if not 0 <= self.soft_cap < math.inf:
            raise ConfigError(f"soft_cap: expected >= 0 and finite, got {self.soft_cap}")
        if self.query_len is not None:
            if self.mode != "prefill":
                raise ConfigError(f"query_len: expected mode prefill, got {self.mode}")
            shortest = min(cell.shortest or cell.context for cell in self.chosen_cells)
            if not 2 <= self.query_len <= shortest:
                raise ConfigError(
                    f"query_len: expected 2 to {shortest}, the shortest context, "
                    f"got {self.query_len}"
                )
        mixed = [str(cell) for cell in self.chosen_cells if cell.num_decodes]
        if mixed and (self.query_len is None or self.full_heads != 1.0):
            raise ConfigError(
                f"cells: expected query_len and full heads beside decodes, got {mixed}"
            )
        if self.deterministic and self.mode != "decode":
            raise ConfigError(f"deterministic: expected mode decode, got {self.mode}")
        if self.mode == "prefill" and self.query_len is None:
            mixed = [str(cell) for cell in self.chosen_cells if cell.shortest]
            if mixed:
                raise ConfigError(f"cells: expected one length in whole prompts, got {mixed}")
        if len(set(self.cells)) < len(self.cells):
            raise ConfigError(f"cells: expected different cells, got {[*map(str, self.cells)]}")
        if min(self.groups, default=1) < 1 or len(set(self.groups)) < len(self.groups):
            raise ConfigError(f"groups: expected different numbers >= 1, got {self.groups}")
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_q_heads: expected a multiple of {self.num_kv_heads}, got {self.num_q_heads}"
            )
        full = self.full_heads * self.num_kv_heads
        if full != round(full) or not 0 <= full <= self.num_kv_heads:
            raise ConfigError(
                f"full_heads: expected 0 to 1, a whole number of {self.num_kv_heads} heads, "
                f"got {self.full_heads}"
            )

    @property
    def chosen_cells(self) -> tuple[Cell, ...]:
        """``cells``, or the mode's own."""
        if self.mode == "prefill":
            return self.cells or PREFILL_CELLS
        return self.cells or (GROUP_CELLS if self.groups else DECODE_CELLS)

    def cases(self) -> list[AttentionCase]:
        """Return one case per cell and group, with all its sizes."""
        q_heads = [group * self.num_kv_heads for group in self.groups] or [self.num_q_heads]
        return [
            AttentionCase(
                cell=cell,
                query_len=1 if self.mode == "decode" else self.query_len or cell.context,
                num_full_heads=round(self.full_heads * self.num_kv_heads),
                window=self.window,
                sink=self.sink,
                soft_cap=self.soft_cap,
                has_sinks=self.sinks,
                **self.shape | {"num_q_heads": num_q_heads},
            )
            for cell in self.chosen_cells
            for num_q_heads in q_heads
        ]
