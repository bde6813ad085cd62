"""The decoder: one implementation of every supported family, on mrv1's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import embedding, linear

from mrv1.kernels.ops import Ops
from mrv1.models.attention import AttentionBackend, KernelBackend
from mrv1.models.batch import AttentionBatch, LayerCache
from mrv1.models.config import ModelConfig
from mrv1.models.parallel import ParallelContext
from mrv1.models.rope import cos_sin_table
from mrv1.models.weights import LayerWeights, ModelWeights


class DecoderModel:
    """A decoder-only transformer over a paged KV cache.

    It keeps no state between calls but its weights: the caches and the batch are the caller's.
    Nothing waits for the device, and shapes follow from the batch's shapes alone, so that a
    forward pass can be captured in a CUDA graph.

    Args:
        config: the model's shape and options.
        weights: as ``load_weights`` or ``random_weights`` return them; on their device and in
            their dtype the model runs.
        ops: what ``select_ops`` returned for that device.
        parallel: this rank among others; None = alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        *,
        parallel: ParallelContext | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self._ops = ops
        self._parallel = parallel or ParallelContext()
        self.softmax_scale = config.head_dim**-0.5
        self._unplanned = self.kernel_backend()
        self._cos_sin = cos_sin_table(config.rope, config.max_model_len, self.device)

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
        )

    def forward(
        self,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
        backend: AttentionBackend | None = None,
    ) -> torch.Tensor:
        """Run one step's tokens through all layers, writing their keys and values into ``caches``.

        Args:
            batch: the tokens and where their pages are.
            caches: one entry a layer, *written* at ``batch.slot_mapping``; each layer's layout
                holds its window (``config.layer_windows``).
            backend: who attends, planned for this batch; None = ``kernel_backend()``, unplanned.

        Returns:
            ``[num_tokens, hidden]`` hidden states after the final norm; undefined for padding.

        Stream:
            Current stream, no synchronisation; CUDA-graph safe.
        """
        eps = self.config.rms_norm_eps
        backend = backend or self._unplanned
        residual = embedding(batch.input_ids, self.weights.embed)
        cos_sin = self._cos_sin.index_select(0, batch.positions)  # once for all layers
        hidden = None  # what the last block adds to the residual; nothing before the first
        for layer, cache in zip(self.weights.layers, caches, strict=True):
            hidden = self._add_norm(hidden, residual, layer.input_norm, eps)
            hidden = self._attention(hidden, layer, batch, cos_sin, cache, backend)
            hidden = self._add_norm(hidden, residual, layer.mlp_norm, eps)
            hidden = self._mlp(hidden, layer)
        return self._add_norm(hidden, residual, self.weights.final_norm, eps)

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocab]`` float32 logits (float64 stays so) of ``[rows, hidden]``."""
        logits = self._parallel.all_gather(linear(hidden_rows, self.weights.lm_head))
        return logits if logits.dtype == torch.float64 else logits.float()

    def _add_norm(
        self,
        hidden: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Return norm(residual + hidden), written over ``hidden``; ``residual`` keeps the sum."""
        if hidden is None:
            return self._ops.rms_norm(residual, weight, eps)
        return self._ops.rms_norm(hidden, weight, eps, residual=residual, out=hidden)

    def _attention(
        self,
        hidden: torch.Tensor,
        layer: LayerWeights,
        batch: AttentionBatch,
        cos_sin: torch.Tensor,
        cache: LayerCache,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        config = self.config
        qkv = linear(hidden, layer.qkv, layer.qkv_bias)
        q = qkv.unflatten(1, (-1, config.head_dim))[:, : config.num_q_heads]
        self._ops.qkv_cache_write(
            qkv,
            cache.k,
            cache.v,
            batch.slot_mapping,
            cache.layout,
            num_q_heads=config.num_q_heads,
            cos_sin=cos_sin,
            interleaved=config.rope_interleaved,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.rms_norm_eps,
            q_out=q,
            scales=cache.scales,
        )
        attended = backend.attend(q, batch, cache)
        projected = linear(attended.view(attended.shape[0], -1), layer.o, layer.o_bias)
        return self._parallel.all_reduce(projected)

    def _mlp(self, hidden: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        gate_up = linear(hidden, layer.gate_up, layer.gate_up_bias)
        activated = self._ops.silu_and_mul(gate_up)
        return self._parallel.all_reduce(linear(activated, layer.down, layer.down_bias))
