"""Chat templates of real models, and small ones of each kind: the text is that of transformers.

transformers gives a template the messages as they are. Where it cannot print a form (parts as a
list of Python, arguments that are no text), the right prompt is that of the form it can print:
which one that is has been read in the templates, and is written down here.
"""

from __future__ import annotations

import collections
import copy
import datetime as dt
import decimal
import enum
import importlib.util
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as WordTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from mrv1 import LLM, ConfigError, RequestError
from mrv1.config import checkpoint_dir
from mrv1.engine.chat import ChatTemplate
from mrv1.engine.tokenizer import ChatPrompt, Tokenizer
from tests.engine.chat_model import SANITIZES

FOUND = importlib.util.find_spec("trl")  # not imported: it would import what it depends on
FOLDERS = [
    Path(each, "chat_templates") for each in (FOUND and FOUND.submodule_search_locations) or ()
]
TEMPLATES = {
    file.stem: file.read_text("utf-8")
    for folder in FOLDERS
    for file in sorted(folder.glob("*.jinja"))
    if not file.stem.endswith("_training")
}
needs_trl = pytest.mark.skipif(not TEMPLATES, reason="make test installs trl 1.16.0")

ONLY_PARTS = {"idefics3", "llava_next", "smolvlm"}
"""They print no content that is text."""
LOOPS = ONLY_PARTS | {
    "diffusion_gemma", "gemma3", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5",
    "glm4moe", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "muse_glimmer", "qwen2_5_vl",
    "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8", "qwen3_vl",
}  # fmt: skip
"""They loop over the parts of a content."""
CONCATENATED_ROLES = {
    "gemma4_v2": {"system"}, "gemma4_v3": {"system"}, "glm4moe": {"tool"},
}  # fmt: skip
"""Roles whose contents these concatenate all the same."""
ARGUMENTS_AS_TEXT = {"deepseek_r1_distill", "deepseekv3"}

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string", "description": "the place"}},
            "required": ["where"],
        },
    },
}


def look(where: str) -> str:
    """Look somewhere.

    Args:
        where: the place.
    """
    return where


USER = {"role": "user", "content": "What is it?"}
ANSWER = {"role": "assistant", "content": "A rose."}
ASIDE = {"role": "user", "content": "And red?"}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def called(arguments, **message):
    call = {"id": "abcdefghi", "type": "function"}
    call["function"] = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [call], **message}


def result(content):
    return {"role": "tool", "tool_call_id": "abcdefghi", "name": "look", "content": content}


CONVERSATIONS = {
    "turns": ([{"role": "system", "content": "Be brief."}, USER, ANSWER, ASIDE], {}),
    "parts": ([{"role": "user", "content": parts("What", " is it?")}, ANSWER, ASIDE], {}),
    "all parts": (
        [
            {"role": "system", "content": parts("Be brief.")},
            {"role": "user", "content": parts("What is it?")},
            {"role": "assistant", "content": parts("A rose.")},
            {"role": "user", "content": parts("And", "red?")},
        ],
        {},
    ),
    "json, null": (
        [USER, called('{"where": "here"}', content=None), result("red"), ASIDE],
        {"tools": [TOOL]},
    ),
    "dict, empty": (
        [USER, called({"where": "here", "n": [1, 2.5, None]}, content=""), result("red")],
        {"tools": [TOOL]},
    ),
    "absent": ([USER, called('{"where": "here"}'), result("red")], {"tools": [TOOL]}),
    "result in parts": (
        [USER, called({"where": "here"}, content="Wait."), result(parts("red"))],
        {"tools": [TOOL]},
    ),
    "names": ([{**USER, "name": "ann"}, {**ANSWER, "name": "bob"}, {**ASIDE, "name": "ann"}], {}),
    "continued": (
        [USER, {"role": "assistant", "content": parts("A rose, ")}],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    "reasoning": (
        [USER, {**ANSWER, "reasoning_content": "Red, sweet."}, ASIDE, {**ANSWER, "thinking": "x"}],
        {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}},
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(checkpoint_dir("tiny"))


def prompt_of(tokenizer: Tokenizer, messages, template: str | None, **options) -> ChatPrompt:
    """Return the prompt, of messages that are not changed."""
    given = copy.deepcopy(messages)
    made = ChatTemplate(
        tokenizer=tokenizer, encode_visuals=NotImplemented, chat_template=template, **options
    ).prompt(given)
    assert given == messages
    return made


def of_transformers(tokenizer: Tokenizer, messages, template: str, **options) -> str:
    """Return the text of transformers, or its reason as ``RequestError`` gives it."""
    options = {"add_generation_prompt": True} | options
    variables = options.pop("chat_template_kwargs", {})
    try:
        return tokenizer.library.apply_chat_template(
            messages, chat_template=template, tokenize=False, **options, **variables
        )
    except Exception as error:
        reason = " ".join(str(error).split())
        return f"{type(error).__name__}: {reason}"


def printable(name: str, message):
    """Return a message in the form that a template prints."""
    content, role = message.get("content"), message["role"]
    if isinstance(content, list) and (
        name not in LOOPS or role in CONCATENATED_ROLES.get(name, ())
    ):
        message = {**message, "content": "\n".join(part["text"] for part in content)}
    elif isinstance(content, str) and content and name in ONLY_PARTS:
        message = {**message, "content": parts(content)}
    if "tool_calls" in message:
        arguments = message["tool_calls"][0]["function"]["arguments"]
        if name in ARGUMENTS_AS_TEXT and not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        elif name not in ARGUMENTS_AS_TEXT and isinstance(arguments, str):
            arguments = json.loads(arguments)
        message = {**message, **called(arguments)}
    return message


@needs_trl
def test_the_templates_are_all_there():
    assert len(TEMPLATES) == 41
    assert not (LOOPS | ARGUMENTS_AS_TEXT | CONCATENATED_ROLES.keys()) - TEMPLATES.keys()


@needs_trl
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_real_templates_give_the_text_of_transformers(tokenizer, conversation: str):
    messages, options = CONVERSATIONS[conversation]
    wrong, num_texts = {}, 0
    for name, template in TEMPLATES.items():
        want = of_transformers(
            tokenizer, [printable(name, each) for each in messages], template, **options
        )
        try:
            got = str(prompt_of(tokenizer, messages, template, **options))
            num_texts += 1
        except RequestError as error:
            got = str(error).removeprefix("chat_template: ")
            want = want.removeprefix("TemplateError: ").removeprefix("UndefinedError: ")
        if got != want:
            wrong[name] = (got, want)
    assert wrong == {}
    assert num_texts >= 20, "most templates write it"


# --- small templates of each kind ----------------------------------------------------------------

EACH = "{% for m in messages %}[{{ m.role }}]"
LOOP = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
CALLS = "{% for c in m.tool_calls %}<{{ c.function.name }} "
JSON = '{"where":"here","n":1}'
AS_DICT, AS_TEXT = '{"where": "here", "n": 1}', '"{\\"where\\":\\"here\\",\\"n\\":1}"'


@pytest.mark.parametrize(
    ("template", "content", "want"),
    [
        # It loops: parts are parts, and a text would be lost.
        (LOOP, parts("hi", "you"), "hiyou"),
        (LOOP, "hi", "hi"),
        (LOOP, "", ""),
        ("{{ m.content[0].text }}", "hi", "hi"),
        ("{{ m.content[0]['text'] + '!' }}", "hi", "hi!"),
        ("{{ m.content | map(attribute='text') | join('|') }}", parts("hi", "you"), "hi|you"),
        # A macro of its own does; the word "text" may come before the text.
        (
            "{% macro w(c) %}{% for p in c %}text: {{ p['text'] }}{% endfor %}{% endmacro %}"
            "{{ w(m.content) }}",
            parts("hi"), "text: hi",
        ),
        # It takes both, each in its way.
        ("{% if m.content is string %}={{ m.content }}{% else %}" + LOOP + "{% endif %}",
         "hi", "=hi"),
        ("{% if m.content is string %}={{ m.content }}{% else %}" + LOOP + "{% endif %}",
         parts("hi", "you"), "hiyou"),
        # It concatenates: parts would raise, or be printed as Python or as JSON, or be dropped.
        ("{{ '=' + m.content }}", parts("hi", "you"), "=hi\nyou"),
        ("{{ m.content }}", parts("hi", "you"), "hi\nyou"),
        ("{{ m.content | trim }}", parts(" hi "), "hi"),
        ("{{ m.content | tojson }}", parts("hi"), '"hi"'),
        ("{% if m.content is string %}{{ m.content }}{% endif %}", parts("hi"), "hi"),
        ("{{ m.content }}", ["hi", {"text": "you"}], "hi\nyou"),
        ("{{ m.content }}", [], ""),
        ("{{ m.content }}", parts(""), ""),
        # One role loops, the other concatenates.
        ("{% if m.role == 'user' %}" + LOOP + "{% else %}{{ m.content }}{% endif %}",
         parts("hi", "you"), "hiyou"),
        ("{% if m.role == 'user' %}{{ m.content }}{% else %}" + LOOP + "{% endif %}",
         parts("hi", "you"), "hi\nyou"),
        # It asks for something in the text.
        ("{{ m.content.split('Q:')[1] + '' }}", parts("Q: hi"), " hi"),
        ("{% for p in m.content %}{{ p.text.split('Q:')[1] + '' }}{% endfor %}", "Q: hi", " hi"),
        # It drops all of it in both forms.
        ("", parts("hi"), ""),
        # Other keys of a part reach it.
        ("{% for p in m.content %}{{ p.text ~ p.lang }}{% endfor %}",
         [{"type": "text", "text": "hi", "lang": "en"}], "hien"),
    ],
)  # fmt: skip
def test_a_template_gets_contents_in_the_form_it_prints(tokenizer, template, content, want):
    messages = [{"role": "user", "content": content}]
    assert prompt_of(tokenizer, messages, EACH + template + "{% endfor %}") == f"[user]{want}"


@pytest.mark.parametrize("given", [JSON, json.loads(JSON)])
@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{{ c.function.arguments | tojson }}", AS_DICT),
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }} {% endfor %}",
         "where=here n=1 "),
        ("{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}", AS_DICT),
        ("{{ '' + c.function.arguments.where }}", "here"),
        ("{{ '' + c.function.arguments }}", None),
        ("{{ c.function.arguments }}", None),
        ("{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}", None),
        ("", ""),
    ],
)  # fmt: skip
def test_a_template_gets_arguments_in_the_form_it_prints(tokenizer, template, want, given):
    template = f"{EACH}{CALLS}{template}>{{% endfor %}}{{% endfor %}}"
    as_text = given if isinstance(given, str) else AS_DICT
    made = prompt_of(tokenizer, [called(given)], template)
    assert made == f"[assistant]<look {as_text if want is None else want}>"
    flat = [{"role": "assistant", "tool_calls": [called(given)["tool_calls"][0]["function"]]}]
    assert prompt_of(tokenizer, flat, template.replace("c.function", "c")) == made


MESSAGE = [{"role": "user", "content": parts("x")}]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no ' ~ m.role) }}", "chat_template: no user"),
        ("{{ m.content + 1 }}", 'chat_template: TypeError: can only concatenate list (not "int")'),
        ("{{ m.content.x.y }}", "chat_template: 'list object' has no attribute 'x'"),
        ("{{ '=' + m.content }}{{ raise_exception('no') }}", "chat_template: no"),
    ],
)
def test_a_template_that_refuses_all_forms_has_its_own_reason(tokenizer, template, message):
    with pytest.raises(RequestError) as error:
        prompt_of(tokenizer, MESSAGE, EACH + template + "{% endfor %}")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("message", "field", "want"),
    [
        ({"content": "A rose, "}, True, "A rose, "),
        ({"content": parts("A", " rose, ")}, True, "A\n rose, "),
        ({"content": "A rose.", "reasoning_content": "Red"}, "reasoning_content", "A rose.|Red"),
    ],
)
def test_the_last_message_is_continued(tokenizer, message, field, want):
    template = EACH + "{{ m.content }}|{{ m.reasoning_content }}.{% endfor %}"
    made = prompt_of(
        tokenizer, [{"role": "assistant", **message}], template,
        add_generation_prompt=False, continue_final_message=field,
    )  # fmt: skip
    assert made == f"[assistant]{want}"


# --- values --------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"


class Role(enum.StrEnum):
    USER = "user"


@dataclass
class Place:
    where: object


class Model:
    """What pydantic's models have."""

    def model_dump(self) -> dict[str, object]:
        return {"where": "here"}


NO_JSON = [
    np.zeros(3), torch.zeros(3), {1, 2}, frozenset(), dt.date(2026, 11, 27), dt.datetime.now(),
    b"x", 1j, decimal.Decimal(1), Path("x"), Color.RED, object(), int, len, iter([]),
    collections.deque(), Place(b"x"), np.datetime64("2026-11-27"), {b"x": 1}, {"x": [{1}]},
]  # fmt: skip


@pytest.mark.parametrize("value", NO_JSON, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    ("place", "where"),
    [
        (lambda value: {"messages": [USER, {**USER, "extra": value}]}, "messages[1].extra"),
        (lambda value: {"messages": [called({"x": value})]},
         "messages[0].tool_calls[0].function.arguments.x"),
        (lambda value: {"messages": [{"role": "user", "content": [{"text": "", "x": value}]}]},
         "messages[0].content[0].x"),
        (lambda value: {"tools": [TOOL, {"function": {"x": [value]}}]}, "tools[1].function.x[0]"),
        (lambda value: {"chat_template_kwargs": {"x": value}}, "chat_template_kwargs.x"),
    ],
    ids=["message", "arguments", "part", "tool", "variable"],
)  # fmt: skip
def test_a_value_that_is_not_json_is_refused_by_its_place(tokenizer, place, where, value):
    options = {"messages": [USER]} | place(value)
    with pytest.raises(RequestError) as error:
        prompt_of_any(tokenizer, **options)
    assert re.match(re.escape(where) + r"[\w.[\]]*: expected (a JSON value|text as the keys)",
                    str(error.value))  # fmt: skip


def prompt_of_any(tokenizer, messages, **options) -> str:
    template = "{{ messages | tojson }}{{ tools | tojson }}{{ x | default(0) | tojson }}"
    return ChatTemplate(
        tokenizer=tokenizer, encode_visuals=NotImplemented, chat_template=template, **options
    ).prompt(messages)


def test_json_and_what_transformers_makes_json_reach_the_template(tokenizer):
    values = [None, True, 1, 1.5, "x", [1, (2,)], {"a": {"b": []}, 1: 2}, np.int32(3),
              np.float64(0.5), np.bool_(False), Role.USER, Place("here"), Model(),
              MappingProxyType({"a": 1}), float("inf"), 1 << 70]  # fmt: skip
    plain = [None, True, 1, 1.5, "x", [1, [2]], {"a": {"b": []}, "1": 2}, 3,
             0.5, False, "user", {"where": "here"}, {"where": "here"},
             {"a": 1}, float("inf"), 1 << 70]  # fmt: skip
    message = MappingProxyType({"role": Role.USER, "content": "x", "extra": values})
    made = prompt_of_any(
        tokenizer, [message], tools=[{"x": values}, look], chat_template_kwargs={"x": values}
    )
    tools = [{"x": plain}, get_json_schema(look)]
    said = [{"role": "user", "content": "x", "extra": plain}]
    assert made == json.dumps(said) + json.dumps(tools) + json.dumps(plain)


def test_a_value_without_end_is_refused(tokenizer):
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(RequestError, match=r"messages\[0\]\.x: expected JSON values, got too"):
        prompt_of_any(tokenizer, [{**USER, "x": endless}])


def test_what_a_template_takes_is_copied(tokenizer):
    tools, variables = [copy.deepcopy(TOOL)], {"x": [1]}
    template = ChatTemplate(
        tokenizer=tokenizer, encode_visuals=NotImplemented, tools=tools,
        chat_template="{{ tools | tojson }}{{ x }}", chat_template_kwargs=variables,
    )  # fmt: skip
    before = template.prompt([USER])
    tools[0]["function"]["name"] = "other"
    variables["x"].append(2)
    assert template.prompt([USER]) == before


# --- control tokens ------------------------------------------------------------------------------

sanitizes = pytest.mark.skipif(not SANITIZES, reason="needs transformers 5.20")
CONTROL = "<|endoftext|>"
MARKED = f"{CONTROL}[{{{{ messages[0].content }}}}]{CONTROL}{{{{ tools | tojson }}}}{{{{ x }}}}"


@sanitizes
@pytest.mark.parametrize(
    ("content", "options"),
    [
        (f"a{CONTROL}b", {}),
        (CONTROL * 2, {}),
        ([{"text": f"a{CONTROL}"}], {}),
        ("a", {"tools": [{"function": {"description": CONTROL}}]}),
        ("a", {"chat_template_kwargs": {"x": CONTROL}}),
        ("a <| endoftext |>", {}),
    ],
)
def test_control_tokens_of_messages_are_text(tokenizer, content, options):
    messages = [{"role": "user", "content": content}]
    made = prompt_of(tokenizer, messages, MARKED, **options)
    ids = tokenizer.encode(made)
    kept = {"tools": options.get("tools"), **options.get("chat_template_kwargs", {})}
    plain = [{"role": "user", "content": content if isinstance(content, str) else f"a{CONTROL}"}]
    want = tokenizer.library.apply_chat_template(
        plain, chat_template=MARKED, return_dict=False, sanitize_control_tokens=True,
        add_generation_prompt=True, **kept,
    )  # fmt: skip
    assert ids == want
    assert ids.count(0) == 2, "the template's own"
    assert tokenizer.library.decode(ids) == made, "and the text is all there"
    without = prompt_of(tokenizer, messages, MARKED, sanitize_control_tokens=False, **options)
    assert without == made
    assert without.token_ids is None
    assert tokenizer.encode(without).count(0) == made.count(CONTROL)


EACH_PART = "{% for p in messages[0].content %}{{ p.text }}{% endfor %}<think>"


@sanitizes
@pytest.mark.parametrize(
    ("content", "options"),
    [
        (parts("a<|endof", "text|>"), {}),
        (parts(CONTROL, "<th", "ink", ">"), {}),
        ("a", {"tools": [{"function": {"properties": {f"{CONTROL}x": 1}}}]}),
        ("a", {"chat_template_kwargs": {"x": [{"<think>": 1}]}}),
    ],
)
def test_a_control_token_that_transformers_does_not_see_is_refused(content, options):
    tokenizer = Tokenizer(checkpoint_dir("tiny"))
    tokenizer.library.add_tokens(["<think>", "</think>", "  "])
    messages = [{"role": "user", "content": content}]
    with pytest.raises(RequestError, match=r"within one text, got '<.*in a key or in two parts"):
        prompt_of(tokenizer, messages, EACH_PART, **options)
    prompt_of(tokenizer, messages, EACH_PART, sanitize_control_tokens=False, **options)
    for texts in (["</th", "ink> ", " "], [CONTROL, CONTROL]):  # is no control token; is seen
        ids = tokenizer.encode(
            prompt_of(tokenizer, [{"role": "user", "content": parts(*texts)}], EACH_PART)
        )
        assert 0 not in ids


THINKING = (
    "{% for m in messages %}<|endoftext|>{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{% endfor %}<think>"
)


@sanitizes
def test_control_tokens_that_the_template_takes_out_leave_no_trace():
    tokenizer = Tokenizer(checkpoint_dir("tiny"))
    tokenizer.library.add_tokens(["<think>", "</think>"])
    think = tokenizer.library.convert_tokens_to_ids("<think>")
    answer = {"role": "assistant", "content": "<think>\nRed.\n</think>\n\nA rose."}
    made = prompt_of(tokenizer, [USER, answer], THINKING)
    assert made == f"{CONTROL}What is it?{CONTROL}A rose.<think>"
    assert tokenizer.encode(made) == tokenizer.library.encode(made, add_special_tokens=False)
    forged = {"role": "user", "content": f"a<think>{CONTROL}"}
    ids = tokenizer.encode(prompt_of(tokenizer, [forged, USER], THINKING))
    assert (ids.count(0), ids.count(think)) == (2, 1)


@sanitizes
def test_control_tokens_of_images_are_tokens(tokenizer):
    """The encoder sees the placeholder of the template, and not the one that a text contains."""
    seen = []

    def encode(token_ids, images, videos):
        seen.append((list(token_ids), images, videos))
        return {"prompt_token_ids": [7], "multimodal": ["item"]}

    template = (
        "{% for p in messages[0].content %}{% if p.type == 'image' %}" + CONTROL
        + "{% else %}{{ p.text }}{% endif %}{% endfor %}"
    )  # fmt: skip
    content = [{"type": "image", "image": "picture"}, {"type": "text", "text": CONTROL}]
    made = ChatTemplate(tokenizer=tokenizer, encode_visuals=encode, chat_template=template).prompt(
        [{"role": "user", "content": content}]
    )
    ((token_ids, images, videos),) = seen
    assert token_ids.count(0) == 1
    assert (images, videos, made.token_ids, made.items) == (["picture"], [], [7], ["item"])


@sanitizes
def test_a_control_token_that_plain_text_makes_is_refused(tmp_path):
    words = WordTokenizer(WordLevel({"<unk>": 0, "a": 1, "<end>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    message = {"role": "user", "content": "a <end>"}
    with pytest.raises(RequestError, match=r"'<end>'.*; sanitize_control_tokens=False encodes"):
        prompt_of(tokenizer, [message], "{{ messages[0].content }}")
    made = prompt_of(
        tokenizer, [message], "{{ messages[0].content }}", sanitize_control_tokens=False
    )
    assert tokenizer.encode(made) == [1, 2]


def test_a_transformers_that_cannot_do_it_encodes_the_text(tokenizer, monkeypatch):
    def older(messages, tools=None, chat_template=None, tokenize=True, **kwargs):
        assert not tokenize
        assert "sanitize_control_tokens" not in kwargs
        return messages[0]["content"]

    monkeypatch.setattr(tokenizer.library, "apply_chat_template", older)
    made = prompt_of(tokenizer, [{"role": "user", "content": CONTROL}], MARKED)
    assert tokenizer.encode(made) == [0]


# --- templates of a checkpoint -------------------------------------------------------------------

DEFAULT, TOOL_USE, JSON_FILE = (
    "d{{ messages[0].content }}",
    "t{{ (tools or []) | length }}",
    "j{{ x }}",
)


def checkpoint(path: Path, *, config=None, files=()) -> Tokenizer:
    """Return the tokenizer of the embedded model, with templates of its own."""
    shutil.copytree(checkpoint_dir("tiny"), path)
    if config is not None:
        file = path / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": config}))
    for name, text in dict(files).items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    return Tokenizer(path)


NAMED = [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOL_USE}]
FILES = {"chat_template.jinja": DEFAULT, "additional_chat_templates/tool_use.jinja": TOOL_USE}


@pytest.mark.parametrize("options", [{"config": NAMED}, {"files": FILES}])
def test_named_templates_are_chosen_as_transformers_does(tmp_path, options):
    tokenizer = checkpoint(tmp_path / "m", **options)
    for name in (None, "default", "tool_use", "{{ bos_token }}"):
        for tools in (None, [], [TOOL, TOOL]):
            want = tokenizer.library.apply_chat_template(
                [USER], chat_template=name, tools=tools, tokenize=False
            )
            assert prompt_of(tokenizer, [USER], name, tools=tools) == want
    assert prompt_of(tokenizer, [USER], None) == "dWhat is it?"
    assert prompt_of(tokenizer, [USER], None, tools=[TOOL]) == "t1"
    with pytest.raises(RequestError, match=r"templates \(default, tool_use\), got 'rag'"):
        prompt_of(tokenizer, [USER], "rag")


def test_named_templates_without_a_default_want_a_name(tmp_path):
    tokenizer = checkpoint(tmp_path / "m", config=NAMED[1:])
    with pytest.raises(RequestError, match=r"checkpoint's templates \(tool_use\), because none"):
        prompt_of(tokenizer, [USER], None)
    assert prompt_of(tokenizer, [USER], None, tools=[TOOL]) == "t1"
    assert prompt_of(tokenizer, [USER], "tool_use", tools=[]) == "t0"


@pytest.mark.parametrize(
    ("config", "files", "want"),
    [
        (None, {}, JSON_FILE),
        (DEFAULT, {}, DEFAULT),
        (None, {"chat_template.jinja": DEFAULT}, DEFAULT),
        # A vision model's: its processor, which writes the file, is what transformers uses.
        (DEFAULT, {"preprocessor_config.json": "{}"}, JSON_FILE),
        (None, {"processor_config.json": "{}"}, JSON_FILE),
    ],
)
def test_the_template_file_of_a_processor_is_read(tmp_path, config, files, want):
    files = {"chat_template.json": json.dumps({"chat_template": JSON_FILE}), **files}
    assert checkpoint(tmp_path / "m", config=config, files=files).library.chat_template == want


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3", '{"chat_template": 3}'])
def test_a_damaged_template_file_is_named(tmp_path, text):
    with pytest.raises(
        ConfigError, match=r"chat_template\.json: expected (a |chat_template, a te)"
    ):
        checkpoint(tmp_path / "m", files={"chat_template.json": text})


def test_a_template_without_tools_warns_once(caplog):
    with LLM("tiny", device="cpu", num_kv_blocks=16) as llm:
        messages = [{"role": "user", "content": "hi"}]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
        for _ in range(2):
            llm.chat_prompt(messages, chat_template=plain, tools=tools)
        llm.chat_prompt(messages, chat_template="{{ tools }}" + plain, tools=tools)
        llm.chat_prompt(messages, chat_template=plain)
    assert [record.getMessage() for record in caplog.records if "tools" in record.msg] == [
        "tools: the chat template describes no tools to the model: no effect"
    ]
