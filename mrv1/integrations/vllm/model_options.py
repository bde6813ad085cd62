"""Keys of mrv1's options in vLLM, and the registration of models that have some, without them."""

from __future__ import annotations

HEAD_POLICY = "head_policy"
"""The key of vLLM's ``--additional-config`` that names a policy's file."""

SAMPLER = "sampler"
"""The key that chooses who draws: "vllm", which is the default, or "mrv1"."""

RANK_INVARIANT = "rank_invariant"
"""The key that asks the worker for ``rank_invariant``, with ``VLLM_BATCH_INVARIANT``."""

MODULE = "mrv1.integrations.vllm.models"

ARCHITECTURES = {
    "Ernie4_5ForCausalLM": "ernie45",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""vLLM's architectures that take the options, with ``Mrv1`` in front of the name, and the modules
of their classes."""


def register() -> None:
    """Register the classes of ``models``, which vLLM imports when a model needs one."""
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in ARCHITECTURES:
        name = f"Mrv1{architecture}"
        ModelRegistry.register_model(name, f"{MODULE}:{name}")
