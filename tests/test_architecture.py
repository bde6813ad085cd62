"""The rules of the architecture: what each module may import, call and contain.

Each rule is a function from one parsed file to its violations, applied to every file of ``mrv1``
and of the folders of ``benchmarks`` (its scripts may ask the machine) and, so that the rule itself
can fail, to a snippet that breaks it and to one that keeps it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import mrv1.kernels
from mrv1.kernels import reference
from mrv1.kernels.cache.formats import FORMATS
from mrv1.kernels.registry import MODULE_OF_OP

REPO = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class File:
    """One source file; ``name`` is its dotted module name below mrv1, such as "runner.step".

    A file of the benchmarks has its whole name, such as "benchmarks.peers.sampler".
    """

    name: str
    text: str

    @property
    def layer(self) -> str:
        return self.name.partition(".")[0]

    @property
    def path(self) -> str:
        folder = "" if self.layer == "benchmarks" else "mrv1/"
        return f"{folder}{self.name.replace('.', '/')}.py"

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def _all_files() -> list[File]:
    return [
        File(".".join(path.relative_to(root).with_suffix("").parts), path.read_text("utf-8"))
        for root, pattern in ((REPO / "mrv1", "**/*.py"), (REPO, "benchmarks/*/**/*.py"))
        for path in sorted(root.glob(pattern))
    ]


FILES = _all_files()
BY_NAME = {file.name: file for file in FILES}


# --- reading the syntax tree ---------------------------------------------------------------------


def _dotted(node: ast.AST) -> str:
    """Return the dotted name that an expression spells ("torch.cuda.Event"), or ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of every import, anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and _dotted(node.func).endswith("import_module")
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def _imports_at_start(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the imports that run with the module's: not in functions nor for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and _dotted(node.test).endswith("TYPE_CHECKING"):
            yield from _imports_at_start(ast.Module(node.orelse, []))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imports(ast.Module([node], []))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports_at_start(node)


def _modules(target: str) -> Iterator[str]:
    """Yield the files, named as in ``File``, that an import runs: the packages and the module."""
    parts = target.split(".")
    if parts[0] != "mrv1":
        return
    for end in range(1, len(parts) + 1):
        inner = parts[1:end]
        for name in (".".join(inner), ".".join([*inner, "__init__"])):
            if name in BY_NAME:
                yield name


def _uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every import and every attribute that is read or called."""
    yield from _imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _dotted(node)):
            yield node.lineno, name


def _scopes(node: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield every node with the qualified name of the function or class that contains it."""
    for child in ast.iter_child_nodes(node):
        yield scope, child
        inner = scope
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            inner = f"{scope}.{child.name}".lstrip(".")
        yield from _scopes(child, inner)


# --- the rules -----------------------------------------------------------------------------------

BASE = {"errors", "environment", "device", "forks", "lazy", "progress"}
OPS = BASE | {"kernels", "config", "from_vllm", "options"}
STEP = OPS | {"sampler", "models", "headwise", "multimodal", "runner"}
ENGINE = STEP | {"engine"}
APP = ENGINE | {"calibration", "integrations", "provenance", "__init__"}
MAY_IMPORT = {
    "errors": set(),
    "environment": {"errors"},
    "device": {"errors", "environment"},
    "forks": set(),
    "lazy": set(),
    "progress": set(),
    "options": {"errors"},
    "hub": {"errors"},
    "config": {"errors", "environment", "hub", "options"},
    "from_vllm": {"errors", "config"},
    "kernels": BASE | {"kernels"},
    "testing": BASE | {"kernels", "testing"},
    "sampler": OPS | {"sampler"},
    "models": OPS | {"models"},
    "headwise": OPS | {"headwise"},
    "multimodal": OPS | {"models", "multimodal"},
    "runner": STEP,
    "engine": ENGINE,
    "calibration": OPS | {"models", "headwise", "calibration"},
    "integrations": ENGINE | {"integrations"},
    "__init__": ENGINE | {"calibration", "integrations"},
    "provenance": {"device", "__init__"},
    "cli": APP | {"cli"},
    "__main__": {"cli"},
    "benchmarks": APP | {"cli"},
}


def arrows_point_one_way(file: File) -> Iterator[str]:
    """cli -> integrations -> engine -> runner -> sampler, models, headwise -> kernels -> device.

    Nothing imports ``benchmarks``, which is no part of the package.
    """
    if file.layer not in MAY_IMPORT:
        yield f"1: {file.layer} has no place in MAY_IMPORT: give it one"
        return
    for line, target in _imports(file.tree):
        package, _, inner = target.partition(".")
        if package == "benchmarks" and file.layer != package:
            yield f"{line}: imports {target}"
        if package != "mrv1":
            continue
        layer = inner.partition(".")[0]
        # A name that mrv1/__init__.py defines ("from mrv1 import LLM") belongs to the top layer.
        layer = layer if layer in MAY_IMPORT else "__init__"
        if layer not in MAY_IMPORT[file.layer]:
            yield f"{line}: {file.layer} imports {target}"


def only_integrations_and_peers_import_vllm(file: File) -> Iterator[str]:
    """Only the vLLM plug-in and the benchmarks of vLLM's kernels import vLLM."""
    if file.layer == "integrations" or file.name.startswith("benchmarks.peers."):
        return
    for line, target in _imports(file.tree):
        if target.partition(".")[0] == "vllm":
            yield f"{line}: imports {target}"


def only_one_module_imports_triton(file: File) -> Iterator[str]:
    """Only ``_base/triton.py`` and ``gluon.py``, the interpreter's fixes and test tools do."""
    looks_inside = file.name.startswith("kernels._base.interpreter") or file.layer == "testing"
    if file.name in ("kernels._base.triton", "kernels._base.gluon") or looks_inside:
        return
    for line, target in _imports(file.tree):
        if target.partition(".")[0] == "triton":
            yield f"{line}: imports {target}"


def no_code_of_a_checkpoint_runs(file: File) -> Iterator[str]:
    """Transformers and torch are told so in every call; other pickles are mrv1's own."""
    theirs = {
        name.rpartition(".")[2]
        for _, name in _imports(file.tree)
        if name.startswith("transformers.")
    }
    told = {
        id(part)
        for call in ast.walk(file.tree)
        if isinstance(call, ast.Call)
        and any(
            isinstance(each.value, ast.Constant)
            and (each.arg, each.value.value)
            in (("trust_remote_code", False), ("weights_only", True))
            for each in call.keywords
        )
        for part in (call.func, *call.args)
    }
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Attribute):
            continue
        name = _dotted(node)
        if (
            node.attr in ("from_pretrained", "from_config")
            and name.partition(".")[0] in theirs
            and id(node) not in told
        ):
            yield f"{node.lineno}: {name} without trust_remote_code=False"
        reads_its_parent = (file.name, name) in (
            ("runner.compile_ahead", "pickle.load"),
            ("runner.ranks.control", "pickle.loads"),
        )
        is_told = name == "torch.load" and id(node) in told
        if name in ("torch.load", "pickle.load", "pickle.loads") and not (
            reads_its_parent or is_told
        ):
            yield f"{node.lineno}: {name} may run code of a file"


ORACLE_USERS = {
    "benchmarks.kernels.kv_write": "compares with the oracle in float64",
    "benchmarks.kernels.kv_write_data": "compares with the oracle's scales and codes",
}


def _oracle_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for line, target in _uses(tree):
        parts = target.split(".")
        if parts[0] in ("mrv1", "kernels") and "kernels" in parts and "reference" in parts:
            yield line, target


def only_kernels_import_oracles(file: File) -> Iterator[str]:
    """Outside ``kernels`` an oracle is called through ``registry.Ops`` alone."""
    if file.layer == "kernels" or file.name in ORACLE_USERS:
        return
    for line, target in _oracle_imports(file.tree):
        yield f"{line}: {target}"


@cache
def _targets_at_start(name: str) -> tuple[str, ...]:
    return tuple(target for _, target in _imports_at_start(BY_NAME[name].tree))


def _way_to_triton(name: str, seen: set[str]) -> list[str]:
    """Return the files through which the import of a file reaches triton, or an empty list."""
    for target in _targets_at_start(name):
        if target.partition(".")[0] == "triton":
            return [name]
        for module in _modules(target):
            if module not in seen:
                seen.add(module)
                if way := _way_to_triton(module, seen):
                    return [name, *way]
    return []


def contracts_and_oracles_run_without_triton(file: File) -> Iterator[str]:
    """No ``contracts`` or ``reference`` module imports triton, directly or through another."""
    if file.layer != "kernels" or file.name.rpartition(".")[2] not in ("contracts", "reference"):
        return
    for line, target in _imports(file.tree):
        if target.partition(".")[0] == "triton":
            yield f"{line}: imports {target}"
        for module in _modules(target):
            if module != file.name and (way := _way_to_triton(module, {module})):
                yield f"{line}: imports {target}, which imports triton: {' -> '.join(way)}"


KERNEL_FOLDERS = {
    "_base": {"_base"},
    "layers": {"_base", "layers"},
    "sampling": {"_base", "sampling"},
    "step": {"_base", "step"},
    "experts": {"_base", "experts", "layers"},
    "cache": {"_base", "cache", "layers.reference"},  # its oracle calls their norm and rope
    "attention": {"_base", "cache", "attention"},
}
"""The folders and modules of ``kernels`` that each folder of ``kernels`` may import."""


def kernel_folders_point_one_way(file: File) -> Iterator[str]:
    """attention -> cache -> the oracles of layers; experts -> layers; every folder -> _base."""
    _, folder, module = (*file.name.split(".", 2), "", "")[:3]
    if file.layer != "kernels" or not module:
        return
    if folder not in KERNEL_FOLDERS:
        yield f"1: {folder} has no place in KERNEL_FOLDERS: give it one"
        return
    allowed = tuple(f"mrv1.kernels.{name}." for name in KERNEL_FOLDERS[folder])
    for line, target in _imports(file.tree):
        if target.startswith("mrv1.kernels") and not f"{target}.".startswith(allowed):
            yield f"{line}: {folder} imports {target}"


def only_device_asks_the_gpu(file: File) -> Iterator[str]:
    """Only ``device.py`` queries the properties and the memory of GPUs."""
    asking = ("get_", "mem_get_info", "is_available", "device_count")
    if file.name == "device":
        return
    for line, name in _uses(file.tree):
        prefix, _, last = name.rpartition(".")
        if prefix == "torch.cuda" and last.startswith(asking):
            yield f"{line}: {name}"
        elif (prefix, last) == ("torch", "cuda") and (line, name) in set(_imports(file.tree)):
            yield f"{line}: import torch and write torch.cuda in full"


def page_formats_are_asked(file: File) -> Iterator[str]:
    """Only a format's object and lists of choices, mrv1's and vLLM's, know one by its name."""
    lists = ("config", "from_vllm", "kernels.cache.formats")
    if file.layer == "benchmarks" or file.name in lists:
        return
    weights = ("kernels.layers.quantized", "models.dummy")  # whose codes may have a format's name
    if file.name in weights or file.name.startswith("models.quantization."):
        return
    prose = {id(node.value) for node in ast.walk(file.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Constant) and id(node) not in prose and node.value in FORMATS:
            yield f"{node.lineno}: {node.value!r}: ask PageFormat"
        if "is_fp8" in (getattr(node, each, "") for each in ("id", "attr", "arg", "name")):
            yield f"{getattr(node, 'lineno', 1)}: is_fp8: ask PageFormat"


def engine_has_no_cuda(file: File) -> Iterator[str]:
    """The engine is plain Python and numpy: no streams, no events."""
    if file.layer == "engine":
        for line, name in _uses(file.tree):
            if name == "torch.cuda":
                yield f"{line}: uses torch.cuda"


def only_one_module_reads_the_environment(file: File) -> Iterator[str]:
    """Only ``environment.py`` reads the environment; test tools pass it on."""
    if file.name == "environment" or file.layer == "testing":
        return
    for line, name in _uses(file.tree):
        if name in ("os.environ", "os.environb", "os.getenv"):
            yield f"{line}: {name}"


def only_one_module_opens_checkpoints(file: File) -> Iterator[str]:
    """Only ``Checkpoint`` knows whether a checkpoint is a directory or a GGUF file."""
    others = ("multimodal.item", "benchmarks.engines.checkpoint")  # read features, write weights
    if file.name in ("models.checkpoint", *others):
        return
    for line, name in _imports(file.tree):
        if name.startswith(("safetensors", "mrv1.models.gguf_file")):
            yield f"{line}: imports {name}"


def no_assert(file: File) -> Iterator[str]:
    """``python -O`` must not remove a check: raise an error that names the expected value."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Assert) and file.layer != "testing":
            yield f"{node.lineno}: assert"


def ascii_only(file: File) -> Iterator[str]:
    """Source text is ASCII."""
    for number, line in enumerate(file.text.splitlines(), start=1):
        if not line.isascii():
            yield f"{number}: {line.strip()!a}"


WAITING_CALLS = {"item", "tolist", "cpu", "numpy", "synchronize"}
WAITING_FILES = {
    "runner.async_output": "result() is where the host waits, by design",
    "models.loading": "loading ends before the first step",
}
WAITING_FUNCTIONS = {
    "models.parallel:ParallelContext.least": "start-up, before the first step",
    "models.parallel:ParallelContext.union": "start-up, before the first step",
    "models.quantization.compressed_tensors:_shape_problem": "start-up or between steps",
    "models.quantization.formats:scale_problem": "start-up or between steps",
    "runner.attention_backends:FlashInferBackend.plan": "FlashInfer's page-locked buffers",
    "runner.block_table:BlockTables._counted": "a numpy array on the host",
    "runner.block_table:BlockTables._check": "a numpy array of the plan",
    "runner.debug:SyncedOps.__getattr__.awaited": "debug_sync waits by design",
    "runner.kv_listener:tokens_of": "numpy arrays of the plan",
    "runner.logprobs:LogprobReport.read": "page-locked memory, after the step's event",
    "runner.logprobs:StoredLogprobs.read": "page-locked memory, after the step's event",
    "runner.logprobs:LogprobRequests.of_outputs": "a numpy array on the host",
    "runner.logprobs:LogprobRequests.of_prompts": "a numpy array on the host",
    "runner.model_runner:ModelRunner._synchronize": "between steps, in no step",
    "runner.profile:run_profile_step": "start-up, before the first step",
    "runner.profile:_launch_padding": "start-up, before the first step",
    "runner.ranks.groups:Nccl.connect": "start-up, before the first step",
    "runner.ranks.symmetric_memory:SymmetricMemory.allocate": "start-up, before the first step",
    "runner.request_state:RequestState.stage": "a numpy array of the plan",
    "runner.request_state:RequestState._check_rows": "a numpy array of the plan",
    "runner.request_state:RequestState.take_drafts": "numpy arrays of a result",
}


def _waits(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Scope, line and name of each call that can make the host wait for the device."""
    for scope, node in _scopes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            arguments = [ast.unparse(argument) for argument in node.args]
            if name in WAITING_CALLS or (name == "to" and "'cpu'" in arguments):
                yield scope, node.lineno, name


def no_hidden_wait(file: File) -> Iterator[str]:
    """A step never waits for the device: no call that copies to the host or synchronises."""
    if file.layer not in ("runner", "models") or file.name in WAITING_FILES:
        return
    for scope, line, name in _waits(file.tree):
        if f"{file.name}:{scope}" not in WAITING_FUNCTIONS:
            yield f"{line}: .{name}() in {scope}"


def kernels_import_constants_by_name(file: File) -> Iterator[str]:
    """No kernel reads a constant of a module: Triton's key of a cached kernel leaves it out.

    See findings/triton-constants-of-modules.sh.
    """
    modules = {
        alias.asname or alias.name
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if f"{node.module}.{alias.name}".removeprefix("mrv1.") in BY_NAME
    }
    for function in ast.walk(file.tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        decorators = [getattr(each, "func", each) for each in function.decorator_list]
        if not {_dotted(each) for each in decorators} & {"triton.jit", "gluon.jit"}:
            continue
        for node in ast.walk(function):
            is_read = isinstance(node, ast.Attribute) and _dotted(node.value) in modules
            if is_read and node.attr.isupper():
                yield f"{node.lineno}: {_dotted(node)}"


def atomics_name_their_order(file: File) -> Iterator[str]:
    """Every atomic operation of a kernel says ``sem``: the default is a barrier that few need."""
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Call) or file.layer != "kernels":
            continue
        module, _, name = _dotted(node.func).rpartition(".")
        names_order = any(keyword.arg == "sem" for keyword in node.keywords)
        if module in ("tl", "gl") and name.startswith("atomic_") and not names_order:
            yield f"{node.lineno}: {name} without sem"


LAUNCHES_BY_ROWS = {
    "kernels.layers.linear_tiles": "one order of additions for any tiles, see its docstring",
    "kernels.layers.linear_codes": "a deterministic call widens the weight",
    "kernels.layers.linear_code_tiles": "a deterministic call widens the weight",
    "kernels.layers.linear_registers": "a deterministic call has another configuration",
    "kernels.cache.quarter_write": "a maximum and codes, equal for any tiles",
    "kernels.sampling.edit_logits": "each logit by itself",
    "kernels.experts.route_experts": "a deterministic call has one configuration",
}


def launches_do_not_follow_the_rows(file: File) -> Iterator[str]:
    """A GPU's configuration does not depend on the batch: a row's bits may follow from it."""
    if file.layer != "kernels" or file.name in LAUNCHES_BY_ROWS:
        return
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef) and node.name == "default_for":
            for argument in (*node.args.args, *node.args.kwonlyargs):
                if argument.arg in ("num_tokens", "num_rows", "num_reqs"):
                    yield f"{node.lineno}: default_for takes {argument.arg}"


@cache
def _named_modules(name: str) -> tuple[str, ...]:
    return tuple(module for _, module in _modules_named(BY_NAME[name].tree))


def _modules_named(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and file of every module of mrv1 that an import names, wherever it stands."""
    for line, target in _imports(tree):
        *_, module = [*_modules(target)] or [""]
        if module:
            yield line, module


def _way(start: str, end: str, seen: set[str]) -> list[str]:
    """Return the files through which one file's imports lead to another, or an empty list."""
    if start == end:
        return [end]
    seen.add(start)
    for module in _named_modules(start):
        if module not in seen and (way := _way(module, end, seen)):
            return [start, *way]
    return []


def no_circle(file: File) -> Iterator[str]:
    """No import leads back to its file; imports in functions and for type checkers count too."""
    seen: set[str] = set()
    for line, module in _modules_named(file.tree):
        if module not in seen and (way := _way(module, file.name, seen)):
            yield f"{line}: {' -> '.join([file.name, *way])}"


OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
OTHER_PACKAGES = {"ti", "triton"}  # the names under which files of mrv1 lend them


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def _private_names(tree: ast.Module) -> frozenset[str]:
    """Return the private functions, classes, variables and attributes that a file defines."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return frozenset(filter(_is_private, found))


def no_private_name_across_files(file: File) -> Iterator[str]:
    """No file imports a private name of another, or reaches into its modules and objects."""
    for line, target in _imports(file.tree):
        _, *modules = ["", *_modules(target)]
        name = target.rpartition(".")[2]
        if modules and _is_private(name) and not modules[-1].endswith((name, f"{name}.__init__")):
            yield f"{line}: imports {target}"
    theirs = frozenset().union(*(_private_names(each.tree) for each in FILES))
    theirs -= _private_names(file.tree) | OF_NAMED_TUPLES
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and node.attr in theirs:
            base = ast.unparse(node.value)
            if base not in ("self", "cls") and base.partition(".")[0] not in OTHER_PACKAGES:
                yield f"{node.lineno}: {base}.{node.attr}"


MAX_CLASS_LINES = 500
MAX_PARAMETERS = 12


def no_long_class(file: File) -> Iterator[str]:
    """No class has more than 500 lines: another role gets a class of its own."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_CLASS_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines"


def no_long_signature(file: File) -> Iterator[str]:
    """No function outside of kernels names more than 12 parameters, except in ``LLM``."""
    if file.layer == "kernels":
        return
    for scope, node in _scopes(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and scope != "LLM":
            given = node.args
            count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
            if count > MAX_PARAMETERS:
                yield f"{node.lineno}: {scope}.{node.name} has {count} parameters"


Rule = Callable[[File], Iterator[str]]
RULES: list[Rule] = [
    arrows_point_one_way,
    only_integrations_and_peers_import_vllm,
    only_one_module_imports_triton,
    only_kernels_import_oracles,
    contracts_and_oracles_run_without_triton,
    kernel_folders_point_one_way,
    only_device_asks_the_gpu,
    page_formats_are_asked,
    engine_has_no_cuda,
    only_one_module_reads_the_environment,
    only_one_module_opens_checkpoints,
    no_code_of_a_checkpoint_runs,
    no_assert,
    ascii_only,
    no_hidden_wait,
    kernels_import_constants_by_name,
    atomics_name_their_order,
    launches_do_not_follow_the_rows,
    no_circle,
    no_private_name_across_files,
    no_long_class,
    no_long_signature,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule):
    violations = [f"{file.path}:{found}" for file in FILES for found in rule(file)]
    assert not violations, "\n".join([rule.__doc__ or "", *violations])


def test_files_were_found():
    names = {file.name for file in FILES}
    assert {"kernels._base.triton", "device", "runner.async_output"} <= names


# --- each rule finds code that breaks it, and no other code --------------------------------------

BREAKING = [
    (arrows_point_one_way, "kernels.rope", "from mrv1.models.rope import RopeConfig"),
    (arrows_point_one_way, "kernels.rope", "from mrv1 import config"),
    (arrows_point_one_way, "kernels.rope", "from mrv1.testing import interpreter"),
    (arrows_point_one_way, "kernels._base.triton", "from mrv1.testing import strategies"),
    (arrows_point_one_way, "models.batch", "def f():\n    import mrv1.runner.step"),
    (arrows_point_one_way, "sampler.params", "from mrv1 import LLM"),
    (arrows_point_one_way, "runner.step", "from mrv1.engine.request import Request"),
    (arrows_point_one_way, "device", "from mrv1.config import EngineConfig"),
    (arrows_point_one_way, "config", "from mrv1.device import resolve_device"),
    (arrows_point_one_way, "utils", "import torch"),
    (arrows_point_one_way, "integrations.llguidance", "from mrv1.cli.console import say"),
    (arrows_point_one_way, "integrations.llguidance", "from mrv1 import LLM"),
    (arrows_point_one_way, "cli.bench", "def f():\n    import benchmarks.attention"),
    (arrows_point_one_way, "cli.bench", "import_module('benchmarks.attention')"),
    (arrows_point_one_way, "engine.llm", "from mrv1.integrations.llguidance import Form"),
    (only_integrations_and_peers_import_vllm, "engine.llm", "import vllm.v1 as v1"),
    (only_integrations_and_peers_import_vllm, "engine.llm", "import_module('vllm')"),
    (only_integrations_and_peers_import_vllm, "benchmarks.kernels.attention", "import vllm"),
    (only_one_module_imports_triton, "kernels.rope", "import triton.language as tl"),
    (only_one_module_imports_triton, "cli", "def f():\n    from triton import knobs"),
    (only_kernels_import_oracles, "sampler.sampler", "from mrv1.kernels.reference import linear"),
    (only_kernels_import_oracles, "runner.step", "from mrv1.kernels import KVLayout, reference"),
    (
        only_kernels_import_oracles,
        "benchmarks.kernels.sampler",
        "import mrv1.kernels.step.reference",
    ),
    (
        only_kernels_import_oracles,
        "engine.llm",
        "from mrv1 import kernels\nkernels.reference.linear(x, w)",
    ),
    (contracts_and_oracles_run_without_triton, "kernels.step.contracts", "import triton"),
    (
        contracts_and_oracles_run_without_triton,
        "kernels.layers.contracts",
        "def f():\n    from mrv1.kernels._base.triton import tl",
    ),
    (
        contracts_and_oracles_run_without_triton,
        "kernels.layers.reference",
        "from mrv1.kernels.layers.linear import linear",
    ),
    (
        contracts_and_oracles_run_without_triton,
        "kernels.reference",
        "import mrv1.kernels._base.prefetch as prefetch",
    ),
    (
        kernel_folders_point_one_way,
        "kernels.step.gather_tokens",
        "from mrv1.kernels.cache.kv_layout import KVLayout",
    ),
    (kernel_folders_point_one_way, "kernels._base.checks", "from mrv1.kernels import layers"),
    (
        kernel_folders_point_one_way,
        "kernels.cache.qkv_cache_write",
        "from mrv1.kernels.layers.rope import apply_rope",
    ),
    (
        kernel_folders_point_one_way,
        "kernels.cache.codes",
        "from mrv1.kernels.attention.contracts import check_query_len",
    ),
    (kernel_folders_point_one_way, "kernels.step.reference", "from mrv1.kernels import reference"),
    (kernel_folders_point_one_way, "kernels.utils.checks", "import torch"),
    (only_device_asks_the_gpu, "runner.step", "torch.cuda.get_device_properties(0)"),
    (only_device_asks_the_gpu, "runner.step", "from torch.cuda import mem_get_info"),
    (only_device_asks_the_gpu, "runner.step", "from torch import cuda"),
    (only_device_asks_the_gpu, "engine.llm", "if torch.cuda.is_available(): pass"),
    (page_formats_are_asked, "runner.kv_cache", "if dtype == 'fp8_e4m3': pass"),
    (page_formats_are_asked, "runner.kv_cache", "f(is_fp8=True)"),
    (page_formats_are_asked, "runner.kv_cache", "layer.is_fp8"),
    (page_formats_are_asked, "runner.kv_cache", "def f(is_fp8): ..."),
    (engine_has_no_cuda, "engine.llm", "torch.cuda.empty_cache()"),
    (only_one_module_reads_the_environment, "runner.step", "os.environ['X']"),
    (only_one_module_reads_the_environment, "config", "import os\nos.environ['X']"),
    (only_one_module_reads_the_environment, "runner.step", "from os import getenv"),
    (
        only_one_module_opens_checkpoints,
        "runner.head_groups",
        "from mrv1.models.gguf_file import open_gguf",
    ),
    (only_one_module_opens_checkpoints, "models.config", "from safetensors import safe_open"),
    (
        no_code_of_a_checkpoint_runs,
        "models.config",
        "from transformers import AutoConfig\nAutoConfig.from_pretrained(path)",
    ),
    (
        no_code_of_a_checkpoint_runs,
        "models.config",
        "from transformers import AutoModel\nAutoModel.from_config(c, trust_remote_code=flag)",
    ),
    (no_code_of_a_checkpoint_runs, "models.checkpoint", "torch.load(path)"),
    (no_code_of_a_checkpoint_runs, "models.checkpoint", "torch.load(f, weights_only=False)"),
    (no_assert, "runner.step", "def f(x):\n    assert x"),
    (ascii_only, "runner.step", "# \u00e9"),
    (no_hidden_wait, "runner.input_batch", "def f(x):\n    return x.max().item()"),
    (no_hidden_wait, "runner.input_batch", "torch.cuda.synchronize()"),
    (no_hidden_wait, "runner.input_batch", "x.to('cpu', non_blocking=True)"),
    (no_hidden_wait, "models.decoder", "class A:\n    def f(self):\n        return self.x.cpu()"),
    (
        kernels_import_constants_by_name,
        "kernels.attention.prefill.hopper",
        "from mrv1.kernels.attention.prefill import warp_groups as wg\n"
        "@gluon.jit(do_not_specialize=['x'])\ndef f(x):\n    return x + wg.ROWS",
    ),
    (atomics_name_their_order, "kernels.cache.quarter_write", "tl.atomic_add(ptr, 1, mask=x)"),
    (
        atomics_name_their_order,
        "kernels.attention.prefill.hopper_queue",
        "y = gl.atomic_cas(ptr, 0, 1)",
    ),
    (
        launches_do_not_follow_the_rows,
        "kernels.layers.rms_norm",
        "class C:\n    def default_for(cls, dim, *, num_rows): ...",
    ),
    (no_circle, "kernels._base.checks", "import mrv1.kernels._base.checks"),
    (no_circle, "errors", "def f():\n    from mrv1.config import EngineConfig"),
    (no_circle, "errors", "if TYPE_CHECKING:\n    from mrv1.engine import LLM"),
    (no_circle, "kernels.registry", "from mrv1 import kernels"),
    (no_private_name_across_files, "runner.step", "from mrv1.sampler.params import _plain"),
    (no_private_name_across_files, "runner.step", "from mrv1 import lazy\nlazy._names"),
    (no_private_name_across_files, "engine.async_llm", "def f(llm):\n    llm._turns.take(f)"),
    (no_long_class, "engine.llm", "class LLM:\n" + "    x = 1\n" * 500),
    (
        no_long_signature,
        "engine.scheduler",
        "class Scheduler:\n    def __init__(self, a, b, c, d, e, f, g, h, *, i, j, k, l): ...",
    ),
]
KEEPING = [
    (arrows_point_one_way, "kernels._base.triton", "from mrv1.kernels._base import interpreter"),
    (arrows_point_one_way, "runner.step", "from mrv1.sampler import SamplingParams\nimport torch"),
    (arrows_point_one_way, "cli", "from mrv1 import LLM"),
    (
        arrows_point_one_way,
        "benchmarks.cli.app",
        "from benchmarks.report import page\nimport mrv1",
    ),
    (only_integrations_and_peers_import_vllm, "integrations.vllm.backend", "import vllm"),
    (only_integrations_and_peers_import_vllm, "benchmarks.peers.attention", "import vllm"),
    (
        only_one_module_imports_triton,
        "kernels.layers.rope",
        "from mrv1.kernels._base.triton import triton",
    ),
    (
        only_kernels_import_oracles,
        "runner.step",
        "from mrv1.kernels.registry import Ops, select_ops\nops = select_ops('reference')",
    ),
    (only_kernels_import_oracles, "kernels.registry", "from mrv1.kernels import reference"),
    (
        only_kernels_import_oracles,
        "benchmarks.kernels.kv_write",
        "from mrv1.kernels import reference",
    ),
    (
        contracts_and_oracles_run_without_triton,
        "kernels.layers.linear",
        "from mrv1.kernels._base.triton import tl, triton",
    ),
    (
        contracts_and_oracles_run_without_triton,
        "kernels.layers.contracts",
        "from mrv1.kernels._base.checks import check_tensor",
    ),
    (
        kernel_folders_point_one_way,
        "kernels.attention.reference",
        "from mrv1.kernels.cache.kv_layout import KVLayout",
    ),
    (
        kernel_folders_point_one_way,
        "kernels.cache.reference",
        "from mrv1.kernels.layers.reference import apply_rope, rms_norm",
    ),
    (kernel_folders_point_one_way, "kernels.registry", "from mrv1.kernels import reference"),
    (only_device_asks_the_gpu, "runner.step", "torch.cuda.Event()"),
    (page_formats_are_asked, "config", "Literal['auto', 'fp8_e4m3']"),
    (page_formats_are_asked, "runner.kv_cache", "'fp8_e4m3'"),
    (engine_has_no_cuda, "engine.llm", "torch.device('cuda')"),
    (only_one_module_reads_the_environment, "environment", "import os\nos.environ['X']"),
    (
        no_code_of_a_checkpoint_runs,
        "models.config",
        "from transformers import AutoModel\nAutoModel.from_config(c, trust_remote_code=False)",
    ),
    (
        no_code_of_a_checkpoint_runs,
        "benchmarks.engines.driver",
        "from mrv1.models import ModelConfig\nModelConfig.from_pretrained(path)",
    ),
    (no_code_of_a_checkpoint_runs, "runner.compile_ahead", "pickle.load(sys.stdin.buffer)"),
    (only_one_module_opens_checkpoints, "models.loading", "from mrv1.models import Checkpoint"),
    (no_assert, "testing.interpreter", "assert True"),
    (ascii_only, "runner.step", "# e"),
    (no_hidden_wait, "runner.async_output", "x.tolist()"),
    (no_hidden_wait, "engine.llm", "x.tolist()"),
    (
        kernels_import_constants_by_name,
        "kernels.attention.prefill.hopper",
        "from mrv1.kernels.attention.prefill import warp_groups as wg\n"
        "@gluon.jit\ndef f(x):\n    return wg.count_tiles(x) + ROWS\nROWS = wg.ROWS",
    ),
    (atomics_name_their_order, "kernels.step.post_update", "tl.atomic_add(ptr, 1, sem='relaxed')"),
    (launches_do_not_follow_the_rows, "kernels.layers.rms_norm", "def default_for(cls, dim): ..."),
    (
        launches_do_not_follow_the_rows,
        "kernels.layers.linear_tiles",
        "def default_for(cls, num_tokens): ...",
    ),
    (no_circle, "cli", "from mrv1.integrations import llguidance\nfrom mrv1 import LLM"),
    (no_circle, "kernels.registry", "from mrv1.kernels import reference"),
    (no_private_name_across_files, "runner.step", "from mrv1.kernels import _base\nself._x = 1"),
    (no_private_name_across_files, "cli.console", "import os\nos._exit(1)"),
    (no_private_name_across_files, "engine.llm", "class A:\n    def _f(self, b):\n        b._f()"),
    (no_long_class, "engine.llm", "class LLM:\n" + "    x = 1\n" * 499),
    (
        no_long_signature,
        "engine.llm",
        "class LLM:\n    def __init__(self, a, b, c, d, e, f, g, h, i, j, k, l): ...",
    ),
    (no_long_signature, "kernels.step", "def op(a, b, c, d, e, f, g, h, i, j, k, l, m): ..."),
]


@pytest.mark.parametrize(("rule", "name", "text"), BREAKING)
def test_rule_finds_a_violation(rule: Rule, name: str, text: str):
    assert list(rule(File(name, text)))


@pytest.mark.parametrize(("rule", "name", "text"), KEEPING)
def test_rule_accepts_code_that_keeps_it(rule: Rule, name: str, text: str):
    assert not list(rule(File(name, text)))


def test_every_rule_has_a_breaking_and_a_keeping_snippet():
    assert {rule for rule, _, _ in BREAKING} == {rule for rule, _, _ in KEEPING} == set(RULES)


def test_named_exceptions_are_still_needed():
    """An exception whose function is gone, or waits no longer, must be removed from the list."""
    assert {
        name for name in LAUNCHES_BY_ROWS if "def default_for(" in BY_NAME[name].text
    } == LAUNCHES_BY_ROWS.keys()
    waiting = {f"{file.name}:{scope}" for file in FILES for scope, _, _ in _waits(file.tree)}
    assert set(WAITING_FUNCTIONS) <= waiting
    assert set(WAITING_FILES) <= {file.name for file in FILES}
    assert set(ORACLE_USERS) <= {file.name for file in FILES if any(_oracle_imports(file.tree))}


# --- every op has an oracle and a test file ------------------------------------------------------


def _launchers(kernels: ModuleType | SimpleNamespace) -> dict[str, Callable[..., object]]:
    exported = {name: getattr(kernels, name) for name in kernels.__all__}
    return {name: op for name, op in exported.items() if inspect.isfunction(op)}


def _parameters(op: Callable[..., object]) -> list[tuple[str, object, object]]:
    parameters = inspect.signature(op).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]


def oracle_violations(
    kernels: ModuleType | SimpleNamespace, oracles: ModuleType | SimpleNamespace, tests: Path
) -> Iterator[str]:
    """Every exported launcher has an oracle of its name and signature, and a test file."""
    for name, op in _launchers(kernels).items():
        oracle = getattr(oracles, name, None)
        if oracle is None:
            yield f"{name}: no oracle"
        elif _parameters(op) != _parameters(oracle):
            yield f"{name}{inspect.signature(op)}: the oracle is {inspect.signature(oracle)}"
        test_file = tests / _test_file(op.__module__.removeprefix("mrv1.kernels."))
        if not test_file.is_file() or name not in test_file.read_text("utf-8"):
            yield f"{name}: {test_file.name} does not exist or does not test it"


def test_every_launcher_has_an_oracle_and_a_test_file():
    assert _launchers(mrv1.kernels)
    violations = list(oracle_violations(mrv1.kernels, reference, REPO / "tests" / "kernels"))
    assert not violations, "\n".join(violations)


def test_type_checkers_see_every_op_imported_from_its_module():
    tree = BY_NAME["kernels.registry"].tree
    at_start = {target for _, target in _imports_at_start(tree)}
    typed = {target for _, target in _imports(tree)} - at_start
    assert typed == {f"mrv1.kernels.{module}.{name}" for name, module in MODULE_OF_OP.items()}


def _test_file(module: str) -> str:
    """Return the test file of a module, relative to ``kernels``: its name without the subject."""
    return f"test_{module.partition('.')[2].replace('.', '_')}.py"


def _places(name: str, module: str) -> dict[str, list[Path]]:
    """Return the files that define or name one op, by their role."""
    folder = module.partition(".")[0]
    kernels, tests = REPO / "mrv1" / "kernels", REPO / "tests"
    cases = (tests / "compile").glob("cases_*.py")
    launched = f"mrv1.kernels.{module} import "
    return {
        "kernel": [kernels / f"{module.replace('.', '/')}.py"],
        "oracle": [kernels / folder / "reference.py"],
        "contract": [kernels / folder / "contracts.py"],
        "export": [p for p in kernels.glob("*.py") if _names_op(File("", p.read_text()), name)],
        "test": [tests / "kernels" / _test_file(module)],
        "compile case": [p for p in cases if launched in p.read_text("utf-8")],
    }


def _names_op(file: File, name: str) -> bool:
    """Return whether a file has an op's name outside of its docstrings."""
    return any(
        name in [getattr(node, part, "") for part in ("id", "attr", "value", "arg", "name")]
        for node in ast.walk(file.tree)
    )


@pytest.mark.parametrize(("name", "module"), MODULE_OF_OP.items())
def test_a_new_op_touches_six_files(name: str, module: str):
    """Kernel, oracle, contract, export, test, compile case: no second list of ops in kernels/."""
    places = _places(name, module)
    assert {what: len(paths) for what, paths in places.items()} == dict.fromkeys(places, 1)
    assert all(path.is_file() for (path,) in places.values())
    assert places["export"] == [REPO / "mrv1" / "kernels" / "registry.py"]


# The parameter of vLLM is another package's, which a filter of mrv1's own has not.
TRANSLATES_VLLM = {
    "mrv1/integrations/vllm/draw_sampler.py",
    "mrv1/integrations/vllm/sampling.py",
}


def recipe_files(title: str) -> set[str]:
    """Return the files in the table of one recipe of docs/adding.md."""
    _, _, rest = (REPO / "docs" / "adding.md").read_text("utf-8").partition(f"\n## {title}\n")
    rows = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    return {name for row in rows for name in row.split("|")[1].split("`")[1::2]}


def test_a_sampling_filter_touches_the_five_files_of_its_recipe():
    """Follow min_p, a filter: no other file of mrv1, and none of the compile cases, names it."""
    files = recipe_files("A sampling filter")
    assert len(files) == 5
    assert all((REPO / file).is_file() for file in files)
    naming = {file.path for file in FILES if _names_op(file, "min_p")} - TRANSLATES_VLLM
    assert {path for path in naming if path.startswith("mrv1/")} == {
        file for file in files if file.startswith("mrv1/")
    }
    for path in (REPO / "tests" / "compile").glob("*.py"):
        assert not _names_op(File("", path.read_text("utf-8")), "min_p")


def test_a_second_list_of_ops_is_found():
    for text in ("ops = ['linear']", "from x import linear", "linear = x", "x.linear(y)"):
        assert _names_op(File("", text), "linear")
    assert not _names_op(File("", '"""A linear layer."""\nlinear_call = 1'), "linear")


def test_oracle_check_finds_missing_oracles_and_tests(tmp_path: Path):
    def scale(x, factor, *, out=None): ...

    scale.__module__ = "mrv1.kernels.layers.scaling"
    kernels = SimpleNamespace(__all__=["scale", "VERSION"], scale=scale, VERSION=1)
    tested = tmp_path / "test_scaling.py"

    def found(oracle) -> list[str]:
        oracles = SimpleNamespace(scale=oracle) if oracle else SimpleNamespace()
        return list(oracle_violations(kernels, oracles, tmp_path))

    assert len(found(scale)) == 1  # no test file
    tested.write_text("def test_nothing(): ...")
    assert len(found(scale)) == 1  # a test file that does not name the op
    tested.write_text("def test_scale(): ...")
    assert not found(scale)
    assert found(None) == ["scale: no oracle"]
    assert "the oracle is (x, factor)" in found(lambda x, factor: None)[0]
    assert found(lambda x, factor, *, out=0: None)  # another default
