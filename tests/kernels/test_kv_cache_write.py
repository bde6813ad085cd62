"""KV cache write: whole buffers, byte for byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from mrv1 import kernels
from mrv1.kernels import HeadRole, KVLayout, reference
from mrv1.kernels.cache.kv_cache_write import KVCacheWriteConfig
from mrv1.testing.strategies import (
    LayoutCase,
    RaggedBatch,
    build_paged_cache,
    kv_layouts,
    paged_caches,
)

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = kv_layouts(head_dims=(16, 64, 80), max_query_len=40)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _fused(case):
    """Return key and value as views of one fused qkv with a query head in front."""
    fused = torch.cat([case.key[:, :1], case.key, case.value], dim=1)
    heads = case.layout_case.num_kv_heads
    return fused[:, 1 : 1 + heads], fused[:, 1 + heads :]


def _check(case, ops=kernels):
    key, value = _fused(case)
    k_cache, v_cache = case.k_cache_before.clone(), case.v_cache_before.clone()
    ops.kv_cache_write(key, value, k_cache, v_cache, case.slot_mapping, case.layout)
    assert _same_bytes(k_cache, case.k_cache)
    assert _same_bytes(v_cache, case.v_cache)


# --- oracle ------------------------------------------------------------------------------------


@given(case=paged_caches(layouts=LAYOUTS, dtypes=DTYPES))
def test_the_whole_cache_is_written_byte_for_byte(device, case):
    _check(case.to(device))


@given(case=paged_caches(layouts=LAYOUTS, min_reqs=1))
def test_several_programs(device, case):
    with pytest.MonkeyPatch.context() as patch:
        small = KVCacheWriteConfig(tile_rows=8, num_warps=1)
        patch.setattr(KVCacheWriteConfig, "default_for", lambda *_, **__: small)
        _check(case.to(device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_sizes(device, head_dim, block_size, dtype):
    layout = LayoutCase.hnd(
        num_kv_heads=2, head_dim=head_dim, block_size=block_size, max_seq_len=2 * block_size
    )
    batch = RaggedBatch(query_lens=(3, 1), seq_lens=(block_size + 1, 2 * block_size))
    _check(build_paged_cache(layout, batch, dtype=dtype).to(device))


# --- edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])
def test_no_tokens_and_only_padding_write_nothing(device, ops):
    layout = KVLayout.hnd(2, 16, 16, device=device)
    k_cache, v_cache = (torch.full((512,), torch.nan, device=device) for _ in range(2))
    for num_tokens in (0, 5):
        key = torch.zeros(num_tokens, 2, 16, device=device)
        slots = torch.full((1, num_tokens), -1, device=device)
        ops.kv_cache_write(key, key, k_cache, v_cache, slots, layout)
    assert k_cache.isnan().all()
    assert v_cache.isnan().all()


def test_nan_and_infinity_are_copied_byte_for_byte(device):
    layout = KVLayout.hnd(1, 16, 16, device=device)
    key = torch.zeros(1, 1, 16, device=device)
    key[0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    k_cache, v_cache = (torch.zeros(256, device=device) for _ in range(2))
    slots = torch.full((1, 1), 3, device=device)
    kernels.kv_cache_write(key, -key, k_cache, v_cache, slots, layout)
    assert _same_bytes(k_cache[48:64], key.flatten())
    assert _same_bytes(v_cache[48:64], (-key).flatten())


def test_pages_beyond_two_to_the_31_elements(device):
    """Block 2 starts at element 2**31: the multiply by the stride must be 64 bits wide."""
    stride = 2**30
    cache = torch.empty(2 * stride + 256, dtype=torch.float16, device=device)  # 4 GiB, lazy
    cache[2 * stride :] = 0
    layout = KVLayout.build(
        block_size=16,
        head_dim=16,
        token_stride=16,
        head_base=[0],
        block_stride=[stride],
        roles=[HeadRole()],
        device=device,
    )
    key = torch.ones(1, 1, 16, dtype=torch.float16, device=device)
    slots = torch.full((1, 1), 2 * 16 + 15, device=device)
    kernels.kv_cache_write(key, key, cache, cache, slots, layout)
    want = torch.zeros(256, dtype=torch.float16, device=device)
    want[-16:] = 1
    assert torch.equal(cache[2 * stride :], want)


# --- errors ------------------------------------------------------------------------------------


WRONG = [
    ("key", lambda x: x.long(), TypeError, "key: expected dtype"),
    ("key", lambda x: x[:, :1], ValueError, r"key: expected shape \[any, 2, 16\], got \[5, 1, 16"),
    ("key", lambda x: x[..., :8], ValueError, r"key: expected shape \[any, 2, 16\]"),
    ("key", lambda x: x.mT.contiguous().mT, ValueError, "key: expected unit last stride"),
    ("value", lambda x: x.half(), TypeError, "value: expected dtype torch.float32"),
    ("value", lambda x: x[:1], ValueError, r"value: expected shape \[5, 2, 16\]"),
    ("value", lambda x: x.mT.contiguous().mT, ValueError, "value: expected unit last stride"),
    ("value", lambda x: x.to("meta"), ValueError, "value: expected device"),
    ("k_cache", lambda x: x.half(), TypeError, "k_cache: expected dtype torch.float32"),
    ("k_cache", lambda x: x[::2], ValueError, "k_cache: expected a contiguous tensor"),
    ("k_cache", lambda x: x.to("meta"), ValueError, "k_cache: expected device"),
    ("v_cache", lambda x: x.half(), TypeError, "v_cache: expected dtype torch.float32"),
    ("v_cache", lambda x: x[::2], ValueError, "v_cache: expected a contiguous tensor"),
    ("v_cache", lambda x: x[1:], ValueError, "v_cache: expected .* elements like k_cache, got"),
    ("slot_mapping", lambda x: x.int(), TypeError, "slot_mapping: expected dtype torch.int64"),
    ("slot_mapping", lambda x: x[0], ValueError, r"slot_mapping: expected shape \[1, 5\], got"),
    ("slot_mapping", lambda x: x[:, 1:], ValueError, r"slot_mapping: expected shape \[1, 5\]"),
    ("slot_mapping", lambda x: x.to("meta"), ValueError, "slot_mapping: expected device"),
    (
        "layout",
        lambda _: KVLayout.hnd(2, 16, 16, device="meta"),
        ValueError,
        "layout: expected device .*, got meta",
    ),
]


@pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])
@pytest.mark.parametrize(
    ("name", "change", "error", "message"), WRONG, ids=[f"{i}-{w[0]}" for i, w in enumerate(WRONG)]
)
def test_errors_name_the_argument_and_write_nothing(device, ops, name, change, error, message):
    k_cache, v_cache = (torch.full((1024,), torch.nan, device=device) for _ in range(2))
    arguments = {
        "key": torch.ones(5, 2, 16, device=device),
        "value": torch.ones(5, 2, 16, device=device),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": torch.arange(5, device=device)[None],
        "layout": KVLayout.hnd(2, 16, 16, device=device),
    }
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=message):
        ops.kv_cache_write(**arguments)
    assert k_cache.isnan().all()
    assert v_cache.isnan().all()


def test_a_head_dim_without_a_kernel_is_refused(device):
    key, cache = torch.zeros(1, 1, 24, device=device), torch.zeros(384, device=device)
    slots = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"layout\.head_dim: expected a multiple of 16 from 16"):
        kernels.kv_cache_write(
            key, key, cache, cache, slots, KVLayout.hnd(1, 16, 24, device=device)
        )
