"""Kernels that are compiled before a start are those that the start launches."""

from __future__ import annotations

import importlib
import json
import pickle
import pkgutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mrv1 import EngineConfig
from mrv1.device import INTERPRET
from mrv1.errors import ConfigError
from mrv1.kernels._base.recording import order_of
from mrv1.runner import compile_ahead
from mrv1.runner.compile_ahead import (
    CompilationError,
    KernelSet,
    compile_kernels,
    compiled_beside,
    is_compiled,
)
from mrv1.runner.stand_in_device import stand_in_device
from tests.forks import Forks
from tests.models.draft_heads import write_eagle3, write_target
from tests.models.families import tiny_config

pytestmark = pytest.mark.skipif(INTERPRET, reason="not run: TRITON_INTERPRET=1 is set")

OPTIONS = {
    "model": "tiny",
    "dtype": "bfloat16",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
}


def kernel_set(**options: object) -> KernelSet:
    return KernelSet.of(EngineConfig(**OPTIONS | options), "sm_90")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache, empty, of this process and of its children."""
    from mrv1.kernels._base.triton import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    return tmp_path


RECORD = """
import pickle, sys
from pathlib import Path
from mrv1.runner.compile_child import record, recording
sets = pickle.loads(Path(sys.argv[1]).read_bytes())
recorder = record(sets[0])
keys = [(kernel.name, kernel.source.hash(), kernel.options) for kernel in recorder.kernels]
for kernels in sets[1:]:
    with recording(kernels):  # into the same recorder: a kernel keeps its first
        pass
print(len(keys), len(set(map(repr, keys))), len(recorder.kernels))
"""


def test_kernels_depend_on_neither_the_number_of_blocks_nor_that_of_equal_layers(
    forks: Forks, tmp_path: Path
):
    kernels = kernel_set(head_policy="ratio=0.5,window=16,sink=4,full_layers_every=2")
    few = kernels.with_few_layers()
    assert few.model_config.num_layers == len(few.head_policy.heads) == 2
    assert kernels.model_config.num_layers > 2
    large = replace(kernels, gpu=replace(kernels.gpu, total_memory_bytes=1 << 41))
    assert large.digest == kernels.digest
    pickled = tmp_path / "sets"
    pickled.write_bytes(pickle.dumps([few, large]))
    run = forks.run(RECORD, str(pickled), CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr
    num_kernels, num_keys, num_all = map(int, run.stdout.split())
    assert num_kernels == num_keys == num_all > 20


def test_layers_that_are_stored_in_different_ways_are_kinds_of_their_own(
    forks: Forks, tmp_path: Path
):
    """Their kernels are recorded without memory, as those of a model quantized while it loads."""
    group = {
        "format": "pack-quantized", "targets": [r"re:.*layers\.2\."],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    }  # fmt: skip
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    config = tiny_config("llama", num_hidden_layers=4, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
    kernels = kernel_set(model=str(tmp_path), load_format="dummy")
    few = kernels.with_few_layers().model_config
    formats = [few.quantization.module(f"model.layers.{i}.mlp.up_proj") for i in range(2)]
    assert few.num_layers == 2
    assert [form and form.code for form in formats] == ["int4", None]
    online = kernel_set(quantization="fp8")
    assert online.digest != kernel_set().digest
    for each in (kernels, online):
        pickled = tmp_path / "sets"
        pickled.write_bytes(pickle.dumps([each]))
        run = forks.run(RECORD, str(pickled), CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
        assert run.returncode == 0, run.stderr
        num_kernels, num_keys, _ = map(int, run.stdout.split())
        assert num_kernels == num_keys > 20


def test_kernels_of_an_eagle3_head_are_compiled(forks: Forks, tmp_path: Path):
    """Whichever layers of the model it reads."""
    target = write_target(tmp_path, "llama", num_hidden_layers=4)
    write_eagle3(tmp_path / "head", target, eagle_aux_hidden_state_layer_ids=[0, 2, 4])
    head = {"method": "eagle3", "model": str(tmp_path / "head"), "num_tokens": 2}
    sizes = {"model": str(tmp_path), "max_num_seqs": 1, "max_num_batched_tokens": 16}
    pickled = tmp_path / "set"
    kernels = kernel_set(**sizes, speculative=head)
    pickled.write_bytes(pickle.dumps([kernels.with_few_layers()]))
    run = forks.run(RECORD, str(pickled), CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr
    num_kernels, num_keys, _ = map(int, run.stdout.split())
    assert num_kernels == num_keys > 20


def test_layers_with_a_window_of_their_own_are_compiled(forks: Forks, tmp_path: Path):
    """And gates with gelu, scores with a cap, and norms with weights in float32."""
    settings = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
    config = tiny_config("gemma2", num_hidden_layers=4, **settings)
    config.architectures = ["Gemma2ForCausalLM"]
    config.save_pretrained(tmp_path)
    kernels = kernel_set(model=str(tmp_path))
    assert kernels.with_few_layers().model_config.layer_windows == (24, -1)
    pickled = tmp_path / "set"
    pickled.write_bytes(pickle.dumps([kernels]))
    run = forks.run(RECORD, str(pickled), CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr
    num_kernels, num_keys, _ = map(int, run.stdout.split())
    assert num_kernels == num_keys > 20


def of_rank(kernels: KernelSet, rank: int, size: int) -> KernelSet:
    config = replace(kernels.config, tensor_parallel_size=size)
    return replace(kernels, config=config, rank=rank, has_peers=True)


def test_a_rank_compiles_the_kernels_of_its_part(forks: Forks, tmp_path: Path):
    """A norm adds the sum over ranks, and the rank of streaming heads attends to no others."""
    whole = kernel_set(head_policy="ratio=0.5,window=16,sink=4")
    ranks = [of_rank(whole, rank, 2) for rank in (0, 1)]
    assert len({whole.digest, *(each.digest for each in ranks)}) == 3
    pickled = tmp_path / "sets"
    pickled.write_bytes(pickle.dumps([ranks[0].with_few_layers(), ranks[1]]))
    run = forks.run(RECORD, str(pickled), CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr
    num_kernels, _, num_all = map(int, run.stdout.split())
    assert 20 < num_kernels < num_all


RECORD_STEPS = """
import pickle, sys
from pathlib import Path
import torch
from mrv1.runner.compile_child import recording
from mrv1.runner.profile import empty_batch
kernels = pickle.loads(Path(sys.argv[1]).read_bytes())
with recording(kernels) as (recorder, runner), torch.inference_mode():
    for num_tokens in range(1, kernels.config.max_num_batched_tokens + 1):
        before = len(recorder.kernels)
        batch = empty_batch(runner._step, [num_tokens])
        runner._step.model.forward(batch, runner._step.kv_cache.layers)
        new = {kernel.name for kernel in recorder.kernels[before:]}
        print(num_tokens, *sorted(new & {"_few_pairs_kernel", "_sorted_pairs_kernel"}))
"""


def test_a_start_meets_every_kernel_of_experts(forks: Forks, tmp_path: Path):
    """Steps of 5 tokens, say, have a kernel that no other steps of the warm-up have."""
    tiny_config(
        "qwen3_moe", num_experts=16, num_experts_per_tok=4, architectures=["Qwen3MoeForCausalLM"]
    ).save_pretrained(tmp_path)
    options = {"cuda_graphs": False, "max_num_batched_tokens": 300, "max_model_len": 400}
    pickled = tmp_path / "set"
    pickled.write_bytes(pickle.dumps(kernel_set(model=str(tmp_path), **options)))
    run = forks.run(RECORD_STEPS, str(pickled), CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(num_tokens) for num_tokens in range(1, 301)]


def test_a_key_does_not_depend_on_the_kernels_before_it():
    """Triton before 3.9 gives a kernel another key if a function it calls has no key yet."""
    from mrv1.kernels._base.triton import triton
    from mrv1.kernels.sampling import draw, groups, philox, sample_tokens, search

    functions = {
        function
        for module in (draw, groups, philox, sample_tokens, search)
        for function in vars(module).values()
        if isinstance(function, triton.runtime.jit.JITCallable)
    }
    in_order = sorted(functions, key=lambda function: function._fn_name)
    assert len(in_order) > 10

    def keys(order: list[Any]) -> dict[str, str]:
        for function in order:
            function.hash, function.used_global_vals = None, {}
        return {function._fn_name: function.cache_key for function in order}

    callers_first = [draw.draw_kernel, *in_order]
    assert keys(callers_first) == keys(in_order) == keys(in_order[::-1])


def test_a_key_does_not_depend_on_addresses():
    """Triton hashes a kernel's constants in the order of their names, and constants of one name in
    the order of their modules' addresses: with two values the key varies between processes.
    """
    from mrv1 import kernels
    from mrv1.kernels._base.triton import tl, triton

    found = pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")
    modules = [importlib.import_module(module.name) for module in found]
    functions = {
        function._fn_name: function
        for module in modules
        for function in vars(module).values()
        if isinstance(function, triton.runtime.jit.JITFunction)
    }
    assert len(functions) > 100
    for name, function in functions.items():
        function.cache_key  # noqa: B018 - it finds the function's constants
        values = {}
        for (constant, _), (value, _) in function.used_global_vals.items():
            if isinstance(value, tl.constexpr):
                assert values.setdefault(constant, value.value) == value.value, (name, constant)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.int64])
def test_a_stand_in_for_memory_is_aligned_like_memory(dtype: torch.dtype):
    """Triton specializes a kernel by the dtype of a tensor and by the alignment of its address."""
    gpu, real = torch.device("cuda", 0), torch.zeros(8, 24, dtype=dtype)
    with stand_in_device(gpu):
        stand_in = torch.zeros(8, 24, dtype=dtype, device=gpu)
        on_host = torch.zeros(8, pin_memory=True)
        assert (stand_in.device, stand_in.dtype, on_host.device.type) == (gpu, dtype, "cpu")
        assert torch.zeros(8, dtype=dtype).to(gpu).device == gpu
        assert on_host.is_pinned()
        for row in range(8):
            for column in range(24):
                address = stand_in[row:, column:].data_ptr()
                assert address % 16 == real[row:, column:].data_ptr() % 16


def test_a_set_that_is_compiled_is_not_compiled_again(cache: Path, monkeypatch):
    kernels = kernel_set()
    assert not is_compiled(kernels)
    compile_ahead._cache(kernels.digest).put("[]", compile_ahead.STAMP, binary=False)
    assert is_compiled(kernels)
    monkeypatch.setattr(compile_ahead, "AheadCompiler", lambda *_: pytest.fail("compiled"))
    with compiled_beside(kernels, progress=False):
        pass


@pytest.mark.parametrize(
    ("options", "is_same"),
    [
        ({"seed": 3, "num_kv_blocks": 7, "enable_prefix_caching": False}, True),
        ({"compile_processes": 3, "gpu_memory_utilization": 0.5}, True),
        ({"block_size": 32}, False),
        ({"kv_cache_dtype": "fp8_e4m3"}, False),
        ({"head_policy": "ratio=0.5,window=16"}, False),
        ({"dtype": "float16"}, False),
    ],
)
def test_a_set_is_named_by_all_that_decides_on_kernels(options: dict[str, Any], is_same: bool):
    assert (kernel_set(**options).digest == kernel_set().digest) == is_same
    assert KernelSet.of(EngineConfig(**OPTIONS), "sm_80").digest != kernel_set().digest


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_failure_is_a_warning_at_a_start_and_an_error_of_the_command(
    cache: Path, tmp_path: Path, monkeypatch, caplog
):
    failing = script(tmp_path / "python", "echo no room >&2; exit 3")
    monkeypatch.setattr(compile_ahead.sys, "executable", failing)
    ran = False
    with compiled_beside(kernel_set(compile_processes=1), progress=False):
        ran = True
    assert ran
    assert "expected to compile ahead, got no room; each kernel" in caplog.text
    with pytest.raises(CompilationError, match="got no room"):
        compile_kernels(kernel_set(), lambda done, total: None)


def test_an_error_beside_ends_every_process(cache: Path, tmp_path: Path, monkeypatch):
    """The error of the body is raised, and neither the child nor its own children live on."""
    written = tmp_path / "pid"
    waiting = script(tmp_path / "python", f"sleep 60 & echo $! > {written}.new; "
                     f"mv {written}.new {written}; wait")  # fmt: skip
    monkeypatch.setattr(compile_ahead.sys, "executable", waiting)

    def load() -> None:
        with compiled_beside(kernel_set(compile_processes=1), progress=False):
            while not written.exists():
                time.sleep(0.01)
            raise RuntimeError("weights")

    with pytest.raises(RuntimeError, match="weights"):
        load()
    state = Path(f"/proc/{int(written.read_text())}/stat")
    deadline = time.monotonic() + 30  # a killed process may have to wait for a processor to end
    while state.exists() and ") Z " not in state.read_text():
        assert time.monotonic() < deadline, state.read_text()
        time.sleep(0.01)


def test_compile_processes_0_compiles_nothing_ahead(cache: Path, monkeypatch):
    monkeypatch.setattr(compile_ahead, "AheadCompiler", lambda *_: pytest.fail("compiled"))
    with compiled_beside(kernel_set(compile_processes=0), progress=False):
        pass


def test_the_environment_sets_the_number_of_processes(monkeypatch):
    name = "MRV1_COMPILE_PROCESSES"
    monkeypatch.delenv(name, raising=False)
    assert EngineConfig(model="tiny").compile_processes is None
    for value, expected in (("0", 0), ("00", 0), ("012", 12)):
        monkeypatch.setenv(name, value)
        assert EngineConfig(model="tiny").compile_processes == expected
    for value in ("", "-1", "two", "1.5"):
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"{name}: expected an integer >= 0, got '{value}'"):
            EngineConfig(model="tiny")
    monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="compile_processes: expected an integer >= 0"):
        EngineConfig(model="tiny", compile_processes=-1)


@pytest.mark.parametrize("target", ["sm_70", "h200", ""])
def test_an_unknown_target_is_refused(target: str):
    expected = f"target: expected one of sm_80, .*, sm_120, got {target!r}"
    with pytest.raises(ConfigError, match=expected):
        KernelSet.of(EngineConfig(model="tiny"), target)


MODULES = """
import ctypes, sys
from pathlib import Path
import torch
from mrv1.device import DeviceInfo, stand_in
from mrv1.kernels import rms_norm
from mrv1.kernels._base import launchers
from mrv1.kernels._base.recording import KernelRecorder
from mrv1.kernels._base.triton import triton
from mrv1.runner.stand_in_device import stand_in_device

def refuse(name, *arguments, **options):
    sys.exit(f"{name} is built")

gpu = torch.device("cuda", 0)
stand_in(DeviceInfo(
    device=gpu, name="sm_90", capability=(9, 0), num_sms=132, total_memory_bytes=1 << 30
))
recorder = KernelRecorder((9, 0))
with stand_in_device(gpu):
    rms_norm(torch.zeros(8, 64, device=gpu), torch.zeros(64, device=gpu), 1e-6)
(kernel,) = recorder.kernels
stub = Path(sys.argv[1])
if sys.argv[2:]:
    launchers.build_stub(stub)
    triton.knobs.nvidia.libcuda_path = str(stub)
    assert not launchers.driver_module_left_out()
assert list(recorder.compile(1)) == [""]
if not sys.argv[2:]:
    launchers.build_stub(stub)
is_left_out = bool(launchers.driver_module_left_out())
# From here on as at a first launch, with a library of the driver whose functions do nothing.
ctypes.CDLL(str(stub / launchers.LIBCUDA), ctypes.RTLD_GLOBAL)
driver = triton.backends.nvidia.driver
driver.library_dirs = lambda: [driver.libdevice_dir, str(stub)]
triton.runtime.build._build = refuse
compiled = recorder._compile(kernel.source, target=recorder._target, options=kernel.options)
if hasattr(driver, "make_launcher"):  # Triton 3.6
    assert callable(driver.CudaLauncher(compiled.src, compiled.metadata).launch)
if not is_left_out:
    assert callable(driver.CudaUtils().load_binary)
"""


@pytest.mark.parametrize("libcuda", [[], ["found"]], ids=["without libcuda", "with libcuda"])
def test_a_first_launch_finds_the_modules_that_launch_kernels(
    forks: Forks, tmp_path: Path, libcuda: list[str]
):
    """By the classes with which Triton looks for them, in a process that must build none."""
    run = forks.run(
        MODULES, str(tmp_path), *libcuda, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


START = """
import sys
from mrv1 import LLM, SamplingParams
from mrv1.kernels._base.triton import triton
missed = []
def listen(*, src, cache_hit, **_):
    if not cache_hit:
        missed.append(src.name)
triton.knobs.compilation.listener = listen
def build(name, *arguments, build=triton.runtime.build._build, **options):
    missed.append(name)  # a C module that launches kernels
    return build(name, *arguments, **options)
triton.runtime.build._build = build
with LLM("tiny", dtype="bfloat16", max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64,
         num_kv_blocks=64, compile_processes=0) as llm:
    llm.generate([[5, 6, 7], [8] * 40], SamplingParams(max_tokens=9))
print(missed)
"""


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_a_start_finds_every_kernel_that_was_compiled_without_a_gpu(cache: Path):
    kernels = KernelSet.of(EngineConfig(**OPTIONS), None)
    assert compile_kernels(kernels, lambda done, total: None) > 20
    child = subprocess.run([sys.executable, "-c", START], capture_output=True, check=True)
    assert child.stdout.splitlines()[-1] == b"[]"


def test_ranks_that_compile_the_same_kernels_begin_with_different_ones():
    orders = [order_of(7, rank, 3) for rank in range(3)]
    assert orders[1] == [1, 4, 2, 5, 0, 3, 6]
    assert [sorted(order) for order in orders] == 3 * [[*range(7)]]
    assert order_of(3, 0, 1) == [0, 1, 2]
