"""The runner executes one step: slot state, batch, KV cache, layers, sampling, output."""

from mrv1.runner.async_output import AsyncOutput
from mrv1.runner.kv_listener import EachRank, KVListener, KVReady, KVTokens
from mrv1.runner.model_runner import ModelRunner
from mrv1.runner.ranks import ParallelRunner
from mrv1.runner.report import KVGroupReport, KVReport, KVUsage
from mrv1.runner.step import (
    RequestId,
    RowFailure,
    SlotRequest,
    StagedFeatures,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)

__all__ = [
    "AsyncOutput",
    "EachRank",
    "KVGroupReport",
    "KVListener",
    "KVReady",
    "KVReport",
    "KVTokens",
    "KVUsage",
    "ModelRunner",
    "ParallelRunner",
    "RequestId",
    "RowFailure",
    "SlotRequest",
    "StagedFeatures",
    "StepOutput",
    "StepPlan",
    "TokenLogprobs",
]
