"""The sampler benchmark: its bytes, its check against the oracle, its peers, its schema."""

from __future__ import annotations

import json

import pytest
import torch

from mrv1.bench import sampler
from mrv1.bench.sampler import PARAMS, SamplerBench, run_sampler
from mrv1.bench.sampler_peers import torch_sort
from mrv1.bench.timing import WrongResultError
from mrv1.errors import ConfigError
from mrv1.kernels import reference

SMALL = {"rows": (1, 3), "stds": (1.0,), "vocab_size": 300, "repeats": 2, "device": "cpu"}
KEYS = {
    "op", "schema", "dtype", "path", "device", "driver", "versions", "commit", "date", "peers",
    "copy_bandwidth_bytes_per_s", "conditions", "results",
}  # fmt: skip


def test_result_has_the_schema_and_survives_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampler, "copy_bandwidth", lambda _: 1e9)
    result = run_sampler(SamplerBench(**SMALL, peers=("torch-sort",)))
    assert json.loads(json.dumps(result)) == result
    assert result.keys() == KEYS
    assert len(result["results"]) == 2 * len(PARAMS)
    for entry in result["results"]:
        assert entry["variants"].keys() == {"mrv1", "torch-sort"}
        assert entry["failed_peers"] == {}
        assert entry["bytes_moved"] == entry["rows"] * 300 * 4
        ours = entry["variants"]["mrv1"]
        share = entry["bytes_moved"] / 1e9 / (ours["median_us"] * 1e-6)
        assert ours["share_of_copy_bandwidth"] == pytest.approx(share)


def test_a_wrong_kernel_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch):
    class Ops:
        @staticmethod
        def sample_tokens(logits, **of_row):
            return (reference.sample_tokens(logits, **of_row) + 1) % logits.shape[1]

    monkeypatch.setattr(sampler, "select_ops", lambda _: Ops)
    with pytest.raises(WrongResultError, match="3 rows, greedy: expected the oracle's tokens"):
        run_sampler(SamplerBench(**SMALL | {"rows": (3,)}, peers=()))


@pytest.mark.parametrize("params", PARAMS)
def test_the_torch_peer_draws_what_is_kept(params: str):
    logits = torch.randn(64, 2000, generator=torch.Generator().manual_seed(0))
    of_row = sampler._arguments(params, 64, torch.device("cpu"))
    tokens = torch_sort(logits, of_row)()
    if params == "greedy":
        assert torch.equal(tokens, logits.argmax(1))
        return
    filters = {name: of_row[name] for name in ("top_k", "top_p", "min_p")}
    kept = reference.kept_tokens(
        logits.double() / of_row["temperature"].double()[:, None], **filters
    )
    assert bool(kept.gather(1, tokens[:, None]).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": ()}, r"rows: expected different counts >= 1, got \[\]"),
        ({"rows": (2, 2)}, r"rows: expected different counts >= 1, got \[2, 2\]"),
        ({"stds": (0.0,)}, r"stds: expected numbers > 0, got \[0.0\]"),
        ({"vocab_size": 0}, "vocab_size: expected >= 1, got 0"),
        ({"repeats": 0}, "repeats: expected >= 1, got 0"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        SamplerBench(**SMALL | options)
