"""What a request takes from its caller: copies made at the call, which no later change reaches."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from mrv1.engine.tokenizer import ChatPrompt
from mrv1.multimodal import MultimodalItem
from mrv1.multimodal.reading import reading
from mrv1.sampler import SamplingParams

Given = TypeVar("Given")

EXPECTED = {
    "prompt": "text, token ids or a dict",
    "prompt_token_ids": "a list of integers",
    "multimodal": "a list of items",
    "attn_mask_offsets": "pairs [lo, hi)",
}
"""What is expected of the parts of a prompt, in the error of one that cannot be copied."""


def own_params(params: Given) -> Given:
    """Return a copy of sampling parameters; anything else as it is, for the check that follows."""
    return copy.copy(params) if isinstance(params, SamplingParams) else params


def own_prompt(prompt: object) -> Any:  # noqa: ANN401 - of any type, until it is checked
    """Return a copy of a prompt, its arrays and items too; RequestError: one has no copy."""
    if not isinstance(prompt, Mapping):
        return own_value("prompt", prompt)
    with reading("prompt", EXPECTED["prompt"]):
        return {key: own_value(key, prompt[key]) for key in prompt}


def own_value(argument: Any, given: object) -> Any:  # noqa: ANN401 - of any type, as above
    """Return a copy of one argument of a request, named for an error as in ``own_prompt``."""
    with reading(argument, EXPECTED.get(argument, "a value that can be read")):
        return _own(given)


def _own(given: Any) -> Any:  # noqa: ANN401 - of any type
    if isinstance(given, ChatPrompt):
        own = ChatPrompt(given)
        vars(own).update({name: _own(value) for name, value in vars(given).items()})
        return own
    if isinstance(given, str):
        return str.__str__(given)  # of a class that another process may not know
    if isinstance(given, MultimodalItem):
        return given.with_own_features()
    if isinstance(given, torch.Tensor):
        return given.detach().clone()
    if isinstance(given, np.ndarray):
        return given.copy()
    if isinstance(given, Mapping):
        return {key: _own(given[key]) for key in given}
    if isinstance(given, Sequence) and not isinstance(given, bytes):
        entries = list(given)
        if entries and type(entries[0]) is not int:  # else token ids: a long prompt is not read
            entries = [*map(_own, entries)]
        return tuple(entries) if isinstance(given, tuple) else entries
    return given
