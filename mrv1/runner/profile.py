"""A full-sized step on nothing, to see what memory a step needs and to compile its kernels.

After the layers a step holds at most

    2 * R * V * b + R * V / 8 + FILTER_CHUNK * V * FILTER_BYTES + 64 * R * (1 + 2 * K)    bytes

and what the kernels allocate, with R = max(max_num_seqs, LOGITS_CHUNK) rows of logits of b bytes,
V tokens of the vocabulary and K = max_logprobs: logits and a copy of them before they are edited,
masks of grammars, logits being filtered (``processed_logprobs`` only), and results with the parts
they are joined from. Rows of drafts (up to 8 a request) and of prompts whose log-probabilities are
wanted (up to max_num_batched_tokens) take turns; results leave the device with their rows. The
profile step runs all of it, custom processors too, on rows of padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mrv1.models import DecoderModel
from mrv1.models.batch import AttentionBatch
from mrv1.runner.block_table import NO_PAGE
from mrv1.runner.kv_cache import KVCache


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
    kv_cache: KVCache,
    sample: Callable[[torch.Tensor], None],
    *,
    row_width: int,
    num_tokens: int,
    max_query_len: int,
    num_decodes: int,
) -> None:
    """Run one prefill of ``num_tokens`` and one decode of ``num_decodes`` rows, and wait for them.

    No page is read or written, so the cache may have a single block of each head group.

    Args:
        model: whose layers run.
        kv_cache: of ``model``.
        sample: launches all that may follow a step's layers, given its hidden states.
        row_width: columns of a block table's row.
        num_tokens: of the prefill.
        max_query_len: tokens of a row, at most.
        num_decodes: rows of the decode.
    """
    device, num_groups = kv_cache.layers[0].k.device, len(kv_cache.num_blocks)
    full, rest = divmod(num_tokens, max_query_len)
    query_lens = [max_query_len] * full + ([rest] if rest else [])
    for lens in (query_lens, [1] * num_decodes):
        batch = _empty_batch(lens, num_groups, row_width, device)
        sample(model.forward(batch, kv_cache.layers))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
