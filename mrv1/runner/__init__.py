"""One step: request state, input batch, block tables, KV cache, forward, sampling, output."""

from mrv1.runner.async_output import AsyncOutput
from mrv1.runner.model_runner import KVListener, KVReady, KVReport, ModelRunner
from mrv1.runner.step import RowFailure, SlotRequest, StepOutput, StepPlan, TokenLogprobs

__all__ = [
    "AsyncOutput",
    "KVListener",
    "KVReady",
    "KVReport",
    "ModelRunner",
    "RowFailure",
    "SlotRequest",
    "StepOutput",
    "StepPlan",
    "TokenLogprobs",
]
