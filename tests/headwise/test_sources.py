"""The texts that name a head policy, each against the policy it stands for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mrv1 import LLM, ConfigError, HeadPolicy
from mrv1.cli.facts import variable_warnings
from mrv1.headwise import FULL, HeadRanking, Visible, policy_source

DUO = HeadPolicy(((FULL, Visible(64, 16)), (Visible(64, 16), FULL)))


@pytest.fixture
def pattern(tmp_path: Path) -> Path:
    """A DuoAttention pattern; published ones are in folders with such names."""
    folder = tmp_path / "lr=0.02-reg=0.05"
    folder.mkdir()
    (folder / "full_attention_heads.tsv").write_text("0.9\t0.1\n0.2\t1.0\n")
    (folder / "config.json").write_text(json.dumps({"sink_size": 16, "recent_size": 64}))
    return folder


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ratio=0.5,window=256,sink=64", HeadPolicy.of_ratio(3, 4, 0.5, window=256, sink=64)),
        (" ratio = 1 , window = 8 ", HeadPolicy.of_ratio(3, 4, 1, window=8)),
        (
            "window=2147483647,full_layers_every=2,ratio=2.5e-1",
            HeadPolicy.of_ratio(3, 4, 0.25, window=2**31 - 1, full_layers_every=2),
        ),
        ("ratio=0,window=1", HeadPolicy.full(3, 4)),
    ],
)
def test_a_rule_is_a_ratio(text, expected):
    source = policy_source(text)
    assert source.of_model(3, 4) == expected
    assert source.policy is None


RULE_WORDS = "expected a file, a folder or a rule of ratio, window, sink, full_layers_every"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ratio=0.5,windw=4", f"{RULE_WORDS}, got 'windw=4' in 'ratio=0.5,windw=4'"),
        ("rato=0.5,window=4", f"{RULE_WORDS}, got 'rato=0.5' in"),
        ("ratio=0.5,window=4,", f"{RULE_WORDS}, got '' in"),
        ("ratio=0.5,window", f"{RULE_WORDS}, got 'window' in"),
        ("Ratio=0.5,window=4", f"{RULE_WORDS}, got 'Ratio=0.5' in"),
        ("ratio=0.5", "expected a rule with window=, got 'ratio=0.5'"),
        ("window=4", "expected a rule with ratio=, got 'window=4'"),
        ("ratio=0.5,window=4,window=4", "expected window once, got"),
        *(
            (f"ratio={ratio},window=4", f"expected ratio= with a number from 0 to 1, got {got}")
            for ratio, got in (
                ("1.5", "'1.5'"), ("-1", "'-1'"), ("nan", "'nan'"), ("half", "'half'"), ("", "''"),
            )
        ),
        *(
            (
                f"ratio=1,window={window}",
                f"expected window= with an integer from 1 to 2147483647, got '{window}'",
            )
            for window in ("0", "-1", "4.5", "2147483648", "all")
        ),
        ("ratio=1,window=4,sink=-1", "expected sink= with an integer from 0 to"),
        ("ratio=1,window=4,full_layers_every=1", "expected full_layers_every= with an integer"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_one_line_that_names_the_setting(text, message):
    with pytest.raises(ConfigError, match=f"^head_policy: {re.escape(message)}") as caught:
        policy_source(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["", "none.json", "a" * 5000])
def test_a_source_that_does_not_exist_is_named(source):
    with pytest.raises(ConfigError, match=r"^head_policy: expected a rule such .*not exist$") as e:
        policy_source(source)
    assert f"got '{source[:490]}" in str(e.value)


def test_a_file_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "policy.json").write_text("{")
    with pytest.raises(ConfigError, match=r"policy\.json: expected a readable JSON file, got Exp"):
        policy_source(str(tmp_path / "policy.json"))


def test_a_path_names_a_file_a_pattern_or_a_checkpoint(tmp_path, pattern, monkeypatch):
    file = tmp_path / "policy.json"
    DUO.save(file)
    for source in (file, pattern):
        found = policy_source(str(source))
        assert found.policy == found.of_model(7, 7) == DUO
    monkeypatch.chdir(tmp_path)
    assert policy_source("lr=0.02-reg=0.05").policy == DUO  # it exists: not a rule
    fields = {"head_wise_swa_ratio": 0.5, "window_size": 8, "window_attn_skip_freq": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    checkpoint = policy_source(str(tmp_path))
    assert checkpoint.policy is None
    assert checkpoint.of_model(2, 4) == HeadPolicy.of_ratio(2, 4, 0.5, window=8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"expected a DuoAttention pattern \(full_attention_heads\.tsv\) or a checkpoint"),
        ("{", "expected a DuoAttention pattern"),
        ("[1]", r"expected an object in .*config\.json, got \[1\]"),
        ("{}", r"expected head_wise_swa_ratio or headwise_config in .*config\.json, got none"),
        ('{"head_wise_swa_ratio": 0.5, "window_size": 0}', "window_size: expected an integer"),
    ],
)
def test_a_folder_without_a_policy_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        policy_source(str(tmp_path)).of_model(2, 4)


def test_the_engine_takes_every_source(tmp_path, pattern, monkeypatch):
    """As option and as variable; a policy for another model is refused by its numbers."""
    options = {"device": "cpu", "num_kv_blocks": 8, "max_model_len": 64}
    rule = "ratio=0.5,window=8,sink=4"
    with LLM("tiny", head_policy=rule, **options) as llm:
        said = llm.describe()
    assert "50% of the heads full, the others see 8 tokens and a sink of 4" in said
    monkeypatch.setenv("MRV1_HEAD_POLICY", rule)
    with LLM("tiny", **options) as llm:
        assert llm.describe() == said
    assert variable_warnings() == []
    for source, message in ((str(pattern), "expected 4 KV heads, as the model has, got 2"),
                            ("ratio=0.5,windw=8", "got 'windw=8'")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            LLM("tiny", head_policy=source, **options)
    with pytest.raises(
        ConfigError, match="expected a HeadPolicy, a file, a folder or a rule, got 5"
    ):
        LLM("tiny", head_policy=5, **options)
    monkeypatch.setenv("MRV1_HEAD_POLICY", "ratio=0.5,window=none")
    assert variable_warnings() == [
        "head_policy: expected window= with an integer from 1 to 2147483647, got 'none'"
    ]


def test_a_ranking_serves_every_budget(tmp_path):
    ranking = HeadRanking(
        num_layers=2,
        num_kv_heads=2,
        streaming=Visible(48, 16),
        order=((0, 1), (1, 0), (0, 0), (1, 1)),
        losses=(0.0, 0.1, 0.2, 0.3),
    )
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"ranking": ranking.to_json()}))
    for budget in (0, 0.25, 0.5, 1):
        found = policy_source(f"ranking={file},budget={budget}").policy
        assert found == ranking.policy(budget)
    found = policy_source(f"ranking={file}, budget=0.5, window=32, sink=0").policy
    assert found == ranking.policy(0.5, Visible(32, 0))
    found = policy_source(f"ranking={file},budget=0.5,context=4096").policy
    assert found == ranking.policy_of_cache(0.5, 4096)
    assert found.full_share == 0.25  # streaming heads hold some of the half
    for own in (file, tmp_path / "ranking.json"):
        (tmp_path / "ranking.json").write_text(json.dumps(ranking.to_json()))
        with pytest.raises(
            ConfigError, match=r"ranking take ranking=FILE,budget=0\.5, got 'a rank"
        ):
            policy_source(str(own))
    for text, message in (
        (f"ranking={file}", r"expected ranking=.*,budget=, got no budget"),
        (f"ranking={file},budget=2", r"expected budget= with a number from 0 to 1, got '2'"),
        (f"ranking={file},budget=0.5,context=0", "expected context= with an integer from 1"),
        (f"ranking={file},ratio=0.5", "rule of budget, context, window, sink, got 'ratio=0.5'"),
        ("ranking=none.json,budget=0.5", "ranking 'none.json': expected a readable JSON file"),
    ):
        with pytest.raises(ConfigError, match=message):
            policy_source(text)


def test_the_ranking_of_smollm2_ships():
    ranking = HeadRanking.load("smollm2")
    assert len(ranking.order) == 30 * 3
    policy = policy_source("ranking=smollm2,budget=0.25,context=4096").policy
    assert policy == ranking.policy_of_cache(0.25, 4096)
    assert set(policy.groups) == {FULL, Visible(128, 16)}
