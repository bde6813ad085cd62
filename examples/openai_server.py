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
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mrv1 import AsyncLLM, CapacityError, Mrv1Error, RequestError, RequestOutput, SamplingParams
from mrv1 import StructuredOutputsParams as Form

Prompt = str | list[int]
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
STATUS = {RequestError: 400, CapacityError: 429, Mrv1Error: 500, RuntimeError: 503}


def sampling_params(body: dict[str, Any], default: SamplingParams) -> SamplingParams:
    """Return the parameters of a request; RequestError: a field is unknown or out of range."""
    if unknown := sorted(body.keys() - set(SAMPLING) - set(OTHERS)):
        raise RequestError(f"{unknown[0]}: expected a field that this example has, got another")
    given = {name: body[name] for name in SAMPLING if name in body}
    if "max_completion_tokens" in body:
        given["max_tokens"] = body["max_completion_tokens"]
    if isinstance(given.get("logit_bias"), dict):  # the keys of JSON are texts
        bias = given["logit_bias"].items()
        given["logit_bias"] = {int(k) if k.isdecimal() else k: v for k, v in bias}
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


def usage(outputs: list[RequestOutput]) -> dict[str, Any]:
    """Return the numbers of tokens of requests."""
    read = sum(len(output.prompt_token_ids) for output in outputs)
    written = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    cached = {"cached_tokens": sum(output.num_cached_tokens for output in outputs)}
    total = {"total_tokens": read + written, "prompt_tokens_details": cached}
    return {"prompt_tokens": read, "completion_tokens": written} | total


def error_body(error: Exception) -> tuple[dict[str, Any], int]:
    """Return an error in OpenAI's form, and its status."""
    status = next(code for kind, code in STATUS.items() if isinstance(error, kind))
    kind = "invalid_request_error" if status == 400 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": None}}, status


async def failed(_: Request, error: Exception) -> JSONResponse:
    """Answer with an error."""
    return JSONResponse(*error_body(error))


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return what ``work`` returns; cancel it, and so its requests, when the client goes."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def events(
    head: dict[str, Any], output: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncIterator[dict[str, Any]]:
    """Yield what is new in each output as events, then the usage."""
    kind = head["object"]
    sent = dict.fromkeys(range(len(output.outputs)), 0)  # characters; None = the output has ended
    async with aclosing(outputs):  # if the client goes, the request is aborted
        while True:
            for each in output.outputs:
                start, reason = sent[each.index], each.finish_reason
                if start is not None and (reason or len(each.text) > start):
                    new = choice(kind, each.index, each.text[start:], reason, "delta")
                    sent[each.index] = None if reason else len(each.text)
                    yield head | {"choices": [new]}
            if output.finished:
                break
            output = await anext(outputs)
    yield head | {"choices": [], "usage": usage([output])}


def choice(kind: str, index: int, text: str, reason: str | None, message: str) -> dict[str, Any]:
    """Return an output in the form of its route."""
    texts = {"text": text}
    if kind.startswith("chat"):
        texts = {message: {"role": "assistant", "content": text}}
    return {"index": index, "finish_reason": reason, "logprobs": None} | texts


def make_app(llm: AsyncLLM, model: str) -> Starlette:
    """Return the application that serves an engine, which it shuts down at its end."""

    async def models(_: Request) -> JSONResponse:
        only = {"id": model, "object": "model", "created": 0, "owned_by": "mrv1"}
        return JSONResponse({"object": "list", "data": [only]})

    async def last_of(prompt: Prompt, params: SamplingParams) -> RequestOutput:
        async for output in llm.generate(prompt, params):
            last = output
        return last

    async def all_of(prompts: list[Prompt], params: SamplingParams) -> list[RequestOutput]:
        tasks = [asyncio.ensure_future(last_of(prompt, params)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:  # the first error ends the others
            for task in tasks:
                task.cancel()

    async def lines(chunks: AsyncIterator[dict[str, Any]], with_usage: bool) -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                if chunk["choices"] or with_usage:
                    yield f"data: {json.dumps(chunk)}\n\n"
        except (Mrv1Error, RuntimeError) as error:  # too late for a status
            yield f"data: {json.dumps(error_body(error)[0])}\n\n"
        yield "data: [DONE]\n\n"

    async def answer(request: Request) -> Response:
        try:
            given = json.loads(await request.body())
        except ValueError as error:
            raise RequestError(f"body: expected JSON, got {error}") from error
        if not isinstance(given, dict) or given.get("model") != model:
            raise RequestError(f"model: expected an object with model={model!r}, got another")
        body = {name: value for name, value in given.items() if value is not None}
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
        if not body.get("stream"):
            done = await unless_gone(request, all_of(prompts, params))
            choices = [
                choice(kind, i * params.n + each.index, each.text, each.finish_reason, "message")
                for i, output in enumerate(done) for each in output.outputs
            ]  # fmt: skip
            return JSONResponse(head | {"choices": choices, "usage": usage(done)})
        if len(prompts) != 1:
            raise RequestError(f"prompt: expected one with stream=true, got {len(prompts)}")
        outputs = llm.generate(prompts[0], params)
        first = await unless_gone(request, anext(outputs))  # a refusal is still a status
        head["object"] += ".chunk" if kind == "chat.completion" else ""
        chunks = events(head, first, outputs)
        with_usage = bool(dict(body.get("stream_options", {})).get("include_usage"))
        return StreamingResponse(lines(chunks, with_usage), media_type="text/event-stream")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with llm:
            yield

    routes = [
        Route("/v1/models", models),
        Route("/v1/completions", answer, methods=["POST"]),
        Route("/v1/chat/completions", answer, methods=["POST"]),
    ]
    gone = {ClientDisconnect: lambda *_: Response(status_code=499)}
    handlers = gone | dict.fromkeys((Mrv1Error, RuntimeError), failed)
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
