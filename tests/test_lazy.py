"""The start of a process: the package and its help import no torch; the lazy names are right."""

from __future__ import annotations

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer

import mrv1
import mrv1.sampler
from mrv1 import SamplingParams
from mrv1.cli import COMMANDS
from tests.forks import Forks

HEAVY = "{'torch', 'transformers', 'tokenizers', 'safetensors', 'triton', 'llguidance'}"


def _child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "code",
    [
        "import mrv1",
        "import mrv1; dir(mrv1); mrv1.__version__",
        "from mrv1 import ConfigError, EngineConfig, SamplingParams; "
        "SamplingParams(n=2), EngineConfig(model='tiny')",
    ],
)
def test_an_import_of_light_names_imports_no_torch(code: str):
    run = _child(f"{code}\nimport sys; print(sorted({HEAVY} & set(sys.modules)))")
    assert run.stdout == "[]\n", run.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], [], ["generate", "--help"]])
def test_version_and_help_import_no_torch(arguments: list[str]):
    run = _child(
        "import sys\nfrom mrv1.cli import app\ntry:\n    app(prog_name='mrv1')\n"
        f"finally:\n    print('heavy:', sorted({HEAVY} & set(sys.modules)))",
        *arguments,
    )
    assert run.stdout.endswith("heavy: []\n"), run.stderr
    assert "mrv1" in run.stdout


def test_a_submodule_is_there_without_an_import_of_its_own(forks: Forks):
    run = forks.run(
        "import mrv1; print(mrv1.kernels.reference.linear.__name__, mrv1.LLM.__name__)"
    )
    assert run.stdout == "linear LLM\n", run.stderr


def test_a_pickled_object_names_what_a_new_process_can_import():
    """The new process has imported nothing of mrv1."""
    params = SamplingParams(temperature=0.5, stop=("a", "b"), seed=3)
    run = _child(
        "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])))",
        pickle.dumps(params).hex(),
    )
    assert run.stdout == f"{params!r}\n", run.stderr


def _imports_for_type_checkers(package: ModuleType) -> dict[str, object]:
    """Return the names that a package imports under ``TYPE_CHECKING``, and their objects."""
    tree = ast.parse(Path(str(package.__file__)).read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: getattr(importlib.import_module(str(node.module)), alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize("package", [mrv1, mrv1.sampler])
def test_lazy_names_are_the_objects_that_type_checkers_see(package: ModuleType):
    typed = _imports_for_type_checkers(package)
    assert typed.keys() == set(package.__all__)
    assert set(package.__all__) <= set(dir(package))
    for name, expected in typed.items():
        assert getattr(package, name) is expected


@pytest.mark.parametrize("name", ["LLMs", "_private", "__wrapped__"])
def test_an_unknown_name_is_an_attribute_error(name: str):
    with pytest.raises(AttributeError, match=f"module 'mrv1' has no attribute '{name}'"):
        getattr(mrv1, name)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_in_the_help_is_the_first_of_the_commands_own_help(name: str):
    target, line = COMMANDS[name]
    module, _, attribute = target.partition(".")
    found = getattr(importlib.import_module(f"mrv1.cli.{module}"), attribute)
    own = found.info.help if isinstance(found, typer.Typer) else found.__doc__
    assert own.splitlines()[0] == line
