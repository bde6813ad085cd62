"""The ops of ``mrv1.kernels`` in plain torch, with the same names and signatures.

This is the specification each kernel is tested against, and the path mrv1 takes on a CPU. It is
written to be read, not to be fast. Arithmetic is float32, or float64 where the input is.
"""

from __future__ import annotations

import torch

from mrv1.kernels._base.oracle import ORACLE_DTYPES as _ORACLE_DTYPES
from mrv1.kernels._base.oracle import calls
from mrv1.kernels._base.oracle import counted as _counted
from mrv1.kernels._base.oracle import wide as _wide
from mrv1.kernels.attention.reference import (
    merge_states,
    paged_decode_attention,
    paged_prefill_attention,
    plan_decode_attention,
)
from mrv1.kernels.cache.reference import (
    copy_pages,
    kv_cache_write,
    qkv_cache_write,
    quantize_e4m3,
    token_scale,
)
from mrv1.kernels.layers.linear import Activation
from mrv1.kernels.sampling.bad_words import check_bad_words
from mrv1.kernels.sampling.edit_logits import (
    ALLOWED,
    BIAS,
    MIN_TOKENS,
    PENALTIES,
    check_edit_logits,
    check_token_bitmask,
)
from mrv1.kernels.sampling.logprobs import TopLogprobs, check_top_logprobs
from mrv1.kernels.step.gather_tokens import check_queries
from mrv1.kernels.step.post_update import FAILED, LENGTH, RUNNING, STOP_SEQUENCE, STOP_TOKEN

__all__ = [
    "apply_bad_words",
    "apply_rope",
    "apply_token_bitmask",
    "calls",
    "copy_pages",
    "edit_logits",
    "embed_tokens",
    "fetch_upload",
    "gather_tokens",
    "group_size",
    "gumbel_noise",
    "kept_tokens",
    "kv_cache_write",
    "linear",
    "merge_states",
    "paged_decode_attention",
    "paged_prefill_attention",
    "philox4x32",
    "philox_words",
    "plan_decode_attention",
    "post_update",
    "qkv_cache_write",
    "quantize_e4m3",
    "rms_norm",
    "sample_tokens",
    "scatter_segments",
    "silu_and_mul",
    "token_scale",
    "top_logprobs",
]


# --- norms, rope, activation, the step's state, sampling --------------------------------------


@_counted
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.rms_norm`."""
    if residual is not None:
        residual.copy_(_wide(residual) + _wide(x))
        x = residual
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = (wide * scale).to(x.dtype) * weight
    return normed if out is None else out.copy_(normed)


@_counted
def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Oracle of :func:`mrv1.kernels.apply_rope`."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].unsqueeze(1).split(half, dim=-1)
    for x in (q, k):
        rotary = x[..., : 2 * half]
        first = rotary[..., 0::2] if interleaved else rotary[..., :half]
        second = rotary[..., 1::2] if interleaved else rotary[..., half:]
        a, b = _wide(first), _wide(second)
        rotated = a * cos - b * sin, b * cos + a * sin
        first.copy_(rotated[0])
        second.copy_(rotated[1])


def _silu(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(x)``, with its limit at -inf, where torch's is NaN."""
    return torch.nn.functional.silu(x.clamp(min=torch.finfo(x.dtype).min))


@_counted
def silu_and_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.silu_and_mul`."""
    gate, up = _wide(x).chunk(2, dim=-1)
    result = (_silu(gate) * up).to(x.dtype)
    return result if out is None else out.copy_(result)


@_counted
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    activation: Activation | None = None,
    out: torch.Tensor | None = None,
    out_norm_weight: torch.Tensor | None = None,
    normed_out: torch.Tensor | None = None,
    prefetch: torch.Tensor | None = None,
    deterministic: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.linear`; if deterministic, one row after the other."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    wide = _wide(weight).T
    rows = x.split(1) if deterministic else (x,)
    y = torch.cat([_wide(part) @ wide for part in rows]) if len(x) else x.new_zeros(0, len(weight))
    if bias is not None:
        y = y + _wide(bias)
    if activation is not None:
        gate, up = y.chunk(2, dim=-1)
        y = _silu(gate) * up
    if residual is not None:
        y = _wide(residual) + y
    y = y.to(out_dtype or x.dtype)
    if normed_out is not None and out_norm_weight is not None:
        rms_norm(y, out_norm_weight, eps, out=normed_out)
    return y if out is None else out.copy_(y)


@_counted
def embed_tokens(
    input_ids: torch.Tensor, embed: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle of :func:`mrv1.kernels.embed_tokens`."""
    return torch.nn.functional.embedding(input_ids, embed), cos_sin.index_select(0, positions)


@_counted
def fetch_upload(uploads: torch.Tensor, slot: torch.Tensor, staged: torch.Tensor) -> None:
    """Oracle of :func:`mrv1.kernels.fetch_upload`."""
    upload = uploads[int(slot)]
    num_words = int(upload[0])
    staged[:num_words] = upload[:num_words]


@_counted
def scatter_segments(
    state: torch.Tensor,
    staged: torch.Tensor,
    segments: torch.Tensor,
    num_segments: torch.Tensor,
) -> None:
    """Oracle of :func:`mrv1.kernels.scatter_segments`."""
    for dst, src, length in segments[: int(num_segments)].tolist():
        if length > 0:
            state[dst : dst + length] = staged[src : src + length] if src >= 0 else -1


@_counted
def gather_tokens(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    group_table_offset: torch.Tensor,
    group_sink: torch.Tensor,
    group_ring_blocks: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    logits_rows: torch.Tensor,
    query_len: int | None = None,
    stopped: torch.Tensor | None = None,
    draft_token_ids: torch.Tensor | None = None,
    num_draft_tokens: torch.Tensor | None = None,
    mrope_positions: torch.Tensor | None = None,
    mrope_delta: torch.Tensor | None = None,
    prompt_len: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> None:
    """Oracle of :func:`mrv1.kernels.gather_tokens`."""
    starts = _query_starts(query_start_loc, query_len, idx_mapping)
    query_lens = starts.diff()
    slots = idx_mapping.clamp_min(0).long()
    lives = idx_mapping >= 0
    if stopped is not None:
        lives = lives & (stopped[slots] == 0)
    computed, known = num_computed_tokens[slots].long(), num_tokens[slots].long()
    end = known if num_draft_tokens is None else known + num_draft_tokens
    row_seq_lens = torch.where(lives, computed + query_lens, 0)
    samples = lives & (computed < known) & (row_seq_lens >= end)
    seq_lens.copy_(row_seq_lens)
    logits_rows.copy_(torch.where(samples, starts[:-1] + known - 1 - computed, -1))
    columns_inside = -(-row_seq_lens.clamp_max(token_ids.shape[1]) // block_size)

    rows = torch.repeat_interleave(query_lens)  # row of each token
    tokens = torch.arange(rows.numel(), device=rows.device)
    token_positions = computed[rows] + tokens - starts[rows]
    inside = lives[rows] & (token_positions < end[rows].clamp_max(token_ids.shape[1]))
    rows, tokens, token_positions = rows[inside], tokens[inside], token_positions[inside]
    for output, padding in ((input_ids, 0), (positions, 0), (slot_mapping, -1)):
        output.fill_(padding)
    input_ids[tokens] = token_ids[slots[rows], token_positions].long()
    if draft_token_ids is not None:
        draft = token_positions - known[rows]
        is_draft = draft >= 0
        input_ids[tokens[is_draft]] = draft_token_ids[rows[is_draft], draft[is_draft]].long()
    if mrope_positions is None or mrope_delta is None or prompt_len is None:
        positions[tokens] = token_positions
    else:
        in_prompt = token_positions < prompt_len[slots[rows]]
        at = token_positions.clamp_max(mrope_positions.shape[2] - 1)
        of_axes = mrope_positions[slots[rows], :, at].T.long()
        positions[:, tokens] = torch.where(
            in_prompt, of_axes, token_positions + mrope_delta[slots[rows]]
        )
    for group in range(group_table_offset.numel()):
        offset, ring_blocks = group_table_offset[group], group_ring_blocks[group]
        sink_blocks = -(-group_sink[group] // block_size)
        columns = offset + _ring_column(token_positions // block_size, sink_blocks, ring_blocks)
        blocks = block_tables[slots[rows], columns].long()
        token_slots = blocks * block_size + token_positions % block_size
        slot_mapping[group, tokens] = torch.where(blocks >= 0, token_slots, -1)
        if block_table is None:
            continue
        first = int(offset)
        for row in lives.nonzero().flatten().tolist():
            width = int(sink_blocks + ring_blocks if ring_blocks else columns_inside[row])
            segment = block_tables[slots[row], first : first + width]
            block_table[row, first : first + width] = segment


def _query_starts(
    query_start_loc: torch.Tensor | None, query_len: int | None, idx_mapping: torch.Tensor
) -> torch.Tensor:
    """Return the first token of each row, and the end, [rows + 1] int64."""
    check_queries(query_start_loc, query_len, idx_mapping.shape[0], idx_mapping.device)
    if query_len is None and query_start_loc is not None:
        return query_start_loc.long()
    return torch.arange(idx_mapping.shape[0] + 1, device=idx_mapping.device) * (query_len or 0)


def _ring_column(
    block: torch.Tensor, sink_blocks: torch.Tensor, ring_blocks: torch.Tensor
) -> torch.Tensor:
    """Return the column of each logical block inside its group's segment of a table row."""
    in_ring = sink_blocks + (block - sink_blocks) % ring_blocks.clamp_min(1)
    return torch.where((ring_blocks == 0) | (block < sink_blocks), block, in_ring)


def _stop_sequences_of(
    slot: int,
    stop_sequences: torch.Tensor | None,
    stop_sequence_lens: torch.Tensor | None,
    num_stop_sequences: torch.Tensor | None,
) -> list[list[int]]:
    """Return the sequences of a slot that may end its request."""
    if stop_sequences is None or stop_sequence_lens is None or num_stop_sequences is None:
        return []
    lens = stop_sequence_lens[slot, : num_stop_sequences[slot]].tolist()
    rows = stop_sequences[slot].tolist()
    max_len = stop_sequences.shape[2]
    return [rows[i][:length] for i, length in enumerate(lens) if 1 <= length <= max_len]


@_counted
def post_update(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    logits_rows: torch.Tensor,
    tokens: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    max_total_tokens: torch.Tensor,
    stop_token_ids: torch.Tensor,
    stopped: torch.Tensor,
    *,
    output: torch.Tensor,
    num_output: torch.Tensor,
    ring_slot: torch.Tensor | None = None,
    query_len: int | None = None,
    num_sampled: torch.Tensor | None = None,
    stop_sequences: torch.Tensor | None = None,
    stop_sequence_lens: torch.Tensor | None = None,
    num_stop_sequences: torch.Tensor | None = None,
    prompt_len: torch.Tensor | None = None,
    min_total_tokens: torch.Tensor | None = None,
) -> None:
    """Oracle of :func:`mrv1.kernels.post_update`."""
    if ring_slot is not None:
        output, num_output = output[int(ring_slot)], num_output[int(ring_slot)]
    query_lens = _query_starts(query_start_loc, query_len, idx_mapping).diff().tolist()
    sampling = (logits_rows >= 0).int()
    counts = (sampling if num_sampled is None else sampling * num_sampled).tolist()
    output.fill_(-1)
    num_output.fill_(0)
    for row, slot in enumerate(idx_mapping.tolist()):
        if slot < 0 or stopped[slot] != RUNNING:
            continue
        stop_tokens = stop_token_ids[slot].tolist()
        sequences = _stop_sequences_of(
            slot, stop_sequences, stop_sequence_lens, num_stop_sequences
        )
        failure = num_appended = 0
        for token in tokens[row, : counts[row]].tolist():
            if token < 0:
                stopped[slot] = FAILED
                failure = token
                break
            token_ids[slot, num_tokens[slot]] = token
            num_tokens[slot] += 1
            output[row, num_appended] = token
            num_appended += 1
            if token in stop_tokens:
                stopped[slot] = STOP_TOKEN
                break
            if (
                prompt_len is not None
                and min_total_tokens is not None
                and num_tokens[slot] >= min_total_tokens[slot]
            ):
                new = token_ids[slot, prompt_len[slot] : num_tokens[slot]].tolist()
                if any(new[-len(sequence) :] == sequence for sequence in sequences):
                    stopped[slot] = STOP_SEQUENCE
                    break
            if num_tokens[slot] >= max_total_tokens[slot]:
                stopped[slot] = LENGTH
                break
        num_output[row] = failure or num_appended
        if counts[row] > 0:
            num_computed_tokens[slot] = num_tokens[slot] - 1
        else:
            num_computed_tokens[slot] += query_lens[row]


@_counted
def apply_bad_words(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    prompt_len: torch.Tensor,
    bad_words: torch.Tensor,
    bad_word_lens: torch.Tensor,
    num_bad_words: torch.Tensor,
    *,
    match_prompt: torch.Tensor | None = None,
    ahead: torch.Tensor | None = None,
    draft_token_ids: torch.Tensor | None = None,
) -> None:
    """Mask row by row, all words at once; see :func:`mrv1.kernels.apply_bad_words`."""
    check_bad_words(
        logits,
        idx_mapping,
        token_ids,
        num_tokens,
        prompt_len,
        bad_words,
        bad_word_lens,
        num_bad_words,
        match_prompt,
        ahead,
        draft_token_ids,
        _ORACLE_DTYPES,
    )
    max_words, max_len = bad_words.shape[1:]
    word = torch.arange(max_words, device=logits.device)
    column = torch.arange(max_len, device=logits.device)
    for row in ((idx_mapping >= 0) & (max_len > 0)).nonzero().flatten().tolist():
        slot = int(idx_mapping[row])
        start = 0 if match_prompt is not None and match_prompt[slot] else int(prompt_len[slot])
        history = token_ids[slot, start : num_tokens[slot]]
        history = history[-max_len:]
        if ahead is not None and draft_token_ids is not None:
            drafts = draft_token_ids[row // (len(logits) // len(draft_token_ids))]
            history = torch.cat([history, drafts[: ahead[row]]])
        words, lengths = bad_words[slot], bad_word_lens[slot].long()
        fits = (lengths >= 1) & (lengths <= max_len) & (lengths - 1 <= len(history))
        fits &= word < num_bad_words[slot]
        words, lengths = words[fits], lengths[fits, None]
        position = len(history) - (lengths - 1) + column  # where each word's tokens would stand
        seen = torch.cat([history, history.new_zeros(max_len)])[position]
        completes = ((seen == words) | (column >= lengths - 1)).all(1)
        last = words.gather(1, lengths - 1)[completes].flatten().long()
        logits[row, last[(last >= 0) & (last < logits.shape[1])]] = -torch.inf


@_counted
def edit_logits(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    prompt_len: torch.Tensor,
    *,
    edits: torch.Tensor,
    allowed_mask: torch.Tensor,
    min_total_tokens: torch.Tensor,
    stop_token_ids: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    num_bias: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    counts: torch.Tensor,
    counted: torch.Tensor,
    ahead: torch.Tensor | None = None,
    draft_token_ids: torch.Tensor | None = None,
) -> None:
    """Oracle of :func:`mrv1.kernels.edit_logits`; it counts anew, and leaves ``counts`` alone."""
    check_edit_logits(
        logits,
        idx_mapping,
        token_ids,
        allowed_mask,
        stop_token_ids,
        (bias_ids, bias_values),
        counts,
        counted,
        ahead,
        draft_token_ids,
        _ORACLE_DTYPES,
        num_tokens=num_tokens,
        prompt_len=prompt_len,
        edits=edits,
        min_total_tokens=min_total_tokens,
        num_bias=num_bias,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
    )
    vocab_size = logits.shape[1]

    def in_vocab(ids: torch.Tensor) -> torch.Tensor:
        return ids[(ids >= 0) & (ids < vocab_size)].long()

    for row in (idx_mapping >= 0).nonzero().flatten().tolist():
        slot = int(idx_mapping[row])
        x, used, known = logits[row], int(edits[slot]), int(num_tokens[slot])
        prompt, output = token_ids[slot, :known].tensor_split([int(prompt_len[slot])])
        if ahead is not None and draft_token_ids is not None:
            drafts = draft_token_ids[row // (len(logits) // len(draft_token_ids))]
            output = torch.cat([output, drafts[: ahead[row]]])
        if used & BIAS:
            ids = bias_ids[slot, : max(int(num_bias[slot]), 0)].long()
            is_id = (ids >= 0) & (ids < vocab_size)
            ids, values = ids[is_id], bias_values[slot, : len(ids)][is_id]
            x[ids] = (_wide(x[ids]) + values).to(x.dtype)
        if used & PENALTIES:
            num_output = torch.bincount(in_vocab(output), minlength=vocab_size)
            seen = torch.cat([in_vocab(prompt), in_vocab(output)]).unique()
            y, num_output = _wide(x[seen]), num_output[seen]
            y = torch.where(y > 0, y / repetition_penalty[slot], y * repetition_penalty[slot])
            y = y - frequency_penalty[slot] * num_output
            y = y - torch.where(num_output > 0, presence_penalty[slot], 0)
            x[seen] = y.to(x.dtype)
        if used & ALLOWED:
            x.masked_fill_(~_token_bits(allowed_mask[slot], vocab_size), -torch.inf)
        if used & MIN_TOKENS and len(prompt) + len(output) < min_total_tokens[slot]:
            x[in_vocab(stop_token_ids[slot])] = -torch.inf


def _token_bits(mask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the bit of each token, [..., ceil(vocab / 32)] int32 -> [..., vocab] bool."""
    bits = mask[..., None] >> torch.arange(32, dtype=torch.int32, device=mask.device) & 1
    return bits.flatten(-2)[..., :vocab_size].bool()


@_counted
def apply_token_bitmask(
    logits: torch.Tensor, bitmask: torch.Tensor, *, rows: torch.Tensor | None = None
) -> None:
    """Oracle of :func:`mrv1.kernels.apply_token_bitmask`."""
    check_token_bitmask(logits, bitmask, rows, _ORACLE_DTYPES)
    targets = range(len(logits)) if rows is None else rows.tolist()
    for mask, row in zip(bitmask, targets, strict=True):
        if row >= 0:
            logits[row].masked_fill_(~_token_bits(mask, logits.shape[1]), -torch.inf)


@_counted
def top_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    *,
    idx_mapping: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
) -> TopLogprobs:
    """Oracle of :func:`mrv1.kernels.top_logprobs`: the whole log-softmax, and a stable sort."""
    check_top_logprobs(logits, token_ids, num_top, idx_mapping, temperature, _ORACLE_DTYPES)
    x = _wide(logits)
    rows = torch.arange(len(x), device=x.device)
    slots = rows if idx_mapping is None else idx_mapping.long()
    scaled = x
    if temperature is not None and len(temperature):
        divisor = temperature[slots.clamp_min(0)][:, None]
        scaled = x / torch.where(divisor == 0, 1, divisor)
    logprobs = scaled.log_softmax(dim=1)
    is_none = (token_ids < 0) | (token_ids >= x.shape[1]) | (slots < 0)[:, None]
    asked = token_ids.masked_fill(is_none, 0)
    better = [(x > x.gather(1, column[:, None])).sum(1) for column in asked.T]
    ranks = torch.stack(better, 1) + 1 if better else torch.zeros_like(token_ids)
    best = x.masked_fill(x.isnan(), -torch.inf).sort(dim=1, descending=True, stable=True).indices
    best, padding = best[:, :num_top], (slots < 0)[:, None]
    return TopLogprobs(
        logprobs.gather(1, asked).masked_fill(is_none, -torch.inf),
        ranks.masked_fill(is_none, 0),
        best.masked_fill(padding, -1),
        logprobs.gather(1, best).masked_fill(padding, -torch.inf),
    )


_UINT32 = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the four random words of philox4x32-10; all tensors int64 holding 32-bit words.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product past 2^63 wraps, but its bits are right: ">>" must only forget the sign.
        product0, product1 = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]
        c0, c2 = (product1 >> 32 & _UINT32) ^ c1 ^ k0, (product0 >> 32 & _UINT32) ^ c3 ^ k1
        c1, c3 = product1 & _UINT32, product0 & _UINT32
        k0, k1 = k0 + _PHILOX_KEY_STEPS[0] & _UINT32, k1 + _PHILOX_KEY_STEPS[1] & _UINT32
    return c0, c1, c2, c3


def philox_words(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    purpose: int = 0,
    child: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return word 0 of philox for every (row, index): [rows, n] int64 in [0, 2^32).

    Args:
        seeds: [rows] int64, the philox key: low word, then high word.
        positions: [rows] int64, output position, the counter's first word.
        index: [n] or [rows, n] int64, its second: token ids (purpose 0) or groups (purpose 1).
        purpose: its third.
        child: [rows] integers, its fourth: index of a parallel sample; None = 0.
    """
    seeds, positions = seeds[:, None], positions[:, None]
    index = index.expand(len(seeds), -1)
    zero = torch.zeros_like(positions)
    children = zero if child is None else child.long()[:, None]
    counter = (positions & _UINT32, index, zero + purpose, children & _UINT32)
    return philox4x32(counter, (seeds & _UINT32, seeds >> 32 & _UINT32))[0]


def gumbel_noise(words: torch.Tensor) -> torch.Tensor:
    """Return the standard Gumbel variable of each 32-bit word, float32.

    -log(-log(1 - w)) with w = (word + 1/2) / 2^32. A draw is decided by its largest variables,
    those of the smallest w: written this way they keep their full precision, where -log(u) of a
    float32 u near 1 has lost it (and is infinite at u = 1).
    """
    w = (words.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-w)).float()


def group_size(vocab_size: int) -> int:
    """Return how many consecutive ids are drawn as one: 128, or a row of at most 4096 groups."""
    size = 128
    while -(-vocab_size // size) > 4096:
        size *= 2
    return size


def kept_tokens(
    scaled: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what min_p, top-k and top-p keep, in this order: [rows, vocab] bool.

    Args:
        scaled: [rows, vocab] float64, logits / temperature, no NaN; -inf is not kept.
        top_k: [rows] int32, 0 = all; ties with the k-th stay.
        top_p: [rows] float32, 1 = all: a token stays if strictly likelier ones have less mass.
        min_p: [rows] float32, 0 = all: least probability, as a share of the largest.
    """
    kept = scaled > -torch.inf
    if min_p is not None:
        kept &= scaled >= scaled.amax(1, keepdim=True) + min_p.double().log()[:, None]
    ranked, order = scaled.masked_fill(~kept, -torch.inf).sort(dim=1, descending=True)
    if top_k is not None:
        last = torch.where(top_k > 0, top_k, scaled.shape[1]).clamp(max=scaled.shape[1])
        kth = ranked.gather(1, last.long()[:, None] - 1)
        ranked = ranked.masked_fill(ranked < kth, -torch.inf)
    if top_p is not None:
        # Of a run of equal values the first has the mass of what is strictly likelier before it.
        probs = ranked.softmax(1)
        before = probs.cumsum(1) - probs
        is_first = torch.ones_like(ranked, dtype=torch.bool)
        is_first[:, 1:] = ranked[:, 1:] < ranked[:, :-1]
        enough = is_first & (before >= top_p.double()[:, None]) & (top_p < 1)[:, None]
        enough[:, 0] = False
        ranked = ranked.masked_fill(enough.cummax(1).values, -torch.inf)
    return torch.zeros_like(kept).scatter(1, order, ranked > -torch.inf)


def _draw(
    scaled: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    child: torch.Tensor | None,
    purpose: int = 0,
) -> torch.Tensor:
    """Return a token of each row: of a group, drawn by what is above -inf of it."""
    num_rows, vocab_size = scaled.shape
    size = group_size(vocab_size)
    groups = torch.nn.functional.pad(scaled, (0, -vocab_size % size), value=-torch.inf)
    groups = groups.unflatten(1, (-1, size))
    index = torch.arange(groups.shape[1], device=scaled.device)
    noise = gumbel_noise(philox_words(seeds, positions, index, purpose + 1, child))
    group = (groups.logsumexp(2) + noise).argmax(1)
    members = groups[torch.arange(num_rows, device=scaled.device), group]
    token = group[:, None] * size + torch.arange(size, device=scaled.device)
    noise = gumbel_noise(philox_words(seeds, positions, token, purpose, child))
    drawn: torch.Tensor = group * size + (members + noise).argmax(1)
    return drawn


def _draw_nucleus(
    scaled: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    child: torch.Tensor | None,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """Return a token of each row, in rounds: until strictly likelier ones have less than top_p."""
    probs = scaled.softmax(1)
    tokens = torch.zeros_like(seeds)
    rows = torch.arange(len(scaled), device=scaled.device)
    purpose = 0
    while rows.numel():
        left, of_child = scaled[rows], None if child is None else child[rows]
        drawn = _draw(left, seeds[rows], positions[rows], of_child, purpose)
        is_likelier = left > left.gather(1, drawn[:, None])
        mass = probs[rows].where(is_likelier, 0).sum(1)
        tokens[rows] = drawn
        scaled[rows] = left.where(is_likelier, -torch.inf)
        rows = rows[(mass > 0) & (mass >= top_p[rows].double())]
        purpose += 2
    return tokens


def _draw_filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    child: torch.Tensor | None,
    **filters: torch.Tensor,
) -> torch.Tensor:
    """Return a token of each row, all of which are drawn and have one to draw."""
    logits = logits.double()
    scaled = (logits - logits.amax(1, keepdim=True)) / temperature.double()[:, None]
    if not filters:
        return _draw(scaled, seeds, positions, child)
    kept = scaled.masked_fill(~kept_tokens(scaled, **filters), -torch.inf)
    tokens = _draw(kept, seeds, positions, child)
    if "top_p" in filters:
        in_rounds = filters["top_p"] < 1
        if "top_k" in filters:
            in_rounds &= (filters["top_k"] == 0) | (filters["top_k"] >= logits.shape[1])
        if "min_p" in filters:
            in_rounds &= filters["min_p"] <= 0
        rows = in_rounds.nonzero().flatten()
        children = None if child is None else child[rows]
        tokens[rows] = _draw_nucleus(
            scaled[rows], seeds[rows], positions[rows], children, filters["top_p"][rows]
        )
    return tokens


@_counted
def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    child: torch.Tensor | None = None,
    idx_mapping: torch.Tensor | None = None,
    prompt_len: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.sample_tokens`, in float64 but for the noise."""
    if prompt_len is not None:
        positions = positions - prompt_len
    of_row = {"temperature": temperature, "seeds": seeds, "positions": positions.long()}
    optional = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "child": child}
    of_row |= {name: value for name, value in optional.items() if value is not None}
    if idx_mapping is not None:
        slots = idx_mapping.clamp(min=0).long()
        of_row = {name: value[slots] for name, value in of_row.items()}
        logits = logits.masked_fill((idx_mapping < 0)[:, None], -torch.inf)
    drawn = of_row["temperature"] != 0
    failed = logits.isnan().any(1) | (drawn & (logits == torch.inf).any(1))
    empty = (logits == -torch.inf).all(1)
    tokens = logits.nan_to_num(-torch.inf, torch.inf, -torch.inf).argmax(1)
    rows = (drawn & ~failed & ~empty).nonzero().flatten()
    of_row = {name: value[rows] for name, value in of_row.items()}
    tokens[rows] = _draw_filtered(logits[rows], child=of_row.pop("child", None), **of_row)
    tokens = tokens.masked_fill(empty, -1).masked_fill(failed, -2)
    return tokens if out is None else out.copy_(tokens)
