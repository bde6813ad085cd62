"""Features of a step besides its tokens: drafts, a signal per layer, names of failed kernels."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from mrv1 import EngineConfig, ModelRunner, SamplingParams, StepError, StepPlan
from mrv1.engine.core import EngineCore
from mrv1.kernels import reference
from mrv1.runner import KVReady, SlotRequest, StepOutput
from mrv1.runner.kv_listener import LayerEvents
from mrv1.runner.rows import StepShape
from tests.models.families import tiny_checkpoint
from tests.runner.test_cuda_graph import LaunchedGraphs
from tests.runner.test_model_runner import BLOCK_SIZE, PROMPTS, enter, make_plan, make_runner

NUM_TOKENS = 12
NUM_DRAFTED = 21
"""Tokens of a run with drafts."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3")
    return path


# --- a foreign scheduler -------------------------------------------------------------------------


class ForeignScheduler:
    """A minimal scheduler: one block list per slot, no shared blocks, first come first served."""

    def __init__(self, runner: ModelRunner, num_slots: int) -> None:
        self.runner, self.step_id = runner, 0
        self.waiting: deque[tuple[str, list[int], int]] = deque()
        self.free_slots = deque(range(num_slots))
        self.free_blocks = deque(range(runner.kv_cache.num_blocks[0]))
        self.running: dict[int, tuple[str, list[int], int, list[int]]] = {}
        self.epochs = [0] * num_slots
        self.computed = [0] * num_slots
        self.done: dict[str, list[int]] = {}
        self.vacated: list[int] = []

    def step(self) -> None:
        new = []
        while self.waiting and self.free_slots:
            req_id, prompt, max_tokens = self.waiting.popleft()
            slot = self.free_slots.popleft()
            self.running[slot] = (req_id, [*prompt], len(prompt) + max_tokens, [])
            self.computed[slot] = 0
            new.append(enter(req_id, slot, prompt, epoch=self.epochs[slot]))
        counts = {s: len(r[1]) - self.computed[s] for s, r in self.running.items()}
        blocks = {}
        for slot, (_, tokens, _, held) in self.running.items():
            ids = [self.free_blocks.popleft() for _ in range(-(-len(tokens) // 16) - len(held))]
            held += ids
            blocks |= {slot: (tuple(ids),)} if ids else {}
        plan = StepPlan(
            step_id=self.step_id,
            new=tuple(new),
            finished=tuple(self.vacated),
            req_ids=tuple(r[0] for r in self.running.values()),
            slots=np.array([*self.running], dtype=np.int32),
            epochs=np.array([self.epochs[s] for s in self.running], dtype=np.int32),
            num_scheduled_tokens=np.array([*counts.values()], dtype=np.int32),
            new_block_ids=blocks,
        )
        self.step_id, self.vacated = self.step_id + 1, []
        output: StepOutput = self.runner.execute(plan).result()
        for slot, new_tokens in zip(output.slots.tolist(), output.token_ids, strict=True):
            req_id, tokens, length, held = self.running[slot]
            self.computed[slot] = len(tokens)
            tokens += new_tokens
            if len(tokens) == length:
                self.done[req_id] = tokens
                self.free_blocks += held
                self.epochs[slot] += 1
                del self.running[slot]
                self.free_slots.append(slot)
                self.vacated.append(slot)


@pytest.mark.gpu
def test_a_foreign_scheduler_needs_nothing_but_plans_and_outputs(checkpoint):
    runner = make_runner(checkpoint, max_num_seqs=2)
    foreign = ForeignScheduler(runner, num_slots=2)
    prompts = {f"r{n}": list(range(3 + n, 20 + 7 * n)) for n in range(5)}
    foreign.waiting.extend((name, prompt, NUM_TOKENS) for name, prompt in prompts.items())
    while foreign.waiting or foreign.running:
        foreign.step()
    runner.close()
    core = EngineCore(
        EngineConfig(model=str(checkpoint), dtype="float32", num_kv_blocks=16, max_num_seqs=2),
        progress=False,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = {name: core.add_request(name, prompt, params) for name, prompt in prompts.items()}
    while core.scheduler.has_unfinished_requests:
        core.step()
    core.runner.close()
    for name, prompt in prompts.items():
        assert foreign.done[name] == prompt + requests[name].output_token_ids


# --- drafts --------------------------------------------------------------------------------------


def generate(
    runner: ModelRunner, drafter, temperature: float, banned: tuple[tuple[int, ...], ...] = ()
) -> tuple[list[int], int]:
    """Run one request with drafts in each step; return its tokens and the number of steps."""
    params = SamplingParams(temperature=temperature)
    request = enter(
        "a", 1, PROMPTS[1], sampling_params=params, seed=5, banned_token_sequences=banned
    )
    plan = make_plan(0, {"a": (1, len(PROMPTS[1]), (0, 1, 2, 3))}, new=(request,))
    tokens = list(runner.execute(plan).result().token_ids[0])
    steps = 1
    while len(tokens) < NUM_DRAFTED:
        drafts = drafter(tokens)
        plan = StepPlan(
            step_id=steps,
            req_ids=("a",),
            slots=np.array([1], dtype=np.int32),
            epochs=np.zeros(1, dtype=np.int32),
            num_scheduled_tokens=np.array([1 + len(drafts)], dtype=np.int32),
            new_block_ids={},
            draft_token_ids=(tuple(drafts),),
        )
        (new,) = runner.execute(plan).result().token_ids
        assert 1 <= len(new) <= 1 + len(drafts)
        tokens += new
        steps += 1
    return tokens[:NUM_DRAFTED], steps


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("bans", [False, True])
def test_drafts_change_the_number_of_steps_and_no_token(checkpoint, temperature, bans):
    """Bad words that begin within the drafts are banned too."""
    banned: tuple[tuple[int, ...], ...] = ()

    def with_drafts(drafter) -> tuple[list[int], int]:
        runner = make_runner(checkpoint)
        result = generate(runner, drafter, temperature, banned)
        runner.close()
        return result

    alone, steps = with_drafts(lambda tokens: ())
    if bans:
        free = tuple(alone)
        banned = (free[2:3], free[4:6], free[9:12], free[14:16])
        alone, steps = with_drafts(lambda tokens: ())
        banned += tuple((a, b) for a, b in pairwise(alone[8:20]))  # drafts complete these
        alone, steps = with_drafts(lambda tokens: ())
        assert not set(pairwise(alone)) & set(banned)
    assert steps == NUM_DRAFTED
    for count in (1, 3, 7):
        right = with_drafts(lambda tokens, count=count: alone[len(tokens) :][:count])
        assert right[0] == alone
        assert right[1] == 1 + -(-(NUM_DRAFTED - 1) // (count + 1))
        wrong = with_drafts(
            lambda tokens, count=count: [(t + 1) % 160 for t in (alone * 2)[len(tokens) :][:count]]
        )
        assert wrong == (alone, NUM_DRAFTED)
    mixed = with_drafts(
        lambda tokens: [*alone[len(tokens) :][:2], 3, 4] if len(tokens) % 2 else (9,)
    )
    assert mixed[0] == alone
    assert NUM_DRAFTED / 3 < mixed[1] < NUM_DRAFTED


@pytest.mark.gpu
def test_a_step_with_drafts_is_a_graph_whatever_their_numbers(checkpoint):
    """Rows with fewer drafts, and with less context than the graph's rows have tokens."""
    prompts = {"a": [7], "b": [5, 6], "c": [*range(20, 37)]}
    blocks = {"a": (0, 1, 2), "b": (3, 4, 5), "c": (6, 7, 8, 9)}
    rng = np.random.default_rng(3)
    outputs = []
    for max_drafts in (0, 3):
        runner = make_runner(checkpoint, max_draft_tokens=max_drafts)
        if max_drafts and runner.device.type == "cpu":  # launch what a graph would have captured
            runner._step.graphs = LaunchedGraphs(runner)
        slots = {"a": 2, "b": 0, "c": 3}
        found: dict[str, list[int]] = {}
        rows = {r: (slots[r], len(prompts[r]), blocks[r]) for r in prompts}
        new = tuple(enter(r, slots[r], prompts[r]) for r in prompts)
        plan = make_plan(0, rows, new=new)
        for step_id in range(1, 20):
            before = runner.num_graph_steps
            output = runner.execute(plan).result()
            for req_id, new_tokens in zip(output.req_ids, output.token_ids, strict=True):
                found.setdefault(req_id, []).extend(new_tokens)
            if max_drafts:
                assert runner.num_graph_steps == before + 1
            if min(map(len, found.values())) >= NUM_TOKENS:
                break
            drafts = {}
            for req_id, known in found.items():
                right = outputs[0][req_id][len(known) :] if outputs else []
                drafts[req_id] = right[: int(rng.integers(0, 4)) if outputs else 0]
                if drafts[req_id] and rng.random() < 0.3:
                    drafts[req_id] = [*drafts[req_id][:-1], 9]
            plan = make_plan(
                step_id,
                {r: (slots[r], 1 + len(drafts[r]), ()) for r in drafts},
                draft_token_ids=tuple(map(tuple, drafts.values())) if any(drafts.values()) else (),
            )
        if max_drafts:
            assert step_id < NUM_TOKENS
        runner.close()
        outputs.append({r: known[:NUM_TOKENS] for r, known in found.items()})
    assert outputs[0] == outputs[1]


def test_drafts_that_cannot_be_verified_are_refused(checkpoint):
    runner = make_runner(checkpoint, device="cpu")
    first = make_plan(0, {"a": (1, 5, (0, 1))}, new=(enter("a", 1, PROMPTS[0]),))
    runner.execute(first).result()

    def drafting(count: int, scheduled: int) -> StepPlan:
        plan = make_plan(1, {"a": (1, scheduled, ())})
        return StepPlan(
            **{f: getattr(plan, f) for f in plan.__slots__} | {"draft_token_ids": ((7,) * count,)}
        )

    for count, scheduled in ((8, 9), (2, 2)):
        with pytest.raises(StepError, match="draft_token_ids of 'a': expected at most 7 after"):
            runner.execute(drafting(count, scheduled))
    output = runner.execute(drafting(2, 3))
    with pytest.raises(StepError, match="take that step's result first"):
        runner.execute(make_plan(2, {"a": (1, 1, ())}))
    output.result()
    runner.execute(make_plan(2, {"a": (1, 1, ())}))
    runner.close()


# --- a signal per layer --------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_kv_listener_is_called_for_every_layer_of_a_prefill(checkpoint):
    runner = make_runner(checkpoint)
    heard: list[KVReady] = []
    runner.set_kv_listener(heard.append)
    plan = make_plan(0, {"a": (0, 5, (2,))}, new=(enter("a", 0, PROMPTS[0]),))
    runner.execute(plan).result()
    assert [ready.layer for ready in heard] == [0, 1]
    assert all(ready.plan.req_ids == ("a",) for ready in heard)
    assert all((ready.event is None) == (runner.device.type == "cpu") for ready in heard)
    assert all([each.block_ids for each in ready.tokens] == [((2,),)] for ready in heard)
    runner.set_kv_listener(None)
    runner.execute(make_plan(1, {"a": (0, 1, ())})).result()
    assert len(heard) == 2
    runner.set_kv_listener(heard.append)  # it knows no blocks of requests that were here before
    runner.execute(make_plan(2, {"a": (0, 1, ())})).result()
    assert [each.block_ids for ready in heard[2:] for each in ready.tokens] == [None] * 2
    runner.close()


class _Stream:
    """Notes what it waits for, and the events that it records."""

    def __init__(self) -> None:
        self.done: list[object] = []

    def wait_stream(self, stream: object) -> None:
        self.done.append(stream)


class _Event:
    def __init__(self, *, external: bool = False) -> None:
        assert external

    def record(self, stream: _Stream) -> None:
        stream.done.append(self)


def test_graphs_of_prompts_record_an_event_behind_each_write_on_a_stream_beside(monkeypatch):
    current = _Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    events, prompts = LayerEvents(), StepShape.of(np.array([5, 1], dtype=np.int32))
    with events.recorded(prompts) as record:
        assert record is None  # nobody listens
    events.are_wanted = True
    with events.recorded(StepShape.decode(2)) as record:
        assert record is None
    assert events.of(prompts) is events.of(StepShape.decode(2)) is None
    with events.recorded(prompts) as record:
        assert record is not None
        for layer in range(2):
            record(layer)
    first, second = events.of(prompts) or ()
    (beside,) = current.done  # which a capture has to end with
    assert beside.done == [current, first, current, second]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_a_kv_listener_is_called_for_every_step_and_finds_its_keys_written(checkpoint, graphs):
    """The steps: chunked prompts with decodes, decodes alone, forward and sample called apart."""
    runner = make_runner(checkpoint, cuda_graphs=graphs)
    on_cpu = runner.device.type == "cpu"
    if graphs and on_cpu:  # launch the ops that a graph would have captured
        runner._step.graphs.fit = lambda shape: shape if shape.query_len == 1 else None
        runner._step.graphs.replay = runner._step.run_padding
    layers = runner.kv_cache.layers
    for cache in layers:
        cache.k.fill_(torch.nan)
    blocks: dict[int, list[int]] = {0: [], 1: []}
    computed = {0: 0, 1: 0}
    heard: list[tuple[int, int]] = []
    found: list[tuple[int, int, int, torch.Tensor]] = []

    def listen(ready: KVReady) -> None:
        if ready.event is not None:
            ready.event.synchronize()
        plan = ready.plan
        heard.append((plan.step_id, ready.layer))
        if ready.layer == 0:
            for slot, ((*ids,),) in plan.new_block_ids.items():
                blocks[slot] += ids
        for slot, count in zip(
            plan.slots.tolist(), plan.num_scheduled_tokens.tolist(), strict=True
        ):
            first, last = computed[slot], computed[slot] + count - 1
            written = blocks[slot][first // BLOCK_SIZE : last // BLOCK_SIZE + 1]
            (tokens,) = (each for each in ready.tokens if each.slot == slot)
            assert (tokens.start, tokens.stop, tokens.num_cached) == (first, last + 1, 0)
            assert tokens.block_ids == (tuple(written),)
            for position in range(computed[slot], computed[slot] + count):
                block, offset = blocks[slot][position // BLOCK_SIZE], position % BLOCK_SIZE
                written = layers[ready.layer].k[block, :, offset].clone()
                assert not written.isnan().any()
                found.append((ready.layer, block, offset, written))
            if ready.layer == len(layers) - 1:
                computed[slot] += count

    runner.set_kv_listener(listen)
    new = (enter("a", 0, PROMPTS[0]), enter("b", 1, PROMPTS[1]))
    runner.execute(make_plan(0, {"a": (0, 5, (4,)), "b": (1, 13, (2,))}, new=new)).result()
    runner.execute(make_plan(1, {"b": (1, 7, (7,)), "a": (0, 1, ())})).result()
    steady = make_plan(2, {"a": (0, 1, ()), "b": (1, 1, ())})
    steady.slots.flags.writeable = steady.epochs.flags.writeable = False
    for step in (2, 3):
        runner.execute(replace(steady, step_id=step)).result()
    runner.forward(replace(steady, step_id=4))
    runner.sample().result()
    assert heard == [(step, layer) for step in range(5) for layer in (0, 1)]
    assert len(found) == len(layers) * (5 + 20 + 1 + 3 * 2)
    for layer, block, offset, written in found:
        assert torch.equal(layers[layer].k[block, :, offset], written)
    # On a GPU steps with prompts, and the fifth one's sampling apart, have graphs too.
    num_graph_steps = 0 if not graphs else 2 if on_cpu else 5
    assert runner.num_graph_steps == num_graph_steps
    runner.close()


def test_a_kv_listener_that_raises_fails_the_step(checkpoint):
    def raises(ready: KVReady) -> None:
        raise KeyError("nobody there")

    runner = make_runner(checkpoint, device="cpu")
    runner.set_kv_listener(raises)
    plan = make_plan(0, {"a": (0, 5, (2,))}, new=(enter("a", 0, PROMPTS[0]),))
    with pytest.raises(StepError, match="nobody there"):
        runner.execute(plan)
    runner.close()


def test_wrong_masks_are_named_and_sample_may_be_called_again(checkpoint):
    runner = make_runner(checkpoint, device="cpu")
    runner.forward(make_plan(0, {"a": (0, 5, (2,))}, new=(enter("a", 0, PROMPTS[0]),)))
    masks = np.full((2, runner.sampler.limits.mask_words), -1, dtype=np.int32)
    for rows, message in (
        ([0], r"bitmask: expected int32 \[1, \d+\], a mask for each of rows, got int32"),
        ([0, 0], r"rows: expected different rows, got \[0, 0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.sample(masks, rows)
    runner.sample(masks[:1], [0]).result()
    runner.close()


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_after_a_layers_event_another_stream_reads_its_pages(checkpoint):
    """The compute stream is held up; the reader waits only for the event, and sees the pages."""
    runner = make_runner(checkpoint)
    for cache in runner.kv_cache.layers:
        cache.k.fill_(torch.nan)
    reader, copies, early = torch.cuda.Stream(), [], []

    def send(ready: KVReady) -> None:
        pages = runner.kv_cache.layers[ready.layer].k[2]
        with torch.cuda.stream(reader):
            early.append(pages.clone())
            reader.wait_event(ready.event)
            copies.append(pages.clone())

    runner.set_kv_listener(send)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    plan = make_plan(0, {"a": (0, 5, (2,))}, new=(enter("a", 0, PROMPTS[0]),))
    output = runner.execute(plan)
    reader.synchronize()
    for cache, copy in zip(runner.kv_cache.layers, copies, strict=True):
        assert torch.equal(copy[:, :5], cache.k[2][:, :5])
        assert not copy[:, :5].isnan().any()
    assert early[0].isnan().all(), "without the event the reader would have seen old pages"
    output.result()
    runner.close()


# --- failures ------------------------------------------------------------------------------------


def test_debug_sync_names_the_kernel_that_failed(checkpoint, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(reference, "qkv_cache_write", broken)
    runner = make_runner(checkpoint, device="cpu", debug_sync=True)
    plan = make_plan(0, {"a": (0, 5, (2,))}, new=(enter("a", 0, PROMPTS[0]),))
    with pytest.raises(StepError, match="kernel qkv_cache_write: an illegal memory access"):
        runner.execute(plan)
    runner.close()


def test_a_failed_launch_reports_whether_the_device_is_lost(checkpoint, monkeypatch):
    """With debug_sync a failed kernel raises at its own launch, below the error that names it."""
    runner = make_runner(checkpoint, device="cpu", debug_sync=True)
    plan = make_plan(0, {"a": (0, 5, (2,))}, new=(enter("a", 0, PROMPTS[0]),))
    for kind, lost in ((torch.AcceleratorError, True), (RuntimeError, False)):

        def broken(*_: object, kind=kind, **__: object) -> None:
            raise kind("an illegal memory access")

        with monkeypatch.context() as patch:
            patch.setattr(runner._step.ops._ops, "linear", broken)
            with pytest.raises(StepError, match="kernel linear: an illegal") as caught:
                runner.execute(plan)
        assert caught.value.device_lost == lost
        plan = make_plan(1, {"b": (1, 5, (3,))}, new=(enter("b", 1, PROMPTS[0]),))
    runner.close()


def test_a_lost_device_ends_all_requests_and_refuses_new_ones(checkpoint, monkeypatch):
    core = EngineCore(
        EngineConfig(model=str(checkpoint), num_kv_blocks=16, max_num_seqs=1, device="cpu"),
        progress=False,
    )
    params = SamplingParams(temperature=0, max_tokens=4)
    requests = [core.add_request(name, [5, 6], params) for name in "abc"]

    def lost(self, timeout=None):
        return StepError(
            "CUDA error: an illegal memory access", step_id=self.step_id, device_lost=True
        )

    monkeypatch.setattr("mrv1.runner.async_output.AsyncOutput.take", lost)
    changed = core.step()
    assert sorted(request.req_id for request in changed) == ["a", "b", "c"]
    assert all("illegal memory access" in str(request.error) for request in requests)
    assert not core.scheduler.has_unfinished_requests
    with pytest.raises(StepError, match=r"serves this process no more .*new process"):
        core.add_request("d", [5, 6], params)
    core.runner.close()


def test_a_result_may_be_taken_on_another_thread(checkpoint):
    runner = make_runner(checkpoint, device="cpu")
    plan = make_plan(0, {"a": (0, 5, (2,))}, new=(enter("a", 0, PROMPTS[0]),))
    output, taken = runner.execute(plan), []
    thread = threading.Thread(target=lambda: taken.append(output.result()))
    thread.start()
    thread.join()
    assert taken == [output.result()]
    runner.close()


def test_a_stop_is_found_on_the_device(checkpoint):
    """The row of a request that has stopped computes nothing, though its plan is launched."""
    runner = make_runner(checkpoint, device="cpu")
    request = enter("a", 0, PROMPTS[0], max_total_tokens=7)
    plans = [make_plan(0, {"a": (0, 5, (2,))}, new=(request,))]
    plans += [make_plan(step, {"a": (0, 1, ())}) for step in (1, 2, 3)]
    outputs = [runner.execute(plan).result().token_ids[0] for plan in plans]
    assert list(map(len, outputs)) == [1, 1, 0, 0]
    assert runner.state.slots.stopped[0] == 2
    assert isinstance(request, SlotRequest)
    runner.close()
