"""Rotary position embedding: inverse frequencies of each scaling type, and the cos/sin table.

A pair of dimensions i of a head rotates by ``position * inv_freq[i]``, with
``inv_freq[i] = theta^(-2i / rotary_dim)`` (RoFormer, arXiv 2104.09864), rescaled for longer
contexts:

==========  ===================================================================================
default     unchanged
linear      ``inv_freq / factor`` (position interpolation, arXiv 2306.15595)
llama3      long wavelengths as linear, short ones unchanged, a linear blend between (Llama 3.1)
yarn        a ramp over dimensions from unchanged to linear, and cos and sin times an attention
            factor (arXiv 2309.00071, sections 3.2 to 3.4)
longrope    each frequency divided by a factor of its own, short or long, and cos and sin times an
            attention factor (LongRoPE, arXiv 2402.13753)
==========  ===================================================================================

longrope's factors follow from the longest context that a model serves: the long ones if it is
longer than the original one. A cache has keys that are turned already, so they cannot change while
a text grows. vLLM chooses alike; transformers follows each text's length, and computes a text's
keys anew where it outgrows the original context.

Everything is float32, and frequencies are computed on the CPU, as checkpoints were trained and
evaluated: at position 100,000 one unit in the last place of a frequency turns the angle by 0.01.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from mrv1.errors import ConfigError
from mrv1.models.files import not_positive

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]
MRopeOrder = Literal["none", "sections", "interleaved", "alternating"]
"""How M-RoPE's axes share the pairs of a head; "none" = a token has one position."""

_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# Optional yarn settings for which a stored 0 means "not set" in published checkpoints.
_ZERO_IS_UNSET = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One model's rotary embedding; fields that its type does not use keep their defaults."""

    rope_type: RopeType = "default"
    """Scaling type."""
    theta: float = 10000.0
    """Base of the frequencies."""
    rotary_dim: int
    """Rotated dimensions of a head, even."""
    factor: float = 1.0
    """linear, llama3, yarn, longrope: how many times longer the context became."""
    original_max_position_embeddings: int = 0
    """llama3, yarn, longrope: context of the pretraining, tokens."""
    short_factors: tuple[float, ...] = ()
    """longrope: what divides each pair's frequency within the original context."""
    long_factors: tuple[float, ...] = ()
    """longrope: the same for longer contexts."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original context / this value are interpolated."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original context / this value are kept."""
    attention_factor: float | None = None
    """yarn, longrope: multiplies cos and sin; None = from ``factor`` and, for yarn, ``mscale``,
    ``mscale_all_dim``."""
    beta_fast: float = 32.0
    """yarn: dimensions with more rotations than this in the original context are kept."""
    beta_slow: float = 1.0
    """yarn: dimensions with fewer rotations than this are interpolated."""
    mscale: float | None = None
    """yarn: numerator of the attention factor (DeepSeek); None = not set."""
    mscale_all_dim: float | None = None
    """yarn: denominator of the attention factor; None = not set."""
    truncate: bool = True
    """yarn: round the ends of the ramp to whole dimensions."""
    mrope_section: tuple[int, int, int] | None = None
    """M-RoPE: pairs that turn by time, height and width; None = a token has one position."""
    mrope_interleaved: bool = False
    """M-RoPE: the axes take the pairs in turn, not in three consecutive sections."""
    mrope_alternating: bool = False
    """M-RoPE: height and width take the first pairs in turn, and time takes the others (ERNIE)."""

    def factors_of(self, max_positions: int) -> tuple[float, ...]:
        """longrope: return what divides the frequencies for a longest context."""
        is_long = max_positions > self.original_max_position_embeddings
        return self.long_factors if is_long else self.short_factors

    @classmethod
    def from_parameters(
        cls,
        parameters: Mapping[str, Any],
        *,
        rotary_dim: int,
        max_position_embeddings: int,
        mrope: MRopeOrder = "none",
        may_be_partial: bool = False,
    ) -> RopeConfig:
        """Return the configuration that transformers' ``config.rope_parameters`` describe.

        ``max_position_embeddings`` is the checkpoint's context: its ratio to the original one is
        yarn's or longrope's ``factor`` if that is not set. ``mrope`` says how M-RoPE's axes share
        the pairs; "none" = a token has one position. ``may_be_partial`` says whether the family
        rotates only a ``partial_rotary_factor`` of ``rotary_dim``, if it is set. One ConfigError
        lists all settings that are missing or not numbers > 0, or names an unsupported type.
        """
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in get_args(RopeType):
            raise ConfigError(
                f"rope_type: expected one of {get_args(RopeType)}, got {rope_type!r}"
            )
        settings: dict[str, Any] = {
            name: parameters.get(name) for name in ("rope_theta", *_REQUIRED[rope_type])
        }
        original = settings.get("original_max_position_embeddings")
        if rope_type in ("yarn", "longrope") and settings["factor"] is None and original:
            settings["factor"] = max_position_embeddings / original
        problems = not_positive(settings, "rope_parameters.")
        if rope_type == "yarn":
            settings |= _yarn_settings(parameters, problems)
        share = parameters.get("partial_rotary_factor")
        if share not in (None, 1, 1.0):
            if may_be_partial and not not_positive({"": share}) and share < 1:
                rotary_dim = int(rotary_dim * share)
            else:
                expected = "a number in (0, 1]" if may_be_partial else "1.0"
                problems.append(
                    f"rope_parameters.partial_rotary_factor: expected {expected}, got {share!r}"
                )
        if rotary_dim % 2 or rotary_dim == 0:
            problems.append(f"rotary_dim: expected an even number, got {rotary_dim}")
        if rope_type == "longrope":
            settings |= _longrope_settings(parameters, rotary_dim // 2, problems)
        if mrope != "none":
            section = _mrope_section(parameters)
            if mrope == "alternating":
                if parameters.get("mrope_section") is None:
                    section = 22, 22, 20  # as transformers
                section = _alternating(section, rope_type, problems)
            settings["mrope_section"] = section
            settings["mrope_interleaved"] = mrope == "interleaved"
            settings["mrope_alternating"] = mrope == "alternating"
            if section is None or min(section) < 0 or sum(section) != rotary_dim // 2:
                problems.append(
                    "rope_parameters.mrope_section: expected three integers >= 0 with sum "
                    f"{rotary_dim // 2}, got {parameters.get('mrope_section')!r}"
                )
        if problems:
            raise ConfigError("; ".join(problems))
        theta = settings.pop("rope_theta")
        if not theta > 1:
            raise ConfigError(f"rope_theta: expected a number > 1, got {theta!r}")
        return cls(rope_type=rope_type, theta=theta, rotary_dim=rotary_dim, **settings)


def _mrope_section(parameters: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return the setting if it is three integers."""
    match parameters.get("mrope_section"):
        case [int(time), int(height), int(width)]:
            return time, height, width
    return None


def _alternating(
    section: tuple[int, int, int] | None, rope_type: str, problems: list[str]
) -> tuple[int, int, int] | None:
    """Return ERNIE's section, which is of height, width and time; add the problems in it."""
    if rope_type != "default":
        problems.append(f"rope_type: expected 'default' with this M-RoPE, got {rope_type!r}")
    if section is None:
        return None
    height, width, time = section
    if height != width:
        problems.append(
            "rope_parameters.mrope_section: expected as many pairs of height as of width, "
            f"got {height} and {width}"
        )
    return time, height, width


def _yarn_settings(parameters: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return yarn's optional settings that are present; add the problems in them."""
    settings: dict[str, Any] = {
        name: value
        for name in _OPTIONAL_YARN
        if (value := parameters.get(name)) is not None
        and (value != 0 or name not in _ZERO_IS_UNSET)
    }
    problems += not_positive(settings, "rope_parameters.")
    truncate = parameters.get("truncate")
    if truncate is not None:
        settings["truncate"] = truncate
        if not isinstance(truncate, bool):
            problems.append(f"rope_parameters.truncate: expected true or false, got {truncate!r}")
    return settings


def _longrope_settings(
    parameters: Mapping[str, Any], num_pairs: int, problems: list[str]
) -> dict[str, Any]:
    """Return longrope's factors of each pair and of cos and sin; add the problems in them."""
    settings: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        given = parameters.get(name)
        if (
            not isinstance(given, list | tuple)
            or len(given) != num_pairs
            or not_positive({str(i): each for i, each in enumerate(given)})
        ):
            problems.append(
                f"rope_parameters.{name}: expected {num_pairs} numbers > 0, got {given!r}"
            )
        else:
            settings[f"{name}s"] = tuple(map(float, given))
    if parameters.get("original_max_position_embeddings") == 1:  # its logarithm divides
        problems.append("rope_parameters.original_max_position_embeddings: expected > 1, got 1")
    if (factor := parameters.get("attention_factor")) is not None:
        settings["attention_factor"] = factor
        problems += not_positive({"attention_factor": factor}, "rope_parameters.")
    return settings


def inverse_frequencies(rope: RopeConfig, max_positions: int = 0) -> torch.Tensor:
    """Return ``[rotary_dim / 2]`` float32 angles per position, on the CPU.

    longrope's follow from the longest context.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    powers: torch.Tensor = rope.theta**exponents
    if rope.rope_type == "linear":
        return 1.0 / powers / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(1.0 / powers, rope)
    if rope.rope_type == "yarn":
        return _yarn(powers, rope)
    if rope.rope_type == "longrope":
        return 1.0 / (torch.tensor(rope.factors_of(max_positions)) * powers)
    return 1.0 / powers


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Blend by wavelength as Meta's code for Llama 3.1: interpolate long ones, keep short ones."""
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / inv_freq
    interpolated = inv_freq / rope.factor
    share = (original / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * inv_freq / rope.factor + share * inv_freq
    blended = torch.where(wavelengths > original / rope.low_freq_factor, interpolated, blended)
    return torch.where(wavelengths < original / rope.high_freq_factor, inv_freq, blended)


def _yarn(powers: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Ramp over dimensions from kept to interpolated ("NTK-by-parts", arXiv 2309.00071, 3.2).

    Dimension pair d turns ``r`` times within the original context L where
    ``d = rotary_dim * ln(L / (2 pi r)) / (2 ln theta)``; the ramp runs from the pair with
    beta_fast turns to the pair with beta_slow turns.
    """

    def dimension(rotations: float) -> float:
        ratio = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # the ramp becomes a step instead of a division by zero
    dims = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    kept = 1 - ((dims - low) / (high - low)).clamp(0, 1)
    return (1 - kept) / (rope.factor * powers) + kept / powers


def attention_factor(rope: RopeConfig) -> float:
    """Return the factor of cos and sin: 1 for every type but yarn and longrope.

    For yarn it is ``rope.attention_factor``, if that is set. Else, if ``mscale`` and
    ``mscale_all_dim`` are both set, it is the ratio of ``0.1 mscale ln(factor) + 1`` to ``0.1
    mscale_all_dim ln(factor) + 1``. Else it is ``0.1 ln(factor) + 1``, ``sqrt(1 / t)`` of arXiv
    2309.00071, 3.4, with the temperature t. A ``factor`` below 1 counts as 1. For longrope it is
    ``rope.attention_factor`` too, or ``sqrt(1 + ln(factor) / ln(original context))``.
    """
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        growth = math.log(max(rope.factor, 1.0))
        return math.sqrt(1 + growth / math.log(rope.original_max_position_embeddings))

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale is not None and rope.mscale_all_dim is not None:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def axes_of_columns(rope: RopeConfig) -> torch.Tensor:
    """Return [rotary_dim] int64: the axis of each column, if height and width alternate.

    0 is time, 1 height, 2 width. Columns are those of ``cos_sin_table``.
    """
    time, height, width = rope.mrope_section or (0, 0, 0)
    return torch.tensor(([1, 2] * height + [0] * time)[: time + height + width] * 2)


def cos_sin_table(
    rope: RopeConfig, max_positions: int, device: torch.device | str
) -> torch.Tensor:
    """``[max_positions, rotary_dim]`` float32: cos, then sin, with the attention factor."""
    inv_freq = inverse_frequencies(rope, max_positions).to(device)
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * inv_freq[None, :]
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return table.mul_(attention_factor(rope))
