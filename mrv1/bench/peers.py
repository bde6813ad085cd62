"""Other attention kernels on the same data: one adapter each, imported only when it is asked for.

An adapter takes the data of a cell, in which all heads see everything, and returns one launch per
layer that writes the layer's ``out``. What a peer prepares once (a plan, a cache in its own
layout, codes with its own scales, fp8 queries) is done before, and not timed.

A peer whose fp8 cache has one static scale gets our values quantised again, so its error against
them is its cache's rounding too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from mrv1.bench.attention_data import QUANTIZED_ROWS, AttentionData, Layer
from mrv1.bench.provenance import version_of
from mrv1.bench.timing import Launch
from mrv1.errors import ConfigError
from mrv1.integrations.vllm_flash_attention import flash_attention
from mrv1.integrations.vllm_triton import triton_attention
from mrv1.kernels import KVScales
from mrv1.kernels.cache.kv_scales import LARGEST_E4M3
from mrv1.kernels.reference import quantize_e4m3

Adapter = Callable[[AttentionData], list[Launch]]

NOT_INSTALLED = "not installed"
FLASHINFER_WORKSPACE_BYTES = 512 << 20
VLLM_SEGMENTS = 16
"""Splits of a request's keys in vLLM's Triton decode; its backend has this number and the next."""
VLLM_SPLIT_PROGRAMS = 128
"""It splits while requests times KV heads are no more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Somebody else's attention."""

    module: str
    """What must be importable."""
    on_auto: Adapter | None = None
    """Reads a cache of q's dtype."""
    on_fp8: Adapter | None = None
    """Reads an fp8 cache."""
    static_scale_error: float | None = None
    """Its fp8 cache has one static scale, and this relative error to ours is still rounding; None
    = it reads our codes and scales."""


def flash_attention_3(data: AttentionData) -> list[Launch]:
    """Run vLLM's FlashAttention-3, paged, on caches in its own [blocks, tokens, heads] layout."""
    attend = _flash_attention_3(data)

    def launch(layer: Layer) -> Launch:
        k, v = (_pages(data, x).transpose(1, 2).contiguous() for x in (layer.k, layer.v))
        return partial(attend, q=layer.q, k=k, v=v, out=layer.out)

    return [launch(layer) for layer in data.layers]


def flash_attention_3_fp8(data: AttentionData) -> list[Launch]:
    """Run it on fp8 queries, keys and values, with a static scale for each of the three."""
    attend, shape = _flash_attention_3(data), (data.case.cell.batch, data.case.num_kv_heads)

    def launch(layer: Layer) -> Launch:
        scales = _scales(layer)
        q_scale = layer.q.float().abs().max() / LARGEST_E4M3
        k_scale, v_scale = scales.k_scale.max(), scales.v_scale.max()
        k = _static_codes(layer.k, scales.k_scale, k_scale)
        v = _static_codes(layer.v, scales.v_scale, v_scale)
        return partial(
            attend,
            q=(layer.q.float() / q_scale).to(torch.float8_e4m3fn),
            k=_pages(data, k).transpose(1, 2).contiguous(),
            v=_pages(data, v).transpose(1, 2).contiguous(),
            out=layer.out,
            q_descale=q_scale.expand(shape),
            k_descale=k_scale.expand(shape),
            v_descale=v_scale.expand(shape),
        )

    return [launch(layer) for layer in data.layers]


def _flash_attention_3(data: AttentionData) -> Callable[..., Any]:
    """Return it with all that layers share, its schedule made once as in vLLM."""
    case = data.case
    attend, get_schedule = flash_attention()
    lengths = {"max_seqlen_q": case.query_len, "max_seqlen_k": case.cell.context}
    schedule = get_schedule(
        batch_size=case.cell.batch,
        num_heads_q=case.num_q_heads,
        num_heads_kv=case.num_kv_heads,
        headdim=case.head_dim,
        cache_seqlens=data.seq_lens,
        qkv_dtype=case.cache_dtype,
        cu_seqlens_q=data.query_start_loc,
        page_size=case.block_size,
        causal=True,
        **lengths,
    )
    return partial(
        attend,
        cu_seqlens_q=data.query_start_loc,
        seqused_k=data.seq_lens,
        block_table=data.block_table,
        softmax_scale=data.softmax_scale,
        causal=True,
        fa_version=3,
        scheduler_metadata=schedule,
        **lengths,
    )


def flashinfer(data: AttentionData) -> list[Launch]:
    """Run FlashInfer's paged wrappers on our own pages (its HND), planned once for all layers."""
    run = _flashinfer_plan(data)
    return [
        partial(run, layer.q, (_pages(data, layer.k), _pages(data, layer.v)), out=layer.out)
        for layer in data.layers
    ]


def flashinfer_fp8(data: AttentionData) -> list[Launch]:
    """Run it on fp8 pages: K with a static scale, V with 1, as another costs it a launch more."""
    run = _flashinfer_plan(data)

    def launch(layer: Layer) -> Launch:
        scales = _scales(layer)
        k_scale = scales.k_scale.max()
        k = _static_codes(layer.k, scales.k_scale, k_scale)
        v = _static_codes(layer.v, scales.v_scale, torch.ones_like(k_scale))
        cache = (_pages(data, k), _pages(data, v))
        return partial(run, layer.q, cache, out=layer.out, k_scale=float(k_scale))

    return [launch(layer) for layer in data.layers]


def _flashinfer_plan(data: AttentionData) -> Callable[..., Any]:
    # Not a dependency of mrv1, so there is nothing to check its types against.
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


def vllm_triton(data: AttentionData) -> list[Launch]:
    """Run vLLM's Triton kernel on its own cache: [blocks, tokens, heads, K then V]."""
    dim = data.case.head_dim

    def launch(layer: Layer) -> Launch:
        pages = [_pages(data, x).transpose(1, 2) for x in (layer.k, layer.v)]
        k, v = torch.cat(pages, dim=-1).split(dim, dim=-1)
        return _vllm_triton(data, layer, k, v)

    return [launch(layer) for layer in data.layers]


def vllm_triton_inline(data: AttentionData) -> list[Launch]:
    """Run it on our codes and scales as it stores them: K, its scale, V, its scale, packed."""
    dim = data.case.head_dim

    def launch(layer: Layer) -> Launch:
        parts = [
            part.view(torch.uint8)
            for codes, scale in zip((layer.k, layer.v), _scale_pages(data, layer), strict=True)
            for part in (_pages(data, codes).transpose(1, 2).contiguous(), scale[..., None])
        ]
        packed = torch.cat(parts, dim=-1)  # [blocks, tokens, heads, dim + 4 + dim + 4] bytes
        codes, scales = packed.view(torch.float8_e4m3fn), packed.view(torch.float32)
        k, v = codes[..., :dim], codes[..., dim + 4 : -4]
        return _vllm_triton(data, layer, k, v, scales[..., dim // 4], scales[..., -1])

    return [launch(layer) for layer in data.layers]


def vllm_triton_side(data: AttentionData) -> list[Launch]:
    """Run it on our codes in [blocks, tokens, heads] pages, their scales in tensors beside."""

    def launch(layer: Layer) -> Launch:
        k, v = (_pages(data, x).transpose(1, 2).contiguous() for x in (layer.k, layer.v))
        return _vllm_triton(data, layer, k, v, *_scale_pages(data, layer))

    return [launch(layer) for layer in data.layers]


def _vllm_triton(
    data: AttentionData, layer: Layer, k: torch.Tensor, v: torch.Tensor, *scales: torch.Tensor
) -> Launch:
    """Return its launch on ``k, v [blocks, tokens, heads, dim]``, any strides."""
    case, device = data.case, data.seq_lens.device
    attend, quant_modes = triton_attention()
    max_split_reqs = VLLM_SPLIT_PROGRAMS // case.num_kv_heads
    shape = (max_split_reqs, case.num_q_heads, VLLM_SEGMENTS)
    padded_dim = 1 << (case.head_dim - 1).bit_length()
    options = {"kv_quant_mode": quant_modes.NONE}
    if scales:
        options = {
            "kv_quant_mode": quant_modes.FP8_PER_TOKEN_HEAD,
            "k_scale_cache": scales[0],
            "v_scale_cache": scales[1],
        }
    return partial(
        attend,
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


def torch_sdpa(data: AttentionData) -> list[Launch]:
    """Run scaled_dot_product_attention on dense K and V; on a GPU its flash kernel or none.

    It allocates its result: the copy of that to ``out`` is timed with it.
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

    return [
        partial(attend, layer, dense(_pages(data, layer.k)), dense(_pages(data, layer.v)))
        for layer in data.layers
    ]


PEERS: Mapping[str, Peer] = {
    "flash-attn-3": Peer(
        module="vllm",
        on_auto=flash_attention_3,
        on_fp8=flash_attention_3_fp8,
        static_scale_error=0.25,  # q, K, V and the probabilities rounded to e4m3: H200 0.14
    ),
    "flashinfer": Peer(
        module="flashinfer",
        on_auto=flashinfer,
        on_fp8=flashinfer_fp8,
        static_scale_error=0.2,  # K and V rounded to e4m3 once more: H200 0.11
    ),
    "vllm-triton": Peer(module="vllm", on_auto=vllm_triton, on_fp8=vllm_triton_inline),
    "vllm-triton-side": Peer(module="vllm", on_fp8=vllm_triton_side),
    "torch-sdpa": Peer(module="torch", on_auto=torch_sdpa),
}
"""By name. A head's vector that misses a 16th of its keys is wrong by 0.25."""
PACKAGES = {"flashinfer": "flashinfer-python"}
"""Distribution of a module, where it is not the module's name."""


class _InModule(Protocol):
    @property
    def module(self) -> str: ...


def peer_versions(
    names: tuple[str, ...], peers: Mapping[str, _InModule] = PEERS
) -> dict[str, str]:
    """Return the version of each wanted peer's package, or ``"not installed"``.

    Raises:
        ConfigError: there is no such peer.
    """
    unknown = [name for name in names if name not in peers]
    if unknown:
        raise ConfigError(f"peers: expected some of {', '.join(peers)}, got {unknown}")

    def version(module: str) -> str:
        if find_spec(module) is None:
            return NOT_INSTALLED
        return version_of(PACKAGES.get(module, module)) or "unknown"

    return {name: version(peers[name].module) for name in names}


def _pages(data: AttentionData, buffer: torch.Tensor) -> torch.Tensor:
    """Return K or V of a uniform case as [blocks, kv_heads, block_size, head_dim]."""
    case = data.case
    return buffer.view(-1, case.num_kv_heads, case.block_size, case.head_dim)


def _scales(layer: Layer) -> KVScales:
    if layer.scales is None:
        raise RuntimeError("layer: expected scales of an fp8 cache, got none")
    return layer.scales


def _scale_pages(data: AttentionData, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V scales of a uniform case as contiguous [blocks, block_size, kv_heads]."""
    shape, scales = (-1, data.case.num_kv_heads, data.case.block_size), _scales(layer)
    k_scale, v_scale = (s.view(shape).transpose(1, 2) for s in (scales.k_scale, scales.v_scale))
    return k_scale.contiguous(), v_scale.contiguous()


def _static_codes(
    codes: torch.Tensor, scales: torch.Tensor, static_scale: torch.Tensor
) -> torch.Tensor:
    """Return flat codes for what ``codes`` with a scale each stand for, all with one scale."""
    vectors = codes.view(len(scales), -1)
    parts = zip(vectors.split(QUANTIZED_ROWS), scales.split(QUANTIZED_ROWS), strict=True)
    again = [quantize_e4m3(part.float(), static_scale / scale) for part, scale in parts]
    return torch.cat(again).view(codes.dtype).flatten()
