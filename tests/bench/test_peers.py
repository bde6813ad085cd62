"""The adapters against stand-ins that have their peers' conventions and our oracle's results."""

from __future__ import annotations

import sys
from enum import IntEnum
from types import ModuleType

import pytest
import torch

from benchmarks import peers
from benchmarks.kernels.attention import run_attention
from benchmarks.kernels.attention_case import Cell
from benchmarks.kernels.attention_options import AttentionBench
from benchmarks.measure.options import KVDtype
from benchmarks.peers import attention, peer_versions
from benchmarks.peers.attention import PEERS
from mrv1.errors import ConfigError
from mrv1.kernels import KVLayout, reference

SMALL = {
    "cells": (Cell(2, 40), Cell(3, 48)),
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "repeats": 1,
    "device": "cpu",
}


def _attend(q, k, v, table, query_start_loc, seq_lens, layout, softmax_scale, out):
    """Compute attention in float32, for q, k and v of any dtype."""
    result = reference.paged_prefill_attention(
        q.float(), k.float().contiguous(), v.float().contiguous(), table, query_start_loc,
        seq_lens, layout, softmax_scale=softmax_scale, max_query_len=q.shape[0],
    )  # fmt: skip
    return out.copy_(result)


def _get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
    qkv_dtype, cu_seqlens_q, page_size, causal, window_size,
):  # fmt: skip
    assert causal
    return {"q": num_heads_q, "kv": num_heads_kv, "dim": headdim, "page": page_size} | {
        "dtype": qkv_dtype, "reqs": batch_size, "queries": max_seqlen_q, "keys": max_seqlen_k,
        "window": window_size,
    }  # fmt: skip


def _flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, *, seqused_k, softmax_scale, causal,
    window_size, block_table, out, fa_version, scheduler_metadata, q_descale=None,
    k_descale=None, v_descale=None,
):  # fmt: skip
    """vLLM's: [blocks, tokens, heads, dim], contiguous pages; all fp8 or nothing."""
    assert causal
    assert scheduler_metadata == {
        "q": q.shape[1], "kv": k.shape[2], "dim": q.shape[2], "page": k.shape[1],
        "dtype": k.dtype, "reqs": seqused_k.shape[0], "queries": max_seqlen_q,
        "keys": max_seqlen_k, "window": window_size,
    }  # fmt: skip
    assert fa_version == 3
    assert max_seqlen_k == int(seqused_k.max())
    assert q.dtype == k.dtype == v.dtype
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert (q.dtype == torch.float8_e4m3fn) == (q_descale is not None)
    if q_descale is not None:
        for descale in (q_descale, k_descale, v_descale):
            assert descale.shape == (seqused_k.shape[0], k.shape[2])
            assert descale.dtype == torch.float32
        q, k, v = q.float() * q_descale[0, 0], k.float() * k_descale[0, 0], v.float()
        v = v * v_descale[0, 0]
    before, after = window_size  # keys before and after a query's own
    assert (before < 0) == (after < 0)
    window = -1 if before < 0 else before + 1
    layout = KVLayout.nhd(k.shape[2], k.shape[1], k.shape[3], window=window)
    return _attend(q, k, v, block_table, cu_seqlens_q, seqused_k, layout, softmax_scale, out)


class _QuantMode(IntEnum):
    NONE = 0
    FP8_PER_TOKEN_HEAD = 3


def _unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal,
    window_size, block_table, softcap, q_descale, k_descale, v_descale, seq_threshold_3D,
    num_par_softmax_segments, softmax_segm_output, softmax_segm_max, softmax_segm_expsum,
    kv_quant_mode, k_scale_cache=None, v_scale_cache=None,
):  # fmt: skip
    """vLLM's: [blocks, tokens, heads, dim], any strides; scales [blocks, tokens, heads]."""
    assert causal
    assert window_size == (-1, -1)
    assert softcap == 0
    assert q_descale is k_descale is v_descale is None
    assert k.stride() == v.stride()
    assert k.stride(-1) == 1
    segments = (seq_threshold_3D, q.shape[1], num_par_softmax_segments)
    assert softmax_segm_output.shape == (*segments, q.shape[2])
    assert softmax_segm_max.shape == softmax_segm_expsum.shape == segments
    if kv_quant_mode == _QuantMode.FP8_PER_TOKEN_HEAD:
        assert k.dtype == v.dtype == torch.float8_e4m3fn
        assert k_scale_cache.shape == v_scale_cache.shape == k.shape[:3]
        k, v = k.float() * k_scale_cache[..., None], v.float() * v_scale_cache[..., None]
    layout = KVLayout.nhd(k.shape[2], k.shape[1], k.shape[3])
    return _attend(q, k, v, block_table, cu_seqlens_q, seqused_k, layout, softmax_scale, out)


class _Wrapper:
    """FlashInfer's: a plan of CSR page lists, then runs on HND pages."""

    def __init__(self, workspace, kv_layout, **options):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"

    def _plan(self, query_start_loc, indptr, indices, last_page_len, sizes, types, sm_scale):
        self.sizes, self.scale, self.query_start_loc = sizes, sm_scale, query_start_loc
        self.types = types
        self.table = indices.view(last_page_len.shape[0], -1)
        pages = indptr.diff()
        assert int(indptr[-1]) == indices.numel()
        self.seq_lens = ((pages - 1) * sizes[3] + last_page_len).to(torch.int32)

    def run(self, q, cache, *, out, k_scale=1.0):
        _, num_kv_heads, head_dim, page_size = self.sizes
        assert cache[0].shape[1:] == (num_kv_heads, page_size, head_dim)
        assert self.types == (q.dtype, cache[0].dtype)
        assert isinstance(k_scale, float)
        return _attend(
            q, *cache, self.table, self.query_start_loc, self.seq_lens,
            KVLayout.hnd(num_kv_heads, page_size, head_dim), self.scale * k_scale, out,
        )  # fmt: skip


class _Decode(_Wrapper):
    def plan(self, indptr, indices, last, *sizes, q_data_type, kv_data_type, sm_scale):
        queries = torch.arange(last.shape[0] + 1, dtype=torch.int32)
        types = (q_data_type, kv_data_type)
        self._plan(queries, indptr, indices, last, sizes, types, sm_scale)


class _Prefill(_Wrapper):
    def plan(
        self, qo_indptr, indptr, indices, last, *sizes, causal, q_data_type, kv_data_type, sm_scale
    ):
        assert causal
        types = (q_data_type, kv_data_type)
        self._plan(qo_indptr, indptr, indices, last, sizes, types, sm_scale)


def _fmha_v2(
    qkv, input_layout, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale,
    batch_size, cum_seq_lens_q, cum_seq_lens_kv, block_tables, out, mask_mode, window_left=-1,
):  # fmt: skip
    """FlashInfer's: [blocks, K and V, tokens, heads, dim], all fp8 or nothing, float scales."""
    q, pages = qkv
    assert input_layout == "Q_PAGED_KV_NHD"
    assert mask_mode == ("causal" if window_left < 0 else "sliding_window")
    assert workspace_buffer.dtype == torch.uint8
    assert pages.is_contiguous()
    assert block_tables.is_contiguous()
    assert pages.shape[1] == 2
    assert q.dtype == pages.dtype
    assert max_kv_len == int(seq_lens.max())
    assert max_q_len == int(cum_seq_lens_q.diff().max())
    assert batch_size == len(seq_lens) == len(block_tables)
    assert torch.equal(cum_seq_lens_kv.diff(), seq_lens)
    assert isinstance(bmm1_scale, float)
    k, v = pages.float().unbind(1)
    window = -1 if window_left < 0 else window_left + 1
    layout = KVLayout.nhd(k.shape[2], k.shape[1], k.shape[3], window=window)
    v = v * bmm2_scale
    return _attend(q, k, v, block_tables, cum_seq_lens_q, seq_lens, layout, bmm1_scale, out)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch):
    names = {
        "vllm.vllm_flash_attn": {
            "flash_attn_varlen_func": _flash_attn_varlen_func,
            "get_scheduler_metadata": _get_scheduler_metadata,
        },
        "vllm.v1.attention.ops.triton_unified_attention": {
            "unified_attention": _unified_attention
        },
        "vllm.v1.kv_cache_interface": {"KVQuantMode": _QuantMode},
        "flashinfer": {
            "BatchDecodeWithPagedKVCacheWrapper": _Decode,
            "BatchPrefillWithPagedKVCacheWrapper": _Prefill,
        },
        "flashinfer.prefill": {"trtllm_fmha_v2_prefill": _fmha_v2},
    }
    for name, members in names.items():
        package, _, _ = name.rpartition(".")
        while package:
            if package not in names:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
            package, _, _ = package.rpartition(".")
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers, "find_spec", lambda _: object())
    monkeypatch.setattr(attention, "FLASHINFER_WORKSPACE_BYTES", 64)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_every_peer_gives_our_result_on_our_data(mode: str):
    result = run_attention(AttentionBench(**SMALL, mode=mode))
    ran = {"flash-attn-3", "flashinfer", "vllm-triton", "torch-sdpa"}
    failed = {"vllm-triton-side": "has no auto cache"}
    if mode == "prefill":
        ran |= {"fmha-v2"}
    else:
        failed |= {"fmha-v2": "ValueError: computes prefills only"}
    for entry in result["results"]:
        assert entry["failed_peers"] == failed
        assert entry["variants"].keys() == {"mrv1", *ran}
        for variant in entry["variants"].values():
            assert variant["relative_error"] < variant["max_relative_error"] == 1e-2
    assert result["geometric_mean_over_ours"].keys() == ran


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("peer", ["flash-attn-3", "fmha-v2"])
def test_a_peer_with_windows_sees_ours(peer: str):
    window = {"full_heads": 0, "window": 20, "sink": 0}
    result = run_attention(AttentionBench(**SMALL, **window, mode="prefill", peers=(peer,)))
    for entry in result["results"]:
        assert entry["failed_peers"] == {}
        assert entry["variants"][peer]["relative_error"] < 1e-2


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_every_fp8_peer_is_as_close_as_its_scales_allow(mode: str):
    """A peer with one static scale rounds our values again; per (token, head) it uses ours."""
    result = run_attention(AttentionBench(**SMALL, mode=mode, kv_dtype="fp8_e4m3"))
    for entry in result["results"]:
        failed = {"torch-sdpa": "has no fp8_e4m3 cache"}
        if mode == "decode":
            failed |= {"fmha-v2": "ValueError: computes prefills only"}
        assert entry["failed_peers"] == failed
        errors = {name: v["relative_error"] for name, v in entry["variants"].items()}
        limits = {name: v["max_relative_error"] for name, v in entry["variants"].items()}
        assert limits["flash-attn-3"] == 0.25
        assert limits["flashinfer"] == 0.2
        for name in ("mrv1", "mrv1-auto", "mrv1-quarter", "vllm-triton", "vllm-triton-side"):
            assert errors[name] < limits[name] == 1e-2
        moved = {name: v["bytes_moved"] for name, v in entry["variants"].items()}
        scale_bytes = entry["batch"] * entry["context"] * 2 * 2 * 4
        for name in ("flash-attn-3", "flashinfer", *(["fmha-v2"] if mode == "prefill" else [])):
            assert 0.01 < errors[name] < limits[name]
            assert moved[name] == moved["mrv1"] - scale_bytes
        assert moved["vllm-triton"] == moved["vllm-triton-side"] == moved["mrv1"]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("module", "function", "name", "dropped"),
    [
        ("vllm.vllm_flash_attn", "flash_attn_varlen_func", "flash-attn-3", "q_descale"),
        ("vllm.vllm_flash_attn", "flash_attn_varlen_func", "flash-attn-3", "k_descale"),
        ("vllm.vllm_flash_attn", "flash_attn_varlen_func", "flash-attn-3", "v_descale"),
        (
            "vllm.v1.attention.ops.triton_unified_attention", "unified_attention",
            "vllm-triton", "v_scale_cache",
        ),
    ],
)  # fmt: skip
def test_an_fp8_peer_that_ignores_a_scale_is_caught(
    monkeypatch: pytest.MonkeyPatch, module: str, function: str, name: str, dropped: str
):
    right = getattr(sys.modules[module], function)

    def wrong(**arguments):
        return right(**arguments | {dropped: torch.ones_like(arguments[dropped])})

    monkeypatch.setattr(sys.modules[module], function, wrong)
    result = run_attention(AttentionBench(**SMALL, kv_dtype="fp8_e4m3"))
    for entry in result["results"]:
        assert name not in entry["variants"]
        assert f"WrongResultError: {name} at" in entry["failed_peers"][name]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_a_peer_that_skips_a_page_is_caught(monkeypatch: pytest.MonkeyPatch, kv_dtype: KVDtype):
    """One page of a context of 128 tokens is a third of the result: beyond the laxest limit."""
    flash = sys.modules["vllm.vllm_flash_attn"]
    right = flash.flash_attn_varlen_func

    def short(**arguments):
        table = arguments["block_table"].clone()
        table[:, 0] = -1
        return right(**arguments | {"block_table": table})

    monkeypatch.setattr(flash, "flash_attn_varlen_func", short)
    options = SMALL | {"cells": (Cell(2, 128),), "kv_dtype": kv_dtype}
    (entry,) = run_attention(AttentionBench(**options))["results"]
    assert "WrongResultError: flash-attn-3 at 2x128" in entry["failed_peers"]["flash-attn-3"]


def test_absent_and_unversioned_peers_are_named(monkeypatch: pytest.MonkeyPatch):
    present = {"flashinfer": object()}
    monkeypatch.setattr(peers, "find_spec", present.get)
    monkeypatch.setattr(peers, "version_of", lambda _: None)
    assert peer_versions(("flash-attn-3", "flashinfer"), PEERS) == {
        "flash-attn-3": "not installed",
        "flashinfer": "unknown",
    }
    with pytest.raises(ConfigError, match="peers: expected some of"):
        peer_versions(("fa3",), PEERS)
