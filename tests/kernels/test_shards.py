"""Draws from the shards of several ranks: tokens and values are those of one rank, bit for bit.

The ranks are threads; the GPU's ranks are processes, in test_shards_on_gpus.py.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.sampling.contracts import TopLogprobs
from mrv1.kernels.sampling.shards import MAX_ASKED, VocabShards
from tests.kernels.elementwise import normal, seeds
from tests.kernels.test_sample_tokens import _arguments, _row_filters
from tests.thread_ranks import Meeting, on_ranks

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


def run_ranks(size, function):
    """Return what each rank's thread returns; a single rank has memory of its own too."""
    if size > 1:
        return on_ranks(size, function)
    return [function(Meeting(1).contexts[0])]


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


@settings(max_examples=max(settings.default.max_examples // 2, 4))
@given(data=st.data(), size=st.sampled_from([1, 2, 3, 4, 8]), rows=st.integers(1, 4),
       vocab=st.sampled_from(VOCABS))  # fmt: skip
def test_logprobs_equal_those_of_one_rank(data, size, rows, vocab):
    logits = data.draw(odd_logits(rows, vocab))
    num_asked = data.draw(st.integers(0, MAX_ASKED))
    ids = st.integers(-1, vocab)
    asked = data.draw(st.lists(ids, min_size=rows * num_asked, max_size=rows * num_asked))
    asked = torch.tensor(asked, dtype=torch.int64).view(rows, num_asked)
    num_top = data.draw(st.integers(0, min(vocab, 40)))
    options = {
        "idx_mapping": torch.tensor(data.draw(st.permutations([*range(rows - 1), -1])))
        .to(torch.int32)
        .contiguous(),
        "temperature": torch.tensor([0.0, 0.7, 1.0, 2.0])[:rows],
        "row_num_top": torch.tensor([3, 0, 40, 1], dtype=torch.int32)[:rows],
    }
    if data.draw(st.booleans()):
        options = {}
    num_calls = data.draw(st.integers(1, 2))
    want = kernels.top_logprobs(logits, asked, num_top, **options)
    exact = reference.top_logprobs(logits, asked, num_top, **options)

    def score(parallel) -> list[TopLogprobs]:
        shards, found = shards_of(parallel, logits), []
        for _ in range(num_calls):
            parallel.all_gather(torch.zeros(1, 1))  # the ranks meet
            own = shards.own(rows)
            found.append(kernels.top_logprobs(own, asked, num_top, **options, shards=shards))
        of_tokens = shards.of_tokens(want.top_token_ids.clamp(min=0))
        is_nan = logits.isnan()
        expected = logits.gather(1, want.top_token_ids.clamp(min=0))
        assert torch.equal(of_tokens.nan_to_num(), expected.nan_to_num())
        assert torch.equal(shards.whole(slice(rows)).isnan(), is_nan)
        oracle = reference.top_logprobs(own, asked, num_top, **options, shards=shards)
        assert torch.equal(oracle.ranks, exact.ranks)
        return found

    for of_rank in run_ranks(size, score):
        for found in of_rank:
            for got, expected in zip(found, want, strict=True):
                # the bits of a NaN do not count
                assert torch.equal(got.isnan(), expected.isnan())
                assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_the_oracle_reads_all_shards():
    logits, *arguments = _arguments(4, 700, torch.float32, "cpu")
    want = reference.sample_tokens(logits, *arguments)

    def draw(parallel) -> torch.Tensor:
        shards = shards_of(parallel, logits)
        parallel.all_gather(torch.zeros(1, 1))
        return reference.sample_tokens(shards.own(4), *arguments, shards=shards)

    for tokens in on_ranks(3, draw):
        assert torch.equal(tokens, want)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda s: torch.zeros(5, 256),
            ValueError,
            r"logits: expected at most 4 rows of shards, ",
        ),
        (
            lambda s: torch.zeros(2, 256),
            ValueError,
            r"logits: expected shards\.own\(rows\), got a",
        ),
        (
            lambda s: s.own(2)[:, 1:],
            ValueError,
            r"logits: expected shape \[2, 256\], got \[2, 255",
        ),
        (
            lambda s: s.own(2).half(),
            TypeError,
            r"logits: expected dtype torch\.float32, got torch",
        ),
    ],
)
def test_other_logits_than_the_own_shard_are_refused(change, error, message):
    shards = VocabShards.allocate(Meeting(1).contexts[0].peers, 256, 4, CPU)
    logits = change(shards)
    _, *arguments = _arguments(len(logits), 256, torch.float32, "cpu")
    for ops in (kernels, reference):
        with pytest.raises(error, match=message):
            ops.sample_tokens(logits, *arguments, shards=shards)
        with pytest.raises(error, match=message):
            ops.top_logprobs(logits, torch.zeros(len(logits), 1).long(), 0, shards=shards)


def test_more_tokens_than_shards_take_are_refused():
    shards = VocabShards.allocate(Meeting(1).contexts[0].peers, 256, 4, CPU)
    for ops in (kernels, reference):
        with pytest.raises(
            ValueError, match=r"token_ids: expected at most 4 tokens of each row o"
        ):
            ops.top_logprobs(shards.own(2), torch.zeros(2, 5).long(), 0, shards=shards)


def test_a_call_gives_up_when_a_rank_has_failed():
    logits, *arguments = _arguments(2, 300, torch.float32, "cpu")
    meeting = Meeting(2)

    def run(rank: int) -> torch.Tensor | None:
        shards = shards_of(meeting.contexts[rank], logits)
        if rank == 1:
            meeting.aborted.fill_(1)
            return None
        return kernels.sample_tokens(shards.own(2), *arguments, shards=shards)

    with ThreadPoolExecutor(2) as pool:
        tokens, _ = pool.map(run, range(2))
    assert tokens.tolist() == [-2, -2]
