"""Draws from the shards of several ranks: tokens and values are those of one rank, bit for bit.

The ranks are threads; the GPU's ranks are processes, in test_shards_on_gpus.py.
"""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels._base.triton import INTERPRET
from mrv1.kernels.sampling.shards import VocabShards
from tests.kernels.elementwise import normal, seeds
from tests.kernels.test_sample_tokens import _arguments, _row_filters
from tests.thread_ranks import on_ranks

pytestmark = [pytest.mark.interp]

CPU = torch.device("cpu")
VOCABS = (1, 127, 128, 129, 700, 1300, 5000)
"""Of one group, of fewer groups than ranks, and such that no number of ranks divides them."""


@pytest.fixture(autouse=True)
def _short_turns():
    """Let threads take turns often: those that wait would keep the others from running."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    yield
    sys.setswitchinterval(before)


def shards_of(parallel, logits: torch.Tensor, max_rows: int | None = None) -> VocabShards:
    """Return shards whose own one holds this rank's part of whole logits; padding is NaN."""
    num_rows, vocab_size = logits.shape
    shards = VocabShards.allocate(parallel.peers, vocab_size, max_rows or num_rows, CPU)
    shards.logits.own.fill_(torch.nan)
    write(shards, logits)
    return shards


def write(shards: VocabShards, logits: torch.Tensor) -> torch.Tensor:
    """Write this rank's part of whole logits and return it."""
    first = shards.first_token
    return shards.own(len(logits)).copy_(logits[:, first : first + shards.num_tokens])


@st.composite
def odd_logits(draw, rows: int, vocab: int) -> torch.Tensor:
    """Return logits some of which tie across shards, are masked by the shard, NaN or infinite."""
    logits = normal((rows, vocab), torch.float32, "cpu", draw(seeds)) * 3
    for row in logits:
        kind = draw(st.sampled_from(["", "", "ties", "masked", "few", "nan", "inf", "none"]))
        if kind == "ties":
            row.copy_(row.round())
        elif kind == "masked":  # a part of the vocabulary, perhaps a whole shard
            first = draw(st.integers(0, vocab))
            row[first : first + draw(st.integers(0, vocab))] = -torch.inf
        elif kind == "few":
            kept = row[::97].clone()
            row.fill_(-torch.inf)
            row[::97] = kept
        elif kind in ("nan", "inf"):
            row[draw(st.integers(0, vocab - 1))] = float(kind)
        elif kind == "none":
            row.fill_(-torch.inf)
    return logits


@settings(max_examples=max(settings.default.max_examples // 2, 4))
@given(data=st.data(), size=st.sampled_from([1, 2, 2, 3, 4, 8]), rows=st.integers(1, 4),
       vocab=st.sampled_from(VOCABS))  # fmt: skip
def test_every_rank_draws_the_tokens_of_one(data, size, rows, vocab):
    """Several calls of one size after another, whatever filters their rows have."""
    num_calls = data.draw(st.integers(1, 3))
    steps = []
    for call in range(num_calls):
        _, *arguments = _arguments(rows, vocab, torch.float32, "cpu", seed=call)
        filters = data.draw(_row_filters(rows)) if data.draw(st.booleans()) else {}
        steps.append((data.draw(odd_logits(rows, vocab)), arguments, filters))
    want = [kernels.sample_tokens(x, *rest, **filters) for x, rest, filters in steps]

    def draw_all(parallel) -> list[torch.Tensor]:
        shards, drawn = shards_of(parallel, steps[0][0], max_rows=4), []
        for index, (logits, arguments, filters) in enumerate(steps):
            if index:
                parallel.all_gather(torch.zeros(1, 1))  # as the layers' sums: peers have drawn
            own = write(shards, logits)
            drawn.append(kernels.sample_tokens(own, *arguments, **filters, shards=shards))
        assert shards.calls.tolist() == [num_calls, num_calls]
        return drawn

    for of_rank in run_ranks(size, draw_all):
        assert all(map(torch.equal, of_rank, want))


def run_ranks(size, function):
    """Return what each rank's thread returns; a single rank has memory of its own too."""
    if size > 1:
        return on_ranks(size, function)
    from tests.thread_ranks import Meeting

    return [function(Meeting(1).contexts[0])]
