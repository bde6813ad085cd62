"""The ops from logits to tokens in plain torch."""

from __future__ import annotations

from typing import Unpack, cast

import torch

from mrv1.kernels._base.oracle import ORACLE_DTYPES, counted, wide
from mrv1.kernels.sampling.contracts import (
    ALLOWED,
    BIAS,
    MIN_TOKENS,
    PENALTIES,
    BadWords,
    History,
    LogitEdits,
    TopLogprobs,
    check_bad_words,
    check_edit_logits,
    check_token_bitmask,
    check_top_logprobs,
    shard_masks,
)
from mrv1.kernels.sampling.filters import FILTERS, Filters, kept_tokens, only_top_p
from mrv1.kernels.sampling.shards import VocabShards, check_asked, check_shards


@counted
def apply_bad_words(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    history: History,
    bad_words: BadWords,
    *,
    ahead: torch.Tensor | None = None,
    draft_token_ids: torch.Tensor | None = None,
    first_token: int | None = None,
) -> None:
    """Mask row by row, all words at once; see :func:`mrv1.kernels.apply_bad_words`."""
    check_bad_words(logits, idx_mapping, history, bad_words, ahead, draft_token_ids, ORACLE_DTYPES)
    match_prompt = bad_words.bad_words_match_prompt
    max_words, max_len = bad_words.bad_words.shape[1:]
    word = torch.arange(max_words, device=logits.device)
    column = torch.arange(max_len, device=logits.device)
    for row in ((idx_mapping >= 0) & (max_len > 0)).nonzero().flatten().tolist():
        slot = int(idx_mapping[row])
        if bad_words.num_bad_words[slot] <= 0:
            continue
        start = 0 if match_prompt is not None and match_prompt[slot] else history.prompt_len[slot]
        tokens = history.token_ids[slot, start : history.num_tokens[slot]]
        tokens = tokens[-max_len:]
        if ahead is not None and draft_token_ids is not None:
            drafts = draft_token_ids[row // (len(logits) // len(draft_token_ids))]
            tokens = torch.cat([tokens, drafts[: ahead[row]]])
        words, lengths = bad_words.bad_words[slot], bad_words.bad_word_lens[slot].long()
        fits = (lengths >= 1) & (lengths <= max_len) & (lengths - 1 <= len(tokens))
        fits &= word < bad_words.num_bad_words[slot]
        words, lengths = words[fits], lengths[fits, None]
        position = len(tokens) - (lengths - 1) + column  # where each word's tokens would stand
        seen = torch.cat([tokens, tokens.new_zeros(max_len)])[position]
        completes = ((seen == words) | (column >= lengths - 1)).all(1)
        last = words.gather(1, lengths - 1)[completes].flatten().long() - (first_token or 0)
        logits[row, last[(last >= 0) & (last < logits.shape[1])]] = -torch.inf


@counted
def edit_logits(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    history: History,
    edits: LogitEdits,
    *,
    ahead: torch.Tensor | None = None,
    draft_token_ids: torch.Tensor | None = None,
    first_token: int | None = None,
) -> None:
    """Oracle of :func:`mrv1.kernels.edit_logits`; counts anew and leaves ``counts`` unchanged."""
    drafts_of = (ahead, draft_token_ids)
    check_edit_logits(logits, idx_mapping, history, edits, *drafts_of, first_token, ORACLE_DTYPES)
    vocab_size, first = logits.shape[1], first_token or 0
    allowed_mask = shard_masks(edits.allowed_mask, first_token)

    def in_vocab(ids: torch.Tensor) -> torch.Tensor:
        ids = ids - first
        return ids[(ids >= 0) & (ids < vocab_size)].long()

    for row in (idx_mapping >= 0).nonzero().flatten().tolist():
        slot = int(idx_mapping[row])
        x, used, tokens = logits[row], int(edits.edits[slot]), history.token_ids[slot]
        known, prompt_len = int(history.num_tokens[slot]), int(history.prompt_len[slot])
        prompt, output = tokens[:known].tensor_split([prompt_len])
        if ahead is not None and draft_token_ids is not None:
            drafts = draft_token_ids[row // (len(logits) // len(draft_token_ids))]
            output = torch.cat([output, drafts[: ahead[row]]])
        if used & BIAS:
            ids = edits.bias_ids[slot, : max(int(edits.num_bias[slot]), 0)].long() - first
            is_id = (ids >= 0) & (ids < vocab_size)
            ids, values = ids[is_id], edits.bias_values[slot, : len(ids)][is_id]
            x[ids] = (wide(x[ids]) + values).to(x.dtype)
        if used & PENALTIES:
            num_output = torch.bincount(in_vocab(output), minlength=vocab_size)
            seen = torch.cat([in_vocab(prompt), in_vocab(output)]).unique()
            y, num_output = wide(x[seen]), num_output[seen]
            repetition = edits.repetition_penalty[slot]
            y = torch.where(y > 0, y / repetition, y * repetition)
            y = y - edits.frequency_penalty[slot] * num_output
            y = y - torch.where(num_output > 0, edits.presence_penalty[slot], 0)
            x[seen] = y.to(x.dtype)
        if used & ALLOWED:
            x.masked_fill_(~_token_bits(allowed_mask[slot], vocab_size), -torch.inf)
        if used & MIN_TOKENS and len(prompt) + len(output) < history.min_total_tokens[slot]:
            x[in_vocab(history.late_token_ids[slot])] = -torch.inf


def _token_bits(mask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the bit of each token, [..., ceil(vocab / 32)] int32 -> [..., vocab] bool."""
    bits = mask[..., None] >> torch.arange(32, dtype=torch.int32, device=mask.device) & 1
    return bits.flatten(-2)[..., :vocab_size].bool()


@counted
def apply_token_bitmask(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    first_token: int | None = None,
) -> None:
    """Oracle of :func:`mrv1.kernels.apply_token_bitmask`."""
    check_token_bitmask(logits, bitmask, rows, first_token, ORACLE_DTYPES)
    bitmask = shard_masks(bitmask, first_token)
    targets = range(len(logits)) if rows is None else rows.tolist()
    for mask, row in zip(bitmask, targets, strict=True):
        if row >= 0:
            logits[row].masked_fill_(~_token_bits(mask, logits.shape[1]), -torch.inf)


@counted
def top_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    *,
    idx_mapping: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    row_num_top: torch.Tensor | None = None,
    shards: VocabShards | None = None,
) -> TopLogprobs:
    """Oracle of :func:`mrv1.kernels.top_logprobs`: the whole log-softmax, and a stable sort."""
    vocab_size = check_shards(logits, shards)
    check_top_logprobs(
        logits, vocab_size, token_ids, num_top, idx_mapping, temperature, row_num_top,
        ORACLE_DTYPES,
    )  # fmt: skip
    if shards is not None:
        check_asked(token_ids.shape[1])
        logits = shards.whole(slice(len(logits)))
    x = wide(logits)
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
    if row_num_top is not None and len(row_num_top):
        column = torch.arange(num_top, device=x.device)
        padding = padding | (column >= row_num_top[slots.clamp_min(0)][:, None])
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
    """Return the four random words of philox4x32-10; all tensors int64 holding 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product past 2^63 wraps, but its bits are right: masks remove the sign after ">>".
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

    ``seeds`` [rows] int64 are the keys, low word first; the counters are ``positions`` [rows],
    ``index`` [n] or [rows, n], both int64, ``purpose``, and ``child`` [rows] integers, None = 0.
    """
    seeds, positions = seeds[:, None], positions[:, None]
    index = index.expand(len(seeds), -1)
    zero = torch.zeros_like(positions)
    children = zero if child is None else child.long()[:, None]
    counter = (positions & _UINT32, index, zero + purpose, children & _UINT32)
    return philox4x32(counter, (seeds & _UINT32, seeds >> 32 & _UINT32))[0]


def gumbel_noise(words: torch.Tensor) -> torch.Tensor:
    """Return the standard Gumbel variable of each 32-bit word, float32.

    -log(-log(1 - w)) with w = (word + 1/2) / 2^32: the smallest w decide a draw and keep their
    full precision. A float32 u near 1 in -log(-log(u)) has lost it (infinite at u = 1).
    """
    w = (words.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-w)).float()


def group_size(vocab_size: int) -> int:
    """Return the number of ids in a group: 128, or more to have at most 4096 groups in a row."""
    size = 128
    while -(-vocab_size // size) > 4096:
        size *= 2
    return size


def _draw(
    scaled: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    child: torch.Tensor | None,
    purpose: int = 0,
) -> torch.Tensor:
    """Return a token of each row: draw a group by the mass of its tokens, then one token."""
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
    """Draw a token of each row, in rounds until the strictly likelier tokens have < top_p."""
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
    filters: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return a token of each row; no row is greedy, and every row has a token to draw."""
    logits = logits.double()
    scaled = (logits - logits.amax(1, keepdim=True)) / temperature.double()[:, None]
    if not filters:
        return _draw(scaled, seeds, positions, child)
    kept = scaled.masked_fill(~kept_tokens(scaled, **filters), -torch.inf)
    tokens = _draw(kept, seeds, positions, child)
    if "top_p" in filters:
        rows = only_top_p(filters, logits.shape[1]).nonzero().flatten()
        children = None if child is None else child[rows]
        tokens[rows] = _draw_nucleus(
            scaled[rows], seeds[rows], positions[rows], children, filters["top_p"][rows]
        )
    return tokens


@counted
def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    child: torch.Tensor | None = None,
    idx_mapping: torch.Tensor | None = None,
    prompt_len: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    shards: VocabShards | None = None,
    **filters: Unpack[Filters],
) -> torch.Tensor:
    """Oracle of :func:`mrv1.kernels.sample_tokens`, in float64 except for the noise.

    With shards, all ranks' logits have to be there: it does not wait.
    """
    if shards is not None:
        check_shards(logits, shards)
        logits = shards.whole(slice(len(logits)))
    if prompt_len is not None:
        positions = positions - prompt_len
    of_row = {"temperature": temperature, "seeds": seeds, "positions": positions.long()}
    optional = {"child": child, **cast("dict[str, torch.Tensor | None]", filters)}
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
    if rows.numel():
        of_row = {name: value[rows] for name, value in of_row.items()}
        given = {name: of_row.pop(name) for name in FILTERS if name in of_row}
        child = of_row.pop("child", None)
        tokens[rows] = _draw_filtered(logits[rows], child=child, filters=given, **of_row)
    tokens = tokens.masked_fill(empty, -1).masked_fill(failed, -2)
    return tokens if out is None else out.copy_(tokens)
