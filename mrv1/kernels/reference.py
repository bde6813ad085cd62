"""The ops of ``mrv1.kernels`` in plain torch, with the same names and signatures.

This is the specification each kernel is tested against, and the path mrv1 takes on a CPU. It is
written to be read, not to be fast. Arithmetic is float32, or float64 where the input is.
"""

from __future__ import annotations

from mrv1.kernels._base.oracle import calls
from mrv1.kernels.attention.reference import (
    merge_states,
    paged_decode_attention,
    paged_prefill_attention,
    plan_decode_attention,
)
from mrv1.kernels.cache.reference import (
    copy_pages,
    kv_cache_write,
    qkv_cache_write,
    quantize_e4m3,
    token_scale,
)
from mrv1.kernels.layers.reference import (
    apply_rope,
    embed_tokens,
    linear,
    rms_norm,
    silu_and_mul,
)
from mrv1.kernels.sampling.filters import kept_tokens
from mrv1.kernels.sampling.reference import (
    apply_bad_words,
    apply_token_bitmask,
    edit_logits,
    group_size,
    gumbel_noise,
    philox4x32,
    philox_words,
    sample_tokens,
    top_logprobs,
)
from mrv1.kernels.step.reference import (
    fetch_upload,
    gather_tokens,
    post_update,
    scatter_segments,
)

__all__ = [
    "apply_bad_words",
    "apply_rope",
    "apply_token_bitmask",
    "calls",
    "copy_pages",
    "edit_logits",
    "embed_tokens",
    "fetch_upload",
    "gather_tokens",
    "group_size",
    "gumbel_noise",
    "kept_tokens",
    "kv_cache_write",
    "linear",
    "merge_states",
    "paged_decode_attention",
    "paged_prefill_attention",
    "philox4x32",
    "philox_words",
    "plan_decode_attention",
    "post_update",
    "qkv_cache_write",
    "quantize_e4m3",
    "rms_norm",
    "sample_tokens",
    "scatter_segments",
    "silu_and_mul",
    "token_scale",
    "top_logprobs",
]
