"""Products with the weights of a decoder, however they are stored, and with their adapters."""

from __future__ import annotations

from typing import Any

import torch

from mrv1.kernels.layers.contracts import Activation
from mrv1.kernels.layers.lora import Adapters
from mrv1.kernels.layers.sum_order import undivided_leaves
from mrv1.kernels.registry import Ops
from mrv1.models.weights import Matrix, Weight


class Products:
    """Multiplies by weights with the ops of a device.

    ``deterministic`` is as in ``linear``; ``rank_invariant`` says that the bits of a row of
    weights must not follow from the number of rows, which ranks divide.
    """

    def __init__(self, ops: Ops, *, deterministic: bool, rank_invariant: bool) -> None:
        self._ops = ops
        self._deterministic = deterministic
        self._rank_invariant = rank_invariant

    def multiply(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        **fused: Any,  # noqa: ANN401 - arguments of linear
    ) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` and ``linear``'s extras, however weights are stored.

        Where ranks divide the inputs, the caller gives their ``leaves``.
        """
        if isinstance(weight.matrix, tuple):
            return self._multiply_parts(x, weight.matrix, bias, **fused)
        return self._ops.linear(x, weight.matrix, bias, **(self._options(x) | fused))

    def _options(self, x: torch.Tensor) -> dict[str, Any]:
        """Return the order of additions of a product whose inputs ranks do not divide."""
        leaves = undivided_leaves(x.shape[1]) if self._rank_invariant else None
        return {"deterministic": self._deterministic, "leaves": leaves}

    def _multiply_parts(
        self,
        x: torch.Tensor,
        matrices: tuple[Matrix, ...],
        bias: torch.Tensor | None,
        *,
        norm_weight: torch.Tensor | None,
        eps: float,
        activation: Activation | None,
        prefetch: torch.Tensor,
        adapters: Adapters | None,
    ) -> torch.Tensor:
        """Return what ``multiply`` does, one product for each of several matrices."""
        if norm_weight is not None:
            x = self._ops.rms_norm(x, norm_weight, eps)
        sizes = [matrix.shape[0] for matrix in matrices]
        out = x.new_empty((len(x), sum(sizes)))
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        for matrix, own, part in zip(matrices, out.split(sizes, dim=1), biases, strict=True):
            last = prefetch if matrix is matrices[-1] else None
            self._ops.linear(x, matrix, part, out=own, prefetch=last, **self._options(x))
        if adapters is not None:
            self._ops.add_adapters(out, self._ops.shrink_adapters(x, adapters), adapters)
        if activation is None:
            return out
        is_silu = activation == "silu_and_mul"
        return self._ops.silu_and_mul(out) if is_silu else self._ops.gelu_tanh_and_mul(out)
