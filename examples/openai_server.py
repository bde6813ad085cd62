"""A server for OpenAI's clients, as an example of ``AsyncLLM``: completions and chat, streams too.

    pip install -e '.[server]'
    python examples/openai_server.py --model smollm2
    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python your_client.py

It is here to be read and changed: one model, text alone, no keys, no tools, no metrics. What it
lacks it refuses by name. To serve, run vLLM's server with mrv1's worker (docs/vllm.md).
"""

import argparse
import asyncio
import gc
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mrv1 import AsyncLLM, CapacityError, Mrv1Error, RequestError, RequestOutput, SamplingParams
from mrv1 import StructuredOutputsParams as Form

Body = dict[str, Any]
Outputs = AsyncGenerator[RequestOutput, None]
Sent = dict[int, tuple[str, str | None]]  # text and finish_reason of each choice
OWN_FIELDS = (  # all others are fields of SamplingParams, which refuses what it lacks
    "model", "prompt", "messages", "stream", "stream_options", "max_completion_tokens",
    "response_format", "chat_template_kwargs", "user", "metadata", "store",
)  # fmt: skip
STATUS = {RequestError: 400, CapacityError: 429, Mrv1Error: 500, RuntimeError: 503, Exception: 500}


async def body_of(request: Request, model: str) -> Body:
    """Return the fields of a request that are not null."""
    try:
        given = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"body: expected JSON, got {error}") from error
    if not isinstance(given, dict):
        raise RequestError(f"body: expected an object, got {given!r:.60}")
    body = {"stream": False, "stream_options": {}}
    body |= {name: value for name, value in given.items() if value is not None}
    if body.get("model") != model:
        raise HTTPException(404, f"model: expected {model!r}, got {body.get('model')!r:.60}")
    for name, kind in (("stream", bool), ("stream_options", dict)):
        if not isinstance(body[name], kind):
            raise RequestError(f"{name}: expected a {kind.__name__}, got {body[name]!r:.60}")
    for message in body["messages"] if isinstance(body.get("messages"), list) else []:
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else []:
            if isinstance(part, dict) and part.get("type") != "text":  # a file may be named
                raise RequestError(f"messages: expected parts that are text, got {part}")
    return body


def sampling_params(body: Body, default: SamplingParams) -> SamplingParams:
    """Return the parameters of a request; RequestError: a field is out of range."""
    given = {name: value for name, value in body.items() if name not in OWN_FIELDS}
    if unreported := [name for name in given if "logprob" in name]:
        raise RequestError(f"{unreported[0]}: expected no such field, as answers have none")
    if "max_completion_tokens" in body:
        given["max_tokens"] = body["max_completion_tokens"]
    match body.get("response_format"):
        case None | {"type": "text"}:
            pass
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            given["structured_outputs"] = Form(json=schema)
        case {"type": "json_object"}:
            given["structured_outputs"] = Form(json_object=True)
        case other:
            raise RequestError(f"response_format: expected text or a form of JSON, got {other}")
    return SamplingParams.from_optional(**asdict(default) | given)


def choices(kind: str, outputs: list[RequestOutput], sent: Sent) -> list[Body]:
    """Return what is new in outputs since ``sent``, in the form of a route."""
    new = []
    for index, each in enumerate(each for output in outputs for each in output.outputs):
        (before, reason), now = sent.get(index, ("", None)), (each.text, each.finish_reason)
        if now == (before, reason):
            continue
        content: Body = {"text": each.text[len(before) :]}
        if kind.startswith("chat"):  # a client adds up all texts of a stream: one role
            message = ({} if before else {"role": "assistant"}) | {"content": content["text"]}
            content = {"delta" if kind.endswith("chunk") else "message": message}
        new.append({"index": index, "finish_reason": now[1], "logprobs": None} | content)
        sent[index] = now
    return new


def usage(outputs: list[RequestOutput]) -> Body:
    """Return the numbers of tokens of requests."""
    read = sum(len(output.prompt_token_ids) for output in outputs)
    written = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    cached = {"cached_tokens": sum(output.num_cached_tokens for output in outputs)}
    total = {"total_tokens": read + written, "prompt_tokens_details": cached}
    return {"prompt_tokens": read, "completion_tokens": written} | total


def failed(_: Request | None, error: Exception) -> JSONResponse:
    """Answer with an error in OpenAI's form."""
    error = getattr(error, "exceptions", [error])[0]  # of one prompt among several
    status = next(code for kind, code in STATUS.items() if isinstance(error, kind))
    status, text = getattr(error, "status_code", status), str(getattr(error, "detail", error))
    kind = "invalid_request_error" if status < 429 else "server_error"
    message = text.encode(errors="backslashreplace").decode()  # it may quote half a character
    return JSONResponse({"error": {"message": message, "type": kind, "code": None}}, status)


async def events(
    head: Body, output: RequestOutput, outputs: Outputs, with_usage: bool
) -> AsyncIterator[str]:
    """Yield what is new in each output as an event, then the usage and the end."""
    sent: Sent = {}
    try:
        async with aclosing(outputs):  # if the client leaves, the request is aborted
            while True:
                if new := choices(head["object"], [output], sent):
                    yield f"data: {json.dumps(head | {'choices': new})}\n\n"
                if output.finished:
                    break
                output = await anext(outputs)
        if with_usage:
            yield f"data: {json.dumps(head | {'choices': [], 'usage': usage([output])})}\n\n"
    except (Mrv1Error, RuntimeError) as error:  # too late for a status
        yield f"data: {bytes(failed(None, error).body).decode()}\n\n"
    yield "data: [DONE]\n\n"


async def last_of(outputs: Outputs) -> RequestOutput:
    """Return the finished output of a request."""
    async for output in outputs:
        last = output
    return last


def make_app(llm: AsyncLLM, model: str) -> Starlette:
    """Return the application that serves an engine, which it shuts down at its end."""

    async def complete(request: Request) -> Response:
        work = asyncio.create_task(answer(request.url.path, await body_of(request, model)))
        leaving = asyncio.create_task(request.receive())  # after its body nothing else comes
        try:
            await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                raise ClientDisconnect
            return work.result()
        finally:  # a client that leaves aborts its requests, also while they wait in the queue
            work.cancel()
            leaving.cancel()

    async def answer(path: str, body: Body) -> Response:
        default = llm.get_default_sampling_params()
        kind, prompts = "text_completion", body.get("prompt")
        if path == "/v1/chat/completions":
            kind, default.max_tokens = "chat.completion", None  # up to the end of the context
            variables = body.get("chat_template_kwargs")
            prompts = llm.chat_prompt(body.get("messages"), chat_template_kwargs=variables)
        if not (isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list)):
            prompts = [prompts]
        head = {"id": uuid4().hex, "object": kind, "created": int(time.time()), "model": model}
        params = sampling_params(body, default)
        requests = [llm.generate(prompt, params) for prompt in prompts]
        if not body["stream"]:
            async with asyncio.TaskGroup() as group:  # an error of one cancels the others
                tasks = [group.create_task(last_of(each)) for each in requests]
            done = [task.result() for task in tasks]
            return JSONResponse(head | {"choices": choices(kind, done, {}), "usage": usage(done)})
        if len(requests) != 1:
            raise RequestError(f"prompt: expected one with stream=true, got {len(requests)}")
        head["object"] += ".chunk" if kind == "chat.completion" else ""
        first = await anext(requests[0])  # a refusal is still a status
        with_usage = bool(body["stream_options"].get("include_usage"))
        stream = events(head, first, requests[0], with_usage)
        return StreamingResponse(stream, media_type="text/event-stream")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with llm:
            yield

    only = {"id": model, "object": "model", "created": 0, "owned_by": "mrv1"}
    routes = [
        Route("/v1/models", JSONResponse({"object": "list", "data": [only]})),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/chat/completions", complete, methods=["POST"]),
    ]
    gone = {ClientDisconnect: lambda *_: Response(status_code=499)}
    handlers = gone | dict.fromkeys((HTTPException, ExceptionGroup, *STATUS), failed)
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="as for LLM")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-num-queued-reqs", type=int, default=1024, help="beyond: status 429")
    given = parser.parse_args()
    llm = AsyncLLM(given.model, max_num_queued_reqs=given.max_num_queued_reqs)
    gc.freeze()  # a full collection of all that torch has imported takes longer than a step
    uvicorn.run(make_app(llm, given.model), host=given.host, port=given.port)
