"""Shared by the paged attention tests: calls of the ops and comparisons of their results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from hypothesis import strategies as st

from mrv1.kernels import DecodePlan, HeadRole, KVScales, PrefillSplits
from mrv1.kernels._base.checks import FLOAT_DTYPES
from mrv1.kernels.attention.decode.plan import DecodeAttentionConfig
from mrv1.kernels.attention.prefill import choice as prefill_choice
from mrv1.kernels.attention.prefill.choice import PrefillAttentionConfig
from mrv1.kernels.cache.kv_scales import format_of
from mrv1.testing.strategies import LayoutCase, PagedCase

SENTINEL = 7.0
"""The value of outputs before a launch; rows of no request must keep it."""


@dataclass(frozen=True)
class Result:
    out: torch.Tensor
    lse: torch.Tensor

    def rows(self, index) -> Result:
        return Result(self.out[index], self.lse[index])


def streaming_layout(
    num_kv_heads: int,
    block_size: int,
    max_seq_len: int,
    max_reqs: int,
    *,
    ring: bool,
    head_dim: int = 128,
    window: int = 100,
    sink: int = 20,
) -> LayoutCase:
    """Return heads that are streaming and full in turns, in a head group each."""
    ring_blocks = -(-(window - 1 + max_seq_len) // block_size) + 1 if ring else 0
    streaming = HeadRole(window=window, sink=sink, ring_blocks=ring_blocks)
    return LayoutCase.head_groups(
        roles=[HeadRole(group=1) if head % 2 else streaming for head in range(num_kv_heads)],
        head_dim=head_dim,
        block_size=block_size,
        max_seq_len=max_seq_len,
        max_reqs=max_reqs,
        max_query_len=max_seq_len,
    )


def make_queries(case: PagedCase, group: int, seed: int = 0, spare_rows: int = 0) -> torch.Tensor:
    """Return q [num_tokens + spare_rows, kv_heads * group, head_dim], a view of a fused qkv."""
    heads, dim = case.layout_case.num_kv_heads, case.layout_case.head_dim
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(case.batch.query_lens) + spare_rows, heads * (group + 2), dim)
    fused = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.key.dtype)
    return fused.to(case.key.device)[:, : heads * group]


def finite(case: PagedCase) -> PagedCase:
    """Return the case with 3 instead of NaN in pages and scales that no query sees."""

    def filled(x: torch.Tensor) -> torch.Tensor:
        return x.float().nan_to_num(3.0).to(x.dtype)

    scales = case.scales
    if scales is not None:
        scales = replace(scales, k_scale=filled(scales.k_scale), v_scale=filled(scales.v_scale))
    return replace(case, k_cache=filled(case.k_cache), v_cache=filled(case.v_cache), scales=scales)


def empty_outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return strided out and lse full of the sentinel."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_full((q.shape[0], q.shape[1] + 1, q.shape[2]), SENTINEL)[:, 1:]
    lse = q.new_full((q.shape[1], q.shape[0]), SENTINEL, dtype=lse_dtype).T
    return out, lse


def softmax_scale(case: PagedCase) -> float:
    return case.layout_case.head_dim**-0.5


def run_decode(ops: ModuleType, case: PagedCase, q: torch.Tensor, **changes) -> Result:
    out, lse = empty_outputs(q)
    arguments = {
        "block_table": case.block_table,
        "seq_lens": case.seq_lens,
        "layout": case.layout,
        "softmax_scale": softmax_scale(case),
        "query_len": case.batch.query_lens[0] if case.batch.query_lens else 1,
        "out": out,
        "lse": lse,
        "scales": case.scales,
    }
    arguments |= changes
    returned = ops.paged_decode_attention(q, case.k_cache, case.v_cache, **arguments)
    assert returned is arguments["out"]
    return Result(out, lse)


def make_plan(case: PagedCase, q: torch.Tensor, **options) -> DecodePlan:
    """Return the buffers of a decode plan for the case, not yet written."""
    return DecodePlan.allocate(
        max_reqs=case.seq_lens.shape[0],
        max_keys=case.block_table.shape[1] * case.layout.block_size,
        layout=case.layout,
        num_q_heads=q.shape[1],
        dtype=q.dtype,
        query_len=case.batch.query_lens[0] if case.batch.query_lens else 1,
        page_format=format_of(q.dtype, case.scales),
        **options,
    )


def make_splits(case: PagedCase, q: torch.Tensor, num_splits: int | None) -> PrefillSplits | None:
    """Return the buffers that ``num_splits`` programs of a tile share, for the case."""
    return PrefillSplits.allocate(
        num_tokens=q.shape[0],
        num_reqs=case.seq_lens.shape[0],
        max_query_len=max(case.batch.query_lens, default=0),
        layout=case.layout,
        num_q_heads=q.shape[1],
        dtype=q.dtype,
        page_format=format_of(q.dtype, case.scales),
        num_splits=num_splits,
    )


def run_prefill(ops: ModuleType, case: PagedCase, q: torch.Tensor, **changes) -> Result:
    out, lse = empty_outputs(q)
    arguments = {
        "block_table": case.block_table,
        "query_start_loc": case.query_start_loc,
        "seq_lens": case.seq_lens,
        "layout": case.layout,
        "softmax_scale": softmax_scale(case),
        "max_query_len": max(case.batch.query_lens, default=0),
        "out": out,
        "lse": lse,
        "scales": case.scales,
    }
    arguments |= changes
    returned = ops.paged_prefill_attention(q, case.k_cache, case.v_cache, **arguments)
    assert returned is arguments["out"]
    return Result(out, lse)


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, which NaN does not keep from being equal."""
    return x.contiguous().view(torch.uint8)


def clone_of(scales: KVScales) -> KVScales:
    """Return a copy of a cache's scales."""
    return replace(scales, k_scale=scales.k_scale.clone(), v_scale=scales.v_scale.clone())


def exact(case: PagedCase, q: torch.Tensor, **logits) -> Result:
    """Return dense float64 attention; ``logits`` are a soft cap and logit sinks."""
    rows = q[: sum(case.batch.query_lens)]
    return Result(*case.attention(rows, softmax_scale(case), **logits))


def max_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference; fail on any NaN and on infinities in different places."""
    assert not got.isnan().any()
    assert torch.equal(got.isinf(), want.isinf())
    finite = ~want.isinf()
    return (got.double()[finite] - want[finite]).abs().max().item() if finite.any() else 0.0


def assert_in_budget(
    got: Result,
    oracle: Result,
    want: Result,
    case: PagedCase,
    *,
    logits_soft_cap: float = 0.0,
    cap_error: float = 2**-20,
) -> None:
    """Fail unless errors against float64 are at most twice the oracle's plus a rounding floor.

    The floor: the weights, which sum to one, are rounded to the cache's dtype before the product
    with V, and the fp32 sums of score and output may be taken in another order. A soft cap adds
    an error of ``cap_error`` of the cap to each score, so twice that, relatively, to a weight.
    """
    capped = cap_error * logits_soft_cap
    rounding = torch.finfo(case.key.dtype).eps / 2
    sums = 256 * torch.finfo(torch.float32).eps / 2
    largest = max((v.abs().max().item() for v in case.values if v.numel()), default=0.0)
    floors = {"out": (rounding + sums + 2 * capped) * largest, "lse": sums + capped}
    for name, floor in floors.items():
        reference = getattr(want, name)
        error = max_error(getattr(got, name), reference)
        oracle_error = max_error(getattr(oracle, name), reference)
        assert error <= 2 * oracle_error + floor, (
            f"{name}: error {error:.3g}, the oracle's {oracle_error:.3g}, floor {floor:.3g}"
        )


def assert_equal(got: Result, want: Result) -> None:
    """Fail unless both outputs are exactly equal."""
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def permuted(case: PagedCase, order: list[int]) -> PagedCase:
    """Return the case with its requests (not their queries' rows) in another order."""
    batch = replace(
        case.batch,
        query_lens=tuple(case.batch.query_lens[i] for i in order),
        seq_lens=tuple(case.batch.seq_lens[i] for i in order),
    )
    table = case.block_table[torch.tensor(order, dtype=torch.int64, device=case.key.device)]
    return replace(case, batch=batch, block_table=table)


def query_rows(case: PagedCase, order: list[int]) -> torch.Tensor:
    """Return the rows of q that belong to the requests in ``order``."""
    starts = case.query_start_loc.tolist()
    rows = [row for i in order for row in range(starts[i], starts[i + 1])]
    return torch.tensor(rows, dtype=torch.int64, device=case.key.device)


@st.composite
def attention_logits(draw, num_q_heads: int, device) -> dict[str, object]:
    """Draw a soft cap of the logits, logit sinks, or both."""
    kind = draw(st.sampled_from(["cap", "sinks", "both"]))
    options = {}
    if kind != "sinks":
        options["logits_soft_cap"] = draw(st.sampled_from([0.5, 5.0, 30.0]))
    if kind != "cap":
        logit = st.sampled_from([-torch.inf, -40.0, -1.0, 0.0, 2.5, 40.0])
        sinks = draw(st.lists(logit, min_size=num_q_heads, max_size=num_q_heads))
        dtype = draw(st.sampled_from(FLOAT_DTYPES))
        options["sinks"] = torch.tensor(sinks, dtype=dtype, device=device)
    return options


def always_faster() -> tuple[prefill_choice.WarpGroupKernel, ...]:
    """Return the kernels of warp groups without the lengths from which on they are faster."""
    return tuple(
        replace(row, min_rows=0, min_queries=0, min_window=0) for row in prefill_choice.KERNELS
    )


@contextmanager
def small_tiles(tile_tokens: int, tile_rows: int = 16) -> Iterator[None]:
    """Launch with these tiles, so that even short contexts take several steps and programs."""
    with pytest.MonkeyPatch.context() as patch:
        for config, changes in (
            (DecodeAttentionConfig, {"tile_tokens": tile_tokens}),
            (PrefillAttentionConfig, {"tile_tokens": tile_tokens, "tile_rows": tile_rows}),
        ):
            chosen = config.default_for

            def choose(*args, _chosen=chosen, _changes=changes):
                return replace(_chosen(*args), **_changes)

            patch.setattr(config, "default_for", choose)
        yield
