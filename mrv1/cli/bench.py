"""``mrv1 bench``: measurements on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from mrv1.bench import SHAPES, GenerateBench, run_generate
from mrv1.cli import bench_kernels
from mrv1.cli.console import one_line_errors, say
from mrv1.config import AttentionBackendName, DtypeName, KVCacheDtypeName, KVScaleName
from mrv1.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measure, on this machine.")

app.command("attention")(bench_kernels.attention)
app.command("kv-write")(bench_kernels.kv_write)

DEFAULT_SHAPE = "qwen3-0.6b"


@app.command("generate")
def generate(
    shape: Annotated[
        str | None,
        typer.Option(
            help=f"Model shape, run with random weights: {', '.join(SHAPES)}. "
            f"Unset: {DEFAULT_SHAPE}, unless there is a --model."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory to run instead, or 'tiny'.")
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Concurrent requests; repeatable. Unset: 1, 32 and 256."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 256,
    repeats: Annotated[int, typer.Option(help="Runs that count, after a warm-up.")] = 3,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSON file for the result.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16, bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (the dtype) or fp8_e4m3.")] = "auto",
    kv_scale: Annotated[
        str, typer.Option(help="Scales of an fp8 cache: token, quarter, or head (from --model).")
    ] = "token",
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Token budget of a step.")] = 8192,
    attention_backend: Annotated[str, typer.Option(help="triton or flashinfer.")] = "triton",
    seed: Annotated[int, typer.Option(help="Of weights and prompts.")] = 0,
    commit: Annotated[
        str | None, typer.Option(help="Commit to record; unset: what git says.")
    ] = None,
) -> None:
    """Measure whole-engine generation: tokens/s and the time of a decode step."""
    with one_line_errors():
        bench = GenerateBench(
            shape=DEFAULT_SHAPE if shape is None and model is None else shape,
            model=model,
            batches=tuple(batch or (1, 32, 256)),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            repeats=repeats,
            dtype=cast("DtypeName", dtype),
            device=device,
            kv_cache_dtype=cast("KVCacheDtypeName", kv_cache_dtype),
            kv_scale=cast("KVScaleName", kv_scale),
            attention_backend=cast("AttentionBackendName", attention_backend),
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            seed=seed,
            commit=commit,
        )
        if output is not None and not output.parent.is_dir():
            raise ConfigError(f"--output: expected an existing directory, got {output.parent}")
        result = run_generate(bench, say)
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        say(f"written to {output}")
    Console().print(_table(result))


def _table(result: dict[str, Any]) -> Table:
    conditions = result["conditions"]
    table = Table(
        title=f"{result['shape']} ({result['weights']} weights, {result['dtype']}) on "
        f"{result['device']['name']}, {result['path']} path",
        caption=f"{conditions['prompt_tokens']} prompt + {conditions['output_tokens']} output "
        f"tokens, {conditions['sampling']}; medians of {conditions['repeats']} runs; "
        f"KV cache {conditions['kv_cache_dtype']}, attention by {conditions['attention_backend']}",
    )
    for heading in ("batch", "tokens/s", "ms/decode step", "floor ms", "share", "prefill ms"):
        table.add_column(heading, justify="right")
    table.add_column("launch ms", justify="right")
    for entry in result["results"]:
        table.add_row(
            str(entry["batch"]),
            f"{entry['tokens_per_s']:,.1f}",
            f"{entry['decode_step_ms']:.2f}",
            _optional(entry["floor_ms"], "{:.2f}"),
            _optional(entry["share_of_floor"], "{:.0%}"),
            f"{entry['prefill_ms']:.1f}",
            _optional(entry["launch_ms"], "{:.2f}"),
        )
    return table


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
