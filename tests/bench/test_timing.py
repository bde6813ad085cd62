"""The timer: whole rounds over the buffers, turns between variants, statistics of the samples."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from benchmarks.measure import timing
from benchmarks.measure.timing import Timing, capture, measure, num_launches, on_device, rotation

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("bytes_moved", "num_sets"),
    [
        (8, 64),
        (1 << 20, 64),
        (1 << 26, 16),
        ((1 << 26) + 1, 16),
        (1 << 32, 2),
    ],
)
def test_buffer_sets_add_up_to_a_gib_with_2_to_64_sets(bytes_moved: int, num_sets: int):
    assert rotation(bytes_moved, GPU) == num_sets
    assert rotation(bytes_moved, CPU) == 1


@pytest.mark.parametrize(
    ("num_sets", "floor_us", "launches"),
    [(2, 1000.0, 2), (2, 3000.0, 2), (4, 300.0, 8), (64, 0.001, 256), (48, 1.0, 288)],
)
def test_a_sample_is_whole_rounds_over_the_buffer_sets(
    num_sets: int, floor_us: float, launches: int
):
    assert num_launches(num_sets, floor_us) == launches


def test_variants_take_turns_and_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch):
    """The clock moves by the seconds of each variant, a hundredfold in the first round."""
    now = [0.0]
    ran: list[str] = []

    def launch(name: str, seconds: float):
        rounds = itertools.count()

        def run() -> None:
            ran.append(name)
            now[0] += seconds * (
                100 if next(rounds) < 2 else 1
            )  # the warm-up, then the first round

        return run

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    replays = {n: capture([launch(n, s)], 1, CPU) for n, s in (("a", 1.0), ("b", 3.0))}
    ran.clear()
    timings = measure(replays, 4, CPU)
    assert ran == ["a", "b"] * 5
    assert timings["a"].samples_us == pytest.approx([1e6] * 4)
    assert timings["b"].median_us == pytest.approx(3e6)


def test_a_sample_is_the_mean_over_its_launches(monkeypatch: pytest.MonkeyPatch):
    now = itertools.count()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    replay = capture([lambda: None] * 4, 4, CPU)
    assert measure({"x": replay}, 3, CPU)["x"].samples_us == [0.25e6] * 3


def test_a_timing_has_the_percentiles_of_its_samples():
    found = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0], 7)
    assert (found.median_us, found.p20_us, found.p80_us) == (3.5, 2.0, 5.0)
    assert found.launches_per_sample == 7


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_a_graph_runs_every_launch_and_its_time_is_that_of_the_copies():
    buffers = [torch.ones(1 << 26, device=GPU) for _ in range(2)]
    counts = [torch.zeros((), device=GPU) for _ in buffers]

    def launch(index: int):
        def run() -> None:
            buffers[index].mul_(-1.0)
            counts[index].add_(1.0)

        return run

    with on_device(GPU):
        replay = capture([launch(0), launch(1)], 6, GPU)
        found = measure({"x": replay}, 4, GPU)["x"]
    assert [float(count) for count in counts] == [1 + 3 * 5] * 2  # the warm-up, five replays of 3
    gigabytes = 2 * buffers[0].nbytes / 1e9
    assert 50 < gigabytes / (found.median_us * 1e-6) < 20_000
