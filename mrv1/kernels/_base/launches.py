"""Launch kernels, and launch the same ones again for the next layer without an op's checks.

An op checks its arguments and chooses a kernel, and Triton looks at every argument to find the
compiled variant: up to 0.2 ms of a slow host's time, which short steps outside CUDA graphs wait
for. The layers of a step call an op with tensors of the same form, elsewhere in memory::

    attention = RepeatedCall()
    for layer in layers:  # the first call runs the op, the others only its launches
        attention(op, (layer.q, layer.k_cache, layer.out), step)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch

ALIGNMENT = 16
"""Bytes: Triton compiles a variant of a kernel for pointers that are multiples of it."""

Tensors = Sequence[torch.Tensor | None]


class _Launch(NamedTuple):
    """A launch that may be made again."""

    kernel: Any  # what Triton has compiled: it takes the grid, then all arguments by position
    grid: tuple[int, ...]
    arguments: list[Any]


class _Notes(threading.local):
    """The launches of the op that this thread's ``RepeatedCall`` runs, else None."""

    launches: list[_Launch] | None = None


_notes = _Notes()


def launch_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - a kernel's
    """Launch ``kernel[grid](*arguments, **options)``, and note it if a ``RepeatedCall`` asks."""
    compiled = kernel[grid](*arguments, **options)
    if _notes.launches is not None and compiled is not None:  # the interpreter compiles nothing
        rest = [options[name] for name in kernel.arg_names[len(arguments) :]]
        _notes.launches.append(_Launch(compiled, (*grid, 1, 1)[:3], [*arguments, *rest]))


class _Recorded(NamedTuple):
    """The launches of one call, and for which calls they are right."""

    key: list[object]  # the identities of ``same``, and the tensors' forms
    same: tuple[object, ...]  # kept alive, so that nothing else gets their identities
    launches: list[_Launch]
    """Without the call's own tensors: in their places are None or descriptors without a base."""
    places: list[list[tuple[int, int]]]
    """For each launch: the index of each such argument, and its tensor's."""


class RepeatedCall:
    """An op that is called again and again with tensors of the same form.

    A call makes the launches of the call before if its tensors have the same dtypes, shapes,
    strides, devices and alignment, and all else is the same; otherwise it runs the op. The op must
    launch through ``launch_kernel`` only; nothing else may depend on where its tensors lie.
    """

    def __init__(self) -> None:
        """Know no call yet."""
        self._recorded: _Recorded | None = None  # replaced as a whole: threads may share this

    def __call__(self, op: Callable[[], object], tensors: Tensors, *same: object) -> None:
        """Call ``op``, or repeat its launches with these tensors.

        Args:
            op: calls the op with these tensors; no tensor that it gets may be a copy of one.
            tensors: every tensor that another call may replace.
            same: objects that stand for all else that the op gets; each must be the very object of
                the call before. They stay alive until the next call, or until ``forget``.
        """
        if _notes.launches is not None:  # inside another call, which notes the launches
            op()
            return
        key: list[object] = [*map(id, same), *map(_form, tensors)]
        recorded = self._recorded
        if recorded is not None and key == recorded.key:
            _repeat(recorded, tensors)
            return
        launches: list[_Launch] = []
        _notes.launches = launches
        try:
            op()
        finally:
            _notes.launches = None
        repeatable = _record(launches, tensors)
        self._recorded = repeatable and _Recorded(key, same, *repeatable)

    def forget(self) -> None:
        """Know no call any more, and keep nothing alive."""
        self._recorded = None


def _form(tensor: torch.Tensor | None) -> object:
    return tensor is not None and (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.data_ptr() % ALIGNMENT == 0,
    )


def _record(
    launches: list[_Launch], tensors: Tensors
) -> tuple[list[_Launch], list[list[tuple[int, int]]]] | None:
    """Return what repeats the launches; None without any, or if a tensor is in none of them."""
    found = {index for index, tensor in enumerate(tensors) if tensor is None}
    bare, places = [], []
    for one in launches:
        arguments, of_launch = list(one.arguments), []
        for place, argument in enumerate(arguments):
            base = getattr(argument, "base", argument)  # of a tensor descriptor
            index = _index(base, tensors)
            if index is None:
                continue
            found.add(index)
            of_launch.append((place, index))
            arguments[place] = None if base is argument else _described(argument, None)
        bare.append(_Launch(one.kernel, one.grid, arguments))
        places.append(of_launch)
    return (bare, places) if launches and len(found) == len(tensors) else None


def _described(descriptor: Any, base: torch.Tensor | None) -> Any:  # noqa: ANN401 - Triton's
    """Return a tensor descriptor like another, of ``base``."""
    descriptor = copy(descriptor)
    descriptor.base = base
    return descriptor


def _index(argument: object, tensors: Tensors) -> int | None:
    """Return which of the tensors an argument is: the very object, or a view from its start."""
    if not isinstance(argument, torch.Tensor):
        return None
    for index, tensor in enumerate(tensors):
        if tensor is argument:
            return index
    for index, tensor in enumerate(tensors):
        if tensor is not None and tensor.data_ptr() == argument.data_ptr() != 0:
            return index
    return None


def _repeat(recorded: _Recorded, tensors: Tensors) -> None:
    for one, places in zip(recorded.launches, recorded.places, strict=True):
        arguments = one.arguments.copy()
        for place, index in places:
            tensor, descriptor = tensors[index], arguments[place]
            arguments[place] = tensor if descriptor is None else _described(descriptor, tensor)
        one.kernel[one.grid](*arguments)
