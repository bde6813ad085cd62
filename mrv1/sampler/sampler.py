"""From logits to tokens on the device, every row with its own parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from mrv1.kernels.ops import Ops
from mrv1.sampler.params import SamplingParams


def filter_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """Return ``logits`` with what top-k, then top-p removes set to -inf.

    Both keep every token whose logit equals that of the last one kept, so the result does not
    depend on the order of a sort. Greedy rows (temperature 0) pass unchanged.

    Args:
        logits: ``[rows, vocab]`` float32 or float64.
        temperature: ``[rows]`` float32.
        top_k: ``[rows]`` int32; 0 keeps all.
        top_p: ``[rows]`` float32 in (0, 1]; 1 keeps all.

    Returns:
        ``[rows, vocab]``, a new tensor of the same dtype.
    """
    vocab_size = logits.shape[1]
    ranked = logits.sort(dim=1, descending=True).values
    last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long() - 1
    ranks = torch.arange(vocab_size, device=logits.device)
    kth = ranked.gather(1, last[:, None])
    ranked = ranked.masked_fill(ranked < kth, -torch.inf)
    scale = torch.where(temperature > 0, temperature, 1.0)[:, None]
    probs = (ranked / scale).softmax(dim=1)
    before = probs.cumsum(dim=1) - probs  # the mass of all more likely tokens
    inside = (before < top_p[:, None]) | (top_p[:, None] >= 1)  # cumsum may round above 1
    inside &= ranked > -torch.inf
    num_kept = torch.where(inside, ranks + 1, 0).amax(dim=1).clamp(min=1)
    threshold = ranked.gather(1, num_kept[:, None] - 1)
    return torch.where((logits >= threshold) | (temperature == 0)[:, None], logits, -torch.inf)


class Sampler:
    """Sampling parameters of every slot, and the draw.

    Owned by the runner; all tensors live on its device and work on the current stream. Rows are
    written when a request takes the slot, so nothing of a former request can show.
    """

    def __init__(self, max_num_reqs: int, device: torch.device, ops: Ops) -> None:
        self._ops = ops
        self._filters_np = np.zeros(max_num_reqs, dtype=np.bool_)
        self.temperature = torch.zeros(max_num_reqs, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.top_p = torch.ones(max_num_reqs, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)

    def stage(
        self, slots: Sequence[int], params: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Note on the host what requests that take ``slots`` ask for; return it for the upload."""
        self._filters_np[list(slots)] = [p.filters for p in params]
        return {
            "temperature": np.array([p.temperature for p in params], dtype=np.float32),
            "top_k": np.array([p.top_k for p in params], dtype=np.int32),
            "top_p": np.array([p.top_p for p in params], dtype=np.float32),
            "seeds": np.array(seeds, dtype=np.int64),
        }

    def apply(self, slots: torch.Tensor, staged: Mapping[str, torch.Tensor]) -> None:
        """Store what ``stage`` returned, now on the device, for ``slots`` (``[n]`` int64)."""
        if not slots.numel():
            return
        for name in ("temperature", "top_k", "top_p", "seeds"):
            getattr(self, name).index_copy_(0, slots, staged[name])

    def any_filters(self, slots: npt.NDArray[np.integer]) -> bool:
        """Whether any of ``slots`` uses top-k or top-p."""
        return bool(self._filters_np[slots].any())

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        output_positions: torch.Tensor,
        *,
        filtered: bool,
    ) -> torch.Tensor:
        """Draw one token a row.

        Args:
            logits: ``[rows, vocab]``.
            slots: ``[rows]`` int64, the slot of each row.
            output_positions: ``[rows]`` int64, 0 for a request's first generated token.
            filtered: whether any row uses top-k or top-p (known on the host).

        Returns:
            ``[rows]`` int64; -1 for a row without a selectable token (all -inf or NaN).
        """
        temperature = self.temperature[slots]
        if filtered:
            logits = filter_logits(logits, temperature, self.top_k[slots], self.top_p[slots])
        return self._ops.sample_tokens(logits, temperature, self.seeds[slots], output_positions)
