"""Fixtures: the benchmarks' command run in this process, and a checkpoint."""

from __future__ import annotations

import pytest

from benchmarks.cli.app import app
from tests.cli.conftest import Mrv1, checkpoint, runner_of  # noqa: F401 - a fixture


@pytest.fixture
def run_bench() -> Mrv1:
    """Return a function that runs the command and raises any exception it does not report."""
    return runner_of(app)
