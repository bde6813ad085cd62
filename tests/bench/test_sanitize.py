"""The compute-sanitizer script: it runs every kernel, and reads the tool's summary."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import sanitize
from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.attention.prefill import attention, choice


def test_every_launcher_is_run():
    assert set(sanitize.OPS) == {
        name for name in kernels.__all__ if name.islower() and name != "reference"
    }


@pytest.mark.gpu
def test_the_script_launches_every_kernel_with_valid_arguments(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys
):
    if device.type == "cpu":  # checks the arguments at least
        monkeypatch.setattr(sanitize, "kernels", reference)
    sanitize.run(device)
    assert capsys.readouterr().out.splitlines() == [f"ran {name}" for name in sanitize.OPS]


def test_thresholds_are_low_only_while_the_kernels_run(monkeypatch: pytest.MonkeyPatch):
    def thresholds(*_: object) -> list[torch.Tensor]:
        most_queries = max(row.min_queries for row in choice.KERNELS)
        return [torch.tensor([attention.MIN_SPLIT_STEPS, most_queries])]

    (before,) = thresholds()
    during = []
    monkeypatch.setattr(sanitize, "OPS", {"op": lambda *_: during.extend(thresholds()) or []})
    sanitize.run(torch.device("cpu"))
    assert [each.tolist() for each in during] == [[1, 0]] * 2
    assert thresholds()[0].tolist() == before.tolist()
    assert before.min() > 1


def _said(tool: str, found: int) -> str:
    ran = "".join(f"ran {name}\n" for name in sanitize.OPS)
    if tool == "memcheck":
        return f"========= COMPUTE-SANITIZER\n{ran}========= ERROR SUMMARY: {found} errors\n"
    return f"{ran}========= RACECHECK SUMMARY: {found} hazards displayed (0 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("memcheck", "racecheck", "planted", "exit_code"),
    [(0, 0, 3, 0), (1, 0, 3, 1), (0, 2, 3, 1), (0, 0, 0, 1)],
)
def test_the_script_passes_only_if_clean_and_the_planted_launch_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memcheck: int,
    racecheck: int,
    planted: int,
    exit_code: int,
):
    found = {"memcheck": memcheck, "racecheck": racecheck}

    def tool(command, *, env, **options):
        name = command[2]
        assert command[:2] == ["compute-sanitizer", "--tool"]
        assert command[3] == sys.executable
        assert env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        controls = {"--planted": planted, "--handoff": 4}
        output = _said(name, controls.get(command[-1], found[name]))
        return subprocess.CompletedProcess(command, 0, stdout=output)

    monkeypatch.setattr(sanitize.subprocess, "run", tool)
    monkeypatch.setattr(sanitize, "provenance", lambda *_: {})
    hopper = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(sanitize, "device_info", lambda _: hopper)
    target = tmp_path / "sanitize.json"
    assert sanitize.main([str(target)]) == exit_code
    result = json.loads(target.read_text("utf-8"))
    tools = result["tools"]
    assert {name: said["findings"] for name, said in tools.items()} == found
    assert (result["planted"]["findings"], result["handoff"]["findings"]) == (planted, 4)
    assert tools["racecheck"]["summary"].startswith("RACECHECK SUMMARY:")


def test_hazards_are_counted_by_kernel(monkeypatch: pytest.MonkeyPatch):
    hazard = (
        "========= Error: Race reported between Read access at {0}+0x290 in a.py:9\n"
        "=========     and Write access at {0}+0xff80 in a.py:9 [33 hazards]\n"
    )
    said = "".join(map(hazard.format, ("_queue_kernel", "_other_kernel", "_queue_kernel")))
    said += "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n"
    done = subprocess.CompletedProcess([], 0, stdout=said)
    monkeypatch.setattr(sanitize.subprocess, "run", lambda *_, **__: done)
    found = sanitize.sanitize("racecheck", "--run")
    assert (found["findings"], found["output"]) == (3, said)
    assert found["hazards"] == {"_queue_kernel": 2, "_other_kernel": 1}


def test_a_tool_without_a_summary_is_an_error(monkeypatch: pytest.MonkeyPatch):
    done = subprocess.CompletedProcess([], 1, stdout="Device not supported")
    monkeypatch.setattr(sanitize.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(RuntimeError, match=r"expected a summary, got\nDevice not supported"):
        sanitize.sanitize("memcheck", "--run")
