"""One of several processes with a rank's part of a model: ``python -m tests.models.bits_on_gpus``.

Arguments: rank, number of ranks, port of rank 0's store. Exit code 0 if rank-invariant logits of
the ranks are the bits of the whole model on one GPU. A configuration is checked by one rank.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from mrv1.kernels.registry import select_ops
from mrv1.models import ParallelContext, load_model
from mrv1.runner.ranks.symmetric_memory import SymmetricMemory
from tests.models.driver import PagedDriver, blocks_needed

CONFIGS = {
    # Products in registers and tiles; chains of 128 inputs.
    "small": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    # Rows too long for registers, in four leaves; outputs with a bias.
    "large": {
        "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 32,
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "attention_bias": True, "mlp_bias": True,
    },
    # A dense layer, and one with shared experts.
    "experts": {
        "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16,
        "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe",
        "moe_num_experts": 16, "moe_k": 4, "moe_num_shared_experts": 2, "use_bias": False,
        "moe_intermediate_size": 512, "moe_layer_start_index": 1,
    },
}  # fmt: skip
COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 4096, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
PROMPTS = [[(7 * i * i + 3 * i + n) % 4096 for i in range(n)] for n in (5, 70, 230)]
CHUNKS = (7, 96)


def context_of(rank: int, size: int, device: torch.device) -> ParallelContext:
    """Return a rank of the default process group, with its peers' memory."""

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    def all_gather(tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=-1)

    return ParallelContext(
        rank=rank, size=size, all_reduce=all_reduce, all_gather=all_gather,
        peers=SymmetricMemory(dist.group.WORLD, device),
    )  # fmt: skip


def logits_of(
    path: Path, device: torch.device, parallel: ParallelContext | None, chunk: int
) -> list[torch.Tensor]:
    """Return the logits of all prompts, in batches of chunks; later batches are smaller."""
    model = load_model(
        path, device=device, dtype=torch.bfloat16, ops=select_ops("triton"), progress=False,
        parallel=parallel, deterministic=True, rank_invariant=True, load_format="dummy",
    )  # fmt: skip
    driver = PagedDriver(model, block_size=16, num_blocks=blocks_needed(PROMPTS, 16))
    return driver.logits(PROMPTS, chunk)


def main(rank: int, size: int, port: int) -> None:
    device, parallel = torch.device("cuda", rank), None
    torch.cuda.set_device(device)
    if size > 1:
        store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
        parallel = context_of(rank, size, device)
    for index, (name, changes) in enumerate(CONFIGS.items()):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            (path / "config.json").write_text(json.dumps(COMMON | changes))
            got = [logits_of(path, device, parallel, chunk) for chunk in CHUNKS]
            if index % size != rank:  # all have gathered the same; compiling takes its time
                continue
            want = logits_of(path, device, None, CHUNKS[0])
        for chunk, of_chunk in zip(CHUNKS, got, strict=True):
            for logits, expected in zip(of_chunk, want, strict=True):
                wrong = (logits != expected).sum().item()
                assert torch.equal(logits, expected), f"{name}, chunk {chunk}: {wrong} wrong"
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
