"""Lines of code by package, and whether each keeps its budget: ``python -m tests.code_lines``.

A line counts if it has a token that is neither a comment nor a docstring. ``code_lines.toml`` has
the budgets; a commit that raises one says why.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
BUDGETS = Path(__file__).with_suffix(".toml")
TOTAL = "total"
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str) -> int:
    """Return how many lines of a source text are code."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines.difference(*_docstrings(ast.parse(text))))


def _docstrings(tree: ast.Module) -> Iterator[range]:
    """Yield the lines of every text that is a statement, such as a docstring of a field."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield range(node.lineno, (node.end_lineno or node.lineno) + 1)


def count(root: Path) -> Counter[str]:
    """Return the lines of code of each package below a folder, to two levels, and of all."""
    counts: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        package = "/".join((root.name, *path.relative_to(root).parts[:-1][:2]))
        lines = code_lines(path.read_text("utf-8"))
        counts[package] += lines
        counts[TOTAL] += lines
    return counts


def report(counts: Counter[str], budgets: dict[str, int]) -> tuple[str, list[str]]:
    """Return a table, and what is wrong: packages above their budgets or without one."""
    rows = [f"{'code':>7} {'budget':>7}  package"]
    wrong = []
    for name, lines in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        budget = budgets.get(name)
        rows.append(f"{lines:7,} {budget or 0:7,}  {name}")
        if budget is None:
            wrong.append(f"{name}: expected a budget in {BUDGETS.name}, found none")
        elif lines > budget:
            wrong.append(
                f"{name}: expected at most {budget:,} lines of code, got {lines:,}; shorten it, "
                f"or raise its budget in {BUDGETS.name} in a commit that says why"
            )
    wrong += [
        f"{name}: expected a package, found none; drop its budget from {BUDGETS.name}"
        for name in budgets.keys() - counts.keys()
    ]
    return "\n".join(rows), wrong


def main() -> None:
    """Print the table, and exit with 1 if a package is above its budget."""
    table, wrong = report(count(REPO / "mrv1"), tomllib.loads(BUDGETS.read_text("utf-8")))
    sys.stdout.write(f"{table}\n")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
