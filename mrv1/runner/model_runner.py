"""One step, from a plan to tokens on their way to the host."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar, TypeVarTuple

import numpy as np
import numpy.typing as npt
import torch

from mrv1.config import EngineConfig, dtype_name, resolve_max_model_len
from mrv1.device import device_info, kernel_path, resolve_device, resolve_dtype
from mrv1.errors import CapacityError, ConfigError, StepError
from mrv1.forks import keep_for_ever, tell_of_forks
from mrv1.headwise import HeadPolicy
from mrv1.kernels._base.compilations import watch_compilations
from mrv1.kernels.cache.formats import FORMATS
from mrv1.kernels.registry import select_ops
from mrv1.models import (
    Checkpoint,
    DecoderModel,
    ModelConfig,
    NamedTensors,
    ParallelContext,
    load_model,
)
from mrv1.multimodal import MultimodalItem
from mrv1.runner.async_output import AsyncOutput
from mrv1.runner.compile_ahead import KernelSet, compiled_beside
from mrv1.runner.cuda_graph import Forwarded, StepGraphs
from mrv1.runner.debug import check_block_ids, synced
from mrv1.runner.device_memory import within_memory
from mrv1.runner.device_step import NEXT_UPLOAD, DeviceStep
from mrv1.runner.features import FeatureBuffer
from mrv1.runner.head_groups import resolve_head_groups, resolve_policy
from mrv1.runner.kv_cache import CacheSpec, StreamingDemand
from mrv1.runner.kv_listener import KVListener, tell, tokens_of
from mrv1.runner.logprobs import LogprobReport, LogprobRequests, StoredLogprobs, WantedRows
from mrv1.runner.profile import blocks_of_groups, kv_bytes, warm_up
from mrv1.runner.report import KVReport, StartClock, describe_runner, report_of
from mrv1.runner.rows import DeviceRows, StepShape, Tail
from mrv1.runner.sleep import SleepMode
from mrv1.runner.slot_state import field_starts
from mrv1.runner.staging import Staged, StepUpload
from mrv1.runner.step import Int32Array, SlotRequest, StepPlan
from mrv1.runner.visible_ranges import VisibleRanges
from mrv1.sampler import LogitsProcessor, LogitsProcessors

logger = logging.getLogger(__name__)

Args = TypeVarTuple("Args")
Result = TypeVar("Result")

_NOTHING_TO_DO = nullcontext()

_CLOSED = "ModelRunner: expected an open runner, got one that was closed"

_NO_CACHE = "ModelRunner: expected a KV cache, got none yet; call allocate_kv_cache() first"

FORKED = (
    "ModelRunner: expected a call in the process that made it, got one in a forked child, which "
    "has neither its GPU nor its ranks; make the engine in the child, or start that with 'spawn'"
)


class _Launched(NamedTuple):
    """A step whose layers have been launched, by a graph or kernel by kernel."""

    plan: StepPlan
    rows: DeviceRows
    forwarded: Forwarded | None
    """The input of the sampling; None = the graph samples too."""


def _is_of_device(error: BaseException | None) -> bool:
    """Whether a failed kernel caused the error: the driver refuses every call after it."""
    while error is not None and not isinstance(error, torch.AcceleratorError):
        error = error.__cause__
    return error is not None


class ModelRunner:
    """Executes the steps a scheduler plans; makes no scheduling decisions itself.

    Only one host thread may call it. On a GPU all work goes to the current stream, and ``execute``
    returns before the GPU is done.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: DecoderModel | None = None,
        head_policy: HeadPolicy | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        parallel: ParallelContext | None = None,
        allocates: bool = True,
        progress: bool = True,
    ) -> None:
        """Load the model, measure the memory and allocate the KV cache.

        Args:
            config: the runner's configuration.
            model: a model that is on the device already; None loads ``config.model``.
            head_policy: which tokens each KV head sees; None = the policy of
                ``config.head_policy``, else the checkpoint's, else each head sees everything that
                its layer sees.
            logits_processors: custom processors, applied in this order in every step.
            parallel: this rank of ``config.tensor_parallel_size``; every rank executes the same
                plans, and all draw the same tokens. None = a single rank.
            allocates: whether the KV cache is allocated now; if not, the caller has to call
                ``allocate_kv_cache`` before the first step.
            progress: show progress bars while a model is downloaded, weights load and CUDA graphs
                are captured.

        Raises:
            ConfigError: the checkpoint or an option is wrong.
            UnsupportedDeviceError: the device does not exist or cannot run mrv1.
            CapacityError: weights, the largest step or the KV cache do not fit.
        """
        self.config = config
        self._parallel = parallel or ParallelContext()
        self._closed = False
        self._unusable: str | None = None
        """Why no step may run now: closed, or weights or cache are not there; None = it may."""
        self._processors = LogitsProcessors(logits_processors)
        self._pending: _Launched | None = None
        """The step that ``forward`` has launched and ``sample`` has to complete."""
        self._kv_listener: KVListener | None = None
        self._start_clock = StartClock()
        self.num_graph_steps = 0
        """Steps that ran as CUDA graphs, sampling included."""
        self.device = resolve_device(config.device)
        tell_of_forks(self)
        self.path = kernel_path(self.device)
        with self._on_device(), within_memory("model", "weights", self.device):
            self._build(model, head_policy, progress)
        self._unusable = _NO_CACHE
        if allocates:
            self.allocate_kv_cache(progress=progress)

    def _build(
        self,
        model: DecoderModel | None,
        head_policy: HeadPolicy | None,
        progress: bool,
    ) -> None:
        """Build everything but the KV cache, with the runner's GPU as the current device."""
        config, device, parallel = self.config, self.device, self._parallel
        if parallel.size != config.tensor_parallel_size or (
            parallel.size > 1 and model is not None
        ):
            raise ConfigError(
                "tensor_parallel_size: expected a ParallelContext of as many ranks and no model "
                f"of the caller's own with {config.tensor_parallel_size}, got {parallel.size} "
                f"ranks and {'no' if model is None else 'a'} model"
            )
        codes = FORMATS.get(config.kv_cache_dtype)
        self._conversion = codes and codes.conversion(device)  # fails before anything loads
        if model is None:  # once: the directory of a Hugging Face id may change between two calls
            checkpoint = Checkpoint.open(config.model, progress=progress)
            config = self.config = replace(config, model=str(checkpoint.path))
        ops = select_ops(self.path)
        if config.debug_sync:
            ops = synced(ops, device)
        # Small files come before the weights: an error in one fails at once, not minutes later.
        self.model_config = model_config = (
            ModelConfig.from_pretrained(config.model, generation_config=config.generation_config)
            if model is None
            else model.config
        )
        parallel.shard(model_config)  # a model that cannot be divided fails here
        self.max_model_len = resolve_max_model_len(
            config.max_model_len, model_config.max_model_len
        )
        self.head_policy = resolve_policy(
            config, model_config, head_policy, is_checkpoint=model is None
        )
        """Which tokens each KV head sees."""
        groups = resolve_head_groups(config, self.head_policy, self.max_model_len)
        self.head_groups = groups.slice(parallel.rank, parallel.size)
        """Which of this rank's KV heads share blocks."""
        head_scales = None
        if config.kv_scale == "head":
            head_scales = Checkpoint.open(config.model).kv_scales(
                model_config.num_layers,
                model_config.num_kv_heads,
                has_vision=model_config.vision is not None,
            )
            own_heads = (*head_scales.shape[:2], self.head_groups.policy.num_kv_heads)
            head_scales = head_scales[parallel.part(head_scales.shape, own_heads)]
        dtype = (
            resolve_dtype(dtype_name(config.dtype), model_config.torch_dtype, device)
            if model is None
            else model.dtype
        )
        # Sizes that can be known to be too large are refused before weights load.
        fields = DeviceStep.fields(config, model_config, self.head_groups, self.max_model_len)
        field_starts(config.max_num_seqs, fields)
        FeatureBuffer.rows_of(config, model_config, dtype)
        with self._kernels_compiled(dtype, progress=progress):
            self.model = model or load_model(
                config.model,
                device=device,
                dtype=dtype,
                ops=ops,
                progress=progress,
                parallel=parallel,
                deterministic=config.deterministic,
            )
            self._start_clock.lap("weights")
        self._start_clock.lap("kernels")
        if self.model.deterministic != config.deterministic:
            raise ConfigError(
                f"model: expected one with deterministic={config.deterministic}, as configured"
            )
        self.spec = CacheSpec.of(config, self.model)
        self._streaming_demand = StreamingDemand(config, self.max_model_len)
        with within_memory("max_num_seqs", "the state of requests", device):
            self._step = step = DeviceStep(
                config,
                self.model,
                ops,
                self.spec,
                self.head_groups,
                self.max_model_len,
                head_scales=head_scales,
                processors=self._processors,
            )
        self.attention, self.sampler, self.features = step.attention, step.sampler, step.features
        self.state, self.block_tables = step.state, step.block_tables
        self._slots, self._staging, self._outputs = step.slots, step.staging, step.outputs
        self._logprobs = LogprobRequests(config.max_num_seqs, model_config.vocab_size)
        self._next_upload_word = self._slots.first_word(NEXT_UPLOAD, 0)
        self._steady_rows: DeviceRows | None = None
        """Rows of the last step, if it was a captured decode: a steady step reuses them."""
        self._steady_wanted: WantedRows | None = None
        """The log-probabilities of a step of ``_steady_rows``."""
        self._sent: list[DeviceRows | None] = [None] * self._outputs.num_slots
        """By ring slot: the rows of its upload, if the upload has no requests or blocks to add."""
        self._ranges = VisibleRanges(self.device)
        self._graphs = StepGraphs(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.max_model_len,
            config.max_draft_tokens,
        )

    def _kernels_compiled(
        self, dtype: torch.dtype, *, progress: bool
    ) -> AbstractContextManager[None]:
        """Return a context in which weights load; at its end the kernels are compiled."""
        if self.path != "triton" or self.config.attention_backend != "triton" or torch.version.hip:
            return nullcontext()  # FlashInfer compiles its own; a stand-in is an NVIDIA GPU
        kernels = KernelSet(
            config=self.config,
            model_config=self.model_config,
            head_policy=self.head_policy,
            dtype=dtype,
            gpu=device_info(self.device),
        )
        return compiled_beside(kernels, progress=progress)

    def measure_kv_cache_bytes(self) -> int:
        """Return the bytes for a KV cache: configured, or left by the weights and a full step.

        For callers of a runner without a KV cache, who decide on the number of its blocks.

        Raises:
            CapacityError: the largest step or a KV block does not fit.
            RuntimeError: the runner was closed or has a KV cache.
        """
        self._check_without_cache("measure_kv_cache_bytes")
        largest = within_memory("max_num_batched_tokens", "the largest step", self.device)
        with self._on_device(), largest:
            return self.config.kv_cache_memory_bytes or kv_bytes(self._step)

    def allocate_kv_cache(
        self, num_kv_blocks: int | None = None, *, progress: bool = True
    ) -> None:
        """Allocate the KV cache, capture CUDA graphs and compile kernels.

        Args:
            num_kv_blocks: blocks of each full head group; None = as configured.
            progress: show a progress bar while CUDA graphs are captured.

        Raises:
            CapacityError: the largest step or the KV cache does not fit.
            RuntimeError: the runner was closed or has a KV cache.
        """
        self._check_without_cache("allocate_kv_cache")
        step, clock = self._step, self._start_clock
        largest = within_memory("max_num_batched_tokens", "the largest step", self.device)
        with self._on_device(), largest:
            num_blocks = (
                blocks_of_groups(step, self._streaming_demand)
                if num_kv_blocks is None
                else self._streaming_demand.divide(self.head_groups, num_kv_blocks)
            )
            num_blocks = self._parallel.least(num_blocks)
            self.kv_cache = step.kv_cache = step.new_kv_cache(num_blocks)
            self._sleep = SleepMode(self.model, self.kv_cache)
            clock.lap("memory")
            self._capture(progress=progress)
            clock.lap("graphs")
            if self.device.type == "cuda" and self.config.attention_backend == "triton":
                warm_up(step)
                clock.lap("warm-up")
        launches = self.path != "reference"  # without triton nothing is compiled
        self._compilations = watch_compilations() if launches else Counter()
        self._num_warm_up_compilations = self._compilations.total()
        self._unusable = None
        logger.info("%s", self.describe())
        logger.info("%s", clock.describe())

    def _check_without_cache(self, call: str) -> None:
        if self._unusable != _NO_CACHE:
            state = "one that was closed" if self._closed else "one with a KV cache"
            raise RuntimeError(f"{call}: expected a runner without a KV cache, got {state}")

    def _capture(self, *, progress: bool) -> None:
        """Capture a graph of every shape, unless steps cannot run as graphs."""
        if self._step.is_capturable:
            with torch.inference_mode():
                self._step.clear_inputs()
                self._graphs.capture(
                    self._graphs.shapes,
                    self._step.run_padding,
                    self._step.run_tail,
                    self._step.tails,
                    progress=progress,
                )

    def after_fork(self) -> None:
        """Refuse to run in this process, a forked child, if CUDA would not."""
        if self.device.type == "cuda":
            self._unusable = FORKED
            keep_for_ever(self)

    def _on_device(self) -> AbstractContextManager[object]:
        """Return a context in which the runner's GPU is current, for its streams and events."""
        if self.device.type == "cpu" or torch.cuda.current_device() == self.device.index:
            return _NOTHING_TO_DO
        return torch.cuda.device(self.device)

    # --- one step -------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> AsyncOutput:
        """Launch one step and return before the device is done.

        Up to ``config.steps_in_flight`` steps may be launched before the result of the first one
        is read. A row whose request has stopped on the device by then computes nothing.

        With ``config.debug`` every block id that the step needs is checked first; the check makes
        the host wait for the device.

        Raises:
            StepError: the plan contradicts the runner's state, a block id that the step needs is
                outside the pool (only with ``config.debug``), or the launch failed; errors on the
                device are raised by ``AsyncOutput.result``.
            RuntimeError: the runner was closed, sleeps or lacks weights, or a step of ``forward``
                awaits ``sample``.
        """
        return self._guarded(plan, self._execute)

    def forward(self, plan: StepPlan) -> None:
        """Launch one step up to the last layer; ``sample`` must complete it before the next step.

        For steps whose token masks depend on tokens that are not yet known on the host: the caller
        makes the masks while the layers run.

        Raises:
            StepError, RuntimeError: as ``execute``.
        """
        self._guarded(plan, self._forward_only)

    def sample(
        self, bitmask: npt.NDArray[np.int32] | None = None, rows: Sequence[int] = ()
    ) -> AsyncOutput:
        """Launch the sampling of the step of ``forward``.

        Args:
            bitmask: ``[masks, ceil(vocab / 32)]``, bit i of word w set = token 32 w + i may be
                drawn; None = no row has a mask.
            rows: for each mask its row of the plan, no row twice.

        Raises:
            StepError: the launch failed.
            RuntimeError: no step of ``forward`` awaits ``sample``.
            ValueError: ``bitmask`` or ``rows`` are not as described; call ``sample`` again.
        """
        pending = self._pending
        if pending is None:
            raise RuntimeError("sample: expected a step that forward has launched, got none")
        if bitmask is not None:
            expected = [len(rows), self.sampler.limits.mask_words]
            if bitmask.dtype != np.int32 or [*bitmask.shape] != expected:
                raise ValueError(
                    f"bitmask: expected int32 {expected}, a mask for each of rows, got "
                    f"{bitmask.dtype} {list(bitmask.shape)}"
                )
            if len(set(rows)) < len(rows):
                raise ValueError(f"rows: expected different rows, got {[*rows]}")
            if pending.rows.shape.has_drafts:
                raise ValueError("bitmask: expected a step without drafts, got one with some")
        self._pending = None
        return self._guarded(pending.plan, self._sample_only, pending, bitmask, rows)

    def discard(self) -> None:
        """Give up a step that awaits ``sample``, or that an interrupt left half launched.

        Its rows get no token, and all slots are free: every request has to enter again. If
        ``discard`` is interrupted itself, it may be called again.
        """
        self._pending = None
        if not self._closed and self._unusable != FORKED:
            self.state.free_all()
            with self._on_device(), suppress(torch.AcceleratorError):  # the GPU may have failed
                self._give_up()

    @property
    def captures_graphs(self) -> bool:
        """Whether steps run as CUDA graphs."""
        return self._step.is_capturable

    @property
    def prompt_graph_sizes(self) -> tuple[int, ...]:
        """Prompt tokens of the graphs that run steps with prompts, in rising order; () = none."""
        return self._graphs.prompt_sizes if self.captures_graphs else ()

    @property
    def num_feature_rows(self) -> int:
        """Rows of the buffer for features of multimodal items; 0 = it takes none."""
        return self.features.num_rows

    def prepared(self, item: MultimodalItem) -> MultimodalItem:
        """Return an item for ``StepPlan``, which can be staged without a wait of the host.

        Raises:
            RequestError: the features do not fit the model's hidden size or dtype.
        """
        return self.features.prepared(item)

    def _guarded(
        self, plan: StepPlan, launch: Callable[[StepPlan, *Args], Result], *args: *Args
    ) -> Result:
        """Return ``launch(plan, *args)``; an exception becomes this step's ``StepError``."""
        if self._unusable is not None:
            raise RuntimeError(self._unusable)
        if self._pending is not None:
            raise self._awaits_sample(self._pending)
        try:
            with self._on_device():
                if plan.staged_features and not self.features.is_used:
                    self._allocate_features()
                return launch(plan, *args)
        except Exception as error:
            raise StepError(
                str(error),
                step_id=plan.step_id,
                req_ids=plan.req_ids,
                device_lost=_is_of_device(error),
            ) from error

    def _allocate_features(self) -> None:
        """Allocate the buffer for features, which graphs read: wait, and capture them again."""
        self._outputs.drain()
        self._synchronize()
        try:
            self.features.allocate()
            self._capture_again()
        except BaseException:
            self.features.free()
            self._capture_again()
            raise
        self.features.is_used = True

    @staticmethod
    def _awaits_sample(pending: _Launched) -> RuntimeError:
        return RuntimeError(
            f"ModelRunner: expected sample for step {pending.plan.step_id}, which forward has "
            "launched, before the next step"
        )

    def _execute(self, plan: StepPlan) -> AsyncOutput:
        rows, staged = self._prepare(plan)
        try:
            return self._complete(self._launch(plan, rows, staged))
        except BaseException:  # also an interrupt: a part of the step may have been launched
            self.state.drop(plan)
            self._give_up()
            raise

    def _forward_only(self, plan: StepPlan) -> None:
        rows, staged = self._prepare(plan, samples=False)
        try:
            self._pending = self._launch(plan, rows, staged)
        except BaseException:
            self.state.drop(plan)
            self._give_up()
            raise

    def _sample_only(
        self,
        plan: StepPlan,
        launched: _Launched,
        bitmask: npt.NDArray[np.int32] | None,
        rows: Sequence[int],
    ) -> AsyncOutput:
        try:
            return self._complete(launched, bitmask, rows)
        except BaseException:
            self.state.drop(plan)
            self._give_up()
            raise

    def _give_up(self) -> None:
        self._outputs.give_up()
        self._slots[NEXT_UPLOAD].fill_(self._outputs.next_slot)

    def _prepare(
        self, plan: StepPlan, *, samples: bool = True
    ) -> tuple[DeviceRows, Staged | None]:
        """Check the plan and write the step's upload.

        Args:
            plan: the step's plan.
            samples: whether sampling may be launched together with the layers.

        Returns:
            The step's rows, and its upload; None = a graph runs the step and knows its place.
        """
        self.state.leave(plan)
        upload = StepUpload()
        try:
            self._stage(plan, upload)
        except BaseException:
            self.state.refuse(plan)
            raise
        try:
            self.state.advance_on_host(plan)
            return self._sent_rows(plan, upload, samples)
        except BaseException:
            self.state.drop(plan)
            raise

    def _sent_rows(
        self, plan: StepPlan, upload: StepUpload, samples: bool
    ) -> tuple[DeviceRows, Staged | None]:
        """Send the upload of a step; arguments and result as in ``_prepare``."""
        slot, continues = self._outputs.acquire(), plan.continues is not None
        rows = self._steady_rows if samples and continues else None
        if rows is not None and self._sent[slot] is rows and not plan.new_block_ids:
            return rows, None  # the ring slot has the same upload already, word for word
        upload.put(self._next_upload_word, ((slot + 1) % self._outputs.num_slots,))
        if rows is None or not self._staging.fits(upload):
            rows, self._steady_wanted = self._rows(plan, upload, samples), None
            is_steady = samples and rows.is_captured and rows.shape.query_len == 1
            self._steady_rows = rows if is_steady else None
        num_sources = 0
        if self.features.has_items:
            num_sources = self.features.put_sources(plan, self._num_before(plan), rows, upload)
        words = self._staging.send(
            slot,
            upload,
            rows.idx_mapping,
            rows.query_lens,
            drafts=rows.draft_token_ids,
            is_captured=rows.is_captured,
            num_sources=num_sources,
        )
        self._sent[slot] = rows if continues and not plan.new_block_ids else None
        if rows.is_captured:
            return rows, None
        num_rows, drafts = rows.shape.num_rows, rows.draft_token_ids
        return rows, self._staging.staged(words, upload, num_rows, drafts)

    def _stage(self, plan: StepPlan, upload: StepUpload) -> None:
        """Check the plan; add its changes of the slots to the upload."""
        if plan.staged_features:
            self.features.stage(plan)
        self.state.stage(plan, upload)
        if plan.continues is None:
            self.features.enter(plan)
            self._ranges.enter(plan)
        for request in plan.entering:
            self._check_token_ids(request)
            self._logprobs.enter(request)
            self._processors.add_request(request.slot, request.sampling_params, request.token_ids)
            fields = self.sampler.enter(
                request.sampling_params,
                request.seed,
                child=request.child,
                banned_token_sequences=request.banned_token_sequences,
            )
            for name, values in fields.items():
                first = self._slots.first_word(name, request.slot, values.nbytes // 4)
                upload.write(first, values)
        # Last, as only a plan that nothing refuses may have its blocks counted.
        self.block_tables.stage(
            plan, self.state.num_computed_tokens_np, self.kv_cache.num_blocks, upload
        )

    def _check_token_ids(self, request: SlotRequest) -> None:
        token_ids, vocab_size = np.asarray(request.token_ids), self.model_config.vocab_size
        if not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
            raise ValueError(
                f"token_ids of {request.req_id!r}: expected ids in [0, {vocab_size}), got "
                f"{token_ids.min()} to {token_ids.max()}"
            )

    def _rows(self, plan: StepPlan, upload: StepUpload, samples: bool) -> DeviceRows:
        """Return the step's rows, padded to the shape of a graph if one has room for them."""
        masked = None
        if self._ranges.has_requests:
            masked = self._ranges.masked_rows(plan, self._num_before(plan))
        shape = StepShape.of(
            plan.num_scheduled_tokens,
            masked=masked,
            has_drafts=any(plan.draft_token_ids),
            samples=samples
            and not self._processors
            and not self._logprobs.any(plan.slots, self._num_before(plan)),
        )
        query_len = 1 + self.config.max_draft_tokens
        if shape.has_drafts and query_len > 1:  # no other length, which would be compiled first
            if self._may_pad_drafts(plan, masked, query_len):
                shape = StepShape.drafts(shape.num_rows, query_len, samples=shape.samples)
            else:
                shape = replace(shape, query_len=None)
        captured = None  # a graph has no ranges of keys
        if (
            masked is None
            and self._staging.fits(upload)
            and (self._kv_listener is None or shape.query_len == 1)
        ):
            captured = self._graphs.fit(shape)
        slots = self._processors.without_refused(plan.slots)
        return DeviceRows.of(plan, slots, shape, captured, masked)

    def _may_pad_drafts(
        self, plan: StepPlan, masked: npt.NDArray[np.bool_] | None, query_len: int
    ) -> bool:
        """Whether each row's query may begin earlier, so that all rows have ``query_len`` tokens.

        The added tokens are in the cache already. A head that streams may have lost their keys,
        and features have their places among the tokens of the plan.
        """
        query_lens = plan.num_scheduled_tokens
        return (
            masked is None
            and not self.features.has_items
            and self.config.attention_backend == "triton"
            and self.state.all_rows_end
            and int(query_lens.max()) <= query_len
            and (
                int(query_lens.min()) == query_len
                or all(group.keeps.is_full for group in self.head_groups.groups)
            )
        )

    def _num_before(self, plan: StepPlan) -> Int32Array:
        """Return the tokens of each row computed before the step, which the mirrors count."""
        return self.state.num_computed_tokens_np[plan.slots] - plan.num_scheduled_tokens

    def _launch(self, plan: StepPlan, rows: DeviceRows, staged: Staged | None) -> _Launched:
        """Launch a graph of the step or of its layers, or the layers kernel by kernel."""
        self._outputs.start()
        on_kv_written = None
        if self._kv_listener is not None:
            tokens = tokens_of(plan, self._num_before(plan), self.block_tables)
            on_kv_written = partial(
                tell, self._kv_listener, plan, tokens, self.kv_cache.layers, self.device
            )
        if staged is None:
            forwarded = self._graphs.replay(rows.shape)
            if on_kv_written is not None:
                on_kv_written(*range(self.spec.num_layers))
            return _Launched(plan, rows, forwarded)
        with torch.inference_mode():
            forwarded = self._step.forward(
                rows.shape,
                staged,
                query_lens=rows.placed(plan.num_scheduled_tokens),
                seq_lens=rows.placed(self.state.num_computed_tokens_np[plan.slots]),
                attn_mask_offsets=self._ranges.of_step(plan, self._num_before(plan), rows)
                if rows.is_masked
                else None,
                check=partial(check_block_ids, plan, rows, self.kv_cache)
                if self.config.debug
                else None,
                on_kv_written=on_kv_written,
            )
        return _Launched(plan, rows, forwarded)

    def _complete(
        self,
        launched: _Launched,
        bitmask: Int32Array | None = None,
        masked_rows: Sequence[int] = (),
    ) -> AsyncOutput:
        """Launch the sampling after a step's layers, unless a graph has; return the output."""
        plan, rows, forwarded = launched
        logprobs: Sequence[LogprobReport | StoredLogprobs] = ()
        prompt_logprobs: Sequence[LogprobReport] = ()
        if forwarded is None:
            self.num_graph_steps += 1
            num_columns = rows.shape.query_len or 1
        else:
            batch, hidden = forwarded
            drafts = batch.staged.draft_token_ids
            num_columns = 1 if drafts is None else 1 + drafts.shape[1]
            with torch.inference_mode():
                logprobs = self._sample_behind(plan, rows, forwarded, bitmask, masked_rows)
                prompt_logprobs = [
                    self._step.report_prompt(part, hidden)
                    for part in self._logprobs.of_prompts(plan, rows, self._num_before(plan))
                ]
        output = AsyncOutput(
            plan,
            *self._outputs.end(rows.shape.num_rows, num_columns),
            rows=rows.of_plan,
            refusals=self._processors.refusals(plan.slots),
            on_output=self.state.take_drafts if rows.shape.has_drafts else None,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        self._outputs.deliver(output)
        return output

    def _sample_behind(
        self,
        plan: StepPlan,
        rows: DeviceRows,
        forwarded: Forwarded,
        bitmask: Int32Array | None,
        masked_rows: Sequence[int],
    ) -> Sequence[LogprobReport | StoredLogprobs]:
        """Launch the sampling after the layers, as a graph if one fits; return log-probabilities.

        Args:
            plan: the step's plan.
            rows: the step's rows.
            forwarded: the input of the sampling.
            bitmask: as in ``sample``.
            masked_rows: rows of the plan, as in ``sample``.
        """
        step, slot = self._step, self._outputs.next_slot
        if rows is not self._steady_rows or self._steady_wanted is None:
            self._steady_wanted = self._logprobs.of_outputs(plan, rows)
        wanted = self._steady_wanted
        tail = self._tail(rows, wanted, has_masks=bitmask is not None)
        if bitmask is not None or (tail is not None and tail.masks):
            places = np.array([rows.place(row) for row in masked_rows], dtype=np.int32)
            step.masks.put(slot, bitmask, places)
        if tail is None:
            masks = None if bitmask is None else step.masks.first(len(bitmask))
            return step.sample(*forwarded, wanted, masks)
        self._graphs.replay_tail(rows.shape, tail)
        self.num_graph_steps += 1
        return [step.logprobs.send(slot, rows.shape.num_rows, wanted)] if wanted else []

    def _tail(self, rows: DeviceRows, wanted: WantedRows, *, has_masks: bool) -> Tail | None:
        """Return the captured sampling that the step needs; None = none has all of it."""
        if not rows.is_captured:
            return None
        if wanted.has_token_ids or wanted.num_top > self._step.logprobs.num_top:
            return None
        least = Tail(masks=has_masks or wanted.edits, logprobs=bool(wanted))
        for tail in (least, least._replace(masks=True)):  # a row without a mask may draw any token
            if self._graphs.has_tail(rows.shape, tail):
                return tail
        return None

    def set_kv_listener(self, listener: KVListener | None) -> None:
        """Tell ``listener`` of the keys and values of every step launched from now on.

        Args:
            listener: see ``KVListener``; None = no listener, which costs nothing.
        """
        self._kv_listener = listener
        self.block_tables.keep_ids(listener is not None)

    # --- memory and weights ---------------------------------------------------------------

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are asleep."""
        return self._sleep.is_sleeping

    def check_usable(self) -> None:
        """Raise unless steps may run.

        Raises:
            RuntimeError: the runner was closed, sleeps or lacks weights.
        """
        if self._unusable is not None:
            raise RuntimeError(self._unusable)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights, KV cache and CUDA graphs until ``wake_up``.

        The caller has ended or preempted every request: all keys and values are lost. Results of
        launched steps remain. What sleeps already stays asleep. A model that the caller passed
        loses its weights too.

        Args:
            level: 1 = keep a copy of the weights in pinned host memory (on a CPU they stay where
                they are); 2 = drop the weights: ``update_weights`` has to write every tensor
                before the next step.

        Raises:
            ConfigError: there is no such level, or torch cannot free the model's weights.
            CapacityError: the host has no room for the weights; nothing has changed.
            RuntimeError: the runner was closed, or a step of ``forward`` awaits ``sample``.
        """
        with self._between_steps():
            self._sleep.sleep(level)
            self.features.free()
            self._graphs.clear()
            self._release_cached_memory()

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Allocate the memory again, restore the weights, and capture CUDA graphs again.

        Graphs are captured once nothing sleeps any more. What is awake stays as it is.

        Args:
            tags: what shall wake up, "weights" or "kv_cache"; None = both.

        Raises:
            ConfigError: there is no such tag.
            CapacityError: the device has no room; what slept sleeps on.
            RuntimeError: as ``sleep``.
        """
        with self._between_steps():
            try:
                self._sleep.wake_up(tags, self._make_ready)
            except BaseException:
                self._release_cached_memory()
                raise

    def update_weights(self, named_tensors: NamedTensors, *, partial: bool = False) -> None:
        """Overwrite weights in place, so that CUDA graphs stay valid; wait until it is done.

        Steps launched before use the old weights. Keys and values in the cache are those of the
        old weights, too.

        Args:
            named_tensors: as in ``LLM.update_weights``.
            partial: as in ``LLM.update_weights``.

        Raises:
            ConfigError: a tensor is missing, unknown, given twice or of another shape or type;
                no weight was changed.
            RuntimeError: as ``sleep``, or the weights are asleep.
        """
        with self._between_steps():
            self._sleep.update_weights(named_tensors, partial=partial)

    def _make_ready(self) -> None:
        """Allocate the buffer for features, if it is used, and capture graphs again."""
        try:
            if self.features.is_used:
                self.features.allocate()
            self._capture_again()
        except BaseException:
            self.features.free()
            raise

    def _capture_again(self) -> None:
        self._graphs.clear()
        self._steady_rows = None
        try:
            self._capture(progress=False)
        except BaseException as error:
            self._graphs.clear()
            if isinstance(error, torch.OutOfMemoryError):
                raise CapacityError(
                    f"CUDA graphs: expected room on {self.device}, got less; free memory there "
                    "and try again"
                ) from error
            raise

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Wait for launched steps and for the work inside; then note whether steps may run."""
        if self._unusable in (_CLOSED, _NO_CACHE, FORKED):
            raise RuntimeError(self._unusable)
        if self._pending is not None:
            raise self._awaits_sample(self._pending)
        with self._on_device():
            self._outputs.drain()
            self._synchronize()
            self._unusable = "wake_up: expected a call after an interrupt, got none"
            try:
                yield
                self._synchronize()
            finally:
                self._unusable = self._sleep.refusal

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _release_cached_memory(self) -> None:
        """Give the memory that torch has cached back to the device."""
        if self.device.type == "cuda":
            # cuBLAS never frees its workspace by itself; torch has only a private call to do so.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    # --- reports --------------------------------------------------------------------------

    @property
    def num_staging_waits(self) -> int:
        """How often a launch waited for the older step that used the same pinned buffers."""
        return self._outputs.num_waits

    @property
    def gpu_seconds(self) -> float:
        """Seconds that the GPU has worked on finished steps; 0 on a CPU."""
        return self._outputs.gpu_seconds

    @property
    def start_seconds(self) -> dict[str, float]:
        """Seconds of each part of the start: weights, kernels, ranks, memory, graphs, warm-up."""
        return dict(self._start_clock.seconds)

    @property
    def num_compilations(self) -> int:
        """How often Triton has compiled or loaded a kernel since the runner was built."""
        return self._compilations.total() - self._num_warm_up_compilations

    def describe(self) -> str:
        """Return one line: device, path, dtypes, blocks and their bytes."""
        num_graphs = len(self._graphs.shapes) if self._step.is_capturable else 0
        return describe_runner(
            self.config, self.path, self.model, self.kv_cache, self._conversion, num_graphs
        )

    def kv_report(self) -> KVReport:
        """Return the KV cache's sizes in bytes."""
        return report_of(self.kv_cache, self._streaming_demand, self.features.nbytes)

    def close(self) -> None:
        """Free the device memory; the runner cannot be used afterwards.

        In a forked child the memory of a GPU stays the parent's.
        """
        is_elsewhere = self.device.type == "cuda" and self._unusable == FORKED
        self._closed, self._unusable = True, _CLOSED
        if is_elsewhere:
            return  # every call of CUDA fails here, and so would the end of a tensor or an event
        # Steps in flight write to pinned memory, which torch reuses as soon as it is freed.
        with suppress(torch.AcceleratorError):  # a GPU that has failed runs nothing any more
            self._synchronize()
        for name in (
            "model", "attention", "kv_cache", "state", "block_tables", "sampler", "features",
            "_step", "_slots", "_staging", "_outputs", "_graphs", "_sleep",
        ):  # fmt: skip
            self.__dict__.pop(name, None)
        gc.collect()
        self._release_cached_memory()
