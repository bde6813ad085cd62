"""``LLM``: its greedy tokens are transformers', in any schedule; its errors, streams, closing."""

from __future__ import annotations

import gc
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from mrv1 import LLM, ConfigError, RequestError, RequestOutput, SamplingParams
from mrv1.config import checkpoint_dir
from mrv1.engine.tokenizer import Tokenizer
from mrv1.kernels import reference
from tests.engine.scheduler_model import num_free_slots
from tests.models.families import FAMILIES, ROPES, SLIDING, tiny_checkpoint

VOCAB = 160
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
PROMPT_LENGTHS = (1, 15, 16, 17, 70)


def random_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def greedy_by_transformers(
    model: PreTrainedModel, prompt: list[int], num_tokens: int
) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


# --- against transformers ---------------------------------------------------------------------

CASES = [
    *(pytest.param(family, "default", {}, id=family) for family in FAMILIES),
    *(pytest.param("llama", rope, {}, id=f"llama-{rope}") for rope in ROPES if rope != "default"),
    *(
        pytest.param(family, "default", extra, id=f"{family}-sliding")
        for family, extra in SLIDING.items()
    ),
    pytest.param("llama", "default", {"tie_word_embeddings": True}, id="llama-tied"),
]


SCHEDULES = (1, 16, 2), (7, 32, None), (64, 64, None)
"""Chunk, block size, prompts: fewer for chunk 1, whose steps take as long as those of 64."""


def assert_greedy_equals_transformers(
    path: Path,
    model: PreTrainedModel,
    prompts: list[list[int]],
    chunk: int,
    block_size: int,
    count: int | None,
) -> None:
    """Assert that each token is the one that transformers finds most likely after those before."""
    with LLM(
        str(path),
        dtype="float32",
        block_size=block_size,
        max_num_batched_tokens=chunk,
        max_num_seqs=8,
        num_kv_blocks=64,
    ) as llm:
        reference.calls.clear()
        outputs = llm.generate(prompts[:count], GREEDY)
        assert bool(reference.calls) == (llm.engine.runner.path == "reference")
    for prompt, output in zip(prompts[:count], outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == 64
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens], device=model.device)).logits[0]
        assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "rope", "overrides", "schedule"),
    # Each case in one of the schedules by default, in all of them in the long run.
    [
        pytest.param(
            *case.values,
            schedule,
            id=f"{case.id}-{schedule[0]}",
            marks=[] if index % len(SCHEDULES) == at else [pytest.mark.full],
        )
        for index, case in enumerate(CASES)
        for at, schedule in enumerate(SCHEDULES)
    ],
)
def test_64_greedy_tokens_equal_transformers(tmp_path, device, family, rope, overrides, schedule):
    model = tiny_checkpoint(tmp_path, family, rope, **overrides).to(device)
    assert_greedy_equals_transformers(tmp_path, model, random_prompts(PROMPT_LENGTHS), *schedule)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(schedule, id=str(schedule[0]), marks=[pytest.mark.full] if at != 1 else [])
        for at, schedule in enumerate(SCHEDULES)
    ],
)
def test_greedy_tokens_of_the_embedded_model_equal_transformers(device, schedule):
    path = checkpoint_dir("tiny")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    tokenizer = Tokenizer(path)
    texts = ("ROMEO:", "What is the city but the people?\n", "KING RICHARD III:\nA horse! " * 8)
    prompts = [tokenizer.encode(text) for text in texts]
    assert_greedy_equals_transformers(path, model, prompts, *schedule)


# --- independence of the schedule -------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(path, "llama")
    return path


@pytest.fixture(scope="module")
def requests(checkpoint) -> list[tuple[list[int], SamplingParams, list[int]]]:
    """Return prompts and parameters, each with the tokens that the request yields alone."""
    prompts = random_prompts((1, 3, 16, 40, 90))
    params = [
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        if index % 2 == 0
        else SamplingParams(
            temperature=1.0, top_k=20, top_p=0.9, seed=index, max_tokens=16, ignore_eos=True
        )
        for index in range(len(prompts))
    ]
    alone = []
    for prompt, prompt_params in zip(prompts, params, strict=True):
        with LLM(str(checkpoint), dtype="float64", device="cpu", num_kv_blocks=32) as llm:
            alone.append(list(llm.generate(prompt, prompt_params)[0].outputs[0].token_ids))
    return list(zip(prompts, params, alone, strict=True))


@settings(max_examples=max(settings.default.max_examples // 8, 2))  # each makes an engine
@given(
    order=st.permutations(range(5)),
    arrivals=st.lists(st.integers(0, 3), max_size=8),
    block_size=st.sampled_from([16, 32, 64]),
    max_num_seqs=st.integers(1, 8),
    chunk=st.sampled_from([1, 7, 64, 500]),
    pool_tokens=st.sampled_from([128, 192, 512]),
)
def test_output_does_not_depend_on_batch_chunks_blocks_or_arrival(
    checkpoint, requests, order, arrivals, block_size, max_num_seqs, chunk, pool_tokens
):
    """Random schedules in float64, where no near-tie can flip; small pools force preemption."""
    with LLM(
        str(checkpoint),
        dtype="float64",
        device="cpu",
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        num_kv_blocks=pool_tokens // block_size,
    ) as llm:
        waiting, outputs = list(order), {}
        per_step = iter(arrivals)
        while waiting or llm.has_unfinished_requests():
            for _ in range(min(next(per_step, len(waiting)), len(waiting))):
                index = waiting.pop()
                llm.add_request(*requests[index][:2], request_id=str(index))
            for output in llm.step():
                outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
        assert llm.metrics()["num_free_blocks"] == llm.kv_report()["num_blocks"]
    assert outputs == {index: alone for index, (_, _, alone) in enumerate(requests)}


def test_the_same_seed_repeats_a_draw_and_another_seed_changes_it(checkpoint):
    prompt = random_prompts((8,))[0]
    with LLM(str(checkpoint), device="cpu", num_kv_blocks=32) as llm:
        draws = [
            llm.generate(prompt, SamplingParams(seed=seed, max_tokens=32, ignore_eos=True))[0]
            for seed in (1, 1, 2)
        ]
        unseeded = [
            llm.generate(prompt, SamplingParams(max_tokens=32, ignore_eos=True))[0]
            for _ in range(2)
        ]
    tokens = [output.outputs[0].token_ids for output in draws]
    assert tokens[0] == tokens[1] != tokens[2]
    assert unseeded[0].outputs[0].token_ids != unseeded[1].outputs[0].token_ids


# --- ends, errors, streams --------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(checkpoint):
    with LLM(str(checkpoint), device="cpu", num_kv_blocks=32, max_model_len=256) as engine:
        yield engine


@pytest.fixture
def llm(engine):
    """Return the engine that the tests share: each leaves it idle, with no request or block."""
    yield engine
    scheduler = engine.engine.scheduler
    assert not scheduler.has_unfinished_requests
    assert scheduler.pools[0].num_free == 32
    assert num_free_slots(scheduler) == engine.engine.config.max_num_seqs


PROMPT = random_prompts((12,))[0]
SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("text", None, "prompt: expected token ids, because .* has no tokenizer"),
        ([[]], None, "prompt: expected at least one token, got none"),
        ({"prompt_token_ids": []}, None, "prompt: expected at least one token, got none"),
        ([5] * 256, None, r"prompt: expected fewer than 256 tokens \(max_model_len.*got 256"),
        (
            [5, VOCAB],
            None,
            rf"prompt_token_ids: expected integers in \[0, {VOCAB}\), got {VOCAB} at index 1",
        ),
        ([5, -1], None, r"prompt_token_ids: expected integers .*got -1 at index 1"),
        ([5, 1.5], None, r"prompt_token_ids: expected integers .*got 1.5 at index 1"),
        ([5, True], None, r"prompt_token_ids: expected integers .*got True at index 1"),
        ({"text": "x"}, None, r"prompt: expected a dict with one of .*got keys \['text'\]"),
        ({"prompt": [3]}, None, "prompt: expected text, got list"),
        (
            {"prompt_token_ids": "3"},
            None,
            "prompt_token_ids: expected a list of token ids, got str",
        ),
        ([5], SamplingParams(stop_token_ids=[VOCAB]), "stop_token_ids: expected ids in"),
        ([5], {"temperature": 1}, "sampling_params: expected SamplingParams, got dict"),
    ],
)
def test_a_bad_request_fails_alone_and_the_error_names_the_argument(llm, prompt, params, message):
    prompt = prompt[0] if prompt == [[]] else prompt
    if params is None or isinstance(params, SamplingParams):
        good = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        refused, fine = llm.generate([prompt, PROMPT], [params or good, good])
        assert refused.finished
        assert refused.outputs[0].finish_reason == "error"
        with pytest.raises(RequestError, match=message):
            raise refused.error
        assert fine.error is None
        assert len(fine.outputs[0].token_ids) == 4
    with pytest.raises(RequestError, match=message):
        llm.add_request(prompt, params or SamplingParams())
    assert not llm.has_unfinished_requests()


@pytest.mark.parametrize(
    ("option", "hint"),
    [("max_num_seq", "; did you mean max_num_seqs?"), ("zzz", "")],
)
def test_an_unknown_option_names_itself_and_a_likely_one(option, hint):
    message = f"{option}: expected an option of LLM, got an unknown one{hint}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        LLM("tiny", **{option: 1})


def test_a_prompt_of_an_unknown_type_is_refused(llm):
    with pytest.raises(
        RequestError, match="expected a string, a list of token ids or a dict, got"
    ):
        llm.add_request(3.5, SHORT)


@pytest.mark.parametrize("prompts", [None, 5, {1, 2}])
def test_prompts_of_an_unknown_type_are_refused(llm, prompts):
    with pytest.raises(RequestError, match="prompts: expected a prompt or a list of prompts, got"):
        llm.generate(prompts)


def test_sampling_params_of_an_unknown_type_are_refused(llm):
    with pytest.raises(RequestError, match="expected SamplingParams or a list, got int"):
        llm.generate([PROMPT], 5)


@pytest.mark.parametrize("request_id", ["", 5, ["a"]])
def test_a_request_id_must_be_a_nonempty_string(llm, request_id):
    with pytest.raises(RequestError, match="request_id: expected a string that is not empty"):
        llm.add_request(PROMPT, SHORT, request_id=request_id)


def test_the_core_refuses_a_wrong_id_and_wrong_parameters(llm):
    with pytest.raises(RequestError, match=r"request_id: expected a string .*, got 1"):
        llm.engine.add_request(1, [5], SamplingParams())
    with pytest.raises(RequestError, match="params: expected SamplingParams, got NoneType"):
        llm.engine.add_request("a", [5], None)
    assert not llm.has_unfinished_requests()


def test_a_request_id_can_be_reused_once_its_output_was_returned(llm):
    llm.add_request(PROMPT, SHORT, request_id="a")
    llm.abort("a")
    with pytest.raises(RequestError, match=r"an output that step\(\) has yet to return, got 'a'"):
        llm.add_request(PROMPT, SHORT, request_id="a")
    assert [output.outputs[0].finish_reason for output in llm.step()] == ["abort"]
    llm.add_request(PROMPT, SHORT, request_id="a")
    llm.abort("a")
    llm.step()


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}])
def test_a_draw_from_one_token_is_greedy(checkpoint, filters):
    """top-k and top-p reach the draw: with one token left it is the likeliest one."""
    with LLM(str(checkpoint), dtype="float32", num_kv_blocks=32) as llm:
        greedy, drawn, free = llm.generate(
            [PROMPT] * 3,
            [
                GREEDY,
                SamplingParams(max_tokens=64, ignore_eos=True, seed=3, **filters),
                SamplingParams(max_tokens=64, ignore_eos=True, seed=3, temperature=5.0),
            ],
        )
    assert drawn.outputs[0].token_ids == greedy.outputs[0].token_ids
    assert free.outputs[0].token_ids != greedy.outputs[0].token_ids


def test_a_stop_token_is_not_in_the_text():
    with LLM("tiny", device="cpu", num_kv_blocks=16) as llm:
        tokenizer = llm._tokenizer
        whole = llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
        stop = next(t for t in whole.token_ids[3:] if tokenizer.decode([t]).strip())
        output = llm.generate(
            "ROMEO:", SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop])
        )[0].outputs[0]
    assert output.token_ids[-1] == stop
    assert output.text == tokenizer.decode(output.token_ids[:-1])
    assert output.text != tokenizer.decode(output.token_ids)


def test_an_interrupt_fails_its_step_and_leaves_the_engine_usable(llm, monkeypatch):
    whole = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    llm.add_request(PROMPT, SHORT, request_id="other")
    llm.step()

    def interrupted(self, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mrv1.runner.async_output.AsyncOutput.take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    (output,) = llm.step()
    assert (output.request_id, output.finished) == ("other", True)
    assert "KeyboardInterrupt" in str(output.error)
    assert not llm.has_unfinished_requests()
    assert llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids == whole


def test_an_abandoned_stream_leaves_no_output_to_deliver(llm):
    """This also holds if another stream ran a step and kept an output for the abandoned stream."""
    first, second = llm.stream(PROMPT, SHORT), llm.stream(PROMPT, SHORT)
    next(first)
    next(second)
    first.close()
    second.close()
    assert not llm.has_unfinished_requests()
    assert llm.step() == []


def test_closing_the_engine_in_the_middle_of_a_stream_raises_nothing(checkpoint):
    with LLM(str(checkpoint), device="cpu", num_kv_blocks=32) as llm:
        stream = llm.stream(PROMPT, SHORT)
        next(stream)
    stream.close()


def test_a_single_prompt_raises_its_error(llm):
    with pytest.raises(RequestError, match="expected fewer than 256 tokens"):
        llm.generate([5] * 300)


def test_a_request_larger_than_the_pool_is_refused_with_the_limit(checkpoint):
    with LLM(str(checkpoint), device="cpu", num_kv_blocks=4) as llm:
        with pytest.raises(
            RequestError,
            match=r"at most 64 tokens \(num_kv_blocks = 4, 16 tokens each\), got up to 65",
        ):
            llm.generate([5] * 15, SamplingParams(max_tokens=50))
        assert (
            len(
                llm.generate([5] * 15, SamplingParams(max_tokens=49, ignore_eos=True))[0]
                .outputs[0]
                .token_ids
            )
            == 49
        )


def test_the_number_of_params_must_match_the_prompts(llm):
    with pytest.raises(RequestError, match="expected one, or 2 for 2 prompts, got 1"):
        llm.generate([PROMPT, PROMPT], [SamplingParams()])


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []


def test_generation_ends_at_max_tokens_or_at_the_end_of_the_context(llm):
    outputs = llm.generate(
        [PROMPT, [5] * 250],
        [
            SamplingParams(max_tokens=3, ignore_eos=True),
            SamplingParams(max_tokens=None, ignore_eos=True),
        ],
    )
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 6]
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


def test_a_stop_token_ends_the_request_and_is_the_stop_reason(llm):
    whole = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    stop = whole[10]
    first = whole.index(stop)
    output = llm.generate(
        PROMPT,
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop]),
    )[0].outputs[0]
    assert output.token_ids == whole[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


@pytest.fixture(scope="module")
def spoken() -> dict[str, RequestOutput]:
    """Return the embedded model's greedy outputs of 40 tokens."""
    with LLM("tiny", device="cpu") as llm:
        outputs = llm.generate(["ROMEO:", "JULIET:"], SAYS)
    return dict(zip(("ROMEO:", "JULIET:"), outputs, strict=True))


SAYS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_and_no_other_request(spoken, overlap, include):
    text = spoken["ROMEO:"].outputs[0].text
    stop = text[len(text) // 2 :][:3]  # regardless of where tokens begin and end
    end = text.index(stop) + (len(stop) if include else 0)
    params = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, stop=["\x00", stop],
        include_stop_str_in_output=include,
    )  # fmt: skip
    with LLM("tiny", device="cpu", overlap=overlap) as llm:
        stopped, other = llm.generate(["ROMEO:", "JULIET:"], [params, SAYS])
        streamed = [part.outputs[0] for part in llm.stream("ROMEO:", params)]
        pool = llm.engine.scheduler.pools[0]
        assert pool.num_free == pool.num_blocks
        assert llm.metrics()["num_finished_requests"] == 3
        decode = llm._tokenizer.decode
    output = stopped.outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == text[:end]
    assert output.token_ids == spoken["ROMEO:"].outputs[0].token_ids[: len(output.token_ids)]
    assert stop in decode(output.token_ids)
    assert stop not in decode(output.token_ids[:-1])
    assert streamed[-1] == output
    assert all(output.text.startswith(part.text) for part in streamed)
    assert other.outputs == spoken["JULIET:"].outputs


def test_a_stop_string_completed_by_the_last_token_has_precedence_over_length(spoken):
    """``max_tokens`` is exactly the number of tokens that completes the stop string."""
    whole = spoken["ROMEO:"].outputs[0]
    with LLM("tiny", device="cpu") as llm:
        ends = [llm._tokenizer.decode(whole.token_ids[:n]) for n in range(41)]
        count = next(n for n in range(20, 41) if len(ends[n]) >= len(ends[n - 1]) + 2)
        stop = ends[count][-6:]
        assert stop not in ends[count - 1]
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, stop=stop)
        output = llm.generate("ROMEO:", params)[0].outputs[0]
    assert output.token_ids == whole.token_ids[:count]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == ends[count][:-6]


def test_a_stop_string_that_never_comes_changes_nothing(spoken):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop="\x00")
    with LLM("tiny", device="cpu") as llm:
        assert llm.generate("ROMEO:", params)[0].outputs == spoken["ROMEO:"].outputs


def test_a_stop_string_needs_a_tokenizer(llm):
    with pytest.raises(RequestError, match="stop: expected none, because the checkpoint has no t"):
        llm.generate(PROMPT, SamplingParams(stop="."))
    assert not llm.has_unfinished_requests()


def test_stream_is_cumulative_and_ends_finished(llm):
    whole = llm.generate(PROMPT, SHORT)[0]
    parts = list(llm.stream(PROMPT, SHORT))
    assert [len(p.outputs[0].token_ids) for p in parts] == list(range(1, 21))
    assert [p.finished for p in parts] == [False] * 19 + [True]
    assert parts[-1].outputs[0].token_ids == whole.outputs[0].token_ids


def test_leaving_a_stream_early_aborts_it(llm):
    stream = llm.stream(PROMPT, SHORT)
    next(stream)
    assert llm.has_unfinished_requests()
    stream.close()
    assert not llm.has_unfinished_requests()


def test_a_stream_survives_generate_in_between(llm):
    whole = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
    stream = llm.stream(PROMPT, SHORT)
    next(stream)
    llm.generate([5, 6], SamplingParams(max_tokens=30, ignore_eos=True))  # outlasts the stream
    assert list(stream)[-1].outputs[0].token_ids == whole


def test_a_stream_raises_its_error(llm):
    with pytest.raises(RequestError, match="at least one token"):
        next(llm.stream({"prompt_token_ids": []}))


def test_abort_delivers_the_tokens_generated_so_far(llm):
    req_id = llm.add_request(PROMPT, SHORT)
    llm.step()
    llm.step()
    llm.abort(req_id)
    llm.abort(req_id)
    llm.abort("unknown")
    (output,) = llm.step()
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == 2
    assert not llm.has_unfinished_requests()


def test_a_row_without_a_selectable_token_fails_alone(llm, monkeypatch):
    """NaN logits in the first row do not affect the request of the second row."""
    model = llm.engine.runner.model
    compute_logits = model.compute_logits

    def poisoned(hidden):
        logits = compute_logits(hidden)
        logits[0] = torch.nan
        return logits

    monkeypatch.setattr(model, "compute_logits", poisoned)
    failed, fine = llm.generate([PROMPT, [5, 6]], SamplingParams(temperature=0, max_tokens=1))
    with pytest.raises(RequestError, match="its logits hold NaN"):
        raise failed.error
    assert fine.error is None
    assert len(fine.outputs[0].token_ids) == 1


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(checkpoint, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("the device fell over")

    with LLM(str(checkpoint), device="cpu", num_kv_blocks=32, max_model_len=256) as llm:
        expected = llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner.model, "forward", broken)
            outputs = llm.generate([PROMPT, [5, 6]], SHORT)
        said = "step 20 (2 requests): the device fell over"
        assert [str(o.error) for o in outputs] == [said] * 2
        assert llm.generate(PROMPT, SHORT)[0].outputs[0].token_ids == expected


def test_a_closed_engine_refuses_requests(checkpoint):
    llm = LLM(str(checkpoint), device="cpu", num_kv_blocks=32)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="expected an open engine"):
        llm.generate(PROMPT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model": "/nowhere"},
            "model: expected a checkpoint directory, GGUF file, Hugging Face id or 'tiny', "
            "got '/nowhere'",
        ),
        ({"block_size": 20}, r"block_size: expected one of \(16, 32, 64, 128\), got 20"),
        ({"dtype": "int8"}, "dtype: expected one of"),
        ({"device": "tpu"}, "device: expected 'auto', 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
        (
            {"max_model_len": 1000},
            r"max_model_len: expected <= 512 \(the model's context\), got 1000",
        ),
        (
            {"model": ""},
            "model: expected a checkpoint directory or an id, got ''",
        ),
        ({"block_size": 16.0}, r"block_size: expected one of \(16, 32, 64, 128\), got 16.0"),
        ({"max_model_len": 1}, "max_model_len: expected an integer >= 2"),
        ({"max_num_seqs": 0}, "max_num_seqs: expected an integer >= 1 that fits int32, got 0"),
        ({"max_num_seqs": 10**10}, "max_num_seqs: expected an integer >= 1 that fits int32"),
        ({"num_kv_blocks": 10**19}, "num_kv_blocks: expected an integer >= 1 that fits int32"),
        ({"streaming_cache_blocks": -1}, "streaming_cache_blocks: expected an integer >= 0"),
        ({"window_recycling": 1}, "window_recycling: expected True or False, got 1"),
        ({"gpu_memory_utilization": "a"}, r"gpu_memory_utilization: expected \(0, 1\], got 'a'"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens: expected an integer >= 1"),
        ({"num_kv_blocks": 0}, "num_kv_blocks: expected an integer >= 1 that fits int32, got 0"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization: expected \(0, 1\], got 1.5"),
        ({"seed": "x"}, "seed: expected an integer, got 'x'"),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            r"kv_cache_dtype: expected one of \('auto', 'fp8_e4m3', 'int4'\), got 'fp8_e5m2'",
        ),
        (
            {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "block"},
            r"kv_scale: expected one of \('token', 'quarter', 'head'\), got 'block'",
        ),
        (
            {"kv_scale": "head"},
            "kv_scale: expected kv_cache_dtype='fp8_e4m3' with 'head', got 'auto'",
        ),
        (
            {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"},
            r"kv_scale: checkpoint .*self_attn\.k_scale: missing .*choose kv_scale='token'",
        ),
        (
            {"attention_backend": "auto"},
            r"attention_backend: expected one of \('triton', 'flashinfer'\), got 'auto'",
        ),
    ],
)
def test_a_bad_option_is_refused_and_named(checkpoint, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(**({"model": str(checkpoint)} | options))


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a config.json in .*, found none"):
        LLM(str(tmp_path))


FIVE_ENGINES = """
import gc, sys, torch
from mrv1 import LLM, SamplingParams
torch.zeros(1, device="cuda")
gc.collect()
start = torch.cuda.memory_allocated()
for _ in range(5):
    with LLM(sys.argv[1]) as llm:
        llm.generate([5, 6, 7], SamplingParams(max_tokens=4, top_k=3))
        assert torch.cuda.memory_allocated() > start
    assert torch.cuda.memory_allocated() == start, (torch.cuda.memory_allocated(), start)
"""


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_close_gives_the_memory_back(checkpoint):
    """Five engines in a fresh process: the allocated bytes return to where they were."""
    repo = Path(__file__).parents[2]
    command = [sys.executable, "-c", FIVE_ENGINES, str(checkpoint)]
    run = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_close_frees_every_tensor(checkpoint):
    """No tensor of an engine on a CPU is left alive, for five engines in a row."""

    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    with LLM(str(checkpoint), device="cpu", num_kv_blocks=8) as llm:
        llm.generate(PROMPT, SamplingParams(max_tokens=2))
    gc.collect()
    gc.freeze()  # only objects made from here on are collected and counted: the others are many
    try:
        start = live_tensors()
        for _ in range(5):
            llm = LLM(str(checkpoint), device="cpu", num_kv_blocks=8)
            llm.generate(PROMPT, SamplingParams(max_tokens=2))
            llm.close()
            assert live_tensors() == start
    finally:
        gc.unfreeze()
