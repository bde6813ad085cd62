"""Apply the output of a step to its requests: tokens, log-probabilities, ends, failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mrv1.engine.request import FinishReason, Request
from mrv1.engine.running_batch import BoolArray, LaunchedStep, ScheduledRows
from mrv1.errors import RequestError
from mrv1.runner.step import RowFailure, StepOutput, TokenLogprobs
from mrv1.sampler import GrammarMatcher


@dataclass(slots=True)
class StepResult:
    """The requests of a step, by outcome."""

    sampled: Sequence[Request]  # requests that got a token, in the order of rows
    num_tokens: int  # tokens that were appended to requests
    failed: list[Request]
    ended: dict[Request, FinishReason]  # requests that have to be finished, failed requests first
    succeeded: BoolArray | None  # [rows] still had its slot and did not fail; None = all
    num_nan_rows: int  # rows that failed because of NaN in their logits


def take_output(
    step: LaunchedStep,
    output: StepOutput,
    live: BoolArray | None,
    custom_masks: tuple[str, ...] = (),
) -> StepResult:
    """Append tokens and log-probabilities to the requests of a step, and find requests that end.

    ``live``: ``[rows]`` whether the request still has its slot; None = all. ``custom_masks``
    names, for errors, features that may mask tokens of every request.
    """
    rows = step.rows
    requests: Sequence[Request] = rows.requests
    ended: dict[Request, FinishReason] = {}
    tokens, num_tokens, num_nan_rows = None, 0, 0
    if (
        step.all_sample
        and live is None
        and not output.errors
        and not rows.any_grammars
        and (not rows.any_logprobs or _has_one_each(rows, output.logprobs))
    ):
        tokens = _one_each(output.token_ids)
    if tokens is None:
        live = np.ones(len(requests), dtype=np.bool_) if live is None else live
        requests, tokens = [], []
        for row in live.nonzero()[0].tolist():
            request, row_tokens = rows.requests[row], output.token_ids[row]
            reason = _failure(step, output, row, custom_masks)
            num_nan_rows += reason == RowFailure.NAN
            if reason is None and row_tokens and request.matcher is not None:
                reason = _refusal(request, request.matcher, row_tokens[0])
            if reason is not None:
                live[row] = False  # its blocks must not enter the prefix cache
                num_accepted = step.num_drafts(row) if row in output.errors else 0
                row_tokens = row_tokens[:num_accepted]  # before the failure
            count = _append(request, row_tokens)
            num_tokens += count
            if rows.any_logprobs and (count or reason is None):
                _take_logprobs(step, output, row, count)
            if reason is not None and not (count and _is_stop(request, row_tokens[count - 1])):
                ended[request] = "error"
                request.error = RequestError(f"request {request.name!r}: {reason}")
                if isinstance(reason, RequestError):
                    request.error.__cause__ = reason.__cause__
                continue
            if count:  # else an unfinished prefill
                requests.append(request)
                tokens.append(row_tokens[count - 1])
    else:
        num_tokens = len(tokens)
        for request, token in zip(requests, tokens, strict=True):
            request.output_token_ids.append(token)
        for row in rows.logprob_rows or ():
            requests[row].output_logprobs.append(output.logprobs[row])
    failed = [*ended]
    if not rows.ending_token_ids.isdisjoint(tokens):
        for request, token in zip(requests, tokens, strict=True):
            if _is_stop(request, token):
                ended[request] = "stop"
    if rows.any_grammars:
        _end_finished_grammars(requests, ended)
    for row in step.last_rows:
        if live is None or live[row]:
            ended.setdefault(rows.requests[row], "length")
    if not step.tells_last_rows:  # only the result does
        for request in requests:
            if request.num_tokens == request.max_total_tokens:
                ended.setdefault(request, "length")
    return StepResult(
        sampled=requests,
        num_tokens=num_tokens,
        failed=failed,
        ended=ended,
        succeeded=live,
        num_nan_rows=num_nan_rows,
    )


def _has_one_each(rows: ScheduledRows, logprobs: Mapping[int, TokenLogprobs]) -> bool:
    """Return whether the rows ask for log-probabilities of one output token each and have them."""
    asking = rows.logprob_rows
    if asking is None or len(asking) != len(logprobs):
        return False
    return all(row in logprobs and len(logprobs[row]) == 1 for row in asking)


def _append(request: Request, tokens: tuple[int, ...]) -> int:
    """Append a row's tokens up to the first that ends the request; return their number.

    The device, which knows only some of the stop tokens, may have accepted drafts after it.
    """
    for count, token in enumerate(tokens, 1):
        request.output_token_ids.append(token)
        if count < len(tokens) and _is_stop(request, token):
            return count
    return len(tokens)


def _is_stop(request: Request, token: int) -> bool:
    """Return whether the newest token of a request, ``token``, ends it."""
    return token in request.stop_token_ids or request.stop_sequence is not None


def _end_finished_grammars(
    requests: Sequence[Request], ended: dict[Request, FinishReason]
) -> None:
    for request in requests:
        try:
            if request.matcher is not None and request.matcher.is_finished():
                ended.setdefault(request, "stop")
        except Exception as error:  # of any type: only this request fails
            ended[request] = "error"
            request.error = RequestError.caused_by(error, "structured_output")


def _failure(
    step: LaunchedStep, output: StepOutput, row: int, custom_masks: tuple[str, ...]
) -> str | RequestError | None:
    """Return why a row has failed; None = the row has not failed."""
    request, num_tokens = step.rows.requests[row], len(output.token_ids[row])
    reason = output.errors.get(row)
    if reason is not None:
        masks = request.params.masks(len(request.output_token_ids) + num_tokens) + custom_masks
        if reason == RowFailure.MASKED and masks:
            return f"{reason}, by {', '.join(masks)}"
        return reason
    least = int(step.samples[row])
    most = least + step.num_drafts(row)
    if not least <= num_tokens <= most:
        expected = f"{least} to {most}" if least < most else f"{least}"
        return f"expected {expected} tokens of step {step.step_id}, got {output.token_ids[row]}"
    if not step.rows.any_logprobs:
        return None
    wants = (
        ("logprobs", num_tokens if request.params.wants_logprobs else 0, output.logprobs),
        ("prompt_logprobs", step.num_prompt_logprobs(row), output.prompt_logprobs),
    )
    for name, count, given in wants:
        got = len(given[row]) if row in given else 0
        if count and got != count:
            return f"{name}: expected {count} positions of step {step.step_id}, got {got}"
    return None


def _take_logprobs(step: LaunchedStep, output: StepOutput, row: int, num_tokens: int) -> None:
    """Append a row's log-probabilities, of the prompt only those not known yet."""
    request = step.rows.requests[row]
    if request.params.wants_logprobs and step.samples[row]:
        request.output_logprobs += output.logprobs[row].one_by_one(num_tokens)
    if step.num_prompt_logprobs(row):
        known = request.num_prompt_logprobs - step.start(row)
        fresh = output.prompt_logprobs[row].after(known)
        if len(fresh):
            request.prompt_logprobs.append(fresh)


def _refusal(request: Request, matcher: GrammarMatcher, token: int) -> str | RequestError | None:
    """Advance a grammar by a token; return the error if it refuses a token that is no stop."""
    try:
        if matcher.accept(token) or token in request.stop_token_ids:
            return None
    except Exception as error:  # of any type: only this request fails
        return RequestError.caused_by(error, "structured_output")
    return f"structured_output: token {token}, which its bitmask allowed, was not accepted"


def _one_each(token_ids: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Return the rows' tokens if each row has exactly one token; else None."""
    try:
        return [token for (token,) in token_ids]
    except ValueError:
        return None
