#!/usr/bin/env bash
# llguidance 1.9.1: control characters vanish from constants and patterns, and not every date is a date.
#
# Where the escapes of JSON strings are restricted (json_allowed_escapes), a control character without one is left out:
# "a\u0000b" becomes "ab", which is not valid, without an error. By default it stays. The format "date" takes the 29th
# of February in every year; and within a maximum of 0.95 there is no 0.9, only 0.90.
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
some = {"json_allowed_escapes": 'nrbtf"\\'}
found = []
for schema, text in (
    ({"const": "a\0b", "x-guidance": some}, '"ab"'),
    ({"pattern": "^a\\x1bb$", "x-guidance": some}, '"ab"'),
    ({"const": "a\0b"}, '"ab"'),
    ({"format": "date"}, '"2023-02-29"'),
    ({"format": "date"}, '"2023-02-30"'),
    ({"type": "number", "minimum": 0, "maximum": 0.95}, "0.9"),
    ({"type": "number", "minimum": 0, "maximum": 0.95}, "0.90"),
):
    matcher = LLMatcher(LLTokenizer("byte"), f"start: %json {json.dumps(schema)}", log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    found.append(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
    print(schema, text, "accepted" if found[-1] else "refused")
raise SystemExit(found != [True, True, False, True, False, False, True])
PYTHON
