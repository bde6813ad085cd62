"""The sampler benchmark: its cases, bytes, checks against the oracle, peers, schema."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.cli import sampler as bench_sampler
from benchmarks.kernels import comparison
from benchmarks.kernels.sampler import DRAW, SamplerBench, run_sampler
from benchmarks.kernels.sampler_cases import CASES, Work, target_us, works
from benchmarks.measure.timing import WrongResultError
from benchmarks.peers.sampler import SAMPLER_PEERS, plain_torch
from benchmarks.report.files import ResultFile
from benchmarks.report.kernels import sampler_table
from mrv1.errors import ConfigError
from mrv1.kernels import reference
from mrv1.kernels.sampling.contracts import TopLogprobs

SMALL = {"rows": (1, 3), "stds": (1.0,), "vocab_size": 300, "repeats": 2, "device": "cpu"}
KEYS = {
    "op", "schema", "dtype", "path", "device", "driver", "versions", "commit", "date", "peers",
    "copy_bandwidth_bytes_per_s", "conditions", "results",
}  # fmt: skip
READ, V, ROWS = 4 * 2000, 2000, 5
BYTES = {
    "greedy": READ,
    "unused": READ,
    "logprobs 20": READ,
    "raw logprobs 20": 3 * READ,
    "penalties": READ + 1000 * 8,  # counts; tokens of the history
    "bias 300": 300 * 16,
    "allowed ids 1000": 63 * 4 + 1000 * 4,  # 2000 bits; banned logits
    "bitmask 1000": 63 * 4 + 1000 * 4,
    "bad words 128 x 8": 128 * 9 * 4 + 7 * 4 + 64 * 4,  # words; end of the history; banned logits
}
BYTES["everything"] = sum(map(BYTES.get, ("greedy", "penalties", "bias 300", "bad words 128 x 8")))
EDITS = [name for name, case in CASES.items() if case.stage in ("edit", "bitmask")]
DRAWS = [name for name, case in CASES.items() if "draw" in case.stage]


def _work(name: str, num_rows: int = ROWS, vocab_size: int = V) -> Work:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 2
    (work,) = works(CASES[name], [logits], reference, seed=0)
    return work


# --- result ------------------------------------------------------------------------------------


def test_result_has_the_schema_and_survives_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comparison, "copy_bandwidth", lambda _: 1e9)
    options = SMALL | {"stds": (1.0, 2.0), "rows": (1, 3)}
    result = run_sampler(SamplerBench(**options, peers=("torch",)))
    assert json.loads(json.dumps(result)) == result
    assert result.keys() == KEYS
    assert len(result["results"]) == 2 * (2 * len(CASES) - len(EDITS))
    for entry in result["results"]:
        name, ours = entry["params"], entry["variants"]["mrv1"]
        both = CASES[name].stage == "edit and draw"
        assert entry["variants"].keys() == {"mrv1", "torch"} | ({DRAW} if both else set())
        assert entry["failed_peers"] == {}
        assert entry["bytes_moved"] == CASES[name].bytes_moved(entry["rows"], 300)
        seconds = ours["median_us"] * 1e-6
        share = entry["bytes_moved"] / 1e9 / seconds
        assert ours["share_of_copy_bandwidth"] == pytest.approx(share)
        assert ours["reads"] == pytest.approx(seconds / (entry["rows"] * 300 * 4 / 1e9))
        assert entry["target_us"] is None
        if both:
            draw = entry["variants"][DRAW]
            assert entry["over_draw_us"] == pytest.approx(ours["median_us"] - draw["median_us"])
            assert draw["bytes_moved"] == entry["rows"] * 300 * 4
    table = bench_sampler._table(result)
    assert table.row_count == sum(len(entry["variants"]) for entry in result["results"])


def test_chosen_cases_are_measured():
    bench = SamplerBench(**SMALL, cases=("bad words 128 x 8", "greedy"), peers=())
    results = run_sampler(bench)["results"]
    assert [(e["rows"], e["params"]) for e in results] == [
        (1, "bad words 128 x 8"), (1, "greedy"), (3, "bad words 128 x 8"), (3, "greedy"),
    ]  # fmt: skip


def test_peers_without_a_case_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comparison, "peer_versions", lambda *_: {"vllm-mask": "0.26"})
    bench = SamplerBench(**SMALL, cases=("unused", "logprobs 20"))
    for entry in run_sampler(bench)["results"]:
        assert entry["failed_peers"] == {"vllm-mask": f"has no {entry['params']}"}


# --- cases -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_a_case_equal_the_closed_form(name: str):
    assert CASES[name].bytes_moved(3, V) == 3 * BYTES[name]


def test_targets_are_reads_or_microseconds():
    assert target_us("temperature", 256, 151_936, 36.0) == 54.0
    assert target_us("top-k 50 + top-p 0.9", 32, 151_936, 5.0) == 35.0
    assert target_us("temperature", 32, 151_936, 5.0) is None
    assert target_us("temperature", 256, 32_000, 8.0) is None
    assert target_us("bad words 128 x 8", 256, 151_936, None) is None


def test_half_of_the_bad_words_are_banned():
    work = _work("bad words 128 x 8")
    work.run()
    assert (work.logits == -torch.inf).sum(1).tolist() == [64] * ROWS


def test_the_case_everything_edits_as_its_parts_do():
    together, logits = _work("everything"), _work("unused").logits
    for name in ("bad words 128 x 8", "bias 300", "penalties"):
        (part,) = works(CASES[name], [logits], reference, seed=0)
        part.run()
    tokens = together.run()
    torch.testing.assert_close(together.logits, logits)
    assert bool((logits.gather(1, tokens[:, None]) > -torch.inf).all())


def test_the_case_unused_changes_no_logits():
    work = _work("unused")
    before = work.logits.clone()
    assert torch.equal(work.run(), work.draw())
    assert torch.equal(work.logits, before)


# --- checks ------------------------------------------------------------------------------------


def _other_tokens(logits, *args, **kwargs):
    return (reference.sample_tokens(logits, *args, **kwargs) + 1) % logits.shape[1]


def _other_logits(logits, *args, **kwargs):
    reference.edit_logits(logits, *args, **kwargs)
    logits[-1, 0] += 1


def _other_logprobs(*args):
    right = reference.top_logprobs(*args)
    return TopLogprobs(right.logprobs + 1e-4, *right[1:])


def _other_ranks(*args):
    right = reference.top_logprobs(*args)
    return right._replace(ranks=right.ranks + 1)


@pytest.mark.parametrize(
    ("op", "wrong", "name", "message"),
    [
        ("sample_tokens", _other_tokens, "greedy", "greedy: expected the oracle's tokens, got 3"),
        ("sample_tokens", _other_tokens, "everything", "expected the oracle's tokens"),
        ("edit_logits", _other_logits, "everything", "expected the oracle's logits, got 1 others"),
        ("edit_logits", _other_logits, "unused", "expected the oracle's logits, got 1 others"),
        ("top_logprobs", _other_logprobs, "logprobs 20", "expected the oracle's logprobs within"),
        ("top_logprobs", _other_ranks, "raw logprobs 20", "expected the oracle's ranks"),
    ],
)
def test_a_wrong_kernel_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, op: str, wrong: object, name: str, message: str
):
    names = ("edit_logits", "apply_bad_words", "sample_tokens", "top_logprobs")
    ops = SimpleNamespace(**{n: getattr(reference, n) for n in names} | {op: wrong})
    monkeypatch.setattr(comparison, "select_ops", lambda _: ops)
    with pytest.raises(WrongResultError, match=rf"^mrv1 at 3 rows, .*{message}"):
        run_sampler(SamplerBench(**SMALL | {"rows": (3,)}, cases=(name,), peers=()))


# --- peers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EDITS)
def test_the_torch_peer_edits_as_the_oracle_does(name: str):
    ours, peer = _work(name), _work(name)
    ours.run()
    plain_torch(peer)()
    assert not torch.equal(ours.logits, _work("unused").logits)
    torch.testing.assert_close(peer.logits, ours.logits)


@pytest.mark.parametrize("name", DRAWS)
def test_the_torch_peer_draws_only_kept_tokens(name: str):
    work = _work(name, num_rows=64)
    tokens = plain_torch(work)()
    if name == "greedy":
        assert torch.equal(tokens, work.logits.argmax(1))
        return
    filters = {key: work.slots[key] for key in ("top_k", "top_p", "min_p")}
    scaled = work.logits.double() / work.slots["temperature"].double()[:, None]
    kept = reference.kept_tokens(scaled, **filters)
    assert bool(kept.gather(1, tokens[:, None]).all())


@pytest.mark.parametrize("name", ["logprobs 20", "raw logprobs 20"])
def test_the_torch_peer_equals_the_oracles_log_probabilities(name: str):
    work = _work(name)
    want = work.run()
    logprobs, ranks, top_logprobs, top_token_ids = plain_torch(work)()
    torch.testing.assert_close(logprobs, want.logprobs)
    torch.testing.assert_close(top_logprobs, want.top_logprobs)
    assert torch.equal(ranks[:, None], want.ranks)
    assert torch.equal(top_token_ids, want.top_token_ids)


def test_peers_of_the_draw_alone_have_no_other_case():
    for name in CASES.keys() - set(DRAWS):
        assert SAMPLER_PEERS["vllm-mask"].adapter(_work(name)) is None


# --- table, options ----------------------------------------------------------------------------


def test_the_table_shows_targets_where_a_file_has_them():
    ours = {"median_us": 1234.56, "reads": 4.56, "share_of_copy_bandwidth": 0.4}
    entry = {
        "rows": 256, "std": 2.5, "params": "everything", "target_us": 180.0,
        "variants": {"mrv1": ours, DRAW: {}}, "peer_time_over_ours": {DRAW: 0.75},
    }  # fmt: skip
    result = {
        "results": [entry, entry | {"target_us": None}],
        "conditions": {"vocab_size": 151_936, "temperature": 0.8}, "dtype": "float32",
        "versions": {}, "peers": {}, "path": "triton", "device": {"name": "GPU X"},
        "copy_bandwidth_bytes_per_s": 4e12, "commit": "0", "date": "2026-11-22",
    }  # fmt: skip
    table = sampler_table(ResultFile("sampler-x.json", result))
    for said in (
        "| std of logits | case | us | target, us | reads | of copy bandwidth | mrv1-draw |",
        "| 256 | 2.5 | everything | 1,234.6 | 180.0 | 4.6 | 40% | 0.75x |",
        "| 256 | 2.5 | everything | 1,234.6 | - | 4.6 | 40% | 0.75x |",
    ):
        assert said in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": ()}, r"rows: expected different counts >= 1, got \[\]"),
        ({"rows": (2, 2)}, r"rows: expected different counts >= 1, got \[2, 2\]"),
        ({"stds": (0.0,)}, r"stds: expected numbers > 0, got \[0.0\]"),
        ({"vocab_size": 0}, "vocab_size: expected >= 1, got 0"),
        ({"repeats": 0}, "repeats: expected >= 1, got 0"),
        ({"cases": ()}, "cases: expected some of greedy, temperature, .*, got nothing"),
        ({"cases": ("greedy", "x")}, r"cases: expected some of greedy, .*, got \['x'\]"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        SamplerBench(**SMALL | options)
