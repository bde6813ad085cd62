"""The plan of a step, from scheduler to runner, and the result it gets back. Plain host data."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mrv1.errors import RequestError
from mrv1.multimodal import MultimodalItem
from mrv1.sampler import SamplingParams

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

RequestId = str | tuple[str, int]
"""The caller's name for a request; the second and later outputs of a prompt add an index."""


class RowFailure(enum.StrEnum):
    """Why the sampler had no token for a row."""

    MASKED = "every token is masked"
    NAN = "its logits hold NaN or +inf"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRequest:
    """A request that takes a slot in this step: new, or resumed after preemption."""

    req_id: RequestId
    slot: int
    """Row of all per-request state, from now until the request finishes or is preempted."""
    epoch: int
    """How many requests the slot has had before: marks late results of a former request."""
    token_ids: Int32Array
    """[n] the prompt, then the tokens generated before a preemption."""
    prompt_len: int
    """Leading tokens of ``token_ids`` that are the prompt."""
    sampling_params: SamplingParams
    seed: int
    """64-bit key of the request's noise."""
    child: int = 0
    """Index among the outputs of one prompt: part of the noise, so that equal seeds differ."""
    banned_token_sequences: tuple[tuple[int, ...], ...] = ()
    """Sequences that the output must not contain; the configuration limits number and length."""
    num_computed_tokens: int = 0
    """Leading tokens whose K and V are in its first blocks already (a prefix-cache hit)."""
    max_total_tokens: int
    """Length, prompt and output, at which the request ends; at most ``max_model_len``."""
    stop_token_ids: tuple[int, ...] = ()
    """Up to 16 tokens that end the request on the device, before the host knows; the engine
    looks for these and all other stop tokens itself."""
    stop_token_sequences: Sequence[Sequence[int]] = ()
    """Token sequences that end an output; the configuration limits their number and length."""
    min_total_tokens: int = 0
    """Length, prompt and output, before which no late token is drawn and no sequence ends it."""
    late_token_ids: tuple[int, ...] | None = None
    """Up to 16 tokens not drawn before ``min_total_tokens``; None = ``stop_token_ids``."""
    adapter_slot: int = -1
    """Slot of its LoRA adapter, which ``ModelRunner.load_adapter`` has filled; -1 = none."""
    multimodal: tuple[MultimodalItem, ...] = ()
    """Items whose features replace the embeddings of prompt tokens, ascending by their start."""
    attn_mask_offsets: Int32Array | None = None
    """[prompt_len, 2] the range ``[lo, hi)`` of keys that each prompt token sees; a chunk that
    contains a token reaches to its ``hi`` at least. None = each token sees all keys up to its own,
    as generated tokens always do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFeatures:
    """An item whose features are copied to the runner's device before a step."""

    item: MultimodalItem
    rows: tuple[range, ...]
    """Runs of rows of the runner's feature buffer, which has ``num_feature_rows``: as many rows in
    all as the item has, in the order of its features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, as decided by a scheduler. Rows are the scheduled requests, in this order."""

    step_id: int
    """Number of the step; counts launched steps."""
    continues: int | None = None
    """``step_id`` of the step launched just before, if every row of that step samples a token and
    this plan computes these tokens, row by row in the same order, and no request enters, leaves or
    has drafts. Such a steady step launches faster. None = no claim, which is always correct."""
    new: tuple[SlotRequest, ...] = ()
    """Requests that enter."""
    resumed: tuple[SlotRequest, ...] = ()
    """Preempted requests that enter again, to be computed from ``num_computed_tokens`` on."""
    preempted: tuple[int, ...] = ()
    """Slots given up by preemption before this step."""
    finished: tuple[int, ...] = ()
    """Slots of requests that ended (finish, abort, error) before this step."""
    req_ids: tuple[RequestId, ...]
    """Request of each row."""
    slots: Int32Array
    """[rows] slot of each row."""
    epochs: Int32Array
    """[rows] epoch of each row's slot."""
    num_scheduled_tokens: Int32Array
    """[rows] tokens to compute, >= 1."""
    new_block_ids: Mapping[int, tuple[tuple[int, ...], ...]]
    """Slot -> per head group, block ids to append to its table, in order; only slots with any. A
    row needs a block for each token that it computes."""
    adapter_slots: Mapping[int, int] = field(default_factory=dict)
    """Slot -> the adapter slot that its request, which has entered before, uses from now on."""
    draft_token_ids: tuple[tuple[int, ...], ...] = ()
    """Per row: up to 7 tokens to verify, the last of ``num_scheduled_tokens``; () = no drafts."""
    num_device_drafts: int = 0
    """Drafts of each row that are on the device, where a draft head has made them: the last of
    ``num_scheduled_tokens``, fewer in a row that ends before. Other drafts there are none then."""
    staged_features: tuple[StagedFeatures, ...] = ()
    """Items staged before this step: each of which a row computes a token, unless staged since its
    rows last went to another item. Those of a step whose launch fails must be staged again."""

    @property
    def entering(self) -> tuple[SlotRequest, ...]:
        """Every request that takes a slot in this step."""
        return self.new + self.resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at consecutive positions of one request."""

    token_ids: npt.NDArray[np.integer]
    """[positions, ids] the token there, the likeliest ones, best first, those asked for by id."""
    logprobs: npt.NDArray[np.floating]
    """[positions, ids] natural logarithms."""
    ranks: npt.NDArray[np.integer]
    """[positions, ids] 1 + the number of tokens whose logit is greater."""

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self.token_ids)

    def after(self, num_positions: int) -> TokenLogprobs:
        """Return the log-probabilities after the first ``num_positions`` positions."""
        return self._part(slice(num_positions, None))

    def one_by_one(self, num_positions: int) -> list[TokenLogprobs]:
        """Return each of the first ``num_positions`` positions by itself."""
        if num_positions == len(self) == 1:
            return [self]
        return [self._part(slice(at, at + 1)) for at in range(num_positions)]

    def _part(self, positions: slice) -> TokenLogprobs:
        return TokenLogprobs(
            token_ids=self.token_ids[positions],
            logprobs=self.logprobs[positions],
            ranks=self.ranks[positions],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The result of one step, row by row as in its plan."""

    step_id: int
    req_ids: tuple[RequestId, ...]
    slots: Int32Array
    """[rows] as at launch."""
    epochs: Int32Array
    """[rows] as at launch: a row whose slot has another epoch by now is stale and is dropped."""
    token_ids: tuple[tuple[int, ...], ...]
    """Per row: the sampled tokens; empty for an unfinished prefill, and for a failed row but for
    the drafts that were accepted before the failure."""
    errors: dict[int, str | RequestError] = field(default_factory=dict)
    """Row -> why it failed: a ``RowFailure`` of the sampler, or the error of a request that a
    custom processor refused; the other rows are not affected."""
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """Row -> log-probabilities of its ``token_ids``, if its request asks for them."""
    prompt_logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """Row -> log-probabilities of the prompt tokens after the computed ones, if asked for."""
