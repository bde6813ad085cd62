"""The one list of ops: the oracle and launcher of each op, and the choice of their path.

To add an op, add a line to ``Ops`` and an import of the launcher for type checkers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from mrv1.device import KernelPath
from mrv1.kernels import reference

if TYPE_CHECKING:
    from mrv1.kernels.attention.decode.attention import (
        paged_decode_attention as paged_decode_attention,
    )
    from mrv1.kernels.attention.decode.plan_kernel import (
        plan_decode_attention as plan_decode_attention,
    )
    from mrv1.kernels.attention.merge_states import merge_states as merge_states
    from mrv1.kernels.attention.prefill.attention import (
        paged_prefill_attention as paged_prefill_attention,
    )
    from mrv1.kernels.cache.copy_pages import copy_pages as copy_pages
    from mrv1.kernels.cache.kv_cache_write import kv_cache_write as kv_cache_write
    from mrv1.kernels.cache.qkv_cache_write import qkv_cache_write as qkv_cache_write
    from mrv1.kernels.experts.add_experts import add_experts as add_experts
    from mrv1.kernels.experts.combine_experts import combine_experts as combine_experts
    from mrv1.kernels.experts.expert_linear import expert_linear as expert_linear
    from mrv1.kernels.experts.route_experts import route_experts as route_experts
    from mrv1.kernels.layers.activation import gelu_tanh_and_mul as gelu_tanh_and_mul
    from mrv1.kernels.layers.activation import silu_and_mul as silu_and_mul
    from mrv1.kernels.layers.add_adapters import add_adapters as add_adapters
    from mrv1.kernels.layers.add_features import add_features as add_features
    from mrv1.kernels.layers.all_reduce_norm import all_reduce_norm as all_reduce_norm
    from mrv1.kernels.layers.dequantize import dequantize as dequantize
    from mrv1.kernels.layers.embed_tokens import embed_tokens as embed_tokens
    from mrv1.kernels.layers.linear import linear as linear
    from mrv1.kernels.layers.rms_norm import rms_norm as rms_norm
    from mrv1.kernels.layers.rope import apply_rope as apply_rope
    from mrv1.kernels.layers.shrink_adapters import shrink_adapters as shrink_adapters
    from mrv1.kernels.sampling.bad_words import apply_bad_words as apply_bad_words
    from mrv1.kernels.sampling.edit_logits import apply_token_bitmask as apply_token_bitmask
    from mrv1.kernels.sampling.edit_logits import edit_logits as edit_logits
    from mrv1.kernels.sampling.logprobs import top_logprobs as top_logprobs
    from mrv1.kernels.sampling.sample_tokens import sample_tokens as sample_tokens
    from mrv1.kernels.step.fetch_upload import fetch_upload as fetch_upload
    from mrv1.kernels.step.gather_tokens import gather_tokens as gather_tokens
    from mrv1.kernels.step.post_update import post_update as post_update
    from mrv1.kernels.step.scatter_segments import scatter_segments as scatter_segments

P = ParamSpec("P")
R = TypeVar("R")

MODULE_OF_OP: dict[str, str] = {}
"""The module of each op's launcher, relative to ``mrv1.kernels``."""


def _op(oracle: Callable[P, R], module: str) -> staticmethod[P, R]:
    MODULE_OF_OP[oracle.__name__] = module
    return staticmethod(oracle)


class Ops:
    """The ops of one path. Its attributes are the oracles, so that calls are type-checked."""

    add_adapters = _op(reference.add_adapters, "layers.add_adapters")
    add_experts = _op(reference.add_experts, "experts.add_experts")
    add_features = _op(reference.add_features, "layers.add_features")
    all_reduce_norm = _op(reference.all_reduce_norm, "layers.all_reduce_norm")
    apply_bad_words = _op(reference.apply_bad_words, "sampling.bad_words")
    apply_rope = _op(reference.apply_rope, "layers.rope")
    apply_token_bitmask = _op(reference.apply_token_bitmask, "sampling.edit_logits")
    combine_experts = _op(reference.combine_experts, "experts.combine_experts")
    copy_pages = _op(reference.copy_pages, "cache.copy_pages")
    dequantize = _op(reference.dequantize, "layers.dequantize")
    edit_logits = _op(reference.edit_logits, "sampling.edit_logits")
    embed_tokens = _op(reference.embed_tokens, "layers.embed_tokens")
    expert_linear = _op(reference.expert_linear, "experts.expert_linear")
    fetch_upload = _op(reference.fetch_upload, "step.fetch_upload")
    gather_tokens = _op(reference.gather_tokens, "step.gather_tokens")
    kv_cache_write = _op(reference.kv_cache_write, "cache.kv_cache_write")
    linear = _op(reference.linear, "layers.linear")
    merge_states = _op(reference.merge_states, "attention.merge_states")
    paged_decode_attention = _op(reference.paged_decode_attention, "attention.decode.attention")
    paged_prefill_attention = _op(reference.paged_prefill_attention, "attention.prefill.attention")
    plan_decode_attention = _op(reference.plan_decode_attention, "attention.decode.plan_kernel")
    post_update = _op(reference.post_update, "step.post_update")
    qkv_cache_write = _op(reference.qkv_cache_write, "cache.qkv_cache_write")
    rms_norm = _op(reference.rms_norm, "layers.rms_norm")
    route_experts = _op(reference.route_experts, "experts.route_experts")
    sample_tokens = _op(reference.sample_tokens, "sampling.sample_tokens")
    scatter_segments = _op(reference.scatter_segments, "step.scatter_segments")
    shrink_adapters = _op(reference.shrink_adapters, "layers.shrink_adapters")
    silu_and_mul = _op(reference.silu_and_mul, "layers.activation")
    gelu_tanh_and_mul = _op(reference.gelu_tanh_and_mul, "layers.activation")
    top_logprobs = _op(reference.top_logprobs, "sampling.logprobs")

    def __init__(self, op: Callable[[str], object]) -> None:
        for name in MODULE_OF_OP:
            setattr(self, name, op(name))


def launcher(name: str) -> object:
    """Import an op's module and return its launcher; ConfigError if triton is not installed."""
    return getattr(import_module(f"mrv1.kernels.{MODULE_OF_OP[name]}"), name)


def select_ops(path: KernelPath) -> Ops:
    """Return the ops of ``path``; ConfigError if it runs kernels and triton is not installed."""
    return Ops(partial(getattr, reference) if path == "reference" else launcher)
