"""Results as pictures: shares of the copy bandwidth, and times of tokens in serving."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from mrv1.calibration.plot import require_matplotlib


def plot_attention(result: dict[str, Any], path: Path) -> None:
    """Write a PNG of a result: a column per cell, a mark per variant; times if there is no GPU.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    has_shares = result["copy_bandwidth_bytes_per_s"] is not None
    labels, series = cells_by_bytes(
        result, "share_of_copy_bandwidth" if has_shares else "median_us"
    )
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (name, values), marker in zip(series.items(), itertools.cycle("os^Dvxp*")):
        # The columns are no scale: a line means nothing, mrv1's only makes its marks stand out.
        line = "-" if name == "mrv1" else "none"
        heights = [math.nan if value is None else value for value in values]
        axes.plot(labels, heights, marker=marker, linestyle=line, label=name)
    if has_shares:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
    axes.set_xlabel("requests x tokens of context, by bytes to move")
    axes.set_ylabel(
        "share of the copy bandwidth" if has_shares else "median time, us (no measurement)"
    )
    axes.tick_params(axis="x", labelrotation=60)
    axes.set_title(
        f"{result['mode']} attention, {result['dtype']}, KV cache {result['kv_dtype']}, "
        f"{result['device']['name']}",
        fontsize="medium",
    )
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, format="png", dpi=150)


def cells_by_bytes(
    result: dict[str, Any], key: str
) -> tuple[list[str], dict[str, list[float | None]]]:
    """Return the cells' labels by rising bytes, and each variant's figure for every cell.

    Cells of equal bytes are in order of the batch. A variant that did not run a cell has None.
    """
    entries = sorted(result["results"], key=lambda e: (e["bytes_moved"], e["batch"]))
    names = dict.fromkeys(name for entry in entries for name in entry["variants"])
    figures = {
        name: [entry["variants"].get(name, {}).get(key) for entry in entries] for name in names
    }
    return [cell_label(entry) for entry in entries], figures


def cell_label(entry: dict[str, Any]) -> str:
    """Return "batch x context", or "batch x queries of context" for the end of a prompt.

    Requests of one query in the same launch come behind: "+ number x context".
    """
    context = f"{entry['context']}"
    if entry.get("shortest"):
        context = f"{entry['shortest']} to {context}"
    if 1 < entry["query_len"] < entry["context"]:
        context = f"{entry['query_len']} of {context}"
    label = f"{entry['batch']} x {context}"
    if entry.get("num_decodes"):
        label += f" + {entry['num_decodes']} x {entry['decode_context']}"
    return label


def plot_serving(result: dict[str, Any], path: Path) -> None:
    """Write a PNG of a result of ``bench serving``: the share of times up to each time.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from benchmarks.engines.serving import arrivals

    names = {"ttft_ms": "first token", "itl_ms": "between tokens", "e2el_ms": "last token"}
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(names), sharey=True)
    for axes, (name, label) in zip(panels, names.items(), strict=True):
        for engine, measured in result["results"].items():
            times = measured["figures"] and measured["figures"][name]
            if times:
                axes.plot(times["percentiles"], range(101), label=engine)
                axes.legend(fontsize="small")
        axes.set_xlabel(f"{label}, ms")
        axes.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("percentile")
    conditions = result["conditions"]
    figure.suptitle(
        f"{result['shape']}, {result['dtype']}, {result['device']['name']}: "
        f"{conditions['num_conversations']} conversations of {conditions['num_turns']} turns, "
        f"{arrivals(result)}",
        fontsize="medium",
    )
    figure.savefig(path, format="png", dpi=150)
