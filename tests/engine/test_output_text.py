"""Where an output's text begins and ends: sentencepiece's spaces, stop tokens, eos tokens.

The oracle of a text is ``tokenizers``: prompt and output decoded as one text.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mrv1 import LLM, AsyncLLM, SamplingParams
from tests.engine.soak import Phrase
from tests.models.families import tiny_checkpoint
from tests.models.tokenizer_families import sentencepiece

WORDS = ("\u2581hello", "\u2581world", "hello", "\u2581h")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)
EOS, OTHER_EOS = "<|im_end|>", "</s>"
"""The tokenizer's eos_token, and the one of config.json."""


def write(path: Path, tokenizer: Tokenizer) -> str:
    size, other = tokenizer.get_vocab_size(), tokenizer.token_to_id(OTHER_EOS)
    tiny_checkpoint(path, "llama", vocab_size=size, eos_token_id=other)
    (path / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": "<s>",
        "eos_token": EOS,
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return sentencepiece(WORDS)


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer) -> str:
    return write(tmp_path_factory.mktemp("sentencepiece"), tokenizer)


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, device="cpu", num_kv_blocks=64) as llm:
        yield llm


def says(tokenizer: Tokenizer, *tokens: str, **options: Any) -> SamplingParams:
    """Return parameters of a request whose output is ``tokens``."""
    ids = tuple(map(tokenizer.token_to_id, tokens))
    return SamplingParams(structured_output=Phrase(ids), max_tokens=len(ids), **options)


SAID = ("\u2581world", "\u2581", "<0xE4>", "<0xBD>", "<0xA0>", "hello", "\u2581hello")


@pytest.mark.parametrize(
    "prompt",
    ["hello", "hello ", "", {"prompt_token_ids": [1, 4, 260]}, {"prompt_token_ids": [4]}, "chat"],
)
@pytest.mark.parametrize("skip", [True, False])
def test_prompt_and_text_are_the_text_of_all_tokens(llm, tokenizer, prompt, skip):
    params = says(tokenizer, *SAID, n=2, skip_special_tokens=skip)
    if prompt == "chat":
        parts = list(llm.stream_chat([{"role": "user", "content": "hello"}], params))
    else:
        parts = list(llm.stream(prompt, params))
    final = parts[-1]
    begins = tokenizer.decode([*final.prompt_token_ids], skip_special_tokens=skip)
    whole = tokenizer.decode(
        [*final.prompt_token_ids, *final.outputs[0].token_ids], skip_special_tokens=skip
    )
    for index in range(2):
        assert begins + final.outputs[index].text == whole
        texts = [part.outputs[index].text for part in parts]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        assert not any("\ufffd" in text for text in texts)


def test_async_outputs_continue_the_prompt(model, tokenizer):
    async def last() -> str:
        async with AsyncLLM(model, device="cpu", num_kv_blocks=64) as engine:
            outputs = [each async for each in engine.generate("hello", says(tokenizer, *SAID))]
            return outputs[-1].outputs[0].text

    assert asyncio.run(last()) == " world \u4f60hello hello"


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (" world", "", " world"),
        ("world", " ", "world"),
        ("hello world", " world hello", None),  # "hello" is the prompt's
        ("o w", " world hello", None),
        ("d h", " worl", "d h"),
    ],
)
def test_a_stop_text_has_its_space_and_is_not_sought_in_the_prompt(
    llm, tokenizer, stop, text, reason
):
    params = says(tokenizer, "\u2581world", "\u2581hello", stop=stop)
    for part in llm.stream("hello", params):
        (output,) = part.outputs
        assert text.startswith(output.text)
    assert (output.text, output.stop_reason) == (text, reason)


def test_a_choice_keeps_its_space(llm):
    pytest.importorskip("llguidance", reason="not run: needs the extra 'structured'")
    from mrv1.integrations.llguidance import StructuredOutputsParams

    for choice in (" hello world", "hello world"):
        form = StructuredOutputsParams(choice=[choice])
        params = SamplingParams(max_tokens=40, structured_outputs=form)
        (output,) = llm.generate("hello", params)[0].outputs
        assert (output.text, output.finish_reason) == (choice, "stop")


# --- end-of-sequence and stop tokens -------------------------------------------------------------


@pytest.mark.parametrize("end", [EOS, OTHER_EOS])
def test_the_eos_of_the_tokenizer_ends_an_output_as_that_of_the_config(llm, tokenizer, end):
    tokens = ("\u2581hello", end, "\u2581world", end)
    ids = [*map(tokenizer.token_to_id, tokens)]

    def run(**options: Any) -> tuple[list[int], str, str | None, object]:
        params = says(tokenizer, *tokens, **options)
        (output,) = llm.generate("hello", params)[0].outputs
        return [*output.token_ids], output.text, output.finish_reason, output.stop_reason

    assert run() == (ids[:2], " hello", "stop", None)
    assert run(skip_special_tokens=False) == (ids[:2], " hello", "stop", None)
    included = run(skip_special_tokens=False, include_stop_str_in_output=True)
    assert included == (ids[:2], f" hello{end}", "stop", None)
    assert run(include_stop_str_in_output=True) == (ids[:2], " hello", "stop", None)
    shown = run(ignore_eos=True, skip_special_tokens=False)
    assert shown == (ids, f" hello{end} world", "stop", None)  # the grammar ends at its last token
    allowed = SamplingParams(
        allowed_token_ids=[ids[0], ids[1]], logit_bias={ids[1]: 100}, temperature=0, max_tokens=9
    )
    (late,) = llm.generate("hello", replace(allowed, min_tokens=3))[0].outputs
    assert [*late.token_ids] == [ids[0]] * 3 + [ids[1]]


def test_a_grammar_may_end_with_the_eos_of_the_tokenizer(llm, tokenizer):
    pytest.importorskip("llguidance", reason="not run: needs the extra 'structured'")
    from mrv1.integrations.llguidance import StructuredOutputsParams

    eos = tokenizer.token_to_id(EOS)
    params = SamplingParams(
        max_tokens=9,
        logit_bias={eos: 100, tokenizer.token_to_id("hello"): 50},
        structured_outputs=StructuredOutputsParams(choice=["hello"]),
    )
    (output,) = llm.generate("hello", params)[0].outputs
    assert output.token_ids[-1] == eos
    assert output.text == "hello"


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_the_text_has_its_stop_token_if_asked(llm, tokenizer, include, streams):
    """As in vLLM; a special token is text only without ``skip_special_tokens``."""
    for end, skip in (("\u2581world", True), ("\u2581world", False), ("<|im_start|>", False)):
        params = says(
            tokenizer,
            *("\u2581hello", end, "\u2581world"),
            stop_token_ids=[tokenizer.token_to_id(end)],
            include_stop_str_in_output=include,
            skip_special_tokens=skip,
        )
        outputs = llm.stream("hello", params) if streams else llm.generate("hello", params)
        (output,) = [*outputs][-1].outputs
        text = " hello" + (end.replace("\u2581", " ") if include else "")
        assert (output.text, output.stop_reason) == (text, tokenizer.token_to_id(end))
        assert len(output.token_ids) == 2


def test_an_eos_token_outside_of_the_models_vocabulary_ends_nothing(tmp_path, tokenizer):
    path = Path(write(tmp_path, tokenizer))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<new>"}))
    with LLM(str(path), device="cpu", num_kv_blocks=64) as llm:
        assert llm.get_tokenizer().eos_token_id == tokenizer.get_vocab_size()
        assert llm.engine.eos_token_ids == (tokenizer.token_to_id(OTHER_EOS),)
        params = SamplingParams(max_tokens=3, min_tokens=2, temperature=0)
        assert len(llm.generate("hello", params)[0].outputs[0].token_ids) >= 2
