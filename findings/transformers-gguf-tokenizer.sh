#!/usr/bin/env bash
# transformers 5.23.0: a GGUF file's tokenizer is not the file's.
#
# from_pretrained(gguf_file=...) takes a tokenizer.ggml.pre that it does not know for GPT-2's, without a warning: with
# "smollm" (SmolLM2), digits are not split off, although the vocabulary was made so. Of control tokens, only bos, eos,
# unk and pad are special; the others, such as DeepSeek's or ChatML's, are cut into pieces. With a tokenizer.json beside
# the file, that one is used, whatever its model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3 gguf==0.19.0 \
    torch==2.13.0  # only to be imported
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
from pathlib import Path

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

for name in ("transformers", "tokenizers", "gguf"):
    print(name, version(name))
user = "<\uff5cUser\uff5c>"
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokens(pre, text, beside=None):
    """Write a llama file with bytes, one merge ("1 2") and two control tokens, and cut a text."""
    place = Path(pre)
    place.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(place / "model.gguf", "llama")
    writer.add_context_length(128)
    writer.add_block_count(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*alphabet, "12", user, "<|im_end|>"])
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(258)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if beside:
        beside.save(str(place / "tokenizer.json"))
    made = PreTrainedTokenizerFast.from_pretrained(str(place), gguf_file="model.gguf")
    return made.convert_ids_to_tokens(made.encode(text))


digits = {pre: tokens(pre, "12") for pre in ("qwen2", "smollm", "deepseek-coder", "nobody")}
print(digits)
cut = tokens("deepseek-r1-qwen", user)
print("control token", cut)
other = Tokenizer(models.WordLevel({"other": 0, "<unk>": 1}, unk_token="<unk>"))
found = tokens("gpt-2", "12", other)
print("beside a tokenizer.json", found)
split, *merged = digits.values()
same = split == ["1", "2"] and merged == [["12"]] * 3
raise SystemExit(not (same and len(cut) > 1 and found == ["<unk>"]))
PYTHON
