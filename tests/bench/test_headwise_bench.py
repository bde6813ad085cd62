"""The head-wise benchmarks: counts against arithmetic, planted contexts, schema, errors."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cli.app import app
from benchmarks.engines import headwise
from benchmarks.engines.capacity import (
    num_admitted,
    predicted_requests,
    request_bytes,
    run_capacity,
)
from benchmarks.engines.headwise import (
    HeadwiseBench,
    fill_randomly,
    paired_saving,
    plant_prefix,
    run_headwise,
)
from benchmarks.engines.headwise_options import HeadwiseOptions
from benchmarks.measure.timing import WrongResultError
from mrv1.engine import EngineCore
from mrv1.engine.scheduler import Scheduler
from mrv1.errors import ConfigError
from mrv1.headwise import FULL, HeadPolicy, Visible
from mrv1.sampler import SamplingParams
from tests.engine.scheduler_model import new_scheduler

SMALL = {
    "shape": "tiny-random", "device": "cpu", "streaming_ratio": 0.5, "window": 32, "sink": 16,
    "context": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 4_000_000,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _few_checked_tokens(monkeypatch: pytest.MonkeyPatch):
    """The window of 32 is left behind with the first of them: the prompt is twice as long."""
    monkeypatch.setattr(headwise, "CHECKED_TOKENS", 16)


@pytest.mark.parametrize(
    ("num_blocks", "keeps", "expected"),
    [
        ([100], [FULL], 100 // (256 // 16 + 2)),  # two more for the tokens after the prompt
        ([400], [FULL], 8),  # slots
        ([400, 40], [FULL, Visible(32, 16)], 8),  # 1 + 3 blocks each, and two chunks of 4
        ([400, 22], [FULL, Visible(32, 16)], 4),
    ],
)
def test_requests_are_counted_until_a_request_has_to_wait(num_blocks, keeps, expected):
    scheduler = new_scheduler(
        Scheduler,
        num_blocks=num_blocks, keeps=keeps, block_size=16, max_num_seqs=8,
        max_num_batched_tokens=64,
    )  # fmt: skip
    assert num_admitted(scheduler, 256).requests == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(("num_blocks", "expected"), [(32, 1), (31, 0), (63, 1)])
def test_a_request_is_counted_only_if_its_whole_context_fits(num_blocks, expected):
    scheduler = new_scheduler(
        Scheduler,
        num_blocks=[num_blocks],
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    admitted = num_admitted(scheduler, 512)
    assert admitted.requests == expected
    assert admitted.held_blocks[0] in range(32 * expected, num_blocks + 1)


def test_requests_are_counted_where_decodes_take_the_whole_budget():
    scheduler = new_scheduler(
        Scheduler, num_blocks=[400], block_size=16, max_num_seqs=8, max_num_batched_tokens=5
    )
    assert num_admitted(scheduler, 32).requests == 5


@pytest.mark.parametrize("budget", [64, 512])
@pytest.mark.parametrize("seen", [Visible(32, 64), Visible(20), Visible(100, 4)])
@pytest.mark.parametrize("spare", [0, 10, 50, 130])
def test_the_predicted_requests_of_streaming_heads_are_admitted(budget, seen, spare):
    """The pool has at least the blocks of one prompt's chunks, as an engine ensures."""
    options = {"block_size": 16, "max_num_seqs": 32, "max_num_batched_tokens": budget}
    num_blocks = min(512 // 16, seen.num_blocks(16, budget)) + spare
    scheduler = new_scheduler(Scheduler, num_blocks=[num_blocks], keeps=[seen], **options)
    core: Any = SimpleNamespace(scheduler=scheduler, config=SimpleNamespace(max_num_seqs=32))
    predicted = predicted_requests(core, 512)
    assert num_admitted(scheduler, 512).requests == pytest.approx(predicted, abs=1)
    assert predicted >= 1


def test_capacity_equals_the_arithmetic_and_the_schedulers_admissions():
    """2 layers of 2 heads of 32 float32: a page of 16 tokens is 2 KiB, 4 KiB with K and V."""
    num_bytes = 2_500_000
    options = SMALL | {"kv_cache_memory_bytes": num_bytes, "variants": ("uniform", "recycled")}
    result = run_capacity(HeadwiseOptions(**options))
    assert json.loads(json.dumps(result)) == result
    uniform, recycled = result["results"]
    page = 2 * 16 * 32 * 4
    assert uniform["request_bytes"] == [4 * page * 512 // 16]
    assert recycled["request_bytes"] == [
        2 * page * 512 // 16,
        2 * page * (1 + math.ceil((32 + 2 - 2) / 16) + 1),
    ]
    assert uniform["kv_cache"]["allocated_bytes"] <= num_bytes
    assert uniform["longest_context"] == num_bytes // (4 * page) * 16
    assert uniform["predicted_requests"] == num_bytes // (4 * page) // (512 // 16) == 4
    assert recycled["predicted_requests"] == (num_bytes - 48 * 2 * page) // (2 * page) // 32 == 8
    assert uniform["held_bytes"][0] >= uniform["requests"] * 4 * page * 32
    assert recycled["held_bytes"][0] >= recycled["requests"] * 2 * page * 32
    # Per request one block of the sink, and two or three of the window.
    assert 3 <= recycled["held_bytes"][1] / (recycled["requests"] * 2 * page) <= 4
    for entry in (uniform, recycled):  # tokens after the prompt take some blocks
        assert 0 <= entry["predicted_requests"] - entry["requests"] <= 1
        assert entry["predicted_held_bytes"] == [
            entry["requests"] * nbytes for nbytes in entry["request_bytes"]
        ]
        assert sum(entry["held_bytes"]) == pytest.approx(
            sum(entry["predicted_held_bytes"]), rel=0.1
        )
    assert uniform["ratio"] == 1.0
    assert recycled["ratio"] == recycled["requests"] / uniform["requests"] >= 1.5


def test_streaming_heads_serve_a_context_for_which_uniform_heads_lack_memory():
    options = SMALL | {"streaming_ratio": 1.0, "kv_cache_memory_bytes": 31 * 16_384}
    result = run_capacity(HeadwiseOptions(**options, variants=("uniform", "recycled")))
    uniform, recycled = result["results"]
    assert uniform["requests"] == uniform["predicted_requests"] == sum(uniform["held_bytes"]) == 0
    assert uniform["longest_context"] == 31 * 16
    assert recycled["requests"] > 1
    assert recycled["ratio"] is None
    assert recycled["longest_context"] == 512


def test_discrete_tables_beside_one_uniform_table_where_a_model_has_experts():
    """One and two of four KV heads stream, with five query heads each; nothing is recycled.

    Of "masked" the one table has all pages, which are read, and masked by the policy.
    """
    for ratio in (0.25, 0.5):
        options = SMALL | {
            "shape": "tiny-experts", "streaming_ratio": ratio, "context": 200,
            "variants": ("masked", "kept", "discrete"),
        }  # fmt: skip
        bench = HeadwiseBench(
            **options, prompt_tokens=150, output_tokens=8, num_requests=1, repeats=5
        )
        result = run_headwise(bench)
        assert result["conditions"]["full_share"] == 1 - ratio
        first, *others = result["results"]
        assert first["variant"] == "masked"
        for entry in others:
            assert len(entry["runs"]) == 5
            for saving in (entry["first_token_saving"], entry["between_tokens_saving"]):
                assert saving["low"] <= saving["mean"] <= saving["high"]


def test_uniform_heads_are_full_regardless_of_the_environment(tmp_path, monkeypatch):
    HeadPolicy.of_ratio(2, 2, 1.0, window=16).save(tmp_path / "policy.json")
    monkeypatch.setenv("MRV1_HEAD_POLICY", str(tmp_path / "policy.json"))
    bench = HeadwiseOptions(**SMALL)
    model = bench.new_model(torch.device("cpu"))
    with bench.engine("uniform", model) as core:
        assert core.runner.head_policy == HeadPolicy.full(2, 2)
    with bench.engine("recycled", model) as core:
        assert core.runner.head_policy == bench.head_policy()


@pytest.mark.parametrize("context", [4, 60, 64])
def test_short_contexts_are_checked_too(context):
    bench = HeadwiseBench(
        **(SMALL | {"context": context}), variants=("kept", "recycled"), prompt_tokens=2,
        output_tokens=2, num_requests=1,
    )  # fmt: skip
    assert len(run_headwise(bench)["results"]) == 2


def planted_core(name: str = "recycled") -> tuple[HeadwiseBench, EngineCore]:
    bench = HeadwiseBench(**SMALL, prompt_tokens=200, output_tokens=5)
    model = bench.new_model(torch.device("cpu"))
    return bench, bench.engine(name, model, enable_prefix_caching=True)


@pytest.mark.parametrize("name", ["uniform", "kept", "discrete", "recycled", "recycled-fp8"])
def test_a_planted_prompt_is_a_prefix_hit_except_for_its_last_block(name):
    _, engine = planted_core(name)
    prompt = [7 + i % 300 for i in range(200)]
    with engine as core:
        fill_randomly(core, 0)
        for layer in core.runner.kv_cache.layers:
            assert layer.k.float().isfinite().all()
            assert layer.k.float().std() > 0.5
        plant_prefix(core, prompt)
        assert all(pool.num_held == 0 for pool in core.scheduler.pools)
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        request = core.add_request("a", prompt, params)
        while core.has_unfinished_requests:
            core.step()
    assert request.error is None
    assert request.num_cached_tokens == 192
    assert len(request.output_token_ids) == 5


def test_no_code_of_a_planted_fp8_cache_is_nan():
    """Without a limit, some of two million normal values times 100 would exceed e4m3's 448."""
    options = SMALL | {"max_num_seqs": 64, "kv_cache_memory_bytes": 40_000_000}
    bench = HeadwiseBench(**options, prompt_tokens=200, output_tokens=5)
    with bench.engine("uniform-fp8", bench.new_model(torch.device("cpu"))) as core:
        fill_randomly(core, 0)
        for layer in core.runner.kv_cache.layers:
            assert layer.k.numel() > 2_000_000
            assert layer.k.float().isfinite().all()
            assert layer.v.float().abs().max() == 384, "100 times 4, rounded to even"


@pytest.mark.parametrize("planted", [False, True])
def test_every_variant_runs_the_same_requests(planted):
    variants = ("uniform", "masked", "kept", "discrete", "recycled")
    bench = HeadwiseBench(
        **SMALL, variants=variants, prompt_tokens=90, output_tokens=6, num_requests=3,
        planted=planted,
    )  # fmt: skip
    said: list[str] = []
    result = run_headwise(bench, said.append)
    assert json.loads(json.dumps(result)) == result
    assert tuple(entry["variant"] for entry in result["results"]) == variants
    assert len(said) == 5 * 2  # the start line and one run
    for entry in result["results"]:
        (run,) = entry["runs"]
        assert run["tokens_per_s"] == pytest.approx(3 * 6 / run["seconds"])
        assert 0 < run["first_token_ms"] < run["seconds"] * 1e3
        assert 5 * run["between_tokens_ms"] < run["seconds"] * 1e3
        assert run["cached_tokens"] == (3 * 80 if planted else 0)
        assert run["crowded_tokens_per_s"] is entry["crowded_ratio"] is None, "no request waits"
    first, *_, last = result["results"]
    assert last["throughput_ratio"] == pytest.approx(last["tokens_per_s"] / first["tokens_per_s"])
    assert last["between_tokens_speedup"] == pytest.approx(
        first["between_tokens_ms"] / last["between_tokens_ms"]
    )


@pytest.mark.parametrize(("pairs", "t"), [(2, 12.7062), (3, 4.30265), (5, 2.77645), (31, 2.04227)])
def test_savings_have_students_interval(pairs, t):
    """The quantiles are those of printed tables; a run saves 10% or 20% in turns."""
    saved = [0.1 + 0.1 * (run % 2) for run in range(pairs)]
    base = [50.0 + run for run in range(pairs)]
    own = [ms * (1 - share) for ms, share in zip(base, saved, strict=True)]
    saving = paired_saving(base, own)
    half = t * np.std(saved, ddof=1) / math.sqrt(pairs)
    expected = {
        "mean": np.mean(saved),
        "low": np.mean(saved) - half,
        "high": np.mean(saved) + half,
    }
    assert saving == pytest.approx(expected, abs=1e-6)
    assert paired_saving(base[:1], own[:1]) is None


def test_savings_pair_the_runs_of_a_variant_with_those_of_the_first():
    bench = HeadwiseBench(
        **SMALL, variants=("masked", "discrete"), prompt_tokens=40, output_tokens=4,
        num_requests=1, repeats=3,
    )  # fmt: skip
    masked, discrete = run_headwise(bench)["results"]
    assert masked["first_token_saving"] is masked["between_tokens_saving"] is None
    for kind in ("first_token", "between_tokens"):
        pairs = [[run[f"{kind}_ms"] for run in entry["runs"]] for entry in (masked, discrete)]
        assert discrete[f"{kind}_saving"] == paired_saving(*pairs)


def test_throughput_while_requests_wait_is_reported_apart(monkeypatch):
    """Two of five requests run at once, 11 steps each for 10 tokens; a step takes one second."""
    seconds, step = [0.0], EngineCore.step

    def timed(core: EngineCore) -> object:
        seconds[0] += 1
        return step(core)

    monkeypatch.setattr(headwise, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    monkeypatch.setattr(EngineCore, "step", timed)
    options = SMALL | {"max_num_seqs": 2, "variants": ("uniform", "recycled")}
    bench = HeadwiseBench(**options, prompt_tokens=20, output_tokens=10, num_requests=5)
    result = run_headwise(bench)
    for entry in result["results"]:
        (run,) = entry["runs"]
        assert entry["crowded_tokens_per_s"] == run["crowded_tokens_per_s"]
        # At most two requests run. The time after the last wait, with one alone, does not count.
        assert 1.5 < run["crowded_tokens_per_s"] <= 2
        assert run["tokens_per_s"] == 50 / run["seconds"] < run["crowded_tokens_per_s"]
        assert entry["crowded_ratio"] == 1


def test_wrong_tokens_of_the_recycled_variant_are_an_error_before_timing(monkeypatch):
    """Every step here damages the pages of the recycled variant alone."""
    bench = HeadwiseBench(
        **SMALL, variants=("kept", "recycled"), prompt_tokens=90, output_tokens=6, num_requests=1
    )
    run = EngineCore.step

    def careless(core: EngineCore) -> object:
        changed = run(core)
        if len(core.scheduler.pools.keeps) > 1:
            for layer in core.runner.kv_cache.layers:
                layer.v.mul_(0.5)
        return changed

    monkeypatch.setattr(EngineCore, "step", careless)
    with pytest.raises(WrongResultError, match="recycled"):
        run_headwise(bench)


def test_predictions_leave_room_for_prompts():
    bench = HeadwiseOptions(**SMALL)
    model = bench.new_model(torch.device("cpu"))
    with bench.engine("recycled", model) as core:
        report = core.kv_report()
        full, streaming = report["groups"]
        chunks = 2 * 64 // 16
        assert streaming["num_blocks"] == 8 * (streaming["request_blocks"] + 1) + chunks
        assert predicted_requests(core, 512) == min(full["num_blocks"] // 32, 8)
        assert sum(request_bytes(report, 16)) == report["block_bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variants": ("best",)}, r"variants: expected some of uniform, .*got \['best'\]"),
        ({"prompt_tokens": 512}, "prompt_tokens: expected 1 to"),
        ({"output_tokens": 1}, "output_tokens: expected >= 2"),
        ({"streaming_ratio": 2.0}, "streaming_ratio: expected"),
        ({"policy": HeadPolicy.full(3, 2)}, "head_policy: expected 2 layers"),
        (
            {"policy": HeadPolicy.full(2, 4)},
            "head_policy: expected 2 KV heads, as tiny-random has",
        ),
        ({"shape": "best"}, "shape: expected one of"),
    ],
)
def test_a_wrong_option_is_named_before_anything_runs(options, message):
    with pytest.raises(ConfigError, match=message):
        HeadwiseBench(**(SMALL | {"prompt_tokens": 90} | options))


def test_the_commands_print_a_table_and_write_json(tmp_path):
    shared = [
        "--shape", "tiny-random", "--device", "cpu", "--context", "256", "--window", "32",
        "--max-num-seqs", "8", "--max-num-batched-tokens", "64",
        "--kv-cache-memory-bytes", "4000000", "--output", str(tmp_path / "result.json"),
    ]  # fmt: skip
    sizes = ["--prompt-tokens", "40", "--output-tokens", "4", "--num-requests", "2"]
    for command, more, column in (
        ("capacity", [], "predicted"),
        ("headwise", [*sizes, "--planted"], "between"),
    ):
        result = CliRunner().invoke(app, [command, *shared, *more])
        assert result.exit_code == 0, result.output
        assert column in result.stdout
        assert json.loads((tmp_path / "result.json").read_text())["op"] == command
