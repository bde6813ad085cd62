#!/usr/bin/env bash
# transformers 5.16.1: reading a configuration's ropes a second time changes them; 5.24.0 does not.
#
# rope_parameters of Glm4Config name partial_rotary_factor 1.0. standardize_rope_params(), which the constructor has
# called, is written to be called again; in 5.16.1 the default 0.5, kept beside rope_parameters, then replaces 1.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for release in 5.16.1 5.24.0; do
    python3 -m venv "$folder/$release"
    "$folder/$release/bin/pip" install -q --disable-pip-version-check transformers==$release
    "$folder/$release/bin/python" - 2> "$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
from importlib.metadata import version

from transformers import Glm4Config

release = version("transformers")
print("transformers", release)
rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
config = Glm4Config(rope_parameters=rope)
shares = [config.rope_parameters["partial_rotary_factor"]]
for _ in range(2):
    config.standardize_rope_params()
    shares.append(config.rope_parameters["partial_rotary_factor"])
print("partial_rotary_factor", shares)
again = {"5.16.1": 0.5, "5.24.0": 1.0}[release]
raise SystemExit(shares != [1.0, again, again])
PYTHON
done
