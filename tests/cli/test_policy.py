"""``mrv1 policy``: what it shows of policies whose heads are known, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrv1 import HeadPolicy, HeadRanking
from mrv1.headwise import FULL, Visible
from tests.cli.conftest import Mrv1

RULE = "ratio=0.5,window=256,sink=64"


@pytest.fixture
def pattern(tmp_path: Path) -> Path:
    """A DuoAttention pattern for two layers of two heads."""
    (tmp_path / "full_attention_heads.tsv").write_text("0.9\t0.1\n0.2\t1.0\n")
    (tmp_path / "config.json").write_text(json.dumps({"sink_size": 16, "recent_size": 48}))
    return tmp_path


def test_make_writes_the_policy_of_any_source(mrv1: Mrv1, checkpoint: str, pattern: Path):
    output = pattern / "policy.json"
    result = mrv1("policy", "make", RULE, "--model", checkpoint, "--output", output)
    assert result.exit_code == 0, result.stderr
    assert "policy of 2 layers of 2 KV heads, 50% of them full, written to" in result.stderr
    assert HeadPolicy.load(output) == HeadPolicy.of_ratio(2, 2, 0.5, window=256, sink=64)
    for options, full in (((), 2), (("--sparsity", "0.75"), 1)):
        assert mrv1("policy", "make", pattern, *options, "--output", output).exit_code == 0
        heads = [seen for layer in HeadPolicy.load(output).heads for seen in layer]
        assert heads.count(FULL) == full
        assert heads.count(Visible(48, 16)) == 4 - full


def test_show_names_every_head_and_counts_the_cache(mrv1: Mrv1, pattern: Path):
    result = mrv1("policy", "show", pattern, "--context", "630")
    assert result.exit_code == 0, result.stderr
    assert "the last 48 tokens and the first 16" in result.stdout
    assert "F 1" in result.stdout
    assert "1 F" in result.stdout
    # Two heads keep 630 tokens, two keep 16 + 47.
    assert "a request of 630 tokens needs 55.0% of the uniform KV cache" in result.stdout
    facts = json.loads(mrv1("policy", "show", pattern, "--context", "630", "--json").stdout)
    assert facts == {
        "num_layers": 2,
        "num_kv_heads": 2,
        "full_share": 0.5,
        "roles": [
            {"window": -1, "sink": 0, "num_heads": 2},
            {"window": 48, "sink": 16, "num_heads": 2},
        ],
        "context": 630,
        "cache_share": pytest.approx(0.55),
        "heads": [[[-1, 0], [48, 16]], [[48, 16], [-1, 0]]],
    }


def test_show_of_a_model_is_what_it_runs_with(mrv1: Mrv1, checkpoint: str, monkeypatch):
    monkeypatch.delenv("MRV1_HEAD_POLICY", raising=False)
    assert "100% of the heads full" in mrv1("policy", "show", "--model", checkpoint).stdout
    monkeypatch.setenv("MRV1_HEAD_POLICY", RULE)
    assert "50% of the heads full" in mrv1("policy", "show", "--model", checkpoint).stdout


def test_compare_counts_the_heads_that_differ(mrv1: Mrv1, checkpoint: str, pattern: Path):
    result = mrv1(
        "policy", "compare", pattern, "ratio=0.5,window=48,sink=16", "--model", checkpoint
    )
    assert result.exit_code == 0, result.stderr
    assert (
        "2 of 4 heads see the same; full in both: 1, only in the first: 1, only in the second: 1"
        in result.stdout
    )
    assert "layers that differ" in result.stdout
    same = mrv1("policy", "compare", pattern, pattern)
    assert "4 of 4 heads see the same" in same.stdout
    assert "layers that differ" not in same.stdout


def test_a_report_may_have_any_name(mrv1: Mrv1, tmp_path: Path, monkeypatch):
    """Also one that a rule could not name, or that looks like a ranking which ships."""
    monkeypatch.chdir(tmp_path)
    ranking = HeadRanking.load("smollm2")
    for name in ("report", "a,b.json", "window=1.json"):
        Path(name).write_text(json.dumps({"ranking": ranking.to_json()}))
        result = mrv1("policy", "make", name, "--budget", "0.5", "--output", "policy.json")
        assert result.exit_code == 0, result.stderr
        assert HeadPolicy.load("policy.json") == ranking.policy(0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["show", RULE],
            f"policy: expected --model, whose heads the policy is for, with {RULE!r}",
        ),
        (["show"], "policy: expected a source or --model, got neither"),
        (["show", "ratio=0.5,win=4"], "got 'win=4' in 'ratio=0.5,win=4'"),
        (["show", "none.json"], "got 'none.json', which does not exist"),
        (["show", "PATTERN", "--model", "tiny"], "head_policy: expected 4 KV heads, as the model"),
        (
            ["compare", "PATTERN", "OTHER"],
            "policy compare: expected policies for one model, got 2 layers of 2 KV heads and "
            "1 layers of 3 KV heads",
        ),
        (["make", "PATTERN", "--output", "none/p.json"], "--output: expected an existing direct"),
        (
            ["make", RULE, "--model", "tiny", "--sparsity", "0.5", "--output", "p.json"],
            "DuoAttention pattern ratio=0.5,window=256,sink=64: expected readable files, got",
        ),
        (
            ["make", "PATTERN", "--sparsity", "0.5", "--budget", "0.5", "--output", "p.json"],
            "policy make: expected --sparsity, of a pattern, or --budget, of a ranking, got both",
        ),
        (
            ["make", "smollm2", "--context", "64", "--output", "p.json"],
            "policy make: expected --budget with --context, got none",
        ),
        (
            ["make", "smollm2", "--budget", "nan", "--output", "p.json"],
            "budget: expected 0 to 1, got nan",
        ),
        (
            ["make", "smollm2", "--budget", "0.5", "--window", "-1", "--output", "p.json"],
            "streaming: expected a Visible with window >= 1 and sink >= 0, got Visible(window=-1",
        ),
        (
            ["make", "smollm2", "--budget", "0.5", "--model", "tiny", "--output", "p.json"],
            "head_policy: expected 4 KV heads, as the model has, got 3",
        ),
    ],
)
def test_a_mistake_is_one_line(
    mrv1: Mrv1, pattern: Path, arguments: list[str], message: str, monkeypatch
):
    monkeypatch.chdir(pattern)
    HeadPolicy.full(1, 3).save("other.json")
    named = {"PATTERN": str(pattern), "OTHER": "other.json"}
    result = mrv1("policy", *(named.get(each, each) for each in arguments))
    assert result.exit_code == 2
    assert f"error: {message}" in result.stderr or message in result.stderr
    assert len(result.stderr.splitlines()) == 1
