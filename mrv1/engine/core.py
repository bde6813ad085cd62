"""The loop between scheduler and runner, on token ids."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import TypedDict

import numpy as np

from mrv1.config import EngineConfig
from mrv1.engine.request import Request
from mrv1.engine.scheduler import Scheduler
from mrv1.errors import RequestError, StepError
from mrv1.models import DecoderModel
from mrv1.runner import ModelRunner
from mrv1.sampler import SamplingParams


class Metrics(TypedDict):
    """Counters since the engine was made."""

    num_steps: int
    num_prompt_tokens: int
    """Tokens of admitted prompts."""
    num_generated_tokens: int
    num_finished_requests: int
    num_running_requests: int
    num_waiting_requests: int
    num_preemptions: int
    num_free_blocks: int
    step_seconds: float
    """Time spent in steps, waiting for the device included."""


def derive_seed(engine_seed: int, admission: int) -> int:
    """Return the 64-bit seed of the ``admission``-th request that brought none of its own."""
    digest = hashlib.blake2b(f"{engine_seed}/{admission}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class EngineCore:
    """Takes requests as token ids and steps until they are done; one step in flight."""

    def __init__(
        self, config: EngineConfig, *, model: DecoderModel | None = None, progress: bool = True
    ) -> None:
        """Build runner and scheduler; arguments and errors are those of ``ModelRunner``."""
        self.config = config
        self.runner = ModelRunner(config, model=model, progress=progress)
        self.scheduler = Scheduler(
            num_blocks=self.runner.kv_cache.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            eos_token_ids=self.runner.model_config.eos_token_ids,
        )
        self._num_added = 0
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._step_seconds = 0.0

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output in tokens."""
        return self.runner.max_model_len

    def add_request(
        self, req_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> Request:
        """Queue a request.

        Raises:
            RequestError: the prompt is empty, too long or out of the vocabulary, the id is in use,
                or the request can never fit; nothing is queued.
        """
        prompt = self._checked_prompt(prompt_token_ids)
        self._check_stop_token_ids(params)
        longest = self.max_model_len
        request = Request(
            req_id=req_id,
            prompt_token_ids=prompt,
            params=params,
            seed=derive_seed(self.config.seed, self._num_added)
            if params.seed is None
            else params.seed,
            max_total_tokens=longest
            if params.max_tokens is None
            else min(longest, len(prompt) + params.max_tokens),
        )
        self.scheduler.add(request)
        self._num_added += 1
        self._num_prompt_tokens += len(prompt)
        return request

    def _checked_prompt(self, prompt_token_ids: object) -> tuple[int, ...]:
        if not isinstance(prompt_token_ids, Iterable):
            raise RequestError(f"prompt_token_ids: expected a list, got {prompt_token_ids!r}")
        prompt = tuple(t.item() if isinstance(t, np.integer) else t for t in prompt_token_ids)
        if not prompt:
            raise RequestError("prompt: expected at least one token, got none")
        vocab_size = self.runner.model_config.vocab_size
        for index, token in enumerate(prompt):
            if type(token) is not int or not 0 <= token < vocab_size:  # True is an int, too
                raise RequestError(
                    f"prompt_token_ids: expected integers in [0, {vocab_size}), got {token!r} "
                    f"at index {index}"
                )
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"prompt: expected fewer than {self.max_model_len} tokens (max_model_len, with "
                f"one left to generate), got {len(prompt)}"
            )
        return prompt

    def _check_stop_token_ids(self, params: SamplingParams) -> None:
        vocab_size = self.runner.model_config.vocab_size
        outside = [token for token in params.stop_token_ids if token >= vocab_size]
        if outside:
            raise RequestError(f"stop_token_ids: expected ids in [0, {vocab_size}), got {outside}")

    def step(self) -> list[Request]:
        """Run one step; return the requests that got a token or ended in it."""
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        start = time.perf_counter()
        try:
            changed = self.scheduler.update(self.runner.execute(plan).result())
        except StepError as error:
            changed = self.scheduler.fail_step(plan.req_ids, error)
        except BaseException as error:
            # An interrupt, say: the scheduler has counted a step whose output never came.
            interrupted = StepError(repr(error), step_id=plan.step_id, req_ids=plan.req_ids)
            self.scheduler.fail_step(plan.req_ids, interrupted)
            raise
        self._num_steps += 1
        self._step_seconds += time.perf_counter() - start
        self._num_generated_tokens += sum(request.error is None for request in changed)
        return changed

    def metrics(self) -> Metrics:
        """Return the counters as a plain dict."""
        return Metrics(
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_finished_requests=self.scheduler.num_finished,
            num_running_requests=len(self.scheduler.running),
            num_waiting_requests=len(self.scheduler.waiting),
            num_preemptions=self.scheduler.num_preemptions,
            num_free_blocks=self.scheduler.pool.num_free,
            step_seconds=self._step_seconds,
        )
