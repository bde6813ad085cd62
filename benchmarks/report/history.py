"""Whether the code that a results file measured has changed since the file's commit."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import mrv1
from mrv1.provenance import git

ROOT = Path(mrv1.__file__).resolve().parents[1]

ALL = ("mrv1", *(f":(exclude)mrv1/{name}" for name in ("bench", "cli", "testing")))
"""All code but what measures, prints and tests."""

ENGINE = (*ALL, *(f":(exclude)mrv1/{name}" for name in ("calibration", "integrations")))
"""What the figures of an engine can depend on."""

ENGINE_KINDS = {
    "async llm", "beside vllm", "capacity", "generate", "headwise", "kv_offload",
    "multimodal", "runner", "sanitize", "serving", "sleep", "smollm2_logits", "soak",
    "speculation", "start", "timeline",
}  # fmt: skip

Code = tuple[tuple[str, frozenset[str] | None], ...]
"""Paths for git, each with the names of its top level that count; None = all of it."""
Place = tuple[str, str | None]
"""A file, and a name of its top level; None = the whole file."""

KERNELS = "mrv1.kernels."
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def measured_code(kind: str, mode: str | None) -> Code:
    """Return the code that a kind of result measures.

    Args:
        kind: the ``op`` of the result; of an unknown one all code counts.
        mode: ``"decode"`` or ``"prefill"`` for attention.
    """
    if kind == "attention":
        return reached(f"mrv1/kernels/attention/{mode}/attention.py")
    if kind == "kv_cache_write":
        return reached(
            "mrv1/kernels/cache/kv_cache_write.py", "mrv1/kernels/cache/qkv_cache_write.py"
        )
    if kind == "products":
        return reached("mrv1/kernels/layers/linear_tiles.py")
    if kind == "sample_tokens":
        return reached(
            *(
                f"mrv1/kernels/sampling/{name}.py"
                for name in ("bad_words", "edit_logits", "groups", "logprobs", "sample_tokens")
            )
        )
    if kind == "recall":
        return whole(*ALL, ":(exclude)mrv1/integrations")
    return whole(*(ENGINE if kind in ENGINE_KINDS else ALL))


def whole(*paths: str) -> Code:
    """Return paths of which all code counts."""
    return tuple((path, None) for path in paths)


@cache
def has_changed(commit: str, code: Code) -> bool | None:
    """Return whether code differs between a commit and the checkout; None if that is unknown.

    Comments, docstrings and layout do not count. The checkout includes what is not committed, so
    that the answer is the same before and after a commit. It is unknown outside of a checkout, and
    where a shallow one lacks the commit. A commit that a whole history lacks was not kept, and
    counts as another code.
    """
    if git(ROOT, "rev-parse", "--show-toplevel") != str(ROOT):
        return None
    names = dict(code)
    changed = git(ROOT, "diff", "--name-only", "--no-renames", commit, "--", *names)
    if changed is None:
        return None if git(ROOT, "rev-parse", "--is-shallow-repository") == "true" else True
    return any(
        not path.endswith(".py")
        or _what_runs(_before(commit, path), names.get(path))
        != _what_runs(_now(path), names.get(path))
        for path in changed.splitlines()
    )


def _before(commit: str, path: str) -> str | None:
    return git(ROOT, "show", f"{commit}:{path}")


def _now(path: str) -> str | None:
    file = ROOT / path
    return file.read_text("utf-8") if file.is_file() else None


def _what_runs(source: str | None, names: frozenset[str] | None) -> str | None:
    """Return what runs of a Python file: its syntax tree without docstrings.

    Args:
        source: the file's text, None = there is none.
        names: those of the top level that count, with all that binds no name; None = all.
    """
    if source is None:
        return None
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    if names is None:
        return ast.dump(tree)
    parts = []
    for statement in tree.body:
        bound = _bound(statement)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            statement.names = [each for each in statement.names if _name(each) in names]
        if not bound or bound & names:
            parts.append(ast.dump(statement))
    return "\n".join(parts)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(statement, DEFINITIONS):
        return {statement.name}
    bound = set[str]()
    for node in ast.walk(statement):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {_name(alias) for alias in node.names}
        elif isinstance(node, DEFINITIONS):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return bound


def _name(alias: ast.alias) -> str:
    return alias.asname or alias.name


@cache
def reached(*paths: str) -> Code:
    """Return files of the checkout, and what they reach in other files of ``mrv1.kernels``.

    Of what is imported by name, only the definition counts, with all that it names in turn: a
    kernel that takes a constant from the file of a plan does not depend on the plan.
    """
    found = set[Place]()
    new: set[Place] = {(path, None) for path in paths if (ROOT / path).is_file()}
    while new:
        found |= new
        new = {place for path, name in new for place in _named_in(path, name)} - found
    files = {path: {name for at, name in found if at == path} for path, _ in found}
    return tuple(
        (path, None if None in names else frozenset(filter(None, names)))
        for path, names in sorted(files.items())
    )


@cache
def _statements(source: str) -> list[tuple[ast.stmt, set[str]]]:
    """Return the statements of a file's top level, each with the names that it binds."""
    return [(statement, _bound(statement)) for statement in ast.parse(source).body]


def _named_in(path: str, name: str | None) -> Iterator[Place]:
    """Yield what a name of a file, or the whole file, names in turn."""
    for statement, bound in _statements((ROOT / path).read_text("utf-8")):
        if name is not None and bound and name not in bound:
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and name is not None:
                yield path, node.id
            elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(KERNELS):
                is_inside = node is not statement  # of a definition, which needs all it imports
                for alias in node.names:
                    if name is None or is_inside or _name(alias) == name:
                        yield from _imported(str(node.module).replace(".", "/"), alias.name)


def _imported(module: str, name: str) -> Iterator[Place]:
    if (ROOT / f"{module}/{name}.py").is_file():
        yield f"{module}/{name}.py", None
    elif (ROOT / f"{module}.py").is_file():
        yield f"{module}.py", name
