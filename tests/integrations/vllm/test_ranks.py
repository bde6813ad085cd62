"""vLLM's tensor-parallel workers: two processes over gloo give the tokens of mrv1's own engine."""

from __future__ import annotations

import gc
import json
import os
import queue
import random
import shutil
import signal
import time
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM's Python files: make full-vllm", allow_module_level=True)

import torch
import vllm
import zmq
from safetensors.torch import load_file
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams

from mrv1 import ConfigError, StepError
from mrv1.config import checkpoint_dir
from mrv1.integrations.llguidance import StructuredOutputsParams as OwnGrammar
from mrv1.integrations.vllm import ranks
from mrv1.integrations.vllm.options import engine_config
from tests.integrations.vllm.serving import Engine, new_config, new_llm, own_tokens
from tests.integrations.vllm.test_serving import random_params

pytestmark = pytest.mark.filterwarnings("ignore")

CONNECTOR = {
    "kv_connector": "ExampleConnector",
    "kv_connector_module_path": None,
    "kv_load_failure_policy": "fail",
}

SECONDS = 60
"""Longest that the end of an engine may take whose rank has failed."""


@pytest.fixture(autouse=True, scope="module")
def _platform():
    """Let vLLM's threads choose a device, as they do on a GPU; it knows no platform here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(current_platform), "set_device", classmethod(lambda *_: None), raising=False
        )
        yield


@pytest.fixture(scope="module")
def llm():
    with new_llm() as llm:
        yield llm


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def engine(request):
    engine = Engine(new_config(asynchronous=request.param, ranks=2, num_blocks=13))
    yield engine
    engine.close()


def test_options_of_several_ranks_are_taken_or_refused_by_name():
    config = new_config(ranks=2)
    assert engine_config(config, torch.device("cpu")).tensor_parallel_size == 2
    for part, option, value in (
        (config.parallel_config, "nnodes", 2),
        (config.parallel_config, "distributed_executor_backend", "ray"),
        (config, "kv_transfer_config", SimpleNamespace(**CONNECTOR)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(part, option, value)
            with pytest.raises(ConfigError, match=f"{option}: expected .* with tensor_parallel_s"):
                engine_config(config, torch.device("cpu"))


def test_each_rank_has_its_part_of_weights_and_cache(engine):
    def parts(worker) -> Any:
        model, cache = worker._runner.model, worker._runner.kv_cache
        heads = model.weights.layers[0].qkv.plain
        return heads.float(), cache.num_blocks, tuple(cache.layers[0].k.shape)

    stored = load_file(checkpoint_dir("tiny") / "model.safetensors")
    whole = [stored[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    for rank, (found, num_blocks, shape) in enumerate(engine.on_ranks(parts)):
        assert torch.equal(found, torch.cat([part.chunk(2)[rank] for part in whole]).float())
        assert num_blocks == (13,)
        assert shape == (13, 2, 16, 64)  # two of four KV heads


def test_garbage_collections_leave_the_objects_of_the_start_alone(engine):
    # A full collection among them takes longer than hundreds of steps.
    for frozen, tracked in engine.on_ranks(
        lambda _: (gc.get_freeze_count(), len(gc.get_objects()))
    ):
        assert frozen > 100_000
        assert tracked < frozen // 10


def test_random_arrivals_preemption_and_prefix_hits(engine, llm):
    rng = random.Random(3)
    shared = [rng.randrange(200) for _ in range(40)]
    requests, waiting = {}, list(range(14))
    while waiting or engine.engine.has_unfinished_requests() or engine.core.batch_queue:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if waiting:
                name = f"r{waiting.pop()}"
                own = [rng.randrange(200) for _ in range(rng.randint(1, 50))]
                prompt = shared + own if rng.random() < 0.5 else own
                requests[name] = prompt, random_params(rng)
                engine.add(name, prompt, **requests[name][1])
        engine.step()
    assert engine.num_preempted
    assert engine.num_cached_tokens
    for name, (prompt, params) in requests.items():
        assert engine.tokens(name) == own_tokens(llm, prompt, **params), (name, params)


def test_grammars_and_log_probabilities(engine, llm):
    regex, prompt = r"[A-Z]{3}: [a-z ]{5,20}\.", [20, 30, 40, 50]
    engine.add(
        "g", prompt, max_tokens=20, ignore_eos=False, detokenize=True,
        structured_outputs=StructuredOutputsParams(regex=regex),
    )  # fmt: skip
    engine.add("l", prompt, max_tokens=5, logprobs=3, prompt_logprobs=1)
    engine.finish()
    expected = own_tokens(
        llm, prompt, max_tokens=20, ignore_eos=False, structured_outputs=OwnGrammar(regex=regex)
    )
    assert engine.tokens("g") == expected
    assert engine.tokens("l") == own_tokens(llm, prompt, max_tokens=5)
    output = engine.outputs["l"]
    assert len(output.prompt_logprobs) == len(prompt)
    for token, best in zip(engine.tokens("l"), output.outputs[0].logprobs, strict=True):
        assert best[token].rank == 1
        assert len(best) == 3


def test_weights_sleep_and_are_loaded_again_on_every_rank(engine, llm):
    engine.engine.sleep(1)
    asleep = engine.on_ranks(lambda worker: worker._runner.kv_cache.allocated_bytes)
    assert asleep == [0, 0]
    engine.engine.wake_up()
    engine.engine.collective_rpc("reload_weights")
    engine.engine.collective_rpc("check_health")
    engine.add("awake", [7, 8, 9], max_tokens=6)
    engine.finish()
    assert engine.tokens("awake") == own_tokens(llm, [7, 8, 9], max_tokens=6)


def test_batch_and_rank_invariant_ranks_are_deterministic(monkeypatch):
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    config = new_config(ranks=2)
    config.additional_config = {"rank_invariant": True}
    engine = Engine(config)
    assert engine.on_ranks(lambda worker: worker._runner.model.deterministic) == [True, True]
    assert engine.on_ranks(lambda worker: worker._runner.model.rank_invariant) == [True, True]
    prompts = {f"r{length}": [*range(5, 5 + length)] for length in (1, 60)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=12)
    engine.finish()
    engine.close()
    with new_llm(deterministic=True, rank_invariant=True) as llm:
        for name, prompt in prompts.items():
            assert engine.tokens(name) == own_tokens(llm, prompt, max_tokens=12)


def test_four_ranks_of_two_kv_heads(tmp_path):
    """Two ranks have the same KV head; weights are made up."""
    for file in checkpoint_dir("tiny").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text()) | {"num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = new_config(model=str(tmp_path), ranks=4, asynchronous=True)
    config.load_config.load_format = "dummy"
    engine = Engine(config)
    assert engine.on_ranks(lambda worker: worker._runner.spec.num_kv_heads) == [1] * 4
    prompts = {f"r{length}": [*range(5, 5 + length)] for length in (1, 20, 60)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=12)
    engine.finish()
    engine.close()
    with new_llm(model=str(tmp_path), load_format="dummy") as llm:
        for name, prompt in prompts.items():
            assert engine.tokens(name) == own_tokens(llm, prompt, max_tokens=12)


def test_a_step_that_fails_after_its_launch_ends_the_process(monkeypatch):
    ended: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    monkeypatch.setattr(ranks, "end_process", lambda rank, error: ended.put((rank, str(error))))

    def fail() -> None:
        raise StepError("a kernel failed", step_id=5)

    watch = ranks.Watch(3)
    watch.add(SimpleNamespace(result=lambda: None))
    watch.add(SimpleNamespace(result=fail))
    assert ended.get(timeout=SECONDS) == (3, "step 5 (0 requests): a kernel failed")
    watch.close()


def test_gpus_that_reach_no_peers_are_refused(monkeypatch):
    group = SimpleNamespace(ranks=[0, 1], rank_in_group=1, world_size=2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size: expected 2 GPUs that can read"):
        ranks._peers(group, torch.device("cuda", 1))
    assert ranks._peers(group, torch.device("cpu")) is None


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def open_sockets() -> set[zmq.Socket]:
    gc.unfreeze()  # vLLM has frozen those of its engines
    found = [each for each in gc.get_objects() if issubclass(type(each), zmq.Socket)]
    return {socket for socket in found if not socket.closed}


def raise_error() -> None:
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "fail", [raise_error, lambda: os.kill(os.getpid(), signal.SIGKILL)], ids=["fails", "dies"]
)
def test_a_rank_that_fails_ends_the_engine(rank, fail):
    """Rank 0's error is vLLM's answer; the other's process ends, which its executor notices."""
    sockets, engine = open_sockets(), Engine(new_config(ranks=2))

    def break_step(worker) -> int:
        if worker.rank == rank:
            worker._runner.execute = lambda plan: fail()
        return os.getpid()

    processes = engine.on_ranks(break_step)
    engine.add("r", [1, 2, 3], max_tokens=4)
    started = time.monotonic()
    with pytest.raises(Exception, match=r"broken on purpose|ancel|died|shut|failed"):
        engine.finish()
    engine.close()
    for socket in open_sockets() - sockets:  # vLLM leaves those of a failed executor open
        socket.close(linger=0)
    while any(map(is_alive, processes)) and time.monotonic() - started < SECONDS:
        time.sleep(0.1)
    assert not any(map(is_alive, processes))
