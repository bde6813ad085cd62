"""The store and the groups by which ranks find each other."""

from __future__ import annotations

from pathlib import Path

from mrv1.runner.ranks.groups import open_store

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
