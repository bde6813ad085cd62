"""Measure mrv1 and vLLM on the serving workloads of the report; each engine starts once.

python -m benchmarks.serving_rows FOLDER SHAPE [--engines vllm,mrv1,mrv1-fp8] [--rows NAME,...]

Writes a file ``serving-SHAPE-ROW-SUFFIX.json`` for each row that an engine has finished, and again
with the figures of each further engine. An engine with an fp8 cache serves only ``FP8_ROWS``.
Needs a GPU, and vLLM for ``vllm``. Exits with 1 if an engine has failed, and with 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.engines.serving import ENGINES, ServingBench, run_workloads
from mrv1.cli.console import INTERRUPTED, write_result

LONG: dict[str, Any] = {
    "num_conversations": 16, "input_len": 8000, "input_sigma": 0.0, "output_sigma": 0.0,
    "stream_outputs": False,
}  # fmt: skip
MANY: dict[str, Any] = {
    "num_conversations": 1024, "stream_outputs": False, "repeats": 1, "warm_up": False,
}  # fmt: skip
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}

ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "llama3-8b": {
        "long-first": LONG | {"output_len": 1},
        "long": LONG | {"output_len": 128},
        "many": MANY | {"output_len": 128},
        "rate": {"num_conversations": 512, "output_len": 128, "peak_share": 0.7, "repeats": 1},
        "turns": {
            "num_conversations": 64, "num_turns": 8, "prefix_len": 2000, "input_len": 100,
            "output_len": 128, "repeats": 1, "warm_up": False,
        },
    },
    "qwen3-0.6b": {
        "many": MANY,
        "many-sampled": MANY | SAMPLED,
        "rate": {"num_conversations": 1024, "peak_share": 0.7, "repeats": 1},
        "turns": {
            "num_conversations": 64, "num_turns": 8, "prefix_len": 2000, "input_len": 100,
            "repeats": 1, "warm_up": False,
        },
    },
}  # fmt: skip
"""Shape -> row -> its workload; inputs have a median of 512 tokens, outputs of 128 or 200."""

FP8_ROWS = ("long", "many")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", choices=ROWS)
    parser.add_argument("--engines", default="vllm,mrv1,mrv1-fp8", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--rows", help="comma-separated; default: all of the shape")
    parser.add_argument("--suffix", default="h200", help="of the names of the files")
    parser.add_argument("--repeats", type=int, default=3, help="of rows that take seconds")
    parser.add_argument("--commit", help="commit of the source; default: ask git")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        parser.error(f"folder: expected an existing directory, got {options.folder}")
    rows, known = (options.rows or ",".join(ROWS[options.shape])).split(","), ROWS[options.shape]
    if unknown := [row for row in rows if row not in known]:
        parser.error(f"--rows: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    options.rows = rows
    return options


def workloads(options: argparse.Namespace) -> dict[str, ServingBench]:
    """Return the workload of each row."""
    rows = ROWS[options.shape]
    engines = options.engines.split(",")
    shared = {
        "shape": options.shape,
        "repeats": options.repeats,
        "commit": options.commit,
    }
    return {
        name: ServingBench(
            **shared | rows[name],
            engines=tuple(e for e in engines if name in FP8_ROWS or not e.endswith("-fp8")),
        )
        for name in options.rows
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, write a file for each row, and return the exit code."""
    options = parse(arguments)
    benches = workloads(options)

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")

    results: list[dict[str, Any]] = []
    for results in run_workloads([*benches.values()], say):
        for name, result in zip(benches, results, strict=True):
            if any(engine["figures"] is not None for engine in result["results"].values()):
                file = f"serving-{options.shape}-{name}-{options.suffix}.json"
                write_result(result, options.folder / file)
    for name, result in zip(benches, results, strict=True):
        if all(engine["figures"] is None for engine in result["results"].values()):
            say(f"{name}: no engine was measured, no file is written")
        for engine, ratios in result["over_vllm"].items():
            figures = {key: round(ratio, 3) for key, ratio in (ratios or {}).items()}
            sys.stdout.write(f"{name}, {engine} over vLLM: {figures}\n")
    if any(result["interrupted"] for result in results):
        return INTERRUPTED
    engines = [engine for result in results for engine in result["results"].values()]
    return int(any(engine["error"] is not None for engine in engines))


if __name__ == "__main__":
    sys.exit(main())
