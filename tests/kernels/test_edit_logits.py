"""The logits' edits: the whole buffer against a loop over rows and tokens in numpy's float32."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.errors import UnsupportedDeviceError
from mrv1.kernels import reference
from mrv1.kernels.sampling.contracts import (
    ALLOWED,
    BIAS,
    MAX_PARTS,
    MIN_TOKENS,
    PENALTIES,
    History,
    LogitEdits,
)
from mrv1.kernels.sampling.edit_logits import EditLogitsConfig
from tests.kernels.elementwise import (
    DTYPES,
    assert_gaps_untouched,
    bundled,
    in_a_wider_row,
    normal,
    tiles,
)

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

UNREAD = 2
"""Fills state that must not be read: a token of the vocabulary, so that reading it shows."""
VOCAB = 41
"""Two 32-bit words of a mask, the second partly used."""
MAX_MODEL_LEN = 30
MAX_BIAS = 3
MAX_STOP_TOKENS = 2
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """The edits and tokens of a request slot, in the caller's terms; None = edit not used."""

    prompt: Tokens = ()
    output: Tokens = ()
    allowed: frozenset[int] | None = None
    min_tokens: int | None = None
    stop_tokens: Tokens = ()
    bias: tuple[tuple[int, float], ...] | None = None
    penalties: tuple[float, float, float] | None = None
    """Repetition, frequency, presence."""

    @property
    def edits(self) -> int:
        used = (self.allowed, self.min_tokens, self.bias, self.penalties)
        bits = (ALLOWED, MIN_TOKENS, BIAS, PENALTIES)
        return sum(bit for bit, value in zip(bits, used, strict=True) if value is not None)


@dataclass(frozen=True)
class Row:
    """A row of logits: a slot (-1 = padding) and the drafts between its history and the row."""

    slot: int
    ahead: int = 0


@dataclass(frozen=True)
class Case:
    slots: tuple[Slot, ...]
    rows: tuple[Row, ...]
    drafts: tuple[Tokens, ...] | None = None
    """The drafts of each request; a request has len(rows) / len(drafts) rows."""
    vocab: int = VOCAB
    dtype: torch.dtype = torch.float32
    ahead_dtype: torch.dtype = torch.int32
    is_aligned: bool = False
    """Whether every row of logits begins where a GPU can write whole sectors."""
    max_model_len: int = MAX_MODEL_LEN


Arguments = dict[str, torch.Tensor | None]


def _mask_words(allowed: frozenset[int], vocab: int) -> list[int]:
    words = [0] * -(-vocab // 32)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return [word - (1 << 32) if word >> 31 else word for word in words]


def _logits(case: Case) -> torch.Tensor:
    """Return values of both signs, some of them NaN, infinities and zeros."""
    logits = normal((len(case.rows), case.vocab), torch.float32, "cpu").to(case.dtype)
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0)):
        logits.view(-1)[3 * i + 1 :: 17] = value
    return logits


def _arguments(case: Case, device="cpu") -> Arguments:
    """Return the arguments: matrices are views, counts hold rubbish and cover no token yet."""

    def vector(values: list, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor([UNREAD, *values], dtype=dtype, device=device)[1:]

    def matrix(rows: list, width: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        whole = torch.full((1 + len(rows), width + 7), UNREAD, dtype=dtype, device=device)
        view = whole[1:, 4 : 4 + width]
        for row, values in zip(view, rows, strict=True):
            row[: len(values)] = vector(list(values), dtype)
        return view

    slots, num_slots = case.slots, len(case.slots)
    everything = frozenset(range(case.vocab))
    penalties = [slot.penalties or (9.0, 9.0, 9.0) for slot in slots]
    biases = [slot.bias or () for slot in slots]
    masks = [everything if slot.allowed is None else slot.allowed for slot in slots]
    stops = [(*slot.stop_tokens, -1, -1)[:MAX_STOP_TOKENS] for slot in slots]
    drafts = case.drafts
    return {
        "logits": in_a_wider_row(
            _logits(case).to(device), *((16, -case.vocab % 16) if case.is_aligned else (2, 3))
        ),
        "idx_mapping": vector([row.slot for row in case.rows]),
        "token_ids": matrix([slot.prompt + slot.output for slot in slots], case.max_model_len),
        "num_tokens": vector([len(slot.prompt + slot.output) for slot in slots]),
        "prompt_len": vector([len(slot.prompt) for slot in slots]),
        "edits": vector([slot.edits for slot in slots]),
        "allowed_mask": matrix(
            [_mask_words(mask, case.vocab) for mask in masks], -(-case.vocab // 32)
        ),
        "min_total_tokens": vector(
            [len(s.prompt) + (99 if s.min_tokens is None else s.min_tokens) for s in slots]
        ),
        "late_token_ids": matrix(stops, MAX_STOP_TOKENS),
        "bias_ids": matrix([[token for token, _ in bias] for bias in biases], MAX_BIAS),
        "bias_values": matrix([[v for _, v in bias] for bias in biases], MAX_BIAS, torch.float32),
        "num_bias": vector([len(bias) for bias in biases]),
        "repetition_penalty": vector([p[0] for p in penalties], torch.float32),
        "frequency_penalty": vector([p[1] for p in penalties], torch.float32),
        "presence_penalty": vector([p[2] for p in penalties], torch.float32),
        "counts": matrix([[777] * case.vocab] * num_slots, case.vocab),
        "counted": vector([-1] * num_slots * MAX_PARTS).view(num_slots, MAX_PARTS),
        "ahead": None
        if drafts is None
        else vector([r.ahead for r in case.rows], case.ahead_dtype),
        "draft_token_ids": None if drafts is None else matrix(list(drafts), 3),
    }


SCRATCH = ("logits", "counts", "counted")


def _bits(logits: torch.Tensor) -> list[int]:
    """Return the bits, all NaN made equal: the contract does not say which NaN results."""
    one_nan = logits.cpu().masked_fill(logits.cpu().isnan(), torch.nan).contiguous()
    return one_nan.view(torch.int32 if logits.dtype == torch.float32 else torch.int16).tolist()


def _edit(ops, arguments: Arguments) -> None:
    ops.edit_logits(**bundled(arguments, history=History, edits=LogitEdits))


def _run(ops, case: Case, device="cpu", *, as_on_gpu: bool = False) -> list[int]:
    arguments = _arguments(case, device)
    before = {name: value.clone() for name, value in arguments.items() if value is not None}
    with tiles("edit_logits", as_on_gpu=as_on_gpu):
        _edit(ops, arguments)
    for name, value in before.items():
        assert name in SCRATCH or torch.equal(value, arguments[name])
    assert_gaps_untouched(arguments["logits"])
    return _bits(arguments["logits"])


def _rounded(value: np.float32, dtype: torch.dtype) -> np.float32:
    return torch.tensor(value).to(dtype).float().numpy()[()]


def _edited(x: np.float32, token: int, slot: Slot, drafts: Tokens, dtype: torch.dtype):
    """Edit one logit, following the contract."""
    prompt, output = Counter(slot.prompt), Counter(slot.output + drafts)
    bias = dict(slot.bias or ())
    if token in bias:
        x = _rounded(x + np.float32(bias[token]), dtype)
    if slot.penalties is not None and (token in prompt or token in output):
        repetition, frequency, presence = map(np.float32, slot.penalties)
        x = x / repetition if x > 0 else x * repetition
        x = x - frequency * np.float32(output[token])
        x = x - (presence if token in output else np.float32(0))
        x = _rounded(x, dtype)
    if slot.allowed is not None and token not in slot.allowed:
        return -np.inf
    num_output = len(slot.output) + len(drafts)
    if slot.min_tokens is not None and num_output < slot.min_tokens and token in slot.stop_tokens:
        return -np.inf
    return x


def _by_hand(case: Case) -> list[int]:
    logits = _logits(case)
    wide = logits.float().numpy()
    with np.errstate(all="ignore"):
        for i, row in enumerate(case.rows):
            if row.slot < 0:
                continue
            drafts: Tokens = ()
            if case.drafts is not None:
                drafts = case.drafts[i * len(case.drafts) // len(case.rows)][: row.ahead]
            for token in range(case.vocab):
                slot = case.slots[row.slot]
                wide[i, token] = _edited(wide[i, token], token, slot, drafts, case.dtype)
    return _bits(torch.from_numpy(wide).to(case.dtype))


tokens = st.sampled_from([0, 1, 2, 3, 31, 32, VOCAB - 1])
"""So few tokens that histories repeat a token and edits meet."""
odd_tokens = st.one_of(tokens, tokens, st.sampled_from([-1, VOCAB, VOCAB + 1, 2**31 - 1]))
floats = st.sampled_from([0.0, 0.5, -1.7, 1 / 3, 100.0])


def _maybe(strategy):
    return st.one_of(st.none(), strategy)


@st.composite
def _slots(draw) -> Slot:
    bias_ids = draw(st.lists(odd_tokens, max_size=MAX_BIAS, unique=True))
    biases = st.just(tuple((token, draw(floats)) for token in bias_ids))
    return Slot(
        prompt=tuple(draw(st.lists(odd_tokens, max_size=6))),
        output=tuple(draw(st.lists(odd_tokens, max_size=6))),
        allowed=draw(_maybe(st.frozensets(st.integers(0, VOCAB - 1)))),
        min_tokens=draw(_maybe(st.integers(0, 8))),
        stop_tokens=tuple(draw(st.lists(odd_tokens, max_size=MAX_STOP_TOKENS))),
        bias=draw(_maybe(biases)),
        penalties=draw(_maybe(st.tuples(st.sampled_from([1.0, 1.3, 0.7, 2.0]), floats, floats))),
    )


@st.composite
def _cases(draw) -> Case:
    slots = tuple(draw(st.lists(_slots(), min_size=1, max_size=4)))
    per_req = draw(st.sampled_from([None, 1, 2, 4]))
    reqs = draw(st.lists(st.integers(-1, len(slots) - 1), max_size=5))
    reqs += [-1] * draw(st.sampled_from([0, 0, 8]))  # many requests are masked in another way
    # each request has its own slot; a request's rows may be padding
    reqs = [slot if slot not in reqs[:i] else -1 for i, slot in enumerate(reqs)]
    rows = [
        Row(slot if draw(st.integers(0, 4)) else -1, draw(st.integers(0, 3)) if per_req else 0)
        for slot in reqs
        for _ in range(per_req or 1)
    ]
    drafts = tuple(tuple(draw(st.lists(odd_tokens, min_size=3, max_size=3))) for _ in reqs)
    return Case(
        slots,
        tuple(rows),
        drafts=drafts if per_req else None,
        dtype=draw(st.sampled_from(DTYPES)),
        ahead_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        is_aligned=draw(st.booleans()),
    )


# --- oracle ------------------------------------------------------------------------------------


@given(case=_cases())
def test_the_oracle_equals_a_plain_loop(case):
    assert _run(reference, case) == _by_hand(case)


def test_the_oracle_takes_float64():
    arguments = _arguments(Case((Slot(bias=((3, 0.5),)),), (Row(0),)))
    arguments["logits"] = torch.zeros(1, VOCAB, dtype=torch.float64)
    _edit(reference, arguments)
    assert arguments["logits"][0, 2:5].tolist() == [0, 0.5, 0]


# --- properties --------------------------------------------------------------------------------


@given(case=_cases(), as_on_gpu=st.booleans())
def test_kernel_logits_equal_a_plain_loop(device, case, as_on_gpu):
    assert _run(kernels, case, device, as_on_gpu=as_on_gpu) == _by_hand(case)


@given(case=_cases(), as_on_gpu=st.booleans())
def test_shards_are_edited_like_the_whole(device, case, as_on_gpu):
    """Each with counts of its own; the second has 9 tokens, a third none."""
    for ops in (reference, kernels):
        arguments = _arguments(case, device)
        logits, counts = arguments["logits"], arguments["counts"]
        for first in (0, 32, 64):
            shard = slice(first, first + 32)
            own = {"logits": logits[:, shard], "counts": counts[:, shard].clone()}
            own |= {"counted": arguments["counted"].clone()}
            with tiles("edit_logits", as_on_gpu=as_on_gpu):
                bundles = bundled(arguments | own, history=History, edits=LogitEdits)
                ops.edit_logits(**bundles, first_token=first)
        assert_gaps_untouched(logits)
        assert _bits(logits) == _by_hand(case)


@given(
    case=_cases().filter(lambda case: case.drafts is None and case.rows),
    steps=st.lists(st.lists(odd_tokens, max_size=3).map(tuple), min_size=1, max_size=4),
    reused=st.booleans(),
)
def test_counts_follow_the_history(device, case, steps, reused):
    """Several launches, with alternating tiles, update the same counts as tokens are appended."""
    arguments = _arguments(case, device)
    for index, appended in enumerate(steps):
        if reused and index == 2:  # another request takes the slots
            slots = tuple(replace(slot, prompt=slot.output, output=()) for slot in case.slots)
            arguments["counted"].fill_(-1)
        else:
            slots = tuple(replace(slot, output=slot.output + appended) for slot in case.slots)
        case = replace(case, slots=slots)
        # fresh arguments, except the op's own counts, which a slot keeps from launch to launch
        kept = {name: arguments[name] for name in ("counts", "counted")}
        arguments = _arguments(case, device) | kept
        with tiles("edit_logits", as_on_gpu=index % 2 == 1):
            _edit(kernels, arguments)
        assert _bits(arguments["logits"]) == _by_hand(case)


@given(case=_cases())
def test_slots_without_a_row_keep_their_counts(device, case):
    arguments = _arguments(case, device)
    _edit(kernels, arguments)
    used = {row.slot for row in case.rows}
    for i, slot in enumerate(case.slots):
        if i in used and slot.edits & PENALTIES:
            num_tokens = len(slot.prompt + slot.output)
            assert arguments["counted"][i].tolist() == [num_tokens] * MAX_PARTS
        else:
            assert arguments["counted"][i].tolist() == [-1] * MAX_PARTS
            assert arguments["counts"][i].tolist() == [777] * VOCAB


# --- edges -------------------------------------------------------------------------------------


def test_drafts_are_penalized_but_not_added_to_the_counts(device):
    """Two rows of a request, then a step in which the draft has been accepted."""
    slot = Slot((1,), (3, 3), penalties=(1.0, 0.25, 2.0))
    case = Case((slot,), (Row(0, 0), Row(0, 1)), drafts=((3, 5),))
    for ops in (reference, kernels):
        arguments = _arguments(case, device)
        arguments["logits"].zero_()
        _edit(ops, arguments)
        assert arguments["logits"][:, 3].tolist() == [-2.5, -2.75]
        assert arguments["logits"][:, 5].tolist() == [0, 0]
    arguments["token_ids"][0, 3] = 3
    arguments["num_tokens"].fill_(4)
    arguments["logits"].zero_()
    _edit(kernels, arguments)
    assert arguments["logits"][:, 3].tolist() == [-2.75, -3.0]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_stop_tokens_are_allowed_once_min_tokens_are_reached(device, ahead):
    slot = Slot((1, 1, 1), (3, 3), min_tokens=4, stop_tokens=(7,))
    case = Case((slot,), (Row(0, ahead),), drafts=((4, 4, 4),))
    for ops in (reference, kernels):
        arguments = _arguments(case, device)
        arguments["logits"].zero_()
        _edit(ops, arguments)
        lost = (arguments["logits"][0] == -torch.inf).nonzero().flatten().tolist()
        assert lost == ([7] if ahead < 2 else [])


def test_masks_override_a_bias(device):
    slot = Slot(
        allowed=frozenset({4, 5}), min_tokens=1, stop_tokens=(5,), bias=((5, 1e9), (6, 1e9))
    )
    assert _run(kernels, Case((slot,), (Row(0),)), device) == _by_hand(Case((slot,), (Row(0),)))
    arguments = _arguments(Case((slot,), (Row(0),)), device)
    _edit(kernels, arguments)
    assert (arguments["logits"][0] > -torch.inf).nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("count", [-1, 0, 2, 3, 100])
def test_num_bias_limits_the_biased_ids(device, count):
    slot = Slot(bias=((1, 1.0), (7, 1.0), (40, 1.0)))
    for ops in (reference, kernels):
        arguments = _arguments(Case((slot,), (Row(0),)), device)
        arguments["logits"].zero_()
        arguments["num_bias"].fill_(count)
        _edit(ops, arguments)
        assert arguments["logits"][0].nonzero().flatten().tolist() == [1, 7, 40][: max(count, 0)]


@pytest.mark.parametrize("vocab", [1, 31, 33, 5000])
@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_a_vocabulary_of_several_programs_equals_the_loop(device, vocab, as_on_gpu):
    everything = Slot(
        tuple(i * i % vocab for i in range(40)),
        tuple(i * i * i % vocab for i in range(60)),
        frozenset(i for i in range(vocab) if i % 7 != 1),
        200,
        (vocab - 1,),
        ((vocab // 2, 0.3),),
        (1.2, 0.1, 0.2),
    )
    rows = (Row(1), Row(-1), Row(0), Row(2))
    slots = (everything, Slot(), replace(everything, allowed=None, min_tokens=3))
    for dtype in DTYPES:
        case = Case(slots, rows, vocab=vocab, dtype=dtype, max_model_len=128)
        assert _run(kernels, case, device, as_on_gpu=as_on_gpu) == _by_hand(case)


def test_a_launch_may_use_more_or_fewer_programs_than_the_launch_before(device):
    """Five programs per request, then one, then five again; the output grows each time."""
    history = tuple(i * 997 % 5000 for i in range(40))
    slot = Slot(history[:20], penalties=(1.0, 0.5, 0.25))
    kept: Arguments = {}
    for index, as_on_gpu in enumerate((True, False, True)):
        case = Case((replace(slot, output=history[20 : 25 + 5 * index]),), (Row(0),), vocab=5000)
        case = replace(case, max_model_len=64)
        arguments = _arguments(case, device) | kept
        kept = {name: arguments[name] for name in ("counts", "counted")}
        with tiles("edit_logits", as_on_gpu=as_on_gpu):
            _edit(kernels, arguments)
        assert _bits(arguments["logits"]) == _by_hand(case)


def test_a_history_of_several_tiles_equals_the_loop(device):
    """The history takes several tiles; tokens repeat within a tile and across tiles."""
    history = tuple((i * i) % 37 for i in range(5000))
    case = Case(
        (Slot(history[:2500], history[2500:], penalties=(1.1, 0.01, 0.5)),),
        (Row(0),),
        max_model_len=5001,
    )
    for as_on_gpu in (False, True):
        assert _run(kernels, case, device, as_on_gpu=as_on_gpu) == _by_hand(case)


@pytest.mark.parametrize(
    "case",
    [
        Case((Slot(allowed=frozenset()),), ()),
        Case((), (Row(-1),)),
        Case((Slot(allowed=frozenset()),), (), drafts=()),
        Case((Slot(allowed=frozenset()),), (Row(0),), vocab=0),
    ],
    ids=["rows", "slots", "requests", "tokens"],
)
def test_empty_sizes_leave_the_logits_unchanged(device, case):
    for ops in (reference, kernels):
        arguments = _arguments(replace(case, vocab=max(case.vocab, 1)), device)
        for name in ("logits", "counts", "allowed_mask"):
            arguments[name] = arguments[name][:, : case.vocab]
        before = _bits(arguments["logits"])
        _edit(ops, arguments)
        assert _bits(arguments["logits"]) == before


def test_a_captured_launch_follows_the_state(device):
    """The edits in use and the history change between replays of one graph."""
    if device.type != "cuda":
        pytest.skip("not run: no GPU")
    arguments = _arguments(Case((Slot((1,), (3,), penalties=(1.0, 1.0, 0.0)),), (Row(0),)), device)
    arguments["edits"].fill_(0)
    _edit(kernels, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _edit(kernels, arguments)

    def touched() -> dict[int, float]:
        arguments["logits"].zero_()
        graph.replay()
        return {i: x for i, x in enumerate(arguments["logits"][0].tolist()) if x != 0}

    assert touched() == {}
    arguments["edits"].fill_(PENALTIES)
    assert touched() == {3: -1}
    arguments["token_ids"][0, 2] = 3
    arguments["num_tokens"].fill_(3)
    assert touched() == {3: -2}
    arguments["counted"].fill_(-1)
    arguments["prompt_len"].fill_(2)
    assert touched() == {3: -1}
    arguments["idx_mapping"].fill_(-1)
    assert touched() == {}


def test_configurations():
    default_for = EditLogitsConfig.default_for
    assert default_for(151_936, 256) == EditLogitsConfig(1024, 38, 4)
    assert default_for(151_936, 256).num_parts(151_936) == 4
    assert default_for(151_936, 1) == EditLogitsConfig(1024, 1, 4)
    assert default_for(20, 10_000) == EditLogitsConfig(32, 1, 1)
    for vocab in (1, 1000, 32_000, 128_256, 262_144, 1 << 24):
        for num_reqs in (1, 7, 256, 5000):
            assert default_for(vocab, num_reqs).num_parts(vocab) <= MAX_PARTS
        assert EditLogitsConfig.for_interpreter(vocab).num_parts(vocab) <= MAX_PARTS


# --- the grammar's mask --------------------------------------------------------------------------


@given(
    data=st.data(),
    vocab=st.sampled_from([1, 32, VOCAB, 3000]),
    num_masks=st.integers(0, 9),
    has_rows=st.booleans(),
    is_aligned=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    as_on_gpu=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_apply_token_bitmask_masks_tokens_whose_bit_is_0(
    device, data, vocab, num_masks, has_rows, is_aligned, dtype, as_on_gpu, seed
):
    generator = torch.Generator().manual_seed(seed)
    case = Case((), (Row(-1),) * 9, vocab=vocab, dtype=dtype)
    rows = list(range(9))
    if has_rows:  # some masks are for no row
        order = data.draw(st.permutations(rows))[:num_masks]
        rows = [row if data.draw(st.integers(0, 4)) else -1 for row in order]
    # 0 and 2: words that allow all of their tokens or none
    allowed = [
        (torch.randint(0, 2, (vocab,), generator=generator) + kind - 1).clamp(0, 1).tolist()
        for kind in torch.randint(0, 3, (len(rows),), generator=generator).tolist()
    ]
    words = [_mask_words(frozenset(i for i in range(vocab) if a[i]), vocab) for a in allowed]
    expected = _logits(case)
    for row, bits in zip(rows, allowed, strict=True):
        if row >= 0:
            for token in range(vocab):
                if not bits[token]:
                    expected[row, token] = -torch.inf
    bitmask = torch.tensor(words, dtype=torch.int32, device=device).view(
        len(rows), -(-vocab // 32)
    )
    chosen = torch.tensor(rows, dtype=torch.int32, device=device) if has_rows else None
    gaps = (16, -vocab % 16) if is_aligned else (2, 3)
    for ops in (reference, kernels):
        logits = in_a_wider_row(_logits(case).to(device), *gaps)
        with tiles("edit_logits", as_on_gpu=as_on_gpu):
            ops.apply_token_bitmask(logits, in_a_wider_row(bitmask, 1, 2), rows=chosen)
        assert _bits(logits) == _bits(expected)
        assert_gaps_untouched(logits)
        logits = in_a_wider_row(_logits(case).to(device), *gaps)
        for first in range(0, 32 * bitmask.shape[1] + 1, 1024):  # the last shard may have no token
            with tiles("edit_logits", as_on_gpu=as_on_gpu):
                ops.apply_token_bitmask(
                    logits[:, first : first + 1024],
                    in_a_wider_row(bitmask, 1, 2),
                    rows=chosen,
                    first_token=first,
                )
        assert _bits(logits) == _bits(expected)
        assert_gaps_untouched(logits)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"logits": torch.zeros(3)},
            ValueError,
            r"logits: expected shape \[any, any\], got \[3\]",
        ),
        ({"logits": torch.zeros(3, 65)}, ValueError, r"bitmask: expected shape \[any, 3\], got"),
        ({"bitmask": torch.zeros(2, 2)}, TypeError, r"bitmask: expected dtype torch\.int32, got"),
        ({"rows": None}, ValueError, r"bitmask: expected shape \[3, 2\], got \[2, 2\]"),
        (
            {"rows": torch.zeros(3, dtype=torch.int32)},
            ValueError,
            r"rows: expected shape \[2\], g",
        ),
        ({"rows": torch.zeros(2)}, TypeError, r"rows: expected dtype torch\.int32"),
        ({"first_token": 48}, ValueError, r"first_token: expected a multiple of 32, at le.* 48"),
        (
            {"first_token": -32},
            ValueError,
            r"first_token: expected a multiple of 32, at l.* -32",
        ),
        ({"first_token": 32}, ValueError, r"bitmask: expected shape \[any, 3\], got \[2, 2\]"),
    ],
)
def test_a_wrong_bitmask_is_named(device, change, error, message):
    arguments = {
        "logits": torch.zeros(3, VOCAB),
        "bitmask": torch.zeros(2, 2, dtype=torch.int32),
        "rows": torch.zeros(2, dtype=torch.int32),
    } | change
    on_device = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()
    }
    for ops in (reference, kernels):
        with pytest.raises(error, match=message):
            ops.apply_token_bitmask(**on_device)


# --- errors --------------------------------------------------------------------------------------

INT32 = torch.zeros(9, dtype=torch.int32)
STATE = torch.zeros(2, VOCAB, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"logits": INT32[None]},
            TypeError,
            r"logits: expected dtype torch\.float.*, got torch\.",
        ),
        ({"idx_mapping": INT32[:2]}, ValueError, r"idx_mapping: expected shape \[3\], got \[2\]"),
        ({"token_ids": INT32}, ValueError, r"token_ids: expected shape \[any, any\], got \[9\]"),
        ({"num_tokens": INT32}, ValueError, r"num_tokens: expected shape \[2\], got \[9\]"),
        ({"prompt_len": None}, TypeError, r"prompt_len: expected a torch\.Tensor, got None"),
        ({"edits": INT32}, ValueError, r"edits: expected shape \[2\], got \[9\]"),
        (
            {"allowed_mask": STATE},
            ValueError,
            r"allowed_mask: expected shape \[2, 2\], got \[2, 4",
        ),
        ({"min_total_tokens": INT32}, ValueError, r"min_total_tokens: expected shape \[2\], got"),
        ({"late_token_ids": INT32}, ValueError, r"late_token_ids: expected shape \[2, any\], got"),
        ({"bias_ids": STATE[:1]}, ValueError, r"bias_ids: expected shape \[2, any\], got \[1, 41"),
        ({"bias_values": STATE}, TypeError, r"bias_values: expected dtype torch\.float32, got"),
        ({"bias_values": STATE.float()}, ValueError, r"bias_values: expected shape \[2, 3\], got"),
        ({"num_bias": INT32}, ValueError, r"num_bias: expected shape \[2\], got \[9\]"),
        (
            {"repetition_penalty": INT32[:2]},
            TypeError,
            r"repetition_penalty: expected dtype torch",
        ),
        (
            {"frequency_penalty": INT32.float()},
            ValueError,
            r"frequency_penalty: expected shape \[",
        ),
        ({"presence_penalty": INT32[:2]}, TypeError, r"presence_penalty: expected dtype torch\.f"),
        ({"counts": STATE[:, 1:]}, ValueError, r"counts: expected shape \[2, 41\], got \[2, 40\]"),
        ({"counted": STATE}, ValueError, r"counted: expected shape \[2, 256\], got \[2, 41\]"),
        ({"ahead": INT32[:3]}, ValueError, r"ahead, draft_token_ids: expected both or neither"),
        (
            {"ahead": INT32[:3].short(), "draft_token_ids": STATE[:1]},
            TypeError,
            r"ahead: expected dtype torch\.int32 or torch\.int64, got torch\.int16",
        ),
        (
            {"ahead": INT32[:3], "draft_token_ids": STATE},
            ValueError,
            r"draft_token_ids: expected a number of rows that divides the 3 rows of logits, got 2",
        ),
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    arguments = _arguments(
        Case((Slot(allowed=frozenset()),) * 2, (Row(0), Row(1), Row(-1))), device
    )
    for name, value in change.items():
        arguments[name] = value if value is None else value.to(device)
    before = {name: arguments[name].clone() for name in SCRATCH}
    for ops in (reference, kernels):
        with pytest.raises(error, match=message):
            _edit(ops, arguments)
    assert all(
        torch.equal(value, arguments[name]) for name, value in before.items() if name != "logits"
    )


def test_a_shard_outside_the_vocabulary_is_named(device):
    arguments = _arguments(Case((Slot(allowed=frozenset()),), (Row(0),)), device)
    bundles = bundled(arguments, history=History, edits=LogitEdits)
    for ops in (reference, kernels):
        with pytest.raises(ValueError, match=r"edits\.allowed_mask: expected shape \[1, 4\], got"):
            ops.edit_logits(**bundles, first_token=64)


def test_a_cpu_tensor_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr("mrv1.kernels._base.checks.INTERPRET", False)
    with pytest.raises(UnsupportedDeviceError, match="logits: "):
        _edit(kernels, _arguments(Case((Slot(),), (Row(0),))))
