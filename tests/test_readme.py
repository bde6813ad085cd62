"""README.md is short, its example runs, and everything it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mrv1.kernels
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
    "MinistralForCausalLM": "Ministral",
    "Qwen2ForCausalLM": "Qwen2",
    "Qwen3ForCausalLM": "Qwen3",
    "Ernie4_5ForCausalLM": "ERNIE-4.5",
    "Ernie4_5_MoeForCausalLM": "ERNIE-4.5-MoE",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
    "MixtralForCausalLM": "Mixtral",
    "OlmoeForCausalLM": "OLMoE",
    "Glm4MoeForCausalLM": "GLM-4.5-Air",
    "GptOssForCausalLM": "gpt-oss",
    "GlmForCausalLM": "GLM-4-9B",
    "Glm4ForCausalLM": "GLM-4-0414",
    "GraniteForCausalLM": "Granite 3",
    "GraniteMoeHybridForCausalLM": "Granite 4 dense",
    "SeedOssForCausalLM": "Seed-OSS",
    "SmolLM3ForCausalLM": "SmolLM3",
    "Phi3ForCausalLM": "Phi-3",
    "Gemma2ForCausalLM": "Gemma-2",
    "Gemma3ForCausalLM": "Gemma-3",
    "Olmo2ForCausalLM": "OLMo-2",
    "Olmo3ForCausalLM": "OLMo-3",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
    "Qwen3VLForConditionalGeneration": "Qwen3-VL",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL-MoE",
    "Ernie4_5_VLMoeForConditionalGeneration": "ERNIE-4.5-VL",
    "Ernie4_5_VL_MoeForConditionalGeneration": "ERNIE-4.5-VL",
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
    assert len(lines) == 8
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


def test_the_page_on_vllm_names_every_family_of_text():
    vllm = (REPO / "docs" / "vllm.md").read_text("utf-8")
    (models,) = re.findall(r"^\| models \| those that mrv1 has, (.*?) \|$", vllm, re.M)
    for architecture, name in FAMILY_NAMES.items():
        is_text = ARCHITECTURES[architecture].video_time is None
        assert (name in re.split(r"[:,] | and ", models)) == is_text, name


def test_the_readme_states_its_name_clash_and_its_untested_gpus():
    assert 'unrelated to what vLLM threads call "MRV1"' in README
    assert "Blackwell and AMD: compiled, never run" in README
