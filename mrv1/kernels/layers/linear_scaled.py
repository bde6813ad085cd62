"""The linear layer of many tokens and e4m3 codes: tokens become e4m3 too, the library multiplies.

    scale = max |x| / 448 of a token,  code = e4m3(x / scale)
    y     = (codes @ weight codes.T) * token's scale * row's scale

With weights in blocks of 128 x 128, each 128 inputs of a token have a scale, and sums of 128
products are scaled before they are added (DeepSeek-AI, "DeepSeek-V3 Technical Report", 3.3).

That is how a checkpoint with quantized activations says that its products are computed, and takes
half the time of a product in 16 bits, where widened weights take longer than that.
"""

from __future__ import annotations

import torch

from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.e4m3 import e4m3_codes
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.layers.linear_call import LinearCall
from mrv1.kernels.layers.quantized import BLOCK, MOST_PLAIN_TOKENS, QuantizedWeight, takes_codes

LARGEST = tl.constexpr(448.0)
BLOCK_TOKENS = 4
"""The number of tokens has to be a multiple of it for products of blocks."""


@triton.jit(do_not_specialize=["num_tokens", "stride_scale_group"])
def _quantize_tokens_kernel(
    codes_ptr,  # [num_tokens, IN] e4m3, written
    scales_ptr,  # [groups, num_tokens] float32, written
    stride_scale_group,
    x_ptr, stride_x_token,  # [num_tokens, IN], unit last stride
    num_tokens,
    IN: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two: at least the groups of a token
    GROUP: tl.constexpr,  # power of two: inputs of a group, at least IN if there is one
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (num_tokens,): one token."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)[:, None]
    col = group * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + token * stride_x_token + col, mask=col < IN, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), axis=1, keep_dims=True), LARGEST)
    scale = tl.where(scale == 0, 1.0, scale)
    code = e4m3_codes(tl.div_rn(x, scale)).to(tl.float8e4nv, bitcast=True)
    tl.store(codes_ptr + token * IN + col, code, mask=col < IN)
    tl.store(scales_ptr + group * stride_scale_group + token, scale, mask=group * GROUP < IN)


def tokens_config(num_in: int, inputs_per_scale: int) -> tuple[int, int, int]:
    """Return GROUPS and GROUP of the kernel, and its warps: 16 elements of a thread, 8 bytes."""
    group = triton.next_power_of_2(inputs_per_scale or num_in)
    groups = triton.next_power_of_2(triton.cdiv(num_in, group))
    return groups, group, min(max(groups * group // 512, 4), 16)


def quantize_tokens(
    x: torch.Tensor, *, inputs_per_scale: int = 0, multiple_of: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the e4m3 codes of x, ``[tokens, in]``, and float32 scales, ``[tokens, groups]``.

    The number of tokens is rounded up to ``multiple_of``; the last ones are undefined then.

    The scale of each group of a token (0 = all its inputs) is the one by which its largest element
    becomes 448. Codes are rounded to nearest, and clamped; of NaN they are NaN. Scales have unit
    first stride.
    """
    num_tokens, num_in = x.shape
    tile_groups, group, num_warps = tokens_config(num_in, inputs_per_scale)
    num_groups = triton.cdiv(num_in, group)
    num_rows = triton.cdiv(num_tokens, multiple_of) * multiple_of
    codes = torch.empty(num_rows, num_in, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_groups, num_rows, device=x.device)
    _quantize_tokens_kernel[(num_tokens,)](
        codes, scales, num_rows, x, x.stride(0), num_tokens,
        IN=num_in, GROUPS=tile_groups, GROUP=group, num_warps=num_warps,
        **overlap_options(x.device),
    )  # fmt: skip
    return codes, scales.T


def multiplies_scaled(call: LinearCall, weight: QuantizedWeight) -> bool:
    """Return whether tokens are quantized for a product by this weight."""
    if call.num_tokens <= MOST_PLAIN_TOKENS or call.order is not None:
        return False
    if call.out.dtype != call.x.dtype:
        return False
    return takes_codes(weight, call.x.device, call.x.dtype)


def multiply_scaled(call: LinearCall, weight: QuantizedWeight) -> torch.Tensor:
    """Return the product with its bias, ``[tokens, rows]`` in x's dtype."""
    is_grouped = weight.activations == "group"
    codes, scales = quantize_tokens(
        call.x,
        inputs_per_scale=BLOCK if is_grouped else 0,
        multiple_of=BLOCK_TOKENS if is_grouped else 1,
    )
    product = torch._scaled_mm(
        codes, weight.codes.T, scale_a=scales, scale_b=weight.tensors["scales"].T,
        bias=None if is_grouped else call.bias, out_dtype=call.x.dtype, use_fast_accum=False,
    )[: call.num_tokens]  # fmt: skip
    return product.add_(call.bias) if is_grouped and call.bias is not None else product
