"""Results without a table of their own: what they are, their conditions, and short tables."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.report.columns import table
from benchmarks.report.files import ResultFile

ABOUT = {
    "attempts": "optimizations that were tried, their expected and their measured gains",
    "before-after": "two commits on one machine, before and after a refactor",
    "before-after-house": "two commits on one machine, before and after the house shrank",
    "before-after-attention": "cells of attention before and after they got kernels of their own",
    "accuracy": "two commits' errors against float64: prefill's log-sum-exp with large scores, "
    "and float32 `linear` over torch's",
    "accuracy-linear": "errors of float32 `linear` over torch's, before and after its sum of "
    "steps was compensated",
    "lora": "products of an 8B layer with adapters beside those without",
    "lora-engine": "an 8B engine's steps with adapters beside those of one made without",
    "draft-heads": "an EAGLE-3 head beside plain decoding, with a trained head's acceptance",
    "llama3-8b-fp8-engines": "whole engines with e4m3 weights, and vLLM in full precision",
    "grammars": "keywords of JSON schemas and times of two grammar engines",
    "smollm2": "SmolLM2's log-probabilities against float32 transformers, by dtype and cache",
    "kv-cache-loss": "SmolLM2's loss on held-out text, by type of the KV cache",
    "recall-tasks": "calibration of SmolLM2, and its text loss by share of the KV cache",
    "sanitize": "compute-sanitizer's findings, op by op",
    "tiny_model": "how the embedded model was trained",
}
"""Name of a file, without the machine's -> what it holds."""

MAX_ROWS, MAX_COLUMNS = 16, 24
"""Lists of results with more of either are left in their files."""


def other_file(file: ResultFile) -> str:
    """Return what is known of a file of any kind, and its short lists of results as tables."""
    about = ABOUT.get(file.stem, ABOUT.get(file.stem.rpartition("-")[0], file.kind))
    known = [f"`{file.name}`: {about or 'results of no named kind'}", file.device]
    conditions = _conditions(file.result.get("conditions"))
    known += [conditions] if conditions else []
    blocks = [f"{'; '.join([*known, file.origin])}."]
    for value in file.result.values():
        if isinstance(value, list) and 0 < len(value) <= MAX_ROWS:
            rows = [_scalars(each) for each in value if isinstance(each, dict)]
            names = list(dict.fromkeys(name for row in rows for name in row))
            if 0 < len(names) <= MAX_COLUMNS:
                cells = [[row.get(name, "") for name in names] for row in rows]
                blocks.insert(0, table(names, cells, [False] * len(names)))
    return "\n\n".join(blocks)


def _conditions(value: object) -> str:
    """Return conditions as text."""
    if not isinstance(value, dict):
        return str(value or "")
    return ", ".join(f"{name}: {_text(each)}" for name, each in value.items())


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _scalars(entry: dict[str, Any]) -> dict[str, str]:
    """Return the texts and numbers of an entry, and those of the dicts in it."""
    found: dict[str, str] = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": text for key, text in _scalars(value).items()}
        elif not isinstance(value, list):
            found[name] = _text(value).replace("|", "\\|")
    return found
