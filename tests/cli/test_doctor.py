"""``mrv1 doctor`` reports this process's facts and warns of everything that is unsupported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from mrv1 import LLM, ConfigError, UnsupportedDeviceError, __version__, device, environment
from mrv1.cli import facts
from mrv1.device import (
    DeviceInfo,
    choose_fp8_path,
    choose_nibble_path,
    kernel_path,
    resolve_device,
)
from mrv1.environment import VARIABLES
from mrv1.kernels.layers import quantized
from tests.cli.conftest import Mrv1

REPO = Path(__file__).resolve().parents[2]


def _gpu(capability: tuple[int, int] = (9, 0)) -> DeviceInfo:
    return DeviceInfo(
        device=torch.device("cuda", 0),
        name="GPU X",
        capability=capability,
        num_sms=132,
        total_memory_bytes=139 * 2**30,
    )


def test_json_reports_the_installed_versions_and_the_device(mrv1: Mrv1):
    result = mrv1("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found.keys() == facts.Facts.__annotations__.keys()
    expected = {name: metadata.version(name) for name in facts.PACKAGES}
    expected |= {"mrv1": __version__, "python": sys.version.split()[0]}
    assert found["versions"] == expected
    resolved = resolve_device("auto")
    assert found["device"] == str(resolved)
    assert found["path"] == facts.PATHS[kernel_path(resolved)]
    parts = facts.used_for(kernel_path(resolved)) | facts.codes_use(resolved)
    parts |= facts.prefill_use(resolved) | facts.quantized_use(resolved)
    assert found["used_for"] == parts
    assert found["embedded_model"]["present"]
    assert found["embedded_model"]["weights_bytes"] > 2**20
    assert len(found["gpus"]) == torch.cuda.device_count()


@pytest.mark.parametrize(
    ("capability", "is_amd", "fp8", "nibbles"),
    [
        (
            (9, 0), False, "hardware: GPU X converts e4m3",
            "hardware: GPU X multiplies subnormal fp16 exactly",
        ),
        (
            (8, 0), False, "integer arithmetic: GPU X has no e4m3 (8.9 and newer have)",
            "hardware: GPU X multiplies subnormal fp16 exactly",
        ),
        (
            (9, 4), True, "integer arithmetic: GPU X: AMD's own e4m3 has another format",
            "integer arithmetic: GPU X may flush subnormal fp16 to 0",
        ),
    ],
)  # fmt: skip
def test_the_conversions_of_codes_are_reported_with_their_reasons(
    monkeypatch: pytest.MonkeyPatch, capability, is_amd, fp8, nibbles
):
    info = _gpu(capability)
    monkeypatch.setattr(facts, "fp8_path", lambda _: choose_fp8_path(info, is_amd=is_amd))
    monkeypatch.setattr(facts, "nibble_path", lambda _: choose_nibble_path(info, is_amd=is_amd))
    said = {"FP8 conversion": fp8, "4-bit KV codes": nibbles}
    assert facts.codes_use(torch.device("cuda", 0)) == said
    with pytest.raises(UnsupportedDeviceError, match=r"7\.5; a 4-bit KV cache needs 8\.0"):
        choose_nibble_path(_gpu((7, 5)))


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ((9, 0), "Gluon (warp groups) and Triton"),
        ((10, 0), "Triton: Gluon's warp groups need compute capability 9.0"),
        ((12, 0), "Triton: Gluon's warp groups need compute capability 9.0"),
    ],
)
def test_the_kernels_of_prefill_are_reported(monkeypatch: pytest.MonkeyPatch, capability, said):
    monkeypatch.setattr(facts, "kernel_path", lambda _: "triton")
    monkeypatch.setattr(facts, "device_info", lambda _: _gpu(capability))
    assert facts.prefill_use(torch.device("cuda", 0)) == {"prefill attention": said}


@pytest.mark.parametrize(("capability", "quantizes"), [((8, 6), False), ((8, 9), True)])
def test_the_products_of_quantized_weights_are_reported(
    monkeypatch: pytest.MonkeyPatch, capability, quantizes
):
    monkeypatch.setattr(quantized, "INTERPRET", False)
    monkeypatch.setattr(quantized, "device_info", lambda _: _gpu(capability))
    said = facts.quantized_use(torch.device("cuda", 0))["quantized weights"]
    assert said.startswith("read as stored for up to 64 tokens, widened for more")
    assert said.endswith("; experts read as stored for any number of tokens")
    assert ("more than 32 tokens are quantized to e4m3 too" in said) == quantizes


def test_the_report_fits_on_one_screen(mrv1: Mrv1, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(facts, "visible_gpus", lambda: (_gpu(), _gpu()))
    monkeypatch.setattr(facts, "driver_version", lambda: "580.95.05")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    result = mrv1("doctor")
    assert result.exit_code == 0
    for shown in (
        f"torch {torch.__version__.partition('+')[0]}",
        "GPU X, compute capability 9.0, 139.0 GiB, 132 SMs",
        "580.95.05",
        "attention",
        "FP8 conversion",
        "quantized weights",
        "TRITON_CACHE_DIR",
        "/somewhere",
        "no warnings",
    ):
        assert shown in result.stdout
    assert len(result.stdout.splitlines()) <= 30


@pytest.mark.parametrize(
    ("torch_version", "triton_version", "expected"),
    [
        ("2.11.0+cu130", "3.6.0", []),
        ("2.13.0", "3.9.9", []),
        ("3.0.0", "3.7.1", []),
        ("2.10.1", "3.7.1", ["torch 2.10.1 is not supported: expected >= 2.11"]),
        ("2.9.0", "3.7.1", ["torch 2.9.0 is not supported: expected >= 2.11"]),
        ("2.13.0", "3.5.1", ["triton 3.5.1 is not supported: expected >= 3.6, < 3.10"]),
        ("2.13.0", "3.10.0", ["triton 3.10.0 is not supported: expected >= 3.6, < 3.10"]),
        ("2.13.0", "4.0.0", ["triton 4.0.0 is not supported: expected >= 3.6, < 3.10"]),
        ("2.13.0", None, ["triton is not installed"]),
    ],
)
def test_unsupported_versions_are_warned_of(torch_version, triton_version, expected):
    versions = {"torch": torch_version, "triton": triton_version}
    assert facts.version_warnings(versions) == expected


def test_old_gpus_are_warned_of():
    old = facts.gpu_warnings((_gpu(), _gpu((7, 5))))
    assert old == [
        "GPU 1, GPU X, has compute capability 7.5: the kernels need 8.0 (Ampere) or newer"
    ]
    assert facts.gpu_warnings((_gpu((8, 0)), _gpu((12, 0)))) == []


def test_a_refused_device_is_a_warning_not_an_error(mrv1: Mrv1, monkeypatch: pytest.MonkeyPatch):
    def refuse(_: object) -> torch.device:
        raise UnsupportedDeviceError("GPU X is too old")

    monkeypatch.setattr(facts, "resolve_device", refuse)
    result = mrv1("doctor")
    assert result.exit_code == 0
    assert "refused: none" in result.stdout
    assert "warning: GPU X is too old" in result.stdout


def test_a_missing_embedded_model_is_a_warning(
    mrv1: Mrv1, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(facts, "checkpoint_dir", lambda _: tmp_path)
    result = mrv1("doctor", "--json")
    found = json.loads(result.stdout)
    assert not found["embedded_model"]["present"]
    assert any("the embedded model is incomplete" in warning for warning in found["warnings"])


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_a_gpu_is_shown_and_used(mrv1: Mrv1):
    found = json.loads(mrv1("doctor", "--json").stdout)
    assert found["gpus"][0]["name"] == torch.cuda.get_device_name(0)
    assert found["gpus"][0]["memory_bytes"] > 2**30
    assert found["used_for"]["attention"] == "Triton, compiled"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("triton", "Triton, compiled"),
        ("interpreter", "Triton, interpreted on the CPU (slow: for tests and learning)"),
        ("reference", "torch reference"),
    ],
)
def test_every_path_names_its_implementation_of_each_part(path, name):
    parts = facts.used_for(path)
    products = parts.pop("matrix products")
    assert products == name + "; torch (cuBLAS) where tokens are many" * (path == "triton")
    assert set(parts.values()) == {name}
    assert {"attention", "sampling"} <= parts.keys()


def test_interpreter_is_recognised_and_python_m_works():
    done = subprocess.run(
        [sys.executable, "-m", "mrv1", "doctor", "--json"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["path"] == "Triton kernels in the CPU interpreter"
    assert found["environment"]["TRITON_INTERPRET"] == "1"


# --- the environment ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIABLES)
def test_every_variable_is_shown_and_a_wrong_value_is_refused_as_by_llm(
    mrv1: Mrv1, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setenv(name, "perhaps")  # no flag, no number, no file
    with pytest.raises(ConfigError) as refused:
        LLM("tiny", device="cpu", num_kv_blocks=8)
    assert "perhaps" in str(refused.value)
    found = json.loads(mrv1("doctor", "--json").stdout)
    assert found["environment"][name] == "perhaps"
    assert found["warnings"] == [str(refused.value)]


@pytest.mark.parametrize("name", VARIABLES)
def test_a_misspelled_variable_is_refused_as_by_llm(
    mrv1: Mrv1, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setenv(name[:-1] + "I", "1")
    with pytest.raises(ConfigError) as refused:
        LLM("tiny", device="cpu", num_kv_blocks=8)
    assert str(refused.value).endswith(f"(did you mean {name}?)")
    result = mrv1("doctor")
    assert result.exit_code == 0
    assert f"warning: {refused.value}" in " ".join(result.stdout.split())
    assert "no warnings" not in result.stdout


def test_every_wrong_variable_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MRV1_DEBUG", "perhaps")
    monkeypatch.setenv("MRV1_STOP_SEQS_MAX_LEN", "0")
    monkeypatch.setenv("MRV1_B", "")
    monkeypatch.setenv("MRV1_A", "")
    names = [warning.partition(":")[0] for warning in facts.variable_warnings()]
    assert names == ["MRV1_A", "MRV1_B", "MRV1_DEBUG", "MRV1_STOP_SEQS_MAX_LEN"]


# --- FlashInfer ----------------------------------------------------------------------------------


def _install_flashinfer(monkeypatch, tmp_path: Path, code: str, version: str | None) -> None:
    """Put a package named flashinfer first on the path."""
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text(code)
    if version is not None:
        info = tmp_path / f"flashinfer_python-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("version", "said"), [("9.8.7", "9.8.7"), (None, "unknown version")])
def test_an_installed_flashinfer_is_reported_with_its_version(
    mrv1: Mrv1, monkeypatch, tmp_path: Path, version, said
):
    if version is None and facts.version_of("flashinfer-python") is not None:
        pytest.skip("not run: flashinfer is installed, with a version")
    _install_flashinfer(monkeypatch, tmp_path, "", version)
    found = json.loads(mrv1("doctor", "--json").stdout)
    assert (found["flashinfer"], found["warnings"]) == (said, [])
    monkeypatch.delitem(sys.modules, "flashinfer")


@pytest.mark.parametrize("error", ["ImportError", "OSError", "AttributeError"])
def test_a_broken_flashinfer_is_a_warning(mrv1: Mrv1, monkeypatch, tmp_path: Path, error):
    _install_flashinfer(monkeypatch, tmp_path, f"raise {error}('no libcuda.so.1')", "9.8.7")
    found = json.loads(mrv1("doctor", "--json").stdout)
    assert found["flashinfer"] == "9.8.7, cannot be imported"
    assert found["warnings"] == [
        "attention_backend: expected the package flashinfer-python to be installed, "
        "got no libcuda.so.1; pip install -e '.[flashinfer]', or choose attention_backend='triton'"
    ]


def test_a_missing_flashinfer_gives_no_warning(mrv1: Mrv1, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(facts, "version_of", lambda name: None if "flashinfer" in name else "3.7")
    result = mrv1("doctor")
    assert "FlashInfer" in result.stdout
    assert "not installed" in result.stdout
    assert "no warnings" in result.stdout


# --- driver and environment ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
            "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0)\n",
            "580.95.05",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104  Sat\n", "535.104"),
        ("nothing of the kind", None),
    ],
)
def test_driver_version_is_read(monkeypatch, tmp_path: Path, text: str, expected: str | None):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(device, "Path", lambda _: tmp_path / "version")
    assert device.driver_version() == expected


def test_without_a_driver_there_is_no_driver_version(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(device, "Path", lambda _: tmp_path / "version")
    assert device.driver_version() is None


def test_environment_has_only_known_variables_that_are_set(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/x")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("SECRET", "y")
    found = environment.environment()
    assert found["TRITON_CACHE_DIR"] == "/x"
    assert "CUDA_VISIBLE_DEVICES" not in found
    assert "SECRET" not in found
