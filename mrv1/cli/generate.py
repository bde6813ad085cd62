"""``mrv1 generate``: one prompt, or a JSONL file of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from mrv1.cli.batch import read_lines, run_batch
from mrv1.cli.console import FAILURE, one_line_errors, say, show, writing
from mrv1.cli.report import Usage, path_name
from mrv1.config import (
    AttentionBackendName,
    DtypeName,
    KVCacheDtypeName,
    KVScaleName,
    LogprobsModeName,
)
from mrv1.engine import LLM
from mrv1.errors import ConfigError
from mrv1.sampler import SamplingParams

SAMPLING, ENGINE = "Sampling", "Engine"


def generate(
    model: Annotated[str, typer.Option(help="Checkpoint directory, or 'tiny'.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            exists=True,
            dir_okay=False,
            help='Prompts, one JSON object a line: "prompt" or "prompt_token_ids", and optionally '
            '"sampling_params" and "request_id". Blank lines do not count as requests.',
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option("--output", help="Where the results of --input go, one JSON object a line."),
    ] = None,
    stream: Annotated[bool, typer.Option(help="Print the text as it comes.")] = True,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens to generate.", rich_help_panel=SAMPLING)
    ] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Draw from the k most likely; 0 = all.", rich_help_panel=SAMPLING)
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(help="Draw from the most likely up to this mass.", rich_help_panel=SAMPLING),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            help="Draw from what is so likely, relative to the likeliest; 0 = all.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        typer.Option(help="Of prompt and output; 1 = none.", rich_help_panel=SAMPLING),
    ] = 1.0,
    frequency_penalty: Annotated[
        float,
        typer.Option(help="Each time a token has come; 0 = none.", rich_help_panel=SAMPLING),
    ] = 0.0,
    presence_penalty: Annotated[
        float,
        typer.Option(help="If a token has come; 0 = none.", rich_help_panel=SAMPLING),
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of each request's noise; unset: from the order of the requests.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    min_tokens: Annotated[
        int, typer.Option(help="Tokens before nothing ends it.", rich_help_panel=SAMPLING)
    ] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Go on after an end-of-sequence token.", rich_help_panel=SAMPLING
        ),
    ] = False,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(help="End at this token too; repeatable.", rich_help_panel=SAMPLING),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End in front of this text; repeatable.", rich_help_panel=SAMPLING),
    ] = None,
    bad_word: Annotated[
        list[str] | None,
        typer.Option(help="Never say this; repeatable.", rich_help_panel=SAMPLING),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=ENGINE)
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(help="auto, float32, float16, bfloat16, float64.", rich_help_panel=ENGINE),
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto (the dtype) or fp8_e4m3.", rich_help_panel=ENGINE)
    ] = "auto",
    kv_scale: Annotated[
        str,
        typer.Option(
            help="Scales of an fp8 cache: token, quarter, or head (from the checkpoint).",
            rich_help_panel=ENGINE,
        ),
    ] = "token",
    block_size: Annotated[
        int, typer.Option(help="Tokens per KV block.", rich_help_panel=ENGINE)
    ] = 16,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt + output; unset: the model's context.", rich_help_panel=ENGINE
        ),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Requests that run at the same time.", rich_help_panel=ENGINE)
    ] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Token budget of a step.", rich_help_panel=ENGINE)
    ] = 8192,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the GPU's memory to use.", rich_help_panel=ENGINE)
    ] = 0.9,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(help="Bytes of the KV cache, in place of a share.", rich_help_panel=ENGINE),
    ] = None,
    num_kv_blocks: Annotated[
        int | None,
        typer.Option(help="KV blocks; unset: what memory allows.", rich_help_panel=ENGINE),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            help="Keep blocks for requests that begin alike; not with --kv-scale quarter.",
            rich_help_panel=ENGINE,
        ),
    ] = True,
    overlap: Annotated[
        bool,
        typer.Option(help="Launch a step before the last one's result.", rich_help_panel=ENGINE),
    ] = True,
    cuda_graphs: Annotated[
        bool, typer.Option(help="Capture steps as CUDA graphs, on a GPU.", rich_help_panel=ENGINE)
    ] = True,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Bits that do not depend on the batch.",
            rich_help_panel=ENGINE,
        ),
    ] = False,
    attention_backend: Annotated[
        str, typer.Option(help="triton or flashinfer.", rich_help_panel=ENGINE)
    ] = "triton",
    max_bad_words_num: Annotated[
        int | None,
        typer.Option(help="Bad words of a request, at most.", rich_help_panel=ENGINE),
    ] = None,
    bad_words_max_len: Annotated[
        int | None,
        typer.Option(help="Tokens of a bad word, at most.", rich_help_panel=ENGINE),
    ] = None,
    max_stop_seqs_num: Annotated[
        int | None,
        typer.Option(help="Stop sequences of a request, at most.", rich_help_panel=ENGINE),
    ] = None,
    stop_seqs_max_len: Annotated[
        int | None,
        typer.Option(help="Tokens of a stop sequence, at most.", rich_help_panel=ENGINE),
    ] = None,
    max_logit_bias: Annotated[
        int, typer.Option(help="Biased tokens of a request, at most.", rich_help_panel=ENGINE)
    ] = 300,
    max_logprobs: Annotated[
        int, typer.Option(help="Log-probabilities a token, at most.", rich_help_panel=ENGINE)
    ] = 20,
    logprobs_mode: Annotated[
        str,
        typer.Option(help="raw_logprobs or processed_logprobs.", rich_help_panel=ENGINE),
    ] = "raw_logprobs",
    head_policy: Annotated[
        Path | None,
        typer.Option(help="JSON: what each KV head sees.", rich_help_panel=ENGINE),
    ] = None,
    window_recycling: Annotated[
        bool,
        typer.Option(help="Give back what windows have left behind.", rich_help_panel=ENGINE),
    ] = True,
    streaming_cache_blocks: Annotated[
        int | None,
        typer.Option(
            help="Blocks of heads with a window that stay cached, at most.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
) -> None:
    """Continue a prompt, or every prompt of a JSONL file.

    stdout carries the generated text alone. Exit code 1: a line of --input failed, or the output
    cannot be written; 2: a mistake in the arguments.
    """
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "seed": seed,
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos,
        "stop_token_ids": tuple(stop_token_id or ()),
        "stop": tuple(stop or ()),
        "bad_words": tuple(bad_word or ()),
    }
    engine = {
        "device": device,
        "dtype": cast("DtypeName", dtype),
        "kv_cache_dtype": cast("KVCacheDtypeName", kv_cache_dtype),
        "kv_scale": cast("KVScaleName", kv_scale),
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "gpu_memory_utilization": gpu_memory_utilization,
        "num_kv_blocks": num_kv_blocks,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "enable_prefix_caching": enable_prefix_caching,
        "overlap": overlap,
        "cuda_graphs": cuda_graphs,
        "deterministic": deterministic,
        "attention_backend": cast("AttentionBackendName", attention_backend),
        "max_bad_words_num": max_bad_words_num,
        "bad_words_max_len": bad_words_max_len,
        "max_stop_seqs_num": max_stop_seqs_num,
        "stop_seqs_max_len": stop_seqs_max_len,
        "max_logit_bias": max_logit_bias,
        "max_logprobs": max_logprobs,
        "logprobs_mode": cast("LogprobsModeName", logprobs_mode),
        "head_policy": head_policy,
        "window_recycling": window_recycling,
        "streaming_cache_blocks": streaming_cache_blocks,
    }
    with one_line_errors():
        _check_mode(prompt, input_file, output_file)
        if prompt is not None:
            _generate_one(model, prompt, SamplingParams(**sampling), engine, stream=stream)
        elif input_file is not None and output_file is not None:
            _generate_batch(model, input_file, output_file, sampling, engine)


def _check_mode(prompt: str | None, input_file: Path | None, output_file: Path | None) -> None:
    if (prompt is None) == (input_file is None):
        raise ConfigError("expected one of --prompt TEXT and --input FILE")
    if (input_file is None) != (output_file is None):
        raise ConfigError("expected --input FILE and --output FILE together")
    if input_file and output_file and output_file.exists() and output_file.samefile(input_file):
        raise ConfigError(f"--output: expected another file than --input, got {output_file}")


def _generate_one(
    model: str, prompt: str, params: SamplingParams, engine: dict[str, Any], *, stream: bool
) -> None:
    """Print the continuation of one prompt to stdout, as it comes or at the end."""
    with LLM(model, **engine) as llm:
        say(llm.describe())
        typer.echo(prompt, err=True, nl=False)
        usage = Usage(llm)
        text = ""
        for output in llm.stream(prompt, params):
            usage.observe([output])
            if stream or output.finished:
                show(output.outputs[0].text[len(text) :], newline=False)
                text = output.outputs[0].text
        show("")
        say(usage.line(path_name(engine["device"])))


def _generate_batch(
    model: str,
    input_file: Path,
    output_file: Path,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Write the result of every line, and list the lines that failed."""
    SamplingParams(**sampling)  # a wrong option is one mistake, not one for every line
    lines = read_lines(input_file, sampling)
    with LLM(model, **engine) as llm:
        say(llm.describe())
        usage = Usage(llm)
        try:  # only now: a model that cannot be loaded must not cost the results of a former run
            target = output_file.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--output: cannot write {str(output_file)!r}: {error.strerror}"
            ) from error

        def write(line: str) -> None:
            with writing(target, f"--output {str(output_file)!r}"):
                target.write(line)
                target.flush()

        with target:
            errors = run_batch(llm, lines, write, usage)
        say(usage.line(path_name(engine["device"])))
    for number, message in errors.items():
        say(f"error: line {number}: {message}")
    say(f"{len(lines) - len(errors)} of {len(lines)} requests done, results in {output_file}")
    if errors:
        raise typer.Exit(FAILURE)
