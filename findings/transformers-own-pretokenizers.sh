#!/usr/bin/env bash
# transformers 5.23.0: AutoTokenizer replaces parts of a checkpoint's tokenizer.json, by its model_type.
#
# For qwen2 its class keeps the file's vocabulary and merges, and builds normalizer, pre-tokenizer and decoder itself,
# although tokenizer_config.json asks for PreTrainedTokenizerFast, which reads the file as it stands. qwen3 is read as
# it stands with that setting, and rebuilt without tokenizer_config.json. A fine-tune with another pattern gets
# other tokens, without a warning. LlamaTokenizerFast drops the file's normalizer and splits by Metaspace instead.
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
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

print("transformers", transformers.__version__)
names = sorted(pre_tokenizers.ByteLevel.alphabet())
names += ["12", "123", "45"]
merges = [("1", "2"), ("12", "3"), ("4", "5")]
made = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
made.normalizer = normalizers.Lowercase()
made.pre_tokenizer = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\P{N}+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
expected = made.encode("A12345").tokens
print("tokenizer.json:", expected)
found = {}
for model_type, asked in (
    ("qwen2", "PreTrainedTokenizerFast"),
    ("qwen3", "PreTrainedTokenizerFast"),
    ("qwen3", None),
):
    folder = pathlib.Path(sys.argv[1]) / f"{model_type}-{asked}"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if asked is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": asked}))
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = loaded.convert_ids_to_tokens(loaded.encode("A12345"))
    found[model_type, asked] = tokens == expected
    print(f"{model_type}, tokenizer_class {asked}: {type(loaded).__name__} {tokens}")
raise SystemExit([*found.values()] != [False, True, False])
PYTHON
