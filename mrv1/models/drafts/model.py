"""The forward pass of a draft head: a decoder of one layer with an input of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv1.kernels.registry import Ops
from mrv1.models.attention import AttentionBackend
from mrv1.models.batch import AttentionBatch, LayerCache
from mrv1.models.decoder import DecoderModel
from mrv1.models.drafts.config import HeadConfig
from mrv1.models.weights import ModelWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class InputWeights:
    """How a head makes its layer's input from an embedding and what it reads of a model."""

    embed_norm: torch.Tensor
    """[hidden], of the embedding."""
    hidden_norm: torch.Tensor
    """[hidden], of the hidden state."""
    proj: torch.Tensor
    """[hidden, 2 * hidden] of both, embedding first (MTP); or ``fc``, [hidden, features], of what
    is read of the target (EAGLE-3)."""
    feature_norms: tuple[torch.Tensor, ...] = ()
    """Of all features as one vector, or of each sum; () = none."""
    target_ids: torch.Tensor | None = None
    """[draft vocabulary] int64, each draft's token of the target; None = they are the same."""


class DraftModel(DecoderModel):
    """A draft head, which predicts the token after a token from it and the hidden state before.

    At position p of its cache it has token p + 1 and the target's hidden state of token p, so its
    cache has as many tokens as the target's. A further token is predicted from the head's own
    output in place of the target's.

    * MTP: a layer of ``proj([norm(embedding), norm(hidden)])``; the target's embedding, final norm
      and head, in FastDeploy's order. Its output after the norm is what it reads next.
    * EAGLE-3: ``x = fc(sums)``; attention reads ``[norm(embedding), norm(x)]``, twice as wide, and
      the layer adds to ``x`` or to its norm.

    Args:
        head: which of them it is.
        weights: of its layer; the embedding and MTP's norm and head are the target's.
        inputs: of what is before the layer.
        ops: as in ``DecoderModel``.
        deterministic: as in ``DecoderModel``.
    """

    def __init__(
        self,
        head: HeadConfig,
        weights: ModelWeights,
        inputs: InputWeights,
        ops: Ops,
        *,
        deterministic: bool = False,
    ) -> None:
        super().__init__(head.layer, weights, ops, deterministic=deterministic)
        self.head, self.inputs = head, inputs

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that the head's layer reads, from the target's features.

        ``features``: ``[tokens, num_features]``, sums side by side, or normed hidden states.
        """
        head, inputs = self.head, self.inputs
        if head.kind == "mtp":
            return features
        if head.norm_before_fc:
            features = self._ops.rms_norm(features, inputs.feature_norms[0], self._sum_eps)
        elif head.fc_norm:
            parts = features.split(self.config.hidden_size, dim=1)
            pairs = zip(parts, inputs.feature_norms, strict=True)
            normed = [self._ops.rms_norm(part, norm, self._sum_eps) for part, norm in pairs]
            features = torch.cat(normed, dim=1)
        return self._ops.linear(features, inputs.proj, None, deterministic=self.deterministic)

    def predict(
        self,
        batch: AttentionBatch,
        hidden: torch.Tensor,
        cache: LayerCache,
        backend: AttentionBackend | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head, which writes its keys and values into ``cache``.

        Args:
            batch: the tokens after those whose hidden states are given; positions, slots, tables
                and lengths are those of the hidden states.
            hidden: ``[tokens, hidden]`` of ``read`` or of this function, may be overwritten.
            cache: the head's layer of the KV cache.
            backend: as in ``forward``.

        Returns:
            ``[tokens, hidden]`` after the last norm, for ``draft``; and what the head reads next.
        """
        inputs, eps = self.inputs, self._sum_eps
        embedded, cos_sin = self._look_up(batch)
        embedded = self._ops.rms_norm(embedded, inputs.embed_norm, eps)
        normed = self._ops.rms_norm(hidden, inputs.hidden_norm, eps)
        both = torch.cat([embedded, normed], dim=1)
        if self.head.kind == "mtp":
            x = self._ops.linear(both, inputs.proj, None, deterministic=self.deterministic)
            first = self._norm_ahead(x, self.weights.layers[0].input_norm)
            output = self.forward(batch, [cache], backend, embedded=(x, first, cos_sin))
            return output, output
        total = torch.empty_like(hidden)
        x = normed if self.head.norm_before_residual else hidden
        begin = x, both, cos_sin
        output = self.forward(batch, [cache], backend, sums={1: total}, embedded=begin)
        return output, output if self.head.norm_output else total

    def draft(self, output: torch.Tensor) -> torch.Tensor:
        """Return the likeliest token after each of ``[rows, hidden]``, ``[rows]`` int64."""
        drafts = self.compute_logits(output).argmax(dim=1)
        ids = self.inputs.target_ids
        return drafts if ids is None else ids.index_select(0, drafts)
