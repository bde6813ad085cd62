"""The linear layer, with the norm before it and the activation and the residual behind it."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.elementwise import (
    in_a_wider_row,
    normal,
)

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

EPS = 1e-6
TOKENS = (1, 2, 15, 16, 17, 33, 64, 65)
FEATURES = {
    "plain": {},
    "bias": {"bias"},
    "norm": {"norm"},
    "residual": {"residual"},
    "gated": {"gated"},
    "norm and gated": {"norm", "gated"},
    "everything": {"bias", "norm", "gated", "residual"},
}


def _arguments(num_tokens, num_in, num_out, dtype, device, features=(), seed=0):
    """Return the arguments of a call whose results are of order one, all but ``out``."""
    num_rows = num_out * (2 if "gated" in features else 1)
    weight = normal((num_rows, num_in), torch.float64, "cpu", seed + 1) * num_in**-0.5
    arguments = {
        "x": in_a_wider_row(normal((num_tokens, num_in), dtype, device, seed), 8, 16),
        "weight": weight.to(dtype).to(device),
        "eps": EPS,
    }
    if "bias" in features:
        arguments["bias"] = normal((num_rows,), dtype, device, seed + 2)
    if "norm" in features:
        arguments["norm_weight"] = normal((num_in,), dtype, device, seed + 3)
    if "residual" in features:
        residual = normal((num_tokens, num_out), dtype, device, seed + 4)
        arguments["residual"] = in_a_wider_row(residual, 16, 8)
    if "gated" in features:
        arguments["activation"] = "silu_and_mul"
    return arguments
