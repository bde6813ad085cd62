"""How many requests a GPU holds: by arithmetic, and as the scheduler really admits them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mrv1.bench.headwise_options import HeadwiseOptions
from mrv1.bench.provenance import provenance
from mrv1.device import resolve_device
from mrv1.engine import EngineCore
from mrv1.engine.request import Request
from mrv1.engine.scheduler import Scheduler
from mrv1.runner import KVReport, StepOutput, StepPlan
from mrv1.sampler import SamplingParams

SCHEMA = 1
"""Version of the result's layout; raised when a field changes its meaning or goes."""


def run_capacity(
    bench: HeadwiseOptions, say: Callable[[str], None] = lambda _: None
) -> dict[str, object]:
    """Fill the cache of every variant with requests of ``context`` tokens; return the counts.

    Blocks are allocated and requests admitted as ever; no token is computed.

    Raises:
        ConfigError: an option is wrong.
        UnsupportedDeviceError: the device is not there or cannot run mrv1.
        CapacityError: the KV cache does not fit.
    """
    device = resolve_device(bench.device)
    model = bench.new_model(device)
    results: list[dict[str, Any]] = []
    for name in bench.variants:
        with bench.engine(name, model) as core:
            say(core.runner.describe())
            report = core.kv_report()
            requests = num_admitted(core.scheduler, bench.context)
            first = results[0]["requests"] if results else requests
            results.append(
                {
                    "variant": name,
                    "kv_cache": report,
                    "request_bytes": request_bytes(report, bench.context),
                    "predicted_requests": predicted_requests(core, bench.context),
                    "requests": requests,
                    "ratio": requests / first,
                    "longest_context": report["num_blocks"] * report["block_size"],
                }
            )
            say(f"{name}: {requests} requests of {bench.context} tokens")
    return {
        "op": "capacity",
        "schema": SCHEMA,
        "shape": bench.shape,
        "dtype": str(model.dtype).removeprefix("torch."),
        **provenance(device, bench.commit),
        "conditions": bench.conditions(),
        "results": results,
    }


def _blocks_of(report: KVReport, context: int) -> list[int]:
    """Return the blocks that a decoding request of so many tokens has of each group."""
    num_blocks = -(-context // report["block_size"])
    return [min(num_blocks, group["request_blocks"] or num_blocks) for group in report["groups"]]


def request_bytes(report: KVReport, context: int) -> list[int]:
    """Return the bytes that a decoding request of so many tokens takes of each group."""
    return [
        count * group["block_bytes"]
        for count, group in zip(_blocks_of(report, context), report["groups"], strict=True)
    ]


def predicted_requests(core: EngineCore, context: int) -> int:
    """Return how many requests of so many tokens fit by arithmetic, prompts' chunks set aside."""
    report, config = core.kv_report(), core.config
    chunks = config.steps_in_flight * -(-config.max_num_batched_tokens // config.block_size)
    fitting = [
        (group["num_blocks"] - (chunks if group["request_blocks"] else 0)) // count
        for count, group in zip(_blocks_of(report, context), report["groups"], strict=True)
    ]
    return min(*fitting, config.max_num_seqs)


def num_admitted(scheduler: Scheduler, context: int) -> int:
    """Return how many requests of ``context`` tokens run when one first waits for blocks.

    Those that are through their prompt go on meanwhile, by a token in every step.

    Raises:
        RequestError: not even one fits.
    """
    budget = scheduler.max_num_batched_tokens
    num_steps = (scheduler.num_free_slots + 1) * (context // budget + 2)  # nobody ends before
    computed: dict[str, int] = {}
    while True:
        req_id = f"{len(computed)}"  # everybody before has been admitted
        scheduler.add(
            Request(
                req_id=req_id,
                prompt_token_ids=(0,) * context,
                params=SamplingParams(max_tokens=num_steps, ignore_eos=True),
                seed=0,
                max_total_tokens=context + num_steps,
            )
        )
        while req_id in scheduler.waiting:
            plan = scheduler.schedule()
            if plan is None:
                return len(scheduler.running)
            counts = plan.num_scheduled_tokens.tolist()
            for name, count in zip(plan.req_ids, counts, strict=True):
                computed[name] = computed.get(name, 0) + count
            scheduler.update(_output(plan, computed, context))
            if sum(counts) < budget and req_id in scheduler.waiting:
                return len(scheduler.running)


def _output(plan: StepPlan, computed: Mapping[str, int], prompt_tokens: int) -> StepOutput:
    """Return what a step would yield: token 0 of every row that is through its prompt."""
    return StepOutput(
        step_id=plan.step_id,
        req_ids=plan.req_ids,
        slots=plan.slots,
        epochs=plan.epochs,
        token_ids=tuple(
            [(0,) if computed[req_id] >= prompt_tokens else () for req_id in plan.req_ids]
        ),
    )
