"""The runner's attention backend: mrv1's kernels, or FlashInfer if the configuration names it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mrv1.config import AttentionBackendName
from mrv1.errors import ConfigError, UnsupportedDeviceError
from mrv1.kernels.cache.kv_layout import HeadRole, KVLayout
from mrv1.models import DecoderModel
from mrv1.models.attention import AttentionBackend
from mrv1.models.batch import AttentionBatch, LayerCache
from mrv1.runner.kv_cache import CacheSpec
from mrv1.runner.step import Int32Array

FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASHINFER_DTYPES = (torch.float16, torch.bfloat16)
FLASHINFER_WORKSPACE_BYTES = 394 << 20
"""Room for the partial results of split rows; vLLM gives FlashInfer the same size."""

_INSTEAD = "choose attention_backend='triton'"


def select_backend(
    name: AttentionBackendName, model: DecoderModel, spec: CacheSpec, layouts: Sequence[KVLayout]
) -> AttentionBackend:
    """Return the backend ``name``; no other backend ever replaces it.

    ConfigError: FlashInfer does not support the model or the cache, or is not installed.
    UnsupportedDeviceError: FlashInfer was asked for on a CPU.
    """
    if name == "triton":
        return model.kernel_backend()
    check_flashinfer(model, spec, layouts)
    return FlashInferBackend(model, spec, layouts)


def check_flashinfer(model: DecoderModel, spec: CacheSpec, layouts: Sequence[KVLayout]) -> None:
    """Raise ConfigError, or on a CPU UnsupportedDeviceError, unless FlashInfer fits the model."""
    if model.device.type != "cuda":
        raise UnsupportedDeviceError(
            f"attention_backend: flashinfer runs on a GPU, got {model.device}; {_INSTEAD}"
        )

    def require(fits: bool, expected: str, got: object) -> None:
        if not fits:
            raise ConfigError(
                f"attention_backend: flashinfer expects {expected}, got {got}; {_INSTEAD}"
            )

    require(
        spec.page_format.granularity in (None, "head"),
        "kv_cache_dtype='auto', or 'fp8_e4m3' with static scales (kv_scale='head')",
        f"{spec.page_format.name!r} with kv_scale={spec.page_format.granularity!r}",
    )
    require(model.dtype in FLASHINFER_DTYPES, "dtype float16 or bfloat16", model.dtype)
    require(
        spec.head_dim in FLASHINFER_HEAD_DIMS, f"head_dim of {FLASHINFER_HEAD_DIMS}", spec.head_dim
    )
    cap = model.config.attention_soft_cap
    require(cap is None, "scores without a soft cap", f"attention_soft_cap={cap}")
    require(not model.config.has_sinks, "attention without logit sinks", "a model with them")
    page = (spec.num_kv_heads, spec.block_size, spec.head_dim)
    for layout in layouts:
        # FlashInfer's own plan takes a window, but no sink and no ring.
        plain = tuple(HeadRole(window=role.window) for role in layout.roles)
        require(layout.roles == plain, "heads of one table, without sinks", layout.roles)
        require(page in layout.page_shapes, f"pages {page} (HND)", layout.page_shapes)


def import_flashinfer() -> Any:  # noqa: ANN401 - a package without types
    """Return the ``flashinfer`` package; ConfigError if it cannot be imported."""
    try:
        return import_module("flashinfer")
    except Exception as error:  # a broken installation may raise anything
        raise ConfigError(
            "attention_backend: expected the package flashinfer-python to be installed, "
            f"got {error}; pip install -e '.[flashinfer]', or {_INSTEAD}"
        ) from error


class HeadRun(NamedTuple):
    """Consecutive KV heads of a layer that have the same window: one launch of FlashInfer."""

    window: int
    first: int
    end: int


def head_runs(layout: KVLayout) -> list[HeadRun]:
    """Return the runs of heads with the same window, in the order of the heads."""
    runs = []
    for window, heads in groupby(range(layout.num_kv_heads), lambda h: layout.roles[h].window):
        first, *others = heads
        runs.append(HeadRun(window, first, first + 1 + len(others)))
    return runs


class FlashInferBackend:
    """FlashInfer's paged wrappers (FlashInfer 0.6) over HND pages, used by one thread only.

    Each window and number of heads in a run that has it has a decode and a prefill wrapper. Static
    scales of an fp8 cache multiply queries and output: FlashInfer reads bare codes. Steps are
    planned from lengths on the host, so that nothing is read back.

    Source:
        ``BatchDecodeWithPagedKVCacheWrapper``, ``BatchPrefillWithPagedKVCacheWrapper``.
    """

    def __init__(self, model: DecoderModel, spec: CacheSpec, layouts: Sequence[KVLayout]) -> None:
        """Import FlashInfer, or raise ConfigError, and allocate its workspace."""
        flashinfer = import_flashinfer()
        workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=model.device)
        self._runs: dict[int, list[HeadRun]] = {}
        """Of the planned step, by the ``id`` of a layout."""
        kinds = {
            (run.window, run.end - run.first) for layout in layouts for run in head_runs(layout)
        }
        self._decode: dict[tuple[int, int], Any] = {
            kind: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "HND", use_tensor_cores=True
            )
            for kind in kinds
        }
        self._prefill: dict[tuple[int, int], Any] = {
            kind: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            for kind in kinds
        }
        self._block_size = spec.block_size
        self._head_dim = spec.head_dim
        self._group = model.config.num_q_heads // spec.num_kv_heads
        self._options = {
            "sm_scale": model.softmax_scale,
            "q_data_type": model.dtype,
            "kv_data_type": spec.page_format.dtype,
        }
        self._planned: torch.cuda.Event | None = None

    def plan(
        self,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
        query_lens: Int32Array | None,
        seq_lens: Int32Array | None,
    ) -> None:
        """Plan every wrapper for the step; ValueError without ``query_lens`` and ``seq_lens``."""
        if query_lens is None or seq_lens is None:
            raise ValueError("query_lens, seq_lens: expected arrays for FlashInfer, got None")
        if self._planned is not None:
            self._planned.synchronize()  # wait until the last plan's pinned buffers are copied
        num_pages = -(-seq_lens // self._block_size)
        pages = (
            _starts(num_pages),
            self._page_ids(batch, int(num_pages.sum())),
            torch.from_numpy((seq_lens - 1) % self._block_size + 1),
        )
        layouts = {id(cache.layout): cache.layout for cache in caches}
        self._runs = {key: head_runs(layout) for key, layout in layouts.items()}
        is_decode = _is_decode(batch)
        for (window, num_heads), wrapper in (self._decode if is_decode else self._prefill).items():
            sizes = (self._group * num_heads, num_heads, self._head_dim, self._block_size)
            options = {"window_left": max(window - 1, -1), **self._options}
            if is_decode:
                wrapper.plan(*pages, *sizes, **options)
            else:
                wrapper.plan(_starts(query_lens), *pages, *sizes, causal=True, **options)
        if batch.seq_lens.device.type == "cuda":
            self._planned = torch.cuda.Event()
            self._planned.record()

    def attend(
        self,
        q: torch.Tensor,
        batch: AttentionBatch,
        cache: LayerCache,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the wrapper that was planned for each run of this layer's heads."""
        wrappers = self._decode if _is_decode(batch) else self._prefill
        if cache.scales is not None:
            q = _scaled(q, cache.scales.k_scale)
        parts = [
            wrappers[window, end - first].run(
                q[:, self._group * first : self._group * end],
                (cache.k[:, first:end], cache.v[:, first:end]),
            )
            for window, first, end in self._runs[id(cache.layout)]
        ]
        out: torch.Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out if cache.scales is None else _scaled(out, cache.scales.v_scale)

    def _page_ids(self, batch: AttentionBatch, num_pages: int) -> torch.Tensor:
        """Return the ids of all rows' pages, ``[num_pages]`` int32, row by row."""
        counts = (batch.seq_lens + self._block_size - 1) // self._block_size
        rows = torch.repeat_interleave(counts, output_size=num_pages).long()
        firsts = counts.cumsum(0) - counts
        columns = torch.arange(num_pages, device=counts.device) - firsts[rows]
        return batch.block_table[rows, columns]


def _scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``x``, [num_tokens, q_heads, head_dim], times a float32 scale for each KV head."""
    by_kv_head: torch.Tensor = x.unflatten(1, (scale.numel(), -1)) * scale.view(-1, 1, 1)
    return by_kv_head.flatten(1, 2).to(x.dtype)


def _is_decode(batch: AttentionBatch) -> bool:
    """Whether FlashInfer's decode wrapper takes the batch: one query in every row."""
    return batch.query_len == 1


def _starts(lengths: npt.NDArray[np.int32]) -> torch.Tensor:
    """Return the starts of consecutive runs, then the end of the last; int32, on the CPU."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return torch.from_numpy(starts)
