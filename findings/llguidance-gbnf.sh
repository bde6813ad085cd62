#!/usr/bin/env bash
# llguidance 1.9.1: the converter from GBNF drops zeros of \u00e9, and turns rules into greedy terminals.
#
# llama.cpp reads rules character by character. Converted to Lark, w ::= [a-z]* becomes a terminal, which takes the
# letters of the "ing" that should follow: no text but "ing" is accepted, without an error. "\u00e9" becomes "\ue9",
# which is no escape in Lark.
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
    ('root ::= w "ing"\nw ::= [a-z]*', "ing"),
    ('root ::= w "ing"\nw ::= [a-z]*', "king"),
    ('root ::= [a-z]+ "ing"', "king"),
    ('root ::= [a-z]+ "ing"', "singing"),
    (r'root ::= "\u4f60"', "\u4f60"),
    (r'root ::= "\u00e9"', "\u00e9"),
):
    matcher = LLMatcher(LLTokenizer("byte"), grammar_from("gbnf", rules), log_level=0)
    tokens = list(text.encode())
    error = matcher.get_error().splitlines()[:1]
    taken = not error and matcher.try_consume_tokens(tokens) == len(tokens)
    found[rules, text] = taken and matcher.is_accepting()
    print(repr(rules), text, *error or ["accepted" if found[rules, text] else "refused"])
raise SystemExit([*found.values()] != [True, False, True, False, True, False])
PYTHON
