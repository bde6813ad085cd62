"""Two GPUs give what a CPU gives, with everything that an engine does between and within steps.

In float32, which rounds too little to flip a choice of a trained model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrv1 import LLM, SamplingParams
from mrv1.config import checkpoint_dir
from mrv1.engine.outputs import RequestOutput
from mrv1.multimodal import MultimodalItem
from mrv1.runner import EachRank
from tests.rank_helpers import Evens, Shift, writing

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_only, pytest.mark.multi_gpu(2)]

TEXTS = ["ROMEO: What light", "JULIET: Good night, good night!", "The king is " * 12]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def make_llm(size: int, **options: object) -> LLM:
    """Return an engine of two GPUs, or of one rank on a CPU, the oracle."""
    settings = {
        "dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 4, "max_model_len": 512,
        "max_num_batched_tokens": 64, "use_tqdm_on_load": False,
    }  # fmt: skip
    device = "cpu" if size == 1 else "cuda"
    return LLM("tiny", device=device, tensor_parallel_size=size, **(settings | options))


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LLM, LLM]]:
    with make_llm(1) as one, make_llm(2) as several:
        yield one, several


def told(outputs: list[RequestOutput]) -> list[object]:
    """Return the tokens of outputs, and the ids of their log-probabilities."""
    return [
        (
            str(output.error),
            output.outputs[0].token_ids,
            [sorted(each) for each in output.outputs[0].logprobs or ()],
        )
        for output in outputs
    ]


def check_equal(
    pair: tuple[LLM, LLM], prompts: list, params: SamplingParams | list[SamplingParams] = GREEDY
) -> None:
    one, several = pair
    expected = told(one.generate(prompts, params, use_tqdm=False))
    assert told(several.generate(prompts, params, use_tqdm=False)) == expected
    assert all(error == "None" for error, *_ in expected)


def test_tokens_log_probabilities_edits_and_grammars(pair):
    params = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=1),
        SamplingParams(temperature=0.8, seed=3, max_tokens=12, top_p=0.9, min_p=0.01),
        SamplingParams(
            temperature=0, max_tokens=12, structured_output=Evens(), repetition_penalty=1.2
        ),
    ]
    check_equal(pair, TEXTS, params)
    check_equal(pair, TEXTS, params)  # with cached prefixes
    one, several = pair
    assert several.metrics()["prefix_hit_tokens"] == one.metrics()["prefix_hit_tokens"] > 0


def test_features(pair):
    """They get memory with the first item, and graphs are captured again on both GPUs."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 256, generator=generator) * 0.02
    prompt = {
        "prompt_token_ids": [5] * 40,
        "multimodal": [MultimodalItem(features=rows, start=7)],
    }
    check_equal(pair, [prompt, TEXTS[0], prompt])


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_new_weights(pair, level):
    _, several = pair
    held = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
    weights = load_file(Path(checkpoint_dir("tiny")) / "model.safetensors")
    for llm in pair:
        llm.sleep(level)
        llm.wake_up(["weights"])
        llm.wake_up()
        if level == 2:
            llm.update_weights({name: tensor.cuda(1) for name, tensor in weights.items()})
    check_equal(pair, TEXTS)
    changed = {n: t * 1.25 for n, t in weights.items() if ".layers.2.mlp" in n}
    for new in (changed, {n: weights[n] for n in changed}):
        for llm in pair:
            llm.update_weights(new, partial=True)
        check_equal(pair, TEXTS)
    assert several.kv_report()["total_bytes"] == pair[0].kv_report()["total_bytes"]
    after = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
    assert all(abs(a - b) < 256 << 20 for a, b in zip(held, after, strict=True))


def test_each_gpu_has_a_listener(pair, tmp_path):
    heard = []
    for llm in pair:
        folder = tmp_path / str(len(heard))
        folder.mkdir()
        llm.reset_prefix_cache()
        llm.set_kv_listener(EachRank(partial(writing, folder)))
        llm.generate(TEXTS[:1], GREEDY, use_tqdm=False)
        llm.set_kv_listener(None)
        files = sorted(folder.iterdir())
        heard.append(sorted(line for file in files for line in file.read_text().split("\n")))
        assert len(files) == len(heard)
    numbers = [[[*map(float, line.split())] for line in lines if line] for lines in heard]
    torch.testing.assert_close(*map(torch.tensor, numbers), rtol=1e-3, atol=1e-2)


def test_custom_processors():
    prompts = [[5, 9, 23, 41, 77] * 6, [11] * 20, [7, 8, 9, 7, 8, 9, 7]]
    params = [
        GREEDY,
        SamplingParams(temperature=0, top_k=77, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=3, max_tokens=12),
    ]
    one, several = (make_llm(size, logits_processors=[Shift()]) for size in (1, 2))
    with one, several:
        check_equal((one, several), prompts, params)


def test_a_processor_that_raises_at_the_start_ends_the_start():
    """It is called for the largest step; no request is there to fail."""
    shift = Shift()
    shift.fails_at = 1
    with pytest.raises(RuntimeError, match=r"Shift\.apply: KeyError\('out of luck'\)"):
        make_llm(2, logits_processors=[shift])
