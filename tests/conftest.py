"""Test lanes, hypothesis profiles and the fixtures every test may use.

A process either interprets Triton kernels (``TRITON_INTERPRET=1``) or compiles them, never both:
the suite is run once per mode. A test whose mode this process does not have is reported as
"not run" with the reason: a lane in which no test ran does not pass.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from mrv1.device import INTERPRET
from tests.forks import Forks

# Two pytest workers share two cores: with more threads than cores, workers wait for each other.
torch.set_num_threads(1)

HAS_GPU = torch.cuda.is_available() and not INTERPRET
NUM_GPUS = torch.cuda.device_count() if HAS_GPU else 0
NO_GPU = "not run: no GPU"
if HAS_GPU:  # each engine of a test has its own few kernels: a process for them takes longer
    os.environ.setdefault("MRV1_COMPILE_PROCESSES", "0")
_common = {
    "deadline": None,  # the interpreter needs seconds where a GPU needs microseconds
    "derandomize": bool(os.environ.get("CI")),  # a red CI run must be repeatable
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
# --hypothesis-profile loads another profile: `make test` quick, `make test-full` full.
settings.register_profile("quick", max_examples=8, **_common)
settings.register_profile("dev", max_examples=20, **_common)
settings.register_profile("full", max_examples=48, **_common)
settings.load_profile("dev")


def _not_run_reason(
    marks: set[str],
    *,
    interpreting: bool = INTERPRET,
    has_gpu: bool = HAS_GPU,
    missing_gpus: int = 0,
) -> str | None:
    """Return why a test with these marks cannot run in this process, or None if it can.

    ``missing_gpus`` are those that ``multi_gpu`` asks for and the machine lacks.
    """
    if interpreting:
        return None if "interp" in marks else "not run: TRITON_INTERPRET=1 is set"
    if missing_gpus > 0:
        return f"not run: {missing_gpus} GPUs too few"
    if "gpu" in marks and has_gpu:
        return None
    if "interp" in marks:
        return "not run: set TRITON_INTERPRET=1"
    return NO_GPU if "gpu_only" in marks else None  # other tests run on the torch reference


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to report interpreted kernels as a GPU run."""
    if INTERPRET and config.option.markexpr.startswith("gpu"):
        raise pytest.UsageError("-m gpu runs compiled kernels: unset TRITON_INTERPRET")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with its reason, every test that this process cannot run."""
    for path in {item.path for item in items if item.get_closest_marker("interp")}:
        if not re.search(r"\binterp\b", path.read_text()):
            raise pytest.UsageError(f"{path}: `make` finds interpreted tests by the word interp")
    gpu_lane_in_vain = config.option.markexpr.startswith("gpu") and not HAS_GPU
    for item in items:
        several = item.get_closest_marker("multi_gpu")
        reason = _not_run_reason(
            {mark.name for mark in item.iter_markers()},
            missing_gpus=several.args[0] - NUM_GPUS if several else 0,
        )
        if gpu_lane_in_vain:
            reason = NO_GPU  # a test that also runs on a CPU must not pass for a GPU run
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _not_run(reporter: pytest.TerminalReporter) -> list[str]:
    """Return the reasons of a session in which each test was "not run", else an empty list."""
    if any(reporter.stats.get(outcome) for outcome in ("passed", "failed", "error", "xfailed")):
        return []
    skips = [str(report.longrepr[-1]) for report in reporter.stats.get("skipped", [])]
    reasons = [skip.removeprefix("Skipped: ") for skip in skips]
    return reasons if all(reason.startswith("not run: ") for reason in reasons) else []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Make a lane in which no test ran exit like a run without tests, not like a success."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and exitstatus == pytest.ExitCode.OK and _not_run(reporter):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line per reason if no test ran."""
    reasons = _not_run(terminalreporter)
    for reason in sorted(set(reasons)):
        terminalreporter.write_line(f"{reasons.count(reason)} tests {reason}", yellow=True)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device that kernels run on: the GPU if they are compiled, else the CPU."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Return a process that has imported torch, for tests that need new processes."""
    with Forks() as forks:
        yield forks


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    """Return a seeded generator on ``device`` (in ``@given`` tests draw the seed instead)."""
    return torch.Generator(device).manual_seed(0)
