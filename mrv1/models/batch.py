"""The input of one forward pass: the ragged batch, and each layer's paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv1.errors import ConfigError
from mrv1.kernels.cache.contracts import hadamard_block
from mrv1.kernels.cache.formats import FORMATS, PageFormat
from mrv1.kernels.cache.kv_layout import ALIGNMENT_BYTES, KVLayout
from mrv1.kernels.cache.kv_scales import KVScales, format_of
from mrv1.kernels.layers.contracts import FeatureRows
from mrv1.models.config import ModelConfig


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


def check_codes(kv_cache_dtype: str, config: ModelConfig) -> None:
    """Raise ConfigError unless the vectors of a model's heads can be stored as these codes."""
    codes = FORMATS.get(kv_cache_dtype)
    if codes is None or codes.codes_per_element == 1:
        return
    multiple = ALIGNMENT_BYTES * codes.codes_per_element // codes.dtype.itemsize
    if config.head_dim % multiple:
        raise ConfigError(
            f"kv_cache_dtype: expected heads of a multiple of {multiple} dimensions with "
            f"{kv_cache_dtype!r}, got {config.head_dim}; choose 'fp8_e4m3' or 'auto'"
        )
    for rope in filter(None, (config.rope, config.window_rope)):
        if hadamard_block(config.head_dim, rope.rotary_dim) == 1:
            raise ConfigError(
                f"kv_cache_dtype: expected a multiple of 4 rotated dimensions with "
                f"{kv_cache_dtype!r}, got {rope.rotary_dim}; choose 'fp8_e4m3' or 'auto'"
            )
