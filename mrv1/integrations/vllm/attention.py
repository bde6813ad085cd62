"""Registers mrv1's attention backend, ``--attention-backend CUSTOM``; imports it if used."""

from __future__ import annotations

from mrv1.errors import ConfigError

BACKEND = "mrv1.integrations.vllm.attention_backend.Mrv1AttentionBackend"


def register() -> None:
    """Make vLLM's ``CUSTOM`` name mrv1's backend; repeatable; ConfigError if the slot is taken."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    slot = AttentionBackendEnum.CUSTOM
    if slot.is_overridden() and slot.get_path() != BACKEND:
        raise ConfigError(
            f"attention backend CUSTOM: expected an empty slot, got {slot.get_path()}; name in "
            "VLLM_PLUGINS the plug-ins to load"
        )
    register_backend(slot, BACKEND)
