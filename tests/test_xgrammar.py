"""Grammars by xgrammar: Python's own parsers accept every output, with any other option."""

from __future__ import annotations

import json
import re

import pytest
from transformers import AutoTokenizer

from mrv1 import LLM, RequestError, SamplingParams, StructuredOutputsParams
from mrv1.config import checkpoint_dir

pytest.importorskip("xgrammar", reason="not run: needs the extra 'structured'")

from mrv1.cli.batch import parse_lines, read_input
from mrv1.integrations.xgrammar import XGrammar

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
PATTERN = r"(yes|no), [a-z]{2,5}( again)?\."


@pytest.fixture(scope="module")
def grammars() -> XGrammar:
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint_dir("tiny")))
    return XGrammar(tokenizer, len(tokenizer))


@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_match_their_grammars(grammars, overlap):
    """Greedy and drawn, batched with requests without a grammar, whose tokens do not change."""
    free = [SamplingParams(temperature=1.0, seed=seed, max_tokens=30) for seed in range(3)]
    bound = [
        SamplingParams(temperature=0, max_tokens=60, structured_output=grammars.regex(PATTERN)),
        SamplingParams(
            temperature=1.0, seed=3, max_tokens=60, structured_output=grammars.regex(PATTERN)
        ),
        SamplingParams(
            temperature=0.8, seed=4, max_tokens=90, top_k=40,
            structured_output=grammars.json_schema(SCHEMA, any_whitespace=False),
        ),
    ]  # fmt: skip
    with LLM("tiny", device="cpu", dtype="float64", num_kv_blocks=64, overlap=overlap) as llm:
        alone = llm.generate(["ROMEO:"] * 3, free)
        mixed = llm.generate(["ROMEO:"] * 6, [*free, *bound])
        metrics = llm.metrics()
    assert metrics["grammar_waits"] > 0
    assert [o.outputs[0].token_ids for o in mixed[:3]] == [o.outputs[0].token_ids for o in alone]
    texts = [output.outputs[0].text for output in mixed[3:]]
    assert [output.outputs[0].finish_reason for output in mixed[3:]] == ["stop"] * 3
    for text in texts[:2]:
        assert re.fullmatch(PATTERN, text)
    person = json.loads(texts[2])
    assert set(person) == {"name", "age"}
    assert len(person["name"]) <= 8
    assert 0 <= person["age"] <= 99


def test_a_grammar_survives_preemption(grammars):
    """The pool is too small: a preempted output continues from the state of its grammar."""
    params = [
        SamplingParams(
            temperature=1.0, seed=seed, max_tokens=60, structured_output=grammars.regex("[ab]{50}")
        )
        for seed in range(4)
    ]
    with LLM("tiny", device="cpu", num_kv_blocks=9, max_num_seqs=4) as llm:
        outputs = llm.generate(["ROMEO:"] * 4, params)
        assert llm.metrics()["num_preemptions"] > 0
    for output in outputs:
        assert re.fullmatch("[ab]{50}", output.outputs[0].text)


def test_a_grammar_that_does_not_compile_is_a_request_error(grammars):
    with pytest.raises(RequestError, match="regex: expected text xgrammar compiles, got"):
        grammars.regex("(")
    with pytest.raises(RequestError, match="json_schema: expected text xgrammar compiles"):
        grammars.json_schema("{")
    with pytest.raises(RequestError, match="ebnf: expected text xgrammar compiles"):
        grammars.ebnf("nothing")
    with pytest.raises(RequestError, match="structured_output: expected a Grammar"):
        SamplingParams(structured_output="{}")


# --- by vLLM's names -----------------------------------------------------------------------------

CHOICES = ["Positive", "Negative", 'a "quoted" word', "two\nlines \\ \u4f60"]
EBNF = 'root ::= "SELECT " column " FROM t"\ncolumn ::= "a" | "b"\n'


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", device="cpu", num_kv_blocks=64) as llm:
        yield llm


@pytest.mark.parametrize(
    ("form", "is_valid"),
    [
        ({"json": {"enum": ["yes", "no", 3]}}, lambda text: json.loads(text) in ("yes", "no", 3)),
        ({"json": '{"type": "integer", "minimum": 10}'}, lambda text: json.loads(text) >= 10),
        ({"regex": PATTERN}, lambda text: re.fullmatch(PATTERN, text) is not None),
        ({"choice": CHOICES}, CHOICES.__contains__),
        ({"choice": CHOICES[2:3]}, CHOICES[2:3].__contains__),
        ({"choice": CHOICES[3:]}, CHOICES[3:].__contains__),
        ({"grammar": EBNF}, lambda text: text in ("SELECT a FROM t", "SELECT b FROM t")),
    ],
)
def test_structured_outputs_follow_their_form(llm, form, is_valid):
    params = SamplingParams(
        temperature=0.7, seed=1, max_tokens=120, n=2,
        structured_outputs=StructuredOutputsParams(**form),
    )  # fmt: skip
    (output,) = llm.generate(["ROMEO:"], params, use_tqdm=False)
    assert output.error is None
    for completion in output.outputs:
        assert completion.finish_reason == "stop"
        assert is_valid(completion.text), completion.text


@pytest.mark.parametrize(
    ("form", "text", "is_valid"),
    [
        ({"json_object": True}, '{"a": [1, null], "b": {}}', True),
        ({"json_object": True}, "[1]", False),
        ({"json": SCHEMA}, '{"name": "a", "age": 7}', True),
        ({"json": json.loads(SCHEMA)}, '{"name": "a", "age": 7}', True),
        ({"json": json.loads(SCHEMA)}, '{"name": "a", "age": 700}', False),
    ],
)
def test_structured_outputs_accept_the_texts_of_their_form(form, text, is_valid):
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint_dir("tiny")))
    matcher = StructuredOutputsParams(**form).compiled(tokenizer, len(tokenizer), None).matcher()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert all(map(matcher.accept, ids)) == is_valid


@pytest.mark.parametrize(
    "form", [{"json": "{"}, {"json": {"a": {1, 2}}}, {"regex": "("}, {"grammar": "no rules"}]
)
def test_text_that_is_no_grammar_fails_its_request_alone(llm, form):
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
    refused, other = llm.generate(
        ["ROMEO:"] * 2, [bad, SamplingParams(max_tokens=3)], use_tqdm=False
    )
    assert isinstance(refused.error, RequestError)
    assert str(refused.error).startswith("structured_outputs: ")
    assert other.error is None
    assert len(other.outputs[0].token_ids) == 3


def test_a_line_of_jsonl_has_structured_outputs_as_an_object(tmp_path):
    file = tmp_path / "prompts.jsonl"
    form = {"choice": ["Positive", "Negative"]}
    file.write_text(json.dumps({"prompt": "a", "sampling_params": {"structured_outputs": form}}))
    (line,) = parse_lines(read_input(file), {})
    assert line.params == SamplingParams(structured_outputs=StructuredOutputsParams(**form))


def test_a_grammar_is_given_by_one_name(grammars):
    form = StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match="structured_outputs: expected None with structured_o"):
        SamplingParams(structured_outputs=form, structured_output=grammars.regex("a"))


def test_the_engines_core_takes_compiled_grammars_only(llm):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(RequestError, match="structured_outputs: expected None, because only LLM"):
        llm._engine.add_request("a", [1, 2], params)
