"""Hundreds of requests through one small engine: no leak, no effect of other requests."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from mrv1 import LLM, SamplingParams
from tests.engine.test_llm import random_prompts
from tests.models.families import tiny_checkpoint

NUM_KINDS = 24
NUM_REQUESTS = 400


def num_live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


@pytest.mark.slow
def test_a_long_run_in_a_small_pool_leaks_nothing_and_changes_no_output(tmp_path):
    """Joins, aborts, stops, chunked prefill and preemption, in float64 so that no tie can flip."""
    tiny_checkpoint(tmp_path, "qwen3", sliding_window=24, use_sliding_window=True)
    source = random.Random(0)
    prompts = random_prompts(tuple(source.randint(1, 90) for _ in range(NUM_KINDS)), seed=1)
    params = [
        SamplingParams(
            temperature=source.choice([0.0, 1.0]),
            top_k=source.choice([0, 10]),
            seed=index,
            max_tokens=source.randint(1, 30),
            stop_token_ids=[source.randrange(160)],
        )
        for index in range(NUM_KINDS)
    ]
    options = {"dtype": "float64", "device": "cpu", "num_kv_blocks": 12}
    with LLM(str(tmp_path), **options) as llm:
        alone = [
            llm.generate(prompt, prompt_params)[0].outputs[0]
            for prompt, prompt_params in zip(prompts, params, strict=True)
        ]

    with LLM(str(tmp_path), max_num_seqs=6, max_num_batched_tokens=48, **options) as llm:
        kinds: dict[str, int] = {}
        llm.generate(prompts[0], params[0])
        tensors_after_warm_up = num_live_tensors()  # idle after a decode, as at the end
        num_finished = num_aborted = 0
        while len(kinds) < NUM_REQUESTS or llm.has_unfinished_requests():
            while len(kinds) < NUM_REQUESTS and source.random() < 0.5:
                kind = source.randrange(NUM_KINDS)
                kinds[llm.add_request(prompts[kind], params[kind])] = kind
            if kinds and source.random() < 0.02:
                llm.abort(source.choice(list(kinds)))
            for output in llm.step():
                got, expected = output.outputs[0], alone[kinds[output.request_id]]
                assert output.error is None
                assert got.token_ids == expected.token_ids[: len(got.token_ids)]
                if output.finished:
                    num_finished += 1
                    num_aborted += got.finish_reason == "abort"
                    if got.finish_reason != "abort":
                        assert got == expected
            if llm.metrics()["num_steps"] == 50:
                tensors_after_warm_up = num_live_tensors()
        metrics = llm.metrics()
        assert num_finished == NUM_REQUESTS
        assert num_aborted > 0
        assert metrics["num_preemptions"] > 0
        assert metrics["num_free_blocks"] == 12
        assert num_live_tensors() <= tensors_after_warm_up
