"""Other samplers.

They draw with their own random generators, so their tokens are not checked. FlashInfer and vLLM
run the draws only; plain torch runs every case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks.kernels.sampler_cases import BAD_WORD_LEN, NUM_TOP, PROMPT_TOKENS, Work
from benchmarks.measure.timing import Launch
from benchmarks.peers import Peer

Adapter = Callable[[Work], Launch | None]
"""Makes the launch on a buffer set; None = the peer has nothing for the case."""


def _asks(work: Work) -> tuple[bool, bool, bool, bool]:
    """Return whether rows are greedy, and use top-k, top-p, min-p."""
    first = {n: work.slots[n][0].item() for n in ("temperature", "top_k", "top_p", "min_p")}
    return first["temperature"] == 0, first["top_k"] > 0, first["top_p"] < 1, first["min_p"] > 0


def flashinfer(work: Work) -> Launch | None:
    """Run FlashInfer's softmax, with the temperature, and its fused filter and draw."""
    from flashinfer import sampling  # type: ignore[import-not-found]

    greedy, has_top_k, has_top_p, has_min_p = _asks(work)
    if greedy or work.case.stage != "draw":
        return None
    temperature = work.slots["temperature"]
    top_k, top_p, min_p = (work.slots[name] for name in ("top_k", "top_p", "min_p"))
    draw = sampling.sampling_from_probs
    if has_min_p:
        draw = partial(sampling.min_p_sampling_from_probs, min_p=min_p)
    elif has_top_k and has_top_p:
        draw = partial(
            sampling.top_k_top_p_sampling_from_probs,
            top_k=top_k, top_p=top_p, filter_apply_order="top_k_first",
        )  # fmt: skip
    elif has_top_k:
        draw = partial(sampling.top_k_sampling_from_probs, top_k=top_k)
    elif has_top_p:
        draw = partial(sampling.top_p_sampling_from_probs, top_p=top_p)
    return lambda: draw(sampling.softmax(work.logits, temperature=temperature))


def vllm_mask(work: Work) -> Launch | None:
    """Run vLLM's Triton mask of top-k and top-p on scaled logits, as in vLLM; no draw."""
    _, has_top_k, has_top_p, has_min_p = _asks(work)
    if work.case.stage != "draw" or has_min_p or not (has_top_k or has_top_p):
        return None
    from vllm.v1.sample.ops.topk_topp_triton import (
        apply_top_k_top_p_triton,
    )

    top_k = work.slots["top_k"] if has_top_k else None
    top_p = work.slots["top_p"] if has_top_p else None
    temperature = work.slots["temperature"][:, None]
    return lambda: apply_top_k_top_p_triton(work.logits / temperature, top_k, top_p)


def plain_torch(work: Work) -> Launch:
    """Run plain torch, as a sampler without kernels of its own does; edits are in place."""
    if work.case.stage in ("logprobs", "raw logprobs"):
        return _logprobs(work)
    steps = []
    if work.case.num_bad_words:
        steps.append(_ban(work))
    if work.case.num_allowed:
        steps.append(_mask(work))
    if work.case.num_bias:
        steps.append(_bias(work))
    if work.case.sampling_params(work.logits.shape[1]).penalizes:
        steps.append(_penalize(work))
    if work.case.stage in ("draw", "edit and draw"):
        steps.append(_draw(work))

    def launch() -> object:
        result = None
        for step in steps:
            result = step()
        return result

    return launch


def _ban(work: Work) -> Launch:
    """Compare all words, of one length here, with the ends of the histories."""
    count = work.case.num_bad_words
    words = work.slots["bad_words"].unflatten(1, (-1, BAD_WORD_LEN))[:, :count].long()
    prefix, last = words[:, :, :-1], words[:, :, -1]
    before = torch.arange(1 - BAD_WORD_LEN, 0, device=words.device)
    history, num_tokens = work.history.token_ids, work.history.num_tokens.long()

    def launch() -> None:
        end = history.gather(1, num_tokens[:, None] + before)
        completes = (prefix == end[:, None]).all(2)
        banned = work.logits.gather(1, last).masked_fill(completes, -torch.inf)
        work.logits.scatter_(1, last, banned)

    return launch


def _mask(work: Work) -> Launch:
    """Fill by a mask of booleans, which is made before and not timed."""
    bits = work.slots["allowed_mask"][:, :, None] >> torch.arange(32, device=work.logits.device)
    is_banned = (bits & 1 == 0).flatten(1)[:, : work.logits.shape[1]].contiguous()
    return partial(work.logits.masked_fill_, is_banned, -torch.inf)


def _bias(work: Work) -> Launch:
    count = int(work.slots["num_bias"][0])
    ids, values = work.slots["bias_ids"][:, :count].long(), work.slots["bias_values"][:, :count]
    return partial(work.logits.scatter_add_, 1, ids, values)


def _penalize(work: Work) -> Launch:
    """Count the history anew in every step, and penalize the whole vocabulary."""
    repetition, frequency, presence = (
        work.slots[f"{name}_penalty"][:, None] for name in ("repetition", "frequency", "presence")
    )
    prompt, output = work.history.token_ids.long().tensor_split([PROMPT_TOKENS], dim=1)
    logits = work.logits

    def counts(token_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(logits).scatter_add_(
            1, token_ids, logits.new_ones(1, 1).expand_as(token_ids)
        )

    def launch() -> None:
        num_output = counts(output)
        is_seen = (counts(prompt) + num_output) > 0
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        scaled = torch.where(is_seen, scaled, logits) - frequency * num_output
        torch.sub(scaled, presence * (num_output > 0), out=logits)

    return launch


def _draw(work: Work) -> Launch:
    """Filter by a sort, then softmax and an exponential race."""
    greedy, has_top_k, has_top_p, has_min_p = _asks(work)
    logits = work.logits
    if greedy:
        return partial(logits.argmax, dim=1)
    top_k, top_p = int(work.slots["top_k"][0]), work.slots["top_p"][:, None]
    temperature, min_p = work.slots["temperature"][:, None], work.slots["min_p"][:, None]

    def launch() -> torch.Tensor:
        probs = (logits / temperature).softmax(1)
        if has_min_p:
            probs = probs.where(probs >= min_p * probs.amax(1, keepdim=True), 0.0)
        if has_top_k or has_top_p:
            ranked, order = probs.sort(dim=1, descending=True)
            if has_top_k:
                ranked[:, top_k:] = 0
            if has_top_p:
                mass = ranked.cumsum(1)
                ranked = ranked.where(mass - ranked < top_p * mass[:, -1:], 0.0)
            probs = torch.zeros_like(probs).scatter_(1, order, ranked)
        return (probs / torch.empty_like(probs).exponential_()).argmax(1)

    return launch


def _logprobs(work: Work) -> Launch:
    """Take the whole log-softmax, its top values, and the rank of the token drawn."""

    def launch() -> tuple[torch.Tensor, ...]:
        logits = work.logits.clone() if work.case.stage == "raw logprobs" else work.logits
        logprobs = logits.log_softmax(1)
        drawn = logprobs.gather(1, work.drawn)
        return drawn, 1 + (logprobs > drawn).sum(1), *logprobs.topk(NUM_TOP, dim=1)

    return launch


SAMPLER_PEERS: Mapping[str, Peer[Adapter]] = {
    "flashinfer": Peer(module="flashinfer", adapter=flashinfer),
    "vllm-mask": Peer(module="vllm", adapter=vllm_mask),
    "torch": Peer(module="torch", adapter=plain_torch),
}
"""Name -> peer."""
