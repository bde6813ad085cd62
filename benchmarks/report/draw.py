"""A chart as a picture, by matplotlib."""

from __future__ import annotations

import hashlib
import io
import re
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.report.charts import Chart, Panel, Series, series_range
from mrv1.calibration.plot import require_matplotlib

WIDTH_IN, PANEL_IN, TITLE_IN = 8.6, 3.0, 0.5
LABEL_SHARE = 0.24
"""Of the width, to the right of the axes: the names of the lines."""

COLORS = {
    "mrv1": "#1f5fbf",
    "mrv1, deterministic": "#6ea2e6",
    "mrv1, unquantized cache": "#0f9a9a",
    "mrv1, norm and rope too": "#6ea2e6",
    "mrv1, a scale per quarter": "#6ea2e6",
    "mrv1, the draw alone": "#6ea2e6",
    "flash-attn-3": "#d95f02",
    "flash-attn-3, bf16 cache": "#d95f02",
    "flashinfer": "#2b8a5f",
    "vllm-triton": "#8e4fae",
    "vllm-triton, scales apart": "#b98fce",
    "vllm-mask": "#8e4fae",
    "torch SDPA": "#7a7a7a",
    "torch": "#7a7a7a",
}
"""Of variants that stand in several pictures."""

OTHER_COLORS = ("#d95f02", "#6ea2e6", "#a8820f", "#c27ba0", "#2b8a5f", "#7a7a7a", "#8e4fae")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # texts, not outlines of glyphs: a third of the bytes
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 9.5,
}
LABEL_GAP = 0.075
"""Least distance of two names, in heights of the axes."""


def digest(chart: Chart) -> str:
    """Return what stands in a picture for the data it shows."""
    return f"data sha256:{hashlib.sha256(chart.data.encode()).hexdigest()}"


def drawn_digest(picture: str) -> str | None:
    """Return the digest in a picture, or None if it has none."""
    found = re.search(r"data sha256:[0-9a-f]{64}", picture)
    return found and found[0]


def draw(chart: Chart) -> str:
    """Return the chart as an SVG: axes with units, a name at the end of each line."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context(STYLE | {"svg.hashsalt": chart.name}):
        metadata = {"Date": None, "Description": digest(chart)}
        _figure(chart).savefig(buffer, format="svg", metadata=metadata)
    return "\n".join(line.strip() for line in buffer.getvalue().splitlines()) + "\n"


def plot(chart: Chart, path: Path) -> None:
    """Write the chart as a PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        _figure(chart).savefig(path, format="png", dpi=150)


def _figure(chart: Chart) -> Any:  # noqa: ANN401 - matplotlib is imported when it draws
    from matplotlib.figure import Figure

    heights = [_height(panel) for panel in chart.panels]
    height = sum(heights) + TITLE_IN
    figure = Figure(figsize=(WIDTH_IN, height), facecolor="white")
    figure.text(0.02, 1 - 0.3 / height, chart.title, fontsize=11.5, weight="bold")
    top = height - TITLE_IN
    for panel, own in zip(chart.panels, heights, strict=True):
        below = _below(panel)
        inside = own - below - (0.35 if panel.title else 0.1)
        bottom = (top - own + below) / height
        left = 0.39 if panel.is_bars else 0.12
        right = 0.08 if panel.is_bars else LABEL_SHARE
        axes = figure.add_axes((left, bottom, 1 - left - right, inside / height))
        _bars(axes, panel) if panel.is_bars else _lines(axes, panel)
        axes.set_title(panel.title, fontsize=9.5, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        top -= own
    return figure


def _height(panel: Panel) -> float:
    """Return the inches of a panel, with what stands below its axes."""
    return 0.34 * len(panel.ticks) + 0.8 if panel.is_bars else PANEL_IN + _below(panel) - 0.6


def _is_tilted(panel: Panel) -> bool:
    """Whether the labels of the ticks are too long to stand side by side."""
    return not panel.is_bars and sum(len(label) + 3 for _, label in panel.ticks) > 80


def _below(panel: Panel) -> float:
    """Return the inches below the axes: labels of ticks, which long ones are tilted, and of x."""
    if not _is_tilted(panel):
        return 0.6
    return 0.45 + 0.065 * max(len(label) for _, label in panel.ticks)


def _lines(axes: Any, panel: Panel) -> None:  # noqa: ANN401 - matplotlib is imported when it draws
    colors = cycle(OTHER_COLORS)
    low, high = series_range(panel)
    first, last = panel.ticks[0][0], panel.ticks[-1][0]
    has_notes = any(series.notes for series in panel.series)
    margin = (0.24 if has_notes else 0.03) * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)
    if panel.scale == "log":
        axes.set_yscale("log")
        axes.set_ylim(*((low / 3, high * 2.5) if has_notes else (low / 2, high * 1.6)))
    else:
        axes.set_ylim(0, high * 1.12)
    ends = []
    for number, series in enumerate(panel.series):
        color = COLORS.get(series.name) or next(colors)
        is_ours = series.name.startswith("mrv1")
        xs, ys = zip(*series.points, strict=True)
        axes.plot(
            xs, ys, color=color, zorder=3 if is_ours else 2,
            linewidth=2.4 if series.name == "mrv1" else 1.4,
            marker="o" if len(xs) < 40 else "", markersize=4,
        )  # fmt: skip
        if series.spreads:
            lows, highs = zip(*series.spreads, strict=True)
            axes.vlines(xs, lows, highs, color=color, linewidth=5, alpha=0.4)
        # Beside the line, where it does not pass: the first line's notes above, the others' below.
        side = 1 if number == 0 else -1
        is_left = (ys[-1] > ys[0]) == (side > 0)
        for point, note in zip(series.points, series.notes, strict=bool(series.notes)):
            axes.annotate(
                note, point, xytext=(-5 if is_left else 5, 5 * side), textcoords="offset points",
                ha="right" if is_left else "left", va="bottom" if side > 0 else "top",
                color=color, fontsize=9,
            )  # fmt: skip
        ends.append((_place(axes, series), series.name, color))
    _name_ends(axes, ends)
    axes.set_xticks([x for x, _ in panel.ticks], [label for _, label in panel.ticks])
    if _is_tilted(panel):
        axes.tick_params(axis="x", labelrotation=45)
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    _format_y(axes, panel)
    axes.grid(visible=True, alpha=0.25)


def _place(axes: Any, series: Series) -> float:  # noqa: ANN401
    """Return where a line ends, in heights of the axes."""
    end = axes.transData.transform(series.points[-1])
    return float(axes.transAxes.inverted().transform(end)[1])


def _name_ends(axes: Any, ends: list[tuple[float, str, str]]) -> None:  # noqa: ANN401
    """Write each line's name beside its end, moved apart where ends are close."""
    ends = sorted(ends)
    places = [place for place, _, _ in ends]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + LABEL_GAP)
    if places and places[-1] > 1:
        places[-1] = 1.0
        for index in range(len(places) - 2, -1, -1):
            places[index] = min(places[index], places[index + 1] - LABEL_GAP)
    for place, (_, name, color) in zip(places, ends, strict=True):
        axes.text(
            1.01, place, name, transform=axes.transAxes, color=color, va="center",
            weight="bold" if name == "mrv1" else "normal",
        )  # fmt: skip


def _format_y(axes: Any, panel: Panel) -> None:  # noqa: ANN401
    from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

    if panel.scale == "share":
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        return
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _bars(axes: Any, panel: Panel) -> None:  # noqa: ANN401
    for series in panel.series:
        ((place, length),) = series.points
        color = COLORS["mrv1"] if series.name.startswith("mrv1") else OTHER_COLORS[0]
        axes.barh(place, length, height=0.6, color=color)
        axes.annotate(
            series.notes[0], (length, place), xytext=(4, 0), textcoords="offset points",
            va="center", color=color,
        )  # fmt: skip
    axes.set_yticks([place for place, _ in panel.ticks], [label for _, label in panel.ticks])
    axes.set_xlim(0, series_range(panel)[1] * 1.1)
    if panel.scale == "ratio":
        axes.axvline(1, color="grey", linewidth=1, zorder=0)
    axes.invert_yaxis()
    axes.set_xlabel(panel.y_label)
