"""Draw training/loss_curve.png from the results file: ``python -m training.plot_curve``."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[1]
RESULTS_PATH = ROOT / "benchmarks" / "results" / "tiny_model.json"
FIGURE_PATH = ROOT / "training" / "loss_curve.png"


def plot_curve(results_path: Path, figure_path: Path) -> None:
    """Plot losses and recall accuracy over the optimizer steps."""
    curve = json.loads(results_path.read_text())["curve"]
    steps = [entry["step"] for entry in curve]
    figure, (losses, recall) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for name in ("text_loss", "validation_loss", "recall_loss"):
        losses.plot(steps, [entry[name] for entry in curve], label=name.replace("_", " "))
    losses.set(xlabel="step", ylabel="nats per token")
    for distance in curve[0]["recall"]:
        accuracy = [entry["recall"][distance] for entry in curve]
        recall.plot(steps, accuracy, label=f"{distance} tokens")
    recall.set(xlabel="step", ylabel="recall accuracy")
    for axes in (losses, recall):
        axes.legend(fontsize="small")
    figure.savefig(figure_path, dpi=80)


if __name__ == "__main__":
    plot_curve(RESULTS_PATH, FIGURE_PATH)
