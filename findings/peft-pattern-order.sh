#!/usr/bin/env bash
# peft 0.21.2: an adapter with two patterns that match a module has another scaling after it is saved and loaded.
#
# The first pattern that matches a module decides its alpha, so that their order has a meaning. save_pretrained sorts the
# keys: the loaded adapter takes the other pattern, without an error or a warning, and computes other outputs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
    peft==0.21.2 torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - "$folder/adapter" 2> "$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
import sys
from importlib.metadata import version

import torch
from peft import LoraConfig, PeftModel, get_peft_model

print("peft", version("peft"))
patterns = {"q_proj": 8, ".*_proj": 2}


def base():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4), "k_proj": torch.nn.Linear(4, 4)})


options = LoraConfig(
    r=2, lora_alpha=2, target_modules=["q_proj", "k_proj"], alpha_pattern=patterns, init_lora_weights=False
)
made = get_peft_model(base(), options)
made.save_pretrained(sys.argv[1])
loaded = PeftModel.from_pretrained(base(), sys.argv[1])
x = torch.ones(1, 4)
layers = [model.base_model.model["q_proj"] for model in (made, loaded)]
scalings = [layer.scaling["default"] for layer in layers]
difference = (layers[0](x) - layers[1](x)).abs().max().item()
print("scaling of q_proj: made", scalings[0], "loaded", scalings[1])
print("outputs differ:", difference > 1e-3)
raise SystemExit(scalings != [4.0, 1.0] or difference <= 1e-3)
PYTHON
