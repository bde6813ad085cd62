"""The decoder: one implementation for every supported family, on mrv1's kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mrv1.errors import ConfigError
from mrv1.kernels import AllReduceBuffers, QKNorm, QuantizedWeight, Rope
from mrv1.kernels.cache.contracts import hadamard_block
from mrv1.kernels.layers.contracts import Activation, FeatureRows
from mrv1.kernels.layers.lora import Adapters
from mrv1.kernels.registry import Ops
from mrv1.models.attention import AttentionBackend, KernelBackend
from mrv1.models.batch import AttentionBatch, LayerCache
from mrv1.models.config import ModelConfig
from mrv1.models.expert_layer import VisualTokens, combine, route_tokens
from mrv1.models.expert_weights import ExpertWeights
from mrv1.models.lora import NO_LAYER, LoraWeights, TokenAdapters, add_embedding
from mrv1.models.parallel import ParallelContext
from mrv1.models.products import Products
from mrv1.models.rope import axes_of_columns, cos_sin_table
from mrv1.models.weights import LayerWeights, ModelWeights, Weight


class DecoderModel:
    """A decoder-only transformer over a paged KV cache.

    It keeps only its weights between calls: the caller owns the caches and the batch. The host
    never waits for the device, and shapes follow from the batch's shapes alone, so that a forward
    pass can be captured in a CUDA graph.

    Args:
        config: the model's shape and options; of several ranks, ``ParallelContext.shard``'s.
        weights: the model runs on their device and in their dtype.
        ops: the ops that ``select_ops`` returned for that device.
        parallel: this rank among the tensor-parallel ranks; None = a single rank.
        deterministic: whether a token's results must depend on its own request alone.
        rank_invariant: with ``deterministic``, whether any number of ranks must have the same.
        whole_config: the whole model's, of which ``config`` is a rank's part; None = ``config``.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        *,
        parallel: ParallelContext | None = None,
        deterministic: bool = False,
        rank_invariant: bool = False,
        whole_config: ModelConfig | None = None,
    ) -> None:
        self.config = config
        self.whole_config = whole_config or config
        self.weights = weights
        self._ops = ops
        self._parallel = parallel or ParallelContext()
        self.deterministic, self.rank_invariant = deterministic, rank_invariant
        self._products = Products(ops, deterministic=deterministic, rank_invariant=rank_invariant)
        self.lora: LoraWeights | None = None
        """Slots of adapters; None = the model has none, see ``enable_lora``."""
        self.softmax_scale = config.softmax_scale or config.head_dim**-0.5
        self._sum_eps = config.rms_norm_eps / config.residual_scale**2
        """Of norms of the residual sum, which is divided by ``residual_scale``."""
        self._embed_scale = config.embed_scale
        if config.rounds_embed_scale and config.embed_scale is not None:
            self._embed_scale = float(torch.tensor(config.embed_scale).to(self.dtype))
        self._unplanned = self.kernel_backend()
        self._cos_sin = cos_sin_table(config.rope, config.max_model_len, self.device)
        self._axes = self._columns = None
        if config.rope.mrope_alternating:
            self._axes = axes_of_columns(config.rope).to(self.device)
            self._columns = torch.arange(len(self._axes), device=self.device)
        rope, self._window_cos_sin = config.window_rope, None
        if rope is not None:
            self._window_cos_sin = cos_sin_table(rope, config.max_model_len, self.device)
        vision = config.vision
        self._num_deepstack_layers = 0 if vision is None else vision.num_deepstack_layers
        self._sum_buffers: dict[torch.dtype, AllReduceBuffers] = {}
        """By the dtype that travels."""

    @property
    def parallel(self) -> ParallelContext:
        """This rank among the tensor-parallel ranks."""
        return self._parallel

    @property
    def device(self) -> torch.device:
        """Where weights and activations live."""
        return self.weights.embed.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return self.weights.embed.dtype

    def enable_lora(self, max_loras: int, max_rank: int) -> None:
        """Allocate slots for adapters; ``AttentionBatch.adapter_slots`` says who uses which.

        ConfigError: sums over several ranks are to have the bits of one.
        """
        if self.rank_invariant and self._parallel.size > 1:
            raise ConfigError(
                "enable_lora: expected a single rank with rank_invariant=True, got "
                f"{self._parallel.size}"
            )
        self.lora = LoraWeights.empty(
            self.config, max_loras=max_loras, max_rank=max_rank, device=self.device,
            dtype=self.dtype, vocab_rows=self.weights.embed.shape[0],
        )  # fmt: skip

    def kernel_backend(self) -> KernelBackend:
        """Return a backend that attends with the kernels of ``ops``."""
        return KernelBackend(
            self._ops,
            num_q_heads=self.config.num_q_heads,
            dtype=self.dtype,
            softmax_scale=self.softmax_scale,
            soft_cap=self.config.attention_soft_cap,
            has_sinks=self.config.has_sinks,
            deterministic=self.deterministic,
        )

    def forward(
        self,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
        backend: AttentionBackend | None = None,
        on_kv_written: Callable[[int], None] | None = None,
        sums: Mapping[int, torch.Tensor] | None = None,
        embedded: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run one step's tokens through all layers, writing their keys and values into ``caches``.

        Args:
            batch: the tokens and where their pages are.
            caches: one entry per layer, *written* at ``batch.slot_mapping``; each layer's layout
                contains its window (``config.layer_windows``).
            backend: attention backend, planned for this batch; None = ``kernel_backend()`` without
                a plan.
            on_kv_written: called with each layer's index once the write of its keys and values is
                on the stream, before the layer attends.
            sums: layer -> ``[num_tokens, hidden]``, *written*: the residual sum before that layer;
                the number of layers stands for the sum after the last. None = none is kept.
            embedded: what the layers begin with, as ``_embed`` returns it for ``batch.input_ids``;
                the first is *written*. None = that.

        Returns:
            ``[num_tokens, hidden]`` hidden states after the final norm; undefined for padding.

        Stream:
            Current stream, no synchronisation; CUDA-graph safe.
        """
        backend = backend or self._unplanned
        layers = self.weights.layers
        next_norms = (*(layer.input_norm for layer in layers[1:]), self.weights.final_norm)
        hidden, x, cos_sin = embedded or self._embed(batch)
        ropes, lora = self._ropes(batch, cos_sin), TokenAdapters(self.lora, batch.adapter_slots)
        visual = VisualTokens.of(batch)
        for index, (layer, next_norm, cache) in enumerate(
            zip(layers, next_norms, caches, strict=True)
        ):
            if sums and index in sums:
                sums[index].copy_(hidden)
            qkv = self._linear(x, layer.qkv, layer.input_norm, layer.o, lora.of(index, "qkv"))
            q = self._write_kv(qkv, layer, batch, ropes[index], cache)
            if on_kv_written is not None:
                on_kv_written(index)
            attended = backend.attend(q, batch, cache, layer.sinks).flatten(1)
            experts, norms = layer.experts, (layer.attention_out_norm, layer.mlp_norm)
            x = self._add(
                hidden, attended, layer.o, *norms, normed=experts is not None,
                adapters=lora.of(index, "o"),
            )  # fmt: skip
            deep = batch.features if index < self._num_deepstack_layers else None
            if experts is not None:
                _add_deep(self._ops, hidden, deep, index)
                x = self._add_experts(hidden, x, experts, batch, visual, next_norm)
                continue
            gate_up, down = layer.mlp
            activated = self._linear(
                x, gate_up, layer.mlp_norm, down, lora.of(index, "gate_up"), self.config.activation
            )
            _add_deep(self._ops, hidden, deep, index)
            x = self._add(
                hidden, activated, down, layer.mlp_out_norm, next_norm,
                adapters=lora.of(index, "down"),
            )  # fmt: skip
        if sums and len(layers) in sums:
            sums[len(layers)].copy_(hidden)
        return x if self._norms_ahead(hidden) else self._norm(hidden, self.weights.final_norm)

    def _ropes(self, batch: AttentionBatch, cos_sin: torch.Tensor) -> list[Rope | None]:
        """Return the rope of each layer, given the tokens' rows of the table of most layers."""
        config = self.config
        rope = window_rope = Rope(cos_sin, interleaved=config.rope_interleaved)
        if self._window_cos_sin is not None:
            rows = self._window_cos_sin.index_select(0, batch.positions)
            window_rope = Rope(rows, interleaved=config.rope_interleaved)
        return [
            (rope if window == -1 else window_rope) if config.has_rope(index) else None
            for index, window in enumerate(config.layer_windows)
        ]

    def compute_logits(
        self, hidden_rows: torch.Tensor, adapter_slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``[rows, vocab]`` float32 logits (of float64: float64) of ``[rows, hidden]``.

        ``adapter_slots`` are those of the rows, as in ``AttentionBatch``.
        """
        lm_head, wide = self.weights.lm_head, torch.promote_types(hidden_rows.dtype, torch.float32)
        logits = hidden_rows.new_empty((len(hidden_rows), lm_head.shape[0]), dtype=wide)
        self.compute_shard(hidden_rows, logits, adapter_slots)
        logits = self._parallel.all_gather(logits)
        if logits.shape[1] == self.config.vocab_size:
            return logits
        return logits[:, : self.config.vocab_size].contiguous()  # the last rank has padding

    def compute_shard(
        self,
        hidden_rows: torch.Tensor,
        out: torch.Tensor,
        adapter_slots: torch.Tensor | None = None,
    ) -> None:
        """Write this rank's shard of the logits, ``[rows, vocab_rows]`` float32, padding too."""
        adapters = TokenAdapters(self.lora, adapter_slots).of(NO_LAYER, "lm_head")
        self._products.multiply(hidden_rows, self.weights.lm_head, out=out, adapters=adapters)
        if self.config.logits_divisor != 1:
            out /= self.config.logits_divisor
        if (cap := self.config.logits_soft_cap) is not None:
            out.div_(cap).tanh_().mul_(cap)

    def _embed(self, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tokens' embeddings, the first layer's input, and the tokens' rope."""
        hidden, cos_sin = self._look_up(batch)
        norm, parallel = self.weights.layers[0].input_norm, self._parallel
        if parallel.peers is not None:
            return hidden, self._sum_and_norm(hidden, norm, out=hidden), cos_sin
        if parallel.size > 1:
            hidden = parallel.all_reduce(hidden)
        return hidden, self._norm_ahead(hidden, norm), cos_sin

    def _look_up(self, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens' embeddings, and their rope.

        Each rank embeds the tokens of its part of the vocabulary; the sum has all.
        """
        embed, parallel = self.weights.embed, self._parallel
        first = parallel.rank * embed.shape[0]
        first_id = first if parallel.size > 1 else None
        ids, positions, section = batch.input_ids, batch.positions, self.config.rope.mrope_section
        if self._axes is not None:  # the kernel gives rows of time, which are replaced
            positions, section = positions[0], None
        if isinstance(embed, QuantizedWeight):
            ids, rows = _looked_up(ids, embed, first_id)
            embed = self._ops.dequantize(rows)
            first_id = None if first_id is None else 0
        hidden, cos_sin = self._ops.embed_tokens(
            ids,
            embed,
            positions,
            self._cos_sin,
            mrope_section=section,
            mrope_interleaved=self.config.rope.mrope_interleaved,
            features=batch.features,
            first_id=first_id,
            scale=self._embed_scale,
            scales_features=self.config.scales_features,
        )
        adapters = TokenAdapters(self.lora, batch.adapter_slots).of(NO_LAYER, "embed")
        if adapters is not None:
            add_embedding(hidden, batch, adapters, self._ops, first, self._embed_scale)
        if self._axes is not None:
            each = batch.positions.T.index_select(1, self._axes)
            cos_sin = self._cos_sin[each, self._columns]
        return hidden, cos_sin

    def _sum(
        self,
        partial: torch.Tensor,
        **fused: Any,  # noqa: ANN401 - arguments of all_reduce_norm
    ) -> torch.Tensor:
        """Return the sum over ranks with peers' memory, and what ``all_reduce_norm`` fuses.

        The first pass allocates buffers on all ranks: they are connected by then.
        """
        peers, buffers = self._parallel.peers, self._sum_buffers
        is_rounded = partial.dim() == 3 and not self.deterministic  # the sum of splits travels
        travels = self.dtype if is_rounded else partial.dtype
        if peers is not None and travels not in buffers:
            buffers[travels] = AllReduceBuffers.allocate(peers, partial.shape[-1], travels)
        return self._ops.all_reduce_norm(partial, buffers[travels], **fused)

    def _sum_and_norm(
        self,
        partial: torch.Tensor,
        norm_weight: torch.Tensor | None,
        *,
        out: torch.Tensor,
        **fused: Any,  # noqa: ANN401 - arguments of all_reduce_norm
    ) -> torch.Tensor:
        """Write the sum over ranks with peers' memory to ``out``; return its norm, if any."""
        if norm_weight is not None and norm_weight.dtype != out.dtype:
            self._sum(partial, out=out, **fused)  # it has no wider weights of norms
            return self._norm(out, norm_weight)
        normed = None if norm_weight is None else torch.empty_like(out)
        eps = self._sum_eps
        self._sum(partial, out=out, norm_weight=norm_weight, eps=eps, normed_out=normed, **fused)
        return out if normed is None else normed

    def _norms_ahead(self, hidden: torch.Tensor) -> bool:
        """Return whether a residual sum is normed at once, not by the product that reads it.

        The product norms one token at no cost; with more tokens, every program would repeat the
        norms. With ``deterministic``, one token is computed as several tokens are. With peers, the
        sum over ranks norms one token too: a layer of an 8B model takes 4 us less on two H200.
        """
        return hidden.shape[0] > 1 or self.deterministic or self._parallel.peers is not None

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(hidden, weight, self._sum_eps)

    def _norm_ahead(self, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Return the input of ``_linear``: ``norm(hidden)`` if ``_norms_ahead``, else hidden."""
        if weight is None or not self._norms_ahead(hidden):
            return hidden
        return self._norm(hidden, weight)

    def _linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        norm_weight: torch.Tensor | None,
        next_weight: Weight,
        adapters: Adapters | None,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """Return ``activation(norm(x) @ weight.T + bias)``; prefetch ``next_weight`` meanwhile."""
        return self._products.multiply(
            x,
            weight,
            weight.bias,
            norm_weight=None if self._norms_ahead(x) else norm_weight,
            eps=self._sum_eps,
            activation=activation,
            prefetch=next_weight.prefetched,
            adapters=adapters,
        )

    def _add(
        self,
        hidden: torch.Tensor,
        x: torch.Tensor,
        weight: Weight,
        out_norm: torch.Tensor | None,
        next_norm: torch.Tensor | None,
        *,
        normed: bool = False,
        adapters: Adapters | None = None,
    ) -> torch.Tensor:
        """Add ``out_norm(x @ weight.T + bias)``, summed over the ranks, to ``hidden`` in place.

        No kernel norms a product before it is added: a layer with ``out_norm`` needs more of them.
        Return ``hidden`` as ``_norm_ahead`` does with ``next_norm``; if ``normed``, its norm.
        """
        eps = self._sum_eps
        next_norm = next_norm if normed or self._norms_ahead(hidden) else None
        if out_norm is None and not self._parallel.sums_partials:
            normed_out = None if next_norm is None else torch.empty_like(hidden)
            self._products.multiply(
                x,
                weight,
                weight.bias,
                leaves=self._leaves,
                eps=eps,
                residual=hidden,
                out=hidden,
                out_norm_weight=next_norm,
                normed_out=normed_out,
                adapters=adapters,
            )
            return hidden if normed_out is None else normed_out
        if self._parallel.peers is not None:
            partial = self._partial(x, weight, adapters)
            if out_norm is None:
                return self._sum_and_norm(
                    partial, next_norm, out=hidden, bias=weight.bias, residual=hidden
                )
            added = self._sum(partial, bias=weight.bias, out=torch.empty_like(hidden))
        elif self.deterministic and self._parallel.size > 1:
            added = self._parallel.sum_in_order(self._partial(x, weight, adapters))
            if weight.bias is not None:
                added += weight.bias.to(added.dtype)
            if out_norm is None:
                return self._add_wide(hidden, added, next_norm)
            added = added.to(hidden.dtype)
        else:
            bias = weight.bias if self._parallel.rank == 0 else None  # the sum has it once
            added = self._parallel.all_reduce(
                self._products.multiply(x, weight, bias, leaves=self._leaves, adapters=adapters)
            )
        own_eps = self.config.rms_norm_eps
        if next_norm is None and out_norm is not None:
            return self._ops.rms_norm(added, out_norm, own_eps, onto=hidden, out=hidden)
        if out_norm is not None:
            added = self._ops.rms_norm(added, out_norm, own_eps)
        if next_norm is not None:
            return self._ops.rms_norm(added, next_norm, eps, residual=hidden)
        hidden += added
        return hidden

    def _add_wide(
        self, hidden: torch.Tensor, added: torch.Tensor, next_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Add to ``hidden`` what is not rounded yet; return as ``_add``."""
        hidden.copy_(added + hidden.to(added.dtype))
        return hidden if next_norm is None else self._norm(hidden, next_norm)

    @property
    def _leaves(self) -> int | None:
        """Leaves of this rank in a product whose inputs ranks divide, if they are any rank's."""
        return self._parallel.leaves if self.rank_invariant else None

    def _partial(self, x: torch.Tensor, weight: Weight, adapters: Adapters | None) -> torch.Tensor:
        """Return ``x @ weight.T``, this rank's part of a sum; if deterministic, not rounded.

        For ranks with peers' memory it may be ``linear``'s splits, which ``_sum`` adds up.
        """
        out, keeps_splits = None, self._parallel.peers is not None
        if self.deterministic:
            wide = torch.promote_types(x.dtype, torch.float32)
            out = x.new_empty((len(x), weight.shape[0]), dtype=wide)
        return self._products.multiply(
            x, weight, leaves=self._leaves, out=out, keep_splits=keeps_splits, adapters=adapters
        )

    def _add_experts(
        self,
        hidden: torch.Tensor,
        x: torch.Tensor,
        experts: ExpertWeights,
        batch: AttentionBatch,
        visual: VisualTokens | None,
        next_norm: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add the experts of ``x``, which is normed, to ``hidden``; return as ``_add``."""
        ops, config, deterministic = self._ops, self.config.experts, self.deterministic
        if config is None:
            raise ValueError("experts: expected a model without them, got some")
        routed = route_tokens(
            ops, x, experts, config, batch.slot_mapping, visual,
            deterministic=deterministic,
        )  # fmt: skip
        next_norm = next_norm if self._norms_ahead(hidden) else None
        parallel, eps = self._parallel, self._sum_eps
        if not parallel.sums_partials:
            normed = None if next_norm is None else torch.empty_like(hidden)
            combine(
                ops, routed, self._leaves, adds_bias=True, deterministic=deterministic,
                residual=hidden, out=hidden, norm_weight=next_norm, eps=eps, normed_out=normed,
            )  # fmt: skip
            return hidden if normed is None else normed
        dtype = torch.promote_types(hidden.dtype, torch.float32) if deterministic else hidden.dtype
        partial = torch.empty_like(hidden, dtype=dtype)
        combine(
            ops, routed, self._leaves, adds_bias=parallel.rank == 0, deterministic=deterministic,
            out=partial,
        )  # fmt: skip
        if parallel.peers is not None:
            return self._sum_and_norm(partial, next_norm, out=hidden, residual=hidden)
        if deterministic:
            return self._add_wide(hidden, parallel.sum_in_order(partial), next_norm)
        added = parallel.all_reduce(partial)
        if next_norm is not None:
            return ops.rms_norm(added, next_norm, eps, residual=hidden)
        hidden += added
        return hidden

    def _write_kv(
        self,
        qkv: torch.Tensor,
        layer: LayerWeights,
        batch: AttentionBatch,
        rope: Rope | None,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys; store keys and values; return the queries."""
        config, norm = self.config, None
        if layer.q_norm is not None and layer.k_norm is not None:
            if config.qk_norm == "head":
                norm = QKNorm(layer.q_norm, layer.k_norm, config.rms_norm_eps)
            else:
                weights = (layer.q_norm, layer.k_norm)
                _norm_whole(qkv, weights, config.rms_norm_eps, self._ops, self._parallel)
        hadamard = 0
        if cache.page_format.mixes_keys:
            rotary_dim = None if rope is None else rope.cos_sin.shape[1]
            hadamard = hadamard_block(config.head_dim, rotary_dim)
        q = qkv.unflatten(1, (-1, config.head_dim))[:, : config.num_q_heads]
        return self._ops.qkv_cache_write(
            qkv,
            cache.k,
            cache.v,
            batch.slot_mapping,
            cache.layout,
            num_q_heads=config.num_q_heads,
            rope=rope,
            norm=norm,
            hadamard=hadamard,
            q_out=q,
            scales=cache.scales,
        )


def _add_deep(ops: Ops, hidden: torch.Tensor, features: FeatureRows | None, layer: int) -> None:
    """Add a layer's further features, if any, to the sum that its MLP's output is added to next.

    The MLP has read its input, normed.
    """
    if features is not None:
        ops.add_features(hidden, features, (1 + layer) * hidden.shape[1])


def _looked_up(
    ids: torch.Tensor, embed: QuantizedWeight, first_id: int | None
) -> tuple[torch.Tensor, QuantizedWeight]:
    """Return tokens as rows of a matrix of their own, ``[tokens, hidden]``, and that matrix.

    A token that is not among this rank's, which begin with ``first_id``, is row -1.
    """
    rows, own = ids - (first_id or 0), torch.arange(len(ids), device=ids.device)
    if first_id is not None:
        is_own = (rows >= 0) & (rows < embed.shape[0])
        rows, own = torch.where(is_own, rows, 0), torch.where(is_own, own, -1)
    found: dict[str, Any] = {
        name: each.index_select(0, rows) for name, each in embed.tensors.items()
    }
    return own, replace(embed, **found)


def _norm_whole(
    qkv: torch.Tensor,
    weights: Sequence[torch.Tensor],
    eps: float,
    ops: Ops,
    parallel: ParallelContext,
) -> None:
    """Norm queries and keys in place, each as one vector over the heads of all ranks."""
    size = parallel.size
    parts = qkv[:, : sum(map(len, weights))].split([*map(len, weights)], dim=1)
    if size == 1:
        if len(parts) == 2 and parts[0].shape == parts[1].shape:
            both = qkv[:, : 2 * parts[0].shape[1]].unflatten(1, (2, -1))
            ops.rms_norm(both, weights[0], eps, second_weight=weights[1], out=both)
            return
        for part, weight in zip(parts, weights, strict=True):
            ops.rms_norm(part, weight, eps, out=part)
        return
    wide = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
    squares = torch.stack([part.square().sum(dim=1) for part in wide], dim=1)
    squares = parallel.all_reduce(squares)
    for index, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        # Ranks that share KV heads all count them: so do the numbers that the sum is of.
        mean = squares[:, index, None] / (size * len(weight))
        part.copy_((wide[index] * torch.rsqrt(mean + eps)).to(part.dtype) * weight)
