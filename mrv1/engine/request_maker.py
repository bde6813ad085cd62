"""Makes the engine's requests from token ids, and checks all that their caller gives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import SupportsInt, TypedDict, TypeGuard

import numpy as np
import numpy.typing as npt

from mrv1.config import EngineConfig
from mrv1.engine.adapters import Adapters
from mrv1.engine.intake import own_value
from mrv1.engine.prefix_cache import key_spans
from mrv1.engine.request import Request
from mrv1.engine.request_limits import check_order, check_params
from mrv1.errors import RequestError, short
from mrv1.multimodal import (
    MultimodalItem,
    as_items,
    check_bidirectional,
    check_placeholders,
    in_order,
    visible_ranges,
    whole_spans,
)
from mrv1.multimodal.mrope import mrope_positions
from mrv1.multimodal.reading import reading
from mrv1.runner import ModelRunner
from mrv1.runner.step import Int32Array
from mrv1.sampler import SamplingParams
from mrv1.sampler.bad_words import banned_token_sequences


class RequestOptions(TypedDict, total=False):
    """What a request may have beside its prompt and its sampling parameters."""

    encode: Callable[[str], Sequence[int]] | None
    """Returns the tokens of an entry of ``params.bad_words``, without special tokens."""
    multimodal: Sequence[MultimodalItem] | None
    """Items whose features replace the embeddings of prompt tokens, in any order; None or [] =
    plain text. Features are copied where they are; on a GPU, those on the CPU move to pinned
    memory, and features on the GPU without a ``cache_key`` are read, which waits for the GPU."""
    attn_mask_offsets: object
    """``[prompt tokens, 2]`` integers: the range ``[lo, hi)`` of positions that each prompt token
    sees; tokens that see later ones are computed in one step with them. None = each token sees all
    positions up to its own."""
    priority: int
    """With ``scheduling_policy="priority"``, requests with a lower value first."""
    fairness_id: str
    """Under that policy, the key of the caller with which requests take turns."""
    lora_request: object
    """The request's LoRA adapter, a ``LoRARequest``; None = the model alone."""


def derive_seed(engine_seed: int, admission: int) -> int:
    """Return the 64-bit seed of the ``admission``-th request, which brought no seed of its own."""
    digest = hashlib.blake2b(f"{engine_seed}/{admission}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class RequestMaker:
    """Makes requests; changes nothing, so that any thread may call it."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, adapters: Adapters) -> None:
        self._config = config
        self._runner = runner
        self._model = runner.model_config
        self._adapters = adapters

    def make(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        multimodal: Sequence[MultimodalItem] | None = None,
        attn_mask_offsets: object = None,
        priority: int = 0,
        fairness_id: str = "",
        lora_request: object = None,
    ) -> Request:
        """Return a request for ``EngineCore.queue``; for arguments see ``RequestOptions``.

        The caller must not change them afterwards (``own_params``, ``own_prompt``).

        RequestError: the prompt is empty, too long or outside the vocabulary, a parameter is over
        a limit, an item does not fit the model or the prompt, the adapter cannot be read, or the
        id or a range is wrong or not supported.
        """
        name = own_value("request_id", req_id)
        if not isinstance(name, str) or not name:
            raise RequestError(
                f"request_id: expected a string that is not empty, got {short(name)}"
            )
        given: object = params
        if not isinstance(given, SamplingParams):
            raise RequestError(f"params: expected SamplingParams, got {type(given).__name__}")
        prompt, prompt_array = self._checked_prompt(prompt_token_ids)
        check_order(priority, fairness_id, self._config)
        check_params(params, self._config, self._model.vocab_size)
        banned = self._banned_token_sequences(params, encode)
        items = () if multimodal is None else self._prepared(multimodal, prompt)
        longest = self._longest(items, len(prompt))
        if len(prompt) + params.min_tokens > longest:
            raise RequestError(
                f"min_tokens: expected at most {longest - len(prompt)} after a prompt of "
                f"{len(prompt)} tokens (max_model_len), got {short(params.min_tokens)}"
            )
        ranges = None
        if items or attn_mask_offsets is not None:
            ranges = visible_ranges(items, attn_mask_offsets, len(prompt))
        if ranges is not None:
            self._check_takes_ranges()
        adapter = None if lora_request is None else self._adapters.prepared(lora_request)
        request = Request(
            req_id=name,
            prompt_token_ids=prompt,
            prompt_array=prompt_array,
            multimodal=items,
            attn_mask_offsets=ranges,
            unsplittable=() if ranges is None else whole_spans(ranges),
            key_spans=key_spans(items, ranges, prompt),
            params=params,
            seed=0 if params.seed is None else params.seed,  # ``queue`` derives one for None
            max_total_tokens=longest
            if params.max_tokens is None
            else min(longest, len(prompt) + params.max_tokens),
            banned_token_sequences=banned,
            adapter=adapter,
            cache_key=b"" if adapter is None else adapter.key,
            priority=int(priority),
            fairness_id=str.__str__(fairness_id),
        )
        request.add_followers()
        return request

    def _checked_prompt(self, prompt_token_ids: object) -> tuple[tuple[int, ...], Int32Array]:
        """Return the tokens, and the same tokens as an array."""
        if not isinstance(prompt_token_ids, Iterable):
            raise RequestError(f"prompt_token_ids: expected a list, got {short(prompt_token_ids)}")
        with reading("prompt_token_ids", "a list of integers"):
            prompt = tuple(prompt_token_ids)
        if not prompt:
            raise RequestError("prompt: expected at least one token, got none")
        array = _as_array(prompt)
        if array is None:
            with reading("prompt_token_ids", "a list of integers"):
                prompt = tuple([int(t) if _is_int(t) else t for t in prompt])
            array = _as_array(prompt)
        vocab_size = self._model.vocab_size
        if array is None or array.min() < 0 or array.max() >= vocab_size:
            index, token = next(
                (index, token)
                for index, token in enumerate(prompt)
                if type(token) is not int or not 0 <= token < vocab_size
            )
            raise RequestError(
                f"prompt_token_ids: expected integers in [0, {vocab_size}), got "
                f"{short(token)} at index {index}"
            )
        longest = self._runner.max_model_len
        if len(prompt) >= longest:
            raise RequestError(
                f"prompt: expected fewer than {longest} tokens (max_model_len, with one left to "
                f"generate), got {len(prompt)}"
            )
        return prompt, array.astype(np.int32)

    def _prepared(
        self, multimodal: Sequence[MultimodalItem], prompt: tuple[int, ...]
    ) -> tuple[MultimodalItem, ...]:
        """Return the items in the order of the prompt, ready to be staged."""
        items = in_order(as_items(multimodal), len(prompt))
        if items and not self._runner.num_feature_rows:
            raise RequestError(
                f"multimodal: expected no items, because mm_cache_memory_bytes has room for none, "
                f"got {len(items)}"
            )
        vision, wrapper = self._model.vision, self._model.wrapper
        if wrapper is not None and wrapper.has_bidirectional_images:
            check_bidirectional(items)
        if items and vision is not None:
            ids = {"image": vision.image_token_id, "video": vision.video_token_id}
            check_placeholders(items, prompt, ids)
        return tuple([self._runner.prepared(item) for item in items])

    def _check_takes_ranges(self) -> None:
        """Raise unless tokens may see other keys than all up to their own."""
        for option, value in (("attention_backend", "flashinfer"), ("deterministic", True)):
            if getattr(self._config, option) == value:
                raise RequestError(
                    "bidirectional or attn_mask_offsets: expected neither with "
                    f"{option}={value!r}, whose kernels are causal, got one"
                )

    def _longest(self, items: tuple[MultimodalItem, ...], num_prompt_tokens: int) -> int:
        """Return the most tokens that a request may have; RequestError: M-RoPE cannot place it.

        M-RoPE's positions must be less than the model's context, as other models' are; those of an
        output after a slow video may be more than its number of tokens.
        """
        model = self._model
        if not items or model.vision is None:
            return self._runner.max_model_len
        if len(items) > self._config.max_mm_items:
            raise RequestError(
                f"multimodal: expected at most {self._config.max_mm_items} items (max_mm_items), "
                f"got {len(items)}; raise max_mm_items"
            )
        positions = mrope_positions(items, num_prompt_tokens, model.vision)
        longest = model.max_model_len - positions.delta
        if longest <= num_prompt_tokens:
            raise RequestError(
                f"multimodal: expected positions below {model.max_model_len - 1}, with one left "
                f"to generate, got {positions.num_positions - 1}; give fewer seconds of video"
            )
        return min(self._runner.max_model_len, longest)

    def _banned_token_sequences(
        self, params: SamplingParams, encode: Callable[[str], Sequence[int]] | None
    ) -> tuple[tuple[int, ...], ...]:
        if not params.bans_words:
            return ()
        banned = banned_token_sequences(
            params,
            encode,
            max_words=self._config.max_bad_words_num,
            max_len=self._config.bad_words_max_len,
        )
        vocab_size = self._model.vocab_size
        outside = [list(sequence) for sequence in banned if max(sequence) >= vocab_size]
        if outside:
            raise RequestError(f"bad_words: expected ids in [0, {vocab_size}), got {outside}")
        return banned


def _is_int(token: object) -> TypeGuard[SupportsInt]:
    """Whether a token is an integer of any class, such as numpy's or an enumeration of them."""
    return isinstance(token, Integral) and not isinstance(token, bool)


def _as_array(token_ids: tuple[object, ...]) -> npt.NDArray[np.int64] | None:
    """Return token ids as an array; None if one is not an ``int``, or of more than 64 bits."""
    if {*map(type, token_ids)} != {int}:  # bool is not int
        return None
    try:
        return np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
    except OverflowError:
        return None
