"""ModelRunner driven by plans written by hand: a foreign scheduler needs nothing else."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mrv1 import CapacityError, EngineConfig, ModelRunner, SamplingParams, StepError, StepPlan
from mrv1.kernels import reference
from mrv1.runner import SlotRequest
from mrv1.runner.device_step import NEXT_UPLOAD
from mrv1.runner.profile import run_profile_step, warm_up
from tests.models.families import tiny_checkpoint

PROMPTS = ([5, 9, 23, 41, 77], [11] * 20)
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3")
    return path


def make_runner(checkpoint: Path, **options: object) -> ModelRunner:
    config = EngineConfig(
        **(
            {"model": str(checkpoint), "dtype": "float32", "num_kv_blocks": 16, "max_num_seqs": 4}
            | options
        )
    )
    return ModelRunner(config, progress=False)


@pytest.fixture
def runner(checkpoint):
    runner = make_runner(checkpoint)
    yield runner
    runner.close()


def enter(
    req_id: str,
    slot: int,
    prompt: list[int],
    *,
    epoch: int = 0,
    num_prompt: int | None = None,
    **fields: object,
):
    return SlotRequest(
        req_id=req_id,
        slot=slot,
        epoch=epoch,
        token_ids=np.array(prompt, dtype=np.int32),
        prompt_len=len(prompt) if num_prompt is None else num_prompt,
        **(
            {"max_total_tokens": 512, "sampling_params": SamplingParams(temperature=0), "seed": 0}
            | fields
        ),
    )


def make_plan(
    step_id: int,
    rows: dict[str, tuple[int, int, tuple[int, ...]]],
    *,
    epoch: int = 0,
    **fields: object,
) -> StepPlan:
    """Return a plan; ``rows``: request id -> (slot, number of tokens, new block ids)."""
    return StepPlan(
        step_id=step_id,
        req_ids=tuple(rows),
        slots=np.array([slot for slot, _, _ in rows.values()], dtype=np.int32),
        epochs=np.full(len(rows), epoch, dtype=np.int32),
        num_scheduled_tokens=np.array([n for _, n, _ in rows.values()], dtype=np.int32),
        new_block_ids={slot: (ids,) for slot, _, ids in rows.values() if ids},
        **fields,
    )


def run_by_hand(runner: ModelRunner, slots: tuple[int, int], blocks: tuple[int, int, int]) -> dict:
    """Run two requests in given slots and blocks, the second in two chunks; return the tokens."""
    first, second = slots
    a, b, c = blocks
    plans = [
        make_plan(
            0,
            {"a": (first, 5, (a,)), "b": (second, 13, (b,))},
            new=(enter("a", first, PROMPTS[0]), enter("b", second, PROMPTS[1])),
        ),
        make_plan(1, {"b": (second, 7, (c,)), "a": (first, 1, ())}),
        *(make_plan(n, {"a": (first, 1, ()), "b": (second, 1, ())}) for n in (2, 3, 4)),
        make_plan(5, {"b": (second, 1, ())}, finished=(first,)),
    ]
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    for plan in plans:
        output = runner.execute(plan).result()
        for req_id, new in zip(output.req_ids, output.token_ids, strict=True):
            tokens[req_id].extend(new)
    return tokens


@pytest.fixture(scope="module")
def expected(checkpoint) -> dict[str, list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    whole = [
        model.generate(
            torch.tensor([p]), do_sample=False, max_new_tokens=5, eos_token_id=None, pad_token_id=0
        )
        for p in PROMPTS
    ]
    return {
        name: out[0, len(p) :].tolist() for name, p, out in zip("ab", PROMPTS, whole, strict=True)
    }


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [(0, 1), (3, 2)])
@pytest.mark.parametrize("blocks", [(0, 1, 2), (15, 3, 9)])
def test_plans_by_hand_give_transformers_tokens_in_any_slots_and_blocks(
    runner, expected, slots, blocks
):
    reference.calls.clear()
    assert run_by_hand(runner, slots, blocks) == expected
    if runner.path == "triton":
        assert not reference.calls, "a GPU run must not touch the torch reference"
    else:
        assert reference.calls["paged_decode_attention"] > 0


@pytest.mark.gpu
def test_a_request_in_a_reused_slot_gets_the_tokens_of_a_fresh_runner(runner, expected):
    assert run_by_hand(runner, (0, 1), (0, 1, 2)) == expected
    long_gone = make_plan(
        6, {"c": (0, 4, (7,))}, epoch=1, new=(enter("c", 0, [8, 8, 8, 8], epoch=1),), finished=(1,)
    )
    fresh = make_runner(Path(runner.config.model))
    alone = make_plan(0, {"c": (2, 4, (4,))}, new=(enter("c", 2, [8, 8, 8, 8]),))
    assert runner.execute(long_gone).result().token_ids == fresh.execute(alone).result().token_ids
    fresh.close()


@pytest.mark.gpu
def test_a_resumed_request_continues_with_its_next_token(runner, expected):
    first = make_plan(0, {"a": (0, 5, (0,))}, new=(enter("a", 0, PROMPTS[0]),))
    tokens = list(runner.execute(first).result().token_ids[0])
    history = PROMPTS[0] + expected["a"][:2]
    resumed = make_plan(
        1,
        {"a": (3, 7, (5,))},
        epoch=4,
        preempted=(0,),
        resumed=(enter("a", 3, history, epoch=4, num_prompt=5),),
    )
    tokens += [*expected["a"][1:2], *runner.execute(resumed).result().token_ids[0]]
    assert tokens == expected["a"][:3]
    assert runner.state.slots.num_tokens[3].item() - runner.state.slots.prompt_len[3].item() == 3


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (make_plan(0, {"x": (0, 1, (0,))}), r"expected epochs \[-1\] of slots \[0\] .*got \[0\]"),
        (make_plan(0, {"x": (0, 1, (0,))}, epoch=-1), r"expected epochs \[-1\] of slots \[0\]"),
        (make_plan(0, {"x": (9, 1, (0,))}), r"slots: expected 0 to 3, got \[9\]"),
        (
            make_plan(0, {"a": (0, 1, (0,))}, new=(enter("a", 0, [5] * 513),)),
            "token_ids of 'a': expected 1 to 512 tokens, got 513",
        ),
        (
            make_plan(0, {"a": (0, 6, (0,))}, new=(enter("a", 0, PROMPTS[0]),)),
            r"num_scheduled_tokens: expected 1 to \[5\], got \[6\]",
        ),
        (
            make_plan(0, {"a": (0, 2, (0,)), "b": (0, 2, (1,))}, new=(enter("a", 0, PROMPTS[0]),)),
            "slots: expected one row per slot",
        ),
        (
            make_plan(0, {"a": (0, 5, (16,))}, new=(enter("a", 0, PROMPTS[0]),)),
            r"new_block_ids: expected ids in \[0, 16\), got \(16,\)",
        ),
        (
            make_plan(
                0,
                {"a": (0, 5, (0,))},
                new=(enter("a", 0, PROMPTS[0]), enter("b", 0, PROMPTS[1])),
            ),
            "expected slot 0 free for 'b', got it in use",
        ),
        (
            replace(
                make_plan(0, {"a": (0, 5, (0,))}, new=(enter("a", 0, PROMPTS[0]),)),
                new_block_ids={-1: ((1,),)},
            ),
            r"new_block_ids: expected slots of the step's rows, got \[-1\]",
        ),
        (
            make_plan(0, {"a": (0, 5, tuple([1] * 33))}, new=(enter("a", 0, PROMPTS[0]),)),
            "expected at most 32 blocks in slot 0, got 33",
        ),
    ],
)
def test_a_plan_that_contradicts_the_slots_is_a_step_error(runner, plan, message):
    with pytest.raises(StepError, match=message):
        runner.execute(plan)


def test_a_wrong_plan_that_continues_another_is_refused(checkpoint):
    runner = make_runner(checkpoint, device="cpu")
    rows = {"a": (0, 5, (0, 1)), "b": (1, 20, (2, 3))}
    entering = (enter("a", 0, PROMPTS[0]), enter("b", 1, PROMPTS[1]))
    runner.execute(make_plan(0, rows, new=entering)).result()
    steady = [
        make_plan(n, {"a": (0, 1, ()), "b": (1, 1, ())}, continues=n - 1) for n in range(1, 6)
    ]
    tokens = [runner.execute(plan).result().token_ids for plan in steady[:3]]
    assert all(map(len, sum(tokens, ())))
    for wrong, message in (
        ({"continues": 2}, "continues: expected None or the last step, 3, got 2"),
        ({"num_scheduled_tokens": np.array([1, 2], dtype=np.int32)}, "num_scheduled_tokens"),
        ({"finished": (1,)}, "continues: expected None in a plan where a request enters, leaves"),
        ({"finished": (1,), "continues": None}, r"expected epochs \[ 0 -1\]"),
        (
            {"new": (enter("c", 0, [5]),), "continues": None},
            "expected slot 0 free for 'c', got it in use",
        ),
    ):
        with pytest.raises(StepError, match=message):
            runner.execute(replace(steady[3], **wrong))
    runner.close()


def test_a_plan_continues_rows_in_the_order_of_the_callers_plan(runner, expected):
    """Step 1 computes a's row before b's, which has two tokens; its plan names b first."""
    plans = [
        make_plan(
            0,
            {"b": (1, 18, (3, 4)), "a": (0, 5, (1, 2))},
            new=(enter("b", 1, PROMPTS[1]), enter("a", 0, PROMPTS[0])),
        ),
        make_plan(1, {"b": (1, 2, ()), "a": (0, 1, ())}),
        *(make_plan(n, {"b": (1, 1, ()), "a": (0, 1, ())}, continues=n - 1) for n in (2, 3)),
        make_plan(4, {"b": (1, 1, ()), "a": (0, 1, ())}),
    ]
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    for plan in plans:
        output = runner.execute(plan).result()
        for req_id, new in zip(output.req_ids, output.token_ids, strict=True):
            tokens[req_id].extend(new)
    assert tokens == {name: expected[name][:num] for name, num in (("a", 5), ("b", 4))}


def spoil(runner: ModelRunner, slot: int, column: int, block_id: int) -> None:
    runner.block_tables.tables.block_tables[slot, column] = block_id


PREFILL = make_plan(0, {"b": (1, 18, (3, 4))}, new=(enter("b", 1, PROMPTS[1]),))
NEXT = make_plan(1, {"b": (1, 2, ())})


@pytest.mark.parametrize("block_id", [-1, -5, 16, 2**31 - 1])
def test_debug_names_a_block_id_out_of_the_pool(checkpoint, block_id):
    runner = make_runner(checkpoint, debug=True, device="cpu")
    runner.execute(PREFILL).result()
    spoil(runner, 1, 0, block_id)
    before = runner.kv_cache.layers[0].k.clone()
    with pytest.raises(
        StepError,
        match=r"step 1 \(1 requests\): block table of request 'b', KV head 0: expected a block id "
        rf"in \[0, 16\) in column 0, got {block_id} \(2 such entries in the step\)",
    ):
        runner.execute(NEXT)
    assert torch.equal(runner.kv_cache.layers[0].k.view(torch.uint8), before.view(torch.uint8))
    runner.close()


def test_a_plan_that_forgets_a_block_is_refused(checkpoint):
    """At a request's entry, in a slot whose former request had the block; when the request grows
    past its blocks; and in a steady step."""
    runner = make_runner(checkpoint, device="cpu")
    runner.execute(PREFILL).result()
    new = (enter("c", 1, PROMPTS[1], epoch=1),)
    for blocks, ends in (((3,), 18), ((), 18)):
        with pytest.raises(
            StepError, match=f"expected blocks for the {ends} tokens of 'c', got {len(blocks)} blo"
        ):
            runner.execute(make_plan(1, {"c": (1, 18, blocks)}, epoch=1, new=new, finished=(1,)))
    new = (enter("c", 1, PROMPTS[1], epoch=2),)
    first = make_plan(2, {"c": (1, 16, (3,))}, epoch=2, new=new, finished=(1,))
    runner.execute(first).result()
    with pytest.raises(StepError, match=r"blocks for the 18 tokens of 'c', got 1 blocks of 16"):
        runner.execute(make_plan(3, {"c": (1, 2, ())}, epoch=2))
    runner.execute(make_plan(4, {"c": (1, 4, (4,))}, epoch=2)).result()
    one = {"c": (1, 1, ())}
    for step_id in range(5, 17):  # tokens 21 to 32
        plan = make_plan(step_id, one, epoch=2, continues=step_id - 1)
        assert len(runner.execute(plan).result().token_ids[0]) == 1
    with pytest.raises(StepError, match=r"blocks for the 33 tokens of 'c', got 2 blocks of 16"):
        runner.execute(make_plan(17, one, epoch=2, continues=16))
    runner.close()


def test_a_refused_plan_leaves_no_trace(checkpoint, expected):
    """Its requests have not entered, so that no row goes on with the slot's former request; and
    none of its blocks is counted, so that the plan that is right brings all of them."""
    runner = make_runner(checkpoint, device="cpu")
    runner.execute(make_plan(0, {"x": (0, 5, (7,))}, new=(enter("x", 0, [8] * 5),))).result()
    new = (enter("a", 0, PROMPTS[0]), enter("b", 1, PROMPTS[1]))
    rows = {"a": (0, 5, (3,)), "b": (1, 20, (4, 5))}
    right = make_plan(1, rows, new=new, finished=(0,))
    late = replace(new[1], banned_token_sequences=((1,),) * 99)
    for wrong, message in (
        (replace(right, new_block_ids={0: ((3,),), 1: ((4,),)}), "blocks for the 20 tokens"),
        (replace(right, new_block_ids={0: ((99,),), 1: ((4, 5),)}), r"ids in \[0, 16\)"),
        (replace(right, new=(new[0], late)), "bad_words in slot 1: expected at most"),
        (replace(right, new=(new[0], enter("b", 1, [160] * 20))), r"ids in \[0, 160\), got 160"),
        (replace(right, new=(new[0], enter("b", 1, [-1] * 20))), r"ids in \[0, 160\), got -1"),
        (
            replace(right, new=(new[0], replace(new[1], prompt_len=21))),
            "prompt_len of 'b': expected 1 to 20 tokens, got 21",
        ),
    ):
        with pytest.raises(StepError, match=message):
            runner.execute(wrong)
        with pytest.raises(StepError, match=r"plan: expected epochs \[-1\] of slots \[0\]"):
            runner.execute(make_plan(1, {"a": (0, 5, (3,))}))
    tokens = [runner.execute(right).result().token_ids]
    for step_id in (2, 3, 4, 5):
        plan = make_plan(step_id, {"a": (0, 1, ()), "b": (1, 1, ())})
        with pytest.raises(StepError, match="at most 32 blocks in slot 1"):
            runner.execute(replace(plan, new_block_ids={0: ((1,),), 1: ((2,) * 99,)}))
        tokens.append(runner.execute(plan).result().token_ids)
    assert [a for a, _ in tokens] == [(token,) for token in expected["a"]]
    assert [b for _, b in tokens] == [(token,) for token in expected["b"]]
    runner.close()


def test_the_requests_of_a_failed_step_have_to_enter_again(checkpoint, expected):
    """The device has perhaps not computed what the host has counted."""
    runner = make_runner(checkpoint, device="cpu")

    def fail(ready: object) -> None:
        raise OSError("no room")

    prefill = make_plan(0, {"a": (0, 5, (0,))}, new=(enter("a", 0, PROMPTS[0]),))
    for plan in (prefill, make_plan(1, {"a": (0, 1, ())})):
        runner.set_kv_listener(fail)
        with pytest.raises(StepError, match="no room"):
            runner.execute(plan)
        runner.set_kv_listener(None)
        with pytest.raises(StepError, match=r"plan: expected epochs \[-1\] of slots \[0\]"):
            runner.execute(make_plan(1, {"a": (0, 1, ())}))
        assert runner.execute(prefill).result().token_ids == ((expected["a"][0],),)
    runner.close()


def test_a_plan_with_another_requests_id_is_refused(checkpoint):
    runner = make_runner(checkpoint, device="cpu")
    runner.execute(PREFILL).result()
    other = make_plan(1, {"a": (1, 2, ())})
    with pytest.raises(StepError, match=r"req_ids: expected \('b',\), .* got \('a',\)"):
        runner.execute(other)
    empty = make_plan(1, {})
    with pytest.raises(StepError, match="plan: expected a row for at least one request"):
        runner.execute(empty)
    again = make_plan(1, {"a": (1, 5, (0,))}, epoch=1, new=(enter("a", 1, PROMPTS[0], epoch=1),))
    with pytest.raises(StepError, match="plan: expected slot 1 free for 'a', got it in use"):
        runner.execute(again)
    assert len(runner.execute(NEXT).result().token_ids[0]) == 1
    runner.close()


def test_debug_ignores_block_ids_that_no_query_sees(tmp_path):
    """A window of 3: positions 18 and 19 see no token of block 0."""
    tiny_checkpoint(tmp_path, "mistral", sliding_window=3)
    runner = make_runner(tmp_path, debug=True, device="cpu")
    runner.execute(PREFILL).result()
    for column in (0, 2, 31):
        spoil(runner, 1, column, -1)
    assert len(runner.execute(NEXT).result().token_ids[0]) == 1
    runner.close()


def test_debug_changes_no_token(checkpoint, expected):
    runner = make_runner(checkpoint, debug=True, device="cpu")
    assert run_by_hand(runner, (3, 2), (15, 3, 9)) == expected
    runner.close()


def test_a_closed_runner_refuses_plans(checkpoint):
    runner = make_runner(checkpoint, device="cpu")
    runner.close()
    with pytest.raises(RuntimeError, match="expected an open runner"):
        runner.execute(make_plan(0, {"x": (0, 1, (0,))}))


def test_a_runner_of_a_gpu_refuses_to_run_in_a_forked_child(checkpoint):
    """And touches nothing there, where every call of CUDA would fail."""
    runner = make_runner(checkpoint, device="cpu")
    runner.device = torch.device("cuda")
    runner.after_fork()
    for call in (runner.check_usable, runner.sleep, lambda: runner.execute(None)):
        with pytest.raises(RuntimeError, match="process that made it, got one in a forked child"):
            call()
    runner.discard()
    runner.close()
    with pytest.raises(RuntimeError, match="expected an open runner, got one that was closed"):
        runner.check_usable()


def test_kv_report_counts_every_byte(runner):
    report = runner.kv_report()
    heads, head_dim, layers = 2, 32, 2
    assert report["token_bytes"] == layers * 2 * heads * head_dim * 4
    assert report["block_bytes"] == BLOCK_SIZE * report["token_bytes"]
    assert report["total_bytes"] == 16 * report["block_bytes"]
    held = sum(cache.k.nbytes + cache.v.nbytes for cache in runner.kv_cache.layers)
    assert held == report["total_bytes"]


def test_without_num_kv_blocks_the_cache_has_the_blocks_that_can_be_used(checkpoint):
    runner = make_runner(checkpoint, num_kv_blocks=None, max_num_seqs=3, device="cpu")
    assert runner.kv_cache.num_blocks == (3 * 512 // BLOCK_SIZE,)
    runner.close()


def test_a_caller_may_decide_on_the_blocks_once_the_model_is_loaded(checkpoint, expected):
    config = EngineConfig(
        model=str(checkpoint), dtype="float32", max_num_seqs=4, kv_cache_memory_bytes=1 << 16
    )
    runner = ModelRunner(config, allocates=False, progress=False)
    assert runner.measure_kv_cache_bytes() == 1 << 16
    for call in (runner.check_usable, runner.sleep, lambda: runner.execute(make_plan(0, {}))):
        with pytest.raises(RuntimeError, match="allocate_kv_cache"):
            call()
    runner.allocate_kv_cache(16, progress=False)
    assert runner.kv_cache.num_blocks == (16,)
    assert run_by_hand(runner, (0, 1), (0, 1, 2)) == expected
    with pytest.raises(RuntimeError, match="got one with a KV cache"):
        runner.allocate_kv_cache()
    runner.close()
    with pytest.raises(RuntimeError, match="got one that was closed"):
        runner.measure_kv_cache_bytes()


def test_the_profile_steps_block_table_covers_every_token(checkpoint):
    """A block table narrower than a row's length is read past its end, where ids are garbage."""
    runner = make_runner(
        checkpoint, device="cpu", max_num_batched_tokens=70, max_model_len=40, max_num_seqs=4
    )
    widths = []
    forward = runner.model.forward

    def watched(batch, caches):
        widths.append(batch.block_table.shape[1])
        assert batch.seq_lens.max() <= widths[-1] * BLOCK_SIZE
        assert (batch.block_table == -1).all()
        assert (batch.slot_mapping == -1).all()
        return forward(batch, caches)

    runner.model.forward = watched
    run_profile_step(runner._step)
    assert widths == [3, 3]
    runner.close()


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_on_a_gpu_the_cache_stays_within_its_share_of_the_memory(checkpoint):
    runner = make_runner(
        checkpoint, num_kv_blocks=None, max_num_seqs=256, gpu_memory_utilization=0.9
    )
    total = torch.cuda.get_device_properties(0).total_memory
    assert runner.kv_cache.num_blocks == (256 * 512 // BLOCK_SIZE,)  # 256 requests need no more
    assert runner.kv_cache.nbytes < 0.9 * total
    runner.close()


@pytest.fixture
def _bounded_address_space():
    """Limit addresses to 16 TiB: a kernel that overcommits would grant memory it does not have."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**44, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("_bounded_address_space")
def test_a_cache_that_cannot_be_allocated_is_a_capacity_error(checkpoint):
    with pytest.raises(CapacityError, match=r"blocks of 16384 bytes do not fit on cpu"):
        make_runner(checkpoint, num_kv_blocks=2**31 - 1, device="cpu")


def test_the_start_line_names_the_model_the_path_and_the_blocks(checkpoint):
    runner = make_runner(checkpoint, device="cpu")
    line = runner.describe()
    assert "Qwen3ForCausalLM on cpu: CPU reference (torch), float32" in line
    assert "16 blocks of 16 tokens" in line
    runner.close()


@pytest.mark.gpu
@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_the_warm_up_changes_no_state_and_no_page(checkpoint, max_num_seqs):
    """It launches steps of padding, which write only outputs that are never read."""
    runner = make_runner(checkpoint, max_num_seqs=max_num_seqs)
    runner._step.slots.buffer.fill_(7)
    runner.state.slots.stopped.zero_()
    runner._step.slots[NEXT_UPLOAD].zero_()
    before = runner._step.slots.buffer.clone()
    for cache in runner.kv_cache.layers:
        cache.k.fill_(3)
    warm_up(runner._step)
    assert torch.equal(runner._step.slots.buffer, before)
    assert all((cache.k == 3).all() for cache in runner.kv_cache.layers)
    assert not runner._outputs.views(max_num_seqs, 1)[0].any()
    runner.close()
