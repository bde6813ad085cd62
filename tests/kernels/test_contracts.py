"""The paged ops refuse wrong arguments before any launch: named, with no cache byte changed.

Every case holds for the launchers and for their oracles. Errors about the other arguments of an op
are tested in the op's own file.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from mrv1 import kernels
from mrv1.kernels import HeadRole, KVLayout, KVScales, reference

HEADS, BLOCK_SIZE, DIM = 2, 16, 32
NUM_BLOCKS, NUM_REQS, MAX_BLOCKS = 5, 3, 4
HND = (NUM_BLOCKS, HEADS, BLOCK_SIZE, DIM)
NHD = (NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM)
PER_HEAD = KVLayout.per_head_ids(HEADS, BLOCK_SIZE, DIM, MAX_BLOCKS)
FAR = KVLayout.build(
    block_size=BLOCK_SIZE,
    head_dim=DIM,
    token_stride=DIM,
    head_base=[0, 5120],  # in a sixth block; a page of 512 elements from here ends at 5632
    block_stride=[1024, 1024],
    roles=[HeadRole(), HeadRole(group=1)],
)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def token_scales(*shape: int, dtype: torch.dtype = torch.float32) -> KVScales:
    return KVScales.per_token(torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype))


def quarter_scales(*shape: int) -> KVScales:
    return KVScales.per_quarter(torch.ones(shape), torch.ones(shape))


def head_scales(*shape: int, dtype: torch.dtype = torch.float32) -> KVScales:
    return KVScales.per_head(torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype))


FITTING = token_scales(NUM_BLOCKS, HEADS, BLOCK_SIZE)


@dataclass
class Call:
    """The common arguments of all ops, all valid until a test changes one."""

    cache_shape: tuple[int, ...] = HND
    v_cache_shape: tuple[int, ...] | None = None
    layout: KVLayout = field(default_factory=lambda: KVLayout.hnd(HEADS, BLOCK_SIZE, DIM))
    slot_mapping: torch.Tensor = field(
        default_factory=lambda: torch.arange(NUM_REQS)[None] * BLOCK_SIZE
    )
    block_table: torch.Tensor = field(default_factory=lambda: ints(NUM_REQS, MAX_BLOCKS))
    scales: Any = None

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of random bytes: NaN and infinities are among them."""
        source = torch.Generator().manual_seed(0)
        size = 1 if self.scales is not None else 2

        def cache(shape: tuple[int, ...]) -> torch.Tensor:
            raw = torch.randint(256, (*shape, size), dtype=torch.uint8, generator=source)
            return raw[..., 0] if size == 1 else raw.view(torch.float16)[..., 0]

        return cache(self.cache_shape), cache(self.v_cache_shape or self.cache_shape)

    def run(self, ops: Any, op: str, k: torch.Tensor, v: torch.Tensor) -> None:
        """Call ``op`` of ``ops`` on the caches ``k`` and ``v``."""
        rows = torch.ones(NUM_REQS, HEADS, DIM, dtype=torch.float16)
        lengths = torch.full((NUM_REQS,), 3, dtype=torch.int32)
        options = {"scales": self.scales, "softmax_scale": 1.0}
        if op == "kv_cache_write":
            ops.kv_cache_write(
                rows, rows, k, v, self.slot_mapping, self.layout, scales=self.scales
            )
        elif op == "qkv_cache_write":
            qkv = torch.ones(NUM_REQS, 3 * HEADS, DIM, dtype=torch.float16)
            ops.qkv_cache_write(
                qkv, k, v, self.slot_mapping, self.layout, num_q_heads=HEADS, scales=self.scales
            )
        elif op == "paged_decode_attention":
            ops.paged_decode_attention(
                rows, k, v, self.block_table, lengths, self.layout, **options
            )
        else:
            starts = torch.arange(NUM_REQS + 1, dtype=torch.int32)
            ops.paged_prefill_attention(
                rows, k, v, self.block_table, starts, lengths, self.layout,
                max_query_len=1, **options,
            )  # fmt: skip


WRITES = ("kv_cache_write", "qkv_cache_write")
READS = ("paged_decode_attention", "paged_prefill_attention")


def refused(ops: Any, op: str, call: Call, error: type[Exception], message: str) -> None:
    """Check the error, and that caches and scales keep their bytes."""
    k, v = call.caches()
    held = [k, v]
    if isinstance(call.scales, KVScales):
        held += [call.scales.k_scale, call.scales.v_scale]
    before = [tensor.clone() for tensor in held]
    with pytest.raises(error, match=message):
        call.run(ops, op, k, v)
    for tensor, old in zip(held, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))


either = pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])
any_op = pytest.mark.parametrize("op", [*WRITES, *READS])
write = pytest.mark.parametrize("op", WRITES)
read = pytest.mark.parametrize("op", READS)


# --- layout --------------------------------------------------------------------------------------


@either
@any_op
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cache_shape": NHD},
            r"k_cache: expected shape \[blocks, 2, 16, 32\] by the layout, got \[5, 16, 2, 32\]",
        ),
        (
            {"layout": KVLayout.nhd(HEADS, BLOCK_SIZE, DIM)},
            r"k_cache: expected shape \[blocks, 16, 2, 32\] by the layout, got \[5, 2, 16, 32\]",
        ),
        (
            {"v_cache_shape": NHD},
            r"v_cache: expected shape \[blocks, 2, 16, 32\] by the layout, got \[5, 16, 2, 32\]",
        ),
        (
            {"cache_shape": (NUM_BLOCKS, HEADS, 2 * BLOCK_SIZE, DIM // 2)},
            r"k_cache: expected shape \[blocks, 2, 16, 32\] by the layout, got \[5, 2, 32, 16\]",
        ),
    ],
)
def test_a_layout_that_contradicts_the_shape_is_refused(ops, op, changes, message):
    refused(ops, op, Call(**changes), ValueError, message)


@either
@any_op
def test_a_layout_that_reaches_past_the_cache_is_refused(ops, op):
    call = Call(layout=FAR, slot_mapping=torch.zeros(2, NUM_REQS, dtype=torch.int64))
    message = "layout: expected pages within the 5120 elements of k_cache, got .* ends at 5632"
    refused(ops, op, call, ValueError, message)


@either
@any_op
def test_a_layout_that_contradicts_the_strides_is_refused(ops, op):
    """A transposed cache has the layout's shape, but not its addresses."""
    call, k = Call(), Call().caches()[0]
    seen = k.view(NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM).transpose(1, 2)
    before = k.clone()
    with pytest.raises(ValueError, match=r"k_cache: expected a contiguous tensor, got strides"):
        call.run(ops, op, seen, seen)
    assert torch.equal(k.view(torch.uint8), before.view(torch.uint8))


def test_a_flat_cache_has_no_shape_to_contradict():
    for layout in (KVLayout.hnd(HEADS, BLOCK_SIZE, DIM), KVLayout.nhd(HEADS, BLOCK_SIZE, DIM)):
        call = Call(cache_shape=(NUM_BLOCKS * HEADS * BLOCK_SIZE * DIM,), layout=layout)
        for op in (*WRITES, *READS):
            call.run(reference, op, *call.caches())


def test_one_head_is_both_hnd_and_nhd():
    layout = KVLayout.hnd(1, BLOCK_SIZE, DIM)
    assert layout.page_shapes == ((1, BLOCK_SIZE, DIM), (BLOCK_SIZE, 1, DIM))
    assert KVLayout.nhd(1, BLOCK_SIZE, DIM).page_shapes == layout.page_shapes
    assert KVLayout.hnd(2, BLOCK_SIZE, DIM).page_shapes == ((2, BLOCK_SIZE, DIM),)
    assert FAR.page_shapes == ()


# --- block table ---------------------------------------------------------------------------------


@either
@read
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"block_table": ints(NUM_REQS, MAX_BLOCKS, dtype=torch.int64)},
            TypeError,
            "block_table: expected dtype torch.int32, got torch.int64",
        ),
        (
            {"block_table": ints(NUM_REQS + 1, MAX_BLOCKS)},
            ValueError,
            r"block_table: expected \[3, row_width\] or contiguous \[6, max_.*, got \[4, 4\]",
        ),
        (
            {"block_table": ints(MAX_BLOCKS)},
            ValueError,
            r"block_table: expected shape \[any, any\], got \[4\]",
        ),
        (
            {"block_table": ints(MAX_BLOCKS, NUM_REQS).T},
            ValueError,
            "block_table: expected unit last stride",
        ),
        (
            {"block_table": ints(NUM_REQS * HEADS, 2 * MAX_BLOCKS)[:, :MAX_BLOCKS]}
            | {"layout": PER_HEAD},
            ValueError,
            r"block_table: expected \[3, row_width\] or contiguous \[6, max_.*, got \[6, 4\]",
        ),
        (
            {"block_table": ints(NUM_REQS * HEADS, MAX_BLOCKS + 1), "layout": PER_HEAD},
            ValueError,
            r"block_table: .* as wide as the layout's table_offset \[0, 4\] needs, got \[6, 5\]",
        ),
        (
            {"block_table": ints(NUM_REQS * HEADS, MAX_BLOCKS)},
            ValueError,
            r"block_table: .* as wide as the layout's table_offset \[0, 0\] needs, got \[6, 4\]",
        ),
        (
            {"block_table": ints(NUM_REQS, MAX_BLOCKS - 1), "layout": PER_HEAD},
            ValueError,
            r"block_table: expected rows of at least 4 columns for .* got \[3, 3\]",
        ),
    ],
)
def test_a_block_table_of_another_form_is_refused(ops, op, changes, error, message):
    refused(ops, op, Call(**changes), error, message)


def test_a_ring_counts_in_the_least_row_width():
    roles = [HeadRole(), HeadRole(window=30, sink=20, ring_blocks=3, table_offset=7, group=1)]
    layout = KVLayout.head_groups(roles, [0, 2560], BLOCK_SIZE, DIM)
    assert layout.least_row_width == 7 + 2 + 3
    with pytest.raises(ValueError, match="expected rows of at least 12 columns"):
        layout.table_rows(ints(NUM_REQS, 11), NUM_REQS)
    assert layout.table_rows(ints(NUM_REQS, 12), NUM_REQS).shape == (NUM_REQS, 12)
    assert layout.table_rows(ints(0, 0), 0).shape == (0, 0)


@read
def test_both_forms_of_a_per_head_table_are_accepted(op):
    table = ints(NUM_REQS * HEADS, MAX_BLOCKS)
    for form in (table, table.view(NUM_REQS, -1)):
        call = Call(layout=PER_HEAD, block_table=form)
        call.run(reference, op, *call.caches())


# --- slot mapping --------------------------------------------------------------------------------


@either
@write
@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        (
            ints(1, NUM_REQS),
            TypeError,
            "slot_mapping: expected dtype torch.int64, got torch.int32",
        ),
        (torch.zeros(1, NUM_REQS), TypeError, "slot_mapping: expected dtype torch.int64, got"),
        (ints(2, NUM_REQS).long(), ValueError, r"slot_mapping: expected shape \[1, 3\], got \[2,"),
        (ints(NUM_REQS).long(), ValueError, r"slot_mapping: expected shape \[1, 3\], got \[3\]"),
    ],
)
def test_a_slot_mapping_of_another_form_is_refused(ops, op, slots, error, message):
    refused(ops, op, Call(slot_mapping=slots), error, message)


# --- scales --------------------------------------------------------------------------------------


@either
@any_op
@pytest.mark.parametrize(
    ("scales", "error", "message"),
    [
        (
            token_scales(NUM_BLOCKS, HEADS, BLOCK_SIZE, dtype=torch.float16),
            TypeError,
            r"scales\.k_scale: expected dtype torch.float32, got torch.float16",
        ),
        (
            token_scales(NUM_BLOCKS - 1, HEADS, BLOCK_SIZE),
            ValueError,
            r"scales\.k_scale: expected shape \[5, 2, 16\], got \[4, 2, 16\]",
        ),
        (
            token_scales(NUM_BLOCKS, BLOCK_SIZE, HEADS * 2),
            ValueError,
            r"scales\.k_scale: expected shape \[5, 2, 16\], got \[5, 16, 4\]",
        ),
        (
            replace(FITTING, v_scale=FITTING.v_scale[:-1]),
            ValueError,
            r"scales\.v_scale: expected shape \[5, 2, 16\], got \[4, 2, 16\]",
        ),
        (
            replace(FITTING, v_scale=FITTING.v_scale.double()),
            TypeError,
            r"scales\.v_scale: expected dtype torch.float32, got torch.float64",
        ),
        (
            replace(FITTING, k_scale=torch.ones(16), v_scale=torch.ones(16)),
            ValueError,
            "scales: expected block 0's scales within the 16 elements of k_scale, got .* at 32",
        ),
        (
            quarter_scales(NUM_BLOCKS - 1, HEADS, 4),
            ValueError,
            r"scales\.k_scale: expected shape \[5, 2, 4\], got \[4, 2, 4\]",
        ),
        (
            replace(FITTING, page_format=FITTING.page_format.per("quarter")),
            ValueError,
            r"scales\.k_scale: expected shape \[5, 2, 4\], got \[5, 2, 16\]",
        ),
        (
            replace(quarter_scales(1, 3, 4), k_scale=torch.ones(8), v_scale=torch.ones(8)),
            ValueError,
            "scales: expected block 0's scales within the 8 elements of k_scale, got .* at 12",
        ),
        (
            head_scales(HEADS + 1),
            ValueError,
            r"scales\.k_scale: expected shape \[2\], got \[3\]",
        ),
        (
            head_scales(HEADS, dtype=torch.bfloat16),
            TypeError,
            r"scales\.k_scale: expected dtype torch.float32, got torch.bfloat16",
        ),
        (torch.ones(HEADS), TypeError, "scales: expected KVScales or None, got Tensor"),
    ],
)
def test_scales_of_another_form_are_refused(ops, op, scales, error, message):
    refused(ops, op, Call(scales=scales), error, message)


@either
@any_op
def test_scales_must_be_given_for_fp8_caches_only(ops, op):
    """e4m3 codes without scales, and scales for a cache of q's dtype."""
    call = Call(scales=FITTING)
    codes, _ = call.caches()
    with pytest.raises(TypeError, match=r"scales: expected KVScales for a torch\.float8_e4m3fn"):
        Call().run(ops, op, codes.view(torch.float8_e4m3fn), codes.view(torch.float8_e4m3fn))
    k, v = Call().caches()
    with pytest.raises(TypeError, match=r"k_cache: expected dtype torch\.float8_e4m3fn or"):
        call.run(ops, op, k, v)


@any_op
def test_an_unchanged_call_is_accepted(op):
    quarters = quarter_scales(NUM_BLOCKS, HEADS, 4)
    for scales in (None, FITTING, quarters, head_scales(HEADS)):
        call = Call(scales=scales)
        call.run(reference, op, *call.caches())
