"""Draw one token per row from the filtered softmax of its logits, or take the best token.

A draw picks a group of 128 consecutive ids (more if the vocabulary is beyond 524,288), then a
token of the group, with temperature T, the row's largest logit m and independent standard Gumbel
noise::

    w_g   = sum over kept v of group g of exp((logit[v] - m) / T)
    group = argmax_g(log(w_g) + gumbel(position, g, 1, child))             ties to the lowest
    token = argmax_v((logit[v] - m) / T + gumbel(position, v, 0, child))   over v of that group

The token is a draw from softmax(logits / T) over the kept tokens, with one noise word per group
and one per token of one group, so only reading the logits takes time. The noise is a pure function
of its arguments and the seed, so that tiles, batch and padding change no draw::

    word   = philox4x32-10(counter = (position, g or v, purpose, child), key = seed)[0]
    gumbel = -log(-log(1 - w)),  w = (word + 1/2) / 2^32

``filters`` says which tokens are kept. Where top_p is the only filter, they are not computed. The
first round draws from all tokens. If the strictly likelier tokens have a mass of ``top_p`` or
more, the drawn token is rejected, and the next round draws from the strictly likelier tokens only;
round r has the purposes 2 r and 2 r + 1. A rejected token, and every token left out with it, is
not kept, so each kept token has its right probability. On average at least ``top_p`` of the rows
end in the first round, with the token of a draw without a filter.

The first launch reads the logits and writes each group's maximum and sum. The second, one program
per row, works from these, and reads again only where it must: the 50 best tokens are in the 50
groups with the largest maxima. ``search`` finds the kept tokens. Where top-k keeps many tokens,
one more read writes the tokens that may be kept to a scratch of some kilobytes, and the search
reads only those.

Sources: Maddison et al., "A* Sampling" (2014), for the Gumbel-max draw; FlashInfer (2025) for
top-p by rejection.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Unpack

import torch

from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import overlap_options
from mrv1.kernels._base.triton import INTERPRET, triton
from mrv1.kernels.sampling.contracts import group_size
from mrv1.kernels.sampling.draw import draw_kernel
from mrv1.kernels.sampling.filters import FILTERS, Filters
from mrv1.kernels.sampling.groups import padded_groups, second_launch, sum_groups
from mrv1.kernels.sampling.shards import VocabShards, check_shards

MAX_VOCAB_SIZE = 1 << 24
"""Largest vocabulary; every index within a row fits 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTokensConfig:
    """How both launches divide a row, the same in all batches: it may change a sum's last bits."""

    all_groups: int  # groups of a row, rounded up to a power of two
    tile_groups: int  # groups of one program of the first launch
    num_warps: int = 4
    few_groups: int = 64  # groups whose tokens a program of the second launch holds at once
    lanes: int = 1024  # tokens that a pass of the second launch over a row reads together
    columns: int = 256  # columns of the scratch for tokens: one per thread of the second launch
    depth: int = 64  # tokens that fit a column
    pivots: int = 4  # values for which a pass counts the tokens above
    listed: int = 128  # most tokens that are compared in pairs; a longer list is searched
    draw_stages: int = 4
    draw_warps: int = 8
    draw_registers: int | None = None
    """Most registers a thread of the second launch may take; None = the compiler decides."""

    def draw_options(self) -> dict[str, int]:
        """Return the compiler's options for the second launch, without the constexprs."""
        options = {"num_warps": self.draw_warps}
        if self.draw_registers is None:
            return options
        return options | {"maxnreg": self.draw_registers}

    @classmethod
    @lru_cache(maxsize=64)
    def default_for(cls, vocab_size: int) -> SampleTokensConfig:
        """Return the configuration for a GPU.

        16 groups on 4 warps are 16 elements per thread, four loads of 16 bytes in flight, and 75
        programs per row of 152k. H200, 256 greedy rows, both launches: 44 us; 8 tiles per program
        in four stages the same, tiles twice as large in three stages 45 us. Two programs of the
        second launch fit a multiprocessor, so that 256 rows run at once. Beyond 2^20 ids, where
        128 registers would spill on some GPUs, the compiler decides.
        """
        size, num_groups = group_size(vocab_size), padded_groups(vocab_size)
        return cls(
            all_groups=num_groups,
            tile_groups=min(max(2048 // size, 1), num_groups),
            few_groups=min(max(8192 // size, 1), num_groups),
            draw_registers=None if torch.version.hip or size > 256 else 128,
        )

    @classmethod
    def for_interpreter(cls, vocab_size: int) -> SampleTokensConfig:
        """Return the configuration for the interpreter: up to 2^16 ids per program."""
        size, num_groups = group_size(vocab_size), padded_groups(vocab_size)
        return cls(
            all_groups=num_groups,
            tile_groups=min(num_groups, 2**16 // size),
            few_groups=min(max(8192 // size, 1), num_groups),
            lanes=min(triton.next_power_of_2(vocab_size), 2**14),
        )

    @property
    def scratch_size(self) -> int:
        """Elements of a row's scratch: a list of groups, then tokens in columns or in a list."""
        return self.all_groups + max(self.columns * self.depth, 2 * self.listed)


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    child: torch.Tensor | None = None,
    idx_mapping: torch.Tensor | None = None,
    prompt_len: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    shards: VocabShards | None = None,
    **filters: Unpack[Filters],
) -> torch.Tensor:
    """Return one token id per row: a draw from softmax(logits / temperature), or the argmax.

    Args:
        logits: [rows, vocab] float32 | float16 | bfloat16, unit last stride; -inf = excluded.
        temperature: [rows] float32 >= 0, contiguous; 0 = greedy: the argmax, whatever the filters.
        seeds: [rows] int64, contiguous: the request's seed, all 64 bits.
        positions: [rows] int64 or int32, contiguous: the output position; the low 32 bits count.
        child: [rows] int32, contiguous: index of the output of a request with n > 1. None = 0.
        idx_mapping: [rows] int32, contiguous: the slot of each row; -1 = padding row. Temperature,
            seeds, positions, prompt_len, the filters and child are then in slot order, [slots].
            None = these tensors are in row order.
        prompt_len: like ``positions``, from which it is subtracted: ``positions`` are then the
            numbers of known tokens, prompt and output. None = 0.
        out: [rows] int64, contiguous, *written* and returned. Allocated if omitted.
        shards: the logits are ``shards.own(rows)``, float32: this rank's, as each rank calls this
            with its own. Every rank draws the same tokens, those of one rank with all logits; a
            call of a rank waits for the others'. None = the logits are of the whole vocabulary.
        **filters: top_k, top_p, min_p, as ``mrv1.kernels.sampling.filters.Filters`` describes
            them; a filter that is None or left out is off in all rows.

    Returns:
        ``out``: ties go to the lowest id; -1 where a row has no token above -inf, and for padding;
        -2 where a row has NaN, or has +inf and is not greedy, and in all rows of shards if another
        rank has failed.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: float32. The philox words equal the oracle's; the Gumbel variables agree to a few ulp
        and sums to their rounding, so a draw may differ from the oracle's only where two scores
        nearly tie, or where a sum is within rounding of ``top_p``. A row's token is the same, bit
        for bit, whatever the other rows, their number and the row's place.
    Stream: two launches on the current stream, no synchronisation, CUDA-graph safe. Allocates per
        row 8 bytes per group and, unless all filters are None, 64 KiB and up to 8 bytes per group.
    """
    num_rows, vocab_size = _check(
        logits, shards, idx_mapping, temperature, out,
        seeds=seeds, positions=positions, child=child, prompt_len=prompt_len, **filters,
    )  # fmt: skip
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    if INTERPRET:
        config = SampleTokensConfig.for_interpreter(vocab_size)
    else:
        config = SampleTokensConfig.default_for(vocab_size)
    groups = sum_groups(
        logits, idx_mapping, temperature, config.tile_groups, config.num_warps, shards
    )
    scratch = None
    if any(value is not None for value in filters.values()):
        scratch = groups.sums.new_empty(num_rows, config.scratch_size)
    draw_kernel[(num_rows,)](
        out, logits if shards is None else shards.logits.parts, logits.stride(0),
        groups.maxima, groups.sums, scratch, config.scratch_size,
        idx_mapping, temperature, seeds, positions, prompt_len, child,
        vocab_size, groups.num_groups,
        **{f"{name}_ptr": filters.get(name) for name in FILTERS}, GROUP=groups.size,
        TILE_GROUPS=config.all_groups, FEW_GROUPS=config.few_groups, LANES=config.lanes,
        COLUMNS=config.columns, DEPTH=config.depth, PIVOTS=config.pivots, LISTED=config.listed,
        NUM_STAGES=config.draw_stages, **config.draw_options(),
        **{} if shards is None else second_launch(shards), **overlap_options(logits.device),
    )  # fmt: skip
    return out


def _check(
    logits: torch.Tensor,
    shards: VocabShards | None,
    idx_mapping: torch.Tensor | None,
    temperature: torch.Tensor,
    out: torch.Tensor | None,
    **vectors: torch.Tensor | None,
) -> tuple[int, int]:
    """Return the rows and the vocabulary; ``vectors`` are in the order of ``temperature``."""
    check_tensor("logits", logits, shape=(None, None), dtype=FLOAT_DTYPES, unit_last_stride=True)
    check_launchable("logits", logits)
    num_rows, vocab_size = len(logits), check_shards(logits, shards)
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(
            f"logits: expected a vocabulary of 1 to {MAX_VOCAB_SIZE} tokens, got {vocab_size}"
        )
    check = partial(check_tensor, device=logits.device, contiguous=True)
    for name, tensor, dtype in (
        ("idx_mapping", idx_mapping, torch.int32),
        ("out", out, torch.int64),
    ):
        if tensor is not None:
            check(name, tensor, shape=(num_rows,), dtype=dtype)
    size = num_rows if idx_mapping is None else temperature.shape[0] if temperature.dim() else 0
    positions = vectors["positions"]
    dtypes = {
        "temperature": torch.float32,
        "seeds": torch.int64,
        "positions": (torch.int64, torch.int32),
        "child": torch.int32,
        "prompt_len": None if positions is None else positions.dtype,
        **{name: each.dtype for name, each in FILTERS.items()},
    }
    for name, tensor in {"temperature": temperature, **vectors}.items():
        if name not in dtypes:
            raise TypeError(f"filters: expected some of {', '.join(FILTERS)}, got {name}")
        if tensor is not None:
            check(name, tensor, shape=(size,), dtype=dtypes[name])
    return num_rows, vocab_size
