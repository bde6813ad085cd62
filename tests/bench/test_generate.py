"""The generation benchmark: its schema, its arithmetic under a fake clock, its errors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.engines import engine, sample
from benchmarks.engines.generate import GenerateBench, run_generate
from benchmarks.engines.sample import run_once
from benchmarks.measure.floor import rank_config, step_kv_bytes, step_weight_bytes
from benchmarks.measure.shapes import shape_config
from mrv1.config import EngineConfig
from mrv1.engine import EngineCore
from mrv1.errors import ConfigError, StepError
from mrv1.kernels import reference
from mrv1.kernels.cache.formats import PageFormat
from mrv1.models import DecoderModel, checkpoint_tensors, empty_weights, random_weights
from mrv1.runner import ModelRunner
from mrv1.runner.kv_cache import CacheSpec
from mrv1.runner.ranks import parallel_runner
from mrv1.sampler import SamplingParams
from tests.thread_ranks import ThreadRanks

SMALL = {
    "shape": "tiny-random",
    "batches": (1, 3),
    "prompt_tokens": 8,
    "output_tokens": 5,
    "repeats": 2,
    "device": "cpu",
}
KEYS = {
    "op", "schema", "shape", "weights", "dtype", "path", "device", "driver", "versions", "commit",
    "date", "copy_bandwidth_bytes_per_s", "start", "conditions", "results",
}  # fmt: skip
ENTRY_KEYS = {
    "batch", "tokens_per_s", "decode_step_ms", "prefill_ms", "host_ms", "gpu_ms", "num_steps",
    "num_graph_steps", "num_preemptions", "weight_bytes", "kv_bytes", "floor_ms", "share_of_floor",
    "samples", "active_experts", "expected_experts",
}  # fmt: skip


# --- whole runs ----------------------------------------------------------------------------------


def test_result_has_the_schema_and_survives_json():
    said: list[str] = []
    result = run_generate(GenerateBench(**SMALL), said.append)
    assert json.loads(json.dumps(result)) == result
    assert result.keys() == KEYS
    assert (result["op"], result["path"], result["dtype"]) == ("generate", "reference", "float32")
    assert result["versions"]["torch"] == torch.__version__
    assert result["copy_bandwidth_bytes_per_s"] is None
    assert result["conditions"]["warm_up_runs"] == 1
    assert result["start"]["seconds"] > 0
    assert result["start"]["triton_cache"] is None  # nothing is compiled
    assert len(said) == 1 + 2 * 3  # the start line, then per batch a warm-up and two runs


@pytest.mark.parametrize(
    ("quantization", "share"), [("fp8", 0.25), ("fp8-block", 0.25), ("int4", None)]
)
def test_a_shape_runs_with_made_up_codes(quantization, share):
    """A byte for each weight of float32's four; groups of 128 inputs need as many."""
    options = {"batches": (1,), "repeats": 1, "quantization": quantization}
    if share is None:
        with pytest.raises(ConfigError, match="group_size: expected a divisor of the 64 inputs"):
            run_generate(GenerateBench(**SMALL | options))
        return
    result = run_generate(GenerateBench(**SMALL | options))
    assert (result["weights"], result["conditions"]["quantization"]) == ("dummy", quantization)
    config = shape_config("tiny-random")
    plain = step_weight_bytes(config, torch.float32)
    stored = checkpoint_tensors(config, empty_weights(config, "meta", torch.float32))
    layers = sum(t.nbytes for name, t in stored.items() if name.endswith("_proj.weight"))
    (entry,) = result["results"]
    assert (entry["weight_bytes"] - plain + layers) / layers == pytest.approx(share, abs=0.03)
    with pytest.raises(ConfigError, match="quantization: expected None or 'fp8' with a model"):
        GenerateBench(shape=None, model="tiny", quantization="int4")


def test_ranks_run_a_shape_with_made_up_weights(monkeypatch):
    monkeypatch.setattr(parallel_runner, "Ranks", ThreadRanks)
    result = run_generate(GenerateBench(**SMALL, tensor_parallel_size=2))
    assert (result["weights"], result["conditions"]["tensor_parallel_size"]) == ("dummy", 2)
    own = rank_config(shape_config("tiny-random"), 2)
    for entry in result["results"]:
        assert [run["num_tokens"] for run in entry["samples"]] == [entry["batch"] * 5] * 2
        assert entry["weight_bytes"] == step_weight_bytes(own, torch.float32, 2)


def test_active_experts_stand_beside_what_the_floor_counts():
    said: list[str] = []
    changes = {"shape": "tiny-experts", "batches": (1, 16), "output_tokens": 10, "repeats": 1}
    result = run_generate(GenerateBench(**SMALL | changes), said.append)
    one, many = result["results"]
    assert one["active_experts"] == one["expected_experts"] == pytest.approx(6)
    assert many["expected_experts"] == pytest.approx(64 * (1 - (58 / 64) ** 16))
    assert many["active_experts"] == pytest.approx(many["expected_experts"], rel=0.2)
    assert "active experts a layer, 50.8 if spread evenly" in said[-1]
    config = shape_config("tiny-experts")
    # Of 64 experts of 48 x 128, three matrices each, in two layers, and float32.
    more = many["expected_experts"] - one["expected_experts"]
    assert many["weight_bytes"] - one["weight_bytes"] == pytest.approx(
        more * 3 * 48 * config.hidden_size * 2 * 4, abs=4
    )


def test_every_batch_has_its_figures():
    entries = run_generate(GenerateBench(**SMALL))["results"]
    config = shape_config("tiny-random")
    assert [entry["batch"] for entry in entries] == [1, 3]
    for entry in entries:
        assert entry.keys() == ENTRY_KEYS
        assert len(entry["samples"]) == 2
        rates = [run["num_tokens"] / run["wall_s"] for run in entry["samples"]]
        assert entry["tokens_per_s"] == pytest.approx(sum(rates) / 2)
        for run in entry["samples"]:
            assert run["num_tokens"] == entry["batch"] * 5
            assert run["num_steps"] == 5
            assert run["decode_step_p20_ms"] <= run["decode_step_ms"] <= run["decode_step_p80_ms"]
            assert run["prefill_ms"] + run["decode_step_ms"] < run["wall_s"] * 1e3
        assert entry["weight_bytes"] == step_weight_bytes(config, torch.float32)
        spec = CacheSpec(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            block_size=16,
            head_dim=config.head_dim,
            page_format=PageFormat.plain(torch.float32),
        )
        assert entry["kv_bytes"] == step_kv_bytes(
            spec, config.layer_windows, batch=entry["batch"], prompt_tokens=8, output_tokens=5
        )
        for name in ("floor_ms", "share_of_floor", "host_ms", "gpu_ms"):
            assert entry[name] is None
        assert entry["num_preemptions"] == entry["num_graph_steps"] == 0


def test_floor_is_the_bytes_over_the_bandwidth(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.engines.generate.copy_bandwidth", lambda _: 1e9)
    result = run_generate(GenerateBench(**SMALL | {"batches": (2,), "repeats": 1}))
    (entry,) = result["results"]
    assert result["copy_bandwidth_bytes_per_s"] == 1e9
    assert entry["floor_ms"] == pytest.approx((entry["weight_bytes"] + entry["kv_bytes"]) / 1e6)
    assert entry["share_of_floor"] == pytest.approx(entry["floor_ms"] / entry["decode_step_ms"])


@pytest.mark.parametrize("fails", [False, True])
def test_the_engine_is_closed_after_success_and_after_failure(
    monkeypatch: pytest.MonkeyPatch, fails: bool
):
    closed = []
    close = ModelRunner.close
    monkeypatch.setattr(ModelRunner, "close", lambda self: (closed.append(self), close(self)))
    if fails:
        monkeypatch.setattr(DecoderModel, "forward", lambda *_: 1 / 0)
        with pytest.raises(StepError, match="division by zero"):
            run_generate(GenerateBench(**SMALL))
    else:
        run_generate(GenerateBench(**SMALL))
    assert len(closed) == 1  # one engine for all batches


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_on_a_gpu_there_is_a_floor_and_the_kernels_run():
    result = run_generate(GenerateBench(**SMALL | {"device": "cuda"}))
    assert result["path"] == "triton"
    assert result["device"]["capability"] is not None
    for entry in result["results"]:
        assert 0 < entry["floor_ms"] < entry["decode_step_ms"]
        assert 0 < entry["host_ms"] <= entry["decode_step_ms"] * 1.5
        assert 0 < entry["gpu_ms"] <= entry["decode_step_ms"] * 1.5
        assert entry["num_graph_steps"] == entry["num_steps"]
        assert entry["samples"][0]["num_tokens"] == entry["batch"] * 5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"deterministic": True, "enable_prefix_caching": True},
        {"deterministic": True, "rank_invariant": True},
        {"overlap": False, "cuda_graphs": False},
    ],
)
def test_engine_options_reach_the_engine_and_the_conditions(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]
):
    configs = []
    init = ModelRunner.__init__
    monkeypatch.setattr(
        ModelRunner,
        "__init__",
        lambda self, config, *, model, **rest: (
            configs.append((config, model)),
            init(self, config, model=model, **rest),
        )[0],
    )
    result = run_generate(GenerateBench(**SMALL | {"batches": (1,), "repeats": 1}, **options))
    usual = {
        "deterministic": False, "rank_invariant": False, "overlap": True, "cuda_graphs": True,
        "enable_prefix_caching": False,
    }  # fmt: skip
    ((config, model),) = configs
    for name, value in (usual | options).items():
        assert getattr(config, name) is result["conditions"][name] is value
    assert model.deterministic is config.deterministic
    assert model.rank_invariant is config.rank_invariant


@pytest.mark.parametrize(
    ("files", "new", "said"),
    [
        (None, ["kernel"], "empty"),
        ([], ["kernel"], "empty"),
        (["kernel"], [], "filled"),
        (["kernel"], ["another"], "partly filled"),  # by another engine
    ],
)
def test_a_start_reports_what_the_triton_cache_had(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: list[str] | None,
    new: list[str],
    said: str,
):
    folder = tmp_path / "cache"
    if files is not None:
        folder.mkdir()
    for name in files or []:
        (folder / name).mkdir()
    knobs = SimpleNamespace(cache=SimpleNamespace(dir=folder))
    monkeypatch.setattr("mrv1.kernels._base.triton.triton", SimpleNamespace(knobs=knobs))
    device = torch.device("cuda", 0)
    before = engine.num_cached(device)
    for name in new:
        (folder / name).mkdir(parents=True)
    assert engine.triton_cache(before, engine.num_cached(device)) == said
    cpu = torch.device("cpu")
    assert engine.num_cached(cpu) is engine.triton_cache(None, None) is None


def test_a_start_is_timed(monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count(10, 7)
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    core, start = engine.start_engine(
        GenerateBench(**SMALL), torch.device("cpu"), max_model_len=32
    )
    core.runner.close()
    assert start.seconds == 7


# --- one run -------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["overlap", "one by one"])
def core(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    """An engine of the tiny shape with a budget of four tokens a step."""
    config = shape_config("tiny-random")
    weights = random_weights(config, device="cpu", dtype=torch.float32, seed=0)
    core = EngineCore(
        EngineConfig(
            model="tiny-random",
            device="cpu",
            max_model_len=32,
            max_num_seqs=4,
            max_num_batched_tokens=4,
            overlap=request.param,
        ),
        model=DecoderModel(config, weights, reference),
    )
    yield core
    core.runner.close()


PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.mark.parametrize(
    ("prompts", "num_steps", "num_prefill_steps"),
    [
        ([[1, 2, 3, 4]], 5, 1),
        ([[1, 2], [3, 4]], 5, 1),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], 7, 3),  # second prompt: 3 tokens beside a decode, then 1
    ],
)
def test_times_of_a_run_follow_the_clock_and_the_counters(
    core: EngineCore,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    num_steps: int,
    num_prefill_steps: int,
):
    """The clock moves one second per step; host and GPU seconds grow as steps squared."""
    clock = itertools.count()
    monkeypatch.setattr(sample, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    metrics = core.metrics

    def counted() -> dict[str, object]:
        steps = metrics()["num_steps"]
        return metrics() | {
            "host_seconds": steps**2,
            "gpu_seconds": 10 * steps**2,
            "num_graph_steps": 100 + steps,
            "num_preemptions": 7,
        }

    monkeypatch.setattr(core, "metrics", counted)
    run = run_once(core, prompts, PARAMS)
    assert run.num_tokens == 5 * len(prompts)
    assert run.num_steps == run.num_graph_steps == num_steps
    assert run.wall_s == num_steps
    assert run.tokens_per_s == pytest.approx(run.num_tokens / num_steps)
    assert run.prefill_ms == 1000 * num_prefill_steps
    assert run.decode_step_ms == run.decode_step_p20_ms == run.decode_step_p80_ms == 1000
    # (n^2 - p^2) / (n - p) = n + p seconds a decode step
    assert run.host_ms == pytest.approx(1e3 * (num_steps + num_prefill_steps))
    assert run.gpu_ms == pytest.approx(1e4 * (num_steps + num_prefill_steps))
    assert run.num_preemptions == 0


def test_a_failed_step_ends_the_run(core: EngineCore, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise RuntimeError("the device fell over")

    monkeypatch.setattr(core.runner.model, "forward", broken)
    with pytest.raises(StepError, match="the device fell over"):
        run_once(core, [[1, 2]], PARAMS)


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": None}, "shape, model: expected one of the two, got None and None"),
        ({"model": "x"}, "shape, model: expected one of the two, got 'tiny-random' and 'x'"),
        ({"batches": ()}, r"batch: expected different sizes >= 1, got \[\]"),
        ({"batches": (2, 0)}, r"batch: expected different sizes >= 1, got \[2, 0\]"),
        ({"batches": (2, 2)}, r"batch: expected different sizes >= 1, got \[2, 2\]"),
        ({"prompt_tokens": 0}, "prompt_tokens: expected >= 1, got 0"),
        ({"output_tokens": 1}, "output_tokens: expected >= 2, got 1"),
        ({"repeats": 0}, "repeats: expected >= 1, got 0"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        GenerateBench(**SMALL | options)


def test_engine_options_are_checked_by_the_engine():
    with pytest.raises(ConfigError, match="block_size: expected one of"):
        run_generate(GenerateBench(**SMALL | {"block_size": 20}))
    with pytest.raises(ConfigError, match="max_model_len: expected <= 512"):
        run_generate(GenerateBench(**SMALL | {"prompt_tokens": 600}))
