"""Choose the experts of each token, and their weights, from its hidden state.

    logits  = x @ weight.T + logits_bias                         float32
    scores  = softmax(logits) or sigmoid(logits)
    chosen  = the top_k largest of scores + bias                 ties to the lowest id
    weights = scale * scores[chosen] (/ max(sum, least_sum))

With groups, only experts of the ``kept_groups`` best groups are chosen from; a group is as good as
the sum of its two best ``scores + bias``.

The first launch multiplies: a program has some experts and tokens and a part of the inputs. The
second, one program per token, adds the parts in order and chooses.

A float32 router is multiplied with 16-bit hidden states as three 16-bit pieces, which together are
the float32 values: the tensor cores multiply exactly and add in float32. One product in float32
would take a hundred times as long.

Sources: Shazeer et al., "Outrageously Large Neural Networks" (2017); DeepSeek-AI, "DeepSeek-V3"
(2024), for sigmoid scores, groups and the bias that chooses only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.arithmetic import cdiv, next_power_of_2
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.experts.contracts import Routing, check_routing

_FIRST, _LAST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig:
    """How the product is cut into programs; the cuts of the inputs follow from the weights."""

    tile_tokens: int
    tile_experts: int
    tile_in: int
    splits: int  # programs that share the inputs of a logit
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    @lru_cache(maxsize=64)
    def default_for(cls, num_tokens: int, num_in: int, *, deterministic: bool) -> RouteConfig:
        """Return the configuration for a GPU: short chains, and few programs wait for memory."""
        is_small = num_tokens <= 256 or deterministic
        return cls(
            tile_tokens=16 if is_small else 32,
            tile_experts=16 if is_small else 32,
            tile_in=min(128 if is_small else 64, max(16, next_power_of_2(num_in))),
            splits=max(1, min(8, num_in // 256)),
            num_stages=3 if is_small else 2,
        )

    @classmethod
    def for_interpreter(cls, num_tokens: int, num_in: int, *, deterministic: bool) -> RouteConfig:
        """Return few large programs, with two splits."""
        return cls(
            tile_tokens=16 if deterministic else min(256, next_power_of_2(num_tokens)),
            tile_experts=256,
            tile_in=min(1024, next_power_of_2(cdiv(num_in, 4))),
            splits=2,
        )


@triton.jit
def _add_in_pieces(logits, x, weight, SCALE: tl.constexpr):
    """Return ``logits + x @ weight.T`` for float32 weights, in pieces of x's dtype.

    A piece is what the pieces before it leave over, times a power of SCALE, so that the last one
    is not too small for float16.
    """
    first = weight.to(x.dtype)
    rest = (weight - first.to(tl.float32)) * SCALE
    second = rest.to(x.dtype)
    third = ((rest - second.to(tl.float32)) * SCALE).to(x.dtype)
    logits = tl.dot(x, tl.trans(first), logits)
    less = tl.dot(x, tl.trans(second)) + tl.dot(x, tl.trans(third)) * (1.0 / SCALE)
    return logits + less * (1.0 / SCALE)


@triton.jit(do_not_specialize=["num_tokens"])
def _router_logits_kernel(
    parts_ptr,  # [SPLITS, num_tokens, num_experts] float32
    x_ptr, stride_x_token,  # [num_tokens, num_in], unit last stride
    weight_ptr,  # [num_experts, num_in], x's dtype or float32
    num_tokens, num_experts, num_in,
    TILE_TOKENS: tl.constexpr, TILE_EXPERTS: tl.constexpr, TILE_IN: tl.constexpr,
    SPLITS: tl.constexpr, NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (expert tiles * SPLITS, token tiles): one part of a tile of logits."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    split = tl.program_id(0) % SPLITS
    token = tl.program_id(1).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    expert = (tl.program_id(0) // SPLITS).to(tl.int64) * TILE_EXPERTS
    expert += tl.arange(0, TILE_EXPERTS)
    is_token, is_expert = token < num_tokens, expert < num_experts
    steps = tl.cdiv(num_in, SPLITS * TILE_IN)
    first = split * steps * TILE_IN
    lane = tl.arange(0, TILE_IN)
    x_rows = x_ptr + token[:, None] * stride_x_token
    weight_rows = weight_ptr + expert[:, None] * num_in
    logits = tl.zeros([TILE_TOKENS, TILE_EXPERTS], tl.float32)
    for step in tl.range(0, steps, num_stages=NUM_STAGES):
        col = first + step * TILE_IN + lane[None, :]
        x = tl.load(x_rows + col, mask=is_token[:, None] & (col < num_in), other=0.0)
        weight = tl.load(weight_rows + col, mask=is_expert[:, None] & (col < num_in), other=0.0)
        if x.dtype == tl.float32:
            logits += tl.dot(x, tl.trans(weight), input_precision="ieee")
        elif weight.dtype == tl.float32:
            logits = _add_in_pieces(logits, x, weight, 256.0)
        else:
            logits = tl.dot(x, tl.trans(weight), logits)
    row = split.to(tl.int64) * num_tokens + token
    parts_ptr += row[:, None] * num_experts + expert[None, :]
    tl.store(parts_ptr, logits, mask=is_token[:, None] & is_expert[None, :])


@triton.jit
def _best_groups(ranked, expert, GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUP: tl.constexpr):
    """Return ``ranked`` with -inf for all experts but those of the best groups."""
    group = expert // GROUP
    best = tl.full(ranked.shape, float("-inf"), tl.float32)  # of the expert's group
    for index in tl.static_range(GROUPS):
        of_group = tl.where(group == index, ranked, float("-inf"))
        first = tl.max(of_group, axis=0)
        place = tl.min(tl.where((of_group == first) & (group == index), expert, _LAST), axis=0)
        second = tl.max(tl.where(expert == place, float("-inf"), of_group), axis=0)
        best = tl.where(group == index, first + second, best)
    kept = tl.zeros(ranked.shape, tl.int32)
    for _ in tl.static_range(KEPT):
        top = tl.max(tl.where(kept == 0, best, float("-inf")), axis=0)
        is_top = (best == top) & (kept == 0)
        chosen = tl.min(tl.where(is_top, group, _LAST), axis=0)
        kept = tl.where(group == chosen, 1, kept)
    return tl.where(kept != 0, ranked, float("-inf"))


@triton.jit
def _in_order(x):
    """Return int32 in the order of float32 ``x``, which has no NaN; -0.0 counts as 0.0.

    A warp finds the largest integer of its lanes in one instruction, not in five exchanges.
    """
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["num_tokens", "num_groups"])
def _choose_experts_kernel(
    ids_ptr,  # [num_tokens, TOP_K + SHARED] int32
    weights_ptr,  # [num_tokens, TOP_K + SHARED] float32
    parts_ptr,  # [SPLITS, num_tokens, num_experts] float32
    x_ptr,  # its dtype is that of rounded logits; not read
    bias_ptr,  # [num_experts] float32, or None
    logits_bias_ptr,  # [num_experts], or None
    slot_ptr,  # [num_groups, num_tokens] int64, -1 = no slot; or None
    num_groups, num_tokens, num_experts, least_sum, scale,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUP: tl.constexpr,  # experts of a group
    RENORMALIZES: tl.constexpr, ROUNDS: tl.constexpr, SPLITS: tl.constexpr,
    TILE_EXPERTS: tl.constexpr,  # power of two >= num_experts
    TILE_CHOSEN: tl.constexpr,  # power of two >= TOP_K + SHARED
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (num_tokens,): one token's experts."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, TILE_EXPERTS)
    is_expert = expert < num_experts
    bias = tl.zeros([TILE_EXPERTS], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    place = tl.arange(0, TILE_CHOSEN)
    first = token * (TOP_K + SHARED)
    is_chosen = place < TOP_K + SHARED
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    parts_ptr += token * num_experts + expert
    parts = ()
    for split in tl.static_range(SPLITS):  # all loads start before the branch
        part_ptr = parts_ptr + tl.full([], split, tl.int64) * num_tokens * num_experts
        part = tl.load(part_ptr, mask=is_expert, other=0.0)
        parts += (part,)  # type: ignore[assignment]
    if slot_ptr is not None:
        slot = tl.full([], -1, tl.int64)
        for group in range(num_groups):
            slot = tl.maximum(slot, tl.load(slot_ptr + group * num_tokens.to(tl.int64) + token))
        if slot < 0:  # padding
            tl.store(ids_ptr + first + place, tl.full([TILE_CHOSEN], -1, tl.int32), mask=is_chosen)
            tl.store(weights_ptr + first + place, tl.zeros([TILE_CHOSEN], tl.float32),
                     mask=is_chosen)  # fmt: skip
            return
    logits = tl.zeros([TILE_EXPERTS], tl.float32)
    for split in tl.static_range(SPLITS):
        logits += parts[split]
    if logits_bias_ptr is not None:
        more = tl.load(logits_bias_ptr + expert, mask=is_expert, other=0.0)
        logits += more.to(tl.float32)
    if ROUNDS:
        logits = logits.to(x_ptr.dtype.element_ty).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        top = tl.max(tl.where(is_expert, logits, float("-inf")), axis=0)
        shares = tl.where(is_expert, tl.exp(logits - top), 0.0)
        scores = shares / tl.sum(shares, axis=0)
    # Softmax may round different logits to one score: without a bias, the logits' order counts.
    ranked = logits if bias_ptr is None else scores + bias
    ranked = tl.where(is_expert & (ranked == ranked), ranked, float("-inf"))
    if GROUPS > 1:
        ranked = _best_groups(ranked, expert, GROUPS, KEPT, GROUP)

    ids = num_experts + place - TOP_K  # of shared experts
    weights = tl.full([TILE_CHOSEN], 1.0, tl.float32)
    ranks = tl.where(is_expert, _in_order(ranked), _FIRST)
    bits = scores.to(tl.int32, bitcast=True)
    total = tl.zeros([], tl.float32)
    for index in tl.static_range(TOP_K):
        best = tl.max(ranks, axis=0)
        chosen = tl.min(tl.where(ranks == best, expert, _LAST), axis=0)
        ranks = tl.where(expert == chosen, _FIRST, ranks)  # below -inf
        score = tl.max(tl.where(expert == chosen, bits, _FIRST), axis=0)
        score = score.to(tl.float32, bitcast=True)
        total += score
        ids = tl.where(place == index, chosen, ids)
        weights = tl.where(place == index, score, weights)
    factor = tl.full([], 1.0, tl.float32) * scale
    is_routed = place < TOP_K
    if RENORMALIZES:
        weights = tl.where(is_routed, tl.div_rn(weights, tl.maximum(total, least_sum)), weights)
    weights = tl.where(is_routed, weights * factor, weights)
    tl.store(ids_ptr + first + place, ids, mask=is_chosen)
    tl.store(weights_ptr + first + place, weights, mask=is_chosen)


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
    """Return each token's experts and their weights.

    Args:
        x: [tokens, in] float32 | float16 | bfloat16, unit last stride: hidden states, normed.
        weight: [num_experts, in], x's dtype or float32, contiguous: the router.
        routing: how experts are chosen.
        bias: num_experts values, float32, contiguous: added to scores for the choice only; None =
            none.
        logits_bias: [num_experts], x's dtype or float32, contiguous: added to the logits; None =
            none.
        slot_mapping: [groups, tokens] int64, contiguous: a token with -1 in every group is
            padding, and has no experts: ids -1 and weights 0. None = no token is padding.
        deterministic: whether a token's result depends on that token alone, and not on the number
            of tokens.

    Returns:
        Two tensors of shape [tokens, top_k + num_shared]: int32 ids, the best expert first and
        the shared experts last, and float32 weights.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: products are exact and added in float32, also of a float32 router.
        Experts are chosen by the rounded scores, a NaN last; by softmax, a NaN logit makes all
        weights of its token NaN. Tier B, ids exact but for near-ties.
    Stream: two launches on the current stream, no synchronisation, CUDA-graph safe. Allocates up
        to 32 bytes per token and expert.
    """
    check_tensor("x", x, dtype=FLOAT_DTYPES)
    check_routing(x, weight, routing, bias, logits_bias, slot_mapping)
    check_launchable("x", x)
    num_tokens, num_in = x.shape
    num_experts, num_chosen = routing.num_experts, routing.num_chosen
    ids = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=x.device)
    if num_tokens == 0:
        return ids, weights
    make = RouteConfig.for_interpreter if INTERPRET else RouteConfig.default_for
    config = make(num_tokens, num_in, deterministic=deterministic)
    parts = weights.new_empty(config.splits, num_tokens, num_experts)
    expert_tiles = cdiv(num_experts, config.tile_experts)
    _router_logits_kernel[(expert_tiles * config.splits, cdiv(num_tokens, config.tile_tokens))](
        parts, *with_strides(x, 1), weight, num_tokens, num_experts, num_in,
        TILE_TOKENS=config.tile_tokens, TILE_EXPERTS=config.tile_experts, TILE_IN=config.tile_in,
        SPLITS=config.splits, NUM_STAGES=config.num_stages, num_warps=config.num_warps,
        **overlap_options(x.device),
    )  # fmt: skip
    _choose_experts_kernel[(num_tokens,)](
        ids, weights, parts, x, bias, logits_bias, slot_mapping,
        0 if slot_mapping is None else slot_mapping.shape[0], num_tokens, num_experts,
        routing.least_sum, routing.scale,
        TOP_K=routing.top_k, SHARED=routing.num_shared, SIGMOID=routing.scores == "sigmoid",
        GROUPS=routing.num_groups, KEPT=routing.kept_groups,
        GROUP=num_experts // routing.num_groups, RENORMALIZES=routing.renormalizes,
        ROUNDS=routing.rounds_logits, SPLITS=config.splits,
        TILE_EXPERTS=next_power_of_2(num_experts), TILE_CHOSEN=next_power_of_2(num_chosen),
        num_warps=1, **overlap_options(x.device),
    )  # fmt: skip
    return ids, weights
