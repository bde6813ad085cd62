"""Triton kernels as plain functions on torch tensors; each has an oracle in :mod:`.reference`.

Every op launches on the current stream, waits for nothing and can be captured in a CUDA graph.
Arguments are checked on the host: shape, dtype, device and strides, never values on the device.

On a machine without a GPU set ``TRITON_INTERPRET=1`` before the process starts, or call
``mrv1.kernels.reference``, which has the same functions in plain torch.
"""

from __future__ import annotations

from mrv1.kernels import reference
from mrv1.kernels.attention.decode_attention import paged_decode_attention
from mrv1.kernels.attention.decode_plan import DecodePlan, plan_decode_attention
from mrv1.kernels.attention.merge_states import merge_states
from mrv1.kernels.attention.prefill_attention import PrefillSplits, paged_prefill_attention
from mrv1.kernels.cache.copy_pages import copy_pages
from mrv1.kernels.cache.kv_cache_write import kv_cache_write
from mrv1.kernels.cache.kv_layout import HeadRole, KVLayout
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.kernels.cache.qkv_cache_write import qkv_cache_write
from mrv1.kernels.layers.activation import silu_and_mul
from mrv1.kernels.layers.embed_tokens import embed_tokens
from mrv1.kernels.layers.linear import linear
from mrv1.kernels.layers.rms_norm import rms_norm
from mrv1.kernels.layers.rope import apply_rope
from mrv1.kernels.sampling.bad_words import apply_bad_words
from mrv1.kernels.sampling.edit_logits import apply_token_bitmask, edit_logits
from mrv1.kernels.sampling.logprobs import TopLogprobs, top_logprobs
from mrv1.kernels.sampling.sample_tokens import sample_tokens
from mrv1.kernels.step.fetch_upload import fetch_upload
from mrv1.kernels.step.gather_tokens import gather_tokens
from mrv1.kernels.step.post_update import post_update
from mrv1.kernels.step.scatter_segments import scatter_segments

__all__ = [
    "DecodePlan",
    "HeadRole",
    "KVLayout",
    "KVScales",
    "PrefillSplits",
    "TopLogprobs",
    "apply_bad_words",
    "apply_rope",
    "apply_token_bitmask",
    "copy_pages",
    "edit_logits",
    "embed_tokens",
    "fetch_upload",
    "gather_tokens",
    "kv_cache_write",
    "linear",
    "merge_states",
    "paged_decode_attention",
    "paged_prefill_attention",
    "plan_decode_attention",
    "post_update",
    "qkv_cache_write",
    "reference",
    "rms_norm",
    "sample_tokens",
    "scatter_segments",
    "silu_and_mul",
    "top_logprobs",
]
