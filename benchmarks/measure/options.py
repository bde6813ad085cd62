"""Options and shapes that several benchmarks have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from mrv1.config import Dtype, LoadFormatName
from mrv1.errors import ConfigError
from mrv1.kernels.cache.contracts import hadamard_block
from mrv1.kernels.cache.formats import PageFormat
from mrv1.kernels.cache.kv_layout import BLOCK_SIZES
from mrv1.provenance import provenance

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

SCALE_BYTES = torch.float32.itemsize

KVDtype = Literal["auto", "fp8_e4m3", "int4"]
"""A cache of the inputs' dtype, or of e4m3 codes with scales."""


def script_parser(doc: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """Return a parser of what every script takes that writes one result; ``doc`` is its own."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--commit", help="commit of the source; default: ask git")
    return parser


def parse_script(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Return the options of a ``script_parser``; its output's folder must exist."""
    options = parser.parse_args(arguments)
    if not options.output.parent.is_dir():
        parser.error(f"output: expected an existing directory, got {options.output.parent}")
    return options


def write_result(
    options: argparse.Namespace,
    device: torch.device,
    op: str,
    *,
    conditions: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    **about: object,
) -> None:
    """Write the result of a ``parse_script``'s script, where and how it was measured with it."""
    result = {
        "op": op,
        "schema": 1,
        **about,
        **provenance(device, options.commit),
        "conditions": {
            **conditions, "repeats": options.repeats, "clocks": "as found, not locked"
        },
        "results": results,
    }  # fmt: skip
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of every benchmark."""

    device: str = "auto"
    seed: int = 0
    """Seed of data, weights and prompts."""
    commit: str | None = None
    """Commit of the source; None asks git."""

    def check_least(self, **least: int) -> None:
        """Raise ``ConfigError`` if a field is below its least value."""
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"{name}: expected >= {value}, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointBench(BenchOptions):
    """Options of benchmarks in which engines in processes of their own share a checkpoint."""

    shape: str | None = "qwen3-0.6b"
    """Name in ``SHAPES``, written as a checkpoint of random weights; None = ``model``."""
    model: str | None = None
    """Checkpoint to run instead of a shape."""
    load_format: LoadFormatName = "auto"
    """``dummy``: only the shape's ``config.json`` is written, and each engine makes up weights: of
    its own, where a benchmark does not have all make up the same."""
    tensor_parallel_size: int = 1
    """GPUs of each engine."""
    dtype: Dtype = "auto"
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None

    def check_checkpoint(self) -> None:
        """Raise ``ConfigError`` unless there is a shape or a checkpoint, not both."""
        if (self.shape is None) == (self.model is None):
            raise ConfigError(
                f"shape, model: expected one of the two, got {self.shape!r} and {self.model!r}"
            )
        self.check_least(tensor_parallel_size=1)

    def engine_model(self) -> dict[str, Any]:
        """Return the options of the model that any engine takes under these names."""
        return {
            "load_format": self.load_format,
            "tensor_parallel_size": self.tensor_parallel_size,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBench(BenchOptions):
    """Options of every benchmark of one kernel."""

    peers: tuple[str, ...] = ()
    """Other implementations to measure too."""
    repeats: int = 50
    """Samples of each variant, after one that is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBench(KernelBench):
    """Options of the benchmarks of one layer's paged cache."""

    dtype: str = "bfloat16"
    """Dtype of the inputs: a key of ``DTYPES``."""
    kv_dtype: KVDtype = "auto"
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    def __post_init__(self) -> None:
        """Check the fields that kernels do not check, or not under the option's name."""
        for name, choices in (("dtype", DTYPES), ("kv_dtype", get_args(KVDtype))):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size: expected one of {BLOCK_SIZES}, got {self.block_size}")
        self.check_least(num_q_heads=1, num_kv_heads=1, head_dim=16, repeats=1)

    @property
    def shape(self) -> dict[str, Any]:
        """Fields of a ``CacheCase``."""
        names = [field.name for field in fields(CacheCase) if field.name != "kv_scale"]
        return {name: getattr(self, name) for name in names} | {"dtype": DTYPES[self.dtype]}

    def conditions(self) -> dict[str, object]:
        """Return the conditions that the figures depend on, for the result."""
        names = ("num_q_heads", "num_kv_heads", "head_dim", "block_size")
        scales = "one per token and head, in the quarter variant per quarter of a block and head"
        if self.kv_dtype == "auto":
            scales = "none"
        if self.kv_dtype == "int4":
            scales = "one per token and head, with a zero in its low bits"
        return {name: getattr(self, name) for name in names} | {"kv_scales": scales}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCase:
    """Shape of one layer's heads and cache."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    """Dtype of the inputs."""
    kv_dtype: KVDtype = "auto"
    kv_scale: Literal["token", "quarter"] = "token"
    """What shares a scale in an fp8 cache, as in ``EngineConfig``."""

    @property
    def page_format(self) -> PageFormat:
        """How the cache stores K and V."""
        return PageFormat.named(self.kv_dtype, self.kv_scale, self.dtype)

    @property
    def has_scales(self) -> bool:
        """Whether the cache holds codes with scales."""
        return self.page_format.has_scales

    @property
    def has_quarters(self) -> bool:
        """Whether the cache may have a scale per quarter of a block instead."""
        return self.has_scales and "quarter" in self.page_format.granularities

    @property
    def hadamard(self) -> int:
        """Channels of the blocks in which models mix q and k before they write such a cache."""
        return hadamard_block(self.head_dim, self.head_dim) if self.page_format.mixes_keys else 0

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of K and V in the cache."""
        return self.page_format.dtype

    @property
    def scale_share(self) -> float:
        """Bytes of scales per head's K, or V, of one token in the cache; an exact number."""
        scales = self.page_format.scales_per_block(self.block_size)
        return SCALE_BYTES * scales / self.block_size

    @property
    def vector_bytes(self) -> float:
        """Bytes of one head's K, or V, of one token in the cache, with its share of scales."""
        return self.page_format.vector_bytes(self.head_dim) + self.scale_share
