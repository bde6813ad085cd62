#!/usr/bin/env bash
# transformers 5.24 calls a model's KV cache `cache`, not `past_key_values`. The old name still works there, with a
# warning. The new name does not fail in 5.23: the model takes any keyword, answers as if there were no cache, and
# leaves the cache empty. A call written for 5.24 so gives other logits in 5.23, without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-deps --target "$folder/old" transformers==5.23.0
cat >"$folder/show.py" <<'PYTHON'
import warnings

import torch
import transformers
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16,
)
model = Qwen3ForCausalLM(config).eval()
prompt, last = torch.tensor([[1, 2, 3]]), torch.tensor([[4]])
with torch.no_grad():
    whole = model(torch.cat([prompt, last], 1)).logits[0, -1]
    print("transformers", transformers.__version__)
    for name in ("past_key_values", "cache"):
        cache = DynamicCache()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(prompt, **{name: cache})
            logits = model(last, **{name: cache}).logits[0, -1]
        said = ", ".join(sorted({each.category.__name__ for each in caught})) or "no warning"
        is_right = "as without a cache" if torch.allclose(logits, whole, atol=1e-5) else "wrong"
        print(f"{name}=: {cache.get_seq_length()} tokens kept, logits {is_right}, {said}")
PYTHON
expected='transformers 5.23.0
past_key_values=: 4 tokens kept, logits as without a cache, no warning
cache=: 0 tokens kept, logits wrong, no warning
transformers 5.24.0
past_key_values=: 4 tokens kept, logits as without a cache, FutureWarning
cache=: 4 tokens kept, logits as without a cache, no warning'
seen=$(
    PYTHONPATH="$folder/old" "$folder/venv/bin/python" "$folder/show.py"
    "$folder/venv/bin/python" "$folder/show.py"
)
echo "$seen"
[ "$seen" = "$expected" ] || { echo "the behaviour has changed: expected" "$expected"; exit 1; }
