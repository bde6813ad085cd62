"""The line after a generation: how fast, how much cache, which path ran."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mrv1.device import device_info, kernel_path, resolve_device
from mrv1.engine import LLM, RequestOutput
from mrv1.runner.report import PATHS


def path_name(device: str) -> str:
    """Return the kernel path on the device that ``device`` resolves to, in words."""
    resolved = resolve_device(device)
    name = PATHS[kernel_path(resolved)]
    return f"{name} on {device_info(resolved).name}" if resolved.type == "cuda" else name


def mib(num_bytes: int) -> str:
    """Return bytes as MiB with one decimal."""
    return f"{num_bytes / 2**20:.1f} MiB"


def figures(
    num_tokens: int, seconds: float, first_token_s: Sequence[float], after: str = ""
) -> list[str]:
    """Return how fast tokens came ``after`` something, and when the first of each request did."""
    rate = num_tokens / seconds if seconds > 0 else 0.0
    parts = [f"{num_tokens} tokens in {seconds:.2f} s ({rate:.1f} tokens/s){after}"]
    if first_token_s:
        median = "median " if len(first_token_s) > 1 else ""
        parts.append(
            f"{median}time to first token {statistics.median(first_token_s) * 1e3:.0f} ms"
        )
    return parts


@dataclass(slots=True)
class Usage:
    """Counts a generation's tokens and times; ``observe`` sees the outputs of every step."""

    llm: LLM
    num_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def observe(self, outputs: list[RequestOutput]) -> None:
        """Count the finished requests among the outputs of one step."""
        for output in outputs:
            if not output.finished or output.metrics is None:
                continue
            self.num_tokens += sum(len(each.token_ids) for each in output.outputs)
            if output.metrics.first_token_time is not None:
                self.first_token_s.append(
                    output.metrics.first_token_time - output.metrics.arrival_time
                )

    def line(self, path: str) -> str:
        """Return the summary line; ``path`` names the kernel path."""
        report = self.llm.kv_report()
        cache = (
            f"KV cache: at most {mib(report['peak_held_bytes'])} in use of "
            f"{mib(report['total_bytes'])} allocated"
        )
        seconds = time.perf_counter() - self.started
        parts = figures(self.num_tokens, seconds, self.first_token_s)
        return " | ".join([*parts, cache, path])
