"""The runner's attention backend: mrv1's kernels, or FlashInfer if the configuration names it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

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
    name: AttentionBackendName,
    model: DecoderModel,
    spec: CacheSpec,
    layouts: Sequence[KVLayout],
) -> AttentionBackend:
    """Return the backend ``name``; no other backend ever replaces it.

    Raises:
        ConfigError: FlashInfer does not support the model or the cache, or is not installed.
        UnsupportedDeviceError: FlashInfer was asked for on a CPU.
    """
    if name == "triton":
        return model.kernel_backend()
    check_flashinfer(model, spec, layouts)
    return FlashInferBackend(model, spec, layouts)


def check_flashinfer(model: DecoderModel, spec: CacheSpec, layouts: Sequence[KVLayout]) -> None:
    """Raise unless FlashInfer supports the model and its cache.

    Raises:
        ConfigError: FlashInfer does not support the dtype, the head size or the head roles.
        UnsupportedDeviceError: the model is not on a GPU.
    """
    if model.device.type != "cuda":
        raise UnsupportedDeviceError(
            f"attention_backend: flashinfer runs on a GPU, got {model.device}; {_INSTEAD}"
        )

    def require(fits: bool, expected: str, got: object) -> None:
        if not fits:
            raise ConfigError(
                f"attention_backend: flashinfer expects {expected}, got {got}; {_INSTEAD}"
            )

    require(spec.granularity is None, "kv_cache_dtype='auto', no scales", spec.dtype)
    require(model.dtype in FLASHINFER_DTYPES, "dtype float16 or bfloat16", model.dtype)
    require(
        spec.head_dim in FLASHINFER_HEAD_DIMS, f"head_dim of {FLASHINFER_HEAD_DIMS}", spec.head_dim
    )
    page = (spec.num_kv_heads, spec.block_size, spec.head_dim)
    for layout in layouts:
        # FlashInfer's own plan takes a window, but no sink and no ring.
        role = HeadRole(window=layout.roles[0].window)
        require(
            set(layout.roles) == {role}, "heads with one window, no sink, one table", layout.roles
        )
        require(page in layout.page_shapes, f"pages {page} (HND)", layout.page_shapes)


def import_flashinfer() -> Any:  # noqa: ANN401 - a package without types
    """Return the ``flashinfer`` package.

    Raises:
        ConfigError: the package is not installed or cannot be imported.
    """
    try:
        return import_module("flashinfer")
    except Exception as error:  # a broken installation may raise anything
        raise ConfigError(
            "attention_backend: expected the package flashinfer-python to be installed, "
            f"got {error}; pip install 'mrv1[flashinfer]', or {_INSTEAD}"
        ) from error


class FlashInferBackend:
    """FlashInfer's paged wrappers over HND pages: a decode and a prefill wrapper for each window.

    A step is planned from the lengths that the host knows, so that planning reads nothing back
    from the device; the page ids are gathered on the device. Only one thread may call it.

    Source:
        FlashInfer 0.6: ``BatchDecodeWithPagedKVCacheWrapper``,
        ``BatchPrefillWithPagedKVCacheWrapper``.
    """

    def __init__(self, model: DecoderModel, spec: CacheSpec, layouts: Sequence[KVLayout]) -> None:
        """Import FlashInfer and allocate its workspace.

        Raises:
            ConfigError: FlashInfer is not installed or cannot be imported.
        """
        flashinfer = import_flashinfer()
        workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=model.device)
        windows = {layout.roles[0].window for layout in layouts}
        self._decode: dict[int, Any] = {
            window: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "HND", use_tensor_cores=True
            )
            for window in windows
        }
        self._prefill: dict[int, Any] = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            for window in windows
        }
        self._block_size = spec.block_size
        self._sizes = (
            model.config.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.block_size,
        )  # fmt: skip
        self._options = {
            "sm_scale": model.softmax_scale,
            "q_data_type": model.dtype,
            "kv_data_type": spec.dtype,
        }
        self._planned: torch.cuda.Event | None = None

    def plan(
        self,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
        query_lens: Int32Array | None,
        seq_lens: Int32Array | None,
    ) -> None:
        """Plan every window's wrapper for the step.

        Raises:
            ValueError: ``query_lens`` or ``seq_lens`` is None.
        """
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
        is_decode = _is_decode(batch)
        for window, wrapper in (self._decode if is_decode else self._prefill).items():
            options = {"window_left": max(window - 1, -1), **self._options}
            if is_decode:
                wrapper.plan(*pages, *self._sizes, **options)
            else:
                wrapper.plan(_starts(query_lens), *pages, *self._sizes, causal=True, **options)
        if batch.seq_lens.device.type == "cuda":
            self._planned = torch.cuda.Event()
            self._planned.record()

    def attend(self, q: torch.Tensor, batch: AttentionBatch, cache: LayerCache) -> torch.Tensor:
        """Run the wrapper that was planned for this layer's window."""
        wrappers = self._decode if _is_decode(batch) else self._prefill
        out: torch.Tensor = wrappers[cache.layout.roles[0].window].run(q, (cache.k, cache.v))
        return out

    def _page_ids(self, batch: AttentionBatch, num_pages: int) -> torch.Tensor:
        """Return the ids of all rows' pages, ``[num_pages]`` int32, row by row."""
        counts = (batch.seq_lens + self._block_size - 1) // self._block_size
        rows = torch.repeat_interleave(counts, output_size=num_pages).long()
        firsts = counts.cumsum(0) - counts
        columns = torch.arange(num_pages, device=counts.device) - firsts[rows]
        return batch.block_table[rows, columns]


def _is_decode(batch: AttentionBatch) -> bool:
    """Whether FlashInfer's decode wrapper takes the batch: one query in every row."""
    return batch.query_len == 1


def _starts(lengths: npt.NDArray[np.int32]) -> torch.Tensor:
    """Return the starts of consecutive runs, then the end of the last; int32, on the CPU."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return torch.from_numpy(starts)
