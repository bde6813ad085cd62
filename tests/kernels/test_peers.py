"""Memory that ranks share, with threads as ranks."""

from __future__ import annotations

import pytest
import torch

from mrv1.errors import ConfigError
from mrv1.models import ParallelContext
from tests.thread_ranks import Meeting, on_ranks


def test_every_rank_writes_and_reads_the_parts_of_all():
    def visit(parallel: ParallelContext) -> tuple[torch.Tensor, int]:
        buffer = parallel.peers.allocate((4, 2), torch.int32)
        assert (buffer.rank, buffer.size) == (parallel.rank, 4)
        for part in buffer.parts:
            part[parallel.rank] = parallel.rank + 1
        assert buffer.own is buffer.parts[parallel.rank]
        parallel.all_gather(torch.zeros(1, 1))  # all have written
        return buffer.own.clone(), parallel.peers.abort.item()

    want = torch.arange(1, 5, dtype=torch.int32)[:, None].expand(4, 2)
    for own, abort in on_ranks(4, visit):
        assert torch.equal(own, want)
        assert abort == 0


def test_a_rank_that_fails_is_seen_by_those_that_wait():
    meeting = Meeting(2)
    meeting.abort()
    assert [context.peers.abort.item() for context in meeting.contexts] == [1, 1]


def test_memory_of_another_rank_is_refused():
    first, second = Meeting(2).contexts
    with pytest.raises(ConfigError, match=r"peers: expected memory of rank 0 of 2, got rank 1 of"):
        ParallelContext(
            rank=0,
            size=2,
            all_reduce=first.all_reduce,
            all_gather=first.all_gather,
            peers=second.peers,
        )
