"""Runs the notebooks and writes what they show to docs/notebooks/: `make notebooks`.

git holds the notebooks without outputs. These pages hold the same cells with outputs, so that
readers of the site see them without running anything; a test compares the cells.
"""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path

import nbformat
import torch
from nbclient import NotebookClient

import mrv1

REPO = Path(__file__).resolve().parents[1]
PAGES = REPO / "docs" / "notebooks"
FENCE = "````"  # longer than any in a text that a model writes


def page(notebook: nbformat.NotebookNode, name: str, note: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as a page of the site.

    Args:
        notebook: the notebook, with or without outputs.
        name: its file's name, without the suffix.
        note: a sentence for below the title: on what it was run.

    Returns:
        The page's Markdown, and its pictures by their file names.
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace(".ipynb)", ".md)"))  # links between notebooks
            if len(parts) == 1:
                parts.append(f"*{note}*")
            continue
        parts.append(f"{FENCE}python\n{cell.source}\n{FENCE}")
        text = ""
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{name}-{len(pictures) + 1}.png"
                pictures[picture] = base64.b64decode(data["image/png"])
                parts.append(f"![Figure {len(pictures)}]({picture})")
            elif "text/html" in data:
                parts.append(f"<div>{data['text/html']}</div>")
            else:
                text += output.get("text", "") or data.get("text/plain", "")
        if text.strip():
            text = re.sub(r"\x1b\[[\d;]*m", "", text)  # colors of a terminal
            text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
            parts.append(f"{FENCE}text\n{text.rstrip()}\n{FENCE}")
    return "\n\n".join(parts) + "\n", pictures


def main(names: list[str]) -> None:
    """Render the named notebooks, or all."""
    PAGES.mkdir(exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    for path in sorted((REPO / "notebooks").glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(
            notebook, timeout=None, resources={"metadata": {"path": str(path.parent)}}
        ).execute()
        note = (
            f"`notebooks/{path.name}` as it ran on {device}, with mrv1 {mrv1.__version__} and "
            f"torch {torch.__version__}; written by `make notebooks`."
        )
        for old in PAGES.glob(f"{path.stem}-*.png"):
            old.unlink()
        text, pictures = page(notebook, path.stem, note)
        (PAGES / f"{path.stem}.md").write_text(text, "utf-8")
        for name, picture in pictures.items():
            (PAGES / name).write_bytes(picture)


if __name__ == "__main__":
    main(sys.argv[1:])
