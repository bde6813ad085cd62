"""One request of a caller with its ``n`` outputs, each of which is a request of the engine."""

from __future__ import annotations

from itertools import chain, islice

from mrv1.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from mrv1.engine.request import Request
from mrv1.engine.tokenizer import NO_TOKENIZER, Decoded, OutputText, Tokenizer
from mrv1.runner.step import TokenLogprobs


class RequestGroup:
    """A request and its followers, with their texts and log-probabilities.

    ``prompt`` is its text, None if given as token ids; ``is_awaited``: ``LLM.generate`` or
    ``stream`` delivers the outputs, else ``step``.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        prompt: str | None = None,
        is_awaited: bool = False,
    ) -> None:
        self.is_awaited = is_awaited
        self.requests = (request, *request.followers)
        self._prompt_text = prompt
        params = request.params
        if params.detokenize:
            self._tokenizer = tokenizer.with_special_tokens(
                skip=params.skip_special_tokens, spaces=params.spaces_between_special_tokens
            )
        else:
            self._tokenizer = NO_TOKENIZER
        start = self._tokenizer.after(request.prompt_token_ids)
        self._completions = [
            _Completion(member, self._tokenizer, start) for member in self.requests
        ]
        self._prompt: tuple[dict[int, Logprob] | None, ...] | None = None  # once known

    @property
    def req_id(self) -> str:
        """The caller's name for the request."""
        return self.requests[0].name

    @property
    def finished(self) -> bool:
        """Whether every output has ended."""
        return all(request.finished for request in self.requests)

    def find_stop(self, request: Request) -> tuple[str, int] | None:
        """Return the stop string in the output of ``request``, and the number of tokens up to it.

        None = no stop string came before a stop token, sequence or string of the caller.
        """
        return self._completions[request.child].find_stop()

    def output(self) -> RequestOutput:
        """Return the outputs as they are now."""
        requests, first = self.requests, self.requests[0]
        times = [each.first_token_time for each in requests if each.first_token_time is not None]
        all_failed = all(request.error is not None for request in requests)
        finish_times = [request.finish_time or 0.0 for request in requests]
        return RequestOutput(
            request_id=self.req_id,
            prompt=self._prompt_text,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(),
            num_cached_tokens=first.num_prefix_hits,
            outputs=tuple(completion.output() for completion in self._completions),
            finished=self.finished,
            error=first.error if all_failed else None,
            metrics=RequestMetrics(
                arrival_time=first.arrival_time,
                first_token_time=min(times, default=None),
                finish_time=max(finish_times) if self.finished else None,
                num_preemptions=sum(request.num_preemptions for request in requests),
                num_draft_tokens=sum(request.num_draft_tokens for request in requests),
                num_accepted_tokens=sum(request.num_accepted_tokens for request in requests),
            ),
        )

    def _prompt_logprobs(self) -> tuple[dict[int, Logprob] | None, ...] | None:
        first = self.requests[0]
        is_known = first.params.prompt_logprobs is not None and not first.lacks_prompt_logprobs
        if self._prompt is None and is_known:
            parts = [_dicts(logprobs, self._tokenizer) for logprobs in first.prompt_logprobs]
            self._prompt = (None, *chain.from_iterable(parts))
        return self._prompt


class _Completion:
    """One of the outputs."""

    def __init__(self, request: Request, tokenizer: Tokenizer, start: Decoded) -> None:
        params = request.params
        self._request = request
        self._tokenizer = tokenizer
        self._text = OutputText(
            tokenizer,
            params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            stop_token_sequences=params.stop_token_sequences,
            start=start,
        )
        self._logprobs: list[dict[int, Logprob]] = []
        self._totals = [0.0]  # [len(_logprobs) + 1] sums over the first output tokens
        self._num_searched = 0  # output tokens that were searched for stop strings
        self._last: CompletionOutput | None = None  # the output of a request that has ended

    def find_stop(self) -> tuple[str, int] | None:
        request, output = self._request, self._request.output_token_ids
        if not request.params.stop:
            return None
        # One token at a time, as without drafts: a stop string ends the output in its last token.
        for count in range(min(self._num_searched + 1, len(output)), len(output) + 1):
            is_newest = count == len(output)
            if is_newest and request.stop_reason is not None:
                return None  # a stop token or sequence goes before a string that it completes
            tokens = self._before_stop_token() if is_newest else output[:count]
            is_last = is_newest and request.finished and request.error is None
            found = self._text.find_stop(tokens, is_last=is_last)
            if found is not None:
                return found, count
            self._num_searched = count
        return None

    def output(self) -> CompletionOutput:
        if self._last is not None:
            return self._last
        request = self._request
        for logprobs in request.output_logprobs[len(self._logprobs) :]:
            self._logprobs += _dicts(logprobs, self._tokenizer)
        wants_logprobs = request.params.wants_logprobs
        if wants_logprobs:
            self._add_up()
        output = CompletionOutput(
            index=request.child,
            text=self._text.text(self._before_stop_token(), is_last=request.finished),
            token_ids=tuple(request.output_token_ids),
            cumulative_logprob=self._totals[-1] if wants_logprobs else None,
            logprobs=tuple(self._logprobs) if wants_logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
        )
        if request.finished:
            self._last = output
        return output

    def _add_up(self) -> None:
        """Extend ``_totals`` one by one: an interrupt between two lines leaves no sum out."""
        start = len(self._totals) - 1
        token_ids = islice(self._request.output_token_ids, start, None)
        for token, position in zip(token_ids, self._logprobs[start:], strict=False):
            self._totals.append(self._totals[-1] + position[token].logprob)

    def _before_stop_token(self) -> list[int]:
        """Return the output tokens without the stop token or sequence that the text excludes."""
        request, token_ids = self._request, self._request.output_token_ids
        reason, params = request.stop_reason, request.params
        if (
            request.finish_reason != "stop"
            or isinstance(reason, str)
            or params.include_stop_str_in_output
        ):
            return token_ids
        if isinstance(reason, tuple):
            return token_ids[: -len(reason)]
        # A grammar may end a request with any token, and with an end-of-sequence token in spite of
        # ``ignore_eos``.
        return token_ids[:-1] if token_ids[-1] in request.late_token_ids else token_ids


def _dicts(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> list[dict[int, Logprob]]:
    return [
        {
            token: Logprob(logprob=logprob, rank=rank, decoded_token=tokenizer.decode_token(token))
            for token, logprob, rank in zip(*position, strict=True)
        }
        for position in zip(
            logprobs.token_ids.tolist(),
            logprobs.logprobs.tolist(),
            logprobs.ranks.tolist(),
            strict=True,
        )
    ]
