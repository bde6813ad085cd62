"""Steps of padding before the first request: they measure memory and compile kernels.

After the layers a step needs at most

    (L + R) * V * b + FILTER_CHUNK * V * FILTER_BYTES + 64 * R * (1 + 2 * K)    bytes

and the kernels' own allocations, with R = max(max_num_seqs, LOGITS_CHUNK) rows, L rows of logits,
b bytes per logit, V tokens in the vocabulary and K = max_logprobs, but at most MAX_SEARCHED. L is
R, or if steps run as graphs at least 2 * max_num_seqs: a graph with prompts has a row for the
decode and one for the prompt of each slot, and the sampling after it may be launched kernel by
kernel. The terms are the logits and a copy of the requests' rows from before the edits, the logits
being filtered or sorted (only with ``processed_logprobs``, or if max_logprobs is more than
MAX_SEARCHED), and the results with the parts they are joined from. More rows, of drafts (up to 8 a
request) or of prompts with log-probabilities (up to max_num_batched_tokens), are computed R or
fewer at a time, and results are copied to the host each time. The profile step runs all of this,
custom processors too, on rows of padding. A rank that keeps its shard of the logits has the first
term's rows, of its tokens only, in memory of their own (``StepLogits``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from mrv1.device import memory_bytes
from mrv1.errors import CapacityError
from mrv1.kernels.attention.prefill.choice import least_of_each, prefills_of_each
from mrv1.models.batch import AttentionBatch
from mrv1.runner.block_table import NO_PAGE
from mrv1.runner.device_memory import gib, own_and_others
from mrv1.runner.device_step import DeviceStep
from mrv1.runner.kv_cache import CPU_KV_BYTES, StreamingDemand
from mrv1.runner.logprobs import FILTER_CHUNK, LOGITS_CHUNK, MAX_SEARCHED, PromptPart, Wanted
from mrv1.runner.rows import StepShape
from mrv1.runner.staging import StepUpload
from mrv1.runner.step import Int32Array


def blocks_of_groups(step: DeviceStep, demand: StreamingDemand) -> tuple[int, ...]:
    """Return each head group's blocks, configured or the most that fit; ``step`` has no cache yet.

    Only a full group with a configured number can have more blocks than requests can use.
    """
    config, spec, groups = step.config, step.spec, step.head_groups
    if config.num_kv_blocks is not None:
        return demand.divide(groups, config.num_kv_blocks)
    usable = config.max_num_seqs * spec.blocks_for(step.max_model_len)
    num_bytes = config.kv_cache_memory_bytes or kv_bytes(step)
    return demand.divide_bytes(spec, groups, num_bytes, usable)


def kv_bytes(step: DeviceStep) -> int:
    """Return the bytes that a full step and the graphs leave for a KV cache, or CapacityError."""
    if step.device.type == "cpu":
        return CPU_KV_BYTES
    torch.cuda.empty_cache()
    run_profile_step(step)
    # The allocator keeps the memory that the step needed, so the memory free now stays free in
    # later steps; but graphs have memory of their own.
    free_bytes, total_bytes = memory_bytes(step.device)
    graph_bytes = _graph_bytes(step) if step.is_capturable else 0
    reserved = int(total_bytes * (1 - step.config.gpu_memory_utilization))
    num_bytes = free_bytes - graph_bytes - reserved
    if num_bytes < step.spec.block_bytes:
        own, others = own_and_others(step.device, free_bytes, total_bytes)
        raise CapacityError(
            f"gpu_memory_utilization: expected room for a KV block of {step.spec.block_bytes} "
            f"bytes in {step.config.gpu_memory_utilization:g} of {gib(total_bytes)}, got "
            f"{own} for weights and the buffers of a step, {gib(graph_bytes)} for CUDA graphs, "
            f"and {others} for the driver and other processes; end other processes on the GPU, "
            "raise gpu_memory_utilization, or lower max_num_batched_tokens"
        )
    return num_bytes


def _graph_bytes(step: DeviceStep) -> int:
    """Return the bytes that the graphs take: all share the memory of the largest."""
    step.kv_cache = step.new_kv_cache()
    torch.cuda.empty_cache()  # a capture would do this too, and hide the memory that it takes
    before, _ = memory_bytes(step.device)
    step.capture(step.graphs.largest, progress=False)
    after, _ = memory_bytes(step.device)
    step.graphs.clear()
    del step.kv_cache
    torch.cuda.empty_cache()
    return max(before - after, 0)


@torch.inference_mode()
def run_profile_step(step: DeviceStep) -> None:
    """Run the largest prefill and decode to their end; no page is used, so one block is enough."""
    cache, config = step.new_kv_cache(), step.config
    full, rest = divmod(config.max_num_batched_tokens, step.max_model_len)
    prompts = [step.max_model_len] * full + ([rest] if rest else [])
    for query_lens in (prompts, [1] * config.max_num_seqs):
        batch = empty_batch(step, query_lens)
        hidden = step.model.forward(batch, cache.layers)
        _sample_most(step, hidden)
        if step.drafts is not None:
            padding = torch.full((batch.num_reqs,), -1, dtype=torch.int32, device=step.device)
            head_cache = cache.draft_layers[0]
            step.drafts.propose(batch, padding, padding.long(), hidden, head_cache)
    if step.device.type == "cuda":
        torch.cuda.synchronize(step.device)


def empty_batch(step: DeviceStep, query_lens: list[int]) -> AttentionBatch:
    """Return a batch whose tokens are not written to the cache and see no keys."""
    num_tokens, num_reqs, device = sum(query_lens), len(query_lens), step.device
    num_groups, row_width = len(step.head_groups.groups), step.block_tables.row_width
    axes = () if step.model.config.rope.mrope_section is None else (3,)
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    uniform = query_lens[0] == 1
    return AttentionBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(*axes, num_tokens, dtype=torch.int64, device=device),
        slot_mapping=torch.full((num_groups, num_tokens), -1, dtype=torch.int64, device=device),
        block_table=torch.full((num_reqs, row_width), NO_PAGE, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(query_lens, dtype=torch.int32, device=device),
        query_start_loc=starts.to(device),
        max_query_len=max(query_lens),
        query_len=1 if uniform else None,
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        adapter_slots=_no_adapters(step, num_tokens),
    )


def _no_adapters(step: DeviceStep, num_tokens: int) -> torch.Tensor | None:
    """Return slots of tokens without adapters, but with their launches; None = without LoRA."""
    if step.model.lora is None:
        return None
    return torch.full((num_tokens,), -1, dtype=torch.int32, device=step.device)


def _sample_most(step: DeviceStep, hidden: torch.Tensor) -> None:
    """Launch, on rows of padding, everything that may follow the layers of a step."""
    num_rows, limits, device = step.max_logits_rows, step.sampler.limits, step.device
    most = min(step.config.logprobs_limit(limits.vocab_size), limits.vocab_size)
    searched = min(most, MAX_SEARCHED)
    most_ids, searched_ids = tuple(range(most)), tuple(range(searched))
    with_padding = step.max_padded_rows
    rows = torch.zeros(with_padding, dtype=torch.int64, device=device)
    step.draw(
        step.logits.compute(hidden.index_select(0, rows), _no_adapters(step, with_padding)),
        torch.full((with_padding,), -1, dtype=torch.int32, device=device),
        [
            Wanted(row, most, most_ids, True, row)
            if row < FILTER_CHUNK  # more rows are not sorted at a time
            else Wanted(row, searched, searched_ids, True, row)
            for row in range(num_rows)
        ],
        step.masks.first(step.config.max_num_seqs),
    )
    tokens = slice(min(LOGITS_CHUNK, len(hidden), step.max_model_len))
    step.report_prompt(PromptPart(Wanted(0, searched), tokens, 0, tokens), hidden)


@torch.inference_mode()
def warm_up(step: DeviceStep) -> None:
    """Launch padding without a graph, sampled in every way, so that no request compiles."""
    most_rows, budget = step.config.max_num_seqs, step.config.max_num_batched_tokens
    most = max(min(step.max_model_len, budget - 1), 1)
    # The most prompts; a decode and a prompt; prompts for every kernel of prefill attention.
    steps = [
        np.minimum(each, most) for each in ([9] * most_rows, [20] * most_rows, [1, 40], [1, 600])
    ]
    # Which kernels a rank needs depends on its heads, but all ranks make the same steps.
    parallel = step.model.parallel
    prompts = [*_every_prefill(step), *_every_expert_product(step)]
    for lengths in (*steps, *parallel.union(prompts)):
        query_lens = np.array(lengths[-most_rows:], dtype=np.int32)
        query_lens = query_lens[query_lens[::-1].cumsum()[::-1] <= budget]
        shapes = [StepShape.of(query_lens)]
        if step.visual_ids is not None:
            shapes.append(StepShape.of(query_lens, prefilled=query_lens == 1))
        for shape in dict.fromkeys(shapes):
            _launch_padding(step, shape, query_lens)
    for lengths in parallel.union([[longest] for longest in _every_masked_prefill(step)]):
        query_lens = np.array(lengths, dtype=np.int32)
        masked = StepShape.of(query_lens, prefilled=np.array([True]))
        _launch_padding(step, masked, query_lens, is_masked=True)
    # A prompt's log-probabilities need the logits of any number of tokens. Products have a kernel
    # for each range of numbers, and each range that has one ends at a power of two.
    hidden_size = step.model.config.hidden_size
    rows = torch.zeros(LOGITS_CHUNK, hidden_size, dtype=step.model.dtype, device=step.device)
    for power in range(LOGITS_CHUNK.bit_length()):
        for slots in dict.fromkeys((None, _no_adapters(step, 1 << power))):
            step.logits.compute(rows[: 1 << power], slots, again=True)
    max_drafts = step.config.max_draft_tokens
    if max_drafts:
        drafts = ((0,) * max_drafts, ())
        query_lens = np.array([1 + max_drafts, 20], dtype=np.int32)
        ragged = StepShape.of(query_lens, has_drafts=True)
        _launch_padding(step, StepShape.decode(1, max_drafts), query_lens[:1], drafts[:1])
        is_ragged = step.drafts is None and most_rows > 1  # drafts of a head have one length
        if is_ragged and query_lens.sum() <= budget:
            _launch_padding(step, ragged, query_lens, drafts)


def _every_prefill(step: DeviceStep) -> list[list[int]]:
    """Return prompt lengths (> 1), a list a step, that need every kernel of prefill attention."""
    return prefills_of_each(
        partial(step.model.kernel_backend().prefill_choices, step.kv_cache.layers),
        shortest=2,
        max_query_len=step.max_model_len,
        max_reqs=step.config.max_num_seqs,
        max_tokens=step.config.max_num_batched_tokens,
    )


def _every_expert_product(step: DeviceStep) -> list[list[int]]:
    """Return prompt lengths, a list a step, that need every kernel of the experts' products."""
    from mrv1.kernels.experts.expert_linear import choose_kernel  # needs triton, as warm_up does

    model = step.model
    experts = next((layer.experts for layer in model.weights.layers if layer.experts), None)
    if experts is None or model.config.experts is None:
        return []
    num_chosen = model.config.experts.routing.num_chosen
    weights = [
        pair
        for each in (experts, experts.visual)
        if each is not None
        for pair in ((each.gate_up_of_experts, True), (each.down_of_experts, False))
    ]

    def choice(num_tokens: int) -> object:
        options = {"deterministic": model.deterministic}
        return [
            choose_kernel(num_tokens * num_chosen, weight, is_gated=is_gated, **options)
            for weight, is_gated in weights
        ]

    budget = step.config.max_num_batched_tokens
    most = max(min(step.max_model_len, budget - 1), 1)
    counts = [divmod(count, most) for count in least_of_each(choice, 1, budget)]
    return [[rest] * (rest > 0) + [most] * full for full, rest in counts]


def _every_masked_prefill(step: DeviceStep) -> list[int]:
    """Return lengths of prompts such that each kernel for ranges of keys runs."""
    if step.config.deterministic:  # the engine refuses ranges
        return []
    choice = partial(step.model.kernel_backend().masked_choices, step.kv_cache.layers)
    longest = min(step.max_model_len, step.config.max_num_batched_tokens)
    return least_of_each(choice, 1, longest)


def _launch_padding(
    step: DeviceStep,
    shape: StepShape,
    query_lens: Int32Array,
    drafts: Sequence[tuple[int, ...]] = (),
    *,
    is_masked: bool = False,
) -> None:
    """Launch a step of padding, and all that may follow its layers, on a few rows."""
    if step.model.lora is not None and not shape.has_adapters:
        twin = replace(shape, has_adapters=True)
        _launch_padding(step, twin, query_lens, drafts, is_masked=is_masked)
    num_rows, upload = shape.num_rows, StepUpload()
    padding = np.full(num_rows, -1, dtype=np.int32)
    sent = step.staging.send(0, upload, padding, query_lens, drafts=drafts)
    staged = step.staging.staged(sent, num_rows)
    ranges = None
    if is_masked:
        ranges = torch.zeros(shape.num_tokens, 2, dtype=torch.int32, device=step.device)
    batch, hidden = step.forward(shape, staged, attn_mask_offsets=ranges)
    vocab_size = step.sampler.limits.vocab_size
    most = min(step.config.logprobs_limit(vocab_size), vocab_size)
    last, ids = num_rows - 1, tuple(range(min(most, 2)))
    step.sample(batch, hidden)
    if not drafts:
        step.sample(batch, hidden, masks=step.masks.first(1))
    for wanted in (
        Wanted(0, min(most, 2)),
        Wanted(last, min(most, 2), ids, edits=True, device_row=last),
        Wanted(last, most, edits=True, device_row=last),  # sorted, if it is more than MAX_SEARCHED
    ):
        step.sample(batch, hidden, [wanted])
    tokens = slice(min(len(hidden), 2))
    for count in {min(most, 2), most}:
        part = PromptPart(Wanted(0, count), tokens, 0, tokens)
        step.report_prompt(part, hidden, batch.adapter_slots)
    if step.device.type == "cuda":
        torch.cuda.synchronize()  # the next step overwrites the upload
