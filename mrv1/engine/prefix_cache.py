"""What names a KV block by its content: a chain of digests over full blocks of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 16
"""128 bits: two different prefixes share a digest with a probability nobody will see."""


def extend_chain(
    chain: list[bytes],
    token_ids: Sequence[int] | npt.NDArray[np.int32],
    block_size: int,
    extra_key: bytes = b"",
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
    data = np.asarray(token_ids, dtype=np.int32).tobytes()
    block_bytes = block_size * np.dtype(np.int32).itemsize
    parent = chain[-1] if chain else blake2b(extra_key, digest_size=DIGEST_BYTES).digest()
    for end in range(block_bytes, len(data) + 1, block_bytes):
        parent = blake2b(parent + data[end - block_bytes : end], digest_size=DIGEST_BYTES).digest()
        chain.append(parent)
