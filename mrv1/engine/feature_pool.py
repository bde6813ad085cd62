"""Which rows of the runner's feature buffer hold which items. Pure host code."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from operator import attrgetter

from mrv1.engine.request import Request
from mrv1.multimodal import MultimodalItem
from mrv1.runner.step import Int64Array, StagedFeatures


@dataclass(slots=True)
class _Entry:
    """The rows of an item's features."""

    rows: tuple[range, ...]
    num_rows: int
    num_users: int = 0  # items of running requests with these features that are not computed


class FeaturePool:
    """Gives rows of the buffer to items, whose features the runner then copies there.

    An item holds its rows from the first chunk that needs them to the last. Then they stay cached
    for items with the same content hash, and are evicted least recently used first; also while a
    step that reads them is in flight, as the runner's copies and steps run in launch order.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_held = 0  # rows that items of running requests hold
        self.reset()

    def reset(self) -> None:
        """Forget every item."""
        self.num_held = 0
        self._free = [range(self.num_rows)] if self.num_rows else []
        """Runs of free rows, ascending, with rows in use or cached between them."""
        self._in_use: dict[bytes, _Entry] = {}
        self._cached: OrderedDict[bytes, _Entry] = OrderedDict()  # without users, oldest use first
        self._items: dict[Request, list[MultimodalItem]] = {}  # held, in order
        self._users: dict[Request, None] = {}  # with items yet to compute, by their first chunk
        self._staged: list[StagedFeatures] = []  # for the step that is being planned
        self.start_step()

    def start_step(self) -> None:
        """Begin to plan a step."""
        self._lacks_rows = False  # an item got no rows in the step: later arrivals wait

    @property
    def has_users(self) -> bool:
        """Whether a running request has yet to compute tokens of items."""
        return bool(self._users)

    @property
    def num_free(self) -> int:
        """Rows without features that anybody may use."""
        return sum(map(len, self._free))

    @property
    def num_cached(self) -> int:
        """Rows that no running request holds, with features that a later request may use."""
        entries = [*self._cached.values()]  # at once: reports do not wait for the step that runs
        return sum(entry.num_rows for entry in entries)

    def hold(self, request: Request, start: int, end: int) -> list[StagedFeatures]:
        """Let a request hold the items of a chunk of ``fit``; return those to be staged."""
        held = self._items.setdefault(request, [])
        staged = []
        for item in request.items_in(start, end):
            if item in held:
                continue
            key = item.content_hash
            entry = self._in_use.get(key)
            if entry is None:
                self.num_held += item.num_tokens
                entry = self._cached.pop(key, None)
                if entry is None:
                    entry = _Entry(self._take(item.num_tokens), item.num_tokens)
                    staged.append(StagedFeatures(item=item, rows=entry.rows))
                self._in_use[key] = entry
            entry.num_users += 1
            held.append(item)
        return staged

    def release(self, request: Request, num_computed: int) -> None:
        """Let a request give up the items that end within its first ``num_computed`` tokens."""
        held = self._items.get(request, [])
        while held and held[0].end <= num_computed:
            key = held.pop(0).content_hash
            entry = self._in_use[key]
            entry.num_users -= 1
            if not entry.num_users:
                self._cached[key] = self._in_use.pop(key)
                self.num_held -= entry.num_rows
        if not held:
            self._items.pop(request, None)

    def forget(self, staged: StagedFeatures) -> None:
        """Record that an item's features were not copied: its requests have failed."""
        entry = self._cached.pop(staged.item.content_hash, None)
        if entry is not None:
            self._give_back(entry.rows)

    def fit(self, request: Request, start: int, count: int) -> int:
        """Return ``count``, or less: spans stay whole, and each item gets its rows of features."""
        count = request.uncut(start, count)
        if not request.multimodal:
            return count
        num_left = 0 if self._lacks_rows else self.num_rows - self.num_held
        fresh: set[bytes] = set()
        for item in request.items_in(start, start + count):
            key = item.content_hash
            if key in self._in_use or key in fresh:
                continue
            fresh.add(key)
            num_left -= item.num_tokens
            if num_left < 0:
                self._lacks_rows = True
                return max(request.uncut(start, item.start - start), 0)
        return count

    def stage(self, request: Request, start: int, end: int) -> None:
        """Let a request hold the items of its chunk ``[start, end)`` in the step."""
        if request.multimodal and start < end:
            self._staged += self.hold(request, start, end)
            self._users[request] = None

    def launch(self, num_computed: Int64Array) -> tuple[StagedFeatures, ...]:
        """Return the items to stage; release those computed by slot after the step."""
        if not self._users:
            return ()
        staged, self._staged = tuple(self._staged), []
        for request in tuple(self._users):
            end = int(num_computed[request.slot])
            self.release(request, end)
            if end >= request.multimodal[-1].end:
                del self._users[request]
        return staged

    def leave(self, request: Request) -> None:
        """Release all items of a request that loses its slot."""
        if request.multimodal:
            self.release(request, len(request.prompt_token_ids))
            self._users.pop(request, None)

    def _take(self, count: int) -> tuple[range, ...]:
        """Return ``count`` rows, taken from the least recently used entries if need be."""
        num_free = self.num_free
        while num_free < count:
            _, entry = self._cached.popitem(last=False)
            self._give_back(entry.rows)
            num_free += entry.num_rows
        rows = []
        while count:
            run = self._free.pop(0)
            if len(run) > count:
                self._free.insert(0, run[count:])
            rows.append(run[:count])
            count -= len(rows[-1])
        return tuple(rows)

    def _give_back(self, rows: tuple[range, ...]) -> None:
        """Make rows free."""
        free: list[range] = []
        for run in sorted((*self._free, *rows), key=attrgetter("start")):
            if free and free[-1].stop == run.start:
                run = range(free.pop().start, run.stop)
            free.append(run)
        self._free = free
