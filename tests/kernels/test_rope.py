"""Rotary embedding in place on views of a fused projection, both pair orders."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.layers.rope import RopeConfig
from tests.kernels.elementwise import DTYPES, assert_in_budget, normal, seeds, tiles

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

MAX_POSITIONS = 64


def _table(rotary_dim: int, device, max_positions: int = MAX_POSITIONS) -> torch.Tensor:
    frequency = 10_000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float().to(device)


def _rotated(x, cos_sin, positions, interleaved):
    """Rotate by complex multiplication: another way than the kernel's and the oracle's."""
    half = cos_sin.shape[1] // 2
    angle = torch.complex(*cos_sin[positions][:, None].split(half, dim=-1))
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        pairs = rotary.unflatten(-1, (half, 2))
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle).flatten(-2)
    else:
        turned = torch.complex(rotary[..., :half], rotary[..., half:]) * angle
        turned = torch.cat([turned.real, turned.imag], dim=-1)
    return torch.cat([turned, rest], dim=-1)


def _exact(x, cos_sin, positions, interleaved):
    return _rotated(x.double(), cos_sin.double(), positions, interleaved)


def _torch(x, cos_sin, positions, interleaved):
    """Compute in x's own dtype, as transformers does."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin.to(x.dtype)[positions][:, None].split(half, dim=-1)
    out = x.clone()
    a, b = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(0, half), slice(half, 2 * half))
    )
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., b] * cos + x[..., a] * sin
    return out


# --- oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_oracle_equals_the_formula(interleaved):
    q, k = normal((2, 3, 6), torch.float64, "cpu"), normal((2, 1, 6), torch.float64, "cpu", 1)
    cos_sin, positions = _table(4, "cpu"), torch.tensor([5, 9])
    wanted = []
    for x in (q, k):
        want = x.clone()
        for token, position in enumerate(positions.tolist()):
            for head in range(x.shape[1]):
                for i in range(2):
                    cos, sin = cos_sin[position, i].item(), cos_sin[position, 2 + i].item()
                    first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 2)
                    a, b = x[token, head, first].item(), x[token, head, second].item()
                    want[token, head, first] = a * cos - b * sin
                    want[token, head, second] = b * cos + a * sin
        wanted.append(want)
    reference.apply_rope(q, k, cos_sin, positions, interleaved=interleaved)
    torch.testing.assert_close(q, wanted[0])
    torch.testing.assert_close(k, wanted[1])


# --- properties --------------------------------------------------------------------------------


@given(
    num_tokens=st.sampled_from([1, 2, 19]),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (8, 1), (5, 3)]),
    dims=st.sampled_from([(16, 16), (64, 64), (80, 80), (96, 40), (128, 2)]),
    dtype=st.sampled_from(DTYPES),
    interleaved=st.booleans(),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_apply_rope_is_as_exact_as_torch(
    device, num_tokens, heads, dims, dtype, interleaved, as_on_gpu, seed
):
    (num_q_heads, num_kv_heads), (head_dim, rotary_dim) = heads, dims
    num_heads = num_q_heads + 2 * num_kv_heads
    qkv = normal((num_tokens, num_heads, head_dim), dtype, device, seed)
    before = qkv.clone()
    q, k, v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    cos_sin = _table(rotary_dim, device)
    positions = torch.randint(
        MAX_POSITIONS, (num_tokens,), generator=torch.Generator().manual_seed(seed)
    ).to(device)
    with tiles("apply_rope", as_on_gpu=as_on_gpu):
        kernels.apply_rope(q, k, cos_sin, positions, interleaved=interleaved)
    rotated, original = qkv[:, :-num_kv_heads], before[:, :-num_kv_heads]
    arguments = (original, cos_sin, positions, interleaved)
    assert_in_budget(rotated, _torch(*arguments), _exact(*arguments))
    assert torch.equal(v, before[:, -num_kv_heads:])
    assert torch.equal(rotated[..., rotary_dim:], original[..., rotary_dim:])


@given(
    num_tokens=st.sampled_from([2, 9, 83]),
    dims=st.sampled_from([(8, 8), (80, 80), (96, 40)]),
    dtype=st.sampled_from(DTYPES),
    interleaved=st.booleans(),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_a_token_has_the_same_bits_alone_and_in_a_batch(
    device, num_tokens, dims, dtype, interleaved, as_on_gpu, seed
):
    head_dim, rotary_dim = dims
    q = normal((num_tokens, 3, head_dim), dtype, device, seed)
    k = normal((num_tokens, 1, head_dim), dtype, device, seed + 1)
    cos_sin = _table(rotary_dim, device)
    positions = torch.arange(num_tokens, device=device) % MAX_POSITIONS

    def rotated(tokens):
        turned = q[tokens].clone(), k[tokens].clone()
        kernels.apply_rope(*turned, cos_sin, positions[tokens], interleaved=interleaved)
        return torch.cat(turned, dim=1)

    with tiles("apply_rope", as_on_gpu=as_on_gpu):
        want = rotated(slice(None))
        for token in {0, num_tokens // 2, num_tokens - 1}:
            alone = slice(token, token + 1)
            assert torch.equal(rotated(alone), want[alone])


@given(interleaved=st.booleans(), shift=st.integers(0, 30), seed=seeds)
def test_scores_depend_on_the_distance_alone(device, interleaved, shift, seed):
    q, k = normal((1, 1, 64), torch.float32, device, seed), normal((1, 1, 64), DTYPES[0], device)
    scores = []
    for start in (0, shift):
        turned = torch.cat([q, k])
        positions = torch.tensor([start + 20, start + 3], device=device)
        kernels.apply_rope(
            turned, turned.clone(), _table(64, device), positions, interleaved=interleaved
        )
        scores.append((turned[0] * turned[1]).sum())
    torch.testing.assert_close(scores[0], scores[1], atol=2e-5, rtol=0)


# --- edges -------------------------------------------------------------------------------------


def test_position_zero_is_the_identity(device):
    q, k = normal((3, 2, 64), torch.bfloat16, device), normal((3, 1, 64), torch.bfloat16, device)
    before = q.clone(), k.clone()
    kernels.apply_rope(q, k, _table(64, device), torch.zeros(3, dtype=torch.int64, device=device))
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_the_last_position_of_the_table(device):
    q, k = normal((1, 1, 16), torch.float32, device), normal((1, 1, 16), torch.float32, device)
    want = _exact(q, _table(16, device), torch.tensor([MAX_POSITIONS - 1]), False)
    last = torch.tensor([MAX_POSITIONS - 1], device=device)
    kernels.apply_rope(q, k, _table(16, device), last)
    torch.testing.assert_close(q.double(), want, atol=1e-6, rtol=0)


def test_no_tokens(device):
    q, k = torch.ones(0, 2, 16, device=device), torch.ones(0, 1, 16, device=device)
    positions = torch.zeros(0, dtype=torch.int64, device=device)
    kernels.apply_rope(q, k, _table(16, device), positions)


@pytest.mark.parametrize(("heads", "rotary_dim"), [(1, 2), (16, 128), (64, 128), (128, 256)])
def test_configurations_cover_the_token(heads, rotary_dim):
    assert RopeConfig.default_for(heads, rotary_dim).num_warps in (1, 2, 4, 8, 16)
    cpu = RopeConfig.for_interpreter(10_000, heads, rotary_dim)
    assert cpu.tile_tokens * heads * rotary_dim // 2 <= 2**18
    assert math.log2(cpu.tile_tokens).is_integer()


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"q": torch.ones(2, 8)},
            ValueError,
            r"q: expected shape \[any, any, any\], got \[2, 8\]",
        ),
        ({"q": torch.ones(2, 4, 8).double()}, TypeError, r"q: expected dtype .*float64"),
        ({"q": torch.ones(2, 8, 4).mT}, ValueError, r"q: expected unit last stride"),
        ({"q": torch.ones(2, 0, 8)}, ValueError, r"q, k: expected at least one head, got 0 and 1"),
        ({"k": torch.ones(3, 1, 8)}, ValueError, r"k: expected shape \[2, any, 8\], got \[3"),
        ({"k": torch.ones(2, 1, 8).half()}, TypeError, r"k: expected dtype torch\.float32"),
        (
            {"cos_sin": torch.ones(9, 8).half()},
            TypeError,
            r"cos_sin: expected dtype torch\.float32",
        ),
        (
            {"cos_sin": torch.ones(9, 10)},
            ValueError,
            r"cos_sin: expected an even rotary_dim in \[2, 8\] as its last size, got 10",
        ),
        ({"cos_sin": torch.ones(9, 3)}, ValueError, r"cos_sin: expected an even .*, got 3"),
        ({"cos_sin": torch.ones(8, 9).T}, ValueError, r"cos_sin: expected a contiguous tensor"),
        ({"positions": torch.ones(2).int()}, TypeError, r"positions: expected dtype torch\.int64"),
        ({"positions": torch.ones(3).long()}, ValueError, r"positions: expected shape \[2\]"),
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    arguments = {
        "q": torch.ones(2, 4, 8),
        "k": torch.ones(2, 1, 8),
        "cos_sin": torch.ones(9, 8),
        "positions": torch.zeros(2, dtype=torch.int64),
    }
    arguments = {name: value.to(device) for name, value in (arguments | change).items()}
    with pytest.raises(error, match=message):
        kernels.apply_rope(**arguments)
