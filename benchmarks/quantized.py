"""Measure the four products of an 8B layer with quantized weights, at a decode step's tokens.

python -m benchmarks.quantized OUTPUT.json [--tokens 1,4,8,16,32,64] [--contenders NAME,NAME]
                               [--repeats 7]

One launch is the four products, one after the other; their weights rotate, so no weight is in L2
when it is read again. Bytes are those of codes and scales (or of the plain matrix), and the share
is of a measured copy's bandwidth. Beside mrv1's kernels: ``bfloat16``, mrv1's product with plain
weights; ``scaled_mm``, torch's product of e4m3 with scales of tokens and rows, its tokens in codes
before; ``marlin``, vLLM's int4 kernel, if vLLM is installed. Many ``e4m3 tokens``, and those of
``e4m3 token blocks``, become codes within the product. Needs a GPU with bfloat16.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.measure.floor import copy_bandwidth
from benchmarks.measure.options import parse_script, script_parser, write_result
from benchmarks.measure.timing import WrongResultError, capture, measure
from benchmarks.products import products
from mrv1 import kernels
from mrv1.device import resolve_device
from mrv1.kernels import QuantizedWeight, reference

SHAPE = "llama3-8b"
TOKENS = (1, 4, 8, 16, 32, 64)
GROUP = 128
NUM_SETS = 2
"""Sets of an 8B layer's weights: the smallest, of int4, has 109 MB, twice an H200's L2 cache."""
LAUNCHES = 8
MAX_DIFFERENCE = 0.02
"""Largest difference from the product with the values, relative to the largest result."""
MOST_OF_QUANTIZED = 0.1
"""The same of a product whose tokens are quantized too."""

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to multiply by one matrix."""

    multiply: Product
    num_bytes: int
    """Bytes of the matrix that a product reads."""
    values: torch.Tensor
    """The first rows of the matrix, to compare with."""
    is_exact: bool = True
    """Whether the tokens are multiplied as they are."""


def random_codes(kind: str, num_in: int, num_out: int, device: torch.device) -> QuantizedWeight:
    """Return a weight of random codes whose values are about ``num_in ** -0.5``."""
    if kind.startswith("e4m3"):
        return _random_e4m3(kind, num_in, num_out, device)
    size = num_in**-0.5 / 5
    group = 32 if kind in ("mxfp4", "q8_0", "q4_0", "q4_1") else GROUP
    shape = num_out, num_in // group
    if kind == "q8_0":
        codes = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8, device=device)
        size /= 16
    else:
        codes = torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8, device=device)
    new = partial(QuantizedWeight, codes=codes, dtype=torch.bfloat16, inputs_per_scale=group)
    if kind == "q4_k":
        steps = torch.full((num_out, num_in // 256, 2), size / 40, device=device).half()
        numbers = torch.randint(0, 256, (*steps.shape[:2], 12), dtype=torch.uint8, device=device)
        heads = torch.cat((steps.view(torch.uint8), numbers), -1)
        return new(code="q4_k", heads=heads, inputs_per_scale=0)
    if kind == "mxfp4":
        exponents = torch.full(shape, 119, dtype=torch.uint8, device=device)
        return new(code="e2m1", scales=exponents)
    dtype = torch.bfloat16 if kind == "int4" else torch.float16
    scales = torch.full(shape, size, dtype=dtype, device=device)
    if kind == "q8_0":
        return new(code="int8", scales=scales)
    if kind == "q4_1":
        return new(code="uint4", scales=scales, mins=-7 * scales)
    return new(code="int4", scales=scales)


def _random_e4m3(kind: str, num_in: int, num_out: int, device: torch.device) -> QuantizedWeight:
    codes = (torch.randn(num_out, num_in, device=device) * 64).to(torch.float8_e4m3fn)
    new = partial(QuantizedWeight, code="e4m3", codes=codes, dtype=torch.bfloat16)
    size = num_in**-0.5 / 64
    if kind.endswith("blocks"):
        blocks = -(-num_out // GROUP), -(-num_in // GROUP)
        scales = torch.full(blocks, size, device=device)
        return new(
            rows_per_scale=GROUP, inputs_per_scale=GROUP, scales=scales,
            activations="group" if kind == "e4m3 token blocks" else None,
        )  # fmt: skip
    scales = torch.full((num_out, 1), size, device=device)
    return new(scales=scales, activations="token" if kind == "e4m3 tokens" else None)


def by_mrv1(kind: str, num_in: int, num_out: int, device: torch.device) -> Contender:
    """Return mrv1's product with codes."""
    weight = random_codes(kind, num_in, num_out, device)
    return Contender(
        multiply=lambda x: kernels.linear(x, weight),
        num_bytes=weight.nbytes,
        values=first_rows(weight),
        is_exact=weight.activations is None,
    )


def first_rows(weight: QuantizedWeight) -> torch.Tensor:
    """Return the values of 128 rows."""
    return weight.rows(0, GROUP).dense()


def by_plain_weights(num_in: int, num_out: int, device: torch.device) -> Contender:
    """Return mrv1's product with a plain matrix."""
    weight = torch.randn(num_out, num_in, dtype=torch.bfloat16, device=device) * num_in**-0.5
    return Contender(
        multiply=lambda x: kernels.linear(x, weight), num_bytes=weight.nbytes,
        values=weight[:GROUP],
    )  # fmt: skip


def by_scaled_mm(num_in: int, num_out: int, device: torch.device) -> Contender:
    """Return torch's product of e4m3 codes; the tokens' codes are made before it is timed."""
    weight = random_codes("e4m3", num_in, num_out, device)
    scales = weight.tensors["scales"].T
    prepared: dict[int, tuple[torch.Tensor, ...]] = {}  # with x, which keeps its id

    def multiply(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in prepared:
            scale = x.float().abs().amax(1, keepdim=True) / 448
            prepared[id(x)] = x, (x / scale).to(torch.float8_e4m3fn), scale
        _, codes, scale = prepared[id(x)]
        return torch._scaled_mm(
            codes, weight.codes.T, scale_a=scale, scale_b=scales, out_dtype=torch.bfloat16,
            use_fast_accum=False,
        )  # fmt: skip

    return Contender(
        multiply=multiply, num_bytes=weight.nbytes, values=first_rows(weight), is_exact=False
    )  # fmt: skip


def by_marlin(num_in: int, num_out: int, device: torch.device) -> Contender:
    """Return vLLM's int4 product; ImportError, AttributeError: vLLM is not installed, or has none.

    Arguments go by name: versions differ in those for permuted inputs.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    def call(op: Callable[..., torch.Tensor], **arguments: object) -> torch.Tensor:
        names = inspect.signature(op).parameters
        return op(**{name: arguments[name] for name in names if name in arguments})

    weight = random_codes("int4", num_in, num_out, device)
    sizes = {"size_k": num_in, "size_n": num_out}
    # GPTQ's tensors: [in / 8, out] int32 with eight inputs each, and [groups, out].
    stored = weight.codes.view(torch.int32).T.contiguous()
    none = torch.empty(0, dtype=torch.int32, device=device)
    packed = call(ops.gptq_marlin_repack, b_q_weight=stored, perm=none, num_bits=4, **sizes)
    scales = weight.tensors["scales"].T.contiguous()
    scales = marlin_utils.marlin_permute_scales(scales, num_in, num_out, GROUP)
    absent = ("c", "b_bias", "a_scales", "global_scale", "b_zeros", "g_idx", "perm")
    product = partial(
        call, ops.marlin_gemm, b_q_weight=packed, b_scales=scales, b_q_type=scalar_types.uint4b8,
        workspace=marlin_utils.marlin_make_workspace_new(device), use_fp32_reduce=True,
        **dict.fromkeys(absent), **sizes,
    )  # fmt: skip
    return Contender(
        multiply=lambda x: product(a=x, size_m=len(x)),
        num_bytes=weight.nbytes,
        values=first_rows(weight),
    )


MRV1 = (
    "e4m3", "int4", "e4m3 blocks", "mxfp4", "q8_0", "q4_1", "q4_k", "q4_0", "e4m3 tokens",
    "e4m3 token blocks",
)  # fmt: skip
"""Kinds of ``random_codes``."""
CONTENDERS: dict[str, Callable[[int, int, torch.device], Contender]] = {
    **{kind: partial(by_mrv1, kind) for kind in MRV1},
    "bfloat16": by_plain_weights,
    "scaled_mm": by_scaled_mm,
    "marlin": by_marlin,
}


def measure_layer(
    shapes: dict[str, tuple[int, int]],
    tokens: list[int],
    repeats: int,
    device: torch.device,
    names: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each contender and number of tokens; one that cannot run has its error.

    Raises:
        WrongResultError: results differ from those of the values by more than rounding.
    """
    rows: list[dict[str, Any]] = []
    bandwidth = copy_bandwidth(device)
    for name in names or CONTENDERS:
        make = CONTENDERS[name]
        try:
            sets = [[make(*shape, device) for shape in shapes.values()] for _ in range(NUM_SETS)]
            rows += [
                {"contender": name, "tokens": num_tokens}
                | _measure(sets, shapes, num_tokens, repeats, device, bandwidth)
                for num_tokens in tokens
            ]
        except (ImportError, AttributeError, RuntimeError) as error:
            if isinstance(error, WrongResultError):
                raise
            rows.append({"contender": name, "error": f"{type(error).__name__}: {error}"})
        sets = []
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _measure(
    sets: list[list[Contender]],
    shapes: dict[str, tuple[int, int]],
    num_tokens: int,
    repeats: int,
    device: torch.device,
    bandwidth: float | None,
) -> dict[str, Any]:
    xs = [
        torch.randn(num_tokens, num_in, dtype=torch.bfloat16, device=device)
        for num_in, _ in shapes.values()
    ]
    for contender, x in zip(sets[0], xs, strict=True):
        want = reference.linear(x, contender.values).float()
        got = contender.multiply(x)[:, : len(contender.values)].float()
        difference = float((got - want).abs().max() / want.abs().max())
        limit = MAX_DIFFERENCE if contender.is_exact else MOST_OF_QUANTIZED
        if not difference <= limit:
            raise WrongResultError(f"expected a difference <= {limit}, got {difference}")

    def layer(contenders: list[Contender]) -> None:
        for contender, x in zip(contenders, xs, strict=True):
            contender.multiply(x)

    replay = capture([partial(layer, each) for each in sets], LAUNCHES, device)
    timing = measure({"layer": replay}, repeats, device)["layer"]
    num_bytes = sum(contender.num_bytes for contender in sets[0])
    rate = num_bytes / timing.median_us * 1e6
    return {
        "us": timing.median_us,
        "p20_us": timing.p20_us,
        "p80_us": timing.p80_us,
        "bytes": num_bytes,
        "share_of_copy_bandwidth": rate / bandwidth if bandwidth else None,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = script_parser(__doc__, repeats=7)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    return parse_script(parser, arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure every contender, and write the result."""
    options = parse(arguments)
    device = resolve_device("cuda")
    torch.manual_seed(0)
    tokens = [int(each) for each in options.tokens.split(",")]
    names = options.contenders.split(",")
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise SystemExit(f"--contenders: expected some of {', '.join(CONTENDERS)}, got {unknown}")
    rows = measure_layer(products(SHAPE), tokens, options.repeats, device, names)
    for row in rows:
        if "error" in row:
            sys.stdout.write(f"{row['contender']}: {row['error']}\n")
        else:
            sys.stdout.write(
                f"{row['contender']} {row['tokens']}: {row['us']:.1f} us, "
                f"{row['share_of_copy_bandwidth']:.0%} of the copy bandwidth\n"
            )
    conditions = {
        "shape": SHAPE,
        "group": GROUP,
        "sets": NUM_SETS,
        "timer": "CUDA graph of a layer's four products, two sets of weights in turns",
        "data": "random codes",
    }
    write_result(
        options, device, "quantized", dtype="bfloat16", copy_bandwidth=copy_bandwidth(device),
        conditions=conditions, results=rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
