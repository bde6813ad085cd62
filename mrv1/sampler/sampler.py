"""From logits to tokens on the device, every row with its own parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from mrv1.kernels.ops import Ops
from mrv1.sampler.bad_words import TOKENIZATIONS
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

    @staticmethod
    def fields(
        max_bad_words_num: int, bad_words_max_len: int
    ) -> dict[str, tuple[torch.dtype, int | None]]:
        """Return what a slot holds on the device: dtype and width (None = one element)."""
        num_sequences = TOKENIZATIONS * max_bad_words_num
        return {
            "temperature": (torch.float32, None),
            "top_k": (torch.int32, None),
            "top_p": (torch.float32, None),
            "seed": (torch.int64, None),
            "bad_words": (torch.int32, num_sequences * bad_words_max_len),
            "bad_word_lens": (torch.int32, num_sequences),
            "num_bad_words": (torch.int32, None),
            "bad_words_match_prompt": (torch.int32, None),
        }

    def __init__(self, max_num_reqs: int, slots: Mapping[str, torch.Tensor], ops: Ops) -> None:
        self._ops = ops
        self._filters_np = np.zeros(max_num_reqs, dtype=np.bool_)
        self._num_filtering = 0
        """Slots whose last request uses top-k or top-p."""
        self.temperature, self.top_k = slots["temperature"], slots["top_k"]
        self.top_p, self.seed = slots["top_p"], slots["seed"]
        self._bans_np = np.zeros(max_num_reqs, dtype=np.bool_)
        self._num_banning = 0
        """Slots whose last request bans words."""
        self.bad_word_lens, self.num_bad_words = slots["bad_word_lens"], slots["num_bad_words"]
        self.bad_words = slots["bad_words"].unflatten(1, (self.bad_word_lens.shape[1], -1))
        self.bad_words_match_prompt = slots["bad_words_match_prompt"]

    def enter(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        banned_token_sequences: Sequence[Sequence[int]] = (),
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Note on the host what the request that takes ``slot`` asks for.

        Returns:
            The leading elements of its fields; what lies behind them does not count.
        """
        self._filters_np[slot] = params.filters
        self._bans_np[slot] = len(banned_token_sequences) > 0
        self._num_banning = int(np.count_nonzero(self._bans_np))
        self._num_filtering = int(np.count_nonzero(self._filters_np))
        return {
            "temperature": np.array([params.temperature], dtype=np.float32),
            "top_k": np.array([params.top_k], dtype=np.int32),
            "top_p": np.array([params.top_p], dtype=np.float32),
            "seed": np.array([seed], dtype=np.int64),
            "num_bad_words": np.array([len(banned_token_sequences)], dtype=np.int32),
            **self._bad_words_of(params, banned_token_sequences),
        }

    def _bad_words_of(
        self, params: SamplingParams, sequences: Sequence[Sequence[int]]
    ) -> dict[str, npt.NDArray[np.generic]]:
        if not sequences:
            return {}
        words = np.full((len(sequences), self.bad_words.shape[2]), -1, dtype=np.int32)
        for row, sequence in zip(words, sequences, strict=True):
            row[: len(sequence)] = sequence
        return {
            "bad_words": words,
            "bad_word_lens": np.array(list(map(len, sequences)), dtype=np.int32),
            "bad_words_match_prompt": np.array([params.bad_words_match_prompt], dtype=np.int32),
        }

    def any_filters(self, slots: npt.NDArray[np.integer]) -> bool:
        """Whether any of ``slots`` uses top-k or top-p."""
        return self._num_filtering > 0 and bool(self._filters_np[slots].any())

    def any_bad_words(self, slots: npt.NDArray[np.integer]) -> bool:
        """Whether any of ``slots`` bans words."""
        return self._num_banning > 0 and bool(self._bans_np[slots].any())

    def mask_bad_words(
        self,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        token_ids: torch.Tensor,
        num_tokens: torch.Tensor,
        prompt_len: torch.Tensor,
        *,
        ahead: torch.Tensor | None = None,
        draft_token_ids: torch.Tensor | None = None,
    ) -> None:
        """Set the logits of what would complete a bad word to -inf.

        Args:
            logits: ``[rows, vocab]``, *written*.
            idx_mapping: ``[rows]`` int32, the slot of each row; -1 = padding.
            token_ids: ``[max_num_reqs, max_model_len]`` int32, history of each slot.
            num_tokens: ``[max_num_reqs]`` int32, prompt and output so far of each slot.
            prompt_len: ``[max_num_reqs]`` int32.
            ahead: ``[rows]`` int64, how far behind the request's newest token a row's draw is.
            draft_token_ids: ``[requests, most drafts]`` int32, what lies between.
        """
        self._ops.apply_bad_words(
            logits,
            idx_mapping,
            token_ids,
            num_tokens,
            prompt_len,
            self.bad_words,
            self.bad_word_lens,
            self.num_bad_words,
            match_prompt=self.bad_words_match_prompt,
            ahead=ahead,
            draft_token_ids=draft_token_ids,
        )

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
