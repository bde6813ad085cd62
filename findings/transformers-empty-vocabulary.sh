#!/usr/bin/env bash
# transformers 5.23.0: AutoTokenizer makes a tokenizer without words where the files of the vocabulary are missing.
#
# A folder with tokenizer_config.json alone, such as a download that was not finished, loads without a warning, as soon
# as a class is named or follows from model_type. Every text then has no tokens. The generic class raises, and with
# tokenizer.model and without sentencepiece the error asks for tiktoken, which cannot read that file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" 2>/dev/null <<'PYTHON'
import json
import pathlib
import sys

import transformers

print("transformers", transformers.__version__)
found = {}
for model_type, name in (
    ("llama", "LlamaTokenizer"),
    ("qwen2", "Qwen2Tokenizer"),
    ("qwen2", "PreTrainedTokenizerFast"),
    ("llama", "PreTrainedTokenizerFast"),
):
    folder = pathlib.Path(sys.argv[1]) / f"{model_type}-{name}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
    except ValueError as error:
        found[model_type, name] = type(error).__name__
    else:
        found[model_type, name] = loaded.encode("hello world", add_special_tokens=False)
    print(f"{model_type}, tokenizer_class {name}: 'hello world' -> {found[model_type, name]}")
folder = pathlib.Path(sys.argv[1]) / "llama-LlamaTokenizer"
# The first bytes of a sentencepiece model: a piece "<unk>" of the type UNKNOWN.
(folder / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
try:
    transformers.AutoTokenizer.from_pretrained(folder)
    said = "nothing"
except Exception as error:
    said = str(error)
print("tokenizer.model, no sentencepiece:", said)
raise SystemExit([*found.values()] != [[], [], [], "ValueError"] or "tiktoken" not in said)
PYTHON
