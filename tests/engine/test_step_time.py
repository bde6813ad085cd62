"""The model of a step's time: its arithmetic, its calibration, and chunks that fit a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import LLM, ConfigError, SamplingParams
from mrv1.config import EngineConfig
from mrv1.engine import step_time
from mrv1.engine.step_time import (
    NO_LIMIT,
    HeadKind,
    StepCosts,
    StepLoad,
    StepRoom,
    StepTarget,
    StepTime,
    StepWork,
    calibrate,
    fit,
)
from mrv1.runner import ModelRunner, StepPlan
from tests.engine.scheduler_model import (
    BLOCK_SIZE,
    STEP_TIME,
    drain,
    make_request,
    make_runner,
    make_scheduler,
    prompt_of,
    scheduled,
    seconds_of,
    target_of,
)

ROWS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 20)).map(lambda row: (row[0], sum(row))),
    min_size=1,
    max_size=6,
)


def load_of(work: StepWork, rows: Sequence[tuple[int, int]]) -> StepLoad:
    return work.of_rows(*np.array(rows, dtype=np.int64).T)


# --- arithmetic ----------------------------------------------------------------------------------


@given(rows=ROWS)
def test_the_time_of_a_step_equals_the_formulas_written_out(rows):
    load = load_of(STEP_TIME.work, rows)
    one_by_one = StepLoad()
    for start, end in rows:
        one_by_one = one_by_one.plus(STEP_TIME.work.of_row(start, end))
    assert load == one_by_one
    assert STEP_TIME.seconds(load) == seconds_of(rows)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # 1 a step, 1/2 a row, weights 24/8 or a token each, (4 + 8) n / 8 for n cached tokens,
        # and (2 + 4) / 16 for each pair of a query and a key
        ([(0, 1)], 1 + 0.5 + 3 + 12 / 8 + 6 / 16),
        ([(0, 3)], 1 + 0.5 + 3 + 36 / 8 + (1 + 2 + 3) * 6 / 16),
        ([(0, 5)], 1 + 0.5 + 5 + 60 / 8 + 15 * 6 / 16),
        # heads with a limit see 6 keys
        ([(99, 100)], 1 + 0.5 + 3 + (4 * 100 + 8 * 6) / 8 + (2 * 100 + 4 * 6) / 16),
    ],
)
def test_the_time_of_a_step_by_hand(rows, expected):
    assert STEP_TIME.seconds(load_of(STEP_TIME.work, rows)) == expected == seconds_of(rows)


@given(rows=ROWS, start=st.integers(0, 30), count=st.integers(1, 40), seconds=st.floats(1, 300))
def test_a_chunk_is_the_longest_that_fits(rows, start, count, seconds):
    """The rows are decodes; a first chunk before this one has taken the least tokens."""
    decodes = [(end - 1, end) for _, end in rows]
    room = StepRoom(
        StepTarget(STEP_TIME, seconds), np.array([start for start, _ in decodes], dtype=np.int64)
    )
    fitting = [
        each for each in range(1, count + 1)
        if seconds_of([*decodes, (start, start + each)]) <= seconds
    ]  # fmt: skip
    assert not room.is_full
    assert room.fit(start, count, 4) == max([min(4, count), *fitting])
    room.take(0, 4)
    fitting = [
        each for each in range(1, count + 1)
        if seconds_of([*decodes, (0, 4), (start, start + each)]) <= seconds
    ]  # fmt: skip
    assert room.fit(start, count, 4) == max([0, *fitting])
    assert room.is_full == (seconds_of([*decodes, (0, 4), (0, 1)]) > seconds)


# --- calibration ---------------------------------------------------------------------------------

WORK = StepWork(
    weight_bytes=16_000_000_000,
    token_flops=14_000_000_000,
    heads=(
        HeadKind(limit=NO_LIMIT, key_bytes=100_000, pair_flops=300_000),
        HeadKind(limit=320, key_bytes=50_000, pair_flops=150_000),
    ),
)
"""About a model of 8B parameters, a third of whose heads stream."""


def steps_of_an_8b() -> list[list[tuple[int, int]]]:
    decodes = [[(16, 17)], [(16, 17)] * 64, [(2048, 2049)] * 32, [(2048, 2049)] * 64]
    chunks = [[(start, start + count)] for start, count in ((16, 128), (16, 512), (16, 2048))]
    return [*decodes, *chunks, [(8192, 10240)], [*[(2048, 2049)] * 32, (16, 528)]]


COSTS = st.builds(
    StepCosts,
    step=st.floats(1e-4, 1e-3),
    row=st.floats(1e-6, 1e-5),
    byte=st.floats(1 / 5e12, 1 / 1e12),
    product_flop=st.floats(1 / 8e14, 1 / 1e14),
    attention_flop=st.floats(1 / 6e14, 1 / 1e14),
)


@given(costs=COSTS)
def test_the_calibration_finds_the_costs_of_measured_steps(costs):
    loads = [load_of(WORK, rows) for rows in steps_of_an_8b()]
    true = StepTime(WORK, costs)
    found = fit(WORK, loads, [true.seconds(load) for load in loads])
    assert found.costs == pytest.approx(costs, rel=1e-6)


@given(costs=COSTS, noise=st.lists(st.floats(0.95, 1.05), min_size=9, max_size=9))
def test_the_calibration_bears_noise(costs, noise):
    """Times that are 5 % off give predictions that are not much more off, and no cost below 0."""
    loads = [load_of(WORK, rows) for rows in steps_of_an_8b()]
    true = StepTime(WORK, costs)
    measured = [true.seconds(load) * each for load, each in zip(loads, noise, strict=True)]
    found = fit(WORK, loads, measured)
    assert min(found.costs) >= 0
    assert found.error(loads, measured) <= 1 / 0.95 - 1
    assert found.error(loads, [true.seconds(load) for load in loads]) <= 0.1


def small_calibration(
    monkeypatch: pytest.MonkeyPatch, seconds_of_plan: Callable[[StepPlan], float]
) -> list[StepPlan]:
    """Let calibrations run few tokens and get these times; return the list of their plans."""
    plans: list[StepPlan] = []
    time_steps = ModelRunner.time_steps

    def timed(runner: ModelRunner, given: Iterable[StepPlan]) -> list[float]:
        given = [*given]
        plans.extend(given)
        assert len(time_steps(runner, given)) == len(given)
        return [*map(seconds_of_plan, given)]

    monkeypatch.setattr(ModelRunner, "time_steps", timed)
    for name, most in (("MOST_ROWS", 2), ("MOST_CONTEXT", 64), ("MOST_CHUNK", 32), ("REPEATS", 1)):
        monkeypatch.setattr(step_time, name, most)
    monkeypatch.setattr(step_time, "FARTHEST", 96)
    return plans


@pytest.mark.parametrize(
    "options",
    [{}, {"head_policy": "ratio=0.5,window=20,sink=4", "kv_cache_dtype": "fp8_e4m3"}],
    ids=["full", "streaming fp8"],
)
def test_an_engine_calibrates_at_its_start(monkeypatch, options):
    """On the runner's own steps, with a clock of known costs; block ids are checked (debug)."""
    model, starts = None, {}

    def known_seconds(plan: StepPlan) -> float:
        for request in plan.new:
            starts[request.slot] = request.num_computed_tokens
        rows = [
            (starts[slot], starts[slot] + count)
            for slot, count in zip(
                plan.slots.tolist(), plan.num_scheduled_tokens.tolist(), strict=True
            )
        ]
        for slot, (_, end) in zip(plan.slots.tolist(), rows, strict=True):
            starts[slot] = end
        return model.seconds(load_of(model.work, rows))

    plans = small_calibration(monkeypatch, known_seconds)
    work_of = StepWork.of.__func__

    def noting(cls: type[StepWork], runner: ModelRunner) -> StepWork:
        nonlocal model
        work = work_of(cls, runner)
        costs = StepCosts(3e-4, 2e-5, 1e-10, 4e-11, 3e-10)
        model = StepTime(work, costs)
        return work

    monkeypatch.setattr(StepWork, "of", classmethod(noting))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[*range(1, 1 + size)] for size in (70, 30, 7)]
    shared = {
        "device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 64,
        "max_model_len": 256, **options,
    }  # fmt: skip
    with LLM("tiny", **shared) as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
        assert not plans
        assert llm.metrics()["predicted_seconds"] == 0
    with LLM("tiny", debug=True, target_inter_token_ms=4.0, **shared) as llm:
        target = llm._core.scheduler._target
        assert target.seconds == 4e-3
        assert target.time.costs == pytest.approx(model.costs, rel=1e-6)
        assert [each.outputs[0].token_ids for each in llm.generate(prompts, params)] == expected
        metrics = llm.metrics()
        assert metrics["predicted_seconds"] > metrics["num_steps"] * 3e-4
    assert len(plans) == 18


def test_the_bytes_and_operations_are_those_of_the_model(monkeypatch):
    """Counted here from the checkpoint's configuration."""
    config = EngineConfig(
        model="tiny", device="cpu", num_kv_blocks=8, kv_cache_dtype="fp8_e4m3",
        head_policy="ratio=0.5,window=20,sink=4",
    )  # fmt: skip
    runner = ModelRunner(config)
    model = runner.model_config
    q_size, kv_size = (n * model.head_dim for n in (model.num_q_heads, model.num_kv_heads))
    hidden, layers = model.hidden_size, model.num_layers
    products = layers * hidden * (2 * q_size + 2 * kv_size + 3 * model.intermediate_size)
    work = StepWork.of(runner)
    assert work.token_flops == 2 * products
    norms = (2 * layers + 1) * hidden + 2 * layers * model.head_dim
    head = model.vocab_size * hidden
    assert work.weight_bytes == 4 * (products + norms + head)
    num_heads = layers * model.num_kv_heads
    assert {kind.limit for kind in work.heads} == {24, NO_LIMIT}
    assert sum(kind.key_bytes for kind in work.heads) == num_heads * 2 * (model.head_dim + 4)
    assert sum(kind.pair_flops for kind in work.heads) == layers * model.num_q_heads * (
        4 * model.head_dim
    )
    runner.close()


def test_a_calibration_that_explains_nothing_is_refused(monkeypatch):
    clock = iter(np.random.default_rng(0).lognormal(sigma=4, size=100).tolist())
    small_calibration(monkeypatch, lambda _: next(clock))
    options = {"device": "cpu", "num_kv_blocks": 64, "target_inter_token_ms": 5}
    with pytest.raises(ConfigError, match=r"target_inter_token_ms: expected steps .* within 50%"):
        LLM("tiny", max_model_len=256, **options)
    with pytest.raises(ConfigError, match="target_inter_token_ms: expected max_model_len >= 64"):
        LLM("tiny", max_model_len=63, **options)


def test_an_engine_whose_calibration_fails_is_closed(monkeypatch):
    """Or its ranks would run on."""
    closed = []
    monkeypatch.setattr(ModelRunner, "close", lambda runner: closed.append(runner))
    with pytest.raises(ConfigError, match="target_inter_token_ms: expected max_model_len >= 64"):
        LLM("tiny", device="cpu", num_kv_blocks=8, max_model_len=63, target_inter_token_ms=5)
    assert len(closed) == 1


def test_custom_processors_see_real_requests_only(monkeypatch):
    class Recorder:
        def __init__(self) -> None:
            self.prompts, self.num_calls = [], 0

        def add_request(self, slot, params, token_ids):
            self.prompts.append(token_ids.tolist())

        def apply(self, logits, context):
            self.num_calls += 1
            return logits

    recorder = Recorder()

    def calibrated(runner: ModelRunner) -> StepTime:
        steps = [[(16, 17)], [(16, 24)]]
        assert len(runner.time_steps(step_time._plans(runner, steps, epoch=0))) == 4
        assert (recorder.prompts, recorder.num_calls) == ([], 0)
        return STEP_TIME

    monkeypatch.setattr("mrv1.engine.core.calibrate", calibrated)
    options = {"device": "cpu", "num_kv_blocks": 64, "max_num_seqs": 2, "max_model_len": 96}
    with LLM("tiny", target_inter_token_ms=5, logits_processors=[recorder], **options) as llm:
        llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=2))
    assert recorder.prompts == [[5, 6, 7]]
    assert recorder.num_calls > 0


def test_the_clock_of_a_runner_is_the_time_of_its_steps(monkeypatch):
    """Every slot is free afterwards, and nothing is counted."""
    times = iter(range(1000))
    for name, most in (("MOST_ROWS", 2), ("MOST_CONTEXT", 32), ("MOST_CHUNK", 32), ("REPEATS", 1)):
        monkeypatch.setattr(step_time, name, most)
    options = {"device": "cpu", "num_kv_blocks": 64, "max_num_seqs": 2, "max_model_len": 96}
    runner = ModelRunner(EngineConfig(model="tiny", **options))
    monkeypatch.setattr(ModelRunner, "_clock", lambda _: float(next(times)))
    model = calibrate(runner)
    assert model.costs == pytest.approx((1, 0, 0, 0, 0), abs=1e-9)
    assert (runner.num_graph_steps, runner.num_staging_waits, runner.gpu_seconds) == (0, 0, 0)
    runner.close()


# --- chunks that fit -----------------------------------------------------------------------------


def test_chunks_get_the_time_that_decodes_leave():
    """One decodes; then 40 tokens of a prompt come, and a short prompt behind it."""
    target = seconds_of([(9, 10), (0, 12)])
    scheduler = make_scheduler(max_steps_in_flight=1, target=target_of(target))
    runner, rows = make_runner(scheduler), []
    scheduler.add(make_request("decode", prompt_of(30), max_tokens=20, ignore_eos=True))
    for _ in range(10):
        plan = scheduler.schedule()
        rows.append(scheduled(plan))
        runner.execute(plan)
        scheduler.update(runner.result())
        if len(rows) == 2:
            scheduler.add(make_request("long", prompt_of(40), max_tokens=9, ignore_eos=True))
            scheduler.add(make_request("short", prompt_of(3), max_tokens=9, ignore_eos=True))
    assert rows[:2] == [{"decode": 30}, {"decode": 1}], "without decodes the budget is the limit"
    position, computed = 31, 0
    for step in rows[2:]:
        if computed == 40:
            break
        decode = (position, position + 1)
        fitting = [
            count for count in range(1, 41 - computed)
            if seconds_of([decode, (computed, computed + count)]) <= target
        ]  # fmt: skip
        assert step["long"] == max([BLOCK_SIZE, *fitting])
        computed, position = computed + step["long"], position + 1
    assert computed < 40 or "short" in step


@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    target=st.sampled_from([0.001, 10.0, 20.0]),
    depth=st.integers(1, 2),
    budget=st.integers(BLOCK_SIZE + 7, 40),
)
def test_no_prompt_starves(prompts, target, depth, budget):
    """The bound: a block's tokens in each step, of one prompt after the other."""
    scheduler = make_scheduler(
        num_blocks=500, max_num_seqs=7, max_num_batched_tokens=budget, max_steps_in_flight=depth,
        target=target_of(target),
    )  # fmt: skip
    runner, left, found = make_runner(scheduler), dict(enumerate(prompts)), {}
    scheduler.add(make_request("decode", (1,), max_tokens=300, ignore_eos=True))
    runner.execute(scheduler.schedule())
    scheduler.update(runner.result())
    for name, size in enumerate(prompts):
        scheduler.add(make_request(str(name), prompt_of(size), max_tokens=300, ignore_eos=True))
    for step in range(1, 80):
        plan = scheduler.schedule()
        for req_id, count in scheduled(plan).items():
            if req_id != "decode":
                left[int(req_id)] -= count
                if left[int(req_id)] <= 0:
                    found.setdefault(int(req_id), step)
        runner.execute(plan)
        scheduler.update(runner.result())
        if len(found) == len(prompts):
            break
    bound = 0
    for name, size in enumerate(prompts):
        bound += -(-size // BLOCK_SIZE)
        assert found[name] <= bound


def test_the_predicted_time_of_all_steps_is_counted():
    scheduler = make_scheduler(target=target_of(30.0), max_steps_in_flight=1)
    scheduler.add(make_request("a", prompt_of(20), max_tokens=4, ignore_eos=True))
    drain(scheduler, make_runner(scheduler))
    steps = [[(0, 20)], [(20, 21)], [(21, 22)], [(22, 23)]]
    assert scheduler.predicted_seconds == sum(map(seconds_of, steps))
