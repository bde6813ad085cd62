"""The parts of a model that ranks have: their logits, put together, are those of one rank.

Those of one rank equal transformers': see test_equality.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mrv1.errors import ConfigError
from mrv1.headwise import HeadGroups, HeadPolicy, Visible
from mrv1.kernels import Routing
from mrv1.kernels.registry import Ops, select_ops
from mrv1.kernels.sampling.contracts import group_size
from mrv1.models import ModelConfig, ParallelContext, load_model
from mrv1.models.experts import ExpertsConfig
from mrv1.models.weights import EMBED, HEAD, checkpoint_tensors
from tests.models.driver import PagedDriver, blocks_needed
from tests.models.families import FAMILIES, random_model, tiny_checkpoint, tiny_config
from tests.models.test_gguf import write_gguf
from tests.thread_ranks import on_ranks

PROMPT = [(7 * i) % 160 for i in range(40)]


def logits_of_ranks(path: Path, size: int, *, has_peers: bool = True) -> list[torch.Tensor]:
    """Return the logits of the prompt that each rank has, in float64, computed in chunks."""

    def logits(parallel: ParallelContext) -> torch.Tensor:
        model = load_model(
            path, device="cpu", dtype=torch.float64, ops=select_ops("reference"),
            progress=False, parallel=parallel,
        )  # fmt: skip
        blocks = blocks_needed([PROMPT], 16)
        driver = PagedDriver(model, block_size=16, num_blocks=blocks)
        return driver.logits([PROMPT], 24)[0]

    return on_ranks(size, logits, has_peers=has_peers)


def check_equal(path: Path, size: int) -> None:
    """Check the logits of ranks against those of one rank."""
    (expected,) = logits_of_ranks(path, 1)
    for has_peers in (True, False):
        of_ranks = logits_of_ranks(path, size, has_peers=has_peers)
        torch.testing.assert_close(of_ranks[0], expected, rtol=1e-10, atol=1e-10)
        assert all(torch.equal(logits, of_ranks[0]) for logits in of_ranks)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *(pytest.param(family, {}, marks=pytest.mark.full) for family in FAMILIES),
        ("llama", {"attention_bias": True, "mlp_bias": True}),  # o and down have one, too
        ("qwen3", {"tie_word_embeddings": True, "vocab_size": 163}),  # the last shard is padded
    ],
)
@pytest.mark.parametrize("size", [2, 4])  # of 2 KV heads: with 4 ranks, two have the same one
def test_logits_of_ranks_equal_those_of_one(tmp_path, family, settings, size):
    tiny_checkpoint(tmp_path, family, **settings)
    check_equal(tmp_path, size)


BITS = {
    "qwen3": {},  # of 2 KV heads: with 4 ranks, two have the same one
    "llama": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8},
    "ernie4_5_moe": {"num_key_value_heads": 4},  # a dense layer, two with shared experts
    "qwen3_moe": {"moe_intermediate_size": 40},
    "glm4_moe": {},
}
"""Settings by family; all have eight query heads."""


def check_bits_of_ranks(
    path: Path, device: torch.device, family: str, dtype: torch.dtype, ops: Ops, *sizes: int
) -> None:
    """Check that ranks, which are threads, have the bits of one; 40 tokens in two chunks."""
    tiny_checkpoint(path, family, num_attention_heads=8, **BITS[family])
    blocks = blocks_needed([PROMPT], 16)

    def logits(parallel: ParallelContext) -> torch.Tensor:
        model = load_model(
            path, device=device, dtype=dtype, ops=ops, progress=False, parallel=parallel,
            deterministic=True, rank_invariant=True,
        )  # fmt: skip
        return PagedDriver(model, block_size=16, num_blocks=blocks).logits([PROMPT], 24)[0]

    (expected,) = on_ranks(1, logits)
    for size in sizes:
        assert all(torch.equal(got, expected) for got in on_ranks(size, logits))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", BITS)
def test_rank_invariant_logits_are_the_bits_of_one_rank(tmp_path, family, dtype):
    ops = select_ops("reference")
    check_bits_of_ranks(tmp_path, torch.device("cpu"), family, dtype, ops, 2, 4, 8)


@pytest.mark.interp
@pytest.mark.parametrize(
    ("family", "dtype", "size"),
    [
        ("qwen3", torch.bfloat16, 2),
        pytest.param("llama", torch.bfloat16, 4, marks=pytest.mark.full),
        pytest.param("qwen3", torch.float32, 8, marks=pytest.mark.full),
        ("ernie4_5_moe", torch.bfloat16, 2),
        pytest.param("qwen3_moe", torch.bfloat16, 4, marks=pytest.mark.full),
        pytest.param("glm4_moe", torch.float32, 8, marks=pytest.mark.full),
    ],
)
def test_kernels_give_ranks_the_bits_of_one(tmp_path, device, family, dtype, size):
    check_bits_of_ranks(tmp_path, device, family, dtype, select_ops("triton"), size)


def test_logits_of_ranks_from_a_gguf_file_equal_those_of_one(tmp_path):
    write_gguf(tmp_path / "model.gguf", random_model(tiny_config("llama")))
    check_equal(tmp_path / "model.gguf", 2)


def test_ranks_together_have_each_weight_once(tmp_path):
    """Apart from norms, which every rank has, and the KV heads that pairs of 4 ranks share."""
    tiny_checkpoint(tmp_path, "qwen2")
    config = ModelConfig.from_pretrained(tmp_path)
    options = {"device": "cpu", "dtype": torch.float32, "ops": select_ops("reference")}
    whole = checkpoint_tensors(config, load_model(tmp_path, **options).weights)

    def weights(parallel: ParallelContext) -> dict[str, torch.Tensor]:
        model = load_model(tmp_path, **options, progress=False, parallel=parallel)
        return checkpoint_tensors(model.config, model.weights)

    of_ranks = on_ranks(4, weights)
    for name, tensor in whole.items():
        parts = [part[name] for part in of_ranks]
        if "norm" in name:
            joined = parts[0]
        elif "k_proj" in name or "v_proj" in name:
            assert torch.equal(parts[0], parts[1])
            joined = torch.cat(parts[::2])
        else:
            has_columns = name.endswith(("o_proj.weight", "down_proj.weight"))
            joined = torch.cat(parts, dim=1 if has_columns else 0)
        if name in (EMBED, HEAD):
            joined, padding = joined.tensor_split([len(tensor)])
            assert len(padding) == 4 * 128 - len(tensor)
            assert not padding.any()
        assert torch.equal(joined, tensor), name


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("vocab", [15, 160, 512, 1000, 151_936, 524_289])
def test_a_vocabulary_is_divided_into_whole_groups(size, vocab):
    """Every id belongs to one rank, whose first id begins a group; the last may have none."""
    contexts = [
        ParallelContext(rank=rank, size=size, all_reduce=torch.clone, all_gather=torch.clone)
        for rank in range(size)
    ]
    parts = [context.vocab_part(vocab) for context in contexts]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(vocab))
    for rank, (context, part) in enumerate(zip(contexts, parts, strict=True)):
        rows = context.vocab_rows(vocab)
        assert part.start in (rank * rows, vocab)
        assert part.stop - part.start <= rows < vocab / size + group_size(vocab)
        assert size == 1 or rows % group_size(vocab) == 0


def test_every_rank_knows_the_lists_of_all():
    of_ranks = [[[3], [7, 7, 2]], [], [[7, 7, 2], [5, 1]]]
    found = on_ranks(3, lambda parallel: parallel.union(of_ranks[parallel.rank]))
    assert found == [[(3,), (7, 7, 2), (5, 1)]] * 3
    assert on_ranks(2, lambda parallel: parallel.union([])) == [[], []]
    assert ParallelContext().union([[4]]) == [[4]]


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "expected a divisor or a multiple of 2 KV heads (num_key_value_heads), got 3"),
        (8, {}, "expected a divisor of 4 query heads (num_attention_heads), got 8"),
        (2, {"intermediate_size": 97}, "divisor of 97 rows of the MLP (intermediate_size), got 2"),
        (4, {"vocab_size": 15}, "expected at least 16 tokens in the vocabulary for 4, got 15"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_divided_is_refused(size, changes, message):
    config = replace(ModelConfig.from_hf(tiny_config("llama")), **changes)
    context = ParallelContext(size=size, all_reduce=torch.clone, all_gather=torch.clone)
    with pytest.raises(ConfigError) as caught:
        context.shard(config)
    assert str(caught.value).startswith("tensor_parallel_size: ")
    assert message in str(caught.value)


NARROW = ExpertsConfig(
    routing=Routing(num_experts=8, top_k=2), intermediate_size=20, layers=(True, True)
)


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {"num_q_heads": 6, "num_kv_heads": 3}, "expected 1, 2, 4 or 8 with rank_inva"),
        (2, {"intermediate_size": 100}, "expected a multiple of 8 as intermediate_size with rank"),
        (2, {"experts": NARROW}, "multiple of 8 as the width of an expert with rank_invariant=T"),
    ],
)  # fmt: skip
def test_a_model_whose_ranks_cannot_have_the_bits_of_one_is_refused(size, changes, message):
    config = replace(ModelConfig.from_hf(tiny_config("llama")), **changes)
    context = ParallelContext(size=size, all_reduce=torch.clone, all_gather=torch.clone)
    with pytest.raises(ConfigError) as caught:
        context.shard(config, deterministic=True, rank_invariant=True)
    assert message in str(caught.value)
    if size == 2:  # bits of two ranks alone ask for nothing
        context.shard(config, deterministic=True)


def test_norms_over_the_heads_of_all_ranks_are_not_deterministic():
    """Their squares are added by torch, in an order that may follow from the number of tokens."""
    config = replace(ModelConfig.from_hf(tiny_config("llama")), qk_norm="vector")
    context = ParallelContext(size=2, all_reduce=torch.clone, all_gather=torch.clone)
    with pytest.raises(ConfigError, match="expected 1 with deterministic=True where a norm is"):
        context.shard(config, deterministic=True)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_a_sum_over_ranks_is_added_as_kernels_add_it(size):
    """Of two halves, the first a power of two; the order shows in the bits."""
    parts = torch.randn(size, 3, 70, generator=torch.Generator().manual_seed(size))

    def tree(first: int, count: int) -> torch.Tensor:
        if first >= size:
            return torch.zeros(3, 70)
        if count == 1:
            return parts[first]
        return tree(first, count // 2) + tree(first + count // 2, count // 2)

    got = on_ranks(size, lambda parallel: parallel.sum_in_order(parts[parallel.rank]))
    assert all(torch.equal(each, tree(0, 8)) for each in got)


def test_ranks_keep_all_groups_and_their_own_heads():
    full, window = Visible(), Visible(32, 16)
    policy = HeadPolicy(((full, window, window, window), (full, full, window, full)))
    groups = HeadGroups.of_roles(policy, block_size=16, max_model_len=512, max_query_len=16)
    parts = [groups.slice(rank, 2) for rank in range(2)]
    assert [part.policy for part in parts] == [policy.slice(rank, 2) for rank in range(2)]
    assert [[g.num_heads for g in part.groups] for part in parts] == [
        [(1, 2), (1, 0)],
        [(0, 1), (2, 1)],
    ]
    for part in parts:
        for own, whole in zip(part.groups, groups.groups, strict=True):
            assert replace(own, num_heads=()) == replace(whole, num_heads=())
