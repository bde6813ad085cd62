"""The registration of mrv1's attention backend: ``--attention-backend CUSTOM``.

Every process of vLLM loads its plug-ins: the backend's module is only imported where it is used.
"""

from __future__ import annotations

from mrv1.errors import ConfigError

BACKEND = "mrv1.integrations.vllm.attention_backend.Mrv1AttentionBackend"


def register() -> None:
    """Make ``CUSTOM`` in vLLM's registry name mrv1's attention backend; again is fine.

    ConfigError: another plug-in has taken the slot.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    slot = AttentionBackendEnum.CUSTOM
    if slot.is_overridden() and slot.get_path() != BACKEND:
        raise ConfigError(
            f"attention backend CUSTOM: expected an empty slot, got {slot.get_path()}; name in "
            "VLLM_PLUGINS the plug-ins to load"
        )
    register_backend(slot, BACKEND)
