"""Whether the code that a results file measured has changed since the file's commit."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import mrv1
from mrv1.bench.provenance import git

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


def measured_paths(kind: str, mode: str | None) -> tuple[str, ...]:
    """Return the paths of the code that a kind of result measures, for git.

    Args:
        kind: the ``op`` of the result; of an unknown one all code counts.
        mode: ``"decode"`` or ``"prefill"`` for attention.
    """
    if kind == "attention":
        return _with_imports(f"mrv1/kernels/attention/{mode}_attention.py")
    if kind == "kv_cache_write":
        return _with_imports(
            "mrv1/kernels/cache/kv_cache_write.py", "mrv1/kernels/cache/qkv_cache_write.py"
        )
    if kind == "products":
        return _with_imports("mrv1/kernels/layers/linear_tiles.py")
    if kind == "sample_tokens":
        return _with_imports(
            *(
                f"mrv1/kernels/sampling/{name}.py"
                for name in ("bad_words", "edit_logits", "groups", "logprobs", "sample_tokens")
            )
        )
    if kind == "recall":
        return (*ALL, ":(exclude)mrv1/integrations")
    return ENGINE if kind in ENGINE_KINDS else ALL


@cache
def has_changed(commit: str, paths: tuple[str, ...]) -> bool | None:
    """Return whether code differs between a commit and the checkout; None if that is unknown.

    Comments, docstrings and layout do not count. The checkout includes what is not committed, so
    that the answer is the same before and after a commit. It is unknown outside of a checkout, and
    where a shallow one lacks the commit. A commit that a whole history lacks was not kept, and
    counts as another code.
    """
    if git(ROOT, "rev-parse", "--show-toplevel") != str(ROOT):
        return None
    changed = git(ROOT, "diff", "--name-only", "--no-renames", commit, "--", *paths)
    if changed is None:
        return None if git(ROOT, "rev-parse", "--is-shallow-repository") == "true" else True
    return any(
        not name.endswith(".py") or _code_before(commit, name) != _code_now(name)
        for name in changed.splitlines()
    )


def _code_before(commit: str, name: str) -> str | None:
    text = git(ROOT, "show", f"{commit}:{name}")
    return None if text is None else _code(text)


def _code_now(name: str) -> str | None:
    path = ROOT / name
    return _code(path.read_text("utf-8")) if path.is_file() else None


def _code(text: str) -> str:
    """Return what runs of a Python file: its syntax tree without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@cache
def _with_imports(*names: str) -> tuple[str, ...]:
    """Return files of the checkout and all files of ``mrv1.kernels`` that they import."""
    found, new = set[str](), {name for name in names if (ROOT / name).is_file()}
    while new:
        found |= new
        new = {imported for name in new for imported in _kernel_imports(name)} - found
    return tuple(sorted(found))


def _kernel_imports(name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / name).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("mrv1.kernels."):
            module = str(node.module).replace(".", "/")
            for end in (f"{module}.py", *(f"{module}/{alias.name}.py" for alias in node.names)):
                if (ROOT / end).is_file():
                    yield end
