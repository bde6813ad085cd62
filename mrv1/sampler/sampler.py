"""From logits to tokens on the device, every row with its own parameters.

The result is that of vLLM's order: allowed tokens, bad words, min_tokens, logit_bias, penalties;
then, unless the request is greedy, temperature, min_p, top_k, top_p and the draw. Every batch
takes the same four launches, so one CUDA graph serves all batches: a program skips the edits and
filters that the row's request does not use, after one look at the parameters of its slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of

import numpy as np
import numpy.typing as npt
import torch

from mrv1.kernels.registry import Ops
from mrv1.kernels.sampling.contracts import (
    ALLOWED,
    BIAS,
    MAX_PARTS,
    MIN_TOKENS,
    PENALTIES,
    BadWords,
    History,
    LogitEdits,
)
from mrv1.kernels.sampling.filters import FILTERS, kept_tokens
from mrv1.kernels.sampling.shards import VocabShards
from mrv1.sampler.bad_words import TOKENIZATIONS
from mrv1.sampler.params import SamplingParams, num_likeliest

Fields = dict[str, npt.NDArray[np.generic]]

_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_NUMPY = {torch.float32: np.float32, torch.int32: np.int32, torch.int64: np.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerLimits:
    """The sizes of a slot's parameters."""

    vocab_size: int
    max_bad_words_num: int
    """Words as the user gives them; each may become ``TOKENIZATIONS`` sequences."""
    bad_words_max_len: int
    max_logit_bias: int

    @property
    def mask_words(self) -> int:
        """int32 words of a mask over the vocabulary."""
        return -(-self.vocab_size // 32)


class Sampler:
    """The sampling parameters of every slot, and the draw with them.

    The runner, its owner, writes a slot's parameters when a request takes the slot, so that a
    former request's have no effect. ``slots`` are the tensors of ``fields`` by name, ``[slots]``
    or ``[slots, width]``, made for ``limits``; ``ops`` are for their device. With ``shards``, the
    logits of ``edit`` and ``draw`` are those of this rank's tokens.
    """

    @staticmethod
    def fields(limits: SamplerLimits) -> dict[str, tuple[torch.dtype, int | None]]:
        """Return a slot's parameters on the device: dtype and width (None = one element)."""
        num_sequences = TOKENIZATIONS * limits.max_bad_words_num
        return {
            "temperature": (torch.float32, None),
            **{name: (each.dtype, None) for name, each in FILTERS.items()},
            "seed": (torch.int64, None),
            "child": (torch.int32, None),
            "num_logprobs": (torch.int32, None),
            "edits": (torch.int32, None),  # bits of mrv1.kernels.edit_logits
            **dict.fromkeys(_PENALTIES, (torch.float32, None)),
            "counted": (torch.int32, MAX_PARTS),
            "num_bias": (torch.int32, None),
            "bias_ids": (torch.int32, limits.max_logit_bias),
            "bias_values": (torch.float32, limits.max_logit_bias),
            "allowed_mask": (torch.int32, limits.mask_words),
            "bad_words": (torch.int32, num_sequences * limits.bad_words_max_len),
            "bad_word_lens": (torch.int32, num_sequences),
            "num_bad_words": (torch.int32, None),
            "bad_words_match_prompt": (torch.int32, None),
        }

    def __init__(
        self,
        max_num_reqs: int,
        limits: SamplerLimits,
        slots: Mapping[str, torch.Tensor],
        ops: Ops,
        shards: VocabShards | None = None,
    ) -> None:
        self._ops = ops
        self._first_token, self._of_ranks, num_tokens = None, {}, limits.vocab_size
        if shards is not None:
            self._first_token, self._of_ranks = shards.first_token, {"shards": shards}
            num_tokens = shards.num_tokens
        self.limits = limits
        self._dtypes = {name: _NUMPY[dtype] for name, (dtype, _) in self.fields(limits).items()}
        words = slots["bad_words"]
        counts = words.new_zeros(max_num_reqs, num_tokens)
        self._slots = {
            **slots,
            "bad_words": words.unflatten(1, (-1, limits.bad_words_max_len)),
            "counts": counts,
        }
        self._logit_edits = LogitEdits(**self._of(LogitEdits))
        self._bad_words = BadWords(**self._of(BadWords))

    @property
    def num_logprobs(self) -> torch.Tensor:
        """[slots] int32, how many of the likeliest tokens each request asks for."""
        counts: torch.Tensor = self._slots["num_logprobs"]
        return counts

    def _of(self, bundle: type[LogitEdits | BadWords]) -> dict[str, torch.Tensor]:
        """Return the tensors of a bundle, by its fields' names."""
        return {field.name: self._slots[field.name] for field in fields_of(bundle)}

    def enter(
        self,
        params: SamplingParams,
        seed: int,
        *,
        child: int = 0,
        banned_token_sequences: Sequence[Sequence[int]] = (),
    ) -> Fields:
        """Return the leading elements of a request's fields; later ones have no effect on it."""
        edits = self._edits(params)
        values = {
            "temperature": params.temperature,
            **{name: getattr(params, name) for name in FILTERS},
            "seed": seed,
            "child": child,
            "num_logprobs": num_likeliest(params.logprobs, self.limits.vocab_size),
            "edits": edits,
            "num_bad_words": len(banned_token_sequences),
        }
        if edits & PENALTIES:
            values |= {name: getattr(params, name) for name in _PENALTIES}
        if edits & BIAS:
            values["num_bias"] = len(params.logit_bias)
        if banned_token_sequences:
            values["bad_words_match_prompt"] = params.bad_words_match_prompt
        fields: Fields = {
            name: np.array([value], dtype=self._dtypes[name]) for name, value in values.items()
        }
        if edits & PENALTIES:
            fields["counted"] = np.full(MAX_PARTS, -1, dtype=np.int32)
        if edits & BIAS:
            fields["bias_ids"] = np.array([*params.logit_bias], dtype=np.int32)
            fields["bias_values"] = np.array([*params.logit_bias.values()], dtype=np.float32)
        if edits & ALLOWED:
            bits = np.zeros(32 * self.limits.mask_words, dtype=np.bool_)
            bits[list(params.allowed_token_ids or ())] = True
            fields["allowed_mask"] = np.packbits(bits, bitorder="little").view(np.int32)
        if banned_token_sequences:
            shape = (len(banned_token_sequences), self.limits.bad_words_max_len)
            words = fields["bad_words"] = np.full(shape, -1, dtype=np.int32)
            for row, sequence in zip(words, banned_token_sequences, strict=True):
                row[: len(sequence)] = sequence
            lens = list(map(len, banned_token_sequences))
            fields["bad_word_lens"] = np.array(lens, dtype=np.int32)
        return fields

    def _edits(self, params: SamplingParams) -> int:
        edits = 0
        if params.allowed_token_ids is not None:
            edits |= ALLOWED
        if params.min_tokens:
            edits |= MIN_TOKENS
        if params.logit_bias:
            edits |= BIAS
        if params.penalizes:
            edits |= PENALTIES
        return edits

    def edit(
        self,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        history: History,
        *,
        ahead: torch.Tensor | None = None,
        draft_token_ids: torch.Tensor | None = None,
    ) -> None:
        """Apply every edit that comes before the temperature.

        ``logits [rows, vocab]`` are *written*. ``idx_mapping [rows]`` int32 are slots, -1 =
        padding; ``ahead [rows]`` int64 drafts between the newest known token and the row, None =
        0; ``draft_token_ids [requests, max_drafts]`` int32.
        """
        ops, first = self._ops, self._first_token
        given, drafts = (logits, idx_mapping, history), draft_token_ids
        ops.apply_bad_words(
            *given, self._bad_words, ahead=ahead, draft_token_ids=drafts, first_token=first
        )
        ops.edit_logits(
            *given, self._logit_edits, ahead=ahead, draft_token_ids=drafts, first_token=first
        )

    def draw(
        self,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        history: History,
        *,
        ahead: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw one token a row from edited logits, ``[rows]`` int64; arguments as in ``edit``.

        -1: padding, or no token is above -inf; -2: NaN, or +inf in a row that is not greedy.
        """
        names = ("temperature", "seed", "child", *FILTERS)
        given, positions = {name: self._slots[name] for name in names}, history.num_tokens
        if ahead is None:
            given |= {"idx_mapping": idx_mapping, "prompt_len": history.prompt_len}
        else:
            rows = idx_mapping.clamp(min=0)
            given = {name: slots[rows] for name, slots in given.items()}
            positions = (positions - history.prompt_len)[rows] + ahead
        temperature, seeds = given.pop("temperature"), given.pop("seed")
        given |= self._of_ranks
        return self._ops.sample_tokens(logits, temperature, seeds, positions, **given)

    def filtered(self, logits: torch.Tensor, idx_mapping: torch.Tensor) -> torch.Tensor:
        """Return new logits: edited ones by temperature, -inf if filtered; greedy rows stay."""
        rows = idx_mapping.clamp(min=0)
        temperature = self._slots["temperature"][rows]
        is_drawn = (temperature > 0)[:, None]
        scaled = torch.where(is_drawn, logits / temperature[:, None], logits)
        filters = {name: self._slots[name][rows] for name in FILTERS}
        kept = kept_tokens(scaled.double(), **filters) | ~is_drawn
        return scaled.masked_fill(~kept, -torch.inf)
