"""One step, from a plan to tokens on their way to the host."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from mrv1.config import EngineConfig
from mrv1.device import kernel_path, resolve_device
from mrv1.errors import StepError
from mrv1.forks import keep_for_ever, tell_of_forks
from mrv1.headwise import HeadPolicy
from mrv1.kernels._base.compilations import watch_compilations
from mrv1.models import DecoderModel, ModelConfig, NamedTensors, ParallelContext
from mrv1.models.lora import StoredAdapter
from mrv1.multimodal import MultimodalItem
from mrv1.runner.async_output import AsyncOutput
from mrv1.runner.cuda_graph import Forwarded
from mrv1.runner.debug import check_block_ids
from mrv1.runner.device_memory import release_cached_memory, within_memory
from mrv1.runner.device_step import DeviceStep
from mrv1.runner.kv_listener import EachRank, KVListener
from mrv1.runner.launches import Launches, LayersLaunch
from mrv1.runner.layer_calls import Listening
from mrv1.runner.logprobs import LogprobReport, StoredLogprobs
from mrv1.runner.preparation import StepPreparation
from mrv1.runner.profile import kv_bytes
from mrv1.runner.report import StartClock
from mrv1.runner.rows import DeviceRows
from mrv1.runner.runner_reports import RunnerReports
from mrv1.runner.sleep import SleepMode
from mrv1.runner.staging import HostMemory, Sent
from mrv1.runner.start import RunnerParts, allocate_cache, build_parts, with_policy
from mrv1.runner.step import Int32Array, StepPlan
from mrv1.sampler import LogitsProcessor, LogitsProcessors

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_NOTHING_TO_DO: AbstractContextManager[None] = nullcontext()

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


def is_caused_by(
    error: BaseException | None, kind: type[BaseException] | tuple[type[BaseException], ...]
) -> bool:
    """Whether the error, or one in its chain of causes, is of a kind."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__
    return error is not None


class ModelRunner(RunnerReports):
    """Executes the steps a scheduler plans; makes no scheduling decisions itself.

    Only one host thread may call it. On a GPU all work goes to the current stream, and ``execute``
    returns before the GPU is done.
    """

    LOST: tuple[type[BaseException], ...] = (torch.AcceleratorError,)
    """Errors after which the runner can launch nothing."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: DecoderModel | None = None,
        model_config: ModelConfig | None = None,
        head_policy: HeadPolicy | None = None,
        logits_processors: Sequence[LogitsProcessor] | LogitsProcessors = (),
        parallel: ParallelContext | None = None,
        memory: HostMemory | None = None,
        allocates: bool = True,
        progress: bool = True,
    ) -> None:
        """Load the model, measure the memory and allocate the KV cache.

        Args:
            config: the runner's configuration.
            model: a model that is on the device already; None loads ``config.model``.
            model_config: what ``read_config`` has read, together with ``config``; None reads it.
            head_policy: which tokens each KV head sees; None = that of ``config.head_policy``,
                else the checkpoint's, else each head sees everything that its layer sees.
            logits_processors: custom processors, applied in this order in every step; of several
                ranks, which all have to be given as many, by the first alone.
            parallel: this rank of several, which execute the same plans; None = a single rank.
            memory: where the buffers are that the host writes for the device, which ranks may
                share; None = in pinned memory of this process.
            allocates: False = ``allocate_kv_cache`` has to be called before the first step.
            progress: show progress bars of download, loading and capture.

        Raises:
            ConfigError: the checkpoint or an option is wrong.
            UnsupportedDeviceError: the device does not exist or cannot run mrv1.
            CapacityError: weights, the largest step or the KV cache do not fit.
        """
        super().__init__()
        self._parallel = parallel or ParallelContext()
        self._closed = False
        self._unusable: str | None = None
        """Why nothing may run: closed, forked, or no cache yet; None = it may unless it sleeps."""
        self._waiting: Callable[[str], AbstractContextManager[object]] | None = None
        """``AsyncOutput``'s."""
        self._pending: _Launched | None = None
        """The step that ``forward`` has launched and ``sample`` has to complete."""
        self._start_clock = StartClock()
        self.device = resolve_device(config.device)
        tell_of_forks(self)
        self.path = kernel_path(self.device)
        with self._on_device(), within_memory("model", "weights", self.device):
            parts = build_parts(
                config,
                self.device,
                model=model,
                model_config=model_config,
                head_policy=head_policy,
                processors=LogitsProcessors.of(logits_processors),
                parallel=self._parallel,
                memory=memory,
                clock=self._start_clock,
                progress=progress,
            )
            heads = parts.model_config.num_kv_heads
            self.listening = Listening(parts.step, heads, self._capture_again)
            self._take_parts(parts)
        if allocates:
            self.allocate_kv_cache(progress=progress)

    def _take_parts(self, parts: RunnerParts) -> None:
        """Run with these parts, once they have a KV cache."""
        self._parts, self._step = parts, parts.step
        self._preparation = StepPreparation(parts.step)
        self._launches: Launches = parts.step
        self.config, self.head_policy = parts.config, parts.head_policy
        self.model, self.model_config = parts.step.model, parts.step.model.config
        self.spec, self.head_groups = parts.step.spec, parts.step.head_groups
        self.max_model_len = parts.step.max_model_len
        self.attention, self.sampler = parts.step.attention, parts.step.sampler
        self.features, self.state = parts.step.features, parts.step.state
        self.block_tables, self._outputs = parts.step.block_tables, parts.step.outputs
        self._unusable = _NO_CACHE

    def measure_kv_cache_bytes(self) -> int:
        """Return the bytes for a KV cache: configured, or left by the weights and a full step.

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
        clock = self._start_clock
        with self._on_device():
            allocate_cache(
                self._parts, num_kv_blocks, parallel=self._parallel, clock=clock, progress=progress
            )
            self.kv_cache = self._step.kv_cache
            self._sleep = SleepMode(self._step, self._parts.model_config, self._parallel)
        launches = self.path != "reference"  # without triton nothing is compiled
        self._compilations = watch_compilations() if launches else Counter()
        self._num_warm_up_compilations = self._compilations.total()
        self._unusable = None
        logger.info("%s", self.describe())
        logger.info("%s", clock.describe())

    @property
    def has_kv_cache(self) -> bool:
        """Whether there is a KV cache, be it asleep; not before ``allocate_kv_cache``."""
        return self._unusable != _NO_CACHE

    def _check_without_cache(self, call: str) -> None:
        if self.has_kv_cache:
            state = "one that was closed" if self._closed else "one with a KV cache"
            raise RuntimeError(f"{call}: expected a runner without a KV cache, got {state}")

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

        Up to ``config.steps_in_flight`` steps may be launched before the first one's result is
        read. A row whose request has stopped on the device by then computes nothing. With
        ``config.debug`` every block id is checked first, which makes the host wait for the device.

        Raises:
            StepError: the plan contradicts the runner's state, a block id is outside the pool
                (with ``config.debug``), or the launch failed; ``AsyncOutput.result`` raises errors
                on the device.
            RuntimeError: the runner was closed, sleeps, lacks weights or awaits ``sample``.
        """
        return self._run(plan, self._complete)

    def forward(self, plan: StepPlan) -> None:
        """Launch one step up to the last layer; ``sample`` must complete it before the next step.

        For token masks that need tokens not yet known on the host: made while the layers run.

        Raises:
            StepError, RuntimeError: as ``execute``.
        """
        self._run(plan, self._await_sample, samples=False)

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
            self._step.masks.check(bitmask, rows, has_drafts=pending.rows.shape.has_drafts)
        self._pending = None
        complete = partial(self._complete, bitmask=bitmask, masked_rows=rows)
        return self._run(pending.plan, complete, launched=pending)

    def discard(self) -> None:
        """Give up a step that awaits ``sample``, or that an interrupt left half launched.

        Its rows get no token, and all slots are free: every request has to enter again. If
        ``discard`` is interrupted itself, it may be called again.
        """
        self._pending = None
        if not self._closed and self._unusable != FORKED:
            self.state.free_all()
            with self._on_device(), suppress(torch.AcceleratorError):  # the GPU may have failed
                self._launches.give_up()

    def _run(
        self,
        plan: StepPlan,
        finish: Callable[[_Launched], Result],
        *,
        samples: bool = True,
        launched: _Launched | None = None,
    ) -> Result:
        """Prepare and launch a step, unless its layers have been ``launched``, and ``finish`` it.

        ``samples`` says whether a graph may sample, too.
        """
        self.check_usable()
        self._check_sampled()
        try:
            with self._on_device():
                if launched is None:
                    rows, sent = self._prepare(plan, samples=samples)
                try:
                    return finish(launched or self._launch(plan, rows, sent))
                except BaseException:  # an interrupt, too, may leave a step launched in part
                    self.state.drop(plan)
                    self._launches.give_up()
                    raise
        except Exception as error:
            raise StepError(
                str(error),
                step_id=plan.step_id,
                req_ids=plan.req_ids,
                device_lost=is_caused_by(error, self.LOST),  # no call works now
            ) from error

    def _await_sample(self, launched: _Launched) -> None:
        self._pending = launched

    def _prepare(self, plan: StepPlan, *, samples: bool) -> tuple[DeviceRows, Sent | None]:
        """Check the plan and write the step's upload; see ``StepPreparation.prepare``."""
        if plan.staged_features and not self.features.is_used:  # the first items that have some
            with self.between_steps():
                self._sleep.allocate_features()
        return self._preparation.prepare(plan, samples=samples)

    def _launch(self, plan: StepPlan, rows: DeviceRows, sent: Sent | None) -> _Launched:
        """Launch a graph of the step or of its layers, or the layers kernel by kernel."""
        self._outputs.start()
        heard = self.listening.heard(plan)
        calls = self.listening.calls(heard)
        if sent is None:
            forwarded = self._launches.replay(rows.shape, heard)
            if calls is not None:
                calls.after_graph(rows.shape)
            return _Launched(plan, rows, forwarded)
        launch = LayersLaunch(
            shape=rows.shape,
            sent=sent,
            query_lens=rows.placed(plan.num_scheduled_tokens),
            seq_lens=rows.placed(self.state.num_computed_tokens_np[plan.slots]),
            attn_mask_offsets=self._preparation.ranges.of_step(
                plan, self.state.num_before(plan), rows
            )
            if rows.is_masked
            else None,
            heard=heard,
        )
        check = partial(check_block_ids, plan, rows, self.kv_cache) if self.config.debug else None
        forwarded = self._launches.launch_layers(launch, check=check, on_kv_written=calls)
        return _Launched(plan, rows, forwarded)

    def _complete(
        self,
        launched: _Launched,
        bitmask: Int32Array | None = None,
        masked_rows: Sequence[int] = (),
    ) -> AsyncOutput:
        """Launch the sampling (see ``sample``) unless a graph has; return the output."""
        (plan, rows, forwarded), step = launched, self._step
        asked = self._preparation.logprobs
        logprobs: Sequence[LogprobReport | StoredLogprobs] = ()
        prompt_logprobs: Sequence[LogprobReport] = ()
        if forwarded is None:
            self.num_graph_steps += 1
            num_columns = rows.shape.query_len or 1
        else:
            drafts = forwarded[0].staged.draft_token_ids
            num_columns = 1 if drafts is None else 1 + drafts.shape[1]
            launch = step.plan_sampling(
                rows,
                asked.of_outputs(plan, rows),
                bitmask,
                masked_rows,
                asked.of_prompts(plan, rows, self.state.num_before(plan)),
            )
            logprobs, prompt_logprobs = self._launches.launch_sampling(launch, forwarded)
            self.num_graph_steps += launch.tail is not None
        output = AsyncOutput(
            plan,
            *self._outputs.end(rows.shape.num_rows, num_columns),
            rows=rows.places,
            refusals=step.processors.refusals(plan.slots),
            on_output=self._preparation.on_output(plan, rows),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            waiting=self._waiting,
        )
        self._outputs.deliver(output)
        error = self._late_error()
        if error is not None:
            raise error
        return output

    def _late_error(self) -> Exception | None:
        """Return why a step fails that was launched to its end."""
        return self._step.take_late_error()

    @property
    def device_step(self) -> DeviceStep:
        """The launches of a step, for a rank that has no plans."""
        return self._step

    # --- what a step is given -------------------------------------------------------------
    @property
    def captures_graphs(self) -> bool:
        """Whether steps run as CUDA graphs."""
        return self._step.is_capturable

    @property
    def prompt_graph_sizes(self) -> tuple[int, ...]:
        """Prompt tokens of the graphs that run steps with prompts, in rising order; () = none."""
        return self._step.graphs.prompt_sizes if self.captures_graphs else ()

    @property
    def num_feature_rows(self) -> int:
        """Rows of the buffer for features of multimodal items; 0 = it takes none."""
        return self.features.num_rows

    def prepared(self, item: MultimodalItem) -> MultimodalItem:
        """Return an item for ``StepPlan``, which can be staged without a wait of the host.

        RequestError: the features do not fit the model's hidden size or dtype.
        """
        return self.features.prepared(item)

    def load_adapter(self, slot: int, adapter: StoredAdapter) -> None:
        """Write this rank's part of an adapter to a slot, on the stream behind launched steps.

        RuntimeError: the model has no slots.
        """
        self.check_usable()
        if self.model.lora is None:
            raise RuntimeError("load_adapter: expected enable_lora=True, got False")
        config, parallel = self.model.whole_config, self.model.parallel
        rows = parallel.vocab_rows(config.vocab_size)
        with self._on_device():
            self.model.lora.load(slot, adapter.of_rank(config, parallel).placed(rows))

    def set_kv_listener(self, listener: KVListener | EachRank | None) -> None:
        """Tell ``listener`` (None = nobody) of K and V of later steps; as ``Listening.set``."""
        self.listening.set(listener)

    def _capture_again(self) -> None:
        """Capture the graphs again, if there are any, with what they now have to record."""
        if self._step.graphs:
            with self.between_steps():
                self._sleep.capture_again()

    def set_head_policy(self, policy: HeadPolicy | str | None) -> None:
        """Let KV heads see other tokens, with a new KV cache; see ``LLM.set_head_policy``.

        The caller has ended every request. After an error in allocating or compiling, there is no
        cache until a call succeeds.
        """
        if self.has_kv_cache:
            self.check_usable()
            self._check_sampled()
        parts = with_policy(self._parts, policy, self._parallel)
        with self._on_device():
            self._outputs.drain()
            self._synchronize()
            self.count_former_steps()
            self._step.graphs.clear()
            if self.has_kv_cache:
                self.kv_cache.free()
            self._take_parts(parts)
            self.listening.move_to(parts.step)
            gc.collect()
            release_cached_memory(self.device)
        self.allocate_kv_cache(progress=False)

    # --- memory and weights ---------------------------------------------------------------
    @property
    def memory(self) -> SleepMode:
        """The memory of weights and KV cache, which may sleep."""
        return self._sleep

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are asleep."""
        return self._sleep.is_sleeping

    def check_usable(self) -> None:
        """Raise RuntimeError if the runner was closed, sleeps or lacks weights."""
        refusal = self._unusable or self._sleep.refusal
        if refusal is not None:
            raise RuntimeError(refusal)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights, KV cache and CUDA graphs until ``wake_up``: ``LLM.sleep``.

        The caller has ended or preempted every request: all keys and values are lost. Results of
        launched steps remain. A model that the caller passed loses its weights too; ConfigError if
        torch cannot free them. RuntimeError: a step of ``forward`` awaits ``sample``.
        """
        with self.between_steps():
            self._sleep.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Bring memory and graphs back: ``LLM.wake_up``; RuntimeError as ``sleep``."""
        with self.between_steps():
            self._sleep.wake_up(tags)

    def update_weights(self, named_tensors: NamedTensors, *, partial: bool = False) -> None:
        """Overwrite weights in place, so that CUDA graphs stay valid: ``LLM.update_weights``.

        Waits until it is done. Steps launched before use the old weights, and keys and values in
        the cache stay theirs. RuntimeError: as ``sleep``, or the weights are asleep.
        """
        with self.between_steps():
            self._sleep.update_weights(named_tensors, partial=partial)

    def _check_sampled(self) -> None:
        if self._pending is not None:
            raise RuntimeError(
                f"ModelRunner: expected sample for step {self._pending.plan.step_id}, which "
                "forward has launched, before the next step"
            )

    def check_between_steps(self) -> None:
        """Raise RuntimeError if the runner was closed, or a step awaits ``sample``."""
        if self._unusable is not None:
            raise RuntimeError(self._unusable)
        self._check_sampled()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Wait for launched steps, and for the work inside."""
        self.check_between_steps()
        with self._on_device():
            self._outputs.drain()
            self._synchronize()
            self._preparation.forget_rows()
            yield
            self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # --- end ------------------------------------------------------------------------------
    def close(self) -> None:
        """Free the device memory for good; in a forked child that of a GPU stays the parent's."""
        is_elsewhere = self.device.type == "cuda" and self._unusable == FORKED
        self._closed, self._unusable = True, _CLOSED
        if is_elsewhere:
            return  # every call of CUDA fails here, and so would the end of a tensor or an event
        # Steps in flight write to pinned memory, which torch reuses as soon as it is freed.
        with suppress(torch.AcceleratorError):  # a GPU that has failed runs nothing any more
            self._synchronize()
        for name in (
            "model", "attention", "kv_cache", "state", "block_tables", "sampler", "features",
            "_parts", "_step", "_launches", "_preparation", "_outputs", "_sleep", "listening",
        ):  # fmt: skip
            self.__dict__.pop(name, None)
        gc.collect()
        release_cached_memory(self.device)
