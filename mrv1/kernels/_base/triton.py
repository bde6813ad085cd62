"""The only module that imports triton; one process either interprets or compiles.

Triton reads ``TRITON_INTERPRET`` when it decorates a function, its own library included, so the
choice must be made before the first import of triton and holds for the whole process.
"""

from __future__ import annotations

from typing import Any

from mrv1.device import FP_FUSION, INTERPRET
from mrv1.errors import ConfigError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ConfigError(
        "mrv1.kernels: expected the package triton to be installed, "
        f"got {error}; pip install triton"
    ) from error

# The type of triton's own functions tells whether this process interprets or compiles.
if (type(tl.max).__name__ == "InterpretedFunction") != INTERPRET:
    raise ConfigError(
        "TRITON_INTERPRET changed after triton was imported: set it before the first import of "
        "triton or mrv1, and start a new process to change it"
    )

# Set for the whole process, from TRITON_DEFAULT_FP_FUSION if the user has set it. Without a
# choice triton 3.9 warns, and 3.10 no longer fuses: the kernels' results would have other bits.
triton.knobs.language.default_fp_fusion = FP_FUSION

if not INTERPRET:
    _finder = triton.runtime.jit.DependenciesFinder
    _update_hash = _finder._update_hash

    def _update_hash_of(self: object, func: Any) -> None:  # noqa: ANN401 - Triton's JITCallable
        """Hash a function that a kernel calls, and then the kernel.

        Triton before 3.9 forgets the constants of a function that no earlier kernel has called, so
        a kernel's key in its cache would depend on the kernels launched before it.
        """
        func.cache_key  # noqa: B018 - it finds the function's constants
        _update_hash(self, func)

    _finder._update_hash = _update_hash_of

if INTERPRET:
    from mrv1.kernels._base import interpreter

    interpreter.install()

__all__ = ["INTERPRET", "tl", "triton"]
