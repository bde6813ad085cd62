"""Finds KV blocks by their content: a chain of digests over full blocks of token ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from mrv1.engine.head_pools import HeadPools
from mrv1.engine.request import KeySpan, Request
from mrv1.engine.slot_table import SlotTable
from mrv1.multimodal import MultimodalItem, causal_ranges
from mrv1.runner.step import Int32Array

DIGEST_BYTES = 16  # 128 bits: two prefixes share a digest with negligible probability
NEVER = np.iinfo(np.int64).max  # of ``num_cached_blocks``: may not be cached


def extend_chain(
    chain: list[bytes],
    token_ids: Sequence[int] | npt.NDArray[np.int32],
    block_size: int,
    extra_key: bytes = b"",
    key_spans: Sequence[KeySpan] = (),
) -> None:
    """Append to ``chain`` the digest of every full block of ``token_ids``, which follow it.

    A digest covers its parent, so that equal ones mean equal tokens at equal positions;
    ``extra_key``, on which K and V depend too; start and key of each of ``key_spans`` in the
    block.
    """
    data = np.asarray(token_ids, dtype=np.int32).tobytes()
    block_bytes = block_size * np.dtype(np.int32).itemsize
    parent = chain[-1] if chain else blake2b(extra_key, digest_size=DIGEST_BYTES).digest()
    keys = _keys_of_blocks(
        key_spans, block_size, len(chain), len(chain) + len(data) // block_bytes
    )
    append = chain.append
    for end in range(block_bytes, len(data) + 1, block_bytes):
        content = parent + data[end - block_bytes : end]
        if keys:
            content += keys.get(len(chain), b"")
        parent = blake2b(content, digest_size=DIGEST_BYTES).digest()
        append(parent)


def _keys_of_blocks(
    key_spans: Sequence[KeySpan], block_size: int, first: int, end: int
) -> dict[int, bytes]:
    """Return, for blocks ``[first, end)`` that spans overlap, the starts and keys of the spans."""
    keys: dict[int, bytes] = {}
    for start, stop, key in key_spans:
        for block in range(max(first, start // block_size), min(end, -(-stop // block_size))):
            keys[block] = keys.get(block, b"") + start.to_bytes(8) + key
    return keys


def key_spans(
    items: Sequence[MultimodalItem], ranges: Int32Array | None, prompt: Sequence[int]
) -> tuple[KeySpan, ...]:
    """Return the spans of a prompt whose K and V depend on more than the tokens up to them.

    An item's tokens depend on its content. A token that sees later tokens, or not all earlier
    ones, changes K and V of all layers but the first, in itself and all tokens that see it. With
    ranges of the caller, all from there on has the whole prompt's key.
    """
    spans = [(item.start, item.end, item.content_hash) for item in items]
    if ranges is not None and not any(item.bidirectional for item in items):
        causal = causal_ranges(0, len(prompt))
        first = int((ranges != causal).any(axis=1).argmax())
        digest = blake2b(np.array(prompt, dtype=np.int32).tobytes(), digest_size=DIGEST_BYTES)
        digest.update(ranges.tobytes())
        for start, _, key in spans:
            digest.update(start.to_bytes(8) + key)
        spans.append((first, len(prompt), digest.digest()))
    return tuple(spans)


class RecentChains:
    """Digests of the prompts found last, for prompts that begin alike: hashing takes milliseconds.

    A conversation's next turn, or the next question about a document, has a long prompt of which a
    few tokens are new. Comparing 100,000 tokens takes 1/200 of the time of hashing them.
    """

    LEAST_TOKENS = 2048
    """Tokens from which on a prompt is kept and compared."""
    MOST_TOKENS = 1 << 21
    """Tokens of all prompts that are kept; a token takes 8 bytes."""
    MOST_CHAINS = 16
    """Prompts that are kept, and that a new one is compared with."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._chains: deque[tuple[bytes, Int32Array, list[bytes]]] = deque()
        """Key, tokens and digests of each prompt, the latest first."""
        self._num_tokens = 0

    def start(self, token_ids: Int32Array, extra_key: bytes) -> list[bytes]:
        """Return the digests of the leading blocks that the prompt shares with a known one."""
        if len(token_ids) < self.LEAST_TOKENS:
            return []
        most, longest = 0, []
        for key, known, digests in self._chains:
            length = min(len(known), len(token_ids))
            if key != extra_key or length <= most or known[most] != token_ids[most]:
                continue
            is_same = known[:length] == token_ids[:length]
            count = length if is_same.all() else int(is_same.argmin())
            if count > most:
                most, longest = count, digests
        return longest[: most // self._block_size]

    def keep(self, token_ids: Int32Array, extra_key: bytes, digests: list[bytes]) -> None:
        """Remember a prompt and its digests, which may grow but not change."""
        if len(token_ids) < self.LEAST_TOKENS:
            return
        self._chains.appendleft((extra_key, token_ids, digests))
        self._num_tokens += len(token_ids)
        while len(self._chains) > 1 and (
            self._num_tokens > self.MOST_TOKENS or len(self._chains) > self.MOST_CHAINS
        ):
            self._num_tokens -= len(self._chains.pop()[1])


class PrefixCache:
    """Registers the full blocks of running requests, and finds them for waiting requests."""

    def __init__(self, pools: HeadPools, slots: SlotTable, *, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._pools = pools
        self._slots = slots
        self.recent = RecentChains(pools.block_size)

    def find(self, request: Request) -> list[list[int]]:
        """Return, per group, known blocks of the longest prefix without the last token."""
        if not self.is_enabled or request.lacks_prompt_logprobs:
            return [[] for _ in self._pools]
        is_new = not request.block_digests and not request.key_spans
        if is_new:
            known = self.recent.start(request.token_ids(), request.cache_key)
            request.block_digests += known
        self._extend_digests(request, request.num_tokens)
        if is_new:
            self.recent.keep(request.token_ids(), request.cache_key, request.block_digests)
        block_size = self._pools.block_size
        num_blocks = (request.num_tokens - 1) // block_size

        # Rounded down to a block, the start of one unsplittable span may lie within another.
        def cut(count: int) -> int:
            return request.uncut(0, count * block_size) // block_size

        return self._pools.find(request.block_digests[:num_blocks], cut)

    def add(self, request: Request) -> None:
        """Register for ``find`` the blocks that successful steps filled for a running request."""
        if not self.is_enabled:
            return
        start = int(self._slots.num_cached_blocks[request.slot])
        end = int(self._slots.num_landed[request.slot]) // self._pools.block_size
        if start < end:
            self._extend_digests(request, end * self._pools.block_size)
            self._pools.cache(request.block_ids, request.block_digests, start, end)
            self._slots.num_cached_blocks[request.slot] = end

    def reset(self) -> None:
        """Forget every prefix; no block that was computed until now is shared again."""
        self._pools.reset_cache()
        self._slots.num_cached_blocks.fill(NEVER)

    def _extend_digests(self, request: Request, num_tokens: int) -> None:
        """Compute the digests of the full blocks of the first ``num_tokens`` tokens."""
        block_size = self._pools.block_size
        start = len(request.block_digests) * block_size
        if start + block_size <= num_tokens:
            token_ids = request.token_ids(start, num_tokens)
            extend_chain(
                request.block_digests, token_ids, block_size, request.cache_key, request.key_spans
            )
