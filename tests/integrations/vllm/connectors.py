"""A KV connector that keeps the blocks of prompts in this process, and notes its calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

Prompt = tuple[int, ...]

STORE: dict[tuple[str, Prompt], torch.Tensor] = {}
"""By layer and prompt, a whole number of blocks: the blocks' content."""

CALLS: list[str] = []
"""What the worker called, in order; calls of each layer with its number."""


@dataclass
class Blocks:
    req_id: str
    prompt: Prompt
    block_ids: list[int]


@dataclass
class Metadata(KVConnectorMetadata):
    loads: list[Blocks] = field(default_factory=list)
    saves: list[Blocks] = field(default_factory=list)


class MemoryConnector(KVConnectorBase_V1):
    """``extra_config``: ``is_async``, for loads and sends; ``fails``: every load is an error."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._is_async = extra.get("is_async", False)
        self._fails = extra.get("fails", False)
        self._loads: list[Blocks] = []
        self._received: set[str] = set()
        self._errors: set[int] = set()

    # --- the scheduler's side ---

    def _whole_blocks(self, tokens: Any) -> Prompt:
        return tuple(tokens[: (len(tokens) - 1) // self._size * self._size])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        prompt = self._whole_blocks(request.prompt_token_ids)
        is_known = any(known == prompt for _, known in STORE)
        num_new = len(prompt) - num_computed_tokens if is_known else 0
        return max(num_new, 0), self._is_async and num_new > 0

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            prompt = self._whole_blocks(request.prompt_token_ids)
            ids = blocks.get_block_ids()[0][: len(prompt) // self._size]
            self._loads.append(Blocks(request.request_id, prompt, ids))

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        loads, self._loads = self._loads, []
        saves = []
        for new in scheduler_output.scheduled_new_reqs:
            prompt = self._whole_blocks(new.prompt_token_ids)
            ids = new.block_ids[0][: len(prompt) // self._size]
            if new.num_computed_tokens == 0:
                saves.append(Blocks(new.req_id, prompt, ids))
        return Metadata(loads, saves)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self._is_async, None

    # --- the worker's side ---

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        CALLS.append("load")
        for load in self._get_connector_metadata().loads:
            for name, layer in forward_context.no_compile_layers.items():
                layer.kv_cache[load.block_ids] = STORE[name, load.prompt]
            if self._is_async:
                self._received.add(load.req_id)
            if self._fails:
                self._errors.update(load.block_ids)

    def wait_for_layer_load(self, layer_name: str) -> None:
        CALLS.append(f"wait {layer_name.split('.')[2]}")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        CALLS.append(f"save {layer_name.split('.')[2]}")
        for save in self._get_connector_metadata().saves:
            STORE[layer_name, save.prompt] = kv_layer[save.block_ids].clone()

    def wait_for_save(self) -> None:
        CALLS.append("saved")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        CALLS.append("finished")
        received, self._received = self._received, set()
        return (set(finished_req_ids) if self._is_async else set()), received

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self._errors = self._errors, set()
        return errors
