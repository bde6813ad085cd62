"""KeyboardInterrupt at any line leaves every slot and block accounted for, and the engine usable.

The trace function raises KeyboardInterrupt at random lines of the engine and of the runner's host
code. Lines of ``Turns.take`` are left out: the interpreter checks for signals only after calls, at
the jump back of a loop and at the start of a function, so never between a lock's ``with`` and its
body.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mrv1
from mrv1 import LLM, RequestOutput, SamplingParams
from mrv1.engine.guards import Turns
from mrv1.engine.request import Request
from tests.engine.fake_llm import make_llm
from tests.engine.scheduler_model import expected_output, make_request, prompt_of
from tests.engine.test_scheduler import check_group
from tests.models.families import tiny_checkpoint

PACKAGE = Path(mrv1.__file__).parent
HOST_CODE = (str(PACKAGE / "engine"), str(PACKAGE / "runner"))
LONG = {"max_tokens": 24, "ignore_eos": True, "temperature": 0}


class Interrupt:
    """Counts lines of the host code and raises ``KeyboardInterrupt`` at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.num_lines = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Interrupt | None:
        if event == "call":
            is_host_code = frame.f_code.co_filename.startswith(HOST_CODE)
            return self if is_host_code and frame.f_code is not Turns.take.__code__ else None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.at:
                raise KeyboardInterrupt
        return self

    @contextmanager
    def active(self) -> Iterator[None]:
        former = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(former)


def use(llm: LLM) -> None:
    """Run chunked prefill, preemption, a stop, an abort, several outputs and a dropped stream."""
    with closing(llm.stream(list(prompt_of(20)), SamplingParams(**LONG))) as stream:
        next(stream)
        llm.add_request(list(prompt_of(30, 3)), SamplingParams(**LONG), request_id="aborted")
        llm.add_request(list(prompt_of(20)), SamplingParams(n=2, max_tokens=9, seed=1))
        for _ in range(3):
            llm.step()
        llm.abort("aborted")
        llm.generate([list(prompt_of(18, 5)), list(prompt_of(33, 2))], SamplingParams(**LONG))
        next(stream)
    while llm.has_unfinished_requests():
        llm.step()


def check(llm: LLM, num_blocks: int) -> None:
    """Step until all requests end; then each slot and block is free, and no output is awaited."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(200):
        if not llm.has_unfinished_requests():
            break
        outputs |= {output.request_id: output for output in llm.step()}
    assert not llm.has_unfinished_requests()
    assert all(output.finished for output in outputs.values())
    assert llm.step() == []
    core = llm.engine
    scheduler = core.scheduler
    assert not core._in_flight
    assert scheduler.num_steps_in_flight == 0
    assert not scheduler.running
    assert not scheduler.waiting
    assert not scheduler.waiting.held
    assert sorted(scheduler._slots.free) == list(range(core.config.max_num_seqs))
    for pool in scheduler.pools:
        check_group(pool, Counter())
        assert pool.num_free == num_blocks
    assert not any(
        [llm.shared._groups, llm.shared._undelivered, llm.shared._awaited, llm.shared._given_up]
    )
    assert not any([llm.shared._is_changing, core._is_changing])


def interrupted(llm: LLM, monkeypatch: pytest.MonkeyPatch, at: int, again: int | None) -> None:
    """Interrupt ``use`` at line ``at``, and the recovery at its line ``again`` unless None."""
    recoveries: list[Request] = []

    def interrupt_too(owner: type) -> None:
        recover = owner._recover

        def traced(self, error):
            if again is None or recoveries:
                return recover(self, error)
            recoveries.append(error)
            with Interrupt(again).active():
                return recover(self, error)

        patch.setattr(owner, "_recover", traced)

    with monkeypatch.context() as patch:
        interrupt_too(type(llm.engine))
        interrupt_too(type(llm.shared))
        with pytest.raises(KeyboardInterrupt), Interrupt(at).active():
            use(llm)


def num_lines_of(call: Callable[[LLM], None], llm: LLM) -> int:
    counter = Interrupt(None)
    with counter.active():
        call(llm)
    return counter.num_lines


@pytest.fixture(scope="module", params=[False, True])
def llm(request) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield make_llm(monkeypatch, overlap=request.param)


EXPECTED, _ = expected_output(make_request("", prompt_of(25), max_tokens=5, ignore_eos=True))


@settings(max_examples=min(settings.default.max_examples, 100))  # each example runs many requests
@given(seed=st.integers(0, 2**32))
def test_an_interrupt_at_any_line_of_the_engine_loses_no_slot_or_block(llm, seed):
    source = random.Random(seed)
    num_blocks = llm.metrics()["num_kv_blocks"]
    num_lines = num_lines_of(use, llm)
    check(llm, num_blocks)
    metrics = llm.metrics()
    assert metrics["num_preemptions"] > 0
    assert metrics["prefix_hit_tokens"] > 0
    for _ in range(2):
        again = source.choice([None, source.randrange(1, 40), source.randrange(1, 200)])
        at = source.randrange(1, num_lines * 9 // 10)
        with pytest.MonkeyPatch.context() as monkeypatch:
            interrupted(llm, monkeypatch, at, again)
        check(llm, num_blocks)
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        (output,) = llm.generate(list(prompt_of(25)), params)
        assert list(output.outputs[0].token_ids) == EXPECTED
        check(llm, num_blocks)


# --- with a real runner --------------------------------------------------------------------------


PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)


def use_briefly(llm: LLM) -> None:
    with closing(llm.stream(list(prompt_of(20)), PARAMS)) as stream:
        next(stream)
        llm.add_request(list(prompt_of(28)), PARAMS, request_id="aborted")
        llm.generate(list(prompt_of(45, 3)), SamplingParams(max_tokens=2))
        llm.abort("aborted")
        next(stream)
    llm.step()


@pytest.fixture(scope="module", params=[False, True])
def uninterrupted(tmp_path_factory, request) -> Iterator[tuple[LLM, int, tuple[int, ...]]]:
    """Yield an engine in float64, the lines of ``use_briefly``, and a request's tokens."""
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(path, "llama")
    with LLM(
        str(path), dtype="float64", device="cpu", num_kv_blocks=5, max_num_seqs=3,
        max_model_len=96, max_num_batched_tokens=40, overlap=request.param,
    ) as llm:  # fmt: skip
        (output,) = llm.generate(list(prompt_of(17)), PARAMS)
        llm.engine.scheduler.reset_prefix_cache()
        yield llm, num_lines_of(use_briefly, llm), output.outputs[0].token_ids


@settings(max_examples=min(settings.default.max_examples, 100))  # each example runs many requests
@given(seed=st.integers(0, 2**32))
def test_an_interrupt_at_any_line_of_the_runner_leaves_the_engine_usable(uninterrupted, seed):
    llm, num_lines, expected = uninterrupted
    llm.engine.scheduler.reset_prefix_cache()
    at = random.Random(seed).randrange(1, num_lines * 9 // 10)
    with pytest.raises(KeyboardInterrupt), Interrupt(at).active():
        use_briefly(llm)
    check(llm, 5)
    (output,) = llm.generate(list(prompt_of(17)), PARAMS)
    assert output.outputs[0].token_ids == expected
    check(llm, 5)
