"""What a page of the KV cache stores: values as they are, or codes and their scales.

The value of an fp8 code is ``code * scale``, of a 4-bit code ``(code - zero) * scale``. Scales
are float32, in side tensors (``kv_scales``); a 4-bit vector's zero is in the low bits of its
scale. The device functions that encode and decode are in ``codes``.

Source: OCP 8-bit Floating Point Specification, revision 1.0 (E4M3); the shape of ``quarter``
scales, ``[blocks, kv_heads, 4]``, is FastDeploy's (PR 7949), their meaning is ours. 4-bit codes
with a scale and a zero per token and head: Liu et al., "KIVI" (arXiv:2402.02750), for values; keys
mixed by a Hadamard matrix before: Ashkboos et al., "QuaRot" (arXiv:2404.00456).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Self, get_args

import torch

from mrv1.device import Conversion, ConversionPath, fp8_path, nibble_path
from mrv1.kernels._base.oracle import wide

ScaleGranularity = Literal["token", "quarter", "head"]
"""The part of a cache that shares one scale: a token's vector in one head, written with the token;
a quarter of a block in one head, whose scale grows with the largest value in it; a head, whose
scale is static and given by the caller."""

QUARTERS = 4  # scales per block and head with granularity ``quarter``
SMALLEST_SCALE = 1e-12
"""Lower bound of a computed scale, so that a vector of zeros is not divided by zero."""
ZERO_BITS = 8
"""Low bits of a 4-bit vector's scale that hold its zero, in steps of 1 / ZERO_STEPS."""
ZERO_STEPS = 16
LARGEST_NIBBLE = 15
NAN_SCALE = 0x7FC00000
"""Bits of the scale of a 4-bit vector with an element that is not finite: it reads as NaN."""


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
    codes_per_element: int = 1
    """Neighbouring codes of a vector in one element of a page, the first in the lowest bits."""
    granularities: tuple[ScaleGranularity, ...] = get_args(ScaleGranularity)
    """The parts of a cache that may share a scale."""
    mixes_keys: bool = False
    """Whether models multiply queries and keys by a Hadamard matrix before keys become codes."""

    @classmethod
    def plain(cls, dtype: torch.dtype) -> PageFormat:
        """Return the format of values as they are."""
        return cls(name=str(dtype).removeprefix("torch."), dtype=dtype)

    @classmethod
    def named(
        cls, name: str, granularity: ScaleGranularity, model_dtype: torch.dtype
    ) -> PageFormat:
        """Return the format of a ``kv_cache_dtype``; ``auto`` = the model's values as they are.

        Raises:
            ValueError: an unknown name, or codes without such scales.
        """
        if name == "auto":
            return cls.plain(model_dtype)
        if name not in FORMATS:
            raise ValueError(f"name: expected 'auto' or one of {tuple(FORMATS)}, got {name!r}")
        return FORMATS[name].per(granularity)

    def per(self, granularity: ScaleGranularity) -> Self:
        """Return the format with the same codes and one scale per ``granularity``.

        Raises:
            ValueError: these codes have no such scales.
        """
        if granularity not in self.granularities:
            raise ValueError(
                f"granularity: expected one of {self.granularities} for {self.name}, "
                f"got {granularity!r}"
            )
        return replace(self, granularity=granularity)

    @property
    def element(self) -> str:
        """The name of what a vector's elements are stored as."""
        packed = self.codes_per_element > 1
        return self.name if packed else str(self.dtype).removeprefix("torch.")

    @property
    def has_scales(self) -> bool:
        """Whether pages hold codes, each with a scale."""
        return self.granularity is not None

    def scales_per_block(self, block_size: int) -> int:
        """Return how many scales a block has per head; 0 = blocks have no scales of their own."""
        return {"token": block_size, "quarter": QUARTERS}.get(self.granularity or "", 0)

    def vector_bytes(self, head_dim: int) -> int:
        """Return the bytes of one token's vector in a page, without scales."""
        return self.stored_dim(head_dim) * self.dtype.itemsize

    def stored_dim(self, head_dim: int) -> int:
        """Return the elements of one token's vector in a page."""
        return head_dim // self.codes_per_element

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NibbleFormat(PageFormat):
    """Two codes of 4 bits in a byte, for values between a vector's least and largest element.

    A vector with an element that is not finite is NaN as a whole.
    """

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scale of each vector, with its zero in the low bits.

        ``(highest - lowest) / 15`` with ``lowest <= 0 <= highest``, and ``-lowest / scale``.
        """
        x = wide(x)
        lowest, highest = x.amin(-1).clamp_max(0.0), x.amax(-1).clamp_min(0.0)
        codes = torch.full_like(lowest, LARGEST_NIBBLE)  # exact division, see PageFormat.scale
        scale = (highest / codes).float() - (lowest / codes).float()
        scale = scale.clamp_min(SMALLEST_SCALE)
        steps = (-lowest.float() / scale * ZERO_STEPS).round()
        is_finite = (x * 0.0).sum(-1) == 0.0
        bits = scale.view(torch.int32) & -(1 << ZERO_BITS) | steps.nan_to_num(0.0).int()
        return bits.where(is_finite, NAN_SCALE).view(torch.float32)

    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the codes of ``x / scale + zero``, two in a byte, saturated at 0 and 15."""
        scaled = (wide(x).float() / scale[..., None]) + self.zero(scale)[..., None]
        codes = scaled.round().clamp(0.0, LARGEST_NIBBLE).nan_to_num(0.0).to(torch.uint8)
        return codes[..., ::2] | codes[..., 1::2] << 4

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of vectors of codes, ``(code - zero) * scale``."""
        codes = codes.view(torch.uint8)
        pairs = torch.stack([codes & LARGEST_NIBBLE, codes >> 4], dim=-1).flatten(-2)
        return (pairs.to(dtype) - self.zero(scale).to(dtype)[..., None]) * scale[..., None]

    @staticmethod
    def zero(scale: torch.Tensor) -> torch.Tensor:
        """Return the code of each vector that stands for 0, 0 to 15.9375, float32."""
        steps = scale.view(torch.int32) & ((1 << ZERO_BITS) - 1)
        return steps.float() / ZERO_STEPS


FP8 = PageFormat(
    name="fp8_e4m3", dtype=torch.float8_e4m3fn, granularity="token", largest=448.0,
    to_codes=_to_e4m3, to_values=_from_e4m3, choose_path=fp8_path,
)  # fmt: skip

INT4 = NibbleFormat(
    name="int4", dtype=torch.uint8, granularity="token", largest=float(LARGEST_NIBBLE),
    choose_path=nibble_path, codes_per_element=2, granularities=("token",), mixes_keys=True,
)  # fmt: skip

FORMATS = {each.name: each for each in (FP8, INT4)}
"""The formats with codes, by the ``kv_cache_dtype`` that chooses them."""
