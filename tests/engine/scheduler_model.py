"""A model and a device in plain Python, for tests of the scheduler.

The model's next token is a hash of the whole prefix, so the expected output of a request is known
in closed form; the outputs of one request differ by their child index. The device executes a
launched step as late as possible: when the test asks for its result. Where a cache stores K and V,
the device stores a hash of the prefix, once per head group. So the step that reads a page raises
if the page was shared wrongly, reused or freed too early, written twice or never written.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from mrv1 import LoRARequest, SamplingParams
from mrv1.engine.adapters import LoadedAdapter
from mrv1.engine.request import FinishReason, Request, Status
from mrv1.engine.running_batch import LaunchedStep
from mrv1.engine.scheduler import Scheduler
from mrv1.engine.scheduler_config import Padding, SchedulerConfig
from mrv1.headwise import FULL, Visible
from mrv1.models.lora import StoredAdapter
from mrv1.runner import RequestId, SlotRequest, StepOutput, StepPlan

VOCAB = 24
EOS = 0
BLOCK_SIZE = 4
MAX_KNOWN = 5
"""Most drafts of a row of ``KnownSpeculation``."""
POISON = None
"""Content of a cell that no step has written since its block was allocated."""


ADAPTERS = [
    LoadedAdapter(
        LoRARequest(name, index, name), StoredAdapter(name=name, parts={}), name.encode()
    )
    for index, name in enumerate(("a", "b", "c", "d"), start=1)
]
"""Adapters of requests."""

Chunk = tuple[Request, int, int]
"""A request, and the first token and the number of tokens of its chunk."""


def rows_of(scheduler: Scheduler, plan: StepPlan) -> tuple[list[tuple[int, int]], list[Chunk]]:
    """Return the rows of the newest plan as [start, end), and the rows that are no decodes."""
    rows, chunks = [], []
    entering = {request.slot for request in plan.entering}
    step = scheduler._batch.newest
    for row, request in enumerate(step.rows.requests):
        start, end = step.start(row), int(step.ends[row])
        rows.append((start, end))
        if end - start > 1 or not step.samples[row] or request.slot in entering:
            chunks.append((request, start, end - start))
    return rows, chunks


def check_least_chunk(scheduler: Scheduler, chunks: Sequence[Chunk]) -> None:
    assert len(chunks) <= 1
    for request, start, count in chunks:
        assert count <= max(scheduler.block_size, request.span_size(start))


def num_free_slots(scheduler: Scheduler) -> int:
    """Return how many slots have no request."""
    return len(scheduler._slots.free)


def num_pending(scheduler: Scheduler, request: Request) -> int:
    """Return how many tokens of a request are sampled by steps in flight."""
    if request.status is not Status.RUNNING:
        return 0
    return int(scheduler._slots.num_tokens[request.slot]) - request.num_tokens


def num_pending_tokens(scheduler: Scheduler) -> int:
    """Return the known tokens that are not computed, of all requests."""
    slots = scheduler._slots
    pending = [
        int(slots.num_tokens[request.slot] - slots.num_computed[request.slot])
        for request in scheduler.running.values()
    ]
    return sum(pending) + sum(request.num_tokens for request in scheduler.waiting.values())


def check_mixed(scheduler: Scheduler, plan: StepPlan, most: int) -> None:
    """Check the newest plan, of which a step could hold all prompts: decodes wait for few tokens.

    Steps with drafts have no chunks.
    """
    rows, chunks = rows_of(scheduler, plan)
    num_tokens = sum(count for *_, count in chunks)
    if not plan.draft_token_ids and len(chunks) < len(rows) and num_tokens > most:
        check_least_chunk(scheduler, chunks)


def check_padding(scheduler: Scheduler, plan: StepPlan, padding: Padding) -> None:
    """Check the newest plan: no smaller graph would have saved more than a step's time.

    Steps with drafts have no chunks, and a full step is not cut.
    """
    counts = plan.num_scheduled_tokens.tolist()
    if plan.draft_token_ids or sum(counts) == scheduler.max_num_batched_tokens:
        return
    num_tokens = sum(count for count in counts if count > 1)
    smaller = [size for size in padding.sizes if size <= num_tokens]
    larger = [size for size in padding.sizes if size >= num_tokens]
    if smaller and larger and larger[0] - num_tokens >= padding.worth_a_step:
        rows = zip(scheduler._batch.newest.rows.requests, counts, strict=True)
        could_go = sum(
            max(count - scheduler.block_size, 0) for request, count in rows
            if not request.unsplittable
        )  # fmt: skip
        assert could_go < num_tokens - smaller[-1]


class DeviceError(AssertionError):
    """A step read or wrote a page whose content belongs to another request."""


def root_hash(cache_key: bytes) -> int:
    return zlib.crc32(cache_key)


def extend_hash(prefix_hash: int, token: int) -> int:
    return hash((prefix_hash, token))  # of integers: the same in every process


def next_token(prefix_hash: int, child: int, masked: Collection[int] = ()) -> int:
    token = ((prefix_hash >> 7) + child) % VOCAB
    while token in masked:
        token = (token + 1) % VOCAB
    return token


def ends_with_any(output: list[int], sequences: Iterable[tuple[int, ...]]) -> bool:
    return any(output[-len(sequence) :] == list(sequence) for sequence in sequences)


def expected_output(request: Request) -> tuple[list[int], FinishReason]:
    """Return the tokens that a request must yield and its finish reason, from its definition."""
    prefix_hash = root_hash(request.cache_key)
    for token in request.prompt_token_ids:
        prefix_hash = extend_hash(prefix_hash, token)
    params, output = request.params, []
    late = {*params.stop_token_ids, EOS}
    stops = {*params.stop_token_ids} if params.ignore_eos else late
    while True:
        is_early = len(output) < params.min_tokens
        token = next_token(prefix_hash, request.child, late if is_early else ())
        output.append(token)
        if token in stops:
            return output, "stop"
        if len(output) >= params.min_tokens and ends_with_any(output, params.stop_token_sequences):
            return output, "stop"
        if len(request.prompt_token_ids) + len(output) == request.max_total_tokens:
            return output, "length"
        prefix_hash = extend_hash(prefix_hash, token)


@dataclass
class Slot:
    """The state of one slot on the device."""

    request: SlotRequest
    hashes: list[int]
    """One hash per prefix: ``hashes[n]`` is the hash of the first ``n`` tokens."""
    num_computed_tokens: int
    output: list[int]
    blocks: list[list[int]]
    """Block ids per head group."""
    stopped: bool = False
    num_reserved: int = 0
    """Tokens for which the request has had blocks: drafts that were not accepted count too."""

    @property
    def num_tokens(self) -> int:
        return len(self.hashes) - 1


@dataclass
class FakeRunner:
    """Executes plans in launch order, each one as late as possible: when its result is read."""

    num_blocks: Sequence[int]
    """Number of blocks of each head group."""
    block_size: int
    max_tokens: int
    keeps: Sequence[Visible] = (FULL,)
    """The tokens that the heads of each group see."""
    cache_keys: dict[RequestId, bytes] = field(default_factory=dict)
    stops_on_device: bool = True
    """Whether a stopped row does no further work; if not, it runs until the host knows."""
    slots: dict[int, Slot] = field(default_factory=dict)
    launched: deque[StepPlan] = field(default_factory=deque)
    not_launched: set[int] = field(default_factory=set)
    """Steps whose launch failed."""
    last: StepPlan | None = None
    """The step launched last."""
    adapters_of: dict[RequestId, LoadedAdapter | None] = field(default_factory=dict)
    take_loads: Callable[[], list[tuple[int, LoadedAdapter]]] = list
    """Adapters that are written before the next step, by slot."""
    loads: dict[int, list[tuple[int, LoadedAdapter]]] = field(default_factory=dict)
    """Those of launched steps."""
    adapters: dict[int, LoadedAdapter] = field(default_factory=dict)
    """The adapter in each slot."""

    def __post_init__(self) -> None:
        self.cells: list[list[list[int | None]]] = [
            [[POISON] * self.block_size for _ in range(count)] for count in self.num_blocks
        ]

    # --- host side ------------------------------------------------------------------------

    def execute(self, plan: StepPlan, *, fails: bool = False) -> None:
        """Queue a plan; overwrite its new blocks at once, as another stream might."""
        assert 0 < plan.num_scheduled_tokens.sum() <= self.max_tokens
        assert plan.num_scheduled_tokens.min() >= 1
        assert len(set(plan.slots.tolist())) == len(plan.slots) == len(plan.req_ids)
        assert {r.slot for r in plan.entering} <= set(plan.slots.tolist())
        if plan.continues is not None:
            assert plan.continues == self.last.step_id
            assert plan.req_ids == self.last.req_ids
            assert plan.slots.tolist() == self.last.slots.tolist()
            assert plan.epochs.tolist() == self.last.epochs.tolist()
            assert plan.num_scheduled_tokens.max() == 1
            assert plan.entering == plan.preempted == plan.finished == ()
        self.last = plan
        num_shared = {r.slot: r.num_computed_tokens // self.block_size for r in plan.entering}
        for slot, per_group in plan.new_block_ids.items():
            for cells, ids in zip(self.cells, per_group, strict=True):
                for block in ids[num_shared.get(slot, 0) :]:
                    assert block >= 0, "a block that is not shared is newly allocated"
                    cells[block] = [POISON] * self.block_size
        self.loads[plan.step_id] = self.take_loads()
        self.launched.append(plan)
        if fails:
            self.not_launched.add(plan.step_id)

    def poison_free(self, scheduler: Scheduler) -> None:
        """Overwrite every free block that is not cached: no step may read its content."""
        for cells, pool in zip(self.cells, scheduler.pools, strict=True):
            for block in pool._free:
                cells[block] = [POISON] * self.block_size

    def result(
        self, *, fail_rows: frozenset[int] = frozenset(), fails: bool = False
    ) -> StepOutput | None:
        """Execute the oldest launched step; None if all of it fails."""
        while self.launched[0].step_id in self.not_launched:
            self._apply(self.launched.popleft())
        output = self._run(self.launched.popleft(), fail_rows, fails=fails)
        return None if fails else output

    # --- device side ----------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        """Free the slots that requests left, assign slots to new requests, add new blocks."""
        self.adapters |= self.loads.pop(plan.step_id)
        for slot in (*plan.preempted, *plan.finished):
            del self.slots[slot]
        for request in plan.entering:
            assert request.slot not in self.slots, "a request enters a free slot"
            self._enter(request)
        for slot, per_group in plan.new_block_ids.items():
            for held, ids in zip(self.slots[slot].blocks, per_group, strict=True):
                held += ids
        if plan.step_id in self.not_launched:
            for slot in plan.slots.tolist():
                self.slots[slot].stopped = True

    def _run(self, plan: StepPlan, fail_rows: frozenset[int], *, fails: bool) -> StepOutput:
        self._apply(plan)
        tokens: list[tuple[int, ...]] = []
        errors = {}
        for row, slot in enumerate(plan.slots.tolist()):
            state = self.slots[slot]
            assert (state.request.req_id, state.request.epoch) == (
                plan.req_ids[row],
                plan.epochs[row],
            )
            if state.stopped:
                tokens.append(())
                continue
            broken = fails or row in fail_rows
            drafts = plan.draft_token_ids[row] if plan.draft_token_ids else ()
            count = int(plan.num_scheduled_tokens[row])
            tokens.append(self._run_row(state, count, drafts, broken))
            if broken:
                state.stopped = True
                errors[row] = "no token"
                tokens[row] = ()
        return StepOutput(
            step_id=plan.step_id,
            req_ids=plan.req_ids,
            slots=plan.slots,
            epochs=plan.epochs,
            token_ids=tuple(tokens),
            errors=errors,
        )

    def _enter(self, request: SlotRequest) -> None:
        hashes = [root_hash(self.cache_keys.get(request.req_id, b""))]
        for token in request.token_ids.tolist():
            hashes.append(extend_hash(hashes[-1], token))
        output = request.token_ids[request.prompt_len :].tolist()
        blocks: list[list[int]] = [[] for _ in self.keeps]
        self.slots[request.slot] = Slot(
            request, hashes, request.num_computed_tokens, output, blocks
        )

    def _run_row(
        self, state: Slot, count: int, drafts: Sequence[int], broken: bool
    ) -> tuple[int, ...]:
        """Write K and V of ``count`` tokens, read all visible tokens, sample after the last.

        The last tokens may be drafts: the row samples after each that it would have drawn itself.
        """
        held = self.adapters.get(state.request.adapter_slot)
        assert held is self.adapters_of.get(state.request.req_id), "the slot has its adapter"
        start, end = state.num_computed_tokens, state.num_computed_tokens + count
        assert end <= state.num_tokens + len(drafts), "only known tokens and drafts are computed"
        assert not drafts or end == state.num_tokens + len(drafts), "drafts follow known tokens"
        hashes = [*state.hashes]
        for draft in drafts:
            hashes.append(extend_hash(hashes[-1], draft))
        state.num_reserved = max(state.num_reserved, end)
        for cells, seen, blocks in zip(self.cells, self.keeps, state.blocks, strict=True):
            num_blocks = -(-state.num_reserved // self.block_size)
            assert len(blocks) == num_blocks, "blocks for exactly these tokens"
            # the oldest position of the window of the first token computed here
            oldest = 0 if seen.is_full else start - seen.window + 1
            for position in range(end):
                if seen.sink <= position < oldest:
                    continue
                assert blocks[position // self.block_size] >= 0, "a visible token has a block"
                block = cells[blocks[position // self.block_size]]
                offset = position % self.block_size
                name = f"{state.request.req_id}: position {position}"
                if position >= start:
                    if block[offset] is not POISON:
                        raise DeviceError(f"{name} is in use")
                    block[offset] = POISON if broken else hashes[position + 1]
                elif block[offset] != state.hashes[position + 1]:
                    raise DeviceError(f"{name} was overwritten")
        state.num_computed_tokens = end
        if broken or end < state.num_tokens:
            return ()
        tokens: list[int] = []
        for draft in (*drafts, None):
            tokens.append(self._sample(state))
            if state.stopped or tokens[-1] != draft:
                break
        state.num_computed_tokens = state.num_tokens - 1
        for cells, blocks in zip(self.cells, state.blocks, strict=True):
            for position in range(state.num_computed_tokens, end):  # drafts that were wrong
                block = blocks[position // self.block_size]
                cells[block][position % self.block_size] = POISON
        return tuple(tokens)

    def _sample(self, state: Slot) -> int:
        """Append the next token of a request and return it."""
        request = state.request
        is_early = state.num_tokens < request.min_total_tokens
        masked = request.late_token_ids if is_early else ()
        token = next_token(state.hashes[-1], request.child, masked)
        state.hashes.append(extend_hash(state.hashes[-1], token))
        state.output.append(token)
        if self.stops_on_device:
            sequences = request.stop_token_sequences
            may_end = state.num_tokens >= request.min_total_tokens
            state.stopped = (
                token in request.stop_token_ids
                or (may_end and ends_with_any(state.output, sequences))
                or state.num_tokens == request.max_total_tokens
            )
        return token


@dataclass
class KnownSpeculation:
    """Proposes drafts of which some are right; equal requests get equal drafts."""

    outputs: dict[RequestId, list[int]] = field(default_factory=dict)
    num_accepted: int = 0

    def propose(
        self, requests: Sequence[Request], room: Sequence[int]
    ) -> dict[int, tuple[int, ...]]:
        drafts = {}
        for row, (request, most) in enumerate(zip(requests, room, strict=True)):
            if request.req_id not in self.outputs:
                self.outputs[request.req_id] = expected_output(request)[0]
            known = len(request.output_token_ids)
            seed = zlib.crc32(f"{request.req_id} {known}".encode())
            found = self.outputs[request.req_id][known : known + min(most, seed % (MAX_KNOWN + 1))]
            if found and seed & 64:
                found[seed % len(found)] = EOS  # mostly wrong
            if found:
                drafts[row] = tuple(found)
        return drafts

    def note(self, step: LaunchedStep, output: StepOutput, succeeded: object) -> None:
        """Count accepted drafts."""
        for drafts, tokens in zip(step.draft_token_ids, output.token_ids, strict=False):
            self.num_accepted += max(len(tokens) - 1, 0) if drafts else 0


def make_request(
    req_id: str,
    prompt: tuple[int, ...],
    *,
    unsplittable: tuple[tuple[int, int], ...] = (),
    cache_key: bytes = b"",
    adapter: LoadedAdapter | None = None,
    priority: int = 0,
    fairness_id: str = "",
    **params: object,
) -> Request:
    sampling_params = SamplingParams(**params)
    request = Request(
        req_id=req_id,
        prompt_token_ids=prompt,
        params=sampling_params,
        seed=0,
        max_total_tokens=len(prompt) + sampling_params.max_tokens,
        unsplittable=unsplittable,
        cache_key=cache_key if adapter is None else adapter.key,
        adapter=adapter,
        priority=priority,
        fairness_id=fairness_id,
    )
    request.add_followers()
    return request


def new_scheduler(
    made: type[Scheduler], *, speculation: object = None, **options: object
) -> Scheduler:
    """Return a scheduler of the class ``made`` with fields of ``SchedulerConfig``."""
    return made(SchedulerConfig(**options), speculation)


def make_scheduler(**overrides: object) -> Scheduler:
    """Return a scheduler with ``num_blocks`` blocks for each head group of ``keeps``."""
    options = {
        "num_blocks": 64,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "keeps": (FULL,),
    } | overrides
    if isinstance(options["num_blocks"], int):
        options["num_blocks"] = [options["num_blocks"]] * len(options["keeps"])
    return new_scheduler(Scheduler, **options, eos_token_ids=[EOS])


def make_runner(scheduler: Scheduler, **options: object) -> FakeRunner:
    return FakeRunner(
        [pool.num_blocks for pool in scheduler.pools],
        scheduler.block_size,
        scheduler.max_num_batched_tokens,
        scheduler.pools.keeps,
        take_loads=scheduler.adapter_slots.take_loads,
        **options,
    )


def output_of(plan: StepPlan, *token_ids: tuple[int, ...], **kwargs: object) -> StepOutput:
    return StepOutput(
        step_id=plan.step_id,
        req_ids=plan.req_ids,
        slots=plan.slots,
        epochs=plan.epochs,
        token_ids=token_ids,
        **kwargs,
    )


def scheduled(plan: StepPlan) -> dict[RequestId, int]:
    return dict(zip(plan.req_ids, plan.num_scheduled_tokens.tolist(), strict=True))


def new_blocks(plan: StepPlan, req_id: str) -> tuple[int, ...]:
    """Return the ids of the blocks that the plan gives a request; empty if it gives none."""
    slot = int(plan.slots[plan.req_ids.index(req_id)])
    (block_ids,) = plan.new_block_ids.get(slot, ((),))
    return block_ids


def prompt_of(num_tokens: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + i) % (VOCAB - 1) + 1 for i in range(num_tokens))


def drain(scheduler: Scheduler, runner: FakeRunner, limit: int = 20_000) -> list[StepPlan]:
    """Run until all requests end, with as many steps in flight as allowed; return the plans."""
    plans: list[StepPlan] = []
    while True:
        plan = None
        if scheduler.num_steps_in_flight < scheduler.max_steps_in_flight:
            plan = scheduler.schedule()
        if plan is not None:
            runner.execute(plan)
            plans.append(plan)
            assert len(plans) < limit, "the scheduler makes progress"
        elif scheduler.num_steps_in_flight:
            scheduler.update(runner.result())
            runner.poison_free(scheduler)
        else:
            return plans
