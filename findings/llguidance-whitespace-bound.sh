#!/usr/bin/env bash
# llguidance 1.7.6 and 1.9.1: whitespace_pattern " ?" means any number of spaces before 1.8, one from 1.8 on.
#
# Before 1.8 the pattern may match again and again at one place, so no pattern bounds the blanks that a model writes.
# The same version lets "\u0061" stand for a declared property "a", whatever json_allowed_escapes says.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for release in 1.7.6 1.9.1; do
    python3 -m venv "$folder/$release"
    "$folder/$release/bin/pip" install -q --disable-pip-version-check "llguidance==$release"
    "$folder/$release/bin/python" - <<'PYTHON'
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer

options = {"whitespace_pattern": " ?", "json_allowed_escapes": 'nrbtf"\\'}
schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)
found = []
for text in ('{"a": 1}', '{"a":    1}', '{"\\u0061":"x"}'):
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    found.append(matcher.try_consume_tokens(list(text.encode())) == len(text))
    print("llguidance", version("llguidance"), text, "accepted" if found[-1] else "refused")
is_old = version("llguidance").startswith("1.7.")
raise SystemExit(found != [True, is_old, is_old])
PYTHON
done
