"""The second product of adapters (LoRA), added to a result: ``out += B @ shrunk``.

``linear`` adds the same values itself where its own kernel writes the result. This launch is for
the other ones: products of the vendor's library, of codes, of experts, and split sums.
"""

from __future__ import annotations

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.layers.lora import Adapters
from mrv1.kernels.layers.lora_values import adapter_values, lora_arguments

SPLITS = (1, 2, 4, 8, 16)
"""Into how many parts ``shrink_adapters`` may cut its inputs."""

NUM_WARPS = 4


def tile_for(num_tokens: int, num_rows: int) -> tuple[int, int]:
    """Return the tokens and the rows of one program; for a GPU they are not measured yet."""
    if not INTERPRET:
        return 8, 64
    return min(32, triton.next_power_of_2(num_tokens)), min(1024, triton.next_power_of_2(num_rows))


@triton.jit(do_not_specialize=["num_tokens"])
def _add_adapters_kernel(
    out_ptr, stride_out_token,  # [num_tokens, rows], unit last stride
    lora,  # LoraPointers
    num_tokens,
    LORA: tl.constexpr,  # LoraConstants
    TILE_TOKENS: tl.constexpr, TILE_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (row tiles, token tiles)."""
    let_next_start(OVERLAP)
    token = tl.program_id(1).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)[:, None]
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)[None, :]
    is_token, is_row = token < num_tokens, row < LORA.ROWS
    wait_for_previous(OVERLAP)
    added = adapter_values(lora, token, is_token, row, LORA)
    slot = tl.load(lora.slots_ptr + token, mask=is_token, other=-1)
    inside = is_token & is_row & (slot >= 0)  # another token's result stays as it is
    out_ptr += token * stride_out_token + row
    y = tl.load(out_ptr, mask=inside, other=0.0).to(tl.float32) + added
    tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=inside)


def add_adapters(out: torch.Tensor, shrunk: torch.Tensor, adapters: Adapters) -> None:
    """Add ``B @ shrunk`` to each token's result, with B of the adapter that it uses.

    Args:
        out: ``[tokens, rows of the weight]`` float32 | float16 | bfloat16, unit last stride,
            *written*, but for tokens without an adapter.
        shrunk: ``[tokens, parts * max_rank]`` float32, contiguous: of ``shrink_adapters``; or with
            ``keep_splits``, ``[tokens, parts * max_rank, splits]``.
        adapters: as there; B has any dtype of ``out``'s.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: products are added in float32, from the first rank to the last; their sum is added to
        ``out`` in float32 and rounded once. Bits do not follow from other tokens. Tier B.
    Stream: one launch on the current stream, no synchronisation, CUDA-graph safe.
    """
    matrices = adapters.matrices
    parts, num_rows = len(matrices.part_rows), sum(matrices.part_rows)
    check_tensor("out", out, shape=(None, num_rows), dtype=FLOAT_DTYPES, unit_last_stride=True)
    check_launchable("out", out)
    num_tokens = out.shape[0]
    shape: tuple[int, ...] = (num_tokens, parts * matrices.max_rank)
    if shrunk.dim() == 3:
        if shrunk.shape[2] not in SPLITS:
            raise ValueError(f"shrunk: expected splits of {SPLITS}, got {shrunk.shape[2]}")
        shape = (*shape, shrunk.shape[2])
    check_tensor(
        "shrunk", shrunk, shape=shape, dtype=torch.float32, device=out.device, contiguous=True
    )
    slots = adapters.slots
    check_tensor(
        "adapters.slots", slots, shape=(num_tokens,), dtype=torch.int32, device=out.device
    )
    if num_tokens == 0:
        return
    tile_tokens, tile_rows = tile_for(num_tokens, num_rows)
    _add_adapters_kernel[(triton.cdiv(num_rows, tile_rows), triton.cdiv(num_tokens, tile_tokens))](
        *with_strides(out, 1),
        num_tokens=num_tokens,
        **lora_arguments(adapters, shrunk, tile_tokens * tile_rows, NUM_WARPS),
        TILE_TOKENS=tile_tokens, TILE_ROWS=tile_rows, num_warps=NUM_WARPS,
        **overlap_options(out.device),
    )  # fmt: skip
