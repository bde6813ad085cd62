"""Options declared as dataclass fields: name, type, default and help text are written once."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, get_type_hints

Class = TypeVar("Class", bound=type)
Options = ParamSpec("Options")


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, as one line.

    Python does not keep the docstrings of fields, so this function reads them from the source.
    A class without its source has no docstrings.
    """
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
    """Declare that the parameters of a method are the fields of a dataclass.

    ``inspect`` and type checkers see these parameters, and the method's docstring lists them.
    """

    def declare(method: Callable[..., None]) -> Callable[Concatenate[Any, Options], None]:
        described: Any = method
        self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        described.__signature__ = inspect.Signature([self, *parameters(cls)])
        described.__doc__ = _with_fields(method.__doc__, "Args", cls)
        return method

    cls = cast("type", options)

    return declare
