"""Sleep frees memory, waking up changes no token, and nothing runs in between."""

from __future__ import annotations

import random
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from mrv1 import LLM, CapacityError, ConfigError, ModelRunner, SamplingParams
from mrv1.kernels.registry import select_ops
from mrv1.models import DecoderModel, checkpoint_tensors
from tests.engine.test_interrupts import Interrupt
from tests.models.families import random_model, tiny_checkpoint, tiny_config
from tests.runner.test_model_runner import enter, make_plan, make_runner

PROMPTS = [[5, 9, 23, 41, 77] * 8, [11, 30]]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3")
    return path


def make_llm(checkpoint: Path, **options: object) -> LLM:
    settings = {"dtype": "float32", "num_kv_blocks": 40, "max_num_seqs": 4, "max_model_len": 128}
    return LLM(str(checkpoint), **(settings | options))


@pytest.fixture(scope="module")
def engine(checkpoint):
    with make_llm(checkpoint) as llm:
        yield llm


@pytest.fixture
def llm(engine, weights):
    """Return the module's engine, awake and with its own weights."""
    yield engine
    engine.wake_up()
    engine.update_weights(weights)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return random_model(tiny_config("qwen3")).state_dict()


@pytest.fixture(scope="module")
def before(engine) -> list[tuple[int, ...]]:
    return tokens(engine)


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def weight_bytes(llm: LLM) -> int:
    """Return the bytes of memory behind the weights now."""
    weights = llm.engine.runner.model.weights
    parts = [weights, *weights.layers]
    tensors = [value for part in parts for value in (getattr(part, f.name) for f in fields(part))]
    return sum(t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8_e4m3"}])
def test_tokens_after_level_1_are_those_before(checkpoint, options):
    with make_llm(checkpoint, **options) as llm:
        before, report, held = tokens(llm), llm.kv_report(), weight_bytes(llm)
        for _ in range(2):
            llm.sleep()
            assert llm.is_sleeping()
            asleep = llm.kv_report()
            assert asleep["allocated_bytes"] == 0
            assert asleep["total_bytes"] == report["total_bytes"] > 0
            on_host = llm.engine.runner.device.type == "cpu"
            assert weight_bytes(llm) == (held if on_host else 0)
            llm.wake_up()
            assert not llm.is_sleeping()
            assert (llm.kv_report(), weight_bytes(llm)) == (report, held)
            assert tokens(llm) == before


@pytest.mark.gpu
def test_after_level_2_requests_wait_for_every_weight(llm, weights, before):
    llm.sleep(level=2)
    assert (weight_bytes(llm), llm.kv_report()["allocated_bytes"]) == (0, 0)
    with pytest.raises(RuntimeError, match="update_weights: expected weights that are awake, got"):
        llm.update_weights(weights)
    llm.wake_up(["weights"])
    assert llm.kv_report()["allocated_bytes"] == 0
    names = list(weights)
    llm.update_weights({name: weights[name] for name in names[:-1]}, partial=True)
    llm.wake_up(tags=["kv_cache"])
    assert not llm.is_sleeping()
    with pytest.raises(
        RuntimeError, match=rf"got none for 1 \({names[-1]} ...\) since sleep\(lev"
    ):
        llm.generate(PROMPTS, GREEDY)
    llm.update_weights([(names[-1], weights[names[-1]])], partial=True)
    assert tokens(llm) == before


@pytest.mark.parametrize(
    ("tags", "asleep"),
    [([], "weights and kv_cache"), (["weights"], "kv_cache"), (("kv_cache",), "weights")],
)
def test_nothing_runs_until_all_is_awake(llm, before, tags, asleep):
    llm.sleep()
    llm.wake_up(tags)
    assert llm.is_sleeping()
    refused = rf"^{asleep}: expected to be awake, got asleep; call wake_up\(\) first"
    for call in (
        lambda: llm.generate(PROMPTS, GREEDY),
        lambda: next(llm.stream([5], GREEDY)),
        lambda: llm.add_request([5], GREEDY),
        lambda: llm.engine.runner.execute(make_plan(0, {"a": (0, 1, (0,))})),
    ):
        with pytest.raises(RuntimeError, match=refused):
            call()
    assert not llm.has_unfinished_requests()
    assert llm.step() == []
    llm.wake_up()
    assert tokens(llm) == before


def test_sleeping_and_waking_again_are_harmless(llm, before):
    llm.wake_up()
    assert tokens(llm) == before
    for _ in range(2):
        llm.sleep()
    llm.wake_up(["kv_cache"])
    llm.sleep()
    assert llm.kv_report()["allocated_bytes"] == 0
    for _ in range(2):
        llm.wake_up()
    assert tokens(llm) == before
    for level in (1, 2, 1):  # what level 2 has dropped does not come back
        llm.sleep(level)
    assert weight_bytes(llm) == 0
    llm.wake_up()
    with pytest.raises(RuntimeError, match="expected a value for every tensor, got none for"):
        tokens(llm)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.sleep(0), "level: expected 1 or 2, got 0"),
        (lambda llm: llm.sleep(True), "level: expected 1 or 2, got True"),
        (lambda llm: llm.sleep("1"), "level: expected 1 or 2, got '1'"),
        (lambda llm: llm.wake_up("weights"), r"tags: expected None or a list of \('weights', 'kv"),
        (lambda llm: llm.wake_up(["weight"]), r"tags: .*, got \['weight'\]"),
        (lambda llm: llm.wake_up([["weights"]]), r"tags: .*, got \[\['weights'\]\]"),
    ],
)
def test_a_wrong_argument_changes_nothing(llm, call, message):
    for is_sleeping in (False, True):
        before = llm.kv_report(), weight_bytes(llm)
        with pytest.raises(ConfigError, match=message):
            call(llm)
        assert llm.is_sleeping() == is_sleeping
        assert (llm.kv_report(), weight_bytes(llm)) == before
        llm.sleep()


@pytest.mark.gpu
def test_running_requests_refuse_sleep_and_go_on(llm, before):
    llm.add_request(PROMPTS[0], GREEDY, request_id="mine")
    llm.step()
    stream = llm.stream(PROMPTS[1], GREEDY)
    next(stream)
    for change in (llm.sleep, lambda: llm.update_weights({"x": torch.ones(1)})):
        with pytest.raises(RuntimeError, match="expected no unfinished requests, got 2; let them"):
            change()
    assert not llm.is_sleeping()
    assert list(stream)[-1].outputs[0].token_ids == before[1]
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert outputs[-1].outputs[0].token_ids == before[0]


def test_outputs_that_nobody_has_taken_survive(llm):
    """Also the request of a forgotten stream counts as ended."""
    forgotten = llm.stream(PROMPTS[1], GREEDY)
    next(forgotten)
    llm.shared._given_up.extend(
        llm.shared._groups
    )  # as if it had been collected within another call
    llm.add_request(PROMPTS[0], GREEDY, request_id="mine")
    llm.abort("mine")
    llm.sleep()
    (output,) = llm.step()
    assert output.outputs[0].finish_reason == "abort"
    assert not llm.has_unfinished_requests()


@pytest.mark.gpu
def test_sleep_empties_the_prefix_cache(llm):
    tokens(llm)
    llm.sleep()
    llm.wake_up()
    hits = llm.metrics()["prefix_hit_tokens"]
    llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    assert llm.metrics()["prefix_hit_tokens"] == hits


def test_a_closed_engine_says_so(checkpoint):
    llm = make_llm(checkpoint)
    llm.sleep()
    llm.close()
    for call in (llm.sleep, llm.wake_up, llm.is_sleeping, lambda: llm.update_weights({})):
        with pytest.raises(
            RuntimeError, match="LLM: expected an open engine, got one that was cl"
        ):
            call()


# --- the runner alone ----------------------------------------------------------------------------


@pytest.mark.gpu
def test_results_in_flight_can_be_read_after_sleep(checkpoint):
    """Two steps are in flight; the slots are used again after waking up."""
    runner, expected = make_runner(checkpoint), None
    for epoch in range(2):
        new = enter("a", 0, [7] * 20, epoch=epoch)
        plans = [
            make_plan(3 * epoch, {"a": (0, 20, (3, 7))}, epoch=epoch, new=(new,)),
            make_plan(3 * epoch + 1, {"a": (0, 1, ())}, epoch=epoch),
        ]
        if epoch:
            plans[0] = make_plan(3, {"a": (0, 20, (3, 7))}, epoch=1, new=(new,), preempted=(0,))
        outputs = [runner.execute(plan) for plan in plans]
        runner.sleep()
        drawn = [output.result().token_ids for output in outputs]
        runner.wake_up()
        assert expected in (None, drawn)
        expected = drawn
    runner.close()
    with pytest.raises(RuntimeError, match="expected an open runner"):
        runner.sleep()


def test_a_step_that_awaits_its_sampling_refuses_sleep(checkpoint):
    runner = make_runner(checkpoint, device="cpu")
    runner.forward(make_plan(0, {"a": (0, 2, (3,))}, new=(enter("a", 0, PROMPTS[1]),)))
    for change in (runner.sleep, runner.wake_up, lambda: runner.update_weights({})):
        with pytest.raises(RuntimeError, match="expected sample for step 0, which forward has"):
            change()
    assert len(runner.sample().result().token_ids[0]) == 1
    runner.sleep()
    runner.close()


def test_weights_that_torch_cannot_free_refuse_sleep(checkpoint):
    """Memory that numpy has allocated, for example."""
    runner = make_runner(checkpoint, device="cpu")
    norm = torch.from_numpy(runner.model.weights.final_norm.numpy().copy())
    model = DecoderModel(
        runner.model_config,
        replace(runner.model.weights, final_norm=norm),
        select_ops("reference"),
    )
    lent = ModelRunner(runner.config, model=model, progress=False)
    with pytest.raises(ConfigError, match="model: expected weights in memory of torch's own, got"):
        lent.sleep()
    assert not lent.is_sleeping
    lent.close()
    runner.close()


def test_a_wake_up_without_room_leaves_everything_asleep(llm, weights, before, monkeypatch):
    resize = torch.UntypedStorage.resize_

    def no_room_for_the_cache(storage: torch.UntypedStorage, nbytes: int) -> object:
        if nbytes == llm.kv_report()["total_bytes"]:
            raise RuntimeError("no room")
        return resize(storage, nbytes)

    def no_room_for_graphs(**_: object) -> None:
        raise torch.OutOfMemoryError

    for target, name, failing, message in (
        (
            torch.UntypedStorage,
            "resize_",
            no_room_for_the_cache,
            r"wake_up: expected room for \d+",
        ),
        (
            llm.engine.runner._step,
            "capture",
            no_room_for_graphs,
            "CUDA graphs: expected room on cpu",
        ),
    ):
        llm.sleep(level=2)
        with monkeypatch.context() as patch:
            patch.setattr(target, name, failing)
            with pytest.raises(CapacityError, match=message):
                llm.wake_up()
        assert llm.is_sleeping()
        assert (weight_bytes(llm), llm.kv_report()["allocated_bytes"]) == (0, 0)
        llm.wake_up()
        llm.update_weights(weights)
        assert tokens(llm) == before


def test_an_interrupt_at_any_line_leaves_an_engine_that_can_be_woken(llm, weights, before):

    def cycle() -> None:
        llm.sleep()
        llm.wake_up(["kv_cache"])
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(weights)

    counter = Interrupt(None)
    with counter.active():
        cycle()
    for at in random.Random(0).sample(range(1, counter.num_lines), 10):
        with pytest.raises(KeyboardInterrupt), Interrupt(at).active():
            cycle()
        refusal = llm.engine.runner._sleep.refusal
        if refusal is None:
            assert tokens(llm) == before
        else:
            with pytest.raises(RuntimeError, match=re.escape(refusal)):
                tokens(llm)
        llm.wake_up()
        llm.update_weights(weights)
    assert tokens(llm) == before


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.gpu_only
@pytest.mark.parametrize("level", [1, 2])
def test_a_gpu_gets_its_memory_back_and_runs_new_graphs(tmp_path, level):
    """60 MiB of weights and 512 MiB of cache; small tensors that stay hold a few segments."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 32}
    tiny_checkpoint(tmp_path, "qwen3", **sizes)
    with make_llm(tmp_path, dtype="bfloat16", num_kv_blocks=65536, max_num_seqs=8) as llm:
        runner = llm.engine.runner
        before, compiled = tokens(llm), llm.metrics()["num_compilations"]
        weights = {
            name: tensor.cpu()
            for name, tensor in checkpoint_tensors(
                runner.model.config, runner.model.weights
            ).items()
        }
        freed = weight_bytes(llm) + llm.kv_report()["allocated_bytes"]
        for _ in range(2):
            # This process's own segments: the free memory of the GPU is everybody's.
            awake = torch.cuda.memory_reserved(runner.device)
            llm.sleep(level)
            asleep = torch.cuda.memory_reserved(runner.device)
            assert awake - asleep >= freed - (32 << 20)
            llm.wake_up()
            if level == 2:
                llm.update_weights(weights)
            steps = llm.metrics()["num_graph_steps"]
            assert tokens(llm) == before
            assert llm.metrics()["num_graph_steps"] > steps
            assert llm.metrics()["num_compilations"] == compiled
            again = torch.cuda.memory_reserved(runner.device)
            assert abs(again - awake) < 256 << 20


def test_graphs_are_captured_only_once_weights_and_cache_are_awake(llm, monkeypatch):
    """Graphs hold the addresses of both; a CPU captures none, but in the same order."""
    runner = llm.engine.runner
    captures = []

    def capture(*, progress: bool) -> None:
        buffers = [*runner.kv_cache.buffers, *checkpoint_tensors_of(runner)]
        captures.append(all(each.untyped_storage().nbytes() >= each.nbytes for each in buffers))

    monkeypatch.setattr(runner._step, "capture", capture)
    for tags in (["weights"], ["kv_cache"]), (["kv_cache"], ["weights"]), (None,):
        llm.sleep(2)
        captures.clear()
        for at, each in enumerate(tags):
            llm.wake_up(each)
            is_last = at == len(tags) - 1
            assert captures == [True] * is_last, "not before the other part, and then once"
        llm.wake_up()
        assert captures == [True], "nothing slept"


def checkpoint_tensors_of(runner: ModelRunner) -> list[torch.Tensor]:
    return [*checkpoint_tensors(runner.model.config, runner.model.weights).values()]
