"""A checkpoint with a chat template: the embedded model's files and a small template."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mrv1.config import checkpoint_dir

SANITIZES = (
    "sanitize_control_tokens"
    in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
)
"""Whether this transformers can encode control tokens of messages as text."""

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'robot' %}{{ raise_exception('no robots,\nplease') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{{ mood }}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat_checkpoint(directory: Path, template: str = TEMPLATE) -> str:
    """Write the checkpoint and return its path.

    Its tokenizer begins every text with ``<|endoftext|>``, which the template writes too.
    """
    shutil.copytree(checkpoint_dir("tiny"), directory, dirs_exist_ok=True)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return str(directory)
