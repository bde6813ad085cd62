"""The public entry: a checkpoint in, text or tokens out."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast

from mrv1.config import EngineConfig
from mrv1.device import resolve_device
from mrv1.engine.chat import ChatOptions, ChatTemplate, Message, split_conversations
from mrv1.engine.core import EngineCore, Metrics
from mrv1.engine.guards import WITHIN, Turns, in_turn, recovers, reports
from mrv1.engine.intake import own_params, own_prompt
from mrv1.engine.outputs import CompletionOutput, RequestOutput
from mrv1.engine.request import Request
from mrv1.engine.request_group import RequestGroup
from mrv1.engine.sampling_defaults import SamplingDefaults
from mrv1.engine.tokenizer import ChatPrompt, ChatTemplateError, Tokenizer
from mrv1.errors import ConfigError, RequestError, UnsupportedDeviceError
from mrv1.headwise import HeadPolicy, policy_source
from mrv1.models import Checkpoint, ModelConfig, NamedTensors
from mrv1.multimodal import Video, VisionEncoder
from mrv1.multimodal.reading import reading
from mrv1.options import env_fields, takes
from mrv1.progress import UseTqdm, counting_items
from mrv1.runner import KVListener, KVUsage
from mrv1.sampler import LogitsProcessor, SamplingParams
from mrv1.sampler.params import short

Prompt = str | Sequence[int] | Mapping[str, object]
"""A text, a list of token ids, or a dict with ``prompt`` or ``prompt_token_ids``, and optionally
``multimodal`` (a list of ``MultimodalItem``) and ``attn_mask_offsets``."""

PROMPT_KEYS = ("prompt", "prompt_token_ids")

MULTIMODAL_KEYS = ("multimodal", "attn_mask_offsets")
"""More keys that a dict may have, as ``EngineCore.add_request`` names them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMOptions(EngineConfig):
    """The parameters of ``LLM``: the engine's options, and objects that no configuration holds."""

    model: str = field(kw_only=False)
    head_policy: HeadPolicy | str | Path | None = None  # type: ignore[assignment]
    """Which tokens each KV head sees: a policy; ``ratio=0.5,window=256,sink=64`` (that share of
    each layer's heads streams; also ``full_layers_every``), the JSON file of a policy, the folder
    of a DuoAttention pattern (half of the heads stream), or a checkpoint whose ``config.json`` has
    FastDeploy's fields. Default: the environment variable ``MRV1_HEAD_POLICY``, else the fields
    of the model's own checkpoint, else each head sees all tokens that its layer sees."""
    logits_processors: Sequence[LogitsProcessor] = ()
    """The caller's own processors, which edit the logits of every step."""
    override_generation_config: Mapping[str, Any] | None = None
    """Sampling defaults that replace those of ``generation_config``, by the names of
    ``generation_config.json``: temperature, top_k, top_p, min_p, repetition_penalty,
    max_new_tokens."""
    use_tqdm_on_load: bool = True
    """Show progress bars while the model is downloaded and loaded and CUDA graphs are captured;
    only if stderr is a terminal."""


class LLM:
    """Generates text from a Hugging Face checkpoint.

    It holds device memory until ``close``; as a context manager it closes itself. ``AsyncLLM``
    is the same for asyncio.

    **Threads.** Any thread may call any method. Threads take turns, one step at a time, and share
    the steps: requests of several ``generate`` and ``stream`` calls run in one batch, and each
    call gets its own outputs, as if it ran alone. A ``stream`` that nobody reads blocks no other
    call: its request goes on in the steps of other calls. ``abort`` and ``close`` take effect
    after the current step. Reports (``metrics``, ``kv_report``, ``describe``, ``is_sleeping``)
    wait for no step. After ``close``, calls in other threads raise a ``RuntimeError``, as does a
    call from a callback or a signal handler within another call, unless it is a report. On a GPU
    all threads must launch on the same current stream, which they do by default.

    **Forks.** A forked child may use the engine on a CPU, where it has one of its own from then
    on. With a GPU or with several ranks, which a child does not have, its calls raise a
    ``RuntimeError``.

    **Values.** A request takes its prompt, with items and arrays, and its parameters at the call,
    as copies: what the caller changes afterwards belongs to its next request.

    **Interrupts.** An exception in the middle of a step (``KeyboardInterrupt``) ends every running
    request with an error, in all threads, and empties the prefix cache; later calls work as usual.

    Example:
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
        made = env_fields(EngineConfig)
        given: dict[str, Any] = {
            name: value for name, value in options.items() if value is not None or name not in made
        }
        known = [each.name for each in fields(EngineConfig)]
        for name in given:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise TypeError(f"{name}: expected an option of LLM, got an unknown one{hint}")
        policy = head_policy if isinstance(head_policy, HeadPolicy) else None
        if policy is None and head_policy is not None:
            is_path = isinstance(head_policy, Path)
            given["head_policy"] = str(head_policy) if is_path else head_policy
        given["model"] = str(model) if isinstance(cast("object", model), Path) else model
        config = EngineConfig(**given)
        resolve_device(config.vision_device, "vision_device")  # not with the first image
        if policy is None and config.head_policy is not None:
            policy_source(config.head_policy)  # a mistake in it is found before a download
        if not isinstance(use_tqdm_on_load, bool):
            raise ConfigError(
                f"use_tqdm_on_load: expected True or False, got {short(use_tqdm_on_load)}"
            )
        checkpoint = Checkpoint.open(config.model, progress=use_tqdm_on_load)
        config = replace(config, model=str(checkpoint.path))
        # First: a damaged small file fails before weights load, not minutes later. transformers
        # reads config.json for a tokenizer too, which is not to blame for a mistake there.
        ModelConfig.from_pretrained(checkpoint.path, generation_config=config.generation_config)
        self._tokenizer = Tokenizer(checkpoint.path)
        self._defaults = SamplingDefaults.of(
            checkpoint, config.generation_config, override_generation_config
        )
        self._core: EngineCore | None = EngineCore(
            config,
            head_policy=policy,
            logits_processors=logits_processors,
            progress=use_tqdm_on_load,
            eos_token_ids=self._tokenizer.eos_token_ids,
        )
        if self._defaults.description:
            logger.info("%s", self._defaults.description)
        self._encoder: VisionEncoder | None = None
        """The encoder of images in conversations, loaded for the first one."""
        self._encoding, self._turns = Turns(), Turns()
        self._is_closed = False
        self._is_changing = False
        self._groups: dict[str, RequestGroup] = {}
        """Requests whose last output has not been delivered, by id."""
        self._undelivered: dict[str, RequestGroup] = {}
        """Changed requests of ``add_request``: the next ``step`` returns their outputs."""
        self._awaited: dict[str, RequestGroup] = {}
        """Changed requests of ``generate`` and ``stream``, which will take their outputs."""
        self._given_up: deque[str] = deque()
        """Requests to be aborted: their ``generate`` or ``stream`` has ended before them."""
        self._ids = itertools.count()

    # --- whole requests -------------------------------------------------------------------

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests whose caller gives none.

        They are ``SamplingParams()`` with the values of the model's ``generation_config.json``;
        see ``default_sampling_params`` and the option ``generation_config``.
        """
        return SamplingParams(**self.default_sampling_params)

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """The values that ``generation_config`` sets, by field of ``SamplingParams``; a copy."""
        return dict(self._defaults.values)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Sequence[int] | None = None,
        fairness_id: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Return the finished outputs of ``prompts``, in their order.

        Args:
            prompts: one prompt, or a list of prompts.
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

        Raises:
            RequestError: the arguments contradict each other, or a single prompt was refused. In a
                list a failed request is returned finished with ``error`` set; the others continue.
            StepError: the step of a single prompt failed, or the GPU has failed before.
        """
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            raise RequestError(
                f"use_tqdm: expected True, False or a class such as tqdm, got {short(use_tqdm)}"
            )
        single = _is_prompt(prompts)
        batch = cast("list[Prompt]", [prompts] if single else list(prompts))
        default = self.get_default_sampling_params()
        params = _params_per_prompt(sampling_params, len(batch), default)
        priorities = _per_prompt("priority", 0 if priority is None else priority, len(batch))
        fairness_ids = _per_prompt("fairness_id", fairness_id, len(batch))
        outputs: list[RequestOutput | None] = [None] * len(batch)
        for row, prompt in enumerate(batch):
            try:
                batch[row] = own_prompt(prompt)
            except RequestError as error:
                outputs[row] = _refused(self._new_id(), None, error)
        rows: dict[str, int] = {}
        try:
            for row, prompt in enumerate(batch):
                if outputs[row] is None:
                    outputs[row] = self._add_awaited(
                        prompt, params[row], rows, row, priorities[row], fairness_ids[row]
                    )
            with counting_items(use_tqdm, "generate", len(batch), visible=not single) as advance:
                advance(len(batch) - len(rows))
                while rows:
                    for output in self._step_for(rows, finished_only=True):
                        outputs[rows.pop(output.request_id)] = output
                        advance(1)
        finally:
            self._give_up(rows)
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
    ) -> Generator[RequestOutput, None, None]:
        """Yield the output of one prompt as it grows; the last output is finished.

        The request takes its values at the call, and is checked and queued at the first ``next``;
        a consumer that stops early aborts it. For ``priority`` and ``fairness_id`` see
        ``generate``.

        Raises:
            RequestError: the prompt was refused, or the request failed, as with NaN in its logits;
                at the call if the prompt cannot be copied.
            StepError: a step of the request failed, or the GPU has failed before.
        """
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        return self._stream(own_prompt(prompt), own_params(sampling_params), priority, fairness_id)

    def _stream(
        self, prompt: Prompt, sampling_params: SamplingParams, priority: int, fairness_id: str
    ) -> Generator[RequestOutput, None, None]:
        """Yield the output of a prompt and parameters of its own; for ``stream``."""
        rows: dict[str, int] = {}
        try:
            refused = self._add_awaited(prompt, sampling_params, rows, 0, priority, fairness_id)
            if refused is not None and refused.error is not None:
                raise refused.error
            while rows:
                for output in self._step_for(rows):
                    if output.finished:
                        rows.clear()
                    if output.error is not None:
                        raise output.error
                    yield output
        finally:
            self._give_up(rows)

    # --- conversations --------------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any] | Callable[..., object]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        sanitize_control_tokens: bool = True,
        multimodal: Sequence[Any] | None = None,
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
            chat_template: the template's text, or the name of one of the checkpoint's templates;
                None = the checkpoint's own.
            add_generation_prompt: end each prompt with the beginning of a new answer.
            continue_final_message: continue the last message instead, or the field of it that is
                named; needs ``add_generation_prompt=False``.
            tools: tools that the template describes to the model, as JSON schemas or functions.
            chat_template_kwargs: more variables for the template.
            sanitize_control_tokens: encode control tokens in the messages, tools and variables as
                ordinary text, so that only the template writes them; without effect before
                transformers 5.20.
            multimodal: the items of the conversation, whose ``start`` counts the tokens of
                ``chat_prompt``; for a list of conversations a list of such lists, each None for
                plain text.

        Raises:
            RequestError: there is no tokenizer or no template, the template cannot be parsed, or a
                single conversation was refused. In a list a failed conversation is returned
                finished with ``error`` set; the others continue.
            StepError: the step of a single conversation failed, or the GPU has failed before.
        """
        batch, single = split_conversations(messages)
        template = ChatTemplate(
            tokenizer=self._tokenizer,
            encode_visuals=self._encode_visuals,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            sanitize_control_tokens=sanitize_control_tokens,
        )
        if single:
            prompt = _with_items(template.prompt(messages), multimodal)
            return self.generate(prompt, sampling_params, use_tqdm=use_tqdm)
        items: object = [None] * len(batch) if multimodal is None else multimodal
        if not isinstance(items, Sequence) or len(items) != len(batch):
            raise RequestError(
                f"multimodal: expected a list of {len(batch)} lists, one for each conversation, "
                f"got {short(multimodal)}"
            )
        default = self.get_default_sampling_params()
        params = _params_per_prompt(sampling_params, len(batch), default)
        prompts: dict[int, Prompt] = {}
        errors: dict[int, RequestError] = {}
        for row, conversation in enumerate(batch):
            try:
                prompts[row] = _with_items(template.prompt(conversation), items[row])
            except ChatTemplateError:
                raise
            except RequestError as error:
                errors[row] = error
        outputs = iter(
            self.generate(
                list(prompts.values()), [params[row] for row in prompts], use_tqdm=use_tqdm
            )
        )
        return [
            _refused(self._new_id(), None, errors[row]) if row in errors else next(outputs)
            for row in range(len(batch))
        ]

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        multimodal: Sequence[Any] | None = None,
        **options: Unpack[ChatOptions],
    ) -> Generator[RequestOutput, None, None]:
        """Yield the answer to one conversation as it grows, as ``stream`` does.

        Args:
            messages: the conversation.
            sampling_params: None as in ``generate``.
            multimodal: the items of the conversation, as in ``chat``.
            **options: how the conversation becomes a prompt, as in ``chat``.

        Raises:
            RequestError: as in ``chat``; at once if the conversation has no prompt.
            StepError: a step of the request failed, or the GPU has failed before.
        """
        prompt = _with_items(self.chat_prompt(messages, **options), multimodal)
        return self.stream(prompt, sampling_params)

    def chat_prompt(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Return one conversation as the prompt that the chat template writes.

        ``generate``, ``stream`` and ``add_request`` add no special tokens to this prompt.

        Args:
            messages: the conversation.
            **options: as in ``chat``.

        Raises:
            RequestError: as in ``chat``.
        """
        template = ChatTemplate(
            tokenizer=self._tokenizer, encode_visuals=self._encode_visuals, **options
        )
        return template.prompt(messages)

    # --- step by step ---------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        fairness_id: str = "",
    ) -> str:
        """Queue a request for ``step`` and return its id.

        For ``priority`` and ``fairness_id`` see ``generate``.

        Raises:
            RequestError: the prompt, the parameters or the id are wrong; nothing is queued.
        """
        return self._add_undelivered(
            own_prompt(prompt), own_params(sampling_params), request_id, priority, fairness_id
        )

    @in_turn
    @recovers
    def step(self) -> list[RequestOutput]:
        """Run one step and return the outputs of the requests that got a token or ended.

        Requests of ``generate`` and ``stream`` run too, but these calls return their outputs.
        """
        self._run_step()
        changed, self._undelivered = self._undelivered, {}
        return [self._output(group) for group in changed.values()]

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything to do or to deliver."""
        return self._engine.has_unfinished_requests or self._is_changing or bool(self._undelivered)

    @in_turn
    @recovers
    def abort(self, request_id: str) -> None:
        """End all outputs of a request; ``step`` delivers their tokens so far.

        Outputs that had not ended get ``finish_reason="abort"``.

        An id that is unknown or finished is ignored: the request may just have ended.
        """
        group = self._groups.get(request_id)
        if group is None:
            return
        aborted = [self._engine.abort(request.req_id) for request in group.requests]
        if any(request is not None for request in aborted):
            self._note_changed(group)

    # --- memory and weights ---------------------------------------------------------------

    @in_turn
    def sleep(self, level: int = 1) -> None:
        """Give most device memory back until ``wake_up``, without ending the process.

        The KV cache and the CUDA graphs are freed, the prefix cache is emptied, and the weights
        leave the device; so does the buffer for features of multimodal items. State of requests,
        rope tables and the CUDA context stay. A sleeping engine may be told to sleep again, on
        another level too. An error changes nothing.

        Args:
            level: 1 = the weights are copied to pinned host memory (on a CPU they stay where they
                are), and ``wake_up`` restores them; 2 = they are dropped: after ``wake_up``,
                ``update_weights`` must give every tensor before the next request.

        Raises:
            ConfigError: there is no such level.
            CapacityError: the host has no room for the weights.
            RuntimeError: a request is unfinished.
        """
        self._abort_forgotten()
        self._engine.sleep(level)

    @in_turn
    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the device memory back; when nothing sleeps any more, capture CUDA graphs again.

        Args:
            tags: ``["weights"]`` or ``["kv_cache"]``, to wake up one before the other; None = what
                sleeps. Waking what is awake is harmless.

        Raises:
            ConfigError: there is no such tag.
            CapacityError: the device has no room; what slept sleeps on, so call it again.
        """
        self._engine.wake_up(tags)

    @reports
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are asleep; requests are then refused."""
        return self._engine.is_sleeping

    @in_turn
    def update_weights(self, named_tensors: NamedTensors, *, partial: bool = False) -> None:
        """Overwrite the model's weights in place, and empty the prefix cache.

        All names, shapes and types are checked before the first byte is written. For that an
        iterator is read to its end: to save memory, give a few tensors at a time, with
        ``partial``. Values, NaN among them, are not checked. An error changes nothing; after an
        interrupt, requests are refused until the same tensors have been given again.

        Args:
            named_tensors: a dict, or pairs of name and tensor, on any device and of any floating
                dtype. Names and shapes are those of the checkpoint's own tensors, so that parts
                of a fused projection come one by one (``q_proj``). As in a checkpoint, a tied
                ``lm_head.weight`` stands for the embedding, which it must equal if both are given,
                and the scales of an fp8 cache are ignored.
            partial: accept some of the tensors; the others keep their values.

        Raises:
            ConfigError: a tensor is missing, unknown, given twice or of another shape or type.
            RuntimeError: a request is unfinished, or the weights are asleep.
        """
        self._abort_forgotten()
        self._engine.update_weights(named_tensors, partial=partial)

    @in_turn
    def set_kv_listener(self, listener: KVListener | None) -> None:
        """Tell ``listener`` of the keys and values of every step launched from now on.

        It is called layer by layer as soon as a layer's keys and values are on their way into
        the cache, with the tokens of each request, and with those that the prefix cache had.

        Args:
            listener: see ``mrv1.runner.KVListener``. If it raises, the requests of that step end
                with a ``StepError``, and the engine goes on. None = no listener.
        """
        self._engine.set_kv_listener(listener)

    # --- reports and end ------------------------------------------------------------------

    @reports
    def describe(self) -> str:
        """Return the start-up line: model, device, path, dtypes, blocks, sampling defaults."""
        parts = (self._engine.runner.describe(), self._defaults.description)
        return ", ".join(filter(None, parts))

    @reports
    def kv_report(self) -> KVUsage:
        """Return the KV cache's sizes in bytes by head group, and how much of it is in use."""
        return self._engine.kv_report()

    @reports
    def metrics(self) -> Metrics:
        """Return counters of steps, tokens, requests and blocks as a plain dict."""
        return self._engine.metrics()

    def get_tokenizer(self) -> Any:  # noqa: ANN401 - one of many classes of transformers
        """Return the checkpoint's tokenizer, an object of transformers that is not a copy.

        Raises:
            ConfigError: the checkpoint has no tokenizer.
        """
        return self._tokenizer.library

    @in_turn
    @recovers
    def reset_prefix_cache(self) -> bool:
        """Drop every cached block, so that no later prompt has a prefix hit with earlier ones.

        Returns:
            True; False, with nothing dropped, while a request runs.
        """
        return self._engine.reset_prefix_cache()

    @in_turn
    def close(self) -> None:
        """End all requests and give the device memory back; closing twice is harmless."""
        with self._turns.reports:  # what a report reads is there until its end
            if self._turns.is_reporting:  # in this thread, which a signal handler has interrupted
                raise RuntimeError(WITHIN)
            self._is_closed = True
        if self._core is not None:
            self._core.runner.close()
            self._core = None
            self._encoding.take(self._drop_encoder)
            self._undelivered.clear()
            self._awaited.clear()
            self._given_up.clear()
            self._groups.clear()

    def __enter__(self) -> Self:
        """Return the engine itself."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    # --- inside ---------------------------------------------------------------------------

    def _encode_visuals(
        self, token_ids: Sequence[int], images: Sequence[object], videos: Sequence[Video]
    ) -> dict[str, Any]:
        """Return a prompt with images, as ``VisionEncoder.prompt`` does; takes no engine turn."""
        return self._encoding.take(self._encode, token_ids, images, videos)

    def _encode(
        self, token_ids: Sequence[int], images: Sequence[object], videos: Sequence[Video]
    ) -> dict[str, Any]:
        config = self._engine.config
        try:
            if self._encoder is None:
                self._encoder = VisionEncoder(
                    config.model, device=config.vision_device, dtype=config.dtype
                )
            return self._encoder.prompt(token_ids, images, videos)
        except (ConfigError, UnsupportedDeviceError) as error:
            name = "videos" if videos else "images"
            raise RequestError(f"{name}: {error}") from error

    def _drop_encoder(self) -> None:
        self._encoder = None

    @property
    def _engine(self) -> EngineCore:
        if self._core is None or self._is_closed:
            raise RuntimeError("LLM: expected an open engine, got one that was closed")
        return self._core

    def _new_id(self) -> str:
        return next(req_id for req_id in map(str, self._ids) if req_id not in self._groups)

    @in_turn
    @recovers
    def _add_undelivered(
        self,
        prompt: Prompt,
        params: object,
        request_id: str | None,
        priority: int,
        fairness_id: str,
    ) -> str:
        """Queue a request of ``add_request``, and return its id."""
        req_id = self._new_id() if request_id is None else request_id
        group = self._make_group(prompt, params, req_id, priority, fairness_id)
        self._queue(group)
        return group.req_id

    @in_turn
    @recovers
    def _add_awaited(
        self,
        prompt: Prompt,
        params: object,
        rows: dict[str, int],
        row: int,
        priority: int,
        fairness_id: str,
    ) -> RequestOutput | None:
        """Queue a request of ``generate`` or ``stream``; return its output if it is refused."""
        req_id = self._new_id()
        rows[req_id] = row  # before it is queued: an interrupt in between then aborts it
        try:
            group = self._make_group(
                prompt, params, req_id, priority, fairness_id, is_awaited=True
            )
            self._queue(group)
        except RequestError as error:
            del rows[req_id]
            return _refused(req_id, prompt, error)
        return None

    def _make_group(
        self,
        prompt: Prompt,
        params: object,
        req_id: str,
        priority: int = 0,
        fairness_id: str = "",
        *,
        is_awaited: bool = False,
    ) -> RequestGroup:
        """Return a request for ``_queue``; changes nothing, so that it needs no turn.

        Prompt and parameters are its own from now on (``own_prompt``, ``own_params``).
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params: expected SamplingParams, got {type(params).__name__}"
            )
        if params.stop and not self._tokenizer.is_loaded:
            raise RequestError("stop: expected none, because the checkpoint has no tokenizer")
        with reading("prompt", "text, token ids or a dict"):
            token_ids, more = self._token_ids(prompt), _multimodal_of(prompt)
        request = self._engine.make_request(
            req_id,
            token_ids,
            self._with_grammar(params),
            encode=self._tokenizer.encode_word if self._tokenizer.is_loaded else None,
            priority=priority,
            fairness_id=fairness_id,
            **more,
        )
        return RequestGroup(
            request, self._tokenizer, prompt=_text_of(prompt), is_awaited=is_awaited
        )

    def _queue(self, group: RequestGroup) -> None:
        req_id = group.req_id
        former = self._groups.get(req_id)
        if former is not None and former.finished:
            giver = "generate() or stream()" if former.is_awaited else "step()"
            raise RequestError(
                f"request_id: expected an id without an output that {giver} has yet to return, "
                f"got {req_id!r}"
            )
        if former is not None:
            raise RequestError(
                f"request_id: expected an id that no unfinished request has, got {req_id!r}"
            )
        self._engine.queue(group.requests[0])
        self._groups[req_id] = group

    def _with_grammar(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with their ``structured_outputs`` compiled, if they have any."""
        source, engine = params.structured_outputs, self._engine
        if source is None:
            return params
        if not self._tokenizer.is_loaded:
            raise RequestError(
                "structured_outputs: expected None, because the checkpoint has no tokenizer"
            )
        try:
            grammar = source.compiled(
                self._tokenizer.library,
                engine.runner.model_config.vocab_size,
                list(engine.eos_token_ids) or None,
            )
        except RequestError:
            raise
        except Exception as error:  # of any type, from the caller's class: only this request fails
            raise RequestError.caused_by(error, "structured_outputs") from error
        return replace(params, structured_outputs=None, structured_output=grammar)

    def _token_ids(self, prompt: object) -> Sequence[int]:
        if isinstance(prompt, Mapping):
            keys = [key for key in prompt if key not in MULTIMODAL_KEYS]
            if len(keys) != 1 or keys[0] not in PROMPT_KEYS:
                raise RequestError(
                    f"prompt: expected a dict with one of {PROMPT_KEYS}, and maybe "
                    f"{' or '.join(MULTIMODAL_KEYS)}, got keys {list(prompt)}"
                )
            (key,) = keys
            prompt = prompt[key]
            if isinstance(prompt, str) != (key == "prompt"):
                expected = "text" if key == "prompt" else "a list of token ids"
                raise RequestError(f"{key}: expected {expected}, got {type(prompt).__name__}")
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            return prompt
        raise RequestError(
            f"prompt: expected a string, a list of token ids or a dict, "
            f"got {type(prompt).__name__}"
        )

    def _run_step(self) -> None:
        """Run a step and record the requests that have changed."""
        self._abort_given_up()
        for request in self._engine.step():
            self._take_in(request)

    def _take_in(self, request: Request) -> None:
        """Record that a request has changed; end it if its text now contains a stop string."""
        first = request if request.leader is None else request.leader
        group = self._groups.get(request.name)
        if group is None or group.requests[0] is not first:
            return  # aborted: an error ended the request's ``generate`` or ``stream``
        found = group.find_stop(request)
        if found is not None:
            self._engine.stop(request, *found)
        self._note_changed(group)

    def _note_changed(self, group: RequestGroup) -> None:
        (self._awaited if group.is_awaited else self._undelivered)[group.req_id] = group

    @in_turn
    @recovers
    def _step_for(
        self, rows: Mapping[str, int], *, finished_only: bool = False
    ) -> list[RequestOutput]:
        """Return the changed outputs of ``rows``; if there are none yet, run a step first."""
        if rows.keys().isdisjoint(self._awaited):
            self._run_step()
        changed = [self._awaited.pop(req_id) for req_id in tuple(self._awaited) if req_id in rows]
        return [self._output(group) for group in changed if group.finished or not finished_only]

    @in_turn
    @recovers
    def _step_alone(self) -> None:
        """Run a step; ``_take_changed`` returns its outputs."""
        self._run_step()

    @in_turn
    @recovers
    def _take_changed(self, takes: Callable[[RequestGroup], bool]) -> list[RequestOutput]:
        """Return the changed outputs that have ended or that ``takes`` accepts.

        The others are kept for a later call, which asks for them before it asks for newer ones.
        """
        outputs = []
        for group in tuple(self._awaited.values()):
            if group.finished or takes(group):
                del self._awaited[group.req_id]
                outputs.append(self._output(group))
        return outputs

    def _give_up(self, rows: Mapping[str, int]) -> None:
        """Abort the unfinished requests of a ``generate`` or ``stream`` that has ended.

        A forgotten ``stream`` ends when it is garbage-collected, maybe within another call of the
        same thread: the next step then aborts its request.
        """
        self._given_up.extend(rows)
        if rows and not self._turns.is_mine:
            self._abort_given_up_now()

    @in_turn
    def _abort_given_up_now(self) -> None:
        self._abort_forgotten()

    @recovers
    def _abort_forgotten(self) -> None:
        self._abort_given_up()

    def _abort_given_up(self) -> None:
        """Abort the requests in ``_given_up``, one by one: an interrupt leaves the rest there."""
        while self._given_up and self._core is not None:  # without a core nothing is left to abort
            req_id = self._given_up[0]
            group = self._groups.get(req_id)
            for request in () if group is None else group.requests:
                self._core.abort(request.req_id)
            self._groups.pop(req_id, None)
            self._awaited.pop(req_id, None)
            self._given_up.popleft()

    def _recover(self, error: BaseException) -> None:
        """Record requests that ended as changed; abort a request that was only partly added."""
        del error  # the engine itself sets an error on the requests that it ends
        if self._core is None:
            return
        for group in tuple(self._groups.values()):
            for request in group.requests:
                if request.finished:
                    self._take_in(request)
        known = {request for group in self._groups.values() for request in group.requests}
        for request in self._core.scheduler.unfinished:
            if request not in known:
                self._core.abort(request.req_id)

    def _output(self, group: RequestGroup) -> RequestOutput:
        """Return the output of a request up to now; forget the request if it has ended."""
        output = group.output()
        if output.finished:
            del self._groups[group.req_id]
        return output


def _is_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Return whether this is one prompt: text, dict, or a list that starts with a number."""
    if isinstance(prompts, str | Mapping):
        return True
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts: expected a prompt or a list of prompts, got {type(prompts).__name__}"
        )
    with reading("prompts", "a prompt or a list of prompts"):
        return len(prompts) > 0 and not isinstance(prompts[0], str | Mapping | Sequence)


def _params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None,
    num_prompts: int,
    default: SamplingParams,
) -> list[SamplingParams]:
    """Return a request's own parameters for each prompt."""
    if params is None:
        params = default
    if isinstance(params, SamplingParams):
        return [own_params(params)] * num_prompts
    if not isinstance(params, Sequence):
        raise RequestError(
            f"sampling_params: expected SamplingParams or a list, got {type(params).__name__}"
        )
    if len(params) != num_prompts:
        raise RequestError(
            f"sampling_params: expected one, or {num_prompts} for {num_prompts} prompts, "
            f"got {len(params)}"
        )
    return [own_params(each) for each in params]


def _per_prompt(name: str, value: object, num_prompts: int) -> Sequence[Any]:
    """Return a value for each prompt, from one for all or a list; the engine checks the values."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise RequestError(
            f"{name}: expected one, or {num_prompts} for {num_prompts} prompts, got {len(value)}"
        )
    return list(value)


def _with_items(prompt: str, multimodal: Sequence[Any] | None) -> Prompt:
    """Return a prompt with its items, if it has any."""
    return prompt if multimodal is None else {"prompt": prompt, "multimodal": multimodal}


def _multimodal_of(prompt: object) -> dict[str, Any]:
    """Return the values of ``MULTIMODAL_KEYS`` that a prompt has, and the images of a chat."""
    given = {}
    if isinstance(prompt, Mapping):
        given = {key: prompt[key] for key in MULTIMODAL_KEYS if key in prompt}
    text = _text_of(prompt)
    if isinstance(text, ChatPrompt) and text.items:
        if given.get("multimodal"):
            raise RequestError("multimodal: expected none with images in messages, got both")
        given["multimodal"] = text.items
    return given


def _text_of(prompt: object) -> str | None:
    """Return the text of a prompt; None if it is not text."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _refused(req_id: str, prompt: object, error: RequestError) -> RequestOutput:
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=(),
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="error",
        stop_reason=None,
        error=error,
    )
    return RequestOutput(
        request_id=req_id,
        prompt=_text_of(prompt),
        prompt_token_ids=(),
        prompt_logprobs=None,
        outputs=(completion,),
        finished=True,
        error=error,
        metrics=None,
    )
