"""transformers' own KV cache, rounded to fp8 as it is filled: the oracle of an fp8 cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from tests.models.families import CACHE


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``x`` rounded to e4m3 codes with these scales."""
    codes = (x.to(torch.float64) / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return (codes.to(torch.float64) * scale).to(x.dtype)


class QuantizingCache(DynamicCache):
    """Keys and values with a scale per (token, head), per (quarter, head), or with static scales.

    Args:
        head_scales: ``[layers, 2, kv_heads]`` static scales; None = scales are computed.
        quarter: number of tokens that share a scale, which grows; None = one scale per token.
    """

    def __init__(
        self, head_scales: torch.Tensor | None = None, quarter: int | None = None
    ) -> None:
        super().__init__()
        self.head_scales = head_scales
        self.quarter = quarter
        self.scales: dict[tuple[int, int], torch.Tensor] = {}
        """By layer and K (0) or V (1): each token's scale, ``[batch, kv_heads, tokens, 1]``."""

    def update(
        self,
        key_states: torch.Tensor,  # [batch, kv_heads, tokens, head_dim], rotated
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round the new keys and values, then store them as the base class does."""
        states = []
        for index, x in enumerate((key_states, value_states)):
            if self.head_scales is None:
                absmax = x.to(torch.float64).abs().amax(-1, keepdim=True)
                scale = (absmax / 448).clamp_min(1e-12).float().double()
                if self.quarter is not None:
                    scale = self._grow(layer_idx, index, scale)
            else:
                scale = self.head_scales[layer_idx, index].double()[None, :, None, None]
            states.append(rounded(x, scale.to(x.device)))
        return super().update(*states, layer_idx, *args, **kwargs)

    def _grow(self, layer_idx: int, index: int, needed: torch.Tensor) -> torch.Tensor:
        """Return the scales of new tokens; round stored tokens again where their scale grew."""
        held = self.scales.get((layer_idx, index), needed[:, :, :0])
        scale = torch.cat([held, needed], dim=2)
        for first in range(0, scale.shape[2], self.quarter):
            quarter = scale[:, :, first : first + self.quarter]
            quarter.copy_(quarter.amax(2, keepdim=True))
        self.scales[layer_idx, index] = scale
        count = held.shape[2]
        if count:
            layer = self.layers[layer_idx]
            x = (layer.keys, layer.values)[index]
            x.copy_(torch.where(scale[:, :, :count] > held, rounded(x, scale[:, :, :count]), x))
        return scale[:, :, count:]


@torch.no_grad()
def fp8_logits(
    model: PreTrainedModel,
    prompt: list[int],
    head_scales: torch.Tensor | None = None,
    quarter: int | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """Return transformers' logits ``[len(prompt), vocab]`` over a rounded cache.

    The prompt comes ``chunk`` tokens at a time, None = at once.
    """
    cache = QuantizingCache(head_scales, quarter)
    ids = torch.tensor([prompt], device=model.device)
    return torch.cat(
        [model(part, **{CACHE: cache}).logits[0] for part in ids.split(chunk or len(prompt), 1)]
    )
