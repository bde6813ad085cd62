"""FlashInfer as an attention backend: the arguments of its plans, and the cases it is refused for.

Without a GPU a stand-in replaces FlashInfer: wrappers with its signatures that check their
arguments and compute attention with the oracle, from their plan alone.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from mrv1 import LLM, ConfigError, SamplingParams, UnsupportedDeviceError
from mrv1.config import checkpoint_dir
from mrv1.device import kernel_path
from mrv1.headwise import FULL, HeadGroups, HeadPolicy, Visible
from mrv1.kernels import HeadRole, KVLayout, reference
from mrv1.kernels.cache.formats import PageFormat
from mrv1.kernels.registry import select_ops
from mrv1.models import attention, load_model
from mrv1.runner.attention_backends import (
    FlashInferBackend,
    check_flashinfer,
    head_runs,
    select_backend,
)
from mrv1.runner.kv_cache import CacheSpec, layer_layouts
from tests.engine.test_llm import random_prompts
from tests.models.driver import PagedDriver, Request
from tests.models.families import SLIDING, tiny_checkpoint
from tests.models.test_decoder import no_waiting
from tests.models.test_fp8_cache import add_tensors, scale_tensors

NOT_INSTALLED = "not run: flashinfer is not installed"
MIXED_HEADS = HeadPolicy(((Visible(20), FULL), (Visible(30), Visible(20))))


# --- mrv1's kernels ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "overrides", "layers_of_a_plan"),
    [("llama", {}, 2), ("qwen3", SLIDING["qwen3"], 1)],
    ids=["one layout", "a window of its own"],
)
def test_a_decode_step_is_planned_once_for_all_layers_of_a_layout(
    tmp_path, monkeypatch, family, overrides, layers_of_a_plan
):
    monkeypatch.setattr(attention, "kernel_path", lambda _: "triton")  # the oracles need no plan
    tiny_checkpoint(tmp_path, family, **overrides)
    with LLM(str(tmp_path), device="cpu", num_kv_blocks=8) as llm:
        reference.calls.clear()
        llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=5, ignore_eos=True))
    attended, planned = (reference.calls[f"{name}_decode_attention"] for name in ("paged", "plan"))
    assert attended == 4 * 2  # the first token comes from the prefill
    assert attended == layers_of_a_plan * planned


def test_a_decode_plan_is_used_for_its_own_batch_only(tmp_path, monkeypatch):
    """Attention of another batch of the same shape runs without the plan."""
    monkeypatch.setattr(attention, "kernel_path", lambda _: "triton")  # the oracles need no plan
    tiny_checkpoint(tmp_path, "qwen3")
    model = load_model(tmp_path, device="cpu", dtype=torch.float32, ops=reference, progress=False)
    driver = PagedDriver(model, block_size=16, num_blocks=4, num_padding_rows=0)
    batches, plans = [], []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda batch, *a: batches.append(batch) or forward(batch, *a)
    )
    for _ in range(2):
        driver.logits([[1]], None)
    backend, caches = model.kernel_backend(), driver.caches
    decode = reference.paged_decode_attention
    monkeypatch.setattr(
        reference,
        "paged_decode_attention",
        lambda *a, plan=None, **k: plans.append(plan) or decode(*a, **k),
    )
    backend.plan(batches[0], caches, None, None)
    for batch in batches:
        forward(batch, caches, backend)
    planned, unplanned = plans[:2], plans[2:]
    assert all(plan is not None for plan in planned)
    assert unplanned == [None, None]


def test_programs_share_tiles_as_the_layer_with_the_fewest_full_heads_needs(monkeypatch):
    """A layer without full heads does not count: no long context is computed there."""
    roles = [HeadRole(), HeadRole(window=20)]
    caches: list[Any] = [
        SimpleNamespace(
            layout=KVLayout.hnd(4, 16, 64, roles=[roles[w] for w in streams]),
            page_format=PageFormat.plain(torch.bfloat16),
        )
        for streams in ([1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1])
    ]
    batch: Any = SimpleNamespace(
        num_decodes=0, query_len=None, num_reqs=1, num_tokens=16, max_query_len=16,
        attn_mask_offsets=None, query_start_loc=torch.tensor([0, 16]), seq_lens=torch.tensor([90]),
    )  # fmt: skip
    chosen = []
    monkeypatch.setattr(
        attention.PrefillSplits, "allocate", lambda **options: chosen.append(options["layout"])
    )
    backend = attention.KernelBackend(
        select_ops("reference"), num_q_heads=8, dtype=torch.bfloat16, softmax_scale=1.0
    )
    backend.plan(batch, caches, None, None)
    assert chosen == [caches[2].layout]


# --- a stand-in ----------------------------------------------------------------------------------


def on_host(tensor: torch.Tensor) -> list[int]:
    """Return the values of a host tensor; FlashInfer would copy a device tensor to the host."""
    assert (tensor.device.type, tensor.dtype) == ("cpu", torch.int32)
    return tensor.tolist()


class Wrapper:
    """The common part of FlashInfer's two paged wrappers; ``calls`` counts plans and runs."""

    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert (workspace.dtype, workspace.dim()) == (torch.uint8, 1)
        assert not workspace[:1024].any()
        assert kv_layout == "HND"

    def _plan(
        self,
        query_starts: list[int],
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        sizes: tuple[int, int, int, int],
        window_left: int,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        starts, last = on_host(indptr), on_host(last_page_len)
        assert indices.dtype == torch.int32
        assert starts[0] == 0
        assert len(indices) == starts[-1]
        assert (indices >= 0).all()
        num_pages = np.diff(starts)
        self.query_starts, self.sizes, self.sm_scale = query_starts, sizes, sm_scale
        self.dtypes, self.window = (q_data_type, kv_data_type), window_left + 1 or -1
        self.seq_lens = (num_pages - 1) * sizes[3] + np.array(last)
        self.table = torch.full((len(last), max(num_pages)), -1, dtype=torch.int32)
        for row, (first, n) in enumerate(zip(starts, num_pages, strict=False)):
            self.table[row, :n] = indices[first : first + n]
        self.calls[f"{type(self).__name__}.plan"] += 1

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]):
        num_q_heads, num_kv_heads, head_dim, page_size = self.sizes
        k, v = paged_kv_cache
        assert q.shape == (self.query_starts[-1], num_q_heads, head_dim)
        assert k.shape[1:] == v.shape[1:] == (num_kv_heads, page_size, head_dim)
        assert k.stride() == v.stride()
        assert k.stride()[2:] == (head_dim, 1)
        assert (q.dtype, k.dtype) == self.dtypes
        k, v = (pages.to(q.dtype).contiguous() for pages in (k, v))
        self.calls[f"{type(self).__name__}.run"] += 1
        return reference.paged_prefill_attention(
            q,
            k,
            v,
            self.table,
            torch.tensor(self.query_starts, dtype=torch.int32),
            torch.tensor(self.seq_lens, dtype=torch.int32),
            KVLayout.hnd(num_kv_heads, page_size, head_dim, window=self.window),
            softmax_scale=self.sm_scale,
            max_query_len=q.shape[0],
        )


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(self, workspace, kv_layout="NHD", *, use_tensor_cores=False) -> None:
        super().__init__(workspace, kv_layout)
        assert use_tensor_cores

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *, window_left=-1, sm_scale=None, q_data_type="float16", kv_data_type=None,
    ) -> None:  # fmt: skip
        self._plan(
            list(range(len(last_page_len) + 1)), indptr, indices, last_page_len,
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            window_left, sm_scale, q_data_type, kv_data_type,
        )  # fmt: skip


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(self, workspace, kv_layout="NHD") -> None:
        super().__init__(workspace, kv_layout)

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
        num_qo_heads, num_kv_heads, head_dim_qk, page_size,
        *, causal=False, window_left=-1, sm_scale=None, q_data_type="float16", kv_data_type=None,
    ) -> None:  # fmt: skip
        assert causal
        self._plan(
            on_host(qo_indptr), paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            window_left, sm_scale, q_data_type, kv_data_type,
        )  # fmt: skip


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Install the stand-in as module ``flashinfer``, on a CPU too; return its call counts."""
    module = ModuleType("flashinfer")
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(module, wrapper.__name__, wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("mrv1.runner.attention_backends.check_flashinfer", lambda *_: None)
    monkeypatch.setattr("mrv1.runner.attention_backends.FLASHINFER_WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(Wrapper, "calls", Counter())
    return Wrapper.calls


def generate(path: Path, backend: str, *, block_size: int, chunk: int) -> list[list[int]]:
    """Return tokens of five prompts around the ends of blocks; in float64 no near-tie flips."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(
        str(path),
        device="cpu",
        dtype="float64",
        attention_backend=backend,
        block_size=block_size,
        max_num_batched_tokens=chunk,
        max_num_seqs=4,
        num_kv_blocks=256 // block_size,
    ) as llm:
        outputs = llm.generate(random_prompts((1, 15, 16, 17, 70)), params)
        assert ("attention by FlashInfer" in llm.describe()) == (backend == "flashinfer")
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("family", "overrides", "block_size", "chunk"),
    # Each family in one schedule by default, in both in the long run.
    [
        pytest.param(
            family,
            overrides,
            *schedule,
            id=f"{seen}-{schedule[1]}",
            marks=[] if index % 2 == at else [pytest.mark.full],
        )
        for index, (seen, family, overrides) in enumerate(
            [
                ("full", "llama", {}),
                ("window", "mistral", SLIDING["mistral"]),
                ("full and window", "qwen3", SLIDING["qwen3"]),
            ]
        )
        for at, schedule in enumerate([(16, 7), (32, 64)])
    ],
)
def test_flashinfers_plans_give_the_tokens_of_the_triton_backend(
    tmp_path, stand_in, family, overrides, block_size, chunk
):
    tiny_checkpoint(tmp_path, family, **overrides)
    expected = generate(tmp_path, "triton", block_size=block_size, chunk=chunk)
    assert not stand_in
    assert generate(tmp_path, "flashinfer", block_size=block_size, chunk=chunk) == expected
    num_windows = 2 if family == "qwen3" else 1
    for kind in ("Decode", "Prefill"):
        name = f"Batch{kind}WithPagedKVCacheWrapper"
        plans, runs = stand_in[f"{name}.plan"], stand_in[f"{name}.run"]
        assert plans > 0
        assert runs == 2 * plans / num_windows  # two runs a step, one per layer; a plan per window


def test_head_runs_are_consecutive_heads_with_the_same_window():
    windows = (20, 20, -1, 20, 9, 9)
    layout = KVLayout.hnd(6, 16, 64, roles=[HeadRole(window=window) for window in windows])
    assert head_runs(layout) == [(20, 0, 2), (-1, 2, 3), (20, 3, 4), (9, 4, 6)]


@pytest.mark.parametrize(
    "options",
    [{"head_policy": MIXED_HEADS}, {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}],
    ids=["windows of heads", "static scales"],
)
def test_flashinfer_computes_the_logits_of_the_triton_backend(tmp_path, stand_in, options):
    """Windows that differ from head to head of a layer; codes with a scale for each head."""
    tiny_checkpoint(tmp_path, "qwen3")
    add_tensors(tmp_path, scale_tensors(0))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    logprobs = []
    for backend in ("triton", "flashinfer"):
        with LLM(
            str(tmp_path), device="cpu", dtype="float32", attention_backend=backend,
            max_num_batched_tokens=32, max_num_seqs=4, num_kv_blocks=16, **options,
        ) as llm:  # fmt: skip
            outputs = llm.generate(random_prompts((1, 15, 16, 17, 70)), params)
        logprobs.append(
            [[list(step.items()) for step in output.outputs[0].logprobs] for output in outputs]
        )
    ours, theirs = (
        [(token, entry.logprob) for steps in each for (token, entry), *_ in steps]
        for each in logprobs
    )
    assert [token for token, _ in theirs] == [token for token, _ in ours]
    assert [value for _, value in theirs] == pytest.approx([value for _, value in ours], abs=1e-4)
    assert stand_in["BatchDecodeWithPagedKVCacheWrapper.run"] > 0


# --- refusals ------------------------------------------------------------------------------------


def some_model(
    device: str = "cuda", dtype: torch.dtype = torch.bfloat16, soft_cap: float | None = None
) -> Any:
    """Return the fields of a model that the check reads; the GPU need not exist."""
    config = SimpleNamespace(attention_soft_cap=soft_cap, has_sinks=False)
    return SimpleNamespace(device=torch.device(device), dtype=dtype, config=config)


def some_cache(head_dim: int = 64, **options: Any) -> tuple[CacheSpec, list[KVLayout]]:
    fields = {"name": "auto", "dtype": torch.bfloat16} | options
    spec = CacheSpec(
        num_layers=2, num_kv_heads=2, block_size=16, head_dim=head_dim,
        page_format=PageFormat(**fields),
    )  # fmt: skip
    policy = HeadPolicy.of_layer_windows([-1, 20], spec.num_kv_heads)
    groups = HeadGroups.shared(policy, block_size=16, max_model_len=64)
    return spec, layer_layouts(spec, groups, [1], torch.device("cpu"))


def test_models_that_flashinfer_supports_pass_the_check():
    check_flashinfer(some_model(), *some_cache())
    check_flashinfer(some_model(dtype=torch.float16), *some_cache(256, dtype=torch.float16))
    check_flashinfer(some_model(), *some_cache(dtype=torch.float8_e4m3fn, granularity="head"))
    layout = KVLayout.hnd(2, 16, 64, roles=[HeadRole(window=20), HeadRole()])
    check_flashinfer(some_model(), some_cache()[0], [layout])


@pytest.mark.parametrize(
    ("model", "cache", "message"),
    [
        (
            some_model(),
            some_cache(name="int4", dtype=torch.uint8, granularity="token"),
            r"expects kv_cache_dtype='auto', or 'fp8_e4m3' with static scales .*, got 'int4' with "
            "kv_scale='token'",
        ),
        (
            some_model(dtype=torch.float32),
            some_cache(dtype=torch.float32),
            r"expects dtype float16 or bfloat16, got torch\.float32",
        ),
        (some_model(), some_cache(32), r"expects head_dim of \(64, 128, 256\), got 32"),
        (
            some_model(soft_cap=50.0),
            some_cache(),
            r"expects scores without a soft cap, got attention_soft_cap=50\.0",
        ),
    ],
)
def test_models_that_flashinfer_does_not_support_are_refused_with_the_reason(
    model, cache, message
):
    with pytest.raises(ConfigError, match=message + "; choose attention_backend='triton'"):
        check_flashinfer(model, *cache)


@pytest.mark.parametrize(
    "roles",
    [
        [HeadRole(), HeadRole(window=20, sink=4)],
        [HeadRole(window=20, sink=4)] * 2,
        [HeadRole(), HeadRole(table_offset=3, group=1)],
        [HeadRole(window=20, ring_blocks=3)] * 2,
    ],
)
def test_head_roles_are_refused_for_flashinfer(roles):
    spec, _ = some_cache()
    layout = KVLayout.head_groups(roles, [0, 0], 16, 64)
    with pytest.raises(ConfigError, match="expects heads of one table, without sinks, got"):
        check_flashinfer(some_model(), spec, [layout])


def test_page_layouts_other_than_hnd_are_refused_for_flashinfer():
    spec, _ = some_cache()
    with pytest.raises(ConfigError, match=r"expects pages \(2, 16, 64\) \(HND\), got"):
        check_flashinfer(some_model(), spec, [KVLayout.nhd(2, 16, 64)])


def test_flashinfer_on_a_cpu_is_refused():
    with pytest.raises(
        UnsupportedDeviceError, match="runs on a GPU, got cpu; choose attention_backend='triton'"
    ):
        LLM("tiny", device="cpu", attention_backend="flashinfer")


def test_a_missing_flashinfer_package_is_named(tmp_path, stand_in, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"expected the package flashinfer-python .*'triton'"):
        LLM(str(tmp_path), device="cpu", attention_backend="flashinfer")
    # the triton backend does not import flashinfer
    with LLM(str(tmp_path), device="cpu", num_kv_blocks=8) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))


# --- the real FlashInfer -------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.gpu_only
@pytest.mark.skipif(find_spec("flashinfer") is None, reason=NOT_INSTALLED)
def test_planning_never_waits_for_the_gpu(device):
    """FlashInfer's host arguments come from the host, not from a copy of device tensors."""
    ops = select_ops(kernel_path(device))
    model = load_model(
        checkpoint_dir("tiny"), device=device, dtype=torch.bfloat16, ops=ops, progress=False
    )
    driver = PagedDriver(model, block_size=16, num_blocks=12, num_padding_rows=0)
    spec = CacheSpec(
        num_layers=4,
        num_kv_heads=4,
        block_size=16,
        head_dim=64,
        page_format=PageFormat.plain(torch.bfloat16),
    )
    layouts = [cache.layout for cache in driver.caches]
    backend = select_backend("flashinfer", model, spec, layouts)
    for lens in ([1, 1], [1, 40]):
        batch = driver.batch([Request([5] * n) for n in lens], lens)
        counts = np.array(lens, dtype=np.int32)
        backend.plan(batch, driver.caches, counts, counts)  # compiles FlashInfer's kernels
        with no_waiting():
            backend.plan(batch, driver.caches, counts, counts)


@pytest.mark.gpu
@pytest.mark.gpu_only
@pytest.mark.skipif(find_spec("flashinfer") is None, reason=NOT_INSTALLED)
@torch.inference_mode()
def test_both_backends_have_errors_of_the_same_size(device):
    """The embedded model in bfloat16: chunks and decodes, against float32 on mrv1's kernels."""
    prompts = [[7 + i % 900 for i in range(0, 11 * n, 11)] for n in (1, 16, 33, 70)]
    ops, logits = select_ops(kernel_path(device)), {}
    for name, dtype in (
        ("exact", torch.float32),
        ("triton", torch.bfloat16),
        ("flashinfer", torch.bfloat16),
    ):
        model = load_model(
            checkpoint_dir("tiny"), device=device, dtype=dtype, ops=ops, progress=False
        )
        driver = PagedDriver(model, block_size=16, num_blocks=12, num_padding_rows=0)
        for cache in driver.caches:  # FlashInfer does not promise to ignore NaN in unused pages
            cache.k.zero_()
            cache.v.zero_()
        spec = CacheSpec(
            num_layers=4, num_kv_heads=4, block_size=16, head_dim=64,
            page_format=PageFormat.plain(dtype),
        )  # fmt: skip
        backend = model.kernel_backend()
        if name == "flashinfer":
            layouts = [cache.layout for cache in driver.caches]
            backend = select_backend("flashinfer", model, spec, layouts)
            assert isinstance(backend, FlashInferBackend)
        requests, rows = [Request(list(prompt)) for prompt in prompts], []
        while pending := [r for r in requests if r.num_computed < len(r.token_ids)]:
            left = [len(r.token_ids) - r.num_computed for r in pending]
            query_lens = [min(n, 30) if n > 3 else 1 for n in left]
            batch = driver.batch(pending, query_lens)
            lens = np.array(query_lens, dtype=np.int32)
            computed = np.array([r.num_computed for r in pending], dtype=np.int32)
            backend.plan(batch, driver.caches, lens, computed + lens)
            rows.append(model.compute_logits(model.forward(batch, driver.caches, backend)))
            for request, query_len in zip(pending, query_lens, strict=True):
                request.num_computed += query_len
        logits[name] = torch.cat(rows)
    error = {name: (x - logits["exact"]).abs().mean().item() for name, x in logits.items()}
    assert error["flashinfer"] <= 1.5 * error["triton"]
    assert error["triton"] <= 1.5 * error["flashinfer"]


@pytest.mark.gpu
@pytest.mark.gpu_only
@pytest.mark.skipif(find_spec("flashinfer") is None, reason=NOT_INSTALLED)
@pytest.mark.parametrize(
    "options",
    [
        {"head_policy": HeadPolicy(((Visible(40), FULL, Visible(20), Visible(20)),) * 4)},
        {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"},
    ],
    ids=["windows of heads", "static scales"],
)
def test_policies_and_static_scales_have_errors_of_the_same_size(tmp_path, device, options):
    """The embedded model in bfloat16 on both backends, against float32 on mrv1's kernels."""
    shutil.copytree(checkpoint_dir("tiny"), tmp_path, dirs_exist_ok=True)
    add_tensors(
        tmp_path,
        {
            f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor([0.05])
            for layer in range(4) for kind in "kv"
        },
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompts, scores = [[7 + i % 900 for i in range(0, 11 * n, 11)] for n in (16, 33, 70)], {}
    for name, dtype in (("exact", "float32"), ("triton", "bfloat16"), ("flashinfer", "bfloat16")):
        with LLM(
            str(tmp_path), device=str(device), dtype=dtype, num_kv_blocks=32,
            attention_backend="flashinfer" if name == "flashinfer" else "triton",
            max_num_batched_tokens=32, **options,
        ) as llm:  # fmt: skip
            entries = [output.prompt_logprobs[1:] for output in llm.generate(prompts, params)]
        scores[name] = np.array(
            [next(iter(step.values())).logprob for steps in entries for step in steps]
        )
    error = {name: np.abs(each - scores["exact"]).mean() for name, each in scores.items()}
    assert error["flashinfer"] <= 1.5 * error["triton"]
    assert error["triton"] <= 1.5 * error["flashinfer"]
