"""``mrv1 bench capacity`` and ``mrv1 bench headwise``: what a head policy gains."""

from __future__ import annotations

from typing import Annotated, Any

from benchmarks.cli.shared import HELP as SHARED
from benchmarks.cli.shared import Output, words
from benchmarks.engines.capacity import run_capacity
from benchmarks.engines.headwise import HeadwiseBench, run_headwise
from benchmarks.engines.headwise_options import VARIANTS, HeadwiseOptions
from benchmarks.measure.shapes import SHAPES
from benchmarks.report.columns import COLUMNS, console
from benchmarks.report.rows import capacity_rows, headwise_rows
from mrv1.cli.console import check_target, say, show_table, write_result
from mrv1.cli.options import FieldsOf, command

NAMES = {"policy": "head-policy"}
HELP = SHARED | {
    "shape": f"Model shape to run with random weights: {', '.join(SHAPES)}.",
    "policy": "Head policy: a rule such as ratio=0.5,window=256,sink=64, a JSON file, or a folder "
    "(DuoAttention pattern or checkpoint). Default: made from --streaming-ratio.",
    "streaming_ratio": "Share of each layer's KV heads that stream.",
    "window": "Last tokens that a streaming head sees, the current one included.",
    "sink": "First tokens, which a streaming head always sees.",
    "full_layers_every": "Keep all heads full in every n-th layer. Default: in none.",
    "variants": f"Caches to compare, comma-separated: {', '.join(VARIANTS)}. uniform: without the "
    "policy; masked: all pages are read, and masked by the policy; kept: pages that no head sees "
    "are skipped, but keep their blocks; discrete: the same with a table for each head; recycled: "
    "blocks return to the pool.",
    "kv_cache_memory_bytes": "Bytes of each cache. Default: the memory that the GPU has left.",
    "prompt_tokens": "Tokens of each prompt.",
    "output_tokens": "Tokens to generate for each prompt.",
    "num_requests": "Requests, all added at once.",
    "seed": "Seed of weights and prompts.",
}
PARSERS = {"policy": str, "variants": words}


@command
def capacity(
    options: Annotated[
        dict[str, Any],
        FieldsOf(
            cls=HeadwiseOptions,
            names=NAMES,
            help=HELP,
            parsers=PARSERS,
            defaults={
                "variants": "uniform,recycled,uniform-fp8,recycled-fp8",
                "max_num_seqs": 64,
            },
        ),
    ],
    output: Output = None,
) -> None:
    """Count the requests that fit the KV cache, without and with a head policy, fp8 or not."""
    bench = HeadwiseOptions(**options)
    check_target("--output", output)
    result: dict[str, Any] = run_capacity(bench, say)
    write_result(result, output)
    show_table(
        console(
            COLUMNS["capacity"],
            capacity_rows(result),
            f"{result['shape']}, {bench.context:,} tokens a request, "
            f"on {result['device']['name']}",
        )
    )


@command
def headwise(
    options: Annotated[
        dict[str, Any],
        FieldsOf(
            cls=HeadwiseBench,
            names=NAMES,
            help=HELP,
            parsers=PARSERS,
            defaults={
                "variants": "uniform,kept,recycled",
                "context": 32_768,
                "max_num_seqs": 64,
                "output_tokens": 256,
                "num_requests": 16,
            },
        ),
    ],
    output: Output = None,
) -> None:
    """Serve the same requests without a head policy, and with one, recycling off and on."""
    bench = HeadwiseBench(**options)
    check_target("--output", output)
    result: dict[str, Any] = run_headwise(bench, say)
    write_result(result, output)
    show_table(
        console(
            COLUMNS["headwise"],
            headwise_rows(result),
            f"{result['shape']}, {bench.num_requests} requests of {bench.prompt_tokens:,} + "
            f"{bench.output_tokens:,} tokens, on {result['device']['name']}",
            "in brackets: ratio to the first row, above 1 is better; percentages: what it saves "
            "of the first row's time, 95% interval over the runs",
        )
    )
