"""Requests from JSONL, results to JSONL. An invalid line fails; the other lines still run."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mrv1.cli.console import STANDARD, counting_bar
from mrv1.cli.report import Usage
from mrv1.engine import LLM, CompletionOutput, Logprob, LoRARequest, RequestOutput
from mrv1.engine.prompts import MULTIMODAL_KEYS, PROMPT_KEYS
from mrv1.errors import ConfigError, Mrv1Error, RequestError, short
from mrv1.integrations.llguidance import StructuredOutputsParams
from mrv1.sampler import SamplingParams

INPUT_KEYS = (*PROMPT_KEYS, "messages")
"""Keys of which a line has one: what the model continues or answers."""
ORDER_KEYS = ("priority", "fairness_id")
"""Keys that say when a line's request runs, as ``LLM.add_request`` names them."""
KEYS = (*INPUT_KEYS, *MULTIMODAL_KEYS, *ORDER_KEYS, "request_id", "sampling_params")
"""Keys that a line may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the input file: a request, or the error that kept it from being one."""

    number: int
    """Line number in the file, from 1."""
    request_id: str | None = None
    """The user's name for the request; only copied into the result."""
    prompt: Mapping[str, Any] | None = None
    """``prompt``, ``prompt_token_ids`` or ``messages``, and ``MULTIMODAL_KEYS``; unchecked."""
    params: SamplingParams | None = None
    order: Mapping[str, Any] = field(default_factory=dict)
    """``ORDER_KEYS`` and their values; the engine checks them."""
    error: Mrv1Error | None = None


def read_input(path: Path) -> bytes:
    """Return the content of a file, or of stdin; ConfigError: it cannot be read."""
    try:
        return _read_stdin() if path == STANDARD else path.read_bytes()
    except OSError as error:
        name = "stdin" if path == STANDARD else repr(str(path))
        raise ConfigError(f"--input: cannot read {name}: {error.strerror}") from error


def parse_lines(content: bytes, sampling: Mapping[str, Any]) -> list[Line]:
    """Return the lines of a file; ``sampling`` fills the parameters that a line leaves open."""
    lines: list[Line] = []
    number_of_id: dict[str, int] = {}
    for number, raw in enumerate(content.splitlines(), start=1):
        if not raw.strip():
            continue
        line = _parse(number, raw, sampling)
        if line.request_id is not None:
            first = number_of_id.setdefault(line.request_id, number)
            if first != number:
                line = Line(
                    number=number,
                    request_id=line.request_id,
                    error=RequestError(
                        f"request_id: expected a unique id, got {short(line.request_id)}, "
                        f"which is line {first}'s too"
                    ),
                )
        lines.append(line)
    return lines


def _read_stdin() -> bytes:
    if sys.stdin is None:  # the shell closed it
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return sys.stdin.buffer.read()


def _parse(number: int, raw: bytes, sampling: Mapping[str, Any]) -> Line:
    request_id = None
    try:
        record = _without_nulls(_load_object(raw))
        given_id = record.get("request_id")
        if given_id is not None and not isinstance(given_id, str):
            raise RequestError(f"request_id: expected a string, got {short(given_id)}")
        request_id = given_id
        unknown = sorted(record.keys() - set(KEYS))
        if unknown:
            raise RequestError(f"expected keys among {', '.join(KEYS)}; got {short(unknown)}")
        prompt = {key: record[key] for key in (*INPUT_KEYS, *MULTIMODAL_KEYS) if key in record}
        order = {key: record[key] for key in ORDER_KEYS if key in record}
        params = _params(record.get("sampling_params", {}), sampling)
    except RequestError as error:
        return Line(number=number, request_id=request_id, error=error)
    return Line(number=number, request_id=request_id, prompt=prompt, params=params, order=order)


def _load_object(raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"expected a JSON object, got invalid JSON: {error}") from error
    if not isinstance(record, dict):
        raise RequestError(f"expected a JSON object, got {type(record).__name__}")
    return record


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse a repeated key, whose last value ``json`` would keep."""
    record: dict[str, Any] = {}
    for key, value in members:
        if key in record:
            raise ValueError(f"the key {short(key)} comes twice")
        record[key] = value
    return record


def _without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null: programs that write tables write null for no value."""
    return {key: value for key, value in record.items() if value is not None}


def _params(given: object, sampling: Mapping[str, Any]) -> SamplingParams:
    if not isinstance(given, dict):
        raise RequestError(f"sampling_params: expected a JSON object, got {short(given)}")
    given = _without_nulls(given)
    form = given.get("structured_outputs")
    if isinstance(form, dict):
        try:
            given = given | {"structured_outputs": StructuredOutputsParams(**form)}
        except TypeError as error:  # an unknown name
            names = ", ".join(each.name for each in fields(StructuredOutputsParams))
            raise RequestError(
                f"structured_outputs: expected one of {names}; got {short(sorted(form))}"
            ) from error
    return SamplingParams.from_optional(**{**sampling, **given})


def run_batch(
    llm: LLM,
    lines: Sequence[Line],
    write: Callable[[str], object],
    usage: Usage,
    lora: LoRARequest | None = None,
) -> dict[int, Mrv1Error]:
    """Generate for all lines at once; return each failed line's number and error.

    Results are written in the order of the input, each as soon as those before it are: an
    interruption loses a finished result only if an earlier line is unfinished. ``write`` is called
    with each result, one line of text; ``usage`` counts tokens and times. ``lora`` is the adapter
    of all lines.
    """
    errors: dict[int, Mrv1Error] = {}
    records: dict[int, dict[str, Any]] = {}
    unwritten = iter([line.number for line in lines])
    next_number = next(unwritten, None)

    def done(line: Line, record: dict[str, Any], error: Mrv1Error | None) -> None:
        nonlocal next_number
        named = {"line": line.number, "request_id": line.request_id}
        records[line.number] = named | record
        if error is not None:
            errors[line.number] = error
            records[line.number]["error"] = str(error)
        while next_number in records:
            write(json.dumps(records.pop(next_number)) + "\n")
            next_number = next(unwritten, None)
        progress.advance(task)

    with counting_bar(transient=True) as progress:
        task = progress.add_task("generate", total=len(lines))
        line_of_id = {}
        for line in lines:
            error = line.error or _add(llm, line, lora)
            if error is None:
                line_of_id[str(line.number)] = line
            else:
                done(line, {}, error)
        while llm.has_unfinished_requests():
            outputs = llm.step()
            usage.observe(outputs)
            for output in outputs:
                if output.finished:
                    done(line_of_id[output.request_id], _record(output), output.error)
    return dict(sorted(errors.items()))


def _add(llm: LLM, line: Line, lora: LoRARequest | None) -> RequestError | None:
    """Queue a line with its number as request id; return the error if ``llm`` refuses it."""
    prompt = line.prompt or {}
    try:
        if "messages" in prompt:
            if not prompt.keys().isdisjoint(PROMPT_KEYS):
                raise RequestError(f"expected one of {', '.join(INPUT_KEYS)}; got {list(prompt)}")
            items = {key: prompt[key] for key in MULTIMODAL_KEYS if key in prompt}
            prompt = {"prompt": llm.chat_prompt(prompt["messages"]), **items}
        llm.add_request(
            prompt,
            line.params or SamplingParams(),
            request_id=str(line.number),
            lora_request=lora,
            **line.order,
        )
    except RequestError as error:
        return error
    return None


def _record(output: RequestOutput) -> dict[str, Any]:
    """Return a request's result: the fields of its one output, or a list ``outputs``."""
    completions = [_completion(completion) for completion in output.outputs]
    record: dict[str, Any] = {"outputs": completions} if len(completions) > 1 else completions[0]
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = _positions(output.prompt_logprobs)
    return record | {"num_prompt_tokens": len(output.prompt_token_ids)}


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        record["logprobs"] = _positions(completion.logprobs)
    return record


def _positions(
    positions: Sequence[dict[int, Logprob] | None],
) -> list[dict[int, dict[str, Any]] | None]:
    return [
        None if each is None else {token: _logprob(logprob) for token, logprob in each.items()}
        for each in positions
    ]


def _logprob(logprob: Logprob) -> dict[str, Any]:
    """Return a token's log-probability for JSON, which has no minus infinity: null instead."""
    return asdict(logprob) | ({} if math.isfinite(logprob.logprob) else {"logprob": None})
