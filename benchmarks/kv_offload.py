"""Copy finished KV blocks to host memory while the next layers run; measure what it costs.

python -m benchmarks.kv_offload [--shape qwen3-0.6b] [--prompt-tokens 8192] [--output FILE.json]

Serves the same prompts without a listener, with a listener that does nothing (the CUDA graphs of
steps with prompts record an event for each layer), and with ``HostCopies``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.measure.shapes import shape_config
from mrv1.config import EngineConfig
from mrv1.device import resolve_device
from mrv1.engine import EngineCore
from mrv1.models import random_model
from mrv1.models.batch import LayerCache
from mrv1.provenance import provenance
from mrv1.runner import KVListener, KVReady, RequestId
from mrv1.sampler import SamplingParams


class BlockCopy(NamedTuple):
    """Consecutive blocks of a request in one layer."""

    first: int
    """The first block, counted from the start of the request."""
    pages: tuple[torch.Tensor, ...]
    """K and V ``[blocks, kv_heads, block_size, head_dim]``, fp8 codes as uint8, followed by the
    scales of both unless they are static. Valid once the step's result has been read."""


class HostCopies:
    """A KV listener that copies each block of each request when its last token is written.

    For a model whose heads share one list of blocks. On a GPU the copies run on a stream of their
    own. The stream of the launches waits for them after the last layer, because a later step may
    write new keys into these blocks: only the copy of the last layer is not hidden. A request's
    copies may have blocks beyond its last token, whose content means nothing.
    """

    def __init__(self, num_layers: int, block_size: int) -> None:
        """Expect calls for ``num_layers`` layers, with blocks of ``block_size`` tokens."""
        self.copies: dict[RequestId, list[list[BlockCopy]]] = {}
        """[layers] of each request: the blocks copied so far; anew after a preemption."""
        self._num_layers, self._block_size = num_layers, block_size
        self._full: list[tuple[RequestId, int, int]] = []
        """Requests of this step with blocks to copy: the first block, and how many."""
        self._ids = torch.empty(0)
        """The ids of these blocks, request by request."""
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, ready: KVReady) -> None:
        """Copy one layer's blocks that the step has filled."""
        if ready.layer == 0:
            self._find_full_blocks(ready)
        if self._full:
            counts = [count for *_, count in self._full]
            copied = (page.split(counts) for page in self._copied(ready))
            for (req_id, first, _), *pages in zip(self._full, *copied, strict=True):
                self.copies[req_id][ready.layer].append(BlockCopy(first, tuple(pages)))

    def _find_full_blocks(self, ready: KVReady) -> None:
        """Note the blocks that the step fills, and those that the prefix cache had."""
        self._full, ids = [], []
        for tokens in ready.tokens:
            if tokens.block_ids is None:
                continue  # the request entered before there was a listener
            if tokens.start == 0:  # the request enters
                self.copies[tokens.req_id] = [[] for _ in range(self._num_layers)]
            (blocks,) = tokens.block_ids
            first = tokens.start // self._block_size
            num_full = tokens.stop // self._block_size - first
            if num_full:
                self._full.append((tokens.req_id, first, num_full))
                ids += blocks[:num_full]
        self._ids = torch.tensor(ids, dtype=torch.int64)
        if ready.event is not None:
            self._ids = self._ids.pin_memory()
            self._stream = self._stream or torch.cuda.Stream()

    def _copied(self, ready: KVReady) -> list[torch.Tensor]:
        """Return copies of the blocks in host memory."""
        pages = _pages(ready.cache)
        if self._stream is None or ready.event is None:
            return [page[self._ids] for page in pages]
        copies = []
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready.event)
            ids = self._ids.to(pages[0].device, non_blocking=True)
            for page in pages:
                blocks = page[ids]
                copies.append(torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=True))
                copies[-1].copy_(blocks, non_blocking=True)
        if ready.layer == self._num_layers - 1:
            torch.cuda.current_stream().wait_stream(self._stream)
        return copies


def _pages(cache: LayerCache) -> list[torch.Tensor]:
    """Return a layer's pages and scales, with the block as their first dimension."""
    if cache.scales is None:
        return [cache.k, cache.v]
    codes = [cache.k.view(torch.uint8), cache.v.view(torch.uint8)]
    is_static = cache.scales.granularity == "head"
    return codes if is_static else [*codes, cache.scales.k_scale, cache.scales.v_scale]


# --- the cost ------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Return seconds and first-token times of every variant, run in turns; ready for JSON."""
    device = resolve_device(options.device)
    config = EngineConfig(
        model=options.shape,
        device=str(device),
        max_model_len=options.prompt_tokens + options.output_tokens,
        max_num_seqs=options.num_requests,
        num_kv_blocks=options.num_requests
        * -(-(options.prompt_tokens + options.output_tokens) // 16),
        enable_prefix_caching=False,
        head_policy=None,  # whatever the environment says
    )
    model = random_model(shape_config(options.shape), "auto", device, seed=0)
    core = EngineCore(config, model=model, progress=False)
    num_layers = core.runner.spec.num_layers
    runs: dict[str, list[dict[str, float]]] = {"none": [], "empty": [], "copies": []}
    try:
        for turn in range(-1, options.repeats):  # the first turn warms up
            for name, of_variant in runs.items():
                copies = HostCopies(num_layers, config.block_size)
                listener: dict[str, KVListener | None] = {
                    "none": None, "empty": lambda _: None, "copies": copies
                }  # fmt: skip
                core.set_kv_listener(listener[name])
                figures = _serve(core, options, seed=turn + 1)
                if turn >= 0:
                    of_variant.append(figures)
    finally:
        core.runner.close()
    names = ("seconds", "first_token_ms")
    return {
        "op": "kv_offload",
        "shape": options.shape,
        **provenance(device, options.commit),
        "conditions": {
            name: getattr(options, name)
            for name in ("prompt_tokens", "output_tokens", "num_requests", "repeats")
        },
        "results": {
            variant: {name: statistics.median(run[name] for run in found) for name in names}
            | {"runs": found}
            for variant, found in runs.items()
        },
    }


def _serve(core: EngineCore, options: argparse.Namespace, *, seed: int) -> dict[str, float]:
    """Serve all prompts at once."""
    shape = (options.num_requests, options.prompt_tokens)
    vocab_size = core.runner.model_config.vocab_size
    prompts = np.random.default_rng(seed).integers(vocab_size, size=shape).tolist()
    params = SamplingParams(temperature=0, max_tokens=options.output_tokens, ignore_eos=True)
    start = time.perf_counter()
    requests = [
        core.add_request(str(index), prompt, params) for index, prompt in enumerate(prompts)
    ]
    while core.has_unfinished_requests:
        core.step()
    seconds = time.perf_counter() - start
    for request in requests:
        if request.error is not None:
            raise request.error
    firsts = [
        request.first_token_time - request.arrival_time
        for request in requests
        if request.first_token_time is not None
    ]
    return {"seconds": seconds, "first_token_ms": statistics.median(firsts) * 1e3}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--num-requests", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", help="commit of the source; default: ask git")
    parser.add_argument("--output", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write the result."""
    options = parse(arguments)
    result = json.dumps(measure(options), indent=2)
    if options.output is not None:
        options.output.write_text(result + "\n", encoding="utf-8")
    print(result)


if __name__ == "__main__":
    main()
