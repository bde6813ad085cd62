"""The linear layer at the sizes of models, which take the interpreter too long."""

from __future__ import annotations

import pytest
import torch

from mrv1 import kernels
from tests.kernels.linear_layers import FEATURES, assert_linear_in_budget, linear_arguments

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_only]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("size", [(1024, 4096), (2048, 1024), (3072, 1024), (4096, 1536)])
def test_deterministic_at_the_sizes_of_models(device, size, features):
    arguments = linear_arguments(257, *size, torch.bfloat16, device, features)
    many = kernels.linear(**arguments, deterministic=True)
    assert_linear_in_budget(many, **arguments)
    for num_tokens in (1, 2, 15, 16, 17, 32, 33, 64, 65, 128, 255, 256):
        few = {k: v[:num_tokens] if k in ("x", "residual") else v for k, v in arguments.items()}
        assert torch.equal(kernels.linear(**few, deterministic=True), many[:num_tokens])
        assert_linear_in_budget(kernels.linear(**few), **few)
