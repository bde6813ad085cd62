"""The engine's loop: schedule, execute, update. It works on token ids."""

from __future__ import annotations

import hashlib
import operator
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import ParamSpec, SupportsInt, TypedDict, TypeGuard

import numpy as np
import numpy.typing as npt

from mrv1.config import EngineConfig
from mrv1.engine.graph_padding import Padding, mixed_prefill_tokens
from mrv1.engine.guards import recovers
from mrv1.engine.intake import own_params, own_value
from mrv1.engine.prefix_cache import key_spans
from mrv1.engine.request import Request, Status
from mrv1.engine.request_limits import check_logprob_memory, check_order, check_params
from mrv1.engine.scheduler import Scheduler
from mrv1.engine.speculation import Speculation
from mrv1.errors import ConfigError, RequestError, StepError
from mrv1.headwise import HeadPolicy
from mrv1.models import DecoderModel, NamedTensors
from mrv1.multimodal import (
    MultimodalItem,
    as_items,
    check_placeholders,
    in_order,
    visible_ranges,
    whole_spans,
)
from mrv1.multimodal.mrope import mrope_positions
from mrv1.multimodal.reading import reading
from mrv1.runner import (
    AsyncOutput,
    KVListener,
    KVUsage,
    ModelRunner,
    ParallelRunner,
    RequestId,
    StepPlan,
)
from mrv1.runner.step import Int32Array
from mrv1.sampler import LogitsProcessor, SamplingParams
from mrv1.sampler.bad_words import banned_token_sequences
from mrv1.sampler.params import short
from mrv1.sampler.processors import checked_processors

P = ParamSpec("P")


class Metrics(TypedDict):
    """Counters since the engine was created."""

    num_steps: int
    num_prompt_tokens: int
    """Tokens of all prompts that were added; a prompt counts once, whatever its ``n``."""
    num_generated_tokens: int
    num_finished_requests: int
    num_running_requests: int
    num_waiting_requests: int
    num_preemptions: int
    num_free_blocks: int
    """Blocks of every head group that could be allocated now."""
    num_kv_blocks: int
    """Blocks of the first head group: the full heads, if there are any."""
    num_prefix_queries: int
    """Tokens of admitted requests, looked up in the prefix cache."""
    prefix_hit_tokens: int
    """Tokens of ``num_prefix_queries`` that the prefix cache had."""
    num_prefix_waits: int
    """Requests that waited for a running one to compute a prefix that both have."""
    wasted_tokens: int
    """Tokens of stale rows: their request had ended or was preempted when the result came."""
    staging_waits: int
    """How often the host waited for a pinned buffer before it could launch."""
    num_compilations: int
    """Kernels that Triton compiled or loaded after start-up: each of them stalls a step."""
    num_graph_steps: int
    """Steps that ran as CUDA graphs, sampling included."""
    num_nan_rows: int
    """Requests that failed because of NaN in their logits."""
    num_drafts: int
    """Times that a step verified drafts of a request."""
    num_draft_tokens: int
    """Drafts that steps verified."""
    num_accepted_tokens: int
    """Drafts among them that were accepted."""
    grammar_waits: int
    """Steps whose sampling waited for the tokens that a grammar's mask depends on."""
    host_seconds: float
    """Time the host spent on planning, launching and updating, without waits for results."""
    wait_seconds: float
    """Time the host waited for results."""
    gpu_seconds: float
    """Time the GPU spent in steps, with gaps shorter than a launch; 0 on a CPU."""


def derive_seed(engine_seed: int, admission: int) -> int:
    """Return the 64-bit seed of the ``admission``-th request, which brought no seed of its own."""
    digest = hashlib.blake2b(f"{engine_seed}/{admission}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _is_int(token: object) -> TypeGuard[SupportsInt]:
    """Whether a token is an integer of any class, such as numpy's or an enumeration of them."""
    return isinstance(token, Integral) and not isinstance(token, bool)


def _as_array(token_ids: tuple[object, ...]) -> npt.NDArray[np.int64] | None:
    """Return token ids as an array; None if one is not an ``int``, or of more than 64 bits."""
    if {*map(type, token_ids)} != {int}:  # bool is not int
        return None
    try:
        return np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
    except OverflowError:
        return None


class EngineCore:
    """Takes requests as token ids and runs steps until they have ended.

    With ``config.overlap`` a step is launched before the result of the step before it is read: all
    that it needs from that step is on the device. Without, the same code has one step in flight.
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
        """Build runner and scheduler; for arguments and errors see ``ModelRunner``.

        ``eos_token_ids`` are end-of-sequence tokens in addition to the model configuration's.
        """
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
        """The model's end-of-sequence tokens."""
        self.scheduler = Scheduler(
            num_blocks=self.runner.kv_cache.num_blocks,
            keeps=[group.keeps for group in self.runner.head_groups.groups],
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            eos_token_ids=self.eos_token_ids,
            max_steps_in_flight=config.steps_in_flight,
            enable_prefix_caching=config.caches_prefixes,
            custom_masks=("logits_processors",) if logits_processors else (),
            num_feature_rows=self.runner.num_feature_rows,
            scheduling_policy=config.scheduling_policy,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            max_mixed_prefill_tokens=mixed_prefill_tokens(config, self.runner),
            padding=Padding.of(self.runner),
            speculation=self._speculation,
            # Drafts with log-probabilities leave the CUDA graphs, which costs more than they gain.
            drafts_beside_logprobs=not self.runner.captures_graphs,
        )
        self._in_flight: deque[tuple[StepPlan, AsyncOutput | StepError]] = deque()
        self._changed: list[Request] = []
        """Requests for ``step`` to return; if an exception ends it, the next call returns them."""
        self._is_changing = False
        self._lost: StepError | None = None
        """The error that lost the device: the driver refuses every call after it."""
        self._num_added = 0
        self._num_steps = 0
        self._num_grammar_waits = 0
        self._num_prompt_tokens = 0
        self._host_seconds = 0.0
        self._wait_seconds = 0.0

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self.runner.max_model_len

    def add_request(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        multimodal: Sequence[MultimodalItem] | None = None,
        attn_mask_offsets: object = None,
        priority: int = 0,
        fairness_id: str = "",
    ) -> Request:
        """Queue a request and return the ``Request`` of the first of its ``params.n`` outputs.

        The other outputs are its ``followers``: requests named ``(req_id, 1)`` and so on. A
        request has copies of all that it is given: the caller may change its own afterwards.

        Args:
            req_id: name of the request.
            prompt_token_ids: at least one token.
            params: sampling parameters.
            encode: returns the tokens of an entry of ``params.bad_words``, without special tokens.
            multimodal: items whose features replace the embeddings of prompt tokens, in any
                order; None or [] = plain text. Features are copied where they are; on a GPU,
                those on the CPU move to pinned memory, and features on the GPU without a
                ``cache_key`` are read, which waits for the GPU.
            attn_mask_offsets: ``[prompt tokens, 2]`` integers: the range ``[lo, hi)`` of positions
                that each prompt token sees; tokens that see later ones are computed in one step
                with them. None = each token sees all positions up to its own.
            priority: with ``scheduling_policy="priority"``, requests with a lower value first.
            fairness_id: under that policy, the key of the caller with which requests take turns.

        Raises:
            RequestError: the prompt is empty, too long or outside the vocabulary, a parameter is
                over a limit, an item does not fit the model or the prompt, the ranges are wrong or
                not supported, the id is in use, or the request can never fit; nothing is queued.
            StepError: a kernel failed in an earlier step: this process can no longer use the GPU.
            RuntimeError: the engine sleeps or lacks weights.
        """
        request = self.make_request(
            req_id,
            prompt_token_ids,
            own_params(params),
            encode=encode,
            multimodal=own_value("multimodal", multimodal),
            attn_mask_offsets=attn_mask_offsets,
            priority=priority,
            fairness_id=fairness_id,
        )
        self.queue(request)
        return request

    def make_request(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        multimodal: Sequence[MultimodalItem] | None = None,
        attn_mask_offsets: object = None,
        priority: int = 0,
        fairness_id: str = "",
    ) -> Request:
        """Return a request for ``queue``; changes nothing, so that any thread may call it.

        For arguments see ``add_request``. They become the request's own: the caller must not
        change them afterwards (``own_params``, ``own_prompt``).

        Raises:
            RequestError: the id, the prompt, a parameter, an item or a range is wrong.
        """
        name = own_value("request_id", req_id)
        if not isinstance(name, str) or not name:
            raise RequestError(
                f"request_id: expected a string that is not empty, got {short(name)}"
            )
        given: object = params
        if not isinstance(given, SamplingParams):
            raise RequestError(f"params: expected SamplingParams, got {type(given).__name__}")
        prompt, prompt_array = self._checked_prompt(prompt_token_ids)
        check_order(priority, fairness_id, self.config)
        check_params(params, self.config, self.runner.model_config.vocab_size)
        banned = self._banned_token_sequences(params, encode)
        items = () if multimodal is None else self._prepared(multimodal, prompt)
        longest = self._longest(items, len(prompt))
        if len(prompt) + params.min_tokens > longest:
            raise RequestError(
                f"min_tokens: expected at most {longest - len(prompt)} after a prompt of "
                f"{len(prompt)} tokens (max_model_len), got {short(params.min_tokens)}"
            )
        ranges = None
        if items or attn_mask_offsets is not None:
            ranges = visible_ranges(items, attn_mask_offsets, len(prompt))
        if ranges is not None:
            self._check_takes_ranges()
        request = Request(
            req_id=name,
            prompt_token_ids=prompt,
            prompt_array=prompt_array,
            multimodal=items,
            attn_mask_offsets=ranges,
            unsplittable=() if ranges is None else whole_spans(ranges),
            key_spans=key_spans(items, ranges, prompt),
            params=params,
            seed=0 if params.seed is None else params.seed,  # ``queue`` derives one for None
            max_total_tokens=longest
            if params.max_tokens is None
            else min(longest, len(prompt) + params.max_tokens),
            banned_token_sequences=banned,
            priority=int(priority),
            fairness_id=str.__str__(fairness_id),
        )
        request.add_followers()
        return request

    def queue(self, request: Request) -> None:
        """Queue a request of ``make_request`` and its followers.

        Raises:
            RequestError, StepError, RuntimeError: as ``add_request``; nothing is queued.
        """
        self._check_device()
        self.runner.check_usable()
        if request.params.seed is None:
            seed = derive_seed(self.config.seed, self._num_added)
            for member in (request, *request.followers):
                member.seed = seed
        if request.asks_logprobs:
            vocab_size = self.runner.model_config.vocab_size
            check_logprob_memory(request, self.scheduler.unfinished, self.config, vocab_size)
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
        self._num_prompt_tokens += len(request.prompt_token_ids)

    def _checked_prompt(self, prompt_token_ids: object) -> tuple[tuple[int, ...], Int32Array]:
        """Return the tokens, and the same tokens as an array."""
        if not isinstance(prompt_token_ids, Iterable):
            raise RequestError(f"prompt_token_ids: expected a list, got {short(prompt_token_ids)}")
        with reading("prompt_token_ids", "a list of integers"):
            prompt = tuple(prompt_token_ids)
        if not prompt:
            raise RequestError("prompt: expected at least one token, got none")
        array = _as_array(prompt)
        if array is None:
            with reading("prompt_token_ids", "a list of integers"):
                prompt = tuple([int(t) if _is_int(t) else t for t in prompt])
            array = _as_array(prompt)
        vocab_size = self.runner.model_config.vocab_size
        if array is None or array.min() < 0 or array.max() >= vocab_size:
            index, token = next(
                (index, token)
                for index, token in enumerate(prompt)
                if type(token) is not int or not 0 <= token < vocab_size
            )
            raise RequestError(
                f"prompt_token_ids: expected integers in [0, {vocab_size}), got "
                f"{short(token)} at index {index}"
            )
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"prompt: expected fewer than {self.max_model_len} tokens (max_model_len, with "
                f"one left to generate), got {len(prompt)}"
            )
        return prompt, array.astype(np.int32)

    def _prepared(
        self, multimodal: Sequence[MultimodalItem], prompt: tuple[int, ...]
    ) -> tuple[MultimodalItem, ...]:
        """Return the items in the order of the prompt, ready to be staged."""
        items = in_order(as_items(multimodal), len(prompt))
        if items and not self.runner.num_feature_rows:
            raise RequestError(
                f"multimodal: expected no items, because mm_cache_memory_bytes has room for none, "
                f"got {len(items)}"
            )
        vision = self.runner.model_config.vision
        if items and vision is not None:
            ids = {"image": vision.image_token_id, "video": vision.video_token_id}
            check_placeholders(items, prompt, ids)
        return tuple([self.runner.prepared(item) for item in items])

    def _check_takes_ranges(self) -> None:
        """Raise unless tokens may see other keys than all up to their own."""
        for option, value in (
            ("attention_backend", "flashinfer"),
            ("deterministic", True),
        ):
            if getattr(self.config, option) == value:
                raise RequestError(
                    "bidirectional or attn_mask_offsets: expected neither with "
                    f"{option}={value!r}, whose kernels are causal, got one"
                )

    def _longest(self, items: tuple[MultimodalItem, ...], num_prompt_tokens: int) -> int:
        """Return the most tokens that a request may have, prompt and output.

        M-RoPE's positions must be less than the model's context, as other models' are. Those of
        an output after a slow video may be more than its number of tokens.

        Raises:
            RequestError: an item has no position, or there are too many items or positions.
        """
        model = self.runner.model_config
        if not items or model.vision is None:
            return self.max_model_len
        if len(items) > self.config.max_mm_items:
            raise RequestError(
                f"multimodal: expected at most {self.config.max_mm_items} items (max_mm_items), "
                f"got {len(items)}; raise max_mm_items"
            )
        positions = mrope_positions(items, num_prompt_tokens, model.vision)
        longest = model.max_model_len - positions.delta
        if longest <= num_prompt_tokens:
            raise RequestError(
                f"multimodal: expected positions below {model.max_model_len - 1}, with one left "
                f"to generate, got {positions.num_positions - 1}; give fewer seconds of video"
            )
        return min(self.max_model_len, longest)

    def _banned_token_sequences(
        self, params: SamplingParams, encode: Callable[[str], Sequence[int]] | None
    ) -> tuple[tuple[int, ...], ...]:
        if not params.bans_words:
            return ()
        banned = banned_token_sequences(
            params,
            encode,
            max_words=self.config.max_bad_words_num,
            max_len=self.config.bad_words_max_len,
        )
        vocab_size = self.runner.model_config.vocab_size
        outside = [list(sequence) for sequence in banned if max(sequence) >= vocab_size]
        if outside:
            raise RequestError(f"bad_words: expected ids in [0, {vocab_size}), got {outside}")
        return banned

    @recovers
    def step(self) -> list[Request]:
        """Launch steps up to the limit in flight, and take in the oldest step's result.

        An interrupt, like any other exception but a ``StepError``, ends every running request: the
        results of launched steps are never read. The next call returns these requests.

        Returns:
            The requests that got a token or ended.
        """
        start = time.perf_counter()
        waited = self._wait_seconds
        try:
            awaits_masks = self._launch()
            if self._in_flight and not awaits_masks:
                self._take_oldest()
            self._drain()
        finally:
            elapsed = time.perf_counter() - start
            self._host_seconds += elapsed - (self._wait_seconds - waited)
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

    def set_kv_listener(self, listener: KVListener | None) -> None:
        """Tell ``listener`` of the keys and values of every step launched from now on.

        Args:
            listener: see ``KVListener``; None = no listener.
        """
        self.runner.set_kv_listener(listener)

    @recovers
    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; return False, and forget nothing, if blocks are in use."""
        if any(pool.num_free < pool.num_blocks for pool in self.scheduler.pools):
            return False
        self.scheduler.reset_prefix_cache()
        return True

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are asleep."""
        return self.runner.is_sleeping

    def sleep(self, level: int = 1) -> None:
        """Free device memory until ``wake_up``, and empty the prefix cache.

        Raises:
            ConfigError, CapacityError: as ``ModelRunner.sleep``; nothing has changed.
            RuntimeError: a request is unfinished; nothing has changed.
            StepError: as ``add_request``.
        """
        self._check_idle("sleep")
        self._change_memory(self.runner.sleep, level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Bring memory back; for arguments and errors see ``ModelRunner.wake_up``."""
        self._check_device()
        self.runner.wake_up(tags)

    def update_weights(self, named_tensors: NamedTensors, *, partial: bool = False) -> None:
        """Overwrite weights in place, and empty the prefix cache, whose keys are stale.

        Raises:
            ConfigError: as ``ModelRunner.update_weights``; nothing has changed.
            RuntimeError: a request is unfinished, or the weights are asleep; nothing has changed.
            StepError: as ``add_request``.
        """
        self._check_idle("update_weights")
        self._change_memory(self.runner.update_weights, named_tensors, partial=partial)

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
        self.scheduler.reset_prefix_cache()
        self.scheduler.features.reset()

    def _drain(self) -> None:
        """Take in all steps in flight if no request is unfinished, so that blocks become free."""
        while self._in_flight and not self.scheduler.has_unfinished_requests:
            self._take_oldest()

    def _launch(self) -> bool:
        """Launch steps up to the limit in flight, but none after a launch that failed.

        A later step would depend on device state that the failed launch has not written.

        Returns:
            Whether the newest step has grammars: its result is taken in while the layers of the
            next step run.
        """
        while len(self._in_flight) < self.config.steps_in_flight:
            if self._in_flight and isinstance(self._in_flight[-1][1], StepError):
                break
            plan = self.scheduler.schedule()
            if plan is None:
                break
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
            self._num_grammar_waits += 1
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
        self._wait_seconds += time.perf_counter() - start
        self._in_flight.popleft()
        self._num_steps += 1
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
            step_id = self._in_flight[0][0].step_id if self._in_flight else self._num_steps
            error = StepError(repr(error), step_id=step_id)
        self._in_flight.clear()
        self._changed += self.scheduler.abandon(error)
        if self._lost is None:
            self.runner.discard()

    def kv_report(self) -> KVUsage:
        """Return the KV cache's sizes in bytes, and how much of it is in use."""
        report, pools = self.runner.kv_report(), self.scheduler.pools
        block_bytes = [group["block_bytes"] for group in report["groups"]]

        def nbytes(counts: Iterable[int]) -> int:
            return sum(map(operator.mul, counts, block_bytes))

        held = [pool.num_held for pool in pools]
        features = self.scheduler.features
        row_bytes = report["feature_bytes"] // max(features.num_rows, 1)
        return KVUsage(
            **report,
            held_blocks=held,
            held_bytes=nbytes(held),
            peak_held_bytes=nbytes(pool.peak_held for pool in pools),
            held_feature_bytes=features.num_held * row_bytes,
            cached_feature_bytes=features.num_cached * row_bytes,
            free_share=nbytes(pool.num_free for pool in pools)
            / nbytes(pool.num_blocks for pool in pools),
        )

    def metrics(self) -> Metrics:
        """Return the counters as a plain dict."""
        scheduler, runner, speculation = self.scheduler, self.runner, self._speculation
        return Metrics(
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_finished_requests=scheduler.num_finished,
            num_running_requests=len(scheduler.running),
            num_waiting_requests=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            num_free_blocks=scheduler.pools.num_free,
            num_kv_blocks=scheduler.pools[0].num_blocks,
            num_prefix_queries=scheduler.num_prefix_queries,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            num_prefix_waits=scheduler.num_prefix_waits,
            wasted_tokens=scheduler.wasted_tokens,
            staging_waits=runner.num_staging_waits,
            num_compilations=runner.num_compilations,
            num_graph_steps=runner.num_graph_steps,
            num_nan_rows=scheduler.num_nan_rows,
            num_drafts=0 if speculation is None else speculation.num_drafts,
            num_draft_tokens=0 if speculation is None else speculation.num_draft_tokens,
            num_accepted_tokens=0 if speculation is None else speculation.num_accepted_tokens,
            grammar_waits=self._num_grammar_waits,
            host_seconds=self._host_seconds,
            wait_seconds=self._wait_seconds,
            gpu_seconds=runner.gpu_seconds,
        )
