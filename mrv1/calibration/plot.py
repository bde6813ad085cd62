"""A picture of a ranking: how much the loss rises when a head streams, in layers by heads."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from mrv1.errors import ConfigError
from mrv1.headwise import HeadPolicy, HeadRanking

SMALLEST_LOSS = 1e-4  # nats with the lightest colour
INCHES_PER_HEAD = 0.32


def require_matplotlib(what: str = "--plot") -> None:
    """Raise a ConfigError naming ``what`` if matplotlib is missing, before measuring."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"{what}: expected the package matplotlib to be installed, got none; "
            "pip install -e '.[bench]'"
        )


def plot_ranking(ranking: HeadRanking, policy: HeadPolicy, path: Path, title: str) -> None:
    """Write a PNG: colours are losses, framed heads stay full, grey heads are not ranked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    losses = ranking.loss_map()
    layers, heads = losses.shape
    largest = max(float(np.nanmax(losses)), 10 * SMALLEST_LOSS)
    figure = Figure(
        figsize=(
            max(heads * INCHES_PER_HEAD, 2.0) + 2.5,
            max(layers * INCHES_PER_HEAD, 1.5) + 1.2,
        ),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_facecolor("lightgrey")
    norm = LogNorm(SMALLEST_LOSS, largest)
    image = axes.imshow(losses.clip(SMALLEST_LOSS), cmap="Reds", norm=norm)
    for layer, row in enumerate(policy.heads):
        for head, seen in enumerate(row):
            if seen.is_full:
                axes.add_patch(
                    Rectangle((head - 0.42, layer - 0.42), 0.84, 0.84, fill=False, linewidth=1.5)
                )
    axes.set_xticks(range(0, heads, -(-heads // 16)))
    axes.set_yticks(range(0, layers, -(-layers // 32)))
    axes.set_xlabel("KV head (framed: stays full)")
    axes.set_ylabel("layer")
    axes.set_title(title, fontsize="medium")
    figure.colorbar(image, label="loss when it streams, nats", ax=axes)
    figure.savefig(path, format="png", dpi=150)
