"""The store and the groups by which ranks find each other."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from mrv1.kernels._base.peers import PeerError
from mrv1.runner.ranks.groups import Gloo, open_store

LISTENS = "0A"


def test_the_store_is_reached_from_this_host_alone():
    store = open_store(0, 2)
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]
    ]
    port = f":{store.port:04X}"
    addresses = [row[1] for row in rows if row[3] == LISTENS and row[1].endswith(port)]
    assert addresses == [f"0100007F{port}"]  # 127.0.0.1
    other = open_store(store.port, 2)
    other.set("key", "value")
    assert store.get("key") == b"value"


def connected(timeout: float) -> list[Gloo]:
    """Return the groups of two ranks, which are threads."""
    store = open_store(0, 2)
    groups = [Gloo(rank, 2, timeout) for rank in range(2)]
    other = threading.Thread(target=groups[1].connect, args=(open_store(store.port, 2),))
    other.start()
    groups[0].connect(store)
    other.join()
    return groups


def test_a_wait_for_another_rank_can_be_interrupted():
    groups, start = connected(5.0), time.monotonic()
    main = threading.main_thread().ident
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        groups[0].all_reduce(torch.ones(1))
    assert time.monotonic() - start < 4
    del groups


def test_a_rank_waits_for_another_one_up_to_its_timeout():
    groups = connected(1.0)
    late = threading.Timer(0.5, groups[1].all_reduce, (torch.ones(1),))
    late.start()
    assert groups[0].all_reduce(torch.ones(1)).tolist() == [2.0]
    late.join()
    with pytest.raises(PeerError, match="1000ms"):
        groups[0].all_reduce(torch.ones(1))
