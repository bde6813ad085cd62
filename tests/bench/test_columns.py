"""One list of columns for each kind of result: cells, and what follows from the list."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.report import columns
from benchmarks.report.columns import COLUMNS, Column, console, manual, markdown
from benchmarks.report.engines import generate_table
from benchmarks.report.files import load

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("column", "entry", "cell"),
    [
        (Column("a", "A"), {"a": "text"}, "text"),
        (Column("a", "A", "{:,.1f}"), {"a": 1234.56}, "1,234.6"),
        (Column("a", "A", "{:.1f}", unit=1e6), {"a": 2.5e6}, "2.5"),
        (Column("a.b", "A", "{:.0%}"), {"a": {"b": 0.5}}, "50%"),
        (Column("a.b", "A", "{:.0%}"), {"a": None}, "-"),
        (Column("a", "A", "{}"), {}, "-"),
        (Column("a", "A", "{}"), {"a": 0}, "0"),
        (Column("a b.c", "A", "{} ({:.2f}x)"), {"a": 1, "b": {"c": 2}}, "1 (2.00x)"),
        (Column("a b.c", "A", "{} ({:.2f}x)"), {"a": 1, "b": {"c": None}}, "-"),
    ],
)
def test_a_cell_shows_its_figures(column: Column, entry: dict, cell: str):
    assert column.cell(entry) == cell


def test_tables_leave_out_what_no_entry_has_and_the_page_what_it_has_no_room_for():
    some = [
        Column("name", "name"),
        Column("a", "A", "{}"),
        Column("b", "B", "{}", on_page=False),
        Column("c", "C", "{}"),
    ]
    entries = [{"name": "x", "a": 1, "b": 2}, {"name": "y", "a": None}]
    assert markdown(some, entries) == "| name | A |\n|---|---:|\n| x | 1 |\n| y | - |"
    table = console(some, [*entries, entries[1]], "title", section="name")
    assert [column.header for column in table.columns] == ["name", "A", "B"]
    assert [[*column.cells] for column in table.columns] == [
        ["x", "y", ""], ["1", "-", "-"], ["2", "-", "-"],
    ]  # fmt: skip


def test_the_console_may_show_more_digits_than_the_page():
    some = [Column("a", "A", "{:.0f}", console="{:.2f}"), Column("b", "B", "{:.1f}")]
    entries = [{"a": 1.237, "b": 2.25}]
    assert markdown(some, entries).endswith("| 1 | 2.2 |")
    assert [[*column.cells] for column in console(some, entries, "").columns] == [
        ["1.24"],
        ["2.2"],
    ]


def test_the_console_shows_a_cache_and_a_request_to_hundredths_and_thousandths_of_a_gib():
    entry = {
        "variant": "uniform", "kv_cache": {"allocated_bytes": 2.346 * 2**30},
        "bytes_of_request": 0.12345 * 2**30,
    }  # fmt: skip
    table = console(COLUMNS["capacity"][:3], [entry], "")
    assert [[*column.cells] for column in table.columns] == [["uniform"], ["2.35"], ["0.123"]]
    assert markdown(COLUMNS["capacity"][:3], [entry]).endswith("| uniform | 2.3 | 0.12 |")


def test_every_column_of_the_page_has_figures_in_some_file():
    """A column that no entry has is left out: here a misspelt key comes to light."""
    pages = [REPO / "docs" / name for name in ("benchmarks.md", "performance.md")]
    page = "".join(each.read_text("utf-8") for each in pages)
    number_of_tokens = COLUMNS["multimodal"][0]
    for kind, own in COLUMNS.items():
        for column in own:
            if column.on_page and column != number_of_tokens:
                assert f" {column.head} |" in page, (kind, column)


@pytest.mark.parametrize("kind", COLUMNS)
def test_the_manual_has_what_each_column_means(kind: str):
    text = (REPO / "benchmarks" / "README.md").read_text("utf-8")
    missing = [row for row in manual(kind) if f"{row}\n" not in text]
    assert not missing, "\n".join(["benchmarks/README.md lacks the rows", *missing])


def test_a_new_column_needs_one_line_and_a_figure(monkeypatch: pytest.MonkeyPatch):
    """The recipe of docs/adding.md: page, console and manual follow from the list."""
    (file, *_) = (
        each for each in load(REPO / "benchmarks" / "results") if each.kind == "generate"
    )
    entries = file.result["results"]
    for entry in entries:
        entry["watts"] = 512.3
    own = (*COLUMNS["generate"], Column("watts", "power, W", "{:.0f}", "of the whole GPU"))
    monkeypatch.setitem(columns.COLUMNS, "generate", own)
    head, _, row, *_ = generate_table(file).splitlines()
    assert (head.endswith("| power, W |"), row.endswith("| 512 |")) == (True, True)
    terminal = Console(width=200)
    with terminal.capture() as shown:
        terminal.print(console(COLUMNS["generate"], entries, "title"))
    assert "power, W" in shown.get()
    assert manual("generate")[-1] == "| `watts` | of the whole GPU |"
