"""``mrv1 calibrate`` on the embedded model, whose recall depends on one head."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from mrv1 import HeadPolicy, HeadRanking, Visible
from mrv1.config import checkpoint_dir
from tests.cli.conftest import Mrv1
from tests.models.families import tiny_checkpoint
from training.corpus import CORPUS_PATH

QUICK = (
    "--model", "tiny", "--device", "cpu", "--window", "24", "--sink", "4",
    "--num-prompts", "1", "--num-tokens", "256", "--num-facts", "6",
)  # fmt: skip
RECALL_HEAD = (3, 0)
"""Found by measurement: recall fails without this head, and works without all others."""


def full_heads(policy: HeadPolicy) -> set[tuple[int, int]]:
    return {
        (layer, head)
        for layer, heads in enumerate(policy.heads)
        for head, seen in enumerate(heads)
        if seen.is_full
    }


def test_the_head_that_recalls_stays_full(
    mrv1: Mrv1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
    output, report = tmp_path / "policy.json", tmp_path / "report.json"
    result = mrv1(
        "calibrate", *QUICK, "--data", CORPUS_PATH, "--budget", "0.25", "--output", output,
        "--report", report,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    policy = HeadPolicy.load(output)
    assert policy.full_share == 0.25
    assert set(policy.groups[1:]) == {Visible(24, 4)}
    assert RECALL_HEAD in full_heads(policy)
    assert (tmp_path / "policy.png").read_bytes().startswith(b"\x89PNG")
    stderr = re.sub(r"\x1b\[[?\d;]*\w", "", result.stderr)
    assert re.search(r"calibrate .* (\d+)/\1 ", stderr)  # the progress bar, at its end
    assert "policy written to" in result.stderr
    assert "25% of the heads full" in result.stdout
    measured = json.loads(report.read_text("utf-8"))
    order = HeadRanking.load(report).order
    assert order[-1] == RECALL_HEAD
    assert full_heads(policy) == set(order[-4:])
    cut = tmp_path / "cut.json"
    result = mrv1("policy", "make", report, "--budget", "0.25", "--output", cut)
    assert result.exit_code == 0, result.stderr
    assert HeadPolicy.load(cut) == policy
    assert measured["full"]["accuracy"] == measured["calibrated"]["accuracy"] == 1.0
    assert measured["full"]["num_answers"] == 6
    assert measured["options"]["window"] == 24
    assert measured["device"]["type"] == "cpu"


def test_generate_recalls_a_fact_under_the_calibrated_policy(mrv1: Mrv1, tmp_path: Path):
    """With one of sixteen heads full the model recalls a distant fact, with none it does not."""
    words = "What light through yonder window breaks? " * 12
    prompt = f"\nREMEMBER: crown soldier.\n{words}\nRECALL: crown"
    answers = []
    for budget in (0.05, 0):
        output = tmp_path / f"{budget}.json"
        calibrated = mrv1(
            "calibrate", *QUICK, "--method", "single", "--no-plot", "--budget", str(budget),
            "--output", output,
        )  # fmt: skip
        assert calibrated.exit_code == 0, calibrated.stderr
        generated = mrv1(
            "generate", "--model", "tiny", "--device", "cpu", "--num-kv-blocks", "64",
            "--head-policy", output, "--prompt", prompt, "--max-tokens", "1", "--temperature", "0",
        )  # fmt: skip
        assert generated.exit_code == 0, generated.stderr
        answers.append(generated.stdout.strip())
    assert answers[0] == "soldier"
    assert answers[1] != "soldier"


def test_calibration_on_synthetic_words_finds_the_recall_head(mrv1: Mrv1, tmp_path: Path):
    output = tmp_path / "policy.json"
    result = mrv1(
        "calibrate", *QUICK, "--data", "synthetic", "--method", "single", "--no-plot",
        "--budget", "0.01", "--kv-cache-dtype", "fp8_e4m3", "--output", output,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert full_heads(HeadPolicy.load(output)) == {RECALL_HEAD}
    # No terminal: lines instead of a bar, for the first pass and for each tenth.
    lines = re.findall(
        r"calibrate: (\d+) of 19 passes of a prompt, about \d+ s left", result.stderr
    )
    assert [*map(int, lines)] == [1, 2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert [path.name for path in tmp_path.iterdir()] == ["policy.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "2"), "budget: expected 0 to 1, got 2.0"),
        (("--method", "best"), "method: expected one of"),
        (("--window", "0"), "window: expected >= 1, got 0"),
        (("--num-prompts", "0"), "num_prompts: expected >= 1, got 0"),
        (("--num-tokens", "4096"), "num_tokens: expected 1 to 2048"),
        (("--num-facts", "99"), "num_tokens: expected room for 99 facts"),
        (("--data", "tasks", "--window", "252"), "num_tokens: expected more than window 252 and"),
        (("--data", "none.txt"), "data: cannot read 'none.txt'"),
        (("--model", "none"), "model: expected a checkpoint directory"),
        (("--kv-cache-dtype", "int8"), "kv_cache_dtype: expected"),
        (("--dtype", "int4"), "dtype: expected"),
        (("--output", "none/policy.json"), "--output: expected an existing directory, got none"),
        (("--output", "policy.png"), "--output: expected a file other than a .png"),
    ],
)
def test_a_mistake_is_one_line(mrv1: Mrv1, tmp_path: Path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = mrv1("calibrate", *QUICK, "--output", "policy.json", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_recall_gives_a_warning(mrv1: Mrv1, tmp_path: Path):
    """Random weights, with the embedded model's tokenizer."""
    folder = tmp_path / "random"
    tiny_checkpoint(folder, "qwen3", vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint_dir("tiny") / name, folder)
    output = tmp_path / "policy.json"
    result = mrv1("calibrate", *QUICK, "--model", folder, "--no-plot", "--output", output)
    assert result.exit_code == 0, result.stderr
    assert "warning: with all heads full the model recalls 0% of the facts" in result.stderr
    assert HeadPolicy.load(output).full_share == 0.25
