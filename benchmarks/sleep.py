"""Measure what sleep, wake_up and update_weights cost, and check that outputs stay the same.

python -m benchmarks.sleep OUTPUT.json [--shape qwen3-0.6b] [--num-kv-blocks 8192]

One engine of random weights with the CUDA graphs of up to 64 requests: level 1 twice (the first
pins the host memory that torch keeps), level 2 once with weights from pageable host memory, then
an update from tensors on the device.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.shapes import SHAPES, shape_config
from mrv1 import EngineConfig, SamplingParams
from mrv1.engine.core import EngineCore
from mrv1.models import checkpoint_tensors, random_model
from mrv1.provenance import provenance

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def outputs(engine: EngineCore) -> list[tuple[int, ...]]:
    """Return the greedy tokens of six prompts of different lengths."""
    prompts = [[7 + row, 5, 9, 11] * (3 + 9 * row) for row in range(6)]
    requests = [engine.add_request(f"{row}", ids, PARAMS) for row, ids in enumerate(prompts)]
    while engine.has_unfinished_requests:
        engine.step()
    for request in requests:
        if request.error is not None:
            raise request.error
    return [tuple(request.output_token_ids) for request in requests]


def timed(call: Callable[..., object], *arguments: object) -> float:
    """Return the seconds of a call, the device's work included."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call(*arguments)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(shape: str, num_kv_blocks: int, device: torch.device) -> dict[str, Any]:
    """Return the seconds and bytes of every part."""
    config = EngineConfig(
        model="none", device=str(device), max_model_len=2048, max_num_seqs=64,
        max_num_batched_tokens=2048, num_kv_blocks=num_kv_blocks,
    )  # fmt: skip
    model = random_model(shape_config(shape), "bfloat16", device, seed=0)
    engine = EngineCore(config, model=model, progress=False)
    before = outputs(engine)

    def check(what: str) -> None:
        engine.reset_prefix_cache()
        if outputs(engine) != before:
            raise RuntimeError(f"outputs: expected those of before {what}, got others")

    check("the prefix cache")
    own = checkpoint_tensors(engine.runner.model.config, engine.runner.model.weights)
    stores = {tensor.untyped_storage() for tensor in own.values()}
    weight_bytes = sum({store.data_ptr(): store.nbytes() for store in stores}.values())
    on_host = {name: tensor.cpu().clone() for name, tensor in own.items()}
    rows: list[dict[str, Any]] = []
    for level in (1, 1, 2):
        free = torch.cuda.mem_get_info()[0]
        row: dict[str, Any] = {"level": level, "sleep_s": timed(engine.sleep, level)}
        row["freed_bytes"] = torch.cuda.mem_get_info()[0] - free
        if level == 2:
            row["wake_weights_s"] = timed(engine.wake_up, ["weights"])
            row["update_weights_s"] = timed(engine.update_weights, on_host)
        row["wake_up_s"] = timed(engine.wake_up)
        check(f"level {level}")
        rows.append(row)
    on_device = {name: tensor.to(device) for name, tensor in on_host.items()}
    engine.update_weights(on_device)  # the first copy of each shape sets kernels up
    update = timed(engine.update_weights, on_device)
    check("update_weights")
    cache_bytes = engine.runner.kv_cache.nbytes
    described = engine.runner.describe()
    engine.runner.close()
    return {
        "engine": described,
        "weight_bytes": weight_bytes,
        "kv_cache_bytes": cache_bytes,
        "results": [*rows, {"update_weights_on_device_s": update}],
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--num-kv-blocks", type=int, default=8192)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    result = {
        "op": "sleep",
        "schema": 1,
        "shape": arguments.shape,
        "weights": "random",
        **provenance(device, arguments.commit),
        "conditions": {
            "dtype": "bfloat16",
            "num_kv_blocks": arguments.num_kv_blocks,
            "order": "level 1, level 1, level 2, update from tensors on the device",
            "level_2_weights": "from pageable host memory",
            "clocks": "as found, not locked",
        },
        **measure(arguments.shape, arguments.num_kv_blocks, device),
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    for row in result["results"]:
        print(row)


if __name__ == "__main__":
    main()
