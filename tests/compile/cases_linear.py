"""Launches of the linear layer that are compiled ahead of time: dtypes, fusions, model shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv1.kernels._base.triton import triton
from mrv1.kernels.layers.linear import (
    ONE_ROUNDING,
    PRODUCTS_FROM_SHARED_MEMORY,
    WARP_GROUP_CAPABILITY,
)
from mrv1.kernels.layers.linear_registers import RegisterConfig, _linear_registers_kernel
from mrv1.kernels.layers.linear_splits import TILE_OUT, _add_splits_kernel, sum_warps
from mrv1.kernels.layers.linear_tiles import TileConfig, _linear_tile_kernel
from mrv1.kernels.layers.linear_vector import VectorConfig, _linear_vector_kernel
from mrv1.kernels.layers.sum_order import MOST_LEAVES, SumOrder, undivided_leaves
from mrv1.testing.aot import AotCase, Target, pointer

PARKED_BYTES = {"sm_80": 16, "sm_100": 8}
"""Bytes of four and two registers that the compiler parks outside loops: where all weights are
loaded early, or in the activation."""
IN_ORDER_PARKED_BYTES = PARKED_BYTES | {"sm_100": 16}
"""The same where leaves are added in a tree."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Layer:
    """The shape of a layer's weights, and the operations fused with the product."""

    num_in: int
    num_out: int
    fused: tuple[str, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    @property
    def gate(self) -> int:
        return 2 if "gelu" in self.fused else 1 if "gated" in self.fused else 0

    @property
    def num_rows(self) -> int:
        return self.num_out * (2 if "gated" in self.fused else 1)

    def name(self, kernel: str, num_tokens: int) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"{num_tokens}x{self.num_in}x{self.num_out}"
        return "-".join((kernel, dtype, shape, *self.fused))

    def if_fused(self, name: str) -> torch.Tensor | None:
        is_wide = name == "norm" and "wide" in self.fused
        dtype = torch.float32 if is_wide else self.dtype
        return pointer(dtype) if name in self.fused else None


QKV = Layer(1024, 4096, ("norm",))
O_PROJ = Layer(2048, 1024, ("residual",))
GATE_UP = Layer(1024, 3072, ("norm", "gated"))
DOWN = Layer(3072, 1024, ("residual",))
VOCABULARY = Layer(1024, 151_936)
LARGE = (
    Layer(4096, 6144, ("norm",)),
    Layer(4096, 14336, ("norm", "gated")),
    Layer(14336, 4096, ("residual",)),
    Layer(2048, 4096),  # one of two ranks
)
RANKS = (
    *(Layer(4096 // size, 4096, ("partial",)) for size in (2, 4, 8)),
    *(Layer(14336 // size, 4096, ("partial",)) for size in (2, 4, 8)),
    Layer(4096, 768),
    Layer(1024, 1024),
)
"""Products of ranks; a partial one has a float32 result and some of the leaves."""
GROUPS = (
    (Layer(1024, 4096, ("bias",)), 1, None),
    (Layer(1024, 3072, ("gated", "bias")), 1, None),
    (Layer(4096, 6144, dtype=torch.float16), 1, 4),
    (Layer(4096, 6144), 2, 4),
    (Layer(4096, 14336, ("gated",)), 1, 4),
    (Layer(4096, 4096, ("residual",)), 4, 8),
    (Layer(14336, 4096, ("residual",)), 2, 8),
    (Layer(7168, 4096, ("partial",)), 1, 4),
    (Layer(1792, 4096, ("partial",)), 1, 1),
    *((O_PROJ, splits, None) for splits in (1, 2, 4)),
    *((DOWN, splits, None) for splits in (1, 3)),
)
"""Layers of many tokens on Hopper, in so many splits of so many leaves; None = as many as suit."""
GELU = Layer(1024, 3072, ("norm", "wide", "gated", "gelu"))
LARGE_GELU = Layer(3584, 14_336, ("norm", "wide", "gated", "gelu"))
EVERYTHING = tuple(Layer(100, 48, ("norm", "bias", "gated", "residual"), d) for d in DTYPES)


def cases(target: Target) -> list[AotCase]:
    layers = (QKV, O_PROJ, GATE_UP, DOWN, *LARGE, *EVERYTHING)
    return [
        *(_vector(target, layer) for layer in layers),
        *(_tile(target, layer, tokens) for layer in layers for tokens in (16, 32, 64, 256)),
        *(_vector(target, layer) for layer in (GELU, LARGE_GELU)),
        *(_tile(target, GELU, tokens) for tokens in (16, 256)),
        *_registers(target, GELU, 16),
        *_in_order(target, VOCABULARY, 256),
        *(
            case
            for layer in layers
            for tokens in (16, 32, 64)
            for case in _registers(target, layer, tokens)
        ),
        *(
            case
            for layer in (*layers, *RANKS)
            for tokens in (16, 32, 256)
            for case in _in_order(target, layer, tokens)
        ),
        *(_groups(*case) for case in GROUPS if target.capability == WARP_GROUP_CAPABILITY),
        *(_add_splits(target, num_out) for num_out in (None, 1024, 4096, 8192)),
    ]


def _vector(target: Target, layer: Layer) -> AotCase:
    norm = layer.if_fused("norm")
    config = VectorConfig.default_for(
        layer.num_in, layer.dtype, norm_dtype=None if norm is None else norm.dtype
    )
    data = pointer(layer.dtype)
    num_chunks = triton.cdiv(layer.num_in, config.tile_in)
    return AotCase(
        name=layer.name("linear_vector", 1),
        kernel=_linear_vector_kernel,
        args=(
            *(data, layer.if_fused("residual"), data, data),
            *(layer.if_fused("bias"), norm, 1e-6, layer.num_out),
        ),
        constexprs={
            "IN": layer.num_in,
            "GATED": layer.gate,
            "TILE_ROWS": config.tile_rows,
            "TILE_IN": config.tile_in,
            "EARLY_CHUNKS": min(config.early_chunks, num_chunks),
            "LATE_CHUNKS": config.late_chunks,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
        parked_bytes=PARKED_BYTES.get(target.name, 0),
    )


def _in_order(target: Target, layer: Layer, num_tokens: int) -> list[AotCase]:
    """Return the deterministic cases: bits of any number of ranks, and of this one."""
    is_gated = "gated" in layer.fused
    leaves = undivided_leaves(layer.num_in)
    if "residual" in layer.fused and not is_gated:
        leaves = MOST_LEAVES
    if "partial" in layer.fused:
        leaves = MOST_LEAVES * layer.num_in // (4096 if 4096 % layer.num_in == 0 else 14336)
    orders = dict.fromkeys(
        SumOrder.of(layer.num_in, layer.num_rows, each, is_gated=is_gated)
        for each in (leaves, None)
    )
    return [case for order in orders for case in _of_order(target, layer, num_tokens, order)]


def _of_order(target: Target, layer: Layer, num_tokens: int, order: SumOrder) -> list[AotCase]:
    is_gated = "gated" in layer.fused
    if layer.dtype.itemsize == 2 and target.capability in ONE_ROUNDING:
        registers = RegisterConfig.in_order_for(
            num_tokens, layer.num_in, layer.num_rows, order, is_gated=is_gated
        )
        if registers is not None:
            return _registers(target, layer, num_tokens, registers, order)
    tiles = TileConfig.in_order_for(
        num_tokens,
        layer.num_rows,
        order,
        layer.dtype,
        is_gated=is_gated,
        from_shared_memory=target.capability in PRODUCTS_FROM_SHARED_MEMORY,
    )
    return [_tile(target, layer, num_tokens, tiles, order)]


def _tile(
    target: Target,
    layer: Layer,
    num_tokens: int,
    config: TileConfig | None = None,
    order: SumOrder | None = None,
) -> AotCase:
    config = config or TileConfig.default_for(
        num_tokens,
        layer.num_in,
        layer.num_rows,
        layer.dtype,
        is_gated="gated" in layer.fused,
        is_normed="residual" in layer.fused,
        from_shared_memory=target.capability in PRODUCTS_FROM_SHARED_MEMORY,
    )
    data = pointer(layer.dtype)
    sums = pointer(torch.float32) if config.splits > 1 else None
    if order is not None:
        parts, part_in = order.leaves // config.splits, order.leaf_in
    else:
        steps = triton.cdiv(layer.num_in, config.tile_in * config.splits)
        parts, part_in = 1, steps * config.tile_in
    out = pointer(torch.float32) if "partial" in layer.fused else data
    return AotCase(
        name=layer.name("linear_leaves" if order else "linear_tile", num_tokens) + _form(order),
        kernel=_linear_tile_kernel,
        args=(
            *(out, layer.num_out, sums, layer.if_fused("residual"), layer.num_out),
            *(data, layer.num_in, data, layer.if_fused("bias"), 33, layer.num_out),
        ),
        constexprs={
            "IN": layer.num_in,
            "GATED": layer.gate,
            "TILE_TOKENS": config.tile_tokens,
            "TILE_ROWS": config.tile_rows,
            "TILE_IN": config.tile_in,
            "SPLITS": config.splits,
            "PARTS": parts,
            "PART_IN": part_in,
            "EARLY_STEPS": min(config.early_steps, triton.cdiv(part_in, config.tile_in)),
            "NUM_STAGES": config.num_stages,
            "NEXT_AT_ONCE": config.next_starts_at_once,
            "CHAIN_STEPS": config.chain_steps,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
        parked_bytes=(IN_ORDER_PARKED_BYTES if order else PARKED_BYTES).get(target.name, 0),
    )


def _form(order: SumOrder | None) -> str:
    """Return what tells the two orders of a layer apart in names."""
    return "" if order is None else f"-{order.leaves}x{order.chains}"


def _groups(layer: Layer, splits: int, leaves: int | None) -> AotCase:
    """Return a case of warp groups, which only sm_90 has."""
    from mrv1.kernels.layers import linear_groups

    is_gated = "gated" in layer.fused
    order = SumOrder.of(layer.num_in, layer.num_rows, leaves, is_gated=is_gated)
    data, num_steps = pointer(layer.dtype), order.chain_in // linear_groups.STEP_IN.value
    x = torch.empty(256, layer.num_in, dtype=layer.dtype)
    weight = torch.empty(layer.num_rows, layer.num_in, dtype=layer.dtype)
    return AotCase(
        name=layer.name("linear_groups", 256) + _form(order) + f"-{splits}-splits",
        kernel=linear_groups._linear_groups_kernel,
        args=(
            *(pointer(torch.float32) if "partial" in layer.fused else data, layer.num_out),
            *(pointer(torch.float32) if splits > 1 else None, layer.if_fused("residual")),
            *(layer.num_out, layer.if_fused("bias")),
            *linear_groups.describe(x, weight, is_gated=is_gated),
            *(256, layer.num_out, 100, 2),
        ),
        constexprs={
            "SPLITS": splits,
            "LEAVES": order.leaves // splits,
            "CHAINS": order.chains,
            "CHAIN_STEPS": num_steps,
            "OVERLAP": True,
        },
        num_warps=4,
    )


def _registers(
    target: Target,
    layer: Layer,
    num_tokens: int,
    config: RegisterConfig | None = None,
    order: SumOrder | None = None,
) -> list[AotCase]:
    """Return the case, or no case where the weights do not fit registers."""
    config = config or RegisterConfig.default_for(
        num_tokens,
        layer.num_in,
        layer.num_rows,
        is_gated="gated" in layer.fused,
        is_normed="residual" in layer.fused,
    )
    if config is None or layer.dtype.itemsize != 2 or target.backend != "cuda":
        return []
    data = pointer(layer.dtype)
    prefetches = target.has_dependent_launch and config.splits == 1
    case = AotCase(
        name=layer.name("linear_in_order" if order else "linear_registers", num_tokens)
        + _form(order),
        kernel=_linear_registers_kernel,
        args=(
            *(data, layer.num_out, pointer(torch.float32) if config.splits > 1 else None),
            *(layer.if_fused("residual"), layer.num_out, data, layer.num_in, data),
            *(
                layer.if_fused("bias"),
                pointer(torch.int8) if prefetches else None,
                1 << 20,
                1024,
                33,
                layer.num_out,
            ),
        ),
        constexprs={
            "IN": layer.num_in,
            "GATED": layer.gate,
            "TILE_TOKENS": config.tile_tokens,
            "TOKEN_TILES": config.token_tiles,
            "TILE_ROWS": config.tile_rows,
            "ROW_TILES": config.row_tiles,
            "SPLITS": config.splits,
            "WARPS": config.num_warps,
            "NEXT_START": config.next_start,
            "CHAIN_IN": config.chain_in,
            "IN_TREE": config.in_tree,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
        parked_bytes=PARKED_BYTES.get(target.name, 0),
    )
    return [case]


def _add_splits(target: Target, num_normed: int | None) -> AotCase:
    data, sums = pointer(torch.bfloat16), pointer(torch.float32)
    norm = None if num_normed is None else data
    num_out = num_normed or 1024
    tile_out = num_normed or TILE_OUT
    return AotCase(
        name=f"linear_add_splits-{num_normed}",
        kernel=_add_splits_kernel,
        args=(
            *(data, num_out, norm, num_out, sums, data, num_out),
            *(data, norm, 1e-6, 33, num_out),
        ),
        constexprs={
            "SPLITS": 4,
            "TILE_OUT": tile_out,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=sum_warps(tile_out),
    )
