"""How many requests fit the KV cache: by arithmetic, and as the scheduler really admits them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.engines.headwise_options import HeadwiseOptions
from mrv1.device import resolve_device
from mrv1.engine import EngineCore
from mrv1.engine.request import Request
from mrv1.engine.scheduler import Scheduler
from mrv1.environment import INT32_MAX
from mrv1.provenance import provenance
from mrv1.runner import KVReport, RequestId, StepOutput, StepPlan
from mrv1.sampler import SamplingParams

SCHEMA = 2
"""Version of the result's layout; raised when a field changes its meaning or goes."""


def run_capacity(
    bench: HeadwiseOptions, say: Callable[[str], None] = lambda _: None
) -> dict[str, object]:
    """Fill the cache of every variant with requests of ``context`` tokens; return the counts.

    The scheduler admits requests and allocates blocks as in serving; no token is computed.

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
            predicted = request_bytes(report, bench.context)
            requests, held_blocks = num_admitted(core.scheduler, bench.context)
            first = results[0]["requests"] if results else requests
            results.append(
                {
                    "variant": name,
                    "kv_cache": report,
                    "request_bytes": predicted,
                    "predicted_requests": predicted_requests(core, bench.context),
                    "requests": requests,
                    "held_bytes": [
                        count * group["block_bytes"]
                        for count, group in zip(held_blocks, report["groups"], strict=True)
                    ],
                    "predicted_held_bytes": [requests * nbytes for nbytes in predicted],
                    "ratio": requests / first if first else None,
                    "longest_context": longest_context(core),
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


def request_bytes(report: KVReport, context: int) -> list[int]:
    """Return, per head group, the bytes that a decoding request of ``context`` tokens can use."""
    num_blocks = -(-context // report["block_size"])
    return [
        min(num_blocks, group["request_blocks"] or num_blocks) * group["block_bytes"]
        for group in report["groups"]
    ]


def longest_context(core: EngineCore) -> int:
    """Return the length in tokens of the longest request that fits the memory.

    Where every head group recycles blocks, memory sets no limit: then ``max_model_len`` does.
    """
    pools = core.scheduler.pools
    if pools.keeps[0].is_full:
        return pools[0].num_blocks * pools.block_size
    return core.runner.max_model_len


def predicted_requests(core: EngineCore, context: int) -> int:
    """Return how many requests of ``context`` tokens fit, by arithmetic.

    The newest request computes its prompt, a chunk at a time, while the others decode. In a group
    that recycles its ``num_blocks`` blocks, the newest request uses ``prompt`` blocks (window and
    chunk) and every other request ``decode`` blocks (its window, on average over where the window
    begins within a block): ``1 + (num_blocks - prompt) / decode`` requests fit. In a group that
    keeps everything, both are the blocks of ``context`` tokens: ``num_blocks / decode`` requests
    fit. A step must also have a token of its budget for every request.
    """
    pools, budget = core.scheduler.pools, core.scheduler.max_num_batched_tokens
    fitting = [core.config.max_num_seqs, budget]
    for pool, seen in zip(pools, pools.keeps, strict=True):
        prompt = -(-context // pools.block_size)
        decode: float = prompt
        if not seen.is_full:
            window = (seen.window - 1) / pools.block_size + 1
            decode = min(prompt, seen.sink_blocks(pools.block_size) + window)
            prompt = min(prompt, seen.num_blocks(pools.block_size, budget))
        fitting.append(max(int(1 + (pool.num_blocks - prompt) / decode), 0))
    return min(fitting)


class Admitted(NamedTuple):
    """Requests that run at the same time, all past their prompt."""

    requests: int
    held_blocks: tuple[int, ...]
    """Per head group, the blocks that the requests use."""


def num_admitted(scheduler: Scheduler, context: int) -> Admitted:
    """Return how many requests of ``context`` tokens run when the next first waits for blocks.

    Requests past their prompt go on meanwhile, one token per step.
    """
    pools = scheduler.pools
    if pools.lacking(context, scheduler.max_num_batched_tokens):
        return Admitted(0, (0,) * len(pools.keeps))
    computed: dict[RequestId, int] = {}
    while True:
        request = Request(
            req_id=f"{len(computed)}",
            prompt_token_ids=(0,) * context,
            params=SamplingParams(ignore_eos=True),
            seed=0,
            max_total_tokens=context,
        )
        scheduler.add(request)
        request.max_total_tokens = INT32_MAX  # ``add`` checked the context; the request never ends
        while request.req_id in scheduler.waiting:
            admitted = Admitted(len(scheduler.running), tuple(pool.num_held for pool in pools))
            all_decode = all(computed[name] >= context for name in scheduler.running)
            plan = scheduler.schedule()
            if plan is None or (all_decode and request.req_id in scheduler.waiting):
                return admitted
            computed.update((entered.req_id, 0) for entered in (*plan.new, *plan.resumed))
            counts = plan.num_scheduled_tokens.tolist()
            for name, count in zip(plan.req_ids, counts, strict=True):
                computed[name] += count
            scheduler.update(_output(plan, computed, scheduler))


def _output(plan: StepPlan, computed: Mapping[RequestId, int], scheduler: Scheduler) -> StepOutput:
    """Return a step's output: token 0 in every row whose tokens are then all computed."""
    requests = [scheduler.running[req_id] for req_id in plan.req_ids]
    return StepOutput(
        step_id=plan.step_id,
        req_ids=plan.req_ids,
        slots=plan.slots,
        epochs=plan.epochs,
        token_ids=tuple(
            [(0,) if computed[each.req_id] == each.num_tokens else () for each in requests]
        ),
    )
