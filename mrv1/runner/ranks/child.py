"""The process of a rank but 0: it makes the calls that rank 0 sends until that closes."""

from __future__ import annotations

import contextlib
import signal
import sys
from multiprocessing.connection import Connection

import torch

from mrv1.config import EngineConfig
from mrv1.headwise import HeadPolicy
from mrv1.runner.async_output import AsyncOutput
from mrv1.runner.model_runner import ModelRunner
from mrv1.runner.ranks.failure import RankFailure
from mrv1.runner.ranks.groups import Gloo, open_store


def serve(
    rank: int,
    config: EngineConfig,
    head_policy: HeadPolicy | None,
    port: int,
    connection: Connection,
    num_threads: int,
    *,
    timeout: float,
) -> None:
    """Run a rank until rank 0 closes the connection: the main function of its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which then ends this one
    torch.set_num_threads(num_threads)
    size = config.tensor_parallel_size
    gloo = Gloo(rank, size, timeout)
    try:
        runner = ModelRunner(
            config, head_policy=head_policy, parallel=gloo.context, allocates=False, progress=False
        )
        connection.send(None)
        gloo.connect(open_store(port, size))
        runner.allocate_kv_cache(progress=False)
        connection.send(None)
        while True:
            try:
                name, args = connection.recv()
            except EOFError:
                return
            make_call(runner, name, *args)
    except BaseException as error:
        with contextlib.suppress(OSError):  # rank 0 has ended
            connection.send(RankFailure.of(error))
        sys.exit(1)


def make_call(runner: ModelRunner, name: str, *args: object) -> None:
    """Make rank 0's call on another rank's runner; raise even if only the step's result fails."""
    output = getattr(runner, name)(*args)
    if isinstance(output, AsyncOutput):
        output.result()
