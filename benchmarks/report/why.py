"""README.md's first figures: one for each thing that mrv1 does and others do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.report.columns import COLUMNS, markdown
from benchmarks.report.files import OURS, ResultFile

Known = Mapping[str, list[ResultFile]]
PROMPT_TOKENS = 128
"""Of the requests within vLLM whose speed is shown: where the host of an engine counts most."""


def why_table(known: Known) -> str:
    """Return a row for each figure that some file has; "" if none has one.

    Args:
        known: the files by kind, only those whose schema is known.
    """
    rows = [*_memory(known), *_bits(known), *_kernels(known), *_in_vllm(known)]
    return markdown(COLUMNS["why"], rows) if rows else ""


def _row(what: str, figure: str, *files: ResultFile) -> dict[str, str]:
    devices = dict.fromkeys(file.device for file in files)
    names = ", ".join(dict.fromkeys(f"`{file.stem}`" for file in files))
    return {"what": what, "figure": f"{figure} ({', '.join(devices)})", "files": names}


def _memory(known: Known) -> Iterator[dict[str, str]]:
    for file in known.get("capacity", []):
        fits = {entry["variant"]: entry["requests"] for entry in file.result["results"]}
        conditions = file.result["conditions"]
        if fits.get("uniform") and "recycled" in fits:
            yield _row(
                "[Heads that give memory back](docs/head-wise.md): a policy for each KV head",
                f"{fits['recycled']} requests of {conditions['context']:,} tokens fit instead of "
                f"{fits['uniform']}, with {conditions['full_share']:.0%} of the heads of "
                f"{file.result['shape']} full",
                file,
            )


def _bits(known: Known) -> Iterator[dict[str, str]]:
    for file in known.get("runner", []):
        costs = {
            entry["batch"]: f"{entry['deterministic_over_default']:.2f}"
            for entry in file.result["results"]
            if entry.get("deterministic_over_default")
        }
        if costs:
            yield _row(
                "[Bits that do not depend on the batch](docs/numerics.md#deterministic): "
                "`deterministic=True`",
                f"a decode step of {file.result['shape']} takes {', '.join(costs.values())} of "
                f"the time at {', '.join(map(str, costs))} requests",
                file,
            )


def _kernels(known: Known) -> Iterator[dict[str, str]]:
    for file in known.get("attention", []):
        if file.stem.startswith("attention-decode-h"):
            entries = file.result["results"]
            shares = [entry["variants"][OURS]["share_of_copy_bandwidth"] for entry in entries]
            yield _row(
                "[Kernels as functions, each with an oracle](docs/recipes.md), and a kit that "
                "tests yours",
                f"decode attention at {min(shares):.0%} to {max(shares):.0%} of the copy "
                f"bandwidth in {len(shares)} cases",
                file,
            )


def _in_vllm(known: Known) -> Iterator[dict[str, str]]:
    found: dict[int, tuple[float, ResultFile]] = {}
    for file in known.get("vllm", []):
        if not file.result["shape"].startswith("qwen3-0.6b"):
            continue
        for entry in file.result["results"]:
            ratio = entry["modes"].get("worker", {}).get("speedup")
            if ratio is not None and entry["prompt_tokens"] == PROMPT_TOKENS:
                found[entry["batch"]] = ratio, file
    if found:
        batches = sorted(found)
        ratios = ", ".join(f"{found[batch][0]:.2f}" for batch in batches)
        file = found[batches[0]][1]
        yield _row(
            "[One option inside vLLM](docs/vllm.md): its server and scheduler, mrv1's runner",
            f"{ratios} times the tokens/s of vLLM {file.result['peers']['vllm']} alone at "
            f"{', '.join(map(str, batches))} requests of {file.result['shape']}",
            *(found[batch][1] for batch in batches),
        )
