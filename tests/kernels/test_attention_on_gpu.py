"""Paged attention compiled: serving sizes, CUDA graphs, no hidden synchronisation."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import pytest
import torch

from mrv1 import kernels
from mrv1.kernels import DecodePlan, HeadRole, KVLayout, KVScales, reference
from mrv1.testing.strategies import LayoutCase, PagedCase, RaggedBatch, build_paged_cache
from tests.kernels.paged_attention import (
    SENTINEL,
    Result,
    assert_equal,
    assert_in_budget,
    empty_outputs,
    exact,
    make_queries,
    make_splits,
    permuted,
    run_decode,
    run_prefill,
    softmax_scale,
)

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_only]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _streaming(head_dim: int, max_seq_len: int, max_query_len: int) -> LayoutCase:
    """Return a head group of two full heads and a head group of two streaming heads."""
    window = 512
    ring = -(-(window + max_query_len - 2) // 16) + 1
    roles = [HeadRole(group=0), HeadRole(window=window, sink=64, ring_blocks=ring, group=1)] * 2
    return LayoutCase.head_groups(
        roles=roles, head_dim=head_dim, max_seq_len=max_seq_len, max_query_len=max_query_len
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("query_len", [1, 8])
def test_decode_of_long_contexts(device, head_dim, dtype, query_len):
    layout = _streaming(head_dim, 4096, 8)
    batch = RaggedBatch(query_lens=(query_len,) * 3, seq_lens=(4096, 1023, 17))
    case = build_paged_cache(layout, batch, dtype=dtype).to(device)
    q = make_queries(case, 4)
    got, oracle = run_decode(kernels, case, q), run_decode(reference, case, q)
    assert_in_budget(got, oracle, exact(case, q), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("query_len", [4, 256])
def test_lse_errs_no_more_after_many_steps(device, head_dim, dtype, query_len):
    """Large scores: a rescale that is not exactly 1 where the maximum stays adds up over steps."""
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=head_dim, max_seq_len=4096)
    batch = RaggedBatch(query_lens=(query_len,), seq_lens=(4096,))
    case = build_paged_cache(layout, batch, dtype=dtype).to(device)
    q = make_queries(case, 4) * 16
    got, oracle = run_prefill(kernels, case, q), run_prefill(reference, case, q)
    assert_in_budget(got, oracle, exact(case, q), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_of_long_chunks(device, head_dim, dtype):
    layout = _streaming(head_dim, 2048, 700)
    batch = RaggedBatch(query_lens=(700, 1, 129), seq_lens=(2048, 1023, 129))
    case = build_paged_cache(layout, batch, dtype=dtype).to(device)
    q = make_queries(case, 4)
    got, oracle = run_prefill(kernels, case, q), run_prefill(reference, case, q)
    assert_in_budget(got, oracle, exact(case, q), case)


@pytest.mark.parametrize("granularity", [None, "token"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (8, 8, 8), (700, 1, 129)], ids=str)
def test_soft_cap_and_sinks_of_long_contexts(device, head_dim, query_lens, granularity):
    layout = _streaming(head_dim, 4096, 700)
    batch = RaggedBatch(query_lens=query_lens, seq_lens=(4096, 1023, 129))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity=granularity)
    case = case.to(device)
    q = 4 * make_queries(case, 4)
    run = run_prefill if max(query_lens) > 8 else run_decode
    sinks = torch.linspace(-5, 9, q.shape[1], device=device)
    for logits in ({"logits_soft_cap": 5.0}, {"sinks": sinks.bfloat16()},
                   {"logits_soft_cap": 50.0, "sinks": sinks}):  # fmt: skip
        got, oracle = run(kernels, case, q, **logits), run(reference, case, q, **logits)
        cap = logits.get("logits_soft_cap", 0.0)
        assert_in_budget(got, oracle, exact(case, q, **logits), case, logits_soft_cap=cap)


# --- CUDA graphs -------------------------------------------------------------------------------

FORMATS = pytest.mark.parametrize("granularity", [None, "token", "quarter", "head"])
"""bf16, fp8 with a scale per (token, head), per (quarter of a block, head), per head."""
OPERATIONS = pytest.mark.parametrize("op", ["decode", "prefill"])


def _graph_case(op: str, granularity: str | None, *, second: bool) -> PagedCase:
    """Return two full heads and two streaming heads with a ring; the second case swaps the roles.

    Rows of q and sizes of tensors are the same in both cases; lengths, pages, roles and scales
    differ.
    """
    full = HeadRole(group=0)
    window, sink = (250, 50) if second else (512, 64)
    stream = HeadRole(window=window, sink=sink, ring_blocks=71, group=1)
    roles = [stream, full, full, stream] if second else [full, stream, full, stream]
    layout = LayoutCase.head_groups(roles=roles, head_dim=128, max_seq_len=2048, max_query_len=600)
    if op == "decode":
        lens = (2048, 700, 0) if second else (5, 0, 30)
        batch = RaggedBatch(query_lens=(1, 1, 1), seq_lens=lens)
    elif second:
        batch = RaggedBatch(query_lens=(2, 600, 0), seq_lens=(1999, 700, 3))
    else:
        batch = RaggedBatch(query_lens=(300, 1, 301), seq_lens=(301, 0, 301))
    seed = 1 + second
    return build_paged_cache(
        layout, batch, dtype=torch.bfloat16, seed=seed, block_seed=seed, granularity=granularity
    )


def _arguments(case: PagedCase, op: str, q: torch.Tensor) -> dict[str, object]:
    """Return the arguments of a launch except ``out`` and ``lse``, all tensors allocated."""
    arguments = {
        "q": q,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "block_table": case.block_table,
        "seq_lens": case.seq_lens,
        "layout": case.layout,
        "softmax_scale": softmax_scale(case),
        "scales": case.scales,
    }
    if op == "prefill":
        starts = {"query_start_loc": case.query_start_loc, "max_query_len": q.shape[0]}
        return arguments | starts
    return arguments


def _tensors(arguments: dict[str, object]) -> list[torch.Tensor]:
    """Return all tensors of the arguments, their layout and their scales, in a fixed order."""
    found = []
    for value in arguments.values():
        parts = [value]
        if isinstance(value, KVLayout | KVScales):
            parts = [getattr(value, field.name) for field in fields(value)]
        found += [part for part in parts if isinstance(part, torch.Tensor)]
    return found


@FORMATS
@OPERATIONS
@pytest.mark.parametrize(
    "cut",
    [{}, {"num_kv_splits": 1}, {"num_kv_splits": 4}, {"deterministic": True}],
    ids=["equal", "whole", "four", "deterministic"],
)
def test_a_captured_launch_serves_other_lengths_pages_and_roles(device, op, cut, granularity):
    cases = [_graph_case(op, granularity, second=second).to(device) for second in (False, True)]
    q = make_queries(cases[0], 4)
    live, other = (_arguments(case, op, q) for case in cases)
    if op == "prefill" and cut:
        if cut != {"num_kv_splits": 4}:
            pytest.skip("prefill divides keys by splits only")
        cut = {"splits": make_splits(cases[0], q, 4)}
    launch = partial(getattr(kernels, f"paged_{op}_attention"), **cut)
    eager = []
    for arguments in (live, other):
        out, lse = empty_outputs(q)
        launch(**arguments, out=out, lse=lse)  # compiles too
        eager.append(Result(out, lse))
    assert_in_budget(eager[1], _oracle(cases[1], op, q), exact(cases[1], q), cases[1])
    out, lse = empty_outputs(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(**live, out=out, lse=lse)
    graph.replay()
    assert_equal(Result(out, lse), eager[0])
    for mine, theirs in zip(_tensors(live), _tensors(other), strict=True):
        mine.copy_(theirs)
    graph.replay()
    assert_equal(Result(out, lse), eager[1])


@OPERATIONS
def test_a_captured_launch_reads_the_sinks_of_its_replay(device, op):
    case = _graph_case(op, None, second=True).to(device)
    q = make_queries(case, 4)
    sinks = torch.zeros(q.shape[1], device=device)
    launch = partial(
        getattr(kernels, f"paged_{op}_attention"),
        **_arguments(case, op, q), logits_soft_cap=20.0, sinks=sinks,
    )  # fmt: skip
    logits = 4 * torch.randn(2, q.shape[1], device=device)
    want = []
    for each in logits:
        sinks.copy_(each)
        out, lse = empty_outputs(q)
        launch(out=out, lse=lse)
        want.append(Result(out, lse))
    assert not torch.equal(want[0].lse, want[1].lse)
    out, lse = empty_outputs(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(out=out, lse=lse)
    for each, expected in zip(logits, want, strict=True):
        sinks.copy_(each)
        graph.replay()
        assert_equal(Result(out, lse), expected)


def _oracle(case: PagedCase, op: str, q: torch.Tensor) -> Result:
    return (run_decode if op == "decode" else run_prefill)(reference, case, q)


@pytest.mark.parametrize("num_reqs", [1, 40])
def test_a_plan_read_early_belongs_to_the_same_step(device, num_reqs):
    """Each step of a graph has its own lengths and table and never reads the previous step's.

    Before every attention runs a launch that overlaps with it and writes its keys.
    """
    heads, dim, blocks, steps = 8, 128, 40, 6
    generator = torch.Generator(device).manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16)

    layout = KVLayout.hnd(heads, 16, dim, device=device)
    pages = num_reqs * blocks
    k_cache, v_cache = normal(pages, heads, 16, dim), normal(pages, heads, 16, dim)
    tables = torch.stack(
        [
            torch.randperm(pages, generator=generator, device=device).view(num_reqs, blocks)
            for _ in range(steps)
        ]
    ).int()
    lens = torch.randint(1, 640, (steps, num_reqs), generator=generator, device=device).int()
    qkv = normal(steps, 2, num_reqs, (2 + 2) * heads * dim)
    table, seq_lens = torch.empty_like(tables[0]), torch.empty_like(lens[0])

    def launch(*, read_early: bool) -> torch.Tensor:
        k, v, outs = k_cache.clone(), v_cache.clone(), []
        plan = DecodePlan.allocate(
            max_reqs=num_reqs, max_keys=blocks * 16, layout=layout, num_q_heads=2 * heads,
            dtype=torch.bfloat16, read_early=read_early,
        )  # fmt: skip
        for step in range(steps):
            last = (lens[step] - 1).long()
            page = tables[step].gather(1, last[:, None] // 16)[:, 0].long()
            slots = (page * 16 + last % 16)[None]
            table.copy_(tables[step])
            seq_lens.copy_(lens[step])
            kernels.plan_decode_attention(seq_lens, layout, plan)
            for layer in range(2):
                q = kernels.qkv_cache_write(
                    qkv[step, layer], k, v, slots, layout, num_q_heads=2 * heads
                )
                outs.append(
                    kernels.paged_decode_attention(
                        q, k, v, table, seq_lens, layout, softmax_scale=dim**-0.5, plan=plan
                    )
                )
        return torch.stack(outs)

    want = launch(read_early=False)
    graph = torch.cuda.CUDAGraph()
    launch(read_early=True)  # compiles
    with torch.cuda.graph(graph):
        got = launch(read_early=True)
    for _ in range(20):
        got.fill_(SENTINEL)
        graph.replay()
        assert torch.equal(got, want)


# --- tables ------------------------------------------------------------------------------------


@FORMATS
@OPERATIONS
def test_a_head_wise_table_of_full_heads_gives_the_same_bits_as_a_uniform_table(
    device, op, granularity
):
    """Each head has its own list of blocks, [batch * kv_heads, max_blocks]; all are equal."""
    layout = LayoutCase.hnd(num_kv_heads=4, head_dim=128, max_seq_len=2048)
    lens = (1, 1, 1) if op == "decode" else (5, 700, 1)
    batch = RaggedBatch(query_lens=lens, seq_lens=(2048, 1023, 17))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity=granularity)
    case = case.to(device)
    q = make_queries(case, 4)
    uniform = _arguments(case, op, q)
    head_wise = uniform | {
        "block_table": case.block_table.repeat_interleave(4, dim=0),
        "layout": KVLayout.per_head_ids(4, 16, 128, layout.row_width, device=device),
    }
    results = []
    for arguments in (uniform, head_wise):
        out, lse = empty_outputs(q)
        getattr(kernels, f"paged_{op}_attention")(**arguments, out=out, lse=lse)
        results.append(Result(out, lse))
    assert_equal(results[1], results[0])


@FORMATS
def test_a_batch_of_256_rows_with_permuted_blocks(device, granularity):
    roles = [HeadRole(group=0), HeadRole(window=100, sink=20, ring_blocks=9, group=1)] * 2
    layout = LayoutCase.head_groups(roles=roles, head_dim=64, max_seq_len=300, max_reqs=256)
    lens = tuple(0 if row % 17 == 5 else 1 + 37 * row % 300 for row in range(256))
    batch = RaggedBatch(query_lens=(1,) * 256, seq_lens=lens)
    case, moved = (
        build_paged_cache(
            layout, batch, dtype=torch.bfloat16, block_seed=seed, granularity=granularity
        ).to(device)
        for seed in (1, 2)
    )
    assert not torch.equal(case.block_table, moved.block_table)
    q = make_queries(case, 4)
    got = run_decode(kernels, case, q)
    assert_in_budget(got, run_decode(reference, case, q), exact(case, q), case)
    assert_equal(run_decode(kernels, moved, q), got)
    order = list(reversed(range(256)))
    assert_equal(run_decode(kernels, permuted(case, order), q.flip(0)), got.rows(order))


@FORMATS
def test_deterministic_rows_have_the_same_bits_alone_and_among_256(device, granularity):
    """Deterministic plans cut every 128 keys: some lengths lie around the cuts."""
    roles = [HeadRole(group=0), HeadRole(window=700, sink=20, ring_blocks=45, group=1)]
    layout = LayoutCase.head_groups(roles=roles, head_dim=64, max_seq_len=2100, max_reqs=256)
    lens = tuple([511, 512, 513, 2100, 0, 1] + [1 + 37 * row % 300 for row in range(250)])
    batch = RaggedBatch(query_lens=(1,) * 256, seq_lens=lens)
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity=granularity)
    case = case.to(device)
    q = make_queries(case, 4)
    whole = run_decode(kernels, case, q, deterministic=True)
    assert_in_budget(whole, run_decode(reference, case, q), exact(case, q), case)
    for row in (0, 1, 2, 3, 100):
        alone = permuted(case, [row])
        rows = slice(row, row + 1)
        got = run_decode(kernels, alone, q[rows], deterministic=True)
        assert_equal(got, whole.rows(rows))
    pair = run_decode(kernels, permuted(case, [3, 255]), q[[3, 255]], deterministic=True)
    assert_equal(pair, whole.rows([3, 255]))


@pytest.mark.parametrize("has_logits", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group"),
    [
        (torch.bfloat16, 128, 2),
        (torch.float16, 64, 4),
        (torch.float32, 128, 1),
        (torch.bfloat16, 256, 8),
    ],
    ids=str,
)
def test_deterministic_tokens_have_the_same_bits_prefilled_in_any_chunk_and_decoded(
    device, dtype, head_dim, group, has_logits
):
    """Pieces begin every 128 keys up to 2,048, and every 256 keys up to 4,096."""
    length = 2400
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=head_dim, max_seq_len=length)
    batch = RaggedBatch(query_lens=(length,), seq_lens=(length,))
    case = build_paged_cache(layout, batch, dtype=dtype).to(device)
    q = make_queries(case, group)
    logits = {}
    if has_logits:
        sinks = torch.linspace(-3, 3, q.shape[1], device=device)
        logits = {"logits_soft_cap": 2.0, "sinks": sinks}
    whole = run_prefill(kernels, case, q, deterministic=True, **logits)
    oracle = run_prefill(reference, case, q, **logits)
    cap = logits.get("logits_soft_cap", 0.0)
    assert_in_budget(whole, oracle, exact(case, q, **logits), case, logits_soft_cap=cap)
    for end, count in ((1, 1), (64, 64), (129, 1), (700, 9), (2048, 300), (2049, 1), (2400, 2)):
        rows = slice(end - count, end)
        part = replace(case, batch=RaggedBatch(query_lens=(count,), seq_lens=(end,)))
        got = run_prefill(kernels, part, q[rows], deterministic=True, **logits)
        assert_equal(got, whole.rows(rows))
    for end, query_len in ((1, 1), (128, 1), (129, 1), (700, 3), (2048, 1), (2049, 3), (2400, 1)):
        rows = slice(end - query_len, end)
        part = replace(case, batch=RaggedBatch(query_lens=(query_len,), seq_lens=(end,)))
        got = run_decode(kernels, part, q[rows], query_len=query_len, deterministic=True, **logits)
        assert_equal(got, whole.rows(rows))


@pytest.mark.big
@pytest.mark.parametrize("fp8", [False, True])
@OPERATIONS
def test_pages_and_scales_beyond_two_to_the_31_elements(device, op, fp8):
    """Block 2 starts at element 2**31 of codes and scales: stride products need 64 bits."""
    stride, dim, tokens = 2**30, 128, 16
    generator = torch.Generator(device).manual_seed(0)
    page = torch.randn(tokens, dim, generator=generator, device=device).to(torch.bfloat16)
    layout = KVLayout.build(
        block_size=tokens, head_dim=dim, token_stride=dim, head_base=[0], block_stride=[stride],
        roles=[HeadRole()], device=device,
    )  # fmt: skip
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    cache = torch.empty(2 * stride + page.numel(), dtype=dtype, device=device)
    scales, dense = None, page.double()
    if fp8:
        scale = torch.empty(2 * stride + tokens, device=device)
        scales = KVScales.build(scale, scale, granularity="token", base=[0], block_stride=[stride])
    slots = torch.arange(2 * tokens, 3 * tokens, device=device)[None]
    kernels.kv_cache_write(
        page[:, None], page[:, None], cache, cache, slots, layout, scales=scales
    )
    if fp8:
        codes = cache[2 * stride :].view(tokens, dim)
        dense = codes.double() * scale[2 * stride :, None].double()
        torch.testing.assert_close(dense, page.double(), rtol=0.07, atol=0.01)
    lens = torch.tensor([tokens], dtype=torch.int32, device=device)
    arguments = {
        "q": page[:1, None].contiguous(),
        "k_cache": cache,
        "v_cache": cache,
        "block_table": torch.tensor([[2]], dtype=torch.int32, device=device),
        "seq_lens": lens,
        "layout": layout,
        "softmax_scale": 0.05,
        "scales": scales,
    }
    if op == "prefill":
        starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        arguments |= {"query_start_loc": starts, "max_query_len": 1}
    out = getattr(kernels, f"paged_{op}_attention")(**arguments)
    want = torch.softmax(0.05 * dense @ page[0].double(), 0) @ dense
    torch.testing.assert_close(out[0, 0].double(), want, rtol=1e-2, atol=1e-2)


# --- the stream --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_launches_do_not_synchronise(device):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=64, max_seq_len=64)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(1, 1), seq_lens=(64, 20))).to(device)
    q = make_queries(case, 2)
    slots, table, lens = case.slot_mapping, case.block_table, case.seq_lens
    starts, kv_layout, scale = case.query_start_loc, case.layout, softmax_scale(case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.kv_cache_write(case.key, case.value, case.k_cache, case.v_cache, slots, kv_layout)
        for splits in (None, 1, 2):
            kernels.paged_decode_attention(
                q,
                case.k_cache,
                case.v_cache,
                table,
                lens,
                kv_layout,
                softmax_scale=scale,
                num_kv_splits=splits,
            )
        kernels.paged_prefill_attention(
            q,
            case.k_cache,
            case.v_cache,
            table,
            starts,
            lens,
            kv_layout,
            softmax_scale=scale,
            max_query_len=1,
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
