"""The requests that wait for a slot and blocks."""

from __future__ import annotations

from collections import OrderedDict

from mrv1.engine.request import Request
from mrv1.runner.step import RequestId


class WaitingQueue(OrderedDict[RequestId, Request]):
    """Requests by id, in order of admission.

    The followers of a request may be held back until its prompt is computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[Request, list[Request]] = {}
        """Followers that wait for their leader's prompt."""

    def add(self, request: Request, *, holds_followers: bool) -> None:
        """Append a request and its followers; these do not wait in line yet if they are held."""
        self[request.req_id] = request
        if holds_followers and request.followers:
            self.held[request] = list(request.followers)
        else:
            self.update((follower.req_id, follower) for follower in request.followers)

    def add_first(self, request: Request) -> None:
        """Have a request go before all others."""
        self[request.req_id] = request
        self.move_to_end(request.req_id, last=False)

    def remove(self, request: Request) -> None:
        """Take out a request, held or not."""
        if request.leader in self.held:
            self.held[request.leader].remove(request)
        else:
            del self[request.req_id]

    def admit_followers(self, request: Request) -> None:
        """Let the followers of a request go on: its prompt is computed, or will not be."""
        for follower in reversed(self.held.pop(request, ())):
            self.add_first(follower)
