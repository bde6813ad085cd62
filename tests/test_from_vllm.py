"""vLLM's names: the table, its page, and what becomes of a name that is given."""

from __future__ import annotations

import logging
import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch

from mrv1 import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    ConfigError,
    LoRARequest,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from mrv1.engine.llm_options import LLMOptions
from mrv1.from_vllm import (
    ADAPTER,
    ARGUMENTS,
    FORM,
    METHODS,
    OPTIONS,
    OUTPUT,
    PARAMS,
    PROMPT,
    translated,
)
from tests.from_vllm_page import PAGE, written

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
OWN = {
    "options": (OPTIONS, {each.name for each in fields(LLMOptions)}),
    "methods": (METHODS, set(dir(LLM))),
    "arguments": (ARGUMENTS, set()),
    "prompt": (PROMPT, {"prompt", "prompt_token_ids"}),
    "output": (
        OUTPUT,
        {each.name for output in (RequestOutput, CompletionOutput) for each in fields(output)},
    ),
    "params": (PARAMS, {each.name for each in fields(SamplingParams)}),
    "form": (FORM, {each.name for each in fields(StructuredOutputsParams)}),
    "adapter": (ADAPTER, {each.name for each in fields(LoRARequest)}),
}


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", device="cpu", num_gpu_blocks_override=64, disable_log_stats=True) as llm:
        yield llm


def test_the_page_has_the_rows_of_the_table():
    page = PAGE.read_text("utf-8")
    assert written(page) == page
    assert all(f"`{name}`" in page for rows, _ in OWN.values() for name in rows)


@pytest.mark.parametrize("kind", OWN)
def test_the_same_names_are_here_and_the_others_are_not(kind):
    rows, own = OWN[kind]
    assert {name for name, row in rows.items() if row.kind == "same"} - own == set()
    assert {name for name, row in rows.items() if row.kind != "same"} & own == set()
    assert {row.to for row in rows.values() if row.to} - own == set()
    assert all(row.note for row in rows.values() if row.kind in ("no-op", "not here"))


def options(**given: object) -> dict[str, object]:
    return translated(given, OPTIONS, "an option of LLM", ConfigError)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"enforce_eager": True}, {"cuda_graphs": False}),
        ({"enforce_eager": False}, {"cuda_graphs": True}),
        ({"enforce_eager": "no"}, {"cuda_graphs": "no"}),
        ({"num_gpu_blocks_override": 7}, {"num_kv_blocks": 7}),
        ({"async_scheduling": None}, {}),
        ({"async_scheduling": False}, {"overlap": False}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}),
        ({"kv_cache_dtype": ["fp8"]}, {"kv_cache_dtype": ["fp8"]}),
        ({"quantization": "awq_marlin"}, {"quantization": "awq"}),
        ({"quantization": None}, {"quantization": None}),
        ({"block_size": None, "seed": None}, {}),
        ({"pipeline_parallel_size": 1, "trust_remote_code": False, "hf_overrides": {}}, {}),
        ({"enable_chunked_prefill": True, "disable_log_stats": False, "swap_space": 4}, {}),
        ({"task": "generate", "disable_log_requests": True, "data_parallel_backend": "ray"}, {}),
        ({"overlap": False, "no_name": 3}, {"overlap": False, "no_name": 3}),
        ({"structured_outputs_config": {"backend": "xgrammar", "reasoning_parser": ""}}, {}),
    ],
)
def test_an_option_of_vllm_is_taken(given, expected):
    assert options(**given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trust_remote_code": True}, "trust_remote_code: expected an option of LLM, got vLLM's "
         "trust_remote_code=True: no code of a checkpoint runs"),
        ({"pipeline_parallel_size": 2}, "=2: tensor_parallel_size, on one host"),
        ({"revision": "main"}, 'write model="org/name@revision"'),
        ({"enable_chunked_prefill": False}, "always computed in chunks"),
        ({"structured_outputs_config": {"disable_any_whitespace": True}},
         "are fields of StructuredOutputsParams"),
        ({"cpu_offload_gb": 1}, "all weights and pages are in GPU memory"),
        ({"kv_offloading_size": 1}, "all weights and pages are in GPU memory"),
        ({"max_num_active_seqs": 1}, "see `max_num_seqs`"),
        ({"watermark_config": {"key": 1}}, "write the watermark as a `LogitsProcessor`"),
        ({"enforce_eager": True, "cuda_graphs": False},
         "enforce_eager: expected one of it and cuda_graphs, got both"),
    ],
)  # fmt: skip
def test_an_option_that_is_not_here_says_what_to_do(given, message):
    with pytest.raises(ConfigError) as refused:
        LLM("tiny", device="cpu", **given)
    assert message in str(refused.value)


def test_an_option_without_effect_is_logged(caplog):
    with caplog.at_level(logging.INFO, "mrv1"):
        options(disable_log_stats=True, trust_remote_code=False)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "disable_log_stats"
    ]


@pytest.mark.parametrize("name", ["embed", "beam_search", "collective_rpc", "get_metrics"])
def test_a_missing_method_says_what_to_do(llm, name):
    with pytest.raises(AttributeError) as refused:
        getattr(llm, name)
    assert str(refused.value).startswith(f"LLM.{name}: expected a name of mrv1, got vLLM's: ")
    assert str(refused.value).endswith(METHODS[name].note)
    assert not hasattr(AsyncLLM, name)


def test_a_name_that_nobody_has_is_refused_as_usual(llm):
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'melt'"):
        _ = llm.melt


def test_cached_tokens_are_those_of_the_first_admission(llm):
    llm.reset_prefix_cache()
    ids = list(range(5, 45))
    first, again = (llm.generate(TokensPrompt(prompt_token_ids=ids), GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    assert again.outputs[0].finished()
    with pytest.raises(AttributeError, match=r"RequestOutput\.encoder_prompt: .* decoders alone"):
        _ = again.encoder_prompt
    assert pickle.loads(pickle.dumps(again)) == again
    assert llm.generate(TextPrompt(prompt="ROMEO:"), GREEDY)[0].prompt == "ROMEO:"


def test_an_argument_of_vllm_is_taken_or_says_what_to_do(llm):
    conversation = [{"role": "user", "content": "ROMEO:"}]
    options = {"chat_template": "{{ messages[0].content }}", "mm_processor_kwargs": None}
    output = llm.generate("ROMEO:", GREEDY, prompt_token_ids=None, tokenization_kwargs=None)[0]
    answer = llm.chat(
        conversation, GREEDY, chat_template_content_format="openai", priority=None, **options
    )
    assert answer[0].outputs == output.outputs
    for call, given, name in (
        (llm.generate, "ROMEO:", "prompt_token_ids"),
        (llm.generate, "ROMEO:", "tokenization_kwargs"),
        (llm.chat, conversation, "tokenization_kwargs"),
        (llm.chat, conversation, "priority"),
    ):
        with pytest.raises(RequestError) as refused:
            call(given, GREEDY, **{name: [1]})
        assert str(refused.value).endswith(ARGUMENTS[name].note)
    with pytest.raises(RequestError, match=r"write prompts=\[TokensPrompt"):
        llm.generate(prompt_token_ids=[5, 6], sampling_params=GREEDY)
    with pytest.raises(RequestError, match="prompts: expected a prompt or a list of prompts, got"):
        llm.generate(sampling_params=GREEDY)
    with pytest.raises(TypeError, match="melts: expected an argument of generate"):
        llm.generate("ROMEO:", melts=1)


def test_a_key_of_a_prompt_that_is_not_here_says_what_to_do(llm):
    prompt = {"prompt": "ROMEO:", "multi_modal_data": None}
    assert llm.generate(prompt, GREEDY)[0].finished
    with pytest.raises(RequestError, match=r"multi_modal_data: .* messages of `LLM.chat`"):
        llm.generate({**prompt, "multi_modal_data": {"image": 1}}, GREEDY)


def test_a_field_of_vllms_params_is_taken_or_says_what_to_do():
    same = SamplingParams(n=2, best_of=None, guided_decoding=None, skip_clone=True)
    assert same == SamplingParams(n=2)
    with pytest.raises(RequestError) as refused:
        SamplingParams(best_of=3)
    assert str(refused.value) == (
        "best_of: expected a field of SamplingParams, got vLLM's best_of=3: "
        + PARAMS["best_of"].note
    )


def test_optional_params_are_those_that_are_given():
    given = SamplingParams.from_optional(temperature=None, n=2, stop=None, skip_clone=True)
    assert given == SamplingParams(n=2)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None  # no limit, as there
    assert SamplingParams.from_optional(logit_bias={"7": -5, 8: 1}).logit_bias == {7: -5, 8: 1}
    with pytest.raises(RequestError, match="temperature: expected 0 or a number"):
        SamplingParams.from_optional(temperature=-1)
    for bias in ({"9" * 5000: 1}, {"-1": 1}, {"09": 1}, {None: 1}, 3):
        with pytest.raises(RequestError, match=r"logit_bias: expected .*token ids >= 0"):
            SamplingParams.from_optional(logit_bias=bias)
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        SamplingParams.from_optional(temprature=None)
    for make in (SamplingParams, SamplingParams.from_optional):
        with pytest.raises(RequestError, match=r"sampling_params: expected .*; got 'cls'"):
            make(cls=1)  # as a line of a file may say


@pytest.mark.parametrize(
    "array", [np.array([1, 2]), np.array([0]), np.array(0), torch.tensor([1, 2]), torch.zeros(())]
)
def test_an_array_asks_for_something(array):
    with pytest.raises(RequestError, match="prompt_token_ids: expected an argument of generate"):
        translated({"prompt_token_ids": array}, ARGUMENTS, "an argument of generate", RequestError)


def test_a_field_of_a_form_is_taken_or_says_what_to_do():
    same = StructuredOutputsParams(regex="a+", structural_tag=None, disable_fallback=True)
    assert same == StructuredOutputsParams(regex="a+")
    assert pickle.loads(pickle.dumps(same)) == same
    with pytest.raises(RequestError) as refused:
        StructuredOutputsParams(structural_tag="{}")
    assert str(refused.value).endswith(FORM["structural_tag"].note)
    with pytest.raises(RequestError, match=r"structured_outputs: expected one of json, .*'xml'"):
        StructuredOutputsParams(xml="a")


def test_a_field_of_an_adapter_is_taken_or_says_what_to_do():
    same = LoRARequest("a", 1, lora_local_path="x", load_inplace=False, is_3d_lora_weight=True)
    assert same == LoRARequest("a", 1, "x")
    assert pickle.loads(pickle.dumps(same)) == same
    with pytest.raises(RequestError) as refused:
        LoRARequest("a", 1, "x", load_inplace=True)
    assert str(refused.value).endswith(ADAPTER["load_inplace"].note)
    with pytest.raises(TypeError, match="lora_rank"):
        LoRARequest("a", 1, "x", lora_rank=8)
