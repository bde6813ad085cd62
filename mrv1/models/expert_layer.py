"""The experts of a layer in a forward pass: routing, products, and their sum.

Some models have experts for text and others for images and videos, as many but of another width.
Each token has a row of pairs with its experts, and each pair one product: both sets write theirs
to the same tensor, in the rows of their own tokens, and shared experts stay with those of text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mrv1.kernels.registry import Ops
from mrv1.models.batch import AttentionBatch
from mrv1.models.expert_weights import ExpertWeights
from mrv1.models.experts import ExpertsConfig

LEAF_BYTES = 2**29
"""Most bytes of products of leaves that are kept at the same time."""


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Tokens with the first products of their experts."""

    parts: tuple[tuple[ExpertWeights, torch.Tensor, torch.Tensor], ...]
    """Of each set of experts: its weights, [tokens, chosen] ids, -1 where another set or none has
    the pair, and [tokens * chosen, width] products."""
    weights: torch.Tensor
    """[tokens, chosen] float32."""


@dataclass(frozen=True, slots=True)
class VisualTokens:
    """Tokens of images and videos in a batch, which have experts of their own."""

    mask: torch.Tensor
    """[tokens, 1] bool."""
    slot_mapping: torch.Tensor
    """The batch's, with -1 for all other tokens."""

    @staticmethod
    def of(batch: AttentionBatch) -> VisualTokens | None:
        """Return those of a batch; None = none has experts of its own."""
        if batch.is_visual is None:
            return None
        slots = batch.slot_mapping.masked_fill(~batch.is_visual, -1)
        return VisualTokens(batch.is_visual[:, None], slots)


def route_tokens(
    ops: Ops,
    x: torch.Tensor,
    experts: ExpertWeights,
    config: ExpertsConfig,
    slot_mapping: torch.Tensor,
    visual: VisualTokens | None,
    *,
    deterministic: bool,
) -> RoutedTokens:
    """Return tokens with their experts, and with the gated products of ``x``, which is normed."""

    def route(own: ExpertWeights, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.route_experts(
            x, own.router, config.routing, own.router_bias, logits_bias=own.logits_bias,
            slot_mapping=slots, deterministic=deterministic,
        )  # fmt: skip

    ids, weights = route(experts, slot_mapping)
    sets = [(experts, ids)]
    if experts.visual is not None and visual is not None:
        visual_ids, visual_weights = route(experts.visual, visual.slot_mapping)
        count = config.routing.top_k
        visual_ids[:, count:] = -1
        ids[:, :count].masked_fill_(visual.mask, -1)
        routed = weights[:, :count]
        routed.copy_(torch.where(visual.mask, visual_weights[:, :count], routed))
        sets.append((experts.visual, visual_ids))
    return RoutedTokens(
        tuple(
            (
                own,
                of_own,
                ops.expert_linear(
                    x, own.gate_up_of_experts, of_own, bias=own.gate_up_bias,
                    activation=config.activation, deterministic=deterministic,
                ),
            )
            for own, of_own in sets
        ),
        weights,
    )  # fmt: skip


def combine(
    ops: Ops,
    routed: RoutedTokens,
    leaves: int | None,
    *,
    adds_bias: bool,
    deterministic: bool,
    **into: Any,  # noqa: ANN401 - arguments of combine_experts
) -> None:
    """Multiply by each expert's last matrix, and add up a token's products, as combine_experts.

    ``adds_bias`` says whether this rank has the biases, which a sum over ranks has once.

    Products with ``leaves`` are several for each pair, in float32: those of 4,096 tokens would
    take gigabytes. So some tokens follow others, which changes no bits.
    """
    num_tokens, num_chosen = routed.weights.shape
    at_once = max(num_tokens, 1)
    if leaves is not None:
        of_token = leaves * num_chosen * into["out"].shape[1] * 4
        at_once = max(LEAF_BYTES // of_token // 16, 1) * 16  # slices are aligned alike
    for first in range(0, num_tokens, at_once):
        tokens = slice(first, first + at_once)
        pairs = slice(first * num_chosen, (first + at_once) * num_chosen)
        rows = into | {
            name: value[tokens]
            for name, value in into.items()
            if name in ("residual", "out", "normed_out") and value is not None
        }
        weights = routed.weights[tokens]
        if len(routed.parts) == 1:
            ((experts, ids, activated),) = routed.parts
            ops.add_experts(
                activated[pairs],
                experts.down_of_experts,
                ids[tokens],
                weights,
                bias=experts.down_bias if adds_bias else None,
                deterministic=deterministic,
                leaves=leaves,
                num_shared=experts.num_shared,
                **rows,
            )
            continue
        out: torch.Tensor | None = None
        for experts, ids, activated in routed.parts:  # each fills its rows of one tensor
            out = products = ops.expert_linear(
                activated[pairs],
                experts.down_of_experts,
                ids[tokens],
                bias=experts.down_bias if adds_bias else None,
                out=out,
                deterministic=deterministic,
                leaves=leaves,
                num_shared=experts.num_shared,
            )
        ops.combine_experts(products, weights, **rows)
