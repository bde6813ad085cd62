"""The second product of adapters (LoRA), added to a result: ``out += B @ shrunk``.

``linear`` adds the same values itself where its own kernel writes the result. This launch is for
the other ones: products of the vendor's library, of codes, of experts, and split sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.layers.lora import Adapters
from mrv1.kernels.layers.lora_values import LoraPointers, adapter_values, lora_arguments

SPLITS = (1, 2, 4, 8, 16)
"""Into how many parts ``shrink_adapters`` may cut its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddAdaptersConfig:
    """The tile of a program."""

    tile_tokens: int
    tile_rows: int
    num_warps: int

    @classmethod
    def default_for(cls) -> AddAdaptersConfig:
        """Return the configuration for a GPU; not measured yet."""
        return cls(tile_tokens=8, tile_rows=64, num_warps=4)

    @classmethod
    def for_interpreter(cls, num_tokens: int, num_rows: int) -> AddAdaptersConfig:
        """Return few large programs."""
        return cls(
            tile_tokens=min(32, triton.next_power_of_2(num_tokens)),
            tile_rows=min(1024, triton.next_power_of_2(num_rows)),
            num_warps=1,
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _add_adapters_kernel(
    out_ptr, stride_out_token,  # [num_tokens, LORA_ROWS], unit last stride
    shrunk_ptr,  # see LoraPointers
    b_ptr, slots_ptr, ranks_ptr, num_tokens,
    LORA_ROWS: tl.constexpr, LORA_PARTS: tl.constexpr, MAX_RANK: tl.constexpr,
    LORA_SPLITS: tl.constexpr, AT_ONCE: tl.constexpr,
    SECOND_PART: tl.constexpr,  # its first row, or LORA_ROWS
    THIRD_PART: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (row tiles, token tiles)."""
    let_next_start(OVERLAP)
    token = tl.program_id(1).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)[:, None]
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)[None, :]
    is_token, is_row = token < num_tokens, row < LORA_ROWS
    wait_for_previous(OVERLAP)
    lora = LoraPointers(shrunk_ptr, b_ptr, slots_ptr, ranks_ptr)
    added = adapter_values(
        lora, token, is_token, row, LORA_ROWS, LORA_PARTS, MAX_RANK, LORA_SPLITS, AT_ONCE,
        SECOND_PART, THIRD_PART,
    )  # fmt: skip
    slot = tl.load(slots_ptr + token, mask=is_token, other=-1)
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
    config = AddAdaptersConfig.default_for()
    if INTERPRET:
        config = AddAdaptersConfig.for_interpreter(num_tokens, num_rows)
    grid = (triton.cdiv(num_rows, config.tile_rows), triton.cdiv(num_tokens, config.tile_tokens))
    _add_adapters_kernel[grid](
        *with_strides(out, 1),
        num_tokens=num_tokens,
        **lora_arguments(
            adapters, shrunk, config.tile_tokens * config.tile_rows, config.num_warps
        ),
        TILE_TOKENS=config.tile_tokens, TILE_ROWS=config.tile_rows, num_warps=config.num_warps,
        **overlap_options(out.device),
    )  # fmt: skip
