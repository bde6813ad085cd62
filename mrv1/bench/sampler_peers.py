"""Other samplers on the same logits; imported only when asked for.

They draw with their own generators: what they return is not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from mrv1.bench.timing import Launch

Arguments = Mapping[str, torch.Tensor]
"""What rows ask for, by the op's names, each ``[rows]`` and the same in all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerPeer:
    """Somebody else's sampler."""

    module: str
    """What must be importable."""
    launch: Callable[[torch.Tensor, Arguments], Launch | None]
    """Of logits ``[rows, vocab]``; None = it has nothing for these parameters."""


def _asks(of_row: Arguments) -> tuple[bool, bool, bool, bool]:
    """Return whether rows are greedy, and use top-k, top-p, min-p."""
    first = {name: value[0].item() for name, value in of_row.items()}
    return first["temperature"] == 0, first["top_k"] > 0, first["top_p"] < 1, first["min_p"] > 0


def flashinfer(logits: torch.Tensor, of_row: Arguments) -> Launch | None:
    """Run FlashInfer's softmax, with the temperature, and its fused filter and draw."""
    # Not a dependency of mrv1, so there is nothing to check its types against.
    from flashinfer import sampling  # type: ignore[import-not-found]

    greedy, has_top_k, has_top_p, has_min_p = _asks(of_row)
    top_k, top_p, min_p = (of_row[name] for name in ("top_k", "top_p", "min_p"))
    if greedy:
        return None
    draw = sampling.sampling_from_probs
    if has_min_p:
        draw = partial(sampling.min_p_sampling_from_probs, min_p=min_p)
    elif has_top_k and has_top_p:
        draw = partial(
            sampling.top_k_top_p_sampling_from_probs,
            top_k=top_k, top_p=top_p, filter_apply_order="top_k_first",
        )  # fmt: skip
    elif has_top_k:
        draw = partial(sampling.top_k_sampling_from_probs, top_k=top_k)
    elif has_top_p:
        draw = partial(sampling.top_p_sampling_from_probs, top_p=top_p)
    return lambda: draw(sampling.softmax(logits, temperature=of_row["temperature"]))


def vllm_mask(logits: torch.Tensor, of_row: Arguments) -> Launch | None:
    """Run vLLM's Triton mask of top-k and top-p on scaled logits, as its sampler does: no draw."""
    from mrv1.integrations.vllm_sampler import masked

    _, has_top_k, has_top_p, has_min_p = _asks(of_row)
    if has_min_p or not (has_top_k or has_top_p):
        return None
    top_k = of_row["top_k"] if has_top_k else None
    top_p = of_row["top_p"] if has_top_p else None
    return partial(masked, logits, of_row["temperature"], top_k, top_p)


def torch_sort(logits: torch.Tensor, of_row: Arguments) -> Launch | None:
    """Filter by a sort, as a plain torch sampler does, then softmax and an exponential race."""
    greedy, has_top_k, has_top_p, has_min_p = _asks(of_row)
    if greedy:
        return partial(logits.argmax, dim=1)
    top_k, top_p = int(of_row["top_k"][0]), of_row["top_p"][:, None]
    temperature, min_p = of_row["temperature"][:, None], of_row["min_p"][:, None]

    def launch() -> torch.Tensor:
        probs = (logits / temperature).softmax(1)
        if has_min_p:
            probs = probs.where(probs >= min_p * probs.amax(1, keepdim=True), 0.0)
        if has_top_k or has_top_p:
            ranked, order = probs.sort(dim=1, descending=True)
            if has_top_k:
                ranked[:, top_k:] = 0
            if has_top_p:
                mass = ranked.cumsum(1)
                ranked = ranked.where(mass - ranked < top_p * mass[:, -1:], 0.0)
            probs = torch.zeros_like(probs).scatter_(1, order, ranked)
        return (probs / torch.empty_like(probs).exponential_()).argmax(1)

    return launch


SAMPLER_PEERS: Mapping[str, SamplerPeer] = {
    "flashinfer": SamplerPeer(module="flashinfer", launch=flashinfer),
    "vllm-mask": SamplerPeer(module="vllm", launch=vllm_mask),
    "torch-sort": SamplerPeer(module="torch", launch=torch_sort),
}
"""By name."""
