"""How tokens are routed to experts, and the checks of the experts' ops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from mrv1.kernels._base.checks import check_tensor
from mrv1.kernels.layers.contracts import Activation
from mrv1.kernels.layers.quantized import CODES, QuantizedWeight, inputs_problem
from mrv1.kernels.layers.sum_order import check_leaves

ExpertScores = Literal["softmax", "sigmoid"]
"""How an expert's score follows from its logit."""

MAX_EXPERTS = 1024
"""Most experts that are routed to: a program holds the scores of a token."""
MAX_TOP_K = 32
"""Most experts of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiGLU:
    """An activation: ``(up + 1) * gate * sigmoid(alpha * gate)``, ValueError: not above 0.

    The gate is at most ``limit`` before that, and up is from ``-limit`` to ``limit``.
    """

    alpha: float = 1.702
    """Factor of the gate in the sigmoid."""
    limit: float = 7.0
    """Largest gate and up."""

    def __post_init__(self) -> None:
        """Check that both are above 0."""
        for name in ("alpha", "limit"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected > 0, got {getattr(self, name)!r}")


ExpertActivation = Activation | ClampedSwiGLU
"""The activations that ``expert_linear`` takes: ``"silu_and_mul"``, or one with numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How experts are chosen for a token; ValueError: sizes that contradict each other.

    The experts with the largest ``score + bias`` are chosen, ties to the lowest id. Their scores
    are the weights.
    """

    num_experts: int
    """Experts to choose from."""
    top_k: int
    """Experts that are chosen for a token."""
    scores: ExpertScores = "softmax"
    """How a score follows from a logit: softmax over all experts, or the sigmoid of each."""
    num_groups: int = 1
    """Groups of neighbouring experts; divides ``num_experts``."""
    kept_groups: int = 1
    """Groups that experts are chosen from: those whose two best experts have the largest sum."""
    renormalizes: bool = False
    """Whether the weights are divided by their sum."""
    least_sum: float = 0.0
    """Least divisor of the weights, for scores that vanish."""
    scale: float = 1.0
    """Factor of all weights."""
    rounds_logits: bool = False
    """Whether a logit is rounded to the dtype of x, as a product in that dtype is."""
    num_shared: int = 0
    """Experts after the routed ones that every token has, with weight 1."""

    def __post_init__(self) -> None:
        """Check that the sizes fit together."""
        for name, least, most in (
            ("num_experts", 1, MAX_EXPERTS),
            ("num_groups", 1, self.num_experts),
            ("kept_groups", 1, self.num_groups),
            ("num_shared", 0, MAX_TOP_K),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name}: expected {least} to {most}, got {value}")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups: expected a divisor of {self.num_experts} experts, "
                f"got {self.num_groups}"
            )
        if self.num_groups > 1 and self.num_experts // self.num_groups < 2:
            raise ValueError(
                f"num_groups: expected groups of at least 2 of {self.num_experts} experts, "
                f"got {self.num_groups} groups"
            )
        most = min(MAX_TOP_K, self.num_experts // self.num_groups * self.kept_groups)
        if not 1 <= self.top_k <= most:
            raise ValueError(
                f"top_k: expected 1 to {most}, as many as the experts chosen from, "
                f"got {self.top_k}"
            )

    @property
    def num_chosen(self) -> int:
        """Experts of a token, the shared ones included."""
        return self.top_k + self.num_shared


def check_routing(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None,
    logits_bias: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
) -> None:
    """Raise unless the arguments are as ``route_experts`` says."""
    check_tensor("x", x, shape=(None, None), unit_last_stride=True)
    check = partial(check_tensor, device=x.device, contiguous=True)
    num_experts, num_in = routing.num_experts, x.shape[1]
    check("weight", weight, shape=(num_experts, num_in), dtype=(x.dtype, torch.float32))
    if bias is not None:
        check("bias", bias, dtype=torch.float32)
        if bias.numel() != num_experts:
            raise ValueError(f"bias: expected {num_experts} values, got {list(bias.shape)}")
    if logits_bias is not None:
        check("logits_bias", logits_bias, shape=(num_experts,), dtype=(x.dtype, torch.float32))
    if slot_mapping is not None:
        check("slot_mapping", slot_mapping, shape=(None, x.shape[0]), dtype=torch.int64)


def check_expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    topk_ids: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    *,
    activation: ExpertActivation | None,
    leaves: int | None = None,
    num_shared: int = 0,
) -> tuple[int, int]:
    """Raise unless the arguments are as ``expert_linear`` says; return pairs and columns."""
    is_gated = activation is not None
    if activation not in (None, "silu_and_mul") and not isinstance(activation, ClampedSwiGLU):
        raise ValueError(
            f"activation: expected None, 'silu_and_mul' or a ClampedSwiGLU, got {activation!r}"
        )
    check_tensor("x", x, shape=(None, None), unit_last_stride=True)
    check = partial(check_tensor, device=x.device)
    num_experts, num_out = _check_experts(x, weight, is_gated=is_gated)
    check("topk_ids", topk_ids, shape=(None, None), dtype=torch.int32, contiguous=True)
    num_tokens, num_chosen = topk_ids.shape
    num_pairs = topk_ids.numel()
    if x.shape[0] not in (num_tokens, num_pairs):
        raise ValueError(
            f"x: expected a row for each of {num_tokens} tokens, or for each of their "
            f"{num_chosen} experts, got {x.shape[0]} rows"
        )
    if leaves is not None and is_gated:
        raise ValueError(f"leaves: expected None with an activation, got {leaves}")
    if not 0 <= num_shared <= min(num_chosen, num_experts):
        raise ValueError(
            f"num_shared: expected 0 to {min(num_chosen, num_experts)}, got {num_shared}"
        )
    if leaves is not None and num_shared > 1:
        check("x", x, shape=(num_pairs, None), contiguous=True)
        if isinstance(weight, QuantizedWeight):
            raise ValueError(
                f"num_shared: expected at most 1 with leaves of codes, got {num_shared}"
            )
        if weight.stride(0) != weight.shape[2]:
            raise ValueError(
                f"weight: expected experts whose inputs are neighbours in a row, stride "
                f"{weight.shape[2]}, got {weight.stride(0)}"
            )
    if isinstance(weight, QuantizedWeight) and leaves is not None and leaves > 1:
        unit = 2 * CODES[weight.code].per_byte
        if -(-x.shape[1] // leaves) % unit:
            raise ValueError(
                f"leaves: expected leaves of a multiple of {unit} inputs, which share 16 bits, "
                f"got {leaves} of {x.shape[1]} inputs"
            )
    if bias is not None:
        shape = (num_experts, 2, num_out) if is_gated else (num_experts, num_out)
        check("bias", bias, shape=shape, dtype=x.dtype)
    if out is not None:
        of_leaves = () if leaves is None else (leaves,)
        dtype = x.dtype if leaves is None else torch.promote_types(x.dtype, torch.float32)
        check("out", out, shape=(*of_leaves, num_pairs, num_out), dtype=dtype, contiguous=True)
    return num_pairs, num_out


def _check_experts(
    x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, *, is_gated: bool
) -> tuple[int, int]:
    """Raise unless a weight is as ``expert_linear`` says; return experts and columns."""
    if isinstance(weight, torch.Tensor):
        expected = (None, 2, None, x.shape[1]) if is_gated else (None, None, x.shape[1])
        check_tensor("weight", weight, shape=expected, dtype=x.dtype, device=x.device,
                     unit_last_stride=True)  # fmt: skip
        if weight.numel() == 0:
            raise ValueError(f"weight: expected at least one expert, row and column, "
                             f"got {list(weight.shape)}")  # fmt: skip
        return weight.shape[0], weight.shape[-2]
    shape, num_halves = tuple(weight.shape), 2 if is_gated else 1
    if len(shape) != 3 or shape[2] != x.shape[1] or shape[1] % num_halves:
        rows = "2 * any" if is_gated else "any"
        raise ValueError(
            f"weight: expected codes of shape [any, {rows}, {x.shape[1]}], got {list(shape)}"
        )
    if weight.dtype != x.dtype:
        raise TypeError(f"weight: expected codes of {x.dtype} values, got {weight.dtype}")
    if weight.order is not None:
        raise ValueError("weight.order: expected None for experts, got an order")
    if weight.scales is not None and shape[1] % weight.rows_per_scale:
        raise ValueError(
            f"weight.rows_per_scale: expected a divisor of an expert's {shape[1]} rows, "
            f"got {weight.rows_per_scale}"
        )
    for name, tensor in weight.tensors.items():
        check_tensor(f"weight.{name}", tensor, device=x.device, contiguous=True)
    if (problem := inputs_problem(weight)) is not None:
        raise ValueError(f"weight: {problem}")
    return shape[0], shape[1] // num_halves


def check_combination(
    products: torch.Tensor,
    topk_weights: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    normed_out: torch.Tensor | None,
) -> tuple[int, int, torch.dtype]:
    """Raise unless the arguments are as ``combine_experts`` says.

    Return tokens and columns, and the dtype of the residual and the norm.
    """
    has_leaves, dtype = products.dim() == 3, products.dtype
    check_tensor("products", products, shape=(None, None, None)[1 - has_leaves :], contiguous=True)
    if has_leaves:
        check_leaves(len(products), deterministic=True)
        if dtype.itemsize < 4:
            raise TypeError(f"products: expected dtype torch.float32 of leaves, got {dtype}")
        given = (each for each in (residual, normed_out, out) if each is not None)
        dtype = next((each.dtype for each in given), dtype)
    num_cols = products.shape[-1]
    num_tokens, num_chosen = check_sum(
        topk_weights, num_cols, dtype, products.device, residual, out, norm_weight, normed_out
    )
    shape = (*products.shape[:-2], num_tokens * num_chosen, num_cols)
    check_tensor("products", products, shape=shape)
    return num_tokens, num_cols, dtype


def check_sum(
    topk_weights: torch.Tensor,
    num_cols: int,
    dtype: torch.dtype,
    device: torch.device,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    normed_out: torch.Tensor | None,
) -> tuple[int, int]:
    """Raise unless the arguments of a sum are as ``combine_experts`` says.

    Return tokens, and experts of each.
    """
    check = partial(check_tensor, device=device)
    check("topk_weights", topk_weights, shape=(None, None), dtype=torch.float32, contiguous=True)
    num_tokens, num_chosen = topk_weights.shape
    check = partial(check, dtype=dtype, unit_last_stride=True)
    for name, tensor in (("residual", residual), ("normed_out", normed_out)):
        if tensor is not None:
            check(name, tensor, shape=(num_tokens, num_cols))
    if out is not None:
        dtypes = (dtype, torch.promote_types(dtype, torch.float32))
        check("out", out, shape=(num_tokens, num_cols), dtype=dtypes)
    if (norm_weight is None) != (normed_out is None):
        alone = "normed_out" if norm_weight is None else "norm_weight"
        raise ValueError(f"norm_weight, normed_out: expected both or neither, got {alone}")
    if norm_weight is not None:
        check("norm_weight", norm_weight, shape=(num_cols,), contiguous=True)
    return num_tokens, num_chosen


def check_added_experts(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    deterministic: bool,
    leaves: int | None,
    num_shared: int,
) -> tuple[int, int]:
    """Raise unless the products are as ``add_experts`` says; return pairs and columns."""
    check_leaves(leaves, deterministic=deterministic)
    num_pairs, num_out = check_expert_linear(
        x, weight, topk_ids, bias, None, activation=None, leaves=leaves, num_shared=num_shared
    )
    check_tensor("x", x, shape=(num_pairs, None))
    check_tensor("topk_weights", topk_weights, shape=tuple(topk_ids.shape))
    return num_pairs, num_out
