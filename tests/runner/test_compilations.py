"""No request waits for the compiler, whatever it asks for: the engine's own counter stays 0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engines.first_requests import KINDS
from mrv1 import SamplingParams
from mrv1.engine.core import EngineCore
from tests.models.families import tiny_checkpoint
from tests.runner.test_cuda_graph import EvenTokens
from tests.runner.test_model_runner import enter, make_plan, make_runner
from tests.runner.test_on_gpu import add_many, make_core, run

ROOT = Path(__file__).parents[2]

EVERY_KIND = KINDS | {
    "many logprobs": {"logprobs": 100, "prompt_logprobs": 100},
    "whole vocabulary": {"logprobs": -1},
    "whole vocabulary of prompts": {"prompt_logprobs": -1},
    "outputs": {"n": 3, "logprobs": 2},
    "grammar and edits": {"structured_output": EvenTokens(), "logit_bias": {6: 2.0}},
}


def check(core: EngineCore, doing: str) -> None:
    assert core.metrics()["num_compilations"] == 0, (doing, core.runner._compilations)


def ask(core: EngineCore, kind: str, length: int, **options: object) -> None:
    prompt = np.random.default_rng(length).integers(3, 150, length).tolist()
    options = {"seed": 1, "max_tokens": 4, "ignore_eos": True} | EVERY_KIND[kind] | options
    core.add_request(f"{kind}-{length}", prompt, SamplingParams(**options))


def ask_everything(core: EngineCore, state: str) -> None:
    """Each kind alone, with prompts of several lengths and chunks; then all of them together."""
    for kind in EVERY_KIND:
        for length in (1, 9, 150):
            ask(core, kind, length)
            run(core)
            check(core, f"{state}: {kind}, {length} tokens")
    for kind in EVERY_KIND:
        for length in (2, 20, 70):
            ask(core, kind, length, max_tokens=length % 11 + 3)
    add_many(core, 20, features=True, logprobs=True)
    run(core)
    check(core, f"{state}: all together")


def serve_everything(checkpoint: str, **options: object) -> None:
    core = make_core(Path(checkpoint), max_num_seqs=20, num_kv_blocks=200, **options)
    ask_everything(core, "at start")
    core.sleep()
    core.wake_up()
    ask_everything(core, "after sleep")
    core.runner.close()


def verify_drafts(checkpoint: str) -> None:
    """Drafts of all numbers up to the configured one, with and without log-probabilities."""
    runner = make_runner(Path(checkpoint), max_draft_tokens=3)
    wants = SamplingParams(temperature=0.5, logprobs=2, frequency_penalty=0.5)
    plain = SamplingParams(temperature=0)
    step_id, epoch, used = 0, 0, ()
    for params in (plain, wants):
        for counts in ((3, 3), (1, 2), (0, 3), (2,)):
            names = "ab"[: len(counts)]
            rows = {name: (slot, 5 + slot, (slot,)) for slot, name in enumerate(names)}
            new = tuple(
                enter(n, rows[n][0], [5] * rows[n][1], epoch=epoch, sampling_params=params)
                for n in rows
            )
            plan = make_plan(step_id, rows, epoch=epoch, new=new, finished=used)
            runner.execute(plan).result()
            rows = {n: (rows[n][0], 1 + counts[rows[n][0]], ()) for n in rows}
            drafts = tuple((7,) * count for count in counts)
            plan = make_plan(step_id + 1, rows, epoch=epoch, draft_token_ids=drafts)
            runner.execute(plan).result()
            assert runner.num_compilations == 0, (params, counts, runner._compilations)
            step_id, epoch, used = step_id + 2, epoch + 1, tuple(range(len(names)))
        first = enter("a", 0, [5] * 9, epoch=epoch, sampling_params=params)
        rows = {"a": (0, 9, (0,))}
        plan = make_plan(step_id, rows, epoch=epoch, new=(first,), finished=used)
        runner.execute(plan).result()
        beside = enter("b", 1, [6] * 12, epoch=epoch, sampling_params=params)
        rows = {"a": (0, 3, ()), "b": (1, 12, (1,))}
        drafts = ((7, 7), ())
        plan = make_plan(step_id + 1, rows, epoch=epoch, new=(beside,), draft_token_ids=drafts)
        runner.execute(plan).result()
        assert runner.num_compilations == 0, (params, "beside a prompt", runner._compilations)
        step_id, epoch, used = step_id + 2, epoch + 1, (0, 1)
    runner.close()


@pytest.mark.gpu
@pytest.mark.gpu_only
@pytest.mark.parametrize(
    "code",
    [
        "serve_everything(path, max_logprobs=-1)",
        "serve_everything(path, max_logprobs=-1, logprobs_mode='processed_logprobs', "
        "dtype='bfloat16', kv_cache_dtype='fp8_e4m3')",
        "verify_drafts(path)",
    ],
)
def test_no_live_request_compiles_a_kernel(tmp_path, code):
    """In a process of its own: kernels that an older engine has compiled would not count."""
    tiny_checkpoint(tmp_path, "qwen3", eos_token_id=2)
    code = f"import sys; path = sys.argv[1]; from {__name__} import *; {code}"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
