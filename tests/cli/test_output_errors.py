"""A full disk, a closed stdout and a pipe without a reader: one line or none, no traceback."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest
import typer

from mrv1.cli import app
from mrv1.cli.console import show
from tests.cli.conftest import Mrv1

FULL = Path("/dev/full")
NO_SPACE = os.strerror(errno.ENOSPC)
TINY = ["generate", "--model", "tiny", "--device", "cpu", "--num-kv-blocks", "16"]

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="/dev/full is Linux's")


def _abandoned_pipe() -> IO[str]:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def _full() -> IO[str]:
    return FULL.open("w")


Run = Callable[[IO[str] | None, list[str]], str]


@pytest.fixture
def run_onto(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command with a failing stdout and returns its stderr."""

    def run(stdout: IO[str] | None, arguments: list[str]) -> str:
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer replaces it
        monkeypatch.setattr(sys, "stdout", stdout)
        stderr = sys.stderr
        with pytest.raises(SystemExit) as ended:
            app(arguments)
        assert ended.value.code == 1
        monkeypatch.setattr(sys, "stderr", stderr)  # typer wraps it where a pipe has broken
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        [*TINY, "--prompt", "ROMEO:", "--max-tokens", "4"],
        ["--version"],
        ["doctor", "--json"],
        ["--help"],
        ["generate", "--help"],
        ["bench", "sampler", "--help"],
        ["bench"],
    ],
)
def test_a_full_stdout_gives_one_error_line(run_onto: Run, arguments: list[str]):
    stdout = _full()
    stderr = run_onto(stdout, arguments)
    assert stderr.endswith(f"error: cannot write stdout: {NO_SPACE}\n")
    assert stderr.count("error") == 1
    assert stdout.closed  # else the interpreter would write the rest at its end, and fail


def test_a_table_on_a_full_stdout_gives_one_error_line(run_onto: Run):
    assert run_onto(_full(), ["doctor"]) == f"error: cannot write stdout: {NO_SPACE}\n"


def test_a_closed_stdout_gives_one_error_line(run_onto: Run):
    stderr = run_onto(None, [*TINY, "--prompt", "ROMEO:", "--max-tokens", "4"])
    assert stderr.endswith(f"error: cannot write stdout: {os.strerror(errno.EBADF)}\n")


def test_a_pipe_without_a_reader_ends_the_command_silently(run_onto: Run):
    with suppress(BrokenPipeError), _abandoned_pipe() as stdout:
        assert run_onto(stdout, ["--version"]) == ""


def test_text_that_stdout_cannot_encode_gives_one_error_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    with pytest.raises(typer.Exit) as ended:
        show("\u4f60")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err.startswith("error: cannot write stdout: 'latin-1' codec can't")


def test_an_output_file_on_a_full_disk_gives_one_error_line(
    mrv1: Mrv1, checkpoint: str, tmp_path: Path
):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt_token_ids": [5]}\n{"prompt_token_ids": [6]}\n')
    result = mrv1(
        "generate", "--model", checkpoint, "--device", "cpu", "--num-kv-blocks", "16",
        "--input", source, "--output", FULL,
    )  # fmt: skip
    assert result.exit_code == 1
    assert result.stdout == ""
    _, *errors = result.stderr.splitlines()  # the first is the start line
    assert errors == [f"error: cannot write --output '/dev/full': {NO_SPACE}"]


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_a_process_with_a_full_stdout_ends_with_one_line(argument: str):
    """The interpreter prints no error of its own when it exits."""
    with FULL.open("w") as stdout:
        run = subprocess.run(
            [sys.executable, "-m", "mrv1", argument],
            cwd=Path(__file__).resolve().parents[2],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (run.returncode, run.stderr) == (1, f"error: cannot write stdout: {NO_SPACE}\n")
