"""The entry point of the group ``vllm.general_plugins``, which every process of vLLM calls."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec

from mrv1.errors import ConfigError
from mrv1.integrations.vllm.versions import interface

logger = logging.getLogger(__name__)

ATTENTION_BACKEND = "mrv1.integrations.vllm.attention"
"""Module of the attention backend; its ``register`` names the backend to vLLM."""


def register() -> None:
    """Register what mrv1 adds to vLLM; a process may call it again.

    With a vLLM outside the tested versions nothing is registered: vLLM itself must still start
    where mrv1 happens to be installed, so the reason is a warning here, and an error when mrv1's
    worker or attention backend is used.
    """
    try:
        interface()
    except ConfigError as error:
        logger.warning("mrv1 registers nothing: %s", error)
        return
    if find_spec(ATTENTION_BACKEND) is not None:
        import_module(ATTENTION_BACKEND).register()
