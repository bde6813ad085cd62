"""A result of ``bench attention`` as a picture: share of the bandwidth over the bytes moved."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mrv1.errors import ConfigError


def require_matplotlib() -> None:
    """Refuse to plot before anything is measured, rather than after.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot: expected the package matplotlib to be installed, got none; "
            "pip install 'mrv1[bench]'"
        )


def plot_attention(result: dict[str, Any], path: Path) -> None:
    """Write a log-log PNG of a result, one line per variant; without a GPU, of times instead.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    key, label = "share_of_copy_bandwidth", "share of the copy bandwidth"
    if result["copy_bandwidth_bytes_per_s"] is None:
        key, label = "median_us", "median time, us (no measurement)"
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, points in variant_points(result, key).items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes moved")
    axes.set_ylabel(label)
    axes.set_title(
        f"{result['mode']} attention, {result['dtype']}, KV cache {result['kv_dtype']}, "
        f"{result['device']['name']}",
        fontsize="medium",
    )
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


def variant_points(result: dict[str, Any], key: str) -> dict[str, list[tuple[int, float]]]:
    """Return (bytes moved, figure) of each variant, by rising bytes."""
    points: dict[str, list[tuple[int, float]]] = {}
    for entry in result["results"]:
        for name, variant in entry["variants"].items():
            points.setdefault(name, []).append((variant["bytes_moved"], variant[key]))
    return {name: sorted(pairs) for name, pairs in points.items()}
