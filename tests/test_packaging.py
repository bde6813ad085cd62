"""The package and its wheel: version, typing marker, embedded model, pins, test lanes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
import trove_classifiers
from packaging.requirements import Requirement

import mrv1
from mrv1.integrations.vllm.versions import INTERFACES
from tests.conftest import _not_run_reason
from tests.forks import Forks

REPO = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
MAX_WHEEL_BYTES = 20 * 2**20
PIN = re.compile(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9._]*)")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pins() -> dict[str, str]:
    """Return versions by name, from a file in which every line is a comment or an exact pin."""
    pins = {}
    for line in (REPO / "constraints.txt").read_text("utf-8").splitlines():
        if line.startswith("#"):
            continue
        match = PIN.fullmatch(line)
        assert match, f"constraints.txt: expected name==version, got {line!r}"
        pins[_canonical(match[1])] = match[2]
    return pins


# --- the wheel -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel in place with the pinned hatchling: no isolated environment, no network."""
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_the_package_and_its_data(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tiny = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {f"mrv1/models/tiny/{name}" for name in tiny} <= names
    assert {"mrv1/py.typed", "mrv1/__init__.py", "mrv1/kernels/_base/triton.py"} <= names
    assert not [name for name in names if name.startswith(("tests", "training", "benchmarks"))]
    sources = {str(path.relative_to(REPO)) for path in (REPO / "mrv1").rglob("*.py")}
    assert sources <= names


def test_wheel_is_small(wheel: Path):
    assert wheel.stat().st_size <= MAX_WHEEL_BYTES


def test_wheel_names_its_licence_and_version(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
        text = archive.read(licence).decode()
        (about,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        about = archive.read(about).decode()
    assert "Apache License" in text
    assert "The mrv1 authors" in text
    assert f"\nVersion: {mrv1.__version__}\n" in about
    assert "\nLicense-Expression: Apache-2.0\n" in about


@pytest.mark.full
def test_a_wheel_of_the_sdist_generates_where_no_checkout_is(tmp_path: Path):
    """What is published is all that it needs: sdist -> wheel -> an environment of its own."""
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(tmp_path), "--target"]
    run = partial(subprocess.run, check=True, capture_output=True, text=True)
    run([*build, "sdist"], cwd=REPO)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    run([*build, "wheel"], cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    clean = tmp_path / "clean"
    run([sys.executable, "-m", "venv", "--without-pip", str(clean)])
    python = str(clean / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    run([*pip, str(wheel)])
    # Of mrv1's own environment the requirements alone: an editable install is not in the folder.
    (packages,) = (clean / "lib").glob("python*/site-packages")
    (packages / "requirements.pth").write_text(str(Path(pytest.__file__).parents[1]))
    code = "import mrv1; print(mrv1.__file__, mrv1.__version__)"
    bare = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    found, version = run([python, "-c", code], cwd=tmp_path, env=bare).stdout.split()
    assert Path(found).is_relative_to(clean)
    assert version == PROJECT["version"]
    command = [str(clean / "bin" / "mrv1"), "generate", "--model", "tiny", "--device", "cpu"]
    options = ["--prompt", "ROMEO:", "--max-tokens", "4", "--num-kv-blocks", "64"]
    done = run([*command, *options], cwd=tmp_path, env=bare)
    assert done.stdout.strip()


def test_the_metadata_is_true():
    classifiers = set(PROJECT["classifiers"])
    assert classifiers <= trove_classifiers.classifiers
    assert "Private :: Do Not Upload" not in classifiers
    versions = {each.rpartition(" ")[2] for each in classifiers if "Python :: 3." in each}
    tested = re.search(r"\(tested: ([\d. and,]+)\)", (REPO / "README.md").read_text("utf-8"))[1]
    assert versions == set(re.findall(r"[\d.]+", tested))
    assert f"\n## {PROJECT['version']}\n" in (REPO / "CHANGELOG.md").read_text("utf-8")


def test_no_text_installs_the_package_by_its_name():
    """It is on no index: whoever took the name there would be installed."""
    by_name = re.compile(r"pip install (-\S+ )*\\?[\"']?mrv1\b")
    folders = ("mrv1", "docs", "notebooks", "benchmarks", "examples", "findings")
    files = [path for folder in folders for path in (REPO / folder).rglob("*")]
    files = [path for path in files if path.suffix in (".py", ".md", ".ipynb", ".sh")]
    files += [REPO / "README.md", REPO / "CONTRIBUTING.md", REPO / "Makefile"]
    found = [path.name for path in files if by_name.search(path.read_text("utf-8"))]
    assert found == []


# --- version, dependencies, pins -----------------------------------------------------------------


def test_the_version_is_the_same_everywhere():
    assert mrv1.__version__ == PROJECT["version"] == metadata.version("mrv1")


def test_typing_marker_is_in_the_package():
    assert (Path(mrv1.__file__).parent / "py.typed").is_file()


def _requirement(text: str) -> str:
    return _canonical(re.split(r"[\s\[<>=!~;]", text, maxsplit=1)[0])


def _needed(extras: tuple[str, ...]) -> set[str]:
    """Return the installed packages that mrv1 with ``extras`` needs, directly or indirectly."""
    todo = [_requirement(text) for text in PROJECT["dependencies"]]
    for extra in extras:
        texts = PROJECT["optional-dependencies"][extra]
        todo += [_requirement(text) for text in texts]
        own = [Requirement(text) for text in texts if _requirement(text) == "mrv1"]
        todo += [name for each in own for name in _needed(tuple(each.extras))]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen or name == "mrv1":
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # another platform's or Python's requirement
        seen.add(name)
        todo += [_requirement(text) for text in requires if "extra ==" not in text]
    return seen


def test_every_installed_requirement_is_pinned_at_its_version():
    pins = _pins()
    needed = _needed(("dev",))
    assert {"torch", "triton", "transformers", "ruff", "pytest", "hatchling"} <= needed
    installed = {name: metadata.version(name).partition("+")[0] for name in needed}
    # A CUDA build of torch brings vendor libraries, which torch itself pins exactly.
    wanted = {k: v for k, v in installed.items() if not k.startswith(("nvidia-", "cuda-"))}
    assert {name: pins.get(name) for name in wanted} == wanted


def test_the_notebooks_extra_has_what_their_cells_import_and_run():
    used = set()
    for path in (REPO / "notebooks").glob("*.ipynb"):
        if path.stem != "inside_vllm":  # it says itself what it lacks
            cells = json.loads(path.read_text("utf-8"))["cells"]
            code = "\n".join(
                "".join(each["source"]) for each in cells if each["cell_type"] == "code"
            )
            used |= {*re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)}
            used |= {*re.findall(r'"-m", "(\w+)"', code)}
    distributions = metadata.packages_distributions()
    used = {_canonical(distributions[name][0]) for name in used if name in distributions}
    assert {"hypothesis", "matplotlib", "pytest"} <= used
    assert used | {"llguidance"} <= _needed(("notebooks",)) | {"mrv1"}  # the grammar of a request


def test_every_pin_is_within_the_range_that_is_declared():
    """Else no version of the range would be tested."""
    extras = PROJECT["optional-dependencies"].values()
    ranges = [Requirement(each) for each in [*PROJECT["dependencies"], *chain(*extras)]]
    pins = {each: _pins()[_canonical(each.name)] for each in ranges if _is_pinned(each.name)}
    assert {"torch", "transformers", "llguidance", "pillow"} <= {each.name for each in pins}
    assert [str(each) for each, pin in pins.items() if not each.specifier.contains(pin)] == []


def _is_pinned(name: str) -> bool:
    return _canonical(name) in _pins()


def test_every_extra_is_bounded_by_a_release_beyond_its_pin():
    """If a pinned version were beyond its bound, no version within the bound would be tested."""
    texts = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    bounds = {_requirement(text): text.partition("<")[2] for text in texts}
    del bounds["mrv1"]
    # One needs a GPU, one a folder of its own, one goes with the build of torch.
    elsewhere = {"flashinfer-python", "vllm", "torchvision"}
    pins = {name: _pins()[name] for name in bounds if name not in elsewhere}
    assert all(bounds.values())
    beyond = [name for name, pin in pins.items() if not _numbers(pin) < _numbers(bounds[name])]
    assert not beyond


def test_the_vllm_extra_allows_the_tested_versions_and_none_between():
    (text,) = PROJECT["optional-dependencies"]["vllm"]
    allowed = Requirement(text).specifier
    tested = [each.tested for each in INTERFACES.values()]
    assert all(map(allowed.contains, tested))
    others = [f"0.{minor}.0" for minor in range(20, 40) if f"0.{minor}" not in INTERFACES]
    assert not any(map(allowed.contains, others))
    (line,) = re.findall(r"^VLLMS := (.*)$", (REPO / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert line.split() == tested


def test_the_lanes_of_transformers_are_its_oldest_and_its_newest():
    """The oldest that a supported vLLM takes, and the newest, which constraints.txt has."""
    makefile = (REPO / "Makefile").read_text("utf-8")
    (line,) = re.findall(r"^TRANSFORMERS := (.*)$", makefile, re.MULTILINE)
    versions = line.split()
    (text,) = (each for each in PROJECT["dependencies"] if _requirement(each) == "transformers")
    assert versions == sorted(versions, key=_numbers)
    assert versions[-1] == _pins()["transformers"]
    assert all(map(Requirement(text).specifier.contains, versions))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


def test_pins_name_the_tested_torch_and_triton():
    assert (_pins()["torch"], _pins()["triton"]) == ("2.13.0", "3.7.1")


def test_ci_runs_the_full_suite():
    script = REPO / ".ci" / "run"
    assert script.stat().st_mode & 0o111, "not executable"
    assert "make test-full" in script.read_text("utf-8")


# --- the lanes of conftest.py --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("marks", "interpreting", "has_gpu", "reason"),
    [
        (set(), False, False, None),
        (set(), True, False, "not run: TRITON_INTERPRET=1 is set"),
        ({"interp"}, True, False, None),
        ({"interp"}, False, True, "not run: set TRITON_INTERPRET=1"),
        ({"interp", "gpu"}, False, True, None),
        ({"interp", "gpu"}, True, False, None),
        ({"interp", "gpu"}, False, False, "not run: set TRITON_INTERPRET=1"),
        ({"gpu"}, False, True, None),
        ({"gpu"}, False, False, None),
        ({"gpu"}, True, False, "not run: TRITON_INTERPRET=1 is set"),
        ({"gpu", "gpu_only"}, False, True, None),
        ({"gpu", "gpu_only"}, False, False, "not run: no GPU"),
    ],
)
def test_a_test_runs_only_in_its_lane(marks, interpreting, has_gpu, reason):
    assert _not_run_reason(marks, interpreting=interpreting, has_gpu=has_gpu) == reason


def test_a_test_of_several_gpus_runs_where_all_are():
    for missing, reason in ((-2, None), (0, None), (1, "not run: 1 GPUs too few")):
        marks = {"multi_gpu"}
        got = _not_run_reason(marks, interpreting=False, has_gpu=True, missing_gpus=missing)
        assert got == reason


def test_what_has_no_meaning_without_a_gpu_is_in_the_lane_of_gpus():
    """``gpu_only`` without ``gpu`` would be skipped everywhere."""
    alone = re.compile(r"(?<!mark\.gpu\n)@pytest\.mark\.gpu_only")
    of_file = re.compile(r"pytestmark = .*\.gpu\b")
    texts = {path: path.read_text("utf-8") for path in (REPO / "tests").rglob("test_*.py")}
    assert sum("@pytest.mark.gpu_only" in text for text in texts.values()) > 10
    assert not [
        path.name
        for path, text in texts.items()
        if alone.search(text) and not of_file.search(text)
    ]


LANE = """
import pytest

@pytest.mark.gpu
@pytest.mark.gpu_only
def test_on_a_gpu(): ...

@pytest.mark.gpu
def test_anywhere(): ...
"""


RUN_LANE = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"


def _run_lane(
    forks: Forks, tmp_path: Path, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_lane.py").write_text(LANE)
    (tmp_path / "conftest.py").write_text((REPO / "tests" / "conftest.py").read_text("utf-8"))
    arguments = ("-c", str(REPO / "pyproject.toml"), *options, str(tmp_path))
    return forks.run(RUN_LANE, *arguments, CUDA_VISIBLE_DEVICES="", **environment)


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_gpu_lane_without_a_gpu_exits_as_a_run_without_tests(
    forks: Forks, tmp_path: Path, workers: tuple[str, ...]
):
    run = _run_lane(forks, tmp_path, "-m", "gpu", *workers)
    assert run.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, run.stdout + run.stderr
    assert "2 tests not run: no GPU" in run.stdout
    assert " passed" not in run.stdout


def test_another_lane_succeeds_and_names_the_reason_of_its_skips(forks: Forks, tmp_path: Path):
    run = _run_lane(forks, tmp_path)
    assert run.returncode == pytest.ExitCode.OK, run.stdout + run.stderr
    assert "1 passed, 1 skipped" in run.stdout
    assert "not run: no GPU" in run.stdout


def test_gpu_lane_is_refused_in_the_interpreter(forks: Forks, tmp_path: Path):
    run = _run_lane(forks, tmp_path, "-m", "gpu", TRITON_INTERPRET="1")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unset TRITON_INTERPRET" in run.stderr
