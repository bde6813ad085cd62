"""vLLM's own attention layers, cache planning, allocation and metadata around the backend.

Everything but the attention is vLLM's code, as its second model runner calls it on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="not run: vLLM is not installed")

# vLLM's layers import inductor, which warns about torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 64
WINDOWS = (None, 20)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEADS * HEAD_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": len(WINDOWS),
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Runner:
    """Two layers and what vLLM's worker keeps for them."""

    def __init__(
        self,
        folder: Path,
        block_size: int,
        kv_cache_dtype: str,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
        *,
        is_allocated: bool = True,
    ) -> None:
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            ModelConfig,
            VllmConfig,
            set_current_vllm_config,
        )
        from vllm.model_executor.layers.attention import Attention
        from vllm.v1.worker.gpu import attn_utils

        from mrv1.integrations.vllm.attention_backend import Mrv1AttentionBackend

        (folder / "config.json").write_text(json.dumps(LLAMA))
        self.cache_config = CacheConfig(block_size=block_size, cache_dtype=kv_cache_dtype)
        self.config = VllmConfig(
            model_config=ModelConfig(
                model=str(folder),
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=256,
                enforce_eager=True,
            ),
            cache_config=self.cache_config,
            device_config=DeviceConfig("cpu"),
        )
        # Without a GPU vLLM turns off a KV cache group for each window.
        self.config.scheduler_config.disable_hybrid_kv_cache_manager = False
        with set_current_vllm_config(self.config), _default_dtype(torch.bfloat16):
            self.layers = [
                Attention(
                    HEADS,
                    HEAD_SIZE,
                    HEAD_SIZE**-0.5,
                    num_kv_heads=KV_HEADS,
                    cache_config=self.cache_config,
                    prefix=f"model.layers.{index}.self_attn.attn",
                    attn_backend=Mrv1AttentionBackend,
                    per_layer_sliding_window=window,
                    logits_soft_cap=soft_cap,
                    **({} if sinks is None else {"sinks": sinks}),
                )
                for index, window in enumerate(WINDOWS)
            ]
            specs = attn_utils.get_kv_cache_spec(self.config)
            self.kv_cache_config = self._plan(specs)
            self.groups, support, self.block_sizes = attn_utils.init_attn_backend(
                self.kv_cache_config, self.config, torch.device("cpu")
            )
            assert support.min_cg_support.name == "ALWAYS"
            if is_allocated:
                self.allocate()
        scheduler = self.config.scheduler_config
        self.limits = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        groups = self.kv_cache_config.kv_cache_groups
        self.manager_sizes = [group.kv_cache_spec.block_size for group in groups]

    def _plan(self, specs: dict) -> object:
        """Return vLLM's division of 1 MiB among the layers."""
        try:
            from vllm.v1.core import kv_cache_planning
        except ImportError:  # vLLM 0.26
            from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

            return get_kv_cache_configs(self.config, [specs], [1 << 20])[0]
        from vllm.v1.attention.backends.utils import (
            get_supported_kv_cache_layouts,
            resolve_kv_cache_layout,
        )

        backends = [layer.get_attn_backend() for layer in self.layers]
        names = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        resolve_kv_cache_layout(self.config, [names], specs.values())
        return kv_cache_planning.get_kv_cache_configs(
            self.config,
            [specs],
            [1 << 20],
            kv_cache_planning.get_global_kv_cache_groups(self.config, [specs]),
        )[0]

    def allocate(self) -> None:
        """Let vLLM allocate the caches and bind them to the layers."""
        from vllm.v1.worker.gpu import attn_utils

        context = self.config.compilation_config.static_forward_context
        device = torch.device("cpu")
        if hasattr(attn_utils, "_reshape_kv_cache"):  # vLLM 0.26
            attn_utils.init_kv_cache(
                [], context, self.kv_cache_config, self.groups, device,
                self.cache_config.cache_dtype, self.block_sizes, self.config,
            )  # fmt: skip
        else:
            attn_utils.init_kv_cache(
                context, self.kv_cache_config, device, self.block_sizes, self.config
            )

    def step(self, qkv: list, lens: list[int], counts: list[int], tables: list) -> list:
        """Return each layer's output for the last ``counts`` tokens of requests of ``lens``.

        ``tables``: for each KV cache group, the requests' blocks as vLLM's manager has them.
        """
        from vllm.forward_context import set_forward_context
        from vllm.v1.worker.gpu import attn_utils

        starts = torch.tensor([0, *counts]).cumsum(0).int()
        positions = [torch.arange(length - count, length) for length, count in
                     zip(lens, counts, strict=True)]  # fmt: skip
        slots = torch.stack(
            [
                torch.cat(
                    [
                        table[row, at // size].long() * size + at % size
                        for row, at in enumerate(positions)
                    ]
                )
                for table, size in zip(tables, self.manager_sizes, strict=True)
            ]
        )
        if hasattr(attn_utils, "_reshape_kv_cache"):  # 0.26 splits blocks before, 0.33 in here
            ratios = [
                manager // kernel
                for manager, kernel in zip(self.manager_sizes, self.block_sizes, strict=True)
            ]
            tables = [
                (table[:, :, None] * ratio + torch.arange(ratio)).flatten(1).int()
                for table, ratio in zip(tables, ratios, strict=True)
            ]
        metadata = attn_utils.build_attn_metadata(
            attn_groups=self.groups,
            num_reqs=len(lens),
            num_tokens=sum(counts),
            query_start_loc_gpu=starts,
            query_start_loc_cpu=starts,
            max_query_len=max(counts),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            max_seq_len=max(lens),
            block_tables=tables,
            slot_mappings=slots,
            kv_cache_config=self.kv_cache_config,
        )
        slots_of = attn_utils.build_slot_mappings_by_layer(slots, self.kv_cache_config)
        with set_forward_context(
            metadata, self.config, num_tokens=sum(counts), slot_mapping=slots_of
        ):
            return [layer(*parts) for layer, parts in zip(self.layers, qkv, strict=True)]


@pytest.mark.parametrize(
    ("block_size", "kv_cache_dtype"), [(16, "auto"), (96, "auto"), (64, "fp8_per_token_head")]
)
def test_kernels_are_compiled_for_the_caches_that_vllm_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_size: int, kv_cache_dtype: str
):
    """The compiler starts when weights are loaded, before there is a cache."""
    from vllm.config import set_current_vllm_config

    from mrv1.integrations.vllm import attention_backend, attention_kernels

    found = []
    monkeypatch.setattr(attention_kernels, "start_compiling", lambda one, _: found.append(one))
    sinks = torch.nn.Parameter(torch.zeros(HEADS), requires_grad=False)
    runner = Runner(tmp_path, block_size, kv_cache_dtype, 1.5, sinks, is_allocated=False)
    with monkeypatch.context() as patch, set_current_vllm_config(runner.config):
        patch.setattr(attention_backend, "kernel_path", lambda _: "triton")
        for layer in runner.layers:
            layer.process_weights_after_loading(torch.bfloat16)
    (kernels,) = found
    runner.allocate()
    for layer in runner.layers:
        layer.impl.bind(layer.kv_cache)
    bound = [layer.impl.bound for layer in runner.layers]
    actual = attention_kernels.AttentionKernels.of(bound, kernels.batches, kernels.gpu)
    if block_size == 96:  # vLLM 0.33 has other blocks for windows then: compiled at their launch
        assert kernels.layers[0] == actual.layers[0]
    else:
        assert kernels == actual
    row_width = -(-256 // runner.block_sizes[0])
    assert kernels.batches[:4] == (256, *runner.limits, row_width)


@pytest.mark.parametrize(
    ("block_size", "kv_cache_dtype", "tolerance", "soft_cap", "has_sinks"),
    # vLLM splits blocks of 96 tokens into three of the kernels' 32. An e4m3 code is within 2**-4
    # of its value.
    [
        (16, "auto", 0.02, None, False),
        (96, "auto", 0.02, 1.5, True),
        (64, "fp8_per_token_head", 0.1, None, True),
    ],
)
def test_layers_of_vllm_attend(
    tmp_path: Path,
    block_size: int,
    kv_cache_dtype: str,
    tolerance: float,
    soft_cap: float | None,
    has_sinks: bool,
):
    sinks = None
    if has_sinks:
        logits = torch.tensor([-1.0, 2.0, 4.0, -torch.inf], dtype=torch.bfloat16)
        sinks = torch.nn.Parameter(logits, requires_grad=False)
    runner = Runner(tmp_path, block_size, kv_cache_dtype, soft_cap, sinks)
    if block_size == 96:
        assert 32 in runner.block_sizes
    # Blocks of all groups differ, as a block id belongs to one group at a time.
    free = iter(range(1, 10_000))
    tables = [
        torch.tensor([[next(free) for _ in range(-(-48 // size))] for _ in range(2)]).int()
        for size in runner.manager_sizes
    ]
    random = torch.Generator().manual_seed(block_size)
    history = [([], []), ([], [])]  # by request
    lens = [0, 0]
    for counts in ([37, 5], [1, 1], [1, 9], [2, 2]):
        lens = [length + count for length, count in zip(lens, counts, strict=True)]
        shape = sum(counts), (HEADS + 2 * KV_HEADS) * HEAD_SIZE
        rows = [torch.randn(shape, generator=random).bfloat16() for _ in WINDOWS]
        sizes = [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE]
        qkv = [row.split(sizes, dim=-1) for row in rows]
        # The layers' q is a view of qkv with its strides, as in vLLM's models.
        found = runner.step([(q.contiguous(), k, v) for q, k, v in qkv], lens, counts, tables)
        for layer, window in enumerate(WINDOWS):
            begin = 0
            for req, count in enumerate(counts):
                tokens = slice(begin, begin + count)
                begin += count
                q, k, v = (part[tokens].float().unflatten(-1, (-1, HEAD_SIZE))
                           for part in qkv[layer])  # fmt: skip
                history[req][layer].append((k, v))
                keys, values = (
                    torch.cat(parts).repeat_interleave(HEADS // KV_HEADS, 1)
                    for parts in zip(*history[req][layer], strict=True)
                )
                query = torch.arange(lens[req] - count, lens[req])[:, None]
                past = query - torch.arange(lens[req])
                scores = torch.einsum("qhd,khd->hqk", q, keys) * HEAD_SIZE**-0.5
                if soft_cap:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                scores[:, (past < 0) | (past >= (window or lens[req]))] = -torch.inf
                if has_sinks:
                    column = sinks.float()[:, None, None].expand(-1, count, 1)
                    scores = torch.cat([scores, column], dim=-1)
                weights = scores.softmax(-1)[..., : lens[req]]
                expected = torch.einsum("hqk,khd->qhd", weights, values)
                difference = found[layer][tokens].float() - expected.flatten(1)
                assert difference.norm() <= tolerance * expected.norm()
