"""The form in which a chat template can print a conversation.

Some templates loop over the parts of a content and lose a text, or raise; others concatenate the
content and print a list of parts as Python does, drop it, or raise. Some write the arguments of a
tool call from a dict, others concatenate JSON text. What a template does is found out by rendering
the conversation with other texts in it, and looking for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mrv1.engine.chat_messages import ChatMessage, called_function
from mrv1.errors import RequestError

_WORD = re.compile(r"probe\d+probe")
_SHOWN_PART = re.compile(rf"['\"]text\\*['\"]:\s*\\*['\"]({_WORD.pattern})")
"""A word in a list of parts, as Python or JSON shows it."""
_SHOWN_DICT = re.compile(rf"'({_WORD.pattern})': '({_WORD.pattern})'")
"""Arguments of a tool call, as Python shows them."""

Render = Callable[[Sequence[ChatMessage]], str]  # by the template; raises RequestError


@dataclass(frozen=True, slots=True)
class Forms:
    """The form of what a template may take in several; the default is the form as given."""

    arguments: Literal["given", "dict", "text"] = "given"
    """Of the arguments of tool calls: a dict, or the same as JSON text."""
    contents: Mapping[str, Literal["text", "parts"]] = field(default_factory=dict)
    """Role -> form of its contents. A content with images stays a list of parts."""

    def apply(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return messages in these forms."""
        return [self._message(message) for message in messages]

    def _message(self, message: ChatMessage) -> ChatMessage:
        content, form = message.get("content"), self.contents.get(message["role"])
        if form == "text" and isinstance(content, list):
            if all("text" in part for part in content):
                message = message | {"content": "\n".join(part["text"] for part in content)}
        elif form == "parts" and isinstance(content, str) and content:
            message = message | {"content": [{"type": "text", "text": content}]}
        if self.arguments != "given" and message.get("tool_calls"):
            message = message | {"tool_calls": [*map(self._call, message["tool_calls"])]}
        return message

    def _call(self, call: object) -> object:
        function = called_function(call)
        arguments = function.get("arguments")
        if self.arguments == "dict" and isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        elif self.arguments == "text" and isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        else:
            return call
        return _with_arguments(call, arguments)


class Probe:
    """A conversation of the same shape, each of its texts a word that occurs nowhere else.

    With ``keep_texts`` the words follow the texts, for a template that asks for them.
    """

    def __init__(self, messages: Sequence[ChatMessage], *, keep_texts: bool = False) -> None:
        self.keep_texts = keep_texts
        self.num_words = 0
        self.words: dict[str, list[str]] = {}  # role -> the words in its contents
        self.arguments: list[tuple[str, str]] = []  # name and value in each tool call
        self.has_parts: set[str] = set()  # roles with a list of parts as a content
        self.refused = Forms()  # the first refused in the template's own words, or as given
        self.messages = [self._message(message) for message in messages]

    def forms(self, render: Render) -> Forms | None:
        """Return the forms in which the template prints most; None if it refuses them all.

        Arguments of tool calls are dicts, as transformers documents them, and a content keeps its
        form, unless the template prints more of the other form.
        """
        base = self._base(render, "text")
        if base is None:  # a template may raise where it does not find parts
            base = self._base(render, "parts")
            return None if base is None else base[0]
        forms, printed = base
        contents: dict[str, Literal["text", "parts"]] = {}
        for role, words in self.words.items():
            if role in self.has_parts or printed[role] < len(words):
                as_parts = Forms(forms.arguments, {**forms.contents, role: "parts"})
                num_printed = (self._printed(render, as_parts) or {role: -1})[role]
                if num_printed != printed[role]:
                    contents[role] = "parts" if num_printed > printed[role] else "text"
        return Forms(forms.arguments, contents)

    def _base(
        self, render: Render, content: Literal["text", "parts"]
    ) -> tuple[Forms, dict[str | None, int]] | None:
        """Return the better form of arguments and what it prints; None = both raise."""
        best = None
        for arguments in ("dict", "text") if self.arguments else ("given",):
            forms = Forms(arguments, dict.fromkeys(self.words, content))
            printed = self._printed(render, forms)
            if printed is not None and (best is None or best[1][None] < printed[None]):
                best = forms, printed
            if printed is not None and printed[None] == len(self.arguments):
                break
        return best

    def _printed(self, render: Render, forms: Forms) -> dict[str | None, int] | None:
        """Return how many words of each role are printed, and arguments (None); None = it fails.

        A word does not count where Python or JSON shows the part, or the dict, that it is in.
        """
        from jinja2 import TemplateError  # transformers imports it as late

        try:
            text = render(forms.apply(self.messages))
        except RequestError as error:
            if self.refused == Forms() and type(error.__cause__) is TemplateError:
                self.refused = forms  # by raise_exception; other errors are of derived types
            return None
        found = set(_WORD.findall(text))
        in_parts, in_dicts = set(_SHOWN_PART.findall(text)), set(_SHOWN_DICT.findall(text))
        counts: dict[str | None, int] = {
            role: len((found - in_parts).intersection(words)) for role, words in self.words.items()
        }
        counts[None] = sum(found.issuperset(pair) for pair in set(self.arguments) - in_dicts)
        return counts

    def _word(self) -> str:
        self.num_words += 1
        return f"probe{self.num_words}probe"  # as _WORD

    def _message(self, message: ChatMessage) -> ChatMessage:
        role, content = message["role"], message.get("content")
        if isinstance(content, list):
            self.has_parts.add(role)
            parts = [
                part | {"text": self._text(role, part["text"])} if "text" in part else part
                for part in content
            ]
            message = message | {"content": parts}
        elif content is not None and content.strip():
            message = message | {"content": self._text(role, content)}
        if message.get("tool_calls"):
            message = message | {"tool_calls": [*map(self._call, message["tool_calls"])]}
        return message

    def _text(self, role: str, text: str) -> str:
        self.words.setdefault(role, []).append(word := self._word())
        return text + word if self.keep_texts else word

    def _call(self, call: object) -> object:
        arguments = called_function(call).get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
            arguments = arguments if isinstance(arguments, dict) else {}
        elif not isinstance(arguments, dict):
            return call
        name, value = self._word(), self._word()
        self.arguments.append((name, value))
        return _with_arguments(call, {**arguments, name: value})


def _with_arguments(call: Any, arguments: object) -> dict[str, object]:  # noqa: ANN401 - a dict
    """Return a copy of a tool call with other arguments."""
    changed = called_function(call) | {"arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed
