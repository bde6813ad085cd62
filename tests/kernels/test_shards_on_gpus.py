"""Draws from shards of logits on several GPUs, one process each."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 150


@pytest.mark.timeout(TIMEOUT_SECONDS + 30)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(2, marks=pytest.mark.multi_gpu(2)),
        pytest.param(4, marks=pytest.mark.multi_gpu(4)),
    ],
)
def test_gpus_draw_as_one_does(size):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.draws_on_gpus", *map(str, (rank, size, port))],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [each.communicate(timeout=TIMEOUT_SECONDS)[0] for each in processes]
    finally:
        for each in processes:
            each.kill()
    assert [each.returncode for each in processes] == [0] * size, "\n".join(outputs)[-4000:]
