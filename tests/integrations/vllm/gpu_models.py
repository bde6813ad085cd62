"""Small random models of four architectures, and what vLLM generates with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.measure.child import Send
from mrv1.integrations.vllm.options import REQUEST_CHECK

Outputs = Sequence[Sequence[tuple[int, dict[int, float]]]]
"""For each row and step the token, and the best tokens' log-probabilities."""

HIDDEN, LAYERS, VOCAB = 512, 4, 4096
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": HIDDEN**-0.5,  # large enough that attention is not flat
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 64
LAYER_TYPES = ["sliding_attention", "full_attention"] * (LAYERS // 2)

CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256,
        decoder_sparse_step=1, norm_topk_prob=True,
    ),
    # A soft cap of the logits so low that it changes most of them, and windows.
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON | {"tie_word_embeddings": True}, attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0, sliding_window=WINDOW, query_pre_attn_scalar=64,
        layer_types=LAYER_TYPES,
    ),
    # A sink for every head, and windows.
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW,
        layer_types=LAYER_TYPES,
    ),
}  # fmt: skip

SCALES = {
    "embed_tokens.": 20.0,
    "gate.": 16.0,
    "router.": 16.0,
    "down_proj": 2**-5,
    "lm_head.": 2.0,
}
"""Part of a parameter's name -> factor of its random values, in models with experts.

A router chooses other experts where rounding decides a near tie. Here the experts of such a tie
weigh little in the sum, and all of them little beside attention, which is what is compared: so
rounding moves the logits by less than most best tokens lead.
"""

WORKER = {
    "worker_cls": "mrv1.integrations.vllm.Worker",
    "logits_processors": [REQUEST_CHECK],
}
DOORS: dict[str, dict[str, Any]] = {
    "FLASH_ATTN": {"attention_backend": "FLASH_ATTN"},
    "backend": {"attention_backend": "CUSTOM"},
    "backend-fp8": {"attention_backend": "CUSTOM", "kv_cache_dtype": "fp8_per_token_head"},
    "backend-any-graph": {
        "attention_backend": "CUSTOM",
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL",  # one graph for decodes, prompts and both together
            "cudagraph_capture_sizes": [1, 4, 8, 16, 64, 256, 512],
        },
    },
    "worker": WORKER,
    "backend-ranks-2": {"attention_backend": "CUSTOM", "tensor_parallel_size": 2},
    "backend-stages-2": {"attention_backend": "CUSTOM", "pipeline_parallel_size": 2},
    "worker-ranks-2": WORKER | {"tensor_parallel_size": 2},
    "worker-ranks-4": WORKER | {"tensor_parallel_size": 4},
}


def random_model(name: str) -> transformers.PreTrainedModel:
    """Return one of ``CONFIGS`` with random weights, in bfloat16."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    has_experts = hasattr(config, "num_experts_per_tok")
    for key, tensor in model.named_parameters():
        if key.endswith(".sinks"):
            torch.nn.init.normal_(tensor)
        for part, factor in SCALES.items() if has_experts else ():
            if part in key:
                tensor.data *= factor
    return model.eval()


def write_model(folder: Path, name: str) -> None:
    """Write a checkpoint of one of ``CONFIGS``, without a tokenizer."""
    random_model(name).save_pretrained(folder)


def engine_options(folder: Path, door: str) -> dict[str, Any]:
    """Return the arguments of vLLM's ``LLM``."""
    return {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,  # long prompts come in chunks, beside decodes
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.2,
        "enable_prefix_caching": True,
        "compilation_config": {
            "mode": 0,  # no torch.compile: it takes minutes
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 4, 8, 16],
        },
        **DOORS[door],
    }


def generate(
    options: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    expected: Outputs | None,
    send: Send,
) -> None:
    """Send, for each prompt, its greedy tokens and each one's two best log-probabilities.

    The first three prompts are asked once more, when their blocks are cached. A row that parts
    from ``expected``, another engine's outputs, is asked again with the expected tokens up to
    there: so every token follows the expected ones, and none is left out of a comparison.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(**options)
    asked = [*prompts, *prompts[:3]]

    def answers(rows: Sequence[int], given: Sequence[Sequence[int]]) -> Outputs:
        params = [
            SamplingParams(
                temperature=0, max_tokens=max_tokens - len(tokens), ignore_eos=True,
                detokenize=False, logprobs=2,
            )
            for tokens in given
        ]  # fmt: skip
        inputs = [
            {"prompt_token_ids": [*asked[row], *tokens]}
            for row, tokens in zip(rows, given, strict=True)
        ]
        return [
            [
                (token, {key: value.logprob for key, value in best.items()})
                for token, best in zip(one.token_ids, one.logprobs, strict=True)
            ]
            for (one,) in (
                output.outputs for output in llm.generate(inputs, params, use_tqdm=False)
            )
        ]

    of_prompts = range(len(prompts)), range(len(prompts), len(asked))
    found = [row for rows in of_prompts for row in answers(rows, [[]] * len(rows))]
    wanted = [[token for token, _ in row] for row in expected or found]
    parted = [0] * len(asked)  # steps that follow the expected tokens
    while True:
        again = []
        for row, tokens in enumerate(wanted):
            given = [token for token, _ in found[row]]
            at = next((i for i in range(parted[row], max_tokens) if given[i] != tokens[i]), None)
            parted[row] = max_tokens if at is None else at + 1
            if parted[row] < max_tokens:
                again.append(row)
        if not again:
            break
        for row, tail in zip(
            again, answers(again, [wanted[row][: parted[row]] for row in again]), strict=True
        ):
            found[row] = [*found[row][: parted[row]], *tail]
    send(found)
