"""Page formats: their scales, codes and paths; a format that no other file knows works."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from mrv1.config import KVCacheDtypeName
from mrv1.device import Conversion
from mrv1.kernels import KVLayout, KVScales, PageFormat, reference
from mrv1.kernels.cache.formats import FORMATS, FP8

BLOCK_SIZE, DIM, HEADS = 16, 32, 2

INT8 = PageFormat(
    name="int8",
    dtype=torch.int8,
    granularity="token",
    largest=127.0,
    to_codes=lambda x: x.nan_to_num(0.0).round().to(torch.int8).view(torch.uint8),
    to_values=lambda codes, dtype: codes.view(torch.int8).to(dtype),
    choose_path=lambda _: Conversion(path="hardware", reason="every GPU converts int8"),
)
"""As docs/adding.md describes a format: the oracles need no more than this object."""
STEPS = {"fp8_e4m3": 32, "int8": 1}
"""Between the two largest codes."""


def test_the_configuration_names_every_format():
    assert get_args(KVCacheDtypeName) == ("auto", *FORMATS)


def test_auto_stores_the_models_values_as_they_are():
    plain = PageFormat.named("auto", "token", torch.bfloat16)
    assert plain == PageFormat.plain(torch.bfloat16)
    assert (plain.name, plain.dtype, plain.granularity) == ("bfloat16", torch.bfloat16, None)
    assert (plain.has_scales, plain.scales_per_block(32), plain.vector_bytes(64)) == (
        False,
        0,
        128,
    )
    assert plain.conversion(torch.device("cpu")) is plain.codec(torch.device("cpu")) is None


def test_a_name_and_a_granularity_give_a_format():
    for granularity, per_block in (("token", 32), ("quarter", 4), ("head", 0)):
        found = PageFormat.named(FP8.name, granularity, torch.bfloat16)
        assert found == FP8.per(granularity)
        assert (found.has_scales, found.vector_bytes(64)) == (True, 64)
        assert found.scales_per_block(32) == per_block
    with pytest.raises(ValueError, match=r"name: expected 'auto' or one of .*'int4'\), got 'fp8'"):
        PageFormat.named("fp8", "token", torch.bfloat16)


def test_products_of_float32_queries_are_chosen_as_without_codes():
    assert FP8.product_dtype(torch.bfloat16) == torch.float8_e4m3fn
    assert FP8.product_dtype(torch.float32) == torch.float32


SIGNED = [each for each in (*FORMATS.values(), INT8) if each.codes_per_element == 1]
"""Formats of codes around 0; ``test_int4_cache`` has those with a zero of each vector's."""


@pytest.mark.parametrize("page_format", SIGNED, ids=lambda each: each.name)
def test_codes_are_within_half_a_step_and_saturate(page_format: PageFormat):
    x = torch.randn(64, 80, generator=torch.Generator().manual_seed(0)) * 3
    scale = page_format.scale(x)
    torch.testing.assert_close(scale, x.abs().amax(-1) / page_format.largest)
    codes = page_format.encode(x, scale)
    assert codes.dtype == torch.uint8
    values = page_format.decode(codes, scale, torch.float64)
    step = STEPS[page_format.name]
    assert ((values - x).abs() <= scale[:, None] * step / 2 * (1 + 1e-6)).all()
    far = page_format.encode(10 * x, scale)
    assert page_format.decode(far, scale, torch.float64).abs().max() == values.abs().max()
    assert page_format.scale(torch.zeros(1, 4)) == torch.tensor([1e-12])


def test_a_new_format_is_written_and_attended_to_by_the_oracles():
    """Nothing but the object is new: layout, writes, copies and attention ask it."""
    generator = torch.Generator().manual_seed(1)
    num_tokens, num_blocks = 21, 3
    key, value = torch.randn(2, num_tokens, HEADS, DIM, generator=generator)
    q = torch.randn(1, 4, DIM, generator=generator)
    layout = KVLayout.hnd(HEADS, BLOCK_SIZE, DIM)
    slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + num_tokens)[None]
    outs = []
    for page_format in (PageFormat.plain(torch.float32), INT8):
        shape = num_blocks + 1, HEADS, BLOCK_SIZE
        k_cache, v_cache = torch.zeros(2, *shape, DIM, dtype=page_format.dtype)
        scales = None
        if page_format.has_scales:
            scales = KVScales.per_token(*torch.full((2, *shape), torch.nan), page_format)
            is_known = page_format.dtype in {each.dtype for each in FORMATS.values()}
            message = "scales: expected KVScales" if is_known else "k_cache: expected dtype"
            with pytest.raises(TypeError, match=message):
                reference.kv_cache_write(key, value, k_cache, v_cache, slots, layout)
        reference.kv_cache_write(key, value, k_cache, v_cache, slots, layout, scales=scales)
        ids = torch.tensor([[2], [3]])
        reference.copy_pages(k_cache, v_cache, *ids, layout, scales=scales)
        outs.append(
            reference.paged_decode_attention(
                q,
                k_cache,
                v_cache,
                torch.tensor([[1, 3]], dtype=torch.int32),
                torch.tensor([num_tokens], dtype=torch.int32),
                layout,
                softmax_scale=DIM**-0.5,
                scales=scales,
            )
        )
    torch.testing.assert_close(outs[1], outs[0], rtol=0.02, atol=0.02)
    assert not torch.equal(*outs)
