"""``AsyncLLM``: tasks and threads share one engine thread; each request ends once, freed."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import aclosing, suppress

import pytest

from mrv1 import (
    AsyncLLM,
    CapacityError,
    ConfigError,
    RequestError,
    RequestOutput,
    SamplingParams,
    StepError,
    StepPlan,
)
from mrv1.engine import async_llm
from mrv1.engine.prompts import Submission
from mrv1.engine.request import Request
from mrv1.engine.request_group import RequestGroup
from tests.engine.fake_llm import make_llm
from tests.engine.scheduler_model import expected_output, make_request, prompt_of
from tests.engine.test_interrupts import check
from tests.engine.test_threads import Blocked
from tests.forked_child import in_forked_child

PATIENCE = 120.0
"""Seconds after which a test counts as deadlocked."""
NUM_TASKS, NUM_THREADS = 64, 8
LONG = {"max_tokens": 300, "ignore_eos": True}
CLOSED = "AsyncLLM: expected an open engine, got one that was closed"


def run(main: Awaitable[object]) -> object:
    """Run a coroutine in an event loop of its own; fail if it hangs."""

    async def in_time() -> object:
        return await asyncio.wait_for(main, PATIENCE)

    return asyncio.run(in_time())


def expected_tokens(num_prompt_tokens: int, child: int = 0, **params: object) -> tuple[int, ...]:
    request = make_request("", prompt_of(num_prompt_tokens), **params)
    return tuple(expected_output((request, *request.followers)[child])[0])


def generate(
    llm: AsyncLLM, num_prompt_tokens: int, request_id: str | None = None, **params: object
) -> AsyncIterator[RequestOutput]:
    return llm.generate(list(prompt_of(num_prompt_tokens)), SamplingParams(**params), request_id)


async def last_of(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    async for output in outputs:
        last = output
    return last


async def settled(llm: AsyncLLM) -> dict[str, object]:
    """Wait until the engine's thread has made all calls so far; return the metrics."""
    await llm._between_steps(lambda: None)
    return llm.metrics()


def check_idle(llm: AsyncLLM) -> None:
    """Every slot and block is free, no place in the queue is taken, no request is awaited."""
    num_blocks = llm.metrics()["num_kv_blocks"]
    llm._engine.submit(check, llm._llm, num_blocks).result(PATIENCE)  # between two steps
    assert llm._engine._streams == {}
    assert llm._engine._num_unfinished == 0


@pytest.fixture
def small(monkeypatch) -> Iterator[AsyncLLM]:
    """An engine with three slots and so few blocks that requests preempt each other."""
    llm = make_llm(monkeypatch, AsyncLLM)
    yield llm
    llm.shutdown()


@pytest.fixture
def roomy(monkeypatch) -> Iterator[AsyncLLM]:
    """An engine with room for several long requests."""
    llm = make_llm(monkeypatch, AsyncLLM, num_kv_blocks=128, max_model_len=512)
    yield llm
    llm.shutdown()


def slow_down(llm: AsyncLLM) -> None:
    """Make each step take some time, so that a long request runs until it is aborted."""
    runner = llm._llm.engine.runner
    execute = runner.execute

    def slowly(plan: StepPlan) -> object:
        time.sleep(20e-3)
        return execute(plan)

    runner.execute = slowly


# --- outputs -------------------------------------------------------------------------------------


def test_outputs_grow_and_the_last_is_finished(roomy):
    async def main() -> None:
        parts = [part async for part in generate(roomy, 9, "mine", max_tokens=12, n=2)]
        assert {part.request_id for part in parts} == {"mine"}
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        for child in range(2):
            expected = expected_tokens(9, child, max_tokens=12, n=2)
            tokens = [part.outputs[child].token_ids for part in parts]
            assert all(own == expected[: len(own)] for own in tokens)
            assert tokens == sorted(tokens, key=len)
            assert tokens[-1] == expected

    run(main())
    check_idle(roomy)


def test_requests_of_many_tasks_run_in_one_batch(roomy):
    blocked = Blocked(roomy._llm)

    async def main() -> None:
        lengths = [5, 9, 12]
        tasks = [asyncio.create_task(last_of(generate(roomy, n, **LONG))) for n in lengths]
        assert await asyncio.to_thread(blocked.is_in.wait, PATIENCE)
        while roomy._engine._inbox.qsize() + len(roomy._engine._streams) < len(tasks):
            await asyncio.sleep(1e-3)
        blocked.go_on.set()
        tokens = [(await task).outputs[0].token_ids for task in tasks]
        assert tokens == [expected_tokens(n, **LONG) for n in lengths]
        assert roomy.metrics()["num_steps"] < 1.1 * LONG["max_tokens"]

    run(main())
    check_idle(roomy)


def test_a_slow_reader_makes_no_work_and_loses_no_token(roomy, monkeypatch):
    """While a task has not taken its output, none is made for it, and others run on."""
    made: Counter[str] = Counter()
    output_of = RequestGroup.output

    def counted(group: RequestGroup) -> RequestOutput:
        made[group.req_id] += 1
        return output_of(group)

    monkeypatch.setattr(RequestGroup, "output", counted)

    async def main() -> None:
        slow = generate(roomy, 7, "slow", **LONG)
        parts = [await anext(slow)]
        other = await last_of(generate(roomy, 9, "other", **LONG))
        assert other.outputs[0].token_ids == expected_tokens(9, **LONG)
        parts += [part async for part in slow]
        assert parts[-1].outputs[0].token_ids == expected_tokens(7, **LONG)
        assert made["slow"] <= 4

    run(main())
    check_idle(roomy)


def test_without_time_for_outputs_the_last_one_is_made(roomy, monkeypatch):
    monkeypatch.setattr(async_llm, "OUTPUT_SHARE", 0.0)

    async def main() -> None:
        (output,) = [part async for part in generate(roomy, 9, max_tokens=12, n=2)]
        tokens = [own.token_ids for own in output.outputs]
        assert tokens == [expected_tokens(9, child, max_tokens=12, n=2) for child in range(2)]

    run(main())
    check_idle(roomy)


def test_requests_take_turns_if_not_all_outputs_are_taken(monkeypatch):
    llm = make_llm(monkeypatch, num_kv_blocks=128)
    for name in "abc":
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        given = Submission(list(prompt_of(4)), params)
        llm.shared.queue(llm.shared.make_group(given, name, is_awaited=True))
    taken: list[str] = []
    while llm.has_unfinished_requests():
        llm.shared.step_alone()
        is_first = iter([True])
        outputs = llm.shared.take_changed(lambda _, is_first=is_first: next(is_first, False))
        taken += [output.request_id for output in outputs]
    assert taken[:18] == [*"abc"] * 6
    assert sorted(taken[-3:]) == [*"abc"]
    assert not llm.shared._awaited


# --- the end of a task ---------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [pytest.param(10, marks=pytest.mark.full), 1])
def test_tasks_and_threads_with_random_cancellations(monkeypatch, seconds):
    """Every accepted request ends once, outputs are those of a run alone, nothing leaks."""
    llm = make_llm(monkeypatch, AsyncLLM, num_kv_blocks=9, max_num_seqs=6)
    scheduler = llm._llm.engine.scheduler
    add, num_accepted = scheduler.add, []

    def counted(request: Request) -> None:
        add(request)
        num_accepted.append(1 + len(request.followers))

    monkeypatch.setattr(scheduler, "add", counted)
    end, ends = time.monotonic() + seconds, Counter()

    async def one_request(source: random.Random, name: str) -> None:
        length = source.randrange(1, 30)
        params = {
            "max_tokens": source.randrange(1, 30),
            "ignore_eos": source.random() < 0.5,
            "n": source.choice([1, 1, 1, 2]),
            "stop_token_ids": source.sample(range(24), source.randrange(3)),
        }
        way = source.choice(["read", "leave", "abort"])
        num_parts, num_read, last = source.randrange(1, 6), 0, None
        async with aclosing(generate(llm, length, name, **params)) as outputs:
            async for last in outputs:
                num_read += 1
                for child, output in enumerate(last.outputs):
                    expected = expected_tokens(length, child, **params)
                    assert output.token_ids == expected[: len(output.token_ids)]
                    if output.finish_reason in ("stop", "length"):
                        assert output.token_ids == expected
                if last.finished:
                    ends[f"{way} to the end"] += 1
                elif way == "leave" and num_read == num_parts:
                    ends["left"] += 1
                    break
                elif way == "abort" and num_read == num_parts:
                    with suppress(RequestError):  # it has just ended
                        await llm.abort(name)
        if way in ("read", "abort"):
            assert last is not None
            assert last.finished

    async def worker(name: str) -> None:
        source, index = random.Random(name), 0
        while time.monotonic() < end or index < 2:
            index += 1
            task = asyncio.create_task(one_request(source, f"{name}-{index}"))
            if source.random() < 0.3:
                await asyncio.sleep(source.random() * 0.05)
                ends["cancelled"] += task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def workers(name: str, count: int) -> None:
        await asyncio.gather(*[worker(f"{name}.{index}") for index in range(count)])

    threads = [
        threading.Thread(target=run, args=(workers(f"thread {index}", 1),))
        for index in range(NUM_THREADS)
    ]
    for thread in threads:
        thread.start()
    run(workers("task", NUM_TASKS))
    for thread in threads:
        thread.join(PATIENCE)
    run(settled(llm))
    assert llm.metrics()["num_preemptions"] > 0
    assert min(ends[name] for name in ("read to the end", "left", "cancelled")) > 0
    check_idle(llm)
    assert scheduler.num_finished == sum(num_accepted) > NUM_TASKS
    llm.shutdown()


def test_a_cancelled_task_frees_its_request(roomy):
    slow_down(roomy)

    async def main() -> None:
        task = asyncio.create_task(last_of(generate(roomy, 9, "mine", **LONG)))
        while (await settled(roomy))["num_running_requests"] < 1:
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await settled(roomy))["num_running_requests"] == 0
        again = await last_of(generate(roomy, 9, "mine", max_tokens=3))  # the name is free again
        assert again.outputs[0].token_ids == expected_tokens(9, max_tokens=3)

    run(main())
    check_idle(roomy)


def test_a_request_that_is_cancelled_while_it_is_made_never_starts(roomy, monkeypatch):
    is_made, go_on = threading.Event(), threading.Event()
    make_group = roomy._llm.shared.make_group

    def waits(*args: object, **kwargs: object) -> RequestGroup:
        is_made.set()
        assert go_on.wait(PATIENCE)
        return make_group(*args, **kwargs)

    monkeypatch.setattr(roomy._llm.shared, "make_group", waits)

    async def main() -> None:
        tasks = [asyncio.create_task(last_of(generate(roomy, 9, **LONG))) for _ in range(2)]
        await asyncio.to_thread(is_made.wait, PATIENCE)
        for task in tasks:  # the second one is not begun
            task.cancel()
        await asyncio.wait(tasks)
        await settled(roomy)
        go_on.set()
        output = await last_of(generate(roomy, 5, max_tokens=4))  # made after them
        assert output.outputs[0].token_ids == expected_tokens(5, max_tokens=4)

    run(main())
    check_idle(roomy)
    assert roomy.metrics()["num_finished_requests"] == 1


def test_the_end_of_an_event_loop_aborts_its_requests(roomy):
    """``asyncio.run`` closes generators; ``loop.close`` alone does not."""
    started = []

    async def starts() -> None:
        started.append(generate(roomy, 9, **LONG))
        await anext(started[-1])

    asyncio.run(starts())
    run(settled(roomy))
    check_idle(roomy)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(starts())
    loop.close()
    run(last_of(generate(roomy, 5, **LONG)))  # in another loop
    check_idle(roomy)
    assert roomy.metrics()["num_finished_requests"] == 3
    started.clear()


def test_a_closed_event_loop_is_noticed_before_its_request_ends(roomy):
    """Its task has not taken an output, so that none is made for it while the loop is open."""
    slow_down(roomy)
    loop, started = asyncio.new_event_loop(), []

    async def starts() -> None:
        started.append(generate(roomy, 9, **LONG))
        await anext(started[0])
        while not roomy._engine._streams or next(iter(roomy._engine._streams.values())).has_room:
            await asyncio.sleep(1e-3)

    loop.run_until_complete(starts())
    loop.close()
    run(last_of(generate(roomy, 5, max_tokens=6, ignore_eos=True)))  # in another loop
    run(settled(roomy))
    check_idle(roomy)
    assert roomy.metrics()["num_generated_tokens"] < 100  # of 306
    started.clear()


def test_an_exception_in_the_body_of_the_loop_aborts_the_request(roomy):
    async def main() -> None:
        async def fails() -> None:
            async with aclosing(generate(roomy, 9, "mine", **LONG)) as outputs:
                async for output in outputs:
                    raise ValueError(output.request_id)

        with pytest.raises(ValueError, match="mine"):
            await fails()
        await settled(roomy)
        check_idle(roomy)

    run(main())


def test_an_interrupt_of_the_event_loop_shuts_the_engine_down(monkeypatch, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job's may be ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    main_thread, engines = threading.main_thread().ident, []

    async def main() -> None:
        llm = make_llm(monkeypatch, AsyncLLM, num_kv_blocks=128, max_model_len=512)
        engines.append(llm)
        slow_down(llm)
        async with llm:
            running = [asyncio.create_task(last_of(generate(llm, n, **LONG))) for n in (5, 9)]
            while llm.metrics()["num_generated_tokens"] < 4:
                await asyncio.sleep(1e-3)
            signal.pthread_kill(main_thread, signal.SIGINT)
            await asyncio.gather(*running)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    (llm,) = engines
    assert not llm._engine._thread.is_alive()


# --- the end of the engine -----------------------------------------------------------------------


async def ends_with(error: type[Exception], match: str, awaited: Awaitable[object]) -> None:
    with pytest.raises(error, match=match):
        await awaited


def test_shutdown_with_requests_running_reaches_every_waiter(small):
    """Tasks of two event loops, in the middle of a step: requests that run, wait, or enter."""
    blocked, inbox = Blocked(small._llm), small._engine._inbox

    def closed(awaited: Awaitable[object]) -> Awaitable[None]:
        return ends_with(RuntimeError, CLOSED, awaited)

    def reads(length: int) -> Awaitable[RequestOutput]:
        return last_of(generate(small, length, max_tokens=40, ignore_eos=True))

    async def main() -> None:
        tasks = [asyncio.create_task(closed(reads(5)))]
        assert await asyncio.to_thread(blocked.is_in.wait, PATIENCE)
        tasks += [asyncio.create_task(closed(reads(length))) for length in range(6, 26)]
        tasks.append(asyncio.create_task(asyncio.to_thread(run, closed(reads(7)))))
        while inbox.qsize() < len(tasks) - 1:
            await asyncio.sleep(1e-3)
        tasks.append(asyncio.create_task(asyncio.to_thread(small.shutdown)))
        while inbox.qsize() < len(tasks) - 1:
            await asyncio.sleep(1e-3)
        blocked.go_on.set()
        await asyncio.gather(*tasks)
        await closed(reads(5))
        await closed(small.abort("mine"))
        await closed(small.sleep())

    run(main())
    small.shutdown()
    assert not small._engine._thread.is_alive()


def test_an_exception_in_a_step_reaches_every_waiter(small):
    execute, failure = small._llm.engine.runner.execute, ZeroDivisionError("in the third step")
    plans = []

    def fails(plan: object) -> object:
        plans.append(plan)
        if len(plans) == 3:
            raise failure
        return execute(plan)

    small._llm.engine.runner.execute = fails
    match = r"the engine has failed .*in the third step.*make a new AsyncLLM"

    def reads(length: int) -> Awaitable[None]:
        outputs = generate(small, length, max_tokens=40, ignore_eos=True)
        return ends_with(StepError, match, last_of(outputs))

    async def main() -> None:
        await asyncio.gather(*[reads(length) for length in range(5, 25)])
        await reads(5)  # later calls too
        await ends_with(StepError, match, small.abort("mine"))
        await ends_with(StepError, match, small.reset_prefix_cache())

    run(main())
    small.shutdown()


def test_a_step_that_fails_ends_its_requests_alone(small):
    runner = small._llm.engine.runner
    execute = runner.execute

    def fails(plan: StepPlan) -> object:
        runner.execute = execute
        runner.device.execute(plan, fails=True)
        raise StepError("no memory", step_id=plan.step_id, req_ids=plan.req_ids)

    runner.execute = fails

    async def main() -> None:
        await ends_with(StepError, "no memory", last_of(generate(small, 5, max_tokens=9)))
        output = await last_of(generate(small, 5, max_tokens=9))
        assert output.outputs[0].token_ids == expected_tokens(5, max_tokens=9)

    run(main())
    check_idle(small)


def test_a_request_that_is_made_while_the_engine_closes_gets_the_engines_error(small, monkeypatch):
    def make_group(*_: object, **__: object) -> RequestGroup:
        small._engine.stop()
        raise AttributeError("kv_cache")  # which the runner has freed

    monkeypatch.setattr(small._llm.shared, "make_group", make_group)
    run(ends_with(RuntimeError, CLOSED, last_of(generate(small, 5))))


def test_in_a_forked_child_every_call_fails_at_once(roomy):
    """A thread of the parent has the engine's lock, and a request runs, when the process forks."""
    slow_down(roomy)
    loop = asyncio.new_event_loop()
    open_stream = generate(roomy, 9, **LONG)
    loop.run_until_complete(anext(open_stream))

    def check() -> None:
        async def fails(awaited: Awaitable[object]) -> None:
            await ends_with(RuntimeError, "got one in a forked child", awaited)

        async def calls() -> None:
            await fails(last_of(generate(roomy, 5)))
            await fails(roomy.abort("a"))
            await fails(roomy.reset_prefix_cache())
            await fails(roomy.sleep())
            await fails(roomy.wake_up())
            await fails(roomy.is_sleeping())
            await fails(roomy.update_weights({}))
            await open_stream.aclose()

        asyncio.run(calls())
        for call in (roomy.describe, roomy.kv_report, roomy.metrics, roomy.shutdown):
            with pytest.raises(RuntimeError, match="got one in a forked child"):
                call()

    with roomy._engine._lock:
        in_forked_child(check)
    loop.run_until_complete(open_stream.aclose())
    loop.close()
    output = run(last_of(generate(roomy, 5, max_tokens=3, ignore_eos=True)))
    assert len(output.outputs[0].token_ids) == 3


def test_an_engine_that_nobody_uses_ends_its_thread(monkeypatch):
    llm = make_llm(monkeypatch, AsyncLLM)
    run(last_of(generate(llm, 5, max_tokens=3)))
    thread, reference = llm._engine._thread, weakref.ref(llm)
    del llm
    assert reference() is None
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.full
def test_a_process_ends_with_requests_running():
    """Nobody shuts the engine down, and the event loop is never closed."""
    code = """
        import asyncio
        from mrv1 import AsyncLLM, SamplingParams

        async def main():
            outputs = llm.generate([1, 2], SamplingParams(max_tokens=200, ignore_eos=True))
            await anext(outputs)
            return outputs

        llm = AsyncLLM("tiny", device="cpu", num_kv_blocks=64)
        outputs = asyncio.new_event_loop().run_until_complete(main())
        print("started")
    """
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::ResourceWarning", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "started\n", "")


# --- bad input -----------------------------------------------------------------------------------


def test_abort_ends_a_request_with_its_tokens_so_far(roomy):
    slow_down(roomy)

    async def main() -> None:
        outputs = generate(roomy, 9, "mine", **LONG)
        await anext(outputs)
        await roomy.abort("mine")
        (output,) = (await last_of(outputs)).outputs
        assert output.finish_reason == "abort"
        assert 0 < len(output.token_ids) < LONG["max_tokens"]
        assert output.token_ids == expected_tokens(9, **LONG)[: len(output.token_ids)]
        for name in ("mine", "unknown", "", 5, None, ["mine"]):
            match = "request_id: expected the id of an unfinished request, got "
            await ends_with(RequestError, match, roomy.abort(name))

    run(main())
    check_idle(roomy)


def test_a_full_queue_refuses_requests_until_one_has_ended(monkeypatch):
    llm = make_llm(
        monkeypatch, AsyncLLM, num_kv_blocks=128, max_model_len=512, max_num_queued_reqs=3
    )
    slow_down(llm)

    async def main() -> None:
        match = (
            "max_num_queued_reqs: expected at most 3 unfinished requests, got 4 with this one; "
            "try again when a request has ended, or raise it"
        )
        first, second = generate(llm, 5, "a", **LONG), generate(llm, 6, "b", n=2, **LONG)
        await anext(first)
        await anext(second)
        await ends_with(CapacityError, match, anext(generate(llm, 7, **LONG)))
        await llm.abort("a")
        await last_of(first)
        third = generate(llm, 7, max_tokens=2)
        assert (await last_of(third)).outputs[0].token_ids == expected_tokens(7, max_tokens=2)
        for _ in range(4):  # a refused request takes no place
            await ends_with(RequestError, "prompt", anext(llm.generate([])))
            await ends_with(RequestError, "no unfinished", anext(generate(llm, 7, "b", **LONG)))
        await second.aclose()
        await settled(llm)

    run(main())
    check_idle(llm)
    llm.shutdown()


def test_an_overloaded_engine_loses_nothing_that_it_has_accepted(monkeypatch):
    """Tasks in bursts, five places: each is refused at once, or gets all of its own output."""
    llm = make_llm(
        monkeypatch, AsyncLLM, max_num_queued_reqs=5, scheduling_policy="priority",
        long_prefill_token_threshold=8,
    )  # fmt: skip
    source = random.Random(1)
    found: Counter[str] = Counter()

    async def one(size: int, priority: int, fairness_id: str) -> None:
        params = SamplingParams(max_tokens=4)
        stream = llm.generate(
            list(prompt_of(size)), params, priority=priority, fairness_id=fairness_id
        )
        try:
            last = await last_of(stream)
        except CapacityError:
            found["refused"] += 1
            return
        assert last.finished
        assert last.outputs[0].token_ids == expected_tokens(size, max_tokens=4)
        found["served"] += 1

    async def main() -> None:
        for _ in range(6):
            orders = [
                (source.randint(1, 30), source.randint(-2, 2), source.choice("ab"))
                for _ in range(12)
            ]
            await asyncio.gather(*[one(*order) for order in orders])
        await settled(llm)

    run(main())
    assert found.total() == 72
    assert found["served"] >= 30
    assert found["refused"] > 0
    check_idle(llm)
    llm.shutdown()


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "3"])
def test_a_limit_of_the_queue_is_at_least_one(limit):
    with pytest.raises(ConfigError, match=r"max_num_queued_reqs: expected an integer >= 1"):
        AsyncLLM("tiny", device="cpu", max_num_queued_reqs=limit)


@pytest.mark.parametrize(
    ("prompt", "params", "request_id", "match"),
    [
        ([], None, None, "prompt: expected at least one token"),
        (5, None, None, "prompt: expected a string, a list of token ids or a dict, got int"),
        ([1], {"n": 2}, None, "sampling_params: expected SamplingParams, got dict"),
        ([1], SamplingParams(stop_token_ids=[99]), None, "stop_token_ids"),
        ([1], None, "", "request_id: expected a string that is not empty"),
        ([1], None, 5, "request_id: expected a string that is not empty"),
    ],
)
def test_a_bad_request_is_refused_as_by_llm(small, prompt, params, request_id, match):
    run(ends_with(RequestError, match, anext(small.generate(prompt, params, request_id))))
    run(settled(small))
    check_idle(small)


def test_any_exception_of_a_callers_object_is_raised_in_its_task(small):
    class Form:
        def compiled(self, *_: object) -> object:
            sys.exit("never")

    params = SamplingParams(structured_outputs=Form())

    async def main() -> None:
        with pytest.raises(SystemExit, match="never"):
            await anext(small.generate([1], params))

    run(main())
    check_idle(small)


# --- with a real runner --------------------------------------------------------------------------


@pytest.mark.gpu
def test_outputs_are_those_of_llm(device):
    """Text, a stop string, several outputs, token ids alone; also after sleep and wake-up."""
    prompts = ["ROMEO: What light through yonder", "JULIET:", [5, 6, 7]]
    params = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1),
        SamplingParams(seed=3, max_tokens=12, n=2, stop=["e"]),
        SamplingParams(seed=4, max_tokens=5, detokenize=False),
    ]
    options = {
        "device": str(device),
        "dtype": "float32" if device.type == "cuda" else "float64",
        "deterministic": True,  # requests meet in other batches
        "num_kv_blocks": 64,
        "max_num_seqs": 4,
    }

    async def main() -> None:
        async with AsyncLLM("tiny", **options) as llm:
            expected = await llm._between_steps(llm._llm.generate, prompts, params, use_tqdm=False)
            each = [llm.generate(*pair) for pair in zip(prompts, params, strict=True)]
            outputs = await asyncio.gather(*map(last_of, each))
            for output, alone in zip(outputs, expected, strict=True):
                assert output.prompt == alone.prompt
                assert output.prompt_token_ids == alone.prompt_token_ids
                assert [own.text for own in output.outputs] == [own.text for own in alone.outputs]
                assert [own.token_ids for own in output.outputs] == [
                    own.token_ids for own in alone.outputs
                ]
                assert [own.finish_reason for own in output.outputs] == [
                    own.finish_reason for own in alone.outputs
                ]
            await llm.sleep()
            assert await llm.is_sleeping()
            await ends_with(RuntimeError, "sleep", anext(llm.generate(prompts[0], params[0])))
            await llm.wake_up()
            again = await last_of(llm.generate(prompts[0], params[0]))
            assert again.outputs[0].token_ids == expected[0].outputs[0].token_ids
            assert await llm.reset_prefix_cache()

    run(main())
