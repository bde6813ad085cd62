"""``mrv1 generate --input``: every line gives a record; an invalid line fails no other."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mrv1 import LLM, ConfigError, RequestError, SamplingParams
from mrv1.cli import app
from mrv1.cli.batch import parse_lines, read_input, run_batch
from mrv1.cli.report import Usage
from tests.cli.conftest import Mrv1

GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
OPTIONS = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos", "--num-kv-blocks", "16")


def _run(
    mrv1: Mrv1, folder: Path, model: str, lines: list[str], *options: str
) -> tuple[int, list[dict[str, Any]], str]:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(lines), encoding="utf-8")
    result = mrv1(
        "generate", "--model", model, "--device", "cpu", "--input", source, "--output", target,
        *OPTIONS, *options,
    )  # fmt: skip
    assert result.stdout == ""
    records = [json.loads(line) for line in target.read_text("utf-8").splitlines()]
    return result.exit_code, records, result.stderr


def test_results_equal_the_engines_in_the_order_of_the_lines(
    mrv1: Mrv1, checkpoint: str, tmp_path: Path
):
    prompts = [[5, 6, 7], [8], [9] * 40]
    lengths = [20, 1, 3]  # they do not finish in this order
    lines = [
        json.dumps({"prompt_token_ids": p, "sampling_params": {"max_tokens": n}})
        for p, n in zip(prompts, lengths, strict=True)
    ]
    exit_code, records, stderr = _run(mrv1, tmp_path, checkpoint, lines)
    with LLM(checkpoint, device="cpu", num_kv_blocks=32) as llm:
        params = [SamplingParams(**GREEDY | {"max_tokens": n}) for n in lengths]
        expected = llm.generate(prompts, params)
    assert exit_code == 0
    assert [record["line"] for record in records] == [1, 2, 3]
    assert [record["token_ids"] for record in records] == [
        list(output.outputs[0].token_ids) for output in expected
    ]
    assert records[2] == {
        "line": 3,
        "request_id": None,
        "text": "",
        "token_ids": list(expected[2].outputs[0].token_ids),
        "finish_reason": "length",
        "stop_reason": None,
        "num_prompt_tokens": 40,
    }
    assert "3 of 3 requests done" in stderr
    assert "24 tokens in" in stderr
    assert "median time to first token" in stderr


def test_text_prompts_give_text(mrv1: Mrv1, tmp_path: Path):
    exit_code, records, _ = _run(
        mrv1, tmp_path, "tiny", ['{"prompt": "ROMEO:", "request_id": "r"}']
    )
    with LLM("tiny", device="cpu", num_kv_blocks=32) as llm:
        text = llm.generate("ROMEO:", SamplingParams(**GREEDY))[0].outputs[0].text
    assert exit_code == 0
    assert (records[0]["text"], records[0]["request_id"]) == (text, "r")


def test_a_line_may_ask_for_outputs_and_log_probabilities(
    mrv1: Mrv1, checkpoint: str, tmp_path: Path
):
    asks = {"n": 2, "logprobs": 1, "prompt_logprobs": 0, "temperature": 1.0, "max_tokens": 3}
    lines = [
        json.dumps({"prompt_token_ids": [5, 6, 7], "sampling_params": asks | {"seed": 4}}),
        json.dumps(
            {
                "prompt_token_ids": [5, 6],
                "sampling_params": {"logit_bias": {"9": 100}, "max_tokens": 2},
            }
        ),
        json.dumps(
            {
                "prompt_token_ids": [5, 6],
                "sampling_params": {
                    "allowed_token_ids": [9], "logprob_token_ids": [8], "max_tokens": 1
                },
            }
        ),
    ]  # fmt: skip
    exit_code, (several, biased, only), _ = _run(
        mrv1, tmp_path, checkpoint, lines, "--logprobs-mode", "processed_logprobs"
    )
    assert exit_code == 0
    assert several.keys() == {
        "line", "request_id", "outputs", "prompt_logprobs", "num_prompt_tokens"
    }  # fmt: skip
    first, second = several["outputs"]
    assert first["token_ids"] != second["token_ids"]
    for output in several["outputs"]:
        assert [str(token) in told for token, told in zip(
            output["token_ids"], output["logprobs"], strict=True
        )] == [True] * 3  # fmt: skip
        assert all(
            told.keys() == {"logprob", "rank", "decoded_token"}
            for position in output["logprobs"]
            for told in position.values()
        )
    nothing, *prompt = several["prompt_logprobs"]
    assert nothing is None
    assert [list(position) for position in prompt] == [["6"], ["7"]]
    assert biased["token_ids"] == [9, 9]
    assert only["token_ids"] == [9]
    (position,) = only["logprobs"]
    assert position["9"]["logprob"] == pytest.approx(0, abs=1e-6)
    assert position["8"]["logprob"] is None  # minus infinity


BAD_LINES = [
    ("not json", "expected a JSON object, got invalid JSON"),
    ("[1, 2]", "expected a JSON object, got list"),
    ("[" * 100_000, "expected a JSON object, got invalid JSON"),
    ('{"prompt_token_ids": [1], "text": 1}', r"got ['text']"),
    (
        "{}",
        "prompt: expected a dict with one of ('prompt', 'prompt_token_ids'), and maybe multimodal "
        "or attn_mask_offsets, got keys []",
    ),
    ('{"prompt": "x", "prompt_token_ids": [1]}', "expected a dict with one of"),
    ('{"prompt": "x"}', "prompt: expected token ids, because"),
    ('{"prompt_token_ids": []}', "prompt: expected at least one token, got none"),
    ('{"prompt_token_ids": [160]}', "prompt_token_ids: expected integers in [0, 160), got 160"),
    ('{"prompt_token_ids": [1], "request_id": 3}', "request_id: expected a string, got 3"),
    ('{"prompt_token_ids": [1], "sampling_params": 3}', "sampling_params: expected a JSON object"),
    ('{"prompt_token_ids": [1], "priority": 1}', "priority: expected 0 with scheduling_policy='f"),
    ('{"prompt_token_ids": [1], "fairness_id": 1}', "fairness_id: expected a string of at most"),
    (
        '{"prompt_token_ids": [1], "sampling_params": {"temprature": 1}}',
        "did you mean 'temperature'?",
    ),
    ('{"prompt_token_ids": [1], "sampling_params": {"max_tokens": 0}}', "max_tokens: expected"),
    ('{"prompt_token_ids": [1], "sampling_params": {"self": 0}}', "sampling_params: "),
    (
        '{"prompt_token_ids": [1], "sampling_params": {"structured_outputs": {"rex": "a"}}}',
        "structured_outputs: expected one of json, regex, choice, grammar, json_object, "
        "disable_any_whitespace, disable_additional_properties, whitespace_pattern; got 'rex'",
    ),
    (
        '{"prompt_token_ids": [1], "sampling_params": {"structured_outputs": {"regex": 3}}}',
        "structured_outputs.regex: expected text, got 3",
    ),
    (
        '{"prompt_token_ids": [1], "sampling_params": {"structured_outputs": "a"}}',
        "structured_outputs: expected StructuredOutputsParams or None, got 'a'",
    ),
    ('{"prompt_token_ids": [1], "sampling_params": {"logit_bias": {"x": 1}}}', "keys, got 'x'"),
    (
        '{"prompt_token_ids": [1], "sampling_params": {"logit_bias": {"%s": 1}}}' % ("9" * 5000),
        "logit_bias: expected token ids >= 0 as keys, got '99999",
    ),
    (
        '{"prompt_token_ids": [1], "sampling_params": {"logit_bias": {"9": 1, "09": 2}}}',
        "logit_bias: expected token ids >= 0 as keys, got '09'",
    ),
    (
        '{"prompt_token_ids": [1], "sampling_params": {"logit_bias": {"9": 1, "9": 2}}}',
        "the key '9' comes twice",
    ),
    ('{"prompt_token_ids": [1], "prompt_token_ids": [2]}', "'prompt_token_ids' comes twice"),
    ('{"prompt_token_ids": [1], "sampling_params": {"max_tokens": 600}}', "num_kv_blocks = 16"),
]


GOOD_LINE = '{"prompt_token_ids": [5, 6]}'


def test_a_bad_line_fails_alone_with_its_number(mrv1: Mrv1, checkpoint: str, tmp_path: Path):
    bad = '{"prompt_token_ids": []}'
    lines = [GOOD_LINE, "", bad, GOOD_LINE]
    exit_code, records, stderr = _run(mrv1, tmp_path, checkpoint, lines)
    assert exit_code == 1
    assert [record["line"] for record in records] == [1, 3, 4]  # the blank line is no request
    assert "token_ids" not in records[1]
    assert len(records[0]["token_ids"]) == 8
    assert records[0]["token_ids"] == records[2]["token_ids"]
    assert f"error: line 3: {records[1]['error']}" in stderr
    assert stderr.splitlines()[-1].startswith("2 of 3 requests done")


def test_every_kind_of_bad_line_has_its_error(mrv1: Mrv1, checkpoint: str, tmp_path: Path):
    """Good lines stand between the bad ones: none of them changes a good line's tokens."""
    lines = [line for bad, _ in BAD_LINES for line in (GOOD_LINE, bad)]
    exit_code, records, stderr = _run(mrv1, tmp_path, checkpoint, [*lines, GOOD_LINE])
    assert exit_code == 1
    assert [record["line"] for record in records] == list(range(1, len(lines) + 2))
    good, failed = records[::2], records[1::2]
    assert len(good[0]["token_ids"]) == 8
    assert all(record["token_ids"] == good[0]["token_ids"] for record in good)
    for record, (bad, message) in zip(failed, BAD_LINES, strict=True):
        assert message in record["error"], bad
        assert "token_ids" not in record, bad
        assert f"error: line {record['line']}: {record['error']}" in stderr, bad
    assert stderr.splitlines()[-1].startswith(f"{len(good)} of {len(records)} requests done")


def test_a_null_field_counts_as_absent(mrv1: Mrv1, checkpoint: str, tmp_path: Path):
    """The command line's options then hold, as for a field that is not there."""
    plain = {"prompt_token_ids": [5, 6]}
    nulls = dict.fromkeys(["prompt", "request_id", "sampling_params", "priority", "fairness_id"])
    params = {"max_tokens": None, "temperature": None, "stop": None, "logit_bias": None}
    lines = [
        json.dumps(line) for line in (plain, plain | nulls, plain | {"sampling_params": params})
    ]
    exit_code, records, _ = _run(mrv1, tmp_path, checkpoint, lines)
    assert exit_code == 0
    assert len(records[0]["token_ids"]) == 8
    assert [record["token_ids"] for record in records] == [records[0]["token_ids"]] * 3


def test_lines_have_priorities_and_fairness_ids(mrv1: Mrv1, checkpoint: str, tmp_path: Path):
    plain = {"prompt_token_ids": [5, 6]}
    lines = [json.dumps(plain | more) for more in ({}, {"priority": -3, "fairness_id": "a"})]
    options = ("--scheduling-policy", "priority", "--long-prefill-token-threshold", "1")
    exit_code, records, _ = _run(mrv1, tmp_path, checkpoint, lines, *options)
    assert exit_code == 0
    assert records[0]["token_ids"] == records[1]["token_ids"]


def test_a_dash_is_stdin_and_stdout(checkpoint: str, tmp_path: Path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt_token_ids": [5]}\n\nnot json\n{"prompt_token_ids": [6]}\n')

    def run(source_name: str | Path, target_name: str | Path) -> Result:
        names = ("--input", str(source_name), "--output", str(target_name))
        result = CliRunner().invoke(
            app,
            ["generate", "--model", checkpoint, "--device", "cpu", *OPTIONS, *names],
            input=source.read_bytes(),
        )
        assert result.exit_code == 1
        assert "error: line 3: expected a JSON object" in result.stderr
        return result

    from_files = run(source, target)
    expected = target.read_text()
    assert len(expected.splitlines()) == 3
    assert from_files.stdout == ""
    assert from_files.stderr.endswith(f"2 of 3 requests done, results in {target}\n")
    assert run("-", target).stdout == ""
    assert target.read_text() == expected
    for name in (source, "-"):
        result = run(name, "-")
        assert result.stdout == expected
        assert result.stderr.endswith("2 of 3 requests done, results on stdout\n")


def test_stdin_that_cannot_be_read_is_a_mistake(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ConfigError, match="--input: cannot read stdin: Bad file descriptor"):
        parse_lines(read_input(Path("-")), GREEDY)


def test_text_that_is_no_unicode_fails_alone(mrv1: Mrv1, tmp_path: Path):
    lines = ['{"prompt": "a\\ud800"}', '{"prompt": "ROMEO:"}']
    exit_code, records, _ = _run(mrv1, tmp_path, "tiny", lines)
    assert exit_code == 1
    assert "prompt: expected Unicode text, got a lone surrogate at index 1" in records[0]["error"]
    assert "error" not in records[1]


def test_bytes_that_are_no_utf8_fail_alone(tmp_path: Path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "\xff"}\r\n{"prompt": "x"}\r\n')
    bad, good = parse_lines(read_input(source), GREEDY)
    with pytest.raises(RequestError, match="invalid JSON: 'utf-8' codec"):
        raise bad.error
    assert good.error is None
    assert good.number == 2


def test_a_request_id_used_twice_is_refused(mrv1: Mrv1, checkpoint: str, tmp_path: Path):
    line = '{"prompt_token_ids": [5], "request_id": "a"}'
    exit_code, records, _ = _run(mrv1, tmp_path, checkpoint, [line, line])
    assert exit_code == 1
    assert "error" not in records[0]
    assert "got 'a', which is line 1's too" in records[1]["error"]
    assert [record["request_id"] for record in records] == ["a", "a"]


def test_a_request_that_fails_while_it_runs_keeps_its_tokens(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt_token_ids": [5, 6]}\n')
    with LLM(checkpoint, device="cpu", num_kv_blocks=32) as llm:
        model, steps = llm.engine.runner.model, iter(range(100))
        forward = model.forward

        def broken_later(*args: object) -> object:
            if next(steps) == 2:
                raise RuntimeError("the device fell over")
            return forward(*args)

        monkeypatch.setattr(model, "forward", broken_later)
        target = io.StringIO()
        errors = run_batch(llm, parse_lines(read_input(source), GREEDY), target.write, Usage(llm))
    record = json.loads(target.getvalue())
    assert list(errors) == [1]
    assert record["finish_reason"] == "error"
    assert len(record["token_ids"]) == 2
    assert "the device fell over" in record["error"]


def test_finished_results_survive_an_interruption(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"prompt_token_ids": [5], "sampling_params": {"max_tokens": 2}}\n'
        '{"prompt_token_ids": [6]}\n'
    )
    target = io.StringIO()
    with LLM(checkpoint, device="cpu", num_kv_blocks=32) as llm:
        step, steps = llm.step, iter(range(100))

        def interrupted() -> object:
            if next(steps) == 3:
                raise KeyboardInterrupt
            return step()

        monkeypatch.setattr(llm, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_batch(llm, parse_lines(read_input(source), GREEDY), target.write, Usage(llm))
    (record,) = map(json.loads, target.getvalue().splitlines())
    assert record["line"] == 1
    assert len(record["token_ids"]) == 2


def test_an_empty_file_gives_no_records(mrv1: Mrv1, checkpoint: str, tmp_path: Path):
    exit_code, records, stderr = _run(mrv1, tmp_path, checkpoint, [])
    assert (exit_code, records) == (0, [])
    assert "0 of 0 requests done" in stderr


# --- mistakes in the options ---------------------------------------------------------------------


def _mistake(mrv1: Mrv1, checkpoint: str, *options: str | Path) -> str:
    result = mrv1("generate", "--model", checkpoint, "--device", "cpu", *options)
    assert result.exit_code == 2
    return result.stderr


def test_options_are_checked_before_any_line(mrv1: Mrv1, checkpoint: str, tmp_path: Path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt_token_ids": [5]}\n')
    both = ("--input", source, "--output", target)
    assert "top_p: expected" in _mistake(mrv1, checkpoint, *both, "--top-p", "0")
    assert not target.exists()
    same = ("--input", source, "--output", source)
    assert "--output: expected another file than --input" in _mistake(mrv1, checkpoint, *same)
    missing = ("--input", source, "--output", tmp_path / "no" / "out.jsonl")
    assert "--output: cannot write" in _mistake(mrv1, checkpoint, *missing)
    assert "--input FILE and --output FILE together" in _mistake(mrv1, checkpoint, *both[:2])
    unreadable = ("--input", "/proc/self/mem", "--output", target)
    assert "--input: cannot read '/proc/self/mem': " in _mistake(mrv1, checkpoint, *unreadable)
    assert source.read_text() == '{"prompt_token_ids": [5]}\n'
