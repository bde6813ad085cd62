"""From logits to tokens on the device, every row with its own parameters."""

from __future__ import annotations

from collections.abc import Mapping

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

    Owned by the runner, which keeps the parameters on its device and writes a slot's when a
    request takes it, so that nothing of a former request can show.

    Args:
        max_num_reqs: slots.
        slots: the fields of ``FIELDS`` by name, ``[max_num_reqs]`` each.
        ops: for the device the fields are on.
    """

    FIELDS: Mapping[str, torch.dtype] = {
        "temperature": torch.float32,
        "top_k": torch.int32,
        "top_p": torch.float32,
        "seed": torch.int64,
    }
    """What a slot holds on the device."""

    def __init__(self, max_num_reqs: int, slots: Mapping[str, torch.Tensor], ops: Ops) -> None:
        self._ops = ops
        self._filters_np = np.zeros(max_num_reqs, dtype=np.bool_)
        self._num_filtering = 0
        """Slots whose last request uses top-k or top-p."""
        self.temperature, self.top_k = slots["temperature"], slots["top_k"]
        self.top_p, self.seed = slots["top_p"], slots["seed"]

    def enter(
        self, slot: int, params: SamplingParams, seed: int
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Note on the host what the request that takes ``slot`` asks for; return its fields."""
        self._filters_np[slot] = params.filters
        self._num_filtering = int(np.count_nonzero(self._filters_np))
        return {
            "temperature": np.array([params.temperature], dtype=np.float32),
            "top_k": np.array([params.top_k], dtype=np.int32),
            "top_p": np.array([params.top_p], dtype=np.float32),
            "seed": np.array([seed], dtype=np.int64),
        }

    def any_filters(self, slots: npt.NDArray[np.integer]) -> bool:
        """Whether any of ``slots`` uses top-k or top-p."""
        return self._num_filtering > 0 and bool(self._filters_np[slots].any())

    def sample(
        self,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        num_tokens: torch.Tensor,
        prompt_len: torch.Tensor,
        *,
        filtered: bool,
        ahead: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw one token a row.

        Args:
            logits: ``[rows, vocab]``.
            idx_mapping: ``[rows]`` int32, the slot of each row; -1 = padding.
            num_tokens: ``[max_num_reqs]`` int32, prompt and output so far of each slot.
            prompt_len: ``[max_num_reqs]`` int32.
            filtered: whether any row uses top-k or top-p (known on the host).
            ahead: ``[rows]`` int64, how far behind the request's newest token a row's draw is;
                None = it is the next.

        Returns:
            ``[rows]`` int64; -1 for padding and for a row without a selectable token (all -inf or
            NaN).
        """
        if filtered:
            slots = idx_mapping.clamp(min=0)
            logits = filter_logits(
                logits, self.temperature[slots], self.top_k[slots], self.top_p[slots]
            )
        if ahead is not None:
            slots = idx_mapping.clamp(min=0)
            positions = (num_tokens - prompt_len)[slots] + ahead
            return self._ops.sample_tokens(
                logits, self.temperature[slots], self.seed[slots], positions
            )
        return self._ops.sample_tokens(
            logits,
            self.temperature,
            self.seed,
            num_tokens,
            idx_mapping=idx_mapping,
            prompt_len=prompt_len,
        )
