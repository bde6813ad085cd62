"""GPU time of steps: the union of the times in which they ran; on a GPU, against its events."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.runner.async_output import GpuClock

NUM_SLOTS = 3


class FakeGpu:
    """A host and a GPU with one stream; times in ms."""

    def __init__(self) -> None:
        self.now = 0
        self.busy_until = 0
        self.is_lost = False
        self.runs: list[tuple[int, int]] = []

    def run(self, duration: int) -> None:
        begin = max(self.now, self.busy_until)
        self.busy_until = begin + duration
        self.runs.append((begin, self.busy_until))

    def busy_ms(self) -> int:
        """Return the total time of the runs that are over."""
        return sum(end - begin for begin, end in self.runs if end <= self.now)

    def event(self, **_options: object) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.time: int | None = None

    def record(self) -> None:
        self.time = max(self.gpu.now, self.gpu.busy_until)

    def query(self) -> bool:
        if self.gpu.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.time is None or self.time <= self.gpu.now

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query()
        assert end.query()
        return float(end.time - self.time)


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    return fake


@given(steps=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=30))
def test_idle_times_are_not_counted(steps):
    gpu = FakeGpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", gpu.event)
        clock = GpuClock([gpu.event() for _ in range(NUM_SLOTS)])
    for number, (pause, duration) in enumerate(steps):
        gpu.now += pause
        if number >= NUM_SLOTS - 1:  # two in flight: this one and the one before
            gpu.now = max(gpu.now, gpu.runs[number - NUM_SLOTS + 1][1])
        assert clock.seconds(number % NUM_SLOTS) == pytest.approx(gpu.busy_ms() * 1e-3)
        clock.start(number % NUM_SLOTS)
        gpu.run(duration)
        clock.end(number % NUM_SLOTS)
    gpu.now += 1000
    assert clock.seconds(len(steps) % NUM_SLOTS) == pytest.approx(gpu.busy_ms() * 1e-3)


def test_a_lost_gpu_raises_no_error_in_the_clock(gpu):
    clock = GpuClock([gpu.event() for _ in range(NUM_SLOTS)])
    for slot, duration in ((0, 5), (1, 7)):
        clock.start(slot)
        gpu.run(duration)
        clock.end(slot)
        gpu.now += 100
    gpu.is_lost = True
    assert clock.seconds(2) == pytest.approx(5e-3)


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_seconds_on_a_gpu_equal_the_time_between_events(device):
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_SLOTS)]
    clock = GpuClock(ends)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for slot in (0, 1):
        clock.start(slot)
        torch.cuda._sleep(10_000_000)
        clock.end(slot)
    end.record()
    torch.cuda.synchronize()
    assert clock.seconds(2) == pytest.approx(begin.elapsed_time(end) * 1e-3, rel=0.1)
    clock.start(2)  # finds the GPU idle
    torch.cuda._sleep(10_000_000)
    clock.end(2)
    torch.cuda.synchronize()
    assert clock.seconds(0) == pytest.approx(1.5 * begin.elapsed_time(end) * 1e-3, rel=0.1)
