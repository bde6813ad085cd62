"""Any bytes as a line of ``mrv1 generate --input``: the line fails alone, or is a request."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrv1 import LLM, RequestError, SamplingParams
from mrv1.cli.batch import KEYS, parse_lines, read_input, run_batch
from mrv1.cli.report import Usage

DEFAULTS = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}
GOOD = b'{"prompt_token_ids": [5, 6]}'


def _nested(opening: str, depth: int, closing: str) -> str:
    return opening * depth + "1" + closing * depth


DEPTHS = [3, 100, 330, 480, 600, 900, 980, 20_000]
ATOMS = [
    *("null", "true", "false", "0", "1", "-1", "2", "0.5", "1e999", "-1e999", "NaN", "-Infinity"),
    *("9" * 30, "-" + "9" * 4000, "9" * 5000, "1" + "0" * 400, "1e-999", "[]", "{}", '""', '"x"'),
    *('"\\ud800"', '"\\u0000"', '"' + "a" * 5000 + '"', '"' + "9" * 5000 + '"', "[[]]"),
    "[5, 160]",
    *('{"5": 1}', '{"5": 1, "5": 2}', '{"05": 1, "5": 2}', '{"\\ud800": 1}', '{"-1": 1}'),
    *('{"%s": 1}' % ("9" * digits) for digits in (30, 4000, 5000)),
    *(_nested("[", depth, "]") for depth in DEPTHS),
    *(_nested('{"5":', depth, "}") for depth in DEPTHS),
]  # fmt: skip
values = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
    max_leaves=4,
)


def _objects(names: list[str]) -> st.SearchStrategy[str]:
    """Draw JSON objects with these names, sometimes with the same name twice."""
    member = st.builds(lambda name, value: f'"{name}": {value}', st.sampled_from(names), values)
    return st.lists(member, max_size=3).map(lambda members: f"{{{', '.join(members)}}}")


PARAMS = [*(field.name for field in fields(SamplingParams)), "self", "unknown", "\\ud800"]
requests = st.builds(
    lambda params: f'{{"prompt_token_ids": [5], "sampling_params": {params}}}', _objects(PARAMS)
)
texts = st.one_of(requests, _objects([*KEYS, "unknown"]), values)
lines = st.one_of(
    texts.map(str.encode),
    texts.map(lambda text: text.encode("utf-8-sig")),
    texts.map(lambda text: text.encode("utf-16").replace(b"\n", b"").replace(b"\r", b"")),
    st.binary(max_size=40).map(lambda raw: raw.replace(b"\n", b"").replace(b"\r", b"")),
    st.sampled_from([b"", b" \t", b"\xef\xbb\xbf", b'{"prompt": "\xff"}', b"\x00" * 100]),
)


@pytest.fixture(scope="module")
def llm(checkpoint: str) -> Iterator[LLM]:
    with LLM(checkpoint, device="cpu", num_kv_blocks=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def good_tokens(llm: LLM) -> list[int]:
    return list(llm.generate([[5, 6]], SamplingParams(**DEFAULTS))[0].outputs[0].token_ids)


def _check(llm: LLM, good_tokens: list[int], folder: Path, odd: list[bytes]) -> list[str | None]:
    """Run odd lines between two good lines; return each nonblank odd line's error or None."""
    source, target = folder / "in.jsonl", io.StringIO()
    source.write_bytes(b"\n".join([GOOD, *odd, GOOD]))
    errors = run_batch(llm, parse_lines(read_input(source), DEFAULTS), target.write, Usage(llm))
    records = [json.loads(line) for line in target.getvalue().splitlines()]
    asked = [number for number, line in enumerate(odd, start=2) if line.strip()]
    assert [record["line"] for record in records] == [1, *asked, len(odd) + 2]
    assert records[0]["token_ids"] == records[-1]["token_ids"] == good_tokens
    assert [record["line"] for record in records if "error" in record] == list(errors)
    for record in records:
        assert ("error" in record) != ("token_ids" in record or "outputs" in record)
    for error in errors.values():
        assert isinstance(error, RequestError)
        message = str(error)
        message.encode("utf-8")
        assert len(message) < 1000
        assert "\n" not in message
    return [record.get("error") for record in records[1:-1]]


@pytest.mark.parametrize("name", PARAMS)
def test_no_value_of_a_parameter_affects_other_lines(
    llm: LLM, good_tokens: list[int], tmp_path: Path, name: str
):
    odd = [
        f'{{"prompt_token_ids": [5], "sampling_params": {{"{name}": {value}}}}}' for value in ATOMS
    ]
    _check(llm, good_tokens, tmp_path, [line.encode() for line in odd])


@pytest.mark.parametrize("name", [*KEYS, "unknown", "\\ud800"])
def test_no_value_of_a_key_affects_other_lines(
    llm: LLM, good_tokens: list[int], tmp_path: Path, name: str
):
    odd = [f'{{"{name}": {value}}}' for value in ATOMS]
    odd += [f'{{"prompt_token_ids": [5], "{name}": {value}}}' for value in ATOMS]
    _check(llm, good_tokens, tmp_path, [line.encode() for line in odd])


@pytest.mark.parametrize(
    "before", ['"request_id": ', '"prompt_token_ids": ', '"sampling_params": {"stop": ']
)
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"5": ', "}")])
def test_values_nested_to_the_recursion_limit_fail_alone(
    llm: LLM, good_tokens: list[int], tmp_path: Path, before: str, opening: str, closing: str
):
    """Near the recursion limit a value can be read, but not always printed."""
    depths = range(sys.getrecursionlimit() - 120, sys.getrecursionlimit())
    odd = [
        f"{{{before}{_nested(opening, depth, closing)}{'}' * before.count('{')}}}"
        for depth in depths
    ]
    errors = _check(llm, good_tokens, tmp_path, [line.encode() for line in odd])
    assert all(errors)


def test_an_error_names_a_few_of_many_unknown_parameters(
    llm: LLM, good_tokens: list[int], tmp_path: Path
):
    names = ", ".join(f'"name_{index}": 1' for index in range(20_000))
    line = f'{{"prompt_token_ids": [5], "sampling_params": {{{names}}}}}'
    (error,) = _check(llm, good_tokens, tmp_path, [line.encode()])
    assert error is not None
    assert error.endswith(", ...")
    assert error.count("name_") == 8


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(odd=st.lists(lines, min_size=1, max_size=5))
def test_other_lines_complete_whatever_a_line_contains(
    llm: LLM, good_tokens: list[int], tmp_path: Path, odd: list[bytes]
):
    _check(llm, good_tokens, tmp_path, odd)
