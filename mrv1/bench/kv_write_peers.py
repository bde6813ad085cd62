"""Other KV cache writes on the same data: one adapter each, imported only when it is asked for.

An adapter takes the data of a size and returns a launch per buffer set, all of which write into
one cache in the peer's own layout, and what says how many elements of that cache are wrong. What
a peer prepares once (indices in its own form) is done before, and not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from mrv1.bench.kv_write_data import BYTE_DTYPE, WriteData, wrong_elements
from mrv1.bench.timing import Launch
from mrv1.integrations.vllm_cache_write import triton_cache_writes
from mrv1.kernels.cache.kv_scales import LARGEST_E4M3

CountWrong = Callable[[], int]
Adapter = Callable[[WriteData], tuple[list[Launch], CountWrong]]

LARGEST_ERROR = 16.5 / LARGEST_E4M3
"""Of an element over its vector's largest: half of e4m3's last step, 32, and rounding before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePeer:
    """Somebody else's write."""

    module: str
    """What must be importable."""
    on_auto: Adapter | None = None
    """Writes a cache of qkv's dtype."""
    on_fp8: Adapter | None = None
    """Writes codes with a scale per (token, head)."""


def flashinfer(data: WriteData) -> tuple[list[Launch], CountWrong]:
    """Run FlashInfer's append on our own pages (its HND), as one request that owns them all."""
    # Not a dependency of mrv1, so there is nothing to check its types against.
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

    sets = zip(data.keys, data.values, data.slots, strict=True)
    return [launch(*each) for each in sets], partial(wrong_elements, data)


def vllm_triton(data: WriteData) -> tuple[list[Launch], CountWrong]:
    """Run vLLM's Triton write on its own cache: [blocks, tokens, heads, K then V]."""
    write, _, _ = triton_cache_writes()
    blocks, heads, size, dim = data.k_cache.shape
    packed = data.k_cache.new_full((blocks, size, heads, 2 * dim), torch.nan)
    k_cache, v_cache = packed.split(dim, dim=-1)
    one = torch.ones(1, device=packed.device)

    def launch(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> Launch:
        return partial(write, key, value, k_cache, v_cache, slots[0], "auto", one, one)

    def count_wrong() -> int:
        bits = packed.view(BYTE_DTYPE[packed.dtype.itemsize])
        expected = torch.full_like(packed, torch.nan).view(bits.dtype)
        for key, value, slots in zip(data.keys, data.values, data.slots, strict=True):
            rows = torch.cat([key, value], dim=-1)
            expected[slots[0] // size, slots[0] % size] = rows.view(bits.dtype)
        return int((bits != expected).sum())

    sets = zip(data.keys, data.values, data.slots, strict=True)
    return [launch(*each) for each in sets], count_wrong


def vllm_triton_inline(data: WriteData) -> tuple[list[Launch], CountWrong]:
    """Run its quantising write on its own cache: K, its scale, V, its scale, packed."""
    blocks, heads, size, dim = data.k_cache.shape
    shape = (blocks, size, heads, 2 * (dim + 4))  # bytes
    packed = torch.zeros(shape, dtype=torch.uint8, device=data.k_cache.device)
    codes, scales = packed.view(torch.float8_e4m3fn), packed.view(torch.float32)
    caches = codes[..., :dim], codes[..., dim + 4 : -4]
    return _vllm_quantized(data, caches, (scales[..., dim // 4], scales[..., -1]))


def vllm_triton_side(data: WriteData) -> tuple[list[Launch], CountWrong]:
    """Run the same kernel on [blocks, tokens, heads] pages, the scales in tensors beside."""
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
) -> tuple[list[Launch], CountWrong]:
    """Return its launches, and how many elements are not within e4m3's rounding.

    It multiplies by an inverse and bounds scales by 1e-6: its codes are not ours bit for bit.
    """
    _, write, quant_modes = triton_cache_writes()
    mode = quant_modes.FP8_PER_TOKEN_HEAD

    def launch(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> Launch:
        return partial(write, key, value, *caches, *scales, slots[0], mode)

    def count_wrong() -> int:
        wrong = 0
        for inputs, codes, scale in zip((data.keys, data.values), caches, scales, strict=True):
            for rows, slots in zip(inputs, data.slots, strict=True):
                at = slots[0] // data.case.block_size, slots[0] % data.case.block_size
                stored = codes[at].float() * scale[at][..., None]
                bound = rows.float().abs().amax(-1, keepdim=True) * LARGEST_ERROR
                within = (stored - rows.float()).abs() <= bound  # so that NaN is wrong
                wrong += int((~within).sum())
        return wrong

    sets = zip(data.keys, data.values, data.slots, strict=True)
    return [launch(*each) for each in sets], count_wrong


WRITE_PEERS: Mapping[str, WritePeer] = {
    "flashinfer": WritePeer(module="flashinfer", on_auto=flashinfer),
    "vllm-triton": WritePeer(module="vllm", on_auto=vllm_triton, on_fp8=vllm_triton_inline),
    "vllm-triton-side": WritePeer(module="vllm", on_fp8=vllm_triton_side),
}
"""By name."""
