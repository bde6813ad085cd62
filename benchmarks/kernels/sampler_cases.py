"""The cases of ``mrv1 bench sampler``, their data and the check of their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.measure.timing import WrongResultError
from mrv1.kernels.registry import Ops, select_ops
from mrv1.kernels.sampling.contracts import TopLogprobs
from mrv1.sampler import History, Sampler, SamplerLimits, SamplingParams

Stage = Literal["draw", "edit", "edit and draw", "bitmask", "logprobs", "raw logprobs"]
"""The launches of a case: a draw; edits alone; both, as in every step; a grammar's mask;
log-probabilities; log-probabilities of a copy of the logits, which a step makes before edits."""

TEMPERATURE = 0.8
PROMPT_TOKENS = OUTPUT_TOKENS = 500
"""Random ids in every row's history."""
BAD_WORD_LEN = 8
NUM_TOP = 20
"""Likeliest tokens that are reported."""
MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKENS = 16, 300, 8
"""Capacity of a slot, as by default in an engine; larger where a case needs more."""
CHECKED_ROWS = 16
MAX_DIFFERENT = 1
"""Tokens of the checked rows that may differ from the oracle's: a near tie is rare."""
MAX_LOGPROB_ERROR = 1e-5
"""Absolute, against float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The work on a step's logits, the same in all rows."""

    stage: Stage = "draw"
    params: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams; ``TEMPERATURE`` and the fields below are added."""
    num_bias: int = 0
    num_allowed: int = 0
    """Token ids that are allowed; 0 = all."""
    num_bad_words: int = 0
    """Words of ``BAD_WORD_LEN`` tokens; every second word lacks only its last token."""

    def sampling_params(self, vocab_size: int) -> SamplingParams:
        """Return the sampling parameters of every row.

        A bias is negative, as penalties are: the edits run again and again on the same logits, and
        tokens whose logits rise every time would soon be the only tokens left to draw.
        """
        params: dict[str, Any] = {"temperature": TEMPERATURE, **self.params}
        if self.num_bias:
            params["logit_bias"] = dict.fromkeys(_spread(self.num_bias, vocab_size), -1.0)
        if self.num_allowed:
            params["allowed_token_ids"] = [*_spread(self.num_allowed, vocab_size)]
        return SamplingParams(**params)

    def bytes_moved(self, num_rows: int, vocab_size: int) -> int:
        """Return the least bytes that are read and written; every id and value has 4 bytes.

        A draw and log-probabilities: the logits once. A copy: three times, read, written and read.
        Penalties: a count per token id, and the logits of the seen tokens, read and written. A
        bias: ids, values, and its logits, read and written. A mask: its bits, and the banned
        logits. Bad words: tokens and lengths, the end of the history, and the banned logits.
        """
        penalizes = self.sampling_params(vocab_size).penalizes
        read = {"draw": 1, "edit and draw": 1, "logprobs": 1, "raw logprobs": 3}
        elements = read.get(self.stage, 0) * vocab_size
        if penalizes:
            elements += vocab_size + 2 * min(PROMPT_TOKENS + OUTPUT_TOKENS, vocab_size)
        elements += 4 * len(_spread(self.num_bias, vocab_size))
        if self.num_allowed:
            elements += -(-vocab_size // 32) + vocab_size
            elements -= len(_spread(self.num_allowed, vocab_size))
        if self.num_bad_words:
            elements += self.num_bad_words * (BAD_WORD_LEN + 1) + BAD_WORD_LEN - 1
            elements += self.num_bad_words // 2
        return num_rows * elements * 4


PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.2}
CASES: Mapping[str, Case] = {
    "greedy": Case(params={"temperature": 0.0}),
    "temperature": Case(),
    "top-k 50": Case(params={"top_k": 50}),
    "top-p 0.9": Case(params={"top_p": 0.9}),
    "top-k 50 + top-p 0.9": Case(params={"top_k": 50, "top_p": 0.9}),
    "min-p 0.1": Case(params={"min_p": 0.1}),
    "top-k 1000 + top-p 0.9": Case(params={"top_k": 1000, "top_p": 0.9}),
    "everything": Case(
        stage="edit and draw",
        params={**PENALTIES, "min_p": 0.05, "top_k": 50, "top_p": 0.9},
        num_bias=300,
        num_bad_words=128,
    ),
    "unused": Case(stage="edit and draw"),
    "penalties": Case(stage="edit", params=PENALTIES),
    "bias 300": Case(stage="edit", num_bias=300),
    "allowed ids 1000": Case(stage="edit", num_allowed=1000),
    "bad words 128 x 8": Case(stage="edit", num_bad_words=128),
    "bitmask 1000": Case(stage="bitmask", num_allowed=1000),
    "logprobs 20": Case(stage="logprobs"),
    "raw logprobs 20": Case(stage="raw logprobs"),
}
"""Name -> case."""

TARGET_VOCAB_SIZE = 151_936
TARGET_READS: Mapping[tuple[str, int], float] = {
    ("temperature", 256): 1.5,
    ("top-k 50 + top-p 0.9", 256): 3.0,
    ("everything", 256): 5.0,
    ("logprobs 20", 256): 2.5,
}
"""(Name of a case, rows) -> its target time, in reads of the logits."""
TARGET_US: Mapping[tuple[str, int], float] = {
    ("top-k 50 + top-p 0.9", 1): 20.0,
    ("top-k 50 + top-p 0.9", 32): 35.0,
    ("bad words 128 x 8", 256): 10.0,
}
"""(Name of a case, rows) -> its target time, in microseconds on an H200."""


def target_us(name: str, num_rows: int, vocab_size: int, read_us: float | None) -> float | None:
    """Return a case's target time in microseconds; None = no target for these sizes or here.

    Args:
        name: of the case.
        num_rows: of the launch.
        vocab_size: of the logits.
        read_us: time of one read of the logits at copy bandwidth; None = not known, on a CPU.
    """
    key = (name, num_rows)
    if vocab_size != TARGET_VOCAB_SIZE or read_us is None:
        return None
    return TARGET_READS[key] * read_us if key in TARGET_READS else TARGET_US.get(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One buffer set of a case: logits, and the state of each row's request on the device."""

    case: Case
    logits: torch.Tensor
    """[rows, vocab] float32, edited in place."""
    idx_mapping: torch.Tensor
    """[rows] int32: row i has slot i."""
    history: History
    slots: Mapping[str, torch.Tensor]
    """Field of the sampler -> its values of all slots."""
    limits: SamplerLimits
    ops: Ops
    sampler: Sampler
    drawn: torch.Tensor
    """[rows, 1] int64: tokens whose log-probabilities are asked for."""

    def run(self) -> object:
        """Launch the case with the runner's own calls, and return their result."""
        step = (self.logits, self.idx_mapping, self.history)
        if self.case.stage == "bitmask":
            self.ops.apply_token_bitmask(self.logits, self.slots["allowed_mask"])
            return None
        if self.case.stage == "logprobs":
            return self.ops.top_logprobs(self.logits, self.drawn, NUM_TOP)
        if self.case.stage == "raw logprobs":
            raw = self.logits.index_select(0, self.idx_mapping)
            return self.ops.top_logprobs(raw, self.drawn, NUM_TOP)
        if self.case.stage != "draw":
            self.sampler.edit(*step)
        return None if self.case.stage == "edit" else self.sampler.draw(*step)

    def draw(self) -> object:
        """Launch the draw alone."""
        return self.sampler.draw(self.logits, self.idx_mapping, self.history)

    def check(self) -> None:
        """Compare a run on a copy of the logits with the oracle, in some rows.

        Raises:
            WrongResultError: logits, tokens or log-probabilities differ from the oracle's.
        """
        ours = replace(self, logits=self.logits.clone())
        some = slice(0, CHECKED_ROWS)
        oracles = select_ops("reference")
        logits = self.logits[some].clone()
        oracle = replace(
            self,
            logits=logits.double() if "logprobs" in self.case.stage else logits,
            idx_mapping=self.idx_mapping[some],
            slots={**self.slots, "allowed_mask": self.slots["allowed_mask"][some]},
            ops=oracles,
            sampler=Sampler(
                len(self.logits), self.limits, self.slots, _launched(self.case, oracles)
            ),
            drawn=self.drawn[some],
        )
        got, want = ours.run(), oracle.run()
        if isinstance(got, TopLogprobs) and isinstance(want, TopLogprobs):
            _check_logprobs(TopLogprobs(*(values[some] for values in got)), want)
            return
        different = int((ours.logits[some] != oracle.logits).sum())
        if different:
            raise WrongResultError(f"expected the oracle's logits, got {different} others")
        if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
            different = int((got[some] != want).sum())
            if different > MAX_DIFFERENT:
                raise WrongResultError(
                    f"expected the oracle's tokens, got {different} others of {len(want)}"
                )


def works(case: Case, buffers: Sequence[torch.Tensor], ops: Ops, seed: int) -> list[Work]:
    """Return a case's buffer sets: one per tensor of logits ``[rows, vocab]``, the rest alike."""
    num_rows, vocab_size = buffers[0].shape
    device = buffers[0].device
    limits = SamplerLimits(
        vocab_size=vocab_size,
        max_bad_words_num=max(case.num_bad_words, MAX_BAD_WORDS),
        bad_words_max_len=BAD_WORD_LEN,
        max_logit_bias=max(case.num_bias, MAX_LOGIT_BIAS),
    )
    generator = np.random.default_rng(seed)
    num_tokens = PROMPT_TOKENS + OUTPUT_TOKENS
    token_ids = generator.integers(vocab_size, size=(num_rows, num_tokens), dtype=np.int32)
    slots = _slots(case, limits, token_ids, generator)

    def work(logits: torch.Tensor) -> Work:
        idx_mapping = torch.arange(num_rows, dtype=torch.int32, device=device)
        history = History(
            token_ids=torch.tensor(token_ids, device=device),
            num_tokens=torch.full_like(idx_mapping, num_tokens),
            prompt_len=torch.full_like(idx_mapping, PROMPT_TOKENS),
            min_total_tokens=torch.zeros_like(idx_mapping),
            late_token_ids=idx_mapping.new_full((num_rows, MAX_STOP_TOKENS), -1),
        )
        on_device = {name: values.to(device, copy=True) for name, values in slots.items()}
        sampler = Sampler(num_rows, limits, on_device, _launched(case, ops))
        return Work(
            case=case,
            logits=logits,
            idx_mapping=idx_mapping,
            history=history,
            slots=on_device,
            limits=limits,
            ops=ops,
            sampler=sampler,
            drawn=sampler.draw(logits, idx_mapping, history)[:, None],
        )

    return [work(logits) for logits in buffers]


def _slots(
    case: Case,
    limits: SamplerLimits,
    token_ids: npt.NDArray[np.int32],
    generator: np.random.Generator,
) -> dict[str, torch.Tensor]:
    """Return the sampler's fields, on the CPU, once a request has entered every slot."""
    num_rows = len(token_ids)
    slots = {
        name: torch.zeros(num_rows if width is None else (num_rows, width), dtype=dtype)
        for name, (dtype, width) in Sampler.fields(limits).items()
    }
    sampler = Sampler(num_rows, limits, slots, select_ops("reference"))
    params = case.sampling_params(limits.vocab_size)
    for row, end in enumerate(token_ids[:, 1 - BAD_WORD_LEN :].tolist()):
        words = _bad_words(case.num_bad_words, end, limits.vocab_size, generator)
        fields = sampler.enter(params, row * 7919, banned_token_sequences=words)
        for name, values in fields.items():
            slots[name].view(num_rows, -1)[row, : values.size] = torch.from_numpy(values.ravel())
    return slots


def _check_logprobs(got: TopLogprobs, want: TopLogprobs) -> None:
    for name in ("ranks", "top_token_ids"):
        if not torch.equal(getattr(got, name), getattr(want, name)):
            raise WrongResultError(f"expected the oracle's {name}, got others")
    for name in ("logprobs", "top_logprobs"):
        error = float((getattr(got, name) - getattr(want, name)).abs().max())
        if not error <= MAX_LOGPROB_ERROR:
            raise WrongResultError(
                f"expected the oracle's {name} within {MAX_LOGPROB_ERROR}, got {error:.3g} more"
            )


def _launched(case: Case, ops: Ops) -> Ops:
    """Return ops; in a case of one edit alone, the other edit does nothing."""
    if case.stage != "edit":
        return ops
    parts = {"edit_logits": ops.edit_logits, "apply_bad_words": ops.apply_bad_words}
    parts["edit_logits" if case.num_bad_words else "apply_bad_words"] = _nothing
    return cast(Ops, SimpleNamespace(**parts, sample_tokens=ops.sample_tokens))


def _nothing(*_: object, **__: object) -> None:
    pass


def _spread(count: int, vocab_size: int) -> Sequence[int]:
    """Return ``count`` different ids, or all, evenly over the vocabulary."""
    return range(0, vocab_size, max(vocab_size // max(count, 1), 1))[:count]


def _bad_words(
    count: int, end: list[int], vocab_size: int, generator: np.random.Generator
) -> list[list[int]]:
    """Return words whose last tokens differ; the prefix of every second one is ``end``."""
    last = generator.choice(vocab_size, size=count, replace=False).tolist()
    others = generator.integers(vocab_size, size=(count, len(end))).tolist()
    return [[*(others[i] if i % 2 else end), token] for i, token in enumerate(last)]
