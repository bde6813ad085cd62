"""``mrv1 generate`` on the embedded model: its stdout, its stderr, and user mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mrv1 import LLM, SamplingParams, __version__
from mrv1.cli.report import Usage
from tests.cli.conftest import Mrv1

TINY = ("generate", "--model", "tiny", "--device", "cpu", "--num-kv-blocks", "32")
GREEDY = ("--temperature", "0", "--max-tokens", "24", "--ignore-eos")


@pytest.fixture(scope="module")
def expected() -> str:
    """Return the text of the same request through the Python API."""
    with LLM("tiny", device="cpu", num_kv_blocks=32) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        return llm.generate("ROMEO:", params)[0].outputs[0].text


@pytest.mark.parametrize("mode", ["--stream", "--no-stream"])
def test_stdout_is_the_text_alone(mrv1: Mrv1, expected: str, mode: str):
    result = mrv1(*TINY, *GREEDY, "--prompt", "ROMEO:", mode)
    assert result.exit_code == 0
    assert result.stdout == expected + "\n"
    assert "ROMEO:" in result.stderr


def test_the_summary_names_speed_cache_and_path(mrv1: Mrv1):
    result = mrv1(*TINY, *GREEDY, "--prompt", "ROMEO:")
    summary = result.stderr.splitlines()[-1]
    found = re.search(
        r"24 tokens in ([\d.]+) s \(([\d.]+) tokens/s\) \| time to first token \d+ ms \| "
        r"KV cache: at most ([\d.]+) MiB in use of ([\d.]+) MiB allocated \| "
        r"CPU reference \(torch\)$",
        summary,
    )
    assert found, summary
    used, allocated = float(found[3]), float(found[4])
    assert 0 < used < allocated


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_on_a_gpu_the_compiled_kernels_run(mrv1: Mrv1):
    result = mrv1("generate", "--model", "tiny", *GREEDY, "--prompt", "ROMEO:")
    assert result.exit_code == 0
    assert ": Triton kernels, bfloat16" in result.stderr
    assert "Triton kernels on" in result.stderr.splitlines()[-1]
    assert result.stdout.strip()


def test_a_seed_repeats_a_draw_and_another_does_not(mrv1: Mrv1):
    texts = [
        mrv1(*TINY, "--prompt", "ROMEO:", "--max-tokens", "24", "--seed", seed).stdout
        for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_sampling_options_reach_the_engine(mrv1: Mrv1, expected: str):
    """The most likely token alone is greedy; a stop token ends the text."""
    top_1 = mrv1(*TINY, "--prompt", "ROMEO:", "--max-tokens", "24", "--ignore-eos", "--top-k", "1")
    assert top_1.stdout == expected + "\n"
    small_p = mrv1(
        *TINY, "--prompt", "ROMEO:", "--max-tokens", "24", "--ignore-eos", "--top-p", "1e-6"
    )
    assert small_p.stdout == expected + "\n"
    min_p = mrv1(*TINY, "--prompt", "ROMEO:", "--max-tokens", "24", "--ignore-eos", "--min-p", "1")
    assert min_p.stdout == expected + "\n"
    for name in ("repetition", "frequency", "presence"):
        fresh = mrv1(*TINY, *GREEDY, "--prompt", "ROMEO:", f"--{name}-penalty", "2")
        assert fresh.stdout != expected + "\n"
    with LLM("tiny", device="cpu", num_kv_blocks=32) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        first = llm.generate("ROMEO:", params)[0].outputs[0].token_ids[0]
    stopped = mrv1(*TINY, *GREEDY, "--prompt", "ROMEO:", "--stop-token-id", str(first))
    assert stopped.stdout == "\n"
    later = mrv1(
        *TINY, *GREEDY, "--prompt", "ROMEO:", "--stop-token-id", str(first), "--min-tokens", "3"
    )
    assert later.stdout != "\n"
    cut = mrv1(*TINY, *GREEDY, "--prompt", "ROMEO:", "--stop", "\0", "--stop", expected[5:8])
    assert cut.stdout == expected[: expected.index(expected[5:8])] + "\n"
    word = next(word for word in expected.split() if word.isalpha())
    banned = mrv1(*TINY, *GREEDY, "--prompt", "ROMEO:", "--bad-word", word, "--bad-word", "zzz")
    assert word not in banned.stdout.split()


def test_peak_memory_is_the_blocks_that_the_tokens_needed():
    """With 16 + 17 tokens, the last never cached, two blocks of 16 are full; 18 need a third."""
    for num_output, num_blocks in ((1, 1), (2, 2), (17, 2), (18, 3)):
        with LLM("tiny", device="cpu", num_kv_blocks=8) as llm:
            usage = Usage(llm)
            params = SamplingParams(max_tokens=num_output, ignore_eos=True)
            for output in llm.stream([5] * 16, params):
                usage.observe([output])
            report = llm.kv_report()
            assert report["peak_held_bytes"] == num_blocks * report["block_bytes"]
            assert usage.num_tokens == num_output


def test_shared_blocks_of_a_prompt_are_counted_once():
    """17 + 17 tokens, the last never cached: one shared block, and two own blocks per output.

    The first output has ended before the others, one token later, need their last block.
    """
    with LLM("tiny", device="cpu", num_kv_blocks=8) as llm:
        usage = Usage(llm)
        params = SamplingParams(max_tokens=17, ignore_eos=True, n=3)
        for output in llm.stream([5] * 17, params):
            usage.observe([output])
        assert usage.num_tokens == 3 * 17
        report = llm.kv_report()
        assert report["peak_held_bytes"] == (1 + 2 + 2) * report["block_bytes"]


def test_drafts_change_no_text(mrv1: Mrv1, expected: str):
    option = '{"method": "ngram", "prompt_lookup_min": 1}'
    result = mrv1(*TINY, *GREEDY, "--prompt", "ROMEO:", "--speculative", option)
    assert result.stdout == expected + "\n"


def test_cache_options_reach_the_engine(mrv1: Mrv1):
    result = mrv1(*TINY, *GREEDY, "--prompt", "ROMEO:", "--kv-cache-dtype", "fp8_e4m3")
    assert result.exit_code == 0
    assert "KV float8_e4m3fn with a scale per token and head" in result.stderr


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "/nowhere"],
            "model: expected a checkpoint directory, GGUF file, Hugging Face id or 'tiny', "
            "got '/nowhere'",
        ),
        (["--max-tokens", "0"], "max_tokens: expected an integer >= 1 or None, got 0"),
        (
            ["--temperature", "-1"],
            "temperature: expected 0 or a number from 1e-05 to 100000, got -1.0",
        ),
        (["--top-p", "1.5"], "top_p: expected a number in (0, 1], got 1.5"),
        (
            ["--top-k", "-2"],
            "top_k: expected an integer from 1 to 2147483647, or 0 or -1 for all, got -2",
        ),
        (["--stop-token-id", "99999"], "stop_token_ids: expected ids in [0, "),
        (["--stop", ""], "stop: expected texts that are not empty"),
        (
            ["--bad-word", "a", "--bad-word", "b", "--max-bad-words-num", "1"],
            "bad_words: expected at most 1 words, got 2; raise max_bad_words_num or MRV1_MAX_BAD_",
        ),
        (["--min-p", "2"], "min_p: expected a number from 0 to 1, got 2.0"),
        (["--repetition-penalty", "0"], "repetition_penalty: expected a number from 1e-05 to 2"),
        (["--min-tokens", "17", "--max-tokens", "16"], "min_tokens: expected at most max_tokens"),
        (["--max-stop-seqs-num", "0"], "max_stop_seqs_num: expected an integer >= 1"),
        (["--stop-seqs-max-len", "0"], "stop_seqs_max_len: expected an integer >= 1"),
        (["--max-logit-bias", "0"], "max_logit_bias: expected an integer >= 1"),
        (["--max-logprobs", "0"], "max_logprobs: expected an integer >= 1"),
        (["--logprobs-mode", "raw"], "logprobs_mode: expected one of ('raw_logprobs', "),
        (["--head-policy", "none.json"], "got 'none.json', which does not exist"),
        (["--block-size", "20"], "block_size: expected one of (16, 32, 64, 128), got 20"),
        (["--dtype", "int8"], "dtype: expected one of"),
        (
            ["--kv-cache-dtype", "e5m2"],
            "kv_cache_dtype: expected one of ('auto', 'fp8_e4m3', 'int4'), got",
        ),
        (["--kv-scale", "head"], "kv_scale: expected kv_cache_dtype='fp8_e4m3' with 'head'"),
        (
            ["--kv-cache-dtype", "fp8_e4m3", "--kv-scale", "head"],
            "k_scale: missing (and 7 more)",
        ),
        (["--attention-backend", "fa3"], "attention_backend: expected one of ('triton', "),
        (["--device", "tpu"], "device: expected 'auto', 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
        (["--max-model-len", "999999"], "max_model_len: expected <= 2048"),
        (
            ["--speculative", "ngram"],
            "speculative: expected a JSON object, got 'ngram': Expecting",
        ),
        (["--speculative", "4"], "speculative: expected a JSON object, got '4'"),
        (
            ["--speculative", '{"method": "mtp"}'],
            "method: expected a model with an MTP block (Ernie4_5_MoeForCausalLM, ",
        ),
        (["--prompt", ""], "prompt: expected at least one token, got none"),
        (["--prompt", "x " * 3000], "prompt: expected fewer than 2048 tokens"),
        (["--input", "README.md"], "expected one of --prompt TEXT and --input FILE"),
        (["--output", "x"], "expected --input FILE and --output FILE together"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(mrv1: Mrv1, arguments: list[str], message: str):
    result = mrv1(*TINY, "--prompt", "ROMEO:", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert message in last
    assert last.startswith("error: ")  # not behind the prompt, which is shown first
    assert "Traceback" not in result.stderr


def test_text_for_a_checkpoint_without_tokenizer_is_a_mistake(mrv1: Mrv1, checkpoint: str):
    result = mrv1("generate", "--model", checkpoint, "--device", "cpu", "--prompt", "hello")
    assert result.exit_code == 2
    assert "prompt: expected token ids, because" in result.stderr


def test_neither_prompt_nor_input_is_a_mistake(mrv1: Mrv1):
    result = mrv1("generate", "--model", "tiny")
    assert result.exit_code == 2
    assert "expected one of --prompt TEXT and --input FILE" in result.stderr


def test_input_must_exist(mrv1: Mrv1, tmp_path: Path):
    source = tmp_path / "none.jsonl"
    result = mrv1(*TINY, "--input", source, "--output", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: --input: cannot read {str(source)!r}: No such file or directory\n"
    )


# --- the command itself --------------------------------------------------------------------------


def test_the_version_is_printed(mrv1: Mrv1):
    assert mrv1("--version").stdout == f"mrv1 {__version__}\n"


def test_help_names_the_commands(mrv1: Mrv1):
    result = mrv1("--help")
    assert result.exit_code == 0
    for command in ("generate", "doctor", "bench"):
        assert command in result.stdout
