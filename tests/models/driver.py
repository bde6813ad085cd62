"""A paged cache and a loop around ``DecoderModel``, without runner, scheduler or sampler.

Written plainly (lists, one request after another), so that model tests do not depend on the
runner. Memory that a request must not see is poisoned: caches start as NaN, blocks are allocated
in shuffled order, and every step has padding.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mrv1.kernels.cache.formats import ScaleGranularity
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.models import AttentionBatch, DecoderModel, LayerCache

MAX_DECODE_QUERY_LEN = 8


@dataclass
class Request:
    """One sequence: all its tokens, and the number of tokens in the cache."""

    token_ids: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    adapter_slot: int = -1


class PagedDriver:
    """Runs requests through a model, chunk by chunk.

    Args:
        model: the model under test.
        block_size: tokens per block.
        num_blocks: blocks in every layer's cache.
        seed: seed of the order in which blocks are allocated.
        num_padding_rows: padding rows in every batch.
        granularity: granularity of an fp8 cache's scales; None = a cache of the model's dtype.
        head_scales: ``[layers, 2, kv_heads]``, static scales for ``head``.
    """

    def __init__(
        self,
        model: DecoderModel,
        *,
        block_size: int,
        num_blocks: int,
        seed: int = 0,
        num_padding_rows: int = 1,
        granularity: ScaleGranularity | None = None,
        head_scales: torch.Tensor | None = None,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.num_padding_rows = num_padding_rows
        self.free_blocks = list(range(num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        config = model.config
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        dtype = model.dtype if granularity is None else torch.float8_e4m3fn

        def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full(shape, torch.nan, device=model.device).to(dtype)

        def scales(layer: int) -> KVScales | None:
            if granularity == "token":
                k, v = (poisoned(*shape[:-1], dtype=torch.float32) for _ in "kv")
                return KVScales.per_token(k, v)
            if granularity == "quarter":
                k, v = (poisoned(*shape[:-2], 4, dtype=torch.float32) for _ in "kv")
                return KVScales.per_quarter(k, v)
            return None if head_scales is None else KVScales.per_head(*head_scales[layer])

        self.caches = [
            LayerCache(
                k=poisoned(*shape, dtype=dtype),
                v=poisoned(*shape, dtype=dtype),
                scales=scales(layer),
                layout=KVLayout.hnd(
                    config.num_kv_heads,
                    block_size,
                    config.head_dim,
                    window=window,
                    device=model.device,
                ),
            )
            for layer, window in enumerate(config.layer_windows)
        ]

    def logits(
        self,
        prompts: Sequence[list[int]],
        chunk: int | None,
        adapter_slots: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Return each prompt's logits ``[len, vocab]``, computed ``chunk`` tokens a step.

        ``None`` computes every prompt in one step. Prompts end at different steps, so batches
        shrink and become ragged. ``adapter_slots`` has one for each prompt; None = no adapters.
        """
        slots = adapter_slots or [-1] * len(prompts)
        requests = [
            Request(list(prompt), adapter_slot=slot)
            for prompt, slot in zip(prompts, slots, strict=True)
        ]
        rows: list[list[torch.Tensor]] = [[] for _ in requests]
        while pending := [r for r in requests if r.num_computed < len(r.token_ids)]:
            lens = [len(r.token_ids) - r.num_computed for r in pending]
            query_lens = [n if chunk is None else min(n, chunk) for n in lens]
            for request, part in zip(pending, self.step(pending, query_lens), strict=True):
                rows[requests.index(request)].append(part)
        return [torch.cat(parts) for parts in rows]

    def step(self, requests: list[Request], query_lens: list[int]) -> list[torch.Tensor]:
        """Run the next ``query_lens`` tokens of each request; return their logits per request."""
        batch = self.batch(requests, query_lens)
        hidden, slots = self.model.forward(batch, self.caches), batch.adapter_slots
        rows = slice(sum(query_lens))
        logits = self.model.compute_logits(hidden[rows], None if slots is None else slots[rows])
        for request, query_len in zip(requests, query_lens, strict=True):
            request.num_computed += query_len
        return list(logits.split(query_lens))

    def batch(self, requests: list[Request], query_lens: list[int]) -> AttentionBatch:
        """Assemble one step, padding rows last."""
        input_ids, positions, slots, seq_lens, starts, adapters = [], [], [], [], [0], []
        for request, query_len in zip(requests, query_lens, strict=True):
            seq_len = request.num_computed + query_len
            while len(request.blocks) * self.block_size < seq_len:
                request.blocks.append(self.free_blocks.pop())
            for position in range(request.num_computed, seq_len):
                block, offset = divmod(position, self.block_size)
                input_ids.append(request.token_ids[position])
                positions.append(position)
                slots.append(request.blocks[block] * self.block_size + offset)
            seq_lens.append(seq_len)
            adapters += [request.adapter_slot] * query_len
            starts.append(len(input_ids))
        uniform = len(set(query_lens)) == 1 and query_lens[0] <= MAX_DECODE_QUERY_LEN
        # In a decode batch each padding row has query_len tokens, as the other rows have. In other
        # batches padding rows are empty, and one padding token for each follows the last row.
        num_padding = self.num_padding_rows * (query_lens[0] if uniform else 1)
        starts += [starts[-1]] * self.num_padding_rows
        tables = [r.blocks for r in requests] + [[]] * self.num_padding_rows
        width = max(len(blocks) for blocks in tables) + 1

        def tensor(values: list, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.model.device)

        uses_adapters = any(slot >= 0 for slot in adapters)
        adapters += [-1] * num_padding
        return AttentionBatch(
            adapter_slots=tensor(adapters, torch.int32) if uses_adapters else None,
            input_ids=tensor(input_ids + [0] * num_padding, torch.int64),
            positions=tensor(positions + [0] * num_padding, torch.int64),
            slot_mapping=tensor([slots + [-1] * num_padding], torch.int64),
            block_table=tensor([t + [-1] * (width - len(t)) for t in tables], torch.int32),
            seq_lens=tensor(seq_lens + [0] * self.num_padding_rows, torch.int32),
            query_start_loc=tensor(starts, torch.int32),
            max_query_len=max(query_lens),
            query_len=query_lens[0] if uniform else None,
            num_tokens=len(input_ids) + num_padding,
            num_reqs=len(tables),
        )


def blocks_needed(prompts: Sequence[list[int]], block_size: int) -> int:
    """Return the number of blocks that ``prompts`` need."""
    return sum(-(-len(prompt) // block_size) for prompt in prompts)
