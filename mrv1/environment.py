"""Environment variables and how mrv1 parses them; no other module reads a variable."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mrv1.errors import ConfigError

INT32_MAX = 2**31 - 1
"""Counts, slots and block ids are int32 on the device."""


def env_flag(name: str, default: str = "0") -> bool:
    """Return a variable as a bool, ``default`` if it is unset; ConfigError: no 1, yes, 0, off."""
    value = os.environ.get(name, default).lower()
    if value in ("1", "true", "on", "yes", "y"):
        return True
    if value in ("0", "false", "off", "no", "n", ""):
        return False
    raise ConfigError(f"{name}: expected 0 or 1, got {value!r}")


INTERPRET = env_flag("TRITON_INTERPRET")
"""Whether this process interprets Triton kernels on the CPU (Triton's own variable, read once)."""
FP_FUSION = env_flag("TRITON_DEFAULT_FP_FUSION", default="1")
"""Whether compiled kernels fuse a product into a sum (Triton's own variable, read once)."""


def env_count(name: str, default: int | None, *, least: int = 1) -> int | None:
    """Return a variable, ``default`` if it is unset; ConfigError: no int32 >= ``least``."""
    value = os.environ.get(name)
    if value is None:
        return default
    digits = value.lstrip("0") or value[-1:]
    if not digits.isdecimal() or not digits.isascii() or int(digits[:20]) < least:
        raise ConfigError(f"{name}: expected an integer >= {least}, got {value!r}")
    if len(digits) > len(str(INT32_MAX)) or int(digits) > INT32_MAX:
        raise ConfigError(f"{name}: expected at most {INT32_MAX}, got {value!r}")
    return int(digits)


def child_environment(**variables: str) -> dict[str, str]:
    """Return the environment for a child process, with some variables set."""
    return os.environ | variables


def module_paths() -> list[str]:
    """Return where this process looks for modules, for the ``PYTHONPATH`` of a child.

    Python passes over entries of ``sys.path`` that are no text, and a folder that is gone.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = ""
    paths = [path or here for path in list[object](sys.path) if isinstance(path, str)]
    return [path for path in paths if path]


def export(**variables: str) -> None:
    """Set variables of a package that a process of our own is about to import."""
    os.environ.update(variables)


@contextmanager
def exported(**variables: str) -> Iterator[None]:
    """Set variables that another package reads in the body, and put them back afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


VARIABLES: dict[str, Callable[[], Any]] = {
    name: partial(read, name, *default)
    for name, read, *default in (
        ("MRV1_DEBUG", env_flag),
        ("MRV1_DEBUG_SYNC", env_flag),
        ("MRV1_MAX_BAD_WORDS_NUM", env_count, 16),
        ("MRV1_BAD_WORDS_MAX_LEN", env_count, 8),
        ("MRV1_MAX_STOP_SEQS_NUM", env_count, 5),
        ("MRV1_STOP_SEQS_MAX_LEN", env_count, 8),
        ("MRV1_HEAD_POLICY", os.environ.get),
        ("MRV1_COMPILE_PROCESSES", partial(env_count, least=0), None),
    )
}
"""mrv1's own variables -> the function that reads the value (wrong value: ``ConfigError``), the
default of the ``EngineConfig`` field of the same name."""

FOREIGN_VARIABLES = (
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
    "TRITON_DEFAULT_FP_FUSION",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""Variables of other packages that change what mrv1 does."""


def environment() -> dict[str, str]:
    """Return the values of ``VARIABLES`` and ``FOREIGN_VARIABLES`` that are set."""
    names = (*VARIABLES, *FOREIGN_VARIABLES)
    return {name: os.environ[name] for name in names if name in os.environ}


def name_errors() -> list[str]:
    """Return an error for each ``MRV1_*`` variable not in ``VARIABLES``, with the likely name."""
    errors = []
    for name in sorted(os.environ):
        if name.startswith("MRV1_") and name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            errors.append(f"{name}: expected one of {', '.join(VARIABLES)}{hint}")
    return errors
