"""Measure a layer's experts: their products, and with routing and sum, beside vLLM's kernel.

python -m benchmarks.experts OUTPUT.json [--tokens 1,8,32,64,256,4096] [--repeats 20]

Tokens are routed by a random router, as evenly as a trained one routes them; the number of active
experts stands beside its expectation. The experts of gpt-oss-20b are MXFP4 codes, with biases.
``products`` are the two products with the routing given, ``layer`` is all of it. Bytes are the
weights of the active experts, each read once. vLLM computes its products and their weighted sum.
Needs a GPU with bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure.floor import active_experts, copy_bandwidth
from benchmarks.measure.shapes import shape_config
from benchmarks.measure.timing import WrongResultError, capture, measure
from mrv1 import kernels
from mrv1.device import resolve_device
from mrv1.kernels import QuantizedWeight, Routing, reference
from mrv1.kernels.experts.contracts import ExpertActivation
from mrv1.provenance import provenance

SHAPES = ("qwen3-30b-a3b", "ernie-21b-a3b", "gpt-oss-20b")
NUM_SETS = 4
"""Inputs with routes of their own, in turns; one set of weights is many times a GPU's L2 cache."""
MAX_ERROR = 0.01
"""Largest relative error of the norm of a layer's output: bfloat16 keeps 8 bits."""
CHECKED = 16
"""Tokens whose results are checked."""


class Layer(NamedTuple):
    """The weights of a layer's experts."""

    routing: Routing
    router: torch.Tensor
    gate_up: torch.Tensor | QuantizedWeight
    down: torch.Tensor | QuantizedWeight
    activation: ExpertActivation = "silu_and_mul"
    logits_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's weights, without biases."""
        return (self.gate_up.nbytes + self.down.nbytes) // self.gate_up.shape[0]

    def products(self, x: torch.Tensor, ids: torch.Tensor, ops: Any) -> torch.Tensor:  # noqa: ANN401
        """Return the product of each pair of a token and an expert."""
        activated = ops.expert_linear(
            x, self.gate_up, ids, bias=self.gate_up_bias, activation=self.activation
        )
        return ops.expert_linear(  # type: ignore[no-any-return]
            activated, self.down, ids, bias=self.down_bias
        )

    def route(self, x: torch.Tensor, ops: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        """Return each token's experts and their weights."""
        return ops.route_experts(  # type: ignore[no-any-return]
            x, self.router, self.routing, logits_bias=self.logits_bias
        )

    def run(self, x: torch.Tensor, hidden: torch.Tensor, ops: Any) -> torch.Tensor:  # noqa: ANN401
        """Return ``hidden`` plus the layer's result, as a step computes it."""
        ids, weights = self.route(x, ops)
        return ops.combine_experts(  # type: ignore[no-any-return]
            self.products(x, ids, ops), weights, residual=hidden,
            norm_weight=torch.ones_like(hidden[0]), normed_out=torch.empty_like(hidden),
        )  # fmt: skip


def make_layer(shape: str, device: torch.device) -> Layer:
    """Return random weights of a shape."""
    config = shape_config(shape)
    experts, hidden = config.experts, config.hidden_size
    if experts is None:
        raise ValueError(f"shape: expected one with experts, got {shape}")
    routing, width = experts.routing, experts.intermediate_size
    count = routing.num_experts + routing.num_shared
    new = partial(torch.randn, dtype=torch.bfloat16, device=device)
    router = new(routing.num_experts, hidden) * hidden**-0.5
    if config.quantization is not None:
        return Layer(
            routing,
            router,
            random_codes(count, 2 * width, hidden, device),
            random_codes(count, hidden, width, device),
            experts.activation,
            logits_bias=new(count) * 0.1,
            gate_up_bias=new(count, width, 2).transpose(1, 2),
            down_bias=new(count, hidden),
        )
    return Layer(
        routing,
        router if routing.rounds_logits else router.float(),
        (new(2, count, width, hidden) * hidden**-0.5).movedim(1, 0),
        (new(hidden, count, width) * width**-0.5).movedim(1, 0),
    )


def random_codes(
    num_experts: int, num_out: int, num_in: int, device: torch.device
) -> QuantizedWeight:
    """Return MXFP4 experts whose values are about ``num_in**-0.5``."""
    lead = (num_experts, num_out)
    exponent = 127 - round(log2(3.3 * num_in**0.5))  # codes have a root mean square of 3.3
    new = partial(torch.randint, dtype=torch.uint8, device=device)
    return QuantizedWeight(
        code="e2m1",
        codes=new(256, (*lead, num_in // 2)),
        scales=new(exponent - 1, exponent + 2, (*lead, num_in // 32)),
        inputs_per_scale=32,
        dtype=torch.bfloat16,
    )


def peer_launches(
    layer: Layer, xs: list[torch.Tensor], routes: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[Callable[[], object]] | None:
    """Return vLLM's products and their sum; None = it has none, or is not installed."""
    gate_up, down = layer.gate_up, layer.down
    if isinstance(gate_up, QuantizedWeight) or isinstance(down, QuantizedWeight):
        return None
    try:
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    except ImportError:
        return None
    gate_up, down = gate_up.flatten(1, 2).contiguous(), down.contiguous()
    return [
        partial(fused_experts, x, gate_up, down, weights, ids)
        for x, (ids, weights) in zip(xs, routes, strict=True)
    ]


def measure_layer(
    shape: str, layer: Layer, num_tokens: int, repeats: int, device: torch.device
) -> dict[str, Any]:
    """Return the median microseconds of each variant, and the bytes.

    Raises:
        WrongResultError: the layer's result is wrong.
    """
    new = partial(torch.randn, dtype=torch.bfloat16, device=device)
    hidden_size = layer.gate_up.shape[-1]
    xs = [new(num_tokens, hidden_size) for _ in range(NUM_SETS)]
    hidden = new(num_tokens, hidden_size)
    check(layer, xs[0][:CHECKED], hidden[:CHECKED])
    routes = [layer.route(x, kernels) for x in xs]
    variants: dict[str, list[Callable[[], object]] | None] = {
        "products": [
            partial(layer.products, x, ids, kernels)
            for x, (ids, _) in zip(xs, routes, strict=True)
        ],
        "layer": [partial(layer.run, x, hidden, kernels) for x in xs],
        "vllm products and sum": peer_launches(layer, xs, routes),
    }
    replays = {
        name: capture(launches, NUM_SETS, device)
        for name, launches in variants.items()
        if launches
    }
    us = {name: timing.median_us for name, timing in measure(replays, repeats, device).items()}
    active = sum(ids.unique().numel() for ids, _ in routes) / NUM_SETS
    expected = active_experts(shape_config(shape), num_tokens) + layer.routing.num_shared
    return {
        "us": us,
        "active_experts": active,
        "expected_experts": expected,
        "bytes": active * layer.expert_bytes,
    }


def check(layer: Layer, x: torch.Tensor, hidden: torch.Tensor) -> None:
    """Raise unless a layer's result equals the oracle's."""
    found, expected = (layer.run(x, hidden, ops).float() for ops in (kernels, reference))
    error = float((found - expected).norm() / expected.norm())
    if not error <= MAX_ERROR:
        raise WrongResultError(f"layer: expected an error <= {MAX_ERROR}, got {error}")


def main(arguments: list[str] | None = None) -> None:
    """Measure every shape and number of tokens, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokens", default="1,8,32,64,256,4096")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit", help="commit of the source; default: ask git")
    options = parser.parse_args(arguments)
    device = resolve_device("cuda")
    torch.manual_seed(0)
    bandwidth, results = copy_bandwidth(device), []
    for shape in SHAPES:
        layer = make_layer(shape, device)
        for num_tokens in map(int, options.tokens.split(",")):
            found = measure_layer(shape, layer, num_tokens, options.repeats, device)
            shares = {
                name: found["bytes"] / (time * 1e-6) / bandwidth
                for name, time in found["us"].items()
                if bandwidth
            }
            results.append(
                {"shape": shape, "tokens": num_tokens, **found, "share_of_copy_bandwidth": shares}
            )
            times = ", ".join(f"{name} {time:.1f}" for name, time in found["us"].items())
            sys.stdout.write(f"{shape} {num_tokens}: {times} us; {found['active_experts']:.0f} "
                             f"experts, {shares.get('products', 0):.0%}\n")  # fmt: skip
        del layer
        torch.cuda.empty_cache()
    result = {
        "op": "experts",
        "schema": 1,
        "dtype": "bfloat16",
        **provenance(device, options.commit),
        "copy_bandwidth_bytes_per_s": bandwidth,
        "vllm": version("vllm") if "vllm products and sum" in results[0]["us"] else None,
        "conditions": {
            "repeats": options.repeats,
            "timer": "CUDA graph of launches on rotated inputs, events around a replay, variants "
            "in turns",
            "data": "normal; routes of a random router",
            "clocks": "as found, not locked",
        },
        "results": results,
    }
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
