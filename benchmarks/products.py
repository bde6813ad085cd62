"""Measure the products of a step's layers: the GPU vendor's library against mrv1's tiles.

python -m benchmarks.products OUTPUT.json [--tokens 64,512,8192] [--repeats 7]

``cublas`` and ``cublaslt`` are the two ways in which torch calls the library; mrv1's layers take
the first. ``tiles`` is the kernel of ``linear_tiles`` with the fastest of ``CONFIGS``. Results are
compared with the first one's. Needs a GPU with bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.measure.options import parse_script, script_parser, write_result
from benchmarks.measure.shapes import shape_config
from benchmarks.measure.timing import WrongResultError, capture, measure
from mrv1.device import resolve_device
from mrv1.kernels.layers.linear_call import LinearCall
from mrv1.kernels.layers.linear_tiles import TileConfig, multiply_tiles

SHAPES = ("llama3-8b", "qwen3-0.6b")
TOKENS = (64, 128, 256, 512, 1024, 1485, 1536, 2048, 4096, 8192)
"""Tokens of a step: graphs' sizes, and one number that is no multiple of a tile's."""
LIBRARIES = ("cublas", "cublaslt")
CONFIGS = tuple(
    TileConfig(
        tile_tokens=tokens, tile_rows=rows, tile_in=64, splits=1, early_steps=0,
        num_warps=num_warps, num_stages=num_stages,
    )
    for tokens, rows, num_warps, num_stages in (
        (64, 128, 4, 4), (128, 128, 8, 3), (128, 256, 8, 3), (256, 128, 8, 3),
    )
)  # fmt: skip
MAX_DIFFERENCE = 0.02
"""Largest difference of two results, relative to the largest element: bfloat16 keeps 8 bits."""
WEIGHT_BYTES = 200_000_000
"""Bytes of weights between two uses of one buffer: four times a GPU's L2 cache."""
REPLAY_S, FLOPS, LAUNCH_S = 1.5e-3, 6e14, 3e-6
"""A replay's length, and what is assumed of a launch to find how many it takes."""


class Buffers(NamedTuple):
    """The tensors of one launch."""

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor


def products(shape: str) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of each product of a layer."""
    config = shape_config(shape)
    hidden, attended = config.hidden_size, config.num_q_heads * config.head_dim
    qkv = attended + 2 * config.num_kv_heads * config.head_dim
    return {
        "qkv": (hidden, qkv),
        "o": (attended, hidden),
        "gate_up": (hidden, 2 * config.intermediate_size),
        "down": (config.intermediate_size, hidden),
    }


def by_library(buffers: Buffers) -> None:
    """Multiply by the library."""
    torch.mm(buffers.x, buffers.weight.T, out=buffers.out)


def by_tiles(config: TileConfig, buffers: Buffers) -> None:
    """Multiply by mrv1's tiles."""
    call = LinearCall(
        x=buffers.x, weight=buffers.weight, out=buffers.out, bias=None, norm_weight=None, eps=1e-6,
        residual=None, gate=0, out_norm_weight=None, normed_out=None, prefetch=None,
        order=None,
    )  # fmt: skip
    multiply_tiles(call, config)


@contextmanager
def library(name: str) -> Iterator[None]:
    """Let torch call the library in one of its two ways inside."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def measure_product(num_in: int, num_out: int, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Return the median microseconds of each variant, and the operations per second.

    Raises:
        WrongResultError: two variants differ by more than rounding.
    """
    device = torch.device("cuda")
    new = partial(torch.randn, dtype=torch.bfloat16, device=device)
    num_sets = max(2, min(64, WEIGHT_BYTES // (2 * num_in * num_out)))
    sets = [
        Buffers(
            new(num_tokens, num_in),
            new(num_out, num_in) * num_in**-0.5,
            torch.empty(num_tokens, num_out, dtype=torch.bfloat16, device=device),
        )
        for _ in range(num_sets)
    ]
    flops = 2 * num_tokens * num_in * num_out
    count = max(num_sets, min(100, int(REPLAY_S / (flops / FLOPS + LAUNCH_S))))
    replays, expected = {}, None

    def add(name: str, launch: Callable[[Buffers], None]) -> None:
        nonlocal expected
        sets[0].out.fill_(torch.nan)
        replays[name] = capture([partial(launch, each) for each in sets], count, device)
        replays[name].run()
        found = sets[0].out.float()
        expected = found if expected is None else expected
        difference = float((found - expected).abs().max() / expected.abs().max())
        if not difference <= MAX_DIFFERENCE:
            raise WrongResultError(f"{name}: expected a difference <= 0.02, got {difference}")

    for name in LIBRARIES:
        with library(name):
            add(name, by_library)
    for config in CONFIGS:
        add(f"tiles {config.tile_tokens}x{config.tile_rows}", partial(by_tiles, config))
    us = {name: timing.median_us for name, timing in measure(replays, repeats, device).items()}
    tiles = min(time for name, time in us.items() if name.startswith("tiles"))
    return {
        "us": us,
        "flops_per_s": flops / us["cublas"] * 1e6,
        "tiles_over_library": tiles / us["cublas"],  # above 1, the library is faster
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = script_parser(__doc__, repeats=7)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    return parse_script(parser, arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure every product, and write the result."""
    options = parse(arguments)
    device = resolve_device("cuda")
    torch.manual_seed(0)
    results = []
    for shape in SHAPES:
        for name, (num_in, num_out) in products(shape).items():
            for num_tokens in map(int, options.tokens.split(",")):
                found = measure_product(num_in, num_out, num_tokens, options.repeats)
                results.append(
                    {"shape": shape, "product": name, "in": num_in, "out": num_out,
                     "tokens": num_tokens, **found}
                )  # fmt: skip
                sys.stdout.write(
                    f"{shape} {name} {num_tokens}: {found['us']['cublas']:.1f} us, "
                    f"{found['flops_per_s'] * 1e-12:.0f} TFLOP/s; tiles "
                    f"{found['tiles_over_library']:.2f} times as long\n"
                )
                torch.cuda.empty_cache()
    conditions = {
        "timer": "CUDA graph of launches on rotated buffers, events around a replay, variants in "
        "turns",
        "data": "normal",
    }
    write_result(
        options, device, "products", dtype="bfloat16", conditions=conditions, results=results
    )


if __name__ == "__main__":
    main()
