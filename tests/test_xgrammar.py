"""Grammars by xgrammar: Python's own parsers accept every output, with any other option."""

from __future__ import annotations

import json
import re

import pytest
from transformers import AutoTokenizer

from mrv1 import LLM, RequestError, SamplingParams
from mrv1.config import checkpoint_dir

pytest.importorskip("xgrammar", reason="not run: needs the extra 'structured'")

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
