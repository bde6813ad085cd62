"""Every kernel compiles for every GPU, without spills, within its shared memory."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from mrv1.errors import ConfigError
from mrv1.testing import aot
from mrv1.testing.aot import TARGETS, AotReport, collect_cases, compile_for

pytestmark = pytest.mark.compile

GROUPS = {
    "attention": 6,
    "decode": 3,
    "linear": 5,
    "quantized": 4,
    "experts": 3,
    "elementwise edit_logits lora": 3,
    "pages qkv quarter": 2,
    "logprobs sampler sampling step": 4,
}
"""Modules of cases, and how many tests share a group on the quick target: cases take seconds."""
QUICK = "sm_90"
"""The target of `make test`, which compiles the first share of each group: the measured GPU."""
SIBLINGS = ("sm_86", "sm_89")
"""Targets that compile a quarter of the cases each: sm_80 compiles all for their instructions, and
sm_120 all for their shared memory."""


def _shares(target: str, quick_shares: int) -> list[tuple[int, int]]:
    """Return (share, shares) of each test of a group.

    Fewer and longer tests for targets that are not quick: a child takes four seconds to start.
    """
    if target in SIBLINGS:
        return [(SIBLINGS.index(target), 4)]
    shares = quick_shares if target == QUICK else -(-quick_shares // 3)
    return [(share, shares) for share in range(shares)]


SHARES = [
    pytest.param(
        *(target, group, share, shares),
        marks=() if (target, share) == (QUICK, 0) else pytest.mark.full,
    )
    for target in TARGETS
    for group, quick_shares in GROUPS.items()
    for share, shares in _shares(target, quick_shares)
]

SLOWER_WITH_39 = frozenset(
    line
    for line in Path(__file__).with_name("slower_with_triton39.txt").read_text().splitlines()
    if not line.startswith("#")
)
SLOWER = (
    "sm_100 draw-float32-151936: spills 336 bytes a thread (128 registers)",
    "sm_100 draw-float32-151936-2-ranks: spills 400 bytes a thread (128 registers)",
    "sm_100 draw-float32-151936-8-ranks: spills 328 bytes a thread (128 registers)",
    "sm_120 draw-float32-151936-2-ranks: spills 368 bytes a thread (128 registers)",
    "sm_120 draw-float32-151936-8-ranks: spills 344 bytes a thread (128 registers)",
    "sm_120 top_logprobs-float32-151936-8-ranks: spills 8 bytes a thread (128 registers)",
)
"""Problems of the other tritons, on GPUs where no kernel has ever run. With so few registers one
program more fits a multiprocessor, two draws: that is worth more than these bytes,
which other code or launches would only save at the cost of sm_90's measured machine code."""


def _modules(group: str) -> list[str]:
    return [f"{__package__}.cases_{name}" for name in group.split()]


def test_what_siblings_leave_out_is_compiled_for_targets_like_them():
    first, second = (set(_shares(target, 6)) for target in SIBLINGS)
    assert first.isdisjoint(second)
    assert len({TARGETS[target].shared_memory_bytes for target in (*SIBLINGS, "sm_120")}) == 1
    assert all(
        {part for part, _ in _shares(target, 6)} == {0, 1} for target in ("sm_80", "sm_120")
    )


def test_every_module_of_cases_is_in_a_group():
    names = {path.stem.removeprefix("cases_") for path in Path(__file__).parent.glob("cases_*.py")}
    assert sorted(" ".join(GROUPS).split()) == sorted(names)


@pytest.mark.parametrize(("target", "group", "share", "shares"), SHARES)
def test_every_kernel_compiles(target, group, share, shares):
    modules = _modules(group)
    reports = compile_for(target, modules, share=(share, shares))
    cases = collect_cases(TARGETS[target], modules)
    assert [report.case for report in reports] == [case.name for case in cases[share::shares]]
    assert len({case.name for case in cases}) == len(cases) > 20
    known = SLOWER_WITH_39 if version("triton").startswith("3.9.") else SLOWER
    compiled = {f"{target} {report.case}" for report in reports}
    expected = {problem for problem in known if problem.partition(": ")[0] in compiled}
    assert {report.problem for report in reports if report.problem} == expected
    assert all(report.registers > 0 for report in reports)


@pytest.mark.full
def test_every_known_problem_is_that_of_a_case():
    """One of a case that was renamed or left out would be forgotten in silence."""
    known = {*SLOWER, *SLOWER_WITH_39}
    modules = [module for group in GROUPS for module in _modules(group)]
    names = {
        f"{target} {case.name}"
        for target in {problem.partition(" ")[0] for problem in known}
        for case in collect_cases(TARGETS[target], modules)
    }
    assert {problem.partition(": ")[0] for problem in known} <= names


def test_spills_shared_memory_and_unsupported_operations_are_reported():
    """The kernels spill, need too much shared memory, or use an operation that sm_80 lacks."""
    reports = {r.case: r for r in compile_for("sm_80", [f"{__package__}.bad_kernels"])}
    assert "sm_80 spills: spills " in reports["spills"].problem
    assert "bytes of shared memory, has 166912" in reports["shared"].problem
    assert "fp8e4nv" in reports["unsupported"].problem
    assert reports["good"].problem == ""
    assert reports["good"].registers > 0


def test_spills_on_amd_are_reported():
    reports = {r.case: r for r in compile_for("gfx942", [f"{__package__}.bad_kernels"])}
    assert "gfx942 spills: spills " in reports["spills"].problem
    assert reports["good"].problem == ""


def test_a_report_names_its_problem():
    fine = {"target": "sm_89", "case": "op", "seconds": 0.1, "registers": 40}
    assert AotReport(**fine, shared_bytes=99 * 1024).problem == ""
    assert "needs 101377 bytes" in AotReport(**fine, shared_bytes=99 * 1024 + 1).problem
    assert "spills 8 bytes a thread (40 reg" in AotReport(**fine, spill_bytes=8).problem
    assert AotReport(**fine, spill_bytes=8, parked_bytes=8).problem == ""
    assert "spills 12" in AotReport(**fine, spill_bytes=12, parked_bytes=8).problem
    four = {"threads": 128, "programs_per_sm": 4}
    assert AotReport(**fine | {"registers": 128}, **four).problem == ""
    assert "4 programs of 128 threads with 129 reg" in (
        AotReport(**fine | {"registers": 129}, **four).problem
    )
    seven = {"threads": 64, "programs_per_sm": 7}  # two of four parts would have four warps
    assert AotReport(**fine | {"registers": 128}, **seven).problem == ""
    assert "7 programs of 64 threads with 144 reg" in (
        AotReport(**fine | {"registers": 144}, **seven).problem
    )
    assert AotReport(**fine, **four, shared_bytes=24 * 1024).problem == ""
    assert "4 programs of 24577 bytes" in (
        AotReport(**fine, **four, shared_bytes=24 * 1024 + 1).problem
    )
    assert AotReport(**fine, error="no").problem == "sm_89 op: no"
    assert AotReport(**fine, early_arrivals=2).problem.startswith("sm_89 op: 2 arrivals without")
    assert AotReport(**fine, early_reuses=1).problem.startswith("sm_89 op: 1 loops that overwrite")


def test_the_reported_handoff_orders_its_accesses():
    """racecheck reports it, so a check must say that it has no race: this one and its sum."""
    (report,) = compile_for("sm_90", [f"{__package__}.handoff"])
    assert (report.case, report.problem) == ("handoff", "")


@cache
def _instructions(target: str) -> dict[str, list[str]]:
    """Return, for each kernel of the module ``instructions``, what its pattern finds."""
    reports = compile_for(target, [f"{__package__}.instructions"])
    assert not any(report.problem for report in reports)
    return {report.case: list(report.found) for report in reports}


@pytest.mark.parametrize(
    ("target", "plain", "afresh"),
    [
        ("sm_90", r"ld\.global\.\S+", r"ld\.volatile\.global\.\S+"),
        pytest.param(
            *("gfx942", r"s_load_dword .*", r"\w+_load_\w+ .* sc0 sc1"), marks=pytest.mark.full
        ),
    ],
)
def test_an_upload_is_loaded_from_memory_itself(target, plain, afresh):
    """All but the index of the upload, which the device has written."""
    loads = _instructions(target)["fetch_upload"]
    assert len([load for load in loads if re.fullmatch(plain, load)]) == 1
    others = [load for load in loads if not re.fullmatch(plain, load)]
    assert len(others) >= 3
    assert all(re.fullmatch(afresh, load) for load in others)


@pytest.mark.parametrize("vocab", [151_936, 1000])
def test_a_group_of_a_shard_is_summed_as_one_of_whole_logits(vocab):
    """Whether rows are aligned or not, the same threads add up the same logits."""
    found = _instructions("sm_90")
    whole, shard = (found[f"group_sums-float32-{vocab}{ranks}"] for ranks in ("", "-2-ranks"))
    assert whole.count("v4.b32" if vocab == 151_936 else "b32") > 3
    assert [each for each in shard if each != "b32"] == [each for each in whole if each != "b32"]


def test_one_thread_looks_whether_a_rank_has_failed():
    """In the host's memory, which answers each warp that reads the same word for itself."""
    (waits,) = (each for case, each in _instructions("sm_90").items() if "all_reduce" in case)
    assert [each.partition(".global.")[2] for each in waits].count("b32") == 1
    assert all(each.startswith("@") for each in waits)


def test_sm_89_encodes_fp8_with_one_rounding():
    """Triton's own cast goes through float16 there before 3.9, and rounds twice."""
    found = _instructions("sm_89")
    assert len(found) == 2
    conversions = [each for codes in found.values() for each in codes if each.startswith("cvt.")]
    assert set(conversions) == {"cvt.rn.satfinite.e4m3x2.f32"}


@pytest.mark.parametrize("target", ["sm_89", "sm_90"])
def test_a_quantized_token_keeps_nan(target):
    """No bound, which would make a number of it, comes between a division and its conversion."""
    instructions = _instructions(target)
    (found,) = (each for case, each in instructions.items() if "quantize_tokens" in case)
    divided = found[found.index("div.rn.f32") :]
    assert set(divided) == {"div.rn.f32", "cvt.rn.satfinite.e4m3x2.f32"}


ARRIVAL = "\t@%p70 mbarrier.arrive.shared::cta.b64 _, [%r379];"


@pytest.mark.parametrize(
    ("before", "early"),
    [
        (["\tld.shared.b32 %r1, [%r2];", "\tbar.sync \t0, 128;"], 0),
        (["\tbar.warp.sync \t-1;", "\t// begin inline asm", "\tadd.s32 %r1, %r2, 4;"], 0),
        (["\tbarrier.sync \t1;"], 0),
        (["\tbar.warp.sync \t-1;", "$L__tmp315:", "\t.loc\t2 135 38"], 0),
        (["\tbar.sync \t0, 128;", "\tld.shared.b32 %r1, [%r2];"], 1),
        (["\tbar.sync \t0, 128;", "\tst.shared.b32 [%r2], %r1;", "\tadd.s32 %r1, %r2, 4;"], 1),
        (["\tbar.sync \t0, 128;", "$L__BB0_7:"], 1),
        (["\tbar.sync \t0, 128;", "\t@%p1 bra \t$L__BB0_7;"], 1),
        (["\tbar.sync \t0, 128;", "\twgmma.wait_group.sync.aligned 0;"], 1),
        (["\tmbarrier.try_wait.parity.shared::cta.b64 complete, [%r2], %r3;"], 1),
        ([], 1),
    ],
)
def test_an_arrival_needs_a_barrier_of_its_warps(before: list[str], early: int):
    assert aot.early_arrivals("\n".join([*before, ARRIVAL])) == early
    expecting = "\t@%p70 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r403], 32768;"
    assert aot.early_arrivals("\n".join([*before, expecting])) == 0


ACCUMULATE = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1,%f2}, "


@pytest.mark.parametrize(
    ("left", "pending", "early"),
    [("{%r1,%r2,%r3,%r4}", 1, 1), ("{%r1,%r2,%r3,%r4}", 0, 0), ("%rd1", 1, 0)],
)
def test_registers_of_products_that_run_on_into_the_next_step_are_found(
    left: str, pending: int, early: int
):
    step = (
        f"\t{ACCUMULATE}{left}, %rd2, %p1, 1, 1, 0;",
        "\twgmma.commit_group.sync.aligned;",
        f"\twgmma.wait_group.sync.aligned {pending};",
        "\t@%p2 bra \t$L__BB0_3;",
    )
    assert aot.early_reuses("\n".join(["$L__BB0_3:", *step])) == early
    assert aot.early_reuses("\n".join([*step, "$L__BB0_3:"])) == 0  # no loop
    waits_for_memory = [*step[:-1], "$L__BB0_3:", step[-1]]
    assert aot.early_reuses("\n".join(waits_for_memory)) == 0  # has no product of its own
    waits = ["$L__BB0_3:", "\twgmma.wait_group.sync.aligned 0;", *step]
    assert aot.early_reuses("\n".join(waits)) == 0  # at the start of the next step


def test_amd_targets_have_no_compute_capability():
    assert TARGETS["sm_120"].capability == (12, 0)
    assert TARGETS["gfx942"].capability is None


def test_a_pointer_is_aligned():
    assert aot.pointer(torch.bfloat16).data_ptr() % 16 == 0


def test_an_unknown_target_is_named():
    with pytest.raises(ConfigError, match=r"target: expected one of sm_80, .*, got 'sm_75'"):
        compile_for("sm_75", ["no_such_module"])


def test_a_failing_child_is_reported():
    with pytest.raises(RuntimeError, match=r"exited 1: (.|\n)*no_such_module"):
        compile_for("sm_90", ["no_such_module"])


@pytest.mark.parametrize(
    "arguments", [(), ("sm_90",), ("sm_90[2]", "json"), ("sm_90[0::0]", "json")]
)
def test_wrong_arguments_print_the_usage(capsys, arguments):
    assert aot.main(arguments) == 2
    assert "usage: python -m mrv1.testing.aot" in capsys.readouterr().err
