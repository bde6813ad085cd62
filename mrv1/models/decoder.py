"""The decoder: one implementation for every supported family, on mrv1's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mrv1.kernels import QKNorm, Rope
from mrv1.kernels.layers.contracts import Activation
from mrv1.kernels.registry import Ops
from mrv1.models.attention import AttentionBackend, KernelBackend
from mrv1.models.batch import AttentionBatch, LayerCache
from mrv1.models.config import ModelConfig
from mrv1.models.parallel import ParallelContext
from mrv1.models.rope import cos_sin_table
from mrv1.models.weights import LayerWeights, ModelWeights


class DecoderModel:
    """A decoder-only transformer over a paged KV cache.

    It keeps only its weights between calls: the caller owns the caches and the batch. The host
    never waits for the device, and shapes follow from the batch's shapes alone, so that a forward
    pass can be captured in a CUDA graph.

    Args:
        config: the model's shape and options; of several ranks, ``ParallelContext.shard``'s.
        weights: as ``load_weights`` or ``random_weights`` return them; the model runs on their
            device and in their dtype.
        ops: the ops that ``select_ops`` returned for that device.
        parallel: this rank among the tensor-parallel ranks; None = a single rank.
        deterministic: whether a token's results must depend on its own request alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        *,
        parallel: ParallelContext | None = None,
        deterministic: bool = False,
    ) -> None:
        self.config = config
        self.weights = weights
        self._ops = ops
        self._parallel = parallel or ParallelContext()
        self.deterministic = deterministic
        self.softmax_scale = config.head_dim**-0.5
        self._unplanned = self.kernel_backend()
        self._cos_sin = cos_sin_table(config.rope, config.max_model_len, self.device)
        vision = config.vision
        self._num_deepstack_layers = 0 if vision is None else vision.num_deepstack_layers
        self._qk_norms = [_qk_norm(layer, config.rms_norm_eps) for layer in weights.layers]

    @property
    def device(self) -> torch.device:
        """Where weights and activations live."""
        return self.weights.embed.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return self.weights.embed.dtype

    def kernel_backend(self) -> KernelBackend:
        """Return a backend that attends with the kernels of ``ops``."""
        return KernelBackend(
            self._ops,
            num_q_heads=self.config.num_q_heads,
            dtype=self.dtype,
            softmax_scale=self.softmax_scale,
            deterministic=self.deterministic,
        )

    def forward(
        self,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
        backend: AttentionBackend | None = None,
        on_kv_written: Callable[[int], None] | None = None,
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

        Returns:
            ``[num_tokens, hidden]`` hidden states after the final norm; undefined for padding.

        Stream:
            Current stream, no synchronisation; CUDA-graph safe.
        """
        backend = backend or self._unplanned
        layers = self.weights.layers
        next_norms = (*(layer.input_norm for layer in layers[1:]), self.weights.final_norm)
        hidden, cos_sin = self._embed(batch)
        rope = Rope(cos_sin, interleaved=self.config.rope_interleaved)
        norms_ahead = self._norms_ahead(hidden)
        x = self._norm(hidden, layers[0].input_norm) if norms_ahead else hidden
        for index, (layer, qk_norm, next_norm, cache) in enumerate(
            zip(layers, self._qk_norms, next_norms, caches, strict=True)
        ):
            q = self._write_kv(x, layer, batch, rope, qk_norm, cache)
            if on_kv_written is not None:
                on_kv_written(index)
            attended = backend.attend(q, batch, cache).flatten(1)
            x = self._add_projection(hidden, attended, layer.o, layer.o_bias, layer.mlp_norm)
            activated = self._linear(
                x, layer.gate_up, layer.gate_up_bias, layer.mlp_norm, layer.down, "silu_and_mul"
            )
            if index < self._num_deepstack_layers and batch.features is not None:
                # The MLP's input is normed already. Its output is added next: to the same sum.
                first_column = (1 + index) * self.config.hidden_size
                self._ops.add_features(hidden, batch.features, first_column)
            x = self._add_projection(hidden, activated, layer.down, layer.down_bias, next_norm)
        return x if norms_ahead else self._norm(hidden, self.weights.final_norm)

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocab]`` float32 logits (of float64: float64) of ``[rows, hidden]``."""
        lm_head, wide = self.weights.lm_head, torch.promote_types(hidden_rows.dtype, torch.float32)
        logits = hidden_rows.new_empty((len(hidden_rows), len(lm_head)), dtype=wide)
        logits = self._ops.linear(
            hidden_rows, lm_head, out=logits, deterministic=self.deterministic
        )
        logits = self._parallel.all_gather(logits)
        if logits.shape[1] == self.config.vocab_size:
            return logits
        return logits[:, : self.config.vocab_size].contiguous()  # the last rank has padding

    def _embed(self, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the embeddings of the batch's tokens, and the rope of their positions.

        A rank has some rows of the embedding: those of other ranks are added to its zeros.
        """
        ids, embed, is_foreign = batch.input_ids, self.weights.embed, None
        if self._parallel.size > 1:
            ids = ids - self._parallel.rank * len(embed)
            is_foreign = (ids < 0) | (ids >= len(embed))
            ids = ids.masked_fill(is_foreign, 0)
        hidden, cos_sin = self._ops.embed_tokens(
            ids,
            embed,
            batch.positions,
            self._cos_sin,
            mrope_section=self.config.rope.mrope_section,
            mrope_interleaved=self.config.rope.mrope_interleaved,
            features=batch.features,
        )
        if is_foreign is not None:
            hidden = self._parallel.all_reduce(hidden.masked_fill_(is_foreign[:, None], 0))
        return hidden, cos_sin

    def _norms_ahead(self, hidden: torch.Tensor) -> bool:
        """Return whether a residual sum is normed at once, not by the product that reads it.

        The product of one token norms its input at no cost; with more tokens, every program would
        repeat the norms. With ``deterministic``, one token is computed as several tokens are.
        """
        return hidden.shape[0] > 1 or self.deterministic

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(hidden, weight, self.config.rms_norm_eps)

    def _linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm_weight: torch.Tensor,
        next_weight: torch.Tensor,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """Return ``activation(norm(hidden) @ weight.T + bias)``; x is from ``_add_projection``.

        Meanwhile ``next_weight``, of the next projection, is prefetched into the GPU's cache.
        """
        return self._ops.linear(
            x,
            weight,
            bias,
            norm_weight=None if self._norms_ahead(x) else norm_weight,
            eps=self.config.rms_norm_eps,
            activation=activation,
            prefetch=next_weight,
            deterministic=self.deterministic,
        )

    def _add_projection(
        self,
        hidden: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm_weight: torch.Tensor,
    ) -> torch.Tensor:
        """Add ``x @ weight.T + bias``, summed over the ranks, to ``hidden`` in place.

        Returns:
            ``norm(hidden)`` if ``_norms_ahead``, else ``hidden``.
        """
        eps = self.config.rms_norm_eps
        norms_ahead = self._norms_ahead(hidden)
        if self._parallel.sums_partials:
            if self._parallel.rank > 0:
                bias = None  # rank 0 adds it
            partial = self._ops.linear(x, weight, bias, deterministic=self.deterministic)
            partial = self._parallel.all_reduce(partial)
            if norms_ahead:
                return self._ops.rms_norm(partial, norm_weight, eps, residual=hidden)
            hidden += partial
            return hidden
        normed = torch.empty_like(hidden) if norms_ahead else None
        self._ops.linear(
            x,
            weight,
            bias,
            eps=eps,
            residual=hidden,
            out=hidden,
            out_norm_weight=norm_weight if norms_ahead else None,
            normed_out=normed,
            deterministic=self.deterministic,
        )
        return hidden if normed is None else normed

    def _write_kv(
        self,
        x: torch.Tensor,
        layer: LayerWeights,
        batch: AttentionBatch,
        rope: Rope,
        qk_norm: QKNorm | None,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Project, norm and rotate; store keys and values; return the queries."""
        config = self.config
        qkv = self._linear(x, layer.qkv, layer.qkv_bias, layer.input_norm, layer.o)
        q = qkv.unflatten(1, (-1, config.head_dim))[:, : config.num_q_heads]
        return self._ops.qkv_cache_write(
            qkv,
            cache.k,
            cache.v,
            batch.slot_mapping,
            cache.layout,
            num_q_heads=config.num_q_heads,
            rope=rope,
            norm=qk_norm,
            q_out=q,
            scales=cache.scales,
        )


def _qk_norm(layer: LayerWeights, eps: float) -> QKNorm | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return QKNorm(layer.q_norm, layer.k_norm, eps)
