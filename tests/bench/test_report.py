"""``mrv1 bench report``: what is written equals the files; tables, pictures, mistakes."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.cli.app import app
from benchmarks.engines.vllm import MODES
from benchmarks.report import make_report
from benchmarks.report.charts import VLLM_MODES, Chart, Panel, Series, by_kind, charts
from benchmarks.report.draw import digest, draw, drawn_digest
from benchmarks.report.engines import (
    generate_table,
    modes_table,
    runner_table,
    served_summary,
    serving_table,
    start_table,
    summary_table,
    timeline_table,
    vllm_table,
)
from benchmarks.report.features import (
    async_table,
    features_table,
    kv_offload_table,
    sleep_table,
    speculation_table,
    start_parts_table,
)
from benchmarks.report.files import ResultFile, load
from benchmarks.report.kernels import all_reduce_table, kernel_table, products_table, sampler_table
from benchmarks.report.longest import longest_runs
from benchmarks.report.other import ABOUT, other_file
from benchmarks.report.page import BEGIN, END, KNOWN, NONE_YET, with_block
from benchmarks.report.policies import capacity_table, headwise_table
from benchmarks.report.rows import cell_label
from mrv1.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "benchmarks" / "results"
MAX_PICTURE_BYTES = 60_000
ORIGIN = "commit 0123456789ab, 2030-01-02."


def _result(**changes: Any) -> dict[str, Any]:
    entry = {
        "batch": 256,
        "tokens_per_s": 1234.5,
        "decode_step_ms": 4.0,
        "floor_ms": 2.0,
        "share_of_floor": 0.5,
        "prefill_ms": 30.04,
        "samples": [{"wall_s": 256 * 256 / 1234.5}],
    }
    alone = {"batch": 1, "floor_ms": None, "share_of_floor": None}
    alone["samples"] = [{"wall_s": 256 / 1234.5}]
    result = {
        "op": "generate",
        "schema": 2,
        "shape": "qwen3-0.6b",
        "weights": "random",
        "dtype": "bfloat16",
        "path": "triton",
        "device": {"name": "GPU X"},
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "commit": "0123456789abcdef",
        "date": "2030-01-02",
        "copy_bandwidth_bytes_per_s": 4.3e12,
        "conditions": {
            "prompt_tokens": 128,
            "output_tokens": 256,
            "sampling": "greedy",
            "repeats": 3,
            "clocks": "as found",
        },
        "results": [entry, entry | alone],
    }
    return result | changes


def _file(result: dict[str, Any], name: str = "x.json") -> ResultFile:
    return ResultFile(name, result)


# --- the report that is written -----------------------------------------------------------------


@pytest.fixture(scope="module")
def report():
    pages = [REPO / "README.md", REPO / "docs" / "performance.md"]
    return make_report(RESULTS, REPO / "docs" / "benchmarks.md", pages)


def test_page_pictures_and_readme_equal_the_results_files(report):
    command = "run: mrv1 bench report --page README.md --page docs/performance.md"
    assert [str(path.relative_to(REPO)) for path in report.differences()] == [], command


def test_the_page_names_every_file_with_its_commit(report):
    page = report.texts[REPO / "docs" / "benchmarks.md"]
    for path in RESULTS.glob("*.json"):
        result = json.loads(path.read_text("utf-8"))
        commit = str(result.get("commit") or "")[:12]
        assert re.search(rf"^\| `{re.escape(path.name)}` .*{commit}", page, re.M), path.name
        assert page.count(f"`{path.name}`") >= 2, path.name


def test_every_file_that_is_described_exists():
    names = {path.stem.rpartition("-")[0] or path.stem for path in RESULTS.glob("*.json")}
    assert ABOUT.keys() <= names


def test_the_readme_has_two_pictures_and_all_pictures_are_small(report):
    readme = report.texts[REPO / "README.md"]
    shown = re.findall(r"^!\[.+\]\((docs/benchmarks/.+\.svg)\)$", readme, re.M)
    assert len(shown) == 2
    for path in report.pictures:
        assert path.stat().st_size < MAX_PICTURE_BYTES, path.name


# --- writing, comparing, refusing ---------------------------------------------------------------


def test_a_changed_result_changes_the_report_and_check_tells(tmp_path: Path):
    results, page, readme = tmp_path / "results", tmp_path / "page.md", tmp_path / "README.md"
    results.mkdir()
    beside = _result(
        op="beside vllm", schema=1, peers={"vllm": "0.26.0"}, start_s={"mrv1": 5.0, "vllm": 9.0},
        results=[{"batch": 1, "tokens_per_s": {"mrv1": 30.0, "vllm": 15.0}, "mrv1_over_vllm": 2,
                  "samples_s": {"mrv1": [8.0, 9.0], "vllm": [16.0, 17.0]}}],
    )  # fmt: skip
    (results / "beside-vllm-x.json").write_text(json.dumps(beside))
    (results / "new.json").write_text(json.dumps({"op": "new", "conditions": {"seed": 3}}))
    readme.write_text(f"a\n{BEGIN.format('generate')}\n{END.format('generate')}\nb\n")
    options = ["--results", results, "--output", page, "--page", readme]

    def run(*more: str) -> int:
        return CliRunner().invoke(app, [*map(str, ["report", *options]), *more]).exit_code

    assert run("--check") == 1
    assert not page.exists()
    assert run() == 0
    assert run("--check") == 0
    assert re.findall(r"^!\[(\w+)", readme.read_text(), re.M) == ["Generation"]
    assert "`new.json`: new; device unknown; seed: 3; commit unknown." in page.read_text()
    pictures = {path.name for path in (tmp_path / "page").glob("*.svg")}
    assert pictures == {"beside-vllm-x.svg", "start.svg"}

    beside["results"][0]["samples_s"]["mrv1"] = [7.0, 9.0]
    (results / "beside-vllm-x.json").write_text(json.dumps(beside))
    changed = make_report(results, page, [readme]).differences()
    assert changed == [page, readme, tmp_path / "page" / "beside-vllm-x.svg"]
    (results / "beside-vllm-x.json").unlink()
    (tmp_path / "page" / "my own.svg").write_text("<svg/>")
    gone = make_report(results, page, [readme])
    drawn = [tmp_path / "page" / name for name in ("beside-vllm-x.svg", "start.svg")]
    assert gone.differences() == [page, readme, *drawn]
    gone.write()
    assert not gone.differences()
    assert [path.name for path in (tmp_path / "page").glob("*.svg")] == ["my own.svg"]
    assert NONE_YET in readme.read_text()


def test_mistakes_are_refused_by_name(tmp_path: Path):
    page = tmp_path / "page.md"
    for results, output, readme, message in (
        (tmp_path / "no", page, None, "--results: expected an existing directory"),
        (tmp_path, tmp_path / "no" / "page.md", None, "--output: expected an existing directory"),
        (tmp_path, tmp_path / "page", None, "--output: expected a file with a suffix"),
        (tmp_path, page, tmp_path / "README.md", "--page: expected an existing file"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_report(results, output, [readme] if readme else [])
    for text, message in (
        ("{", "x.json: expected JSON"),
        ("[]", "expected a JSON object, got l"),
        (
            '{"op": "generate", "schema": 2}',
            r"x\.json: expected the fields of 'generate' results, got KeyError\('results'\)",
        ),
    ):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            make_report(tmp_path, page)


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path):
    (tmp_path / "page.md").symlink_to(tmp_path / "none" / "page.md")
    options = ["--results", str(tmp_path), "--output", str(tmp_path / "page.md")]
    failed = CliRunner().invoke(app, ["report", *options])
    assert failed.exit_code == 1
    assert re.fullmatch(r"error: cannot write '.*/page\.md': No such file.*\n", failed.stderr)


def test_a_report_without_matplotlib_is_refused_before_it_is_written(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("mrv1.calibration.plot.find_spec", lambda _: None)
    page = tmp_path / "page.md"
    options = ["--results", str(tmp_path), "--output", str(page)]
    refused = CliRunner().invoke(app, ["report", *options], env={"COLUMNS": "200"})
    assert refused.exit_code != 0
    assert "bench report: expected the package matplotlib to be installed" in refused.output
    assert not page.exists()


def test_only_the_text_between_the_markers_changes():
    begin, end = BEGIN.format("generate"), END.format("generate")
    text = f"a\n{begin}\nold\n{end}\nb\n"
    assert with_block(text, "generate", "new") == f"a\n{begin}\nnew\n{end}\nb\n"
    for broken in ("a", begin, f"{end} {begin}", text + text):
        with pytest.raises(ConfigError, match="expected <!-- results:generate -->"):
            with_block(broken, "generate", "new")


# --- pictures -----------------------------------------------------------------------------------


def test_a_picture_is_an_svg_with_its_data_names_and_units():
    rising = Series("mrv1", ((0.0, 1.0), (1.0, 2.0)), ("1", "2"))
    close = Series("vllm", ((0.0, 0.0), (1.0, 1.99)))
    panels = tuple(
        Panel("a panel", "requests", "tokens/s", ((0.0, "1"), (1.0, "32")), (rising, close), scale)
        for scale in ("linear", "log", "share")
    )
    bars = tuple(Series(name, ((x, 3.0),), ("3.0 s",)) for x, name in ((0.0, "mrv1"), (1.0, "b")))
    ticks = ((0.0, "mrv1"), (1.0, "b"))
    chart = Chart(
        "x", "A title", (*panels, Panel("", "", "seconds", ticks, bars, is_bars=True)), ()
    )
    picture = draw(chart)
    assert draw(chart) == picture
    assert drawn_digest(picture) == digest(chart)
    assert drawn_digest("<svg/>") is None
    words = re.findall(r"<text [^>]*>([^<]*)</text>", picture)
    for word in ("A title", "a panel", "requests", "tokens/s", "vllm", "seconds", "3.0 s", "100%"):
        assert word in words
    assert 'style="fill: #ffffff"' in picture


def test_charts_show_the_figures_of_their_files():
    known = by_kind(file for file in load(RESULTS) if file.key in KNOWN)
    drawn = {chart.name: chart for chart in charts(known)}
    decode = drawn["decode-attention"]
    assert [panel.title.partition(",")[0] for panel in decode.panels] == [
        "bfloat16 cache", "fp8_e4m3 cache",
    ]  # fmt: skip
    for panel, name in zip(decode.panels, decode.files, strict=True):
        rows = json.loads((RESULTS / name).read_text("utf-8"))["results"]
        shares = {row["variants"]["mrv1"]["share_of_copy_bandwidth"] for row in rows}
        (ours,) = (series for series in panel.series if series.name == "mrv1")
        assert {y for _, y in ours.points} == shares
        assert len(panel.ticks) == len(rows)


@pytest.mark.parametrize("other", ["GPU X", "GPU Y"])
def test_charts_name_the_device_of_each_part(other: str):
    """Of a chart's title all devices; of a panel or a bar its own, where they differ."""
    start = {"seconds": 3.0, "triton_cache": "filled"}
    files = [
        _file(_result(start=start)),
        _file(_result(shape="llama3-8b", start=start, device={"name": other})),
    ]
    for name in ("attention-decode-fp8-h100.json", "attention-decode-h100.json"):
        result = json.loads((RESULTS / name).read_text("utf-8"))
        result["device"] = {"name": other if "fp8" in name else "GPU X"}
        files.append(_file(result, name))
    drawn = {chart.name: chart for chart in charts(by_kind(files))}
    is_mixed = other != "GPU X"
    for name in ("decode-attention", "start"):
        assert drawn[name].title.endswith(", GPU X and GPU Y" if is_mixed else ", GPU X")
    titles = [panel.title for panel in drawn["decode-attention"].panels]
    assert [title.partition("\n")[2] for title in titles] == (
        ["GPU X", "GPU Y"] if is_mixed else ["", ""]
    )
    bars = [label.partition("\n")[2] for _, label in drawn["start"].panels[0].ticks]
    assert bars == (["GPU X", "GPU Y"] if is_mixed else ["", ""])


def test_the_chart_beside_vllm_shows_the_longest_runs_of_each_engine():
    """Not those of another version, prompt, device, sampling or option, however many they are."""
    samples = {"mrv1": [1.0, 2.0, 4.0], "vllm": [2.0, 4.0, 8.0]}
    own = _result(
        op="beside vllm", peers={"vllm": "0.26.0"}, results=[{"batch": 1, "samples_s": samples}]
    )

    def alone(seconds: list[float], prompt: int = 128, **changes: Any) -> ResultFile:
        modes = {"vllm": {"speedup": 1.0, "samples": [{"whole_s": each} for each in seconds]}}
        cell = {"batch": 1, "prompt_tokens": prompt, "modes": modes}
        own = {"op": "vllm", "reference": "vllm", "peers": {"vllm": "0.26.0"}}
        whole = _result(results=[cell], **own | changes)
        del whole["conditions"]["prompt_tokens"]
        return _file(whole, f"{len(seconds)}.json")

    ours = _result()["results"][1] | {"samples": [{"wall_s": each} for each in (1.0, 1.0, 0.5)]}
    many = [0.25] * 9
    known = {
        "beside vllm": [_file(own, "own.json")],
        "generate": [_file(_result(results=[ours]), "ours.json")],
        "vllm": [
            alone([4.0, 8.0]),
            alone([8.0, 8.0, 16.0, 32.0]),
            alone(many, prompt=8192),
            alone(many, peers={"vllm": "0.33.0"}),
            alone(many, device={"name": "another"}),
            alone(many, conditions=_result()["conditions"] | {"sampling": "temperature 1"}),
            alone(many, conditions=_result()["conditions"] | {"enable_prefix_caching": True}),
        ],
    }
    chart = next(charts(known))
    mrv1, vllm = chart.panels[0].series
    assert (mrv1.name, mrv1.points, mrv1.spreads) == ("mrv1", ((0.0, 256.0),), ((256.0, 512.0),))
    assert (vllm.name, vllm.points, vllm.spreads) == (
        "vLLM 0.26.0", ((0.0, 256 / 12),), ((8.0, 32.0),)
    )  # fmt: skip
    assert (mrv1.notes, vllm.notes) == (("256 (12.0x)\n3 runs",), ("21\n4 runs",))
    assert "mrv1: 256 to 512 in 3 runs; vLLM 0.26.0: 8 to 32 in 4 runs" in chart.caption
    assert re.findall(r"`(.+?)` \(commit 0123456789ab, 2030-01-02\)", chart.caption) == [
        "ours.json", "4.json",
    ]  # fmt: skip
    assert chart.caption.endswith("vLLM 0.33.0 is newer, and not measured.")
    lines = re.findall(r'<g id="LineCollection_\d', draw(chart))
    assert len(lines) == 2
    # Runs in turns come before any number of others.
    in_turns = _file(own | {"conditions": own["conditions"] | {"order": "in turns, run by run"}})
    chart = next(charts(known | {"beside vllm": [in_turns]}))
    assert [line.notes for line in chart.panels[0].series] == [
        ("128 (2.0x)\n3 runs",), ("64\n3 runs",),
    ]  # fmt: skip


def test_the_readme_has_one_figure_for_each_cell_and_names_the_peers_version(report):
    readme = report.texts[REPO / "README.md"]
    (chart,) = (each for each in report.pictures.values() if each.name == "beside-vllm-h100")
    (ours, theirs), batches = chart.panels[0].series, [label for _, label in chart.panels[0].ticks]
    rows = dict(re.findall(r"^\| qwen3-0.6b \| (\d+) \| ([\d,]+) \|", readme, re.M))
    assert rows == {
        batch: note.split(" (")[0] for batch, note in zip(batches, ours.notes, strict=True)
    }
    below = readme.partition(f"{chart.name}.svg)\n")[2].partition("![")[0]
    assert theirs.name in below
    assert min(int(re.search(r"(\d+) runs", note)[1]) for note in theirs.notes) >= 20


def test_the_chart_of_vllm_has_a_bar_for_each_cell_and_mode_of_a_shape():
    def of(shape: str, batch: int, prompt: int, runs: int = 2, **speedups: float) -> Any:
        modes = {
            name.replace("_", "-"): {"speedup": ratio, "samples": [{}] * runs}
            for name, ratio in speedups.items()
        }
        cell = {"batch": batch, "prompt_tokens": prompt, "modes": modes}
        return _file(
            _result(shape=shape, results=[cell], reference="vllm", peers={"vllm": "0.26.0"})
        )

    files = [
        of("b", 32, 8192, vllm=1.0, vllm_fp8=1.25, backend_fp8=1.5),
        of("b", 32, 8192, vllm=1.0, backend=0.75, worker=2.0),
        of("b", 32, 8192, runs=1, backend=0.5, worker=4.0),  # fewer runs are not shown
        of("a", 1, 128, vllm=1.0, worker=3.0),
    ]
    for batch, speedup in ((256, 2.5), (512, None)):  # None: vLLM alone failed in this cell
        worker = {"speedup": speedup, "samples": [{}]}
        files[-1].result["results"].append(
            {"batch": batch, "prompt_tokens": 128, "modes": {"worker": worker}}
        )
    worker_alone = of("c", 1, 128, worker=1.0)
    worker_alone.result["reference"] = "worker"  # vLLM itself did not start
    (chart,) = charts({"vllm": [*files, worker_alone]})
    assert chart.title == "mrv1 in vLLM 0.26.0, GPU X"
    b, a = chart.panels
    assert (b.title, a.title) == tuple(f"{each}, requests x prompt tokens" for each in "ba")
    bars = zip(b.ticks, b.series, strict=True)
    assert [(label, series.points[0][1]) for (_, label), series in bars] == [
        ("32 x 8,192, mrv1's worker", 2.0),
        ("32 x 8,192, mrv1's attention", 0.75),
        ("32 x 8,192, mrv1's attention, fp8 cache", 1.5),
        ("32 x 8,192, vLLM alone, fp8 cache", 1.25),
    ]
    assert [label for _, label in a.ticks] == [
        "1 x 128, mrv1's worker", "256 x 128, mrv1's worker",
    ]  # fmt: skip
    assert [series.notes for series in a.series] == [("3.00x",), ("2.50x",)]


def test_every_mode_of_bench_vllm_has_a_name_in_its_chart():
    assert VLLM_MODES.keys() == MODES.keys()


def test_a_chart_of_serving_has_a_panel_for_each_time():
    chart = next(charts({"serving": [_file(_serving(), "serving-x.json")]}))
    assert chart.title == "Serving: qwen3-0.6b, 5 a second, GPU X"
    assert [panel.y_label for panel in chart.panels] == ["first token, ms", "whole request, ms"]
    assert [series.name for series in chart.panels[0].series] == ["mrv1"]
    assert chart.panels[0].series[0].points[100] == (100.0, 110.0)


def _policies_files() -> dict[str, list[ResultFile]]:
    conditions = {"full_share": 0.25, "context": 131_072}
    fits = [{"variant": name, "ratio": ratio} for name, ratio in (("uniform", 1), ("recycled", 4))]
    capacity = _result(op="capacity", schema=2, conditions=conditions, results=fits)
    conditions = {"full_share": 0.5, "prompt_tokens": 8192, "output_tokens": 4096}
    times = [
        {"variant": name, "between_tokens_ms": ms} for name, ms in (("uniform", 4), ("kept", 3))
    ]
    served = _result(op="headwise", schema=1, conditions=conditions, results=times)
    return {"capacity": [_file(capacity)], "headwise": [_file(served), _file(served)]}


def test_a_chart_of_policies_has_requests_and_times_by_share():
    fits, times = next(charts(_policies_files())).panels
    assert fits.series[0].points == ((0.25, 4), (1.0, 1))
    assert times.series[0].points == ((0.5, 0.75), (1.0, 1.0))
    assert times.ticks == ((0.25, "25%"), (0.5, "50%"), (1.0, "100%"))


# --- tables -------------------------------------------------------------------------------------


def test_kernel_tables_show_our_time_and_the_ratios_of_peers():
    def variant(us: float) -> dict[str, object]:
        return {"median_us": us, "share_of_copy_bandwidth": 0.956, "flops_per_s": 4.5e14}

    cell = {"batch": 8, "context": 4096, "query_len": 1, "peer_time_over_ours": {"peer": 1.238}}
    alone = cell | {"batch": 1, "peer_time_over_ours": {}, "variants": {"mrv1": variant(9)}}
    shape = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
    result = _result(
        op="attention", schema=2, mode="decode", kv_dtype="auto", conditions=shape,
        peers={"peer": "1.2", "other": "not installed"}, geometric_mean_over_ours={"peer": 1.238},
        results=[cell | {"variants": {"mrv1": variant(1234.56), "peer": variant(1528)}}, alone],
    )  # fmt: skip
    table = kernel_table(_file(result))
    for said in (
        "| batch x context | us | of copy bandwidth | peer |",
        "| 8 x 4096 | 1,234.6 | 96% | 1.24x |",
        "| 1 x 4096 | 9.0 | 96% | - |",
        "| geometric mean |  |  | 1.24x |",
        "`x.json`: bfloat16, cache auto, triton path on one GPU X; 32 query heads, 8 KV heads of "
        "128, blocks of 16; copy bandwidth 4.3e+12 bytes/s; torch 2.11.0, triton 3.6.0, peer 1.2; "
        + ORIGIN,
    ):
        assert said in table
    roles = {"full_heads": 0.25, "window": 4096, "sink": 64}
    result["mode"] = "prefill"
    result["conditions"] = shape | {"head_roles": roles, "soft_cap": 50.0, "logit_sinks": True}
    for query_len, label in ((4096, "8 x 4096"), (64, "8 x 64 of 4096")):
        result["results"][0]["query_len"] = query_len
        table = kernel_table(_file(result))
        assert f"| {label} | 1,234.6 | 450 | 1.24x |" in table
    assert (
        "25% of the heads full, the others see 4,096 tokens and 64 in front; soft cap 50; "
        in table
    )
    assert "; logit sinks; " in table


def test_writes_of_random_blocks_are_named():
    ours = {"median_us": 2.5, "share_of_copy_bandwidth": None}
    shape = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
    result = _result(
        op="kv_cache_write", schema=2, kv_dtype="auto", geometric_mean_over_ours={},
        conditions=shape | {"slot_order": "blocks"},
        results=[{"tokens": 2048, "variants": {"mrv1": ours}, "peer_time_over_ours": {}}],
    )  # fmt: skip
    table = kernel_table(_file(result))
    assert "| tokens | us | of copy bandwidth |" in table
    assert "| 2,048 | 2.5 | - |" in table
    assert "cache auto, blocks in random order, triton path" in table


def test_table_shows_the_figures_and_their_conditions():
    table = generate_table(_file(_result()))
    assert "| 256 | 1,234 | 4.00 | 2.00 | 50% | 30.0 |" in table
    assert "| 1 | 1,234 | 4.00 | - | - | 30.0 |" in table
    for said in ("GPU X", "128 prompt + 256 output", "4.30 TB/s", "clocks as found", ORIGIN):
        assert said in table


def test_table_shows_optional_figures_and_options_that_are_not_the_default():
    result = _result(start={"seconds": 18.85, "triton_cache": "empty"})
    result["results"] = [entry | {"host_ms": 0.0584} for entry in result["results"]]
    result["conditions"] |= {
        "deterministic": True, "overlap": True, "cuda_graphs": False, "kv_cache_dtype": "fp8_e4m3",
        "kv_scale": "token", "attention_backend": "flashinfer",
    }  # fmt: skip
    table = generate_table(_file(result))
    for said in (
        "| batch | tokens/s | ms per decode step | of it host, ms | floor, ms | share of floor |",
        "| 256 | 1,234 | 4.00 | 0.058 | 2.00 | 50% | 30.0 |",
        "bfloat16, KV fp8_e4m3 with a scale per token, attention by flashinfer, "
        "deterministic=True, cuda_graphs=False, triton path",
        "engine started in 18.9 s, Triton's cache empty; commit",
    ):
        assert said in table
    assert "overlap" not in table
    assert "| mrv1, qwen3-0.6b, Triton's cache empty | 18.9 | `x.json`, GPU X; " in start_table(
        [_file(result)]
    )


def test_summary_shows_both_shapes():
    large = _result(shape="llama3-8b", date="2030-01-03")
    large["conditions"] = large["conditions"] | {"repeats": 1}
    large["device"] = {"name": "Another"}
    files = [_file(_result()), _file(large)]
    table = summary_table(files, longest_runs({"generate": files}))
    for said in (
        "| qwen3-0.6b | 256 | 1,234 | 4.00 | 2.00 | 50% |",
        "| llama3-8b | 1 | 1,234 | 4.00 | - | - |",
        "qwen3-0.6b: one GPU X, 3 runs, commit 0123456789ab, 2030-01-02; "
        "llama3-8b: one Another, 1 run, commit 0123456789ab, 2030-01-03",
    ):
        assert said in table


def test_vllm_table_shows_both_throughputs_and_their_ratio():
    entry = {"batch": 32, "tokens_per_s": {"mrv1": 3000.4, "vllm": 1500.2}, "mrv1_over_vllm": 2.0}
    table = vllm_table(_file(_result(results=[entry], peers={"vllm": "0.26.0"})))
    assert "| 32 | 3,000 | 1,500 | 2.00x |" in table
    assert "torch 2.11.0, triton 3.6.0, vllm 0.26.0" in table


def test_modes_of_vllm_show_figures_and_failures():
    figures = {"tokens_per_s": 1234.5, "ttft_ms": 10.04, "tpot_ms": 2.5, "speedup": 1.5}
    modes = {"vllm": {"error": None}, "worker": {"error": "no memory"}}
    cell = {"batch": 32, "prompt_tokens": 8192, "modes": {"vllm": figures}}
    seconds = [{"whole_s": 8.0}, {"whole_s": 4.0}, {"whole_s": 6.4}]
    cell["modes"]["vllm"] |= {"share_of_floor": None, "samples": seconds}
    conditions = {"output_tokens": 256, "sampling": "greedy", "repeats": 3}
    result = _result(results=[cell], modes=modes, conditions=conditions)
    table = modes_table(_file(result))
    assert "| 32 x 8,192 | vllm | 1,234 | 1,024 to 2,048 | 1.50x | 10.0 | 2.50 | - |" in table
    assert "; medians of 3 runs in each of 1 process; " in table
    result["conditions"]["rounds"] = 2
    assert "; medians of 3 runs in each of 2 processes; " in modes_table(_file(result))
    result["conditions"]["in_turns"] = True
    assert " in each of 2 processes, the modes in turns; " in modes_table(_file(result))
    result["weights"] = "dummy"
    assert " shape, weights of each engine's own, bfloat16, " in modes_table(_file(result))
    conditions["made_up_weights"] = "the same for every mode"
    assert " made-up weights, the same for every mode, bfloat16, " in modes_table(_file(result))
    assert "; worker failed: no memory; commit" in table


def _serving() -> dict[str, Any]:
    spread = {
        "mean": 1.0, "median": 60.0, "p99": 109.0,
        "percentiles": [float(10 + each) for each in range(101)],
    }  # fmt: skip
    figures = {
        "output_throughput": 1234.5, "total_token_throughput": 5678.0, "request_goodput": None,
        "ttft_ms": spread, "itl_ms": None, "e2el_ms": spread,
    }  # fmt: skip
    conditions = {
        "num_conversations": 100, "num_turns": 3, "lengths": "lognormal", "request_rate": 5.0,
        "new_input_tokens": 10_000, "output_tokens": 2000, "repeats": 3,
        "goodput": {"ttft": 500.0}, "prefix_len": 64, "peak_share": 0.7, "warm_up_runs": 1,
        "stream_outputs": True,
        "max_num_seqs": 256, "sampling": {"temperature": 0.0},
    }  # fmt: skip
    engines = {"mrv1": {"figures": figures, "error": None, "request_rate": 5.0},
               "vllm": {"figures": None, "error": "no memory", "request_rate": None}}  # fmt: skip
    ratios = {"mrv1": {"output_throughput": 1.5}}
    return _result(
        op="serving", schema=2, conditions=conditions, results=engines, over_vllm=ratios
    )


def test_serving_table_shows_medians_and_99th_percentiles():
    table = serving_table(_file(_serving()))
    for said in (
        "| mrv1 | 1,234 | 5,678 | - | 60.0 / 109.0 | - | 60.0 / 109.0 |",
        "| vllm | - | - | - | - | - | - |",
        "100 conversations, turns of each: 3, 5 a second (70% of what the first engine serves at "
        "most); 10,000 new input + 2,000 output tokens",
        "at most 256 requests at a time, temperature 0; ",
        "medians of 3 runs after a warm-up",
        "mrv1 over vLLM, output_throughput: 1.50x; ",
        "a good request has at most ttft 500 ms",
        "vllm failed: no memory",
    ):
        assert said in table


def test_the_summary_of_serving_has_whole_files_of_a_share_of_the_peak():
    whole, at_once = _serving(), _serving()
    failed = deepcopy(whole)
    for result in (whole, at_once):
        times = {"median": 8.2, "p99": 62.6}
        figures = whole["results"]["mrv1"]["figures"]
        result["results"] = {
            name: {"figures": figures | {"itl_ms": times}, "error": None, "request_rate": 5.0}
            for name in ("vllm", "mrv1")
        }
    at_once["conditions"]["peak_share"] = None
    whole["peers"] = {"vllm": "0.26"}
    table = served_summary([_file(each) for each in (failed, whole, at_once)])
    assert table.count("\n| qwen3-0.6b |") == 2
    for said in (
        "| qwen3-0.6b | vllm | 1,234 | 60 / 109 | 8 / 63 |",
        "| qwen3-0.6b | mrv1 | 1,234 | 60 / 109 | 8 / 63 |",
        "qwen3-0.6b: 100 conversations, 5 a second, 70% of what vllm serves at most; one GPU X, "
        "vllm 0.26, 3 runs, commit 0123456789ab",
    ):
        assert said in table
    assert served_summary([_file(failed)]) == served_summary([]) == ""


def test_the_table_of_products_has_a_column_for_each_number_of_tokens():
    entry = {"shape": "s", "product": "qkv", "in": 4096, "out": 6144, "tokens": 64,
             "flops_per_s": 1.594e14, "tiles_over_library": 1.446, "us": {}}  # fmt: skip
    other = entry | {"tokens": 1485, "flops_per_s": 7e14, "tiles_over_library": 2.0}
    lone = entry | {"product": "o", "tokens": 1485}
    conditions = {"repeats": 7, "timer": "T", "clocks": "as found"}
    table = products_table(_file(_result(results=[entry, other, lone], conditions=conditions)))
    for said in (
        "| product, inputs x outputs | 64 | 1,485 |",
        "| s qkv, 4,096 x 6,144 | 159 (1.45x) | 700 (2.00x) |",
        "| s o, 4,096 x 6,144 | - | 159 (1.45x) |",
        "medians of 7 samples, T",
    ):
        assert said in table


def test_the_table_of_sums_over_ranks_shows_peers():
    us = {
        "mrv1": 3.32,
        "two_shot": 4.46,
        "nccl": 16.6,
        "symm_one_shot": 6.49,
        "symm_two_shot": 6.2,
    }
    entry = {"tokens": 256, "hidden": 4096, "us": us}
    conditions = {"gpus": 2, "repeats": 7, "timer": "T", "data": "D", "clocks": "as found"}
    table = all_reduce_table(_file(_result(results=[entry], conditions=conditions)))
    for said in (
        "| [256, 4,096] | 3.3 | 16.6 | 6.5 | 6.2 |",
        "microseconds of a sum over 2 GPUs",
        "medians of 7 samples, T; D",
    ):
        assert said in table


def test_sampler_tables_show_reads_and_peers():
    ours = {"median_us": 1234.56, "reads": 2.5, "share_of_copy_bandwidth": 0.4}
    variants: dict[str, dict[str, float]] = {"mrv1": ours}
    variants |= {name: {"median_us": 1.0} for name in ("flashinfer", "vllm-mask")}
    entry = {
        "rows": 256, "std": 2.5, "params": "top-k 50", "variants": variants,
        "peer_time_over_ours": {"flashinfer": 8.444}, "target_us": None,
    }  # fmt: skip
    result = _result(results=[entry], peers={"flashinfer": "0.6"})
    result["conditions"] |= {"vocab_size": 151_936, "temperature": 0.8}
    table = sampler_table(_file(result))
    for said in (
        "| rows | std of logits | case | us | target, us | reads | of copy bandwidth | "
        "flashinfer | vllm-mask |",
        "| 256 | 2.5 | top-k 50 | 1,234.6 | - | 2.5 | 40% | 8.44x | - |",
        "151,936 ids, ",
        "flashinfer 0.6",
    ):
        assert said in table


def test_runner_tables_show_step_times_and_host_times():
    names = ("schedule", "execute", "read", "update")
    host = {f"{name}_us": 10.4 * 10**i for i, name in enumerate(names)} | {
        "total_us": 12_345.6, "quietest_us": 11_111.1
    }  # fmt: skip
    trace = {
        "idle_share": 0.0346, "idle_between_launches_share": 0.0315, "graph_launches": 1.0,
        "kernel_launches": 0.0, "host_to_device_copies": 1.0, "event_waits": 0.98,
        "other_waits": 0.0,
    }  # fmt: skip
    entry = {"batch": 256, "step_ms": 2.7506, "deterministic_over_default": 1.149, "host": host}
    cpu = entry | {"batch": 1, "deterministic_over_default": None, "trace": None}
    result = _result(
        results=[entry | {"trace": trace, "logprobs_over_default": 1.041}, cpu],
        first_requests=[
            {"kind": "grammar", "first_ms": 25.44, "second_ms": 25.0, "compilations": 0}
        ],
        waiting=[{"batch": 256, "waiting": 10_000, "host": host | {"total_us": 999.9}}],
    )
    del result["copy_bandwidth_bytes_per_s"]
    result["conditions"]["steps"] = 50
    table = runner_table(_file(result))
    for said in (
        "| 256 | 2.751 | 1.15x | 1.04x | 3.5% | 3.1% | 1 | 1 | 0 | 0.98 | 0 |",
        "| 1 | 2.751 | - | - | - | - | - | - | - | - | - |",
        "| 256 | none | 12,346 | 11,111 | 10 | 104 | 1,040 | 10,400 |",
        "| 256 | 10,000 | 1,000 | 11,111 | 10 | 104 | 1,040 | 10,400 |",
        "| grammar | 25.4 | 25.0 | 0 |",
        "128 prompt tokens, then 50 steps; torch 2.11.0, triton 3.6.0; clocks as found; commit",
    ):
        assert said in table
    del result["first_requests"]
    assert "kernels compiled" not in runner_table(_file(result))


def test_start_parts_show_each_start_and_its_parts():
    parts = {"weights": 0.007, "kernels": 14.58, "memory": 6.91}
    start = {"seconds": 28.94, "parts": parts}
    results = {
        "empty": start,
        "filled": {"seconds": 5.04, "parts": parts | {"kernels": 0.0}},
        "compile": {"seconds": 15.8, "num_kernels": 65},
        "compiled": start,
    }
    table = start_parts_table(_file(_result(op="start", results=results)))
    for said in (
        "| start | seconds | kernels | memory |",
        "| with an empty Triton cache | 28.9 | 14.6 | 6.9 |",
        "| with what the first start has left | 5.0 | 0.0 | 6.9 |",
        "| `mrv1 compile`, into an empty cache | 15.8 | - | - |",
    ):
        assert said in table


def test_features_table_shows_times_over_text():
    def entry(first: float, over: float, gpu: float | None) -> dict[str, Any]:
        return {
            "first_token_ms": first, "first_token_over_text": over, "gpu_ms": gpu,
            "gpu_over_text": over, "num_steps": 2, "num_graph_steps": 1,
        }  # fmt: skip

    result = _result(
        prefill={
            "text": entry(10.0, 1.0, 9.5),
            "gpu": entry(10.25, 1.025, 9.6),
            "pinned": entry(11.0, 1.1, None),
        },
        text=[{"batch": 32, "with_over_without": 0.9979}],
    )
    result["conditions"]["rows"] = 4096
    table = features_table(_file(result))
    for said in (
        "| 4,096 tokens | first token, ms | GPU, ms | graph steps |",
        "| as text | 10.00 (1.000x) | 9.50 (1.000x) | 1 of 2 |",
        "| features on the GPU | 10.25 (1.025x) | 9.60 (1.025x) | 1 of 2 |",
        "| features in pinned host memory | 11.00 (1.100x) | - | 1 of 2 |",
        "0.998x at batch 32 (128 + 256 tokens; geometric means of two pairs of engines, "
        "each kind built first once)",
    ):
        assert said in table


def test_sleep_table_shows_seconds_and_freed_bytes():
    level_1 = {"level": 1, "sleep_s": 0.8073, "freed_bytes": 16_588_472_320, "wake_up_s": 2.5971}
    level_2 = {
        "level": 2, "sleep_s": 0.0283, "freed_bytes": 16_267_608_064, "wake_weights_s": 0.0037,
        "update_weights_s": 0.1729, "wake_up_s": 2.7805,
    }  # fmt: skip
    result = _result(
        weights="random", weight_bytes=1_192_099_840, kv_cache_bytes=15_032_385_536,
        results=[level_1, level_1, level_2, {"update_weights_on_device_s": 0.0025}],
    )  # fmt: skip
    result["conditions"]["level_2_weights"] = "from pageable host memory"
    table = sleep_table(_file(result))
    for said in (
        "| level 1, the first time | 0.807 | - | - | - | 2.597 | 16.6 |",
        "| level 2 | 0.028 | 0.004 | 0.173 | - | 2.780 | 16.3 |",
        "| new weights on the GPU | - | - | - | 0.003 | - | - |",
        "random weights of 1.2 GB, KV cache of 15.0 GB",
        "level 2: weights from pageable host memory",
    ):
        assert said in table


def test_kv_offload_table_shows_times_over_none():
    variants = {"none": (0.22, 94.1), "empty": (0.33, 188.2), "copies": (0.44, 282.3)}
    result = _result(
        results={
            name: {"seconds": seconds, "first_token_ms": first}
            for name, (seconds, first) in variants.items()
        }
    )
    result["conditions"] |= {"num_requests": 4, "prompt_tokens": 8192, "output_tokens": 64}
    table = kv_offload_table(_file(result))
    assert "| none | 0.22 (1.00x) | 94.1 (1.00x) |" in table
    assert "| does nothing | 0.33 (1.50x) | 188 (2.00x) |" in table
    assert "| copies each full block to host memory | 0.44 (2.00x) | 282 (3.00x) |" in table
    assert "4 requests of 8,192 + 64 tokens" in table


def test_timeline_table_shows_when_steps_run():
    gpu = [
        {"step": 0, "name": "a", "start_us": 60.0, "us": 50.0},
        {"step": 0, "name": "b", "start_us": 100.0, "us": 60.0},
        {"step": 1, "name": "a", "start_us": 163.5, "us": 1036.5},
    ]
    host = [
        {"part": "execute", "start_us": 0.0, "us": 40.0},
        {"part": "read", "start_us": 50.0, "us": 40.0},
        {"part": "execute", "start_us": 95.0, "us": 40.0},
    ]
    result = _result(host=host, gpu=gpu, weights="random")
    result["conditions"] |= {"batch": 32, "recorded": "by a profiler"}
    table = timeline_table(_file(result))
    assert "| 0 | 2 | 0 | 60 | 160 | - |" in table
    assert "| 1 | 1 | 95 | 164 | 1,200 | 3.5 |" in table
    assert "32 requests of one token a step" in table
    assert "recorded by a profiler" in table


def test_a_cell_names_the_decodes_beside_its_prefills():
    cell = {"batch": 4, "context": 16384, "query_len": 256}
    assert cell_label(cell) == "4 x 256 of 16384"
    beside = cell | {"num_decodes": 60, "decode_context": 2048}
    assert cell_label(beside) == "4 x 256 of 16384 + 60 x 2048"


def test_speculation_and_async_tables_show_ratios():
    entry = {
        "batch": 8, "text": "repeat", "tokens_per_s": {"plain": 8139.8, "ngram": 14889.4},
        "ngram_over_plain": 1.8292, "num_steps": {"plain": 258, "ngram": 98},
        "accepted_share": 0.87,
    }  # fmt: skip
    result = _result(results=[entry, entry | {"text": "random", "accepted_share": None}])
    result["conditions"] |= {"edit_every": 32, "num_tokens": 4}
    table = speculation_table(_file(result))
    assert "| repeat | 8 | 8,140 | 14,889 | 1.83x | 98 for 258 | 87% |" in table
    assert "| random | 8 | 8,140 | 14,889 | 1.83x | 98 for 258 | - |" in table
    assert "4 drafts; in the text `repeat` one token of 32 is new" in table
    entry = {"batch": 32, "tokens_per_s": {"LLM": 28323.9, "AsyncLLM": 27954.9},
             "async_over_llm": 0.98697}  # fmt: skip
    table = async_table(_file(_result(results=[entry])))
    assert "| 32 | 28,324 | 27,955 | 0.987x |" in table


def test_headwise_tables_show_ratios_to_the_first_cache():
    conditions = {
        "context": 32_768, "full_share": 0.5, "roles": [[-1, 0], [4096, 0]], "max_num_seqs": 8,
        "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 5_000_000_000,
        "num_requests": 6, "prompt_tokens": 8192, "output_tokens": 4096, "planted": True,
    }  # fmt: skip
    result = _result(conditions=conditions)
    capacity = {
        "variant": "uniform", "kv_cache": {"allocated_bytes": 3 * 2**30},
        "request_bytes": [2**30, 2**29], "predicted_requests": 7, "requests": 6, "ratio": 4.1666,
        "longest_context": 123_456,
    }  # fmt: skip
    served = {
        "variant": "recycled", "tokens_per_s": 1234.5, "throughput_ratio": 1.3049,
        "crowded_tokens_per_s": 1500.4, "crowded_ratio": 1.4, "first_token_ms": 10_000.2,
        "first_token_speedup": 0.9, "between_tokens_ms": 2.345, "between_tokens_speedup": 2.0,
        "num_preemptions": 3.0,
    }  # fmt: skip
    calm = served | {
        "crowded_tokens_per_s": None, "crowded_ratio": None,
        "first_token_saving": {"mean": 0.1, "low": -0.012, "high": 0.1999},
        "between_tokens_saving": None,
    }  # fmt: skip
    everywhere = conditions | {"roles": [[-1, 0]], "kv_cache_memory_bytes": None, "planted": False}
    table = capacity_table(_file(result | {"results": [capacity, capacity | {"ratio": None}]}))
    table += headwise_table(_file(result | {"results": [served, calm]}))
    table += headwise_table(_file(result | {"results": [calm], "conditions": everywhere}))
    for said in (
        "| uniform | 3.0 | 1.50 | 7 | 6 | 4.17x | 123,456 |",
        "| uniform | 3.0 | 1.50 | 7 | 6 | - | 123,456 |",
        "| recycled | 1,234 (1.30x) | 1,500 (1.40x) | 10,000 (0.90x) | 2.35 (2.00x) | 3 |",
        "| recycled | 1,234 (1.30x) | - | 10,000 (0.90x), -1.2% to 20.0% less | 2.35 (2.00x) |",
        "`x.json`: qwen3-0.6b shape, requests of 32,768 tokens; 50% of the heads full, "
        "the others see 4,096 tokens and 0 in front; KV cache of 5 GB, at most 8 requests and ",
        "6 requests of 8,192 + 4,096 tokens, prompts found cached; 50%",
        "4,096 tokens; 50% of the heads full; KV cache as the GPU allows",
    ):
        assert said in table


def test_a_file_of_an_unknown_kind_shows_its_conditions_and_short_results():
    rows = [{"batch": 1, "ratio": 1.23456, "times": {"a|b": 2.0, "samples": [1, 2]}}, {"batch": 8}]
    conditions = {"seed": 0, "note": "as found", "sizes": [1, 2]}
    shown = other_file(
        _file(_result(op="new op", conditions=conditions, results=rows, long=[{}] * 99))
    )
    for said in (
        "| batch | ratio | times.a|b |",
        "| 1 | 1.235 | 2 |",
        "| 8 |  |  |",
        "`x.json`: new op; GPU X; seed: 0, note: as found, sizes: [1, 2]; commit 0123456789ab",
    ):
        assert said in shown
    wide = [{str(column): column for column in range(25)}]
    assert "| 24 |" not in other_file(_file(_result(op="new op", results=wide)))
    assert other_file(_file({"before": "a" * 40, "after": "b", "device": "GPU Y"})) == (
        f"`x.json`: results of no named kind; GPU Y; before {'a' * 12}, after b."
    )


def test_a_newer_schema_is_listed_as_an_unknown_kind(tmp_path: Path):
    (tmp_path / "generate-x.json").write_text(json.dumps(_result(schema=99, results=[])))
    page = make_report(tmp_path, tmp_path / "page.md").texts[tmp_path / "page.md"]
    assert "## Whole-engine generation" not in page
    assert "`generate-x.json`: generate; GPU X; prompt_tokens: 128" in page
