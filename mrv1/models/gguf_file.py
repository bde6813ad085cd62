"""A GGUF file, or a split model's files: configuration, tensors under Hugging Face's names."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from math import isclose, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from mrv1.errors import ConfigError
from mrv1.models.architectures import ARCHITECTURES, missing_feature
from mrv1.models.experts import ExpertFamily
from mrv1.models.fused import GATE_UP, QKV
from mrv1.models.gguf_vocab import TOKENS, Vocabulary
from mrv1.models.quantization.ggml_blocks import BLOCK_TYPES
from mrv1.models.quantization.gguf import BLOCKS, GGUFBlocks
from mrv1.models.quantization.packing import EMBED_MODULE, HEAD_MODULE, LAYERS
from mrv1.models.rope import RopeConfig, attention_factor, inverse_frequencies

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SUFFIX = ".gguf"

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
}
"""``general.architecture`` -> architecture of a Hugging Face checkpoint. Mistral is ``llama``,
dense Granite 4 ``granite``; ``llama`` with experts is Mixtral."""
_MIXTRAL = "MixtralForCausalLM"
_PERMUTED = ("llama", "smollm3", "granite")
"""Architectures whose queries and keys llama.cpp stores in another order."""

_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Families of Gemma, whose norms are stored as 1 + w, and the layers of their models of 27B, whose
scores llama.cpp scales by the share of a head in the hidden size."""

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
_OUT_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OTHER_NAMES = {
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "olmo2": _OUT_NORMS,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gemma2": _OUT_NORMS | {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": _OUT_NORMS | {"ffn_norm": "pre_feedforward_layernorm"},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
}
"""The same for single architectures."""

_ROPE_FREQS = "rope_freqs.weight"
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Settings of every published model with ``llama3`` rope; only the factor differs."""

_NEUTRAL: dict[str, tuple[float | bool, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_group_count": (0,),
    "expert_group_used_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "use_parallel_residual": (False,),
}
"""Settings of the architecture -> values that change nothing; 0 is llama.cpp's for none."""

_SCALES = ("attention.scale", "embedding_scale", "logit_scale", "residual_scale")
"""Settings that only ``granite`` may have."""

_STACKS = {"ffn_gate": 0, "ffn_up": 1, "ffn_down": 2}
"""Names of experts' matrices, of each layer together -> which of ``ExpertFamily.parts``."""
_CHOICE_BIAS = "exp_probs_b"

_WITHOUT_EFFECT = frozenset(
    {
        "attention.layer_norm_epsilon",  # there is no such norm
        "pooling_type",  # of embeddings
        "rope.scaling.finetuned",  # a remark
        "rope.scaling.original_context_length",  # read for yarn, and without effect elsewhere
        "tensor_data_layout",  # a remark
        "vocab_size",  # the embedding has it
        # Of dense Granite 4, whose converter writes settings of layers that it does not have.
        "expert_shared_feed_forward_length",
        "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.inner_size",
        "ssm.time_step_rank",
    }
)  # fmt: skip

NUMBERS = ("F64", "F32", "F16", "BF16")
"""Types of tensors that are not quantized."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16}


def open_gguf(path: Path) -> GGUFFile:
    """Return a file, given any part of it; the last stays open, as a vocabulary takes a second."""
    match = re.fullmatch(r"(.*-)\d{5}(-of-(\d{5})\.gguf)", path.name)
    files: tuple[Path, ...] = (path,)
    if match is not None and int(match[3]) > 1:  # the name tells how many files there are
        numbers = range(1, int(match[3]) + 1)
        files = tuple(path.with_name(f"{match[1]}{number:05}{match[2]}") for number in numbers)
    states = []
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            of = f", one of {len(files)} files of a split model" if len(files) > 1 else ""
            raise ConfigError(f"{file.name}{of}: not a readable GGUF file: {error}") from error
        states.append((status.st_mtime_ns, status.st_size))
    return _open(files, tuple(states))


@lru_cache(maxsize=1)
def _open(files: tuple[Path, ...], states: tuple[tuple[int, int], ...]) -> GGUFFile:
    """Return a GGUF file; times and sizes make a file that has changed another key."""
    return GGUFFile(files)


class GGUFFile:
    """An open GGUF file, or all files of a split model; a tensor is dequantized when asked for.

    ConfigError: a file cannot be read, is no model, or its architecture is not supported.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        readers = [_reader(file) for file in files]
        self._fields = dict(readers[0].fields)
        self._asked: set[str] = set()
        """Keys that the configuration has asked for."""
        if (kind := self._field("general.type", "model")) != "model":
            raise ConfigError(f"general.type: expected model, got {kind!r}")
        self.architecture = self._field("general.architecture")
        """llama.cpp's name of the family."""
        if self.architecture not in FAMILIES:
            raise ConfigError(
                f"general.architecture: expected one of {', '.join(FAMILIES)}, "
                f"got {self.architecture!r}{missing_feature(self.architecture)}"
            )
        self.family = FAMILIES[self.architecture]
        """Architecture of the Hugging Face checkpoint."""
        if self.architecture == "llama" and self._number("expert_count", 0):
            self.family = _MIXTRAL
        self._experts = ARCHITECTURES[self.family].experts
        keys = [key for key in self._fields if key.startswith("tokenizer.")]
        metadata = {key: self._field(key) for key in keys}
        self.vocabulary = Vocabulary(metadata, self._field("general.name"))
        """Tokens and chat templates."""
        self.has_tokenizer = TOKENS in keys
        """Whether the file contains a vocabulary."""
        for key in keys:
            del self._fields[key], readers[0].fields[key]  # tens of MB
        tensors = [tensor for reader in readers for tensor in reader.tensors]
        names = _NAMES | _OTHER_NAMES.get(self.architecture, {})
        if self._experts is not None:
            names |= _expert_names(self._experts)
        self._tensors = {_hugging_face_name(tensor.name, names): tensor for tensor in tensors}
        self._check_split(files, readers, len(tensors))
        self._plain_stacks = self._not_kept()
        """Beginnings of the names of experts whose blocks are not kept."""
        self._tensors = {
            part: half for name in self._tensors for part, half in self._parts(name).items()
        }
        # The factors of llama3 rope are a part of the configuration; only llama has them.
        factors = self._tensors.pop(_ROPE_FREQS, None) if self.architecture == "llama" else None
        self._factors = None if factors is None else np.array(factors.data, np.float32)

    def _parts(self, name: str) -> dict[str, Any]:
        """Return a tensor by its name, or one of several linear layers as theirs."""
        tensor = self._tensors[name]
        if ".experts.{}." in name:  # of all experts
            shape, count = tensor.shape[:-1], int(tensor.shape[-1])
            return {
                name.format(expert): tensor._replace(
                    shape=shape,
                    n_elements=tensor.n_elements // count,
                    n_bytes=tensor.n_bytes // count,
                    data=tensor.data[expert],
                )
                for expert in range(count)
            }
        if self._experts is not None and self._experts.bias and name.endswith(self._experts.bias):
            ones = [1] * (self._experts.bias_dims - 1)
            return {name: tensor._replace(shape=np.array([*tensor.shape, *ones]))}
        total = int(tensor.shape[-1])  # rows, as GGUF lists the fastest dimension first
        for fused, sizes in (
            ("mlp.gate_up_proj", dict.fromkeys(GATE_UP, total // 2)),
            ("self_attn.qkv_proj", self._qkv_rows() if "qkv_proj" in name else {}),
        ):
            if fused in name and sum(sizes.values()) == total:
                starts = np.cumsum([0, *sizes.values()])
                return {
                    name.replace(fused, part): tensor._replace(
                        shape=np.array([*tensor.shape[:-1], count]),
                        n_elements=tensor.n_elements * count // total,
                        n_bytes=tensor.n_bytes * count // total,
                        data=tensor.data[first : first + count],
                    )
                    for (part, count), first in zip(sizes.items(), starts, strict=False)
                }
        return {name: tensor}

    def _qkv_rows(self) -> dict[str, int]:
        num_heads = self._size("attention.head_count")
        hidden = self._size("embedding_length")
        head_dim = self._size("attention.key_length", max(hidden // num_heads, 1))
        counts = (num_heads, *[self._num_kv_heads(num_heads)] * 2)
        return dict(zip(QKV, (count * head_dim for count in counts), strict=True))

    def _check_split(
        self, files: Sequence[Path], readers: Sequence[Any], num_tensors: int
    ) -> None:
        """Check that the files are all files of one model, each in its place."""
        for number, (file, reader) in enumerate(zip(files, readers, strict=True)):
            no, count = (
                None if (field := reader.get_field(key)) is None else field.contents()
                for key in ("split.no", "split.count")
            )
            if (no, count) != (number, len(files)) and (
                len(files) > 1 or count not in (None, 0, 1)
            ):
                raise ConfigError(
                    f"{file.name}: expected split.no {number} and split.count {len(files)} by its "
                    f"name, got {no} and {count}"
                )
        expected = self._field("split.tensors.count", num_tensors)
        if not len(self._tensors) == num_tensors == expected:
            raise ConfigError(
                f"split.tensors.count: expected {num_tensors}, as many as different tensors in "
                f"the files, got {expected}"
            )

    def headers(self, *, keeps_blocks: bool) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return each tensor's shape and dtype, by its name in a Hugging Face checkpoint.

        With ``keeps_blocks``, matrices are under the names of their blocks.
        """
        blocks = self.quantization() if keeps_blocks else None
        kinds = {} if blocks is None else dict(blocks.kinds)
        headers: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, tensor in self._tensors.items():
            shape, module = _shape(tensor), name.removesuffix(".weight")
            if module in kinds:
                block = BLOCK_TYPES[kinds[module]]
                blocks_shape = (shape[0], shape[1] // block.num_inputs, block.num_bytes)
                headers[f"{module}.{BLOCKS}"] = blocks_shape, "U8"
            else:
                headers[name] = shape, "F32"
        return headers

    def check_quantizations(self) -> None:
        """Raise a ``ConfigError`` unless the gguf package can dequantize all of the file's."""
        kinds = {tensor.tensor_type for tensor in self._tensors.values()}
        if unsupported := sorted(kind.name for kind in kinds if not _is_supported(kind)):
            raise ConfigError(
                "weights: expected quantizations that the gguf package can dequantize, got "
                + ", ".join(unsupported)
            )

    def quantization(self) -> GGUFBlocks | None:
        """Return the types of the layers' matrices; None = none is of a type that is kept."""
        kinds: list[tuple[str, str]] = []
        sizes: dict[str, list[int]] = {}
        for name, tensor in self._tensors.items():
            kind, module = tensor.tensor_type.name, name.removesuffix(".weight")
            if module != name and self._is_kept(module, kind):
                kinds.append((module, kind))
            elif kind not in NUMBERS:
                sizes.setdefault(kind, []).append(int(tensor.n_bytes))
        dequantized = tuple((kind, len(each), sum(each)) for kind, each in sizes.items())
        return GGUFBlocks(kinds=tuple(kinds), dequantized=dequantized) if kinds else None

    def _not_kept(self) -> frozenset[str]:
        """Return stacks of experts beside shared ones, or of gates and ups of different types."""
        if self._experts is None:
            return frozenset()
        gate, up, _ = self._experts.parts
        kinds: dict[str, dict[str, Any]] = {}
        for name, tensor in self._tensors.items():
            layer, is_stack, part = name.partition(".experts.{}.")
            if is_stack:
                kinds.setdefault(layer, {})[part.removesuffix(".weight")] = tensor.tensor_type
        has_shared = any(".shared_experts." in name for name in self._tensors)
        return frozenset(
            f"{layer}.experts."
            for layer, own in kinds.items()
            if has_shared or own.get(gate) != own.get(up)
        )

    def _is_kept(self, module: str, kind: str) -> bool:
        """Return whether a matrix's blocks can be kept; no kernel looks rows up in MXFP4."""
        experts, is_table = self._experts, module == EMBED_MODULE
        if kind not in BLOCK_TYPES or (is_table and kind == "MXFP4"):
            return False
        if experts is not None and module.startswith(LAYERS):
            layer, is_expert, _ = module.partition(".experts.")
            is_plain = f"{layer}{is_expert}" in self._plain_stacks or ".shared_experts." in module
            return not is_plain and not module.endswith(f".{experts.block}.{experts.router}")
        return module.startswith(LAYERS) or module in (HEAD_MODULE, EMBED_MODULE)

    def get_slice(self, name: str) -> torch.Tensor:
        """Return what a part of a tensor can be cut from: the tensor as ``get_tensor`` does."""
        return self.get_tensor(name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor by its name in a Hugging Face checkpoint, float32 on the CPU.

        A name that ends ``.blocks`` is of a matrix whose blocks are kept: ``[out, blocks, bytes]``
        uint8.
        """
        from gguf import dequantize

        module = name.removesuffix(f".{BLOCKS}")
        tensor = self._tensors[name if module == name else f"{module}.weight"]
        if module == name:
            values = dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor))
            values = np.require(values, np.float32, ("C", "W"))  # torch warns of read-only memory
        else:
            size = BLOCK_TYPES[tensor.tensor_type.name].num_bytes
            values = np.require(tensor.data, np.uint8, ("C", "W"))
            values = values.reshape(_shape(tensor)[0], -1, size)
        if self.architecture in _PERMUTED and (".q_proj." in name or ".k_proj." in name):
            num_heads = self._size("attention.head_count")
            if ".k_proj." in name:
                num_heads = self._num_kv_heads(num_heads)
            values = _unpermuted(values, num_heads)
        if self.architecture in _GEMMAS and name.endswith("norm.weight"):
            values = values - 1
        return torch.from_numpy(values)

    def config(self) -> PretrainedConfig:
        """Return the model's configuration as transformers' class of the family.

        ConfigError: a setting is missing or wrong, or the model has a feature that mrv1 lacks.
        """
        from transformers import AutoConfig

        size = self._size
        num_heads, hidden = size("attention.head_count"), size("embedding_length")
        head_dim = size("attention.key_length", max(hidden // num_heads, 1))
        context = size("context_length")
        num_rows = self._check_settings(head_dim, context)
        settings = {
            "architectures": [self.family],
            "vocab_size": num_rows,
            "hidden_size": hidden,
            "intermediate_size": size("feed_forward_length"),
            "num_hidden_layers": size("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._num_kv_heads(num_heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": context,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "rope_parameters": self._rope(head_dim, context),
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in self._tensors,
            "eos_token_id": self.vocabulary.ends,
            "dtype": self._dtype(),
            **self._of_family(head_dim, context),
            **self._of_experts(),
        }
        for key in self._fields:
            name = key.removeprefix(f"{self.architecture}.")
            if name != key and key not in self._asked and name not in _WITHOUT_EFFECT:
                raise ConfigError(f"{key}: expected none, got {self._field(key)!r}")
        try:
            return AutoConfig.for_model(ARCHITECTURES[self.family].model_type, **settings)
        except Exception as error:  # sizes that contradict each other: transformers' own types
            reason = " ".join(str(error).split())
            raise ConfigError(f"{self.architecture}: expected other settings: {reason}") from error

    def _of_family(self, head_dim: int, context: int) -> dict[str, Any]:
        """Return the settings that only some families have."""
        layer, number = "model.layers.0.self_attn", self._number
        if self.architecture == "smollm3":
            return {"no_rope_layer_interval": 4}  # llama.cpp's, which has no setting for it
        if self.architecture == "seed_oss":
            return {"attention_out_bias": f"{layer}.o_proj.bias" in self._tensors}
        if self.architecture == "glm4":
            return {"partial_rotary_factor": self._size("rope.dimension_count") / head_dim}
        if self.architecture == "phi3":  # llama.cpp ignores its window; 0 is its value for none
            window = self._number("attention.sliding_window", 0)
            return {
                "partial_rotary_factor": self._size("rope.dimension_count") / head_dim,
                "sliding_window": self._size("attention.sliding_window") if window else None,
            }
        if self.architecture in _GEMMAS:
            return self._of_gemma(head_dim, context)
        if self.architecture != "granite":
            return {}
        self._expect("rope.scaling.finetuned", (True,))  # there it says whether layers have rope
        return {  # 0 is llama.cpp's value for none
            "attention_multiplier": number("attention.scale", 0) or head_dim**-0.5,
            "embedding_multiplier": number("embedding_scale", 0) or 1.0,
            "residual_multiplier": number("residual_scale", 0) or 1.0,
            "logits_scaling": number("logit_scale"),
        }

    def _of_experts(self) -> dict[str, Any]:
        """Return the settings of experts, with llama.cpp's values where it has no setting."""
        family = self._experts
        if family is None:
            return {}
        counts = {"num_experts": "expert_count", "top_k": "expert_used_count"}
        settings = {family.routing[field]: self._size(key) for field, key in counts.items()}
        renormalizes = self.architecture != "olmoe"
        if isinstance(name := family.routing["renormalizes"], str):
            settings[name] = renormalizes
        if family.intermediate_size == "intermediate_size":
            self._expect("expert_feed_forward_length", (self._size("feed_forward_length"),))
        else:
            settings[family.intermediate_size] = self._size("expert_feed_forward_length")
        self._expect("expert_gating_func", (1,))  # softmax
        self._expect("expert_weights_norm", (renormalizes,))
        self._expect("expert_weights_scale", (0, 1))
        if self.architecture == "ernie4_5-moe":
            settings |= {
                family.routing["num_shared"]: int(self._number("expert_shared_count", 0)),
                "moe_layer_interval": self._size("interleave_moe_layer_step", 1),
                "moe_layer_start_index": int(self._number("leading_dense_block_count", 0)),
            }
        return settings

    def _of_gemma(self, head_dim: int, context: int) -> dict[str, Any]:
        """Return Gemma's settings, with llama.cpp's values where it has no setting."""
        is_27b = self._size("block_count") == _GEMMAS[self.architecture]
        head_share = self._size("embedding_length") // self._size("attention.head_count")
        settings: dict[str, Any] = {"query_pre_attn_scalar": head_share if is_27b else head_dim}
        if self.architecture == "gemma3":
            if self._number("attention.sliding_window", 0):
                settings["sliding_window"] = self._size("attention.sliding_window")
            else:  # no layer has a window
                settings["layer_types"] = ["full_attention"] * self._size("block_count")
            theta = float(self._number("rope.freq_base_swa", 10000.0))
            local = {"rope_type": "default", "rope_theta": theta}
            ropes = {"full_attention": self._rope(head_dim, context), "sliding_attention": local}
            cap = self._number("final_logit_softcapping", 0) or None
            return settings | {"rope_parameters": ropes, "final_logit_softcapping": cap}
        return settings | {
            "sliding_window": self._size("attention.sliding_window", 4096),
            "attn_logit_softcapping": self._number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": self._number("final_logit_softcapping", 30.0),
        }

    def _num_kv_heads(self, num_q_heads: int) -> int:
        """Return the number of KV heads; dense Granite 4 has a list of equal ones."""
        key = "attention.head_count_kv"
        given = self._field(f"{self.architecture}.{key}", num_q_heads)
        if isinstance(given, list) and len(set(given)) == 1 and isinstance(given[0], int):
            return int(given[0])
        return self._size(key, num_q_heads)

    def _check_settings(self, head_dim: int, context: int) -> int:
        """Check settings that must have certain values; return the rows of the embedding."""
        embed = self._tensors.get("model.embed_tokens.weight")
        if embed is None or len(_shape(embed)) != 2:
            found = "none" if embed is None else f"one of shape {_shape(embed)}"
            raise ConfigError(f"token_embd.weight: expected the embedding, found {found}")
        num_rows, width = _shape(embed)
        names = (name.split(".") for name in self._tensors if name.startswith("model.layers."))
        window = self._number("attention.sliding_window", context)
        is_partial = self.architecture in ("glm4", "phi3")
        rotary_dims = range(2, head_dim + 1, 2) if is_partial else [head_dim]
        neutral = _NEUTRAL | {"attention.scale": (0, head_dim**-0.5)}
        if self._experts is not None:
            del neutral["expert_count"], neutral["expert_used_count"]
        if self.architecture == "granite":
            neutral = {key: value for key, value in neutral.items() if key not in _SCALES}
        if self.architecture == "gemma2":
            neutral = {key: value for key, value in neutral.items() if "softcap" not in key}
        if self.architecture == "gemma3":
            del neutral["final_logit_softcapping"]
        if self.architecture not in (*_GEMMAS, "phi3"):
            neutral["attention.sliding_window"] = (max(context, window), 0)
        for key, allowed in {
            **neutral,
            "attention.value_length": (head_dim,),
            "block_count": (len({name[2] for name in names}),),  # before a loop over the layers
            "embedding_length": (width,),
            "rope.dimension_count": (*rotary_dims,),
        }.items():
            self._expect(key, allowed)
        if len(self.vocabulary.tokens) > num_rows:
            raise ConfigError(
                f"{TOKENS}: expected at most {num_rows}, one for each row of token_embd.weight, "
                f"got {len(self.vocabulary.tokens)}"
            )
        return num_rows

    def _rope(self, head_dim: int, context: int) -> dict[str, Any]:
        """Return ``rope_parameters`` as transformers has them."""
        theta = float(self._number("rope.freq_base", 10000.0))
        key = f"{self.architecture}.rope.scaling.type"
        kind = self._field(key, "linear")
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 0))
        factor = float(factor or 1)  # 0 is llama.cpp's value for none
        if kind not in ("none", "linear", "yarn"):
            raise ConfigError(f"{key}: expected none, linear or yarn, got {kind!r}")
        if kind == "none" or (kind == "linear" and factor == 1):
            kind = "default"
        if self._factors is not None and kind != "default":
            raise ConfigError(f"{_ROPE_FREQS}: expected none beside rope of the type {kind}")
        if kind == "yarn":
            return self._yarn_rope(theta, head_dim, factor, context)
        self._expect("rope.scaling.attn_factor", (1,))
        if self._factors is not None:
            return self._llama3_rope(theta, head_dim, self._factors)
        rope = {"rope_type": kind, "rope_theta": theta}
        return rope if kind == "default" else {**rope, "factor": factor}

    def _yarn_rope(
        self, theta: float, head_dim: int, factor: float, context: int
    ) -> dict[str, Any]:
        """Return the settings of yarn; ``attn_factor`` multiplies the factor of cos and sin."""
        number = self._number
        settings: dict[str, Any] = {
            "factor": factor,
            "original_max_position_embeddings": self._size(
                "rope.scaling.original_context_length", context
            ),
            "beta_fast": float(number("rope.scaling.yarn_beta_fast", 32)),
            "beta_slow": float(number("rope.scaling.yarn_beta_slow", 1)),
        }
        if multiplier := number("rope.scaling.yarn_log_multiplier", 0):
            settings |= {"mscale": 1.0, "mscale_all_dim": float(multiplier)}
        if (scale := number("rope.scaling.attn_factor", 1)) != 1:
            plain = RopeConfig(rope_type="yarn", theta=theta, rotary_dim=head_dim, **settings)
            settings["attention_factor"] = scale * attention_factor(plain)
        return {"rope_type": "yarn", "rope_theta": theta, **settings}

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

    def _dtype(self) -> torch.dtype:
        """Return the type of the first layer's weights; bfloat16 where they are quantized."""
        tensor = self._tensors.get("model.layers.0.self_attn.q_proj.weight")
        name = "" if tensor is None else tensor.tensor_type.name
        return _FLOATS.get(name, torch.bfloat16)

    def _field(self, key: str, default: object = None) -> Any:  # noqa: ANN401
        """Return the value of a metadata key; ``default`` where the file does not have the key."""
        self._asked.add(key)
        field = self._fields.get(key)
        try:
            return default if field is None else field.contents()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{key}: expected text in UTF-8, got other bytes: {error}"
            ) from error

    def _number(self, key: str, default: float | None = None) -> float:
        name = f"{self.architecture}.{key}"
        value = self._field(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise ConfigError(f"{name}: expected a number, got {value!r}")
        return value

    def _size(self, key: str, default: int | None = None) -> int:
        """Return a count >= 1 of the architecture."""
        value = self._number(key, default)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.architecture}.{key}: expected an integer >= 1, got {value}")
        return value

    def _expect(self, key: str, allowed: Sequence[float]) -> None:
        """Check that a setting of the architecture is absent, or has one of these values."""
        name = f"{self.architecture}.{key}"
        value = self._field(name, allowed[0])
        if not isinstance(value, int | float) or not any(
            isclose(value, a, rel_tol=1e-6) for a in allowed
        ):
            shown = " or ".join(map(str, allowed))
            raise ConfigError(f"{name}: expected {shown} or none, got {value!r}")


def _reader(file: Path) -> Any:  # noqa: ANN401 - gguf's types are Any
    """Return gguf's reader of a file, faster and careful; ConfigError: it cannot be read."""
    try:
        from gguf import GGUFReader, GGUFValueType
    except ImportError as error:
        raise ConfigError(
            f"model: expected the package gguf to read {file.name}, got {error}; run "
            "`pip install gguf`"
        ) from error

    class Reader(GGUFReader):  # type: ignore[misc]
        """Reads arrays as a whole, not in Python for every item, and nothing behind the end."""

        @property
        def data(self) -> npt.NDArray[np.uint8]:
            return self._data

        @data.setter
        def data(self, mapped: npt.NDArray[np.uint8]) -> None:
            self._data = mapped.view(np.ndarray)  # a slice of a memmap is made in Python

        def _get(
            self,
            offset: int,
            dtype: npt.DTypeLike,
            count: int = 1,
            override_order: str | None = None,
        ) -> npt.NDArray[Any]:
            values: npt.NDArray[Any] = super()._get(offset, dtype, count, override_order)
            if len(values) != count:
                raise ValueError(f"expected {count} values at byte {offset}, got {len(values)}")
            return values

        def _get_field_parts(
            self, orig_offs: int, raw_type: int
        ) -> tuple[int, list[Any], list[int], list[Any]]:
            found: tuple[int, list[Any], list[int], list[Any]]
            if self.byte_order == "S":  # gguf.dequantize would not swap what it dequantizes
                raise ValueError("expected the byte order of this machine, got the other one")
            if raw_type != GGUFValueType.ARRAY:
                found = super()._get_field_parts(orig_offs, raw_type)
                return found
            item = GGUFValueType(self._get(orig_offs, np.uint32)[0])
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            parts: list[Any] = []
            end = orig_offs + 12
            if item == GGUFValueType.STRING:
                content = self._data.data
                length = struct.Struct("=Q")
                for _ in range(count):
                    (size,) = length.unpack_from(content, end)
                    end += length.size + size
                    parts.append(content[end - size : end])
                if end > len(content):
                    raise ValueError(f"expected {count} strings, got fewer")
            else:
                parts.append(self._get(end, self.gguf_scalar_to_np[item], count))
                end += parts[0].nbytes
            types = [GGUFValueType.ARRAY, item]
            return end - orig_offs, parts, list(range(len(parts))), types

    try:
        return Reader(file)
    except Exception as error:  # a damaged file fails anywhere in the reader
        raise ConfigError(f"{file.name}: not a readable GGUF file: {error}") from error


def _expert_names(family: ExpertFamily) -> dict[str, str]:
    """Return the names of a layer's experts; ``{}`` stands for the number of one."""
    names = {"ffn_gate_inp": f"{family.block}.{family.router}"}
    for name, part in _STACKS.items():
        names[f"{name}_exps"] = f"{family.block}.experts.{{}}.{family.parts[part]}"
        names[f"{name}_shexp"] = f"{family.block}.shared_experts.{family.parts[part]}"
    if family.bias is not None:
        names[_CHOICE_BIAS] = f"{family.block}.{family.bias}".removesuffix("_bias")
    return names


def _hugging_face_name(name: str, names: Mapping[str, str]) -> str:
    """Return a tensor's name in a Hugging Face checkpoint; unknown names stay as they are."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        return name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{names[match[2]]}{'_' if match[2] == _CHOICE_BIAS else '.'}{match[3]}"


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


def _unpermuted(values: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Return a head's rows so that (i, i + head_dim / 2) rotate; llama.cpp: (2i, 2i + 1)."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
