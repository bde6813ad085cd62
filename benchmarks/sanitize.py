"""Run every kernel under compute-sanitizer, on small random inputs, and keep its findings.

python -m benchmarks.sanitize OUTPUT.json [--commit C]   memcheck and racecheck; exit 1 on findings
python -m benchmarks.sanitize --run                      the kernels, compared with their oracles
python -m benchmarks.sanitize --planted                  a launch that writes outside its cache
python -m benchmarks.sanitize --handoff                  a hand-off without a race (Hopper)

The planted launch shows that memcheck sees into kernels that Triton compiles: if memcheck missed
that error, its silence about the other launches would mean nothing. The hand-off shows what
racecheck reports of a program without a race. Needs a GPU, CUDA's compute-sanitizer, hypothesis.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch

from mrv1 import kernels
from mrv1.device import device_info
from mrv1.kernels import (
    Adapters,
    AllReduceBuffers,
    ClampedSwiGLU,
    DecodePlan,
    HeadRole,
    KVScales,
    LoraMatrices,
    PrefillSplits,
    QKNorm,
    QuantizedWeight,
    Rope,
    Routing,
    reference,
)
from mrv1.kernels._base.peers import PeerBuffer
from mrv1.kernels.attention.decode.plan import Item
from mrv1.kernels.attention.prefill import attention as prefill_attention
from mrv1.kernels.attention.prefill import choice as prefill_choice
from mrv1.kernels.cache.formats import FP8
from mrv1.kernels.cache.kv_scales import format_of
from mrv1.kernels.layers.contracts import RING_ROWS, RING_SLOTS, FeatureRows
from mrv1.kernels.sampling.contracts import MAX_PARTS, BadWords, History, LogitEdits
from mrv1.kernels.step.contracts import AppendedTokens, GatheredTokens, RequestSlots, SlotTables
from mrv1.provenance import provenance
from mrv1.testing.strategies import LayoutCase, PagedCase, RaggedBatch, build_paged_cache

TOOLS = {"memcheck": r"ERROR SUMMARY: (\d+) error", "racecheck": r"SUMMARY: (\d+) hazard"}
"""Tool -> the end of its output; the number must be 0."""
CLOSE = {"rtol": 2e-2, "atol": 2e-2}
"""Results are compared only to know that the launches really compute."""

Outputs = Iterator[torch.Tensor]
Op = Callable[[ModuleType, torch.device], Outputs]


def _paged(query_lens: tuple[int, ...], device: torch.device) -> Iterator[PagedCase]:
    """Yield a full and a streaming head group in a ring: bf16, fp8 of each granularity, 4 bits."""
    stream = HeadRole(window=48, sink=20, ring_blocks=7, group=1)
    layout = LayoutCase.head_groups(
        roles=[HeadRole(), stream] * 2, head_dim=128, max_seq_len=300, max_query_len=40
    )
    batch = RaggedBatch(query_lens=query_lens, seq_lens=(300, 49, 0))
    for granularity in (None, "token", "quarter", "head", "nibbles"):
        case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity=granularity)
        yield case.to(device)


def _normal(*shape: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16)


def _written(case: PagedCase) -> tuple[torch.Tensor, torch.Tensor, KVScales | None, Outputs]:
    """Return copies of a case's caches before its step, and views of their bytes to compare."""
    k, v, scales = case.k_cache_before.clone(), case.v_cache_before.clone(), case.scales_before
    tensors = [k, v, *((scales.k_scale, scales.v_scale) if scales else ())]
    return k, v, scales, (tensor.view(torch.uint8) for tensor in tensors)


def _kv_cache_write(ops: ModuleType, device: torch.device) -> Outputs:
    for case in _paged((40, 1, 1), device):
        k, v, scales, written = _written(case)
        ops.kv_cache_write(
            case.key, case.value, k, v, case.slot_mapping, case.layout, scales=scales
        )
        yield from written


def _qkv_cache_write(ops: ModuleType, device: torch.device) -> Outputs:
    """Yield q only: K's last bit may differ from the oracle's, and an fp8 code with it."""
    weight, cos_sin = _normal(128, device=device), _normal(512, 128, device=device).float()
    for case in _paged((40, 1, 1), device):
        k, v, scales, _ = _written(case)
        positions = torch.arange(case.key.shape[0], device=device)
        yield ops.qkv_cache_write(
            _normal(case.key.shape[0], (8 + 2 * 4) * 128, device=device), k, v,
            case.slot_mapping, case.layout, num_q_heads=8, rope=Rope(cos_sin, positions),
            norm=QKNorm(weight, weight), scales=scales,
            hadamard=64 if format_of(k.dtype, scales).mixes_keys else 0,
        )  # fmt: skip


def _paged_decode_attention(ops: ModuleType, device: torch.device) -> Outputs:
    for query_len in (1, 3):
        for case in _paged((query_len,) * 3, device):
            q = _normal(3 * query_len, 16, 128, device=device)
            for cut in ({}, {"num_kv_splits": 1}, {"num_kv_splits": 5}, {"deterministic": True}):
                yield ops.paged_decode_attention(
                    q, case.k_cache, case.v_cache, case.block_table, case.seq_lens, case.layout,
                    softmax_scale=0.1, query_len=query_len, scales=case.scales, **cut,
                )  # fmt: skip


def _plan_decode_attention(ops: ModuleType, device: torch.device) -> Outputs:
    for case in _paged((1, 1, 1), device):
        plan = DecodePlan.allocate(  # deterministic and fp8: the same on every device
            max_reqs=3, max_keys=512, layout=case.layout, num_q_heads=16, dtype=torch.bfloat16,
            page_format=FP8, deterministic=True,
        )  # fmt: skip
        ops.plan_decode_attention(case.seq_lens, case.layout, plan)
        yield plan.items[: int(plan.num_items), : len(Item._fields)]


def _paged_prefill_attention(ops: ModuleType, device: torch.device) -> Outputs:
    plain = LayoutCase.hnd(num_kv_heads=4, head_dim=128, max_seq_len=1100)
    batch = RaggedBatch(query_lens=(40, 33, 1), seq_lens=(1100, 49, 300))
    windows = replace(plain, roles=(HeadRole(window=100, sink=20),) * 4)
    uniform = (build_paged_cache(each, batch, dtype=torch.bfloat16) for each in (plain, windows))
    for case in (*_paged((40, 33, 1), device), *(case.to(device) for case in uniform)):
        q = _normal(74, 16, 128, device=device)
        for num_splits in (1, 3, 16, None):
            splits = num_splits and PrefillSplits.allocate(
                num_tokens=74, num_reqs=3, max_query_len=40, layout=case.layout, num_q_heads=16,
                dtype=q.dtype, page_format=format_of(q.dtype, case.scales), num_splits=num_splits,
            )  # fmt: skip
            yield ops.paged_prefill_attention(
                q, case.k_cache, case.v_cache, case.block_table, case.query_start_loc,
                case.seq_lens, case.layout, softmax_scale=0.1, max_query_len=40, splits=splits,
                deterministic=num_splits is None, scales=case.scales,
            )  # fmt: skip


def _copy_pages(ops: ModuleType, device: torch.device) -> Outputs:
    for case in _paged((1, 1, 1), device):
        ids = torch.arange(6, device=device)
        ops.copy_pages(
            case.k_cache, case.v_cache, ids[:3], ids[3:], case.layout, group=1, scales=case.scales
        )
        yield case.k_cache.view(torch.uint8)
        yield case.v_cache.view(torch.uint8)


def _merge_states(ops: ModuleType, device: torch.device) -> Outputs:
    out, lse = _normal(2, 33, 16, 80, device=device), _normal(2, 33, 16, device=device).float()
    yield ops.merge_states(out[0], lse[0], out[1], lse[1])


def _rms_norm(ops: ModuleType, device: torch.device) -> Outputs:
    for dim in (80, 1024):
        x, weight = _normal(33, dim, device=device), _normal(dim, device=device)
        yield ops.rms_norm(x, weight, 1e-6)
        yield ops.rms_norm(x, weight, 1e-6, residual=x.clone())


def _apply_rope(ops: ModuleType, device: torch.device) -> Outputs:
    qk, cos_sin = _normal(33, 12, 80, device=device), _normal(64, 80, device=device).float()
    q, k, positions = qk[:, :8], qk[:, 8:], torch.arange(33, device=device)
    for interleaved in (False, True):
        ops.apply_rope(q, k, cos_sin, positions, interleaved=interleaved)
        yield qk


def _silu_and_mul(ops: ModuleType, device: torch.device) -> Outputs:
    yield ops.silu_and_mul(_normal(33, 2 * 1000, device=device))


def _gelu_tanh_and_mul(ops: ModuleType, device: torch.device) -> Outputs:
    yield ops.gelu_tanh_and_mul(_normal(33, 2 * 1000, device=device))


def _apply_bad_words(ops: ModuleType, device: torch.device) -> Outputs:
    """Slots with 0, 17 and 40 words, which are runs of the history's tokens 0, 1, 2, 0, ..."""

    def row(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    position = torch.arange(64, dtype=torch.int32, device=device)
    bad_words = ((position[:40, None] + position[:8]) % 3).repeat(3, 1, 1)
    lengths = (position[:40] % 8 + 1).repeat(3, 1)
    history = History(
        token_ids=(position % 3).repeat(3, 1), num_tokens=row(64, 40, 60),
        prompt_len=row(60, 2, 59), min_total_tokens=row(0, 0, 0),
        late_token_ids=row(-1, -1, -1).view(3, 1),
    )  # fmt: skip
    words = BadWords(
        bad_words=bad_words, bad_word_lens=lengths, num_bad_words=row(0, 17, 40),
        bad_words_match_prompt=row(0, 1, 0),
    )  # fmt: skip
    drafts = {"ahead": row(0, 1, 2, 0, 1, 2), "draft_token_ids": row(1, 2, 0, 1).view(2, 2)}
    for idx_mapping, options in ((row(2, 1, -1, 0, 1, 2), {}), (row(2, 2, 2, 1, 1, 1), drafts)):
        logits = _normal(6, 320, device=device)
        ops.apply_bad_words(logits, idx_mapping, history, words, **options)
        yield logits


def _sample_tokens(ops: ModuleType, device: torch.device) -> Outputs:
    for vocab_size in (320, 10_000):
        logits, rows = _normal(5, vocab_size, device=device), torch.arange(5, device=device)
        yield ops.sample_tokens(logits, rows / 4, rows, rows)
        for top_k in (0, 7, 300):  # no top-k; k fits a tile; k does not
            yield ops.sample_tokens(
                logits, rows / 4, rows, rows, top_k=torch.full_like(rows, top_k).int(),
                top_p=torch.full_like(rows / 4, 0.9), min_p=rows // 3 / 1000, child=rows.int(),
            )  # fmt: skip


def _gather_tokens(ops: ModuleType, device: torch.device) -> Outputs:
    def row(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    int64 = torch.int64
    slot_mapping = torch.empty((2, 24), dtype=int64, device=device)
    out = GatheredTokens(
        input_ids=torch.empty(24, dtype=int64, device=device),
        positions=torch.empty(24, dtype=int64, device=device),
        seq_lens=row(0, 0, 0),
        slot_mapping=slot_mapping,
        logits_rows=row(0, 0, 0, dtype=int64),
    )
    token_ids = torch.arange(4 * 64, dtype=torch.int32, device=device).view(4, 64)
    zeros = row(0, 0, 0, 0)
    slots = RequestSlots(
        token_ids=token_ids, num_tokens=row(40, 0, 30, 0), num_computed_tokens=row(39, 0, 10, 0),
        stopped=zeros, prompt_len=zeros, max_total_tokens=zeros, min_total_tokens=zeros,
        stop_token_ids=token_ids,
    )  # fmt: skip
    tables = SlotTables(
        block_tables=torch.arange(4 * 9, dtype=torch.int32, device=device).view(4, 9),
        table_offset=row(0, 4), sink=row(0, 20), ring_blocks=row(0, 3), block_size=16,
    )  # fmt: skip
    ops.gather_tokens(row(2, 0, -1), row(0, 20, 21, 22), slots, tables, out)
    yield from (out.input_ids, out.positions, out.seq_lens, out.slot_mapping, out.logits_rows)


def _linear(ops: ModuleType, device: torch.device) -> Outputs:
    """Cover a vector, weights in registers, tiles, and products by the GPU vendor's library."""
    weight = _normal(1000, 1000, device=device) / 32
    bias, norm_weight = _normal(1000, device=device), _normal(1000, device=device)
    for num_tokens in (1, 5, 33, 70):
        x = _normal(num_tokens, 1000, device=device)
        for deterministic in (False, True):
            options = {"norm_weight": norm_weight, "deterministic": deterministic}
            yield ops.linear(x, weight, bias, **options)
            yield ops.linear(x, weight, activation="silu_and_mul", **options)
            residual, normed = x.clone(), torch.empty_like(x)
            yield ops.linear(
                x, weight, residual=residual, out=residual, out_norm_weight=norm_weight,
                normed_out=normed, prefetch=weight, deterministic=deterministic,
            )  # fmt: skip
            yield normed
    long = (_normal(64, 3072, device=device) / 55).to(torch.bfloat16)
    for num_tokens in (5, 70):
        x = _normal(num_tokens, 3072, device=device).to(torch.bfloat16)
        for leaves in (None, 8):
            yield ops.linear(x, long, deterministic=True, leaves=leaves)
    for quantized in _quantized(device):
        for num_tokens in (1, 5, 33, 70):
            x = _normal(num_tokens, quantized.num_in, device=device).to(torch.bfloat16)
            for activation in (None, "silu_and_mul"):
                yield ops.linear(x, quantized, activation=activation)


def _quantized(device: torch.device) -> Iterator[QuantizedWeight]:
    """Yield weights whose scales multiply results, sums and weights; some with zero points."""
    codes = torch.arange(72 * 512, device=device).remainder(251).to(torch.uint8).view(72, 512)
    scales = _normal(72, 8, device=device).abs() / 256
    zeros = torch.full((72, 8), 7, dtype=torch.uint8, device=device)
    order = torch.arange(1023, -1, -1, dtype=torch.int32, device=device)
    new = partial(QuantizedWeight, codes=codes, dtype=torch.bfloat16)
    yield new(code="int4", scales=scales[:, :1].contiguous())
    yield new(code="int4", scales=scales, inputs_per_scale=128)
    yield new(code="uint4", scales=scales, zeros=zeros, order=order, inputs_per_scale=128)
    exponents = torch.full((72, 32), 119, dtype=torch.uint8, device=device)
    yield new(code="e2m1", scales=exponents, inputs_per_scale=32)
    heads = torch.ones(72, 2, 18, dtype=torch.uint8, device=device)
    yield new(code="q6_k", codes=codes[:, :256].contiguous(), high=codes[:, 256:384].contiguous(),
              heads=heads)  # fmt: skip
    e4m3 = (codes & 119).view(torch.float8_e4m3fn)
    yield new(code="e4m3", codes=e4m3, scales=scales[:, :1] / 16)


def _dequantize(ops: ModuleType, device: torch.device) -> Outputs:
    for weight in _quantized(device):
        yield ops.dequantize(weight)


def _all_reduce_norm(ops: ModuleType, device: torch.device) -> Outputs:
    """One of two ranks; the words of the other have arrived before, so that it need not wait."""
    num_tokens, hidden = RING_ROWS + 3, 200
    own, theirs = (_normal(num_tokens, hidden, device=device) * scale for scale in (1, 2))
    weight = _normal(hidden, device=device)
    for algorithm in ("one_shot", "two_shot"):
        shape = (RING_SLOTS, 2, RING_ROWS, hidden)
        parts = [torch.zeros(shape, dtype=torch.int16, device=device) for _ in range(2)]
        for slot, rows in enumerate(theirs.split(RING_ROWS)):
            parts[0][slot, 1, : len(rows)] = rows.view(torch.int16).bitwise_not()
        turn, abort = (torch.zeros(n, dtype=torch.int32, device=device) for n in (RING_ROWS, 1))
        buffers = AllReduceBuffers(PeerBuffer(0, tuple(parts)), turn, abort)
        residual, normed = _normal(num_tokens, hidden, device=device), torch.empty_like(own)
        ops.all_reduce_norm(
            own, buffers, residual=residual, out=residual, norm_weight=weight, normed_out=normed,
            algorithm=algorithm,
        )  # fmt: skip
        # In two shots the other rank sends the results of every second tile, of four rows here.
        mine = slice(4) if algorithm == "two_shot" else slice(None)
        yield from (residual[mine], normed[mine])


def _route_experts(ops: ModuleType, device: torch.device) -> Outputs:
    x, bias = _normal(33, 600, device=device), torch.linspace(-1, 1, 24, device=device)
    slots = torch.arange(33, device=device)[None]
    slots[0, 5] = -1
    for scores, groups in (("softmax", 1), ("sigmoid", 4)):
        routing = Routing(
            num_experts=24, top_k=3, scores=scores, num_groups=groups,
            kept_groups=groups // 2 or 1, renormalizes=True, num_shared=1,
        )  # fmt: skip
        router = _normal(24, 600, device=device).float() / 24
        yield ops.route_experts(x, router, routing, bias, logits_bias=bias, slot_mapping=slots)[1]


def _expert_linear(ops: ModuleType, device: torch.device) -> Outputs:
    gates, weight = (_normal(7, *shape, device=device) for shape in ((2, 40, 96), (40, 96)))
    for num_tokens in (2, 33, 600):  # by pair, by expert, sorted
        x = _normal(num_tokens, 96, device=device)
        ids = torch.arange(2 * num_tokens, dtype=torch.int32, device=device).view(-1, 2) % 7
        yield ops.expert_linear(x, gates, ids, activation="silu_and_mul")
        yield ops.expert_linear(x, weight, ids, deterministic=True)
        yield ops.expert_linear(x, weight, ids, deterministic=True, leaves=8)
    codes = torch.arange(7 * 80 * 48, device=device).view(7, 80, 48).to(torch.uint8)
    experts = QuantizedWeight(
        code="e2m1", codes=codes, scales=codes[..., :3] % 8 + 116, dtype=x.dtype,
        inputs_per_scale=32,
    )  # fmt: skip
    bias = _normal(7, 2, 40, device=device)
    for num_tokens in (2, 600):
        x = _normal(num_tokens, 96, device=device)
        ids = torch.arange(2 * num_tokens, dtype=torch.int32, device=device).view(-1, 2) % 7
        yield ops.expert_linear(x, experts, ids, bias=bias, activation=ClampedSwiGLU())


def _add_experts(ops: ModuleType, device: torch.device) -> Outputs:
    x, experts = _normal(3, 200, device=device), _normal(7, 90, 200, device=device)
    ids = torch.tensor([[6, 0, 2]], dtype=torch.int32, device=device)
    yield ops.add_experts(x, experts, ids, ids.float() / 6, residual=x[:1, :90])


def _combine_experts(ops: ModuleType, device: torch.device) -> Outputs:
    products, hidden = _normal(99, 200, device=device), _normal(33, 200, device=device)
    weights, normed = _normal(33, 3, device=device).float(), torch.empty_like(hidden)
    yield ops.combine_experts(
        products, weights, residual=hidden, norm_weight=_normal(200, device=device),
        normed_out=normed,
    )  # fmt: skip
    yield normed


def _features(device: torch.device) -> FeatureRows:
    """Return rows for two of three tokens, each with the embedding and 200 further columns."""
    return FeatureRows(
        rows=_normal(5, 400, device=device),
        source=torch.tensor([2, -1, 4], dtype=torch.int32, device=device),
        num_sources=torch.tensor([3], dtype=torch.int32, device=device),
    )


def _add_features(ops: ModuleType, device: torch.device) -> Outputs:
    hidden = _normal(3, 200, device=device)
    ops.add_features(hidden, _features(device), 200)
    yield hidden


def _adapters(device: torch.device, parts: tuple[int, ...]) -> Adapters:
    """Return adapters of a weight with 200 inputs for 18 tokens, in 3 slots and without any."""
    slots, ranks = torch.arange(18, dtype=torch.int32, device=device) % 4 - 1, 12
    matrices = LoraMatrices(
        a=_normal(3, len(parts) * ranks, 200, device=device),
        b=_normal(3, ranks, sum(parts), device=device),
        scaling=torch.full((3, len(parts)), 0.1, device=device),
        ranks=torch.arange(3 * len(parts), dtype=torch.int32, device=device).view(3, -1) + 4,
        part_rows=parts,
    )
    return Adapters(matrices=matrices, slots=slots)


def _shrink_adapters(ops: ModuleType, device: torch.device) -> Outputs:
    yield ops.shrink_adapters(_normal(18, 200, device=device), _adapters(device, (70, 20, 20)))


def _add_adapters(ops: ModuleType, device: torch.device) -> Outputs:
    """Also as ``linear`` adds them, to one token, to a few, and to those of a tile."""
    adapters, out = _adapters(device, (70, 20, 20)), _normal(18, 110, device=device)
    ops.add_adapters(out, _normal(18, 36, device=device).float(), adapters)
    yield out
    x, weight = _normal(18, 200, device=device), _normal(110, 200, device=device)
    for tokens in (slice(1, 2), slice(18)):
        own = Adapters(matrices=adapters.matrices, slots=adapters.slots[tokens])
        yield ops.linear(x[tokens], weight, adapters=own)
        yield ops.linear(x[tokens], weight, adapters=own, deterministic=True)


def _embed_tokens(ops: ModuleType, device: torch.device) -> Outputs:
    ids = torch.tensor([0, 49, 7], device=device)
    for features in (None, _features(device)):
        yield from ops.embed_tokens(
            ids,
            _normal(50, 200, device=device),
            ids.flip(0),
            _normal(50, 96, device=device).float(),
            features=features,
        )


def _fetch_upload(ops: ModuleType, device: torch.device) -> Outputs:
    uploads = torch.arange(2 * 5000, dtype=torch.int32).view(2, 5000)
    uploads[:, 0] = 4321
    if device.type == "cuda":
        uploads = uploads.pin_memory()
    staged = torch.zeros(5000, dtype=torch.int32, device=device)
    ops.fetch_upload(uploads, torch.ones(1, dtype=torch.int32, device=device), staged)
    yield staged


def _scatter_segments(ops: ModuleType, device: torch.device) -> Outputs:
    state, staged = (torch.arange(n, dtype=torch.int32, device=device) for n in (3000, 1500))
    segments = torch.tensor(
        [[7, 3, 1400], [1500, -1, 9], [1600, 0, 0], [5, 5, 99]], dtype=torch.int32, device=device
    )
    ops.scatter_segments(state, staged, segments, segments[3, :1] - 2)
    yield state


def _post_update(ops: ModuleType, device: torch.device) -> Outputs:
    def matrix(rows: int, columns: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.arange(rows * columns, dtype=dtype, device=device).view(rows, columns)

    def row(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    int64 = torch.int64
    slots = RequestSlots(
        token_ids=matrix(4, 64), num_tokens=row(40, 0, 30, 0), stopped=row(0, 0, 0, 0),
        num_computed_tokens=row(39, 0, 10, 0), max_total_tokens=row(64, 64, 64, 64),
        stop_token_ids=row(4, -1, 4, -1, 4, -1, 4, -1).view(4, 2),
        stop_sequences=matrix(4, 6).view(4, 2, 3), stop_sequence_lens=matrix(4, 2) % 3 + 1,
        num_stop_sequences=row(2, 2, 2, 2), prompt_len=row(30, 0, 20, 0),
        min_total_tokens=row(0, 0, 0, 0),
    )  # fmt: skip
    out = AppendedTokens(output=matrix(3, 3, int64), num_output=row(9, 9, 9))
    ops.post_update(
        row(2, 0, -1), row(0, 20, 23, 23), row(-1, 20, -1, dtype=int64), matrix(3, 3, int64),
        slots, out, num_sampled=row(0, 3, 0),
    )  # fmt: skip
    yield from (slots.token_ids, slots.num_tokens, slots.num_computed_tokens, slots.stopped)
    yield from (out.output, out.num_output)


def _edit_logits(ops: ModuleType, device: torch.device) -> Outputs:
    """Two rows of a request that uses everything, and one that has just taken its slot."""

    def full(*shape: int, value: int = 1) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    vocab = 5000
    token_ids = torch.arange(2 * 3000, device=device).int().view(2, 3000) % 4001
    logits, penalty = _normal(4, vocab, device=device).float(), full(2).float() / 2
    history = History(
        token_ids=token_ids, num_tokens=full(2, value=2999), prompt_len=full(2, value=1000),
        min_total_tokens=full(2, value=3001), late_token_ids=full(2, 16, value=9),
    )  # fmt: skip
    edits = LogitEdits(
        edits=full(2, value=15), allowed_mask=full(2, 157, value=-2), bias_ids=token_ids[:, :300],
        bias_values=token_ids[:, :300].float(), num_bias=full(2, value=299),
        repetition_penalty=penalty, frequency_penalty=penalty, presence_penalty=penalty,
        counts=full(2, vocab), counted=full(2, MAX_PARTS, value=-1),
    )  # fmt: skip
    idx_mapping = torch.tensor([1, 1, 0, -1], dtype=torch.int32, device=device)
    drafts = full(2, 1, value=3)
    ops.edit_logits(logits, idx_mapping, history, edits, ahead=full(4), draft_token_ids=drafts)
    yield logits


def _apply_token_bitmask(ops: ModuleType, device: torch.device) -> Outputs:
    logits = _normal(3, 5000, device=device)
    bitmask = torch.arange(2 * 157, dtype=torch.int32, device=device).view(2, 157)
    rows = torch.tensor([2, -1], dtype=torch.int32, device=device)
    ops.apply_token_bitmask(logits, bitmask, rows=rows)
    yield logits


def _top_logprobs(ops: ModuleType, device: torch.device) -> Outputs:
    token_ids = torch.tensor([[4, -1], [4999, 0]], device=device)
    yield from ops.top_logprobs(_normal(2, 5000, device=device), token_ids, 40)


OPS: dict[str, Op] = {
    op.__name__.removeprefix("_"): op
    for op in (
        _add_adapters, _add_experts, _add_features, _all_reduce_norm, _apply_bad_words,
        _apply_rope, _apply_token_bitmask,
        _combine_experts, _copy_pages, _dequantize, _edit_logits, _embed_tokens, _expert_linear,
        _fetch_upload, _gather_tokens, _gelu_tanh_and_mul, _kv_cache_write, _linear, _merge_states,
        _paged_decode_attention, _paged_prefill_attention, _plan_decode_attention,
        _post_update, _qkv_cache_write, _rms_norm, _route_experts, _sample_tokens,
        _scatter_segments, _shrink_adapters, _silu_and_mul, _top_logprobs,
    )
}  # fmt: skip


def run(device: torch.device) -> None:
    """Run every kernel and its oracle; raise where they differ."""
    # Short contexts too are split, and Hopper's kernels run, without splits too.
    hopper = tuple(replace(row, min_queries=0) for row in prefill_choice.KERNELS)
    with (
        patch.object(prefill_attention, "MIN_SPLIT_STEPS", 1),
        patch.object(prefill_choice, "KERNELS", hopper),
    ):
        _run_all(device)


def _run_all(device: torch.device) -> None:
    for name, op in OPS.items():
        results = op(kernels, device), op(reference, torch.device("cpu"))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got.cpu(), want, **CLOSE)
        print(f"ran {name}", flush=True)


def run_planted(device: torch.device) -> None:
    """Write a token to a block far outside the cache, which no launcher can see."""
    case = next(_paged((1, 1, 1), device))
    slots = case.slot_mapping + (1 << 30)
    kernels.kv_cache_write(case.key, case.value, case.k_cache, case.v_cache, slots, case.layout)
    torch.cuda.synchronize()


def sanitize(tool: str, mode: str) -> dict[str, object]:
    """Run ``mode`` under a tool in a process of its own; return findings, summary, time."""
    # Every tensor gets an allocation of its own, past whose end no access is allowed.
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # of this process
    }
    command = ["compute-sanitizer", "--tool", tool, sys.executable, str(Path(__file__)), mode]
    start = time.monotonic()
    done = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    found = re.search(TOOLS[tool], done.stdout)
    if found is None:
        raise RuntimeError(f"{' '.join(command)}: expected a summary, got\n{done.stdout}")
    lines = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
    hazards = Counter(re.findall(r"Race reported between \w+ access at (\w+)\+0x", done.stdout))
    return {
        "findings": int(found[1]),
        "hazards": dict(hazards),
        "summary": lines[-1].strip("= "),
        "kernels": re.findall(r"^ran (\w+)$", done.stdout, re.MULTILINE),
        "exit_code": done.returncode,
        "seconds": round(time.monotonic() - start, 1),
        "output": "" if found[1] == "0" else done.stdout[:2_000],
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("output", type=Path, nargs="?")
    mode.add_argument("--run", action="store_true", help="the kernels alone, without the tool")
    mode.add_argument("--planted", action="store_true", help="a launch outside its cache")
    mode.add_argument("--handoff", action="store_true", help="a hand-off without a race")
    parser.add_argument("--commit", help="commit of the source; default: ask git")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the mode of the command line; return the exit code."""
    options, device = parse(arguments), torch.device("cuda", 0)
    if options.run:
        run(device)
        return 0
    if options.planted:
        run_planted(device)
        return 0
    if options.handoff:
        from benchmarks import handoff  # Triton's interpreter has no Gluon

        handoff.run(device)
        return 0
    jobs = {tool: (tool, "--run") for tool in TOOLS} | {"planted": ("memcheck", "--planted")}
    if device_info(device).capability == prefill_choice.WARP_GROUP_CAPABILITY:
        jobs["handoff"] = ("racecheck", "--handoff")
    with ThreadPoolExecutor() as pool:
        started = {name: pool.submit(sanitize, *job) for name, job in jobs.items()}
    said = {name: each.result() for name, each in started.items()}
    tools = {tool: said.pop(tool) for tool in TOOLS}
    result = {
        "op": "sanitize",
        **provenance(device, options.commit),
        **said,
        "tools": tools,
    }
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name, each in (said | tools).items():
        print(f"{name}: {each['summary']}, {each['seconds']} s, {len(each['kernels'])} kernels")
    clean = all(
        each["findings"] == 0 and each["exit_code"] == 0 and each["kernels"] == list(OPS)
        for each in tools.values()
    )
    return 0 if clean and said["planted"]["findings"] else 1


if __name__ == "__main__":
    sys.exit(main())
