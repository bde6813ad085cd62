"""Provenance of a result: the commit is mrv1's own or unknown, never another project's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from mrv1 import provenance
from mrv1.provenance import git_commit, version_of


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of one commit that mrv1 seems to run from."""
    _git(tmp_path, "init", "-q")
    (tmp_path / "mrv1").mkdir()
    module = tmp_path / "mrv1" / "__init__.py"
    module.write_text("1")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "one")
    monkeypatch.setattr(provenance.mrv1, "__file__", str(module))
    return tmp_path


def test_the_commit_of_a_clean_checkout_is_its_head(checkout: Path):
    (checkout / "untracked").write_text("")
    assert git_commit() == _git(checkout, "rev-parse", "HEAD")


def test_a_checkout_with_changes_is_marked_dirty(checkout: Path):
    (checkout / "mrv1" / "__init__.py").write_text("2")
    assert git_commit() == _git(checkout, "rev-parse", "HEAD") + "-dirty"


def test_the_commit_of_a_copy_inside_another_checkout_is_unknown(checkout: Path, monkeypatch):
    installed = checkout / "venv" / "mrv1" / "__init__.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(provenance.mrv1, "__file__", str(installed))
    assert git_commit() == "unknown"


def test_the_commit_outside_of_git_is_unknown(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(provenance.mrv1, "__file__", str(tmp_path / "mrv1" / "__init__.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() == "unknown"


def test_the_commit_without_the_git_command_is_unknown(checkout: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(checkout))
    assert git_commit() == "unknown"


def test_a_given_commit_has_precedence(checkout: Path):
    found = provenance.provenance(torch.device("cpu"), "abc")
    assert found["commit"] == "abc"
    assert found["device"] == {
        "name": "cpu",
        "type": "cpu",
        "capability": None,
        "num_sms": 0,
        "total_memory_bytes": 0,
    }
    assert found["driver"] is None
    assert provenance.provenance(torch.device("cpu"), None)["commit"] == git_commit()


def test_the_version_of_a_missing_package_is_none():
    assert version_of("pytest") == pytest.__version__
    assert version_of("no-such-package-here") is None
