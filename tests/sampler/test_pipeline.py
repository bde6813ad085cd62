"""The whole sampler, mixed rows in any slots: against the documented rules, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import SamplingParams, kernels
from mrv1.kernels._base.triton import INTERPRET
from mrv1.sampler import History, Sampler, SamplerLimits
from tests.kernels.elementwise import normal
from tests.kernels.elementwise import seeds as small_seeds
from tests.kernels.test_sample_tokens import STORED, _assert_near_best
from tests.sampler.rules import edited

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

VOCABS = (1, 1000, 32_000, 128_256, 151_936, 262_144)
PROMPT, OUTPUT, NUM_SLOTS = 6, 9, 5
MAX_STOP_TOKENS = 4
NONE, NAN = -1, -2


@st.composite
def requests(draw, vocab: int) -> SamplingParams:
    """Draw parameters whose edits of multiples of 1/64 are exact in float32."""
    tokens = st.integers(0, min(vocab, 40) - 1)
    some = st.lists(tokens, min_size=1, max_size=6)

    def maybe(values: st.SearchStrategy, none: object) -> object:
        return draw(st.one_of(st.just(none), values))

    return SamplingParams(
        temperature=draw(st.sampled_from([0, 0.5, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 5, 300])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.3])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 2.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        logit_bias=maybe(st.dictionaries(tokens, st.sampled_from([-2.5, 4.0]), max_size=5), {}),
        allowed_token_ids=maybe(some, None),
        bad_words_token_ids=maybe(st.lists(some, max_size=4), []),
        bad_words_match_prompt=draw(st.booleans()),
        min_tokens=draw(st.sampled_from([0, OUTPUT, OUTPUT + 1])),
        stop_token_ids=maybe(some, [])[:MAX_STOP_TOKENS],
        seed=draw(st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1)),
    )


@settings(max_examples=10 if INTERPRET else 60)
@given(
    data=st.data(),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kinds=st.lists(
        st.sampled_from(["normal", "ties", "flat", "peaked", "masked", "nan"]),
        min_size=1, max_size=NUM_SLOTS,
    ),
    seed=small_seeds,
)  # fmt: skip
def test_mixed_rows_are_edited_and_drawn_by_the_rules(device, data, vocab, dtype, kinds, seed):
    num_rows = len(kinds)
    slots_of_rows = data.draw(st.permutations(range(NUM_SLOTS)))[:num_rows]
    params = [data.draw(requests(vocab)) for _ in kinds]
    logits = (normal((num_rows, vocab), torch.float32, "cpu", seed) * 3 * 64).round() / 64
    for row, kind in enumerate(kinds):
        if kind == "ties":
            logits[row] = logits[row].round()
        elif kind == "flat":
            logits[row] = -1.5
        elif kind == "peaked":
            logits[row, vocab // 2] = 20.0
        elif kind == "masked":
            logits[row, : vocab // 2] = -torch.inf
        elif kind == "nan":
            logits[row, vocab // 3] = torch.nan
    logits = logits.to(dtype)
    generator = np.random.default_rng(seed)
    token_ids = generator.integers(min(vocab, 40), size=(NUM_SLOTS, PROMPT + OUTPUT))

    limits = SamplerLimits(
        vocab_size=vocab, max_bad_words_num=4, bad_words_max_len=6, max_logit_bias=5
    )
    slots = {
        name: torch.zeros(NUM_SLOTS if width is None else (NUM_SLOTS, width), dtype=dtype_)
        for name, (dtype_, width) in Sampler.fields(limits).items()
    }
    history = {
        "token_ids": torch.tensor(token_ids, dtype=torch.int32),
        "num_tokens": torch.full((NUM_SLOTS,), PROMPT + OUTPUT, dtype=torch.int32),
        "prompt_len": torch.full((NUM_SLOTS,), PROMPT, dtype=torch.int32),
        "min_total_tokens": torch.zeros(NUM_SLOTS, dtype=torch.int32),
        "late_token_ids": torch.full((NUM_SLOTS, MAX_STOP_TOKENS), -1, dtype=torch.int32),
    }
    on_cpu = Sampler(NUM_SLOTS, limits, slots, kernels)
    for slot, of_row in zip(slots_of_rows, params, strict=True):
        fields = on_cpu.enter(
            of_row, of_row.seed, banned_token_sequences=of_row.bad_words_token_ids
        )
        for name, values in fields.items():
            slots[name].view(NUM_SLOTS, -1)[slot, : values.size] = torch.from_numpy(values.ravel())
        history["min_total_tokens"][slot] = PROMPT + of_row.min_tokens
        stops = torch.tensor(of_row.stop_token_ids, dtype=torch.int32)
        history["late_token_ids"][slot, : len(stops)] = stops
    sampler = Sampler(
        NUM_SLOTS, limits, {name: x.to(device) for name, x in slots.items()}, kernels
    )
    state = History(**{name: x.to(device) for name, x in history.items()})
    idx_mapping = torch.tensor(slots_of_rows, dtype=torch.int32, device=device)

    got = logits.to(device, copy=True)
    sampler.edit(got, idx_mapping, state)
    tokens = sampler.draw(got, idx_mapping, state).cpu()

    for row, (slot, of_row, kind) in enumerate(zip(slots_of_rows, params, kinds, strict=True)):
        prompt, output = token_ids[slot, :PROMPT].tolist(), token_ids[slot, PROMPT:].tolist()
        want = edited(logits[row], prompt, output, of_row, of_row.stop_token_ids).to(dtype)
        assert torch.equal(got[row].cpu().nan_to_num(nan=7e7), want.nan_to_num(nan=7e7))
        if kind == "nan" and bool(want.isnan().any()):
            assert tokens[row] == NAN
        elif bool((want == -torch.inf).all()):
            assert tokens[row] == NONE
        else:
            filters = {name: getattr(of_row, name) for name in STORED}
            _assert_near_best(
                tokens[row : row + 1],
                want[None],
                torch.tensor([float(of_row.temperature)]),
                torch.tensor([of_row.seed]),
                torch.tensor([OUTPUT]),
                **{n: torch.tensor([x], dtype=STORED[n].dtype) for n, x in filters.items()},
            )
