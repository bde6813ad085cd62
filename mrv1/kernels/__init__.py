"""Triton kernels as plain functions on torch tensors; each has an oracle in :mod:`.reference`.

Every op launches on the current stream, waits for nothing and can be captured in a CUDA graph.
Arguments are checked on the host: shape, dtype, device and strides, never values on the device.

On a machine without a GPU set ``TRITON_INTERPRET=1`` before the process starts, or call
``mrv1.kernels.reference``, which has the same functions in plain torch. An op is imported, and
triton with it, when it is first used: without triton the rest works.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mrv1.kernels import reference
from mrv1.kernels.attention.plan import DecodePlan
from mrv1.kernels.attention.splits import PrefillSplits
from mrv1.kernels.cache.contracts import QKNorm, Rope
from mrv1.kernels.cache.kv_layout import HeadRole, KVLayout
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.kernels.sampling.contracts import BadWords, History, LogitEdits, TopLogprobs
from mrv1.kernels.step.contracts import AppendedTokens, GatheredTokens, RequestSlots, SlotTables

if TYPE_CHECKING:
    from mrv1.kernels.attention.decode_attention import paged_decode_attention
    from mrv1.kernels.attention.decode_plan import plan_decode_attention
    from mrv1.kernels.attention.merge_states import merge_states
    from mrv1.kernels.attention.prefill_attention import paged_prefill_attention
    from mrv1.kernels.cache.copy_pages import copy_pages
    from mrv1.kernels.cache.kv_cache_write import kv_cache_write
    from mrv1.kernels.cache.qkv_cache_write import qkv_cache_write
    from mrv1.kernels.layers.activation import silu_and_mul
    from mrv1.kernels.layers.embed_tokens import embed_tokens
    from mrv1.kernels.layers.linear import linear
    from mrv1.kernels.layers.rms_norm import rms_norm
    from mrv1.kernels.layers.rope import apply_rope
    from mrv1.kernels.sampling.bad_words import apply_bad_words
    from mrv1.kernels.sampling.edit_logits import apply_token_bitmask, edit_logits
    from mrv1.kernels.sampling.logprobs import top_logprobs
    from mrv1.kernels.sampling.sample_tokens import sample_tokens
    from mrv1.kernels.step.fetch_upload import fetch_upload
    from mrv1.kernels.step.gather_tokens import gather_tokens
    from mrv1.kernels.step.post_update import post_update
    from mrv1.kernels.step.scatter_segments import scatter_segments

__all__ = [
    "AppendedTokens",
    "BadWords",
    "DecodePlan",
    "GatheredTokens",
    "HeadRole",
    "History",
    "KVLayout",
    "KVScales",
    "LogitEdits",
    "PrefillSplits",
    "QKNorm",
    "RequestSlots",
    "Rope",
    "SlotTables",
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

_MODULE_OF_OP = {
    "apply_bad_words": "sampling.bad_words",
    "apply_rope": "layers.rope",
    "apply_token_bitmask": "sampling.edit_logits",
    "copy_pages": "cache.copy_pages",
    "edit_logits": "sampling.edit_logits",
    "embed_tokens": "layers.embed_tokens",
    "fetch_upload": "step.fetch_upload",
    "gather_tokens": "step.gather_tokens",
    "kv_cache_write": "cache.kv_cache_write",
    "linear": "layers.linear",
    "merge_states": "attention.merge_states",
    "paged_decode_attention": "attention.decode_attention",
    "paged_prefill_attention": "attention.prefill_attention",
    "plan_decode_attention": "attention.decode_plan",
    "post_update": "step.post_update",
    "qkv_cache_write": "cache.qkv_cache_write",
    "rms_norm": "layers.rms_norm",
    "sample_tokens": "sampling.sample_tokens",
    "scatter_segments": "step.scatter_segments",
    "silu_and_mul": "layers.activation",
    "top_logprobs": "sampling.logprobs",
}
"""Below this package; the imports above, for type checkers, say the same."""


def __getattr__(name: str) -> object:
    """Import an op.

    Raises:
        AttributeError: there is none of this name.
        ConfigError: triton is not installed.
    """
    if name not in _MODULE_OF_OP:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    op = getattr(import_module(f"{__name__}.{_MODULE_OF_OP[name]}"), name)
    globals()[name] = op
    return op


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
