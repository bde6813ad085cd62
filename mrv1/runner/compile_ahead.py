"""Compile the kernels of a runner in parallel processes, before the runner launches the first.

A child process (``compile_child``) walks through the start of the same runner on a stand-in GPU,
which records the kernels, and compiles them into Triton's cache, where the runner finds them. It
needs neither weights nor a GPU. Other sets of kernels are compiled the same way (``Compilable``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

import torch

from mrv1.config import EngineConfig, dtype_name
from mrv1.device import FP_FUSION, DeviceInfo, kernel_path, resolve_dtype, visible_gpus
from mrv1.environment import child_environment, module_paths
from mrv1.errors import ConfigError, Mrv1Error
from mrv1.headwise import HeadPolicy
from mrv1.models import ModelConfig
from mrv1.progress import progress_bar
from mrv1.runner.head_groups import read_config, resolve_policy

if TYPE_CHECKING:
    from mrv1.kernels._base.recording import KernelRecorder

logger = logging.getLogger(__name__)

STAMP = "mrv1.json"
"""File in Triton's cache that says which kernels were compiled together."""

GPUS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 188}
"""GPUs that kernels can be compiled for without one, and their multiprocessors: those of A100,
A40, L40S, H100 and H200, B200, RTX PRO 6000. Few kernels depend on this number."""
_MEMORY_BYTES = 80 << 30
"""Memory of a GPU that is not there: no kernel depends on the number of blocks."""

IRRELEVANT = (
    "model", "device", "gpu_memory_utilization", "num_kv_blocks", "kv_cache_memory_bytes",
    "head_policy", "streaming_cache_blocks", "enable_prefix_caching", "vision_device",
    "generation_config", "seed", "compile_processes", "max_mixed_prefill_tokens", "load_format",
)  # fmt: skip
"""Options that change no kernel; the policy itself counts instead of ``head_policy``."""


class Compilable(Protocol):
    """What decides on a number of kernels; a child process gets it as a pickle."""

    child: ClassVar[str]
    """The module whose ``main``, which calls ``compile_from_stdin``, the child process runs."""

    @property
    def digest(self) -> str:
        """Name of the kernels in Triton's cache, see ``digest_of``."""


Kernels = TypeVar("Kernels", bound=Compilable)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSet:
    """All that decides which kernels a runner launches."""

    child: ClassVar[str] = "mrv1.runner.compile_child"

    config: EngineConfig
    model_config: ModelConfig
    head_policy: HeadPolicy
    dtype: torch.dtype
    gpu: DeviceInfo
    rank: int = 0
    """Of ``config.tensor_parallel_size`` ranks; model and policy are the whole ones."""
    has_peers: bool = False
    """Whether the ranks share memory."""

    @classmethod
    def of(cls, config: EngineConfig, target: str | None) -> Self:
        """Return the set of a checkpoint that is configured but not loaded, for any device.

        Of several ranks it is that of rank 0, all of which share memory; see ``of_ranks``.
        ``target`` is one of ``GPUS``; None = the first GPU of this machine. ConfigError: a wrong
        checkpoint or target, or no GPU.
        """
        gpu = _gpu(target)
        config, model = read_config(config, gpu.device)
        return cls(
            config=config,
            model_config=model,
            head_policy=resolve_policy(config, model, None, is_checkpoint=True),
            dtype=resolve_dtype(dtype_name(config.dtype), model.torch_dtype, gpu.device),
            gpu=gpu,
            has_peers=config.tensor_parallel_size > 1,
        )

    def of_ranks(self) -> list[Self]:
        """Return the set of each rank."""
        return [replace(self, rank=rank) for rank in range(self.config.tensor_parallel_size)]

    @property
    def share(self) -> tuple[int, int]:
        """The rank, and the number of ranks, which compile many of the same kernels at once."""
        return self.rank, self.config.tensor_parallel_size

    @property
    def digest(self) -> str:
        """Name of the set in Triton's cache."""
        options = {k: v for k, v in asdict(self.config).items() if k not in IRRELEVANT}
        of_rank = self.rank, self.has_peers
        return digest_of(
            self.gpu, options, self.model_config, self.head_policy, self.dtype, of_rank
        )

    def with_few_layers(self) -> KernelSet:
        """Return the set with one layer of each kind; all, if something is given for single ones.

        That is static scales, or an EAGLE-3 head, which reads sums before layers by their numbers.
        """
        model, heads = self.model_config, self.head_policy.heads
        speculation = self.config.speculation
        reads_sums = speculation is not None and speculation.method == "eagle3"
        if self.config.kv_scale == "head" or model.vision is not None or reads_sums:
            return self
        kinds = {(model.kind(i), each): i for i, each in enumerate(heads)}
        layers = sorted(kinds.values())
        return replace(
            self,
            model_config=model.with_layers(layers),
            head_policy=HeadPolicy(tuple(heads[i] for i in layers)),
        )


def _gpu(target: str | None) -> DeviceInfo:
    """Return the facts about a GPU to compile for; None = the first of this machine."""
    if target is None:
        found = [gpu for gpu in visible_gpus() if torch.version.hip is None]
        if not found:
            raise ConfigError(f"target: expected one of {', '.join(GPUS)}, as no GPU is here")
        return found[0]
    if target not in GPUS:
        raise ConfigError(f"target: expected one of {', '.join(GPUS)}, got {target!r}")
    capability = divmod(int(target.removeprefix("sm_")), 10)
    return DeviceInfo(
        device=torch.device("cuda", 0),
        name=target,
        capability=capability,
        num_sms=GPUS[target],
        total_memory_bytes=_MEMORY_BYTES,
    )


def digest_of(gpu: DeviceInfo, *parts: object) -> str:
    """Return the name of the kernels that follow from a GPU, other things and mrv1's sources."""
    all_parts = (*parts, (gpu.capability, gpu.num_sms), _sources())
    return hashlib.sha256(repr(all_parts).encode()).hexdigest()


def is_compiled(kernels: Compilable) -> bool:
    """Return whether Triton's cache has had every kernel of a set, and what launches it."""
    return _cache(kernels.digest).get_file(STAMP) is not None


@cache
def _sources() -> str:
    """Return a digest of mrv1's sources and of what else decides on Triton's keys."""
    from mrv1.kernels._base.triton import triton

    variables = triton._C.libtriton.get_cache_invalidating_env_vars()
    of_modules = sysconfig.get_config_var("EXT_SUFFIX")  # a module is for one version of Python
    about = (version("triton"), FP_FUSION, variables, of_modules)
    digest = hashlib.sha256(repr(about).encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _cache(key: str) -> Any:  # noqa: ANN401 - a class of triton
    """Return Triton's cache manager of a key; ConfigError if it has no folder."""
    from mrv1.kernels._base.triton import triton

    try:
        return triton.runtime.cache.get_cache_manager(key)
    except OSError as error:
        raise ConfigError(
            f"TRITON_CACHE_DIR: expected a folder that can be written, got {error}"
        ) from error


def left_out() -> str:
    """Return what ``compile_kernels`` leaves to the first launch on this machine, or ""."""
    from mrv1.kernels._base.launchers import driver_module_left_out

    reason = driver_module_left_out()
    return reason and f"left to a start: one C module of Triton's driver, as {reason}"


class CompilationError(Mrv1Error, RuntimeError):
    """Kernels could not be compiled ahead."""


class AheadCompiler:
    """A child process that compiles a set in ``num_processes`` processes at most."""

    def __init__(self, kernels: Compilable, num_processes: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by ``stop``
        self._child = subprocess.Popen(
            [sys.executable, "-c", f"from {kernels.child} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # a group of processes, to be ended together
            env=child_environment(
                PYTHONPATH=os.pathsep.join(module_paths()),
                CUDA_VISIBLE_DEVICES="",
                TRITON_INTERPRET="0",
                OMP_NUM_THREADS="1",
            ),
        )
        stdin, stdout = self._child.stdin, self._child.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("expected pipes to the child, got none")
        self._reports = stdout
        with suppress(BrokenPipeError), stdin:  # ``wait`` reports a child that has ended
            pickle.dump((kernels, num_processes), stdin)

    def wait(self, show: Callable[[int, int], object]) -> int:
        """Wait until every kernel is in the cache; return their number.

        ``show`` gets the kernels done and all. CompilationError: the child or a kernel failed.
        """
        done = total = 0
        for line in self._reports:
            done, total = map(int, line.split())
            show(done, total)
        if self._child.wait():
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"exit code {self._child.returncode}"
            raise CompilationError(f"compile_processes: expected to compile ahead, got {reason}")
        return total

    def stop(self) -> None:
        """End the child and its own children, if they still run."""
        if self._child.returncode != 0:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._reports.close()
        self._errors.close()


def num_cpus() -> int:
    """Return the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def compile_kernels(kernels: KernelSet, show: Callable[[int, int], object]) -> int:
    """Compile a set; return the number of its kernels. For ``show`` and errors see ``wait``."""
    compiler = AheadCompiler(kernels, kernels.config.compile_processes or num_cpus())
    try:
        return compiler.wait(show)
    finally:
        compiler.stop()


def start_compiling(kernels: Compilable, num_processes: int | None) -> AheadCompiler | None:
    """Begin to compile a set, unless it is cached or ``num_processes`` (None = cores) is 0."""
    num_processes = num_cpus() if num_processes is None else num_processes
    if num_processes == 0 or is_compiled(kernels):
        return None
    return AheadCompiler(kernels, num_processes)


def wait_or_warn(compiler: AheadCompiler, show: Callable[[int, int], object]) -> None:
    """Wait as ``AheadCompiler.wait``; a failure is a warning: each launch compiles then."""
    try:
        compiler.wait(show)
    except CompilationError as error:
        logger.warning("%s; each kernel is compiled when it is first launched", error)


@contextmanager
def compiled_beside(kernels: KernelSet, *, progress: bool) -> Iterator[None]:
    """Compile a set while the body runs; ``progress`` shows a bar; a failure is a warning."""
    config = kernels.config
    is_triton = kernel_path(kernels.gpu.device) == "triton"
    if not is_triton or config.attention_backend != "triton" or torch.version.hip:
        yield  # FlashInfer compiles its own; a stand-in is an NVIDIA GPU
        return
    num_processes = config.compile_processes
    if num_processes is None:  # every rank compiles its own
        num_processes = max(num_cpus() // config.tensor_parallel_size, 1)
    compiler = start_compiling(kernels, num_processes)
    if compiler is None:
        yield
        return
    try:
        yield
        with progress_bar(visible=progress) as bar:
            task = bar.add_task("compile kernels", total=None)
            wait_or_warn(
                compiler, lambda done, total: bar.update(task, completed=done, total=total)
            )
    finally:
        compiler.stop()


def compile_from_stdin(record: Callable[[Kernels], KernelRecorder]) -> None:
    """Compile the set pickled on stdin; report progress on stdout.

    ``record`` returns the kernels of a set; the process cannot use a GPU afterwards.
    """
    torch.set_num_threads(1)
    kernels, num_processes = pickle.load(sys.stdin.buffer)
    try:
        recorder = record(kernels)
    except Mrv1Error as error:
        sys.exit(str(error))
    problems, total = [], len(recorder.kernels)
    share = getattr(kernels, "share", (0, 1))
    for done, problem in enumerate(recorder.compile(num_processes, *share), start=1):
        problems += [problem] if problem else []
        sys.stdout.write(f"{done} {total}\n")
        sys.stdout.flush()
    if problems:
        sys.exit("\n".join(problems))
    names = sorted(kernel.name for kernel in recorder.kernels)
    _cache(kernels.digest).put(json.dumps(names), STAMP, binary=False)
