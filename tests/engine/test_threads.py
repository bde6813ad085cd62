"""Threads share one engine: they take turns, and each thread gets only its own outputs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.progress import Progress

from mrv1 import LLM, SamplingParams
from mrv1.engine import guards
from mrv1.engine.guards import Turns
from tests.engine.fake_llm import make_llm
from tests.engine.scheduler_model import expected_output, make_request, prompt_of
from tests.forked_child import in_forked_child
from tests.models.families import tiny_checkpoint

NUM_THREADS = 4
PATIENCE = 60.0
"""Seconds after which a thread counts as deadlocked."""


def expected_tokens(num_prompt_tokens: int, **params: object) -> tuple[int, ...]:
    request = make_request("", prompt_of(num_prompt_tokens), **params)
    return tuple(expected_output(request)[0])


def in_threads(calls: list[Callable[[], object]]) -> list[object]:
    """Start all calls at the same time and return their results."""
    start = threading.Barrier(len(calls))

    def started(call: Callable[[], object]) -> object:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(started, call) for call in calls]
        return [future.result(PATIENCE) for future in futures]


def is_idle(llm: LLM) -> bool:
    scheduler, shared = llm.engine.scheduler, llm.shared
    return (
        not llm.has_unfinished_requests()
        and scheduler.pools[0].num_free == scheduler.pools[0].num_blocks
        and not any([shared._groups, shared._awaited, shared._undelivered, shared.turns._waiting])
    )


LONG = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def roomy(monkeypatch) -> LLM:
    """Return an engine with room for several long requests."""
    return make_llm(monkeypatch, num_kv_blocks=128, max_model_len=512)


def test_generate_in_several_threads_gives_each_thread_its_own_outputs(monkeypatch):
    """The last call of the last thread needs six of the five blocks, whatever runs beside it."""
    llm = make_llm(monkeypatch)
    options = {"max_tokens": 20, "ignore_eos": True}

    def calls_of(thread: int) -> list[tuple[int, ...]]:
        tokens = []
        for call in range(3):
            lengths = [8 + 3 * thread + 5 * call, 20 + thread]
            params = SamplingParams(**options)
            outputs = llm.generate([list(prompt_of(n)) for n in lengths], params)
            assert tokens_of(lengths) == [output.outputs[0].token_ids for output in outputs]
            (single,) = llm.generate(list(prompt_of(lengths[0])), params)
            *_, last = llm.stream(list(prompt_of(lengths[1])), params)
            tokens += [single.outputs[0].token_ids, last.outputs[0].token_ids]
            assert tokens[-2:] == tokens_of(lengths)
        return tokens

    def tokens_of(lengths: list[int]) -> list[tuple[int, ...]]:
        return [expected_tokens(length, **options) for length in lengths]

    in_threads([lambda thread=thread: calls_of(thread) for thread in range(NUM_THREADS)])
    assert llm.metrics()["num_preemptions"] > 0
    assert is_idle(llm)


def test_threads_give_the_tokens_of_a_serial_run(tmp_path):
    """The runner is a real one, in float64, so that no near tie can flip with the batch."""
    tiny_checkpoint(tmp_path, "llama")
    prompts = [list(prompt_of(10 + 9 * n)) for n in range(NUM_THREADS)]
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)
    with LLM(str(tmp_path), dtype="float64", device="cpu", num_kv_blocks=12) as llm:
        serial = [llm.generate(prompt, params)[0].outputs for prompt in prompts]
        threaded = in_threads(
            [lambda prompt=prompt: llm.generate(prompt, params)[0].outputs for prompt in prompts]
        )
        assert threaded == serial
        assert is_idle(llm)


def test_the_main_thread_alone_shows_a_progress_bar(roomy, monkeypatch):
    """Some releases of rich refuse a second progress bar at the same time."""
    visible = []

    def shown(**options: bool) -> Progress:
        visible.append(options["visible"])
        return Progress(disable=True)

    monkeypatch.setattr("mrv1.progress.progress_bar", shown)
    params = SamplingParams(max_tokens=2)
    roomy.generate([[1]], params)
    in_threads([lambda: roomy.generate([[1]], params)])
    assert visible == [True, False]


def test_step_and_generate_in_two_threads_return_only_their_own_outputs(roomy):
    """One thread steps, another generates: neither gets the outputs of the other thread."""
    llm, done = roomy, threading.Event()

    def steps() -> dict[str, object]:
        outputs = {}
        while not done.is_set() or llm.has_unfinished_requests():
            if len(outputs) < 5 and not llm.has_unfinished_requests():
                name = f"own-{len(outputs)}"
                llm.add_request(list(prompt_of(9)), SamplingParams(max_tokens=6), request_id=name)
            outputs |= {output.request_id: output for output in llm.step()}
        return outputs

    def generates() -> list[tuple[int, ...]]:
        try:
            params = SamplingParams(max_tokens=30)
            prompts = [list(prompt_of(n)) for n in range(3, 9)]
            outputs = [llm.generate(prompt, params)[0].outputs[0] for prompt in prompts]
            return [output.token_ids for output in outputs]
        finally:
            done.set()

    stepped, generated = in_threads([steps, generates])
    assert generated == [expected_tokens(n, max_tokens=30) for n in range(3, 9)]
    assert all(name.startswith("own-") for name in stepped)
    own = expected_tokens(9, max_tokens=6)
    assert {output.outputs[0].token_ids for output in stepped.values()} <= {own}
    assert is_idle(llm)


def test_an_unread_stream_keeps_no_other_thread_waiting(roomy):
    stream = roomy.stream(list(prompt_of(7)), SamplingParams(max_tokens=40, ignore_eos=True))
    first = next(stream)
    params = SamplingParams(**LONG)  # ends after the stream's request
    (outputs,) = in_threads([lambda: roomy.generate(list(prompt_of(9)), params)])
    assert outputs[0].outputs[0].token_ids == expected_tokens(9, **LONG)
    *_, last = stream
    expected = expected_tokens(7, max_tokens=40, ignore_eos=True)
    assert (first.outputs[0].token_ids, last.outputs[0].token_ids) == (expected[:1], expected)
    assert is_idle(roomy)


def test_abort_from_another_thread_does_not_wait_for_the_end(roomy):
    """A thread that steps again and again lets other threads take turns."""
    llm = roomy
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(llm.generate, [list(prompt_of(9))], SamplingParams(**LONG))
        while (begun := llm.metrics()["num_generated_tokens"]) < 5:
            time.sleep(1e-3)
        llm.abort("0")
        (output,) = future.result(PATIENCE)
    (completion,) = output.outputs
    assert completion.finish_reason == "abort"
    # A busy machine may run this thread late at first, but not twice.
    assert len(completion.token_ids) < begun + 200
    assert completion.token_ids == expected_tokens(9, **LONG)[: len(completion.token_ids)]
    assert is_idle(llm)


def test_streams_of_two_threads_run_side_by_side(roomy):
    def times(length: int) -> list[float]:
        stream = roomy.stream(list(prompt_of(length)), SamplingParams(**LONG))
        return [time.monotonic() for _ in stream]

    first, second = in_threads([lambda: times(5), lambda: times(9)])
    assert max(first[0], second[0]) < min(first[-1], second[-1])
    assert min(len(first), len(second)) > 20, "each stream sees its output grow"


def test_a_thread_that_comes_back_sleeps_if_another_thread_waits(monkeypatch):
    """A lock goes to the next thread that asks, mostly the thread that has just released it."""
    turns, order, sleeps = Turns(), [], []
    has_waited = threading.Event()

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        assert has_waited.wait(PATIENCE)

    monkeypatch.setattr(guards.time, "sleep", sleep)

    def wait() -> None:
        turns.take(order.append, "waiting")
        has_waited.set()

    with ThreadPoolExecutor(1) as pool:
        with turns._lock:  # the calling thread's turn
            future = pool.submit(wait)
            while not turns._waiting:
                threading.Event().wait(1e-3)
            held = turns._waiting.copy()
        turns._waiting |= held  # the state until the other thread has woken up
        turns.take(order.append, "again")
        future.result(PATIENCE)
        turns._waiting -= held
        turns.take(order.append, "alone")
    assert order == ["waiting", "again", "alone"]
    assert sleeps == [guards.GIVE_WAY_SECONDS]


class Blocked:
    """Makes the first step wait within ``execute`` until ``go_on`` is set."""

    def __init__(self, llm: LLM) -> None:
        self.is_in, self.go_on = threading.Event(), threading.Event()
        self._runner = llm.engine.runner
        self._execute = self._runner.execute
        self._runner.execute = self

    def __call__(self, plan: object) -> object:
        self._runner.execute = self._execute
        self.is_in.set()
        assert self.go_on.wait(PATIENCE)
        return self._execute(plan)


def test_an_interrupt_while_waiting_for_a_turn_leaves_the_engine_idle(roomy, request):
    """Ctrl-C reaches the main thread alone: the thread that has its turn is not disturbed."""
    llm, blocked = roomy, Blocked(roomy)
    main = threading.main_thread().ident
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job's may be ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def interrupt() -> None:
        while main not in llm.shared.turns._waiting:
            time.sleep(1e-3)
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.05)
        blocked.go_on.set()

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(llm.generate, list(prompt_of(9)), SamplingParams(max_tokens=20))
        assert blocked.is_in.wait(PATIENCE)
        interrupting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(list(prompt_of(5)), SamplingParams(max_tokens=20))
        interrupting.result(PATIENCE)
        (output,) = other.result(PATIENCE)
    assert output.outputs[0].token_ids == expected_tokens(9, max_tokens=20)
    assert is_idle(llm)


def test_close_ends_the_calls_of_other_threads(roomy):
    blocked = Blocked(roomy)
    with ThreadPoolExecutor(2) as pool:
        generating = pool.submit(roomy.generate, list(prompt_of(9)), SamplingParams(**LONG))
        assert blocked.is_in.wait(PATIENCE)
        closing = pool.submit(roomy.close)
        blocked.go_on.set()
        closing.result(PATIENCE)
        with pytest.raises(RuntimeError, match="expected an open engine, got one that was closed"):
            generating.result(PATIENCE)


def test_a_call_from_within_a_call_is_refused_and_changes_nothing(roomy):
    llm, refused = roomy, []
    execute = llm.engine.runner.execute

    def calls_back(plan):
        for call in (llm.step, llm.close, lambda: llm.abort("0")):
            with pytest.raises(RuntimeError, match="from within another call in the same thread"):
                call()
            refused.append(call)
        return execute(plan)

    llm.engine.runner.execute = calls_back
    (output,) = llm.generate(list(prompt_of(9)), SamplingParams(max_tokens=20))
    assert refused
    assert output.outputs[0].token_ids == expected_tokens(9, max_tokens=20)
    assert is_idle(llm)


def test_a_stream_garbage_collected_within_a_step_is_aborted_by_the_next_step(roomy):
    llm = roomy
    streams = [llm.stream(list(prompt_of(7)), SamplingParams(**LONG))]
    next(streams[0])
    execute = llm.engine.runner.execute

    def collects(plan):
        streams.clear()
        return execute(plan)

    llm.engine.runner.execute = collects
    (output,) = llm.generate(list(prompt_of(9)), SamplingParams(max_tokens=20))
    assert output.outputs[0].token_ids == expected_tokens(9, max_tokens=20)
    assert is_idle(llm)


# --- reports and forks ---------------------------------------------------------------------------

REPORTS = ("metrics", "kv_report", "describe", "is_sleeping")


def test_close_waits_for_a_report_and_later_reports_know_of_it(roomy):
    """``close`` frees what reports read, part by part."""
    llm, runner, order = roomy, roomy.engine.runner, []
    is_read, read_on, is_freed, free_on = (threading.Event() for _ in range(4))

    def describe() -> str:
        is_read.set()
        assert read_on.wait(PATIENCE)
        order.append("report")
        return "engine"

    def close() -> None:
        order.append("close")
        is_freed.set()
        assert free_on.wait(PATIENCE)

    runner.describe, runner.close = describe, close
    with ThreadPoolExecutor(2) as pool:
        report = pool.submit(llm.describe)
        assert is_read.wait(PATIENCE)
        closed = pool.submit(llm.close)
        assert not is_freed.wait(0.05)
        read_on.set()
        assert is_freed.wait(PATIENCE)
        for name in REPORTS:
            with pytest.raises(RuntimeError, match="LLM: expected an open engine, got one that"):
                getattr(llm, name)()
        free_on.set()
        closed.result(PATIENCE)
        assert report.result(PATIENCE).startswith("engine")
    assert order == ["report", "close"]


def test_reports_beside_close_are_reports_or_say_that_it_is_closed():
    """Of the real runner: each loop of a thread ends with the error of a closed engine."""
    llm = LLM("tiny", device="cpu", num_kv_blocks=16, max_model_len=64)

    def watch(name: str) -> str:
        while True:
            try:
                getattr(llm, name)()
            except RuntimeError as error:
                return str(error)

    with ThreadPoolExecutor(len(REPORTS)) as pool:
        found = [pool.submit(watch, name) for name in REPORTS]
        time.sleep(0.05)
        llm.close()
        for each in found:
            assert each.result(PATIENCE) == "LLM: expected an open engine, got one that was closed"


def test_a_close_from_within_a_report_is_refused_and_changes_nothing(roomy):
    """As from a signal handler: the report would go on to read what has been freed."""
    llm, runner = roomy, roomy.engine.runner

    def describe() -> str:
        with pytest.raises(RuntimeError, match="from within another call in the same thread"):
            llm.close()
        llm.metrics()
        with pytest.raises(RuntimeError, match="from within another call in the same thread"):
            llm.close()
        return "engine"

    runner.describe = describe
    assert llm.describe().startswith("engine")
    llm.close()
    with pytest.raises(RuntimeError, match="expected an open engine, got one that was closed"):
        llm.describe()


def test_a_report_waits_for_no_step(roomy):
    """Also in the middle of a step, in the same thread."""
    llm, blocked = roomy, Blocked(roomy)
    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(llm.generate, list(prompt_of(3)), SamplingParams(max_tokens=2))
        assert blocked.is_in.wait(PATIENCE)
        assert llm.metrics()["num_running_requests"] == 1
        blocked.go_on.set()
        output.result(PATIENCE)
    runner = llm.engine.runner
    execute, found = runner.execute, []

    def reporting(plan: object) -> object:
        found.append(llm.metrics()["num_running_requests"])
        return execute(plan)

    runner.execute = reporting
    llm.generate(list(prompt_of(3)), SamplingParams(max_tokens=2))
    assert found[0] == 1


def test_a_forked_child_has_an_engine_of_its_own(roomy):
    """A thread of the parent is in the middle of a step, and has its turn."""
    llm, blocked = roomy, Blocked(roomy)
    params = {"max_tokens": 5, "ignore_eos": True}

    def check() -> None:
        (output,) = llm.generate([list(prompt_of(7))], SamplingParams(**params))
        assert output.outputs[0].token_ids == expected_tokens(7, **params)
        llm.close()

    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(llm.generate, [list(prompt_of(3))], SamplingParams(**params))
        assert blocked.is_in.wait(PATIENCE)
        with llm.shared.turns.reports:
            in_forked_child(check)
        blocked.go_on.set()
        (own,) = output.result(PATIENCE)
    assert own.outputs[0].token_ids == expected_tokens(3, **params)
