"""Every way in: LLM, EngineCore and JSONL; a wrong item fails alone."""

from __future__ import annotations

import asyncio
import json
import operator
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import LLM, AsyncLLM, RequestError, SamplingParams, StepError
from mrv1.cli.batch import parse_lines, run_batch
from mrv1.cli.report import Usage
from mrv1.models import checkpoint_tensors
from mrv1.multimodal import MultimodalItem, from_fastdeploy
from tests.multimodal.odd_values import Unreadable
from tests.multimodal.oracle import HIDDEN_SIZE, features, tiny
from tests.multimodal.test_generation import ROW_BYTES, make_core

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
PROMPT = [20, 21, 22, *[9] * 5, 30]
ROWS = features(0, 5)


@pytest.fixture(scope="module")
def llm():
    options = {"max_num_seqs": 3, "num_kv_blocks": 32, "max_model_len": 256}
    with LLM("tiny", device="cpu", **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm) -> tuple[int, ...]:
    """The tokens after ``PROMPT`` with ``ROWS`` as an image, which are not those of plain text."""
    core = make_core()
    item = MultimodalItem(features=ROWS, start=3)
    request = core.add_request("a", PROMPT, GREEDY, multimodal=[item])
    while core.has_unfinished_requests:
        core.step()
    tokens = tuple(request.output_token_ids)
    (plain,) = llm.generate(PROMPT, GREEDY)
    assert plain.outputs[0].token_ids != tokens
    return tokens


def prompt_of(features: object = ROWS, **fields: object) -> dict[str, object]:
    item = {"features": features, "start": 3} | fields
    return {"prompt_token_ids": PROMPT, "multimodal": [item]}


def test_generate_stream_and_add_request_take_items(llm, expected):
    item = MultimodalItem(features=ROWS, start=3)
    prompt = {"prompt_token_ids": PROMPT, "multimodal": [item]}
    two = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, n=2)
    outputs = llm.generate([prompt, prompt_of(ROWS.numpy()), PROMPT, prompt], [GREEDY] * 3 + [two])
    assert [output.outputs[0].token_ids == expected for output in outputs] == [
        True, True, False, True,
    ]  # fmt: skip
    assert outputs[3].outputs[1].token_ids == expected
    assert [*llm.stream(prompt, GREEDY)][-1].outputs[0].token_ids == expected
    llm.add_request(prompt, GREEDY)
    while llm.has_unfinished_requests():
        finished = llm.step()
    assert finished[-1].outputs[0].token_ids == expected
    inputs = {"image_features": [ROWS], "generated_modality": 0}
    adapted = from_fastdeploy(PROMPT, inputs, image_token_id=9)
    assert llm.generate(adapted, GREEDY)[0].outputs[0].token_ids == expected


def test_no_items_are_plain_text(llm):
    (plain,) = llm.generate(PROMPT, GREEDY)
    for none in (None, [], ()):
        prompt = {"prompt_token_ids": PROMPT, "multimodal": none}
        assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == plain.outputs[0].token_ids
    core = make_core()
    request = core.add_request("a", PROMPT, GREEDY, multimodal=None)
    plan = core.scheduler.schedule()
    assert (request.multimodal, request.key_spans, request.attn_mask_offsets) == ((), (), None)
    assert (plan.staged_features, plan.new[0].multimodal) == ((), ())


def test_chat_takes_the_items_of_each_conversation(llm):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    options = {"chat_template": template, "add_generation_prompt": False}
    talk = [{"role": "user", "content": "O Romeo, Romeo! wherefore art thou Romeo?"}]
    item = MultimodalItem(features=features(1, 3), start=2)
    text = llm.chat_prompt(talk, **options)
    want, plain = llm.generate([{"prompt": text, "multimodal": [item]}, text], GREEDY)
    want, plain = want.outputs[0].token_ids, plain.outputs[0].token_ids
    assert want != plain
    (one,) = llm.chat(talk, GREEDY, multimodal=[item], **options)
    many = llm.chat([talk, talk], GREEDY, multimodal=[[item], None], **options)
    streamed = [*llm.stream_chat(talk, GREEDY, multimodal=[item], **options)][-1]
    assert [each.outputs[0].token_ids for each in (one, *many, streamed)] == [
        want, want, plain, want,
    ]  # fmt: skip
    with pytest.raises(RequestError, match="multimodal: expected a list of 2 lists, one for"):
        llm.chat([talk, talk], GREEDY, multimodal=[[item]], **options)
    with pytest.raises(RequestError, match="multimodal: expected a list of items, got Tensor"):
        llm.chat(talk, GREEDY, multimodal=ROWS, **options)


def test_a_line_of_jsonl_names_files(llm, expected, tmp_path):
    np.save(tmp_path / "rows.npy", ROWS.numpy())
    good = prompt_of(str(tmp_path / "rows.npy"), modality="image", grid_thw=[1, 1, 5])
    lines = [
        good,
        {"prompt_token_ids": PROMPT},
        prompt_of(str(tmp_path / "missing.npy")),
        good | {"attn_mask_offsets": [[0, 1]]},
        {"prompt_token_ids": PROMPT, "multimodal": None},
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    sampling = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    written: list[str] = []
    errors = run_batch(llm, parse_lines(content, sampling), written.append, Usage(llm))
    records = [json.loads(line) for line in written]
    assert [*errors] == [3, 4]
    assert "expected a readable file" in records[2]["error"]
    assert "attn_mask_offsets: expected integers [9, 2]" in records[3]["error"]
    assert tuple(records[0]["token_ids"]) == expected
    assert records[1]["token_ids"] == records[4]["token_ids"] != records[0]["token_ids"]


NAN = ROWS.clone()
NAN[2, 7] = torch.nan
LATE = ROWS.repeat(2, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"features": ROWS[:, :7]}, r"image at token 3\): features: expected \[n, 256\], the mod"),
        (
            {"features": LATE},
            r"at token 3\): start: expected 10 placeholders within the prompt's 9",
        ),
        ({"features": NAN}, r"image at token 3\): features: expected finite values, got NaN"),
        ({"features": ROWS[0]}, r"features: expected shape \[n, hidden\]"),
        ({"features": "none.safetensors"}, r"expected a readable file 'none.safetensors'"),
        ({"features": torch.ones(40, HIDDEN_SIZE), "start": 0}, "expected 40 placeholders"),
        ({"second": 1}, r"multimodal\[0\]: expected features, start and others of"),
    ],
)
def test_a_wrong_item_fails_alone(llm, expected, fields, message):
    wrong = prompt_of(**fields)
    first, second, third = llm.generate([prompt_of(), wrong, prompt_of()], GREEDY)
    assert first.outputs[0].token_ids == third.outputs[0].token_ids == expected
    with pytest.raises(RequestError, match=message):
        raise second.error
    with pytest.raises(RequestError, match=message):
        llm.generate(wrong, GREEDY)
    assert llm.kv_report()["held_feature_bytes"] == 0


class Prompt(dict[str, object]):
    """A prompt whose values cannot be read."""

    def __getitem__(self, key: str) -> object:
        raise OSError("no such thing")


UNREADABLE = [
    (prompt_of("~nouser12345/x.npy"), r"features: expected a readable file '~nouser12345"),
    (prompt_of(cache_key="\ud800"), r"cache_key: .* got UnicodeEncodeError"),
    (prompt_of(ROWS.to("meta")), r"features: expected a dense tensor on a CPU or GPU"),
    (prompt_of(ROWS.to(torch.float8_e4m3fn)), r"features: expected one of float16"),
    (
        {"prompt_token_ids": PROMPT, "attn_mask_offsets": torch.ones(9, 2).bfloat16()},
        r"attn_mask_offsets: expected integers \[9, 2\]",
    ),
    ({"prompt_token_ids": PROMPT, "multimodal": Unreadable()}, r"multimodal: expected a list"),
    ({"prompt_token_ids": [Unreadable()]}, r"prompt_token_ids: .* got Unreadable that cannot"),
    (Prompt(prompt_token_ids=PROMPT), r"prompt: expected text, .* got OSError"),
]
"""Prompts with a value that raises an error of any type when it is read."""


def test_a_value_that_cannot_be_read_fails_alone(llm):
    """Through every door that takes Python's objects."""
    prompts = [prompt for prompt, _ in UNREADABLE]
    outputs = llm.generate([PROMPT, *prompts, PROMPT], GREEDY)
    assert [output.error is None for output in outputs] == [True, *[False] * len(prompts), True]
    for output, (prompt, message) in zip(outputs[1:-1], UNREADABLE, strict=True):
        with pytest.raises(RequestError, match=message):
            raise output.error
        with pytest.raises(RequestError, match=message):
            llm.add_request(prompt, GREEDY)
        with pytest.raises(RequestError, match=message):
            next(llm.stream(prompt, GREEDY))
    with pytest.raises(RequestError, match="priority: expected an integer in"):
        llm.add_request(PROMPT, GREEDY, priority=np.int32(-(2**31)))
    core = make_core()
    for prompt, message in UNREADABLE[:-1]:
        given = {"prompt_token_ids": PROMPT} | prompt
        with pytest.raises(RequestError, match=message):
            core.add_request("a", given.pop("prompt_token_ids"), GREEDY, **given)
    with pytest.raises(RequestError, match="prompt_token_ids: expected a list of integers, got"):
        core.add_request("a", map(operator.index, [None]), GREEDY)
    assert not core.has_unfinished_requests


async def _served(prompts: list[object]) -> list[object]:
    """Return the tokens, or the error, of each prompt, all of which run at the same time."""

    async def tokens(prompt: object) -> object:
        async for output in engine.generate(prompt, GREEDY):
            last = output
        return last.outputs[0].token_ids

    options = {"num_kv_blocks": 32, "max_model_len": 256, "use_tqdm_on_load": False}
    async with AsyncLLM("tiny", device="cpu", **options) as engine:
        return await asyncio.gather(*map(tokens, prompts), return_exceptions=True)


def test_asyncllm_serves_the_neighbours_of_a_value_that_cannot_be_read(expected):
    first, *errors, last = asyncio.run(
        _served([prompt_of(), *[prompt for prompt, _ in UNREADABLE], prompt_of()])
    )
    assert first == last == expected
    assert {*map(type, errors)} == {RequestError}


def test_a_line_of_jsonl_that_cannot_be_read_fails_alone(llm, expected, tmp_path):
    np.save(tmp_path / "rows.npy", ROWS.numpy())
    good = prompt_of(str(tmp_path / "rows.npy"))
    wrong = [
        prompt_of("~nouser12345/x.npy"),
        prompt_of("\ud800.npy"),
        prompt_of("a\0.npy"),
        prompt_of(str(tmp_path / "rows.npy"), cache_key="\ud800"),
        prompt_of(str(tmp_path / "rows.npy"), start=10**400),
        prompt_of(str(tmp_path / "rows.npy"), modality="video", second_per_grid=10**400),
        prompt_of([[1.0]]),
        {"prompt_token_ids": PROMPT, "attn_mask_offsets": [[10**30, 1]] * 9},
        {"prompt_token_ids": PROMPT, "attn_mask_offsets": {"0": 1}},
        {"prompt_token_ids": PROMPT, "multimodal": {"features": "rows.npy"}},
        {"prompt": "\ud800"},
        {"prompt_token_ids": [10**400]},
        {"prompt_token_ids": PROMPT, "priority": 10**400},
        {"prompt_token_ids": PROMPT, "fairness_id": "\ud800"},
        {"messages": [{"role": "user", "content": "\ud800"}]},
    ]
    lines = [good, *wrong, good | {"request_id": "\ud800"}]
    written: list[str] = []
    content = "\n".join(map(json.dumps, lines)).encode()
    sampling = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    errors = run_batch(llm, parse_lines(content, sampling), written.append, Usage(llm))
    records = [json.loads(line) for line in written]
    assert [*errors] == [*range(2, len(lines))]
    assert {*map(type, errors.values())} == {RequestError}
    assert tuple(records[0]["token_ids"]) == tuple(records[-1]["token_ids"]) == expected
    assert records[-1]["request_id"] == "\ud800"


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_gives_the_buffer_back(expected, level):
    core = make_core()

    def tokens() -> tuple[int, ...]:
        item = MultimodalItem(features=ROWS, start=3)
        request = core.add_request("a", PROMPT, GREEDY, multimodal=[item])
        while core.has_unfinished_requests:
            core.step()
        return tuple(request.output_token_ids)

    assert core.kv_report()["feature_bytes"] == 0, "no item was there yet"
    assert tokens() == expected
    before = core.kv_report()
    assert before["cached_feature_bytes"] == 5 * ROW_BYTES
    weights = {name: tensor.clone() for name, tensor in tiny_weights().items()}
    core.sleep(level)
    asleep = core.kv_report()
    assert (asleep["feature_bytes"], asleep["cached_feature_bytes"]) == (0, 0)
    core.wake_up()
    if level == 2:
        core.update_weights(weights)
    assert core.kv_report()["feature_bytes"] == before["feature_bytes"]
    assert tokens() == expected


def tiny_weights() -> dict[str, torch.Tensor]:
    model = tiny()
    return dict(checkpoint_tensors(model.config, model.weights))


def test_overlapping_items_are_refused(llm):
    items = [MultimodalItem(features=ROWS[:3], start=start) for start in (3, 5)]
    with pytest.raises(RequestError, match=r"image at token 5\): start: expected no item before"):
        llm.generate({"prompt_token_ids": PROMPT, "multimodal": items}, GREEDY)


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"mm_cache_memory_bytes": 0}, {}, "expected no items, because mm_cache_memory_bytes"),
        (
            {"mm_cache_memory_bytes": 4 * ROW_BYTES},
            {},
            r"image at token 3\): features: expected at most 4 rows \(mm_cache_memory_bytes\), g",
        ),
        (
            {"max_num_batched_tokens": 4},
            {"bidirectional": True},
            "expected spans of at most 4 tokens",
        ),
        (
            {"deterministic": True},
            {"bidirectional": True},
            "expected neither with deterministic=True",
        ),
    ],
)
def test_options_that_cannot_serve_an_item_are_named(options, fields, message):
    if "deterministic" in options:
        core = make_core()
        object.__setattr__(core.config, "deterministic", True)
    else:
        core = make_core(**options)
    item = MultimodalItem(features=ROWS, start=3, **fields)
    with pytest.raises(RequestError, match=message):
        core.add_request("a", PROMPT, GREEDY, multimodal=[item])
    assert not core.has_unfinished_requests
    core.add_request("a", PROMPT, GREEDY)
    while core.has_unfinished_requests:
        core.step()


def test_flashinfer_refuses_ranges_by_name():
    core = make_core()
    object.__setattr__(core.config, "attention_backend", "flashinfer")
    ranges = [[0, min(token + 2, 9)] for token in range(9)]
    with pytest.raises(RequestError, match="expected neither with attention_backend='flashinfer'"):
        core.add_request("a", PROMPT, GREEDY, attn_mask_offsets=ranges)


# --- nothing leaks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_requests", [12, pytest.param(100, marks=[pytest.mark.full, pytest.mark.slow])]
)
def test_device_bytes_return_to_the_start(num_requests):
    """Aborts, preemptions and shared images in a pool that is too small for two requests."""
    rng = random.Random(5)
    core = make_core(
        mm_cache_memory_bytes=9 * ROW_BYTES, num_kv_blocks=5, max_num_batched_tokens=7
    )
    pool = core.scheduler.features
    before = core.kv_report()
    requests = []
    for index in range(num_requests):
        rows = features(rng.randrange(4), rng.choice([2, 5, 9]))
        prompt = [*range(rng.randrange(1, 9)), *[9] * len(rows), *range(rng.randrange(20))]
        item = MultimodalItem(features=rows, start=prompt.index(9))
        params = SamplingParams(
            max_tokens=rng.randrange(1, 9), temperature=0, n=rng.choice([1, 2])
        )
        requests.append(core.add_request(str(index), prompt, params, multimodal=[item]))
        for _ in range(rng.randrange(4)):
            core.step()
        if rng.random() < 0.2:
            core.abort(rng.choice(requests).req_id)
    while core.has_unfinished_requests:
        core.step()
    assert all(request.error is None for request in requests)
    after = core.kv_report()
    assert after | {"cached_feature_bytes": 0, "peak_held_bytes": 0} == before
    assert pool._items == pool._in_use == {}
    assert pool.num_free + pool.num_cached == 9
    assert core.runner.features._items == {}


STAGES = ("stage", "enter", "put_sources", "of_step", "attend", "draw", "end")


@given(step=st.integers(0, 6), stage=st.sampled_from(STAGES))
@settings(max_examples=settings.default.max_examples // 2)  # each makes an engine
def test_an_exception_at_any_stage_leaks_nothing_and_fails_only_its_step(expected, step, stage):
    """The launch of a step fails: at the copies, in the upload, a layer or the sampling."""
    want = expected[:2]
    core = make_core(max_num_batched_tokens=4, enable_prefix_caching=False)
    item = MultimodalItem(features=ROWS, start=3)
    narrow = [[max(0, token - 1), token + 1] for token in range(len(PROMPT))]

    def run(name: str) -> tuple[tuple[int, ...] | None, bool]:
        """Return the output with the item, and whether a request has failed."""
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        request = core.add_request(name, PROMPT, params, multimodal=[item])
        masked = core.add_request(name + "-masked", PROMPT, params, attn_mask_offsets=narrow)
        while core.has_unfinished_requests:
            core.step()
        errors = [each.error for each in (request, masked) if each.error is not None]
        assert all(isinstance(error, StepError) for error in errors)
        return None if request.error else tuple(request.output_token_ids), bool(errors)

    runner = core.runner
    owners = (
        runner.features,
        runner._preparation.ranges,
        runner.attention,
        runner.sampler,
        runner._outputs,
    )
    owner = next(owner for owner in owners if hasattr(owner, stage))
    original, calls = getattr(owner, stage), []

    def failing(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == step + 1:
            raise ValueError("boom")
        return original(*args, **kwargs)

    setattr(owner, stage, failing)
    first, has_failed = run("a")
    assert has_failed == (len(calls) > step)
    setattr(owner, stage, original)
    assert run("b") == (want, False)
    assert first in (None, want)
    assert core.kv_report()["held_feature_bytes"] == 0
    assert core.scheduler.features._items == {}
    assert [pool.num_free for pool in core.scheduler.pools] == [24]


def test_a_slot_shows_nothing_of_its_former_request(expected):
    """The only slot: an image, plain text with the same tokens, another image, ranges."""
    core = make_core(max_num_seqs=1, enable_prefix_caching=False)
    item = MultimodalItem(features=ROWS, start=3)
    other = MultimodalItem(features=features(1, 5), start=3, bidirectional=True)
    ranges = [[max(0, token - 1), token + 1] for token in range(len(PROMPT))]

    def run(**fields: object) -> tuple[int, ...]:
        request = core.add_request("a", PROMPT, GREEDY, **fields)
        while core.has_unfinished_requests:
            core.step()
        return tuple(request.output_token_ids)

    inputs = [{"multimodal": [item]}, {}, {"multimodal": [other]}, {"attn_mask_offsets": ranges}]
    alone = [run(**each) for each in inputs]
    assert alone[0] == expected
    for index in (1, 3, 0, 2, 1):
        assert run(**inputs[index]) == alone[index]
