"""The rows of tables that the console and the page show, from the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.engines.driver import describe

Rows = list[dict[str, Any]]

BAR = 60
"""Characters of a layer's time."""


def variant_rows(result: dict[str, Any]) -> Rows:
    """Return a row for each case and variant of a kernel; targets are ours alone."""
    return [
        {
            **_case(entry),
            **variant,
            "kernel": name,
            "ratio": entry["peer_time_over_ours"].get(name),
            "target_us": None if name in entry["peer_time_over_ours"] else entry.get("target_us"),
        }
        for entry in result["results"]
        for name, variant in entry["variants"].items()
    ]


def own_rows(result: dict[str, Any], name: str) -> Rows:
    """Return a row for each case of a kernel: what is known of the case, and of one variant."""
    return [{**_case(entry), **entry["variants"][name]} for entry in result["results"]]


def _case(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "cell": cell_label(entry)} if "context" in entry else entry


def host_rows(result: dict[str, Any]) -> Rows:
    """Return a row for each batch, and for each number of requests that wait."""
    return [
        *(entry | {"waiting": "none"} for entry in result["results"]),
        *(entry | {"waiting": f"{entry['waiting']:,}"} for entry in result["waiting"]),
    ]


def layer_rows(layer: Rows) -> Rows:
    """Return a row for each kernel of one layer, with its time as a bar."""
    end = max((each["start_us"] + each["us"] for each in layer), default=1.0)

    def at(us: float) -> int:
        return round(BAR * us / end)

    return [
        {
            **each,
            "name": each["name"].strip("_").removesuffix("_kernel")[:32],
            "bar": " " * at(each["start_us"])
            + "#" * max(1, at(each["start_us"] + each["us"]) - at(each["start_us"])),
        }
        for each in layer
    ]


def serving_rows(result: dict[str, Any]) -> Rows:
    """Return a row for each engine; of one that failed, why."""
    return [
        {"engine": name, "first_tokens": _said(measured), **(measured["figures"] or {})}
        for name, measured in result["results"].items()
    ]


def mode_rows(result: dict[str, Any]) -> Rows:
    """Return a row for each mode of vLLM; of one that failed, why."""
    return [
        {"mode": name, "start_s": mode["start_s"], "first_tokens": _said(mode)}
        for name, mode in result["modes"].items()
    ]


def _said(measured: dict[str, Any]) -> str | None:
    if measured["error"] is not None:
        return f"failed: {measured['error']}"
    agreed = measured.get("agreement")
    return agreed and describe(agreed)


def cell_rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each cell and mode of vLLM."""
    for cell in result["results"]:
        num_tokens = cell["batch"] * result["conditions"]["output_tokens"]
        for name, mode in cell["modes"].items():
            rates = [num_tokens / sample["whole_s"] for sample in mode["samples"]]
            yield {
                **mode,
                "cell": f"{cell['batch']} x {cell['prompt_tokens']:,}",
                "mode": name,
                "slowest": min(rates),
                "fastest": max(rates),
            }


def capacity_rows(result: dict[str, Any]) -> Rows:
    """Return a row for each cache."""
    return [
        entry | {"bytes_of_request": sum(entry["request_bytes"])} for entry in result["results"]
    ]


def headwise_rows(result: dict[str, Any]) -> Rows:
    """Return a row for each cache, with the 95% intervals of the times saved in words."""
    times = ("first_token", "between_tokens")
    return [
        entry | {f"{time}_less": _less(entry.get(f"{time}_saving")) for time in times}
        for entry in result["results"]
    ]


def _less(saving: dict[str, float] | None) -> str:
    """Return an interval; nothing for the first cache, for one run, and in an older file."""
    return "" if saving is None else f", {saving['low']:.1%} to {saving['high']:.1%} less"


def cells_by_bytes(
    result: dict[str, Any], key: str
) -> tuple[list[str], dict[str, list[float | None]]]:
    """Return the cells' labels by rising bytes, and each variant's figure for every cell.

    Cells of equal bytes are in order of the batch. A variant that did not run a cell has None.
    """
    entries = sorted(result["results"], key=lambda e: (e["bytes_moved"], e["batch"]))
    names = dict.fromkeys(name for entry in entries for name in entry["variants"])
    figures = {
        name: [entry["variants"].get(name, {}).get(key) for entry in entries] for name in names
    }
    return [cell_label(entry) for entry in entries], figures


def cell_label(entry: dict[str, Any]) -> str:
    """Return "batch x context", or "batch x queries of context" for the end of a prompt.

    Requests of one query in the same launch come behind: "+ number x context".
    """
    context = f"{entry['context']}"
    if entry.get("shortest"):
        context = f"{entry['shortest']} to {context}"
    if 1 < entry["query_len"] < entry["context"]:
        context = f"{entry['query_len']} of {context}"
    label = f"{entry['batch']} x {context}"
    if entry.get("group"):
        label += f", group {entry['group']}"
    if entry.get("num_decodes"):
        label += f" + {entry['num_decodes']} x {entry['decode_context']}"
    return label


def query_heads(conditions: dict[str, Any]) -> str:
    """Return the query heads of an attention result's cells."""
    if groups := conditions.get("groups"):
        return f"groups of {', '.join(map(str, groups))} query heads"
    return f"{conditions['num_q_heads']} query heads"
