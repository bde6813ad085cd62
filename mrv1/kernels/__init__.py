"""Triton kernels as plain functions on torch tensors; each has an oracle in :mod:`.reference`.

Every op launches on the current stream, waits for nothing and can be captured in a CUDA graph.
Arguments are checked on the host: shape, dtype, device and strides, never values on the device. A
CPU tensor without the interpreter, or a GPU tensor with it, is an UnsupportedDeviceError.

On a machine without a GPU set ``TRITON_INTERPRET=1`` before the process starts, or call
``mrv1.kernels.reference``. The first use of an op imports its module and triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mrv1.kernels import reference as reference
from mrv1.kernels.attention.decode.plan import DecodePlan as DecodePlan
from mrv1.kernels.attention.prefill.choice import PrefillSplits as PrefillSplits
from mrv1.kernels.cache.contracts import QKNorm as QKNorm
from mrv1.kernels.cache.contracts import Rope as Rope
from mrv1.kernels.cache.formats import PageFormat as PageFormat
from mrv1.kernels.cache.kv_layout import HeadRole as HeadRole
from mrv1.kernels.cache.kv_layout import KVLayout as KVLayout
from mrv1.kernels.cache.kv_scales import KVScales as KVScales
from mrv1.kernels.experts.contracts import ClampedSwiGLU as ClampedSwiGLU
from mrv1.kernels.experts.contracts import Routing as Routing
from mrv1.kernels.layers.contracts import AllReduceBuffers as AllReduceBuffers
from mrv1.kernels.layers.contracts import FeatureRows as FeatureRows
from mrv1.kernels.layers.lora import Adapters as Adapters
from mrv1.kernels.layers.lora import LoraMatrices as LoraMatrices
from mrv1.kernels.layers.quantized import QuantizedWeight as QuantizedWeight
from mrv1.kernels.registry import MODULE_OF_OP, launcher
from mrv1.kernels.sampling.contracts import BadWords as BadWords
from mrv1.kernels.sampling.contracts import History as History
from mrv1.kernels.sampling.contracts import LogitEdits as LogitEdits
from mrv1.kernels.sampling.contracts import TopLogprobs as TopLogprobs
from mrv1.kernels.step.contracts import AppendedTokens as AppendedTokens
from mrv1.kernels.step.contracts import GatheredTokens as GatheredTokens
from mrv1.kernels.step.contracts import RequestSlots as RequestSlots
from mrv1.kernels.step.contracts import SlotTables as SlotTables

if TYPE_CHECKING:
    from mrv1.kernels.registry import *  # noqa: F403 - the launchers
else:
    _types = [name for name in globals() if name[0].isupper() and not name.isupper()]
    __all__ = [*_types, "reference", *MODULE_OF_OP]


def __getattr__(name: str) -> object:
    """Import the op ``name``; AttributeError if there is none, ConfigError without triton."""
    if name not in MODULE_OF_OP:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    op = globals()[name] = launcher(name)
    return op


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULE_OF_OP})
