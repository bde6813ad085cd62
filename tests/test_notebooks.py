"""The notebooks run from top to bottom, are short, and carry no outputs."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="not run: needs the extra 'notebooks'")
pytest.importorskip("nbclient", reason="not run: needs the extra 'notebooks'")

from jupyter_client.kernelspec import KernelSpecManager  # noqa: E402
from jupyter_client.manager import AsyncKernelManager  # noqa: E402
from nbclient import NotebookClient  # noqa: E402

from tests.models.smollm2 import needs_smollm2  # noqa: E402

REPO = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
MAX_CODE_CELLS = 14

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def _code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _own_kernel() -> AsyncKernelManager:
    """Return a manager whose "python3" is this interpreter, regardless of installed kernels."""
    specs = KernelSpecManager(kernel_dirs=[])
    assert specs.get_kernel_spec("python3").argv[0] == sys.executable
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)


def test_quickstart_is_the_only_notebook():
    assert [path.stem for path in NOTEBOOKS] == ["quickstart"]


@each_notebook
@needs_smollm2
@pytest.mark.slow
def test_notebook_runs_from_top_to_bottom_without_a_warning(path: Path):
    notebook = _read(path)
    client = NotebookClient(
        notebook, km=_own_kernel(), timeout=120, resources={"metadata": {"path": path.parent}}
    )
    search_path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    client.execute(cleanup_kc=True, env=os.environ | {"PYTHONPATH": search_path})
    outputs = [cell.outputs for cell in _code_cells(notebook)]
    assert sum(map(bool, outputs)) >= 5  # the cells ran and printed
    assert [each for cell in outputs for each in cell if each.get("name") == "stderr"] == []


@each_notebook
def test_notebook_is_short_and_defines_no_functions(path: Path):
    cells = _code_cells(_read(path))
    assert len(cells) <= MAX_CODE_CELLS
    defining = (ast.FunctionDef, ast.ClassDef, ast.Lambda)
    for cell in cells:
        assert not [
            node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, defining)
        ]


@each_notebook
def test_notebook_carries_no_outputs(path: Path):
    for cell in _code_cells(_read(path)):
        assert cell.outputs == []
        assert cell.execution_count is None
