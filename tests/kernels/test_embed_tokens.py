"""Embedding rows and angles of tokens, against indexing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from tests.kernels.elementwise import DTYPES, normal, seeds, tiles

pytestmark = [pytest.mark.interp, pytest.mark.gpu]


@given(
    num_tokens=st.sampled_from([0, 1, 2, 33]),
    vocab=st.sampled_from([1, 7, 300]),
    hidden_size=st.sampled_from([1, 48, 64, 200]),
    rotary_dim=st.sampled_from([2, 20, 128]),
    dtype=st.sampled_from(DTYPES),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_embeddings_and_angles_equal_the_table_rows(
    device, num_tokens, vocab, hidden_size, rotary_dim, dtype, as_on_gpu, seed
):
    generator = torch.Generator().manual_seed(seed)
    ids, positions = (torch.randint(vocab, (num_tokens,), generator=generator) for _ in range(2))
    embed = normal((vocab, hidden_size), dtype, "cpu", seed)
    embed[0, 0] = torch.nan
    cos_sin = normal((vocab, rotary_dim), torch.float32, "cpu", seed + 1)
    arguments = (ids, embed, positions, cos_sin)
    with tiles("embed_tokens", as_on_gpu=as_on_gpu):
        got = kernels.embed_tokens(*(argument.to(device) for argument in arguments))
    for result, want in (
        (got, (embed[ids], cos_sin[positions])),
        (got, reference.embed_tokens(*arguments)),
    ):
        for a, b in zip(result, want, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=0, equal_nan=True)


IDS = torch.zeros(3, dtype=torch.int64)
TABLE = torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_ids": IDS.int()}, TypeError, r"input_ids: expected dtype torch\.int64"),
        (
            {"input_ids": IDS[:0, None]},
            ValueError,
            r"input_ids: expected shape \[any\], got \[0, 1\]",
        ),
        ({"input_ids": IDS[0]}, ValueError, r"input_ids: expected shape \[any\], got \[\]"),
        ({"positions": IDS[:2]}, ValueError, r"positions: expected shape \[3\], got \[2\]"),
        ({"embed": TABLE.long()}, TypeError, r"embed: expected dtype torch\.float16 or"),
        ({"embed": TABLE.T}, ValueError, r"embed: expected a contiguous tensor"),
        ({"cos_sin": TABLE.half()}, TypeError, r"cos_sin: expected dtype torch\.float32"),
        ({"cos_sin": TABLE[0]}, ValueError, r"cos_sin: expected shape \[any, any\], got \[4\]"),
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    arguments = {"input_ids": IDS, "embed": TABLE, "positions": IDS, "cos_sin": TABLE} | change
    on_device = {
        name: torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=device
        ).copy_(value)
        for name, value in arguments.items()
    }
    with pytest.raises(error, match=message):
        kernels.embed_tokens(**on_device)
