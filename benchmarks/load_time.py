"""Time how long weights take to load: a shape in full precision, and as int4 codes.

python -m benchmarks.load_time OUTPUT.json [--shape llama3-8b] [--repeats 5] [--folder DIR]

Both checkpoints are written to ``--folder``, in files of a quarter of the layers, and read once,
so that the page cache has them; then they are loaded in turns. int4 codes are those of
compressed-tensors (``pack-quantized``, groups of 128). A load ends when all weights are on the
device; caches, profiles and graphs, which follow in an engine's start, are not included.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from benchmarks.engines.checkpoint import BenchQuantization, write_config
from benchmarks.measure.options import parse_script, script_parser, write_result
from benchmarks.measure.shapes import SHAPES, shape_config
from mrv1.device import kernel_path, resolve_device
from mrv1.kernels.registry import select_ops
from mrv1.models import ModelConfig
from mrv1.models.loading import load_model
from mrv1.models.weights import checkpoint_places, empty_weights

KINDS: dict[str, BenchQuantization | None] = {"full precision": None, "int4": "int4"}
NUM_FILES = 4


def made_up(config: ModelConfig, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint, on the CPU, by name: random numbers or codes."""
    own = empty_weights(config, "meta", config.torch_dtype)
    places = checkpoint_places(config, own)
    for name, place in places.items():
        if name.endswith("weight_shape"):
            rows, words = places[name.replace("weight_shape", "weight_packed")].shape
            yield name, torch.tensor([rows, 8 * words])
        elif torch.int32 in place.dtypes:
            words_of = torch.randint(0, 2**32, place.shape, device=device)
            yield name, (words_of - 2**31).to(torch.int32).cpu()
        else:
            numbers = torch.rand(place.shape, device=device) * 0.01 + 0.01
            yield name, numbers.to(config.torch_dtype).cpu()


def write(folder: Path, shape: ModelConfig, kind: str, device: torch.device) -> int:
    """Write a checkpoint; return the bytes of its tensors."""
    write_config(folder, shape, shape.torch_dtype, KINDS[kind])
    config = ModelConfig.from_pretrained(folder)
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(NUM_FILES)]
    for name, tensor in made_up(config, device):
        _, found, rest = name.partition(".layers.")
        layer = int(rest.partition(".")[0]) if found else 0
        files[layer * NUM_FILES // config.num_layers][name] = tensor
    names: dict[str, str] = {}
    for index, of_file in enumerate(files):
        file = f"model-{index + 1:05d}-of-{NUM_FILES:05d}.safetensors"
        save_file(of_file, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(of_file, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return sum(tensor.nbytes for of_file in files for tensor in of_file.values())


def read_files(folder: Path) -> None:
    """Read all files, so that they are in the page cache."""
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> float:
    """Load a checkpoint, and return the seconds it took."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    begin = time.perf_counter()
    model = load_model(
        folder, device=device, dtype=dtype, ops=select_ops(kernel_path(device)), progress=False
    )
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    del model
    return seconds


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = script_parser(__doc__, repeats=5)
    parser.add_argument("--shape", default="llama3-8b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", help="of the checkpoints; default: the system's for such")
    return parse_script(parser, arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure both checkpoints, and write the result."""
    options = parse(arguments)
    device = resolve_device(options.device)
    shape = shape_config(options.shape)
    torch.zeros(1, device=device)  # creates the context
    with TemporaryDirectory(prefix="mrv1-load-", dir=options.folder) as within:
        folders, sizes = {}, {}
        for kind in KINDS:
            folders[kind] = Path(within, kind)
            folders[kind].mkdir()
            sizes[kind] = write(folders[kind], shape, kind, device)
            read_files(folders[kind])
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(options.repeats + 1):
            for kind, folder in folders.items():
                seconds[kind].append(load(folder, device, shape.torch_dtype))
    rows = [
        {
            "checkpoint": kind,
            "bytes": sizes[kind],
            "seconds": statistics.median(of[1:]),
            "first_s": of[0],
            "samples_s": of[1:],
        }
        for kind, of in seconds.items()
    ]
    for row in rows:
        sys.stdout.write(f"{row['checkpoint']}: {row['seconds']:.2f} s, {row['bytes']} bytes\n")
    write_result(
        options, device, "load time", shape=options.shape,
        conditions={
            "files": NUM_FILES, "page_cache": "filled", "order": "in turns", "warm_up_runs": 1
        },
        results=rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
