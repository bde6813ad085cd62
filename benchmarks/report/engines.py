"""Tables of whole engines: generation, serving, decode steps, starts; README.md's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.engines.driver import INTERRUPTED
from benchmarks.engines.serving import arrivals
from benchmarks.report.columns import COLUMNS, Column, column, markdown
from benchmarks.report.files import OURS, ResultFile, versions, with_conditions
from benchmarks.report.longest import ENGINE_DEFAULTS, Cell, Runs
from benchmarks.report.rows import cell_rows, host_rows, serving_rows


def vllm_table(file: ResultFile) -> str:
    """Return the throughputs of both engines and their ratio."""
    result = file.result
    return with_conditions(
        markdown(COLUMNS["beside vllm"], result["results"]),
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
    return with_conditions(
        markdown(COLUMNS["vllm"], [*cell_rows(result)]),
        file,
        f"{result['shape']} shape, {_weights(result)}, {result['dtype']}, "
        f"{_gpus(conditions)} {file.device}",
        f"{conditions['output_tokens']} output tokens, {conditions['sampling']}",
        f"medians of {_runs(conditions)} in each of {_processes(conditions)}",
        "first tokens in runs of one token each" if file.key == ("vllm", 1) else "",
        versions(result),
        *(f"{name} failed: {mode['error']}" for name, mode in result["modes"].items()
          if mode["error"] not in (None, INTERRUPTED)),
        "ended before all cells were measured" if result.get("interrupted") else "",
    )  # fmt: skip


def _gpus(conditions: Mapping[str, Any]) -> str:
    number = conditions.get("tensor_parallel_size", 1)
    return "one" if number == 1 else f"{number} x"


def _weights(result: Mapping[str, Any]) -> str:
    if result["weights"] != "dummy":
        return f"{result['weights']} weights"
    shared = result["conditions"].get("made_up_weights")  # older files lack it
    return f"made-up weights, {shared}" if shared else "weights of each engine's own"


def serving_table(file: ResultFile) -> str:
    """Return a row for each engine: throughput, and median and 99th percentile of the times."""
    result, conditions = file.result, file.result["conditions"]
    goodput, share = conditions["goodput"], conditions["peak_share"]
    limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput.items())
    fp8 = "; mrv1-fp8: with an fp8 KV cache" if "mrv1-fp8" in result["results"] else ""
    return with_conditions(
        markdown(COLUMNS["serving"], serving_rows(result)),
        file,
        f"{result['shape']} shape, {_weights(result)}, {result['dtype']}, "
        f"{_gpus(conditions)} {file.device}{fp8}",
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
    text = markdown(COLUMNS["generate"], file.result["results"])
    return with_conditions(text, file, *_conditions(file))


def runner_table(file: ResultFile) -> str:
    """Return the tables of steps and their traces, of host times, and of first requests."""
    result = file.result
    tables = [
        markdown(COLUMNS["runner"], result["results"]),
        markdown(COLUMNS["runner host"], host_rows(result)),
    ]
    if result.get("first_requests"):
        tables.append(markdown(COLUMNS["runner first"], result["first_requests"]))
    logprobs = result["conditions"].get("logprobs")
    asked = f"log-probabilities: {logprobs} for each token" if logprobs else ""
    return with_conditions("\n\n".join(tables), file, *_conditions(file), asked)


def timeline_table(file: ResultFile) -> str:
    """Return when the GPU begins and ends each recorded step, and when the host launches it."""
    result = file.result
    executes = [call["start_us"] for call in result["host"] if call["part"] == "execute"]
    rows: list[dict[str, Any]] = []
    for step in range(1 + max(each["step"] for each in result["gpu"])):
        own = [each for each in result["gpu"] if each["step"] == step]
        begin, end = own[0]["start_us"], max(each["start_us"] + each["us"] for each in own)
        rows.append(
            {
                "step": step,
                "num_kernels": len(own),
                "launched_us": executes[step],
                "begin_us": begin,
                "end_us": end,
                "idle_us": begin - rows[-1]["end_us"] if rows else None,
            }
        )
    return with_conditions(
        markdown(COLUMNS["timeline"], rows),
        file,
        f"{result['shape']} shape, {result['weights']} weights, {result['conditions']['batch']} "
        f"requests of one token a step, {_gpus(result['conditions'])} {file.device}",
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
    rows = [
        {"engine": name, "seconds": seconds, "measured": f"`{f.name}`, {f.device}; {f.origin}"}
        for name, seconds, f in starts(files)
    ]
    return markdown(COLUMNS["starts"], rows)


def summary_table(files: Sequence[ResultFile], longest: Mapping[tuple[str, Cell], Runs]) -> str:
    """Return README.md's table: one file of generation for each shape, the conditions below.

    Tokens/s are those of the longest runs, so that the pictures beside the table have the same.
    """
    rows = [
        entry
        | {
            "shape": file.result["shape"],
            "tokens_per_s": longest[OURS, Cell.of(file, entry["batch"])].tokens_per_s,
        }
        for file in files
        for entry in file.result["results"]
    ]
    keys = ("batch", "tokens_per_s", "decode_step_ms", "floor_ms", "share_of_floor")
    columns = [Column("shape", "shape", "{}"), *(column("generate", key) for key in keys)]
    columns[-2] = replace(columns[-2], head="memory floor, ms")
    first = files[0].result
    conditions = first["conditions"]
    sources = "; ".join(
        f"{file.result['shape']}: one {file.device}, {_runs(file.result['conditions'])}, "
        f"{file.origin}"
        for file in files
    )
    return "\n\n".join(
        [
            markdown(columns, rows),
            f"Random weights, {first['dtype']}; "
            f"{conditions['prompt_tokens']} prompt + {conditions['output_tokens']} output tokens, "
            f"{conditions['sampling']}; medians after a warm-up ({sources}).",
        ]
    )


def served_summary(files: Sequence[ResultFile]) -> str:
    """Return README.md's table of engines that served arrivals at a share of the first one's peak.

    Of ``files`` only those of such arrivals, where every engine was measured; "" without any.
    """
    rows: list[dict[str, Any]] = []
    sources = []
    for file in files:
        result, conditions = file.result, file.result["conditions"]
        engines = {name: engine["figures"] for name, engine in result["results"].items()}
        is_timed = conditions["peak_share"] and conditions["stream_outputs"]
        if not is_timed or None in engines.values():
            continue
        rows += [row | {"shape": result["shape"]} for row in serving_rows(result)]
        peers = "".join(f"{name} {version}, " for name, version in result["peers"].items())
        sources.append(
            f"{result['shape']}: {conditions['num_conversations']:,} conversations, "
            f"{arrivals(result)}, {conditions['peak_share']:.0%} of what {next(iter(engines))} "
            f"serves at most; one {file.device}, {peers}{_runs(conditions)}, {file.origin}"
        )
    if not rows:
        return ""
    times = [
        replace(each, format="{:,.0f} / {:,.0f}")
        for each in COLUMNS["serving"]
        if each.head in ("first token, ms", "between tokens, ms")
    ]
    keys = ("engine", "output_throughput")
    columns = [Column("shape", "shape"), *(column("serving", key) for key in keys), *times]
    said = "Served at arrivals of a Poisson process, median / 99th percentile"
    return "\n\n".join([markdown(columns, rows), f"{said} ({'; '.join(sources)})."])


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
        f"{result['path']} path on {_gpus(conditions)} {file.device}",
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
