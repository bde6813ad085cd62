"""The scripts of findings/: each is listed, executable, pinned, and knows nothing of mrv1.

None is run here: they install packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
FINDINGS = REPO / "findings"
SCRIPTS = sorted(FINDINGS.glob("*.sh"))
ROW = re.compile(r"^\| \[([\w.-]+)\]\(([\w.-]+)\.sh\) \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)
ROWS = {name: packages for name, _, packages in ROW.findall((FINDINGS / "README.md").read_text())}
PIN = re.compile(r"([\w.-]+)==(\$?[\w.]*\w)")


def test_the_table_lists_every_script_and_nothing_else():
    text = (FINDINGS / "README.md").read_text("utf-8")
    listed = [line for line in text.splitlines() if line.startswith("| [")]
    assert sorted(ROWS) == [path.stem for path in SCRIPTS]
    assert len(listed) == len(ROWS), "one row each, of the form of the others"
    assert all(name == target for name, target, _ in ROW.findall(text))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_runs_alone_with_pinned_packages(path: Path):
    text = path.read_text("utf-8")
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert os.access(path, os.X_OK), f"chmod +x findings/{path.name}"
    assert "\nset -euo pipefail\n" in text
    assert "mktemp -d" in text
    assert "mrv1" not in text
    subprocess.run(["bash", "-n", path], check=True)
    pins: dict[str, set[str]] = {}
    for name, version in PIN.findall(text):
        loop = re.search(rf"\bfor {version.lstrip('$')} in ([\w. ]+); do", text)
        pins.setdefault(name, set()).update(loop[1].split() if loop else [version])
    for name, *versions in (each.split() for each in re.split(r", (?=[a-z])", ROWS[path.stem])):
        assert pins.get(name) == {version.strip(",") for version in versions}, name


def test_the_source_distribution_has_them():
    project = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))
    assert "/findings" in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
