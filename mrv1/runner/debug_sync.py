"""Which kernel failed: the host waits behind each one, so that its error is its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from mrv1.kernels.registry import Ops


class _SyncedOps:
    """Every op of another, each awaited."""

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self._ops = ops
        self._device = device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(self._ops, name)

        def awaited(*args: object, **kwargs: object) -> Any:  # noqa: ANN401 - whatever the op returns
            try:
                result = op(*args, **kwargs)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
            except Exception as error:
                raise RuntimeError(f"kernel {name}: {error}") from error
            return result

        return awaited


def synced(ops: Ops, device: torch.device) -> Ops:
    """Return ``ops`` with a wait behind each; what one raises names it."""
    return cast("Ops", _SyncedOps(ops, device))
