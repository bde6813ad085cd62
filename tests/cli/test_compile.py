"""``mrv1 compile``: its messages and exit codes; the work itself is the runner's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mrv1.config import EngineConfig
from mrv1.runner import compile_ahead
from mrv1.runner.compile_ahead import CompilationError, KernelSet
from tests.cli.conftest import Mrv1

OPTIONS = ("--dtype", "float16", "--block-size", 32)


@pytest.fixture(autouse=True)
def triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mrv1.kernels._base.triton import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))


def test_the_kernels_of_a_model_are_compiled_once(mrv1: Mrv1, checkpoint: str, monkeypatch):
    compiled: list[KernelSet] = []

    def compile_kernels(kernels, show) -> int:
        compiled.append(kernels)
        show(3, 9)
        compile_ahead._cache(kernels.digest).put("[]", compile_ahead.STAMP, binary=False)
        return 9

    monkeypatch.setattr(compile_ahead, "compile_kernels", compile_kernels)
    arguments = ("compile", "--model", checkpoint, "--target", "sm_90", *OPTIONS)
    first, second = mrv1(*arguments), mrv1(*arguments)
    assert (first.exit_code, first.stdout) == (second.exit_code, second.stdout) == (0, "")
    assert first.stderr == "9 kernels compiled for sm_90\n"
    assert second.stderr == "nothing to do: the kernels are in Triton's cache\n"
    config = EngineConfig(model=checkpoint, dtype="float16", block_size=32)
    assert [kernels.digest for kernels in compiled] == [KernelSet.of(config, "sm_90").digest]


def test_the_kernels_of_each_rank_are_compiled(mrv1: Mrv1, checkpoint: str, monkeypatch):
    compiled: list[KernelSet] = []
    monkeypatch.setattr(
        compile_ahead, "compile_kernels", lambda kernels, show: compiled.append(kernels) or 7
    )
    result = mrv1(
        "compile", "--model", checkpoint, "--target", "sm_90", "--tensor-parallel-size", 2
    )
    assert result.stderr == "".join(
        f"7 kernels compiled for sm_90 for rank {rank}\n" for rank in range(2)
    )
    assert [(each.rank, each.has_peers) for each in compiled] == [(0, True), (1, True)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "sm_70"), "target: expected one of sm_80, sm_86, .*, got 'sm_70'"),
        ((), "target: expected one of sm_80, .*, as no GPU is here"),
        (("--target", "sm_90", "--block-size", 7), "block_size: expected one of"),
    ],
)
def test_a_wrong_argument_is_one_line(
    mrv1: Mrv1, checkpoint: str, arguments, message, monkeypatch
):
    monkeypatch.setattr(compile_ahead, "visible_gpus", tuple)
    result = mrv1("compile", "--model", checkpoint, *arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert re.match(f"error: {message}", result.stderr)


def test_a_cache_that_cannot_be_written_is_named(
    mrv1: Mrv1, checkpoint: str, tmp_path: Path, monkeypatch
):
    from mrv1.kernels._base.triton import triton

    (tmp_path / "file").touch()
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    result = mrv1("compile", "--model", checkpoint, "--target", "sm_90")
    assert result.exit_code == 2
    assert re.fullmatch("error: TRITON_CACHE_DIR: expected a folder .*, got .*\n", result.stderr)


def test_a_failed_compilation_is_one_line(mrv1: Mrv1, checkpoint: str, monkeypatch):
    def compile_kernels(kernels, show) -> int:
        raise CompilationError("compile_processes: expected to compile ahead, got no room")

    monkeypatch.setattr(compile_ahead, "compile_kernels", compile_kernels)
    result = mrv1("compile", "--model", checkpoint, "--target", "sm_90")
    assert result.exit_code == 2
    assert result.stderr == "error: compile_processes: expected to compile ahead, got no room\n"
