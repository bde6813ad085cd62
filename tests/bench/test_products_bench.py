"""The benchmark of large products calls mrv1's tiles as the linear layer does."""

from __future__ import annotations

import torch

from benchmarks import products


def test_tiles_get_a_call_without_a_gate(monkeypatch):
    calls = []
    monkeypatch.setattr(products, "multiply_tiles", lambda call, config: calls.append(call))
    x, weight, out = torch.ones(2, 4), torch.ones(3, 4), torch.empty(2, 3)
    products.by_tiles(None, products.Buffers(x, weight, out))
    (call,) = calls
    assert (call.num_tokens, call.num_in, call.num_out) == (2, 4, 3)
    assert not call.is_gated
