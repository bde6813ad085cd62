"""README.md is short, its example runs, and everything it names exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import mrv1.kernels
from benchmarks import readme_table
from mrv1.cli import app
from mrv1.kernels import reference
from mrv1.models.architectures import ARCHITECTURES

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text("utf-8")
PERFORMANCE = (REPO / "docs" / "performance.md").read_text("utf-8")
MAX_LINES = 150
FAMILY_NAMES = {
    "LlamaForCausalLM": "Llama",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2",
    "Qwen3ForCausalLM": "Qwen3",
    "Ernie4_5ForCausalLM": "ERNIE-4.5",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
    "Qwen3VLForConditionalGeneration": "Qwen3-VL",
}


def _fences(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_the_readme_is_short():
    assert len(README.splitlines()) < MAX_LINES


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]):
    (example,) = _fences("python")
    assert len(example.strip().splitlines()) <= 10
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "Qwen3ForCausalLM on " in printed


def test_every_make_target_exists():
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", README))
    targets = set(re.findall(r"^([a-z][a-z-]*):", (REPO / "Makefile").read_text("utf-8"), re.M))
    assert {"demo", "test", "test-full"} <= named <= targets


def test_every_command_and_option_exists():
    lines = re.findall(r"^ {4}(mrv1 .*?)(?: +#.*)?$", README, re.M)
    assert len(lines) == 7
    for line in lines:
        words = [word for word in re.sub(r'"[^"]*"', "", line).split()[1:] if word.islower()]
        command = [word for word in words if not word.startswith("-") and "." not in word]
        usage = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
        assert usage.exit_code == 0, line
        for option in (word for word in words if word.startswith("--")):
            assert option in usage.stdout, line


def test_every_file_that_the_readme_links_or_names_exists():
    links = [target for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    named = re.findall(r"`([\w/.-]+(?:\.ipynb|\.txt|/))`", README)
    assert {"LICENSE", "benchmarks/README.md"} <= set(links)
    assert {"notebooks/quickstart.ipynb", "training/"} <= set(named)
    for target in links + named:
        assert (REPO / target.partition("#")[0]).exists(), target


def test_table_of_kernels_names_every_op_and_no_other():
    rows = re.findall(r"^\| `(\w+)` \|", PERFORMANCE, re.M)
    ops = {name for name in mrv1.kernels.__all__ if hasattr(reference, name)}
    ops = {name for name in ops if name.islower()}
    assert sorted(rows) == sorted(ops)
    assert f"[{len(ops)} of them](docs/performance.md#the-kernels)" in README


def test_the_readme_names_every_model_family():
    (models,) = re.findall(r"^- \*\*Models\*\*: (.*?);", README, re.M | re.DOTALL)
    assert FAMILY_NAMES.keys() == ARCHITECTURES.keys()
    for name in FAMILY_NAMES.values():
        assert name in models


def test_the_readme_states_its_name_clash_and_its_untested_gpus():
    assert 'unrelated to what vLLM threads call "MRV1"' in README
    assert "Blackwell and AMD: compiled, never run" in README


# --- the table of measured figures ---------------------------------------------------------------


def _result() -> dict[str, Any]:
    entry = {
        "batch": 256,
        "tokens_per_s": 1234.5,
        "decode_step_ms": 4.0,
        "floor_ms": 2.0,
        "share_of_floor": 0.5,
        "prefill_ms": 30.04,
    }
    return {
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
        "results": [entry, entry | {"batch": 1, "floor_ms": None, "share_of_floor": None}],
    }


def test_measured_figures_equal_the_results_files():
    table = readme_table.summary_table()
    assert readme_table.with_table(README, table) == README, "run benchmarks/readme_table.py"
    assert readme_table.main(["--check"]) == 0, "run benchmarks/readme_table.py"


def test_kernel_tables_show_our_time_and_the_ratios_of_peers(tmp_path: Path):
    def variant(us: float) -> dict[str, object]:
        return {"median_us": us, "share_of_copy_bandwidth": 0.956, "flops_per_s": 4.5e14}

    cell = {"batch": 8, "context": 4096, "query_len": 1, "peer_time_over_ours": {"peer": 1.238}}
    alone = cell | {"batch": 1, "peer_time_over_ours": {}, "variants": {"mrv1": variant(9)}}
    result = {
        "dtype": "bfloat16", "kv_dtype": "auto", "path": "triton", "commit": "0123456789abcdef",
        "date": "2026-11-21", "device": {"name": "GPU X"}, "copy_bandwidth_bytes_per_s": 4.25e12,
        "versions": {"triton": "3.6.0"}, "peers": {"peer": "1.2", "other": "not installed"},
        "geometric_mean_over_ours": {"peer": 1.238}, "conditions": {},
        "results": [cell | {"variants": {"mrv1": variant(1234.56), "peer": variant(1528)}}, alone],
    }  # fmt: skip
    (tmp_path / "attention-x.json").write_text(json.dumps(result))
    table = readme_table.kernel_tables(tmp_path)
    for said in (
        "| batch x context | us | of copy bandwidth | peer |",
        "| 8 x 4096 | 1,234.6 | 96% | 1.24x |",
        "| 1 x 4096 | 9.0 | 96% | - |",
        "| geometric mean |  |  | 1.24x |",
        "`attention-x.json`: bfloat16, cache auto, triton path on one GPU X; copy bandwidth "
        "4.25e+12 bytes/s; triton 3.6.0, peer 1.2; commit 0123456789ab, 2026-11-21.",
    ):
        assert said in table
    result["results"][0]["query_len"] = 4096
    (tmp_path / "attention-x.json").write_text(json.dumps(result))
    assert "| 8 x 4096 | 1,234.6 | 450 | 1.24x |" in readme_table.kernel_tables(tmp_path)
    result["results"][0]["query_len"] = 64
    (tmp_path / "attention-x.json").write_text(json.dumps(result))
    assert "| 8 x 64 of 4096 | 1,234.6 |" in readme_table.kernel_tables(tmp_path)


def test_table_shows_the_figures_and_their_conditions(tmp_path: Path):
    (tmp_path / "generate-x.json").write_text(json.dumps(_result()))
    (tmp_path / "other.json").write_text("{}")
    (result,) = readme_table.load_results(tmp_path)
    table = readme_table.generate_table([result])
    assert "| 256 | 1,234 | 4.00 | 2.00 | 50% | 30.0 |" in table
    assert "| 1 | 1,234 | 4.00 | - | - | 30.0 |" in table
    for said in (
        "GPU X",
        "128 prompt + 256 output",
        "4.30 TB/s",
        "0123456789ab,",
        "clocks as found",
    ):
        assert said in table


def test_table_shows_optional_figures_and_options_that_are_not_the_default():
    result = _result() | {"start": {"seconds": 18.85, "triton_cache": "empty"}}
    result["results"] = [entry | {"host_ms": 0.0584} for entry in result["results"]]
    result["conditions"] |= {"deterministic": True, "overlap": True, "cuda_graphs": False}
    table = readme_table.generate_table([result])
    for said in (
        "| batch | tokens/s | ms per decode step | of it host, ms | floor, ms | share of floor |",
        "| 256 | 1,234 | 4.00 | 0.058 | 2.00 | 50% | 30.0 |",
        "bfloat16, deterministic=True, cuda_graphs=False, triton path",
        "engine started in 18.9 s, Triton's cache empty (commit",
    ):
        assert said in table
    assert "overlap" not in table


def test_summary_shows_both_shapes(tmp_path: Path):
    small, large = _result(), _result() | {"shape": "llama3-8b", "date": "2030-01-03"}
    large["conditions"] = large["conditions"] | {"repeats": 1}
    (tmp_path / "generate-x.json").write_text(json.dumps(small))
    (tmp_path / "llama3-8b-generate-x.json").write_text(json.dumps(large))
    table = readme_table.summary_table(tmp_path)
    for said in (
        "| qwen3-0.6b | 256 | 1,234 | 4.00 | 2.00 | 50% |",
        "| llama3-8b | 1 | 1,234 | 4.00 | - | - |",
        "qwen3-0.6b: 3 runs, commit 0123456, 2030-01-02; "
        "llama3-8b: 1 run, commit 0123456, 2030-01-03",
    ):
        assert said in table


def test_vllm_table_shows_both_throughputs_and_their_ratio(tmp_path: Path):
    entry = {"batch": 32, "tokens_per_s": {"mrv1": 3000.4, "vllm": 1500.2}, "mrv1_over_vllm": 2.0}
    result = _result() | {"results": [entry], "peers": {"vllm": "0.26.0"}}
    (tmp_path / "beside-vllm-x.json").write_text(json.dumps(result))
    table = readme_table.vllm_table(tmp_path)
    assert "| 32 | 3,000 | 1,500 | 2.00x |" in table
    assert "vLLM 0.26.0, torch 2.11.0, triton 3.6.0" in table


def test_results_page_shows_or_names_every_file():
    page = readme_table.results_page()
    named = {path.name for path in readme_table.RESULTS.glob("*.json") if path.stem in page}
    tables_without_a_file_name = {
        "generate-h200.json", "cold-start-generate-h200.json", "deterministic-generate-h200.json",
        "llama3-8b-generate-h200.json", "runner-h200.json", "sampler-h200.json",
        "beside-vllm-h200.json", "recall-tiny.json",
    }  # fmt: skip
    assert {path.name for path in readme_table.RESULTS.glob("*.json")} <= (
        named | tables_without_a_file_name
    )


def test_sampler_tables_show_reads_and_peers(tmp_path: Path):
    variants = {"mrv1": {"median_us": 1234.56, "share_of_copy_bandwidth": 0.4}}
    variants |= {name: {"median_us": 1.0} for name in ("flashinfer", "vllm-mask")}
    entry = {
        "rows": 256, "std": 2.5, "params": "top-k 50", "variants": variants,
        "peer_time_over_ours": {"flashinfer": 8.444},
    }  # fmt: skip
    result = _result() | {"results": [entry], "peers": {"flashinfer": "0.6"}}
    result["conditions"] |= {"vocab_size": 151_936, "temperature": 0.8}
    (tmp_path / "sampler-x.json").write_text(json.dumps(result))
    table = readme_table.sampler_tables(tmp_path)
    for said in (
        "| rows | std of logits | parameters | us | reads | flashinfer | vllm-mask |",
        "| 256 | 2.5 | top-k 50 | 1,234.6 | 2.5 | 8.44x | - |",
        "151,936 ids, ",
        "flashinfer 0.6",
    ):
        assert said in table


def test_runner_tables_show_step_times_and_host_times(tmp_path: Path):
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
    result = _result() | {
        "results": [entry | {"trace": trace}, cpu],
        "waiting": [{"batch": 256, "waiting": 10_000, "host": host | {"total_us": 999.9}}],
    }
    del result["copy_bandwidth_bytes_per_s"]
    result["conditions"]["steps"] = 50
    (tmp_path / "runner-x.json").write_text(json.dumps(result))
    table = readme_table.runner_tables(tmp_path)
    for said in (
        "| 256 | 2.751 | 1.15x | 3.5% | 3.1% | 1 | 1 | 0 | 0.98 | 0 |",
        "| 1 | 2.751 | - | - | - | - | - | - | - | - |",
        "| 256 | none | 12,346 | 11,111 | 10 | 104 | 1,040 | 10,400 |",
        "| 256 | 10,000 | 1,000 | 11,111 | 10 | 104 | 1,040 | 10,400 |",
        "128 prompt tokens, then 50 steps; torch 2.11.0, triton 3.6.0; clocks as found (commit",
    ):
        assert said in table


def test_headwise_tables_show_ratios_to_the_first_cache(tmp_path: Path):
    conditions = {
        "context": 32_768, "full_share": 0.5, "roles": [[-1, 0], [4096, 0]], "max_num_seqs": 8,
        "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 5_000_000_000,
        "num_requests": 6, "prompt_tokens": 8192, "output_tokens": 4096, "planted": True,
    }  # fmt: skip
    result = _result() | {"conditions": conditions}
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
    calm = served | {"crowded_tokens_per_s": None, "crowded_ratio": None}
    everywhere = conditions | {"roles": [[-1, 0]], "kv_cache_memory_bytes": None, "planted": False}
    for name, of in (
        ("capacity-x", {"op": "capacity", "results": [capacity, capacity | {"ratio": None}]}),
        ("headwise-x", {"op": "headwise", "results": [served, calm]}),
        ("headwise-y", {"op": "headwise", "results": [calm], "conditions": everywhere}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(result | of))
    table = readme_table.headwise_tables(tmp_path)
    for said in (
        "| uniform | 3.0 | 1.50 | 7 | 6 | 4.17x | 123,456 |",
        "| uniform | 3.0 | 1.50 | 7 | 6 | - | 123,456 |",
        "| recycled | 1,234 (1.30x) | 1,500 (1.40x) | 10,000 (0.90x) | 2.35 (2.00x) | 3 |",
        "| recycled | 1,234 (1.30x) | - | 10,000",
        "`capacity-x.json`: qwen3-0.6b shape, requests of 32,768 tokens; 50% of the heads full, "
        "the others see 4,096 tokens and 0 in front; KV cache of 5 GB, at most 8 requests and ",
        "6 requests of 8,192 + 4,096 tokens, prompts found cached; 50%",
        "4,096 tokens; 50% of the heads full; KV cache as the GPU allows",
    ):
        assert said in table


def test_tables_without_results_have_no_figures(tmp_path: Path):
    assert readme_table.runner_tables(tmp_path) == readme_table.NONE_YET
    assert readme_table.headwise_tables(tmp_path) == readme_table.NONE_YET
    assert readme_table.load_results(tmp_path) == []
    assert readme_table.kernel_tables(tmp_path) == readme_table.NONE_YET
    assert readme_table.generate_table([]) == readme_table.NONE_YET
    assert readme_table.summary_table(tmp_path) == readme_table.NONE_YET
    assert readme_table.vllm_table(tmp_path) == readme_table.NONE_YET


def test_only_the_text_between_the_markers_changes():
    begin, end = readme_table.BEGIN, readme_table.END
    text = f"a\n{begin}\nold\n{end}\nb\n"
    assert readme_table.with_table(text, "new") == f"a\n{begin}\nnew\n{end}\nb\n"
    for broken in ("a", f"{begin}", f"{end} {begin}", text + text):
        with pytest.raises(ValueError, match="expected <!-- results:generate -->"):
            readme_table.with_table(broken, "new")


def test_check_reports_whether_the_readme_would_change(tmp_path: Path, monkeypatch, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"{readme_table.BEGIN}\n{readme_table.END}\n")
    monkeypatch.setattr(readme_table, "README", readme)
    monkeypatch.setattr(readme_table, "RESULTS_PAGE", tmp_path / "RESULTS.md")
    assert readme_table.main(["--check"]) == 1
    assert readme_table.main([]) == 0
    assert readme_table.main(["--check"]) == 0
    assert readme_table.main(["--nonsense"]) == 2
    assert "--check" in capsys.readouterr().err
