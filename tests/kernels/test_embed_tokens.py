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


scales = st.sampled_from([None, 0.75, 55.5])


def scaled(embed: torch.Tensor, scale: float | None) -> torch.Tensor:
    return embed if scale is None else (embed.float() * scale).to(embed.dtype)


@given(
    num_tokens=st.sampled_from([0, 1, 2, 33]),
    vocab=st.sampled_from([1, 7, 300]),
    hidden_size=st.sampled_from([1, 48, 64, 200]),
    rotary_dim=st.sampled_from([2, 20, 128]),
    mrope=st.sampled_from([None, False, True]),
    scale=scales,
    dtype=st.sampled_from(DTYPES),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_embeddings_and_angles_equal_the_table_rows(
    device, num_tokens, vocab, hidden_size, rotary_dim, mrope, scale, dtype, as_on_gpu, seed
):
    generator = torch.Generator().manual_seed(seed)
    ids, positions = (torch.randint(vocab, (num_tokens,), generator=generator) for _ in range(2))
    embed = normal((vocab, hidden_size), dtype, "cpu", seed)
    embed[0, 0] = torch.nan
    cos_sin = normal((vocab, rotary_dim), torch.float32, "cpu", seed + 1)
    options, angles = {"scale": scale}, cos_sin[positions]
    if mrope is not None:
        quarter = rotary_dim // 8
        section = (rotary_dim // 2 - 2 * quarter, quarter, quarter)
        options |= {"mrope_section": section, "mrope_interleaved": mrope}
        positions = torch.randint(vocab, (3, num_tokens), generator=generator)
        axes = _axes(section, interleaved=mrope) * 2  # of cosines, then of sines
        for column, axis in enumerate(axes):
            angles[:, column] = cos_sin[positions[axis], column]
    arguments = (ids, embed, positions, cos_sin)
    with tiles("embed_tokens", as_on_gpu=as_on_gpu):
        got = kernels.embed_tokens(*(argument.to(device) for argument in arguments), **options)
    for result, want in (
        (got, (scaled(embed, scale)[ids], angles)),
        (got, reference.embed_tokens(*arguments, **options)),
    ):
        for a, b in zip(result, want, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=0, equal_nan=True)


def _axes(section: tuple[int, int, int], *, interleaved: bool) -> list[int]:
    """Follow transformers: Qwen2-VL splits the pairs, Qwen3-VL overwrites every third of them."""
    if not interleaved:
        return [axis for axis, size in enumerate(section) for _ in range(size)]
    axes = [0] * sum(section)
    for axis in (1, 2):
        for pair in range(axis, min(3 * section[axis], len(axes)), 3):
            axes[pair] = axis
    return axes


@given(
    sources=st.lists(st.integers(-1, 4), max_size=33),
    scale=scales,
    scales_features=st.booleans(),
    num_more=st.integers(0, 3),
    is_read=st.booleans(),
    hidden_size=st.sampled_from([1, 48, 200]),
    dtype=st.sampled_from(DTYPES),
    as_on_gpu=st.booleans(),
)
def test_features_replace_the_embeddings_of_their_tokens(
    device, sources, scale, scales_features, num_more, is_read, hidden_size, dtype, as_on_gpu
):
    """A plain loop over tokens: a source, none (-1), and tokens after the last source."""
    num_tokens = len(sources) + num_more
    ids = torch.arange(num_tokens) % 7
    embed, rows = (normal((size, hidden_size), dtype, "cpu", size) for size in (7, 5))
    cos_sin = normal((7, 2), torch.float32, "cpu", 0)
    source = torch.tensor([*sources, *[99] * 3], dtype=torch.int32)  # past the count: not read
    count = torch.tensor([len(sources) if is_read else 0], dtype=torch.int32)
    want = [
        scaled(rows, scale if scales_features else None)[sources[token]]
        if is_read and token < len(sources) and sources[token] >= 0
        else scaled(embed, scale)[ids[token]]
        for token in range(num_tokens)
    ]
    for ops, where in ((kernels, device), (reference, torch.device("cpu"))):
        features = kernels.FeatureRows(rows.to(where), source.to(where), count.to(where))
        arguments = [argument.to(where) for argument in (ids, embed, ids, cos_sin)]
        with tiles("embed_tokens", as_on_gpu=as_on_gpu):
            hidden, angles = ops.embed_tokens(
                *arguments, features=features, scale=scale, scales_features=scales_features
            )
        assert [row.tolist() for row in hidden.cpu()] == [row.tolist() for row in want]
        assert torch.equal(angles.cpu(), cos_sin[ids])


@given(
    num_tokens=st.sampled_from([1, 2, 33]),
    num_ranks=st.integers(1, 4),
    num_features=st.integers(0, 3),
    scale=scales,
    dtype=st.sampled_from(DTYPES),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_parts_of_the_vocabulary_add_up_to_the_embeddings(
    device, num_tokens, num_ranks, num_features, scale, dtype, as_on_gpu, seed
):
    """Bit by bit, zeros' signs included; features come from the rank that has the token's id."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = 5
    ids = torch.randint(num_rows * num_ranks, (num_tokens,), generator=generator)
    embed = normal((num_rows * num_ranks, 48), dtype, "cpu", seed)
    embed[:, 0], embed[:, 1] = 0.0, -0.0
    rows, cos_sin = normal((3, 48), dtype, "cpu", seed + 1), normal((1, 2), torch.float32, "cpu")
    source = torch.arange(num_features, dtype=torch.int32)
    count = torch.tensor([num_features], dtype=torch.int32)
    want = scaled(embed, scale)[ids]
    want[:num_features] = rows[: min(num_features, num_tokens)]
    for ops, where in ((kernels, device), (reference, torch.device("cpu"))):
        features = kernels.FeatureRows(rows.to(where), source.to(where), count.to(where))
        total = torch.full_like(want, -0.0)
        for rank, part in enumerate(embed.split(num_rows)):
            arguments = [each.to(where) for each in (ids, part, torch.zeros_like(ids), cos_sin)]
            with tiles("embed_tokens", as_on_gpu=as_on_gpu):
                hidden, _ = ops.embed_tokens(
                    *arguments, features=features, first_id=rank * num_rows, scale=scale
                )
            total += hidden.cpu()
        word = torch.int16 if dtype.itemsize == 2 else torch.int32
        assert torch.equal(total.view(word), want.view(word))


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
        (
            {"mrope_section": (1, 1, 0)},
            ValueError,
            r"positions: expected shape \[3, 3\], got \[3\]",
        ),
        (
            {"mrope_section": (1, 1, 1), "positions": IDS.repeat(3, 1)},
            ValueError,
            r"mrope_section: expected three sizes >= 0 with sum 2, got \(1, 1, 1\)",
        ),
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    arguments = {"input_ids": IDS, "embed": TABLE, "positions": IDS, "cos_sin": TABLE} | change
    on_device = {
        name: torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=device
        ).copy_(value)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }
    with pytest.raises(error, match=message):
        kernels.embed_tokens(**on_device)


ROWS, ONE = torch.zeros(2, 4), torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ((ROWS[:, :3].clone(), ONE, ONE), ValueError, r"features\.rows: expected 4 columns fr"),
        ((ROWS.half(), ONE, ONE), TypeError, r"features\.rows: expected dtype torch\.float32"),
        ((ROWS, ONE.long(), ONE), TypeError, r"features\.source: expected dtype torch\.int32"),
        ((ROWS, ONE, ONE[0]), ValueError, r"features\.num_sources: expected shape \[1\]"),
    ],
)
def test_wrong_features_are_named(device, fields, error, message):
    features = kernels.FeatureRows(*(field.to(device) for field in fields))
    ids, table = IDS.to(device), TABLE.to(device)
    for ops in (kernels, reference):
        with pytest.raises(error, match=message):
            ops.embed_tokens(ids, table, ids, table, features=features)
