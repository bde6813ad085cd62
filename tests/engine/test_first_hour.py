"""The first hour: scripts that make the calls of vLLM's offline examples, run as tests.

The rest of what a newcomer tries has its tests elsewhere:

tests/test_hub.py
    a path with ~               test_a_tilde_is_the_home_directory
    an id from the cache        test_a_cached_model_needs_no_network
    an id from the Hub          test_a_model_is_downloaded_once
    an unknown or gated id      test_the_hubs_refusals
tests/models/test_gguf.py
    a GGUF file                 test_greedy_tokens_and_text_equal_transformers
    of another family           test_another_family_is_refused
    of another quantization     test_a_file_that_cannot_run_is_refused
    without the package gguf    test_a_missing_gguf_package_is_named
tests/models/test_smollm2.py
    "smollm2"                   test_greedy_answers_are_those_of_transformers
    a chat, streamed too        test_it_answers_in_chat
    an answer in a given form   test_it_answers_in_a_form
    without its package         test_a_missing_package_is_named_with_its_command
tests/engine/test_chat.py
    tools and chat_template     test_the_prompt_is_that_of_transformers
    messages of a wrong shape   test_a_conversation_of_the_wrong_shape_is_one_line
    a broken chat template      test_a_template_that_cannot_be_parsed_fails_the_call
tests/cli/test_chat.py
    mrv1 chat, /reset, /system  test_commands_change_the_conversation
    Ctrl-C in an answer         test_ctrl_c_ends_the_answer_and_not_the_program
    JSONL lines with messages   test_lines_of_messages_are_answered
tests/engine/test_vllm_names.py
    RequestOutput.prompt        test_the_prompt_is_given_back_if_it_was_text
    cumulative_logprob          test_the_cumulative_logprob_is_the_models_logprob_of_the_output
    get_tokenizer()             test_the_tokenizer_is_transformers
    detokenize                  test_without_detokenize_there_are_tokens_and_no_text
    skip_special_tokens         test_special_tokens_are_text_if_they_are_not_skipped
    reset_prefix_cache()        test_a_reset_prefix_cache_has_no_hits
    a closed engine             test_a_closed_engine_cannot_reset_its_prefix_cache
tests/engine/test_detokenizer.py
    spaces_between_special_...  test_text_with_special_tokens_only_grows_and_ends_as_the_full_text
tests/sampler/test_params.py
    SamplingParams.clone()      test_a_copy_is_equal_checked_and_independent
    assigned fields             test_an_assigned_value_is_converted_and_checked_like_an_argument
tests/engine/test_generation_config.py
    generation_config.json      test_without_params_the_files_values_hold
    its start-up line           test_the_start_up_line_names_values_and_file
    a wrong value in it         test_a_wrong_value_is_one_line_with_file_and_field
tests/engine/test_whole_vocabulary.py
    logprobs=-1                 test_every_position_has_the_log_softmax_of_transformers
    too little memory for it    test_a_request_that_needs_too_much_memory_fails_alone
tests/test_config.py
    dtype                       test_a_dtype_is_a_name_or_torchs
tests/engine/test_start.py
    use_tqdm                    test_tqdm_writes_to_stderr
tests/engine/test_sleep.py
    sleep(1), wake_up()         test_tokens_after_level_1_are_those_before
    sleep(2)                    test_after_level_2_requests_wait_for_every_weight
    sleep while requests run    test_running_requests_refuse_sleep_and_go_on
tests/engine/test_update_weights.py
    update_weights()            test_new_weights_equal_transformers
    a missing or wrong tensor   test_a_wrong_update_changes_no_weight
tests/test_lazy.py
    import mrv1 without torch   test_an_import_of_light_names_imports_no_torch
    --version and --help        test_version_and_help_import_no_torch
tests/cli/test_batch.py
    JSONL from stdin            test_a_dash_is_stdin_and_stdout
    null fields                 test_a_null_field_counts_as_absent
tests/cli/test_interrupts.py
    two Ctrl-C                  test_the_second_ends_a_cleanup_that_hangs
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from mrv1 import LLM, SamplingParams, StructuredOutputsParams
from tests.engine.chat_model import TEMPLATE, chat_checkpoint

REPO = Path(__file__).parents[2]
PROMPTS = ["Hello, my name is", "The king of France is", "The capital of France is", "I love"]


def test_each_line_of_the_table_above_names_a_test():
    file, names = Path(), []
    for line in __doc__.splitlines():
        if line.startswith("tests/"):
            file = REPO / line
        elif match := re.fullmatch(r"    \S.* {2,}(test_\w+)", line):
            assert f"\ndef {match[1]}(" in file.read_text("utf-8"), line
            names.append(match[1])
    assert len(names) == sum(line.startswith("    ") for line in __doc__.splitlines()) > 20


# --- the embedded model --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory):
    with LLM(model=chat_checkpoint(tmp_path_factory.mktemp("chat")), device="cpu") as llm:
        yield llm


def decoded(llm: LLM, token_ids: tuple[int, ...]) -> str:
    return llm.get_tokenizer().decode(token_ids, skip_special_tokens=True)


def test_basic():
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model="tiny", max_model_len=128, max_num_seqs=8, seed=0)
    outputs = llm.generate(PROMPTS, sampling_params)
    lines = []
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        lines.append(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
        assert generated_text == decoded(llm, output.outputs[0].token_ids) != ""
    assert [line.partition(", Generated")[0] for line in lines] == [
        f"Prompt: {prompt!r}" for prompt in PROMPTS
    ]


def test_prompts_of_every_kind(llm: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    (alone,) = llm.generate(PROMPTS[0], sampling_params=params)
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    prompts = [{"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert output.prompt_token_ids == tuple(ids)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_parameters_for_each_prompt(llm: LLM):
    params = [SamplingParams(temperature=0, max_tokens=n + 1, ignore_eos=True) for n in range(4)]
    params[3].n, params[3].temperature, params[3].logprobs = 2, 1.0, 1
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4]
    assert [completion.index for completion in outputs[3].outputs] == [0, 1]
    for completion in outputs[3].outputs:
        assert completion.finish_reason == "length"
        for token_id, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
            assert logprobs[token_id].logprob <= 0 < logprobs[token_id].rank
            assert logprobs[token_id].decoded_token == decoded(llm, (token_id,))


def test_an_engine_loop(llm: LLM):
    """As scripts for vLLM's ``LLMEngine``: requests are added while others run."""
    waiting = [
        (prompt, SamplingParams(temperature=0, max_tokens=4 + i, ignore_eos=True))
        for i, prompt in enumerate(PROMPTS)
    ]
    outputs = llm.generate(*zip(*waiting, strict=True), use_tqdm=False)
    expected = [output.outputs[0].text for output in outputs]
    finished = {}
    request_id = 0
    while waiting or llm.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            llm.add_request(prompt, params, request_id=str(request_id))
            request_id += 1
        for output in llm.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0].text
    assert [finished[str(i)] for i in range(4)] == expected


def test_a_stream(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    parts = list(llm.stream(PROMPTS[0], params))
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    texts = [part.outputs[0].text for part in parts]
    assert all(later.startswith(text) for text, later in pairwise(texts))
    assert texts[-1] == llm.generate(PROMPTS[0], params)[0].outputs[0].text


CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]


def test_chat(llm: LLM):
    sampling_params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (output,) = llm.chat(CONVERSATION, sampling_params, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert output.prompt == tokenizer.apply_chat_template(
        CONVERSATION, tokenize=False, add_generation_prompt=True
    )
    conversations = [CONVERSATION for _ in range(10)]
    outputs = llm.chat(messages=conversations, sampling_params=sampling_params, use_tqdm=False)
    assert [each.prompt for each in outputs] == [output.prompt] * 10
    assert [each.outputs[0].text for each in outputs] == [output.outputs[0].text] * 10


def test_chat_with_a_template_of_ones_own(llm: LLM, tmp_path: Path):
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE.replace("[assistant]", "Answer:"))
    outputs = llm.chat(
        [CONVERSATION, CONVERSATION[1:]],
        SamplingParams(max_tokens=4),
        use_tqdm=False,
        chat_template=file.read_text(),
    )
    assert all(output.prompt.endswith("higher education.Answer:") for output in outputs)
    assert ["[system] You are" in output.prompt for output in outputs] == [True, False]


# --- tools and structured outputs ----------------------------------------------------------------


def get_weather(city: str) -> str:
    """Return the weather that the model is told."""
    return f"It is 30 degrees in {city}."


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def test_chat_with_tools(llm: LLM):
    """The model has not learnt to call tools: a choice makes it write a call."""
    pytest.importorskip("llguidance", reason="not run: needs the extra 'structured'")
    calls = [
        json.dumps([{"name": "get_weather", "arguments": {"city": city}}])
        for city in ("Dallas", "Paris")
    ]
    sampling_params = SamplingParams(
        max_tokens=60, temperature=0.0, structured_outputs=StructuredOutputsParams(choice=calls)
    )
    messages = [{"role": "user", "content": "What is the temperature in Dallas, TX?"}]
    outputs = llm.chat(messages, sampling_params=sampling_params, tools=[TOOL])
    assert '"name": "get_weather"' in outputs[0].prompt
    text = outputs[0].outputs[0].text.strip()
    messages.append({"role": "assistant", "content": text})
    functions = {"get_weather": get_weather}
    answers = [functions[call["name"]](**call["arguments"]) for call in json.loads(text)]
    messages.append({"role": "tool", "content": "\n\n".join(answers), "tool_call_id": "a1b2c3d4e"})
    outputs = llm.chat(messages, SamplingParams(max_tokens=4, ignore_eos=True), tools=[TOOL])
    assert "[tool] It is 30 degrees in " in outputs[0].prompt
    assert outputs[0].outputs[0].token_ids


CAR = {
    "type": "object",
    "properties": {"type": {"enum": ["sedan", "SUV", "Truck"]}, "doors": {"enum": [2, 4]}},
    "required": ["type", "doors"],
    "additionalProperties": False,
}
SQL = """
root ::= "SELECT " column " from " table
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
"""
FORMS = [
    (
        {"choice": ["Positive", "Negative"]},
        {},
        "Classify this sentiment: vLLM is wonderful!",
        r"Positive|Negative",
    ),
    (
        {"regex": r"[a-z]{1,8}@[a-z]{1,8}\.com\n"},
        {"stop": ["\n"]},
        "Write an e-mail address for Alan Turing, who works in Enigma: ",
        r"[a-z]{1,8}@[a-z]{1,8}\.com",
    ),
    (
        {"json": CAR},
        {"frequency_penalty": 2.0},  # else it writes spaces and newlines for long
        "Write a JSON with the type and the doors of a car of the 90's",
        r'\{\s*"type"\s*:\s*"(sedan|SUV|Truck)"\s*,\s*"doors"\s*:\s*[24]\s*\}',
    ),
    (
        {"grammar": SQL},
        {},
        "Write an SQL query that shows the column 'col_1' of 'table_1'.",
        r"SELECT col_[12] from table_[12]",
    ),
]


@pytest.mark.parametrize(
    ("form", "options", "prompt", "pattern"), FORMS, ids=["choice", "regex", "json", "grammar"]
)
def test_structured_outputs(llm: LLM, form, options, prompt: str, pattern: str):
    pytest.importorskip("llguidance", reason="not run: needs the extra 'structured'")
    sampling_params = SamplingParams(
        temperature=0.5,
        seed=1,
        max_tokens=100,
        structured_outputs=StructuredOutputsParams(**form),
        **options,
    )
    outputs = llm.generate(prompt, sampling_params=sampling_params)
    assert re.fullmatch(pattern, outputs[0].outputs[0].text)
