"""Conversations: their shape, and the chat template that writes them as a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

from mrv1.engine.tokenizer import ChatPrompt, Tokenizer
from mrv1.errors import RequestError
from mrv1.multimodal import Video
from mrv1.sampler.params import short

Message = Mapping[str, Any]
"""A dict with ``role`` and ``content``, as the OpenAI API names them."""

MESSAGE = "a dict with role and content"

VisualsEncoder = Callable[[Sequence[int], Sequence[object], Sequence[Video]], Mapping[str, Any]]
"""From a prompt's tokens, images and videos to the keys of a prompt with features."""


class Visuals(NamedTuple):
    """The images and the videos of a conversation, in their order."""

    images: list[object]
    videos: list[Video]


class ChatOptions(TypedDict, total=False):
    """The options of ``LLM.chat`` that decide how a conversation becomes a prompt."""

    chat_template: str | None
    """The template's text. Default: the checkpoint's own."""
    add_generation_prompt: bool
    """Whether the prompt ends with the beginning of a new answer. Default: True."""
    continue_final_message: bool
    """Whether the answer continues the last message instead. Default: False."""
    tools: Sequence[Mapping[str, Any] | Callable[..., object]] | None
    """The tools that the template describes to the model, as JSON schemas or functions."""
    chat_template_kwargs: Mapping[str, Any] | None
    """More variables for the template, such as ``{"enable_thinking": False}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """Writes conversations as prompts; the fields are described in ``ChatOptions``.

    Raises:
        RequestError: an option is wrong, or there is no template.
    """

    tokenizer: Tokenizer
    encode_visuals: VisualsEncoder
    """``VisionEncoder.prompt`` of the model's own encoder, which the first call loads."""
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any] | Callable[..., object]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise RequestError(
                f"chat_template: expected a template's text or None, got "
                f"{short(self.chat_template)}"
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message: expected add_generation_prompt=False with it, got both"
            )
        if self.tools is not None and not _is_list(self.tools):
            raise RequestError(f"tools: expected a list or None, got {short(self.tools)}")
        variables = self.chat_template_kwargs
        if variables is not None and not isinstance(variables, Mapping):
            raise RequestError(
                f"chat_template_kwargs: expected a dict or None, got {short(variables)}"
            )
        self.tokenizer.check_chat_template(self.chat_template)

    def prompt(self, messages: object) -> ChatPrompt:
        """Return one conversation as a prompt.

        Raises:
            RequestError: a message has the wrong shape, the template refuses the conversation, or
                an image or a video cannot be read or does not fit the model.
            ChatTemplateError: the template cannot be parsed.
        """
        visuals = Visuals([], [])
        prompt = self.tokenizer.chat_prompt(
            checked_messages(messages, visuals),
            tools=None if self.tools is None else list(self.tools),
            chat_template=self.chat_template,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            variables=dict(self.chat_template_kwargs or {}),
        )
        if any(visuals):
            encoded = self.encode_visuals(self.tokenizer.encode(prompt), *visuals)
            prompt.token_ids, prompt.items = encoded["prompt_token_ids"], encoded["multimodal"]
        return prompt


def split_conversations(messages: object) -> tuple[list[object], bool]:
    """Return the conversations in ``messages``, and whether it is one conversation.

    Many conversations are a list that starts with a list. An empty list has no conversations.

    Raises:
        RequestError: ``messages`` is not a list.
    """
    if not isinstance(messages, Sequence) or not _is_list(messages):
        raise RequestError(
            f"messages: expected a list of dicts with role and content, or a list of such lists, "
            f"got {short(messages)}"
        )
    if len(messages) == 0 or _is_list(messages[0]):
        return list(messages), False
    return [messages], True


def checked_messages(messages: object, visuals: Visuals) -> list[dict[str, Any]]:
    """Return a conversation's messages, with each content of text alone as one text.

    Args:
        messages: the conversation.
        visuals: gets the images and videos, which leave empty parts in the messages.

    Raises:
        RequestError: a message has the wrong shape; the message names its index.
    """
    if not isinstance(messages, Sequence) or not _is_list(messages):
        raise RequestError(
            f"messages: expected a list of dicts with role and content, got {short(messages)}"
        )
    if not messages:
        raise RequestError("messages: expected at least one message, got none")
    return [_checked_message(f"messages[{i}]", each, visuals) for i, each in enumerate(messages)]


def _checked_message(name: str, message: object, visuals: Visuals) -> dict[str, Any]:
    """Return a message without None values; a content of text parts becomes one text."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{name}: expected {MESSAGE}, got {short(message)}")
    checked = {key: value for key, value in message.items() if value is not None}
    content = checked.get("content")
    if "role" not in checked or (content is None and not checked.get("tool_calls")):
        raise RequestError(f"{name}: expected {MESSAGE}, got keys {short(list(checked))}")
    if not isinstance(checked["role"], str) or not checked["role"]:
        raise RequestError(f"{name}: expected a role such as 'user', got {short(checked['role'])}")
    if content is not None and not isinstance(content, str):
        checked["content"] = _checked_content(name, content, visuals)
    if checked.get("tool_calls"):
        checked["tool_calls"] = _with_arguments(name, checked["tool_calls"])
    return checked


def _with_arguments(name: str, calls: object) -> list[object]:
    """Return tool calls with their JSON arguments as dicts, which templates expect."""
    if not isinstance(calls, Sequence) or not _is_list(calls):
        raise RequestError(f"{name}: expected tool_calls that are a list, got {short(calls)}")
    parsed: list[object] = []
    for call in calls:
        match call:
            case {"function": {"arguments": str() as text}}:
                try:
                    arguments = json.loads(text or "{}")
                except (ValueError, RecursionError) as error:
                    raise RequestError(
                        f"{name}: expected arguments of a tool call as JSON, got {short(text)}"
                    ) from error
                parsed.append({**call, "function": {**call["function"], "arguments": arguments}})
            case _:
                parsed.append(call)
    return parsed


def _checked_content(name: str, parts: object, visuals: Visuals) -> str | list[dict[str, object]]:
    """Return the parts of a content; of text alone, one text with each part on its own lines."""
    if not isinstance(parts, Sequence) or not _is_list(parts):
        raise RequestError(
            f"{name}: expected content that is text or a list of parts, got {short(parts)}"
        )
    texts: list[str] = []
    checked: list[dict[str, object]] = []
    for part in parts:
        match part:
            case str() as text:
                texts.append(text)
                checked.append({"type": "text", "text": text})
            case {"text": str() as text} if part.get("type", "text") == "text":
                texts.append(text)
                checked.append({"type": "text", "text": text})
            case (
                {"type": "image", "image": image}
                | {"type": "image", "path": image}
                | {"type": "image", "url": image}
                | {"type": "image_url", "image_url": {"url": image}}
                | {"type": "image_url", "image_url": str() as image}
            ):
                visuals.images.append(image)
                checked.append({"type": "image"})
            case {"type": "video", "video": frames}:
                visuals.videos.append(Video(frames=frames, fps=part.get("fps")))
                checked.append({"type": "video"})
            case _:
                raise RequestError(
                    f'{name}: expected content parts {{"type": "text", "text": ...}}, '
                    f'{{"type": "image", "image": ...}} or {{"type": "video", "video": ...}}, got '
                    f"{short(part)}"
                )
    return "\n".join(texts) if len(texts) == len(checked) else checked


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
