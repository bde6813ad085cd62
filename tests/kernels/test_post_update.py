"""Post-update: the whole state and both outputs, against a loop over rows and tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.step.contracts import (
    FAILED,
    LENGTH,
    RUNNING,
    STOP_SEQUENCE,
    STOP_TOKEN,
    AppendedTokens,
    RequestSlots,
)
from mrv1.kernels.step.post_update import PostUpdateConfig
from tests.kernels.elementwise import bundled, tiles, with_strides

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

POISON = -999
"""The value of outputs, and of state that must not change, before a launch."""
VOCAB = 12
"""So few tokens that stop tokens, and a token twice in a row's tokens, are common."""
MAX_MODEL_LEN = 40


@dataclass(frozen=True)
class Row:
    """One batch row: a slot (-1 = padding), the progress of its request, its sampled tokens."""

    slot: int
    tokens: tuple[int, ...] = ()
    """Sampled tokens; () = the row does not sample."""
    query_len: int = 1
    known: int = 5
    max_total: int = MAX_MODEL_LEN
    stop_tokens: tuple[int, ...] = ()
    stopped: int = RUNNING
    sequences: tuple[tuple[int, ...], ...] = ()
    """Stop sequences."""
    prompt_len: int = 0
    min_total: int = 0


@dataclass(frozen=True)
class Case:
    rows: tuple[Row, ...]
    num_columns: int = 1
    max_num_reqs: int = 5
    max_stop_tokens: int = 3
    uniform: bool = False
    """Rows are given by query_len alone."""
    has_num_sampled: bool = True
    max_sequences: int | None = 4
    """None = the launch is given no stop sequences."""
    max_len: int = 5
    """Tokens of a stop sequence."""

    def rows_by_slot(self) -> list[Row | None]:
        by_slot = {row.slot: row for row in self.rows}
        return [by_slot.get(slot) for slot in range(self.max_num_reqs)]

    def computed(self, row: Row) -> int:
        """Return the row's computed tokens: its query ends at the newest known token or later."""
        return max(row.known - row.query_len, 0)


Arguments = dict[str, torch.Tensor | int | None]
STATE = ("token_ids", "num_tokens", "num_computed_tokens", "stopped")
WRITTEN = (*STATE, "output", "num_output")


def _history(slot: int) -> list[int]:
    return [(slot + i * i // 3) % VOCAB for i in range(MAX_MODEL_LEN)]


def _padded(values: tuple[int, ...], size: int, padding: int) -> list[int]:
    return [*values, *[padding] * (size - len(values))]


def _arguments(case: Case, device="cpu") -> Arguments:
    """Return a launch's arguments: matrices as views of wider rows, outputs full of poison."""

    def tensor(values: list, dtype=torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def matrix(rows: list[list[int]], num_columns: int, dtype=torch.int32) -> torch.Tensor:
        wide = torch.full((len(rows), num_columns + 3), POISON, dtype=dtype, device=device)
        view = wide[:, 1 : 1 + num_columns]
        return view.copy_(tensor(rows, dtype).view(len(rows), num_columns))

    slots, num_columns = case.rows_by_slot(), case.num_columns
    # spare tokens follow the sampled tokens: valid ids that must not be appended
    sampled = [_padded(row.tokens, num_columns, 7) for row in case.rows]
    stop_tokens = [
        _padded(row.stop_tokens if row else (7, 8), case.max_stop_tokens, -1) for row in slots
    ]
    history = [_history(slot) for slot in range(len(slots))]
    starts = [sum(row.query_len for row in case.rows[:i]) for i in range(len(case.rows) + 1)]
    return {
        "idx_mapping": tensor([row.slot for row in case.rows]),
        "query_start_loc": None if case.uniform else tensor(starts),
        "logits_rows": tensor([3 if row.tokens else -1 for row in case.rows], torch.int64),
        "tokens": matrix(sampled, num_columns, torch.int64),
        "token_ids": matrix(history, MAX_MODEL_LEN),
        "num_tokens": tensor([row.known if row else POISON for row in slots]),
        "num_computed_tokens": tensor([case.computed(row) if row else POISON for row in slots]),
        "max_total_tokens": tensor([row.max_total if row else POISON for row in slots]),
        "stop_token_ids": matrix(stop_tokens, case.max_stop_tokens),
        "stopped": tensor([row.stopped if row else RUNNING for row in slots]),
        "output": matrix([[POISON] * num_columns for _ in case.rows], num_columns, torch.int64),
        "num_output": tensor([POISON] * len(case.rows)),
        "query_len": case.rows[0].query_len if case.uniform else None,
        "num_sampled": tensor([len(row.tokens) for row in case.rows])
        if case.has_num_sampled
        else None,
        **_stop_sequences(case, device),
    }


def _stop_sequences(case: Case, device) -> Arguments:
    """Return each slot's stop sequences, followed by sequences that are not counted."""
    if case.max_sequences is None:
        return {}
    slots = case.rows_by_slot()
    tokens = torch.zeros(
        len(slots), case.max_sequences + 1, case.max_len, dtype=torch.int32, device=device
    )
    lens = torch.ones(len(slots), case.max_sequences + 2, dtype=torch.int32, device=device)
    for slot, row in enumerate(slots):
        for i, sequence in enumerate(row.sequences[: case.max_sequences + 1] if row else ()):
            tokens[slot, i] = torch.tensor(_padded(sequence[: case.max_len], case.max_len, 7))
            lens[slot, i] = len(sequence)
    numbers = {
        "num_stop_sequences": [len(row.sequences) if row else 99 for row in slots],
        "prompt_len": [row.prompt_len if row else 0 for row in slots],
        "min_total_tokens": [row.min_total if row else 0 for row in slots],
    }
    return {
        "stop_sequences": tokens[:, : case.max_sequences],
        "stop_sequence_lens": lens[:, : case.max_sequences],
        **{name: torch.tensor(n, dtype=torch.int32, device=device) for name, n in numbers.items()},
    }


def _whole(arguments: Arguments) -> dict[str, list[int]]:
    """Return every written buffer, with the elements between its rows."""
    return {
        name: arguments[name].new_empty(0).set_(arguments[name].untyped_storage()).tolist()
        for name in WRITTEN
    }


def _update(ops, arguments: Arguments) -> None:
    ops.post_update(**bundled(arguments, slots=RequestSlots, out=AppendedTokens))


def _run(ops, case: Case, device="cpu") -> dict[str, list[int]]:
    arguments = _arguments(case, device)
    _update(ops, arguments)
    return _whole(arguments)


def _by_hand(case: Case) -> dict[str, list[int]]:
    """Follow the contract, token by token."""
    arguments = _arguments(case)
    state = {name: arguments[name] for name in WRITTEN}
    for index, row in enumerate(case.rows):
        appended, code, failure = [], RUNNING, 0
        if row.slot >= 0 and row.stopped == RUNNING:
            for token in row.tokens:
                if code != RUNNING:
                    break
                if token < 0:
                    code, failure = FAILED, token
                    continue
                appended.append(token)
                if token in row.stop_tokens:
                    code = STOP_TOKEN
                elif _ends_with_sequence(case, row, appended):
                    code = STOP_SEQUENCE
                elif row.known + len(appended) >= row.max_total:
                    code = LENGTH
            num_tokens = row.known + len(appended)
            advanced = case.computed(row) + row.query_len
            state["num_tokens"][row.slot] = num_tokens
            state["num_computed_tokens"][row.slot] = num_tokens - 1 if row.tokens else advanced
            state["stopped"][row.slot] = code
            for i, token in enumerate(appended):
                state["token_ids"][row.slot, row.known + i] = token
        state["num_output"][index] = failure if code == FAILED else len(appended)
        state["output"][index] = torch.tensor(_padded(tuple(appended), case.num_columns, -1))
    return _whole(arguments)


def _ends_with_sequence(case: Case, row: Row, appended: list[int]) -> bool:
    output = [*_history(row.slot)[: row.known], *appended][row.prompt_len :]
    total = row.known + len(appended)
    return (
        case.max_sequences is not None
        and total >= row.min_total
        and any(
            len(s) <= case.max_len and tuple(output[-len(s) :]) == s
            for s in row.sequences[: case.max_sequences]
        )
    )


@st.composite
def _cases(draw) -> Case:
    num_columns = draw(st.sampled_from([1, 1, 2, 3, 5, 8]))
    max_num_reqs = draw(st.integers(1, 8))
    query_len = draw(st.sampled_from([None, 1, num_columns]))
    slots = draw(st.permutations(range(max_num_reqs)))[: draw(st.integers(0, max_num_reqs))]
    rows = [_draw_row(draw, slot, num_columns, query_len) for slot in slots]
    for _ in range(draw(st.integers(0, 3))):
        # a padding row may carry any tokens
        padding = _draw_row(draw, -1, num_columns, query_len)
        rows.insert(draw(st.integers(0, len(rows))), padding)
    return Case(
        rows=tuple(rows),
        num_columns=num_columns,
        max_num_reqs=max_num_reqs,
        max_stop_tokens=draw(st.sampled_from([2, 5])),
        uniform=query_len is not None and bool(rows),
        has_num_sampled=any(len(row.tokens) > 1 for row in rows) or draw(st.booleans()),
        max_sequences=draw(st.sampled_from([None, 0, 2, 4])),
        max_len=draw(st.sampled_from([1, 3, 8])),
    )


def _draw_row(draw, slot: int, num_columns: int, query_len: int | None) -> Row:
    token = st.sampled_from([0, 1, 2, 3, 4, 5, 9, 11, -1, -2])
    known = draw(st.sampled_from([1, 2, 20, MAX_MODEL_LEN - 8, MAX_MODEL_LEN - 1]))
    left = draw(st.sampled_from([n for n in (1, 2, 5, 8) if known + n <= MAX_MODEL_LEN]))
    tokens = tuple(draw(st.lists(token, max_size=num_columns)))
    return Row(
        slot,
        tokens=tokens,
        query_len=draw(st.sampled_from([0, 1, 2, 17])) if query_len is None else query_len,
        known=known,
        max_total=known + left,
        stop_tokens=draw(st.sampled_from([(), (), (2,), (11, 0)])),
        stopped=draw(st.sampled_from([RUNNING, RUNNING, RUNNING, STOP_TOKEN, LENGTH, FAILED])),
        sequences=_draw_sequences(draw, [*_history(slot)[:known], *tokens], len(tokens)),
        prompt_len=draw(st.sampled_from([0, max(known - 2, 0), known])),
        min_total=draw(st.sampled_from([0, 0, known + 2])),
    )


def _draw_sequences(draw, total: list[int], num_new: int) -> tuple[tuple[int, ...], ...]:
    """Draw sequences that end among the new tokens, some of them with one token changed."""
    sequences = []
    for _ in range(draw(st.sampled_from([0, 0, 1, 3, 5]))):
        end = len(total) - draw(st.integers(0, max(num_new - 1, 0)))
        sequence = total[max(end - draw(st.integers(1, 9)), 0) : end]
        if draw(st.booleans()):
            sequence[draw(st.integers(0, len(sequence) - 1))] = draw(st.integers(0, VOCAB - 1))
        sequences.append(tuple(sequence))
    return tuple(sequences)


# --- oracle ------------------------------------------------------------------------------------


@given(case=_cases())
def test_the_oracle_equals_a_plain_loop(case):
    assert _run(reference, case) == _by_hand(case)


# --- properties --------------------------------------------------------------------------------


@given(case=_cases(), as_on_gpu=st.booleans())
def test_state_and_outputs_equal_the_oracle(device, case, as_on_gpu):
    with tiles("post_update", as_on_gpu=as_on_gpu):
        assert _run(kernels, case, device) == _run(reference, case)


@given(case=_cases(), ring_slot=st.integers(0, 2))
def test_outputs_are_written_to_the_ring_slot_of_the_device_tensor(device, case, ring_slot):
    """A device tensor selects one of three outputs; the other two keep their poison."""
    plain, ringed = _arguments(case, device), _arguments(case, device)
    num_rows, num_columns = len(case.rows), case.num_columns
    ring = {
        "output": torch.full(
            (3, num_rows + 2, num_columns + 1), POISON, dtype=torch.int64, device=device
        ),
        "num_output": torch.full((3, num_rows + 5), POISON, dtype=torch.int32, device=device),
    }
    ringed["output"] = ring["output"][:, :num_rows, :num_columns]
    ringed["num_output"] = ring["num_output"][:, :num_rows]
    expected = {name: buffer.clone() for name, buffer in ring.items()}
    ringed["ring_slot"] = torch.tensor([ring_slot], dtype=torch.int32, device=device)
    _update(reference, plain)
    _update(kernels, ringed)
    expected["output"][ring_slot, :num_rows, :num_columns] = plain["output"]
    expected["num_output"][ring_slot, :num_rows] = plain["num_output"]
    for name, buffer in ring.items():
        assert torch.equal(buffer, expected[name])
    for name in STATE:
        assert torch.equal(plain[name], ringed[name])


# --- edges -------------------------------------------------------------------------------------


def _state_of(row: Row, device, num_columns: int = 8) -> tuple[list[int], int, dict[str, int]]:
    """Run one row in slot 2; return its output, num_output and per-slot state."""
    arguments = _arguments(Case(rows=(row,), num_columns=num_columns), device)
    _update(kernels, arguments)
    state = {
        name: int(arguments[name][2]) for name in ("num_tokens", "num_computed_tokens", "stopped")
    }
    return arguments["output"][0].tolist(), int(arguments["num_output"]), state


def test_accepted_drafts_are_appended(device):
    """One known token and four drafts in the query, of which two are accepted."""
    row = Row(2, tokens=(4, 5, 6), query_len=5, known=10)
    output, num_output, state = _state_of(row, device)
    assert output == [4, 5, 6, -1, -1, -1, -1, -1]
    assert num_output == 3
    assert state == {"num_tokens": 13, "num_computed_tokens": 12, "stopped": RUNNING}


def test_no_token_is_appended_after_a_stop_token(device):
    row = Row(2, tokens=(4, 5, 5, 6), query_len=4, known=10, stop_tokens=(9, 5))
    output, num_output, state = _state_of(row, device)
    assert output[:4] == [4, 5, -1, -1]
    assert num_output == 2
    assert state == {"num_tokens": 12, "num_computed_tokens": 11, "stopped": STOP_TOKEN}


def test_a_stop_token_at_the_maximum_length_stops_as_a_stop_token(device):
    row = Row(2, tokens=(4, 5, 6), query_len=3, known=10, max_total=12, stop_tokens=(5,))
    assert _state_of(row, device)[2]["stopped"] == STOP_TOKEN


def test_no_token_is_appended_after_the_maximum_length(device):
    row = Row(2, tokens=(4, 5, 6), query_len=3, known=38, max_total=MAX_MODEL_LEN)
    output, num_output, state = _state_of(row, device)
    assert output[:3] == [4, 5, -1]
    assert num_output == 2
    assert state == {"num_tokens": 40, "num_computed_tokens": 39, "stopped": LENGTH}


def test_a_stop_sequence_may_end_among_accepted_drafts(device):
    """Two of the sequence's tokens are known, two are sampled; later drafts are dropped."""
    history = _history(2)[8:10]
    row = Row(
        2,
        tokens=(4, 5, 6, 3),
        query_len=4,
        known=10,
        prompt_len=8,
        min_total=12,
        sequences=((9, 9), (*history, 4, 5), (6,)),
    )
    output, num_output, state = _state_of(row, device)
    assert output[:4] == [4, 5, -1, -1]
    assert num_output == 2
    assert state == {"num_tokens": 12, "num_computed_tokens": 11, "stopped": STOP_SEQUENCE}


@pytest.mark.parametrize(("prompt_len", "min_total"), [(9, 0), (8, 13)])
def test_a_stop_sequence_in_the_prompt_or_before_the_minimum_ends_nothing(
    device, prompt_len, min_total
):
    row = Row(
        2,
        tokens=(4, 5, 6),
        query_len=3,
        known=10,
        prompt_len=prompt_len,
        min_total=min_total,
        sequences=((*_history(2)[8:10], 4, 5),),
    )
    assert _state_of(row, device)[2]["stopped"] == RUNNING


def test_uncounted_stop_sequences_end_nothing(device):
    """Row 1 has two sequences, row 0 none: its uncounted entries match the end of its output."""
    rows = (Row(0, tokens=(0,), known=9), Row(1, tokens=(3,), sequences=((9,), (9, 9))))
    assert _run(kernels, Case(rows=rows), device)["stopped"][:2] == [RUNNING, RUNNING]


def test_a_stop_sequence_longer_than_max_len_ends_nothing(device):
    """A kernel that read past max_len would find the tokens that the row's output ends with."""
    row = Row(0, tokens=(5, 6, 7), query_len=3, known=9, sequences=((5, 6, 7), (7, 9)))
    case = Case(rows=(row,), num_columns=3, max_len=2)
    for ops in (kernels, reference):
        assert _run(ops, case, device)["stopped"][0] == RUNNING


@pytest.mark.parametrize("failure", [-1, -2])
@pytest.mark.parametrize("behind", [(), (3,)])
def test_a_row_without_a_token_fails(device, behind, failure):
    output, num_output, state = _state_of(Row(2, tokens=(failure, *behind), known=10), device)
    assert output == [-1] * 8
    assert num_output == failure
    assert state == {"num_tokens": 10, "num_computed_tokens": 9, "stopped": FAILED}


def test_a_row_may_fail_after_accepted_tokens(device):
    row = Row(2, tokens=(4, -1, 5), query_len=3, known=10)
    output, num_output, state = _state_of(row, device)
    assert output[:3] == [4, -1, -1]
    assert num_output == -1
    assert state == {"num_tokens": 11, "num_computed_tokens": 10, "stopped": FAILED}


def test_an_unfinished_prefill_advances_by_its_query(device):
    output, num_output, state = _state_of(Row(2, query_len=7, known=30), device)
    assert output == [-1] * 8
    assert num_output == 0
    assert state == {"num_tokens": 30, "num_computed_tokens": 30, "stopped": RUNNING}


@pytest.mark.parametrize("num_columns", [1, 8])
def test_hundreds_of_rows(device, num_columns):
    def row(slot: int) -> Row:
        return Row(
            slot,
            tokens=tuple((slot + i * i) % 13 - (slot % 11 == 0) for i in range(slot % 9))[
                :num_columns
            ],
            query_len=1 + slot % 4,
            known=20 + slot % 8,
            max_total=30,
            stop_tokens=(slot % VOCAB, 3),
            stopped=(slot % 10 == 4) * LENGTH,
        )

    rows = [row(slot) for slot in range(299, -1, -1)]
    rows.insert(77, Row(-1, tokens=(3,)))
    case = Case(rows=tuple(rows), num_columns=num_columns, max_num_reqs=300, max_stop_tokens=16)
    for as_on_gpu in (False, True):
        with tiles("post_update", as_on_gpu=as_on_gpu):
            assert _run(kernels, case, device) == _by_hand(case)


@pytest.mark.parametrize("max_stop_tokens", [0, 2])
def test_without_stop_tokens(device, max_stop_tokens):
    case = Case(rows=(Row(0, tokens=(2,)), Row(1, tokens=(-1,))), max_stop_tokens=max_stop_tokens)
    assert _run(kernels, case, device)["stopped"][:2] == [RUNNING, FAILED]


def test_no_rows(device):
    case = Case(rows=())
    assert _run(kernels, case, device) == _whole(_arguments(case))


def test_configurations():
    assert PostUpdateConfig.default_for(1).tile_rows == 32
    assert PostUpdateConfig.default_for(8).tile_rows == 4
    assert PostUpdateConfig.for_interpreter(300).tile_rows == 512
    assert PostUpdateConfig.for_interpreter(2**14).tile_rows == 2**12


# --- errors ------------------------------------------------------------------------------------

INT32 = torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"idx_mapping": INT32.long()}, TypeError, r"idx_mapping: expected dtype torch\.int32"),
        ({"query_start_loc": None}, ValueError, r"query_start_loc: expected a tensor where quer"),
        ({"query_len": -1}, ValueError, r"query_len: expected None or at least 1, got -1"),
        ({"logits_rows": INT32}, TypeError, r"logits_rows: expected dtype torch\.int64"),
        ({"logits_rows": None}, TypeError, r"logits_rows: expected a torch\.Tensor, got None"),
        ({"tokens": INT32[:2].long()}, ValueError, r"tokens: expected shape \[2, any\], got \[2"),
        (
            {"tokens": torch.zeros(2, 9, dtype=torch.int64)},
            ValueError,
            r"tokens: expected 1 to 8 columns, got 9",
        ),
        (
            {"tokens": torch.zeros(2, 0, dtype=torch.int64)},
            ValueError,
            r"tokens: expected 1 to 8 columns, got 0",
        ),
        ({"token_ids": INT32}, ValueError, r"token_ids: expected shape \[any, any\], got \[3\]"),
        ({"num_tokens": INT32}, ValueError, r"num_tokens: expected shape \[5\], got \[3\]"),
        ({"num_computed_tokens": INT32}, ValueError, r"num_computed_tokens: expected shape \[5\]"),
        ({"max_total_tokens": INT32}, ValueError, r"max_total_tokens: expected shape \[5\], got"),
        ({"stop_token_ids": INT32[None]}, ValueError, r"stop_token_ids: expected shape \[5, any"),
        ({"stopped": INT32}, ValueError, r"stopped: expected shape \[5\], got \[3\]"),
        ({"output": INT32[:2, None].long()}, ValueError, r"output: expected shape \[2, 4\], got"),
        ({"num_output": INT32}, ValueError, r"num_output: expected shape \[2\], got \[3\]"),
        ({"num_sampled": INT32}, ValueError, r"num_sampled: expected shape \[2\], got \[3\]"),
        ({"stop_sequences": INT32}, ValueError, r"stop_sequences: expected shape \[5, any, any\]"),
        ({"stop_sequences": None}, ValueError, r"expected all or none, got no stop_sequences"),
        (
            {"stop_sequences": INT32[:, None, None].expand(3, 5, 2).transpose(0, 1)},
            ValueError,
            r"stop_sequences: expected each slot's sequences contiguous, got strides",
        ),
        ({"stop_sequence_lens": INT32}, ValueError, r"stop_sequence_lens: expected shape \[5, 4"),
        ({"num_stop_sequences": INT32}, ValueError, r"num_stop_sequences: expected shape \[5\]"),
        (
            {"num_stop_sequences": None},
            ValueError,
            r"expected all or none, got no num_stop_sequences",
        ),
        ({"prompt_len": None}, TypeError, r"prompt_len: expected a torch\.Tensor, got None"),
        ({"min_total_tokens": INT32}, ValueError, r"min_total_tokens: expected shape \[5\], got"),
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    case = Case(rows=(Row(0), Row(1)), num_columns=4)
    change = {
        name: with_strides(value, device) if isinstance(value, torch.Tensor) else value
        for name, value in change.items()
    }
    with pytest.raises(error, match=message):
        _update(kernels, _arguments(case, device) | change)
