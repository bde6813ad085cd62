"""The engine's loop: schedule, execute, update. It works on token ids."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import ParamSpec, Unpack

import numpy as np
import numpy.typing as npt

from mrv1.config import EngineConfig
from mrv1.engine.adapters import Adapters
from mrv1.engine.guards import recovers
from mrv1.engine.intake import own_params, own_value
from mrv1.engine.reports import LoopCounts, Metrics, engine_metrics, kv_usage
from mrv1.engine.request import Request, Status
from mrv1.engine.request_limits import check_logprob_memory
from mrv1.engine.request_maker import RequestMaker, RequestOptions, derive_seed
from mrv1.engine.scheduler import Scheduler
from mrv1.engine.scheduler_config import SchedulerConfig
from mrv1.engine.speculation import Speculation
from mrv1.errors import ConfigError, RequestError, StepError
from mrv1.headwise import HeadPolicy
from mrv1.models import DecoderModel, NamedTensors
from mrv1.runner import (
    AsyncOutput,
    EachRank,
    KVListener,
    KVUsage,
    ModelRunner,
    ParallelRunner,
    RequestId,
    StepPlan,
)
from mrv1.sampler import LogitsProcessor, SamplingParams
from mrv1.sampler.processors import checked_processors

P = ParamSpec("P")


class EngineCore:
    """Takes requests as token ids and runs steps until they have ended.

    With ``config.overlap`` a step is launched before the result of the one before is read: all
    that it needs from it is on the device. Without, the same code has one step in flight.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: DecoderModel | None = None,
        head_policy: HeadPolicy | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        progress: bool = True,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """Build runner and scheduler; as ``ModelRunner``, with more end-of-sequence tokens."""
        logits_processors = checked_processors(logits_processors)
        speculation = config.speculation
        self._speculation = None if speculation is None else Speculation(speculation)
        if speculation is not None:
            if logits_processors:
                raise ConfigError(
                    "speculative: expected no logits_processors, which see no drafts, got some"
                )
            most = max(config.max_draft_tokens, speculation.num_tokens)
            config = replace(config, max_draft_tokens=most)
        self.config = config
        make_runner = ModelRunner if config.tensor_parallel_size == 1 else ParallelRunner
        self.runner: ModelRunner = make_runner(
            config,
            model=model,
            head_policy=head_policy,
            logits_processors=logits_processors,
            progress=progress,
        )
        model_config = self.runner.model_config
        self.eos_token_ids = tuple(
            token
            for token in dict.fromkeys((*model_config.eos_token_ids, *eos_token_ids))
            if token < model_config.vocab_size  # a tokenizer may name one that it adds
        )
        self._custom_masks = ("logits_processors",) if logits_processors else ()
        self.scheduler = Scheduler(self._scheduler_config(), self._speculation)
        self.adapters = Adapters(config, self.runner)
        self.maker = RequestMaker(config, self.runner, self.adapters)
        self._in_flight: deque[tuple[StepPlan, AsyncOutput | StepError]] = deque()
        self._changed: list[Request] = []  # for ``step`` to return, maybe in its next call
        self._is_changing = False
        self._lost: StepError | None = None  # lost the device: the driver refuses later calls
        self._num_added = 0
        self._counts = LoopCounts(
            num_steps=0, num_prompt_tokens=0, grammar_waits=0, host_seconds=0.0, wait_seconds=0.0
        )

    def _scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig.for_runner(
            self.config,
            self.runner,
            eos_token_ids=self.eos_token_ids,
            custom_masks=self._custom_masks,
        )

    def add_request(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Queue a request and return the ``Request`` of the first of its ``params.n`` outputs.

        The others are its ``followers``, named ``(req_id, 1)`` and so on. Arguments are copied.

        Raises:
            RequestError: as ``RequestMaker.make``; or the id is in use, or the request can never
                fit; nothing is queued.
            StepError: a kernel failed in an earlier step: this process can no longer use the GPU.
            RuntimeError: the engine sleeps or lacks weights.
        """
        if "multimodal" in options:
            options["multimodal"] = own_value("multimodal", options["multimodal"])
        request = self.maker.make(req_id, prompt_token_ids, own_params(params), **options)
        self.queue(request)
        return request

    def queue(self, request: Request) -> None:
        """Queue a request of ``maker.make`` and its followers; errors as ``add_request``."""
        self._check_device()
        self.runner.check_usable()
        if request.params.seed is None:
            seed = derive_seed(self.config.seed, self._num_added)
            for member in (request, *request.followers):
                member.seed = seed
        if request.asks_logprobs:
            vocab_size = self.runner.model_config.vocab_size
            check_logprob_memory(request, self.scheduler.unfinished, self.config, vocab_size)
        if request.adapter is not None:
            adapter = self.adapters.adopted(request.adapter)
            for member in (request, *request.followers):
                member.adapter, member.cache_key = adapter, adapter.key
        self._queue(request)

    def _check_device(self) -> None:
        if self._lost is not None:
            message = (
                f"the GPU failed and serves this process no more ({self._lost}): make a new "
                "engine in a new process"
                if self.config.tensor_parallel_size == 1
                else f"the ranks have ended ({self._lost}): make a new engine"
            )
            raise StepError(message, step_id=self._lost.step_id) from self._lost

    @recovers
    def _queue(self, request: Request) -> None:
        self.scheduler.add(request)
        self._num_added += 1
        self._counts["num_prompt_tokens"] += len(request.prompt_token_ids)

    @recovers
    def step(self) -> list[Request]:
        """Launch steps up to the limit in flight, and take in the oldest step's result.

        Returns the requests that got a token or ended. An interrupt, or any exception but a
        ``StepError``, ends every running request, to be returned by the next call: launched
        results are never read.
        """
        start = time.perf_counter()
        waited = self._counts["wait_seconds"]
        try:
            awaits_masks = self._launch()
            if self._in_flight and not awaits_masks:
                self._take_oldest()
            self._drain()
        finally:
            elapsed = time.perf_counter() - start
            self._counts["host_seconds"] += elapsed - (self._counts["wait_seconds"] - waited)
        changed, self._changed = self._changed, []
        return changed

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do or to return."""
        return self._is_changing or self.scheduler.has_unfinished_requests or bool(self._changed)

    @recovers
    def abort(self, req_id: RequestId) -> Request | None:
        """End a request now and return it; None if no unfinished request has this id."""
        request = self.scheduler.abort(req_id)
        self._drain()
        return request

    @recovers
    def stop(self, request: Request, reason: str, num_output_tokens: int) -> None:
        """End a request after some of its tokens; for arguments see ``Scheduler.stop``."""
        self.scheduler.stop(request, reason, num_output_tokens)
        self._drain()

    def add_lora(self, lora_request: object) -> bool:
        """Load an adapter, which requests may then have; see ``LLM.add_lora``."""
        return self.adapters.add(self.adapters.prepared(lora_request))

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter; requests that have it keep it. See ``LLM.remove_lora``."""
        removed = self.adapters.remove(lora_int_id)
        if removed is not None:
            self.scheduler.adapter_slots.drop(removed)
        return removed is not None

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keep an adapter in its slot; see ``LLM.pin_lora``."""
        self.scheduler.adapter_slots.pin(self.adapters.get(lora_int_id))
        return True

    def set_kv_listener(self, listener: KVListener | EachRank | None) -> None:
        """Tell a listener of the keys and values of every step from now on; None = none."""
        self.runner.set_kv_listener(listener)

    @recovers
    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; return False, and forget nothing, if blocks are in use."""
        if any(pool.num_free < pool.num_blocks for pool in self.scheduler.pools):
            return False
        self.scheduler.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> None:
        """Free device memory and empty the prefix cache; for errors see ``LLM.sleep``."""
        self._check_idle("sleep")
        self._change_memory(self.runner.sleep, level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Bring memory back; for arguments and errors see ``ModelRunner.wake_up``."""
        self._check_device()
        self.runner.wake_up(tags)

    def update_weights(self, named_tensors: NamedTensors, *, partial: bool = False) -> None:
        """Overwrite weights and empty the prefix cache; errors as ``LLM.update_weights``."""
        self._check_idle("update_weights")
        self._change_memory(self.runner.update_weights, named_tensors, partial=partial)

    def set_head_policy(self, policy: HeadPolicy | str | None) -> None:
        """Let KV heads see other tokens; for arguments and errors see ``LLM.set_head_policy``."""
        self._check_idle("set_head_policy")
        self._set_head_policy(policy)

    @recovers
    def _set_head_policy(self, policy: HeadPolicy | str | None) -> None:
        former = self.runner.head_policy
        try:
            self.runner.set_head_policy(policy)
        except Exception:  # of any type: a kernel may not compile for the new heads
            if not self.runner.has_kv_cache:
                self.runner.set_head_policy(former)
                self.scheduler.configure(self._scheduler_config())  # with other blocks, perhaps
            raise
        self.scheduler.configure(self._scheduler_config())

    def _check_idle(self, call: str) -> None:
        self._check_device()
        unfinished = len(self.scheduler.unfinished)
        if unfinished:
            raise RuntimeError(
                f"{call}: expected no unfinished requests, got {unfinished}; let them end or "
                "abort them first"
            )

    @recovers
    def _change_memory(
        self, change: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        change(*args, **kwargs)
        self.scheduler.adapter_slots.reset()
        self.scheduler.reset_prefix_cache()
        self.scheduler.features.reset()

    def _drain(self) -> None:
        """Take in all steps in flight if no request is unfinished, so that blocks become free."""
        while self._in_flight and not self.scheduler.has_unfinished_requests:
            self._take_oldest()

    def _launch(self) -> bool:
        """Launch steps up to the limit in flight; return whether the newest has grammars.

        None after a launch that failed, on whose device state a later step would depend. A result
        with grammars is taken in while the layers of the next step run.
        """
        while len(self._in_flight) < self.config.steps_in_flight:
            if self._in_flight and isinstance(self._in_flight[-1][1], StepError):
                break
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self._load_adapters()
            rows = self.scheduler.rows_with_grammars()
            try:
                if rows:
                    self.runner.forward(plan)
                    self._complete(plan, rows)
                    return True
                self._in_flight.append((plan, self.runner.execute(plan)))
            except StepError as error:
                self._in_flight.append((plan, error))  # in the order of launches, like a result
        return False

    def _load_adapters(self) -> None:
        """Write the adapters that the scheduled step needs to their slots.

        Requests whose adapter cannot be written end; their rows of the step will be dropped.
        """
        slots = self.scheduler.adapter_slots
        for slot, adapter in slots.take_loads():
            try:
                self.runner.load_adapter(slot, adapter.stored)
            except StepError:
                raise  # a rank has ended
            except Exception as error:  # of any type: only requests with this adapter fail
                failure = RequestError.caused_by(error, "lora_request")
                running = self.scheduler.running.values()
                having = [each for each in running if each.adapter_slot == slot]
                for request in having:
                    self.scheduler.fail(request, failure)
                self._changed += having
                slots.lose(slot)

    def _complete(self, plan: StepPlan, rows: list[tuple[int, Request]]) -> None:
        """Take in all steps before ``plan``, whose layers run; then mask its rows and sample."""
        while self._in_flight:
            self._take_oldest()
        masks: dict[int, npt.NDArray[np.int32]] = {}
        num_words = self.runner.sampler.limits.mask_words
        for row, request in rows:
            if request.matcher is None or request.status is not Status.RUNNING:
                continue  # ended: the row's token will be dropped
            masks[row] = np.zeros(num_words, dtype=np.int32)
            try:
                request.matcher.fill_bitmask(masks[row])
            except Exception as error:  # of any type: only this request fails
                failure = RequestError.caused_by(error, "structured_output")
                self.scheduler.fail(request, failure)
                self._changed.append(request)
        if self._lost is None:
            self._counts["grammar_waits"] += 1
            bitmask = np.stack([*masks.values()]) if masks else None
            try:
                self._in_flight.append((plan, self.runner.sample(bitmask, [*masks])))
            except StepError as error:
                self._in_flight.append((plan, error))

    def _take_oldest(self) -> None:
        """Take in the oldest step's result; if the GPU is lost, end every request."""
        plan, output = self._in_flight[0]
        start = time.perf_counter()
        outcome = output if isinstance(output, StepError) else output.take()
        self._counts["wait_seconds"] += time.perf_counter() - start
        self._in_flight.popleft()
        self._counts["num_steps"] += 1
        if not isinstance(outcome, StepError):
            self._changed += self.scheduler.update(outcome)
            return
        self._changed += self.scheduler.fail_step(plan, outcome)
        if outcome.device_lost:  # if not, only a launch failed: earlier steps go on
            self._lost = outcome
            self._recover(outcome)
            waiting = self.scheduler.unfinished
            for request in waiting:
                self.scheduler.fail(request, outcome)
            self._changed += waiting

    def _recover(self, error: BaseException) -> None:
        """End every running request and start over; the next ``step`` returns these requests."""
        if not isinstance(error, StepError):
            step_ids = [*(plan.step_id for plan, _ in self._in_flight), self._counts["num_steps"]]
            error = StepError(repr(error), step_id=step_ids[0])
        self._in_flight.clear()
        self._changed += self.scheduler.abandon(error)
        if self._lost is None:
            self.runner.discard()

    def kv_report(self) -> KVUsage:
        """Return the KV cache's sizes in bytes, and how much of it is in use."""
        return kv_usage(self.runner, self.scheduler)

    def metrics(self) -> Metrics:
        """Return the counters as a plain dict."""
        return engine_metrics(self._counts, self.scheduler, self.runner, self._speculation)
