"""Memory of a step outside its layers: bounded, and no more than the profile step allocates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mrv1 import CapacityError, EngineConfig, SamplingParams
from mrv1.kernels import reference
from mrv1.runner import ModelRunner, device_memory, logprobs, model_runner, profile
from mrv1.runner import start as runner_start
from mrv1.runner.logits import LogitsRows
from mrv1.runner.logprobs import (
    FILTER_BYTES,
    FILTER_CHUNK,
    LOGITS_CHUNK,
    MAX_SEARCHED,
    PromptPart,
    Wanted,
)
from mrv1.runner.profile import run_profile_step
from tests.models.families import tiny_checkpoint
from tests.runner.test_model_runner import enter, make_plan, make_runner

VOCAB = 2000
MAX_LEN = 512
MAX_LOGPROBS = 5


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators have allocated and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in before:
                storage = leaf.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


def peak_of(call: Callable[[], object]) -> int:
    with PeakBytes() as counter:
        call()
    return counter.peak


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Return a checkpoint of few layers and heads, whose logits outweigh all other tensors."""
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3", vocab_size=VOCAB)
    return path


def runner_of(
    checkpoint: Path, monkeypatch, max_num_seqs: int, mode: str, max_logprobs: int = MAX_LOGPROBS
) -> ModelRunner:
    """Return a runner without layers, whose ops allocate as little as kernels, unlike oracles."""

    def top_logprobs(logits, token_ids, num_top):
        rows, count = token_ids.shape
        return (
            torch.zeros(rows, count),
            torch.ones(rows, count, dtype=torch.int64),
            torch.arange(num_top).repeat(rows, 1),
            torch.zeros(rows, num_top),
        )

    def sample_tokens(logits, *_, **__):
        return torch.zeros(len(logits), dtype=torch.int64)

    for name in ("apply_bad_words", "edit_logits", "apply_token_bitmask"):
        monkeypatch.setattr(reference, name, lambda *_, **__: None)
    monkeypatch.setattr(reference, "top_logprobs", top_logprobs)
    monkeypatch.setattr(reference, "sample_tokens", sample_tokens)
    runner = make_runner(
        checkpoint, device="cpu", max_num_seqs=max_num_seqs, max_model_len=MAX_LEN,
        max_num_batched_tokens=1024, num_kv_blocks=256, logprobs_mode=mode,
        max_logprobs=max_logprobs,
    )  # fmt: skip

    def forward(batch, *_: object) -> torch.Tensor:
        return torch.zeros(batch.num_tokens, runner.model_config.hidden_size)

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), VOCAB)

    runner.model.forward = forward  # type: ignore[method-assign]
    runner.model.compute_logits = compute_logits  # type: ignore[method-assign]
    return runner


def bound_of(runner: ModelRunner) -> int:
    """Return the bound that ``mrv1.runner.profile`` states plus the hidden states of a step."""
    num_tokens, hidden_size = runner.config.max_num_batched_tokens, runner.model_config.hidden_size
    num_rows = max(runner.config.max_num_seqs, LOGITS_CHUNK)
    is_raw = runner.config.logprobs_mode == "raw_logprobs"
    most, is_sorted = runner.config.max_logprobs, runner.config.max_logprobs > MAX_SEARCHED
    return (
        2 * num_rows * VOCAB * 4
        + (FILTER_CHUNK * VOCAB * FILTER_BYTES if is_sorted or not is_raw else 0)
        + 64 * num_rows * (1 + 2 * min(most, MAX_SEARCHED))
        + (24 + 4 * hidden_size) * num_tokens
    )


def drafts_of_everyone(runner: ModelRunner) -> None:
    """Verify 7 drafts of every request, all with log-probabilities of edited logits."""
    num_reqs = runner.config.max_num_seqs
    params = SamplingParams(
        temperature=0, logprobs=MAX_LOGPROBS, presence_penalty=0.5, ignore_eos=True
    )
    rows = {str(slot): (slot, 2, (slot,)) for slot in range(num_reqs)}
    new = tuple(enter(str(slot), slot, [5, 6], sampling_params=params) for slot in range(num_reqs))
    runner.execute(make_plan(0, rows, new=new)).result()
    rows = {str(slot): (slot, 8, ()) for slot in range(num_reqs)}
    drafts = ((0,) * 7,) * num_reqs
    output = runner.execute(make_plan(1, rows, draft_token_ids=drafts)).result()
    assert all(len(tokens) == len(output.logprobs[row]) == 8 for row, tokens in enumerate(
        output.token_ids
    ))  # fmt: skip


def prompts_of_a_step(runner: ModelRunner) -> None:
    """Compute two prompts that fill a step, with log-probabilities of all their tokens."""
    params = SamplingParams(temperature=0, prompt_logprobs=MAX_LOGPROBS)
    lengths = [MAX_LEN - 1, MAX_LEN - 3]
    rows, new = {}, []
    for slot, length in enumerate(lengths):
        ids = tuple(range(slot * MAX_LEN // 16, (slot + 1) * MAX_LEN // 16))
        rows[str(slot)] = (slot, length, ids)
        new.append(enter(str(slot), slot, [5] * length, sampling_params=params))
    output = runner.execute(make_plan(0, rows, new=tuple(new))).result()
    assert [len(output.prompt_logprobs[row]) for row in (0, 1)] == [n - 1 for n in lengths]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("max_num_seqs", [4, 64])
@pytest.mark.parametrize("step", [drafts_of_everyone, prompts_of_a_step])
def test_a_step_needs_no_more_memory_than_the_profile_step_and_the_bound(
    checkpoint, monkeypatch, step, max_num_seqs, mode
):
    runner = runner_of(checkpoint, monkeypatch, max_num_seqs, mode)
    profiled = peak_of(lambda: run_profile_step(runner._step))
    needed = peak_of(lambda: step(runner))
    runner.close()
    assert needed <= profiled
    assert profiled <= bound_of(runner)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_whole_vocabularies_need_no_more_memory_than_the_profile_step_and_the_bound(
    checkpoint, monkeypatch, mode
):
    # Results leave the device: they are not counted, nor read.
    monkeypatch.setattr(logprobs, "_to_host", lambda values: values[:, :1].clone())
    runner = runner_of(checkpoint, monkeypatch, 64, mode, max_logprobs=VOCAB)
    step, num_rows, ids = runner._step, runner._step.max_logits_rows, tuple(range(VOCAB))
    hidden = torch.zeros(MAX_LEN, runner.model_config.hidden_size)

    def run() -> None:
        padding = torch.full((num_rows,), -1, dtype=torch.int32)
        wanted = [Wanted(row, VOCAB, ids, True, row) for row in range(num_rows)]
        step.draw(LogitsRows(torch.zeros(num_rows, VOCAB)), padding, wanted)
        tokens = slice(MAX_LEN - 1)
        step.report_prompt(PromptPart(Wanted(0, VOCAB), tokens, 0, tokens), hidden)

    profiled, needed = peak_of(lambda: run_profile_step(step)), peak_of(run)
    assert needed <= profiled
    assert profiled <= bound_of(runner)
    runner.close()


def test_the_padding_of_a_graph_with_prompts_is_profiled(checkpoint, monkeypatch):
    """It has two rows for each slot, and log-probabilities beside prompts are in no graph."""
    runner = runner_of(checkpoint, monkeypatch, LOGITS_CHUNK, "raw_logprobs")
    monkeypatch.setattr(type(runner._step), "is_capturable", True)
    step, num_reqs = runner._step, runner.config.max_num_seqs

    def run() -> None:
        logits = LogitsRows(torch.zeros(2 * num_reqs, VOCAB))
        padding = torch.full((2 * num_reqs,), -1, dtype=torch.int32)
        prompts = range(num_reqs, 2 * num_reqs)
        step.draw(logits, padding, [Wanted(0, MAX_LOGPROBS, device_row=row) for row in prompts])

    assert peak_of(run) <= peak_of(lambda: run_profile_step(step))
    runner.close()


def test_the_profile_step_needs_the_memory_of_a_full_step(checkpoint, monkeypatch):
    """Each row of logits has a copy: half of the bound's first term would be too little."""
    runner = runner_of(checkpoint, monkeypatch, 64, "raw_logprobs")
    assert peak_of(lambda: run_profile_step(runner._step)) >= 2 * LOGITS_CHUNK * VOCAB * 4
    runner.close()


@pytest.mark.parametrize(("others", "num_blocks"), [(40, 9), (49, 0), (60, 0)])
def test_a_gpu_without_room_for_a_block_says_who_has_its_memory(
    monkeypatch: pytest.MonkeyPatch, others: int, num_blocks: int
):
    """Of 100 GiB, 0.6 may be used; this process has 9 GiB and will have 2 GiB of graphs."""
    gib = 2**30
    step = SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        is_capturable=True,
        config=SimpleNamespace(gpu_memory_utilization=0.6),
        spec=SimpleNamespace(block_bytes=gib),
    )
    free = (100 - others - 9) * gib
    monkeypatch.setattr(profile, "run_profile_step", lambda _: None)
    monkeypatch.setattr(profile, "_graph_bytes", lambda _: 2 * gib)
    monkeypatch.setattr(profile, "memory_bytes", lambda _: (free, 100 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 9 * gib)
    if num_blocks:
        assert profile.kv_bytes(step) // gib == num_blocks
        return
    with pytest.raises(CapacityError) as error:
        profile.kv_bytes(step)
    for part in (
        "gpu_memory_utilization: expected room for a KV block of 1073741824 bytes in 0.6 of "
        "100.00 GiB, got 9.00 GiB for weights",
        "2.00 GiB for CUDA graphs",
        f"{others}.00 GiB for the driver and other processes",
    ):
        assert part in str(error.value)


def _start(checkpoint: Path) -> None:
    make_runner(checkpoint, device="cpu")


def _measure(checkpoint: Path) -> None:
    config = EngineConfig(model=str(checkpoint), device="cpu")
    ModelRunner(config, allocates=False, progress=False).measure_kv_cache_bytes()


@pytest.mark.parametrize(
    ("start", "module", "function", "option", "what"),
    [
        (_start, runner_start, "load_model", "model", "weights"),
        (_start, runner_start, "blocks_of_groups", "max_num_batched_tokens", "the largest step"),
        (_measure, model_runner, "kv_bytes", "max_num_batched_tokens", "the largest step"),
    ],
)
def test_a_start_on_a_full_gpu_says_who_has_its_memory(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[[Path], object],
    module: ModuleType,
    function: str,
    option: str,
    what: str,
):
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    gib = 2**30
    monkeypatch.setattr(module, function, fail)
    monkeypatch.setattr(device_memory, "memory_bytes", lambda _: (3 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 7 * gib)
    with pytest.raises(CapacityError) as error:
        start(checkpoint)
    assert str(error.value) == (
        f"{option}: expected room for {what} in the 80.00 GiB of cpu, got 7.00 GiB for this "
        "process's tensors, 3.00 GiB free, and 70.00 GiB for the driver and other processes; "
        f"end other processes on the GPU, or choose a smaller {option}"
    )
