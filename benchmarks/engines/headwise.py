"""Serving with a head policy and with uniform heads: throughput, first token, later tokens."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.engines.headwise_options import HeadwiseOptions
from benchmarks.measure.timing import WrongResultError
from mrv1.device import resolve_device
from mrv1.engine import EngineCore
from mrv1.engine.prefix_cache import extend_chain
from mrv1.engine.request import Request
from mrv1.errors import ConfigError
from mrv1.models import DecoderModel
from mrv1.provenance import provenance
from mrv1.sampler import SamplingParams

SCHEMA = 1
"""Version of the result's layout; raised when a field changes its meaning or goes."""

CHECKED_TOKENS = 64
"""Tokens that a lone request generates before anything is timed: the variants of a policy must
agree on them. At most half of the context."""

SAME_TOKENS = ("kept", "discrete", "recycled")
"""Variants whose products are added in the same order: they must generate the same tokens."""

WARM_UP_REQUESTS, WARM_UP_TOKENS = 2, 32
"""Requests of the uncounted run before the counted runs, and the most tokens of each."""

CONFIDENCE = 0.95
"""Of the intervals of what a variant saves."""

FILL_ELEMENTS = 1 << 24
"""Most random values drawn; copies of them fill the cache where contexts are planted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadwiseBench(HeadwiseOptions):
    """The requests to serve, and the caches and head policy to serve them with.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    prompt_tokens: int = 8192
    output_tokens: int = 64
    num_requests: int = 6
    """Requests, all added at once."""
    planted: bool = False
    """Plant all but the last tokens of each prompt in the prefix cache, with random keys and
    values, to measure decodes of contexts that would take minutes to compute."""
    repeats: int = 1
    """Counted runs, after a few uncounted requests."""

    def __post_init__(self) -> None:
        """Check the fields that the engine does not check."""
        HeadwiseOptions.__post_init__(self)
        self.check_least(output_tokens=2, num_requests=1, repeats=1)
        if not 1 <= self.prompt_tokens <= self.context - self.output_tokens:
            raise ConfigError(
                f"prompt_tokens: expected 1 to {self.context - self.output_tokens}, context "
                f"less output_tokens, got {self.prompt_tokens}"
            )


def run_headwise(
    bench: HeadwiseBench, say: Callable[[str], None] = lambda _: None
) -> dict[str, object]:
    """Serve the same requests in every variant and return the result, ready for JSON.

    Raises:
        ConfigError: an option is wrong.
        UnsupportedDeviceError: the device is not there or cannot run mrv1.
        CapacityError: the KV cache does not fit.
        StepError, RequestError: a request failed.
        WrongResultError: the table of blocks, or recycling, changed a token.
    """
    device = resolve_device(bench.device)
    model = bench.new_model(device)
    results: list[dict[str, Any]] = []
    alone: list[int] | None = None
    for name in bench.variants:
        with bench.engine(name, model, enable_prefix_caching=bench.planted) as core:
            say(core.runner.describe())
            if name in SAME_TOKENS:
                alone = _checked(core, bench, alone)
            if bench.planted:
                fill_randomly(core, bench.seed)
            some = _prompts(bench, model, 0)[:WARM_UP_REQUESTS]
            _serve(core, some, min(bench.output_tokens, WARM_UP_TOKENS), planted=bench.planted)
            runs = []
            for run in range(1, bench.repeats + 1):
                prompts = _prompts(bench, model, run)
                runs.append(_serve(core, prompts, bench.output_tokens, planted=bench.planted))
                say(
                    f"{name}, run {run}: {runs[-1]['tokens_per_s']:.0f} tokens/s, "
                    f"{runs[-1]['between_tokens_ms']:.2f} ms between tokens, "
                    f"first after {runs[-1]['first_token_ms']:.0f} ms"
                )
            results.append(_summary(name, core, runs, results))
    return {
        "op": "headwise",
        "schema": SCHEMA,
        "shape": bench.shape,
        "dtype": str(model.dtype).removeprefix("torch."),
        **provenance(device, bench.commit),
        "conditions": {
            **bench.conditions(),
            "prompt_tokens": bench.prompt_tokens,
            "output_tokens": bench.output_tokens,
            "num_requests": bench.num_requests,
            "planted": bench.planted,
            "repeats": bench.repeats,
            "warm_up": f"{WARM_UP_REQUESTS} requests of at most {WARM_UP_TOKENS} tokens",
        },
        "results": results,
    }


def _prompts(bench: HeadwiseBench, model: DecoderModel, run: int) -> list[list[int]]:
    generator = np.random.default_rng([bench.seed, run])
    shape = (bench.num_requests, bench.prompt_tokens)
    prompts: list[list[int]] = generator.integers(model.config.vocab_size, size=shape).tolist()
    return prompts


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def _run(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    after_step: Callable[[Sequence[Request]], None] = lambda _: None,
) -> list[Request]:
    requests = [
        core.add_request(f"{index}", prompt, _params(num_tokens))
        for index, prompt in enumerate(prompts)
    ]
    while core.has_unfinished_requests:
        core.step()
        after_step(requests)
    for request in requests:
        if request.error is not None:
            raise request.error
    return requests


def _checked(core: EngineCore, bench: HeadwiseBench, expected: list[int] | None) -> list[int]:
    """Return the tokens of a lone request, which is long enough to recycle blocks."""
    num_tokens = min(CHECKED_TOKENS, bench.context // 2)
    length = min(bench.context - num_tokens, max(2 * bench.window + bench.sink, 64))
    vocab_size = core.runner.model_config.vocab_size
    prompt = np.random.default_rng(bench.seed).integers(vocab_size, size=length).tolist()
    (request,) = _run(core, [prompt], num_tokens)
    if expected is not None and request.output_token_ids != expected:
        raise WrongResultError(
            f"{', '.join(SAME_TOKENS)}: expected the same tokens, got different ones"
        )
    return request.output_token_ids


def _serve(
    core: EngineCore, prompts: Sequence[Sequence[int]], output_tokens: int, *, planted: bool
) -> dict[str, Any]:
    """Serve all prompts at once; return the figures of one run.

    ``crowded_tokens_per_s`` ends at the last step in which a request waited, before the time when
    few requests are left. None if no request waited.
    """
    if planted:
        for prompt in prompts:
            plant_prefix(core, prompt)
    before = core.metrics()
    start = time.perf_counter()
    crowded = (start, 0)

    def note(requests: Sequence[Request]) -> None:
        nonlocal crowded
        if core.scheduler.num_waiting:
            crowded = time.perf_counter(), sum(len(r.output_token_ids) for r in requests)

    requests = _run(core, prompts, output_tokens, note)
    seconds = time.perf_counter() - start
    after = core.metrics()
    times = [
        (request.arrival_time, request.first_token_time, request.finish_time)
        for request in requests
    ]
    spans = [
        (first - arrival, finish - first)
        for arrival, first, finish in times
        if first is not None and finish is not None
    ]
    return {
        "seconds": seconds,
        "tokens_per_s": len(requests) * output_tokens / seconds,
        "crowded_tokens_per_s": crowded[1] / (crowded[0] - start) if crowded[1] else None,
        "first_token_ms": statistics.median(first for first, _ in spans) * 1e3,
        "between_tokens_ms": statistics.median(rest for _, rest in spans)
        / (output_tokens - 1)
        * 1e3,
        "num_preemptions": after["num_preemptions"] - before["num_preemptions"],
        "cached_tokens": after["prefix_hit_tokens"] - before["prefix_hit_tokens"],
    }


def _summary(
    name: str,
    core: EngineCore,
    runs: Sequence[dict[str, Any]],
    results: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return a variant's entry: medians, ratios to the first variant, and savings over it."""
    entry: dict[str, Any] = {
        key: statistics.median(run[key] for run in runs)
        for key in ("tokens_per_s", "first_token_ms", "between_tokens_ms", "num_preemptions")
    }
    crowded = [run["crowded_tokens_per_s"] for run in runs]
    entry["crowded_tokens_per_s"] = None if None in crowded else statistics.median(crowded)
    first = results[0] if results else entry

    def saving(key: str) -> dict[str, float] | None:
        base = [run[key] for run in results[0]["runs"]] if results else []
        return paired_saving(base, [run[key] for run in runs])

    were_crowded = entry["crowded_tokens_per_s"] and first["crowded_tokens_per_s"]
    return {
        "variant": name,
        "kv_cache": core.kv_report(),
        **entry,
        "crowded_ratio": were_crowded
        and entry["crowded_tokens_per_s"] / first["crowded_tokens_per_s"],
        "throughput_ratio": entry["tokens_per_s"] / first["tokens_per_s"],
        "first_token_speedup": first["first_token_ms"] / entry["first_token_ms"],
        "between_tokens_speedup": first["between_tokens_ms"] / entry["between_tokens_ms"],
        "first_token_saving": saving("first_token_ms"),
        "between_tokens_saving": saving("between_tokens_ms"),
        "runs": list(runs),
    }


def paired_saving(base_ms: Sequence[float], own_ms: Sequence[float]) -> dict[str, float] | None:
    """Return what part of ``base_ms`` is saved, run by run: the mean, and its 95% interval.

    The runs are pairs, as run ``i`` of every variant has the same prompts. The interval is
    Student's, for normal differences; None with fewer than two pairs, which have no interval.
    """
    if len(base_ms) < 2:
        return None
    saved = [1 - own / base for base, own in zip(base_ms, own_ms, strict=True)]
    mean = statistics.fmean(saved)
    half = _student_t(len(saved) - 1) * statistics.stdev(saved) / math.sqrt(len(saved))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def _student_t(degrees: int) -> float:
    """Return t such that Student's distribution has ``CONFIDENCE`` between -t and t.

    With t = sqrt(degrees) * tan(angle), its density over the angle is cos(angle) ** (degrees - 1).
    """
    edges = np.linspace(0, math.pi / 2, 1 << 16)
    density = np.cos((edges[1:] + edges[:-1]) / 2) ** (degrees - 1)
    below = np.concatenate([[0.0], density.cumsum() / density.sum()])
    return math.sqrt(degrees) * math.tan(float(np.interp(CONFIDENCE, below, edges)))


# --- planted contexts: cached blocks that no step computed ---------------------------------------


def plant_prefix(core: EngineCore, prompt: Sequence[int]) -> None:
    """Enter all full blocks before a prompt's last token into the prefix cache.

    A streaming group gets only the blocks that the next token sees, as after a computed prompt,
    whose digests the prefix cache remembers for a while.

    Raises:
        CapacityError: a pool has too few blocks.
    """
    pools = core.scheduler.pools
    num_blocks = (len(prompt) - 1) // pools.block_size
    digests: list[bytes] = []
    cached = np.array(prompt[: num_blocks * pools.block_size], dtype=np.int32)
    extend_chain(digests, cached, pools.block_size)
    core.scheduler.prefix_cache.recent.keep(cached, b"", digests)
    for pool, seen in zip(pools, pools.keeps, strict=True):
        gone = seen.freed_blocks(num_blocks * pools.block_size, pools.block_size)
        wanted = [digest for index, digest in enumerate(digests) if index not in gone]
        blocks = pool.allocate(len(wanted))
        for block, digest in zip(blocks, wanted, strict=True):
            pool.cache(block, digest)
        pool.free(blocks)


def fill_randomly(core: EngineCore, seed: int) -> None:
    """Write random keys, values and scales to every page: no NaN may be read."""
    device, layers = core.runner.device, core.runner.kv_cache.layers
    generator = torch.Generator(device).manual_seed(seed)
    count = min(FILL_ELEMENTS, max(layer.k.numel() for layer in layers))
    # Times 100, a value above 4.48 would exceed e4m3's largest, 448, and its code would be NaN.
    values = torch.randn(count, device=device, generator=generator).clamp_(-4, 4)
    for layer in layers:
        for cache in (layer.k, layer.v):
            largest = 100.0 if layer.scales is not None else 1.0  # codes use their range
            _tile(cache.view(-1), (values * largest).to(cache.dtype))
        if layer.scales is not None:
            for scale in (layer.scales.k_scale, layer.scales.v_scale):
                _tile(scale.view(-1), values.sigmoid() / 50 + 1e-3)


def _tile(target: torch.Tensor, values: torch.Tensor) -> None:
    for start in range(0, len(target), len(values)):
        piece = target[start : start + len(values)]
        piece.copy_(values[: len(piece)])
