"""Features and ranges on the Triton kernels: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrv1 import LLM, MultimodalItem, SamplingParams
from mrv1.kernels import reference
from tests.models.families import tiny_checkpoint
from tests.multimodal.oracle import logprobs_of

NUM_TOKENS = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return str(path), model.eval()


def features_of(model, seed: int, num_rows: int) -> torch.Tensor:
    weight = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, weight.shape[1], generator=generator) * weight.std().item()


def check(output, prompt, items, ranges, model) -> None:
    """Check that every token is the likeliest of transformers', up to rounding."""
    tokens = list(output.outputs[0].token_ids)
    assert len(tokens) == NUM_TOKENS
    want = logprobs_of([*prompt, *tokens], items, ranges, model)[len(prompt) - 1 : -1]
    assert bool((want.max(dim=1).values - want[range(NUM_TOKENS), tokens] < 1e-3).all())


@pytest.mark.interp
@pytest.mark.gpu
def test_items_and_ranges_equal_transformers_and_no_oracle_ran(checkpoint, device):
    """Cut items beside decodes, a bidirectional item, a chunk of one token with a range."""
    directory, model = checkpoint
    rows, other = features_of(model, 0, 9), features_of(model, 1, 6)
    text, prompt = [*range(5, 8)], [*range(5, 9), *[1] * 9, 11, *[1] * 6, 12]
    both_ways = [(0, token + 1) for token in range(len(prompt))]
    both_ways[14:20] = [(0, 20)] * 6
    narrow = [(max(0, token - 3), token + 1) for token in range(len(prompt))]
    on_device = rows.to(device)
    items = [
        MultimodalItem(features=on_device, start=4),
        MultimodalItem(features=other, start=14, bidirectional=True),
    ]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    reference.calls.clear()
    with LLM(
        directory, dtype="float32", max_num_seqs=3, max_num_batched_tokens=7, num_kv_blocks=16
    ) as llm:
        outputs = llm.generate(
            [
                text,
                {"prompt_token_ids": prompt, "multimodal": items},
                {
                    "prompt_token_ids": prompt,
                    "multimodal": items[:1],
                    "attn_mask_offsets": narrow,
                },
            ],
            params,
        )
        assert llm.kv_report()["held_feature_bytes"] == 0
    assert not reference.calls
    check(outputs[0], text, [], [], model)
    check(outputs[1], prompt, [(4, rows), (14, other)], both_ways, model)
    check(outputs[2], prompt, [(4, rows)], narrow, model)


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_a_step_with_items_is_a_graph_where_one_with_text_is(checkpoint, device):
    directory, model = checkpoint
    prompt = [*range(5, 9), *[1] * 9, 11, 12]
    rows = features_of(model, 0, 9)
    item = MultimodalItem(features=rows, start=4)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(
        directory, dtype="float32", max_num_seqs=2, max_num_batched_tokens=6, num_kv_blocks=16,
        enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        counts = []
        for multimodal in (None, [item], None, [item]):
            before = llm.metrics()
            inputs = {"prompt_token_ids": prompt, "multimodal": multimodal}
            (output,) = llm.generate(inputs, params)
            after = llm.metrics()
            steps = after["num_steps"] - before["num_steps"]
            counts.append((steps, after["num_graph_steps"] - before["num_graph_steps"]))
            found = [(4, rows)] if multimodal else []
            check(output, prompt, found, [], model)
    assert len(set(counts)) == 1, counts
    assert counts[0][0] == counts[0][1]


@pytest.mark.gpu
@pytest.mark.gpu_only
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_no_step_with_items_synchronises(checkpoint, device):
    """Copies come from pinned memory, and nothing waits for them."""
    directory, model = checkpoint
    prompt = [*range(5, 9), *[1] * 9, 11, 12]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(
        directory, dtype="float32", max_num_seqs=2, max_num_batched_tokens=6, num_kv_blocks=16
    ) as llm:
        for seed in range(2):
            item = MultimodalItem(features=features_of(model, seed, 9), start=4)
            assert item.prepared(64, torch.float32, pin_memory=True).tensor.is_pinned()
            core = llm.engine
            request = core.add_request(str(seed), prompt, params, multimodal=[item])
            torch.cuda.set_sync_debug_mode("error" if seed else "default")
            try:
                while not request.finished:
                    core.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert request.error is None
