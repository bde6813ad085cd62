"""``vllm serve`` answers OpenAI's own client: with mrv1's worker, on a GPU also with its backend.

Every generated token is checked against transformers: it is a best one after the tokens before it,
or at most ``LEAD`` worse, which is what rounding can do.
"""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM's Python files: make full-vllm", allow_module_level=True)

import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrv1.config import checkpoint_dir
from tests.integrations.vllm.server import vllm_server
from tests.integrations.vllm.serving import NO_WHOLE_VLLM

TINY = str(checkpoint_dir("tiny"))
ON_GPU = torch.cuda.is_available()
DTYPE, LEAD = ("bfloat16", 0.25) if ON_GPU else ("float32", 1e-4)
COMMON = (
    "--served-model-name", "tiny", "--dtype", DTYPE, "--max-model-len", "512",
    "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--gpu-memory-utilization", "0.3",
    "--chat-template", "{% for message in messages %}{{ message.content }}{% endfor %}",
)  # fmt: skip
DOORS = {
    "worker": (
        "--worker-cls", "mrv1.integrations.vllm.Worker",
        "--logits-processors", "mrv1.integrations.vllm:RequestCheck",
    ),
    "backend": ("--attention-backend", "CUSTOM"),
}  # fmt: skip
ON_CPU = ("--num-gpu-blocks-override", "256", "--block-size", "16")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow, pytest.mark.gpu]


@pytest.fixture(
    scope="module", params=["worker", pytest.param("backend", marks=pytest.mark.gpu_only)]
)
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if ON_GPU and NO_WHOLE_VLLM:
        pytest.skip(NO_WHOLE_VLLM)
    options = [*COMMON, *DOORS[request.param], *([] if ON_GPU else ON_CPU)]
    folder = tmp_path_factory.mktemp("server")
    with vllm_server(folder, TINY, *options, on_cpu=not ON_GPU) as address:
        yield address


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


IDS = {"return_token_ids": True}


class Model:
    """transformers' model, and the tokenizer."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(TINY)

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Return the log-probabilities after each token, ``[tokens, vocabulary]``."""
        return self.model(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    def check_greedy(self, prompt: str, token_ids: list[int], text: str) -> None:
        """Raise unless the tokens are the text, and each is a best one, or nearly."""
        assert self.tokenizer.decode(token_ids) == text
        before = self.tokenizer.encode(prompt)
        found = self.logprobs([*before, *token_ids])[len(before) - 1 : -1]
        chosen = found.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        assert (found.amax(1) - chosen).max() <= LEAD


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def test_completions(client: openai.OpenAI, model: Model):
    prompts = ["ROMEO:", "JULIET:\nO "]
    found = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=20, temperature=0, extra_body=IDS
    )
    assert [choice.finish_reason for choice in found.choices] == ["length"] * 2
    for prompt, choice in zip(prompts, found.choices, strict=True):
        model.check_greedy(prompt, choice.token_ids, choice.text)
    assert found.usage.completion_tokens == 40
    stopped = client.completions.create(
        model="tiny", prompt="ROMEO:", max_tokens=100, temperature=0, stop=["\n"]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert found.choices[0].text.startswith(stopped.choices[0].text)
    options = {"prompt": "ROMEO:", "max_tokens": 8, "n": 3, "temperature": 1, "seed": 7}
    first, second = (
        [one.text for one in client.completions.create(model="tiny", **options).choices]
        for _ in range(2)
    )
    assert len({*first}) == 3
    assert first == second or ON_GPU  # a draw's logits depend on the batch there


def test_chat_and_its_stream(client: openai.OpenAI, model: Model):
    messages = [{"role": "user", "content": "ROMEO:"}]
    options = {
        "model": "tiny", "messages": messages, "max_tokens": 16, "temperature": 0,
        "extra_body": IDS,
    }  # fmt: skip
    found = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    (choice,) = found.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    model.check_greedy("ROMEO:", choice.token_ids, choice.message.content)
    assert len(choice.logprobs.content) == 16
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage.completion_tokens == 16
    text = "".join(each.choices[0].delta.content or "" for each in chunks[:-1])
    parts = [each.choices[0] for each in chunks[1:-1]]  # the first one has the role alone
    token_ids = [token for part in parts for token in part.token_ids]
    model.check_greedy("ROMEO:", token_ids, text)


def test_log_probabilities(client: openai.OpenAI, model: Model):
    found = client.completions.create(
        model="tiny", prompt="JULIET:\n", max_tokens=12, temperature=0, logprobs=3,
        extra_body=IDS,
    )  # fmt: skip
    (choice,) = found.choices
    prompt = model.tokenizer.encode("JULIET:\n")
    expected = model.logprobs([*prompt, *choice.token_ids])[len(prompt) - 1 : -1]
    for row, token, logprob, top in zip(
        expected, choice.token_ids, choice.logprobs.token_logprobs,
        choice.logprobs.top_logprobs, strict=True,
    ):  # fmt: skip
        assert logprob == pytest.approx(row[token].item(), abs=LEAD)
        best = sorted(top.values(), reverse=True)[:3]
        assert best == pytest.approx(row.topk(3).values.tolist(), abs=LEAD)


def test_grammars(client: openai.OpenAI):
    pattern = r"[A-Z]{3}: [a-z ]{5,20}\."
    for structured, expected in (
        ({"regex": pattern}, pattern),
        ({"choice": ["to be", "not to be"]}, "(not )?to be"),
    ):
        found = client.completions.create(
            model="tiny", prompt="ROMEO:", max_tokens=64, temperature=0,
            extra_body={"structured_outputs": structured},
        )  # fmt: skip
        assert re.fullmatch(expected, found.choices[0].text)


def counted(server: str, name: str) -> float:
    """Return the sum of the values of a metric, whose name and labels match ``name``."""
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    values = re.findall(rf"^vllm:{name} (\S+)$", text, re.MULTILINE)
    assert values
    return sum(map(float, values))


def test_a_cancelled_stream_ends_its_request(server: str, client: openai.OpenAI):
    unfinished, whole = r"num_requests_(?:running|waiting)\{.*\}", r'.*finished_reason="length".*'
    before = counted(server, whole)
    stream = client.completions.create(
        model="tiny", prompt="ROMEO:", max_tokens=500, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(stream)
    stream.close()  # at once: a busy machine may take long until the server knows
    end = time.monotonic() + 60
    while counted(server, unfinished) and time.monotonic() < end:
        time.sleep(0.2)
    assert counted(server, unfinished) == 0
    assert counted(server, whole) == before
    assert client.completions.create(model="tiny", prompt="ROMEO:", max_tokens=2).choices[0].text


def test_a_request_that_mrv1_cannot_serve_is_refused_alone(request: Any, client: openai.OpenAI):
    if "backend" in request.node.name:
        pytest.skip("vLLM's own worker serves it")
    with pytest.raises(openai.BadRequestError, match="repetition_penalty"):
        client.completions.create(
            model="tiny", prompt="ROMEO:", extra_body={"repetition_penalty": 3.0}
        )
    assert client.completions.create(model="tiny", prompt="ROMEO:", max_tokens=2).choices[0].text


def test_32_clients_at_once(server: str, model: Model):
    words = model.tokenizer.decode(model.tokenizer.encode("ROMEO:") * 8)
    prompts = [f"{words[:length]} Act {length}\n" for length in range(1, 33)]

    async def ask(prompt: str) -> tuple[list[int], str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:
            stream = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True,
                extra_body=IDS,
            )  # fmt: skip
            parts = [chunk.choices[0] async for chunk in stream]
        token_ids = [token for part in parts for token in part.token_ids or ()]
        return token_ids, "".join(part.text for part in parts)

    async def ask_all() -> list[tuple[list[int], str]]:
        return await asyncio.gather(*map(ask, prompts))

    for prompt, (token_ids, text) in zip(prompts, asyncio.run(ask_all()), strict=True):
        assert len(token_ids) == 12
        model.check_greedy(prompt, token_ids, text)
