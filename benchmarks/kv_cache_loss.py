"""Measure a model's loss on held-out text by the type of its KV cache.

python -m benchmarks.kv_cache_loss OUTPUT.json [--repeats 16] [--commit C]   10 minutes, CPU core

LLM gives the log-probabilities of --repeats windows of the held-out tenth of training/data, once
for each type of cache. Attention reads all keys and values from the cache, a token's own too.
*of_auto* is the loss over that with ``kv_cache_dtype="auto"``; intervals are 95% bootstrap
intervals over windows, in pairs for the quotient.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import numpy as np
import torch

from benchmarks.measure.options import parse_script, script_parser, write_result
from benchmarks.recall_tasks import Scores, interval, say
from mrv1 import LLM, SamplingParams
from mrv1.config import KVCacheDtypeName, checkpoint_dir
from training.corpus import load_split

CPU_INFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """Return the processor's name: Linux's, else its architecture."""
    text = CPU_INFO.read_text("utf-8") if CPU_INFO.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def window_losses(llm: LLM, windows: Sequence[list[int]]) -> Scores:
    """Return each window's mean loss, in nats per token; nothing predicts its first token."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    losses = []
    for output in llm.generate([*windows], params, use_tqdm=False):
        if output.error is not None or output.prompt_logprobs is None:
            raise output.error or RuntimeError("prompt_logprobs: expected some, got None")
        tokens = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        losses.append(-fmean(found[token].logprob for token, found in tokens if found))
    return np.array(losses)


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write the JSON file after each type of cache."""
    parser = script_parser(__doc__, repeats=16)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-dtypes", nargs="+", choices=get_args(KVCacheDtypeName),
                        default=get_args(KVCacheDtypeName), help="'auto' first")  # fmt: skip
    options = parse_script(parser, arguments)
    if options.kv_dtypes[0] != "auto":
        parser.error(f"--kv-dtypes: expected 'auto' first, got {options.kv_dtypes[0]!r}")
    results: list[dict[str, Any]] = []
    auto: Scores | None = None
    for kv_dtype in options.kv_dtypes:
        with LLM(
            options.model, device=options.device, kv_cache_dtype=kv_dtype, max_num_seqs=2,
            max_num_batched_tokens=options.length, kv_cache_memory_bytes=1 << 28,
            enable_prefix_caching=False,
        ) as llm:  # fmt: skip
            ids = llm.get_tokenizer().encode(load_split()[1], add_special_tokens=False)
            starts = range(0, len(ids) - options.length + 1, options.length)[: options.repeats]
            losses = window_losses(llm, [ids[at : at + options.length] for at in starts])
            device, dtype = llm.engine.runner.device, llm.engine.runner.model.dtype
            report = llm.kv_report()
        auto = losses if auto is None else auto
        results.append(
            {
                "kv_dtype": kv_dtype,
                "token_bytes": report["token_bytes"],
                "text_nats": interval(losses[None]),
                "of_auto": interval(losses[None], auto[None]),
                "losses": [round(each, 5) for each in losses.tolist()],
            }
        )
        say(json.dumps(results[-1]))
        conditions = {
            "model": Path(checkpoint_dir(options.model)).name,
            "dtype": str(dtype).removeprefix("torch."),
            "text": f"{len(starts)} windows of {options.length} tokens, one after the other, of "
            "the held-out tenth of training/data",
        }
        if device.type == "cpu":
            conditions["cpu"] = f"{cpu_name()}, {torch.get_num_threads()} thread"
        write_result(options, device, "kv_cache_loss", conditions=conditions, results=results)


if __name__ == "__main__":
    main()
