"""Tasks of recall in plain words, for any instruction model: a question about a long text.

Facts lie in a filler of short sentences, and a question at the end asks for them. The answer's
beginning is part of the prompt, so that a small model has only the facts to add. Numbers, names,
places of the facts and the filler are drawn anew for each sample: the context is the only source.

Source: RULER (arXiv:2404.06654) for the tasks' definitions and the share of answers found as their
score; the words, the filler and the sizes are mrv1's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np

from mrv1.errors import ConfigError
from mrv1.headwise import RecallPrompt

NUM_DIGITS = 5  # of passkeys, of special numbers and of variables' values
NUM_KEYS = 4  # keys of ``multikey``, of which the question names one
NUM_VALUES = 4  # numbers of the one key of ``multivalue``
NUM_VARIABLES = 4  # of ``variables``: a number, and three that follow one another
COMMON_COUNT, RARE_COUNT = 12, 2  # mentions of the common and of each rare word, of ``common``

SUBJECTS = (
    "the baker", "a young sailor", "the old teacher", "my neighbor", "the gardener",
    "a tall clerk", "the doctor", "our cousin", "the tailor", "a quiet student", "the farmer",
    "a painter", "the postman", "the librarian", "a shy child", "the carpenter",
)  # fmt: skip
VERBS = (
    "carried", "found", "sold", "painted", "repaired", "borrowed", "washed", "described",
    "bought", "moved", "counted", "cleaned", "drew", "packed", "lost", "admired",
)  # fmt: skip
OBJECTS = (
    "a basket", "the lamp", "two chairs", "a wooden box", "the bicycle", "a blue coat", "the map",
    "some bread", "the ladder", "a clock", "the violin", "an umbrella", "the kettle", "a letter",
    "the blanket", "a mirror",
)  # fmt: skip
PLACES = (
    "near the river", "before lunch", "at the market", "in the evening", "behind the school",
    "on a rainy day", "at the station", "after the concert", "in the garden", "by the harbor",
    "last winter", "on the bridge", "in the kitchen", "during the holiday", "at noon",
    "under the old tree",
)  # fmt: skip
KEYS = (
    "apple", "river", "castle", "tiger", "guitar", "candle", "forest", "planet", "silver",
    "window", "dragon", "garden", "rocket", "pepper", "winter", "mountain", "piano", "button",
    "camera", "turtle", "ocean", "ladder", "pencil", "violet", "hammer", "island", "orange",
    "feather", "magnet", "rabbit", "saddle", "temple", "tunnel", "walnut", "zebra", "anchor",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSample:
    """A question about a long text.

    Attributes:
        task: name of the task, one of ``TASKS``.
        message: the user's message: the text, then the question.
        reply_start: beginning of the reply, which belongs to the prompt.
        reply: the rest of a right reply.
        answers: the words of the reply that count.
    """

    task: str
    message: str
    reply_start: str
    reply: str
    answers: tuple[str, ...]

    def score(self, reply: str) -> float:
        """Return the share of the answers that a reply contains as whole words."""
        found = set(re.findall(r"\w+", reply.lower()))
        return sum(answer.lower() in found for answer in self.answers) / len(self.answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A sample before its filler: facts in their order, and what surrounds the text."""

    facts: tuple[str, ...]
    intro: str
    question: str
    reply_start: str
    answers: tuple[str, ...]
    joint: str = ", "  # between two answers of the reply


def _numbers(rng: np.random.Generator, count: int) -> list[str]:
    """Draw different numbers without a leading zero."""
    least = 10 ** (NUM_DIGITS - 1)
    return [str(least + each) for each in rng.choice(9 * least, count, replace=False).tolist()]


def _keys(rng: np.random.Generator, count: int) -> list[str]:
    """Draw different words."""
    return [KEYS[each] for each in rng.choice(len(KEYS), count, replace=False).tolist()]


def _passkey(rng: np.random.Generator) -> _Parts:
    """One number in the text."""
    (number,) = _numbers(rng, 1)
    return _Parts(
        facts=(f"The pass key is {number}. Remember it. {number} is the pass key.",),
        intro="There is a pass key hidden in the following text. Find it and remember it.",
        question="What is the pass key in the text?",
        reply_start="The pass key is",
        answers=(number,),
    )


def _multikey(rng: np.random.Generator) -> _Parts:
    """A number for each of several keys; one is asked for."""
    keys, numbers = _keys(rng, NUM_KEYS), _numbers(rng, NUM_KEYS)
    asked = int(rng.integers(NUM_KEYS))
    return _Parts(
        facts=tuple(
            f"The special number for {key} is {number}."
            for key, number in zip(keys, numbers, strict=True)
        ),
        intro="Some special numbers are hidden in the following text. Remember them.",
        question=f"What is the special number for {keys[asked]} in the text?",
        reply_start=f"The special number for {keys[asked]} is",
        answers=(numbers[asked],),
    )


def _multivalue(rng: np.random.Generator) -> _Parts:
    """Several numbers for one key; all are asked for."""
    (key,), numbers = _keys(rng, 1), _numbers(rng, NUM_VALUES)
    return _Parts(
        facts=tuple(f"One special number for {key} is {number}." for number in numbers),
        intro="Some special numbers are hidden in the following text. Remember all of them.",
        question=f"What are the {NUM_VALUES} special numbers for {key} in the text?",
        reply_start=f"The {NUM_VALUES} special numbers for {key} are:\n\n1.",
        answers=tuple(numbers),
        joint="\n{place}. ",
    )


def _variables(rng: np.random.Generator) -> _Parts:
    """Variables of which each has the value of the one before it; all names are asked for."""
    names, (number,) = _keys(rng, NUM_VARIABLES), _numbers(rng, 1)
    return _Parts(
        facts=(
            f"VAR {names[0]} = {number}.",
            *(f"VAR {name} = VAR {before}." for before, name in pairwise(names)),
        ),
        intro="Variables get their values in the following text. Remember them.",
        question=f"Find all {NUM_VARIABLES} variables with the value {number} in the text.",
        reply_start=f"The {NUM_VARIABLES} variables with the value {number} are: VAR",
        answers=tuple(names),
        joint=", VAR ",
    )


def _common(rng: np.random.Generator) -> _Parts:
    """Lines with words of which one is far more common than the others."""
    common, *rare = _keys(rng, 9)
    words = [common] * COMMON_COUNT + rare * RARE_COUNT
    return _Parts(
        facts=tuple(f"The word is {word}." for word in rng.permutation(words).tolist()),
        intro="Words are hidden in the following text. Remember the most common word.",
        question="Which word is the most common one in the text?",
        reply_start="The word is",
        answers=(common,),
    )


TASKS: dict[str, Callable[[np.random.Generator], _Parts]] = {
    "passkey": _passkey,
    "multikey": _multikey,
    "multivalue": _multivalue,
    "variables": _variables,
    "common": _common,
}


def task_sample(
    task: str,
    rng: np.random.Generator,
    num_tokens: int,
    count_tokens: Callable[[str, str], int],
) -> TaskSample:
    """Draw a sample of ``num_tokens`` or, by a few sentences at most, fewer.

    Args:
        task: one of ``TASKS``.
        rng: source of every draw; equal generators give equal samples.
        num_tokens: most tokens of the prompt and the right reply.
        count_tokens: returns the tokens of a conversation of this message and reply.

    Raises:
        ConfigError: there is no such task, or the facts alone need more tokens.
    """
    if task not in TASKS:
        raise ConfigError(f"task: expected one of {list(TASKS)}, got {task!r}")
    parts = TASKS[task](rng)
    reply = " " + "".join(
        parts.joint.format(place=place) * (place > 1) + answer
        for place, answer in enumerate(parts.answers, start=1)
    )
    draws = rng.integers([16, 16, 16, 16], size=(num_tokens, 4))  # a sentence has more tokens
    filler = [_sentence(*draw) for draw in draws.tolist()]
    places = np.sort(rng.random(len(parts.facts)))  # of the facts, in shares of the filler

    def message(num_sentences: int) -> str:
        at = (places * (num_sentences + 1)).astype(int).tolist()
        lines = filler[:num_sentences]
        for place, fact in reversed(list(zip(at, parts.facts, strict=True))):
            lines.insert(place, fact)
        return f"{parts.intro}\n\n{' '.join(lines)}\n\n{parts.question}"

    def count(num_sentences: int) -> int:
        return count_tokens(message(num_sentences), parts.reply_start + reply)

    least, probe = count(0), len(filler) // 64 + 1
    if least > num_tokens:
        raise ConfigError(f"num_tokens: expected at least {least} for {task!r}, got {num_tokens}")
    each = max((count(probe) - least) / probe, 1.0)  # tokens of a sentence
    num_sentences = int((num_tokens - least) / each)
    while num_sentences and (excess := count(num_sentences) - num_tokens) > 0:
        num_sentences -= min(math.ceil(excess / each), num_sentences)
    return TaskSample(
        task=task,
        message=message(num_sentences),
        reply_start=parts.reply_start,
        reply=reply,
        answers=parts.answers,
    )


@dataclass(frozen=True, slots=True)
class TaskPrompts:
    """Samples in the tokens of one tokenizer, as its chat template writes a conversation.

    Without a template the message is a paragraph in front of the reply.
    """

    tokenizer: Any  # of transformers

    def ids(self, message: str, reply: str) -> list[int]:
        """Return the tokens of a user's message and of a reply, which may go on."""
        text, has_template = f"{message}\n\n", bool(self.tokenizer.chat_template)
        if has_template:
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
            )
        ids: list[int] = self.tokenizer.encode(
            text + reply, add_special_tokens=not has_template, verbose=False
        )
        return ids

    def sample(self, task: str, rng: np.random.Generator, num_tokens: int) -> TaskSample:
        """Draw a sample of at most ``num_tokens``, reply included; see ``task_sample``."""
        return task_sample(
            task, rng, num_tokens, lambda message, reply: len(self.ids(message, reply))
        )

    def prompt(self, sample: TaskSample) -> list[int]:
        """Return the tokens that ask for the rest of a sample's reply."""
        return self.ids(sample.message, sample.reply_start)

    def context_length(self, sample: TaskSample) -> int:
        """Return the number of leading tokens of the prompt that are the same for any question."""
        prompt = self.prompt(sample)
        other = self.ids(sample.message.rpartition("\n\n")[0] + "\n\n", "")
        return _num_equal(prompt, other)

    def answer_spans(self, sample: TaskSample) -> list[range]:
        """Return where the tokens of each answer are in the prompt and the right reply."""
        spans, end = [], 0
        for answer in sample.answers:
            at = sample.reply.index(answer, end)
            end = at + len(answer)
            before, upto = (sample.reply_start + sample.reply[:place] for place in (at, end))
            spans.append(
                range(
                    len(self.ids(sample.message, before.rstrip())),
                    len(self.ids(sample.message, upto)),
                )
            )
        return spans

    def recall_prompt(self, sample: TaskSample, num_tokens: int) -> RecallPrompt:
        """Return a sample of at most ``num_tokens`` whose answers are the tokens of its reply.

        Its last token is repeated up to ``num_tokens``, where no answer sees it.
        """
        whole = self.ids(sample.message, sample.reply_start + sample.reply)
        asked = _num_equal(self.prompt(sample), whole)
        tokens = np.array(whole + whole[-1:] * (num_tokens - len(whole)), dtype=np.int64)
        return RecallPrompt(
            tokens=tokens,
            answers=np.arange(asked, len(whole)),
            is_filler=np.zeros(num_tokens, dtype=np.bool_),
        )

    def recall_prompts(
        self, rng: np.random.Generator, num_prompts: int, num_tokens: int
    ) -> list[RecallPrompt]:
        """Draw prompts of all tasks in turn; ConfigError: fewer than there are tasks, or short."""
        if num_prompts < len(TASKS):
            raise ConfigError(
                f"num_prompts: expected at least {len(TASKS)}, one for each task, got "
                f"{num_prompts}"
            )
        tasks = islice(cycle(TASKS), num_prompts)
        return [
            self.recall_prompt(self.sample(task, rng, num_tokens), num_tokens) for task in tasks
        ]


def _sentence(subject: int, verb: int, thing: int, place: int) -> str:
    """Return a sentence of the filler."""
    text = f"{SUBJECTS[subject]} {VERBS[verb]} {OBJECTS[thing]} {PLACES[place]}."
    return text[0].upper() + text[1:]


def _num_equal(one: list[int], other: list[int]) -> int:
    """Return the number of leading tokens in which two lists are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))
