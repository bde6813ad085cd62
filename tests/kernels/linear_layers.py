"""Shared by the tests of the linear layer: arguments, library calls and error budgets."""

from __future__ import annotations

import importlib
from contextlib import contextmanager

import pytest
import torch

from mrv1.kernels import reference
from tests.kernels.elementwise import in_a_wider_row, normal

module = importlib.import_module("mrv1.kernels.layers.linear")

EPS = 1e-6
FEATURES = (
    (),
    ("bias",),
    ("norm",),
    ("residual",),
    ("gated",),
    ("norm", "gated"),
    ("bias", "norm", "gated", "residual"),
    ("bias", "norm", "wide", "gated", "gelu", "residual"),
    ("normed",),
    ("bias", "residual", "normed"),
    ("norm", "gated", "normed"),
)


def linear_arguments(num_tokens, num_in, num_out, dtype, device, features=(), seed=0):
    """Return all arguments of a call except ``out``; the call's results are of order one.

    With the feature "normed", the call fills ``normed_out``.
    """
    num_rows = num_out * (2 if "gated" in features else 1)
    weight = normal((num_rows, num_in), torch.float64, "cpu", seed + 1) * num_in**-0.5
    arguments = {
        "x": in_a_wider_row(normal((num_tokens, num_in), dtype, device, seed), 8, 16),
        "weight": weight.to(dtype).to(device),
    }
    if "bias" in features:
        arguments["bias"] = normal((num_rows,), dtype, device, seed + 2)
    if "norm" in features:
        kind = torch.float32 if "wide" in features and dtype.itemsize == 2 else dtype
        arguments["norm_weight"] = normal((num_in,), kind, device, seed + 3)
        arguments["eps"] = EPS
    if "residual" in features:
        residual = normal((num_tokens, num_out), dtype, device, seed + 4)
        arguments["residual"] = in_a_wider_row(residual, 16, 8)
    if "gated" in features:
        arguments["activation"] = "gelu_tanh_and_mul" if "gelu" in features else "silu_and_mul"
    if "normed" in features:
        arguments["out_norm_weight"] = normal((num_out,), dtype, device, seed + 5)
        normed_out = torch.zeros(num_tokens, num_out, dtype=dtype, device=device)
        arguments["normed_out"] = in_a_wider_row(normed_out, 8, 4)
        arguments["eps"] = EPS
    return arguments


def gelu_exponent(x):
    """Return u of gelu by tanh, ``0.5 x (1 + tanh(u))``."""
    return (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)


def of_rows(arguments, rows):
    """Return the arguments of a call of some tokens only, with its own ``normed_out``."""
    some = {k: v[rows] if k in ("x", "residual") else v for k, v in arguments.items()}
    if "normed_out" in some:
        some["normed_out"] = torch.zeros_like(some["normed_out"][rows])
    return some


def of_rank(arguments, rank, num_ranks):
    """Return the arguments of a rank that has some of the inputs, without what follows the sum."""
    columns = arguments["x"].shape[1] // num_ranks
    own = slice(rank * columns, (rank + 1) * columns)
    return {"x": arguments["x"][:, own], "weight": arguments["weight"][:, own].contiguous()}


def sum_of_ranks(parts):
    """Return the sum of float32 parts, a power of two, as a tree: neighbours first."""
    while len(parts) > 1:
        parts = [even + odd for even, odd in zip(parts[0::2], parts[1::2], strict=True)]
    return parts[0]


@contextmanager
def library_calls():
    """Yield a list that gets an entry for every call that the GPU vendor's library computes."""
    calls = []
    multiply = module._multiply_by_library
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            module, "_multiply_by_library", lambda call: (calls.append(call), multiply(call))
        )
        yield calls


def assert_linear_in_budget(
    got,
    x,
    weight,
    bias=None,
    norm_weight=None,
    eps=EPS,
    residual=None,
    activation=None,
    out_norm_weight=None,
    normed_out=None,
    *,
    by_library=False,
    spread=0,
):
    """Fail unless ``got`` errs by no more than its roundings explain.

    The float32 sum of a product errs by a unit in the last place per step of 16 inputs.
    Intermediate values that are rounded to the dtype (a normed x that fell on the other side of a
    rounding; the library's gate and up) err like independent errors of the terms. The activation
    and one rounding of the result follow. The library may also round a product before it adds bias
    and residual, and round the parts of a sum (torch's allow_*_reduced_precision_reduction).
    ``spread`` is how far products of other weights may be from those of ``weight``.
    """
    small, tiny = torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps
    spread = torch.as_tensor(spread, dtype=torch.float64, device=x.device)
    if norm_weight is not None:
        x = reference.rms_norm(x, norm_weight, eps)
    if norm_weight is not None or by_library:
        spread = spread + 4 * small * (x.double().square() @ weight.double().square().T).sqrt()
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ weight.double().abs().T + exact.abs()
    budget = (8 + x.shape[1] / 16) * tiny * magnitude + spread
    if by_library and not (bias is None and residual is None):
        budget += small * (exact if bias is None else exact - bias.double()).abs()
    if activation is not None:
        gate, up = exact.chunk(2, dim=-1)
        gate_budget, up_budget = (budget + small * exact.abs()).chunk(2, dim=-1)
        exponent = gate if activation == "silu_and_mul" else 2 * gelu_exponent(gate)
        activated = gate / (1 + torch.exp(-exponent))
        exact = activated * up
        budget = 1.13 * gate_budget * (up.abs() + up_budget) + activated.abs() * up_budget
        budget += (4 + exponent.abs()) * tiny * exact.abs()
    if residual is not None:
        exact = exact + residual.double()
    budget += torch.finfo(got.dtype).eps * exact.abs() + 2 * tiny
    assert torch.equal(got.isfinite(), exact.isfinite())
    excess = ((got.double() - exact).abs() - budget)[exact.isfinite()]
    assert excess.numel() == 0 or excess.max() <= 0, f"{excess.max():.3e} over budget"
    if normed_out is not None:
        _assert_norm_in_budget(normed_out, got, out_norm_weight, eps)


def _assert_norm_in_budget(normed, out, weight, eps):
    """Fail unless ``normed`` is the norm of ``out``, to two roundings and the error of a sum."""
    small, tiny = torch.finfo(out.dtype).eps, torch.finfo(torch.float32).eps
    wide, weight = out.double(), weight.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    budget = (small * (1 + small) + (8 + out.shape[1] / 16) * tiny) * exact.abs()
    budget += small * torch.finfo(out.dtype).smallest_normal * (1 + weight.abs())
    assert torch.equal(normed.isnan(), exact.isnan())
    excess = ((normed.double() - exact).abs() - budget)[exact.isfinite()]
    assert excess.numel() == 0 or excess.max() <= 0, f"norm {excess.max():.3e} over budget"
