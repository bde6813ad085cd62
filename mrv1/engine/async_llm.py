"""The public entry for asyncio: requests of many tasks and threads, one thread that runs steps."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ParamSpec, Self, TypeVar, Unpack
from uuid import uuid4

from mrv1.engine.adapters import LoRARequest
from mrv1.engine.chat import ChatOptions, Message
from mrv1.engine.llm import LLM
from mrv1.engine.llm_options import LLMOptions
from mrv1.engine.outputs import RequestOutput
from mrv1.engine.prompts import Prompt, Submission
from mrv1.engine.reports import Metrics
from mrv1.engine.request_group import RequestGroup
from mrv1.errors import CapacityError, ConfigError, RequestError, StepError, short
from mrv1.headwise import HeadPolicy
from mrv1.models import NamedTensors
from mrv1.options import takes
from mrv1.runner import KVUsage
from mrv1.sampler import SamplingParams

P = ParamSpec("P")
R = TypeVar("R")
OUTPUT_SHARE = 0.1
"""Share of its time in which the engine's thread makes outputs of unfinished requests. Their tasks
then run for about as long in another thread, and Python runs one thread at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncLLMOptions(LLMOptions):
    """The parameters of ``AsyncLLM``: those of ``LLM``, and the limit of its queue."""

    max_num_queued_reqs: int | None = None
    """Most requests that wait or run at a time; a request with ``n`` outputs counts ``n`` times.
    ``generate`` refuses further requests. Default: no limit."""


class AsyncLLM:
    """Generates text for the tasks of any number of asyncio event loops.

    One thread runs the steps for the tasks of all loops and threads; another tokenizes prompts and
    compiles grammars. Arguments, outputs and errors are those of ``LLM``.

    **Back-pressure.** While a task has not taken an output, no other is made for it; outputs are
    cumulative, so the task misses no text. Outputs of many requests are made in turns, for a tenth
    of the time; the last output of a request is made at once.

    **The end of a task.** When the task of a ``generate`` is cancelled or leaves the
    ``async for``, or its event loop closes, the request is aborted. After an exception in its
    body, an ``async for`` closes the generator only when the generator is garbage-collected;
    ``contextlib.aclosing`` closes it at once.

    **The end of the engine.** ``shutdown``, the end of ``async with`` and the end of the process
    wait for the step that runs. An exception in a step ends the engine. Then every waiting
    ``generate`` and every later call raises an error.

    **Forks.** A forked child has no engine thread: there every call raises a ``RuntimeError``,
    while the parent's engine goes on.

    Examples:
        >>> async def complete(prompt: str) -> int:
        ...     async with AsyncLLM("tiny") as llm:
        ...         async for output in llm.generate(prompt, SamplingParams(max_tokens=8)):
        ...             last = output
        ...     return len(last.outputs[0].token_ids)
        >>> asyncio.run(complete("ROMEO:"))
        8
    """

    @takes(AsyncLLMOptions)
    def __init__(
        self,
        model: str,
        *,
        max_num_queued_reqs: int | None = None,
        **options: Any,  # noqa: ANN401 - those of ``LLM``, which checks them
    ) -> None:
        """Load ``model``, allocate its KV cache and start the engine's thread.

        Raises:
            ConfigError: an argument or the checkpoint is wrong.
            UnsupportedDeviceError: the device is missing or lacks a feature.
            CapacityError: the KV cache does not fit.
        """
        limit: object = max_num_queued_reqs
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ConfigError(
                f"max_num_queued_reqs: expected an integer >= 1 or None, got {short(limit)}"
            )
        self._llm = LLM(model, **options)
        self._engine = _EngineThread(self._llm, max_num_queued_reqs)
        self._inputs = ThreadPoolExecutor(1, thread_name_prefix="mrv1-inputs")
        """Makes requests, one at a time: a tokenizer serves one thread."""
        weakref.finalize(self, self._engine.stop)  # also runs at the end of the process

    # --- requests -------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        fairness_id: str = "",
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output of one prompt as it grows; the last output is finished.

        The request copies its values at the call, and is checked and queued at the first
        ``anext``; closing the generator early aborts it. ``request_id`` names it for ``abort``,
        unique among unfinished requests; None = a new id. Other arguments are as for
        ``LLM.stream``.

        Raises:
            RequestError: the prompt, the parameters or the id were refused, or the request failed,
                as with NaN in its logits; at the call if the prompt cannot be copied.
            CapacityError: the queue is full (``max_num_queued_reqs``).
            StepError: a step of the request failed, or the engine has failed.
            RuntimeError: the engine is closed or asleep.
        """
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        given = Submission(prompt, sampling_params, priority, fairness_id, lora_request)
        return self._generate(given, request_id)

    async def _generate(
        self, given: Submission, request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output of a submission; for ``generate``."""
        params = given.params
        stream = self._engine.open(
            uuid4().hex if request_id is None else request_id,
            params.n if isinstance(params, SamplingParams) else 1,
        )
        is_finished = False
        try:
            make = partial(self._llm.shared.make_group, given, stream.req_id, is_awaited=True)
            self._inputs.submit(self._engine.queue, stream, make)
            while not is_finished:
                output = await stream.take()
                is_finished = output.finished
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            if not is_finished:
                self._engine.discard(stream)

    async def abort(self, request_id: str) -> None:
        """End all outputs of a request; its ``generate`` yields their tokens so far, finished.

        Outputs that had not ended get ``finish_reason="abort"``.

        Raises:
            RequestError: no unfinished request has this id.
            StepError, RuntimeError: the engine has failed or is closed.
        """
        self._engine.check_open()
        aborted = await asyncio.get_running_loop().run_in_executor(
            self._inputs,  # it has made all earlier requests by then
            partial(self._engine.submit, self._engine.abort, request_id),
        )
        await asyncio.wrap_future(aborted)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests whose caller gives none, as ``LLM`` does."""
        return self._llm.get_default_sampling_params()

    def chat_prompt(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Return a conversation as a prompt for ``generate``, as ``LLM.chat_prompt`` does."""
        return self._llm.chat_prompt(messages, **options)

    def get_tokenizer(self) -> Any:  # noqa: ANN401 - one of many classes of transformers
        """Return the checkpoint's tokenizer, as ``LLM.get_tokenizer`` does."""
        return self._llm.get_tokenizer()

    # --- adapters: while requests run -----------------------------------------------------

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; see ``LLM.add_lora``. The thread that makes requests reads it."""
        self._engine.check_open()
        core = self._llm.engine
        loop = asyncio.get_running_loop()
        adapter = await loop.run_in_executor(self._inputs, core.adapters.prepared, lora_request)
        return await self._between_steps(core.adapters.add, adapter)

    async def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter; see ``LLM.remove_lora``."""
        return await self._between_steps(self._llm.remove_lora, lora_int_id)

    async def pin_lora(self, lora_int_id: int) -> bool:
        """Let an adapter keep its slot; see ``LLM.pin_lora``."""
        return await self._between_steps(self._llm.pin_lora, lora_int_id)

    async def list_loras(self) -> set[int]:
        """Return the numbers of the loaded adapters."""
        self._engine.check_open()
        return self._llm.list_loras()

    # --- memory and weights: between two steps, as the methods of ``LLM`` -------------------

    async def reset_prefix_cache(self) -> bool:
        """Drop every cached block; see ``LLM.reset_prefix_cache``."""
        return await self._between_steps(self._llm.reset_prefix_cache)

    async def sleep(self, level: int = 1) -> None:
        """Give most device memory back until ``wake_up``; see ``LLM.sleep``."""
        await self._between_steps(self._llm.sleep, level)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the device memory back; see ``LLM.wake_up``."""
        await self._between_steps(self._llm.wake_up, tags)

    async def is_sleeping(self) -> bool:
        """Whether weights or KV cache are asleep; requests are then refused."""
        self._engine.check_process()
        return self._llm.is_sleeping()

    async def update_weights(self, named_tensors: NamedTensors, *, partial: bool = False) -> None:
        """Overwrite the model's weights in place; see ``LLM.update_weights``."""
        await self._between_steps(self._llm.update_weights, named_tensors, partial=partial)

    async def set_head_policy(self, policy: HeadPolicy | str | Path | None) -> None:
        """Let KV heads see other tokens from now on; see ``LLM.set_head_policy``."""
        await self._between_steps(self._llm.set_head_policy, policy)

    # --- reports and end ------------------------------------------------------------------

    def describe(self) -> str:
        """Return the start-up line: model, device, path, dtypes, blocks, sampling defaults."""
        self._engine.check_process()
        return self._llm.describe()

    def kv_report(self) -> KVUsage:
        """Return the KV cache's sizes in bytes by head group, and how much of it is in use."""
        self._engine.check_process()
        return self._llm.kv_report()

    def metrics(self) -> Metrics:
        """Return counters of steps, tokens, requests and blocks as a plain dict."""
        self._engine.check_process()
        return self._llm.metrics()

    def shutdown(self) -> None:
        """End all requests after the step that runs, and give the device memory back; idempotent.

        Every ``generate`` that waits raises a ``RuntimeError``, as does this in a forked child.
        """
        self._engine.check_process()
        self._engine.stop()
        self._inputs.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        """Return the engine itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Shut down; the event loop runs on meanwhile."""
        await asyncio.to_thread(self.shutdown)

    async def _between_steps(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.wrap_future(self._engine.submit(call, *args, **kwargs))


class _Stream:
    """Brings the outputs of one request from the engine's thread to the task that reads them.

    It has room for one output: the engine's thread makes another when the task has taken it; the
    last output, or an error, replaces one that was not taken.
    """

    def __init__(self, req_id: str, num_places: int) -> None:
        self.req_id = req_id
        self.num_places = num_places  # in the queue: one for each of its ``n`` outputs
        self.loop = asyncio.get_running_loop()
        self.has_room = True
        self.is_discarded = False
        self._arrived = asyncio.Event()
        self._item: RequestOutput | BaseException  # what has arrived last

    def put(self, item: RequestOutput | BaseException) -> None:
        """Give the task an output or an error; called in the event loop."""
        self._item = item
        self._arrived.set()

    async def take(self) -> RequestOutput:
        """Wait for the next output; raise an error that has come in its place."""
        await self._arrived.wait()
        self._arrived.clear()
        self.has_room = True
        if isinstance(self._item, BaseException):
            raise self._item
        return self._item


class _EngineThread:
    """The thread that runs the steps of an ``LLM``, and makes calls of other threads in between.

    It has no reference to its ``AsyncLLM``, whose garbage collection stops the thread.
    """

    def __init__(self, llm: LLM, max_num_queued_reqs: int | None) -> None:
        self._llm = llm
        self._max_num_queued_reqs = max_num_queued_reqs
        self._streams: dict[str, _Stream] = {}  # unfinished, by id; of the engine's thread
        self._inbox: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        """Calls for the engine's thread; None = stop."""
        self._lock = threading.Lock()  # of unfinished requests, ``_is_open`` and the inbox
        self._num_unfinished = 0  # places of requests that wait, run or are being made
        self._is_open = True
        self._process = os.getpid()  # a forked child has the object, but not its thread
        self._failure: BaseException | None = None
        self._num_steps = 0  # steps until the failure
        self._step_end = self._deadline = time.perf_counter()
        """When the last step ended, and until when outputs that have not ended are made."""
        self._thread = threading.Thread(target=self._run, name="mrv1-engine", daemon=True)
        self._thread.start()

    # --- for all threads --------------------------------------------------------------------

    def open(self, req_id: str, num_outputs: int) -> _Stream:
        """Return a new request's stream, in its event loop; CapacityError: the queue is full."""
        stream = _Stream(req_id, num_outputs)
        self.check_process()  # before the lock, which a thread of the parent may have had
        with self._lock:
            self.check_open()
            limit, total = self._max_num_queued_reqs, self._num_unfinished + num_outputs
            if limit is not None and total > limit:
                raise CapacityError(
                    f"max_num_queued_reqs: expected at most {limit} unfinished requests, got "
                    f"{total} with this one; try again when a request has ended, or raise it"
                )
            self._num_unfinished = total
        return stream

    def check_open(self) -> None:
        """Raise a StepError if the engine failed, a RuntimeError if it is closed or forked."""
        self.check_process()
        if not self._is_open:
            raise self._end_error()

    def check_process(self) -> None:
        """Raise a RuntimeError in a forked child, where the engine's thread is not."""
        if not self._is_here:
            raise RuntimeError(
                f"AsyncLLM: expected a call in the process of its thread ({self._process}), got "
                f"one in a forked child ({os.getpid()}); make the engine in the child"
            )

    @property
    def _is_here(self) -> bool:
        return os.getpid() == self._process

    def submit(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Have the engine's thread make a call before its next step; errors as ``check_open``."""
        future: Future[R] = Future()
        self.check_process()
        with self._lock:
            self.check_open()
            self._inbox.put((future, partial(call, *args, **kwargs)))
        return future

    def queue(self, stream: _Stream, make: Callable[[], RequestGroup]) -> None:
        """Make a request and have it queued; an error goes to the stream."""
        try:
            self.check_open()
            added = self.submit(self._add, stream, make())
        except BaseException as error:  # of any type: the task waits for it
            # While the engine closes, parts that a request needs vanish one after the other.
            self._hand_over([(stream, error if self._is_open else self._end_error())])
        else:
            added.add_done_callback(partial(self._report, stream))

    def discard(self, stream: _Stream) -> None:
        """Have a request aborted that nobody reads any more, if it has not ended."""
        if not self._is_here:
            return  # it is the parent's
        self._give_place_back(stream)
        self._inbox.put((Future(), partial(self._discard, stream)))

    def _give_place_back(self, stream: _Stream) -> None:
        with self._lock:
            self._num_unfinished -= stream.num_places
            stream.num_places = 0  # given back once

    def stop(self) -> None:
        """End the thread after its step, and wait for its end; in a forked child do nothing."""
        if not self._is_here:
            return
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- for calls in the engine's thread -----------------------------------------------------

    def abort(self, req_id: object) -> None:
        """Abort a request; a RequestError if no unfinished request has this id."""
        if not isinstance(req_id, str) or req_id not in self._streams:
            raise RequestError(
                f"request_id: expected the id of an unfinished request, got {short(req_id)}"
            )
        self._llm.abort(req_id)

    def _add(self, stream: _Stream, group: RequestGroup) -> None:
        if not stream.is_discarded:  # while it was made
            self._llm.shared.queue(group)
            stream.req_id = group.req_id  # the caller's may be of a class with a hash of its own
            self._streams[stream.req_id] = stream

    def _report(self, stream: _Stream, added: Future[None]) -> None:
        error = added.exception()
        if error is not None:
            self._hand_over([(stream, error)])

    def _discard(self, stream: _Stream) -> None:
        stream.is_discarded = True
        if self._streams.get(stream.req_id) is stream:
            del self._streams[stream.req_id]
            self._llm.shared.give_up({stream.req_id: 0})

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._make_calls():
                self._step()
        except BaseException as error:  # of any type: all tasks must learn of it
            failure = error
        self._end(failure)

    def _make_calls(self) -> bool:
        """Make the calls in the inbox; without a request, wait for one. Return False to stop."""
        is_idle = not self._llm.has_unfinished_requests()
        while is_idle or not self._inbox.empty():
            entry = self._inbox.get()
            if entry is None:
                return False
            future, call = entry
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # of any type: it is the caller's
                    future.set_exception(error)
            is_idle = False
        return True

    def _step(self) -> None:
        """Run a step, and hand over the outputs that have ended and some of the others."""
        self._llm.shared.step_alone()
        now = time.perf_counter()
        self._deadline, self._step_end = now + OUTPUT_SHARE * (now - self._step_end), now
        outputs = self._llm.shared.take_changed(self._takes)
        self._hand_over([(self._streams[each.request_id], each) for each in outputs])

    def _takes(self, group: RequestGroup) -> bool:
        """Whether an output that is not the last is handed over now, or is left for later."""
        stream = self._streams[group.req_id]
        is_read = stream.has_room or stream.loop.is_closed()
        return is_read and time.perf_counter() < self._deadline

    def _hand_over(self, items: Iterable[tuple[_Stream, RequestOutput | BaseException]]) -> None:
        """Give outputs and errors to their tasks: one call for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Any]]] = {}
        for stream, item in items:
            stream.has_room = False
            by_loop.setdefault(stream.loop, []).append((stream, item))
            if isinstance(item, RequestOutput) and item.finished:
                del self._streams[stream.req_id]
                self._give_place_back(stream)
        for loop, own in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, own)
            except RuntimeError:  # the loop is closed: its tasks will read nothing more
                for stream, _ in own:
                    self.discard(stream)

    def _end(self, failure: BaseException | None) -> None:
        """Give every task that waits an error, and close the engine."""
        with self._lock:
            self._failure, self._num_steps = failure, self._llm.metrics()["num_steps"]
            self._is_open = False
        while not self._inbox.empty():
            entry = self._inbox.get()
            if entry is not None and entry[0].set_running_or_notify_cancel():
                entry[0].set_exception(self._end_error())
        self._hand_over([(stream, self._end_error()) for stream in self._streams.values()])
        self._llm.close()

    def _end_error(self) -> Exception:
        """Return why the thread has ended, as a new exception: each task raises its own."""
        if self._failure is None:
            return RuntimeError("AsyncLLM: expected an open engine, got one that was closed")
        error = StepError(
            f"the engine has failed and serves no more requests ({self._failure!r}): make a new "
            "AsyncLLM",
            step_id=self._num_steps,
        )
        error.__cause__ = self._failure
        return error


def _put_all(items: Iterable[tuple[_Stream, RequestOutput | BaseException]]) -> None:
    for stream, item in items:
        stream.put(item)
