"""What mrv1's own tests stand on, for users' tests too.

- :mod:`mrv1.testing.interpreter` corrects Triton's CPU interpreter and adds checks to it.
- :mod:`mrv1.testing.aot` compiles kernels for GPUs this machine does not have.
- :mod:`mrv1.testing.strategies` holds hypothesis strategies: paged caches, ragged batches, block
  layouts. It is imported on first use, so that only who draws from it needs hypothesis::

      from mrv1.testing import strategies
"""

from __future__ import annotations

import importlib
from types import ModuleType

_SUBMODULES = ("aot", "interpreter", "strategies")

__all__ = ["aot", "interpreter", "strategies"]


def __getattr__(name: str) -> ModuleType:
    """Import a submodule on first use: triton and hypothesis must not be needed before."""
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
