"""A request keeps the values that it was added with, through every door."""

from __future__ import annotations

import asyncio
import copy
import enum
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mrv1 import LLM, AsyncLLM, RequestError, SamplingParams
from mrv1.engine.intake import own_prompt
from mrv1.engine.tokenizer import ChatPrompt
from mrv1.integrations.llguidance import StructuredOutputsParams
from mrv1.multimodal import MultimodalItem, causal_ranges
from tests.multimodal.oracle import features

PROMPT = [20, 21, 22, *[9] * 5, 30]
GREEDY = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    options = {"max_num_seqs": 3, "num_kv_blocks": 64, "max_model_len": 256}
    llm = AsyncLLM("tiny", device="cpu", **options)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = {"max_num_seqs": 3, "num_kv_blocks": 64, "max_model_len": 256}
    with LLM("tiny", device="cpu", scheduling_policy="priority", **options) as llm:
        yield llm


class Tag(str):
    """A text of a class of the caller's."""

    __slots__ = ()

    def __str__(self) -> str:
        return "another text"


class Name(enum.Enum):
    """Not a text at all, unlike ``Mixed``."""

    A = "a"


class Mixed(str, enum.Enum):  # noqa: UP042 - StrEnum's ``str()`` is the text
    """A text whose ``str()`` is another text."""

    A = "ROMEO:"


class Number(enum.IntEnum):
    A = 21


# --- the doors -----------------------------------------------------------------------------------

Tokens = tuple[int, ...]
Change = Callable[[], None]


def by_add_request(_: AsyncLLM, llm: LLM, prompt: Any, params: Any, change: Change) -> Tokens:
    req_id = llm.add_request(prompt, params)
    change()
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {each.request_id: each for each in llm.step()}
    return outputs[req_id].outputs[0].token_ids


def by_stream(_: AsyncLLM, llm: LLM, prompt: Any, params: Any, change: Change) -> Tokens:
    outputs = llm.stream(prompt, params)
    change()
    (*_, last) = outputs
    return last.outputs[0].token_ids


def by_generate(_: AsyncLLM, llm: LLM, prompt: Any, params: Any, change: Change) -> Tokens:
    """Another thread has its turn meanwhile."""
    found: list[Tokens] = []

    def generate() -> None:
        found.append(llm.generate([prompt], [params])[0].outputs[0].token_ids)

    with llm.shared.turns._lock:
        thread = threading.Thread(target=generate)
        thread.start()
        while not llm.shared.turns._waiting:
            pass
        change()
    thread.join()
    return found[0]


def by_async_generate(
    engine: AsyncLLM, _: LLM, prompt: Any, params: Any, change: Change
) -> Tokens:
    async def main() -> Tokens:
        outputs = engine.generate(prompt, params)
        change()
        async for output in outputs:
            last = output
        return last.outputs[0].token_ids

    return asyncio.run(main())


def by_engine_core(_: AsyncLLM, llm: LLM, prompt: Any, params: Any, change: Change) -> Tokens:
    core = llm.engine
    assert core is not None
    more = {}
    if isinstance(prompt, dict):
        more = {key: value for key, value in prompt.items() if key != "prompt_token_ids"}
        prompt = prompt["prompt_token_ids"]
    request = core.add_request("a", prompt, params, **more)
    change()
    while core.has_unfinished_requests:
        core.step()
    assert request.error is None
    return tuple(request.output_token_ids)


DOORS = [by_add_request, by_stream, by_generate, by_async_generate, by_engine_core]


def of_token_ids() -> tuple[Any, Change]:
    prompt = list(PROMPT)
    return prompt, lambda: prompt.insert(0, 7)


def of_dict() -> tuple[Any, Change]:
    prompt = {"prompt_token_ids": list(PROMPT)}
    return prompt, lambda: prompt["prompt_token_ids"].append(7)


def of_ranges() -> tuple[Any, Change]:
    ranges = causal_ranges(0, len(PROMPT))
    ranges[3:8, 1] = 8
    prompt = {"prompt_token_ids": PROMPT, "attn_mask_offsets": ranges}
    return prompt, lambda: ranges.fill(0)


def of_pairs() -> tuple[Any, Change]:
    pairs = of_ranges()[0]["attn_mask_offsets"].tolist()
    prompt = {"prompt_token_ids": PROMPT, "attn_mask_offsets": pairs}
    return prompt, lambda: pairs[0].clear()


def of_item(item: Any) -> dict[str, Any]:
    return {"prompt_token_ids": PROMPT, "multimodal": [item]}


def of_parts() -> tuple[Any, Change]:
    first, second = features(0, 2).numpy(), features(1, 3)
    prompt = of_item({"features": [first, second], "start": 3})
    return prompt, lambda: (first.fill(1), second.zero_())


def of_fields() -> tuple[Any, Change]:
    item = {"features": features(1, 5), "start": 3}
    return of_item(item), item.clear


def of_items() -> tuple[Any, Change]:
    prompt = of_item({"features": features(2, 5), "start": 3})
    return prompt, prompt["multimodal"].clear


def of_tensor() -> tuple[Any, Change]:
    rows = features(3, 5)
    return of_item(MultimodalItem(features=rows, start=3)), lambda: rows.fill_(-1)


def of_array() -> tuple[Any, Change]:
    rows = features(4, 5).numpy()
    return of_item(MultimodalItem(features=rows, start=3)), lambda: rows.fill(-1)


CHANGES = [
    of_token_ids, of_dict, of_ranges, of_pairs, of_parts, of_fields, of_items, of_tensor, of_array,
]  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_no_later_change_reaches_a_request(engine: AsyncLLM, llm: LLM, door: Any):
    """Each change would give other tokens, or an error."""
    for made in CHANGES:
        params = SamplingParams(**GREEDY, logit_bias={5: 0.5})
        expected = llm.generate(made()[0], params)[0].outputs[0].token_ids
        prompt, change = made()
        assert door(engine, llm, prompt, params, change) == expected, made
    params = SamplingParams(**GREEDY, logit_bias={5: 0.5})

    def change_params() -> None:
        params.logit_bias[7] = 100.0
        params.logit_bias[10**6] = 1.0
        params.max_tokens = 1

    expected = llm.generate(PROMPT, params)[0].outputs[0].token_ids
    assert door(engine, llm, PROMPT, params, change_params) == expected


def test_an_item_that_has_changed_between_two_requests_has_other_keys_and_values(llm: LLM):
    """With the digest of the first request, the second would find its keys and values cached."""
    rows, prompt = features(0, 40), [*[9] * 40, 30]
    item = MultimodalItem(features=rows, start=0)
    params = SamplingParams(**GREEDY)

    def tokens() -> Tokens:
        given = {"prompt_token_ids": prompt, "multimodal": [item]}
        return llm.generate(given, params)[0].outputs[0].token_ids

    first = tokens()
    rows.copy_(features(5, 40))
    second = tokens()
    fresh = MultimodalItem(features=features(5, 40), start=0, cache_key="another")
    given = {"prompt_token_ids": prompt, "multimodal": [fresh]}
    assert second == llm.generate(given, params)[0].outputs[0].token_ids != first


def test_a_bias_changed_in_place_is_checked_again(llm: LLM):
    for wrong in ({-1: 0.5}, {3: 1e9}, {3: float("nan")}, {"3": 1.0}, {3: "1"}):
        params = SamplingParams(**GREEDY)
        params.logit_bias.update(wrong)
        good, bad = llm.generate(["ROMEO:"] * 2, [SamplingParams(**GREEDY), params])
        assert good.error is None
        with pytest.raises(RequestError, match="logit_bias: expected a dict of token ids"):
            raise bad.error
    params = SamplingParams(**GREEDY)
    params.logit_bias[np.int64(3)] = np.float32(0.5)
    (request,) = [llm.engine.maker.make("a", PROMPT, copy.copy(params))]
    assert {*map(type, next(iter(request.params.logit_bias.items())))} == {int, float}


@pytest.mark.parametrize(
    "copied",
    [SamplingParams.clone, copy.copy, copy.deepcopy, replace],
    ids=["clone", "copy", "deepcopy", "replace"],
)
def test_a_copy_of_parameters_has_lists_and_a_dict_of_its_own(copied):
    stop, words, tokens = ["x"], ["y"], [3, 4]
    params = SamplingParams(
        stop=stop, bad_words=words, stop_token_ids=tokens, allowed_token_ids=tokens,
        stop_token_sequences=[tokens], bad_words_token_ids=[tokens], logprob_token_ids=tokens,
        logit_bias={5: 0.5},
    )  # fmt: skip
    other, before = copied(params), params.clone()
    for each in (stop, words, tokens):
        each.append("z")
    assert params == before == other
    other.logit_bias[7] = 1.0
    params.logit_bias[9] = 1.0
    assert (other.logit_bias, before.logit_bias) == ({5: 0.5, 7: 1.0}, {5: 0.5})


def test_a_schema_is_kept_as_it_was_given():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = StructuredOutputsParams(json=schema)
    text = json.dumps(schema)
    schema["properties"]["a"]["type"] = "string"
    assert form == StructuredOutputsParams(json=text) != StructuredOutputsParams(json=schema)
    assert SamplingParams(structured_outputs=form).clone().structured_outputs is form
    for wrong in ({"enum": {1}}, {"const": float("nan")}):
        with pytest.raises(
            RequestError, match=r"structured_outputs\.json: expected a JSON schema, "
        ):
            StructuredOutputsParams(json=wrong)


# --- classes of the caller's ---------------------------------------------------------------------


def test_parameters_keep_plain_values():
    params = SamplingParams(
        stop=[Tag("x"), Mixed.A], bad_words=(Tag("y"),), stop_token_ids=[Number.A],
        max_tokens=Number.A, temperature=np.float32(0.5), logit_bias={Number.A: np.float64(1)},
    )  # fmt: skip
    assert (params.stop, params.bad_words) == (("x", "ROMEO:"), ("y",))
    values = (*params.stop, *params.bad_words, *params.stop_token_ids, params.max_tokens)
    assert [*map(type, values)] == [str, str, str, int, int]
    assert {*map(type, *params.logit_bias.items())} == {int, float}
    with pytest.raises(RequestError, match="stop: expected texts"):
        SamplingParams(stop=[Name.A])


def test_a_request_of_classes_of_the_callers_is_served_by_its_text(engine: AsyncLLM, llm: LLM):
    params = SamplingParams(**GREEDY)
    expected = llm.generate("ROMEO:", params)[0].outputs[0].token_ids
    for prompt in (Tag("ROMEO:"), Mixed.A, {"prompt": Mixed.A}):
        (output,) = llm.generate(prompt, params)
        assert (output.outputs[0].token_ids, type(output.prompt)) == (expected, str)
    expected = llm.generate(PROMPT, params)[0].outputs[0].token_ids
    for prompt in ([20, Number.A, *PROMPT[2:]], [*np.array(PROMPT)]):
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == expected
    order = {"fairness_id": Tag("us"), "priority": Number.A}
    req_id = llm.add_request(PROMPT, params, request_id=Tag("me"), **order)
    (request,) = llm.engine.scheduler.unfinished
    kinds = [*map(type, (req_id, request.req_id, request.fairness_id, request.priority))]
    assert (req_id, kinds) == ("me", [str, str, str, int])
    llm.abort(Tag("me"))
    llm.step()

    class Odd(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return 1

    async def main() -> list[str]:
        return [each.request_id async for each in engine.generate(PROMPT, params, Odd("id"))]

    assert {*asyncio.run(main())} == {"id"}
    with pytest.raises(RequestError, match=r"expected integers in .*, got True at index 0"):
        llm.generate([True, 5], params)


def test_a_prompt_that_cannot_be_copied_fails_alone(engine: AsyncLLM, llm: LLM):
    class Broken(list):
        def __iter__(self) -> Iterator[int]:
            raise OSError("unplugged")

    class Lazy(Mapping):
        """As a row of a table in a file."""

        def __getitem__(self, key: str) -> str:
            raise OSError("unplugged")

        def __iter__(self) -> Iterator[str]:
            return iter(["prompt"])

        def __len__(self) -> int:
            return 1

    class Token(int):
        def __int__(self) -> int:
            raise OSError("unplugged")

    class Prompts(list):
        def __getitem__(self, index: object) -> object:
            raise OSError("unplugged")

    class Name(str):
        __slots__ = ()

        def __len__(self) -> int:
            raise OSError("unplugged")

    params, message = SamplingParams(**GREEDY), r"prompt\w*: expected .*, got .*unplugged"
    broken = [Broken([1]), {"prompt_token_ids": Broken([1])}, Lazy(), [20, Token(21)]]
    *bad, good = llm.generate([*broken, "ROMEO:"], params)
    assert good.error is None
    for each in bad:
        with pytest.raises(RequestError, match=message):
            raise each.error
    with pytest.raises(RequestError, match=message):
        llm.generate(Prompts(["ROMEO:"]), params)
    llm.abort(llm.add_request("ROMEO:", params, request_id=Name("id")))
    llm.step()
    for call in (llm.stream, llm.add_request, engine.generate):
        with pytest.raises(RequestError, match=message):
            call(Broken([1]), params)
    assert not llm.has_unfinished_requests()


def test_the_copy_of_a_prompt_has_all_that_the_prompt_has():
    chat = ChatPrompt("text")
    chat.token_ids, chat.items = [1, 2], [MultimodalItem(features=features(0, 2), start=0)]
    own = own_prompt({"prompt": chat})["prompt"]
    assert (own, type(own), own.token_ids) == ("text", ChatPrompt, [1, 2])
    assert own.items[0].tensor.data_ptr() != chat.items[0].tensor.data_ptr()
    assert torch.equal(own.items[0].tensor, chat.items[0].tensor)
    for same in (None, 5, b"ab", 2.5):
        assert own_prompt(same) is same
    array = np.arange(4)
    copied = own_prompt((array, [array], range(3)))
    assert [type(each) for each in copied] == [np.ndarray, list, list]
    array[:] = 9
    assert copied[0].tolist() == copied[1][0].tolist() == [0, 1, 2, 3]
