"""Features, masks and their chunks through the engine, against transformers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import EngineConfig, SamplingParams
from mrv1.engine.core import EngineCore
from mrv1.engine.request import Request
from mrv1.multimodal import MultimodalItem, whole_spans
from tests.engine.scheduler_model import KnownSpeculation
from tests.multimodal.oracle import HIDDEN_SIZE, check_output, features, tiny

ROW_BYTES = HIDDEN_SIZE * 4


def make_core(**options: object) -> EngineCore:
    config = {
        "model": "tiny", "device": "cpu", "dtype": "float32", "max_num_seqs": 3,
        "max_model_len": 128, "num_kv_blocks": 24,
    }  # fmt: skip
    return EngineCore(EngineConfig(**(config | options)), model=tiny(), progress=False)


@dataclasses.dataclass
class Case:
    """One request as the test describes it."""

    prompt: list[int]
    items: list[tuple[int, torch.Tensor]]
    are_bidirectional: list[bool]
    offsets: np.ndarray | None
    """The caller's ranges, if any."""

    @property
    def ranges(self) -> np.ndarray:
        if self.offsets is not None:
            return self.offsets
        ranges = [[0, token + 1] for token in range(len(self.prompt))]
        for (start, rows), both_ways in zip(self.items, self.are_bidirectional, strict=True):
            for token in range(start, start + len(rows) if both_ways else start):
                ranges[token] = [0, start + len(rows)]
        return np.array(ranges)

    @property
    def longest_span(self) -> int:
        return max((end - start for start, end in whole_spans(self.ranges)), default=1)

    def add(self, core: EngineCore, name: str, max_tokens: int = 3) -> Request:
        return core.add_request(
            name,
            self.prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=1),
            multimodal=[
                MultimodalItem(features=rows, start=start, bidirectional=both_ways)
                for (start, rows), both_ways in zip(
                    self.items, self.are_bidirectional, strict=True
                )
            ],
            attn_mask_offsets=self.offsets,
        )

    def check(self, request: Request) -> None:
        check_output(request, self.items, self.ranges)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Text and items in turns; few contents, so that requests share images and prefixes."""
    prompt: list[int] = []
    items: list[tuple[int, torch.Tensor]] = []
    for _ in range(draw(st.integers(1, 3))):
        prompt += [100 + index for index in range(draw(st.sampled_from([0, 1, 5, 17])))]
        if num_rows := draw(st.sampled_from([0, 1, 4, 11, 18])):
            items.append((len(prompt), features(draw(st.integers(0, 1)), num_rows)))
            prompt += [9] * num_rows
    prompt += [200 + index for index in range(draw(st.integers(0, 3)))]
    prompt = prompt or [7]
    kind = draw(st.sampled_from(["causal", "causal", "bidirectional", "ranges"]))
    offsets = None
    if kind == "ranges":
        most = st.integers(1, 9)
        ends = [min(token + draw(most), len(prompt)) for token in range(len(prompt))]
        starts = [draw(st.integers(0, token)) for token in range(len(prompt))]
        offsets = np.array([starts, ends]).T
    both_ways = [kind == "bidirectional" and draw(st.booleans()) for _ in items]
    return Case(prompt, items, both_ways, offsets)


@settings(max_examples=settings.default.max_examples // 2)  # transformers runs in each
@given(
    each=st.lists(cases(), min_size=1, max_size=2),
    budget=st.sampled_from([1, 2, 3, 7, 16, 33, 64]),
    overlap=st.booleans(),
    num_blocks=st.sampled_from([8, 24]),
    spare_rows=st.sampled_from([0, 5, 100]),
    twice=st.booleans(),
    num_steps=st.integers(0, 4),
    preempt_at=st.sets(st.integers(0, 9), max_size=3),
)
def test_outputs_equal_transformers_wherever_chunks_are_cut(
    each, budget, overlap, num_blocks, spare_rows, twice, num_steps, preempt_at
):
    """Chunks that cut items, mixed batches, prefix hits, preemption and few rows for features.

    Besides the preemptions that the pool's size makes necessary, the newest request is preempted
    after some steps, wherever it is.
    """
    longest = max(case.longest_span for case in each)
    rows_of_a_span = max(sum(len(rows) for _, rows in case.items) for case in each)
    core = make_core(
        max_num_batched_tokens=max(budget, longest),
        overlap=overlap,
        num_kv_blocks=num_blocks,
        mm_cache_memory_bytes=max(rows_of_a_span + spare_rows, 1) * ROW_BYTES,
    )
    pool = core.scheduler.features
    requests = []
    for index, case in enumerate(each * (2 if twice else 1)):
        requests.append((case, case.add(core, str(index))))
        for _ in range(num_steps):
            core.step()
    scheduler, step = core.scheduler, 0
    while core.has_unfinished_requests:
        newest = next(reversed(scheduler.running.values()), None)
        if step in preempt_at and newest is not None and not scheduler._batch.is_ending(newest):
            scheduler._preempt(newest)
        core.step()
        step += 1
    for case, request in requests:
        case.check(request)
    assert pool.num_held == 0
    assert core.kv_report()["held_feature_bytes"] == 0


def two_images(**fields: object) -> Case:
    prompt = [*range(20, 25), *[9] * 19, *range(40, 42), *[9] * 7, 50]
    items = [(5, features(3, 19)), (26, features(4, 7))]
    return Case(prompt, items, fields.pop("are_bidirectional", [False, False]), None)


@pytest.mark.parametrize(
    "budget", [2, 24, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 3, 5, 6, 11))]
)
def test_a_causal_item_may_be_cut_anywhere(budget):
    case = two_images()
    core = make_core(max_num_batched_tokens=budget)
    request = case.add(core, "a")
    while core.has_unfinished_requests:
        core.step()
    case.check(request)


def test_requests_share_the_text_before_their_images_and_nothing_after_other_images():
    core = make_core(block_size=16)
    text = list(range(300, 340))  # two full blocks and a half

    def run(name: str, seed: int) -> tuple[int, Request, Case]:
        case = Case([*text, *[9] * 30, *text], [(40, features(seed, 30))], [False], None)
        before = core.metrics()["prefix_hit_tokens"]
        request = case.add(core, name)
        while core.has_unfinished_requests:
            core.step()
        case.check(request)
        return core.metrics()["prefix_hit_tokens"] - before, request, case

    assert run("a", 0)[0] == 0
    assert run("b", 1)[0] == 32, "the blocks of text before another image"
    assert run("c", 0)[0] == 96, "all full blocks: the same image again"
    assert run("d", 1)[0] == 96
    plain = core.add_request("e", [*text, *[9] * 30, *text], SamplingParams(max_tokens=1))
    while core.has_unfinished_requests:
        core.step()
    assert plain.num_cached_tokens == 32, "placeholders without an image are other tokens"


def test_a_bidirectional_span_as_long_as_a_step_runs_beside_decodes():
    """It waits for one step, while the decodes go on before and after it."""
    case = two_images(are_bidirectional=[True, False])
    core = make_core(max_num_batched_tokens=19, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=1)
    decodes = [core.add_request(name, [5, 6, 7], params) for name in "ab"]
    for _ in range(4):
        core.step()
    request = case.add(core, "c", max_tokens=1)
    num_steps = 0
    while not request.finished:
        core.step()
        num_steps += 1
    assert num_steps < 10
    assert not any(other.finished for other in decodes)
    assert all(len(other.output_token_ids) >= num_steps - 3 for other in decodes)
    while core.has_unfinished_requests:
        core.step()
    case.check(request)
    for other in decodes:
        check_output(other, [])


def test_drafts_follow_items_and_ranges():
    """A request with a bidirectional image, one with ranges of keys and one of text draft."""
    ranged = two_images()
    ranged.offsets = np.array([[max(token - 20, 0), token + 1] for token in range(34)])
    ranged.items, ranged.are_bidirectional = [], []
    text = Case([*range(20, 30)], [], [], None)
    cases = [two_images(are_bidirectional=[True, False]), ranged, text]
    outputs = {}
    for drafts in (False, True):
        core = make_core(speculative={"method": "ngram"} if drafts else None)
        if drafts:
            core.scheduler._speculation = KnownSpeculation(outputs)
        requests = [case.add(core, str(index), 12) for index, case in enumerate(cases)]
        while core.has_unfinished_requests:
            core.step()
        outputs = {request.req_id: request.output_token_ids for request in requests}
    assert core.scheduler._speculation.num_accepted > 0
    for case, request in zip(cases, requests, strict=True):
        case.check(request)


def test_tokens_that_see_another_later_item_are_no_prefix_hit():
    """The ranges and the tokens are equal; tokens of the first block see the item in the third."""
    prompt = [*range(100, 133), *[9] * 4, *range(200, 214)]
    offsets = np.array([[0, token + 1] for token in range(len(prompt))])
    offsets[3:37, 1] = 37
    cases = [Case(prompt, [(33, features(content, 4))], [False], offsets) for content in (0, 1, 1)]
    core = make_core(max_num_batched_tokens=64)
    requests = []
    for index, case in enumerate(cases):
        requests.append(case.add(core, str(index)))
        while core.has_unfinished_requests:
            core.step()
        case.check(requests[-1])
    assert [request.num_cached_tokens for request in requests] == [0, 0, 48]


def test_other_items_under_the_same_tokens_are_no_prefix_hit():
    prompt = [*range(100, 120), *[9] * 4, *range(200, 227)]
    core = make_core(max_num_batched_tokens=64)
    requests = []
    for index, content in enumerate((0, 1, 1)):
        case = Case(prompt, [(20, features(content, 4))], [False], None)
        requests.append(case.add(core, str(index)))
        while core.has_unfinished_requests:
            core.step()
        case.check(requests[-1])
    assert [request.num_cached_tokens for request in requests] == [0, 16, 48]
