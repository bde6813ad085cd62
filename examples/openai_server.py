"""A server for OpenAI's clients, as an example of ``AsyncLLM``: completions and chat, streams too.

    pip install -e '.[server]'
    python examples/openai_server.py --model smollm2
    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python your_client.py

It is here to be read and changed: one model, text alone, no keys, no tools, no metrics. What it
lacks it refuses by name. To serve, run vLLM's server with mrv1's worker (docs/vllm.md).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from mrv1 import AsyncLLM, CapacityError, Mrv1Error, RequestError, RequestOutput, SamplingParams
from mrv1 import StructuredOutputsParams as Form

Body = dict[str, Any]
Outputs = AsyncGenerator[RequestOutput, None]
T = TypeVar("T")
SAMPLING = (  # passed on: OpenAI's names, and vLLM's (``extra_body`` of the client)
    "temperature", "top_p", "n", "stop", "seed", "max_tokens", "presence_penalty",
    "frequency_penalty", "logit_bias", "top_k", "min_p", "repetition_penalty", "min_tokens",
    "ignore_eos", "stop_token_ids", "bad_words",
)  # fmt: skip
OTHERS = (  # the last three change nothing
    "model", "prompt", "messages", "stream", "stream_options", "max_completion_tokens",
    "response_format", "chat_template_kwargs", "user", "metadata", "store",
)  # fmt: skip
STATUS = {RequestError: 400, CapacityError: 429, Mrv1Error: 500, RuntimeError: 503, Exception: 500}


def sampling_params(body: Body, default: SamplingParams) -> SamplingParams:
    """Return the parameters of a request; RequestError: a field is unknown or out of range."""
    if unknown := sorted(body.keys() - set(SAMPLING) - set(OTHERS)):
        raise RequestError(f"{unknown[0]}: expected a field that this example has, got another")
    given = {name: body[name] for name in SAMPLING if name in body}
    if "max_completion_tokens" in body:
        given["max_tokens"] = body["max_completion_tokens"]
    if isinstance(given.get("logit_bias"), dict):  # the keys of JSON are texts
        with suppress(ValueError):  # SamplingParams refuses those that are no numbers
            given["logit_bias"] = {int(key): bias for key, bias in given["logit_bias"].items()}
    match body.get("response_format"):
        case None | {"type": "text"}:
            form = None
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            form = Form(json=schema)
        case {"type": "json_object"}:
            form = Form(json_object=True)
        case other:
            raise RequestError(f"response_format: expected text or a form of JSON, got {other}")
    return replace(default, structured_outputs=form, **given)


def check_texts(messages: object) -> None:
    """Refuse images: ``LLM.chat`` would open the file that a client names."""
    for message in messages if isinstance(messages, list) else []:
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else []:
            if isinstance(part, dict) and part.get("type") != "text":
                raise RequestError(f"messages: expected parts that are text, got {part}")


def choice(kind: str, index: int, text: str, reason: str | None, is_first: bool = True) -> Body:
    """Return an output, or what is new in it, in the form of its route."""
    content: Body = {"text": text}
    if kind.startswith("chat"):  # a client adds up all texts of a stream: one role
        message = ({"role": "assistant"} if is_first else {}) | {"content": text}
        content = {"delta" if kind.endswith("chunk") else "message": message}
    return {"index": index, "finish_reason": reason, "logprobs": None} | content


def usage(*outputs: RequestOutput) -> Body:
    """Return the numbers of tokens of requests."""
    read = sum(len(output.prompt_token_ids) for output in outputs)
    written = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    cached = {"cached_tokens": sum(output.num_cached_tokens for output in outputs)}
    total = {"total_tokens": read + written, "prompt_tokens_details": cached}
    return {"prompt_tokens": read, "completion_tokens": written} | total


def answer(body: Body, status: int = 200) -> Response:
    """Return JSON, in ASCII: an error may quote a text that is not Unicode."""
    return Response(json.dumps(body), status, media_type="application/json")


def error_body(error: Exception) -> tuple[Body, int]:
    """Return an error in OpenAI's form, and its status."""
    status = next(code for kind, code in STATUS.items() if isinstance(error, kind))
    message = str(error)
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    kind = "invalid_request_error" if status < 429 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}, status


async def failed(_: Request, error: Exception) -> Response:
    """Answer with an error."""
    return answer(*error_body(error))


async def last_of(outputs: Outputs) -> RequestOutput:
    """Return the finished output of a request."""
    async for output in outputs:
        last = output
    return last


async def unless_gone(request: Request, *work: Awaitable[T]) -> list[T]:
    """Return all results; the first error, or the end of the client, cancels what still runs."""
    tasks = [asyncio.ensure_future(each) for each in work]
    done, gone = asyncio.gather(*tasks), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        return done.result()
    finally:
        for task in (gone, *tasks):
            task.cancel()


async def events(
    head: Body, output: RequestOutput, outputs: Outputs, with_usage: bool
) -> AsyncIterator[str]:
    """Yield what is new in each output as an event, then the usage and the end."""
    sent: dict[int, int | None] = {}  # characters of each output; None = it has ended
    try:
        async with aclosing(outputs):  # if the client goes, the request is aborted
            while True:
                for each in output.outputs:
                    i, reason, start = each.index, each.finish_reason, sent.get(each.index, 0)
                    if start is not None and (reason or len(each.text) > start):
                        text, is_first = each.text[start:], i not in sent
                        new = choice(head["object"], i, text, reason, is_first)
                        sent[i] = None if reason else len(each.text)
                        yield event(head | {"choices": [new]})
                if output.finished:
                    break
                output = await anext(outputs)
        if with_usage:
            yield event(head | {"choices": [], "usage": usage(output)})
    except (Mrv1Error, RuntimeError) as error:  # too late for a status
        yield event(error_body(error)[0])
    yield "data: [DONE]\n\n"


def event(body: Body) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


async def body_of(request: Request, model: str) -> Body:
    """Return the fields of a request that are not null."""
    try:
        given = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"body: expected JSON, got {error}") from error
    if not isinstance(given, dict):
        raise RequestError(f"body: expected an object, got {given!r:.60}")
    body = {name: value for name, value in given.items() if value is not None}
    if body.get("model") != model:
        raise HTTPException(404, f"model: expected {model!r}, got {body.get('model')!r:.60}")
    for name, kind in (("stream", bool), ("stream_options", dict)):
        if not isinstance(body.get(name, kind()), kind):
            raise RequestError(f"{name}: expected a {kind.__name__}, got {body[name]!r:.60}")
    return body


def make_app(llm: AsyncLLM, model: str) -> Starlette:
    """Return the application that serves an engine, which it shuts down at its end."""

    async def models(_: Request) -> Response:
        only = {"id": model, "object": "model", "created": 0, "owned_by": "mrv1"}
        return answer({"object": "list", "data": [only]})

    async def complete(request: Request) -> Response:
        body = await body_of(request, model)
        default = llm.get_default_sampling_params()
        kind, prompts = "text_completion", body.get("prompt")
        if request.url.path == "/v1/chat/completions":
            kind, default.max_tokens = "chat.completion", None  # up to the end of the context
            variables = body.get("chat_template_kwargs")
            check_texts(body.get("messages"))
            prompts = llm.chat_prompt(body.get("messages"), chat_template_kwargs=variables)
        if not (isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list)):
            prompts = [prompts]
        params = sampling_params(body, default)
        head = {"id": uuid4().hex, "object": kind, "created": int(time.time()), "model": model}
        requests = [llm.generate(prompt, params) for prompt in prompts]
        if not body.get("stream"):
            done = await unless_gone(request, *map(last_of, requests))
            choices = [
                choice(kind, i * params.n + each.index, each.text, each.finish_reason)
                for i, output in enumerate(done) for each in output.outputs
            ]  # fmt: skip
            return answer(head | {"choices": choices, "usage": usage(*done)})
        if len(requests) != 1:
            raise RequestError(f"prompt: expected one with stream=true, got {len(requests)}")
        head["object"] += ".chunk" if kind == "chat.completion" else ""
        (first,) = await unless_gone(request, anext(requests[0]))  # a refusal is still a status
        with_usage = bool(body.get("stream_options", {}).get("include_usage"))
        chunks = events(head, first, requests[0], with_usage)
        return StreamingResponse(chunks, media_type="text/event-stream")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with llm:
            yield

    routes = [
        Route("/v1/models", models),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/chat/completions", complete, methods=["POST"]),
    ]
    gone = {ClientDisconnect: lambda *_: Response(status_code=499)}
    handlers = gone | dict.fromkeys((HTTPException, Mrv1Error, RuntimeError, Exception), failed)
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


def main() -> None:
    """Load the model and serve it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="as for LLM")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-num-queued-reqs", type=int, default=1024, help="beyond: status 429")
    arguments = parser.parse_args()
    llm = AsyncLLM(arguments.model, max_num_queued_reqs=arguments.max_num_queued_reqs)
    gc.freeze()  # a full collection of all that torch has imported takes longer than a step
    uvicorn.run(make_app(llm, arguments.model), host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
