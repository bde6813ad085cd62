"""A long run of several engines under random load: nothing leaks, slows down or changes.

``python -m tests.engine.soak --seconds 3600 --device cpu`` is ``make soak``; on a GPU, 480 seconds
with ``--device cuda``. The tests run the same code for a few seconds.

A cycle takes every engine in turn: a round of random requests with aborts; at times sleep and
wake-up; then, with every request ended, a check of the books; then a fixed workload, which is
timed and whose outputs must be those of the first time. One engine is closed and built anew. After
each cycle the process is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mrv1 import LLM, MultimodalItem, RequestError, SamplingParams
from mrv1.device import resolve_device
from mrv1.provenance import provenance
from tests.models.families import tiny_checkpoint

LIBC = ctypes.CDLL(None)
HIDDEN_SIZE, VOCAB = 64, 160
MAX_NUM_SEQS = 6
EVERY = 10
"""Cycles of which one reading is printed and written."""
ENGINES: Mapping[str, Mapping[str, object]] = {
    "plain": {},
    "policy": {"head_policy": "ratio=0.5,window=24,sink=4"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "head_policy": "ratio=0.5,window=40,sink=0"},
    "quarter": {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "quarter", "overlap": False},
}


@dataclass
class Phrase:
    """A grammar of fixed tokens, and its matcher."""

    tokens: tuple[int, ...]
    at: int = 0

    def matcher(self) -> Phrase:
        return Phrase(self.tokens)

    def fill_bitmask(self, bitmask: Any) -> None:
        word, bit = divmod(self.tokens[self.at], 32)
        bitmask[word] = 1 << bit if bit < 31 else -(1 << 31)  # int32

    def accept(self, token_id: int) -> bool:
        self.at += 1
        return token_id == self.tokens[self.at - 1]

    def is_finished(self) -> bool:
        return self.at == len(self.tokens)


@dataclass(frozen=True, slots=True)  # without a __dict__, one object to the garbage collector
class Reading:
    """The process after a cycle, with every engine idle."""

    seconds: float
    """Since the start."""
    num_requests: int
    """That have ended so far."""
    fixed_seconds: float
    """Time of the fixed workload on all engines; on a CPU, this process' CPU time."""
    resident_bytes: int
    device_bytes: int
    """Allocated on the GPU."""
    num_tensors: int
    num_objects: int
    """That the garbage collector tracks, without the soak's readings."""
    num_threads: int
    num_files: int


def random_params(source: random.Random) -> SamplingParams:
    """Return parameters with some of the sampling features."""
    max_tokens = source.randint(1, 30)
    every: dict[str, object] = {
        "top_k": source.randint(1, VOCAB),
        "top_p": source.choice([0.3, 0.9]),
        "min_p": 0.05,
        "repetition_penalty": source.choice([0.7, 1.4]),
        "frequency_penalty": source.choice([-0.5, 0.5]),
        "logit_bias": {source.randrange(3, VOCAB): 2.5},
        "bad_words_token_ids": [[source.randrange(3, VOCAB)]],
        "min_tokens": source.randint(0, max_tokens),
        "stop_token_ids": [source.randrange(3, VOCAB) for _ in range(3)],
        "logprobs": source.randint(0, 4),
        "prompt_logprobs": source.randint(0, 2),
        "n": 2,
    }
    chosen = {name: value for name, value in every.items() if source.random() < 0.25}
    if source.random() < 0.2:
        tokens = tuple(source.randrange(3, VOCAB) for _ in range(source.randint(1, 8)))
        chosen = {"structured_output": Phrase(tokens), "logprobs": chosen.get("logprobs")}
    return SamplingParams(
        temperature=source.choice([0.0, 1.0]),
        seed=source.randrange(1000),
        max_tokens=max_tokens,
        **chosen,
    )


def random_prompt(source: random.Random) -> Any:
    """Return a prompt, often one that begins like others, at times with features."""
    shared = [7 + i % 90 for i in range(source.choice([0, 0, 16, 40]))]
    text = [source.randrange(3, VOCAB) for _ in range(source.randint(1, 60))]
    if source.random() < 0.8:
        return [*shared, *text]
    generator = torch.Generator().manual_seed(source.randrange(12))
    num_rows = source.choice([1, 9, 20])
    item = MultimodalItem(
        features=torch.randn(num_rows, HIDDEN_SIZE, generator=generator), start=len(shared)
    )
    return {"prompt_token_ids": [*shared, *[5] * num_rows, *text], "multimodal": [item]}


class Soak:
    """Engines under random load.

    Args:
        folder: where the checkpoint is written.
        device: "cpu" or "cuda".
        names: some of ``ENGINES``.
        seed: seed of the load.
        num_requests: requests of a round.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        names: Sequence[str] = tuple(ENGINES),
        *,
        seed: int = 0,
        num_requests: int = 24,
    ) -> None:
        tiny_checkpoint(folder, "qwen3")
        self.folder, self.device, self.round_size = folder, device, num_requests
        self.source = random.Random(seed)
        self.engines = {name: self.build(name) for name in names}
        self.fixed_outputs: dict[str, object] = {}
        self.readings: list[Reading] = []
        self.num_requests = self.num_aborted = self.num_preemptions = 0
        self.started = time.perf_counter()

    def build(self, name: str) -> LLM:
        options: dict[str, Any] = {
            "device": self.device, "num_kv_blocks": 20, "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": 48, "max_model_len": 192, "use_tqdm_on_load": False,
        }  # fmt: skip
        return LLM(str(self.folder), **options, **ENGINES[name])

    def close(self) -> None:
        for llm in self.engines.values():
            llm.close()

    def cycle(self) -> None:
        """Take every engine in turn, then measure the process."""
        fixed_seconds = 0.0
        for name, llm in self.engines.items():
            try:
                self.random_round(llm)
                if self.source.random() < 0.3:
                    self.sleep(llm, self.source.choice([1, 2]))
                check_books(llm)
                fixed_seconds += self.fixed_round(name)
            except Exception as error:
                error.add_note(f"in cycle {len(self.readings)}, engine {name!r}")
                raise
        rebuilt = [*self.engines][len(self.readings) % len(self.engines)]
        self.num_preemptions += self.engines[rebuilt].metrics()["num_preemptions"]
        self.engines[rebuilt].close()
        self.engines[rebuilt] = self.build(rebuilt)
        self.readings.append(self.measure(fixed_seconds))

    def random_round(self, llm: LLM) -> None:
        """Run random requests that come and go at random; each must end once, without an error."""
        source, live, num_added = self.source, set[str](), 0
        while num_added < self.round_size or live:
            while num_added < self.round_size and source.random() < 0.4:
                num_added += 1
                live.add(llm.add_request(random_prompt(source), random_params(source)))
            if live and source.random() < 0.03:
                llm.abort(source.choice(sorted(live)))
            if source.random() < 0.02:
                refused(llm)
            for output in llm.step():
                if output.error is not None:
                    raise AssertionError(f"{output.request_id}: {output.error}")
                if output.finished:
                    live.remove(output.request_id)
                    self.num_requests += 1
                    self.num_aborted += output.outputs[0].finish_reason == "abort"
        if llm.has_unfinished_requests():
            raise AssertionError("expected no request after the last has ended")

    def sleep(self, llm: LLM, level: int) -> None:
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(load_file(self.folder / "model.safetensors").items())

    def fixed_round(self, name: str) -> float:
        """Run the same requests as always, from an empty prefix cache; return the seconds.

        One has features: their buffer is there at every reading, also after a sleep.
        """
        llm = self.engines[name]
        llm.reset_prefix_cache()
        source = random.Random(1)
        prompts: list[Any] = [
            [source.randrange(3, VOCAB) for _ in range(n)] for n in (3, 50, 17, 90, 33, 8)
        ]
        features = torch.randn(9, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
        prompts[2] = {
            "prompt_token_ids": [*[5] * 9, *prompts[2]],
            "multimodal": [MultimodalItem(features=features, start=0)],
        }
        params = [
            SamplingParams(temperature=i % 2, seed=i, max_tokens=24, ignore_eos=True, logprobs=1)
            for i in range(len(prompts))
        ]
        # On a CPU other processes take their share of a second, but not of this process' time.
        clock = time.process_time if self.device == "cpu" else time.perf_counter
        started = clock()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = clock() - started
        found = [output.outputs[0].token_ids for output in outputs]
        if self.fixed_outputs.setdefault(name, found) != found:
            raise AssertionError(f"{name}: expected {self.fixed_outputs[name]}, got {found}")
        return seconds

    def measure(self, fixed_seconds: float) -> Reading:
        gc.collect()
        LIBC.malloc_trim(0)  # else memory that is free, but not returned, hides a leak
        objects = gc.get_objects()
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        return Reading(
            seconds=time.perf_counter() - self.started,
            num_requests=self.num_requests,
            fixed_seconds=fixed_seconds,
            resident_bytes=resident * os.sysconf("SC_PAGE_SIZE"),
            device_bytes=torch.cuda.memory_allocated() if self.device == "cuda" else 0,
            num_tensors=sum(issubclass(type(x), torch.Tensor) for x in objects),
            # The readings are kept: one more object a cycle, which no engine has leaked.
            num_objects=len(objects) - len(self.readings),
            num_threads=threading.active_count(),
            num_files=len(os.listdir("/proc/self/fd")),
        )


def refused(llm: LLM) -> None:
    """Add a request that must be refused."""
    try:
        llm.add_request([VOCAB + 5], SamplingParams(max_tokens=2))
    except RequestError:
        return
    raise AssertionError("expected a RequestError for a token outside the vocabulary")


def check_books(llm: LLM) -> None:
    """Raise unless an idle engine holds no slot, block, feature row or request."""
    metrics, report, scheduler = llm.metrics(), llm.kv_report(), llm.engine.scheduler
    features = scheduler.features
    entries = features._cached.values()
    rows_of_entries = sum(len(run) for entry in entries for run in entry.rows)
    books = {
        "running": metrics["num_running_requests"],
        "waiting": metrics["num_waiting_requests"],
        "blocks held": sum(report["held_blocks"]),
        "blocks not free": sum(pool.num_blocks - pool.num_free for pool in scheduler.pools),
        "slots not free": MAX_NUM_SEQS - len(set(scheduler._slots.free)),
        "feature bytes held": report["held_feature_bytes"],
        "feature rows lost": features.num_rows - features.num_free - rows_of_entries,
        "requests": len(llm.shared._groups),
    }
    if any(books.values()):
        raise AssertionError(f"expected nothing in use by an idle engine, got {books}")


@dataclass(frozen=True)
class Limit:
    """How much a measure may grow from the first to the last third of the readings."""

    share: float = 0.0
    amount: float = 0.0


LIMITS: Mapping[str, Limit] = {
    "fixed_seconds": Limit(share=0.15),
    "resident_bytes": Limit(amount=8 << 20),
    "device_bytes": Limit(),
    "num_tensors": Limit(),
    "num_objects": Limit(amount=200),
    "num_threads": Limit(),
    "num_files": Limit(),
}


@dataclass
class Growth:
    """The least values of the first third and of the last third of the readings, by measure."""

    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        return [
            f"{name}: expected at most {limit.share:.0%} + {limit.amount:g} more than "
            f"{self.first[name]:g}, got {self.last[name]:g}"
            for name, limit in LIMITS.items()
            if self.last[name] > self.first[name] * (1 + limit.share) + limit.amount
        ]


def growth(readings: list[Reading]) -> Growth:
    """Compare the first third of the readings, after a warm-up of a tenth, with the last third.

    A leak raises the least value of the last third above the least of the first; a moment in
    which the machine was busy does not.
    """
    readings = readings[max(1, len(readings) // 10) :]
    third = max(1, len(readings) // 3)
    found = Growth()
    for part, of_part in ((found.first, readings[:third]), (found.last, readings[-third:])):
        for name in LIMITS:
            part[name] = min(getattr(reading, name) for reading in of_part)
    return found


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[*ENGINES])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file of the result")
    parser.add_argument("--commit", help="commit of the source; default: ask git")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), options.device, options.engines, seed=options.seed)
        while time.perf_counter() - soak.started < options.seconds:
            soak.cycle()
            if len(soak.readings) % EVERY == 1:
                say(soak.readings[-1])
        soak.close()
    found = growth(soak.readings)
    say(f"{soak.num_requests} requests, {len(soak.readings)} cycles, {soak.num_aborted} aborted")
    say(f"{soak.num_preemptions} preemptions")
    say(f"first third {found.first}")
    say(f"last third {found.last}")
    if options.output is not None:
        options.output.write_text(json.dumps(result(soak, found, options), indent=1) + "\n")
    for problem in found.problems:
        say(f"LEAK: {problem}")
    return bool(found.problems)


def result(soak: Soak, found: Growth, options: argparse.Namespace) -> dict[str, object]:
    """Return the fields of a results file."""
    return {
        "op": "soak",
        "schema": 1,
        "shape": f"tests.engine.soak: engines of a random model, hidden size {HIDDEN_SIZE}",
        **provenance(resolve_device(options.device), options.commit),
        "conditions": {
            "seconds": options.seconds,
            "engines": options.engines,
            "seed": options.seed,
            "load": "random arrivals, aborts, head policies, fp8, grammars, log-probabilities, "
            "features, sleep and wake-up",
            "readings": f"one of every {EVERY} cycles; first and last third: the least value over "
            "the cycles of that third, after a warm-up of a tenth",
            "clocks": "as found, not locked",
        },
        "results": [
            {
                "requests": soak.num_requests,
                "cycles": len(soak.readings),
                "aborted": soak.num_aborted,
                "preemptions": soak.num_preemptions,
                "problems": found.problems,
                "first_third": found.first,
                "last_third": found.last,
                "readings": [asdict(reading) for reading in soak.readings[::EVERY]],
            }
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
