"""Draw one token per row from what its filters keep of the softmax of its logits, or the best.

With T the temperature and m a row's largest logit, tokens are drawn group by group: a group is
128 consecutive ids (more beyond 524,288), and with independent standard Gumbel noise ::

    w_g   = sum over kept v of group g of exp((logit[v] - m) / T)
    group = argmax_g(log(w_g) + gumbel(position, g, 1, child))             ties to the lowest
    token = argmax_v((logit[v] - m) / T + gumbel(position, v, 0, child))   over v of that group

is a draw from softmax(logits / T) over what is kept. That needs one noise word a group and one a
token of one group, not one a token, so that reading the logits is all that takes time. The noise
is a pure function of what is named and the seed: neither tiles, batch nor padding change a draw::

    word   = philox4x32-10(counter = (position, g or v, purpose, child), key = seed)[0]
    gumbel = -log(-log(1 - w)),  w = (word + 1/2) / 2^32

What is kept, in this order::

    min_p   probability >= min_p times the largest
    top_k   logit >= the k-th largest: ties with it stay
    top_p   of what those two keep, renormalised: the mass of strictly likelier tokens < top_p

Where top_p is the only filter, nobody has to know what it keeps: a token of all is drawn, and if
strictly likelier ones have too much mass, one of those is, and so on, in round r with the purposes
2 r and 2 r + 1 in place of 0 and 1. What is turned down was not kept, nor was what is left out
with it, so that each kept token is as likely as it should be; and at least ``top_p`` of the rows
end in the first round, with the token that they would draw without a filter.

Two launches. The first reads the logits and leaves each group's maximum and sum; the second, one
program a row, does the rest from these, and reads again only where it has to: the 50 best tokens
are in the 50 groups of the largest maxima. ``search`` says how what is kept is found.

Sources: Maddison et al., "A* Sampling" (2014), for the Gumbel-max draw; FlashInfer (2025) for
top-p by turning down.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import overlap_options
from mrv1.kernels._base.triton import INTERPRET, triton
from mrv1.kernels.sampling.draw import draw_kernel
from mrv1.kernels.sampling.groups import group_size, group_sums_kernel

MAX_VOCAB_SIZE = 1 << 24
"""Token ids the sampler accepts; keeps every index of a row in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTokensConfig:
    """How the two launches cut their work; may change a sum's last bits, so never by the rows."""

    tile_groups: int
    """Groups that a program of the first launch looks at."""
    num_warps: int = 4
    few_groups: int = 64
    """Groups that the second launch holds at once, with their tokens."""
    lanes: int = 1024
    """Tokens of a row that it looks at together in a pass."""
    depth: int = 8
    """Tokens of each lane that it can set aside; ``lanes * depth`` are held at once."""
    pivots: int = 4
    """Values a pass counts for."""
    listed: int = 128
    """Tokens that are compared in pairs; more are searched."""
    draw_stages: int = 4
    draw_warps: int = 8
    draw_registers: int | None = None
    """Most registers a thread of the second launch may take; None = as the compiler finds best."""

    def draw_options(self) -> dict[str, int]:
        """Return what the compiler is told of the second launch beside the constexprs."""
        options = {"num_warps": self.draw_warps}
        if self.draw_registers is None:
            return options
        return options | {"maxnreg": self.draw_registers}

    @classmethod
    @lru_cache(maxsize=64)
    def default_for(cls, vocab_size: int) -> SampleTokensConfig:
        """Return the GPU's choice.

        16 groups on 4 warps are 16 elements a thread, four loads of 16 bytes on their way, and a
        vocabulary of 152k is 75 programs a row. H200, 256 greedy rows, both launches: 44 us; 8
        tiles a program in four stages took as long, twice as large ones in three 45. Two programs
        of the second launch fit a multiprocessor, so that 256 rows run at once.
        """
        size = group_size(vocab_size)
        num_groups = triton.next_power_of_2(triton.cdiv(vocab_size, size))
        return cls(
            tile_groups=min(max(2048 // size, 1), num_groups),
            few_groups=min(max(8192 // size, 1), num_groups),
            draw_registers=None if torch.version.hip else 128,
        )

    @classmethod
    def for_interpreter(cls, vocab_size: int) -> SampleTokensConfig:
        """Return up to 2^16 ids a program and a step."""
        size = group_size(vocab_size)
        num_groups = triton.next_power_of_2(triton.cdiv(vocab_size, size))
        return cls(
            tile_groups=min(num_groups, 2**16 // size),
            few_groups=min(max(8192 // size, 1), num_groups),
            lanes=min(triton.next_power_of_2(vocab_size), 2**14),
        )

    @property
    def scratch_size(self) -> int:
        """Elements of a row's scratch: tokens of all lanes, or listed groups, then tokens.

        There is room for all groups of a row as well, which top-p alone may list.
        """
        return max(self.lanes * self.depth, self.few_groups + 2 * self.listed)


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    child: torch.Tensor | None = None,
    idx_mapping: torch.Tensor | None = None,
    prompt_len: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return one token id per row: a draw from softmax(logits / temperature), or the argmax.

    Args:
        logits: [rows, vocab] float32 | float16 | bfloat16, unit last stride. -inf excludes a
            token.
        temperature: [rows] float32 >= 0, contiguous; 0 = greedy, the exact argmax, whatever the
            filters.
        seeds: [rows] int64, contiguous: the request's seed, all 64 bits.
        positions: [rows] int64 or int32, contiguous: the output position, its low 32 bits.
        top_k: [rows] int32 >= 0, contiguous: tokens to keep, and ties with the last; 0 = all.
        top_p: [rows] float32 in (0, 1], contiguous: mass to keep; 1 = all.
        min_p: [rows] float32 in [0, 1], contiguous: least probability, as a share of the largest;
            0 = any.
        child: [rows] int32, contiguous: index of a parallel sample. None = 0.
        idx_mapping: [rows] int32, contiguous: temperature, seeds, positions, prompt_len, the
            filters and child are then in slot order, [slots], and this is the slot of each row;
            -1 = padding row. None = they are in row order.
        prompt_len: like ``positions``, which are then tokens known, prompt and output: it is
            subtracted from them. None = 0.
        out: [rows] int64, contiguous, *written*. Allocated if omitted.

        A filter that is None is off in all rows.

    Returns:
        ``out``: ties go to the lowest id; -1 where a row has no token above -inf, and for padding;
        -2 where a row has NaN, or is drawn and has +inf.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedDeviceError: a CPU tensor while not interpreting, or the reverse.

    Numerics: float32. The philox words equal the oracle's; the Gumbel variables agree to a few
        ulp and sums to their rounding, so a draw may differ from the oracle's only where two
        scores nearly tie, or where a sum is within rounding of ``top_p``. A row's token depends
        on nothing else, bit for bit: not on the other rows, their number or its place.
    Stream: current stream, no synchronisation, CUDA-graph safe. Allocates per row 8 bytes a group
        and, unless all filters are None, 32 KiB.
    """
    num_rows, vocab_size = _check(
        logits, temperature, seeds, positions, top_k, top_p, min_p, child, idx_mapping, prompt_len,
        out,
    )  # fmt: skip
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    if INTERPRET:
        config = SampleTokensConfig.for_interpreter(vocab_size)
    else:
        config = SampleTokensConfig.default_for(vocab_size)
    size = group_size(vocab_size)
    num_groups = triton.cdiv(vocab_size, size)
    num_parts = triton.cdiv(num_groups, config.tile_groups)
    groups = logits.new_empty((2, num_rows, num_groups), dtype=torch.float32)
    scratch = None
    if not (top_k is None and top_p is None and min_p is None):
        scratch = groups.new_empty(num_rows, config.scratch_size)
    group_sums_kernel[(num_rows * num_parts,)](
        groups[0],
        groups[1],
        logits,
        logits.stride(0),
        idx_mapping,
        temperature,
        vocab_size,
        num_groups,
        num_parts,
        GROUP=size,
        TILE_GROUPS=config.tile_groups,
        num_warps=config.num_warps,
        **overlap_options(logits.device),
    )
    draw_kernel[(num_rows,)](
        out,
        logits,
        logits.stride(0),
        groups[0],
        groups[1],
        scratch,
        config.scratch_size,
        idx_mapping,
        temperature,
        seeds,
        positions,
        prompt_len,
        top_k,
        top_p,
        min_p,
        child,
        vocab_size,
        num_groups,
        GROUP=size,
        TILE_GROUPS=triton.next_power_of_2(num_groups),
        FEW_GROUPS=config.few_groups,
        LANES=config.lanes,
        DEPTH=config.depth,
        PIVOTS=config.pivots,
        LISTED=config.listed,
        NUM_STAGES=config.draw_stages,
        **config.draw_options(),
        **overlap_options(logits.device),
    )
    return out


def _check(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    child: torch.Tensor | None,
    idx_mapping: torch.Tensor | None,
    prompt_len: torch.Tensor | None,
    out: torch.Tensor | None,
) -> tuple[int, int]:
    check_tensor("logits", logits, shape=(None, None), dtype=FLOAT_DTYPES, unit_last_stride=True)
    check_launchable("logits", logits)
    num_rows, vocab_size = logits.shape
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(
            f"logits: expected a vocabulary of 1 to {MAX_VOCAB_SIZE} tokens, got {vocab_size}"
        )
    size = num_rows if idx_mapping is None else temperature.shape[0] if temperature.dim() else 0
    counts = (torch.int64, torch.int32)
    for name, tensor, length, dtype in (
        ("idx_mapping", idx_mapping, num_rows, torch.int32),
        ("temperature", temperature, size, torch.float32),
        ("seeds", seeds, size, torch.int64),
        ("positions", positions, size, counts),
        ("top_k", top_k, size, torch.int32),
        ("top_p", top_p, size, torch.float32),
        ("min_p", min_p, size, torch.float32),
        ("child", child, size, torch.int32),
        ("prompt_len", prompt_len, size, positions.dtype),
        ("out", out, num_rows, torch.int64),
    ):
        if tensor is not None:
            check_tensor(
                name,
                tensor,
                shape=(length,),
                dtype=dtype,
                device=logits.device,
                contiguous=True,
            )
    return num_rows, vocab_size
