"""Which rows of the feature buffer hold which items, against a device that remembers contents."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mrv1 import RequestError
from mrv1.engine.feature_pool import FeaturePool
from mrv1.engine.request import Request
from mrv1.multimodal import MultimodalItem
from tests.engine.scheduler_model import make_request, make_runner, make_scheduler

NUM_ROWS = 8


def request_with(name: str, sizes_and_contents: list[tuple[int, int]], gap: int = 1) -> Request:
    """Return a request whose items follow each other with ``gap`` tokens of text in between."""
    items, at = [], gap
    for size, content in sizes_and_contents:
        rows = torch.ones(size, 1)
        items.append(MultimodalItem(features=rows, start=at, cache_key=f"{size}-{content}"))
        at += size + gap
    request = make_request(name, tuple([1] * at), max_tokens=2)
    request.multimodal = tuple(items)
    return request


contents = st.tuples(st.integers(1, NUM_ROWS), st.integers(0, 1))


@given(
    each=st.lists(st.lists(contents, min_size=1, max_size=3), min_size=1, max_size=4),
    budget=st.integers(1, 16),
    num_blocks=st.sampled_from([9, 12, 40]),
    aborts=st.sets(st.integers(0, 12)),
    fails=st.sets(st.integers(0, 12)),
)
@example(  # the second 5 rows lie elsewhere, and a row of the first keeps what it had
    each=[[(1, 0), (5, 0), (4, 0)], [(5, 0)]], budget=1, num_blocks=9, aborts=set(), fails=set()
)
def test_every_chunk_finds_its_features_and_all_rows_come_back(
    each, budget, num_blocks, aborts, fails
):
    """Items of few contents in few rows and blocks; aborts, preemptions and failed launches."""
    scheduler = make_scheduler(
        num_blocks=num_blocks, max_num_batched_tokens=budget, num_feature_rows=NUM_ROWS,
        max_num_seqs=3, max_steps_in_flight=1, enable_prefix_caching=True,
    )  # fmt: skip
    runner = make_runner(scheduler)
    pool = scheduler.features
    requests = {}
    for index, sizes in enumerate(each):
        request = request_with(str(index), sizes)
        if request.max_total_tokens <= num_blocks * scheduler.block_size:
            scheduler.add(request)
            requests[request.req_id] = request
    rows: list[bytes | None] = [None] * NUM_ROWS
    staged_in: dict[bytes, list[int]] = {}
    computed: dict[str, int] = {}
    for step in range(400):
        plan = scheduler.schedule()
        if plan is None:
            break
        for request in plan.entering:
            computed[request.req_id] = request.num_computed_tokens
        has_failed = step in fails
        if not has_failed:
            for staged in plan.staged_features:
                content = staged.item.content_hash
                staged_in[content] = list(chain.from_iterable(staged.rows))
                for row in staged_in[content]:
                    rows[row] = content
        for req_id, count in zip(plan.req_ids, plan.num_scheduled_tokens.tolist(), strict=True):
            start = computed[req_id]
            computed[req_id] = start + count
            for item in requests[req_id].items_in(start, start + count):
                if not has_failed:  # other rows may hold what is left of an earlier copy
                    found = [rows[row] for row in staged_in[item.content_hash]]
                    assert found == [item.content_hash] * item.num_tokens
        runner.execute(plan, fails=has_failed)
        if has_failed:
            scheduler.fail_step(plan, RequestError("boom"))
        else:
            scheduler.update(runner.result())
        assert 0 <= pool.num_held <= NUM_ROWS
        if step in aborts and scheduler.unfinished:
            scheduler.abort(scheduler.unfinished[0].req_id)
    assert not scheduler.has_unfinished_requests, "every request ends"
    assert (pool.num_held, pool._items, pool._in_use) == (0, {}, {})
    assert pool.num_free + pool.num_cached == NUM_ROWS
    assert all(run.stop < after.start for run, after in pairwise(pool._free)), "runs are joined"


def test_the_least_recently_used_item_goes_first():
    pool = FeaturePool(NUM_ROWS)

    def use(size: int, content: int) -> int:
        """Hold and release an item; return how many items were staged for it."""
        request = request_with("r", [(size, content)])
        staged = pool.hold(request, 0, 99)
        assert pool.num_held == size
        pool.release(request, 99)
        return len(staged)

    assert [use(3, 0), use(3, 1), use(3, 0)] == [1, 1, 0]
    assert pool.num_cached == 6
    assert use(4, 0) == 1, "the item with content 1 gives up its rows"
    assert [use(3, 0), use(3, 1)] == [0, 1]


def test_an_item_waits_for_rows_and_later_requests_do_not_take_them():
    """The second request needs all rows; a third, which needs few, must not keep it waiting."""
    scheduler = make_scheduler(
        num_feature_rows=NUM_ROWS, max_num_batched_tokens=5, num_blocks=99, max_steps_in_flight=1
    )
    runner = make_runner(scheduler)
    for name, sizes in (("a", [(6, 0)]), ("b", [(8, 1)]), ("c", [(1, 2)] * 9)):
        scheduler.add(request_with(name, sizes))
    order = []
    while (plan := scheduler.schedule()) is not None:
        order += [staged.item.num_tokens for staged in plan.staged_features]
        runner.execute(plan)
        scheduler.update(runner.result())
    assert order[:2] == [6, 8]


def test_a_later_arrival_does_not_take_rows_that_an_earlier_item_waits_for():
    """While a has 5 rows for its last token, b waits for 8; c's 3 would keep b waiting longer."""
    scheduler = make_scheduler(
        num_feature_rows=NUM_ROWS, max_num_batched_tokens=5, num_blocks=99, max_steps_in_flight=1
    )
    runner = make_runner(scheduler)
    for name, sizes in (("a", [(5, 0)]), ("b", [(8, 1)]), ("c", [(3, 2)])):
        scheduler.add(request_with(name, sizes))
    order = []
    while (plan := scheduler.schedule()) is not None:
        order += [staged.item.num_tokens for staged in plan.staged_features]
        runner.execute(plan)
        scheduler.update(runner.result())
    assert order == [5, 8, 3]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ((), r"image at token 11\): features: expected at most 8 rows .*, got 9; raise mm_cache"),
        (
            ((1, 11),),
            r"tokens 1 to 11, which must be in one step\): features: expected at most 8 .* got 9",
        ),
    ],
)
def test_an_item_or_a_span_with_more_rows_than_the_buffer_is_refused(spans, message):
    sizes = [(4, 0), (4, 1), (9, 0)] if not spans else [(4, 0), (5, 1)]
    request = request_with("a", sizes)
    request.unsplittable = spans
    scheduler = make_scheduler(num_feature_rows=NUM_ROWS)
    with pytest.raises(RequestError, match=message):
        scheduler.add(request)
    assert not scheduler.has_unfinished_requests


def test_a_report_beside_a_step_counts_the_entries_of_one_moment():
    pool = FeaturePool(8)

    class Entry:
        @property
        def num_rows(self) -> int:
            pool._cached.popitem()  # as a step in another thread may
            return 2

    pool._cached.update({b"a": Entry(), b"b": Entry(), b"c": Entry()})
    assert pool.num_cached == 6
