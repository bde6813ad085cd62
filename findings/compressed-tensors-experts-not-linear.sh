#!/usr/bin/env bash
# compressed-tensors 0.20.0 with transformers 5.24.0: the target "Linear" finds no expert and no router, and nobody says so.
#
# transformers 5 keeps the experts of a layer in two stacked parameters, and a router in one of a module of its own;
# neither is a Linear, though the files on disk have a linear layer for each expert. So the usual configuration, targets
# ["Linear"] and ignore ["lm_head"], quantizes attention alone: four layers, and a small part of the weights.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.0
"$folder/venv/bin/python" - 2> "$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
from importlib.metadata import version

from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

print("compressed-tensors", version("compressed-tensors"), "transformers", version("transformers"))
sizes = {
    "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 256,
}
models = (
    MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=8)),
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, head_dim=32, moe_intermediate_size=256, num_experts=8)
    ),
)
attention = {f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"}
changed = False
for model in models:
    scheme = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    settings = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, settings)
    found = {name for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}
    layers = {name: each.numel() for name, each in model.named_parameters() if ".layers." in name}
    share = sum(layers[f"{name}.weight"] for name in found) / sum(
        size for name, size in layers.items() if name.endswith(("weight", "proj"))
    )
    print(type(model).__name__, "quantized:", *sorted(found))
    print(f"    {share:.0%} of the layer's weights; of experts and router: none")
    changed |= found != attention
raise SystemExit(changed)
PYTHON
