"""Head policies in vLLM: its models, scheduler and KV cache manager, with mrv1's attention.

vLLM's own ``LLMEngine`` runs its own model classes on the CPU. Logits are compared with those of
transformers in float64, whose attention has the policy's mask; blocks with a closed form.
"""

from __future__ import annotations

import json
import random
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM's Python files: make full-vllm", allow_module_level=True)

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1 import kv_cache_spec_registry
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from mrv1 import ConfigError
from mrv1.headwise import FULL, HeadPolicy, Visible
from mrv1.integrations.vllm import head_wise, model_options, models, plugin, streaming_cache
from mrv1.integrations.vllm.head_order import dealt_order, reordered
from mrv1.integrations.vllm.head_wise import parts_of
from mrv1.integrations.vllm.streaming_cache import StreamingManager, StreamingSpec
from tests.integrations.vllm.model_worker import ModelWorker
from tests.integrations.vllm.serving import Engine
from tests.models.families import SLIDING, tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK = 16
SIZES = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
"""vLLM's Qwen2 takes ``hidden_size / num_attention_heads`` for the size of a head."""
NEAR, FAR = Visible(20, 5), Visible(37, 18)
POLICY = HeadPolicy(((NEAR, FULL, NEAR, NEAR), (FULL, NEAR, FULL, NEAR)))
"""Uneven numbers of full and streaming heads, which stand between each other."""
HALF = HeadPolicy.of_ratio(2, 4, 0.5, window=20, sink=5)
MIXED = HeadPolicy(((NEAR, FAR, FULL, FULL), (FULL, FULL, FAR, NEAR)))


def new_config(
    folder: Path,
    policy: HeadPolicy | None = None,
    *,
    num_blocks: int = 200,
    kv_cache_dtype: str = "auto",
    ranks: int = 1,
    stages: int = 1,
) -> VllmConfig:
    """Return the configuration for the checkpoint in ``folder`` and a policy."""
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    # vLLM inspects a class that is registered by name in another process, which takes seconds.
    name = f"Mrv1{architecture}"
    ModelRegistry.register_model(name, getattr(models, name))
    additional: dict[str, Any] = {}
    if policy is not None:
        policy.save(folder / "policy.json")
        additional["head_policy"] = str(folder / "policy.json")
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=160,
            enforce_eager=True,
            hf_overrides={"architectures": [name]},
        ),
        cache_config=CacheConfig(
            block_size=BLOCK, enable_prefix_caching=True, num_gpu_blocks_override=num_blocks,
            cache_dtype=kv_cache_dtype,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=48, max_model_len=160,
            enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=False,
        ),
        parallel_config=ParallelConfig(
            worker_cls=f"{ModelWorker.__module__}.{ModelWorker.__name__}",
            tensor_parallel_size=ranks, pipeline_parallel_size=stages,
            distributed_executor_backend="uni" if ranks * stages == 1 else "mp",
        ),
        compilation_config=CompilationConfig(custom_ops=["none"]),
        device_config=DeviceConfig(device="cpu"),
        additional_config=additional,
    )  # fmt: skip
    config.cache_config.sliding_window = config.model_config.get_sliding_window()
    # Without a GPU vLLM turns off several KV cache groups.
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    return config


class Oracle:
    """Transformers' model in float64, in which each KV head sees what the policy says."""

    def __init__(self, model: torch.nn.Module, policy: HeadPolicy) -> None:
        self.model = model.double()
        for layer, heads in zip(self.model.model.layers, policy.heads, strict=True):
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs, heads=heads: (
                    args,
                    kwargs | {"attention_mask": self._mask(module, heads)},
                ),
                with_kwargs=True,
            )

    def _mask(self, module: torch.nn.Module, heads: tuple[Visible, ...]) -> torch.Tensor:
        key = torch.arange(self.length)
        query = key[:, None]
        masks = [
            (key <= query) & ((query - key < (seen.window if seen.window > 0 else self.length))
                              | (key < seen.sink))
            for seen in heads
        ]  # fmt: skip
        visible = torch.stack(masks).repeat_interleave(module.num_key_value_groups, 0)
        return torch.where(visible, 0.0, -torch.inf).double()[None]

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return ``[tokens, vocab]``."""
        self.length = len(tokens)
        found: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return found


def check(
    engine: Engine, name: str, prompt: list[int], oracle: Oracle, tolerance: float = 1e-4
) -> None:
    """Compare every row of logits that the engine computed for a request."""
    output = engine.tokens(name)
    expected = oracle.logits(prompt + output)
    logits = engine.on_ranks(lambda worker: worker.logits)[-1]  # of the last pipeline stage
    (found,) = (rows for id_, rows in logits.items() if id_.startswith(name))
    assert {*range(len(prompt) - 1, len(prompt) + len(output) - 1)} <= {*found}
    for position, row in found.items():
        difference = row.double() - expected[position]
        assert difference.norm() <= tolerance * expected[position].norm(), (name, position)
    if tolerance < 1e-3:
        assert output == expected[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "ernie4_5"])
def test_each_family_sees_what_the_policy_says(tmp_path: Path, family: str):
    model = tiny_checkpoint(tmp_path, family, **SIZES)
    engine = Engine(new_config(tmp_path, POLICY))
    prompts = {f"r{n}": [(n * 37 + i * i) % 160 for i in range(n)] for n in (3, 61, 90)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=30)
    engine.finish()
    oracle = Oracle(model, POLICY)
    for name, prompt in prompts.items():
        check(engine, name, prompt, oracle)
    engine.close()


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (POLICY, {"ranks": 2}),
        (HALF, {"ranks": 2}),
        (MIXED, {"ranks": 2}),
        (POLICY, {"stages": 2}),
        (POLICY, {"ranks": 2, "stages": 2}),
        (HeadPolicy.full(2, 4), {"stages": 2}),
    ],
    ids=["uneven on two ranks", "half on two", "two windows on two", "stages", "both", "full"],
)
def test_ranks_and_stages_see_what_the_policy_says(tmp_path: Path, policy, options):
    model = tiny_checkpoint(tmp_path, "qwen2", **SIZES)
    engine = Engine(new_config(tmp_path, policy, **options), runner=2)
    if "stages" not in options:  # with a step in flight, blocks are freed a step later
        watch_blocks(engine)
    prompts = {f"r{n}": [(n * 37 + i * i) % 160 for i in range(n)] for n in (3, 61, 90)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=20)
    engine.finish()
    oracle = Oracle(model, policy)
    for name, prompt in prompts.items():
        check(engine, name, prompt, oracle)
    engine.close()


def test_an_fp8_cache_has_scales_in_the_blocks_of_both_kinds(tmp_path: Path):
    model = tiny_checkpoint(tmp_path, "qwen3", **SIZES)
    engine = Engine(new_config(tmp_path, HALF, kv_cache_dtype="fp8_per_token_head"))
    specs = engine.worker.get_kv_cache_spec().values()
    assert {spec.page_size_bytes for spec in specs} == {2 * 2 * BLOCK * (32 + 4)}
    prompt = [(7 * i * i) % 160 for i in range(70)]
    engine.add("r", prompt, max_tokens=20)
    engine.finish()
    check(engine, "r", prompt, Oracle(model, HALF), tolerance=0.2)  # codes of e4m3: 2^-4 each
    engine.close()


def test_full_heads_keep_the_window_of_their_layer(tmp_path: Path):
    model = tiny_checkpoint(tmp_path, "mistral", **SIZES | SLIDING["mistral"])
    every_head_full = HeadPolicy.full(2, 4)
    engine = Engine(new_config(tmp_path, every_head_full))
    specs = engine.worker.get_kv_cache_spec().values()
    assert [spec.sliding_window for spec in specs] == [24, 24]
    prompt = [(7 * i * i) % 160 for i in range(70)]
    engine.add("r", prompt, max_tokens=20)
    engine.finish()
    check(engine, "r", prompt, Oracle(model, every_head_full.within([24, 24])))
    engine.close()


# --- blocks -------------------------------------------------------------------------------------


def expected_blocks(spec: Any, num_computed: int, num_tokens: int) -> list[bool]:
    """Return which blocks a request holds while it computes its tokens from the first on."""
    held = []
    for block in range(-(-num_tokens // spec.block_size)):
        first, last = block * spec.block_size, (block + 1) * spec.block_size - 1
        sink = getattr(spec, "sink", 0)
        window = getattr(spec, "sliding_window", None)
        held.append(window is None or first < sink or last > num_computed - window)
    return held


def watch_blocks(engine: Engine) -> list[int]:
    """Compare each request's blocks with the closed form at every step; return their counts."""
    scheduler = engine.core.scheduler
    manager, schedule, counts = scheduler.kv_cache_manager, scheduler.schedule, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for req_id, count in output.num_scheduled_tokens.items():
            for of_group in manager.coordinator.single_type_managers:
                blocks = of_group.req_to_blocks[req_id]
                end = computed[req_id] + count
                expected = expected_blocks(of_group.kv_cache_spec, computed[req_id], end)
                assert [not block.is_null for block in blocks] == expected, (req_id, end)
        in_use = {
            block.block_id
            for of_group in manager.coordinator.single_type_managers
            for blocks in of_group.req_to_blocks.values()
            for block in blocks
            if not block.is_null
        }
        num_blocks = len(manager.block_pool.blocks) - 1  # block 0 is vLLM's null block
        assert manager.block_pool.get_num_free_blocks() == num_blocks - len(in_use)
        counts.append(len(in_use))
        return output

    scheduler.schedule = watched
    watch_estimates(manager)
    return counts


def watch_estimates(manager: Any) -> None:
    """Compare how many free blocks an allocation takes with what vLLM expects before it."""
    coordinator, pool, allocate = manager.coordinator, manager.block_pool, manager.allocate_slots
    expect, left = coordinator.get_num_blocks_to_allocate, []

    def expected(*args: Any, **kwargs: Any) -> int:
        count: int = expect(*args, **kwargs)
        left.append(pool.get_num_free_blocks() - count)
        return count

    def allocated(*args: Any, **kwargs: Any) -> Any:
        blocks = allocate(*args, **kwargs)
        if blocks is not None:
            assert pool.get_num_free_blocks() == left[-1]
        return blocks

    coordinator.get_num_blocks_to_allocate, manager.allocate_slots = expected, allocated


@pytest.mark.parametrize("policy", [POLICY, HALF, MIXED], ids=["uneven", "half", "two windows"])
def test_the_scheduler_frees_the_blocks_that_streaming_heads_no_longer_see(
    tmp_path: Path, policy: HeadPolicy
):
    """Random arrivals, chunked prompts, shared prefixes and preemption."""
    rng = random.Random(4)
    model = tiny_checkpoint(tmp_path, "qwen3", **SIZES)
    num_groups = {POLICY: 3, HALF: 2, MIXED: 4}[policy]
    engine = Engine(new_config(tmp_path, policy, num_blocks=10 * num_groups + 1), runner=2)
    managers = engine.core.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert len(managers) == num_groups
    counts = watch_blocks(engine)
    shared = [rng.randrange(160) for _ in range(70)]
    prompts = {}
    waiting = list(range(9))
    while waiting or engine.engine.has_unfinished_requests():
        if waiting and rng.random() < 0.6:
            own = [rng.randrange(160) for _ in range(rng.randint(1, 40))]
            name = f"r{waiting.pop()}."
            prompts[name] = shared + own if rng.random() < 0.6 else own
            engine.add(name, prompts[name], max_tokens=rng.randint(20, 50))
        engine.step()
    assert engine.num_preempted
    assert engine.num_cached_tokens
    assert max(counts) > 8 * num_groups
    oracle = Oracle(model, policy)
    for name, prompt in prompts.items():
        check(engine, name, prompt, oracle)
    engine.close()


def test_a_long_request_holds_a_bounded_number_of_streaming_blocks(tmp_path: Path):
    tiny_checkpoint(tmp_path, "llama", **SIZES)
    engine = Engine(new_config(tmp_path, HALF))
    counts = watch_blocks(engine)
    engine.add("long", [5] * 40, max_tokens=110)
    engine.finish()
    at_end = 149  # the last step computes the last token but one
    full, streaming = -(-at_end // BLOCK), NEAR.num_blocks(BLOCK)
    assert counts[109] in (full + streaming, full + streaming - 1)
    assert streaming <= 4
    # A hit whose blocks nobody else uses: they leave the list of free blocks, the sink's too.
    for name in ("first", "again"):
        engine.add(name, list(range(140)), max_tokens=2)
        engine.finish()
    assert engine.num_cached_tokens == 128
    engine.close()


class Pool:
    """The part of vLLM's block pool that a prefix lookup uses."""

    hash_block_size = BLOCK
    null_block = "null"

    def __init__(self, cached: set[int]) -> None:
        self.cached = cached

    def get_cached_block(self, block_hash: int, group_ids: list[int]) -> list[str] | None:
        return [f"{block_hash}/{id_}" for id_ in group_ids] if block_hash in self.cached else None


@given(
    cached=st.sets(st.integers(0, 11)),
    window=st.integers(2, 80),
    sink=st.integers(0, 80),
    max_length=st.integers(0, 12 * BLOCK),
    aligned=st.sampled_from([1, 2]),
)
@settings(max_examples=300)
def test_a_prefix_hit_has_the_sink_and_the_last_window(
    cached: set[int], window: int, sink: int, max_length: int, aligned: int
):
    spec = StreamingSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32,
        sliding_window=window, sink=sink,
    )  # fmt: skip
    found, length = StreamingManager.find_longest_cache_hit(
        block_hashes=list(range(12)),
        max_length=max_length,
        kv_cache_group_ids=[3, 5],
        block_pool=Pool(cached),
        kv_cache_spec=spec,
        drop_eagle_block=False,
        alignment_tokens=aligned * BLOCK,
    )

    def needed(num_blocks: int) -> set[int]:
        held = expected_blocks(spec, num_blocks * BLOCK, num_blocks * BLOCK)
        return {block for block, is_held in enumerate(held) if is_held}

    hits = [n for n in range(0, max_length // BLOCK + 1, aligned) if needed(n) <= cached]
    assert length == max(hits) * BLOCK
    for id_, blocks in zip((3, 5), found, strict=True):
        assert len(blocks) == max(hits)
        for block in needed(max(hits)):
            assert blocks[block] == f"{block}/{id_}"


@pytest.mark.skipif(
    not hasattr(SlidingWindowSpec, "num_retained_tokens"), reason="not run: of vLLM 0.33"
)
def test_the_worker_clears_no_entries_of_block_tables():
    """Its kernel clears from the first entry on, where the sink's blocks are."""
    options = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    assert SlidingWindowSpec(sliding_window=20, **options).num_retained_tokens == 19
    assert StreamingSpec(sliding_window=20, sink=5, **options).num_retained_tokens == 0


def test_specs_are_registered_also_where_vllms_own_are_not_yet(monkeypatch):
    """As in a process that unpickles a worker's specs first."""
    registered: dict[type, Any] = {}
    monkeypatch.setattr(kv_cache_spec_registry, "_REGISTRY_KVCACHESPEC_LIST", registered)
    runpy.run_module(streaming_cache.__name__)
    names = {spec.__name__ for spec in registered}
    assert {"FullAttentionSpec", "SlidingWindowSpec", "StreamingSpec"} <= names


# --- policies and refusals ----------------------------------------------------------------------


def test_parts_have_one_size_and_every_head_once():
    assert [[part.heads for part in parts] for parts in parts_of(HALF)] == [[(2, 3), (0, 1)]] * 2
    full = HeadPolicy.full(2, 4)
    for policy in (POLICY, MIXED, full):
        for layer, parts in zip(policy.heads, parts_of(policy), strict=True):
            assert sorted(head for part in parts for head in part.heads) == [0, 1, 2, 3]
            assert all({layer[head] for head in part.heads} == {part.seen} for part in parts)
        assert len({len(part.heads) for parts in parts_of(policy) for part in parts}) == 1


@given(
    layers=st.integers(1, 3).flatmap(
        lambda heads: st.lists(
            st.lists(st.sampled_from([FULL, NEAR, FAR]), min_size=4 * heads, max_size=4 * heads),
            min_size=1, max_size=3,
        )
    ),
    ranks=st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_ranks_have_as_many_heads_of_a_kind(layers: list[list[Visible]], ranks: int):
    policy = HeadPolicy(tuple(map(tuple, layers)))
    heads = range(policy.num_kv_heads)
    size = len(heads) // ranks
    for layer, order in zip(policy.heads, dealt_order(policy, ranks), strict=True):
        assert sorted(order) == [*heads]
        for kind in {*layer}:
            counts = [
                sum(layer[head] == kind for head in order[first : first + size])
                for first in range(0, len(heads), size)
            ]
            if order != (*heads,):
                assert max(counts) - min(counts) <= 1
            elif ranks == 1 or len({*layer}) == 1:
                assert sum(counts) == layer.count(kind)
            else:  # as few as can be
                assert max(counts) == -(-layer.count(kind) // ranks)


def test_heads_that_several_ranks_have_keep_their_order():
    assert dealt_order(HALF, 8) == [(0, 1, 2, 3)] * 2
    assert dealt_order(HALF, 2) == [(2, 0, 3, 1)] * 2
    assert [parts_of(HALF, rank, 8)[0][0].name for rank in (1, 7)] == ["part_1_0", "part_0_0"]


def test_weights_of_heads_are_read_in_their_order():
    rows = torch.arange(8.0)[:, None] * torch.ones(8, 8)
    given = {
        "model.layers.1.self_attn.q_proj.weight": rows,
        "model.layers.1.self_attn.k_proj.bias": torch.arange(8.0),
        "model.layers.1.self_attn.o_proj.weight": rows.T,
        "model.layers.1.self_attn.o_proj.bias": torch.arange(8.0),
        "model.layers.1.self_attn.q_norm.weight": torch.arange(8.0),
        "model.layers.0.self_attn.q_proj.weight": rows,
        "lm_head.weight": rows,
    }
    found = dict(reordered(given.items(), {1: (2, 0, 3, 1)}))
    changed = [*found][:3]
    order = [4, 5, 0, 1, 6, 7, 2, 3]
    assert torch.equal(found[changed[0]], rows[order])
    assert found[changed[1]].tolist() == order
    assert torch.equal(found[changed[2]], rows[order].T)
    assert all(torch.equal(found[name], given[name]) for name in [*found][3:])
    packed = {"model.layers.1.self_attn.qkv_proj.weight": rows}
    with pytest.raises(ConfigError, match=r"head_policy: expected weights .* got model\.layers"):
        dict(reordered(packed.items(), {1: (1, 0)}))


def test_the_plugin_registers_a_class_for_each_family():
    plugin.register()
    for architecture in model_options.ARCHITECTURES:
        name = f"Mrv1{architecture}"
        assert name in ModelRegistry.get_supported_archs()
        assert issubclass(getattr(models, name), models.Mrv1Model)


def refused(config: VllmConfig) -> str:
    with pytest.raises(ConfigError) as error:
        Engine(config)
    return str(error.value)


def test_what_a_head_policy_cannot_run_with_is_refused_by_name(tmp_path: Path, monkeypatch):
    tiny_checkpoint(tmp_path, "qwen3", **SIZES)
    assert refused(new_config(tmp_path)).startswith("additional_config: expected head_policy, ")
    message = refused(new_config(tmp_path, HeadPolicy.full(2, 8)))
    assert message == "head_policy: expected 4 KV heads, as the model has, got 8"
    for name in ("quantization", "lora_config"):
        config = new_config(tmp_path, POLICY)
        config.parallel_config.tensor_parallel_size = 2
        owner = config.model_config if name == "quantization" else config
        setattr(owner, name, "fp8")
        with pytest.raises(ConfigError, match=f"^{name}: expected None with a head policy"):
            head_wise._check_support(config, [])
    message = refused(new_config(tmp_path, HeadPolicy.full(3, 4)))
    assert message.startswith("head_policy: expected 2 layers")
    config = new_config(tmp_path, POLICY)
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    assert refused(config).startswith("disable_hybrid_kv_cache_manager: expected False")
    monkeypatch.setattr(head_wise, "Mrv1AttentionImpl", int)
    assert refused(new_config(tmp_path, POLICY)).startswith("attention_backend: expected CUSTOM")
