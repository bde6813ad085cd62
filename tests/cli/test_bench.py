"""``mrv1 bench``: the benchmarks of a checkout; elsewhere, where they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import mrv1 as package
from tests.cli.conftest import Mrv1

REPO = Path(__file__).resolve().parents[2]


def test_in_a_checkout_it_runs_the_benchmarks(mrv1: Mrv1, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", ["mrv1"])
    result = mrv1("bench", "attention", "--help")
    assert result.exit_code == 0
    assert "python -m benchmarks attention" in result.stdout
    assert "--cells" in result.stdout
    assert sys.path[0] == str(REPO)
    refused = mrv1("bench", "attention", "--cells", "none")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: cells: expected BATCHxCONTEXT such as 8x4096")


def test_elsewhere_it_says_where_the_benchmarks_are(
    mrv1: Mrv1, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(package, "__file__", str(tmp_path / "mrv1" / "__init__.py"))
    (tmp_path / "benchmarks").mkdir()  # another project's
    result = mrv1("bench", "report")
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: mrv1 bench: expected mrv1 to run from a checkout of its repository, got "
        f"{tmp_path}; the package has no benchmarks: in a checkout, run python -m benchmarks\n"
    )
