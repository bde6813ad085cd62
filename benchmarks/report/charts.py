"""What the pictures of the report show: plain data, without a word on how it is drawn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.engines.serving import arrivals
from benchmarks.report.columns import COLUMNS
from benchmarks.report.engines import starts
from benchmarks.report.files import OURS, ResultFile, devices, own_device
from benchmarks.report.longest import Cell, Runs, longest_runs, peer, said_runs
from benchmarks.report.rows import cells_by_bytes
from mrv1.integrations.vllm.versions import INTERFACES

CACHES = ("auto", "fp8_e4m3")
NAMES = {
    "mrv1-auto": "mrv1, unquantized cache",
    "mrv1-deterministic": "mrv1, deterministic",
    "mrv1-draw": "mrv1, the draw alone",
    "mrv1-fused": "mrv1, norm and rope too",
    "mrv1-quarter": "mrv1, a scale per quarter",
    "flash-attn-3-bf16": "flash-attn-3, bf16 cache",
    "vllm-triton-side": "vllm-triton, scales apart",
    "torch-sdpa": "torch SDPA",
}
"""Variants whose names a picture has to spell out."""
VLLM_MODES = {
    "worker": "mrv1's worker",
    "worker-fp8": "mrv1's worker, fp8 cache",
    "backend": "mrv1's attention",
    "backend-fp8": "mrv1's attention, fp8 cache",
    "vllm": "vLLM alone",
    "vllm-fp8": "vLLM alone, fp8 cache",
    "mrv1": "mrv1 alone",
    "mrv1-deterministic": "mrv1 alone, deterministic",
    "mrv1-rank-invariant": "mrv1 alone, rank-invariant",
}
"""The modes of ``bench vllm``, in the order of a picture's bars."""
OUTSIDE = frozenset(("vllm", "mrv1", "mrv1-deterministic", "mrv1-rank-invariant"))
"""Those without mrv1 in vLLM."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line; at its end stands its name."""

    name: str
    points: tuple[tuple[float, float], ...]
    notes: tuple[str, ...] = ()
    """A text at each point."""
    spreads: tuple[tuple[float, float], ...] = ()
    """The lowest and the highest of what each point is the median of."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes of a chart."""

    title: str
    x_label: str
    y_label: str
    ticks: tuple[tuple[float, str], ...]
    series: tuple[Series, ...]
    scale: str = "linear"
    """Of y: "linear" from 0, "log", "share", which is linear with percentages, or for bars
    "ratio", with a line at 1."""
    is_bars: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture: its file's name, its panels, and the results files in whose section it stands."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    files: tuple[str, ...]
    caption: str = ""
    """Stands below the picture: what its panels have no room for, such as further files."""

    @property
    def data(self) -> str:
        """Everything that the picture shows, as JSON."""
        return json.dumps(asdict(self))


def charts(of: dict[str, list[ResultFile]]) -> Iterator[Chart]:
    """Yield every chart for which there are results.

    Args:
        of: the files by kind, only those whose schema is known.
    """
    for file in of.get("beside vllm", []):
        yield _throughput(file, longest_runs(of))
    for file in of.get("serving", []):
        figures = [engine["figures"] for engine in file.result["results"].values()]
        if any(each and each["ttft_ms"] for each in figures):
            yield serving_chart(file)
    yield from _inside_vllm(of.get("vllm", []))
    decode, prefill = (
        [file for file in of.get("attention", []) if file.result["mode"] == mode]
        for mode in ("decode", "prefill")
    )
    yield from _by_cache(
        "decode-attention", "Decode attention", decode, "share_of_copy_bandwidth", "share",
        "share of the copy bandwidth", 1.0,
    )  # fmt: skip
    yield from _by_cache(
        "prefill-attention", "Prefill attention", prefill, "flops_per_s", "linear", "TFLOP/s",
        1e12,
    )  # fmt: skip
    yield from _kv_write(of.get("kv_cache_write", []))
    for file in of.get("sample_tokens", []):
        yield _sampler(file)
    yield from _policies(of.get("capacity", []), of.get("headwise", []))
    yield from _start([*of.get("generate", []), *of.get("beside vllm", [])])


def _ticks(labels: Iterable[str]) -> tuple[tuple[float, str], ...]:
    return tuple((float(place), label) for place, label in enumerate(labels))


def _throughput(file: ResultFile, longest: Mapping[tuple[str, Cell], Runs]) -> Chart:
    """Chart the cells of a file beside vLLM, from the longest runs that any file has of them."""
    result, conditions = file.result, file.result["conditions"]
    batches = [entry["batch"] for entry in result["results"]]
    lines = {
        name: [longest[name, Cell.of(file, batch)] for batch in batches]
        for name in (OURS, peer(file))
    }
    series = []
    for name, line in lines.items():
        notes = [f"{runs.tokens_per_s:,.0f}" for runs in line]
        if name == OURS:
            ratios = [
                ours.tokens_per_s / theirs.tokens_per_s
                for ours, theirs in zip(line, lines[peer(file)], strict=True)
            ]
            notes = [f"{note} ({ratio:.1f}x)" for note, ratio in zip(notes, ratios, strict=True)]
        notes = [f"{note}\n{runs.count}" for note, runs in zip(notes, line, strict=True)]
        points = tuple((float(x), runs.tokens_per_s) for x, runs in enumerate(line))
        series.append(Series(name, points, tuple(notes), tuple(runs.spread for runs in line)))
    panel = Panel(
        "",
        f"concurrent requests, each {conditions['prompt_tokens']} prompt + "
        f"{conditions['output_tokens']} output tokens",
        "generated tokens/s",
        _ticks(f"{batch}" for batch in batches),
        tuple(series),
        "log",
    )
    title = f"Generation: {result['shape']} shape, {result['dtype']}, {file.device}"
    newest = list(INTERFACES.values())[-1].tested
    newer = "" if peer(file).endswith(newest) else f" vLLM {newest} is newer, and not measured."
    caption = f"Medians; a bar goes from the slowest to the fastest run. {said_runs(lines)}{newer}"
    return Chart(file.stem, title, (panel,), (file.name,), caption)


def serving_chart(file: ResultFile) -> Chart:
    """Chart the times by percentile: a panel for each time that was measured."""
    result = file.result
    engines = {
        name: engine["figures"] for name, engine in result["results"].items() if engine["figures"]
    }
    panels = []
    times = [each for each in COLUMNS["serving"] if each.keys[0].endswith(".median")]
    for each in times:
        key = each.key.partition(".")[0]
        series = tuple(
            Series(name, tuple((float(x), y) for x, y in enumerate(figures[key]["percentiles"])))
            for name, figures in engines.items()
            if figures[key] is not None
        )
        if series:
            ticks = tuple((float(x), f"{x}") for x in (0, 25, 50, 75, 99))
            panels.append(Panel("", "percentile", each.head, ticks, series, "log"))
    title = f"Serving: {result['shape']}, {arrivals(result)}, {file.device}"
    return Chart(file.stem, title, tuple(panels), (file.name,))


def _inside_vllm(files: Sequence[ResultFile]) -> Iterator[Chart]:
    """Yield the chart of the tokens/s over those of vLLM alone: a panel for each shape.

    Of a cell that several files have, the figure of the most runs is shown.
    """
    found: dict[str, dict[tuple[int, int, int], tuple[int, float]]] = {}
    modes = [*VLLM_MODES]
    files = [
        file
        for file in files
        if file.result["reference"] == "vllm"
        and any(not cell["modes"].keys() <= OUTSIDE for cell in file.result["results"])
    ]
    for file in files:
        ratios = found.setdefault(file.result["shape"], {})
        for cell in file.result["results"]:
            for mode, figures in cell["modes"].items():
                if mode not in OUTSIDE and figures["speedup"] is not None:
                    key = cell["prompt_tokens"], cell["batch"], modes.index(mode)
                    runs = len(figures["samples"])
                    if runs >= ratios.get(key, (0, 0.0))[0]:
                        ratios[key] = runs, figures["speedup"]
    panels = []
    for shape, ratios in found.items():
        labels, series = [], []
        for place, ((prompt, batch, mode), (_, ratio)) in enumerate(sorted(ratios.items())):
            name = VLLM_MODES[modes[mode]]
            labels.append(f"{batch} x {prompt:,}, {name}")
            series.append(Series(name, ((float(place), ratio),), (f"{ratio:.2f}x",)))
        title = f"{shape}, requests x prompt tokens"
        label = "tokens/s over those of vLLM alone with its default cache"
        bars = tuple(series)
        panels.append(Panel(title, "", label, _ticks(labels), bars, "ratio", is_bars=True))
    if panels:
        versions = sorted({file.result["peers"]["vllm"] for file in files})
        title = f"mrv1 in vLLM {', '.join(versions)}, {devices(files)}"
        yield Chart("inside-vllm", title, tuple(panels), tuple(file.name for file in files))


def _by_cache(
    name: str,
    subject: str,
    files: Sequence[ResultFile],
    figure: str,
    scale: str,
    label: str,
    unit: float,
) -> Iterator[Chart]:
    """Yield a chart with a panel for each cache dtype: the file with the most cells of each."""
    chosen = []
    for kv_dtype in CACHES:
        own = [file for file in files if file.result["kv_dtype"] == kv_dtype and _is_plain(file)]
        if own:
            chosen.append(max(own, key=lambda file: len(file.result["results"])))
    if chosen:
        panels = [
            _cells(file, figure, scale, label, unit, own_device(file, chosen)) for file in chosen
        ]
        title = f"{subject}, {chosen[0].result['dtype']}, {devices(chosen)}"
        yield Chart(name, title, tuple(panels), tuple(file.name for file in chosen))


def attention_chart(file: ResultFile) -> Chart:
    """Return the chart of one file: shares of the copy bandwidth; times if there is no GPU."""
    how = ("median_us", "log", "median time, us (no measurement)")
    if file.result["copy_bandwidth_bytes_per_s"] is not None:
        how = ("share_of_copy_bandwidth", "share", "share of the copy bandwidth")
    title = f"{file.result['mode']} attention, {file.result['dtype']}, {file.device}"
    return Chart(file.stem, title, (_cells(file, *how),), (file.name,))


def _cells(
    file: ResultFile, figure: str, scale: str, label: str, unit: float = 1, device: str = ""
) -> Panel:
    """Return a figure of each variant by cell; a device in the title where files have several."""
    labels, variants = cells_by_bytes(file.result, figure)
    series = (
        Series(
            NAMES.get(variant, variant),
            tuple((float(x), y / unit) for x, y in enumerate(values) if y is not None),
        )
        for variant, values in variants.items()
    )
    conditions = file.result["conditions"]
    return Panel(
        f"{_cache(file)}, {conditions['num_q_heads']} query heads over "
        f"{conditions['num_kv_heads']} KV heads of {conditions['head_dim']}"
        + _second_line(device),
        "requests x tokens of context, by bytes to move",
        label,
        _ticks(labels),
        tuple(each for each in series if each.points),
        scale,
    )


def _second_line(text: str) -> str:
    return f"\n{text}" if text else ""


def _cache(file: ResultFile) -> str:
    kv_dtype = file.result["kv_dtype"]
    return f"{file.result['dtype'] if kv_dtype == 'auto' else kv_dtype} cache"


def _is_plain(file: ResultFile) -> bool:
    """Whether an attention file has shares, and no groups, head roles, soft cap or logit sinks."""
    conditions = file.result["conditions"]
    return (
        file.result["copy_bandwidth_bytes_per_s"] is not None
        and conditions["head_roles"] == "uniform"
        and not conditions.get("groups")
        and not conditions.get("soft_cap")
        and not conditions.get("logit_sinks")
    )


def _kv_write(files: Sequence[ResultFile]) -> Iterator[Chart]:
    panels = []
    for file in files:
        result = file.result
        counts = [row["tokens"] for row in result["results"]]
        panels.append(
            Panel(
                f"{_cache(file)}, {result['conditions']['slot_order']} in random order"
                + _second_line(own_device(file, files)),
                "tokens of a write",
                "time, us",
                _ticks(f"{count:,}" for count in counts),
                _variant_times(result["results"]),
                "log",
            )
        )
    if files:
        title = f"KV cache write, {files[0].result['dtype']}, {devices(files)}"
        yield Chart("kv-write", title, tuple(panels), tuple(file.name for file in files))


def _variant_times(rows: Sequence[dict[str, Any]]) -> tuple[Series, ...]:
    """Return the times of each variant of a kernel, by row."""
    names = dict.fromkeys(name for row in rows for name in row["variants"])
    return tuple(
        Series(
            NAMES.get(name, name),
            tuple(
                (float(x), row["variants"][name]["median_us"])
                for x, row in enumerate(rows)
                if name in row["variants"]
            ),
        )
        for name in names
    )


def _sampler(file: ResultFile) -> Chart:
    """Chart the cases of the first standard deviation, for the fewest and the most rows."""
    result = file.result
    entries = [row for row in result["results"] if row["std"] == result["results"][0]["std"]]
    counts = sorted({row["rows"] for row in entries})
    panels = []
    for count in dict.fromkeys((counts[0], counts[-1])):
        rows = [row for row in entries if row["rows"] == count]
        panels.append(
            Panel(
                f"{count} {'row' if count == 1 else 'rows'} of "
                f"{result['conditions']['vocab_size']:,} logits",
                "case",
                "time, us",
                _ticks(row["params"] for row in rows),
                _variant_times(rows),
                "log",
            )
        )
    return Chart(file.stem, f"Sampling, {file.device}", tuple(panels), (file.name,))


def _policies(capacities: Sequence[ResultFile], served: Sequence[ResultFile]) -> Iterator[Chart]:
    """Yield the chart of what a policy gains, by the share of full heads."""
    shown: dict[str, ResultFile] = {}
    fits: dict[str, dict[float, float]] = {}
    for file in capacities:
        ratios = {entry["variant"]: entry["ratio"] for entry in file.result["results"]}
        context = file.result["conditions"]["context"]
        for suffix in ("", "-fp8"):
            if ratios.get(f"recycled{suffix}") and ratios.get(f"uniform{suffix}"):
                cache = " fp8" if suffix else ""
                name = f"{file.result['shape']}{cache}, {context // 1024}k tokens"
                points = fits.setdefault(name, {1.0: ratios[f"uniform{suffix}"]})
                points[file.result["conditions"]["full_share"]] = ratios[f"recycled{suffix}"]
                shown[file.name] = file
    times: dict[str, dict[float, float]] = {}
    for file in served:
        conditions = file.result["conditions"]
        found = {entry["variant"]: entry for entry in file.result["results"]}
        best = found.get("recycled", found.get("kept"))
        if "uniform" in found and best is not None and conditions["full_share"] < 1:
            tokens = conditions["prompt_tokens"] + conditions["output_tokens"]
            name = f"{file.result['shape']}, {round(tokens / 1024)}k tokens"
            base = found["uniform"]["between_tokens_ms"]
            ratio = best["between_tokens_ms"] / base
            times.setdefault(name, {1.0: 1.0})[conditions["full_share"]] = ratio
            shown[file.name] = file
    shares = sorted({share for line in (*fits.values(), *times.values()) for share in line})
    ticks = tuple((share, f"{share:.1%}".replace(".0%", "%")) for share in shares)
    label = "share of KV heads that see everything"
    panels = []
    if fits:
        label_y = "requests that fit,\nover those without a policy"
        panels.append(Panel("", label, label_y, ticks, _lines(fits, "{:.1f}x")))
    if times:
        label_y = "time between tokens,\nof that without a policy"
        panels.append(Panel("", label, label_y, ticks, _lines(times, "{:.0%}"), "share"))
    if panels:
        title = f"Head policies, {devices(shown.values())}"
        yield Chart("head-policies", title, tuple(panels), tuple(shown))


def _lines(lines: dict[str, dict[float, float]], form: str) -> tuple[Series, ...]:
    """Return a series for each line; its points by share, with their heights."""
    return tuple(
        Series(
            name, tuple(sorted(line.items())), tuple(form.format(line[x]) for x in sorted(line))
        )
        for name, line in lines.items()
    )


def _start(files: Sequence[ResultFile]) -> Iterator[Chart]:
    found: list[tuple[str, float, ResultFile]] = starts(files)
    if found:
        measured = [file for _, _, file in found]
        bars = tuple(
            Series(name, ((float(place), seconds),), (f"{seconds:.1f} s",))
            for place, (name, seconds, _) in enumerate(found)
        )
        ticks = _ticks(name + _second_line(own_device(file, measured)) for name, _, file in found)
        panel = Panel("", "", "seconds until requests are accepted", ticks, bars, is_bars=True)
        names = tuple(dict.fromkeys(file.name for file in measured))
        title = f"Start of an engine, {devices(measured)}"
        yield Chart("start", title, (panel,), names)


def by_kind(files: Iterable[ResultFile]) -> dict[str, list[ResultFile]]:
    """Return the files by kind."""
    found: dict[str, list[ResultFile]] = {}
    for file in files:
        found.setdefault(file.kind, []).append(file)
    return found


def series_range(panel: Panel) -> tuple[float, float]:
    """Return the least height above 0 and the largest height of a panel."""
    heights = [y for series in panel.series for _, y in series.points]
    return min((y for y in heights if y > 0), default=1.0), max(heights)
