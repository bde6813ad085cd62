"""Fixtures: a checkpoint without a tokenizer, and the command run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from mrv1.cli import app
from tests.models.families import tiny_checkpoint

Mrv1 = Callable[..., Result]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Qwen3 with a vocabulary of 160 and a context of 512; token ids only."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_checkpoint(folder, "qwen3")
    return str(folder)


def runner_of(app: typer.Typer) -> Mrv1:
    """Return a function that runs a command line and raises any exception it does not report."""

    def run(*arguments: str | Path) -> Result:
        result = CliRunner().invoke(
            app, [str(argument) for argument in arguments], env={"COLUMNS": "200"}
        )
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def mrv1() -> Mrv1:
    """Return a function that runs mrv1's command."""
    return runner_of(app)
