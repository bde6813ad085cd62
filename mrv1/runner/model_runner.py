"""One step, from a plan to tokens on their way to the host."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Concatenate, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from mrv1.config import (
    EngineConfig,
    KVScaleName,
    checkpoint_dir,
    resolve_dtype,
    resolve_max_model_len,
)
from mrv1.device import device_info, fp8_path, kernel_path, memory_bytes, resolve_device
from mrv1.errors import ConfigError, StepError
from mrv1.headwise import HeadGroups, HeadPolicy
from mrv1.kernels._base.compilations import watch_compilations
from mrv1.kernels.cache.block_ids import find_bad_block_ids
from mrv1.kernels.registry import select_ops
from mrv1.kernels.step.contracts import MAX_SAMPLED_TOKENS, AppendedTokens
from mrv1.models import DecoderModel, ModelConfig, load_kv_scales, load_model
from mrv1.models.files import read_json
from mrv1.runner import input_batch
from mrv1.runner.async_output import AsyncOutput, OutputRing
from mrv1.runner.attention_backends import select_backend
from mrv1.runner.block_table import BlockTables
from mrv1.runner.cuda_graph import StepGraphs
from mrv1.runner.debug_sync import synced
from mrv1.runner.input_batch import InputBatch, StepShape
from mrv1.runner.kv_cache import (
    CPU_KV_BYTES,
    CacheSpec,
    KVCache,
    StreamingDemand,
    layer_layouts,
)
from mrv1.runner.kv_report import KVReport, report_of
from mrv1.runner.logprobs import (
    FILTER_CHUNK,
    LOGITS_CHUNK,
    LogprobReport,
    LogprobRequests,
    Wanted,
)
from mrv1.runner.profile import run_profile_step
from mrv1.runner.request_state import RequestState
from mrv1.runner.slot_state import Field, SlotState
from mrv1.runner.staging import Staged, Staging, StepUpload
from mrv1.runner.step import Int32Array, Int64Array, StepPlan
from mrv1.sampler import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcessors,
    Sampler,
    SamplerLimits,
)

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

NEXT_UPLOAD = "next_upload"
"""The slot, in the ring of uploads, of the next step: each step's upload sets the next one's."""

SEGMENTS_PER_REQUEST = 40
"""Runs of words that a request changes as it enters, and some more."""

_NOTHING_TO_DO = nullcontext()

_SCALED: dict[KVScaleName, str] = {
    "token": "token and head",
    "quarter": "quarter of a block and head",
    "head": "head",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReady:
    """One layer's keys and values of a step are written, as soon as the event has passed."""

    plan: StepPlan
    """The step, its rows in any order: row by row the next ``num_scheduled_tokens`` positions of
    the request in ``slots``, in the blocks that it has been given up to this plan. Nothing is
    written for a request that had stopped, or that a custom processor refused."""
    layer: int
    event: torch.cuda.Event | None
    """Recorded behind the write, or behind the CUDA graph that does it: several layers may share
    one. None on a CPU, where it is done."""


KVListener = Callable[[KVReady], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The rows of a step on the device."""

    shape: StepShape
    """Padding included."""
    is_captured: bool
    """Whether a graph runs the step; else it is launched kernel by kernel."""
    idx_mapping: Int32Array
    """[rows], -1 = padding."""
    query_lens: Int32Array | None
    """[rows]; None = one token each."""
    of_plan: Int32Array | None = None
    """[the plan's rows], where they are; None = in order, in front."""

    @classmethod
    def padded(
        cls, captured: StepShape, shape: StepShape, slots: Int32Array, query_lens: Int32Array
    ) -> Self:
        """Return the rows of a step of ``shape`` in a graph that is larger."""
        of_plan = captured.rows_of(shape)
        idx_mapping = np.full(captured.num_rows, -1, dtype=np.int32)
        idx_mapping[of_plan] = slots
        padded_lens = None
        if captured.query_len is None:
            padded_lens = np.zeros(captured.num_rows, dtype=np.int32)
            padded_lens[: captured.num_decodes] = 1
            padded_lens[of_plan] = query_lens
        return cls(
            shape=captured,
            is_captured=True,
            idx_mapping=idx_mapping,
            query_lens=padded_lens,
            of_plan=None if captured.query_len == 1 else of_plan,
        )

    def in_order_of_plan(self, order: Int64Array | None) -> Int32Array | None:
        """Return ``of_plan`` for a plan whose rows, in this order, are those that are here."""
        if order is None:
            return self.of_plan
        of_ordered = (
            np.arange(len(order), dtype=np.int32) if self.of_plan is None else self.of_plan
        )
        of_plan = np.empty_like(of_ordered)
        of_plan[order] = of_ordered
        return of_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """Log-probabilities that a step is to report of the tokens it draws."""

    wishes: list[Wanted]
    """Of rows of the caller's plan."""
    rows: list[int]
    """Where these are on the device."""

    @classmethod
    def of(
        cls, wishes: list[Wanted], of_plan: Int32Array | None, order: Int64Array | None
    ) -> Self | None:
        """Return what rows of an ordered plan want; None = nothing."""
        if not wishes:
            return None
        rows = [wish.row if of_plan is None else int(of_plan[wish.row]) for wish in wishes]
        return cls(wishes=_in_callers_order(wishes, order), rows=rows)

    def within(self, start: int, end: int) -> Self | None:
        """Return what rows ``[start, end)`` want, counted from ``start``; None = nothing."""
        inside = [
            (wish, row - start)
            for wish, row in zip(self.wishes, self.rows, strict=True)
            if start <= row < end
        ]
        if not inside:
            return None
        wishes, rows = map(list, zip(*inside, strict=True))
        return replace(self, wishes=wishes, rows=rows)

    @property
    def is_leading(self) -> bool:
        """Whether their rows are in front of all others, in order."""
        return self.rows == list(range(len(self.rows)))

    @property
    def edits(self) -> bool:
        """Whether the logits of one of the rows are edited before a token is drawn."""
        return any(wish.edits for wish in self.wishes)

    def picker(
        self, num_columns: int, device: torch.device
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what picks their rows of a tensor, ``num_columns`` of each row of the step.

        It copies, but for rows in front of all others: that is no small part of the logits.
        """
        if self.is_leading:
            return itemgetter(slice(len(self.rows) * num_columns))
        first = torch.tensor(self.rows)[:, None] * num_columns
        rows = (first + torch.arange(num_columns)).flatten().to(device, non_blocking=True)
        return partial(torch.index_select, dim=0, index=rows)


def _in_callers_order(wishes: list[Wanted], order: Int64Array | None) -> list[Wanted]:
    """Return wishes of rows of an ordered plan as such of the plan that was ordered."""
    if order is None:
        return wishes
    return [replace(wish, row=int(order[wish.row])) for wish in wishes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Masks:
    """Which tokens some rows of logits may draw, on the device."""

    bitmask: torch.Tensor
    """[masks, ceil(vocab / 32)] int32."""
    rows: torch.Tensor
    """[masks] int32, rows of the logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step that is about to be launched."""

    rows: _Rows
    upload: StepUpload
    words: torch.Tensor | None
    """The upload on the device, if no kernel has to fetch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forwarded:
    """A step whose layers have been launched."""

    plan: StepPlan
    """As the caller gave it."""
    ordered: StepPlan
    """Rows of one token in front."""
    order: Int64Array | None
    """Of the ordered plan's rows, those of the plan; None = the same."""
    rows: _Rows
    staged: Staged
    batch: InputBatch
    hidden: torch.Tensor
    """[tokens, hidden]."""


def _is_of_device(error: BaseException | None) -> bool:
    """Whether a failed kernel is behind an error: the driver refuses all that comes after it."""
    while error is not None and not isinstance(error, torch.AcceleratorError):
        error = error.__cause__
    return error is not None


def _decodes_first(plan: StepPlan) -> tuple[StepPlan, Int64Array | None]:
    """Return the plan with its rows of one token in front, and where they were; None = there."""
    query_lens = plan.num_scheduled_tokens
    if query_lens.max() == 1:
        return plan, None
    order = np.argsort(query_lens != 1, kind="stable")
    if (order[1:] > order[:-1]).all():
        return plan, None
    ordered = replace(
        plan,
        req_ids=tuple(plan.req_ids[row] for row in order),
        slots=plan.slots[order],
        epochs=plan.epochs[order],
        num_scheduled_tokens=query_lens[order],
        draft_token_ids=tuple(plan.draft_token_ids[row] for row in order)
        if plan.draft_token_ids
        else (),
    )
    return ordered, order


class ModelRunner:
    """Executes the steps a scheduler plans; makes no scheduling decisions itself.

    One host thread calls it. On a GPU all work goes to the current stream, and ``execute`` returns
    before the GPU is done.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: DecoderModel | None = None,
        head_policy: HeadPolicy | None = None,
        per_head_ids: bool = False,
        logits_processors: Sequence[LogitsProcessor] = (),
        progress: bool = True,
    ) -> None:
        """Load the model, measure the memory and allocate the KV cache.

        Args:
            config: what to build.
            model: a model that is on the device already; None loads ``config.model``.
            head_policy: what each KV head sees; None = what ``config.head_policy`` or the
                checkpoint says, else all that its layer does.
            per_head_ids: every KV head index is a head group of its own, whose blocks the caller
                of ``execute`` manages: a table of full width for each, and nothing is recycled.
            logits_processors: applied in this order in every step.
            progress: show a progress bar while weights load.

        Raises:
            ConfigError: the checkpoint or an option is wrong.
            UnsupportedDeviceError: the device is not there or cannot run mrv1.
            CapacityError: the KV cache does not fit.
        """
        self.config = config
        self._closed = False
        self._processors = LogitsProcessors(logits_processors)
        self._given_policy = head_policy
        self._per_head_ids = per_head_ids
        self._pending: _Forwarded | None = None
        """The step of ``forward`` that ``sample`` is to complete."""
        self._kv_listener: KVListener | None = None
        self.num_graph_steps = 0
        """Steps that were one CUDA graph."""
        self.device = resolve_device(config.device)
        self.path = kernel_path(self.device)
        with self._on_device():
            self._build(config, model, progress)
        logger.info("%s", self.describe())

    def _build(self, config: EngineConfig, model: DecoderModel | None, progress: bool) -> None:
        """Do what the constructor promises."""
        is_fp8 = config.kv_cache_dtype == "fp8_e4m3"
        self._fp8 = fp8_path(self.device) if is_fp8 else None  # refused before anything loads
        self._ops = select_ops(self.path)
        if config.debug_sync:
            self._ops = synced(self._ops, self.device)
        self.model_config = (
            ModelConfig.from_pretrained(checkpoint_dir(config.model))
            if model is None
            else model.config
        )
        # Small files come before the weights: a mistake in one fails at once, not minutes later.
        self.max_model_len = resolve_max_model_len(
            config.max_model_len, self.model_config.max_model_len
        )
        self.head_policy = self._resolve_policy(is_checkpoint=model is None)
        """What each KV head sees."""
        self.head_groups = self._resolve_groups()
        """Which of them share blocks."""
        self._head_scales = (
            load_kv_scales(checkpoint_dir(config.model), self.model_config)
            if is_fp8 and config.kv_scale == "head"
            else None
        )
        self.model = model or self._load_model(progress)
        if self.model.deterministic != config.deterministic:
            raise ConfigError(
                f"model: expected one with deterministic={config.deterministic}, as configured"
            )
        self.spec = CacheSpec(
            num_layers=self.model_config.num_layers,
            num_kv_heads=self.model_config.num_kv_heads,
            block_size=config.block_size,
            head_dim=self.model_config.head_dim,
            dtype=torch.float8_e4m3fn if is_fp8 else self.model.dtype,
            granularity=config.kv_scale if is_fp8 else None,
        )
        self._streaming_demand = StreamingDemand(
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            steps_in_flight=config.steps_in_flight,
            cache_blocks=config.streaming_cache_blocks,
            caches_prefixes=config.enable_prefix_caching,
        )
        groups = self.head_groups.groups
        self.attention = select_backend(
            config.attention_backend,
            self.model,
            self.spec,
            layer_layouts(self.spec, self.head_groups, [1] * len(groups), self.device),
        )
        num_slots, depth = config.max_num_seqs, config.steps_in_flight
        limits = SamplerLimits(
            vocab_size=self.model_config.vocab_size,
            max_bad_words_num=config.max_bad_words_num,
            bad_words_max_len=config.bad_words_max_len,
            max_logit_bias=config.max_logit_bias,
        )
        sampling = {
            name: Field(dtype=dtype, width=width)
            for name, (dtype, width) in Sampler.fields(limits).items()
        }
        self._slots = SlotState(
            num_slots,
            {
                **RequestState.fields(
                    self.max_model_len,
                    max_stop_seqs_num=config.max_stop_seqs_num,
                    stop_seqs_max_len=config.stop_seqs_max_len,
                ),
                **BlockTables.fields(groups),
                **sampling,
                NEXT_UPLOAD: Field(is_shared=True),
            },
            self.device,
        )
        self.state = RequestState(self._slots, num_slots, self.max_model_len)
        self.block_tables = BlockTables(self._slots, num_slots, groups, config.block_size)
        self.sampler = Sampler(
            num_slots, limits, {name: self._slots[name] for name in sampling}, self._ops
        )
        self._history = self.state.history()
        self._logprobs = LogprobRequests(num_slots)
        num_rows = 2 * num_slots  # a graph may have room for all in decodes and in prompts
        self._outputs = OutputRing(num_rows, MAX_SAMPLED_TOKENS, depth, self.device)
        self._staging = Staging(
            num_rows, num_slots * SEGMENTS_PER_REQUEST, self._outputs.num_slots, self.device
        )
        self._next_upload_word = self._slots.first_word(NEXT_UPLOAD, 0)
        self._steady_rows: _Rows | None = None
        """Of the last step, if it was a captured decode: those of one that goes on with it."""
        self._sent: list[_Rows | None] = [None] * self._outputs.num_slots
        """By slot: the rows of the upload that it holds, if that tells of nothing else."""
        self._graphs = self._new_graphs()
        self.kv_cache = self._new_kv_cache(self._num_kv_blocks())
        if self._captures:
            with torch.inference_mode():
                self._graphs.capture(self._graphs.shapes, self._run_padding, progress=progress)
        if self._on_gpu and config.attention_backend == "triton":
            self._warm_up()
        launches = self.path != "reference"  # without triton nothing is compiled
        self._compilations = watch_compilations() if launches else Counter()
        self._num_warm_up_compilations = self._compilations.total()

    # --- one step -------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> AsyncOutput:
        """Launch one step and return before the device is done.

        Up to ``config.steps_in_flight`` steps may be launched before the first one's result is
        taken; a row whose request has stopped by then, on the device, does nothing.

        With ``config.debug`` every block id that the step needs is checked first, and the host
        waits for the device to do so.

        Raises:
            StepError: the plan contradicts the runner's state, a block id that the step needs is
                not of the pool (``config.debug``), or the launch failed; what fails on the device
                comes from ``AsyncOutput.result``.
            RuntimeError: the runner was closed.
        """
        return self._guarded(plan, self._execute)

    def forward(self, plan: StepPlan) -> None:
        """Launch one step up to the last layer; ``sample``, the next call, completes it.

        For steps whose masks depend on tokens that are not known yet: they are computed while the
        layers run.

        Raises:
            StepError, RuntimeError: as ``execute``.
        """
        self._guarded(plan, self._forward_only)

    def sample(
        self, bitmask: npt.NDArray[np.int32] | None = None, rows: Sequence[int] = ()
    ) -> AsyncOutput:
        """Complete the step of ``forward``.

        Args:
            bitmask: ``[masks, ceil(vocab / 32)]``, bit i of word w set = token 32 w + i may be
                drawn; None = no row has a mask.
            rows: of the plan, one for each mask.

        Raises:
            StepError: the launch failed.
            RuntimeError: no step awaits its completion.
            ValueError: ``bitmask`` or ``rows`` are not as described; the step still awaits it.
        """
        pending = self._pending
        if pending is None:
            raise RuntimeError("sample: expected a step that forward has launched, got none")
        if bitmask is not None:
            self._check_bitmask(pending, bitmask, rows)
        self._pending = None
        return self._guarded(pending.plan, self._sample_only, pending, bitmask, rows)

    def discard(self) -> None:
        """Give up a step that awaits ``sample``, or that an interrupt left half launched.

        Its rows get no token. Safe to call again if it is interrupted itself.
        """
        self._pending = None
        if not self._closed:
            with self._on_device(), suppress(torch.AcceleratorError):  # of a GPU that has failed
                self._give_up()

    def _guarded(
        self,
        plan: StepPlan,
        launch: Callable[Concatenate[StepPlan, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Launch something of a step; whatever goes wrong ends this step and no other."""
        if self._closed:
            raise RuntimeError("ModelRunner: expected an open runner, got one that was closed")
        if self._pending is not None:
            raise RuntimeError(
                f"ModelRunner: expected sample for step {self._pending.plan.step_id}, which "
                "forward has launched, before the next step"
            )
        try:
            with self._on_device():
                return launch(plan, *args, **kwargs)
        except Exception as error:
            raise StepError(
                str(error),
                step_id=plan.step_id,
                req_ids=plan.req_ids,
                device_lost=_is_of_device(error),
            ) from error

    def _execute(self, plan: StepPlan) -> AsyncOutput:
        is_decode = self.state.are_known_ones(plan.num_scheduled_tokens)
        ordered, order = (plan, None) if is_decode else _decodes_first(plan)
        step = self._prepare(ordered)
        try:
            self._outputs.start()
            shape = step.rows.shape
            if step.rows.is_captured and shape.samples:
                self._graphs.replay(shape)
                self._tell_kv_of_graph(plan)
                self.num_graph_steps += 1
                return self._deliver(plan, step.rows, order)
            return self._complete(plan, self._launch_layers(plan, ordered, order, step))
        except BaseException:  # an interrupt, too: some of the step may have been launched
            self._give_up()
            raise

    def _forward_only(self, plan: StepPlan) -> None:
        ordered, order = _decodes_first(plan)
        step = self._prepare(ordered, samples=False)
        try:
            self._outputs.start()
            self._pending = self._launch_layers(plan, ordered, order, step)
        except BaseException:
            self._give_up()
            raise

    def _sample_only(
        self,
        plan: StepPlan,
        step: _Forwarded,
        bitmask: npt.NDArray[np.int32] | None,
        rows: Sequence[int],
    ) -> AsyncOutput:
        try:
            masks = None if bitmask is None else self._placed(step, bitmask, rows)
            return self._complete(plan, step, masks)
        except BaseException:
            self._give_up()
            raise

    def _launch_layers(
        self, plan: StepPlan, ordered: StepPlan, order: Int64Array | None, step: _Step
    ) -> _Forwarded:
        """Launch all but the sampling, as a graph or kernel by kernel."""
        shape, forwarded = step.rows.shape, None
        with torch.inference_mode():
            if step.rows.is_captured:
                forwarded = self._graphs.replay(shape)
                self._tell_kv_of_graph(ordered)
                staged = self._staging.static_view(shape.num_rows)
            else:
                staged = self._staging.staged(
                    step.words, step.upload, shape.num_rows, ordered.draft_token_ids
                )
            batch, hidden = forwarded or self._forward(shape, staged, ordered)
        return _Forwarded(
            plan=plan,
            ordered=ordered,
            order=order,
            rows=step.rows,
            staged=staged,
            batch=batch,
            hidden=hidden,
        )

    def _complete(
        self, plan: StepPlan, step: _Forwarded, masks: _Masks | None = None
    ) -> AsyncOutput:
        """Launch what is behind a step's layers."""
        ordered, shape = step.ordered, step.rows.shape
        with torch.inference_mode():
            wanted = _Wanted.of(
                self._logprobs.of_outputs(ordered.slots), step.rows.of_plan, step.order
            )
            outputs = self._post_process(
                shape, step.staged, step.batch, step.hidden, wanted, masks
            )
            prompts = self._report_prompts(ordered, step.order, step.hidden)
        return self._deliver(plan, step.rows, step.order, outputs, prompts)

    def _deliver(
        self,
        plan: StepPlan,
        rows: _Rows,
        order: Int64Array | None,
        logprobs: Sequence[LogprobReport] = (),
        prompt_logprobs: Sequence[LogprobReport] = (),
    ) -> AsyncOutput:
        has_drafts = rows.shape.has_drafts
        return self._outputs.deliver(
            plan,
            num_rows=rows.shape.num_rows,
            num_columns=1 + max(map(len, plan.draft_token_ids)) if has_drafts else 1,
            rows=rows.in_order_of_plan(order),
            refusals=self._processors.refusals(plan.slots),
            on_output=self.state.take_drafts if has_drafts else None,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _give_up(self) -> None:
        self._outputs.give_up()
        self._slots[NEXT_UPLOAD].fill_(self._outputs.next_slot)

    def _check_bitmask(
        self, step: _Forwarded, bitmask: npt.NDArray[np.int32], rows: Sequence[int]
    ) -> None:
        num_words = self.sampler.limits.mask_words
        if bitmask.shape != (len(rows), num_words) or bitmask.dtype != np.int32:
            raise ValueError(
                f"bitmask: expected int32 {[len(rows), num_words]}, a mask for each of rows, got "
                f"{bitmask.dtype} {list(bitmask.shape)}"
            )
        if step.rows.shape.has_drafts:
            raise ValueError("bitmask: expected a step without drafts, got one with some")

    def _placed(
        self, step: _Forwarded, bitmask: npt.NDArray[np.int32], rows: Sequence[int]
    ) -> _Masks:
        """Return masks on the device, for rows of the logits."""
        of_plan = step.rows.in_order_of_plan(step.order)
        places = np.array(rows, dtype=np.int32) if of_plan is None else of_plan[list(rows)]
        return _Masks(
            bitmask=torch.from_numpy(bitmask).to(self.device, non_blocking=True),
            rows=torch.from_numpy(places).to(self.device, non_blocking=True),
        )

    def _prepare(self, plan: StepPlan, *, samples: bool = True) -> _Step:
        """Check the plan and put what it changes where the step finds it.

        Args:
            plan: rows of one token in front.
            samples: whether the step may be launched as a whole.
        """
        upload = StepUpload()
        goes_on = self.state.stage(plan, upload)
        self.block_tables.stage(plan, self.kv_cache.num_blocks, upload)
        for request in plan.entering:
            self._logprobs.enter(request)
            self._processors.add_request(request.slot, request.sampling_params, request.token_ids)
            fields = self.sampler.enter(
                request.sampling_params,
                request.seed,
                child=request.child,
                banned_token_sequences=request.banned_token_sequences,
            )
            for name, values in fields.items():
                upload.write(self._slots.first_word(name, request.slot), values)
        self.state.advance_on_host(plan)
        slot = self._outputs.acquire()
        rows = self._steady_rows if samples and goes_on else None
        if rows is not None and self._sent[slot] is rows and not plan.new_block_ids:
            return _Step(rows=rows, upload=upload, words=None)  # word for word what is there
        upload.put(self._next_upload_word, ((slot + 1) % self._outputs.num_slots,))
        if rows is None or not self._staging.fits(upload):
            rows = self._rows(plan, upload, samples)
            is_steady = samples and rows.is_captured and rows.shape.query_len == 1
            self._steady_rows = rows if is_steady else None
        words = self._staging.send(
            slot, upload, rows.idx_mapping, rows.query_lens, drafts=plan.draft_token_ids
        )
        self._sent[slot] = rows if goes_on and not plan.new_block_ids else None
        return _Step(rows=rows, upload=upload, words=words)

    def _rows(self, plan: StepPlan, upload: StepUpload, samples: bool) -> _Rows:
        """Return the step's rows: the plan's, or those of a graph that has room for them."""
        query_lens = plan.num_scheduled_tokens
        shape = StepShape.of(
            query_lens,
            has_drafts=any(plan.draft_token_ids),
            samples=samples
            and not self._processors
            and not self._logprobs.any(plan.slots, self._num_before(plan)),
        )
        slots = self._processors.without_refused(plan.slots)
        captured = self._captured_shape(shape, upload)
        if captured is None or captured == shape:
            return _Rows(
                shape=shape,
                is_captured=captured is not None,
                idx_mapping=slots,
                query_lens=None if shape.query_len == 1 else query_lens,
            )
        return _Rows.padded(captured, shape, slots, query_lens)

    def _num_before(self, plan: StepPlan) -> Int32Array:
        """Return how many tokens of each row were computed before the step, which is staged."""
        return self.state.num_computed_tokens_np[plan.slots] - plan.num_scheduled_tokens

    def _forward(
        self, shape: StepShape, staged: Staged, plan: StepPlan | None
    ) -> tuple[InputBatch, torch.Tensor]:
        """Apply the upload, gather the step's tokens and run the layers; return hidden states."""
        staging = self._staging
        if staged.words is staging.fetched:
            self._ops.fetch_upload(staging.uploads, self._slots[NEXT_UPLOAD], staging.fetched)
        self._ops.scatter_segments(
            self._slots.buffer, staged.words, staged.segments, staged.num_segments
        )
        batch = input_batch.gather(
            shape, staged, self.state.slots, self.block_tables.tables, self._ops
        )
        layers = self.kv_cache.layers
        if plan is not None:
            if self.config.debug:
                self._check_block_ids(plan, batch)
            seq_lens = self.state.num_computed_tokens_np[plan.slots]
            self.attention.plan(batch.attention, layers, plan.num_scheduled_tokens, seq_lens)
        else:
            self.attention.plan(batch.attention, layers, None, None)
        on_kv_written = None
        if plan is not None and self._kv_listener is not None:
            on_kv_written = partial(self._tell_kv_ready, self._kv_listener, plan)
        return batch, self.model.forward(batch.attention, layers, self.attention, on_kv_written)

    def _post_process(
        self,
        shape: StepShape,
        staged: Staged,
        batch: InputBatch,
        hidden: torch.Tensor,
        wanted: _Wanted | None = None,
        masks: _Masks | None = None,
    ) -> tuple[LogprobReport, ...]:
        """Sample a token for each row that is to have one, append it, see who stops."""
        if shape.has_drafts:
            tokens, num_sampled, reports = self._sample_drafts(staged, batch, hidden, wanted)
        else:
            tokens, reports = self._sample(shape, batch, hidden, wanted, masks)
            num_sampled = None
        num_output, output = self._outputs.views(shape.num_rows, tokens.shape[1])
        self._ops.post_update(
            batch.idx_mapping,
            None if shape.query_len is not None else staged.query_start_loc,
            batch.logits_rows,
            tokens,
            self.state.slots,
            AppendedTokens(output=output, num_output=num_output, ring_slot=staged.ring_slot),
            query_len=shape.query_len,
            num_sampled=num_sampled,
        )
        return reports

    def _sample(
        self,
        shape: StepShape,
        batch: InputBatch,
        hidden: torch.Tensor,
        wanted: _Wanted | None,
        masks: _Masks | None,
    ) -> tuple[torch.Tensor, tuple[LogprobReport, ...]]:
        """Return a token of each row, ``[rows, 1]`` int64, and what is to be reported of it."""
        if shape.query_len != 1:  # else a row is a token
            hidden = hidden.index_select(0, batch.logits_rows.clamp(min=0))
        logits = self.model.compute_logits(hidden)
        tokens, report = self._draw(logits, batch.idx_mapping, wanted, masks)
        return tokens[:, None], () if report is None else (report,)

    def _draw(
        self,
        logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        wanted: _Wanted | None,
        masks: _Masks | None = None,
        *,
        ahead: torch.Tensor | None = None,
        draft_token_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, LogprobReport | None]:
        """Return a token of each row of logits, ``[rows]``, and what is to be reported of it."""
        raw, is_raw = None, self.config.logprobs_mode == "raw_logprobs"
        num_columns = 1 if draft_token_ids is None else 1 + draft_token_ids.shape[1]
        pick = None if wanted is None else wanted.picker(num_columns, self.device)
        if wanted is not None and pick and is_raw and (wanted.edits or self._processors):
            raw = pick(logits)  # before they are edited in place
            raw = raw.clone() if wanted.is_leading else raw
        history = self._history
        if masks is not None:
            self._ops.apply_token_bitmask(logits, masks.bitmask, rows=masks.rows)
        self.sampler.edit(
            logits, idx_mapping, history, ahead=ahead, draft_token_ids=draft_token_ids
        )
        if self._processors:
            context = LogitsContext(idx_mapping=idx_mapping, history=history)
            logits = self._processors.apply(logits, context)
        tokens = self.sampler.draw(logits, idx_mapping, history, ahead=ahead)
        if wanted is None or pick is None:
            return tokens, None
        reported, slots = pick(logits) if raw is None else raw, pick(idx_mapping)

        def filtered(part: slice) -> torch.Tensor:
            return self.sampler.filtered(reported[part], slots[part])

        report = LogprobReport.of(
            wanted.wishes,
            pick(tokens),
            reported.__getitem__ if is_raw else filtered,
            self._ops,
            chunk_rows=len(reported) if is_raw else FILTER_CHUNK,
        )
        return tokens, report

    def _sample_drafts(
        self,
        staged: Staged,
        batch: InputBatch,
        hidden: torch.Tensor,
        wanted: _Wanted | None,
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[LogprobReport, ...]]:
        """Return each row's tokens behind its known one and its drafts, and how many count.

        A draft is accepted where it is what would have been drawn: noise belongs to a position,
        so that the tokens are those of a run without drafts.
        """
        drafts, num_drafts = staged.draft_token_ids, staged.num_draft_tokens
        if drafts is None or num_drafts is None:
            raise ValueError("draft_token_ids: expected some, got none")
        ahead = torch.arange(drafts.shape[1] + 1, device=self.device)
        is_drawn = (ahead <= num_drafts[:, None]) & (batch.logits_rows >= 0)[:, None]
        rows = torch.where(is_drawn, batch.logits_rows[:, None] + ahead, 0)

        def draw(start: int, end: int) -> tuple[torch.Tensor, LogprobReport | None]:
            part = rows[start:end]
            return self._draw(
                self.model.compute_logits(hidden.index_select(0, part.flatten())),
                batch.idx_mapping[start:end].repeat_interleave(len(ahead)),
                None if wanted is None else wanted.within(start, end),
                ahead=ahead.repeat(len(part)),
                draft_token_ids=drafts[start:end],
            )

        count = self._max_logits_rows // len(ahead)
        drawn = [draw(start, start + count) for start in range(0, len(rows), count)]
        tokens = torch.cat([of_part for of_part, _ in drawn]).view(rows.shape)
        reports = tuple(report for _, report in drawn if report is not None)
        is_accepted = (tokens[:, :-1] == drafts) & (ahead[:-1] < num_drafts[:, None])
        num_accepted = is_accepted.int().cumprod(dim=1).sum(dim=1, dtype=torch.int32)
        return tokens, num_accepted + 1, reports

    def _report_prompts(
        self, plan: StepPlan, order: Int64Array | None, hidden: torch.Tensor
    ) -> tuple[LogprobReport, ...]:
        """Return the log-probabilities of prompts' tokens that follow the step's, in chunks."""
        num_before, query_lens = self._num_before(plan), plan.num_scheduled_tokens
        firsts = np.cumsum(query_lens) - query_lens
        reports = []
        for wish, count in self._logprobs.of_prompts(plan.slots, num_before, query_lens):
            first, before = int(firsts[wish.row]), int(num_before[wish.row])
            following = self.state.slots.token_ids[int(plan.slots[wish.row]), before + 1 :]
            (wish,) = _in_callers_order([wish], order)
            reports.append(
                self._report_prompt(wish, hidden[first : first + count], following[:count])
            )
        return tuple(reports)

    def _report_prompt(
        self, wish: Wanted, hidden: torch.Tensor, following: torch.Tensor
    ) -> LogprobReport:
        """Return the log-probabilities of the tokens that follow some of a prompt's, in chunks."""
        return LogprobReport.of(
            [wish],
            following.long(),
            lambda part: self.model.compute_logits(hidden[part]),
            self._ops,
            chunk_rows=LOGITS_CHUNK,
        )

    def set_kv_listener(self, listener: KVListener | None) -> None:
        """Have ``listener`` told of the keys and values of every step launched from now on.

        It is called once a layer, in order, on the thread that launches, during ``execute`` or
        ``forward``, and must not wait; an exception fails the step. A step with prompts is then
        no CUDA graph, and the calls come between its layers; those of a decode that is one come
        behind it.

        Once ``KVReady.event``, recorded on the stream of the launch, has passed, another stream
        may read what the step wrote in that layer's pages and scales. It stays as it is until a
        step is launched to whose requests the blocks were given anew, and the reader is to be
        done by then. Of rejected drafts, and with ``kv_scale="quarter"``, it stays until the next
        step of the same request.

        Args:
            listener: is given a ``KVReady`` each time; None = nobody listens, which costs nothing.
        """
        self._kv_listener = listener

    def _tell_kv_ready(self, listener: KVListener, plan: StepPlan, layer: int) -> None:
        listener(KVReady(plan=plan, layer=layer, event=self._recorded_event()))

    def _tell_kv_of_graph(self, plan: StepPlan) -> None:
        """Tell of all the layers of a step that a graph has run."""
        if self._kv_listener is not None:
            event = self._recorded_event()
            for layer in range(len(self.kv_cache.layers)):
                self._kv_listener(KVReady(plan=plan, layer=layer, event=event))

    def _recorded_event(self) -> torch.cuda.Event | None:
        """Return an event behind what the current stream has been given; None on a CPU."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _captured_shape(self, shape: StepShape, upload: StepUpload) -> StepShape | None:
        """Return the shape of the graph that runs the step, if one does."""
        if self._kv_listener is not None and shape.query_len != 1:
            return None
        return self._graphs.fit(shape) if self._staging.fits(upload) else None

    def _check_block_ids(self, plan: StepPlan, batch: InputBatch) -> None:
        """Raise if the step would follow a block id out of the pool; waits for the device."""
        query_lens = torch.tensor(plan.num_scheduled_tokens, device=self.device)
        num_blocks = self.kv_cache.num_blocks
        layouts = {id(layer.layout): layer.layout for layer in self.kv_cache.layers}
        for layout in layouts.values():
            bad = find_bad_block_ids(
                batch.attention.block_table,
                batch.attention.seq_lens,
                query_lens,
                layout,
                num_blocks,
            )
            if bad:
                first = bad[0]
                limit = num_blocks[layout.roles[first.head].group]
                raise ValueError(
                    f"block table of request {plan.req_ids[first.row]!r}, KV head {first.head}: "
                    f"expected a block id in [0, {limit}) in column {first.column}, got "
                    f"{first.block_id} ({len(bad)} such entries in the step)"
                )

    # --- construction ---------------------------------------------------------------------

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the runner's GPU the current one, whose streams and events these are."""
        if not self._on_gpu or torch.cuda.current_device() == self.device.index:
            return _NOTHING_TO_DO
        return torch.cuda.device(self.device)

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def _captures(self) -> bool:
        """Whether decode steps run as CUDA graphs; FlashInfer plans on the host."""
        return (
            self._on_gpu
            and self.config.cuda_graphs
            and not (self.config.debug or self.config.debug_sync)
            and self.config.attention_backend == "triton"
        )

    def _new_graphs(self) -> StepGraphs:
        return StepGraphs(
            self.config.max_num_seqs, self.config.max_num_batched_tokens, self.max_model_len
        )

    def _run_padding(self, shape: StepShape) -> tuple[InputBatch, torch.Tensor]:
        """Launch a step of padding, as the graphs have it; return its batch and hidden states."""
        staged = self._staging.static_view(shape.num_rows)
        batch, hidden = self._forward(shape, staged, None)
        if shape.samples:
            self._post_process(shape, staged, batch, hidden)
        return batch, hidden

    def _warm_up(self) -> None:
        """Launch steps of padding that no graph has, so that no request waits for a compiler."""
        most_rows, budget = self.config.max_num_seqs, self.config.max_num_batched_tokens
        most = max(min(self.max_model_len, budget - 1), 1)
        # One short prompt, whose keys several programs share, and as many as there may be.
        for lengths in ([9], [20], [9] * most_rows, [20] * most_rows, [1, 40], [1, 600]):
            query_lens = np.minimum(lengths, most).astype(np.int32)[-most_rows:]
            query_lens = query_lens[query_lens[::-1].cumsum()[::-1] <= budget]
            num_rows = len(query_lens)
            upload = StepUpload()
            padding = np.full(num_rows, -1, dtype=np.int32)
            words = self._staging.send(0, upload, padding, query_lens)
            staged = self._staging.staged(words, upload, num_rows)
            with torch.inference_mode():
                shape = StepShape.of(query_lens)
                batch, hidden = self._forward(shape, staged, None)
                self._post_process(shape, staged, batch, hidden)
            if self._on_gpu:
                torch.cuda.synchronize()  # the next one writes the upload anew

    def _resolve_policy(self, *, is_checkpoint: bool) -> HeadPolicy:
        """Return the policy that was given, the configured one, the checkpoint's, or the model's.

        Args:
            is_checkpoint: whether the model is that of ``config.model``.

        Raises:
            ConfigError: it cannot be read, or is not of this model.
        """
        windows, num_kv_heads = self.model_config.layer_windows, self.model_config.num_kv_heads
        policy = self._given_policy
        if policy is None and self.config.head_policy is not None:
            policy = HeadPolicy.load(self.config.head_policy)
        if policy is None and is_checkpoint:
            raw = read_json(checkpoint_dir(self.config.model) / "config.json")
            policy = HeadPolicy.of_config(raw, len(windows), num_kv_heads)
        if policy is None:
            return HeadPolicy.of_layer_windows(windows, num_kv_heads)
        if policy.num_kv_heads != num_kv_heads:
            raise ConfigError(
                f"head_policy: expected {num_kv_heads} KV heads, as the model has, got "
                f"{policy.num_kv_heads}"
            )
        return policy.within(windows)

    def _resolve_groups(self) -> HeadGroups:
        """Return which heads share blocks; FlashInfer has one table for all."""
        sizes = {"block_size": self.config.block_size, "max_model_len": self.max_model_len}
        if self._per_head_ids:
            return HeadGroups.of_heads(self.head_policy, **sizes)
        if not self.config.window_recycling or self.config.attention_backend == "flashinfer":
            return HeadGroups.shared(self.head_policy, **sizes)
        return HeadGroups.of_roles(
            self.head_policy,
            **sizes,
            max_query_len=min(self.config.max_num_batched_tokens, self.max_model_len),
        )

    def _load_model(self, progress: bool) -> DecoderModel:
        dtype = resolve_dtype(self.config.dtype, self.model_config.torch_dtype, self.device)
        return load_model(
            checkpoint_dir(self.config.model),
            device=self.device,
            dtype=dtype,
            ops=self._ops,
            progress=progress,
            deterministic=self.config.deterministic,
        )

    def _new_kv_cache(self, num_blocks: Sequence[int]) -> KVCache:
        return KVCache(self.spec, self.head_groups, num_blocks, self.device, self._head_scales)

    def _tiny_kv_cache(self) -> KVCache:
        """Return a cache for steps of padding: a block of each group."""
        return self._new_kv_cache([1] * len(self.head_groups.groups))

    def _num_kv_blocks(self) -> tuple[int, ...]:
        """Return the blocks of each head group: as asked for, else what memory allows.

        None has more than can be used.
        """
        config, groups, demand = self.config, self.head_groups, self._streaming_demand
        if config.num_kv_blocks is not None:
            return demand.divide(groups, config.num_kv_blocks, config.block_size)
        usable = config.max_num_seqs * self.spec.blocks_for(self.max_model_len)
        num_bytes = config.kv_cache_memory_bytes or self._kv_bytes()
        return demand.divide_bytes(self.spec, groups, num_bytes, usable)

    def _kv_bytes(self) -> int:
        """Return the bytes left for the KV cache beside the activations of a full step."""
        if not self._on_gpu:
            return CPU_KV_BYTES
        torch.cuda.empty_cache()
        self._run_profile_step()
        # The allocator keeps what the step needed, so what is free now is free beside a step; but
        # graphs have memory of their own.
        free_bytes, total_bytes = memory_bytes(self.device)
        graph_bytes = self._graph_bytes() if self._captures else 0
        reserved = int(total_bytes * (1 - self.config.gpu_memory_utilization))
        return free_bytes - graph_bytes - reserved

    def _run_profile_step(self) -> None:
        """Run the steps that need the most memory; see ``mrv1.runner.profile``."""
        run_profile_step(
            self.model,
            self._tiny_kv_cache(),
            self._sample_most,
            row_width=self.block_tables.row_width,
            num_tokens=self.config.max_num_batched_tokens,
            max_query_len=self.max_model_len,
            num_decodes=self.config.max_num_seqs,
        )

    @property
    def _max_logits_rows(self) -> int:
        """Rows of logits that exist at the same time, at most."""
        return max(self.config.max_num_seqs, LOGITS_CHUNK)

    def _sample_most(self, hidden: torch.Tensor) -> None:
        """Launch, on rows of padding, all that may have to follow the layers of a step."""
        num_rows, device = self._max_logits_rows, self.device
        most = min(self.config.max_logprobs, self.model_config.vocab_size)
        wishes = [Wanted(row, most, tuple(range(most)), edits=True) for row in range(num_rows)]
        masks = _Masks(
            bitmask=torch.full(
                (num_rows, self.sampler.limits.mask_words), -1, dtype=torch.int32, device=device
            ),
            rows=torch.arange(num_rows, dtype=torch.int32, device=device),
        )
        rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._draw(
            self.model.compute_logits(hidden.index_select(0, rows)),
            torch.full((num_rows,), -1, dtype=torch.int32, device=device),
            _Wanted(wishes=wishes, rows=list(range(num_rows))),
            masks,
        )
        some = hidden[:LOGITS_CHUNK]
        self._report_prompt(Wanted(0, most), some, rows[: len(some)])

    def _graph_bytes(self) -> int:
        """Return what the graphs take: all share the memory of the largest."""
        self.kv_cache = self._tiny_kv_cache()
        graphs = self._new_graphs()
        torch.cuda.empty_cache()  # which a capture does too: it would hide what that takes
        before, _ = memory_bytes(self.device)
        with torch.inference_mode():
            graphs.capture(graphs.largest, self._run_padding, progress=False)
        after, _ = memory_bytes(self.device)
        del graphs, self.kv_cache
        torch.cuda.empty_cache()
        return max(before - after, 0)

    # --- reports --------------------------------------------------------------------------

    @property
    def num_staging_waits(self) -> int:
        """How often a launch waited for the step that had its pinned buffers before."""
        return self._outputs.num_waits

    @property
    def gpu_seconds(self) -> float:
        """Time that the GPU has worked on steps which are over; 0 on a CPU."""
        return self._outputs.gpu_seconds

    @property
    def num_compilations(self) -> int:
        """How often Triton has compiled a kernel, or loaded one, since the runner was made."""
        return self._compilations.total() - self._num_warm_up_compilations

    def describe(self) -> str:
        """Return one line: device, path, dtypes, blocks and their bytes."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        how = {
            "triton": "Triton kernels",
            "interpreter": "Triton kernels in the CPU interpreter",
            "reference": "CPU reference (torch)",
        }[self.path]
        if self.config.attention_backend == "flashinfer":
            how += ", attention by FlashInfer (one step in flight)"
        return (
            f"{self.model_config.architecture} on {device_info(self.device).name}: {how}, "
            f"{dtype}, KV {self._describe_kv()}, {self._describe_heads()}, "
            f"{' + '.join(map(str, self.kv_cache.num_blocks))} blocks of "
            f"{self.spec.block_size} tokens "
            f"({self.kv_cache.nbytes / 2**20:.1f} MiB), {self._describe_graphs()}"
        )

    def _describe_heads(self) -> str:
        streaming = [seen for seen in self.head_policy.groups if not seen.is_full]
        if not streaming:
            return "all heads full"
        seen = ", ".join(
            f"{each.window} tokens" + (f" and {each.sink} in front" if each.sink else "")
            for each in streaming
        )
        kept = "" if self._recycles else ", all of which is kept"
        return f"{self.head_policy.full_share:.0%} of the heads full, others see {seen}{kept}"

    @property
    def _recycles(self) -> bool:
        """Whether what no head of a group sees any more is given back."""
        return any(not group.keeps.is_full for group in self.head_groups.groups)

    def _describe_graphs(self) -> str:
        if not self._captures:
            return "no CUDA graphs"
        return f"CUDA graphs of {len(self._graphs.shapes)} shapes of steps"

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
        return report_of(self.kv_cache, self._streaming_demand)

    def close(self) -> None:
        """Give the device memory back; the runner cannot be used afterwards."""
        self._closed = True
        if self._on_gpu:
            # Steps in flight write to page-locked memory, which torch gives to others at once.
            with suppress(torch.AcceleratorError):  # a GPU that has failed runs nothing any more
                torch.cuda.synchronize(self.device)
        for name in (
            "model", "attention", "kv_cache", "_head_scales",
            "state", "block_tables", "sampler", "_slots", "_staging", "_outputs", "_graphs",
        ):  # fmt: skip
            self.__dict__.pop(name, None)
        gc.collect()
        if self._on_gpu:
            # cuBLAS keeps a workspace for ever; torch names its release only privately.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
