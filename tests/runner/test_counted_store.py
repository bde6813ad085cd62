"""Ranks that have counted unlike numbers of exchanges find each other's keys."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, ProcessGroupGloo, Store

from mrv1.runner.ranks.counted_store import CountedStore

SECONDS = timedelta(seconds=20)


class Exchange:
    """Torch's exchanges of symmetric memory: each has the next number of its whole process."""

    def __init__(self, store: Store, name: str, rank: int, size: int, number: int) -> None:
        self._store, self._name, self._rank, self._size = store, name, rank, size
        self._number = number

    def gather(self, value: str) -> list[str]:
        keys = [f"{self._name}/{self._number}/{rank}" for rank in range(self._size)]
        self._number += 1
        self._store.set(keys[self._rank], value)
        self._store.wait(keys)
        return [self._store.get(key).decode() for key in keys]


@given(numbers=st.lists(st.integers(0, 99), min_size=2, max_size=4), count=st.integers(1, 3))
def test_ranks_exchange_whatever_they_did_before(numbers, count):
    shared, size = HashStore(), len(numbers)
    found: list[list[list[str]]] = [[] for _ in numbers]

    def run(rank: int) -> None:
        exchange = Exchange(CountedStore(shared, SECONDS), "memory", rank, size, numbers[rank])
        found[rank] = [exchange.gather(f"{turn} of {rank}") for turn in range(count)]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = [[f"{turn} of {rank}" for rank in range(size)] for turn in range(count)]
    assert found == [expected] * size


def test_a_key_that_never_comes_ends_the_wait():
    store = CountedStore(HashStore(), timedelta(seconds=0.1))
    with pytest.raises(RuntimeError):
        store.wait(["memory/3/1"])


def test_torch_calls_it_from_its_own_code():
    """Other keys stay as they are: a group finds its ranks by it."""
    shared, sums = HashStore(), [torch.ones(1), torch.ones(1)]

    def run(rank: int) -> None:
        group = ProcessGroupGloo(CountedStore(shared, SECONDS), rank, 2, SECONDS)
        group.allreduce([sums[rank]]).wait()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [each.item() for each in sums] == [2.0, 2.0]
