"""The adapters against stand-ins that have their peers' conventions and our oracle's results."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from mrv1.bench import AttentionBench, Cell, peers, run_attention
from mrv1.bench.peers import peer_versions
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


def _flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, *, seqused_k, softmax_scale, causal,
    block_table, out, fa_version,
):  # fmt: skip
    """vLLM's: [blocks, tokens, heads, dim], contiguous pages."""
    assert causal
    assert fa_version == 3
    assert max_seqlen_k == int(seqused_k.max())
    layout = KVLayout.nhd(k.shape[2], k.shape[1], k.shape[3])
    return reference.paged_prefill_attention(
        q, k, v, block_table, cu_seqlens_q, seqused_k, layout,
        softmax_scale=softmax_scale, max_query_len=max_seqlen_q, out=out,
    )  # fmt: skip


class _Wrapper:
    """FlashInfer's: a plan of CSR page lists, then runs on HND pages."""

    def __init__(self, workspace, kv_layout, **options):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"

    def _plan(self, query_start_loc, indptr, indices, last_page_len, sizes, sm_scale):
        self.sizes, self.scale, self.query_start_loc = sizes, sm_scale, query_start_loc
        self.table = indices.view(last_page_len.shape[0], -1)
        pages = indptr.diff()
        assert int(indptr[-1]) == indices.numel()
        self.seq_lens = ((pages - 1) * sizes[3] + last_page_len).to(torch.int32)

    def run(self, q, cache, *, out):
        _, num_kv_heads, head_dim, page_size = self.sizes
        assert cache[0].shape[1:] == (num_kv_heads, page_size, head_dim)
        return reference.paged_prefill_attention(
            q, *cache, self.table, self.query_start_loc, self.seq_lens,
            KVLayout.hnd(num_kv_heads, page_size, head_dim),
            softmax_scale=self.scale, max_query_len=q.shape[0], out=out,
        )  # fmt: skip


class _Decode(_Wrapper):
    def plan(self, indptr, indices, last, *sizes, q_data_type, kv_data_type, sm_scale):
        queries = torch.arange(last.shape[0] + 1, dtype=torch.int32)
        self._plan(queries, indptr, indices, last, sizes, sm_scale)


class _Prefill(_Wrapper):
    def plan(
        self, qo_indptr, indptr, indices, last, *sizes, causal, q_data_type, kv_data_type, sm_scale
    ):
        assert causal
        self._plan(qo_indptr, indptr, indices, last, sizes, sm_scale)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch):
    flash, flashinfer = ModuleType("vllm.vllm_flash_attn"), ModuleType("flashinfer")
    flash.flash_attn_varlen_func = _flash_attn_varlen_func
    flashinfer.BatchDecodeWithPagedKVCacheWrapper = _Decode
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = _Prefill
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", flash)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(peers, "find_spec", lambda _: object())
    monkeypatch.setattr(peers, "FLASHINFER_WORKSPACE_BYTES", 64)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_every_peer_gives_our_result_on_our_data(mode: str):
    result = run_attention(AttentionBench(**SMALL, mode=mode))
    for entry in result["results"]:
        assert entry["failed_peers"] == {}
        assert set(entry["variants"]) == {"mrv1", "flash-attn-3", "flashinfer", "torch-sdpa"}
    assert set(result["geometric_mean_over_ours"]) == set(peers.PEERS)


def test_absent_and_unversioned_peers(monkeypatch: pytest.MonkeyPatch):
    present = {"flashinfer": object()}
    monkeypatch.setattr(peers, "find_spec", present.get)
    monkeypatch.setattr(peers, "version_of", lambda _: None)
    assert peer_versions(("flash-attn-3", "flashinfer")) == {
        "flash-attn-3": "not installed",
        "flashinfer": "unknown",
    }
    with pytest.raises(ConfigError, match="peers: expected some of"):
        peer_versions(("fa3",))
