"""A draft head beside a model: other steps, the same tokens."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mrv1 import LLM, CapacityError, ConfigError, EngineConfig, SamplingParams
from mrv1.config import checkpoint_dir
from mrv1.engine.core import EngineCore
from mrv1.kernels.registry import select_ops
from mrv1.models import load_model
from tests.engine.test_overlap import drained, make_core, run
from tests.engine.test_speculation import logprobs_of, schedules
from tests.models.draft_heads import write_eagle3, write_mtp, write_target
from tests.models.families import SLIDING
from tests.runner.test_cuda_graph import EvenTokens, LaunchedGraphs

EOS = 2


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return (checkpoint, model, options, plain head, plain model) by method, in float64."""
    made = {}
    for method, family in (("eagle3", "llama"), ("mtp", "ernie4_5_moe")):
        path = tmp_path_factory.mktemp(method)
        target = write_target(path, family, eos_token_id=EOS)
        if method == "eagle3":
            plain = write_eagle3(path / "head", target)
            options = {"method": "eagle3", "model": str(path / "head"), "num_tokens": 3}
        else:
            plain = write_mtp(path, target)
            options = {"method": "ernie_mtp", "num_tokens": 2}
        ops = select_ops("reference")
        model = load_model(path, device="cpu", dtype=torch.float64, ops=ops, progress=False)
        made[method] = (path, model), options, plain, target
    return made


def give_known_drafts(core: EngineCore, tokens: dict[str, list[int]], wrong: int) -> None:
    """Let steps verify what each request draws next, in place of a head's drafts.

    One in ``wrong`` is not right; 0 = all are right.
    """
    step = core.runner.device_step
    drafts, slots = step.drafts, step.state.slots
    of_head = drafts.verified

    def verified(staged):
        staged = of_head(staged)
        for row, slot in enumerate(staged.idx_mapping.tolist()):
            if slot < 0:
                continue  # padding
            req_id, start = step.state._req_ids[slot], int(slots.num_tokens[slot])
            following = tokens[req_id][start : start + drafts.num_drafts]
            for place, token in enumerate(following):
                is_wrong = wrong and zlib.crc32(f"{req_id} {start + place}".encode()) % wrong == 0
                staged.draft_token_ids[row, place] = 3 if is_wrong else token
        return staged

    drafts.verified = verified


def tokens_of(requests) -> dict[str, list[int]]:
    return {each.req_id: [*each.prompt_token_ids, *each.output_token_ids] for each in requests}


@settings(max_examples=max(settings.default.max_examples // 4, 4))  # each makes two engines
@given(
    method=st.sampled_from(["eagle3", "mtp"]),
    schedule=schedules(),
    caching=st.booleans(),
    blocks=st.sampled_from([9, 12, 30]),
    overlap=st.sampled_from([True, True, False]),
    wrong=st.sampled_from([None, 0, 2, 5]),
)
def test_a_head_changes_no_output(models, method, schedule, caching, blocks, overlap, wrong):
    """9 blocks force preemption; a random head drafts wrongly, known drafts are mostly right."""
    model, speculative, *_ = models[method]
    options = {"num_kv_blocks": blocks, "enable_prefix_caching": caching}
    core = make_core(model, **options)
    plain = run(core, schedule)
    drained(core)
    core = make_core(model, **options, overlap=overlap, speculative=speculative)
    if wrong is not None:
        give_known_drafts(core, tokens_of(plain), wrong)
    drafted = run(core, schedule)
    drained(core)
    for request, other, (_, _, _, aborted) in zip(plain, drafted, schedule, strict=True):
        assert request.error is None
        assert other.error is None
        if aborted is None:
            assert other.output_token_ids == request.output_token_ids
            assert other.finish_reason == request.finish_reason
            assert other.stop_reason == request.stop_reason
            assert logprobs_of(other) == pytest.approx(logprobs_of(request), abs=1e-9)
        else:  # the abort comes some tokens earlier or later; until then tokens are equal
            shorter = min(len(request.output_token_ids), len(other.output_token_ids))
            assert other.output_token_ids[:shorter] == request.output_token_ids[:shorter]


def launched(core: EngineCore) -> list[tuple[int, int]]:
    """Return a list that gets, at each launch, the drafts of a row and the steps in flight."""
    execute, launches = core.runner.execute, []

    def counted(plan):
        launches.append((plan.num_device_drafts, len(core._in_flight)))
        return execute(plan)

    core.runner.execute = counted
    return launches


def test_a_head_that_memory_cannot_hold_is_refused(models, monkeypatch):
    model, speculative, *_ = models["eagle3"]

    def lacking(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("mrv1.runner.start.load_head", lacking)
    with pytest.raises(CapacityError, match="speculative: expected room for the draft head"):
        make_core(model, speculative=speculative)


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
@pytest.mark.parametrize("overlap", [True, False])
def test_right_drafts_give_more_than_one_token_a_step(models, method, overlap):
    model, speculative, *_ = models[method]
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=25, ignore_eos=True)
    prompts = {"a": [5, 6, 7], "b": [9]}
    core = make_core(model, overlap=overlap)
    plain = [core.add_request(name, prompt, params) for name, prompt in prompts.items()]
    while core.has_unfinished_requests:
        core.step()
    core = make_core(model, overlap=overlap, speculative=speculative)
    give_known_drafts(core, tokens_of(plain), 0)
    launches = launched(core)
    requests = [core.add_request(name, prompt, params) for name, prompt in prompts.items()]
    while core.has_unfinished_requests:
        core.step()
    assert tokens_of(requests) == tokens_of(plain)
    count = speculative["num_tokens"]
    # The prompt's step gives a token, the others 1 + count, of 24.
    num_steps = -(-24 // (1 + count))
    assert launches[0] == (0, 0)
    assert [drafts for drafts, _ in launches[1:]] == [count] * num_steps
    assert {in_flight for _, in_flight in launches[2:3]} == {int(overlap)}
    metrics = core.metrics()
    assert metrics["num_drafts"] == 2 * num_steps
    accepted = 24 - num_steps  # each step's last token is no draft
    assert metrics["num_accepted_tokens"] == metrics["num_draft_tokens"] == 2 * accepted
    assert [each.num_accepted_tokens for each in requests] == [accepted] * 2


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_the_drafts_are_those_of_the_plain_head(models, method):
    """After each step, alone and crowded, in chunks of a prompt and with a prefix hit."""
    model, speculative, head, target = models[method]
    core = make_core(model, speculative=speculative, max_num_batched_tokens=16, overlap=False)
    step = core.runner.device_step
    prompts = {"a": [*range(5, 40)], "b": [9, 11], "c": [*range(5, 40), 77]}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    num_compared = 0
    for joins in range(60):
        for index, (name, prompt) in enumerate(prompts.items()):
            if joins == 4 * index:
                core.add_request(name, prompt, params)
        core.step()
        for request in core.scheduler.running.values():
            token_ids = [*request.prompt_token_ids, *request.output_token_ids]
            if not request.output_token_ids or request.num_cached_tokens:
                continue  # in a cached prefix, the last token's place is of another continuation
            features = head.features(target, token_ids[:-1])
            expected = head.drafts(token_ids, features, speculative["num_tokens"])
            assert step.drafts._drafts[request.slot].tolist() == expected
            num_compared += 1
    assert num_compared > 15


def finished(core: EngineCore, prompts: dict[str, list[int]], params) -> dict[str, list[int]]:
    """Return all tokens of requests that run together."""
    requests = [core.add_request(name, prompt, params) for name, prompt in prompts.items()]
    while core.has_unfinished_requests:
        core.step()
    assert [request.error for request in requests] == [None] * len(requests)
    return tokens_of(requests)


def always_agreeing(path: Path) -> None:
    """Make each next token a function of the newest token alone, and let an MTP block know it."""
    tensors = load_file(path / "model.safetensors")
    size = tensors["model.norm.weight"].numel()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.mtp_emb_norm.0.weight"].fill_(1.0)
    tensors["model.mtp_linear_proj.0.weight"][:] = torch.eye(size, 2 * size)
    save_file(tensors, path / "model.safetensors")


def test_a_head_that_always_agrees_saves_steps(tmp_path):
    write_mtp(tmp_path, write_target(tmp_path, "ernie4_5_moe", eos_token_id=EOS))
    always_agreeing(tmp_path)
    ops = select_ops("reference")
    model = load_model(tmp_path, device="cpu", dtype=torch.float64, ops=ops, progress=False)
    params = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)
    outputs, steps = [], []
    for speculative in (None, {"method": "mtp", "num_tokens": 4}):
        core = make_core((tmp_path, model), speculative=speculative)
        launches = launched(core)
        outputs.append(finished(core, {"a": [5, 6, 7]}, params))
        steps.append(len(launches))
    assert outputs[0] == outputs[1]
    assert steps == [41, 1 + 8]  # 40 tokens, 5 a step
    metrics = core.metrics()
    assert metrics["num_accepted_tokens"] == metrics["num_draft_tokens"] == 4 * 8


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_padding_of_graphs_changes_no_token(models, method):
    """Each step is one that a graph could run, and drafts of requests are those of no graph."""
    model, speculative, *_ = models[method]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=14, ignore_eos=True)
    prompts = {"a": [*range(5, 25)], "b": [9], "c": [4, 5, 6]}
    plain = finished(make_core(model), prompts, params)
    core = make_core(model, speculative=speculative)
    core.runner.device_step.graphs = LaunchedGraphs(core.runner)
    give_known_drafts(core, plain, 3)
    assert finished(core, prompts, params) == plain
    assert core.metrics()["num_accepted_tokens"] > 5
    replayed = core.runner.device_step.graphs.replayed
    assert {shape.has_drafts for shape in replayed} == {True, False}


def test_graphs_keep_no_block_table_of_their_own(models):
    """Those that are captured after the largest have no more memory in the budget."""
    model, speculative, *_ = models["mtp"]
    core = make_core(model, speculative=speculative)
    step, graphs = core.runner.device_step, LaunchedGraphs(core.runner)
    shapes = [each for each in graphs.shapes if each.query_len == 1 and not each.samples]
    with torch.inference_mode():
        kept = [step.run_padding(shape)[0].attention.block_table for shape in shapes]
    assert {len(table) for table in kept} == {shape.num_rows for shape in shapes}
    assert len({table.untyped_storage().data_ptr() for table in kept}) == 1 < len(kept)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_head_on_a_gpu_changes_no_token(models, method, cuda_graphs, device):
    """Also the drafts of a random head, and acceptance of known ones, in graphs."""
    (path, _), speculative, *_ = models[method]
    on_gpu = device.type == "cuda"
    options = {
        "model": str(path), "device": device.type, "num_kv_blocks": 40, "max_num_seqs": 4,
        "max_num_batched_tokens": 64, "max_model_len": 128, "cuda_graphs": cuda_graphs,
        "dtype": "float32" if on_gpu else "float64", "deterministic": on_gpu,
    }  # fmt: skip
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=24, ignore_eos=True)
    prompts = {"a": [*range(5, 45)], "b": [9], "c": [4, 5, 6]}
    found = []
    for drafts in (None, speculative):
        core = EngineCore(EngineConfig(**options, speculative=drafts), progress=False)
        found.append(finished(core, prompts, params))
        core.runner.close()
    assert found[0] == found[1]


def test_a_grammar_goes_without_drafts(models):
    """Its row's mask is for one token; the head still has all keys and values afterwards."""
    model, speculative, *_ = models["mtp"]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    masked, longer = params.clone(), params.clone()
    longer.max_tokens = 30
    masked.structured_output = EvenTokens()
    outputs = []
    for drafts in (None, speculative):
        core = make_core(model, speculative=drafts)
        launches = launched(core)
        request = core.add_request("even", [8, 9], masked)
        other = core.add_request("other", [5, 6, 7], longer)
        while core.has_unfinished_requests:
            core.step()
        outputs.append(tokens_of([request, other]))
    assert outputs[0] == outputs[1]
    assert {drafts for drafts, _ in launches} == {0, 2}


def test_the_end_of_a_prompt_sees_its_range_of_keys(models):
    """A chunk has left one token, which no step with drafts computes: those see all keys."""
    model, speculative, *_ = models["eagle3"]
    prompt = [*range(5, 30)]
    ranges = np.array([[0, end] for end in range(1, 26)])
    ranges[-1] = [23, 25]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = []
    for drafts in (None, speculative):
        core = make_core(model, speculative=drafts, max_num_batched_tokens=24)
        launches = launched(core)
        request = core.add_request("a", prompt, params, attn_mask_offsets=ranges)
        while core.has_unfinished_requests:
            core.step()
        outputs.append(request.output_token_ids)
    assert outputs[0] == outputs[1]
    assert [drafts for drafts, _ in launches[:3]] == [0, 0, 3]


def test_a_stop_string_ends_an_output_within_accepted_drafts(tmp_path):
    """Steps give four tokens, and the text ends in the second of them."""
    checkpoint = checkpoint_dir("tiny")
    target = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    write_eagle3(tmp_path / "head", target, eagle_aux_hidden_state_layer_ids=[0, 1])
    given = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM("tiny", device="cpu", num_kv_blocks=64) as llm:
        free = llm.generate("ROMEO:", params)[0]
        texts = [llm.get_tokenizer().decode(list(free.outputs[0].token_ids[:n])) for n in (7, 8)]
    known = [*free.prompt_token_ids, *free.outputs[0].token_ids]
    with LLM("tiny", device="cpu", num_kv_blocks=64, speculative_config=given) as llm:
        give_known_drafts(llm.engine, {"0": known}, 0)
        stopped = params.clone()
        stopped.stop = [texts[1][len(texts[0]) - 3 :]]
        output = llm.generate("ROMEO:", stopped)[0]
        assert llm.metrics()["num_accepted_tokens"] > 0
        drained(llm.engine)
    (completion,) = output.outputs
    assert completion.token_ids == free.outputs[0].token_ids[:8]
    assert completion.text + stopped.stop[0] == texts[1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stopped.stop[0])


def test_the_layer_is_in_the_cache_and_its_report(models):
    model, speculative, *_ = models["eagle3"]
    plain, drafting = make_core(model), make_core(model, speculative=speculative)
    cache, larger = plain.kv_report(), drafting.kv_report()
    assert larger["total_bytes"] * 2 == cache["total_bytes"] * 3  # two layers and one
    with pytest.raises(ConfigError, match="listener: expected none with a draft head"):
        drafting.set_kv_listener(lambda *_: None)
    drafting.set_kv_listener(None)


# --- what is refused -----------------------------------------------------------------------------

HEAD = {"method": "eagle3", "model": "head"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": {"method": "eagle3"}}, "model: expected a head's checkpoint for 'eag"),
        ({"speculative": {"method": "ngram", "model": "x"}}, "model: expected none with 'ngram'"),
        ({"speculative": {"method": "medusa"}}, r"method: expected one of \('ngram', 'mtp', "),
        (
            {"speculative": {"method": "mtp", "prompt_lookup_min": 2}},
            "prompt_lookup_min: expected method 'ngram' with it, got 'mtp'",
        ),
        ({"speculative": HEAD, "tensor_parallel_size": 2}, r"tensor_parallel_size: expected 1 wi"),
        ({"speculative": HEAD, "head_policy": "ratio=0.5,window=16,sink=16"}, "head_policy: exp"),
        ({"speculative": HEAD, "enable_lora": True}, "enable_lora: expected False with a draft h"),
        ({"speculative": HEAD, "per_head_ids": True}, "per_head_ids: expected False with a draft"),
        (
            {"speculative": HEAD, "kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"},
            "kv_scale: expected 'token' with a draft head",
        ),
        ({"speculative": HEAD, "max_draft_tokens": 7}, "max_draft_tokens: expected 0 or 3 with"),
        ({"speculative": HEAD, "attention_backend": "flashinfer"}, "speculative: expected atten"),
    ],
)
def test_options_that_do_not_go_with_a_head_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="tiny", **options)


@pytest.mark.parametrize(("method", "count"), [("eagle3", 3), ("mtp", 1), ("ernie_mtp", 1)])
def test_a_head_drafts_as_many_as_it_is_made_for(method, count):
    given = {"method": method} | ({"model": "x"} if method == "eagle3" else {})
    assert EngineConfig(model="tiny", speculative=given).num_head_drafts == count
    given["num_tokens"] = 5
    assert EngineConfig(model="tiny", speculative=given).num_head_drafts == 5


def test_models_that_a_head_does_not_fit_are_refused(models, tmp_path):
    llama, eagle3, *_ = models["eagle3"]
    ernie, mtp, *_ = models["mtp"]
    with pytest.raises(ConfigError, match=r"model with an MTP block \(Ernie4_5_MoeForCausalLM"):
        make_core(llama, speculative=mtp)
    with pytest.raises(ConfigError, match="expected one of LlamaForCausalLM, Qwen3ForCausalLM f"):
        make_core(ernie, speculative=eagle3)
    target = write_target(tmp_path, "qwen3", **SLIDING["qwen3"])
    write_eagle3(tmp_path / "head", target)
    given = {"method": "eagle3", "model": str(tmp_path / "head")}
    config = EngineConfig(model=str(tmp_path), device="cpu", num_kv_blocks=9, speculative=given)
    with pytest.raises(ConfigError, match="expected a model without windows, and no head_policy"):
        EngineCore(config, progress=False)
