"""The prefix cache: digests of blocks, blocks that are shared and blocks that never are."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import StepError
from mrv1.engine import prefix_cache
from mrv1.engine.block_pool import BlockPool
from mrv1.engine.head_pools import HeadPools
from mrv1.engine.prefix_cache import RecentChains, extend_chain
from mrv1.engine.scheduler import Scheduler
from mrv1.headwise import FULL, Visible
from tests.engine.scheduler_model import (
    DeviceError,
    drain,
    expected_output,
    make_request,
    make_runner,
    make_scheduler,
    new_blocks,
    output_of,
    prompt_of,
    scheduled,
)

# --- the chain of digests ------------------------------------------------------------------------

tokens = st.lists(st.integers(0, 3), max_size=14)


def chain_of(token_ids: list[int], block_size: int, key: bytes = b"") -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, token_ids, block_size, key)
    return chain


@given(
    a=tokens,
    b=tokens,
    block_size=st.integers(1, 4),
    keys=st.tuples(*[st.sampled_from([b"", b"k", b"0123456789abcdef"])] * 2),
)
def test_digests_are_equal_exactly_where_prefix_and_key_are_equal(a, b, block_size, keys):
    chains = chain_of(a, block_size, keys[0]), chain_of(b, block_size, keys[1])
    assert [len(chain) for chain in chains] == [len(a) // block_size, len(b) // block_size]
    prefixes = {
        (digest, (key, tuple(token_ids[: (i + 1) * block_size])))
        for token_ids, key, chain in zip((a, b), keys, chains, strict=True)
        for i, digest in enumerate(chain)
    }
    digests, named = zip(*prefixes, strict=True) if prefixes else ((), ())
    assert len(set(digests)) == len(set(named)) == len(prefixes)
    assert all(len(digest) == 16 for digest in digests)


spans = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 5), st.sampled_from([b"x" * 16, b"y" * 16])),
    max_size=2,
).map(lambda spans: tuple((start, start + size, key) for start, size, key in spans))


@given(a=tokens, b=tokens, block_size=st.integers(1, 4), of_a=spans, of_b=spans)
def test_a_block_has_the_keys_of_the_spans_that_overlap_it_or_blocks_before_it(
    a, b, block_size, of_a, of_b
):
    """Two prefixes share a digest exactly where tokens and spans up to the block are equal."""
    names: dict[bytes, set] = {}
    for token_ids, key_spans in ((a, of_a), (b, of_b)):
        chain: list[bytes] = []
        extend_chain(chain, token_ids, block_size, b"", key_spans)
        for index, digest in enumerate(chain):
            end = (index + 1) * block_size
            begun = [
                (start, key, [min(stop, end) > first for first in range(0, end, block_size)])
                for start, stop, key in key_spans
                if start < end
            ]
            names.setdefault(digest, set()).add(repr((token_ids[:end], begun)))
    assert all(len(of_digest) == 1 for of_digest in names.values())
    assert len(names) == len(set().union(*names.values()))


def test_a_chain_with_spans_grows_block_by_block():
    key_spans = ((3, 9, b"x" * 16), (9, 10, b"y" * 16))
    whole: list[bytes] = []
    extend_chain(whole, range(13), 2, b"", key_spans)
    for cut in range(7):
        chain: list[bytes] = []
        extend_chain(chain, range(2 * cut), 2, b"", key_spans)
        extend_chain(chain, range(2 * cut, 13), 2, b"", key_spans)
        assert chain == whole


@given(token_ids=tokens, cut=st.integers(0, 4), block_size=st.integers(1, 4))
def test_a_chain_grows_block_by_block(token_ids, cut, block_size):
    whole = chain_of(token_ids, block_size, b"key")
    chain = chain_of(token_ids[: cut * block_size], block_size, b"key")
    extend_chain(chain, token_ids[len(chain) * block_size :], block_size, b"key")
    assert chain == whole


# --- sharing -------------------------------------------------------------------------------------


def caching_scheduler(**overrides: object) -> Scheduler:
    options = {"num_blocks": 300, "block_size": 16, "max_num_batched_tokens": 4096} | overrides
    return make_scheduler(**options, enable_prefix_caching=True)


@pytest.mark.parametrize(
    ("num_own", "num_hit"), [(0, 1008), (1, 1024), (15, 1024), (16, 1024), (100, 1024)]
)
def test_a_hit_covers_the_shared_full_blocks_but_not_the_last_token(num_own, num_hit):
    scheduler = caching_scheduler()
    runner = make_runner(scheduler)
    shared = prompt_of(1024)
    scheduler.add(make_request("a", (*shared, 3, 1, 2), max_tokens=2, ignore_eos=True))
    drain(scheduler, runner)
    b = make_request("b", (*shared, *prompt_of(num_own, 9)), max_tokens=4, ignore_eos=True)
    scheduler.add(b)
    plan = scheduler.schedule()
    assert scheduled(plan) == {"b": 1024 + num_own - num_hit}
    assert plan.new[0].num_computed_tokens == b.num_cached_tokens == num_hit
    assert len(new_blocks(plan, "b")) == -(-(1024 + num_own) // 16)
    assert scheduler.admission.num_prefix_queries == 1027 + 1024 + num_own
    assert scheduler.admission.prefix_hit_tokens == num_hit
    runner.execute(plan)
    drain(scheduler, runner)
    assert b.output_token_ids == expected_output(b)[0]


def test_a_block_is_shared_only_once_its_step_has_succeeded():
    scheduler = caching_scheduler()
    for name in "ab":
        scheduler.add(make_request(name, prompt_of(40), max_tokens=5, ignore_eos=True))
    first = scheduler.schedule()
    scheduler.add(make_request("c", prompt_of(40), max_tokens=5))
    second = scheduler.schedule()
    assert scheduler.admission.prefix_hit_tokens == 0, "the first step is in flight"
    scheduler.update(output_of(first, (5,), (5,)))
    a_blocks = scheduler.get("a").block_ids[0][:2]
    scheduler.add(make_request("d", prompt_of(40), max_tokens=5))
    third = scheduler.schedule()
    assert scheduler.pools[0].num_cached == 2, "of a's and b's equal blocks the first stay"
    assert sorted(scheduler.pools[0]._cached.values()) == sorted(a_blocks)
    assert new_blocks(third, "d")[:2] == tuple(a_blocks)
    assert scheduled(third)["d"] == 8
    assert new_blocks(second, "c")[:2] != tuple(a_blocks)


@pytest.mark.parametrize("how", ["row", "step", "abort"])
def test_blocks_of_a_failed_or_aborted_step_are_never_shared(how):
    scheduler = caching_scheduler()
    scheduler.add(make_request("a", prompt_of(40), max_tokens=5))
    plan = scheduler.schedule()
    if how == "row":
        scheduler.update(output_of(plan, (), errors={0: "NaN"}))
    elif how == "step":
        scheduler.fail_step(plan, StepError("boom", step_id=0, req_ids=("a",)))
    else:
        scheduler.abort("a")
        scheduler.update(output_of(plan, (5,)))
    assert scheduler.pools[0].num_cached == 0
    scheduler.add(make_request("b", prompt_of(40), max_tokens=5))
    assert scheduled(scheduler.schedule()) == {"b": 40}


def test_generated_blocks_are_shared_too():
    """A second turn finds the first turn's prompt and answer."""
    scheduler = caching_scheduler()
    runner = make_runner(scheduler)
    a = make_request("a", prompt_of(30), max_tokens=40, ignore_eos=True)
    scheduler.add(a)
    drain(scheduler, runner)
    turn = (*a.prompt_token_ids, *a.output_token_ids, 4, 5)
    b = make_request("b", turn, max_tokens=3, ignore_eos=True)
    scheduler.add(b)
    drain(scheduler, runner)
    assert b.num_cached_tokens == 64, "of 69 computed tokens: the 70th is never computed"
    assert b.output_token_ids == expected_output(b)[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_generated_blocks_of_a_running_request_are_shared(depth):
    """Another request can use every generated block whose step is no longer in flight."""
    scheduler = caching_scheduler(max_steps_in_flight=depth)
    runner = make_runner(scheduler)
    a = make_request("a", prompt_of(30), max_tokens=90, ignore_eos=True)
    scheduler.add(a)
    while a.num_tokens < 65:
        while scheduler.num_steps_in_flight < depth:
            runner.execute(scheduler.schedule())
        scheduler.update(runner.result())
    known = expected_output(a)[0]
    assert a.num_tokens == 65, "64 of them are computed: four blocks"
    b = make_request("b", (*a.prompt_token_ids, *known[:60]), max_tokens=3, ignore_eos=True)
    scheduler.add(b)
    drain(scheduler, runner)
    assert b.num_cached_tokens == 64
    assert (a.output_token_ids, b.output_token_ids) == (known, expected_output(b)[0])


@pytest.mark.parametrize("how", ["aborted", "its next row failed", "its next step failed"])
def test_blocks_computed_before_a_request_ended_are_shared(how):
    scheduler = caching_scheduler(max_steps_in_flight=1)
    scheduler.add(make_request("a", prompt_of(40), max_tokens=5, ignore_eos=True))
    scheduler.update(output_of(scheduler.schedule(), (5,)))
    if how == "aborted":
        scheduler.abort("a")
    elif how == "its next row failed":
        scheduler.update(output_of(scheduler.schedule(), (), errors={0: "NaN"}))
    else:
        scheduler.fail_step(scheduler.schedule(), StepError("boom", step_id=1, req_ids=("a",)))
    assert scheduler.get("a") is None
    scheduler.add(make_request("b", prompt_of(40), max_tokens=5))
    assert scheduled(scheduler.schedule()) == {"b": 8}


long_tokens = st.lists(st.integers(0, 1), max_size=40)


@given(
    prompts=st.lists(st.tuples(long_tokens, st.sampled_from([b"", b"k"])), max_size=6),
    block_size=st.integers(1, 4), most=st.tuples(st.integers(1, 3), st.integers(1, 99)),
    num_later=st.integers(0, 9),
)  # fmt: skip
def test_the_digests_of_a_prompt_that_begins_like_another_are_its_own(
    prompts, block_size, most, num_later
):
    """Whatever was kept before, with other keys, and although the kept digests grow."""
    chains = RecentChains(block_size)
    chains.LEAST_TOKENS, (chains.MOST_CHAINS, chains.MOST_TOKENS) = 5, most
    for token_ids, key in prompts:
        array, expected = np.array(token_ids, dtype=np.int32), chain_of(token_ids, block_size, key)
        digests = chains.start(array, key)
        assert digests == expected[: len(digests)]
        later = [2] * num_later
        chains.keep(array, key, chain_of([*token_ids, *later], block_size, key))
        if len(token_ids) >= 5:
            assert chains.start(array, key) == expected
        kept = [len(tokens) for _, tokens, _ in chains._chains]
        assert len(kept) <= most[0]
        assert sum(kept) == chains._num_tokens
        assert sum(kept) <= most[1] or len(kept) == 1


def test_a_prompt_that_begins_like_an_earlier_one_is_hashed_from_there(monkeypatch):
    blocks: list[int] = []

    def counted(chain, token_ids, block_size, *keys):
        blocks.append(len(token_ids) // block_size)
        extend_chain(chain, token_ids, block_size, *keys)

    monkeypatch.setattr(prefix_cache, "extend_chain", counted)
    monkeypatch.setattr(RecentChains, "LEAST_TOKENS", 32)
    scheduler = caching_scheduler(max_steps_in_flight=1)
    runner = make_runner(scheduler)
    for prompt, expected in (
        (prompt_of(40), [2]),
        (prompt_of(40), []),
        ((*prompt_of(40), 1, 2, 3, 4, 5, 6, 7, 8), [1]),
        ((*prompt_of(24), *prompt_of(24, 7)), [2]),
        (prompt_of(31), [1]),
    ):
        blocks.clear()
        request = make_request("a", prompt, max_tokens=1, ignore_eos=True)
        scheduler.add(request)
        runner.execute(scheduler.schedule())
        assert blocks == expected
        assert request.block_digests == chain_of([*prompt], 16)
        scheduler.update(runner.result())
        drain(scheduler, runner)


def test_digests_are_computed_only_when_a_request_is_looked_up_or_leaves(monkeypatch):
    """A steady step computes no digest; an abort or a lookup computes the missing digests."""
    blocks: list[int] = []

    def counted(chain, token_ids, block_size, *keys):
        blocks.append(len(token_ids) // block_size)
        extend_chain(chain, token_ids, block_size, *keys)

    scheduler = caching_scheduler(max_steps_in_flight=1)
    runner = make_runner(scheduler)
    for name in "ab":
        scheduler.add(make_request(name, prompt_of(20, ord(name)), max_tokens=99, ignore_eos=True))
    runner.execute(scheduler.schedule())
    scheduler.update(runner.result())
    monkeypatch.setattr(prefix_cache, "extend_chain", counted)
    for _ in range(50):
        runner.execute(scheduler.schedule())
        scheduler.update(runner.result())
    assert blocks == []
    scheduler.abort("a")
    assert blocks == [3], "a has computed 70 tokens, four blocks; the first was looked up"
    scheduler.add(make_request("c", prompt_of(20, 3), max_tokens=1, ignore_eos=True))
    scheduler.schedule()
    assert blocks == [3, 3, 1], "b's three, and c's own"


def work_of_a_hit(monkeypatch, keeps: tuple[Visible, ...], num_blocks: int) -> tuple[int, list]:
    """Admit a request whose ``num_blocks`` blocks of prompt are cached.

    Returns:
        How many digests were computed for it, and how many each group looked up.
    """
    scheduler = caching_scheduler(
        num_blocks=300, keeps=keeps, max_num_batched_tokens=8192, max_steps_in_flight=1
    )
    shared = prompt_of(16 * num_blocks)
    scheduler.add(make_request("a", (*shared, 3), max_tokens=2, ignore_eos=True))
    drain(scheduler, make_runner(scheduler))
    num_digests, num_lookups = 0, [0] * len(keeps)

    def digest(*args, **options):
        nonlocal num_digests
        num_digests += 1
        return blake2b(*args, **options)

    class Counted(dict):
        def get(self, key, default=None):
            num_lookups[self.group] += 1
            return super().get(key, default)

    for group, pool in enumerate(scheduler.pools):
        pool._cached = Counted(pool._cached)
        pool._cached.group = group
    monkeypatch.setattr(prefix_cache, "blake2b", digest)
    scheduler.add(make_request("b", (*shared, 5), max_tokens=2, ignore_eos=True))
    assert scheduled(scheduler.schedule()) == {"b": 1}
    monkeypatch.undo()
    return num_digests, num_lookups


@pytest.mark.parametrize("num_blocks", [32, 256])
def test_a_hit_hashes_a_block_once_and_looks_up_what_each_group_sees(monkeypatch, num_blocks):
    """However many groups there are, and however long the hit is for a streaming group.

    A window of 64 and a sink of 16 are at most six blocks of 16, which a lookup asks for twice.
    """
    streaming = Visible(window=64, sink=16)
    for keeps in ((FULL,), (FULL, streaming), (FULL, streaming, Visible(window=48, sink=16))):
        num_digests, (of_full, *of_streaming) = work_of_a_hit(monkeypatch, keeps, num_blocks)
        assert num_digests <= num_blocks + 1, "and the root"
        assert of_full == num_blocks
        assert all(0 < count <= 2 * 6 for count in of_streaming)


def test_a_preempted_request_finds_its_own_blocks_again():
    scheduler = make_scheduler(
        num_blocks=8, max_num_batched_tokens=64, enable_prefix_caching=True, max_steps_in_flight=1
    )
    runner = make_runner(scheduler)
    for i, name in enumerate("ab"):
        scheduler.add(make_request(name, prompt_of(12, i), max_tokens=18, ignore_eos=True))
    b = scheduler.get("b")
    drain(scheduler, runner)
    assert b.num_preemptions > 0
    assert b.output_token_ids == expected_output(b)[0]


def test_the_least_recently_used_prefix_is_evicted_from_its_end():
    scheduler = make_scheduler(
        num_blocks=6, max_num_batched_tokens=64, enable_prefix_caching=True, max_steps_in_flight=1
    )
    runner = make_runner(scheduler)

    def run(name: str, prompt: tuple[int, ...]) -> int:
        request = make_request(name, prompt, max_tokens=1, ignore_eos=True)
        scheduler.add(request)
        drain(scheduler, runner)
        return request.num_cached_tokens

    old, new = prompt_of(9, 0), prompt_of(9, 5)
    run("old", old)
    run("new", new)
    assert scheduler.pools[0].num_free == 6, "cached blocks that no request uses count as free"
    assert run("other", prompt_of(12, 11)) == 0, "takes the two free blocks, then old's second"
    assert run("old again", old) == 4
    assert run("other again", prompt_of(12, 11)) == 8, "used after new, which lost a block"


def test_only_full_blocks_of_equal_prefix_and_key_are_shared():
    scheduler = caching_scheduler()
    runner = make_runner(scheduler)
    block, other = prompt_of(16), prompt_of(16, 7)
    scheduler.add(make_request("a", (*block, *other, 1), max_tokens=1))
    drain(scheduler, runner)
    for name, prompt, key, hit in [
        ("same", (*block, *other, 2), b"", 32),
        ("diverges in the second block", (*block, *other[:15], 1, 1), b"", 16),
        ("same block elsewhere", (*other, *block, 1), b"", 0),
        ("other key", (*block, *other, 2), b"image", 0),
    ]:
        request = make_request(name, prompt, max_tokens=1, cache_key=key)
        runner.cache_keys[name] = key
        scheduler.add(request)
        drain(scheduler, runner)
        assert request.num_cached_tokens == hit, name


@pytest.mark.parametrize(
    ("spans", "num_hit"),
    [
        (((5, 20), (40, 66)), 32),  # a hit of 64 would cut the span from 40 to 66
        (((5, 40), (40, 66)), 0),  # 48 and 64 as above; 16 and 32 would cut the span from 5 to 40
        (((16, 64), (64, 66)), 64),
    ],
)
def test_a_hit_ends_before_a_span_that_it_would_cut(spans, num_hit):
    scheduler = caching_scheduler()
    scheduler.add(make_request("a", prompt_of(64), max_tokens=1))
    drain(scheduler, make_runner(scheduler))
    b = make_request("b", prompt_of(70), max_tokens=1, unsplittable=spans)
    scheduler.add(b)
    assert scheduled(scheduler.schedule()) == {"b": 70 - num_hit}
    assert b.num_cached_tokens == num_hit


def test_blocks_in_quarantine_can_be_shared_but_not_overwritten():
    scheduler = caching_scheduler(num_blocks=4)
    scheduler.add(make_request("a", prompt_of(40), max_tokens=9, ignore_eos=True))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(output_of(first, (5,)))
    blocks = tuple(scheduler.get("a").block_ids[0])
    scheduler.abort("a")
    assert (scheduler.pools[0].num_free, scheduler.pools[0].num_quarantined) == (1, 3)
    scheduler.add(make_request("b", prompt_of(40), max_tokens=9))
    third = scheduler.schedule()
    assert new_blocks(third, "b")[:2] == blocks[:2]
    assert new_blocks(third, "b")[2] not in blocks
    scheduler.update(output_of(second, (5,)))
    assert (scheduler.pools[0].num_free, scheduler.pools[0].num_held) == (1, 3)


def test_admission_counts_a_free_block_that_becomes_shared_only_once():
    scheduler = caching_scheduler(num_blocks=4)
    runner = make_runner(scheduler)
    scheduler.add(make_request("a", prompt_of(40), max_tokens=1))
    drain(scheduler, runner)
    scheduler.add(make_request("b", prompt_of(40), max_tokens=9, ignore_eos=True))
    scheduler.add(make_request("c", prompt_of(40), max_tokens=9, ignore_eos=True))
    plan = scheduler.schedule()
    assert scheduled(plan) == {"b": 8, "c": 8}, "two shared blocks and one each"
    assert scheduler.pools[0].num_free == 0
    scheduler.add(make_request("d", prompt_of(40), max_tokens=9))
    queries = scheduler.admission.num_prefix_queries
    scheduler.schedule()
    assert scheduler.admission.num_prefix_queries == queries, "counted after the resource check"


def test_a_reset_forgets_all_blocks_computed_before_the_reset():
    scheduler = caching_scheduler()
    runner = make_runner(scheduler)
    scheduler.add(make_request("done", prompt_of(40), max_tokens=1))
    drain(scheduler, runner)
    scheduler.add(make_request("running", prompt_of(14, 5), max_tokens=30, ignore_eos=True))
    runner.execute(scheduler.schedule())
    scheduler.reset_prefix_cache()
    drain(scheduler, runner)
    assert scheduler.pools[0].num_cached == 0
    scheduler.add(make_request("again", prompt_of(40), max_tokens=1))
    assert scheduled(scheduler.schedule()) == {"again": 40}


# --- without any one of the guards, the device reads the pages of another prefix -----------------


def run_after(scheduler: Scheduler, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    """Run a request, then a second request that could share its blocks."""
    runner = make_runner(scheduler)
    for name, prompt in (("a", first), ("b", second)):
        scheduler.add(make_request(name, prompt, max_tokens=1, ignore_eos=True))
        drain(scheduler, runner)


def extend_without_parent(chain, token_ids, block_size, *keys):
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        own: list[bytes] = []
        extend_chain(own, token_ids[start : start + block_size], block_size, *keys)
        chain += own


def test_a_digest_without_its_parent_shares_pages_of_another_prefix(monkeypatch):
    monkeypatch.setattr(prefix_cache, "extend_chain", extend_without_parent)
    x, y = prompt_of(16), prompt_of(16, 7)
    with pytest.raises(DeviceError, match="b: position 0 was overwritten"):
        run_after(caching_scheduler(), (*x, *y, 1), (*y, *x, 1))


@pytest.mark.parametrize("when", ["row failed", "step in flight"])
def test_a_block_shared_before_its_step_has_succeeded_has_wrong_content(when, monkeypatch):
    scheduler = caching_scheduler()
    runner = make_runner(scheduler)
    land = scheduler._batch.land
    monkeypatch.setattr(scheduler._batch, "land", lambda step, _: land(step, None))
    scheduler.add(make_request("a", prompt_of(40), max_tokens=4))
    runner.execute(scheduler.schedule())
    scheduler.add(make_request("b", prompt_of(40), max_tokens=4))
    if when == "row failed":
        scheduler.update(runner.result(fail_rows=frozenset([0])))
        runner.execute(scheduler.schedule())
    else:
        (step,) = scheduler._in_flight
        scheduler._batch.land(step, None)
        runner.execute(scheduler.schedule())
        runner.result(fail_rows=frozenset([0]))
    assert scheduler.get("b").num_cached_tokens == 32
    with pytest.raises(DeviceError, match="b: position 0 was overwritten"):
        runner.result()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_a_blocked_request_is_looked_up_again_only_when_it_could_be_admitted(
    max_steps_in_flight, monkeypatch
):
    """Two requests decode 60 tokens each, which fill and cache blocks, while a third one waits.

    A lookup in every step would not admit the waiting request earlier.
    """
    admitted = []
    for forgets in (False, True):
        scheduler = caching_scheduler(
            num_blocks=34, block_size=4, max_num_seqs=8, max_steps_in_flight=max_steps_in_flight
        )
        runner, find, lookups, steps = make_runner(scheduler), scheduler.pools.find, [], 0
        monkeypatch.setattr(
            scheduler.pools, "find", lambda *args, find=find, lookups=lookups: (
                lookups.append(args) or find(*args)
            ),
        )  # fmt: skip
        for name, start in (("a", 1), ("b", 9)):
            request = make_request(name, prompt_of(4, start), max_tokens=60, ignore_eos=True)
            scheduler.add(request)
        waiting = make_request("waiting", prompt_of(118, 3), max_tokens=1)
        while scheduler.has_unfinished_requests:
            if steps == 5:
                scheduler.add(waiting)
            if forgets:
                scheduler.admission.blocked = None
            plan = scheduler.schedule()
            if plan is not None:
                runner.execute(plan)
                if "waiting" in [request.req_id for request in plan.new]:
                    admitted.append(steps)
            if plan is None or scheduler.num_steps_in_flight == max_steps_in_flight:
                scheduler.update(runner.result())
            steps += 1
        assert waiting.output_token_ids == expected_output(waiting)[0]
        num_lookups = len(lookups) - 2  # the two running requests had one each
        assert num_lookups > 40 if forgets else num_lookups <= 3
    assert admitted[0] == admitted[1] > 50


def test_followers_wait_in_the_order_of_their_first_requests():
    scheduler = caching_scheduler(max_num_seqs=8)
    names = list("abcdef")
    for name in names:
        scheduler.add(make_request(name, prompt_of(20), max_tokens=3, n=2, ignore_eos=True))
    plan = scheduler.schedule()
    assert plan.req_ids == tuple(names)
    scheduler.update(output_of(plan, *[(5,)] * len(names)))
    assert list(scheduler.waiting) == [(name, 1) for name in names]


# --- head groups ---------------------------------------------------------------------------------


@st.composite
def cached_groups(draw) -> tuple[list[Visible], list[list[bool]], list[bool]]:
    """Draw windows of head groups, which blocks each group has, and which lengths are allowed."""
    windows = st.builds(Visible, st.integers(1, 70), st.integers(0, 40))
    keeps = draw(st.sampled_from([[], [FULL]])) + draw(st.lists(windows, max_size=2))
    keeps = keeps or [FULL]
    count = draw(st.integers(0, 9))
    mostly = st.integers(0, 5).map(bool)
    cached = [draw(st.lists(mostly, min_size=count, max_size=count)) for _ in keeps]
    return keeps, cached, [True, *draw(st.lists(mostly, min_size=count, max_size=count))]


@given(case=cached_groups())
def test_the_longest_prefix_has_the_blocks_that_its_next_token_sees_in_every_group(case):
    keeps, cached, allowed = case
    digests = [bytes([index]) for index in range(len(cached[0]))]
    pools = HeadPools([len(digests)] * len(keeps), 16, keeps)
    blocks = pools.allocate(len(digests))
    for pool, own, has in zip(pools, blocks, cached, strict=True):
        for block, digest, is_cached in zip(own, digests, has, strict=True):
            if is_cached:
                pool.cache(block, digest)

    def seen_blocks(seen: Visible, count: int) -> list[int]:
        tokens = range(16 * count)
        if not seen.is_full:
            tokens = [t for t in tokens if t < seen.sink or t > 16 * count - seen.window]
        return sorted({token // 16 for token in tokens})

    def fits(count: int) -> bool:
        return allowed[count] and all(
            has[block] for seen, has in zip(keeps, cached, strict=True)
            for block in seen_blocks(seen, count)
        )  # fmt: skip

    longest = max(count for count in range(len(digests) + 1) if fits(count))
    expected = [[-1] * longest for _ in keeps]
    for seen, own, found in zip(keeps, blocks, expected, strict=True):
        for block in seen_blocks(seen, longest):
            found[block] = own[block]
    last_allowed = [max(n for n in range(c + 1) if allowed[n]) for c in range(len(allowed))]
    assert pools.find(digests, last_allowed.__getitem__) == expected


def test_a_window_is_looked_up_only_where_the_next_token_sees_it(monkeypatch):
    """A prompt of 1,600 tokens costs a group with a window no more than a short one."""
    pools = HeadPools([100, 100], 16, [FULL, Visible(32, 16)])
    digests = [bytes([index]) for index in range(100)]
    for pool, own in zip(pools, pools.allocate(100), strict=True):
        for block, digest in zip(own, digests, strict=True):
            pool.cache(block, digest)
    asked, known = [], BlockPool.known
    monkeypatch.setattr(
        BlockPool, "known", lambda pool, digests: asked.extend(digests) or known(pool, digests)
    )
    assert [len(own) for own in pools.find(digests)] == [100, 100]
    assert set(asked) == {digests[0], digests[98], digests[99]}
