"""Measure the products of an 8B layer with adapters (LoRA) beside those without, at decode steps.

python -m benchmarks.lora OUTPUT.json [--tokens 1,8,32,64] [--adapters 32] [--rank 16]

One launch is what a layer multiplies: qkv, o with the residual and the next norm, gates and ups
with SwiGLU, down with residual and norm. All variants are timed in turns: ``plain``, without
adapters; ``none``, with slots for them that no token uses; ``one``, which all tokens use;
``each``, one for each token, up to ``--adapters``. Bytes are those of the weights and of A and B
of the adapters in use, and ``allowed_share`` is what they alone leave of the plain speed. Weights
rotate, so none is in L2 when it is read again. Needs a GPU with bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
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
from mrv1.kernels import Adapters, LoraMatrices, reference

SHAPE = "llama3-8b"
TOKENS = (1, 8, 32, 64)
VARIANTS = ("plain", "none", "one", "each")
NUM_SETS, LAUNCHES = 2, 8
MAX_DIFFERENCE = 0.05
"""Largest difference from the oracle, relative to the largest result: sums of bfloat16 values, of
which the library rounds some before adapters are added."""
PARTS = {"qkv": 3, "o": 1, "gate_up": 2, "down": 1}
"""Modules in each weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One weight of a layer, with its adapters."""

    weight: torch.Tensor
    matrices: LoraMatrices
    norm_weight: torch.Tensor
    """Of the norm that follows o and down."""


def parts_of(name: str, num_out: int) -> tuple[int, ...]:
    """Return the rows of a weight's modules; of qkv, keys and values have a sixth each."""
    if name == "qkv":
        return (num_out - 2 * (num_out // 6), num_out // 6, num_out // 6)
    return (num_out // PARTS[name],) * PARTS[name]


def random_layer(
    shapes: dict[str, tuple[int, int]], adapters: int, rank: int, device: torch.device
) -> dict[str, Product]:
    """Return a layer with as many adapters, whose results are of order one."""

    def normal(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, dtype=torch.bfloat16, device=device)
        return values.mul_(shape[-1] ** -0.5)

    layer = {}
    for name, (num_in, num_out) in shapes.items():
        parts = parts_of(name, num_out)
        matrices = LoraMatrices(
            a=normal(adapters, len(parts) * rank, num_in),
            b=torch.randn(adapters, rank, num_out, dtype=torch.bfloat16, device=device),
            scaling=torch.full((adapters, len(parts)), 0.25, device=device),
            ranks=torch.full((adapters, len(parts)), rank, dtype=torch.int32, device=device),
            part_rows=parts,
        )
        norm_weight = torch.ones(num_out, dtype=torch.bfloat16, device=device)
        layer[name] = Product(
            weight=normal(num_out, num_in), matrices=matrices, norm_weight=norm_weight
        )
    return layer


def slots_of(
    variant: str, num_tokens: int, adapters: int, device: torch.device
) -> torch.Tensor | None:
    """Return the adapter slot of each token; None = the products have no adapters."""
    slots = torch.arange(num_tokens, dtype=torch.int32, device=device) % adapters
    chosen = {"none": torch.full_like(slots, -1), "one": torch.zeros_like(slots), "each": slots}
    return chosen.get(variant)


def bytes_of(layer: dict[str, Product], slots: torch.Tensor | None) -> int:
    """Return the bytes of weights, and of A and B of each adapter that some token uses."""
    used = set() if slots is None else {*slots.tolist()} - {-1}
    return sum(
        each.weight.nbytes + len(used) * (each.matrices.a[0].nbytes + each.matrices.b[0].nbytes)
        for each in layer.values()
    )


def multiply(
    ops: Any,  # noqa: ANN401 - kernels, or their oracles
    layer: dict[str, Product],
    xs: dict[str, torch.Tensor],
    slots: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Compute a layer's products, as a decoder fuses them; return their results."""
    results = []
    for name, product in layer.items():
        fused: dict[str, Any] = {}
        if name == "gate_up":
            fused["activation"] = "silu_and_mul"
        if name in ("o", "down"):
            fused["residual"] = xs["residual"]
            fused["out_norm_weight"] = product.norm_weight
            fused["normed_out"] = torch.empty_like(xs["residual"])
        if slots is not None:
            fused["adapters"] = Adapters(matrices=product.matrices, slots=slots)
        results.append(ops.linear(xs[name], product.weight, **fused))
    return results


def measure_layer(
    shapes: dict[str, tuple[int, int]], num_tokens: int, options: argparse.Namespace,
    device: torch.device,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return a row for each variant.

    Raises:
        WrongResultError: results differ from the oracle's by more than rounding.
    """
    adapters = min(options.adapters, num_tokens)
    layers = [random_layer(shapes, adapters, options.rank, device) for _ in range(NUM_SETS)]
    new = partial(torch.randn, dtype=torch.bfloat16, device=device)
    xs = {name: new(num_tokens, num_in) for name, (num_in, _) in shapes.items()}
    xs["residual"] = new(num_tokens, shapes["down"][1])
    replays, bytes_read = {}, {}
    for variant in VARIANTS:
        slots = slots_of(variant, num_tokens, adapters, device)
        got, want = (multiply(ops, layers[0], xs, slots) for ops in (kernels, reference))
        for mine, oracle in zip(got, want, strict=True):
            difference = float((mine.float() - oracle.float()).abs().max() / oracle.abs().max())
            if not difference <= MAX_DIFFERENCE:
                raise WrongResultError(
                    f"{variant}: expected a difference <= {MAX_DIFFERENCE}, got {difference}"
                )
        launches = [partial(multiply, kernels, layer, xs, slots) for layer in layers]
        replays[variant] = capture(launches, LAUNCHES, device)
        bytes_read[variant] = bytes_of(layers[0], slots)
    timings = measure(replays, options.repeats, device)
    plain = timings["plain"].median_us
    return [
        {
            "variant": variant,
            "tokens": num_tokens,
            "us": timing.median_us,
            "p20_us": timing.p20_us,
            "p80_us": timing.p80_us,
            "bytes": bytes_read[variant],
            "share_of_plain_speed": plain / timing.median_us,
            "allowed_share": bytes_read["plain"] / bytes_read[variant],
        }
        for variant, timing in timings.items()
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = script_parser(__doc__, repeats=7)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    return parse_script(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every variant, and write the result."""
    options = parse(arguments)
    device = resolve_device("cuda")
    torch.manual_seed(0)
    rows = []
    for tokens in map(int, options.tokens.split(",")):
        rows += measure_layer(products(SHAPE), tokens, options, device)
        for row in rows[-len(VARIANTS) :]:
            sys.stdout.write(
                f"{row['variant']} {row['tokens']}: {row['us']:.1f} us, "
                f"{row['share_of_plain_speed']:.0%} of the plain speed, bytes allow "
                f"{row['allowed_share']:.0%}\n"
            )
            sys.stdout.flush()
    conditions = {
        "shape": SHAPE,
        "adapters": options.adapters,
        "rank": options.rank,
        "sets": NUM_SETS,
        "timer": "CUDA graph of a layer's four products, two sets of weights in turns",
        "data": "random weights and adapters",
    }
    write_result(
        options, device, "lora", dtype="bfloat16", copy_bandwidth=copy_bandwidth(device),
        conditions=conditions, results=rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
