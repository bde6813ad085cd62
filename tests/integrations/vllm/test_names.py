"""Every name of vLLM's offline engine has a row in mrv1's table; read from vLLM's source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import pytest

from mrv1 import LLM, ConfigError
from mrv1.engine.chat import ChatOptions
from mrv1.from_vllm import ARGUMENTS, METHODS, OPTIONS, OUTPUT, PARAMS, PROMPT, translated

spec = find_spec("vllm")
if spec is None:
    pytest.skip("not run: vLLM is not installed", allow_module_level=True)
(FOLDER,) = spec.submodule_search_locations or ()


def _classes(file: str) -> Iterator[ast.ClassDef]:
    tree = ast.parse((Path(FOLDER) / file).read_text("utf-8"))
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def names(file: str, *classes: str, kind: str) -> set[str]:
    """Return the public fields, methods or parameters of ``__init__`` of classes in a file."""
    found = set()
    for body in (each.body for each in _classes(file) if each.name in classes):
        for node in body:
            if kind == "fields" and isinstance(node, ast.AnnAssign):
                found.add(ast.unparse(node.target))
            elif kind == "methods" and isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif kind == "parameters" and getattr(node, "name", None) == "__init__":
                found |= {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
    assert found
    return {name for name in found if not name.startswith("_")} - {"self"}


def test_every_option_has_a_row():
    expected = names("engine/arg_utils.py", "EngineArgs", kind="fields")
    expected |= names("entrypoints/llm.py", "LLM", kind="parameters")
    assert expected - OPTIONS.keys() == set()


def test_every_default_of_an_option_is_taken():
    """Those that the source has as they are; a refused one names an option, see ``translated``."""
    files = Path(FOLDER, "config").glob("*.py")
    classes = {each.name: each for file in files for each in _classes(str(file))}
    (engine,) = (each for each in _classes("engine/arg_utils.py") if each.name == "EngineArgs")
    found = {}
    for name, default in _defaults(engine).items():
        if isinstance(default, ast.Attribute) and ast.unparse(default.value) in classes:
            default = _defaults(classes[ast.unparse(default.value)]).get(default.attr)
        if isinstance(default, ast.Call):
            default = {each.arg: each.value for each in default.keywords}.get("default")
        with suppress(TypeError, ValueError):
            found[name] = ast.literal_eval(default)
    assert found["tensor_parallel_size"] == 1
    assert found["data_parallel_backend"] == "mp"
    assert translated(found, OPTIONS, "an option", ConfigError)


def _defaults(body: ast.ClassDef) -> dict[str, ast.expr | None]:
    fields = (node for node in body.body if isinstance(node, ast.AnnAssign))
    return {ast.unparse(node.target): node.value for node in fields}


def test_every_argument_has_a_row_or_is_here():
    (llm,) = (each for each in _classes("entrypoints/llm.py") if each.name == "LLM")
    for node in llm.body:
        if isinstance(node, ast.FunctionDef) and node.name in ("generate", "chat"):
            given = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
            here = {*signature(getattr(LLM, node.name)).parameters}
            if node.name == "chat":
                here |= ChatOptions.__annotations__.keys()
            assert given - here - ARGUMENTS.keys() == set()


def test_every_method_has_a_row():
    files = [*Path(FOLDER, "entrypoints").rglob("offline.py"), Path(FOLDER, "entrypoints/llm.py")]
    expected = set()
    for file in files:
        classes = [each.name for each in _classes(str(file))]
        mixins = [name for name in classes if name.endswith(("Mixin", "LLM"))]
        expected |= names(str(file), *mixins, kind="methods")
    assert {"generate", "beam_search", "embed", "update_weights"} <= expected
    assert expected - METHODS.keys() == set()


def test_every_field_of_params_prompts_and_outputs_has_a_row():
    params = names("sampling_params.py", "SamplingParams", kind="fields")
    assert params - PARAMS.keys() == set()
    prompts = ("_PromptOptions", "TextPrompt", "TokensPrompt", "EmbedsPrompt")
    assert names("inputs/llm.py", *prompts, kind="fields") - PROMPT.keys() == set()
    outputs = names("outputs.py", "CompletionOutput", kind="fields")
    outputs |= names("outputs.py", "RequestOutput", kind="parameters")
    assert outputs - OUTPUT.keys() == set()
