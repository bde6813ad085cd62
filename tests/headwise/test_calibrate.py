"""Ranking of heads, on invented losses for which the important heads are known."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import ConfigError
from mrv1.headwise import FULL, HeadPolicy, Visible, rank_heads, rankable_heads
from mrv1.headwise.calibrate import METHODS, Method, num_losses
from mrv1.headwise.ranking import Head, HeadRanking

STREAMING = Visible(64, 16)


def streaming_heads(policy: HeadPolicy) -> set[Head]:
    found = set()
    for layer, heads in enumerate(policy.heads):
        for head, seen in enumerate(heads):
            assert seen in (FULL, STREAMING)
            if seen == STREAMING:
                found.add((layer, head))
    return found


def rank(
    shape: Head, loss: Callable[[set[Head]], float], method: Method = "greedy"
) -> HeadRanking:
    """Rank all heads by a loss of the set of streaming heads."""
    heads = rankable_heads((-1,) * shape[0], shape[1])
    return rank_heads(
        *shape, heads, STREAMING, lambda policy: loss(streaming_heads(policy)), method=method
    )


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    method=st.sampled_from(METHODS),
    seed=st.integers(0, 2**16),
)
def test_heads_with_independent_losses_are_ranked_by_their_loss(shape, method, seed):
    rng = random.Random(seed)
    weights = {
        (layer, head): rng.randrange(-9, 1000)
        for layer in range(shape[0])
        for head in range(shape[1])
    }
    ranking = rank(shape, lambda streams: 5.0 + sum(weights[head] for head in streams), method)
    assert [weights[head] for head in ranking.order] == sorted(weights.values())
    assert list(ranking.losses) == [weights[head] for head in ranking.order]
    losses = ranking.loss_map()
    assert all(losses[head] == weight for head, weight in weights.items())
    num_full = rng.randint(0, len(weights))
    policy = ranking.policy(num_full / len(weights), STREAMING)
    assert streaming_heads(policy) == set(ranking.order[: len(weights) - num_full])


def test_greedy_keeps_one_of_two_heads_that_replace_each_other():
    """If one of the two heads streams, the loss stays; if both stream, it rises by 10."""

    def loss(streams: set[Head]) -> float:
        others = 0.01 * len(streams - {(0, 1), (2, 3)})
        return others + 10.0 * ({(0, 1), (2, 3)} <= streams)

    single, greedy = (rank((4, 4), loss, method) for method in ("single", "greedy"))
    budget = 1 / 16
    assert loss(streaming_heads(single.policy(budget, STREAMING))) > 10
    assert loss(streaming_heads(greedy.policy(budget, STREAMING))) < 1
    assert greedy.losses[-1] == pytest.approx(10)


def test_a_round_is_halved_only_for_a_large_joint_loss():
    """Neither large losses nor a joint loss slightly above their sum halve a round."""
    asked: list[int] = []

    def loss(streams: set[Head]) -> float:
        asked.append(len(streams))
        return 3.0 * len(streams) + 0.001 * len(streams) ** 2 / 4

    rank((1, 8), loss)
    assert len(asked) == num_losses(8, "greedy")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_heads", [*range(1, 20), 224])
def test_the_number_of_losses_is_known_in_advance(num_heads, method):
    calls = 0

    def loss(streams: set[Head]) -> float:
        nonlocal calls
        calls += 1
        return len(streams)

    ranking = rank((1, num_heads), loss, method)
    assert sorted(ranking.order) == [(0, head) for head in range(num_heads)]
    assert calls == num_losses(num_heads, method)
    if num_heads == 224:  # a model of 28 layers: minutes, not the 25,200 of one head per round
        assert calls == (225 if method == "single" else 929)


def test_equal_losses_stream_in_the_order_of_the_heads():
    ranking = rank((2, 2), lambda streams: 0.0, "single")
    assert ranking.order == ((0, 0), (0, 1), (1, 0), (1, 1))


@pytest.mark.parametrize(
    ("budget", "num_full"),
    [
        (0, 0),
        (0.001, 1),
        (0.25, 2),
        (0.3, 2),
        (0.3125, 2),
        (0.4375, 4),
        (0.5, 4),
        (0.97, 8),
        (1, 8),
    ],
)
def test_a_budget_is_the_share_of_full_heads(budget, num_full):
    ranking = rank((2, 4), lambda streams: len(streams))
    policy = ranking.policy(budget, STREAMING)
    assert policy.full_share == num_full / 8
    assert streaming_heads(policy) == set(ranking.order[: 8 - num_full])


def test_a_policy_survives_its_file(tmp_path):
    policy = rank((3, 2), len).policy(0.5, STREAMING)
    policy.save(tmp_path / "policy.json")
    assert HeadPolicy.load(tmp_path / "policy.json") == policy


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 5)),
    num_tokens=st.integers(1, 5000),
    share=st.floats(0.01, 1),
    streaming=st.builds(Visible, st.integers(1, 300), st.integers(0, 80)),
)
def test_a_share_of_the_cache_keeps_as_many_full_heads_as_fit(shape, num_tokens, share, streaming):
    """One more full head would need more than the share, in blocks that the heads keep."""
    ranking = rank(shape, len)
    num_heads = shape[0] * shape[1]

    def cache_share(policy: HeadPolicy) -> float:
        full = -(-num_tokens // 16)
        blocks = [
            full if seen.is_full else min(full, seen.num_blocks(16))
            for layer in policy.heads
            for seen in layer
        ]
        return sum(blocks) / (full * num_heads)

    policies = [ranking.policy(count / num_heads, streaming) for count in range(num_heads + 1)]
    fitting = [policy for policy in policies if cache_share(policy) <= share * (1 + 1e-12)]
    if not fitting:
        with pytest.raises(ConfigError, match="budget: expected at least"):
            ranking.policy_of_cache(share, num_tokens, streaming)
    else:
        found = ranking.policy_of_cache(share, num_tokens, streaming)
        assert cache_share(found) == max(map(cache_share, fitting))
        assert found in fitting


def test_a_ranking_survives_its_file_and_a_report(tmp_path):
    ranking = rank((3, 2), lambda streams: sum(layer + head for layer, head in streams))
    assert ranking.policy(0.5) == ranking.policy(0.5, STREAMING)
    for content in (ranking.to_json(), {"bench": "calibrate", "ranking": ranking.to_json()}):
        (tmp_path / "ranking.json").write_text(json.dumps(content))
        assert HeadRanking.load(tmp_path / "ranking.json") == ranking


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "expected version 1"),
        ({"num_layers": 0}, "num_layers, num_kv_heads, window >= 1, got"),
        ({"window": True}, "num_layers, num_kv_heads, window >= 1, got"),
        ({"sink": -1}, "expected sink >= 0, got -1"),
        ({"heads": None}, "each once, of 3 layers of 2 KV heads, got [None]"),
        ({"heads": []}, "each once, of 3 layers of 2 KV heads, got ()"),
        ({"heads": [[3, 0, 0.1]]}, "each once, of 3 layers of 2 KV heads, got [[3, 0, 0.1]]"),
        ({"heads": [[0, 0, "0.1"]]}, "got [[0, 0, '0.1']]"),
        ({"heads": [[0, 0, 0.1]] * 2}, "each once"),
        ({"more": 1}, "expected the keys ['heads', 'num_kv_heads'"),
    ],
)
def test_a_file_that_is_no_ranking_is_one_line(tmp_path, change, message):
    (tmp_path / "ranking.json").write_text(json.dumps(rank((3, 2), len).to_json() | change))
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        HeadRanking.load(tmp_path / "ranking.json")
    assert str(error.value).startswith("ranking '")
    assert "\n" not in str(error.value)


def test_rankings_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ConfigError, match="ranking 'no_model': expected a readable JSON file, or"):
        HeadRanking.load("no_model")
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"expected the keys .*, got list"):
        HeadRanking.load(tmp_path / "a.json")
    ranking = rank((3, 2), len)
    for share, num_tokens in (
        *((share, 100) for share in (0, 1.5, math.nan, True, "0.5", None)),
        *((0.5, num_tokens) for num_tokens in (0, math.nan, math.inf, 64.5, "64", True, 2**31)),
    ):
        with pytest.raises(ConfigError, match=r"(budget|context): expected (more|at least)"):
            ranking.policy_of_cache(share, num_tokens)


def test_layers_with_their_own_window_stay_full():
    heads = rankable_heads((-1, 24, -1), 2)
    assert heads == [(0, 0), (0, 1), (2, 0), (2, 1)]
    ranking = rank_heads(3, 2, heads, STREAMING, lambda policy: -policy.full_share)
    policy = ranking.policy(0, STREAMING)
    assert streaming_heads(policy) == set(heads)
    assert math.isnan(ranking.loss_map()[1, 0])
    policy.within([-1, 24, -1])  # does not raise
    with pytest.raises(ConfigError, match="a layer without a window of its own"):
        rankable_heads((24, 24), 2)


def test_bad_methods_losses_and_budgets_are_refused():
    with pytest.raises(ConfigError, match=r"method: expected one of .*'greedy'.* got 'best'"):
        rank((1, 2), len, "best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a finite loss, got nan"):
        rank((1, 2), lambda streams: math.nan if streams else 0.0)
    for budget in (-0.1, 1.1, math.nan, True, "0.5", None):
        with pytest.raises(ConfigError, match="budget: expected 0 to 1"):
            rank((1, 2), len).policy(budget, STREAMING)


@pytest.mark.parametrize("seen", [FULL, Visible(0), Visible(-1, 4), (64, 16), 0, "64"])
def test_heads_that_stream_must_have_a_window(seen):
    """With all tokens in it, every budget would silently be a policy of full heads."""
    ranking = rank((1, 2), len)
    for make in (
        lambda: ranking.policy(0.5, seen),
        lambda: ranking.policy_of_cache(0.5, 4096, seen),
        lambda: rank_heads(1, 2, [(0, 0)], seen, lambda policy: 0.0),
    ):
        with pytest.raises(ConfigError, match=r"^streaming: expected a Visible with window >= 1"):
            make()
