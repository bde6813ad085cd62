"""The tokenizer of a checkpoint directory, as an object of transformers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrv1.errors import ConfigError
from mrv1.models.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
"""A checkpoint with none of these files serves token ids only."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Settings of an image processor: a model that has one has one of these files."""
_PARTS = ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder")
"""What tokenizer.json says about texts and tokens, apart from its added tokens."""


def load_from_files(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory, which is its tokenizer.json as it stands.

    tokenizer_config.json adds tokens, sets flags of added tokens, and names special tokens and the
    chat template, as in transformers. Its other settings, such as ``tokenizer_class``,
    ``add_bos_token``, ``add_prefix_space`` and ``legacy``, change nothing in tokenizer.json, whose
    truncation and padding concern no prompt. A directory without tokenizer.json is left to
    transformers' class. The template of a processor, in chat_template.json, is used where there is
    a processor, or no other template.

    ConfigError: the files contradict one another or name code; other errors are of transformers'
    and tokenizers' own types.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes a second

    settings = path / "tokenizer_config.json"
    config = read_json(settings) if settings.is_file() else {}
    file = path / "tokenizer.json"
    tokenizer: PreTrainedTokenizerBase
    if "auto_map" in config or not file.is_file():
        # With auto_map only to hear whether transformers has a class that replaces the
        # checkpoint's code: a tokenizer.json beside code that does more is not all that counts.
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    if file.is_file():
        # Other classes build parts of their own: Qwen2Tokenizer its normalizer and pre-tokenizer,
        # LlamaTokenizer all but the vocabulary.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            str(path), tokenizer_file=str(file), local_files_only=True, trust_remote_code=False
        )
        # Releases of transformers differ in what they change: its "fix" of Mistral's
        # pre-tokenizer, add_bos_token and add_eos_token.
        written = Tokenizer.from_file(str(file))
        for part in _PARTS:
            setattr(tokenizer.backend_tokenizer, part, getattr(written, part))
        _check_added_tokens(tokenizer, config.get("added_tokens_decoder") or {})
    else:
        _check_vocabulary(path, tokenizer)
    template = _processor_template(path)
    if template and (not tokenizer.chat_template or has_processor(path)):
        tokenizer.chat_template = template
    return tokenizer


def missing_packages(path: Path) -> str:
    """Return what a file of sentencepiece needs; transformers then asks for tiktoken alone."""
    names = ("tokenizer.json", "tokenizer.model")
    has_json, has_model = ((path / name).is_file() for name in names)
    if has_json or not has_model or find_spec("sentencepiece") is not None:
        return ""
    return "; a tokenizer.model of sentencepiece needs `pip install sentencepiece protobuf`"


def has_processor(path: Path) -> bool:
    """Return whether a directory has the settings of an image processor."""
    return any((path / name).is_file() for name in PROCESSOR_FILES)


def _check_vocabulary(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise unless a file has a vocabulary: transformers would make a tokenizer without words."""
    files = sorted({"tokenizer.model", *tokenizer.vocab_files_names.values()})
    if not any((path / name).is_file() for name in files):
        raise ConfigError(f"vocabulary: expected one of {', '.join(files)}, found none")


def _check_added_tokens(tokenizer: PreTrainedTokenizerBase, added: dict[str, Any]) -> None:
    """Raise unless tokens have tokenizer_config.json's ids: transformers ignores these ids."""
    for index, token in added.items():
        name = token["content"]
        got = tokenizer.convert_tokens_to_ids(name)
        if name and got != int(index):  # no text contains an empty token
            raise ConfigError(
                f"added_tokens_decoder in tokenizer_config.json: expected {name!r} to be token "
                f"{index}, as it says, got {got} with tokenizer.json"
            )


def _processor_template(path: Path) -> str | None:
    """Return the template of a processor, which tokenizers do not read; ConfigError: damaged."""
    file = path / "chat_template.json"
    if not file.is_file():
        return None
    template = read_json(file).get("chat_template")
    if not isinstance(template, str):
        raise ConfigError(
            f"{file.name}: expected chat_template, a text, got {type(template).__name__}"
        )
    return template
