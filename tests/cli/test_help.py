"""The first things that a newcomer types, and what they say: short help, and where things are."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mrv1.cli import app
from mrv1.config import EngineConfig
from tests.cli.conftest import Mrv1

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_help_is_a_screen_and_another_option_shows_all(command):
    def lines(option: str) -> list[str]:
        result = CliRunner().invoke(app, [command, option], env={"COLUMNS": "80"})
        assert result.exit_code == 0
        return result.stdout.splitlines()

    brief, whole = lines("--help"), lines("--help-all")
    assert len(brief) <= 40
    assert any("--temperature" in line for line in brief)
    names = EngineConfig.__dataclass_fields__.keys() - {"model", "seed", "head_policy"}
    for name in names:
        assert any(f"--{name.replace('_', '-')[:15]}" in line for line in whole), name


def test_serve_says_which_command_serves(mrv1: Mrv1):
    result = mrv1("serve", "Qwen/Qwen3-0.6B")
    assert result.exit_code == 2
    assert "vllm serve MODEL --worker-cls mrv1.integrations.vllm.Worker" in result.stderr


def test_calibrate_names_every_kind_of_model(mrv1: Mrv1):
    assert "GGUF file" in mrv1("calibrate", "--help").stdout


def test_the_example_with_ray_shows_its_help_without_ray(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(sys, "argv", ["ray_batch.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPO / "examples" / "ray_batch.py"), run_name="__main__")
    assert ended.value.code == 0
    assert "--engines" in capsys.readouterr().out
