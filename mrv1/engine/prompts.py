"""The prompts of callers, and the requests that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from mrv1.engine.core import EngineCore
from mrv1.engine.intake import own_params, own_prompt
from mrv1.engine.outputs import CompletionOutput, RequestOutput
from mrv1.engine.request_group import RequestGroup
from mrv1.engine.tokenizer import ChatPrompt, Tokenizer
from mrv1.errors import RequestError
from mrv1.from_vllm import PROMPT, translated
from mrv1.multimodal.reading import reading
from mrv1.sampler import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, object]
"""A text, a list of token ids, or a dict with ``prompt`` or ``prompt_token_ids``, and optionally
``multimodal`` (a list of ``MultimodalItem``) and ``attn_mask_offsets``."""

PROMPT_KEYS = ("prompt", "prompt_token_ids")
MULTIMODAL_KEYS = ("multimodal", "attn_mask_offsets")  # as for EngineCore.add_request


class TextPrompt(TypedDict):
    """A prompt as text, under vLLM's name; any dict with this key is one."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, under vLLM's name; any dict with this key is one."""

    prompt_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Submission:
    """What a caller gives with a request: copies of prompt and parameters.

    RequestError: a part cannot be copied.
    """

    prompt: Prompt
    params: object
    priority: int = 0
    fairness_id: str = ""
    lora_request: object = None

    def __post_init__(self) -> None:
        """Copy what a caller may change later."""
        object.__setattr__(self, "prompt", own_prompt(self.prompt))
        object.__setattr__(self, "params", own_params(self.params))


def make_group(
    engine: EngineCore, tokenizer: Tokenizer, given: Submission, req_id: str, *, is_awaited: bool
) -> RequestGroup:
    """Return the request of a submission; changes nothing, so that any thread may call it."""
    prompt, params = given.prompt, given.params
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"sampling_params: expected SamplingParams, got {type(params).__name__}"
        )
    if params.stop and not tokenizer.is_loaded:
        raise RequestError("stop: expected none, because the checkpoint has no tokenizer")
    with reading("prompt", "text, token ids or a dict"):
        token_ids, more = _token_ids(prompt, tokenizer), _multimodal_of(prompt)
    request = engine.maker.make(
        req_id,
        token_ids,
        _with_grammar(params, engine, tokenizer),
        encode=tokenizer.encode_word if tokenizer.is_loaded else None,
        priority=given.priority,
        fairness_id=given.fairness_id,
        lora_request=given.lora_request,
        **more,
    )
    return RequestGroup(request, tokenizer, prompt=_text_of(prompt), is_awaited=is_awaited)


def _with_grammar(
    params: SamplingParams, engine: EngineCore, tokenizer: Tokenizer
) -> SamplingParams:
    """Return the parameters with their ``structured_outputs`` compiled, if they have any."""
    source = params.structured_outputs
    if source is None:
        return params
    if not tokenizer.is_loaded:
        raise RequestError(
            "structured_outputs: expected None, because the checkpoint has no tokenizer"
        )
    try:
        grammar = source.compiled(
            tokenizer.library,
            engine.runner.model_config.vocab_size,
            list(engine.eos_token_ids) or None,
        )
    except RequestError:
        raise
    except Exception as error:  # of any type, from the caller's class: only this request fails
        raise RequestError.caused_by(error, "structured_outputs") from error
    return replace(params, structured_outputs=None, structured_output=grammar)


def _token_ids(prompt: object, tokenizer: Tokenizer) -> Sequence[int]:
    if isinstance(prompt, Mapping):
        prompt = translated(prompt, PROMPT, "a key of a prompt", RequestError)
        keys = [key for key in prompt if key not in MULTIMODAL_KEYS]
        if len(keys) != 1 or keys[0] not in PROMPT_KEYS:
            raise RequestError(
                f"prompt: expected a dict with one of {PROMPT_KEYS}, and maybe "
                f"{' or '.join(MULTIMODAL_KEYS)}, got keys {list(prompt)}"
            )
        (key,) = keys
        prompt = prompt[key]
        if isinstance(prompt, str) != (key == "prompt"):
            expected = "text" if key == "prompt" else "a list of token ids"
            raise RequestError(f"{key}: expected {expected}, got {type(prompt).__name__}")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return prompt
    raise RequestError(
        f"prompt: expected a string, a list of token ids or a dict, got {type(prompt).__name__}"
    )


def is_prompt(prompts: Prompt | Sequence[Prompt] | None) -> bool:
    """Return whether this is one prompt: text, dict, or a list that starts with a number."""
    if isinstance(prompts, str | Mapping):
        return True
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts: expected a prompt or a list of prompts, got {type(prompts).__name__}"
        )
    with reading("prompts", "a prompt or a list of prompts"):
        return len(prompts) > 0 and not isinstance(prompts[0], str | Mapping | Sequence)


def params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None,
    num_prompts: int,
    default: SamplingParams,
) -> list[SamplingParams]:
    """Return a request's own parameters for each prompt."""
    given: object = default if params is None else params
    if isinstance(given, str) or not isinstance(given, SamplingParams | Sequence):
        raise RequestError(
            f"sampling_params: expected SamplingParams or a list, got {type(given).__name__}"
        )
    return [*map(own_params, per_prompt("sampling_params", given, num_prompts))]


def per_prompt(name: str, value: object, num_prompts: int) -> Sequence[Any]:
    """Return a value for each prompt, from one for all or a list; the engine checks the values."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise RequestError(
            f"{name}: expected one, or {num_prompts} for {num_prompts} prompts, got {len(value)}"
        )
    return list(value)


def with_items(prompt: str, multimodal: Sequence[Any] | None) -> Prompt:
    """Return a prompt with its items, if it has any."""
    return prompt if multimodal is None else {"prompt": prompt, "multimodal": multimodal}


def _multimodal_of(prompt: object) -> dict[str, Any]:
    """Return the values of ``MULTIMODAL_KEYS`` that a prompt has, and the images of a chat."""
    given = {}
    if isinstance(prompt, Mapping):
        given = {key: prompt[key] for key in MULTIMODAL_KEYS if key in prompt}
    text = _text_of(prompt)
    if isinstance(text, ChatPrompt) and text.items:
        if given.get("multimodal"):
            raise RequestError("multimodal: expected none with images in messages, got both")
        given["multimodal"] = text.items
    return given


def _text_of(prompt: object) -> str | None:
    """Return the text of a prompt; None if it is not text."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def refused(req_id: str, prompt: object, error: RequestError) -> RequestOutput:
    """Return the output of a request that was refused."""
    return RequestOutput(
        request_id=req_id,
        prompt=_text_of(prompt),
        outputs=(CompletionOutput(index=0, finish_reason="error", error=error),),
        finished=True,
        error=error,
    )
