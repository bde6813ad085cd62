"""vLLM's KV connectors under mrv1's worker: tensors to index, and the calls for each layer.

All loads are awaited before a step's first layer; the runner's KV listener tells of writes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_transfer_state import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
)
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.worker.gpu.kv_connector import get_kv_connector

from mrv1.integrations.vllm.versions import interface
from mrv1.models.batch import LayerCache
from mrv1.runner import KVReady

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput


class KVTransfer:
    """A worker's connector and its steps; ``caches`` are by layer, in order, all in one group."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        caches: dict[str, LayerCache],
    ) -> None:
        self._config = vllm_config
        self._views = {name: connector_view(cache) for name, cache in caches.items()}
        self._names = [*caches]
        context = vllm_config.compilation_config.static_forward_context
        for name, view in self._views.items():  # where connectors look a layer's cache up
            context[name] = SimpleNamespace(kv_cache=view)
        self._metadata = AttentionMetadata()  # as it is no MLA's, a cache has all heads
        ensure_kv_transfer_initialized(vllm_config, kv_cache_config)
        self._step = get_kv_connector(vllm_config, self._views)
        self._connector = get_kv_transfer_group()

    def begin(self, output: SchedulerOutput) -> None:
        """Start the loads of a step, and let its layers come after those that they need."""
        metadata = dict.fromkeys(self._names, self._metadata)
        with set_forward_context(metadata, self._config):
            self._step.pre_forward(output)
        for name in self._names:
            self._connector.wait_for_layer_load(name)

    def on_layer_written(self, ready: KVReady) -> None:
        """Let the connector save a layer; what it launches on this stream follows the write."""
        name = self._names[ready.layer]
        self._connector.save_kv_layer(name, self._views[name], self._metadata)

    def end(self, output: SchedulerOutput) -> KVConnectorOutput:
        """Return which transfers are over, once the layers are launched."""
        if interface().resolves_kv_layout:
            self._step.finish_forward()
        return self._step.post_forward(output.finished_req_ids)

    def without_tokens(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Return the result of a step that computes nothing: transfers go on."""
        return self._step.no_forward(output)

    def handshake(self) -> dict[tuple[int, int], Any] | None:
        """Return what other instances must know of this worker, by its two ranks."""
        metadata = self._connector.get_handshake_metadata()
        return None if metadata is None else {(0, 0): metadata}

    def close(self) -> None:
        """End the connector."""
        ensure_kv_transfer_shutdown()


def connector_view(cache: LayerCache) -> torch.Tensor:
    """Return K and V in one view, ``[blocks, 2, block_size, kv_heads, head_dim]``; 2 = K, V."""
    k, v = cache.k, cache.v
    blocks, heads, size, dim = k.shape
    of_block, of_head, of_token, of_dim = k.stride()
    to_values = v.storage_offset() - k.storage_offset()
    return k.as_strided(
        (blocks, 2, size, heads, dim), (of_block, to_values, of_token, of_head, of_dim)
    )
