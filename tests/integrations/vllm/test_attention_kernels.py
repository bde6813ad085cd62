"""No batch of vLLM has a kernel of attention that the backend's start has not launched."""

from __future__ import annotations

import json
import pickle
from base64 import b64encode
from dataclasses import replace
from typing import Any

import pytest
import torch

from mrv1.device import INTERPRET, DeviceInfo
from mrv1.integrations.vllm.attention_kernels import (
    AttentionKernels,
    Batches,
    launch_every_decode,
    launch_every_prefill,
    launch_write,
)
from mrv1.integrations.vllm.attention_layer import AttentionLayer, BoundLayer
from mrv1.integrations.vllm.attention_pages import content_size
from mrv1.kernels import HeadRole, PageFormat
from mrv1.kernels.cache.formats import FP8
from tests.forks import Forks

LAYER = AttentionLayer(
    num_heads=16, head_size=128, role=HeadRole(), codes=None, softmax_scale=0.1,
    logits_soft_cap=0.0,
)  # fmt: skip
BATCHES = Batches(
    max_model_len=8448, max_num_reqs=64, max_num_tokens=8192, row_width=528, decode_query_len=1,
    dtype=torch.bfloat16,
)  # fmt: skip
H100 = DeviceInfo(
    device=torch.device("cuda", 0), name="H100", capability=(9, 0), num_sms=132,
    total_memory_bytes=80 << 30,
)  # fmt: skip


def kernels_of(
    layer: AttentionLayer,
    batches: Batches = BATCHES,
    num_blocks: int = 9,
    sinks: torch.Tensor | None = None,
) -> AttentionKernels:
    """Return the kernels of one layer with 8 KV heads."""
    content = content_size(layer.head_size, layer.codes)
    dtype = torch.uint8 if layer.codes else batches.dtype
    cache = torch.zeros(num_blocks, 8, 16, content, dtype=dtype)
    return AttentionKernels.of([BoundLayer(layer, cache, sinks)], batches, H100)


LIVE = """
import json, pickle, sys
from base64 import b64decode
import numpy as np
import torch
from mrv1.device import kernel_path
from mrv1.integrations.vllm.attention_kernels import decode_rows
from mrv1.kernels import DecodePlan, PrefillSplits
from mrv1.kernels.cache.kv_scales import format_of
from mrv1.kernels.registry import select_ops
from mrv1.runner.stand_in_device import stand_in_device

kernels = pickle.loads(b64decode(sys.argv[1]))
recorder = kernels.record()
batches = kernels.batches
((layer, form, sinks),) = kernels.layers
rng, device = np.random.default_rng(0), torch.device("cuda", 0)


def on_gpu(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype).to(device)


def decode(num_reqs, query_len):
    q = torch.zeros(
        num_reqs * query_len, layer.num_heads, layer.head_size, dtype=batches.dtype, device=device
    )
    plan = DecodePlan.allocate(
        max_reqs=num_reqs, max_keys=batches.row_width * pages.layout.block_size,
        layout=pages.layout, num_q_heads=layer.num_heads, dtype=batches.dtype,
        query_len=query_len, page_format=format_of(batches.dtype, pages.scales),
    )
    table = torch.zeros(num_reqs, batches.row_width, dtype=torch.int32, device=device)
    seq_lens = on_gpu([query_len] * num_reqs)
    ops.plan_decode_attention(seq_lens, pages.layout, plan)
    ops.paged_decode_attention(
        q, pages.k, pages.v, table, seq_lens, pages.layout, query_len=query_len,
        softmax_scale=layer.softmax_scale, logits_soft_cap=layer.logits_soft_cap,
        sinks=sinks, plan=plan, out=q, scales=pages.scales,
    )


def prefill(num_decodes, lengths, padding):
    num_tokens = sum(lengths) + padding
    # Behind decode rows all tensors begin at any row.
    q = torch.zeros(
        num_decodes + num_tokens, layer.num_heads, layer.head_size,
        dtype=batches.dtype, device=device,
    )[num_decodes:]
    table = torch.zeros(
        num_decodes + len(lengths), batches.row_width, dtype=torch.int32, device=device
    )[num_decodes:]
    seq_lens = on_gpu([1] * num_decodes + lengths)[num_decodes:]
    options = {"max_query_len": max(lengths)}
    splits = PrefillSplits.allocate(
        num_tokens=num_tokens, num_reqs=len(lengths), layout=pages.layout,
        num_q_heads=layer.num_heads, dtype=batches.dtype,
        page_format=format_of(batches.dtype, pages.scales), **options,
    )
    ops.paged_prefill_attention(
        q, pages.k, pages.v, table, on_gpu(np.cumsum([0, *lengths])), seq_lens, pages.layout,
        softmax_scale=layer.softmax_scale, logits_soft_cap=layer.logits_soft_cap,
        sinks=sinks, splits=splits, out=torch.empty_like(q), scales=pages.scales, **options,
    )


def write(num_tokens):
    # As in most models key and value are views of qkv.
    heads = [layer.num_heads, pages.layout.num_kv_heads, pages.layout.num_kv_heads]
    qkv = torch.zeros(
        num_tokens + 3, sum(heads), layer.head_size, dtype=batches.dtype, device=device
    )
    _, k, v = qkv[:num_tokens].split(heads, dim=1)
    slots = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    ops.kv_cache_write(k, v, pages.k, pages.v, slots, pages.layout, scales=pages.scales)


def batch():
    # The lengths of some decodes and prompts, and tokens of padding.
    if rng.random() < 0.3:  # all rows alike: short prompts, or drafts
        length = int(rng.integers(1, 10))
        most = min(batches.max_num_reqs, batches.max_num_tokens // length)
        return [length] * int(most ** rng.random()), 0
    budget = int(rng.integers(2, batches.max_num_tokens + 1))
    longest = int(min(budget, batches.max_model_len) ** rng.random()) + 1
    longest, lengths = min(longest, budget, batches.max_model_len), []
    num_decodes = int(batches.max_num_reqs ** rng.random()) - 1
    while len(lengths) + num_decodes < batches.max_num_reqs and budget > 1:
        lengths.append(int(min(max(longest ** rng.random(), 1), budget)))
        budget -= lengths[-1]
    lengths[0] = max(lengths[0], 2)
    return [1] * num_decodes + lengths, int(rng.integers(0, 9))


with stand_in_device(device), torch.inference_mode():
    ops = select_ops(kernel_path(device))
    pages = layer.pages(form.empty(device))
    sinks = None if sinks is None else sinks.empty(device)
    at_start, late = len(recorder.kernels), []
    for _ in range(int(sys.argv[2])):
        lengths, padding = batch()
        starts = np.cumsum([0, *lengths], dtype=np.int32)
        count, query_len = decode_rows(
            len(lengths), sum(lengths) + padding, max(lengths), starts, batches.decode_query_len
        )
        before = len(recorder.kernels)
        write(sum(lengths) + padding)
        if count:
            decode(count, query_len)
        if rest := lengths[count:]:
            prefill(count * query_len, rest, padding)
        if rest and count:
            prefill(0, lengths, padding)  # decodes too, where that is faster
        late += [[kernel.name, lengths] for kernel in recorder.kernels[before:]]
print(json.dumps([at_start, late]))
"""


@pytest.mark.skipif(INTERPRET, reason="not run: TRITON_INTERPRET=1 is set")
@pytest.mark.parametrize(
    ("changes", "capability", "batches"),
    [
        ({}, (9, 0), {}),
        ({"codes": FP8}, (9, 0), {"decode_query_len": 4}),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ({"role": HeadRole(window=300, sink=4)}, (9, 0), {}),
                ({"logits_soft_cap": 30.0}, (9, 0), {"max_num_tokens": 512}),
                ({"num_heads": 56}, (9, 0), {"max_num_reqs": 1}),
                ({"head_size": 80}, (8, 0), {"max_model_len": 100, "row_width": 7}),
                ({"codes": FP8, "num_heads": 8}, (8, 9), {"max_num_tokens": 2048}),
            )
        ),
    ],
)
def test_no_batch_has_a_kernel_that_the_start_has_not(
    forks: Forks,
    changes: dict[str, Any],
    capability: tuple[int, int],
    batches: dict[str, Any],
):
    kernels = kernels_of(replace(LAYER, **changes), BATCHES._replace(**batches))
    kernels = replace(kernels, gpu=replace(H100, capability=capability))
    run = forks.run(
        LIVE, b64encode(pickle.dumps(kernels)).decode(), "150",
        CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    num_at_start, late = json.loads(run.stdout)
    assert num_at_start >= 2
    assert late == []


def test_a_set_is_named_by_all_that_decides_on_kernels():
    digest = kernels_of(LAYER).digest
    assert kernels_of(LAYER, num_blocks=4).digest == digest
    others = [
        kernels_of(replace(LAYER, num_heads=32)),
        kernels_of(replace(LAYER, codes=FP8)),
        kernels_of(replace(LAYER, role=HeadRole(window=100))),
        kernels_of(LAYER, BATCHES._replace(max_num_tokens=2048)),
        kernels_of(LAYER, BATCHES._replace(decode_query_len=2)),
        kernels_of(LAYER, sinks=torch.zeros(16)),
        replace(kernels_of(LAYER), gpu=replace(H100, capability=(8, 0))),
    ]
    assert len({digest, *(kernels.digest for kernels in others)}) == 1 + len(others)


WRITES = """
import json
import torch
from mrv1.device import DeviceInfo, kernel_path, stand_in
from mrv1.integrations.vllm.attention_pages import content_size, pages_of
from mrv1.kernels import HeadRole
from mrv1.kernels.cache.formats import FP8
from mrv1.kernels._base.recording import KernelRecorder
from mrv1.kernels.registry import select_ops
from mrv1.runner.stand_in_device import stand_in_device

device = torch.device("cuda", 0)
stand_in(DeviceInfo(
    device=device, name="H100", capability=(9, 0), num_sms=132, total_memory_bytes=80 << 30
))
recorder, counts = KernelRecorder((9, 0)), []
with stand_in_device(device):
    ops = select_ops(kernel_path(device))
    for num_heads, codes in ((8, None), (1, FP8)):
        content = content_size(128, codes)
        dtype = torch.uint8 if codes else torch.bfloat16
        cache = torch.zeros(9, num_heads, 16, content, dtype=dtype, device=device)
        pages = pages_of(cache, 128, HeadRole(), codes)
        for num_tokens in (2, 1, 3, 16, 17, 300, 301):
            k = torch.zeros(num_tokens, num_heads, 128, dtype=torch.bfloat16, device=device)
            slots = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
            ops.kv_cache_write(
                k, k, pages.k, pages.v, slots, pages.layout, scales=pages.scales
            )
            counts.append(len(recorder.kernels))
print(json.dumps(counts))
"""


@pytest.mark.skipif(INTERPRET, reason="not run: TRITON_INTERPRET=1 is set")
def test_any_number_of_tokens_is_written_by_the_same_kernel(forks: Forks):
    run = forks.run(WRITES, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [1] * 7 + [2] * 7


@pytest.mark.interp
@pytest.mark.gpu
@pytest.mark.parametrize("codes", [None, FP8], ids=["plain", "fp8"])
def test_launches_leave_the_cache_as_it_is(device: torch.device, codes: PageFormat | None):
    """On a GPU the kernels of warp groups are among them."""
    on_gpu = device.type == "cuda"
    size, dtype = (128, torch.bfloat16) if on_gpu else (32, torch.float32)
    layer = replace(LAYER, num_heads=2, head_size=size, codes=codes)
    shape = (3, 1, 16, content_size(size, codes))
    if codes is not None:
        cache = torch.full(shape, 255, dtype=torch.uint8, device=device)
    else:
        cache = torch.full(shape, torch.nan, dtype=dtype, device=device)
    before = cache.clone()
    small = Batches(40, 3, 50, row_width=3, decode_query_len=2, dtype=dtype)
    batches = BATCHES._replace(decode_query_len=4) if on_gpu else small
    for launch in (launch_write, launch_every_prefill, launch_every_decode):
        launch(BoundLayer(layer, cache, None), batches)
    assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))
