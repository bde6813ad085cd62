"""``vllm serve`` in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.integrations.vllm.plugins import write_plugins

START_SECONDS = 900
STOP_SECONDS = 60
IN_PROCESS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")
"""What ``serving.py`` sets for engines in the tests' own process."""


@contextmanager
def vllm_server(folder: Path, model: str, *options: str, on_cpu: bool) -> Iterator[str]:
    """Serve a model on a free port of this machine; yield the server's address.

    Args:
        folder: for the log and the plug-ins.
        model: a checkpoint.
        options: of ``vllm serve``.
        on_cpu: whether vLLM takes the machine's CPU for its device.
    """
    write_plugins(folder, on_cpu=on_cpu)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    environment = {name: value for name, value in os.environ.items() if name not in IN_PROCESS}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, sys.path)])
    address = f"http://127.0.0.1:{port}"
    with (folder / "log").open("w+") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait(server, address, folder / "log")
            yield address
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(STOP_SECONDS)
            finally:
                with suppress(ProcessLookupError):  # the engine's process has ended too
                    os.killpg(server.pid, signal.SIGKILL)


def _wait(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:  # nobody listens yet
            time.sleep(0.5)
    raise RuntimeError(f"vllm serve did not start: {log.read_text(errors='replace')[-20_000:]}")
