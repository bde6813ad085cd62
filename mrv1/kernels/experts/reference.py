"""The experts' ops in plain torch."""

from __future__ import annotations

import torch

from mrv1.kernels._base.oracle import counted, wide
from mrv1.kernels.experts.contracts import (
    ClampedSwiGLU,
    ExpertActivation,
    Routing,
    check_added_experts,
    check_combination,
    check_expert_linear,
    check_routing,
)
from mrv1.kernels.layers.quantized import QuantizedWeight
from mrv1.kernels.layers.reference import linear, rms_norm
from mrv1.kernels.layers.sum_order import check_leaves


@counted
def route_experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    *,
    logits_bias: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle of :func:`mrv1.kernels.route_experts`; if deterministic, it goes row by row."""
    check_routing(x, weight, routing, bias, logits_bias, slot_mapping)
    matrix = wide(weight).to(wide(x).dtype).T
    parts = x.split(1) if deterministic and len(x) else (x,)
    logits = torch.cat([wide(part) @ matrix for part in parts])
    if logits_bias is not None:
        logits = logits + wide(logits_bias)
    if routing.rounds_logits:
        logits = logits.to(x.dtype)
    logits = wide(logits)
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    # Softmax may round different logits to one score: without a bias, the logits' order counts.
    ranked = logits if bias is None else scores + bias.flatten()
    ranked = ranked.masked_fill(ranked.isnan(), -torch.inf)
    if routing.num_groups > 1:
        groups = ranked.unflatten(1, (routing.num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.kept_groups]
        is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, value=True)
        ranked = groups.masked_fill(~is_kept[:, :, None], -torch.inf).flatten(1)
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.renormalizes:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=routing.least_sum)
    weights = weights * routing.scale
    num_shared = routing.num_shared
    shared = torch.arange(num_shared, device=x.device) + routing.num_experts
    ids = torch.cat([ids, shared.expand(len(x), -1)], 1)
    weights = torch.cat([weights, weights.new_ones(len(x), num_shared)], 1).float()
    if slot_mapping is not None:
        is_padding = (slot_mapping < 0).all(0)[:, None]
        ids, weights = ids.masked_fill(is_padding, -1), weights.masked_fill(is_padding, 0.0)
    return ids.int(), weights


@counted
def expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    topk_ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: ExpertActivation | None = None,
    out: torch.Tensor | None = None,
    deterministic: bool = False,
    leaves: int | None = None,
    num_shared: int = 0,
) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.expert_linear`; codes are widened for the experts chosen."""
    check_leaves(leaves, deterministic=deterministic)
    num_pairs, num_out = check_expert_linear(
        x, weight, topk_ids, bias, out,
        activation=activation, leaves=leaves, num_shared=num_shared,
    )  # fmt: skip
    if leaves is not None:
        if isinstance(weight, QuantizedWeight):
            weight = weight.dense()
        if num_shared > 1 and x.shape[1] % leaves == 0:
            x = x.unflatten(0, topk_ids.shape)
            rows = _leaves_together(x[:, -num_shared:], leaves)
            x = torch.cat([x[:, :-num_shared], rows], 1).flatten(0, 1)
            shared = _leaves_together(weight[-num_shared:].movedim(0, 1), leaves).movedim(1, 0)
            weight = torch.cat([weight[:-num_shared], shared])
        return _leaf_products(x, weight, topk_ids, bias, out, leaves)
    if out is None:
        out = x.new_empty(num_pairs, num_out)
    expert_of_pair = topk_ids.flatten()
    rows = x if len(x) == num_pairs else x.repeat_interleave(topk_ids.shape[1], 0)
    for expert in expert_of_pair.unique().tolist():
        if expert >= 0:
            pairs = (expert_of_pair == expert).nonzero().flatten()
            if isinstance(weight, QuantizedWeight):
                own = weight.at(expert).dense()
            else:
                own = weight[expert].flatten(0, -2)  # gates, then ups
            added = None if bias is None else bias[expert].flatten()
            of_pairs = rows[pairs]
            if not isinstance(activation, ClampedSwiGLU):
                out[pairs] = linear(
                    of_pairs, own, added, activation=activation, deterministic=deterministic
                )
                continue
            y = wide(of_pairs).new_empty(len(pairs), len(own))
            linear(of_pairs, own, added, out=y, deterministic=deterministic)
            out[pairs] = _clamped_swiglu(y, activation).to(out.dtype)
    return out


def _clamped_swiglu(y: torch.Tensor, activation: ClampedSwiGLU) -> torch.Tensor:
    gate, up = y.chunk(2, dim=-1)
    limit = activation.limit
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate / (1 + torch.exp(-activation.alpha * gate)))


def _leaves_together(parts: torch.Tensor, leaves: int) -> torch.Tensor:
    """Return [rows, experts, in] with each leaf of all experts' inputs divided among them."""
    together: torch.Tensor = parts.flatten(1).unflatten(1, (leaves, parts.shape[1], -1))
    return together.movedim(2, 1).flatten(2)


def _leaf_products(
    x: torch.Tensor,
    weight: torch.Tensor,
    topk_ids: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    leaves: int,
) -> torch.Tensor:
    """Return ``expert_linear`` of each leaf of the inputs, not rounded; the first has the bias."""
    if out is None:
        out = wide(x).new_empty(leaves, topk_ids.numel(), weight.shape[-2])
    leaf_in = -(-x.shape[1] // leaves)
    for leaf, of_leaf in enumerate(out):
        part = slice(leaf * leaf_in, (leaf + 1) * leaf_in)
        if part.start >= x.shape[1]:
            of_leaf[topk_ids.flatten() >= 0] = 0.0
            continue
        expert_linear(
            wide(x[:, part]), wide(weight[..., part]), topk_ids, out=of_leaf, deterministic=True,
            bias=None if bias is None or leaf else wide(bias),
        )  # fmt: skip
    return out


@counted
def combine_experts(
    products: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    normed_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.combine_experts`."""
    num_tokens, num_cols, dtype = check_combination(
        products, topk_weights, residual, out, norm_weight, normed_out
    )
    terms = wide(products).view(-1, num_tokens, topk_weights.shape[1], num_cols)
    totals = torch.zeros_like(terms[:, :, 0])  # of leaves
    for index, weights in enumerate(topk_weights.T):
        term = terms[:, :, index] * weights[:, None].to(terms.dtype)
        totals += torch.where(weights[:, None] == 0, 0.0, term)
    while len(totals) > 1:
        totals = totals[0::2] + totals[1::2]
    total = totals[0]
    if residual is not None:
        total += wide(residual)
    total = total.to(dtype if out is None else out.dtype)
    if norm_weight is not None and normed_out is not None:
        rms_norm(total.to(dtype), norm_weight, eps, out=normed_out)
    return total if out is None else out.copy_(total)


@counted
def add_experts(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    normed_out: torch.Tensor | None = None,
    deterministic: bool = False,
    leaves: int | None = None,
    num_shared: int = 0,
) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.add_experts`."""
    check_added_experts(
        x, weight, topk_ids, topk_weights, bias,
        deterministic=deterministic, leaves=leaves, num_shared=num_shared,
    )  # fmt: skip
    products = expert_linear(
        x, weight, topk_ids,
        bias=bias, deterministic=deterministic, leaves=leaves, num_shared=num_shared,
    )  # fmt: skip
    return combine_experts(
        products, topk_weights, residual=residual, out=out, norm_weight=norm_weight, eps=eps,
        normed_out=normed_out,
    )  # fmt: skip
