"""The least bytes that a decode step reads, and how fast this device moves bytes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from mrv1.models import ModelConfig, ParallelContext
from mrv1.models.weights import checkpoint_places, empty_weights
from mrv1.runner.kv_cache import CacheSpec

COPY_BYTES = 1 << 30
"""Bytes of each of the two copied buffers: many times any GPU's L2 cache."""
COPY_REPEATS = 20


def rank_config(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """Return the configuration of one of some ranks, which all have as much."""
    return _rank(num_ranks).shard(config)


def _rank(num_ranks: int) -> ParallelContext:
    return ParallelContext(size=num_ranks, all_reduce=torch.clone, all_gather=torch.clone)


def active_experts(config: ModelConfig, batch: int) -> float:
    """Return how many routed experts of a layer a decode step reads, if tokens spread evenly."""
    if config.experts is None:
        return 0.0
    routing = config.experts.routing
    return routing.num_experts * (1 - (1 - routing.top_k / routing.num_experts) ** batch)


def step_weight_bytes(
    config: ModelConfig, dtype: torch.dtype, num_ranks: int = 1, *, batch: int = 1
) -> int:
    """Return the bytes of the weights that a rank reads once in every decode step.

    All weights, except an embedding that is not also the head: a step reads only the rows of its
    tokens there, and these are not counted. Of routed experts, those that ``batch`` tokens have if
    they spread evenly. ``config`` is the rank's own, see ``rank_config``.
    """
    rows = _rank(num_ranks).vocab_rows(config.vocab_size)
    own = empty_weights(config, "meta", dtype, vocab_rows=rows)
    places = checkpoint_places(config, own)
    if not config.tie_word_embeddings:
        del places["model.embed_tokens.weight"]
    sizes = {name: sum(each.nbytes for each in place.memory) for name, place in places.items()}
    if config.experts is None:
        return sum(sizes.values())
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    share = active_experts(config, batch) / config.experts.routing.num_experts
    return round(sum(sizes.values()) - routed + routed * share)


def step_kv_bytes(
    spec: CacheSpec,
    layer_windows: Sequence[int],
    *,
    batch: int,
    prompt_tokens: int,
    output_tokens: int,
) -> float:
    """Return the bytes of K and V, and their scales, that a decode step reads on average.

    Step k of ``output_tokens - 1`` (the first output comes from the prefill) sees
    ``prompt_tokens + k`` tokens, its own included, or the layer's window if the window is shorter.
    """
    contexts = range(prompt_tokens + 1, prompt_tokens + output_tokens)
    visible_tokens = sum(
        statistics.mean(contexts if window < 0 else [min(c, window) for c in contexts])
        for window in layer_windows
    )
    return batch * visible_tokens * spec.token_bytes / spec.num_layers


def copy_bandwidth(device: torch.device) -> float | None:
    """Return bytes read + written per second by a device-to-device copy; None on a CPU.

    The median of 20 copies of 1 GiB of random bytes (zeros can be faster), after one that is not
    counted. Waits for the device.
    """
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        target.copy_(source)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(COPY_REPEATS + 1)]
        events[0].record()
        for event in events[1:]:
            target.copy_(source)
            event.record()
        torch.cuda.synchronize(device)
        copy_ms: float = statistics.median(
            events[i].elapsed_time(events[i + 1]) for i in range(COPY_REPEATS)
        )
        del source, target
        torch.cuda.empty_cache()  # for the engine, which takes all free memory
    return 2 * COPY_BYTES / (copy_ms * 1e-3)
