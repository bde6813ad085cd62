"""The paged KV cache: pages and scales, a view of them per layer, and the count of their bytes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch

from mrv1.config import EngineConfig
from mrv1.errors import CapacityError
from mrv1.headwise import HeadGroup, HeadGroups
from mrv1.kernels.cache.formats import PageFormat
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.models import DecoderModel
from mrv1.models.batch import LayerCache

CPU_KV_BYTES = 1 << 30
"""Bytes for the KV cache on a CPU, unless the configuration sets its blocks or its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Shapes, dtypes and bytes of a cache; a *page* stores a block of one KV head of one layer."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    page_format: PageFormat
    draft_layers: int = 0
    """Layers at the end that are a draft head's."""

    @classmethod
    def of(cls, config: EngineConfig, model: DecoderModel, *, draft_layers: int = 0) -> Self:
        """Return the shapes and dtypes of a model's cache, as configured."""
        return cls(
            num_layers=model.config.num_layers + draft_layers,
            draft_layers=draft_layers,
            num_kv_heads=model.config.num_kv_heads,
            block_size=config.block_size,
            head_dim=model.config.head_dim,
            page_format=PageFormat.named(config.kv_cache_dtype, config.kv_scale, model.dtype),
        )

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Shape of a page in its tensor, where an element may hold several codes."""
        return self.block_size, self.page_format.stored_dim(self.head_dim)

    @property
    def page_scales(self) -> int:
        """Scales stored for a page; static scales are not among them."""
        return self.page_format.scales_per_block(self.block_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page and its scales."""
        scales = self.page_scales * torch.float32.itemsize
        return self.block_size * self.page_format.vector_bytes(self.head_dim) + scales

    @property
    def static_bytes(self) -> int:
        """Bytes of the static scales of heads, which do not depend on the number of blocks."""
        if self.page_format.granularity != "head":
            return 0
        return 2 * self.num_layers * self.num_kv_heads * torch.float32.itemsize

    def group_bytes(self, num_heads: Sequence[int]) -> int:
        """Return the bytes of one block with ``num_heads[layer]`` heads, keys and values."""
        return 2 * sum(num_heads) * self.page_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and heads."""
        return self.group_bytes([self.num_kv_heads] * self.num_layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token and its share of the scales over all layers and heads."""
        return self.block_bytes // self.block_size

    def num_pages(self, groups: HeadGroups, num_blocks: Sequence[int]) -> int:
        """Return the pages of a cache with ``num_blocks`` blocks of each head group."""
        sizes = zip(groups.groups, num_blocks, strict=True)
        return 2 * sum(count * sum(group.num_heads) for group, count in sizes)

    def nbytes(self, groups: HeadGroups, num_blocks: Sequence[int]) -> int:
        """Return the bytes of a cache; arguments as in ``num_pages``."""
        return self.static_bytes + self.num_pages(groups, num_blocks) * self.page_bytes

    def scale_bytes(self, groups: HeadGroups, num_blocks: Sequence[int]) -> int:
        """Return the bytes of a cache's scales; arguments as in ``num_pages``."""
        of_page = self.page_scales * torch.float32.itemsize
        return self.static_bytes + self.num_pages(groups, num_blocks) * of_page

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)


def layer_layouts(
    spec: CacheSpec, groups: HeadGroups, num_blocks: Sequence[int], device: torch.device
) -> list[KVLayout]:
    """Return each layer's layout, pages group by group; layers with the same roles share one."""
    layouts: dict[object, KVLayout] = {}
    for layer in range(spec.num_layers):
        roles = groups.roles(layer)
        if roles not in layouts:
            layout = KVLayout.head_groups(
                roles,
                _group_bases(groups, num_blocks, layer, spec.block_size * spec.head_dim),
                spec.block_size,
                spec.head_dim,
                device=device,
            )
            layouts[roles] = replace(layout, visits_masked=groups.visits_masked)
    return [layouts[groups.roles(layer)] for layer in range(spec.num_layers)]


def _group_bases(
    groups: HeadGroups, num_blocks: Sequence[int], layer: int, per_page: int
) -> list[int]:
    """Return the first element of each group of a layer, if a page has ``per_page`` elements."""
    sizes = [
        count * group.num_heads[layer] * per_page
        for group, count in zip(groups.groups, num_blocks, strict=True)
    ]
    return list(accumulate(sizes[:-1], initial=0))


@dataclass(frozen=True, slots=True)
class StreamingDemand:
    """The number of blocks that streaming head groups can use."""

    config: EngineConfig
    max_model_len: int

    def request_blocks(self, group: HeadGroup) -> int:
        """Return the most blocks of a group that a decoding request uses.

        A block is freed when the result of the step that moved the window past it has been read,
        so that the steps in flight count like tokens of one step.
        """
        live = group.keeps.num_blocks(self.config.block_size, self.config.steps_in_flight)
        return min(live, self._blocks_for(self.max_model_len))

    def num_blocks(self, group: HeadGroup) -> int:
        """Return the most blocks that a group can use: for decodes, prompts and the prefix cache.

        All prompts of a step share its token budget, which counts once per step in flight; each
        request counts one block more, because a prompt's last block may be only partly filled.
        """
        config, of_request = self.config, self.request_blocks(group)
        prompts = config.steps_in_flight * self._blocks_for(config.max_num_batched_tokens)
        cached = config.streaming_cache_blocks
        cached = 64 * of_request if cached is None else cached
        return (
            config.max_num_seqs * (of_request + 1)
            + prompts
            + (cached if config.caches_prefixes else 0)
        )

    def divide(self, groups: HeadGroups, num_blocks: int) -> tuple[int, ...]:
        """Return the blocks of every group if full ones, the largest, have ``num_blocks``."""
        return tuple(
            num_blocks if group.keeps.is_full else min(num_blocks, self.num_blocks(group))
            for group in groups.groups
        )

    def divide_bytes(
        self, spec: CacheSpec, groups: HeadGroups, num_bytes: int, most: int
    ) -> tuple[int, ...]:
        """Return the most blocks of every group that fit ``num_bytes``, up to ``most`` in each.

        Where memory is short, a streaming group has at most ``fair_blocks``, the blocks configured
        for its prefix cache, and a number of spare blocks that is the same for every such group.
        """
        full_heads = sum(sum(group.num_heads) for group in groups.groups if group.keeps.is_full)
        config = self.config
        asked = (config.streaming_cache_blocks or 0) if config.caches_prefixes else 0

        def division(num_blocks: int, spare: int = 0) -> tuple[int, ...]:
            def fair(group: HeadGroup) -> int:
                return self.fair_blocks(group, full_heads, num_blocks) + asked + spare

            wanted = self.divide(groups, num_blocks)
            return tuple(
                count if group.keeps.is_full else min(count, fair(group))
                for group, count in zip(groups.groups, wanted, strict=True)
            )

        def fits(blocks: tuple[int, ...]) -> bool:
            return spec.nbytes(groups, blocks) <= num_bytes

        num_blocks = _largest(lambda count: fits(division(count)), most)
        spare = _largest(lambda count: fits(division(num_blocks, count)), num_blocks)
        return division(num_blocks, spare)

    def fair_blocks(self, group: HeadGroup, full_heads: int, num_blocks: int) -> int:
        """Return the blocks of a streaming group that serve short and long requests equally well.

        They limit how many short requests fit, the full heads' ``num_blocks`` how many long ones.
        Against the best division for each kind, requests as long as the window lose as much as
        those of ``max_model_len`` if ``(a + b) S = (a + b w / m) F``: the ``a`` full heads of all
        layers have ``F`` blocks, this group's ``b`` heads ``S``, and the longest request uses
        ``w`` of these instead of ``m``. A prompt's chunk fits in any case.
        """
        if full_heads == 0:
            return num_blocks
        own_heads, held = sum(group.num_heads), self.request_blocks(group)
        context = self._blocks_for(self.max_model_len)
        share = (full_heads + own_heads * held / context) / (full_heads + own_heads)
        chunk = min(self.config.max_num_batched_tokens, self.max_model_len)
        least = group.keeps.num_blocks(self.config.block_size, chunk)
        return min(num_blocks, max(math.ceil(share * num_blocks), least))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest n up to ``most`` so that ``holds`` is true for each of 1 to n."""
    return bisect_left(range(1, most + 1), True, key=lambda count: not holds(count))


class KVCache:
    """The pages and scales of a spec on the device; kernels mask what was never written."""

    def __init__(
        self,
        spec: CacheSpec,
        groups: HeadGroups,
        num_blocks: Sequence[int],
        device: torch.device,
        head_scales: torch.Tensor | None = None,
    ) -> None:
        """Allocate the pages and scales, with ``num_blocks`` blocks of each group in every layer.

        ``head_scales``, ``[layers, 2, kv_heads]`` float32, are for granularity ``head``; else
        None. CapacityError: fewer than one block of a group fits, or the device has no room.
        """
        if min(num_blocks) < 1:
            raise CapacityError(
                f"KV cache: no block of {spec.block_bytes} bytes fits; raise "
                "gpu_memory_utilization, kv_cache_memory_bytes or num_kv_blocks"
            )
        self.spec = spec
        self.groups = groups
        self.num_blocks = tuple(num_blocks)
        self._head_scales = head_scales
        layer_pages = [
            sum(
                count * group.num_heads[layer]
                for group, count in zip(groups.groups, num_blocks, strict=True)
            )
            for layer in range(spec.num_layers)
            for _ in "kv"
        ]
        try:
            pages = torch.empty(
                sum(layer_pages),
                math.prod(spec.stored_shape),
                dtype=spec.page_format.dtype,
                device=device,
            )
            scales = torch.empty(
                sum(layer_pages), spec.page_scales, dtype=torch.float32, device=device
            )
            if head_scales is not None:
                self._head_scales = head_scales.to(device)
        except RuntimeError as error:  # a CPU has no OutOfMemoryError of its own
            raise CapacityError(
                f"KV cache: {' + '.join(map(str, num_blocks))} blocks of {spec.block_bytes} "
                f"bytes do not fit on {device}; lower num_kv_blocks or gpu_memory_utilization"
            ) from error
        self.buffers = pages, scales
        """The memory behind every page, and behind every scale that is not static."""
        layouts = layer_layouts(spec, groups, num_blocks, device)
        pages_of, scales_of = pages.split(layer_pages), scales.split(layer_pages)
        self.layers: list[LayerCache] = []
        """Of the model; those of a draft head are ``draft_layers``."""
        for layer, layout in enumerate(layouts):
            k, v = (
                self._shaped(x, *spec.stored_shape) for x in pages_of[2 * layer : 2 * layer + 2]
            )
            self.layers.append(
                LayerCache(
                    k=k,
                    v=v,
                    layout=layout,
                    scales=self._layer_scales(layer, scales_of[2 * layer : 2 * layer + 2]),
                )
            )
        num_own = spec.num_layers - spec.draft_layers
        self.layers, self.draft_layers = self.layers[:num_own], self.layers[num_own:]

    def _shaped(self, values: torch.Tensor, *page: int) -> torch.Tensor:
        """Return pages or scales as kernels take them: ``[blocks, kv_heads, *page]``, or flat."""
        if len(self.num_blocks) > 1:
            return values.view(-1)
        return values.view(self.num_blocks[0], self.spec.num_kv_heads, *page)

    def _layer_scales(self, layer: int, scales: Sequence[torch.Tensor]) -> KVScales | None:
        codes = self.spec.page_format
        if codes.granularity is None:
            return None
        if self._head_scales is not None:
            k, v = self._head_scales[layer]
            return KVScales.per_head(k, v, codes)
        per_page = self.spec.page_scales
        k, v = (self._shaped(x, per_page) for x in scales)
        return KVScales.head_groups(
            k,
            v,
            self.groups.roles(layer),
            _group_bases(self.groups, self.num_blocks, layer, per_page),
            self.spec.block_size,
            granularity=codes.granularity,
            codes=codes,
        )

    def free(self) -> None:
        """Give the memory back for good, whoever still has a view of it."""
        for buffer in self.buffers:
            buffer.untyped_storage().resize_(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and scales."""
        return self.spec.nbytes(self.groups, self.num_blocks)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory behind all pages and scales; few while the cache sleeps."""
        static = 0 if self._head_scales is None else self._head_scales.nbytes
        return static + sum(buffer.untyped_storage().nbytes() for buffer in self.buffers)
