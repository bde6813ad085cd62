"""An ``LLM`` whose runner is a device in plain Python, for tests of everything but the runner.

The expected output of a request is known in closed form (``expected_output``), and a step that
reads a page whose content belongs to another request raises ``DeviceError``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TypeVar

import pytest

from mrv1 import LLM, AsyncLLM, EngineConfig
from mrv1.headwise import FULL
from mrv1.runner import StepOutput, StepPlan
from tests.engine.scheduler_model import EOS, VOCAB, FakeRunner


class FakeModelRunner:
    """The interface of ``ModelRunner`` that ``EngineCore`` uses."""

    def __init__(self, config: EngineConfig, **_: object) -> None:
        num_blocks = (config.num_kv_blocks,)
        self.kv_cache = SimpleNamespace(num_blocks=num_blocks)
        self.head_groups = SimpleNamespace(groups=[SimpleNamespace(keeps=FULL)])
        self.model_config = SimpleNamespace(eos_token_ids=(EOS,), vocab_size=VOCAB)
        self.max_model_len = config.max_model_len
        self.device = FakeRunner(num_blocks, config.block_size, config.max_num_batched_tokens)
        self.num_staging_waits = self.num_compilations = self.num_graph_steps = 0
        self.gpu_seconds = 0.0
        self.num_feature_rows = 0
        self.captures_graphs = False
        self.prompt_graph_sizes = ()

    def check_usable(self) -> None:
        pass

    def execute(self, plan: StepPlan) -> SimpleNamespace:
        self.device.execute(plan)
        return SimpleNamespace(take=self._take)

    def _take(self) -> StepOutput:
        output = self.device.result()
        assert output is not None
        return output

    def discard(self) -> None:
        self.device.launched.clear()
        self.device.slots.clear()

    def close(self) -> None:
        pass


Engine = TypeVar("Engine", LLM, AsyncLLM)


def make_llm(
    monkeypatch: pytest.MonkeyPatch, kind: type[Engine] = LLM, **options: object
) -> Engine:
    """Return an engine with so few blocks that the tests' requests preempt each other."""
    with monkeypatch.context() as patch:
        patch.setattr("mrv1.engine.core.ModelRunner", FakeModelRunner)
        return kind(
            "tiny",
            **(
                {
                    "device": "cpu", "num_kv_blocks": 5, "max_num_seqs": 3, "max_model_len": 96,
                    "max_num_batched_tokens": 40,
                }
                | options
            ),
        )  # fmt: skip
