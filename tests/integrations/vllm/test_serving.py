"""Requests through vLLM's engine and mrv1's worker give the outputs of mrv1's own engine."""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM's Python files: make full-vllm", allow_module_level=True)

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from mrv1 import SamplingParams
from mrv1.integrations.llguidance import StructuredOutputsParams as OwnGrammar
from tests.integrations.vllm.serving import (
    Engine,
    new_config,
    new_llm,
    own_tokens,
)

# vLLM and its dependencies warn of much on a CPU; none of it is about mrv1.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def llm():
    with new_llm() as llm:
        yield llm


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def engine(request):
    engine = Engine(new_config(asynchronous=request.param))
    yield engine
    engine.close()


def random_params(rng: random.Random) -> dict[str, Any]:
    """Return parameters that both engines take, with all of their kinds of edits and draws."""
    params: dict[str, Any] = {"max_tokens": rng.randint(1, 40)}
    if rng.random() < 0.6:
        params |= {
            "temperature": rng.choice([0.5, 1.0, 1.5]), "seed": rng.getrandbits(32),
            "top_k": rng.choice([0, 5, 50]), "top_p": rng.choice([0.8, 1.0]),
            "min_p": rng.choice([0.0, 0.05]),
        }  # fmt: skip
    if rng.random() < 0.5:
        params |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.2}
    if rng.random() < 0.3:
        params |= {"logit_bias": {rng.randrange(200): 3.0}, "ignore_eos": False}
    if rng.random() < 0.3:
        params["allowed_token_ids"] = rng.sample(range(200), 40)
    if rng.random() < 0.5:
        params |= {
            "stop_token_ids": rng.sample(range(200), 10),
            "min_tokens": min(rng.choice([0, 5]), params["max_tokens"]),
        }
    return params


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_random_arrivals_preemption_prefix_hits_and_aborts(llm, asynchronous: bool, runner: int):
    rng = random.Random(runner)
    engine = Engine(new_config(asynchronous=asynchronous, num_blocks=13), runner=runner)
    shared = [rng.randrange(200) for _ in range(40)]
    requests, aborted = {}, {}
    waiting = list(range(18))
    while waiting or engine.engine.has_unfinished_requests() or engine.core.batch_queue:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if waiting:
                name = f"r{waiting.pop()}"
                own = [rng.randrange(200) for _ in range(rng.randint(1, 50))]
                prompt = shared + own if rng.random() < 0.5 else own
                requests[name] = prompt, random_params(rng)
                engine.add(name, prompt, **requests[name][1])
        if rng.random() < 0.03:
            name = rng.choice([*requests])
            done = engine.outputs.get(name)
            if done is None or not done.finished:
                engine.engine.abort_request([name])
                aborted[name] = list(done.outputs[0].token_ids) if done is not None else []
        if rng.random() < 0.02:  # weights may have changed: every running request starts over
            engine.core.reset_prefix_cache(reset_running_requests=True)
        engine.step()
    assert engine.num_preempted
    assert engine.num_cached_tokens
    assert aborted
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == 12  # block 0 is vLLM's null block
    for name, (prompt, params) in requests.items():
        expected = own_tokens(llm, prompt, **params)
        if name in aborted:
            assert expected[: len(aborted[name])] == aborted[name], name
        else:
            assert engine.tokens(name) == expected, (name, params)
    engine.close()


def test_log_probabilities_of_outputs_and_chunked_prompts(llm, engine):
    rng = random.Random(5)
    prompts = {f"l{i}": [rng.randrange(200) for _ in range(20 + 40 * i)] for i in range(3)}
    asked = {
        "l0": {"logprobs": 2, "prompt_logprobs": 1, "logit_bias": {7: 2.0}},
        "l1": {"logprobs": 0, "prompt_logprobs": 3},
        "l2": {"logprob_token_ids": [3, 90, 5], "temperature": 1.0, "seed": 3},
    }
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=9, **asked[name])
    engine.finish()
    for name, prompt in prompts.items():
        params = SamplingParams(
            **({"temperature": 0, "ignore_eos": True, "max_tokens": 9} | asked[name])
        )
        (expected,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        found = engine.outputs[name]
        ours, theirs = expected.outputs[0], found.outputs[0]
        assert list(theirs.token_ids) == list(ours.token_ids)
        positions = [*zip(theirs.logprobs, ours.logprobs, strict=True)]
        if found.prompt_logprobs is not None or expected.prompt_logprobs is not None:
            positions += [*zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True)][1:]
            assert found.prompt_logprobs[0] is None
        for at_theirs, at_ours in positions:
            assert at_theirs.keys() == at_ours.keys()
            for token, one in at_theirs.items():
                assert one.logprob == pytest.approx(at_ours[token].logprob, abs=1e-6)
        for token, at_theirs, at_ours in zip(
            theirs.token_ids, theirs.logprobs, ours.logprobs, strict=True
        ):
            assert at_theirs[token].rank == at_ours[token].rank


def test_prompt_log_probabilities_come_once_after_preemption(llm):
    engine = Engine(new_config(asynchronous=True, num_blocks=10))
    rng = random.Random(1)
    prompts = [[rng.randrange(200) for _ in range(50)] for _ in range(3)]
    for index, prompt in enumerate(prompts):
        engine.add(f"p{index}", prompt, max_tokens=40, prompt_logprobs=0)
    engine.finish()
    assert engine.num_preempted
    for index, prompt in enumerate(prompts):
        assert len(engine.outputs[f"p{index}"].prompt_logprobs) == len(prompt)
        assert engine.tokens(f"p{index}") == own_tokens(llm, prompt, max_tokens=40)
    engine.close()


def test_grammars_with_masks_of_vllms_scheduler(llm, engine):
    regex, prompt = r"[A-Z]{3}: [a-z ]{5,20}\.", [20, 30, 40, 50]
    engine.add(
        "g", prompt, max_tokens=30, ignore_eos=False, detokenize=True, logprobs=1,
        structured_outputs=StructuredOutputsParams(regex=regex),
    )  # fmt: skip
    engine.add("free", prompt, max_tokens=30)
    engine.finish()
    expected = own_tokens(
        llm, prompt, max_tokens=30, ignore_eos=False, structured_outputs=OwnGrammar(regex=regex)
    )
    assert engine.tokens("g") == expected
    assert engine.outputs["g"].outputs[0].text[3:5] == ": "
    assert engine.tokens("free") == own_tokens(llm, prompt, max_tokens=30)


def test_a_request_that_mrv1_cannot_serve_is_refused_alone(llm, engine):
    engine.add("good", [1, 2, 3], max_tokens=8)
    for params, name in (
        ({"repetition_penalty": 3.0}, "repetition_penalty"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"bad_words": ["x" * 31]}, "bad_words"),
        ({"min_tokens": 1, "stop_token_ids": list(range(13))}, "stop_token_ids"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
    ):
        with pytest.raises((ValueError, VLLMValidationError), match=name):
            engine.add(f"bad {name}", [1, 2, 3], **params)
    engine.finish()
    assert engine.tokens("good") == own_tokens(llm, [1, 2, 3], max_tokens=8)


def test_stop_texts_bad_words_and_several_outputs(llm, engine):
    prompt = llm.get_tokenizer().encode("ROMEO:\nI will")
    word = llm.get_tokenizer().decode(own_tokens(llm, prompt, max_tokens=20)).split()[1]
    engine.add("stop", prompt, max_tokens=20, detokenize=True, stop=[word])
    engine.add("bad", prompt, max_tokens=20, detokenize=True, bad_words=[word])
    engine.add(
        "two", prompt, max_tokens=8, n=2, temperature=1.0, seed=4,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    engine.finish()
    assert engine.outputs["stop"].outputs[0].stop_reason == word
    assert engine.tokens("bad") == own_tokens(llm, prompt, max_tokens=20, bad_words=[word])
    found = [list(one.token_ids) for one in engine.outputs["two"].outputs]
    expected = [own_tokens(llm, prompt, max_tokens=8, temperature=1.0, seed=4 + i) for i in (0, 1)]
    assert found == expected


def test_an_fp8_cache_with_a_scale_for_each_token_and_head():
    prompt = list(range(30, 90))
    engine = Engine(new_config(cache_dtype="fp8_per_token_head"))
    engine.add("a", prompt, max_tokens=20)
    engine.finish()
    spec = engine.worker._runner.spec
    (found,) = {one.page_size_bytes for one in engine.worker.get_kv_cache_spec().values()}
    assert found == 2 * spec.num_kv_heads * (16 * spec.head_dim + 16 * 4)
    with new_llm(kv_cache_dtype="fp8_e4m3") as llm:
        assert engine.tokens("a") == own_tokens(llm, prompt, max_tokens=20)
    engine.close()
