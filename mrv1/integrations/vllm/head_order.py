"""Which KV heads each of vLLM's tensor-parallel ranks has under a head policy.

All ranks share the ids of blocks, and a block takes as much on each rank: memory is saved
as far as every rank has as many streaming heads. So the heads of each kind are dealt out to the
ranks, and the weights of a layer's heads are read in that order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from mrv1.errors import ConfigError
from mrv1.headwise import HeadPolicy

_PROJECTION = re.compile(r"layers\.(\d+)\.self_attn\.([qkvo])_proj\.(weight|bias)$")
_ATTENTION = re.compile(r"layers\.(\d+)\.\w*att\w*\.")


def dealt_order(policy: HeadPolicy, ranks: int) -> list[tuple[int, ...]]:
    """Return for each layer its KV heads, those of rank 0 first, then those of the next.

    Numbers of a kind differ by one head at most between ranks. A layer whose heads are as even as
    they are keeps its order, and so do heads that several ranks have.
    """
    in_order = tuple(range(policy.num_kv_heads))
    if policy.num_kv_heads < ranks:
        return [in_order] * policy.num_layers
    orders = []
    for layer in policy.heads:
        kinds = [policy.groups.index(seen) for seen in layer]
        by_kind = sorted(in_order, key=kinds.__getitem__)
        dealt = tuple(head for rank in range(ranks) for head in by_kind[rank::ranks])
        is_even = _most_of_a_kind(layer, in_order, ranks) == _most_of_a_kind(layer, dealt, ranks)
        orders.append(in_order if is_even else dealt)
    return orders


def _most_of_a_kind(layer: Sequence[object], order: Sequence[int], ranks: int) -> list[int]:
    """Return for each kind of heads the most that a rank has."""
    size = len(order) // ranks
    parts = [order[rank * size : (rank + 1) * size] for rank in range(ranks)]
    return [
        max(sum(layer[head] == kind for head in part) for part in parts)
        for kind in dict.fromkeys(layer)
    ]


def reordered(
    weights: Iterable[tuple[str, torch.Tensor]], orders: Mapping[int, Sequence[int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors, with the KV heads of a layer, and their queries, in its order.

    ConfigError: a layer that has an order has a matrix of attention whose heads are not known.
    """
    for name, tensor in weights:
        found, place = _PROJECTION.search(name), _ATTENTION.search(name)
        order = orders.get(int(place[1])) if place else None
        if order is None or (found is None and tensor.dim() < 2) or name.endswith("o_proj.bias"):
            yield name, tensor
            continue
        if found is None:
            raise ConfigError(
                f"head_policy: expected weights q_proj, k_proj, v_proj and o_proj of attention "
                f"with tensor parallelism, got {name}"
            )
        by_head = 1 if found[2] == "o" else 0
        heads = tensor.unflatten(by_head, (len(order), -1))
        index = torch.tensor(order, device=tensor.device)
        yield name, heads.index_select(by_head, index).flatten(by_head, by_head + 1)
