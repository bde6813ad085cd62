"""Draw one token per row from the softmax of its logits, or take the best one.

    token = argmax_v(logit[v] / temperature + gumbel[v])        ties to the lowest id

with independent standard Gumbel noise is a draw from softmax(logits / temperature). The noise of
token id ``v`` is a pure function of (seed, output position, v), so neither tile sizes, batch
composition nor padding change a draw::

    word   = philox4x32-10(counter = (position, v, 0, 0), key = seed)[0]
    gumbel = -log(-log(1 - w)),  w = (word + 1/2) / 2^32

Counter words 2 and 3 are the purpose (0 = sample) and the child index of parallel sampling.

Two launches: each program reduces a part of the vocabulary of one row, tile by tile, to its best
(score, id); the second reduces a row's parts. A vocabulary of one part needs the first alone.

Source: Maddison et al., "A* Sampling" (2014), for the Gumbel-max draw; Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3" (2011), for philox.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from mrv1.kernels._checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._overlap import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._triton import INTERPRET, tl, triton

MAX_VOCAB_SIZE = 1 << 24
"""Token ids the sampler accepts; keeps every index of a row in 32 bits."""

_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_KEY_STEP_0 = tl.constexpr(0x9E3779B9)
_KEY_STEP_1 = tl.constexpr(0xBB67AE85)

_SERIES_BELOW = tl.constexpr(2.0**-5)  # where five terms leave a relative error of 2^-27


@triton.jit
def _multiply_wide(a, b):
    """Return the (high, low) 32-bit words of the product of two 32-bit words."""
    product = a.to(tl.uint64) * b
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _philox_word(seed, position, token_id):
    """Return word 0 of philox4x32-10; rounds on scalars stay on scalars.

    Args are int64 scalar, int64 scalar and an int32 block; the result is a uint32 block.
    """
    k0, k1 = seed.to(tl.uint32), (seed.to(tl.uint64) >> 32).to(tl.uint32)
    c0, c1 = position.to(tl.uint32), token_id.to(tl.uint32)
    c2 = c0 * 0
    c3 = c2
    for _ in tl.static_range(10):
        high0, low0 = _multiply_wide(c0, _MULTIPLIER_0)
        high1, low1 = _multiply_wide(c2, _MULTIPLIER_1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, _KEY_STEP_0, sanitize_overflow=False)
        k1 = tl.add(k1, _KEY_STEP_1, sanitize_overflow=False)
    return c0


@triton.jit
def _gumbel(word):
    """Return -log(-log(1 - w)) of uint32 words, to float32 precision at both ends.

    The largest variables decide a draw; there w is small and 1 - w would drop its digits, so the
    inner logarithm is its series. At the other end 1 - w comes from the complement of the word.
    """
    w = word.to(tl.float32) * 2.0**-32 + 2.0**-33
    rest = (~word).to(tl.float32) * 2.0**-32 + 2.0**-33
    series = w * (1.0 + w * (1.0 / 2 + w * (1.0 / 3 + w * (1.0 / 4 + w * (1.0 / 5)))))
    return -tl.log(tl.where(w < _SERIES_BELOW, series, -tl.log(rest)))


@triton.jit
def _sample_tiles_kernel(
    best_score_ptr,  # [num_rows, num_parts] float32, unused if FINAL
    best_token_ptr,  # [num_rows, num_parts] int64
    logits_ptr,  # [num_rows, vocab_size], unit last stride
    stride_logits_row,
    idx_mapping_ptr,  # [num_rows] int32, -1 = padding; None: what follows is in row order
    temperature_ptr,  # [num_rows or slots] float32, 0 = greedy
    seed_ptr,  # [num_rows or slots] int64
    position_ptr,  # [num_rows or slots] int64 or int32
    prompt_len_ptr,  # like position_ptr, subtracted from it; or None
    vocab_size,
    num_parts,
    FINAL: tl.constexpr,  # num_parts is 1: the part's best is the row's
    TILE_VOCAB: tl.constexpr,
    PART_TILES: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,  # see _overlap
):
    """Grid (num_rows * num_parts,): one program finds the best token of a part of one row.

    Each lane keeps its own best of the tiles so far.
    """
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    program = tl.program_id(0)
    row = (program // num_parts).to(tl.int64)
    first_token = (program % num_parts) * (PART_TILES * TILE_VOCAB)
    logits_row_ptr = logits_ptr + row * stride_logits_row
    slot = row
    if idx_mapping_ptr is not None:
        slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    is_row = slot >= 0
    temperature = tl.load(temperature_ptr + slot, mask=is_row, other=0.0)
    seed, position = slot, slot  # int64, not used by greedy rows
    if temperature != 0.0:  # uniform over the program: greedy rows cost no noise
        seed, position = tl.load(seed_ptr + slot), tl.load(position_ptr + slot).to(tl.int64)
        if prompt_len_ptr is not None:
            position -= tl.load(prompt_len_ptr + slot)
    best = tl.full([TILE_VOCAB], float("-inf"), tl.float32)
    best_token = tl.zeros([TILE_VOCAB], tl.int32)
    for tile in tl.range(PART_TILES, num_stages=NUM_STAGES):
        token = first_token + tile * TILE_VOCAB + tl.arange(0, TILE_VOCAB)
        in_vocab = token < vocab_size
        score = tl.load(logits_row_ptr + token, mask=in_vocab, other=float("-inf")).to(tl.float32)
        if temperature != 0.0:
            noise = _gumbel(_philox_word(seed, position, token))
            score = score * tl.div_rn(1.0, temperature) + noise
        # NaN never wins, nor does padding, which a negative temperature would turn to +inf
        is_better = in_vocab & is_row & (score > best)
        best = tl.where(is_better, score, best)
        best_token = tl.where(is_better, token, best_token)
    top = tl.max(best, axis=0)
    first = tl.min(tl.where(best == top, best_token, 2**31 - 1), axis=0).to(tl.int64)
    if FINAL:
        tl.store(best_token_ptr + row, tl.where(top == float("-inf"), -1, first))
    else:
        output = program.to(tl.int64)
        tl.store(best_score_ptr + output, top)
        tl.store(best_token_ptr + output, first)


@triton.jit
def _reduce_tiles_kernel(
    out_ptr,  # [num_rows] int64
    best_score_ptr,  # [num_rows, num_parts] float32
    best_token_ptr,  # [num_rows, num_parts] int64
    num_parts,
    TILE_PARTS: tl.constexpr,  # power of two >= num_parts
    OVERLAP: tl.constexpr,  # see _overlap
):
    """Grid (num_rows,): parts ascend in token id, so the leftmost maximum is the lowest id."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, TILE_PARTS)
    score = tl.load(
        best_score_ptr + row * num_parts + part, mask=part < num_parts, other=float("-inf")
    )
    best, index = tl.max(score, axis=0, return_indices=True)
    token = tl.load(best_token_ptr + row * num_parts + index)
    tl.store(out_ptr + row, tl.where(best == float("-inf"), -1, token))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTokensConfig:
    """How a row's vocabulary is cut into programs; never changes a result."""

    tile_vocab: int
    """Token ids that a program looks at together."""
    part_tiles: int = 1
    """Tiles of one program."""
    num_stages: int = 1
    """Tiles that are on their way together, and one."""
    num_warps: int

    @classmethod
    @lru_cache(maxsize=1024)
    def default_for(cls, vocab_size: int, num_rows: int) -> SampleTokensConfig:
        """Return the GPU's choice.

        One tile a program: 4096 ids on 8 warps are 16 elements a thread, whose noise stays in
        registers; a vocabulary of 152k is then 38 programs a row, and one of 4096 needs no second
        launch. Where rows alone fill the GPU, a program goes through several smaller tiles: the
        next ones are on their way while one is looked at.
        """
        part_tiles = 8
        while part_tiles > 1 and num_rows * triton.cdiv(vocab_size, 2048) < part_tiles * 1024:
            part_tiles //= 2
        if part_tiles >= 4 and vocab_size > 2048 * part_tiles:
            return cls(tile_vocab=2048, part_tiles=part_tiles, num_stages=4, num_warps=8)
        tile_vocab = min(triton.next_power_of_2(vocab_size), 4096)
        return cls(tile_vocab=tile_vocab, num_warps=min(max(tile_vocab // 512, 1), 8))

    @classmethod
    def for_interpreter(cls, vocab_size: int) -> SampleTokensConfig:
        """Return a whole row a program, up to 2^16 ids."""
        return cls(tile_vocab=min(triton.next_power_of_2(vocab_size), 2**16), num_warps=1)

    def num_parts(self, vocab_size: int) -> int:
        """Return how many programs a row takes."""
        return -(-vocab_size // (self.tile_vocab * self.part_tiles))


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    idx_mapping: torch.Tensor | None = None,
    prompt_len: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return one token id per row: a draw from softmax(logits / temperature), or the argmax.

    Args:
        logits: [rows, vocab] float32 | float16 | bfloat16, unit last stride. -inf excludes a
            token; so does NaN.
        temperature: [rows] float32 >= 0, contiguous; 0 = greedy, the exact argmax.
        seeds: [rows] int64, contiguous: the request's seed, all 64 bits.
        positions: [rows] int64 or int32, contiguous: the output position, its low 32 bits.
        idx_mapping: [rows] int32, contiguous: temperature, seeds, positions and prompt_len are
            then in slot order, [slots], and this is the slot of each row; -1 = padding row. None =
            they are in row order.
        prompt_len: like ``positions``, which are then tokens known, prompt and output: it is
            subtracted from them. None = 0.
        out: [rows] int64, contiguous, *written*. Allocated if omitted.

    Returns:
        ``out``: ties go to the lowest id; -1 where a row has no token above -inf, and for padding.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedDeviceError: a CPU tensor while not interpreting, or the reverse.

    Numerics: float32. The philox words equal the oracle's; the Gumbel variables agree to a few
        ulp, so a draw may differ from the oracle's only where its two best scores nearly tie.
    Stream: current stream, no synchronisation, CUDA-graph safe. Allocates 12 bytes per row and
        part of the vocabulary when that has more than one.
    """
    num_rows, vocab_size = _check(
        logits, temperature, seeds, positions, idx_mapping, prompt_len, out
    )
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    if INTERPRET:
        config = SampleTokensConfig.for_interpreter(vocab_size)
    else:
        config = SampleTokensConfig.default_for(vocab_size, num_rows)
    num_parts = config.num_parts(vocab_size)
    final = num_parts == 1
    parts = (num_rows, num_parts)
    best_score = None if final else logits.new_empty(parts, dtype=torch.float32)
    best_token = out if final else out.new_empty(parts)
    _sample_tiles_kernel[(num_rows * num_parts,)](
        best_score,
        best_token,
        logits,
        logits.stride(0),
        idx_mapping,
        temperature,
        seeds,
        positions,
        prompt_len,
        vocab_size,
        num_parts,
        FINAL=final,
        TILE_VOCAB=config.tile_vocab,
        PART_TILES=config.part_tiles,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        **overlap_options(logits.device),
    )
    if not final:
        _reduce_tiles_kernel[(num_rows,)](
            out,
            best_score,
            best_token,
            num_parts,
            TILE_PARTS=triton.next_power_of_2(num_parts),
            num_warps=1,
            **overlap_options(logits.device),
        )
    return out


def _check(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
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
