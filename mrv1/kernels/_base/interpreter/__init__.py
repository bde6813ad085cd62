"""Corrections and checks for Triton's CPU interpreter (Triton 3.6 to 3.9).

``TRITON_INTERPRET=1`` runs kernels on CPU tensors without a driver. Stock, it gets bfloat16 and
conversions to fp8 wrong and is slow in custom reductions; it also accepts addresses outside the
arguments, int32 overflow and failed device assertions.

- :func:`install` makes the results right; ``mrv1.kernels`` calls it when it interprets.
- ``install(debug=True)`` adds int32 overflow checks and ``tl.device_assert``.
- :func:`install_bounds` makes a stray address an ``IndexError`` that names the program.

All three hold for the rest of the process. Threads may interpret at the same time, as the ranks of
one host: a volatile load lets the other threads run.
"""

from __future__ import annotations

import threading
import types

import numpy as np
import triton.language as tl

from mrv1.kernels._base.interpreter.bounds import BoundedExecutor, CheckedMemory
from mrv1.kernels._base.interpreter.builder import CorrectedBuilder
from mrv1.kernels._base.interpreter.internals import Opaque, Tensor, tensors_of, ti
from mrv1.kernels._base.interpreter.kept_types import keep_types
from mrv1.kernels._base.interpreter.reductions import CorrectedReduceOps, CorrectedScanOps

__all__ = ["install", "install_bounds"]


def install(*, debug: bool = False) -> None:
    """Correct the interpreter for this process; a second call is free.

    ``debug``, once on, also checks int32 overflow and device assertions (about twice as slow).
    """
    builder = ti.interpreter_builder
    if not isinstance(builder, CorrectedBuilder):
        # The one builder instance is bound into Triton's semantic layer: change what it does, not
        # which object it is.
        builder.__class__ = CorrectedBuilder
        ti.ReduceOps, ti.ScanOps = CorrectedReduceOps, CorrectedScanOps
        _correct_arguments()
        _copy_back_only_from_copies()
        _parse_in_one_thread()
        _patch_library_once()
        keep_types()
        # Stock, every int32 operation is repeated in int64 and the check thrown away.
        builder.options = ti.InterpreterOptions(debug=False, sanitize_overflow=False)
    if debug:
        builder.options = ti.InterpreterOptions(debug=True, sanitize_overflow=True)


def install_bounds() -> None:
    """Check every unmasked address of every later launch; a second call is free.

    An access outside the storage of every tensor argument raises ``IndexError`` (the cause of
    Triton's ``InterpreterError``). A view's whole storage counts; loaded pointers are checked too.
    """
    if not isinstance(ti._interpreter, CheckedMemory):
        ti._interpreter = CheckedMemory(ti._interpreter)
        ti.GridExecutor = BoundedExecutor


def _correct_arguments() -> None:
    """Let 3.6 loop over loaded values with numpy >= 2.4, and 3.6 and 3.7 take run-time bools."""
    patch_tensor, convert = ti._patch_lang_tensor, ti._implicit_cvt

    def patch_lang_tensor(tensor: type[Tensor], scope: Opaque) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def implicit_cvt(arg: object) -> object:
        if isinstance(arg, bool):
            return tl.tensor(ti.TensorHandle(np.array([arg]), tl.int1), tl.int1)
        return convert(arg)

    ti._patch_lang_tensor, ti._implicit_cvt = patch_lang_tensor, implicit_cvt


def _copy_back_only_from_copies() -> None:
    """Do not copy the memory of CPU tensors, which kernels write in place, onto itself.

    What another thread stores in the meantime would be lost.
    """
    executor = ti.GridExecutor
    restore = executor._restore_args_dev

    def restore_args_dev(
        self: Opaque, args_dev: Opaque, args_hst: Opaque, kwargs: Opaque, kwargs_hst: Opaque
    ) -> None:
        if any(
            tensor.device.type != "cpu" for tensor in tensors_of((*args_dev, *kwargs.values()))
        ):
            restore(self, args_dev, args_hst, kwargs, kwargs_hst)

    executor._restore_args_dev = restore_args_dev


def _parse_in_one_thread() -> None:
    """Rewrite one function at a time: Python 3.11 fails where threads parse at the same time."""
    rewrite, lock = ti.InterpretedFunction.rewrite, threading.RLock()

    def rewrite_alone(self: Opaque) -> Opaque:
        with lock:
            return rewrite(self)

    ti.InterpretedFunction.rewrite = rewrite_alone


class _KeptScope:
    """A patch scope that stays."""

    def restore(self) -> None:
        """Leave the library patched."""


def _patch_library_once() -> None:
    """Patch ``triton.language`` once, not at each launch and device-function call (1 ms)."""
    probe = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    ti._patch_lang(probe)
    kept = _KeptScope()
    ti._patch_lang = lambda fn: kept
