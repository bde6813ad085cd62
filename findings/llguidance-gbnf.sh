#!/usr/bin/env bash
# llguidance 1.9.1: its converter from GBNF drops the zeros of "\u00e9".
#
# "\u4f60" stays as it is; "\u00e9" becomes "\ue9", which is no escape in Lark: the rules do not compile.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer, grammar_from

print("llguidance", version("llguidance"))
found = {}
for rules, text in (
    (r'root ::= "\u4f60"', "\u4f60"),
    (r'root ::= "\u00e9"', "\u00e9"),
):
    matcher = LLMatcher(LLTokenizer("byte"), grammar_from("gbnf", rules), log_level=0)
    tokens = list(text.encode())
    error = matcher.get_error().splitlines()[:1]
    taken = not error and matcher.try_consume_tokens(tokens) == len(tokens)
    found[rules, text] = taken and matcher.is_accepting()
    print(repr(rules), text, *error or ["accepted" if found[rules, text] else "refused"])
raise SystemExit([*found.values()] != [True, False])
PYTHON
