"""vLLM's own engine, in this process and on the CPU, with mrv1's worker in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip

import torch
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from mrv1 import LLM, SamplingParams
from mrv1.config import checkpoint_dir
from mrv1.integrations.vllm import Worker
from mrv1.integrations.vllm.options import REQUEST_CHECK

MAX_MODEL_LEN = 128

NO_WHOLE_VLLM = ""
"""Why vLLM's own models and kernels cannot run; empty = they can."""
if not any(Path(vllm.__file__).parent.glob("*.so")):
    NO_WHOLE_VLLM = "needs the whole of vLLM, not its Python files alone"


def new_config(
    *,
    asynchronous: bool = False,
    model: str | None = None,
    num_blocks: int = 64,
    ranks: int = 1,
    max_loras: int = 0,
    **cache: Any,
) -> VllmConfig:
    """Return a configuration such as ``vllm serve`` makes, in float64: no near tie can flip.

    Several ranks are processes of vLLM's multiprocess executor.
    """
    path = str(checkpoint_dir("tiny")) if model is None else model
    config = VllmConfig(
        model_config=ModelConfig(
            model=path,
            tokenizer=path,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            enforce_eager=True,
            logits_processors=[REQUEST_CHECK],
        ),
        cache_config=CacheConfig(
            block_size=16, enable_prefix_caching=True, num_gpu_blocks_override=num_blocks, **cache
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=48,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        parallel_config=ParallelConfig(
            worker_cls="mrv1.integrations.vllm.Worker",
            tensor_parallel_size=ranks,
            distributed_executor_backend="uni" if ranks == 1 else "mp",
        ),
        device_config=DeviceConfig(device="cpu"),
        lora_config=LoRAConfig(max_loras=max_loras) if max_loras else None,
    )
    config.model_config.dtype = torch.float64
    if config.lora_config is not None:
        config.lora_config.lora_dtype = torch.float64
    return config


class Engine:
    """vLLM's ``LLMEngine``: its front end, scheduler, executor and output processor."""

    def __init__(self, config: VllmConfig, *, runner: int | None = None) -> None:
        """Start the engine.

        Args:
            config: the configuration.
            runner: the model runner that the scheduler believes in, which decides in which form
                preempted requests come back; None = vLLM's choice.
        """
        is_alone = config.parallel_config.world_size == 1
        executor = UniProcExecutor if is_alone else MultiprocExecutor
        if not is_alone:  # its forks would inherit the group of one that an engine has left here
            destroy_model_parallel()
            destroy_distributed_environment()
        self.engine = LLMEngine(config, executor, log_stats=False)
        self.core = self.engine.engine_core.engine_core
        if is_alone:
            self.worker: Worker = self.core.model_executor.driver_worker.worker
        if runner is not None:
            self.core.scheduler.use_v2_model_runner = runner == 2
        self.outputs: dict[str, Any] = {}
        """The newest output of each request."""
        self.num_preempted = 0
        self.num_cached_tokens = 0
        schedule = self.core.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.num_preempted += len(output.preempted_req_ids or ())
            self.num_cached_tokens += sum(
                new.num_computed_tokens for new in output.scheduled_new_reqs
            )
            return output

        self.core.scheduler.schedule = counted

    def add(
        self,
        name: str,
        prompt: list[int],
        *,
        lora_request: LoRARequest | None = None,
        **params: Any,
    ) -> None:
        """Add a request of a prompt of token ids; text needs ``detokenize=True``."""
        params = {"temperature": 0, "ignore_eos": True, "detokenize": False} | params
        self.engine.add_request(
            name,
            {"prompt_token_ids": prompt},
            VllmParams(**params),
            lora_request=lora_request,
        )

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs[output.request_id] = output

    def finish(self) -> None:
        """Run until every request has ended and no step is in flight."""
        while self.engine.has_unfinished_requests() or self.core.batch_queue:
            self.step()

    def on_ranks(self, function: Callable[[Any], Any]) -> list[Any]:
        """Return what a function of a worker returns on each rank."""
        found: list[Any] = self.engine.collective_rpc(function)
        return found

    def tokens(self, name: str) -> list[int]:
        return list(self.outputs[name].outputs[0].token_ids)

    def close(self) -> None:
        self.core.scheduler.shutdown()
        self.core.model_executor.shutdown()
        if self.core.structured_output_manager is not None:
            self.core.structured_output_manager.clear_backend()


def new_llm(model: str = "tiny", **options: Any) -> LLM:
    """Return mrv1's own engine, in float64 too."""
    defaults = {"device": "cpu", "dtype": "float64", "num_kv_blocks": 64}
    return LLM(model, **(defaults | {"max_model_len": MAX_MODEL_LEN} | options))


def own_tokens(llm: LLM, prompt: list[int], **params: Any) -> list[int]:
    """Return what mrv1's own engine generates for one request."""
    own = SamplingParams(**({"temperature": 0, "ignore_eos": True} | params))
    (output,) = llm.generate([{"prompt_token_ids": prompt}], own, use_tqdm=False)
    if output.error is not None:
        raise output.error
    return list(output.outputs[0].token_ids)
