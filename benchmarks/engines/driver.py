"""Engines on one checkpoint, each in a process of its own: what all comparisons of them share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines.checkpoint import write_checkpoint, write_config
from benchmarks.measure.child import ChildError, Send, run_in_child
from benchmarks.measure.floor import copy_bandwidth
from benchmarks.measure.options import CheckpointBench
from benchmarks.measure.shapes import shape_config
from mrv1.config import checkpoint_dir, dtype_name
from mrv1.device import resolve_device, resolve_dtype
from mrv1.models import ModelConfig
from mrv1.provenance import provenance

NEAR_TIES = {torch.float16: 2**-6, torch.bfloat16: 2**-3}
"""Dtype -> the largest lead of a token over the next best that rounding can undo, as a difference
of log-probabilities: four steps of a logit between 4 and 8."""
NEAR_TIE = 1e-3
"""The same for wider dtypes, whose sums have another order in every engine."""
FP8_NEAR_TIE = 0.5
"""The same with an fp8 cache: 2**-4 of each element of K and V, averaged by attention."""

INTERRUPTED = "interrupted"
"""Error of what Ctrl-C has ended."""

Say = Callable[[str], None]
FirstTokens = Sequence[Sequence[float]]
"""For each prompt the first token's id, and the lead of its log-probability over the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What all engines run on."""

    on_cpu: bool
    dtype: torch.dtype
    """Of weights and activations."""
    bandwidth: float | None
    """Bytes per second of a copy; None on a CPU."""
    provenance: dict[str, object]

    @property
    def dtype_name(self) -> str:
        """The dtype, as engines and results name it."""
        return str(self.dtype).removeprefix("torch.")

    def near_tie(self, options: Mapping[str, Any]) -> float:
        """Return the largest lead that rounding can undo in an engine with these own options."""
        if "kv_cache_dtype" in options:
            return FP8_NEAR_TIE
        return NEAR_TIES.get(self.dtype, NEAR_TIE)


@contextmanager
def prepared(
    bench: CheckpointBench, longest: Callable[[ModelConfig], int]
) -> Iterator[tuple[Path, ModelConfig, Machine]]:
    """Yield the engines' checkpoint, its configuration and the machine.

    Args:
        bench: the options; the checkpoint of a shape is written to a temporary folder.
        longest: returns the most tokens of a request; a shape's context grows to it.

    Raises:
        ConfigError: an option or the checkpoint is wrong.
        ChildError: the device is not there, or the checkpoint could not be written.
    """
    with tempfile.TemporaryDirectory(prefix="mrv1-bench-") as folder:
        if bench.shape is None:
            checkpoint = checkpoint_dir(str(bench.model))
            config = ModelConfig.from_pretrained(checkpoint)
        else:
            checkpoint, config = Path(folder), shape_config(bench.shape)
            context = max(config.max_model_len, longest(config))
            config = replace(config, max_model_len=context)
        (machine,) = run_in_child(prepare, bench, config, checkpoint)
        yield checkpoint, config, machine


def prepare(bench: CheckpointBench, config: ModelConfig, checkpoint: Path, send: Send) -> None:
    """Measure the machine, and write the checkpoint of a shape, in a process of its own."""
    device = resolve_device(bench.device)
    dtype = resolve_dtype(dtype_name(bench.dtype), config.torch_dtype, device)
    bandwidth = copy_bandwidth(device)
    if bench.shape is not None and bench.load_format == "dummy":
        write_config(checkpoint, config, dtype)
    elif bench.shape is not None:
        write_checkpoint(checkpoint, config, device=device, dtype=dtype, seed=bench.seed)
    machine = Machine(
        on_cpu=device.type == "cpu",
        dtype=dtype,
        bandwidth=bandwidth,
        provenance=provenance(device, bench.commit),
    )
    send(machine)


def header(op: str, schema: int, bench: CheckpointBench, machine: Machine) -> dict[str, Any]:
    """Return the fields with which the result of a comparison begins."""
    return {
        "op": op,
        "schema": schema,
        "shape": bench.shape or bench.model,
        "weights": "dummy"
        if bench.load_format == "dummy"
        else "random"
        if bench.shape
        else "checkpoint",
        "dtype": machine.dtype_name,
        **machine.provenance,
    }


@contextmanager
def process(
    name: str, function: Callable[..., None], job: object, end: Callable[[str], None], say: Say
) -> Iterator[Generator[Any]]:
    """Yield what an engine's process sends; its failure ends the block, and nothing else.

    Args:
        name: the engine's, for messages.
        function: runs in the process, as in ``run_in_child``.
        job: its argument.
        end: gets the reason if the process fails or is interrupted.
        say: receives messages, one line each.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    try:
        with closing(run_in_child(function, job)) as events:
            yield events
    except ChildError as error:
        end(str(error))
        for line in error.log:
            say(f"{name} | {line}")
        say(f"{name}: failed: {error}")
    except (KeyboardInterrupt, GeneratorExit):
        end(INTERRUPTED)
        say(f"{name}: {INTERRUPTED}")
        raise


def compared(
    name: str, beside: FirstTokens | None, found: FirstTokens, near_tie: float, say: Say
) -> dict[str, int] | None:
    """Return the agreement of first tokens with another engine's; None if there is no other."""
    if beside is None:
        return None
    agreed = agreement(beside, found, near_tie)
    say(f"{name}: first tokens: {describe(agreed)}")
    return agreed


def agreement(expected: FirstTokens, found: FirstTokens, near_tie: float) -> dict[str, int]:
    """Count the first tokens that are equal, and those that are not.

    A token that differs is a near tie if the expected one led by at most ``near_tie``.
    """
    counts = {"equal": 0, "near_ties": 0, "different": 0}
    for (wanted, lead), (token, _) in zip(expected, found, strict=True):
        kind = "equal" if token == wanted else "near_ties" if lead <= near_tie else "different"
        counts[kind] += 1
    return counts


def describe(counts: Mapping[str, int]) -> str:
    """Return an agreement in words."""
    return (
        f"{counts['equal']} of {sum(counts.values())} equal, {counts['near_ties']} at near ties, "
        f"{counts['different']} different"
    )
