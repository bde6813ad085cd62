#!/usr/bin/env bash
# llguidance 1.9.1: oneOf of references is refused although their tags differ, and an unknown keyword beside a
# recursive union is counted as a sibling of its references.
#
# pydantic writes a discriminated union as oneOf of $ref, with OpenAPI's "discriminator" beside it. The same
# alternatives written in place are accepted; with anyOf, references are accepted, but not a recursive one beside
# "discriminator": "circular references with sibling keys are not supported".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from llguidance import LLMatcher

print("llguidance", version("llguidance"))


def tagged(tag, **properties):
    properties = {"op": {"const": tag}, **properties}
    return {"type": "object", "properties": properties, "required": list(properties)}


references = [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/node"}]
tag = {"discriminator": {"propertyName": "op"}}
flat = {"leaf": tagged("leaf"), "node": tagged("node")}
recursive = {"leaf": tagged("leaf"), "node": tagged("node", of={"anyOf": references})}
beside = {"leaf": tagged("leaf"), "node": tagged("node", of={"anyOf": references, **tag})}
schemas = {
    "oneOf in place": {"oneOf": list(flat.values())},
    "oneOf of references": {"oneOf": references, "$defs": flat},
    "anyOf of references": {"anyOf": references, "$defs": recursive},
    "anyOf beside discriminator": {"anyOf": references, "$defs": beside, **tag},
}
found = {}
for name, schema in schemas.items():
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    found[name] = not error
    print(f"{name}: {error.splitlines()[0] if error else 'accepted'}")
raise SystemExit([*found.values()] != [True, False, True, False])
PYTHON
