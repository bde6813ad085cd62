r"""A GGUF file's vocabulary as a tokenizer of transformers, by the rules of llama.cpp.

Where a ``tokenizer.json`` has expressions by which text is cut into words, a GGUF file has a name
for them. What a name means is llama.cpp's to say (``src/llama-vocab.cpp`` of
https://github.com/ggml-org/llama.cpp). Some of its expressions imitate those of a
``tokenizer.json`` in a language without ``(?i:`` or ``\p{Lu}``: the latter are here.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mrv1.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TOKENS = "tokenizer.ggml.tokens"
"""Key of the list of tokens; a file without it has no vocabulary."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Kinds of tokens; the other kinds, unused (5) and single bytes (6), are cut like normal ones."""
_LLAMA, _GPT2 = "llama", "gpt2"
"""Values of ``tokenizer.ggml.model``: merges by score (sentencepiece), and merges of bytes."""
_LLAMA_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Special tokens of sentencepiece where the file names none."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space, as sentencepiece writes it."""

_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<eos>"),
    *("<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>"),
    f"<\N{FULLWIDTH VERTICAL LINE}end{_SPACE}of{_SPACE}sentence\N{FULLWIDTH VERTICAL LINE}>",
)
"""Tokens that end a text, a turn or a message, whether or not the file names their ids."""

_FIM_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Tokens that end the middle of a file; ids that the file names come first."""

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2_WORDS = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters of scripts with upper and lower case, as the first DeepSeek models list them."""

_LLAMA3_CUTS = (rf"(?i:{_CONTRACTIONS})|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}",)
_QWEN2_CUTS = (rf"(?i:{_CONTRACTIONS})|{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}",)
_TEKKEN_CUTS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)
_DEEPSEEK3_CUTS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_LLM_CUTS = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~" "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER_CUTS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")

_LLAMA3_NAMES = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "jina-v5-nano",
)
_QWEN2_NAMES = (
    *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"),
    *("solar-open", "grok-2"),
)
_GPT2_NAMES = (
    *("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0"),
    *("mellum", "modern-bert", "exaone4", "olmo", "mpt", "jais", "trillion", "granite-docling"),
)
_DIGIT_NAMES = (
    *("smollm", "refact", "starcoder", "command-r", "codeshell", "exaone", "minerva-7b"),
    "mellum2",
)
_GLM4_NAMES = ("glm4", "glm5")

_CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_LLAMA3_NAMES, _LLAMA3_CUTS),
    **dict.fromkeys(_QWEN2_NAMES, _QWEN2_CUTS),
    **dict.fromkeys(_GPT2_NAMES, (_GPT2_WORDS,)),
    **dict.fromkeys(_DIGIT_NAMES, (r"\p{N}", _GPT2_WORDS)),
    # SmolLM3's, Granite 4's and GLM-4's: a text begins with no BOS.
    **dict.fromkeys(("smaug-bpe", "dbrx", *_GLM4_NAMES, "chatglm-bpe"), _LLAMA3_CUTS),
    "seed-coder": (
        rf"(?i:{_CONTRACTIONS})|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
    ),
    "tekken": _TEKKEN_CUTS,
    "deepseek-llm": _DEEPSEEK_LLM_CUTS,
    "deepseek-coder": _DEEPSEEK_CODER_CUTS,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3_CUTS),
}
"""``tokenizer.ggml.pre`` -> expressions whose matches become words, one after the other."""

_WITH_BOS = frozenset((*_LLAMA3_NAMES, "tekken"))
"""Names for which a text begins with BOS by default."""
_WHOLE_WORDS = _WITH_BOS.union(_GLM4_NAMES)
"""Names for which a word that is a token is not merged."""

_PHI3, _WITHOUT_STRIP = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")
"""What names of Phi-3 contain, whose special tokens but these take the blanks after them."""


class Vocabulary:
    """What a GGUF file says under ``tokenizer.``; nothing is checked before it is used."""

    def __init__(self, metadata: Mapping[str, Any], model_name: object = None) -> None:
        """Keep the metadata, whose keys begin with ``tokenizer.``, and ``general.name``."""
        self._metadata = metadata
        self._is_phi3 = any(name in str(model_name).lower() for name in _PHI3)
        self._model = metadata.get("tokenizer.ggml.model")

    @cached_property
    def tokens(self) -> list[str]:
        """The tokens' texts; none without a vocabulary. ConfigError: not different texts."""
        tokens = self._list(TOKENS, str, [])
        tokens = [text or f"[EMPTY_{index}]" for index, text in enumerate(tokens)]
        if len(set(tokens)) < len(tokens):
            twice = next(text for text in tokens if tokens.count(text) > 1)
            raise ConfigError(f"{TOKENS}: expected different tokens, got {twice!r} twice")
        return tokens

    @cached_property
    def ends(self) -> list[int]:
        """Tokens that end a text, turn or message; ConfigError: as ``tokens``, or a bad id."""
        ids = [self._id(name) for name in ("eos", "eot", "eom")]
        for name, texts in _FIM_ENDS.items():
            by_id = self._id(name)
            ids += [by_id] if by_id is not None else self._named(texts)[:1]
        return list(dict.fromkeys(i for i in ids + self._named(_ENDS) if i is not None))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer, equal to llama.cpp's; ConfigError: unknown kind, or damage."""
        from tokenizers import AddedToken, processors
        from transformers import PreTrainedTokenizerFast  # takes a second

        if self._model not in (_LLAMA, _GPT2):
            raise ConfigError(
                f"tokenizer.ggml.model: expected {_GPT2} or {_LLAMA}, got {self._model!r}"
            )
        tokenizer = self._sentencepiece() if self._model == _LLAMA else self._byte_level()
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        special = {key: self._id(name) for key, name in names.items()}
        ends = {*self.ends, special["bos"]}
        kinds = [
            _CONTROL if index in ends and not self._is_word(index) else kind
            for index, kind in enumerate(self._kinds)
        ]
        added_tokens = [
            AddedToken(
                text,
                special=kind != _USER_DEFINED,
                normalized=False,
                rstrip=self._is_phi3 and text not in _WITHOUT_STRIP,
            )
            for text, kind in zip(self.tokens, kinds, strict=True)
            if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)
        ]
        tokenizer.add_tokens(added_tokens)
        added = {
            key: {"id": key, "ids": [index], "tokens": [self.tokens[index]]}
            for key in ("bos", "eos")
            if (index := self._added(key)) is not None
        }
        parts = ("bos" if "bos" in added else "", "eos" if "eos" in added else "")
        one = [f"{parts[0]} ${text} {parts[1]}".strip() for text in ("A", "B:1")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=one[0], pair=" ".join(one), special_tokens=list(added.values())
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            clean_up_tokenization_spaces=False,
            chat_template=self._templates(),
            **{
                f"{key}_token": self.tokens[index]
                for key, index in special.items()
                if index is not None and kinds[index] in (_CONTROL, _UNKNOWN)
            },
        )

    def _byte_level(self) -> Tokenizer:
        """Return merges of bytes, each word by itself."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        pre = self._metadata.get("tokenizer.ggml.pre")
        if not isinstance(pre, str) or pre not in _CUTS:
            raise ConfigError(
                f"tokenizer.ggml.pre: expected one of {', '.join(_CUTS)}, got {pre!r}"
            )
        # A pair that is listed twice has its first rank.
        merges = [merge.partition(" ")[::2] for merge in dict.fromkeys(self._merges)]
        try:
            model = models.BPE(self._index, merges, ignore_merges=pre in _WHOLE_WORDS)
        except Exception as error:  # tokenizers raises Exception itself
            raise ConfigError(
                f"tokenizer.ggml.merges: expected pairs of tokens that make a token: {error}"
            ) from error
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(cut), "isolated") for cut in _CUTS[pre]),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        """Return merges by the scores of their results; characters without a token are bytes.

        llama.cpp gives tokens of one score the same rank: of two, the one that begins first is
        made. The scores of a trained vocabulary differ. Where they do not, because a converter
        wrote one for all, the order of the tokens is that of the training, and it counts here.
        """
        from tokenizers import Tokenizer, decoders, models, normalizers

        index, tokens = self._index, self.tokens
        scores = self._list("tokenizer.ggml.scores", float | int, [0.0] * len(tokens))
        merges = [
            (text[:at], text[at:])
            for _, text in sorted(
                zip(scores, tokens, strict=True), key=lambda pair: pair[0], reverse=True
            )
            for at in range(1, len(text))
            if text[:at] in index and text[at:] in index
        ]
        unknown = self._id("unknown")
        tokenizer = Tokenizer(
            models.BPE(
                index,
                merges,
                unk_token=None if unknown is None else tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefix = self._flag("add_space_prefix", True)
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE)] * prefix + [normalizers.Replace(" ", _SPACE)]
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
            + [decoders.Strip(" ", 1, 0)] * prefix
        )
        return tokenizer

    @cached_property
    def _index(self) -> dict[str, int]:
        return {text: index for index, text in enumerate(self.tokens)}

    @cached_property
    def _merges(self) -> list[str]:
        return self._list("tokenizer.ggml.merges", str, None)

    @cached_property
    def _kinds(self) -> list[int]:
        return self._list("tokenizer.ggml.token_type", int, [_NORMAL] * len(self.tokens))

    def _is_word(self, index: int) -> bool:
        """Return whether text becomes this unmarked token; ``</s>`` may be a part of HTML."""
        text = self.tokens[index]
        if self._kinds[index] in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            return False
        parts = [(text[:at], text[at:]) for at in range(1, len(text))]
        if self._model == _LLAMA:
            return any(left in self._index and right in self._index for left, right in parts)
        return not parts or any(f"{left} {right}" in self._merges for left, right in parts)

    def _named(self, texts: tuple[str, ...]) -> list[int]:
        """Return the ids of the texts that are tokens, and are more than words."""
        found = [self._index[text] for text in texts if text in self._index]
        return [index for index in found if not self._is_word(index)]

    def _id(self, name: str) -> int | None:
        """Return the id of a special token that the file names; ConfigError: it is no integer."""
        key, num_tokens = f"tokenizer.ggml.{name}_token_id", len(self.tokens)
        default = _LLAMA_IDS.get(name) if self._model == _LLAMA else None
        for index in (self._metadata.get(key), default):
            if index is None:
                continue
            if isinstance(index, bool) or not isinstance(index, int):
                raise ConfigError(f"{key}: expected a token id, got {reprlib.repr(index)}")
            if index >= 0 and (index < num_tokens or not num_tokens):
                return index
            logger.warning("%s: %r is no token of the vocabulary and is left out", key, index)
        return None

    def _added(self, name: str) -> int | None:
        """Return the token that is added at the beginning ("bos") or the end ("eos") of a text."""
        pre = self._metadata.get("tokenizer.ggml.pre")
        implied = name == "bos" and (self._model == _LLAMA or pre in _WITH_BOS)
        key, index = f"add_{name}_token", self._id(name)
        if not self._flag(key, implied and index is not None):
            return None
        if index is None:
            raise ConfigError(f"tokenizer.ggml.{key}: expected false without the token, got true")
        return index

    def _flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise ConfigError(f"tokenizer.ggml.{name}: expected true or false, got {value!r}")
        return value

    def _list(self, key: str, kind: Any, default: Any) -> list[Any]:  # noqa: ANN401
        """Return a list of the metadata; all but the merges have an item for each token."""
        values = self._metadata.get(key, default)
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            name = getattr(kind, "__name__", kind)
            raise ConfigError(f"{key}: expected a list of {name}, got {reprlib.repr(values)}")
        if default and len(values) != len(default):
            raise ConfigError(f"{key}: expected {len(default)} values, got {len(values)}")
        return values

    def _templates(self) -> Any:  # noqa: ANN401 - as transformers has them
        """Return the chat template, or a dict if there are several; ``tool_use`` is for tools."""
        key = "tokenizer.chat_template"
        found = {
            name.removeprefix(key).removeprefix(".") or "default": text
            for name, text in self._metadata.items()
            if name == key or name.startswith(f"{key}.")
        }
        for text in found.values():
            if not isinstance(text, str):
                raise ConfigError(f"{key}: expected text, got {reprlib.repr(text)}")
        return found if found.keys() - {"default"} else found.get("default")
