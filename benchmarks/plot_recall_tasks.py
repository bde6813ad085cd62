"""Draw recall over the share of the KV cache: ours, and rivals at the same share.

python -m benchmarks.plot_recall_tasks OUTPUT.png TASKS.json [RIVALS.json ...]

Rivals that mask entries and keep their bytes are drawn hollow.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Points = list[tuple[float, list[float]]]


def points(results: list[dict[str, Any]], share: str) -> dict[str, Points]:
    """Return each series' points: the share, and mean and interval of the score over full."""
    found: dict[str, Points] = defaultdict(list)
    for entry in results:
        if "of_full" in entry:
            name = entry.get("method") or f"mrv1, {entry['length']:,} tokens"
            found[name].append((entry[share], entry["of_full"]))
    return {name: sorted(each) for name, each in found.items()}


def draw(axes: Any, name: str, series: Points, **style: Any) -> None:  # noqa: ANN401
    """Draw a series with its intervals."""
    shares, scores = zip(*series, strict=True)
    means, lows, highs = zip(*scores, strict=True)
    errors = [
        [mean - low for mean, low in zip(means, lows, strict=True)],
        [high - mean for mean, high in zip(means, highs, strict=True)],
    ]
    axes.errorbar(shares, means, errors, label=name, capsize=2, **style)


def main(arguments: list[str] | None = None) -> None:
    """Write the picture: policies by length on the left, beside rivals on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("rivals", type=Path, nargs="*")
    options = parser.parse_args(arguments)
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if options.rivals else 1, sharey=True, squeeze=False)[0]
    tasks = json.loads(options.tasks.read_text("utf-8"))
    for name, series in points(tasks["results"], "share_of_bytes").items():
        draw(panels[0], name, series, marker="o")
    panels[0].set_xlabel("share of the KV cache's bytes")
    panels[0].set_ylabel("recall, of all heads full")
    if options.rivals:
        seen: set[str] = set()
        for path in options.rivals:
            results = json.loads(path.read_text("utf-8"))["results"]
            masked = {each["method"] for each in results if each["share_of_bytes"] > each["share"]}
            for name, series in points(results, "share").items():
                if name in seen or name == "all heads full":
                    continue
                seen.add(name)
                fill = {"markerfacecolor": "none", "linestyle": "--"} if name in masked else {}
                label = f"{name} (masks)" if name in masked else name
                draw(panels[1], label, series, marker="o" if name == "mrv1" else "s", **fill)
        panels[1].set_xlabel("share of entries kept")
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks([0.125, 0.25, 0.5, 1.0], ["1/8", "1/4", "1/2", "1"])
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="x-small")
    conditions = tasks["conditions"]
    figure.suptitle(
        f"{conditions['model']}, streaming heads see window {conditions['window']} + sink "
        f"{conditions['sink']}; 95% intervals",
        fontsize="medium",
    )
    figure.savefig(options.output, format="png", dpi=150)


if __name__ == "__main__":
    main()
