"""The registration of vLLM's models with head policies, which imports none of them."""

from __future__ import annotations

OPTION = "head_policy"
"""The key of vLLM's ``--additional-config`` that names a policy's file."""

MODULE = "mrv1.integrations.vllm.head_wise"

ARCHITECTURES = (
    "Ernie4_5ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
"""vLLM's architectures that ``HeadWise`` in front of the name makes head-wise."""


def register() -> None:
    """Register the classes of ``head_wise``, which vLLM imports when a model needs one."""
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in ARCHITECTURES:
        name = f"HeadWise{architecture}"
        ModelRegistry.register_model(name, f"{MODULE}:{name}")
