"""What names a KV block by its content: a chain of digests over full blocks of token ids."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16
"""128 bits: two different prefixes share a digest with a probability nobody will see."""

TOKEN_BYTES = array("i").itemsize


def extend_chain(
    chain: list[bytes], token_ids: Sequence[int], block_size: int, extra_key: bytes = b""
) -> None:
    """Append to ``chain`` the digest of every full block of ``token_ids``.

    A block's digest covers its parent's, hence the whole prefix: equal digests mean equal tokens
    at equal positions.

    Args:
        chain: digests of the blocks before ``token_ids``.
        token_ids: what follows those blocks; a last block that is not full is left out.
        block_size: tokens per block.
        extra_key: what else the K and V depend on; prefixes with different keys share nothing.
    """
    block_bytes = block_size * TOKEN_BYTES
    num_bytes = len(token_ids) // block_size * block_bytes
    data = array("i", token_ids).tobytes()
    parent = chain[-1] if chain else _digest(extra_key)
    for start in range(0, num_bytes, block_bytes):
        parent = _digest(parent + data[start : start + block_bytes])
        chain.append(parent)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
