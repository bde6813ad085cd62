#!/usr/bin/env bash
# transformers 5.23.0: apply_chat_template(sanitize_control_tokens=True) changes more of a prompt than control tokens.
#
# Control tokens of messages are wrapped in U+F0000 and U+F0001 while the template runs. Where the template takes the
# reasoning out of an earlier answer (Qwen3's, as trl ships it), a lone mark stays before the blank lines, so that
# lstrip does not find them: the prompt has two newlines that it does not have without the option. And the same two
# characters in a message (the second is an icon of the Nerd Fonts) are removed without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install -q --disable-pip-version-check)
"${pip[@]}" transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6
"${pip[@]}" --no-deps trl==1.16.0
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import files, version

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

print("transformers", version("transformers"))
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
made.add_tokens(["<think>", "</think>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
(file,) = (each for each in files("trl") if each.name == "qwen3.jinja")
tokenizer.chat_template = file.read_text()
user = {"role": "user", "content": "Go on"}
conversations = {
    "reasoning": [user, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}, user],
    "an icon": [{"role": "user", "content": "Bell: \U000f0001"}],
}
prompts = {}
for name, messages in conversations.items():
    for sanitize in (False, True):
        ids = tokenizer.apply_chat_template(
            messages, return_dict=False, sanitize_control_tokens=sanitize
        )
        prompts[name, sanitize] = tokenizer.decode(ids)
        print(f"{name}, sanitize_control_tokens={sanitize}: {prompts[name, sanitize]!r}")
same = (
    "assistant\nYes." in prompts["reasoning", False]
    and "assistant\n\n\nYes." in prompts["reasoning", True]
    and "\U000f0001" in prompts["an icon", False]
    and "Bell: <|im_end|>" in prompts["an icon", True]
)
raise SystemExit(not same)
PYTHON
