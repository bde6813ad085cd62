"""An LLM and the commands on the CPU where triton is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrv1 import LLM, SamplingParams
from mrv1.device import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="needs the path of the oracles")

REPO = Path(__file__).resolve().parents[2]

GENERATE = """
import json
import sys

sys.modules["triton"] = None  # importing triton fails

import mrv1.cli  # every command is imported
from mrv1 import LLM, SamplingParams, kernels

prompts, params = json.loads(sys.argv[1])
with LLM("tiny", device="cpu") as llm:
    outputs = llm.generate(prompts, [SamplingParams(**each) for each in params])
error = ""
assert "linear" in dir(kernels)
try:
    kernels.linear
except ValueError as caught:
    error = f"{type(caught).__name__}: {caught}"
print(json.dumps({"token_ids": [list(o.outputs[0].token_ids) for o in outputs], "error": error}))
"""

PROMPTS = ["Once upon a time", "The"]
PARAMS = [
    {"max_tokens": 6, "ignore_eos": True},
    {"max_tokens": 6, "ignore_eos": True, "seed": 3, "temperature": 0.8, "logprobs": 2},
]


def test_an_llm_on_the_cpu_needs_no_triton():
    """A process that cannot import triton draws the tokens of this process."""
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, json.dumps([PROMPTS, PARAMS])],
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    with LLM("tiny", device="cpu") as llm:
        outputs = llm.generate(PROMPTS, [SamplingParams(**each) for each in PARAMS])
    assert got["token_ids"] == [list(output.outputs[0].token_ids) for output in outputs]
    assert [len(tokens) for tokens in got["token_ids"]] == [6, 6]
    assert got["error"].startswith(
        "ConfigError: mrv1.kernels: expected the package triton to be installed, got "
    )
    assert got["error"].endswith("; pip install triton")
