"""``logprobs=-1``: the whole vocabulary, as transformers has it; its memory is checked first."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrv1 import LLM, ConfigError, EngineConfig, RequestError, SamplingParams
from mrv1 import device as device_facts
from mrv1.config import checkpoint_dir
from mrv1.device import host_memory_bytes, kernel_path
from mrv1.engine import request_limits
from mrv1.kernels import reference
from mrv1.kernels.registry import select_ops
from mrv1.runner.logits import LogitsRows
from mrv1.runner.logprobs import MAX_SEARCHED, Wanted, reports_of

PROMPT = list(range(5, 25))
VOCAB = 2048
MIB = 2**20


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", device="cpu", num_kv_blocks=64, max_logprobs=-1) as llm:
        yield llm


@pytest.fixture(scope="module")
def logprobs_of():
    """Return a function: log-probabilities ``[tokens, vocab]`` of what follows each token."""
    model = AutoModelForCausalLM.from_pretrained(str(checkpoint_dir("tiny")), dtype=torch.float32)

    def logprobs(token_ids) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)

    return logprobs


def check_whole(reported, expected: torch.Tensor) -> None:
    """Compare all log-probabilities of a position, their ranks and their order."""
    assert len(reported) == len(expected) == VOCAB
    values = torch.tensor([reported[token].logprob for token in range(VOCAB)])
    torch.testing.assert_close(values, expected, rtol=0, atol=2e-4)
    likeliest = [logprob.rank for logprob in list(reported.values())[1:]]
    assert likeliest == sorted(likeliest)
    assert {reported[token].rank for token in range(VOCAB)} <= set(range(1, VOCAB + 1))
    assert max(reported.values(), key=lambda each: each.logprob).rank == 1


def test_every_position_has_the_log_softmax_of_transformers(llm: LLM, logprobs_of):
    params = SamplingParams(
        seed=3, max_tokens=3, n=2, logprobs=-1, prompt_logprobs=-1, ignore_eos=True
    )
    (output,) = llm.generate(PROMPT, params)
    for completion in output.outputs:
        expected = logprobs_of([*PROMPT, *completion.token_ids])
        assert len(completion.logprobs) == 3
        for index, reported in enumerate(completion.logprobs):
            check_whole(reported, expected[len(PROMPT) - 1 + index])
        drawn = [
            expected[len(PROMPT) - 1 + i, token] for i, token in enumerate(completion.token_ids)
        ]
        assert completion.cumulative_logprob == pytest.approx(float(sum(drawn)), abs=1e-3)
    first, *others = output.prompt_logprobs
    assert first is None
    assert len(others) == len(PROMPT) - 1
    for reported, at_position in zip(others, logprobs_of(PROMPT), strict=False):
        check_whole(reported, at_position)


def test_requests_of_one_step_have_what_each_asks_for(llm: LLM, logprobs_of):
    asked = [
        {"logprobs": 2}, {"logprobs": -1}, {},
        {"logprob_token_ids": range(9, 10 + MAX_SEARCHED)},
        {"logprobs": 0, "logprob_token_ids": [7]}, {"logprobs": -1, "frequency_penalty": 1.0},
    ]  # fmt: skip
    params = [SamplingParams(temperature=0, max_tokens=2, **each) for each in asked]
    outputs = [output.outputs[0] for output in llm.generate([PROMPT] * 6, params, use_tqdm=False)]
    expected = logprobs_of(PROMPT)[-1]
    (best, second), token = expected.topk(2).indices.tolist(), outputs[0].token_ids[0]
    assert outputs[0].logprobs[0].keys() == {best, second}
    assert outputs[2].logprobs is None
    assert outputs[3].logprobs[0].keys() == {token, *range(9, 10 + MAX_SEARCHED)}
    assert outputs[4].logprobs[0].keys() == {token, 7}
    for index in (1, 5):
        check_whole(outputs[index].logprobs[0], expected)
    for index in (0, 3, 4):
        for each, told in outputs[index].logprobs[0].items():
            assert told.logprob == pytest.approx(float(expected[each]), abs=2e-4)
            assert told == outputs[1].logprobs[0][each]


@pytest.mark.gpu
@pytest.mark.parametrize("num_positions", [1, 3])
@pytest.mark.parametrize("vocab_size", [300, 1500])
def test_reports_are_those_of_the_oracle(device, num_positions: int, vocab_size: int):
    """Equal logits, a token at -inf, and a row without a drawn token."""
    generator = torch.Generator().manual_seed(vocab_size + num_positions)
    many = tuple(range(vocab_size))[::-1]
    wanted = [
        Wanted(0, 3, (5, 1)), Wanted(1, vocab_size), Wanted(2, 0, many), Wanted(4, 0),
        Wanted(5, vocab_size, many),
        *(Wanted(row, vocab_size) for row in range(6, 20 if num_positions == 1 else 9)),
    ]  # fmt: skip
    num_rows = len(wanted) * num_positions
    logits = torch.randint(-40, 40, (num_rows, vocab_size), generator=generator).float()
    logits[:, 4] = -torch.inf
    drawn = torch.randint(0, vocab_size, (num_rows,), generator=generator)
    drawn[num_positions] = -1
    ops = select_ops(kernel_path(device))
    given = LogitsRows(logits.to(device))
    reports = reports_of(wanted, drawn.to(device), given.at, ops, chunk_rows=num_rows)
    if device.type == "cuda":
        torch.cuda.synchronize()
    found: dict = {}
    for report in reports:
        found |= report.read()
    assert found.keys() == {each.row for each in wanted}
    for index, each in enumerate(wanted):
        rows = slice(index * num_positions, (index + 1) * num_positions)
        ids = torch.tensor(each.token_ids, dtype=torch.int64).repeat(num_positions, 1)
        ids = torch.cat([drawn[rows, None], ids], dim=1)
        logprobs, ranks, top, top_logprobs = reference.top_logprobs(
            logits[rows], ids, each.num_top
        )
        got, k = found[each.row], 1 + each.num_top
        assert torch.equal(torch.from_numpy(got.token_ids[:, 1:k]), top)
        torch.testing.assert_close(
            torch.from_numpy(got.logprobs[:, 1:k]), top_logprobs, rtol=0, atol=1e-4
        )
        for columns, of_ids in ((slice(1), slice(1)), (slice(k, None), slice(1, None))):
            assert torch.equal(torch.from_numpy(got.token_ids[:, columns]), ids[:, of_ids])
            assert torch.equal(torch.from_numpy(got.ranks[:, columns]), ranks[:, of_ids])
            torch.testing.assert_close(
                torch.from_numpy(got.logprobs[:, columns]), logprobs[:, of_ids], rtol=0, atol=1e-4
            )
        greater = (logits[rows, None, :] > logits[rows].gather(1, top)[:, :, None]).sum(-1)
        assert torch.equal(torch.from_numpy(got.ranks[:, 1:k]), 1 + greater)


def test_processed_log_probabilities_are_of_the_filtered_logits(logprobs_of):
    options = {"max_logprobs": VOCAB, "logprobs_mode": "processed_logprobs"}
    with LLM("tiny", device="cpu", num_kv_blocks=16, **options) as llm:
        params = SamplingParams(temperature=0.5, top_k=9, max_tokens=1, logprobs=-1)
        (position,) = llm.generate(PROMPT, params)[0].outputs[0].logprobs
    best = (2 * logprobs_of(PROMPT)[-1]).topk(9)
    kept = {token: told.logprob for token, told in position.items() if told.logprob > -torch.inf}
    expected = dict(zip(best.indices.tolist(), best.values.log_softmax(-1).tolist(), strict=True))
    assert len(position) == VOCAB
    assert kept == pytest.approx(expected, abs=1e-3)


# --- limits and memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_the_engine_limits_the_number(name: str):
    params = SamplingParams(**{name: -1})
    for limit in (-1, VOCAB, VOCAB + 1):
        request_limits.check_params(params, EngineConfig(model="m", max_logprobs=limit), VOCAB)
    message = (
        rf"^{name}: expected at most 20 tokens, got -1, the 2048 of the vocabulary; raise max_"
    )
    with pytest.raises(RequestError, match=message):
        request_limits.check_params(params, EngineConfig(model="m"), VOCAB)


@pytest.mark.parametrize("limit", [0, -2, -1.0, True])
def test_a_limit_is_a_count_or_minus_one(limit):
    expected = f"max_logprobs: expected an integer >= 1 that fits int32 or -1, got {limit}"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        EngineConfig(model="m", max_logprobs=limit)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_a_request_that_needs_too_much_memory_fails_alone(llm: LLM, monkeypatch, name: str):
    monkeypatch.setattr(request_limits, "host_memory_bytes", lambda: 100 * MIB)
    usual = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=-1)
    large = SamplingParams(max_tokens=400, ignore_eos=True, **{name: -1})
    prompts = [PROMPT, [5] * 400]
    fits, refused = llm.generate(prompts, [usual, large], use_tqdm=False)
    assert fits.error is None
    assert len(fits.outputs[0].logprobs[1]) == VOCAB
    assert re.fullmatch(
        rf"{name}: expected at most 0.1 GiB of log-probabilities, the host memory that is left, "
        r"got up to 0.[23] GiB, of which 0.[01] GiB in one step; ask for fewer of them or lower "
        r"max_tokens",
        str(refused.error),
    )


def test_unfinished_requests_count(llm: LLM, monkeypatch):
    params = SamplingParams(max_tokens=150, ignore_eos=True, logprobs=-1)  # 75 MiB
    monkeypatch.setattr(request_limits, "host_memory_bytes", lambda: 100 * MIB)
    llm.add_request(PROMPT, params, request_id="first")
    with pytest.raises(RequestError, match=r"^logprobs: expected at most 0.0 GiB"):
        llm.add_request(PROMPT, params, request_id="second")
    few = SamplingParams(max_tokens=1, logprobs=-1)
    llm.add_request(PROMPT, few, request_id="few")
    llm.abort("first")
    llm.add_request(PROMPT, params, request_id="third")
    llm.abort("third")
    done = {}
    while llm.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.step()}
    assert done["few"].error is None
    with pytest.raises(RequestError, match=r"^logprobs: .* got up to 0.1 GiB"):
        llm.generate(PROMPT, SamplingParams(max_tokens=75, n=3, logprobs=-1))


def test_the_memory_of_the_host(tmp_path, monkeypatch):
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    monkeypatch.setattr(device_facts, "MEMINFO", meminfo)
    monkeypatch.setattr(device_facts, "CGROUP", cgroup)
    whole = host_memory_bytes()
    assert whole > 2**28
    meminfo.write_text("MemTotal:  9000 kB\nMemFree:  100 kB\nMemAvailable:   5000 kB\n")
    assert host_memory_bytes() == 5000 * 1024
    cgroup.mkdir()
    (cgroup / "memory.current").write_text("3000000\n")
    (cgroup / "memory.stat").write_text("anon 5\nactive_file 400000\ninactive_file 100000\n")
    for limit, expected in (("max", 5120000), ("4000000", 1500000), ("2000000", 0)):
        (cgroup / "memory.max").write_text(f"{limit}\n")
        assert host_memory_bytes() == expected
