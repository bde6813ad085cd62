"""Compare head policies with the compression methods of kvpress, on the same samples and bytes.

python -m benchmarks.recall_rivals OUTPUT.json --ranking R --kvpress DIR [--commit C]   5 minutes

DIR is a folder with kvpress 0.5.5 and its transformers (pip install --target). An answer counts
if each of its tokens is the likeliest after the question and the reply before it: for a single
answer, if the greedy reply is right. Rivals keep --shares of the context's entries and all of the
question; the policies' share is that of the whole request in bytes, streaming heads included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure.options import parse_script, script_parser, write_result
from benchmarks.recall_tasks import LEAST_SCORE, interval, means, samples_of, say
from benchmarks.smollm2_logits import reference_model
from mrv1 import HeadPolicy, HeadRanking
from mrv1.calibration import PolicyModel, TaskPrompts
from mrv1.config import checkpoint_dir
from mrv1.device import kernel_path, resolve_device
from mrv1.kernels.registry import select_ops
from mrv1.models import Checkpoint, load_model
from training.corpus import CORPUS_PATH

PEER = Path(__file__).parent / "peers" / "kvpress_recall.py"


def exported(tasks: TaskPrompts, length: int, count: int) -> list[dict[str, Any]]:
    """Return the samples as the peer reads them: tokens, context's length, answers' places."""
    return [
        {
            "task": sample.task,
            "ids": tasks.ids(sample.message, sample.reply_start + sample.reply),
            "context": tasks.context_length(sample),
            "spans": [[span.start, span.stop] for span in tasks.answer_spans(sample)],
        }
        for each in samples_of(tasks, length, count).values()
        for sample in each
    ]


def ours(
    model: PolicyModel, samples: list[dict[str, Any]], share: float, policy: HeadPolicy
) -> dict[str, Any]:
    """Return a policy's scores, by the measure of the peer."""
    start = time.perf_counter()
    scores: dict[str, list[float]] = {}
    for sample in samples:
        ids = sample["ids"]
        padded = np.array(ids + ids[-1:] * (model.num_tokens - len(ids)))
        hidden = model.hidden(padded, policy)
        first = sample["spans"][0][0]
        best = model.model.compute_logits(hidden[first - 1 : len(ids)]).argmax(-1).tolist()
        right = [
            all(best[at - first] == ids[at] for at in range(*span)) for span in sample["spans"]
        ]
        scores.setdefault(sample["task"], []).append(sum(right) / len(right))
    return {
        "method": "mrv1" if share < 1 else "all heads full",
        "share": share,
        "share_of_bytes": share,
        "scores": scores,
        "seconds": round(time.perf_counter() - start, 1),
    }


def rivals(options: Any, folder: Path, device: torch.device) -> list[dict[str, Any]]:  # noqa: ANN401
    """Return the lines of the peer, which runs in kvpress's environment."""
    command = [sys.executable, str(PEER), str(folder), "--press", *options.press]
    command += ["--share", *map(str, options.shares), "--device", str(device)]
    paths = [str(options.kvpress), *([str(options.stub)] if options.stub else [])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "DUO_TEXT": str(CORPUS_PATH)}
    env.pop("TRITON_INTERPRET", None)
    found = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode:
        say(f"the peer ended with {found.returncode}")
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


def main(arguments: list[str] | None = None) -> None:
    """Measure ours and the rivals, and write the JSON file."""
    parser = script_parser(__doc__, repeats=100)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--ranking", required=True)
    parser.add_argument("--kvpress", type=Path, required=True)
    parser.add_argument("--stub", type=Path, help="a folder with a stand-in for `datasets`")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25, 0.125])
    parser.add_argument("--press", nargs="+", default=["SnapKV", "StreamingLLM"])
    options = parse_script(parser, arguments)
    device = resolve_device("auto")
    tokenizer = Checkpoint.open(options.model).tokenizer()
    samples = exported(TaskPrompts(tokenizer), options.length, options.repeats)
    decoder = load_model(
        options.model,
        device=device,
        dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
        ops=select_ops(kernel_path(device)),
    )
    model, config = PolicyModel(decoder, options.length), decoder.config
    lines = [ours(model, samples, 1.0, HeadPolicy.full(config.num_layers, config.num_kv_heads))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "samples.json").write_text(json.dumps(samples))
        reference_model(checkpoint_dir(options.model), torch.device("cpu")).save_pretrained(
            folder / "model"
        )
        tokenizer.save_pretrained(folder / "model")
        lines += rivals(options, folder, device)
    write(options, device, lines)
    ranking = HeadRanking.load(options.ranking)  # late: it may be made at the same time
    policies = {share: ranking.policy_of_cache(share, options.length) for share in options.shares}
    write(options, device, lines + [ours(model, samples, *each) for each in policies.items()])


def write(options: Any, device: torch.device, lines: list[dict[str, Any]]) -> None:  # noqa: ANN401
    """Write the JSON file: all lines' scores as intervals, over those with all heads full."""
    full = {task: np.array(each) for task, each in lines[0]["scores"].items()}
    counted = [task for task, each in full.items() if each.mean() >= LEAST_SCORE]
    results = []
    for line in lines:
        scores = {task: np.array(each) for task, each in line["scores"].items()}
        entry = {name: value for name, value in line.items() if name != "scores"}
        entry["tasks"] = {task: interval(each[None]) for task, each in scores.items()}
        entry |= means(scores, full, counted)
        say(json.dumps(entry))
        results.append(entry)
    write_result(
        options,
        device,
        "recall_rivals",
        conditions={
            "model": Path(checkpoint_dir(options.model)).name,
            "rivals": "kvpress 0.5.5",
            "length": options.length,
            "counted": counted,
            "ranking": str(options.ranking),
        },
        results=results,
    )


if __name__ == "__main__":
    main()
