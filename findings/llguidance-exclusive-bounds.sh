#!/usr/bin/env bash
# llguidance 1.9.1: a text may take an exclusive bound itself.
#
# {"exclusiveMinimum": 0, "maximum": 0.5} accepts 0: where a whole exclusive bound and the other bound have one
# integer part, the bound itself is in the language. With "maximum": 1 it is not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer

print("llguidance", version("llguidance"))
tokenizer = LLTokenizer("byte")
expected = {
    ('{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}', "0"): True,
    ('{"type": "number", "exclusiveMinimum": 0, "maximum": 1}', "0"): False,
    ('{"type": "number", "minimum": -24.5, "exclusiveMaximum": -24}', "-24"): True,
}
found = {}
for schema, text in expected:
    grammar = LLMatcher.grammar_from_json_schema(json.loads(schema))
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    taken = matcher.try_consume_tokens(list(text.encode())) == len(text)
    found[schema, text] = taken and matcher.is_accepting()
    print(schema, text, "accepted" if found[schema, text] else "refused")
raise SystemExit(found != expected)
PYTHON
