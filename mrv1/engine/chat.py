"""Conversations: their shape, and the chat template that writes them as a prompt."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypedDict

from mrv1.engine.chat_forms import Forms, Probe
from mrv1.engine.chat_messages import ChatMessage, Visuals, checked_messages, is_list, json_value
from mrv1.engine.tokenizer import ChatPrompt, Tokenizer, check_unicode
from mrv1.errors import RequestError, short
from mrv1.multimodal import Video
from mrv1.options import Range, check_fields, instances

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]  # a dict with ``role`` and ``content``, as the OpenAI API names them
VisualsEncoder = Callable[[Sequence[int], Sequence[object], Sequence[Video]], Mapping[str, Any]]
"""From a prompt's tokens, images and videos to the keys of a prompt with features."""

_Flag = Annotated[bool, instances(bool, "a bool")]
_FIELD = Range("a bool or the name of a field", lambda value: isinstance(value, bool | str))
MAX_FORMS = 256  # most conversations that a ``ChatTemplate`` remembers


class ChatTemplateError(RequestError):
    """A chat template that cannot be parsed, so that no conversation has a prompt."""


class ChatOptions(TypedDict, total=False):
    """The options of ``LLM.chat`` that decide how a conversation becomes a prompt."""

    chat_template: str | None
    """The template's text, or the name of one of the checkpoint's. Default: its own."""
    add_generation_prompt: bool
    """Whether the prompt ends with the beginning of a new answer. Default: True."""
    continue_final_message: bool | str
    """Whether the answer continues the last message instead, or which of its fields, such as
    ``"reasoning_content"``. Default: False."""
    tools: Sequence[Mapping[str, Any] | Callable[..., object]] | None
    """The tools that the template describes to the model, as JSON schemas or functions."""
    chat_template_kwargs: Mapping[str, Any] | None
    """More variables for the template, such as ``{"enable_thinking": False}``."""
    sanitize_control_tokens: bool
    """Whether control tokens in the messages, tools and variables are encoded as ordinary text, so
    that only the template writes them. Default: True; without effect before transformers 5.20."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """Writes conversations as prompts; options as in ``ChatOptions``, else a RequestError."""

    tokenizer: Tokenizer
    encode_visuals: VisualsEncoder
    """``VisionEncoder.prompt`` of the model's own encoder, which the first call loads."""
    check_visuals: Callable[[Sequence[Video]], None] = lambda _: None
    """Raises a RequestError if the model has no encoder for images and videos."""
    chat_template: Annotated[str | None, instances(str, "a template's text or None")] = None
    add_generation_prompt: _Flag = True
    continue_final_message: Annotated[bool | str, _FIELD] = False
    tools: Annotated[
        Sequence[Mapping[str, Any] | Callable[..., object]] | None,
        Range("a list or None", is_list),
    ] = None
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None, instances(Mapping, "a dict or None")
    ] = None
    sanitize_control_tokens: _Flag = True
    _forms: dict[str, Forms] = field(default_factory=dict, init=False)  # by conversation
    _tools: list[Any] | None = field(default=None, init=False)  # a copy
    _variables: dict[str, Any] = field(default_factory=dict, init=False)  # a copy

    def __post_init__(self) -> None:
        check_fields(self, RequestError)
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message: expected add_generation_prompt=False with it, got both"
            )
        if self.tools is not None:
            copied = [
                each if callable(each) else json_value(f"tools[{i}]", each)
                for i, each in enumerate(self.tools)
            ]
            object.__setattr__(self, "_tools", copied)
        self._variables.update(json_value("chat_template_kwargs", self.chat_template_kwargs or {}))
        self._check_template()

    def prompt(self, messages: object) -> ChatPrompt:
        """Return one conversation as a prompt.

        RequestError: a message has the wrong shape, the template refuses the conversation, or an
        image or a video cannot be read or does not fit the model. ChatTemplateError: the template
        cannot be parsed.
        """
        visuals = Visuals([], [])
        checked = checked_messages(messages, visuals)
        try:
            prompt = self._written(
                self._forms_for(checked).apply(checked),
                continue_final_message=self.continue_final_message,
                sanitize_control_tokens=self.sanitize_control_tokens,
            )
        except RequestError:
            if any(visuals):  # a text model's template fails on parts: the model is the reason
                self.check_visuals(visuals.videos)
            raise
        if any(visuals):
            encoded = self.encode_visuals(self.tokenizer.encode(prompt), *visuals)
            prompt.token_ids, prompt.items = encoded["prompt_token_ids"], encoded["multimodal"]
        return prompt

    def _forms_for(self, messages: Sequence[ChatMessage]) -> Forms:
        """Return the forms in which the template prints a conversation."""
        probe = Probe(messages)
        key = repr(probe.messages)
        forms = self._forms.get(key)
        if forms is None:
            if len(self._forms) == MAX_FORMS:
                self._forms.clear()
            forms = probe.forms(self._written)
            if forms is None:
                with_texts = Probe(messages, keep_texts=True)
                forms = with_texts.forms(self._written) or with_texts.refused
            self._forms[key] = forms
        return forms

    def _check_template(self) -> None:
        """Raise unless there is a tokenizer, and a template for these options."""
        if not self.tokenizer.is_loaded:
            raise RequestError(
                f"messages: expected a checkpoint with a tokenizer, got "
                f"{str(self.tokenizer.path)!r}, which has none"
            )
        own, template = self._library.chat_template, self.chat_template
        if template is None and not own:
            raise RequestError(
                f"chat_template: expected one, because {str(self.tokenizer.path)!r} has none of "
                "its own, got None; pass a template (mrv1 chat: --chat-template FILE), or take a "
                "model that was trained for chat"
            )
        names = ", ".join(sorted(own)) if isinstance(own, dict) else "none"
        try:
            text = self._library.get_chat_template(template, self._tools)
        except ValueError as error:
            raise RequestError(
                f"chat_template: expected one of the checkpoint's templates ({names}), because "
                "none of them is the default, got None"
            ) from error
        if template and "{" not in text:
            raise RequestError(
                f"chat_template: expected a template's text or the name of one of the "
                f"checkpoint's templates ({names}), got {short(template)}"
            )
        if self._tools and "tools" not in text and text not in self.tokenizer.without_tools:
            self.tokenizer.without_tools.add(text)
            logger.warning("tools: the chat template describes no tools to the model: no effect")
        for name in self._variables:
            if not isinstance(name, str):
                raise RequestError(
                    f"chat_template_kwargs: expected names of variables, got {short(name)}"
                )
            if name != "documents" and name in self._library_options:
                raise RequestError(
                    f"chat_template_kwargs: expected variables of the template, got {name!r}, an "
                    "option of transformers' apply_chat_template"
                )

    @property
    def _library(self) -> Any:  # noqa: ANN401 - one of many classes of transformers
        return self.tokenizer.library

    @property
    def _library_options(self) -> Mapping[str, Any]:
        """Options of transformers' ``apply_chat_template``."""
        return inspect.signature(self._library.apply_chat_template).parameters

    def _written(
        self,
        messages: Sequence[ChatMessage],
        *,
        continue_final_message: bool | str = False,
        sanitize_control_tokens: bool = False,
    ) -> ChatPrompt:
        """Return a conversation as the chat template writes it.

        RequestError: the template refuses the conversation or fails, or a control token of it
        cannot be encoded as text. ChatTemplateError: the template cannot be parsed.
        """
        from jinja2 import TemplateError, TemplateSyntaxError  # transformers imports it as late

        apply = partial(
            self._library.apply_chat_template,
            messages,
            tools=self._tools,
            chat_template=self.chat_template,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=continue_final_message,
            **self._variables,
        )
        hint, given = "", (messages, self._tools, self._variables)
        try:
            prompt = ChatPrompt(apply(tokenize=False))
            can_sanitize = "sanitize_control_tokens" in self._library_options
            if not sanitize_control_tokens or not can_sanitize:
                return prompt
            self._check_hidden_tokens(messages, given)
            texts = "\0".join(_strings(given))
            if any(token in texts for token in self._library.added_tokens_encoder):
                check_unicode("prompt", prompt)
                hint = "; sanitize_control_tokens=False encodes control tokens of messages as such"
                ids = apply(tokenize=True, return_dict=False, sanitize_control_tokens=True)
                # A template may take control tokens out itself, such as an earlier answer's
                # reasoning with the whitespace around it, which it does not find in this mode.
                if self._added_tokens(ids) != self._added_tokens(self.tokenizer.encode(prompt)):
                    prompt.token_ids = ids
        except RequestError:  # the text is not valid Unicode, or hides a control token
            raise
        except Exception as error:  # a template is a program: it may fail in any way
            reason = " ".join(str(error).split())
            if not isinstance(error, TemplateError) or not reason:
                reason = f"{type(error).__name__}: {reason}"
            kind = ChatTemplateError if isinstance(error, TemplateSyntaxError) else RequestError
            raise kind(f"chat_template: {reason}{hint}") from error
        return prompt

    def _added_tokens(self, token_ids: Sequence[int]) -> Counter[int]:
        """Return how often each added token is in ``token_ids``."""
        added = set(self._library.added_tokens_encoder.values())
        return Counter(token for token in token_ids if token in added)

    def _check_hidden_tokens(self, messages: Sequence[ChatMessage], given: object) -> None:
        """Raise if a control token is in a key of ``given``, or begins in one part of a content.

        transformers encodes neither as text.
        """
        template = self._library.get_chat_template(self.chat_template, self._tools)
        joined = [
            [part.get("text", "") for part in message["content"]]
            for message in messages
            if isinstance(message.get("content"), list)
        ]
        keys = "\0".join(_strings(given, keys=True))
        for added in self._library.added_tokens_decoder.values():
            token = added.content
            if not added.special and (token.isspace() or token not in template):
                continue
            if token in keys or any(
                "".join(texts).count(token) > sum(text.count(token) for text in texts)
                for texts in joined
            ):
                raise RequestError(
                    f"chat_template: expected control tokens within one text, got {token!r} in a "
                    "key or in two parts; sanitize_control_tokens=False encodes it as such"
                )


def _strings(value: object, *, keys: bool = False) -> Iterator[str]:
    """Yield the texts in a JSON value, or the keys of its dicts."""
    if isinstance(value, Mapping):
        if keys:
            yield from map(str, value)
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each, keys=keys)
    elif isinstance(value, str) and not keys:
        yield value


def split_conversations(messages: object) -> tuple[list[object], bool]:
    """Return the conversations in ``messages``, and whether it is one conversation.

    Many conversations are a list that starts with a list; [] has none. RequestError: not a list.
    """
    if not isinstance(messages, Sequence) or not is_list(messages):
        raise RequestError(
            f"messages: expected a list of dicts with role and content, or a list of such lists, "
            f"got {short(messages)}"
        )
    if len(messages) == 0 or is_list(messages[0]):
        return list(messages), False
    return [messages], True
