"""Routing: scores, the choice with bias and groups, weights, padding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import Routing, reference
from tests.kernels.elementwise import DTYPES, in_a_wider_row, normal, seeds, tiles

pytestmark = [pytest.mark.interp, pytest.mark.gpu]


@st.composite
def routings(draw) -> Routing:
    num_groups, group = draw(st.sampled_from([(1, 5), (1, 64), (4, 3), (8, 16), (2, 33)]))
    kept = draw(st.integers(1, num_groups))
    return Routing(
        num_experts=num_groups * group,
        top_k=draw(st.integers(1, min(8, kept * group))),
        scores=draw(st.sampled_from(["softmax", "sigmoid"])),
        num_groups=num_groups,
        kept_groups=kept,
        renormalizes=draw(st.booleans()),
        least_sum=draw(st.sampled_from([0.0, 1e-12, 0.5])),
        scale=draw(st.sampled_from([1.0, 2.5])),
        num_shared=draw(st.integers(0, 3)),
    )


def in_plain_python(
    logits: list[float], bias: list[float] | None, routing: Routing
) -> tuple[list[int], list[float]]:
    """Return one token's experts and weights."""
    if routing.scores == "softmax":
        shares = [math.exp(x - max(logits)) for x in logits]
        scores = [share / sum(shares) for share in shares]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    ranked = [s + b for s, b in zip(scores, bias, strict=True)] if bias else list(logits)
    experts = list(range(routing.num_experts))
    if routing.num_groups > 1:
        size = routing.num_experts // routing.num_groups
        groups = [experts[start : start + size] for start in range(0, len(experts), size)]
        groups.sort(key=lambda group: -sum(sorted((ranked[e] for e in group), reverse=True)[:2]))
        experts = [e for group in groups[: routing.kept_groups] for e in group]
    chosen = sorted(experts, key=lambda e: (-ranked[e], e))[: routing.top_k]
    weights = [scores[e] for e in chosen]
    if routing.renormalizes:
        total = max(sum(weights), routing.least_sum)
        weights = [weight / total for weight in weights]
    shared = range(routing.num_experts, routing.num_experts + routing.num_shared)
    return [*chosen, *shared], [w * routing.scale for w in weights] + [1.0] * routing.num_shared


# --- oracle ------------------------------------------------------------------------------------


@given(routing=routings(), has_bias=st.booleans(), seed=seeds)
def test_the_oracle_equals_a_loop(routing, has_bias, seed):
    x = normal((3, 7), torch.float64, "cpu", seed)
    weight = normal((routing.num_experts, 7), torch.float64, "cpu", seed + 1)
    bias = normal((routing.num_experts,), torch.float32, "cpu", seed + 2) if has_bias else None
    ids, weights = reference.route_experts(x, weight, routing, bias)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    for token, logits in enumerate((x @ weight.T).tolist()):
        given_bias = None if bias is None else bias.tolist()
        want_ids, want_weights = in_plain_python(logits, given_bias, routing)
        assert ids[token].tolist() == want_ids
        assert weights[token].tolist() == pytest.approx(want_weights, rel=1e-6)


# --- properties --------------------------------------------------------------------------------


@given(
    routing=routings(),
    num_tokens=st.sampled_from([1, 2, 17]),
    num_in=st.sampled_from([16, 72, 600]),
    dtype=st.sampled_from(DTYPES),
    has_wide_router=st.booleans(),
    has_bias=st.booleans(),
    has_logits_bias=st.booleans(),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_routing_equals_the_oracle(
    device, routing, num_tokens, num_in, dtype, has_wide_router, has_bias, has_logits_bias,
    as_on_gpu, seed,
):  # fmt: skip
    """On a grid: every product and sum is exact, so near-ties of logits are ties."""
    router = torch.float32 if has_wide_router else dtype
    generator = torch.Generator().manual_seed(seed)

    def grid(*shape, dtype):
        values = torch.randint(-4, 5, shape, generator=generator) / 8
        return values.to(dtype).to(device)

    x = in_a_wider_row(grid(num_tokens, num_in, dtype=dtype), 8, 16)
    weight = grid(routing.num_experts, num_in, dtype=router)
    bias = grid(routing.num_experts, dtype=torch.float32) if has_bias else None
    added = grid(routing.num_experts, dtype=dtype) if has_logits_bias else None
    rounded = replace(routing, rounds_logits=bool(seed % 2))
    options = {"logits_bias": added}
    with tiles("route_experts", as_on_gpu=as_on_gpu):
        ids, weights = kernels.route_experts(x, weight, rounded, bias, **options)
    want_ids, want_weights = reference.route_experts(x, weight, rounded, bias, **options)
    # Scores of unlike logits may round to one score on one side only: compare what ranks.
    logits = x.double() @ weight.double().T + (0 if added is None else added.double())
    if rounded.rounds_logits:
        logits = logits.to(dtype).double()
    if bias is None and routing.num_groups == 1:
        assert torch.equal(ids, want_ids)
    else:
        scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
        ranked = scores if bias is None else scores + bias
        padded = torch.cat([ranked, ranked.new_zeros(num_tokens, routing.num_shared)], 1)
        if routing.num_groups == 1:
            torch.testing.assert_close(
                padded.gather(1, ids.long()), padded.gather(1, want_ids.long()), rtol=0, atol=1e-6
            )
    if torch.equal(ids, want_ids):
        torch.testing.assert_close(weights, want_weights, rtol=2e-5, atol=1e-7)
    assert all(len(set(row)) == len(row) for row in ids.tolist())


@given(routing=routings(), order=st.permutations(range(6)), seed=seeds)
def test_a_token_is_routed_alike_among_other_tokens(device, routing, order, seed):
    x = normal((6, 64), torch.float16, device, seed)
    weight = normal((routing.num_experts, 64), torch.float32, device, seed + 1)
    ids, weights = kernels.route_experts(x, weight, routing)
    ids_then, weights_then = kernels.route_experts(x[list(order)], weight, routing)
    assert torch.equal(ids_then, ids[list(order)])
    assert torch.equal(weights_then, weights[list(order)])


@given(
    routing=routings(),
    num_tokens=st.sampled_from([2, 17, 40]),
    dtype=st.sampled_from(DTYPES),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_deterministic_bits_depend_on_the_token_alone(
    device, routing, num_tokens, dtype, as_on_gpu, seed
):
    x = normal((num_tokens, 72), dtype, device, seed)
    weight = normal((routing.num_experts, 72), torch.float32, device, seed + 1)
    with tiles("route_experts", as_on_gpu=as_on_gpu):
        together = kernels.route_experts(x, weight, routing, deterministic=True)
        for token in (0, num_tokens - 1):
            alone = kernels.route_experts(x[token, None], weight, routing, deterministic=True)
            for one, several in zip(alone, together, strict=True):
                assert torch.equal(one[0], several[token])


@given(routing=routings(), num_groups=st.sampled_from([1, 2]), seed=seeds)
def test_padding_has_no_experts(device, routing, num_groups, seed):
    x = normal((5, 32), torch.float32, device, seed)
    x[3] = math.nan  # undefined, as a padding token's hidden state is
    weight = normal((routing.num_experts, 32), torch.float32, device, seed + 1)
    slots = torch.arange(5, device=device).expand(num_groups, 5).contiguous()
    slots[-1, 1] = -1  # a streaming group does not keep the token, if there is another group
    slots[:, 3] = -1
    want = [each.clone() for each in kernels.route_experts(x, weight, routing)]
    for op in (kernels.route_experts, reference.route_experts):
        ids, weights = op(x, weight, routing, slot_mapping=slots)
        is_padding = torch.tensor([False, num_groups == 1, False, True, False], device=device)
        assert (ids[is_padding] == -1).all()
        assert (weights[is_padding] == 0).all()
        assert torch.equal(ids[~is_padding], want[0][~is_padding])


# --- edges -------------------------------------------------------------------------------------


def test_ties_go_to_the_lowest_id(device):
    routing = Routing(num_experts=16, top_k=3, renormalizes=True)
    x, weight = torch.ones(2, 16, device=device), torch.ones(16, 16, device=device)
    ids, weights = kernels.route_experts(x, weight, routing)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3, device=device))


def test_a_bias_of_logits_chooses_and_weighs(device):
    """Softmax over the chosen logits is that over all of them, renormalized."""
    routing = Routing(num_experts=6, top_k=2, renormalizes=True)
    x, weight = normal((5, 16), torch.float32, device), normal((6, 16), torch.float32, device, 1)
    added = normal((6,), torch.float32, device, 2) * 3
    for op in (kernels.route_experts, reference.route_experts):
        ids, weights = op(x, weight, routing, logits_bias=added)
        top, want = (x @ weight.T + added).topk(2)
        assert torch.equal(ids.long(), want)
        torch.testing.assert_close(weights, top.softmax(-1), rtol=1e-5, atol=1e-6)


def test_a_bias_chooses_but_does_not_weigh(device):
    routing = Routing(num_experts=4, top_k=1)
    x, weight = torch.ones(1, 16, device=device), torch.zeros(4, 16, device=device)
    bias = torch.tensor([[0.0, 0.0, 9.0, 0.0]], device=device)  # ERNIE's has two dimensions
    ids, weights = kernels.route_experts(x, weight, routing, bias)
    assert (ids.tolist(), weights.tolist()) == ([[2]], [[0.25]])


def test_a_nan_is_chosen_last_and_spoils_the_weights(device):
    routing = Routing(num_experts=4, top_k=2, scores="sigmoid", num_shared=1)
    x, weight = torch.ones(1, 16, device=device), torch.zeros(4, 16, device=device)
    weight[0, 0] = math.nan
    ids, weights = kernels.route_experts(x, weight, routing)
    assert ids.tolist() == [[1, 2, 4]]
    assert weights.tolist() == [[0.5, 0.5, 1.0]]
    softmax = replace(routing, scores="softmax")
    assert kernels.route_experts(x, weight, softmax)[1][:, :2].isnan().all()


def test_no_token(device):
    routing = Routing(num_experts=4, top_k=2)
    ids, weights = kernels.route_experts(
        torch.ones(0, 16, device=device), torch.ones(4, 16, device=device), routing
    )
    assert ids.shape == weights.shape == (0, 2)


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "num_experts: expected 1 to 1024, got 0"),
        ({"top_k": 9}, "top_k: expected 1 to 8, as many as the experts chosen from, got 9"),
        ({"num_groups": 3}, "num_groups: expected a divisor of 8 experts, got 3"),
        ({"num_groups": 8}, "num_groups: expected groups of at least 2 of 8 experts"),
        ({"num_groups": 4, "kept_groups": 1, "top_k": 3}, "top_k: expected 1 to 2"),
        ({"kept_groups": 2}, "kept_groups: expected 1 to 1, got 2"),
        ({"num_shared": 33}, "num_shared: expected 0 to 32, got 33"),
    ],
)
def test_sizes_that_contradict_each_other(change, message):
    with pytest.raises(ValueError, match=message):
        Routing(**{"num_experts": 8, "top_k": 2} | change)


@pytest.mark.parametrize("op", [kernels.route_experts, reference.route_experts])
@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("x", torch.ones(2), ValueError, r"x: expected shape \[any, any\], got \[2\]"),
        ("weight", torch.ones(3, 16), ValueError, r"weight: expected shape \[4, 16\]"),
        ("weight", torch.ones(4, 16).half(), TypeError, "weight: expected dtype torch.float32"),
        ("bias", torch.ones(3), ValueError, r"bias: expected 4 values, got \[3\]"),
        ("logits_bias", torch.ones(3), ValueError, r"logits_bias: expected shape \[4\], got \[3"),
        ("bias", torch.ones(4).half(), TypeError, "bias: expected dtype torch.float32"),
        ("slot_mapping", torch.ones(1, 2), TypeError, "slot_mapping: expected dtype torch.int64"),
    ],
)
def test_bad_arguments_are_named(device, op, name, value, error, message):
    given = {
        "x": torch.ones(2, 16, device=device),
        "weight": torch.ones(4, 16, device=device),
        "routing": Routing(num_experts=4, top_k=2),
    }
    with pytest.raises(error, match=message):
        op(**given | {name: value.to(device)})
