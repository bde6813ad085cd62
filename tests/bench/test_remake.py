"""The recipes of results files: each file has one, each is a command that the benchmarks take."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields, replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from benchmarks import remake
from benchmarks.cli import app as cli_bench
from benchmarks.cli import headwise as bench_headwise
from benchmarks.cli import kernels as bench_kernels
from benchmarks.cli import sampler as bench_sampler
from benchmarks.cli import vllm as bench_vllm
from benchmarks.remake import BY_HAND, COMMIT, OUTPUT, RECIPES, Recipe, in_parts

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RUNS = {
    "attention": bench_kernels, "kv_write": bench_kernels, "sampler": bench_sampler,
    "generate": cli_bench, "runner": cli_bench, "floor": cli_bench,
    "capacity": bench_headwise, "headwise": bench_headwise, "vllm": bench_vllm,
}  # fmt: skip


NUMBERS_OF_SAMPLES = {"repeats", "rounds"}
UNUSED = {"kv_scale": None, "vllm_graph_sizes": "vLLM's default"}
"""What a file has where an option does not matter: without an fp8 cache there are no scales."""


class StopError(Exception):
    """Ends a command once its options are known to be right."""


def parsed(run_bench, monkeypatch, folder: Path, name: str) -> Any:
    """Return the benchmark that a recipe's command line makes."""
    found = []

    def stop(bench: object, say: object) -> None:
        found.append(bench)
        raise StopError

    _, command, *options = RECIPES[name].arguments
    kind = command.replace("-", "_")
    monkeypatch.setattr(RUNS[kind], f"run_{kind}", stop)
    values = {OUTPUT: folder / "x.json", COMMIT: "c0ffee"}
    with pytest.raises(StopError):
        run_bench(command, *(values.get(each, each) for each in options))
    return found[0]


def test_every_results_file_has_a_recipe_or_a_reason():
    stems = [path.stem for path in RESULTS.glob("*.json")]
    names = {stem.removesuffix("-h200").removesuffix("-h100") for stem in stems}
    by_hand = {name for name in names if name.startswith(tuple(BY_HAND))}
    assert names - by_hand <= RECIPES.keys()
    assert not by_hand & RECIPES.keys()
    assert all(any(name.startswith(start) for name in names) for start in BY_HAND)


@pytest.mark.parametrize(
    "name", [n for n, each in RECIPES.items() if each.arguments[0] == "benchmarks"]
)
def test_a_recipe_is_a_benchmark_with_options_that_it_takes(
    run_bench, monkeypatch, tmp_path, name
):
    assert parsed(run_bench, monkeypatch, tmp_path, name).commit == "c0ffee"


@pytest.mark.parametrize(
    "name", [n for n, each in RECIPES.items() if each.arguments[0] != "benchmarks"]
)
def test_a_recipe_is_a_script_with_options_that_it_takes(monkeypatch, tmp_path, name):
    module, *options = RECIPES[name].arguments
    script, found = import_module(module), []
    if "--commit" not in options:  # it takes the file and the commit by their places
        assert options == [OUTPUT, COMMIT]
        assert " OUTPUT.json [COMMIT]" in script.__doc__
        return

    def stop(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> None:
        found.append(parse_args(parser, arguments))
        raise StopError

    parse_args = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    values = {OUTPUT: str(tmp_path / "x.json"), COMMIT: "c0ffee"}
    arguments = [values.get(each, each) for each in options]
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(StopError):
        script.main(*([arguments] if signature(script.main).parameters else []))
    assert (found[0].output, found[0].commit) == (tmp_path / "x.json", "c0ffee")


@pytest.fixture
def runs_code(monkeypatch, tmp_path_factory) -> str:
    """Return the name of a module that runs the code in its first argument."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "runs_code.py").write_text("import sys\nexec(sys.argv[1])\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "runs_code"


def test_parts_take_about_as_long_as_each_other(monkeypatch):
    monkeypatch.setattr(
        remake, "RECIPES", {n: Recipe((), s) for n, s in zip("abcd", (5, 4, 3, 1), strict=True)}
    )
    assert in_parts("abcd", 2) == [["a", "d"], ["b", "c"]]
    assert in_parts("abcd", 1) == [["a", "b", "c", "d"]]


def test_files_are_made_in_time_and_failures_are_named(monkeypatch, tmp_path, capfd, runs_code):
    def python(code: str, seconds: float, *needs: str) -> Recipe:
        return Recipe((runs_code, code, OUTPUT, COMMIT), seconds, needs)

    recipes = {
        "writes": python("open(sys.argv[2], 'w').write(sys.argv[3])", 3),
        "fails": python("sys.exit('no GPU')", 2),
        "lacks": python("", 2, "a_package_that_nobody_has"),
        "long": python("", 1e6),
        "wide": replace(python("", 2), gpus=99),
    }
    monkeypatch.setattr(remake, "RECIPES", recipes)
    arguments = [str(tmp_path), "--suffix", "x", "--commit", "c", "--seconds", "600"]
    assert remake.main(arguments) == 1
    assert (tmp_path / "writes-x.json").read_text() == "c"
    said = capfd.readouterr().err.splitlines()
    assert "fails: failed: no GPU" in said
    assert "lacks: not run: a_package_that_nobody_has is not installed" in said
    assert [line for line in said if line.startswith("wide: not run: it takes 99 GPUs, ")]
    assert [line for line in said if line.startswith("long: not run: it takes 1000000 s, ")]
    assert remake.main([*arguments, "writes", "long"]) == 0
    assert remake.main([*arguments, "--list"]) == 0
    assert f"{runs_code} sys.exit('no GPU')" in capfd.readouterr().out


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_command_that_is_ended_ends_its_own_processes(
    monkeypatch, tmp_path, capfd, runs_code, interrupted
):
    """It may write what it has; the processes that it started are gone."""
    code = (
        "import subprocess; child = subprocess.Popen(['sleep', '1000'])\n"
        "try: child.wait()\n"
        "finally: open(sys.argv[2], 'w').write(str(child.pid))"
    )
    recipe = Recipe((runs_code, code, OUTPUT, COMMIT), 1)
    monkeypatch.setattr(remake, "RECIPES", {"next": recipe, "begun": recipe})
    if interrupted:
        communicate = subprocess.Popen.communicate

        def interrupt(process, timeout=None):
            with suppress(subprocess.TimeoutExpired):
                return communicate(process, timeout=2)
            monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
            raise KeyboardInterrupt

        monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    arguments = [str(tmp_path), "--suffix", "x", "--commit", "c"]
    ended = remake.main([*arguments, *([] if interrupted else ["--seconds", "2"])])
    assert ended == (130 if interrupted else 1)
    said = capfd.readouterr().err
    assert ("begun: ended: no time was left" in said) is not interrupted
    (written,) = tmp_path.glob("*-x.json")
    state = Path(f"/proc/{written.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_recipe_measures_what_its_file_has(run_bench, monkeypatch, tmp_path, path):
    """The number of samples may differ."""
    name = path.stem.removesuffix("-h200").removesuffix("-h100")
    if name not in RECIPES or RECIPES[name].arguments[0] != "benchmarks":
        return
    bench = parsed(run_bench, monkeypatch, tmp_path, name)
    written = json.loads(path.read_text("utf-8"))
    conditions = {"shape": written.get("shape")} | written["conditions"]
    assert conditions
    for field in fields(bench):
        if field.name in conditions and field.name not in NUMBERS_OF_SAMPLES:
            found = json.loads(json.dumps(getattr(bench, field.name), default=str))
            assert conditions[field.name] in (found, UNUSED.get(field.name, found)), field.name


def test_parts_share_all_recipes_the_shortest_first(monkeypatch, tmp_path):
    monkeypatch.setattr(remake, "RECIPES", {n: Recipe((), 1) for n in "abcd"})
    parts = [remake.parse([str(tmp_path), "--part", f"{part}/2"]) for part in (1, 2)]
    assert [remake.chosen(part) for part in parts] == [["c", "a"], ["d", "b"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/none"], "folder: expected an existing directory"),
        (["{folder}", "x"], "names: expected some of .*, got x"),
        (["{folder}", "--part", "3/2"], "--part: expected I/N with 1 <= I <= N, got 3/2"),
        (["{folder}", "--part", "1"], "--part: expected I/N"),
    ],
)
def test_a_wrong_argument_names_itself(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        remake.parse([each.format(folder=tmp_path) for each in arguments])
    assert re.search(message, capsys.readouterr().err)
