"""Head policies: every source against its rule in Python, their blocks against single tokens."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import LLM, ConfigError
from mrv1.headwise import FULL, HeadPolicy, Visible

some_heads = st.one_of(
    st.just(FULL), st.builds(Visible, window=st.integers(1, 200), sink=st.integers(0, 70))
)
policies = st.tuples(st.integers(1, 5), st.integers(1, 8)).flatmap(
    lambda shape: st.lists(
        st.tuples(*[some_heads] * shape[1]), min_size=shape[0], max_size=shape[0]
    ).map(lambda heads: HeadPolicy(tuple(heads)))
)


# --- sources ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0, 0), (0.01, 1), (0.125, 1), (0.1875, 2), (0.3125, 2), (0.5, 4), (0.99, 8), (1, 8)],
)
def test_a_ratio_streams_leading_heads(ratio, expected):
    policy = HeadPolicy.of_ratio(3, 8, ratio, window=64, sink=4)
    for layer in policy.heads:
        assert layer == (Visible(64, 4),) * expected + (FULL,) * (8 - expected)


@given(
    num_layers=st.integers(1, 12),
    every=st.one_of(st.none(), st.integers(2, 14)),
    ratio=st.floats(0, 1),
)
def test_every_nth_layer_is_full(num_layers, every, ratio):
    policy = HeadPolicy.of_ratio(num_layers, 4, ratio, window=9, full_layers_every=every)
    mixed = HeadPolicy.of_ratio(1, 4, ratio, window=9).heads[0]
    for layer, heads in enumerate(policy.heads):
        is_full = every is not None and (layer + 1) % every == 0
        assert heads == ((FULL,) * 4 if is_full else mixed)


def test_a_policy_is_read_from_the_fields_of_a_checkpoint():
    assert HeadPolicy.of_config({"window_size": 4096}, 2, 4) is None
    fields = {
        "head_wise_swa_ratio": 0.25, "window_size": 32, "sink_size": 4, "window_attn_skip_freq": 2
    }  # fmt: skip
    expected = HeadPolicy.of_ratio(4, 4, 0.25, window=32, sink=4, full_layers_every=2)
    assert HeadPolicy.of_config(fields, 4, 4) == expected
    listed = HeadPolicy.of_config(fields | {"window_attn_skip_freq": [1, 0, 1, 0]}, 4, 4)
    assert listed == expected
    for none_full in (None, 1, [1, 1, 1, 1]):
        every_layer = HeadPolicy.of_config(fields | {"window_attn_skip_freq": none_full}, 4, 4)
        assert every_layer == HeadPolicy.of_ratio(4, 4, 0.25, window=32, sink=4)


@pytest.mark.parametrize("fields", ["RTPURBO", "CHECKPOINT"])
def test_fields_that_only_the_text_model_has_count(fields):
    """Else such a checkpoint would silently run with full heads."""
    config = globals()[fields]
    nested = {"model_type": "of images", "num_attention_heads": 7, "text_config": config}
    found = HeadPolicy.of_config(nested, 2, 3)
    assert found == HeadPolicy.of_config(config, 2, 3)
    assert FULL in found.groups
    assert len(found.groups) == 2


RTPURBO = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
    "headwise_config": {
        "sink_token_num": 4, "swa_token_num": 31, "seqlen_threshold": 0,
        "0": [0, 0, 1, 1, 0, 1], "1": [0, 0, 0, 0, 0, 0],
    },
}  # fmt: skip


def rtpurbo(**fields):
    """Return ``RTPURBO`` with other values in its field; None = the key is left out."""
    merged = RTPURBO["headwise_config"] | fields
    own = {key: value for key, value in merged.items() if value is not None}
    return RTPURBO | {"headwise_config": own}


def test_a_kv_head_of_rtpurbo_is_full_if_any_of_its_query_heads_is(caplog):
    """RTP-LLM's window has ``swa_token_num`` tokens before the current one."""
    seen = Visible(32, 4)
    expected = HeadPolicy(((seen, FULL, FULL), (seen,) * 3))
    assert HeadPolicy.of_config(RTPURBO, 2, 3) == expected
    text = {name: value for name, value in RTPURBO.items() if name != "headwise_config"}
    nested = {"text_config": text, "headwise_config": RTPURBO["headwise_config"]}
    assert HeadPolicy.of_config(nested, 2, 3) == expected
    defaults = rtpurbo(sink_token_num=None, swa_token_num=None)
    policy = HeadPolicy.of_config(defaults, 2, 3)
    assert policy.groups == (FULL, Visible(8193, 4))
    assert not caplog.records


@pytest.mark.parametrize(
    ("threshold", "swa", "is_said"),
    [(16_384, 8192, True), (None, 8192, True), (8194, 8192, True), (8193, 8192, False)],
)
def test_a_threshold_that_makes_a_difference_is_said_not_to_be_followed(
    caplog, threshold, swa, is_said
):
    HeadPolicy.of_config(rtpurbo(seqlen_threshold=threshold, swa_token_num=swa), 2, 3)
    said = f"seqlen_threshold={threshold or 16_384} is not followed: .* see {swa + 1} tokens and a"
    assert bool(re.search(said, caplog.text)) is is_said
    caplog.clear()
    full = {"0": [1] * 6, "1": [0, 1] * 3}
    HeadPolicy.of_config(rtpurbo(seqlen_threshold=threshold, **full), 2, 3)
    assert not caplog.records


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"1": None}, "layer 1: expected a 0 or 1 for each of 6 query heads, got None"),
        ({"1": [0, 1, 0]}, r"layer 1: expected .* of 6 query heads, got \[0, 1, 0\]"),
        ({"0": [0, 1, 0, 1, 0, 2]}, r"layer 0: expected .*, got \[0, 1, 0, 1, 0, 2\]"),
        ({"0": [0, 1, 0, 1, 0, True]}, "layer 0: expected a 0 or 1 for each"),
        ({"0": [0.0] * 6}, "layer 0: expected a 0 or 1 for each"),
        ({"0": "010101"}, "layer 0: expected a 0 or 1 for each"),
        ({"2": [0] * 6}, r"no keys but 0 to 1, for the layers, and .*, got \['2'\]"),
        ({"swa_tokens": 8}, r"no keys but .*'swa_token_num'.*, got \['swa_tokens'\]"),
        *(
            ({name: value}, f"{name}: expected an integer from 0 to 2147483646, got {value!r}")
            for name in ("sink_token_num", "swa_token_num", "seqlen_threshold")
            for value in (-1, 4.0, True, "8", 2**31 - 1)
        ),
    ],
)
def test_the_field_of_rtpurbo_is_checked_and_named(fields, message):
    with pytest.raises(ConfigError, match=f"^headwise_config(, |: expected ){message}"):
        HeadPolicy.of_config(rtpurbo(**fields), 2, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"headwise_config": [[0]]}, r"headwise_config: expected an object, got \[\[0\]\]"),
        ({"head_wise_swa_ratio": 0.5}, "no head_wise_swa_ratio beside it, got 0.5"),
        ({"num_attention_heads": 4}, "num_attention_heads: expected a multiple of 3 KV heads"),
        ({"num_attention_heads": None}, "num_attention_heads: expected a multiple .* got None"),
        ({"num_key_value_heads": 6}, "num_key_value_heads: expected 3, as the model has, got 6"),
        ({"num_hidden_layers": 3}, "num_hidden_layers: expected 2, as the model has, got 3"),
    ],
)
def test_a_checkpoint_of_rtpurbo_for_another_model_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        HeadPolicy.of_config(RTPURBO | fields, 2, 3)


def test_the_layer_windows_of_a_model_give_a_policy():
    policy = HeadPolicy.of_layer_windows([-1, 512, -1], 2)
    assert policy.heads == ((FULL,) * 2, (Visible(512),) * 2, (FULL,) * 2)
    assert policy.groups == (FULL, Visible(512))
    assert HeadPolicy.full(3, 2) == HeadPolicy.of_layer_windows([-1] * 3, 2)


@given(
    weights=st.lists(
        st.lists(st.integers(-2, 12).map(lambda n: n / 10), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    ),
    sparsity=st.floats(0, 1),
)
def test_duo_attention_streams_the_heads_of_least_weight(tmp_path_factory, weights, sparsity):
    folder = tmp_path_factory.mktemp("pattern")
    np.savetxt(folder / "full_attention_heads.tsv", np.array(weights), delimiter="\t")
    (folder / "config.json").write_text(json.dumps({"sink_size": 16, "recent_size": 64}))
    policy = HeadPolicy.of_duo_attention(folder, sparsity=sparsity)
    flat = [seen for layer in policy.heads for seen in layer]
    clipped = [min(max(weight, 0), 1) for row in weights for weight in row]
    assert set(flat) <= {FULL, Visible(64, 16)}
    assert sum(not seen.is_full for seen in flat) == round(sparsity * len(flat))
    for seen, weight in zip(flat, clipped, strict=True):
        for other, other_weight in zip(flat, clipped, strict=True):
            assert not (weight < other_weight and seen.is_full and not other.is_full)


@given(policy=policies)
def test_a_saved_policy_loads_unchanged(tmp_path_factory, policy):
    path = tmp_path_factory.mktemp("policy") / "policy.json"
    policy.save(path)
    assert HeadPolicy.load(path) == policy


def test_invalid_policies_and_arguments_are_refused_and_named(tmp_path):
    path = tmp_path / "policy.json"
    for make, message in (
        (lambda: HeadPolicy(()), "one number of KV heads >= 1"),
        (lambda: HeadPolicy(((FULL,), (FULL, FULL))), r"got \[1, 2\]"),
        (lambda: HeadPolicy(((FULL, Visible(0)),)), r"layer 0, head 1: expected .* got \(0, 0\)"),
        (lambda: HeadPolicy(((Visible(-2),),)), r"got \(-2, 0\)"),
        (lambda: HeadPolicy(((Visible(-1, 4),),)), r"got \(-1, 4\)"),
        (
            lambda: HeadPolicy.of_ratio(1, 4, 1.5, window=4),
            "streaming_ratio: expected a number from 0 to 1, got 1.5",
        ),
        (lambda: HeadPolicy.of_ratio(1, 4, float("nan"), window=4), "got nan"),
        (
            lambda: HeadPolicy.of_ratio(1, 4, 0.5, window=4, full_layers_every=1),
            "full_layers_every: expected None or an integer from 2 to 2147483647, got 1",
        ),
        (
            lambda: HeadPolicy.of_config({"head_wise_swa_ratio": 0.5}, 1, 4),
            "window_size: expected",
        ),
        (
            lambda: HeadPolicy.of_config(
                {"head_wise_swa_ratio": 0.5, "window_size": 4, "window_attn_skip_freq": [1]}, 2, 4
            ),
            "a 0 or 1 for each of 2 layers",
        ),
        (lambda: HeadPolicy.of_duo_attention(tmp_path), "DuoAttention pattern"),
        (
            lambda: HeadPolicy.of_duo_attention(tmp_path, sparsity=2),
            "sparsity: expected a number from 0 to 1, got 2",
        ),
        (lambda: HeadPolicy.load(path), "policy.json"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
    for text in ("{", "[]", '{"version": 2, "heads": []}', '{"version": 1, "heads": [[4]]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="policy"):
            HeadPolicy.load(path)


NO_INT = ["4", 4.0, 4.5, float("nan"), True, None, [4], 2**31]
NO_SHARE = ["0.5", float("nan"), True, -0.1, 1.5, [0.5]]


def refused(name, got):
    """Expect an error that names the field and the value it got."""
    return pytest.raises(
        ConfigError, match=rf"(^|, ){name}: expected .*{re.escape(f'got {got!r}')}$"
    )


@pytest.mark.parametrize(
    "seen", [[256.5, 64], [True, 0], [64, False], [float("nan"), 0], [float("inf"), 0], [2**31, 0],
             [4, 2**31], [4, -1], [-1.0, 0], ["5", 0], [], [5], [4, 0, 0], "45", 4, None]
)  # fmt: skip
def test_a_head_must_be_a_pair_of_integers_in_their_range(tmp_path, seen):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"version": 1, "heads": [[[-1, 0]] * 2, [[-1, 0], seen]]}))
    got = tuple(seen) if isinstance(seen, list) and len(seen) == 2 else seen
    with refused(r".*policy\.json, layer 1, head 1", got):
        HeadPolicy.load(path)
    if isinstance(got, tuple):
        for head in (Visible(*got), got):  # a plain tuple is refused too
            with refused("head policy, layer 1, head 1", got):
                HeadPolicy(((FULL, FULL), (FULL, head)))


@pytest.mark.parametrize("unknown", [["head"], ["window", "sink"], ["Heads"], [""]])
def test_an_unknown_key_is_refused(tmp_path, unknown):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"version": 1, "heads": [[[-1, 0]]]} | dict.fromkeys(unknown, 4)))
    with refused(r".*policy\.json", unknown):
        HeadPolicy.load(path)
    with pytest.raises(ConfigError, match=r"no keys but \['version', 'heads'\]"):
        LLM("tiny", device="cpu", num_kv_blocks=8, head_policy=path)


@pytest.mark.parametrize("seen", [{"window": 64, "sink": 4}, {"window": 64, "snik": 4}, {}])
def test_a_head_written_as_an_object_is_refused(tmp_path, seen):
    """Only the outermost object has keys."""
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"version": 1, "heads": [[seen]]}))
    with refused(r".*policy\.json, layer 0, head 0", seen):
        HeadPolicy.load(path)


@pytest.mark.parametrize("heads", [None, 5, [5], ["45"], "heads", {"0": []}, [], [[]]])
def test_a_table_must_have_layers_of_heads(tmp_path, heads):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"version": 1, "heads": heads}))
    with pytest.raises(ConfigError, match=r"policy\.json(, heads)?: expected"):
        HeadPolicy.load(path)
    with pytest.raises(ConfigError, match="head policy: expected"):
        HeadPolicy(heads)


def test_the_largest_window_and_sink_are_accepted(tmp_path):
    policy = HeadPolicy.of_ratio(1, 2, 0.5, window=2**31 - 1, sink=2**31 - 1)
    policy.save(tmp_path / "policy.json")
    assert HeadPolicy.load(tmp_path / "policy.json") == policy


RATIO = {
    "num_layers": 4, "num_kv_heads": 4, "streaming_ratio": 0.5, "window": 32, "sink": 4,
    "full_layers_every": 2,
}  # fmt: skip
CHECKPOINT = {
    "head_wise_swa_ratio": 0.5, "window_size": 32, "sink_size": 4, "window_attn_skip_freq": 2
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [("streaming_ratio", value) for value in [*NO_SHARE, None]]
    + [("num_layers", value) for value in [*NO_INT[:-1], 0]]
    + [("num_kv_heads", value) for value in [*NO_INT[:-1], 0]]
    + [("window", value) for value in [*NO_INT, 0, -1]]
    + [("sink", value) for value in [*NO_INT, -1]]
    + [("full_layers_every", value) for value in [*NO_INT, 0, 1] if value is not None],
)
def test_a_ratios_arguments_are_checked(field, value):
    with refused(field, value):
        HeadPolicy.of_ratio(**RATIO | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("head_wise_swa_ratio", value) for value in NO_SHARE]
    + [("window_size", value) for value in [*NO_INT, 0, -1, [32, 32]]]
    + [("sink_size", value) for value in [*NO_INT, -1, "", [], False] if value is not None]
    + [
        ("window_attn_skip_freq", value)
        for value in ["2", 2.0, True, 0, 2**31, {"a": 1}, [1, 0], [[1], 0, 1, 0], [1, 0, 1, 2],
                      [True, False, True, False], [1.0, 0, 1, 0]]
    ],
)  # fmt: skip
def test_the_fields_of_a_checkpoint_are_checked_and_named(field, value):
    with refused(field, value):
        HeadPolicy.of_config(CHECKPOINT | {field: value}, 4, 4)


@pytest.mark.parametrize("ratio", [0, 0.0])
@pytest.mark.parametrize("others", [{}, {"window_size": None}, {"window_size": 0}])
def test_a_checkpoint_without_streaming_heads_needs_no_window(ratio, others):
    policy = HeadPolicy.of_config({"head_wise_swa_ratio": ratio} | others, 3, 2)
    assert policy == HeadPolicy.full(3, 2)


@pytest.mark.filterwarnings("ignore:loadtxt. input contained no data")
@pytest.mark.parametrize(
    ("table", "config", "message"),
    [
        ("nan\t0.9", {}, r"heads\.tsv: expected .* finite weights, got \[nan\]"),
        ("1\tinf", {}, r"heads\.tsv: expected .* finite weights, got \[inf\]"),
        ("", {}, r"heads\.tsv: expected \[layers, kv_heads\]"),
        ("1\t2", [], r"config\.json: expected an object with sink_size and recent_size, got \[\]"),
        *(
            ("1\t2", {"sink_size": value}, r"config\.json, sink_size: expected an integer from 0")
            for value in [*NO_INT, -1]
        ),
        *(
            (
                "1\t2",
                {"recent_size": value},
                r"config\.json, recent_size: expected an integer from 1",
            )
            for value in [*NO_INT, 2.7, 0, -1]
        ),
    ],
)
def test_a_duo_attention_pattern_is_checked(tmp_path, table, config, message):
    (tmp_path / "full_attention_heads.tsv").write_text(table)
    sizes = {"sink_size": 0, "recent_size": 64}
    content = sizes | config if isinstance(config, dict) else config
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        HeadPolicy.of_duo_attention(tmp_path)


@pytest.mark.parametrize("sparsity", NO_SHARE)
def test_a_sparsity_must_be_a_share(tmp_path, sparsity):
    with refused("sparsity", sparsity):
        HeadPolicy.of_duo_attention(tmp_path, sparsity=sparsity)


# --- slices, blocks and tokens ------------------------------------------------------------------


@given(policy=policies, size=st.sampled_from([1, 2, 4, 8]))
def test_ranks_have_their_heads_in_order(policy, size):
    heads = policy.num_kv_heads
    if heads % size and size % heads:
        with pytest.raises(ConfigError, match=f"{heads} KV heads"):
            policy.slice(0, size)
        return
    for layer in range(policy.num_layers):
        dealt = [policy.slice(rank, size).heads[layer] for rank in range(size)]
        if heads >= size:
            assert sum(dealt, ()) == policy.heads[layer]
        else:  # each head has size / heads ranks, next to each other
            expected = [seen for seen in policy.heads[layer] for _ in range(size // heads)]
            assert [head for (head,) in dealt] == expected


def visible_tokens(seen: Visible, position: int) -> set[int]:
    """Return the tokens that a query at a position sees, found one by one."""
    return {
        token
        for token in range(position + 1)
        if seen.is_full or token < seen.sink or position - token < seen.window
    }


@given(
    seen=some_heads, num_tokens=st.integers(0, 300), block_size=st.sampled_from([16, 32]),
    query_len=st.integers(1, 40),
)  # fmt: skip
def test_blocks_are_freed_exactly_when_no_query_sees_them(seen, num_tokens, block_size, query_len):
    later = set().union(*(visible_tokens(seen, p) for p in (num_tokens, num_tokens + 999)))
    freed = seen.freed_blocks(num_tokens, block_size)
    blocks = range(-(-num_tokens // block_size))
    for block in blocks:
        tokens = set(range(block * block_size, (block + 1) * block_size))
        if block in freed:
            assert not tokens & visible_tokens(seen, num_tokens)
        elif seen.is_full or block * block_size < seen.sink:
            assert tokens & later
        else:
            assert tokens & visible_tokens(seen, num_tokens) or block == blocks[-1]
    if not seen.is_full:
        queries = range(num_tokens, num_tokens + query_len)
        touched = {t // block_size for p in queries for t in visible_tokens(seen, p)}
        assert len(touched) <= seen.num_blocks(block_size, query_len)


def test_a_window_of_64_and_a_sink_of_32_free_blocks_2_to_27_at_512_tokens():
    assert Visible(64, 32).freed_blocks(512, 16) == range(2, 28)
    with pytest.raises(ValueError, match="expected a streaming head"):
        FULL.num_blocks(16)


@given(policy=policies, num_tokens=st.integers(0, 300))
def test_held_tokens_cover_the_tokens_that_the_next_token_sees(policy, num_tokens):
    expected = sum(
        len(visible_tokens(seen, num_tokens)) - 1 for layer in policy.heads for seen in layer
    )
    held = policy.num_tokens_held(num_tokens)
    assert held >= expected
    if all(seen.sink == 0 for layer in policy.heads for seen in layer):
        assert held == expected
    assert policy.full_share * policy.num_layers * policy.num_kv_heads == pytest.approx(
        sum(seen == FULL for layer in policy.heads for seen in layer)
    )
    assert [role.window for role in policy.roles(0)] == [seen.window for seen in policy.heads[0]]
