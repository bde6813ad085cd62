"""Time the start of an engine with an empty Triton cache, after a compilation ahead, and again.

python -m benchmarks.start [--shape qwen3-0.6b] [--commit HASH] [--output FILE.json]

Each part is a process of its own, with random weights and the default options. ``empty`` starts
with a new folder as Triton's cache, and ``filled`` with what ``empty`` has left. ``compile`` does
in another new folder what ``mrv1 compile`` does, and ``compiled`` starts with that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.shapes import shape_config
from mrv1.config import EngineConfig
from mrv1.device import device_info, resolve_device
from mrv1.engine import EngineCore
from mrv1.environment import child_environment
from mrv1.headwise import HeadPolicy
from mrv1.models import random_model
from mrv1.provenance import provenance
from mrv1.runner.compile_ahead import KernelSet, compile_kernels

PARTS = ("empty", "filled", "compile", "compiled")


def compile_shape(shape: str) -> dict[str, Any]:
    """Compile the kernels of a shape; return their number and the seconds."""
    model = shape_config(shape)
    kernels = KernelSet(
        config=EngineConfig(model=shape),
        model_config=model,
        head_policy=HeadPolicy.of_layer_windows(model.layer_windows, model.num_kv_heads),
        dtype=model.torch_dtype,
        gpu=device_info(resolve_device("cuda")),
    )
    started = time.perf_counter()
    num_kernels = compile_kernels(kernels, lambda done, total: None)
    return {"seconds": time.perf_counter() - started, "num_kernels": num_kernels}


def start_shape(shape: str) -> dict[str, Any]:
    """Start an engine; return the seconds of each part, and the kernels this process compiled.

    Imports and the device's context are not included.
    """
    from mrv1.kernels._base.triton import triton

    missed: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: object) -> None:  # noqa: ANN401 - Triton's
        if not cache_hit:
            missed.append(src.name)

    triton.knobs.compilation.listener = listen
    device = resolve_device("cuda")
    torch.zeros(1, device=device)
    started = time.perf_counter()
    model = random_model(shape_config(shape), "auto", device, seed=0)
    core = EngineCore(EngineConfig(model=shape), model=model)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    parts = core.runner.start_seconds
    core.runner.close()
    return {"seconds": seconds, "parts": parts, "compiled_in_process": missed}


def measure(shape: str, folder: Path) -> dict[str, Any]:
    """Return the result of every part, each measured in a process of its own."""
    results = {}
    for part in PARTS:
        cache = "ahead" if part.startswith("compile") else "start"
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.start", "--shape", shape, "--part", part],
            env=child_environment(TRITON_CACHE_DIR=str(folder / cache)),
            stdout=subprocess.PIPE,
            check=True,
        )
        results[part] = json.loads(child.stdout)
        sys.stderr.write(f"{part}: {results[part]['seconds']:.1f} s\n")
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every part, or one in this process, and print or write the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--part", choices=PARTS, help="measure one part, in this process")
    parser.add_argument("--commit", help="commit of the source; default: ask git")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    if options.part is not None:
        run = compile_shape if options.part == "compile" else start_shape
        print(json.dumps(run(options.shape)))
        return
    device = resolve_device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options.shape, Path(folder))
    result = {"op": "start", "shape": options.shape, "results": results}
    text = json.dumps(result | provenance(device, options.commit), indent=2)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
