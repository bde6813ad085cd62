"""Hooks of mkdocs.yml: the site also shows the pages of benchmarks/, which lie outside docs/."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the manual and pictures of benchmarks/ under their paths in the repository.

    The manual gets another name: benchmarks/README.md and docs/benchmarks.md are one address.
    """
    root = Path(config.config_file_path).parent
    for pattern in ("*.md", "results/*.png"):
        for path in sorted((root / "benchmarks").glob(pattern)):
            name = path.relative_to(root).as_posix().replace("README.md", "manual.md")
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt the links between the two folders: docs/ is the root of the site."""
    if page.file.src_uri.startswith("benchmarks/"):
        return markdown.replace("../docs/", "../")
    return markdown.replace("](../benchmarks/README.md", "](benchmarks/manual.md")
