"""Configuration, devices and errors: the message of each refusal."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

from mrv1 import (
    LLM,
    CapacityError,
    ConfigError,
    EngineConfig,
    RequestError,
    StepError,
    UnsupportedDeviceError,
)
from mrv1.calibration import CalibrateOptions
from mrv1.config import checkpoint_dir, dtype_name, resolve_max_model_len
from mrv1.device import (
    INTERPRET,
    DeviceInfo,
    device_info,
    kernel_path,
    resolve_device,
    resolve_dtype,
)
from mrv1.environment import VARIABLES, module_paths
from mrv1.sampler import LogitsProcessor
from tests.forks import Forks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_the_embedded_model_has_a_name():
    assert (checkpoint_dir("tiny") / "config.json").is_file()
    assert checkpoint_dir("tiny") == checkpoint_dir(str(checkpoint_dir("tiny")))


def test_a_directory_that_may_not_be_read_is_a_config_error(monkeypatch, tmp_path):
    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", denied)  # root may read everything
    with pytest.raises(
        ConfigError, match=r"expected a readable directory, got .*Permission denied"
    ):
        checkpoint_dir(tmp_path)


def test_a_config_is_frozen_and_keyword_only():
    config = EngineConfig(model="tiny")
    with pytest.raises(AttributeError):
        config.block_size = 32  # type: ignore[misc]
    with pytest.raises(TypeError):
        EngineConfig("tiny")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", CPU, torch.float32),
        ("auto", CUDA, torch.bfloat16),
        ("float16", CUDA, torch.float16),
        ("float64", CPU, torch.float64),
    ],
)
def test_auto_dtype_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu(name, device, expected):
    assert resolve_dtype(name, torch.bfloat16, device) is expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.double, torch.float64),
        ("half", torch.float16),
        ("float", torch.float32),
        ("bfloat16", torch.bfloat16),
    ],
)
def test_a_dtype_is_a_name_or_torchs(dtype, expected):
    name = dtype_name(EngineConfig(model="tiny", dtype=dtype).dtype)
    assert resolve_dtype(name, torch.int8, CPU) is expected
    assert CalibrateOptions(model="tiny", dtype=dtype).dtype is dtype


@pytest.mark.parametrize(
    ("dtype", "got"),
    [
        (torch.int8, "torch.int8"),
        ("torch.float16", "'torch.float16'"),
        ("fp16", "'fp16'"),
        (np.float16, "<class 'numpy.float16'>"),
        (np.zeros(2), "array([0., 0.])"),
        (16, "16"),
        (None, "None"),
    ],
)
def test_another_dtype_is_refused(dtype, got):
    expected = (
        "dtype: expected one of ('auto', 'float32', 'float', 'float16', 'half', 'bfloat16', "
        f"'float64'), got {got}"
    )
    for options in (EngineConfig, CalibrateOptions):
        with pytest.raises(ConfigError) as error:
            options(model="tiny", dtype=dtype)
        assert str(error.value) == expected


def test_head_policy_must_be_a_text():
    with pytest.raises(
        ConfigError, match="head_policy: expected a file, a folder or a rule, got 5"
    ):
        EngineConfig(model="tiny", head_policy=5)  # type: ignore[arg-type]


def test_float64_needs_the_cpu():
    with pytest.raises(ConfigError, match="float64 runs on the CPU reference path only"):
        resolve_dtype("float64", torch.bfloat16, CUDA)


def test_max_model_len_defaults_to_the_models_context_and_cannot_exceed_it():
    assert resolve_max_model_len(None, 100) == 100
    assert resolve_max_model_len(40, 100) == 40
    with pytest.raises(ConfigError, match=r"expected <= 100 \(the model's context\), got 101"):
        resolve_max_model_len(101, 100)


@pytest.mark.parametrize("device", ["tpu", "gpu", "cuda:x", "meta"])
def test_an_unknown_device_is_refused_by_name(device):
    with pytest.raises(ConfigError, match=f"device: expected 'auto', .* got '{device}'"):
        resolve_device(device)


def test_a_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedDeviceError, match="torch sees 0 GPUs; use device='cpu'"):
        resolve_device("cuda")
    assert resolve_device("auto") == CPU


@pytest.mark.parametrize(("capability", "fits"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_that_is_too_old_is_refused_before_anything_loads(monkeypatch, capability, fits):
    info = DeviceInfo(
        device=CUDA, name="Old GPU", capability=capability, num_sms=40, total_memory_bytes=1
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("mrv1.device.device_info", lambda device: info)
    if fits:
        assert resolve_device("cuda") == CUDA
        return
    with pytest.raises(
        UnsupportedDeviceError, match=r"Old GPU has compute capability 7.5.*need 8.0"
    ):
        resolve_device("cuda")


def test_a_cpu_runs_the_reference_unless_the_process_interprets():
    assert kernel_path(CPU) == ("interpreter" if INTERPRET else "reference")
    assert kernel_path(CUDA) == "triton"
    assert device_info(CPU).num_sms == 0


def test_errors_subclass_the_builtins_they_resemble():
    assert issubclass(RequestError, ValueError)
    assert issubclass(ConfigError, ValueError)
    error = StepError("boom", step_id=3, req_ids=("a",))
    assert (str(error), error.step_id, error.req_ids) == ("step 3 (1 requests): boom", 3, ("a",))


def test_debug_defaults_to_the_environment_variable(monkeypatch):
    monkeypatch.delenv("MRV1_DEBUG", raising=False)
    assert not EngineConfig(model="tiny").debug
    monkeypatch.setenv("MRV1_DEBUG", "1")
    assert EngineConfig(model="tiny").debug
    assert not EngineConfig(model="tiny", debug=False).debug
    monkeypatch.setenv("MRV1_DEBUG", "perhaps")
    with pytest.raises(ConfigError, match="MRV1_DEBUG: expected 0 or 1, got 'perhaps'"):
        EngineConfig(model="tiny")
    with pytest.raises(ConfigError, match="debug: expected True or False, got 1"):
        EngineConfig(model="tiny", debug=1)


def test_every_variable_is_the_default_of_a_field(monkeypatch):
    """So that no variable is read that ``mrv1 doctor`` does not report."""
    readers = {field.default_factory for field in fields(EngineConfig)}
    assert readers - {MISSING} == set(VARIABLES.values())
    for name, read in VARIABLES.items():
        monkeypatch.setenv(name, "1")
        assert read() in (True, 1, "1")
        (field,) = (field for field in fields(EngineConfig) if field.default_factory == read)
        assert getattr(EngineConfig(model="tiny"), field.name) == read()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2147483648", "at most 2147483647"),
        ("9" * 5000, "at most 2147483647"),  # int() refuses more than 4300 digits
        ("000", "an integer >= 1"),
        ("-1", "an integer >= 1"),
        ("", "an integer >= 1"),
        ("\u0663", "an integer >= 1"),
    ],
)
def test_a_wrong_count_names_its_variable(monkeypatch, value, expected):
    monkeypatch.setenv("MRV1_MAX_STOP_SEQS_NUM", value)
    with pytest.raises(ConfigError, match=f"^MRV1_MAX_STOP_SEQS_NUM: expected {expected}, got"):
        EngineConfig(model="tiny")
    monkeypatch.setenv("MRV1_MAX_STOP_SEQS_NUM", "2147483647")
    assert EngineConfig(model="tiny").max_stop_seqs_num == 2**31 - 1
    monkeypatch.setenv("MRV1_MAX_STOP_SEQS_NUM", "007")
    assert EngineConfig(model="tiny").max_stop_seqs_num == 7


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("dtype", "int8", r"one of \('auto', 'float32', .*, 'float64'\), got 'int8'"),
        ("kv_scale", ["token"], r"one of \('token', 'quarter', 'head'\), got \['token'\]"),
        ("overlap", 1, "True or False, got 1"),
        ("block_size", "16", r"one of \(16, 32, 64, 128\), got '16'"),
        ("block_size", 16.0, r"one of \(16, 32, 64, 128\), got 16.0"),
        ("max_num_seqs", 0, "an integer >= 1 that fits int32, got 0"),
        ("max_num_seqs", True, "an integer >= 1 that fits int32, got True"),
        ("max_num_seqs", None, "an integer >= 1 that fits int32, got None"),
        ("max_num_seqs", 2**31, "an integer >= 1 that fits int32, got 2147483648"),
        ("max_model_len", 1, "an integer >= 2 that fits int32, got 1"),
        ("streaming_cache_blocks", -1, "an integer >= 0 that fits int32, got -1"),
        ("max_draft_tokens", -1, "an integer >= 0 that fits int32, got -1"),
        ("max_draft_tokens", 8, "at most 7, got 8"),
        ("kv_cache_memory_bytes", 0, "an integer >= 1, got 0"),
        ("gpu_memory_utilization", 0, r"\(0, 1\], got 0"),
        ("seed", True, "an integer, got True"),
    ],
)
def test_a_value_must_have_the_type_and_range_of_its_field(option, value, expected):
    with pytest.raises(ConfigError, match=f"^{option}: expected {expected}$"):
        EngineConfig(model="tiny", **{option: value})


class Name(str):
    """A text of another class, as an Enum of texts has."""

    def __str__(self) -> str:
        return "not the text"


class Strange:
    """An object that can neither be compared nor printed."""

    def fail(self, *args: object) -> bool:
        raise OSError("no such thing")

    __eq__ = __repr__ = __bool__ = fail
    __hash__ = object.__hash__


ODD: list[object] = [
    None, True, False, 0, 1, 5, -1, 16, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 10**5000,
    0.5, 1.0, 1.5, -0.5, float("nan"), float("inf"), 1j, "", "auto", "gpu", "cuda:x", "\0",
    "\ud800", Name("auto"), Name("cpu"), np.str_("cpu"), b"auto", Path("auto"), np.int64(16),
    np.float32(0.5), np.float64(0.5), np.bool_(True), np.array([1, 2]), torch.tensor(1), [],
    ["auto"], {}, (), object, Strange(), {"method": Strange()}, {"method": "ngram", 5: 5},
    {"method": "ngram"},
]  # fmt: skip
"""Values of every kind, most of which no option takes."""


def is_valid(name: str, value: object) -> bool:
    """Whether an option may have a value by its type and range, restated for each option."""
    hint = get_type_hints(EngineConfig)[name]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kind = kinds[0].__name__
    if value is None:
        return NoneType in kinds
    if kind == "int":
        if name == "block_size":
            return type(value) is int and value in (16, 32, 64, 128)
        bits = 63 if name in ("seed", "kv_cache_memory_bytes", "mm_cache_memory_bytes") else 31
        least = {"max_model_len": 2, "seed": 1 - 2**63, "max_logprobs": -1}.get(name, 1)
        if name in {
            "streaming_cache_blocks", "mm_cache_memory_bytes", "long_prefill_token_threshold",
            "max_draft_tokens", "compile_processes",
        }:  # fmt: skip
            least = 0
        most = {"max_draft_tokens": 7, "max_lora_rank": 512}.get(name, 2**bits - 1)
        is_zero = name == "max_logprobs" and type(value) is int and value == 0
        return type(value) is int and least <= value <= most and not is_zero
    if kind == "bool":
        return type(value) is bool
    if kind == "float":
        return isinstance(value, int | float) and type(value) is not bool and 0 < value <= 1
    if kind.startswith("Mapping"):
        return value == {"method": "ngram"} if type(value) is dict and len(value) == 1 and (
            type(value.get("method")) is str
        ) else False  # fmt: skip
    if name == "generation_config" and isinstance(value, Path):
        return True
    if not isinstance(value, str):
        return False
    text = str.__str__(value)
    if name == "vision_device":
        return text in ("auto", "cpu")
    if name in ("dtype", "kv_cache_dtype", "load_format"):
        return text == "auto"
    return kind.startswith("str") and (text != "" or name == "head_policy")


@pytest.mark.parametrize("name", [field.name for field in fields(EngineConfig)])
def test_an_odd_value_is_a_config_error_that_names_the_option(name):
    for value in ODD:
        valid = is_valid(name, value)
        if not valid or name == "tensor_parallel_size":
            try:
                EngineConfig(**{"model": "tiny"} | {name: value})
            except ConfigError as error:
                assert not valid
                assert str(error).startswith(f"{name}")  # noqa: PT017
            else:
                assert valid, value
            continue
        needed = {"visit_masked_pages": "per_head_ids", "rank_invariant": "deterministic"}.get(
            name
        )
        others = {} if needed is None else {needed: True}
        taken = getattr(EngineConfig(**{"model": "tiny"} | others | {name: value}), name)
        assert type(taken) is str if isinstance(value, str) else taken is value
        assert not isinstance(value, str) or taken == str.__str__(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "model: expected a checkpoint directory or an id, got None"),
        ({"model": 5}, "model: expected a checkpoint directory or an id, got 5"),
        ({"model": "\0"}, "model: expected a .*, got '.x00'"),
        ({"model": "\ud800"}, "model: expected a .*, got '.ud800'"),
        ({"model": "~nouser12345/m"}, "model: expected a readable directory, got '~nouser12345"),
        ({"device": 5}, "device: expected 'auto', 'cpu', 'cuda' or 'cuda:N', got 5"),
        ({"vision_device": "cuda:99"}, "vision_device: cuda:99 was asked for, but"),
        ({"mm_cache_memory_bytes": 2**62}, "mm_cache_memory_bytes: expected at most"),
        ({"max_logit_bias": 2**31 - 1}, "request state: expected at most .* max_logit_bias"),
        ({"max_num_batched_tokens": 2**31 - 1}, "request state: .* max_num_batched_tokens"),
        (
            {"head_policy": 5},
            "head_policy: expected a HeadPolicy, a file, a folder or a rule, got 5",
        ),
        ({"head_policy": "\0"}, "head_policy: expected a rule"),
        ({"head_policy": "ratio=nan,window=4"}, "head_policy: expected ratio="),
        ({"generation_config": "\0"}, "generation_config: expected"),
        ({"generation_config": "~nouser12345"}, "generation_config: expected a readable dir"),
        ({"override_generation_config": 5}, "override_generation_config: expected a dict or"),
        ({"override_generation_config": {5: 5}}, "override_generation_config: expected some"),
        ({"override_generation_config": {"top_k": Strange()}}, "override_gen.*top_k: expected"),
        ({"use_tqdm_on_load": Strange()}, "use_tqdm_on_load: expected True or False, got Stra"),
        *(
            ({"logits_processors": value}, "logits_processors: expected ")
            for value in (None, 5, True, "abc", {"a": 1}, [None], [LogitsProcessor], Strange())
        ),
        ({"logits_processors": 5, "speculative": {"method": "ngram"}}, "logits_processors: exp"),
    ],
)
def test_an_odd_option_of_llm_is_refused_before_the_model_loads(monkeypatch, options, message):
    def load_model(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model loads")

    monkeypatch.setattr("mrv1.runner.start.load_model", load_model)
    given = {"model": "tiny", "device": "cpu", "num_kv_blocks": 8, "use_tqdm_on_load": False}
    expected = (ConfigError, CapacityError, UnsupportedDeviceError)
    with pytest.raises(expected, match=f"(?s)^{message}"):
        LLM(**given | options)


def test_bytes_need_not_fit_int32_and_counts_may_be_zero_or_none():
    options = {"kv_cache_memory_bytes": 2**40, "streaming_cache_blocks": 0, "max_model_len": None}
    assert EngineConfig(model="tiny", **options).kv_cache_memory_bytes == 2**40


def test_quarter_scales_are_refused_with_determinism_and_switch_prefix_caching_off():
    quarters = {"model": "tiny", "kv_cache_dtype": "fp8_e4m3", "kv_scale": "quarter"}
    assert not EngineConfig(**quarters).caches_prefixes
    for is_on in (False, True):
        other = EngineConfig(model="tiny", enable_prefix_caching=is_on)
        assert other.caches_prefixes is is_on
    with pytest.raises(
        ConfigError,
        match=r"kv_scale, deterministic: expected not both, got 'quarter', .*deterministic=True",
    ):
        EngineConfig(**quarters, deterministic=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"visit_masked_pages": True},
            r"visit_masked_pages: expected tables that keep all blocks \(window_recycling=False "
            r"or per_head_ids=True\), got neither",
        ),
        (
            {"rank_invariant": True},
            "rank_invariant: expected deterministic=True with it, got False",
        ),
        (
            {"deterministic": True, "attention_backend": "flashinfer"},
            "deterministic: expected attention_backend='triton' with it, got 'flashinfer'",
        ),
        (
            {"per_head_ids": True, "attention_backend": "flashinfer"},
            "per_head_ids: expected attention_backend='triton' with it, got 'flashinfer'",
        ),
        (
            {
                "visit_masked_pages": True, "window_recycling": False,
                "attention_backend": "flashinfer",
            },
            "visit_masked_pages: expected attention_backend='triton' with it, got 'flashinfer'",
        ),
    ],
)  # fmt: skip
def test_options_that_no_table_can_have_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        EngineConfig(model="tiny", **options)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("module", ["config", "environment", "errors", "options"])
def test_a_configuration_needs_no_torch(module):
    run = run_python(
        f"import sys, mrv1.{module}; "
        "print(sorted({'torch', 'numpy', 'triton'} & set(sys.modules)))"
    )
    assert run.stdout == "[]\n", run.stderr


@pytest.mark.parametrize("first", ["triton.language", "mrv1"])
def test_the_mode_of_a_process_cannot_change_after_triton_or_mrv1_is_imported(
    forks: Forks, first: str
):
    change = f"import {first}, os; os.environ['TRITON_INTERPRET'] = '1'; "
    run = forks.run(change + "from mrv1.kernels import linear")
    assert run.returncode != 0
    assert "TRITON_INTERPRET changed after triton was imported" in run.stderr


def test_an_invalid_interpreter_mode_is_refused():
    run = run_python("import mrv1", TRITON_INTERPRET="perhaps")
    assert "TRITON_INTERPRET: expected 0 or 1, got 'perhaps'" in run.stderr


def test_two_steps_are_in_flight_unless_overlap_is_off_or_flashinfer_plans():
    """FlashInfer's plans are made on the host, which must know which requests have stopped."""
    assert EngineConfig(model="tiny").steps_in_flight == 2
    assert EngineConfig(model="tiny", overlap=False).steps_in_flight == 1
    assert EngineConfig(model="tiny", attention_backend="flashinfer").steps_in_flight == 1


def test_a_child_looks_for_modules_where_this_process_finds_them(tmp_path, monkeypatch):
    """Python itself passes over what is no text, and over a folder that is gone."""
    monkeypatch.setattr(sys, "path", ["", tmp_path, "/some/folder"])
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert module_paths() == [str(gone), "/some/folder"]
    gone.rmdir()
    assert module_paths() == ["/some/folder"]
