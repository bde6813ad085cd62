"""The draw: random words exactly, tokens up to near ties, the distribution by chi-square."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.sampling.contracts import MAX_GROUPS, group_size
from mrv1.kernels.sampling.filters import FILTERS as STORED
from mrv1.kernels.sampling.filters import Filters
from mrv1.kernels.sampling.philox import gumbel, philox_word
from mrv1.kernels.sampling.sample_tokens import SampleTokensConfig
from tests.kernels.elementwise import DTYPES, in_a_wider_row, normal, tiles
from tests.kernels.elementwise import seeds as small_seeds

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

NEAR_TIE = 2.0**-17
"""Scores this close, relative to the larger of the best and 16, may swap: noise and quotient each
differ from the oracle's by a few float32 ulp, and the noise reaches 22."""
ROUNDING = 2.0**-15
"""Relative change of a filter's value: the kernel may keep the set of the changed value, as
thresholds of min_p and sums of up to 2^18 float32 terms round by less."""

SOME = 3 if INTERPRET else 60
"""Examples for tests that take the interpreter long."""

int64s = st.integers(-(2**63), 2**63 - 1)
VOCABS = (1, 2, 96, 128, 129, 1000, 4096, 9001)  # a group has 128 ids, a tile on a GPU 2,048
FILTERS = {
    "top_k": [0, 1, 2, 40, 300, 5000],
    "top_p": [1.0, 0.999, 0.9, 0.3, 1e-6],
    "min_p": [0.0, 1e-4, 0.1, 1.0],
}
"""Values to draw from; the first keeps all tokens."""
OFF = {name: values[0] for name, values in FILTERS.items()}


def _near_best(logits, temperature, seeds, positions, child, **filters):
    """Return the oracle's token and all tokens as good within a near tie: [vocab] bool.

    For one drawn row, in float64.
    """
    scaled = (logits.double() - logits.double().max()) / temperature.double()
    noise = (seeds, positions, child)
    if _is_in_rounds(scaled.numel(), **filters):
        return _near_in_rounds(scaled, scaled.softmax(0), filters["top_p"].item(), noise, 0)
    scaled = scaled.masked_fill(~reference.kept_tokens(scaled[None], **filters)[0], -torch.inf)
    return _near_draw(scaled, noise, 0)


def _is_in_rounds(vocab, top_p=None, **others):
    """Return whether top_p is the only filter of a row."""
    on = {name for name, value in others.items() if value.item() != OFF[name]}
    if "top_k" in on and others["top_k"].item() >= vocab:
        on.remove("top_k")
    return top_p is not None and top_p.item() < 1 and not on


def _near_in_rounds(scaled, probs, top_p, noise, purpose):
    """Return near winners under top-p alone: kept tokens near the best, and of later rounds."""
    found = torch.zeros_like(scaled, dtype=torch.bool)
    for token in _near_draw(scaled, noise, purpose).nonzero().flatten().tolist():
        mass = probs.where(scaled > scaled[token], 0).sum().item()
        if mass < top_p * (1 + ROUNDING):
            found[token] = True
        if mass > 0 and mass > top_p * (1 - ROUNDING):
            likelier = scaled.masked_fill(scaled <= scaled[token], -torch.inf)
            found |= _near_in_rounds(likelier, probs, top_p, noise, purpose + 2)
    return found


def _near_draw(scaled, noise, purpose):
    """Return the tokens that may win both draws, the group's and the token's: [vocab] bool."""
    seeds, positions, child = noise
    size = reference.group_size(scaled.numel())
    groups = torch.nn.functional.pad(scaled, (0, -scaled.numel() % size), value=-torch.inf)
    groups = groups.view(-1, size)

    def near(scores, purpose):
        index = torch.arange(scores.numel())
        words = reference.philox_words(seeds, positions, index, purpose, child)
        scores = scores + reference.gumbel_noise(words).view(scores.shape)
        best = scores.amax(-1, keepdim=True)
        return (best - scores <= NEAR_TIE * best.abs().clamp_min(16)) & (scores > -torch.inf)

    of_group = near(groups.logsumexp(1), purpose + 1)
    return (of_group[:, None] & near(groups, purpose)).flatten()[: scaled.numel()]


def _assert_near_best(tokens, logits, temperature, seeds, positions, **options) -> None:
    """Fail unless every token is the oracle's, or as good within rounding."""
    arguments = [x.cpu() for x in (logits, temperature, seeds, positions)]
    options = {name: value.cpu() for name, value in options.items()}
    tokens, want = tokens.cpu(), reference.sample_tokens(*arguments, **options)
    for row in (tokens != want).nonzero().flatten().tolist():
        logits, temperature, *others = (x[row : row + 1] for x in arguments)
        assert temperature.item() != 0
        assert tokens[row] >= 0
        of_row = {name: value[row : row + 1] for name, value in options.items()}
        child = of_row.pop("child", None)
        kept = []
        for change in (1 - ROUNDING, 1.0, 1 + ROUNDING):
            changed = {
                name: (value * change).clamp(max=1.0) if name != "top_k" and value != 1 else value
                for name, value in of_row.items()
            }
            kept.append(_near_best(logits[0], temperature, *others, child, **changed))
        assert bool(torch.stack(kept).any(0)[tokens[row]])
    assert int((tokens != want).sum()) <= 1  # a near tie is rare: two mean something is wrong


def _arguments(rows, vocab, dtype, device, seed=0, temperatures=(0.0, 0.3, 1.0, 2.0)):
    generator = torch.Generator().manual_seed(seed)
    return (
        (normal((rows, vocab), torch.float32, "cpu", seed) * 3).to(dtype).to(device),
        torch.tensor([temperatures[i % len(temperatures)] for i in range(rows)], device=device),
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).to(device),
        torch.randint(0, 10_000, (rows,), generator=generator).to(device),
    )


def _filters(rows, device, **values):
    """Return filter options that are equal in all rows."""
    return {
        name: torch.full((rows,), value, dtype=STORED[name].dtype, device=device)
        for name, value in values.items()
    }


@st.composite
def _row_filters(draw, rows):
    """Draw filter options that differ from row to row."""
    return {
        name: torch.tensor(
            draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows)),
            dtype=STORED[name].dtype,
        )
        for name, values in FILTERS.items()
    }


# --- random words ------------------------------------------------------------------------------


def _philox_by_hand(counter, key):
    """Return philox4x32-10 of Python integers, as the paper states it."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


KNOWN_ANSWERS = [  # Random123's kat_vectors, "philox4x32 10"
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, want):
    got = reference.philox4x32(
        tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key)
    )
    assert tuple(word.item() for word in got) == want
    assert _philox_by_hand(counter, key) == want


@given(seed=int64s, position=int64s, vocab=st.integers(1, 40))
def test_the_oracle_words_are_philox(seed, position, vocab):
    key = seed % 2**32, (seed >> 32) % 2**32
    seed, index = torch.tensor([seed]), torch.arange(vocab)
    for purpose, child in ((0, None), (1, 3)):
        children = None if child is None else torch.tensor([child], dtype=torch.int32)
        got = reference.philox_words(seed, torch.tensor([position]), index, purpose, children)
        counters = [(position % 2**32, v, purpose, child or 0) for v in range(vocab)]
        assert got.tolist() == [[_philox_by_hand(counter, key)[0] for counter in counters]]


@triton.jit
def _words_kernel(
    words_ptr, noise_ptr, seed_ptr, position_ptr, child_ptr, vocab, TILE: tl.constexpr
):
    token = tl.arange(0, TILE)
    child = tl.load(child_ptr)
    word = philox_word(tl.load(seed_ptr), tl.load(position_ptr), token, 1, child)
    tl.store(words_ptr + token, word.to(tl.int64), mask=token < vocab)
    tl.store(noise_ptr + token, gumbel(word), mask=token < vocab)


@given(seed=int64s, position=int64s, child=st.integers(0, 2**31 - 1))
def test_the_kernel_words_equal_the_oracle_words(device, seed, position, child):
    child = torch.tensor([child], dtype=torch.int32, device=device)
    seed, position = torch.tensor([seed], device=device), torch.tensor([position], device=device)
    words = torch.empty(1, 1000, dtype=torch.int64, device=device)
    noise = torch.empty(1, 1000, device=device)
    _words_kernel[(1,)](words, noise, seed, position, child, 1000, TILE=1024)
    index = torch.arange(1000, device=device)
    assert torch.equal(words, reference.philox_words(seed, position, index, 1, child))
    want = reference.gumbel_noise(words)
    torch.testing.assert_close(noise, want, rtol=2.0**-21, atol=2.0**-21)


# --- noise -------------------------------------------------------------------------------------


@triton.jit
def _gumbel_kernel(noise_ptr, words_ptr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    word = tl.load(words_ptr + index).to(tl.uint32)
    tl.store(noise_ptr + index, gumbel(word))


def test_gumbel_noise_is_accurate_at_both_ends(device):
    """Words 0 and 2^32 - 1, and both sides of where the series takes over."""
    edge = 2**32 // 32
    words = [0, 1, 2, 127, edge - 1, edge, edge + 1, 2**31, 2**32 - 2, 2**32 - 1]
    words = torch.tensor(words + list(range(7, 2**32, 2**32 // 54))[:54], device=device)
    noise = torch.empty(64, device=device)
    _gumbel_kernel[(1,)](noise, words, TILE=64)
    want = [-math.log(-math.log1p(-(word + 0.5) / 2**32)) for word in words.tolist()]
    assert 22.8 < want[0] < 22.9
    assert -3.2 < want[9] < -3.1
    want = torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(noise.cpu().double(), want, rtol=2.0**-21, atol=2.0**-21)
    torch.testing.assert_close(reference.gumbel_noise(words).cpu().double(), want)


# --- draws -------------------------------------------------------------------------------------


@given(
    rows=st.integers(1, 5),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    as_on_gpu=st.booleans(),
    seed=small_seeds,
)
def test_tokens_equal_the_oracle_tokens(device, rows, vocab, dtype, as_on_gpu, seed):
    logits, *others = _arguments(rows, vocab, dtype, device, seed)
    logits = in_a_wider_row(logits, 8, 5)
    out = torch.full((rows,), -7, device=device)
    with tiles("sample_tokens", as_on_gpu=as_on_gpu):
        assert kernels.sample_tokens(logits, *others, out=out) is out
    _assert_near_best(out, logits, *others)


@given(
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    offset=st.sampled_from([0, -100]),  # -100: all logits are below 0; padding must not win
    seed=small_seeds,
)
def test_greedy_is_the_first_argmax(device, vocab, dtype, offset, seed):
    logits = normal((4, vocab), torch.float32, device, seed).round() + offset  # many ties
    logits = logits.to(dtype)
    _, _, *others = _arguments(4, vocab, dtype, device)
    greedy = torch.zeros(4, device=device)
    for as_on_gpu in (False, True):
        with tiles("sample_tokens", as_on_gpu=as_on_gpu):
            tokens = kernels.sample_tokens(logits, greedy, *others)
        values = logits.tolist()
        assert tokens.tolist() == [row.index(max(row)) for row in values]


@given(order=st.permutations(range(4)), seed=small_seeds)
def test_a_row_draws_the_same_in_any_batch(device, order, seed):
    order = torch.tensor(order, device=device)
    arguments = _arguments(4, 700, torch.float32, device, seed)
    want = kernels.sample_tokens(*arguments)[order]
    shuffled = [argument[order] for argument in arguments]
    assert torch.equal(kernels.sample_tokens(*shuffled), want)
    assert torch.equal(kernels.sample_tokens(*(a[:2] for a in shuffled)), want[:2])


def _every_filter_off(rows, device):
    return _filters(rows, device, **OFF)


def test_every_filter_has_values_to_draw_from():
    assert FILTERS.keys() == STORED.keys() == Filters.__annotations__.keys()
    assert {name: each.off for name, each in STORED.items()} == OFF
    dtypes = {int: torch.int32, float: torch.float32}
    assert all(each.dtype == dtypes[type(OFF[name])] for name, each in STORED.items())


@settings(max_examples=SOME)
@given(rows=st.integers(1, 4), vocab=st.sampled_from(VOCABS), seed=small_seeds)
def test_filters_that_are_off_change_nothing(device, rows, vocab, seed):
    arguments = _arguments(rows, vocab, torch.float32, device, seed)
    want = kernels.sample_tokens(*arguments)
    off = _every_filter_off(rows, device)
    child = torch.zeros(rows, dtype=torch.int32, device=device)
    assert torch.equal(kernels.sample_tokens(*arguments, **off, child=child), want)
    all_of_them = off | _filters(rows, device, top_k=vocab)
    assert torch.equal(kernels.sample_tokens(*arguments, **all_of_them), want)


@settings(max_examples=SOME)
@given(
    data=st.data(),
    rows=st.integers(1, 3),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["normal", "ties", "flat", "peaked", "masked"]),
    as_on_gpu=st.booleans(),
    seed=small_seeds,
)
def test_filtered_tokens_equal_the_oracle_tokens(
    device, data, rows, vocab, dtype, kind, as_on_gpu, seed
):
    logits, *others = _arguments(rows, vocab, dtype, device, seed)
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = torch.full_like(logits, -2.5)
    elif kind == "peaked":
        logits[:, vocab // 2] = 20  # 99.9% and more
    elif kind == "masked":
        logits[:, : vocab * 3 // 4] = -torch.inf
    options = {name: x.to(device) for name, x in data.draw(_row_filters(rows)).items()}
    options["child"] = torch.arange(rows, dtype=torch.int32, device=device)
    with tiles("sample_tokens", as_on_gpu=as_on_gpu):
        tokens = kernels.sample_tokens(logits, *others, **options)
    _assert_near_best(tokens, logits, *others, **options)


@pytest.mark.parametrize("sampled_offset", [0.0, 4.0, -4.0])  # others: a sample misleads
@settings(max_examples=2 if INTERPRET else 20)
@given(
    data=st.data(),
    sizes=st.sampled_from([(1, 32, 32, 2), (2, 128, 32, 4), (4, 256, 64, 8)]),
    pivots=st.sampled_from([2, 4]),
    spread=st.sampled_from([0.0, 1e-30, 1.0, 1e30]),
    seed=small_seeds,
)
def test_groups_and_tokens_beyond_the_lists_are_searched(
    device, sampled_offset, data, sizes, pivots, spread, seed
):
    """With room for few groups and tokens, a small row takes the passes of a large row."""
    few_groups, lanes, columns, depth = sizes
    logits, temperature, *others = _arguments(2, 1500, torch.float32, device, seed)
    for sample in range(few_groups):
        group = sample * 12 // few_groups
        logits[:, group * 128 : (group + 1) * 128] += sampled_offset
    logits = logits.round(decimals=1) * spread
    temperature = (temperature + 0.5) * (spread or 1.0)
    options = {name: x.to(device) for name, x in data.draw(_row_filters(2)).items()}
    config = dataclasses.replace(
        SampleTokensConfig.default_for(1500),
        few_groups=few_groups, lanes=lanes, columns=columns, depth=depth, pivots=pivots,
        listed=16,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleTokensConfig, "default_for", lambda *_: config)
        patch.setattr(SampleTokensConfig, "for_interpreter", lambda _: config)
        tokens = kernels.sample_tokens(logits, temperature, *others, **options)
    _assert_near_best(tokens, logits, temperature, *others, **options)


@pytest.mark.parametrize(
    ("top_k", "kind"),
    [
        (100, "normal"),  # 100 of the 157 groups hold the best tokens
        (300, "normal"),  # more tokens than groups: a sample tells where to begin
        (300, "masked"),
        (6000, "ties"),  # more tokens than a sample can tell
    ],
)
@settings(max_examples=1 if INTERPRET else 8)
@given(as_on_gpu=st.booleans(), seed=small_seeds)
def test_a_large_top_k_equals_the_oracle(device, top_k, kind, as_on_gpu, seed):
    logits, *others = _arguments(2, 20_000, torch.float32, device, seed, temperatures=(0.8, 1.5))
    if kind == "masked":
        logits[:, torch.arange(20_000, device=device) % 40 != 0] = -torch.inf
    elif kind == "ties":
        logits = logits.round()
    options = _filters(2, device, top_k=top_k) | {"top_p": torch.tensor([0.9, 1.0], device=device)}
    with tiles("sample_tokens", as_on_gpu=as_on_gpu):
        tokens = kernels.sample_tokens(logits, *others, **options)
    _assert_near_best(tokens, logits, *others, **options)


@settings(max_examples=SOME)
@given(data=st.data(), order=st.permutations(range(4)), seed=small_seeds)
def test_a_filtering_row_draws_the_same_in_any_batch(device, data, order, seed):
    order = torch.tensor(order, device=device)
    arguments = _arguments(4, 3000, torch.float32, device, seed)
    options = {name: x.to(device) for name, x in data.draw(_row_filters(4)).items()}
    want = kernels.sample_tokens(*arguments, **options)[order]
    shuffled = [argument[order] for argument in arguments]
    options = {name: x[order] for name, x in options.items()}
    assert torch.equal(kernels.sample_tokens(*shuffled, **options), want)
    some = {name: x[:2] for name, x in options.items()}
    assert torch.equal(kernels.sample_tokens(*(a[:2] for a in shuffled), **some), want[:2])


def test_parallel_samples_differ(device):
    arguments = [x[:1].expand(64, *x.shape[1:]).contiguous() for x in _arguments(
        1, 1000, torch.float32, device, temperatures=(2.0,)
    )]  # fmt: skip
    child = torch.arange(64, dtype=torch.int32, device=device)
    tokens = kernels.sample_tokens(*arguments, child=child)
    assert len(set(tokens.tolist())) > 32
    assert torch.equal(tokens, reference.sample_tokens(*arguments, child=child))
    assert tokens[0] == kernels.sample_tokens(*arguments)[0]


@settings(max_examples=max(settings.default.max_examples // 4, 8))  # each draws for many rows
@given(data=st.data(), seed=small_seeds, num_slots=st.integers(1, 5))
def test_parameters_in_slot_order_are_read_through_idx_mapping(device, data, seed, num_slots):
    slots = data.draw(st.permutations([*range(num_slots), -1, -1]))
    logits, temperature, seeds, positions = _arguments(
        len(slots), 300, torch.float32, device, seed
    )
    idx_mapping = torch.tensor(slots, dtype=torch.int32, device=device)
    of_slot = [x[:num_slots] for x in (temperature, seeds, positions)]
    prompt_len = torch.arange(num_slots, dtype=torch.int32, device=device)
    known = of_slot[2].int() + prompt_len
    in_order = (of_slot[0].contiguous(), of_slot[1].contiguous(), known)
    filters = _filters(num_slots, device, **OFF)
    filters["top_k"] += torch.arange(num_slots, dtype=torch.int32, device=device)
    filters["top_p"] -= filters["top_k"] / 10
    filters["child"] = filters["top_k"].clone()
    for ops in (kernels, reference):
        tokens = ops.sample_tokens(
            logits, *in_order, idx_mapping=idx_mapping, prompt_len=prompt_len, **filters
        )
        rows = [row for row, slot in enumerate(slots) if slot >= 0]
        of_rows = [x[[slots[row] for row in rows]] for x in of_slot]
        options = {name: x[[slots[row] for row in rows]] for name, x in filters.items()}
        assert torch.equal(tokens[rows], ops.sample_tokens(logits[rows], *of_rows, **options))
        assert (tokens[idx_mapping < 0] == -1).all()


# --- distribution ------------------------------------------------------------------------------


def _chi_square_bound(degrees: int) -> float:
    """Return the value that chi-square exceeds once in 10^6 (Wilson-Hilferty approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.75 * math.sqrt(spread)) ** 3


def _assert_draws_from(probabilities: torch.Tensor, tokens: torch.Tensor) -> None:
    counts = torch.bincount(tokens.cpu(), minlength=probabilities.numel()).double()
    expected = probabilities * tokens.numel()
    assert bool((expected > 5).all())
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < _chi_square_bound(probabilities.numel() - 1)


@pytest.mark.parametrize("num_draws", [25_000, pytest.param(100_000, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("vary", "filters"),
    [
        ("positions", {}),
        ("seeds", {"top_k": 20}),
        ("child", {"top_p": 0.7}),
        ("seeds", {"top_p": 0.1}),  # some draws take five rounds
        ("positions", {"min_p": 0.3}),
        ("seeds", {"top_k": 40, "top_p": 0.8}),
    ],
    ids=str,
)
def test_draws_follow_the_softmax(device, vary, filters, num_draws):
    """150 tokens are two groups: a group is drawn by its sum, then a token of the group."""
    temperature = 0.7
    logits = torch.linspace(-1.0, 1.0, 150)[torch.randperm(150, generator=torch.manual_seed(0))]
    index = torch.arange(num_draws)
    rows = {
        "logits": logits.expand(num_draws, -1),
        "temperature": torch.full((num_draws,), temperature),
        "seeds": 2**40 + index if vary == "seeds" else torch.full((num_draws,), 11),
        "positions": index if vary == "positions" else torch.full((num_draws,), 3),
        "child": index.int() if vary == "child" else torch.zeros(num_draws, dtype=torch.int32),
        **_filters(num_draws, "cpu", **filters),
    }
    if device.type == "cpu":  # one program per row: the oracle, equal to the kernel, is quicker
        step = 5_000
        tokens = torch.cat([
            reference.sample_tokens(**{name: x[i : i + step] for name, x in rows.items()})
            for i in range(0, num_draws, step)
        ])  # fmt: skip
        some = {name: argument[:20] for name, argument in rows.items()}
        assert torch.equal(kernels.sample_tokens(**some), tokens[:20])
    else:
        tokens = kernels.sample_tokens(**{name: x.to(device) for name, x in rows.items()}).cpu()
    kept = _kept_by_hand((logits.double() / temperature).tolist(), **filters)
    probabilities = (logits.double() / temperature).where(kept, -torch.inf).softmax(-1)
    assert bool(kept[tokens].all())
    _assert_draws_from(probabilities[kept], (kept.long().cumsum(0) - 1)[tokens])


def _kept_by_hand(scaled, top_k=0, top_p=1.0, min_p=0.0):
    """Return the kept tokens, by the definitions, token by token: [vocab] bool."""
    weights = [math.exp(x - max(scaled)) if x > -math.inf else 0.0 for x in scaled]
    kept = [w > 0 and w >= min_p for w in weights]
    if top_k:
        kept = [
            k and sum(y > x for y in scaled) < top_k for k, x in zip(kept, scaled, strict=True)
        ]
    total = sum(w for w, k in zip(weights, kept, strict=True) if k)
    likelier = [
        sum(w for w, k in zip(weights, kept, strict=True) if k and w > mine) for mine in weights
    ]
    best = max(weights)
    return torch.tensor([
        k and (top_p >= 1 or mass < top_p * total or w == best)
        for k, mass, w in zip(kept, likelier, weights, strict=True)
    ])  # fmt: skip


@given(
    data=st.data(),
    values=st.lists(st.integers(-8, 8), min_size=1, max_size=40),
    num_masked=st.integers(0, 10),
)
def test_the_oracle_keeps_the_tokens_of_the_definitions(data, values, num_masked):
    scaled = torch.tensor([*(x / 3 for x in values), *[-torch.inf] * num_masked]).double()
    filters = data.draw(_row_filters(1))
    got = reference.kept_tokens(scaled[None], **filters)[0]
    of_row = {name: x.double().item() for name, x in filters.items()}
    assert torch.equal(got, _kept_by_hand(scaled.tolist(), **of_row))


@settings(max_examples=SOME)
@given(
    vocab=st.sampled_from(VOCABS), top_p=st.floats(0.0625, 0.96875, width=32),
    as_on_gpu=st.booleans(), seed=small_seeds,
)  # fmt: skip
def test_top_p_draws_the_unfiltered_token_if_the_token_is_kept(
    device, vocab, top_p, as_on_gpu, seed
):
    arguments = _arguments(4, vocab, torch.float32, device, seed, temperatures=(0.5, 1.0))
    with tiles("sample_tokens", as_on_gpu=as_on_gpu):
        plain = kernels.sample_tokens(*arguments).cpu()
        tokens = kernels.sample_tokens(*arguments, **_filters(4, device, top_p=top_p)).cpu()
    scaled = (arguments[0].double() / arguments[1].double()[:, None]).cpu()
    probs = scaled.softmax(1)
    for row in range(4):
        likelier = probs[row].where(scaled[row] > scaled[row, plain[row]], 0).sum().item()
        if abs(likelier - top_p) > ROUNDING:
            assert (tokens[row] == plain[row]) == (likelier < top_p)


def test_a_flat_vocabulary_is_drawn_evenly():
    vocab, rows = 8_000, 600
    logits, temperature = torch.zeros(1, vocab).expand(rows, -1), torch.ones(rows)
    tokens = reference.sample_tokens(logits, temperature, torch.arange(rows), torch.arange(rows))
    _assert_draws_from(torch.full((8,), 1 / 8, dtype=torch.float64), tokens // (vocab // 8))


# --- edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_rows_without_a_token_fail_alone(device, temperature, filters, as_on_gpu):
    vocab = 9000  # five tiles on a GPU
    logits = torch.full((6, vocab), -torch.inf)
    logits[1] = torch.nan
    logits[2, 4500], logits[2, 10] = 3e38, torch.nan
    logits[3, 4999], logits[3, 4998] = torch.inf, torch.inf
    logits[4, 7777] = -3e38
    logits[5, 8999], logits[5, 0] = 3e38, -3e38
    others = (
        torch.full((6,), temperature, device=device),
        *(torch.arange(6, device=device) for _ in range(2)),
    )
    options = _filters(6, device, **filters)
    with tiles("sample_tokens", as_on_gpu=as_on_gpu):
        tokens = kernels.sample_tokens(logits.to(device), *others, **options)
    assert tokens.tolist() == [-1, -2, -2, -2 if temperature else 4998, 7777, 8999]
    assert torch.equal(tokens, reference.sample_tokens(logits.to(device), *others, **options))


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e30])
def test_extreme_temperatures(device, temperature):
    logits = normal((4, 1000), torch.float32, device)
    logits[:, 3], logits[:, 700] = 9.0, 9.0
    others = (torch.full((4,), temperature, device=device), torch.arange(4, device=device))
    for filters in ({}, {"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.9}):
        options = _filters(4, device, **filters)
        tokens = kernels.sample_tokens(logits, *others, others[1], **options)
        if temperature < 1 or "top_k" in filters:
            assert set(tokens.tolist()) <= {3, 700}
        assert torch.equal(tokens, reference.sample_tokens(logits, *others, others[1], **options))


def test_no_rows(device):
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    logits = torch.ones(0, 10, device=device)
    assert kernels.sample_tokens(logits, empty.float(), empty, empty).shape == (0,)
    assert reference.sample_tokens(logits, empty.float(), empty, empty).shape == (0,)


@settings(max_examples=1 if INTERPRET else 20)
@given(
    vocab=st.sampled_from([151_936, 262_144]),
    filters=st.sampled_from([
        {}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}, {"top_k": 10_000}, {"min_p": 0.1},
        {"top_k": 1000, "top_p": 0.9},
    ]),
    seed=small_seeds,
)  # fmt: skip
def test_the_largest_vocabularies(device, vocab, filters, seed):
    arguments = _arguments(2, vocab, torch.bfloat16, device, seed, temperatures=(1.0, 0.0))
    options = _filters(2, device, **filters)
    tokens = kernels.sample_tokens(*arguments, **options)
    _assert_near_best(tokens, *arguments, **options)


@pytest.mark.parametrize("vocab", [1, 31, 2048, 151_936, 262_144, 524_288, 524_289, 2**24])
def test_configurations_cover_the_vocabulary(vocab):
    size = group_size(vocab)
    assert size == reference.group_size(vocab)
    assert (size == 128) == (vocab <= 524_288)
    assert -(-vocab // size) <= MAX_GROUPS
    configs = (SampleTokensConfig.default_for(vocab), SampleTokensConfig.for_interpreter(vocab))
    for config in configs:
        for tile in (
            config.all_groups, config.tile_groups, config.few_groups, config.lanes,
            config.columns, config.depth,
        ):  # fmt: skip
            assert tile & (tile - 1) == 0
        assert config.columns >= 32
        assert config.all_groups >= -(-vocab // size)
        assert config.scratch_size >= config.all_groups + config.columns * config.depth


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.ones(8)}, ValueError, r"logits: expected shape \[any, any\], got \[8\]"),
        ({"logits": torch.ones(2, 8).double()}, TypeError, r"logits: expected dtype .*float64"),
        ({"logits": torch.ones(8, 2).T}, ValueError, r"logits: expected unit last stride"),
        (
            {"logits": torch.ones(2, 0)},
            ValueError,
            r"logits: expected a vocabulary of 1 to 16777216 tokens, got 0",
        ),
        (
            {"temperature": torch.ones(2).half()},
            TypeError,
            r"temperature: expected dtype torch\.float32, got torch\.float16",
        ),
        ({"temperature": torch.ones(3)}, ValueError, r"temperature: expected shape \[2\]"),
        ({"seeds": torch.ones(2).int()}, TypeError, r"seeds: expected dtype torch\.int64"),
        (
            {"positions": torch.ones(4).long()[::2]},
            ValueError,
            r"positions: expected a contiguous",
        ),
        ({"top_k": torch.ones(2).long()}, TypeError, r"top_k: expected dtype torch\.int32"),
        ({"top_p": torch.ones(3)}, ValueError, r"top_p: expected shape \[2\]"),
        ({"min_p": torch.ones(2).int()}, TypeError, r"min_p: expected dtype torch\.float32"),
        ({"child": torch.ones(2)}, TypeError, r"child: expected dtype torch\.int32"),
        ({"out": torch.ones(2).int()}, TypeError, r"out: expected dtype torch\.int64"),
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    arguments = {
        "logits": torch.ones(2, 8),
        "temperature": torch.ones(2),
        "seeds": torch.ones(2, dtype=torch.int64),
        "positions": torch.ones(2, dtype=torch.int64),
    }
    arguments = {name: _strided_to(value, device) for name, value in (arguments | change).items()}
    with pytest.raises(error, match=message):
        kernels.sample_tokens(**arguments)


def _strided_to(tensor: torch.Tensor, device) -> torch.Tensor:
    """Copy to ``device`` and keep the strides."""
    strided = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return strided.copy_(tensor)
