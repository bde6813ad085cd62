#!/usr/bin/env bash
# tokenizers 0.23.3: DecodeStream returns its whole prompt again if the prompt ends inside a character.
#
# DecodeStream(ids=prompt) decodes what follows a prompt, as an inference engine needs it. Where the prompt's text
# ends in U+FFFD, because its last token holds only the first bytes of a character, or because the text itself ends
# so, the stream takes no prefix: the first text that step() returns begins with the text of all prompt tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

print("tokenizers", tokenizers.__version__)
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(alphabet)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
found = []
for text, num_prompt_tokens in (("a prompt \u4f60!", 9), ("a prompt \u4f60!", 10), ("a prompt \ufffd!", 12)):
    ids = tokenizer.encode(text).ids
    stream = decoders.DecodeStream(ids=ids[:num_prompt_tokens])
    steps = [stream.step(tokenizer, token) for token in ids[num_prompt_tokens:]]
    found.append(steps)
    print(f"after {tokenizer.decode(ids[:num_prompt_tokens])!r}: {steps}")
expected = [[None, None, "\u4f60", "!"], [None, "a prompt \u4f60", "!"], ["a prompt \ufffd!"]]
raise SystemExit(found != expected)
PYTHON
