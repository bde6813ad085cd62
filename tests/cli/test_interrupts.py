"""Ctrl-C in a process of its own: the first stops the command, the second ends it at once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

ROOT = str(Path(__file__).parents[2])

HANDLED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""Undoes the SIGINT that a shell ignores in processes that it starts in the background."""

COMMAND = HANDLED + "from mrv1.cli import app; app(prog_name='mrv1')"

GENERATE = ("generate", "--model", "tiny", "--device", "cpu", "--input", "-", "--output", "-")

TELLING_STDIN = """
import sys

class Stdin:
    @property
    def buffer(self):
        print("reads", flush=True)
        return stdin.buffer

stdin, sys.stdin = sys.stdin, Stdin()
"""

HANGING_CLEANUP = (
    HANDLED
    + """
import hashlib, time
from mrv1.cli.console import second_interrupt_ends

with second_interrupt_ends():
    try:
        print("works", flush=True)
        time.sleep(1000)
    finally:
        print("cleans up", flush=True)
        {hang}
"""
)
IN_PYTHON = "while True: pass"
IN_C = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"  # minutes; Python handles no signal


@contextmanager
def _started(code: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Start a child process; give it and its stdout, and kill it in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("hang", [IN_PYTHON, IN_C])
def test_the_second_ends_a_cleanup_that_hangs(hang: str):
    with _started(HANGING_CLEANUP.format(hang=hang)) as (process, stdout):
        assert stdout.readline() == "works\n"
        process.send_signal(signal.SIGINT)
        assert stdout.readline() == "cleans up\n"
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=600)
    assert (process.returncode, rest, stderr) == (130, "", "")


def test_after_the_command_ctrl_c_is_pythons_again():
    code = (
        HANDLED
        + """
import os, time
from mrv1.cli.console import second_interrupt_ends

for _ in range(3):
    with second_interrupt_ends():
        pass
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1000)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
    )
    with _started(code) as (process, _):
        printed, stderr = process.communicate(timeout=600)
    assert (process.returncode, printed, stderr) == (0, "interrupted\n" * 3, "")


@pytest.mark.parametrize("number", [1, 2])
def test_generate_keeps_finished_results_and_prints_no_traceback(number: int):
    """The first request ends at once; the others take far longer than the test."""
    requests = [{"prompt": "ROMEO:", "sampling_params": {"max_tokens": 1}}]
    requests += [{"prompt": "ROMEO:", "sampling_params": {"max_tokens": 2000}}] * 40
    with _started(COMMAND, *GENERATE, "--ignore-eos") as (process, stdout):
        assert process.stdin is not None
        process.stdin.write("".join(json.dumps(request) + "\n" for request in requests))
        process.stdin.close()
        process.stdin = None
        first = json.loads(stdout.readline())
        for _ in range(number):
            process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=600)
    assert process.returncode == 130
    assert (first["line"], len(first["token_ids"])) == (1, 1)
    assert rest == ""
    assert "Traceback" not in stderr
    assert len(stderr.splitlines()) == 1  # the start line


def test_generate_can_be_interrupted_while_it_waits_for_stdin():
    with _started(TELLING_STDIN + COMMAND, *GENERATE) as (process, stdout):
        assert stdout.readline() == "reads\n"
        process.send_signal(signal.SIGINT)
        printed, stderr = process.communicate(timeout=600)
    assert (process.returncode, printed, stderr) == (130, "", "")
