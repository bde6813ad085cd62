"""On a stand-in GPU, no step of requests has a kernel that the start has not launched.

The steps run kernel by kernel, which on a GPU those do that no graph fits.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from mrv1.device import INTERPRET
from tests.forks import Forks

pytestmark = pytest.mark.skipif(INTERPRET, reason="not run: TRITON_INTERPRET=1 is set")

LIVE = """
import json, sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
import numpy as np
from mrv1 import EngineConfig, SamplingParams
from mrv1.runner import SlotRequest, StepPlan
from mrv1.runner.compile_ahead import KernelSet
from mrv1.runner.compile_child import recording

options, changes, target, num_steps = json.loads(sys.argv[1])
config = EngineConfig(**options)
kernels = KernelSet.of(config, target)
kernels = replace(kernels, model_config=replace(kernels.model_config, **changes))
rng = np.random.default_rng(0)
wants = ({}, {"logprobs": 2}, {"logprobs": 2, "logit_bias": {6: 2.0}}, {"prompt_logprobs": 1})


def some_ranges(num_tokens):
    # Each token sees the later half of the tokens before it.
    end = np.arange(1, num_tokens + 1, dtype=np.int32)
    return np.stack([end // 2, end], axis=1)


def random_plan(step_id, finished, num_groups):
    # Rows of 1 token, and of up to the budget in equal shares of its logarithm.
    budget, query_lens = config.max_num_batched_tokens, []
    for _ in range(rng.integers(1, config.max_num_seqs + 1)):
        longest = min(budget, config.max_model_len - 1)
        if longest:
            is_one = rng.random() < 0.4
            query_lens.append(1 if is_one else int(longest ** rng.random()))
            budget -= query_lens[-1]
    slots = rng.permutation(config.max_num_seqs)[: len(query_lens)].tolist()
    new = []
    for slot, query_len in zip(slots, query_lens):
        computed = int(rng.integers(config.max_model_len - query_len))
        new.append(SlotRequest(
            req_id=str(slot), slot=slot, epoch=step_id, seed=0,
            token_ids=np.full(computed + query_len, 5, dtype=np.int32),
            prompt_len=computed + query_len, num_computed_tokens=computed,
            max_total_tokens=config.max_model_len,
            attn_mask_offsets=some_ranges(computed + query_len) if rng.random() < 0.1 else None,
            sampling_params=SamplingParams(**wants[rng.integers(len(wants))]),
        ))
    blocks = {each.slot: ([0] * -(-each.prompt_len // config.block_size),) for each in new}
    return StepPlan(
        step_id=step_id, req_ids=tuple(map(str, slots)), new=tuple(new), finished=finished,
        new_block_ids={slot: ids * num_groups for slot, ids in blocks.items()},
        slots=np.array(slots, dtype=np.int32),
        epochs=np.full(len(slots), step_id, dtype=np.int32),
        num_scheduled_tokens=np.array(query_lens, dtype=np.int32),
    )


with recording(kernels.with_few_layers()) as (recorder, runner):
    at_start = len(recorder.kernels)
    late, slots = [], ()
    for step_id in range(num_steps):
        plan = random_plan(step_id, slots, len(runner.head_groups.groups))
        slots = tuple(plan.slots.tolist())
        before = len(recorder.kernels)
        runner.execute(plan)
        late += [
            [kernel.name, plan.num_scheduled_tokens.tolist()]
            for kernel in recorder.kernels[before:]
        ]
print(json.dumps([at_start, late]))
"""

FP8 = {"kv_cache_dtype": "fp8_e4m3"}
POLICY = {"head_policy": "ratio=0.5,window=16,sink=4,full_layers_every=2"}
WIDE = {"head_dim": 128}
LISTED = {"max_num_batched_tokens": 512, "max_model_len": 512}
LARGE = {"max_num_seqs": 40, "max_num_batched_tokens": 3000, "max_model_len": 1900}


@pytest.mark.parametrize(
    ("options", "changes", "target"),
    [
        (FP8, {}, "sm_90"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (POLICY, {}, "sm_80"),
                (FP8 | LARGE, WIDE, "sm_90"),
                (POLICY | LARGE, WIDE, "sm_90"),
                (FP8 | POLICY | {"kv_scale": "quarter", "block_size": 32}, WIDE, "sm_90"),
                (FP8 | {"kv_scale": "quarter"} | LISTED, WIDE, "sm_90"),
            )
        ),
    ],
)  # fmt: skip
def test_no_step_of_requests_has_a_kernel_that_the_start_has_not(
    forks: Forks, options: dict[str, Any], changes: dict[str, Any], target: str
):
    small = {"max_num_seqs": 6, "max_num_batched_tokens": 60, "max_model_len": 100}
    options = {"model": "tiny", "dtype": "bfloat16"} | small | options
    num_steps = 20 if options["max_num_seqs"] == 6 and target == "sm_90" else 60
    run = forks.run(
        LIVE, json.dumps([options, changes, target, num_steps]),
        CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="0",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    num_at_start, late = json.loads(run.stdout)
    assert num_at_start > 20
    assert late == []
