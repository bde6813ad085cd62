"""Names of a package that are imported on first use: importing the package costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec


def lazy_names(
    package: str, names_of_module: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return a package's ``__getattr__``, ``__dir__`` and ``__all__``; it has TYPE_CHECKING too.

    ``names_of_module``: submodule, relative to the package -> its names that the package exports.
    A submodule itself is also imported on first use, listed here or not.
    """
    module_of_name = {name: module for module, names in names_of_module.items() for name in names}
    namespace = vars(sys.modules[package])

    def get(name: str) -> object:
        if name in module_of_name:
            value = getattr(import_module(f"{package}.{module_of_name[name]}"), name)
            namespace[name] = value  # the next use does not come here
            return value
        submodule = f"{package}.{name}"
        if not name.startswith("_") and find_spec(submodule) is not None:
            return import_module(submodule)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*namespace, *module_of_name})

    return get, names, [*module_of_name]
