"""Options declared as dataclass fields: name, type, range, default and help are written once."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeGuard,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from mrv1.errors import short

Class = TypeVar("Class", bound=type)
Options = ParamSpec("Options")


def field_docs(cls: type) -> dict[str, str]:
    """Return each field's docstring as one line, read from the source; none without a source."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            source = inspect.getsource(base)
        except OSError:  # only compiled files are installed
            continue
        (definition,) = ast.parse(textwrap.dedent(source)).body
        for field, text in pairwise(ast.iter_child_nodes(definition)):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ):
                    docs[name] = " ".join(doc.split())
    return docs


@dataclass(frozen=True, slots=True)
class Range:
    """The values that an option takes, beside its type, and None if the type has it.

    Python evaluates a class's annotations where a lambda sees no global name: take a function.
    """

    expected: str
    """Follows "expected" in the error."""
    holds: Callable[[Any], bool]
    """Whether a value, of any type, is in the range."""


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number, and no bool."""
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def integers(
    least: float, most: float = math.inf, expected: str = "", also: tuple[int, ...] = ()
) -> Range:
    """Return the range of the integers from ``least`` to ``most``, and some others."""
    expected = expected or (
        f"an integer >= {least}" if most == math.inf else f"an integer from {least} to {most}"
    )
    return Range(
        expected, lambda value: type(value) is int and (least <= value <= most or value in also)
    )


def numbers(
    least: float,
    most: float,
    expected: str = "",
    also: tuple[float, ...] = (),
    *,
    above: bool = False,
) -> Range:
    """Return the range from ``least``, or from above it, to ``most``, and some other numbers."""
    expected = expected or f"a number from {least:g} to {most:g}"

    def holds(value: object) -> bool:
        if not is_number(value) or (above and value == least):
            return False
        return least <= value <= most or value in also

    return Range(expected, holds)


def instances(kind: type, expected: str) -> Range:
    """Return the range of a class's instances."""
    return Range(expected, lambda value: isinstance(value, kind))


def one_of(choices: tuple[object, ...]) -> Range:
    """Return the range of some texts and integers."""
    return Range(f"one of {choices}", lambda value: type(value) in (str, int) and value in choices)


FLAG = instances(bool, "True or False")


def check_fields(
    options: object, error: Callable[[str], Exception], prefix: str = "", only: str | None = None
) -> None:
    """Raise ``error`` unless a dataclass's fields, or one, are in the ranges that types name."""
    cls: type = type(options)
    for name, takes_none, ranges in _ranges(cls):
        if only not in (None, name):
            continue
        value = getattr(options, name)
        if value is None and takes_none:
            continue
        for each in ranges:
            if not each.holds(value):
                raise error(f"{prefix}{name}: expected {each.expected}, got {short(value)}")


@cache
def _ranges(cls: type) -> tuple[tuple[str, bool, tuple[Range, ...]], ...]:
    """Return name, whether None is a value, and ranges of every field that has ranges."""
    found = []
    for name, kind in get_type_hints(cls, include_extras=True).items():
        parts = tuple(_parts(kind))
        ranges = tuple(part for part in parts if isinstance(part, Range))
        if not ranges and bool in parts:
            ranges = (FLAG,)
        elif not ranges:
            ranges = tuple(one_of(get_args(part)) for part in parts if get_origin(part) is Literal)
        if ranges:
            found.append((name, NoneType in parts, ranges))
    return tuple(found)


def _parts(kind: object) -> Iterator[object]:
    """Yield the types of a union, and the ranges beside them."""
    if get_origin(kind) is Literal or not get_args(kind):
        yield kind
    elif get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        yield from _parts(inner)
        yield from notes
    elif get_origin(kind) in (UnionType, Union):
        for part in get_args(kind):
            yield from _parts(part)


def env_fields(cls: type) -> set[str]:
    """Return the fields with a default factory, such as a default from the environment."""
    return {field.name for field in fields(cls) if field.default_factory is not MISSING}


def parameters(cls: type) -> list[inspect.Parameter]:
    """Return a dataclass' constructor parameters; a default factory is shown as default None."""
    types, made = get_type_hints(cls), env_fields(cls)
    return [
        each.replace(default=None, annotation=types[each.name] | None)
        if each.name in made
        else each.replace(annotation=types[each.name])
        for each in list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
    ]


def _with_fields(docstring: str | None, section: str, cls: type) -> str:
    """Return the docstring, followed by a section that lists the fields of a dataclass."""
    entries = (
        textwrap.fill(f"{name}: {doc}", 95, initial_indent="    ", subsequent_indent="        ")
        for name, doc in field_docs(cls).items()
    )
    return "\n".join([inspect.cleandoc(docstring or ""), "", f"{section}:", *entries])


def documented(cls: Class) -> Class:
    """List the fields of a dataclass in its docstring."""
    described: Any = cls
    described.__doc__ = _with_fields(cls.__doc__, "Attributes", cls)
    described.__signature__ = inspect.Signature(parameters(cls))
    return cls


def takes(
    options: Callable[Options, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Options], None]]:
    """Let a dataclass's fields be a method's parameters, for ``inspect``, types and docstring."""

    def declare(method: Callable[..., None]) -> Callable[Concatenate[Any, Options], None]:
        described: Any = method
        self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        described.__signature__ = inspect.Signature([self, *parameters(cls)])
        described.__doc__ = _with_fields(method.__doc__, "Args", cls)
        return method

    cls = cast("type", options)

    return declare
