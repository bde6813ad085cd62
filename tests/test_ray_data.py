"""The example of batch inference with Ray Data, on CPUs: its rows equal mrv1's own outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from mrv1 import LLM, SamplingParams

if find_spec("ray") is None:
    pytest.skip("needs Ray: make full-ray", allow_module_level=True)

REPO = Path(__file__).parents[1]
# What Ray waits for by default (30 s) does not suffice on a busy machine.
LIMITS = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
}


@pytest.mark.full
def test_two_engines_generate_every_row_and_a_bad_one_fails_alone(tmp_path: Path):
    prompts = [f"Act {number}.\nROMEO:" for number in range(10)]
    long = "ROMEO " * 3000
    source, target = tmp_path / "prompts.jsonl", tmp_path / "outputs"
    rows = [{"id": str(index), "prompt": text} for index, text in enumerate([*prompts, long])]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, REPO / "examples/ray_batch.py", source, target]
    command += ["--model", "tiny", "--engines", "2", "--gpus", "0", "--cpus", "0.25"]
    command += ["--dtype", "float64", "--max-tokens", "12", "--batch-size", "4"]
    path = os.pathsep.join([str(REPO), *filter(None, sys.path)])
    done = subprocess.run(
        command, env=os.environ | LIMITS | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    files = sorted(target.glob("*.json*"))
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    found.sort(key=lambda row: int(row["id"]))
    assert [(row["id"], row["prompt"]) for row in found] == [
        (row["id"], row["prompt"]) for row in rows
    ]
    with LLM("tiny", device="cpu", dtype="float64") as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
    assert [row["text"] for row in found] == [*expected, ""]
    assert [row["error"] for row in found[:-1]] == [""] * len(prompts)
    assert "max_model_len" in found[-1]["error"]
