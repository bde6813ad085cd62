"""The table of docs/performance.md: where mrv1 is ahead and behind, and what options cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import geometric_mean

from benchmarks.engines.serving import arrivals
from benchmarks.report.charts import OUTSIDE, VLLM_MODES
from benchmarks.report.columns import COLUMNS, markdown
from benchmarks.report.files import OURS, ResultFile
from benchmarks.report.longest import Cell, longest_runs, peer

Known = Mapping[str, list[ResultFile]]
Row = dict[str, str]


def performance_table(known: Known) -> str:
    """Return a row for each comparison of a results file.

    Args:
        known: the files by kind, only those whose schema is known.
    """
    rows = [
        *_generation(known), *_inside_vllm(known), *_serving(known), *_kernels(known),
        *_features(known),
    ]  # fmt: skip
    return markdown(COLUMNS["performance"], rows)


def _row(what: str, cases: str, figures: Iterable[str], *files: ResultFile) -> Row:
    names = ", ".join(dict.fromkeys(f"`{file.stem}`" for file in files))
    return {"what": what, "cases": cases, "figures": ", ".join(figures), "files": names}


def _times(ratios: Iterable[float]) -> list[str]:
    return [f"{ratio:.2f}x" for ratio in ratios]


def _batches(file: ResultFile) -> str:
    return f"{', '.join(str(entry['batch']) for entry in file.result['results'])} requests"


def _generation(known: Known) -> Iterator[Row]:
    longest = longest_runs(known)
    for file in known.get("beside vllm", []):
        cells = [Cell.of(file, entry["batch"]) for entry in file.result["results"]]
        ours, theirs = ([longest[name, cell] for cell in cells] for name in (OURS, peer(file)))
        pairs = [*zip(ours, theirs, strict=True)]
        yield _row(
            f"tokens/s over {peer(file)}",
            f"{file.result['shape']}, {_batches(file)}, longest runs",
            _times(own.tokens_per_s / other.tokens_per_s for own, other in pairs),
            *(runs.file for runs in (*ours, *theirs)),
        )
    for file in known.get("generate", []):
        shares = [entry["share_of_floor"] for entry in file.result["results"]]
        if None not in shares:
            cases = f"{file.result['shape']}, {_batches(file)}"
            yield _row("share of the memory floor", cases, [f"{s:.0%}" for s in shares], file)


def _inside_vllm(known: Known) -> Iterator[Row]:
    for file in known.get("vllm", []):
        cells = file.result["results"]
        names = ", ".join(f"{cell['batch']} x {cell['prompt_tokens']:,}" for cell in cells)
        for mode in file.result["modes"]:
            found = [cell["modes"].get(mode, {}).get("speedup") for cell in cells]
            if mode.startswith("vllm") or None in found:
                continue
            cases, what = f"{file.result['shape']}, {names} tokens", "tokens/s in vLLM: "
            if mode in OUTSIDE:
                what = f"tokens/s over vLLM {file.result['peers']['vllm']}: "
            yield _row(what + VLLM_MODES[mode], cases, _times(found), file)
            shares = [cell["modes"][mode]["share_of_floor"] for cell in cells]
            if mode in OUTSIDE and None not in shares:
                what = f"share of the memory floor: {VLLM_MODES[mode]}"
                yield _row(what, cases, [f"{share:.0%}" for share in shares], file)


def _serving(known: Known) -> Iterator[Row]:
    for file in known.get("serving", []):
        result, conditions = file.result, file.result["conditions"]
        cases = (
            f"{result['shape']}, {conditions['num_conversations']:,} conversations of "
            f"{conditions['num_turns']}, {arrivals(result)}"
        )
        for engine, ratios in result["over_vllm"].items():
            if ratios is None:
                continue
            yield _row(
                f"{engine} serving, tokens/s over vLLM",
                cases,
                _times([ratios["output_throughput"]]),
                file,
            )
            if "itl_ms_p99" in ratios:
                times = ("ttft_ms_median", "ttft_ms_p99", "itl_ms_median", "itl_ms_p99")
                yield _row(
                    f"{engine} serving, vLLM's time: first token, between tokens (median, p99)",
                    cases,
                    _times(1 / ratios[time] for time in times),
                    file,
                )


def _kernels(known: Known) -> Iterator[Row]:
    for kind, subject in (
        ("attention", "attention"), ("kv_cache_write", "KV cache write"),
        ("sample_tokens", "sampler"),
    ):  # fmt: skip
        for file in known.get(kind, []):
            result, entries = file.result, file.result["results"]
            name = f"{result['mode']} {subject}" if kind == "attention" else subject
            cases = "1 case" if len(entries) == 1 else f"{len(entries)} cases"
            if kind != "sample_tokens":
                conditions = result["conditions"]
                cases += (
                    f", {conditions['num_q_heads']} query heads on {conditions['num_kv_heads']} "
                    f"of {conditions['head_dim']}, cache {result['kv_dtype']}"
                )
            shares = [entry["variants"][OURS]["share_of_copy_bandwidth"] for entry in entries]
            if result.get("mode") == "decode" and None not in shares:
                what = f"{name}, share of the copy bandwidth"
                yield _row(what, cases, [_span(shares, "{:.0%}")], file)
            peers = dict.fromkeys(n for entry in entries for n in entry["peer_time_over_ours"])
            others = [each for each in peers if not each.startswith(OURS)]
            figures = []
            for other in others:
                ratios = [
                    entry["peer_time_over_ours"][other]
                    for entry in entries
                    if other in entry["peer_time_over_ours"]
                ]
                mean = f"{other} {geometric_mean(ratios):.2f}x"
                figures.append(
                    mean if len(ratios) == 1 else f"{mean} ({_span(ratios, '{:.2f}x')})"
                )
            if figures:
                yield _row(f"{name}, others' time over mrv1's", cases, figures, file)


def _span(values: list[float], form: str) -> str:
    """Return the lowest and the highest of some figures."""
    return " to ".join(dict.fromkeys(form.format(f(values)) for f in (min, max)))


def _features(known: Known) -> Iterator[Row]:
    for file in known.get("runner", []):
        for key, what in (
            (
                "deterministic_over_default",
                "`deterministic=True`, time of a step over the default",
            ),
            ("rank_invariant_over_default", "the same with `rank_invariant=True`"),
            ("logprobs_over_default", "log-probabilities, time of a step over without"),
        ):
            ratios = [entry.get(key) for entry in file.result["results"]]
            if None not in ratios:
                yield _row(what, f"{file.result['shape']}, {_batches(file)}", _times(ratios), file)
    for file in known.get("speculation", []):
        for text in dict.fromkeys(entry["text"] for entry in file.result["results"]):
            own = [entry for entry in file.result["results"] if entry["text"] == text]
            cases = f"{', '.join(str(entry['batch']) for entry in own)} requests, text `{text}`"
            yield _row(
                "n-gram drafts, tokens/s over plain decoding",
                cases,
                _times(entry["ngram_over_plain"] for entry in own),
                file,
            )
    for file in known.get("headwise", []):
        found = {entry["variant"]: entry for entry in file.result["results"]}
        if "discrete" in found and "masked" in found:
            conditions, discrete = file.result["conditions"], found["discrete"]
            yield _row(
                "head policy with a table a head over masking: first token, between tokens",
                f"{file.result['shape']}, {conditions['full_share']:.0%} of the heads full, "
                f"prompts of {conditions['prompt_tokens']:,}",
                _times(discrete[f"{t}_speedup"] for t in ("first_token", "between_tokens")),
                file,
            )
    for file in known.get("multimodal", []):
        places = file.result["prefill"]
        yield _row(
            "features, time to the first token over that of text",
            f"{file.result['conditions']['rows']:,} rows on the GPU, in host memory",
            _times(places[name]["first_token_over_text"] for name in ("gpu", "pinned")),
            file,
        )
    for file in known.get("kv_offload", []):
        own = file.result["results"]
        yield _row(
            "a KV listener, time to the first token over none",
            "that does nothing, that copies each block",
            _times(
                own[n]["first_token_ms"] / own["none"]["first_token_ms"]
                for n in ("empty", "copies")
            ),
            file,
        )
