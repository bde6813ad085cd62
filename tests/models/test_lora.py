"""Adapters (LoRA) of a decoder: a request with one equals a model that it is merged into."""

from __future__ import annotations

import pytest
import torch

from mrv1.errors import ConfigError
from mrv1.kernels.registry import select_ops
from mrv1.models import DecoderModel, ModelConfig, ParallelContext, load_model
from mrv1.models.lora import AdapterPair, AdapterPlace, LoraWeights, StoredAdapter
from tests.models.driver import PagedDriver, blocks_needed
from tests.models.families import save_checkpoint, tiny_config
from tests.models.lora import Adapter, merge, of_rank, random_adapter
from tests.thread_ranks import on_ranks

FAMILIES = ("llama", "qwen2", "gemma2", "olmo2")
"""Plain; biases; norms after layers, scaled embeddings and gelu; norms over all heads."""
PROMPTS = [[(7 * i + k) % 160 for i in range(12 + k)] for k in range(4)]
SLOTS = (2, -1, 0, 2)
"""Adapters of the prompts: slots in no order, one of two prompts, none of one."""
MAX_RANK = 5


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint(folder, tiny_config(request.param, tie_word_embeddings=False))
    return folder


def load(folder, parallel: ParallelContext | None = None, **options) -> DecoderModel:
    return load_model(
        folder, device="cpu", dtype=torch.float64, ops=select_ops("reference"), progress=False,
        parallel=parallel, **options,
    )  # fmt: skip


def logits(model: DecoderModel, chunk: int, slots=None, prompts=PROMPTS) -> list[torch.Tensor]:
    driver = PagedDriver(model, block_size=16, num_blocks=blocks_needed(prompts, 16))
    return driver.logits(prompts, chunk, slots)


def with_adapters(model: DecoderModel, adapters: dict[int, Adapter]) -> DecoderModel:
    """Return the model with these adapters in its slots; unused memory is NaN."""
    model.enable_lora(3, MAX_RANK)
    for matrices in model.lora.places.values():
        matrices.a.fill_(torch.nan)
        matrices.b.fill_(torch.nan)
    for slot, adapter in adapters.items():
        model.lora.load(slot, adapter)
    return model


def test_each_request_equals_a_model_with_its_adapter_merged(checkpoint):
    model = load(checkpoint)
    adapters = {slot: random_adapter(model.config, slot) for slot in (0, 2)}
    with_adapters(model, adapters)
    found = {chunk: logits(model, chunk, SLOTS) for chunk in (1, 24)}
    for slot in (-1, 0, 2):
        merged = load(checkpoint)
        if slot >= 0:
            merge(merged, adapters[slot])
        wanted = logits(merged, 24)
        for row in (row for row, own in enumerate(SLOTS) if own == slot):
            for chunk in found:
                torch.testing.assert_close(found[chunk][row], wanted[row], rtol=0, atol=1e-10)


def test_a_request_without_an_adapter_has_the_bits_of_a_model_without_any(checkpoint):
    wanted = logits(load(checkpoint), 24)
    model = with_adapters(load(checkpoint), {})
    for row, each in enumerate(logits(model, 24)):
        assert torch.equal(each, wanted[row])


@pytest.mark.parametrize("size", [2, 4])  # of 2 KV heads: with 4 ranks, two have the same one
def test_ranks_have_parts_of_adapters(checkpoint, size):
    whole = load(checkpoint)
    adapters = {slot: random_adapter(whole.config, slot) for slot in (0, 2)}
    wanted = logits(with_adapters(whole, adapters), 24, SLOTS)

    def of_parallel(parallel: ParallelContext) -> list[torch.Tensor]:
        model = load(checkpoint, parallel)
        own = {
            slot: of_rank(adapter, whole.config, model.config, parallel)
            for slot, adapter in adapters.items()
        }
        return logits(with_adapters(model, own), 24, SLOTS)

    for found in on_ranks(size, of_parallel):
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, tiny_config("llama", tie_word_embeddings=False))
    return folder


def test_deterministic_bits_do_not_follow_the_other_requests(llama):
    model = load(llama, deterministic=True)
    with_adapters(model, {slot: random_adapter(model.config, slot) for slot in (0, 2)})
    crowded = logits(model, 24, SLOTS)
    for row, slot in enumerate(SLOTS):
        alone = logits(model, 24, [slot], [PROMPTS[row]])[0]
        assert torch.equal(alone, crowded[row])


def test_deterministic_bits_of_ranks_do_not_follow_the_other_requests(llama):
    def of_parallel(parallel: ParallelContext) -> None:
        model, whole = load(llama, parallel, deterministic=True), load(llama)
        own = {
            slot: of_rank(random_adapter(whole.config, slot), whole.config, model.config, parallel)
            for slot in (0, 2)
        }
        with_adapters(model, own)
        crowded = logits(model, 24, SLOTS)
        for row, slot in enumerate(SLOTS):
            assert torch.equal(logits(model, 24, [slot], [PROMPTS[row]])[0], crowded[row])

    on_ranks(2, of_parallel)


def test_a_slot_takes_another_adapter_or_none(llama):
    model = load(llama)
    first, second = (random_adapter(model.config, seed) for seed in (3, 5))
    few = {place: pair for place, pair in second.items() if place.field == "o"}
    base = logits(with_adapters(model, {}), 24)
    model.lora.load(1, first)
    of_first = logits(model, 24, [1] * 4)
    model.lora.load(1, few)
    of_few = logits(model, 24, [1] * 4)
    merge(merged := load(llama), few)
    torch.testing.assert_close(of_few, logits(merged, 24), rtol=0, atol=1e-10)
    assert not torch.allclose(of_first[0], of_few[0])
    model.lora.clear(1)
    assert all(map(torch.equal, logits(model, 24, [1] * 4), base))


@pytest.mark.parametrize(
    ("place", "shape_a", "shape_b", "message"),
    [
        (AdapterPlace(0, "up"), (2, 64), (64, 2), "expected a place of the model"),
        (AdapterPlace(0, "o", part=1), (2, 64), (64, 2), "expected a place of the model"),
        (AdapterPlace(0, "o"), (6, 64), (64, 6), "expected a rank of 1 to 5, got 6"),
        (AdapterPlace(0, "o"), (2, 63), (64, 2), r"expected a \[2, 128\] and b \[64, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(llama, place, shape_a, shape_b, message):
    model = load(llama)
    adapter = random_adapter(model.config, 0)
    with_adapters(model, {1: adapter})
    before = logits(model, 24, [1] * 4)
    pair = AdapterPair(a=torch.zeros(shape_a), b=torch.zeros(shape_b), scaling=1.0)
    with pytest.raises(ValueError, match=message):
        model.lora.load(1, {**adapter, place: pair})
    assert all(map(torch.equal, logits(model, 24, [1] * 4), before))
    with pytest.raises(ValueError, match="slot: expected 0 to 2, got 3"):
        model.lora.load(3, adapter)


@pytest.mark.gpu
@pytest.mark.gpu_only
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_the_host_goes_on_while_a_pinned_adapter_is_loaded(llama):
    part = AdapterPair(a=torch.randn(2, 64), b=torch.randn(128, 2), scaling=2.0)
    stored = StoredAdapter(name="a", parts={"model.layers.1.self_attn.q_proj": part})
    config, dtype = ModelConfig.from_pretrained(llama), torch.bfloat16
    weights = LoraWeights.empty(config, max_loras=2, max_rank=4, device="cuda", dtype=dtype)
    adapter = stored.pinned(dtype).placed(config.vocab_size)
    torch.cuda.set_sync_debug_mode("error")
    try:
        weights.load(1, adapter)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    matrices = weights.places[1, "qkv"]
    assert torch.equal(matrices.a[1, :2].cpu(), part.a.to(dtype))
    assert torch.equal(matrices.b[1, :2, :128].cpu(), part.b.T.to(dtype))
    assert matrices.ranks[1].tolist() == [2, 0, 0]


def test_rank_invariant_ranks_are_refused(llama):
    def enable(parallel: ParallelContext) -> None:
        with pytest.raises(ConfigError, match="enable_lora: expected a single rank"):
            load(llama, parallel, deterministic=True, rank_invariant=True).enable_lora(1, 4)

    on_ranks(2, enable)
