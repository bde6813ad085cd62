"""``mrv1 bench vllm`` and ``serving`` with vLLM's own engine; on a CPU only mrv1's worker runs."""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM's Python files: make full-vllm", allow_module_level=True)

import torch

from benchmarks.engines.checkpoint import write_checkpoint
from benchmarks.engines.serving import ServingBench
from benchmarks.engines.serving_run import ServingJob, WorkloadRuns, measure_serving
from benchmarks.engines.vllm import WORKER, VLLMBench
from benchmarks.kernels.attention_case import Cell
from benchmarks.measure.child import run_in_child
from benchmarks.measure.shapes import SHAPES
from mrv1 import LLM
from mrv1.config import checkpoint_dir
from mrv1.models import ModelConfig
from tests.bench.conftest import run_bench  # noqa: F401 - a fixture
from tests.cli.conftest import Mrv1
from tests.integrations.vllm.serving import own_tokens

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

SMALL = (
    "--device", "cpu", "--dtype", "float32", "--cells", "1x8,3x20", "--output-tokens", "4",
    "--repeats", "1", "--kv-cache-memory-bytes", "8000000",
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "modes"),
    [
        (("--model", "tiny"), ("worker",)),
        (("--shape", "tiny-random", "--in-turns"), ("vllm", "worker")),
    ],
)
def test_the_workers_first_tokens_are_mrv1s_and_it_has_times(
    run_bench: Mrv1,  # noqa: F811
    model: tuple[str, str],
    modes: tuple[str, ...],
    tmp_path: Path,
):
    target = tmp_path / "result.json"
    result = run_bench("vllm", *model, *SMALL, "--modes", ",".join(modes), "--output", target)
    assert result.exit_code == 0, result.output
    written = json.loads(target.read_text("utf-8"))
    assert written["reference"] == "worker"
    assert written["peers"]["vllm"] == version("vllm")
    assert list(written["modes"]) == [*modes]
    if "vllm" in modes:  # no kernels of vLLM for this CPU: it fails alone, with its reason
        assert written["modes"]["vllm"]["error"]
        assert f"failed: {written['modes']['vllm']['error'][:20]}" in result.stdout
    worker = written["modes"]["worker"]
    assert worker["error"] is None
    checkpoint = checkpoint_dir("tiny")
    if model[0] == "--shape":
        checkpoint = tmp_path
        config = SHAPES[model[1]]
        write_checkpoint(checkpoint, config, device="cpu", dtype=torch.float32, seed=0)
    vocab_size = ModelConfig.from_pretrained(checkpoint).vocab_size
    probes = VLLMBench(cells=(Cell(1, 8), Cell(3, 20))).probes(vocab_size)
    with LLM(str(checkpoint), device="cpu", dtype="float32", num_kv_blocks=64) as llm:
        expected = [own_tokens(llm, probe, max_tokens=1)[0] for probe in probes]
    assert [token for token, _ in worker["first_tokens"]] == expected
    for entry in written["results"]:
        assert list(entry["modes"]) == ["worker"]
        assert entry["modes"]["worker"]["tokens_per_s"] > 0


def test_the_client_of_bench_serving_drives_vllms_engine():
    """Two conversations of two turns; mrv1's worker computes them, so that the CPU can."""
    bench = ServingBench(
        shape=None, model="tiny", device="cpu", num_conversations=2, num_turns=2, prefix_len=5,
        input_len=4, input_max=8, output_len=3, output_max=5, repeats=1, max_num_seqs=2,
        kv_cache_memory_bytes=8_000_000,
    )  # fmt: skip
    checkpoint = checkpoint_dir("tiny")
    vocab_size = ModelConfig.from_pretrained(checkpoint).vocab_size
    conversations = bench.conversations(1, vocab_size)
    probes = [[5], [*range(1, 12)]]
    runs = WorkloadRuns(
        workload=bench, sampling=bench.sampling(), stream_outputs=True, warm_up=False, repeats=1
    )
    job = ServingJob(
        engine="vllm",
        options={
            "model": str(checkpoint), "dtype": "float32", "skip_tokenizer_init": True,
            "disable_log_stats": True, **bench.engine_options(conversations), **WORKER,
        },
        on_cpu=True,
        probes=probes,
        workloads=[runs],
        vocab_size=vocab_size,
    )  # fmt: skip
    start_s, first_tokens, rate, served = run_in_child(measure_serving, job)
    assert rate == math.inf
    assert start_s > 0
    with LLM("tiny", device="cpu", dtype="float32", num_kv_blocks=64) as llm:
        expected = [own_tokens(llm, probe, max_tokens=1)[0] for probe in probes]
    assert [token for token, _ in first_tokens] == expected
    lengths = [[turn.output_len for turn in each.turns] for each in conversations]
    assert sorted(len(each.token_s) for each in served) == sorted(chain(*lengths))
    moments = [len({*each.token_s}) for each in served]
    assert moments == [each.output_len for each in served]
