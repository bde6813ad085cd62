"""The thread that ends what waits for a rank: when one has ended, and when a wait is too long."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from mrv1.kernels._base.peers import PeerError
from mrv1.runner.ranks import processes, watch
from mrv1.runner.ranks.watch import Watch


class Ranks:
    """Ranks of no processes."""

    def __init__(self) -> None:
        self.has_ended = False
        self.failed = threading.Event()
        self.error: BaseException | None = None

    def any_has_ended(self) -> bool:
        return self.has_ended

    def end(self, error: BaseException) -> None:
        self.error = self.error or error
        self.failed.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(watch, "TICK_SECONDS", 0.01)


@pytest.mark.parametrize("waits", [False, True])
def test_a_rank_that_has_ended_ends_the_others(waits):
    ranks = Ranks()
    watching = Watch(ranks)
    ranks.has_ended = True
    time.sleep(0.05)
    assert ranks.error is None  # the start tells of it in another way
    watching.looks_always = not waits
    if waits:
        watching.begin("step 7", 60.0)
    assert ranks.failed.wait(10)
    watching.stop()
    assert isinstance(ranks.error, PeerError)
    assert str(ranks.error) == f"{'step 7' if waits else 'between steps'}: a rank has ended"


def test_ranks_that_are_stopped_have_not_failed():
    ranks = Ranks()
    watching = Watch(ranks)
    watching.looks_always = True
    watching.stop()
    ranks.has_ended = True
    watching._thread.join(10)
    assert ranks.error is None


def test_a_program_that_ends_stops_the_watch_before_the_ranks():
    """Its thread would abort the links, in calls of torch that return as the interpreter ends."""
    ranks, ends = Ranks(), []
    watching = Watch(ranks)
    watching.looks_always = True

    def close() -> None:
        ends.append(watching._stopped.is_set())
        ranks.has_ended = True

    member = SimpleNamespace(connection=SimpleNamespace(close=close), stop=ends.append)
    processes._stop(watching, [member], 0.0)
    watching._thread.join(10)
    assert ends == [True, 0.0]
    assert ranks.error is None


def test_only_one_wait_that_is_too_long_ends_the_ranks():
    ranks = Ranks()
    watching = Watch(ranks)
    for step in range(20):
        outer = watching.begin(f"step {step}", 0.5)
        time.sleep(0.02)
        watching.end_wait(outer)
    assert ranks.error is None
    watching.begin("step 20", 0.05)
    assert ranks.failed.wait(10)
    watching.stop()
    assert "step 20: rank 0 has waited 0.05 s for its GPU" in str(ranks.error)


def test_a_wait_goes_on_after_one_within_it():
    ranks = Ranks()
    watching = Watch(ranks)
    watching.begin("a call", 0.05)
    watching.end_wait(watching.begin("step 7", 60.0))
    assert ranks.failed.wait(10)
    watching.stop()
    assert "a call: rank 0 has waited 0.05 s for its GPU" in str(ranks.error)


def test_the_thread_keeps_no_ranks_alive_and_ends_with_them():
    ranks = Ranks()
    watching = Watch(ranks)
    reference = weakref.ref(ranks)
    del ranks
    deadline = time.monotonic() + 10
    while reference() is not None or watching._thread.is_alive():
        gc.collect()
        assert time.monotonic() < deadline
        time.sleep(0.01)
