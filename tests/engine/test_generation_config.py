"""Sampling defaults and stop tokens of ``generation_config.json``; transformers is the oracle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from mrv1 import LLM, ConfigError, SamplingParams
from mrv1.cli import app
from mrv1.cli.generate import with_defaults
from mrv1.config import checkpoint_dir
from mrv1.engine.sampling_defaults import SamplingDefaults
from mrv1.models import Checkpoint, ModelConfig

PROMPT = [5, 6, 7, 8, 9, 10]
SETTINGS = {"top_k": 1, "repetition_penalty": 1.3, "max_new_tokens": 6}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
TEMPLATE = "{{ messages[0].content }}"


def expected_tokens(
    model: Any, prompt: list[int], num_tokens: int, **options: object
) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=num_tokens, **options
    )
    return ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(str(checkpoint_dir("tiny")), dtype=torch.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Path:
    """The embedded model; its generation_config.json also ends texts at PROMPT's fourth token."""
    directory = tmp_path_factory.mktemp("defaults")
    shutil.copytree(checkpoint_dir("tiny"), directory, dirs_exist_ok=True)
    tokens = expected_tokens(model, PROMPT, 6, repetition_penalty=1.3)
    content = SETTINGS | {"do_sample": True, "eos_token_id": [0, tokens[3]]}
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="module")
def llm(path: Path):
    with LLM(str(path), device="cpu", num_kv_blocks=32) as llm:
        yield llm


def test_without_params_the_files_values_hold(llm: LLM, model: Any):
    expected = expected_tokens(model, PROMPT, 6, repetition_penalty=1.3)[:4]
    (output,) = llm.generate(PROMPT)
    assert list(output.outputs[0].token_ids) == expected
    assert output.outputs[0].finish_reason == "stop"
    assert list(llm.stream(PROMPT))[-1].outputs == output.outputs
    other = PROMPT[::-1]
    second = llm.generate([PROMPT, other], use_tqdm=False)[1]
    assert list(second.outputs[0].token_ids) == expected_tokens(
        model, other, 6, repetition_penalty=1.3, eos_token_id=[0, expected[-1]]
    )
    answer = llm.chat(**CHAT, chat_template=TEMPLATE)[0]
    stream = list(llm.stream_chat(**CHAT, chat_template=TEMPLATE))
    assert answer.outputs == stream[-1].outputs == llm.generate("Hello")[0].outputs


def test_params_that_are_given_are_taken_as_they_are(llm: LLM, model: Any):
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, ignore_eos=True))
    assert list(output.outputs[0].token_ids) == expected_tokens(
        model, PROMPT, 16, eos_token_id=None
    )


def test_the_default_params_are_a_copy(llm: LLM):
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(top_k=1, repetition_penalty=1.3, max_tokens=6)
    params.top_k = 3
    assert llm.get_default_sampling_params().top_k == 1


def test_the_start_up_line_names_values_and_file(llm: LLM, path: Path):
    listed = "top_k=1, repetition_penalty=1.3, max_tokens=6"
    file = path / "generation_config.json"
    assert llm.describe().endswith(f", sampling defaults {listed} from {file}")


# --- the command line ----------------------------------------------------------------------------


def run_mrv1(command: str, model: object, *options: str, stdin: str = "") -> str:
    result = CliRunner().invoke(
        app,
        [command, "--model", str(model), "--device", "cpu", "--num-kv-blocks", "32", *options],
        input=stdin,
    )
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_lines_have_the_defaults_of_fields_that_nobody_gives(path: Path, llm: LLM):
    asked = [{}, {"max_tokens": 2}, {"top_k": 2, "temperature": 0}]
    lines = [json.dumps({"prompt_token_ids": PROMPT, "sampling_params": each}) for each in asked]
    options = ("--input", "-", "--output", "-", "--repetition-penalty", "1")
    records = [
        json.loads(line)
        for line in run_mrv1("generate", path, *options, stdin="\n".join(lines)).splitlines()
    ]
    expected = llm.generate(
        [PROMPT] * 3, [SamplingParams(top_k=1, max_tokens=n) for n in (6, 2, 6)], use_tqdm=False
    )
    assert [record["token_ids"] for record in records] == [
        list(output.outputs[0].token_ids) for output in expected
    ]


def test_generate_and_chat_have_the_defaults(path: Path, llm: LLM, tmp_path: Path):
    default = llm.generate("Hello")[0].outputs[0].text + "\n"
    assert run_mrv1("generate", path, "--prompt", "Hello") == default
    template = tmp_path / "template"
    template.write_text(TEMPLATE)
    told = run_mrv1("chat", path, "--chat-template", str(template), stdin="Hello\n")
    assert told == default
    off = run_mrv1(
        "generate", path, "--prompt", "Hello", "--generation-config", "vllm",
        "--temperature", "0", "--ignore-eos", "--max-tokens", "9",
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    assert off == llm.generate("Hello", params)[0].outputs[0].text + "\n"


def test_options_come_before_the_models_values_and_those_before_the_commands(llm: LLM):
    assert with_defaults(llm, {"top_k": 2}, max_tokens=128) == {
        "top_k": 2, "repetition_penalty": 1.3, "max_tokens": 6
    }  # fmt: skip
    model = SimpleNamespace(default_sampling_params={"top_p": 0.5})
    assert with_defaults(model, {}, max_tokens=128) == {"top_p": 0.5, "max_tokens": 128}
    assert with_defaults(model, {"max_tokens": 3}, max_tokens=128)["max_tokens"] == 3


# --- the file ------------------------------------------------------------------------------------


def write(directory: Path, content: object) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


ALL = {
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1,
    "max_new_tokens": 99,
}  # fmt: skip
AS_PARAMS = {name: value for name, value in ALL.items() if name != "max_new_tokens"} | {
    "max_tokens": 99
}


@pytest.mark.parametrize(
    ("content", "source", "override", "expected"),
    [
        (ALL, "auto", None, AS_PARAMS),
        (ALL | {"do_sample": False, "bos_token_id": 3}, "auto", {}, AS_PARAMS),
        (ALL, "vllm", None, {}),
        (ALL, None, None, {}),
        (ALL, None, {"top_p": 0.5, "max_new_tokens": 3}, {"top_p": 0.5, "max_tokens": 3}),
        ({"top_k": 5, "top_p": 1}, "auto", {"top_k": None, "min_p": 0}, {"top_p": 1, "min_p": 0}),
        ({"top_k": -1, "temperature": None}, "auto", None, {"top_k": 0}),
        ({}, "auto", None, {}),
    ],
)  # fmt: skip
def test_which_values_are_read(tmp_path: Path, content, source, override, expected):
    defaults = SamplingDefaults.read(Checkpoint.at(write(tmp_path, content)), source, override)
    assert defaults.values == expected
    assert bool(defaults.description) == bool(expected)
    assert ("override_generation_config" in defaults.description) == bool(
        override and any(value is not None for value in override.values())
    )


def test_a_directory_stands_in_for_the_checkpoints_file(tmp_path: Path, monkeypatch):
    own, other = tmp_path / "own", tmp_path / "other"
    shutil.copytree(checkpoint_dir("tiny"), own)
    other.mkdir()
    write(own, {"top_k": 3, "eos_token_id": 7})
    write(other, {"min_p": 0.2, "eos_token_id": [8, 9]})
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (other, str(other), "~/other"):
        defaults = SamplingDefaults.read(Checkpoint.at(own), source)
        assert defaults.values == {"min_p": 0.2}
        assert str(other) in defaults.description
        assert ModelConfig.from_pretrained(own, generation_config=source).eos_token_ids == (
            0,
            8,
            9,
        )
    for source in ("auto", "vllm", None):  # as in vLLM: stop tokens in any case
        assert ModelConfig.from_pretrained(own, generation_config=source).eos_token_ids == (0, 7)
    assert SamplingDefaults.read(Checkpoint.at(tmp_path / "model.gguf"), "auto").values == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": -1}, r"temperature: expected 0 or a number from .*, got -1"),
        ({"top_k": "many"}, r"top_k: expected an integer from 1 to .*, got 'many'"),
        ({"top_p": 1.5}, r"top_p: expected a number in \(0, 1\], got 1.5"),
        ({"min_p": [0.1]}, r"min_p: expected a number from 0 to 1, got \(0.1,\)"),
        ({"repetition_penalty": 0}, r"repetition_penalty: expected a number from 1e-05 to 2, got"),
        ({"max_new_tokens": 0}, r"max_new_tokens: expected an integer >= 1 or None, got 0"),
    ],
)
def test_a_wrong_value_is_one_line_with_file_and_field(tmp_path: Path, content, message):
    with pytest.raises(ConfigError, match=rf"generation_config.json: {message}") as error:
        SamplingDefaults.read(Checkpoint.at(write(tmp_path, content)), "auto")
    assert "\n" not in str(error.value)
    assert SamplingDefaults.read(Checkpoint.at(tmp_path), "vllm").values == {}
    with pytest.raises(ConfigError, match=rf"^override_generation_config: {message}"):
        SamplingDefaults.read(Checkpoint.at(tmp_path), None, content)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_config": "/nowhere"}, "generation_config: expected 'auto', 'vllm', None or"),
        ({"generation_config": 3}, "generation_config: expected 'auto', 'vllm', a director"),
        ({"generation_config": ""}, "generation_config: expected 'auto', 'vllm', a director"),
        ({"generation_config": "~no-such-user"}, "generation_config: expected a readable "),
        ({"override_generation_config": 3}, "override_generation_config: expected a dict or No"),
        (
            {"override_generation_config": {"topk": 3}},
            "override_generation_config: expected some of temperature, top_k, top_p, min_p, "
            "repetition_penalty, max_new_tokens; got ['topk']",
        ),
    ],
)  # fmt: skip
def test_a_wrong_argument_of_llm_is_one_line(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        LLM("tiny", device="cpu", **options)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
