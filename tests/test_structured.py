"""Grammars by llguidance: Python's own parsers accept every output, with any other option."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mrv1 import LLM, RequestError, SamplingParams, StructuredOutputsParams
from mrv1.config import checkpoint_dir

pytest.importorskip("llguidance", reason="not run: needs the extra 'structured'")

from mrv1.cli.batch import parse_lines, read_input
from mrv1.integrations.llguidance import LLGuidance
from mrv1.integrations.xgrammar import StructuredOutputsParams as former  # noqa: N813

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
def tokenizer():
    return AutoTokenizer.from_pretrained(str(checkpoint_dir("tiny")))


@pytest.fixture(scope="module")
def grammars(tokenizer) -> LLGuidance:
    return LLGuidance(tokenizer, len(tokenizer))


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
            structured_output=grammars.json_schema(SCHEMA, whitespace_pattern=""),
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
    with pytest.raises(RequestError, match="regex: expected text that llguidance compiles, got"):
        grammars.regex("(")
    with pytest.raises(RequestError, match="json: expected a JSON schema, got Expecting"):
        grammars.json_schema("{")
    with pytest.raises(RequestError, match="grammar: expected text that llguidance compiles"):
        grammars.grammar("nothing")
    with pytest.raises(RequestError, match="grammar: expected EBNF, got Rule 'b' not found"):
        grammars.grammar("root ::= b")
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
def test_structured_outputs_accept_the_texts_of_their_form(tokenizer, form, text, is_valid):
    matcher = StructuredOutputsParams(**form).compiled(tokenizer, len(tokenizer), None).matcher()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert all(map(matcher.accept, ids)) == is_valid


# A repetition in EBNF may end anywhere, as in a regular expression.
EBNF_AND_REGEX = [
    ('root ::= [a-z]+ "ing"', "[a-z]+ing"),
    ('root ::=\n  [a-z\\-\\^]*  # "letters" ]\n\n  # and\n  | ("i" |\n "\\-")\n', r"[a-z\-^]*"),
    ('root ::= ("i"? "n"* | "g"){2} ("s"+)?', "(i?n*|g){2}s*"),
    ('root ::= ("s"{2})+', "(s{2})+"),
    ('root ::= w "ing" # the letters too\nw ::= [a-z]*', "[a-z]*ing"),
    ('root ::= ("i" | "in" | "g")* aWord\naWord ::= "ing" | "s"{2,3}', "(i|in|g)*(ing|s{2,3})"),
    ('\n    root ::= a\n\n    a ::= "ing"\n', "ing"),
    ("root ::= . . .", "(?s:.){3}"),
    ('root ::= start | Root\nstart ::= "k"? Root\nRoot ::= "in" "g"', "k?ing"),
    ('root ::= aB a-b A-B\naB ::= "i"\na-b ::= "n" a-b?\nA-B ::= "g"{1,2}', "in+gg?"),
    ('root ::= 1st _2 3{1,2}\n1st ::= "i" # 1st\n_2 ::= "n"\n3 ::= [gi3]', "in[gi]{1,2}"),
    ('root ::= "\\x69\\u006e" [\\x67-\\U00000069] | "\\"s\\\\\\n"', r"in[g-i]|\"s\\\n"),
]
TEXTS = [
    "ing",
    "king",
    "inging",
    "singings",
    "inin",
    "iniing",
    "gss",
    "inss",
    "ssss",
    "ini",
    '"s\\\n',
    "in\n",
]


@pytest.mark.parametrize(("rules", "regex"), EBNF_AND_REGEX)
def test_ebnf_is_read_character_by_character(tokenizer, rules, regex):
    source = StructuredOutputsParams(grammar=rules)
    found = [text for text in TEXTS if accepts(tokenizer, source, text)]
    assert found == [text for text in TEXTS if re.fullmatch(regex, text)]
    assert found


LARK = """
// a statement
start: "SELECT" NAME ("," NAME)* LIMIT?
NAME: /[a-z]+/
LIMIT: " limit " /[0-9]{1,3}/
%ignore " "
"""


@pytest.mark.parametrize(
    ("form", "valid", "invalid"),
    [
        ({"grammar": LARK}, ["SELECT a, b", "SELECT a limit 9"], ["SELECT", "SELECT a limit x"]),
        ({"grammar": 'start: %json {"type": "integer"}'}, ["17"], ["1.5"]),
        ({"regex": "^a/b$"}, ["a/b"], ["a/bb"]),
        ({"regex": r"\d{2}|[^/\n]"}, ["12", "x"], ["123", "/", "\n"]),
        ({"choice": ["a", "ab", "/x/i", "<b>"]}, ["a", "ab", "/x/i", "<b>"], ["b", "/X/i"]),
        ({"choice": [*map(str, range(3000))]}, ["7", "2999"], ["", "3000", "07"]),
        ({"json": {}, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
        ({"json": {}, "whitespace_pattern": "\t"}, ['{"a":\t1}'], ['{"a": 1}']),
        ({"json_object": True, "disable_any_whitespace": True}, ["{}"], ["{ }", "[]"]),
        (
            {"json": {"properties": {"a": {}}}, "disable_additional_properties": True},
            ['{"a": 1}'], ['{"b": 1}'],
        ),
    ],
)  # fmt: skip
def test_forms_and_options(tokenizer, form, valid, invalid):
    source = StructuredOutputsParams(**form)
    assert [text for text in valid if not accepts(tokenizer, source, text)] == []
    assert [text for text in invalid if accepts(tokenizer, source, text)] == []


def accepts(tokenizer, source: StructuredOutputsParams, text: str) -> bool:
    matcher = source.compiled(tokenizer, len(tokenizer), None).matcher()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(map(matcher.accept, [*ids, tokenizer.eos_token_id]))


def test_blanks_do_not_run_to_the_limit(llm):
    """A model that likes nothing better than blanks still writes the object, and ends."""
    tokenizer = llm.get_tokenizer()
    blanks = [token for token in range(len(tokenizer)) if tokenizer.decode([token]).isspace()]
    assert len(blanks) > 3
    schema = {"properties": {"a": {"type": "boolean"}, "b": {"enum": [[], {}]}}}
    schema |= {"type": "object", "required": ["a", "b"], "additionalProperties": False}
    params = SamplingParams(
        temperature=0, max_tokens=200, logit_bias=dict.fromkeys(blanks, 100.0),
        structured_outputs=StructuredOutputsParams(json=schema),
    )  # fmt: skip
    (output,) = llm.generate(["ROMEO:"], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text.count("\n") == 3
    assert json.loads(output.outputs[0].text).keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("root ::= root", "grammar: expected a token that may come next, got none"),
        (
            'root ::= (a | b)*\na ::= [a-z ]+\nb ::= [A-z ]+ | "the" root',
            "got .*[Tt]oo many items",
        ),
        ("root ::= " + " | ".join(f'"a{i}"' for i in range(3000)), "next, got .* max is 2000"),
    ],
)
def test_a_grammar_without_a_next_token_fails_its_request_alone(llm, rules, message):
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=rules), max_tokens=40)
    failed, other = llm.generate(["ROMEO:"] * 2, [bad, SamplingParams(max_tokens=3)])
    assert isinstance(failed.error, RequestError)
    assert re.search(message, str(failed.error))
    assert len(other.outputs[0].token_ids) == 3


def test_masks_and_stops_of_a_larger_vocabulary(tokenizer):
    """Tokens beyond the tokenizer are never allowed; each stop token ends, and none ends twice."""
    size, stops = len(tokenizer) + 70, [0, 7]
    grammar = LLGuidance(tokenizer, size, stop_token_ids=stops).regex("a+")
    mask = np.zeros((size + 31) // 32, dtype=np.int32)
    ids = tokenizer.encode("a", add_special_tokens=False)
    for stop in stops:
        matcher = grammar.matcher()
        assert not matcher.accept(stop)
        assert all(map(matcher.accept, ids))
        matcher.fill_bitmask(mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        texts = {tokenizer.decode([token]) for token in allowed if token not in stops}
        assert {*stops} < {*allowed}
        assert "a" in texts
        assert all(re.fullmatch("a+", text) for text in texts)
        assert matcher.accept(stop)
        assert matcher.is_finished()
        assert not matcher.accept(stop)
        assert not any(map(matcher.accept, ids))


def test_the_bytes_of_sentencepiece_tokens():
    """Byte tokens, spaces, added tokens; a special token is no text, whatever its name."""
    names = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "\u2581a",
    ]
    model = models.BPE(
        {name: i for i, name in enumerate(names)}, [("\u2581", "a")], byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Prepend("\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    fast.add_tokens(["<tool>"])
    source = StructuredOutputsParams(choice=[" a\u00e9<tool>", "</s>"])
    grammar = source.compiled(fast, len(fast), None)
    byte = names.index("<0x00>")
    for ids in (
        ["\u2581a", 0xC3, 0xA9, "<tool>"],
        [0x20, "a", 0xC3, 0xA9, *b"<tool>"],
        [*b"</s>"],
    ):
        tokens = [byte + x if isinstance(x, int) else fast.convert_tokens_to_ids(x) for x in ids]
        assert all(map(grammar.matcher().accept, tokens[:1]))
        matcher = grammar.matcher()
        assert all(map(matcher.accept, tokens))
        assert matcher.accept(fast.eos_token_id)
    assert not grammar.matcher().accept(fast.eos_token_id)


def test_a_tokenizer_whose_bytes_are_not_known_is_refused():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, "a"))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    with pytest.raises(RequestError, match="grammar: expected a byte-level or sentencepiece tok"):
        StructuredOutputsParams(regex="a").compiled(fast, 2, None)
    with pytest.raises(RequestError, match="grammar: expected a tokenizer with an eos token"):
        LLGuidance(PreTrainedTokenizerFast(tokenizer_object=backend), 2)


def test_the_former_module_has_the_class():
    assert former is StructuredOutputsParams


@pytest.mark.parametrize("form", [{"json": "{"}, {"regex": "("}, {"grammar": "no rules"}])
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
        llm.engine.add_request("a", [1, 2], params)
