"""What a rank but 0 does: it makes the calls that rank 0 sends until that ends or closes."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch

from mrv1.device import rank_devices
from mrv1.runner.follower import Follower
from mrv1.runner.model_runner import ModelRunner
from mrv1.runner.ranks.control import RankControl
from mrv1.runner.ranks.groups import open_store
from mrv1.runner.ranks.links import Links
from mrv1.runner.ranks.mailbox import BY_CONNECTION, Mailbox, mailbox_words
from mrv1.runner.ranks.messages import Answer, Asked, RankFailure, RankStart
from mrv1.runner.ranks.shared_memory import SharedMemory
from mrv1.sampler import LogitsProcessors

SPIN_SECONDS = 0.02
"""How long a rank on a GPU looks for the next message before it sleeps: longer than most steps.
A rank on a CPU sleeps at once, as another may need its core."""


def main(file_descriptor: int) -> None:
    """Run the rank whose connection to rank 0 was inherited as ``file_descriptor``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which then ends this one
    connection = Connection(file_descriptor)
    threading.Thread(target=_end_with_rank_0, args=(file_descriptor,), daemon=True).start()
    code = 0
    try:
        serve(connection, connection.recv())
    except EOFError:  # rank 0 has closed the connection
        pass
    except BaseException as error:
        code = 1
        with contextlib.suppress(OSError):  # rank 0 has ended
            connection.send(RankFailure.of(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an orderly end would wait for kernels, which may wait for other ranks


def _end_with_rank_0(file_descriptor: int) -> None:
    """End this process, whatever it waits for, once the other end of the connection is closed."""
    poll = select.poll()
    poll.register(file_descriptor, 0)  # hang-ups alone
    poll.poll()
    os._exit(1)


def serve(connection: Connection, start: RankStart) -> None:
    """Run a rank until rank 0 closes the connection, which raises EOFError."""
    torch.set_num_threads(start.num_threads)
    size = start.config.tensor_parallel_size
    devices = rank_devices(start.config.device, size)
    device = devices[start.rank]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    links = Links(
        start.rank,
        devices,
        open_store(start.port, size),
        has_peers=start.has_peers,
        meet=lambda: connection.send(None),
        timeout=start.timeout,
    )
    memory = SharedMemory(start.memory, device)
    mailbox = Mailbox(memory.zeros(mailbox_words(size)))
    runner = ModelRunner(
        replace(start.config, device=str(device)),
        model_config=start.model_config,
        head_policy=start.head_policy,
        logits_processors=LogitsProcessors((), are_elsewhere=start.has_processors),
        parallel=links.context,
        memory=memory,
        allocates=False,
        progress=False,
    )
    links.connect()
    runner.allocate_kv_cache(progress=False)
    gc.collect()
    gc.freeze()  # a later collection would look at every module, while all ranks wait
    connection.send(None)
    control, follower = RankControl(runner), Follower(runner)
    spin_seconds = 0.0 if device.type == "cpu" else SPIN_SECONDS

    def sleep_up_to(seconds: float) -> None:
        if connection.poll(seconds) and not mailbox.has_news():
            connection.recv()  # no message comes without a word: EOFError

    while True:
        code = mailbox.wait(start.rank, spin_seconds, sleep_up_to, follower.check)
        if code != BY_CONNECTION:
            follower.replay(code)
            continue
        message = connection.recv()
        if message is None:
            control.attach(SharedMemory(recv_handle(connection)))
        elif (answer := make_call(control, follower, message)) is not None:
            connection.send(answer)


def make_call(
    control: RankControl, follower: Follower, message: Asked | tuple[str, tuple[object, ...]]
) -> Answer | None:
    """Make a call of rank 0, between steps or of a step; return its answer, if it has one."""
    if isinstance(message, Asked):
        return control.answer(message)
    name, args = message
    getattr(follower, name)(*args)
    return None
