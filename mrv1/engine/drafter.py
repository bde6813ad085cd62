"""The drafts of one request, from its own tokens: what followed where its last tokens stood."""

from __future__ import annotations

from collections.abc import Sequence

from mrv1.config import SpeculativeConfig

MIN_GAIN = 0.5
"""Least accepted drafts per row that a step with drafts has to promise. The next step cannot be
launched before its result is read, which costs up to about half of a decode step's time."""
START_GAIN = 2.0  # accepted drafts per step that a new request promises
GAIN_AFTER_REST = 1.0  # accepted drafts per step that a request promises after a rest
FIRST_REST = 32
"""Tokens that a request generates without drafts after too few were accepted; every further rest
is twice as long, until drafts are accepted again."""


class NgramIndex:
    """Where each sequence of ``shortest`` to ``longest`` tokens came last, in a growing list.

    Adding a token and looking up the last ones take the same time at any length.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.token_ids: list[int] = []
        self._longest = longest
        self._ends: dict[int, dict[tuple[int, ...], int]] = {
            length: {} for length in range(longest, shortest - 1, -1)
        }
        """Length -> sequence -> place after its last occurrence that another token follows."""
        self._newest: tuple[int, ...] = ()  # the last ``longest`` tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens; a sequence is entered once the token after it is known."""
        tokens = self.token_ids
        start = len(tokens)
        tokens += token_ids
        if len(token_ids) == 1:  # a decode step: the case that must be fast
            newest = self._newest
            for length, ends in self._ends.items():
                if length <= start:
                    ends[newest[-length:]] = start
        else:
            for length, ends in self._ends.items():
                first = max(start, length)
                shifted = [tokens[first - length + offset : -1] for offset in range(length)]
                ends.update(
                    zip(zip(*shifted, strict=False), range(first, len(tokens)), strict=True)
                )
        self._newest = tuple(tokens[-self._longest :])

    def continuation(self, count: int) -> tuple[int, ...]:
        """Return ``count`` tokens that may follow; () if the last tokens never came before.

        The longest known sequence decides. Where the tokens after it end, they start again.
        """
        newest = self._newest
        for length, ends in self._ends.items():
            end = ends.get(newest[-length:])
            if end is not None:
                tokens = self.token_ids
                period = len(tokens) - end
                return tuple([tokens[end + index % period] for index in range(count)])
        return ()


class Drafter:
    """Proposes the drafts of one request, and rests while too few of them are accepted."""

    def __init__(self, config: SpeculativeConfig, prompt: Sequence[int]) -> None:
        self.gain = min(START_GAIN, config.num_tokens)  # mean accepted drafts per step
        self._index = NgramIndex(*config.lookup_lengths)
        self._index.extend(prompt)
        self._num_known = 0  # tokens of the output that the index has
        self._rest = FIRST_REST
        self._rests_until = 0  # tokens of the output from which on the request has drafts again

    def propose(self, output: Sequence[int], count: int) -> tuple[int, ...]:
        """Return ``count`` drafts after an output, which has only grown, or none."""
        if len(output) < self._rests_until:
            return ()
        if self._num_known < len(output):
            self._index.extend(output[self._num_known :])
            self._num_known = len(output)
        return self._index.continuation(count)

    def note(self, num_accepted: int, num_output_tokens: int) -> None:
        """Take in how many drafts were accepted, and the length of the output since then."""
        self.gain += (num_accepted - self.gain) / 4
        if self.gain >= GAIN_AFTER_REST:
            self._rest = FIRST_REST
        elif self.gain < MIN_GAIN:
            self.gain = GAIN_AFTER_REST
            self._rests_until = num_output_tokens + self._rest
            self._rest *= 2
