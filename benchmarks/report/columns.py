"""The figures of each kind of result: one list for console, page, pictures and manual."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

TEXT = ""
"""The format of a column of texts: to the left, where figures stand to the right."""


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a result, or several in a cell: where it is, how it is shown, what it means."""

    key: str
    """Where an entry has the figure; dots lead into objects: ``"host.total_us"``. Several keys
    have spaces between them."""
    head: str
    """Of the tables' column."""
    format: str = TEXT
    """Takes the figures of ``key``, as ``str.format``. A figure that is null or missing is "-"."""
    help: str = ""
    """What the first figure means, in the manual; "" = the head says it."""
    unit: float = 1
    """What the figures are divided by."""
    on_page: bool = True
    """Whether the page shows it; the console always does."""
    console: str = ""
    """The format on the console where that shows more digits than the page; "" = ``format``."""

    @property
    def keys(self) -> list[str]:
        """The keys one by one."""
        return self.key.split(" ")

    def cell(self, entry: Mapping[str, Any], *, on_console: bool = False) -> str:
        """Return what the column's cell says of an entry."""
        found = [figure(entry, key) for key in self.keys]
        if any(value is None for value in found):
            return "-"
        if self.format == TEXT:
            return str(found[0])
        form = self.console if on_console and self.console else self.format
        return form.format(*(v if self.unit == 1 else v / self.unit for v in found))

    def is_in(self, entry: Mapping[str, Any]) -> bool:
        """Return whether an entry has the figures: files older than a figure lack it."""
        return all(key in entry or key.partition(".")[0] in entry for key in self.keys)


def figure(entry: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Return what an entry has at a key; None where an object on the way lacks it or is null."""
    found: Any = entry
    for name in key.split("."):
        found = None if found is None else found.get(name)
    return found


def column(kind: str, key: str) -> Column:
    """Return the column of a kind with a key."""
    return next(each for each in COLUMNS[kind] if each.key == key)


def shown(
    columns: Iterable[Column], entries: Sequence[Mapping[str, Any]], *, on_page: bool
) -> list[Column]:
    """Return the columns of a table: those that some entry has, and that have a place there."""
    return [
        each
        for each in columns
        if (each.on_page or not on_page) and any(each.is_in(entry) for entry in entries)
    ]


def markdown(columns: Iterable[Column], entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the page's table: a row for each entry."""
    kept = shown(columns, entries, on_page=True)
    rows = [[each.cell(entry) for each in kept] for entry in entries]
    return table([each.head for each in kept], rows, [each.format == TEXT for each in kept])


def table(head: Sequence[str], rows: Sequence[Sequence[str]], are_texts: Sequence[bool]) -> str:
    """Return a Markdown table; texts stand to the left, figures to the right."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    marks = "|".join("---" if is_text else "---:" for is_text in are_texts)
    return "\n".join([lines[0], f"|{marks}|", *lines[1:]])


def console(
    columns: Iterable[Column],
    entries: Sequence[Mapping[str, Any]],
    title: str,
    caption: str | None = None,
    section: str | None = None,
) -> Table:
    """Return the console's table: a row for each entry.

    Args:
        columns: those that no entry has are left out.
        entries: of the result.
        title: stands above.
        caption: stands below.
        section: head of a column whose equal cells are shown once, with a line above.
    """
    kept = shown(columns, entries, on_page=False)
    found = Table(title=title, caption=caption)
    for each in kept:
        is_text = each.format == TEXT
        found.add_column(each.head, justify="left" if is_text else "right", no_wrap=is_text)
    last = None
    for entry in entries:
        cells = {each.head: each.cell(entry, on_console=True) for each in kept}
        if section is not None:
            if cells[section] == last:
                cells[section] = ""
            else:
                found.add_section()
                last = cells[section]
        found.add_row(*cells.values())
    return found


def manual(kind: str) -> list[str]:
    """Return what the manual says of a kind's columns; those of one meaning share a row."""
    rows: dict[str, list[str]] = {}
    for each in COLUMNS[kind]:
        if each.help:
            name = each.keys[0].removesuffix(".median")
            rows.setdefault(each.help, []).append(f"`{name}`")
    return [f"| {', '.join(names)} | {meaning} |" for meaning, names in rows.items()]


_BATCH = Column("batch", "batch", "{}")
_RATES = (
    "output tokens, prompt and output tokens (of each turn its whole prompt), requests, over "
    "`duration_s`: from the start to the last token"
)
_TIMES = (
    "mean, median, p99 and all percentiles, in ms: first token from when the request was due; "
    "between tokens; last token. null with `--no-stream-outputs`, except the last"
)
_FASTER = "how many times as fast as the reference, by `tokens_per_s` and by `tpot_ms`"
_WAITS = "waits for an event (a step's result is one), and for a stream or the device"

_VARIANT = (
    Column("kernel", "kernel", on_page=False),
    Column("median_us", "us", "{:,.1f}"),
    Column("p20_us", "p20", "{:.2f}", on_page=False),
    Column("p80_us", "p80", "{:.2f}", on_page=False),
    Column(
        "bytes_moved", "MB moved", "{:.2f}",
        "`kv_bytes`, the entries of the block table for those pages, q and out; without scales "
        "where a peer has one scale for all", unit=1e6, on_page=False,
    ),
    Column(
        "share_of_copy_bandwidth", "of copy bandwidth", "{:.0%}",
        "`bytes_moved` / median / copy bandwidth of the same process",
    ),
    Column("flops_per_s", "TFLOP/s", "{:.0f}", "`flops` / median; prefill only", unit=1e12),
    Column("ratio", "ratio", "{:.2f}", on_page=False),
    Column("relative_error", "error", "{:.1e}", on_page=False),
)  # fmt: skip
"""Of a variant of a kernel, on the console."""

_WRITES = {"median_us": "{:,.2f}", "bytes_moved": "{:.3f}"}
"""Formats on the console of writes to the cache: they are short, and move little."""

COLUMNS: dict[str, tuple[Column, ...]] = {
    "generate": (
        _BATCH,
        Column(
            "tokens_per_s", "tokens/s", "{:,.0f}",
            "generated tokens of all requests / time from adding the first request to the last "
            "token; prefill is included", console="{:,.1f}",
        ),
        Column(
            "decode_step_ms", "ms per decode step", "{:.2f}",
            "time from the end of one engine step to the end of the next, on the host; only steps "
            "in which every row decodes",
        ),
        Column(
            "host_ms", "of it host, ms", "{:.3f}",
            "mean host time of a decode step, without the wait for a result and the read of it; "
            "null on a CPU",
        ),
        Column(
            "gpu_ms", "of it GPU, ms", "{:.2f}",
            "mean GPU time of a decode step: from the end of the previous step, or from its own "
            "start if the GPU was idle; null on a CPU", on_page=False,
        ),
        Column(
            "floor_ms", "floor, ms", "{:.2f}",
            "`(weight_bytes + kv_bytes) / copy_bandwidth_bytes_per_s`",
        ),
        Column(
            "share_of_floor", "share of floor", "{:.0%}",
            "`floor_ms / decode_step_ms`; 1 is a step that only reads its bytes, once",
        ),
        Column(
            "prefill_ms", "prefill, ms", "{:.1f}", "time until every request has its first token"
        ),
    ),
    "runner": (
        _BATCH,
        Column(
            "step_ms", "ms per step", "{:.3f}",
            "median time from the end of one engine step to the end of the next, on the host",
        ),
        Column("step_p20_ms", "p20", "{:.3f}", on_page=False),
        Column("step_p80_ms", "p80", "{:.3f}", on_page=False),
        Column(
            "gpu_ms", "GPU, ms", "{:.3f}", "as for `generate`, in the same steps", on_page=False
        ),
        Column(
            "deterministic_over_default", "deterministic", "{:.2f}x",
            "step time of a second engine with `deterministic=True`, over `step_ms`",
        ),
        Column(
            "rank_invariant_over_default", "rank-invariant", "{:.2f}x",
            "the same of a third engine, with `rank_invariant=True` too; "
            "`--no-compare-deterministic` leaves out both",
            on_page=False,  # no file has it yet
        ),
        Column(
            "logprobs_over_default", "log-probabilities", "{:.2f}x",
            "`logprobs_step_ms` over `step_ms`",
        ),
        Column("trace.step_us", "us per step", "{:,.0f}", on_page=False),
        Column(
            "trace.idle_share", "GPU idle", "{:.1%}",
            "time in which no kernel runs / time from the first kernel to the last",
        ),
        Column(
            "trace.idle_between_launches_share", "between launches", "{:.1%}",
            "the part of `trace.idle_share` between the work of two launches; the rest lies "
            "between kernels of one graph",
        ),
        Column("trace.host_to_device_copies", "copies up", "{:.2g}", console="{:.2f}"),
        Column("trace.device_to_host_copies", "copies down", "{:.2f}", on_page=False),
        Column("trace.graph_launches", "graphs", "{:.2g}", console="{:.2f}"),
        Column(
            "trace.kernel_launches", "other kernels", "{:.2g}",
            "kernels outside graphs. Kernels, graphs and copies are attributed to the call that "
            "launched them", console="{:.2f}",
        ),
        Column("trace.event_waits", "event waits", "{:.2g}", _WAITS, console="{:.2f}"),
        Column("trace.other_waits", "other waits", "{:.2g}", _WAITS, console="{:.2f}"),
    ),
    "runner host": (
        _BATCH,
        Column("waiting", "waiting", "{}"),
        Column("host.total_us", "host, us", "{:,.0f}", console="{:,.1f}"),
        Column("host.mean_total_us", "mean", "{:,.1f}", on_page=False),
        Column("host.quietest_us", "quietest", "{:,.0f}", console="{:,.1f}"),
        Column("host.schedule_us", "schedule", "{:,.0f}", console="{:,.1f}"),
        Column("host.execute_us", "execute", "{:,.0f}", console="{:,.1f}"),
        Column("host.read_us", "read", "{:,.0f}", console="{:,.1f}"),
        Column("host.update_us", "update", "{:,.0f}", console="{:,.1f}"),
    ),
    "runner first": (
        Column("kind", "requests of 8 tokens"),
        Column("first_ms", "first, ms", "{:.1f}"),
        Column("second_ms", "second, ms", "{:.1f}"),
        Column("compilations", "kernels compiled", "{}"),
    ),
    "timeline": (
        Column("step", "step", "{}"),
        Column("num_kernels", "kernels and copies", "{}"),
        Column("launched_us", "the host launches it at, us", "{:,.0f}"),
        Column("begin_us", "the GPU begins at, us", "{:,.0f}"),
        Column("end_us", "ends at, us", "{:,.0f}"),
        Column("idle_us", "idle before, us", "{:.1f}"),
    ),
    "floor": (
        Column("batch", "batch", "{}", on_page=False),
        Column("phase", "phase", on_page=False),
        Column("kernels", "kernels", "{:.0f}", on_page=False),
        Column("us", "us a step", "{:,.1f}", on_page=False),
        Column(
            "bytes", "MB", "{:,.1f}", "least bytes that a phase reads: weights, keys and values",
            unit=1e6, on_page=False,
        ),
        Column(
            "share_of_floor", "share", "{:.0%}", "`bytes` / copy bandwidth / `us`", on_page=False
        ),
    ),
    "floor layer": (
        Column("phase", "phase", on_page=False),
        Column("name", "kernel", on_page=False),
        Column("start_us", "from, us", "{:.1f}", on_page=False),
        Column("us", "us", "{:.1f}", on_page=False),
        Column("bar", "one layer", on_page=False),
    ),
    "beside vllm": (
        _BATCH,
        Column("tokens_per_s.mrv1", "mrv1, tokens/s", "{:,.0f}"),
        Column("tokens_per_s.vllm", "vLLM, tokens/s", "{:,.0f}"),
        Column("mrv1_over_vllm", "mrv1 over vLLM", "{:.2f}x"),
    ),
    "serving": (
        Column("engine", "engine"),
        Column("output_throughput", "output tokens/s", "{:,.0f}", _RATES),
        Column("total_token_throughput", "all tokens/s", "{:,.0f}", _RATES),
        Column("request_throughput", "requests/s", "{:,.2f}", _RATES, on_page=False),
        Column(
            "request_goodput", "good requests/s", "{:.2f}",
            "requests within all limits of `--goodput` / `duration_s`; null without limits",
        ),
        *(
            Column(f"{key}.median {key}.p99", head, "{:,.1f} / {:,.1f}", _TIMES)
            for key, head in (
                ("ttft_ms", "first token, ms"),
                ("itl_ms", "between tokens, ms"),
                ("e2el_ms", "whole request, ms"),
            )
        ),
        Column("first_tokens", "first tokens", on_page=False),
    ),
    "vllm": (
        Column("cell", "requests x prompt"),
        Column("mode", "mode"),
        Column(
            "tokens_per_s", "tokens/s", "{:,.0f}",
            "generated tokens of all requests / seconds from adding the first to the last token",
        ),
        Column("slowest fastest", "of runs", "{:,.0f} to {:,.0f}"),
        Column("speedup", "speedup", "{:.2f}x", _FASTER),
        Column("tpot_speedup", "of a token", "{:.2f}x", _FASTER, on_page=False),
        Column(
            "ttft_ms", "first token, ms", "{:,.1f}",
            "median time to a request's first token (`schema` 1: in a run of the same prompts "
            "with one output token each)",
        ),
        Column(
            "tpot_ms", "ms per token", "{:.2f}",
            "time per output token: (seconds of the run - `prefill_ms`) / (output tokens - 1)",
            console="{:.3f}",
        ),
        Column("share_of_floor", "share of floor", "{:.0%}", "`floor_ms / tpot_ms`"),
    ),
    "vllm modes": (
        Column("mode", "mode", on_page=False),
        Column("start_s", "start, s", "{:.1f}", on_page=False),
        Column("first_tokens", "first tokens", on_page=False),
    ),
    "async llm": (
        Column("batch", "requests", "{}"),
        Column("tokens_per_s.LLM", "LLM, tokens/s", "{:,.0f}"),
        Column("tokens_per_s.AsyncLLM", "AsyncLLM, tokens/s", "{:,.0f}"),
        Column("async_over_llm", "AsyncLLM over LLM", "{:.3f}x"),
    ),
    "speculation": (
        Column("text", "text"),
        _BATCH,
        Column("tokens_per_s.plain", "plain, tokens/s", "{:,.0f}"),
        Column("tokens_per_s.ngram", "n-gram drafts, tokens/s", "{:,.0f}"),
        Column("ngram_over_plain", "ratio", "{:.2f}x"),
        Column("num_steps.ngram num_steps.plain", "steps", "{} for {}"),
        Column("accepted_share", "drafts accepted", "{:.0%}"),
    ),
    "starts": (
        Column("engine", "engine"),
        Column("seconds", "seconds", "{:.1f}"),
        Column("measured", "measured"),
    ),
    "performance": (
        Column("what", "what"),
        Column("cases", "cases"),
        Column("figures", "figures"),
        Column("files", "files"),
    ),
    "why": (
        Column("what", "what"),
        Column("figure", "measured"),
        Column("files", "file"),
    ),
    "sleep": (
        Column("call", "seconds"),
        Column("sleep_s", "`sleep`", "{:.3f}"),
        Column("wake_weights_s", '`wake_up(["weights"])`', "{:.3f}"),
        Column("update_weights_s", "`update_weights` from the host", "{:.3f}"),
        Column("update_weights_on_device_s", "`update_weights` on the GPU", "{:.3f}"),
        Column("wake_up_s", "`wake_up`", "{:.3f}"),
        Column("freed_bytes", "freed, GB", "{:.1f}", unit=1e9),
    ),
    "kv_offload": (
        Column("listener", "KV listener"),
        Column("seconds seconds_over_none", "seconds", "{:.3g} ({:.2f}x)"),
        Column("first_token_ms first_token_over_none", "first token, ms", "{:.3g} ({:.2f}x)"),
    ),
    "multimodal": (
        Column("variant", "tokens"),
        Column(
            "first_token_ms first_token_over_text", "first token, ms", "{:.2f} ({:.3f}x)",
            "of `prefill.*`: median from adding the request to its token; making the item, which "
            "checks its rows, is not included",
        ),
        Column(
            "gpu_ms gpu_over_text", "GPU, ms", "{:.2f} ({:.3f}x)",
            "of that, the time that the GPU works on the step, without the copy of features "
            "before it (with it in schema 1); 0 on a CPU",
        ),
        Column(
            "num_graph_steps num_steps", "graph steps", "{} of {}",
            "how many of `num_steps` ran as CUDA graphs alone",
        ),
    ),
    "capacity": (
        Column("variant", "cache"),
        Column("kv_cache.allocated_bytes", "GiB", "{:.1f}", unit=2**30, console="{:.2f}"),
        Column("bytes_of_request", "GiB a request", "{:.2f}", unit=2**30, console="{:.3f}"),
        Column("predicted_requests", "predicted", "{}"),
        Column("requests", "requests", "{}"),
        Column("ratio", "ratio", "{:.2f}x"),
        Column("longest_context", "longest context", "{:,}"),
    ),
    "headwise": (
        Column("variant", "cache"),
        Column(
            "tokens_per_s throughput_ratio", "tokens/s", "{:,.0f} ({:.2f}x)",
            "of all requests, which are added at once, until the last one ends",
        ),
        Column(
            "crowded_tokens_per_s crowded_ratio", "while some wait", "{:,.0f} ({:.2f}x)",
            "until the last step in which a request waited; null if no request waited",
        ),
        Column(
            "first_token_ms first_token_speedup first_token_less", "first token, ms",
            "{:,.0f} ({:.2f}x){}",
            "median over requests, from being added, with the wait for memory",
        ),
        Column(
            "between_tokens_ms between_tokens_speedup between_tokens_less", "between tokens, ms",
            "{:.2f} ({:.2f}x){}",
            "median over requests of (last token - first token) / (tokens - 1), with preemptions",
        ),
        Column("num_preemptions", "preempted", "{:.0f}"),
    ),
    "recall": (
        Column("heads", "heads"),
        Column("cache", "cache"),
        Column("num_full num_heads", "full", "{} of {}"),
        Column("recall", "recall", "{}"),
        Column("nats", "nats per token", "{:.4f}"),
        Column("loss", "against all full", "{:+.2%}"),
    ),
    "attention": (
        Column("cell", "batch x context", "{}"),
        *_VARIANT,
        Column(
            "plan_us", "plan, us", "{:.1f}",
            "median time of `plan_decode_attention`, which a model runs once a step for all "
            "layers; decode only",
        ),
    ),
    "kv_cache_write": (
        Column("tokens", "tokens", "{:,}"),
        *(replace(each, console=_WRITES.get(each.key, "")) for each in _VARIANT),
    ),
    "sample_tokens": (
        Column("rows", "rows", "{}"),
        Column("std", "std of logits", "{}"),
        Column("params", "case", "{}"),
        Column("kernel", "sampler", on_page=False),
        Column("median_us", "us", "{:,.1f}"),
        Column("target_us", "target, us", "{:,.1f}"),
        Column("reads", "reads", "{:.1f}"),
        Column("share_of_copy_bandwidth", "of copy bandwidth", "{:.0%}"),
        Column("ratio", "ratio", "{:.2f}", on_page=False),
    ),
}  # fmt: skip
"""Kind of a result, or of a table of it -> its columns."""
