"""The longest runs of each engine: a figure of few runs can be a slow host's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from benchmarks.report.files import OURS, ResultFile

ENGINE_DEFAULTS = {
    "deterministic": False, "rank_invariant": False, "overlap": True, "cuda_graphs": True,
    "tensor_parallel_size": 1,
}  # fmt: skip
PLAIN = ENGINE_DEFAULTS | {
    "attention_backend": "triton",
    "enable_prefix_caching": False,
    "kv_cache_dtype": "auto",
}


class Cell(NamedTuple):
    """What an engine generated, and where."""

    device: str
    shape: str
    dtype: str
    prompt_tokens: int
    output_tokens: int
    batch: int

    @classmethod
    def of(cls, file: ResultFile, batch: int, prompt_tokens: int | None = None) -> Cell:
        """Return the cell of a batch of a file; ``prompt_tokens``: None = of its conditions."""
        conditions = file.result["conditions"]
        if prompt_tokens is None:
            prompt_tokens = conditions["prompt_tokens"]
        shape, dtype = file.result["shape"], file.result["dtype"]
        return cls(file.device, shape, dtype, prompt_tokens, conditions["output_tokens"], batch)


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of one engine on one cell, from one file."""

    file: ResultFile
    cell: Cell
    seconds: tuple[float, ...]
    """Of each run."""

    @property
    def rank(self) -> tuple[bool, int]:
        """Whether engines took turns, and the number of runs: larger is better."""
        order = self.file.result["conditions"].get("order", "")
        return order.startswith("in turns"), len(self.seconds)

    @property
    def count(self) -> str:
        """Their number, in words."""
        return "1 run" if len(self.seconds) == 1 else f"{len(self.seconds)} runs"

    @property
    def tokens_per_s(self) -> float:
        """Of the median time, as in the file."""
        return self._num_tokens / median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """Tokens/s of the slowest and of the fastest run."""
        return self._num_tokens / max(self.seconds), self._num_tokens / min(self.seconds)

    @property
    def _num_tokens(self) -> int:
        return self.cell.batch * self.cell.output_tokens


def longest_runs(of: Mapping[str, Sequence[ResultFile]]) -> dict[tuple[str, Cell], Runs]:
    """Return the runs of each engine and cell: those in turns, else the most that a file has.

    Greedy runs without options and without prefix caching. Engines are ``mrv1`` and vLLM with its
    version. Where engines took turns, run by run, the machine was the same for both. Of equally
    many runs those of ``bench generate`` come before those of other files.

    Args:
        of: the files by kind, only those whose schema is known.
    """
    found: dict[tuple[str, Cell], Runs] = {}
    for kind in ("vllm", "beside vllm", "generate"):
        for file in of.get(kind, []):
            for engine, cell, seconds in _runs(file):
                runs, known = Runs(file, cell, tuple(seconds)), found.get((engine, cell))
                if known is None or runs.rank >= known.rank:
                    found[engine, cell] = runs
    return found


def peer(file: ResultFile) -> str:
    """Return the name of vLLM, with its version, of a file that measured it."""
    return f"vLLM {file.result['peers']['vllm']}"


def said_runs(lines: Mapping[str, Sequence[Runs]]) -> str:
    """Return the number and the spread of each engine's runs, batch by batch, and their files."""
    said = []
    for name, line in lines.items():
        spreads = []
        for runs in line:
            low, high = runs.spread
            spreads.append(f"{low:,.0f} to {high:,.0f} in {runs.count}")
        said.append(f"{name}: {', '.join(spreads)}")
    files = {runs.file.name: runs.file.origin for line in lines.values() for runs in line}
    sources = ", ".join(f"`{name}` ({origin})" for name, origin in files.items())
    return f"{'; '.join(said)}. From {sources}."


def _runs(file: ResultFile) -> Iterator[tuple[str, Cell, Sequence[float]]]:
    """Yield the engine, cell and seconds of each measurement of a file."""
    conditions = file.result["conditions"]
    is_plain = all(conditions.get(name, usual) == usual for name, usual in PLAIN.items())
    if not is_plain or not conditions["sampling"].startswith("greedy"):
        return
    for entry in file.result["results"]:
        if file.kind == "vllm":
            cell = Cell.of(file, entry["batch"], entry["prompt_tokens"])
            if alone := entry["modes"].get("vllm"):
                yield peer(file), cell, [sample["whole_s"] for sample in alone["samples"]]
            continue
        cell = Cell.of(file, entry["batch"])
        if file.kind == "beside vllm":
            yield OURS, cell, entry["samples_s"][OURS]
            yield peer(file), cell, entry["samples_s"]["vllm"]
        else:
            yield OURS, cell, [sample["wall_s"] for sample in entry["samples"]]
