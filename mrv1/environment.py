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

# Each variable sets the default of the ``EngineConfig`` field of the same name.
DEBUG_VARIABLE = "MRV1_DEBUG"
DEBUG_SYNC_VARIABLE = "MRV1_DEBUG_SYNC"
MAX_BAD_WORDS_VARIABLE = "MRV1_MAX_BAD_WORDS_NUM"
BAD_WORDS_LEN_VARIABLE = "MRV1_BAD_WORDS_MAX_LEN"
MAX_STOP_SEQS_VARIABLE = "MRV1_MAX_STOP_SEQS_NUM"
STOP_SEQS_LEN_VARIABLE = "MRV1_STOP_SEQS_MAX_LEN"
HEAD_POLICY_VARIABLE = "MRV1_HEAD_POLICY"
COMPILE_PROCESSES_VARIABLE = "MRV1_COMPILE_PROCESSES"

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
    DEBUG_VARIABLE: partial(env_flag, DEBUG_VARIABLE),
    DEBUG_SYNC_VARIABLE: partial(env_flag, DEBUG_SYNC_VARIABLE),
    MAX_BAD_WORDS_VARIABLE: partial(env_count, MAX_BAD_WORDS_VARIABLE, 16),
    BAD_WORDS_LEN_VARIABLE: partial(env_count, BAD_WORDS_LEN_VARIABLE, 8),
    MAX_STOP_SEQS_VARIABLE: partial(env_count, MAX_STOP_SEQS_VARIABLE, 5),
    STOP_SEQS_LEN_VARIABLE: partial(env_count, STOP_SEQS_LEN_VARIABLE, 8),
    HEAD_POLICY_VARIABLE: partial(os.environ.get, HEAD_POLICY_VARIABLE),
    COMPILE_PROCESSES_VARIABLE: partial(env_count, COMPILE_PROCESSES_VARIABLE, None, least=0),
}
"""mrv1's own variables -> the function that reads the value (wrong value: ``ConfigError``)."""

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
