"""Words from rank 0 arrive at every reader in order, also at one that sleeps or runs beside it."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.runner.ranks.mailbox import BY_CONNECTION, NUM_WORDS, Mailbox, mailbox_words
from mrv1.runner.ranks.shared_memory import SharedMemory

SIZE = 3
CPU = torch.device("cpu")


def mailboxes(count: int) -> list[Mailbox]:
    """Return the mailboxes of so many processes, over one memory."""
    memory = torch.zeros(mailbox_words(SIZE), dtype=torch.int32)
    return [Mailbox(memory) for _ in range(count)]


@given(
    rounds=st.lists(st.lists(st.integers(0, BY_CONNECTION), max_size=5), min_size=1, max_size=20)
)
def test_readers_get_every_code_in_order(rounds):
    writer, *readers = mailboxes(SIZE)
    for codes in rounds:
        for code in codes:
            writer.post(code)
        for reader in readers:
            assert reader.has_news() == bool(codes)
            assert [reader.read() for _ in codes] == codes
            assert reader.read() is None


def test_the_ring_begins_anew_and_a_reader_that_is_late_is_told():
    writer, reader, late = mailboxes(3)
    for count in range(NUM_WORDS + 1):
        writer.post(count)
        assert reader.read() == count
    with pytest.raises(RuntimeError, match="mailbox: expected a reader that keeps up"):
        late.read()


def test_a_reader_that_sleeps_says_so_until_it_has_a_code():
    writer, reader = mailboxes(2)
    slept: list[float] = []

    def sleep_up_to(seconds: float) -> None:
        assert writer.any_sleeps
        slept.append(seconds)
        if len(slept) == 4:
            writer.post(7)

    assert reader.wait(1, 0.0, sleep_up_to, on_idle=lambda: None) == 7
    assert slept == sorted(slept)
    assert slept[0] < slept[-1]
    assert not writer.any_sleeps


def test_an_error_of_an_idle_reader_ends_its_wait():
    _, reader = mailboxes(2)

    def failing() -> None:
        raise RuntimeError("a kernel failed")

    with pytest.raises(RuntimeError, match="a kernel failed"):
        reader.wait(1, 0.0, time.sleep, on_idle=failing)


def test_a_thread_that_spins_gets_all_codes():
    writer, reader = mailboxes(2)
    found: list[int] = []

    def read() -> None:
        found.extend(reader.wait(1, 5.0, time.sleep, on_idle=lambda: None) for _ in range(500))

    thread = threading.Thread(target=read)
    thread.start()
    for code in range(500):
        writer.post(code)
    thread.join(60)
    assert found == [*range(500)]


def test_processes_that_allocate_in_the_same_order_have_the_same_memory():
    """The file has no name, and neither side makes it shorter."""
    owner = SharedMemory(os.memfd_create("test"))
    other = SharedMemory(os.dup(owner.fd))
    shapes = [(3, 5), (2, 70000), (1,)]
    first = [other.zeros(*shape) for shape in shapes[:2]]
    second = [owner.zeros(*shape) for shape in shapes]
    first.append(other.zeros(*shapes[2]))
    for number, (one, two, shape) in enumerate(zip(first, second, shapes, strict=True), start=1):
        assert one.shape == two.shape == shape
        assert not one.any()
        two.fill_(number)
    for number, one in enumerate(first, start=1):
        assert one.unique().tolist() == [number]
    owner.close()
    owner.close()
    assert first[0].unique().tolist() == [1]  # mapped for as long as a process has it
    other.close()
