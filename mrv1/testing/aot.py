"""Compile Triton kernels for GPUs that this machine lacks, and report the resources they use.

A process that has interpreted kernels cannot compile, and a stand-in driver must not replace a
real driver, so :func:`compile_for` works in a child process::

    reports = compile_for("sm_90", ["tests.compile.cases_elementwise"])
    problems = [report.problem for report in reports if report.problem]

Each named module has a function ``cases(target: Target) -> list[AotCase]``. On the command line,
``python -m mrv1.testing.aot TARGET MODULE...`` prints the reports as JSON; with ``TARGET[1::3]``
every third case is compiled, from the second on.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mrv1.environment import module_paths
from mrv1.errors import ConfigError

_KIB = 1024
_PARTS, _REGISTERS = 4, 1 << 14
"""Parts of a multiprocessor, from sm_80 on, and the registers that the warps of each share."""
_RESERVED_BYTES = _KIB
"""Shared memory that the system reserves for itself per program, from sm_80 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU to compile for."""

    name: str
    backend: str
    """Triton's backend: ``cuda`` or ``hip``."""
    arch: int | str
    """Triton's name of the architecture within the backend."""
    warp_size: int
    shared_memory_bytes: int
    """Shared memory (LDS) one program may use."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability; None on AMD."""
        return divmod(self.arch, 10) if isinstance(self.arch, int) else None

    @property
    def has_dependent_launch(self) -> bool:
        """Whether kernels use dependent launches (``mrv1.kernels._base.dependent_launch``)."""
        return self.capability is not None and self.capability >= (9, 0)


def _cuda(arch: int, shared_memory_kib: int) -> Target:
    return Target(
        name=f"sm_{arch}",
        backend="cuda",
        arch=arch,
        warp_size=32,
        shared_memory_bytes=shared_memory_kib * _KIB,
    )


_GFX942 = Target(
    name="gfx942", backend="hip", arch="gfx942", warp_size=64, shared_memory_bytes=64 * _KIB
)

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        _cuda(80, 163),  # A100
        _cuda(86, 99),  # RTX 30
        _cuda(89, 99),  # L4, L40, RTX 40
        _cuda(90, 227),  # H100, H200
        _cuda(100, 227),  # B200
        _cuda(120, 99),  # RTX 50
        _GFX942,  # MI300
    )
}
"""The GPUs mrv1's kernels are compiled for (CUDA C++ Programming Guide, compute capabilities)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AotCase:
    """One kernel with one set of arguments."""

    name: str
    kernel: Any
    """A ``@triton.jit`` function."""
    args: tuple[object, ...]
    """Positional arguments: :func:`pointer` for tensors, None, and numbers as in a real launch."""
    constexprs: Mapping[str, object]
    """Arguments by name, most of them constexprs."""
    num_warps: int = 4
    num_stages: int = 3
    parked_bytes: int = 0
    """Allowed local memory of one thread: values that the compiler keeps there during a loop, but
    does not access in the loop, so that more programs fit a multiprocessor."""
    programs_per_sm: int = 0
    """Programs that must fit a multiprocessor at the same time, as the launch assumes."""
    pattern: str = ""
    """Regular expression to look for in the assembly (PTX, or AMD's); empty = nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AotReport:
    """The resources that one case uses on one target."""

    target: str
    case: str
    seconds: float
    """Compile time; near 0 when Triton's cache had it."""
    error: str = ""
    """The compiler's message, empty on success."""
    registers: int = 0
    """Registers of one thread."""
    spill_bytes: int = 0
    """Local memory of one thread."""
    shared_bytes: int = 0
    """Shared memory of one program."""
    parked_bytes: int = 0
    """The part of ``spill_bytes`` that the case allows."""
    threads: int = 0
    """Threads of a program."""
    programs_per_sm: int = 0
    """Programs that must fit a multiprocessor."""
    early_arrivals: int = 0
    """See :func:`early_arrivals`."""
    early_reuses: int = 0
    """See :func:`early_reuses`."""
    found: Sequence[str] = ()
    """All matches of the case's pattern, in order."""
    problem: str = field(init=False)
    """Why this must not ship: an error, spill, race, too much shared memory; or ""."""

    def __post_init__(self) -> None:
        """Find the problem."""
        limit = TARGETS[self.target].shared_memory_bytes
        reasons = [self.error] if self.error else []
        if self.spill_bytes > self.parked_bytes:
            reasons.append(
                f"spills {self.spill_bytes} bytes a thread ({self.registers} registers)"
            )
        if self.shared_bytes > limit:
            reasons.append(f"needs {self.shared_bytes} bytes of shared memory, has {limit}")
        shared_bytes = self.shared_bytes + _RESERVED_BYTES
        if self.programs_per_sm * shared_bytes > limit + _RESERVED_BYTES:
            reasons.append(
                f"{self.programs_per_sm} programs of {self.shared_bytes} bytes of shared memory "
                f"do not fit a multiprocessor"
            )
        registers = 32 * -(-self.registers // 8) * 8  # per warp, allocated in eights a thread
        warps = _PARTS * (_REGISTERS // max(1, registers))
        if self.programs_per_sm * self.threads > 32 * warps:
            reasons.append(
                f"{self.programs_per_sm} programs of {self.threads} threads with {self.registers} "
                f"registers do not fit a multiprocessor"
            )
        if self.early_arrivals:
            reasons.append(f"{self.early_arrivals} arrivals without a barrier of their warps")
        if self.early_reuses:
            reasons.append(f"{self.early_reuses} loops that overwrite operands of products")
        problem = f"{self.target} {self.case}: {'; '.join(reasons)}" if reasons else ""
        object.__setattr__(self, "problem", problem)


def pointer(dtype: torch.dtype) -> torch.Tensor:
    """Return a stand-in for a tensor argument: only its dtype and 16-byte alignment count."""
    return torch.empty(16, dtype=dtype)


def compile_for(
    target: str, modules: Sequence[str], *, share: tuple[int, int] = (0, 1)
) -> list[AotReport]:
    """Compile the cases of ``modules`` for ``target`` of :data:`TARGETS` in a child process.

    Each module has a function ``cases``. ``share`` ``(i, n)`` takes only every n-th case, from the
    i-th on. ConfigError: an unknown target. RuntimeError: the child failed outside the compiler;
    the message ends with its stderr.
    """
    _target(target)
    first, step = share
    command = [sys.executable, "-m", "mrv1.testing.aot", f"{target}[{first}::{step}]", *modules]
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(module_paths()),
    }
    child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if child.returncode:
        raise RuntimeError(
            f"{' '.join(command)} exited {child.returncode}: {child.stderr[-2000:]}"
        )
    return [_report_from(fields) for fields in json.loads(child.stdout.splitlines()[-1])]


def _report_from(fields: dict[str, Any]) -> AotReport:
    fields.pop("problem")
    return AotReport(**fields)


def _target(name: str) -> Target:
    if name not in TARGETS:
        raise ConfigError(f"target: expected one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]


def collect_cases(target: Target, modules: Iterable[str]) -> list[AotCase]:
    """Import ``modules`` and return their cases for ``target``."""
    return [case for name in modules for case in importlib.import_module(name).cases(target)]


def compile_cases(target: Target, cases: Iterable[AotCase]) -> list[AotReport]:
    """Compile ``cases`` here, with a stand-in driver from then on; ConfigError: interpreting."""
    from mrv1.kernels._base.recording import use_stand_in_driver

    use_stand_in_driver(target.backend, target.arch, target.warp_size)
    return [_compile_case(target, case) for case in cases]


def _compile_case(target: Target, case: AotCase) -> AotReport:
    started = time.perf_counter()
    try:
        compiled = case.kernel.warmup(
            *case.args,
            grid=(1,),
            num_warps=case.num_warps,
            num_stages=case.num_stages,
            **case.constexprs,
        )
        read_usage = _nvidia_usage if target.backend == "cuda" else _amd_usage
        registers, spill_bytes = read_usage(compiled)
    except Exception as error:
        return AotReport(
            target=target.name,
            case=case.name,
            seconds=time.perf_counter() - started,
            error=f"{type(error).__name__}: {error}",
        )
    ptx = compiled.asm.get("ptx", "")
    return AotReport(
        target=target.name,
        case=case.name,
        seconds=time.perf_counter() - started,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=int(compiled.metadata.shared),
        parked_bytes=case.parked_bytes,
        threads=case.num_warps * target.warp_size,
        programs_per_sm=case.programs_per_sm,
        early_arrivals=early_arrivals(ptx),
        early_reuses=early_reuses(ptx),
        found=re.findall(case.pattern, ptx or compiled.asm["amdgcn"]) if case.pattern else [],
    )


_BARRIER = re.compile(r"\bbar(rier)?\.(warp\.)?sync\b")
_EFFECT = re.compile(
    r"^\$L(?!__tmp)|\b(bra|bar|barrier|mbarrier|ld|st|atom|red|ldmatrix|stmatrix|wgmma|cp)\b"
)
"""A label (not of a line of source), a branch, a barrier, or an access to memory."""


def early_arrivals(ptx: str) -> int:
    """Return the number of arrivals at an mbarrier that may come before an access of their warps.

    One thread arrives for its warps, and other warps then read or overwrite shared memory. So a
    barrier of these warps must lie between their last access and the arrival: it is the last
    instruction but arithmetic in the same block. An arrival that expects bytes of a copy says
    nothing of accesses before it.
    """
    early, is_ordered = 0, False
    for line in ptx.splitlines():
        if "mbarrier.arrive" in line and "expect_tx" not in line:
            early += not is_ordered
        if _EFFECT.search(line):
            is_ordered = _BARRIER.search(line) is not None
    return early


def early_reuses(ptx: str) -> int:
    """Return the number of loops that never wait for all wgmma, though some read registers.

    Triton 3.6 to 3.9 leave the products of a step running whose left operand it has computed. The
    registers are free for it then, and the next step overwrites them.
    """
    loops, reads, waited = 0, -1, -1  # lines of a product that reads registers, of a wait for all
    labels, running = dict[str, int](), list[int]()
    for number, line in enumerate(ptx.splitlines()):
        if label := re.match(r"(\$L_\w+):", line):
            labels[label[1]] = number
        elif "wgmma.mma_async" in line:
            reads = number if re.search(r"\}, *\{", line) else reads  # of the sum, of an operand
        elif "wgmma.commit_group" in line:
            running, reads = [*running, reads], -1
        elif wait := re.search(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", line):
            running = running[max(0, len(running) - int(wait[1])) :]
            waited = waited if running else number
        elif branch := re.search(r"\bbra(?:\.uni)?\s+(\$L_\w+)", line):
            loops += max(running, default=-1) > labels.get(branch[1], number) > waited
    return loops


def _nvidia_usage(compiled: Any) -> tuple[int, int]:  # noqa: ANN401 - Triton's CompiledKernel
    """Read registers and local memory out of the machine code."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", dump)
    if found is None:
        raise RuntimeError(f"cuobjdump: expected a line of resource usage, got {dump[-200:]!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _amd_usage(compiled: Any) -> tuple[int, int]:  # noqa: ANN401 - Triton's CompiledKernel
    """Read registers and scratch memory out of the assembly's metadata."""
    assembly = compiled.asm["amdgcn"]

    def value(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        if found is None:
            raise RuntimeError(f"amdgcn: expected {key} in the metadata, found none")
        return int(found[1])

    return value("vgpr_count"), value("private_segment_fixed_size")


def main(arguments: Sequence[str]) -> int:
    """Compile the cases of the modules named after a target and print the reports as JSON."""
    wanted = re.fullmatch(r"(\w+)(?:\[(\d+)::([1-9]\d*)\])?", arguments[0]) if arguments else None
    if wanted is None or len(arguments) < 2:
        sys.stderr.write("usage: python -m mrv1.testing.aot TARGET[FIRST::STEP] MODULE...\n")
        return 2
    target = _target(wanted[1])
    cases = collect_cases(target, arguments[1:])
    reports = compile_cases(target, cases[int(wanted[2] or 0) :: int(wanted[3] or 1)])
    sys.stdout.write(json.dumps([asdict(report) for report in reports]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
