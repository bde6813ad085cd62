"""The notebooks run from top to bottom, are short, and carry no outputs."""

from __future__ import annotations

import ast
import os
import re
import sys
from importlib.util import find_spec
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
DEFINES = {"inside_vllm", "model_runner", "one_step", "your_own_kernel"}
"""Notebooks about code that readers write themselves."""
NEEDS = {
    "inside_vllm": pytest.mark.skipif(
        find_spec("vllm") is None, reason="needs vLLM's Python files: make full-vllm"
    ),
    "quickstart": needs_smollm2,
    "real_recall": needs_smollm2,
}
SMALLER = {
    "real_recall": {
        "LENGTH = 1024": "LENGTH = 512",
        "SAMPLES = 4": "SAMPLES = 1",
        "SHARES = (0.5, 0.25, 0.125)": "SHARES = (0.25,)",
    }
}
"""Lines of notebooks that take minutes, and what the test runs instead."""

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def _code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _own_kernel() -> AsyncKernelManager:
    """Return a manager whose "python3" is this interpreter, regardless of installed kernels.

    It gives a kernel a minute to end: one that has vLLM may need more than the default of 5 s.
    """
    specs = KernelSpecManager(kernel_dirs=[])
    assert specs.get_kernel_spec("python3").argv[0] == sys.executable
    return AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=specs, shutdown_wait_time=60
    )


def test_the_documents_name_every_notebook_and_no_other():
    page = (REPO / "docs" / "notebooks.md").read_text("utf-8")
    assert sorted(set(re.findall(r"notebooks/(\w+)\.ipynb", page))) == [
        path.stem for path in NOTEBOOKS
    ]


def _outputs(path: Path) -> list[list[nbformat.NotebookNode]]:
    """Run a notebook, perhaps made smaller; return the outputs of each code cell."""
    notebook = _read(path)
    for line, smaller in SMALLER.get(path.stem, {}).items():
        (cell,) = (cell for cell in _code_cells(notebook) if line in cell.source)
        cell.source = cell.source.replace(line, smaller)
    client = NotebookClient(
        notebook, km=_own_kernel(), timeout=600, startup_timeout=300,
        resources={"metadata": {"path": path.parent}},
    )  # fmt: skip
    search_path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": search_path}
    del env["PYTEST_CURRENT_TEST"]  # ipykernel takes it as a sign not to capture file descriptors
    client.execute(cleanup_kc=True, env=env)
    return [cell.outputs for cell in _code_cells(notebook)]


@each_notebook
def test_the_page_of_the_site_has_the_cells_of_the_notebook(path: Path):
    """If not: `make notebooks`."""
    page = (REPO / "docs" / "notebooks" / f"{path.stem}.md").read_text("utf-8")
    output = r"````text\n.*?\n````|!\[Figure \d+\]\(.*?\)|<div>.*?</div>|\*`notebooks/.*?\*"
    cells = re.sub(rf"(?m)^({output})$\n\n?", "", page, flags=re.DOTALL)
    assert cells.rstrip() == "\n\n".join(
        cell.source.replace(".ipynb)", ".md)")  # links between notebooks
        if cell.cell_type == "markdown"
        else f"````python\n{cell.source}\n````"
        for cell in _read(path).cells
    )


def test_the_site_has_the_pictures_of_its_notebooks_and_no_other():
    folder = REPO / "docs" / "notebooks"
    assert {path.stem for path in folder.glob("*.md")} == {path.stem for path in NOTEBOOKS}
    shown = "".join(path.read_text("utf-8") for path in folder.glob("*.md"))
    pictures = re.findall(r"^!\[Figure \d+\]\((.*)\)$", shown, re.MULTILINE)
    assert {path.name for path in folder.glob("*.png")} == set(pictures)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=NEEDS.get(path.stem, ())) for path in NOTEBOOKS],
)
def test_notebook_runs_from_top_to_bottom_without_a_warning(path: Path):
    outputs = _outputs(path)
    assert sum(map(bool, outputs)) >= 5  # the cells ran and printed
    assert [each for cell in outputs for each in cell if each.get("name") == "stderr"] == []


@pytest.mark.skipif(find_spec("vllm") is not None, reason="needs a Python without vLLM")
def test_without_vllm_one_output_says_so_and_the_other_cells_do_nothing():
    first, *others = _outputs(REPO / "notebooks" / "inside_vllm.ipynb")
    (said,) = first
    assert said.name == "stdout"
    assert "vLLM is not installed here" in said.text
    assert [each for each in others if each] == []


@each_notebook
def test_notebook_is_short_and_defines_functions_only_to_show_how(path: Path):
    cells = _code_cells(_read(path))
    assert len(cells) <= MAX_CODE_CELLS
    if path.stem in DEFINES:
        return
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
