"""The attention backend inside vLLM: its contracts with vLLM's own classes, and its numbers.

vLLM is no dependency: the tests run with whichever of the supported versions is installed. The
numbers are compared with a dense softmax over each request's own keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="not run: vLLM is not installed")

from vllm.config import CUDAGraphMode
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import backend as vllm_backend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec

from mrv1.errors import ConfigError
from mrv1.integrations.vllm import (
    attention,
    attention_backend,
    attention_kernels,
    attention_layer,
)
from mrv1.integrations.vllm.attention_backend import (
    Mrv1AttentionBackend,
    Mrv1AttentionImpl,
    Mrv1AttentionMetadata,
    Mrv1AttentionMetadataBuilder,
)
from mrv1.integrations.vllm.attention_kernels import (
    AttentionKernels,
    Batches,
    decode_rows,
    launch_every_decode,
    launch_every_prefill,
    launch_write,
)
from mrv1.integrations.vllm.attention_layer import BoundLayer
from mrv1.integrations.vllm.attention_pages import CODES, content_size, pages_of
from mrv1.kernels import DecodePlan, HeadRole, PrefillSplits
from mrv1.kernels.attention.prefill.choice import PrefillLayer
from mrv1.kernels.registry import Ops
from mrv1.runner.compile_ahead import CompilationError

FP8 = "fp8_per_token_head"
HAS_SHAPES = hasattr(vllm_backend.AttentionBackend, "get_kv_cache_shape")  # vLLM 0.26
HAS_SPECS = hasattr(vllm_backend.AttentionBackend, "customize_spec")  # vLLM 0.33
NUM_BLOCKS = 48


# --- contracts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "base"),
    [
        (Mrv1AttentionBackend, vllm_backend.AttentionBackend),
        (Mrv1AttentionMetadataBuilder, vllm_backend.AttentionMetadataBuilder),
        (Mrv1AttentionImpl, vllm_backend.AttentionImpl),
    ],
)
def test_every_method_is_there_with_vllms_parameters(ours: type, base: type):
    assert not ours.__abstractmethods__
    shared = {
        name
        for name, value in vars(ours).items()
        if hasattr(base, name) and inspect.isroutine(inspect.unwrap(getattr(ours, name)))
        if not name.startswith("__") or name == "__init__"
    }
    assert shared  # a method of another version only has no base here
    for name in shared:
        expected = list(inspect.signature(getattr(base, name)).parameters)
        found = inspect.signature(getattr(ours, name)).parameters
        assert list(found)[: len(expected)] == expected or set(expected) <= set(found), name
        assert all(found[extra].default is None for extra in list(found)[len(expected) :]), name


def test_both_versions_interfaces_are_there():
    assert HAS_SHAPES or HAS_SPECS
    for name in ("get_kv_cache_shape", "get_kv_cache_stride_order", "get_required_kv_cache_layout",
                 "supported_kv_cache_layouts", "customize_spec"):  # fmt: skip
        assert callable(getattr(Mrv1AttentionBackend, name))
    assert Mrv1AttentionMetadataBuilder.get_cudagraph_support(None, None) is (
        vllm_backend.AttentionCGSupport.ALWAYS
    )


def test_register_fills_the_custom_slot_once():
    slot = AttentionBackendEnum.CUSTOM
    slot.clear_override()
    attention.register()
    attention.register()  # every process of vLLM loads the plug-in
    assert slot.get_class() is Mrv1AttentionBackend
    assert AttentionBackendEnum[Mrv1AttentionBackend.get_name()] is slot
    register_backend(slot, "elsewhere.Backend")
    with pytest.raises(ConfigError, match=r"got elsewhere\.Backend; name in VLLM_PLUGINS"):
        attention.register()
    slot.clear_override()


VALID = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
}


@pytest.mark.parametrize(
    "change",
    [
        *({"head_size": size} for size in (64, 80, 96, 112, 160, 256)),
        *({"block_size": size} for size in (None, 32, 64, 128, 528)),
        {"dtype": torch.float16},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": FP8},
        {"has_sliding_window": True},
        {"has_sink": True},
        {"device_capability": DeviceCapability(8, 0)},
    ],
    ids=str,
)
def test_supported_configurations_have_no_invalid_reason(change: dict):
    assert Mrv1AttentionBackend.validate_configuration(**VALID | change) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_size": 72}, "head_size not supported"),
        ({"head_size": 512}, "head_size not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "fp8"}, "instead of kv_cache_dtype fp8 choose fp8_per_token_head"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 needs a model of this dtype"),
        ({"block_size": 24}, "block_size not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_kv_connector": True}, "KV connector not supported"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability not supported"),
    ],
    ids=str,
)
def test_what_kernels_lack_is_an_invalid_reason(change: dict, reason: str):
    reasons = Mrv1AttentionBackend.validate_configuration(**VALID | change)
    assert any(found.startswith(reason) for found in reasons), reasons


@pytest.mark.skipif(not HAS_SPECS, reason="not run: an option of vLLM 0.33")
def test_queries_known_only_on_the_device_are_an_invalid_reason():
    reasons = Mrv1AttentionBackend.validate_configuration(**VALID, use_adaptive_verification=True)
    assert len(reasons) == 1
    assert "query lens mismatch not supported" in reasons[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alibi_slopes": [0.5, 0.25]}, "alibi_slopes: expected None, got"),
        ({"sinks": torch.zeros(2)}, r"sinks: expected shape \[4\], got \[2\]"),
        ({"attn_type": "encoder_decoder"}, "attn_type: expected decoder, got encoder_decoder"),
        ({"attn_type": "encoder"}, "attn_type: expected decoder, got encoder;"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: expected one of .* got 'fp8'"),
    ],
    ids=str,
)
def test_a_layer_that_kernels_lack_is_refused_by_name(change: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        Mrv1AttentionImpl(4, 64, 0.125, num_kv_heads=2, **change)


# --- pages ---------------------------------------------------------------------------------------

SHAPES = [  # kv_heads, block_size, head_size, dtype, kv_cache_dtype
    (2, 16, 64, torch.bfloat16, "auto"),
    (8, 32, 128, torch.float16, "float16"),
    (1, 16, 80, torch.uint8, FP8),
    (3, 64, 128, torch.uint8, FP8),
]


def _spec(
    num_kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype, kv_cache_dtype: str,
    window: int | None = None, **options: object,
):  # fmt: skip
    """Return the spec that vLLM makes for a layer with this backend."""
    mode = KVQuantMode.FP8_PER_TOKEN_HEAD if kv_cache_dtype == FP8 else KVQuantMode.NONE
    if window is not None:
        options["sliding_window"] = window
    spec = (FullAttentionSpec if window is None else SlidingWindowSpec)(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        kv_quant_mode=mode,
        **options,
    )
    return Mrv1AttentionBackend.customize_spec(spec) if HAS_SPECS else spec


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages_have_as_many_bytes_as_vllm_counts(shape: tuple, window: int | None):
    num_kv_heads, block_size, head_size, dtype, kv_cache_dtype = shape
    values = 2 * num_kv_heads * block_size * head_size * dtype.itemsize
    scales = 2 * num_kv_heads * block_size * 4 if kv_cache_dtype == FP8 else 0
    assert _spec(*shape, window).page_size_bytes == values + scales
    found = Mrv1AttentionBackend.get_kv_cache_shape(
        7, block_size, num_kv_heads, head_size, kv_cache_dtype
    )
    assert prod(found) * dtype.itemsize == 7 * (values + scales)


def _vllm_caches(shape: tuple, arrangement: str) -> list[torch.Tensor]:
    """Return the caches of two layers as vLLM's own code makes them of raw memory."""
    num_kv_heads, block_size, head_size, _, kv_cache_dtype = shape
    if HAS_SPECS:
        from vllm.v1.kv_cache_interface import KVCacheTensor, create_kv_cache_views
        from vllm.v1.kv_cache_layout import KVCacheLayout

        page = _spec(*shape).page_size_bytes
        padded = page + 512 if arrangement == "padded" else page
        spec = _spec(*shape, page_size_padded=padded if arrangement == "padded" else None)
        layout = KVCacheLayout.BLHNC if arrangement == "packed" else KVCacheLayout.LBHNC
        assert layout in Mrv1AttentionBackend.supported_kv_cache_layouts()
        strides = {"packed": (padded, 2 * padded)}.get(arrangement, (NUM_BLOCKS * padded, padded))
        raw = torch.zeros(2 * NUM_BLOCKS * padded, dtype=torch.int8)
        tensor = KVCacheTensor(
            size=raw.numel(), layers=["0", "1"], offset=0,
            layer_stride=strides[0], block_stride=strides[1],
        )  # fmt: skip
        return create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, tensor)
    from vllm.v1.worker.gpu.attn_utils import _reshape_attention_kv_cache

    spec = _spec(*shape)
    cache_shape = Mrv1AttentionBackend.get_kv_cache_shape(
        NUM_BLOCKS, block_size, num_kv_heads, head_size, kv_cache_dtype
    )
    order = Mrv1AttentionBackend.get_kv_cache_stride_order()
    page = spec.page_size_bytes
    if arrangement == "packed":
        assert Mrv1AttentionBackend.indexes_kv_by_block_stride()
        raw = torch.zeros(2 * NUM_BLOCKS * page, dtype=torch.int8)
        packings = [(layer * page, 2 * page) for layer in range(2)]
        return [
            _reshape_attention_kv_cache(raw, spec, cache_shape, order, NUM_BLOCKS, packing)
            for packing in packings
        ]
    if arrangement == "padded":
        page += 512
        spec = _spec(*shape, page_size_padded=page)
    raws = torch.zeros(2, NUM_BLOCKS * page, dtype=torch.int8)
    return [
        _reshape_attention_kv_cache(raw, spec, cache_shape, order, NUM_BLOCKS, None)
        for raw in raws
    ]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # vLLM's import of inductor
@pytest.mark.parametrize("arrangement", ["plain", "padded", "packed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages_fill_a_layers_part_of_each_block(shape: tuple, arrangement: str):
    num_kv_heads, block_size, head_size, _, kv_cache_dtype = shape
    codes = CODES.get(kv_cache_dtype)
    first, second = _vllm_caches(shape, arrangement)
    pages = pages_of(first, head_size, HeadRole(), codes)
    # Count in every byte how often the addresses of all tokens and scales name it.
    counts = torch.zeros(pages.k.numel() * pages.k.element_size() * 2, dtype=torch.int32)
    block, head, token = np.ix_(range(NUM_BLOCKS), range(num_kv_heads), range(block_size))
    layout, size = pages.layout, pages.k.element_size()
    address = layout.head_base.numpy()[head] + block * layout.block_stride.numpy()[head]
    address = (address + token * layout.token_stride) * size
    ones = torch.ones(address.size, dtype=torch.int32)
    for cache in (pages.k, pages.v):
        start = cache.data_ptr() - first.data_ptr()
        for byte in range(head_size * size):
            counts.index_add_(0, torch.from_numpy(address + start + byte).flatten(), ones)
    if codes is not None:
        scales = pages.scales
        address = scales.base.numpy()[head] + block * scales.block_stride.numpy()[head] + token
        for cache in (scales.k_scale, scales.v_scale):
            start = cache.data_ptr() - first.data_ptr()
            for byte in range(4):
                where = torch.from_numpy(4 * address + start + byte).flatten()
                counts.index_add_(0, where, ones)
    filled = counts.bool()
    assert counts.max() == 1  # no byte twice
    assert int(filled.sum()) == first.numel() * size  # every byte of the layer
    first.view(torch.uint8).fill_(1)
    raw = first.view(torch.uint8).as_strided((int(filled.nonzero()[-1]) + 1,), (1,))
    assert torch.equal(raw == 1, filled[: raw.numel()])  # and of no other
    assert not second.view(torch.uint8).any()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("shape", [(8, 16, 128, torch.bfloat16, "auto"), SHAPES[3]], ids=str)
def test_pages_of_128_dimensions_can_be_copied_in_bulk(shape: tuple):
    # What the prefill kernels for sm_90 need: scales between pages must not break it.
    first, _ = _vllm_caches(shape, "plain")
    pages = pages_of(first, 128, HeadRole(), CODES.get(shape[4]))
    assert pages.layout.address_unit == pages.layout.token_stride == 128
    assert pages.k.numel() == pages.v.numel()
    assert pages.k.numel() % 128 == 0
    assert (pages.v.data_ptr() - pages.k.data_ptr()) % 128 == 0


def test_a_cache_of_another_layout_is_refused():
    cache = torch.zeros(NUM_BLOCKS, 16, 2, 128)
    with pytest.raises(ValueError, match=r"kv_cache: expected pages without gaps .* HND"):
        pages_of(cache.transpose(1, 2), 64, HeadRole(), None)
    with pytest.raises(ValueError, match=r"kv_cache: expected shape .* 136\], got"):
        pages_of(cache, 64, HeadRole(), CODES[FP8])


# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "num_reqs", "num_tokens", "decode_query_len", "expected"),
    [
        ([1, 1, 1], 3, 3, 1, (3, 1)),
        ([1, 1, 1], 3, 3, 4, (3, 1)),
        ([1, 1], 4, 4, 1, (4, 1)),  # two rows of padding
        ([4, 4], 3, 12, 4, (3, 4)),
        ([4, 4], 3, 12, 1, (0, 1)),  # short prompts
        ([4, 4], 2, 8, 5, (0, 1)),  # fewer drafts than there may be
        ([4, 2], 2, 8, 4, (0, 1)),  # as many tokens as two rows of 4 have, with padding
        ([8, 8], 2, 16, 8, (2, 8)),
        ([9, 9], 2, 18, 1, (0, 1)),
        ([1, 1, 5], 3, 7, 5, (2, 1)),
        ([1, 1, 5, 1], 4, 8, 1, (2, 1)),
        ([5, 1], 2, 6, 5, (0, 1)),
        ([1, 1], 4, 8, 2, (2, 1)),
    ],
)
def test_rows_of_one_token_or_with_all_drafts_are_decoded(
    lengths, num_reqs, num_tokens, decode_query_len, expected
):
    starts = np.cumsum([0, *lengths, *[0] * (num_reqs - len(lengths))], dtype=np.int32)
    found = decode_rows(num_reqs, num_tokens, max(lengths), starts, decode_query_len)
    assert found == expected


@pytest.mark.parametrize(
    ("num_drafts", "decoded"), [(0, {1}), (3, {1, 4}), (7, {1, 8}), (8, {1}), (255, {1})]
)
def test_rows_with_more_drafts_than_the_kernel_takes_are_prefilled(num_drafts, decoded):
    model = Model(4, 2, 64, 16, (None,), False, seed=0, num_drafts=num_drafts)
    found = {
        length for length in range(1, 10)
        if model.builder.build(0, model.common({0: length, 1: length})).decode is not None
    }  # fmt: skip
    assert found == decoded


# --- numbers -------------------------------------------------------------------------------------


@dataclass
class Model:
    """Layers of vLLM's shape around our implementation, and each request's own K and V."""

    num_q_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    windows: tuple[int | None, ...]
    is_fp8: bool
    seed: int
    rtol: float = 1e-5
    soft_cap: float | None = None
    has_sinks: bool = False
    sink: int = 0
    """Of layers with a window."""
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE
    num_drafts: int = 2
    history: dict[tuple[int, str], list[tuple[torch.Tensor, torch.Tensor]]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        dtype = torch.uint8 if self.is_fp8 else torch.float32
        name = FP8 if self.is_fp8 else "auto"
        self.sinks = None
        if self.has_sinks:
            self.sinks = torch.nn.Parameter(torch.empty(self.num_q_heads), requires_grad=False)
        shape = Mrv1AttentionBackend.get_kv_cache_shape(
            NUM_BLOCKS, self.block_size, self.num_kv_heads, self.head_size, name
        )
        self.layers = {
            f"layers.{index}": SimpleNamespace(
                impl=Mrv1AttentionImpl(
                    self.num_q_heads, self.head_size, self.head_size**-0.5, self.num_kv_heads,
                    None, window, name, self.soft_cap, sinks=self.sinks,
                ),
                kv_cache=torch.zeros(shape, dtype=dtype),
            )
            for index, window in enumerate(self.windows)
        }  # fmt: skip
        for layer, window in zip(self.layers.values(), self.windows, strict=True):
            layer.impl.sink = self.sink if window is not None else 0
        spec = _spec(self.num_kv_heads, self.block_size, self.head_size, dtype, name)
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context=self.layers,
                cudagraph_mode=self.cudagraph_mode,
                max_cudagraph_capture_size=12,
            ),
            model_config=SimpleNamespace(dtype=torch.float32),
            num_speculative_tokens=self.num_drafts,
        )
        self.builder = Mrv1AttentionMetadataBuilder(
            spec, list(self.layers), config, torch.device("cpu")
        )
        if self.has_sinks:  # the weights are loaded after the layers are made
            self.sinks.data.copy_(3 * self.randn(self.num_q_heads))
        # Block 0 is vLLM's null block; others in a random order.
        self.free = (torch.randperm(NUM_BLOCKS - 1, generator=self.random) + 1).tolist()
        self.blocks_of: dict[int, list[int]] = {}
        self.table = torch.zeros(8, 12, dtype=torch.int32)
        self.starts = torch.zeros(9, dtype=torch.int32)
        self.lens = torch.zeros(8, dtype=torch.int32)
        self.slots = torch.full((200,), -1)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def step(
        self,
        queries: dict[int, int],
        pad_reqs: int = 0,
        pad_tokens: int = 0,
        captured: Mrv1AttentionMetadata | None = None,
    ) -> None:
        """Write and attend as vLLM does for ``queries`` tokens per request, and compare.

        ``captured``: what a CUDA graph read when it was captured; the layers run with it, as a
        replay does, after ``build`` for this step.
        """
        common = self.common(queries, pad_reqs, pad_tokens)
        metadata = self.builder.build(0, common)
        num_tokens = sum(queries.values())
        starts = common.query_start_loc.tolist()
        rows = num_tokens + pad_tokens + 3  # vLLM pads its tensors to a captured size
        for name, layer in self.layers.items():
            qkv = self.randn(rows, self.num_q_heads + 2 * self.num_kv_heads, self.head_size)
            q, k, v = qkv.split([self.num_q_heads, self.num_kv_heads, self.num_kv_heads], 1)
            out = torch.full_like(q.contiguous(), torch.nan)
            layer.impl.forward(layer, q, k, v, layer.kv_cache, captured or metadata, out)
            for row, req in enumerate(queries):
                tokens = slice(starts[row], starts[row + 1])
                key = (req, name)
                self.history.setdefault(key, []).append((k[tokens], v[tokens]))
                expected = self.attend(q[tokens], key, layer.impl)
                torch.testing.assert_close(out[tokens], expected, rtol=self.rtol, atol=self.rtol)
            assert out[num_tokens + pad_tokens :].isnan().all()  # not ours to write
            assert not layer.kv_cache[0].any()  # padding reaches no page

    def common(
        self, queries: dict[int, int], pad_reqs: int = 0, pad_tokens: int = 0
    ) -> vllm_backend.CommonAttentionMetadata:
        """Return vLLM's metadata of a step, in buffers that every step shares."""
        num_reqs, num_tokens = len(queries), sum(queries.values())
        slots, lens = [], []
        for req, count in queries.items():
            past = self.length(req)
            blocks = self.blocks_of.setdefault(req, [])
            while len(blocks) * self.block_size < past + count:
                blocks.append(self.free.pop())
            slots += [
                blocks[at // self.block_size] * self.block_size + at % self.block_size
                for at in range(past, past + count)
            ]
            lens.append(past + count)
        rows = num_reqs + pad_reqs
        self.table.zero_()
        for row, req in enumerate(queries):
            blocks = torch.tensor(self.blocks_of[req])
            self.table[row, : len(blocks)] = blocks
        self.slots[: num_tokens + pad_tokens] = torch.tensor(slots + [-1] * pad_tokens)
        starts = torch.tensor([0, *queries.values(), *[0] * pad_reqs]).cumsum(0).int()
        self.starts[: rows + 1] = starts
        self.lens[:rows] = torch.tensor(lens + [0] * pad_reqs)
        return vllm_backend.CommonAttentionMetadata(
            query_start_loc=self.starts[: rows + 1],
            query_start_loc_cpu=starts,
            seq_lens=self.lens[:rows],
            num_reqs=rows,
            num_actual_tokens=num_tokens + pad_tokens,
            max_query_len=max(queries.values()),
            max_seq_len=max(lens),
            block_table_tensor=self.table[:rows],
            slot_mapping=self.slots[: num_tokens + pad_tokens],
        )

    def length(self, req: int) -> int:
        return sum(len(k) for k, _ in self.history.get((req, "layers.0"), []))

    def attend(self, q: torch.Tensor, key: tuple, impl: Mrv1AttentionImpl) -> torch.Tensor:
        """Return the softmax over all keys of a request, densely, in float64."""
        k, v = (torch.cat(parts).double() for parts in zip(*self.history[key], strict=True))
        if self.is_fp8:
            k, v = _through_e4m3(k), _through_e4m3(v)
        group = self.num_q_heads // self.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * self.head_size**-0.5
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        query = torch.arange(len(k) - len(q), len(k))[:, None]
        position = torch.arange(len(k))
        is_near = query - position < (impl.sliding_window or len(k))
        visible = (position <= query) & (is_near | (position < impl.sink))
        scores[:, ~visible] = -torch.inf
        if self.sinks is not None:
            column = self.sinks.double()[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, column], dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(v)], v).float()


class _Compiler:
    """Stands for the child process that compiles."""

    def __init__(self, events: list[str], error: Exception | None) -> None:
        self.events, self.error = events, error

    def wait(self, show: Callable[[int, int], object]) -> None:
        self.events.append("wait")
        show(1, 1)
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        self.events.append("stop")


def _of_a_start(model: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Give a model's builder what a start asks for; return what vLLM does with loaded weights."""
    config = model.builder.vllm_config
    config.model_config.max_model_len = 12 * model.block_size
    config.scheduler_config = SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=50)
    config.cache_config = SimpleNamespace(block_size=model.block_size)
    config.device_config = SimpleNamespace(device=torch.device("cpu"))
    model.builder._is_warm = False
    monkeypatch.setattr(attention_backend, "get_current_vllm_config_or_none", lambda: config)

    def load() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(attention_backend, "kernel_path", lambda _: "triton")
            for layer in model.layers.values():
                layer.impl.process_weights_after_loading(torch.float32)

    return load


@pytest.mark.parametrize("error", [None, CompilationError("no room")], ids=str)
@pytest.mark.parametrize("captures", [True, False])
def test_kernels_are_compiled_from_the_loading_of_weights_and_launched_before_the_first_batch(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
    captures: bool,
):
    model, events = Model(4, 2, 64, 16, (None, 20, None), False, seed=0), []
    load = _of_a_start(model, monkeypatch)

    def start(kernels: AttentionKernels, num_processes: int | None) -> _Compiler:
        windows = [layer.role.window for layer, _, _ in kernels.layers]
        events.append(f"start {windows} {kernels.batches.row_width} {num_processes}")
        return _Compiler(events, error)

    def write(bound: BoundLayer, batches: Batches) -> None:
        events.append(f"write {bound.layer.role.window}")
        launch_write(bound, batches)

    def prefill(bound: BoundLayer, batches: Batches) -> None:
        events.append(f"prefill {bound.layer.role.window}")
        launch_every_prefill(bound, batches)

    def decode(bound: BoundLayer, batches: Batches) -> None:
        events.append(f"decode {bound.layer.role.window}")
        launch_every_decode(bound, batches)

    monkeypatch.setenv("MRV1_COMPILE_PROCESSES", "3")
    monkeypatch.setattr(attention_kernels, "start_compiling", start)
    monkeypatch.setattr(attention_kernels, "launch_write", write)
    monkeypatch.setattr(attention_kernels, "launch_every_prefill", prefill)
    monkeypatch.setattr(attention_kernels, "launch_every_decode", decode)
    load()
    assert events == ["start [-1, 20] 12 3"]
    if captures:
        for count in (2, 1):
            model.builder.build_for_cudagraph_capture(model.common(dict.fromkeys(range(count), 1)))
    assert events == ["start [-1, 20] 12 3"]
    launches = [
        f"{name} {window}" for window in (-1, 20) for name in ("write", "prefill", "decode")
    ]
    for _ in range(2):
        model.step({0: 1, 1: 7, 2: 30})
        assert events == ["start [-1, 20] 12 3", "wait", "stop", *launches]
    load()  # again, as after a sleep
    model.builder._is_warm = False  # as another builder: vLLM's first one measures memory
    model.step({0: 1})
    assert events[3:] == launches * 2
    assert ("no room; each kernel is compiled when it is first launched" in caplog.text) == (
        error is not None
    )


@pytest.mark.parametrize("hip", [None, "7.0"])
def test_without_a_child_kernels_are_compiled_when_they_are_launched(monkeypatch, hip):
    """Triton's cache has all kernels, or the GPU is AMD's: the child's stand-in is NVIDIA's."""
    model, events = Model(4, 2, 64, 16, (None,), False, seed=0), []
    load = _of_a_start(model, monkeypatch)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(attention_kernels, "start_compiling", lambda *_: events.append("asked"))
    monkeypatch.setattr(
        attention_kernels, "launch_every_prefill", lambda bound, _: events.append(bound.layer)
    )
    monkeypatch.setattr(attention_kernels, "launch_every_decode", lambda *_: None)
    load()
    model.step({0: 7})
    assert events == [*(["asked"] if hip is None else []), model.builder._impls[0].layer]


def _through_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return x after the definition of vLLM's fp8_per_token_head: absmax / 448 for each head."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp_min(1e-12)
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.double() * scale.double()


@pytest.mark.parametrize(
    ("heads", "head_size", "block_size", "windows", "is_fp8", "options"),
    [
        ((4, 2), 64, 16, (None,), False, {}),
        ((8, 1), 80, 32, (None, 20), False, {}),  # layers of two windows in one group
        ((6, 6), 96, 16, (33,), False, {"soft_cap": 2.0}),
        ((4, 2), 64, 16, (None, 20), True, {"soft_cap": 5.0, "has_sinks": True, "sink": 3}),
        ((2, 1), 128, 64, (None,), True, {"soft_cap": 0.0}),  # none
        ((8, 1), 64, 16, (None, 20), False, {"has_sinks": True}),
        ((4, 2), 32, 16, (9,), False, {"sink": 18}),
    ],
)
def test_steps_equal_dense_attention(heads, head_size, block_size, windows, is_fp8, options):
    model = Model(*heads, head_size, block_size, windows, is_fp8, seed=head_size, **options)
    model.step({0: 40, 1: 1, 2: 17})  # prefill, one prompt of one token
    model.step({1: 1, 2: 1, 0: 23, 3: 9})  # decodes first, then a chunk and a new prompt
    model.step({3: 1, 0: 1, 2: 1})
    model.step({0: 3, 1: 3, 2: 3})  # two drafts are verified
    model.step({0: 4, 1: 4, 2: 4})  # as short prompts
    model.step({2: 1, 1: 1}, pad_reqs=2, pad_tokens=2)  # padded to a captured size
    model.step({1: 3, 3: 3}, pad_reqs=1, pad_tokens=3)
    model.step({0: 9, 3: 9})  # more queries than decode takes
    model.step({3: 1, 1: 8, 2: 2}, pad_reqs=1, pad_tokens=5)


@pytest.mark.parametrize("options", [{}, {"has_sinks": True}, {"soft_cap": 2.0}], ids=str)
def test_a_mixed_batch_is_prefilled_at_once_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, options: dict
):
    asked = []

    def is_faster(layer: PrefillLayer, *lengths: int) -> bool:
        asked.append((layer.dtype, layer.page_format.has_scales, layer.num_q_heads, *lengths))
        return True

    monkeypatch.setattr(attention_backend, "prefills_decodes_too", is_faster)
    model = Model(4, 2, 64, 16, (None,), is_fp8=False, seed=9, **options)
    model.step({0: 40, 1: 1, 2: 17})
    mixed = {1: 1, 2: 1, 0: 23, 3: 9}
    metadata = model.builder.build(0, model.common(mixed))
    model.step(mixed)
    if options:  # no kernel for such tiles
        assert (metadata.decode.num_tokens, metadata.prefill.first_token) == (2, 2)
        assert asked == []
        return
    assert metadata.decode is None
    assert (metadata.prefill.first_token, metadata.prefill.end_token) == (0, 34)
    assert asked[-1] == (torch.float32, False, 4, 23, 34)
    asked.clear()
    model.step({3: 1, 0: 1, 2: 1})  # decodes alone
    model.step({0: 4, 1: 4})
    model.step({0: 9, 3: 9})
    assert len(asked) == 0


def test_layers_of_one_kind_share_their_calls_and_a_step_forgets_the_last_one():
    model = Model(4, 2, 64, 16, (None, 20, None), is_fp8=False, seed=11)
    model.step({0: 20})
    full, window, other_full = (layer.impl.repeated for layer in model.layers.values())
    assert full is other_full
    assert full is not window
    forgotten = []
    for name, repeated in (("full", full), ("window", window)):
        repeated.forget = partial(forgotten.append, name)
    model.step({0: 1})
    assert forgotten == ["full", "window"]


def test_a_layer_that_shares_the_cache_of_another_writes_nothing():
    model = Model(4, 2, 64, 16, (None, None), is_fp8=False, seed=12)
    owner, sharer = model.layers.values()
    sharer.impl.kv_sharing_target_layer_name, sharer.kv_cache = "layers.0", owner.kv_cache
    common = model.common({0: 20, 1: 3})
    metadata = model.builder.build(0, common)
    assert owner.impl.repeated is not sharer.impl.repeated
    q, k, v = model.randn(23, 4, 64), model.randn(23, 2, 64), model.randn(23, 2, 64)
    expected = owner.impl.forward(
        owner, q, k, v, owner.kv_cache, metadata, torch.full_like(q, torch.nan)
    )
    written = owner.kv_cache.clone()
    assert written.any()
    for others in ((k + 1, v + 1), (None, None)):  # models with shared caches compute none
        found = sharer.impl.forward(
            sharer, q, *others, owner.kv_cache, metadata, torch.full_like(q, torch.nan)
        )
        assert torch.equal(found, expected)
        assert torch.equal(owner.kv_cache, written)


def _replay(model: Model) -> None:
    """Capture decodes of one and of three queries, then replay them in later steps."""
    model.step({0: 20, 1: 3})
    captured = model.builder.build_for_cudagraph_capture(model.common({0: 1, 1: 1, 2: 1}))
    drafts = model.builder.build_for_cudagraph_capture(model.common({0: 3, 1: 3}))
    assert (captured.decode.query_len, drafts.decode.query_len) == (1, 3)
    model.step({0: 1, 1: 1, 2: 1}, captured=captured)
    model.step({2: 19, 0: 1})  # another step between
    model.step({2: 3, 1: 3}, captured=drafts)
    model.step({1: 1, 2: 1}, pad_reqs=1, pad_tokens=1, captured=captured)
    model.step({2: 3}, pad_reqs=1, pad_tokens=3, captured=drafts)


def test_a_captured_graph_serves_later_steps():
    _replay(Model(4, 2, 64, 16, (None, 12), is_fp8=False, seed=1))


def _replay_any_batch(model: Model) -> list[Mrv1AttentionMetadata]:
    """Capture graphs of 3 rows and 12 tokens, and of 2 rows and 2; replay them with any batch."""
    model.step({0: 70, 1: 3})
    # vLLM's dummy batches: all rows of one length. The real ones' rows differ.
    capture = model.builder.build_for_cudagraph_capture
    large, small = capture(model.common({0: 4, 1: 4, 2: 4})), capture(model.common({0: 1, 1: 1}))
    model.step({0: 1, 1: 1, 2: 9}, pad_tokens=1, captured=large)  # decodes and a prompt
    model.step({1: 12}, pad_reqs=2, captured=large)
    model.step({2: 1, 0: 1}, captured=small)
    model.step({1: 1, 0: 1, 2: 1}, pad_tokens=9, captured=large)  # decodes alone
    model.step({2: 2}, pad_reqs=1, captured=small)
    model.step({1: 5, 2: 1, 0: 3}, pad_tokens=3, captured=large)
    model.step({2: 2, 0: 3})  # of a size without a graph
    model.step({0: 1, 2: 3, 1: 20})  # larger than every graph: its first row is decoded
    return [large, small]


def test_a_graph_of_mixed_batches_serves_any_batch_of_its_size():
    _replay_any_batch(
        Model(4, 2, 64, 16, (None, 12), False, seed=3, cudagraph_mode=CUDAGraphMode.FULL)
    )


@pytest.mark.interp
@pytest.mark.parametrize("is_fp8", [False, True])
def test_kernels_serve_any_batch_with_the_buffers_of_a_captured_graph(
    is_fp8: bool, monkeypatch: pytest.MonkeyPatch
):
    # Several programs per tile, which the interpreter's device does not ask for.
    allocate = partial(PrefillSplits.allocate, num_splits=2)
    monkeypatch.setattr(attention_layer, "PrefillSplits", SimpleNamespace(allocate=allocate))
    model = Model(
        2, 1, 16, 16, (None, 12), is_fp8, seed=4, rtol=2e-3 if is_fp8 else 1e-5,
        soft_cap=3.0, has_sinks=True, sink=5, cudagraph_mode=CUDAGraphMode.FULL,
    )  # fmt: skip
    captured = _replay_any_batch(model)
    splits = [one for each in captured for one in each.prefill.splits.values()]
    assert len(splits) == 4  # one for each window and graph
    assert len({one.states.untyped_storage().data_ptr() for one in splits}) == 1  # largest first
    assert not any(one.arrivals.any() for one in splits)


@pytest.mark.interp
@pytest.mark.parametrize("is_fp8", [False, True])
def test_kernels_follow_the_plans_of_a_captured_graph(
    is_fp8: bool, monkeypatch: pytest.MonkeyPatch
):
    # Several pieces per request, which the interpreter's device does not ask for.
    allocate = partial(DecodePlan.allocate, num_kv_splits=2)
    monkeypatch.setattr(attention_layer, "DecodePlan", SimpleNamespace(allocate=allocate))
    # The weights of an fp8 cache are rounded to fp16 before the product with V.
    model = Model(
        2, 1, 16, 16, (None, 12), is_fp8, seed=2, rtol=2e-3 if is_fp8 else 1e-5,
        soft_cap=3.0, has_sinks=True, sink=5,
    )  # fmt: skip
    model.step({0: 150, 1: 3})  # longer than a tile of the interpreter
    model.step({0: 1, 1: 1})
    captured = model.builder.build_for_cudagraph_capture(model.common({0: 1, 1: 1, 2: 1}))
    drafts = model.builder.build_for_cudagraph_capture(model.common({0: 3, 1: 3}))
    assert (captured.decode.query_len, drafts.decode.query_len) == (1, 3)
    model.step({0: 1, 1: 1, 2: 1}, captured=captured)
    model.step({2: 3, 0: 3}, captured=drafts)
    model.step({0: 1, 2: 1}, pad_reqs=1, pad_tokens=1, captured=captured)
    plans = [*captured.decode.plans.values(), *drafts.decode.plans.values()]
    assert len(plans) == 4  # one for each window and captured shape
    assert all(plan.may_split for plan in plans)
    storages = {plan.states.untyped_storage().data_ptr() for plan in plans}
    assert len(storages) <= 2  # a larger plan that came later has a buffer of its own


@pytest.mark.interp
def test_the_first_layer_of_each_window_plans_for_the_others():
    model = Model(2, 1, 16, 16, (None, 12, None, 12), is_fp8=False, seed=6)
    model.step({0: 20, 1: 3})
    planned = []

    def plan(name: str, ops: Ops, *arguments: Any) -> None:
        planned.append(name)
        ops.plan_decode_attention(*arguments)

    for name, layer in model.layers.items():
        ops = layer.impl.bound.ops
        layer.impl.bound.ops = SimpleNamespace(
            kv_cache_write=ops.kv_cache_write,
            paged_decode_attention=ops.paged_decode_attention,
            plan_decode_attention=partial(plan, name, ops),
        )
    model.step({0: 1, 1: 1})
    assert planned == ["layers.0", "layers.1"]


def test_a_batch_that_is_not_causal_is_refused():
    model = Model(2, 2, 64, 16, (None,), is_fp8=False, seed=0)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    common = vllm_backend.CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=starts[1:], num_reqs=1,
        num_actual_tokens=1, max_query_len=1, max_seq_len=1, slot_mapping=torch.zeros(1).long(),
        block_table_tensor=torch.ones(1, 1, dtype=torch.int32), causal=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="causal: expected True, got False"):
        model.builder.build(0, common)
    with pytest.raises(ConfigError, match="mm_req_doc_ranges: expected None"):
        model.builder.build(0, common.replace(causal=True, mm_req_doc_ranges={0: [(0, 1)]}))


def test_a_layer_of_unequal_keys_and_values_is_refused():
    spec = _spec(*SHAPES[0], head_size_v=32)
    with pytest.raises(ConfigError, match="head_size_v: expected 64 like keys, got 32"):
        Mrv1AttentionMetadataBuilder(spec, [], SimpleNamespace(), torch.device("cpu"))


def test_memory_is_measured_without_a_cache():
    impl = Mrv1AttentionImpl(4, 64, 0.125, num_kv_heads=2)
    q, out = torch.randn(3, 4, 64), torch.full((3, 4, 64), torch.nan)
    impl.forward(None, q, q[:, :2], q[:, :2], torch.tensor([]), None, out)
    assert not out.any()
    with pytest.raises(ConfigError, match="got a quantized output"):
        impl.forward(None, q, q, q, torch.tensor([]), None, out, output_scale=torch.ones(1))


def test_content_is_codes_and_two_scales():
    assert content_size(128, None) == 256
    assert content_size(128, CODES[FP8]) == 2 * (128 + 4)
