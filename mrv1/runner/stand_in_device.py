"""A GPU that is not there, and a rank without the others, for processes that record kernels.

Tensors are meta tensors that name the GPU: torch's fake ones, indexed, switch devices, and fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch

import torch
from torch.overrides import TorchFunctionMode

from mrv1.device import DeviceInfo, stand_in
from mrv1.kernels._base.peers import PeerBuffer
from mrv1.models import ParallelContext
from mrv1.runner.cuda_graph import Forwarded, StepGraphs
from mrv1.runner.rows import StepShape, Tail

if TYPE_CHECKING:
    from mrv1.kernels._base.recording import KernelRecorder

_META = torch.device("meta")
_get_device = torch.Tensor.device.__get__


class StandInDevice(TorchFunctionMode):
    """Makes tensors of ``device`` without memory; tensors of the host stay as they are."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call a function of torch with the meta device instead of the GPU."""
        del types
        args, kwargs = [*args], dict(kwargs or {})
        if func == _get_device:
            found = func(*args)
            return self._device if found == _META else found
        if func == torch.Tensor.is_pinned:
            return True
        if func == torch.Tensor.copy_ and args[1].is_meta:
            return args[0]  # a copy to the host, of values that are not there
        kwargs.pop("pin_memory", None)
        return func(
            *map(self._without_gpu, args),
            **{name: self._without_gpu(value) for name, value in kwargs.items()},
        )

    def _without_gpu(self, argument: object) -> object:
        is_gpu = isinstance(argument, torch.device) and argument.type == "cuda"
        return _META if is_gpu else argument


def _event(**_: object) -> Mock:
    """Stand in for ``torch.cuda.Event``: nothing runs, so nothing is awaited."""
    return Mock(**{"query.return_value": True, "elapsed_time.return_value": 0.0})


def _run_all(
    graphs: StepGraphs,
    shapes: Iterable[StepShape],
    run: Callable[[StepShape], Forwarded | None],
    sample: Callable[[Forwarded, Tail], None],
    tails: Callable[[StepShape], Sequence[Tail]],
    **_: object,
) -> None:
    """Run each shape once, with each sampling after it, instead of capturing them."""
    del graphs
    for shape in shapes:
        forwarded = run(shape)
        if forwarded is not None:
            for tail in tails(shape):
                sample(forwarded, tail)


@contextmanager
def stand_in_device(device: torch.device) -> Iterator[None]:
    """Let the runner inside work with tensors without memory, and capture nothing."""
    with ExitStack() as stack:
        for owner, name, instead in (
            (torch.cuda, "Event", _event),
            (torch.cuda, "Stream", lambda *_: Mock()),
            (torch.cuda, "current_stream", lambda *_: Mock()),
            (torch.cuda, "stream", nullcontext),
            (torch.cuda, "synchronize", Mock()),
            (torch.cuda, "empty_cache", Mock()),
            (torch.cuda, "current_device", lambda: device.index),
            (StepGraphs, "capture", _run_all),
        ):
            stack.enter_context(patch.object(owner, name, instead))
        stack.enter_context(StandInDevice(device))
        yield


@contextmanager
def stand_in_gpu(gpu: DeviceInfo) -> Iterator[tuple[KernelRecorder, torch.device]]:
    """Run the body on a stand-in GPU; yield its recorder and itself; no GPU works here later."""
    from mrv1.kernels._base.recording import KernelRecorder

    device = torch.device("cuda", 0)
    stand_in(replace(gpu, device=device))
    recorder = KernelRecorder(gpu.capability or (0, 0))
    with stand_in_device(device), torch.inference_mode():
        yield recorder, device


class StandInPeers:
    """Stands in for memory that ranks share: every rank's part is a tensor of this process."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self._device = rank, size, device
        self.abort = torch.zeros(1, dtype=torch.int32, device=device)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> PeerBuffer:
        """Return a buffer whose parts have the right shape."""
        parts = [torch.zeros(shape, dtype=dtype, device=self._device) for _ in range(self.size)]
        return PeerBuffer(self.rank, tuple(parts))


def stand_in_rank(
    rank: int, size: int, device: torch.device, *, has_peers: bool
) -> ParallelContext:
    """Return a rank whose collectives give tensors of the right shape."""
    if size == 1:
        return ParallelContext()
    return ParallelContext(
        rank=rank,
        size=size,
        all_reduce=lambda tensor: tensor,
        all_gather=lambda tensor: torch.cat([tensor] * size, dim=-1),
        peers=StandInPeers(rank, size, device) if has_peers else None,
    )
