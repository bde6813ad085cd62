"""The ops that a step calls, and the choice of the path that runs them: oracles or kernels."""

from __future__ import annotations

from types import ModuleType

from mrv1 import kernels
from mrv1.device import KernelPath
from mrv1.kernels import reference


class Ops:
    """The ops of one path.

    The class has the oracles, whose signatures the kernels share: so calls are type-checked.

    Args:
        source: where each op is taken from: ``mrv1.kernels`` or ``mrv1.kernels.reference``.
    """

    apply_bad_words = staticmethod(reference.apply_bad_words)
    apply_rope = staticmethod(reference.apply_rope)
    apply_token_bitmask = staticmethod(reference.apply_token_bitmask)
    edit_logits = staticmethod(reference.edit_logits)
    embed_tokens = staticmethod(reference.embed_tokens)
    fetch_upload = staticmethod(reference.fetch_upload)
    gather_tokens = staticmethod(reference.gather_tokens)
    kv_cache_write = staticmethod(reference.kv_cache_write)
    linear = staticmethod(reference.linear)
    paged_decode_attention = staticmethod(reference.paged_decode_attention)
    paged_prefill_attention = staticmethod(reference.paged_prefill_attention)
    plan_decode_attention = staticmethod(reference.plan_decode_attention)
    post_update = staticmethod(reference.post_update)
    qkv_cache_write = staticmethod(reference.qkv_cache_write)
    rms_norm = staticmethod(reference.rms_norm)
    sample_tokens = staticmethod(reference.sample_tokens)
    scatter_segments = staticmethod(reference.scatter_segments)
    silu_and_mul = staticmethod(reference.silu_and_mul)
    top_logprobs = staticmethod(reference.top_logprobs)

    def __init__(self, source: ModuleType) -> None:
        for name in OP_NAMES:
            setattr(self, name, getattr(source, name))


OP_NAMES = tuple(name for name, op in vars(Ops).items() if isinstance(op, staticmethod))


def select_ops(path: KernelPath) -> Ops:
    """Return the ops of ``path`` (see ``mrv1.device.kernel_path``).

    Raises:
        ConfigError: they are kernels, and triton is not installed.
    """
    return Ops(reference if path == "reference" else kernels)
