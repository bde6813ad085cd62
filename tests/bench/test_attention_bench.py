"""The attention benchmark: its arithmetic against counted masks, its check, its schema."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import attention as bench_module
from benchmarks.kernels import attention_data, comparison
from benchmarks.kernels.attention import run_attention
from benchmarks.kernels.attention_case import AttentionCase, Cell
from benchmarks.kernels.attention_data import make_data, relative_error
from benchmarks.kernels.attention_options import AttentionBench
from benchmarks.measure.options import KVDtype
from benchmarks.peers import Peer
from benchmarks.peers import attention as peers
from benchmarks.report.charts import Chart, attention_chart
from benchmarks.report.draw import plot
from benchmarks.report.files import ResultFile
from benchmarks.report.kernels import kernel_table
from benchmarks.report.rows import cells_by_bytes, own_rows
from mrv1.errors import CapacityError, ConfigError
from mrv1.kernels import PrefillSplits, reference

SMALL = {
    "cells": (Cell(1, 40), Cell(3, 17)),
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "repeats": 2,
    "device": "cpu",
}
KEYS = {
    "op", "schema", "mode", "dtype", "kv_dtype", "path", "device", "driver", "versions", "commit",
    "date", "peers", "copy_bandwidth_bytes_per_s", "conditions", "results",
    "geometric_mean_over_ours", "worst_over_ours",
}  # fmt: skip
ENTRY_KEYS = {
    "batch", "context", "shortest", "num_decodes", "decode_context", "query_len",
    "bytes_moved", "kv_bytes", "flops",
    "buffer_sets", "variants", "peer_time_over_ours", "failed_peers",
}  # fmt: skip
VARIANT_KEYS = {
    "median_us", "p20_us", "p80_us", "launches_per_sample", "samples_us", "bytes_moved",
    "share_of_copy_bandwidth", "flops_per_s", "relative_error", "max_relative_error",
}  # fmt: skip

FULL = AttentionCase(
    cell=Cell(8, 4096), query_len=1, num_q_heads=32, num_kv_heads=8, head_dim=128, block_size=16,
    dtype=torch.bfloat16, num_full_heads=8,
)  # fmt: skip
MIXED = replace(FULL, cell=Cell(8, 131072), num_full_heads=2, window=256, sink=64)


# --- bytes and operations ------------------------------------------------------------------------


def test_bytes_of_a_uniform_decode_by_hand():
    assert FULL.kv_bytes == 8 * 4096 * 8 * 128 * 2 * 2
    assert FULL.bytes_moved == FULL.kv_bytes + 8 * 256 * 4 + 2 * 8 * 32 * 128 * 2
    assert FULL.flops == 4 * 8 * 32 * 4096 * 128


def test_bytes_of_mixed_heads_by_hand():
    """Two heads are full; six see a sink of 64 tokens (4 blocks) and a window of 256 (16)."""
    assert MIXED.kv_bytes == 8 * (2 * 131072 + 6 * 320) * 128 * 2 * 2
    table_bytes = 8 * (131072 // 16 + 4 + 16) * 4
    assert MIXED.bytes_moved == MIXED.kv_bytes + table_bytes + 2 * 8 * 32 * 128 * 2


def test_an_fp8_vector_is_its_codes_and_a_scale():
    fp8 = replace(FULL, kv_dtype="fp8_e4m3")
    assert fp8.kv_bytes == 8 * 4096 * 8 * (128 + 4) * 2
    assert fp8.scale_bytes == 8 * 4096 * 8 * 4 * 2
    assert FULL.scale_bytes == 0
    assert fp8.bytes_moved - fp8.kv_bytes == FULL.bytes_moved - FULL.kv_bytes
    mixed = replace(MIXED, kv_dtype="fp8_e4m3")
    assert mixed.kv_bytes == 8 * (2 * 131072 + 6 * 320) * (128 + 4) * 2


def test_operations_of_a_causal_prefill_by_hand():
    prefill = replace(FULL, cell=Cell(1, 8192), query_len=8192)
    assert prefill.flops == 4 * 32 * 128 * (8192 * 8193 // 2)
    assert prefill.kv_bytes == 8192 * 8 * 128 * 2 * 2


@pytest.mark.parametrize("sink", [0, 5, 16, 20, 33])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 40])
@pytest.mark.parametrize(("context", "query_len"), [(1, 1), (16, 1), (90, 1), (96, 7), (80, 80)])
def test_a_streaming_head_reads_the_keys_that_its_mask_shows(
    context: int, query_len: int, window: int, sink: int
):
    case = replace(
        FULL,
        cell=Cell(1, context),
        query_len=query_len,
        num_full_heads=0,
        window=window,
        sink=sink,
    )
    keys = torch.arange(context)
    queries = torch.arange(context - query_len, context)[:, None]
    mask = (keys <= queries) & ((keys > queries - window) | (keys < sink))
    seen = mask.any(dim=0)
    assert case.read_tokens(0, context) == int(seen.sum())
    assert case.read_blocks(0, context) == len(set((keys[seen] // 16).tolist()))
    assert case.flops == 4 * 32 * 128 * int(mask.sum())


@pytest.mark.parametrize("num_full", range(9))
def test_full_heads_have_the_given_number_and_are_spread(num_full: int):
    full = [replace(FULL, num_full_heads=num_full).is_full(head) for head in range(8)]
    assert sum(full) == num_full
    assert abs(sum(full[:4]) - sum(full[4:])) <= 1


# --- the check -----------------------------------------------------------------------------------

CHECKED = replace(
    FULL, cell=Cell(3, 200), num_q_heads=8, num_kv_heads=4, head_dim=16, dtype=torch.float32,
    num_full_heads=4, window=40, sink=20,
)  # fmt: skip


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("num_full", [4, 1, 0])
@pytest.mark.parametrize("query_len", [1, 200])
def test_check_accepts_the_oracle_and_finds_one_wrong_head(
    num_full: int, query_len: int, kv_dtype: KVDtype
):
    case = replace(CHECKED, num_full_heads=num_full, query_len=query_len, kv_dtype=kv_dtype)
    case = replace(case, head_dim=32)
    data = make_data(case, 1, torch.device("cpu"), seed=1)
    (layer,) = data.layers
    assert math.isnan(relative_error(data, layer))  # nothing is written yet
    bench_module.our_launches(reference, data)[0]()
    assert relative_error(data, layer) < 1e-6
    layer.out[-1, 2] *= 1.5
    assert relative_error(data, layer) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("query_len", [1, 200])
def test_check_finds_a_missing_soft_cap_and_missing_sinks(query_len: int):
    case = replace(CHECKED, query_len=query_len, soft_cap=1.0, has_sinks=True)
    assert case.bytes_moved == replace(CHECKED, query_len=query_len).bytes_moved
    data = make_data(case, 1, torch.device("cpu"), seed=1)
    (layer,) = data.layers
    bench_module.our_launches(reference, data)[0]()
    assert relative_error(data, layer) < 1e-6
    for other in (replace(data, sinks=None), replace(data, case=replace(case, soft_cap=0.0))):
        bench_module.our_launches(reference, other)[0]()
        assert relative_error(data, layer) > 0.01


def test_check_finds_a_head_that_ignores_its_window():
    case = replace(CHECKED, num_full_heads=2, query_len=200)  # a prefill recycles no page
    data = make_data(case, 1, torch.device("cpu"), seed=1)
    blind = replace(
        data, layout=replace(data.layout, window=torch.full_like(data.layout.window, -1))
    )
    bench_module.our_launches(reference, blind)[0]()
    assert relative_error(data, data.layers[0]) > 0.1


def test_fp8_data_is_normal_vectors_each_with_its_own_scale(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_data, "QUANTIZED_ROWS", 100)  # several parts, the last short
    case = replace(CHECKED, kv_dtype="fp8_e4m3")
    (layer,) = make_data(case, 1, torch.device("cpu"), seed=1).layers
    for codes, scale in ((layer.k, layer.scales.k_scale), (layer.v, layer.scales.v_scale)):
        vectors, scale = codes.view(-1, 16).float(), scale.view(-1)
        assert (vectors.abs().amax(dim=1) == 448).all()
        assert (vectors * scale[:, None]).std() == pytest.approx(1.0, abs=0.02)
        assert len(scale.unique()) > 0.9 * len(scale)


def test_check_finds_a_scale_that_is_ignored():
    data = make_data(replace(CHECKED, kv_dtype="fp8_e4m3"), 1, torch.device("cpu"), seed=1)
    (layer,) = data.layers
    v_scale = layer.scales.v_scale.mean().expand_as(layer.scales.v_scale).contiguous()
    blind = replace(layer, scales=replace(layer.scales, v_scale=v_scale))
    bench_module.our_launches(reference, replace(data, layers=[blind]))[0]()
    assert relative_error(data, layer) > 0.1


def test_a_wrong_kernel_of_ours_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch):
    right = reference.paged_decode_attention

    def one_key_short(q, k, v, table, seq_lens, layout, **options):
        return right(q, k, v, table, seq_lens - 1, layout, **options)

    monkeypatch.setattr(reference, "paged_decode_attention", one_key_short)
    with pytest.raises(
        bench_module.WrongResultError,
        match=r"mrv1 at 1x40: expected a relative error <= 0\.01, got \[",
    ):
        run_attention(AttentionBench(**SMALL))


def test_a_wrong_or_failing_peer_is_named_and_not_timed(monkeypatch: pytest.MonkeyPatch):
    idle = Peer(module="torch", adapter=lambda data: lambda layer: lambda: None)
    monkeypatch.setitem(peers.PEERS, "torch-sdpa", idle)
    monkeypatch.setitem(
        peers.PEERS, "flashinfer", Peer(module="torch", adapter=lambda data: 1 / 0)
    )
    (entry,) = run_attention(AttentionBench(**SMALL | {"cells": (Cell(1, 40),)}))["results"]
    assert entry["variants"].keys() == {"mrv1"}
    assert entry["peer_time_over_ours"] == {}
    assert "WrongResultError: torch-sdpa at 1x40" in entry["failed_peers"]["torch-sdpa"]
    assert entry["failed_peers"]["flashinfer"] == "ZeroDivisionError: division by zero"


# --- whole runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_result_has_the_schema_and_survives_json(mode: str, kv_dtype: KVDtype):
    said: list[str] = []
    result = run_attention(AttentionBench(**SMALL, mode=mode, kv_dtype=kv_dtype), said.append)
    assert json.loads(json.dumps(result)) == result
    assert result.keys() == KEYS
    assert (result["op"], result["mode"], result["path"]) == ("attention", mode, "reference")
    assert result["copy_bandwidth_bytes_per_s"] is None
    assert result["peers"]["torch-sdpa"] != "not installed"
    assert len(said) == 2
    for cell, entry in zip(SMALL["cells"], result["results"], strict=True):
        assert entry.keys() == ENTRY_KEYS | ({"plan_us"} if mode == "decode" else set())
        assert (entry["batch"], entry["context"]) == (cell.batch, cell.context)
        assert entry["query_len"] == (1 if mode == "decode" else cell.context)
        beside = {"torch-sdpa"} if kv_dtype == "auto" else {"mrv1-auto", "mrv1-quarter"}
        assert entry["variants"].keys() == {"mrv1", *beside}
        for variant in entry["variants"].values():
            assert variant.keys() == VARIANT_KEYS
            assert len(variant["samples_us"]) == 2
            assert variant["p20_us"] <= variant["median_us"] <= variant["p80_us"]
            assert variant["share_of_copy_bandwidth"] is variant["flops_per_s"] is None
            assert variant["relative_error"] < variant["max_relative_error"] == 1e-2


def test_a_prefill_of_the_last_tokens_is_timed_with_and_without_splits(
    monkeypatch: pytest.MonkeyPatch,
):
    """The splits are those of a GPU; a peer that counts queries from the first key is refused."""
    monkeypatch.setattr(PrefillSplits, "allocate", partial(PrefillSplits.allocate, num_splits=2))
    seen = []
    plain = reference.paged_prefill_attention

    def prefill(*arguments, splits=None, **options):
        seen.append(splits and splits.num_splits)
        return plain(*arguments, splits=splits, **options)

    monkeypatch.setattr(reference, "paged_prefill_attention", prefill)
    bench = AttentionBench(**SMALL, mode="prefill", query_len=5, peers=("torch-sdpa",))
    for entry in run_attention(bench)["results"]:
        assert entry["query_len"] == 5
        assert entry["variants"].keys() == {"mrv1", "mrv1-one"}
        why = "ValueError: counts causal queries from the first key"
        assert entry["failed_peers"] == {"torch-sdpa": why}
    assert set(seen) == {2, None}
    one = AttentionBench(**SMALL | {"cells": (Cell(1, 1),)}, mode="prefill", peers=())
    (entry,) = run_attention(one)["results"]  # one token is a decode
    assert entry["variants"].keys() == {"mrv1"}


def test_decodes_ride_along_in_a_prefill():
    options = SMALL | {"cells": (Cell(2, 40, num_decodes=3, decode_context=17),)}
    result = run_attention(AttentionBench(**options, mode="prefill", query_len=5))
    (entry,) = result["results"]  # the check has compared rows of both kinds with the exact ones
    assert entry["variants"].keys() == {"mrv1"}
    why = "is measured with as many queries in every request"
    assert set(entry["failed_peers"].values()) == {why}
    assert entry["kv_bytes"] == (2 * 40 + 3 * 17) * 2 * 2 * 16 * 2
    pairs = 2 * sum(range(36, 41)) + 3 * 17
    assert entry["flops"] == 2 * 2 * 4 * pairs * 16


def test_a_uniform_table_names_the_pages_of_a_ring():
    """The peer reads our pages: one that looks back a window finds each token's page."""
    case = replace(FULL, cell=Cell(3, 200), num_full_heads=0, window=40, sink=0)
    data = make_data(case, 1, torch.device("cpu"), seed=0)
    table = data.block_of_page
    assert table.shape == (3, 13)
    ring = data.cache.groups.groups[0].ring_blocks
    assert 0 < ring < 13
    assert torch.equal(table[:, -1], data.block_table[:, 12 % ring])
    assert len(set(table[0, -3:].tolist())) == 3


def test_share_and_ratios_follow_from_bytes_and_times(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comparison, "copy_bandwidth", lambda _: 1e9)
    result = run_attention(AttentionBench(**SMALL, peers=("torch-sdpa",)))
    ratios = []
    for entry in result["results"]:
        times = {name: v["median_us"] for name, v in entry["variants"].items()}
        ratios.append(times["torch-sdpa"] / times["mrv1"])
        assert entry["peer_time_over_ours"] == {"torch-sdpa": pytest.approx(ratios[-1])}
        for variant in entry["variants"].values():
            floor_us = entry["bytes_moved"] / 1e3
            assert variant["share_of_copy_bandwidth"] == pytest.approx(
                floor_us / variant["median_us"]
            )
    mean = (ratios[0] * ratios[1]) ** 0.5
    assert result["geometric_mean_over_ours"] == {"torch-sdpa": pytest.approx(mean)}
    assert result["worst_over_ours"] == {"torch-sdpa": pytest.approx(min(ratios))}


def test_every_group_is_measured_on_every_cell():
    bench = AttentionBench(**SMALL, groups=(1, 3), peers=("torch-sdpa",))
    result = run_attention(bench)
    assert result["conditions"]["groups"] == [1, 3]
    entries = [(entry["batch"], entry["group"]) for entry in result["results"]]
    assert entries == [(1, 1), (1, 3), (3, 1), (3, 3)]
    flops = [entry["flops"] for entry in result["results"]]
    assert flops[1] == 3 * flops[0]
    assert [row["cell"] for row in own_rows(result, "mrv1")][1] == "1 x 40, group 3"
    table = kernel_table(ResultFile("groups.json", result))
    assert "groups of 1, 3 query heads, 2 KV heads of 16" in table
    assert "worst" in table


def test_groups_have_cells_of_48_to_256_segments():
    bench = AttentionBench(groups=tuple(range(1, 17)))
    cases = bench.cases()
    assert len(cases) == 6 * 16
    segments = sorted({case.cell.batch * case.num_kv_heads for case in cases})
    assert (segments[0], segments[-1]) == (48, 256)
    for groups in ((0,), (2, 2)):
        with pytest.raises(ConfigError, match="groups: expected different numbers >= 1, got"):
            AttentionBench(groups=groups)


def test_mixed_heads_are_compared_with_a_uniform_run():
    options = SMALL | {"cells": (Cell(2, 200),), "full_heads": 0.5, "window": 40, "sink": 20}
    result = run_attention(AttentionBench(**options))
    (entry,) = result["results"]
    uniform = 2 * 200 * 2 * 16 * 2 * 2
    assert entry["kv_bytes"] == uniform * (200 + 60) / 400
    assert entry["variants"].keys() == {"mrv1", "mrv1-uniform"}
    q_and_table = 2 * 2 * 4 * 16 * 2 + 2 * 13 * 4
    assert entry["variants"]["mrv1-uniform"]["bytes_moved"] == uniform + q_and_table
    assert set(entry["failed_peers"].values()) == {"has no head roles"}
    assert result["conditions"]["head_roles"] == {"full_heads": 0.5, "window": 40, "sink": 20}


def test_a_soft_cap_and_sinks_are_compared_with_our_plain_kernel():
    options = SMALL | {"cells": (Cell(2, 40),), "soft_cap": 5.0, "sinks": True}
    result = run_attention(AttentionBench(**options))
    (entry,) = result["results"]
    assert entry["variants"].keys() == {"mrv1", "mrv1-plain"}
    assert set(entry["failed_peers"].values()) == {"is measured without soft cap and logit sinks"}
    assert (result["conditions"]["soft_cap"], result["conditions"]["logit_sinks"]) == (5.0, True)


def test_mixed_heads_over_fp8_are_compared_with_our_other_caches():
    options = SMALL | {"cells": (Cell(2, 200),), "full_heads": 0.5, "window": 40, "sink": 20}
    result = run_attention(AttentionBench(**options, kv_dtype="fp8_e4m3"))
    assert result["kv_dtype"] == "fp8_e4m3"
    (entry,) = result["results"]
    moved = {name: v["bytes_moved"] for name, v in entry["variants"].items()}
    visible = 2 * (200 + 60) * 2  # 2 requests; a full and a streaming head; K and V
    rest = 2 * 2 * 4 * 16 * 2 + 2 * (13 + 5) * 4  # q and out; table columns: 13, and 2 + 3
    assert moved == {
        "mrv1": visible * (16 + 4) + rest,
        "mrv1-quarter": visible * (16 + 1) + rest,  # four tokens share four bytes
        "mrv1-auto": visible * 16 * 2 + rest,
        "mrv1-uniform": 2 * 400 * 2 * (16 + 4) + 2 * 2 * 4 * 16 * 2 + 2 * 13 * 4,
    }


def test_deterministic_reaches_the_plan_and_is_compared(monkeypatch: pytest.MonkeyPatch):
    asked = []
    plain = reference.paged_decode_attention

    def decode(*arguments, plan, **options):
        asked.append(plan.deterministic)
        return plain(*arguments, plan=plan, **options)

    monkeypatch.setattr(reference, "paged_decode_attention", decode)
    bench = AttentionBench(**SMALL | {"cells": (Cell(1, 40),)}, peers=(), deterministic=True)
    (entry,) = run_attention(bench)["results"]
    assert entry["variants"].keys() == {"mrv1", "mrv1-deterministic"}
    assert entry["peer_time_over_ours"].keys() == {"mrv1-deterministic"}
    assert {True, False} == set(asked)


@pytest.mark.interp
@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_the_kernels_themselves_pass_the_check(device: torch.device, kv_dtype: KVDtype):
    options = SMALL | {"cells": (Cell(2, 70),), "full_heads": 0.5, "window": 40, "sink": 20}
    options |= {"device": str(device), "kv_dtype": kv_dtype, "repeats": 1}
    for mode, query_len in (("decode", None), ("prefill", None), ("prefill", 30)):
        result = run_attention(AttentionBench(**options, mode=mode, query_len=query_len))
        assert result["path"] == ("triton" if device.type == "cuda" else "interpreter")
        (entry,) = result["results"]
        assert entry["variants"]["mrv1"]["relative_error"] < 1e-2


@pytest.mark.gpu
@pytest.mark.gpu_only
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_on_a_gpu_launches_rotate_in_a_graph_and_have_a_share_of_bandwidth(kv_dtype: KVDtype):
    cells = (Cell(1, 2048), Cell(4, 4096))
    options = {"cells": cells, "device": "cuda", "num_q_heads": 8, "num_kv_heads": 2}
    result = run_attention(AttentionBench(**options, kv_dtype=kv_dtype, repeats=5))
    for entry in result["results"]:
        assert entry["buffer_sets"] >= 2
        if kv_dtype == "auto":
            assert entry["failed_peers"].get("torch-sdpa") is None
        for name, variant in entry["variants"].items():
            if name not in ("mrv1-auto", "mrv1-quarter"):  # other caches, so other sets
                assert variant["launches_per_sample"] % entry["buffer_sets"] == 0
            assert 0 < variant["share_of_copy_bandwidth"] < 1.2


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_a_cell_that_does_not_fit_is_refused_before_it_is_built():
    with pytest.raises(CapacityError, match=r"cells: 4096x131072 needs .* GiB for its caches"):
        run_attention(AttentionBench(cells=(Cell(4096, 131072),), device="cuda", peers=()))


# --- the picture ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("bandwidth", [None, 1e9])
def test_plot_is_a_png(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bandwidth: float | None,
    kv_dtype: KVDtype,
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(comparison, "copy_bandwidth", lambda _: bandwidth)
    result = run_attention(AttentionBench(**SMALL, kv_dtype=kv_dtype))
    plot(attention_chart(ResultFile("x.json", result)), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_cells_of_a_plot_are_sorted_by_bytes_then_batch():
    def cell(batch: int, bytes_moved: int, **shares: float) -> dict[str, object]:
        variants = {name: {"share": share} for name, share in shares.items()}
        return {
            "batch": batch, "context": 64, "query_len": 1, "bytes_moved": bytes_moved,
            "variants": variants,
        }  # fmt: skip

    cells = [cell(8, 30, mrv1=0.9, peer=0.5), cell(4, 30, mrv1=0.8), cell(9, 10, mrv1=0.7)]
    cells[0] |= {"query_len": 2}
    labels, series = cells_by_bytes({"results": cells}, "share")
    assert labels == ["9 x 64", "4 x 64", "8 x 2 of 64"]
    assert series == {"mrv1": [0.7, 0.8, 0.9], "peer": [None, None, 0.5]}


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mrv1.calibration.plot.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"--plot: .*pip install -e '\.\[bench\]'"):
        plot(Chart("x", "", (), ()), Path("x.png"))


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "both"}, "mode: expected decode or prefill, got 'both'"),
        ({"dtype": "int8"}, "dtype: expected one of float32, float16, bfloat16, got 'int8'"),
        ({"kv_dtype": "fp8"}, "kv_dtype: expected one of auto, fp8_e4m3, int4, got 'fp8'"),
        (
            {"mode": "prefill", "deterministic": True},
            "deterministic: expected mode decode, got prefill",
        ),
        ({"cells": (Cell(1, 2),) * 2}, r"cells: expected different cells, got \['1x2', '1x2'\]"),
        ({"query_len": 2}, "query_len: expected mode prefill, got decode"),
        (
            {"mode": "prefill", "query_len": 18},
            "query_len: expected 2 to 17, the shortest context, got 18",
        ),
        (
            {"mode": "prefill", "cells": (Cell(2, 20, shortest=10),)},
            r"cells: expected one length in whole prompts, got \['2x10-20'\]",
        ),
        (
            {"mode": "prefill", "cells": (Cell(2, 20, num_decodes=1, decode_context=9),)},
            r"cells: expected query_len and full heads beside decodes, got \['2x20\+1x9'\]",
        ),
        ({"repeats": 0}, "repeats: expected >= 1, got 0"),
        ({"window": 0}, "window: expected >= 1, got 0"),
        ({"soft_cap": -1.0}, r"soft_cap: expected >= 0 and finite, got -1\.0"),
        ({"num_q_heads": 3}, "num_q_heads: expected a multiple of 2, got 3"),
        ({"full_heads": 0.3}, "full_heads: expected 0 to 1, a whole number of 2 heads, got 0.3"),
        ({"full_heads": 1.5}, "full_heads: expected 0 to 1, a whole number of 2 heads, got 1.5"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        AttentionBench(**SMALL | options)


def test_unknown_peers_are_refused():
    with pytest.raises(ConfigError, match=r"peers: expected some of flash-attn-3, .*\['triton'\]"):
        run_attention(AttentionBench(**SMALL, peers=("triton",)))


@pytest.mark.parametrize("text", ["8", "x", "8x", "ax4", "-1x4", "8*4"])
def test_a_cell_is_batch_x_context(text: str):
    with pytest.raises(
        ConfigError, match=r"cells: expected BATCHxCONTEXT such as 8x4096, .*\+60x2048, got"
    ):
        Cell.parse(text)


def test_an_empty_cell_is_refused_and_a_valid_cell_is_parsed():
    with pytest.raises(ConfigError, match="cells: expected batch and context >= 1, got '0x4'"):
        Cell.parse("0x4")
    with pytest.raises(
        ConfigError, match=r"cells: expected decodes of 1 to 9 .*, got '1x9\+2x10'"
    ):
        Cell.parse("1x9+2x10")
    assert Cell.parse(" 8x4096 ") == Cell(8, 4096)
    mixed = Cell.parse("4x100-400+2x50")
    assert mixed == Cell(4, 400, 100, num_decodes=2, decode_context=50)
    assert mixed.lengths == [50, 50, 100, 200, 300, 400]
    assert Cell.parse(str(mixed)) == mixed


def test_a_cell_of_several_lengths_spaces_them_evenly():
    with pytest.raises(ConfigError, match="cells: expected a shorter context first, got '8x5-5'"):
        Cell.parse("8x5-5")
    cell = Cell.parse("4x10-40")
    assert str(cell) == "4x10-40"
    assert cell.lengths == [10, 20, 30, 40]
    assert Cell(1, 40, shortest=10).lengths == [40]


def test_several_lengths_count_and_check_the_tokens_of_each_request():
    """Requests of 50, 125 and 200 tokens; a full head and one that sees 20 + 40."""
    case = replace(CHECKED, cell=Cell(3, 200, shortest=50), num_q_heads=2, num_kv_heads=2)
    assert replace(case, num_full_heads=2).kv_bytes == 2 * 375 * 2 * 16 * 4
    mixed = replace(case, num_full_heads=1)
    assert mixed.kv_bytes == (375 + 50 + 60 + 60) * 2 * 16 * 4
    assert mixed.flops == 4 * (375 + 50 + 60 + 60) * 16
    data = make_data(mixed, 1, torch.device("cpu"), seed=1)
    assert sorted(data.seq_lens.tolist()) == [50, 125, 200]
    bench_module.our_launches(reference, data)[0]()
    assert relative_error(data, data.layers[0]) < 1e-6
