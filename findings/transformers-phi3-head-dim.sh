#!/usr/bin/env bash
# transformers 5.16.1 and 5.24.0: Phi3Config refuses longrope factors that fit its head_dim, and takes those that do not.
#
# The attention of Phi-3 has heads of head_dim where the configuration says so, and needs head_dim / 2 factors. Phi-3's
# own check counts hidden_size / num_attention_heads instead; the common check, which counts right, only warns: with a
# head_dim of its own a configuration that is correct cannot be made, and one that passes warns of its length.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for release in 5.16.1 5.24.0; do
    python3 -m venv "$folder/$release"
    "$folder/$release/bin/pip" install -q --disable-pip-version-check transformers==$release
    "$folder/$release/bin/python" - 2> "$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
from importlib.metadata import version

from transformers import Phi3Config

print("transformers", version("transformers"))


def outcome(count):
    """Return what becomes of ``count`` factors for heads of 32 dimensions."""
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * count, "long_factor": [1.0] * count,
    }
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    try:
        Phi3Config(**sizes, head_dim=32, pad_token_id=0, rope_parameters=rope)
    except Exception as error:
        return str(error).splitlines()[-1].strip()
    return "taken"


found = {count: outcome(count) for count in (16, 8)}
for count, text in found.items():
    print(count, "factors:", text)
raise SystemExit("must have length 8, got 16" not in found[16] or found[8] != "taken")
PYTHON
done
