"""Other attention kernels.

An adapter takes the data of a cell and returns a function that makes a layer's launch; the launch
writes the layer's ``out``. All heads see everything, and all requests have as many queries, unless
the peer has more to it (``Peer.extras``). A peer whose fp8 cache has one static scale gets our
values quantised again, so its error includes the rounding of its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels.attention_data import QUANTIZED_ROWS, AttentionData, Layer
from benchmarks.measure.options import KVDtype
from benchmarks.measure.timing import Launch
from benchmarks.peers import Peer
from mrv1.kernels import KVScales
from mrv1.kernels.cache.formats import FP8

LayerLaunch = Callable[[Layer], Launch]
Adapter = Callable[[AttentionData], LayerLaunch]

FLASHINFER_WORKSPACE_BYTES = 512 << 20
VLLM_SEGMENTS = 16
"""Splits of a request's keys in vLLM's Triton decode, as in vLLM's backend."""
VLLM_SPLIT_PROGRAMS = 128
"""vLLM's backend splits while requests times KV heads are at most this number."""


def flash_attention_3(data: AttentionData) -> LayerLaunch:
    """Run vLLM's FlashAttention-3, paged, on caches in its own [blocks, tokens, heads] layout.

    With an fp8 cache the queries are fp8 too; q, K and V have one static scale each.
    """
    case = data.case
    attend, shape = _flash_attention_3(data), (case.cell.num_requests, case.num_kv_heads)

    def launch(layer: Layer) -> Launch:
        q, k, v, scales, options = layer.q, layer.k, layer.v, layer.scales, {}
        if scales is not None:
            q_scale = q.float().abs().max() / FP8.largest
            k_scale, v_scale = scales.k_scale.max(), scales.v_scale.max()
            q = (q.float() / q_scale).to(torch.float8_e4m3fn)
            k = _static_codes(k, scales.k_scale, k_scale)
            v = _static_codes(v, scales.v_scale, v_scale)
            options = {
                "q_descale": q_scale.expand(shape),
                "k_descale": k_scale.expand(shape),
                "v_descale": v_scale.expand(shape),
            }
        k, v = (_pages(data, x).transpose(1, 2).contiguous() for x in (k, v))
        return partial(attend, q=q, k=k, v=v, out=layer.out, **options)

    return launch


def _flash_attention_3(data: AttentionData) -> Callable[..., Any]:
    """Return FlashAttention-3 with its shared arguments; its schedule is made once, as in vLLM."""
    from vllm.vllm_flash_attn import (
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    case = data.case
    window = (-1, -1) if case.is_uniform else (case.window - 1, 0)
    lengths = {"max_seqlen_q": case.query_len, "max_seqlen_k": case.cell.context}
    schedule = get_scheduler_metadata(
        batch_size=case.cell.num_requests,
        num_heads_q=case.num_q_heads,
        num_heads_kv=case.num_kv_heads,
        headdim=case.head_dim,
        cache_seqlens=data.seq_lens,
        qkv_dtype=case.cache_dtype,
        cu_seqlens_q=data.query_start_loc,
        page_size=case.block_size,
        causal=True,
        window_size=window,
        **lengths,
    )
    return partial(
        flash_attn_varlen_func,
        cu_seqlens_q=data.query_start_loc,
        seqused_k=data.seq_lens,
        block_table=data.block_of_page,
        softmax_scale=data.softmax_scale,
        causal=True,
        window_size=window,
        fa_version=3,
        scheduler_metadata=schedule,
        **lengths,
    )


def flashinfer(data: AttentionData) -> LayerLaunch:
    """Run FlashInfer's paged wrappers on our own pages (its HND), planned once for all layers.

    In an fp8 cache K has a static scale, and V the scale 1: any other costs one more launch.
    """
    run = _flashinfer_plan(data)

    def launch(layer: Layer) -> Launch:
        k, v, scales, options = layer.k, layer.v, layer.scales, {}
        if scales is not None:
            k_scale = scales.k_scale.max()
            k = _static_codes(k, scales.k_scale, k_scale)
            v = _static_codes(v, scales.v_scale, torch.ones_like(k_scale))
            options = {"k_scale": float(k_scale)}
        return partial(run, layer.q, (_pages(data, k), _pages(data, v)), out=layer.out, **options)

    return launch


def _flashinfer_plan(data: AttentionData) -> Callable[..., Any]:
    from flashinfer import (  # type: ignore[import-not-found]
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
    )

    case, device = data.case, data.seq_lens.device
    batch, num_columns = data.block_table.shape
    workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * num_columns
    last_page_len = torch.full(
        (batch,), (case.cell.context - 1) % case.block_size + 1, dtype=torch.int32, device=device
    )
    pages = (indptr, data.block_table.flatten(), last_page_len)
    sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.block_size)
    types = {"q_data_type": case.dtype, "kv_data_type": case.cache_dtype}
    if case.query_len == 1:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*pages, *sizes, sm_scale=data.softmax_scale, **types)
    else:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(
            data.query_start_loc, *pages, *sizes, causal=True, sm_scale=data.softmax_scale, **types
        )
    run: Callable[..., Any] = wrapper.run
    return run


def fmha_v2(data: AttentionData) -> LayerLaunch:
    """Run FlashInfer's TensorRT-LLM prefill on its own [blocks, K and V, tokens, heads] pages.

    FlashInfer compiles it on its first launch, which takes a minute. With an fp8 cache the queries
    are fp8 too; q, K and V have one static scale each.
    """
    from flashinfer.prefill import (  # type: ignore[import-not-found]
        trtllm_fmha_v2_prefill,
    )

    case, device = data.case, data.seq_lens.device
    if case.query_len == 1:
        raise ValueError("computes prefills only")
    window = {} if case.is_uniform else {"window_left": case.window - 1}
    attend = partial(
        trtllm_fmha_v2_prefill,
        input_layout="Q_PAGED_KV_NHD",
        workspace_buffer=torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        seq_lens=data.seq_lens,
        max_q_len=case.query_len,
        max_kv_len=case.cell.context,
        batch_size=case.cell.num_requests,
        cum_seq_lens_q=data.query_start_loc,
        cum_seq_lens_kv=torch.nn.functional.pad(
            data.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)
        ),
        block_tables=data.block_of_page.contiguous(),
        mask_mode="sliding_window" if window else "causal",
        **window,
    )

    def launch(layer: Layer) -> Launch:
        q, k, v, scales = layer.q, layer.k, layer.v, layer.scales
        score_scale, v_scale = data.softmax_scale, 1.0
        if scales is not None:
            q_scale = q.float().abs().max() / FP8.largest
            k_scale, value_scale = scales.k_scale.max(), scales.v_scale.max()
            q = (q.float() / q_scale).to(torch.float8_e4m3fn)
            k = _static_codes(k, scales.k_scale, k_scale)
            v = _static_codes(v, scales.v_scale, value_scale)
            score_scale *= float(q_scale * k_scale)
            v_scale = float(value_scale)
        pages = torch.stack([_pages(data, x).transpose(1, 2) for x in (k, v)], dim=1)
        return partial(
            attend, (q, pages), out=layer.out, bmm1_scale=score_scale, bmm2_scale=v_scale
        )

    return launch


def vllm_triton(data: AttentionData) -> LayerLaunch:
    """Run vLLM's Triton kernel on its own cache: [blocks, tokens, heads, K then V].

    In an fp8 cache our codes and scales are packed as vLLM does: K, K's scale, V, V's scale.
    """
    dim = data.case.head_dim

    def launch(layer: Layer) -> Launch:
        pages = [_pages(data, x).transpose(1, 2) for x in (layer.k, layer.v)]
        if layer.scales is None:
            k, v = torch.cat(pages, dim=-1).split(dim, dim=-1)
            return _vllm_triton(data, layer, k, v)
        parts = [
            part.view(torch.uint8)
            for codes, scale in zip(pages, _scale_pages(data, layer.scales), strict=True)
            for part in (codes.contiguous(), scale[..., None])
        ]
        packed = torch.cat(parts, dim=-1)  # [blocks, tokens, heads, dim + 4 + dim + 4] bytes
        codes, scales = packed.view(torch.float8_e4m3fn), packed.view(torch.float32)
        k, v = codes[..., :dim], codes[..., dim + 4 : -4]
        return _vllm_triton(data, layer, k, v, scales[..., dim // 4], scales[..., -1])

    return launch


def vllm_triton_side(data: AttentionData) -> LayerLaunch:
    """Run that kernel on [blocks, tokens, heads] pages of codes, scales in separate tensors."""

    def launch(layer: Layer) -> Launch:
        k, v = (_pages(data, x).transpose(1, 2).contiguous() for x in (layer.k, layer.v))
        scales = _scale_pages(data, layer.scales) if layer.scales else ()
        return _vllm_triton(data, layer, k, v, *scales)

    return launch


def _vllm_triton(
    data: AttentionData, layer: Layer, k: torch.Tensor, v: torch.Tensor, *scales: torch.Tensor
) -> Launch:
    """Return the kernel's launch on ``k, v [blocks, tokens, heads, dim]``, of any strides."""
    from vllm.v1.attention.ops.triton_unified_attention import (
        unified_attention,
    )
    from vllm.v1.kv_cache_interface import KVQuantMode

    case, device = data.case, data.seq_lens.device
    max_split_reqs = VLLM_SPLIT_PROGRAMS // case.num_kv_heads
    shape = (max_split_reqs, case.num_q_heads, VLLM_SEGMENTS)
    padded_dim = 1 << (case.head_dim - 1).bit_length()
    options = {"kv_quant_mode": KVQuantMode.NONE}
    if scales:
        options = {
            "kv_quant_mode": KVQuantMode.FP8_PER_TOKEN_HEAD,
            "k_scale_cache": scales[0],
            "v_scale_cache": scales[1],
        }
    return partial(
        unified_attention,
        q=layer.q,
        k=k,
        v=v,
        out=layer.out,
        cu_seqlens_q=data.query_start_loc,
        max_seqlen_q=case.query_len,
        seqused_k=data.seq_lens,
        max_seqlen_k=case.cell.context,
        softmax_scale=data.softmax_scale,
        causal=True,
        window_size=(-1, -1),
        block_table=data.block_table,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        seq_threshold_3D=max_split_reqs,
        num_par_softmax_segments=VLLM_SEGMENTS,
        softmax_segm_output=torch.empty((*shape, padded_dim), device=device),
        softmax_segm_max=torch.empty(shape, device=device),
        softmax_segm_expsum=torch.empty(shape, device=device),
        **options,
    )


def torch_sdpa(data: AttentionData) -> LayerLaunch:
    """Run scaled_dot_product_attention on dense K and V; on a GPU only its flash kernel.

    It allocates its result; the copy of the result to ``out`` is timed too.
    """
    case = data.case
    if case.query_len not in (1, case.cell.context):
        raise ValueError("counts causal queries from the first key")
    flat = (case.cell.batch, case.query_len, case.num_q_heads, case.head_dim)
    on_gpu = data.seq_lens.device.type == "cuda"
    backend = SDPBackend.FLASH_ATTENTION if on_gpu else SDPBackend.MATH

    def dense(pages: torch.Tensor) -> torch.Tensor:
        rows = pages[data.block_table.long()].transpose(1, 2).flatten(2, 3)
        return rows[:, :, : case.cell.context].contiguous()

    def attend(layer: Layer, k: torch.Tensor, v: torch.Tensor) -> None:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                layer.q.view(flat).transpose(1, 2), k, v,
                is_causal=case.query_len > 1, scale=data.softmax_scale, enable_gqa=True,
            )  # fmt: skip
        layer.out.view(flat).copy_(out.transpose(1, 2))

    return lambda layer: partial(
        attend, layer, dense(_pages(data, layer.k)), dense(_pages(data, layer.v))
    )


BOTH: tuple[KVDtype, ...] = ("auto", "fp8_e4m3")
PEERS: Mapping[str, Peer[Adapter]] = {
    "flash-attn-3": Peer(
        module="vllm",
        adapter=flash_attention_3,
        extras=("windows", "decodes"),
        kv_dtypes=BOTH,
        static_scale_error=0.25,  # q, K, V and the probabilities rounded to e4m3: 0.14 on an H200
    ),
    "flashinfer": Peer(
        module="flashinfer",
        adapter=flashinfer,
        kv_dtypes=BOTH,
        static_scale_error=0.2,  # K and V rounded to e4m3 once more: 0.11 on an H200
    ),
    "fmha-v2": Peer(
        module="flashinfer",
        adapter=fmha_v2,
        extras=("windows", "decodes"),
        kv_dtypes=BOTH,
        static_scale_error=0.25,  # as flash-attn-3
    ),
    "vllm-triton": Peer(module="vllm", adapter=vllm_triton, kv_dtypes=BOTH),
    "vllm-triton-side": Peer(module="vllm", adapter=vllm_triton_side, kv_dtypes=("fp8_e4m3",)),
    "torch-sdpa": Peer(module="torch", adapter=torch_sdpa),
}
"""Name -> peer. An output vector that misses a 16th of its keys has a relative error of 0.25."""


def _pages(data: AttentionData, buffer: torch.Tensor) -> torch.Tensor:
    """Return K or V of a uniform case as [blocks, kv_heads, block_size, head_dim]."""
    case = data.case
    return buffer.view(-1, case.num_kv_heads, case.block_size, case.head_dim)


def _scale_pages(data: AttentionData, scales: KVScales) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V scales of a uniform case as contiguous [blocks, block_size, kv_heads]."""
    shape = (-1, data.case.num_kv_heads, data.case.block_size)
    k_scale, v_scale = (s.view(shape).transpose(1, 2) for s in (scales.k_scale, scales.v_scale))
    return k_scale.contiguous(), v_scale.contiguous()


def _static_codes(
    codes: torch.Tensor, scales: torch.Tensor, static_scale: torch.Tensor
) -> torch.Tensor:
    """Return flat codes, all with one scale, of the values of ``codes`` with a scale each."""
    flat_scales = scales.view(-1)
    vectors = codes.view(len(flat_scales), -1)
    parts = zip(vectors.split(QUANTIZED_ROWS), flat_scales.split(QUANTIZED_ROWS), strict=True)
    again = [FP8.encode(part.float(), static_scale / scale) for part, scale in parts]
    return torch.cat(again).view(codes.dtype).flatten()
