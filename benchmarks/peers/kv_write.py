"""Other KV cache writes.

An adapter takes the data of a size and returns two functions: one makes the launch on a buffer
set, the other counts wrong elements. All launches write one cache in the peer's own layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks.kernels.kv_write_data import BYTE_DTYPE, WriteData, wrong_elements
from benchmarks.measure.timing import Launch
from benchmarks.peers import Peer
from mrv1.kernels.cache.formats import FP8

SetLaunch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Launch]
"""Makes a launch on keys, values and slots."""
CountWrong = Callable[[], int]
Adapter = Callable[[WriteData], tuple[SetLaunch, CountWrong]]

LARGEST_ERROR = 16.5 / FP8.largest
"""Largest error of an element, relative to its vector's largest element: half of e4m3's last
step, 32, plus earlier rounding."""


def flashinfer(data: WriteData) -> tuple[SetLaunch, CountWrong]:
    """Run FlashInfer's append on our own pages (its HND), as one request that owns them all."""
    from flashinfer import append_paged_kv_cache  # type: ignore[import-not-found]

    device, num_blocks = data.k_cache.device, data.k_cache.shape[0]

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def launch(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> Launch:
        return partial(
            append_paged_kv_cache,
            key,
            value,
            torch.zeros(data.case.num_tokens, dtype=torch.int32, device=device),
            slots[0].to(torch.int32),  # a position in that request is a slot
            (data.k_cache, data.v_cache),
            torch.arange(num_blocks, dtype=torch.int32, device=device),
            int32(0, num_blocks),
            int32(data.case.block_size),
            kv_layout="HND",
        )

    return launch, partial(wrong_elements, data)


def vllm_triton(data: WriteData) -> tuple[SetLaunch, CountWrong]:
    """Run vLLM's Triton write on its own cache: [blocks, tokens, heads, K then V]."""
    if data.case.has_scales:
        return _vllm_triton_inline(data)
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
        triton_reshape_and_cache_flash,
    )

    blocks, heads, size, dim = data.k_cache.shape
    packed = data.k_cache.new_full((blocks, size, heads, 2 * dim), torch.nan)
    k_cache, v_cache = packed.split(dim, dim=-1)
    one = torch.ones(1, device=packed.device)

    def launch(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> Launch:
        return partial(
            triton_reshape_and_cache_flash,
            key, value, k_cache, v_cache, slots[0], "auto", one, one,
        )  # fmt: skip

    def count_wrong() -> int:
        bits = packed.view(BYTE_DTYPE[packed.dtype.itemsize])
        expected = torch.full_like(packed, torch.nan).view(bits.dtype)
        for key, value, slots in data.sets:
            rows = torch.cat([key, value], dim=-1)
            expected[slots[0] // size, slots[0] % size] = rows.view(bits.dtype)
        return int((bits != expected).sum())

    return launch, count_wrong


def _vllm_triton_inline(data: WriteData) -> tuple[SetLaunch, CountWrong]:
    """Run vLLM's quantising write on its own cache: K, K's scale, V, V's scale, packed."""
    blocks, heads, size, dim = data.k_cache.shape
    shape = (blocks, size, heads, 2 * (dim + 4))  # bytes
    packed = torch.zeros(shape, dtype=torch.uint8, device=data.k_cache.device)
    codes, scales = packed.view(torch.float8_e4m3fn), packed.view(torch.float32)
    caches = codes[..., :dim], codes[..., dim + 4 : -4]
    return _vllm_quantized(data, caches, (scales[..., dim // 4], scales[..., -1]))


def vllm_triton_side(data: WriteData) -> tuple[SetLaunch, CountWrong]:
    """Run the same kernel on [blocks, tokens, heads] pages, with scales in separate tensors."""
    blocks, heads, size, dim = data.k_cache.shape
    device = data.k_cache.device
    codes = torch.zeros((2, blocks, size, heads, dim), dtype=torch.uint8, device=device)
    k_cache, v_cache = codes.view(torch.float8_e4m3fn)
    k_scale, v_scale = torch.zeros((2, blocks, size, heads), device=device)
    return _vllm_quantized(data, (k_cache, v_cache), (k_scale, v_scale))


def _vllm_quantized(
    data: WriteData,
    caches: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor],
) -> tuple[SetLaunch, CountWrong]:
    """Return a maker of vLLM's launches, and a counter of elements off by more than rounding.

    vLLM multiplies by an inverse and bounds scales by 1e-6: its codes are not ours bit for bit.
    """
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
        triton_reshape_and_cache_flash_per_token_head_quant as write,
    )
    from vllm.v1.kv_cache_interface import KVQuantMode

    mode = KVQuantMode.FP8_PER_TOKEN_HEAD

    def launch(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> Launch:
        return partial(write, key, value, *caches, *scales, slots[0], mode)

    def count_wrong() -> int:
        wrong = 0
        for inputs, codes, scale in zip((data.keys, data.values), caches, scales, strict=True):
            for rows, slots in zip(inputs, data.slots, strict=True):
                at = slots[0] // data.case.block_size, slots[0] % data.case.block_size
                stored = codes[at].float() * scale[at][..., None]
                bound = rows.float().abs().amax(-1, keepdim=True) * LARGEST_ERROR
                within = (stored - rows.float()).abs() <= bound  # false for NaN
                wrong += int((~within).sum())
        return wrong

    return launch, count_wrong


WRITE_PEERS: Mapping[str, Peer[Adapter]] = {
    "flashinfer": Peer(module="flashinfer", adapter=flashinfer),
    "vllm-triton": Peer(module="vllm", adapter=vllm_triton, kv_dtypes=("auto", "fp8_e4m3")),
    "vllm-triton-side": Peer(module="vllm", adapter=vllm_triton_side, kv_dtypes=("fp8_e4m3",)),
}
"""Name -> peer."""
