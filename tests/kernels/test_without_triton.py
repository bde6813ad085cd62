"""Contracts and oracles of cache and attention where triton cannot be imported."""

from __future__ import annotations

from tests.forks import Forks

SCRIPT = """
import sys

sys.modules["triton"] = None  # an import of it raises

import torch

import mrv1.kernels.attention.contracts
import mrv1.kernels.cache.contracts
from mrv1.kernels._base.oracle import calls
from mrv1.kernels.attention import reference as attention
from mrv1.kernels.attention.decode.plan import DecodePlan
from mrv1.kernels.attention.prefill.choice import PrefillSplits
from mrv1.kernels.cache import reference as cache
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales

layout = KVLayout.hnd(1, 16, 16)
k_cache, v_cache = torch.zeros(2, 2, 1, 16, 16)
key, value = torch.randn(3, 1, 16), torch.arange(3.0)[:, None, None].expand(3, 1, 16).contiguous()
cache.kv_cache_write(key, value, k_cache, v_cache, torch.tensor([[16, 17, 18]]), layout)
table = torch.tensor([[1]], dtype=torch.int32)
lens = torch.tensor([3], dtype=torch.int32)
plan = DecodePlan.allocate(
    max_reqs=1, max_keys=16, layout=layout, num_q_heads=2, dtype=torch.float32
)
attention.plan_decode_attention(lens, layout, plan)
out = attention.paged_decode_attention(
    torch.zeros(1, 2, 16), k_cache, v_cache, table, lens, layout, softmax_scale=1.0, plan=plan
)
print(plan.num_items.tolist(), out.unique().tolist(), sorted(calls))
"""


def test_oracles_need_no_triton(forks: Forks):
    """Queries of zeros weigh the values 0, 1 and 2 equally: the output is 1."""
    run = forks.run(SCRIPT)
    assert run.returncode == 0, run.stderr
    expected = "[1] [1.0] ['kv_cache_write', 'paged_decode_attention', 'plan_decode_attention']"
    assert run.stdout.strip() == expected
