"""A full-sized step on nothing, to see what memory a step needs and to compile its kernels."""

from __future__ import annotations

import torch

from mrv1.models import DecoderModel
from mrv1.models.batch import AttentionBatch
from mrv1.runner.block_table import NO_PAGE
from mrv1.runner.kv_cache import KVCache
from mrv1.runner.request_state import RequestState
from mrv1.sampler import Sampler


def _empty_batch(
    query_lens: list[int], num_groups: int, row_width: int, device: torch.device
) -> AttentionBatch:
    """Return a batch whose tokens are written nowhere and see nothing."""
    num_tokens, num_reqs = sum(query_lens), len(query_lens)
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    uniform = query_lens[0] == 1
    return AttentionBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        slot_mapping=torch.full((num_groups, num_tokens), -1, dtype=torch.int64, device=device),
        block_table=torch.full((num_reqs, row_width), NO_PAGE, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(query_lens, dtype=torch.int32, device=device),
        query_start_loc=starts.to(device),
        max_query_len=max(query_lens),
        query_len=1 if uniform else None,
        num_tokens=num_tokens,
        num_reqs=num_reqs,
    )


@torch.inference_mode()
def run_profile_step(
    model: DecoderModel,
    sampler: Sampler,
    state: RequestState,
    kv_cache: KVCache,
    *,
    row_width: int,
    num_tokens: int,
    max_query_len: int,
    num_sampled: int,
) -> None:
    """Run one prefill of ``num_tokens`` and one decode of ``num_sampled`` rows, and wait for them.

    No page is read or written, so the cache may have a single block of each head group.
    """
    device, history = state.token_ids.device, state.history()
    num_groups = len(kv_cache.num_blocks)
    full, rest = divmod(num_tokens, max_query_len)
    query_lens = [max_query_len] * full + ([rest] if rest else [])
    rows = torch.zeros(num_sampled, dtype=torch.int64, device=device)
    idx_mapping = torch.zeros(num_sampled, dtype=torch.int32, device=device)
    for lens in (query_lens, [1] * num_sampled):
        hidden = model.forward(_empty_batch(lens, num_groups, row_width, device), kv_cache.layers)
        logits = model.compute_logits(hidden.index_select(0, rows))
        sampler.edit(logits, idx_mapping, history)
        sampler.draw(logits, idx_mapping, history)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
