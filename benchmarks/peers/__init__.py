"""Adapters of other implementations, measured against ours; packages are imported on first use.

A peer's preparations (a plan, a cache in its own layout, indices in its own form) run before its
launches and are not timed. mrv1 does not depend on the packages of peers: they have no types here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from benchmarks.measure.options import KVDtype
from mrv1.errors import ConfigError
from mrv1.provenance import version_of

Adapter = TypeVar("Adapter")

NOT_INSTALLED = "not installed"
PACKAGES = {"flashinfer": "flashinfer-python"}
"""Module -> its distribution, where the two have different names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer(Generic[Adapter]):
    """Somebody else's kernel."""

    module: str
    """Module that must be importable."""
    adapter: Adapter
    """Makes the peer's launches on a case's data."""
    kv_dtypes: tuple[KVDtype, ...] = ("auto",)
    """Dtypes of the caches that the peer reads or writes."""
    static_scale_error: float | None = None
    """For a peer whose fp8 cache has one static scale: the largest relative error that rounding
    explains, against the exact result. None = the peer reads our codes and scales."""
    extras: tuple[str, ...] = ()
    """What its adapter can do beyond the plain case, by name."""


def peer_versions(names: tuple[str, ...], peers: Mapping[str, Peer[Any]]) -> dict[str, str]:
    """Return the version of each wanted peer's package, or ``"not installed"``.

    Raises:
        ConfigError: there is no such peer.
    """
    unknown = [name for name in names if name not in peers]
    if unknown:
        raise ConfigError(f"peers: expected some of {', '.join(peers)}, got {unknown}")

    def version(module: str) -> str:
        if find_spec(module) is None:
            return NOT_INSTALLED
        return version_of(PACKAGES.get(module, module)) or "unknown"

    return {name: version(peers[name].module) for name in names}
