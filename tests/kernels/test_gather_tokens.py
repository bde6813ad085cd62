"""Token gather: every output, whole buffers, against a loop over requests and tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.step.contracts import (
    MROPE_SPAN_WORDS,
    GatheredTokens,
    RequestSlots,
    SlotTables,
)
from mrv1.kernels.step.gather_tokens import GatherTokensConfig
from tests.kernels.elementwise import bundled, tiles

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

MAX_SPANS = 5

POISON = -999
"""The value of outputs before a launch: every element must be overwritten."""


@dataclass(frozen=True)
class Row:
    """One batch row: a slot (-1 = padding) and the progress of its request."""

    slot: int
    query_len: int
    computed: int = 0
    unscheduled: int = 0
    """Known tokens that this step does not reach; > 0 is an unfinished prefill."""
    drafts: int = 0
    """Drafts after the known tokens."""
    spare: int = 0
    """Query tokens more than are left to compute: the query starts this much earlier."""
    stopped: int = 0

    @property
    def known(self) -> int:
        return self.computed + self.query_len - self.drafts - self.spare + self.unscheduled


@dataclass(frozen=True)
class Group:
    sink: int = 0
    ring_blocks: int = 0


@dataclass(frozen=True)
class Case:
    rows: tuple[Row, ...]
    groups: tuple[Group, ...] = (Group(),)
    block_size: int = 16
    max_num_reqs: int = 5
    max_model_len: int = 96
    spare_tokens: int = 0
    missing: float = 0.0
    """Share of table entries that name no page."""
    seed: int = 0
    uniform: bool = False
    """Rows are given by query_len alone."""
    has_drafts: bool = False
    has_mrope: bool = False
    has_block_table: bool = False
    has_adapters: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(row.query_len for row in self.rows)

    def segment_width(self, group: Group) -> int:
        if group.ring_blocks:
            return -(-group.sink // self.block_size) + group.ring_blocks
        return -(-self.max_model_len // self.block_size)

    @property
    def table_offsets(self) -> list[int]:
        widths = [self.segment_width(group) for group in self.groups]
        return [1 + sum(widths[:i]) for i in range(len(widths))]  # column 0 belongs to no group

    @property
    def row_width(self) -> int:
        return self.table_offsets[-1] + self.segment_width(self.groups[-1])

    def inputs(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def random(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator).int()

        by_slot = {row.slot: row for row in self.rows}
        rows = [by_slot.get(slot) for slot in range(self.max_num_reqs)]
        table = random(1, 10_000, self.max_num_reqs, self.row_width + 3)
        table[torch.rand(table.shape, generator=generator) < self.missing] = -1
        tokens = random(0, 50_000, self.max_num_reqs, 8 + self.max_model_len + 8)
        lengths = torch.tensor([0] + [row.query_len for row in self.rows])
        integers = {
            "idx_mapping": [row.slot for row in self.rows],
            "num_tokens": [row.known if row else POISON for row in rows],
            "num_computed_tokens": [row.computed if row else POISON for row in rows],
            "stopped": [row.stopped if row else 3 for row in rows],
            "table_offset": self.table_offsets,
            "sink": [group.sink for group in self.groups],
            "ring_blocks": [group.ring_blocks for group in self.groups],
        }
        if not self.uniform:
            integers["query_start_loc"] = lengths.cumsum(0).tolist()
        optional = {}
        if self.has_drafts:
            integers["num_draft_tokens"] = [row.drafts for row in self.rows]
            most = max([row.drafts for row in self.rows], default=0)
            drafts = random(0, 50_000, len(self.rows), most + 2)
            optional["draft_token_ids"] = drafts[:, 1 : 1 + most]
        if self.has_mrope:
            generator.manual_seed(self.seed)
            spans = random(-99, 99, self.max_num_reqs, MAX_SPANS + 1, MROPE_SPAN_WORDS)
            # Ends of spans, and gaps between them: any may be equal, so spans may be empty.
            bounds = random(0, 10, self.max_num_reqs, 2 * MAX_SPANS + 2).cumsum(1)
            spans[..., 0], spans[..., 1] = bounds[:, ::2], bounds[:, 1::2]
            spans[..., 4] = random(1, 4, self.max_num_reqs, MAX_SPANS + 1)
            spans[..., 5] = spans[..., 4] * random(1, 4, self.max_num_reqs, MAX_SPANS + 1)
            scales = torch.rand(self.max_num_reqs, MAX_SPANS + 1, generator=generator) * 3
            spans[..., 6] = scales.view(torch.int32)
            optional["mrope_spans"] = spans[:, :MAX_SPANS]
            optional["num_mrope_spans"] = random(0, MAX_SPANS + 1, self.max_num_reqs)
        if self.has_adapters:
            optional["adapter_slot"] = torch.arange(self.max_num_reqs, dtype=torch.int32) % 3 - 1
        return {
            **{name: torch.tensor(v, dtype=torch.int32) for name, v in integers.items()},
            "token_ids": tokens[:, 8 : 8 + self.max_model_len],
            "block_tables": table[:, : self.row_width],
            **optional,
        }

    def arguments(self) -> dict[str, object]:
        """Return all arguments except the outputs."""
        query_len = self.rows[0].query_len if self.uniform else None
        return {
            "query_start_loc": None,
            "query_len": query_len,
            "block_size": self.block_size,
            **self.inputs(),
        }


@dataclass
class Outputs:
    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    logits_rows: torch.Tensor
    block_table: torch.Tensor | None
    adapter_slots: torch.Tensor | None

    @classmethod
    def poisoned(cls, case: Case, device) -> Outputs:
        num_rows, num_padded = len(case.rows), case.num_tokens + case.spare_tokens

        def full(*shape: int, dtype=torch.int64):
            return torch.full(shape, POISON, dtype=dtype, device=device)

        table = full(num_rows, case.row_width + 2, dtype=torch.int32)[:, : case.row_width]
        return cls(
            input_ids=full(num_padded),
            positions=full(3, num_padded + 4)[:, :num_padded]
            if case.has_mrope
            else full(num_padded),
            seq_lens=full(num_rows, dtype=torch.int32),
            slot_mapping=full(len(case.groups), num_padded + 8)[:, :num_padded],
            logits_rows=full(num_rows),
            block_table=table if case.has_block_table else None,
            adapter_slots=full(num_padded, dtype=torch.int32) if case.has_adapters else None,
        )

    def assert_equal(self, other: Outputs) -> None:
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine is None:
                assert theirs is None
                continue
            assert mine.dtype == theirs.dtype
            assert mine.shape == theirs.shape
            assert _whole(mine).tolist() == _whole(theirs).tolist(), field.name


def _whole(view: torch.Tensor) -> torch.Tensor:
    """Return the buffer behind a view: elements between its rows must keep their values."""
    return view.new_empty(0).set_(view.untyped_storage())


def _gather(ops, arguments: dict[str, object]) -> None:
    ops.gather_tokens(
        **bundled(arguments, slots=RequestSlots, tables=SlotTables, out=GatheredTokens)
    )


def _run(ops, case: Case, device="cpu") -> Outputs:
    outputs = Outputs.poisoned(case, device)
    arguments = {name: _moved(value, device) for name, value in case.arguments().items()}
    _gather(ops, arguments | vars(outputs))
    return outputs


def _moved(value, device):
    """Copy a tensor to ``device`` and keep its strides."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return storage.copy_(value)


def _by_hand(case: Case) -> Outputs:
    """Follow the contract token by token."""
    inputs = {name: tensor.tolist() for name, tensor in case.inputs().items()}
    outputs = Outputs.poisoned(case, "cpu")
    outputs.input_ids.zero_(), outputs.positions.zero_(), outputs.slot_mapping.fill_(-1)
    outputs.seq_lens.zero_(), outputs.logits_rows.fill_(-1)
    if outputs.adapter_slots is not None:
        outputs.adapter_slots.fill_(-1)
    token = 0
    for index, row in enumerate(case.rows):
        start, token = token, token + row.query_len
        if row.slot < 0 or row.stopped:
            continue
        first = row.computed - (0 if row.unscheduled else row.spare)
        seq_len = first + row.query_len
        outputs.seq_lens[index] = seq_len
        if row.computed < row.known and row.known + row.drafts <= seq_len:
            outputs.logits_rows[index] = start + row.known - 1 - first
        for position in range(max(first, 0), min(seq_len, row.known + row.drafts)):
            if position < case.max_model_len:
                at = start + position - first
                _by_hand_token(case, inputs, outputs, index, position, at)
        if outputs.block_table is not None:
            for g, group in enumerate(case.groups):
                live = -(-min(seq_len, case.max_model_len) // case.block_size)
                for column in range(case.segment_width(group) if group.ring_blocks else live):
                    at = case.table_offsets[g] + column
                    outputs.block_table[index, at] = inputs["block_tables"][row.slot][at]
    return outputs


def _by_hand_token(
    case: Case, inputs: dict[str, list], outputs: Outputs, index: int, position: int, at: int
) -> None:
    row = case.rows[index]
    if outputs.adapter_slots is not None:
        outputs.adapter_slots[at] = inputs["adapter_slot"][row.slot]
    if position < row.known:
        outputs.input_ids[at] = inputs["token_ids"][row.slot][position]
    else:
        outputs.input_ids[at] = inputs["draft_token_ids"][index][position - row.known]
    if not case.has_mrope:
        outputs.positions[at] = position
    else:
        spans = inputs["mrope_spans"][row.slot][: inputs["num_mrope_spans"][row.slot]]
        outputs.positions[:, at] = torch.tensor(_position_by_hand(spans, position))
    for g, group in enumerate(case.groups):
        column = position // case.block_size
        sink_blocks = -(-group.sink // case.block_size)
        if group.ring_blocks and column >= sink_blocks:
            column = sink_blocks + (column - sink_blocks) % group.ring_blocks
        block = inputs["block_tables"][row.slot][case.table_offsets[g] + column]
        if block >= 0 and position >= row.computed:
            outputs.slot_mapping[g, at] = block * case.block_size + position % case.block_size


def _position_by_hand(spans: list[list[int]], position: int) -> list[int]:
    """Walk over a request's spans, each grid token by token, up to a position."""
    delta = 0
    for start, end, first, next_delta, width, area, bits in spans:
        if position < start:
            break
        scale = np.array(bits, np.int32).view(np.float32)
        frame = row = column = 0
        for at in range(start, end):
            if at == position:
                return [first + int(np.float32(frame) * scale), first + row, first + column]
            column += 1
            if column == width:
                row, column = row + 1, 0
            if row == area // width:
                frame, row = frame + 1, 0
        delta = next_delta
    return [position + delta] * 3


FEATURES = ("has_drafts", "has_mrope", "has_block_table", "has_adapters")
ALL = dict.fromkeys(FEATURES, True)


@st.composite
def _cases(draw) -> Case:
    """Draw ragged or uniform batches with some, all or none of the optional features."""
    combinations = [
        (),
        FEATURES,
        ("has_block_table",),
        ("has_drafts",),
        FEATURES[:2],
    ]
    features = draw(st.sampled_from(combinations))
    query_len = draw(st.sampled_from([None, None, 1, 3, 8]))
    max_num_reqs = draw(st.integers(1, 8))
    slots = draw(st.permutations(range(max_num_reqs)))[: draw(st.integers(0, max_num_reqs))]
    rows = [_draw_row(draw, slot, query_len, features) for slot in slots]
    for _ in range(draw(st.integers(0, 3))):
        padding = Row(slot=-1, query_len=query_len or draw(st.sampled_from([0, 0, 2])))
        rows.insert(draw(st.integers(0, len(rows))), padding)
    group = st.builds(Group, sink=st.sampled_from([0, 1, 16, 40]), ring_blocks=st.integers(0, 3))
    return Case(
        rows=tuple(rows),
        groups=tuple(draw(st.lists(group, min_size=1, max_size=3))),
        block_size=draw(st.sampled_from([16, 32, 64])),
        max_num_reqs=max_num_reqs,
        spare_tokens=draw(st.sampled_from([0, 1, 30])),
        missing=draw(st.sampled_from([0.0, 0.5])),
        seed=draw(st.integers(0, 1000)),
        uniform=query_len is not None and bool(rows),
        **dict.fromkeys(features, True),
    )


def _draw_row(draw, slot: int, query_len: int | None, features: tuple[str, ...]) -> Row:
    computed = draw(st.sampled_from([0, 1, 15, 16, 17, 31, 32, 63, 88, 94]))
    lengths = [n for n in (0, 1, 1, 2, 8, 15, 17, 64) if computed + n <= 96 + 7]
    query_len = draw(st.sampled_from(lengths)) if query_len is None else query_len
    has_drafts = "has_drafts" in features and draw(st.booleans())
    drafts = draw(st.integers(0, min(7, query_len))) if has_drafts else 0
    return Row(
        slot,
        query_len,
        computed,
        unscheduled=draw(st.sampled_from([0, 0, 3])),
        drafts=drafts,
        spare=draw(st.sampled_from([n for n in (0, 0, 1, 2) if n <= query_len - drafts])),
        stopped=draw(st.sampled_from([0, 0, 0, 1, 2])),
    )


# --- oracle ------------------------------------------------------------------------------------


@given(case=_cases())
def test_the_oracle_equals_a_plain_loop(case):
    _run(reference, case).assert_equal(_by_hand(case))


def test_a_decode_step_in_numbers():
    """Requests in slots 2 and 0, 17 and 3 tokens known, one padding row, two blocks each."""
    outputs = Outputs.poisoned(Case(rows=(Row(2, 1), Row(0, 1), Row(-1, 0))), "cpu")
    integers = {
        "idx_mapping": [2, 0, -1],
        "query_start_loc": [0, 1, 2, 2],
        "num_tokens": [3, 0, 17],
        "num_computed_tokens": [2, 0, 16],
        "stopped": [0, 0, 0],
        "block_tables": [[7, -1], [-1, -1], [5, 9]],
        "table_offset": [0],
        "sink": [0],
        "ring_blocks": [0],
    }
    inputs = {name: torch.tensor(v, dtype=torch.int32) for name, v in integers.items()}
    token_ids = torch.arange(3 * 32, dtype=torch.int32).view(3, 32)
    _gather(reference, {**inputs, "token_ids": token_ids, "block_size": 16, **vars(outputs)})
    assert outputs.input_ids.tolist() == [64 + 16, 2]
    assert outputs.positions.tolist() == [16, 2]
    assert outputs.seq_lens.tolist() == [17, 3, 0]
    assert outputs.slot_mapping.tolist() == [[9 * 16, 7 * 16 + 2]]
    assert outputs.logits_rows.tolist() == [0, 1, -1]


# --- properties --------------------------------------------------------------------------------


@given(case=_cases(), as_on_gpu=st.booleans())
def test_every_output_equals_the_oracle_output(device, case, as_on_gpu):
    with tiles("gather_tokens", as_on_gpu=as_on_gpu):
        _run(kernels, case, device).assert_equal(_run(reference, case))


@given(case=_cases(), spare=st.integers(0, 200))
def test_spare_tokens_change_nothing_else(device, case, spare):
    want, got = (
        _run(kernels, case, device),
        _run(kernels, replace(case, spare_tokens=spare), device),
    )
    n = case.num_tokens
    assert torch.equal(got.input_ids[:n], want.input_ids[:n])
    assert torch.equal(got.slot_mapping[:, :n], want.slot_mapping[:, :n])
    assert torch.equal(got.logits_rows, want.logits_rows)
    assert not got.input_ids[n:].any()
    assert not got.positions[..., n:].any()
    assert bool((got.slot_mapping[:, n:] == -1).all())


# --- edges -------------------------------------------------------------------------------------

RING = (Group(sink=20, ring_blocks=2), Group())


@pytest.mark.parametrize("computed", [0, 15, 16, 31, 32, 33, 47, 48, 80])
def test_a_ring_turns_at_block_boundaries(device, computed):
    case = Case(rows=(Row(3, 16, computed),), groups=RING)
    _run(kernels, case, device).assert_equal(_by_hand(case))


def test_positions_past_the_model_length_are_padding(device):
    case = Case(rows=(Row(0, 8, computed=92), Row(1, 1, computed=4)), groups=RING)
    outputs = _run(kernels, case, device)
    outputs.assert_equal(_by_hand(case))
    assert outputs.positions.tolist() == [92, 93, 94, 95, 0, 0, 0, 0, 4]
    _run(reference, case).assert_equal(_by_hand(case))


def test_more_rows_than_a_program_has_threads(device):
    rows = tuple(Row(slot, 1 + slot % 3, computed=slot % 40) for slot in range(300))
    case = Case(rows=(*rows, Row(-1, 0)), max_num_reqs=300, groups=RING, missing=0.2)
    with tiles("gather_tokens", as_on_gpu=True):
        _run(kernels, case, device).assert_equal(_by_hand(case))


def test_a_long_prefill_spans_programs(device):
    case = Case(rows=(Row(1, 1, 7), Row(0, 1000)), max_model_len=1024, max_num_reqs=2, groups=RING)
    with tiles("gather_tokens", as_on_gpu=True):
        _run(kernels, case, device).assert_equal(_by_hand(case))


def test_a_row_without_tokens_does_not_sample(device):
    case = Case(rows=(Row(2, 1, 3), Row(0, 0, 5), Row(1, 2, 0)))
    outputs = _run(kernels, case, device)
    outputs.assert_equal(_by_hand(case))
    assert outputs.seq_lens.tolist() == [4, 5, 2]
    assert outputs.logits_rows.tolist() == [0, -1, 2]


@pytest.mark.parametrize("spare_tokens", [0, 5])
def test_no_requests(device, spare_tokens):
    for features in ({}, ALL):
        case = Case(rows=(), spare_tokens=spare_tokens, **features)
        _run(kernels, case, device).assert_equal(_by_hand(case))


def test_only_padding_rows(device):
    case = Case(rows=(Row(-1, 0), Row(-1, 3)), spare_tokens=2)
    _run(kernels, case, device).assert_equal(_by_hand(case))


def test_slots_of_the_largest_block_id_do_not_overflow(device):
    case = Case(rows=(Row(0, 1, 5),), block_size=128)
    arguments = {name: _moved(value, device) for name, value in case.arguments().items()}
    arguments["block_tables"].fill_(2**31 - 1)
    outputs = Outputs.poisoned(case, device)
    _gather(kernels, arguments | vars(outputs))
    assert outputs.slot_mapping.tolist() == [[(2**31 - 1) * 128 + 5]]


def test_a_decode_step_with_drafts_in_numbers(device):
    """20 known tokens and two drafts, 7 known and one draft, a stopped request; 3 tokens a row.

    The second row begins with its last computed token, which is not written again.
    """
    rows = (
        Row(1, 3, computed=19, drafts=2),
        Row(0, 3, computed=6, drafts=1, spare=1),
        Row(2, 3, computed=9, drafts=2, stopped=1),
    )
    case = Case(rows=rows, uniform=True, has_drafts=True)
    outputs = _run(kernels, case, device)
    inputs = case.inputs()
    token_ids, drafts = inputs["token_ids"], inputs["draft_token_ids"]
    want = [token_ids[1, 19], *drafts[0], *token_ids[0, 5:7], drafts[1, 0], 0, 0, 0]
    assert outputs.input_ids.tolist() == [int(token) for token in want]
    assert outputs.positions.tolist() == [19, 20, 21, 5, 6, 7, 0, 0, 0]
    assert outputs.seq_lens.tolist() == [22, 8, 0]
    assert outputs.logits_rows.tolist() == [0, 4, -1]
    assert outputs.slot_mapping[0, 3].tolist() == -1
    assert min(outputs.slot_mapping[0, 4:6].tolist()) >= 0
    assert outputs.slot_mapping[0, 6:].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("computed", [0, 15, 16, 80, 90, 95])
def test_the_block_table_has_the_live_columns(device, computed):
    """Positions from 96 on, drafts included, have no column."""
    rows = (
        Row(3, 8, computed, drafts=7),
        Row(-1, 8),
        Row(2, 8, computed, stopped=2),
        Row(0, 8, computed),
    )
    for groups in (RING, (*RING, Group(sink=40, ring_blocks=3))):
        case = Case(rows=rows, groups=groups, uniform=True, missing=0.3, **ALL)
        with tiles("gather_tokens", as_on_gpu=True):
            _run(kernels, case, device).assert_equal(_by_hand(case))


def test_a_long_context_takes_several_tiles_of_columns(device):
    rows = (Row(1, 1, computed=2500), Row(0, 1, computed=70), Row(2, 40, computed=1024))
    case = Case(rows=rows, max_model_len=4096, groups=RING, block_size=1, has_block_table=True)
    for as_on_gpu in (False, True):
        with tiles("gather_tokens", as_on_gpu=as_on_gpu):
            _run(kernels, case, device).assert_equal(_by_hand(case))


@pytest.mark.parametrize("uniform", [False, True])
def test_hundreds_of_rows_with_all_features_equal_the_loop(device, uniform):
    rows = tuple(
        Row(
            slot,
            query_len=4 if uniform else 1 + slot % 6,
            computed=slot % 90,
            drafts=slot % 4 if uniform else slot % 6,
            stopped=slot % 7 == 3,
        )
        for slot in range(299)
    )
    rows = (*rows[:100], Row(-1, 4), *rows[100:])
    case = Case(rows, groups=RING, max_num_reqs=300, missing=0.2, uniform=uniform, **ALL)
    with tiles("gather_tokens", as_on_gpu=True):
        _run(kernels, case, device).assert_equal(_by_hand(case))


def test_query_len_overrides_query_start_loc(device):
    case = Case(rows=(Row(1, 2, 5), Row(0, 2, 9)), uniform=True)
    outputs = Outputs.poisoned(case, device)
    arguments = {name: _moved(value, device) for name, value in case.arguments().items()}
    arguments["query_start_loc"] = torch.full((3,), POISON, dtype=torch.int32, device=device)
    _gather(kernels, arguments | vars(outputs))
    outputs.assert_equal(_by_hand(case))


def test_a_video_and_the_text_around_it_in_numbers(device):
    """From 2 on, two frames of 2 x 3 tokens, 2.5 positions apart; text goes on at 2 + 4 = 6."""
    scale = int(np.float32(2.5).view(np.int32))
    spans = [[2, 14, 2, -8, 3, 6, scale], [16, 16, 0, -5, 1, 1, 0]]  # the output goes on at 11
    case = Case(rows=(Row(0, 18),), max_num_reqs=1, has_mrope=True)
    arguments = {name: _moved(value, device) for name, value in case.arguments().items()}
    arguments["mrope_spans"][0, :2] = torch.tensor(spans, dtype=torch.int32)
    arguments["num_mrope_spans"][0] = 2
    outputs = Outputs.poisoned(case, device)
    _gather(kernels, arguments | vars(outputs))
    assert outputs.positions.tolist() == [
        [0, 1, *[2] * 6, *[4] * 6, 6, 7, 11, 12],
        [0, 1, *[2, 2, 2, 3, 3, 3] * 2, 6, 7, 11, 12],
        [0, 1, *[2, 3, 4] * 4, 6, 7, 11, 12],
    ]


def test_configurations():
    assert GatherTokensConfig.default_for().tile_tokens == 128
    assert GatherTokensConfig.for_interpreter(1000, 3).tile_tokens == 1024
    assert GatherTokensConfig.for_interpreter(1000, 3).tile_rows == 4
    assert GatherTokensConfig.for_interpreter(2**20, 2**12).tile_tokens == 2**16
    assert GatherTokensConfig.for_interpreter(2**20, 2**12).tile_rows == 2**10


# --- errors ------------------------------------------------------------------------------------

INT32 = torch.zeros(2, dtype=torch.int32)
SPANS = torch.zeros(5, 4, MROPE_SPAN_WORDS, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"idx_mapping": INT32.long()}, TypeError, r"idx_mapping: expected dtype torch\.int32"),
        (
            {"query_start_loc": INT32},
            ValueError,
            r"query_start_loc: expected shape \[3\], got \[2",
        ),
        ({"token_ids": INT32}, ValueError, r"token_ids: expected shape \[any, any\], got \[2\]"),
        ({"num_tokens": INT32}, ValueError, r"num_tokens: expected shape \[5\], got \[2\]"),
        ({"num_computed_tokens": INT32}, ValueError, r"num_computed_tokens: expected shape \[5\]"),
        ({"block_tables": INT32[None]}, ValueError, r"block_tables: expected shape \[5, any\]"),
        ({"block_size": 24}, ValueError, r"block_size: expected a power of two, got 24"),
        ({"sink": INT32}, ValueError, r"tables\.sink: expected shape \[1\], got \[2\]"),
        (
            {"ring_blocks": INT32[:1].long()},
            TypeError,
            r"tables\.ring_blocks: expected dtype torch\.int32, got torch\.int64",
        ),
        (
            {"table_offset": INT32[None]},
            ValueError,
            r"tables\.table_offset: expected shape \[any\], got \[1, 2\]",
        ),
        ({"input_ids": INT32}, TypeError, r"input_ids: expected dtype torch\.int64"),
        ({"positions": INT32.long()}, ValueError, r"positions: expected shape \[3\], got \[2\]"),
        ({"seq_lens": INT32.long()}, TypeError, r"seq_lens: expected dtype torch\.int32"),
        ({"logits_rows": INT32}, TypeError, r"logits_rows: expected dtype torch\.int64"),
        (
            {"slot_mapping": INT32.long()[None]},
            ValueError,
            r"slot_mapping: expected shape \[1, 3\], got \[1, 2\]",
        ),
        ({"query_start_loc": None}, ValueError, r"query_start_loc: expected a tensor where quer"),
        ({"query_len": 0}, ValueError, r"query_len: expected None or at least 1, got 0"),
        ({"stopped": INT32}, ValueError, r"stopped: expected shape \[5\], got \[2\]"),
        ({"num_draft_tokens": INT32}, ValueError, r"num_draft_tokens: expected both or neither"),
        (
            {"draft_token_ids": INT32[:, None], "num_draft_tokens": INT32[:1]},
            ValueError,
            r"num_draft_tokens: expected shape \[2\], got \[1\]",
        ),
        (
            {"draft_token_ids": INT32.new_zeros(3, 2).T, "num_draft_tokens": INT32},
            ValueError,
            r"draft_token_ids: expected unit last stride",
        ),
        (
            {"draft_token_ids": INT32.new_zeros(2, 8), "num_draft_tokens": INT32},
            ValueError,
            r"draft_token_ids: expected at most 7 columns, got 8",
        ),
        ({"num_mrope_spans": INT32}, ValueError, r"num_mrope_spans: expected both or neither"),
        (
            {"mrope_spans": SPANS},
            ValueError,
            r"num_mrope_spans: expected both or neither, got one",
        ),
        (
            {"mrope_spans": SPANS, "num_mrope_spans": INT32},
            ValueError,
            r"num_mrope_spans: expected shape \[5\], got \[2\]",
        ),
        (
            {"mrope_spans": INT32, "num_mrope_spans": INT32},
            ValueError,
            r"mrope_spans: expected shape \[5, any, 7\], got \[2\]",
        ),
        (
            {"mrope_spans": SPANS.new_zeros(5, 2, 8)[..., :7], "num_mrope_spans": INT32},
            ValueError,
            r"mrope_spans: expected a span every 7 words, got 8",
        ),
        (
            {"mrope_spans": SPANS, "num_mrope_spans": INT32.new_zeros(5)},
            ValueError,
            r"positions: expected shape \[3, 3\], got \[3\]",
        ),
        ({"adapter_slots": INT32}, TypeError, r"adapter_slot: expected a torch.Tensor, got None"),
        (
            {"adapter_slots": INT32, "adapter_slot": INT32.new_zeros(5)},
            ValueError,
            r"adapter_slots: expected shape \[3\], got \[2\]",
        ),
        ({"block_table": INT32[None]}, ValueError, r"block_table: expected shape \[2, 7\], got"),
        (
            dict.fromkeys(["table_offset", "sink", "ring_blocks"], INT32.new_zeros(0)),
            ValueError,
            r"tables\.table_offset: expected at least one group, got none",
        ),
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    case = Case(rows=(Row(0, 1), Row(1, 2)))
    arguments = {**case.arguments(), **vars(Outputs.poisoned(case, device)), **change}
    arguments = {name: _moved(value, device) for name, value in arguments.items()}
    with pytest.raises(error, match=message):
        _gather(kernels, arguments)
