"""One step: request state, input batch, block tables, KV cache, forward, sampling, output."""

from mrv1.runner.async_output import AsyncOutput
from mrv1.runner.kv_report import KVGroupReport, KVReport, KVUsage
from mrv1.runner.model_runner import KVListener, KVReady, ModelRunner
from mrv1.runner.step import (
    RequestId,
    RowFailure,
    SlotRequest,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)

__all__ = [
    "AsyncOutput",
    "KVGroupReport",
    "KVListener",
    "KVReady",
    "KVReport",
    "KVUsage",
    "ModelRunner",
    "RequestId",
    "RowFailure",
    "SlotRequest",
    "StepOutput",
    "StepPlan",
    "TokenLogprobs",
]
