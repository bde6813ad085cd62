"""The messages of a conversation: their shape, and the values that a template may get."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np

from mrv1.errors import RequestError, short
from mrv1.multimodal import Video

MESSAGE = "a dict with role and content"
ChatMessage = dict[str, Any]  # JSON values; parts are dicts with ``type``


class Visuals(NamedTuple):
    """The images and the videos of a conversation, in their order."""

    images: list[object]
    videos: list[Video]


def checked_messages(messages: object, visuals: Visuals) -> list[ChatMessage]:
    """Return a copy of a conversation's messages; their images and videos go to ``visuals``.

    RequestError: a message has the wrong shape or a value that is not JSON; it names where.
    """
    if not isinstance(messages, Sequence) or not is_list(messages):
        raise RequestError(
            f"messages: expected a list of dicts with role and content, got {short(messages)}"
        )
    if not messages:
        raise RequestError("messages: expected at least one message, got none")
    return [_checked_message(f"messages[{i}]", each, visuals) for i, each in enumerate(messages)]


def json_value(name: str, value: object) -> Any:  # noqa: ANN401 - any JSON value
    """Return a copy of ``value`` in the types that a JSON text gives, as transformers reads it.

    Numpy's numbers, dataclasses and pydantic models pass too. For others a template would get
    "<ndarray>" or "<date>": a RequestError names the place below ``name``.
    """
    try:
        return _json_value(name, value)
    except RecursionError:
        raise RequestError(f"{name}: expected JSON values, got too many levels") from None


def _json_value(name: str, value: object) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, np.generic):
        value = value.item()
    match value:
        case None | bool():
            return value
        case str():  # without the methods and the text of a subclass
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case list():
            return [_json_value(f"{name}[{i}]", each) for i, each in enumerate(value)]
        case tuple():
            return tuple(_json_value(f"{name}[{i}]", each) for i, each in enumerate(value))
        case Mapping():
            return {
                _key(name, key): _json_value(f"{name}.{key}", each) for key, each in value.items()
            }
    if is_dataclass(value) and not isinstance(value, type):
        return {
            each.name: _json_value(f"{name}.{each.name}", getattr(value, each.name))
            for each in fields(value)
        }
    dump = getattr(value, "model_dump", None)
    if callable(dump) and isinstance(dumped := dump(), Mapping):
        return _json_value(name, dumped)
    raise RequestError(
        f"{name}: expected a JSON value (text, a number, true, false, null, a list or a dict), "
        f"got {type(value).__name__}"
    )


def _key(name: str, key: object) -> str | float | None:
    """Return a key of a dict; json.dumps too takes numbers, bool and None."""
    if key is None or isinstance(key, str | int | float):
        plain: str | float | None = _json_value(name, key)
        return plain
    raise RequestError(f"{name}: expected text as the keys of a dict, got {type(key).__name__}")


def _checked_message(name: str, message: object, visuals: Visuals) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise RequestError(f"{name}: expected {MESSAGE}, got {short(message)}")
    checked: dict[Any, Any] = {}
    for key, value in message.items():
        if key == "content" and value is not None and not isinstance(value, str):
            checked[key] = _checked_content(name, value, visuals)
        else:
            checked[_key(name, key)] = json_value(f"{name}.{key}", value)
    role = checked.get("role")
    needs_content = role != "assistant" and not checked.get("tool_calls")
    if role is None or (checked.get("content") is None and needs_content):
        raise RequestError(f"{name}: expected {MESSAGE}, got keys {short(list(checked))}")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{name}: expected a role such as 'user', got {short(role)}")
    _check_tool_calls(name, checked.get("tool_calls"))
    return checked


def _check_tool_calls(name: str, calls: object) -> None:
    """Raise unless the calls of a message are a list, with arguments that are JSON if text."""
    if not calls:
        return
    if not isinstance(calls, Sequence) or not is_list(calls):
        raise RequestError(f"{name}: expected tool_calls that are a list, got {short(calls)}")
    for call in calls:
        text = called_function(call).get("arguments")
        if isinstance(text, str):
            try:
                json.loads(text or "{}")
            except (ValueError, RecursionError) as error:
                raise RequestError(
                    f"{name}: expected arguments of a tool call as JSON, got {short(text)}"
                ) from error


def called_function(call: object) -> dict[str, Any]:
    """Return the dict of a tool call that may have ``arguments``: its function, or itself."""
    if not isinstance(call, dict):
        return {}
    function = call.get("function", call)
    return function if isinstance(function, dict) else {}


def _checked_content(name: str, parts: object, visuals: Visuals) -> str | list[dict[str, Any]]:
    """Return the parts of a content, each with its type; no parts are an empty text."""
    if not isinstance(parts, Sequence) or not is_list(parts):
        raise RequestError(
            f"{name}: expected content that is text or a list of parts, got {short(parts)}"
        )
    checked: list[dict[str, Any]] = []
    for i, part in enumerate(parts):
        match part:
            case str() as text:
                checked.append({"type": "text", "text": str.__str__(text)})
            case {"text": str()} if part.get("type", "text") == "text":
                checked.append({"type": "text"} | json_value(f"{name}.content[{i}]", part))
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
    return checked or ""


def is_list(value: object) -> bool:
    """Whether a value is a sequence, but no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
