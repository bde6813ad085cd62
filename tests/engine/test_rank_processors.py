"""Custom logits processors with several ranks: rank 0 has them, and the others take its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mrv1 import LLM, SamplingParams, StepError
from mrv1.engine.outputs import RequestOutput
from mrv1.runner.ranks import parallel_runner
from tests.models.families import tiny_checkpoint
from tests.rank_helpers import Shift
from tests.thread_ranks import ThreadRanks

VOCAB = 163
PROMPTS = [[5, 9, 23, 41, 77] * 6, [11] * 20, [7, 8, 9, 7, 8, 9, 7]]


def params(top_k: int = 0, **more: object) -> SamplingParams:
    given = {"temperature": 0, "max_tokens": 10, "ignore_eos": True} | more
    return SamplingParams(top_k=top_k, **given)


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Iterator[dict[int, tuple[LLM, Shift]]]:
    path: Path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3", num_attention_heads=8, vocab_size=VOCAB)
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_runner, "Ranks", ThreadRanks)
        for size in (1, 2, 4):
            shift = Shift()
            made[size] = (
                LLM(
                    str(path), device="cpu", dtype="float64", tensor_parallel_size=size,
                    num_kv_blocks=9, max_num_seqs=3, max_num_batched_tokens=24,
                    max_model_len=128, logits_processors=[shift], use_tqdm_on_load=False,
                ),
                shift,
            )  # fmt: skip
    yield made
    for llm, _ in made.values():
        llm.close()


def told(outputs: list[RequestOutput]) -> list[object]:
    return [
        (
            str(output.error).partition(": ")[2],
            output.outputs[0].token_ids,
            [
                {t: each.rank for t, each in told.items()}
                for told in output.outputs[0].logprobs or ()
            ],
        )
        for output in outputs
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_processors_of_rank_0_decide_for_all_ranks(engines, size):
    """They see the whole vocabulary; requests join, are refused, and are preempted."""
    (one, _), (several, shift) = engines[1], engines[size]
    mixture = [
        (PROMPTS[0], params()),
        (PROMPTS[1], params(77, logprobs=2)),
        (PROMPTS[2], params(13)),
        (PROMPTS[2], params(temperature=1.5, seed=3, logprobs=1, prompt_logprobs=1)),
        (PROMPTS[0], params(77, temperature=0.7, seed=5)),
        (PROMPTS[1], params(repetition_penalty=1.4, logit_bias={9: 4.0})),
    ]
    prompts, given = zip(*mixture, strict=True)
    expected = one.generate(list(prompts), list(given))
    got = several.generate(list(prompts), list(given))
    assert told(got) == told(expected)
    assert "Shift.add_request: KeyError('unlucky')" in str(got[2].error)
    first = PROMPTS[1][-1]
    assert got[1].outputs[0].token_ids == tuple(range(first + 1, first + 11))
    assert shift.shapes == {(VOCAB,)}
    assert several.metrics()["num_preemptions"] == one.metrics()["num_preemptions"]


def test_a_processor_that_raises_fails_its_step_alone(engines):
    llm, shift = engines[2]
    expected = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params())]
    shift.fails_at = shift.num_calls + 4
    failed = [each for each in llm.generate(PROMPTS, params()) if each.error is not None]
    assert failed
    for output in failed:
        assert isinstance(output.error, StepError)
        assert not output.error.device_lost
        assert "logits_processors: Shift.apply: KeyError('out of luck')" in str(output.error)
    for _ in range(2):
        assert [e.outputs[0].token_ids for e in llm.generate(PROMPTS, params())] == expected
