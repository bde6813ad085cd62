"""Bad words: the whole logits buffer, bit by bit, against two loops over rows and words."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.errors import UnsupportedDeviceError
from mrv1.kernels import reference
from mrv1.kernels.sampling.bad_words import BadWordsConfig
from mrv1.kernels.sampling.contracts import BadWords, History
from tests.kernels.elementwise import (
    DTYPES,
    bundled,
    in_a_wider_row,
    normal,
    tiles,
    with_strides,
)

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

UNREAD = 2
"""Fills state that must not be read, also before slot 0 and after a row's last column. The token
occurs in words, so that a kernel that read it would find words and their prefixes."""
VOCAB = 7
MAX_MODEL_LEN = 20
INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}

Word = tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """The state of a request slot on the device."""

    prompt: Word = ()
    output: Word = ()
    words: tuple[Word, ...] = ()
    match_prompt: bool = False


@dataclass(frozen=True)
class Row:
    """A row of logits: its slot (-1 = padding) and the drafts that follow the slot's history."""

    slot: int
    drafts: Word = ()


@dataclass(frozen=True)
class Case:
    slots: tuple[Slot, ...]
    rows: tuple[Row, ...]
    max_words: int = 4
    max_len: int = 4
    most_drafts: int | None = None
    vocab: int = VOCAB
    dtype: torch.dtype = torch.float32
    ahead_dtype: torch.dtype = torch.int32
    gap: int = 4
    """Columns before a matrix: 4 keep its rows aligned to 16 bytes, 1 does not."""


Arguments = dict[str, torch.Tensor | None]


def _arguments(case: Case, device="cpu") -> Arguments:
    """Return logits with some NaN and infinities, and all state as views of larger tensors."""

    def vector(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        whole = torch.tensor([UNREAD, *values], dtype=dtype, device=device)
        return whole[1:]

    def matrix(rows: list[Word], width: int) -> torch.Tensor:
        shape = (1 + len(rows), -(-(case.gap + width + 1) // 16) * 16)
        whole = torch.full(shape, UNREAD, dtype=torch.int32, device=device)
        view = whole[1:, case.gap : case.gap + width]
        for row, values in zip(view, rows, strict=True):
            row[: len(values)] = vector(list(values))
        return view

    slots, (max_words, max_len) = case.slots, (case.max_words, case.max_len)
    bad_words = matrix([()] * len(slots), max_words * max_len)
    bad_words = bad_words.view(len(slots), max_words, max_len)
    for index, slot in enumerate(slots):
        for place, word in zip(bad_words[index], slot.words, strict=False):
            stored = word[:max_len]
            place[: len(stored)] = vector(list(stored))
    # Words after the last counted word would be masked: their only token is UNREAD.
    lengths = [(*map(len, slot.words), *[1] * max_words)[:max_words] for slot in slots]
    logits = normal((len(case.rows), case.vocab), torch.float32, "cpu").to(case.dtype)
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0)):
        logits.view(-1)[3 * i + 1 :: 17] = value
    drafts = None if case.most_drafts is None else [row.drafts for row in case.rows]
    return {
        "logits": in_a_wider_row(logits.to(device), 2, 3),
        "idx_mapping": vector([row.slot for row in case.rows]),
        "token_ids": matrix([slot.prompt + slot.output for slot in slots], MAX_MODEL_LEN),
        "num_tokens": vector([len(slot.prompt + slot.output) for slot in slots]),
        "prompt_len": vector([len(slot.prompt) for slot in slots]),
        "bad_words": bad_words,
        "bad_word_lens": matrix(lengths, max_words),
        "num_bad_words": vector([len(slot.words) for slot in slots]),
        "bad_words_match_prompt": vector([3 * slot.match_prompt for slot in slots])
        if any(slot.match_prompt for slot in slots)
        else None,
        "ahead": None if drafts is None else vector([len(d) for d in drafts], case.ahead_dtype),
        "draft_token_ids": None if drafts is None else matrix(drafts, case.most_drafts or 0),
    }


def _bits(logits: torch.Tensor) -> list[int]:
    """Return the bits of the whole buffer behind the view ``logits``: equal NaN compare equal."""
    whole = logits.new_empty(0).set_(logits.untyped_storage())
    return whole.view(INTEGERS[logits.dtype]).tolist()


def _ban(ops, arguments: Arguments) -> None:
    ops.apply_bad_words(**bundled(arguments, history=History, bad_words=BadWords))


def _run(ops, case: Case, device="cpu") -> list[int]:
    arguments = _arguments(case, device)
    before = {name: value.clone() for name, value in arguments.items() if value is not None}
    _ban(ops, arguments)
    for name, value in before.items():
        assert name == "logits" or torch.equal(value, arguments[name])
    return _bits(arguments["logits"])


def _banned(case: Case) -> list[set[int]]:
    """Return the tokens that each row loses: the contract, word by word, on lists."""
    banned: list[set[int]] = [set() for _ in case.rows]
    for row, tokens in zip(case.rows, banned, strict=True):
        if row.slot < 0:
            continue
        slot = case.slots[row.slot]
        seen = [*(slot.prompt if slot.match_prompt else ()), *slot.output, *row.drafts]
        for word in slot.words[: case.max_words]:
            if not 1 <= len(word) <= case.max_len or not 0 <= word[-1] < case.vocab:
                continue
            prefix = list(word[:-1])
            if len(prefix) <= len(seen) and seen[len(seen) - len(prefix) :] == prefix:
                tokens.add(word[-1])
    return banned


def _by_hand(case: Case) -> list[int]:
    logits = _arguments(case)["logits"]
    for row, tokens in enumerate(_banned(case)):
        for token in tokens:
            logits[row, token] = -torch.inf
    return _bits(logits)


tokens = st.sampled_from([0, 1, 2, 2, 3, VOCAB - 1])
"""So few tokens that prefixes match, and that words and histories repeat a token."""
last_tokens = st.one_of(tokens, st.sampled_from([-1, VOCAB, VOCAB + 1, 2**31 - 1, -(2**31)]))


@st.composite
def _words(draw, history: Word, max_len: int) -> Word:
    """Draw a word; the history often ends with its prefix, and some words exceed ``max_len``."""
    length = draw(st.integers(1, max_len + 1))
    prefix = draw(st.lists(tokens, min_size=length - 1, max_size=length - 1))
    if length - 1 <= len(history) and draw(st.integers(0, 3)) > 0:
        prefix = history[len(history) - (length - 1) :]
    return (*prefix, draw(last_tokens))


@st.composite
def _cases(draw) -> Case:
    max_words, max_len = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    history = st.lists(tokens, max_size=5).map(tuple)
    most_drafts = draw(st.sampled_from([None, None, 1, 3]))
    drafts = st.lists(tokens, max_size=most_drafts or 0).map(tuple)
    slots, ends = [], []
    for _ in range(draw(st.integers(1, 4))):
        slot = Slot(draw(history), draw(history), match_prompt=draw(st.booleans()))
        ends.append(draw(drafts))
        seen = slot.prompt + slot.output + ends[-1]
        words = tuple(draw(st.lists(_words(seen, max_len), max_size=max_words + 1)))
        slots.append(replace(slot, words=words))
    rows = []
    for _ in range(draw(st.integers(0, 5))):
        slot = draw(st.integers(-1, len(slots) - 1))
        rows.append(Row(slot, draw(drafts) if slot < 0 or draw(st.booleans()) else ends[slot]))
    return Case(
        tuple(slots),
        tuple(rows),
        max_words=max_words,
        max_len=max_len,
        most_drafts=most_drafts,
        dtype=draw(st.sampled_from(DTYPES)),
        ahead_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        gap=draw(st.sampled_from([1, 4])),
    )


# --- oracle ------------------------------------------------------------------------------------


@given(case=_cases())
def test_the_oracle_equals_a_plain_loop(case):
    assert _run(reference, case) == _by_hand(case)


def test_the_oracle_takes_float64():
    arguments = _arguments(Case((Slot(output=(1,), words=((1, 3),)),), (Row(0),)))
    arguments["logits"] = torch.zeros(1, VOCAB, dtype=torch.float64)
    _ban(reference, arguments)
    assert arguments["logits"].tolist() == [[0, 0, 0, -torch.inf, 0, 0, 0]]


# --- properties --------------------------------------------------------------------------------


@given(case=_cases(), as_on_gpu=st.booleans())
def test_kernel_logits_equal_a_plain_loop(device, case, as_on_gpu):
    with tiles("apply_bad_words", as_on_gpu=as_on_gpu):
        assert _run(kernels, case, device) == _by_hand(case)


@given(case=_cases(), first_tokens=st.lists(st.integers(0, VOCAB), max_size=3).map(sorted))
def test_shards_are_masked_like_the_whole(device, case, first_tokens):
    for ops in (reference, kernels):
        arguments = _arguments(case, device)
        logits, starts = arguments["logits"], [0, *first_tokens, VOCAB]
        for first, end in itertools.pairwise(starts):
            shard = arguments | {"logits": logits[:, first:end]}
            bundles = bundled(shard, history=History, bad_words=BadWords)
            ops.apply_bad_words(**bundles, first_token=first)
        assert _bits(logits) == _by_hand(case)


@given(case=_cases().filter(lambda case: case.most_drafts is not None))
def test_a_draft_counts_like_an_appended_token(device, case):
    slots = tuple(
        replace(case.slots[row.slot], output=case.slots[row.slot].output + row.drafts)
        for row in case.rows
    )
    rows = tuple(Row(i if row.slot >= 0 else -1) for i, row in enumerate(case.rows))
    appended = replace(case, slots=slots or case.slots, rows=rows, most_drafts=None)
    assert _run(kernels, case, device) == _run(kernels, appended, device)


@given(case=_cases())
def test_masking_twice_equals_masking_once(device, case):
    arguments = _arguments(case, device)
    _ban(kernels, arguments)
    once = _bits(arguments["logits"])
    _ban(kernels, arguments)
    assert _bits(arguments["logits"]) == once


# --- edges -------------------------------------------------------------------------------------


def _masked(device, slot: Slot, *, drafts: Word | None = None, **sizes: int) -> set[int]:
    """Return the tokens that one row of ``slot`` loses."""
    most_drafts = None if drafts is None else max(len(drafts), 1)
    case = Case((slot,), (Row(0, drafts or ()),), most_drafts=most_drafts, **sizes)
    arguments = _arguments(case, device)
    arguments["logits"].zero_()
    _ban(kernels, arguments)
    lost = {token for token, value in enumerate(arguments["logits"][0].tolist()) if value != 0}
    assert lost == _banned(case)[0]
    return lost


@pytest.mark.parametrize("prompt_ends", [0, 1, 2, 3])
@pytest.mark.parametrize("match_prompt", [False, True])
def test_a_prefix_must_lie_in_the_output_unless_match_prompt(device, prompt_ends, match_prompt):
    """History 4 1 2; the prefix 1 2 begins at position 1."""
    history = (4, 1, 2)
    slot = Slot(history[:prompt_ends], history[prompt_ends:], ((1, 2, 5),), match_prompt)
    assert _masked(device, slot) == ({5} if prompt_ends <= 1 or match_prompt else set())


def test_a_prefix_matches_at_the_end_of_the_history_only(device):
    words = ((1, 2, 5), (2, 1, 6), (2, 4))
    assert _masked(device, Slot(output=(1, 2, 1), words=words)) == {6}


def test_a_word_of_one_token_is_always_masked(device):
    words = ((3,), (0,), (VOCAB - 1,))
    for slot in (Slot(words=words), Slot((3, 3), (), words), Slot((1,), (3,), words)):
        assert _masked(device, slot) == {0, 3, VOCAB - 1}


def test_a_word_of_one_token_is_masked_before_the_prompt_is_known(device):
    case = Case((Slot((1,), (), ((3,), (1, 4))),), (Row(0),))
    for ops in (reference, kernels):
        arguments = _arguments(case, device)
        arguments["prompt_len"].fill_(5)
        _ban(ops, arguments)
        assert _bits(arguments["logits"]) == _by_hand(case)


def test_a_history_may_be_shorter_than_a_prefix(device):
    words = ((1, 1, 1, 4), (1, 1, 5), (1, 6))
    assert _masked(device, Slot(words=words)) == set()
    assert _masked(device, Slot(output=(1,), words=words)) == {6}
    assert _masked(device, Slot(output=(1, 1), words=words)) == {5, 6}
    assert _masked(device, Slot(output=(1, 1, 1), words=words)) == {4, 5, 6}
    assert _masked(device, Slot((1, 1), (1,), words)) == {6}
    assert _masked(device, Slot((1, 1), (1,), words, match_prompt=True)) == {4, 5, 6}


def test_words_may_repeat_a_token_and_share_their_last_token(device):
    assert _masked(device, Slot(output=(3, 3), words=((3, 3, 3), (3, 3), (1, 3)))) == {3}


def test_a_history_of_max_model_len_is_matched(device):
    slot = Slot((1,) * 10, (1,) * 10, ((1, 1, 4), (1, 2, 5)))
    assert len(slot.prompt + slot.output) == MAX_MODEL_LEN
    assert _masked(device, slot) == {4}


def test_a_prefix_may_reach_from_the_prompt_through_the_output_into_drafts(device):
    slot = Slot((0, 1), (2,), ((1, 2, 3, 6), (2, 3, 5), (3, 4), (2, 0)))
    assert _masked(device, slot, drafts=()) == {0}
    assert _masked(device, slot, drafts=(3,)) == {4, 5}
    assert _masked(device, replace(slot, match_prompt=True), drafts=(3,)) == {4, 5, 6}
    assert _masked(device, slot, drafts=(3, 2)) == {0}


def test_rows_of_a_request_share_its_drafts(device):
    """Verification of two drafts: three rows per request, each sees one draft more."""
    slots = (
        Slot(output=(1,), words=((1, 0), (1, 4, 5), (4, 2, 6))),
        Slot(output=(2,), words=((2, 0), (2, 3, 5), (1, 4), (3, 3, 1))),
    )
    arguments = _arguments(Case(slots, tuple(Row(i // 3) for i in range(6))), device)
    arguments["logits"].zero_()
    drafts = torch.tensor([[4, 2], [3, 3]], dtype=torch.int32, device=device)
    ahead = torch.tensor([0, 1, 2, 0, 1, 2], device=device)
    for ops in (reference, kernels):
        logits = arguments["logits"].clone()
        _ban(ops, arguments | {"logits": logits, "ahead": ahead, "draft_token_ids": drafts})
        lost = [(row == -torch.inf).nonzero().flatten().tolist() for row in logits]
        assert lost == [[0], [5], [6], [0], [5], [1]]


@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 2, 2**31 - 1, -(2**31)])
def test_a_token_outside_the_vocabulary_is_not_written(device, token):
    case = Case((Slot(output=(1,), words=((1, token), (token,), (1, 5))),), (Row(0), Row(0)))
    assert _run(kernels, case, device) == _by_hand(case)
    assert _banned(case) == [{5}, {5}]


@pytest.mark.parametrize("length", [0, -1, -7, 5, 1000])
def test_a_word_of_invalid_length_masks_nothing(device, length):
    case = Case((Slot(output=(1, 1, 1), words=((1, 4), (1, 5))),), (Row(0),))
    for ops in (reference, kernels):
        arguments = _arguments(case, device)
        arguments["bad_word_lens"][0, 0] = length
        _ban(ops, arguments)
        assert arguments["logits"][0, 5] == -torch.inf
        assert arguments["logits"][0, 4] != -torch.inf


@pytest.mark.parametrize("count", [-1, 0, 1, 2, 3, 4, 100])
def test_num_bad_words_limits_the_words(device, count):
    """Words after the count, and words after the last row, would be masked if they were read."""
    case = Case((Slot(output=(UNREAD,), words=((0,), (1,), (5,))),), (Row(0),), max_words=3)
    for ops in (reference, kernels):
        for as_on_gpu in (False, True):
            arguments = _arguments(case, device)
            arguments["logits"].zero_()
            arguments["num_bad_words"].fill_(count)
            with tiles("apply_bad_words", as_on_gpu=as_on_gpu):
                _ban(ops, arguments)
            lost = (arguments["logits"][0] == -torch.inf).nonzero().flatten().tolist()
            assert lost == [0, 1, 5][: max(count, 0)]


@pytest.mark.parametrize("ahead", [None, 1])
def test_padding_keeps_its_logits(device, ahead):
    """The words stored before slot 0 would mask UNREAD."""
    case = Case((Slot(words=((1,),)),), (Row(-1, (UNREAD,)),), most_drafts=ahead)
    for ops in (reference, kernels):
        assert _run(ops, case, device) == _bits(_arguments(case)["logits"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_hundreds_of_words(device, dtype):
    """Several tiles of words per row; slots with no words, some words and all words."""

    def word(slot: int, index: int) -> Word:
        length = 1 + (slot + index) % 8
        prefix = tuple(1 + (i + slot) % 3 for i in range(10))[10 - (length - 1) :]
        return (*prefix[:-1], 0, index)[-length:] if index % 5 == 0 else (*prefix, index)

    def slot(index: int) -> Slot:
        words = tuple(word(index, i) for i in range((0, 1, 31, 32, 33, 130)[index % 6]))
        history = tuple(1 + (i + index) % 3 for i in range(10))
        return Slot(history[:4], history[4:], words, match_prompt=index % 2 == 1)

    slots = tuple(slot(index) for index in range(12))
    rows = (*(Row(index) for index in range(11, -1, -1)), Row(-1), Row(5))
    case = Case(slots, rows, max_words=130, max_len=8, vocab=151, dtype=dtype)
    assert max(map(len, _banned(case))) > 50
    for as_on_gpu in (False, True):
        with tiles("apply_bad_words", as_on_gpu=as_on_gpu):
            assert _run(kernels, case, device) == _by_hand(case)


def test_a_word_longer_than_a_tile(device):
    history = tuple(i % 5 for i in range(19))
    slot = Slot((), history, ((*history, 6), (*history[1:], 5), (0, *history[1:], 4)))
    assert _masked(device, slot, max_len=300) == {4, 5, 6}
    assert _masked(device, replace(slot, prompt=(9,), output=history[1:]), max_len=300) == {5}


def test_logits_beyond_two_to_the_31_elements(device):
    """Row 2 starts at element 2**31: the multiply by the stride must be 64 bits wide."""
    case = Case((Slot(output=(1,), words=((1, 4),)),), (Row(-1), Row(-1), Row(0)))
    arguments = _arguments(case, device)
    stride = 2**30
    whole = torch.empty(2 * stride + VOCAB, dtype=torch.float16, device=device)  # 4 GiB, lazy
    logits = whole.as_strided((3, VOCAB), (stride, 1))
    logits.zero_()
    _ban(kernels, arguments | {"logits": logits})
    assert logits.tolist() == [[0] * 7, [0] * 7, [0, 0, 0, 0, -torch.inf, 0, 0]]


@pytest.mark.parametrize(
    "case",
    [
        Case((Slot(),), ()),
        Case((Slot(words=((1,),)),), (Row(0),), max_words=0),
        Case((Slot(words=((1,),)),), (Row(0),), max_len=0),
        Case((), (Row(-1),)),
        Case((Slot(output=(1, 2), words=()),), (Row(0), Row(-1))),
    ],
    ids=["rows", "room for words", "room for tokens", "slots", "words"],
)
def test_empty_sizes_leave_the_logits_unchanged(device, case):
    for ops in (reference, kernels):
        assert _run(ops, case, device) == _bits(_arguments(case)["logits"])


def test_a_captured_launch_follows_the_state(device):
    """Rows, counts, words and history change between replays of one graph."""
    if device.type != "cuda":
        pytest.skip("not run: no GPU")
    case = Case((Slot(output=(1,), words=((1, 4),)), Slot(words=((3,), (5,)))), (Row(0),))
    arguments = _arguments(case, device)
    _ban(kernels, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _ban(kernels, arguments)

    def lost() -> list[int]:
        arguments["logits"].zero_()
        graph.replay()
        return (arguments["logits"][0] == -torch.inf).nonzero().flatten().tolist()

    assert lost() == [4]
    arguments["token_ids"][0, 0] = 2
    assert lost() == []
    arguments["bad_words"][0, 0, 0] = 2
    assert lost() == [4]
    arguments["idx_mapping"].fill_(1)
    assert lost() == [3, 5]
    arguments["num_bad_words"].fill_(1)
    assert lost() == [3]
    arguments["idx_mapping"].fill_(-1)
    assert lost() == []


def test_configurations():
    assert BadWordsConfig.default_for(16, 8) == BadWordsConfig(16, 8, 1)
    assert BadWordsConfig.default_for(128, 8) == BadWordsConfig(32, 8, 1)
    assert BadWordsConfig.default_for(5, 300) == BadWordsConfig(1, 512, 2)
    assert BadWordsConfig.for_interpreter(130, 5) == BadWordsConfig(256, 8, 1)


# --- errors ------------------------------------------------------------------------------------


INT32 = torch.zeros(9, dtype=torch.int32)
WORDS = torch.zeros(2, 4, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"logits": INT32[None]},
            TypeError,
            r"logits: expected dtype torch\.float.*, got torch\.",
        ),
        (
            {"logits": torch.zeros(3)},
            ValueError,
            r"logits: expected shape \[any, any\], got",
        ),
        ({"logits": torch.zeros(7, 3).T}, ValueError, r"logits: expected unit last stride"),
        ({"idx_mapping": INT32[:2]}, ValueError, r"idx_mapping: expected shape \[3\], got \[2\]"),
        (
            {"idx_mapping": INT32[:3].long()},
            TypeError,
            r"idx_mapping: expected dtype torch\.int32",
        ),
        ({"token_ids": INT32}, ValueError, r"token_ids: expected shape \[any, any\], got \[9\]"),
        (
            {"token_ids": WORDS[0].T[:2].T},
            ValueError,
            r"bad_words: expected shape \[4, any, any\]",
        ),
        ({"token_ids": WORDS[:, 0].T}, ValueError, r"token_ids: expected unit last stride"),
        ({"num_tokens": INT32}, ValueError, r"num_tokens: expected shape \[2\], got \[9\]"),
        ({"num_tokens": None}, TypeError, r"num_tokens: expected a torch\.Tensor, got None"),
        ({"prompt_len": INT32}, ValueError, r"prompt_len: expected shape \[2\], got \[9\]"),
        ({"bad_words": WORDS[:1]}, ValueError, r"bad_words: expected shape \[2, any, any\], got"),
        ({"bad_words": WORDS.long()}, TypeError, r"bad_words: expected dtype torch\.int32, got"),
        ({"bad_words": WORDS[..., :3]}, ValueError, r"bad_words: expected each slot's words cont"),
        ({"bad_word_lens": WORDS[0]}, ValueError, r"bad_word_lens: expected shape \[2, 4\], got"),
        ({"num_bad_words": INT32}, ValueError, r"num_bad_words: expected shape \[2\], got \[9\]"),
        (
            {"bad_words_match_prompt": INT32},
            ValueError,
            r"match_prompt: expected shape \[2\], got \[9\]",
        ),
        (
            {"bad_words_match_prompt": INT32[:2] > 0},
            TypeError,
            r"match_prompt: expected dtype torch\.int32",
        ),
        ({"ahead": INT32[:3]}, ValueError, r"ahead, draft_token_ids: expected both or neither"),
        ({"draft_token_ids": WORDS[0, :3]}, ValueError, r"ahead, draft_token_ids: expected both"),
        (
            {"ahead": INT32, "draft_token_ids": WORDS[0, :3]},
            ValueError,
            r"ahead: expected shape \[3\], got \[9\]",
        ),
        (
            {"ahead": INT32[:3].short(), "draft_token_ids": WORDS[0, :3]},
            TypeError,
            r"ahead: expected dtype torch\.int32 or torch\.int64, got torch\.int16",
        ),
        (
            {"ahead": INT32[:3], "draft_token_ids": WORDS[0, :2]},
            ValueError,
            r"draft_token_ids: expected a number of rows that divides the 3 rows of logits, got 2",
        ),
        (
            {"ahead": INT32[:3], "draft_token_ids": WORDS[0, :0]},
            ValueError,
            r"draft_token_ids: expected a number of rows that divides the 3 rows of logits, got 0",
        ),
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    slots = (Slot(words=((1,),)), Slot(words=((2,),)))
    arguments = _arguments(Case(slots, (Row(0), Row(1), Row(-1))), device)
    for name, value in change.items():
        arguments[name] = with_strides(value, device) if isinstance(value, torch.Tensor) else value
    before = arguments["logits"].clone()
    for ops in (reference, kernels):
        with pytest.raises(error, match=message):
            _ban(ops, arguments)
    assert torch.equal(arguments["logits"].nan_to_num(), before.nan_to_num())


def test_a_tensor_on_another_device_is_named(device):
    arguments = _arguments(Case((Slot(words=((1,),)),), (Row(0),)), device)
    arguments["num_tokens"] = torch.empty(1, dtype=torch.int32, device="meta")
    for ops in (reference, kernels):
        with pytest.raises(ValueError, match=r"num_tokens: expected device .*, got meta"):
            _ban(ops, arguments)


def test_a_cpu_tensor_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr("mrv1.kernels._base.checks.INTERPRET", False)
    with pytest.raises(UnsupportedDeviceError, match="logits: "):
        _ban(kernels, _arguments(Case((Slot(),), (Row(0),))))
