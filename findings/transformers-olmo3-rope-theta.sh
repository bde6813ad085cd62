#!/usr/bin/env bash
# transformers 5.16.1 and 5.24.0: Olmo3Config(rope_theta=1e6) gives 1e6 to the layers with full attention alone.
#
# OLMo-3 has a rope for each kind of layer since 5.0; the old setting, which meant all layers, becomes the base of one
# kind, and layers with a window keep the default, 500,000. No warning; from_dict of a config.json does the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for release in 5.16.1 5.24.0; do
    python3 -m venv "$folder/$release"
    "$folder/$release/bin/pip" install -q --disable-pip-version-check transformers==$release
    "$folder/$release/bin/python" - 2> "$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
from importlib.metadata import version

from transformers import Olmo3Config

print("transformers", version("transformers"))
settings = {"num_hidden_layers": 4, "rope_theta": 1e6}
found = [
    {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
    for config in (Olmo3Config(**settings), Olmo3Config.from_dict(settings))
]
for each in found:
    print(each)
raise SystemExit(found != [{"sliding_attention": 5e5, "full_attention": 1e6}] * 2)
PYTHON
done
