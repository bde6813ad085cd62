"""The worker keeps vLLM's contract: its methods, its refusals, its memory and weights."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM's Python files: make full-vllm", allow_module_level=True)

import numpy as np
import torch
import vllm
from safetensors.torch import load_file, save_file
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase

from mrv1 import ConfigError, StepError
from mrv1.config import checkpoint_dir
from mrv1.integrations.vllm import RequestCheck, Worker
from mrv1.integrations.vllm.options import engine_config, share_of_all
from mrv1.integrations.vllm.outputs import StepResult
from mrv1.integrations.vllm.sampling import OF_VLLM, TRANSLATED
from mrv1.integrations.vllm.versions import interface, resolve
from mrv1.models.quantization.online import quantize_rows
from tests.integrations.vllm.serving import Engine, VllmParams, new_config, new_llm, own_tokens

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def engine():
    engine = Engine(new_config())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def llm():
    with new_llm() as llm:
        yield llm


# --- the interface ------------------------------------------------------------------------------


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_every_method_that_vllms_base_class_leaves_open_is_there():
    left_open = {
        name: method
        for name, method in inspect.getmembers(WorkerBase, inspect.isfunction)
        if "raise NotImplementedError" in inspect.getsource(method)
    }
    assert {"execute_model", "sample_tokens", "get_kv_cache_spec", "load_model"} <= set(left_open)
    for name, method in left_open.items():
        own = getattr(Worker, name)
        assert own is not method, name
        assert parameters(own) in (parameters(method), ["_", "__"]), name


def test_every_control_call_of_vllms_gpu_worker_is_answered_or_refused():
    source = Path(vllm.__file__).parent / "v1/worker/gpu_worker.py"
    classes = [
        node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)
    ]
    (worker,) = [node for node in classes if node.name == "Worker"]
    internal = {"annotate_profile", "randomize_dummy_inputs", "sleep_mode_backend"}
    for node in worker.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            if node.name in internal:
                continue
            own = getattr(Worker, node.name)
            given = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)} - {"self"}
            assert (
                node.args.vararg or given <= {*parameters(own)} or parameters(own) == ["_", "__"]
            )


def test_calls_that_the_worker_does_not_support_say_so(engine):
    for call in ("get_draft_model", "update_weights", "save_sharded_state"):
        with pytest.raises(ConfigError, match=call):
            engine.engine.collective_rpc(call)


def test_results_and_the_request_check_are_vllms_classes():
    assert issubclass(StepResult, AsyncModelRunnerOutput)
    assert not StepResult.__abstractmethods__
    for base in interface().logits_processors:
        assert issubclass(RequestCheck, resolve(base))
    assert hasattr(AsyncModelRunnerOutput, "get_kv_connector_output") == (
        interface().salvages_kv_output
    )
    assert hasattr(WorkerBase, "get_supported_kv_cache_layouts") == interface().resolves_kv_layout


def test_every_sampling_parameter_is_known_or_refused():
    fields = set(VllmParams.__struct_fields__)
    assert fields >= TRANSLATED
    refused = fields - TRANSLATED - OF_VLLM
    assert "thinking_token_budget" in refused
    for name in refused:
        params = VllmParams()
        setattr(params, name, 7)
        with pytest.raises(ValueError, match=name):
            RequestCheck.validate_params(params)
    RequestCheck.validate_params(VllmParams(n=2, stop=["x"], stop_token_ids=[1]))


# --- refusals at start --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "option", "value"),
    [
        ("", "speculative_config", object()),
        ("", "ec_transfer_config", object()),
        ("", "weight_transfer_config", object()),
        ("parallel_config", "pipeline_parallel_size", 2),
        ("parallel_config", "data_parallel_size", 2),
        ("parallel_config", "decode_context_parallel_size", 2),
        ("parallel_config", "enable_dbo", True),
        ("model_config", "runner_type", "pooling"),
        ("model_config", "quantization", "bitsandbytes"),
        ("model_config", "enable_prompt_embeds", True),
        ("model_config", "hf_overrides", {"rope_theta": 1.0}),
        ("model_config", "logprobs_mode", "raw_logits"),
        ("model_config", "logits_processors", None),
        ("model_config", "logits_processors", ["other:Processor"]),
        ("cache_config", "cache_dtype", "fp8_e5m2"),
        ("cache_config", "block_size", 48),
        ("cache_config", "kv_sharing_fast_prefill", True),
        ("load_config", "load_format", "pt"),
    ],
)
def test_an_option_that_mrv1_cannot_serve_is_refused_by_name(engine, part, option, value):
    config = copy.copy(engine.engine.vllm_config)
    target = config
    if part:
        target = copy.copy(getattr(config, part))
        object.__setattr__(config, part, target)
    object.__setattr__(target, option, value)
    shown = {"runner_type": "runner", "cache_dtype": "kv_cache_dtype"}.get(option, option)
    with pytest.raises(ConfigError, match=f"{shown}: expected"):
        engine_config(config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ("fp8", "fp8"),
        ("gptq_marlin", "gptq"),
        ("compressed-tensors", "compressed-tensors"),
    ],
)
def test_the_quantization_of_vllm_is_mrv1s(engine, given, expected):
    """Of a quantized checkpoint vLLM names the kernel that it has for it."""
    config = copy.copy(engine.engine.vllm_config)
    model = copy.copy(config.model_config)
    object.__setattr__(config, "model_config", model)
    object.__setattr__(model, "quantization", given)
    assert engine_config(config, torch.device("cpu")).quantization == expected


def test_a_quantized_checkpoint_gives_mrv1s_own_tokens(tmp_path):
    """vLLM reads the method from ``config.json``, mrv1's worker the codes."""
    shutil.copytree(checkpoint_dir("tiny"), tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        stored[name], scales = quantize_rows(stored[name])
        stored[f"{name}_scale"] = scales
    save_file(stored, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    raw["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    engine = Engine(new_config(model=str(tmp_path)))
    try:
        assert engine.worker._runner.model.weights.layers[0].o.matrix.code == "e4m3"
        engine.add("a", [5, 9, 23, 41], max_tokens=16)
        engine.finish()
        with new_llm(str(tmp_path)) as own:
            assert engine.tokens("a") == own_tokens(own, [5, 9, 23, 41], max_tokens=16)
    finally:
        engine.close()


def test_options_of_vllm_reach_the_runner(engine, monkeypatch):
    config = engine.worker._engine_config
    assert (config.block_size, config.max_num_seqs, config.max_num_batched_tokens) == (16, 4, 48)
    assert config.cuda_graphs is False
    assert engine.worker._runner.kv_cache.num_blocks == (64,)
    assert config.deterministic is False
    # vLLM has read its environment by now.
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    vllm_config = engine.engine.vllm_config
    own = engine_config(vllm_config, torch.device("cpu"))
    assert (own.deterministic, own.rank_invariant) == (True, False)
    monkeypatch.setattr(vllm_config, "additional_config", {"rank_invariant": True})
    assert engine_config(vllm_config, torch.device("cpu")).rank_invariant is True


@pytest.mark.parametrize(
    ("share", "free", "of_all"),
    [(0.3, 100, 0.3), (0.3, 35, 0.95), (0.25, 25, 1.0), (1.0, 100, 1.0)],
)
def test_other_engines_memory_is_not_a_part_of_the_utilization(share, free, of_all):
    """Two engines with 0.3 of a GPU leave a third one 0.4, not -0.3."""
    assert share_of_all(share, free << 30, 100 << 30) == pytest.approx(of_all, abs=1e-6)


def test_a_utilization_of_more_than_is_free_is_refused():
    with pytest.raises(ConfigError, match=r"^gpu_memory_utilization: .* free, 0.296, got 0.3;"):
        share_of_all(0.3, 296 << 20, 1000 << 20)


def test_a_context_that_vllm_shortens_for_the_memory_is_taken(engine):
    worker, before = engine.worker, engine.worker._requests.max_model_len
    with pytest.raises(ConfigError, match=f"max_model_len: expected at most {before}"):
        worker.update_max_model_len(before + 1)
    worker.update_max_model_len(before // 2)
    assert worker._requests.max_model_len == before // 2
    worker.update_max_model_len(before)


def test_more_than_one_group_of_kv_caches_is_refused(engine):
    config = copy.copy(engine.core.scheduler.kv_cache_config)
    config.kv_cache_groups = config.kv_cache_groups * 2
    with pytest.raises(ConfigError, match="kv_cache_groups: expected 1, got 2"):
        engine.worker.initialize_from_config(config)


# --- steps, memory and weights ------------------------------------------------------------------


def test_an_empty_step_launches_nothing(engine):
    output = SchedulerOutput.make_empty()
    assert engine.worker.execute_model(output) is EMPTY_MODEL_RUNNER_OUTPUT
    with pytest.raises(RuntimeError, match="sample_tokens"):
        engine.worker.sample_tokens(None)
    engine.worker.execute_dummy_batch()
    assert engine.worker.take_draft_token_ids() is None


def test_a_row_without_a_token_gets_token_0_and_no_other_row_changes(engine, llm, caplog):
    manager = engine.core.scheduler.structured_output_manager
    make_mask = manager.grammar_bitmask
    manager.grammar_bitmask = lambda *args: np.zeros_like(make_mask(*args))
    prompt = [20, 30, 40]
    engine.add("free", prompt, max_tokens=12)
    engine.add(
        "masked",
        prompt,
        detokenize=True,
        structured_outputs=StructuredOutputsParams(regex="[a-z]+"),
    )
    try:
        engine.finish()
    finally:
        manager.grammar_bitmask = make_mask
    assert engine.tokens("free") == own_tokens(llm, prompt, max_tokens=12)
    assert engine.tokens("masked")[0] == 0
    assert "every token is masked" in caplog.text


def test_sleep_keeps_the_weights_and_health_says_what_sleeps(engine, llm):
    prompt = [7, 8, 9]
    engine.engine.sleep(1)
    assert engine.worker._runner.kv_cache.allocated_bytes == 0
    with pytest.raises(RuntimeError, match="asleep"):
        engine.worker.check_health()
    engine.engine.wake_up(["weights"])
    engine.engine.wake_up(["kv_cache"])
    engine.worker.check_health()
    engine.add("awake", prompt, max_tokens=6)
    engine.finish()
    assert engine.tokens("awake") == own_tokens(llm, prompt, max_tokens=6)


def test_weights_are_reloaded_from_tensors_and_from_a_checkpoint(engine, llm, tmp_path):
    prompt, call = [7, 8, 9, 10], engine.engine.collective_rpc
    weights = load_file(checkpoint_dir("tiny") / "model.safetensors")
    name = "model.embed_tokens.weight"
    call("reload_weights", kwargs={"weights_iterator": [(name, weights[name].flip(0))]})
    engine.core.reset_prefix_cache()
    engine.add("flipped", prompt, max_tokens=6)
    engine.finish()
    expected = own_tokens(llm, prompt, max_tokens=6)
    assert engine.tokens("flipped") != expected
    call("reload_weights")
    engine.core.reset_prefix_cache()
    engine.add("own", prompt, max_tokens=6)
    engine.finish()
    assert engine.tokens("own") == expected
    for file in checkpoint_dir("tiny").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(weights | {name: weights[name][:-1]}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=name):
        call("reload_weights", kwargs={"weights_path": str(tmp_path)})


def test_random_weights_need_no_file_of_weights(llm, tmp_path):
    for file in checkpoint_dir("tiny").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    config = new_config(model=str(tmp_path))
    config.load_config.load_format = "dummy"
    found = []
    for _ in range(2):
        engine = Engine(config)
        engine.add("r", [7, 8, 9], max_tokens=8)
        engine.finish()
        found.append(engine.tokens("r"))
        embedding = engine.worker._runner.model.weights.embed
        engine.close()
    assert found[0] == found[1]  # of one seed
    assert found[0] != own_tokens(llm, [7, 8, 9], max_tokens=8)
    assert float(embedding.std()) == pytest.approx(embedding.shape[1] ** -0.5, rel=0.05)


def test_the_profiler_of_vllms_options_writes_a_trace(engine, tmp_path, monkeypatch):
    if interface().has_profiler_factory:  # it knows no profiler for a machine without a GPU
        activities = resolve("vllm.profiler.wrapper:_DEFAULT_TORCH_PROFILER_ACTIVITIES")
        monkeypatch.setitem(activities, "", ["CPU"])
    with pytest.raises(ConfigError, match="profiler-config"):
        engine.engine.collective_rpc("profile")
    config = engine.engine.vllm_config.profiler_config
    given = config.profiler, config.torch_profiler_dir
    config.profiler, config.torch_profiler_dir = "torch", str(tmp_path)
    try:
        engine.engine.collective_rpc("profile", args=(True, "trace"))
        engine.add("profiled", [1, 2, 3], max_tokens=3)
        engine.finish()
        engine.engine.collective_rpc("profile", args=(False,))
    finally:
        config.profiler, config.torch_profiler_dir = given
    assert [*tmp_path.iterdir()]


def test_a_result_is_read_in_another_thread_and_sent_to_another_process(engine, llm):
    """As vLLM's multiprocess executor does."""
    core, worker, prompt = engine.core, engine.worker, [3, 4, 5]
    engine.add("sent", prompt, max_tokens=4, logprobs=1)
    output = core.scheduler.schedule()
    assert worker.execute_model(output) is None
    worker._is_async = True
    try:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(worker.sample_tokens(None).get_output).result()
    finally:
        worker._is_async = False
    core.scheduler.update_from_output(output, pickle.loads(pickle.dumps(found)))
    engine.finish()
    assert [*found.sampled_token_ids[0], *engine.tokens("sent")] == own_tokens(
        llm, prompt, max_tokens=4
    )


def test_steps_of_decodes_alone_continue_each_other(engine, monkeypatch):
    continued, plan = [], engine.worker._requests.plan

    def noted(output):
        step = plan(output)
        continued.append(step is not None and step.plan.continues is not None)
        return step

    monkeypatch.setattr(engine.worker._requests, "plan", noted)
    engine.add("a", [3, 4, 5], max_tokens=20)
    engine.add("b", [6, 7], max_tokens=10)
    engine.finish()
    # b's first token comes with a's; a step follows that tells the worker of b's end.
    assert continued[:20] == [False] + [True] * 9 + [False] + [True] * 9


def test_a_step_that_cannot_be_launched_raises_and_the_next_one_claims_nothing(engine):
    worker = engine.worker
    engine.add("next", [1, 2, 3], max_tokens=4)
    engine.step()
    output = engine.core.scheduler.schedule()
    execute = worker._runner.execute

    def fail(plan):
        raise StepError("broken", step_id=plan.step_id)

    worker._runner.execute = fail
    with pytest.raises(StepError, match="broken"):
        worker.execute_model(output)
    worker._runner.execute = execute
    assert worker._requests._last is None
