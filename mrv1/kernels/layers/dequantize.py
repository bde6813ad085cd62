"""Values of a quantized weight: as products of many tokens take it, and rows of an embedding."""

from __future__ import annotations

import torch

from mrv1.kernels._base.checks import check_launchable, check_tensor
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.layers.quantized import QuantizedWeight, inputs_problem
from mrv1.kernels.layers.widening import (
    Matrix,
    codes_per_element,
    dense_values,
    matrix_arguments,
)

TILE_ROWS, TILE_ELEMENTS = 8, 256
"""Rows and 16-bit elements of codes that a program widens: an H100 moves 2.8 TB/s with them."""


@triton.jit(do_not_specialize=["num_out"])
def _widen_kernel(
    out_ptr,  # [num_out, IN], written
    codes_ptr,  # see Matrix
    scales_ptr, zeros_ptr, mins_ptr, heads_ptr, high_ptr, num_out,
    CODE: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles * element tiles,): a tile; inputs are in the order of the codes."""
    PER: tl.constexpr = 2 if (CODE == "e4m3") | (CODE == "int8") else 4
    ELEMENTS: tl.constexpr = IN // PER
    TILES: tl.constexpr = (ELEMENTS + TILE_ELEMENTS - 1) // TILE_ELEMENTS
    row = (tl.program_id(0) // TILES).to(tl.int64) * TILE_ROWS
    row += tl.arange(0, TILE_ROWS)[:, None]
    first = (tl.program_id(0) % TILES) * TILE_ELEMENTS
    element = first + tl.arange(0, TILE_ELEMENTS)[None, :]
    mask = (row < num_out) & (element < ELEMENTS)
    matrix = Matrix(codes_ptr, scales_ptr, zeros_ptr, mins_ptr, heads_ptr, high_ptr)
    codes = tl.load(codes_ptr + row * ELEMENTS + element, mask=mask, other=0)
    values = dense_values(
        matrix, codes, row, element, mask, CODE, out_ptr.dtype.element_ty, None,
        IN, GROUP, ROWS_PER_SCALE, False,
    )  # fmt: skip
    if PER == 2:
        tile = tl.join(values[0], values[1])
    else:
        tile = tl.join(tl.join(values[0], values[2]), tl.join(values[1], values[3]))
    tile = tl.reshape(tile, [TILE_ROWS, TILE_ELEMENTS * PER])
    col = first * PER + tl.arange(0, TILE_ELEMENTS * PER)[None, :]
    tl.store(out_ptr + row * IN + col, tile, mask=(row < num_out) & (col < IN))


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """Return the values of a quantized weight.

    Args:
        weight: ``[out, in]``, contiguous; in, and inputs per scale unless they are all, are
            multiples of the codes in 16 bits.

    Returns:
        ``[out, in]`` of the weight's dtype, newly allocated.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: the weight is not as described.

    Numerics: in float32, rounded once, as ``QuantizedWeight`` says. Tier A.
    Stream: current stream, no synchronisation, CUDA-graph safe.
    """
    check_multiplied(weight, weight.device)
    check_launchable("weight", weight.codes)
    values = widened(weight)
    if weight.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, weight.order.long(), values)


def check_multiplied(weight: QuantizedWeight, device: torch.device) -> None:
    """Raise unless kernels on ``device`` can read the weight."""
    if len(weight.shape) != 2:
        raise ValueError(f"weight: expected shape [any, any], got {list(weight.shape)}")
    for name, tensor in weight.tensors.items():
        check_tensor(f"weight.{name}", tensor, device=device, contiguous=True)
    if (problem := inputs_problem(weight)) is not None:
        raise ValueError(f"weight: {problem}")


def widened(weight: QuantizedWeight) -> torch.Tensor:
    """Return the values of a checked weight, inputs in the order of its codes."""
    num_out, num_in = weight.shape
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    tile_rows, tile_elements = TILE_ROWS, TILE_ELEMENTS
    per_element = codes_per_element(weight)
    if INTERPRET:
        tile_rows = min(1024, triton.next_power_of_2(num_out))
        tile_elements = min(1024, triton.next_power_of_2(num_in // per_element))
    tiles = triton.cdiv(num_out, tile_rows) * triton.cdiv(num_in // per_element, tile_elements)
    _widen_kernel[(tiles,)](
        out, *matrix_arguments(weight), num_out,
        CODE=weight.code, IN=num_in, GROUP=weight.group, ROWS_PER_SCALE=weight.rows_per_scale,
        TILE_ROWS=tile_rows, TILE_ELEMENTS=tile_elements,
    )  # fmt: skip
    return out
