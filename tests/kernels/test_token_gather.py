"""Token gather: every output, whole buffers, against a loop over requests and tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.token_gather import GatherTokensConfig
from tests.kernels.elementwise import tiles

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

POISON = -999
"""What outputs hold before a launch: every element must be overwritten."""


@dataclass(frozen=True)
class Row:
    """One batch row: a slot (-1 = padding), and how the request in it stands."""

    slot: int
    query_len: int
    computed: int = 0
    unscheduled: int = 0
    """Known tokens that this step does not reach; > 0 is an unfinished prefill."""


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
        return [1 + sum(widths[:i]) for i in range(len(widths))]  # column 0 belongs to nobody

    def inputs(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        known, computed = [POISON] * self.max_num_reqs, [POISON] * self.max_num_reqs
        for row in self.rows:
            if row.slot >= 0:
                computed[row.slot] = row.computed
                known[row.slot] = row.computed + row.query_len + row.unscheduled
        width = self.table_offsets[-1] + self.segment_width(self.groups[-1])
        table = torch.randint(1, 10_000, (self.max_num_reqs, width + 3), generator=generator)
        table[torch.rand(table.shape, generator=generator) < self.missing] = -1
        shape = (self.max_num_reqs, 8 + self.max_model_len + 8)
        tokens = torch.randint(50_000, shape, generator=generator)
        lengths = torch.tensor([0] + [row.query_len for row in self.rows])
        integers = {
            "idx_mapping": [row.slot for row in self.rows],
            "query_start_loc": lengths.cumsum(0).tolist(),
            "num_tokens": known,
            "num_computed_tokens": computed,
            "group_table_offset": self.table_offsets,
            "group_sink": [group.sink for group in self.groups],
            "group_ring_blocks": [group.ring_blocks for group in self.groups],
        }
        return {
            **{name: torch.tensor(v, dtype=torch.int32) for name, v in integers.items()},
            "token_ids": tokens.int()[:, 8 : 8 + self.max_model_len],
            "block_tables": table.int()[:, :width],
        }


@dataclass
class Outputs:
    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    logits_rows: torch.Tensor

    @classmethod
    def poisoned(cls, case: Case, device) -> Outputs:
        num_rows, num_padded = len(case.rows), case.num_tokens + case.spare_tokens

        def full(*shape: int, dtype=torch.int64):
            return torch.full(shape, POISON, dtype=dtype, device=device)

        return cls(
            input_ids=full(num_padded),
            positions=full(num_padded),
            seq_lens=full(num_rows, dtype=torch.int32),
            slot_mapping=full(len(case.groups), num_padded + 8)[:, :num_padded],
            logits_rows=full(num_rows),
        )

    def assert_equal(self, other: Outputs) -> None:
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            assert mine.dtype == theirs.dtype
            assert mine.tolist() == theirs.tolist(), field.name


def _run(ops, case: Case, device="cpu") -> Outputs:
    outputs = Outputs.poisoned(case, device)
    inputs = {name: _moved(tensor, device) for name, tensor in case.inputs().items()}
    ops.gather_tokens(**inputs, block_size=case.block_size, **vars(outputs))
    return outputs


def _moved(tensor: torch.Tensor, device) -> torch.Tensor:
    """Copy to ``device`` and keep the strides."""
    storage = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return storage.copy_(tensor)


def _by_hand(case: Case) -> Outputs:
    """Follow the contract token by token."""
    inputs = {name: tensor.tolist() for name, tensor in case.inputs().items()}
    outputs = Outputs.poisoned(case, "cpu")
    outputs.input_ids.zero_(), outputs.positions.zero_(), outputs.slot_mapping.fill_(-1)
    token = 0
    for index, row in enumerate(case.rows):
        start, token = token, token + row.query_len
        is_request = row.slot >= 0
        outputs.seq_lens[index] = row.computed + row.query_len if is_request else 0
        samples = is_request and row.query_len > 0 and row.unscheduled == 0
        outputs.logits_rows[index] = token - 1 if samples else -1
        for position in range(row.computed, row.computed + row.query_len) if is_request else ():
            if position >= case.max_model_len:
                continue
            at = start + position - row.computed
            outputs.input_ids[at] = inputs["token_ids"][row.slot][position]
            outputs.positions[at] = position
            for g, group in enumerate(case.groups):
                column = position // case.block_size
                sink_blocks = -(-group.sink // case.block_size)
                if group.ring_blocks and column >= sink_blocks:
                    column = sink_blocks + (column - sink_blocks) % group.ring_blocks
                block = inputs["block_tables"][row.slot][case.table_offsets[g] + column]
                if block >= 0:
                    offset = position % case.block_size
                    outputs.slot_mapping[g, at] = block * case.block_size + offset
    return outputs


@st.composite
def _cases(draw) -> Case:
    max_num_reqs = draw(st.integers(1, 8))
    slots = draw(st.permutations(range(max_num_reqs)))[: draw(st.integers(0, max_num_reqs))]
    rows = [_draw_row(draw, slot) for slot in slots]
    for _ in range(draw(st.integers(0, 3))):
        padding = Row(slot=-1, query_len=draw(st.sampled_from([0, 0, 2])))
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
    )


def _draw_row(draw, slot: int) -> Row:
    computed = draw(st.sampled_from([0, 1, 15, 16, 17, 31, 32, 63, 94]))
    query_len = draw(st.sampled_from([n for n in (0, 1, 1, 2, 15, 17, 64) if computed + n <= 96]))
    return Row(slot, query_len, computed, unscheduled=draw(st.sampled_from([0, 0, 3])))


# --- oracle ------------------------------------------------------------------------------------


@given(case=_cases())
def test_the_oracle_is_the_loop(case):
    _run(reference, case).assert_equal(_by_hand(case))


def test_a_decode_step_in_numbers():
    """Requests in slots 2 and 0, 17 and 3 tokens known, one padding row, two blocks each."""
    outputs = Outputs.poisoned(Case(rows=(Row(2, 1), Row(0, 1), Row(-1, 0))), "cpu")
    reference.gather_tokens(
        torch.tensor([2, 0, -1], dtype=torch.int32),
        torch.tensor([0, 1, 2, 2], dtype=torch.int32),
        torch.arange(3 * 32, dtype=torch.int32).view(3, 32),
        torch.tensor([3, 0, 17], dtype=torch.int32),
        torch.tensor([2, 0, 16], dtype=torch.int32),
        torch.tensor([[7, -1], [-1, -1], [5, 9]], dtype=torch.int32),
        block_size=16,
        group_table_offset=torch.zeros(1, dtype=torch.int32),
        group_sink=torch.zeros(1, dtype=torch.int32),
        group_ring_blocks=torch.zeros(1, dtype=torch.int32),
        **vars(outputs),
    )
    assert outputs.input_ids.tolist() == [64 + 16, 2]
    assert outputs.positions.tolist() == [16, 2]
    assert outputs.seq_lens.tolist() == [17, 3, 0]
    assert outputs.slot_mapping.tolist() == [[9 * 16, 7 * 16 + 2]]
    assert outputs.logits_rows.tolist() == [0, 1, -1]


# --- properties --------------------------------------------------------------------------------


@given(case=_cases(), as_on_gpu=st.booleans())
def test_every_output_equals_the_oracles(device, case, as_on_gpu):
    with tiles("token_gather", as_on_gpu=as_on_gpu):
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
    assert not got.positions[n:].any()
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
    with tiles("token_gather", as_on_gpu=True):
        _run(kernels, case, device).assert_equal(_by_hand(case))


def test_a_long_prefill_spans_programs(device):
    case = Case(rows=(Row(1, 1, 7), Row(0, 1000)), max_model_len=1024, max_num_reqs=2, groups=RING)
    with tiles("token_gather", as_on_gpu=True):
        _run(kernels, case, device).assert_equal(_by_hand(case))


def test_a_row_without_tokens_does_not_sample(device):
    case = Case(rows=(Row(2, 1, 3), Row(0, 0, 5), Row(1, 2, 0)))
    outputs = _run(kernels, case, device)
    outputs.assert_equal(_by_hand(case))
    assert outputs.seq_lens.tolist() == [4, 5, 2]
    assert outputs.logits_rows.tolist() == [0, -1, 2]


@pytest.mark.parametrize("spare_tokens", [0, 5])
def test_no_requests(device, spare_tokens):
    case = Case(rows=(), spare_tokens=spare_tokens)
    _run(kernels, case, device).assert_equal(_by_hand(case))


def test_only_padding_rows(device):
    case = Case(rows=(Row(-1, 0), Row(-1, 3)), spare_tokens=2)
    _run(kernels, case, device).assert_equal(_by_hand(case))


def test_the_largest_block_id_needs_64_bits(device):
    case = Case(rows=(Row(0, 1, 5),), block_size=128)
    inputs = {name: tensor.to(device) for name, tensor in case.inputs().items()}
    inputs["block_tables"].fill_(2**31 - 1)
    outputs = Outputs.poisoned(case, device)
    kernels.gather_tokens(**inputs, block_size=128, **vars(outputs))
    assert outputs.slot_mapping.tolist() == [[(2**31 - 1) * 128 + 5]]


def test_configurations():
    assert GatherTokensConfig.default_for().tile_tokens == 128
    assert GatherTokensConfig.for_interpreter(1000).tile_tokens == 1024
    assert GatherTokensConfig.for_interpreter(2**20).tile_tokens == 2**16


# --- errors ------------------------------------------------------------------------------------

INT32 = torch.zeros(2, dtype=torch.int32)


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
        ({"group_sink": INT32}, ValueError, r"group_sink: expected shape \[1\], got \[2\]"),
        (
            {"group_ring_blocks": INT32[:1].long()},
            TypeError,
            r"group_ring_blocks: expected dtype torch\.int32, got torch\.int64",
        ),
        (
            {"group_table_offset": INT32[None]},
            ValueError,
            r"group_table_offset: expected shape \[any\], got \[1, 2\]",
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
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    case = Case(rows=(Row(0, 1), Row(1, 2)))
    arguments = {**case.inputs(), **vars(Outputs.poisoned(case, device)), "block_size": 16}
    arguments = {
        name: _moved(value, device) if isinstance(value, torch.Tensor) else value
        for name, value in (arguments | change).items()
    }
    with pytest.raises(error, match=message):
        kernels.gather_tokens(**arguments)
