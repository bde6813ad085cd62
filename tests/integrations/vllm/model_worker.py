"""A worker for vLLM's engine on a CPU: vLLM's own models and caches, with mrv1's attention.

vLLM's GPU runner needs its compiled kernels. This one calls the same parts of vLLM as that does,
model loader, cache specs, allocation, metadata and forward context, and draws greedily.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized,
    get_pp_group,
    init_distributed_environment,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import attention as vllm_attention
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from mrv1.integrations.vllm import attention
from mrv1.integrations.vllm.attention_backend import Mrv1AttentionBackend
from mrv1.integrations.vllm.versions import interface

CPU = torch.device("cpu")


@contextmanager
def mrv1_attention() -> Iterator[None]:
    """Let layers take mrv1's backend: vLLM's choice by platform knows no machine without a GPU."""
    attention.register()
    with patch.object(vllm_attention, "get_attn_backend", lambda *_, **__: Mrv1AttentionBackend):
        yield


@contextmanager
def several_caches_per_layer() -> Iterator[None]:
    """Let vLLM bind them, as it does on a GPU; it knows no platform here."""
    names = {"is_cpu": lambda _: True, "check_runner_kv_caches_multi_layer": lambda _: None}
    platform = type(current_platform)
    with ExitStack() as stack:
        for name, method in names.items():
            if hasattr(platform, name):
                stack.enter_context(patch.object(platform, name, method))
        yield


class ModelWorker(WorkerBase):
    """Runs one of vLLM's models; ``logits`` holds the last row of every step of each request.

    Of several pipeline stages the last one has them, and sends its tokens to the others.
    """

    def init_device(self) -> None:
        self.device = CPU
        parallel = self.vllm_config.parallel_config
        init_distributed_environment(
            parallel.world_size, self.rank, self.distributed_init_method, self.rank, "gloo"
        )
        ensure_model_parallel_initialized(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        )
        self._output: ModelRunnerOutput | None = None

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        config: VllmConfig = self.vllm_config
        _ROPE_DICT.clear()  # vLLM's ERNIE changes an object that models of a process share
        dtype = set_default_torch_dtype(config.model_config.dtype)
        with mrv1_attention(), set_current_vllm_config(config), dtype:
            self.model = initialize_model(config)
            get_model_loader(config.load_config).load_weights(self.model, config.model_config)
        self.logits: dict[str, dict[int, torch.Tensor]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._blocks: dict[str, list[list[int]]] = {}

    def get_model(self) -> torch.nn.Module:
        return self.model

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [layout.name for layout in Mrv1AttentionBackend.supported_kv_cache_layouts()]

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return attn_utils.get_kv_cache_spec(self.vllm_config)

    def determine_available_memory(self) -> int:
        return 1 << 24

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self.kv_cache_config = kv_cache_config
        self.groups, _, self.kernel_sizes = attn_utils.init_attn_backend(
            kv_cache_config, self.vllm_config, CPU
        )
        with several_caches_per_layer():
            self._allocate(kv_cache_config)

    def _allocate(self, kv_cache_config: Any) -> None:
        config, context = self.vllm_config, self.vllm_config.compilation_config
        if interface().resolves_kv_layout:
            attn_utils.init_kv_cache(
                context.static_forward_context, kv_cache_config, CPU, self.kernel_sizes, config
            )
        else:
            attn_utils.init_kv_cache(
                [], context.static_forward_context, kv_cache_config, self.groups, CPU,
                config.cache_config.cache_dtype, self.kernel_sizes, config,
            )  # fmt: skip

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        """Compute a step, whose result ``sample_tokens`` returns."""
        output = self._step(scheduler_output)
        if not output.req_ids:
            return output
        self._output = output
        return None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | None:
        output, self._output = self._output, None
        return output

    def _step(self, scheduler_output: Any) -> ModelRunnerOutput:
        """Compute a step; requests in the form of vLLM's second runner, resent when preempted."""
        for new in scheduler_output.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
            self._blocks[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = scheduler_output.scheduled_cached_reqs
        assert not cached.resumed_req_ids
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for of_group, ids in zip(self._blocks[req_id], blocks or (), strict=False):
                of_group.extend(ids)
        computed = {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        req_ids = [*scheduler_output.num_scheduled_tokens]
        if not req_ids:
            return ModelRunnerOutput(req_ids=[], req_id_to_index={})
        # Decodes come first, as the backend asks of vLLM's runner.
        req_ids.sort(key=lambda req_id: scheduler_output.num_scheduled_tokens[req_id] > 1)
        counts = [scheduler_output.num_scheduled_tokens[req_id] for req_id in req_ids]
        firsts = [computed[req_id] for req_id in req_ids]
        rows, stages = self._forward(req_ids, firsts, counts), get_pp_group()
        drawn = stages.broadcast_object(
            None if rows is None else rows.argmax(-1).tolist(), src=stages.world_size - 1
        )
        sampled = []
        for index, (req_id, first, count) in enumerate(zip(req_ids, firsts, counts, strict=True)):
            tokens = self._tokens[req_id]
            sampled.append([drawn[index]] if first + count == len(tokens) else [])
            tokens.extend(sampled[-1])
            if rows is not None:
                self.logits.setdefault(req_id, {})[first + count - 1] = rows[index]
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: row for row, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
        )

    def _forward(
        self, req_ids: list[str], firsts: list[int], counts: list[int]
    ) -> torch.Tensor | None:
        """Return the logits of each request's last token; None = of a later stage."""
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lens = [first + count for first, count in zip(firsts, counts, strict=True)]
        positions = torch.cat([torch.arange(*ends) for ends in zip(firsts, lens, strict=True)])
        input_ids = torch.tensor(
            [
                token
                for req_id, first, end in zip(req_ids, firsts, lens, strict=True)
                for token in self._tokens[req_id][first:end]
            ]
        )
        tables, slots = [], []
        for index, group in enumerate(self.kv_cache_config.kv_cache_groups):
            size = group.kv_cache_spec.block_size
            table = torch.zeros(len(req_ids), -(-max(lens) // size), dtype=torch.int32)
            for row, req_id in enumerate(req_ids):
                ids = torch.tensor(self._blocks[req_id][index])
                table[row, : len(ids)] = ids
            rows = torch.arange(len(req_ids)).repeat_interleave(torch.tensor(counts))
            slots.append(table[rows, positions // size].long() * size + positions % size)
            ratio = size // self.kernel_sizes[index]
            if not interface().resolves_kv_layout and ratio > 1:  # 0.33 splits blocks itself
                table = (table[:, :, None] * ratio + torch.arange(ratio)).flatten(1).int()
            tables.append(table)
        slot_mappings = torch.stack(slots)
        metadata = attn_utils.build_attn_metadata(
            attn_groups=self.groups, num_reqs=len(req_ids), num_tokens=len(positions),
            query_start_loc_gpu=starts, query_start_loc_cpu=starts, max_query_len=max(counts),
            seq_lens=torch.tensor(lens, dtype=torch.int32), max_seq_len=max(lens),
            block_tables=tables, slot_mappings=slot_mappings,
            kv_cache_config=self.kv_cache_config,
        )  # fmt: skip
        of_layers = attn_utils.build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config)
        with (
            torch.inference_mode(),
            set_forward_context(
                metadata, self.vllm_config, num_tokens=len(positions), slot_mapping=of_layers
            ),
        ):
            stages, before = get_pp_group(), None
            if not stages.is_first_rank:
                before = IntermediateTensors(stages.recv_tensor_dict())
            hidden = self.model(input_ids, positions, before)
            if not stages.is_last_rank:
                stages.send_tensor_dict(hidden.tensors)
                return None
            return self.model.compute_logits(hidden[starts[1:].long() - 1])

    def take_draft_token_ids(self) -> None:
        pass

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def check_health(self) -> None:
        pass
