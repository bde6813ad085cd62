"""The names that ``mrv1.testing`` exports, and the packages that importing it needs."""

from __future__ import annotations

import pytest

from mrv1 import ConfigError, testing
from tests.forks import Forks


def test_strategies_are_imported_on_first_use():
    assert "paged_caches" in testing.strategies.__all__
    shared = {"build_paged_cache", "kv_layouts", "paged_caches", "ragged_batches"}
    modules = {"aot", "comparison", "interpreter", "strategies"}
    assert set(testing.__all__) == modules | shared | {"compare"}
    assert testing.compare is testing.comparison.compare
    assert all(getattr(testing, name) is getattr(testing.strategies, name) for name in shared)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'mrv1\.testing' has no attribute 'nothing'"):
        testing.nothing  # noqa: B018


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_kernels_import_without_hypothesis(forks: Forks, interpret: str):
    """Users who interpret kernels to learn have no test tools installed."""
    code = (
        "import sys; sys.modules['hypothesis'] = None; from mrv1 import kernels; "
        "assert 'mrv1.testing.strategies' not in sys.modules; print(len(kernels.__all__))"
    )
    run = forks.run(code, TRITON_INTERPRET=interpret)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 11


NOT_INSTALLED = (
    "{name}: expected the package {package} to be installed, got import of {package} halted; "
    "None in sys.modules; pip install -e '.[{extra}]'"
)


def _run_without(forks: Forks, package: str, code: str) -> str:
    """Run ``code`` in a process without ``package``; return its output or its error."""
    blocked = (
        f"import sys; sys.modules['{package}'] = None\n"
        f"try:\n    {code}\nexcept Exception as error:\n    print(repr(error))\n"
    )
    run = forks.run(blocked)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize(
    "code",
    [
        "from mrv1.testing import paged_caches",
        "import mrv1.testing; mrv1.testing.strategies",
        "import mrv1.testing.strategies",
    ],
)
def test_strategies_without_hypothesis_say_what_to_install(forks: Forks, code: str):
    expected = NOT_INSTALLED.format(
        name="mrv1.testing.strategies", package="hypothesis", extra="dev"
    )
    assert _run_without(forks, "hypothesis", code) == repr(ModuleNotFoundError(expected))


def test_the_rest_of_testing_needs_no_hypothesis(forks: Forks):
    code = "from mrv1.testing import aot, interpreter; print(aot.__name__, interpreter.__name__)"
    printed = _run_without(forks, "hypothesis", code)
    assert printed == "mrv1.testing.aot mrv1.testing.interpreter"


def test_grammars_without_llguidance_say_what_to_install(forks: Forks):
    code = "from mrv1.integrations.llguidance import LLGuidance; LLGuidance(None, 8)"
    expected = NOT_INSTALLED.format(name="LLGuidance", package="llguidance", extra="structured")
    assert _run_without(forks, "llguidance", code) == repr(ConfigError(expected))


def test_a_cpu_tensor_is_refused_where_kernels_are_compiled(forks: Forks):
    code = (
        "import torch; from mrv1 import kernels, errors\n"
        "try: kernels.silu_and_mul(torch.ones(1, 2))\n"
        "except errors.UnsupportedDeviceError as error: print(error)\n"
    )
    run = forks.run(code, TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr
    message = "x: expected a GPU tensor, got one on the CPU; set TRITON_INTERPRET"
    assert run.stdout.startswith(message)
