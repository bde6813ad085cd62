"""The input of one forward pass: the ragged batch, and each layer's paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv1.kernels.cache.formats import PageFormat
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales, format_of
from mrv1.kernels.layers.contracts import FeatureRows


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The tokens of one step, ragged, in batch-row order; every tensor on the model's device.

    Rows may be padding (``seq_lens`` 0) and so may tokens (``slot_mapping`` -1): their hidden
    states are undefined, and no other row depends on them.
    """

    input_ids: torch.Tensor
    """[num_tokens] int64."""
    positions: torch.Tensor
    """[num_tokens] int64, each token's position in its request; with M-RoPE [3, num_tokens], its
    positions in time, height and width."""
    slot_mapping: torch.Tensor
    """[groups, num_tokens] int64, block * block_size + offset; -1 = write nothing."""
    block_table: torch.Tensor
    """[num_reqs, row_width] int32; -1 = no page."""
    seq_lens: torch.Tensor
    """[num_reqs] int32, tokens in the cache after this step's are written; 0 = padding row."""
    query_start_loc: torch.Tensor
    """[num_reqs + 1] int32, first token of each row (also called cu_seqlens_q)."""
    max_query_len: int
    """Longest row of this batch in tokens (an upper bound will do)."""
    query_len: int | None
    """Tokens of every row, 1 to 8, if the decode kernel takes all rows; None = it does not."""
    num_decodes: int = 0
    """Leading rows of one token each, which the decode kernel takes; other rows may have one."""
    num_tokens: int
    """Length of ``input_ids``, padding included."""
    num_reqs: int
    """Rows, padding included."""
    features: FeatureRows | None = None
    """Features in place of the embeddings of some tokens; None = no token has any."""
    adapter_slots: torch.Tensor | None = None
    """[num_tokens] int32, the slot of each token's adapter in the model's ``lora``, -1 = none;
    None = no token of this step has one."""
    is_visual: torch.Tensor | None = None
    """[num_tokens] bool: the tokens that have experts for images and videos, if the model has any;
    None = no token has."""
    attn_mask_offsets: torch.Tensor | None = None
    """[num_tokens, 2] int32, the range ``[lo, hi)`` of keys that each token sees, in rows that the
    prefill kernel takes; None = each token sees all keys up to its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """One layer's K and V buffers, and where its pages are in them."""

    k: torch.Tensor
    """Contiguous, addressed flat by ``layout``; the model's dtype, or codes with ``scales``."""
    v: torch.Tensor
    """As ``k``."""
    layout: KVLayout
    """Addresses, and each KV head's window and sink."""
    scales: KVScales | None = None
    """Scales of the codes; None = pages hold values as they are."""

    @property
    def page_format(self) -> PageFormat:
        """How pages store values."""
        return format_of(self.k.dtype, self.scales)
