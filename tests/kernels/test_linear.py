"""The linear layer, with a norm before it and activation, residual and norm after it."""

from __future__ import annotations

import importlib
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.layers.linear_registers import RegisterConfig
from mrv1.kernels.layers.linear_tiles import TileConfig
from mrv1.kernels.layers.linear_vector import VectorConfig
from mrv1.kernels.layers.sum_order import (
    CHAIN_IN,
    MOST_LEAVES,
    NUM_PROGRAMS,
    SPLIT_ROWS,
    SumOrder,
    tree_sum,
    undivided_leaves,
)
from tests.kernels.elementwise import (
    DTYPES,
    SENTINEL,
    assert_gaps_untouched,
    in_a_wider_row,
    normal,
    seeds,
    tiles,
)
from tests.kernels.linear_layers import (
    EPS,
    FEATURES,
    assert_linear_in_budget,
    library_calls,
    linear_arguments,
    of_rank,
    of_rows,
    sum_of_ranks,
)

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

module = importlib.import_module("mrv1.kernels.layers.linear")

TOKENS = (1, 2, 15, 16, 17, 33, 65)
SIZES = ((16, 1), (64, 48), (100, 70), (300, 8), (1024, 66), (1100, 20))  # inputs, outputs


@contextmanager
def _as_on(gpu: str | None):
    """Choose configurations as the interpreter does (None), or as the named GPU does."""
    with tiles("linear", as_on_gpu=gpu is not None), pytest.MonkeyPatch.context() as patch:
        if gpu == "sm_90":  # on a CPU, whose compute capability is None
            also = (*module.PRODUCTS_FROM_SHARED_MEMORY, None)
            patch.setattr(module, "PRODUCTS_FROM_SHARED_MEMORY", also)
            patch.setattr(module, "ONE_ROUNDING", (*module.ONE_ROUNDING, None))
        yield


gpus = st.sampled_from([None, "sm_80", "sm_90"])


# --- oracle ------------------------------------------------------------------------------------


def test_the_oracle_equals_the_formula():
    arguments = linear_arguments(2, 3, 2, torch.float64, "cpu", ("bias", "gated", "residual"))
    x, weight, bias = (arguments[name].tolist() for name in ("x", "weight", "bias"))
    want = arguments["residual"].clone()
    for token in range(2):
        y = [sum(a * b for a, b in zip(x[token], row, strict=True)) for row in weight]
        y = torch.tensor([a + b for a, b in zip(y, bias, strict=True)], dtype=torch.float64)
        want[token] += y[:2] * torch.sigmoid(y[:2]) * y[2:]
    torch.testing.assert_close(reference.linear(**arguments), want)


def test_the_oracle_norms_its_result():
    arguments = linear_arguments(3, 16, 6, torch.float16, "cpu", ("residual", "normed"))
    got = reference.linear(**arguments)
    want = reference.rms_norm(got, arguments["out_norm_weight"], EPS)
    assert torch.equal(arguments["normed_out"], want)


def test_the_oracle_norms_first_and_rounds_once():
    arguments = linear_arguments(4, 96, 8, torch.bfloat16, "cpu", ("norm",))
    x, weight, norm_weight = (arguments[name] for name in ("x", "weight", "norm_weight"))
    normed = reference.rms_norm(x, norm_weight, EPS)
    want = torch.nn.functional.linear(normed.float(), weight.float())
    assert torch.equal(reference.linear(**arguments), want.bfloat16())
    assert torch.equal(reference.linear(**arguments, out=torch.empty_like(want)), want)


# --- properties --------------------------------------------------------------------------------


@given(
    num_tokens=st.sampled_from(TOKENS),
    size=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    features=st.sampled_from(FEATURES),
    deterministic=st.booleans(),
    wide=st.booleans(),
    gpu=gpus,
    seed=seeds,
)
def test_linear_is_within_its_error_budget(
    device, num_tokens, size, dtype, features, deterministic, wide, gpu, seed
):
    arguments = linear_arguments(num_tokens, *size, dtype, device, features, seed)
    out_dtype = torch.float32 if wide and "normed" not in features else dtype
    out = in_a_wider_row(torch.zeros(num_tokens, size[1], dtype=out_dtype, device=device), 4, 12)
    with _as_on(gpu), library_calls() as calls:
        got = kernels.linear(**arguments, out=out, deterministic=deterministic)
    assert got is out
    assert_linear_in_budget(got, **arguments, by_library=bool(calls))
    for view in (out, *(arguments.get(name, out) for name in ("x", "residual", "normed_out"))):
        assert_gaps_untouched(view)


@given(
    num_tokens=st.sampled_from([2, 17, 64, 65, 256]),
    size=st.sampled_from([(64, 48), (100, 70), (800, 66), (1024, 64)]),
    dtype=st.sampled_from(DTYPES),
    features=st.sampled_from(FEATURES),
    seed=seeds,
)
def test_deterministic_bits_do_not_depend_on_the_other_tokens(
    device, num_tokens, size, dtype, features, seed
):
    """Uses a GPU's tiles on a GPU only; in the interpreter they take their time."""
    arguments = linear_arguments(num_tokens, *size, dtype, device, features, seed)
    many = kernels.linear(**arguments, deterministic=True)
    for row in {0, num_tokens // 2, num_tokens - 1}:
        rows = slice(row, row + 1)
        alone = of_rows(arguments, rows)
        assert torch.equal(kernels.linear(**alone, deterministic=True), many[rows])
        if "normed" in features:
            assert torch.equal(alone["normed_out"], arguments["normed_out"][rows])


@pytest.mark.parametrize("gpu", [None, "sm_80", "sm_90"])
@pytest.mark.parametrize("num_in", [1536, 1600, 3072])
def test_leaves_of_chains_do_not_depend_on_the_other_tokens(device, num_in, gpu):
    """Few rows of long inputs: in registers, and in tiles with all leaves or one."""
    features = ("bias", "residual", "normed")
    arguments = linear_arguments(129, num_in, 24, torch.bfloat16, device, features)
    with _as_on(gpu):
        many = kernels.linear(**arguments, deterministic=True)
        assert_linear_in_budget(many, **arguments)
        for num_tokens in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128):
            few = of_rows(arguments, slice(num_tokens))
            got = kernels.linear(**few, deterministic=True)
            assert torch.equal(got, many[:num_tokens])
            assert torch.equal(few["normed_out"], arguments["normed_out"][:num_tokens])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_in", "leaves"),
    [(1000, None), (1088, None), (1536, None), (3072, None), (1088, 4), (1088, MOST_LEAVES)],
)
def test_registers_and_tiles_have_the_same_bits(device, dtype, num_in, leaves):
    """In float32 too: 65 tokens are in tiles, fewer 16-bit ones in registers if they hold them."""
    arguments = linear_arguments(65, num_in, 20, dtype, device)
    options = {"deterministic": True, "leaves": leaves}
    with _as_on("sm_90"):
        many = kernels.linear(**arguments, out=torch.empty(65, 20, device=device), **options)
        for num_tokens in (1, 17):
            few = of_rows(arguments, slice(num_tokens))
            out = torch.empty(num_tokens, 20, device=device)
            assert torch.equal(kernels.linear(**few, out=out, **options), many[:num_tokens])


@given(
    num_tokens=st.sampled_from(TOKENS),
    size=st.sampled_from([(8, 3), (64, 48), (576, 20), (2048, 66), (1088, 17)]),
    num_ranks=st.sampled_from([2, 4, 8]),
    dtype=st.sampled_from(DTYPES),
    features=st.sampled_from([f for f in FEATURES if not {"gated", "norm"} & {*f}]),
    gpu=gpus,
    oracle=st.booleans(),
    seed=seeds,
)
@example(  # one rank's leaves are in registers, in steps of 32 inputs, those of four in tiles
    num_tokens=2,
    size=(1088, 17),
    num_ranks=4,
    dtype=torch.float16,
    features=("bias", "residual", "normed"),
    gpu="sm_90",
    oracle=False,
    seed=14287,
)
def test_the_leaves_of_ranks_add_up_to_the_bits_of_one(
    device, num_tokens, size, num_ranks, dtype, features, gpu, oracle, seed
):
    """A rank's float32 part is a subtree; bias, residual, rounding and norm follow the sum."""
    ops = reference if oracle else kernels
    device = torch.device("cpu") if oracle else device  # GPUs' libraries have other promises
    arguments = linear_arguments(num_tokens, *size, dtype, device, features, seed)
    with _as_on(gpu):
        want = ops.linear(**arguments, deterministic=True, leaves=MOST_LEAVES)
        parts = [
            ops.linear(
                **of_rank(arguments, rank, num_ranks),
                out=torch.full((num_tokens, size[1]), torch.nan, device=device),
                deterministic=True,
                leaves=MOST_LEAVES // num_ranks,
            )
            for rank in range(num_ranks)
        ]
        got = sum_of_ranks(parts)
        of_one = of_rank(arguments, 0, 1) | {"out": torch.empty_like(got)}
        assert torch.equal(got, ops.linear(**of_one, deterministic=True, leaves=MOST_LEAVES))
        for name in ("bias", "residual"):
            if name in arguments:
                got = got + arguments[name].float()
        got = got.to(dtype)
        assert torch.equal(got, want)
        if "normed" in features:
            normed = ops.rms_norm(got, arguments["out_norm_weight"], EPS)
            assert torch.equal(normed, arguments["normed_out"])


@given(
    num_tokens=st.sampled_from(TOKENS),
    size=st.sampled_from([(64, 48), (100, 72), (576, 24), (1024, 64), (2048, 64)]),
    num_ranks=st.sampled_from([2, 4, 8]),
    dtype=st.sampled_from(DTYPES),
    gated=st.booleans(),
    oracle=st.booleans(),
    seed=seeds,
)
def test_the_rows_of_ranks_have_the_bits_of_one(
    device, num_tokens, size, num_ranks, dtype, gated, oracle, seed
):
    """However many rows a rank has, with leaves. Uses a GPU's tiles on a GPU only."""
    ops = reference if oracle else kernels
    device = torch.device("cpu") if oracle else device  # GPUs' libraries have other promises
    features = ("bias", "gated") if gated else ("bias",)
    arguments = linear_arguments(num_tokens, *size, dtype, device, features, seed)
    options = {"deterministic": True, "leaves": undivided_leaves(size[0])}
    want = ops.linear(**arguments, **options)
    parts = []
    for rank in range(num_ranks):
        own = slice(rank * size[1] // num_ranks, (rank + 1) * size[1] // num_ranks)
        rows = {
            name: torch.cat([half[own] for half in arguments[name].chunk(1 + gated)])
            for name in ("weight", "bias")
        }
        parts.append(ops.linear(**(arguments | rows), **options))
    assert torch.equal(torch.cat(parts, dim=1), want)


@given(
    num_tokens=st.sampled_from([1, 3, 40]),
    size=st.sampled_from([(64, 5), (576, 20), (1088, 17)]),
    leaves=st.sampled_from([1, 2, 4, 8]),
    gpu=gpus,
    seed=seeds,
)
def test_leaves_are_a_tree_of_sums(device, num_tokens, size, leaves, gpu, seed):
    """Whole numbers make each leaf exact; their scales make the order of the leaves visible."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (
        torch.randint(-8, 9, (rows, size[0]), generator=generator).float()
        for rows in (num_tokens, size[1])
    )
    leaf_in = size[0] // leaves
    x *= 2.0 ** torch.randint(0, 24, (leaves,), generator=generator).repeat_interleave(leaf_in)
    sums = [
        (a.double() @ b.double().T).float()
        for a, b in zip(x.split(leaf_in, 1), weight.split(leaf_in, 1), strict=True)
    ]
    x, weight = x.to(device), weight.to(device)
    for ops in (kernels, reference):
        with _as_on(gpu):
            got = ops.linear(x, weight, deterministic=True, leaves=leaves)
        assert torch.equal(got.cpu(), sum_of_ranks(sums))


@given(
    num_tokens=st.sampled_from(TOKENS),
    features=st.sampled_from([f for f in FEATURES if "residual" in f]),
    dtype=st.sampled_from(DTYPES),
    deterministic=st.booleans(),
    gpu=gpus,
)
def test_the_residual_may_be_the_output(device, num_tokens, features, dtype, deterministic, gpu):
    arguments = linear_arguments(num_tokens, 1024, 72, dtype, device, features)
    with _as_on(gpu):
        want = kernels.linear(**arguments, deterministic=deterministic)
        residual = arguments["residual"]
        assert kernels.linear(**arguments, out=residual, deterministic=deterministic) is residual
    assert torch.equal(residual, want)
    assert_gaps_untouched(residual)


@given(num_tokens=st.sampled_from(TOKENS), features=st.sampled_from(FEATURES), gpu=gpus)
def test_nan_stays_in_its_row(device, num_tokens, features, gpu):
    arguments = linear_arguments(num_tokens, 100, 24, torch.float16, device, features)
    with _as_on(gpu):
        want = kernels.linear(**arguments)
        arguments["x"][num_tokens // 2, 7] = torch.nan
        got = kernels.linear(**arguments)
    others = [row for row in range(num_tokens) if row != num_tokens // 2]
    assert got[num_tokens // 2].isnan().all()
    assert torch.equal(got[others], want[others])
    if "normed" in features:
        assert arguments["normed_out"][num_tokens // 2].isnan().all()
        assert arguments["normed_out"][others].isfinite().all()


# --- edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("features", FEATURES)
def test_no_tokens(device, features, deterministic):
    arguments = linear_arguments(0, 16, 6, torch.float32, device, features)
    assert kernels.linear(**arguments, deterministic=deterministic).shape == (0, 6)
    assert reference.linear(**arguments, deterministic=deterministic).shape == (0, 6)


@given(
    num_tokens=st.sampled_from(TOKENS),
    dtype=st.sampled_from(DTYPES),
    has_residual=st.booleans(),
    deterministic=st.booleans(),
    gpu=gpus,
)
def test_a_gate_of_minus_infinity_gives_zero(
    device, num_tokens, dtype, has_residual, deterministic, gpu
):
    """Zero is the limit of silu, also for very negative gates; torch gives NaN at -inf."""
    features = ("gated", "residual") if has_residual else ("gated",)
    arguments = linear_arguments(num_tokens, 32, 24, dtype, device, features)
    arguments["x"][:, 0] = 1.0
    arguments["weight"][:3, 0] = torch.tensor([-torch.inf, torch.finfo(dtype).min, -1000.0])
    with _as_on(gpu):
        got = kernels.linear(**arguments, deterministic=deterministic)
    want = reference.linear(**arguments)
    least = arguments["residual"][:, :3] if has_residual else torch.zeros_like(got[:, :3])
    assert torch.equal(want[:, :3], least)
    assert torch.equal(got[:, :3], least)
    assert got.isfinite().all()


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_every_result_is_written(device, num_tokens):
    x, weight = torch.ones(num_tokens, 32, device=device), torch.ones(130, 32, device=device)
    out = torch.full((num_tokens, 130), SENTINEL, device=device)
    assert (kernels.linear(x, weight, out=out) == 32).all()


@pytest.mark.parametrize("num_tokens", [2, 17])
@pytest.mark.parametrize("deterministic", [False, True])
def test_small_terms_after_a_large_term_count(device, num_tokens, deterministic):
    """A float32 sum that is rounded after every step of inputs would lose them, one by one."""
    x, weight = torch.ones(num_tokens, 8192, device=device), torch.zeros(16, 8192, device=device)
    weight[:, 0] = 1
    weight[:, 32::32] = 2.0**-25
    with _as_on("sm_90"):
        got = kernels.linear(x, weight, deterministic=deterministic)
    error = got.double() - (1 + 255 * 2.0**-25)
    assert error.abs().max() < 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("leaves", [None, 1, 2, 4, MOST_LEAVES])
@pytest.mark.parametrize("num_in", [16, 1000, 1024, 4096, 14336])
@pytest.mark.parametrize("num_rows", [1, 1024, 6144, 151_936])
def test_configurations(num_in, num_rows, leaves):
    order = SumOrder.of(num_in, num_rows, leaves)
    for num_tokens in (2, 16, 17, 64, 65, 1000):
        for dtype in (torch.float32, torch.bfloat16):
            config = TileConfig.in_order_for(
                num_tokens, num_rows, order, dtype, is_gated=False, from_shared_memory=True
            )
            assert config.splits in order.splits
            if order.is_chained and dtype != torch.float32:
                assert config.tile_in == CHAIN_IN
    vector = VectorConfig.default_for(num_in, torch.bfloat16, norm_dtype=None)
    assert vector.tile_rows == vector.num_warps


@pytest.mark.parametrize(
    ("num_in", "num_rows"), [(2048, 4096), (4096, 3072), (7168, 4096), (8192, 5120), (14336, 8192)]
)
def test_large_weights_are_cut_into_a_program_for_each_multiprocessor(num_in, num_rows):
    splits = set()
    for num_tokens in (2, 17, 33):
        config = TileConfig.default_for(
            num_tokens, num_in, num_rows, torch.bfloat16,
            is_gated=False, is_normed=False, from_shared_memory=True,
        )  # fmt: skip
        assert 132 <= num_rows // config.tile_rows * config.splits <= 256
        splits.add(config.splits)
    assert len(splits) == 1


@pytest.mark.parametrize("num_in", [1, 16, 100, 1000, 1024, 1025, 4096, 14336])
def test_an_order_covers_all_inputs(num_in):
    for leaves in (None, 1, 2, 4, MOST_LEAVES):
        for num_rows in (1, 1024, 4096):
            order = SumOrder.of(num_in, num_rows, leaves)
            assert order.leaves * order.leaf_in >= num_in
            assert order.is_chained or order.chain_in == max(order.leaf_in, order.chain_in)
            if leaves is not None:
                assert (order.leaves, order.chains) == (leaves, 1)
            elif order.is_chained and order.leaves > 1:
                assert order.leaves * -(-num_rows // SPLIT_ROWS) <= NUM_PROGRAMS
                assert (order.leaves - 1) * order.leaf_in < num_in
            else:
                assert order.leaves in (1, 4)
                assert SumOrder.of(num_in, num_rows, undivided_leaves(num_in)) == order


@pytest.mark.parametrize("leaves", range(1, 9))
def test_the_splits_of_leaves_are_subtrees(leaves):
    """A split's program adds its leaves as a tree, and then a tree adds the splits."""
    terms = [torch.tensor(2.0) ** (3 * index % 25) + 1 / 3 for index in range(leaves)]
    order = SumOrder.of(leaves * 512, 32, None)
    splits = order.splits if leaves > 2 else range(1, leaves + 1)
    assert {1, leaves} <= {*splits}
    for count in splits:
        each = leaves // count
        parts = [tree_sum(terms[first : first + each]) for first in range(0, leaves, each)]
        assert torch.equal(tree_sum(parts), tree_sum(terms))


LAYERS = {"qkv": (1024, 4096), "o": (2048, 1024), "gate_up": (1024, 6144), "down": (3072, 1024)}


def _register_config(num_tokens, num_in, num_rows, name):
    return RegisterConfig.default_for(
        num_tokens, num_in, num_rows, is_gated=name == "gate_up", is_normed=name in ("o", "down")
    )


@pytest.mark.parametrize("num_tokens", [2, 16, 17, 32, 33, 64, 65])
@pytest.mark.parametrize("name", LAYERS)
def test_registers_hold_all_weights_of_a_small_model(name, num_tokens):
    """Qwen3-0.6B's weights fit 128 programs, one per multiprocessor; Llama-3-8B's do not fit."""
    num_in, num_rows = LAYERS[name]
    assert _register_config(num_tokens, 4 * num_in, 4 * num_rows, name) is None
    config = _register_config(num_tokens, num_in, num_rows, name)
    if config is None:
        assert num_tokens == 65 or (num_tokens > 32 and name == "qkv")
        return
    num_programs = num_rows // (config.tile_rows * config.row_tiles) * config.splits
    assert num_programs == 128
    assert config.token_tiles * config.tile_tokens >= num_tokens
    assert config.splits == 1 or name in ("o", "down")


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_deterministic_products_of_a_small_model_stay_in_registers(num_ranks):
    """But for the longest with leaves of ranks: a warp has one of at most 256 inputs."""
    for name, (num_in, num_rows) in LAYERS.items():
        divided = name in ("o", "down")
        shape = (num_in // num_ranks, num_rows) if divided else (num_in, num_rows // num_ranks)
        order = SumOrder.of(*shape, None, is_gated=name == "gate_up")
        config = RegisterConfig.in_order_for(16, *shape, order, is_gated=name == "gate_up")
        assert config.chain_in == CHAIN_IN
        assert not config.in_tree
        assert config.splits == order.leaves
        order = SumOrder.of(*shape, MOST_LEAVES // num_ranks if divided else None)
        config = RegisterConfig.in_order_for(16, *shape, order, is_gated=name == "gate_up")
        if name == "down" or (divided and num_ranks > 2):
            assert config is None
            continue
        assert config.chain_in == (256 if divided else CHAIN_IN)
        assert config.splits == (2 if divided and num_ranks == 1 else 1)
        large = (4 * shape[0], 4 * shape[1])
        order = SumOrder.of(*large, order.leaves if divided else None)
        assert RegisterConfig.in_order_for(16, *large, order, is_gated=False) is None


@pytest.mark.parametrize("num_in", [1, 100, 1000, 14336])
@pytest.mark.parametrize("num_rows", [2, 66, 1026, 6000, 151_936])
@pytest.mark.parametrize("name", LAYERS)
def test_odd_sizes_fit_the_registers_of_their_programs(name, num_in, num_rows):
    config = _register_config(2, num_in, num_rows, name)
    if config is not None:
        rows = config.tile_rows * config.row_tiles
        assert rows * -(-num_in // config.splits) <= 48 * 1024
        assert -(-num_rows // rows) * config.splits <= 132
        assert config.splits == 1 or name != "gate_up"
    is_gated = name == "gate_up"
    for leaves in (MOST_LEAVES if name in ("o", "down") else None, None):
        order = SumOrder.of(num_in, num_rows, leaves, is_gated=is_gated)
        config = RegisterConfig.in_order_for(2, num_in, num_rows, order, is_gated=is_gated)
        if config is not None:
            rows = config.tile_rows * config.row_tiles
            assert rows * config.num_warps * config.chain_in <= 48 * 1024
            assert num_in <= config.splits * config.num_warps * config.chain_in
            assert -(-num_rows // rows) <= 128


@pytest.mark.parametrize("num_tokens", [1, 5, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leaves", [None, 4, 8])
def test_kept_splits_add_up_to_the_product(device, num_tokens, dtype, leaves):
    """In float32, as a tree; the product is the one whose norm follows, which has the splits."""
    x, weight = (normal((size, 512), dtype, device, size) for size in (num_tokens, 96))
    normed, norm_weight = x.new_empty(num_tokens, 96), x.new_ones(96)
    options = {} if leaves is None else {"deterministic": True, "leaves": leaves}
    with _as_on("sm_90" if device.type == "cpu" and leaves else None):
        want = kernels.linear(x, weight, out_norm_weight=norm_weight, normed_out=normed, **options)
        kept = kernels.linear(x, weight, keep_splits=True, **options)
    total = sum_of_ranks([*kept]) if kept.dim() == 3 else kept
    assert kept.dim() == 3 or num_tokens != 5 or dtype == torch.float32 or leaves
    assert torch.equal(total.to(dtype), want)


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, r"x: expected a torch\.Tensor, got list"),
        ({"x": torch.ones(8)}, ValueError, r"x: expected shape \[any, any\], got \[8\]"),
        ({"x": torch.ones(2, 8).int()}, TypeError, r"x: expected dtype .*, got torch\.int32"),
        ({"x": torch.ones(8, 2).T}, ValueError, r"x: expected unit last stride, got strides"),
        ({"weight": torch.ones(6, 4)}, ValueError, r"weight: expected shape \[any, 8\], got"),
        ({"weight": torch.ones(6, 8).half()}, TypeError, r"weight: expected dtype torch\.float32"),
        ({"weight": torch.ones(0, 8)}, ValueError, r"weight: expected at least one row and col"),
        ({"bias": torch.ones(5)}, ValueError, r"bias: expected shape \[6\], got \[5\]"),
        ({"norm_weight": torch.ones(6)}, ValueError, r"norm_weight: expected shape \[8\], got"),
        ({"residual": torch.ones(2, 5)}, ValueError, r"residual: expected shape \[2, 6\], got"),
        (
            {"keep_splits": True, "bias": torch.ones(6)},
            ValueError,
            r"keep_splits: expected False with arguments that change the product",
        ),
        (
            {"activation": "gelu"},
            ValueError,
            r"activation: expected one of None, 'silu_and_mul', 'ge",
        ),
        (
            {"activation": "silu_and_mul", "weight": torch.ones(5, 8)},
            ValueError,
            r"weight: expected an even number of rows \(gate, then up\), got 5",
        ),
        (
            {"activation": "silu_and_mul", "residual": torch.ones(2, 6)},
            ValueError,
            r"residual: expected shape \[2, 3\], got \[2, 6\]",
        ),
        ({"out": torch.ones(2, 6).half()}, TypeError, r"out: expected dtype torch\.float32"),
        ({"out": torch.ones(3, 6)}, ValueError, r"out: expected shape \[2, 6\], got \[3, 6\]"),
        ({"out": torch.ones(2, 6).double()}, TypeError, r"out: expected dtype torch\.float32"),
        (
            {"normed_out": torch.ones(2, 6)},
            ValueError,
            r"expected both or neither, got normed_out",
        ),
        ({"out_norm_weight": torch.ones(6)}, ValueError, r"both or neither, got out_norm_weight"),
        (
            {"out_norm_weight": torch.ones(5), "normed_out": torch.ones(2, 6)},
            ValueError,
            r"out_norm_weight: expected shape \[6\], got \[5\]",
        ),
        (
            {"out_norm_weight": torch.ones(6), "normed_out": torch.ones(2, 5)},
            ValueError,
            r"normed_out: expected shape \[2, 6\], got \[2, 5\]",
        ),
        ({"prefetch": torch.ones(4, 4).T[:2]}, ValueError, r"prefetch: expected a contiguous"),
        ({"leaves": 8}, ValueError, r"leaves: expected None without deterministic=True, got 8"),
        ({"leaves": 3, "deterministic": True}, ValueError, r"leaves: expected 1, 2, 4 or 8, got"),
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    arguments = {"x": torch.ones(2, 8), "weight": torch.ones(6, 8)} | change
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    with pytest.raises(error, match=message):
        kernels.linear(**arguments)


def test_a_weight_with_gaps_is_refused(device):
    weight = torch.ones(6, 16, device=device)[:, ::2]
    with pytest.raises(ValueError, match=r"weight: expected a contiguous tensor, got strides"):
        kernels.linear(torch.ones(2, 8, device=device), weight)


def test_normed_out_with_a_wider_out_is_refused(device):
    x, weight = torch.ones(2, 8, device=device).half(), torch.ones(6, 8, device=device).half()
    norm = {"out_norm_weight": weight[:, 0].clone(), "normed_out": weight.new_ones(2, 6)}
    out = torch.ones(2, 6, device=device)
    with pytest.raises(TypeError, match=r"out: expected torch\.float16 with normed_out, got"):
        kernels.linear(x, weight, **norm, out=out)
    with pytest.raises(TypeError, match=r"out: expected dtype torch\.float16 or torch\.float32"):
        kernels.linear(x, weight, out=out.bfloat16())
