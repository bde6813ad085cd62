"""The tensors of a decoder, and the checkpoint tensor that each part of them comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from mrv1.errors import ConfigError
from mrv1.kernels.layers.quantized import QuantizedWeight, inputs_problem
from mrv1.models.architectures import ARCHITECTURES, NormOrder
from mrv1.models.config import ModelConfig
from mrv1.models.expert_weights import (
    ExpertWeights,
    empty_experts,
    expert_tensors,
    full_precision_modules,
    mixed_experts,
    quantized_experts,
)
from mrv1.models.files import raise_problems
from mrv1.models.parallel import ParallelContext
from mrv1.models.places import FLOAT_DTYPES, Place, plus_one, same
from mrv1.models.quantization import ModuleFormat, ModulePart, shared_rows

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
"""A checkpoint's tensors with a row for each token."""


Matrix = torch.Tensor | QuantizedWeight
"""[out, in], in the model's dtype, or codes with scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A linear layer's matrix and bias."""

    matrix: Matrix | tuple[Matrix, ...]
    """[out, in]; several where modules that follow each other are stored in different ways."""
    bias: torch.Tensor | None = None
    """[out], in the model's dtype; None = none."""

    @property
    def parts(self) -> tuple[Matrix, ...]:
        """The matrices that follow each other."""
        return self.matrix if isinstance(self.matrix, tuple) else (self.matrix,)

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        parts = self.parts
        return torch.Size((sum(part.shape[0] for part in parts), parts[0].shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.parts[0].dtype

    @property
    def plain(self) -> torch.Tensor:
        """``matrix`` in the model's dtype; ValueError: it is quantized."""
        if not isinstance(self.matrix, torch.Tensor):
            codes = [p.code for p in self.parts if isinstance(p, QuantizedWeight)]
            raise ValueError(f"weight: expected a plain matrix, got {', '.join(codes)} codes")
        return self.matrix

    @property
    def prefetched(self) -> torch.Tensor:
        """What a product reads first of the matrix, but for scales."""
        first = self.parts[0]
        return first.codes if isinstance(first, QuantizedWeight) else first

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix, with its scales, and of the bias."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return bias + sum(part.nbytes for part in self.parts)

    def rows(self, start: int, stop: int) -> Matrix:
        """Return views of rows, which are those of one module."""
        for part in self.parts:
            if stop <= part.shape[0]:
                return (
                    part[start:stop] if isinstance(part, torch.Tensor) else part.rows(start, stop)
                )
            start, stop = start - part.shape[0], stop - part.shape[0]
        raise ValueError("weight: expected rows of one module, got more")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer; a norm is ``[hidden]``, in the model's dtype, and None if the model lacks it.

    Norms that add 1 to their weights have the sums here, in float32 or wider.
    """

    input_norm: torch.Tensor | None = None
    """Of the input of attention."""
    qkv: Weight
    """[(q_heads + 2 kv_heads) * head_dim, hidden]: query rows, then key, then value."""
    q_norm: torch.Tensor | None = None
    """[head_dim], or [q_heads * head_dim] where all heads are one vector."""
    k_norm: torch.Tensor | None = None
    """[head_dim], or [kv_heads * head_dim]."""
    sinks: torch.Tensor | None = None
    """[q_heads] float32: the logit sink of each query head; None = there are none."""
    o: Weight
    """[hidden, q_heads * head_dim]."""
    attention_out_norm: torch.Tensor | None = None
    """Of the output of attention."""
    mlp_norm: torch.Tensor | None = None
    """Of the input of the MLP."""
    gate_up: Weight | None = None
    """[2 * intermediate, hidden]: gate rows, then up; None = the layer has experts."""
    down: Weight | None = None
    """[hidden, intermediate]; None = the layer has experts."""
    experts: ExpertWeights | None = None
    """None = the layer has one MLP."""
    mlp_out_norm: torch.Tensor | None = None
    """Of the output of the MLP."""

    @property
    def mlp(self) -> tuple[Weight, Weight]:
        """``gate_up`` and ``down``; ValueError: the layer has experts."""
        if self.gate_up is None or self.down is None:
            raise ValueError("layer: expected one with an MLP, got one with experts")
        return self.gate_up, self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """A whole decoder; the matrix of ``lm_head`` is ``embed`` itself where the two are tied."""

    embed: Matrix
    """[vocab, hidden]."""
    layers: tuple[LayerWeights, ...]
    """One entry per layer."""
    final_norm: torch.Tensor
    """[hidden]."""
    lm_head: Weight
    """[vocab, hidden]."""

    @property
    def codes(self) -> tuple[list[QuantizedWeight], list[QuantizedWeight]]:
        """The quantized matrices of linear layers, and those of experts."""
        layers = self.layers
        places = [each for la in layers for each in (la.qkv, la.o, la.gate_up, la.down) if each]
        linear = [part for each in (self.lm_head, *places) for part in each.parts]
        experts = [la.experts for la in layers if la.experts]
        stacks = [stack for each in experts for stack in (each.gate_up, each.down)]
        codes, of_experts = (
            [each for each in every if isinstance(each, QuantizedWeight)]
            for every in (linear, stacks)
        )
        return codes, of_experts


class _Place(NamedTuple):
    """A field of ``LayerWeights`` and the checkpoint's tensors in it."""

    parts: dict[str, int]
    """Each tensor's name, without ``.weight``, and its rows: the field has them in this order."""
    columns: int | None = None
    """Columns of a ``Weight``; None = the field is a vector."""
    has_bias: bool = False
    is_parameter: bool = False
    """Whether the names are those of the tensors, which have no ``.weight``, and float32."""


_OUT_NORMS = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_NORMS: dict[NormOrder, dict[str, str]] = {
    "before": {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": _OUT_NORMS,
    "both": {
        "input_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", **_OUT_NORMS
    },
}  # fmt: skip
"""Norms of a layer by field, and their names in a checkpoint."""


def _layer_places(config: ModelConfig, layer: int) -> dict[str, _Place]:
    """Return the fields that a layer has, in the order of ``LayerWeights``, but its experts."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = (n * config.head_dim for n in (config.num_q_heads, config.num_kv_heads))
    qkv = {"q": q_size, "k": kv_size, "v": kv_size}
    gate_up = {"mlp.gate_proj": intermediate, "mlp.up_proj": intermediate}
    places = {name: _Place({stored: hidden}) for name, stored in _NORMS[config.norm_order].items()}
    places |= {
        "qkv": _Place({f"self_attn.{i}_proj": n for i, n in qkv.items()}, hidden, config.qkv_bias),
        "o": _Place({"self_attn.o_proj": hidden}, q_size, config.o_bias),
    }
    if not config.has_experts(layer):
        places["gate_up"] = _Place(gate_up, hidden, config.mlp_bias)
        places["down"] = _Place({"mlp.down_proj": hidden}, intermediate, config.mlp_bias)
    if config.qk_norm != "none":
        for i in "qk":
            rows = config.head_dim if config.qk_norm == "head" else qkv[i]
            places[f"{i}_norm"] = _Place({f"self_attn.{i}_norm": rows})
    if config.has_sinks:
        sinks = {"self_attn.sinks": config.num_q_heads}
        places["sinks"] = _Place(sinks, is_parameter=True)
    return {each.name: places[each.name] for each in fields(LayerWeights) if each.name in places}


def part_rows(config: ModelConfig, layer: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return a layer's linear weights but experts: the rows of each module in it, its inputs."""
    return {
        name: (tuple(place.parts.values()), place.columns)
        for name, place in _layer_places(config, layer).items()
        if place.columns is not None
    }


def empty_weights(
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    vocab_rows: int | None = None,
) -> ModelWeights:
    """Return uninitialised weights on ``device``; on device ``meta`` they have only shapes.

    ``config`` is the rank's own (``ParallelContext.shard``); ``vocab_rows`` None = its tokens.
    """

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def norm(size: int) -> torch.Tensor:
        wide = torch.promote_types(dtype, torch.float32) if config.norms_add_one else dtype
        return torch.empty(size, dtype=wide, device=device)

    def matrix(place: _Place, columns: int, index: int) -> Matrix | tuple[Matrix, ...]:
        sizes, is_cut = [*place.parts.values()], len(place.parts) > 1
        formats = [_format(config, index, name) for name in place.parts]

        def new(forms: Sequence[ModuleFormat | None], rows: Sequence[int]) -> Matrix:
            quantized = [form for form in forms if form is not None]
            if not quantized:
                return empty(sum(rows), columns)
            shared = shared_rows(quantized, rows, is_cut=is_cut)
            return quantized[0].empty(
                rows, columns, rows_per_scale=shared, dtype=dtype, device=device
            )

        first, *others = formats
        if all(each is None if first is None else first.fuses_with(each) for each in others):
            return new(formats, sizes)
        return tuple(new([form], [rows]) for form, rows in zip(formats, sizes, strict=True))

    def field(place: _Place, index: int) -> Any:  # noqa: ANN401 - a field of LayerWeights
        rows = sum(place.parts.values())
        if place.is_parameter:
            return torch.empty(rows, dtype=torch.float32, device=device)
        if place.columns is None:
            return norm(rows)
        bias = empty(rows) if place.has_bias else None
        return Weight(matrix=matrix(place, place.columns, index), bias=bias)

    def layer(index: int) -> LayerWeights:
        places = _layer_places(config, index)
        experts = None
        if config.has_experts(index):
            experts = empty_experts(config, index, device=device, dtype=dtype)
        return LayerWeights(
            **{name: field(place, index) for name, place in places.items()}, experts=experts
        )

    vocab_rows = config.vocab_size if vocab_rows is None else vocab_rows

    def of_tokens(name: str, rows: int) -> Matrix:
        form = _vocabulary_format(config, name)
        if form is None:
            return empty(rows, config.hidden_size)
        return form.empty([rows], config.hidden_size, rows_per_scale=1, dtype=dtype, device=device)

    embed = of_tokens(EMBED, vocab_rows)
    head = embed if config.tie_word_embeddings else of_tokens(HEAD, vocab_rows)
    return ModelWeights(
        embed=embed,
        layers=tuple(map(layer, range(config.num_layers))),
        final_norm=norm(config.hidden_size),
        lm_head=Weight(matrix=head),
    )


def checkpoint_tensors(config: ModelConfig, weights: ModelWeights) -> dict[str, torch.Tensor]:
    """Return the tensor or view that each tensor of a checkpoint fills; a tied head has none.

    What quantized tensors fill, their codes and scales, may have another shape than is stored.
    """
    places = checkpoint_places(config, weights)
    return {name: each.target for name, each in places.items() if each.target is not None}


def checkpoint_places(
    config: ModelConfig,
    weights: ModelWeights,
    *,
    whole: ModelConfig | None = None,
    parallel: ParallelContext | None = None,
) -> dict[str, Place]:
    """Return where each tensor of a checkpoint goes; a tied head has no place.

    ``config`` and ``weights``, of ``empty_weights``, are the rank's own, on device ``meta`` if
    need be; ``whole`` is the configuration of the whole model, None = ``config``.

    ConfigError: modules are quantized that cannot be, or a rank would have a part of a group that
    shares a scale.
    """
    whole, parallel = whole or config, parallel or ParallelContext()
    plain = _plain_tensors(config, weights)
    wholes = plain
    if whole is not config or parallel.size > 1:
        without = replace(whole, quantization=None)
        wholes = _plain_tensors(without, empty_weights(without, "meta", weights.embed.dtype))
    places: dict[str, Place] = {}
    for name, target in plain.items():
        shape = tuple(wholes[name].shape)
        if name in (EMBED, HEAD):  # there may be fewer rows than in the target, or none
            part: tuple[slice, ...] = parallel.vocab_part(shape[0]), slice(0, shape[1])
        else:
            part = parallel.part(shape, target.shape)
        adds_one = config.norms_add_one and name.endswith("norm.weight")
        places[name] = Place(
            target=target, shape=shape, part=part, dtypes=FLOAT_DTYPES,
            convert=plus_one if adds_one else same,
        )  # fmt: skip
    if config.quantization is not None:
        _check_quantized_modules(whole)
        problems = []
        for form, module, weight in quantized_modules(
            config, weights, whole=whole, parallel=parallel
        ):
            if (problem := inputs_problem(weight)) is not None:
                problems.append(f"{module.name}: {problem}")
            try:
                tensors = form.places(module, weight)
            except ConfigError as error:
                problems.append(str(error))
            else:
                places |= {
                    f"{module.name}{form.separator}{last}": each for last, each in tensors.items()
                }
        raise_problems("quantization_config", problems)
    return places


def _format(config: ModelConfig, layer: int, name: str) -> ModuleFormat | None:
    """Return how a module of a layer is stored; None = in full precision."""
    if config.quantization is None:
        return None
    return config.quantization.module(f"model.layers.{layer}.{name}")


def _vocabulary_format(config: ModelConfig, name: str) -> ModuleFormat | None:
    """Return how the embedding or the head is stored; None = in full precision."""
    quantization = config.quantization
    if quantization is None or not quantization.has_vocabulary:
        return None
    return quantization.module(name.removesuffix(".weight"))


def _vocabulary(config: ModelConfig, weights: ModelWeights) -> Iterator[tuple[str, Matrix]]:
    """Yield the embedding, and the head if it is another matrix, with their names."""
    yield EMBED, weights.embed
    if not config.tie_word_embeddings:
        yield HEAD, weights.lm_head.parts[0]


def _plain_tensors(config: ModelConfig, weights: ModelWeights) -> dict[str, torch.Tensor]:
    """Return the tensor or view that each tensor fills that is not of a quantized module."""
    vocabulary = _vocabulary(config, weights)
    tensors = {name: matrix for name, matrix in vocabulary if isinstance(matrix, torch.Tensor)}
    tensors["model.norm.weight"] = weights.final_norm
    for index, layer in enumerate(weights.layers):
        if layer.experts is not None:
            tensors |= expert_tensors(config, layer.experts, index)
        for field, place in _layer_places(config, index).items():
            filled, start = getattr(layer, field), 0
            for name, num_rows in place.parts.items():
                stored, rows = f"model.layers.{index}.{name}", slice(start, start + num_rows)
                if place.is_parameter:
                    tensors[stored] = filled[rows]
                elif place.columns is None:
                    tensors[f"{stored}.weight"] = filled[rows]
                elif _format(config, index, name) is None:
                    tensors[f"{stored}.weight"] = filled.rows(rows.start, rows.stop)
                if place.has_bias:
                    tensors[f"{stored}.bias"] = filled.bias[rows]
                start += num_rows
    return tensors


def quantized_modules(
    config: ModelConfig,
    weights: ModelWeights,
    *,
    whole: ModelConfig,
    parallel: ParallelContext,
) -> Iterator[tuple[ModuleFormat, ModulePart, QuantizedWeight]]:
    """Yield each quantized module: its format, a rank's part, and that part of the weights.

    Arguments as in ``checkpoint_places``. The weight of a rank whose last rows pad the vocabulary
    has more rows than the part.
    """
    for name, matrix in _vocabulary(config, weights):
        form = _vocabulary_format(config, name)
        if form is not None and isinstance(matrix, QuantizedWeight):
            shape = (whole.vocab_size, whole.hidden_size)
            rows, inputs = parallel.vocab_part(whole.vocab_size), slice(0, whole.hidden_size)
            module = name.removesuffix(".weight")
            yield form, ModulePart(name=module, shape=shape, rows=rows, inputs=inputs), matrix
    for index, layer in enumerate(weights.layers):
        if layer.experts is not None:
            yield from quantized_experts(
                config, layer.experts, index, whole=whole, parallel=parallel
            )
        of_whole = _layer_places(whole, index)
        for field, place in _layer_places(config, index).items():
            start, columns = 0, of_whole[field].columns
            for name, num_rows in place.parts.items():
                stop, form = start + num_rows, _format(config, index, name)
                if form is not None and place.columns is not None and columns is not None:
                    shape = of_whole[field].parts[name], columns
                    rows, inputs = parallel.part(shape, (num_rows, place.columns))
                    module = f"model.layers.{index}.{name}"
                    part = ModulePart(name=module, shape=shape, rows=rows, inputs=inputs)
                    weight = getattr(layer, field).rows(start, stop)
                    if isinstance(weight, QuantizedWeight):
                        yield form, part, weight
                start = stop


def _check_quantized_modules(config: ModelConfig) -> None:
    """Raise a ``ConfigError`` for each quantized module that this model cannot have quantized."""
    quantization, architecture = config.quantization, ARCHITECTURES[config.architecture]
    if quantization is None:
        return
    kinds = {"model.embed_tokens": "Embedding", "lm_head": "Linear"}
    if quantization.has_vocabulary:
        kinds = {}
    layers = [index for index in range(config.num_layers) if config.has_experts(index)]
    for index in layers:
        kinds |= dict.fromkeys(full_precision_modules(config, index), "Linear")
    if quantization.needs_stacks and (config.experts is None or not config.experts.is_stacked):
        raise ConfigError(
            f"quantization_config.quant_method: expected another than {quantization.method!r}, "
            f"which is that of gpt-oss's experts, for {config.architecture}"
        )
    where, advice = "quantization", "pass None"
    if not quantization.quantizes:
        where = "quantization_config"
        advice = "list it in ignore or modules_to_not_convert if it is not"
        kinds |= {f"model.layers.0.{name}": "Linear" for name in architecture.fused}
    mixed = [
        f"{name}: expected what the layer's first expert is stored as, got another format"
        for index in layers
        for name in mixed_experts(config, index)
    ]
    raise_problems(
        where,
        mixed
        + [
            f"{name}: expected full precision (embedding, head, experts, and what is "
            f"several modules in one), got a module that {quantization.method} quantizes; "
            f"{advice}"
            for name, kind in kinds.items()
            if quantization.holds(name, kind)
        ],
    )


def random_weights(
    config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> ModelWeights:
    """Return random weights made on ``device``, for benchmarks that need no checkpoint.

    Matrices are normal with standard deviation ``fan_in^-0.5``, so that activations and logits are
    about as large as a trained model's; norms are 1, biases 0. The values depend on ``seed`` and
    the device type. ConfigError: matrices are quantized; ``dummy_weights`` makes codes.
    """
    if config.quantization is not None:
        raise ConfigError(
            "quantization: expected none for random weights, got "
            f"{config.quantization.method}: load_format='dummy' makes codes"
        )
    generator = torch.Generator(device).manual_seed(seed)
    weights = empty_weights(config, device, dtype)
    for name, tensor in checkpoint_tensors(config, weights).items():
        if name.endswith("bias"):
            tensor.zero_()
        elif tensor.dim() > 1:
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)
        else:
            tensor.fill_(1.0)
    return weights
