"""Launch kernels, and launch the same ones again for the next layer without an op's checks.

An op checks its arguments, chooses a kernel, and Triton looks at every argument to find the
compiled variant: up to 0.2 ms of a slow host's time. Outside CUDA graphs, short steps wait for
that. The layers of a step call an op with tensors of the same form, only elsewhere in memory::

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

    kernel: Any
    """What Triton has compiled: it takes the grid, then all arguments by position."""
    grid: tuple[int, int, int]
    arguments: list[Any]


class _Notes(threading.local):
    """The launches of the op that this thread's ``RepeatedCall`` runs, else None."""

    launches: list[_Launch] | None = None


_notes = _Notes()


def launch_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - a kernel's
    """Launch ``kernel[grid](*arguments, **options)``, and note it if a ``RepeatedCall`` asks.

    Args:
        kernel: a function of ``triton.jit`` or ``gluon.jit``.
        grid: 1 to 3 numbers of programs.
        arguments: the kernel's first parameters.
        options: its other parameters by name, and options of the compiler.
    """
    compiled = kernel[grid](*arguments, **options)
    if _notes.launches is not None and compiled is not None:  # the interpreter compiles nothing
        rest = [options[name] for name in kernel.arg_names[len(arguments) :]]
        x, y, z = (*grid, 1, 1)[:3]
        _notes.launches.append(_Launch(compiled, (x, y, z), [*arguments, *rest]))


class _Recorded(NamedTuple):
    """The launches of one call, and for which calls they are right."""

    same: tuple[object, ...]
    forms: list[object]
    launches: list[_Launch]
    """Without the call's own tensors: None in their places."""
    places: list[list[tuple[int, int, Any]]]
    """For each launch: the argument's index, the tensor's, and its descriptor or None."""


class RepeatedCall:
    """An op that is called again and again with tensors of the same form.

    A call makes the launches of the call before, without the op's checks, if its tensors have the
    same dtypes, shapes, strides, devices and alignment, and all else is the same; otherwise it
    runs the op. The op must launch all its kernels through ``launch_kernel``, and do nothing else
    that depends on where its tensors lie.
    """

    def __init__(self) -> None:
        """Know no call yet."""
        self._recorded: _Recorded | None = None  # replaced as a whole: threads may share this

    def __call__(self, op: Callable[[], object], tensors: Tensors, *same: object) -> None:
        """Call ``op``, or repeat its launches with these tensors.

        Args:
            op: calls the op with these tensors; no tensor that it gets may be a copy of one.
            tensors: those that may be others in the next call, at least all that are.
            same: objects that stand for all else that the op gets: a call in which each is the
                very object of the call before may repeat it. They stay alive until the next call.
        """
        if _notes.launches is not None:  # inside another call, which notes the launches
            op()
            return
        forms = [None if tensor is None else _form(tensor) for tensor in tensors]
        recorded = self._recorded
        if (
            recorded is not None
            and len(same) == len(recorded.same)
            and all(one is other for one, other in zip(same, recorded.same, strict=True))
            and forms == recorded.forms
        ):
            _repeat(recorded, tensors)
            return
        launches: list[_Launch] = []
        _notes.launches = launches
        try:
            op()
        finally:
            _notes.launches = None
        self._recorded = _record(launches, tensors, forms, same) if launches else None

    def forget(self) -> None:
        """Know no call any more, and keep nothing alive."""
        self._recorded = None


def _form(tensor: torch.Tensor) -> object:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.data_ptr() % ALIGNMENT == 0,
    )


def _record(
    launches: list[_Launch], tensors: Tensors, forms: list[object], same: tuple[object, ...]
) -> _Recorded | None:
    """Return what repeats the launches; None where one of the tensors is in none of them."""
    found = set()
    bare, places = [], []
    for one in launches:
        arguments, of_launch = list(one.arguments), []
        for place, argument in enumerate(arguments):
            base = getattr(argument, "base", argument)  # of a tensor descriptor
            index = _index(base, tensors)
            if index is not None:
                found.add(index)
                descriptor = None if base is argument else copy(argument)
                if descriptor is not None:
                    descriptor.base = None
                of_launch.append((place, index, descriptor))
                arguments[place] = None
        bare.append(_Launch(one.kernel, one.grid, arguments))
        places.append(of_launch)
    if any(tensor is not None and i not in found for i, tensor in enumerate(tensors)):
        return None
    return _Recorded(same, forms, bare, places)


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
        for place, index, descriptor in places:
            argument: Any = tensors[index]
            if descriptor is not None:
                described = copy(descriptor)
                described.base = argument
                argument = described
            arguments[place] = argument
        one.kernel[one.grid](*arguments)
