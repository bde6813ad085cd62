"""One step, from a plan to tokens on their way to the host."""

from __future__ import annotations

import gc
import logging
from typing import TypedDict

import torch

from mrv1.config import (
    EngineConfig,
    KVScaleName,
    checkpoint_dir,
    resolve_dtype,
    resolve_max_model_len,
)
from mrv1.device import device_info, fp8_path, kernel_path, memory_bytes, resolve_device
from mrv1.errors import StepError
from mrv1.kernels.debug import find_bad_block_ids
from mrv1.kernels.ops import select_ops
from mrv1.models import DecoderModel, ModelConfig, load_kv_scales, load_model
from mrv1.runner import input_batch
from mrv1.runner.async_output import AsyncOutput
from mrv1.runner.attention_backends import select_backend
from mrv1.runner.block_table import BlockTables, GroupColumns
from mrv1.runner.input_batch import InputBatch
from mrv1.runner.kv_cache import CPU_KV_BYTES, CacheSpec, KVCache, layer_layouts
from mrv1.runner.profile import run_profile_step
from mrv1.runner.request_state import RequestState
from mrv1.runner.staging import Staging
from mrv1.runner.step import StepPlan
from mrv1.sampler import Sampler

logger = logging.getLogger(__name__)

_SCALED: dict[KVScaleName, str] = {
    "token": "token and head",
    "quarter": "quarter of a block and head",
    "head": "head",
}


class KVReport(TypedDict):
    """Where the KV cache's bytes are."""

    dtype: str
    kv_scale: str | None
    """What has a scale of its own; None = a cache without scales."""
    block_size: int
    num_blocks: int
    token_bytes: int
    """Of a token and its scales over all layers."""
    block_bytes: int
    """Of a block and its scales over all layers."""
    scale_bytes: int
    """Of all scales, counted in ``total_bytes`` too."""
    total_bytes: int


class ModelRunner:
    """Executes the steps a scheduler plans; makes no scheduling decisions itself.

    One host thread calls it. On a GPU all work goes to the current stream, outputs leave on a
    stream of their own, and ``execute`` returns before the GPU is done.
    """

    def __init__(
        self, config: EngineConfig, *, model: DecoderModel | None = None, progress: bool = True
    ) -> None:
        """Load the model, measure the memory and allocate the KV cache.

        Args:
            config: what to build.
            model: a model that is on the device already; None loads ``config.model``.
            progress: show a progress bar while weights load.

        Raises:
            ConfigError: the checkpoint or an option is wrong.
            UnsupportedDeviceError: the device is not there or cannot run mrv1.
            CapacityError: the KV cache does not fit.
        """
        self.config = config
        self._closed = False
        self.device = resolve_device(config.device)
        self.path = kernel_path(self.device)
        is_fp8 = config.kv_cache_dtype == "fp8_e4m3"
        self._fp8 = fp8_path(self.device) if is_fp8 else None  # refused before anything loads
        self._ops = select_ops(self.path)
        self.model = model or self._load_model(progress)
        self.model_config = self.model.config
        self.max_model_len = resolve_max_model_len(
            config.max_model_len, self.model_config.max_model_len
        )
        self.spec = CacheSpec(
            num_layers=self.model_config.num_layers,
            num_kv_heads=self.model_config.num_kv_heads,
            block_size=config.block_size,
            head_dim=self.model_config.head_dim,
            dtype=torch.float8_e4m3fn if is_fp8 else self.model.dtype,
            granularity=config.kv_scale if is_fp8 else None,
        )
        self._layouts = layer_layouts(self.spec, self.model_config.layer_windows, self.device)
        self._head_scales = (
            load_kv_scales(checkpoint_dir(config.model), self.model_config)
            if self.spec.granularity == "head"
            else None
        )
        self.attention = select_backend(
            config.attention_backend, self.model, self.spec, self._layouts
        )
        full_group = GroupColumns(offset=0, width=self.spec.blocks_for(self.max_model_len))
        self.state = RequestState(config.max_num_seqs, self.max_model_len, self.device)
        self.block_tables = BlockTables(config.max_num_seqs, [full_group], self.device)
        self.sampler = Sampler(config.max_num_seqs, self.device, self._ops)
        self._staging = Staging(self.device)
        self._copy_stream = torch.cuda.Stream(self.device) if self._on_gpu else None
        self.kv_cache = self._new_kv_cache(self._num_kv_blocks())
        logger.info("%s", self.describe())

    # --- one step -------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> AsyncOutput:
        """Launch one step and return before the device is done.

        With ``config.debug`` every block id that the step needs is checked first, and the host
        waits for the device to do so.

        Raises:
            StepError: the plan contradicts the runner's state, a block id that the step needs is
                not of the pool (``config.debug``), or the launch failed; what fails on the device
                comes from ``AsyncOutput.result``.
            RuntimeError: the runner was closed.
        """
        if self._closed:
            raise RuntimeError("ModelRunner: expected an open runner, got one that was closed")
        try:
            with torch.inference_mode():
                batch = self._prepare(plan)
                if self.config.debug:
                    self._check_block_ids(plan, batch)
                layers = self.kv_cache.layers
                self.attention.plan(
                    batch.attention, layers, plan.num_scheduled_tokens, batch.seq_lens_np
                )
                hidden = self.model.forward(batch.attention, layers, self.attention)
                tokens = self._sample(plan, batch, hidden)
                self._post_update(plan, batch, tokens)
                return AsyncOutput(plan, batch.sampled_rows, tokens, self._copy_stream)
        except Exception as error:  # whatever it is, it ends this step and no other
            raise StepError(str(error), step_id=plan.step_id, req_ids=plan.req_ids) from error

    def _prepare(self, plan: StepPlan) -> InputBatch:
        """Bring the plan to the device in one copy, apply it, and gather the step's tokens."""
        arrays = self.state.stage(plan)
        arrays |= self.block_tables.stage(plan, self.kv_cache.num_blocks)
        arrays |= self.sampler.stage(
            [request.slot for request in plan.entering],
            [request.sampling_params for request in plan.entering],
            [request.seed for request in plan.entering],
        )
        rows, sampled_rows = input_batch.stage(plan, self.state)
        staged = self._staging.upload(arrays | rows)
        self.state.apply(staged)
        self.block_tables.apply(staged)
        self.sampler.apply(staged["entering_slots"], staged)
        return input_batch.gather(
            plan, staged, sampled_rows, self.state, self.block_tables, self._ops,
            self.spec.block_size,
        )  # fmt: skip

    def _check_block_ids(self, plan: StepPlan, batch: InputBatch) -> None:
        """Raise if the step would follow a block id out of the pool; waits for the device."""
        for layout in {id(layout): layout for layout in self._layouts}.values():
            bad = find_bad_block_ids(
                batch.attention.block_table,
                batch.attention.seq_lens,
                batch.num_scheduled_tokens,
                layout,
                [self.kv_cache.num_blocks] * layout.num_groups,
            )
            if bad:
                first = bad[0]
                raise ValueError(
                    f"block table of request {plan.req_ids[first.row]!r}, KV head {first.head}: "
                    f"expected a block id in [0, {self.kv_cache.num_blocks}) in column "
                    f"{first.column}, got {first.block_id} ({len(bad)} such entries in the step)"
                )

    def _sample(self, plan: StepPlan, batch: InputBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Return the token of each row that samples, ``[sampled rows]`` int64."""
        if not batch.sampled_rows:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        logits = self.model.compute_logits(hidden.index_select(0, batch.logits_rows))
        return self.sampler.sample(
            logits,
            batch.sampled_slots,
            self.state.output_positions(batch.sampled_slots),
            filtered=self.sampler.any_filters(plan.slots[batch.sampled_rows]),
        )

    def _post_update(self, plan: StepPlan, batch: InputBatch, tokens: torch.Tensor) -> None:
        """Advance lengths and append the sampled tokens, on the device and in the mirrors."""
        self.state.advance(batch.slots, batch.num_scheduled_tokens)
        self.state.append(batch.sampled_slots, tokens)
        self.state.advance_on_host(plan, batch.sampled_rows)

    # --- construction ---------------------------------------------------------------------

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _load_model(self, progress: bool) -> DecoderModel:
        path = checkpoint_dir(self.config.model)
        model_config = ModelConfig.from_pretrained(path)
        dtype = resolve_dtype(self.config.dtype, model_config.torch_dtype, self.device)
        return load_model(path, device=self.device, dtype=dtype, ops=self._ops, progress=progress)

    def _new_kv_cache(self, num_blocks: int) -> KVCache:
        return KVCache(self.spec, num_blocks, self._layouts, self.device, self._head_scales)

    def _num_kv_blocks(self) -> int:
        """Return the blocks asked for, else what memory allows, at most what can be used."""
        if self.config.num_kv_blocks is not None:
            return self.config.num_kv_blocks
        usable = self.config.max_num_seqs * self.spec.blocks_for(self.max_model_len)
        return min(usable, self.spec.blocks_in(self._kv_bytes()))

    def _kv_bytes(self) -> int:
        """Return the bytes left for the KV cache beside the activations of a full step."""
        if not self._on_gpu:
            return CPU_KV_BYTES
        torch.cuda.empty_cache()
        run_profile_step(
            self.model,
            self.sampler,
            self._new_kv_cache(1),
            num_tokens=self.config.max_num_batched_tokens,
            max_query_len=self.max_model_len,
            num_sampled=self.config.max_num_seqs,
        )
        # The allocator keeps what the step needed, so what is free now is free beside a step.
        free_bytes, total_bytes = memory_bytes(self.device)
        return free_bytes - int(total_bytes * (1 - self.config.gpu_memory_utilization))

    # --- reports --------------------------------------------------------------------------

    def describe(self) -> str:
        """Return one line: device, path, dtypes, blocks and their bytes."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        how = {
            "triton": "Triton kernels",
            "interpreter": "Triton kernels in the CPU interpreter",
            "reference": "CPU reference (torch)",
        }[self.path]
        if self.config.attention_backend == "flashinfer":
            how += ", attention by FlashInfer"
        return (
            f"{self.model_config.architecture} on {device_info(self.device).name}: {how}, "
            f"{dtype}, KV {self._describe_kv()}, all heads full, "
            f"{self.kv_cache.num_blocks} blocks of {self.spec.block_size} tokens "
            f"({self.kv_cache.nbytes / 2**20:.1f} MiB), no CUDA graphs"
        )

    def _describe_kv(self) -> str:
        """Return the cache's dtype, its scales, and who converts e4m3 if not the hardware."""
        dtype = str(self.spec.dtype).removeprefix("torch.")
        if self._fp8 is None:
            return dtype
        converted = ""
        if self._fp8.path == "integer":
            converted = f", converted in integer arithmetic ({self._fp8.reason})"
        return f"{dtype} with a scale per {_SCALED[self.config.kv_scale]}{converted}"

    def kv_report(self) -> KVReport:
        """Return the KV cache's sizes in bytes."""
        return KVReport(
            dtype=str(self.spec.dtype).removeprefix("torch."),
            kv_scale=self.spec.granularity,
            block_size=self.spec.block_size,
            num_blocks=self.kv_cache.num_blocks,
            token_bytes=self.spec.token_bytes,
            block_bytes=self.spec.block_bytes,
            scale_bytes=self.spec.scale_bytes(self.kv_cache.num_blocks),
            total_bytes=self.kv_cache.nbytes,
        )

    def close(self) -> None:
        """Give the device memory back; the runner cannot be used afterwards."""
        self._closed = True
        for name in (
            "model", "attention", "kv_cache", "_layouts", "_head_scales",
            "state", "block_tables", "sampler", "_staging",
        ):  # fmt: skip
            self.__dict__.pop(name, None)
        gc.collect()
        if self._on_gpu:
            # cuBLAS keeps a workspace for ever; torch names its release only privately.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
