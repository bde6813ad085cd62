"""A linear layer, fused with the norms, activation and residual around it in a decoder.

    x' = rms_norm(x, norm_weight)                   (if norm_weight is given)
    y  = x' @ weight.T + bias
    y  = silu(y[:, :n]) * y[:, n:]                  (if activation is "silu_and_mul"; or gelu)
    out = residual + y                              (if residual is given)
    normed_out = rms_norm(out, out_norm_weight)     (if normed_out is given)

A decode step multiplies few rows by weights that are read once: it takes as long as reading the
weights. Where launches overlap (``dependent_launch``) a program starts to load weights before it
waits for the previous kernel.

A quantized weight is multiplied by ``linear_codes`` if there are few tokens. With many, tokens are
quantized too if the checkpoint says so (``linear_scaled``); else tiles widen their codes
(``linear_code_tiles``, on Hopper), or the weight is widened first (``dequantize``) and then a
matrix like any other.

``linear_vector`` computes one token, ``linear_registers`` up to 64 tokens if a GPU's registers
hold the weights, the vendor's library most other calls with more than MOST_TOKENS tokens (norms
and activation in kernels of their own), and ``linear_tiles`` the rest. Where several programs
share the inputs of a result (splits), ``linear_splits`` adds up their sums and norms the result.

A deterministic call has one order of additions, a ``SumOrder``, for any number of tokens. Up to 64
tokens ``linear_registers`` computes it if registers hold the weights, else ``linear_tiles``. The
two use different instructions of the tensor cores (mma.sync and wgmma), which a GPU must round
alike.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from mrv1.device import device_info
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.triton import INTERPRET
from mrv1.kernels.layers.activation import gelu_tanh_and_mul, silu_and_mul
from mrv1.kernels.layers.add_adapters import add_adapters
from mrv1.kernels.layers.contracts import GATES, Activation, check_norm_weight
from mrv1.kernels.layers.dequantize import check_multiplied, widened
from mrv1.kernels.layers.linear_call import LinearCall
from mrv1.kernels.layers.linear_codes import (
    MOST_NORMED,
    codes_config,
    multiplies_codes,
    multiply_codes,
)
from mrv1.kernels.layers.linear_registers import RegisterConfig, multiply_in_registers
from mrv1.kernels.layers.linear_scaled import multiplies_scaled, multiply_scaled
from mrv1.kernels.layers.linear_splits import add_splits
from mrv1.kernels.layers.linear_tiles import TileConfig, multiply_tiles
from mrv1.kernels.layers.linear_vector import VectorConfig, multiply_vector
from mrv1.kernels.layers.lora import Adapters
from mrv1.kernels.layers.quantized import TILES_CAPABILITY, QuantizedWeight
from mrv1.kernels.layers.rms_norm import rms_norm
from mrv1.kernels.layers.shrink_adapters import shrink_adapters
from mrv1.kernels.layers.sum_order import SumOrder, check_leaves

MOST_TOKENS = 32
"""Most tokens for which tiles are used although the library could multiply. On an H200 in bfloat16
the four products of a Qwen3-0.6B layer, with norms, activation and residuals, take 24 us in tiles
at 32 tokens (27.6 by the library) and 31 us at 64 tokens (28.5 by the library)."""
MOST_LANE_TOKENS = 16
"""Most tokens that are multiplied by codes as lanes load them, where warp groups widen tiles: the
four products of an 8B layer take 63 us with int4 codes at 16 tokens on an H200, and as tiles 77;
at 33 tokens 179 us, and as tiles 97."""
WARP_GROUP_CAPABILITY = (9, 0)
"""The compute capability of ``linear_groups``."""
MOST_REGISTER_TOKENS = 64
"""Most tokens of a deterministic call that warp groups do not take: half of a tile's."""
MOST_ADAPTED_TILE = 32
"""Most tokens of a tile with adapters in a deterministic call of many tokens: those of B beside a
larger tile's sums would not fit registers (sm_100)."""
PRODUCTS_FROM_SHARED_MEMORY: tuple[tuple[int, int] | None, ...] = ((9, 0), (10, 0))
"""Compute capabilities whose tensor cores read both operands from shared memory, 227 KiB per
program: large tiles do not pass through registers."""


ONE_ROUNDING: tuple[tuple[int, int] | None, ...] = ((9, 0),)
"""Compute capabilities on which all products of the tensor cores round alike, as tests show: 16
inputs at a time, in any order, are added to the sum."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    activation: Activation | None = None,
    out: torch.Tensor | None = None,
    out_norm_weight: torch.Tensor | None = None,
    normed_out: torch.Tensor | None = None,
    prefetch: torch.Tensor | None = None,
    deterministic: bool = False,
    leaves: int | None = None,
    keep_splits: bool = False,
    adapters: Adapters | None = None,
) -> torch.Tensor:
    """Return ``residual + activation(rms_norm(x) @ weight.T + bias)``, each part if it is given.

    Args:
        x: ``[tokens, in]`` float32 | float16 | bfloat16, unit last stride.
        weight: ``[out, in]``, x's dtype, contiguous; in, out >= 1. Read before earlier launches
            have ended: none that may still run may write it, ``bias`` or a norm's weight.
            Or a contiguous ``QuantizedWeight`` of x's dtype; in and, unless they are all, inputs
            per scale are multiples of the codes in 16 bits.
        bias: ``[out]``, x's dtype, contiguous.
        norm_weight: ``[in]``, x's dtype or float32, contiguous: weight of an RMS norm over each
            row of x.
        eps: added to the mean square in both norms.
        residual: ``[tokens, n]``, x's dtype, unit last stride; n is out (gated: out / 2).
        activation: ``"silu_and_mul"``: weight has the gate's rows, then the up projection's, and
            the result is ``silu(gate) * up``; ``"gelu_tanh_and_mul"``: gelu by tanh instead.
        out: ``[tokens, n]``, x's dtype or float32, unit last stride, *written* and returned; may
            be ``residual``, but overlap with nothing else. Allocated if omitted, in x's dtype.
        out_norm_weight: ``[n]``, x's dtype, contiguous: the norm's; only with ``normed_out``.
        normed_out: ``[tokens, n]``, x's dtype, unit last stride, *written* with the RMS norm of
            each row of ``out``. Overlaps with nothing else.
        prefetch: contiguous, x's device: weights that a later call reads, prefetched into the
            GPU's L2 cache where that is known to be worth it; not otherwise used.
        deterministic: whether a result's bits do not depend on the number of tokens and on other
            rows of x: one order of additions.
        leaves: only if deterministic: 1, 2, 4 or 8, the parts of equal length (the last may be
            shorter) into which the inputs are cut. Each is one sum; the sums are added in a tree,
            neighbours first. Those of N ranks with 8 / N leaves each, added so, are the bits of
            one rank with 8; and the rows of weight that ranks divide have the bits of all.
            None = an order that follows from the weight's shape, and up to 1,024 inputs from
            their number alone.
        keep_splits: whether the caller adds up the sums of splits, as ``all_reduce_norm`` does: a
            product that splits its inputs then returns float32 ``[splits, tokens, out]``, and
            leaves ``out`` unwritten. Not with what changes or follows the product; splits of
            leaves are added as leaves are. Where a deterministic call has adapters, no splits are
            kept: what adapters add comes after their sum.
        adapters: low-rank adapters of the weight, and which of them each token uses: their
            ``scaling * B @ A @ rms_norm(x)`` is added to the product, before ``bias``. With an
            activation they have one part, or one for gates and one for ups.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: products are summed in float32, and for several float32 tokens the sum is compensated
        every 32 inputs (Kahan); bias, activation and residual are computed in float32 too, and the
        result is rounded once. The norms round as ``rms_norm`` does; the second norm takes the
        rounded result. Where the vendor's library multiplies (from 33 tokens on, unless
        deterministic), the two inputs of an activation are rounded to the dtype, and a product may
        be rounded to it before a bias or a residual is added: where it splits the inputs, it may
        sum the splits in the dtype. Of a quantized weight up to 64 16-bit tokens (on sm_90 up to
        16: tiles round as the library does) are multiplied by codes: scales of groups of at least
        64 bytes of codes multiply sums, and the norm of one token multiplies by its weight,
        rounds, and scales the result; other scales multiply weights, which are rounded once, as
        are those of more tokens and of deterministic calls. Inputs are quantized, as
        ``weight.activations`` says, if more than 32 bfloat16 tokens are multiplied on a GPU from
        sm_89 on: codes are rounded to nearest, their products summed in float32, the sum is scaled
        and rounded before a residual is added. Adapters' products are as in ``shrink_adapters``
        and ``add_adapters``, added to the float32 sum or the library's rounded product. Tier B.
    Stream: current stream, no synchronisation, CUDA-graph safe.
    """
    check_leaves(leaves, deterministic=deterministic)
    num_out = _check(x, weight, bias, norm_weight, residual, activation, out)
    _check_what_follows(x, num_out, out, out_norm_weight, normed_out, prefetch)
    if adapters is not None:
        _check_adapters(adapters, x, weight.shape[0], is_gated=activation is not None)
    added = (bias, norm_weight, residual, activation, normed_out)
    if keep_splits and any(each is not None for each in added):
        raise ValueError("keep_splits: expected False with arguments that change the product")
    keep_splits = keep_splits and not (deterministic and adapters is not None)
    is_new = out is None
    if out is None:
        out = x.new_empty((x.shape[0], num_out))
    if x.shape[0] == 0:
        return out
    is_vector = x.shape[0] == 1 and not deterministic
    quantized = weight if isinstance(weight, QuantizedWeight) else None
    norms_itself = is_vector and adapters is None and _norms_itself(x, quantized)
    if norm_weight is not None and not norms_itself:
        x, norm_weight = rms_norm(x, norm_weight, eps), None
    shrunk = None
    if adapters is not None:
        shrunk = shrink_adapters(x, adapters, keep_splits=True)
    if quantized is not None and quantized.order is not None:
        x = x.index_select(1, quantized.order)
    order = None
    if deterministic:
        order = SumOrder.of(x.shape[1], weight.shape[0], leaves, is_gated=activation is not None)
    call = LinearCall(
        x=x,
        weight=weight.codes if isinstance(weight, QuantizedWeight) else weight,
        bias=bias,
        norm_weight=norm_weight,
        eps=eps,
        residual=residual,
        gate=GATES[activation],
        out=out,
        out_norm_weight=out_norm_weight,
        normed_out=normed_out,
        prefetch=prefetch,
        order=order,
        keeps_splits=keep_splits,
        adapters=adapters,
        shrunk=shrunk,
    )
    sums = None
    found = None if quantized is None else _multiply_quantized(call, quantized)
    if quantized is not None and found is None:
        call = replace(call, weight=widened(quantized))
    if found is not None:
        product, sums = found
        if product is not None and (product := _finish(call, product)) is not out:
            out = product if is_new else out.copy_(product)
    elif is_vector:
        multiply_vector(call, _vector_config(call))
    elif (config := _register_config(call)) is not None:
        sums = multiply_in_registers(call, config)
    elif not deterministic and call.num_tokens > MOST_TOKENS and _library_can(call):
        _multiply_by_library(call)
    elif _takes_groups(call):
        # Imported here: Gluon needs a compiler, which the interpreter's process has not.
        from mrv1.kernels.layers.linear_groups import can_copy, multiply_by_groups

        if can_copy(call):
            sums = multiply_by_groups(call)
        else:
            sums = multiply_tiles(call, _tile_config(call))
    else:
        sums = multiply_tiles(call, _tile_config(call))
    if sums is not None:
        if keep_splits:
            _add_adapters(call, sums[0])
            return sums
        add_splits(call, sums)
    elif normed_out is not None and out_norm_weight is not None:
        rms_norm(out, out_norm_weight, eps, out=normed_out)
    return out


def _multiply_quantized(
    call: LinearCall, weight: QuantizedWeight
) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
    """Return the product with its bias, or the sums of splits; None = the weight must be widened.

    Neither of them if the results are in ``call.out``.
    """
    if multiplies_scaled(call, weight):
        return multiply_scaled(call, weight), None
    if _may_take_code_tiles(call):
        # Imported here: Gluon needs a compiler, which the interpreter's process has not.
        from mrv1.kernels.layers.linear_code_tiles import (
            multiplies_code_tiles,
            multiply_code_tiles,
        )

        if multiplies_code_tiles(call, weight):
            return multiply_code_tiles(call, weight)
    if (config := codes_config(call, weight)) is not None:
        return None, multiply_codes(call, weight, config)
    return None


def _may_take_code_tiles(call: LinearCall) -> bool:
    """Say whether warp groups widen the codes of tiles, if they can, for this call."""
    if INTERPRET or call.num_tokens <= MOST_LANE_TOKENS:
        return False
    return device_info(call.x.device).capability == TILES_CAPABILITY


def _norms_itself(x: torch.Tensor, weight: QuantizedWeight | None) -> bool:
    """Say whether the kernel of one token norms it."""
    if weight is None:
        return True
    return weight.order is None and multiplies_codes(weight) and x.shape[1] <= MOST_NORMED


def _vector_config(call: LinearCall) -> VectorConfig:
    if INTERPRET:
        return VectorConfig.for_interpreter(call.num_in, call.num_out)
    norm_dtype = None if call.norm_weight is None else call.norm_weight.dtype
    return VectorConfig.default_for(call.num_in, call.x.dtype, norm_dtype=norm_dtype)


def _register_config(call: LinearCall) -> RegisterConfig | None:
    """Return the configuration; None for float32, AMD, too many weights or too many tokens."""
    if call.x.dtype.itemsize != 2 or torch.version.hip is not None:
        return None
    num_rows, is_normed = call.weight.shape[0], call.is_followed
    if call.order is not None:
        if INTERPRET or device_info(call.x.device).capability not in ONE_ROUNDING:
            return None
        return RegisterConfig.in_order_for(
            call.num_tokens, call.num_in, num_rows, call.order, is_gated=call.is_gated
        )
    if INTERPRET:
        return RegisterConfig.for_interpreter(call.num_tokens, num_rows)
    return RegisterConfig.default_for(
        call.num_tokens, call.num_in, num_rows, is_gated=call.is_gated, is_normed=is_normed
    )


def _takes_groups(call: LinearCall) -> bool:
    """Say whether warp groups compute the call if its steps can be copied."""
    is_many = call.order is not None and call.num_tokens > MOST_REGISTER_TOKENS
    if INTERPRET or not is_many or call.x.dtype.itemsize != 2 or call.adapters is not None:
        return False
    if call.gate == GATES["gelu_tanh_and_mul"]:  # tiles have the same bits, in more time
        return False
    return device_info(call.x.device).capability == WARP_GROUP_CAPABILITY


def _tile_config(call: LinearCall) -> TileConfig:
    num_rows = call.weight.shape[0]
    if INTERPRET:
        part_in = call.num_in if call.order is None else call.order.leaf_in
        return TileConfig.for_interpreter(call.num_tokens, part_in, num_rows)
    fast = device_info(call.x.device).capability in PRODUCTS_FROM_SHARED_MEMORY
    options = {"is_gated": call.is_gated, "from_shared_memory": fast}
    if call.order is not None:
        with_adapters = call.adapters is not None and call.num_tokens > MOST_REGISTER_TOKENS
        num_tokens = MOST_ADAPTED_TILE if with_adapters else call.num_tokens
        config = TileConfig.in_order_for(num_tokens, num_rows, call.order, call.x.dtype, **options)
        return replace(config, splits=1) if with_adapters else config
    return TileConfig.default_for(
        call.num_tokens,
        call.num_in,
        num_rows,
        call.x.dtype,
        is_normed=call.is_followed,
        **options,
    )


def _library_can(call: LinearCall) -> bool:
    """Say whether the library can compute the call.

    It adds at most one tensor, before an activation, and none to a result of another dtype.
    """
    num_added = (call.bias is not None) + (call.residual is not None)
    if call.out.dtype != call.x.dtype:
        return call.x.device.type == "cuda" and num_added == 0 and not call.is_gated
    return num_added <= (0 if call.is_gated and call.residual is not None else 1)


def _multiply_by_library(call: LinearCall) -> None:
    x = call.x
    added = call.bias if call.residual is None else call.residual
    product = None if call.is_gated else call.out
    if call.out.dtype != x.dtype:
        torch.mm(x, call.weight.T, out_dtype=call.out.dtype, out=call.out)
        _add_adapters(call, call.out)
        return
    if added is None:
        product = torch.mm(x, call.weight.T, out=product)
    else:
        product = torch.addmm(added, x, call.weight.T, out=product)
    _add_adapters(call, product)
    if call.is_gated:
        activate = silu_and_mul if call.gate == GATES["silu_and_mul"] else gelu_tanh_and_mul
        activate(product, out=call.out)


def _finish(call: LinearCall, product: torch.Tensor) -> torch.Tensor:
    """Return the results of a product with its bias; they may be ``call.out``."""
    _add_adapters(call, product)
    if call.is_gated:
        activate = silu_and_mul if call.gate == GATES["silu_and_mul"] else gelu_tanh_and_mul
        product = activate(product, out=None if call.residual is not None else call.out)
    if call.residual is not None:
        product = torch.add(product, call.residual, out=call.out)
    return product


def _add_adapters(call: LinearCall, product: torch.Tensor) -> None:
    """Add what the call's adapters add, if it has any, to a product that has no activation yet."""
    if call.adapters is not None and call.shrunk is not None:
        add_adapters(product, call.shrunk, call.adapters)


def _check_adapters(adapters: Adapters, x: torch.Tensor, num_rows: int, *, is_gated: bool) -> None:
    """Raise unless adapters are those of a weight with ``num_rows`` rows, of x's tokens."""
    adapters.check(x, num_rows)
    rows = adapters.matrices.part_rows
    if is_gated and rows not in ((num_rows,), (num_rows // 2,) * 2):
        raise ValueError(
            f"adapters.part_rows: expected ({num_rows // 2}, {num_rows // 2}), gates and ups, got "
            f"{rows}"
        )


def _check(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: Activation | None,
    out: torch.Tensor | None,
) -> int:
    """Raise unless the arguments are as ``linear`` says; return the number of result columns."""
    check_tensor("x", x, shape=(None, None), dtype=FLOAT_DTYPES, unit_last_stride=True)
    check_launchable("x", x)
    num_tokens, num_in = x.shape
    check = partial(check_tensor, dtype=x.dtype, device=x.device)
    if isinstance(weight, QuantizedWeight):
        _check_quantized(weight, x)
    else:
        check("weight", weight, shape=(None, num_in), contiguous=True)
        if 0 in weight.shape:
            raise ValueError(
                f"weight: expected at least one row and column, got {list(weight.shape)}"
            )
    num_rows = weight.shape[0]
    if bias is not None:
        check("bias", bias, shape=(num_rows,), contiguous=True)
    if norm_weight is not None:
        check_norm_weight("norm_weight", norm_weight, x)
    if activation not in GATES:
        expected = ", ".join(map(repr, GATES))
        raise ValueError(f"activation: expected one of {expected}, got {activation!r}")
    if activation is not None and num_rows % 2:
        raise ValueError(
            f"weight: expected an even number of rows (gate, then up), got {num_rows}"
        )
    shape = (num_tokens, num_rows if activation is None else num_rows // 2)
    if residual is not None:
        check("residual", residual, shape=shape, unit_last_stride=True)
    if out is not None:
        check("out", out, shape=shape, dtype=(x.dtype, torch.float32), unit_last_stride=True)
    return shape[1]


def _check_quantized(weight: QuantizedWeight, x: torch.Tensor) -> None:
    """Raise unless a quantized weight, correct in itself, fits x and the kernels."""
    if weight.num_in != x.shape[1]:
        raise ValueError(f"weight: expected {x.shape[1]} inputs, got {weight.num_in}")
    if weight.dtype != x.dtype:
        raise TypeError(f"weight: expected codes of {x.dtype} values, got {weight.dtype}")
    check_multiplied(weight, x.device)


def _check_what_follows(
    x: torch.Tensor,
    num_out: int,
    out: torch.Tensor | None,
    out_norm_weight: torch.Tensor | None,
    normed_out: torch.Tensor | None,
    prefetch: torch.Tensor | None,
) -> None:
    """Raise unless the arguments are as ``linear`` says."""
    if (out_norm_weight is None) != (normed_out is None):
        alone = "normed_out" if out_norm_weight is None else "out_norm_weight"
        raise ValueError(f"out_norm_weight, normed_out: expected both or neither, got {alone}")
    if normed_out is not None:
        if out is not None and out.dtype != x.dtype:
            raise TypeError(f"out: expected {x.dtype} with normed_out, got {out.dtype}")
        check = partial(check_tensor, dtype=x.dtype, device=x.device)
        check("out_norm_weight", out_norm_weight, shape=(num_out,), contiguous=True)
        check("normed_out", normed_out, shape=(x.shape[0], num_out), unit_last_stride=True)
    if prefetch is not None:
        check_tensor("prefetch", prefetch, device=x.device, contiguous=True)
