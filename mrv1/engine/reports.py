"""What an engine has done so far, and how much of its KV cache is in use."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TypedDict

from mrv1.engine.scheduler import Scheduler
from mrv1.engine.speculation import Speculation
from mrv1.runner import KVUsage, ModelRunner


class LoopCounts(TypedDict):
    """The counters of the engine's own loop."""

    num_steps: int
    num_prompt_tokens: int
    """Tokens of all prompts that were added; a prompt counts once, whatever its ``n``."""
    grammar_waits: int
    """Steps whose sampling waited for the tokens that a grammar's mask depends on."""
    host_seconds: float
    """Time the host spent on planning, launching and updating, without waits for results."""
    wait_seconds: float
    """Time the host waited for results."""


class Metrics(LoopCounts):
    """Counters since the engine was created."""

    num_generated_tokens: int
    num_finished_requests: int
    num_running_requests: int
    num_waiting_requests: int
    num_preemptions: int
    num_free_blocks: int
    """Blocks of every head group that could be allocated now."""
    num_kv_blocks: int
    """Blocks of the first head group: the full heads, if there are any."""
    num_prefix_queries: int
    """Tokens of admitted requests, looked up in the prefix cache."""
    prefix_hit_tokens: int
    """Tokens of ``num_prefix_queries`` that the prefix cache had."""
    num_prefix_waits: int
    """Requests that waited for a running one to compute a prefix that both have."""
    wasted_tokens: int
    """Tokens of stale rows: their request had ended or was preempted when the result came."""
    staging_waits: int
    """How often the host waited for a pinned buffer before it could launch."""
    num_compilations: int
    """Kernels that Triton compiled or loaded after start-up: each of them stalls a step."""
    num_graph_steps: int
    """Steps that ran as CUDA graphs, sampling included."""
    num_nan_rows: int
    """Requests that failed because of NaN in their logits."""
    num_drafts: int
    """Times that a step verified drafts of a request."""
    num_draft_tokens: int
    """Drafts that steps verified."""
    num_accepted_tokens: int
    """Drafts among them that were accepted."""
    gpu_seconds: float
    """Time the GPU spent in steps, with gaps shorter than a launch; 0 on a CPU."""


def engine_metrics(
    loop: LoopCounts, scheduler: Scheduler, runner: ModelRunner, speculation: Speculation | None
) -> Metrics:
    """Return the counters of an engine as a plain dict."""
    admission = scheduler.admission
    return Metrics(
        **loop,
        num_generated_tokens=scheduler.num_generated_tokens,
        num_finished_requests=scheduler.num_finished,
        num_running_requests=len(scheduler.running),
        num_waiting_requests=scheduler.num_waiting,
        num_preemptions=scheduler.num_preemptions,
        num_free_blocks=scheduler.pools.num_free,
        num_kv_blocks=scheduler.pools[0].num_blocks,
        num_prefix_queries=admission.num_prefix_queries,
        prefix_hit_tokens=admission.prefix_hit_tokens,
        num_prefix_waits=admission.num_prefix_waits,
        wasted_tokens=scheduler.wasted_tokens,
        staging_waits=runner.num_staging_waits,
        num_compilations=runner.num_compilations,
        num_graph_steps=runner.num_graph_steps,
        num_nan_rows=scheduler.num_nan_rows,
        num_drafts=0 if speculation is None else speculation.num_drafts,
        num_draft_tokens=0 if speculation is None else speculation.num_draft_tokens,
        num_accepted_tokens=0 if speculation is None else speculation.num_accepted_tokens,
        gpu_seconds=runner.gpu_seconds,
    )


def kv_usage(runner: ModelRunner, scheduler: Scheduler) -> KVUsage:
    """Return the KV cache's sizes in bytes, and how much of it is in use."""
    report, pools, features = runner.kv_report(), scheduler.pools, scheduler.features
    block_bytes = [group["block_bytes"] for group in report["groups"]]

    def nbytes(counts: Iterable[int]) -> int:
        return sum(map(operator.mul, counts, block_bytes))

    held = [pool.num_held for pool in pools]
    row_bytes = report["feature_bytes"] // max(features.num_rows, 1)
    return KVUsage(
        **report,
        held_blocks=held,
        held_bytes=nbytes(held),
        peak_held_bytes=nbytes(pool.peak_held for pool in pools),
        held_feature_bytes=features.num_held * row_bytes,
        cached_feature_bytes=features.num_cached * row_bytes,
        free_share=nbytes(pool.num_free for pool in pools)
        / nbytes(pool.num_blocks for pool in pools),
    )
