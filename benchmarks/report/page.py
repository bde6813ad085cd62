"""The report's page, its pictures, and the excerpt in a README."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.report.charts import Chart, by_kind, charts
from benchmarks.report.columns import table
from benchmarks.report.draw import digest, draw, drawn_digest
from benchmarks.report.engines import (
    generate_table,
    modes_table,
    runner_table,
    served_summary,
    serving_table,
    start_table,
    starts,
    summary_table,
    timeline_table,
    vllm_table,
)
from benchmarks.report.features import (
    async_table,
    features_table,
    kv_offload_table,
    sleep_table,
    speculation_table,
    start_parts_table,
)
from benchmarks.report.files import ResultFile, load
from benchmarks.report.kernels import (
    all_reduce_table,
    experts_table,
    kernel_table,
    products_table,
    quantized_table,
    sampler_table,
)
from benchmarks.report.longest import longest_runs
from benchmarks.report.other import other_file
from benchmarks.report.performance import performance_table
from benchmarks.report.policies import capacity_table, headwise_table, recall_table
from benchmarks.report.why import why_table
from mrv1.errors import ConfigError

BEGIN, END = "<!-- results:{} -->", "<!-- /results:{} -->"
"""Around a block of a page that the report fills; its name is that of a function there."""
NONE_YET = "Nothing has been measured yet."
HEAD = """# Measured results

Written by `mrv1 bench report` from the JSON files of `{folder}`: not edited by hand. A line below
each table names the file, the device, the conditions and the commit: the figures are of that
commit, and later code may be faster or slower. In a table of kernels, the column of another
variant is that variant's time over ours: above 1, mrv1 is faster."""

Table = Callable[[ResultFile], str]
SECTIONS: dict[str, dict[tuple[str, int | None], Table]] = {
    "mrv1 beside vLLM": {("beside vllm", 1): vllm_table},
    "Serving": {("serving", 2): serving_table},
    "vLLM with mrv1": {("vllm", 1): modes_table, ("vllm", 2): modes_table},
    "Several GPUs": {("ranks", 1): modes_table, ("all_reduce", 1): all_reduce_table},
    "Whole-engine generation": {("generate", 2): generate_table},
    "A decode step": {("runner", 1): runner_table, ("timeline", 1): timeline_table},
    "Attention": {("attention", 2): kernel_table},
    "Products of a layer": {("products", 1): products_table},
    "Products with quantized weights": {("quantized", 1): quantized_table},
    "Experts of a layer": {("experts", 1): experts_table},
    "KV cache write": {("kv_cache_write", 2): kernel_table},
    "Sampler": {("sample_tokens", 1): sampler_table},
    "Head policies": {("capacity", 2): capacity_table, ("headwise", 1): headwise_table},
    "Recall under head policies": {("recall", None): recall_table},
    "Features of images": {("multimodal", 3): features_table},
    "Speculation": {("speculation", 1): speculation_table},
    "AsyncLLM beside LLM": {("async llm", 1): async_table},
    "Starts, part by part": {("start", None): start_parts_table},
    "KV listeners": {("kv_offload", None): kv_offload_table},
    "Sleep and new weights": {("sleep", 1): sleep_table},
}
"""Section -> the kinds and schemas in it, and their tables."""

KNOWN = set(chain.from_iterable(SECTIONS.values()))


@dataclass(frozen=True, slots=True)
class Report:
    """The files of a report, not yet written."""

    texts: dict[Path, str]
    pictures: dict[Path, Chart]
    folder: Path
    """Of the pictures."""

    def differences(self) -> list[Path]:
        """Return the files that differ from the report, are missing, or show what is gone.

        Pictures are compared by the data in them, as every matplotlib draws other bytes.
        """
        found = [
            path
            for path, text in self.texts.items()
            if not path.is_file() or path.read_text("utf-8") != text
        ]
        for path, chart in self.pictures.items():
            if not path.is_file() or drawn_digest(path.read_text("utf-8")) != digest(chart):
                found.append(path)
        return found + self._leftover()

    def write(self) -> None:
        """Write every file, and delete the pictures of results that are gone."""
        for path, text in self.texts.items():
            path.write_text(text, encoding="utf-8")
        if self.pictures:
            self.folder.mkdir(exist_ok=True)
        for path, chart in self.pictures.items():
            path.write_text(draw(chart), encoding="utf-8")
        for path in self._leftover():
            path.unlink()

    def _leftover(self) -> list[Path]:
        """Return the pictures that an earlier report has drawn and this one lacks."""
        others = sorted(set(self.folder.glob("*.svg")) - set(self.pictures))
        return [path for path in others if drawn_digest(path.read_text("utf-8"))]


def make_report(results: Path, output: Path, pages: Sequence[Path] = ()) -> Report:
    """Return the report on a folder of results.

    Args:
        results: the folder of the JSON files.
        output: the page; its pictures are in the folder of the same name without the suffix.
        pages: files with blocks between two markers, which are filled.

    Raises:
        ConfigError: a file or a folder is missing or not what it should be.
    """
    if not output.parent.is_dir():
        raise ConfigError(f"--output: expected an existing directory, got {output.parent}")
    files = load(results)
    _check_fields(files, results)
    known = by_kind(file for file in files if file.key in KNOWN)
    folder = output.with_suffix("")
    if folder == output:
        raise ConfigError(f"--output: expected a file with a suffix such as .md, got {output}")
    pictures = {folder / f"{chart.name}.svg": chart for chart in charts(known)}
    texts = {output: _page(files, known, pictures, output.parent, results)}
    for page in pages:
        if not page.is_file():
            raise ConfigError(f"--page: expected an existing file, got {page}")
        blocks: dict[str, Callable[[], str]] = {
            "performance": lambda: performance_table(known),
            "why": lambda: why_table(known) or NONE_YET,
            "generate": partial(_excerpt, known, pictures, page.parent),
        }
        text = page.read_text("utf-8")
        named = [name for name in blocks if BEGIN.format(name) in text]
        for name in named or ["generate"]:
            text = with_block(text, name, blocks[name]())
        texts[page] = text
    return Report(texts, pictures, folder)


def _check_fields(files: Sequence[ResultFile], results: Path) -> None:
    """Raise unless each file of a known kind has what its table shows."""
    for file in files:
        for tables in SECTIONS.values():
            try:
                if file.key in tables:
                    tables[file.key](file)
            except (KeyError, TypeError) as error:
                raise ConfigError(
                    f"{results / file.name}: expected the fields of {file.kind!r} results, got "
                    f"{error!r}"
                ) from error


def _page(
    files: Sequence[ResultFile],
    known: dict[str, list[ResultFile]],
    pictures: dict[Path, Chart],
    parent: Path,
    results: Path,
) -> str:
    blocks = [HEAD.format(folder=os.path.relpath(results, parent.parent))]
    shown = set[Path]()
    for title, tables in SECTIONS.items():
        own = [(tables[file.key], file) for file in files if file.key in tables]
        if not own:
            continue
        blocks.append(f"## {title}")
        names = {file.name for _, file in own}
        for path, chart in pictures.items():
            if path not in shown and names.issuperset(chart.files):
                blocks.append(_picture(path, chart, parent))
                shown.add(path)
        blocks += [show(file) for show, file in own]
    begun = [*known.get("generate", []), *known.get("beside vllm", [])]
    if starts(begun):
        blocks.append("## Start of an engine")
        blocks += [_picture(p, chart, parent) for p, chart in pictures.items() if p not in shown]
        blocks.append(start_table(begun))
    others = [file for file in files if file.key not in KNOWN]
    if others:
        blocks += ["## Other results", *(other_file(file) for file in others)]
    blocks += ["## All files", _files_table(files)] if files else [NONE_YET]
    return "\n\n".join(blocks) + "\n"


def _files_table(files: Sequence[ResultFile]) -> str:
    rows = [[f"`{file.name}`", file.kind, file.device, file.origin] for file in files]
    return table(["file", "kind", "device", "measured on"], rows, [True] * 4)


def _picture(path: Path, chart: Chart, parent: Path) -> str:
    words = ", ".join(dict.fromkeys(panel.y_label.replace("\n", " ") for panel in chart.panels))
    picture = f"![{chart.title}: {words}]({Path(os.path.relpath(path, parent)).as_posix()})"
    return f"{picture}\n\n{chart.caption}" if chart.caption else picture


def _excerpt(known: dict[str, list[ResultFile]], pictures: dict[Path, Chart], parent: Path) -> str:
    """Return README.md's pictures and tables: generation, decode attention, serving."""
    names = {"decode-attention", *(file.stem for file in known.get("beside vllm", []))}
    chosen = [
        _picture(path, chart, parent) for path, chart in pictures.items() if chart.name in names
    ]
    # The shapes' own files: others may have further conditions.
    files = [
        file
        for file in known.get("generate", [])
        if file.name.startswith(("generate", f"{file.result['shape']}-generate"))
    ]
    blocks = ["\n".join(chosen)] if chosen else []
    blocks.append(summary_table(files, longest_runs(known)) if files else NONE_YET)
    served = served_summary(known.get("serving", []))
    return "\n\n".join([*blocks, served] if served else blocks)


def with_block(text: str, name: str, block: str) -> str:
    """Return a page's text with what is between the two markers of a name replaced.

    Raises:
        ConfigError: the markers do not occur once each, in order.
    """
    begin, end = BEGIN.format(name), END.format(name)
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end or begin in rest or end in after:
        raise ConfigError(f"--page: expected {begin} and then {end}, each once")
    return f"{before}{begin}\n{block}\n{end}{after}"
