"""Imports vLLM, where it is, before any test does: on a CPU its imports warn of much."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

if find_spec("vllm") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tests.integrations.vllm.model_worker
        import tests.integrations.vllm.serving  # noqa: F401
