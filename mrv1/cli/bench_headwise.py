"""``mrv1 bench capacity`` and ``mrv1 bench headwise``: what a head policy is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.table import Table

from mrv1.bench.capacity import run_capacity
from mrv1.bench.headwise import HeadwiseBench, run_headwise
from mrv1.bench.headwise_options import VARIANTS, HeadwiseOptions
from mrv1.bench.shapes import SHAPES
from mrv1.cli.bench_kernels import check_target, write_result
from mrv1.cli.console import one_line_errors, say, show_table
from mrv1.config import DtypeName
from mrv1.headwise import HeadPolicy

Shape = Annotated[str, typer.Option(help=f"Random weights of a shape: {', '.join(SHAPES)}.")]
Policy = Annotated[
    Path | None, typer.Option("--head-policy", help="JSON policy; unset: by --streaming-ratio.")
]
Ratio = Annotated[float, typer.Option(help="Share of each layer's heads that stream.")]
Window = Annotated[int, typer.Option(help="Tokens that those see.")]
Sink = Annotated[int, typer.Option(help="Leading tokens that they see too.")]
Every = Annotated[int | None, typer.Option(help="Period of layers whose heads are all full.")]
Variants = Annotated[
    str, typer.Option(help=f"Caches to compare, comma-separated: {', '.join(VARIANTS)}.")
]
Context = Annotated[int, typer.Option(help="Tokens of the longest request.")]
Seqs = Annotated[int, typer.Option(help="Requests that may run at once.")]
Budget = Annotated[int, typer.Option(help="Token budget of a step.")]
KVBytes = Annotated[
    int | None, typer.Option(help="Bytes of every cache; unset: what the GPU has left.")
]
BlockSize = Annotated[int, typer.Option(help="Tokens per KV block.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16, bfloat16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
CudaGraphs = Annotated[bool, typer.Option(help="Run steps as CUDA graphs.")]
Output = Annotated[Path | None, typer.Option(dir_okay=False, help="JSON file for the result.")]
Seed = Annotated[int, typer.Option(help="Of weights and prompts.")]
Commit = Annotated[str | None, typer.Option(help="Commit to record; unset: what git says.")]


def _names(variants: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in variants.split(",") if name.strip())


def capacity(
    shape: Shape = "llama3-8b",
    head_policy: Policy = None,
    streaming_ratio: Ratio = 0.75,
    window: Window = 256,
    sink: Sink = 64,
    full_layers_every: Every = None,
    variants: Variants = "uniform,recycled,uniform-fp8,recycled-fp8",
    context: Context = 131_072,
    max_num_seqs: Seqs = 64,
    max_num_batched_tokens: Budget = 8192,
    kv_cache_memory_bytes: KVBytes = None,
    block_size: BlockSize = 16,
    dtype: Dtype = "auto",
    device: Device = "auto",
    cuda_graphs: CudaGraphs = True,
    output: Output = None,
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Count the requests that fit: uniform heads and a policy, with and without fp8."""
    with one_line_errors():
        bench = HeadwiseOptions(
            shape=shape,
            policy=None if head_policy is None else HeadPolicy.load(head_policy),
            streaming_ratio=streaming_ratio,
            window=window,
            sink=sink,
            full_layers_every=full_layers_every,
            variants=_names(variants),
            context=context,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            block_size=block_size,
            dtype=cast("DtypeName", dtype),
            device=device,
            cuda_graphs=cuda_graphs,
            seed=seed,
            commit=commit,
        )
        check_target("--output", output)
        result: dict[str, Any] = run_capacity(bench, say)
        write_result(result, output)
    table = Table(
        title=f"{result['shape']}, {context:,} tokens a request, on {result['device']['name']}"
    )
    for name in ("cache", "GiB", "GiB a request", "predicted", "requests", "ratio", "longest"):
        table.add_column(name, justify="left" if name == "cache" else "right")
    for entry in result["results"]:
        table.add_row(
            entry["variant"],
            f"{entry['kv_cache']['allocated_bytes'] / 2**30:.2f}",
            f"{sum(entry['request_bytes']) / 2**30:.3f}",
            str(entry["predicted_requests"]),
            str(entry["requests"]),
            "-" if entry["ratio"] is None else f"{entry['ratio']:.2f}x",
            f"{entry['longest_context']:,}",
        )
    show_table(table)


def headwise(
    shape: Shape = "llama3-8b",
    head_policy: Policy = None,
    streaming_ratio: Ratio = 0.75,
    window: Window = 256,
    sink: Sink = 64,
    full_layers_every: Every = None,
    variants: Variants = "uniform,kept,recycled",
    context: Context = 32_768,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 8192,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 256,
    num_requests: Annotated[int, typer.Option(help="Requests, added at once.")] = 16,
    planted: Annotated[
        bool, typer.Option("--planted", help="Find prompts cached, with random K and V.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Runs that count.")] = 1,
    max_num_seqs: Seqs = 64,
    max_num_batched_tokens: Budget = 8192,
    kv_cache_memory_bytes: KVBytes = None,
    block_size: BlockSize = 16,
    dtype: Dtype = "auto",
    device: Device = "auto",
    cuda_graphs: CudaGraphs = True,
    output: Output = None,
    seed: Seed = 0,
    commit: Commit = None,
) -> None:
    """Serve the same requests with uniform heads and with a policy, recycling off and on."""
    with one_line_errors():
        bench = HeadwiseBench(
            shape=shape,
            policy=None if head_policy is None else HeadPolicy.load(head_policy),
            streaming_ratio=streaming_ratio,
            window=window,
            sink=sink,
            full_layers_every=full_layers_every,
            variants=_names(variants),
            context=context,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            num_requests=num_requests,
            planted=planted,
            repeats=repeats,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            block_size=block_size,
            dtype=cast("DtypeName", dtype),
            device=device,
            cuda_graphs=cuda_graphs,
            seed=seed,
            commit=commit,
        )
        check_target("--output", output)
        result: dict[str, Any] = run_headwise(bench, say)
        write_result(result, output)
    table = Table(
        title=f"{result['shape']}, {num_requests} requests of {prompt_tokens:,} + "
        f"{output_tokens:,} tokens, on {result['device']['name']}",
        caption="crowded: while requests wait; ratios to the first row, above 1 is better",
    )
    for name in ("cache", "tokens/s", "crowded", "first, ms", "between, ms", "preempted"):
        table.add_column(name, justify="left" if name == "cache" else "right")
    for entry in result["results"]:
        crowded = "-"
        if entry["crowded_ratio"] is not None:
            crowded = f"{entry['crowded_tokens_per_s']:,.0f} {entry['crowded_ratio']:.2f}x"
        table.add_row(
            entry["variant"],
            f"{entry['tokens_per_s']:,.0f} {entry['throughput_ratio']:.2f}x",
            crowded,
            f"{entry['first_token_ms']:,.0f} {entry['first_token_speedup']:.2f}x",
            f"{entry['between_tokens_ms']:.2f} {entry['between_tokens_speedup']:.2f}x",
            f"{entry['num_preemptions']:.0f}",
        )
    show_table(table)
