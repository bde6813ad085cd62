"""What mrv1's vLLM integration does without vLLM, and with versions that it is not tested with."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from mrv1 import ConfigError
from mrv1.integrations.vllm import plugin, versions


@pytest.fixture(autouse=True)
def _nothing_cached():
    versions.interface.cache_clear()
    yield
    versions.interface.cache_clear()


@pytest.mark.parametrize("release", ["0.26.0", "0.26.1", "0.33.0+cu129", "0.33.0rc1"])
def test_releases_of_a_tested_minor_version_are_taken(release: str):
    assert versions.interface_of(release) is versions.INTERFACES[release[:4]]


@pytest.mark.parametrize("release", ["0.25.9", "0.3.3", "0.30.0", "0.34.0", "1.0.0", "0.2.6"])
def test_other_releases_are_refused_with_those_that_work(release: str):
    with pytest.raises(ConfigError, match=r"0\.26\.x or 0\.33\.x \(tested: 0\.26\.0, 0\.33\.0\)"):
        versions.interface_of(release)


def test_the_entry_point_warns_of_another_version_and_does_not_stop_vllm(monkeypatch, caplog):
    monkeypatch.setattr(versions, "version", lambda _: "0.30.0")
    plugin.register()
    assert "got 0.30.0" in caplog.text


def test_the_entry_point_warns_of_a_taken_slot_and_does_not_stop_vllm(monkeypatch, caplog):
    def taken() -> None:
        raise ConfigError("attention backend CUSTOM: expected an empty slot, got theirs.Backend")

    monkeypatch.setattr(versions, "version", lambda _: "0.33.0")
    monkeypatch.setattr(plugin.attention, "register", taken)
    plugin.register()
    assert "got theirs.Backend" in caplog.text


def test_without_vllm_the_error_says_what_to_install(monkeypatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[vllm\]'"):
        versions.interface()


def test_importing_the_package_imports_neither_torch_nor_vllm():
    code = (
        "import sys, mrv1.integrations.vllm.plugin; "
        "assert not {'torch', 'vllm', 'mrv1.runner'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
