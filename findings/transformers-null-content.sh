#!/usr/bin/env bash
# transformers 5.16.0 and 5.23.0: a message whose content is null (OpenAI's form of a tool call) works in neither
# release with all templates.
#
# 5.16 gives None to the template: Llama 3's prints "None", DeepSeek-V3's prints tool calls only then ("content is
# none"). 5.23 leaves the key out: Llama 3's prints nothing, DeepSeek-V3's raises, with the tool call that it is for.
# Templates as trl ships them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for release in 5.16.0 5.23.0; do
    python3 -m venv "$folder/$release"
    pip=("$folder/$release/bin/pip" install -q --disable-pip-version-check)
    "${pip[@]}" transformers==$release jinja2==3.1.6
    "${pip[@]}" --no-deps trl==1.16.0
    "$folder/$release/bin/python" - <<'PYTHON'
from importlib.metadata import files, version

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

release = version("transformers")
print("transformers", release)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
templates = {each.stem: each.read_text() for each in files("trl") if each.suffix == ".jinja"}
call = {"type": "function", "function": {"name": "look", "arguments": '{"where": "here"}'}}
messages = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [call]},
]
found = {}
for name in ("llama3", "deepseekv3"):
    try:
        found[name] = tokenizer.apply_chat_template(
            messages, chat_template=templates[name], tokenize=False, bos_token=""
        )
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
    print(f"{name}: {found[name]!r}")
drops = release == "5.23.0"
same = ("None" in found["llama3"], '{"where": "here"}' in found["deepseekv3"]) == (
    not drops,
    not drops,
)
raise SystemExit(not same)
PYTHON
done
