"""Measure what an instruction model recalls under head policies, by share of the KV cache.

python -m benchmarks.recall_tasks OUTPUT.json [--ranking smollm2] [--commit C]   4 minutes, H100

Without --ranking the heads are ranked first, on prompts of another seed; the ranking is written
beside OUTPUT. For each length and share of the cache, LLM answers --repeats samples of each task
greedily, under the policy that ``HeadRanking.policy_of_cache`` cuts. Bytes are those that LLM's
kv_report counts while a request of that length runs. The loss is that of the held-out tenth of
training/data; *agreement* is the share of its tokens where the likeliest next token is the one
with all heads full. Intervals are 95% bootstrap intervals over samples (over windows of text).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from benchmarks.measure.options import parse_script, script_parser, write_result
from mrv1 import LLM, CalibrateOptions, HeadPolicy, HeadRanking, SamplingParams, calibrate
from mrv1.calibration import TASKS, PolicyModel, TaskPrompts, TaskSample
from mrv1.config import checkpoint_dir
from mrv1.device import kernel_path, resolve_device
from mrv1.headwise.recall import TokenIds
from mrv1.kernels.registry import select_ops
from mrv1.models import Checkpoint, DecoderModel, load_model
from training.corpus import load_split

MEASURING_SEED = 1
"""Seed of the measured samples; the seed of calibration is 0."""
EXTRA_TOKENS = 8
"""Tokens that a reply may have beyond those of a right one."""
LEAST_SCORE = 0.6
"""A task counts in the mean if all heads full score at least this."""
NUM_DRAWS = 2000
"""Bootstrap draws of an interval."""
LOGIT_ROWS = 512
BATCHED_TOKENS = 16_384

Scores = npt.NDArray[np.float64]


def say(line: str) -> None:
    """Print one line to stderr."""
    print(line, file=sys.stderr, flush=True)


def interval(scores: Scores, of: Scores | None = None) -> list[float]:
    """Return mean, and ends of its 95% interval, of ``[tasks, samples]``, each task alike.

    ``of``: scores of the same samples, whose mean divides; samples are drawn in pairs.
    """
    rng = np.random.default_rng(0)
    picks = rng.integers(scores.shape[1], size=(NUM_DRAWS, scores.shape[1]))
    drawn = scores[:, picks].mean(axis=(0, 2))
    mean = scores.mean()
    if of is not None:
        drawn = drawn / np.maximum(of[:, picks].mean(axis=(0, 2)), 1e-9)
        mean = mean / max(of.mean(), 1e-9)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return [round(float(each), 4) for each in (mean, low, high)]


def means(
    scores: Mapping[str, Scores], full: Mapping[str, Scores], counted: Sequence[str]
) -> dict[str, list[float]]:
    """Return the intervals of the mean over tasks that count, and of its share of ``full``'s."""
    if not counted:
        return {}
    ours, whole = (np.stack([each[task] for task in counted]) for each in (scores, full))
    return {"mean": interval(ours), "of_full": interval(ours, whole)}


def ranked(options: Any) -> tuple[HeadRanking, dict[str, Any]]:  # noqa: ANN401
    """Return the given ranking, or one made now, and how it was made."""
    if options.ranking is not None:
        return HeadRanking.load(options.ranking), {"ranking": str(options.ranking)}
    settings = CalibrateOptions(
        model=options.model,
        data=options.data,
        window=options.window,
        sink=options.sink,
        num_prompts=options.num_prompts,
        num_tokens=options.calibration_tokens,
        device=options.device,
    )
    start = time.perf_counter()
    found = calibrate(settings)
    seconds = round(time.perf_counter() - start, 1)
    say(f"calibrated in {seconds} s: recall {found.full.accuracy:.3f} full, "
        f"{found.calibrated.accuracy:.3f} at {settings.budget:.0%}")  # fmt: skip
    ranking = found.ranking.to_json()
    options.output.with_suffix(".ranking.json").write_text(json.dumps(ranking) + "\n")
    return found.ranking, {
        "seconds": seconds,
        "data": str(settings.data),
        "num_prompts": settings.num_prompts,
        "num_tokens": settings.num_tokens,
        "method": settings.method,
        "order": [[layer, head] for layer, head in found.ranking.order],
    }


def samples_of(tasks: TaskPrompts, length: int, count: int) -> dict[str, list[TaskSample]]:
    """Return each task's samples of a length."""
    return {
        task: [
            tasks.sample(task, np.random.default_rng([MEASURING_SEED, length, each]), length)
            for each in range(count)
        ]
        for task in TASKS
    }


def answered(
    options: Any,  # noqa: ANN401
    tasks: TaskPrompts,
    samples: dict[str, list[TaskSample]],
    length: int,
    policy: HeadPolicy,
) -> tuple[dict[str, Scores], int]:
    """Return each task's scores under a policy, and the bytes that a request of a length holds."""
    flat = [sample for each in samples.values() for sample in each]
    prompts = [tasks.prompt(sample) for sample in flat]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=EXTRA_TOKENS + len(tasks.tokenizer.encode(sample.reply)),
        )
        for sample in flat
    ]
    with LLM(
        options.model,
        device=options.device,
        head_policy=policy,
        max_model_len=length + 128,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=min(BATCHED_TOKENS, 4 * length),
        enable_prefix_caching=False,
        **json.loads(options.engine),
    ) as llm:
        held = held_bytes(llm, max(prompts, key=len))
        outputs = llm.generate(prompts, params, use_tqdm=False)
    scores: dict[str, list[float]] = {task: [] for task in samples}
    for sample, output in zip(flat, outputs, strict=True):
        if output.error is not None:
            raise output.error
        scores[sample.task].append(sample.score(output.outputs[0].text))
    return {task: np.array(each) for task, each in scores.items()}, held


def held_bytes(llm: LLM, prompt: list[int]) -> int:
    """Return the bytes of the KV cache that a request holds after its first tokens."""
    llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    held = 0
    while llm.has_unfinished_requests():
        llm.step()
        held = llm.kv_report()["held_bytes"] or held  # 0 when it has ended
    return held


@torch.inference_mode()
def text_scores(
    model: PolicyModel, windows: Sequence[TokenIds], policy: HeadPolicy
) -> tuple[Scores, list[torch.Tensor]]:
    """Return each window's mean loss, and the likeliest token of each position."""
    losses, likeliest = [], []
    for window in windows:
        hidden = model.hidden(window, policy)[:-1]
        targets = torch.from_numpy(window[1:]).to(hidden.device)
        parts, best = [], []
        for rows, target in zip(hidden.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
            logits = model.model.compute_logits(rows).float()
            parts.append(functional.cross_entropy(logits, target, reduction="none"))
            best.append(logits.argmax(-1))
        losses.append(float(torch.cat(parts).double().mean()))
        likeliest.append(torch.cat(best).cpu())
    return np.array(losses), likeliest


def text_entry(
    decoder: DecoderModel, windows: list[TokenIds], policies: dict[float, HeadPolicy]
) -> list[dict[str, Any]]:
    """Return the loss of held-out text and the agreement under each policy, full ones first."""
    length = len(windows[0])
    model = PolicyModel(decoder, length)
    entries = []
    full: tuple[Scores, list[torch.Tensor]] | None = None
    for share, policy in policies.items():
        losses, likeliest = text_scores(model, windows, policy)
        full = full or (losses, likeliest)
        same = [
            float((one == other).double().mean())
            for one, other in zip(full[1], likeliest, strict=True)
        ]
        entries.append(
            {
                "length": length,
                "share": share,
                "windows": len(windows),
                "text_nats": interval(losses[None]),
                "of_full": interval(losses[None], full[0][None]),
                "agreement": interval(np.array(same)[None]),
            }
        )
        say(json.dumps(entries[-1]))
    return entries


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write the JSON file after each policy."""
    parser = script_parser(__doc__, repeats=200)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--ranking", help="a ranking's file or name, instead of a calibration")
    parser.add_argument("--data", default="tasks", help="of the calibration, as mrv1 calibrate")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--sink", type=int, default=16)
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--calibration-tokens", type=int, default=2048)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8064])
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.25, 0.125])
    parser.add_argument("--windows", type=int, default=16, help="most windows of held-out text")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--engine", default="{}", help="more options of LLM, as JSON")
    parser.add_argument("--device", default="auto")
    options = parse_script(parser, arguments)
    device = resolve_device(options.device)
    ranking, made = ranked(options)
    checkpoint = Checkpoint.open(options.model)
    tasks = TaskPrompts(checkpoint.tokenizer())
    ids = np.array(
        tasks.tokenizer.encode(load_split()[1], add_special_tokens=False, verbose=False)
    )
    decoder = load_model(
        options.model, device=device, dtype=torch.float32 if device.type == "cpu" else
        torch.bfloat16, ops=select_ops(kernel_path(device)),
    )  # fmt: skip
    results: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for length in options.lengths:
        start = time.perf_counter()
        samples = samples_of(tasks, length, options.repeats)
        say(f"{length}: samples drawn in {time.perf_counter() - start:.1f} s")
        policies = {1.0: HeadPolicy.full(ranking.num_layers, ranking.num_kv_heads)} | {
            share: ranking.policy_of_cache(share, length) for share in options.shares
        }
        starts = range(0, len(ids) - length, length)[: options.windows]
        texts += text_entry(decoder, [ids[at : at + length] for at in starts], policies)
        full: dict[str, Scores] = {}
        full_bytes = 0
        for share, policy in policies.items():
            start = time.perf_counter()
            scores, held = answered(options, tasks, samples, length, policy)
            full, full_bytes = full or scores, full_bytes or held
            counted = [task for task in TASKS if full[task].mean() >= LEAST_SCORE]
            entry: dict[str, Any] = {
                "length": length,
                "share": share,
                "full_heads": round(policy.full_share * ranking.num_layers * ranking.num_kv_heads),
                "held_bytes": held,
                "share_of_bytes": round(held / full_bytes, 4),
                "seconds": round(time.perf_counter() - start, 1),
                "tasks": {task: interval(each[None]) for task, each in scores.items()},
                "counted": counted,
            }
            entry |= means(scores, full, counted)
            say(json.dumps(entry))
            entry["scores"] = {
                task: [round(each, 3) for each in of_task.tolist()]
                for task, of_task in scores.items()
            }
            results.append(entry)
            write_result(
                options,
                device,
                "recall_tasks",
                conditions={
                    "model": Path(checkpoint_dir(options.model)).name,
                    "dtype": str(decoder.dtype).removeprefix("torch."),
                    "window": ranking.streaming.window,
                    "sink": ranking.streaming.sink,
                    "prompts": "chat template; greedy; one question each",
                    "seed": MEASURING_SEED,
                },
                results=results,
                texts=texts,
                calibration=made,
            )


if __name__ == "__main__":
    main()
