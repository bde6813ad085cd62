"""The entry point of the group ``vllm.general_plugins``, which every process of vLLM calls."""

from __future__ import annotations

import logging

from mrv1.errors import ConfigError
from mrv1.integrations.vllm import attention, model_options
from mrv1.integrations.vllm.versions import interface

logger = logging.getLogger(__name__)


def register() -> None:
    """Register what mrv1 adds to vLLM; a process may call it again.

    An untested vLLM, or a taken slot, is only a warning: vLLM must still start where mrv1 happens
    to be installed. mrv1's worker and attention backend raise it.
    """
    try:
        interface()
        attention.register()
        model_options.register()
        from mrv1.integrations.vllm import made_up_weights  # noqa: F401 - registers its loader
    except ConfigError as error:
        logger.warning("mrv1 registers nothing: %s", error)
