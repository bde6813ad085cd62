"""An LLM and the commands on the CPU where triton is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrv1.device import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="needs the path of the oracles")

REPO = Path(__file__).resolve().parents[2]

GENERATE = """
import json
import sys

if sys.argv[1] == "without":
    sys.modules["triton"] = None  # importing triton fails

import mrv1.cli  # every command is imported
from mrv1 import LLM, SamplingParams, kernels

greedy = SamplingParams(max_tokens=6, ignore_eos=True)
seeded = SamplingParams(max_tokens=6, ignore_eos=True, seed=3, temperature=0.8, logprobs=2)
with LLM("tiny", device="cpu") as llm:
    outputs = llm.generate(["Once upon a time", "The"], [greedy, seeded])
error = ""
if sys.argv[1] == "without":
    assert "linear" in dir(kernels)
    try:
        kernels.linear
    except ValueError as caught:
        error = f"{type(caught).__name__}: {caught}"
print(json.dumps({"token_ids": [list(o.outputs[0].token_ids) for o in outputs], "error": error}))
"""


def _generate(triton: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, triton],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_llm_on_the_cpu_needs_no_triton():
    got, want = _generate("without"), _generate("with")
    assert got["token_ids"] == want["token_ids"]
    assert [len(tokens) for tokens in got["token_ids"]] == [6, 6]
    assert got["error"].startswith(
        "ConfigError: mrv1.kernels: expected the package triton to be installed, got "
    )
    assert got["error"].endswith("; pip install triton")
