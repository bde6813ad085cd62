"""One cell of the attention grid: its shape, the least bytes it moves, its operations."""

from __future__ import annotations

from dataclasses import dataclass

from mrv1.bench.options import SCALE_BYTES, CacheCase
from mrv1.errors import ConfigError
from mrv1.headwise.policy import FULL, Visible

INT32_BYTES = 4


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A batch of requests of one length."""

    batch: int
    context: int
    """Tokens of each request, the queries included."""

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Return the cell that ``"8x4096"`` names: batch x context.

        Raises:
            ConfigError: the text names no cell.
        """
        batch, cross, context = text.strip().partition("x")
        if not (cross and batch.isdecimal() and context.isdecimal()):
            raise ConfigError(f"cells: expected BATCHxCONTEXT such as 8x4096, got {text!r}")
        cell = cls(int(batch), int(context))
        if cell.batch < 1 or cell.context < 1:
            raise ConfigError(f"cells: expected batch and context >= 1, got {text!r}")
        return cell

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase(CacheCase):
    """One attention launch over a paged cache."""

    cell: Cell
    query_len: int
    """Queries of each request: its last tokens."""
    num_full_heads: int
    """KV heads that see everything; the others see ``sink`` and ``window``."""
    window: int = -1
    sink: int = 0

    @property
    def num_tokens(self) -> int:
        """Queries of all requests together."""
        return self.cell.batch * self.query_len

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

    def read_tokens(self, head: int) -> int:
        """Return how many tokens of a request some query of a KV head sees."""
        if self.is_full(head):
            return self.cell.context
        first_query = self.cell.context - self.query_len
        return self.cell.context - max(0, first_query - self.window + 1 - self.sink)

    def read_blocks(self, head: int) -> int:
        """Return how many pages hold ``read_tokens``."""
        num_before = self.cell.context - self.query_len
        unread = self.visible(head).freed_blocks(num_before, self.block_size)
        return -(-self.cell.context // self.block_size) - len(unread)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the visible K and V with their scales, each once."""
        tokens = sum(self.read_tokens(head) for head in range(self.num_kv_heads))
        return 2 * self.cell.batch * tokens * self.vector_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales; ``kv_bytes`` includes them."""
        return self.kv_bytes // self.vector_bytes * SCALE_BYTES * self.is_fp8

    @property
    def bytes_moved(self) -> int:
        """Bytes of the visible K and V, their block-table columns, q and out, each once."""
        blocks = {self.is_full(h): self.read_blocks(h) for h in range(self.num_kv_heads)}
        table_bytes = self.cell.batch * sum(blocks.values()) * INT32_BYTES
        q_bytes = self.num_tokens * self.num_q_heads * self.head_dim * self.dtype.itemsize
        return self.kv_bytes + table_bytes + 2 * q_bytes

    @property
    def flops(self) -> int:
        """Operations of both products over the visible (query, key) pairs: 2 per multiply-add."""
        pairs = sum(self._visible_pairs(head) for head in range(self.num_kv_heads))
        group = self.num_q_heads // self.num_kv_heads
        return 2 * 2 * self.cell.batch * group * pairs * self.head_dim

    def _visible_pairs(self, head: int) -> int:
        positions = range(self.cell.context - self.query_len, self.cell.context)
        if self.is_full(head):
            return sum(positions) + len(positions)
        return sum(
            min(self.window, p + 1) + min(self.sink, max(0, p + 1 - self.window))
            for p in positions
        )
