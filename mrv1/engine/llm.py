"""The public entry: a checkpoint in, text or tokens out."""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from mrv1.engine.adapter_calls import AdapterCalls
from mrv1.engine.adapters import LoRARequest
from mrv1.engine.chat import (
    ChatOptions,
    ChatTemplate,
    ChatTemplateError,
    Message,
    split_conversations,
)
from mrv1.engine.core import EngineCore
from mrv1.engine.guards import in_turn, reports
from mrv1.engine.image_encoder import ImageEncoder
from mrv1.engine.llm_options import LLMOptions, policy_or_text, resolve_options
from mrv1.engine.outputs import RequestOutput
from mrv1.engine.prompts import (
    Prompt,
    Submission,
    is_prompt,
    params_per_prompt,
    per_prompt,
    refused,
    with_items,
)
from mrv1.engine.reports import Metrics
from mrv1.engine.sampling_defaults import SamplingDefaults
from mrv1.engine.shared_engine import SharedEngine
from mrv1.engine.tokenizer import Tokenizer
from mrv1.errors import RequestError, short
from mrv1.from_vllm import ARGUMENTS, OtherArguments, refuse_attribute, translated
from mrv1.headwise import HeadPolicy
from mrv1.models import ModelConfig, NamedTensors
from mrv1.options import takes
from mrv1.progress import UseTqdm, counting_items
from mrv1.runner import EachRank, KVListener, KVUsage
from mrv1.sampler import LogitsProcessor, SamplingParams

logger = logging.getLogger(__name__)


class LLM(AdapterCalls):
    """Generates text from a Hugging Face checkpoint.

    It holds device memory until ``close`` or the end of ``with``. For asyncio see ``AsyncLLM``.

    **Threads.** Any thread may call any method. Threads take turns, one step at a time, and share
    the steps: their requests run in one batch, also those of a ``stream`` that nobody reads, and
    each call gets its own outputs. ``abort`` and ``close`` take effect after the current step.
    Reports (``metrics``, ``kv_report``, ``describe``, ``is_sleeping``) wait for no step. After
    ``close``, calls in other threads raise a ``RuntimeError``, as does a call from a callback or a
    signal handler within another call, unless it is a report. On a GPU all threads must launch on
    the same current stream, which they do by default.

    **Forks.** A forked child may use the engine on a CPU, where it has one of its own from then
    on. With a GPU or several ranks, its calls raise a ``RuntimeError``.

    **Values.** A request copies its prompt, with items and arrays, and its parameters at the call.

    **Interrupts.** An exception in the middle of a step (``KeyboardInterrupt``) ends every running
    request with an error, in all threads, and empties the prefix cache; later calls work as usual.

    Examples:
        >>> with LLM("tiny") as llm:
        ...     output = llm.generate("ROMEO:", SamplingParams(max_tokens=8))[0]
        >>> len(output.outputs[0].token_ids)
        8
    """

    @takes(LLMOptions)
    def __init__(
        self,
        model: str,
        *,
        head_policy: HeadPolicy | str | Path | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        override_generation_config: Mapping[str, Any] | None = None,
        use_tqdm_on_load: bool = True,
        **options: object,
    ) -> None:
        """Load ``model`` and allocate its KV cache.

        Raises:
            ConfigError: an argument or the checkpoint is wrong.
            UnsupportedDeviceError: the device is missing or lacks a feature.
            CapacityError: the KV cache does not fit.
        """
        config, checkpoint, policy = resolve_options(
            model, head_policy, options, use_tqdm_on_load=use_tqdm_on_load
        )
        # First: a damaged small file fails before weights load, not minutes later. transformers
        # reads config.json for a tokenizer too, which is not to blame for a mistake there.
        ModelConfig.from_pretrained(checkpoint.path, generation_config=config.generation_config)
        self._tokenizer = Tokenizer(checkpoint.path)
        self._defaults = SamplingDefaults.read(
            checkpoint, config.generation_config, override_generation_config
        )
        core = EngineCore(
            config,
            head_policy=policy,
            logits_processors=logits_processors,
            progress=use_tqdm_on_load,
            eos_token_ids=self._tokenizer.eos_token_ids,
        )
        if self._defaults.description:
            logger.info("%s", self._defaults.description)
        self.shared = SharedEngine(core, self._tokenizer)  # the engine as the threads share it
        self._turns = self.shared.turns
        self._images = ImageEncoder(config)

    if not TYPE_CHECKING:  # a checker of types shall find misspelt names
        __getattr__ = refuse_attribute

    # --- whole requests -------------------------------------------------------------------

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request without any: ``default_sampling_params``."""
        return SamplingParams(**self.default_sampling_params)

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """The values that ``generation_config`` sets, by field of ``SamplingParams``; a copy."""
        return dict(self._defaults.values)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
        fairness_id: str | Sequence[str] = "",
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Unpack[OtherArguments],
    ) -> list[RequestOutput]:
        """Return the finished outputs of ``prompts``, in their order.

        Args:
            prompts: one prompt, or a list of prompts; None is refused.
            sampling_params: for all, or a list of the same length; None =
                ``get_default_sampling_params()``. Parameters that are given are taken as they are.
            use_tqdm: show a progress bar for a list of prompts; only in the main thread, because a
                terminal has room for one bar, and only if stderr is a terminal. A class such as
                ``tqdm.tqdm``, or another function of ``total`` and ``desc``, makes the bar
                instead, wherever stderr goes; its ``update(n)`` and ``close()`` are called.
            priority: with ``scheduling_policy="priority"``, prompts with a lower value run first;
                for all, or a list of the same length; None = 0.
            fairness_id: under that policy, prompts of one priority take turns by this key of their
                caller; for all, or a list of the same length.
            lora_request: with ``enable_lora``, the adapter to use; for all, or a list of the same
                length. It is loaded if it is not yet (``add_lora``); None = the model alone.
            **others: arguments that vLLM has and mrv1 has not: an error says what to do instead.

        Raises:
            RequestError: the arguments contradict each other, or a single prompt was refused. In a
                list a failed request is returned finished with ``error`` set; the others continue.
            StepError: the step of a single prompt failed, or the GPU has failed before.
        """
        expected = "an argument of generate"
        if unknown := translated(others, ARGUMENTS, expected, RequestError):
            raise TypeError(f"{min(unknown)}: expected {expected}, got an unknown one")
        single = is_prompt(prompts)
        batch = cast("list[Prompt]", [prompts] if single else list(prompts or ()))
        return self._generate(
            batch, sampling_params, single=single, use_tqdm=use_tqdm,
            priority=0 if priority is None else priority, fairness_id=fairness_id,
            lora_request=lora_request,
        )  # fmt: skip

    def _generate(
        self,
        batch: Sequence[Prompt | RequestError],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        single: bool,
        use_tqdm: UseTqdm,
        lora_request: object,
        priority: object = 0,
        fairness_id: object = "",
    ) -> list[RequestOutput]:
        """Return the outputs of prompts, or of the errors with which some were refused."""
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            raise RequestError(
                f"use_tqdm: expected True, False or a class such as tqdm, got {short(use_tqdm)}"
            )
        params = params_per_prompt(sampling_params, len(batch), self.get_default_sampling_params())
        priorities = per_prompt("priority", priority, len(batch))
        fairness_ids = per_prompt("fairness_id", fairness_id, len(batch))
        adapters = per_prompt("lora_request", lora_request, len(batch))
        outputs: list[RequestOutput | None] = [None] * len(batch)
        given: dict[int, Submission] = {}
        for row, prompt in enumerate(batch):
            try:
                if isinstance(prompt, RequestError):
                    raise prompt
                given[row] = Submission(
                    prompt, params[row], priorities[row], fairness_ids[row], adapters[row]
                )
            except RequestError as error:
                outputs[row] = refused(self.shared.new_id(), None, error)
        rows: dict[str, int] = {}
        try:
            for row, one in given.items():
                outputs[row] = self.shared.add_awaited(one, rows, row)
            with counting_items(use_tqdm, "generate", len(batch), visible=not single) as advance:
                advance(len(batch) - len(rows))
                while rows:
                    for output in self.shared.step_for(rows, finished_only=True):
                        outputs[rows.pop(output.request_id)] = output
                        advance(1)
        finally:
            self.shared.give_up(rows)
        finished = [output for output in outputs if output is not None]
        if single and finished[0].error is not None:
            raise finished[0].error
        return finished

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        fairness_id: str = "",
        lora_request: LoRARequest | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Yield the output of one prompt as it grows; the last output is finished.

        The request copies its values at the call, and is checked and queued at the first ``next``;
        closing the generator early aborts it. Other arguments are as in ``generate``.

        Raises:
            RequestError: the prompt was refused, or the request failed, as with NaN in its logits;
                at the call if the prompt cannot be copied.
            StepError: a step of the request failed, or the GPU has failed before.
        """
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        return self._stream(
            Submission(prompt, sampling_params, priority, fairness_id, lora_request)
        )

    def _stream(self, given: Submission) -> Generator[RequestOutput, None, None]:
        """Yield the output of a submission; for ``stream``."""
        rows: dict[str, int] = {}
        try:
            output = self.shared.add_awaited(given, rows, 0)
            if output is not None and output.error is not None:
                raise output.error
            while rows:
                for output in self.shared.step_for(rows):
                    if output.finished:
                        rows.clear()
                    if output.error is not None:
                        raise output.error
                    yield output
        finally:
            self.shared.give_up(rows)

    # --- conversations --------------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        multimodal: Sequence[Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Return the model's answers to conversations, in their order.

        Args:
            messages: one conversation, a list of dicts with ``role`` and ``content``, or a list
                of conversations. A content is text or a list of parts: texts, and for a model
                with a vision encoder images and videos:
                ``{"type": "image", "image": ...}`` with an image as in ``VisionEncoder.prompt``,
                ``{"type": "image_url", "image_url": {"url": ...}}`` with a file or a data URL, or
                ``{"type": "video", "video": frames, "fps": ...}`` with the fields of a ``Video``.
                An assistant's message, or one with ``tool_calls``, needs no content.
            sampling_params: for all, or a list of the same length; None as in ``generate``.
            use_tqdm: show a progress bar for a list of conversations, as in ``generate``.
            multimodal: the items of the conversation, whose ``start`` counts the tokens of
                ``chat_prompt``; for a list of conversations a list of such lists, each None for
                plain text.
            lora_request: as in ``generate``.
            **options: how the template writes a conversation, see ``ChatOptions``.

        Raises:
            RequestError: there is no tokenizer or no template, the template cannot be parsed, or a
                single conversation was refused. In a list a failed conversation is returned
                finished with ``error`` set; the others continue.
            StepError: the step of a single conversation failed, or the GPU has failed before.
        """
        batch, single = split_conversations(messages)
        template = self._template(options)
        items: object = [multimodal] if single else multimodal
        if items is None:
            items = [None] * len(batch)
        if not isinstance(items, Sequence) or len(items) != len(batch):
            raise RequestError(
                f"multimodal: expected a list of {len(batch)} lists, one for each conversation, "
                f"got {short(multimodal)}"
            )
        prompts: list[Prompt | RequestError] = []
        for conversation, own in zip(batch, items, strict=True):
            try:
                prompts.append(with_items(template.prompt(conversation), own))
            except RequestError as error:
                if single or isinstance(error, ChatTemplateError):
                    raise
                prompts.append(error)
        return self._generate(
            prompts, sampling_params, single=single, use_tqdm=use_tqdm, lora_request=lora_request
        )

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        multimodal: Sequence[Any] | None = None,
        lora_request: LoRARequest | None = None,
        **options: Unpack[ChatOptions],
    ) -> Generator[RequestOutput, None, None]:
        """Yield the answer to a conversation as it grows, like ``stream``; errors of ``chat``."""
        prompt = with_items(self.chat_prompt(messages, **options), multimodal)
        return self.stream(prompt, sampling_params, lora_request=lora_request)

    def chat_prompt(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Return a conversation as the prompt that the chat template writes; errors as ``chat``.

        ``generate``, ``stream`` and ``add_request`` add no special tokens to it.
        """
        return self._template(options).prompt(messages)

    def _template(self, options: ChatOptions) -> ChatTemplate:
        own = translated(options, ARGUMENTS, "an argument of chat", RequestError)
        return ChatTemplate(
            tokenizer=self._tokenizer,
            encode_visuals=self._images.encode,
            check_visuals=self._images.load,
            **own,
        )

    # --- step by step ---------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        fairness_id: str = "",
        lora_request: LoRARequest | None = None,
    ) -> str:
        """Queue a request for ``step`` and return its id; arguments as in ``stream``.

        Raises:
            RequestError: the prompt, the parameters or the id are wrong; nothing is queued.
        """
        given = Submission(prompt, sampling_params, priority, fairness_id, lora_request)
        return self.shared.add(given, request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step and return the outputs of the requests that got a token or ended.

        Requests of ``generate`` and ``stream`` run too, but these calls return their outputs.
        """
        return self.shared.step()

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do or to deliver."""
        return self.shared.has_unfinished_requests

    def abort(self, request_id: str) -> None:
        """End all outputs of a request; ``step`` delivers their tokens so far.

        Unfinished outputs get ``finish_reason="abort"``. An id that is unknown or finished is
        ignored: the request may just have ended.
        """
        self.shared.abort(request_id)

    # --- memory and weights ---------------------------------------------------------------

    @in_turn
    def sleep(self, level: int = 1) -> None:
        """Give most device memory back until ``wake_up``, without ending the process.

        The KV cache, the CUDA graphs and the buffer for multimodal features are freed, the prefix
        cache is emptied, and the weights leave the device; request state, rope tables and the CUDA
        context stay. A sleeping engine may change its level. An error changes nothing.

        Args:
            level: 1 = the weights are copied to pinned host memory (on a CPU they stay where they
                are), and ``wake_up`` restores them; 2 = they are dropped: after ``wake_up``,
                ``update_weights`` must give every tensor before the next request.

        Raises:
            ConfigError: there is no such level.
            CapacityError: the host has no room for the weights.
            RuntimeError: a request is unfinished.
        """
        self.shared.abort_forgotten()
        self.engine.sleep(level)

    @in_turn
    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the device memory back; when nothing sleeps any more, capture CUDA graphs again.

        Args:
            tags: ``["weights"]`` or ``["kv_cache"]``, to wake up one first; None = all. Waking
                twice is harmless.

        Raises:
            ConfigError: there is no such tag.
            CapacityError: the device has no room; what slept sleeps on, so call it again.
        """
        self.engine.wake_up(tags)

    @reports
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are asleep; requests are then refused."""
        return self.engine.runner.is_sleeping

    @in_turn
    def update_weights(self, named_tensors: NamedTensors, *, partial: bool = False) -> None:
        """Overwrite the model's weights in place, and empty the prefix cache.

        Names, shapes and types are checked before the first byte is written, values (NaN) are not;
        an iterator is read to its end first: to save memory, give a few tensors at a time, with
        ``partial``. An error changes nothing; after an interrupt, requests are refused until the
        same tensors have been given again.

        Args:
            named_tensors: a dict, or pairs of name and tensor, on any device and of any floating
                dtype. Names and shapes are those of the checkpoint's own tensors, so that parts of
                a fused projection come one by one (``q_proj``). As in a checkpoint, a tied
                ``lm_head.weight`` stands for the embedding, which it must equal if both are given,
                and the scales of an fp8 cache are ignored.
            partial: accept some of the tensors; the others keep their values.

        Raises:
            ConfigError: a tensor is missing, unknown, given twice or of another shape or type.
            RuntimeError: a request is unfinished, or the weights are asleep.
        """
        self.shared.abort_forgotten()
        self.engine.update_weights(named_tensors, partial=partial)

    @in_turn
    def set_head_policy(self, policy: HeadPolicy | str | Path | None) -> None:
        """Let KV heads see other tokens from now on, with a KV cache divided anew.

        The weights stay where they are. The memory of the cache is allocated again, the prefix
        cache is emptied, and CUDA graphs are captured. Outputs are those of a new ``LLM`` with
        ``head_policy=policy``. An error changes nothing.

        Args:
            policy: as the option ``head_policy``; None = the checkpoint's, or else every head sees
                all that its layer sees.

        Raises:
            ConfigError: the policy cannot be read or is not for this model, or there are several
                ranks.
            CapacityError: the new cache does not fit.
            RuntimeError: a request is unfinished, or weights or KV cache are asleep.
        """
        self.shared.abort_forgotten()
        with self._turns.reports:  # they need a cache
            self.engine.set_head_policy(policy_or_text(policy))

    @in_turn
    def set_kv_listener(self, listener: KVListener | EachRank | None) -> None:
        """Tell ``listener`` of the keys and values of every step launched from now on.

        It is called layer by layer when a layer's keys and values are on their way into the cache,
        with the tokens of each request, and with those that the prefix cache had.

        Args:
            listener: see ``mrv1.runner.KVListener``. If it raises, the requests of that step end
                with a ``StepError``, and the engine goes on. None = no listener. With several
                ranks, an ``mrv1.runner.EachRank``: each rank has a listener of its own, for the
                heads that it has.

        Raises:
            ConfigError: there are several ranks, and the listener is not for each of them, cannot
                be pickled, or cannot be made on one; nothing has changed.
            CapacityError: graphs that record events for the first listener do not fit; nobody
                listens.
        """
        self.engine.set_kv_listener(listener)

    # --- reports and end ------------------------------------------------------------------

    @property
    def engine(self) -> EngineCore:
        """The engine below, for tools and tests; a RuntimeError if the ``LLM`` was closed."""
        return self.shared.engine

    @reports
    def describe(self) -> str:
        """Return the start-up line: model, device, path, dtypes, blocks, sampling defaults."""
        parts = (self.engine.runner.describe(), self._defaults.description)
        return ", ".join(filter(None, parts))

    @reports
    def kv_report(self) -> KVUsage:
        """Return the KV cache's sizes in bytes by head group, and how much of it is in use."""
        return self.engine.kv_report()

    @reports
    def metrics(self) -> Metrics:
        """Return counters of steps, tokens, requests and blocks as a plain dict."""
        return self.engine.metrics()

    def get_tokenizer(self) -> Any:  # noqa: ANN401 - one of many classes of transformers
        """Return the checkpoint's own transformers tokenizer; a ConfigError if it has none."""
        return self._tokenizer.library

    def reset_prefix_cache(self) -> bool:
        """Drop every cached block; return False, with nothing dropped, while a request runs."""
        return self.shared.reset_prefix_cache()

    def close(self) -> None:
        """End all requests and give the device memory back; closing twice is harmless."""
        self.shared.close()
        self._images.close()

    def __enter__(self) -> Self:
        """Return the engine itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
