"""Conversations: their shape, and the chat template that writes them as a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from mrv1.engine.chat_forms import Forms, Probe
from mrv1.engine.chat_messages import ChatMessage, Visuals, checked_messages, is_list, json_value
from mrv1.engine.tokenizer import ChatPrompt, Tokenizer
from mrv1.errors import RequestError
from mrv1.multimodal import Video
from mrv1.sampler.params import short

Message = Mapping[str, Any]  # a dict with ``role`` and ``content``, as the OpenAI API names them
VisualsEncoder = Callable[[Sequence[int], Sequence[object], Sequence[Video]], Mapping[str, Any]]
"""From a prompt's tokens, images and videos to the keys of a prompt with features."""


MAX_FORMS = 256  # most conversations that a ``ChatTemplate`` remembers


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
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | str = False
    tools: Sequence[Mapping[str, Any] | Callable[..., object]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    sanitize_control_tokens: bool = True
    _forms: dict[str, Forms] = field(default_factory=dict, init=False)  # by conversation
    _tools: list[Any] | None = field(default=None, init=False)  # a copy
    _variables: dict[str, Any] = field(default_factory=dict, init=False)  # a copy

    def __post_init__(self) -> None:
        template, tools, variables = self.chat_template, self.tools, self.chat_template_kwargs
        if template is not None and not isinstance(template, str):
            raise RequestError(
                f"chat_template: expected a template's text or None, got {short(template)}"
            )
        for name in ("add_generation_prompt", "sanitize_control_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}: expected a bool, got {short(getattr(self, name))}")
        if not isinstance(self.continue_final_message, bool | str):
            raise RequestError(
                f"continue_final_message: expected a bool or the name of a field, got "
                f"{short(self.continue_final_message)}"
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message: expected add_generation_prompt=False with it, got both"
            )
        if tools is not None and not is_list(tools):
            raise RequestError(f"tools: expected a list or None, got {short(tools)}")
        if variables is not None and not isinstance(variables, Mapping):
            raise RequestError(
                f"chat_template_kwargs: expected a dict or None, got {short(variables)}"
            )
        if tools is not None:
            copied = [
                each if callable(each) else json_value(f"tools[{i}]", each)
                for i, each in enumerate(tools)
            ]
            object.__setattr__(self, "_tools", copied)
        self._variables.update(json_value("chat_template_kwargs", variables or {}))
        self.tokenizer.check_chat_template(template, self._tools, self._variables)

    def prompt(self, messages: object) -> ChatPrompt:
        """Return one conversation as a prompt.

        Raises:
            RequestError: a message has the wrong shape, the template refuses the conversation, or
                an image or a video cannot be read or does not fit the model.
            ChatTemplateError: the template cannot be parsed.
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

    def _written(
        self,
        messages: Sequence[ChatMessage],
        *,
        continue_final_message: bool | str = False,
        sanitize_control_tokens: bool = False,
    ) -> ChatPrompt:
        return self.tokenizer.chat_prompt(
            messages,
            tools=self._tools,
            chat_template=self.chat_template,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self._variables,
            sanitize_control_tokens=sanitize_control_tokens,
        )


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
