"""What a page of the KV cache stores: values as they are, or codes and their scales.

The value of a code is ``code * scale``. Scales are float32, in side tensors (``kv_scales``); the
device functions that encode and decode are in ``codes``.

Source: OCP 8-bit Floating Point Specification, revision 1.0 (E4M3); the shape of ``quarter``
scales, ``[blocks, kv_heads, 4]``, is FastDeploy's (PR 7949), their meaning is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from mrv1.device import Conversion, ConversionPath, fp8_path
from mrv1.kernels._base.oracle import wide

ScaleGranularity = Literal["token", "quarter", "head"]
"""The part of a cache that shares one scale: a token's vector in one head, written with the token;
a quarter of a block in one head, whose scale grows with the largest value in it; a head, whose
scale is static and given by the caller."""

QUARTERS = 4  # scales per block and head with granularity ``quarter``
SMALLEST_SCALE = 1e-12
"""Lower bound of a computed scale, so that a vector of zeros is not divided by zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFormat:
    """How pages store the vectors of tokens; without ``granularity``, as they are."""

    name: str
    """The configuration's ``kv_cache_dtype``; for values as they are, the name of their dtype."""
    dtype: torch.dtype
    """Dtype of a page's elements. Kernels take codes as bytes: no GPU lacks their type."""
    granularity: ScaleGranularity | None = None
    """The part of the cache that shares one scale; None = a cache without scales."""
    largest: float = math.inf
    """The largest code: a vector's largest element is stored as this value, others saturate."""
    to_codes: Callable[[torch.Tensor], torch.Tensor] = field(default=torch.clone, repr=False)
    """float32 of at most ``largest``, or NaN -> the bytes (uint8) of the nearest codes."""
    to_values: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = field(
        default=torch.Tensor.to, repr=False
    )
    """Codes or their bytes -> their values in a dtype that represents them exactly."""
    choose_path: Callable[[torch.device], Conversion] | None = field(default=None, repr=False)
    """How a device converts codes; raises ``UnsupportedDeviceError`` if it cannot."""

    @classmethod
    def plain(cls, dtype: torch.dtype) -> PageFormat:
        """Return the format of values as they are."""
        return cls(name=str(dtype).removeprefix("torch."), dtype=dtype)

    @classmethod
    def named(
        cls, name: str, granularity: ScaleGranularity, model_dtype: torch.dtype
    ) -> PageFormat:
        """Return the format of a ``kv_cache_dtype``; ``auto`` = the model's values as they are."""
        if name == "auto":
            return cls.plain(model_dtype)
        return FORMATS[name].per(granularity)

    def per(self, granularity: ScaleGranularity) -> PageFormat:
        """Return the format with the same codes and one scale per ``granularity``."""
        return replace(self, granularity=granularity)

    @property
    def has_scales(self) -> bool:
        """Whether pages hold codes, each with a scale."""
        return self.granularity is not None

    def scales_per_block(self, block_size: int) -> int:
        """Return how many scales a block has per head; 0 = blocks have no scales of their own."""
        return {"token": block_size, "quarter": QUARTERS}.get(self.granularity or "", 0)

    def vector_bytes(self, head_dim: int) -> int:
        """Return the bytes of one token's vector in a page, without scales."""
        return head_dim * self.dtype.itemsize

    def product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype for launch choices: the pages', unless queries are float32."""
        return dtype if dtype == torch.float32 else self.dtype

    def conversion(self, device: torch.device) -> Conversion | None:
        """Return how ``device`` converts codes, and why; None = there are none.

        Raises:
            UnsupportedDeviceError: the device has no way to convert them.
        """
        return None if self.choose_path is None else self.choose_path(device)

    def codec(self, device: torch.device) -> str | None:
        """Return the tag by which device functions convert codes; see ``conversion``."""
        chosen = self.conversion(device)
        return None if chosen is None else self.tag(chosen.path)

    def tag(self, path: ConversionPath) -> str:
        """Return the tag of a way to convert codes."""
        return f"{self.name} {path}"

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """Return max(absmax / largest, 1e-12) of each vector's finite elements, float32."""
        absmax = wide(x).abs().nan_to_num(0.0, posinf=0.0).amax(-1)
        # Division by a tensor is exact; for a Python number torch on a GPU multiplies by 1 / it.
        scale = absmax / torch.full_like(absmax, self.largest)
        return scale.float().clamp_min(SMALLEST_SCALE)

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the codes (uint8) of ``x / scale``, saturated at +-largest."""
        scaled = (wide(x) / scale[..., None]).clamp(-self.largest, self.largest)
        return self.to_codes(scaled.float())

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of vectors of codes (or of their bytes), ``code * scale``."""
        return self.to_values(codes, dtype) * scale[..., None]


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return e4m3 codes; every NaN is 0x7F."""
    return x.to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(x.isnan(), 0x7F)


def _from_e4m3(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).to(dtype)


FP8 = PageFormat(
    name="fp8_e4m3", dtype=torch.float8_e4m3fn, granularity="token", largest=448.0,
    to_codes=_to_e4m3, to_values=_from_e4m3, choose_path=fp8_path,
)  # fmt: skip

FORMATS = {each.name: each for each in (FP8,)}
"""The formats with codes, by the ``kv_cache_dtype`` that chooses them."""
