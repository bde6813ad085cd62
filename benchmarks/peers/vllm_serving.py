"""vLLM's engine as ``engines.client`` drives it: token ids in and out, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.engines.client import Progress
from benchmarks.peers.vllm_engine import first_tokens, start_engine


class VLLMServed:
    """vLLM's ``LLMEngine``, which runs its steps in a process of its own, ahead of this one."""

    def __init__(self, options: dict[str, Any], *, on_cpu: bool) -> None:
        """Start the engine.

        Args:
            options: arguments of ``EngineArgs``.
            on_cpu: run in this process, on a CPU.
        """
        self._engine, self.start_s = start_engine(options, on_cpu=on_cpu)
        self._sampling: dict[str, Any] = {}

    def configure(self, sampling: dict[str, Any], *, stream_outputs: bool) -> None:
        """Set the arguments of ``SamplingParams`` of the next requests, and their outputs."""
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if stream_outputs else RequestOutputKind.FINAL_ONLY
        self._sampling = sampling | {
            "ignore_eos": True, "detokenize": False, "output_kind": kind,
        }  # fmt: skip

    def add(self, request: int, prompt: Sequence[int], output_len: int) -> None:
        """Queue a request."""
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(**self._sampling, max_tokens=output_len)
        self._engine.add_request(str(request), {"prompt_token_ids": [*prompt]}, params)

    def step(self) -> list[Progress]:
        """Await the results of a step."""
        return [
            Progress(int(output.request_id), output.outputs[0].token_ids, output.finished)
            for output in self._engine.step()
        ]

    @property
    def is_busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._engine.has_unfinished_requests())

    def first_tokens(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return each prompt's first token, and its lead over the next best."""
        return first_tokens(self._engine, prompts)

    def close(self) -> None:
        """End the engine's process."""
        self._engine.engine_core.shutdown()
