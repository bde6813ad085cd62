"""JSON schemas: jsonschema judges what a grammar accepts; what is not enforced is refused."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from transformers import AutoTokenizer

from mrv1 import RequestError
from mrv1.config import checkpoint_dir

pytest.importorskip("llguidance", reason="not run: needs the extra 'structured'")

from mrv1.integrations.llguidance import LLGuidance, LLGuidanceGrammar


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(checkpoint_dir("tiny")))


@pytest.fixture(scope="module")
def grammars(tokenizer) -> LLGuidance:
    return LLGuidance(tokenizer, len(tokenizer))


def accepts(tokenizer, grammar: LLGuidanceGrammar, text: str) -> bool:
    """Whether a grammar accepts a text, cut into tokens as the tokenizer does, and its end."""
    matcher = grammar.matcher()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    return all(map(matcher.accept, [*ids, tokenizer.eos_token_id]))


def drawn(tokenizer, grammar: LLGuidanceGrammar, rng: random.Random) -> str | None:
    """Return a text of allowed tokens, most of them short; None = it has not ended."""
    matcher, ids = grammar.matcher(), []
    mask = np.zeros((len(tokenizer) + 31) // 32, dtype=np.int32)
    while len(ids) < 150:
        matcher.fill_bitmask(mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        ends = [token for token in allowed if tokenizer.convert_ids_to_tokens(token) in CLOSING]
        token = rng.choice(ends if ends and rng.random() < 0.5 else allowed)
        assert matcher.accept(token)
        if matcher.is_finished():
            return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        ids.append(token)
    return None


CLOSING = {"<|endoftext|>", '"', "}", "]", ":", ",", "0", "1", "t", "n"}
NAMES = ["a", "b", "xa", "y", 'k"\n']
NUMBERS = [0, 1, -1, 2, 3, 7, 10, 0.5, 1.5, -2.25]
TEXTS = ["", "a", "ab", "abc", "xa", 'b"\n', "\u00e9\U0001f60a", "7"]


def a_value(rng: random.Random, depth: int = 2) -> object:
    kind = rng.randrange(8 if depth else 6)
    if kind > 5:
        values = [a_value(rng, depth - 1) for _ in range(rng.randrange(4))]
        return values if kind == 6 else dict(zip(NAMES, values, strict=False))
    return rng.choice([[None], [False, True], NUMBERS, TEXTS][kind // 2 if kind > 1 else kind])


def a_schema(rng: random.Random, depth: int = 3) -> Any:
    """Return a schema with some keywords, in any order."""
    if depth < 0 or rng.random() < 0.08:
        return rng.random() < 0.7
    inner = lambda: a_schema(rng, depth - 1)  # noqa: E731
    inners = lambda: [inner() for _ in range(rng.randrange(1, 3))]  # noqa: E731
    kinds = ["null", "boolean", "integer", "number", "string", "string", "array", "object"] * 2
    kinds += ["object"]
    rare = {
        "const": lambda: a_value(rng), "enum": lambda: [a_value(rng) for _ in range(3)],
        "allOf": inners, "anyOf": inners, "oneOf": inners, "not": inner, "if": inner,
        "then": inner, "uniqueItems": lambda: rng.random() < 0.5, "contains": inner,
        "dependentRequired": lambda: {"a": ["b"]}, "x-other": inner, "title": lambda: "t",
        "propertyNames": lambda: rng.choice([{"enum": ["a", "b"]}, {"pattern": "^x"}]),
        "minProperties": lambda: rng.randrange(3), "maxProperties": lambda: rng.randrange(3),
        "patternProperties": lambda: {"^x": inner()}, "$ref": lambda: "#/$defs/d",
    }  # fmt: skip
    keywords = {
        "type": lambda: rng.choice(kinds), "minimum": lambda: rng.choice(NUMBERS),
        "exclusiveMinimum": lambda: rng.choice(NUMBERS),
        "exclusiveMaximum": lambda: rng.choice(NUMBERS), "minLength": lambda: rng.randrange(3),
        "multipleOf": lambda: rng.choice([2, 0.5]), "maxLength": lambda: rng.randrange(5),
        "pattern": lambda: rng.choice(["^a", "b$", "^[a-c]*$", "a|^b$", "^.{2}$"]),
        "items": inner, "prefixItems": inners, "minItems": lambda: rng.randrange(3),
        "maxItems": lambda: rng.randrange(4), "required": lambda: rng.sample(["a", "b", "z"], 1),
        "properties": lambda: {name: inner() for name in rng.sample(NAMES, 2)},
        "additionalProperties": inner,
    }  # fmt: skip
    chosen = rng.sample([*keywords], 3) + [name for name in rare if rng.random() < 0.04]
    chosen = ["type"] * (rng.random() < 0.7) + rng.sample(chosen, len(chosen))
    return {name: (keywords | rare)[name]() for name in dict.fromkeys(chosen)}


def check_a_random_schema(tokenizer, grammars: LLGuidance, seed: int) -> tuple[int, int]:
    """Compare a grammar with jsonschema; return how many of its texts, and of values, were."""
    rng = random.Random(seed)
    schema = {"allOf": [a_schema(rng)], "$defs": {"d": a_schema(rng, 1)}}
    if '"$ref"' in json.dumps(schema["$defs"]):
        return 0, 0
    validator = Draft202012Validator(schema)
    try:
        grammar = grammars.json_schema(schema)
    except RequestError:
        return 0, 0  # nothing is promised; test_what_is_not_enforced_is_refused says for what
    num_texts = num_values = 0
    words = {*re.findall(r'"\w+"', json.dumps(schema))}
    for _ in range(2):
        text = drawn(tokenizer, grammar, rng)
        if text is not None:
            num_texts += 1
            assert validator.is_valid(json.loads(text)), (text, schema)
    for _ in range(12):
        value = a_value(rng)
        text = json.dumps(value, ensure_ascii=False)
        # Listed properties come first, in the order of the list: another order is refused.
        is_ordered = "{" not in text or not {'"required"', '"properties"'} & words
        if is_ordered and validator.is_valid(value):
            num_values += 1
            assert accepts(tokenizer, grammar, text), (text, schema)
    return num_texts, num_values


def test_jsonschema_judges_random_schemas_and_values(tokenizer, grammars):
    counts = [check_a_random_schema(tokenizer, grammars, seed) for seed in range(200)]
    assert np.sum(counts, axis=0).min() >= 100


@pytest.mark.full
def test_jsonschema_judges_many_random_schemas_and_values(tokenizer, grammars):
    counts = [check_a_random_schema(tokenizer, grammars, seed) for seed in range(200, 1100)]
    assert np.sum(counts, axis=0).min() >= 500


INTEGER, CLOSED = {"type": "integer"}, {"additionalProperties": False}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": INTEGER}}
DOG = {
    "type": "object", "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}},
    "required": ["kind"],
}  # fmt: skip
PETS = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}
TAG = {"discriminator": {"propertyName": "kind"}}
VARIANT = {"type": "object", "properties": {"Say": INTEGER}, "required": ["Say"]} | CLOSED
TREE = {
    "oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/node"}],
    "$defs": {
        "leaf": {
            "type": "object", "properties": {"op": {"const": "leaf"}, "n": {"type": "number"}},
            "required": ["op", "n"], "additionalProperties": False,
        },
        "node": {
            "type": "object", "properties": {"op": {"const": "add"}, "of": {"$ref": "#"}},
            "required": ["op", "of"], "additionalProperties": False,
        },
    },
    "discriminator": {"propertyName": "op"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"minimum": 5}, ["5", '"a"', "[1]"], ["1"]),
        ({"maxLength": 2}, ['"\\"\\n"', '"\u00e9\U0001f60a"', "[]"], ['"abc"']),
        ({"type": "string", "pattern": "^a+$", "maxLength": 2}, ['"aa"'], ['"aaa"', '"b"']),
        ({"enum": ["a", 1], "type": "string"}, ['"a"'], ["1"]),
        ({"const": 0.1}, ["0.1"], ["0.10000000000000001", "0.2"]),
        ({"enum": [{"b": 1, "a": [None]}, 2**53]}, ['{"b": 1, "a": [null]}'], ["{}"]),
        ({"$defs": {"n": INTEGER}, "$ref": "#/$defs/n", "minimum": 5}, ["6"], ["1", '"a"']),
        (
            {"components": {"schemas": {"a/b": INTEGER}}, "$ref": "#/components/schemas/a~1b"},
            ["1"], ['"a"'],
        ),
        (
            {"allOf": [{"required": ["b"]}, {"properties": {"a": INTEGER}}, {"type": "object"}]},
            ['{"a": 1, "b": 2}', '{"b": 2}'], ["12", '{"a": 1}', '{"a": "x", "b": 2}'],
        ),
        ({"anyOf": [INTEGER, {"type": "string"}], "maximum": 3}, ["3", '"a"'], ["4", "null"]),
        ({"properties": {"a": INTEGER}}, ['{"a": 1}', "{}"], ['{"a": ""}', '{"\\u0061": ""}']),
        (
            {"type": "object", "properties": {"a": INTEGER}, "required": ["b"]},
            ['{"a": 1, "b": []}', '{"b": 1}'], ['{"a": 1}', "{}"],
        ),
        (
            {"type": "object", "patternProperties": {"^x": INTEGER}} | CLOSED,
            ['{"xa": 1}', "{}"], ['{"xa": ""}', '{"y": 1}'],
        ),
        (
            {"type": "object", "additionalProperties": INTEGER,
             "propertyNames": {"enum": ["a", "b"]}},
            ['{"a": 1, "b": 2}', "{}"], ['{"c": 1}', '{"a": ""}'],
        ),
        ({"minProperties": 1, "type": "object"}, ['{"a": 1}'], ["{}"]),
        ({"prefixItems": [INTEGER], "items": False}, ["[1]", "[]", "3"], ["[1, 2]", '["a"]']),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "items": [INTEGER],
             "additionalItems": False, "type": "array", "minItems": 1},
            ["[1]"], ["[1, 2]", '["a"]', "[]"],
        ),
        (
            {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3,
             "exclusiveMinimum": True, "type": "integer"},
            ["4"], ["3"],
        ),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.25", "0.5"], ["0", "-0", "0.0"]),
        ({"exclusiveMaximum": -3, "minimum": -3.5}, ["-3.25", "-3.5"], ["-3", "-3.0"]),
        ({"type": "integer", "exclusiveMinimum": 3, "minimum": 5}, ["5"], ["4"]),
        ({"type": "number", "multipleOf": 0.5}, ["1.5", "2"], ["1.25"]),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-02-30"', '"a"']),
        (
            {"format": "date"}, ['"2000-02-29"', "3"],
            ['"2023-02-29"', '"2100-02-29"', '"0000-01-01"'],
        ),
        (
            {"format": "date-time", "pattern": "^20"},
            ['"2024-02-29T23:59:59Z"', '"2024-12-31T00:00:00.5+05:30"'],
            ['"2023-02-29T00:00:00Z"', '"2016-12-31T22:58:60Z"', '"1999-12-31T23:59:59Z"'],
        ),
        ({"format": "time"}, ['"23:59:59Z"'], ['"24:00:00Z"', '"22:58:60Z"']),
        (
            {"format": "hostname"}, ['"a-b.c"', json.dumps(".".join(["a" * 63] * 3))],
            ['"-a"', '"a-"', '"a..b"', json.dumps(".".join(["a" * 63] * 4))],
        ),
        ({"enum": ["a\t\b\f", "\x80"]}, ['"a\\t\\b\\f"', '"\x80"'], ['"a"']),
        ({"pattern": "^[^\\x00-\\x1f]\\\\a$"}, ['"a\\\\a"'], ['"\\\\a"', '"\\n\\\\a"']),
        ({"type": "integer", "format": "int32"}, ["1"], ["1.5"]),
        ({"type": "array", "uniqueItems": False, "then": {}, "not": False}, ["[1, 1]"], ["1"]),
        (
            {"type": "integer", "title": "t", "deprecated": True, "default": "x", "examples": [3],
             "$comment": "c", "nullable": True, "x-guidance": {"lenient": True}},
            ["1"], ["null"],
        ),
        (
            PETS | TAG | {"$defs": {"cat": CAT, "dog": DOG}},
            ['{"kind": "cat", "lives": 9}', '{"kind": "dog"}'],
            ['{"kind": "bird"}', '{"kind": "cat", "lives": "9"}', '{"lives": 9}'],
        ),
        (TREE, ['{"op": "add", "of": {"op": "leaf", "n": 1.5}}'], ['{"op": "add", "n": 1}']),
        ({"oneOf": [INTEGER, {"type": "string"}, {"const": None}]}, ["1", "null"], ["true"]),
        (
            {"oneOf": [{"const": "Quit"}, {"$ref": "#/$defs/move"}, VARIANT]}
            | {"$defs": {"move": {"type": "object", "required": ["Move"]}}},
            ['"Quit"', '{"Say": 1}', '{"Move": {"x": 1}}'], ['{}', '{"Say": 1, "Move": 2}'],
        ),
        (True, ["1"], []),
    ],
)  # fmt: skip
def test_keywords_are_enforced(tokenizer, grammars, schema, valid, invalid):
    grammar = grammars.json_schema(schema)
    assert [text for text in valid if not accepts(tokenizer, grammar, text)] == []
    assert [text for text in invalid if accepts(tokenizer, grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "keyword", "place"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "#"),
        ({"items": {"contains": {"const": 3}}}, "contains", "#/items"),
        ({"properties": {"a": {"not": {"const": "a"}}}}, "not", "#/properties/a"),
        ({"anyOf": [{}, {"if": {}, "then": False}]}, "if", "#/anyOf/1"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired", "#"),
        ({"dependentSchemas": {"a": {}}}, "dependentSchemas", "#"),
        ({"dependencies": {"a": ["b"]}}, "dependencies", "#"),
        ({"propertyNames": {"maxLength": 2}}, "propertyNames", "#"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties", "#"),
        ({"unevaluatedItems": False}, "unevaluatedItems", "#"),
        ({"$dynamicRef": "#a"}, "$dynamicRef", "#"),
        ({"$ref": "https://example.org/x.json"}, "$ref", "#"),
        ({"items": {"$ref": "#/$defs/a"}}, "$ref", "#/items"),
        ({"$ref": "#/a/b", "a": {"b": {"not": {}}}}, "not", "#/a/b"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "$schema", "#"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf", "#"),
        (PETS | {"$defs": {"cat": CAT, "dog": CAT}}, "oneOf", "#"),
        ({"oneOf": [VARIANT, VARIANT | {"required": []}]}, "oneOf", "#"),
        (
            {"oneOf": [VARIANT | {"patternProperties": {"^x": {}}}, {"required": ["x"]}]},
            "oneOf",
            "#",
        ),
        ({"const": 2**53 + 1}, "const", "#"),
        ({"items": {"const": 3.6459190109277966}}, "const", "#/items"),
        ({"minimum": 5e-324}, "minimum", "#"),
        ({"enum": [{"a": [2**60]}]}, "enum", "#"),
        ({"type": "integer", "maximum": 2**60}, "maximum", "#"),
        ({"type": "object", "minProperties": 2}, "minProperties", "#"),
        ({"type": "string", "format": "regex"}, "format", "#"),
        ({"items": {"pattern": "(?=a)b"}}, "pattern", "#/items"),
        ({"pattern": "^[a[:alpha:]]$"}, "pattern", "#"),
        ({"patternProperties": {"^a": {}, "b$": False}}, "patternProperties", "#"),
        ({"properties": {"a": {"type": "set"}}}, "type", "#/properties/a"),
        ({"const": "a\x00b"}, "const", "#"),
        ({"enum": ["b", [{"a\x7f": 1}]]}, "enum", "#"),
        ({"items": {"required": ["\x1f"]}}, "required", "#/items"),
        ({"pattern": "^a\x1b"}, "pattern", "#"),
        ({"pattern": r"^\x1B\[0m$"}, "pattern", "#"),
        ({"pattern": r"[\u000b]"}, "pattern", "#"),
        ({"patternProperties": {r"\x{7}|\\v": {}}}, "patternProperties", "#"),
        ({"minLength": "3"}, "minLength", "#"),
    ],
)
def test_what_is_not_enforced_is_refused_by_name_and_place(grammars, schema, keyword, place):
    with pytest.raises(RequestError, match=r"^json: expected ") as error:
        grammars.json_schema(schema)
    assert f"{keyword!r} at {place!r}" in str(error.value)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"const": NaN}', "a JSON schema, got Out of range float"),
        ('{"minimum": 1e999}', "a JSON schema, got Out of range float"),
        ("[]", "an object, true or false at '#', got "),
        ({"properties": {"a": 3}}, "an object, true or false at '#/properties/a', got 3"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, r"text .*minimum \(3\) is greater.*"),
        ({"required": ["a"], "properties": {"a": False}, "type": "object"}, ".*'a' is unsatis"),
        (False, "text that llguidance compiles, got Unsatisfiable schema: schema is false"),
        ("[" * 100_000, "a JSON schema of less depth"),
    ],
)
def test_a_schema_that_is_none_or_has_no_value_is_refused(grammars, schema, message):
    with pytest.raises(RequestError, match=f"^json: expected {message}"):
        grammars.json_schema(schema)


def test_objects_are_closed_on_demand(tokenizer, grammars):
    schema = {"properties": {"a": {"properties": {"b": {}}}, "c": {"type": "object"}}}
    closed = grammars.json_schema(schema, additional_properties=False)
    assert accepts(tokenizer, closed, '{"a": {"b": 1}, "c": {"d": 1}}')
    for text in ('{"a": {"b": 1, "x": 1}}', '{"x": 1}'):
        assert not accepts(tokenizer, closed, text)
        assert accepts(tokenizer, grammars.json_schema(schema), text)
    assert schema == {"properties": {"a": {"properties": {"b": {}}}, "c": {"type": "object"}}}


TABLE = {"a": [1, {"b": None}], "c": "x y"}


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        (None, [json.dumps(TABLE, indent=each) for each in (None, 0, 2, 4)], ['{"a":  1}']),
        (None, ['{\r\n\t"a": 1}', "{" + "\n" + " " * 20 + "}"], ["{\n\n}", "{" + "\n" + " " * 21]),
        ("", [json.dumps(TABLE, separators=(",", ":"))], ['{"a": 1}', '{"a":1, "b":2}', "{ }"]),
        ("[ ]{0,3}", ['{"a":   1}'], ['{"a":    1}', "{\n}"]),
    ],
)
def test_whitespace_is_bounded(tokenizer, grammars, pattern, valid, invalid):
    options = {} if pattern is None else {"whitespace_pattern": pattern}
    grammar = grammars.json_schema({"type": "object"}, **options)
    assert [text for text in valid if not accepts(tokenizer, grammar, text)] == []
    assert [text for text in invalid if accepts(tokenizer, grammar, text)] == []


def test_an_llguidance_that_does_not_bound_whitespace_takes_no_schema(grammars, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.7.6")
    with pytest.raises(RequestError, match=r"json: expected llguidance 1\.8 or later"):
        grammars.json_schema({})
    grammars.regex("a")
