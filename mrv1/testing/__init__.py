"""Tools of mrv1's own tests, for users' tests too.

- :mod:`mrv1.testing.interpreter` adds checks to Triton's CPU interpreter.
- :mod:`mrv1.testing.aot` compiles kernels for GPUs this machine does not have.
- :mod:`mrv1.testing.strategies` holds hypothesis strategies; it is imported on first use.
- :mod:`mrv1.testing.comparison` compares an op with its oracle on drawn cases; likewise.
"""

from __future__ import annotations

import importlib

_SUBMODULES = ("aot", "comparison", "interpreter", "strategies")
_STRATEGIES = ("build_paged_cache", "kv_layouts", "paged_caches", "ragged_batches")
_MODULE_OF = dict.fromkeys(_STRATEGIES, "strategies") | {"compare": "comparison"}

__all__ = [
    "aot",
    "build_paged_cache",
    "compare",
    "comparison",
    "interpreter",
    "kv_layouts",
    "paged_caches",
    "ragged_batches",
    "strategies",
]


def __getattr__(name: str) -> object:
    """Import a submodule on first use: triton and hypothesis must not be needed before."""
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
