"""Soft cap and logit sinks of paged attention: kernels against oracles and dense attention."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import HeadRole, reference
from mrv1.kernels.attention.decode import plan as plan_buffers
from mrv1.kernels.attention.prefill import attention as prefill_attention
from mrv1.kernels.attention.prefill.choice import PrefillLayer
from mrv1.testing.strategies import (
    LayoutCase,
    RaggedBatch,
    build_paged_cache,
    kv_layouts,
    paged_caches,
)
from tests.kernels.paged_attention import (
    Result,
    assert_equal,
    assert_in_budget,
    attention_logits,
    exact,
    make_plan,
    make_queries,
    make_splits,
    run_decode,
    run_prefill,
    small_tiles,
)

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL = kv_layouts(
    head_dims=(16, 80), num_kv_heads=(1, 2), max_blocks=3, max_query_len=40, gap_elements=16
)
GRANULARITIES = (None, "token", "quarter", "head")
CASES = {"layouts": SMALL, "dtypes": DTYPES, "granularities": GRANULARITIES}


@pytest.fixture(autouse=True, scope="module")
def _tiles():
    """Use tiles so small that a test's short contexts fill several of them."""
    with small_tiles(32, tile_rows=32):
        yield


def _check(got, run, case, q, logits):
    """Compare with the oracle and with dense attention."""
    oracle, cap = run(reference, case, q, **logits), logits.get("logits_soft_cap", 0.0)
    assert_in_budget(got, oracle, exact(case, q, **logits), case, logits_soft_cap=cap)


def _draw(draw, case, group):
    """Draw queries, a soft cap and sinks; with a cap, some scores lie far outside it."""
    q = make_queries(case, group)
    logits = draw(attention_logits(q.shape[1], q.device))
    if "logits_soft_cap" in logits:
        q = q * draw(st.sampled_from([1, 50]))
    return q, logits


# --- oracle ------------------------------------------------------------------------------------


@given(data=st.data(), group=st.sampled_from([1, 3, 8]))
def test_decode_agrees_with_the_oracle(device, data, group):
    query_len = data.draw(st.sampled_from([1, 1, 2, 8]))
    case = data.draw(paged_caches(**CASES, uniform_query_len=query_len)).to(device)
    q, logits = _draw(data.draw, case, group)
    cuts = [{}, {"num_kv_splits": 2}, {"num_kv_splits": 5}, {"deterministic": True}]
    got = run_decode(kernels, case, q, **data.draw(st.sampled_from(cuts)), **logits)
    _check(got, run_decode, case, q, logits)


@given(case=paged_caches(**CASES), data=st.data(), group=st.sampled_from([1, 3, 8]))
def test_prefill_agrees_with_the_oracle(device, case, data, group):
    case = case.to(device)
    q, logits = _draw(data.draw, case, group)
    options = {"splits": make_splits(case, q, data.draw(st.sampled_from([1, 3])))}
    if data.draw(st.sampled_from([False, False, True])):
        options = {"deterministic": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_attention, "MIN_SPLIT_STEPS", 1)
        got = run_prefill(kernels, case, q, **options, **logits)
    _check(got, run_prefill, case, q, logits)


# --- a logit sink counts once ------------------------------------------------------------------


def _equal_scores(device, num_keys, query_lens=(1,)):
    """Return a case whose scores are all 0 and whose values are all 1."""
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=num_keys)
    batch = RaggedBatch(query_lens=query_lens, seq_lens=(num_keys,) * len(query_lens))
    case = build_paged_cache(layout, batch).to(device)
    case.k_cache.zero_()
    case.v_cache.fill_(1.0)
    return case, make_queries(case, 2)


def _assert_one_sink(got: Result, num_keys: int, sinks: torch.Tensor) -> None:
    """Fail unless each row saw ``num_keys`` scores of 0 and its head's sink once."""
    total = num_keys + sinks.double().exp()
    assert torch.allclose(got.lse.double(), total.log().expand_as(got.lse), rtol=1e-6)
    out = (num_keys / total)[:, None].expand_as(got.out)
    rounding = num_keys * 2**-24  # of a sum in float32; equal weights may all round one way
    assert torch.allclose(got.out.double(), out, rtol=rounding)


@pytest.mark.parametrize(
    "cut", [{"num_kv_splits": n} for n in (1, 3, 5)] + [{"deterministic": True}], ids=str
)
def test_a_decoded_row_counts_its_sink_once(device, monkeypatch, cut):
    gpu = SimpleNamespace(num_sms=20, capability=None)
    monkeypatch.setattr(plan_buffers, "device_info", lambda _: gpu)
    sinks = torch.tensor([3.0, 6.0], device=device)
    case, q = _equal_scores(device, 300)
    plan = make_plan(case, q, **cut)
    kernels.plan_decode_attention(case.seq_lens, case.layout, plan)
    assert int(plan.num_items) == cut.get("num_kv_splits", 3)
    _assert_one_sink(run_decode(kernels, case, q, plan=plan, sinks=sinks), 300, sinks)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_prefilled_row_counts_its_sink_once(device, monkeypatch, num_splits):
    monkeypatch.setattr(prefill_attention, "MIN_SPLIT_STEPS", 1)
    sinks = torch.tensor([3.0, 6.0], device=device)
    case, q = _equal_scores(device, 300)
    splits = make_splits(case, q, num_splits)
    _assert_one_sink(run_prefill(kernels, case, q, splits=splits, sinks=sinks), 300, sinks)
    whole = run_prefill(kernels, case, q, deterministic=True, sinks=sinks)  # folds three pieces
    _assert_one_sink(whole, 300, sinks)


def test_deterministic_pieces_have_the_same_bits_in_one_program_and_in_several(device):
    layout = LayoutCase.head_groups(roles=[HeadRole()], head_dim=16, max_seq_len=300)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(2,), seq_lens=(300,))).to(device)
    q = make_queries(case, 2)
    logits = {"logits_soft_cap": 2.0, "sinks": torch.tensor([1.0, -2.0], device=device)}
    results = []
    for num_sms in (1, 20):
        gpu = SimpleNamespace(num_sms=num_sms, capability=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan_buffers, "device_info", lambda _, gpu=gpu: gpu)
            results.append(run_decode(kernels, case, q, deterministic=True, **logits))
    assert_equal(*results)
    _check(results[0], run_decode, case, q, logits)


@pytest.mark.parametrize("run", [run_decode, run_prefill], ids=["decode", "prefill"])
@pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])
def test_rows_without_visible_keys_are_zero_and_their_lse_is_the_sink(device, ops, run):
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=16)
    batch = RaggedBatch(query_lens=(1,) * 3, seq_lens=(0, 16, 0))
    case = build_paged_cache(layout, batch).to(device)
    sinks = torch.tensor([2.0, -torch.inf], device=device)
    got = run(ops, case, make_queries(case, 2), sinks=sinks)
    for row in (0, 2):
        assert (got.out[row] == 0).all()
        assert got.lse[row].tolist() == pytest.approx([2.0, -math.inf], rel=1e-6)


@pytest.mark.parametrize("run", [run_decode, run_prefill], ids=["decode", "prefill"])
def test_sinks_of_minus_infinity_change_no_bit(device, run):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=16, max_seq_len=100)
    batch = RaggedBatch(query_lens=(1, 1), seq_lens=(100, 0))
    case = build_paged_cache(layout, batch).to(device)
    q = make_queries(case, 2)
    sinks = torch.full((4,), -torch.inf, device=device)
    assert_equal(run(kernels, case, q, sinks=sinks), run(kernels, case, q))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("run", [run_decode, run_prefill], ids=["decode", "prefill"])
def test_nan_stays_in_its_head(device, run):
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=64)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(1, 1), seq_lens=(64, 64))).to(device)
    q, sinks = make_queries(case, 2).clone(), torch.tensor([1.0, 2.0], device=device)
    clean = run(kernels, case, q, logits_soft_cap=3.0, sinks=sinks)
    q[0, 1, 3] = torch.nan
    got = run(kernels, case, q, logits_soft_cap=3.0, sinks=sinks)
    assert got.out[0, 1].isnan().all()
    assert got.lse[0, 1].isnan()
    assert_equal(got.rows(slice(1, 2)), clean.rows(slice(1, 2)))
    assert torch.equal(got.out[0, 0], clean.out[0, 0])
    q[0, 1, 3], sinks[1] = 0.0, torch.nan
    got = run(kernels, case, q, sinks=sinks)
    assert got.out[:, 1].isnan().all()
    assert not got.out[:, 0].isnan().any()


# --- the choice of the kernel ------------------------------------------------------------------


def test_the_choice_of_a_kernel_knows_of_a_cap_or_sinks(device, monkeypatch):
    """The kernels for e4m3 caches have neither."""
    asked = []

    def ask(layer: PrefillLayer, *_args: object) -> None:
        asked.append(layer.plain_scores)

    monkeypatch.setattr(prefill_attention, "kernel_for", ask)
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=16)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(3,), seq_lens=(16,))).to(device)
    q = make_queries(case, 1)
    for logits in ({}, {"logits_soft_cap": 1.0}, {"sinks": torch.zeros(1, device=device)}):
        run_prefill(kernels, case, q, **logits)
    assert asked == [True, False, False]
