"""Tables of whole engines: generation, serving, decode steps, starts; README.md's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.engines.serving import arrivals
from benchmarks.report.files import OURS, ResultFile, optional, table, versions, with_conditions
from benchmarks.report.longest import ENGINE_DEFAULTS, Cell, Runs

STEP_COUNTS = {
    "host_to_device_copies": "copies up",
    "graph_launches": "graphs",
    "kernel_launches": "other kernels",
    "event_waits": "event waits",
    "other_waits": "other waits",
}
HOST_TIMES = {
    "total_us": "host, us",
    "quietest_us": "quietest",
    "schedule_us": "schedule",
    "execute_us": "execute",
    "read_us": "read",
    "update_us": "update",
}
SERVED_TIMES = {
    "ttft_ms": "first token, ms",
    "itl_ms": "between tokens, ms",
    "e2el_ms": "whole request, ms",
}


def vllm_table(file: ResultFile) -> str:
    """Return the throughputs of both engines and their ratio."""
    result = file.result
    body = [
        [
            f"{entry['batch']}",
            *(f"{entry['tokens_per_s'][name]:,.0f}" for name in (OURS, "vllm")),
            f"{entry['mrv1_over_vllm']:.2f}x",
        ]
        for entry in result["results"]
    ]
    return with_conditions(
        table(["batch", "mrv1, tokens/s", "vLLM, tokens/s", "mrv1 over vLLM"], body),
        file,
        f"{result['shape']} shape, one random checkpoint for both, {result['dtype']}, one "
        f"{file.device}",
        requests(result["conditions"]),
        versions(result),
        f"clocks {result['conditions']['clocks']}",
    )


def modes_table(file: ResultFile) -> str:
    """Return a row for each cell and mode of vLLM with parts of mrv1; failures with reasons."""
    result, conditions = file.result, file.result["conditions"]
    body = [
        [
            f"{cell['batch']} x {cell['prompt_tokens']:,}",
            name,
            f"{mode['tokens_per_s']:,.0f}",
            _range(mode["samples"], cell["batch"] * conditions["output_tokens"]),
            optional(mode["speedup"], "{:.2f}x"),
            f"{mode['ttft_ms']:,.1f}",
            f"{mode['tpot_ms']:.2f}",
            optional(mode["share_of_floor"], "{:.0%}"),
        ]
        for cell in result["results"]
        for name, mode in cell["modes"].items()
    ]
    head = ["requests x prompt", "mode", "tokens/s", "of runs", "speedup"]
    head += ["first token, ms", "ms per token", "share of floor"]
    return with_conditions(
        table(head, body, num_texts=2),
        file,
        f"{result['shape']} shape, {result['weights']} weights, {result['dtype']}, one "
        f"{file.device}",
        f"{conditions['output_tokens']} output tokens, {conditions['sampling']}",
        f"medians of {_runs(conditions)} in each of {_processes(conditions)}",
        "first tokens in runs of one token each" if result["schema"] == 1 else "",
        versions(result),
        *(f"{name} failed: {mode['error']}" for name, mode in result["modes"].items()
          if mode["error"]),
    )  # fmt: skip


def _range(samples: Sequence[Mapping[str, float]], num_tokens: int) -> str:
    """Return the lowest and the highest tokens/s of some runs."""
    found = [num_tokens / sample["whole_s"] for sample in samples]
    return f"{min(found):,.0f} to {max(found):,.0f}"


def serving_table(file: ResultFile) -> str:
    """Return a row for each engine: throughput, and median and 99th percentile of the times."""
    result, conditions = file.result, file.result["conditions"]
    body = []
    for name, engine in result["results"].items():
        figures = engine["figures"]
        if figures is None:
            body.append([name, *["-"] * (3 + len(SERVED_TIMES))])
            continue
        spreads = [figures[key] for key in SERVED_TIMES]
        body.append(
            [
                name,
                f"{figures['output_throughput']:,.0f}",
                f"{figures['total_token_throughput']:,.0f}",
                optional(figures["request_goodput"], "{:.2f}"),
                *(
                    "-" if spread is None else f"{spread['median']:,.1f} / {spread['p99']:,.1f}"
                    for spread in spreads
                ),
            ]
        )
    head = [
        "engine", "output tokens/s", "all tokens/s", "good requests/s", *SERVED_TIMES.values()
    ]  # fmt: skip
    goodput, share = conditions["goodput"], conditions["peak_share"]
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput.items())
    fp8 = "; mrv1-fp8: with an fp8 KV cache" if "mrv1-fp8" in result["results"] else ""
    return with_conditions(
        table(head, body, num_texts=1),
        file,
        f"{result['shape']} shape, {result['weights']} weights, {result['dtype']}, one "
        f"{file.device}{fp8}",
        f"{conditions['num_conversations']:,} conversations, turns of each: "
        f"{conditions['num_turns']}, {arrivals(result)}"
        + (f" ({share:.0%} of what the first engine serves at most)" if share else ""),
        f"{conditions['new_input_tokens']:,} new input + {conditions['output_tokens']:,} output "
        f"tokens ({conditions['lengths']} lengths), a system prompt of "
        f"{conditions['prefix_len']:,}",
        f"at most {conditions['max_num_seqs']} requests at a time, temperature "
        f"{conditions['sampling']['temperature']:g}",
        f"times: median / 99th percentile, medians of {_runs(conditions)}"
        + (" after a warm-up" if conditions["warm_up_runs"] else ""),
        limits and f"a good request has at most {limits}",
        *(f"{engine} over vLLM, {name}: {ratio:.2f}x"
          for engine, ratios in result["over_vllm"].items()
          for name, ratio in (ratios or {}).items()),
        versions(result),
        *(f"{name} failed: {engine['error']}" for name, engine in result["results"].items()
          if engine["error"]),
    )  # fmt: skip


def generate_table(file: ResultFile) -> str:
    """Return throughput and time of a decode step by batch."""
    result = file.result
    has_host = "host_ms" in result["results"][0]  # absent from files older than the figure
    head = ["batch", "tokens/s", "ms per decode step", "floor, ms", "share of floor"]
    rows = []
    for entry in result["results"]:
        cells = [
            f"{entry['batch']}",
            f"{entry['tokens_per_s']:,.0f}",
            f"{entry['decode_step_ms']:.2f}",
            optional(entry["floor_ms"], "{:.2f}"),
            optional(entry["share_of_floor"], "{:.0%}"),
            f"{entry['prefill_ms']:.1f}",
        ]
        if has_host:
            cells.insert(3, optional(entry["host_ms"], "{:.3f}"))
        rows.append(cells)
    if has_host:
        head.insert(3, "of it host, ms")
    return with_conditions(table([*head, "prefill, ms"], rows), file, *_conditions(file))


def runner_table(file: ResultFile) -> str:
    """Return the tables of steps and their traces, of host times, and of first requests."""
    result = file.result
    steps = []
    for entry in result["results"]:
        trace = entry["trace"] or {}
        steps.append(
            [
                f"{entry['batch']}",
                f"{entry['step_ms']:.3f}",
                optional(entry["deterministic_over_default"], "{:.2f}x"),
                optional(entry.get("logprobs_over_default"), "{:.2f}x"),
                optional(trace.get("idle_share"), "{:.1%}"),
                optional(trace.get("idle_between_launches_share"), "{:.1%}"),
                *(optional(trace.get(name), "{:.2g}") for name in STEP_COUNTS),
            ]
        )
    hosts = [
        [f"{entry['batch']}", waiting, *(f"{entry['host'][name]:,.0f}" for name in HOST_TIMES)]
        for waiting, entry in [
            *(("none", entry) for entry in result["results"]),
            *((f"{entry['waiting']:,}", entry) for entry in result["waiting"]),
        ]
    ]
    firsts = [
        [
            first["kind"],
            *(f"{first[key]:.1f}" for key in ("first_ms", "second_ms")),
            f"{first['compilations']}",
        ]
        for first in result.get("first_requests", [])
    ]
    head = ["batch", "ms per step", "deterministic", "log-probabilities"]
    head += ["GPU idle", "between launches"]
    tables = [
        table([*head, *STEP_COUNTS.values()], steps),
        table(["batch", "waiting", *HOST_TIMES.values()], hosts),
    ]
    if firsts:
        names = ["requests of 8 tokens", "first, ms", "second, ms", "kernels compiled"]
        tables.append(table(names, firsts, num_texts=1))
    logprobs = result["conditions"].get("logprobs")
    asked = f"log-probabilities: {logprobs} for each token" if logprobs else ""
    return with_conditions("\n\n".join(tables), file, *_conditions(file), asked)


def timeline_table(file: ResultFile) -> str:
    """Return when the GPU begins and ends each recorded step, and when the host launches it."""
    result = file.result
    executes = [call["start_us"] for call in result["host"] if call["part"] == "execute"]
    body, end = [], None
    for step in range(1 + max(each["step"] for each in result["gpu"])):
        own = [each for each in result["gpu"] if each["step"] == step]
        begin = own[0]["start_us"]
        idle = "-" if end is None else f"{begin - end:.1f}"
        end = max(each["start_us"] + each["us"] for each in own)
        times = [f"{time:,.0f}" for time in (executes[step], begin, end)]
        body.append([f"{step}", f"{len(own)}", *times, idle])
    head = ["step", "kernels and copies", "the host launches it at, us", "the GPU begins at, us"]
    return with_conditions(
        table([*head, "ends at, us", "idle before, us"], body),
        file,
        f"{result['shape']} shape, {result['weights']} weights, {result['conditions']['batch']} "
        f"requests of one token a step, one {file.device}",
        f"recorded {result['conditions']['recorded']}",
        versions(result),
    )


def starts(files: Sequence[ResultFile]) -> list[tuple[str, float, ResultFile]]:
    """Return (engine, seconds, file) of every start that a file of generation records."""
    found = []
    for file in files:
        result = file.result
        if file.kind == "generate" and "start" in result:
            cache = result["start"]["triton_cache"]
            name = f"mrv1, {result['shape']}" + (f", Triton's cache {cache}" if cache else "")
            found.append((name, float(result["start"]["seconds"]), file))
        elif file.kind == "beside vllm":
            found += [
                (f"{engine}, {result['shape']}, whole process", float(seconds), file)
                for engine, seconds in result["start_s"].items()
            ]
    return sorted(found, key=lambda start: start[1])


def start_table(files: Sequence[ResultFile]) -> str:
    """Return a row for each start."""
    body = [
        [name, f"{seconds:.1f}", f"`{file.name}`, {file.device}; {file.origin}"]
        for name, seconds, file in starts(files)
    ]
    head, *lines = table(["engine", "seconds", "measured"], body, num_texts=1).split("\n")
    return "\n".join([head, "|---|---:|---|", *lines[1:]])


def summary_table(files: Sequence[ResultFile], longest: Mapping[tuple[str, Cell], Runs]) -> str:
    """Return README.md's table: one file of generation for each shape, the conditions below.

    Tokens/s are those of the longest runs, so that the pictures beside the table have the same.
    """
    results = [file.result for file in files]
    body = [
        [
            file.result["shape"],
            f"{entry['batch']}",
            f"{longest[OURS, Cell.of(file, entry['batch'])].tokens_per_s:,.0f}",
            f"{entry['decode_step_ms']:.2f}",
            optional(entry["floor_ms"], "{:.2f}"),
            optional(entry["share_of_floor"], "{:.0%}"),
        ]
        for file in files
        for entry in file.result["results"]
    ]
    head = ["shape", "batch", "tokens/s", "ms per decode step", "memory floor, ms"]
    conditions = results[0]["conditions"]
    sources = "; ".join(
        f"{file.result['shape']}: one {file.device}, {_runs(file.result['conditions'])}, "
        f"{file.origin}"
        for file in files
    )
    return "\n\n".join(
        [
            table([*head, "share of floor"], body),
            f"Random weights, {results[0]['dtype']}; "
            f"{conditions['prompt_tokens']} prompt + {conditions['output_tokens']} output tokens, "
            f"{conditions['sampling']}; medians after a warm-up ({sources}).",
        ]
    )


def served_summary(files: Sequence[ResultFile]) -> str:
    """Return README.md's table of engines that served arrivals at a share of the first one's peak.

    Of ``files`` only those of such arrivals, where every engine was measured; "" without any.
    """
    body, sources = [], []
    for file in files:
        result, conditions = file.result, file.result["conditions"]
        engines = {name: engine["figures"] for name, engine in result["results"].items()}
        is_timed = conditions["peak_share"] and conditions["stream_outputs"]
        if not is_timed or None in engines.values():
            continue
        for name, figures in engines.items():
            spreads = [figures[key] for key in ("ttft_ms", "itl_ms")]
            times = [f"{each['median']:,.0f} / {each['p99']:,.0f}" for each in spreads]
            body.append([result["shape"], name, f"{figures['output_throughput']:,.0f}", *times])
        peers = "".join(f"{name} {version}, " for name, version in result["peers"].items())
        sources.append(
            f"{result['shape']}: {conditions['num_conversations']:,} conversations, "
            f"{arrivals(result)}, {conditions['peak_share']:.0%} of what {next(iter(engines))} "
            f"serves at most; one {file.device}, {peers}{_runs(conditions)}, {file.origin}"
        )
    if not body:
        return ""
    head = ["shape", "engine", "output tokens/s", "first token, ms", "between tokens, ms"]
    said = "Served at arrivals of a Poisson process, median / 99th percentile"
    return "\n\n".join([table(head, body, num_texts=2), f"{said} ({'; '.join(sources)})."])


def _conditions(file: ResultFile) -> list[str]:
    result, conditions = file.result, file.result["conditions"]
    bandwidth = result.get("copy_bandwidth_bytes_per_s")
    chosen = ""  # options off their defaults; files older than an option lack it
    if conditions.get("kv_cache_dtype", "auto") != "auto":
        chosen += f"KV {conditions['kv_cache_dtype']} with a scale per {conditions['kv_scale']}, "
    if conditions.get("attention_backend", "triton") != "triton":
        chosen += f"attention by {conditions['attention_backend']}, "
    chosen += "".join(
        f"{name}={conditions[name]}, "
        for name, usual in ENGINE_DEFAULTS.items()
        if conditions.get(name, usual) != usual
    )
    start = ""
    if "start" in result:
        start = f"engine started in {result['start']['seconds']:.1f} s"
        if result["start"]["triton_cache"]:
            start += f", Triton's cache {result['start']['triton_cache']}"
    return [
        f"{result['shape']} shape, {result['weights']} weights, {result['dtype']}, {chosen}"
        f"{result['path']} path on one {file.device}",
        requests(conditions),
        versions(result),
        f"clocks {conditions['clocks']}",
        "" if bandwidth is None else f"copy bandwidth {bandwidth / 1e12:.2f} TB/s",
        start,
    ]


def requests(conditions: dict[str, Any]) -> str:
    """Return what was generated, and how often."""
    if "steps" in conditions:
        return f"{conditions['prompt_tokens']} prompt tokens, then {conditions['steps']} steps"
    return (
        f"{conditions['prompt_tokens']} prompt + {conditions['output_tokens']} output tokens, "
        f"{conditions['sampling']}; medians of {_runs(conditions)} after a warm-up"
    )


def _runs(conditions: dict[str, Any]) -> str:
    return "1 run" if conditions["repeats"] == 1 else f"{conditions['repeats']} runs"


def _processes(conditions: dict[str, Any]) -> str:
    rounds = conditions.get("rounds", 1)  # older files have one
    said = "1 process" if rounds == 1 else f"{rounds} processes"
    return f"{said}, the modes in turns" if conditions.get("in_turns") else said
