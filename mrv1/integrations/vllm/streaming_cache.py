"""Streaming heads in vLLM's KV cache manager: a sliding window whose sink stays.

The manager frees the blocks between a spec's leading tokens and its window. Importing this module
registers both, also in a process that unpickles a worker's specs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock


@dataclass(frozen=True, kw_only=True)
class StreamingSpec(SlidingWindowSpec):  # type: ignore[misc]
    """The KV cache of streaming heads: a window of ``sliding_window`` tokens, and a sink."""

    sink: int
    """Leading tokens that stay visible in addition to the window; 0 = none."""

    @property
    def num_sink_blocks(self) -> int:
        """Leading blocks that a request keeps at any length."""
        return -(-self.sink // int(self.block_size))

    @property
    def num_retained_tokens(self) -> int:
        """Return 0: the worker leaves block tables as they are (vLLM 0.33).

        It would overwrite entries, the sink's too, against kernels that load keys outside windows.
        """
        return 0

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Return the most blocks that a request of any length holds at a time."""
        of_window = super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
        return self.num_sink_blocks + int(of_window)

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Return whether all layers see the same tokens, so that they may share block ids."""
        return all(
            isinstance(spec, StreamingSpec)
            and (spec.sliding_window, spec.sink) == (self.sliding_window, self.sink)
            for spec in kv_cache_specs.values()
        )


class StreamingManager(SlidingWindowManager):  # type: ignore[misc]
    """Gives a request the blocks of its sink and of its window, and frees those between."""

    def _num_passed_blocks(self, num_computed_tokens: int) -> int:
        """Return how many leading blocks the window has passed; those of the sink count."""
        num_passed: int = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        return num_passed

    def _passed_sinks(
        self, computed_blocks: Sequence[KVCacheBlock], num_computed_tokens: int
    ) -> Sequence[KVCacheBlock]:
        """Return the sink's blocks of a prefix hit that the base class takes for unneeded."""
        num_passed = self._num_passed_blocks(num_computed_tokens)
        return computed_blocks[: min(self.kv_cache_spec.num_sink_blocks, num_passed)]

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        *args: Any,  # noqa: ANN401 - vLLM 0.33 has more of them than 0.26
        **options: Any,  # noqa: ANN401
    ) -> int:
        """Return how many free blocks the request takes; a hit takes those of its sink."""
        count = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **options
        )
        sinks = self._passed_sinks(new_computed_blocks, total_computed_tokens)
        return int(count) + int(self._get_num_evictable_blocks(sinks))

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Give a request the blocks of its prefix hit: those of its sink and of its window."""
        super().add_local_computed_blocks(
            request_id,
            new_computed_blocks,
            num_local_computed_tokens,
            num_external_computed_tokens,
        )
        num_tokens = num_local_computed_tokens + num_external_computed_tokens
        sinks = self._passed_sinks(new_computed_blocks, num_tokens)
        if sinks:
            self.block_pool.touch(sinks)
            self.req_to_blocks[request_id][: len(sinks)] = sinks

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks between the sink and the window of the next token."""
        self._remove_blocks_in_range(
            request_id,
            self.kv_cache_spec.num_sink_blocks,
            self._num_passed_blocks(processed_computed_tokens),
        )

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: StreamingSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        **options: Any,  # noqa: ANN401 - of context parallelism
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Return the longest prefix of which the sink and the last window are cached."""
        size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        sinks: list[list[KVCacheBlock]] = []
        for index in range(min(kv_cache_spec.num_sink_blocks, max_length // size)):
            blocks = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
            if blocks is None:
                max_length = index * size
                break
            sinks.append(blocks)
        found, hit_length = super().find_longest_cache_hit(
            block_hashes=block_hashes,
            max_length=max_length,
            kv_cache_group_ids=kv_cache_group_ids,
            block_pool=block_pool,
            kv_cache_spec=kv_cache_spec,
            drop_eagle_block=drop_eagle_block,
            alignment_tokens=alignment_tokens,
            **options,
        )
        for index, blocks in enumerate(sinks[: hit_length // size]):
            for of_group, block in zip(found, blocks, strict=True):
                of_group[index] = block
        return found, hit_length

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: StreamingSpec,
        *args: Any,  # noqa: ANN401 - vLLM 0.33 has more of them than 0.26
        **options: Any,  # noqa: ANN401
    ) -> list[bool] | None:
        """Return which blocks a prefix hit may need: those of the sink always; None = all."""
        mask: list[bool] | None = super().reachable_block_mask(
            start_block, end_block, alignment_tokens, kv_cache_spec, *args, **options
        )
        if mask is not None:
            for index in range(start_block, min(end_block, kv_cache_spec.num_sink_blocks)):
                mask[index - start_block] = True
        return mask


KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # registers vLLM's own specs, if none is yet
KVCacheSpecRegistry.register(StreamingSpec, StreamingManager, uniform_type_base_spec=StreamingSpec)
