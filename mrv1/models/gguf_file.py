"""A GGUF file: its configuration, and its tensors under the names of Hugging Face checkpoints."""

from __future__ import annotations

import re
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from mrv1.errors import ConfigError
from mrv1.models.rope import RopeConfig, inverse_frequencies

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

SUFFIX = ".gguf"

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""``general.architecture`` -> architecture of a Hugging Face checkpoint. Mistral is ``llama``."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Tensor's name, without layer and ``.weight`` -> the same in a Hugging Face checkpoint."""

_ROPE_FREQS = "rope_freqs.weight"
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Settings of every published model with ``llama3`` rope; only the factor differs."""

_FLOATS = {"F32": torch.float32, "F16": torch.float16}


def is_gguf(path: Path) -> bool:
    """Return whether ``path`` names a GGUF file and not a directory."""
    return path.suffix == SUFFIX and not path.is_dir()


def open_gguf(path: Path) -> GGUFFile:
    """Return a GGUF file; the last one stays open, as reading a vocabulary takes seconds.

    Raises:
        ConfigError: the file cannot be read, or its architecture is not supported.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{path.name}: not a readable GGUF file: {error}") from error
    return _open(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1)
def _open(path: Path, mtime_ns: int, size: int) -> GGUFFile:
    """Return a GGUF file; time and size make a file that has changed another key."""
    return GGUFFile(path)


class GGUFFile:
    """An open GGUF file, memory-mapped: a tensor is read and dequantized when it is asked for.

    Raises:
        ConfigError: the file cannot be read, or its architecture is not supported.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._reader = _reader_class()(path)
        except ImportError as error:
            raise ConfigError(
                f"model: expected the package gguf to read {path.name}, got {error}; run "
                "`pip install gguf`"
            ) from error
        except Exception as error:  # a damaged file fails anywhere in the reader
            raise ConfigError(f"{path.name}: not a readable GGUF file: {error}") from error
        self.architecture = self._field("general.architecture")
        """llama.cpp's name of the family."""
        if self.architecture not in FAMILIES:
            raise ConfigError(
                f"general.architecture: expected one of {', '.join(FAMILIES)}, "
                f"got {self.architecture!r}"
            )
        self.has_tokenizer = "tokenizer.ggml.tokens" in self._reader.fields
        """Whether the file contains a vocabulary."""
        for key in [key for key in self._reader.fields if key.startswith("tokenizer.ggml.")]:
            if not key.endswith("_token_id"):
                del self._reader.fields[key]  # tens of MB; transformers reads them itself
        self._tensors = {
            _hugging_face_name(tensor.name): tensor
            for tensor in self._reader.tensors
            if tensor.name != _ROPE_FREQS  # part of the configuration
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by its name in a Hugging Face checkpoint."""
        return {name: _shape(tensor) for name, tensor in self._tensors.items()}

    def unsupported_quantizations(self) -> list[str]:
        """Return the names of the file's quantizations that cannot be dequantized."""
        kinds = {tensor.tensor_type for tensor in self._tensors.values()}
        return sorted(kind.name for kind in kinds if not _is_supported(kind))

    def get_slice(self, name: str) -> torch.Tensor:
        """Return what a part of a tensor can be cut from: the tensor, dequantized as a whole."""
        return self.get_tensor(name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor by its name in a Hugging Face checkpoint, float32 on the CPU."""
        from gguf import dequantize

        tensor = self._tensors[name]
        values = dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor))
        values = np.require(values, np.float32, ("C", "W"))  # torch warns of read-only memory
        if self.architecture == "llama":
            num_heads = self._num_permuted_heads(name)
            if num_heads is not None:
                values = _unpermuted(values, num_heads)
        return torch.from_numpy(values)

    def _num_permuted_heads(self, name: str) -> int | None:
        """Return the heads whose rows llama.cpp has permuted in a tensor; None = no rows."""
        if ".q_proj." in name:
            return self._size("attention.head_count")
        if ".k_proj." in name:
            return self._size("attention.head_count_kv", self._size("attention.head_count"))
        return None

    def config(self) -> PretrainedConfig:
        """Return the model's configuration as transformers' class of the family.

        Raises:
            ConfigError: a setting is missing or wrong, or the model has a feature that mrv1 lacks.
        """
        from transformers import AutoConfig

        size = self._size
        num_heads, hidden = size("attention.head_count"), size("embedding_length")
        head_dim = size("attention.key_length", hidden // num_heads)
        context = size("context_length")
        for key, expected in {
            "attention.value_length": head_dim,
            "rope.dimension_count": head_dim,
            "attention.sliding_window": context,
            "expert_count": 0,
        }.items():
            if (value := self._number(key, expected)) != expected:
                raise ConfigError(
                    f"{self.architecture}.{key}: expected {expected} or none, got {value}"
                )
        embed = self._tensors.get("model.embed_tokens.weight")
        if embed is None:
            raise ConfigError("token_embd.weight: expected the embedding, found none")
        settings = {
            "architectures": [FAMILIES[self.architecture]],
            "vocab_size": _shape(embed)[0],
            "hidden_size": hidden,
            "intermediate_size": size("feed_forward_length"),
            "num_hidden_layers": size("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": size("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": context,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "rope_parameters": self._rope(head_dim),
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in self._tensors,
            "eos_token_id": self._end_tokens(),
            "dtype": self._dtype(),
        }
        return AutoConfig.for_model(self.architecture, **settings)

    def _rope(self, head_dim: int) -> dict[str, Any]:
        """Return ``rope_parameters`` as transformers has them."""
        theta = float(self._number("rope.freq_base", 10000.0))
        factors = next((t for t in self._reader.tensors if t.name == _ROPE_FREQS), None)
        kind = self._field(f"{self.architecture}.rope.scaling.type", "none")
        if factors is not None:
            return self._llama3_rope(theta, head_dim, np.array(factors.data, np.float32))
        if kind == "none":
            return {"rope_type": "default", "rope_theta": theta}
        if kind not in ("linear", "yarn"):
            raise ConfigError(
                f"{self.architecture}.rope.scaling.type: expected none, linear or yarn, "
                f"got {kind!r}"
            )
        rope = {
            "rope_type": kind,
            "rope_theta": theta,
            "factor": float(self._number("rope.scaling.factor")),
        }
        if kind == "yarn":
            original = self._size("rope.scaling.original_context_length")
            rope["original_max_position_embeddings"] = original
        return rope

    def _llama3_rope(
        self, theta: float, head_dim: int, factors: np.ndarray[Any, np.dtype[np.float32]]
    ) -> dict[str, Any]:
        """Return the ``llama3`` settings that give ``factors``, which divide the frequencies."""
        settings: dict[str, Any] = {"factor": float(factors.max()), **_LLAMA3}
        rope = partial(RopeConfig, theta=theta, rotary_dim=head_dim)
        plain = inverse_frequencies(rope())
        scaled = inverse_frequencies(rope(rope_type="llama3", **settings))
        found = torch.from_numpy(factors)
        if found.shape != plain.shape or not torch.allclose(plain / scaled, found, rtol=1e-3):
            raise ConfigError(
                f"{_ROPE_FREQS}: expected the factors of llama3 rope with {_LLAMA3}, got others"
            )
        return {"rope_type": "llama3", "rope_theta": theta, **settings}

    def _end_tokens(self) -> list[int]:
        """Return the tokens that end a text or a turn."""
        ids = [self._field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        return list(dict.fromkeys(int(i) for i in ids if i is not None))

    def _dtype(self) -> torch.dtype:
        """Return the type of the first layer's weights; bfloat16 where they are quantized."""
        tensor = self._tensors.get("model.layers.0.self_attn.q_proj.weight")
        return (
            torch.bfloat16
            if tensor is None
            else _FLOATS.get(tensor.tensor_type.name, torch.bfloat16)
        )

    def _field(self, key: str, default: object = None) -> Any:  # noqa: ANN401
        """Return the value of a metadata key; ``default`` where the file does not have the key."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _number(self, key: str, default: float | None = None) -> float:
        """Return a number of the architecture."""
        name = f"{self.architecture}.{key}"
        value = self._field(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name}: expected a number, got {value!r}")
        return value

    def _size(self, key: str, default: int | None = None) -> int:
        """Return a count >= 1 of the architecture."""
        value = self._number(key, default)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.architecture}.{key}: expected an integer >= 1, got {value}")
        return value


def _reader_class() -> Any:  # noqa: ANN401 - gguf's types are Any
    """Return gguf's reader, made faster; only GGUF files need the package."""
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]
        """Slices plain arrays: each slice of a ``memmap`` is made in Python, for every token."""

        @property
        def data(self) -> npt.NDArray[np.uint8]:
            return self._data

        @data.setter
        def data(self, mapped: npt.NDArray[np.uint8]) -> None:
            self._data = mapped.view(np.ndarray)

    return Reader


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return transformers' tokenizer of a GGUF file; raise whatever transformers raises."""
    from transformers import PreTrainedTokenizerFast  # takes a second

    # AutoTokenizer's differs at most in the name of its class, and takes 7 seconds more: it
    # reads the whole file to find that name.
    return PreTrainedTokenizerFast.from_pretrained(
        str(path.parent), gguf_file=path.name, local_files_only=True, trust_remote_code=False
    )


def _hugging_face_name(name: str) -> str:
    """Return a tensor's name in a Hugging Face checkpoint; unknown names stay as they are."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _NAMES:
        return name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def _shape(tensor: Any) -> tuple[int, ...]:  # noqa: ANN401 - gguf's ReaderTensor
    """Return a tensor's shape in torch's order; GGUF lists the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _is_supported(kind: Any) -> bool:  # noqa: ANN401 - gguf's GGMLQuantizationType
    """Return whether the gguf package can dequantize a quantization."""
    from gguf import GGML_QUANT_SIZES, dequantize

    _, num_bytes = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, num_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _unpermuted(
    values: np.ndarray[Any, np.dtype[np.float32]], num_heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return rows in Hugging Face's order: a head's even rows in llama.cpp's order come first.

    llama.cpp rotates the pairs (2i, 2i + 1) of a llama head, Hugging Face (i, i + head_dim / 2).
    """
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
