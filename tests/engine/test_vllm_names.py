"""What scripts for vLLM read and call: prompts, sums of log-probabilities, tokenizer, caches."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrv1 import LLM, ConfigError, RequestError, SamplingParams, StructuredOutputsParams
from mrv1.config import checkpoint_dir
from tests.models.families import tiny_checkpoint

TEXT = "ROMEO: What light through yonder window breaks? It is the east, and I"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", device="cpu", dtype="float32", num_kv_blocks=64) as llm:
        yield llm


@pytest.fixture
def bare(tmp_path):
    """An engine whose checkpoint has no tokenizer."""
    tiny_checkpoint(tmp_path, "llama")
    with LLM(str(tmp_path), device="cpu", num_kv_blocks=16) as llm:
        yield llm


def test_the_prompt_is_given_back_if_it_was_text(llm):
    ids = llm.get_tokenizer().encode(TEXT)
    prompts = [TEXT, {"prompt": TEXT}, ids, {"prompt_token_ids": ids}]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == [TEXT, TEXT, None, None]
    assert [output.prompt_token_ids for output in outputs] == [tuple(ids)] * 4
    assert {part.prompt for part in llm.stream(TEXT, GREEDY)} == {TEXT}


def test_a_refused_request_has_its_prompt_too(llm):
    too_many = SamplingParams(stop_token_ids=[10**6])
    refused = llm.generate([TEXT, [1, 2]], too_many, use_tqdm=False)
    assert [output.prompt for output in refused] == [TEXT, None]
    assert all(isinstance(output.error, RequestError) for output in refused)
    assert refused[0].outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("asked", [{"logprobs": 0}, {"logprobs": 3}, {"logprob_token_ids": [5]}])
def test_the_cumulative_logprob_is_the_models_logprob_of_the_output(llm, asked):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True, n=2, **asked)
    parts = list(llm.stream(TEXT, params))
    model = AutoModelForCausalLM.from_pretrained(str(checkpoint_dir("tiny")), dtype=torch.float32)
    for part in (parts[0], parts[len(parts) // 2], parts[-1]):
        for output in part.outputs:
            ids = torch.tensor([[*part.prompt_token_ids, *output.token_ids]])
            with torch.no_grad():
                logprobs = model(ids).logits[0].log_softmax(-1)
            start = len(part.prompt_token_ids)
            expected = sum(
                float(logprobs[start + i - 1, token]) for i, token in enumerate(output.token_ids)
            )
            assert output.cumulative_logprob == pytest.approx(expected, abs=1e-3)
    assert len(parts[-1].outputs[1].token_ids) == 9


def test_the_cumulative_logprob_is_none_unless_asked(llm):
    asked_of_prompt = SamplingParams(max_tokens=2, prompt_logprobs=1)
    (output,) = llm.generate(TEXT, asked_of_prompt)[0].outputs
    assert output.cumulative_logprob is None


def test_the_tokenizer_is_transformers(llm):
    tokenizer = llm.get_tokenizer()
    assert isinstance(tokenizer, type(AutoTokenizer.from_pretrained(str(checkpoint_dir("tiny")))))
    assert llm.generate(TEXT, GREEDY)[0].prompt_token_ids == tuple(tokenizer.encode(TEXT))


def test_a_checkpoint_without_a_tokenizer_says_so(bare):
    with pytest.raises(ConfigError, match=r"expected one of tokenizer.json, .* found none"):
        bare.get_tokenizer()
    form = StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match="structured_outputs: expected None, because the"):
        bare.generate([1, 2], SamplingParams(structured_outputs=form))


def test_without_detokenize_there_are_tokens_and_no_text(llm, monkeypatch):
    usual = llm.generate(TEXT, GREEDY)[0].outputs[0]
    assert usual.text
    params = GREEDY.clone()
    params.detokenize, params.logprobs, params.prompt_logprobs = False, 1, 1

    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("the detokenizer ran")

    ids = llm.get_tokenizer().encode(TEXT)
    monkeypatch.setattr(llm.get_tokenizer(), "decode", refuse)
    parts = list(llm.stream(ids, params))
    assert {part.outputs[0].text for part in parts} == {""}
    (output,) = parts[-1].outputs
    assert output.token_ids == usual.token_ids
    told = [*output.logprobs, *parts[-1].prompt_logprobs[1:]]
    assert {logprob.decoded_token for each in told for logprob in each.values()} == {None}


def test_special_tokens_are_text_if_they_are_not_skipped(llm):
    tokenizer = llm.get_tokenizer()
    special = tokenizer.all_special_ids[0]
    ids = tokenizer.encode(TEXT)
    forced = SamplingParams(
        temperature=0, max_tokens=3, ignore_eos=True, allowed_token_ids=[special]
    )
    kept = forced.clone()
    kept.skip_special_tokens = False
    usual, shown = llm.generate([ids, ids], [forced, kept], use_tqdm=False)
    assert usual.outputs[0].text == ""
    assert shown.outputs[0].token_ids == (special,) * 3
    final = tokenizer.decode([special] * 3, skip_special_tokens=False)
    assert shown.outputs[0].text == final
    parts = [part.outputs[0].text for part in llm.stream(ids, kept)]
    assert all(final.startswith(part) for part in parts)


def test_a_change_of_the_params_does_not_reach_a_queued_request(llm):
    params = GREEDY.clone()
    llm.add_request(TEXT, params, request_id="mine")
    llm.step()
    params.max_tokens = 2
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert len(outputs[-1].outputs[0].token_ids) == GREEDY.max_tokens


def hit_tokens(llm: LLM) -> int:
    """Return how many prompt tokens of one more request the prefix cache had."""
    before = llm.metrics()["prefix_hit_tokens"]
    llm.generate(TEXT, GREEDY)
    return llm.metrics()["prefix_hit_tokens"] - before


def test_a_reset_prefix_cache_has_no_hits(llm):
    hit_tokens(llm)
    assert hit_tokens(llm) >= 16
    assert llm.reset_prefix_cache() is True
    assert hit_tokens(llm) == 0
    assert hit_tokens(llm) >= 16


def test_the_prefix_cache_is_kept_while_a_request_runs(llm):
    hit_tokens(llm)
    llm.add_request([5, 6, 7], GREEDY, request_id="runs")
    llm.step()
    assert llm.reset_prefix_cache() is False
    while llm.has_unfinished_requests():
        llm.step()
    assert hit_tokens(llm) >= 16
    assert llm.reset_prefix_cache() is True


def test_a_closed_engine_cannot_reset_its_prefix_cache():
    llm = LLM("tiny", device="cpu", num_kv_blocks=16)
    llm.close()
    with pytest.raises(RuntimeError, match="expected an open engine"):
        llm.reset_prefix_cache()
