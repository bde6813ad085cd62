"""Build the C modules through which Triton launches kernels on NVIDIA GPUs, before any launch.

They are a module of the driver, and before Triton 3.7 one for every signature of a kernel.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from mrv1.kernels._base.triton import triton

LIBCUDA = "libcuda.so.1"
"""The library of NVIDIA's driver, which the modules are linked to."""


def driver_module_left_out() -> str:
    """Return why this machine cannot build it (3.9 also looks for NVIDIA's library), or ""."""
    by_place = hasattr(triton.runtime.build, "compile_module_from_file")
    return f"{LIBCUDA} is not here" if by_place and not _has_libcuda() else ""


def build_driver_module() -> None:
    """Build the driver's module into Triton's cache; call it inside ``modules_built_only``."""
    _driver().CudaUtils()


def build_launcher(kernel: Any) -> None:  # noqa: ANN401 - Triton's CompiledKernel
    """Build what launches a kernel into Triton's cache; call it inside ``modules_built_only``."""
    driver = _driver()
    if hasattr(driver, "make_launcher"):  # as the kernel's first launch does
        driver.CudaLauncher(kernel.src, kernel.metadata)


@contextmanager
def modules_built_only() -> Iterator[None]:
    """Keep Triton from loading the modules that it builds; let it link without libcuda."""
    with patch.object(triton.runtime.build, "_load_module_from_path", _do_not_load):
        if _has_libcuda():
            yield
            return
        driver = _driver()
        with TemporaryDirectory() as directory:
            build_stub(Path(directory))
            dirs = [driver.libdevice_dir, directory]
            with patch.object(driver, "library_dirs", lambda: dirs):
                yield


def build_stub(directory: Path) -> None:
    """Build a library with the functions of NVIDIA's driver, all empty, to link with."""
    driver = _driver()
    header = Path(driver.include_dirs[0], "cuda.h").read_text()
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", header)))
    source = directory / "libcuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
    built = triton.runtime.build._build(
        "libcuda", str(source), str(directory), [], [], [], [f"-Wl,-soname,{LIBCUDA}"]
    )
    Path(built).rename(directory / LIBCUDA)


class _NotLoaded:
    """Stands in for a module that was built."""

    def __getattr__(self, name: str) -> None:
        return None


def _do_not_load(name: str, path: str) -> _NotLoaded:
    del name, path
    return _NotLoaded()


def _driver() -> Any:  # noqa: ANN401 - a module of triton
    return triton.backends.nvidia.driver


def _has_libcuda() -> bool:
    try:
        _driver().library_dirs()
    except (AssertionError, OSError, subprocess.SubprocessError):
        return False
    return True
