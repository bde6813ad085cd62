"""How many threads a model on the CPU gets: from the cores, the quota, the user and a clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mrv1 import LLM, device
from mrv1.runner import cpu_threads
from mrv1.runner.cpu_threads import (
    MOST_SECONDS,
    NUM_RUNS,
    choose_threads,
    describe_threads,
    usual_threads,
)


@pytest.fixture
def two_threads(monkeypatch, tmp_path):
    """Torch as it starts on two cores: with two threads that nobody has asked for."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    monkeypatch.setattr(cpu_threads, "core_counts", lambda: {2})
    monkeypatch.setattr(cpu_threads, "_set_here", [])
    torch.set_num_threads(2)
    yield tmp_path
    torch.set_num_threads(before)


class Model:
    """A model whose layers take as long as a clock of its own says, by the number of threads."""

    config = SimpleNamespace(num_layers=30)

    def __init__(self, monkeypatch, **seconds: float) -> None:
        self.now, self.seconds, self.runs = 0.0, seconds, []
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(cpu_threads, "time", clock)

    def forward(self, *_: object, on_kv_written) -> None:
        self.runs.append(torch.get_num_threads())
        for index in range(self.config.num_layers):
            self.now += self.seconds[f"with_{torch.get_num_threads()}"]
            on_kv_written(index)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "350000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("1:cpu:/old\n", {"cpu.max": "400000 100000\n"}, 4),
    ],
)
def test_the_quota_is_the_least_of_a_group_and_those_above(
    monkeypatch, tmp_path, own, files, expected
):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    monkeypatch.setattr(device, "OWN_CGROUP", tmp_path / "own")
    assert device.cpu_quota() == expected


def test_the_processors_are_counted_with_and_without_their_siblings(monkeypatch, tmp_path):
    usable = device.os.sched_getaffinity(0)
    for each in usable:
        folder = tmp_path / f"cpu{each}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-99\n")
    monkeypatch.setattr(device, "CPUS", tmp_path)
    assert device.core_counts() == {len(usable), 1}
    monkeypatch.setattr(device, "CPUS", tmp_path / "none")
    assert device.core_counts() == {len(usable)}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_variable_switches_the_choice_off(two_threads, monkeypatch, name):
    assert usual_threads() == 2
    monkeypatch.setenv(name, "2")
    assert usual_threads() is None
    choose_threads(None, None, (), timed=True)
    assert torch.get_num_threads() == 2
    assert describe_threads() == "2, as torch or OMP_NUM_THREADS says"


@pytest.mark.parametrize("count", [1, 3])
def test_a_number_set_in_torch_is_kept(two_threads, count):
    torch.set_num_threads(count)
    choose_threads(None, None, (), timed=False)
    assert torch.get_num_threads() == count


@pytest.mark.parametrize(("alone", "both"), [(0.01, 0.006), (0.01, 0.4), (1.0, 0.5), (2.0, 9.0)])
def test_the_faster_number_is_taken_after_a_bounded_time(two_threads, monkeypatch, alone, both):
    model = Model(monkeypatch, with_1=alone, with_2=both)
    choose_threads(model, None, (), timed=True)
    faster = 1 if alone < both else 2
    assert torch.get_num_threads() == faster
    assert model.runs == [1, 1, 2, 1, 2]
    assert model.now <= MOST_SECONDS + NUM_RUNS * max(alone, both)  # no layer ends early
    model.seconds = {"with_1": both, "with_2": alone}
    choose_threads(model, None, (), timed=True)  # the next start begins from both threads again
    assert torch.get_num_threads() == 3 - faster


def test_a_quota_bounds_the_threads_and_deterministic_takes_it_untimed(two_threads):
    choose_threads(None, None, (), timed=False)
    assert torch.get_num_threads() == 2
    assert describe_threads() == (
        "up to 2 (2 cores, no quota); a start times 1 and 2, and takes the faster"
    )
    (two_threads / "cpu.max").write_text("100000 100000\n")
    assert describe_threads() == "up to 1 (2 cores, a quota of 1)"
    choose_threads(None, None, (), timed=True)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_start_chooses_for_its_model_and_says_the_number(monkeypatch, deterministic):
    before, asked = torch.get_num_threads(), []
    choose = cpu_threads.choose_threads
    monkeypatch.setattr(cpu_threads, "_set_here", [])
    monkeypatch.setattr(cpu_threads, "usual_threads", lambda: 2)  # weights load with one

    def noted(*args: object, timed: bool) -> None:
        asked.append(timed)
        choose(*args, timed=timed)

    monkeypatch.setattr("mrv1.runner.start.choose_threads", noted)
    try:
        with LLM("tiny", device="cpu", num_kv_blocks=16, deterministic=deterministic) as llm:
            taken, said = torch.get_num_threads(), llm.describe()
    finally:
        torch.set_num_threads(before)
    assert asked == [not deterministic]
    assert taken == 2 or not deterministic
    assert f", {taken} thread{'s' * (taken > 1)}, KV " in said
