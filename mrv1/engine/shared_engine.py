"""An engine that several threads share: their requests, the steps, each caller's outputs."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping

from mrv1.engine.core import EngineCore
from mrv1.engine.guards import WITHIN, Turns, in_turn, recovers
from mrv1.engine.outputs import RequestOutput
from mrv1.engine.prompts import Submission, make_group, refused
from mrv1.engine.request import Request
from mrv1.engine.request_group import RequestGroup
from mrv1.engine.tokenizer import Tokenizer
from mrv1.errors import RequestError


class SharedEngine:
    """Takes requests of several threads, which take turns and share the steps.

    A request is *awaited* by a call that takes its outputs (``generate``, ``stream``), or else
    *undelivered* until ``step`` returns its outputs.
    """

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self.turns = self._turns = Turns()
        self._tokenizer = tokenizer
        self._core: EngineCore | None = core
        self._is_closed = False
        self._is_changing = False
        self._groups: dict[str, RequestGroup] = {}  # last output not delivered, by id
        self._undelivered: dict[str, RequestGroup] = {}  # changed, for ``step`` to return
        self._awaited: dict[str, RequestGroup] = {}  # changed, for their callers to take
        self._given_up: deque[str] = deque()  # to abort: their caller has ended before them
        self._ids = itertools.count()

    @property
    def engine(self) -> EngineCore:
        """The engine below; a RuntimeError if it was closed."""
        if self._core is None or self._is_closed:
            raise RuntimeError("LLM: expected an open engine, got one that was closed")
        return self._core

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do or to deliver."""
        return self.engine.has_unfinished_requests or self._is_changing or bool(self._undelivered)

    def new_id(self) -> str:
        """Return an id that no request has."""
        return next(req_id for req_id in map(str, self._ids) if req_id not in self._groups)

    @in_turn
    @recovers
    def add(self, given: Submission, request_id: str | None) -> str:
        """Queue an undelivered request, and return its id."""
        req_id = self.new_id() if request_id is None else request_id
        group = self.make_group(given, req_id)
        self.queue(group)
        return group.req_id

    @in_turn
    @recovers
    def add_awaited(
        self, given: Submission, rows: dict[str, int], row: int
    ) -> RequestOutput | None:
        """Queue an awaited request as ``row``; return its output if it is refused."""
        req_id = self.new_id()
        rows[req_id] = row  # before it is queued: an interrupt in between then aborts it
        try:
            self.queue(self.make_group(given, req_id, is_awaited=True))
        except RequestError as error:
            del rows[req_id]
            return refused(req_id, given.prompt, error)
        return None

    def make_group(
        self, given: Submission, req_id: str, *, is_awaited: bool = False
    ) -> RequestGroup:
        """Return a request for ``queue``; it needs no turn."""
        return make_group(self.engine, self._tokenizer, given, req_id, is_awaited=is_awaited)

    def queue(self, group: RequestGroup) -> None:
        """Queue a request of ``make_group``; errors as ``EngineCore.queue``: nothing is queued."""
        req_id = group.req_id
        former = self._groups.get(req_id)
        if former is not None:
            giver = "generate() or stream()" if former.is_awaited else "step()"
            free = "that no unfinished request has"
            if former.finished:
                free = f"without an output that {giver} has yet to return"
            raise RequestError(f"request_id: expected an id {free}, got {req_id!r}")
        self.engine.queue(group.requests[0])
        self._groups[req_id] = group

    @in_turn
    @recovers
    def step(self) -> list[RequestOutput]:
        """Run one step and return the outputs of undelivered requests that have changed."""
        self._run_step()
        changed, self._undelivered = self._undelivered, {}
        return [self._output(group) for group in changed.values()]

    @in_turn
    @recovers
    def abort(self, request_id: str) -> None:
        """End all outputs of a request, if it has not ended; ``step`` delivers their tokens."""
        group = self._groups.get(request_id)
        if group is None:
            return
        aborted = [self.engine.abort(request.req_id) for request in group.requests]
        if any(request is not None for request in aborted):
            self._note_changed(group)

    @in_turn
    @recovers
    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; return False, and forget nothing, if blocks are in use."""
        return self.engine.reset_prefix_cache()

    @in_turn
    def close(self) -> None:
        """End all requests and give the device memory back; closing twice is harmless."""
        with self._turns.reports:  # what a report reads is there until its end
            if self._turns.is_reporting:  # in this thread, which a signal handler has interrupted
                raise RuntimeError(WITHIN)
            self._is_closed = True
        if self._core is not None:
            self._core.runner.close()
            self._core = None
            self._undelivered.clear()
            self._awaited.clear()
            self._given_up.clear()
            self._groups.clear()

    def _run_step(self) -> None:
        """Run a step and record the requests that have changed."""
        self._abort_given_up()
        for request in self.engine.step():
            self._take_in(request)

    def _take_in(self, request: Request) -> None:
        """Record that a request has changed; end it if its text now contains a stop string."""
        first = request if request.leader is None else request.leader
        group = self._groups.get(request.name)
        if group is None or group.requests[0] is not first:
            return  # aborted: an error ended the request's ``generate`` or ``stream``
        found = group.find_stop(request)
        if found is not None:
            self.engine.stop(request, *found)
        self._note_changed(group)

    def _note_changed(self, group: RequestGroup) -> None:
        (self._awaited if group.is_awaited else self._undelivered)[group.req_id] = group

    @in_turn
    @recovers
    def step_for(
        self, rows: Mapping[str, int], *, finished_only: bool = False
    ) -> list[RequestOutput]:
        """Return the changed outputs of ``rows``; if there are none yet, run a step first."""
        if rows.keys().isdisjoint(self._awaited):
            self._run_step()
        changed = [self._awaited.pop(req_id) for req_id in tuple(self._awaited) if req_id in rows]
        return [self._output(group) for group in changed if group.finished or not finished_only]

    @in_turn
    @recovers
    def step_alone(self) -> None:
        """Run a step; ``take_changed`` returns its outputs."""
        self._run_step()

    @in_turn
    @recovers
    def take_changed(self, takes: Callable[[RequestGroup], bool]) -> list[RequestOutput]:
        """Return changed outputs that have ended or that ``takes`` accepts; keep the others."""
        outputs = []
        for group in tuple(self._awaited.values()):
            if group.finished or takes(group):
                del self._awaited[group.req_id]
                outputs.append(self._output(group))
        return outputs

    def give_up(self, rows: Mapping[str, int]) -> None:
        """Abort the unfinished requests of a ``generate`` or ``stream`` that has ended.

        A forgotten ``stream`` ends when it is garbage-collected, maybe within another call of the
        same thread: the next step then aborts its request.
        """
        self._given_up.extend(rows)
        if rows and not self._turns.is_mine:
            self._turns.take(self.abort_forgotten)

    @recovers
    def abort_forgotten(self) -> None:
        """Abort the requests whose callers have ended before them."""
        self._abort_given_up()

    def _abort_given_up(self) -> None:
        """Abort the requests in ``_given_up``, one by one: an interrupt leaves the rest there."""
        while self._given_up and self._core is not None:  # without a core nothing is left to abort
            req_id = self._given_up[0]
            group = self._groups.get(req_id)
            for request in () if group is None else group.requests:
                self._core.abort(request.req_id)
            self._groups.pop(req_id, None)
            self._awaited.pop(req_id, None)
            self._given_up.popleft()

    def _recover(self, error: BaseException) -> None:
        """Record requests that ended as changed; abort a request that was only partly added."""
        del error  # the engine itself sets an error on the requests that it ends
        if self._core is None:
            return
        for group in tuple(self._groups.values()):
            for request in group.requests:
                if request.finished:
                    self._take_in(request)
        known = {request for group in self._groups.values() for request in group.requests}
        for request in self._core.scheduler.unfinished:
            if request not in known:
                self._core.abort(request.req_id)

    def _output(self, group: RequestGroup) -> RequestOutput:
        """Return the output of a request up to now; forget the request if it has ended."""
        output = group.output()
        if output.finished:
            del self._groups[group.req_id]
        return output
