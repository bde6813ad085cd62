"""The lines of code that ``make lint`` counts, and the check of their budgets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.code_lines import code_lines, count, report


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", 0),
        ("# a comment\n\n", 0),
        ('"""A docstring\n\nof three lines."""\n', 0),
        ("x = 1  # why\n", 1),
        ('x = """a\n\nb"""\n', 3),
        ("x = f(\n    1,\n\n    # why\n    2,\n)\n", 4),
        ('def f():\n    """Return 1."""\n    return 1\n', 2),
        ('class A:\n    x: int = 1\n    """A field."""\n', 2),
        ("if x: y = 1; z = 2\n", 1),
        ("1\n", 1),
    ],
)
def test_comments_docstrings_and_empty_lines_do_not_count(text: str, lines: int):
    assert code_lines(text) == lines


def test_packages_are_counted_to_two_levels(tmp_path: Path):
    for name, lines in (("a.py", 1), ("b/c.py", 2), ("b/d/e.py", 3), ("b/d/f/g.py", 4)):
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" * lines)
    (tmp_path / "house" / "table.txt").write_text("x = 1\n")
    assert count(tmp_path / "house") == {"house": 1, "house/b": 2, "house/b/d": 7, "total": 10}


def test_a_package_above_its_budget_or_without_one_is_named():
    counts = Counter({"total": 1_500, "house": 1_000, "house/b": 500})
    table, wrong = report(counts, {"total": 1_500, "house": 1_000, "house/b": 500})
    assert table.splitlines()[1:3] == ["  1,500   1,500  total", "  1,000   1,000  house"]
    assert not wrong
    _, wrong = report(counts, {"total": 1_499, "house": 1_000, "barn": 1})
    assert [line.partition(":")[0] for line in wrong] == ["total", "house/b", "barn"]
    assert "at most 1,499 lines of code, got 1,500" in wrong[0]
