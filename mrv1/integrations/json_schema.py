"""JSON schemas for llguidance: a keyword is enforced, rewritten, or refused by name and place.

llguidance compiles most of JSON Schema 2020-12. This module rewrites what other drafts spell, and
llguidance enforces, in another way, and refuses what it would leave out or cut short. Keywords
unknown to JSON Schema have no effect, as the specification asks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from mrv1.errors import RequestError, short

Node = Any
"""A schema: a dict, or a bool; or what a mistake has put in its place."""

_ONE, _MANY, _NAMED = (
    ("additionalProperties", "items"),
    ("allOf", "anyOf", "oneOf", "prefixItems"),
    ("properties", "patternProperties", "$defs", "definitions"),
)
"""Keywords with one schema, with a list of schemas, and with a dict of schemas."""

_VACUOUS: dict[str, tuple[object, ...]] = {
    "not": (False,), "uniqueItems": (False,), "contains": (), "minContains": (),
    "maxContains": (), "if": (), "then": (), "else": (), "dependentRequired": ({},),
    "dependentSchemas": ({},), "dependencies": ({},), "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}), "unevaluatedProperties": (True, {}),
    "$dynamicRef": (), "$recursiveRef": (),
}  # fmt: skip
"""Keywords that are not enforced -> values with which they forbid nothing."""

_PARTNERS = {
    "minContains": {"contains"}, "maxContains": {"contains"},
    "if": {"then", "else"}, "then": {"if"}, "else": {"if"},
}  # fmt: skip
"""Keywords that are not enforced -> keywords without which they forbid nothing."""

_FORMATS = {"duration", "email", "ipv4", "ipv6", "uuid", "uri"}
_OTHER_FORMATS = {
    "idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template",
    "json-pointer", "relative-json-pointer", "regex",
}  # fmt: skip
"""Formats of JSON Schema that are not enforced; a name of neither set says nothing."""

_DAY = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]"
    "|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])"
    "|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3])(?::[0-5][0-9]){2}(?:\.[0-9]+)?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_OWN_FORMATS: dict[str, list[dict[str, object]]] = {
    "date": [{"pattern": f"^{_DAY}$"}, {"pattern": "^0*[1-9]"}],
    "time": [{"pattern": f"^{_TIME}$"}],
    "date-time": [{"pattern": f"^{_DAY}T{_TIME}$"}, {"pattern": "^0*[1-9]"}],
    "hostname": [{"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$"}, {"maxLength": 253}],
}
"""Formats for which llguidance takes invalid texts, such as 2023-02-29 -> what has to hold."""

_CONTROL = r"[\x00-\x07\x0b\x0e-\x1f\x7f]"
"""Control characters, which no output has; others have a short escape."""
_CONTROL_ESCAPE = (
    r"\\(?:[av]|(?i:(?:x|u00|U000000|[xu]\{0*)(?:0[0-7bef]|1[0-9a-f]|7f)|[xu]\{0*[0-7bef]\}))"
)
_PATTERN_PART = re.compile(
    rf"(\[(?:{_CONTROL}|{_CONTROL_ESCAPE})\]|{_CONTROL}|{_CONTROL_ESCAPE})"
    r"|\[\^?\]?(?:[^\]\\]|\\.)*\]|\\.|.",
    re.S,
)
"""A control character, alone or in a set of its own; any other set or character."""

_NESTED_SET = re.compile(r"(?<!\\)(?:\\\\)*\[\^?\]?(?:[^\]\\]|\\.)*?(?:\[|&&|--|~~)", re.S)
"""What llguidance reads as operations on sets of characters, and JSON Schema as characters."""

_DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20(19-09|20-12))/schema#?")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ENFORCED = {
    *_ONE, *_MANY, *_NAMED, *_BOUNDS, "$ref", "type", "const", "enum", "minItems", "maxItems",
    "required", "minProperties", "maxProperties", "minLength", "maxLength", "pattern", "format",
}  # fmt: skip
_TYPES = {
    type(None): "null", bool: "boolean", int: "number", float: "number", str: "string",
    list: "array", dict: "object",
}  # fmt: skip


class JsonSchema:
    """A schema whose every keyword is enforced; RequestError if one cannot be, or it is no JSON.

    Its values are those of ``schema``, less objects without the property that OpenAPI's
    ``discriminator`` names. ``closed``: no unlisted properties unless the schema says so.
    """

    def __init__(self, schema: object, *, closed: bool = False) -> None:
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            root = json.loads(text)
            json.dumps(root, allow_nan=False)  # raises at NaN and 1e999
            self.root = {"allOf": [root]} if isinstance(root, bool) else root
            self._closed = closed
            self._referenced: set[str] = set()
            self._seen: set[int] = set()
            self.places: list[tuple[str, dict[str, Any]]] = []
            """Every dict of the schema that is a schema, with its place."""
            self._visit(self.root, "#")
            _keep(self.root, _ENFORCED | self._referenced)
        except RequestError:
            raise
        except (TypeError, ValueError) as error:
            raise RequestError(f"json: expected a JSON schema, got {error}") from error
        except RecursionError as error:
            raise RequestError("json: expected a JSON schema of less depth") from error

    def probes(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield (what, place, schema) of parts that may not compile: keywords, and then nodes."""
        for place, node in self.places:
            shallow = node.copy()
            shallow.pop("$ref", None)
            for keyword in node.keys() & {*_ONE, *_MANY, *_NAMED}:
                inner: Any = node[keyword]
                if keyword in _NAMED:
                    shallow[keyword] = dict.fromkeys(inner, True)
                else:
                    shallow[keyword] = [True] * len(inner) if keyword in _MANY else True
            kinds = {"type": node["type"]} if "type" in node else {}
            for keyword, value in shallow.items():
                yield repr(keyword), place, kinds | {keyword: value}
            yield "a schema", place, shallow

    def _visit(self, node: Node, place: str) -> None:
        if isinstance(node, bool) or id(node) in self._seen:
            return
        if not isinstance(node, dict):
            raise RequestError(
                f"json: expected an object, true or false at {place!r}, got {short(node)}"
            )
        self._seen.add(id(node))
        self.places.append((place, node))
        self._rewrite(node, place)
        self._check(node, place)
        for keyword in _ONE:
            if keyword in node:
                self._visit(node[keyword], f"{place}/{keyword}")
        for keyword in (*_MANY, *_NAMED):
            kind = list if keyword in _MANY else dict
            inner = node.get(keyword, kind())
            if not isinstance(inner, kind):
                raise _refused(keyword, place, f"is {short(inner)}")
            for name, each in enumerate(inner) if isinstance(inner, list) else inner.items():
                self._visit(each, f"{place}/{keyword}/{name}")
        if "$ref" in node:
            self._visit(self._target(node["$ref"], place), node["$ref"])
        for one, other in combinations(node.get("oneOf", ()), 2):
            if not self._exclude(one, other):
                raise _refused("oneOf", place, "has alternatives that may both be valid")

    def _rewrite(self, node: dict[str, Any], place: str) -> None:
        """Say in place, with other keywords, what llguidance does not read as written."""
        if place == "#":
            node.pop("$id", None)
        if _DRAFT.fullmatch(str(node.get("$schema", ""))):
            del node["$schema"]
        if isinstance(node.get("items"), list):  # before 2020-12
            node["prefixItems"] = node.pop("items")
            if "additionalItems" in node:
                node["items"] = node["additionalItems"]
        node.pop("additionalItems", None)
        for keyword in ("minimum", "maximum"):  # draft 4, and OpenAPI 3.0
            exclusive = f"exclusive{keyword.capitalize()}"
            if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and keyword in node:
                node[exclusive] = node.pop(keyword)
            _include_bound(node, keyword, exclusive)
        if self._closed and node.keys() & {"properties", "patternProperties"}:
            node.setdefault("additionalProperties", False)
        if "propertyNames" in node:
            self._name_properties(node)
        tag = node.get("discriminator")
        tag = tag.get("propertyName") if isinstance(tag, dict) else None
        for each in node.get("oneOf", ()) if isinstance(tag, str) else ():
            for part in self._parts(each):
                if tag in part.get("properties", ()):
                    part["required"] = [*{**dict.fromkeys(part.get("required", ())), tag: None}]
        for keyword in node.keys() & _VACUOUS.keys():
            if (
                node[keyword] in _VACUOUS[keyword]
                or not _PARTNERS.get(keyword, node) & node.keys()
            ):
                del node[keyword]

    def _name_properties(self, node: dict[str, Any]) -> None:
        """Turn names from a list, or of one pattern, into properties."""
        names = [each for part in self._parts(node["propertyNames"]) for each in part.items()]
        given = dict(each for each in names if each[0] not in ("$ref", "title", "description"))
        given |= {"enum": [given.pop("const")]} if "const" in given else {}
        is_text = given.pop("type", "string") == "string"
        if not is_text or len(given) != 1 or node.keys() & {"properties", "patternProperties"}:
            return
        values = node.get("additionalProperties", True)
        if isinstance(given.get("enum"), list):
            node["properties"] = {each: values for each in given["enum"] if isinstance(each, str)}
        elif "pattern" in given:
            node["patternProperties"] = {given["pattern"]: values}
        else:
            return
        node["additionalProperties"] = False
        del node["propertyNames"]

    def _check(self, node: dict[str, Any], place: str) -> None:
        for keyword, value in node.items():
            if keyword in _VACUOUS:
                raise _refused(keyword, place)
            if keyword in ("$schema", "$id"):
                raise _refused(keyword, place, f"is {short(value)}")
            if keyword in ("const", "enum", *_BOUNDS) and _is_inexact(value):
                raise _refused(keyword, place, "has a number of more than 15 digits")
            text = "".join(_texts(value)) if keyword in ("const", "enum", "required") else ""
            if re.search(_CONTROL, text):
                raise _refused(keyword, place, "has a control character")
        for keyword in node.keys() & {"pattern", "patternProperties"}:
            patterns = node[keyword] if keyword != "pattern" else [node[keyword]]
            for pattern in map(str, patterns):
                if _NESTED_SET.search(pattern):
                    raise _refused(keyword, place, "has a set of characters within another")
                if any(part[1] for part in _PATTERN_PART.finditer(pattern)):
                    raise _refused(keyword, place, "has a control character")
        if node.get("format") in _OTHER_FORMATS:
            raise _refused("format", place, f"is {node['format']!r}")
        if node.get("format") in _OWN_FORMATS:
            own = [each.copy() for each in _OWN_FORMATS[node.pop("format")]]
            node["allOf"] = [*node.get("allOf", ()), *own]
        elif node.get("format") not in _FORMATS:
            node.pop("format", None)
        if place != "#":
            _keep(node, _ENFORCED)
        least, required = node.get("minProperties"), node.get("required", ())
        # llguidance does not see that two undeclared names are equal.
        if isinstance(least, int | float) and least > len({*map(str, required)}) + 1:
            raise _refused("minProperties", place, "counts names that may be equal")

    def _target(self, reference: object, place: str) -> Node:
        node: Node = self.root
        if not isinstance(reference, str) or (reference + "/")[:2] != "#/":
            raise _refused("$ref", place, f"is {short(reference)}, outside of the schema")
        try:
            for part in reference.split("/")[1:]:
                self._referenced |= {part} if node is self.root else set()
                name = unquote(part).replace("~1", "/").replace("~0", "~")
                node = node[int(name)] if isinstance(node, list) else node[name]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise _refused("$ref", place, f"is {reference!r}, which is not there") from error
        return node

    def _parts(self, node: Node) -> list[dict[str, Any]]:
        """Return schemas that all hold where ``node`` holds: itself, its references, its allOf."""
        parts: list[dict[str, Any]] = []
        todo = [node]
        while todo:
            part = todo.pop()
            if isinstance(part, dict) and not any(part is each for each in parts):
                parts.append(part)
                todo += part["allOf"] if isinstance(part.get("allOf"), list) else []
                todo += [self._target(part["$ref"], "oneOf")] if "$ref" in part else []
        return parts

    def _exclude(self, one: Node, other: Node) -> bool:
        """Return whether it is sure that no value is valid for both schemas."""
        if one is False or other is False:
            return True
        return any(
            self._exclude_here(first, second)
            for first in self._parts(one)
            for second in self._parts(other)
        )

    def _exclude_here(self, first: dict[str, Any], second: dict[str, Any]) -> bool:
        (kinds, values), (other_kinds, other_values) = _kinds(first), _kinds(second)
        if not kinds & other_kinds:
            return True
        if values is not None and other_values is not None:
            return not values & other_values
        if {"object"} not in (kinds, other_kinds):
            return False
        if _forbids_a_name(first, second) or _forbids_a_name(second, first):
            return True
        names = {*first.get("required", ()), *second.get("required", ())}
        mine, others = first.get("properties", {}), second.get("properties", {})
        return any(
            self._exclude(mine[name], others[name]) for name in names & mine.keys() & others.keys()
        )


def _forbids_a_name(closed: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether one schema requires a name that another, closed one does not list."""
    is_closed = closed.get("additionalProperties") is False and "patternProperties" not in closed
    return is_closed and not {*other.get("required", ())} <= {*closed.get("properties", ())}


def _kinds(node: dict[str, Any]) -> tuple[set[str], set[tuple[str, object]] | None]:
    """Return types that a value may have, and values if they are listed and can be compared."""
    given = node.get("type", [*_TYPES.values()])
    kinds = {given} if isinstance(given, str) else {*given}
    kinds = {"number" if kind == "integer" else kind for kind in kinds}
    if "const" not in node and "enum" not in node:
        return kinds, None
    values = [node["const"]] if "const" in node else node["enum"]
    listed = [(_TYPES[type(value)], value) for value in values]
    kinds &= {kind for kind, _ in listed}
    if kinds & {"array", "object"}:
        return kinds, None
    return kinds, {(kind, value) for kind, value in listed if kind in kinds}


def _include_bound(node: dict[str, Any], keyword: str, exclusive: str) -> None:
    """Move an exclusive whole bound by the last of 15 digits: llguidance takes 5 beyond 5."""
    bound, other = node.get(exclusive), node.get(keyword)
    if not isinstance(bound, int | float) or not isinstance(other, int | float | None):
        return
    if not _is_inexact(bound) and bound == int(bound):
        step = Decimal(1).scaleb(len(str(abs(int(bound)))) - 15)
        is_least, choose = keyword == "minimum", max if keyword == "minimum" else min
        moved = float(Decimal(int(bound)) + (step if is_least else -step))
        node[keyword] = moved if other is None else choose(moved, other)
        del node[exclusive]


def _is_inexact(value: object) -> bool:
    """Return whether llguidance, which rounds to float64, may read a number as another one."""
    if isinstance(value, dict | list):
        return any(map(_is_inexact, value.values() if isinstance(value, dict) else value))
    if isinstance(value, float):
        _, digits, exponent = Decimal(repr(value)).as_tuple()
        return len(digits) > 15 or not isinstance(exponent, int) or abs(exponent) > 22
    return isinstance(value, int) and abs(value) > 2**53


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(each)


def _keep(node: dict[str, Any], keywords: set[str]) -> None:
    """Remove annotations, and names that JSON Schema does not know."""
    for keyword in node.keys() - keywords:
        del node[keyword]


def _refused(keyword: str, place: str, reason: str = "") -> RequestError:
    reason = reason and f", which {reason}"
    return RequestError(
        f"json: expected keywords that can be enforced, got {keyword!r} at {place!r}{reason}"
    )
