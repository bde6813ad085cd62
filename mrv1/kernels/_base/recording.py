"""Record the kernels that a process would compile, for a GPU that it lacks, and compile them.

After ``record_kernels`` every launch in this process only leaves a note: the input of Triton's
compiler, with the specialization of the launch's arguments. What is compiled from it has the same
key in Triton's cache as the launch on the GPU.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

from mrv1.errors import ConfigError
from mrv1.kernels._base.launchers import (
    build_driver_module,
    build_launcher,
    driver_module_left_out,
    modules_built_only,
)
from mrv1.kernels._base.triton import INTERPRET, triton


class StandInDriver:
    """Enough of a driver for Triton to specialize and compile kernels for a ``GPUTarget``."""

    def __init__(self, gpu_target: object) -> None:
        self._gpu_target = gpu_target

    def get_current_target(self) -> object:
        """Return the target."""
        return self._gpu_target

    def get_current_device(self) -> str:
        """Return the key of a kernel's compiled variants."""
        return repr(self._gpu_target)

    def get_current_stream(self, device: object) -> int:
        """Return the default stream."""
        return 0

    def set_current_device(self, device: object) -> None:
        """Do nothing: there is no device."""

    def map_python_to_cpp_type(self, type_name: str) -> str:
        """Return the name itself: no launcher is built."""
        return type_name


def use_stand_in_driver(backend: str, arch: int | str, warp_size: int) -> object:
    """Make Triton compile for an absent GPU; ConfigError in a process that interprets kernels."""
    if INTERPRET:
        raise ConfigError("TRITON_INTERPRET: expected 0 in a process that compiles, got 1")
    target = triton.backends.compiler.GPUTarget(backend, arch, warp_size)
    triton.runtime.driver.set_active(StandInDriver(target))
    return target


class RecordedKernel(NamedTuple):
    """One kernel with one specialization: the arguments of Triton's compiler."""

    source: Any
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the kernel's function."""
        return str(self.source.name)


class _NotLaunched:
    """Stands in for a compiled kernel: its launch does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *args: object) -> None:
        """Return no metadata."""

    def run(self, *args: object) -> None:
        """Launch nothing."""


class KernelRecorder:
    """Turns launches into notes, for a GPU of ``capability``; ConfigError while interpreting."""

    def __init__(self, capability: tuple[int, int]) -> None:
        major, minor = capability
        self._target = use_stand_in_driver("cuda", 10 * major + minor, 32)
        self._compile = triton.compiler.compile
        self.kernels: list[RecordedKernel] = []
        """Every kernel so far, each specialization once."""
        # A kernel takes its compiler from here at its first launch.
        triton.compiler.compile = self._record

    def _record(self, source: Any, *, options: dict[str, Any], **_: object) -> _NotLaunched:  # noqa: ANN401 - Triton's ASTSource
        self.kernels.append(RecordedKernel(source, dict(options)))
        return _NotLaunched()

    def compile(self, num_processes: int, share: int = 0, num_shares: int = 1) -> Iterator[str]:
        """Compile the recorded kernels into Triton's cache; yield the problem of each, or "".

        Begin with one of ``num_shares`` parts, if others compile the same kernels at the same time
        and begin with another: what they have compiled by then is found in the cache.

        The C modules that launch them are built, too; a problem of the module that all share is
        yielded last. At most ``num_processes``, forked from this one, compile at the same time.
        """
        # The longest sources first: they take longest, and nobody shall wait for them at the end.
        self.kernels.sort(key=lambda kernel: -len(kernel.source.fn.src))
        # Forked processes have the recorded kernels, which cannot be pickled.
        with (
            modules_built_only(),
            ProcessPoolExecutor(
                min(num_processes, len(self.kernels)),
                mp_context=multiprocessing.get_context("fork"),
                initializer=_Worker.start,
                initargs=(self,),
            ) as pool,
        ):
            driver_module = pool.submit(_Worker.build_driver_module)
            indices = order_of(len(self.kernels), share, num_shares)
            for future in as_completed([pool.submit(_Worker.compile, i) for i in indices]):
                yield future.result()
            if problem := driver_module.result():
                yield problem

    def compile_one(self, index: int) -> str:
        """Compile a recorded kernel, and what launches it; return the problem, or ""."""
        kernel = self.kernels[index]
        try:
            compiled = self._compile(kernel.source, target=self._target, options=kernel.options)
            build_launcher(compiled)
        except Exception as error:
            return f"{kernel.name}: {type(error).__name__}: {error}"
        return ""


def order_of(count: int, share: int, num_shares: int) -> list[int]:
    """Return the indices below ``count``, every ``num_shares``-th from ``share`` on first."""
    firsts = [(share + i) % num_shares for i in range(num_shares)]
    return [index for first in firsts for index in range(first, count, num_shares)]


class _Worker:
    """A process that compiles the kernels of the recorder that it was forked with."""

    recorder: KernelRecorder

    @classmethod
    def start(cls, recorder: KernelRecorder) -> None:
        cls.recorder = recorder

    @classmethod
    def compile(cls, index: int) -> str:
        return cls.recorder.compile_one(index)

    @staticmethod
    def build_driver_module() -> str:
        if driver_module_left_out():
            return ""
        try:
            build_driver_module()
        except Exception as error:
            return f"module of the driver: {type(error).__name__}: {error}"
        return ""
