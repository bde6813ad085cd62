"""The line after a generation: how fast, how much cache, which path ran."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

from mrv1.device import KernelPath, device_info, kernel_path, resolve_device
from mrv1.engine import LLM, RequestOutput

PATHS: dict[KernelPath, str] = {
    "triton": "GPU, compiled Triton kernels",
    "interpreter": "CPU, Triton kernels in the interpreter",
    "reference": "CPU reference (torch)",
}
"""Name of each kernel path for users."""


def path_name(device: str) -> str:
    """Return the kernel path on the device that ``device`` resolves to, in words."""
    resolved = resolve_device(device)
    name = PATHS[kernel_path(resolved)]
    return f"{name} on {device_info(resolved).name}" if resolved.type == "cuda" else name


def mib(num_bytes: int) -> str:
    """Return bytes as MiB with one decimal."""
    return f"{num_bytes / 2**20:.1f} MiB"


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
        seconds = time.perf_counter() - self.started
        report = self.llm.kv_report()
        rate = self.num_tokens / seconds
        parts = [f"{self.num_tokens} tokens in {seconds:.2f} s ({rate:.1f} tokens/s)"]
        if self.first_token_s:
            median = "median " if len(self.first_token_s) > 1 else ""
            parts.append(
                f"{median}time to first token {statistics.median(self.first_token_s) * 1e3:.0f} ms"
            )
        parts.append(
            f"KV cache: at most {mib(report['peak_held_bytes'])} in use of "
            f"{mib(report['total_bytes'])} allocated"
        )
        return " | ".join([*parts, path])
