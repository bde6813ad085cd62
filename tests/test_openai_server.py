"""The example of a server, with OpenAI's own client: texts, streams, usage, errors, ends."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from mrv1 import AsyncLLM, SamplingParams

if not all(map(find_spec, ("openai", "starlette", "uvicorn"))):
    pytest.skip("needs openai, starlette and uvicorn: make install", allow_module_level=True)

import openai
import uvicorn

from examples.openai_server import make_app

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
GREEDY = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
JSON = {"Content-Type": "application/json"}
LONG = GREEDY | {"max_tokens": 1500}
MESSAGES = [{"role": "user", "content": "Speak, Romeo."}]


@pytest.fixture(scope="module")
def llm() -> AsyncLLM:
    """An engine of the embedded model, which has no chat template of its own."""
    llm = AsyncLLM("tiny", device="cpu", num_kv_blocks=512, max_num_queued_reqs=6)
    write = llm.chat_prompt
    llm.chat_prompt = lambda messages, **more: write(messages, chat_template=TEMPLATE, **more)
    return llm


@pytest.fixture(scope="module")
def client(llm: AsyncLLM) -> Iterator[openai.OpenAI]:
    """A client of a server in a thread of this process, on a free port."""
    config = uvicorn.Config(make_app(llm, "tiny"), port=0, log_level="error", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    (port,) = {each.getsockname()[1] for each in server.servers[0].sockets}
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client
    server.should_exit = True
    thread.join()
    with pytest.raises(RuntimeError, match="closed"):
        expected(llm, "ROMEO:")


def expected(llm: AsyncLLM, prompt: object) -> str:
    """Return the text that the engine makes of a prompt for a task of this thread."""
    given = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    async def last_text() -> str:
        return [each async for each in llm.generate(prompt, given)][-1].outputs[0].text

    return asyncio.run(last_text())


def settled(llm: AsyncLLM) -> None:
    """Wait until no request runs or waits."""
    until = time.monotonic() + 60
    while llm._engine._streams or llm._engine._num_unfinished:
        assert time.monotonic() < until, "a request goes on without its client"
        time.sleep(0.01)


def test_completions_are_the_engines_texts_with_their_usage(llm, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    prompts = ["ROMEO:", "JULIET: O"]
    done = client.completions.create(model="tiny", prompt=prompts, **GREEDY)
    texts = [expected(llm, prompt) for prompt in prompts]
    assert [(each.index, each.text) for each in done.choices] == list(enumerate(texts))
    assert {each.finish_reason for each in done.choices} == {"length"}
    encode = llm.get_tokenizer().encode
    read = sum(len(encode(prompt)) for prompt in prompts)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (read, 16)
    ids = client.completions.create(model="tiny", prompt=encode("ROMEO:"), **GREEDY)
    assert ids.choices[0].text == texts[0]


def test_a_stream_adds_up_to_the_whole(llm, client):
    drawn = {"temperature": 1.0, "seed": 3, "n": 2, "max_tokens": 12, "logit_bias": {"7": -5}}
    options = {"include_usage": True}
    stream = client.completions.create(
        model="tiny", prompt="ROMEO:", stream=True, stream_options=options, **drawn
    )
    texts, reasons, usages = ["", ""], [None, None], []
    for chunk in stream:
        usages.append(chunk.usage)
        for each in chunk.choices:
            texts[each.index] += each.text
            reasons[each.index] = each.finish_reason
    done = client.completions.create(model="tiny", prompt="ROMEO:", **drawn)
    assert texts == [each.text for each in done.choices]
    assert reasons == [each.finish_reason for each in done.choices]
    assert {*usages[:-1]} == {None}
    assert usages[-1].completion_tokens == done.usage.completion_tokens


def test_a_conversation_is_answered_whole_and_as_a_stream(llm, client):
    done = client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
    text = expected(llm, llm.chat_prompt(MESSAGES))
    assert done.choices[0].message.content == text
    assert done.choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Speak, Romeo."}]}]
    stream = client.chat.completions.create(model="tiny", messages=parts, stream=True, **GREEDY)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content for delta in deltas) == text
    # Clients, such as the one that chat.completions.stream returns, add up every text of a delta.
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert len(deltas) > 1


def test_an_answer_follows_a_schema(client):
    schema = {"type": "object", "properties": {"no": {"type": "integer", "maximum": 9}}}
    schema |= {"required": ["no"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "no", "schema": schema}}
    done = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=form, max_completion_tokens=60, seed=1
    )
    assert isinstance(json.loads(done.choices[0].message.content)["no"], int)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": "ROMEO:", "temperature": -1}, "temperature: expected 0 or a number"),
        ({"prompt": "ROMEO:", "logprobs": 5}, "logprobs: expected no such field"),
        ({"prompt": "ROMEO " * 3000, "stream": True}, "max_model_len"),
        ({"prompt": ["a", "b"], "stream": True}, "prompt: expected one with stream=true, got 2"),
        ({"prompt": 3}, "prompt: expected a string, a list of token ids or a dict, got int"),
        ({"prompt": "ROMEO:", "stream": "no"}, "stream: expected a bool, got 'no'"),
        ({"prompt": "ROMEO:", "stream": True, "stream_options": ""}, "stream_options: expected a"),
        ({"prompt": "ROMEO:", "logit_bias": {"9" * 5000: 1}}, "logit_bias: expected token ids"),
        ({"prompt": "ROMEO:", "extra_body": {"response_format": {"type": "xml"}}},
         "response_format: expected text or a form of JSON"),
    ],
)  # fmt: skip
def test_a_refused_request_says_why(client, given, message):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"model": "tiny"} | given)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", "{", 400, "body: expected JSON"),
        ("completions", "[" * 100_000, 400, "body: expected JSON"),
        ("completions", "[]", 400, r"body: expected an object, got \[\]"),
        ("completions", r'{"model": "tiny", "\ud800": 1}', 400, "expected one of"),
        ("completions", '{"model": "other"}', 404, "model: expected 'tiny', got 'other'"),
        ("embeddings", "{}", 404, "Not Found"),
    ],
)
def test_every_error_has_the_form_of_openai(client, path, body, status, message):
    with pytest.raises(openai.APIStatusError, match=message) as refused:
        client.post(f"/{path}", cast_to=object, options={"headers": JSON}, content=body.encode())
    assert refused.value.status_code == status
    assert refused.value.type == "invalid_request_error"


def test_a_fault_of_the_server_has_the_form_of_openai(llm, client, monkeypatch):
    monkeypatch.setattr(llm, "get_default_sampling_params", lambda: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="division") as failed:
        client.completions.create(  # uvicorn ends the connection: no later request shall have it
            model="tiny", prompt="ROMEO:", extra_headers={"Connection": "close"}, **GREEDY
        )
    assert failed.value.type == "server_error"
    monkeypatch.undo()
    assert client.completions.create(model="tiny", prompt="ROMEO:", **GREEDY).choices[0].text


def test_no_file_is_opened_that_a_client_names(client):
    part = {"type": "image_url", "image_url": {"url": "/etc/hostname"}}
    with pytest.raises(openai.BadRequestError, match="expected parts that are text"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": [part]}]
        )


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_ends_its_request(llm, client, stream):
    before = llm.metrics()["num_generated_tokens"]
    if stream:
        chunks = client.completions.create(model="tiny", prompt="ROMEO:", stream=True, **LONG)
        next(iter(chunks))
        chunks.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(model="tiny", prompt="ROMEO:", timeout=0.2, **LONG)
    settled(llm)
    assert llm.metrics()["num_generated_tokens"] - before < 1500


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_before_the_first_output_ends_its_request(llm, client, stream):
    goes_on = threading.Event()
    llm._engine.submit(goes_on.wait)  # no step, and so no output, comes before
    try:
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(
                model="tiny", prompt=["ROMEO:", "JULIET:"][: 1 + (not stream)], stream=stream,
                timeout=0.2, **LONG,
            )  # fmt: skip
        settled(llm)
    finally:
        goes_on.set()


def test_an_error_of_one_prompt_ends_the_others(llm, client):
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model="tiny", prompt=["ROMEO:", "ROMEO " * 3000], **LONG)
    assert llm._engine._num_unfinished == 0


def test_a_full_queue_is_told_to_try_again(llm, client):
    streams = [
        client.completions.create(model="tiny", prompt="ROMEO:", stream=True, n=3, **LONG)
        for _ in range(2)
    ]
    with pytest.raises(openai.RateLimitError, match="try again"):
        client.completions.create(model="tiny", prompt="ROMEO:", **GREEDY)
    for stream in streams:
        stream.close()
    settled(llm)
