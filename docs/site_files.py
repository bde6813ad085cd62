"""Hooks of mkdocs.yml: the site also shows pages and files that lie outside docs/."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {
    "README.md": "index.md",  # the front page
    "docs/README.md": "documents.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "findings/README.md": "findings/index.md",
    "benchmarks/README.md": "benchmarks/manual.md",  # docs/benchmarks.md has the other address
}
"""Path in the repository -> path on the site, of pages that are elsewhere there."""
FILES = ("benchmarks/results/*.png", "examples/*.py", "findings/*.sh", "LICENSE")
"""Files that pages link to."""
LINK = re.compile(r"(?<=\]\()(?!https?:)([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files from outside docs/, and give docs/README.md its name here."""
    root = Path(config.config_file_path).parent
    files.remove(next(file for file in files if file.src_uri == "README.md"))
    added = dict(PAGES)
    for pattern in (*FILES, "benchmarks/*.md"):
        for path in sorted(root.glob(pattern)):
            name = path.relative_to(root).as_posix()
            added.setdefault(name, name)
    for source, name in added.items():
        files.append(File.generated(config, name, abs_src_path=str(root / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page lead where their targets are on the site."""
    here = {site: source for source, site in PAGES.items()}.get(page.file.src_uri)
    if here is None:
        is_ours = page.file.src_uri.startswith("benchmarks/")
        here = page.file.src_uri if is_ours else f"docs/{page.file.src_uri}"
    folder = Path(here).parent
    up = "../" * page.file.src_uri.count("/")

    def on_site(link: re.Match[str]) -> str:
        parts: list[str] = []
        for part in (folder / link[0]).parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        target = "/".join(parts)
        return up + PAGES.get(target, target.removeprefix("docs/"))

    return LINK.sub(on_site, markdown)
