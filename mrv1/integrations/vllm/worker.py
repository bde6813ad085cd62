"""``--worker-cls mrv1.integrations.vllm.Worker``: vLLM's scheduler, mrv1's models and runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    KVConnectorOutput,
    ModelRunnerOutput,
)
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from mrv1.device import memory_bytes
from mrv1.errors import ConfigError
from mrv1.integrations.vllm.adapters import WorkerAdapters
from mrv1.integrations.vllm.attention_pages import CODES
from mrv1.integrations.vllm.kv_transfer import KVTransfer
from mrv1.integrations.vllm.options import engine_config, share_of_all
from mrv1.integrations.vllm.outputs import StepResult
from mrv1.integrations.vllm.ranks import Watch, end_process, parallel_context
from mrv1.integrations.vllm.requests import Requests, Step
from mrv1.integrations.vllm.sampling import MAX_EOS_TOKENS
from mrv1.integrations.vllm.versions import interface, resolve
from mrv1.models import Checkpoint, DecoderModel, ParallelContext
from mrv1.runner import AsyncOutput, ModelRunner

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

logger = logging.getLogger(__name__)

INTERFACE = interface()  # a vLLM that mrv1 is not tested with fails here, with its version

KV_LAYOUT = "LBHNC"
"""vLLM's name for pages of one layer in which a head's tokens are contiguous (HND)."""


class Worker(WorkerBase):  # type: ignore[misc]
    """Executes what vLLM's scheduler decides on one GPU, or on a CPU for tests.

    Of several tensor-parallel ranks each process has one, and executes the same steps. Results
    are those of the driver, whose errors vLLM reports; another rank that fails ends its process.
    """

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - a VllmConfig
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        """Check the configuration before loading; ConfigError names every refused option."""
        super().__init__(
            vllm_config=vllm_config,
            local_rank=local_rank,
            rank=rank,
            distributed_init_method=distributed_init_method,
            is_driver_worker=is_driver_worker,
        )
        self._engine_config = engine_config(vllm_config, torch.device("cpu"))
        self._is_async = bool(self.scheduler_config.async_scheduling)
        self._parallel = ParallelContext()
        self._watch: Watch | None = None
        """On a rank whose results vLLM does not read."""
        self._loaded: ModelRunner | None = None  # vLLM expects a torch.nn.Module in model_runner
        self._requests: Requests | None = None
        self._awaits_masks: Step | None = None
        """The step whose layers have been launched; ``sample_tokens`` draws its tokens."""
        self._launched: tuple[Step, AsyncOutput] | None = None
        """The step that has been launched; ``sample_tokens`` returns its result."""
        self._profiler: Any = None
        self._transfer: KVTransfer | None = None
        self._transferred: KVConnectorOutput | None = None
        """What the connector says of the step that was launched last."""

    # --- start ---------------------------------------------------------------------------------
    def init_device(self) -> None:
        """Choose the device, and set up vLLM's process groups, which its executors use.

        ConfigError: no such device, GPUs of ranks that do not reach each other's memory, or less
        free memory than ``gpu_memory_utilization``.
        """
        from vllm.distributed import (
            ensure_model_parallel_initialized,
            init_distributed_environment,
            set_custom_all_reduce,
        )

        on_gpu = self.device_config.device_type == "cuda"
        if not on_gpu and self.device_config.device_type != "cpu":
            raise ConfigError(
                f"device: expected 'cuda' or 'cpu', got {self.device_config.device_type!r}"
            )
        self.device = torch.device("cpu")
        if on_gpu:
            platform = self.current_platform
            index = platform.logical_device_id_to_visible_device_id(self.local_rank)
            self.device = torch.device("cuda", index)
            torch.cuda.set_device(self.device)
        parallel = self.parallel_config
        set_custom_all_reduce(not parallel.disable_custom_all_reduce)
        init_distributed_environment(
            parallel.world_size,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            "nccl" if on_gpu else "gloo",
        )
        ensure_model_parallel_initialized(parallel.tensor_parallel_size, 1)
        self._parallel = parallel_context(self.device)
        if not self.is_driver_worker:
            self._watch = Watch(self.rank)
        config = engine_config(self.vllm_config, self.device)
        if on_gpu and config.kv_cache_memory_bytes is None:
            share = share_of_all(config.gpu_memory_utilization, *memory_bytes(self.device))
            config = replace(config, gpu_memory_utilization=share)
        self._engine_config = config

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the weights; ``load_format="dummy"`` or ``load_dummy_weights`` makes them up.

        ConfigError: mrv1 does not have the architecture, or the checkpoint is wrong.
        """
        if load_dummy_weights:
            self._engine_config = replace(self._engine_config, load_format="dummy")
        runner = ModelRunner(
            self._engine_config, parallel=self._parallel, allocates=False, progress=False
        )
        eos = runner.model_config.eos_token_ids
        if len(eos) > MAX_EOS_TOKENS:
            raise ConfigError(
                f"model: expected at most {MAX_EOS_TOKENS} end-of-sequence tokens, got {len(eos)}"
            )
        self._loaded = runner
        config = self._engine_config
        self._requests = Requests(
            config.max_num_seqs, runner.max_model_len, config.seed, WorkerAdapters(config, runner)
        )

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Return full attention for every layer: mrv1's one group of blocks keeps every token."""
        spec = self._runner.spec
        dtype, options = spec.page_format.dtype, {}
        if spec.page_format.has_scales:
            dtype = torch.uint8
            mode = resolve("vllm.v1.kv_cache_interface:KVQuantMode")
            name = next(name for name, codes in CODES.items() if codes == spec.page_format)
            options["kv_quant_mode"] = mode[name.upper()]
        layer_spec = FullAttentionSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_dim,
            dtype=dtype,
            **options,
        )
        page_bytes = spec.block_bytes // spec.num_layers
        if layer_spec.page_size_bytes != page_bytes:  # scales; not every version counts them
            layer_spec = replace(layer_spec, page_size_padded=page_bytes)
        return dict.fromkeys(self._layer_names(), layer_spec)

    def _layer_names(self) -> list[str]:
        layers = range(self._runner.spec.num_layers)
        return [f"model.layers.{layer}.self_attn.attn" for layer in layers]

    def determine_available_memory(self) -> int:
        """Return the bytes that the weights and a full step leave for the KV cache."""
        return self._runner.measure_kv_cache_bytes()

    def update_max_model_len(self, max_model_len: int) -> None:
        """Take the context length that vLLM fits to the memory; ConfigError if it is longer."""
        most = self._runner.max_model_len
        if max_model_len > most:
            raise ConfigError(f"max_model_len: expected at most {most}, got {max_model_len}")
        if self._requests is not None:
            self._requests.max_model_len = max_model_len

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the blocks that vLLM decided on, and capture CUDA graphs."""
        num_groups = len(kv_cache_config.kv_cache_groups)
        if num_groups != 1:
            raise ConfigError(f"kv_cache_groups: expected 1, got {num_groups}")
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        started = time.perf_counter()
        self._runner.allocate_kv_cache(kv_cache_config.num_blocks, progress=False)
        self._warm_up_seconds = time.perf_counter() - started
        if self.vllm_config.kv_transfer_config is not None:
            caches = dict(zip(self._layer_names(), self._runner.kv_cache.layers, strict=True))
            self._transfer = KVTransfer(self.vllm_config, kv_cache_config, caches)
            self._runner.set_kv_listener(self._transfer.on_layer_written)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Return the seconds of ``initialize_from_config``, which has done it.

        From here on Python looks for no garbage among what the start has made, vLLM's modules
        above all: all ranks would wait for it, as long as for many steps.
        """
        freeze_gc_heap()
        return CompilationTimes(language_model=self._warm_up_seconds, encoder=0.0)

    # --- steps ---------------------------------------------------------------------------------
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Launch the step, with token masks only its layers; StepError: the launch failed.

        Returns None if ``sample_tokens`` follows, else the empty result of a step without tokens.
        """
        if self._profiler is not None:
            self._profiler.step()
        with self._watched():
            return self._execute(scheduler_output)

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        runner, transfer = self._runner, self._transfer
        step = self._scheduled.plan(scheduler_output)
        if step is None:
            return (
                transfer.without_tokens(scheduler_output)
                if transfer
                else EMPTY_MODEL_RUNNER_OUTPUT
            )
        try:
            if transfer is not None:
                transfer.begin(scheduler_output)
            self._adapters.write_to(runner)
            if scheduler_output.has_structured_output_requests:
                runner.forward(step.plan)
                self._awaits_masks = step
            else:
                self._launched = step, runner.execute(step.plan)
            if transfer is not None:
                self._transferred = transfer.end(scheduler_output)
        except BaseException:
            self._scheduled.forget_last()
            raise
        return None

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Draw tokens that await masks; return the result, of the driver alone.

        StepError; RuntimeError: no step.
        """
        with self._watched():
            step, output = self._sample(grammar_output)
            if self._watch is not None:
                self._watch.add(output)
                return None
        transferred, self._transferred = self._transferred, None
        result = StepResult(step, output, transferred)
        return result if self._is_async else result.get_output()

    def _sample(self, grammar_output: GrammarOutput | None) -> tuple[Step, AsyncOutput]:
        step, self._awaits_masks = self._awaits_masks, None
        launched, self._launched = self._launched, None
        if step is not None:
            masks, rows = None, []
            if grammar_output is not None:
                masks = grammar_output.grammar_bitmask
                rows = [step.rows[id_] for id_ in grammar_output.structured_output_request_ids]
            launched = step, self._runner.sample(masks, rows)
        if launched is None:
            raise RuntimeError("sample_tokens: expected a step of execute_model, got none")
        return launched

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """End the process after an error of which vLLM would not learn."""
        try:
            yield
        except Exception as error:
            if self._watch is None:
                raise
            end_process(self.rank, error)

    def synchronize_device(self) -> None:
        """Wait for the launched steps."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # --- memory and weights --------------------------------------------------------------------
    def sleep(self, level: int = 1) -> None:
        """Sleep as ``ModelRunner.sleep``; ConfigError if a KV connector knows the memory."""
        if self._transfer is not None:
            raise ConfigError("sleep: expected no KV connector, got one, which knows the cache")
        self._runner.sleep(level)
        self._adapters.forget_slots()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate it again; see ``ModelRunner.wake_up``."""
        self._runner.wake_up(tags)

    def reload_weights(
        self,
        weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Overwrite weights in place; keys and values in the cache become stale.

        Args:
            weights_iterator: tensors by their names in the checkpoint; any part of them.
            weights_path: without tensors: the checkpoint to read; None = the model's own.
            is_checkpoint_format: must be True (else ConfigError): no names for mrv1's own tensors.
        """
        if not is_checkpoint_format:
            _refuse("is_checkpoint_format=False")
        if weights_iterator is not None:
            self._runner.update_weights(weights_iterator, partial=True)
            return
        path = self._runner.config.model if weights_path is None else weights_path
        self._runner.update_weights(Checkpoint.open(path, progress=False).tensors())

    # --- adapters ------------------------------------------------------------------------------
    def add_lora(self, lora_request: Any) -> bool:  # noqa: ANN401 - vLLM's LoRARequest
        """Read an adapter; RequestError: ``enable_lora`` is off, or it is not one of the model."""
        self._adapters.add(lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; return False if there is none."""
        return self._adapters.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in its slot; RequestError: there is none, or all slots but one are."""
        self._adapters.pin(lora_id)
        return True

    def list_loras(self) -> set[int]:
        """Return the numbers of the adapters."""
        return self._adapters.ids

    # --- the rest of vLLM's control calls ------------------------------------------------------
    def get_model(self) -> DecoderModel:
        """Return mrv1's model, which is no ``torch.nn.Module``."""
        return self._runner.model

    def get_model_inspection(self) -> str:
        """Return the runner's line about device, path, dtypes and blocks."""
        return self._runner.describe()

    def get_cache_block_size_bytes(self) -> int:
        """Return the bytes of a block over all layers."""
        return self._runner.spec.block_bytes

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        """Return what other instances must know of this worker's KV connector, if there is one."""
        return None if self._transfer is None else self._transfer.handshake()

    def profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start or stop vLLM's configured profiler; ConfigError if none, or without limits."""
        config = self.vllm_config.profiler_config
        if config is None or config.profiler is None:
            raise ConfigError("profile: expected --profiler-config with a profiler, got none")
        limits = {"delay_iterations": delay_iterations, "max_iterations": max_iterations}
        given = {name: value for name, value in limits.items() if value is not None}
        if not is_start:
            if self._profiler is not None:
                self._profiler.stop()
                self._profiler = None
            return
        if self._profiler is None:
            self._profiler = self._new_profiler(profile_prefix, given, profiler_kwargs)
        self._profiler.start(**given)

    def _new_profiler(
        self, prefix: str | None, limits: dict[str, int], options: dict[str, Any] | None
    ) -> Any:  # noqa: ANN401 - a profiler of vLLM
        config = self.vllm_config.profiler_config
        name = f"{prefix}_rank{self.rank}" if prefix else f"rank{self.rank}"
        if INTERFACE.has_profiler_factory:
            return resolve("vllm.profiler.wrapper:create_worker_profiler")(
                config, worker_name=name, local_rank=self.local_rank, profiler_kwargs=options
            )
        if limits or options:
            given = ", ".join([*limits, *(["profiler_kwargs"] if options else [])])
            raise ConfigError(f"profile: expected none of this vLLM's newer options, got {given}")
        if config.profiler == "cuda":
            return resolve("vllm.profiler.wrapper:CudaProfilerWrapper")(config)
        on_gpu = self.device.type == "cuda"
        return resolve("vllm.profiler.wrapper:TorchProfilerWrapper")(
            config,
            worker_name=name,
            local_rank=self.local_rank,
            activities=["CPU", "CUDA"] if on_gpu else ["CPU"],
        )

    def check_health(self) -> None:
        """Raise RuntimeError if the runner was closed, sleeps or lacks weights."""
        self._runner.check_usable()

    def shutdown(self) -> None:
        """Free the device memory; a second call does nothing."""
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        if self._watch is not None:
            self._watch.close()
        if self._parallel.peers is not None:
            self._parallel.peers.abort.fill_(1)  # kernels that wait for a rank that has ended
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    @property
    def _runner(self) -> ModelRunner:
        if self._loaded is None:
            raise RuntimeError("Worker: expected load_model before this call, and no shutdown")
        return self._loaded

    @property
    def _scheduled(self) -> Requests:
        if self._requests is None:
            raise RuntimeError("Worker: expected load_model before this call")
        return self._requests

    @property
    def _adapters(self) -> WorkerAdapters:
        if self._scheduled.adapters is None:
            raise RuntimeError("Worker: expected requests with adapters, got some without")
        return self._scheduled.adapters


def _refuse(name: str) -> NoReturn:
    raise ConfigError(
        f"{name}: expected not to be used, because mrv1's worker does not support it"
    )


REFUSED_CALLS = (
    "get_draft_model",
    "update_config", "save_sharded_state",
    "save_tensorized_model", "init_weight_transfer_engine", "shutdown_weight_transfer_engine",
    "start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update",
    "compute_weight_checksums", "reset_weights", "discard", "checkpoint_prepare",
    "checkpoint_restore", "handle_ft_command", "elastic_ep_execute",
    "get_simple_cpu_offload_num_cpu_blocks",
)  # fmt: skip
"""Control calls of vLLM that the worker does not support; each raises a ``ConfigError``."""

ANSWERS: dict[str, Callable[[], object]] = {
    "execute_dummy_batch": lambda: None,  # no other rank waits for a step of this one
    "get_compilation_match_table": dict,
    "get_encoder_timing_stats": dict,
    "get_supported_kv_cache_layouts": lambda: [KV_LAYOUT],
    "get_supported_tasks": lambda: ("generate",),
    "reset_encoder_cache": lambda: None,
    "reset_mm_cache": lambda: None,
    "take_draft_token_ids": lambda: None,
    **{name: partial(_refuse, name) for name in REFUSED_CALLS},
}
"""Calls with one answer: it generates text, without drafts, encoders, media or passes of vLLM."""


def _answering(name: str, answer: Callable[[], object]) -> Callable[..., object]:
    def method(*_: object, **__: object) -> object:
        return answer()

    method.__name__ = method.__qualname__ = name
    method.__doc__ = "Answer as ``ANSWERS`` says."
    return method


for _name, _answer in ANSWERS.items():
    setattr(Worker, _name, _answering(_name, _answer))
