"""Compare llguidance with xgrammar: which keywords of a JSON schema hold, and what they cost.

python -m benchmarks.grammars TEKKEN.json RESULT.json    a minute of one CPU core

Needs both packages, and a vocabulary in tekken's format (the package mistral-common has one of
131,072 tokens in its folder ``data``). Writes which keywords are enforced (a forbidden text is
not accepted), refused (an error) or ignored (the text is accepted), and times of the process.
"""

from __future__ import annotations

import argparse
import base64
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import llguidance
import numpy as np
import torch
import xgrammar

from mrv1.provenance import provenance, version_of

Compile = Callable[[Any], tuple[Any, Any]]
"""From a schema to the functions accept(token) and fill(mask)."""

BLANKS = r" |\r?\n[ \t]{0,20}"
LIST = {"type": "array", "items": {"type": "integer"}}
ANY = {"type": "object", "properties": {"a": {}, "b": {}}}
KEYWORDS: dict[str, tuple[dict[str, Any], str]] = {
    "allOf": ({"allOf": [{"type": "object"}, {"required": ["b"]}]}, "{}"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"minimum": 0}]}, "1"),
    "not": ({"type": "string", "not": {"const": "a"}}, '"a"'),
    "if": (ANY | {"if": {}, "then": {"required": ["b"]}}, "{}"),
    "uniqueItems": (LIST | {"uniqueItems": True}, "[7,7]"),
    "contains": (LIST | {"contains": {"const": 3}}, "[1]"),
    "dependentRequired": (ANY | {"dependentRequired": {"a": ["b"]}}, '{"a":1}'),
    "required, undeclared": ({"type": "object", "properties": {}, "required": ["b"]}, "{}"),
    "minimum without type": ({"minimum": 5}, "1"),
    "$ref and minimum": ({"$defs": {"n": {}}, "$ref": "#/$defs/n", "minimum": 5}, "1"),
    "external $ref": ({"$ref": "https://example.org/x.json"}, "1"),
    "pattern and maxLength": ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaaa"'),
    "enum and type": ({"type": "string", "enum": ["a", 1]}, "1"),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, "4"),
    "unknown format": ({"type": "string", "format": "regex"}, '"("'),
    "const beyond 2**53": ({"const": 2**53 + 1}, str(2**53)),
}  # fmt: skip
PERSON = {
    "type": "object", "additionalProperties": False,
    "required": ["name", "mail", "age", "tags", "note"],
    "properties": {
        "name": {"type": "string", "maxLength": 40}, "mail": {"type": "string", "format": "email"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "note": {"type": "string"},
    },
}  # fmt: skip
ADA = {
    "name": "Ada Lovelace of London", "mail": "ada@example.org", "age": 36, "tags": ["poetry"],
    "note": 'She wrote the first program: "Note G" and much more.',
}  # fmt: skip


class Vocabulary:
    """Bytes of tokens, as ``LLTokenizer`` reads them; the first tokens are special."""

    is_tokenizer_wrapper, eos_token_id, bos_token_id = True, 2, None

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text("utf-8"))
        size, num_special = (
            content["config"][f"default_{name}"] for name in ("vocab_size", "num_special_tokens")
        )
        texts = [base64.b64decode(each["token_bytes"]) for each in content["vocab"]]
        self.special_token_ids = [*range(num_special)]
        self.tokens = [b"<%d>" % token for token in range(num_special)] + texts
        del self.tokens[size:]

    def __call__(self, text: object) -> list[int]:
        """Encode a text: not used, as no token is forced."""
        raise NotImplementedError


def engines(
    vocabulary: Vocabulary,
) -> tuple[Any, dict[str, Compile]]:
    """Return llguidance's tokenizer, and for each engine: schema -> (accept, fill)."""
    tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=[2])  # type: ignore[arg-type]
    info = xgrammar.TokenizerInfo(
        [b"" if i in vocabulary.special_token_ids else b for i, b in enumerate(vocabulary.tokens)],
        vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[2],
    )  # fmt: skip
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def of_llguidance(schema: Any) -> tuple[Any, Any]:  # noqa: ANN401
        options = {"x-guidance": {"whitespace_pattern": BLANKS}}
        text = f'%llguidance {{"no_forcing": true}}\nstart: %json {json.dumps(schema | options)}'
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())

        def accept(token: int) -> bool:
            is_end = token == Vocabulary.eos_token_id
            return bool(matcher.is_accepting() if is_end else matcher.try_consume_tokens([token]))

        return accept, lambda mask: matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def of_xgrammar(schema: Any) -> tuple[Any, Any]:  # noqa: ANN401
        compiled = compiler.compile_json_schema(json.dumps(schema), max_whitespace_cnt=20)
        matcher = xgrammar.GrammarMatcher(compiled)
        return matcher.accept_token, matcher.fill_next_token_bitmask

    return tokenizer, {"llguidance": of_llguidance, "xgrammar": of_xgrammar}


def keywords(
    tokenizer: llguidance.LLTokenizer, compilers: Mapping[str, Compile]
) -> list[dict[str, str]]:
    """Return what each engine makes of a text that a keyword forbids."""
    rows = []
    for name, (schema, text) in KEYWORDS.items():
        row = {"keyword": name}
        for engine, compile_schema in compilers.items():
            try:
                accept, _ = compile_schema(schema)
                taken = all(map(accept, [*tokenizer.greedy_tokenize(text), 2]))
                row[engine] = "ignored" if taken else "enforced"
            except (RuntimeError, ValueError):
                row[engine] = "refused"
        rows.append(row)
    return rows


def times(
    tokenizer: llguidance.LLTokenizer, compilers: Mapping[str, Compile]
) -> list[dict[str, object]]:
    """Return the time of a schema, and of the masks of a text that it allows."""
    rows: list[dict[str, object]] = []
    tokens = tokenizer.greedy_tokenize(json.dumps(ADA))
    mask = np.zeros((1, (tokenizer.vocab_size + 31) // 32), np.int32)
    for engine, compile_schema in compilers.items():
        begin = time.process_time()
        accept, fill = compile_schema(PERSON)
        compile_ms, masks_ms = 1e3 * (time.process_time() - begin), []
        for token in tokens:
            begin = time.process_time()
            fill(mask)
            masks_ms.append(1e3 * (time.process_time() - begin))
            if not accept(token):
                raise ValueError(f"{engine} refuses {token}")
        rows.append(
            {
                "engine": engine,
                "version": version_of(engine),
                "compile_ms": round(compile_ms, 2),
                "mask_ms": round(median(masks_ms), 4),
                "largest_mask_ms": round(max(masks_ms), 3),
                "masks": len(tokens),
            }
        )
    return rows


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tekken", type=Path, help="vocabulary in tekken's format")
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    tokenizer, compilers = engines(Vocabulary(options.tekken))
    result = {
        "op": "grammars",
        "schema": 1,
        **provenance(torch.device("cpu"), None),
        "conditions": {
            "vocabulary": f"{options.tekken.name}, {tokenizer.vocab_size:,} tokens",
            "blanks": "at most a line break and 20 blanks",
            "times": "of the process, one core",
        },
        "keywords": keywords(tokenizer, compilers),
        "times": times(tokenizer, compilers),
    }
    for row in [*result["keywords"], *result["times"]]:
        print(*row.values(), sep="\t")
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
