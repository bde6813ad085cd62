"""All of a step's host data in one pinned buffer and one host-to-device copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT_BYTES = 16
"""Each array starts at a multiple of this, so that its view has any dtype."""

RING_DEPTH = 2
"""Pinned buffers in turn: one being filled while the copy out of the other may still run."""

_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Staging:
    """A ring of pinned buffers, each guarded by the event of its last reader.

    Owned by the runner, used from the host thread that launches steps. ``upload`` waits only when
    the copy that last read the ring's next buffer has not run yet; ``num_waits`` counts that.
    """

    def __init__(self, device: torch.device, capacity_bytes: int = 1 << 16) -> None:
        self._device = device
        self._pinned = [self._new_buffer(capacity_bytes) for _ in range(RING_DEPTH)]
        self._copied: list[torch.cuda.Event | None] = [None] * RING_DEPTH
        self._next = 0
        self.num_waits = 0

    def _new_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def upload(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, torch.Tensor]:
        """Copy ``arrays`` to the device in one transfer on the current stream.

        Args:
            arrays: int32, int64 or float32 arrays of any shape.

        Returns:
            Tensors of the same names, shapes and dtypes; views of one new device buffer.
        """
        offsets, total = {}, 0
        for name, array in arrays.items():
            offsets[name] = total
            total += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        pinned = self._acquire(total)
        host = pinned.numpy()
        for name, array in arrays.items():
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            host[offsets[name] : offsets[name] + array.nbytes] = flat
        device_buffer = torch.empty(total, dtype=torch.uint8, device=self._device)
        device_buffer.copy_(pinned[:total], non_blocking=True)
        self._release()
        return {
            name: device_buffer[offsets[name] : offsets[name] + array.nbytes]
            .view(_TORCH_DTYPES[array.dtype])
            .view(array.shape)
            for name, array in arrays.items()
        }

    def _acquire(self, num_bytes: int) -> torch.Tensor:
        event = self._copied[self._next]
        if event is not None and not event.query():
            self.num_waits += 1
            event.synchronize()  # the guard of the ring: the copy out of this buffer must be over
        if self._pinned[self._next].numel() < num_bytes:
            self._pinned[self._next] = self._new_buffer(2 * num_bytes)
        return self._pinned[self._next]

    def _release(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._copied[self._next] = event
        self._next = (self._next + 1) % RING_DEPTH
