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
        """Request -> its followers, which are held back until its prompt is computed."""

    def add(self, request: Request, *, holds_followers: bool) -> None:
        """Append a request and its followers; ``holds_followers`` holds the followers back."""
        self[request.req_id] = request
        if holds_followers and request.followers:
            self.held[request] = list(request.followers)
        else:
            self.update((follower.req_id, follower) for follower in request.followers)

    def add_first(self, request: Request) -> None:
        """Put a request before all others."""
        self[request.req_id] = request
        self.move_to_end(request.req_id, last=False)

    def remove(self, request: Request) -> None:
        """Remove a request, held back or not."""
        if request.leader in self.held:
            self.held[request.leader].remove(request)
        else:
            del self[request.req_id]

    def admit_followers(self, request: Request) -> None:
        """Put the held-back followers of a request first: its prompt is computed, or it ended."""
        for follower in reversed(self.held.pop(request, ())):
            self.add_first(follower)
