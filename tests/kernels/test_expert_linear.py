"""Products with the experts that tokens are routed to, from one pair to many of one expert."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.device import INTERPRET
from mrv1.kernels import ClampedSwiGLU, QuantizedWeight, reference
from mrv1.kernels.experts.expert_codes import ExpertCodesConfig
from mrv1.kernels.experts.expert_linear import choose_kernel
from mrv1.kernels.experts.sort_pairs import sort_pairs
from tests.kernels.elementwise import (
    DTYPES,
    assert_in_budget,
    in_a_wider_row,
    normal,
    seeds,
    tiles,
)
from tests.kernels.quantized_weights import random_experts, random_weight

pytestmark = [pytest.mark.interp, pytest.mark.gpu]


@pytest.fixture(params=[False, True], ids=["small", "large"])
def shared_memory(request, monkeypatch):
    """Take the tiles of a device with little shared memory, and of one with much."""
    if request.param and INTERPRET:
        module = sys.modules["mrv1.kernels.experts.expert_linear"]
        also = (*module.LARGE_SHARED_MEMORY, None)
        monkeypatch.setattr(module, "LARGE_SHARED_MEMORY", also)


ROUTES = ("spread", "one expert", "none", "some padding")


def routed(route: str, num_tokens: int, chosen: int, num_experts: int, seed: int) -> torch.Tensor:
    """Return ids [tokens, chosen] int32, no expert twice in a row."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)
    ids = order[:, :chosen].int()
    if route == "one expert":
        ids = torch.arange(chosen).expand(num_tokens, -1).int().contiguous()
    if route == "none":
        ids = torch.full_like(ids, -1)
    if route == "some padding":
        ids[torch.rand(num_tokens, generator=generator) < 0.4] = -1
    return ids


def matrices(num_experts: int, num_in: int, num_out: int, dtype, device, seed: int, *, is_gated):
    """Return experts' weights as a model stores them: all gates, then ups; or in columns."""
    scale = num_in**-0.5
    if is_gated:
        weight = normal((2, num_experts, num_out, num_in), torch.float64, device, seed) * scale
    else:
        weight = normal((num_out, num_experts, num_in), torch.float64, device, seed) * scale
    return weight.to(dtype).movedim(1, 0)


def exact(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the result in float64, one pair after the other; NaN where there is no expert."""
    out = torch.full((ids.numel(), weight.shape[-2]), math.nan, dtype=torch.float64)
    per_row = ids.numel() // len(x)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert >= 0:
            products = weight[expert].double().cpu() @ x[pair // per_row].double().cpu()
            if products.dim() == 2:
                products = torch.nn.functional.silu(products[0]) * products[1]
            out[pair] = products
    return out.to(x.device)


# --- oracle and kernel -------------------------------------------------------------------------


@given(
    num_tokens=st.sampled_from([1, 2, 9, 80]),
    num_experts=st.sampled_from([4, 7, 24]),
    chosen=st.integers(1, 4),
    num_in=st.sampled_from([16, 72, 130]),
    num_out=st.sampled_from([8, 48, 70]),
    route=st.sampled_from(ROUTES),
    dtype=st.sampled_from(DTYPES),
    is_gated=st.booleans(),
    has_pair_rows=st.booleans(),
    deterministic=st.booleans(),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_expert_linear_is_as_exact_as_torch(
    device, shared_memory, num_tokens, num_experts, chosen, num_in, num_out, route, dtype,
    is_gated, has_pair_rows, deterministic, as_on_gpu, seed,
):  # fmt: skip
    ids = routed(route, num_tokens, chosen, num_experts, seed).to(device)
    rows = num_tokens * chosen if has_pair_rows else num_tokens
    x = in_a_wider_row(normal((rows, num_in), dtype, device, seed), 8, 16)
    weight = matrices(num_experts, num_in, num_out, dtype, device, seed + 1, is_gated=is_gated)
    activation = "silu_and_mul" if is_gated else None
    wants, outs = exact(x, weight, ids), []
    for op in (kernels.expert_linear, reference.expert_linear):
        out = torch.full((ids.numel(), num_out), math.nan, dtype=dtype, device=device)
        with tiles("expert_linear", as_on_gpu=as_on_gpu):
            got = op(x, weight, ids, activation=activation, out=out, deterministic=deterministic)
        assert got is out
        outs.append(out)
    has_expert = ids.flatten() >= 0
    assert outs[0][~has_expert].isnan().all()  # rows without an expert are not written
    assert_in_budget(outs[0][has_expert], outs[1][has_expert], wants[has_expert])


@given(
    num_tokens=st.sampled_from([2, 9, 40]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    is_gated=st.booleans(),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_deterministic_bits_depend_on_the_token_alone(
    device, num_tokens, dtype, is_gated, as_on_gpu, seed
):
    """Alone, and among tokens that are routed to its experts and to others."""
    x = normal((num_tokens, 80), dtype, device, seed)
    weight = matrices(8, 80, 24, dtype, device, seed + 1, is_gated=is_gated)
    activation = "silu_and_mul" if is_gated else None
    ids = routed("spread", num_tokens, 3, 8, seed).to(device)

    def products(rows: slice) -> torch.Tensor:
        return kernels.expert_linear(
            x[rows], weight, ids[rows], activation=activation, deterministic=True
        )

    with tiles("expert_linear", as_on_gpu=as_on_gpu):
        together = products(slice(None)).view(num_tokens, 3, -1)
        for token in {0, num_tokens // 2, num_tokens - 1}:
            assert torch.equal(products(slice(token, token + 1)), together[token])


@given(
    num_tokens=st.sampled_from([1, 3, 9]),
    num_shared=st.sampled_from([0, 1, 2, 3]),
    leaf_in=st.sampled_from([5, 18]),
    size=st.sampled_from([2, 4, 8]),
    dtype=st.sampled_from(DTYPES),
    has_padding=st.booleans(),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_leaves_of_ranks_are_those_of_one(
    device, num_tokens, num_shared, leaf_in, size, dtype, has_padding, as_on_gpu, seed
):
    """Each rank has the inputs of its leaves: a part of each expert's, and of all shared ones'."""
    routed_to, num_routed, num_in = 2, 6, 8 * leaf_in
    num_experts, chosen = num_routed + num_shared, routed_to + num_shared
    ids = routed("some padding" if has_padding else "spread", num_tokens, 2, num_routed, seed)
    shared = torch.arange(num_routed, num_experts).expand(num_tokens, -1)
    ids = torch.cat([ids, shared.masked_fill(ids[:, :1] < 0, -1)], 1).int().to(device)
    x = normal((num_tokens * chosen, num_in), dtype, device, seed)
    weight = matrices(num_experts, num_in, 24, dtype, device, seed + 1, is_gated=False)
    options = {"deterministic": True, "num_shared": num_shared}

    def of_rank(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's part of [groups, experts, in], as it is loaded."""
        parts = [*tensor[:, : tensor.shape[1] - num_shared].unbind(1)]
        columns = [part.chunk(size, 1)[rank] for part in parts]
        if num_shared:
            of_all = tensor[:, len(parts) :].flatten(1).chunk(size, 1)[rank]
            columns += of_all.chunk(num_shared, 1)
        return torch.stack(columns, 1)

    has_expert = ids.flatten() >= 0
    with tiles("expert_linear", as_on_gpu=as_on_gpu):
        whole = kernels.expert_linear(x, weight, ids, leaves=8, **options)
        of_ranks = [
            kernels.expert_linear(
                of_rank(x.view(num_tokens, chosen, -1), rank).flatten(0, 1),
                of_rank(weight.movedim(0, 1), rank).movedim(1, 0),
                ids, leaves=8 // size, **options,
            )
            for rank in range(size)
        ]  # fmt: skip
        assert torch.equal(torch.cat(of_ranks)[:, has_expert], whole[:, has_expert])
    oracle = reference.expert_linear(x, weight, ids, leaves=8, **options)
    assert whole.dtype == oracle.dtype == torch.float32
    torch.testing.assert_close(whole[:, has_expert], oracle[:, has_expert], rtol=1e-5, atol=1e-5)
    if num_shared < 2:  # a leaf of several is no part of one expert's product
        assert_in_budget(
            whole.sum(0)[has_expert], oracle.sum(0)[has_expert],
            exact(x, weight, ids)[has_expert],
        )  # fmt: skip


@pytest.mark.parametrize("num_in", [4, 36, 100])
def test_leaves_that_do_not_divide_the_inputs(device, num_in):
    """The last one is shorter; some may have no inputs."""
    x, ids = normal((5, num_in), torch.float32, device), torch.tensor([[0]] * 5).int().to(device)
    weight = matrices(3, num_in, 16, torch.float32, device, 1, is_gated=False)
    for op in (kernels.expert_linear, reference.expert_linear):
        out = torch.full((8, 5, 16), math.nan, device=device)
        op(x, weight, ids, deterministic=True, leaves=8, out=out)
        torch.testing.assert_close(
            out.sum(0).double(), exact(x, weight, ids), rtol=1e-5, atol=1e-5
        )


def test_weights_of_other_experts_are_not_read(device):
    """NaN in them would show: in a product, or in the padding of a tile."""
    x, ids = normal((3, 32), torch.float32, device), torch.tensor([[1], [3], [1]]).int()
    weight = matrices(5, 32, 16, torch.float32, device, 1, is_gated=False).clone()
    weight[[0, 2, 4]] = math.nan
    got = kernels.expert_linear(x, weight, ids.to(device))
    torch.testing.assert_close(got.double(), exact(x, weight, ids), rtol=1e-5, atol=1e-5)


def test_many_pairs_of_few_experts(device):
    """More pairs than a program looks through, and more of one expert than a tile has."""
    x = normal((700, 32), torch.float16, device)
    weight = matrices(3, 32, 16, torch.float16, device, 1, is_gated=True)
    ids = routed("one expert", 700, 2, 3, 0).to(device)
    got = kernels.expert_linear(x, weight, ids, activation="silu_and_mul")
    want = reference.expert_linear(x, weight, ids, activation="silu_and_mul")
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def test_no_token(device):
    weight = torch.ones(3, 8, 16, device=device)
    ids = torch.empty(0, 2, dtype=torch.int32, device=device)
    assert kernels.expert_linear(torch.ones(0, 16, device=device), weight, ids).shape == (0, 8)


# --- codes, biases, other activations ----------------------------------------------------------


KINDS = (
    "mxfp4", "e4m3_row", "e4m3_block", "e4m3_tensor", "int4", "uint4_zeros", "q8_0", "q4_k",
    "q6_k",
)  # fmt: skip
ACTIVATIONS = (None, "silu_and_mul", ClampedSwiGLU(), ClampedSwiGLU(alpha=0.7, limit=0.25))


def stack(kind: str, num_in: int, dtype: torch.dtype, device, seed: int, *, is_gated: bool):
    """Return codes of 5 experts with 128 rows or twice as many: blocks are of 128."""
    num_rows = 256 if is_gated else 128
    return random_experts(kind, 5, num_rows, num_in, dtype, seed=seed, device=device)


def with_numbers(
    x: torch.Tensor, dense: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None, activation
) -> torch.Tensor:
    """Return the result in float64, one pair after the other."""
    num_out = dense.shape[1] // (1 if activation is None else 2)
    out = torch.full((ids.numel(), num_out), math.nan, dtype=torch.float64, device=x.device)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert < 0:
            continue
        y = dense[expert].double() @ x[pair // (ids.numel() // len(x))].double()
        if bias is not None:
            y = y + bias[expert].flatten().double()
        if activation is not None:
            gate, up = y.chunk(2)
            if activation == "silu_and_mul":
                y = torch.nn.functional.silu(gate) * up
            else:
                gate = gate.clamp(max=activation.limit)
                up = up.clamp(-activation.limit, activation.limit)
                y = (up + 1) * gate * torch.sigmoid(activation.alpha * gate)
        out[pair] = y
    return out


@given(
    kind=st.sampled_from((*KINDS, None)),
    num_tokens=st.sampled_from([1, 2, 9, 40]),
    chosen=st.integers(1, 3),
    has_long_rows=st.booleans(),
    route=st.sampled_from(ROUTES),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
    has_bias=st.booleans(),
    deterministic=st.booleans(),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_codes_and_biases_are_as_exact_as_torch(
    device, kind, num_tokens, chosen, has_long_rows, route, dtype, activation, has_bias,
    deterministic, as_on_gpu, seed,
):  # fmt: skip
    ids = routed(route, num_tokens, chosen, 5, seed).to(device)
    num_in = 256 if has_long_rows or kind in ("q4_k", "q6_k") else 160
    is_gated = activation is not None
    if kind is None:
        weight = matrices(5, num_in, 128, dtype, device, seed, is_gated=is_gated)
        dense = weight.flatten(1, -2)
    else:
        weight = stack(kind, num_in, dtype, device, seed, is_gated=is_gated)
        dense = weight.dense()
    x = in_a_wider_row(normal((num_tokens, num_in), dtype, device, seed), 8, 16)
    bias = normal((5, 2, 128) if is_gated else (5, 128), dtype, device, seed)
    if is_gated and seed % 2:  # in turns
        bias = bias.transpose(1, 2).contiguous().transpose(1, 2)
    options = {"bias": bias if has_bias else None, "activation": activation}
    want, outs = with_numbers(x, dense, ids, options["bias"], activation), []
    for op in (kernels.expert_linear, reference.expert_linear):
        with tiles("expert_linear", as_on_gpu=as_on_gpu):
            outs.append(op(x, weight, ids, deterministic=deterministic, **options))
    has_expert = ids.flatten() >= 0
    assert_in_budget(outs[0][has_expert], outs[1][has_expert], want[has_expert])


@pytest.mark.gpu_only
@pytest.mark.parametrize("kind", ["mxfp4", "e4m3_row", "int4"])
@pytest.mark.parametrize("num_tokens", [4, 120, 600])
def test_steps_of_codes_leave_the_weights_of_running_products_alone(device, kind, num_tokens):
    """Large tiles too, of two steps: an H100 was wrong in 17 of 60 launches of 600 tokens."""
    if device.type == "cpu":
        pytest.skip("the interpreter runs one step after the other")
    weight = random_experts(kind, 7, 80, 96, torch.bfloat16, seed=1, device=device)
    ids = routed("spread", num_tokens, 2, 7, 0).to(device)
    rows = weight.dense().double()[ids.flatten().long()]
    for seed in range(60):
        x = normal((num_tokens, 96), torch.bfloat16, device, seed)
        want = (rows @ x.double().repeat_interleave(2, 0)[:, :, None])[..., 0]
        assert_in_budget(kernels.expert_linear(x, weight, ids), want.bfloat16(), want)


@given(
    kind=st.sampled_from(["mxfp4", "e4m3_row", "uint4_zeros", "q8_0"]),
    num_tokens=st.sampled_from([1, 5]),
    num_out=st.sampled_from([8, 24]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    activation=st.sampled_from(ACTIVATIONS),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_few_pairs_of_codes_in_several_steps(
    device, kind, num_tokens, num_out, dtype, activation, as_on_gpu, seed
):
    """Of 576 inputs: the last step of a program has fewer than the others."""
    is_gated = activation is not None
    num_rows = 2 * num_out if is_gated else num_out
    weight = random_experts(kind, 3, num_rows, 576, dtype, seed=seed, device=device)
    ids = routed("some padding", num_tokens, 2, 3, seed).to(device)
    x = normal((num_tokens, 576), dtype, device, seed)
    bias = normal((3, 2, num_out) if is_gated else (3, num_out), dtype, device, seed)
    with tiles("expert_linear", as_on_gpu=as_on_gpu):
        config, *_ = choose_kernel(ids.numel(), weight, is_gated=is_gated, deterministic=False)
        assert isinstance(config, ExpertCodesConfig) == (torch.version.hip is None)
        found = kernels.expert_linear(x, weight, ids, bias=bias, activation=activation)
    oracle = reference.expert_linear(x, weight, ids, bias=bias, activation=activation)
    want = with_numbers(x, weight.dense(), ids, bias, activation)
    has_expert = ids.flatten() >= 0
    assert_in_budget(found[has_expert], oracle[has_expert], want[has_expert])


@pytest.mark.parametrize("kind", ["mxfp4", "e4m3_block", None])
def test_leaves_of_codes_and_the_bias_of_the_first(device, kind):
    """Ranks have equal parts of the inputs, and the first one has the bias."""
    ids = routed("some padding", 9, 2, 5, 0).to(device)
    x = normal((18, 256), torch.float16, device)
    bias = normal((5, 128), torch.float16, device)
    if kind is None:
        weight = matrices(5, 256, 128, torch.float16, device, 1, is_gated=False)
    else:
        weight = stack(kind, 256, torch.float16, device, 1, is_gated=False)
    options = {"deterministic": True}
    whole = kernels.expert_linear(x, weight, ids, bias=bias, leaves=8, **options)
    of_ranks = []
    for rank in range(2):
        own = slice(128 * rank, 128 * (rank + 1))
        part = weight[..., own] if kind is None else weight.inputs(own.start, own.stop)
        of_ranks.append(
            kernels.expert_linear(
                x[:, own], part if kind is None else part.contiguous(), ids, leaves=4,
                bias=None if rank else bias, **options,
            )
        )  # fmt: skip
    has_expert = ids.flatten() >= 0
    assert torch.equal(torch.cat(of_ranks)[:, has_expert], whole[:, has_expert])
    oracle = reference.expert_linear(x, weight, ids, bias=bias, leaves=8, **options)
    torch.testing.assert_close(whole[:, has_expert], oracle[:, has_expert], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("leaves", [None, 8])
def test_the_fewest_inputs_of_codes(device, leaves):
    """All inputs, or those of a leaf, share 16 bits."""
    ids = routed("spread", 2, 1, 5, 0).to(device)
    num_in = 4 * (leaves or 1)
    x = normal((2, num_in), torch.float32, device)
    weight = random_experts("int4_row", 5, 8, num_in, torch.float32, seed=0, device=device)
    options = {"deterministic": leaves is not None, "leaves": leaves}
    torch.testing.assert_close(
        kernels.expert_linear(x, weight, ids, **options),
        reference.expert_linear(x, weight, ids, **options),
    )


def test_deterministic_bits_of_codes_are_those_of_their_values(device):
    ids = routed("spread", 9, 2, 5, 0).to(device)
    x = normal((9, 160), torch.float16, device)
    weight = stack("mxfp4", 160, torch.float16, device, 3, is_gated=False)
    codes, values = (
        kernels.expert_linear(x, each, ids, deterministic=True)
        for each in (weight, weight.dense())
    )
    assert torch.equal(codes, values)


def test_a_gate_that_is_not_a_number(device):
    """The clamp keeps NaN, and lets no infinity through."""
    weight = torch.eye(2, device=device).view(1, 2, 1, 2)
    x = torch.tensor([[math.nan, 1.0], [math.inf, -math.inf]], device=device)
    ids = torch.zeros(2, 1, dtype=torch.int32, device=device)
    for op in (kernels.expert_linear, reference.expert_linear):
        got = op(x.nan_to_num(posinf=1e30, neginf=-1e30, nan=math.nan), weight, ids,
                 activation=ClampedSwiGLU())  # fmt: skip
        assert got[0].isnan()
        torch.testing.assert_close(got[1, 0].item(), -6 * 7 / (1 + math.exp(-1.702 * 7)))


# --- errors ------------------------------------------------------------------------------------


LEAVES = {"deterministic": True, "leaves": 2}


@pytest.mark.parametrize("op", [kernels.expert_linear, reference.expert_linear])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(3, 16)}, ValueError, "x: expected a row for each of 2 tokens, or for"),
        ({"x": torch.ones(2, 8)}, ValueError, r"weight: expected shape \[any, any, 8\]"),
        ({"weight": torch.ones(3, 8, 16).half()}, TypeError, "weight: expected dtype"),
        ({"weight": torch.ones(0, 8, 16)}, ValueError, "weight: expected at least one expert"),
        ({"activation": "silu_and_mul"}, ValueError, r"weight: expected shape \[any, 2, any, 16"),
        ({"topk_ids": torch.ones(2, 2)}, TypeError, "topk_ids: expected dtype torch.int32"),
        ({"out": torch.ones(2, 8)}, ValueError, r"out: expected shape \[4, 8\], got \[2, 8\]"),
        ({"leaves": 2}, ValueError, "leaves: expected None without deterministic=True, got 2"),
        (LEAVES | {"leaves": 3}, ValueError, "leaves: expected 1, 2, 4 or 8, got 3"),
        (LEAVES | {"out": torch.ones(4, 8)}, ValueError, r"out: expected shape \[2, 4, 8\]"),
        (LEAVES | {"num_shared": 4}, ValueError, "num_shared: expected 0 to 2, got 4"),
        (LEAVES | {"num_shared": 2}, ValueError, r"x: expected shape \[4, any\], got \[2, 16\]"),
        (
            LEAVES | {"num_shared": 2, "x": torch.ones(4, 16)},
            ValueError,
            "weight: expected experts whose inputs are neighbours in a row, stride 16, got 128",
        ),
        (
            LEAVES | {"activation": "silu_and_mul", "weight": torch.ones(3, 2, 8, 16)},
            ValueError,
            "leaves: expected None with an activation, got 2",
        ),
    ],
)
def test_bad_arguments_are_named(device, op, change, error, message):
    given = {
        "x": torch.ones(2, 16),
        "weight": torch.ones(3, 8, 16),
        "topk_ids": torch.tensor([[0, 1], [1, 2]], dtype=torch.int32),
    } | change
    given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(error, match=message):
        op(**given)


@pytest.mark.parametrize("op", [kernels.expert_linear, reference.expert_linear])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(2, 64)}, ValueError, r"weight: expected codes of shape \[any, any, 64"),
        ({"x": torch.ones(2, 128).half()}, TypeError, "weight: expected codes of torch.float16"),
        ({"rows_per_scale": 3}, ValueError, "weight.rows_per_scale: expected a divisor of an exp"),
        ({"bias": torch.ones(4, 2)}, ValueError, r"bias: expected shape \[2, 4\], got \[4, 2\]"),
        ({"activation": "gelu"}, ValueError, "activation: expected None, 'silu_and_mul' or a Cl"),
        ({"leaves": 8, "deterministic": True, "x": torch.ones(4, 128), "num_shared": 2},
         ValueError, "num_shared: expected at most 1 with leaves of codes, got 2"),
    ],
)  # fmt: skip
def test_bad_codes_are_named(device, op, change, error, message):
    rows = change.get("rows_per_scale", 1)
    weight = random_experts("int8", 2, 4, 128, torch.float32, seed=0)
    if rows > 1:
        scales = torch.ones(2, 2, 1)
        weight = QuantizedWeight(
            code="int8", codes=weight.codes, dtype=weight.dtype, rows_per_scale=3, scales=scales
        )
    given = {
        "x": torch.ones(2, 128),
        "weight": weight.to(device),
        "topk_ids": torch.tensor([[0, 1], [1, 0]], dtype=torch.int32),
    } | {name: value for name, value in change.items() if name != "rows_per_scale"}
    given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(error, match=message):
        op(**given)


def test_an_order_of_inputs(device):
    weight = random_weight("uint4_order", 4, 128, torch.float32, seed=0)
    stacked = QuantizedWeight(
        code="uint4", codes=weight.codes[None], scales=weight.scales[None].float(),
        zeros=weight.zeros[None], dtype=weight.dtype, order=weight.order, inputs_per_scale=128,
    ).to(device)  # fmt: skip
    ids = torch.zeros(2, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"weight\.order: expected None for exp"):
        kernels.expert_linear(torch.ones(2, 128, device=device), stacked, ids)


@pytest.mark.parametrize("name", ["alpha", "limit"])
def test_numbers_of_an_activation(name):
    with pytest.raises(ValueError, match=f"{name}: expected > 0, got 0.0"):
        ClampedSwiGLU(**{name: 0.0})


def test_an_unknown_activation(device):
    x, ids = torch.ones(2, 16, device=device), torch.ones(2, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"activation: expected None, .silu_and_mul. or a C"):
        kernels.expert_linear(x, torch.ones(3, 8, 16, device=device), ids, activation="gelu")


@pytest.mark.parametrize("num_tokens", [1, 300, 1500])
def test_sorted_pairs_are_those_of_a_stable_sort(device, num_tokens):
    """Also of several tiles: experts without pairs, pairs without an expert."""
    ids = routed("some padding", num_tokens, 6, 9, seed=num_tokens)
    ids[ids == 4] = 3
    order, starts = (each.cpu() for each in sort_pairs(ids.to(device), 11))
    flat = ids.flatten()
    assert starts.tolist() == [int(((flat >= 0) & (flat < e)).sum()) for e in range(12)]
    num_none = int((flat < 0).sum())
    assert order[: starts[-1]].tolist() == flat.sort(stable=True).indices[num_none:].tolist()
