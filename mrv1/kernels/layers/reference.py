"""The ops of a decoder's layers in plain torch."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from mrv1.kernels._base.checks import mrope_axes
from mrv1.kernels._base.oracle import counted, wide
from mrv1.kernels._base.peers import PeerError
from mrv1.kernels.layers.contracts import (
    RING_ROWS,
    RING_SLOTS,
    Activation,
    AllReduceAlgorithm,
    AllReduceBuffers,
    FeatureRows,
    check_features,
)
from mrv1.kernels.layers.lora import Adapters
from mrv1.kernels.layers.quantized import QuantizedWeight
from mrv1.kernels.layers.sum_order import SumOrder, check_leaves, tree_sum


@counted
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    second_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    onto: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.rms_norm`."""
    if second_weight is not None:
        weight = torch.stack([weight, second_weight])
    if residual is not None:
        residual.copy_(wide(residual) + wide(x))
        x = residual
    wide_x = wide(x)
    scale = torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == x.dtype:
        normed = (wide_x * scale).to(x.dtype) * weight
    else:
        normed = (wide_x * scale * weight).to(x.dtype)
    if onto is not None:
        normed = (wide(onto) + wide(normed)).to(x.dtype)
    return normed if out is None else out.copy_(normed)


@counted
def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Oracle of :func:`mrv1.kernels.apply_rope`."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].unsqueeze(1).split(half, dim=-1)
    for x in (q, k):
        rotary = x[..., : 2 * half]
        first = rotary[..., 0::2] if interleaved else rotary[..., :half]
        second = rotary[..., 1::2] if interleaved else rotary[..., half:]
        a, b = wide(first), wide(second)
        rotated = a * cos - b * sin, b * cos + a * sin
        first.copy_(rotated[0])
        second.copy_(rotated[1])


def _silu(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(x)``, with its limit at -inf.

    There torch's own returns NaN; and on a CPU its last bits follow a value's place in the tensor.
    """
    x = x.clamp(min=torch.finfo(x.dtype).min)
    return x / (1 + torch.exp(-x))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return gelu by tanh, ``0.5 x (1 + tanh(u))``, with its limit at -inf: torch has NaN."""
    x = x.clamp(min=torch.finfo(x.dtype).min)
    twice_u = (8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    return x / (1 + torch.exp(-twice_u))


def _gated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the second half of each row times the activation of the first."""
    gate, up = x.chunk(2, dim=-1)
    return (_silu(gate) if activation == "silu_and_mul" else _gelu_tanh(gate)) * up


@counted
def gelu_tanh_and_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.gelu_tanh_and_mul`."""
    result = _gated(wide(x), "gelu_tanh_and_mul").to(x.dtype)
    return result if out is None else out.copy_(result)


@counted
def silu_and_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.silu_and_mul`."""
    result = _gated(wide(x), "silu_and_mul").to(x.dtype)
    return result if out is None else out.copy_(result)


@counted
def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.dequantize`."""
    return weight.dense()


@counted
def linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    activation: Activation | None = None,
    out: torch.Tensor | None = None,
    out_norm_weight: torch.Tensor | None = None,
    normed_out: torch.Tensor | None = None,
    prefetch: torch.Tensor | None = None,
    deterministic: bool = False,
    leaves: int | None = None,
    keep_splits: bool = False,
    adapters: Adapters | None = None,
) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.linear`; it has no splits to keep."""
    check_leaves(leaves, deterministic=deterministic)
    if adapters is not None:
        adapters.check(x, weight.shape[0])
    if isinstance(weight, QuantizedWeight):
        weight = weight.dense()
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    if deterministic:
        order = SumOrder.of(x.shape[1], len(weight), leaves, is_gated=activation is not None)
        y = _sum_in_order(wide(x), wide(weight), order)
    else:
        y = wide(x) @ wide(weight).T
    if adapters is not None:
        shrunk = shrink_adapters(x, adapters)
        add_adapters(y, shrunk, adapters)
    if bias is not None:
        y = y + wide(bias)
    if activation is not None:
        y = _gated(y, activation)
    if residual is not None:
        y = wide(residual) + y
    y = y.to(x.dtype if out is None else out.dtype)
    if normed_out is not None and out_norm_weight is not None:
        rms_norm(y, out_norm_weight, eps, out=normed_out)
    return y if out is None else out.copy_(y)


@counted
def shrink_adapters(
    x: torch.Tensor, adapters: Adapters, *, keep_splits: bool = False
) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.shrink_adapters`; a token's bits do not follow the others.

    Its inputs are not cut: one split.
    """
    matrices, slots = adapters.matrices, adapters.slots
    matrices.check(x, sum(matrices.part_rows))
    shrunk = wide(x).new_zeros(len(x), matrices.a.shape[1])
    for slot, part, rank in _adapted_parts(adapters):
        first = part * matrices.max_rank
        rows = wide(matrices.a[slot, first : first + rank])
        scaling = matrices.scaling[slot, part]
        for token in (slots == slot).nonzero().flatten().tolist():
            sums = (rows * wide(x[token])).sum(-1)
            shrunk[token, first : first + rank] = sums * scaling
    return shrunk[..., None] if keep_splits else shrunk


@counted
def add_adapters(out: torch.Tensor, shrunk: torch.Tensor, adapters: Adapters) -> None:
    """Oracle of :func:`mrv1.kernels.add_adapters`: ranks are added from first to last."""
    matrices, slots = adapters.matrices, adapters.slots
    shrunk = shrunk.sum(-1) if shrunk.dim() == 3 else shrunk
    for slot, part, rank in _adapted_parts(adapters):
        first, start = part * matrices.max_rank, matrices.part_starts[part]
        columns = slice(start, start + matrices.part_rows[part])
        tokens = (slots == slot).nonzero().flatten()
        added = shrunk.new_zeros(len(tokens), matrices.part_rows[part])
        for index in range(rank):
            row = wide(matrices.b[slot, index, columns])
            added += shrunk[tokens, first + index, None] * row
        out[tokens, columns] = (wide(out[tokens, columns]) + added).to(out.dtype)


def _adapted_parts(adapters: Adapters) -> Iterator[tuple[int, int, int]]:
    """Yield the slots that tokens use, with each part that such an adapter has, and its rank."""
    for slot in adapters.slots.unique().tolist():
        ranks = adapters.matrices.ranks[slot].tolist() if slot >= 0 else []
        yield from ((slot, part, rank) for part, rank in enumerate(ranks) if rank)


def _sum_in_order(x: torch.Tensor, weight: torch.Tensor, order: SumOrder) -> torch.Tensor:
    """Return ``x @ weight.T``, each result summed alike; a matrix product's order follows M, N."""
    sums = x.new_zeros(order.leaves, len(x), len(weight))
    for index, leaf in enumerate(x.split(order.leaf_in, dim=1)):
        of_leaf = weight[:, index * order.leaf_in :][:, : order.leaf_in]
        for token, row in enumerate(leaf):
            sums[index, token] = (of_leaf * row).sum(-1)
    return tree_sum(sums.unbind())


@counted
def embed_tokens(
    input_ids: torch.Tensor,
    embed: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    mrope_section: tuple[int, int, int] | None = None,
    mrope_interleaved: bool = False,
    features: FeatureRows | None = None,
    first_id: int | None = None,
    scale: float | None = None,
    scales_features: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle of :func:`mrv1.kernels.embed_tokens`."""
    check_features(features, embed)
    ids = input_ids - (first_id or 0)
    is_elsewhere = torch.zeros_like(ids, dtype=torch.bool)
    if first_id is not None:
        is_elsewhere = (ids < 0) | (ids >= len(embed))
        ids = ids.masked_fill(is_elsewhere, 0)
    hidden = torch.nn.functional.embedding(ids, embed)
    factor = torch.full_like(
        hidden[:, :1], 1.0 if scale is None else scale, dtype=wide(hidden).dtype
    )
    if features is not None:
        tokens, rows = _tokens_with_features(features, hidden)
        hidden[tokens] = rows[:, : embed.shape[1]]
        if not scales_features:
            factor[tokens] = 1.0
    hidden = (wide(hidden) * factor).to(embed.dtype)
    hidden.masked_fill_(is_elsewhere[:, None], -0.0)
    if mrope_section is None:
        return hidden, cos_sin.index_select(0, positions)
    axis = mrope_axes(mrope_section, interleaved=mrope_interleaved).to(embed.device).repeat(2)
    return hidden, cos_sin[positions.T[:, axis], torch.arange(len(axis), device=embed.device)]


@counted
def add_features(hidden: torch.Tensor, features: FeatureRows, first_column: int) -> None:
    """Oracle of :func:`mrv1.kernels.add_features`."""
    check_features(features, hidden, first_column)
    tokens, rows = _tokens_with_features(features, hidden)
    added = rows[:, first_column : first_column + hidden.shape[1]]
    hidden[tokens] = (wide(hidden[tokens]) + wide(added)).to(hidden.dtype)


def _tokens_with_features(
    features: FeatureRows, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of the tokens of ``hidden`` with a source, and their rows."""
    source = features.source[: min(int(features.num_sources), len(hidden))]
    tokens = (source >= 0).nonzero().flatten()
    return tokens, features.rows[source[tokens].long()]


@counted
def all_reduce_norm(
    partial: torch.Tensor,
    buffers: AllReduceBuffers,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    normed_out: torch.Tensor | None = None,
    algorithm: AllReduceAlgorithm | None = None,
) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.all_reduce_norm`; PeerError if ``buffers.abort`` is set."""
    dtype = next((x.dtype for x in (out, residual) if x is not None), partial.dtype)
    buffers.check_partial(partial, dtype)
    if partial.dim() == 3:
        partial = _sum_of_pairs(partial)
        partial = partial.to(dtype if buffers.received.own.itemsize == 2 else partial.dtype)
    parts = [_exchanged(rows, buffers) for rows in partial.split(RING_ROWS)]
    total = _sum_of_pairs(wide(torch.cat(parts, dim=1)))
    if bias is not None:
        total = total + wide(bias)
    if residual is not None:
        total = wide(residual) + total
    y = total.to(dtype)
    if normed_out is not None and norm_weight is not None:
        rms_norm(y, norm_weight, eps, out=normed_out)
    return y if out is None else out.copy_(y)


def _exchanged(rows: torch.Tensor, buffers: AllReduceBuffers) -> torch.Tensor:
    """Return ``rows`` of every rank, [ranks, rows, hidden]: all are sent to all."""
    received, num_rows = buffers.received, len(rows)
    if not num_rows:  # nobody waits for it: a rank could be two turns ahead of another
        return rows.expand(len(received.parts), *rows.shape)
    slot = int(buffers.turn[0])
    received.own[slot - 1].zero_()
    bits = rows.contiguous().view(received.own.dtype)
    words = torch.where(bits == -1, torch.iinfo(bits.dtype).max, bits).bitwise_not()
    for part in received.parts:
        part[slot, received.rank, :num_rows] = words
    while not (arrived := received.own[slot, :, :num_rows].clone()).all():
        if buffers.abort.item():
            raise PeerError("all_reduce_norm: another rank has ended")
        time.sleep(0)
    buffers.turn.fill_((slot + 1) % RING_SLOTS)
    return arrived.bitwise_not().view(rows.dtype)


def _sum_of_pairs(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first dimension as a tree: ((0 + 1) + (2 + 3)) + ..."""
    if len(parts) == 1:
        return parts[0]
    left = 1 << (len(parts) - 1).bit_length() - 1
    return _sum_of_pairs(parts[:left]) + _sum_of_pairs(parts[left:])
