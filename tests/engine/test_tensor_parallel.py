"""Tensor-parallel ranks give the tokens of one rank, and end together when one of them fails."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from mrv1 import (
    LLM,
    ConfigError,
    EngineConfig,
    SamplingParams,
    StepError,
    UnsupportedDeviceError,
    device,
)
from mrv1.engine.core import EngineCore
from mrv1.kernels._base.peers import PeerError
from mrv1.runner.head_groups import read_config
from mrv1.runner.ranks import links, parallel_runner, processes
from mrv1.runner.ranks.messages import RankStart
from tests.engine.test_overlap import EOS, MAX_LEN, VOCAB, drained, run, schedules
from tests.forked_child import in_forked_child
from tests.models.families import tiny_checkpoint
from tests.models.test_fp8_cache import add_tensors, scale_tensors
from tests.rank_helpers import Evens
from tests.thread_ranks import ThreadRanks

PROMPT = [5, 6, 7, 8] * 5
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

CASES = {
    "plain": {},
    # One of the two KV heads streams: each of two ranks has a head group that the other lacks.
    "policy": {"head_policy": "ratio=0.5,window=32,sink=16"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "quarter scales": {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "quarter"},
    "drafts": {"speculative": {"method": "ngram", "num_tokens": 3, "prompt_lookup_min": 1}},
    "per head ids": {"per_head_ids": True},
    "static scales and policy": {
        "kv_cache_dtype": "fp8_e4m3", "kv_scale": "head",
        "head_policy": "ratio=0.5,window=32,sink=0",
    },
}  # fmt: skip
"""Options, by name."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Return a model whose vocabulary ranks cannot divide evenly, with scales for each KV head."""
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3", eos_token_id=EOS, vocab_size=VOCAB + 1)
    add_tensors(path, scale_tensors(0))
    return path


def make_core(checkpoint: Path, size: int, **options: object) -> EngineCore:
    """Return an engine in float64, where rounding flips no choice, with 9 blocks to preempt."""
    config = EngineConfig(
        **(
            {
                "model": str(checkpoint), "dtype": "float64", "device": "cpu", "num_kv_blocks": 9,
                "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": MAX_LEN,
                "tensor_parallel_size": size,
            }
            | options
        )
    )  # fmt: skip
    return EngineCore(config, progress=False)


@pytest.fixture(scope="module")
def cores(checkpoint):
    """Return a function that makes engines of one rank and of several, which are threads."""
    made: dict[tuple[str, int], tuple[EngineCore, EngineCore]] = {}

    def of(case: str, size: int) -> tuple[EngineCore, EngineCore]:
        if (case, size) not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(parallel_runner, "Ranks", ThreadRanks)
                one, several = (make_core(checkpoint, each, **CASES[case]) for each in (1, size))
            made[case, size] = one, several
        return made[case, size]

    yield of
    for pair in made.values():
        for core in pair:
            core.runner.close()


# The scripts of test_rank_parity have all cases with all numbers of ranks.
@pytest.mark.parametrize(
    ("case", "size"),
    [
        ("static scales and policy", 2),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (("plain", 4), ("policy", 2), ("drafts", 4), ("per head ids", 4))
        ),
    ],
)
@settings(max_examples=max(settings.default.max_examples // 24, 2))  # each is many steps of ranks
@given(schedule=schedules())
def test_ranks_give_the_tokens_of_one(cores, case, size, schedule):
    """Requests join, stop, leave and are preempted; later schedules find cached prefixes."""
    one, several = cores(case, size)
    expected, got = run(one, schedule), run(several, schedule)
    drained(one)
    drained(several)
    for request, other in zip(expected, got, strict=True):
        assert other.error is None
        assert other.output_token_ids == request.output_token_ids
        assert other.finish_reason == request.finish_reason
        assert other.stop_reason == request.stop_reason
    for name in ("num_preemptions", "prefix_hit_tokens", "num_accepted_tokens", "num_steps"):
        assert several.metrics()[name] == one.metrics()[name]


def test_grammars_logprobs_and_edits_equal_those_of_one_rank(cores):
    params = [
        SamplingParams(temperature=0, max_tokens=6, structured_output=Evens(), ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2),
        SamplingParams(
            temperature=0.7, seed=3, max_tokens=6, min_p=0.01, top_p=0.9, repetition_penalty=1.3,
            logit_bias={9: 4.0}, bad_words_token_ids=[[11]],
        ),
    ]  # fmt: skip
    outputs = []
    for core in cores("plain", 2):
        requests = [core.add_request(str(i), PROMPT, each) for i, each in enumerate(params)]
        while core.has_unfinished_requests:
            core.step()
        outputs.append(requests)
    for request, other in zip(*outputs, strict=True):
        assert request.error is None
        assert other.error is None
        assert other.output_token_ids == request.output_token_ids
    assert all(token % 2 == 0 for token in outputs[1][0].output_token_ids)
    for name in ("output_logprobs", "prompt_logprobs"):
        expected, got = (getattr(of[1], name) for of in outputs)
        assert expected
        for one, several in zip(expected, got, strict=True):
            np.testing.assert_array_equal(several.token_ids, one.token_ids)
            np.testing.assert_allclose(several.logprobs, one.logprobs, rtol=1e-5)


def test_every_rank_has_its_share_of_the_cache(cores):
    one, several = cores("policy", 2)
    runners = [several.runner, *several.runner._ranks.runners.values()]
    assert sum(runner.kv_cache.nbytes for runner in runners) == one.runner.kv_cache.nbytes
    assert {runner.kv_cache.num_blocks for runner in runners} == {one.runner.kv_cache.num_blocks}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "expected a divisor or a multiple of 2 KV heads"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: expected an integer >= 1"),
        (
            {"deterministic": True, "rank_invariant": True, "tensor_parallel_size": 3},
            "expected 1, 2, 4 or 8 with rank_invariant=True, got 3",
        ),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_before_they_start(checkpoint, options, message):
    given_options = {"device": "cpu", "tensor_parallel_size": 2} | options
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint), **given_options)


def test_gpus_that_do_not_reach_each_other_have_nccl_alone(monkeypatch):
    gpus = [torch.device("cuda", rank) for rank in range(2)]
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one.index == 0)
    assert not device.reach_each_other(gpus)
    made = links.Links(0, gpus, None, has_peers=False, meet=print, timeout=1.0)
    assert made.context.peers is None
    assert made.describe() == "NCCL"


def test_several_ranks_on_amd_are_refused(monkeypatch):
    gpus = [torch.device("cuda", rank) for rank in range(2)]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(
        UnsupportedDeviceError, match=r"^tensor_parallel_size: expected 1 on AMD GPUs, got 2: "
    ):
        device.reach_each_other(gpus)


def test_ranks_need_a_gpu_each(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        device, "resolve_device", lambda name: torch.device("cuda", int(name[5:] or 0))
    )
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size: expected at most 1 ranks, .* got 2"
    ):
        LLM(str(checkpoint), device="cuda", tensor_parallel_size=2)
    with pytest.raises(
        ConfigError, match=r"device: expected 'cuda' with tensor_parallel_size=2, .*:1"
    ):
        LLM(str(checkpoint), device="cuda:1", tensor_parallel_size=2)


# --- processes ----------------------------------------------------------------------------------


def make_llm(checkpoint: Path, size: int = 2) -> LLM:
    return LLM(
        str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32, max_num_seqs=4,
        max_model_len=MAX_LEN, tensor_parallel_size=size, use_tqdm_on_load=False,
    )  # fmt: skip


def is_alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def state_of(pid: int) -> str:
    """Return the state of a process in Linux' letters: T = stopped; "" = there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def rank_start(memory: int, config: object) -> RankStart:
    return RankStart(
        rank=1, config=config, model_config=None, head_policy=None, has_peers=False,
        has_processors=False, port=0, memory=memory, num_threads=1, timeout=1.0,
    )  # fmt: skip


def pids_of(llm: LLM) -> list[int]:
    return [member.process.pid for member in llm.engine.runner._ranks._members]


def generated(llm: LLM) -> tuple[int, ...]:
    return llm.generate([{"prompt_token_ids": PROMPT}], GREEDY)[0].outputs[0].token_ids


def check_without_ranks(llm: LLM) -> None:
    """Check the engine of a parent, whose ranks a forked child does not have."""
    with pytest.raises(RuntimeError, match="expected a call in the process that made it"):
        llm.generate({"prompt_token_ids": PROMPT}, GREEDY)
    assert llm.metrics()["num_running_requests"] == 0
    (member,) = llm.engine.runner._ranks._members
    assert member.connection.closed  # or the rank would not notice the parent's end
    del member
    llm.close()


def test_a_send_to_a_rank_that_reads_nothing_fails_after_a_while(monkeypatch):
    monkeypatch.setattr(processes, "TIMEOUT_SECONDS", 1.0)
    ours, theirs = Pipe()
    processes.limit_sends(ours)
    start = time.monotonic()
    with pytest.raises(OSError, match=r"temporarily unavailable|timed out"):
        ours.send_bytes(bytes(1 << 24))
    assert time.monotonic() - start < 30
    ours.close()
    theirs.close()


def test_a_request_of_classes_of_the_callers_is_served_by_all_ranks(cores):
    """Ranks could not unpickle them; and no other request fails."""

    class Text(str):
        __slots__ = ()

    class Params(SamplingParams):
        __slots__ = ()

    outputs = []
    for core in cores("plain", 2):
        requests = [core.add_request("plain", PROMPT, GREEDY)]
        params = Params(
            temperature=0, max_tokens=12, stop=[Text("no such text")],
            bad_words=[Text("b")], logit_bias={np.int64(7): np.float32(0.5)},
        )  # fmt: skip
        encode = lambda word: [len(word) + 40]  # noqa: E731 - one for both engines
        requests.append(core.add_request(Text("own"), PROMPT, params, encode=encode))
        while core.has_unfinished_requests:
            core.step()
        outputs.append([request.output_token_ids for request in requests])
        assert [request.error for request in requests] == [None, None]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (4, 8))]
)
def test_rank_invariant_processes_have_the_bits_of_one(tmp_path, size):
    """Over gloo; log-probabilities are floats of all of a token's logits."""
    tiny_checkpoint(tmp_path, "qwen3", num_attention_heads=8, num_key_value_heads=4)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
    found = []
    for ranks in (1, size):
        with LLM(
            str(tmp_path), device="cpu", dtype="bfloat16", num_kv_blocks=32, max_num_seqs=4,
            max_model_len=64, tensor_parallel_size=ranks, use_tqdm_on_load=False,
            deterministic=True, rank_invariant=True,
        ) as llm:  # fmt: skip
            prompts = [{"prompt_token_ids": PROMPT[:length]} for length in (1, 3, len(PROMPT))]
            outputs = llm.generate(prompts, params)
            found.append([each.outputs[0].logprobs for each in outputs])
            assert ", deterministic on any number of ranks" in llm.describe()
    assert found[0] == found[1]


def test_processes_give_the_tokens_of_one_rank_until_one_is_killed(checkpoint):
    with make_llm(checkpoint, 1) as llm:
        expected = generated(llm)
    with make_llm(checkpoint) as llm:
        assert generated(llm) == expected
        (pid,) = pids_of(llm)
        (member,) = llm.engine.runner._ranks._members
        with socket.socket(fileno=os.dup(member.connection.fileno())) as end:
            limit = end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)
        assert struct.unpack("ll", limit) == (processes.TIMEOUT_SECONDS, 0)
        in_forked_child(lambda: check_without_ranks(llm))
        assert generated(llm) == expected
        stream = llm.stream({"prompt_token_ids": PROMPT}, GREEDY)
        next(stream)
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(StepError, match=r"step \d+ .*: rank 1: .* ended by SIGKILL") as caught:
            list(stream)
        assert caught.value.device_lost
        with pytest.raises(StepError, match=r"the ranks have ended .*SIGKILL.*make a new engine"):
            generated(llm)
        assert time.monotonic() - start < processes.TIMEOUT_SECONDS
    assert not is_alive(pid)


WITHOUT_TRANSFORMERS = """
import pickle, sys
from mrv1.runner.model_runner import ModelRunner
from mrv1.runner.ranks import child
config, model_config = pickle.load(sys.stdin.buffer)
ModelRunner(config, model_config=model_config, progress=False).close()
print("transformers" in sys.modules)
"""


def test_a_rank_does_not_import_transformers(checkpoint):
    """It is given the model's configuration."""
    config = EngineConfig(model=str(checkpoint), device="cpu", max_num_seqs=2, num_kv_blocks=16)
    given = pickle.dumps(read_config(config, torch.device("cpu"), progress=False))
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS]
    run = subprocess.run(command, input=given, capture_output=True, check=True)
    assert run.stdout.split() == [b"False"]


def test_a_rank_that_is_told_nothing_does_not_start(checkpoint, monkeypatch):
    processes_made, popen = [], subprocess.Popen

    def made(*args, **options):
        processes_made.append(popen(*args, **options))
        return processes_made[0]

    monkeypatch.setattr(subprocess, "Popen", made)
    with open(os.devnull) as file, pytest.raises(TypeError, match="cannot pickle"):
        processes.Member.start(rank_start(file.fileno(), config=file))
    assert processes_made[0].returncode is not None


def test_a_rank_that_is_stopped_before_it_has_torch_ends_with_its_parent(tmp_path, monkeypatch):
    """The parent is a fork that is killed; in the place of torch the rank stops itself."""
    told = tmp_path / "pid"
    (tmp_path / "torch.py").write_text(
        f"import os\nopen({str(told)!r}, 'w').write(str(os.getpid()))\nos.kill(os.getpid(), 19)\n"
    )
    paths = [str(tmp_path), str(Path(__file__).parents[2])]
    monkeypatch.setattr(processes, "_python_path", lambda: os.pathsep.join(paths))

    def start_and_die() -> None:
        with open(os.devnull) as file:
            processes.Member.start(rank_start(file.fileno(), config=None))
        while not told.exists() or state_of(int(told.read_text() or 0)) != "T":
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError) as caught:
        in_forked_child(start_and_die)
    assert "Traceback" not in str(caught.value)
    deadline = time.monotonic() + 30
    while is_alive(int(told.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_hangs_at_the_start_ends_the_start(checkpoint, monkeypatch):
    """Rank 1 is stopped before it has imported anything; rank 0 loads nothing."""
    pids, start = [], processes.Ranks

    def stopping(*args, **options):
        started = start(*args, **options)
        pids.extend(member.process.pid for member in started._members)
        os.kill(pids[0], signal.SIGSTOP)
        monkeypatch.setattr(parallel_runner.ModelRunner, "__init__", lambda *args, **kwargs: None)
        return started

    monkeypatch.setattr(processes, "START_SECONDS", 0.1)
    monkeypatch.setattr(parallel_runner, "Ranks", stopping)
    with pytest.raises(RuntimeError, match=r"rank 1: not ready within 0\.1 s after rank 0"):
        make_llm(checkpoint)
    assert not is_alive(pids[0])


def open_files() -> list[str]:
    """Return what this process has open, but for pipes: gloo keeps one for ever."""
    gc.collect()
    links = Path("/proc/self/fd").iterdir()
    found = [os.readlink(link) for link in links if link.exists() or link.is_symlink()]
    return [name.partition(":")[0] for name in found if not name.startswith("pipe:")]


def generate_until_it_fails(checkpoint: Path) -> None:
    with make_llm(checkpoint) as llm:
        while True:
            (output,) = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY)
            if output.error is not None:
                raise output.error


@pytest.mark.parametrize(
    ("number", "second"),
    [
        (signal.SIGKILL, 6),
        (signal.SIGSTOP, 6),
        *(
            pytest.param(number, second, marks=pytest.mark.full)
            for second, number in enumerate([signal.SIGKILL, signal.SIGSTOP] * 4)
            if second != 6
        ),
    ],
)
def test_a_rank_that_is_killed_or_stopped_at_any_time_ends_the_engine(
    checkpoint, monkeypatch, number, second
):
    """In its start or in a step: with an error that names it, and nothing is left."""
    monkeypatch.setattr(processes, "TIMEOUT_SECONDS", 2.0)
    # A rank that is stopped in its start is waited for; one that is killed, not.
    monkeypatch.setattr(processes, "START_SECONDS", 15.0 if number == signal.SIGKILL else 8.0)
    pids, start = [], processes.Member.start

    def struck(told):
        member = start(told)
        pids.append(member.process.pid)
        delay = second + random.Random(second).random()
        threading.Timer(delay, os.kill, (member.process.pid, number)).start()
        return member

    before = len(open_files())
    monkeypatch.setattr(processes.Member, "start", struck)
    with pytest.raises(RuntimeError, match=r"tensor_parallel_size: .*|rank 1: ") as caught:
        generate_until_it_fails(checkpoint)
    message = str(caught.value)
    assert "rank 1: " in message
    assert ("SIGKILL" in message) == (number == signal.SIGKILL)
    if isinstance(caught.value, StepError):
        assert message.startswith("step ")
        assert caught.value.device_lost
    assert not is_alive(pids[0])
    del caught
    assert len(open_files()) == before


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
)
def test_the_watch_that_gpus_need_ends_an_engine(checkpoint, monkeypatch, number):
    """An idle engine whose rank has died knows it at once; one that is stopped, when it waits."""
    monkeypatch.setattr(processes, "needs_watch", lambda device: True)
    with make_llm(checkpoint) as llm:
        generated(llm)
        monkeypatch.setattr(processes, "TIMEOUT_SECONDS", 1.0)  # not gloo's, of the start
        runner, (pid,) = llm.engine.runner, pids_of(llm)
        os.kill(pid, number)
        deadline = time.monotonic() + 30
        while number == signal.SIGKILL and runner._ranks.failure is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY)
        assert time.monotonic() < deadline
        assert "tensor_parallel_size: rank 1: " in str(output.error)
        assert ("SIGKILL" in str(output.error)) == (number == signal.SIGKILL)
        assert output.error.device_lost
    assert not is_alive(pid)


def test_an_interrupt_in_an_end_still_ends_the_ranks(checkpoint, monkeypatch):
    """Also while the watch has ended them already, for another reason."""
    monkeypatch.setattr(processes, "needs_watch", lambda device: True)

    def interrupted(*args: object) -> str:
        raise KeyboardInterrupt

    with make_llm(checkpoint) as llm:
        ranks, (pid,) = llm.engine.runner._ranks, pids_of(llm)
        monkeypatch.setattr(ranks, "_cause", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ranks.end(PeerError("a rank hangs"))
        assert not is_alive(pid)
        with pytest.raises(KeyboardInterrupt), ranks.waiting("a step"):
            raise KeyboardInterrupt
        with pytest.raises(PeerError, match="rank 0: KeyboardInterrupt"), ranks.waiting("a step"):
            pass


def test_a_silent_rank_is_waited_for_as_long_as_a_call_may_take(checkpoint, monkeypatch):
    with make_llm(checkpoint) as llm:
        monkeypatch.setattr(processes, "CALL_SECONDS", 0.5)
        (pid,) = pids_of(llm)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=r"rank 1: no answer \(.* within 0\.5 s, got none"):
            llm.sleep()
        assert not is_alive(pid)


@pytest.mark.full
def test_a_rank_that_hangs_ends_the_engine(checkpoint, monkeypatch):
    monkeypatch.setattr(processes, "TIMEOUT_SECONDS", 4.0)
    with make_llm(checkpoint) as llm:
        (pid,) = pids_of(llm)
        generated(llm)
        os.kill(pid, signal.SIGSTOP)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY)
        assert re.search(r"rank 1: no answer \(.*4000ms", str(output.error))
        assert str(output.error).startswith(f"step {output.error.step_id} (1 requests)")
    assert not is_alive(pid)


@pytest.mark.full
def test_processes_end_with_a_close_and_with_the_engine_itself(checkpoint):
    with make_llm(checkpoint, 4) as llm:
        pids = pids_of(llm)
        assert len(generated(llm)) == 12
    assert not any(map(is_alive, pids))
    llm = make_llm(checkpoint)
    pids = pids_of(llm)
    del llm
    gc.collect()
    deadline = time.monotonic() + 30
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.full
def test_an_error_of_a_rank_at_the_start_is_raised(checkpoint, monkeypatch):
    """Rank 1 finds a checkpoint that rank 0 has read before it was damaged."""
    weights = checkpoint / "model.safetensors"
    content = weights.read_bytes()
    start = processes.Ranks

    def damaging(*args, **options):
        started = start(*args, **options)
        monkeypatch.setattr(parallel_runner.ModelRunner, "__init__", lambda *args, **kwargs: None)
        weights.write_bytes(content[:100])
        return started

    monkeypatch.setattr(parallel_runner, "Ranks", damaging)
    try:
        with pytest.raises(ConfigError, match=r"rank 1: checkpoint .*model\.safetensors"):
            make_llm(checkpoint)
    finally:
        weights.write_bytes(content)


SCRIPT = """
import json, os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[2])  # the ranks look there, too
from mrv1 import LLM, SamplingParams

llm = LLM(sys.argv[1], device="cpu", tensor_parallel_size=2, num_kv_blocks=32)
params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
stream = llm.stream({"prompt_token_ids": [5, 6, 7]}, params)
next(stream)
pids = [each.process.pid for each in llm.engine.runner._ranks._members]
try:  # the signal may come as soon as the pids are printed
    print(json.dumps(pids), flush=True)
    for _ in stream:
        pass
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "is_stopped", "from_stdin"),
    [
        (signal.SIGINT, False, False),
        (signal.SIGINT, False, True),
        (signal.SIGKILL, False, True),
        (signal.SIGKILL, True, False),
    ],
)
def test_an_engine_that_is_interrupted_or_killed_leaves_no_process(
    checkpoint, tmp_path, number, is_stopped, from_stdin
):
    """A script without a guard, from a file or from stdin, elsewhere than the package is."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    arguments = ["-" if from_stdin else str(script), str(checkpoint), str(root)]
    with script.open() as text:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=text, stdout=subprocess.PIPE, text=True,
            cwd=tmp_path, env={**environment, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
    with process:
        pids = json.loads(process.stdout.readline())
        if is_stopped:
            os.kill(pids[0], signal.SIGSTOP)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
        output, _ = process.communicate(timeout=120)
    if number == signal.SIGINT:  # the terminal's Ctrl-C goes to all processes
        assert output == "interrupted\n"
        assert process.returncode == 0
    deadline = time.monotonic() + 30
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
