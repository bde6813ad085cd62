"""Measure mrv1 and vLLM on one random checkpoint and the same requests, in a process each.

python -m benchmarks.beside_vllm OUTPUT.json [--batches 1,32,256] [--repeats 3] [--commit C]

Both engines read one checkpoint of the Qwen3-0.6B shape and generate greedily from the same
random prompts, end-of-sequence tokens ignored, without prefix caching; each engine keeps its own
defaults otherwise. vLLM runs first. Needs a GPU, transformers and vLLM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.measure.shapes import QWEN3_0_6B
from mrv1.provenance import provenance

ENGINES = ("vllm", "mrv1")
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 256
MAX_NUM_BATCHED_TOKENS = 8192


def write_checkpoint(folder: Path) -> None:
    """Write the checkpoint: normal weights, whose scale keeps the activations finite."""
    shape = QWEN3_0_6B
    config = transformers.Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_q_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_model_len,
        tie_word_embeddings=shape.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def measure(engine: str, checkpoint: str, batches: list[int], repeats: int) -> dict[str, Any]:
    """Return one engine's start time and, for each batch, the seconds of ``repeats`` runs."""
    options = {
        "max_model_len": PROMPT_TOKENS + OUTPUT_TOKENS,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "enable_prefix_caching": False,
    }
    begin = time.perf_counter()
    if engine == "vllm":
        from vllm import LLM, SamplingParams

        llm = LLM(checkpoint, skip_tokenizer_init=True, dtype="bfloat16", seed=0, **options)
        params = SamplingParams(
            temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
        )
    else:
        from mrv1 import LLM, SamplingParams

        llm = LLM(checkpoint, **options)
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    measured: dict[str, Any] = {"start_s": time.perf_counter() - begin, "seconds": {}}
    for batch in batches:
        seconds = []
        for run in range(repeats + 1):
            generator = np.random.default_rng([batch, run])
            ids = generator.integers(QWEN3_0_6B.vocab_size, size=(batch, PROMPT_TOKENS)).tolist()
            prompts = [{"prompt_token_ids": prompt} for prompt in ids]
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            if num_tokens != batch * OUTPUT_TOKENS:
                raise RuntimeError(f"{engine}: expected {batch * OUTPUT_TOKENS}, got {num_tokens}")
        measured["seconds"][str(batch)] = seconds[1:]  # the first run warms up
    return measured


def run_engine(engine: str, checkpoint: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what ``measure`` returns in a process of its own, which frees the GPU at its end."""
    with tempfile.NamedTemporaryFile("r") as file:
        command = [sys.executable, "-m", "benchmarks.beside_vllm", file.name]
        command += ["--batches", arguments.batches, "--repeats", str(arguments.repeats)]
        subprocess.run([*command, "--engine", engine, "--checkpoint", checkpoint], check=True)
        measured: dict[str, Any] = json.load(file)
    return measured


def main() -> None:
    """Measure both engines, or in a child process the one that ``--engine`` names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    if arguments.engine:
        result = measure(arguments.engine, arguments.checkpoint, batches, arguments.repeats)
        arguments.output.write_text(json.dumps(result), "utf-8")
        return
    with tempfile.TemporaryDirectory() as checkpoint:
        write_checkpoint(Path(checkpoint))
        torch.cuda.empty_cache()
        engines = {name: run_engine(name, checkpoint, arguments) for name in ENGINES}
    rows = []
    for batch in batches:
        row: dict[str, Any] = {"batch": batch, "tokens_per_s": {}, "samples_s": {}}
        for name, measured in engines.items():
            row["samples_s"][name] = measured["seconds"][str(batch)]
            seconds = statistics.median(row["samples_s"][name])
            row["tokens_per_s"][name] = batch * OUTPUT_TOKENS / seconds
        row["mrv1_over_vllm"] = row["tokens_per_s"]["mrv1"] / row["tokens_per_s"]["vllm"]
        rows.append(row)
    result = {
        "op": "beside vllm",
        "schema": 1,
        "shape": "qwen3-0.6b",
        "weights": "random, one checkpoint for both",
        "dtype": "bfloat16",
        **provenance(torch.device("cuda"), arguments.commit),
        "peers": {"vllm": metadata.version("vllm")},
        "start_s": {name: measured["start_s"] for name, measured in engines.items()},
        "conditions": {
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "sampling": "greedy, end-of-sequence ignored, token ids in and out",
            "prompts": "random token ids, the same for both, others for every run",
            "max_model_len": PROMPT_TOKENS + OUTPUT_TOKENS,
            "max_num_seqs": max(batches),
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "enable_prefix_caching": False,
            "other_options": "each engine's defaults",
            "value": "all generated tokens / median time of generate(), prefill included",
            "repeats": arguments.repeats,
            "warm_up_runs": 1,
            "clocks": "as found, not locked",
        },
        "results": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    for row in rows:
        print(row["batch"], row["tokens_per_s"], f"{row['mrv1_over_vllm']:.2f}x")


if __name__ == "__main__":
    main()
