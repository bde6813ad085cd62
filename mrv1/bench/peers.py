"""Other attention kernels on the same data: one adapter each, imported only when it is asked for.

An adapter takes the data of a cell, in which all heads see everything, and returns one launch per
layer that writes the layer's ``out``. What a peer prepares once (a plan, a cache in its own
layout) is done before, and not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from mrv1.bench.attention_data import AttentionData, Layer
from mrv1.bench.provenance import version_of
from mrv1.bench.timing import Launch
from mrv1.errors import ConfigError
from mrv1.integrations.vllm_flash_attention import flash_attention

Adapter = Callable[[AttentionData], list[Launch]]

NOT_INSTALLED = "not installed"
FLASHINFER_WORKSPACE_BYTES = 512 << 20


def flash_attention_3(data: AttentionData) -> list[Launch]:
    """Run vLLM's FlashAttention-3, paged, on caches in its own [blocks, tokens, heads] layout."""
    attend, case = flash_attention(), data.case

    def launch(layer: Layer) -> Launch:
        return partial(
            attend,
            q=layer.q,
            k=_pages(data, layer.k).transpose(1, 2).contiguous(),
            v=_pages(data, layer.v).transpose(1, 2).contiguous(),
            out=layer.out,
            cu_seqlens_q=data.query_start_loc,
            max_seqlen_q=case.query_len,
            seqused_k=data.seq_lens,
            max_seqlen_k=case.cell.context,
            block_table=data.block_table,
            softmax_scale=data.softmax_scale,
            causal=True,
            fa_version=3,
        )

    return [launch(layer) for layer in data.layers]


def flashinfer(data: AttentionData) -> list[Launch]:
    """Run FlashInfer's paged wrappers on our own pages (its HND), planned once for all layers."""
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
    types = {"q_data_type": case.dtype, "kv_data_type": case.dtype, "sm_scale": data.softmax_scale}
    if case.query_len == 1:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*pages, *sizes, **types)
    else:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(data.query_start_loc, *pages, *sizes, causal=True, **types)

    def launch(layer: Layer) -> Launch:
        cache = (_pages(data, layer.k), _pages(data, layer.v))
        return partial(wrapper.run, layer.q, cache, out=layer.out)

    return [launch(layer) for layer in data.layers]


def torch_sdpa(data: AttentionData) -> list[Launch]:
    """Run scaled_dot_product_attention on dense K and V; on a GPU its flash kernel or none.

    It allocates its result: the copy of that to ``out`` is timed with it.
    """
    case = data.case
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


PEERS: Mapping[str, tuple[str, Adapter]] = {
    "flash-attn-3": ("vllm", flash_attention_3),
    "flashinfer": ("flashinfer", flashinfer),
    "torch-sdpa": ("torch", torch_sdpa),
}
"""Module to be importable, and the adapter, by name."""
PACKAGES = {"flashinfer": "flashinfer-python"}
"""Distribution of a module, where it is not the module's name."""


def peer_versions(names: tuple[str, ...]) -> dict[str, str]:
    """Return the version of each wanted peer's package, or ``"not installed"``.

    Raises:
        ConfigError: there is no such peer.
    """
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ConfigError(f"peers: expected some of {', '.join(PEERS)}, got {unknown}")

    def version(module: str) -> str:
        if find_spec(module) is None:
            return NOT_INSTALLED
        return version_of(PACKAGES.get(module, module)) or "unknown"

    return {name: version(PEERS[name][0]) for name in names}


def _pages(data: AttentionData, buffer: torch.Tensor) -> torch.Tensor:
    """Return K or V of a uniform case as [blocks, kv_heads, block_size, head_dim]."""
    case = data.case
    return buffer.view(-1, case.num_kv_heads, case.block_size, case.head_dim)
