"""One cell of the attention grid: its shape, the least bytes it moves, its operations."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.measure.options import CacheCase
from mrv1.errors import ConfigError
from mrv1.headwise.policy import FULL, Visible

INT32_BYTES = 4


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A batch of requests of one length, or of lengths spaced evenly between two.

    In a prefill, further requests may bring one query each to the same launch.
    """

    batch: int
    context: int
    """Tokens of the longest request, the queries included."""
    shortest: int = 0
    """Tokens of the shortest request; 0 = all have ``context``."""
    num_decodes: int = 0
    """Requests of one query, beside ``batch``."""
    decode_context: int = 0
    """Tokens of each of them, at most ``context``."""

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Return the cell that a text names: batch x contexts, and decodes x their context.

        ``"8x4096"``, ``"8x100-4096"``, or ``"4x16384+60x2048"``: 4 prefills and 60 decodes.

        Raises:
            ConfigError: the text names no cell.
        """
        found = re.fullmatch(
            r"([0-9]+)x(?:([0-9]+)-)?([0-9]+)(?:\+([0-9]+)x([0-9]+))?", text.strip()
        )
        if found is None:
            raise ConfigError(
                "cells: expected BATCHxCONTEXT such as 8x4096, 8x100-4096 or 4x16384+60x2048, "
                f"got {text!r}"
            )
        batch, shortest, context, decodes, decode_context = (
            int(part or 0) for part in found.groups()
        )
        cell = cls(batch, context, shortest, decodes, decode_context)
        if cell.batch < 1 or cell.context < 1:
            raise ConfigError(f"cells: expected batch and context >= 1, got {text!r}")
        if found[4] and not (decodes and 1 <= decode_context <= context):
            raise ConfigError(
                f"cells: expected decodes of 1 to {context} tokens after +, got {text!r}"
            )
        if found[2] and not 1 <= cell.shortest < cell.context:
            raise ConfigError(f"cells: expected a shorter context first, got {text!r}")
        return cell

    @property
    def num_requests(self) -> int:
        """``batch`` and the decodes beside it."""
        return self.batch + self.num_decodes

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request: the decodes beside the batch, then the batch in rising order."""
        decodes = [self.decode_context] * self.num_decodes
        if not self.shortest:
            return decodes + [self.context] * self.batch
        step = (self.context - self.shortest) / max(1, self.batch - 1)
        batch = [self.context - round(index * step) for index in reversed(range(self.batch))]
        return decodes + batch

    def __str__(self) -> str:
        first = f"{self.shortest}-" if self.shortest else ""
        beside = f"+{self.num_decodes}x{self.decode_context}" if self.num_decodes else ""
        return f"{self.batch}x{first}{self.context}{beside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase(CacheCase):
    """One attention launch over a paged cache."""

    cell: Cell
    query_len: int
    """Queries of each request of the batch: its last tokens."""
    num_full_heads: int
    """KV heads that see everything; the others see ``sink`` and ``window``."""
    window: int = -1
    sink: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    """Whether each query head has a logit sink."""

    @property
    def num_tokens(self) -> int:
        """Queries of all requests together."""
        return sum(self.query_lens)

    @property
    def query_lens(self) -> list[int]:
        """Queries of each request, in the order of ``cell.lengths``."""
        return [1] * self.cell.num_decodes + [self.query_len] * self.cell.batch

    @property
    def is_uniform(self) -> bool:
        """Whether every head sees everything."""
        return self.num_full_heads == self.num_kv_heads

    def is_full(self, head: int) -> bool:
        """Say whether a KV head sees everything: full heads are spread evenly over the layer."""
        before = head * self.num_full_heads // self.num_kv_heads
        return (head + 1) * self.num_full_heads // self.num_kv_heads > before

    def visible(self, head: int) -> Visible:
        """Return what a KV head sees."""
        return FULL if self.is_full(head) else Visible(self.window, self.sink)

    def read_tokens(self, head: int, context: int) -> int:
        """Return how many tokens of a request some query of a KV head sees."""
        if self.is_full(head):
            return context
        first_query = context - self.query_len
        return context - max(0, first_query - self.window + 1 - self.sink)

    def read_blocks(self, head: int, context: int) -> int:
        """Return how many pages hold ``read_tokens``."""
        num_before = context - self.query_len
        unread = self.visible(head).freed_blocks(num_before, self.block_size)
        return -(-context // self.block_size) - len(unread)

    @property
    def _read_vectors(self) -> int:
        """Vectors of the visible K and V."""
        return 2 * sum(
            self.read_tokens(head, context)
            for head in range(self.num_kv_heads)
            for context in self.cell.lengths
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of the visible K and V with their scales, each once."""
        return round(self._read_vectors * self.vector_bytes)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales; ``kv_bytes`` includes them."""
        return round(self._read_vectors * self.scale_share)

    @property
    def bytes_moved(self) -> int:
        """Bytes of the visible K and V, their block-table columns, q and out, each once."""
        kinds = {self.is_full(head): head for head in range(self.num_kv_heads)}
        blocks = sum(
            self.read_blocks(head, context)
            for head in kinds.values()
            for context in self.cell.lengths
        )
        table_bytes = blocks * INT32_BYTES
        q_bytes = self.num_tokens * self.num_q_heads * self.head_dim * self.dtype.itemsize
        return self.kv_bytes + table_bytes + 2 * q_bytes

    @property
    def flops(self) -> int:
        """Operations of both products over the visible (query, key) pairs: 2 per multiply-add."""
        pairs = sum(
            self._visible_pairs(head, context, query_len)
            for head in range(self.num_kv_heads)
            for context, query_len in zip(self.cell.lengths, self.query_lens, strict=True)
        )
        group = self.num_q_heads // self.num_kv_heads
        return 2 * 2 * group * pairs * self.head_dim

    def _visible_pairs(self, head: int, context: int, query_len: int) -> int:
        positions = range(context - query_len, context)
        if self.is_full(head):
            return sum(positions) + len(positions)
        return sum(
            min(self.window, p + 1) + min(self.sink, max(0, p + 1 - self.window))
            for p in positions
        )
