"""The versions of vLLM that mrv1 is tested with, and where their interfaces differ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mrv1.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """The interface of vLLM's releases of one minor version; classes are ``module:name``."""

    tested: str
    """The release that the tests run with."""
    logits_processors: tuple[str, ...]
    """Base classes of logits processors: one for each of vLLM's model runners that takes them."""
    resolves_kv_layout: bool
    """Whether vLLM asks the worker for the layouts of KV caches that it supports."""
    salvages_kv_output: bool
    """Whether an asynchronous output has the abstract method ``get_kv_connector_output``."""
    sample_args: tuple[str, ...]
    """What ``Sampler.sample`` of vLLM's second runner takes after logits and slots of rows."""
    has_profiler_factory: bool
    """Whether ``create_worker_profiler`` makes the worker's profiler, and takes limits."""


INTERFACES = {
    "0.26": Interface(
        tested="0.26.0",
        logits_processors=("vllm.v1.sample.logits_processor:LogitsProcessor",),
        resolves_kv_layout=False,
        salvages_kv_output=False,
        sample_args=("idx_mapping_np", "pos", "input_ids", "expanded_local_pos"),
        has_profiler_factory=False,
    ),
    "0.33": Interface(
        tested="0.33.0",
        logits_processors=(
            "vllm.v1.sample.logits_processor:LogitsProcessor",
            "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor",
        ),
        resolves_kv_layout=True,
        salvages_kv_output=True,
        sample_args=(
            "idx_mapping",
            "idx_mapping_np",
            "pos",
            "input_ids",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
        ),
        has_profiler_factory=True,
    ),
}


def interface_of(release: str) -> Interface:
    """Return the interface of a release, as ``"0.33.1+cu129"``; ConfigError if it is untested."""
    minor = ".".join(release.split(".")[:2])
    if minor not in INTERFACES:
        ranges = " or ".join(f"{each}.x" for each in INTERFACES)
        tested = ", ".join(each.tested for each in INTERFACES.values())
        raise ConfigError(
            f"vllm: expected {ranges} (tested: {tested}), got {release}; install one of these"
        )
    return INTERFACES[minor]


@cache
def interface() -> Interface:
    """Return the interface of the installed vLLM, unimported; ConfigError if none is tested."""
    try:
        return interface_of(version("vllm"))
    except PackageNotFoundError as error:
        raise ConfigError(
            "vllm: expected the package vllm to be installed, got none; pip install -e '.[vllm]'"
        ) from error


def resolve(name: str) -> Any:  # noqa: ANN401 - a class of vLLM
    """Return the object that ``module:name`` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
